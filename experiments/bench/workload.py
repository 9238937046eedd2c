"""Draw the workload of the rollout benchmark: completion lengths and reward seconds.

    python -m experiments.bench.workload                     # describes the default workload
    python -m experiments.bench.workload --json recipe.json  # writes the recipe, to be edited and passed to
    python -m experiments.bench.rollout --workload recipe.json

Lengths are log-normal between prompts and between the completions of a prompt, and are cut at the longest. A
prompt with long completions has long completions in every step, which a length predictor relies on: for
example, a prompt two standard deviations above the mean has completions 7 times as long as the median. Rules
score some prompts; sandboxes or judges score the remaining prompts. A recipe draws the same numbers on every
machine.
"""

import dataclasses
import json
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.bench.common import make_parser, write_json


@dataclass(frozen=True)
class Recipe:
    """Distributions of a workload [ours: chosen to look like long chains of thought]."""

    num_steps: int = 6  # each samples every prompt once; in the first step prompts have no record
    num_prompts: int = 32
    group_size: int = 8
    prompt_tokens: int = 12
    median_tokens: float = 64.0
    longest_tokens: int = 490  # longer completions are cut, as by max_new_tokens
    spread_of_prompts: float = 1.0  # standard deviation of log length between prompts
    spread_of_samples: float = 0.4  # the same between the completions of one prompt
    slow_share: float = 0.5  # share of prompts whose reward is a sandbox or a judge
    rule_seconds: tuple[float, float] = (0.0001, 0.001)  # uniform
    slow_seconds: tuple[float, float] = (0.05, 0.5)  # uniform
    seed: int = 0

    @classmethod
    def of(cls, fields: dict) -> "Recipe":
        """Make a recipe of the fields in a JSON object; missing fields get their defaults."""
        unknown = set(fields) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"a recipe has no field {', no field '.join(sorted(unknown))}")
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()})

    @classmethod
    def load(cls, path: Path | None) -> "Recipe":
        """Read a recipe from a file; None: the default recipe."""
        return cls() if path is None else cls.of(json.loads(path.read_text()))


@dataclass(frozen=True)
class Workload:
    """The numbers drawn from a recipe."""

    recipe: Recipe
    lengths: np.ndarray  # [step, prompt, sample] tokens, at least 1
    reward_seconds: np.ndarray  # [step, prompt, sample]

    @property
    def is_slow(self) -> np.ndarray:
        """Mark the prompts that are scored by a sandbox or a judge, [prompt] bool."""
        return (self.reward_seconds >= self.recipe.slow_seconds[0]).any(axis=(0, 2))

    @classmethod
    def make(cls, recipe: Recipe) -> "Workload":
        """Draw a workload; the same recipe gives the same numbers on every machine."""
        rng = np.random.default_rng(recipe.seed)
        shape = (recipe.num_steps, recipe.num_prompts, recipe.group_size)
        prompt_offsets = rng.standard_normal((1, recipe.num_prompts, 1)) * recipe.spread_of_prompts
        sample_offsets = rng.standard_normal(shape) * recipe.spread_of_samples
        lengths = np.exp(np.log(recipe.median_tokens) + prompt_offsets + sample_offsets).round()
        is_slow = rng.permutation(recipe.num_prompts) < recipe.slow_share * recipe.num_prompts
        rule = rng.uniform(*recipe.rule_seconds, shape)
        slow = rng.uniform(*recipe.slow_seconds, shape)
        seconds = np.where(is_slow[None, :, None], slow, rule).round(6)
        return cls(recipe, lengths.clip(1, recipe.longest_tokens).astype(np.int64), seconds)

    def describe(self) -> str:
        """Describe the amount of work and the distribution of lengths."""
        num_steps, num_prompts, group_size = self.lengths.shape
        return (
            f"{num_steps} steps x {num_prompts} prompts x {group_size} completions, {self.lengths.sum():,} "
            f"tokens, median {np.median(self.lengths):.0f}, 99th percentile "
            f"{np.percentile(self.lengths, 99):.0f}, longest {self.lengths.max()}; rewards of "
            f"{self.is_slow.sum()} prompts take {self.recipe.slow_seconds[0]:g} to "
            f"{self.recipe.slow_seconds[1]:g} s each"
        )


def slow_verify(completion: str, answer: str) -> float:
    """Sleep for the seconds given as the answer; the score is a hash of the text."""
    time.sleep(float(answer))
    return zlib.crc32(completion.encode()) % 2


def main() -> None:
    """Describe the default workload, and write its recipe."""
    args = make_parser(__doc__).parse_args()
    print(Workload.make(Recipe()).describe())
    write_json(args.json, dataclasses.asdict(Recipe()))


if __name__ == "__main__":
    main()
