"""Plan a run before it starts: memory by part, seconds by phase, traffic between GPUs, and advice.

    python experiments/plan.py --config experiments/models/qwen3_30b_a3b_one_node.yaml
    python experiments/plan.py --config mine.yaml --gpus 8 --gpu-memory-gib 80 --json plan.json
    python experiments/plan.py --config mine.yaml --gpus 32 --search       # settings that fit, fastest first

Only config.json is read; Qwen3, Qwen2.5 and Granite 3.1 need no file, as their shapes are listed below. GPU
memory is estimated by memory_plan.plan_memory(), by which train_rl.py refuses a run at its start. Seconds
follow a roofline model: operations and bytes, divided by the peak rates of the GPU times the shares of these
peaks that are achieved (constants below). docs/gpu.md compares the seconds with public measurements.

Exit codes: 0 if the run fits (with --search: if any proposal fits), 1 if it does not, 2 for invalid settings.

Reading order: models, machines, the task, bytes, seconds, the plan and its advice, output, command line.
"""

import argparse
import functools
import itertools
import json
import math
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from transformers import AutoConfig, PretrainedConfig

import memory_plan
import moe_model
from configure import load_config, stage_configs, widest
from extras.base import active
from fp8 import fp8_refusal
from lifecycle import check_model, checkpoint_bytes
from memory_plan import plan_memory, syncs_own_experts
from moe_model import head_dim, num_experts_of
from runtime.config import command_line
from runtime.machine import Device
from runtime.memory import GIB, bytes_by_phase, margin_bytes
from settings import Config
from train_rl import needs_old_pass

# ------------------------------------------------------------------------------------------------------------
# Models: values of the published config.json, by name
# ------------------------------------------------------------------------------------------------------------
QWEN3 = {
    "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": False,
    "attention_bias": False, "model_type": "qwen3",
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "num_key_value_heads": 4, "model_type": "qwen3_moe",
}  # fmt: skip
QWEN3_TIED = QWEN3 | {"tie_word_embeddings": True}
GRANITE_MOE = {  # without multipliers and rope_theta, as no plan depends on these
    "vocab_size": 49155, "num_key_value_heads": 8, "num_experts_per_tok": 8, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "attention_bias": False, "max_position_embeddings": 131072,
    "model_type": "granitemoe",
}  # fmt: skip
QWEN2_5 = {
    "vocab_size": 151936, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "max_position_embeddings": 32768, "model_type": "qwen2",
}  # fmt: skip
GRANITE_1B = GRANITE_MOE | {"num_local_experts": 32}
GRANITE_3B = GRANITE_MOE | {"num_local_experts": 40}
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "moe_intermediate_size",
)  # fmt: skip
KNOWN_MODELS = {  # {name: (values shared with other models, SIZES of this model)}
    "Qwen3-0.6B": (QWEN3_TIED, (1024, 3072, 28, 16)),
    "Qwen3-1.7B": (QWEN3_TIED, (2048, 6144, 28, 16)),
    "Qwen3-4B": (QWEN3_TIED, (2560, 9728, 36, 32)),
    "Qwen3-8B": (QWEN3, (4096, 12288, 36, 32)),
    "Qwen3-14B": (QWEN3, (5120, 17408, 40, 40)),
    "Qwen3-32B": (QWEN3, (5120, 25600, 64, 64)),
    "Qwen3-30B-A3B": (QWEN3_MOE, (2048, 6144, 48, 32, 768)),
    "Qwen3-235B-A22B": (QWEN3_MOE, (4096, 12288, 94, 64, 1536)),
    "Qwen2.5-0.5B": (QWEN2_5, (896, 4864, 24, 14)),
    "Qwen2.5-1.5B": (QWEN2_5, (1536, 8960, 28, 12)),
    "Qwen2.5-3B": (QWEN2_5, (2048, 11008, 36, 16)),
    "granite-3.1-1b-a400m-base": (GRANITE_1B, (1024, 512, 24, 16)),
    "granite-3.1-1b-a400m-instruct": (GRANITE_1B, (1024, 512, 24, 16)),
    "granite-3.1-3b-a800m-base": (GRANITE_3B, (1536, 512, 32, 24)),
    "granite-3.1-3b-a800m-instruct": (GRANITE_3B, (1536, 512, 32, 24)),
}
# {variant: tokens}, for Qwen3; all variants of another family have the same shape
CONTEXTS = {"": 40960, "-Base": 32768, "-Instruct": 32768, "-Instruct-2507": 262144, "-Thinking-2507": 262144}


@functools.cache
def model_config(path: str) -> PretrainedConfig:
    """Return the configuration of a folder with config.json, or of a known name; downloads nothing.

    Example of a name: Qwen/Qwen3-8B-Base. ValueError if the path is neither.
    """
    if (Path(path) / "config.json").is_file():
        return moe_model.load_config(path)
    name, variant = re.fullmatch(f"(.*?)({'|'.join(CONTEXTS)})", Path(path).name).groups()
    if name not in KNOWN_MODELS:
        raise ValueError(
            f"model.path: {path} is no folder with a config.json, and the shape of {name} is unknown; known "
            f"are {', '.join(KNOWN_MODELS)}. Give a known name, or a folder with config.json, by --shape"
        )
    shared, sizes = KNOWN_MODELS[name]
    values = {"max_position_embeddings": CONTEXTS[variant]} | shared | dict(zip(SIZES, sizes, strict=False))
    return AutoConfig.for_model(**values)


