"""Block-wise FP8 weights: what a matrix is after quantisation to E4M3 with one scale per 128 x 128 block.

    s = max |w| / 448,   w' = s E4M3(w / s)    per block, tails in blocks of their own

448 is the largest finite E4M3 value. The same arithmetic as vLLM's online quantisation, down to the bit: a
reciprocal of the scale in float32, scales of at least 1e-4 / 448. Activations are not rounded here: products
with w' are those of 8-bit weights and 16-bit activations.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # rows and columns that share a scale
E4M3_MAX = 448.0
MIN_AMAX = 1e-4  # smallest |weight| a scale is made for


def fp8_round(weight: Tensor) -> Tensor:
    """Weights after block-wise quantisation and back, [..., M, N] -> float32 of the same shape.

    What is quantised is the bfloat16-rounded weight, which is what a bfloat16 trainer computes with.
    """
    weight = weight.bfloat16().float()
    *_, m, n = weight.shape
    blocks = F.pad(weight, (0, -n % BLOCK, 0, -m % BLOCK)).unflatten(-1, (-1, BLOCK))
    blocks = blocks.unflatten(-3, (-1, BLOCK))  # [..., M/128, 128, N/128, 128]
    scale = blocks.abs().amax(dim=(-3, -1), keepdim=True).clamp(min=MIN_AMAX) / E4M3_MAX
    rounded = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-4, -3).flatten(-2, -1)[..., :m, :n]
