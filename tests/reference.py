"""The equations of the method as slow, literal loops over Python floats, for tests to compare with.

One function per equation and named after it: a sentence, the formula, its source. Nothing is imported from
the project. x[i][t] belongs to token t of completion i; lists are ragged, so there is neither padding nor a
mask. Log-probabilities and entropies are in nats. A function named *_slope is the derivative of its equation
by logprob, written out by hand; where an equation shares a value among tokens, it is by the logprob of token
u, and a clip that is exactly on its edge counts as not clipped. Choices have the names of the settings.

    r_t = pi(y_t) / pi_old(y_t)     tau: the indices of the tokens of one group of a completion
"""

import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

ZERO_VARIANCE = 1e-6  # rewards of a group closer than this are equal


# ---- 1. Rewards --------------------------------------------------------------------------------------------
def soft_overlong_punishment(num_tokens: int, max_tokens: int, cache: int) -> float:
    """Penalty of a long completion, rising over the last `cache` tokens.

        0                                     if |y| <= L_max - L_cache
        ((L_max - L_cache) - |y|) / L_cache   if L_max - L_cache < |y| <= L_max
        -1                                    if L_max < |y|

    DAPO, arXiv 2503.14476, eq. 13. Without a cache there is no penalty.
    """
    if cache == 0 or num_tokens <= max_tokens - cache:
        return 0.0
    if num_tokens <= max_tokens:
        return ((max_tokens - cache) - num_tokens) / cache
    return -1.0


def repetition_ratio(token_ids: list[int], n: int) -> float:
    """Share of the n-grams of a completion that occurred in it before; 0 without n-grams."""
    seen, repeated = [], 0
    for start in range(len(token_ids)):
        ngram = token_ids[start : start + n]
        if len(ngram) == n:
            repeated += ngram in seen
            seen.append(ngram)
    return repeated / len(seen) if seen else 0.0


def shaped_reward(score, judged, judge_weight, overlong_coef, overlong, repetition_coef, repetition) -> float:
    """Reward of one completion: score of the verifier, mixed with that of a judge if there is one.

        (1 - w) score + w judged + c_overlong overlong - c_repetition repetition

    overlong is not positive, repetition is not negative.
    """
    reward = score if judged is None else (1.0 - judge_weight) * score + judge_weight * judged
    return reward + overlong_coef * overlong - repetition_coef * repetition


# ---- 2. Advantages -----------------------------------------------------------------------------------------
def group_advantages(
    rewards: list[float],
    valid: list[bool],
    adv_norm: str = "group_std",
    tie_band: float = 0.0,
    eps: float = 1e-6,
) -> list[float]:
    """Advantage of each completion of one group (outcome supervision: the same for all of its tokens).

        group_std   A_i = (R_i - mean R) / (std R + eps)     DeepSeekMath, arXiv 2402.03300, section 4.1.2
        mean_only   A_i = R_i - mean R                       Dr.GRPO, arXiv 2503.20783

    mean and std are over the valid completions (ESPO, arXiv 2512.00499, eq. 11) and std divides by n - 1; an
    invalid completion, all of a group with fewer than two valid ones, and all of a group whose valid rewards
    are equal have A_i = 0; so has a reward within tie_band of the mean. The mean is an exact fraction, so
    that equal rewards give exactly 0.
    """
    counted = [Fraction(reward) for reward, ok in zip(rewards, valid) if ok]
    if len(counted) < 2 or max(counted) - min(counted) <= ZERO_VARIANCE:
        return [0.0 for _ in rewards]
    mean = sum(counted) / len(counted)
    variance = sum((reward - mean) ** 2 for reward in counted) / (len(counted) - 1)
    std = math.sqrt(variance)
    advantages = []
    for reward, ok in zip(rewards, valid):
        if not ok or abs(Fraction(reward) - mean) <= tie_band:
            advantages.append(0.0)
        elif adv_norm == "group_std":
            advantages.append(float(Fraction(reward) - mean) / (std + eps))
        elif adv_norm == "mean_only":
            advantages.append(float(Fraction(reward) - mean))
    return advantages


def correctness_guard(advantage: float, correct: bool) -> float:
    """The advantage, but 0 where its sign contradicts the verifier."""
    if correct and advantage < 0.0 or not correct and advantage > 0.0:
        return 0.0
    return advantage


