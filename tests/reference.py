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
def centred_rewards(rewards: list[float], valid: list[bool]) -> list[Fraction]:
    """R_i - mean R over the valid completions of a group, exactly; 0 where nothing is to be learned.

    That is for an invalid completion, all of a group with fewer than two valid ones, and all of a group whose
    valid rewards are equal.
    """
    counted = [Fraction(reward) for reward, ok in zip(rewards, valid) if ok]
    if len(counted) < 2 or max(counted) - min(counted) <= ZERO_VARIANCE:
        return [Fraction(0) for _ in rewards]
    mean = sum(counted) / len(counted)
    return [Fraction(reward) - mean if ok else Fraction(0) for reward, ok in zip(rewards, valid)]


def batch_std(groups: list[tuple[list[float], list[bool]]]) -> float:
    """Standard deviation (n - 1) of the centred rewards of the valid completions of all (rewards, valid)."""
    centred = [x for rewards, valid in groups for x, ok in zip(centred_rewards(rewards, valid), valid) if ok]
    return math.sqrt(sum(x * x for x in centred) / max(1, len(centred) - 1))


def group_advantages(
    rewards: list[float],
    valid: list[bool],
    adv_norm: str = "group_std",
    tie_band: float = 0.0,
    eps: float = 1e-6,
    std_of_batch: float = math.nan,
) -> list[float]:
    """Advantage of each completion of one group (outcome supervision: the same for all of its tokens).

        group_std      A_i = (R_i - mean R) / (std R + eps)       DeepSeekMath, arXiv 2402.03300, 4.1.2
        mean_only      A_i = R_i - mean R                         Dr.GRPO, arXiv 2503.20783
        batch_std      A_i = (R_i - mean R) / (std_batch + eps)   ScaleRL, arXiv 2510.13786
        group_mean     A_i = (R_i - mean R) / mean R              MaxRL, arXiv 2602.02710
        leave_one_out  A_i = R_i - mean of the others' R          RLOO, arXiv 2402.14740

    mean and std are over the valid completions (ESPO, arXiv 2512.00499, eq. 11) and std divides by n - 1. A
    reward within tie_band of the mean has A_i = 0. The mean is an exact fraction, so that equal rewards give
    exactly 0.
    """
    advantages = []
    counted = [Fraction(reward) for reward, ok in zip(rewards, valid) if ok]
    for reward, centred in zip(rewards, centred_rewards(rewards, valid)):
        if centred == 0 or abs(centred) <= tie_band:
            advantages.append(0.0)
            continue
        mean = sum(counted) / len(counted)
        variance = sum((one - mean) ** 2 for one in counted) / (len(counted) - 1)
        if adv_norm == "group_std":
            advantages.append(float(centred) / (math.sqrt(variance) + eps))
        elif adv_norm == "mean_only":
            advantages.append(float(centred))
        elif adv_norm == "batch_std":
            advantages.append(float(centred) / (std_of_batch + eps))
        elif adv_norm == "group_mean":
            advantages.append(float(centred / mean) if mean > ZERO_VARIANCE else 0.0)
        elif adv_norm == "leave_one_out":
            others = (sum(counted) - Fraction(reward)) / (len(counted) - 1)
            advantages.append(float(Fraction(reward) - others))
        else:
            raise KeyError(adv_norm)
    return advantages


def gdpo_advantages(groups: list[dict], tie_band: float, eps: float = 1e-6) -> list[list[float]]:
    """Advantages of groups with several rewards, each normalised by itself.

        A_i^sum = sum_k w_k (r_i^k - mean r^k) / (std r^k + eps),   A_i = A_i^sum / (std_batch A^sum + eps)

    GDPO, arXiv 2601.05242. group: {"weights": {k: w_k}, "rewards": {k: [r_i^k]}, "valid": [bool]}; weights
    are divided by their sum. std_batch is over the valid completions of all groups.
    """
    sums = []
    for group in groups:
        total = [0.0] * len(group["valid"])
        for part, weight in group["weights"].items():
            of_part = group_advantages(group["rewards"][part], group["valid"], tie_band=tie_band)
            total = [t + weight / sum(group["weights"].values()) * a for t, a in zip(total, of_part)]
        sums.append(total)
    counted = [a for group, row in zip(groups, sums) for a, ok in zip(row, group["valid"]) if ok]
    std = math.sqrt(sum(a * a for a in counted) / max(1, len(counted) - 1))
    return [[a / (std + eps) for a in row] for row in sums]


def correctness_guard(advantage: float, correct: bool) -> float:
    """The advantage, but 0 where its sign contradicts the verifier."""
    if correct and advantage < 0.0 or not correct and advantage > 0.0:
        return 0.0
    return advantage


