"""Compute the policy: a Qwen3 or one of the MoE FAMILIES, dropless, expert-parallel on DeepSpeed's groups.

Reading order: pack() lays prompts and completions out, MoEBlock routes tokens to the experts of all ranks,
Policy maps packed sequences to log-probabilities, load_hf(), save_hf() and hf_tensors() move weights from and
to checkpoints, build_policy() and deepspeed_engine() put it together, memory_by_part() says what that takes.

Shape suffixes (x_TD is a tensor of shape [T, D]):
    T  packed tokens of all sequences            N  predicted tokens (the completions)
    B  sequences, S the longest of them          P  rows sent to experts, one per token and chosen expert
    D  hidden size                               H  query heads, G key/value heads, R head size
    E  experts of the model, e those of a rank   K  experts per token, L layers
    I  expert width                              V  vocabulary

Layout and names follow transformers' classes: a checkpoint of one is a checkpoint of the other. Expert
weights are held fused, [e, 2I, D] and [e, D, I]: grouped matrix products and vLLM's loader take them so.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import torch

if not torch.cuda.is_available():  # deepspeed reads it when it is imported; without it a warning per rank
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, PretrainedConfig

from kernels.linear_logprob_entropy import BLOCK_ELEMENTS, choose_backend, linear_logprob_entropy
from settings import ModelSettings


# ------------------------------------------------------------------------------------------------------------
# Families: what differs between models, as data
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Family:
    """Say where the models of a model_type differ from others; the block and the layers read it."""

    architecture: str  # the class of transformers and vLLM
    num_experts: str | None = None  # field of config.json with the number of experts; None: dense
    expert_width: str = "moe_intermediate_size"  # field with the width of an expert
    query_norm: Literal["head", "all", "none"] = "head"  # queries and keys are normed per head, whole or not
    score: Literal["softmax", "sigmoid"] = "softmax"  # sigmoid: in float32, the choice with a fixed bias
    output_bias: bool = True  # attention_bias of config.json counts for o_proj, too
    block: str = "mlp"  # name of the MoE block in a checkpoint
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # names of an expert's matrices
    only: tuple[tuple[str, object], ...] = ()  # fields of config.json and the one value that is computed here


NO_SLIDING_WINDOW = ("use_sliding_window", False)
FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", only=(NO_SLIDING_WINDOW,)),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", num_experts="num_experts", only=(NO_SLIDING_WINDOW,)),
    "olmoe": Family(
        "OlmoeForCausalLM", num_experts="num_experts", expert_width="intermediate_size", query_norm="all",
        only=(  # vLLM computes these values whatever config.json says
            ("norm_topk_prob", False), ("rms_norm_eps", 1e-5), ("clip_qkv", None), ("attention_bias", False),
            ("tie_word_embeddings", False),
        ),
    ),
    "mixtral": Family(
        "MixtralForCausalLM", num_experts="num_local_experts", expert_width="intermediate_size",
        query_norm="none", block="block_sparse_moe", projections=("w1", "w3", "w2"),
        only=(("sliding_window", None), ("router_jitter_noise", 0.0)),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", num_experts="n_routed_experts", score="sigmoid", output_bias=False,
        only=(("n_group", 1), ("topk_group", 1)),
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------
# Packing: the only place where a token is paired with the position that predicts it
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PackedSequences:
    """Sequences laid end to end without padding.

    The last token of each is left out, because nothing is predicted from it. A sequence of p prompt and c
    completion tokens takes p + c - 1 places, the same rows that vLLM returns routed experts for.
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, restarting at 0 in every sequence
    padded_index: Tensor  # [T] int64, place of each token in the padded [B*S] grid that attention works on
    padded_shape: tuple[int, int]  # (B, S)
    predictor_index: Tensor  # [N] int64, place in [T] whose output predicts target n
    target_ids: Tensor  # [N] int64, the completion tokens, sequence after sequence
    repeats: tuple[tuple[Tensor, Tensor], ...] = ()  # (token in [T], its other place in the grid) if shared
    kept: Tensor | None = None  # [T] int64, its place if no prompt were shared; None where none is
    spread: Tensor | None = None  # [sum of p + c - 1] int64, the token in [T] of each such place


def pack(
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    device: torch.device | str,
    share_prompts: bool = False,
) -> PackedSequences:
    """Pack B (prompt, completion) pairs; every prompt needs at least one token, completions may be empty.

    share_prompts: equal prompts are laid out once, but for their last token, which every sequence keeps for
    itself: it predicts the sequence's first token.
    """
    packed = pack_all(prompt_ids, completion_ids, device)
    return share(packed, prompt_ids, completion_ids) if share_prompts else packed


