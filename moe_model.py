"""The policy: Qwen3 and the MoE models of FAMILIES, dropless, expert-parallel on DeepSpeed's groups.

Reading order:

    pack()                                 lay prompts and completions out without padding
    MoEBlock                               route tokens to the experts of all ranks (how experts lie on ranks)
    Policy                                 map packed sequences to log-probabilities
    load_hf(), save_hf(), hf_tensors()     read and write checkpoints, hand weights to the engine
    build_policy(), deepspeed_engine()     from a model folder to a trainable model

memory_plan.py estimates the memory of all this.

Shape suffixes (x_TD is a tensor of shape [T, D]):
    T  packed tokens of all sequences            N  predicted tokens (the completions)
    B  sequences, S the longest sequence         P  rows sent to experts, one per token and chosen expert
    D  hidden size                               H  query heads, G key/value heads, R head size
    E  experts of the model, e of a rank         K  experts per token, L layers
    I  expert width                              V  vocabulary

Layout and names follow transformers' classes, so a checkpoint of transformers is a checkpoint of this file
and vice versa. Expert weights are fused, [e, 2I, D] and [e, D, I], which is the layout that grouped matrix
products and vLLM's loader take.
"""

import contextlib
import functools
import hashlib
import io
import json
import math
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

if (
    not torch.cuda.is_available()
):  # deepspeed reads this when it is imported, and otherwise warns on every rank
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
import torch.nn.functional as F
import triton
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, PretrainedConfig

from kernels.expert_rows import CopyRows, SumRows, WeightedSwiGLU, unsupported
from kernels.linear_logprob_entropy import choose_backend, linear_logprob_entropy, topk_logprobs
from settings import ModelSettings, RolloutSettings, TrainSettings


# ------------------------------------------------------------------------------------------------------------
# Families: the differences between models, as data
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Family:
    """The properties in which the models of one model_type differ; layers and MoE block read them."""

    architecture: str  # class name in transformers and vLLM
    num_experts: str | None = None  # field of config.json with the number of experts; None: dense
    expert_width: str = "moe_intermediate_size"  # field of config.json with the width of an expert
    query_norm: Literal["head", "all", "none"] = (
        "head"  # norm queries and keys per head, over all heads, or not
    )
    score: Literal["softmax", "sigmoid"] = (
        "softmax"  # sigmoid: float32 scores, experts chosen with a fixed bias
    )
    qkv_bias: bool = False  # queries, keys and values have a bias, without a field of config.json
    output_bias: bool = True  # attention_bias of config.json also gives o_proj a bias
    block: str = "mlp"  # name of the MoE block in a checkpoint
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # names of an expert's matrices
    fused_names: tuple[tuple[str, str], ...] = ()  # endings (here, in files) if files store fused experts
    has_multipliers: bool = False  # config.json has the fields that multiplier() reads
    fixed_fields: tuple[tuple[str, object], ...] = ()  # (field of config.json, the only value computed here)


