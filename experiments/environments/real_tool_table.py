"""Make the table of docs/turns.md from a run of real_tool.yaml, and write the record of the table.

    python -m experiments.environments.real_tool_table runs/real_tool \\
        --json experiments/environments/real_tool.json
"""

import json
from pathlib import Path

from experiments.bench.common import make_parser, markdown, write_json

STEP_FIGURES = {  # name in metrics.jsonl: (heading, format)
    "score": ("score", ".2f"),
    "tool_calls": ("calls per episode", ".2f"),
    "tool_errors_frac": ("share of calls with an error", ".2f"),
    "completion_tokens": ("sampled tokens", ".1f"),
    "tool_tokens": ("inserted tokens", ".1f"),
    "zero_variance_frac": ("groups without variance", ".2f"),
}
SHOWN_STEPS = (1, 3, 5, 8, 12)


def read_run(folder: Path) -> dict:
    """Return the figures and two samples of a finished run."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "score" in row]
    evaluations = [row for row in rows if "eval/sums/accuracy" in row]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return {
        "versions": json.loads((folder / "versions.json").read_text()),
        "steps": [{name: row[name] for name in ("step", *STEP_FIGURES)} for row in steps],
        "held_out": [
            {"step": row["step"], "accuracy": row["eval/sums/accuracy"], "calls": row["eval/sums/tool_calls"]}
            for row in evaluations
        ],
        "seconds": sum(row["seconds_per_step"] for row in steps),
        "peak_gib": summary["peak_rss_bytes"] / 2**30,
        "samples": [{key: sample[key] for key in ("step", "completion", "answer", "turns")}
                    for sample in (samples[0], samples[-1])],
    }  # fmt: skip


def table_lines(data: dict) -> list[str]:
    """Return the table of the steps, with the greedy accuracy before the first and after the last step."""
    rows = []
    accuracy = {row["step"]: f"{row['accuracy']:.3f}" for row in data["held_out"]}
    for step in data["steps"]:
        if step["step"] in SHOWN_STEPS:
            cells = [format(step[name], form) for name, (_, form) in STEP_FIGURES.items()]
            rows.append([step["step"], *cells, accuracy.get(step["step"], "")])
    start = ["start", *[""] * len(STEP_FIGURES), accuracy[0]]
    headings = ["step", *(heading for heading, _ in STEP_FIGURES.values()), "held out, greedy"]
    return markdown(headings, [start, *rows])


def main() -> None:
    """Read the run, print the table, write the record."""
    parser = make_parser(__doc__)
    parser.add_argument("run", type=Path, help="folder of a finished run of real_tool.yaml")
    args = parser.parse_args()
    data = read_run(args.run)
    print("\n".join(table_lines(data)))
    write_json(args.json, data)


if __name__ == "__main__":
    main()