# ------------------------------------------------------------------------------------------------------------
# Machines: peak rates of a GPU as its maker states them, and the shares of these peaks that are achieved
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Machine:
    """A kind of GPU, and the links between several of them; bandwidths are per GPU and direction."""

    memory_gib: float  # as the driver reports, which is below the advertised size
    tflops: float  # dense products in bfloat16
    memory_gbs: float
    node_gbs: float  # NVLink
    network_gbs: float  # between nodes
    host_gbs: float  # PCIe
    gpus_per_node: int = 8
    host_gib: float | None = None  # host memory of a node; None: HOST_GIB_PER_GPU for each GPU
    capability: tuple[int, int] = (9, 0)  # compute capability


MACHINES = {
    "h100": Machine(79.6, 989, 3350, 450, 50, 64),
    "h200": Machine(139.8, 989, 4800, 450, 50, 64),
    "a100": Machine(79.3, 312, 2039, 300, 25, 32, capability=(8, 0)),
    "b200": Machine(178.0, 2250, 8000, 900, 50, 64, capability=(10, 0)),
}
# Achieved shares of the peaks [ours: chosen once against the measurements in tests/test_plan.py: MEASURED]
PRODUCT_SHARE = 0.50  # dense layers, attention and head
EXPERT_PRODUCT_SHARE = 0.12  # grouped products of few rows each, and the permutation of rows around them
MEMORY_SHARE = 0.60
LINK_SHARE = 0.60
ENGINE_STEP_S = 0.006  # vLLM's host work and kernel launches per step, for any batch size [ours: a guess]
ALL_REDUCE_S = 20e-6  # latency of one all-reduce in a tensor-parallel layer [ours: a guess]
TAIL_DIVISOR = 8  # in the tail of a rollout one of this many completions still runs [ours: a guess]
CORE_GBS = 20  # memory rate of a host core in AdamW; a rank has one core [ours: 23 measured]
HOST_GIB_PER_GPU = 240  # about 2 TB for eight GPUs, a common size of nodes
PROCESS_BYTES = 6 * GIB  # host memory of a rank: Python, CUDA, vLLM, its reward workers [ours: a guess]


