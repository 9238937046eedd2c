"""MaxRL (arXiv 2602.02710) [secondary]: divide centred rewards by the mean of the group."""

import torch
from torch import Tensor

from batch import ZERO_VARIANCE, AdvantageInputs


def maxrl(inputs: AdvantageInputs) -> Tensor:
    """Return (R_i - mean R) / mean R of the group, [B]; 0 for groups without variance."""
    if (inputs.rewards[inputs.valid] < 0).any():
        raise ValueError(
            "MaxRL divides by the mean reward: rewards must not be negative (no penalties, no pairs)"
        )
    advantages = torch.zeros_like(inputs.rewards)
    for group in inputs.group_index.unique():
        members = (inputs.group_index == group) & inputs.valid
        rewards = inputs.rewards[members]
        if len(rewards) < 2 or rewards.max() - rewards.min() <= ZERO_VARIANCE:
            continue
        if rewards.mean() > ZERO_VARIANCE:
            advantages[members] = (rewards - rewards.mean()) / rewards.mean()
    return advantages