def rl_zvp_advantages(entropies: list[float], reward: float, alpha: float) -> list[float]:
    """Advantage of each token of a completion whose group has zero variance.

        R > 0    +alpha H_t
        R = 0    -alpha (max_k H_k - H_t)

    RL-ZVP, arXiv 2509.21880, eq. 5.
    """
    if reward > 0.0:
        return [alpha * entropy for entropy in entropies]
    return [-alpha * (max(entropies) - entropy) for entropy in entropies]


def token_advantages(rewards, scores, correct, valid, entropies, settings: dict) -> list[list[float]]:
    """Advantage of each token of the completions of one group.

    scores: the correctness part of the rewards, on which zero variance is tested. settings: adv_norm,
    tie_band, correctness_guard, rl_zvp, rl_zvp_coef.
    """
    advantages = group_advantages(rewards, valid, settings["adv_norm"], settings["tie_band"])
    if settings["correctness_guard"]:
        advantages = [correctness_guard(a, ok) for a, ok in zip(advantages, correct)]
    of_tokens = [[a for _ in row] for a, row in zip(advantages, entropies)]
    counted = [score for score, ok in zip(scores, valid) if ok]
    if settings["rl_zvp"] and len(counted) >= 2 and max(counted) - min(counted) <= ZERO_VARIANCE:
        for i in range(len(rewards)):
            if valid[i]:
                of_tokens[i] = rl_zvp_advantages(entropies[i], scores[i], settings["rl_zvp_coef"])
    return of_tokens


# ---- 3. Rollout correction ---------------------------------------------------------------------------------
def token_tis(old_logprob: float, rollout_logprob: float, cap: float) -> float:
    """Truncated importance weight of a token, trainer over engine.

        min( pi_old(y_t) / pi_rollout(y_t), C )

    C is the cap.
    """
    return min(math.exp(old_logprob - rollout_logprob), cap)


def sequence_ratio(old_logprobs: list[float], rollout_logprobs: list[float]) -> float:
    """How much more likely the trainer finds a whole completion than the engine.

        prod_t pi_old(y_t) / pi_rollout(y_t)

    A product over all tokens, not a mean.
    """
    product = 1.0
    for old, rollout in zip(old_logprobs, rollout_logprobs):
        product *= math.exp(old - rollout)
    return product


def sequence_tis(old_logprobs: list[float], rollout_logprobs: list[float], cap: float) -> float:
    """Truncated importance weight of a completion: min( sequence_ratio, C )."""
    return min(sequence_ratio(old_logprobs, rollout_logprobs), cap)


def sequence_mask(old_logprobs: list[float], rollout_logprobs: list[float], cap: float) -> float:
    """Importance weight of a completion, which is left out above the cap."""
    ratio = sequence_ratio(old_logprobs, rollout_logprobs)
    return ratio if ratio <= cap else 0.0


def correction_weight(old_logprobs, rollout_logprobs, t, rollout_correction, cap) -> float:
    """Weight of the advantage of token t of one completion."""
    if rollout_correction == "none":
        return 1.0
    if rollout_correction == "token_tis":
        return token_tis(old_logprobs[t], rollout_logprobs[t], cap)
    return {"sequence_tis": sequence_tis, "sequence_mask": sequence_mask}[rollout_correction](
        old_logprobs, rollout_logprobs, cap
    )


# ---- 4. Groups of tokens -----------------------------------------------------------------------------------
def entropy_groups(entropies: list[float], shares: tuple[float, ...]) -> list[list[int]]:
    """The tokens of a completion by entropy: the first share of them has the highest, and so on.

        tau_k = { t : ceil(c_{k-1} T) <= place of t < ceil(c_k T) },   c_k = share_1 + ... + share_k

    ESPO, eq. 7. place is 0 for the highest entropy; equal entropies keep the order of the text. Shares are
    taken as the decimals they are written as, so that 0.2 of 5 tokens is 1. Groups may be empty.
    """
    places = sorted(range(len(entropies)), key=lambda t: (-entropies[t], t))
    groups, start, total = [], 0, Fraction(0)
    for share in shares[:-1]:
        total += Fraction(Decimal(str(share)))
        end = math.ceil(total * len(entropies))
        groups.append(places[start:end])
        start = end
    return [*groups, places[start:]]


