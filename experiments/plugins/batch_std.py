"""Batch normalisation of advantages, as in ScaleRL (arXiv 2510.13786) [secondary]."""

import math

import torch
from torch import Tensor

from batch import ZERO_VARIANCE, AdvantageInputs


def batch_std(inputs: AdvantageInputs, eps: float = 1e-6) -> Tensor:
    """Return (R_i - mean_group R) / (std_batch + eps), [B]. Collective.

    std_batch is the standard deviation (n - 1) of the centred rewards of all ranks' completions that have a
    verdict [ours: TRL takes the rewards before centring].
    """
    centred = torch.zeros_like(inputs.rewards)
    for group in inputs.group_index.unique():
        members = (inputs.group_index == group) & inputs.valid
        rewards = inputs.rewards[members]
        if len(rewards) >= 2 and rewards.max() - rewards.min() > ZERO_VARIANCE:
            centred[members] = rewards - rewards.mean()
    squares = float(centred[inputs.valid].double().square().sum())
    total, count = inputs.ranks.sum(squares, int(inputs.valid.sum()))
    return centred / (math.sqrt(total / max(1.0, count - 1)) + eps)
