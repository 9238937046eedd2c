"""GRESO (arXiv 2506.02177): the published baseline for skipping prompts, beside our stage 1b.

    zero_variance.skip_rule: consecutive    skip a prompt by its consecutive visits with zero variance
    zero_variance.round_size: adaptive      size of a refill round by the last round's zero-variance share

experiments/methods/greso.yaml sets both. The record of a prompt is in data.history.PromptHistory: `streak`
counts its latest consecutive visits in which all completions were right (above 0) or wrong (below 0), and
`explore` holds the exploration probabilities p_e of both kinds.
"""

import math

from batch import GroupOutcome
from data.history import PromptHistory
from settings import ZeroVarianceSettings

FIRST_ROUND_FACTOR = 1.5  # the authors sample 384 prompts for updates on 256
SAFETY_FACTOR = 1.25  # on the expected number of prompts of a later round
MIN_EXPLORATION = 0.01  # the next two are from the authors' code [secondary]
EXPLORATION_STEP = 0.01
EXPLORATION_RANGE = (0.05, 0.95)


def skip_prob(prompt: int, history: PromptHistory) -> float:
    """Return 1 - max(p_e^z, 0.01), z: consecutive visits that were all right, or all wrong (eq. 5).

    Example: with p_e = 0.5, three consecutive visits with right completions only give 1 - 0.125 = 0.875.
    """
    streak = int(history.streak[prompt])
    if not streak:
        return 0.0
    kind = 0 if streak > 0 else 1
    return 1 - max(float(history.explore[kind]) ** abs(streak), MIN_EXPLORATION)


def next_round_size(num_missing: int, num_useful: int, num_sampled: int, prompts_per_step: int) -> int:
    """Return the number of prompts in a later round.

        min(1.5 P, 1.25 (P - useful) / (share of groups with variance in the last round))

    num_missing: P - useful, groups with variance that the step still lacks; num_useful of num_sampled: groups
    with variance in the last round; prompts_per_step: P. The floor of 64 prompts per round and the rounding
    to the number of GPUs are left out, because they belong to the authors' batch of 256 [ours].
    """
    largest = math.ceil(FIRST_ROUND_FACTOR * prompts_per_step)  # of the first round
    if not num_useful:
        return largest
    return min(largest, math.ceil(SAFETY_FACTOR * num_missing * num_sampled / num_useful))


def update(
    history: PromptHistory, outcomes: list[GroupOutcome], zero: ZeroVarianceSettings, is_first_epoch: bool
) -> None:
    """Record the outcomes of a step; from the second epoch of a stage on, adapt the exploration."""
    update_streaks(history, outcomes)
    if zero.skip_rule == "consecutive" and not is_first_epoch:
        adjust_exploration(history, outcomes, zero.target_solved, zero.target_unsolved)


def update_streaks(history: PromptHistory, outcomes: list[GroupOutcome]) -> None:
    """Extend or reset the streak of each visited prompt; a group with one or no verdict changes nothing."""
    for outcome in outcomes:
        if outcome.valid < 2:  # no baseline, so neither variance nor its absence
            continue
        sign = 0 if outcome.has_variance else 1 if 2 * outcome.score_sum > outcome.valid else -1
        streak = int(history.streak[outcome.prompt_index])
        length = abs(streak) + 1 if streak * sign > 0 else 1
        history.streak[outcome.prompt_index] = sign * length


def adjust_exploration(
    history: PromptHistory, outcomes: list[GroupOutcome], target_solved: float, target_unsolved: float
) -> None:
    """Lower p_e of a kind by 0.01 if its share of the step's groups reaches the target, else raise p_e.

    p_e stays in [0.05, 0.95]. A group stopped by a probe counts as the kind that stopped it.
    """
    if not outcomes:
        return
    uniform = [outcome for outcome in outcomes if outcome.is_tied]
    num_solved = sum(2 * outcome.score_sum > outcome.valid for outcome in uniform)
    shares = (num_solved / len(outcomes), (len(uniform) - num_solved) / len(outcomes))
    for kind, (share, target) in enumerate(zip(shares, (target_solved, target_unsolved))):
        step = -EXPLORATION_STEP if share >= target else EXPLORATION_STEP
        history.explore[kind] = (history.explore[kind] + step).clamp(*EXPLORATION_RANGE)
