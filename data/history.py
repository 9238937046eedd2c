"""Record what has been seen of each training prompt: how often it was solved, how long completions were.

Stages 1b and 1c of zero-variance elimination (arXiv 2512.07710) and the length-aware schedule read it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from data.prompts import OfflineScore, Prompt


def prob_all(hits: float, misses: float, num: int, prior: float) -> float:
    """Return the probability that the next num verdicts are all hits.

    It is E[p^num] for p ~ Beta(hits + prior, misses + prior).

    With many verdicts this is p^num of the observed rate, with few it trusts it less [ours]. A prior below
    1/2 says that most prompts are nearly always or nearly never solved.
    """
    return math.prod((hits + prior + j) / (hits + misses + 2 * prior + j) for j in range(num))


LEAST_EXPLORATION, EXPLORATION_STEP, EXPLORATION_RANGE = 0.01, 0.01, (0.05, 0.95)  # those of GRESO's authors


@dataclass
class PromptHistory:
    """What has been seen of each training prompt; the same on all ranks, part of every checkpoint."""

    solved: Tensor  # [prompts] float64, decayed number of completions that were right as a whole
    tried: Tensor  # [prompts] float64, decayed number of verdicts
    mean_tokens: Tensor  # [prompts] float64, length of completions at the last visit, 0: not known
    last_step: Tensor  # [prompts] int64, the step of the last visit, -1: never sampled
    streak: Tensor | None = None  # [prompts] int64, latest visits in a row all right; below 0: all wrong
    explore: Tensor | None = None  # [2] float64, GRESO's p_e of prompts that were all right, and all wrong
    unsolved: Tensor | None = None  # [prompts] float64, as solved, of completions with no part right

    def __post_init__(self):
        """Start without a streak or fractions, and with GRESO's first exploration probabilities."""
        if self.unsolved is None:
            self.unsolved = self.tried - self.solved
        if self.streak is None:
            self.streak = torch.zeros_like(self.last_step)
        if self.explore is None:
            self.explore = torch.full((2,), 0.5, dtype=torch.float64)

    @classmethod
    def from_offline(cls, scores: list[OfflineScore | None], group_size: int) -> "PromptHistory":
        """Make the record before the first step; an offline score counts as one visit [ours]."""
        seen = torch.tensor([score is not None for score in scores])
        rates, wrong, tokens = (
            torch.tensor([getattr(score, name) if score else 0.0 for score in scores], dtype=torch.float64)
            for name in ("pass_rate", "wrong_rate", "mean_tokens")
        )
        tried = seen.double() * group_size
        return cls(rates * group_size, tried, tokens, seen.long() - 1, unsolved=wrong * group_size)

    def expected_lengths(self, indices: list[int], prompts: list[Prompt]) -> list[tuple[float, bool]]:
        """Return (tokens, guessed) of the completions of these prompts, at least 1 token.

        It is the mean length at the prompt's last visit or its offline scoring. Where there is none it is a
        guess: the mean over the set's prompts that have one, or over all [ours].
        """
        known: dict[str, list[float]] = {}
        for prompt, tokens in zip(prompts, self.mean_tokens.tolist()):
            for name in (prompt.source, "all") if tokens else ():
                known.setdefault(name, []).append(tokens)
        guess = {name: sum(tokens) / len(tokens) for name, tokens in known.items()}
        lengths = []
        for index in indices:
            tokens, source = float(self.mean_tokens[index]), prompts[index].source
            expected = tokens or guess.get(source, guess.get("all", 1.0))
            lengths.append((max(1.0, expected), not tokens))
        return lengths

    def update(self, outcomes: list, step: int, decay: float) -> None:
        """Enter the outcomes of a step's groups; decay weighs what was known before."""
        for o in outcomes:
            if o.valid:
                i = o.prompt_index
                self.solved[i] = decay * self.solved[i] + o.solved
                self.unsolved[i] = decay * self.unsolved[i] + o.unsolved
                self.tried[i] = decay * self.tried[i] + o.valid
                self.mean_tokens[i] = o.tokens / o.completions
                self.last_step[i] = step
                sign = 0 if o.has_variance else 1 if 2 * o.score_sum > o.valid else -1
                self.streak[i] = sign * (abs(int(self.streak[i])) + 1 if self.streak[i] * sign > 0 else 1)

    def consecutive_skip_prob(self, prompt: int) -> float:
        """Return 1 - max(p_e^z, 0.01), z the latest visits in a row that were all right, or all wrong.

        GRESO (arXiv 2506.02177), eq. 5; the bound of 0.01 is that of the authors' code [secondary]. p_e is
        adjusted by adjust_exploration(), one for each kind.
        """
        streak = int(self.streak[prompt])
        if not streak:
            return 0.0
        return 1 - max(float(self.explore[0 if streak > 0 else 1]) ** abs(streak), LEAST_EXPLORATION)

    def adjust_exploration(self, outcomes: list, target_solved: float, target_unsolved: float) -> None:
        """Explore a kind of prompts less where a step has the share of its groups aimed at, else more.

        GRESO's self-adjustment: p_e goes down or up by 0.01 and stays in [0.05, 0.95], the range of the
        authors' code [secondary]. Groups stopped by a probe count as what they were stopped for.
        """
        if not outcomes:
            return
        same = [o for o in outcomes if o.valid and not o.has_variance]
        solved = sum(2 * o.score_sum > o.valid for o in same)
        for kind, (num, target) in enumerate(
            ((solved, target_solved), (len(same) - solved, target_unsolved))
        ):
            step = -EXPLORATION_STEP if num / len(outcomes) >= target else EXPLORATION_STEP
            self.explore[kind] = (self.explore[kind] + step).clamp(*EXPLORATION_RANGE)

    def skip_prob(
        self, prompt: int, step: int, group_size: int, *, binary: bool, prior: float, retest_steps: int,
        explore_solved: float, explore_unsolved: float,
    ) -> float:  # fmt: skip
        """Return E[p^G] + E[q^G], each at most 1 - explore; 0 if never tried or due for a re-test.

        p is the probability of a completion that is right as a whole, q that of one with no part right: 1 - p
        where the verifier gives no fractions or they do not count (binary). Stage 1b [ours, after GRESO
        (arXiv 2506.02177), which also explores hard prompts more than easy ones]. The expectations are over
        what the record says of p and q.
        """
        age = step - int(self.last_step[prompt])
        due = retest_steps > 0 and age >= retest_steps
        if self.last_step[prompt] < 0 or due:
            return 0.0
        right, wrong, tried = self.counts(prompt, binary)
        all_right = prob_all(right, tried - right, group_size, prior)
        all_wrong = prob_all(wrong, tried - wrong, group_size, prior)
        return min(all_right, 1 - explore_solved) + min(all_wrong, 1 - explore_unsolved)

    def counts(self, prompt: int, binary: bool) -> tuple[float, float, float]:
        """Return the decayed numbers of right completions, of those that count as all wrong, and of all."""
        right, tried = float(self.solved[prompt]), float(self.tried[prompt])
        return right, tried - right if binary else float(self.unsolved[prompt]), tried

    def zero_variance_after(self, probe, group_size: int, prior: float, binary: bool) -> float:
        """Return the probability that a probed group ends with zero variance: 0 if the probe already differs.

        Stage 1c [ours]: the rest must all come out as the probe and, by the record, as before. Of a probe
        whose scores are one and the same fraction nothing is known, and it goes on: 0.
        """
        is_right, is_wrong = probe.solved == probe.valid, probe.score_sum == 0
        if probe.has_variance or not probe.valid or not (is_right or is_wrong):
            return 0.0
        right, wrong, tried = self.counts(probe.prompt_index, binary)
        same, tried = (right if is_right else wrong) + probe.valid, tried + probe.valid
        return prob_all(same, tried - same, group_size - probe.completions, prior)
