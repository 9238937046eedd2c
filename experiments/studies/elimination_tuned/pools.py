"""Write pools with a dialled share of prompts without variance: always solved, or out of reach.

    python -m experiments.studies.elimination_tuned.pools habits habits_1    # task instances, already built

Writes data/built/INSTANCE/pool_50.jsonl and pool_30.jsonl, in which 0.5 and 0.3 of the 1,200 prompts are sums
of correct digit pairs (solved from the start) or products (missing in the corpus). The share of train.jsonl
is 0.7. Solved prompts and products keep their ratio of 3 to 4. All other prompts are sums with a bad pair,
which RL can learn. No prompt is in the held-out set, because data.tiny sets that set apart first.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from data.tiny import OUTPUT, recipe_of, sample_problems

SIZE = 1200
SHARES = (0.5, 0.3)


def pool_sizes(share: float) -> tuple[int, int, int]:
    """Return the numbers of solved, learnable and hopeless prompts of a pool."""
    num_solved = round(SIZE * share * 3 / 7)
    num_hopeless = round(SIZE * share) - num_solved
    return num_solved, SIZE - num_solved - num_hopeless, num_hopeless


def write_pools(instance: str, folder: Path) -> None:
    """Write the pools of a task instance into its folder."""
    for share in SHARES:
        rows, _ = sample_problems(replace(recipe_of(instance), pool=pool_sizes(share)))
        if len(rows) != SIZE:
            raise ValueError(f"{instance}: {len(rows)} prompts, not {SIZE}; the recipe has too few sums")
        file = folder / f"pool_{100 * share:.0f}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    for instance in sys.argv[1:]:
        write_pools(instance, OUTPUT / instance)
