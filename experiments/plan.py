"""Plan a run before it starts: memory by part, seconds by phase, bytes over the wire, and what helps.

    python experiments/plan.py --config experiments/models/qwen3_30b_a3b_one_node.yaml
    python experiments/plan.py --config mine.yaml --gpus 8 --gpu-memory-gib 80 --json plan.json
    python experiments/plan.py --config mine.yaml --gpus 32 --search       # what fits, the fastest first
    python experiments/plan.py --write-headers experiments/models/*.yaml      # their first lines
    python experiments/plan.py --tables experiments/models/*.yaml             # those of docs/planning.md

Nothing is loaded but config.json; of Qwen3 models the shapes are known by name. The exit code is 0 where the
run fits, 1 where it does not, and 2 for settings that are wrong. Memory is the arithmetic by which
train_rl.py refuses a run (train_rl.plan_memory). Seconds are a roofline with the shares of the peaks that
stand below as constants; docs/planning.md compares them with public measurements.

Reading order: models, machines, the task, bytes, seconds, the plan, what helps, what is printed.
"""

import argparse
import functools
import itertools
import json
import math
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from transformers import AutoConfig, PretrainedConfig

import moe_model
import rollout
from experiments.bench.common import markdown
from moe_model import head_dim, is_moe_layer, num_experts_of
from runtime.memory import GIB, bytes_by_phase
from train_rl import (
    Config,
    check_model,
    load_config,
    needs_old_pass,
    plan_memory,
    syncs_own_experts,
    tokens_per_forward,
)

# ------------------------------------------------------------------------------------------------------------
# Models: values of the published config.json, by name
# ------------------------------------------------------------------------------------------------------------
QWEN3 = {
    "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": False,
    "attention_bias": False,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "num_key_value_heads": 4,
}  # fmt: skip
TIED = QWEN3 | {"tie_word_embeddings": True}
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "moe_intermediate_size",
)
KNOWN_MODELS = {  # {name: (what its family shares, its own SIZES)}
    "Qwen3-0.6B": (TIED, (1024, 3072, 28, 16)),
    "Qwen3-1.7B": (TIED, (2048, 6144, 28, 16)),
    "Qwen3-4B": (TIED, (2560, 9728, 36, 32)),
    "Qwen3-8B": (QWEN3, (4096, 12288, 36, 32)),
    "Qwen3-14B": (QWEN3, (5120, 17408, 40, 40)),
    "Qwen3-32B": (QWEN3, (5120, 25600, 64, 64)),
    "Qwen3-30B-A3B": (QWEN3_MOE, (2048, 6144, 48, 32, 768)),
    "Qwen3-235B-A22B": (QWEN3_MOE, (4096, 12288, 94, 64, 1536)),
}
CONTEXTS = {
    "": 40960,
    "-Base": 32768,
    "-Instruct-2507": 262144,
    "-Thinking-2507": 262144,
}  # {variant: tokens}


@functools.cache
def model_config(path: str) -> PretrainedConfig:
    """Read config.json of a folder, or take the shape of a known name; nothing is downloaded.

    ValueError if the path is neither.
    """
    if (Path(path) / "config.json").is_file():
        return moe_model.load_config(path)
    name, variant = re.fullmatch("(.*?)(-Base|-Instruct-2507|-Thinking-2507|)", Path(path).name).groups()
    if name not in KNOWN_MODELS:
        raise ValueError(
            f"model.path: {path} is no folder with a config.json, and no shape of {name} is known; known are "
            f"{', '.join(KNOWN_MODELS)}. Name one of them, or a folder with config.json alone, by --shape"
        )
    shared, sizes = KNOWN_MODELS[name]
    values = shared | dict(zip(SIZES, sizes, strict=False)) | {"max_position_embeddings": CONTEXTS[variant]}
    return AutoConfig.for_model("qwen3_moe" if shared is QWEN3_MOE else "qwen3", **values)


# ------------------------------------------------------------------------------------------------------------
# Machines: peaks of a GPU as its maker states them, and which share of them is reached
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Machine:
    """One kind of GPU and what connects several of them; bandwidths are per GPU and direction."""

    memory_gib: float  # as the driver reports it, which is less than what is written on the box
    tflops: float  # dense products in bfloat16
    memory_gbs: float
    node_gbs: float  # NVLink
    network_gbs: float  # between nodes
    gpus_per_node: int = 8