def token_groups_of(entropies: list[float], ratio_level: str, shares: tuple[float, ...]) -> list[list[int]]:
    """The tokens of a completion that share an importance ratio; no group is empty."""
    if ratio_level == "token":
        groups = [[t] for t in range(len(entropies))]
    elif ratio_level == "sequence":
        groups = [list(range(len(entropies)))]
    elif ratio_level == "entropy_group":
        groups = entropy_groups(entropies, shares)
    return [tau for tau in groups if tau]


# ---- 5. Ratios ---------------------------------------------------------------------------------------------
def importance_ratio(logprob: float, old_logprob: float) -> float:
    """How much more likely the token has become.

        r_{i,t} = pi(y_{i,t}) / pi_old(y_{i,t})

    DeepSeekMath, eq. 3.
    """
    return math.exp(logprob - old_logprob)


def geometric_mean_ratio(log_ratios: list[float], tau: list[int]) -> float:
    """Ratio of a group of tokens.

        s_tau = exp( 1/|tau| sum_{t in tau} log r_t ) = ( prod_{t in tau} r_t )^(1/|tau|)

    GSPO, arXiv 2507.18071, eq. 7, where tau is the completion; ESPO, eq. 10.
    """
    total = 0.0
    for t in tau:
        total += log_ratios[t]
    return math.exp(total / len(tau))


def geometric_mean_ratio_slope(log_ratios: list[float], tau: list[int], u: int) -> float:
    """s_tau / |tau| for u in tau, 0 outside: the gradient goes through the mean."""
    return geometric_mean_ratio(log_ratios, tau) / len(tau) if u in tau else 0.0


def gspo_token_ratio(log_ratios: list[float], tau: list[int], t: int) -> float:
    """Ratio of a token with the value of its group.

        s_{tau,t} = sg[s_tau] pi(y_t) / sg[pi(y_t)]

    GSPO, eq. 14; our reading of ESPO, eq. 9. The last factor has the value 1.
    """
    return geometric_mean_ratio(log_ratios, tau) * 1.0


def gspo_token_ratio_slope(log_ratios: list[float], tau: list[int], t: int, u: int) -> float:
    """s_tau for the token itself, 0 for all others: sg[] has no gradient."""
    return geometric_mean_ratio(log_ratios, tau) if u == t else 0.0


def espo_literal_ratio(log_ratios: list[float], tau: list[int], t: int) -> float:
    """Ratio of a token as ESPO prints it, with pi_old in the denominator.

        s_{tau,t} = sg[s_tau] pi(y_t) / sg[pi_old(y_t)] = sg[s_tau] r_t

    ESPO, eq. 9.
    """
    return geometric_mean_ratio(log_ratios, tau) * math.exp(log_ratios[t])


def espo_literal_ratio_slope(log_ratios: list[float], tau: list[int], t: int, u: int) -> float:
    """s_tau r_t for the token itself, 0 for all others."""
    return espo_literal_ratio(log_ratios, tau, t) if u == t else 0.0


def group_ratio(log_ratios: list[float], tau: list[int], t: int, ratio_form: str) -> float:
    """Ratio of token t of the group tau."""
    if ratio_form == "geometric":
        return geometric_mean_ratio(log_ratios, tau)
    return {"stop_gradient": gspo_token_ratio, "literal": espo_literal_ratio}[ratio_form](log_ratios, tau, t)


def group_ratio_slope(log_ratios: list[float], tau: list[int], t: int, u: int, ratio_form: str) -> float:
    """d group_ratio / d logprob_u."""
    if ratio_form == "geometric":
        return geometric_mean_ratio_slope(log_ratios, tau, u)
    slopes = {"stop_gradient": gspo_token_ratio_slope, "literal": espo_literal_ratio_slope}
    return slopes[ratio_form](log_ratios, tau, t, u)


# ---- 6. Clipping -------------------------------------------------------------------------------------------
def clip(x: float, low: float, high: float) -> float:
    """x moved into [low, high]."""
    return low if x < low else high if x > high else x


