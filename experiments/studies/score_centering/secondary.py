"""Make the secondary tests: falls with and without a remedy, and the effect of RL-ZVP with centering.

    study=experiments/studies/score_centering
    python -m experiments.studies.score_centering.secondary $study/seeds_*.jsonl --json $study/scores.json

A run falls if its mean training score of the last ten steps is below its score in the first step. A run that
failed twice counts as a fall: `--failed ROW:SEED`. The file holds one line per run: row, seed, first (score
of the first step) and last (mean of the last ten steps); both are null in a failed run.
"""

from pathlib import Path

import numpy as np
from scipy.stats import fisher_exact

from experiments.bench.common import make_parser, markdown, write_json
from experiments.report import paired_p, read_rows, show, show_interval, show_p, t_interval

SIDES = {  # the sides of the declared test of falls
    "no remedy": ("none", "rl_zvp"),
    "a remedy": ("tis", "centering", "both", "rl_zvp_centering"),
}
EFFECTS = {"without centering": ("rl_zvp", "none"), "with centering": ("rl_zvp_centering", "centering")}


def read_scores(files: list[Path], failed: list[str]) -> list[dict]:
    """Return the first and the last score of each run; failed: for example ["none:3"]."""
    rows = read_rows(files, None, "train/score")
    scores = [
        {"row": row, "seed": run.record["seed"], "first": float(run.values[0]), "last": float(run.values[-1])}
        for row, runs in rows.items()
        for run in runs
    ]
    for text in failed:
        row, _, seed = text.partition(":")
        if row not in rows or not seed.isdigit():
            raise ValueError(f"--failed {text}: expected ROW:SEED with a row among {', '.join(rows)}")
        scores.append({"row": row, "seed": int(seed), "first": None, "last": None})
    return scores


def is_fall(run: dict) -> bool:
    """Tell whether a run ended below its start, or failed."""
    return run["last"] is None or run["last"] < run["first"]


def table_lines(data: list[dict]) -> list[str]:
    """Return the table of falls: the runs and the falls of both sides, and p of their difference."""
    counts = []  # [[falls, other runs] of each side]
    for rows in SIDES.values():
        falls = [is_fall(run) for run in data if run["row"] in rows]
        counts.append([sum(falls), len(falls) - sum(falls)])
    p = show_p(float(fisher_exact(counts).pvalue))
    lines = [
        [side, ", ".join(rows), str(falls + others), str(falls), p]
        for (side, rows), (falls, others) in zip(SIDES.items(), counts)
    ]
    return markdown(["side", "rows", "runs", "falls", "p (Fisher)"], lines)


def effect_lines(data: list[dict]) -> list[str]:
    """Return the effect of RL-ZVP without and with centering, and the difference of both, paired by seed."""
    last = {(run["row"], run["seed"]): run["last"] for run in data if run["last"] is not None}
    seeds = sorted({seed for _, seed in last})
    names = [name for rows in EFFECTS.values() for name in rows]
    seeds = [seed for seed in seeds if all((name, seed) in last for name in names)]
    effects = {
        label: np.array([last[row, seed] - last[parent, seed] for seed in seeds])
        for label, (row, parent) in EFFECTS.items()
    }
    without, with_centering = effects.values()
    effects["without minus with"] = without - with_centering
    lines = [
        [
            label, str(len(seeds)), show(values.mean() if seeds else None, "+.4f"),
            show_interval(t_interval(values), "+.4f"), show_p(paired_p(values)),
        ]
        for label, values in effects.items()
    ]  # fmt: skip
    return markdown(["effect of RL-ZVP", "n", "difference", "its 95 % interval", "paired p"], lines)


def main() -> None:
    """Read the records, print the tables, write the file."""
    parser = make_parser(__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="record files of the study")
    parser.add_argument("--failed", nargs="+", default=[], metavar="ROW:SEED", help="runs that failed twice")
    args = parser.parse_args()
    try:
        data = read_scores(args.records, args.failed)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print("\n".join([*table_lines(data), "", *effect_lines(data)]))
    write_json(args.json, data)


if __name__ == "__main__":
    main()