# ------------------------------------------------------------------------------------------------------------
# The task
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Task:
    """The run to plan: settings, model, kind and number of GPUs, and mean lengths of the texts."""

    config: Config
    model: PretrainedConfig
    machine: Machine
    num_gpus: int
    prompt_tokens: float  # mean
    new_tokens: float  # mean length of completions

    def __post_init__(self):
        """Replace dtypes auto and rollout.sleep_level null by the values that they mean on GPUs."""
        policy = moe_model.policy_dtype(self.config.model, on_gpu=True)
        engine = moe_model.engine_dtype(self.config.rollout, on_gpu=True)
        config = memory_plan.with_setting(self.config, "model.dtype", policy)
        config = memory_plan.with_setting(config, "rollout.dtype", engine)
        object.__setattr__(self, "config", memory_plan.with_sleep_level(config, on_gpu=True))

    def with_settings(self, change: dict) -> "Task":
        """Return the same task with other values, for example {"rollout.sleep_level": 2, "gpus": 16}."""
        config = self.config
        for name, value in change.items():
            if name != "gpus":
                config = memory_plan.with_setting(config, name, value)
        return replace(self, config=config, num_gpus=change.get("gpus", self.num_gpus))

    def setting(self, name: str) -> object:
        """Return the value of a setting, for example of rollout.sleep_level, or the number of `gpus`."""
        section, _, key = name.partition(".")
        return getattr(getattr(self.config, section), key) if key else self.num_gpus

    @functools.cached_property
    def counts(self) -> moe_model.ParameterCounts:
        """Return the number of parameters: experts, embeddings, others."""
        return moe_model.parameter_counts(self.model)

    @functools.cached_property
    def trained(self) -> moe_model.ParameterCounts:
        """Return the number of parameters with gradients: all, or the adapters of lora.rank."""
        return memory_plan.trained_counts(self.config, self.model)

    @functools.cached_property
    def memory(self) -> tuple[dict[str, int], str | None]:
        """Return the bytes of a GPU by part, and the reason if the run does not fit."""
        return plan_memory(self.config, self.model, self.num_gpus, int(self.machine.memory_gib * GIB))

    @property
    def gpus_of_node(self) -> int:
        """Return the number of GPUs of the run that share a host."""
        return min(self.num_gpus, self.machine.gpus_per_node)

    @property
    def parts(self) -> dict[str, int]:
        """Return the bytes of a GPU by part; a negative `KV cache` is the memory that is missing."""
        return self.memory[0]

    @property
    def phases(self) -> dict[str, int]:
        """Return the bytes of a GPU by phase."""
        return bytes_by_phase(self.parts, self.config.rollout.sleep_level > 0)

    @property
    def active_experts(self) -> float:
        """Return the expert parameters that take part in the products of one token."""
        if self.counts.experts == 0:
            return 0
        return self.counts.experts * self.model.num_experts_per_tok / num_experts_of(self.model)

    @property
    def active(self) -> float:
        """Return all parameters that take part in the products of one token.

        The embedding is a lookup and does not count; the head does, also if both share one matrix.
        """
        embedding = 0 if self.model.tie_word_embeddings else self.model.vocab_size * self.model.hidden_size
        return self.active_experts + self.counts.embeddings - embedding + self.counts.others

    @property
    def num_moe_layers(self) -> int:
        """Return the number of layers with experts."""
        return sum(memory_plan.layers_with_experts(self.model))

    @property
    def itemsize(self) -> int:
        """Return the bytes of one value of the policy."""
        return memory_plan.itemsize_of(self.config.model)

    @property
    def completions(self) -> int:
        """Return the number of completions of a step."""
        return self.config.rollout.prompts_per_step * self.config.rollout.group_size

    @property
    def sequence_tokens(self) -> float:
        """Return the mean tokens of a prompt with its completion."""
        return self.prompt_tokens + self.new_tokens

    @property
    def rows_together(self) -> float:
        """Return the mean number of completions that share one pass over their prompt in the trainer.

        The trainer keeps a group together if that saves more prompt tokens than it adds to attention's grid,
        whose rows are as long as the longest completion. Here a group is assumed to stay together if prompts
        are at least as long as completions.
        """
        if not self.config.train.share_prompts or self.prompt_tokens < self.new_tokens:
            return 1
        rows = self.config.train.tokens_per_forward(on_gpu=True) / self.sequence_tokens
        return max(1, min(rows, self.config.rollout.group_size))

    @property
    def trained_tokens(self) -> float:
        """Return the tokens of a step that a GPU's trainer computes in one pass."""
        return self.completions / self.num_gpus * (self.prompt_tokens / self.rows_together + self.new_tokens)

    @property
    def grid_tokens(self) -> float:
        """Return the tokens of a step that the trainer's attention computes, with repeated prompts."""
        return self.completions / self.num_gpus * self.sequence_tokens

    @property
    def owned(self) -> int:
        """Return the number of parameters that a rank updates."""
        return sum(self.trained) // self.num_gpus

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of keys and values of one token."""
        return memory_plan.kv_bytes_per_token(self.model, self.config.rollout)

    @property
    def num_forward_only_passes(self) -> int:
        """Return the forward passes of a step without a backward pass: old policy, reference, extras."""
        of_extras = sum(extra.num_passes for extra in active(self.config))
        return needs_old_pass(self.config) + (self.config.algorithm.kl_coef > 0) + of_extras


def contradiction(task: Task) -> str | None:
    """Explain why settings contradict the model or the number of GPUs; None if they fit together."""
    config = task.config
    num_gpus = task.num_gpus
    num_experts = num_experts_of(task.model)
    ep_size = config.model.ep_size
    parallel = config.rollout.tensor_parallel
    heads = task.model.num_attention_heads
    kv_heads = task.model.num_key_value_heads
    per_step = config.rollout.prompts_per_step
    minibatches = config.train.minibatches_per_step
    per_node = task.machine.gpus_per_node
    checks = {
        f"model.ep_size {ep_size} must divide the number of GPUs, {num_gpus}": num_gpus % ep_size,
        f"model.ep_size {ep_size} must divide the {num_experts} experts":
            num_experts and num_experts % ep_size,
        f"model.ep_size {ep_size}: the model is dense, set it to 1": not num_experts and ep_size > 1,
        f"rollout.tensor_parallel {parallel} must divide the number of GPUs, {num_gpus}": num_gpus % parallel,
        f"rollout.tensor_parallel {parallel} must divide the {heads} attention heads": heads % parallel,
        f"rollout.tensor_parallel {parallel} and the {kv_heads} key/value heads: one must divide the other":
            kv_heads % parallel and parallel % kv_heads,
        f"rollout.prompts_per_step {per_step} must be a multiple of GPUs x train.minibatches_per_step, "
        f"{num_gpus} x {minibatches}": per_step % (num_gpus * minibatches),
        f"{num_gpus} GPUs do not fill nodes of {per_node}": num_gpus > per_node and num_gpus % per_node,
        "rollout.expert_parallel true needs rollout.tensor_parallel above 1":
            config.rollout.expert_parallel and parallel == 1,
    }  # fmt: skip
    wrong = next((message for message, is_wrong in checks.items() if is_wrong), None)
    device = Device("the GPU of --machine", task.machine.capability)
    return wrong or fp8_refusal(config.rollout, task.model, device)


def why_not(task: Task) -> str | None:
    """Explain why the run cannot start with these settings; None if it can."""
    return contradiction(task) or task.memory[1] or why_host_too_small(task)


def why_host_too_small(task: Task) -> str | None:
    """Explain how much memory the host of a node lacks; None if it has enough."""
    needed = node_bytes(task) / GIB
    num_gpus = task.gpus_of_node
    room = task.machine.host_gib or HOST_GIB_PER_GPU * num_gpus
    if needed <= room:
        return None
    return f"the host of a node needs {needed:.0f} GiB for {num_gpus} GPUs and has {room:.0f}"


# ------------------------------------------------------------------------------------------------------------
# Bytes: host memory, traffic
# ------------------------------------------------------------------------------------------------------------
def host_memory(task: Task) -> dict[str, int]:
    """Return the bytes of host memory of a rank, by part.

    routes                expert ids that the engine captured, and a copy that the trainer replays
    offloaded optimizer   with train.offload_optimizer
    checkpoint            the larger of two moments: save, a file of weights on its way to disk; resume,
                          float32 weights and AdamW's states of the rank, 12 bytes per parameter
    processes             everything else
    """
    config = task.config
    route_bytes = 0  # per token
    if task.counts.experts and config.rollout.capture_routes != "off":
        bytes_per_id = 1 if num_experts_of(task.model) < 256 else 2
        route_bytes = task.num_moe_layers * task.model.num_experts_per_tok * bytes_per_id
    copies = 2 if config.algorithm.router_replay != "off" else 1
    offloaded = 0
    if config.train.offload_optimizer:
        offloaded = memory_plan.offloaded_bytes(task.trained, config.model, task.num_gpus)
    return {
        "routes to replay": int(task.grid_tokens * route_bytes * copies),
        "routes beside the KV cache": max(0, task.parts["KV cache"]) // task.kv_bytes * route_bytes,
        "offloaded optimizer": offloaded,
        "checkpoint": max(min(task.parts["weights"], moe_model.SHARD_BYTES), 12 * task.owned),
        "processes": PROCESS_BYTES,
    }


def node_bytes(task: Task) -> int:
    """Return the bytes of host memory that a node needs."""
    return sum(host_memory(task).values()) * task.gpus_of_node


def sync_bytes(task: Task) -> dict[str, int]:
    """Return the bytes that one weight sync moves on a GPU.

    over the wire: experts gathered from other ranks, tensor by tensor; 0 if a rank's engine holds the experts
        that the rank trains (rollout.expert_parallel with rollout.tensor_parallel = model.ep_size).
    handed over: bytes that the engine receives, in the policy's dtype.
    kept: bytes that the engine copies into its weights; under tensor parallelism a slice of each tensor.
    """
    experts = task.counts.experts
    shared = task.counts.embeddings + task.counts.others
    local_experts = experts // task.config.model.ep_size
    received = local_experts if syncs_own_experts(task.config) else experts
    return {
        "over the wire": (received - local_experts) * task.itemsize,
        "handed over": (received + shared) * task.itemsize,
        "kept": task.parts["engine weights"],
    }


def ring(ranks: float) -> float:
    """Return the share of the bytes that a rank sends in a reduce-scatter or all-gather."""
    return max(0.0, (ranks - 1) / ranks)


def num_reductions(task: Task) -> int:
    """Return how often gradients are reduced in a step: by ZeRO 1 per update, by ZeRO 2 per micro-batch."""
    train = task.config.train
    if train.zero_stage == 1:
        return train.num_updates
    micro_batch_tokens = max(train.tokens_per_forward(on_gpu=True), task.sequence_tokens)
    return train.num_updates * math.ceil(task.grid_tokens / train.minibatches_per_step / micro_batch_tokens)


def wire_bytes(task: Task) -> dict[str, int]:
    """Return the bytes that a GPU sends in a step, by purpose.

    gradients        DeepSpeed all-reduces gradients in the policy's dtype, which is a reduce-scatter and an
                     all-gather: experts over num_gpus / ep_size ranks, all other parameters over all ranks
    updated weights  one more all-gather over the same ranks
    all-to-all       a token sends (ep_size - 1) / ep_size of K D values to its experts and receives as many
                     results, in each pass over a layer
    """
    config = task.config
    train = config.train
    ep_size = config.model.ep_size
    elements = (task.trained.embeddings + task.trained.others) * ring(task.num_gpus)
    elements += task.trained.experts / ep_size * ring(task.num_gpus / ep_size)
    num_passes = (2 + config.model.activation_checkpointing) * train.passes_per_rollout
    num_passes += task.num_forward_only_passes
    rows = task.trained_tokens * task.model.num_experts_per_tok if task.counts.experts else 0
    exchanged = 2 * rows * task.model.hidden_size * task.itemsize * ring(ep_size) * task.num_moe_layers
    return {
        "all-to-all": int(exchanged * num_passes),
        "gradients": int(2 * elements * task.itemsize * num_reductions(task)),
        "updated weights": int(elements * task.itemsize * train.num_updates),
        "sync": sync_bytes(task)["over the wire"],
    }


# ------------------------------------------------------------------------------------------------------------
# Seconds
# ------------------------------------------------------------------------------------------------------------
def link_seconds(task: Task, num_bytes: float, ranks: int) -> float:
    """Return the seconds to send bytes in a group of ranks: by NVLink, or by network if it spans nodes."""
    machine = task.machine
    gbs = machine.node_gbs if ranks <= machine.gpus_per_node else machine.network_gbs
    return num_bytes / (gbs * 1e9 * LINK_SHARE)


def product_seconds(task: Task, tokens: float, context: float, grid_tokens: float | None = None) -> float:
    """Return the seconds of a forward pass over tokens on one GPU; a backward pass takes twice as long.

    2 operations per parameter and token; attention adds 4 per layer, query element and earlier token.
    context: mean number of earlier tokens. grid_tokens: tokens that attention computes (default: tokens).
    """
    model = task.model
    attention = 4 * model.num_hidden_layers * model.num_attention_heads * head_dim(model) * context
    dense = 2 * (task.active - task.active_experts) / PRODUCT_SHARE
    experts = 2 * task.active_experts / EXPERT_PRODUCT_SHARE
    operations = tokens * (dense + experts) + (grid_tokens or tokens) * attention / PRODUCT_SHARE
    return operations / (task.machine.tflops * 1e12)


def decode_step_seconds(task: Task, batch: float, context: float) -> float:
    """Return the seconds of one engine step that samples a token for each of `batch` completions.

    The larger of reading and computing, plus communication and host work. A step reads the weights, all keys
    and values, and of the experts only the ones that a token of the batch is routed to.
    """
    settings = task.config.rollout
    model = task.model
    ranks = settings.tensor_parallel
    weights = task.parts["engine weights"]
    if task.counts.experts:
        unread_frac = (1 - model.num_experts_per_tok / num_experts_of(model)) ** batch
        weights *= 1 - unread_frac * task.counts.experts / sum(task.counts)
    bytes_per_s = task.machine.memory_gbs * 1e9 * MEMORY_SHARE
    reading_s = (weights + batch * context * task.kv_bytes) / bytes_per_s
    computing_s = product_seconds(task, batch, context) / ranks / (2 if settings.fp8 == "on" else 1)
    communicating_s = 0.0
    if ranks > 1:
        sent = batch * model.hidden_size * 2 * 2 * ring(ranks)
        communicating_s = 2 * model.num_hidden_layers * (ALL_REDUCE_S + link_seconds(task, sent, ranks))
    return max(reading_s, computing_s) + communicating_s + ENGINE_STEP_S


def completions_of_engine(task: Task) -> float:
    """Return the number of completions that an engine samples in a step."""
    return task.completions / (task.num_gpus / task.config.rollout.tensor_parallel)


def completions_at_once(task: Task) -> float:
    """Return the batch of an engine: all completions, or as many as max_num_seqs or the KV cache allow."""
    room = task.parts["KV cache"] / task.kv_bytes / task.sequence_tokens
    return max(1.0, min(completions_of_engine(task), task.config.rollout.sequences_at_once, room))


def rollout_seconds(task: Task) -> float:
    """Return the seconds of a rollout: prefill, full batches, then a tail up to the longest completion.

    In the tail one of TAIL_DIVISOR completions of a batch still runs. Fewer run if the tail would otherwise
    sample more than half of all tokens. Full batches sample the remaining tokens.
    """
    settings = task.config.rollout
    num_completions = completions_of_engine(task)
    batch = completions_at_once(task)
    prompt_tokens = num_completions / (settings.group_size if settings.prefix_caching else 1)
    prompt_tokens *= task.prompt_tokens
    prefill_s = product_seconds(task, prompt_tokens, task.prompt_tokens / 2) / settings.tensor_parallel
    tokens = num_completions * task.new_tokens
    tail_steps = settings.max_new_tokens - task.new_tokens
    tail_batch = max(1.0, min(batch / TAIL_DIVISOR, tokens / 2 / max(1.0, tail_steps)))
    full_steps = max(0.0, tokens - tail_batch * tail_steps) / batch
    full_s = full_steps * decode_step_seconds(task, batch, task.prompt_tokens + task.new_tokens / 2)
    tail_s = tail_steps * decode_step_seconds(task, tail_batch, settings.max_new_tokens)
    return prefill_s + full_s + tail_s


def sync_seconds(task: Task) -> float:
    """Return the seconds of a weight sync: gathering, and two copies of the received bytes."""
    moved = sync_bytes(task)
    gathering_s = link_seconds(task, moved["over the wire"], task.config.model.ep_size)
    return gathering_s + 2 * moved["handed over"] / (task.machine.memory_gbs * 1e9 * MEMORY_SHARE)


def offload_seconds(task: Task) -> float:
    """Return the seconds that train.offload_optimizer costs in a step: PCIe, and AdamW on the host.

    Each parameter of the rank's share crosses PCIe as a float32 gradient and returns in the policy's dtype.
    The gradient of a float32 policy travels to the host and back in every micro-batch. One core of the host
    then scales the gradient (8 bytes), runs AdamW (28), and reads and writes the value to return.
    """
    train = task.config.train
    num_values = train.num_updates * task.owned * train.offload_optimizer
    gradient_bytes = 4 if task.itemsize == 2 else 8 * num_reductions(task) / train.num_updates
    crossing_s = (gradient_bytes + task.itemsize) / (task.machine.host_gbs * LINK_SHARE)
    return num_values / 1e9 * (crossing_s + (8 + 28 + 4 + task.itemsize) / CORE_GBS)


def phase_seconds(task: Task) -> dict[str, float]:
    """Return the seconds of a step by phase; verifiers run during the rollout and add nothing."""
    config = task.config
    sent = wire_bytes(task)
    pass_s = product_seconds(task, task.trained_tokens, task.sequence_tokens / 2, task.grid_tokens)
    num_backwards = config.train.passes_per_rollout
    num_forwards = (1 + config.model.activation_checkpointing) * num_backwards
    # a backward pass has the products of two forward passes; frozen weights need no gradient of their own
    update_passes = num_forwards + (1 + sum(task.trained) / sum(task.counts)) * num_backwards
    exchanging_s = link_seconds(task, sent["all-to-all"], config.model.ep_size)
    reducing_s = link_seconds(task, sent["gradients"] + sent["updated weights"], task.num_gpus)
    # AdamW reads and writes weights and both averages, and reads the gradient: 7 values for 3 stored ones.
    adamw_bytes = config.train.num_updates * 7 / 3 * (task.parts["master weights"] + task.parts["AdamW"])
    adamw_s = adamw_bytes / (task.machine.memory_gbs * 1e9 * MEMORY_SHARE)
    adamw_s += offload_seconds(task)
    num_before = task.num_forward_only_passes
    share_before = num_before / (num_before + num_forwards + num_backwards)  # all passes send alike
    return {
        "rollout": rollout_seconds(task),
        "logprobs": pass_s * num_before + exchanging_s * share_before,
        "update": pass_s * update_passes + exchanging_s * (1 - share_before) + reducing_s + adamw_s,
        "sync": sync_seconds(task),
    }


def step_seconds(task: Task) -> float:
    """Return the seconds of a step."""
    return sum(phase_seconds(task).values())


# ------------------------------------------------------------------------------------------------------------
# The plan, and advice
# ------------------------------------------------------------------------------------------------------------
def in_gib(parts: dict[str, int]) -> dict[str, float]:
    """Return bytes as GiB with two decimals."""
    return {name: round(value / GIB, 2) for name, value in parts.items()}


def plan_run(task: Task) -> dict:
    """Return the complete plan as plain values; `fits` tells whether the run can start."""
    reason = why_not(task)
    seconds = phase_seconds(task)
    step_s = sum(seconds.values())
    tokens = task.completions * task.sequence_tokens
    return {
        "fits": reason is None,
        "why_not": reason,
        "advice": [] if reason is None else advice(task),
        "memory_gib": in_gib(task.parts),
        "phases_gib": in_gib(task.phases),
        "margin_gib": round(margin_bytes(int(task.machine.memory_gib * GIB)) / GIB, 2),
        "host_gib": in_gib(host_memory(task)) | {"of a node": round(node_bytes(task) / GIB, 1)},
        "kv_cache_tokens": max(0, task.parts["KV cache"]) // task.kv_bytes,
        "completions_at_once": round(completions_at_once(task)),
        "seconds": {name: round(value, 2) for name, value in seconds.items()} | {"step": round(step_s, 1)},
        "checkpoint_gb": round(checkpoint_bytes(task.trained, task.config.model.dtype) / 1e9, 1),
        "tokens_per_step": int(tokens),
        "tokens_per_second_and_gpu": round(tokens / step_s / task.num_gpus, 1),
        "wire_bytes_per_step": wire_bytes(task),
        "sync_bytes": sync_bytes(task),
        "parameters": task.counts._asdict() | {"active": int(task.active)},
        "gpus": task.num_gpus,
        "machine": asdict(task.machine),
        "mean_tokens": {"prompt": task.prompt_tokens, "completion": task.new_tokens},
    }


def powers(most: int) -> list[int]:
    """List the powers of two up to `most`."""
    return [2**i for i in range(most.bit_length())]


def as_settings(change: dict) -> str:
    """Write a change for the command line, for example --gpus 16 model.activation_checkpointing=true."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in change.items()}
    return " ".join(f"--gpus {text}" if name == "gpus" else f"{name}={text}" for name, text in texts.items())


