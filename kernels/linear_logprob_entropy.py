"""Log-probabilities of targets and entropies of softmax(x W^T / temperature), in blocks of the logits [N, V].

    z_nv = x_n . w_v / temperature                 lse_n = log sum_v exp z_nv,   p_nv = exp(z_nv - lse_n)
    logprob_n = z_nt - lse_n,  t the target of n   entropy_n = - sum_v p_nv log p_nv                (nats)

Forward: loop over blocks of the vocabulary with a running maximum m and running sums s and a (online softmax,
arXiv 1805.02867)

    s = sum_v exp(z - m),   a = sum_v (z - m) exp(z - m):   lse = m + log s,   entropy = log s - a / s

and logprob = (z_t - m) - log s. Large logits are harmless, because z - m is the only difference of large
numbers. If a block raises the maximum to m', with d = m - m' <= 0, then a becomes (a + s d) exp d and s
becomes s exp d. Only m, log s and entropy are saved for backward, [N] each.

Backward: recompute the logits block by block, with g and h the gradients of logprob and entropy:

    dz_nv = g_n (1[v = t] - p_nv) - h_n p_nv (log p_nv + entropy_n)
    dx = dz W / temperature,   dW = dz^T x / temperature

Cost: four matrix products instead of three for autograd through all logits. Memory: at most two blocks of
BLOCK_ELEMENTS logits at a time. Three versions: naive() holds all logits and is the reference for tests;
"chunked" is written in torch, for any device and dtype; "triton" keeps the logits of a tile in registers and
writes only dz.

topk_logprobs() adds the log-probabilities of further tokens of each row.

Shape suffixes: N rows, D hidden size, V vocabulary, C columns of a block, S splits of the vocabulary,
K further tokens of a row.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK_ELEMENTS = {"cpu": 2**21, "cuda": 2**28}  # logits [N, C] per block: fits a CPU cache; fills a GPU
CACHED_ELEMENTS = 2**18  # logits that all passes of a CPU take in turn: 1 MiB
MIN_COLUMNS = 128  # minimum width of a block, for any number of rows
SPLITS = 8  # splits of the vocabulary in the Triton forward; programs of the same rows run side by side
TILES = {  # {bytes per operand: rows, columns and depth of a tile, warps, pipeline stages}
    2: {"BN": 128, "BC": 256, "BD": 64, "num_warps": 8, "num_stages": 3},
    4: {"BN": 64, "BC": 64, "BD": 32, "num_warps": 4, "num_stages": 2},
}
TILE_BYTES = 160 * 1024  # shared memory that the tile for 2-byte operands requires


def linear_logprob_entropy(
    x_ND: Tensor, weight_VD: Tensor, target_ids_N: Tensor, temperature: float = 1.0, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target [N] and the entropy of each row [N], in nats.

    Both are differentiable in x and W, and are float32 (float64 for float64 operands). Logits are accumulated
    in float32; only naive rounds logits to bfloat16. backend: "naive", "chunked", "triton" or "auto", see
    choose_backend(). ValueError for an unknown backend, and for operands that triton does not support
    (8 bytes per value, or rows or W not aligned to 16 bytes).
    """
    match choose_backend(x_ND) if backend == "auto" else backend:
        case "naive":
            return naive(x_ND, weight_VD, target_ids_N, temperature)
        case "chunked" | "triton" as version:
            use_triton = version == "triton"
            return LinearLogprobEntropy.apply(
                x_ND.contiguous(), weight_VD.contiguous(), target_ids_N, temperature, use_triton
            )
    raise ValueError(f"model.logprob_kernel {backend!r} is unknown, expected auto, naive, chunked or triton")


