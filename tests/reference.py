"""The equations of the method as slow, literal loops over Python floats, for tests to compare with.

One function per equation and named after it: a sentence, the formula, its source. Nothing is imported from
the project. x[i][t] belongs to token t of completion i; lists are ragged, so there is neither padding nor a
mask. Log-probabilities are in nats. A function named *_slope is the derivative of its equation by logprob,
written out by hand.
"""

import math
from fractions import Fraction


def group_advantages(rewards: list[float], valid: list[bool], eps: float = 1e-6) -> list[float]:
    """Advantage of each completion of one group (outcome supervision: the same for all of its tokens).

        A_i = (R_i - mean R) / (std R + eps)

    DeepSeekMath, arXiv 2402.03300, section 4.1.2. mean and std are over the valid completions and std
    divides by n - 1; an invalid completion, and all of a group with fewer than two valid ones, have A_i = 0.
    The mean is an exact fraction, so that equal rewards give exactly 0.
    """
    counted = [Fraction(reward) for reward, ok in zip(rewards, valid) if ok]
    if len(counted) < 2:
        return [0.0 for _ in rewards]
    mean = sum(counted) / len(counted)
    variance = sum((reward - mean) ** 2 for reward in counted) / (len(counted) - 1)
    std = math.sqrt(variance)
    return [float(Fraction(r) - mean) / (std + eps) if ok else 0.0 for r, ok in zip(rewards, valid)]


def token_weight(num_tokens: int, num_completions: int) -> float:
    """Weight of one token in the mean over completions of the mean over tokens.

        w_{i,t} = 1 / (N T_i)

    DeepSeekMath, eq. 3, with N the completions of all prompts of the update (its expectation is a mean too).
    """
    return 1.0 / (num_completions * num_tokens)


def importance_ratio(logprob: float, old_logprob: float) -> float:
    """How much more likely the token has become.

        r_{i,t} = pi(y_{i,t}) / pi_old(y_{i,t})

    DeepSeekMath, eq. 3.
    """
    return math.exp(logprob - old_logprob)


def clip(x: float, low: float, high: float) -> float:
    """x moved into [low, high]."""
    return low if x < low else high if x > high else x


def is_clipped(ratio: float, advantage: float, clip_eps: float) -> bool:
    """Whether the min of the surrogate takes its clipped branch; on a tie it does not."""
    return clip(ratio, 1.0 - clip_eps, 1.0 + clip_eps) * advantage < ratio * advantage


def clipped_surrogate(ratio: float, advantage: float, clip_eps: float) -> float:
    """Pessimistic gain of one token.

        min( r A, clip(r, 1 - eps, 1 + eps) A )

    DeepSeekMath, eq. 3 (PPO, arXiv 1707.06347, eq. 7).
    """
    return min(ratio * advantage, clip(ratio, 1.0 - clip_eps, 1.0 + clip_eps) * advantage)


def clipped_surrogate_slope(ratio: float, advantage: float, clip_eps: float) -> float:
    """r A on the first branch, since dr/dlogprob = r; 0 on the clipped one, which is constant."""
    return 0.0 if is_clipped(ratio, advantage, clip_eps) else ratio * advantage


def kl_k3(logprob: float, ref_logprob: float) -> float:
    """Estimate of KL(pi, pi_ref) from one token; never negative.

        pi_ref / pi - log(pi_ref / pi) - 1

    DeepSeekMath, eq. 4. expm1(d) is exp(d) - 1 without the loss of digits near 0.
    """
    log_ref_ratio = ref_logprob - logprob
    return math.expm1(log_ref_ratio) - log_ref_ratio


def kl_k3_slope(logprob: float, ref_logprob: float) -> float:
    """1 - pi_ref / pi."""
    return -math.expm1(ref_logprob - logprob)


def grpo_objective(logprobs, old_logprobs, advantages, ref_logprobs, clip_eps, kl_coef) -> float:
    """What GRPO maximises.

        J = 1/N sum_i 1/T_i sum_t { min( r A, clip(r, 1 - eps, 1 + eps) A ) - beta KL_k3 }

    DeepSeekMath, eq. 3 and 4, N as in token_weight(). A completion without tokens adds 0 and counts in N.
    """
    total = 0.0
    for i in range(len(logprobs)):
        for t in range(len(logprobs[i])):
            ratio = importance_ratio(logprobs[i][t], old_logprobs[i][t])
            gain = clipped_surrogate(ratio, advantages[i][t], clip_eps)
            if kl_coef:
                gain -= kl_coef * kl_k3(logprobs[i][t], ref_logprobs[i][t])
            total += token_weight(len(logprobs[i]), len(logprobs)) * gain
    return total


def grpo_objective_slope(logprobs, old_logprobs, advantages, ref_logprobs, clip_eps, kl_coef) -> list:
    """dJ / dlogprob_{i,t}, term by term."""
    slopes = []
    for i in range(len(logprobs)):
        slopes.append([])
        for t in range(len(logprobs[i])):
            ratio = importance_ratio(logprobs[i][t], old_logprobs[i][t])
            slope = clipped_surrogate_slope(ratio, advantages[i][t], clip_eps)
            if kl_coef:
                slope -= kl_coef * kl_k3_slope(logprobs[i][t], ref_logprobs[i][t])
            slopes[i].append(token_weight(len(logprobs[i]), len(logprobs)) * slope)
    return slopes


def warmed_up_learning_rate(learning_rate: float, warmup_steps: int, step: int) -> float:
    """Rate of update number step (from 0): it rises in equal parts and is whole after warmup_steps updates.

        lr (step + 1) / (warmup_steps + 1),   at most lr
    """
    return learning_rate if step >= warmup_steps else learning_rate * (step + 1) / (warmup_steps + 1)
