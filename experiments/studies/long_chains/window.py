"""Make the stability window: the accuracy that each method reaches at each learning rate.

    python -m experiments.studies.long_chains.window runs/long_chains_window \\
        --json experiments/studies/long_chains/window.json --plot experiments/studies/long_chains/window.png

A folder of runs has one folder per learning rate, as the commands of the README make them. A file written by
an earlier call can stand among the folders: the new file then begins with the runs of the old file.

A figure is pass@1 after the last step, on the held-out chains (`chains`) or on chains longer than the trained
chains (`longer`). The file holds for each run:

    row, seed, commit, learning_rate
    seconds           of the training steps
    start             avg_at_4 of `chains` before training
    chains, longer    avg_at_4 of both sets after training
    entropy, clipped  means over the last ten steps, over completions with a gradient

Runs that stopped before the end of their token budget are skipped and named on stderr.
"""

import json
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np
import yaml

from experiments.bench.common import make_parser, markdown, pyplot, write_json
from experiments.report import Run, provenance, read_folder

LAST_STEPS = 10


def figures_of(run: Run) -> dict:
    """Return the figures of a finished run."""
    evaluations = run.record["evaluations"]
    if "eval/longer/avg_at_4" not in evaluations:
        raise ValueError(
            f"{run.folder}: the run has no evaluation on a set named `longer`; use data.eval of "
            "experiments/environments/chains.yaml"
        )
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    last_steps = {name: run.steps[name][-LAST_STEPS:] for name in ("entropy", "clipped")}
    return {
        "row": run.record["row"],
        "seed": run.record["seed"],
        "commit": provenance(run.folder)["commit"],
        "learning_rate": config["train"]["learning_rate"],
        "seconds": float(run.seconds[-1]),
        "start": float(run.values[0]),
        "chains": float(run.values[-1]),
        "longer": evaluations["eval/longer/avg_at_4"][-1],
        **{name: float(np.nanmean(values)) for name, values in last_steps.items()},
    }


def read_window(folder: Path) -> list[dict]:
    """Return the figures of the finished runs below a folder of learning rates."""
    figures = []
    for rate in sorted(path for path in folder.iterdir() if path.is_dir()):
        runs, _ = read_folder(rate, None, "chains/avg_at_4")
        figures += map(figures_of, runs)
    return figures


def read_all(paths: list[Path]) -> list[dict]:
    """Return the figures of folders and of written files; ValueError if a run occurs twice."""
    data = []
    keys = set()
    for path in paths:
        for run in json.loads(path.read_text()) if path.is_file() else read_window(path):
            key = (run["row"], run["learning_rate"], run["seed"])
            if key in keys:
                raise ValueError(
                    f"{path}: {run['row']} at {run['learning_rate']:g}, seed {run['seed']}, occurs twice; "
                    "omit one of the folders or files"
                )
            keys.add(key)
            data.append(run)
    return data


def by_row_and_rate(data: list[dict], name: str) -> dict[str, dict[float, list[float]]]:
    """Return {row: {learning rate: a figure of each run}}."""
    table = defaultdict(lambda: defaultdict(list))
    for run in sorted(data, key=lambda run: (run["row"], run["learning_rate"], run["seed"])):
        table[run["row"]][run["learning_rate"]].append(run[name])
    return table


def rates_of(data: list[dict]) -> list[float]:
    """Return the learning rates of the runs in ascending order."""
    return sorted({run["learning_rate"] for run in data})


def table_lines(data: list[dict], name: str = "chains") -> list[str]:
    """Return the table of rows and learning rates: the figure of each seed, and the best mean over seeds."""
    rates = rates_of(data)
    lines = []
    for row, by_rate in by_row_and_rate(data, name).items():
        cells = [", ".join(f"{value:.3f}" for value in by_rate.get(rate, ())) or "-" for rate in rates]
        lines.append([row, *cells, f"{max(map(statistics.mean, by_rate.values())):.3f}"])
    return markdown(["row", *(f"{rate:g}" for rate in rates), "best mean"], lines)


def longer_lines(data: list[dict]) -> list[str]:
    """Return the same table for chains longer than the trained chains."""
    return table_lines(data, "longer")


def clipped_lines(data: list[dict]) -> list[str]:
    """Return the table of the share of clipped tokens, mean over seeds."""
    rates = rates_of(data)
    lines = []
    for row, by_rate in by_row_and_rate(data, "clipped").items():
        cells = [f"{statistics.mean(by_rate[rate]):.4f}" if rate in by_rate else "-" for rate in rates]
        lines.append([row, *cells])
    return markdown(["row", *(f"{rate:g}" for rate in rates)], lines)


def plot(data: list[dict], file: Path) -> None:
    """Plot the accuracy on both sets against the learning rate: the mean of each row, and every run."""
    plt = pyplot()
    figure, grid = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    panels = {"chains": "Held-out chains, trained lengths", "longer": "Held-out chains, longer than trained"}
    ticks = rates_of(data)
    for axes, (name, title) in zip(grid, panels.items()):
        for i, (row, by_rate) in enumerate(by_row_and_rate(data, name).items()):
            rates = sorted(by_rate)
            means = [statistics.mean(by_rate[rate]) for rate in rates]
            axes.plot(rates, means, color=f"C{i}", marker="_", label=row)
            for rate in rates:
                axes.plot([rate] * len(by_rate[rate]), by_rate[rate], ".", color=f"C{i}", alpha=0.5)
        axes.set_title(title, fontsize="medium")
        axes.set(xscale="log", xlabel="learning rate", ylabel="held-out accuracy (avg@4)", ylim=(0, None))
        axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    grid[0].legend(fontsize=8)
    figure.supxlabel("lines: mean over the seeds of a row; dots: each seed", fontsize="small")
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main() -> None:
    """Read the runs, print the tables, write the file and the plot."""
    parser = make_parser(__doc__, plot=True)
    parser.add_argument(
        "runs", type=Path, nargs="+", help="folders with one folder per learning rate, and written files"
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