def sign_weights(groups: list[dict], share: float) -> list[float]:
    """Weights of the completions of all groups by how certain the signs of their advantages are.

        r_i = |R_i - mean R| / ||g_i - mean g||,    weight = max(0, 1 - Delta / r_i)

    SignCert-PO, arXiv 2604.02986. A group: rewards, gradients (lists of numbers, of each reward by the head
    of the judge) and valid. Means are those of the valid ones; a group whose rewards are equal has no radii.
    Delta is the smallest positive radius but for the smallest share of them; it is at most the largest.
    """
    radii = []
    for group in groups:
        counted = [i for i, ok in enumerate(group["valid"]) if ok]
        mean = lambda values: sum(values) / len(values)
        for i, ok in enumerate(group["valid"]):
            counted_rewards = [group["rewards"][j] for j in counted]
            if not ok or max(counted_rewards) - min(counted_rewards) <= ZERO_VARIANCE:
                radii.append(0.0)
                continue
            centre = mean([group["rewards"][j] for j in counted])
            square = 0.0
            for k, value in enumerate(group["gradients"][i]):
                square += (value - mean([group["gradients"][j][k] for j in counted])) ** 2
            radii.append(abs(group["rewards"][i] - centre) / max(1e-12, math.sqrt(square)))
    positive = sorted(radius for radius in radii if radius > 0)
    num_kept = max(1, len(positive) - math.floor(share * len(positive) + 1e-9))
    delta = positive[len(positive) - num_kept] if positive else math.inf
    return [1 - delta / radius if radius > delta else 0.0 for radius in radii]


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
    std_of_batch = settings.get("std_of_batch", math.nan)
    norm = settings["adv_norm"], settings["tie_band"]
    advantages = group_advantages(rewards, valid, *norm, std_of_batch=std_of_batch)
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


def token_mask(old_logprob: float, rollout_logprob: float, cap: float, floor: float) -> float:
    """Importance weight of a token, which is left out outside of [floor, cap].

    IcePop, arXiv 2510.18855.
    """
    ratio = math.exp(old_logprob - rollout_logprob)
    return ratio if floor <= ratio <= cap else 0.0


def geometric_mask(
    old_logprobs: list[float], rollout_logprobs: list[float], cap: float, floor: float
) -> float:
    """1 if the geometric mean of a completion's token ratios is in [floor, cap], else 0."""
    mean = sum(old - rollout for old, rollout in zip(old_logprobs, rollout_logprobs)) / len(old_logprobs)
    return float(floor <= math.exp(mean) <= cap)


def correction_weight(old_logprobs, rollout_logprobs, t, rollout_correction, cap, floor=0.0) -> float:
    """Weight of the advantage of token t of one completion."""
    if rollout_correction == "none":
        return 1.0
    if rollout_correction == "token_tis":
        return max(floor, token_tis(old_logprobs[t], rollout_logprobs[t], cap))
    if rollout_correction == "token_mask":
        return token_mask(old_logprobs[t], rollout_logprobs[t], cap, floor)
    if rollout_correction == "geometric_mask":
        return geometric_mask(old_logprobs, rollout_logprobs, cap, floor)
    if rollout_correction == "sequence_tis":
        return max(floor, sequence_tis(old_logprobs, rollout_logprobs, cap))
    if rollout_correction == "sequence_mask":
        weight = sequence_mask(old_logprobs, rollout_logprobs, cap)
        return weight if weight >= floor else 0.0
    raise KeyError(rollout_correction)


def off_policy_mask(logprobs, rollout_logprobs, advantage: float, limit: float) -> float:
    """0 for a completion with A < 0 that the policy has moved away from, else 1.

        M = 0   if A < 0 and 1/T sum_t log(pi_rollout / pi) > limit

    DeepSeek-V3.2, arXiv 2512.02556, eq. 9.
    """
    apart = sum(old - new for old, new in zip(rollout_logprobs, logprobs)) / len(logprobs)
    return 0.0 if limit > 0.0 and advantage < 0.0 and apart > limit else 1.0


def most_uncertain(entropies: list[list[float]], share: float) -> list[list[bool]]:
    """Which tokens are among the share of all that has the highest entropy.

        1[ H_{i,t} >= tau ],   tau the ceil(share N)-th largest of N entropies

    "Beyond the 80/20 rule", arXiv 2506.01939, eq. 5. The share is the decimal it is written as.
    """
    everything = sorted((entropy for row in entropies for entropy in row), reverse=True)
    num = math.ceil(Fraction(Decimal(str(share))) * len(everything))
    return [[entropy >= everything[num - 1] for entropy in row] for row in entropies]


def covariances(advantages: list[list[float]], logprobs: list[list[float]]) -> list[list[float]]:
    """(A_t - mean A) (log pi(y_t) - mean log pi), means over all tokens. arXiv 2505.22617, eq. 10."""
    num = sum(map(len, advantages))
    mean_a, mean_l = (sum(map(sum, rows)) / num for rows in (advantages, logprobs))
    return [[(a - mean_a) * (x - mean_l) for a, x in zip(*rows)] for rows in zip(advantages, logprobs)]


