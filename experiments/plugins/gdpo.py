"""GDPO (arXiv 2601.05242): normalise each reward of a weighted sum in its group, then sum."""

import math

import torch
from torch import Tensor

from batch import ZERO_VARIANCE, AdvantageInputs


def gdpo(inputs: AdvantageInputs, eps: float = 1e-6) -> Tensor:
    """Return sum_k w_k A_i^(k) / (std_batch + eps), [B], A^(k): group_std of the k-th reward. Collective.

    The rewards are the terms of the prompt's kind, for example 0.8*math + 0.2*my.py:brevity; their weights
    w_k are divided by the sum of the weights. The paper also subtracts the batch's mean, which is 0, because
    each A^(k) is centred in its group [ours: left out, so that A_i is exactly 0 without variance].
    """
    sums = [sum(w * r for w, r in row.values()) / sum(w for w, _ in row.values()) for row in inputs.parts]
    if (torch.tensor(sums) - inputs.rewards)[inputs.valid].abs().gt(1e-5).any():
        raise ValueError(
            "GDPO takes the verifiers' rewards as they are: leave out judge, penalties and reward.binary"
        )
    total = torch.zeros(len(inputs.rewards))
    for kind in sorted({kind for row in inputs.parts for kind in row}):
        terms = [row.get(kind, (0.0, 0.0)) for row in inputs.parts]  # [B] (weight, reward)
        weight_sums = [sum(weight for weight, _ in row.values()) for row in inputs.parts]
        weights = torch.tensor(
            [weight / total_weight for (weight, _), total_weight in zip(terms, weight_sums)]
        )
        rewards = torch.tensor([reward for _, reward in terms])
        total += weights * normalised(rewards, inputs, inputs.valid & (weights > 0), eps)
    squares = float(total[inputs.valid].double().square().sum())
    square_sum, count = inputs.ranks.sum(squares, int(inputs.valid.sum()))
    return total / (math.sqrt(square_sum / max(1.0, count - 1)) + eps)


def normalised(rewards: Tensor, inputs: AdvantageInputs, valid: Tensor, eps: float) -> Tensor:
    """Return (R_i - mean R) / (std R + eps) of each group, [B]; 0 for groups without variance."""
    advantages = torch.zeros_like(rewards)
    for group in inputs.group_index.unique():
        members = (inputs.group_index == group) & valid
        values = rewards[members]
        if len(values) >= 2 and values.max() - values.min() > ZERO_VARIANCE:
            advantages[members] = (values - values.mean()) / (values.std() + eps)
    return advantages