def share(
    packed: PackedSequences, prompt_ids: list[list[int]], completion_ids: list[list[int]]
) -> PackedSequences:
    """Leave out the tokens of prompts that an earlier sequence has, and note where else they are needed."""
    first, copies, start = {}, Counter(), 0  # {prompt: its first place}, {prompt: how often it came again}
    source: list[int] = []  # the place whose token is taken, of all places as if nothing were shared
    repeats = defaultdict(lambda: ([], []))  # {copy: (sources, places) of its shared tokens}
    for prompt, completion in zip(map(tuple, prompt_ids), completion_ids):
        length, num_shared = max(1, len(prompt) + len(completion) - 1), 0
        if prompt in first:
            copies[prompt] += 1
            num_shared = min(len(prompt) - 1, length)
            taken = range(first[prompt], first[prompt] + num_shared)
            source += taken
            repeats[copies[prompt]][0].extend(taken)
            repeats[copies[prompt]][1].extend(range(start, start + num_shared))
        first.setdefault(prompt, start)
        source += range(start + num_shared, start + length)
        start += length
    source, device = torch.tensor(source), packed.input_ids.device  # [sum of p + c - 1]
    kept = (source == torch.arange(len(source))).nonzero().flatten()  # [T]
    new_place = torch.zeros_like(source).index_copy_(0, kept, torch.arange(len(kept)))
    new_place_there, kept_there = new_place.to(device), kept.to(device)
    pairs = [(torch.tensor(s, device=device), torch.tensor(p, device=device)) for s, p in repeats.values()]
    return PackedSequences(
        input_ids=packed.input_ids[kept_there],
        position_ids=packed.position_ids[kept_there],
        padded_index=packed.padded_index[kept_there],
        padded_shape=packed.padded_shape,
        predictor_index=new_place_there[packed.predictor_index],
        target_ids=packed.target_ids,
        repeats=tuple((new_place_there[s], packed.padded_index[p]) for s, p in pairs if len(s)),
        kept=kept_there,
        spread=new_place[source].to(device),
    )


def pack_all(
    prompt_ids: list[list[int]], completion_ids: list[list[int]], device: torch.device | str
) -> PackedSequences:
    """Pack B (prompt, completion) pairs, every one of them whole."""
    assert all(prompt_ids), "an empty prompt has no position that predicts the first completion token"
    lengths = torch.tensor(
        [max(1, len(p) + len(c) - 1) for p, c in zip(prompt_ids, completion_ids, strict=True)]
    )
    num_sequences, longest = len(lengths), int(lengths.max())
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
    return PackedSequences(
        input_ids=torch.tensor(input_ids).to(device),
        position_ids=position_ids.to(device),
        padded_index=(sequence * longest + position_ids).to(device),
        padded_shape=(num_sequences, longest),
        predictor_index=torch.cat(predictors).to(device),
        target_ids=torch.tensor([t for c in completion_ids for t in c], dtype=torch.int64).to(device),
    )


# ------------------------------------------------------------------------------------------------------------
# Moving rows. Their gradients are gathered, never added atomically, so that they are the same in every run,
# and sums over the experts of a token are taken in float32 for some tokens at a time.
# ------------------------------------------------------------------------------------------------------------
CHUNK_ELEMENTS = {
    "cpu": 2**20,
    "cuda": 2**26,
}  # elements of [tokens, K, D] in float32 at a time


def token_chunks(num_tokens: int, elements_per_token: int, device: torch.device) -> Iterator[slice]:
    """Yield slices over the tokens, none of which has more than CHUNK_ELEMENTS elements, or one token."""
    size = max(1, CHUNK_ELEMENTS["cpu" if device.type == "cpu" else "cuda"] // elements_per_token)
    yield from (slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size))