def choose_backend(x_ND: Tensor) -> str:
    """Return the fastest version for the device, dtype and shape of x.

    "triton" for bfloat16 and float16 on NVIDIA GPUs with enough shared memory (A100, H100 and later), if the
    rows begin at multiples of 16 bytes, which tensor descriptors require; else "chunked".
    """
    if not x_ND.is_cuda or torch.version.hip or x_ND.element_size() != 2 or x_ND.shape[1] % 8:
        return "chunked"
    shared_memory = torch.cuda.get_device_properties(x_ND.device).shared_memory_per_block_optin
    return "triton" if shared_memory >= TILE_BYTES else "chunked"


def naive(x_ND: Tensor, weight_VD: Tensor, target_ids_N: Tensor, temperature: float = 1.0):
    """Compute logprobs and entropy from all logits [N, V], with torch's log-softmax and autograd."""
    logits_NV = F.linear(x_ND, weight_VD)
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    logp_NV = (logits_NV / temperature).log_softmax(dim=-1)
    entropy = -(logp_NV.exp() * logp_NV).sum(dim=-1)
    return logp_NV.gather(1, target_ids_N.unsqueeze(1)).squeeze(1), entropy


class LinearLogprobEntropy(torch.autograd.Function):
    """Forward and backward in blocks of the vocabulary, with the chunked or the Triton functions."""

    @staticmethod
    def forward(ctx, x_ND, weight_VD, target_ids_N, temperature: float, use_triton: bool):
        ctx.set_materialize_grads(False)  # the gradient of an unused output is None instead of zeros
        ctx.temperature = temperature
        ctx.use_triton = use_triton
        statistics = triton_statistics if use_triton else chunked_statistics
        target, m, log_s, entropy = statistics(x_ND, weight_VD, target_ids_N, temperature)
        ctx.save_for_backward(x_ND, weight_VD, target_ids_N, m, log_s, entropy)
        # Clamp: target and m come from different matrix products, so rounding may give a logprob above 0.
        return ((target - m) - log_s).clamp(max=0), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob, grad_entropy):
        x_ND, weight_VD, target_ids_N, m, log_s, entropy = ctx.saved_tensors
        needs_x, needs_w = ctx.needs_input_grad[:2]
        grad_logits = triton_grad_logits if ctx.use_triton else chunked_grad_logits
        grad_logprob = torch.zeros_like(m) if grad_logprob is None else grad_logprob
        dx_ND = torch.zeros_like(x_ND, dtype=m.dtype) if needs_x else None  # float32: accumulated over blocks
        dw_VD = torch.empty_like(weight_VD) if needs_w else None
        per_row = (target_ids_N, m, log_s, entropy, grad_logprob, grad_entropy)
        for columns in column_blocks(x_ND, weight_VD):
            dz_NC = grad_logits(x_ND, weight_VD, columns, *per_row, ctx.temperature)
            if needs_x:
                add_product(dx_ND, dz_NC, weight_VD[columns])
            if needs_w:
                torch.mm(dz_NC.T, x_ND, out=dw_VD[columns])
            del dz_NC  # free the memory before the next block is allocated
        return dx_ND.to(x_ND.dtype) if needs_x else None, dw_VD, None, None, None


def block_elements(x_ND: Tensor) -> int:
    """Return the number of logits per block on the device of x."""
    return BLOCK_ELEMENTS["cpu" if x_ND.device.type == "cpu" else "cuda"]


def column_blocks(x_ND: Tensor, weight_VD: Tensor) -> list[slice]:
    """Cut the vocabulary into blocks of BLOCK_ELEMENTS logits, at least MIN_COLUMNS wide."""
    vocab = len(weight_VD)
    max_columns = block_elements(x_ND) // max(1, len(x_ND))
    width = max(MIN_COLUMNS, max_columns // MIN_COLUMNS * MIN_COLUMNS)
    return [slice(start, min(start + width, vocab)) for start in range(0, vocab, width)]


# ------------------------------------------------------------------------------------------------------------
# Further tokens of each row
# ------------------------------------------------------------------------------------------------------------
ROW_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}  # rows of W that topk_logprobs() gathers at a time, in elements


