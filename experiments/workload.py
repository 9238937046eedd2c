"""Work for the rollout benchmark and the simulator: lengths of completions, seconds of their rewards.

    python -m experiments.workload --json FILE      the benchmark's workload, as recorded in the repository

Lengths are log-normal between prompts and between the completions of a prompt, cut at the longest: a prompt
that needs long answers needs them again, which is what a length predictor lives on. Rewards are rules for
some prompts, and sandboxes or judges for the others.
"""

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Recipe:
    """Distributions of a workload [ours: chosen to look like long chains of thought, see the README]."""

    num_steps: int = 6  # each visits every prompt once: the first without a history of it
    num_prompts: int = 32
    group_size: int = 8
    prompt_tokens: int = 12
    median_tokens: float = 64.0
    longest_tokens: int = 490  # longer ones are cut here, as by max_new_tokens
    spread_of_prompts: float = 1.0  # standard deviation of log length between prompts
    spread_of_samples: float = 0.4  # and between the completions of one prompt
    slow_share: float = 0.25  # of prompts whose reward is a sandbox or a judge
    rule_seconds: tuple[float, float] = (0.0001, 0.001)  # uniform
    slow_seconds: tuple[float, float] = (0.05, 0.5)  # uniform
    seed: int = 0


@dataclass(frozen=True)
class Workload:
    recipe: Recipe
    lengths: np.ndarray  # [step, prompt, sample] tokens, at least 1
    reward_seconds: np.ndarray  # [step, prompt, sample]

    @classmethod
    def make(cls, recipe: Recipe) -> "Workload":
        """The same numbers on every machine."""
        rng = np.random.default_rng(recipe.seed)
        shape = (recipe.num_steps, recipe.num_prompts, recipe.group_size)
        of_prompt = rng.standard_normal((1, recipe.num_prompts, 1)) * recipe.spread_of_prompts
        of_sample = rng.standard_normal(shape) * recipe.spread_of_samples
        lengths = np.exp(np.log(recipe.median_tokens) + of_prompt + of_sample).round()
        is_slow = rng.permutation(recipe.num_prompts) < recipe.slow_share * recipe.num_prompts
        rule, slow = rng.uniform(*recipe.rule_seconds, shape), rng.uniform(*recipe.slow_seconds, shape)
        seconds = np.where(is_slow[None, :, None], slow, rule).round(6)
        return cls(recipe, lengths.clip(1, recipe.longest_tokens).astype(np.int64), seconds)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Workload":
        saved = json.loads(Path(path).read_text())
        recipe = {k: tuple(v) if isinstance(v, list) else v for k, v in saved["recipe"].items()}
        return cls(Recipe(**recipe), np.array(saved["lengths"]), np.array(saved["reward_seconds"]))

    def save(self, path: str | os.PathLike) -> None:
        arrays = {"lengths": self.lengths.tolist(), "reward_seconds": self.reward_seconds.tolist()}
        Path(path).write_text(json.dumps({"recipe": asdict(self.recipe)} | arrays) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="write the workload here")
    Workload.make(Recipe()).save(parser.parse_args().json)