def advice(task: Task, most: int = 3) -> list[str]:
    """List the fastest settings that fit, beside those of the run; with more GPUs if these are too few."""
    for num_gpus in (task.num_gpus * 2**i for i in range(8)):
        unit = num_gpus * task.config.train.minibatches_per_step
        prompts = math.ceil(task.config.rollout.prompts_per_step / unit) * unit
        dealt = {"gpus": num_gpus, "rollout.kv_cache_gib": None, "rollout.prompts_per_step": prompts}
        lines = []
        for change, _ in search(task.with_settings(dealt), most):
            change = {name: value for name, value in (dealt | change).items() if task.setting(name) != value}
            lines.append(as_settings(change))
        if lines:
            return lines
    return ["a larger GPU, a shorter rollout.max_new_tokens or a smaller model"]


OPTIMIZERS = [  # places of gradients and optimizer states, fastest first
    {"train.zero_stage": 1, "train.offload_optimizer": False},
    {"train.zero_stage": 2, "train.offload_optimizer": False},
    {"train.zero_stage": 2, "train.offload_optimizer": True},
]


def search(task: Task, most: int = 5) -> list[tuple[dict, Task]]:
    """Return (settings, task) of the fastest proposals that fit; all sizes are powers of two.

    rollout.max_num_seqs follows from the completions of an engine. A larger limit would only cost memory.
    Two proposals never differ in rollout.sleep_level and train.micro_batch_tokens alone: only the faster of
    the two is listed. On a tie the engine stays awake and micro-batches are large.
    """
    node_sizes = [size for size in powers(task.machine.gpus_per_node) if task.num_gpus % size == 0]
    grid = {
        "model.ep_size": powers(task.num_gpus) if task.counts.experts else [1],
        "rollout.tensor_parallel": node_sizes,
        "model.activation_checkpointing": (False, True),
        "optimizer": OPTIMIZERS,
        "train.micro_batch_tokens": (32768, 16384, 8192),
        "rollout.sleep_level": (0, 2),
    }
    best = {}  # {the first four values: (seconds, place in the grid, change, task)}
    for number, values in enumerate(itertools.product(*grid.values())):
        change = dict(zip(grid, values, strict=True))
        change |= change.pop("optimizer")
        num_completions = task.completions * change["rollout.tensor_parallel"] / task.num_gpus
        # all completions of an engine start together, if they are at most 1,024
        change["rollout.max_num_seqs"] = next((n for n in (256, 512) if n >= num_completions), 1024)
        changed_task = task.with_settings(change)
        if why_not(changed_task) is None:
            candidate = (step_seconds(changed_task), number, change, changed_task)
            kind = str(values[:4])
            best[kind] = min(best.get(kind, candidate), candidate, key=lambda proposal: proposal[:2])
    fastest = sorted(best.values(), key=lambda proposal: proposal[:2])[:most]
    return [(change, changed_task) for _, _, change, changed_task in fastest]


