"""The table of a folder of runs as experiments/run.py leaves it: final metric, tokens to target, waste, time.

    python experiments/report.py --runs runs/table --parent grpo
    python experiments/report.py --runs runs/table --parent grpo --rows grpo gspo zve --parents zve=gspo
    python experiments/report.py --runs runs/table --parent grpo --json table.json --plot curves.png
    python experiments/report.py --runs runs/table --parent grpo --export experiments/table/logs

A figure is a mean over the runs (seeds) of a row. Runs that have not ended yet are left out and named.

METRIC            at the last step, mean over the held-out sets; 95 % t-interval over runs
p                 two-sided Welch t-test of the final metric against the parent's, not corrected for the
                  number of rows; beside it the same after Holm's correction over all rows that have one
tokens to target  generated tokens until the mean evaluation curve of the row's runs, linear between
                  evaluations, first reaches the target: the parent's final mean, or --target. A mean over
                  the runs' own crossings would leave out those that never reach it
parent's / row's  the parent's tokens to that target over the row's; in brackets the 2.5 and 97.5 percentiles
                  of resampling the runs of both rows, where all rows cross it
at N tokens       the metric interpolated at N generated tokens, the most that every run here has reached
gradient tokens   sum of gradient_tokens_total / sum of tokens_total
inverted          completions whose advantage contradicts the verifier, of those trained on; mean over steps
seconds           sum of seconds_per_step: training and evaluations that rode along, without start-up

--export copies what is read here, for committing; the table of the copies is the same, because numbers are
rounded to 6 significant digits when they are read.
"""

import argparse
import json
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from scipy import stats

STEP_KEYS = ("tokens_total", "gradient_tokens_total", "zero_variance_frac", "seconds_per_step")
INVERSION = "inversion_frac"  # missing in a step that trained on nothing
EXPORTED = (  # for tables that are made of the logs
    "abs_dlogp", "mismatch_k3", "mismatch_routes", "mismatch_ess", "abs_log_ratio", "stale_frac",
    "policy_lag_max", "completion_tokens",
)  # fmt: skip
SMOOTHING_STEPS = 10  # of the cost plot
RESAMPLES = 2000  # of the runs, for the interval of a ratio
NONE = "n/a"


@dataclass(frozen=True)
class Run:
    """What is read of one run."""

    folder: Path
    log: list[dict]  # rows of metrics.jsonl, reduced to what is read
    steps: dict[str, np.ndarray]  # of every training step: generated_tokens and STEP_KEYS; INVERSION of most
    tokens: np.ndarray  # generated tokens at each evaluation
    seconds: np.ndarray  # of training until each evaluation
    values: np.ndarray  # the metric at each evaluation


# ---- reading -----------------------------------------------------------------------------------------------
def round_off(value: float) -> float:
    """6 significant digits, whole numbers as such; the same value again for a rounded one."""
    rounded = float(f"{value:.6g}") if isinstance(value, float) else value
    return int(rounded) if float(rounded).is_integer() else rounded


def read_log(file: Path, metric: str) -> list[dict]:
    """Rows of metrics.jsonl, reduced to the keys that are read, each a finite number.

    An evaluation has a row of its own, after that of its step: here they are one.
    """
    if not file.is_file():
        raise ValueError(f"{file} does not exist")
    log = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        place = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{place}: expected an object, found {line[:80]!r}")
        rides = log and row.keys() <= {"step", "generated_tokens"} | {n for n in row if n.startswith("eval/")}
        names = ["step", "generated_tokens", *(STEP_KEYS if row.get("step") != 0 and not rides else ())]
        names += [name for name in row if is_evaluation(name, metric) or name in (INVERSION, *EXPORTED)]
        for name in names:
            if name not in row:
                raise ValueError(f"{place}: {name} is missing")
            if type(row[name]) not in (int, float) or not math.isfinite(row[name]):
                raise ValueError(f"{place}: {name} is {row[name]!r}, expected a finite number")
        read = {name: round_off(row[name]) for name in names}
        if rides and read["step"] == log[-1]["step"]:
            log[-1] |= read
            continue
        log.append(read)
        if len(log) > 1 and not (
            log[-1]["step"] > log[-2]["step"] and log[-1]["generated_tokens"] >= log[-2]["generated_tokens"]
        ):
            raise ValueError(f"{place}: step or generated_tokens goes back")
    return log


