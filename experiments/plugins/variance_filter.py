"""Filter of RAGEN-2 (arXiv 2604.06268): train on the groups that hold most of the rewards' variance."""

import torch
from torch import Tensor

from batch import ZERO_VARIANCE, AdvantageInputs


def variance_filter(inputs: AdvantageInputs, share: float = 0.9, eps: float = 1e-6) -> Tensor:
    """Return (R_i - mean R) / (std R + eps), [B], 0 in groups outside of the filter. Collective.

    The groups are sorted by the variance of their rewards, highest first. The filter keeps the shortest
    beginning of this list whose variances sum to `share` of the sum over all groups and ranks [secondary: the
    documentation of the authors' code, "top-p linear"]. Example: variances 0.25, 0.2, 0.05 and 0 with share
    0.9 keep the first two groups. Groups with equal variances stay or go together, and groups that go still
    count in the mean of the loss [ours]. The authors subtract 0.01 from the threshold, so that a step of
    nearly equal rewards keeps nothing [ours: left out].
    """
    if not 0 < share <= 1:
        raise ValueError("share must be above 0 and at most 1")
    advantages = torch.zeros_like(inputs.rewards)
    variances = []  # of this rank's groups
    members_of_groups = []
    for group in inputs.group_index.unique():
        members = (inputs.group_index == group) & inputs.valid
        rewards = inputs.rewards[members]
        if len(rewards) >= 2 and rewards.max() - rewards.min() > ZERO_VARIANCE:
            variances.append(float(rewards.double().var(correction=0)))
            members_of_groups.append(members)
            advantages[members] = (rewards - rewards.mean()) / (rewards.std() + eps)
    threshold = smallest_kept(torch.tensor(variances, dtype=torch.float64), share, inputs)
    for variance, members in zip(variances, members_of_groups):
        if variance < threshold:
            advantages[members] = 0.0
    return advantages


def smallest_kept(variances: Tensor, share: float, inputs: AdvantageInputs) -> float:
    """Return the smallest variance that the filter keeps, over all ranks; 0 without groups. Collective."""
    total, count = inputs.ranks.sum(float(variances.sum()), len(variances))
    low = 1  # bisection for the smallest number of groups that reaches the share
    high = max(1, int(count))
    while low < high:
        middle = (low + high) // 2
        kept = variances >= inputs.ranks.kth_largest(variances, middle)
        (held,) = inputs.ranks.sum(float(variances[kept].sum()))
        low, high = (low, middle) if held >= share * total - ZERO_VARIANCE else (middle + 1, high)
    return inputs.ranks.kth_largest(variances, low) if count else 0.0
