"""Make the table of a set of runs, keep its record in one file, and check the tables of the docs against it.

    python experiments/report.py --runs runs/zero_variance --parent grpo
    python experiments/report.py --runs runs/zero_variance --parent grpo --json table.json --plot curves.png
    python experiments/report.py --runs runs/zero_variance --parent grpo --parents a=gspo --columns row p
    python experiments/report.py --runs runs/zero_variance --parent grpo --export runs.jsonl
    python experiments/report.py --runs experiments/studies/zero_variance/runs.jsonl --parent grpo \\
        --rows grpo gspo
    python experiments/report.py --runs runs/group_size --parent group_8 \\
        --against rollout.group_size zero_variance_frac share.png    # a metric over a setting of the rows
    python experiments/report.py --runs runs/long_chains --parent grpo --metric chains/avg_at_4 \\
        --curves mechanisms.png entropy clipped/entropy_group_0          # metrics of the steps over tokens
    python experiments/report.py --check      # compare every table of the docs with its record
    python experiments/report.py --fix        # rewrite the tables that differ

--runs takes folders as experiments/run.py leaves them (ROW/seed_S), record files, or several of both. A
figure is a mean over the runs (seeds) of a row. Runs that have not ended are left out and named.

--metric NAME is of the evaluations, eval/SET/NAME; --metric train/NAME is of the training steps, as the mean
over the latest ten of them: where runs evaluate at their ends alone, it says how fast they get there.

COLUMNS. Without --columns the table has those from `row` to `seconds`.
  row, n            The name of the row and the number of its runs.
  metric            The metric at the last step, mean over the held-out sets where it is of evaluations.
  interval          95 % t-interval over runs.
  minus_parent      The difference to the parent's metric.
  p, p_holm         Two-sided Welch t-test of the final metric against the parent's; the same after
                    Holm's correction over all rows of the table that have one.
  tokens_to_target  Generated tokens until the mean curve of the row's runs, linear between its points, first
                    reaches the target: the parent's final mean, or --target. A mean over the runs' own
                    crossings would leave out those that never reach it. A run that ended before others keeps
                    its last value, so a rising parent is at its own final mean when its longest run ends.
                    n/a where a run has a start and an end alone: a line between them tells no more than the
                    final metric.
  speedup           The parent's tokens to that target over the row's; in brackets the 2.5 and 97.5
                    percentiles of resampling the runs of both rows, where all resampled curves cross it.
                    Intervals from 5 to 10 runs are too narrow.
  at_equal_tokens   The metric interpolated at the most generated tokens that every run here has reached.
  gradient_tokens   Sum of gradient_tokens_total over the sum of tokens_total.
  inverted          Share of the trained completions whose advantage contradicts the verifier: the mean of
                    all steps.
  seconds           Sum of seconds_per_step: the steps alone, without start-up.
  parent            The row that this one is compared with.
  seconds_to_target As tokens_to_target, over the seconds of the steps.
  times_faster      The parent's seconds over the row's, seed by seed: the mean and in brackets the least and
                    the largest.
  runs              The final metric of each run, by seed.
  offline_tokens    Tokens that the offline scoring of the prompts generated (data/score.py), which is done
                    once for all runs. 0 for rows without; n/a where the record does not hold them.
  speedup_shared    As speedup, with 1/n of offline_tokens added to what the row needs, n its runs; the
                    parent's likewise.
  speedup_whole     As speedup, with all of offline_tokens added to what the row needs, as for a single run.
  mean:NAME         Mean over runs of the mean over steps of a metric, such as mean:abs_dlogp.
  max:NAME          The largest value of a metric over all steps of all runs.
  step_N:NAME       Mean over runs of a metric at step N.

RECORDS. --export writes one JSON line per run that has ended, and --runs reads it back. Metrics have seven
digits, as many as float32 has:
  {"row", "seed", "commit", "versions": {package: version},  # and "weights": a digest of those at the start;
                                                     # "earlier": the same of earlier starts, if they differ
   "settings": {dotted name: value},                  # those that differ from the defaults
   "steps": {metric: [value of step 1, 2, ...]},      # among them step and generated_tokens; null: not there
   "evaluations": {metric: [value of each]},          # step and generated_tokens, then eval/SET/METRIC
   "offline_tokens": 42000}                           # null: the run used scores, and their file is gone

TABLES OF THE DOCS. A comment that starts a line and stands right above a markdown table says what makes it.
Paths in it are relative to the document.
  <!-- report: --runs runs.jsonl --parent grpo ... -->   The options above that make a table.
  <!-- report: module PACKAGE.MODULE FILE.json -->       The lines that MODULE.table_lines(data) returns for
                                                         the JSON file; MODULE:NAME calls NAME instead.
  <!-- report: none, REASON -->                          A table that no record makes.
--check looks at all *.md files that git knows or would add. A table without a comment is an error where a
runs.jsonl lies beside the document. The exit code is 0 if every figure agrees, 1 if not, 2 for wrong options.
"""

import argparse
import fnmatch
import importlib
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
STEP_KEYS = ("tokens_total", "gradient_tokens_total", "zero_variance_frac", "seconds_per_step")
INVERSION = "inversion_frac"  # missing in a step that trained on nothing
RECORDED = (  # patterns of the metrics of a step that are kept where they are there
    INVERSION, "score", "reward", "verdict/ok_frac", "completion_tokens", "abs_dlogp", "mismatch_k3",
    "mismatch_routes", "mismatch_ess", "abs_log_ratio", "entropy", "clipped", "clip_eps",
    "entropy/entropy_group_*", "clipped/entropy_group_*", "cut_at_limit_frac", "rollout_bubble", "seconds/*",
    "zero_variance/*", "account/prompts_skipped", "account/prompts_stopped",
)  # fmt: skip
SMOOTHING_STEPS = 10  # width of moving sums and means
TRAINING = "train/"  # before the name of a metric of the steps
LINE_STYLES = ("-", "--", ":")
MIN_POINTS = 3  # a run needs these to say where its curve crosses a target
RESAMPLES = 2000  # draws of runs for the interval of a ratio
NONE = "n/a"