MACHINES = {
    "h100": Machine(79.6, 989, 3350, 450, 50),
    "h200": Machine(139.8, 989, 4800, 450, 50),
    "a100": Machine(79.3, 312, 2039, 300, 25),
    "b200": Machine(178.0, 2250, 8000, 900, 50),
}
# Shares of the peaks [ours: chosen once against the measurements in docs/planning.md]
PRODUCTS = 0.50  # dense layers, attention and head
EXPERT_PRODUCTS = 0.12  # grouped products of few rows each, with what permutes them
MEMORY = 0.60
LINKS = 0.60
ENGINE_STEP_S = 0.006  # vLLM's host work and launches per step, whatever the batch [ours: a guess]
ALL_REDUCE_S = 20e-6  # latency of one all-reduce in a tensor-parallel layer [ours: a guess]
LOADER_S_PER_MATRIX = 35e-6  # Python of vLLM's loader per expert's matrix [ours: a guess]
TAIL_SHARE = 8  # completions that still run in the tail of a rollout: one in so many [ours: a guess]
PROCESS_BYTES = 6 * GIB  # host memory of a rank: Python, CUDA, vLLM, its reward workers [ours: a guess]


# ------------------------------------------------------------------------------------------------------------
# What is planned
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Task:
    """What is planned: settings, model, machine, how many GPUs of it, and how long texts are in the mean."""

    config: Config
    model: PretrainedConfig
    machine: Machine
    num_gpus: int
    prompt_tokens: float
    new_tokens: float

    def with_settings(self, change: dict) -> "Task":
        """Return the same with other settings, {section.key: value}, or another number of "gpus"."""
        sections = {}
        for name, value in change.items():
            section, _, key = name.partition(".")
            if key:
                old = sections.get(section, getattr(self.config, section))
                sections[section] = old.model_copy(update={key: value})
        config = self.config.model_copy(update=sections)
        return replace(self, config=config, num_gpus=change.get("gpus", self.num_gpus))

    def setting(self, name: str) -> object:
        """Return a setting by its name, section.key."""
        section, key = name.split(".")
        return getattr(getattr(self.config, section), key)

    @functools.cached_property
    def counts(self) -> moe_model.ParameterCounts:
        """Return the parameters by what happens to them."""
        return moe_model.parameter_counts(self.model)

    @functools.cached_property
    def memory(self) -> tuple[dict[str, int], str | None]:
        """Return the bytes of a GPU by part, and what does not fit."""
        return plan_memory(self.config, self.model, self.num_gpus, int(self.machine.memory_gib * GIB))

    @property
    def parts(self) -> dict[str, int]:
        """Return the bytes of a GPU by part; `KV cache` may be negative: what is missing."""
        return self.memory[0]

    @property
    def phases(self) -> dict[str, int]:
        """Return the bytes of a GPU by phase."""
        return bytes_by_phase(self.parts, self.config.rollout.sleep_level > 0)

    @property
    def active_experts(self) -> float:
        """Return the parameters of experts that a token is multiplied with."""
        has_experts = self.counts.experts > 0
        return (
            self.counts.experts * self.model.num_experts_per_tok / num_experts_of(self.model)
            if has_experts
            else 0
        )

    @property
    def active(self) -> float:
        """Return all parameters that a token is multiplied with; of two embeddings that is only the head."""
        embedding = 0 if self.model.tie_word_embeddings else self.model.vocab_size * self.model.hidden_size
        return self.active_experts + self.counts.embeddings - embedding + self.counts.others

    @property
    def num_moe_layers(self) -> int:
        """Return the number of layers with experts."""
        return sum(is_moe_layer(self.model, layer) for layer in range(self.model.num_hidden_layers))

    @property
    def itemsize(self) -> int:
        """Return the bytes of a value in the policy."""
        return moe_model.itemsize_of(self.config.model)

    @property
    def completions(self) -> int:
        """Return the completions of a step."""
        return self.config.rollout.prompts_per_step * self.config.rollout.group_size

    @property
    def sequence_tokens(self) -> float:
        """Return the tokens of a prompt with its completion, in the mean."""
        return self.prompt_tokens + self.new_tokens

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of keys and values of a token."""
        return rollout.kv_bytes_per_token(self.model, self.config.rollout)

    @property
    def num_updates(self) -> int:
        """Return the updates of a step."""
        return self.config.train.minibatches_per_step * self.config.train.passes_per_rollout


def contradiction(task: Task) -> str | None:
    """Say what in the settings does not go with model or number of GPUs; None if all does."""
    config, num_gpus, experts = task.config, task.num_gpus, num_experts_of(task.model)
    ep_size, parallel = config.model.ep_size, config.rollout.tensor_parallel
    heads, kv_heads = task.model.num_attention_heads, task.model.num_key_value_heads
    per_step, minibatches = config.rollout.prompts_per_step, config.train.minibatches_per_step
    splits = 1 if config.rollout.expert_parallel else parallel
    whole = config.rollout.fp8 != "on" or rollout.splits_into_blocks(task.model, splits)
    checks = {
        f"model.ep_size {ep_size} must divide the number of GPUs, {num_gpus}": num_gpus % ep_size,
        f"model.ep_size {ep_size} must divide the {experts} experts": experts and experts % ep_size,
        f"model.ep_size {ep_size}: the model is dense, set it to 1": not experts and ep_size > 1,
        f"rollout.tensor_parallel {parallel} must divide the number of GPUs, {num_gpus}": num_gpus % parallel,
        f"rollout.tensor_parallel {parallel} must divide the {heads} heads": heads % parallel,
        f"rollout.tensor_parallel {parallel} and the {kv_heads} heads of keys: one must divide the other":
            kv_heads % parallel and parallel % kv_heads,
        f"rollout.prompts_per_step {per_step} must be a multiple of GPUs x train.minibatches_per_step, "
        f"{num_gpus} x {minibatches}": per_step % (num_gpus * minibatches),
        f"rollout.fp8 on with rollout.tensor_parallel {parallel}: the parts of an expert are no whole blocks "
        "of 128; set rollout.expert_parallel=true or a smaller tensor_parallel": not whole,
    }  # fmt: skip
    return next((message for message, is_wrong in checks.items() if is_wrong), None)


def why_not(task: Task) -> str | None:
    """Say why a run cannot be started so; None if it can."""
    return contradiction(task) or task.memory[1]


# ------------------------------------------------------------------------------------------------------------
# Bytes: of the host, over the wire
# ------------------------------------------------------------------------------------------------------------
def host_memory(task: Task) -> dict[str, int]:
    """Return the bytes of the host by part and rank: routes, a checkpoint on its way to disk, processes."""
    routes, config, parts = 0, task.config, task.parts
    if task.counts.experts and config.rollout.capture_routes != "off":  # ids of 1 byte, of 2 from 256 experts
        routes = task.num_moe_layers * task.model.num_experts_per_tok
        routes *= 1 if num_experts_of(task.model) < 256 else 2
    copies = 2 if config.algorithm.router_replay != "off" else 1  # captured, and replayed
    return {
        "routes to replay": int(task.completions / task.num_gpus * task.sequence_tokens * routes * copies),
        "routes beside the KV cache": max(0, parts["KV cache"]) // task.kv_bytes * routes,
        "checkpoint": parts["weights"] + parts["master weights"] + parts["AdamW"],
        "processes": PROCESS_BYTES,
    }


def sync_bytes(task: Task) -> dict[str, int]:
    """Return what one weight sync moves on a GPU.

    over the wire: experts of other ranks, which are gathered tensor by tensor, or none where the engine's
        ranks hold the experts that the trainer's do (rollout.expert_parallel, tensor_parallel = ep_size).
    handed over: bytes that the engine is given, in the policy's dtype.
    kept: those that it copies into its own weights, a part of a tensor under tensor parallelism.
    """
    experts, others = task.counts.experts, task.counts.embeddings + task.counts.others
    own = experts // task.config.model.ep_size
    given = own if syncs_own_experts(task.config) else experts
    return {
        "over the wire": (given - own) * task.itemsize,
        "handed over": (given + others) * task.itemsize,
        "kept": task.parts["engine weights"],
    }


def ring(ranks: float) -> float:
    """Return the share of the bytes that a rank sends in a reduce-scatter or all-gather."""
    return (ranks - 1) / ranks


def wire_bytes(task: Task) -> dict[str, int]:
    """Return the bytes that a GPU sends in a step, by purpose.

    ZeRO 1 reduces once an update (bfloat16: an all-reduce in bfloat16, which is twice a reduce-scatter),
    ZeRO 2 after each micro-batch. Experts go over num_gpus / ep_size ranks, all else over all of them. An
    all-to-all sends (ep_size - 1) / ep_size of K D values a token, there and back, in each pass over a layer.
    """
    config, train, ep_size = task.config, task.config.train, task.config.model.ep_size
    elements = (task.counts.embeddings + task.counts.others) * ring(task.num_gpus)
    elements += task.counts.experts / ep_size * ring(task.num_gpus / ep_size)
    tokens = task.completions / task.num_gpus * task.sequence_tokens
    reductions = task.num_updates * (2 if task.itemsize == 2 else 1)
    if train.zero_stage == 2:
        of_update = tokens / train.minibatches_per_step / tokens_per_forward(train, on_gpu=True)
        reductions = task.num_updates * math.ceil(of_update)
    passes = (2 + config.model.activation_checkpointing) * train.passes_per_rollout
    passes += needs_old_pass(config) + (config.algorithm.kl_coef > 0)
    rows = tokens * task.model.num_experts_per_tok if task.counts.experts else 0
    exchanged = 2 * rows * task.model.hidden_size * task.itemsize * ring(ep_size) * task.num_moe_layers
    return {
        "all-to-all": int(exchanged * passes),
        "gradients": int(elements * task.itemsize * reductions),
        "updated weights": int(elements * task.itemsize * task.num_updates),
        "sync": sync_bytes(task)["over the wire"],
    }


# ------------------------------------------------------------------------------------------------------------
# Seconds
# ------------------------------------------------------------------------------------------------------------
def link_seconds(task: Task, num_bytes: float, ranks: int) -> float:
    """Return the seconds of sending bytes in a group of ranks: over the network if it spans nodes."""
    machine = task.machine
    gbs = machine.node_gbs if ranks <= machine.gpus_per_node else machine.network_gbs
    return num_bytes / (gbs * 1e9 * LINKS)


def product_seconds(task: Task, tokens: float, context: float) -> float:
    """Return the seconds of a forward pass over tokens on one GPU; a backward counts as two.

    2 operations a parameter and token; attention adds 4 a layer, query element and earlier token.
    """
    model = task.model
    attention = 4 * model.num_hidden_layers * model.num_attention_heads * head_dim(model) * context
    dense = 2 * (task.active - task.active_experts) + attention
    weighted = dense / PRODUCTS + 2 * task.active_experts / EXPERT_PRODUCTS
    return tokens * weighted / (task.machine.tflops * 1e12)


def decode_step_seconds(task: Task, batch: float, context: float) -> float:
    """Return the seconds of one engine step that samples a token for each of `batch` completions.

    The larger of two: reading the weights, of the experts those that some token of the batch takes, with all
    keys and values; and the products.
    """
    settings, model, weights = task.config.rollout, task.model, task.parts["engine weights"]
    ranks = settings.tensor_parallel
    if task.counts.experts:
        untouched = (1 - model.num_experts_per_tok / num_experts_of(model)) ** batch
        weights *= 1 - untouched * task.counts.experts / sum(task.counts)
    reading = (weights + batch * context * task.kv_bytes) / (task.machine.memory_gbs * 1e9 * MEMORY)
    computing = product_seconds(task, batch, context) / ranks / (2 if settings.fp8 == "on" else 1)
    talking = 0.0
    if ranks > 1:
        sent = batch * model.hidden_size * 2 * 2 * ring(ranks)
        talking = 2 * model.num_hidden_layers * (ALL_REDUCE_S + link_seconds(task, sent, ranks))
    return max(reading, computing) + talking + ENGINE_STEP_S


def completions_of_engine(task: Task) -> float:
    """Return the completions that an engine has to sample in a step."""
    return task.completions / (task.num_gpus / task.config.rollout.tensor_parallel)


def completions_at_once(task: Task) -> float:
    """Return how many completions an engine works on: all it has, as many as it may or has room for."""
    room = task.parts["KV cache"] / task.kv_bytes / task.sequence_tokens
    return max(1.0, min(completions_of_engine(task), task.config.rollout.max_num_seqs, room))


def rollout_seconds(task: Task) -> float:
    """Return the seconds of a rollout: prompts, full batches, then a tail up to the longest completion."""
    settings, of_engine, batch = task.config.rollout, completions_of_engine(task), completions_at_once(task)
    prompts = of_engine / (settings.group_size if settings.prefix_caching else 1) * task.prompt_tokens
    prefill = product_seconds(task, prompts, task.prompt_tokens / 2) / settings.tensor_parallel
    steps = of_engine * task.new_tokens / batch
    bulk = steps * decode_step_seconds(task, batch, task.prompt_tokens + task.new_tokens / 2)
    tail_steps, late = settings.max_new_tokens - task.new_tokens, max(1.0, batch / TAIL_SHARE)
    return prefill + bulk + tail_steps * decode_step_seconds(task, late, settings.max_new_tokens)


def sync_seconds(task: Task) -> float:
    """Return the seconds of a weight sync: the wire, two copies of what is handed over, Python per matrix."""
    moved, ep_size = sync_bytes(task), task.config.model.ep_size
    copies = 2 * moved["handed over"] / (task.machine.memory_gbs * 1e9 * MEMORY)
    matrices = 3 * task.num_moe_layers * num_experts_of(task.model)
    matrices //= ep_size if syncs_own_experts(task.config) else 1
    return link_seconds(task, moved["over the wire"], ep_size) + copies + matrices * LOADER_S_PER_MATRIX


def phase_seconds(task: Task) -> dict[str, float]:
    """Return the seconds of a step by phase; verifiers are hidden behind the rollout."""
    config, sent = task.config, wire_bytes(task)
    tokens = task.completions / task.num_gpus * task.sequence_tokens
    one_pass = product_seconds(task, tokens, task.sequence_tokens / 2)
    before = needs_old_pass(config) + (config.algorithm.kl_coef > 0)  # passes without a backward
    passes = (3 + config.model.activation_checkpointing) * config.train.passes_per_rollout
    exchange = link_seconds(task, sent["all-to-all"], config.model.ep_size)
    reducing = link_seconds(task, sent["gradients"] + sent["updated weights"], task.num_gpus)
    # AdamW reads and writes weights and both moments, and reads gradients: 7 values for the 3 that it holds
    read = task.num_updates * 7 / 3 * (task.parts["master weights"] + task.parts["AdamW"])
    adamw = read / (task.machine.memory_gbs * 1e9 * MEMORY)
    share = before / (passes + before)
    return {
        "rollout": rollout_seconds(task),
        "logprobs": one_pass * before + exchange * share,
        "update": one_pass * passes + exchange * (1 - share) + reducing + adamw,
        "sync": sync_seconds(task),
    }


# ------------------------------------------------------------------------------------------------------------
# The plan, and what helps
# ------------------------------------------------------------------------------------------------------------
def sleep_needed(task: Task) -> str:
    """Say whether the engine has to sleep during updates."""
    if why_not(task.with_settings({"rollout.sleep_level": 0})) is None:
        return "no"
    asleep = why_not(task.with_settings({"rollout.sleep_level": 2})) is None
    return "rollout.sleep_level=2" if asleep else "does not suffice"


def in_gib(parts: dict[str, int]) -> dict[str, float]:
    """Return bytes as GiB with two digits."""
    return {name: round(value / GIB, 2) for name, value in parts.items()}


def plan_run(task: Task) -> dict:
    """Return the whole plan as plain values; `fits` says whether the run can be started so."""
    reason, host, seconds = why_not(task), host_memory(task), phase_seconds(task)
    step, tokens = sum(seconds.values()), task.completions * task.sequence_tokens
    per_node = min(task.num_gpus, task.machine.gpus_per_node)
    return {
        "fits": reason is None,
        "why_not": reason,
        "advice": [] if reason is None else advice(task),
        "sleep": sleep_needed(task),
        "memory_gib": in_gib(task.parts),
        "phases_gib": in_gib(task.phases),
        "host_gib": in_gib(host) | {"of a node": round(sum(host.values()) * per_node / GIB, 1)},
        "kv_cache_tokens": max(0, task.parts["KV cache"]) // task.kv_bytes,
        "completions_at_once": round(completions_at_once(task)),
        "seconds": {name: round(value, 2) for name, value in seconds.items()} | {"step": round(step, 1)},
        "tokens_per_step": int(tokens),
        "tokens_per_second_and_gpu": round(tokens / step / task.num_gpus, 1),
        "wire_bytes_per_step": wire_bytes(task),
        "sync_bytes": sync_bytes(task),
        "parameters": task.counts._asdict() | {"active": int(task.active)},
        "gpus": task.num_gpus,
        "machine": asdict(task.machine),
        "mean_tokens": {"prompt": task.prompt_tokens, "completion": task.new_tokens},
    }


def single_changes(task: Task) -> Iterator[dict]:
    """Yield changes of one setting that save memory, the cheapest in speed first."""
    config = task.config
    wanted = {"rollout.kv_cache_gib": None, "rollout.sleep_level": 2, "model.activation_checkpointing": True}
    yield from ({name: value} for name, value in wanted.items() if task.setting(name) != value)
    largest = min(task.num_gpus, task.machine.gpus_per_node)
    parallel, ep_size = config.rollout.tensor_parallel, config.model.ep_size
    yield from ({"rollout.tensor_parallel": n} for n in powers(largest) if n != parallel)
    if task.counts.experts:
        yield from ({"model.ep_size": n} for n in powers(task.num_gpus) if n != ep_size)
    tokens = tokens_per_forward(config.train, on_gpu=True)
    yield from ({"train.micro_batch_tokens": n} for n in (16384, 8192, 4096) if n < tokens)
    if config.train.zero_stage == 1:
        yield {"train.zero_stage": 2}
    if config.rollout.fp8 != "on":
        yield {"rollout.fp8": "on"}


def powers(most: int) -> list[int]:
    """List the powers of two up to `most`."""
    return [2**i for i in range(most.bit_length())]


def as_settings(change: dict) -> str:
    """Write a change as it stands on the command line."""
    text = lambda value: value if isinstance(value, str) else json.dumps(value)
    return " ".join(f"--gpus {v}" if name == "gpus" else f"{name}={text(v)}" for name, v in change.items())


def advice(task: Task, most: int = 3) -> list[str]:
    """List what makes the run fit: fewest changes first, the cheapest in speed first; else more GPUs."""
    singles = [*single_changes(task)]
    for number in (1, 2, 3):
        found = []
        for chosen in itertools.combinations(singles, number):
            change = {key: value for one in chosen for key, value in one.items()}
            if len(change) == number and why_not(task.with_settings(change)) is None:
                found.append(as_settings(change))
            if len(found) == most:
                break
        if found:
            return found
    for num_gpus in (task.num_gpus * 2**i for i in range(1, 8)):
        if options := search(task.with_settings({"gpus": num_gpus, "rollout.kv_cache_gib": None}), most=1):
            change = {"rollout.kv_cache_gib": None} | options[0][0]
            change = {name: value for name, value in change.items() if task.setting(name) != value}
            return [as_settings({"gpus": num_gpus} | change)]
    return ["a larger GPU, a shorter rollout.max_new_tokens or a smaller model"]


def search(task: Task, most: int = 5) -> list[tuple[dict, Task]]:
    """Return (settings, task) of the fastest that fit, of all sizes that divide experts and GPUs."""
    inside = [size for size in powers(task.machine.gpus_per_node) if task.num_gpus % size == 0]
    grid = {
        "model.ep_size": powers(task.num_gpus) if task.counts.experts else [1],
        "rollout.tensor_parallel": inside,
        "train.micro_batch_tokens": (32768, 16384, 8192),
        "model.activation_checkpointing": (False, True),
        "rollout.sleep_level": (0, 2),
        "train.zero_stage": (1, 2),
    }
    found = []
    for number, values in enumerate(itertools.product(*grid.values())):
        change = dict(zip(grid, values, strict=True))
        tried = task.with_settings(change)
        if why_not(tried) is None:
            found.append((sum(phase_seconds(tried).values()), number, change, tried))
    return [(change, tried) for *_, change, tried in sorted(found, key=lambda one: one[:2])[:most]]


# ------------------------------------------------------------------------------------------------------------
# What is printed
# ------------------------------------------------------------------------------------------------------------
def describe(plan: dict) -> str:
    """Write a plan for people."""
    active, total = (
        plan["parameters"]["active"],
        sum(plan["parameters"].values()) - plan["parameters"]["active"],
    )
    tables = {
        "GiB of a GPU by part": plan["memory_gib"],
        "GiB of a GPU by phase": plan["phases_gib"],
        "GiB of the host by part and rank": plan["host_gib"],
        "seconds of a step": plan["seconds"] if plan["fits"] else {},
        "GB that a GPU sends in a step": {n: v / 1e9 for n, v in plan["wire_bytes_per_step"].items()},
    }
    lines = [
        f"{total / 1e9:.2f} billion parameters, {active / 1e9:.2f} active; {plan['gpus']} GPUs of "
        f"{plan['machine']['memory_gib']:g} GiB; prompts of {plan['mean_tokens']['prompt']:,.0f} and "
        f"completions of {plan['mean_tokens']['completion']:,.0f} tokens in the mean",
    ]
    for title, values in tables.items():
        if values:
            lines += ["", title, *(f"  {name:<27}{value:>9.2f}" for name, value in values.items())]
    if not plan["fits"]:
        tried = [f"  try {line}" for line in plan["advice"]]
        return "\n".join([*lines, "", f"it does not fit: {plan['why_not']}", *tried])
    return "\n".join([
        *lines, "",
        f"{plan['tokens_per_second_and_gpu']:,} tokens a second and GPU over a whole step; an engine works "
        f"on {plan['completions_at_once']} completions at once, its cache holds {plan['kv_cache_tokens']:,} "
        "tokens",
        f"sleep during updates needed: {plan['sleep']}",
        "it fits",
    ])  # fmt: skip


def describe_search(found: list[tuple[dict, Task]]) -> str:
    """Write the settings of a search, the fastest first."""
    lines = [
        f"{sum(phase_seconds(tried).values()):>9.1f} s {max(tried.phases.values()) / GIB:>7.1f} GiB  "
        f"{as_settings(change)}"
        for change, tried in found
    ]
    return "\n".join(lines) or "nothing fits"


def tables(tasks: dict[str, Task]) -> list[str]:
    """Return the lines of the two tables of docs/planning.md: configurations, and paths of a weight sync."""
    columns = ["settings", "GPUs", "standing", "update", "engine weights", "KV cache", "host", "rollout, s",
               "logprobs, s", "update, s", "sync, s", "step, s"]  # fmt: skip
    rows = []
    for name, task in tasks.items():
        gib, seconds, plan = in_gib(task.parts), phase_seconds(task), plan_run(task)
        standing = sum(gib[part] for part in ("weights", "gradients", "master weights", "AdamW"))
        passing = gib["activations"] + gib["on the way back"]
        sizes = [standing, passing, gib["engine weights"], gib["KV cache"], plan["host_gib"]["of a node"]]
        times = [*seconds.values(), sum(seconds.values())]
        rows.append(
            [f"`{name}`", task.num_gpus, *(f"{size:.1f}" for size in sizes), *(f"{s:.0f}" for s in times)]
        )
    syncs = [
        sync_row(*given) for given in itertools.product(("Qwen3-30B-A3B", "Qwen3-235B-A22B"), (8, 16), (0, 1))
    ]
    names = ["model", "`ep_size`", "path", "over the wire, GB", "handed over, GB", "kept, GB", "seconds"]
    return [*markdown(columns, rows), "", *markdown(names, syncs)]


def sync_row(name: str, ep_size: int, own_experts: bool) -> list[str]:
    """Plan one weight sync between H100s: experts gathered from the other ranks, or each rank's own."""
    settings = [
        "data.train=[{path: none}]", f"model.path={name}", f"model.ep_size={ep_size}",
        f"rollout.tensor_parallel={ep_size}", f"rollout.expert_parallel={json.dumps(bool(own_experts))}",
    ]  # fmt: skip
    task = Task(load_config(settings), model_config(name), MACHINES["h100"], ep_size, 200, 2000)
    figures = [f"{value / 1e9:.1f}" for value in sync_bytes(task).values()]
    return [
        name,
        ep_size,
        "own experts" if own_experts else "gathered",
        *figures,
        f"{sync_seconds(task):.1f}",
    ]


