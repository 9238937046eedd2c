"""Estimate the memory of a run, by part, before anything is loaded.

    trainer     memory_by_part()       weights, gradients, optimizer states, activations, sync buffers
    engine      engine_memory()        weights, workspace, KV cache
    GPU         plan_memory()          trainer and engine together, with the reason if a phase does not fit
    CPU         host_bytes_by_phase()  trainer, engine and processes of a rank; ranks share their node
    start       check_memory()         refuses a run that does not fit
                choose_micro_batch()   the largest micro-batch that fits, on CPUs

The estimate needs config.json and the settings only, so experiments/plan.py makes it on any machine, for
example for 128 GPUs on a laptop. runtime/memory.py adds the parts up to phases (rollout, update, optimizer
step, sync). tests/test_plan.py compares the formulas with the tensors that torch really saves.
"""

import itertools
import math
import os

import torch
from transformers import PretrainedConfig

from extras.base import active
from fp8 import fp8_refusal
from kernels.linear_logprob_entropy import BLOCK_ELEMENTS
from moe_model import (
    CHUNK_ELEMENTS,
    ParameterCounts,
    expert_width,
    head_dim,
    is_moe_layer,
    num_experts_of,
    parameter_counts,
)
from runtime.checks import say
from runtime.machine import device_of_rank
from runtime.memory import (
    GIB,
    NodeMemory,
    bytes_by_phase,
    margin_bytes,
    planned_rows,
    trainer_bytes,
    why_too_small,
)
from settings import MICRO_BATCH_SIZES, Config, ModelSettings, RolloutSettings

REDUCE_BUCKET = 500_000_000  # elements of DeepSpeed's reduce_bucket_size
COMMUNICATOR_BYTES = GIB // 2  # of NCCL, per group of ranks [ours: a guess for 8 ranks on NVLink]


# ------------------------------------------------------------------------------------------------------------
# Activations: from the forward pass to the end of the backward pass
# ------------------------------------------------------------------------------------------------------------
LAYERS_CACHE: dict[str, list[bool]] = {}


def layers_with_experts(config: PretrainedConfig) -> list[bool]:
    """Tell of each layer whether it has experts; cached, because a search makes a thousand estimates."""
    key = f"{type(config).__name__} {vars(config)}"
    if key not in LAYERS_CACHE:
        LAYERS_CACHE[key] = [is_moe_layer(config, layer) for layer in range(config.num_hidden_layers)]
    return LAYERS_CACHE[key]


def itemsize_of(settings: ModelSettings) -> int:
    """Return the bytes of one value of the policy: 4 in float32, 2 in bfloat16.

    The estimates of this file take settings whose dtype is not auto; see moe_model.policy_dtype().
    """
    return getattr(torch, settings.dtype).itemsize


def saved_bytes_per_token(config: PretrainedConfig, layer: int, itemsize: int, on_gpu: bool) -> int:
    """Return the bytes per token that a layer saves for its backward pass.

    Exact on CPUs, except for the rows that moe_model.padded_places() adds.

    D hidden size, Q heads x head size of queries, V the same of keys or values, K experts per token, I expert
    width, E experts, s itemsize, a 4 on CPUs and s on GPUs:
        norms      inputs and outputs of the two norms, 4 D s, and queries and keys, (Q + V) s
        attention  padded queries, keys, values and outputs, (2 Q + 2 V) a; outputs without padding, Q s;
                   log-sums
        MLP        gate, up, SiLU and product, 4 I s
        experts    input and output rows, gate, up, SiLU and product of K experts, K (2 D + 4 I) s; scores
                   4 E; weights and indices; shared experts 4 I s each
    """
    hidden = config.hidden_size
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    queries = heads * head_dim(config)
    keys = kv_heads * head_dim(config)
    norms = (4 * hidden + queries + keys) * itemsize
    norms += 4 * (2 + heads + kv_heads)  # scales of the norms, one float32 per normalised vector
    attention = grid_bytes_per_token(config, itemsize, on_gpu) + queries * itemsize
    if not is_moe_layer(config, layer):
        return norms + attention + 4 * config.intermediate_size * itemsize
    top_k = config.num_experts_per_tok
    width = expert_width(config)
    num_shared = getattr(config, "n_shared_experts", 0)
    rows = (top_k * (2 * hidden + 4 * width) + num_shared * 4 * width) * itemsize
    indices = (32 if on_gpu or itemsize == 4 else 40) * top_k + 4
    return norms + attention + rows + 4 * num_experts_of(config) + indices


