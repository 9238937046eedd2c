"""Plan a run before it starts: memory by part, seconds by phase, bytes over the wire, and what helps.

    python experiments/plan.py --config experiments/models/qwen3_30b_a3b_one_node.yaml --gpus 8 --machine h100
    python experiments/plan.py --config mine.yaml --gpus 8 --gpu-memory-gib 80 --json plan.json
    python experiments/plan.py --config mine.yaml --gpus 32 --search        # which sizes fit, fastest first
    python experiments/plan.py --config experiments/models/*.yaml --write-header

Nothing is loaded but config.json; of Qwen3 models the shapes are known by name. The exit code is 0 where the
run fits, 1 where it does not, and 2 for settings that are wrong. Memory is arithmetic over what the trainer
allocates; of the engine it is that of rollout.py. Seconds are a roofline with the shares of the peaks that
stand below as constants, compared with public measurements in docs/planning.md.

Reading order: models and machines, memory of the trainer, of the engine and of the host, bytes, seconds,
plan_run(), advice and search, what is printed.
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoConfig, PretrainedConfig

import moe_model
import rollout
from kernels.linear_logprob_entropy import BLOCK_ELEMENTS
from moe_model import CHUNK_ELEMENTS, CONTEXT_BYTES, GIB, head_dim, is_moe_layer, num_experts_of
from train_rl import Config, check_model, load_config, max_model_len, needs_old_pass

# ------------------------------------------------------------------------------------------------------------
# Models: values of the published config.json, by name
# ------------------------------------------------------------------------------------------------------------
QWEN3 = {
    "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "num_key_value_heads": 4,
}  # fmt: skip


def sizes(hidden: int, width: int, layers: int, heads: int, experts: int = 0) -> dict:
    """Name the sizes of a model; experts: width of one, 0 of a dense model."""
    own = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers}
    return own | {"num_attention_heads": heads} | ({"moe_intermediate_size": experts} if experts else {})


KNOWN_MODELS = {
    "Qwen3-0.6B": QWEN3 | sizes(1024, 3072, 28, 16) | {"tie_word_embeddings": True},
    "Qwen3-1.7B": QWEN3 | sizes(2048, 6144, 28, 16) | {"tie_word_embeddings": True},
    "Qwen3-4B": QWEN3 | sizes(2560, 9728, 36, 32) | {"tie_word_embeddings": True},
    "Qwen3-8B": QWEN3 | sizes(4096, 12288, 36, 32),
    "Qwen3-14B": QWEN3 | sizes(5120, 17408, 40, 40),
    "Qwen3-32B": QWEN3 | sizes(5120, 25600, 64, 64),
    "Qwen3-30B-A3B": QWEN3_MOE | sizes(2048, 6144, 48, 32, 768),
    "Qwen3-235B-A22B": QWEN3_MOE | sizes(4096, 12288, 94, 64, 1536),
}
CONTEXTS = {
    "": 40960,
    "-Base": 32768,
    "-Instruct-2507": 262144,
    "-Thinking-2507": 262144,
}  # {variant: tokens}


def model_config(path: str) -> PretrainedConfig:
    """Read config.json of a folder, or take the shape of a known name; nothing is downloaded.

    ValueError if the path is neither.
    """
    if (Path(path) / "config.json").is_file():
        return moe_model.load_config(path)
    name, _, variant = re.fullmatch(
        r"(.*?)(?=(-Base|-Instruct-2507|-Thinking-2507)?$)(.*)", Path(path).name
    ).groups("")
    if name not in KNOWN_MODELS:
        raise ValueError(
            f"model.path: {path} is no folder with a config.json, and no shape of {name} is known; known "
            f"are {', '.join(KNOWN_MODELS)}. Download its config.json alone and give that folder"
        )
    values = KNOWN_MODELS[name] | {"max_position_embeddings": CONTEXTS[variant]}
    return AutoConfig.for_model("qwen3_moe" if "num_experts" in values else "qwen3", **values)


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
    host_gib: float = 2000


MACHINES = {
    "h100": Machine(79.6, 989, 3350, 450, 50),
    "h200": Machine(139.8, 989, 4800, 450, 50),
    "a100": Machine(79.3, 312, 2039, 300, 25),
    "b200": Machine(178.0, 2250, 8000, 900, 50),
}
REACHED = {  # share of the peak [ours: chosen once against the measurements in docs/planning.md]
    "products": 0.50,  # dense layers, attention and head
    "expert products": 0.12,  # grouped products of few rows each, with what permutes them
    "memory": 0.60,
    "links": 0.60,
}
ENGINE_STEP_S = 0.006  # vLLM's host work and launches per step, whatever the batch [ours: a guess]
ALL_REDUCE_S = 20e-6  # latency of one all-reduce in a tensor-parallel layer [ours: a guess]
LOADER_S_PER_EXPERT = 35e-6  # vLLM's loader in Python, per expert and matrix; measured on a CPU
TAIL_SHARE = 8  # completions that still run in the tail of a rollout: one in so many [ours: a guess]
REDUCE_BUCKET = 500_000_000  # elements of DeepSpeed's reduce_bucket_size
CPU_LIBRARY_BYTES = int(0.15 * GIB)  # oneDNN's scratch for bfloat16 products, measured


@dataclass(frozen=True)
class Workload:
    """What is not in the settings: how long prompts and completions are in the mean."""

    prompt_tokens: float
    new_tokens: float


@dataclass
class Shape:
    """A model with what is worth counting once: it is asked for often in a search."""

    config: PretrainedConfig
    known: dict = field(default_factory=dict, repr=False)

    @functools.cached_property
    def counts(self) -> moe_model.ParameterCounts:
        """Return the parameters by what happens to them."""
        return moe_model.parameter_counts(self.config)

    @functools.cached_property
    def active(self) -> int:
        """Return the parameters that a token is multiplied with, without the embedding."""
        config, counts = self.config, self.counts
        share = config.num_experts_per_tok / config.num_experts if counts.experts else 0
        embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        return int(counts.experts * share) + counts.embeddings - embedding + counts.others

    @functools.cached_property
    def num_moe_layers(self) -> int:
        """Return the number of layers with experts."""
        return sum(is_moe_layer(self.config, i) for i in range(self.config.num_hidden_layers))

    def once(self, function, *arguments) -> object:
        """Return function(config, *arguments), called once for arguments that are written alike."""
        key = (function.__name__, repr(arguments))
        if key not in self.known:
            self.known[key] = function(self.config, *arguments)
        return self.known[key]

    def standing(self, model: moe_model.ModelSettings, zero_stage: int, num_ranks: int) -> dict[str, int]:
        """Return the bytes of a rank that stand between updates, by part."""
        model = moe_model.ModelSettings(dtype=model.dtype, ep_size=model.ep_size)
        parts = self.once(moe_model.memory_by_part, model, zero_stage, num_ranks, 0)
        return {name: parts[name] for name in ("weights", "gradients", "master weights", "AdamW")}

    def engine_weights(self, settings: rollout.RolloutSettings) -> int:
        """Return the bytes of the engine's weights on a rank."""
        named = {name: getattr(settings, name) for name in ("dtype", "fp8", "tensor_parallel")}
        return self.once(rollout.engine_weight_bytes, rollout.RolloutSettings(**named))


