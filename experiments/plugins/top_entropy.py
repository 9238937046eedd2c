"""Policy loss on the most uncertain tokens only ("Beyond the 80/20 rule", arXiv 2506.01939, eq. 5)."""

import math

from torch import Tensor

from batch import SelectInputs


def top_entropy(inputs: SelectInputs, fraction: float = 0.2) -> Tensor:
    """Set the advantages [B, T] of all but the most uncertain fraction of an update's tokens to 0.
    Collective.

    The threshold is over the tokens of all ranks. The number of tokens is rounded up, and tokens as uncertain
    as the last one are included [ours]. The other tokens still count in the mean of the loss.
    """
    if not 0 < fraction <= 1:
        raise ValueError("fraction must be above 0 and at most 1")
    (num_tokens,) = inputs.ranks.sum(int(inputs.mask.sum()))
    num_selected = math.ceil(fraction * num_tokens - 1e-9)
    threshold = inputs.ranks.kth_largest(inputs.entropy[inputs.mask], num_selected)
    is_certain = inputs.mask & (inputs.entropy < threshold)
    return inputs.advantages.masked_fill(is_certain, 0.0)