def is_evaluation(name: str, metric: str) -> bool:
    """The metric asked for, and the three usual ones, so that an export can be read with --metric too."""
    leaf = name.split("/")[-1]
    usual = leaf == "accuracy" or leaf.startswith(("avg_at_", "pass_at_"))
    return name.startswith("eval/") and (leaf == metric or usual)


def length_of(folder: Path) -> tuple[int, float]:
    """Steps and generated tokens at which the run is over."""
    file = folder / "config.yaml"
    try:
        train = yaml.safe_load(file.read_text())["train"]
        return int(train["num_steps"]), float(train["max_generated_tokens"] or math.inf)
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{file}: the length of the run cannot be read ({why})") from error


def read_run(folder: Path, metric: str) -> Run | str:
    """One run, or how far it is where it has not ended; ValueError names the file and what is wrong."""
    num_steps, max_tokens = length_of(folder)
    file = folder / "metrics.jsonl"
    log = read_log(file, metric)
    last_step, tokens = (log[-1]["step"], log[-1]["generated_tokens"]) if log else (0, 0)
    if last_step < num_steps and tokens < max_tokens:
        return f"step {last_step} of {num_steps}, {tokens:,} generated tokens"
    steps = [row for row in log if row["step"] > 0]
    seconds = np.cumsum([row.get("seconds_per_step", 0.0) for row in log])
    curve = []
    for row, elapsed in zip(log, seconds):
        values = [value for name, value in row.items() if name.endswith(f"/{metric}")]
        if values:
            curve.append((row["step"], row["generated_tokens"], elapsed, sum(values) / len(values)))
    if not curve or (curve[0][0], curve[-1][0]) != (0, last_step):
        found = sorted({name.split("/")[-1] for row in log for name in row if name.startswith("eval/")})
        raise ValueError(
            f"{file}: eval/SET/{metric} is missing at step 0 or at the last step; metrics of this file: "
            + (", ".join(found) or "none")
        )
    _, tokens, seconds, values = map(np.array, zip(*curve))
    columns = {name: np.array([row[name] for row in steps]) for name in ("generated_tokens", *STEP_KEYS)}
    columns[INVERSION] = np.array([row[INVERSION] for row in steps if INVERSION in row])
    return Run(folder, log, columns, tokens, seconds, values)


def read_rows(folder: Path, names: list[str] | None, metric: str) -> dict[str, list[Run]]:
    """{row: its runs by seed}, in the order of names, or by name."""
    folders = sorted(folder.glob("*/seed_*/"), key=lambda path: (path.parent.name, len(path.name), path.name))
    if not folders:
        raise ValueError(f"{folder}: no ROW/seed_S folder in it; experiments/run.py makes them")
    rows = {}
    for run_folder in folders:
        if names is None or run_folder.parent.name in names:
            run = read_run(run_folder, metric)
            if isinstance(run, Run):
                rows.setdefault(run_folder.parent.name, []).append(run)
            else:
                print(f"left out, not ended yet: {run_folder} ({run})", file=sys.stderr)
    missing = [name for name in names or () if name not in rows]
    if missing or not rows:
        raise ValueError(
            f"{folder}: no run that has ended of {', '.join(missing) or 'any row'}; rows in it: "
            + ", ".join(sorted({path.parent.name for path in folders}))
        )
    check_sets([run for runs in rows.values() for run in runs], metric)
    return {name: rows[name] for name in names or rows}


