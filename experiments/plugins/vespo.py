"""VESPO (arXiv 2602.10693): weigh a completion by a gamma-shaped function of its sequence ratio."""

import math

import torch
from torch import Tensor

from batch import LossInputs

LOG_W_MIN = math.log(1e-8)  # the range of W [secondary: TRL, after the authors' code]
LOG_W_MAX = 20.0


def vespo(
    inputs: LossInputs,
    power_positive: float = 2.0,
    power_negative: float = 3.0,
    decay_positive: float = 3.0,
    decay_negative: float = 2.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return sg[W^k exp(lambda (1 - W))] A log pi for each token, [b, T].

    W is the product of the completion's token ratios. The power k and the decay lambda depend on the sign of
    the advantage; A = 0 counts as positive. The weight is 1 at W = 1. With algorithm.old_policy=rollout W
    itself corrects the mismatch with the engine: leave algorithm.rollout_correction at none.
    """
    log_ratio = inputs.log_ratio.detach() * inputs.mask
    log_w = log_ratio.sum(dim=1, keepdim=True).clamp(LOG_W_MIN, LOG_W_MAX)  # [b, 1]
    is_positive = inputs.advantages >= 0
    power = torch.where(is_positive, log_w.new_tensor(power_positive), log_w.new_tensor(power_negative))
    decay = torch.where(is_positive, log_w.new_tensor(decay_positive), log_w.new_tensor(decay_negative))
    weight = (power * log_w + decay * (1 - log_w.exp())).exp()
    return weight * inputs.advantages * inputs.logprobs, {}