def grid_bytes_per_token(config: PretrainedConfig, itemsize: int, on_gpu: bool) -> int:
    """Return the share of saved_bytes_per_token() that attention's padded grid takes, per place of the grid.

    Sharing prompts does not reduce this share: the grid repeats a shared prompt for every completion. The
    grid holds queries, keys, values and outputs, 2 (Q + V) a, and log-sums.
    """
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    return 2 * (heads + kv_heads) * head_dim(config) * (itemsize if on_gpu else 4) + 4 * heads


def activation_bytes(
    config: PretrainedConfig, settings: ModelSettings, tokens: int, on_gpu: bool, num_shared: int
) -> tuple[int, int]:
    """Return the bytes that a micro-batch keeps from forward to backward pass, and of a layer computed again.

    With model.activation_checkpointing the inputs of all layers are kept, and the backward pass computes one
    layer at a time again; otherwise all layers are kept, and none is. tokens, num_shared: as in
    passing_bytes().
    """
    hidden = config.hidden_size
    num_layers = config.num_hidden_layers
    itemsize = itemsize_of(settings)
    has_experts = layers_with_experts(config)
    bytes_by_kind = {  # a layer with experts, a layer without
        kind: saved_bytes_per_token(config, has_experts.index(kind), itemsize, on_gpu)
        for kind in set(has_experts)
    }
    bytes_of_layers = [bytes_by_kind[kind] for kind in has_experts]
    per_grid_place = grid_bytes_per_token(config, itemsize, on_gpu)
    final_norm = 2 * hidden * itemsize
    if settings.activation_checkpointing:
        kept = (tokens - num_shared) * (num_layers * hidden * itemsize + final_norm)
        largest = max(bytes_of_layers)
        return kept, tokens * largest - num_shared * (largest - per_grid_place)
    per_token = sum(bytes_of_layers) + final_norm
    return tokens * per_token - num_shared * (per_token - per_grid_place * num_layers), 0


def passing_bytes(
    config: PretrainedConfig,
    settings: ModelSettings,
    tokens: int,
    device: str,
    num_shared: int = 0,
    frozen: bool = False,
) -> dict[str, int]:
    """Return the bytes that a micro-batch takes on top of everything that is allocated between updates.

    tokens: places of attention's grid. num_shared: grid places whose token belongs to a shared prompt and is
    computed elsewhere (see moe_model.share()). device: cpu or cuda. frozen: weights have no gradients; the
    gradient of the activations passes through them all the same.

    `activations` are kept from the forward to the backward pass. `recomputed layer`, with
    model.activation_checkpointing, is the layer that the backward pass computes again. `on the way back` is
    the larger of two peaks of the backward pass:
        head    a block of logits and its gradient, the gradient of the hidden states in float32, and the
                gradient of the head's weight while it is added to the float32 sum
        layer   gradients of the rows of its experts, of gate and up, and a chunk of rows in float32
    """
    hidden = config.hidden_size
    itemsize = itemsize_of(settings)
    activations, recomputed = activation_bytes(config, settings, tokens, device == "cuda", num_shared)
    tokens = tokens - num_shared
    gradient = itemsize if itemsize == 4 else itemsize + 4  # bytes of a value, with its copy in float32
    gradient = 0 if frozen else gradient
    blocks = 2 * 4 * min(BLOCK_ELEMENTS[device], tokens * config.vocab_size)
    head = blocks + tokens * hidden * (4 + itemsize) + config.vocab_size * hidden * gradient
    if num_experts_of(config):
        top_k = config.num_experts_per_tok
        width = expert_width(config)
        rows = min(CHUNK_ELEMENTS[device], tokens * hidden * top_k) * (4 + itemsize)
        gate_up = num_experts_of(config) // settings.ep_size * 2 * width * hidden * gradient
        layer = tokens * top_k * (2 * hidden + 3 * width) * itemsize + gate_up + rows
    else:
        layer = tokens * (2 * hidden + 3 * config.intermediate_size) * itemsize
    return {"activations": activations, "recomputed layer": recomputed, "on the way back": max(head, layer)}