@dataclass(frozen=True)
class Run:
    """One run that has ended: its record, and what the table and the plots read of it."""

    record: dict  # as in a line of a record file; of a run folder without commit, versions and settings
    place: str  # the file, and the line of a record, for messages
    folder: Path | None  # None: read from a record file
    steps: dict[str, np.ndarray]  # {metric: [steps]}; NaN where a step lacks it
    tokens: np.ndarray  # generated tokens at each point of the metric's curve
    seconds: np.ndarray  # seconds of training until each point
    values: np.ndarray  # the metric at each point
    offline_tokens: float | None  # that the scoring of its prompts generated; None: not known


# ------------------------------------------------------------------------------------------------------------
# Reading
# ------------------------------------------------------------------------------------------------------------
def parse_object(text: str, place: str) -> dict:
    """Parse a line that must hold a JSON object."""
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: expected an object, found {text[:80]!r}")
    return row


def check_number(value: object, name: str, place: str) -> None:
    """Raise ValueError for what is no finite number."""
    if not is_finite(value):
        raise ValueError(f"{place}: {name} is {value!r}, expected a finite number")


def is_recorded_evaluation(name: str, metric: str) -> bool:
    """Tell whether a record keeps a figure of an evaluation: the metric asked for and the usual ones."""
    leaf = name.split("/")[-1]
    usual = leaf == "accuracy" or leaf.startswith(("avg_at_", "pass_at_"))
    return name.startswith("eval/") and (name.endswith(f"/{metric}") or usual)


def is_recorded(name: str, metric: str) -> bool:
    """Tell whether a record keeps a metric of the steps: those above, and the one asked for."""
    if name in ("step", "generated_tokens", *STEP_KEYS) or TRAINING + name == metric:
        return True
    return any(fnmatch.fnmatch(name, pattern) for pattern in RECORDED)


def is_finite(value: object) -> bool:
    """Tell whether a value is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def read_metrics(file: Path, metric: str) -> dict[str, dict[str, list]]:
    """Read metrics.jsonl into the columns of a record: {"steps": ..., "evaluations": ...}.

    An evaluation has a row of its own, which holds eval/ metrics. Metrics of the steps that no record keeps
    are taken where they are numbers.
    """
    if not file.is_file():
        raise ValueError(f"{file} does not exist")
    rows, always = {"steps": [], "evaluations": []}, ("step", "generated_tokens")
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        place = f"{file}, line {number}"
        row = parse_object(line, place)
        if any(name.startswith("eval/") for name in row):
            kind, found = "evaluations", [name for name in row if is_recorded_evaluation(name, metric)]
        else:
            kind = "steps"
            there = [name for name in row if is_recorded(name, metric) or is_finite(row[name])]
            found = [*STEP_KEYS, *there]
        names = dict.fromkeys([*always, *found])
        for name in names:
            if name not in row:
                raise ValueError(f"{place}: {name} is missing")
            check_number(row[name], name, place)
        rows[kind].append({name: row[name] for name in names})
    columns = {kind: dict.fromkeys([*always, *(name for row in rows[kind] for name in row)]) for kind in rows}
    return {kind: {name: [row.get(name) for row in rows[kind]] for name in columns[kind]} for kind in rows}


def check_curves(record: dict, place: str) -> None:
    """Refuse a record with columns of unequal length, values that are no numbers, or steps out of order."""
    for kind, keys in (("steps", STEP_KEYS), ("evaluations", ())):
        required, columns = ("step", "generated_tokens", *keys), record.get(kind)
        if not isinstance(columns, dict) or not all(isinstance(column, list) for column in columns.values()):
            raise ValueError(f"{place}: {kind} must be lists of numbers by name")
        for name in required:
            if name not in columns:
                raise ValueError(f"{place}: {kind}.{name} is missing")
        for name, column in columns.items():
            if len(column) != len(columns["step"]):
                raise ValueError(
                    f"{place}: {kind}.{name} has {len(column)} values, {kind}.step {len(columns['step'])}"
                )
            for value in column:
                if value is not None or name in required:
                    check_number(value, f"{kind}.{name}", place)
        check_order(kind, columns, place)


def check_order(kind: str, columns: dict[str, list], place: str) -> None:
    """Refuse steps that go back or skip one, and generated tokens that go back."""
    step_before, tokens_before = (0 if kind == "steps" else -1), 0
    for step, tokens in zip(columns.get("step", ()), columns.get("generated_tokens", ())):
        skips = kind == "steps" and step != step_before + 1
        if skips or step <= step_before or tokens < tokens_before:
            raise ValueError(
                f"{place}: {kind}: step {step} at {tokens} generated_tokens cannot follow step "
                f"{step_before} at {tokens_before}"
            )
        step_before, tokens_before = step, tokens


def evaluation_curve(record: dict, elapsed: np.ndarray, metric: str) -> tuple[np.ndarray, ...]:
    """Return generated tokens, seconds and the metric, mean over the held-out sets, at each evaluation."""
    evaluations, last_step = record["evaluations"], len(elapsed) - 1
    columns = [column for name, column in evaluations.items() if name.endswith(f"/{metric}")]
    curve = []
    for i, (step, tokens) in enumerate(zip(evaluations["step"], evaluations["generated_tokens"])):
        values = [column[i] for column in columns if column[i] is not None]
        if values:
            curve.append((step, tokens, elapsed[min(step, last_step)], sum(values) / len(values)))
    if not curve or (curve[0][0], curve[-1][0]) != (0, last_step):
        found = sorted({name.split("/")[-1] for name in evaluations if name.startswith("eval/")})
        raise ValueError(
            f"eval/SET/{metric} is missing at step 0 or at the last step; metrics of this run: "
            + (", ".join(found) or "none")
        )
    _, tokens, seconds, values = map(np.array, zip(*curve))
    return tokens, seconds, values


def training_curve(steps: dict[str, np.ndarray], elapsed: np.ndarray, metric: str) -> tuple[np.ndarray, ...]:
    """Return generated tokens, seconds and the metric as the mean over the latest steps that have it."""
    if metric not in steps:
        raise ValueError(f"no step has {metric}; there are {', '.join(sorted(steps))}")
    tokens, values = smoothed(steps, metric)
    return tokens, elapsed[1:][~np.isnan(steps[metric])], values


def make_run(record: dict, place: str, folder: Path | None, metric: str) -> Run:
    """Derive the arrays of a run from its record."""
    check_curves(record, place)
    columns = record["steps"].items()
    steps = {name: np.array(column, dtype=float) for name, column in columns}  # None becomes NaN
    elapsed = np.concatenate([[0.0], np.cumsum(steps["seconds_per_step"])])  # [steps + 1]
    try:
        if metric.startswith(TRAINING):
            tokens, seconds, values = training_curve(steps, elapsed, metric.removeprefix(TRAINING))
        else:
            tokens, seconds, values = evaluation_curve(record, elapsed, metric)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    settings = record.get("settings", {}).items()
    is_scored = any(name.endswith("zero_variance.offline_scores") and file for name, file in settings)
    offline = record.get("offline_tokens", None if is_scored else 0)
    if offline is not None:
        check_number(offline, "offline_tokens", place)
    return Run(record, place, folder, steps, tokens, seconds, values, offline)


def config_of(folder: Path) -> dict:
    """Return the settings that a run has saved."""
    file = folder / "config.yaml"
    try:
        config = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: expected sections of settings, found {config!r}")
    return config


def offline_tokens_of(folder: Path) -> int | None:
    """Return the tokens that the offline scoring of a run's prompts generated; None if a file is gone."""
    config = config_of(folder)
    sections = [own.get("zero_variance") or {} for own in (config, *(config.get("stages") or ()))]
    total = 0
    for scores in {section.get("offline_scores") for section in sections} - {None}:
        if not (ROOT / scores).is_file():
            return None
        header, *rows = (json.loads(line) for line in (ROOT / scores).read_text().splitlines())
        total += round(sum(row["mean_tokens"] for row in rows) * header["samples"])
    return total


