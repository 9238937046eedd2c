"""Block-wise FP8 (E4M3) quantisation: 8-bit codes and float32 scales, in the format and arithmetic of vLLM.

    weights      a scale per 128 x 128 block    s = max(1e-4, max |w|) (1 / 448),    code = E4M3(w (1 / s))
    activations  a scale per row of 128         s = max(1e-10, max |x|) / 448,       code = E4M3(x / s)

448 is the largest E4M3 value. Every operation rounds to float32 like vLLM on a GPU: weights are multiplied by
reciprocals (torch on a GPU), activations are divided (vLLM's CUDA kernel). The result is equal on CPU and
GPU, so that a simulation on a CPU agrees with an engine on a GPU. vLLM itself may differ in two ways: on a
CPU in the last bit of a weight scale, and on a GPU, because vLLM compiles the function for weights, in the
last bit of 1 / s. A weight halfway between two codes may then get the other code; `formats` of
experiments/bench/gpu.py counts the affected weights.

Blocks at the edges may be smaller than 128. Infinite values get the largest code and are excluded from the
maximum (vLLM turns the whole block into NaN). NaN stays NaN and leaves the other values of the block
unchanged. Zeros stay zeros.

Tensors on GPUs with FP8 (compute capability 8.9) are quantised by Triton, all other tensors by torch;
`use_triton` overrides the choice.
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128  # rows and columns that share a scale
E4M3_MAX = 448.0
MIN_AMAX_WEIGHT = 1e-4  # lower bound on the maximum of a block of weights
MIN_AMAX_ACTIVATION = 1e-10  # lower bound on the maximum of a row of activations
ROWS = 32  # rows of activations per Triton program
WARPS = {True: 8, False: 4}  # warps of a program, by ONE_SCALE


def quantise_weight(weight: Tensor, use_triton: bool | None = None) -> tuple[Tensor, Tensor]:
    """Quantise [..., M, N]; return codes of that shape and scales [..., ceil(M/128), ceil(N/128)]."""
    *batch, m, n = weight.shape
    rows = triton.cdiv(m, BLOCK)
    columns = triton.cdiv(n, BLOCK)
    if has_fp8(weight) if use_triton is None else use_triton:
        codes, scales = launch(weight.reshape(math.prod(batch), m, n), BLOCK, MIN_AMAX_WEIGHT)
        return codes.view(weight.shape), scales.view(*batch, rows, columns)
    blocks = F.pad(weight.float(), (0, -n % BLOCK, 0, -m % BLOCK))
    blocks = blocks.view(*batch, rows, BLOCK, columns, BLOCK)
    scales = finite_amax(blocks, (-3, -1), MIN_AMAX_WEIGHT) * torch.tensor(1 / E4M3_MAX)
    codes = to_e4m3(blocks * (1.0 / scales)).flatten(-4, -3).flatten(-2, -1)[..., :m, :n].contiguous()
    return codes, scales.squeeze(-1).squeeze(-2)


def quantise_activation(
    x: Tensor, use_triton: bool | None = None, column_major: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise [..., N]; return codes of that shape and scales [..., ceil(N/128)].

    column_major, for x [M, N]: return scales with strides (1, 4 ceil(M/4)), the layout that DeepGEMM's
    kernels read (vLLM's column_major_scales with tma_aligned_scales).
    """
    *batch, n = x.shape
    columns = triton.cdiv(n, BLOCK)
    if has_fp8(x) if use_triton is None else use_triton:
        codes, scales = launch(x.reshape(1, math.prod(batch), n), 1, MIN_AMAX_ACTIVATION)
        codes = codes.view(x.shape)
        scales = scales.view(*batch, columns)
    else:
        groups = F.pad(x.float(), (0, -n % BLOCK)).view(*batch, columns, BLOCK)
        amax = finite_amax(groups, (-1,), MIN_AMAX_ACTIVATION)
        # Divide by a tensor: torch turns a division by a Python number into a product on a GPU.
        scales = amax / torch.full_like(amax, E4M3_MAX)
        codes = to_e4m3(groups / scales).flatten(-2)[..., :n].contiguous()
        scales = scales.squeeze(-1)
    if column_major:
        strides = (1, triton.cdiv(len(x), 4) * 4)
        scales = torch.empty_strided(scales.shape, strides, device=x.device).copy_(scales)
    return codes, scales


def dequantise(codes: Tensor, scales: Tensor, block_rows: int) -> Tensor:
    """Return codes times their scales, float32. block_rows: 128 for weights, 1 for activations."""
    m, n = codes.shape[-2:]
    scales = scales.repeat_interleave(block_rows, -2)[..., :m, :].repeat_interleave(BLOCK, -1)[..., :n]
    return codes.float().mul_(scales)