# ------------------------------------------------------------------------------------------------------------
# DeepSpeed and the weight sync
# ------------------------------------------------------------------------------------------------------------
def optimizer_step_bytes(
    counts: ParameterCounts, settings: ModelSettings, zero_stage: int, num_ranks: int, fused_adamw: bool
) -> int:
    """Return the bytes that DeepSpeed's step takes on top of everything that is allocated between updates.

    DeepSpeed has two parameter groups, the experts and all other parameters.
        ZeRO 1, bfloat16   float32 gradients are all-reduced group by group, through a copy in bfloat16
        ZeRO 1, float32    the gradients of the rank's share are copied to one tensor, then the gradients of
                           all other parameters are freed
        ZeRO 2             gradients have been reduced in the backward pass: 0
    The unfused AdamW makes two copies of a group's share.
    """
    itemsize = itemsize_of(settings)
    shared = counts.embeddings + counts.others
    group_sizes = (shared, counts.experts // settings.ep_size)
    shares = (shared // num_ranks, counts.experts // num_ranks)
    adamw = 0 if fused_adamw else 2 * 4 * max(shares)
    if zero_stage == 2:
        return adamw
    if itemsize == 4:
        return max(0, adamw + 4 * sum(shares) - 4 * sum(group_sizes))
    return max(adamw, max(group_sizes) * 2 if num_ranks > 1 else 0)


def reduce_buffer_bytes(held: int, itemsize: int, on_gpu: bool) -> int:
    """Return the bytes that ZeRO 2 takes in a backward pass to all-reduce the gradients of `held` parameters.

    Gradients fill a buffer of REDUCE_BUCKET elements. A full buffer is copied and reduced while the next one
    fills, which takes a second buffer. If all gradients fit into one buffer, that buffer is reduced after the
    backward pass, without a copy. On CPUs only the filled pages of a buffer take memory.
    """
    buffer = REDUCE_BUCKET if on_gpu else min(REDUCE_BUCKET, held)
    return (2 * buffer if held > REDUCE_BUCKET else buffer) * itemsize


def largest_parameter(config: PretrainedConfig, settings: ModelSettings) -> int:
    """Return the elements of a rank's largest parameter: the embedding, or gate and up of one layer."""
    num_local_experts = num_experts_of(config) // settings.ep_size
    gate_up = num_local_experts * 2 * expert_width(config) * config.hidden_size if num_local_experts else 0
    return max(config.vocab_size * config.hidden_size, gate_up)


def offloaded_bytes(counts: ParameterCounts, settings: ModelSettings, num_ranks: int) -> int:
    """Return the bytes of host memory that train.offload_optimizer takes for a rank.

    For each parameter of the rank's share the host holds the float32 weight, the gradient, AdamW's two moving
    averages, and the updated weight in the policy's dtype. A float32 policy also sums its gradients on the
    host. Everything but the averages is pinned, in one tensor for experts and one for all other parameters;
    torch rounds a pinned tensor up to a power of two, for example 5 GiB to 8.
    counts: of the trained parameters.
    """
    itemsize = itemsize_of(settings)
    pinned_sizes = (4, 4, itemsize) if itemsize == 2 else (4, 4, itemsize, 4)
    shares = (counts.experts // num_ranks, (counts.embeddings + counts.others) // num_ranks)
    return sum(
        8 * share + sum(1 << (size * share - 1).bit_length() for size in pinned_sizes)
        for share in filter(None, shares)
    )


def sync_buffer_bytes(config: PretrainedConfig, settings: ModelSettings, own_experts: bool) -> int:
    """Return the bytes of a weight sync: a gathered tensor, and a layer that vLLM is assembling.

    own_experts: the engine of a rank takes the experts that the rank trains, so that none are gathered.
    """
    counts = parameter_counts(config)
    if not counts.experts:
        return 0
    layer_bytes = counts.experts // sum(layers_with_experts(config)) * itemsize_of(settings)
    if own_experts:
        return layer_bytes // settings.ep_size
    if settings.ep_size == 1:
        return layer_bytes
    return layer_bytes * 2 // 3 + layer_bytes  # gate and up, two thirds of a layer, are the largest gather


# ------------------------------------------------------------------------------------------------------------
# The trainer on one rank
# ------------------------------------------------------------------------------------------------------------
def memory_by_part(
    config: PretrainedConfig,
    settings: ModelSettings,
    zero_stage: int,
    num_ranks: int,
    tokens: int,
    with_reference: bool = False,
    own_experts: bool = False,
    on_gpu: bool = True,
    offload_optimizer: bool = False,
    fused_adamw: bool | None = None,
    trained: ParameterCounts | None = None,
) -> dict[str, int]:
    """Return the bytes of the trainer on a rank, by part; runtime/memory.py adds the parts of each phase.

    tokens: padded tokens of a micro-batch. with_reference: the initial policy is kept for a KL penalty.
    own_experts: as in hf_tensors(). fused_adamw: as in TrainSettings. trained: number of parameters with
    gradients, if these are adapters of frozen weights; extras/lora.py adds the adapters to `weights`.

    A rank holds n parameters, namely 1 / ep_size of the experts and all other parameters. ZeRO lets the rank
    update m of these n, namely 1 / num_ranks of the whole model; frozen weights count as weights alone:
        weights n x 2 or 4 bytes     gradients n x 4     master weights m x 4     AdamW m x 8
    ZeRO 2 sums gradients (m x 4 bytes) from the first backward pass to the optimizer step and holds none
    between updates; a float32 policy with ZeRO 1 neither. With offload_optimizer the sum is then handed to
    the host, which holds master weights and AdamW's states (see offloaded_bytes()); a buffer for one gradient
    stays on the GPU.
    """
    counts = parameter_counts(config)
    itemsize = itemsize_of(settings)
    num_held = counts.experts // settings.ep_size + counts.embeddings + counts.others
    trained = trained or counts
    num_trained = trained.experts // settings.ep_size + trained.embeddings + trained.others
    num_updated = sum(trained) // num_ranks
    sums_are_held = zero_stage == 1 and itemsize == 2
    num_summed = num_updated if zero_stage == 2 else num_trained
    optimizer_on_gpu = not offload_optimizer
    is_sharded = zero_stage == 2
    is_fused = on_gpu if fused_adamw is None else fused_adamw
    device = "cuda" if on_gpu else "cpu"
    passing = passing_bytes(config, settings, tokens, device, frozen=trained != counts)
    passing["on the way back"] += is_sharded * reduce_buffer_bytes(num_trained, itemsize, on_gpu)
    gradient_buffer = offload_optimizer * min(num_trained, largest_parameter(config, settings)) * itemsize
    return {
        "weights": num_held * itemsize,
        "gradients": gradient_buffer + sums_are_held * num_summed * 4,
        "master weights": optimizer_on_gpu * num_updated * 4,
        "AdamW": optimizer_on_gpu * num_updated * 8,
        "reference": num_held * itemsize if with_reference else 0,
        "gradients in an update": (not sums_are_held) * num_summed * 4,
        **passing,
        "optimizer step": optimizer_step_bytes(trained, settings, zero_stage, num_ranks, is_fused),
        "sync buffers": sync_buffer_bytes(config, settings, own_experts),
    }


# ------------------------------------------------------------------------------------------------------------
# The engine on one rank
# ------------------------------------------------------------------------------------------------------------
def kv_bytes_per_token(hf_config, settings: RolloutSettings) -> int:
    """Return the bytes of the KV cache per token and rank.

    If tensor_parallel exceeds the number of KV heads, several ranks hold the same head.
    """
    heads = max(1, hf_config.num_key_value_heads // settings.tensor_parallel)
    itemsize = 1 if settings.kv_cache_fp8 else getattr(torch, settings.dtype).itemsize
    return 2 * hf_config.num_hidden_layers * heads * head_dim(hf_config) * itemsize


# Tokens. vLLM caches whole blocks of a prompt. Its default on CPUs, 128, is longer than many prompts, which
# are then computed once per completion. The attention kernel for CPUs takes multiples of 32.
CPU_BLOCK_SIZE = 32


def block_size_of(options: dict) -> int:
    """Return the tokens of a KV cache block: the option of an engine, or vLLM's default on GPUs."""
    return options.get("block_size", 16)


def smallest_kv_cache_bytes(hf_config, settings: RolloutSettings, max_model_len: int, block_size: int) -> int:
    """Return the bytes of a KV cache that holds one completion of full length.

    vLLM stores whole blocks of tokens and reserves one block for itself.
    """
    num_blocks = math.ceil(max_model_len / block_size) + 1
    return num_blocks * block_size * kv_bytes_per_token(hf_config, settings)


def check_kv_cache(hf_config, settings: RolloutSettings, max_model_len: int, block_size: int) -> None:
    """Raise ValueError if rollout.kv_cache_gib is too small for one completion of full length."""
    smallest = smallest_kv_cache_bytes(hf_config, settings, max_model_len, block_size)
    if settings.kv_cache_gib is None or int(settings.kv_cache_gib * GIB) >= smallest:
        return
    enough_gib = math.ceil(smallest / GIB * 1e4) / 1e4  # rounded up, to be readable
    raise ValueError(
        f"rollout.kv_cache_gib {settings.kv_cache_gib:g} is too small for one completion of full length "
        f"({max_model_len:,} tokens with the prompt, in blocks of {block_size}): set it to {enough_gib:g} or "
        "more, or lower rollout.max_new_tokens or rollout.max_prompt_tokens"
    )


def engine_weight_bytes(hf_config, settings: RolloutSettings) -> int:
    """Return the bytes of the engine's weights per rank; FP8 leaves the embeddings in 16 bits."""
    counts = parameter_counts(hf_config)
    itemsize = getattr(torch, settings.dtype).itemsize
    layer_itemsize = 1 if settings.fp8 == "on" else itemsize
    num_bytes = counts.embeddings * itemsize + (counts.experts + counts.others) * layer_itemsize
    return num_bytes // settings.tensor_parallel


# CUDA graphs, workspaces and the activations of a prefill, of an engine that generates up to 256 completions
# at once [ours: a guess; vLLM measures the actual size]
ENGINE_EXTRA_BYTES = 4 * GIB
GRAPH_BYTES = 2 * 2**20  # larger CUDA graphs, per additional completion [ours: a guess, 1 GiB for 512]
VLLM_SHARE = 0.92  # vLLM's default; CUDA itself needs the remaining memory


def engine_extra_bytes(hf_config, settings: RolloutSettings) -> int:
    """Return the bytes that an engine takes besides weights and KV cache.

    A completion beyond the first 256 adds three rows of float32 logits (gathered from the ranks, in the order
    of the vocabulary, divided by the temperature) and larger CUDA graphs [ours: read in vLLM, not measured].
    """
    additional = max(0, settings.sequences_at_once - 256)
    return ENGINE_EXTRA_BYTES + additional * (3 * 4 * hf_config.vocab_size + GRAPH_BYTES)


def room_of_engine(trainer_bytes: int, free: int, total: int) -> float:
    """Return the bytes of a GPU that vLLM may take.

    The rest is for the trainer, with a margin for errors of the estimate trainer_bytes. At least 1 GiB is
    subtracted from the free memory, because vLLM creates a CUDA context before it measures the free memory.
    """
    margin = margin_bytes(total) if trainer_bytes else 0
    return min(VLLM_SHARE * total, free - max(trainer_bytes, GIB) - margin)


def engine_memory(hf_config, settings: RolloutSettings, trainer_bytes: int, total: int) -> dict[str, int]:
    """Return {part of the engine: bytes}. A negative `KV cache` is the size of the missing memory.

    total: bytes of the GPU. Without rollout.kv_cache_gib the KV cache takes the memory that weights and
    workspace leave in the engine's room.
    """
    weights = engine_weight_bytes(hf_config, settings)
    workspace = engine_extra_bytes(hf_config, settings)
    if settings.kv_cache_gib is None:
        room = int(room_of_engine(trainer_bytes, total, total))
        kv_cache = room - weights - workspace
    else:
        kv_cache = int(settings.kv_cache_gib * GIB)
    return {"engine weights": weights, "engine workspace": workspace, "KV cache": kv_cache}


def memory_share(
    hf_config, settings: RolloutSettings, max_model_len: int, trainer_bytes: int, free: int, total: int
) -> float:
    """Return the share of a GPU that vLLM may take for weights, workspaces and KV cache.

        share = min(0.92 total, free - trainer_bytes - margin) / total

    free, total: bytes of this GPU before the engine starts. Raises ValueError, with settings that would fit,
    if the share is too small for the weights and one completion of full length.
    """
    room = room_of_engine(trainer_bytes, free, total)
    smallest = smallest_engine_bytes(hf_config, settings, max_model_len)
    if smallest <= room:
        return room / total
    advice = fitting_settings(hf_config, settings, max_model_len, room)[:1]
    if not settings.sleep_level:
        advice.append("rollout.sleep_level=2")
    advice = " or ".join(advice) or "more GPUs, a shorter rollout.max_new_tokens or a smaller model"
    raise ValueError(
        f"this GPU is too small: of {total / GIB:.0f} GiB {free / GIB:.0f} are free, the trainer takes "
        f"{trainer_bytes / GIB:.0f} of them, {margin_bytes(total) / GIB:.0f} stay free as a margin, and the "
        f"engine needs {smallest / GIB:.0f} for weights, graphs and one completion of full length; try "
        f"{advice}, or set rollout.kv_cache_gib to skip this estimate"
    )


def smallest_engine_bytes(hf_config, settings: RolloutSettings, max_model_len: int) -> int:
    """Return the bytes of an engine whose KV cache holds one completion of full length."""
    kv_cache = max_model_len * kv_bytes_per_token(hf_config, settings)
    return engine_weight_bytes(hf_config, settings) + kv_cache + engine_extra_bytes(hf_config, settings)


def fitting_settings(hf_config, settings: RolloutSettings, max_model_len: int, room: float) -> list[str]:
    """List changes of tensor_parallel and fp8 whose engine fits into room bytes, smallest change first."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = device_of_rank() if torch.cuda.is_available() else None  # None: a plan for another machine
    changes = []
    for fp8 in dict.fromkeys((settings.fp8, "on")):
        for size in (n for n in range(1, num_ranks + 1) if num_ranks % n == 0):
            changed = settings.model_copy(update={"fp8": fp8, "tensor_parallel": size})
            is_refused = fp8_refusal(changed, hf_config, device) is not None
            if not is_refused and smallest_engine_bytes(hf_config, changed, max_model_len) <= room:
                changes.append(f"rollout.tensor_parallel={size} rollout.fp8={fp8}")
    return changes


# ------------------------------------------------------------------------------------------------------------
# Trainer and engine of a rank
# ------------------------------------------------------------------------------------------------------------
def max_model_len(config: Config) -> int:
    """Return the longest prompt + completion, in tokens, that the engine must hold."""
    longest = max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)
    return config.rollout.max_prompt_tokens + longest


def syncs_own_experts(config: Config) -> bool:
    """Tell whether a rank's engine holds the experts that the rank trains, so that none are gathered."""
    return config.rollout.expert_parallel and config.rollout.tensor_parallel == config.model.ep_size


def num_communicators(config: Config, hf_config: PretrainedConfig, num_ranks: int) -> int:
    """Return the number of groups for which NCCL holds buffers on a rank; a group of one rank has none.

    all ranks       torch's default group, and DeepSpeed's clone of it (groups.py: _clone_world_group)
    MoE             the ranks of an expert-parallel group, and the ranks that hold the same experts
    engine          vLLM's tensor-parallel group, and its expert group for a MoE (parallel_state.py:
                    initialize_model_parallel); both exist also without rollout.expert_parallel
    """
    sizes = [num_ranks, num_ranks, config.rollout.tensor_parallel]
    if num_experts_of(hf_config):
        sizes += [config.model.ep_size, num_ranks // config.model.ep_size, config.rollout.tensor_parallel]
    return sum(size > 1 for size in sizes)


def rounded_bytes(config: Config, hf_config: PretrainedConfig) -> int:
    """Return the bytes of a layer's experts, rounded to float32 by a sync with rollout.fp8 simulate; else 0.

    vLLM holds the tensors that it receives until a layer is complete.
    """
    if config.rollout.fp8 != "simulate" or not num_experts_of(hf_config):
        return 0
    held = config.model.ep_size if syncs_own_experts(config) else 1
    return 4 * parameter_counts(hf_config).experts // sum(layers_with_experts(hf_config)) // held


def trained_counts(config: Config, hf_config: PretrainedConfig) -> ParameterCounts:
    """Count the parameters that have gradients: all, or those that an extra trains in their place."""
    of_extras = [extra.trained(config, hf_config) for extra in active(config)]
    return next((counts for counts in of_extras if counts is not None), parameter_counts(hf_config))


def trainer_memory(
    config: Config, hf_config: PretrainedConfig, num_ranks: int, on_gpu: bool = True
) -> dict[str, int]:
    """Return the bytes of the trainer on a rank, by part; a forward pass holds at least one full-length row.

    train.share_prompts does not reduce the largest micro-batch, whose rows may have short prompts. Estimates
    for GPUs count NCCL's communicators, and a tenth of the activations as the error of their estimate [ours:
    on CPUs, where updates are measured, the error is at most 6 %].
    """
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    tokens = max(config.train.tokens_per_forward(on_gpu), longest)
    counts = parameter_counts(hf_config)
    trained = trained_counts(config, hf_config)
    parts = memory_by_part(
        hf_config, config.model, config.train.zero_stage, num_ranks, tokens,
        with_reference=config.algorithm.kl_coef > 0 and trained == counts,
        own_experts=syncs_own_experts(config), on_gpu=on_gpu,
        offload_optimizer=on_gpu and config.train.offload_optimizer,  # on CPUs it moves nothing
        fused_adamw=config.train.fused_adamw, trained=trained,
    )  # fmt: skip
    if config.train.grad_reduce_dtype == "float32" and config.train.zero_stage == 2:
        parts["on the way back"] += 4 * REDUCE_BUCKET * on_gpu  # the copy that is reduced
    for extra in active(config):
        for part, num_bytes in extra.memory(config, hf_config, tokens).items():
            parts[part] += num_bytes
    if on_gpu:
        parts["sync buffers"] += rounded_bytes(config, hf_config)
        parts["communicators"] = COMMUNICATOR_BYTES * num_communicators(config, hf_config, num_ranks)
        parts["error of activations"] = (parts["activations"] + parts["recomputed layer"]) // 10
    return parts


def plan_memory(
    config: Config, hf_config: PretrainedConfig, num_ranks: int, total: int
) -> tuple[dict[str, int], str | None]:
    """Return the bytes of a GPU by part, trainer and engine, and the reason if `total` bytes are too few."""
    parts = trainer_memory(config, hf_config, num_ranks)
    engine_sleeps = bool(config.rollout.sleep_level)
    parts |= engine_memory(hf_config, config.rollout, trainer_bytes(parts, engine_sleeps), total)
    needed = max_model_len(config) * kv_bytes_per_token(hf_config, config.rollout)
    return parts, why_too_small(parts, engine_sleeps, total, needed)


def check_gpu_memory(config: Config, hf_config: PretrainedConfig, num_ranks: int) -> str:
    """Return the plan's rows in a line; ValueError gives the reason if the run cannot fit into the GPUs.

    With rollout.kv_cache_gib, which overrides the estimate, print a warning instead.
    """
    total = torch.cuda.mem_get_info()[1]
    parts, reason = plan_memory(config, hf_config, num_ranks, total)
    if reason is None or config.rollout.kv_cache_gib is not None:
        if reason is not None:
            say(f"warning: by the planner's arithmetic this run does not fit: {reason}")
        rows = parts | planned_rows(parts, bool(config.rollout.sleep_level))
        texts = [f"{name} {num_bytes / GIB:.2f}" for name, num_bytes in rows.items() if num_bytes]
        return f"memory: planned GiB of a GPU with {total / GIB:.1f}: {', '.join(texts)}"
    raise ValueError(
        f"this run does not fit: {reason}; python experiments/plan.py --config FILE --gpus {num_ranks} "
        f"--gpu-memory-gib {total / GIB:.1f} lists settings that fit, and rollout.kv_cache_gib overrides "
        "this estimate"
    )


# ------------------------------------------------------------------------------------------------------------
# Trainer, engine and processes of a rank on a CPU
# ------------------------------------------------------------------------------------------------------------
# Resident memory of a rank of `make demo` without the KV cache: Python, torch, DeepSpeed and vLLM with their
# libraries. The model has 0.9 M parameters. Measured on two ranks with vLLM 0.30 and torch 2.13.
PROCESS_BYTES = int(1.1 * GIB)
WORKER_BYTES = int(0.1 * GIB)  # a reward worker and its guard, measured with verifiers.instructions
# Resident memory divided by the sum of all parts: the C library keeps memory that was freed, and vLLM packs
# copies of weights. Measured 1.19 and 1.21: a Mixtral of 373 M parameters (EP 2, micro-batches of 1,024) took
# 19.6 GiB on two ranks, and a Llama of 135 M parameters (micro-batches of 512) 6.1 GiB on one rank.
# As a check, the Mixtral with a KV cache of 1 GiB a rank took 21.0 GiB (estimate 21.6).
ALLOCATOR_RATIO = 1.2
DEFAULT_KV_CACHE_BYTES = GIB  # upper bound of the KV cache that a rank on a CPU gets by default [ours]


def kv_cache_on_cpu(rollout: RolloutSettings, hf_config: PretrainedConfig, max_len: int) -> int:
    """Return the bytes of the KV cache of a rank on a CPU. max_len: of prompt + completion, in tokens.

    rollout.kv_cache_gib or, if it is null, room for max_num_seqs completions of full length, at most 1 GiB
    but at least one completion. vLLM's own default would be 0.92 of the node's memory for every rank.
    VLLM_CPU_KVCACHE_SPACE (in GiB) replaces both values inside of vLLM.
    """
    if gib := os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        if not gib.isdigit() or int(gib) == 0:
            raise ValueError(f"VLLM_CPU_KVCACHE_SPACE is {gib!r}: expected GiB of the KV cache, at least 1")
        return int(gib) * GIB
    if rollout.kv_cache_gib is not None:
        return int(rollout.kv_cache_gib * GIB)
    one = smallest_kv_cache_bytes(hf_config, rollout, max_len, CPU_BLOCK_SIZE)
    return max(one, min(rollout.sequences_at_once * one, DEFAULT_KV_CACHE_BYTES))


def engine_settings(rollout: RolloutSettings, hf_config: PretrainedConfig, max_len: int) -> RolloutSettings:
    """Return the section `rollout` with the size of the KV cache on CPUs filled in; unchanged on GPUs."""
    if torch.cuda.is_available() or rollout.kv_cache_gib is not None:
        return rollout
    return rollout.model_copy(update={"kv_cache_gib": kv_cache_on_cpu(rollout, hf_config, max_len) / GIB})


def host_bytes_by_phase(config: Config, hf_config: PretrainedConfig, num_ranks: int) -> dict[str, int]:
    """Return the bytes of host memory that a rank on a CPU takes in each phase, with its reward workers.

    A judge is not counted.
    """
    parts = trainer_memory(config, hf_config, num_ranks, on_gpu=False)
    parts["engine weights"] = engine_weight_bytes(hf_config, config.rollout)
    parts["engine workspace"] = 0
    parts["KV cache"] = kv_cache_on_cpu(config.rollout, hf_config, max_model_len(config))
    processes = PROCESS_BYTES + config.reward.num_workers * WORKER_BYTES
    phases = bytes_by_phase(parts, engine_sleeps=False, context_bytes=0)
    return {phase: int(ALLOCATOR_RATIO * num_bytes) + processes for phase, num_bytes in phases.items()}


def most_bytes(config: Config, hf_config: PretrainedConfig, num_ranks: int) -> int:
    """Return the bytes of host memory that a rank on a CPU takes in its largest phase."""
    return max(host_bytes_by_phase(config, hf_config, num_ranks).values())


def with_setting(config: Config, name: str, value: object) -> Config:
    """Return the settings with another value of section.key."""
    section, key = name.split(".")
    changed = getattr(config, section).model_copy(update={key: value})
    return config.model_copy(update={section: changed})


def with_sleep_level(config: Config, on_gpu: bool) -> Config:
    """Return the settings with a number in place of rollout.sleep_level null: 2 on GPUs, 0 on CPUs.

    An engine that sleeps during updates leaves its memory to activations, and the engine's KV cache fills the
    memory of the activations during rollouts.
    """
    if config.rollout.sleep_level is not None:
        return config
    return with_setting(config, "rollout.sleep_level", 2 if on_gpu else 0)


SMALLEST_SAVING = 0.1  # of a rank's memory [ours]


def choose_micro_batch(config: Config, hf_config: PretrainedConfig, num_ranks: int, node: NodeMemory) -> int:
    """Return the largest of MICRO_BATCH_SIZES that fits, or the smallest if none fits.

    A smaller size has to save at least a tenth of a rank's memory. A small model therefore always gets the
    largest size, so that its results are the same bits on every machine.
    """
    num_bytes = {
        tokens: most_bytes(with_setting(config, "train.micro_batch_tokens", tokens), hf_config, num_ranks)
        for tokens in MICRO_BATCH_SIZES
    }
    largest = MICRO_BATCH_SIZES[0]
    fitting = [tokens for tokens in MICRO_BATCH_SIZES if num_bytes[tokens] <= node.bytes_per_rank]
    chosen = fitting[0] if fitting else MICRO_BATCH_SIZES[-1]
    return chosen if num_bytes[chosen] <= (1 - SMALLEST_SAVING) * num_bytes[largest] else largest


def fitting_changes(
    config: Config, hf_config: PretrainedConfig, num_ranks: int, node: NodeMemory
) -> list[str]:
    """List the smallest changes of memory-saving settings that make a run fit, as for the command line."""
    tokens = choose_micro_batch(config, hf_config, num_ranks, node)
    changes = {
        "train.micro_batch_tokens": min(tokens, config.train.tokens_per_forward(on_gpu=False)),
        "model.activation_checkpointing": True,
        "train.zero_stage": 2,
    }
    for num_changes in range(1, len(changes) + 1):
        fitting = []
        for names in itertools.combinations(changes, num_changes):
            changed = config
            for name in names:
                changed = with_setting(changed, name, changes[name])
            if most_bytes(changed, hf_config, num_ranks) <= node.bytes_per_rank:
                fitting.append(" ".join(f"{name}={changes[name]}".lower() for name in names))  # true
        if fitting:
            return fitting
    return []


def describe_host_memory(phases: dict[str, int], node: NodeMemory) -> str:
    """Return the estimate of a rank and of its node in words, for example for the log."""
    phase, most = max(phases.items(), key=lambda item: item[1])
    together = f", {node.num_ranks * most / GIB:.1f} GiB for the {node.num_ranks} ranks of a node"
    return (
        f"phase {phase} needs about {most / GIB:.1f} GiB a rank{together if node.num_ranks > 1 else ''}, of "
        f"{node.num_bytes / GIB:.1f} GiB available ({node.source})"
    )


# A run whose estimate exceeds the available memory gets a warning up to this ratio, and is refused above it.
# [ours: the estimate has errors of up to a tenth, so a run below this ratio may still fit]
REFUSED_RATIO = 1.15


def check_host_memory(config: Config, hf_config: PretrainedConfig, num_ranks: int, node: NodeMemory) -> str:
    """Return the line that describes the memory of a run on CPUs; ValueError if the run cannot fit.

    The line contains a warning if the estimate exceeds the available memory by less than its own error.
    """
    phases = host_bytes_by_phase(config, hf_config, num_ranks)
    line = describe_host_memory(phases, node)
    ratio = max(phases.values()) / node.bytes_per_rank
    if ratio <= 1:
        return f"memory: {line}"
    changes = fitting_changes(config, hf_config, num_ranks, node)
    advice = f"set {' or '.join(changes)}" if changes else "take fewer ranks on this node or a smaller model"
    if ratio <= REFUSED_RATIO:
        return f"warning: memory: {line}; the system may kill this run: {advice}"
    raise ValueError(
        f"this run does not fit: {line}; {advice}. If other processes will free their memory, run.memory_gib "
        "replaces the available memory"
    )


def check_memory(config: Config, hf_config: PretrainedConfig, num_ranks: int, node: NodeMemory | None) -> str:
    """Return the line that describes the memory of a run; ValueError if the run cannot fit, with a remedy.

    node: memory of a node on CPUs; None on GPUs.
    """
    if node is None:
        return check_gpu_memory(config, hf_config, num_ranks)
    return check_host_memory(config, hf_config, num_ranks, node)
