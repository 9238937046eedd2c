"""Plan a run before it starts: memory by part, seconds by phase, bytes over the wire, and what helps.

    python experiments/plan.py --config experiments/models/qwen3_30b_a3b_one_node.yaml
    python experiments/plan.py --config mine.yaml --gpus 8 --gpu-memory-gib 80 --json plan.json
    python experiments/plan.py --config mine.yaml --gpus 32 --search       # what fits, the fastest first
    python experiments/plan.py --write-headers experiments/models/*.yaml      # their first lines
    python experiments/plan.py --tables experiments/models/*.yaml             # those of docs/gpu.md

Nothing is loaded but config.json; of Qwen3 models the shapes are known by name. The exit code is 0 where the
run fits (with --search: where anything does), 1 where it does not, and 2 for settings that are wrong. Memory
of a GPU is the arithmetic by which train_rl.py refuses a run (train_rl.plan_memory); the host's is only
planned. Seconds are a roofline with the shares of the peaks that stand below as constants; docs/gpu.md
compares them with public measurements.

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
    stage_configs,
    syncs_own_experts,
    tokens_per_forward,
    widest,
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
    host_gbs: float  # PCIe
    gpus_per_node: int = 8
    host_gib: float | None = None  # memory of a node's host; None: HOST_GIB_PER_GPU for each GPU


MACHINES = {
    "h100": Machine(79.6, 989, 3350, 450, 50, 64),
    "h200": Machine(139.8, 989, 4800, 450, 50, 64),
    "a100": Machine(79.3, 312, 2039, 300, 25, 32),
    "b200": Machine(178.0, 2250, 8000, 900, 50, 64),
}
# Shares of the peaks [ours: chosen once against the measurements in docs/gpu.md]
PRODUCTS = 0.50  # dense layers, attention and head
EXPERT_PRODUCTS = 0.12  # grouped products of few rows each, with what permutes them
MEMORY = 0.60
LINKS = 0.60
ENGINE_STEP_S = 0.006  # vLLM's host work and launches per step, whatever the batch [ours: a guess]
ALL_REDUCE_S = 20e-6  # latency of one all-reduce in a tensor-parallel layer [ours: a guess]
LOADER_S_PER_MATRIX = 35e-6  # Python of vLLM's loader per expert's matrix [ours: a guess]
TAIL_SHARE = 8  # completions that still run in the tail of a rollout: one in so many [ours: a guess]
CORE_GBS = 20  # a core of the host in AdamW; a rank has one (OMP_NUM_THREADS=1) [ours: docs/gpu.md has 23]
HOST_GIB_PER_GPU = 240  # about 2 TB for eight GPUs, as makers sell their nodes
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
    def rows_together(self) -> float:
        """Return how many completions of a group share its prompt in the trainer, in the mean; 1: none do.

        A group stays together where that saves more of the prompt than it adds to attention's grid, whose
        rows are as long as the longest completion. Taken to be so where prompts are as long as completions.
        """
        if not self.config.train.share_prompts or self.prompt_tokens < self.new_tokens:
            return 1
        rows = tokens_per_forward(self.config.train, on_gpu=True) / self.sequence_tokens
        return max(1, min(rows, self.config.rollout.group_size))

    @property
    def trained_tokens(self) -> float:
        """Return the tokens of a step that a GPU's trainer computes in one pass."""
        return self.completions / self.num_gpus * (self.prompt_tokens / self.rows_together + self.new_tokens)

    @property
    def grid_tokens(self) -> float:
        """Return the tokens of a step that the trainer's attention works on, shared prompts or not."""
        return self.completions / self.num_gpus * self.sequence_tokens

    @property
    def owned(self) -> int:
        """Return the parameters that a rank updates."""
        return sum(self.counts) // self.num_gpus

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of keys and values of a token."""
        return rollout.kv_bytes_per_token(self.model, self.config.rollout)

    @property
    def num_updates(self) -> int:
        """Return the updates of a step."""
        return self.config.train.num_updates


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
    return contradiction(task) or task.memory[1] or why_host_too_small(task)


def why_host_too_small(task: Task) -> str | None:
    """Say what the host of a node lacks; None if it suffices."""
    needed, num_gpus = node_bytes(task) / GIB, gpus_of_node(task)
    room = task.machine.host_gib or HOST_GIB_PER_GPU * num_gpus
    if needed <= room:
        return None
    return f"the host of a node needs {needed:.0f} GiB for {num_gpus} GPUs and has {room:.0f}"


# ------------------------------------------------------------------------------------------------------------
# Bytes: of the host, over the wire
# ------------------------------------------------------------------------------------------------------------
def host_memory(task: Task) -> dict[str, int]:
    """Return the bytes of the host by part and rank.

    routes: captured ones, and what is replayed. offloaded optimizer: train.offload_optimizer. checkpoint: the
    larger of a file of weights on its way to disk, and of the float32 weights and AdamW's state of the rank,
    12 bytes a parameter, which a run that is resumed reads whole. processes: all else.
    """
    routes, config, parts = 0, task.config, task.parts
    if task.counts.experts and config.rollout.capture_routes != "off":  # ids of 1 byte, of 2 from 256 experts
        routes = task.num_moe_layers * task.model.num_experts_per_tok
        routes *= 1 if num_experts_of(task.model) < 256 else 2
    copies = 2 if config.algorithm.router_replay != "off" else 1  # captured, and replayed
    offloads = config.train.offload_optimizer
    return {
        "routes to replay": int(task.grid_tokens * routes * copies),
        "routes beside the KV cache": max(0, parts["KV cache"]) // task.kv_bytes * routes,
        "offloaded optimizer":
            offloads * moe_model.offloaded_bytes(task.model, config.model, task.num_gpus),
        "checkpoint": max(min(parts["weights"], moe_model.SHARD_BYTES), 12 * task.owned),
        "processes": PROCESS_BYTES,
    }  # fmt: skip


def gpus_of_node(task: Task) -> int:
    """Return the GPUs of a run that share a host."""
    return min(task.num_gpus, task.machine.gpus_per_node)


def node_bytes(task: Task) -> int:
    """Return the bytes of the host of a node."""
    return sum(host_memory(task).values()) * gpus_of_node(task)


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
    return max(0.0, (ranks - 1) / ranks)


def num_reductions(task: Task) -> int:
    """Return how often gradients are reduced in a step: ZeRO 1 once an update, ZeRO 2 every micro-batch."""
    train = task.config.train
    if train.zero_stage == 1:
        return task.num_updates
    of_micro_batch = max(tokens_per_forward(train, on_gpu=True), task.sequence_tokens)
    return task.num_updates * math.ceil(task.grid_tokens / train.minibatches_per_step / of_micro_batch)


def wire_bytes(task: Task) -> dict[str, int]:
    """Return the bytes that a GPU sends in a step, by purpose.

    DeepSpeed reduces gradients by an all-reduce in the policy's dtype, of two halves, reduce-scatter and
    all-gather, and gathers updated weights once more. Experts go over num_gpus / ep_size ranks, all else over
    all of them. An all-to-all sends (ep_size - 1) / ep_size of K D values a token, there and back, in each
    pass over a layer.
    """
    config, train, ep_size = task.config, task.config.train, task.config.model.ep_size
    elements = (task.counts.embeddings + task.counts.others) * ring(task.num_gpus)
    elements += task.counts.experts / ep_size * ring(task.num_gpus / ep_size)
    passes = (2 + config.model.activation_checkpointing) * train.passes_per_rollout
    passes += needs_old_pass(config) + (config.algorithm.kl_coef > 0)
    rows = task.trained_tokens * task.model.num_experts_per_tok if task.counts.experts else 0
    exchanged = 2 * rows * task.model.hidden_size * task.itemsize * ring(ep_size) * task.num_moe_layers
    return {
        "all-to-all": int(exchanged * passes),
        "gradients": int(2 * elements * task.itemsize * num_reductions(task)),
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


def product_seconds(task: Task, tokens: float, context: float, grid_tokens: float | None = None) -> float:
    """Return the seconds of a forward pass over tokens on one GPU; a backward counts as two.

    2 operations a parameter and token; attention adds 4 a layer, query element and earlier token, for all of
    grid_tokens (default: tokens).
    """
    model = task.model
    attention = 4 * model.num_hidden_layers * model.num_attention_heads * head_dim(model) * context
    dense = 2 * (task.active - task.active_experts) / PRODUCTS + 2 * task.active_experts / EXPERT_PRODUCTS
    operations = tokens * dense + (grid_tokens or tokens) * attention / PRODUCTS
    return operations / (task.machine.tflops * 1e12)


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
    """Return the seconds of a rollout: prompts, full batches, then a tail up to the longest completion.

    In the tail one completion in TAIL_SHARE of a batch still runs, or fewer, so that it samples at most half
    of all tokens; full batches sample the others.
    """
    settings, of_engine, batch = task.config.rollout, completions_of_engine(task), completions_at_once(task)
    prompts = of_engine / (settings.group_size if settings.prefix_caching else 1) * task.prompt_tokens
    prefill = product_seconds(task, prompts, task.prompt_tokens / 2) / settings.tensor_parallel
    tokens, tail_steps = of_engine * task.new_tokens, settings.max_new_tokens - task.new_tokens
    late = max(1.0, min(batch / TAIL_SHARE, tokens / 2 / max(1.0, tail_steps)))
    steps = max(0.0, tokens - late * tail_steps) / batch
    bulk = steps * decode_step_seconds(task, batch, task.prompt_tokens + task.new_tokens / 2)
    return prefill + bulk + tail_steps * decode_step_seconds(task, late, settings.max_new_tokens)


def sync_seconds(task: Task) -> float:
    """Return the seconds of a weight sync: the wire, two copies of what is handed over, Python per matrix."""
    moved, ep_size = sync_bytes(task), task.config.model.ep_size
    copies = 2 * moved["handed over"] / (task.machine.memory_gbs * 1e9 * MEMORY)
    matrices = 3 * task.num_moe_layers * num_experts_of(task.model)
    matrices //= ep_size if syncs_own_experts(task.config) else 1
    return link_seconds(task, moved["over the wire"], ep_size) + copies + matrices * LOADER_S_PER_MATRIX


def offload_cost(task: Task) -> dict[str, float]:
    """Return what train.offload_optimizer adds to a step; all 0 without it.

    A parameter of the rank's share crosses the bus as a float32 gradient and comes back in the policy's
    dtype; a float32 policy's gradient goes to the host and back in every micro-batch. On one core the host
    scales the gradient (8 bytes), takes AdamW's step (28), and reads and writes what it sends back.
    """
    updated = task.num_updates * task.owned * task.config.train.offload_optimizer
    gradients = 4 if task.itemsize == 2 else 8 * num_reductions(task) / task.num_updates
    crossing = updated * (gradients + task.itemsize) / 1e9
    return {
        "GB over PCIe": crossing,
        "seconds of PCIe": crossing / (task.machine.host_gbs * LINKS),
        "seconds of AdamW": updated * (8 + 28 + 4 + task.itemsize) / 1e9 / CORE_GBS,
    }


def phase_seconds(task: Task) -> dict[str, float]:
    """Return the seconds of a step by phase; verifiers are hidden behind the rollout."""
    config, sent, offload = task.config, wire_bytes(task), offload_cost(task)
    one_pass = product_seconds(task, task.trained_tokens, task.sequence_tokens / 2, task.grid_tokens)
    before = needs_old_pass(config) + (config.algorithm.kl_coef > 0)  # passes without a backward
    forwards = (1 + config.model.activation_checkpointing) * config.train.passes_per_rollout
    passes = forwards + 2 * config.train.passes_per_rollout  # a backward has twice the products of a forward
    exchange = link_seconds(task, sent["all-to-all"], config.model.ep_size)
    reducing = link_seconds(task, sent["gradients"] + sent["updated weights"], task.num_gpus)
    # AdamW reads and writes weights and both averages, and reads gradients: 7 values for the 3 that it holds
    read = task.num_updates * 7 / 3 * (task.parts["master weights"] + task.parts["AdamW"])
    adamw = read / (task.machine.memory_gbs * 1e9 * MEMORY)
    adamw += offload["seconds of PCIe"] + offload["seconds of AdamW"]
    share = before / (before + forwards + config.train.passes_per_rollout)  # a backward sends as a forward
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


def activation_bytes(task: Task) -> int:
    """Return what a micro-batch keeps whose prompts and completions have their mean lengths."""
    rows = max(1, int(tokens_per_forward(task.config.train, on_gpu=True) / task.sequence_tokens))
    shared = rows * task.prompt_tokens * (1 - 1 / task.rows_together)
    sizes = int(rows * task.sequence_tokens), "cuda", int(shared)
    return moe_model.passing_bytes(task.model, task.config.model, *sizes)["activations"]


def in_gib(parts: dict[str, int]) -> dict[str, float]:
    """Return bytes as GiB with two digits."""
    return {name: round(value / GIB, 2) for name, value in parts.items()}


def plan_run(task: Task) -> dict:
    """Return the whole plan as plain values; `fits` says whether the run can be started so."""
    reason, seconds = why_not(task), phase_seconds(task)
    step, tokens = sum(seconds.values()), task.completions * task.sequence_tokens
    return {
        "fits": reason is None,
        "why_not": reason,
        "advice": [] if reason is None else advice(task),
        "sleep": sleep_needed(task),
        "memory_gib": in_gib(task.parts),
        "phases_gib": in_gib(task.phases),
        "host_gib": in_gib(host_memory(task)) | {"of a node": round(node_bytes(task) / GIB, 1)},
        "kv_cache_tokens": max(0, task.parts["KV cache"]) // task.kv_bytes,
        "completions_at_once": round(completions_at_once(task)),
        "seconds": {name: round(value, 2) for name, value in seconds.items()} | {"step": round(step, 1)},
        "offload": {name: round(value, 2) for name, value in offload_cost(task).items()},
        "tokens_per_step": int(tokens),
        "trained_tokens_per_gpu": int(task.trained_tokens),
        "grid_tokens_per_gpu": int(task.grid_tokens),
        "mean_activations_gib": round(activation_bytes(task) / GIB, 2),
        "tokens_per_second_and_gpu": round(tokens / step / task.num_gpus, 1),
        "wire_bytes_per_step": wire_bytes(task),
        "sync_bytes": sync_bytes(task),
        "parameters": task.counts._asdict() | {"active": int(task.active)},
        "gpus": task.num_gpus,
        "machine": asdict(task.machine),
        "mean_tokens": {"prompt": task.prompt_tokens, "completion": task.new_tokens},
    }


def single_changes(task: Task) -> Iterator[dict]:
    """Yield changes of one setting that save memory, or that a contradiction asks for."""
    config = task.config
    wanted = {"rollout.kv_cache_gib": None, "rollout.sleep_level": 2, "model.activation_checkpointing": True}
    yield from ({name: value} for name, value in wanted.items() if task.setting(name) != value)
    largest = min(task.num_gpus, task.machine.gpus_per_node)
    parallel, ep_size = config.rollout.tensor_parallel, config.model.ep_size
    yield from ({"rollout.tensor_parallel": n} for n in powers(largest) if n != parallel)
    sizes = powers(task.num_gpus) if task.counts.experts else [1]
    yield from ({"model.ep_size": n} for n in sizes if n != ep_size)
    tokens = tokens_per_forward(config.train, on_gpu=True)
    yield from ({"train.micro_batch_tokens": n} for n in (16384, 8192, 4096) if n < tokens)
    if config.train.zero_stage == 1:
        yield {"train.zero_stage": 2}
    if not config.train.offload_optimizer:
        offloaded = {"train.zero_stage": 2, "train.offload_optimizer": True}
        yield {name: value for name, value in offloaded.items() if task.setting(name) != value}
    if config.rollout.fp8 != "on":
        yield {"rollout.fp8": "on"}
    yield from dealt_prompts(task)


def dealt_prompts(task: Task) -> Iterator[dict]:
    """Yield the next number of prompts that all GPUs and updates get the same share of, if it is another."""
    unit = task.num_gpus * task.config.train.minibatches_per_step
    if odd := task.config.rollout.prompts_per_step % unit:
        yield {"rollout.prompts_per_step": task.config.rollout.prompts_per_step - odd + unit}


def powers(most: int) -> list[int]:
    """List the powers of two up to `most`."""
    return [2**i for i in range(most.bit_length())]


def as_settings(change: dict) -> str:
    """Write a change as it stands on the command line."""
    text = lambda value: value if isinstance(value, str) else json.dumps(value)
    return " ".join(f"--gpus {v}" if name == "gpus" else f"{name}={text(v)}" for name, v in change.items())


def advice(task: Task, most: int = 3) -> list[str]:
    """List what makes the run fit: fewest changes first, the fastest first; else more GPUs.

    Each names other settings, with the values that are fastest. Of single changes all are listed.
    """
    singles = [*single_changes(task)]
    for number in (1, 2, 3):
        found = {}
        for chosen in itertools.combinations(singles, number):
            change = {name: value for one in chosen for name, value in one.items()}
            tried = task.with_settings(change)
            if len(change) == sum(map(len, chosen)) and why_not(tried) is None:
                names, seconds = frozenset(change), sum(phase_seconds(tried).values())
                found[names] = min(found.get(names, (math.inf, "")), (seconds, as_settings(change)))
        if found:
            return [text for _, text in sorted(found.values())[: len(singles) if number == 1 else most]]
    return more_gpus(task) or ["a larger GPU, a shorter rollout.max_new_tokens or a smaller model"]


def more_gpus(task: Task) -> list[str]:
    """Return the settings that are fastest on the fewest GPUs on which any fit, twice as many or more."""
    for num_gpus in (task.num_gpus * 2**i for i in range(1, 8)):
        grown = task.with_settings({"gpus": num_gpus, "rollout.kv_cache_gib": None})
        for prompts in dealt_prompts(grown):
            grown = grown.with_settings(prompts)
        if options := search(grown, most=1):
            names = ("rollout.kv_cache_gib", "rollout.prompts_per_step", *options[0][0])
            change = {name: options[0][1].setting(name) for name in names}
            change = {name: value for name, value in change.items() if task.setting(name) != value}
            return [as_settings({"gpus": num_gpus} | change)]
    return []


OPTIMIZERS = [  # where gradients and optimizer are, the fastest first
    {"train.zero_stage": 1, "train.offload_optimizer": False},
    {"train.zero_stage": 2, "train.offload_optimizer": False},
    {"train.zero_stage": 2, "train.offload_optimizer": True},
]


def search(task: Task, most: int = 5) -> list[tuple[dict, Task]]:
    """Return (settings, task) of the fastest that fit, of sizes that are powers of two.

    Proposals differ in more than rollout.sleep_level and train.micro_batch_tokens: of those the fastest is
    taken, and where all are as fast the engine stays awake and micro-batches are large.
    """
    inside = [size for size in powers(task.machine.gpus_per_node) if task.num_gpus % size == 0]
    grid = {
        "model.ep_size": powers(task.num_gpus) if task.counts.experts else [1],
        "rollout.tensor_parallel": inside,
        "model.activation_checkpointing": (False, True),
        "optimizer": OPTIMIZERS,
        "train.micro_batch_tokens": (32768, 16384, 8192),
        "rollout.sleep_level": (0, 2),
    }
    found = {}
    for number, values in enumerate(itertools.product(*grid.values())):
        change = dict(zip(grid, values, strict=True))
        change |= change.pop("optimizer")
        tried = task.with_settings(change)
        if why_not(tried) is None:
            one = (sum(phase_seconds(tried).values()), number, change, tried)
            kind = str(values[:4])
            found[kind] = min(found.get(kind, one), one, key=lambda one: one[:2])
    return [(change, tried) for *_, change, tried in sorted(found.values(), key=lambda one: one[:2])[:most]]


# ------------------------------------------------------------------------------------------------------------
# What is printed
# ------------------------------------------------------------------------------------------------------------
def describe(plan: dict, contradicts: bool = False) -> str:
    """Write a plan for people; parts of 0 are left out, and all numbers where settings contradict."""
    active = plan["parameters"]["active"]
    total = sum(plan["parameters"].values()) - active
    missing = " (KV cache: what is missing)" if plan["memory_gib"]["KV cache"] < 0 else ""
    tables = {
        f"GiB of a GPU by part{missing}": plan["memory_gib"],
        "GiB of a GPU by phase": plan["phases_gib"],
        "GiB of the host by part and rank": plan["host_gib"],
        "seconds of a step": plan["seconds"] if plan["fits"] else {},
        "of which train.offload_optimizer": plan["offload"] if plan["fits"] else {},
        "GB that a GPU sends in a step": {n: v / 1e9 for n, v in plan["wire_bytes_per_step"].items()},
    }
    lines = [
        f"{total / 1e9:.2f} billion parameters, {active / 1e9:.2f} active; {plan['gpus']} "
        f"GPU{'s' * (plan['gpus'] > 1)} of {plan['machine']['memory_gib']:g} GiB; prompts of "
        f"{plan['mean_tokens']['prompt']:,.0f} and completions of {plan['mean_tokens']['completion']:,.0f} "
        "tokens in the mean",
    ]
    for title, values in ({} if contradicts else tables).items():
        shown = [f"  {name:<27}{value:>9.2f}" for name, value in values.items() if value]
        lines += ["", title, *shown] if shown else []
    if not plan["fits"]:
        tried = [f"  try {line}" for line in plan["advice"]]
        return "\n".join([*lines, "", f"it does not fit: {plan['why_not']}", *tried])
    return "\n".join([
        *lines, "",
        f"{plan['tokens_per_second_and_gpu']:,} tokens a second and GPU over a whole step; an engine works "
        f"on {plan['completions_at_once']} completions at once, its cache holds {plan['kv_cache_tokens']:,} "
        "tokens",
        f"an update of all completions computes {plan['trained_tokens_per_gpu']:,} tokens on a GPU, its "
        f"attention works on {plan['grid_tokens_per_gpu']:,}; a micro-batch of mean lengths keeps "
        f"{plan['mean_activations_gib']} GiB of activations",
        f"sleep during updates needed: {plan['sleep']}",
        "it fits",
    ])  # fmt: skip


def describe_search(task: Task, found: list[tuple[dict, Task]]) -> str:
    """Write the proposals of a search, the fastest first, below what the settings do as they are."""
    reason = why_not(task)
    row = lambda one, text: (
        f"{sum(phase_seconds(one).values()):>9.1f} {in_gib(one.parts)['KV cache']:>10.1f} "
        f"{node_bytes(one) / GIB:>10.1f}  {text}"
    )
    lines = [f"{'seconds':>9} {'KV, GiB':>10} {'host, GiB':>10}  settings"]
    lines += [f"as it is, it does not fit: {reason}"] if reason else [row(task, "as it is")]
    if found:
        return "\n".join(lines + [row(tried, as_settings(change)) for change, tried in found])
    return "\n".join([lines[1], "nothing fits on these GPUs", *(f"  try {line}" for line in advice(task))])


def tables(tasks: dict[str, Task]) -> list[str]:
    """Return the lines of the two tables of docs/gpu.md: configurations, and paths of a weight sync."""
    columns = ["settings", "GPUs", "standing", "update", "engine weights", "KV cache", "host", "rollout, s",
               "logprobs, s", "update, s", "sync, s", "step, s"]  # fmt: skip
    rows = []
    for name, task in tasks.items():
        gib, seconds, plan = in_gib(task.parts), phase_seconds(task), plan_run(task)
        standing = sum(gib[part] for part in ("weights", "gradients", "master weights", "AdamW"))
        passing = gib["gradients in an update"] + gib["activations"] + gib["on the way back"]
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


EXPECTED = "# Expected by experiments/plan.py:"  # begins the lines that --write-headers adds


def comment_of(file: Path) -> list[str]:
    """Return the comment lines that a YAML begins with."""
    return list(itertools.takewhile(lambda line: line.startswith("#"), file.read_text().splitlines()))


def header(file: Path) -> list[str]:
    """Return the comment of a YAML: its own first lines, then command, machine and what the plan expects."""
    task, comment = read_task(parse_args(["--config", str(file)])), comment_of(file)
    said = next((line for line in comment if SAID.match(line)), None)
    if said is None:
        raise ValueError(
            f"{file}: none of its first lines says the machine; add one such as # Machine: 8 x h100; shape "
            "of Qwen/Qwen3-8B; mean prompt 200, completion 1,200 tokens"
        )
    plan, per_node = plan_run(task), task.machine.gpus_per_node
    is_own = lambda line: not line.startswith(("#   torchrun", EXPECTED)) and not SAID.match(line)
    own = [*itertools.takewhile(is_own, comment)]
    num_nodes = -(-task.num_gpus // per_node)
    nodes = f" --nnodes={num_nodes} --node-rank=R --master-addr=HOST" if num_nodes > 1 else ""
    phases = ", ".join(f"{name} {gib:.0f}" for name, gib in plan["phases_gib"].items())
    seconds = {name: s for name, s in plan["seconds"].items() if name != "step" and s >= 0.5}
    verdict = "" if plan["fits"] else f" It does not fit: {plan['why_not']}."
    expected = (
        f"{EXPECTED[2:]} of {task.machine.memory_gib:.0f} GiB of a GPU {phases}, with "
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
    add, number = parser.add_argument, {"type": float, "metavar": "N"}
    add("--config", type=Path, action="append", default=[], metavar="FILE", help="as for train_rl.py")
    add(
        "--gpus",
        type=int,
        metavar="N",
        help="GPUs of all nodes (default: what the file says, or the fewest that its sizes divide)",
    )
    add("--machine", choices=MACHINES, help="kind of GPU (default: what the file says, or h100)")
    add(
        "--shape",
        metavar="MODEL",
        help="model to plan with, a known name or a folder (default: what the file says, or model.path)",
    )
    add("--gpu-memory-gib", **number, help="GiB of a GPU (default: the machine's)")
    add("--host-memory-gib", **number, help="GiB of a node's host (default: 240 for each GPU of the run)")
    add("--gpus-per-node", type=int, metavar="N", help="GPUs that NVLink connects (default: the machine's)")
    add("--network-gbs", **number, help="GB/s of a GPU to another node (default: the machine's)")
    add("--prompt-tokens", **number, help="mean of prompts (default: what the file says, or half the limit)")
    add("--new-tokens", **number, help="mean of completions (default: the same)")
    add(
        "--search",
        action="store_true",
        help="propose ep_size, tensor_parallel, micro_batch_tokens, offload and more, the fastest first",
    )
    add("--json", type=Path, metavar="FILE", help="write the plan here, or the list of proposals")
    alone = "; stands alone"
    add("--write-headers", type=Path, nargs="+", metavar="FILE", help=f"write the first lines of each{alone}")
    add("--tables", type=Path, nargs="+", metavar="FILE", help=f"print the tables of docs/gpu.md{alone}")
    add("settings", nargs="*", metavar="section.key=value", help="single settings, over the files'")
    args = parser.parse_intermixed_args(argv)
    given = [name for name, value in vars(args).items() if value not in (None, [], False)]
    is_plan = args.config and not (args.write_headers or args.tables)
    if not is_plan and given not in (["write_headers"], ["tables"]):
        parser.error("give --config, or one of --write-headers and --tables and nothing else")
    return args


def read_machine(args: argparse.Namespace, name: str, num_gpus: int) -> Machine:
    """Return a machine with what the command line says otherwise; ValueError for what is wrong."""
    if name not in MACHINES:
        raise ValueError(f"# Machine: {name} is not known, known are {', '.join(MACHINES)}")
    own = {"memory_gib": args.gpu_memory_gib, "gpus_per_node": args.gpus_per_node,
           "network_gbs": args.network_gbs, "host_gib": args.host_memory_gib}  # fmt: skip
    options = {"memory_gib": "gpu-memory-gib", "host_gib": "host-memory-gib"}
    own = {field: value for field, value in own.items() if value is not None}
    for field, value in ({"gpus": num_gpus} | own).items():
        if not (value > 0 and math.isfinite(value)):
            option = options.get(field, field.replace("_", "-"))
            raise ValueError(f"--{option} {value:g} must be above 0 and finite")
    return replace(MACHINES[name], **own)


def read_config(args: argparse.Namespace) -> Config:
    """Return the settings; of a run in stages those with the largest sizes of all stages."""
    files = [part for file in args.config for part in ("--config", str(file))]
    stages = stage_configs(load_config([*files, *args.settings]))
    if len(stages) == 1:
        return stages[0]
    tokens = max(tokens_per_forward(one.train, on_gpu=True) for one in stages)
    config = widest(stages)
    return config.model_copy(update={"train": config.train.model_copy(update={"micro_batch_tokens": tokens})})


def read_task(args: argparse.Namespace) -> Task:
    """Return what is to be planned; ValueError for what is wrong.

    The line "# Machine: ..." of the last file says what the command line does not.
    """
    config = read_config(args)
    said = next((m.groups() for m in map(SAID.match, comment_of(args.config[-1])) if m), [None] * 5)
    limits = (config.rollout.max_prompt_tokens, config.rollout.max_new_tokens)
    model = model_config(args.shape or said[2] or config.model.path)
    check_model(config, model)
    means = []
    for given, text, limit in zip((args.prompt_tokens, args.new_tokens), said[3:], limits, strict=True):
        means.append(given if given is not None else float(text.replace(",", "")) if text else limit / 2)
    if not all(0 < mean <= limit for mean, limit in zip(means, limits)):
        raise ValueError(
            f"mean tokens of prompts {means[0]:g} and completions {means[1]:g} must be above 0 and at most "
            f"rollout.max_prompt_tokens {limits[0]} and rollout.max_new_tokens {limits[1]}: set "
            "--prompt-tokens and --new-tokens"
        )
    num_gpus = args.gpus
    if num_gpus is None:
        num_gpus = int(said[0] or math.lcm(config.model.ep_size, config.rollout.tensor_parallel))
    machine = read_machine(args, args.machine or said[1] or "h100", num_gpus)
    return Task(config, model, machine, num_gpus, *means)


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
        print(describe_search(task, found))
        result = [{"settings": as_settings(change), **plan_run(tried)} for change, tried in found]
    else:
        result = plan_run(task)
        print(describe(result, contradicts=contradiction(task) is not None))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result and (args.search or result["fits"]) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        print(f"experiments/plan.py: {error}", file=sys.stderr)
        sys.exit(2)