def progress_of(folder: Path) -> str:
    """Say how far a run is that has not ended. The last line of its log may be half written."""
    file, errors = folder / "metrics.jsonl", sorted(folder.glob("error_rank_*.txt"))
    why = f"; see {errors[0].name}" if errors else ""
    *lines, _ = file.read_text().split("\n") if file.is_file() else [""]
    if not lines:
        return f"no step yet{why}"
    row = parse_object(lines[-1], f"{file}, line {len(lines)}")
    return f"step {row.get('step')}, {row.get('generated_tokens', 0):,} generated tokens{why}"


def read_run(folder: Path, metric: str) -> Run | str:
    """Read a run folder; return how far the run is where it has not ended. Its summary is written last."""
    file, seed = folder / "metrics.jsonl", folder.name.removeprefix("seed_")
    if not seed.isdigit():
        raise ValueError(f"{folder}: expected a folder seed_S with a number S")
    if not (folder / "summary.json").is_file():
        return progress_of(folder)
    curves = read_metrics(file, metric)
    for kind, columns in curves.items():
        check_order(kind, columns, str(file))
    record = {"row": folder.parent.name, "seed": int(seed), "offline_tokens": offline_tokens_of(folder)}
    record |= curves
    return make_run(record, str(file), folder, metric)


def read_folder(root: Path, names: list[str] | None, metric: str) -> tuple[list[Run], set[str]]:
    """Read the runs below a folder that have ended; return them and the names of all rows there."""
    folders = sorted(root.glob("*/seed_*/"))
    if not folders:
        raise ValueError(f"{root}: no ROW/seed_S folder in it; experiments/run.py makes them")
    runs = []
    for folder in folders:
        if names is None or folder.parent.name in names:
            run = read_run(folder, metric)
            if isinstance(run, Run):
                runs.append(run)
            else:
                print(f"left out, not ended yet: {folder} ({run})", file=sys.stderr)
    return runs, {folder.parent.name for folder in folders}


def read_records(file: Path, names: list[str] | None, metric: str) -> tuple[list[Run], set[str]]:
    """Read the runs of a record file; return them and the names of all rows there."""
    runs, found = [], set()
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        place = f"{file}, line {number}"
        record = parse_object(line, place)
        if not isinstance(record.get("row"), str) or type(record.get("seed")) is not int:
            raise ValueError(f"{place}: expected a row and a seed; --export writes such a file")
        found.add(record["row"])
        if names is None or record["row"] in names:
            runs.append(make_run(record, place, None, metric))
    return runs, found


def read_rows(paths: list[Path], names: list[str] | None, metric: str) -> dict[str, list[Run]]:
    """Return {row: its runs by seed}, in the order of names, or by name."""
    runs, found = [], set()
    for path in paths:
        some, rows_there = (read_records if path.is_file() else read_folder)(path, names, metric)
        runs, found = [*runs, *some], found | rows_there
    rows: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.record["row"], run.record["seed"])):
        row = rows.setdefault(run.record["row"], [])
        if row and row[-1].record["seed"] == run.record["seed"]:
            raise ValueError(
                f"row {run.record['row']}, seed {run.record['seed']} is there twice: {row[-1].place} and "
                f"{run.place}"
            )
        row.append(run)
    missing = [name for name in names or () if name not in rows]
    if missing or not rows:
        raise ValueError(
            f"{', '.join(map(str, paths))}: no run that has ended of {', '.join(missing) or 'any row'}; "
            f"rows in it: {', '.join(sorted(found))}"
        )
    check_sets(runs, metric)
    return {name: rows[name] for name in names or rows}


def check_sets(runs: list[Run], metric: str) -> None:
    """Refuse evaluations on different held-out sets: their means cannot be compared."""
    curves = [run.record["evaluations"] for run in runs]
    names = {name for columns in curves for name in columns if name.endswith(f"/{metric}")}
    for run, columns in zip(runs, curves):
        for i, step in enumerate(columns["step"]):
            there = {name for name in names & columns.keys() if columns[name][i] is not None}
            if there and there != names:
                missing = ", ".join(sorted(names - there))
                raise ValueError(f"{run.place}: step {step} lacks {missing}, which others have")


# ------------------------------------------------------------------------------------------------------------
# Figures
# ------------------------------------------------------------------------------------------------------------
def t_interval(values: np.ndarray) -> list[float] | None:
    """Return the 95 % interval of the mean by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return [float(values.mean() - half), float(values.mean() + half)]


def welch_p(values: np.ndarray, others: np.ndarray) -> float | None:
    """Return p of a two-sided Welch t-test; None where a row has a single value or neither has any spread."""
    if min(len(values), len(others)) < 2 or np.ptp(values) == np.ptp(others) == 0:
        return None
    moments = [x for v in (values, others) for x in (v.mean(), v.std(ddof=1), len(v))]
    return float(stats.ttest_ind_from_stats(*moments, equal_var=False).pvalue)


def holm(p_values: list[float | None]) -> list[float | None]:
    """Apply Holm's step-down correction: p_(i) (m - i + 1), never below an earlier one; None stays None."""
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected, largest = [None] * len(p_values), 0.0
    for place, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - place)))
        corrected[i] = largest
    return corrected