def check_sets(runs: list[Run], metric: str) -> None:
    """Means over different held-out sets cannot be compared."""
    names = {name for run in runs for row in run.log for name in row if name.endswith(f"/{metric}")}
    for run in runs:
        for row in run.log:
            there = names & row.keys()
            if there and there != names:
                missing = ", ".join(sorted(names - there))
                raise ValueError(
                    f"{run.folder}/metrics.jsonl: step {row['step']} lacks {missing}, which others have"
                )


# ---- figures -----------------------------------------------------------------------------------------------
def t_interval(values: np.ndarray) -> list[float] | None:
    """95 % interval of the mean by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return [float(values.mean() - half), float(values.mean() + half)]


def welch_p(values: np.ndarray, others: np.ndarray) -> float | None:
    """Two-sided Welch t-test; None where it is not defined: a single value, or no spread in both."""
    if min(len(values), len(others)) < 2 or np.ptp(values) == np.ptp(others) == 0:
        return None
    moments = [x for v in (values, others) for x in (v.mean(), v.std(ddof=1), len(v))]
    return float(stats.ttest_ind_from_stats(*moments, equal_var=False).pvalue)


def holm(p_values: list[float | None]) -> list[float | None]:
    """Holm's step-down correction of those that are there: p_(i) (m - i + 1), never below an earlier one."""
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected, largest = [None] * len(p_values), 0.0
    for place, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - place)))
        corrected[i] = largest
    return corrected