def entropy_clip_eps(entropies: list[float], tau: list[int], alpha: float, log_vocab: float) -> float:
    """Half-width of the clip interval of a group of tokens.

        eps_tau = alpha / log|V| mean_{t in tau} e_t

    Our reading of ESPO, eq. 8.
    """
    return alpha / log_vocab * (sum(entropies[t] for t in tau) / len(tau))


def entropy_clip_eps_over(entropies, count: int, t: int, alpha: float, log_vocab: float) -> float:
    """Half-width of the clip interval of one token, as printed.

        eps_t = alpha / log|V| e_t / |tau|

    ESPO, eq. 8; |tau| is count: the tokens of the group, or the groups of the completion.
    """
    return alpha / log_vocab * entropies[t] / count


def is_clipped(ratio: float, advantage: float, eps_low: float, eps_high: float) -> bool:
    """Whether the min of the surrogate takes its clipped branch; on a tie it does not."""
    return clip(ratio, 1.0 - eps_low, 1.0 + eps_high) * advantage < ratio * advantage


def clipped_surrogate(ratio: float, advantage: float, eps_low: float, eps_high: float) -> float:
    """Pessimistic gain of one token.

        min( r A, clip(r, 1 - eps_low, 1 + eps_high) A )

    DAPO, eq. 8; with eps_low = eps_high DeepSeekMath, eq. 3 (PPO, arXiv 1707.06347, eq. 7).
    """
    return min(ratio * advantage, clip(ratio, 1.0 - eps_low, 1.0 + eps_high) * advantage)


def clipped_surrogate_slope(ratio, advantage, eps_low, eps_high, ratio_slope: float) -> float:
    """A dr on the first branch; 0 on the clipped one, which is constant."""
    return 0.0 if is_clipped(ratio, advantage, eps_low, eps_high) else advantage * ratio_slope


def cispo_objective(ratio: float, advantage: float, logprob: float, eps_low: float, eps_high: float) -> float:
    """Gain of one token whose ratio is a bounded weight.

        sg[clip(r, 1 - eps_low, 1 + eps_high)] A log pi

    CISPO, arXiv 2506.13585, eq. 4 and 5.
    """
    return clip(ratio, 1.0 - eps_low, 1.0 + eps_high) * advantage * logprob


def cispo_objective_slope(ratio: float, advantage: float, eps_low: float, eps_high: float) -> float:
    """The bounded weight times A: no token loses its gradient."""
    return clip(ratio, 1.0 - eps_low, 1.0 + eps_high) * advantage


def gmpo_log_ratio(log_ratio: float, advantage: float, eps_low: float, eps_high: float) -> float:
    """Log ratio of one token after the clip that looks worse for the sign of A.

        log min(r, clip(r))  if A > 0,   log max(r, clip(r))  if A < 0,   clip to [1 - eps_low, 1 + eps_high]

    GMPO, arXiv 2507.20673, eq. 4: | min(r A, clip(r) A) | / |A|. Where A = 0 the objective is 0 anyhow.
    """
    low = math.log(1.0 - eps_low) if eps_low < 1.0 else -math.inf
    clipped = clip(log_ratio, low, math.log(1.0 + eps_high))
    return min(log_ratio, clipped) if advantage > 0.0 else max(log_ratio, clipped)


def gmpo_log_ratio_slope(log_ratio: float, advantage: float, eps_low: float, eps_high: float) -> float:
    """1 where it is not clipped, else 0."""
    return float(gmpo_log_ratio(log_ratio, advantage, eps_low, eps_high) == log_ratio)


# ---- 7. KL penalty -----------------------------------------------------------------------------------------
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


# ---- 8. Weights of tokens ----------------------------------------------------------------------------------
def sequence_mean_weight(num_tokens: int, num_completions: int) -> float:
    """Weight of one token in the mean over completions of the mean over tokens.

        w_{i,t} = 1 / (N T_i)

    DeepSeekMath, eq. 3, with N the completions of all prompts of the update (its expectation is a mean too).
    """
    return 1.0 / (num_completions * num_tokens)


def token_mean_weight(num_tokens_of_all: int) -> float:
    """Weight of one token in the mean over tokens: 1 / sum_i T_i. DAPO, eq. 8."""
    return 1.0 / num_tokens_of_all