# ------------------------------------------------------------------------------------------------------------
# Output
# ------------------------------------------------------------------------------------------------------------
def describe(plan: dict, contradicts: bool = False) -> str:
    """Write a plan as text. Parts of 0 are omitted, and with contradicting settings all tables."""
    lines = [head_line(plan)]
    for title, values in ({} if contradicts else plan_tables(plan)).items():
        shown = [f"  {name:<27}{value:>9.2f}" for name, value in values.items() if value]
        lines += ["", title, *shown] if shown else []
    if not plan["fits"]:
        proposals = [f"  try {line}" for line in plan["advice"]]
        return "\n".join([*lines, "", f"it does not fit: {plan['why_not']}", *proposals])
    return "\n".join([
        *lines, "",
        f"{plan['tokens_per_second_and_gpu']:,} tokens per second and GPU over a complete step; an engine "
        f"works on {plan['completions_at_once']} completions at once, and its KV cache holds "
        f"{plan['kv_cache_tokens']:,} tokens",
        f"a checkpoint has {plan['checkpoint_gb']:,} GB",
        f"it fits, and {plan['margin_gib']} GiB or more of a GPU stay free in every phase",
    ])  # fmt: skip


def head_line(plan: dict) -> str:
    """Write the size of the model, the GPUs, and the mean lengths."""
    active = plan["parameters"]["active"]
    total = sum(plan["parameters"].values()) - active
    mean_tokens = plan["mean_tokens"]
    return (
        f"{total / 1e9:.2f} billion parameters, {active / 1e9:.2f} active; {plan['gpus']} "
        f"GPU{'s' * (plan['gpus'] > 1)} of {plan['machine']['memory_gib']:g} GiB; mean prompt "
        f"{mean_tokens['prompt']:,.0f} and completion {mean_tokens['completion']:,.0f} tokens"
    )