def curve_of(runs: list[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Generated tokens [evaluations of all runs] and the metric of each run there [runs, evaluations]."""
    tokens = np.unique(np.concatenate([run.tokens for run in runs]))
    return tokens, np.array([np.interp(tokens, run.tokens, run.values) for run in runs])


def tokens_to(target: float, tokens: np.ndarray, values: np.ndarray) -> float | None:
    """Generated tokens at the first crossing of a curve that is linear between its points."""
    reached = np.flatnonzero(values >= target - 1e-9)  # a mean of equal values may be larger by rounding
    if not len(reached):
        return None
    i = reached[0]
    if i == 0:
        return float(tokens[0])
    share = min(1.0, (target - values[i - 1]) / (values[i] - values[i - 1]))
    return float(tokens[i - 1] + share * (tokens[i] - tokens[i - 1]))


def speedup(runs: list[Run], parents: list[Run], target: float | None) -> tuple[float | None, list | None]:
    """The parent's tokens to the target over the row's, and its interval over resampled runs of both."""
    curves = [curve_of(parents), curve_of(runs)]

    def ratio(picks: list[np.ndarray]) -> float | None:
        means = [values[pick].mean(axis=0) for (_, values), pick in zip(curves, picks)]
        goal = means[0][-1] if target is None else target
        needed = [tokens_to(goal, tokens, mean) for (tokens, _), mean in zip(curves, means)]
        return None if None in needed or not needed[1] else needed[0] / needed[1]

    generator = np.random.default_rng(0)
    sizes = [len(parents), len(runs)]
    drawn = [ratio([generator.integers(n, size=n) for n in sizes]) for _ in range(RESAMPLES)]
    interval = None if None in drawn or min(sizes) < 2 else np.percentile(drawn, [2.5, 97.5]).tolist()
    return ratio([np.arange(n) for n in sizes]), interval


def make_table(rows: dict[str, list[Run]], parents: dict[str, str], target: float | None) -> list[dict]:
    """One dictionary per row; None stands for n/a."""
    final = {name: np.array([run.values[-1] for run in runs]) for name, runs in rows.items()}
    equal_tokens = equal_tokens_of(rows)
    p_values = [None if parents[n] == n else welch_p(final[n], final[parents[n]]) for n in rows]
    table = []
    for (name, runs), p, p_holm in zip(rows.items(), p_values, holm(p_values)):
        parent = parents[name]
        goal = float(final[parent].mean()) if target is None else target
        tokens, values = curve_of(runs)
        ratio, ratio_interval = speedup(runs, rows[parent], target)
        inverted = [run.steps[INVERSION].mean() for run in runs if len(run.steps[INVERSION])]
        shares = [r.steps["gradient_tokens_total"].sum() / r.steps["tokens_total"].sum() for r in runs]
        table.append(
            {
                "row": name,
                "n": len(runs),
                "mean": float(final[name].mean()),
                "interval": t_interval(final[name]),
                "p_value": p,
                "p_value_holm": p_holm,
                "tokens_to_target": tokens_to(goal, tokens, values.mean(axis=0)),
                "speedup": None if parent == name else ratio,
                "speedup_interval": None if parent == name else ratio_interval,
                "gradient_token_share": float(np.mean(shares)),
                "inversion_rate": float(np.mean(inverted)) if inverted else None,
                "seconds": float(np.mean([run.seconds[-1] for run in runs])),
                "mean_at_equal_tokens": float(
                    np.mean([np.interp(equal_tokens, run.tokens, run.values) for run in runs])
                ),
                "parent": parent,
            }
        )
    return table


def equal_tokens_of(rows: dict[str, list[Run]]) -> int:
    """The most generated tokens that every run has reached."""
    return int(min(run.tokens[-1] for runs in rows.values() for run in runs))


# ---- what is shown -----------------------------------------------------------------------------------------
def show(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def show_p(p: float | None) -> str:
    return show(p, ".3f" if p is None or p >= 0.001 else ".1e")


def ratio_cell(row: dict) -> str:
    interval = row["speedup_interval"]
    return show(row["speedup"], ".2f") + (" ({:.2f} to {:.2f})".format(*interval) if interval else "")


def print_table(table: list[dict], rows: dict[str, list[Run]], metric: str, target: float | None) -> None:
    """As markdown, and below it what the targets are."""
    mean = {row["row"]: row["mean"] for row in table}
    header = ["row", "n", metric, "95 % interval", "minus parent", "p", "p, Holm", "tokens to target"]
    header += ["parent's / row's", f"at {equal_tokens_of(rows):,} tokens", "gradient tokens"]
    header += ["inverted", "seconds"]
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for row in table:
        parent, own = row["parent"], row["parent"] == row["row"]
        cells = [
            row["row"],
            str(row["n"]),
            f"{row['mean']:.4f}",
            NONE if row["interval"] is None else "{:.4f} to {:.4f}".format(*row["interval"]),
            NONE if own else f"{row['mean'] - mean[parent]:+.4f}",
            show_p(row["p_value"]),
            show_p(row["p_value_holm"]),
            "not reached" if row["tokens_to_target"] is None else f"{row['tokens_to_target']:,.0f}",
            ratio_cell(row),
            f"{row['mean_at_equal_tokens']:.4f}",
            f"{row['gradient_token_share']:.3f}",
            show(row["inversion_rate"], ".3f"),
            f"{row['seconds']:.1f}",
        ]
        print("| " + " | ".join(cells) + " |")
    print()
    for parent in dict.fromkeys(row["parent"] for row in table):
        children = ", ".join(row["row"] for row in table if row["parent"] == parent)
        goal = f"{mean[parent]:.4f}, its final mean" if target is None else f"{target:g}"
        print(f"parent {parent} of {children}: target {goal}")


def moving_sum(values: np.ndarray) -> np.ndarray:
    """Over the last SMOOTHING_STEPS steps, fewer at the start."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[1:] - total[np.maximum(0, np.arange(1, len(total)) - SMOOTHING_STEPS)]


def draw(axes, curves: list[tuple[np.ndarray, np.ndarray]], label: str) -> None:
    """Mean over runs on the stretch that all have, with a band of one standard error."""
    grid = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), 200)
    values = np.array([np.interp(grid, x, y) for x, y in curves])  # [runs, 200]
    (line,) = axes.plot(grid, values.mean(0), label=f"{label} (n = {len(curves)})")
    if len(curves) > 1:
        error = values.std(0, ddof=1) / math.sqrt(len(curves))
        axes.fill_between(
            grid, values.mean(0) - error, values.mean(0) + error, color=line.get_color(), alpha=0.2, lw=0
        )