def token_group_mean_weight(size_of_tau: int, num_groups: int, num_completions: int) -> float:
    """Weight of one token in the mean over completions of the mean over groups of the mean over tokens.

        w_{i,t} = 1 / (N K_i |tau|)

    ESPO, eq. 5; K_i counts the groups of completion i that have tokens.
    """
    return 1.0 / (num_completions * num_groups * size_of_tau)


def fixed_length_weight(max_new_tokens: int, num_completions: int) -> float:
    """Weight of one token in a sum over tokens that is divided by a constant: 1 / (N L). Dr.GRPO."""
    return 1.0 / (num_completions * max_new_tokens)


def token_weight(tau, groups, num_tokens, num_completions, num_tokens_of_all, settings: dict) -> float:
    """Weight of a token of the group tau, one of `groups` of a completion of num_tokens tokens."""
    if settings["loss_agg"] == "sequence_mean":
        return sequence_mean_weight(num_tokens, num_completions)
    if settings["loss_agg"] == "token_mean":
        return token_mean_weight(num_tokens_of_all)
    if settings["loss_agg"] == "token_group_mean":
        return token_group_mean_weight(len(tau), len(groups), num_completions)
    if settings["loss_agg"] == "fixed_length":
        return fixed_length_weight(settings["max_new_tokens"], num_completions)
    raise KeyError(settings["loss_agg"])


# ---- 9. Objectives -----------------------------------------------------------------------------------------
@dataclass
class Term:
    """What one token adds to the objective, before its weight."""

    ratio: float
    clipped: bool
    value: float
    slopes: dict[int, float]  # {u: d value / d logprob_u}, u among the tokens of the completion
    clip_eps: float | None = None  # only where it depends on the token


def term(t, tau, groups, logprobs, log_ratios, advantages, entropies, settings: dict) -> Term:
    """The objective of token t of the group tau, one of `groups`; the lists are those of the completion."""
    form, advantage = settings["ratio_form"], advantages[t]
    low, high = settings["clip_eps_low"], settings["clip_eps_high"]
    ratio = group_ratio(log_ratios, tau, t, form)
    slopes = {u: group_ratio_slope(log_ratios, tau, t, u, form) for u in tau}
    if settings["clip_mode"] == "none":
        return Term(ratio, False, ratio * advantage, {u: s * advantage for u, s in slopes.items()})
    if settings["clip_mode"] in ("fixed", "entropy_adaptive"):
        eps = None
        if settings["clip_mode"] == "entropy_adaptive":
            alpha, log_vocab = settings["entropy_clip_coef"], settings["log_vocab"]
            if settings["entropy_clip_form"] == "token_group_mean":
                eps = entropy_clip_eps(entropies, tau, alpha, log_vocab)
            else:
                count = {"over_token_groups": len(groups), "over_tokens": len(tau)}
                eps = entropy_clip_eps_over(
                    entropies, count[settings["entropy_clip_form"]], t, alpha, log_vocab
                )
            low = high = eps
        value = clipped_surrogate(ratio, advantage, low, high)
        slopes = {u: clipped_surrogate_slope(ratio, advantage, low, high, s) for u, s in slopes.items()}
        return Term(ratio, is_clipped(ratio, advantage, low, high), value, slopes, eps)
    if settings["clip_mode"] == "weight":
        value = cispo_objective(ratio, advantage, logprobs[t], low, high)
        slope = cispo_objective_slope(ratio, advantage, low, high)
        return Term(ratio, clip(ratio, 1.0 - low, 1.0 + high) != ratio, value, {t: slope})
    if settings["clip_mode"] == "before_mean":
        bounded = [gmpo_log_ratio(x, a, low, high) for x, a in zip(log_ratios, advantages)]
        value = group_ratio(bounded, tau, t, form) * advantage
        slopes = {
            u: group_ratio_slope(bounded, tau, t, u, form)
            * gmpo_log_ratio_slope(log_ratios[u], advantages[u], low, high)
            * advantage
            for u in tau
        }
        return Term(ratio, bounded[t] != log_ratios[t], value, slopes)
    raise KeyError(settings["clip_mode"])