def curve_of(runs: list[Run], over: str = "tokens") -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens or seconds of all points of the runs, and each run's metric there [runs, points]."""
    grid = np.unique(np.concatenate([getattr(run, over) for run in runs]))
    return grid, np.array([np.interp(grid, getattr(run, over), run.values) for run in runs])


def is_curve(runs: list[Run]) -> bool:
    """Tell whether all runs have as many points as a crossing of a target needs."""
    return min(len(run.values) for run in runs) >= MIN_POINTS


def first_crossing(target: float, grid: np.ndarray, values: np.ndarray) -> float | None:
    """Return where a curve, linear between the points of the grid, first reaches the target, or None."""
    reached = np.flatnonzero(values >= target - 1e-9)  # a mean of equal values may be larger by rounding
    if not len(reached):
        return None
    i = reached[0]
    if i == 0:
        return float(grid[0])
    share = min(1.0, (target - values[i - 1]) / (values[i] - values[i - 1]))
    return float(grid[i - 1] + share * (grid[i] - grid[i - 1]))


def speedup(
    runs: list[Run], parents: list[Run], target: float | None, charge: str = ""
) -> tuple[float | None, list | None]:
    """Return the parent's tokens to the target over the row's, and its interval over resampled runs.

    charge: how much of the offline scoring's tokens is added to both. Nothing; "shared" by the runs; "whole".
    """
    curves, offline = [curve_of(parents), curve_of(runs)], [parents[0].offline_tokens, runs[0].offline_tokens]
    if charge and None in offline:
        return None, None
    added = [tokens / (len(r) if charge == "shared" else 1) if charge else 0.0
             for tokens, r in zip(offline, (parents, runs))]  # fmt: skip

    def ratio(picks: list[np.ndarray]) -> float | None:
        means = [values[pick].mean(axis=0) for (_, values), pick in zip(curves, picks)]
        goal = means[0][-1] if target is None else target
        needed = [first_crossing(goal, tokens, mean) for (tokens, _), mean in zip(curves, means)]
        if None in needed or not needed[1]:
            return None
        return (needed[0] + added[0]) / (needed[1] + added[1])

    generator = np.random.default_rng(0)
    sizes = [len(parents), len(runs)]
    drawn = [ratio([generator.integers(n, size=n) for n in sizes]) for _ in range(RESAMPLES)]
    interval = None if None in drawn or min(sizes) < 2 else np.percentile(drawn, [2.5, 97.5]).tolist()
    return ratio([np.arange(n) for n in sizes]), interval


SPEEDUPS = tuple(
    f"speedup{charge}{what}" for charge in ("", "_shared", "_whole") for what in ("", "_interval")
)


def speedups_of(runs: list[Run], parents: list[Run], target: float | None) -> dict[str, float | list | None]:
    """Return the ratios of tokens by name: without the offline scoring, with a share, with all of it."""
    plain, figures = speedup(runs, parents, target), []
    is_free = runs[0].offline_tokens == parents[0].offline_tokens == 0
    for charge in ("", "shared", "whole"):
        figures += plain if is_free or not charge else speedup(runs, parents, target, charge)
    return dict(zip(SPEEDUPS, figures))


def seconds_ratios(runs: list[Run], parents: list[Run]) -> list[float]:
    """Return the parent's seconds over the row's, for each seed that both have."""
    of_parent = {run.record["seed"]: run.seconds[-1] for run in parents}
    return [
        float(of_parent[run.record["seed"]] / run.seconds[-1])
        for run in runs
        if run.record["seed"] in of_parent
    ]


def statistic(runs: list[Run], column: str) -> float | None:
    """Return the figure of a column such as mean:abs_dlogp; None where no run has the metric."""
    which, _, metric = column.partition(":")
    curves = [run.steps[metric] for run in runs if metric in run.steps]
    if which.startswith("step_"):
        at = int(which.removeprefix("step_")) - 1
        curves = [curve[at : at + 1] for curve in curves]
    curves = [curve[~np.isnan(curve)] for curve in curves]
    curves = [curve for curve in curves if len(curve)]
    if not curves:
        return None
    if which == "max":
        return float(max(curve.max() for curve in curves))
    return float(np.mean([curve.mean() for curve in curves]))


def make_table(
    rows: dict[str, list[Run]], parents: dict[str, str], target: float | None, columns: tuple[str, ...] = ()
) -> list[dict]:
    """Return one dictionary per row; None stands for n/a. Columns with a colon are added to it by name."""
    final = {name: np.array([run.values[-1] for run in runs]) for name, runs in rows.items()}
    equal_tokens = equal_tokens_of(rows)
    p_values = [None if parents[n] == n else welch_p(final[n], final[parents[n]]) for n in rows]
    table = []
    for (name, runs), p, p_holm in zip(rows.items(), p_values, holm(p_values)):
        parent = parents[name]
        goal = float(final[parent].mean()) if target is None else target
        to_target = {}
        for over in ("tokens", "seconds"):
            grid, values = curve_of(runs, over)
            reached = first_crossing(goal, grid, values.mean(axis=0)) if is_curve(runs) else None
            to_target[f"{over}_to_target"] = reached
        are_curves = parent != name and is_curve(runs + rows[parent])
        speedups = speedups_of(runs, rows[parent], target) if are_curves else {}
        shares = [r.steps["gradient_tokens_total"].sum() / r.steps["tokens_total"].sum() for r in runs]
        table.append(
            {
                "row": name,
                "n": len(runs),
                "mean": float(final[name].mean()),
                "finals": final[name].tolist(),
                "interval": t_interval(final[name]),
                "minus_parent": None if parent == name else float(final[name].mean() - final[parent].mean()),
                "p_value": p,
                "p_value_holm": p_holm,
                "is_curve": is_curve(runs),
                **to_target,
                **dict.fromkeys(SPEEDUPS),
                **speedups,
                "offline_tokens": runs[0].offline_tokens,
                "gradient_token_share": float(np.mean(shares)),
                "inversion_rate": statistic(runs, f"mean:{INVERSION}"),
                "seconds": float(np.mean([run.seconds[-1] for run in runs])),
                "times_faster": [] if parent == name else seconds_ratios(runs, rows[parent]),
                "mean_at_equal_tokens": float(
                    np.mean([np.interp(equal_tokens, run.tokens, run.values) for run in runs])
                ),
                "parent": parent,
                **{column: statistic(runs, column) for column in columns if ":" in column},
            }
        )
    return table