def gradient_share(run: Run) -> tuple[np.ndarray, np.ndarray]:
    generated = np.maximum(1, moving_sum(run.steps["tokens_total"]))
    return run.steps["generated_tokens"], moving_sum(run.steps["gradient_tokens_total"]) / generated


def zero_variance_rate(run: Run) -> tuple[np.ndarray, np.ndarray]:
    rate = run.steps["zero_variance_frac"]
    return run.steps["generated_tokens"], moving_sum(rate) / moving_sum(np.ones(len(rate)))


def plot(rows: dict[str, list[Run]], metric: str, file: Path) -> None:
    """The metric over tokens and over seconds; in FILE_cost the waste over tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    smoothed = f"share over {SMOOTHING_STEPS} steps"
    figures = {
        file: (
            ("generated tokens", f"{metric}, held out", lambda run: (run.tokens, run.values)),
            ("seconds of training", f"{metric}, held out", lambda run: (run.seconds, run.values)),
        ),
        file.with_name(f"{file.stem}_cost{file.suffix}"): (
            ("generated tokens", f"gradient tokens, {smoothed}", gradient_share),
            ("generated tokens", f"zero-variance groups, {smoothed}", zero_variance_rate),
        ),
    }
    for path, panels in figures.items():
        figure, both = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
        for axes, (x_label, y_label, curve) in zip(both, panels):
            for name, runs in rows.items():
                draw(axes, [curve(run) for run in runs], name)
            axes.set(xlabel=x_label, ylabel=y_label)
            axes.grid(alpha=0.3)
        both[0].legend(fontsize="small")
        figure.savefig(path, dpi=110)
        plt.close(figure)


def export(rows: dict[str, list[Run]], folder: Path) -> None:
    """What is read of each run, and what says how it was made."""
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"--export: {folder} is not empty; its old runs would mix with these, remove them first"
        )
    for name, runs in rows.items():
        for run in runs:
            target = folder / name / run.folder.name
            target.mkdir(parents=True)
            lines = [json.dumps(row, separators=(",", ":")) for row in run.log]
            (target / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
            for file in ("config.yaml", "versions.json"):
                shutil.copy(run.folder / file, target / file)


def parents_of(rows: dict[str, list[Run]], parent: str, others: list[str]) -> dict[str, str]:
    """{row: parent} from --parent and --parents."""
    parents = dict.fromkeys(rows, parent)
    for text in others:
        row, equals, name = text.partition("=")
        if not equals or row not in rows:
            raise ValueError(f"--parents {text}: expected row=parent, with one of the rows {', '.join(rows)}")
        parents[row] = name
    for name in parents.values():
        if name not in rows:
            raise ValueError(f"parent {name!r} is none of the rows {', '.join(rows)}")
    return parents


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="folder with ROW/seed_S/metrics.jsonl")
    parser.add_argument("--parent", required=True, help="the row that all others are compared with")
    parser.add_argument(
        "--parents", nargs="+", default=[], metavar="ROW=PARENT", help="rows with another parent"
    )
    parser.add_argument(
        "--rows", nargs="+", help="these rows in this order (default: the parent, then the others by name)"
    )
    parser.add_argument("--metric", default="avg_at_8", help="of eval/SET/METRIC (default: %(default)s)")
    parser.add_argument("--target", type=float, help="of tokens to target (default: the parent's final mean)")
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="write the curves here, and FILE_cost.png"
    )
    parser.add_argument("--export", type=Path, metavar="DIR", help="copy what is read to this new folder")
    args = parser.parse_args(argv)
    try:
        rows = read_rows(args.runs, args.rows, args.metric)
        if args.rows is None:
            rows = {name: rows[name] for name in sorted(rows, key=lambda name: name != args.parent)}
        table = make_table(rows, parents_of(rows, args.parent, args.parents), args.target)
        print_table(table, rows, args.metric, args.target)
        if args.json:
            args.json.write_text(json.dumps(table, indent=1))
        if args.plot:
            plot(rows, args.metric, args.plot)
        if args.export:
            export(rows, args.export)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