def fp8_round(weight: Tensor) -> Tensor:
    """Round weights [..., M, N] to FP8 and return float32 of the same shape.

    The weights are rounded to bfloat16 first, because a bfloat16 trainer computes with bfloat16 weights.
    Activations stay unrounded, so that a matrix product with the result simulates 8-bit weights with 16-bit
    activations.
    """
    return dequantise(*quantise_weight(weight.bfloat16()), BLOCK)


def mxfp4_round(weight: Tensor) -> Tensor:
    """Round weights [..., M, N] to MXFP4 (OCP Microscaling 1.0) and return float32 of the same shape.

    32 consecutive values of a row share the scale 2^(floor(log2(max |w|)) - 2). The scaled values are rounded
    to a magnitude of 0, 0.5, 1, 1.5, 2, 3, 4 or 6; ties go to the even code, and larger magnitudes become 6.
    """
    size = weight.shape[-1]
    blocks = F.pad(weight.float(), (0, -size % 32)).unflatten(-1, (-1, 32))
    _, exponent = blocks.abs().amax(-1, keepdim=True).frexp()  # frexp() gives 2^k the exponent k + 1
    one = torch.ones_like(blocks[..., :1])
    scaled = blocks * one.ldexp(3 - exponent)
    step = 0.5 * (1 + (scaled.abs() >= 2) + 2 * (scaled.abs() >= 4))
    rounded = ((scaled / step).round() * step).clamp(-6, 6) * one.ldexp(exponent - 3)
    return rounded.flatten(-2)[..., :size]


def has_fp8(x: Tensor) -> bool:
    """Tell whether a tensor is on a GPU that supports FP8."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)


def finite_amax(blocks: Tensor, dims: tuple[int, ...], floor: float) -> Tensor:
    """Return the largest finite absolute value over dims (keepdim), at least floor."""
    sizes = blocks.abs()
    return sizes.where(sizes < torch.inf, 0.0).amax(dim=dims, keepdim=True).clamp(min=floor)


def to_e4m3(scaled: Tensor) -> Tensor:
    """Round to E4M3; values beyond the range get the largest code."""
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


@triton.jit
def quantise_kernel(
    x, codes, scales, M, N, num_columns, floor, E4M3_MAX: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ONE_SCALE: tl.constexpr,
):  # fmt: skip
    """Quantise ROWS x BLOCK values, with a single scale if ONE_SCALE (weights), else with a scale per row."""
    matrix = tl.program_id(1).to(tl.int64)
    block_row = tl.program_id(0) // num_columns
    block_column = tl.program_id(0) % num_columns
    row = block_row * ROWS + tl.arange(0, ROWS)
    column = block_column * BLOCK + tl.arange(0, BLOCK)
    offsets = (matrix * M + row[:, None]) * N + column[None, :]
    in_bounds = (row[:, None] < M) & (column[None, :] < N)
    values = tl.load(x + offsets, mask=in_bounds, other=0.0).to(tl.float32)
    sizes = tl.abs(values)
    amax = tl.max(tl.where(sizes < float("inf"), sizes, 0.0), axis=1)
    if ONE_SCALE:
        scale = tl.maximum(tl.max(amax, axis=0), floor) * (1.0 / E4M3_MAX)
        scaled = values * tl.div_rn(1.0, scale)
        tl.store(scales + (matrix * tl.cdiv(M, ROWS) + block_row) * num_columns + block_column, scale)
    else:
        scale = tl.div_rn(tl.maximum(amax, floor), tl.full((ROWS,), E4M3_MAX, tl.float32))
        scaled = tl.div_rn(values, scale[:, None])
        tl.store(scales + (matrix * M + row) * num_columns + block_column, scale, mask=row < M)
    limited = tl.minimum(tl.maximum(scaled, -E4M3_MAX), E4M3_MAX)
    limited = tl.where(scaled != scaled, scaled, limited)
    tl.store(codes + offsets, limited.to(tl.float8e4nv), mask=in_bounds)


def launch(x: Tensor, scale_rows: int, floor: float) -> tuple[Tensor, Tensor]:
    """Run the kernel on x [B, M, N]; return codes and scales [B, ceil(M / scale_rows), ceil(N/128)]."""
    batch, m, n = x.shape
    num_columns = triton.cdiv(n, BLOCK)
    rows = ROWS if scale_rows == 1 else BLOCK
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(batch, triton.cdiv(m, scale_rows), num_columns, device=x.device)
    if x.numel():
        quantise_kernel[(triton.cdiv(m, rows) * num_columns, batch)](
            x.contiguous(), codes, scales, m, n, num_columns, floor, E4M3_MAX,
            ROWS=rows, BLOCK=BLOCK, ONE_SCALE=scale_rows == BLOCK, num_warps=WARPS[scale_rows == BLOCK],
        )  # fmt: skip
    return codes, scales
