"""Measure the clip at which a fifth of the uncertain tokens is clipped, and how this clip scales with length.

    python -m experiments.studies.clip_scale.scaling runs/clip_scale/test

For each seed and each length of the chains, from the rows LENGTH_002 to LENGTH_060 (means over steps 2 to 6):

    shares    clipped share of the uncertain tokens (clipped/entropy_group_0) at each alpha
    alpha     alpha* at which this share is 0.2, linear in log alpha; without a crossing, the nearest alpha
    entropy   H0, entropy of the uncertain tokens in nats
    tokens    |tau|, uncertain tokens of a completion: 0.2 x completion_tokens
    eps       alpha* x H0 / log |V|, the half-width of the clip (ESPO eq. 8)

The slope of log eps on log tokens over the lengths, one per seed, is -0.5 if the log-ratios of the tokens of
a group are independent (the spread of their mean falls with the root of their number), and 0 if all tokens of
a group move together.
"""

import argparse
import math
from pathlib import Path

import numpy as np

from experiments import report
from experiments.bench.common import markdown

METRIC = "train/score"  # the short runs have no evaluation
ALPHAS = {"002": 0.02, "006": 0.06, "020": 0.2, "060": 0.6}
LENGTHS = ("short", "mixed", "long")
STEPS = slice(1, 6)  # steps 2 to 6: the policies of all rows are still similar
TARGET = 0.2  # share of clipped tokens
UNCERTAIN_FRAC = 0.2  # algorithm.entropy_groups
LOG_VOCAB = math.log(98)


def mean_of(run: report.Run, metric: str) -> float:
    """Return the mean of a metric over the early steps; a step that trained on nothing has no value."""
    return float(np.nanmean(run.steps[metric][STEPS]))


def crossing(alphas: list[float], shares: list[float]) -> float:
    """Return the alpha at which the share falls to TARGET, linear in log alpha, or the nearest alpha."""
    if shares[0] <= TARGET:
        return alphas[0]
    for (low, above), (high, below) in zip(zip(alphas, shares), zip(alphas[1:], shares[1:])):
        if below <= TARGET:
            fraction = (above - TARGET) / (above - below)
            return math.exp((1 - fraction) * math.log(low) + fraction * math.log(high))
    return alphas[-1]


def figures_of(runs: dict[str, report.Run], length: str, seed: int) -> dict:
    """Return the figures of a seed and a length, from the run of each alpha."""
    shares = {name: mean_of(run, "clipped/entropy_group_0") for name, run in runs.items()}
    alpha = crossing([ALPHAS[name] for name in runs], list(shares.values()))
    entropy = float(np.mean([mean_of(run, "entropy/entropy_group_0") for run in runs.values()]))
    tokens = UNCERTAIN_FRAC * float(np.mean([mean_of(run, "completion_tokens") for run in runs.values()]))
    eps = alpha * entropy / LOG_VOCAB
    return {
        "length": length, "seed": seed, "shares": shares, "alpha": alpha, "entropy": entropy,
        "tokens": tokens, "eps": eps,
    }  # fmt: skip


def measure(rows: dict[str, list[report.Run]]) -> list[dict]:
    """Return the figures of every length and every seed that has a run with each alpha."""
    by_seed = {name: {run.record["seed"]: run for run in runs} for name, runs in rows.items()}
    figures = []
    for length in LENGTHS:
        of_length = {name: by_seed.get(f"{length}_{name}", {}) for name in ALPHAS}
        for seed in sorted(set.intersection(*map(set, of_length.values()))):
            figures.append(figures_of({name: runs[seed] for name, runs in of_length.items()}, length, seed))
    return figures


def slopes_of(data: list[dict]) -> dict[int, float]:
    """Return {seed: slope of log eps on log tokens} of the seeds that have every measured length."""
    num_lengths = len({figures["length"] for figures in data})
    slopes = {}
    for seed in sorted({figures["seed"] for figures in data}):
        points = [(f["tokens"], f["eps"]) for f in data if f["seed"] == seed]
        if len(points) == num_lengths > 1:
            log_tokens, log_eps = np.log(np.array(points)).T
            slopes[seed] = float(np.polyfit(log_tokens, log_eps, deg=1)[0])
    return slopes


def table_lines(data: list[dict]) -> list[str]:
    """Return the table of the lengths: means over the seeds."""
    lines = []
    for length in LENGTHS:
        of_length = [figures for figures in data if figures["length"] == length]
        if not of_length:
            continue
        shares = [f"{np.mean([f['shares'][name] for f in of_length]):.3f}" for name in ALPHAS]
        alpha, entropy, tokens, eps = (
            np.mean([f[name] for f in of_length]) for name in ("alpha", "entropy", "tokens", "eps")
        )
        cells = [f"{tokens:.1f}", f"{entropy:.3f}", *shares, f"{alpha:.3f}", f"{eps:.2e}"]
        lines.append([length, str(len(of_length)), *cells])
    clipped = [f"clipped at {alpha}" for alpha in ALPHAS.values()]
    return markdown(["length", "n", "uncertain tokens", "entropy", *clipped, "alpha*", "eps*"], lines)


def slope_lines(data: list[dict]) -> list[str]:
    """Return the table of the slope: mean and interval over the seeds, and p against 0 and -0.5."""
    slopes = np.array(list(slopes_of(data).values()))
    p_values = [report.show_p(report.paired_p(slopes - value)) for value in (0.0, -0.5)]
    interval = report.show_interval(report.t_interval(slopes), "+.2f")
    heads = ["slope", "n", "mean", "95 % interval", "p against 0", "p against -0.5"]
    return markdown(
        heads, [["log eps* on log tokens", len(slopes), f"{slopes.mean():+.2f}", interval, *p_values]]
    )


def main() -> None:
    """Read the runs and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, record files")
    args = parser.parse_args()
    try:
        data = measure(report.read_rows(args.runs, None, METRIC))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not slopes_of(data):
        parser.error(f"no seed has the rows {', '.join(ALPHAS)} of two lengths")
    print("\n".join([*table_lines(data), "", *slope_lines(data)]))


if __name__ == "__main__":
    main()
