"""Off-policy sequence mask of DeepSeek-V3.2 (arXiv 2512.02556, eq. 9) [secondary: TRL], with PPO's clip."""

from torch import Tensor

from batch import LossInputs, pessimistic


def off_policy_mask(inputs: LossInputs, max_divergence: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return min(r A, clip(r) A) for each token, [b, T], 0 for a completion with A < 0 that is too far off.

    A completion is too far off if the mean of log(pi_engine / pi) over its tokens exceeds max_divergence, in
    nats. pi is the current policy, so that the mask acts from the first update on.
    """
    settings = inputs.settings
    divergence = (inputs.rollout_logprobs - inputs.logprobs.detach()) * inputs.mask  # [b, T]
    num_tokens = inputs.mask.sum(dim=1, keepdim=True).clamp(min=1)  # [b, 1]
    is_far = divergence.sum(dim=1, keepdim=True) / num_tokens > max_divergence  # [b, 1]
    is_masked = is_far & (inputs.advantages < 0)
    low, high = 1 - settings.clip_eps_low, 1 + settings.clip_eps_high
    gain, clipped = pessimistic(inputs.ratio, inputs.advantages * ~is_masked, low, high, cap=None)
    return gain, {"masked": is_masked.to(gain.dtype), "clipped": clipped.to(gain.dtype)}
