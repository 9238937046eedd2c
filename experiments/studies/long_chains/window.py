"""Make the stability window: what each method reaches at each learning rate.

    python -m experiments.studies.long_chains.window runs/long_chains_window \\
        --json experiments/studies/long_chains/window.json --plot experiments/studies/long_chains/window.png

A folder holds one folder per learning rate, as the commands of the README make them. A file that was written
before can stand among the folders: its runs come first. A figure is pass@1 on the held-out chains (or
`longer`) after the last step. The file holds for each run: row, seed, commit and learning_rate; the seconds
of its steps; avg_at_4 of `chains` at the `start`, of `chains` and `longer` at the end; means over the last
ten steps of `entropy` and of the share of `clipped` tokens, over the completions with a gradient. Runs that
have not come to the end of their tokens are left out and named on stderr; look there for those that stopped.
"""

import json
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np
import yaml

from experiments.bench.common import make_parser, markdown, pyplot, write_json
from experiments.report import provenance, read_folder

LAST_STEPS = 10


def read_window(folder: Path) -> list[dict]:
    """Return what the ended runs below a folder reached."""
    found = []
    for rate in sorted(path for path in folder.iterdir() if path.is_dir()):
        for run in read_folder(rate, None, "chains/avg_at_4")[0]:
            evaluations, settings = run.record["evaluations"], (run.folder / "config.yaml").read_text()
            if "eval/longer/avg_at_4" not in evaluations:
                raise ValueError(f"{run.folder}: no evaluation on a set `longer`, as the environment has it")
            last = {name: run.steps[name][-LAST_STEPS:] for name in ("entropy", "clipped")}
            found.append({
                "row": run.record["row"], "seed": run.record["seed"],
                "commit": provenance(run.folder)["commit"],
                "learning_rate": yaml.safe_load(settings)["train"]["learning_rate"],
                "seconds": float(run.seconds[-1]), "start": float(run.values[0]),
                "chains": float(run.values[-1]), "longer": evaluations["eval/longer/avg_at_4"][-1],
                **{name: float(np.nanmean(values)) for name, values in last.items()},
            })  # fmt: skip
    return found


def read_all(paths: list[Path]) -> list[dict]:
    """Return the runs of folders and of written files; ValueError for one that is there twice."""
    data, seen = [], set()
    for path in paths:
        for run in json.loads(path.read_text()) if path.is_file() else read_window(path):
            key = (run["row"], run["learning_rate"], run["seed"])
            if key in seen:
                raise ValueError(
                    f"{path}: {run['row']} at {run['learning_rate']:g}, seed {run['seed']}, is there twice"
                )
            seen.add(key)
            data.append(run)
    return data


def by_row_and_rate(data: list[dict], name: str) -> dict[str, dict[float, list[float]]]:
    """Return {row: {learning rate: a figure of each run}}."""
    table = defaultdict(lambda: defaultdict(list))
    for run in sorted(data, key=lambda run: (run["row"], run["learning_rate"], run["seed"])):
        table[run["row"]][run["learning_rate"]].append(run[name])
    return table


def table_lines(data: list[dict], name: str = "chains") -> list[str]:
    """Return the table of rows and learning rates: the figure of each seed, and the best mean over seeds."""
    table = by_row_and_rate(data, name)
    rates = sorted({run["learning_rate"] for run in data})
    lines = []
    for row, found in table.items():
        cells = [", ".join(f"{value:.3f}" for value in found.get(rate, ())) or "-" for rate in rates]
        lines.append([row, *cells, f"{max(statistics.mean(values) for values in found.values()):.3f}"])
    return markdown(["row", *(f"{rate:g}" for rate in rates), "best mean"], lines)


def longer_lines(data: list[dict]) -> list[str]:
    """Return the same table for chains longer than those that are trained."""
    return table_lines(data, "longer")


def clipped_lines(data: list[dict]) -> list[str]:
    """Return the table of the share of clipped tokens, the mean over seeds."""
    table = by_row_and_rate(data, "clipped")
    rates = sorted({run["learning_rate"] for run in data})
    cell = lambda values: f"{statistics.mean(values):.4f}" if values else "-"
    lines = [[row, *(cell(found.get(rate)) for rate in rates)] for row, found in table.items()]
    return markdown(["row", *(f"{rate:g}" for rate in rates)], lines)


def plot(data: list[dict], file: Path) -> None:
    """Draw both figures over the learning rate: the mean of each row, and every run."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, name in zip(axes, ("chains", "longer")):
        for i, (row, found) in enumerate(by_row_and_rate(data, name).items()):
            rates = sorted(found)
            means = [statistics.mean(found[rate]) for rate in rates]
            axis.plot(rates, means, color=f"C{i}", marker="_", label=row)
            for rate in rates:
                axis.plot([rate] * len(found[rate]), found[rate], ".", color=f"C{i}", alpha=0.5)
        axis.set(xscale="log", xlabel="learning rate", ylabel=f"pass@1, {name}", ylim=(0, None))
        every = sorted({run["learning_rate"] for run in data})
        axis.set_xticks(every, [f"{rate:g}" for rate in every])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main() -> None:
    """Read the runs, print the tables, write and draw the figures."""
    parser = make_parser(__doc__, plot=True)
    parser.add_argument(
        "runs", type=Path, nargs="+", help="folders with a folder per learning rate, and files"
    )
    args = parser.parse_args()
    try:
        data = read_all(args.runs)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print("\n".join([*table_lines(data), "", *longer_lines(data), "", *clipped_lines(data)]))
    write_json(args.json, data)
    if args.plot:
        plot(data, args.plot)


if __name__ == "__main__":
    main()
