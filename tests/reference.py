"""The equations of the method as slow, literal loops over Python floats, the oracle of the tests.

One function per equation, with a sentence, the formula and the source. The project is not imported. x[i][t]
belongs to token t of completion i. Lists are ragged, without padding and masks. Log-probabilities
and entropies are in nats. Choices have the names of the settings and of the plug-ins in experiments/plugins.

A function named *_slope is the derivative of its equation by the log-probability of a token, written out by
hand. If tokens share a value, the derivative is by the log-probability of token u. A ratio exactly on the
edge of a clip counts as unclipped.

    r_t = pi(y_t) / pi_old(y_t)     tau: the indices of the tokens of one token group of a completion
"""

import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

ZERO_VARIANCE = 1e-6  # a group has zero variance if its rewards lie this close together


# ---- 1. Rewards --------------------------------------------------------------------------------------------
def soft_overlong_punishment(num_tokens: int, max_tokens: int, cache: int) -> float:
    """Return the penalty of a long completion, which grows over the last `cache` tokens; 0 without a cache.

        0                                     if |y| <= L_max - L_cache
        ((L_max - L_cache) - |y|) / L_cache   if L_max - L_cache < |y| <= L_max
        -1                                    if L_max < |y|

    DAPO, arXiv 2503.14476, eq. 13.
    """
    if cache == 0 or num_tokens <= max_tokens - cache:
        return 0.0
    if num_tokens <= max_tokens:
        return ((max_tokens - cache) - num_tokens) / cache
    return -1.0


def repetition_ratio(token_ids: list[int], n: int) -> float:
    """Return the fraction of a completion's n-grams that repeat an earlier n-gram; 0 without n-grams."""
    ngrams = []
    num_repeats = 0
    for start in range(len(token_ids)):
        ngram = token_ids[start : start + n]
        if len(ngram) == n:
            num_repeats += ngram in ngrams
            ngrams.append(ngram)
    return num_repeats / len(ngrams) if ngrams else 0.0


def shaped_reward(score, judged, judge_weight, overlong_coef, overlong, repetition_coef, repetition) -> float:
    """Return the reward of a completion from the verifier's score and the judge's (None: no judge).

        (1 - w) score + w judged + c_overlong overlong - c_repetition repetition

    overlong <= 0 is a penalty, repetition >= 0 a fraction.
    """
    reward = score if judged is None else (1.0 - judge_weight) * score + judge_weight * judged
    return reward + overlong_coef * overlong - repetition_coef * repetition


# ---- 2. Advantages -----------------------------------------------------------------------------------------
def has_zero_variance(values: list[float]) -> bool:
    """Tell whether a group of two or more rewards or scores has no variance."""
    return len(values) >= 2 and max(values) - min(values) <= ZERO_VARIANCE


def centred_rewards(rewards: list[float], valid: list[bool]) -> list[Fraction]:
    """Return R_i - mean R over the valid completions of a group, as exact fractions.

    An invalid completion gets 0, and so do all completions of a group with fewer than two valid rewards or
    with zero variance.
    """
    counted = [Fraction(reward) for reward, ok in zip(rewards, valid) if ok]
    if len(counted) < 2 or has_zero_variance(counted):
        return [Fraction(0) for _ in rewards]
    mean = sum(counted) / len(counted)
    return [Fraction(reward) - mean if ok else Fraction(0) for reward, ok in zip(rewards, valid)]


