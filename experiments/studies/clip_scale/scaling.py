"""Measure the clip at which a fifth of the uncertain tokens is clipped, and how this clip scales with length.

For each seed and each length of the chains, from the rows LENGTH_002 to LENGTH_060 (means over steps 2 to 6):

    shares    clipped share of the uncertain tokens (clipped/entropy_group_0) at each alpha
    alpha     alpha* at which this share is 0.2, linear in log alpha; without a crossing, the nearest alpha
    entropy   H0, entropy of the uncertain tokens in nats
    tokens    |tau|, uncertain tokens of a completion: 0.2 x completion_tokens
    eps       alpha* x H0 / log |V|, the half-width of the clip (ESPO eq. 8)

An alpha* of 0.02 or 0.6 lies at an end of the grid: eps* is then only a bound, and the slope of its seed is
censored. Both are counted.

The slope of log eps on log tokens over the lengths, one per seed, is -0.5 if the log-ratios of the tokens of
a group are independent (the spread of their mean falls with the root of their number), and 0 if all tokens of
a group move together.
"""

import math

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
    """Return the mean of a metric over STEPS; a step that trained on nothing has no value."""
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
    """Return the figures of every length and every seed that has a run with each alpha.

    ValueError if no seed has two lengths, because a slope needs both.
    """
    by_seed = {name: {run.record["seed"]: run for run in runs} for name, runs in rows.items()}
    figures = []
    for length in LENGTHS:
        of_length = {name: by_seed.get(f"{length}_{name}", {}) for name in ALPHAS}
        for seed in sorted(set.intersection(*map(set, of_length.values()))):
            runs_of_seed = {name: runs[seed] for name, runs in of_length.items()}
            figures.append(figures_of(runs_of_seed, length, seed))
    if not slopes_of(figures):
        raise ValueError(f"no seed has the rows {', '.join(ALPHAS)} of two lengths")
    return figures


def is_at_an_end(figures: dict) -> bool:
    """Tell whether alpha* is the smallest or the largest alpha of the grid, and eps* only a bound."""
    return figures["alpha"] in (min(ALPHAS.values()), max(ALPHAS.values()))


def slopes_of(data: list[dict], lengths: tuple[str, ...] = LENGTHS) -> dict[int, float]:
    """Return {seed: slope of log eps on log tokens} of the seeds that have every measured length of these."""
    data = [figures for figures in data if figures["length"] in lengths]
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
        tokens, alpha, eps = (np.mean([f[name] for f in of_length]) for name in ("tokens", "alpha", "eps"))
        num_at_an_end = sum(map(is_at_an_end, of_length))
        lines.append([length, f"{tokens:.1f}", f"{alpha:.3f}", f"{eps:.2e}", num_at_an_end])
    return markdown(["length", "uncertain tokens", "alpha*", "eps*", "at an end"], lines)


def slope_lines(data: list[dict]) -> list[str]:
    """Return the table of the power of eps* in the uncertain tokens: mean and interval over the seeds.

    The first row is the declared endpoint, over all lengths. The others, between neighbouring lengths and
    their change, are exploratory: one power describes all lengths only if the change is near 0.
    censored: number of the seeds with an alpha* at an end of the grid at any length.
    """
    powers = {"all lengths (declared)": slopes_of(data)}
    for pair in zip(LENGTHS, LENGTHS[1:]):
        powers[" to ".join(pair)] = slopes_of(data, pair)
    _, first, second = powers.values()
    powers["change of the power"] = {
        seed: second[seed] - first[seed] for seed in first.keys() & second.keys()
    }
    lines = []
    for name, by_seed in powers.items():
        values = np.array(list(by_seed.values()))
        if len(values):
            censored = {figures["seed"] for figures in data if is_at_an_end(figures)} & by_seed.keys()
            interval = report.show_interval(report.t_interval(values), "+.2f")
            p = report.show_p(report.paired_p(values))
            lines.append([name, len(values), len(censored), f"{values.mean():+.2f}", interval, p])
    return markdown(["lengths", "n", "censored", "power", "95 % interval", "p against 0"], lines)