def kl_cov_tokens(advantages, logprobs, share: float) -> list[list[bool]]:
    """Which tokens have a KL term in KL-Cov: the share of all, at least one, with the largest covariance."""
    rows = covariances(advantages, logprobs)
    in_order = sorted((x for row in rows for x in row), reverse=True)
    last = in_order[max(1, int(share * len(in_order))) - 1]
    return [[x >= last for x in row] for row in rows]


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


def two_sided_surrogate(ratio, advantage, eps_low, eps_high, cap: float) -> float:
    """Pessimistic gain of one token whose cost is bounded.

        min( min(r, cap) A, clip(r, 1 - eps_low, 1 + eps_high) A )

    INTELLECT-2, arXiv 2505.07291, with delta = cap; for A < 0 dual clip, arXiv 1912.09729, with c = cap.
    """
    return min(min(ratio, cap) * advantage, clip(ratio, 1.0 - eps_low, 1.0 + eps_high) * advantage)


def loses_gradient(ratio, advantage, eps_low, eps_high, cap: float) -> bool:
    """Whether the two-sided surrogate is constant there; on an edge it is not."""
    return is_clipped(ratio, advantage, eps_low, eps_high) or advantage < 0.0 and ratio > cap


def soft_objective(ratio: float, advantage: float, temperatures: tuple[float, float]) -> float:
    """Gain of one token with a soft clip.

        4 / tau sigmoid(tau (r - 1)) A,   tau by the sign of A

    SAPO, arXiv 2511.20347.
    """
    tau = temperatures[0] if advantage > 0.0 else temperatures[1]
    return 4.0 / tau * sigmoid(tau * (ratio - 1.0)) * advantage


