"""IPO mask (INTELLECT policy optimization), prime-rl's default loss before DPPO's [secondary: a port]."""

from torch import Tensor

from batch import LossInputs


def ipo_mask(
    inputs: LossInputs, max_fall: float = 0.2, max_rise: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return r A for each token, [b, T], 0 for tokens whose probability differs much from the engine's.

    A token is dropped if p - p_engine > max_rise or p - p_engine < -max_fall, whatever the sign of its
    advantage: DPPO-TV drops only the direction in which the advantage pushes. r is the ratio of the run; set
    algorithm.old_policy=rollout for prime-rl's p / p_engine. prime-rl adds 1e-3 (log r)^2, a pull toward the
    engine's policy, to the loss of every token [ours: left out, because updates skip completions without
    advantage; algorithm.kl_coef is a pull toward the initial policy].
    """
    difference = inputs.logprobs.detach().exp() - inputs.rollout_logprobs.exp()  # [b, T]
    is_dropped = (difference > max_rise) | (difference < -max_fall)
    gain = inputs.ratio * inputs.advantages * ~is_dropped
    return gain, {"masked": is_dropped.to(gain.dtype)}
