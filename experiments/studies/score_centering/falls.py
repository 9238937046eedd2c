"""Test whether runs without a remedy fall more often: Fisher's exact test on the number of falls.

    python -m experiments.studies.score_centering.falls experiments/studies/score_centering/seeds_*.jsonl \\
        --json experiments/studies/score_centering/falls.json

A run falls if its mean training score of the last ten steps is below its score in the first step. The file
holds one line per run: row, seed, first (score of the first step) and last (mean of the last ten steps).
"""

from pathlib import Path

from scipy.stats import fisher_exact

from experiments.bench.common import make_parser, markdown, write_json
from experiments.report import read_rows, show_p

SIDES = {  # the sides of the declared test
    "no remedy": ("none", "rl_zvp"),
    "a remedy": ("tis", "centering", "both", "rl_zvp_centering"),
}


def read_scores(files: list[Path]) -> list[dict]:
    """Return the first and the last score of each run."""
    rows = read_rows(files, None, "train/score")
    return [
        {"row": row, "seed": run.record["seed"], "first": float(run.values[0]), "last": float(run.values[-1])}
        for row, runs in rows.items()
        for run in runs
    ]


def table_lines(data: list[dict]) -> list[str]:
    """Return the table: the runs and the falls of both sides, and p of their difference."""
    counts = []  # [[falls, other runs] of each side]
    for rows in SIDES.values():
        is_fall = [run["last"] < run["first"] for run in data if run["row"] in rows]
        counts.append([sum(is_fall), len(is_fall) - sum(is_fall)])
    p = show_p(float(fisher_exact(counts).pvalue))
    lines = [
        [side, ", ".join(rows), str(falls + others), str(falls), p]
        for (side, rows), (falls, others) in zip(SIDES.items(), counts)
    ]
    return markdown(["side", "rows", "runs", "falls", "p (Fisher)"], lines)


def main() -> None:
    """Read the records, print the table, write the file."""
    parser = make_parser(__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="record files of the study")
    args = parser.parse_args()
    data = read_scores(args.records)
    print("\n".join(table_lines(data)))
    write_json(args.json, data)


if __name__ == "__main__":
    main()