def topk_logprobs(
    x_ND: Tensor,
    weight_VD: Tensor,
    ids_NK: Tensor,
    target_ids_N: Tensor,
    logprobs_N: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """Return the log-probabilities of K further tokens of each row, [N, K], in nats and differentiable.

        logprob_nk = z_nk - (z_nt - logprob_nt),   z_nt - logprob_nt = lse_n,   t the target of n

    logprobs_N: linear_logprob_entropy() of the targets, so that the log-sum over the vocabulary is computed
    once. ids_NK: integers. Cost: N K D products each way beside N V D of the head. Memory: the result, two
    blocks of ROW_ELEMENTS gathered rows of W, and in the backward pass a float32 gradient of W [V, D]. If K
    is at least an eighth of V, all logits [N, V] are computed [ours: rows of W are then read several times].
    """
    ids_NK = torch.cat([target_ids_N.unsqueeze(1), ids_NK.long()], dim=1)  # [N, 1 + K], the target first
    if 8 * ids_NK.shape[1] >= len(weight_VD):
        dtype = logprobs_N.dtype
        z_NK = F.linear(x_ND.to(dtype), weight_VD.to(dtype)).gather(1, ids_NK)
    else:
        z_NK = GatheredLogits.apply(x_ND, weight_VD, ids_NK)
    z_NK = z_NK / temperature
    return z_NK[:, 1:] - (z_NK[:, :1] - logprobs_N.unsqueeze(1))


class GatheredLogits(torch.autograd.Function):
    """Logits x_n . w_v of the tokens v in ids_NK, [N, K], float32 (float64 for float64 operands)."""

    @staticmethod
    def forward(ctx, x_ND, weight_VD, ids_NK):
        ctx.save_for_backward(x_ND, weight_VD, ids_NK)
        dtype = torch.float64 if x_ND.dtype == torch.float64 else torch.float32
        logits_NK = torch.empty(ids_NK.shape, dtype=dtype, device=x_ND.device)
        for rows in row_blocks(x_ND, ids_NK):
            w_RKD = weight_VD[ids_NK[rows]].to(dtype)  # R rows of a block
            logits_NK[rows] = torch.einsum("rd,rkd->rk", x_ND[rows].to(dtype), w_RKD)
        return logits_NK

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NK):
        x_ND, weight_VD, ids_NK = ctx.saved_tensors
        dx_ND = torch.empty_like(x_ND)
        dw_VD = torch.zeros_like(weight_VD, dtype=grad_NK.dtype)  # float32: summed over all rows
        for rows in row_blocks(x_ND, ids_NK):
            w_RKD = weight_VD[ids_NK[rows]].to(grad_NK.dtype)
            dx_ND[rows] = torch.einsum("rk,rkd->rd", grad_NK[rows], w_RKD).to(x_ND.dtype)
            dw_RKD = grad_NK[rows].unsqueeze(2) * x_ND[rows].unsqueeze(1)
            dw_VD.index_add_(0, ids_NK[rows].flatten(), dw_RKD.flatten(0, 1))
        return dx_ND, dw_VD.to(weight_VD.dtype), None


