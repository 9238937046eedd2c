"""Show in which regime each environment trains: entropy, clips, spread of the ratios, zero variance.

    python -m experiments.records get real_regime
    python -m experiments.studies.real_regime.panel --runs runs/records/real_regime

Reads ENVIRONMENT_RATE.jsonl of a folder, for example sums_own.jsonl: the whole records of an environment's
rows at a third of its learning rate (third), at that rate (own), and at three times that rate (triple).
recorded_gain.py defines the metrics.
"""

import itertools
import math
import re
from pathlib import Path

import numpy as np

from experiments import report
from experiments.bench.common import make_parser, markdown, write_json

FOLDER = Path(__file__).parent
RATES = ("third", "own", "triple")
ENVIRONMENTS = ("instructions", "sums", "habits", "chains")
ALPHAS = (0.02, 0.06, 0.2, 0.6)
LENGTHS = (4, 8, 16, 32, 64, 128, 256, 512)  # largest number of tokens of a completion, per bin
VOCABULARY = {"instructions": 49152, "sums": 49152, "habits": 98, "chains": 98}  # tokens
MIN_GROUPS = 20  # token groups behind a point of the figure
RL_ZVP_COEF = 0.1  # the coefficient of RL-ZVP's paper
UPDATE = re.compile(r"clipped/update_\d+")  # without a value if no row of the update had a gradient
UPDATES = ("1", "2", "3", "4")  # of a step; the ratios of the first are 1 up to rounding
TARGET = 0.1  # share of uncertain tokens that the clip should cut, the middle of 0.05 to 0.15


def figures_of(run: report.Run, rate: str) -> dict:
    """Return the figures of a run: means over its steps, and the spread of the log-ratios by length."""
    mean = {name: float(np.nanmean(values)) for name, values in run.steps.items()}
    environment, method = run.record["row"].rsplit("_", 1)
    score = run.steps["score"]
    clipped = {name.removeprefix("clipped/update_"): mean[name] for name in mean if UPDATE.fullmatch(name)}
    return {
        "environment": environment,
        "method": method,
        "rate": rate,
        "learning_rate": run.record["settings"]["train.learning_rate"],
        "tokens": mean["completion_tokens"],
        "entropy": mean["entropy"],
        "top_entropy": mean["entropy/entropy_group_0"],
        "zero_variance": mean["zero_variance_frac"],
        "wrong": mean["regime/rl_zvp_wrong"],
        "score": [float(score[0]), float(score[-3:].mean())],
        "clipped": mean["clipped"],
        "clipped_by_update": clipped,  # {number of the update: share}
        "cut": {str(alpha): mean[f"regime/cut_{alpha}"] / mean["regime/cut_tokens"] for alpha in ALPHAS},
        "spread": {kind: spread_of(run, kind) for kind in ("uncertain", "completion")},
    }


def spread_of(run: report.Run, kind: str) -> dict[str, float]:
    """Return {largest length: root mean square of the mean log-ratio of a group}, over all updates."""
    weights = run.steps["gradient_tokens_total"]  # the metrics are means over these tokens
    by_length = {}
    for length in LENGTHS:
        groups = np.nansum(weights * run.steps[f"regime/groups_{kind}_{length}"])
        if groups >= MIN_GROUPS:
            squared = np.nansum(weights * run.steps[f"regime/squared_{kind}_{length}"])
            by_length[str(length)] = math.sqrt(squared / groups)
    return by_length


def read_panel(folder: Path) -> list[dict]:
    """Return the figures of all runs in the record files of a folder."""
    figures = []
    for environment, rate in itertools.product(ENVIRONMENTS, RATES):
        file = folder / f"{environment}_{rate}.jsonl"
        if file.is_file():
            rows = report.read_rows([file], None, "train/score")
            figures += [figures_of(run, rate) for runs in rows.values() for run in runs]
    return figures


def chosen(data: list[dict], **wanted: str) -> list[dict]:
    """Return the figures whose fields have these values, in the order of ENVIRONMENTS."""
    matching = [run for run in data if all(run[name] == value for name, value in wanted.items())]
    return sorted(matching, key=lambda run: ENVIRONMENTS.index(run["environment"]))


def eps_of(run: dict, alpha: float) -> float:
    """Return the half-width of ESPO's clip for uncertain tokens (eq. 8)."""
    return alpha * run["top_entropy"] / math.log(VOCABULARY[run["environment"]])