def equal_tokens_of(rows: dict[str, list[Run]]) -> int:
    """Return the most generated tokens that every run has reached."""
    return int(min(run.tokens[-1] for runs in rows.values() for run in runs))


# ------------------------------------------------------------------------------------------------------------
# The table as text
# ------------------------------------------------------------------------------------------------------------
def show(value: float | None, form: str) -> str:
    """Format a value, or say that it is not available."""
    return NONE if value is None else format(value, form)


def show_p(p: float | None) -> str:
    """Format a p-value, with three digits or in powers of ten."""
    return show(p, ".3f" if p is None or p >= 0.001 else ".1e")


def show_interval(interval: list[float] | None, form: str) -> str:
    """Format both bounds of an interval."""
    return NONE if interval is None else " to ".join(format(bound, form) for bound in interval)


def show_speedup(row: dict, name: str = "speedup") -> str:
    """Format a ratio of tokens and, where it is known, its interval."""
    interval = row[f"{name}_interval"]
    return show(row[name], ".2f") + (f" ({show_interval(interval, '.2f')})" if interval else "")


def show_reached(row: dict, over: str) -> str:
    """Format the tokens or seconds to the target; None: the row did not reach it."""
    number = row[f"{over}_to_target"]
    return NONE if not row["is_curve"] else "not reached" if number is None else f"{number:,.0f}"


def show_ratios(ratios: list[float]) -> str:
    """Format the mean of ratios, the least and the largest; none of them is n/a."""
    if not ratios:
        return NONE
    return f"{np.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def show_statistic(value: float | None) -> str:
    """Show three significant digits, and whole thousands with a comma."""
    return show(value, ",.0f" if value is not None and abs(value) >= 1000 else ".3g")


COLUMNS: dict[str, tuple[str, Callable[[dict], str]]] = {  # {name: (header, cell of a row)}
    "row": ("row", lambda row: row["row"]),
    "n": ("n", lambda row: str(row["n"])),
    "metric": ("{metric}", lambda row: f"{row['mean']:.4f}"),
    "interval": ("95 % interval", lambda row: show_interval(row["interval"], ".4f")),
    "minus_parent": ("minus parent", lambda row: show(row["minus_parent"], "+.4f")),
    "p": ("p", lambda row: show_p(row["p_value"])),
    "p_holm": ("p, Holm", lambda row: show_p(row["p_value_holm"])),
    "tokens_to_target": ("tokens to target", lambda row: show_reached(row, "tokens")),
    "speedup": ("times fewer tokens", show_speedup),
    "at_equal_tokens": ("at {equal_tokens:,} tokens", lambda row: f"{row['mean_at_equal_tokens']:.4f}"),
    "gradient_tokens": ("gradient tokens", lambda row: f"{row['gradient_token_share']:.3f}"),
    "inverted": ("inverted", lambda row: show(row["inversion_rate"], ".3f")),
    "seconds": ("seconds", lambda row: f"{row['seconds']:.1f}"),
    "parent": ("parent", lambda row: row["parent"]),
    "seconds_to_target": ("seconds to target", lambda row: show_reached(row, "seconds")),
    "times_faster": ("times faster", lambda row: show_ratios(row["times_faster"])),
    "runs": ("each run", lambda row: ", ".join(f"{value:.2f}" for value in row["finals"])),
    "offline_tokens": ("tokens of scoring", lambda row: show(row["offline_tokens"], ",.0f")),
    "speedup_shared": ("scoring shared by n", lambda row: show_speedup(row, "speedup_shared")),
    "speedup_whole": ("scoring charged whole", lambda row: show_speedup(row, "speedup_whole")),
}
STANDARD = tuple(COLUMNS)[: list(COLUMNS).index("seconds") + 1]


def check_columns(columns: tuple[str, ...], rows: dict[str, list[Run]]) -> None:
    """Refuse columns that are not known, and metrics that no run has."""
    metrics = sorted({name for runs in rows.values() for run in runs for name in run.steps})
    for column in columns:
        which, colon, metric = column.partition(":")
        if not colon and column not in COLUMNS:
            raise ValueError(f"--columns {column}: none of {', '.join(COLUMNS)}, mean:, max: or step_N:NAME")
        if colon and not re.fullmatch(r"mean|max|step_[1-9]\d*", which):
            raise ValueError(f"--columns {column}: expected mean:NAME, max:NAME or step_N:NAME")
        if colon and metric not in metrics:
            raise ValueError(f"--columns {column}: no run has this metric; there are {', '.join(metrics)}")


def header_of(column: str, metric: str, equal_tokens: int) -> str:
    """Return the head of a column."""
    which, colon, name = column.partition(":")
    if not colon:
        return COLUMNS[column][0].format(metric=metric, equal_tokens=equal_tokens)
    return {"mean": f"mean {name}", "max": f"largest {name}"}.get(which, f"{name}, {which.replace('_', ' ')}")


def markdown(table: list[dict], rows: dict[str, list[Run]], args: argparse.Namespace) -> list[str]:
    """Return the lines of the table in markdown."""
    lines = [[header_of(column, args.metric, equal_tokens_of(rows)) for column in args.columns]]
    for row in table:
        lines.append([show_statistic(row[c]) if ":" in c else COLUMNS[c][1](row) for c in args.columns])
    text = ["| " + " | ".join(cells) + " |" for cells in lines]
    return [text[0], "|" + "---|" * len(args.columns), *text[1:]]


def footnotes(table: list[dict], target: float | None) -> list[str]:
    """Say which row is the parent of which, and what the targets are."""
    mean, lines = {row["row"]: row["mean"] for row in table}, []
    for parent in dict.fromkeys(row["parent"] for row in table):
        children = ", ".join(row["row"] for row in table if row["parent"] == parent)
        goal = f"{mean[parent]:.4f}, its final mean" if target is None else f"{target:g}"
        lines.append(f"parent {parent} of {children}: target {goal}")
    return lines


