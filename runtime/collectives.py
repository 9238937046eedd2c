"""Sums and order statistics over all ranks. Collective: every rank has to make the same calls."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from batch import Collectives
from runtime.schedule import collective_device, from_all_ranks


def sum_over_ranks(*values: float) -> list[float]:
    """Return the sum of each value over all ranks, computed in float64. Collective."""
    sums = torch.tensor(values, dtype=torch.float64, device=collective_device())
    dist.all_reduce(sums)
    return sums.tolist()


def kth_largest_over_ranks(values: Tensor, k: int) -> float:
    """Return the k-th largest of the values [n] of all ranks. Collective.

    With fewer than k values this is the smallest one, without any value infinity.
    """
    candidates = values.double().topk(min(k, len(values))).values.cpu()
    largest = torch.cat(from_all_ranks(candidates))
    return largest.topk(min(k, len(largest))).values[-1].item() if len(largest) else math.inf


ALL_RANKS = Collectives(sum=sum_over_ranks, kth_largest=kth_largest_over_ranks)