def regime_lines(data: list[dict]) -> list[str]:
    """Return the table of the regimes: GRPO at the environment's own learning rate.

    The last two columns are the sizes that RL-ZVP's advantages would have in a group of right and in a group
    of wrong completions, with the coefficient of its paper. Both are means over the tokens of trained groups.
    """
    heads = [
        "environment", "tokens", "entropy", "top fifth", "top fifth / log V", "eps at alpha 0.02",
        "zero variance", "0.1 x entropy", "0.1 x (largest entropy - entropy)",
    ]  # fmt: skip
    lines = []
    for run in chosen(data, method="grpo", rate="own"):
        normalized = run["top_entropy"] / math.log(VOCABULARY[run["environment"]])
        lines.append([
            run["environment"], f"{run['tokens']:.1f}", f"{run['entropy']:.3f}", f"{run['top_entropy']:.3f}",
            f"{normalized:.3f}", f"{eps_of(run, 0.02):.1e}", f"{run['zero_variance']:.2f}",
            f"{RL_ZVP_COEF * run['entropy']:.3f}", f"{RL_ZVP_COEF * run['wrong']:.3f}",
        ])  # fmt: skip
    return markdown(heads, lines)


def clip_lines(data: list[dict]) -> list[str]:
    """Return the table of the runs: score of the first step and of the last three, and clipped shares."""
    updates = [f"update {number}" for number in UPDATES]
    heads = ["environment", "method", "learning rate", "score", "clipped", *updates]
    lines = []
    for run in sorted(chosen(data), key=lambda run: (ENVIRONMENTS.index(run["environment"]), run["method"])):
        by_update = run["clipped_by_update"]
        shares = [f"{by_update[number]:.4f}" if number in by_update else "n/a" for number in UPDATES]
        start, end = run["score"]
        lines.append([
            run["environment"], run["method"], f"{run['learning_rate']:.1e}", f"{start:.3f} to {end:.3f}",
            f"{run['clipped']:.4f}", *shares,
        ])  # fmt: skip
    return markdown(heads, lines)


def alpha_lines(data: list[dict]) -> list[str]:
    """Return the table of ESPO's clip: share of uncertain tokens beyond the clip of each alpha."""
    lines = []
    for run in chosen(data, method="espo", rate="own"):
        shares = [f"{share:.3f}" for share in run["cut"].values()]
        lines.append([run["environment"], *shares, f"{alpha_of(run):g}"])
    return markdown(["environment", *(f"alpha {alpha:g}" for alpha in ALPHAS), "nearest to 0.1"], lines)


def spread_lines(data: list[dict]) -> list[str]:
    """Return the table of the spread: the power with which the mean log-ratio of a group falls with length.

    The power is the slope of log spread on log length over the bins of LENGTHS, by least squares; -0.5 if the
    tokens of a group move independently, 0 if they move together.
    """
    heads = ["environment", "group", "lengths", "spread of the shortest", "spread of the longest", "power"]
    lines = []
    for run in chosen(data, method="grpo", rate="own"):
        for kind, spread in run["spread"].items():
            if len(spread) < 2:
                lines.append([run["environment"], kind, ", ".join(spread) or "none", "n/a", "n/a", "n/a"])
                continue
            lengths, values = [int(length) for length in spread], list(spread.values())
            power = float(np.polyfit(np.log(lengths), np.log(values), deg=1)[0])
            bins = f"{lengths[0]} to {lengths[-1]}"
            ends = [f"{values[0]:.1e}", f"{values[-1]:.1e}"]
            lines.append([run["environment"], kind, bins, *ends, f"{power:+.2f}"])
    return markdown(heads, lines)


def alpha_of(run: dict) -> float:
    """Return the alpha whose share of cut tokens is nearest to TARGET."""
    return min(ALPHAS, key=lambda alpha: abs(run["cut"][str(alpha)] - TARGET))


def main() -> None:
    """Read the records, print the tables and write the file."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=Path, default=FOLDER, help="folder of the record files")
    args = parser.parse_args()
    try:
        data = read_panel(args.runs)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not data:
        parser.error(f"{args.runs}: no record, for example {ENVIRONMENTS[0]}_{RATES[0]}.jsonl, is there")
    tables = (regime_lines, clip_lines, spread_lines, alpha_lines)
    print("\n\n".join("\n".join(lines(data)) for lines in tables))
    write_json(args.json, data)


if __name__ == "__main__":
    main()