def starts_of(runs: list[Run]) -> set[str]:
    """Return the digests of the weights that runs started from; "" for those that do not say it."""
    starts = set()
    for run in runs:
        versions = run.record.get("versions", {})
        if run.folder and (run.folder / "versions.json").is_file():
            versions = parse_object((run.folder / "versions.json").read_text(), f"{run.folder}/versions.json")
        starts.add(versions.get("weights") or "")
    return starts


def other_starts(table: list[dict], rows: dict[str, list[Run]]) -> list[str]:
    """Name the rows that did not all start from the same weights as their parent's runs."""
    starts = {row["row"]: starts_of(rows[row["row"]] + rows[row["parent"]]) for row in table}
    names = [name for name, found in starts.items() if len(found) > 1]
    if not names:
        return []
    unknown = ", or do not say from which" if any("" in starts[name] for name in names) else ""
    return [
        f"WARNING: {', '.join(names)}: not all runs start from the parent's weights{unknown}; a warm start "
        "that was made on another machine is another one, and its own effect is in the difference"
    ]


# ------------------------------------------------------------------------------------------------------------
# Plots and records
# ------------------------------------------------------------------------------------------------------------
def moving_sum(values: np.ndarray) -> np.ndarray:
    """Sum over the last SMOOTHING_STEPS steps, over fewer at the start."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[1:] - total[np.maximum(0, np.arange(1, len(total)) - SMOOTHING_STEPS)]


def smoothed(steps: dict[str, np.ndarray], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return generated tokens and the mean of a metric over the latest steps, steps without it left out."""
    there = ~np.isnan(steps[metric])
    values = steps[metric][there]
    return steps["generated_tokens"][there], moving_sum(values) / moving_sum(np.ones(len(values)))


def draw(axes, curves: list[tuple[np.ndarray, np.ndarray]], label: str, **style) -> None:
    """Draw the mean over runs on the stretch that all have, with a band of one standard error."""
    grid = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), 200)
    values = np.array([np.interp(grid, x, y) for x, y in curves])  # [runs, 200]
    (line,) = axes.plot(grid, values.mean(0), label=f"{label} (n = {len(curves)})", **style)
    if len(curves) > 1:
        error = values.std(0, ddof=1) / math.sqrt(len(curves))
        axes.fill_between(
            grid, values.mean(0) - error, values.mean(0) + error, color=line.get_color(), alpha=0.2, lw=0
        )