def batch_std(groups: list[tuple[list[float], list[bool]]]) -> float:
    """Return the standard deviation (n - 1) of all centred rewards; groups: (rewards, valid) pairs."""
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
    """Return the advantage of each completion of a group (outcome supervision: equal for all tokens).

        group_std   A_i = (R_i - mean R) / (std R + eps)          DeepSeekMath, arXiv 2402.03300, 4.1.2
        mean_only   A_i = R_i - mean R                            Dr.GRPO, arXiv 2503.20783
        batch_std   A_i = (R_i - mean R) / (std_batch + eps)      ScaleRL, arXiv 2510.13786
        maxrl       A_i = (R_i - mean R) / mean R                 MaxRL, arXiv 2602.02710
        rloo        A_i = R_i - mean R_j over j != i              RLOO, arXiv 2402.14740

    mean and std are over the valid completions (ESPO, arXiv 2512.00499, eq. 11), and std divides by n - 1. A
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
        variance = sum((x - mean) ** 2 for x in counted) / (len(counted) - 1)
        if adv_norm == "group_std":
            advantages.append(float(centred) / (math.sqrt(variance) + eps))
        elif adv_norm == "mean_only":
            advantages.append(float(centred))
        elif adv_norm == "batch_std":
            advantages.append(float(centred) / (std_of_batch + eps))
        elif adv_norm == "maxrl":
            advantages.append(float(centred / mean) if mean > ZERO_VARIANCE else 0.0)
        elif adv_norm == "rloo":
            baseline = (sum(counted) - Fraction(reward)) / (len(counted) - 1)
            advantages.append(float(Fraction(reward) - baseline))
        else:
            raise KeyError(adv_norm)
    return advantages


def gdpo_advantages(groups: list[dict], eps: float = 1e-6) -> list[list[float]]:
    """Return the advantages of groups with several rewards, each normalised within its group.

        A_i^sum = sum_k w_k (r_i^k - mean r^k) / (std r^k + eps),   A_i = A_i^sum / (std_batch A^sum + eps)

    GDPO, arXiv 2601.05242. group: {"weights": {k: w_k}, "rewards": {k: [r_i^k]}, "valid": [bool]}. Weights
    are divided by their sum. std_batch is over the valid completions of all groups.
    """
    sums = []
    for group in groups:
        total = [0.0] * len(group["valid"])
        for kind, weight in group["weights"].items():
            of_kind = group_advantages(group["rewards"][kind], group["valid"])
            total = [t + weight / sum(group["weights"].values()) * a for t, a in zip(total, of_kind)]
        sums.append(total)
    counted = [a for group, row in zip(groups, sums) for a, ok in zip(row, group["valid"]) if ok]
    std = math.sqrt(sum(a * a for a in counted) / max(1, len(counted) - 1))
    return [[a / (std + eps) for a in row] for row in sums]


def verifier_signs(scores: list[float], valid: list[bool]) -> list[int]:
    """Return the side of its group's mean on which each score lies: +1, -1 or 0.

    Among equal scores, a score of 1 has +1, a score of 0 has -1 and a fraction 0. Without a verdict: 0.
    """
    counted = [Fraction(score) for score, ok in zip(scores, valid) if ok]
    signs = []
    for score, ok in zip(scores, valid):
        if not ok:
            signs.append(0)
        elif max(counted) - min(counted) <= ZERO_VARIANCE:
            signs.append({1.0: 1, 0.0: -1}.get(score, 0))
        else:
            excess = len(counted) * Fraction(score) - sum(counted)
            signs.append((excess > 0) - (excess < 0))
    return signs


def correctness_guard(advantage: float, sign: int) -> float:
    """Return the advantage, or 0 if its sign contradicts the verifier's."""
    return 0.0 if advantage * sign < 0 else advantage


def rl_zvp_advantages(entropies: list[float], reward: float, alpha: float) -> list[float]:
    """Return the advantage of each token of a completion whose group has zero variance.

        R > 0    +alpha H_t
        R = 0    -alpha (max_k H_k - H_t)

    RL-ZVP, arXiv 2509.21880, eq. 5.
    """
    if reward > 0.0:
        return [alpha * entropy for entropy in entropies]
    return [-alpha * (max(entropies) - entropy) for entropy in entropies]


def token_advantages(rewards, scores, valid, entropies, settings: dict) -> list[list[float]]:
    """Return the advantage of each token of the completions of one group.

    scores: the verifier's part of the rewards, which decides about zero variance. settings: adv_norm,
    tie_band, correctness_guard, rl_zvp, rl_zvp_coef.
    """
    std_of_batch = settings.get("std_of_batch", math.nan)
    advantages = group_advantages(
        rewards, valid, settings["adv_norm"], settings["tie_band"], std_of_batch=std_of_batch
    )
    rows = [[a for _ in row] for a, row in zip(advantages, entropies)]
    if settings["rl_zvp"] and has_zero_variance([score for score, ok in zip(scores, valid) if ok]):
        for i in range(len(rewards)):
            if valid[i]:
                rows[i] = rl_zvp_advantages(entropies[i], scores[i], settings["rl_zvp_coef"])
    if settings["correctness_guard"]:
        signs = verifier_signs(scores, valid)
        rows = [[correctness_guard(a, sign) for a in row] for row, sign in zip(rows, signs)]
    return rows