@functools.cache
def shape_of(path: str) -> Shape:
    """Return the shape of a folder or a known name; rows of a table share it."""
    return Shape(model_config(path))


# ------------------------------------------------------------------------------------------------------------
# Memory
# ------------------------------------------------------------------------------------------------------------
def itemsize_of(dtype: str) -> int:
    """Return the bytes of one value."""
    return getattr(torch, dtype).itemsize


def saved_bytes_per_token(config: PretrainedConfig, layer: int, itemsize: int, on_gpu: bool) -> int:
    """Return what a layer keeps for its backward, per token; exact on CPUs.

    D hidden size, Q and V heads x head size of queries and of keys or values, K experts a token, I width, E
    experts; s itemsize:
        norms      GPU: 4 D s, inputs and outputs of two. CPU: their inputs and normalised values in float32,
                   16 D, and outputs 2 D s; the norms of queries and keys (Q + V) s, or 8 (Q + V)
        attention  queries, keys and values before and after padding 2 (Q + 2 V) s, outputs 2 Q s, log-sums
        MLP        gate, up, SiLU and product 4 I s
        experts    rows in and out and the same of K experts K (2 D + 4 I) s; scores 4 E; weights and indices
    """
    hidden, size = config.hidden_size, head_dim(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    queries, keys = heads * size, kv_heads * size
    if on_gpu:
        norms = (4 * hidden + queries + keys) * itemsize
    else:
        norms = 16 * hidden + 2 * hidden * itemsize + 8 * (queries + keys)
    norms += 4 * (2 + heads + kv_heads)  # their scales
    attention = (2 * (queries + 2 * keys) + 2 * queries) * itemsize + 4 * heads
    if not is_moe_layer(config, layer):
        return norms + attention + 4 * config.intermediate_size * itemsize
    top_k = config.num_experts_per_tok
    rows = top_k * (2 * hidden + 4 * config.moe_intermediate_size) * itemsize
    return norms + attention + rows + 4 * config.num_experts + 32 * top_k + 4


def layer_gradient_bytes_per_token(config: PretrainedConfig, itemsize: int) -> int:
    """Return what the backward of the widest layer holds besides, per token: gradients on their way back."""
    if num_experts_of(config):
        return (
            config.num_experts_per_tok
            * (2 * config.hidden_size + 3 * config.moe_intermediate_size)
            * itemsize
        )
    return (2 * config.hidden_size + 3 * config.intermediate_size) * itemsize


def update_memory(shape: Shape, model: moe_model.ModelSettings, tokens: int, on_gpu: bool) -> dict[str, int]:
    """Return the bytes that a micro-batch takes besides what stands, by part.

    tokens: its padded tokens, all of them with a target. `activations` are kept from the forward to the
    backward: of all layers, or with model.activation_checkpointing the inputs of all layers and one layer.
    `on the way` is the larger of two moments: the backward of the head (a block of logits and its gradient,
    the gradient of the hidden states in float32, that of the head's weight, in bfloat16 and while it is added
    to its float32 sum) and that of a layer.
    """
    config, itemsize = shape.config, itemsize_of(model.dtype)
    layers, device = config.num_hidden_layers, "cuda" if on_gpu else "cpu"
    saved = [saved_bytes_per_token(config, layer, itemsize, on_gpu) for layer in range(layers)]
    in_layers = (
        layers * config.hidden_size * itemsize + max(saved) if model.activation_checkpointing else sum(saved)
    )
    final_norm = config.hidden_size * (2 * itemsize if on_gpu else 8 + itemsize)
    head_matrix = config.vocab_size * config.hidden_size
    summed = itemsize if itemsize == 4 else itemsize + 4  # a gradient, and its copy in float32
    blocks = 2 * 4 * min(BLOCK_ELEMENTS[device], tokens * config.vocab_size)
    head = blocks + tokens * config.hidden_size * (4 + itemsize) + head_matrix * summed
    experts = shape.counts.experts // model.ep_size // max(1, shape.num_moe_layers) * 2 // 3  # gate and up
    rows = min(
        CHUNK_ELEMENTS[device], tokens * config.hidden_size * getattr(config, "num_experts_per_tok", 0)
    )
    layer = (
        tokens * layer_gradient_bytes_per_token(config, itemsize) + experts * summed + rows * (4 + itemsize)
    )
    return {"activations": tokens * (in_layers + final_norm), "on the way": max(head, layer)}


def optimizer_step_memory(
    shape: Shape, model: moe_model.ModelSettings, zero_stage: int, num_ranks: int, on_gpu: bool
) -> int:
    """Return the bytes that DeepSpeed's step takes besides what stands.

    With bfloat16 and ZeRO 1 it all-reduces the float32 gradients of a group, experts or others, by way of a
    copy in bfloat16; ZeRO 2 has buckets. AdamW on CPUs, which is not fused, makes two copies of a group's
    share. With float32 weights the gradients of the share are copied to one tensor, and the others are then
    free.
    """
    counts, itemsize = shape.counts, itemsize_of(model.dtype)
    groups = {"others": counts.embeddings + counts.others, "experts": counts.experts // model.ep_size}
    shares = {
        "others": groups["others"] / num_ranks,
        "experts": groups["experts"] * model.ep_size / num_ranks,
    }
    adamw = 0 if on_gpu else 2 * 4 * int(max(shares.values()))
    if zero_stage == 2:
        return max(adamw, min(REDUCE_BUCKET, max(groups.values())) * itemsize)
    if itemsize == 4:
        return max(0, adamw + 4 * int(sum(shares.values())) - 4 * sum(groups.values()))
    return max(adamw, max(groups.values()) * 2 if num_ranks > 1 else 0)


def trainer_memory(config: Config, shape: Shape, num_ranks: int, tokens: int, on_gpu: bool) -> dict[str, int]:
    """Return the bytes of the trainer on a rank, by part; activations and the optimizer's step never meet."""
    model, zero_stage = config.model, config.train.zero_stage
    parts = dict(shape.standing(model, zero_stage, num_ranks))
    parts |= update_memory(shape, model, tokens, on_gpu)
    parts["optimizer step"] = optimizer_step_memory(shape, model, zero_stage, num_ranks, on_gpu)
    if config.algorithm.kl_coef > 0:
        parts["reference"] = parts["weights"]
    return parts


STANDING = ("weights", "gradients", "master weights", "AdamW", "reference")


def standing_bytes(parts: dict[str, int]) -> int:
    """Add up what the trainer holds at all times."""
    return sum(parts.get(name, 0) for name in STANDING)


def peak_of_updates(parts: dict[str, int]) -> int:
    """Return the most that the trainer holds at any time."""
    passing = max(parts["activations"] + parts["on the way"], parts["optimizer step"])
    return standing_bytes(parts) + passing


def cpu_library_bytes(dtype: str) -> int:
    """Return what libraries take for updates on CPUs besides tensors."""
    return CPU_LIBRARY_BYTES if dtype == "bfloat16" else 0


def micro_batch_tokens(config: Config) -> int:
    """Return the padded tokens of the largest micro-batch: rows longer than the setting go alone."""
    return max(config.train.micro_batch_tokens, max_model_len(config) - 1)


def sends_own_experts(config: Config) -> bool:
    """Tell whether a sync sends the rank's own experts only, as train_rl.sync_engine() decides."""
    settings = config.rollout
    return settings.expert_parallel and settings.tensor_parallel == config.model.ep_size


def sync_buffer_bytes(config: Config, shape: Shape) -> int:
    """Return the largest gathered tensor of experts and what vLLM holds of a layer until it is complete."""
    if not shape.counts.experts:
        return 0
    per_layer = shape.counts.experts // shape.num_moe_layers * itemsize_of(config.model.dtype)
    if sends_own_experts(config):
        return per_layer // config.model.ep_size
    return per_layer * 2 // 3 + per_layer if config.model.ep_size > 1 else per_layer


def engine_memory(config: Config, shape: Shape, parts: dict[str, int], total: int) -> dict[str, int]:
    """Return the bytes of the engine by part; `KV cache` may be negative: what is missing for the rest.

    Without rollout.kv_cache_gib keys and values take what rollout.memory_share() leaves: 0.92 of the GPU, and
    no more than the trainer leaves. A sleeping engine shares the GPU with what stands of the trainer only.
    """
    settings, weights = config.rollout, shape.engine_weights(config.rollout)
    awake_beside = standing_bytes(parts) + CONTEXT_BYTES
    if settings.sleep_level == 0:
        awake_beside = peak_of_updates(parts) + CONTEXT_BYTES
    if settings.kv_cache_gib is not None:
        kv_cache = int(settings.kv_cache_gib * GIB)
    else:
        room = min(rollout.VLLM_SHARE * total, total - awake_beside)
        kv_cache = int(room) - weights - rollout.ENGINE_EXTRA_BYTES
        kv_cache -= 0 if settings.sleep_level else sync_buffer_bytes(config, shape)
    return {"engine weights": weights, "engine workspace": rollout.ENGINE_EXTRA_BYTES, "KV cache": kv_cache}


def phase_memory(config: Config, parts: dict[str, int]) -> dict[str, int]:
    """Return the bytes of a GPU in each phase; graphs and workspaces of an engine stay when it sleeps."""
    beside = CONTEXT_BYTES + parts["engine workspace"]
    standing, kv_cache = standing_bytes(parts) + beside, max(0, parts["KV cache"])
    engine = parts["engine weights"] + kv_cache
    stays = 0 if config.rollout.sleep_level else engine
    waking = parts["engine weights"] + (0 if config.rollout.sleep_level else kv_cache)
    return {
        "rollout": standing + engine,
        "update": standing + stays + parts["activations"] + parts["on the way"],
        "optimizer step": standing + stays + parts["optimizer step"],
        "sync": standing + waking + parts["sync buffers"],
    }


def host_memory(config: Config, shape: Shape, parts: dict[str, int], num_ranks: int, load: Workload) -> dict:
    """Return the bytes of the host by part and rank: routes, checkpoint on its way to disk, processes."""
    routes_per_token = 0
    if num_experts_of(shape.config) and config.rollout.capture_routes:
        routes_per_token = shape.config.num_hidden_layers * shape.config.num_experts_per_tok
        routes_per_token *= 1 if shape.config.num_experts < 256 else 2
    completions = config.rollout.prompts_per_step * config.rollout.group_size / num_ranks
    sampled = completions * (load.prompt_tokens + load.new_tokens)
    kv_tokens = max(0, parts["KV cache"]) / rollout.kv_bytes_per_token(shape.config, config.rollout)
    replays = 2 if config.algorithm.router_replay != "off" else 1  # what was captured, and what is replayed
    return {
        "routes to replay": int(sampled * routes_per_token * replays),
        "routes beside the KV cache": int(kv_tokens * routes_per_token),
        "checkpoint": parts["weights"] + parts["master weights"] + parts["AdamW"],
        "processes": 6 * GIB,  # Python, CUDA and vLLM of a rank, with its reward workers [ours: a guess]
    }


# ------------------------------------------------------------------------------------------------------------
# Bytes over the wire
# ------------------------------------------------------------------------------------------------------------
def num_micro_batches(config: Config, num_ranks: int, load: Workload) -> int:
    """Return the micro-batches of a rank in a step, over all its updates."""
    rows = config.rollout.prompts_per_step * config.rollout.group_size / num_ranks
    tokens = rows * (load.prompt_tokens + load.new_tokens) / config.train.minibatches_per_step
    per_update = math.ceil(tokens / config.train.micro_batch_tokens)
    return per_update * config.train.minibatches_per_step * config.train.passes_per_rollout


def wire_bytes(config: Config, shape: Shape, num_ranks: int, load: Workload) -> dict[str, int]:
    """Return the bytes that a GPU sends in a step, by purpose.

    A ring of g ranks sends (g - 1)/g of the bytes in a reduce-scatter or an all-gather, twice that in an
    all-reduce. ZeRO 1 reduces once an update (bfloat16: an all-reduce in bfloat16), ZeRO 2 after each
    micro-batch. Experts go over num_ranks / ep_size ranks, all else over all of them. An all-to-all sends
    (ep_size - 1)/ep_size of K D values a token, there and back, in each pass over a layer.
    """
    model, train, counts = config.model, config.train, shape.counts
    itemsize, updates = itemsize_of(model.dtype), train.minibatches_per_step * train.passes_per_rollout
    ring = lambda ranks: (ranks - 1) / ranks
    elements = (counts.embeddings + counts.others) * ring(num_ranks)
    elements += counts.experts / model.ep_size * ring(num_ranks / model.ep_size)
    once = 2 if itemsize == 2 else 1
    reductions = num_micro_batches(config, num_ranks, load) if train.zero_stage == 2 else updates * once
    tokens = tokens_per_step(config, load) / num_ranks
    passes = (2 + model.activation_checkpointing) * train.passes_per_rollout + needs_old_pass(config)
    passes += config.algorithm.kl_coef > 0
    per_token = 0
    if shape.num_moe_layers:
        top_k, hidden = shape.config.num_experts_per_tok, shape.config.hidden_size
        per_token = 2 * top_k * hidden * itemsize * ring(model.ep_size) * shape.num_moe_layers
    return {
        "all-to-all": int(tokens * per_token * passes),
        "gradients": int(elements * itemsize * reductions),
        "updated weights": int(elements * itemsize * updates),
        "sync": sync_bytes(config, shape)["over the wire"],
    }


def sync_bytes(config: Config, shape: Shape) -> dict[str, int]:
    """Return what one weight sync moves on a GPU.

    over the wire: experts of other ranks, which are gathered tensor by tensor, or none where the engine's
        ranks hold the experts that the trainer's do (rollout.expert_parallel, tensor_parallel = ep_size).
    handed over: bytes that the engine is given, in the policy's dtype.
    kept: those that it copies into its own weights, a part of a tensor under tensor parallelism.
    """
    counts, itemsize, ep_size = shape.counts, itemsize_of(config.model.dtype), config.model.ep_size
    others = (counts.embeddings + counts.others) * itemsize
    experts, own = counts.experts * itemsize, counts.experts // ep_size * itemsize
    gathers = not sends_own_experts(config)
    return {
        "over the wire": experts - own if gathers else 0,
        "handed over": others + (experts if gathers else own),
        "kept": shape.engine_weights(config.rollout),
    }


# ------------------------------------------------------------------------------------------------------------
# Seconds
# ------------------------------------------------------------------------------------------------------------
def tokens_per_step(config: Config, load: Workload) -> float:
    """Return the tokens of all sequences of a step, prompts counted with each completion."""
    completions = config.rollout.prompts_per_step * config.rollout.group_size
    return completions * (load.prompt_tokens + load.new_tokens)


def link_gbs(machine: Machine, first: int, stride: int, ranks: float) -> float:
    """Return the bandwidth of a group of ranks: that of the network if it reaches into another node."""
    is_inside = first + stride * (ranks - 1) < machine.gpus_per_node
    return (machine.node_gbs if is_inside else machine.network_gbs) * REACHED["links"]


def product_seconds(shape: Shape, machine: Machine, tokens: float, context: float, passes: float) -> float:
    """Return the seconds of `passes` forward passes over tokens on one GPU; a backward counts as two.

    2 operations a parameter and token; attention adds 4 a layer, query element and earlier token.
    """
    config, counts = shape.config, shape.counts
    experts = counts.experts * config.num_experts_per_tok / config.num_experts if counts.experts else 0
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * head_dim(config) * context
    dense = 2 * (shape.active - experts) + attention
    rate = machine.tflops * 1e12
    return passes * tokens * (dense / REACHED["products"] + 2 * experts / REACHED["expert products"]) / rate


def decode_step_seconds(
    config: Config, shape: Shape, machine: Machine, batch: float, context: float
) -> float:
    """Return the seconds of one engine step that samples a token for each of `batch` completions.

    The larger of two: reading the weights, of the experts those that some token of the batch takes, with all
    keys and values; and the products.
    """
    settings, model, counts = config.rollout, shape.config, shape.counts
    ranks, weights = settings.tensor_parallel, shape.engine_weights(config.rollout)
    if counts.experts:
        touched = 1 - (1 - model.num_experts_per_tok / model.num_experts) ** batch
        weights *= 1 - counts.experts / sum(counts) * (1 - touched)
    keys_and_values = batch * context * rollout.kv_bytes_per_token(model, settings)
    reading = (weights + keys_and_values) / (machine.memory_gbs * 1e9 * REACHED["memory"])
    speedup = 2 if settings.fp8 == "on" else 1
    computing = product_seconds(shape, machine, batch, context, 1) / ranks / speedup
    talking = 0.0
    if ranks > 1:
        sent = batch * model.hidden_size * 2 * 2 * (ranks - 1) / ranks
        one = ALL_REDUCE_S + sent / (link_gbs(machine, 0, 1, ranks) * 1e9)
        talking = 2 * model.num_hidden_layers * one
    return max(reading, computing) + talking + ENGINE_STEP_S


def completions_at_once(
    config: Config, shape: Shape, parts: dict[str, int], num_ranks: int, load: Workload
) -> float:
    """Return how many completions an engine works on: all it has, as many as it may or has room for."""
    engines = num_ranks / config.rollout.tensor_parallel
    of_engine = config.rollout.prompts_per_step * config.rollout.group_size / engines
    per_token = rollout.kv_bytes_per_token(shape.config, config.rollout)
    room = parts["KV cache"] / per_token / (load.prompt_tokens + load.new_tokens)
    return max(1.0, min(of_engine, config.rollout.max_num_seqs, room))


def rollout_seconds(
    config: Config, shape: Shape, parts: dict[str, int], num_ranks: int, machine: Machine, load: Workload
) -> float:
    """Return the seconds of a rollout: prompts, full batches, then a tail up to the longest completion."""
    settings = config.rollout
    engines = num_ranks / settings.tensor_parallel
    of_engine = settings.prompts_per_step * settings.group_size / engines
    batch = completions_at_once(config, shape, parts, num_ranks, load)
    prompts = of_engine / (settings.group_size if settings.prefix_caching else 1) * load.prompt_tokens
    prefill = product_seconds(shape, machine, prompts, load.prompt_tokens / 2, 1) / settings.tensor_parallel
    context = load.prompt_tokens + load.new_tokens / 2
    bulk = of_engine * load.new_tokens / batch * decode_step_seconds(config, shape, machine, batch, context)
    late = max(1.0, batch / TAIL_SHARE)
    tail = (settings.max_new_tokens - load.new_tokens) * decode_step_seconds(
        config, shape, machine, late, settings.max_new_tokens
    )
    return prefill + bulk + tail


def sync_seconds(config: Config, shape: Shape, machine: Machine) -> float:
    """Return the seconds of a weight sync: the wire, two copies of what is handed over, Python per expert."""
    moved = sync_bytes(config, shape)
    wire = moved["over the wire"] / (link_gbs(machine, 0, 1, config.model.ep_size) * 1e9)
    copies = 2 * moved["handed over"] / (machine.memory_gbs * 1e9 * REACHED["memory"])
    experts = shape.num_moe_layers * num_experts_of(shape.config)
    if sends_own_experts(config):
        experts //= config.model.ep_size
    return wire + copies + 3 * experts * LOADER_S_PER_EXPERT


def phase_seconds(
    config: Config, shape: Shape, parts: dict[str, int], num_ranks: int, machine: Machine, load: Workload
) -> dict[str, float]:
    """Return the seconds of a step by phase; verifiers are hidden behind the rollout."""
    train, model = config.train, config.model
    tokens = tokens_per_step(config, load) / num_ranks
    context = (load.prompt_tokens + load.new_tokens) / 2
    one_pass = product_seconds(shape, machine, tokens, context, 1)
    sent = wire_bytes(config, shape, num_ranks, load)
    exchange = sent["all-to-all"] / (link_gbs(machine, 0, 1, model.ep_size) * 1e9)
    reducing = (sent["gradients"] + sent["updated weights"]) / (link_gbs(machine, 0, 1, num_ranks) * 1e9)
    passes = 3 + model.activation_checkpointing
    before = needs_old_pass(config) + (config.algorithm.kl_coef > 0)
    # AdamW reads and writes weights and both moments and reads gradients
    updates = train.minibatches_per_step * train.passes_per_rollout
    adamw = updates * 7 / 3 * (parts["master weights"] + parts["AdamW"]) / (machine.memory_gbs * 1e9)
    update = one_pass * passes * train.passes_per_rollout
    of_update = passes * train.passes_per_rollout / (passes * train.passes_per_rollout + before)
    return {
        "rollout": rollout_seconds(config, shape, parts, num_ranks, machine, load),
        "logprobs": one_pass * before + exchange * (1 - of_update),
        "update": update + exchange * of_update + reducing + adamw / REACHED["memory"],
        "sync": sync_seconds(config, shape, machine),
    }


# ------------------------------------------------------------------------------------------------------------
# The plan
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Task:
    """What is planned: settings, model, machine and how many GPUs of it."""

    config: Config
    shape: Shape
    machine: Machine
    num_gpus: int
    load: Workload

    def with_settings(self, **values) -> "Task":
        """Return the same with other settings, named section__key, or another number of gpus."""
        num_gpus = values.pop("gpus", self.num_gpus)
        sections = {}
        for name, value in values.items():
            section, key = name.split("__")
            sections[section] = sections.get(section, getattr(self.config, section)).model_copy(
                update={key: value}
            )
        return replace(self, config=self.config.model_copy(update=sections), num_gpus=num_gpus)


def contradiction(task: Task) -> str | None:
    """Say what in the settings does not go with model or number of GPUs; None if all does."""
    config, num_gpus, experts = task.config, task.num_gpus, num_experts_of(task.shape.config)
    ep_size, parallel = config.model.ep_size, config.rollout.tensor_parallel
    per_step, minibatches = config.rollout.prompts_per_step, config.train.minibatches_per_step
    kv_heads, heads = task.shape.config.num_key_value_heads, task.shape.config.num_attention_heads
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
    }  # fmt: skip
    splits = 1 if config.rollout.expert_parallel else parallel
    if config.rollout.fp8 == "on" and not rollout.splits_into_blocks(task.shape.config, splits):
        checks["rollout.fp8 on: the parts of an expert are no whole blocks of 128; see rollout.check_fp8"] = (
            True
        )
    return next((message for message, is_wrong in checks.items() if is_wrong), None)


def memory_parts(task: Task) -> dict[str, int]:
    """Return the bytes of a GPU by part."""
    total = int(task.machine.memory_gib * GIB)
    parts = trainer_memory(
        task.config, task.shape, task.num_gpus, micro_batch_tokens(task.config), on_gpu=True
    )
    parts |= engine_memory(task.config, task.shape, parts, total)
    return parts | {"sync buffers": sync_buffer_bytes(task.config, task.shape), "context": CONTEXT_BYTES}


def complaint(task: Task, parts: dict[str, int]) -> str | None:
    """Say what does not fit into a GPU; None if all does."""
    total = task.machine.memory_gib
    per_token = rollout.kv_bytes_per_token(task.shape.config, task.config.rollout)
    needed = max_model_len(task.config) * per_token
    phases = phase_memory(task.config, parts | {"KV cache": max(parts["KV cache"], needed)})
    phase, most = max(phases.items(), key=lambda item: item[1])
    if most > total * GIB:
        return f"{phase} needs {most / GIB:.0f} GiB with one completion of full length, a GPU has {total:.0f}"
    if parts["KV cache"] < needed:
        return (
            f"keys and values have {max(0, parts['KV cache']) / GIB:.1f} GiB, one completion of "
            f"{max_model_len(task.config):,} tokens needs {needed / GIB:.1f}"
        )
    return None


def fits(task: Task) -> bool:
    """Tell whether settings go together and with the machine."""
    return contradiction(task) is None and complaint(task, memory_parts(task)) is None


def sleep_needed(task: Task) -> str:
    """Say whether the engine has to sleep during updates."""
    without, with_sleep = (fits(task.with_settings(rollout__sleep_level=level)) for level in (0, 2))
    if without:
        return "no"
    return "rollout.sleep_level=2" if with_sleep else "does not suffice"


def in_gib(parts: dict[str, int]) -> dict[str, float]:
    """Return bytes as GiB with two digits."""
    return {name: round(value / GIB, 2) for name, value in parts.items()}


def plan_run(task: Task) -> dict:
    """Return the whole plan as plain values; `fits` says whether the run can be started so."""
    config, shape, load, num_gpus = task.config, task.shape, task.load, task.num_gpus
    parts = memory_parts(task)
    wrong = contradiction(task) or complaint(task, parts)
    phases, host = phase_memory(config, parts), host_memory(config, shape, parts, num_gpus, load)
    per_node = min(num_gpus, task.machine.gpus_per_node)
    seconds = phase_seconds(config, shape, parts, num_gpus, task.machine, load)
    step = sum(seconds.values())
    kv_bytes = rollout.kv_bytes_per_token(shape.config, config.rollout)
    return {
        "fits": wrong is None,
        "why_not": wrong,
        "advice": [] if wrong is None else advice(task),
        "sleep": sleep_needed(task),
        "memory_gib": in_gib(parts),
        "phases_gib": in_gib(phases),
        "gpu_memory_gib": task.machine.memory_gib,
        "host_gib": in_gib(host) | {"of a node": round(sum(host.values()) * per_node / GIB, 1)},
        "kv_cache_tokens": max(0, parts["KV cache"]) // kv_bytes,
        "completions_at_once": round(completions_at_once(config, shape, parts, num_gpus, load)),
        "seconds": {name: round(value, 2) for name, value in seconds.items()} | {"step": round(step, 1)},
        "tokens_per_step": int(tokens_per_step(config, load)),
        "tokens_per_second_and_gpu": round(tokens_per_step(config, load) / step / num_gpus, 1),
        "wire_bytes_per_step": wire_bytes(config, shape, num_gpus, load),
        "sync_bytes": sync_bytes(config, shape),
        "parameters": shape.counts._asdict() | {"active": shape.active},
        "gpus": num_gpus,
        "machine": asdict(task.machine),
        "workload": asdict(load),
    }


# ------------------------------------------------------------------------------------------------------------
# What helps
# ------------------------------------------------------------------------------------------------------------
def single_changes(task: Task) -> Iterator[dict]:
    """Yield changes of one setting that save memory, the cheapest in speed first."""
    config, num_gpus = task.config, task.num_gpus
    if config.rollout.kv_cache_gib is not None:
        yield {"rollout__kv_cache_gib": None}
    if config.rollout.sleep_level == 0:
        yield {"rollout__sleep_level": 2}
    if not config.model.activation_checkpointing:
        yield {"model__activation_checkpointing": True}
    doubled = lambda value: (value * 2**i for i in range(1, 7))
    for size in doubled(config.rollout.tensor_parallel):
        if size <= min(num_gpus, task.machine.gpus_per_node):
            yield {"rollout__tensor_parallel": size}
    for size in doubled(config.model.ep_size):
        if num_experts_of(task.shape.config) and size <= num_gpus:
            yield {"model__ep_size": size}
    for size in (16384, 8192, 4096):
        if size < config.train.micro_batch_tokens:
            yield {"train__micro_batch_tokens": size}
    if config.train.zero_stage == 1:
        yield {"train__zero_stage": 2}
    if config.rollout.fp8 != "on":
        yield {"rollout__fp8": "on"}


def as_settings(change: dict) -> str:
    """Write a change as it stands on the command line."""
    values = {True: "true", False: "false", None: "null"}
    text = lambda value: values[value] if isinstance(value, (bool, type(None))) else str(value)
    return " ".join(
        f"--gpus {value}" if name == "gpus" else f"{name.replace('__', '.')}={text(value)}"
        for name, value in change.items()
    )


def advice(task: Task, most: int = 3) -> list[str]:
    """List what makes the run fit: fewest changes first, the cheapest in speed first; else more GPUs."""
    singles, found = [*single_changes(task)], []
    for number in (1, 2, 3):
        for chosen in itertools.combinations(singles, number):
            change = {key: value for one in chosen for key, value in one.items()}
            if len(change) == number and fits(task.with_settings(**change)):
                found.append(as_settings(change))
            if len(found) == most:
                return found
        if found:
            return found
    best = {"rollout__sleep_level": 2, "model__activation_checkpointing": True, "rollout__kv_cache_gib": None}
    for number in (task.num_gpus * 2**i for i in range(1, 11)):
        options = [*search(task.with_settings(gpus=number, **best), most=1)]
        if options:
            return [as_settings(best | {"gpus": number} | options[0][0])]
    return ["a larger GPU, a shorter rollout.max_new_tokens or a smaller model"]


def search(task: Task, most: int = 5) -> list[tuple[dict, dict]]:
    """Return (settings, plan) of the fastest that fit, of all sizes that divide experts and GPUs."""
    powers = [2**i for i in range(11) if task.num_gpus % 2**i == 0]
    inside = [size for size in powers if size <= task.machine.gpus_per_node]
    has_experts, found = num_experts_of(task.shape.config) > 0, []
    grid = itertools.product(
        powers if has_experts else [1], inside, (32768, 16384, 8192), (False, True), (0, 2), (1, 2)
    )
    for ep_size, parallel, tokens, checkpointing, sleep, zero_stage in grid:
        change = {
            "model__ep_size": ep_size, "rollout__tensor_parallel": parallel,
            "train__micro_batch_tokens": tokens, "model__activation_checkpointing": checkpointing,
            "rollout__sleep_level": sleep, "train__zero_stage": zero_stage,
        }  # fmt: skip
        tried = task.with_settings(**change)
        if fits(tried):
            parts = memory_parts(tried)
            seconds = phase_seconds(
                tried.config, tried.shape, parts, tried.num_gpus, tried.machine, tried.load
            )
            found.append((sum(seconds.values()), len(found), change))
    return [(change, plan_run(task.with_settings(**change))) for _, _, change in sorted(found)[:most]]


# ------------------------------------------------------------------------------------------------------------
# What is printed, and the first lines of a YAML
# ------------------------------------------------------------------------------------------------------------
def describe(plan: dict) -> str:
    """Write a plan for people."""
    load = plan["workload"]
    machine = f"{plan['gpus']} GPUs of {plan['gpu_memory_gib']:g} GiB"
    parameters = plan["parameters"]
    total = parameters["experts"] + parameters["embeddings"] + parameters["others"]
    tables = {
        "GiB of a GPU by part": plan["memory_gib"],
        "GiB of a GPU by phase": plan["phases_gib"],
        "GiB of the host by part and rank": plan["host_gib"],
        "seconds of a step": plan["seconds"],
        "GB that a GPU sends in a step": {n: v / 1e9 for n, v in plan["wire_bytes_per_step"].items()},
    }
    lines = [
        f"{total / 1e9:.2f} billion parameters, {parameters['active'] / 1e9:.2f} active; {machine}",
        f"planned for prompts of {load['prompt_tokens']:,.0f} and completions of {load['new_tokens']:,.0f} "
        "tokens in the mean",
    ]
    for title, values in tables.items():
        lines += ["", title, *(f"  {name:<27}{value:>9.2f}" for name, value in values.items())]
    lines += [
        "",
        f"{plan['tokens_per_second_and_gpu']:,} tokens a second and GPU over a whole step; an engine "
        f"works on {plan['completions_at_once']} completions at once, its cache holds "
        f"{plan['kv_cache_tokens']:,} tokens",
        f"sleep during updates: {plan['sleep']}",
        "it fits" if plan["fits"] else f"it does not fit: {plan['why_not']}",
        *(f"  try {line}" for line in plan["advice"]),
    ]
    return "\n".join(lines)


def describe_search(found: list[tuple[dict, dict]]) -> str:
    """Write the settings of a search, the fastest first."""
    if not found:
        return "nothing fits"
    line = lambda change, plan: (
        f"{plan['seconds']['step']:>9.1f} s {max(plan['phases_gib'].values()):>7.1f} GiB  "
        f"{as_settings(change)}"
    )
    return "\n".join(line(change, plan) for change, plan in found)


MACHINE_LINE = re.compile(  # GPUs, machine, model, mean tokens of prompts and of completions
    r"# Machine: (\d+) x (\w+); shape of (\S+); mean prompt ([\d,]+), completion ([\d,]+) tokens"
)


def comment_of(file: Path) -> list[str]:
    """Return the comment lines that a YAML begins with."""
    return list(itertools.takewhile(lambda line: line.startswith("#"), file.read_text().splitlines()))


def first_lines(file: Path, task: Task, words: str) -> list[str]:
    """Return the comment of a YAML: its own first lines, then command, machine and what the plan expects."""
    plan, load, num_gpus = plan_run(task), task.load, task.num_gpus
    own = [*itertools.takewhile(lambda line: not line.startswith("#   torchrun"), comment_of(file))]
    num_nodes = -(-num_gpus // task.machine.gpus_per_node)
    nodes = f" --nnodes={num_nodes} --node-rank=R --master-addr=HOST" if num_nodes > 1 else ""
    shown = file.resolve().relative_to(Path(__file__).resolve().parents[1])
    phases = ", ".join(f"{name} {gib:.0f}" for name, gib in plan["phases_gib"].items())
    seconds = ", ".join(
        f"{name} {s:.0f}" for name, s in plan["seconds"].items() if name != "step" and s >= 0.5
    )
    verdict = "" if plan["fits"] else f" It does not fit: {plan['why_not']}."
    most, step = max(plan["phases_gib"].values()), plan["seconds"]["step"]
    expected = (
        f"Expected by experiments/plan.py: {most:.0f} of {plan['gpu_memory_gib']:.0f} GiB a GPU ({phases}), "
        f"{plan['host_gib']['of a node']:.0f} GiB of a host; a step of {plan['tokens_per_step'] / 1e6:.2f} "
        f"million tokens in {step:.0f} s ({seconds}), within a factor of two.{verdict}"
    )
    return [
        *own,
        f"#   torchrun{nodes} --nproc-per-node={min(num_gpus, task.machine.gpus_per_node)} train_rl.py \\",
        f"#       --config {shown}",
        f"# Machine: {num_gpus} x {words}; mean prompt {load.prompt_tokens:,.0f}, completion "
        f"{load.new_tokens:,.0f} tokens",
        *textwrap.wrap(expected, 106, initial_indent="# ", subsequent_indent="# "),
    ]


def write_first_lines(file: Path, task: Task, words: str) -> None:
    """Replace the comment that a YAML begins with."""
    text = file.read_text().splitlines()
    file.write_text("\n".join([*first_lines(file, task, words), *text[len(comment_of(file)) :]]) + "\n")


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------
def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="experiments/plan.py", description=__doc__, formatter_class=keep_lines
    )
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        nargs="+",
        action="append",
        required=True,
        metavar="FILE",
        help="as for train_rl.py",
    )
    add("--gpus", type=int, help="GPUs of all nodes (default: what the file says, or ep_size)")
    add("--machine", choices=sorted(MACHINES), help="kind of GPU (default: what the file says, or h100)")
    add("--shape", help="known model or folder to plan with (default: what the file says, or model.path)")
    add("--gpu-memory-gib", type=float, help="memory of a GPU (default: the machine's)")
    add("--gpus-per-node", type=int, help="GPUs that NVLink connects (default: the machine's)")
    add("--network-gbs", type=float, help="GB/s of a GPU to another node (default: the machine's)")
    add(
        "--prompt-tokens", type=float, help="mean of prompts (default: what the file says, or half the limit)"
    )
    add("--new-tokens", type=float, help="mean of completions (default: the same)")
    add("--search", action="store_true", help="propose ep_size, tensor_parallel, micro_batch_tokens and more")
    add("--write-header", action="store_true", help="write the first lines of each file; no other output")
    add("--json", type=Path, metavar="FILE", help="write the plan here")
    add("settings", nargs="*", metavar="section.key=value", help="single settings, over the files'")
    return parser.parse_intermixed_args(argv)