def soft_objective_slope(ratio, advantage, temperatures, ratio_slope: float) -> float:
    """4 sigmoid (1 - sigmoid) A dr."""
    tau = temperatures[0] if advantage > 0.0 else temperatures[1]
    x = tau * (ratio - 1.0)
    return 4.0 * sigmoid(x) * sigmoid(-x) * advantage * ratio_slope


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)) without overflow."""
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0.0 else math.exp(x) / (1.0 + math.exp(x))


def is_too_far(logprob, old_logprob, advantage, divergence: str, eps_low, eps_high) -> bool:
    """Whether DPPO leaves a token out: it moved by more than eps, and the update would move it further.

        total_variation   |p - p_old|
        binary_kl         p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))

    DPPO, arXiv 2602.04879. 1 - p is at least 1e-8.
    """
    new, old = math.exp(logprob), math.exp(old_logprob)
    if divergence == "total_variation":
        distance = abs(new - old)
    else:
        rest_new, rest_old = max(1.0 - new, 1e-8), max(1.0 - old, 1e-8)
        distance = old * (old_logprob - logprob) + (1.0 - old) * (math.log(rest_old) - math.log(rest_new))
    if advantage > 0.0:
        return new > old and distance > eps_high
    return advantage < 0.0 and new < old and distance > eps_low


def vespo_weight(log_ratios: list[float], advantage: float, powers, decays) -> float:
    """Weight of the tokens of a completion.

        W^k exp(lambda (1 - W)),   W = prod_t r_t in [1e-8, e^20],   k and lambda by A >= 0

    VESPO, arXiv 2602.10693.
    """
    log_w = clip(sum(log_ratios), math.log(1e-8), 20.0)
    negative = int(advantage < 0.0)
    exponent = powers[negative] * log_w + decays[negative] * (1.0 - math.exp(log_w))
    return math.exp(exponent) if exponent > -700.0 else 0.0


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


def sequence_sum_weight(num_completions: int) -> float:
    """Weight of one token in the mean over completions of the sum over tokens: 1 / N. LUSPO, 2602.05261."""
    return 1.0 / num_completions


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
    if settings["loss_agg"] == "sequence_sum":
        return sequence_sum_weight(num_completions)
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


def term(t, tau, groups, logprobs, old_logprobs, advantages, entropies, settings: dict) -> Term:
    """The objective of token t of the group tau, one of `groups`; the lists are those of the completion."""
    log_ratios = [new - old for new, old in zip(logprobs, old_logprobs)]
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
        edges = low, high, settings["clip_cap"] or math.inf
        clipped = loses_gradient(ratio, advantage, *edges)
        slopes = {u: 0.0 if clipped else advantage * slope for u, slope in slopes.items()}
        return Term(ratio, clipped, two_sided_surrogate(ratio, advantage, *edges), slopes, eps)
    if settings["clip_mode"] == "soft":
        value = soft_objective(ratio, advantage, settings["soft_temperatures"])
        temperatures = settings["soft_temperatures"]
        slopes = {u: soft_objective_slope(ratio, advantage, temperatures, s) for u, s in slopes.items()}
        return Term(ratio, False, value, slopes)
    if settings["clip_mode"] in ("total_variation", "binary_kl"):
        too_far = is_too_far(logprobs[t], old_logprobs[t], advantage, settings["clip_mode"], low, high)
        weight = 0.0 if too_far else min(ratio, settings["clip_cap"] or math.inf) * advantage
        return Term(ratio, too_far, weight * logprobs[t], {t: weight})
    if settings["clip_mode"] == "gamma":
        weight = vespo_weight(log_ratios, advantage, settings["gamma_powers"], settings["gamma_decays"])
        return Term(ratio, False, weight * advantage * logprobs[t], {t: weight * advantage})
    if settings["clip_mode"] == "weight":
        value = cispo_objective(ratio, advantage, logprobs[t], low, high)
        slope = cispo_objective_slope(ratio, advantage, low, high)
        return Term(ratio, clip(ratio, 1.0 - low, 1.0 + high) != ratio, value, {t: slope})
    if settings["clip_mode"] == "before_mean":
        of_group = sum(advantages[u] for u in tau)  # its sign is that of tokens that a mask has set to 0
        signs = [a or of_group for a in advantages]
        bounded = [gmpo_log_ratio(x, sign, low, high) for x, sign in zip(log_ratios, signs)]
        value = group_ratio(bounded, tau, t, form) * advantage
        slopes = {
            u: group_ratio_slope(bounded, tau, t, u, form)
            * gmpo_log_ratio_slope(log_ratios[u], signs[u], low, high)
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
        groups = token_groups_of(entropies[i], settings["ratio_level"], settings["entropy_groups"])
        for tau in groups:
            for t in tau:
                counts = (len(logprobs[i]), num_completions, num_tokens_of_all)
                lists = (logprobs[i], old_logprobs[i], advantages[i], entropies[i])
                one = term(t, tau, groups, *lists, settings)
                yield i, t, token_weight(tau, groups, *counts, settings), one


def kl_penalty(logprob, old_logprob, ref_logprob, form: str) -> float:
    """KL to the reference from one token.

    k3         k3                    DeepSeekMath, eq. 4
    unbiased   r k3, r = pi/pi_old   DeepSeek-V3.2, arXiv 2512.02556, eq. 7
    """
    k3 = kl_k3(logprob, ref_logprob)
    return k3 if form == "k3" else math.exp(logprob - old_logprob) * k3


def kl_penalty_slope(logprob, old_logprob, ref_logprob, form: str) -> float:
    """That of k3; of r k3 it is r k3 + r (1 - pi_ref / pi) = r (log pi - log pi_ref)."""
    if form == "k3":
        return kl_k3_slope(logprob, ref_logprob)
    return math.exp(logprob - old_logprob) * (logprob - ref_logprob)


def policy_objective(logprobs, old_logprobs, advantages, entropies, ref_logprobs, settings: dict) -> float:
    """What a method maximises, its parts named by settings.

        J = sum_i sum_t w_{i,t} { objective_{i,t} - beta KL - beta_cov |log r_{i,t}| }

    settings: the names of the sections above, max_new_tokens, log_vocab, kl_coef, and optionally penalised,
    which tokens have the last term (KL-Cov, arXiv 2505.22617).
    """
    total = 0.0
    for i, t, weight, one in policy_terms(logprobs, old_logprobs, advantages, entropies, settings):
        new, old, ref = logprobs[i][t], old_logprobs[i][t], ref_logprobs[i][t]
        total += weight * one.value
        if settings["kl_coef"]:
            total -= weight * settings["kl_coef"] * kl_penalty(new, old, ref, settings["kl_form"])
        if "penalised" in settings and settings["penalised"][i][t]:
            total -= weight * settings["covariance_kl_coef"] * abs(new - old)
    return total


def policy_objective_slope(
    logprobs, old_logprobs, advantages, entropies, ref_logprobs, settings: dict
) -> list:
    """dJ / dlogprob_{i,t}, term by term."""
    slopes = [[0.0 for _ in row] for row in logprobs]
    for i, t, weight, one in policy_terms(logprobs, old_logprobs, advantages, entropies, settings):
        new, old, ref = logprobs[i][t], old_logprobs[i][t], ref_logprobs[i][t]
        for u, slope in one.slopes.items():
            slopes[i][u] += weight * slope
        if settings["kl_coef"]:
            slopes[i][t] -= (
                weight * settings["kl_coef"] * kl_penalty_slope(new, old, ref, settings["kl_form"])
            )
        if "penalised" in settings and settings["penalised"][i][t]:
            slopes[i][t] -= weight * settings["covariance_kl_coef"] * ((new > old) - (new < old))
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