def plan_tables(plan: dict) -> dict[str, dict[str, float]]:
    """Return the tables of a plan, {title: {row: value}}."""
    missing = " (negative KV cache: missing memory)" if plan["memory_gib"]["KV cache"] < 0 else ""
    sent_gb = {name: value / 1e9 for name, value in plan["wire_bytes_per_step"].items()}
    return {
        f"GiB of a GPU by part{missing}": plan["memory_gib"],
        "GiB of a GPU by phase": plan["phases_gib"],
        "GiB of host memory of a rank by part": plan["host_gib"],
        "seconds of a step": plan["seconds"] if plan["fits"] else {},
        "GB that a GPU sends in a step": sent_gb,
    }


def search_row(task: Task, text: str) -> str:
    """Write one line of a search: seconds of a step, KV cache, host memory, settings."""
    kv_gib = in_gib(task.parts)["KV cache"]
    host_gib = node_bytes(task) / GIB
    return f"{step_seconds(task):>9.1f} {kv_gib:>10.1f} {host_gib:>10.1f}  {text}"


def describe_search(task: Task, proposals: list[tuple[dict, Task]]) -> str:
    """Write the proposals of a search, fastest first, below the result of the present settings."""
    reason = why_not(task)
    current = f"as it is, it does not fit: {reason}" if reason else search_row(task, "as it is")
    if not proposals:
        return "\n".join([current, "nothing fits on these GPUs", *(f"  try {line}" for line in advice(task))])
    head = f"{'seconds':>9} {'KV, GiB':>10} {'host, GiB':>10}  settings"
    rows = [search_row(changed_task, as_settings(change)) for change, changed_task in proposals]
    return "\n".join([head, current, *rows])


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------
MACHINE_LINE = re.compile(  # of a YAML: GPUs, machine, model, mean tokens of prompts and of completions
    r"(?m)^# Machine: (\d+) x (\w+); shape of (\S+); mean prompt ([\d,]+), completion ([\d,]+) tokens"
)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_line("experiments/plan.py", __doc__)
    add = parser.add_argument
    number = {"type": float, "metavar": "N"}
    add("--config", type=Path, action="append", required=True, metavar="FILE",
        help="YAML of settings, as for train_rl.py; may be repeated")  # fmt: skip
    add("--gpus", type=int, metavar="N", help="GPUs of all nodes (default: from the file's comment, "
        "else the smallest number that ep_size and tensor_parallel divide)")  # fmt: skip
    add("--machine", choices=MACHINES, help="kind of GPU (default: from the file's comment, else h100)")
    add("--shape", metavar="MODEL", help="a known name such as Qwen3-8B, or a folder with config.json "
        "(default: from the file's comment, else model.path)")  # fmt: skip
    add("--gpu-memory-gib", **number, help="GiB of a GPU (default: from the machine)")
    add("--prompt-tokens", **number, help="mean length of prompts (default: from the file's comment, else "
        "half of the limit)")  # fmt: skip
    add("--new-tokens", **number, help="mean length of completions (default: as for prompts)")
    add("--search", action="store_true", help="propose ep_size, tensor_parallel, micro_batch_tokens, offload "
        "and more, fastest first")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the plan, or the list of proposals, to FILE")
    add("settings", nargs="*", metavar="section.key=value", help="single settings; override files")
    return parser.parse_intermixed_args(argv)