def policy_terms(logprobs, old_logprobs, advantages, entropies, settings: dict):
    """(i, t, weight, Term) of every token. N and the number of tokens are those of the lists, by default."""
    num_completions = settings.get("num_completions", len(logprobs))
    num_tokens_of_all = settings.get("num_tokens", sum(len(row) for row in logprobs))
    for i in range(len(logprobs)):
        log_ratios = [new - old for new, old in zip(logprobs[i], old_logprobs[i])]
        groups = token_groups_of(entropies[i], settings["ratio_level"], settings["entropy_groups"])
        for tau in groups:
            for t in tau:
                counts = (len(logprobs[i]), num_completions, num_tokens_of_all)
                one = term(t, tau, groups, logprobs[i], log_ratios, advantages[i], entropies[i], settings)
                yield i, t, token_weight(tau, groups, *counts, settings), one


def policy_objective(logprobs, old_logprobs, advantages, entropies, ref_logprobs, settings: dict) -> float:
    """What a method maximises, its parts named by settings.

        J = sum_i sum_t w_{i,t} { objective_{i,t} - beta KL_k3 }

    settings: the names of the sections above, and max_new_tokens, log_vocab, kl_coef.
    """
    total = 0.0
    for i, t, weight, one in policy_terms(logprobs, old_logprobs, advantages, entropies, settings):
        total += weight * one.value
        if settings["kl_coef"]:
            total -= weight * settings["kl_coef"] * kl_k3(logprobs[i][t], ref_logprobs[i][t])
    return total


def policy_objective_slope(
    logprobs, old_logprobs, advantages, entropies, ref_logprobs, settings: dict
) -> list:
    """dJ / dlogprob_{i,t}, term by term."""
    slopes = [[0.0 for _ in row] for row in logprobs]
    for i, t, weight, one in policy_terms(logprobs, old_logprobs, advantages, entropies, settings):
        for u, slope in one.slopes.items():
            slopes[i][u] += weight * slope
        if settings["kl_coef"]:
            slopes[i][t] -= weight * settings["kl_coef"] * kl_k3_slope(logprobs[i][t], ref_logprobs[i][t])
    return slopes


def grpo_objective(logprobs, old_logprobs, advantages, ref_logprobs, clip_eps, kl_coef) -> float:
    """What GRPO maximises.

        J = 1/N sum_i 1/T_i sum_t { min( r A, clip(r, 1 - eps, 1 + eps) A ) - beta KL_k3 }

    DeepSeekMath, eq. 3 and 4, N as in sequence_mean_weight(). A completion without tokens adds 0 and counts
    in N.
    """
    total = 0.0
    for i in range(len(logprobs)):
        for t in range(len(logprobs[i])):
            ratio = importance_ratio(logprobs[i][t], old_logprobs[i][t])
            gain = clipped_surrogate(ratio, advantages[i][t], clip_eps, clip_eps)
            if kl_coef:
                gain -= kl_coef * kl_k3(logprobs[i][t], ref_logprobs[i][t])
            total += sequence_mean_weight(len(logprobs[i]), len(logprobs)) * gain
    return total


def grpo_objective_slope(logprobs, old_logprobs, advantages, ref_logprobs, clip_eps, kl_coef) -> list:
    """dJ / dlogprob_{i,t}, term by term; dr / dlogprob = r."""
    slopes = []
    for i in range(len(logprobs)):
        slopes.append([])
        for t in range(len(logprobs[i])):
            ratio = importance_ratio(logprobs[i][t], old_logprobs[i][t])
            slope = clipped_surrogate_slope(ratio, advantages[i][t], clip_eps, clip_eps, ratio)
            if kl_coef:
                slope -= kl_coef * kl_k3_slope(logprobs[i][t], ref_logprobs[i][t])
            slopes[i].append(sequence_mean_weight(len(logprobs[i]), len(logprobs)) * slope)
    return slopes


def warmed_up_learning_rate(learning_rate: float, warmup_steps: int, step: int) -> float:
    """Rate of update number step (from 0): it rises in equal parts and is whole after warmup_steps updates.

    lr (step + 1) / (warmup_steps + 1),   at most lr
    """
    return learning_rate if step >= warmup_steps else learning_rate * (step + 1) / (warmup_steps + 1)
