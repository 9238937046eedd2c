"""Three Triton kernels for the rows of a MoE block, between torch's grouped products.

    a_p = w_p silu(gate_p) up_p      gate, up: the halves of z_p = W1[e] x_t; pair p: token t and its choice k
    y_t = sum_k r_p                  r_p = W2[e] a_p, summed in float32
    dw_p = <da_p, silu(gate_p) up_p>, and dz_p by the derivative of SwiGLU

The routing weight is a factor of a_p instead of the expert's output, so that y and the gradient of x are
plain sums of rows, and dw needs no outputs. Each kernel reads and writes every row once, in a fixed order,
and adds nothing atomically.

liger-kernel 0.8.5 computes a whole MoE block in Triton. It is not used: its authors publish 275 TFLOP/s on an
H100 (413 with an open change), torch's grouped products took 663 in our profile, and that difference is worth
more than the rows (experiments/bench/docs/gpu.md). Its function also waits for the GPU in every layer, adds
dw atomically in bfloat16, and chooses tiles by time, so that ranks may round differently.

Shape suffixes: T tokens, K experts per token, P = T K pairs sorted by expert, D hidden size, I expert width.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

COLUMNS = 1024  # columns of a row that a program computes at a time
WARPS = 4


@triton.jit
def sum_kernel(rows, places, y, D, K: tl.constexpr, COLUMNS: tl.constexpr):
    """y[t] = sum over k of rows[places[t, k]], in float32; one program per token and block of columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for k in tl.static_range(K):
        place = tl.load(places + token * K + k)
        total += tl.load(rows + place * D + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(y + token * D + column, total.to(y.dtype.element_ty), mask=column < D)


@triton.jit
def swiglu_kernel(z, weights, a, width, COLUMNS: tl.constexpr):
    """a[p] = weights[p] silu(gate) up; one program per pair."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < width
        gate = tl.load(z + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(z + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        value = weight * gate * tl.sigmoid(gate) * up
        tl.store(a + row * width + column, value.to(a.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(z, weights, grad_a, grad_z, grad_weights, width, COLUMNS: tl.constexpr):
    """dz[p] and dw[p]; one program per pair."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    products = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < width
        gate = tl.load(z + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(z + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_a + row * width + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        products += grad * silu * up
        grad_gate = weight * grad * up * (sigmoid + silu * (1.0 - sigmoid))
        grad_up = weight * grad * silu
        target = grad_z + row * 2 * width + column
        tl.store(target, grad_gate.to(grad_z.dtype.element_ty), mask=inside)
        tl.store(target + width, grad_up.to(grad_z.dtype.element_ty), mask=inside)
    tl.store(grad_weights + row, tl.sum(products))


def sum_rows(rows_PD: Tensor, places_TK: Tensor) -> Tensor:
    """Return the sum of the rows of each token, in float32 and rounded once: [P, D] -> [T, D]."""
    num_tokens, top_k = places_TK.shape
    y_TD = rows_PD.new_empty(num_tokens, rows_PD.shape[1])
    grid = (num_tokens, triton.cdiv(rows_PD.shape[1], COLUMNS))
    if num_tokens:
        options = {"K": top_k, "COLUMNS": COLUMNS, "num_warps": WARPS}
        sum_kernel[grid](rows_PD.contiguous(), places_TK, y_TD, rows_PD.shape[1], **options)
    return y_TD


class CopyRows(torch.autograd.Function):
    """Return the row of each pair's token: [T, D] -> [P, D]. places_TK: the place of each pair in P."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, token_P: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(places_TK)
        return x_TD.index_select(0, token_P)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_PD: Tensor):
        return sum_rows(grad_PD, *ctx.saved_tensors), None, None


class SumRows(torch.autograd.Function):
    """Return the sum of the rows of each token: [P, D] -> [T, D]; the transpose of CopyRows."""

    @staticmethod
    def forward(ctx, rows_PD: Tensor, token_P: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(token_P)
        return sum_rows(rows_PD, places_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD: Tensor):
        return grad_TD.index_select(0, *ctx.saved_tensors), None, None


class WeightedSwiGLU(torch.autograd.Function):
    """Return a of the formulas above: z [P, 2I], weights [P] float32 -> [P, I]."""

    @staticmethod
    def forward(ctx, z_PI: Tensor, weights_P: Tensor) -> Tensor:
        z_PI, weights_P = z_PI.contiguous(), weights_P.contiguous()
        ctx.save_for_backward(z_PI, weights_P)
        a_PI = z_PI.new_empty(len(z_PI), z_PI.shape[1] // 2)
        if len(z_PI):
            options = {"COLUMNS": COLUMNS, "num_warps": WARPS}
            swiglu_kernel[len(z_PI),](z_PI, weights_P, a_PI, a_PI.shape[1], **options)
        return a_PI

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_PI: Tensor):
        z_PI, weights_P = ctx.saved_tensors
        grad_z_PI = torch.empty_like(z_PI)
        grad_weights_P = torch.empty_like(weights_P)
        if len(z_PI):
            options = {"COLUMNS": COLUMNS, "num_warps": WARPS}
            tensors = (z_PI, weights_P, grad_PI.contiguous(), grad_z_PI, grad_weights_P)
            swiglu_backward_kernel[len(z_PI),](*tensors, grad_PI.shape[1], **options)
        return grad_z_PI, grad_weights_P


def unsupported(device: torch.device) -> str | None:
    """Explain why the kernels cannot run on a device; None if they can."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda" or torch.version.hip:
        return "needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a GPU of compute capability 8.0 or later"
    return None