def read_machine(args: argparse.Namespace, name: str, num_gpus: int) -> Machine:
    """Return a machine with the changes of the command line; ValueError for invalid values."""
    if name not in MACHINES:
        raise ValueError(f"# Machine: {name} is not known, known are {', '.join(MACHINES)}")
    for option, value in (("gpus", num_gpus), ("gpu-memory-gib", args.gpu_memory_gib)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"--{option} {value:g} must be above 0 and finite")
    machine = MACHINES[name]
    return replace(machine, memory_gib=args.gpu_memory_gib or machine.memory_gib)


def mean_tokens(option: float | None, comment: str | None, limit: int) -> float:
    """Return the mean length from the command line, else from the file's comment, else half of the limit."""
    if option is not None:
        return option
    return float(comment.replace(",", "")) if comment else limit / 2


def read_task(args: argparse.Namespace) -> Task:
    """Return the task of the command line; ValueError for invalid values.

    Defaults come from the line "# Machine: ..." of the last file, if there is one. A run in stages is planned
    with the largest sizes of all stages.
    """
    files = [argument for file in args.config for argument in ("--config", str(file))]
    config = widest(stage_configs(load_config([*files, *args.settings])), on_gpu=True)
    match = MACHINE_LINE.search(args.config[-1].read_text())
    of_file = match.groups() if match else [None] * 5
    file_gpus, file_machine, file_shape, file_prompt, file_completion = of_file
    model = model_config(args.shape or file_shape or config.model.path)
    check_model(config, model)
    prompt_limit = config.rollout.max_prompt_tokens
    new_limit = config.rollout.max_new_tokens
    prompt_mean = mean_tokens(args.prompt_tokens, file_prompt, prompt_limit)
    new_mean = mean_tokens(args.new_tokens, file_completion, new_limit)
    if not (0 < prompt_mean <= prompt_limit and 0 < new_mean <= new_limit):
        raise ValueError(
            f"mean tokens of prompts {prompt_mean:g} and completions {new_mean:g} must be above 0 and at "
            f"most rollout.max_prompt_tokens {prompt_limit} and rollout.max_new_tokens {new_limit}: set "
            "--prompt-tokens and --new-tokens"
        )
    num_gpus = args.gpus
    if num_gpus is None:
        num_gpus = int(file_gpus or math.lcm(config.model.ep_size, config.rollout.tensor_parallel))
    machine = read_machine(args, args.machine or file_machine or "h100", num_gpus)
    return Task(config, model, machine, num_gpus, prompt_mean, new_mean)


def main(argv: list[str] | None = None) -> int:
    """Plan and print; return the exit code."""
    args = parse_args(argv)
    task = read_task(args)
    if args.search:
        proposals = search(task)
        print(describe_search(task, proposals))
        result = [{"settings": as_settings(change), **plan_run(changed)} for change, changed in proposals]
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
