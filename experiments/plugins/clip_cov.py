"""Clip-Cov (arXiv 2505.22617): drop some of the tokens whose log-probability and advantage covary."""

import torch
from torch import Tensor

from batch import SelectInputs


def clip_cov(inputs: SelectInputs, fraction: float = 0.0002, low: float = 1.0, high: float = 5.0) -> Tensor:
    """Set the advantages [B, T] of a random subset of covarying tokens of an update to 0. Collective.

        cov_t = (A_t - mean A) (log pi_old(y_t) - mean log pi_old),   means over the update's tokens, all
        ranks

    A fraction of the tokens, at least one, is drawn from those with low < cov_t < high. The paper takes the
    current policy's log-probabilities; ours are the old policy's, so that the choice does not depend on the
    split of an update into micro-batches [ours; both agree in the first update of a step].
    """
    if not 0 < fraction < 1 or low >= high:
        raise ValueError("fraction must be between 0 and 1, and low below high")
    mask = inputs.mask
    sums = [float((values * mask).double().sum()) for values in (inputs.advantages, inputs.old_logprobs)]
    advantage_sum, logprob_sum, num_tokens = inputs.ranks.sum(*sums, int(mask.sum()))
    mean_advantage = advantage_sum / max(1.0, num_tokens)
    mean_logprob = logprob_sum / max(1.0, num_tokens)
    covariance = (inputs.advantages - mean_advantage) * (inputs.old_logprobs - mean_logprob)  # [B, T]
    eligible = mask & (covariance > low) & (covariance < high)
    keys = torch.zeros(mask.shape, dtype=torch.float64)
    for row in eligible.any(dim=1).nonzero().flatten().tolist():
        draws = [inputs.generators[row].random() for _ in range(int(mask[row].sum()))]
        keys[row, mask[row]] = torch.tensor(draws, dtype=torch.float64)
    num_drawn = max(1, int(fraction * num_tokens))
    is_drawn = eligible & (keys >= inputs.ranks.kth_largest(keys[eligible], num_drawn))
    return inputs.advantages.masked_fill(is_drawn, 0.0)