class TakeRows(torch.autograd.Function):
    """Return x[index] for an index without repetitions; the gradient of each row goes to its one place."""

    @staticmethod
    def forward(ctx, x_PD: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(x_PD)
        return x_PD.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (index,) = ctx.saved_tensors
        make = grad.new_empty if len(index) == ctx.num_rows else grad.new_zeros  # empty: all rows are filled
        return make(ctx.num_rows, *grad.shape[1:]).index_copy_(0, index, grad), None


class ToGrid(torch.autograd.Function):
    """Return a grid of zeros with row t of x at every place of token t: [T, ...] -> [num_places, ...].

    The gradient of a token is the sum over its places in float32, one copy after the other, so that no two
    are added at the same time. index, repeats: PackedSequences.padded_index and repeats.
    """

    @staticmethod
    def forward(ctx, x_T: Tensor, index: Tensor, repeats: tuple, num_places: int) -> Tensor:
        ctx.index, ctx.repeats = index, repeats
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

    order_P: (token, choice) pairs sorted by expert; inverse_P: place of each pair in that order. The gradient
    of a token is the sum over its choices, accumulated in float32 and rounded once.
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
        inverse_TK, width = inverse_P.view(ctx.num_tokens, ctx.top_k), grad_PD.shape[1]
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
        inverse_TK, (num_tokens, top_k) = inverse_P.view(weights_TK.shape), weights_TK.shape
        y_TD = out_PD.new_empty(num_tokens, out_PD.shape[1])
        for tokens in token_chunks(num_tokens, top_k * out_PD.shape[1], out_PD.device):
            rows = out_PD.index_select(0, inverse_TK[tokens].flatten()).unflatten(0, (-1, top_k))
            y_TD[tokens] = (rows * weights_TK[tokens].unsqueeze(-1)).sum(dim=1)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD: Tensor):
        out_PD, weights_TK, order_P, inverse_P = ctx.saved_tensors
        inverse_TK, (num_tokens, top_k) = inverse_P.view(weights_TK.shape), weights_TK.shape
        grad_weights_TK, grad_out_PD = torch.empty_like(weights_TK), torch.empty_like(out_PD)
        wide = torch.promote_types(out_PD.dtype, weights_TK.dtype)
        for tokens in token_chunks(num_tokens, top_k * out_PD.shape[1], out_PD.device):
            rows = out_PD.index_select(0, inverse_TK[tokens].flatten()).unflatten(0, (-1, top_k))
            grad = grad_TD[tokens].to(wide).unsqueeze(1)  # [t, 1, D]
            grad_weights_TK[tokens] = (grad * rows).sum(dim=-1)
        flat_weights = weights_TK.flatten()
        for pairs in token_chunks(len(order_P), out_PD.shape[1], out_PD.device):
            order = order_P[pairs]
            grad = grad_TD.index_select(0, order // top_k).to(wide)
            grad_out_PD[pairs] = grad * flat_weights[order].unsqueeze(-1)
        return grad_out_PD, grad_weights_TK, None, None


# ------------------------------------------------------------------------------------------------------------
# Expert parallelism
# ------------------------------------------------------------------------------------------------------------
def create_expert_parallel_group(ep_size: int, num_experts: int) -> dist.ProcessGroup | None:
    """Make DeepSpeed's expert-parallel groups; call once, before the model. Returns this rank's group.

    Groups are neighbouring ranks ([0, 1], [2, 3], ...). A dense model has no group.
    Raises ValueError if ep_size divides neither the experts nor the world.
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
    """Let every process group that this rank is in wait so long, DeepSpeed's and vLLM's too.

    Groups that are made without a timeout take torch's, ten minutes with nccl, whatever the first group has.
    """
    for group in list(distributed_c10d._world.pg_map):
        if "nccl" in dist.get_backend(group) or "gloo" in dist.get_backend(group):
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


class AllToAll(torch.autograd.Function):
    """Send rows to the ranks of a group, unevenly; the gradient travels the same way back."""

    @staticmethod
    def forward(
        ctx, x_PD: Tensor, recv_rows: list[int], send_rows: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.recv_rows, ctx.send_rows, ctx.group = recv_rows, send_rows, group
        received = x_PD.new_empty(sum(recv_rows), *x_PD.shape[1:])
        dist.all_to_all_single(received, x_PD.contiguous(), recv_rows, send_rows, group=group)
        return received

    @staticmethod
    def backward(ctx, grad_PD: Tensor):
        return AllToAll.apply(grad_PD, ctx.send_rows, ctx.recv_rows, ctx.group), None, None, None


class Experts(nn.Module):
    """The experts of one rank, fused. DeepSpeed reduces their gradients over expert-data ranks only."""

    def __init__(self, config: PretrainedConfig, num_local_experts: int, group_name: str):
        super().__init__()
        width, hidden = expert_width(config), config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_local_experts, 2 * width, hidden))  # [e, 2I, D]
        self.down_proj = nn.Parameter(torch.empty(num_local_experts, hidden, width))  # [e, D, I]
        for parameter in self.parameters():
            parameter.allreduce, parameter.group_name = False, group_name

    def forward(self, x_PD: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Apply to every row its expert, a SwiGLU. Rows are sorted by expert; tokens_per_expert [e] int64."""
        gate_PI, up_PI = grouped_linear(x_PD, self.gate_up_proj, tokens_per_expert).chunk(2, dim=-1)
        return grouped_linear(F.silu(gate_PI) * up_PI, self.down_proj, tokens_per_expert)


def grouped_linear(x_PD: Tensor, weight_eOD: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Return x @ weight[expert of the row]^T for rows sorted by expert: [P, D], [e, O, D] -> [P, O]."""
    grouped_dtypes = (torch.bfloat16,) if x_PD.is_cuda else (torch.bfloat16, torch.float32)
    if len(x_PD) and x_PD.dtype in grouped_dtypes:
        weight_eDO = weight_eOD.mT
        if weight_eDO.requires_grad:  # kernels may leave the gradient of experts without rows unwritten
            is_empty = (tokens_per_expert == 0)[:, None, None]
            weight_eDO.register_hook(lambda fresh: fresh.masked_fill_(is_empty, 0))
        return F.grouped_mm(x_PD, weight_eDO, offs=tokens_per_expert.cumsum(0).to(torch.int32))
    parts = x_PD.split(tokens_per_expert.tolist())  # a loop for what grouped_mm refuses (fp64; fp32 on GPUs)
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weight_eOD)])


class MoEBlock(MoE):
    """Route tokens by their top-k scores to dropless experts that are spread over an expert-parallel group.

    With s = softmax(W x), or s = sigmoid(W x) and a bias b that the optimizer does not move:
        chosen = the K largest of s + b     weight_k = scale s_k / sum of s over the chosen, or scale s_k
        y = sum_k weight_k expert_k(x) + shared(x)
    The bias, a scale that is not 1 and shared experts are there in families that have them.

    A subclass of DeepSpeed's MoE in name only: the engine looks for that class to build expert-data groups.
    Nothing of its capacity-based dispatch is used, so nn.Module's constructor is called instead of MoE's.
    """

    def __init__(self, config: PretrainedConfig, group: dist.ProcessGroup | None):
        nn.Module.__init__(self)
        self.num_experts, self.top_k = num_experts_of(config), config.num_experts_per_tok
        self.score = FAMILIES[config.model_type].score
        self.renormalise = getattr(config, "norm_topk_prob", True)  # Mixtral has no such field, and does it
        self.scale = getattr(config, "routed_scaling_factor", 1.0)
        self.group, self.ep_size = group, dist.get_world_size(group) if group else 1
        self.expert_group_name = f"ep_size_{self.ep_size}"
        self.num_local_experts = self.num_experts // self.ep_size
        self.gate = nn.Linear(config.hidden_size, self.num_experts, bias=False)
        if self.score == "sigmoid":  # a buffer: DeepSpeed leaves its float32 alone
            bias_E = torch.zeros(self.num_experts, dtype=torch.float32)
            self.gate.register_buffer("e_score_correction_bias", bias_E)
        self.experts = Experts(config, self.num_local_experts, self.expert_group_name)
        self.shared_experts = None
        if num_shared := getattr(config, "n_shared_experts", 0):
            self.shared_experts = DenseMLP(config, num_shared * expert_width(config))

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Do nothing: deepspeed.initialize calls it, and create_expert_parallel_group made the groups."""

    def forward(self, x_TD: Tensor, replay_ids_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the block's output [T, D] and the expert ids used [T, K].

        With replay_ids the choice of experts is given and only their weights are live, from the scores of
        all experts, so that the router still learns [secondary: R3, arXiv 2510.11370]. An id that is no
        expert's (rollout.invalid_route) leaves the choice to the live router.
        """
        if self.score == "softmax":
            scores_TE = choice_TE = self.gate(x_TD).softmax(dim=-1, dtype=torch.float32)
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

        order_P = topk_ids_TK.flatten().argsort(stable=True)  # (token, choice) pairs, sorted by expert
        tokens_per_expert_E = torch.bincount(topk_ids_TK.flatten(), minlength=self.num_experts)
        ranks_P = torch.arange(len(order_P), device=x_TD.device)
        inverse_P = torch.empty_like(order_P).scatter_(0, order_P, ranks_P)  # place of each pair in the rows
        rows_PD = CopyToExperts.apply(x_TD, order_P, inverse_P)
        if self.ep_size == 1:
            out_PD = self.experts(rows_PD, tokens_per_expert_E)
        else:
            out_PD = self.experts_of_all_ranks(rows_PD, tokens_per_expert_E)
        y_TD = SumOfExperts.apply(out_PD, topk_weights_TK, order_P, inverse_P)
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD, topk_ids_TK

    def experts_of_all_ranks(self, rows_PD: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
        """Send rows (sorted by global expert) to the ranks that own the experts, and the results back."""
        sent_re = tokens_per_expert_E.view(self.ep_size, self.num_local_experts)  # [rank, e]
        received_re = torch.empty_like(sent_re)  # from each rank, for each of our experts
        dist.all_to_all_single(received_re, sent_re, group=self.group)
        send_rows, recv_rows = sent_re.sum(1).tolist(), received_re.sum(1).tolist()
        arrived_PD = AllToAll.apply(rows_PD, recv_rows, send_rows, self.group)
        # Arrived rows are ordered by (rank, expert); the grouped product wants them by expert.
        local_ids = torch.arange(self.num_local_experts, device=rows_PD.device).repeat(self.ep_size)
        order = torch.repeat_interleave(local_ids, received_re.flatten()).argsort(stable=True)
        out_PD = self.experts(TakeRows.apply(arrived_PD, order), received_re.sum(0))
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return AllToAll.apply(TakeRows.apply(out_PD, inverse), send_rows, recv_rows, self.group)


# ------------------------------------------------------------------------------------------------------------
# The transformer
# ------------------------------------------------------------------------------------------------------------
class DenseMLP(nn.Module):
    """SwiGLU, as in a layer without experts, and for what all tokens share beside experts."""

    def __init__(self, config: PretrainedConfig, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


class Attention(nn.Module):
    """Causal grouped-query attention; most families norm queries and keys by their root mean square.

    Padding sits right of each sequence, so the causal mask alone keeps it out and no mask tensor is made.
    """

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.head_dim, family = head_dim(config), FAMILIES[config.model_type]
        bias = getattr(config, "attention_bias", False)
        sizes = {
            "q": config.num_attention_heads,
            "k": config.num_key_value_heads,
            "v": config.num_key_value_heads,
        }
        for name, heads in sizes.items():
            linear = nn.Linear(config.hidden_size, heads * self.head_dim, bias=bias)
            setattr(self, f"{name}_proj", linear)
        width = config.num_attention_heads * self.head_dim
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bias and family.output_bias)
        self.q_norm = self.k_norm = None
        if getattr(config, "use_qk_norm", family.query_norm != "none"):  # a field of GLM-4.5's
            for name in ("q", "k"):
                width = self.head_dim * (sizes[name] if family.query_norm == "all" else 1)
                setattr(self, f"{name}_norm", nn.RMSNorm(width, eps=config.rms_norm_eps))

    def forward(self, x_TD: Tensor, rotary_TR: tuple[Tensor, Tensor], packed: PackedSequences) -> Tensor:
        q_THR = rotate(self.normed(self.q_proj(x_TD), self.q_norm), rotary_TR)
        k_TGR = rotate(self.normed(self.k_proj(x_TD), self.k_norm), rotary_TR)
        v_TGR = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))

        num_q, num_kv = q_THR.shape[1], k_TGR.shape[1]
        batch, longest = packed.padded_shape
        qkv = torch.cat([q_THR, k_TGR, v_TGR], dim=1)  # [T, H+2G, R]: one scatter instead of three
        grid = ToGrid.apply(qkv, packed.padded_index, packed.repeats, batch * longest)
        q, k, v = (
            grid.view(batch, longest, -1, self.head_dim).transpose(1, 2).split([num_q, num_kv, num_kv], dim=1)
        )
        is_grouped = num_q != num_kv
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)  # [B, H, S, R]
        out_TD = TakeRows.apply(out.transpose(1, 2).reshape(batch * longest, -1), packed.padded_index)
        return self.o_proj(out_TD)

    def normed(self, x_TD: Tensor, norm: nn.RMSNorm | None) -> Tensor:
        """Norm queries or keys over as many numbers as the norm has, a head or all: [T, HR] -> [T, H, R]."""
        if norm is not None:
            x_TD = norm(x_TD.unflatten(-1, (-1, *norm.normalized_shape))).flatten(-2)
        return x_TD.unflatten(-1, (-1, self.head_dim))


def rotate(x_THR: Tensor, rotary_TR: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate by position, half-split convention (RoFormer, arXiv 2104.09864; Hugging Face layout).

    Tables that are narrower than a head leave the rest of it as it is.
    """
    cos, sin = (table.unsqueeze(1) for table in rotary_TR)  # [T, 1, R] or narrower
    if (width := cos.shape[-1]) < x_THR.shape[-1]:
        return torch.cat([rotate(x_THR[..., :width], rotary_TR), x_THR[..., width:]], dim=-1)
    first, second = x_THR.chunk(2, dim=-1)
    return x_THR * cos + torch.cat([-second, first], dim=-1) * sin


class DecoderLayer(nn.Module):
    """Attention and MLP or MoE block, each behind a norm and added to the residual stream."""

    def __init__(self, config: PretrainedConfig, layer: int, group: dist.ProcessGroup | None):
        super().__init__()
        self.self_attn = Attention(config)
        is_moe = is_moe_layer(config, layer)
        self.mlp = MoEBlock(config, group) if is_moe else DenseMLP(config, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x_TD: Tensor, rotary_TR: tuple[Tensor, Tensor], packed: PackedSequences, replay_TK):
        """Return the layer's output [T, D] and its expert ids [T, K], or None from a dense layer."""
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), rotary_TR, packed)
        normed_TD = self.post_attention_layernorm(x_TD)
        if isinstance(self.mlp, DenseMLP):
            return x_TD + self.mlp(normed_TD), None
        y_TD, topk_ids_TK = self.mlp(normed_TD, replay_TK)
        return x_TD + y_TD, topk_ids_TK


class Decoder(nn.Module):
    """Embedding, layers and final norm, under the names of a Hugging Face checkpoint."""

    def __init__(self, config: PretrainedConfig, group: dist.ProcessGroup | None):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i, group) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Policy(nn.Module):
    """A causal language model that maps packed sequences to log-probabilities of their completion tokens."""

    def __init__(self, config: PretrainedConfig, group: dist.ProcessGroup | None = None):
        super().__init__()
        check_supported(config)
        self.config, self.group = config, group
        self.activation_checkpointing = False  # recompute each layer in backward: memory for one more forward
        self.logprob_kernel = "auto"  # backend of linear_logprob_entropy()
        self.model = Decoder(config, group)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        width = int(head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))
        rotary_base = torch.arange(0, width, 2, dtype=torch.float64) / width
        self.inv_freq = (rope_theta(config) ** -rotary_base).float()  # [R/2]; no buffer: it must stay fp32

    def hidden(self, packed: PackedSequences, replay_ids_TLK: Tensor | None = None) -> tuple[Tensor, list]:
        """Return final normed hidden states [T, D] and, per layer, the ids used [T, K] (dense: None)."""
        x_TD = self.model.embed_tokens(packed.input_ids)
        angles_TR = packed.position_ids.unsqueeze(1).float() * self.inv_freq.to(x_TD.device).repeat(2)
        rotary_TR = (angles_TR.cos().to(x_TD.dtype), angles_TR.sin().to(x_TD.dtype))
        layer_ids = []
        for i, layer in enumerate(self.model.layers):
            replay_TK = None if replay_ids_TLK is None else replay_ids_TLK[:, i].long()
            if self.activation_checkpointing and torch.is_grad_enabled():
                x_TD, topk_ids_TK = checkpoint(layer, x_TD, rotary_TR, packed, replay_TK, use_reentrant=False)
            else:
                x_TD, topk_ids_TK = layer(x_TD, rotary_TR, packed, replay_TK)
            layer_ids.append(topk_ids_TK)
        return self.model.norm(x_TD), layer_ids

    def forward(
        self, packed: PackedSequences, temperature: float = 1.0, replay_ids_TLK: Tensor | None = None
    ) -> tuple[Tensor, Tensor, list]:
        """Return the log-probability of each target [N], the entropy of its distribution [N] and expert ids.

        The first two are float32, in nats, at the given sampling temperature; the ids are those of every
        layer. replay_ids_TLK: expert ids of all layers (those of dense layers are not looked at) to use
        instead of the router's own; rows in the order of the packed tokens.
        """
        x_TD, layer_ids = self.hidden(packed, replay_ids_TLK)
        x_ND = TakeRows.apply(x_TD, packed.predictor_index)
        logprobs, entropy = linear_logprob_entropy(
            x_ND, self.lm_head.weight, packed.target_ids, temperature, self.logprob_kernel
        )
        return logprobs, entropy, layer_ids


