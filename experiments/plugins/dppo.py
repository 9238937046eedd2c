"""DPPO (arXiv 2602.04879): drop tokens by a divergence of the policies instead of a clip of the ratio.

A token is dropped if its probability has moved far from the old policy's in the direction that its advantage
pushes: A > 0 and p > p_old by more than eps_high, or A < 0 and p < p_old by more than eps_low. The other
tokens have the gain sg[min(r, cap)] A log pi. The paper has token ratios: leave algorithm.ratio_level at
token.
"""

import math

from torch import Tensor

from batch import LossInputs


def total_variation(
    inputs: LossInputs, eps_low: float = 0.2, eps_high: float = 0.2, cap: float = math.inf
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the gain [b, T] with the distance |p - p_old| of a token's probabilities."""
    distance = (inputs.logprobs.detach().exp() - inputs.old_logprobs.exp()).abs()
    return gain_of_near_tokens(inputs, distance, eps_low, eps_high, cap)


def binary_kl(
    inputs: LossInputs, eps_low: float = 0.2, eps_high: float = 0.2, cap: float = math.inf
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the gain [b, T] with the KL of the outcomes "this token" and "another token".

        p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))

    1 - p is at least 1e-8 [ours; the authors add 1e-8].
    """
    new = inputs.logprobs.detach().exp()
    old = inputs.old_logprobs.exp()
    log_other_old = (1 - old).clamp(min=1e-8).log()
    log_other_new = (1 - new).clamp(min=1e-8).log()
    same_token = old * (inputs.old_logprobs - inputs.logprobs.detach())
    distance = same_token + (1 - old) * (log_other_old - log_other_new)
    return gain_of_near_tokens(inputs, distance, eps_low, eps_high, cap)


def gain_of_near_tokens(
    inputs: LossInputs, distance: Tensor, eps_low: float, eps_high: float, cap: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the gain [b, T], 0 for tokens that have moved too far, and these tokens as `clipped`."""
    advantages = inputs.advantages
    new = inputs.logprobs.detach().exp()
    old = inputs.old_logprobs.exp()
    is_far_up = (advantages > 0) & (new > old) & (distance > eps_high)
    is_far_down = (advantages < 0) & (new < old) & (distance > eps_low)
    is_dropped = is_far_up | is_far_down
    weight = inputs.ratio.detach().clamp(max=cap)
    gain = weight * advantages * inputs.logprobs * ~is_dropped
    return gain, {"clipped": is_dropped.to(gain.dtype)}
