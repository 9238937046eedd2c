"""Measure grpo_skip if the tokens of its offline scoring come out of the budget of a run.

    python -m experiments.studies.elimination_tuned.charged experiments/studies/elimination_tuned/runs.jsonl

A run of grpo_skip generates 100,000 tokens, and its scoring has generated another 42,000 (offline_tokens).
This reads pass@1 where the run has generated 100,000 - offline_tokens, linear between two evaluations, and
subtracts the final pass@1 of grpo with the same seed. The differences of an instance's two seeds are
averaged first, as in the declared test.
"""

import numpy as np

from experiments import report
from experiments.bench.common import markdown
from experiments.studies.elimination_tuned.slopes import METRIC, SEEDS_EACH
from experiments.studies.tables import print_tables

BUDGET = 100_000  # generated tokens, as in declared.json
ROW, PARENT = "grpo_skip", "grpo"


def measure(rows: dict[str, list[report.Run]]) -> list[dict]:
    """Return, for each common seed, tokens of training, pass@1 there, and the final pass@1 of the parent.

    ValueError without a common seed.
    """
    parents = {run.record["seed"]: run.values[-1] for run in rows.get(PARENT, [])}
    figures = []
    for run in sorted(rows.get(ROW, []), key=lambda run: run.record["seed"]):
        seed = run.record["seed"]
        if seed in parents and run.offline_tokens is not None:
            tokens = BUDGET - run.offline_tokens
            value = float(np.interp(tokens, run.tokens, run.values))
            figures.append({"seed": seed, "tokens": tokens, "value": value, "parent": float(parents[seed])})
    if not figures:
        raise ValueError(f"no seed has {ROW} with the tokens of its scoring, and {PARENT}")
    return figures


def differences_of(data: list[dict]) -> np.ndarray:
    """Return the mean difference of each task instance."""
    by_instance: dict[int, list[float]] = {}
    for figures in data:
        difference = figures["value"] - figures["parent"]
        by_instance.setdefault(figures["seed"] // SEEDS_EACH, []).append(difference)
    return np.array([np.mean(values) for values in by_instance.values()])


def table_lines(data: list[dict]) -> list[str]:
    """Return the table: pass@1 of both rows, and the paired difference over the instances."""
    differences = differences_of(data)
    means = {name: np.mean([figures[name] for figures in data]) for name in ("tokens", "value", "parent")}
    heads = [
        "instances",
        "tokens of training",
        ROW,
        f"{PARENT} at the end",
        "difference",
        "95 % interval",
        "p",
    ]
    cells = [
        str(len(differences)), f"{means['tokens']:,.0f}", f"{means['value']:.4f}", f"{means['parent']:.4f}",
        f"{differences.mean():+.4f}", report.show_interval(report.t_interval(differences), "+.4f"),
        report.show_p(report.paired_p(differences)),
    ]  # fmt: skip
    return markdown(heads, [cells])


if __name__ == "__main__":
    print_tables(__doc__, measure, METRIC, [table_lines])