# ---- 3. Rollout correction, masks, selection of tokens -----------------------------------------------------
def correction_weight(old_logprobs, rollout_logprobs, t, rollout_correction, cap, floor=0.0) -> float:
    """Return the importance weight of token t of a completion, trainer over engine.

        token_tis        max(c, min(x_t, C))                        truncated importance sampling
        token_mask       x_t if c <= x_t <= C, else 0               IcePop, arXiv 2510.18855
        sequence_tis     max(c, min(prod_t x_t, C))
        sequence_mask    prod_t x_t if c <= prod_t x_t <= C, else 0
        geometric_mask   1 if c <= (prod_t x_t)^(1/T) <= C, else 0

    x_t = pi_old(y_t) / pi_rollout(y_t); C is the cap, c the floor.
    """
    ratio = math.exp(old_logprobs[t] - rollout_logprobs[t])
    product = 1.0
    for old, rollout in zip(old_logprobs, rollout_logprobs):
        product *= math.exp(old - rollout)
    if rollout_correction == "none":
        return 1.0
    if rollout_correction == "token_tis":
        return max(floor, min(ratio, cap))
    if rollout_correction == "token_mask":
        return ratio if floor <= ratio <= cap else 0.0
    if rollout_correction == "sequence_tis":
        return max(floor, min(product, cap))
    if rollout_correction == "sequence_mask":
        return product if floor <= product <= cap else 0.0
    if rollout_correction == "geometric_mask":
        mean = sum(old - rollout for old, rollout in zip(old_logprobs, rollout_logprobs)) / len(old_logprobs)
        return float(floor <= math.exp(mean) <= cap)
    raise KeyError(rollout_correction)


def off_policy_mask(logprobs, rollout_logprobs, advantage: float, limit: float) -> float:
    """Return 0 for a completion with A < 0 that the policy has moved away from, else 1.

        M = 0   if A < 0 and 1/T sum_t log(pi_rollout / pi) > limit

    DeepSeek-V3.2, arXiv 2512.02556, eq. 9.
    """
    distance = sum(rollout - new for rollout, new in zip(rollout_logprobs, logprobs)) / len(logprobs)
    return 0.0 if advantage < 0.0 and distance > limit else 1.0


def most_uncertain(entropies: list[list[float]], fraction: float) -> list[list[bool]]:
    """Mark the fraction of all tokens with the highest entropies.

        1[ H_{i,t} >= threshold ],   threshold: the ceil(fraction N)-th largest of N entropies

    "Beyond the 80/20 rule", arXiv 2506.01939, eq. 5. The fraction is read as a decimal: 0.2 of 5 is 1.
    """
    descending = sorted((entropy for row in entropies for entropy in row), reverse=True)
    num = math.ceil(Fraction(Decimal(str(fraction))) * len(descending))
    return [[entropy >= descending[num - 1] for entropy in row] for row in entropies]


def covariances(advantages: list[list[float]], logprobs: list[list[float]]) -> list[list[float]]:
    """Return (A_t - mean A) (log pi(y_t) - mean log pi), means over all tokens: arXiv 2505.22617, eq. 10."""
    num = sum(map(len, advantages))
    mean_advantage = sum(map(sum, advantages)) / num
    mean_logprob = sum(map(sum, logprobs)) / num
    pairs = zip(advantages, logprobs)
    return [[(a - mean_advantage) * (x - mean_logprob) for a, x in zip(*rows)] for rows in pairs]


