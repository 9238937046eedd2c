"""Measure how the gain of zero-variance elimination changes with the share of prompts without variance.

    python -m experiments.studies.elimination_tuned.slopes experiments/studies/elimination_tuned/runs.jsonl

For each task instance, with the pools of the shares 0.7 (train.jsonl), 0.5 and 0.3 (pools.py):

    gains    {share: final additions/avg_at_8 with elimination minus without, mean over the instance's seeds}
    slope    slope of the least-squares line through the three gains

The declared test is a two-sided t-test of the slopes of the ten instances against 0. A slope above 0 says
that the gain grows with the share. For example, at a slope of 0.05 the gain at 0.7 is 0.02 above the gain at
0.3.
"""

from collections import defaultdict

import numpy as np

from experiments import report
from experiments.bench.common import markdown
from experiments.studies.tables import print_tables

METRIC = "additions/avg_at_8"
ROWS = {  # {share: (row with elimination, row without)}
    0.7: ("grpo_online", "grpo"),
    0.5: ("online_pool_50", "grpo_pool_50"),
    0.3: ("online_pool_30", "grpo_pool_30"),
}
SEEDS_EACH = 2  # of a task instance, as in declared.json


def measure(rows: dict[str, list[report.Run]]) -> list[dict]:
    """Return gains and slope of every task instance, over the seeds that have all six rows.

    ValueError if no seed has all rows.
    """
    finals = {name: {run.record["seed"]: run.values[-1] for run in runs} for name, runs in rows.items()}
    names = [name for pair in ROWS.values() for name in pair]
    seeds_by_instance = defaultdict(list)
    for seed in sorted(set.intersection(*(set(finals.get(name, {})) for name in names))):
        seeds_by_instance[seed // SEEDS_EACH].append(seed)
    figures = []
    for instance, seeds in seeds_by_instance.items():
        gains = {
            str(share): float(np.mean([finals[online][seed] - finals[parent][seed] for seed in seeds]))
            for share, (online, parent) in ROWS.items()
        }
        slope = float(np.polyfit(list(ROWS), list(gains.values()), deg=1)[0])
        figures.append({"instance": instance, "seeds": seeds, "gains": gains, "slope": slope})
    if not figures:
        raise ValueError(f"no seed has all of {', '.join(names)}")
    return figures


def table_lines(data: list[dict]) -> list[str]:
    """Return the table: mean gain of each pool, and the slope with its interval and p."""
    slopes = np.array([figures["slope"] for figures in data])
    gains = [f"{np.mean([figures['gains'][str(share)] for figures in data]):+.4f}" for share in ROWS]
    interval = report.show_interval(report.t_interval(slopes), "+.3f")
    heads = ["instances", *(f"gain at {share}" for share in ROWS), "slope", "95 % interval", "p against 0"]
    cells = [
        str(len(slopes)),
        *gains,
        f"{slopes.mean():+.3f}",
        interval,
        report.show_p(report.paired_p(slopes)),
    ]
    return markdown(heads, [cells])


if __name__ == "__main__":
    print_tables(__doc__, measure, METRIC, [table_lines])
