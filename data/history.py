"""The record of each training prompt: how often the prompt was solved, and how long the completions were.

The record is used by stages 1b and 1c of zero-variance elimination (arXiv 2512.07710), which skip prompts and
stop groups, and by the length-aware schedule, which balances expected tokens over ranks.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from data.prompts import OfflineScore, Prompt


def prob_all(hits: float, misses: float, num: int, prior: float) -> float:
    """Return the probability that the next num verdicts are all hits: E[p^num], a Beta-binomial estimate.

        p ~ Beta(hits + prior, misses + prior)

    With many verdicts the result approaches p^num of the observed rate p; with few verdicts the prior counts
    more [ours]. A prior below 1/2 expresses that most prompts are nearly always or nearly never solved.
    Example: 16 hits, 0 misses and prior 0.5 give 0.82 for num = 8.
    """
    return math.prod((hits + prior + j) / (hits + misses + 2 * prior + j) for j in range(num))


@dataclass
class PromptHistory:
    """The record of all training prompts; identical on all ranks, saved in every checkpoint."""

    solved: Tensor  # [prompts] float64, decayed number of fully right completions
    tried: Tensor  # [prompts] float64, decayed number of verdicts
    mean_tokens: Tensor  # [prompts] float64, mean completion length at the last visit, 0: unknown
    last_step: Tensor  # [prompts] int64, the step of the last visit, -1: never sampled
    streak: Tensor | None = None  # [prompts] int64, GRESO: consecutive visits all right; below 0: all wrong
    explore: Tensor | None = None  # [2] float64, GRESO: p_e of prompts that were all right, and all wrong
    unsolved: Tensor | None = None  # [prompts] float64, decayed number of fully wrong completions
    mean_turns: Tensor | None = None  # [prompts] float64, mean turns at the last visit, 0: unknown

    def __post_init__(self):
        """Fill in the fields that an offline score does not have; GRESO starts with p_e = 0.5."""
        if self.mean_turns is None:
            self.mean_turns = torch.zeros_like(self.tried)
        if self.unsolved is None:
            self.unsolved = self.tried - self.solved
        if self.streak is None:
            self.streak = torch.zeros_like(self.last_step)
        if self.explore is None:
            self.explore = torch.full((2,), 0.5, dtype=torch.float64)

    @classmethod
    def from_offline(cls, scores: list[OfflineScore | None], group_size: int) -> "PromptHistory":
        """Make the record of step 0; an offline score counts like one visit with G completions [ours]."""
        is_scored = torch.tensor([score is not None for score in scores])
        rates, wrong, tokens = (
            torch.tensor([getattr(score, name) if score else 0.0 for score in scores], dtype=torch.float64)
            for name in ("pass_rate", "wrong_rate", "mean_tokens")
        )
        tried = is_scored.double() * group_size
        last_step = is_scored.long() - 1
        return cls(rates * group_size, tried, tokens, last_step, unsolved=wrong * group_size)

    def expected_lengths(self, indices: list[int], prompts: list[Prompt]) -> list[tuple[float, bool]]:
        """Return (expected completion length in tokens, whether the length is a guess) of each prompt.

        The expected length is the mean length at the prompt's last visit or in the offline scores. For a
        prompt with neither, the guess is the mean over the prompts of the same dataset that have a length, or
        else over all prompts [ours]. At least 1 token.
        """
        lengths_of_set: dict[str, list[float]] = {}
        for prompt, tokens in zip(prompts, self.mean_tokens.tolist()):
            for name in (prompt.source, "all") if tokens else ():
                lengths_of_set.setdefault(name, []).append(tokens)
        guess = {name: sum(tokens) / len(tokens) for name, tokens in lengths_of_set.items()}
        lengths = []
        for index in indices:
            tokens = float(self.mean_tokens[index])
            expected = tokens or guess.get(prompts[index].source, guess.get("all", 1.0))
            lengths.append((max(1.0, expected), not tokens))
        return lengths

    def update(self, outcomes: list, step: int, decay: float) -> None:
        """Add the outcomes of a step's groups; the old counts are multiplied by `decay` first."""
        for o in outcomes:
            if o.valid:
                i = o.prompt_index
                self.solved[i] = decay * self.solved[i] + o.solved
                self.unsolved[i] = decay * self.unsolved[i] + o.unsolved
                self.tried[i] = decay * self.tried[i] + o.valid
                self.mean_tokens[i] = o.tokens / o.completions
                self.mean_turns[i] = o.turns / o.completions
                self.last_step[i] = step

    def skip_prob(
        self, prompt: int, step: int, group_size: int, *, binary: bool, prior: float, retest_steps: int,
        explore_solved: float, explore_unsolved: float,
    ) -> float:  # fmt: skip
        """Return the probability of skipping a prompt, because its next group would have no variance.

            min(E[p^G], 1 - explore_solved) + min(E[q^G], 1 - explore_unsolved)

        p is the probability that a completion is fully right, q that a completion is fully wrong. For
        verifiers that return 0 or 1, and with binary, q = 1 - p. The expectations are over the posterior of p
        and q given the record, see prob_all(). 0 for a prompt that was never tried, or whose record is
        retest_steps old. Stage 1b [ours, after GRESO (arXiv 2506.02177), which also explores hard prompts
        more than easy prompts].
        """
        if not self.has_record(prompt, step, retest_steps):
            return 0.0
        right, wrong, tried = self.counts(prompt, binary)
        all_right = prob_all(right, tried - right, group_size, prior)
        all_wrong = prob_all(wrong, tried - wrong, group_size, prior)
        return min(all_right, 1 - explore_solved) + min(all_wrong, 1 - explore_unsolved)

    def has_record(self, prompt: int, step: int, retest_steps: int) -> bool:
        """Tell whether a prompt was tried less than retest_steps steps ago; 0: a record never expires."""
        last_step = int(self.last_step[prompt])
        return last_step >= 0 and (retest_steps == 0 or step - last_step < retest_steps)

    def counts(self, prompt: int, binary: bool) -> tuple[float, float, float]:
        """Return the decayed counts (fully right, fully wrong, all); with binary, wrong = all - right."""
        right = float(self.solved[prompt])
        tried = float(self.tried[prompt])
        wrong = tried - right if binary else float(self.unsolved[prompt])
        return right, wrong, tried

    def zero_variance_after(
        self, probe, step: int, group_size: int, *, binary: bool, prior: float, retest_steps: int
    ) -> float:
        """Return the probability that a probed group ends with zero variance. Stage 1c [ours].

        The remaining completions would all have to get the score of the probe. Their probability is estimated
        from the probe and, unless it has expired as in skip_prob(), from the record. 0 if the probe has
        variance already, and if all scores of the probe are the same fraction, for example 0.5, because the
        record does not count fractions.
        """
        is_right = probe.solved == probe.valid
        is_wrong = probe.score_sum == 0
        if probe.has_variance or not probe.valid or not (is_right or is_wrong):
            return 0.0
        prompt = probe.prompt_index
        is_known = self.has_record(prompt, step, retest_steps)
        right, wrong, tried = self.counts(prompt, binary) if is_known else (0.0, 0.0, 0.0)
        num_same = (right if is_right else wrong) + probe.valid
        num_other = tried + probe.valid - num_same
        return prob_all(num_same, num_other, group_size - probe.completions, prior)
