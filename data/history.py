"""The record of each training prompt: how often the prompt was solved, and how long the completions were.

The record is used by stages 1b and 1c of zero-variance elimination (arXiv 2512.07710), which skip prompts and
stop groups (train_rl.py: skip_prob, zero_variance_after), and by the length-aware schedule, which balances
expected tokens over ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from data.prompts import OfflineScore, Prompt


@dataclass
class PromptHistory:
    """The record of all training prompts; identical on all ranks, saved in every checkpoint."""

    solved: Tensor  # [prompts] float64, decayed number of fully right completions
    tried: Tensor  # [prompts] float64, decayed number of verdicts
    mean_tokens: Tensor  # [prompts] float64, mean completion length at the last visit, 0: unknown
    last_step: Tensor  # [prompts] int64, the step of the last visit, -1: never sampled
    streak: Tensor = None  # type: ignore[assignment]  # [prompts] int64, GRESO: consecutive visits all right; below 0: all wrong
    explore: Tensor = None  # type: ignore[assignment]  # [2] float64, GRESO: p_e of prompts that were all right, and all wrong
    unsolved: Tensor = None  # type: ignore[assignment]  # [prompts] float64, decayed number of fully wrong completions
    mean_turns: Tensor = None  # type: ignore[assignment]  # [prompts] float64, mean turns at the last visit, 0: unknown

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
        lengths_of_set: dict[str | None, list[float]] = {}  # None: of all prompts
        for prompt, tokens in zip(prompts, self.mean_tokens.tolist()):
            for name in (prompt.source, None) if tokens else ():
                lengths_of_set.setdefault(name, []).append(tokens)
        guess = {name: sum(tokens) / len(tokens) for name, tokens in lengths_of_set.items()}
        lengths = []
        for index in indices:
            tokens = float(self.mean_tokens[index])
            expected = tokens or guess.get(prompts[index].source, guess.get(None, 1.0))
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