# ---- 4. Token groups ---------------------------------------------------------------------------------------
def entropy_groups(entropies: list[float], fractions: tuple[float, ...]) -> list[list[int]]:
    """Return the tokens of each entropy group of a completion, the most uncertain group first.

        tau_k = { t : ceil(c_{k-1} T) <= rank of t < ceil(c_k T) },   c_k = fraction_1 + ... + fraction_k

    ESPO, eq. 7. The rank of the highest entropy is 0; equal entropies keep the order of the text. Fractions
    are read as decimals, so that 0.2 of 5 tokens is 1. Groups may be empty.
    """
    order = sorted(range(len(entropies)), key=lambda t: (-entropies[t], t))
    groups = []
    start = 0
    total = Fraction(0)
    for fraction in fractions[:-1]:
        total += Fraction(Decimal(str(fraction)))
        end = math.ceil(total * len(entropies))
        groups.append(order[start:end])
        start = end
    return [*groups, order[start:]]


def token_groups_of(
    entropies: list[float], ratio_level: str, fractions: tuple[float, ...]
) -> list[list[int]]:
    """Return the non-empty groups of a completion's tokens that share an importance ratio."""
    if ratio_level == "token":
        groups = [[t] for t in range(len(entropies))]
    elif ratio_level == "sequence":
        groups = [list(range(len(entropies)))]
    elif ratio_level == "entropy_group":
        groups = entropy_groups(entropies, fractions)
    return [tau for tau in groups if tau]


# ---- 5. Ratios ---------------------------------------------------------------------------------------------


def geometric_mean_ratio(log_ratios: list[float], tau: list[int]) -> float:
    """Return the ratio of a token group.

        s_tau = exp( 1/|tau| sum_{t in tau} log r_t ) = ( prod_{t in tau} r_t )^(1/|tau|)

    GSPO, arXiv 2507.18071, eq. 7, with the completion as tau; ESPO, eq. 10.
    """
    total = 0.0
    for t in tau:
        total += log_ratios[t]
    return math.exp(total / len(tau))


def group_ratio(log_ratios: list[float], tau: list[int], t: int, ratio_form: str) -> float:
    """Return the ratio of token t of the group tau; sg[] has no gradient.

    geometric       s_tau
    stop_gradient   sg[s_tau] pi(y_t) / sg[pi(y_t)] = s_tau         GSPO, eq. 14; our reading of ESPO, eq. 9
    literal         sg[s_tau] pi(y_t) / sg[pi_old(y_t)] = s_tau r_t         ESPO, eq. 9, as printed
    """
    ratio = geometric_mean_ratio(log_ratios, tau)
    return ratio * math.exp(log_ratios[t]) if ratio_form == "literal" else ratio


def group_ratio_slope(log_ratios: list[float], tau: list[int], t: int, u: int, ratio_form: str) -> float:
    """Return d group_ratio / d logprob_u.

    geometric                s_tau / |tau| for u in tau: the gradient goes through the mean
    stop_gradient, literal   the ratio itself for u = t, else 0
    """
    if ratio_form == "geometric":
        return geometric_mean_ratio(log_ratios, tau) / len(tau) if u in tau else 0.0
    return group_ratio(log_ratios, tau, t, ratio_form) if u == t else 0.0


# ---- 6. Clipping -------------------------------------------------------------------------------------------
def clip(x: float, low: float, high: float) -> float:
    """Return x moved into [low, high]."""
    return low if x < low else high if x > high else x


def entropy_clip_eps(entropies: list[float], tau, num_groups: int, t: int, settings: dict) -> float:
    """Return the half-width of the clip interval of token t of the group tau, in three readings of eq. 8.

        token_group_mean    alpha / log|V| mean_{t in tau} e_t
        over_token_groups   alpha / log|V| e_t / (number of token groups of the completion)
        over_tokens         alpha / log|V| e_t / (number of tokens of tau)

    ESPO, eq. 8, which prints alpha / log|V| e_t / |tau|.
    """
    factor = settings["entropy_clip_coef"] / settings["log_vocab"]
    if settings["entropy_clip_form"] == "token_group_mean":
        return factor * (sum(entropies[u] for u in tau) / len(tau))
    count = {"over_token_groups": num_groups, "over_tokens": len(tau)}[settings["entropy_clip_form"]]
    return factor * entropies[t] / count


