"""Filter of RAGEN-2 (arXiv 2604.06268): train on the groups that hold most of the spread of rewards."""

import torch
from torch import Tensor

from batch import ZERO_VARIANCE, AdvantageInputs


def variance_filter(inputs: AdvantageInputs, share: float = 0.9, eps: float = 1e-6) -> Tensor:
    """Return (R_i - mean R) / (std R + eps), [B], 0 in groups outside of the filter. Collective.

    The groups are sorted by the standard deviation of their rewards, highest first. The filter keeps the
    shortest beginning of this list whose deviations sum to `share` of the sum over all groups and ranks
    [secondary: the authors' code, "top-p linear", whose metric "reward_variance" is a standard deviation].
    Example: deviations 0.5, 0.4, 0.1 and 0 with share 0.9 keep the first two groups. Groups with equal
    deviations stay or go together, and groups that go still count in the mean of the loss [ours]. The authors
    subtract 0.01 from the threshold, so that a step of nearly equal rewards keeps nothing [ours: left out].
    """
    if not 0 < share <= 1:
        raise ValueError("share must be above 0 and at most 1")
    advantages = torch.zeros_like(inputs.rewards)
    deviations = []  # of this rank's groups
    members_of_groups = []
    for group in inputs.group_index.unique():
        members = (inputs.group_index == group) & inputs.valid
        rewards = inputs.rewards[members]
        if len(rewards) >= 2 and rewards.max() - rewards.min() > ZERO_VARIANCE:
            deviations.append(float(rewards.double().std()))
            members_of_groups.append(members)
            advantages[members] = (rewards - rewards.mean()) / (rewards.std() + eps)
    threshold = smallest_kept(torch.tensor(deviations, dtype=torch.float64), share, inputs)
    for deviation, members in zip(deviations, members_of_groups):
        if deviation < threshold:
            advantages[members] = 0.0
    return advantages


ROUNDING = 1e-9  # relative, of sums over ranks in another order


def smallest_kept(deviations: Tensor, share: float, inputs: AdvantageInputs) -> float:
    """Return the smallest deviation that the filter keeps, over all ranks; 0 without groups. Collective."""
    total, count = inputs.ranks.sum(float(deviations.sum()), len(deviations))
    low = 1  # bisection for the smallest number of groups that reaches the share
    high = max(1, int(count))
    while low < high:
        middle = (low + high) // 2
        kept = deviations >= inputs.ranks.kth_largest(deviations, middle)
        (held,) = inputs.ranks.sum(float(deviations[kept].sum()))
        low, high = (low, middle) if held >= share * total * (1 - ROUNDING) else (middle + 1, high)
    return inputs.ranks.kth_largest(deviations, low) if count else 0.0