def route_table(layer_ids: list[Tensor | None], num_experts: int) -> Tensor | None:
    """Stack the expert ids of a forward to [T, L, K], 0 in dense layers, as vLLM does.

    The ids are uint8, or int16 from 256 experts on. A dense model has none: None.
    """
    known = next((ids for ids in layer_ids if ids is not None), None)
    if known is None:
        return None
    table = torch.stack([torch.zeros_like(known) if ids is None else ids for ids in layer_ids], dim=1)
    return table.to(torch.uint8 if num_experts < 256 else torch.int16)


# ------------------------------------------------------------------------------------------------------------
# Configuration and weights in Hugging Face's names
# ------------------------------------------------------------------------------------------------------------
def is_moe_layer(config: PretrainedConfig, layer: int) -> bool:
    """Tell whether a layer has experts."""
    if num_experts_of(config) == 0 or layer in getattr(config, "mlp_only_layers", ()):
        return False
    every, first = getattr(config, "decoder_sparse_step", 1), getattr(config, "first_k_dense_replace", 0)
    return (layer + 1) % every == 0 and layer >= first


def head_dim(config: PretrainedConfig) -> int:
    """Return the size of an attention head; where config.json leaves it out, transformers' default."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rope_theta(config: PretrainedConfig) -> float:
    """Return the base of the rotary position embedding."""
    return float(config.rope_parameters["rope_theta"])


def check_supported(config: PretrainedConfig) -> None:
    """Raise ValueError for what this file does not compute, rather than a silently different model."""
    if config.model_type not in FAMILIES:
        known = ", ".join(map(repr, FAMILIES))
        raise ValueError(f"model not supported: model_type is {config.model_type!r}, known are {known}")
    found = {**vars(config), "rope_type": config.rope_parameters["rope_type"]}
    only = {"rope_type": "default", "hidden_act": "silu", **dict(FAMILIES[config.model_type].only)}
    problems = [
        f"{field} is {found[field]!r}, known is {known!r}"
        for field, known in only.items()
        if found.get(field, known) != known
    ]
    if problems:
        raise ValueError("model not supported: " + "; ".join(problems))


def model_folder(path: str | Path) -> Path:
    """Return the folder of a model: `path`, or what the hub holds under this name, downloaded once.

    ValueError if there is neither. Ranks of a node that ask at once wait for one download.
    """
    if (Path(path) / "config.json").is_file():
        return Path(path)
    if Path(path).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        raise ValueError(
            f"model.path: {path} holds no config.json; give the folder of a Hugging Face checkpoint, or the "
            "name of one on the hub (the tiny model is made by `python -m data.tiny`)"
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
        return Path(snapshot_download(str(path), allow_patterns=patterns))
    except Exception as error:  # no network, no such model, no permission
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"model.path: {path} is no folder here, and the hub gives none: {reason}") from error


def load_config(folder: str | Path) -> PretrainedConfig:
    """Read config.json of a model folder. ValueError if there is none."""
    folder = model_folder(folder)
    try:  # code that lies there does not run
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever its contents make transformers raise
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{folder}/config.json cannot be read as that of a model: {reason}") from error
    check_supported(config)
    return config


def num_experts_of(config: PretrainedConfig) -> int:
    """Return the number of experts per MoE layer; 0 for a dense model."""
    field = FAMILIES[config.model_type].num_experts
    return getattr(config, field) if field else 0


def expert_width(config: PretrainedConfig) -> int:
    """Return the width I of an expert."""
    return getattr(config, FAMILIES[config.model_type].expert_width)


class ParameterCounts(NamedTuple):
    """Parameters of a model by what happens to them."""

    experts: int  # spread over expert-parallel ranks
    embeddings: int  # embedding and head
    others: int


KNOWN_COUNTS: dict[str, ParameterCounts] = {}  # {configuration: counts}; a planner asks often


def parameter_counts(config: PretrainedConfig) -> ParameterCounts:
    """Count the parameters of a model of this configuration; nothing is allocated."""
    key = f"{type(config).__name__} {vars(config)}"
    if key not in KNOWN_COUNTS:
        with torch.device("meta"):
            policy = Policy(config)
        sizes = {name: parameter.numel() for name, parameter in policy.named_parameters()}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        embeddings = sum(size for name, size in sizes.items() if "embed_tokens" in name or "lm_head" in name)
        KNOWN_COUNTS[key] = ParameterCounts(experts, embeddings, sum(sizes.values()) - experts - embeddings)
    return KNOWN_COUNTS[key]


def random_weights(policy: Policy, seed: int) -> None:
    """Draw matrices from Normal(0, initializer_range), set norms to one; the same for any number of ranks."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
                continue
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            first, count = local_experts(policy, parameter)
            full_shape = (num_experts_of(policy.config), *parameter.shape[1:]) if count else parameter.shape
            full = torch.randn(full_shape, generator=generator) * policy.config.initializer_range
            parameter.copy_(full[first : first + count] if count else full)