NO_SLIDING_WINDOW = ("use_sliding_window", False)
FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", fixed_fields=(NO_SLIDING_WINDOW,)),
    "qwen2": Family(
        "Qwen2ForCausalLM", query_norm="none", qkv_bias=True, output_bias=False,
        fixed_fields=(NO_SLIDING_WINDOW,),
    ),
    "llama": Family("LlamaForCausalLM", query_norm="none", fixed_fields=(("mlp_bias", False),)),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", num_experts="num_experts", fixed_fields=(NO_SLIDING_WINDOW,)),
    "olmoe": Family(
        "OlmoeForCausalLM", num_experts="num_experts", expert_width="intermediate_size", query_norm="all",
        fixed_fields=(  # vLLM computes these values whatever config.json says
            ("norm_topk_prob", False), ("rms_norm_eps", 1e-5), ("clip_qkv", None), ("attention_bias", False),
            ("tie_word_embeddings", False),
        ),
    ),
    "mixtral": Family(
        "MixtralForCausalLM", num_experts="num_local_experts", expert_width="intermediate_size",
        query_norm="none", block="block_sparse_moe", projections=("w1", "w3", "w2"),
        fixed_fields=(("norm_topk_prob", True), ("router_jitter_noise", 0.0)),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", num_experts="n_routed_experts", score="sigmoid", output_bias=False,
        fixed_fields=(("n_group", 1), ("topk_group", 1)),
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM", num_experts="num_local_experts", expert_width="intermediate_size",
        query_norm="none", block="block_sparse_moe", has_multipliers=True,
        fused_names=(
            (".gate.weight", ".router.layer.weight"), (".experts.gate_up_proj", ".input_linear.weight"),
            (".experts.down_proj", ".output_linear.weight"),
        ),
        fixed_fields=(  # vLLM has no biases and no other head size; transformers ignores the layer_* fields
            ("attention_bias", False), ("head_dim", None), ("layer_types", None), ("layer_rope_theta", None),
            ("attention_sinks", False), ("norm_topk_prob", True),
        ),
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------
# Packing: the only code that pairs a token with the position that predicts it
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PackedSequences:
    """Sequences laid end to end without padding.

    The last token of a sequence is dropped, because no target follows. A sequence of p prompt and c
    completion tokens has p + c - 1 places, the same rows for which vLLM returns routed experts. Example:
    prompt [5, 6] and completion [7, 8] have the places 5, 6, 7; the targets 7, 8 are predicted at 6 and 7.

    With shared prompts a place is stored once and used by several sequences; then kept and spread convert
    between rows of the unshared layout and rows of [T].
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, restarting at 0 in every sequence
    padded_index: Tensor  # [T] int64, place of each token in attention's padded grid [B * S]
    padded_shape: tuple[int, int]  # (B, S)
    predictor_index: Tensor  # [N] int64, place in [T] whose output predicts target n
    target_ids: Tensor  # [N] int64, the completion tokens, sequence after sequence
    repeats: tuple[
        tuple[Tensor, Tensor], ...
    ] = ()  # per copy of a prompt: (tokens in [T], further grid places)
    kept: Tensor | None = None  # [T] int64, row of each token in the unshared layout; None: nothing is shared
    spread: Tensor | None = None  # [sum of p + c - 1] int64, token in [T] of each row of the unshared layout


def pack(
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    device: torch.device | str,
    share_prompts: bool = False,
) -> PackedSequences:
    """Pack B (prompt, completion) pairs; every prompt needs at least one token, completions may be empty.

    share_prompts: store equal prompts once. Only the last prompt token is repeated for every sequence,
    because the sequence's first completion token is predicted from it.
    """
    assert all(prompt_ids), "an empty prompt has no position that predicts the first completion token"
    lengths = torch.tensor(
        [max(1, len(p) + len(c) - 1) for p, c in zip(prompt_ids, completion_ids, strict=True)]
    )
    num_sequences = len(lengths)
    longest = int(lengths.max())
    starts = lengths.cumsum(0) - lengths
    sequence = torch.repeat_interleave(torch.arange(num_sequences), lengths)  # [T]
    position_ids = torch.arange(int(lengths.sum())) - starts[sequence]  # [T]
    input_ids = [
        t for p, c in zip(prompt_ids, completion_ids) for t in [*p, *c][: max(1, len(p) + len(c) - 1)]
    ]
    predictors = [
        torch.arange(start + len(p) - 1, start + len(p) - 1 + len(c))
        for start, p, c in zip(starts.tolist(), prompt_ids, completion_ids)
    ]
    packed = PackedSequences(
        input_ids=torch.tensor(input_ids).to(device),
        position_ids=position_ids.to(device),
        padded_index=(sequence * longest + position_ids).to(device),
        padded_shape=(num_sequences, longest),
        predictor_index=torch.cat(predictors).to(device),
        target_ids=torch.tensor([t for c in completion_ids for t in c], dtype=torch.int64).to(device),
    )
    return share(packed, prompt_ids, completion_ids) if share_prompts else packed


def select_targets(packed: PackedSequences, is_target: Tensor) -> PackedSequences:
    """Return the layout with fewer targets; is_target [N] bool. All tokens stay in the context of later ones.

    Example: for an episode of 20 sampled, 9 inserted and 5 sampled tokens, N falls from 34 to 25, so that the
    head computes no log-probability of an inserted token.
    """
    is_target = is_target.to(packed.target_ids.device)
    return replace(
        packed, predictor_index=packed.predictor_index[is_target], target_ids=packed.target_ids[is_target]
    )


def share(
    packed: PackedSequences, prompt_ids: list[list[int]], completion_ids: list[list[int]]
) -> PackedSequences:
    """Drop prompt tokens that repeat an earlier sequence; record the grid places that reuse the kept tokens.

    Example: twice the prompt [5, 6, 7] with a completion of one token has the rows 5 6 7 5 6 7 in the
    unshared layout. The second 5 and 6 are dropped and take their values from rows 0 and 1.
    """
    first_row = {}  # {prompt: its first row in the unshared layout}
    num_copies = Counter()  # {prompt: further sequences with this prompt}
    source = []  # for each row of the unshared layout, the row from which its token is taken
    repeats = defaultdict(lambda: ([], []))  # {copy: (source rows, rows) of its shared tokens}
    start = 0
    for prompt, completion in zip(map(tuple, prompt_ids), completion_ids):
        length = max(1, len(prompt) + len(completion) - 1)
        num_shared = 0
        if prompt in first_row:
            num_copies[prompt] += 1
            num_shared = min(len(prompt) - 1, length)
            shared_rows = range(first_row[prompt], first_row[prompt] + num_shared)
            source += shared_rows
            source_rows, rows = repeats[num_copies[prompt]]
            source_rows.extend(shared_rows)
            rows.extend(range(start, start + num_shared))
        first_row.setdefault(prompt, start)
        source += range(start + num_shared, start + length)
        start += length
    return without_copies(packed, torch.tensor(source), list(repeats.values()))


def without_copies(
    packed: PackedSequences, source: Tensor, repeats: list[tuple[list[int], list[int]]]
) -> PackedSequences:
    """Return the layout without the rows whose token is taken from another row; arguments as in share()."""
    device = packed.input_ids.device
    kept = (source == torch.arange(len(source))).nonzero().flatten()  # [T]
    new_row = torch.zeros_like(source).index_copy_(0, kept, torch.arange(len(kept)))  # valid at kept rows
    kept_on_device = kept.to(device)
    new_row_on_device = new_row.to(device)
    pairs = [
        (torch.tensor(source_rows, device=device), torch.tensor(rows, device=device))
        for source_rows, rows in repeats
    ]
    return PackedSequences(
        input_ids=packed.input_ids[kept_on_device],
        position_ids=packed.position_ids[kept_on_device],
        padded_index=packed.padded_index[kept_on_device],
        padded_shape=packed.padded_shape,
        predictor_index=new_row_on_device[packed.predictor_index],
        target_ids=packed.target_ids,
        repeats=tuple(
            (new_row_on_device[source_rows], packed.padded_index[rows])
            for source_rows, rows in pairs
            if len(source_rows)
        ),
        kept=kept_on_device,
        spread=new_row[source].to(device),
    )


# ------------------------------------------------------------------------------------------------------------
# Moving rows. Gradients are gathered and never added atomically, so that every run computes the same bits.
# Sums over the experts of a token are taken in float32, for a chunk of tokens at a time.
# ------------------------------------------------------------------------------------------------------------
CHUNK_ELEMENTS = {  # elements of a chunk of [tokens, K, D] in float32
    "cpu": 2**20,
    "cuda": 2**26,
}


def token_chunks(num_tokens: int, elements_per_token: int, device: torch.device) -> Iterator[slice]:
    """Yield slices over the tokens, each of at most CHUNK_ELEMENTS elements, and of at least one token.

    For example, with K = 8 and D = 2048 a slice on a CPU has 2**20 / (8 * 2048) = 64 tokens.
    """
    size = max(1, CHUNK_ELEMENTS["cpu" if device.type == "cpu" else "cuda"] // elements_per_token)
    yield from (slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size))


class TakeRows(torch.autograd.Function):
    """Return x[index] for an index without repetitions, so that each row's gradient goes to one place."""

    @staticmethod
    def forward(ctx, x_PD: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(x_PD)
        return x_PD.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (index,) = ctx.saved_tensors
        fills_all_rows = len(index) == ctx.num_rows
        make = grad.new_empty if fills_all_rows else grad.new_zeros
        return make(ctx.num_rows, *grad.shape[1:]).index_copy_(0, index, grad), None


class ToGrid(torch.autograd.Function):
    """Return a grid of zeros with row t of x at every place of token t: [T, ...] -> [num_places, ...].

    The gradient of a token is the sum over its places in float32. Copies are added one after another, so
    that the order of the sum is fixed. index, repeats: PackedSequences.padded_index and repeats, or () if
    every token has one place.
    """

    @staticmethod
    def forward(ctx, x_T: Tensor, index: Tensor, repeats: tuple, num_places: int) -> Tensor:
        ctx.index = index
        ctx.repeats = repeats
        grid = x_T.new_zeros(num_places, *x_T.shape[1:]).index_copy_(0, index, x_T)
        for tokens, places in repeats:
            grid.index_copy_(0, places, x_T.index_select(0, tokens))
        return grid

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        grad_T = grad.index_select(0, ctx.index)
        if ctx.repeats:
            grad_T = grad_T.to(torch.promote_types(grad.dtype, torch.float32))
        for tokens, places in ctx.repeats:
            grad_T.index_add_(0, tokens, grad.index_select(0, places).to(grad_T.dtype))
        return grad_T.to(grad.dtype), None, None, None


class CopyToExperts(torch.autograd.Function):
    """Return row t of x for every (token t, choice), sorted by expert: [T, D] -> [P, D].

    order_P: (token, choice) pairs sorted by expert; inverse_P: the place of each pair in that order. The
    gradient of a token is the sum over its choices, accumulated in float32 and rounded once.
    """

    @staticmethod
    def forward(ctx, x_TD: Tensor, order_P: Tensor, inverse_P: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_P)
        ctx.num_tokens = len(x_TD)
        ctx.top_k = len(order_P) // len(x_TD) if len(x_TD) else 1
        return x_TD.index_select(0, order_P // ctx.top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_PD: Tensor):
        (inverse_P,) = ctx.saved_tensors
        inverse_TK = inverse_P.view(ctx.num_tokens, ctx.top_k)
        width = grad_PD.shape[1]
        grad_TD = grad_PD.new_empty(ctx.num_tokens, width)
        for tokens in token_chunks(ctx.num_tokens, ctx.top_k * width, grad_PD.device):
            rows = grad_PD.index_select(0, inverse_TK[tokens].flatten())
            torch.sum(rows.unflatten(0, (-1, ctx.top_k)), dim=1, out=grad_TD[tokens])
        return grad_TD, None, None


class SumOfExperts(torch.autograd.Function):
    """Return y_t = sum_k w_tk out[place of (t, k)], summed in the weights' float32: [P, D], [T, K] -> [T, D].

    order_P, inverse_P: as in CopyToExperts. Backward, with g the gradient of y: dw_tk = <g_t, out_tk> and
    d out_tk = w_tk g_t.
    """

    @staticmethod
    def forward(ctx, out_PD: Tensor, weights_TK: Tensor, order_P: Tensor, inverse_P: Tensor) -> Tensor:
        ctx.save_for_backward(out_PD, weights_TK, order_P, inverse_P)
        inverse_TK = inverse_P.view(weights_TK.shape)
        num_tokens, top_k = weights_TK.shape
        y_TD = out_PD.new_empty(num_tokens, out_PD.shape[1])
        for tokens in token_chunks(num_tokens, top_k * out_PD.shape[1], out_PD.device):
            rows = out_PD.index_select(0, inverse_TK[tokens].flatten()).unflatten(0, (-1, top_k))
            y_TD[tokens] = (rows * weights_TK[tokens].unsqueeze(-1)).sum(dim=1)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD: Tensor):
        out_PD, weights_TK, order_P, inverse_P = ctx.saved_tensors
        inverse_TK = inverse_P.view(weights_TK.shape)
        num_tokens, top_k = weights_TK.shape
        grad_weights_TK = torch.empty_like(weights_TK)
        grad_out_PD = torch.empty_like(out_PD)
        sum_dtype = torch.promote_types(out_PD.dtype, weights_TK.dtype)
        for tokens in token_chunks(num_tokens, top_k * out_PD.shape[1], out_PD.device):
            rows = out_PD.index_select(0, inverse_TK[tokens].flatten()).unflatten(0, (-1, top_k))
            grad = grad_TD[tokens].to(sum_dtype).unsqueeze(1)  # [t, 1, D]
            grad_weights_TK[tokens] = (grad * rows).sum(dim=-1)
        flat_weights = weights_TK.flatten()
        for pairs in token_chunks(len(order_P), out_PD.shape[1], out_PD.device):
            order = order_P[pairs]
            grad = grad_TD.index_select(0, order // top_k).to(sum_dtype)
            grad_out_PD[pairs] = grad * flat_weights[order].unsqueeze(-1)
        return grad_out_PD, grad_weights_TK, None, None


# ------------------------------------------------------------------------------------------------------------
# Expert parallelism
# ------------------------------------------------------------------------------------------------------------
def create_expert_parallel_group(ep_size: int, num_experts: int) -> dist.ProcessGroup | None:
    """Create DeepSpeed's process groups for experts; return this rank's expert-parallel group. Collective.

    MoEBlock explains the groups. Call this once, before the model is built. A dense model has no group: None.
    ValueError unless ep_size divides the number of experts and the number of ranks.
    """
    world_size = dist.get_world_size()
    if num_experts == 0:
        if ep_size != 1:
            raise ValueError(f"model.ep_size is {ep_size}, but the model is dense: set model.ep_size to 1")
        return None
    if num_experts % ep_size or world_size % ep_size:
        raise ValueError(
            f"model.ep_size {ep_size} must divide the number of experts ({num_experts}) and of processes "
            f"({world_size}, torchrun --nproc-per-node); e.g. {math.gcd(num_experts, world_size)}"
        )
    groups._create_expert_and_data_parallel(ep_size)
    return groups._get_expert_parallel_group(f"ep_size_{ep_size}")


def set_group_timeouts(seconds: float) -> None:
    """Set the timeout of every process group of this rank, including the groups of DeepSpeed and vLLM.

    A group that is created without a timeout has torch's default (ten minutes with nccl), whatever the
    timeout of the world is.
    """
    for group in list(distributed_c10d._world.pg_map):
        if "nccl" in dist.get_backend(group) or "gloo" in dist.get_backend(group):
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


class AllToAll(torch.autograd.Function):
    """Send a different number of rows to each rank of a group; the gradient travels the same way back."""

    @staticmethod
    def forward(
        ctx, x_PD: Tensor, recv_rows: list[int], send_rows: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.recv_rows = recv_rows
        ctx.send_rows = send_rows
        ctx.group = group
        received = x_PD.new_empty(sum(recv_rows), *x_PD.shape[1:])
        dist.all_to_all_single(received, x_PD.contiguous(), recv_rows, send_rows, group=group)
        return received

    @staticmethod
    def backward(ctx, grad_PD: Tensor):
        return AllToAll.apply(grad_PD, ctx.send_rows, ctx.recv_rows, ctx.group), None, None, None


class Experts(nn.Module):
    """The experts of one rank, fused into two parameters.

    allreduce and group_name mark the parameters as experts for DeepSpeed (see MoEBlock): their gradients are
    reduced over the ranks that hold the same experts, instead of over all ranks.
    """

    def __init__(self, config: PretrainedConfig, num_local_experts: int, group_name: str):
        super().__init__()
        width = expert_width(config)
        hidden = config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_local_experts, 2 * width, hidden))  # [e, 2I, D]
        self.down_proj = nn.Parameter(torch.empty(num_local_experts, hidden, width))  # [e, D, I]
        for parameter in self.parameters():
            parameter.allreduce = False
            parameter.group_name = group_name

    def forward(self, x_PD: Tensor, tokens_per_expert: Tensor, weights_P: Tensor | None = None) -> Tensor:
        """Apply to every row its expert, a SwiGLU. Rows are sorted by expert; tokens_per_expert [e] int64.

        weights_P: factors of the results, multiplied by a Triton kernel in the middle of the expert.
        """
        if weights_P is not None:
            z_PI = self.linear(x_PD, "gate_up_proj", tokens_per_expert)
            return self.linear(WeightedSwiGLU.apply(z_PI, weights_P), "down_proj", tokens_per_expert)
        if x_PD.is_cuda or x_PD.dtype != torch.bfloat16:
            return self.swiglu(x_PD, tokens_per_expert)
        rows_per_expert, places_P = padded_places(tokens_per_expert)
        padded_PD = ToGrid.apply(x_PD, places_P, (), int(rows_per_expert.sum()))
        return TakeRows.apply(self.swiglu(padded_PD, rows_per_expert), places_P)

    def swiglu(self, x_PD: Tensor, rows_per_expert: Tensor) -> Tensor:
        """Return down(silu(gate(x)) * up(x)) with the matrices of each row's expert: [P, D] -> [P, D]."""
        gate_PI, up_PI = self.linear(x_PD, "gate_up_proj", rows_per_expert).chunk(2, dim=-1)
        return self.linear(F.silu(gate_PI) * up_PI, "down_proj", rows_per_expert)

    def linear(self, x_PD: Tensor, name: str, rows_per_expert: Tensor) -> Tensor:
        """Multiply each row by its expert's matrix of a parameter; extras/lora.py adds adapters here."""
        return grouped_linear(x_PD, getattr(self, name), rows_per_expert)


ROW_BLOCK = 64  # rows of an expert; see padded_places()


def padded_places(tokens_per_expert: Tensor) -> tuple[Tensor, Tensor]:
    """Return each expert's rows rounded up to a multiple of ROW_BLOCK [e], and the places of all tokens [P].

    On CPUs, oneDNN compiles a bfloat16 product anew for every new number of rows. Experts get another number
    of tokens in every layer, and compiling took three quarters of the time of their products: 2 to 3 ms of
    compiling for a product of 0.6 ms (400 rows, 576 inputs, 1,536 outputs, a Xeon with AMX). With rounded
    numbers, kernels are compiled once and found in oneDNN's cache from then on.
    """
    rows_per_expert = (tokens_per_expert + ROW_BLOCK - 1) // ROW_BLOCK * ROW_BLOCK
    added_before = (rows_per_expert - tokens_per_expert).cumsum(0) - (rows_per_expert - tokens_per_expert)
    places_P = torch.arange(int(tokens_per_expert.sum())) + added_before.repeat_interleave(tokens_per_expert)
    return rows_per_expert, places_P


def grouped_linear(x_PD: Tensor, weight_eOD: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Return x @ weight[expert of the row]^T for rows sorted by expert: [P, D], [e, O, D] -> [P, O].

    On CPUs, with AVX-512 or not, grouped_mm is 1.3 to 1.7 times as fast as a loop over 64 small experts, and
    0.85 to 1.05 times over four large ones. Dtypes that it refuses (float64; float32 on GPUs), rows that are
    not aligned to 16 bytes, and empty inputs take the loop.
    """
    grouped_dtypes = (torch.bfloat16,) if x_PD.is_cuda else (torch.bfloat16, torch.float32)
    is_aligned = all(size * x_PD.element_size() % 16 == 0 for size in weight_eOD.shape[1:])
    if len(x_PD) and x_PD.dtype in grouped_dtypes and is_aligned:
        weight_eDO = weight_eOD.mT
        is_empty = (tokens_per_expert == 0)[:, None, None]
        # Kernels may leave the gradient of an expert without rows uninitialised. On GPUs the hook is always
        # registered, because looking for an expert without rows would make the host wait.
        if weight_eDO.requires_grad and (x_PD.is_cuda or is_empty.any()):
            weight_eDO.register_hook(lambda grad: grad.masked_fill_(is_empty, 0))
        return F.grouped_mm(x_PD, weight_eDO, offs=tokens_per_expert.cumsum(0).to(torch.int32))
    rows_of_experts = x_PD.split(tokens_per_expert.tolist())
    return torch.cat([F.linear(rows, weight) for rows, weight in zip(rows_of_experts, weight_eOD)])


class MoEBlock(MoE):
    """Route each token to its top-k experts, which are spread over an expert-parallel group. Drops no token.

    With s = softmax(W x), or s = sigmoid(W x) and a bias b that the optimizer does not update:
        chosen = the K largest of s + b     weight_k = scale s_k / sum of s over the chosen, or scale s_k
        y = sum_k weight_k expert_k(x) + shared(x)
    Only some families have the bias, a scale other than 1, or shared experts; GLM-4.5, for example, has all
    three.

    How experts lie on ranks. create_expert_parallel_group() lets DeepSpeed divide the ranks in two ways, for
    example 4 ranks with model.ep_size 2 and 8 experts:

        expert-parallel groups   [0, 1] [2, 3]   a group has each expert once: experts 0-3 and 4-7
        expert-data groups       [0, 2] [1, 3]   the ranks of a group have copies of the same experts

    The dispatch is our own: forward() sends each token to the ranks of its experts and back, by an all-to-all
    of uneven sizes within the expert-parallel group. DeepSpeed's capacity-based dispatch is not used, and so
    nn.Module's constructor is called instead of MoE's. DeepSpeed only reduces gradients and shards the
    optimizer: expert gradients are summed over the expert-data group, all other gradients over all ranks, and
    both are divided by the number of all ranks. DeepSpeed recognises experts by three marks: the base class
    deepspeed.moe.layer.MoE, parameter.allreduce = False, and parameter.group_name. The groups are created by
    groups._create_expert_and_data_parallel, a private function, because DeepSpeed withdrew the public
    groups.initialize(); tests/test_model.py compares updates of several ranks with those of one process.
    """

    kernel = "torch"  # model.expert_kernel, see use_expert_kernel()

    def __init__(self, config: PretrainedConfig, group: dist.ProcessGroup | None):
        nn.Module.__init__(self)
        self.num_experts = num_experts_of(config)
        self.top_k = config.num_experts_per_tok
        self.score = FAMILIES[config.model_type].score
        self.renormalise = getattr(config, "norm_topk_prob", True)  # Mixtral and Granite have no such field
        self.scale = getattr(config, "routed_scaling_factor", 1.0) if self.score == "sigmoid" else 1.0
        self.group = group
        self.ep_size = dist.get_world_size(group) if group else 1
        self.expert_group_name = f"ep_size_{self.ep_size}"
        self.num_local_experts = self.num_experts // self.ep_size
        self.gate = nn.Linear(config.hidden_size, self.num_experts, bias=False)
        if self.score == "sigmoid":  # a buffer, which DeepSpeed does not convert: it has to stay float32
            bias_E = torch.zeros(self.num_experts, dtype=torch.float32)
            self.gate.register_buffer("e_score_correction_bias", bias_E)
        self.experts = Experts(config, self.num_local_experts, self.expert_group_name)
        self.load_E: Tensor | None = None  # tokens of this rank by expert, see take_expert_loads()
        self.shared_experts = None
        if num_shared := getattr(config, "n_shared_experts", 0):
            self.shared_experts = DenseMLP(config, num_shared * expert_width(config))

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Do nothing: deepspeed.initialize calls this, but create_expert_parallel_group() made the groups."""

    def forward(self, x_TD: Tensor, replay_ids_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the block's output [T, D] and the expert ids used [T, K].

        replay_ids: use these experts instead of the router's choice. Their weights still come from the live
        scores, so that the router keeps learning [secondary: R3, arXiv 2510.11370]. For ids that name no
        expert (rollout.invalid_route) the live router chooses.
        """
        if self.score == "softmax":
            scores_TE = self.gate(x_TD).softmax(dim=-1, dtype=torch.float32)
            choice_TE = scores_TE
        else:
            scores_TE = F.linear(x_TD.float(), self.gate.weight.float()).sigmoid()
            choice_TE = scores_TE + self.gate.e_score_correction_bias
        topk_ids_TK = choice_TE.topk(self.top_k, dim=-1).indices
        if replay_ids_TK is not None:
            topk_ids_TK = torch.where(replay_ids_TK < self.num_experts, replay_ids_TK, topk_ids_TK)
        topk_weights_TK = scores_TE.gather(1, topk_ids_TK)
        if self.renormalise:
            topk_weights_TK = topk_weights_TK / topk_weights_TK.sum(dim=-1, keepdim=True)
        if self.scale != 1.0:
            topk_weights_TK = topk_weights_TK * self.scale

        sorted_ids_P, order_P = topk_ids_TK.flatten().sort(stable=True)  # (token, choice) pairs, by expert
        ids = torch.arange(self.num_experts + 1, device=x_TD.device)
        first_places = torch.searchsorted(sorted_ids_P, ids)  # of each expert's pairs; the last is P
        tokens_per_expert_E = first_places.diff()  # bincount() would make the host wait for the GPU
        self.load_E = tokens_per_expert_E if self.load_E is None else self.load_E + tokens_per_expert_E
        places_P = torch.arange(len(order_P), device=x_TD.device)
        inverse_P = torch.empty_like(order_P).scatter_(0, order_P, places_P)  # place of each pair in the rows
        compute = self.experts if self.ep_size == 1 else self.experts_of_all_ranks
        if self.kernel == "triton":
            routes = (order_P // self.top_k, inverse_P.view(topk_ids_TK.shape))
            rows_PD = CopyRows.apply(x_TD, *routes)
            weights_P = TakeRows.apply(topk_weights_TK.flatten(), order_P)
            y_TD = SumRows.apply(compute(rows_PD, tokens_per_expert_E, weights_P), *routes)
        else:
            rows_PD = CopyToExperts.apply(x_TD, order_P, inverse_P)
            out_PD = compute(rows_PD, tokens_per_expert_E)
            y_TD = SumOfExperts.apply(out_PD, topk_weights_TK, order_P, inverse_P)
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD, topk_ids_TK

    def experts_of_all_ranks(
        self, rows_PD: Tensor, tokens_per_expert_E: Tensor, weights_P: Tensor | None = None
    ) -> Tensor:
        """Send rows (sorted by global expert) to the ranks of their experts, and results back. Collective.

        Rows arrive ordered by (sending rank, local expert). The grouped product needs the order of local
        experts, so rows are permuted before the product, and results are permuted back.

        The host waits for the GPU once, to learn how many rows the rank sends and receives. Every further
        wait would cost time: the GPU is idle after a wait until the host has launched the next kernels.
        """
        sent_re = tokens_per_expert_E.view(self.ep_size, self.num_local_experts)  # [rank, e]
        received_re = torch.empty_like(sent_re)  # rows from each rank for each local expert
        dist.all_to_all_single(received_re, sent_re, group=self.group)
        send_rows, recv_rows = torch.stack([sent_re.sum(1), received_re.sum(1)]).tolist()
        received_PD = AllToAll.apply(rows_PD, recv_rows, send_rows, self.group)
        local_ids = torch.arange(self.num_local_experts, device=rows_PD.device).repeat(self.ep_size)
        ids_P = torch.repeat_interleave(local_ids, received_re.flatten(), output_size=len(received_PD))
        order = ids_P.argsort(stable=True)
        if weights_P is not None:  # they travel with their rows
            weights_P = TakeRows.apply(AllToAll.apply(weights_P, recv_rows, send_rows, self.group), order)
        out_PD = self.experts(TakeRows.apply(received_PD, order), received_re.sum(0), weights_P)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return AllToAll.apply(TakeRows.apply(out_PD, inverse), send_rows, recv_rows, self.group)


def take_expert_loads(policy: nn.Module) -> Tensor | None:
    """Return [L, E], the tokens of this rank by MoE layer and expert since the last call; None if dense."""
    blocks = [module for module in policy.modules() if isinstance(module, MoEBlock)]
    loads = [block.load_E for block in blocks if block.load_E is not None]
    for block in blocks:
        block.load_E = None
    return torch.stack(loads) if loads else None


# ------------------------------------------------------------------------------------------------------------
# The transformer
# ------------------------------------------------------------------------------------------------------------
class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed on CPUs by NormRows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.is_cuda else NormRows.apply(x, x, self.weight, self.eps)


class NormRows(torch.autograd.Function):
    """An RMS norm with the bits of torch's, in half of its passes over memory.

    On CPUs torch composes the norm of nine operators and differentiates each, with a float32 copy of x for
    nearly every one. With r = 1 / sqrt(mean(x^2) + eps), g the gradient of the result times the weight, and
    D values per row:
        dx = g r - x r^3 <g, x> / D        dweight = sum over rows of (gradient of the result) x r
    The two summands of dx go to x and to the same x as `square`: autograd adds those of a float32 or float64
    tensor one after the other to the gradient of the residual stream, as torch's operators have it.
    """

    @staticmethod
    def forward(ctx, x: Tensor, square: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        r = (wide * wide).mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (wide * r).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, r = ctx.saved_tensors
        wide = x.to(r.dtype)
        grad = grad.to(r.dtype)
        dweight = None
        if ctx.needs_input_grad[2]:
            dweight = (wide * r).mul_(grad).sum_to_size(weight.shape).to(weight.dtype)
        grad = grad * weight
        dr = (grad * wide).sum(dim=-1, keepdim=True)
        dmean = -0.5 * dr * r.pow(3) / x.shape[-1]  # gradient of each x^2
        dsquare = (wide * 2).mul_(dmean)
        dx = grad.mul_(r)
        if x.dtype == r.dtype:
            return dx, dsquare, dweight, None
        return dx.add_(dsquare).to(x.dtype), None, dweight, None


class DenseMLP(nn.Module):
    """A SwiGLU: the MLP of a layer without experts, and the shared experts that every token passes."""

    def __init__(self, config: PretrainedConfig, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


# GPUs run flash attention. On Hopper, torch would prefer cuDNN's attention, which builds a plan for each new
# shape of the grid and keeps all plans (pytorch issue 190388), and nearly every micro-batch has a new shape.
# vLLM also switches cuDNN off when it is imported (vllm/platforms/cuda.py). With this line, programs without
# vLLM, for example benchmarks, run the same kernel.
torch.backends.cuda.enable_cudnn_sdp(False)


class Attention(nn.Module):
    """Causal grouped-query attention; most families apply an RMS norm to queries and keys.

    Padding follows each sequence in the grid, so the causal mask alone excludes padding. No mask is
    allocated.
    """

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.head_dim = head_dim(config)
        self.scale = multiplier(config, "attention_multiplier")  # None: 1 / sqrt(head_dim)
        family = FAMILIES[config.model_type]
        bias = family.qkv_bias or getattr(config, "attention_bias", False)
        num_kv_heads = config.num_key_value_heads
        sizes = {"q": config.num_attention_heads, "k": num_kv_heads, "v": num_kv_heads}
        for name, heads in sizes.items():
            linear = nn.Linear(config.hidden_size, heads * self.head_dim, bias=bias)
            setattr(self, f"{name}_proj", linear)
        width = config.num_attention_heads * self.head_dim
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bias and family.output_bias)
        self.q_norm = None
        self.k_norm = None
        if getattr(config, "use_qk_norm", family.query_norm != "none"):  # GLM-4.5 has the field use_qk_norm
            for name in ("q", "k"):
                width = self.head_dim * (sizes[name] if family.query_norm == "all" else 1)
                setattr(self, f"{name}_norm", RMSNorm(width, eps=config.rms_norm_eps))

    def forward(self, x_TD: Tensor, rotary_TR: tuple[Tensor, Tensor], packed: PackedSequences) -> Tensor:
        q_THR = rotate(self.normed(self.q_proj(x_TD), self.q_norm), rotary_TR)
        k_TGR = rotate(self.normed(self.k_proj(x_TD), self.k_norm), rotary_TR)
        v_TGR = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))

        num_q = q_THR.shape[1]
        num_kv = k_TGR.shape[1]
        batch, longest = packed.padded_shape
        qkv = torch.cat([q_THR, k_TGR, v_TGR], dim=1)  # [T, H+2G, R]: one scatter instead of three
        grid = ToGrid.apply(qkv, packed.padded_index, packed.repeats, batch * longest)
        heads = grid.view(batch, longest, -1, self.head_dim).transpose(1, 2)  # [B, H+2G, S, R]
        q, k, v = heads.split([num_q, num_kv, num_kv], dim=1)
        is_grouped = num_q != num_kv
        if x_TD.dtype == torch.bfloat16 and not x_TD.is_cuda:
            # On CPUs, torch's backward pass of attention takes three times as long in bfloat16.
            q, k, v = q.float(), k.float(), v.float()
        out = F.scaled_dot_product_attention(  # [B, H, S, R]
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=is_grouped
        )
        out = out.to(x_TD.dtype).transpose(1, 2).reshape(batch * longest, -1)
        out_TD = TakeRows.apply(out, packed.padded_index)
        return self.o_proj(out_TD)

    def normed(self, x_TD: Tensor, norm: nn.RMSNorm | None) -> Tensor:
        """Apply a norm to queries or keys, over each head or all heads by its width: [T, HR] -> [T, H, R]."""
        if norm is not None:
            x_TD = norm(x_TD.unflatten(-1, (-1, *norm.normalized_shape))).flatten(-2)
        return x_TD.unflatten(-1, (-1, self.head_dim))


def rotate(x_THR: Tensor, rotary_TR: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate by position, half-split convention (RoFormer, arXiv 2104.09864; Hugging Face layout).

    If the tables are narrower than a head (GLM-4.5), the remaining values of the head are not rotated.
    """
    cos, sin = (table.unsqueeze(1) for table in rotary_TR)  # [T, 1, R] or narrower
    width = cos.shape[-1]
    if width < x_THR.shape[-1]:
        return torch.cat([rotate(x_THR[..., :width], rotary_TR), x_THR[..., width:]], dim=-1)
    first_half, second_half = x_THR.chunk(2, dim=-1)
    return x_THR * cos + torch.cat([-second_half, first_half], dim=-1) * sin


class DecoderLayer(nn.Module):
    """Attention and MLP or MoE block, each behind a norm and added to the residual stream."""

    def __init__(self, config: PretrainedConfig, layer: int, group: dist.ProcessGroup | None):
        super().__init__()
        self.residual_multiplier = multiplier(config, "residual_multiplier")
        self.self_attn = Attention(config)
        is_moe = is_moe_layer(config, layer)
        self.mlp = MoEBlock(config, group) if is_moe else DenseMLP(config, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x_TD: Tensor, rotary_TR: tuple[Tensor, Tensor], packed: PackedSequences, replay_TK):
        """Return the layer's output [T, D] and its expert ids [T, K], or None from a dense layer."""
        attention_TD = self.self_attn(self.input_layernorm(x_TD), rotary_TR, packed)
        x_TD = x_TD + scaled(attention_TD, self.residual_multiplier)
        normed_TD = self.post_attention_layernorm(x_TD)
        if isinstance(self.mlp, DenseMLP):
            return x_TD + scaled(self.mlp(normed_TD), self.residual_multiplier), None
        y_TD, topk_ids_TK = self.mlp(normed_TD, replay_TK)
        return x_TD + scaled(y_TD, self.residual_multiplier), topk_ids_TK


class Decoder(nn.Module):
    """Embedding, layers and final norm, under the names of a Hugging Face checkpoint."""

    def __init__(self, config: PretrainedConfig, group: dist.ProcessGroup | None):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i, group) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


def recomputed_layer(
    layer: DecoderLayer,
    x_TD: Tensor,
    rotary_TR: tuple[Tensor, Tensor],
    packed: PackedSequences,
    replay_TK: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Run a layer that the backward pass computes again, with the experts of the forward pass.

    A router that chooses again may choose another expert if two scores are nearly equal, because a GPU does
    not always round the same products in the same way. With expert parallelism a rank would then receive
    another number of rows than in the forward pass, and torch would stop the run (CheckpointError). Without
    expert parallelism the gradients would silently belong to other routes.

    The states of random number generators are not saved, because a layer draws no random numbers.
    """
    routes = [replay_TK]  # ids to replay; from the end of the forward pass on, the ids that it used

    def run(x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        x_TD, routes[0] = layer(x_TD, rotary_TR, packed, routes[0])
        return x_TD, routes[0]

    return checkpoint(run, x_TD, use_reentrant=False, preserve_rng_state=False)


class Policy(nn.Module):
    """A causal language model that maps packed sequences to log-probabilities of their completion tokens."""

    def __init__(self, config: PretrainedConfig, group: dist.ProcessGroup | None = None):
        super().__init__()
        check_supported(config)
        self.config = config
        self.group = group
        self.activation_checkpointing = (
            False  # recompute each layer in backward: saves memory for one more forward
        )
        self.logprob_kernel = "auto"  # backend of linear_logprob_entropy()
        self.lora: Any = None  # extras.lora.Adapters
        self.merged: dict[str, Any] = {}  # {weight with an adapter: extras.lora.Merged}
        self.embedding_multiplier = multiplier(config, "embedding_multiplier")
        self.logits_scaling = multiplier(config, "logits_scaling")
        self.model = Decoder(config, group)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        # [R/2]. Not a buffer, because a buffer would be converted with the model and this must stay float32.
        self.inv_freq = inverse_frequencies(config)

    def hidden(self, packed: PackedSequences, replay_ids_TLK: Tensor | None = None) -> tuple[Tensor, list]:
        """Return final normed hidden states [T, D] and the expert ids of each layer [T, K] (dense: None)."""
        x_TD = scaled(self.model.embed_tokens(packed.input_ids), self.embedding_multiplier)
        angles_TR = packed.position_ids.unsqueeze(1).float() * self.inv_freq.to(x_TD.device).repeat(2)
        rotary_TR = (angles_TR.cos().to(x_TD.dtype), angles_TR.sin().to(x_TD.dtype))
        layer_ids = []
        for i, layer in enumerate(self.model.layers):
            replay_TK = None if replay_ids_TLK is None else replay_ids_TLK[:, i].long()
            if self.activation_checkpointing and torch.is_grad_enabled():
                x_TD, topk_ids_TK = recomputed_layer(layer, x_TD, rotary_TR, packed, replay_TK)
            else:
                x_TD, topk_ids_TK = layer(x_TD, rotary_TR, packed, replay_TK)
            layer_ids.append(topk_ids_TK)
        return self.model.norm(x_TD), layer_ids

    def forward(
        self,
        packed: PackedSequences,
        temperature: float = 1.0,
        replay_ids_TLK: Tensor | None = None,
        topk_ids_Nk: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list, Tensor | None]:
        """Return logprobs [N], entropy [N], the expert ids of each layer, and logprobs of topk_ids_Nk [N, k].

        Log-probabilities of the targets and of further tokens, and the entropy of each distribution, are
        float32, in nats, at the given sampling temperature. The fourth value is None without topk_ids_Nk.
        replay_ids_TLK: expert ids to use instead of the router's choice, in the order of the packed tokens;
        the ids of dense layers are ignored.
        """
        x_TD, layer_ids = self.hidden(packed, replay_ids_TLK)
        x_ND = TakeRows.apply(x_TD, packed.predictor_index)
        if self.logits_scaling is not None:  # Granite: logits / logits_scaling / temperature
            temperature = temperature * self.logits_scaling
        logprobs, entropy = linear_logprob_entropy(
            x_ND, self.lm_head.weight, packed.target_ids, temperature, self.logprob_kernel
        )
        topk = None
        if topk_ids_Nk is not None:
            topk = topk_logprobs(
                x_ND, self.lm_head.weight, topk_ids_Nk, packed.target_ids, logprobs, temperature
            )
        return logprobs, entropy, layer_ids, topk


def route_table(layer_ids: list[Tensor | None], num_experts: int) -> Tensor | None:
    """Stack the expert ids of a forward pass to [T, L, K], with 0 in dense layers, as vLLM does.

    The ids are uint8, or int16 for models with 256 experts or more. None for a dense model.
    """
    example = next((ids for ids in layer_ids if ids is not None), None)
    if example is None:
        return None
    table = torch.stack([torch.zeros_like(example) if ids is None else ids for ids in layer_ids], dim=1)
    return table.to(torch.uint8 if num_experts < 256 else torch.int16)


# ------------------------------------------------------------------------------------------------------------
# Configuration of a model
# ------------------------------------------------------------------------------------------------------------
def is_moe_layer(config: PretrainedConfig, layer: int) -> bool:
    """Tell whether a layer has experts."""
    if num_experts_of(config) == 0 or layer in getattr(config, "mlp_only_layers", ()):
        return False
    moe_step = getattr(config, "decoder_sparse_step", 1)  # Qwen3: every moe_step-th layer has experts
    num_first_dense = getattr(config, "first_k_dense_replace", 0)  # GLM-4.5: the first layers are dense
    return (layer + 1) % moe_step == 0 and layer >= num_first_dense


def head_dim(config: PretrainedConfig) -> int:
    """Return the size of an attention head; if config.json lacks it, the default of transformers."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def inverse_frequencies(config: PretrainedConfig) -> Tensor:
    """Return the angles per position of the R rotary dimensions, one per pair: [R/2] float32, in radians.

    default  theta^(-2i/R)
    llama3   the same, low frequencies divided by a factor for long contexts (Llama 3.1), by transformers
    """
    if config.rope_parameters["rope_type"] == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        return ROPE_INIT_FUNCTIONS["llama3"](config)[0]
    width = int(head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    return (float(config.rope_parameters["rope_theta"]) ** -exponents).float()


def multiplier(config: PretrainedConfig, field: str) -> float | None:
    """Return a constant factor of the model from config.json, or None for a family without these factors.

    Only Granite has them: embedding_multiplier; attention_multiplier, in place of 1 / sqrt(head_dim);
    residual_multiplier, for the outputs of attention and block; logits_scaling, a divisor of the logits.
    """
    return float(getattr(config, field)) if FAMILIES[config.model_type].has_multipliers else None


def scaled(x: Tensor, factor: float | None) -> Tensor:
    """Multiply x by a factor of multiplier(); None returns x itself, so most families pay no product."""
    return x if factor is None else x * factor


def num_experts_of(config: PretrainedConfig) -> int:
    """Return the number of experts per MoE layer; 0 for a dense model."""
    field = FAMILIES[config.model_type].num_experts
    return getattr(config, field) if field else 0


def expert_width(config: PretrainedConfig) -> int:
    """Return the width I of an expert."""
    return getattr(config, FAMILIES[config.model_type].expert_width)


class ParameterCounts(NamedTuple):
    """Number of parameters of a model, by the way in which ranks share them."""

    experts: int  # spread over the ranks of an expert-parallel group
    embeddings: int  # embedding and head
    others: int  # attention, norms, routers, dense MLPs, shared experts


COUNTS_CACHE: dict[str, ParameterCounts] = {}  # {configuration: counts}, because a search of plans asks often


def parameter_counts(config: PretrainedConfig) -> ParameterCounts:
    """Count the parameters of a model with this configuration, without allocating the model."""
    key = f"{type(config).__name__} {vars(config)}"
    if key not in COUNTS_CACHE:
        with torch.device("meta"):
            policy = Policy(config)
        sizes = {name: parameter.numel() for name, parameter in policy.named_parameters()}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        embeddings = sum(size for name, size in sizes.items() if "embed_tokens" in name or "lm_head" in name)
        COUNTS_CACHE[key] = ParameterCounts(experts, embeddings, sum(sizes.values()) - experts - embeddings)
    return COUNTS_CACHE[key]


def check_supported(config: PretrainedConfig) -> None:
    """Raise ValueError for a model that this file would compute differently from its authors."""
    if config.model_type not in FAMILIES:
        known_types = ", ".join(map(repr, FAMILIES))
        raise ValueError(f"model_type {config.model_type!r} is not supported, supported are {known_types}")
    rope_type = config.rope_parameters["rope_type"]
    values = vars(config)
    # vLLM applies a sliding window that config.json names, whatever the family.
    fixed_fields = {"hidden_act": "silu", "sliding_window": None} | dict(
        FAMILIES[config.model_type].fixed_fields
    )
    problems = [
        f"{field} is {values[field]!r}, supported is {supported!r}"
        for field, supported in fixed_fields.items()
        if values.get(field, supported) != supported
    ]
    rotated = config.rope_parameters.get("partial_rotary_factor", 1.0)
    if rotated != 1.0 and config.model_type != "glm4_moe":  # transformers and vLLM ignore it or fail
        problems.append(f"partial_rotary_factor is {rotated!r}, supported is 1.0")
    if rope_type not in ("default", "llama3"):
        problems.append(f"rope_type is {rope_type!r}, supported are 'default' and 'llama3'")
    if getattr(config, "quantization_config", None):
        problems.append("the weights are quantised (quantization_config); take a folder of bfloat16 weights")
    if problems:
        raise ValueError("model not supported: " + "; ".join(problems))


def model_folder(path: str | Path) -> Path:
    """Return a local folder for model.path: `path` itself, or a download of this name from the hub.

    Ranks of a node that ask at the same time wait for one download. ValueError if there is neither a folder
    nor a model of this name.
    """
    if (Path(path) / "config.json").is_file():
        return Path(path)
    if Path(path).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        raise ValueError(
            f"model.path: {path} holds no config.json; give the folder of a Hugging Face checkpoint, or the "
            "name of a model on the hub, for example Qwen/Qwen3-0.6B (`python -m data.tiny` makes the tiny "
            "model)"
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
        return Path(snapshot_download(str(path), allow_patterns=patterns))
    except Exception as error:  # no network, unknown model, missing permission
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"model.path: {path} is not a local folder, and downloading it from the hub failed: {reason}"
        ) from error


def load_config(folder: str | Path) -> PretrainedConfig:
    """Read config.json of a model folder or a model on the hub. ValueError if it cannot be used."""
    folder = model_folder(folder)
    try:
        # trust_remote_code=False: code files of the folder are not executed.
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for broken contents
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{folder}/config.json cannot be read as that of a model: {reason}") from error
    check_supported(config)
    return config


# ------------------------------------------------------------------------------------------------------------
# Weights under Hugging Face's names
# ------------------------------------------------------------------------------------------------------------
def generator_of(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return the random numbers of a parameter, which depend on the seed, the name and the kind of device."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


def random_weights(policy: Policy, seed: int) -> None:
    """Draw matrices from Normal(0, initializer_range), set norms to one; equal for any number of ranks."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
                continue
            generator = generator_of(seed, name, parameter.device)
            first, count = local_experts(policy, parameter)
            full_shape = (num_experts_of(policy.config), *parameter.shape[1:]) if count else parameter.shape
            full = torch.randn(full_shape, generator=generator, device=parameter.device)
            full *= policy.config.initializer_range
            parameter.copy_(full[first : first + count] if count else full)


def local_experts(policy: Policy, parameter: Tensor) -> tuple[int, int]:
    """Return (first global expert, number of experts) of a fused expert parameter, else (0, 0).

    For example, with 8 experts on a group of 2 ranks the second rank has (4, 4).
    """
    if getattr(parameter, "allreduce", True):
        return 0, 0
    ep_rank = dist.get_rank(policy.group) if policy.group else 0
    return ep_rank * parameter.shape[0], parameter.shape[0]


def checkpoint_name(config: PretrainedConfig, name: str) -> str:
    """Return the name of a parameter in a checkpoint, which is also the engine's name.

    Only the block's name differs between families, for example block_sparse_moe instead of mlp in Mixtral.
    Names in files can differ from this name, see file_name().
    """
    return name.replace(".mlp.", f".{FAMILIES[config.model_type].block}.")


def file_name(config: PretrainedConfig, name: str) -> str:
    """Return the name of a parameter in a safetensors file; only Granite's differ from checkpoint_name().

    For example, Granite's files have block_sparse_moe.input_linear.weight [E, 2I, D], and vLLM also takes it
    under the name of other families, block_sparse_moe.experts.gate_up_proj.
    """
    name = checkpoint_name(config, name)
    for ending, ending_in_files in FAMILIES[config.model_type].fused_names:
        if name.endswith(ending):
            return name.removesuffix(ending) + ending_in_files
    return name


def expert_slices(
    config: PretrainedConfig, name: str, parameter: Tensor, first: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in a checkpoint, view) of each matrix in a fused parameter.

    first: global number of the first expert in the parameter.
    """
    prefix, leaf = checkpoint_name(config, name).rsplit(".", 1)
    gate_name, up_name, down_name = FAMILIES[config.model_type].projections
    for i, expert in enumerate(parameter):
        if leaf == "down_proj":
            yield f"{prefix}.{first + i}.{down_name}.weight", expert
        else:
            gate, up = expert.chunk(2, dim=0)
            yield f"{prefix}.{first + i}.{gate_name}.weight", gate
            yield f"{prefix}.{first + i}.{up_name}.weight", up


def weights_of(policy: Policy) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield (name, parameter or buffer, values to store). Adapters are part of the values of their weight.

    Values are the tensor or, for a weight with adapters, an object that to() turns into the merged tensor.
    """
    for name, tensor in chain(policy.named_parameters(), policy.named_buffers()):
        if "lora_" not in name:
            yield name, tensor, policy.merged.get(name, tensor.data)


EACH_RANK = -1  # owner of fused experts [E, ...] in a file: each rank holds a slice [e, ...]


def checkpoint_tensors(policy: Policy) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yield (name in a file, tensor, owner) of the complete model; a tied head is listed once.

    owner: rank in the expert-parallel group that holds an expert; None for tensors that all ranks hold;
    EACH_RANK for Granite's experts, which are one tensor in a file and a slice of it on each rank. The tensor
    is a view of the values of weights_of(). For an expert of another rank only the shape is right; the
    contents belong to a local expert.
    """
    num_owners = dist.get_world_size(policy.group) if policy.group else 1
    has_fused_files = bool(FAMILIES[policy.config.model_type].fused_names)
    for name, parameter, values in weights_of(policy):
        _, count = local_experts(policy, parameter)
        if count == 0 or has_fused_files:
            owner = EACH_RANK if count and num_owners > 1 else None
            yield file_name(policy.config, name), values, owner
            continue
        for owner in range(num_owners):
            for expert_name, tensor in expert_slices(policy.config, name, values, owner * count):
                yield expert_name, tensor, owner


INDEX = "model.safetensors.index.json"


def weight_map_of(folder: str | Path) -> dict[str, str]:
    """Return {tensor: file} from the index of a checkpoint; an empty mapping without an index."""
    index = Path(folder) / INDEX
    return json.loads(index.read_text())["weight_map"] if index.is_file() else {}


def checkpoint_shards(folder: str | Path) -> list[Path]:
    """List the safetensors files of a Hugging Face checkpoint.

    If there is an index, these are the files that the index names, because the folder may also contain files
    of an earlier save by another number of ranks. ValueError if a file of the index is missing, or if there
    is no file at all.
    """
    shards = sorted(Path(folder).glob("*.safetensors"))
    if listed := set(weight_map_of(folder).values()):
        missing = sorted(listed - {shard.name for shard in shards})
        if missing:
            raise ValueError(
                f"model.path: {folder} lacks {len(missing)} of the {len(listed)} files that {INDEX} names, "
                f"first {missing[0]}: copy or download them again"
            )
        shards = [shard for shard in shards if shard.name in listed]
    if not shards:
        raise ValueError(f"model.path: {folder} holds no *.safetensors file")
    return shards


def load_hf(policy: Policy, folder: str | Path) -> None:
    """Fill the policy from safetensors. A rank reads the shared tensors and its local experts only.

    Every rank checks the shapes of all tensors, so that all ranks raise the same error. ValueError names the
    tensors that are missing, have another shape, or would be left out.
    """
    files = {}  # {tensor: open file}
    for shard in checkpoint_shards(folder):
        try:
            file = safe_open(shard, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{shard} is not a complete safetensors file: {error}") from error
        if twice := [name for name in file.keys() if name in files]:  # noqa: SIM118
            raise ValueError(f"{folder}: {twice[0]} is in two files, one of them {shard.name}: remove one")
        files.update(dict.fromkeys(file.keys(), file))
    tensors = list(checkpoint_tensors(policy))
    missing = [name for name, _, _ in tensors if name not in files]
    if missing:
        listed = weight_map_of(folder)
        places = [f"{INDEX} says that {name} is in {listed[name]}" for name in missing if name in listed]
        advice = f"; {places[0]}, which lacks it: copy or download that file again" if places else ""
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(tensors)} tensors: {', '.join(missing[:3])} ...{advice}"
        )
    refuse_left_out(policy, folder, files, {name for name, _, _ in tensors})
    ep_rank = dist.get_rank(policy.group) if policy.group else 0
    for name, view, owner in tensors:
        in_file = files[name].get_slice(name)
        if in_file.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise ValueError(f"{folder}: {name} has dtype {in_file.get_dtype()}; take weights in bfloat16")
        shape = tuple(in_file.get_shape())
        expected = shape_in_file(policy, view, owner)
        if shape != expected:
            raise ValueError(f"{folder}: {name} has shape {shape}, but by config.json it is {expected}")
        if owner == EACH_RANK:
            view.copy_(in_file[ep_rank * len(view) : (ep_rank + 1) * len(view)])
        elif owner in (None, ep_rank):
            view.copy_(files[name].get_tensor(name))


FIELDS = {  # (pattern of a tensor's name, fields of config.json that decide whether a model has it)
    r"(q|k|v|o)_proj\.bias$": "attention_bias",
    r"(gate|up|down)_proj\.bias$": "mlp_bias",
    r"(q|k)_norm\.": "use_qk_norm, model_type",
    r"^lm_head\.": "tie_word_embeddings",
    r"\.(mlp|block_sparse_moe)\.": "the number of experts, the layers with experts, model_type",
    "": "model_type",
}


def refuse_left_out(policy: Policy, folder: str | Path, files: dict, expected: set[str]) -> None:
    """Raise ValueError for tensors of a checkpoint for which config.json has no place; they would be lost.

    files: {tensor: open file}; expected: names of the policy's tensors. Three kinds are harmless: frequencies
    of rotary embeddings, which are computed; the layers of multi-token prediction that follow the last layer
    (num_nextn_predict_layers); and the head of a tied model, if it equals the embedding.
    """
    config = policy.config
    num_layers = config.num_hidden_layers
    num_known = num_layers + (getattr(config, "num_nextn_predict_layers", None) or 0)
    reasons = {}
    for name in sorted(set(files) - expected):
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        number = int(layer[1]) if layer else -1
        if name.endswith("rotary_emb.inv_freq") or num_layers <= number < num_known:
            continue
        if name == "lm_head.weight" and policy.lm_head.weight is policy.model.embed_tokens.weight:
            head = files[name].get_tensor(name)
            embedding = "model.embed_tokens.weight"
            if torch.equal(head, files[embedding].get_tensor(embedding)):
                continue
        fields = next(fields for pattern, fields in FIELDS.items() if re.search(pattern, name))
        reasons[name] = "num_hidden_layers" if number >= num_layers else fields
    if reasons:
        names = ", ".join([*reasons][:4]) + (", ..." if len(reasons) > 4 else "")
        raise ValueError(
            f"{folder} has {len(reasons)} tensors for which the model of config.json has no place: {names}; "
            f"check {', '.join(sorted(set(reasons.values())))} in config.json"
        )


def shape_in_file(policy: Policy, tensor: Tensor, owner: int | None) -> tuple[int, ...]:
    """Return the shape in a file of a tensor of checkpoint_tensors()."""
    if owner == EACH_RANK:
        return (num_experts_of(policy.config), *tensor.shape[1:])
    return tuple(tensor.shape)


SHARD_BYTES = (
    4 * 2**30
)  # size of the files that save_hf() writes; a rank copies one file at a time to the host


class TensorInFile(NamedTuple):
    """A tensor of a checkpoint, and its form in a file."""

    tensor: Tensor
    dtype: torch.dtype  # in the file
    shape: tuple[int, ...]  # in the file; other than the tensor's if each rank holds a slice of the experts

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def deal_to_shards(policy: Policy, dtype: torch.dtype) -> list[tuple[int, dict[str, TensorInFile]]]:
    """Deal the tensors of a checkpoint to files; every rank computes the same list without communication.

    Returns for each file (rank that writes it, {name: tensor}), sorted by rank. A file has at most
    SHARD_BYTES, unless it has a single tensor. Buffers stay float32, as in transformers. Rank 0 writes the
    fused experts of Granite.
    """
    buffers = {checkpoint_name(policy.config, name) for name, _ in policy.named_buffers()}
    shards: list[tuple[int, dict]] = []
    room = 0
    tensors = []
    for name, tensor, owner in checkpoint_tensors(policy):
        file_dtype = torch.float32 if name in buffers else dtype
        in_file = TensorInFile(tensor, file_dtype, shape_in_file(policy, tensor, owner))
        tensors.append((0 if owner in (None, EACH_RANK) else owner, name, in_file))
    for writer, name, in_file in sorted(tensors, key=lambda item: item[0]):  # stable: layers stay in order
        if not shards or shards[-1][0] != writer or in_file.num_bytes > room:
            shards.append((writer, {}))
            room = SHARD_BYTES
        shards[-1][1][name] = in_file
        room -= in_file.num_bytes
    return shards


def save_hf(
    policy: Policy, folder: str | Path, dtype: torch.dtype | None = None, save: Callable = save_file
) -> None:
    """Write a Hugging Face checkpoint; every rank of the world calls this function.

    Rank 0 writes the tensors that all ranks hold. Each rank of the first expert-parallel group writes its
    local experts. So no tensor is gathered, and the result loads in transformers, in vLLM, and in load_hf()
    at any number of ranks. There are no collective calls: if one rank fails, no other rank hangs.

    The exception is Granite with expert parallelism. A file has all experts of a layer in one tensor, so
    these tensors are gathered, one at a time, and rank 0 writes them [ours: transformers loads no other
    layout]. An error of a write, for example a full disk, is raised after the last gather, so that no rank
    hangs. If a rank fails before save_hf(), the watchdog ends the run after run.timeout_s.

    save(tensors, path, metadata=...) writes a file.
    """
    folder = Path(folder)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank >= (dist.get_world_size(policy.group) if policy.group else 1):
        return
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or policy.lm_head.weight.dtype
    shards = deal_to_shards(policy, dtype)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    failure = None
    for name, (writer, tensors) in zip(names, shards):
        on_host = tensors_on_host(policy, tensors, is_writer=writer == rank)
        try:
            if on_host and failure is None:
                save(on_host, folder / name, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            failure = error
    if failure is not None:
        raise failure
    if rank == 0:
        weight_map = {key: name for name, (_, tensors) in zip(names, shards) for key in tensors}
        total_size = sum(in_file.num_bytes for _, tensors in shards for in_file in tensors.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=1))
        config = policy.config.__class__.from_dict(policy.config.to_dict())
        config.architectures = [FAMILIES[config.model_type].architecture]
        config.dtype = str(dtype).removeprefix("torch.")
        config.save_pretrained(folder)


def tensors_on_host(policy: Policy, tensors: dict[str, TensorInFile], is_writer: bool) -> dict[str, Tensor]:
    """Return the tensors of a file on the rank that writes it; another rank only takes part in gathers."""
    on_host = {}
    for name, (tensor, dtype, shape) in tensors.items():
        if shape != tuple(tensor.shape):
            tensor = gather_experts(policy, tensor.to(dtype))
        if is_writer:
            on_host[name] = tensor.to(dtype).cpu().contiguous()
    return on_host


def gather_experts(policy: Policy, experts: Tensor) -> Tensor:
    """Gather the experts of all ranks of the expert-parallel group: [e, ...] -> [E, ...]. Collective."""
    if policy.group is None or dist.get_world_size(policy.group) == 1:
        return experts
    full = experts.new_empty(num_experts_of(policy.config), *experts.shape[1:])
    dist.all_gather_into_tensor(full, experts, group=policy.group)
    return full


def hf_tensors(policy: Policy, own_experts: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of the complete model in layer order, with the experts of a layer fused.

    Collective: all ranks must iterate to the end, in step. A gathered tensor is released before the next one
    is gathered. Names are those that vLLM takes; Granite's names in files differ, see file_name().
    own_experts: yield only the local experts, matrix by matrix under their names in a checkpoint, for
    example model.layers.0.mlp.experts.5.up_proj.weight, without gathering.
    """
    for name, parameter, values in weights_of(policy):
        first, count = local_experts(policy, parameter)
        dtype = values.dtype
        if count and own_experts:
            yield from ((n, view.to(dtype)) for n, view in expert_slices(policy.config, name, values, first))
            continue
        tensor = values.to(dtype)
        yield checkpoint_name(policy.config, name), gather_experts(policy, tensor) if count else tensor


# ------------------------------------------------------------------------------------------------------------
# From a folder to DeepSpeed's engine
# ------------------------------------------------------------------------------------------------------------
TRAINING_ROWS = 512  # tokens of a micro-batch
DECODING_ROWS = 32  # completions that an engine computes at once: fewer rows, which other kernels multiply
MEASURE_S = 0.2


@functools.cache
def product_rates(rows: int) -> dict[str, float]:
    """Measure {dtype: GFLOP/s} of products with the shapes of a small MLP, [rows, 576] and [576, 1536].

    One core computes. The dtypes take turns, ten or as many as fit into MEASURE_S but at least three. The
    fastest turn counts, in seconds of the processor, because other programs only slow a product down.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    factors = {
        name: (torch.ones(rows, 576, dtype=d), torch.ones(1536, 576, dtype=d)) for name, d in dtypes.items()
    }
    times: dict[str, list[float]] = {name: [] for name in factors}
    for turn in range(10):
        for name, (x, weight) in factors.items():
            start = time.thread_time()
            F.linear(x, weight)
            times[name].append(time.thread_time() - start)
        if turn >= 2 and sum(map(sum, times.values())) > MEASURE_S:
            break
    torch.set_num_threads(num_threads)
    return {name: 2e-9 * rows * 576 * 1536 / min(seconds) for name, seconds in times.items()}


def fast_dtype(rows: int) -> Literal["float32", "bfloat16"]:
    """Return bfloat16 if this processor multiplies so many rows at least 1.5 times as fast, else float32.

    The required speed-up is ours, because float32 is more exact. Measured products of one core, in GFLOP/s of
    bfloat16 and float32 for 512 and for 32 rows: a Xeon with AMX 495, 148 and 174, 77; without AMX 81, 155
    and 74, 94; an EPYC with AVX2 alone 7.5, 60 for 512 rows.
    """
    rates = product_rates(rows)
    return "bfloat16" if rates["bfloat16"] >= 1.5 * rates["float32"] else "float32"


def policy_dtype(settings: ModelSettings, on_gpu: bool) -> Literal["float32", "bfloat16"]:
    """Return model.dtype; if it is auto, return bfloat16 on GPUs and the fast dtype of a CPU."""
    if settings.dtype != "auto":
        return settings.dtype
    return "bfloat16" if on_gpu else fast_dtype(TRAINING_ROWS)


def engine_dtype(settings: RolloutSettings, on_gpu: bool) -> Literal["float32", "bfloat16"]:
    """Return rollout.dtype; if it is auto, return bfloat16 on GPUs and for FP8, else the CPU's fast dtype."""
    if settings.dtype != "auto":
        return settings.dtype
    return "bfloat16" if on_gpu or settings.fp8 == "on" else fast_dtype(DECODING_ROWS)


def choose_logprob_kernel(settings: ModelSettings, config: PretrainedConfig, device: torch.device) -> str:
    """Return the backend of kernels/linear_logprob_entropy.py to use; ValueError if it cannot run here."""
    dtype = getattr(torch, policy_dtype(settings, device.type == "cuda"))
    best = choose_backend(torch.empty(0, config.hidden_size, dtype=dtype, device=device))
    if settings.logprob_kernel == "triton" != best:
        raise ValueError(
            "model.logprob_kernel triton: needs model.dtype bfloat16, a hidden size that is a multiple of 8, "
            "an NVIDIA GPU with 160 KiB of shared memory (A100, H100 and later); set it to auto or chunked"
        )
    return best if settings.logprob_kernel == "auto" else settings.logprob_kernel


def use_expert_kernel(policy: Policy, settings: ModelSettings) -> None:
    """Let all MoE blocks compute rows of experts as model.expert_kernel says; ValueError if they cannot.

    auto is torch until a GPU has shown that the kernels are right and faster. Collective.
    """
    if settings.expert_kernel != "triton":
        return
    blocks = [module for module in policy.modules() if isinstance(module, MoEBlock)]
    reason = unsupported(policy.lm_head.weight.device) if blocks else "needs a MoE, this model is dense"
    difference = 0.0 if reason else kernel_difference(blocks[0])
    if not difference < 0.03:  # bfloat16 alone makes up to 0.013
        reason = f"Triton {triton.__version__} compiles it wrongly here, by {difference:.2g} of the values"
    if reason:
        raise ValueError(f"model.expert_kernel triton: {reason}; set it to auto or torch")
    for block in blocks:
        block.kernel = "triton"


def kernel_difference(block: MoEBlock) -> float:
    """Return the largest difference between both kernels in the output and the gradients of a block.

    Each difference is relative to the largest value. 80 random tokens choose expert 0 and further experts in
    turn. Compiled kernels have been wrong on single GPUs, for example gradients on Blackwell (Triton's issue
    10821), and a run may have another version of Triton than the tests.
    """
    experts = block.experts.down_proj
    generator = torch.Generator().manual_seed(0)
    x_TD, grad_TD = torch.randn(2, 80, experts.shape[1], generator=generator).to(experts)
    choices = torch.arange(80)[:, None] + torch.arange(block.top_k)
    ids_TK = (choices % max(1, block.num_experts - 1) + 1) % block.num_experts
    ids_TK[:, 0] = 0
    results = []
    for block.kernel in ("triton", "torch"):
        x = x_TD.clone().requires_grad_()
        y_TD = block(x, ids_TK.to(x.device))[0]
        leaves = [x, *block.experts.parameters()]
        if block.top_k > 1 and block.gate.weight.requires_grad:  # of one renormalised weight: no gradient
            leaves.append(block.gate.weight)
        results.append([y_TD.detach(), *torch.autograd.grad(y_TD, leaves, grad_TD)])
    block.load_E = None
    differences = [(a - b).abs().max() / b.abs().max().clamp(min=1e-30) for a, b in zip(*results)]
    return torch.stack(differences).max().item()  # NaN if a value is NaN


def build_policy(
    settings: ModelSettings, model_dir: str | Path, ep_group: dist.ProcessGroup | None, device: torch.device
) -> Policy:
    """Build the policy with the weights of a folder or of a model on the hub, for this rank's experts."""
    model_dir = model_folder(model_dir)
    dtype = getattr(torch, policy_dtype(settings, device.type == "cuda"))
    torch.set_default_dtype(dtype)  # avoids an intermediate copy in float32
    with device:
        policy = Policy(load_config(model_dir), ep_group)
    torch.set_default_dtype(torch.float32)
    load_hf(policy, model_dir)
    blocks = [module for module in policy.modules() if isinstance(module, MoEBlock)]
    if settings.freeze_router and not blocks:
        raise ValueError(f"model.freeze_router True: {model_dir} is dense and has no router; set False")
    for block in blocks:
        block.gate.weight.requires_grad_(not settings.freeze_router)
    policy.activation_checkpointing = settings.activation_checkpointing
    policy.logprob_kernel = settings.logprob_kernel
    use_expert_kernel(policy, settings)
    return policy


def init_deepspeed() -> None:
    """Hand torch's process group to DeepSpeed, or create one first (gloo on CPUs, nccl on GPUs)."""
    if not torch.cuda.is_available():
        # This DeepSpeed operator would start a C++ compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)


def deepspeed_engine(policy: Policy, settings: TrainSettings) -> deepspeed.DeepSpeedEngine:
    """Put the policy under ZeRO with AdamW.

    An update is any number of backward(loss, scale_wrt_gas=False), then one step(). Of the settings this
    function reads learning_rate, betas, weight_decay, max_grad_norm, fused_adamw, zero_stage
    and offload_optimizer (hold float32 weights and AdamW's states on the host and update them there).

    zero_stage is 1 or 2. Stage 0 clips each rank by the norm of the rank's own experts (DeepSpeed issue
    8475), and stage 3 refuses expert parallelism other than DeepSpeed's.
    """
    optimizer = {
        "lr": settings.learning_rate,
        "betas": list(settings.betas),
        "weight_decay": settings.weight_decay,
        "torch_adam": True,  # DeepSpeed's AdamW needs a compiler
    }
    is_fused = torch.cuda.is_available() if settings.fused_adamw is None else settings.fused_adamw
    if is_fused:  # without the key torch chooses: one pass per operation on CPUs
        optimizer["fused"] = True
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_optimization": {"stage": settings.zero_stage},
        "gradient_clipping": settings.max_grad_norm,
        "optimizer": {"type": "AdamW", "params": optimizer},
    }
    if settings.grad_reduce_dtype == "float32":
        config["communication_data_type"] = "fp32"
    if settings.offload_optimizer:
        on_host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        config["zero_optimization"]["offload_optimizer"] = on_host
        config["zero_force_ds_cpu_optimizer"] = False  # accept torch's AdamW on the host
    if policy.lm_head.weight.dtype == torch.bfloat16:
        # Each gradient is added to the float32 sum as soon as it is computed.
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed's bfloat16 optimizer prints memory tables
        engine, *_ = deepspeed.initialize(model=policy, model_parameters=trained, config=config)
    is_bf16_optimizer = hasattr(engine.optimizer, "_update_hp_grad")
    if is_bf16_optimizer and not policy.lm_head.weight.is_cuda:
        engine.optimizer._update_hp_grad = functools.partial(add_gradient, engine.optimizer)
    return engine


def add_gradient(optimizer, parameter: Any, group: int, index: int, clear_lp_grads: bool) -> None:
    """Add a bfloat16 gradient to its float32 sum; takes the place of BF16_Optimizer._update_hp_grad().

    DeepSpeed copies the whole gradient to float32 first. In parts that stay in the cache of a CPU's core, the
    same sum takes a third of the time (7 million values: 6 instead of 19 ms).
    """
    if parameter.grad is None:
        return
    total = optimizer.fp32_groups_gradients[group][index]
    for part, values in zip(total.split(2**17), parameter.grad.reshape(-1).split(2**17)):
        part.add_(values.to(total.dtype))
    parameter._hp_grad = total
    optimizer.fp32_groups_has_gradients[group][index] = True


def forget_gradients(engine: deepspeed.DeepSpeedEngine) -> None:
    """Delete the gradients of a skipped update: with offload, DeepSpeed 0.19 would add them to the next."""
    averaged = getattr(engine.optimizer, "averaged_gradients", {})
    averaged.update(dict.fromkeys(averaged))


def optimizer_shard(engine: deepspeed.DeepSpeedEngine) -> dict:
    """Return this rank's float32 weights and AdamW's states, valid for the same checkpoint.topology()."""
    adamw = engine.optimizer.optimizer  # AdamW over this rank's float32 partitions
    masters = [p.detach().cpu() for group in adamw.param_groups for p in group["params"]]
    return {"masters": masters, "adamw": adamw.state_dict()}


def load_optimizer_shard(engine: deepspeed.DeepSpeedEngine, shard: dict) -> None:
    """Restore optimizer_shard(), bit for bit; learning rate and weight decay come from the settings."""
    adamw = engine.optimizer.optimizer
    masters = [p for group in adamw.param_groups for p in group["params"]]
    for parameter, saved in zip(masters, shard["masters"], strict=True):
        parameter.data.copy_(saved)
    param_groups = adamw.state_dict()["param_groups"]
    adamw.load_state_dict({"state": shard["adamw"]["state"], "param_groups": param_groups})