def is_clipped(ratio: float, advantage: float, eps_low: float, eps_high: float) -> bool:
    """Tell whether the minimum of the surrogate takes its clipped branch; a tie counts as unclipped."""
    return clip(ratio, 1.0 - eps_low, 1.0 + eps_high) * advantage < ratio * advantage


def two_sided_surrogate(ratio, advantage, eps_low, eps_high, cap: float) -> float:
    """Return the pessimistic gain of a token with a bounded cost.

        min( min(r, cap) A, clip(r, 1 - eps_low, 1 + eps_high) A )

    INTELLECT-2, arXiv 2505.07291, with delta = cap; for A < 0 dual clip, arXiv 1912.09729, with c = cap.
    """
    return min(min(ratio, cap) * advantage, clip(ratio, 1.0 - eps_low, 1.0 + eps_high) * advantage)


def loses_gradient(ratio, advantage, eps_low, eps_high, cap: float) -> bool:
    """Tell whether the two-sided surrogate is constant at this ratio; an edge counts as unclipped."""
    return is_clipped(ratio, advantage, eps_low, eps_high) or advantage < 0.0 and ratio > cap


def sapo_objective(ratio: float, advantage: float, arguments: dict) -> float:
    """Return the gain of a token with a soft clip.

        4 / tau sigmoid(tau (r - 1)) A,   tau by the sign of A

    SAPO, arXiv 2511.20347.
    """
    tau = arguments["tau_positive"] if advantage > 0.0 else arguments["tau_negative"]
    return 4.0 / tau * sigmoid(tau * (ratio - 1.0)) * advantage


def sapo_objective_slope(ratio: float, advantage: float, arguments: dict, ratio_slope: float) -> float:
    """Return 4 sigmoid (1 - sigmoid) A dr."""
    tau = arguments["tau_positive"] if advantage > 0.0 else arguments["tau_negative"]
    x = tau * (ratio - 1.0)
    return 4.0 * sigmoid(x) * sigmoid(-x) * advantage * ratio_slope


def sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x)) without overflow."""
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0.0 else math.exp(x) / (1.0 + math.exp(x))


def is_too_far(logprob, old_logprob, advantage, divergence: str, eps_low, eps_high) -> bool:
    """Tell whether DPPO drops a token: its probability moved by more than eps in the direction of A.

        total_variation   |p - p_old|
        binary_kl         p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))

    DPPO, arXiv 2602.04879. 1 - p is at least 1e-8.
    """
    new = math.exp(logprob)
    old = math.exp(old_logprob)
    if divergence == "total_variation":
        distance = abs(new - old)
    else:
        log_other = math.log(max(1.0 - old, 1e-8)) - math.log(max(1.0 - new, 1e-8))
        distance = old * (old_logprob - logprob) + (1.0 - old) * log_other
    if advantage > 0.0:
        return new > old and distance > eps_high
    return advantage < 0.0 and new < old and distance > eps_low


def vespo_weight(log_ratios: list[float], advantage: float, arguments: dict) -> float:
    """Return the weight of the tokens of a completion.

        W^k exp(lambda (1 - W)),   W = prod_t r_t in [1e-8, e^20],   k (power) and lambda (decay) by A >= 0

    VESPO, arXiv 2602.10693.
    """
    sign = "negative" if advantage < 0.0 else "positive"
    log_w = clip(sum(log_ratios), math.log(1e-8), 20.0)
    exponent = arguments[f"power_{sign}"] * log_w + arguments[f"decay_{sign}"] * (1.0 - math.exp(log_w))
    return math.exp(exponent) if exponent > -700.0 else 0.0


def gmpo_log_ratio(log_ratio: float, advantage: float, eps_low: float, eps_high: float) -> float:
    """Return the log-ratio of a token, clipped to the pessimistic side for the sign of A.

        log min(r, clip(r))  if A > 0,   log max(r, clip(r))  if A < 0,   clip to [1 - eps_low, 1 + eps_high]

    GMPO, arXiv 2507.20673, eq. 4: | min(r A, clip(r) A) | / |A|.
    """
    low = math.log(1.0 - eps_low) if eps_low < 1.0 else -math.inf
    clipped = clip(log_ratio, low, math.log(1.0 + eps_high))
    return min(log_ratio, clipped) if advantage > 0.0 else max(log_ratio, clipped)


# ---- 7. KL penalty -----------------------------------------------------------------------------------------
def kl_k3(logprob: float, ref_logprob: float) -> float:
    """Return the k3 estimate of KL(pi, pi_ref) from one token; never negative.

        pi_ref / pi - log(pi_ref / pi) - 1

    DeepSeekMath, eq. 4. expm1(d) is exp(d) - 1 with all digits near 0.
    """
    log_ref_ratio = ref_logprob - logprob
    return math.expm1(log_ref_ratio) - log_ref_ratio


def kl_k3_slope(logprob: float, ref_logprob: float) -> float:
    """Return 1 - pi_ref / pi."""
    return -math.expm1(ref_logprob - logprob)


# ---- 8. Weights of tokens ----------------------------------------------------------------------------------
def token_weight(tau, groups, num_tokens, num_completions, num_tokens_of_all, settings: dict) -> float:
    """Return the weight of a token of the group tau; `groups` and num_tokens describe its completion.

    sequence_mean      1 / (N T_i)             DeepSeekMath, eq. 3; N: completions of the update
    token_mean         1 / sum_i T_i           DAPO, eq. 8
    token_group_mean   1 / (N K_i |tau|)       ESPO, eq. 5; K_i: non-empty token groups of the completion
    sequence_sum       1 / N                   LUSPO, arXiv 2602.05261
    fixed_length       1 / (N max_new_tokens)  Dr.GRPO
    """
    if settings["loss_agg"] == "sequence_mean":
        return 1.0 / (num_completions * num_tokens)
    if settings["loss_agg"] == "token_mean":
        return 1.0 / num_tokens_of_all
    if settings["loss_agg"] == "token_group_mean":
        return 1.0 / (num_completions * len(groups) * len(tau))
    if settings["loss_agg"] == "sequence_sum":
        return 1.0 / num_completions
    if settings["loss_agg"] == "fixed_length":
        return 1.0 / (num_completions * settings["max_new_tokens"])
    raise KeyError(settings["loss_agg"])


# ---- 9. Objectives -----------------------------------------------------------------------------------------
@dataclass
class Term:
    """The contribution of one token to the objective, before its weight."""

    ratio: float
    clipped: bool
    value: float
    slopes: dict[int, float]  # {u: d value / d logprob_u}, u among the tokens of the completion
    clip_eps: float | None = None  # only if the clip interval depends on the token


def term(t, tau, groups, logprobs, old_logprobs, advantages, entropies, settings: dict) -> Term:
    """Return the term of token t of the group tau, one of `groups`; the lists belong to the completion.

    The method is the function of `gain` (a plug-in, for example sapo) or else clip_mode; section 6 has the
    formulas.
    """
    method = settings["gain"].rpartition(":")[2] if settings["gain"] else settings["clip_mode"]
    arguments = settings["gain_args"]
    log_ratios = [new - old for new, old in zip(logprobs, old_logprobs)]
    form = settings["ratio_form"]
    advantage = advantages[t]
    low = settings["clip_eps_low"]
    high = settings["clip_eps_high"]
    ratio = group_ratio(log_ratios, tau, t, form)
    slopes = {u: group_ratio_slope(log_ratios, tau, t, u, form) for u in tau}
    if method == "none":
        return Term(ratio, False, ratio * advantage, {u: s * advantage for u, s in slopes.items()})
    if method in ("fixed", "entropy_adaptive", "off_policy_mask"):  # the mask is a factor of the advantages
        eps = None
        if method == "entropy_adaptive":
            eps = low = high = entropy_clip_eps(entropies, tau, len(groups), t, settings)
        cap = settings["clip_cap"] if settings["clip_cap"] and method != "off_policy_mask" else math.inf
        clipped = loses_gradient(ratio, advantage, low, high, cap)
        slopes = {u: 0.0 if clipped else advantage * slope for u, slope in slopes.items()}
        return Term(ratio, clipped, two_sided_surrogate(ratio, advantage, low, high, cap), slopes, eps)
    if method == "sapo":
        slopes = {u: sapo_objective_slope(ratio, advantage, arguments, s) for u, s in slopes.items()}
        return Term(ratio, False, sapo_objective(ratio, advantage, arguments), slopes)
    if method == "before_mean":
        return gmpo_term(t, tau, log_ratios, advantages, settings)
    if method in ("total_variation", "binary_kl"):
        edges = arguments["eps_low"], arguments["eps_high"]
        clipped = is_too_far(logprobs[t], old_logprobs[t], advantage, method, *edges)
        weight = 0.0 if clipped else min(ratio, arguments["cap"])
    elif method == "vespo":
        clipped = False
        weight = vespo_weight(log_ratios, advantage, arguments)
    elif method == "weight":  # CISPO, arXiv 2506.13585, eq. 4 and 5
        weight = clip(ratio, 1.0 - low, 1.0 + high)
        clipped = weight != ratio
    else:
        raise KeyError(method)
    # sg[weight] A log pi: the weight is constant
    return Term(ratio, clipped, weight * advantage * logprobs[t], {t: weight * advantage})


def gmpo_term(t, tau, log_ratios, advantages, settings: dict) -> Term:
    """Return the term of GMPO: the group ratio of the clipped log-ratios times A.

    A token with A = 0, for example a masked one, is clipped by the sign of its group's sum of advantages.
    """
    form = settings["ratio_form"]
    edges = settings["clip_eps_low"], settings["clip_eps_high"]
    group_advantage = sum(advantages[u] for u in tau)
    bounded = [gmpo_log_ratio(x, a or group_advantage, *edges) for x, a in zip(log_ratios, advantages)]
    slopes = {}
    for u in tau:
        is_free = bounded[u] == log_ratios[u]  # a clipped log-ratio is constant
        slopes[u] = group_ratio_slope(bounded, tau, t, u, form) * is_free * advantages[t]
    value = group_ratio(bounded, tau, t, form) * advantages[t]
    return Term(group_ratio(log_ratios, tau, t, form), bounded[t] != log_ratios[t], value, slopes)


def policy_terms(logprobs, old_logprobs, advantages, entropies, settings: dict):
    """Yield (i, t, weight, Term) of every token.

    num_completions and num_tokens of the update are taken from the settings, or else from the lists.
    """
    num_completions = settings.get("num_completions", len(logprobs))
    num_tokens_of_all = settings.get("num_tokens", sum(len(row) for row in logprobs))
    for i in range(len(logprobs)):
        groups = token_groups_of(entropies[i], settings["ratio_level"], settings["entropy_groups"])
        for tau in groups:
            for t in tau:
                counts = len(logprobs[i]), num_completions, num_tokens_of_all
                lists = logprobs[i], old_logprobs[i], advantages[i], entropies[i]
                weight = token_weight(tau, groups, *counts, settings)
                yield i, t, weight, term(t, tau, groups, *lists, settings)


def policy_objective(logprobs, old_logprobs, advantages, entropies, ref_logprobs, settings: dict) -> float:
    """Return the objective that a method maximises.

        J = sum_i sum_t w_{i,t} { objective_{i,t} - beta KL_k3 }

    settings: section algorithm of the configuration, max_new_tokens and log_vocab.
    """
    total = 0.0
    for i, t, weight, token in policy_terms(logprobs, old_logprobs, advantages, entropies, settings):
        total += weight * token.value
        if settings["kl_coef"]:
            total -= weight * settings["kl_coef"] * kl_k3(logprobs[i][t], ref_logprobs[i][t])
    return total


def policy_objective_slope(
    logprobs, old_logprobs, advantages, entropies, ref_logprobs, settings: dict
) -> list[list[float]]:
    """Return dJ / dlogprob_{i,t}, term by term."""
    slopes = [[0.0 for _ in row] for row in logprobs]
    for i, t, weight, token in policy_terms(logprobs, old_logprobs, advantages, entropies, settings):
        for u, slope in token.slopes.items():
            slopes[i][u] += weight * slope
        if settings["kl_coef"]:
            slopes[i][t] -= weight * settings["kl_coef"] * kl_k3_slope(logprobs[i][t], ref_logprobs[i][t])
    return slopes