def make_task(files: list[Path], args: argparse.Namespace) -> tuple[Task, str]:
    """Return what is to be planned, and machine and model in words; ValueError for what is wrong."""
    config = load_config([*(part for file in files for part in ("--config", str(file))), *args.settings])
    said = next((m for m in map(MACHINE_LINE.match, comment_of(files[0])) if m), None)
    model = args.shape or (said[3] if said else config.model.path)
    shape = shape_of(model)
    check_model(config, shape.config)
    number = lambda text: int(text.replace(",", ""))
    machine = args.machine or (said[2] if said else "h100")
    prompt_tokens, new_tokens = (number(said[4]), number(said[5])) if said else (None, None)
    load = Workload(
        args.prompt_tokens or prompt_tokens or config.rollout.max_prompt_tokens / 2,
        args.new_tokens or new_tokens or config.rollout.max_new_tokens / 2,
    )
    if (
        load.prompt_tokens > config.rollout.max_prompt_tokens
        or load.new_tokens > config.rollout.max_new_tokens
    ):
        raise ValueError(
            f"the means {load.prompt_tokens:g} and {load.new_tokens:g} are above rollout's limits"
        )
    own = {
        "memory_gib": args.gpu_memory_gib,
        "gpus_per_node": args.gpus_per_node,
        "network_gbs": args.network_gbs,
    }
    changed = {name: value for name, value in own.items() if value}
    least = math.lcm(config.model.ep_size, config.rollout.tensor_parallel)
    num_gpus = args.gpus or (int(said[1]) if said else least)
    if num_gpus < 1:
        raise ValueError(f"--gpus {num_gpus} must be at least 1")
    return Task(
        config, shape, replace(MACHINES[machine], **changed), num_gpus, load
    ), f"{machine}; shape of {model}"


def main(argv: list[str] | None = None) -> int:
    """Read the command line, plan, print; return the exit code."""
    args = parse_args(argv)
    given = [file for files in args.config for file in files]
    if args.write_header:
        for file in given:
            write_first_lines(file, *make_task([file], args))
        return 0
    task, _ = make_task(given, args)
    if args.search:
        found = search(task)
        print(describe_search(found))
        result = [{"settings": as_settings(change), **plan} for change, plan in found]
    else:
        found = result = plan_run(task)
        print(describe(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if found and (args.search or result["fits"]) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        print(f"experiments/plan.py: {error}", file=sys.stderr)
        sys.exit(2)