def local_experts(policy: Policy, parameter: Tensor) -> tuple[int, int]:
    """Return (first global expert, number of experts) of a fused expert parameter; (0, 0) for any other."""
    if getattr(parameter, "allreduce", True):
        return 0, 0
    ep_rank = dist.get_rank(policy.group) if policy.group else 0
    return ep_rank * parameter.shape[0], parameter.shape[0]


def checkpoint_name(config: PretrainedConfig, name: str) -> str:
    """Return the name of a parameter in a checkpoint, which is also the engine's."""
    return name.replace(".mlp.", f".{FAMILIES[config.model_type].block}.")


def expert_slices(
    config: PretrainedConfig, name: str, parameter: Tensor, first: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, views into a fused parameter that holds experts from `first` on."""
    prefix, leaf = checkpoint_name(config, name).rsplit(".", 1)
    gate_name, up_name, down_name = FAMILIES[config.model_type].projections
    for i, expert in enumerate(parameter):
        if leaf == "down_proj":
            yield f"{prefix}.{first + i}.{down_name}.weight", expert
        else:
            gate, up = expert.chunk(2, dim=0)
            yield f"{prefix}.{first + i}.{gate_name}.weight", gate
            yield f"{prefix}.{first + i}.{up_name}.weight", up


def checkpoint_tensors(policy: Policy) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yield (name in a checkpoint, tensor, owner) of the whole model; a tied head is not listed twice.

    owner: rank in the expert-parallel group that holds an expert, None for what all ranks share. The tensor
    is a view of this rank's parameter; for another rank's expert it has the right shape, other contents.
    """
    num_owners = dist.get_world_size(policy.group) if policy.group else 1
    for name, parameter in chain(policy.named_parameters(), policy.named_buffers()):
        _, count = local_experts(policy, parameter)
        if count == 0:
            yield checkpoint_name(policy.config, name), parameter.data, None
        for owner in range(num_owners if count else 0):
            slices = expert_slices(policy.config, name, parameter.data, owner * count)
            yield from ((n, t, owner) for n, t in slices)


INDEX = "model.safetensors.index.json"


def weight_map_of(folder: str | Path) -> dict[str, str]:
    """Return which file holds each tensor, from the index of a checkpoint; nothing without an index."""
    index = Path(folder) / INDEX
    return json.loads(index.read_text())["weight_map"] if index.is_file() else {}


def checkpoint_shards(folder: str | Path) -> list[Path]:
    """List the safetensors files of a Hugging Face checkpoint.

    With an index these are the files that it names: the folder may also hold shards of an earlier save by
    another number of ranks. ValueError if there is none, or if one that the index names is not there.
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
    """Fill the policy from safetensors, reading only what all ranks share and this rank's experts.

    ValueError naming the tensors that are missing or have another shape.
    """
    where = {}
    for shard in checkpoint_shards(folder):
        try:
            file = safe_open(shard, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{shard} is not a whole safetensors file: {error}") from error
        where.update(dict.fromkeys(file.keys(), file))
    tensors = list(checkpoint_tensors(policy))
    missing = [name for name, _, _ in tensors if name not in where]
    if missing:
        listed = weight_map_of(folder)
        named = [f"{INDEX} says that {name} is in {listed[name]}" for name in missing if name in listed]
        advice = f"; {named[0]}, which does not hold it: copy or download that file again" if named else ""
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(tensors)} tensors: {', '.join(missing[:3])} ...{advice}"
        )
    ep_rank = dist.get_rank(policy.group) if policy.group else 0
    for name, view, owner in tensors:  # shapes of all, contents of this rank's: all ranks see the same errors
        found = tuple(where[name].get_slice(name).get_shape())
        if found != tuple(view.shape):
            raise ValueError(f"{folder}: {name} has shape {found}, config.json asks for {tuple(view.shape)}")
        if owner in (None, ep_rank):
            view.copy_(where[name].get_tensor(name))


SHARD_BYTES = 4 * 2**30  # the size of files that save_hf() writes; a rank holds one on the host at a time


def deal_to_shards(
    policy: Policy, dtype: torch.dtype
) -> list[tuple[int, dict[str, tuple[Tensor, torch.dtype]]]]:
    """Deal the tensors of a checkpoint to files; every rank computes the same list without asking the others.

    Returns (rank that writes the file, {name: (tensor, dtype in the file)}) of each, ranks in order. A file
    has at most SHARD_BYTES, or one tensor. Buffers stay float32, as in transformers.
    """
    buffers = {checkpoint_name(policy.config, name) for name, _ in policy.named_buffers()}
    shards: list[tuple[int, dict]] = []
    room = 0
    tensors = ((owner or 0, name, tensor) for name, tensor, owner in checkpoint_tensors(policy))
    for owner, name, tensor in sorted(tensors, key=lambda item: item[0]):  # stable: layers stay in order
        kind = torch.float32 if name in buffers else dtype
        num_bytes = tensor.numel() * kind.itemsize
        if not shards or shards[-1][0] != owner or num_bytes > room:
            shards.append((owner, {}))
            room = SHARD_BYTES
        shards[-1][1][name] = (tensor, kind)
        room -= num_bytes
    return shards


def save_hf(policy: Policy, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write a Hugging Face checkpoint; every rank of the world calls it.

    Rank 0 writes what all ranks share, each rank of the first expert-parallel group its own experts, so
    nothing is gathered and the result loads in transformers, in vLLM and in load_hf at any number of ranks.
    No collectives: a rank that fails does not leave others waiting.
    """
    folder = Path(folder)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank >= (dist.get_world_size(policy.group) if policy.group else 1):
        return
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or policy.lm_head.weight.dtype
    shards = deal_to_shards(policy, dtype)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, (owner, tensors) in zip(names, shards):
        if owner == rank:
            whole = {key: tensor.to(kind).cpu().contiguous() for key, (tensor, kind) in tensors.items()}
            save_file(whole, folder / name, metadata={"format": "pt"})
    if rank == 0:
        weight_map = {key: name for name, (_, tensors) in zip(names, shards) for key in tensors}
        sizes = [tensor.numel() * kind.itemsize for _, tensors in shards for tensor, kind in tensors.values()]
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=1))
        config = policy.config.__class__.from_dict(policy.config.to_dict())
        config.architectures = [FAMILIES[config.model_type].architecture]
        config.dtype = str(dtype).removeprefix("torch.")
        config.save_pretrained(folder)