def row_blocks(x_ND: Tensor, ids_NK: Tensor) -> list[slice]:
    """Cut the rows into blocks for which ROW_ELEMENTS elements of W are gathered."""
    elements = ROW_ELEMENTS["cpu" if x_ND.device.type == "cpu" else "cuda"]
    height = max(1, elements // (ids_NK.shape[1] * x_ND.shape[1]))
    return [slice(start, start + height) for start in range(0, len(x_ND), height)]


# ------------------------------------------------------------------------------------------------------------
# torch
# ------------------------------------------------------------------------------------------------------------
def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, accumulated in float32 (float64 for float64 operands)."""
    if a.dtype.itemsize >= 4:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    precision = torch.backends.mkldnn.matmul.fp32_precision
    if a.dtype == torch.bfloat16:
        # Let oneDNN round the operands to bfloat16, which changes no bit of them: the processor's bfloat16
        # units then compute the float32 result, for example 2.3 times as fast on an EPYC (Zen 5).
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        return a.float() @ b.float()
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = precision


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to total in the dtype of total, which may be wider than the dtype of a and b."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += product(a, b)


def chunked_statistics(x_ND, weight_VD, target_ids_N, temperature: float) -> tuple[Tensor, ...]:
    """Return the target's z, m, log s and entropy, [N] each."""
    dtype = torch.float64 if x_ND.dtype == torch.float64 else torch.float32
    target, m, s, a = torch.zeros(4, len(x_ND), dtype=dtype, device=x_ND.device)
    m.fill_(torch.finfo(dtype).min)
    for columns in column_blocks(x_ND, weight_VD):
        z_NC = logits(x_ND, weight_VD[columns], temperature)
        rows, places = targets_within(target_ids_N, columns)
        target[rows] = z_NC[rows, places]
        new_m = torch.empty_like(m)
        block_s = torch.empty_like(s)
        block_a = torch.empty_like(a)
        for rows in cached_rows(z_NC):
            z_RC = z_NC[rows]
            new_m[rows] = torch.maximum(m[rows], z_RC.amax(dim=1))
            p_RC = z_RC.sub_(new_m[rows, None]).exp()
            block_s[rows] = p_RC.sum(dim=1)
            block_a[rows] = p_RC.mul_(z_RC).sum(dim=1)
        shrink = (m - new_m).exp()
        a = (a + s * (m - new_m)) * shrink + block_a
        s = s * shrink + block_s
        m = new_m
    log_s = s.log()
    return target, m, log_s, log_s - a / s


def logits(x_ND, weight_CD, temperature: float) -> Tensor:
    """Return the logits of a block of columns [N, C], divided by the temperature."""
    z_NC = product(x_ND, weight_CD.T)
    return z_NC if temperature == 1 else z_NC.div_(temperature)


def cached_rows(z_NC: Tensor) -> list[slice]:
    """Cut a block into rows that stay in the cache of a CPU's core over several passes; on GPUs all rows."""
    height = len(z_NC) if z_NC.is_cuda else max(1, CACHED_ELEMENTS // z_NC.shape[1])
    return [slice(start, start + height) for start in range(0, len(z_NC), height or 1)]


def targets_within(target_ids_N: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return the rows whose targets are in a block of columns, and the target columns in the block."""
    place = target_ids_N - columns.start
    rows = ((place >= 0) & (place < columns.stop - columns.start)).nonzero().squeeze(1)
    return rows, place[rows]


def chunked_grad_logits(
    x_ND, weight_VD, columns: slice, target_ids_N, m, log_s, entropy, grad_logprob, grad_entropy, temperature
) -> Tensor:
    """Return dz / temperature of a block of columns [N, C], in the dtype of x."""
    logp_NC = logits(x_ND, weight_VD[columns], temperature).sub_(m[:, None]).sub_(log_s[:, None])
    if grad_entropy is None:
        dz_NC = logp_NC.exp_().mul_((grad_logprob / -temperature)[:, None])
    else:
        p_NC = logp_NC.exp().div_(-temperature)
        dz_NC = logp_NC.add_(entropy[:, None]).mul_(grad_entropy[:, None])
        dz_NC.add_(grad_logprob[:, None]).mul_(p_NC)
    rows, places = targets_within(target_ids_N, columns)
    dz_NC[rows, places] += grad_logprob[rows] / temperature
    return dz_NC.to(x_ND.dtype)


# ------------------------------------------------------------------------------------------------------------
# Triton
# ------------------------------------------------------------------------------------------------------------
@triton.jit
def logits_tile(x, w, row, column, V, D, scale, BN: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr):
    """Return z [BN, BC] of the tile that begins at (row, column), float32; -1e30 in columns beyond V.

    x, w: tensor descriptors with tiles [BN, BD] and [BC, BD], zero beyond the edges.
    """
    z = tl.zeros((BN, BC), tl.float32)
    for depth in range(0, D, BD):  # "ieee": do not round float32 operands to TF32
        z = tl.dot(x.load([row, depth]), w.load([column, depth]).T, z, input_precision="ieee")
    return tl.where((column + tl.arange(0, BC))[None, :] < V, z * scale, -1e30)


@triton.jit
def statistics_kernel(
    x, w, sums, N, V, D, width, scale,
    BN: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Write m, s and a of BN rows over one split of the vocabulary to sums [3, SPLITS, N].

    A split has `width` columns, a multiple of BC; the last split may extend beyond V.
    """
    split = tl.program_id(0) % SPLITS
    row = tl.program_id(0) // SPLITS * BN
    m = tl.full((BN,), -3e38, tl.float32)
    s = tl.zeros((BN,), tl.float32)
    a = tl.zeros((BN,), tl.float32)
    for column in range(split * width, tl.minimum(split * width + width, V), BC):
        z = logits_tile(x, w, row, column, V, D, scale, BN, BC, BD)
        new_m = tl.maximum(m, tl.max(z, axis=1))
        z -= new_m[:, None]
        p = tl.exp(z)
        shrink = tl.exp(m - new_m)
        a = (a + s * (m - new_m)) * shrink + tl.sum(z * p, axis=1)
        s = s * shrink + tl.sum(p, axis=1)
        m = new_m
    rows = row + tl.arange(0, BN)
    pointers = sums + split * N + rows
    tl.store(pointers, m, mask=rows < N)
    tl.store(pointers + SPLITS * N, s, mask=rows < N)
    tl.store(pointers + 2 * SPLITS * N, a, mask=rows < N)


@triton.jit
def grad_logits_kernel(
    x, w, dz, targets, m, log_s, entropy, grad_logprob, grad_entropy, N, V, D, first, C, scale,
    BN: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, WITH_ENTROPY: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write dz * scale of a tile of the columns first ... first + C - 1 to dz [N, C]."""
    # Programs are ordered so that GROUP blocks of rows use the same columns in turn: both stay in L2 cache.
    column_tiles = tl.cdiv(C, BC)
    group = tl.program_id(0) // (GROUP * column_tiles)
    in_group = tl.program_id(0) % (GROUP * column_tiles)
    rows_of_group = tl.minimum(GROUP, tl.cdiv(N, BN) - group * GROUP)
    row = (group * GROUP + in_group % rows_of_group) * BN
    place = in_group // rows_of_group * BC
    z = logits_tile(x, w, row, first + place, V, D, scale, BN, BC, BD)
    rows = row + tl.arange(0, BN)
    places = place + tl.arange(0, BC)
    in_bounds = rows < N
    logp = z - tl.load(m + rows, mask=in_bounds, other=0.0)[:, None]
    logp -= tl.load(log_s + rows, mask=in_bounds, other=0.0)[:, None]
    g = tl.load(grad_logprob + rows, mask=in_bounds, other=0.0)[:, None]
    factor = -g
    if WITH_ENTROPY:
        h = tl.load(grad_entropy + rows, mask=in_bounds, other=0.0)[:, None]
        factor -= h * (logp + tl.load(entropy + rows, mask=in_bounds, other=0.0)[:, None])
    target = tl.load(targets + rows, mask=in_bounds, other=-1).to(tl.int32) - first
    value = (factor * tl.exp(logp) + tl.where(places[None, :] == target[:, None], g, 0.0)) * scale
    pointers = dz + rows.to(tl.int64)[:, None] * C + places[None, :]
    tl.store(pointers, value.to(dz.dtype.element_ty), mask=in_bounds[:, None] & (places[None, :] < C))


def descriptors(x_ND: Tensor, weight_VD: Tensor) -> tuple[TensorDescriptor, TensorDescriptor, dict]:
    """Return tensor descriptors of x and W, and the tile sizes."""
    size = x_ND.element_size()
    aligned = all(t.data_ptr() % 16 == 0 for t in (x_ND, weight_VD)) and x_ND.shape[1] * size % 16 == 0
    if size not in TILES or not aligned:
        raise ValueError(
            "model.logprob_kernel triton requires 2 or 4 bytes per value and rows aligned to 16 bytes, not "
            f"rows of {x_ND.shape[1]} x {size} bytes; choose chunked"
        )
    tile = TILES[size]
    x = TensorDescriptor.from_tensor(x_ND, [tile["BN"], tile["BD"]])
    return x, TensorDescriptor.from_tensor(weight_VD, [tile["BC"], tile["BD"]]), tile


def target_logits(x_ND: Tensor, weight_VD: Tensor, target_ids_N: Tensor, temperature: float) -> Tensor:
    """Return the target's z, [N] float32, computed outside of the kernel, where registers would spill."""
    rows = max(1, block_elements(x_ND) // (8 * x_ND.shape[1]))  # 8 bytes per value: x and W in float32
    parts = [
        torch.linalg.vecdot(x.float(), weight_VD[targets].float())
        for x, targets in zip(x_ND.split(rows), target_ids_N.split(rows))
    ]
    return torch.cat(parts) / temperature


def triton_statistics(x_ND, weight_VD, target_ids_N, temperature: float) -> tuple[Tensor, ...]:
    """Return the target's z, m, log s and entropy, [N] float32 each."""
    num_rows, depth = x_ND.shape
    vocab = len(weight_VD)
    if num_rows == 0:
        return tuple(torch.zeros(4, 0, device=x_ND.device))
    x, w, tile = descriptors(x_ND, weight_VD)
    width = triton.cdiv(triton.cdiv(vocab, SPLITS), tile["BC"]) * tile["BC"]
    sums = torch.empty(3, SPLITS, num_rows, device=x_ND.device)
    statistics_kernel[(triton.cdiv(num_rows, tile["BN"]) * SPLITS,)](
        x, w, sums, num_rows, vocab, depth, width, 1.0 / temperature, SPLITS=SPLITS, **tile
    )
    m, s, a = sums  # [S, N]; a split beyond the vocabulary has s = 0
    highest = m.amax(dim=0)
    lowered = m - highest
    total = (s * lowered.exp()).sum(dim=0)
    mean = ((a + s * lowered) * lowered.exp()).sum(dim=0) / total
    log_s = total.log()
    target = target_logits(x_ND, weight_VD, target_ids_N, temperature)
    return target, highest, log_s, log_s - mean


def triton_grad_logits(
    x_ND, weight_VD, columns: slice, target_ids_N, m, log_s, entropy, grad_logprob, grad_entropy, temperature
) -> Tensor:
    """Return dz / temperature of a block of columns [N, C], in the dtype of x."""
    num_rows, depth = x_ND.shape
    num_columns = columns.stop - columns.start
    dz_NC = torch.empty(num_rows, num_columns, dtype=x_ND.dtype, device=x_ND.device)
    if num_rows == 0:
        return dz_NC
    x, w, tile = descriptors(x_ND, weight_VD)
    grad_logits_kernel[(triton.cdiv(num_rows, tile["BN"]) * triton.cdiv(num_columns, tile["BC"]),)](
        x, w, dz_NC, target_ids_N, m, log_s, entropy, grad_logprob.contiguous(),
        m if grad_entropy is None else grad_entropy.contiguous(), num_rows, len(weight_VD), depth,
        columns.start, num_columns, 1.0 / temperature, WITH_ENTROPY=grad_entropy is not None, GROUP=8, **tile,
    )  # fmt: skip
    return dz_NC