# ---- the first lines of a YAML ----
SAID = re.compile(  # GPUs, machine, model, mean tokens of prompts and of completions
    r"# Machine: (\d+) x (\w+); shape of (\S+); mean prompt ([\d,]+), completion ([\d,]+) tokens"
)


def comment_of(file: Path) -> list[str]:
    """Return the comment lines that a YAML begins with."""
    return list(itertools.takewhile(lambda line: line.startswith("#"), file.read_text().splitlines()))


def header(file: Path) -> list[str]:
    """Return the comment of a YAML: its own first lines, then command, machine and what the plan expects."""
    task, comment = read_task(parse_args(["--config", str(file)])), comment_of(file)
    said = next(line for line in comment if SAID.match(line))
    plan, per_node = plan_run(task), task.machine.gpus_per_node
    own = [*itertools.takewhile(lambda line: not line.startswith("#   torchrun"), comment)]
    num_nodes = -(-task.num_gpus // per_node)
    nodes = f" --nnodes={num_nodes} --node-rank=R --master-addr=HOST" if num_nodes > 1 else ""
    phases = ", ".join(f"{name} {gib:.0f}" for name, gib in plan["phases_gib"].items())
    seconds = {name: s for name, s in plan["seconds"].items() if name != "step" and s >= 0.5}
    verdict = "" if plan["fits"] else f" It does not fit: {plan['why_not']}."
    expected = (
        f"Expected by experiments/plan.py: of {task.machine.memory_gib:.0f} GiB of a GPU {phases}, with "
        f"{plan['memory_gib']['KV cache']:.0f} of keys and values in a rollout; "
        f"{plan['host_gib']['of a node']:.0f} GiB of a host; "
        f"a step of {plan['tokens_per_step'] / 1e6:.2f} million tokens in "
        f"{plan['seconds']['step']:.0f} s ({', '.join(f'{name} {s:.0f}' for name, s in seconds.items())}), "
        f"within a factor of two.{verdict}"
    )
    return [
        *own,
        f"#   torchrun{nodes} --nproc-per-node={min(task.num_gpus, per_node)} train_rl.py \\",
        f"#       --config {file.resolve().relative_to(ROOT)}",
        said,
        *textwrap.wrap(expected, 106, initial_indent="# ", subsequent_indent="# "),
    ]


def write_header(file: Path) -> None:
    """Replace the comment that a YAML begins with."""
    settings = file.read_text().splitlines()[len(comment_of(file)) :]
    file.write_text("\n".join([*header(file), *settings]) + "\n")


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------
def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("experiments/plan.py", description=__doc__, formatter_class=keep_lines)
    add = parser.add_argument
    add("--config", type=Path, action="append", default=[], metavar="FILE", help="as for train_rl.py")
    add("--gpus", type=int, help="GPUs of all nodes (default: what the file says, or the fewest)")
    add("--machine", choices=MACHINES, help="kind of GPU (default: what the file says, or h100)")
    add("--shape", help="known model or folder to plan with (default: what the file says, or model.path)")
    add("--gpu-memory-gib", type=float, help="memory of a GPU (default: the machine's)")
    add("--gpus-per-node", type=int, help="GPUs that NVLink connects (default: the machine's)")
    add("--network-gbs", type=float, help="GB/s of a GPU to another node (default: the machine's)")
    add(
        "--prompt-tokens", type=float, help="mean of prompts (default: what the file says, or half the limit)"
    )
    add("--new-tokens", type=float, help="mean of completions (default: the same)")
    add("--search", action="store_true", help="propose ep_size, tensor_parallel, micro_batch_tokens and more")
    add("--json", type=Path, metavar="FILE", help="write the plan here")
    add(
        "--write-headers", type=Path, nargs="+", metavar="FILE", help="write the first lines of each, no plan"
    )
    add("--tables", type=Path, nargs="+", metavar="FILE", help="print a table with a row for each, and syncs")
    add("settings", nargs="*", metavar="section.key=value", help="single settings, over the files'")
    args = parser.parse_intermixed_args(argv)
    if bool(args.config) + bool(args.write_headers) + bool(args.tables) != 1:
        parser.error("give one of --config, --write-headers and --tables")
    return args


def read_task(args: argparse.Namespace) -> Task:
    """Return what is to be planned; ValueError for what is wrong.

    The line "# Machine: ..." of the last file says what the command line does not.
    """
    config = load_config(
        [*(part for file in args.config for part in ("--config", str(file))), *args.settings]
    )
    said = next((m.groups() for m in map(SAID.match, comment_of(args.config[-1])) if m), [None] * 5)
    number = lambda text: float(text.replace(",", "")) if text else None
    model = model_config(args.shape or said[2] or config.model.path)
    check_model(config, model)
    prompt_tokens = args.prompt_tokens or number(said[3]) or config.rollout.max_prompt_tokens / 2
    new_tokens = args.new_tokens or number(said[4]) or config.rollout.max_new_tokens / 2
    limits = (config.rollout.max_prompt_tokens, config.rollout.max_new_tokens)
    if not (0 < prompt_tokens <= limits[0] and 0 < new_tokens <= limits[1]):
        raise ValueError(
            f"mean tokens of prompts {prompt_tokens:g} and completions {new_tokens:g} must be above 0 and at "
            f"most rollout.max_prompt_tokens {limits[0]} and rollout.max_new_tokens {limits[1]}: set "
            "--prompt-tokens and --new-tokens"
        )
    num_gpus = args.gpus
    if num_gpus is None:
        num_gpus = int(said[0] or math.lcm(config.model.ep_size, config.rollout.tensor_parallel))
    own = {name: getattr(args, name) for name in ("gpus_per_node", "network_gbs")}
    own = {
        name: value
        for name, value in (own | {"memory_gib": args.gpu_memory_gib}).items()
        if value is not None
    }
    for name, value in {"gpus": num_gpus, **own}.items():
        if value <= 0:
            raise ValueError(f"{name} {value:g} must be above 0")
    machine = replace(MACHINES[args.machine or said[1] or "h100"], **own)
    return Task(config, model, machine, num_gpus, prompt_tokens, new_tokens)


def main(argv: list[str] | None = None) -> int:
    """Read the command line, plan, print; return the exit code."""
    args = parse_args(argv)
    if args.write_headers:
        for file in args.write_headers:
            write_header(file)
        return 0
    if args.tables:
        tasks = {file.stem: read_task(parse_args(["--config", str(file)])) for file in args.tables}
        print("\n".join(tables(tasks)))
        return 0
    task = read_task(args)
    if args.search:
        found = search(task)
        print(describe_search(found))
        result = [{"settings": as_settings(change), **plan_run(tried)} for change, tried in found]
    else:
        result = plan_run(task)
        print(describe(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result and (args.search or result["fits"]) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        print(f"experiments/plan.py: {error}", file=sys.stderr)
        sys.exit(2)