def hf_tensors(policy: Policy, own_experts: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of the whole model in layer order, experts fused.

    Collective: all ranks exhaust it together. No gathered tensor is kept here while the next one is gathered.
    own_experts: those of this rank one by one instead, under their checkpoint names; nothing is gathered.
    """
    for name, parameter in chain(policy.named_parameters(), policy.named_buffers()):
        first, count = local_experts(policy, parameter)
        if count and own_experts:
            yield from expert_slices(policy.config, name, parameter.data, first)
            continue
        name = checkpoint_name(policy.config, name)
        if count == 0 or policy.group is None or dist.get_world_size(policy.group) == 1:
            yield name, parameter.data
        else:
            ep_size = dist.get_world_size(policy.group)
            full = parameter.data.new_empty(ep_size * count, *parameter.shape[1:])
            dist.all_gather_into_tensor(full, parameter.data, group=policy.group)
            yield name, full
            del full


# ------------------------------------------------------------------------------------------------------------
# From a folder to DeepSpeed's engine
# ------------------------------------------------------------------------------------------------------------
def choose_logprob_kernel(settings: ModelSettings, config: PretrainedConfig, device: torch.device) -> str:
    """Return the version of kernels/linear_logprob_entropy.py to use; ValueError where it cannot run here."""
    dtype = getattr(torch, settings.dtype)
    best = choose_backend(torch.empty(0, config.hidden_size, dtype=dtype, device=device))
    if settings.logprob_kernel == "triton" != best:
        raise ValueError(
            "model.logprob_kernel triton: needs model.dtype bfloat16, a hidden size that is a multiple of 8, "
            "an NVIDIA GPU with 160 KiB of shared memory (A100, H100 and later); set it to auto or chunked"
        )
    return best if settings.logprob_kernel == "auto" else settings.logprob_kernel


def build_policy(
    settings: ModelSettings, model_dir: str | Path, ep_group: dist.ProcessGroup | None, device: torch.device
) -> Policy:
    """Make the policy with the weights of a folder or a name on the hub, this rank's experts only."""
    model_dir = model_folder(model_dir)
    torch.set_default_dtype(getattr(torch, settings.dtype))  # no float32 copy is made on the way
    with device:
        policy = Policy(load_config(model_dir), ep_group)
    torch.set_default_dtype(torch.float32)
    load_hf(policy, model_dir)
    blocks = [module for module in policy.modules() if isinstance(module, MoEBlock)]
    if settings.freeze_router and not blocks:
        raise ValueError(f"model.freeze_router True: {model_dir} is a dense model, it has no router")
    for block in blocks:
        block.gate.weight.requires_grad_(not settings.freeze_router)
    policy.activation_checkpointing = settings.activation_checkpointing
    policy.logprob_kernel = settings.logprob_kernel
    return policy


def init_deepspeed() -> None:
    """Tell DeepSpeed of the process group; makes one (gloo on CPUs, nccl on GPUs) if there is none."""
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would run a compiler
    deepspeed.init_distributed(verbose=False)


def deepspeed_engine(policy: Policy, settings) -> deepspeed.DeepSpeedEngine:
    """Put the policy under ZeRO with AdamW.

    An update is any number of backward(loss, scale_wrt_gas=False), then one step(). settings has
    learning_rate, betas, weight_decay, max_grad_norm and zero_stage (1 or 2: at 0 DeepSpeed clips each rank
    by the norm of its own experts, its issue 8475; 3 refuses expert parallelism that is not its own), and
    offload_optimizer: float32 weights and AdamW's state are held on the host and updated there.
    """
    optimizer = {
        "lr": settings.learning_rate,
        "betas": list(settings.betas),
        "weight_decay": settings.weight_decay,
        "torch_adam": True,  # needs no compiler
    }
    if torch.cuda.is_available():
        optimizer["fused"] = True  # the other version holds a copy of all float32 weights in a step
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_optimization": {"stage": settings.zero_stage},
        "gradient_clipping": settings.max_grad_norm,
        "optimizer": {"type": "AdamW", "params": optimizer},
    }
    if settings.offload_optimizer:
        pin = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        config["zero_optimization"]["offload_optimizer"] = pin
        config["zero_force_ds_cpu_optimizer"] = False  # DeepSpeed's own AdamW needs a compiler
    if policy.lm_head.weight.dtype == torch.bfloat16:  # a gradient goes into the float32 sum when it is made
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    with contextlib.redirect_stdout(io.StringIO()):  # its bfloat16 optimizer prints memory tables
        engine, *_ = deepspeed.initialize(model=policy, config=config)
    return engine


def optimizer_shard(engine: deepspeed.DeepSpeedEngine) -> dict:
    """Return this rank's float32 weights and AdamW state; they fit the same checkpoint.topology()."""
    adamw = engine.optimizer.optimizer  # its parameters are this rank's float32 partitions
    masters = [p.detach().cpu() for group in adamw.param_groups for p in group["params"]]
    return {"masters": masters, "adamw": adamw.state_dict()}


def load_optimizer_shard(engine: deepspeed.DeepSpeedEngine, shard: dict) -> None:
    """Undo optimizer_shard(), bit for bit; learning rate and weight decay stay those of the settings."""
    adamw = engine.optimizer.optimizer
    masters = [p for group in adamw.param_groups for p in group["params"]]
    for parameter, saved in zip(masters, shard["masters"], strict=True):
        parameter.data.copy_(saved)
    settings = adamw.state_dict()["param_groups"]
    adamw.load_state_dict({"state": shard["adamw"]["state"], "param_groups": settings})