def gradient_share(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return generated tokens and the share of tokens with gradient over the latest steps."""
    generated = np.maximum(1, moving_sum(run.steps["tokens_total"]))
    return run.steps["generated_tokens"], moving_sum(run.steps["gradient_tokens_total"]) / generated


def zero_variance_rate(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return generated tokens and the share of groups without variance over the latest steps."""
    return smoothed(run.steps, "zero_variance_frac")


def plot(rows: dict[str, list[Run]], metric: str, file: Path) -> None:
    """Plot the metric over tokens and over seconds, and the waste over tokens to `cost` beside the file."""
    from cycler import cycler

    from experiments.bench.common import pyplot  # here: main() puts the root on the path

    plt = pyplot()

    share = f"share over {SMOOTHING_STEPS} steps"
    label = metric if metric.startswith(TRAINING) else f"{metric}, held out"
    figures = {
        file: (
            ("generated tokens", label, lambda run: (run.tokens, run.values)),
            ("seconds of training", label, lambda run: (run.seconds, run.values)),
        ),
        file.with_name(f"cost{file.suffix}"): (
            ("generated tokens", f"gradient tokens, {share}", gradient_share),
            ("generated tokens", f"zero-variance groups, {share}", zero_variance_rate),
        ),
    }
    for path, panels in figures.items():
        figure, both = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
        for axes, (x_label, y_label, curve) in zip(both, panels):
            axes.set_prop_cycle(cycler(linestyle=LINE_STYLES) * cycler(color=plt.get_cmap("tab10").colors))
            for name, runs in rows.items():
                draw(axes, [curve(run) for run in runs], name)
            axes.set(xlabel=x_label, ylabel=y_label)
            axes.grid(alpha=0.3)
        figure.legend(*both[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
        figure.savefig(path, dpi=110)
        plt.close(figure)


def plot_curves(rows: dict[str, list[Run]], metrics: list[str], file: Path) -> None:
    """Plot metrics of the steps over generated tokens, one a panel, as means over the latest steps."""
    if not metrics:
        raise ValueError("--curves: give FILE.png and the names of metrics")
    there = sorted({name for runs in rows.values() for run in runs for name in run.steps})
    missing = [name for name in metrics if name not in there]
    if missing:
        raise ValueError(f"--curves: no run has {', '.join(missing)}; there are {', '.join(there)}")
    from experiments.bench.common import pyplot  # here: main() puts the root on the path

    plt = pyplot()
    columns = min(3, len(metrics))
    height = math.ceil(len(metrics) / columns)
    figure, grid = plt.subplots(
        height, columns, figsize=(4.2 * columns + 1.3, 3.2 * height), layout="constrained", squeeze=False
    )
    for axes in grid.flat[len(metrics) :]:
        axes.remove()
    for axes, metric in zip(grid.flat, metrics):
        for i, (name, runs) in enumerate(rows.items()):
            curves = [smoothed(run.steps, metric) for run in runs if metric in run.steps]
            if curves:
                draw(axes, curves, name, color=f"C{i % 10}", linestyle=LINE_STYLES[i // 10 % 3])
        axes.set(xlabel="generated tokens", ylabel=metric)
        axes.locator_params(axis="x", nbins=4)
        axes.grid(alpha=0.3)
    drawn = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(drawn.values(), drawn.keys(), loc="outside right upper", fontsize="small")
    figure.savefig(file, dpi=110)
    plt.close(figure)


def plot_against(rows: dict[str, list[Run]], setting: str, metric: str, file: Path) -> None:
    """Plot the mean over steps of a metric over a setting of the rows: their mean, and every run."""
    from experiments.bench.common import pyplot
    from train_rl import Config  # here, because it loads what training needs

    plt = pyplot()
    section, _, key = setting.partition(".")
    try:
        default = getattr(getattr(Config(), section), key)
    except AttributeError:
        raise ValueError(f"--against {setting}: there is no such setting; see train_rl.py --help") from None
    points = []
    for runs in rows.values():
        settings = (run.record.get("settings") or provenance(run.folder)["settings"] for run in runs)
        values = [statistic([run], f"mean:{metric}") for run in runs]
        points += [(own.get(setting, default), value) for own, value in zip(settings, values)]
    if any(value is None or not isinstance(x, float | int) for x, value in points):
        raise ValueError(
            f"--against {setting} {metric}: a run has no such metric, or the setting is no number"
        )
    places = sorted({x for x, _ in points})
    means = [np.mean([value for x, value in points if x == place]) for place in places]
    figure, axes = plt.subplots(figsize=(5, 4), layout="constrained")
    axes.plot(places, means, marker="o", label=f"mean (n = {len(points) // len(places)})")
    axes.plot(*zip(*points), ".", alpha=0.5, label="each run")
    axes.set(xlabel=setting, ylabel=f"{metric}, mean over steps")
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def provenance(folder: Path) -> dict:
    """Return commit, versions and settings of a run folder, as a record holds them.

    The row and the seed say what run.dir and train.seed are, so the settings leave these two out. Settings
    that train_rl.py does not know, as those of a changed copy, are kept as they stand.
    """
    from runtime.config import flat_settings
    from train_rl import Config  # here, because it loads what training needs

    versions = parse_object((folder / "versions.json").read_text(), f"{folder}/versions.json")
    saved = config_of(folder)
    try:
        settings = flat_settings(Config.model_validate(saved).model_dump(mode="json", exclude_defaults=True))
    except ValueError:  # a changed copy of train_rl.py made it, or another version
        defaults = flat_settings(Config().model_dump(mode="json"))
        settings = {
            name: value
            for name, value in flat_settings(saved).items()
            if name not in defaults or value != defaults[name]
        }
    said = ("run.dir", "train.seed")
    return {
        "commit": versions.pop("commit", None),
        "versions": versions,
        "settings": {name: value for name, value in settings.items() if name not in said},
    }


def shortened(columns: dict[str, list]) -> dict[str, list]:
    """Return columns of metrics with seven digits."""
    short = lambda value: float(f"{value:.7g}") if isinstance(value, float) else value
    return {name: [short(value) for value in values] for name, values in columns.items()}


def export(rows: dict[str, list[Run]], metric: str, file: Path) -> None:
    """Write the record file of the runs."""
    if file.exists():
        raise ValueError(f"--export: {file} is there already; remove it first")
    lines = []
    for run in (run for runs in rows.values() for run in runs):
        made = provenance(run.folder) if run.folder else {}
        record = run.record | made
        names = ("row", "seed", "commit", "versions", "settings", "steps", "evaluations", "offline_tokens")
        kept = {name: record[name] for name in names if name in record}
        steps = {name: column for name, column in kept["steps"].items() if is_recorded(name, metric)}
        kept |= {"steps": shortened(steps), "evaluations": shortened(kept["evaluations"])}
        lines.append(json.dumps(kept, separators=(",", ":")) + "\n")
    file.write_text("".join(lines))


# ------------------------------------------------------------------------------------------------------------
# The tables of the docs
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class DocTable:
    """A markdown table of a document, with the comment above it."""

    line: int  # the number of the comment's first line, or of the table's
    comment: str | None  # the text after `report:`; None: there is no comment
    start: int  # index of the table's first line, and of the line after its last; equal: there is no table
    stop: int


def end_of_table(lines: list[str], start: int) -> int:
    """Return the index after the table that begins at `start`; `start` itself where none begins."""
    stop = start
    if start + 1 < len(lines) and re.fullmatch(r"\|?(\s*:?-+:?\s*\|)+(\s*:?-+:?\s*)?", lines[start + 1]):
        while stop < len(lines) and lines[stop].startswith("|"):
            stop += 1
    return stop


def find_tables(lines: list[str]) -> list[DocTable]:
    """Find all tables and report comments of a document outside its code blocks."""
    tables, i, in_code = [], 0, False
    while i < len(lines):
        begin, comment = i, None
        if lines[i].lstrip().startswith("```"):
            in_code = not in_code
        if not in_code and lines[i].startswith("<!-- report:"):
            while i + 1 < len(lines) and "-->" not in lines[i]:
                i += 1
            comment = " ".join(lines[begin : i + 1]).removeprefix("<!-- report:").partition("-->")[0].strip()
            i += 1
        start = i + (comment is not None and i < len(lines) and not lines[i].strip())  # one blank line may be
        stop = start if in_code else end_of_table(lines, start)
        if comment is not None or stop > start:
            start, stop = (i, i) if stop == start else (start, stop)
            tables.append(DocTable(begin + 1, comment, start, stop))
        i = max(stop, begin + 1)
    return tables


def expected_lines(comment: str, folder: Path) -> list[str]:
    """Make the lines of the table that a comment describes, in a document of this folder."""
    words = shlex.split(comment)
    if words[:1] == ["module"]:
        if len(words) != 3:
            raise ValueError("expected `module PACKAGE.MODULE FILE.json`")
        module, _, function = words[1].partition(":")
        make = getattr(importlib.import_module(module), function or "table_lines")
        return make(json.loads((folder / words[2]).read_text()))
    parser = Parser(add_help=False, allow_abbrev=False)
    add_table_options(parser)
    args = parser.parse_args(words)
    return markdown(*make_rows(args, folder), args)


def cells_of(line: str) -> list[str]:
    """Split a line of a markdown table into its cells."""
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def compare(found: list[str], expected: list[str]) -> tuple[list[str], int]:
    """Compare two tables cell by cell; return the differences and the number of figures compared."""
    if not found:
        return ["there is no table below the comment; --fix writes it"], 0
    texts, records = ([cells_of(line) for line in [*lines[:1], *lines[2:]]] for lines in (found, expected))
    if texts[0] != records[0]:
        return [f"columns are {texts[0]} in the text, {records[0]} in the record"], 0
    if [row[0] for row in texts] != [row[0] for row in records]:
        names = [", ".join(row[0] for row in rows[1:]) for rows in (texts, records)]
        return [f"rows are {names[0]} in the text, {names[1]} in the record"], 0
    differences, num_figures = [], 0
    for text, record in zip(texts[1:], records[1:]):
        if len(text) != len(record):
            differences.append(
                f"row {text[0]} has {len(text)} cells in the text, {len(record)} in the record"
            )
        for column, cell, right in zip(records[0][1:], text[1:], record[1:]):
            num_figures += any(character.isdigit() for character in right)
            if cell != right:
                differences.append(
                    f"row {text[0]}, column {column}: {cell} in the text, {right} in the record"
                )
    return differences, num_figures


def check_table(table: DocTable, lines: list[str], file: Path, fix: bool) -> tuple[list[str], int]:
    """Return what is wrong with a table and how many figures of it were compared; with fix, mend `lines`."""
    if table.comment is None:
        is_bound = (file.parent / "runs.jsonl").is_file()
        says = "a table without a `<!-- report: ... -->` comment; `none, REASON` if no record makes it"
        return ([says] if is_bound else []), 0
    if re.match(r"none\b", table.comment):
        reason = table.comment.removeprefix("none").lstrip(", ")
        return ([] if reason else ["`none` needs a reason: `<!-- report: none, REASON -->`"]), 0
    try:
        expected = expected_lines(table.comment, file.parent)
    except (ValueError, OSError, ImportError, AttributeError, KeyError, TypeError) as error:
        return [f"the table cannot be made ({type(error).__name__}: {error})"], 0
    differences, num_figures = compare(lines[table.start : table.stop], expected)
    if differences and fix:
        lines[table.start : table.stop] = expected
        return [], compare(expected, expected)[1]
    return differences, num_figures


def check_documents(root: Path, fix: bool) -> int:
    """Check, or with fix rewrite, the tables of all documents below root; return the exit code."""
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode:
        raise ValueError(f"git cannot list the documents of {root} ({listed.stderr.strip()})")
    num_tables, num_figures, problems = 0, 0, []
    for name in sorted(set(listed.stdout.split("\0")) - {""}):
        file = root / name
        if not file.is_file():
            continue
        lines = file.read_text().splitlines()
        before, of_file = list(lines), []
        for table in reversed(find_tables(lines)):  # backwards: mending one leaves the places of those above
            wrong, compared = check_table(table, lines, file, fix)
            of_file = [f"{name}:{table.line}: {text}" for text in wrong] + of_file
            num_tables, num_figures = num_tables + bool(compared), num_figures + compared
        problems += of_file
        if lines != before:
            file.write_text("\n".join(lines) + "\n")
            print(f"{name}: rewritten")
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    wrong = f"problems: {len(problems)}" if problems else "all agree with their records"
    print(f"{num_figures:,} figures of {num_tables} tables checked; {wrong}")
    return 1 if problems else 0


# ------------------------------------------------------------------------------------------------------------
# The command line
# ------------------------------------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    """A parser whose errors can be caught, because the comments of documents are parsed too."""

    def error(self, message: str):
        """Raise what argparse would print, so that main() reports it in one line."""
        raise ValueError(message)


def add_table_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a table."""
    parser.add_argument("--runs", type=Path, nargs="+", metavar="PATH", help="folders and record files")
    parser.add_argument("--parent", metavar="ROW", help="the row that all others are compared with")
    parser.add_argument(
        "--parents", nargs="+", default=[], metavar="ROW=PARENT", help="rows with another parent"
    )
    parser.add_argument(
        "--rows", nargs="+", help="these rows in this order (default: the parent, then the others by name)"
    )
    parser.add_argument(
        "--metric", default="avg_at_8", help="of eval/SET/METRIC, or train/METRIC (default: %(default)s)"
    )
    parser.add_argument("--target", type=float, help="of tokens to target (default: the parent's final mean)")
    parser.add_argument(
        "--columns", nargs="+", default=list(STANDARD), metavar="NAME", help="these columns in this order"
    )


def parents_of(rows: dict[str, list[Run]], parent: str, others: list[str]) -> dict[str, str]:
    """Return {row: parent} from --parent and --parents."""
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


def make_rows(args: argparse.Namespace, folder: Path) -> tuple[list[dict], dict[str, list[Run]]]:
    """Read the runs that the options name, relative to a folder; return their table and the runs by row."""
    if not args.runs or args.parent is None:
        raise ValueError("--runs and --parent are needed for a table")
    rows = read_rows([folder / path for path in args.runs], args.rows, args.metric)
    if args.rows is None:
        rows = {name: rows[name] for name in sorted(rows, key=lambda name: name != args.parent)}
    check_columns(args.columns, rows)
    parents = parents_of(rows, args.parent, args.parents)
    return make_table(rows, parents, args.target, args.columns), rows


def main(argv: list[str]) -> int:
    """Run the command line; return the exit code."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # run as a script: for train_rl and the modules that comments name
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_table_options(parser)
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="write the curves here, and cost.png beside it"
    )
    parser.add_argument(
        "--against", nargs=3, metavar=("SETTING", "METRIC", "FILE.png"), help="plot a metric over a setting"
    )
    parser.add_argument(
        "--curves", nargs="+", metavar=("FILE.png", "METRIC"), help="plot metrics of the steps over tokens"
    )
    parser.add_argument("--export", type=Path, metavar="FILE.jsonl", help="write the record of the runs here")
    parser.add_argument("--check", action="store_true", help="compare the docs' tables with their records")
    parser.add_argument("--fix", action="store_true", help="rewrite the docs' tables that differ")
    try:
        args = parser.parse_args(argv)
        if args.check or args.fix:
            if len(argv) > 1:
                raise ValueError("--check and --fix stand alone: the comments of the docs hold the options")
            return check_documents(ROOT, args.fix)
        table, rows = make_rows(args, Path())
        notes = [*footnotes(table, args.target), *other_starts(table, rows)]
        print("\n".join([*markdown(table, rows, args), "", *notes]))
        if args.json:
            args.json.write_text(json.dumps(table, indent=1))
        if args.plot:
            plot(rows, args.metric, args.plot)
        if args.against:
            plot_against(rows, *args.against)
        if args.curves:
            plot_curves(rows, args.curves[1:], Path(args.curves[0]))
        if args.export:
            export(rows, args.metric, args.export)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
