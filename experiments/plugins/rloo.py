"""RLOO (arXiv 2402.14740): the baseline of a completion is the mean reward of the rest of its group."""

import torch
from torch import Tensor

from batch import ZERO_VARIANCE, AdvantageInputs


def rloo(inputs: AdvantageInputs) -> Tensor:
    """Return R_i - mean_{j != i} R_j, [B]; 0 for groups without variance."""
    advantages = torch.zeros_like(inputs.rewards)
    for group in inputs.group_index.unique():
        members = (inputs.group_index == group) & inputs.valid
        rewards = inputs.rewards[members]
        size = len(rewards)
        if size >= 2 and rewards.max() - rewards.min() > ZERO_VARIANCE:
            advantages[members] = (rewards - rewards.mean()) * size / (size - 1)
    return advantages
