"""Make the table of the README from runs of the demo, and write the record of the table.

    python experiments/run.py --rows experiments/environments/demo.yaml --seeds 0 1 2 --ranks 2 \\
        --out runs/seeds
    python -m experiments.environments.demo_table runs/seeds/demo --json experiments/environments/demo.json

The file holds for each run the figures of summary.json, for example avg_at_8 before and after training, and
the share of groups without variance in the first and the last 50 steps.
"""

import json
import statistics
from pathlib import Path

from experiments.bench.common import make_parser, markdown, mean_with_range, write_json

EVALUATED = {"avg_at_8": "pass@1, mean of 8 samples", "accuracy": "accuracy, greedy", "pass_at_8": "pass@8"}
STEPS = 50


def read_run(folder: Path) -> dict[str, float]:
    """Return the figures of a finished run."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [row["zero_variance_frac"] for row in rows if "zero_variance_frac" in row]
    return {
        **{f"{name}_{when}": summary[f"{name}_{when}"] for name in EVALUATED for when in ("before", "after")},
        "generated_tokens": summary["generated_tokens"],
        "gradient_token_share": summary["gradient_token_share"],
        "seconds": sum(row["seconds_per_step"] for row in rows if "seconds_per_step" in row),
        "peak_gib": summary["peak_rss_bytes"] / 2**30,
        "zero_variance_first": statistics.mean(rates[:STEPS]),
        "zero_variance_last": statistics.mean(rates[-STEPS:]),
    }


def table_lines(data: list[dict]) -> list[str]:
    """Return the table of the runs: mean, and in brackets the range."""

    def spread(name: str, form: str = ".3f") -> str:
        return mean_with_range([run[name] for run in data], form)

    rows = [[text, spread(f"{name}_before"), spread(f"{name}_after")] for name, text in EVALUATED.items()]
    rows += [
        ["groups without variance, first and last 50 steps", spread("zero_variance_first"),
         spread("zero_variance_last")],
        ["generated tokens that carry gradient", "",
         f"{spread('gradient_token_share')} of {spread('generated_tokens', ',.0f')}"],
        ["all steps on two cores, and peak memory of both ranks", "",
         f"{spread('seconds', '.0f')} s, {spread('peak_gib', '.1f')} GiB"],
    ]  # fmt: skip
    return markdown([f"n = {len(data)} seeds, mean (range)", "warm start", "after"], rows)


def main() -> None:
    """Read the runs, print the table, write the record."""
    parser = make_parser(__doc__)
    parser.add_argument("runs", type=Path, help="folder with folders seed_S")
    args = parser.parse_args()
    data = [read_run(folder) for folder in sorted(args.runs.glob("seed_*/"))]
    if not data:
        parser.error(f"{args.runs}: no folder seed_S in it; experiments/run.py makes run folders")
    print("\n".join(table_lines(data)))
    write_json(args.json, data)


if __name__ == "__main__":
    main()
