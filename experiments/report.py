"""Make the table of a set of runs, keep the runs in a record file, and check the tables of the docs.

    python experiments/report.py --runs runs/mine --parent grpo
    python experiments/report.py --runs runs/mine --parent grpo --json table.json --plot curves.png
    python experiments/report.py --runs runs/mine --parent grpo --parents a=gspo --columns row p
    python experiments/report.py --runs runs/mine --parent grpo --export runs.jsonl
    python experiments/report.py --runs experiments/studies/elimination_tuned/runs.jsonl --parent grpo
    python experiments/report.py --runs runs/group_size --parent group_8 \\
        --against rollout.group_size zero_variance_frac share.png    # a metric against a setting of the rows
    python experiments/report.py --runs runs/long_chains --parent grpo --metric chains/avg_at_4 \\
        --curves mechanisms.png entropy clipped/entropy_group_0          # training metrics against tokens
    python experiments/report.py --check      # compare every table of the docs with its record
    python experiments/report.py --fix        # rewrite the tables that differ

--runs takes folders that experiments/run.py has filled (ROW/seed_S), record files, or several of both. A
figure is a mean over the runs (seeds) of a row. Unfinished runs are skipped, with a message for each.

--metric NAME selects a metric of the evaluations, eval/SET/NAME. --metric train/NAME selects a metric of the
training steps, as the mean over the latest ten steps. For example, train/score shows how fast runs improve
that are evaluated only at their start and end.

COLUMNS. By default, `row` to `seconds`.
  row, n            Name of the row and number of its runs.
  metric            The metric at the last step; for evaluations, the mean over the held-out sets.
  interval          95 % t-interval over runs; with --block over the means of the blocks.
  minus_parent      Difference to the parent's metric.
  p, p_holm         Two-sided Welch t-test of the final metric against the parent's; the same after
                    Holm's correction over all rows of the table that have a p, see also --family.
                    Refused with --block, like the two columns that begin with welch_.
  tokens_to_target  Generated tokens until the row reaches the target, which is the parent's final mean or
                    --target. The crossing is read from the mean curve of the row's runs, linear between its
                    points: a mean over the crossings of single runs would omit every run that fails to cross.
                    A run that ended early keeps the last value, so a rising parent reaches the final mean
                    when the longest run ends. n/a if a run has only a start and an end, because a line
                    between two points says nothing beyond the final metric.
  speedup           The parent's tokens to the target, divided by the row's. In brackets: the 2.5 and 97.5
                    percentiles over 2,000 resamples of the seeds (with --block of the blocks). A seed is
                    drawn for both rows at once, because their runs are correlated. With 5 to 10 runs these
                    intervals are too narrow. A resample fails if a mean curve does not reach the target:
                    "1.39 (1.22 to 1.51; 1.3 % failed)" is the interval of the rest, which favours the row
                    because the slowest resamples of the row are missing.
  at_equal_tokens   The metric, interpolated at the largest number of tokens that every run has generated.
  gradient_tokens   Sum of gradient_tokens_total, divided by the sum of tokens_total.
  inverted          Share of trained completions whose advantage contradicts the verifier, mean over steps.
  seconds           Sum of seconds_per_step, which excludes the start-up.
  parent            The row to which this row is compared.
  seconds_to_target Like tokens_to_target, in seconds of training steps.
  times_faster      The parent's seconds divided by the row's, seed by seed: mean, and in brackets the range.
  runs              Final metric of each run, by seed.
  falls             Number of runs whose metric ends below its first value.
  pairs             Number of seeds (with --block: of blocks) that the row and its parent share.
  paired            Mean over these seeds of row minus parent. Runs of one seed start with the same rollout,
                    so the difference varies less than either metric.
  paired_interval   95 % t-interval of this mean; n/a for fewer than two pairs.
  paired_p          Two-sided t-test of the differences; n/a if all differences are equal.
  paired_p_holm     The same after Holm's correction over all rows of the table that have a paired p.
  detectable        Smallest true difference that the paired test finds with 80 % power at the 5 % level,
                    without Holm's correction, if differences vary as in these pairs.
  welch_interval    95 % interval of minus_parent by Welch's t-test, for rows whose seeds do not pair.
  welch_detectable  Like detectable, for Welch's test.
  offline_tokens    Tokens generated by the offline scoring of the prompts (data/score.py), mean over runs.
                    Runs of one task instance share a scoring. 0 for rows that use no scores; n/a if a record
                    lacks the number.
  speedup_shared    Like speedup, but each row also pays for a share of its offline scorings: the sum over the
                    distinct scorings of its runs, divided by the number of runs. Two scorings are distinct if
                    the file or the number of tokens differs.
  speedup_whole     Like speedup, but each row also pays for all of its offline_tokens, like a single run.
  mean:NAME         Mean over steps of a metric, then mean over runs, for example mean:abs_dlogp.
  max:NAME          Largest value of a metric over all steps of all runs.
  step_N:NAME       Mean over runs of a metric at step N.
                    "0.015 (4 of 5)": one of five runs lacks the metric, or ended before step N.

BLOCKS. With --block N, N consecutive seeds (0 to N - 1, and so on) share something else that varies, for
example a judge or a task instance, so their runs are not independent of each other. Intervals, paired tests
and the bands of plots then take the mean of each block as one value. Example: 20 seeds on ten task instances
are --block 2, and the paired test has ten pairs.

NOTE. A line below the table names the digest of its study's declaration, or says "Undeclared". It also names
seeds without a run, rows without a seed in common with their parent, rows that start from other weights than
their parent, compared rows that are no declared contrast, and a metric that is not the declared endpoint
(experiments/notes.py). A new table of undeclared runs is refused.

SENSITIVITY. --without-seeds 0 1 leaves these seeds out of all rows, and the note says so.

FAMILY. --family DOCUMENT.md extends Holm's correction to all tables of the document whose comment has the
option. Use it if a declared correction covers contrasts of several tables, for example of two metrics, or of
rows with different parents in separate tables. Without it each table is corrected by itself.
A comparison (metric, row and parent with the same runs) counts once, also if several tables show it.
Example: the comments of two tables of README.md have `--family README.md`, with four and three rows beside
their parents; then p_holm and paired_p_holm are corrected over seven comparisons.

RECORDS. --export writes one JSON line per finished run, and --runs reads such a file. Metrics are rounded to
seven digits, the precision of float32:
  {"row", "seed", "commit", "versions": {package: version},  # also "weights": digest of the initial weights;
                                                     # "machine", "date", "data": digests of the prompts,
                                                     # "dtype": of the policy;
                                                     # "earlier": versions of earlier launches, if different
   "settings": {dotted name: value},                  # settings that differ from the defaults
   "steps": {metric: [value of step 1, 2, ...]},      # includes step and generated_tokens; null: no value
   "evaluations": {metric: [value of each]},          # step, generated_tokens, eval/SET/METRIC
   "outcomes": {metric: [value of each prompt]},      # of the last evaluation: eval/SET/accuracy, avg_at_K
   "offline_tokens": 42000}                           # null: the run used scores whose file is missing

TABLES OF THE DOCS. A comment at the start of a line, directly above a markdown table, names the source of the
table. Paths in the comment are relative to the document.
  <!-- report: --runs runs.jsonl --parent grpo ... -->   Options of a table, see above; its note follows.
  <!-- report: module PACKAGE.MODULE FILE.json -->       Lines returned by MODULE.table_lines(data) for the
                                                         JSON file; MODULE:NAME calls NAME instead.
  <!-- report: module PACKAGE.MODULE FILE.jsonl -->      The same for records: MODULE.measure(rows) makes the
                                                         data from rows with MODULE.METRIC; a note follows.
  <!-- report: none, REASON -->                          A table that no record makes.
--check reads all *.md files that git tracks or would add. A study with a declared.json must have declared its
runs before they were made (experiments/declaration.py), with the settings that its tuning chose
(experiments/tuning.py). If a *.jsonl lies beside a document, each table of the document needs a comment.
Exit codes: 0 if every figure agrees, 1 if a figure differs, 2 for invalid options, 3 if every figure agrees
in a shallow clone, which lacks the commits of runs: then declarations and small records are not checked.
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
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run as a script: for the modules of the project

import numpy as np
import yaml
from cycler import cycler
from scipy import optimize, stats

from experiments.bench.common import pyplot, read_results
from experiments.declaration import check_study
from experiments.history import is_complete
from experiments.notes import Shown, notes_of
from experiments.records import check_records
from experiments.starts import all_problems
from experiments.tuning import check_tuning
from runtime.config import flat_settings, with_paths
from runtime.old_settings import present_settings, with_present_names
from settings import Config

STEP_KEYS = ("tokens_total", "gradient_tokens_total", "zero_variance_frac", "seconds_per_step")
INVERSION = "inversion_frac"  # a step that trained on nothing lacks this metric
RECORDED = (  # patterns of the optional training metrics that a record keeps
    INVERSION, "score", "reward", "verdict/ok_frac", "completion_tokens", "abs_dlogp", "mismatch_k3",
    "mismatch_routes", "mismatch_ess", "skew_*", "topk_mass", "abs_log_ratio", "entropy", "clipped",
    "clip_eps", "grad_norm", "clipped/update_*",
    "entropy/entropy_group_*", "clipped/entropy_group_*", "cut_at_limit_frac", "rollout_bubble", "seconds/*",
    "zero_variance/*", "account/prompts_skipped", "account/prompts_stopped", "regime/*", "teacher_*",
    "account/teacher_tokens_total", "masked", "part/*", "turns", "tool_calls", "tool_errors_frac",
)  # fmt: skip
SMOOTHING_STEPS = 10  # width of moving sums and means
TRAINING = "train/"  # prefix of a metric of the training steps in --metric
LINE_STYLES = ("-", "--", ":")
MIN_POINTS = 3  # a curve with fewer points cannot show when it crosses a target
RESAMPLES = 2000  # resampled sets of runs for the interval of a ratio
NONE = "n/a"
NOTE = "> Note: "  # start of the line below a table
BAND_NOTE = "lines: mean over the seeds of a row; shaded: one standard error"
METRIC_LABELS = {  # labels of axes; docs/metrics.md defines the metrics
    "accuracy": "accuracy (greedy)",
    "verdict/ok_frac": "training accuracy",
    "score": "training score",
    "reward": "training reward",
    "completion_tokens": "tokens per completion",
    "cut_at_limit_frac": "completions cut at the limit (share)",
    "entropy": "entropy (nats per token)",
    "entropy/entropy_group_0": "entropy, most uncertain tokens (nats)",
    "entropy/entropy_group_1": "entropy, all other tokens (nats)",
    "clipped": "clipped tokens (share)",
    "clipped/entropy_group_0": "clipped, most uncertain tokens (share)",
    "clipped/entropy_group_1": "clipped, all other tokens (share)",
    "inversion_frac": "inverted advantages (share)",
    "zero_variance_frac": "groups without variance (share)",
    "zero_variance/all_right_frac": "groups with only right answers (share)",
    "zero_variance/all_wrong_frac": "groups with only wrong answers (share)",
    "gradient_tokens_total": "tokens with gradient per step",
    "tokens_total": "tokens per step",
    "abs_dlogp": "trainer vs. engine, |log p difference| (nats)",
    "mismatch_k3": "trainer vs. engine, k3 KL (nats per token)",
    "teacher_kl_k1": "distance to the teacher (k1, nats per token)",
    "mismatch_routes": "tokens with different experts (share)",
    "rollout.group_size": "completions per prompt (rollout.group_size)",
}


@dataclass(frozen=True)
class Run:
    """A finished run: its record, and the arrays from which the table and the plots are made."""

    record: dict  # a line of a record file; for a run folder, the same without commit, versions, settings
    place: str  # file and line of the record, for messages
    folder: Path | None  # None: the run comes from a record file
    steps: dict[str, np.ndarray]  # {metric: [steps]}; NaN in steps that lack the metric
    tokens: np.ndarray  # generated tokens at each point of the metric's curve
    seconds: np.ndarray  # seconds of training until each point
    values: np.ndarray  # the metric at each point
    offline_tokens: float | None  # tokens of the offline scoring of the prompts; None: unknown


# ------------------------------------------------------------------------------------------------------------
# Reading
# ------------------------------------------------------------------------------------------------------------
def parse_object(text: str, place: str) -> dict:
    """Parse a line of JSON; any other JSON raises ValueError."""
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: expected a JSON object, got {text[:80]!r}")
    return row


def check_number(value: object, name: str, place: str) -> None:
    """Raise ValueError unless the value is a finite number."""
    if not is_finite(value):
        raise ValueError(f"{place}: {name} is {value!r}, expected a finite number")


def is_recorded_evaluation(name: str, metric: str) -> bool:
    """Tell whether a record keeps a metric of an evaluation: --metric, accuracy, tool_calls, avg_at_K ..."""
    leaf = name.split("/")[-1]
    is_standard = leaf in ("accuracy", "tool_calls") or leaf.startswith(("avg_at_", "pass_at_"))
    return name.startswith("eval/") and (name.endswith(f"/{metric}") or is_standard)


def is_recorded(name: str, metric: str) -> bool:
    """Tell whether a record keeps a training metric: STEP_KEYS, RECORDED and --metric."""
    if name in ("step", "generated_tokens", *STEP_KEYS) or TRAINING + name == metric:
        return True
    return any(fnmatch.fnmatch(name, pattern) for pattern in RECORDED)


def is_finite(value: object) -> bool:
    """Tell whether a value is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def read_metrics(file: Path, metric: str) -> dict[str, dict[str, list]]:
    """Read metrics.jsonl into the columns of a record: {"steps": ..., "evaluations": ...}.

    A row with eval/ metrics is an evaluation, any other row is a training step. Numbers outside of RECORDED
    are read too, because --columns and --curves may name any metric.
    """
    if not file.is_file():
        raise ValueError(f"{file} does not exist")
    rows: dict[str, list[dict]] = {"steps": [], "evaluations": []}
    position = ("step", "generated_tokens")
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        place = f"{file}, line {number}"
        row = parse_object(line, place)
        if any(name.startswith("eval/") for name in row):
            kind = "evaluations"
            metrics = [name for name in row if is_recorded_evaluation(name, metric)]
        else:
            kind = "steps"
            metrics = [name for name in row if is_recorded(name, metric) or is_finite(row[name])]
            metrics = [*STEP_KEYS, *metrics]
        names = dict.fromkeys([*position, *metrics])
        for name in names:
            if name not in row:
                raise ValueError(f"{place}: {name} is missing")
            check_number(row[name], name, place)
        rows[kind].append({name: row[name] for name in names})
    columns = {kind: dict.fromkeys([*position, *(name for row in rows[kind] for name in row)])
               for kind in rows}  # fmt: skip
    return {kind: {name: [row.get(name) for row in rows[kind]] for name in columns[kind]} for kind in rows}


def check_curves(record: dict, place: str) -> None:
    """Check the columns of a record: equal lengths, finite numbers, steps in order; else ValueError."""
    for kind, required in (("steps", ("step",)), ("evaluations", ("step", "generated_tokens"))):
        columns = record.get(kind)
        if not isinstance(columns, dict) or not all(isinstance(column, list) for column in columns.values()):
            raise ValueError(f"{place}: {kind} must be an object of lists, {{metric: [values]}}")
        for name in required:
            if name not in columns:
                raise ValueError(f"{place}: {kind}.{name} is missing")
        for name, column in columns.items():
            if len(column) != len(columns["step"]):
                raise ValueError(
                    f"{place}: {kind}.{name} has {len(column)} values, {kind}.step has {len(columns['step'])}"
                )
            for value in column:
                if value is not None or name in (*required, *STEP_KEYS):
                    check_number(value, f"{kind}.{name}", place)
        check_order(kind, columns, place)


def check_order(kind: str, columns: dict[str, list], place: str) -> None:
    """Raise ValueError if steps or generated tokens decrease, or if a training step is missing."""
    last_step = 0 if kind == "steps" else -1
    last_tokens = 0
    steps = columns.get("step", ())
    for step, tokens in zip(steps, columns.get("generated_tokens", [0] * len(steps))):
        skips = kind == "steps" and step != last_step + 1
        if skips or step <= last_step or tokens < last_tokens:
            raise ValueError(
                f"{place}: {kind}: step {step} at {tokens} generated_tokens cannot follow step "
                f"{last_step} at {last_tokens}"
            )
        last_step = step
        last_tokens = tokens


def evaluation_curve(record: dict, elapsed: np.ndarray, metric: str) -> tuple[np.ndarray, ...]:
    """Return tokens, seconds and the metric (mean over the held-out sets) at each evaluation."""
    evaluations = record["evaluations"]
    last_step = len(elapsed) - 1
    columns = [column for name, column in evaluations.items() if name.endswith(f"/{metric}")]
    curve = []
    for i, (step, tokens) in enumerate(zip(evaluations["step"], evaluations["generated_tokens"])):
        values = [column[i] for column in columns if column[i] is not None]
        if values:
            curve.append((step, tokens, elapsed[min(step, last_step)], sum(values) / len(values)))
    if not curve or (curve[0][0], curve[-1][0]) != (0, last_step):
        names = sorted({name.split("/")[-1] for name in evaluations if name.startswith("eval/")})
        raise ValueError(
            f"eval/SET/{metric} is missing at step 0 or at the last step; choose --metric among the metrics "
            f"of this run: {', '.join(names) or 'none'}"
        )
    _, tokens, seconds, values = map(np.array, zip(*curve))
    return tokens, seconds, values


def training_curve(steps: dict[str, np.ndarray], elapsed: np.ndarray, metric: str) -> tuple[np.ndarray, ...]:
    """Return tokens, seconds and the metric (mean over the latest steps) at each step that has it."""
    if metric not in steps:
        raise ValueError(f"no step has {metric}; choose --metric train/NAME among {', '.join(sorted(steps))}")
    tokens, values = smoothed(steps, metric)
    return tokens, elapsed[1:][~np.isnan(steps[metric])], values


def make_run(record: dict, place: str, folder: Path | None, metric: str) -> Run:
    """Check the record of a run and make its arrays."""
    check_curves(record, place)
    columns = record["steps"].items()
    steps = {name: np.array(column, dtype=float) for name, column in columns}  # None becomes NaN
    unknown = np.full(len(steps["step"]), np.nan)  # in place of a column that a small record lacks
    elapsed = np.concatenate([[0.0], np.cumsum(steps.get("seconds_per_step", unknown))])  # [steps + 1]
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
    """Read the config.yaml of a run folder, with the paths of plug-ins relative to the repository root."""

    def from_root(path: str) -> str:
        file = (folder / path).resolve()
        return str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)

    file = folder / "config.yaml"
    try:
        config = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: expected sections of settings, got {config!r}")
    return with_paths(present_settings(config), Config, from_root)


def versions_of(folder: Path) -> dict:
    """Read the versions.json of a run folder."""
    return parse_object((folder / "versions.json").read_text(), f"{folder}/versions.json")


def offline_tokens_of(folder: Path) -> int | None:
    """Count the tokens generated by the offline scoring of a run's prompts; None if a file is missing."""
    config = config_of(folder)
    sections = [section.get("zero_variance") or {} for section in (config, *(config.get("stages") or ()))]
    total = 0
    for scores in {section.get("offline_scores") for section in sections} - {None}:
        if not (ROOT / scores).is_file():
            return None
        header, *rows = (json.loads(line) for line in (ROOT / scores).read_text().splitlines())
        total += round(sum(row["mean_tokens"] for row in rows) * header["samples"])
    return total


def outcomes_of(folder: Path, last_step: int) -> dict[str, list[float]] | None:
    """Read the outcomes of the prompts in the last evaluation; None for a run of an older version."""
    file = folder / "outcomes.json"
    if not file.is_file():
        return None
    outcomes = parse_object(file.read_text(), str(file))
    if outcomes.get("step") != last_step:
        raise ValueError(f"{file}: expected the evaluation of step {last_step}, got {outcomes.get('step')}")
    return outcomes["outcomes"]


def progress_of(folder: Path) -> str:
    """Describe the progress of an unfinished run, for example "step 3, 300 generated tokens"."""
    file = folder / "metrics.jsonl"
    errors = sorted(folder.glob("error_rank_*.txt"))
    hint = f"; see {errors[0].name}" if errors else ""
    *lines, _ = file.read_text().split("\n") if file.is_file() else [""]  # the last line may be incomplete
    if not lines:
        return f"no step yet{hint}"
    row = parse_object(lines[-1], f"{file}, line {len(lines)}")
    return f"step {row.get('step')}, {row.get('generated_tokens', 0):,} generated tokens{hint}"


def read_run(folder: Path, metric: str) -> Run | str:
    """Read a run folder; return the run, or the progress of an unfinished run as text."""
    file = folder / "metrics.jsonl"
    seed = folder.name.removeprefix("seed_")
    if not seed.isdigit():
        raise ValueError(f"{folder}: expected a folder seed_S with a number S")
    if not (folder / "summary.json").is_file():  # a run writes its summary last
        return progress_of(folder)
    curves = read_metrics(file, metric)
    for kind, columns in curves.items():
        check_order(kind, columns, str(file))
    record = {"row": folder.parent.name, "seed": int(seed), "offline_tokens": offline_tokens_of(folder)}
    record |= curves
    if curves["evaluations"]["step"] and (outcomes := outcomes_of(folder, curves["evaluations"]["step"][-1])):
        record["outcomes"] = outcomes
    return make_run(record, str(file), folder, metric)


def read_folder(root: Path, names: list[str] | None, metric: str) -> tuple[list[Run], set[str]]:
    """Read the finished runs below a folder; return them, and the names of all rows in the folder."""
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
                print(f"skipped, not finished: {folder} ({run})", file=sys.stderr)
    return runs, {folder.parent.name for folder in folders}


def read_records(file: Path, names: list[str] | None, metric: str) -> tuple[list[Run], set[str]]:
    """Read the runs of a record file; return them, and the names of all rows in the file."""
    runs = []
    row_names = set()
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        place = f"{file}, line {number}"
        record = parse_object(line, place)
        if not isinstance(record.get("row"), str) or type(record.get("seed")) is not int:
            raise ValueError(f"{place}: expected a row and a seed; --export writes record files")
        row_names.add(record["row"])
        if names is None or record["row"] in names:
            runs.append(make_run(with_steps(record), place, None, metric))
    return runs, row_names


def with_steps(record: dict) -> dict:
    """Return a record with the numbers of its steps, which a small record lacks (experiments/records.py)."""
    steps = record.get("steps")
    if not isinstance(steps, dict) or "step" in steps:
        return record
    lengths = [len(column) for column in steps.values() if isinstance(column, list)]
    last = max(lengths) if lengths else max(record["evaluations"]["step"], default=0)
    return record | {"steps": {"step": list(range(1, last + 1))} | steps}


def read_rows(
    paths: list[Path], names: list[str] | None, metric: str, without_seeds: tuple[int, ...] = ()
) -> dict[str, list[Run]]:
    """Return {row: runs by seed}, in the order of names; without names, in alphabetical order."""
    runs = []
    row_names = set()
    for path in paths:
        read = read_records if path.is_file() else read_folder
        runs_of_path, names_of_path = read(path, names, metric)
        runs += [run for run in runs_of_path if run.record["seed"] not in without_seeds]
        row_names |= names_of_path
    rows: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.record["row"], run.record["seed"])):
        row = rows.setdefault(run.record["row"], [])
        if row and row[-1].record["seed"] == run.record["seed"]:
            raise ValueError(
                f"row {run.record['row']}, seed {run.record['seed']} occurs twice: in {row[-1].place} and in "
                f"{run.place}"
            )
        row.append(run)
    missing = [name for name in names or () if name not in rows]
    if missing or not rows:
        raise ValueError(
            f"{', '.join(map(str, paths))}: no finished run of {', '.join(missing) or 'any row'}; rows "
            f"found: {', '.join(sorted(row_names))}"
        )
    check_sets(runs, metric)
    return {name: rows[name] for name in names or rows}


def check_sets(runs: list[Run], metric: str) -> None:
    """Raise ValueError if runs were evaluated on different held-out sets, because means would not compare."""
    curves = [run.record["evaluations"] for run in runs]
    names = {name for columns in curves for name in columns if name.endswith(f"/{metric}")}
    for run, columns in zip(runs, curves):
        for i, step in enumerate(columns["step"]):
            present = {name for name in names & columns.keys() if columns[name][i] is not None}
            if present and present != names:
                missing = ", ".join(sorted(names - present))
                raise ValueError(f"{run.place}: step {step} lacks {missing}, which another run has")


# ------------------------------------------------------------------------------------------------------------
# Figures
# ------------------------------------------------------------------------------------------------------------
def blocks_of(runs: list[Run], block: int) -> list[int]:
    """Return the number of each run's block of consecutive seeds: 0, 0, 1, 1 for seeds 0 to 3 and block 2."""
    return [run.record["seed"] // block for run in runs]


def block_means(values: np.ndarray, blocks: list[int]) -> np.ndarray:
    """Average the values [runs, ...] of each block to [blocks, ...]: runs of a block are not independent."""
    numbers = np.array(blocks)
    return np.array([values[numbers == number].mean(axis=0) for number in dict.fromkeys(blocks)])


def interval_around(mean: float, error: float, freedom: float) -> list[float]:
    """Return the 95 % interval of a mean with this standard error by Student's t."""
    half = stats.t.ppf(0.975, freedom) * error
    return [float(mean - half), float(mean + half)]


def t_interval(values: np.ndarray) -> list[float] | None:
    """Return the 95 % interval of the mean by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    return interval_around(values.mean(), values.std(ddof=1) / math.sqrt(len(values)), len(values) - 1)


def welch_p(values: np.ndarray, parent_values: np.ndarray) -> float | None:
    """Return p of a two-sided Welch t-test; None if a row has one value, or if both rows are constant."""
    rows = (values, parent_values)
    if min(map(len, rows)) < 2 or np.ptp(values) == np.ptp(parent_values) == 0:
        return None
    moments = [moment for row in rows for moment in (row.mean(), row.std(ddof=1), len(row))]
    return float(stats.ttest_ind_from_stats(*moments, equal_var=False).pvalue)


def welch_figures(values: np.ndarray, parent_values: np.ndarray) -> dict:
    """Return p, interval and detectable difference of Welch's t-test; None as in welch_p().

    The difference of means has the standard error sqrt(v1 + v2) with v = variance / n of a row, and
    (v1 + v2)^2 / (v1^2 / (n1 - 1) + v2^2 / (n2 - 1)) degrees of freedom (Welch-Satterthwaite).
    """
    p = welch_p(values, parent_values)
    if p is None:
        return {"p_value": None, "welch_interval": None, "welch_detectable": None}
    rows = (values, parent_values)
    variances = [row.var(ddof=1) / len(row) for row in rows]
    error = math.sqrt(sum(variances))
    freedom = sum(variances) ** 2 / sum(v**2 / (len(row) - 1) for v, row in zip(variances, rows))
    return {
        "p_value": p,
        "welch_interval": interval_around(values.mean() - parent_values.mean(), error, freedom),
        "welch_detectable": detectable_effect(error, freedom),
    }


def holm(p_values: list[float | None]) -> list[float | None]:
    """Apply Holm's step-down correction: p_(i) (m - i + 1), made monotone; None stays None.

    Example: [0.01, 0.04] becomes [0.02, 0.04].
    """
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected = [None] * len(p_values)
    largest = 0.0
    for place, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - place)))
        corrected[i] = largest
    return corrected


def paired_differences(runs: list[Run], parents: list[Run], block: int = 1) -> np.ndarray:
    """Return the final metric of each run minus the parent's of the same seed [common seeds].

    block: number of consecutive seeds whose differences are averaged to one [blocks with a common seed].
    """
    parent_values = {run.record["seed"]: run.values[-1] for run in parents}
    common = [run for run in runs if run.record["seed"] in parent_values]
    differences = [run.values[-1] - parent_values[run.record["seed"]] for run in common]
    return block_means(np.array(differences), blocks_of(common, block))


def are_equal(differences: np.ndarray) -> bool:
    """Tell whether differences are equal up to the rounding of records, which have seven digits."""
    return bool(np.ptp(differences) <= 1e-4 * np.abs(differences).max())


def paired_p(differences: np.ndarray) -> float | None:
    """Return p of a two-sided t-test of mean 0; None for fewer than two values or without variance."""
    if len(differences) < 2 or are_equal(differences):
        return None
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def detectable_effect(error: float, freedom: float, level: float = 0.05, power: float = 0.8) -> float:
    """Return the true difference at which a t-test with this standard error has the given power.

    The statistic of a true difference d has a noncentral t-distribution with noncentrality d / error. The far
    tail on the other side, below 1e-4 at a power of 0.8 and five pairs, is left out.
    """
    critical = stats.t.ppf(1 - level / 2, freedom)
    noncentrality = optimize.brentq(lambda c: stats.nct.sf(critical, freedom, c) - power, 0.0, 10 * critical)
    return float(noncentrality * error)


def detectable_difference(differences: np.ndarray) -> float | None:
    """Return detectable_effect() of the paired t-test; None for fewer than two pairs or without variance."""
    n = len(differences)
    if n < 2 or are_equal(differences):
        return None
    return detectable_effect(differences.std(ddof=1) / math.sqrt(n), n - 1)


def holm_in_family(p_values: list[float | None], family: list[float | None]) -> list[float | None]:
    """Apply Holm's correction to the p of a table together with the p of the other tables of its family."""
    return holm([*p_values, *family])[: len(p_values)]


def paired_figures(
    rows: dict[str, list[Run]], parents: dict[str, str], block: int = 1, family: tuple[float | None, ...] = ()
) -> dict[str, dict]:
    """Return the figures of the paired columns of each row; a row that is its own parent has none.

    family: paired p of the other tables of the family.
    """
    differences = {
        name: paired_differences([] if parents[name] == name else runs, rows[parents[name]], block)
        for name, runs in rows.items()
    }
    p_values = {name: paired_p(values) for name, values in differences.items()}
    corrected = dict(zip(p_values, holm_in_family(list(p_values.values()), list(family))))
    return {
        name: {
            "pairs": len(values),
            "paired": float(values.mean()) if len(values) else None,
            "paired_interval": t_interval(values),
            "paired_p": p_values[name],
            "paired_p_holm": corrected[name],
            "detectable": detectable_difference(values),
        }
        for name, values in differences.items()
    }


def unpaired_figures(
    rows: dict[str, list[Run]], parents: dict[str, str], block: int = 1, family: tuple[float | None, ...] = ()
) -> dict[str, dict]:
    """Return minus_parent and the figures of Welch's columns of each row, as paired_figures() does.

    With block > 1 only minus_parent has a value, because Welch's test takes every run as independent.
    family: p of the other tables of the family.
    """
    figures = {}
    for name, runs in rows.items():
        values, parent_values = (
            np.array([run.values[-1] for run in row]) for row in (runs, rows[parents[name]])
        )
        is_child = parents[name] != name
        figures[name] = {"minus_parent": float(values.mean() - parent_values.mean()) if is_child else None}
        figures[name] |= welch_figures(values if is_child and block == 1 else values[:0], parent_values)
    corrected = holm_in_family([row["p_value"] for row in figures.values()], list(family))
    return {name: row | {"p_value_holm": p} for (name, row), p in zip(figures.items(), corrected)}


@dataclass(frozen=True)
class Comparison:
    """A row against its parent; equal if metric, blocks and runs are equal, whatever table shows it."""

    row: str
    parent: str
    metric: str
    block: int
    places: tuple[Path, ...]  # files and lines of the runs of both rows
    p: float | None = field(compare=False)
    paired_p: float | None = field(compare=False)


def comparisons_of(
    rows: dict[str, list[Run]], parents: dict[str, str], metric: str, block: int
) -> list[Comparison]:
    """Compare each row with its parent by both tests."""
    comparisons = []
    for name, parent in parents.items():
        if name != parent:
            places = tuple(Path(run.place).resolve() for run in rows[name] + rows[parent])
            final = [np.array([run.values[-1] for run in rows[row]]) for row in (name, parent)]
            p = welch_p(*final) if block == 1 else None
            paired = paired_p(paired_differences(rows[name], rows[parent], block))
            comparisons.append(Comparison(name, parent, metric, block, places, p, paired))
    return comparisons


def curve_of(runs: list[Run], over: str = "tokens") -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens or seconds of all points of the runs, and the metric of each run [runs, points]."""
    grid = np.unique(np.concatenate([getattr(run, over) for run in runs]))
    return grid, np.array([np.interp(grid, getattr(run, over), run.values) for run in runs])


def is_curve(runs: list[Run]) -> bool:
    """Tell whether every run has enough points to show when it crosses a target."""
    return min(len(run.values) for run in runs) >= MIN_POINTS


def first_crossing(target: float, grid: np.ndarray, values: np.ndarray) -> float | None:
    """Return the tokens or seconds at which a curve, linear between its points, first reaches the target."""
    reached = np.flatnonzero(values >= target - 1e-9)  # rounding may lift the mean of equal values
    if not len(reached):
        return None
    i = reached[0]
    if i == 0:
        return float(grid[0])
    share = min(1.0, (target - values[i - 1]) / (values[i] - values[i - 1]))
    return float(grid[i - 1] + share * (grid[i] - grid[i - 1]))


def mean_offline_tokens(runs: list[Run]) -> float | None:
    """Return the mean over runs of offline_tokens; None if a record lacks the number."""
    tokens = [run.offline_tokens for run in runs if run.offline_tokens is not None]
    return sum(tokens) / len(tokens) if len(tokens) == len(runs) else None


def settings_of(run: Run) -> dict:
    """Return the recorded settings of a run, or the settings of its folder."""
    if settings := run.record.get("settings"):
        return with_present_names(settings)
    return provenance(run.folder)["settings"] if run.folder else {}


def scorings_of(runs: list[Run]) -> set[tuple[tuple[str, ...], float]]:
    """Return (files of scores, tokens) of the distinct offline scorings that runs use."""
    name_end = "zero_variance.offline_scores"
    return {
        (tuple(str(file) for name, file in settings_of(run).items() if name.endswith(name_end)), tokens)
        for run in runs
        if (tokens := run.offline_tokens)
    }


def offline_charge(runs: list[Run], charge: str) -> float | None:
    """Return the tokens of offline scoring that each run of a row pays for; None if a record lacks them.

    charge: "" for none, "shared" for all distinct scorings divided by the number of runs, "whole" for the
    mean of offline_tokens.
    """
    if not charge:
        return 0.0
    whole = mean_offline_tokens(runs)
    if whole is None or charge == "whole":
        return whole
    return sum(tokens for _, tokens in scorings_of(runs)) / len(runs)


def resamples(runs: list[Run], parents: list[Run], block: int) -> Iterator[list[list[int]]]:
    """Yield RESAMPLES pairs: numbers of the parent's runs, numbers of the row's runs.

    The seeds (with block > 1 the blocks) of both rows are drawn together with replacement, because the runs
    of one seed are correlated: a seed that is drawn twice counts twice in each row that has it. Draws without
    a run of one row are repeated.
    """
    generator = np.random.default_rng(0)
    blocks = [blocks_of(parents, block), blocks_of(runs, block)]
    numbers = [
        {number: np.flatnonzero(np.array(of_row) == number) for number in dict.fromkeys(of_row)}
        for of_row in blocks
    ]
    all_blocks = sorted({*blocks[0], *blocks[1]})
    count = 0
    while count < RESAMPLES:
        drawn = generator.choice(all_blocks, size=len(all_blocks))
        picks = [[i for number in drawn for i in of_row.get(number, ())] for of_row in numbers]
        if all(picks):
            count += 1
            yield picks


def speedup(
    runs: list[Run], parents: list[Run], target: float | None, charge: str = "", block: int = 1
) -> tuple[float | None, list[float] | None, float]:
    """Return the parent's tokens to the target divided by the row's, its interval, and the failed share.

    charge: tokens of offline scoring that are added to both rows, see offline_charge(). The interval is over
    the resamples() in which both mean curves reach the target; the share counts all other resamples. No
    interval if a row has fewer than two seeds (blocks).
    """
    curves = [curve_of(parents), curve_of(runs)]
    charges = [offline_charge(parents, charge), offline_charge(runs, charge)]
    if None in charges:
        return None, None, 0.0

    def ratio(picks: list[list[int]]) -> float | None:
        """Return the ratio for picked runs: numbers of the parent's runs, numbers of the row's runs."""
        means = [values[pick].mean(axis=0) for (_, values), pick in zip(curves, picks)]
        goal = means[0][-1] if target is None else target
        needed = [first_crossing(goal, tokens, mean) for (tokens, _), mean in zip(curves, means)]
        if None in needed or not needed[1]:
            return None
        return (needed[0] + charges[0]) / (needed[1] + charges[1])

    whole = ratio([list(range(len(row))) for row in (parents, runs)])
    if whole is None or min(len(set(blocks_of(row, block))) for row in (parents, runs)) < 2:
        return whole, None, 0.0
    ratios = [value for picks in resamples(runs, parents, block) if (value := ratio(picks)) is not None]
    interval = np.percentile(ratios, [2.5, 97.5]).tolist() if ratios else None
    return whole, interval, 1 - len(ratios) / RESAMPLES


SPEEDUPS = tuple(
    f"speedup{charge}{suffix}"
    for charge in ("", "_shared", "_whole")
    for suffix in ("", "_interval", "_failed")
)


def speedups_of(
    runs: list[Run], parents: list[Run], target: float | None, block: int
) -> dict[str, float | list | None]:
    """Return {name of SPEEDUPS: value}: free offline scoring, a share of it per run, and all of it."""
    uncharged = speedup(runs, parents, target, block=block)
    figures = []
    is_unscored = all(run.offline_tokens == 0 for run in runs + parents)
    for charge in ("", "shared", "whole"):
        figures += uncharged if is_unscored or not charge else speedup(runs, parents, target, charge, block)
    return dict(zip(SPEEDUPS, figures))


def seconds_ratios(runs: list[Run], parents: list[Run]) -> list[float]:
    """Return the parent's seconds divided by the row's, for each seed that both rows have."""
    parent_seconds = {run.record["seed"]: run.seconds[-1] for run in parents}
    return [
        float(parent_seconds[run.record["seed"]] / run.seconds[-1])
        for run in runs
        if run.record["seed"] in parent_seconds
    ]


def curves_with(runs: list[Run], column: str) -> list[np.ndarray]:
    """Return the values of a column, for example step_30:entropy, of each run that has any."""
    kind, _, metric = column.partition(":")
    curves = [run.steps[metric] for run in runs if metric in run.steps]
    if kind.startswith("step_"):
        i = int(kind.removeprefix("step_")) - 1
        curves = [curve[i : i + 1] for curve in curves]
    curves = [curve[~np.isnan(curve)] for curve in curves]
    return [curve for curve in curves if len(curve)]


def statistic(runs: list[Run], column: str) -> float | None:
    """Return the figure of a column, for example mean:abs_dlogp; None if no run has the metric."""
    curves = curves_with(runs, column)
    if not curves:
        return None
    if column.startswith("max:"):
        return float(max(curve.max() for curve in curves))
    return float(np.mean([curve.mean() for curve in curves]))


def gradient_token_share(runs: list[Run]) -> float | None:
    """Return the share of the tokens with gradient, mean over runs; None if a record lacks the numbers."""
    sums = [[run.steps[f"{name}tokens_total"].sum() for name in ("gradient_", "")] for run in runs
            if {"gradient_tokens_total", "tokens_total"} <= run.steps.keys()]  # fmt: skip
    return (
        float(np.mean([gradient / tokens for gradient, tokens in sums])) if len(sums) == len(runs) else None
    )


def unknown_seconds(runs: list[Run]) -> bool:
    """Tell whether a record of a row lacks the seconds of its steps."""
    return bool(np.isnan([run.seconds[-1] for run in runs]).any())


def crossings_of(runs: list[Run], goal: float) -> dict[str, float | None]:
    """Return tokens_to_target and seconds_to_target of a row; None if the goal is not reached."""
    crossings = {}
    for over in ("tokens", "seconds"):
        if not is_curve(runs) or (over == "seconds" and unknown_seconds(runs)):
            crossings[f"{over}_to_target"] = None
            continue
        grid, values = curve_of(runs, over)
        reached = first_crossing(goal, grid, values.mean(axis=0))
        crossings[f"{over}_to_target"] = reached
    return crossings


def make_table(
    rows: dict[str, list[Run]],
    parents: dict[str, str],
    target: float | None,
    columns: tuple[str, ...] = (),
    block: int = 1,
    family: list[Comparison] | None = None,
) -> list[dict]:
    """Return one dictionary per row; None stands for n/a. A column with a colon is a key as well.

    runs_with: number of runs that have the metric of such a column.

    family: comparisons in the other tables of the family.
    """
    family = family or []
    final = {name: np.array([run.values[-1] for run in runs]) for name, runs in rows.items()}
    equal_tokens = equal_tokens_of(rows)
    unpaired = unpaired_figures(rows, parents, block, tuple(comparison.p for comparison in family))
    paired = paired_figures(rows, parents, block, tuple(comparison.paired_p for comparison in family))
    inverted = f"mean:{INVERSION}"
    statistics = [column for column in columns if ":" in column]
    table = []
    for name, runs in rows.items():
        parent = parents[name]
        goal = float(final[parent].mean()) if target is None else target
        are_curves = parent != name and is_curve(runs + rows[parent])
        speedups = speedups_of(runs, rows[parent], target, block) if are_curves else {}
        table.append(
            {
                "row": name,
                "n": len(runs),
                "mean": float(final[name].mean()),
                "finals": final[name].tolist(),
                "falls": sum(bool(run.values[-1] < run.values[0]) for run in runs),
                "interval": t_interval(block_means(final[name], blocks_of(runs, block))),
                **unpaired[name],
                "is_curve": is_curve(runs),
                **crossings_of(runs, goal),
                **dict.fromkeys(SPEEDUPS),
                **speedups,
                "offline_tokens": mean_offline_tokens(runs),
                "gradient_token_share": gradient_token_share(runs),
                "inversion_rate": statistic(runs, inverted),
                "seconds": None if unknown_seconds(runs) else float(np.mean([r.seconds[-1] for r in runs])),
                "times_faster": [] if parent == name else seconds_ratios(runs, rows[parent]),
                "mean_at_equal_tokens": float(
                    np.mean([np.interp(equal_tokens, run.tokens, run.values) for run in runs])
                ),
                "parent": parent,
                **paired[name],
                **{column: statistic(runs, column) for column in statistics},
                "runs_with": {column: len(curves_with(runs, column)) for column in (inverted, *statistics)},
            }
        )
    return table


def equal_tokens_of(rows: dict[str, list[Run]]) -> int:
    """Return the largest number of tokens that every run has generated."""
    return int(min(run.tokens[-1] for runs in rows.values() for run in runs))


# ------------------------------------------------------------------------------------------------------------
# The table as text
# ------------------------------------------------------------------------------------------------------------
def show(value: float | None, form: str) -> str:
    """Format a value; None becomes n/a."""
    return NONE if value is None else format(value, form)


def show_p(p: float | None) -> str:
    """Format a p-value: three digits from 0.001 on, for example 0.021, and powers of ten below."""
    return show(p, ".3f" if p is None or p >= 0.001 else ".1e")


def show_interval(interval: list[float] | None, form: str) -> str:
    """Format an interval, for example "0.40 to 0.60"."""
    return NONE if interval is None else " to ".join(format(bound, form) for bound in interval)


def show_speedup(row: dict, name: str = "speedup") -> str:
    """Format a ratio of tokens with its interval, for example "2.00 (1.50 to 3.00; 4.5 % failed)"."""
    interval = row[f"{name}_interval"]
    failed = row[f"{name}_failed"]
    parts = [show_interval(interval, ".2f")] if interval else []
    parts += [f"{100 * failed:.1f} % failed"] if failed else []
    return show(row[name], ".2f") + (f" ({'; '.join(parts)})" if parts else "")


def show_reached(row: dict, over: str) -> str:
    """Format the tokens or seconds to the target, or "not reached"."""
    number = row[f"{over}_to_target"]
    return NONE if not row["is_curve"] else "not reached" if number is None else f"{number:,.0f}"


def show_ratios(ratios: list[float]) -> str:
    """Format mean and range of ratios, for example "1.40 (0.80 to 2.00)"; n/a for an empty list."""
    if not ratios:
        return NONE
    return f"{np.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def show_statistic(row: dict, column: str) -> str:
    """Format three significant digits, for example 0.075; from 1,000 on, whole numbers with a comma."""
    value = row[column]
    form = ",.0f" if value is not None and abs(value) >= 1000 else ".3g"
    return show(value, form) + show_runs_with(row, column)


def show_runs_with(row: dict, column: str) -> str:
    """Return " (3 of 5)" if 3 of 5 runs have the metric of a column; "" if all runs or none have it."""
    count = row["runs_with"][column]
    return f" ({count} of {row['n']})" if 0 < count < row["n"] else ""


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
    "gradient_tokens": ("gradient tokens", lambda row: show(row["gradient_token_share"], ".3f")),
    "inverted": (
        "inverted",
        lambda row: show(row["inversion_rate"], ".3f") + show_runs_with(row, f"mean:{INVERSION}"),
    ),
    "seconds": ("seconds", lambda row: show(row["seconds"], ".1f")),
    "parent": ("parent", lambda row: row["parent"]),
    "seconds_to_target": ("seconds to target", lambda row: show_reached(row, "seconds")),
    "times_faster": ("times faster", lambda row: show_ratios(row["times_faster"])),
    "runs": ("each run", lambda row: ", ".join(f"{value:.2f}" for value in row["finals"])),
    "falls": ("falls", lambda row: str(row["falls"])),
    "pairs": ("pairs", lambda row: str(row["pairs"])),
    "paired": ("paired difference", lambda row: show(row["paired"], "+.4f")),
    "paired_interval": ("its 95 % interval", lambda row: show_interval(row["paired_interval"], "+.4f")),
    "paired_p": ("paired p", lambda row: show_p(row["paired_p"])),
    "paired_p_holm": ("paired p, Holm", lambda row: show_p(row["paired_p_holm"])),
    "detectable": ("detectable", lambda row: show(row["detectable"], ".4f")),
    "welch_interval": ("Welch interval", lambda row: show_interval(row["welch_interval"], "+.4f")),
    "welch_detectable": ("Welch detectable", lambda row: show(row["welch_detectable"], ".4f")),
    "offline_tokens": ("tokens of scoring", lambda row: show(row["offline_tokens"], ",.0f")),
    "speedup_shared": ("scoring shared by n", lambda row: show_speedup(row, "speedup_shared")),
    "speedup_whole": ("scoring charged whole", lambda row: show_speedup(row, "speedup_whole")),
}
STANDARD = tuple(COLUMNS)[: list(COLUMNS).index("seconds") + 1]
WELCH = ("p", "p_holm", "welch_interval", "welch_detectable")  # columns that take every run as independent
COMPARING = (  # columns that compare the metric of a row with its parent's
    *WELCH, "minus_parent", "paired", "paired_interval", "paired_p", "paired_p_holm", "detectable",
    "speedup", "speedup_shared", "speedup_whole",
)  # fmt: skip


NEEDED = {  # training metrics behind columns, which a small record may lack
    "gradient_tokens": ("gradient_tokens_total", "tokens_total"),
    "seconds": ("seconds_per_step",), "seconds_to_target": ("seconds_per_step",),
    "times_faster": ("seconds_per_step",),
}  # fmt: skip


def check_columns(columns: tuple[str, ...], rows: dict[str, list[Run]]) -> None:
    """Raise ValueError for an unknown column, or for a metric that no run has."""
    lacking = {name for runs in rows.values() for run in runs for column in columns
               for name in NEEDED.get(column, ()) if name not in run.steps}  # fmt: skip
    if lacking:
        raise ValueError(
            f"--columns: a record lacks {', '.join(sorted(lacking))}; choose other columns, or bring the "
            "whole record by `python -m experiments.records get STUDY`"
        )
    metrics = sorted({name for runs in rows.values() for run in runs for name in run.steps})
    for column in columns:
        kind, colon, metric = column.partition(":")
        if not colon and column not in COLUMNS:
            raise ValueError(
                f"--columns {column}: unknown column, choose among {', '.join(COLUMNS)}, mean:NAME, "
                "max:NAME, step_N:NAME"
            )
        if colon and not re.fullmatch(r"mean|max|step_[1-9]\d*", kind):
            raise ValueError(f"--columns {column}: expected mean:NAME, max:NAME or step_N:NAME")
        if colon and metric not in metrics:
            raise ValueError(f"--columns {column}: no run has this metric; choose among {', '.join(metrics)}")


def header_of(column: str, metric: str, equal_tokens: int) -> str:
    """Return the header of a column."""
    kind, colon, name = column.partition(":")
    if not colon:
        return COLUMNS[column][0].format(metric=metric, equal_tokens=equal_tokens)
    return {"mean": f"mean {name}", "max": f"largest {name}"}.get(kind, f"{name}, {kind.replace('_', ' ')}")


def markdown(table: list[dict], rows: dict[str, list[Run]], args: argparse.Namespace) -> list[str]:
    """Return the lines of the table in Markdown."""
    lines = [[header_of(column, args.metric, equal_tokens_of(rows)) for column in args.columns]]
    for row in table:
        lines.append([show_statistic(row, c) if ":" in c else COLUMNS[c][1](row) for c in args.columns])
    text = ["| " + " | ".join(cells) + " |" for cells in lines]
    return [text[0], "|" + "---|" * len(args.columns), *text[1:]]


def footnotes(table: list[dict], target: float | None) -> list[str]:
    """Return a line per parent: the child rows and the target."""
    means = {row["row"]: row["mean"] for row in table}
    lines = []
    for parent in dict.fromkeys(row["parent"] for row in table):
        children = ", ".join(row["row"] for row in table if row["parent"] == parent)
        goal = f"{means[parent]:.4f}, its final mean" if target is None else f"{target:g}"
        lines.append(f"parent {parent} of {children}: target {goal}")
    return lines


def note_of(rows: dict[str, list[Run]], parents: dict[str, str], shown: Shown) -> list[str]:
    """Return the note below a table, with an empty line above; [] if there is nothing to say."""
    records = {}
    for name, runs in rows.items():
        folders = [run.folder for run in runs]
        versions = [versions_of(f) if f and (f / "versions.json").is_file() else {} for f in folders]
        records[name] = [{"versions": of_run} | run.record for run, of_run in zip(runs, versions)]
    studies = {
        name: {Path(run.place.rpartition(", line ")[0]).parent for run in runs if run.folder is None}
        for name, runs in rows.items()
    }
    note = notes_of(records, parents, studies, shown)
    return ["", NOTE + note] if note else []


# ------------------------------------------------------------------------------------------------------------
# Plots and records
# ------------------------------------------------------------------------------------------------------------
def moving_sum(values: np.ndarray) -> np.ndarray:
    """Sum over the last SMOOTHING_STEPS steps; over fewer steps at the start."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[1:] - total[np.maximum(0, np.arange(1, len(total)) - SMOOTHING_STEPS)]


def smoothed(steps: dict[str, np.ndarray], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and the mean of a metric over the latest steps, for the steps that have the metric."""
    is_present = ~np.isnan(steps[metric])
    values = steps[metric][is_present]
    tokens = steps.get("generated_tokens", np.full(len(is_present), np.nan))
    return tokens[is_present], moving_sum(values) / moving_sum(np.ones(len(values)))


def draw(axes, curves: list[tuple[np.ndarray, np.ndarray]], blocks: list[int], label: str, **style) -> None:
    """Draw the mean over runs, with a band of one standard error, up to the end of the shortest run.

    blocks: number of each run's block; the error is that of the mean over blocks.
    """
    grid = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), 200)
    values = np.array([np.interp(grid, x, y) for x, y in curves])  # [runs, 200]
    (line,) = axes.plot(grid, values.mean(0), label=f"{label} (n = {len(curves)})", **style)
    means = block_means(values, blocks)  # [blocks, 200]
    if len(means) > 1:
        error = means.std(0, ddof=1) / math.sqrt(len(means))
        axes.fill_between(
            grid, values.mean(0) - error, values.mean(0) + error, color=line.get_color(), alpha=0.2, lw=0
        )


def gradient_share(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and the share of the tokens with gradient over the latest steps."""
    num_tokens = np.maximum(1, moving_sum(run.steps["tokens_total"]))
    return run.steps["generated_tokens"], moving_sum(run.steps["gradient_tokens_total"]) / num_tokens


def zero_variance_rate(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and the share of groups without variance over the latest steps."""
    return smoothed(run.steps, "zero_variance_frac")


def axis_label(metric: str) -> str:
    """Return the label of an axis, for example "held-out accuracy (avg@8)" for additions/avg_at_8."""
    if metric.startswith(TRAINING):
        return axis_label(metric.removeprefix(TRAINING))
    leaf = metric.split("/")[-1]
    if leaf.startswith(("avg_at_", "pass_at_")):
        subset = f", {metric.split('/')[0]}" if "/" in metric else ""
        return f"held-out accuracy ({leaf.replace('_at_', '@')}{subset})"
    if leaf == "accuracy":
        return "held-out accuracy (greedy)"
    return METRIC_LABELS.get(metric, metric)


def title_of(label: str) -> str:
    """Return the title of a panel: the label of the vertical axis without the unit."""
    text = label.partition(" (")[0]
    return text[:1].upper() + text[1:]


def finish_axes(axes, x_label: str, y_label: str, title: str) -> None:
    """Add title, labels and grid to a panel."""
    axes.set_title(title, fontsize="medium")
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)


def plot(rows: dict[str, list[Run]], metric: str, file: Path, block: int = 1) -> None:
    """Plot the metric against tokens and seconds; to `cost` beside the file, shares against tokens."""
    plt = pyplot()
    label = axis_label(metric)
    name = title_of(label)
    tokens = "generated tokens"
    figures = {
        file: (
            (f"{name} against tokens", tokens, label, lambda run: (run.tokens, run.values)),
            (f"{name} against time", "seconds of training", label, lambda run: (run.seconds, run.values)),
        ),
        file.with_name(f"cost{file.suffix}"): (
            ("Tokens with gradient", tokens, f"share, mean of {SMOOTHING_STEPS} steps", gradient_share),
            (
                "Groups without variance",
                tokens,
                f"share, mean of {SMOOTHING_STEPS} steps",
                zero_variance_rate,
            ),
        ),
    }
    for path, panels in figures.items():
        figure, grid = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
        for axes, (title, x_label, y_label, curve) in zip(grid, panels):
            axes.set_prop_cycle(cycler(linestyle=LINE_STYLES) * cycler(color=plt.get_cmap("tab10").colors))
            for row, runs in rows.items():
                draw(axes, [curve(run) for run in runs], blocks_of(runs, block), row)
            finish_axes(axes, x_label, y_label, title)
        figure.supxlabel(BAND_NOTE, fontsize="small")
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
        figure.savefig(path, dpi=110)
        plt.close(figure)


def plot_curves(rows: dict[str, list[Run]], metrics: list[str], file: Path, block: int = 1) -> None:
    """Plot training metrics against generated tokens, one panel each, as means over the latest steps."""
    if not metrics:
        raise ValueError("--curves: expected FILE.png and the names of metrics")
    known_metrics = sorted({name for runs in rows.values() for run in runs for name in run.steps})
    missing = [name for name in metrics if name not in known_metrics]
    if missing:
        raise ValueError(
            f"--curves: no run has {', '.join(missing)}; choose among {', '.join(known_metrics)}"
        )
    plt = pyplot()
    columns = min(3, len(metrics))
    height = math.ceil(len(metrics) / columns)
    figure, grid = plt.subplots(
        height, columns, figsize=(4.2 * columns + 1.3, 3.4 * height), layout="constrained", squeeze=False
    )
    for axes in grid.flat[len(metrics) :]:
        axes.remove()
    for axes, metric in zip(grid.flat, metrics):
        for i, (name, runs) in enumerate(rows.items()):
            runs_with = [run for run in runs if metric in run.steps]
            curves = [smoothed(run.steps, metric) for run in runs_with]
            if curves:
                style = {"color": f"C{i % 10}", "linestyle": LINE_STYLES[i // 10 % 3]}
                draw(axes, curves, blocks_of(runs_with, block), name, **style)
        label = axis_label(metric)
        finish_axes(axes, "generated tokens", label, title_of(label))
        axes.locator_params(axis="x", nbins=4)
    lines = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels())}
    figure.supxlabel(f"{BAND_NOTE}; means of {SMOOTHING_STEPS} steps", fontsize="small")
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize="small")
    figure.savefig(file, dpi=110)
    plt.close(figure)


def setting_points(rows: dict[str, list[Run]], setting: str, metric: str) -> list[tuple[float, float]]:
    """Return (value of the setting, mean over steps of the metric) of every run."""
    section, _, key = setting.partition(".")
    try:
        default = getattr(getattr(Config(), section), key)
    except AttributeError:
        raise ValueError(f"--against {setting}: unknown setting; see train_rl.py --help") from None
    points = []
    for runs in rows.values():
        for run in runs:
            points.append((settings_of(run).get(setting, default), statistic([run], f"mean:{metric}")))
    if any(value is None or not isinstance(x, float | int) for x, value in points):
        raise ValueError(
            f"--against {setting} {metric}: a run lacks this metric, or the setting is not a number; choose "
            "a numeric setting and a metric of every run"
        )
    return points


def plot_against(rows: dict[str, list[Run]], setting: str, metric: str, file: Path) -> None:
    """Plot the mean over steps of a metric against a setting of the rows: every run, and the mean."""
    plt = pyplot()
    points = setting_points(rows, setting, metric)
    ticks = sorted({x for x, _ in points})
    means = [np.mean([value for x, value in points if x == tick]) for tick in ticks]
    label = axis_label(metric)
    figure, axes = plt.subplots(figsize=(5, 4), layout="constrained")
    counts = Counter(x for x, _ in points).values()
    n = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    axes.plot(ticks, means, marker="o", label=f"mean (n = {n})")
    axes.plot(*zip(*points), ".", alpha=0.5, label="each run")
    finish_axes(axes, METRIC_LABELS.get(setting, setting), f"{label}, mean over steps", title_of(label))
    if min(ticks) > 0:  # a setting of 0, for example no penalty, has no place on a logarithmic axis
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.legend()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def provenance(folder: Path) -> dict:
    """Return commit, versions and settings of a run folder, in the form of a record.

    The settings omit run.dir and train.seed, which follow from row and seed. Settings that are unknown in
    this version are recorded unchanged.
    """
    versions = versions_of(folder)
    config = config_of(folder)
    try:
        settings = flat_settings(Config.model_validate(config).model_dump(mode="json", exclude_defaults=True))
    except ValueError:  # another version made the run
        defaults = flat_settings(Config().model_dump(mode="json"))
        settings = {
            name: value
            for name, value in flat_settings(config).items()
            if name not in defaults or value != defaults[name]
        }
    omitted = ("run.dir", "train.seed")
    return {
        "commit": versions.pop("commit", None),
        "versions": versions,
        "settings": {name: value for name, value in settings.items() if name not in omitted},
    }


def shorten(columns: dict[str, list]) -> dict[str, list]:
    """Round the metrics of columns to seven digits."""
    return {
        name: [float(f"{value:.7g}") if isinstance(value, float) else value for value in values]
        for name, values in columns.items()
    }


def export(rows: dict[str, list[Run]], metric: str, file: Path) -> None:
    """Write the record file of the runs."""
    if file.exists():
        raise ValueError(f"--export: {file} already exists; remove it first")
    names = ("row", "seed", "commit", "versions", "settings", "offline_tokens", "steps", "evaluations")
    names = (*names, "outcomes")
    lines = []
    for run in (run for runs in rows.values() for run in runs):
        complete = run.record | (provenance(run.folder) if run.folder else {})
        record = {name: complete[name] for name in names if name in complete}
        steps = {name: column for name, column in record["steps"].items() if is_recorded(name, metric)}
        record |= {"steps": shorten(steps), "evaluations": shorten(record["evaluations"])}
        lines.append(json.dumps(record, separators=(",", ":")) + "\n")
    file.write_text("".join(lines))


# ------------------------------------------------------------------------------------------------------------
# The tables of the docs
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class DocTable:
    """A Markdown table of a document, with the comment above it."""

    line: int  # number of the comment's first line, or of a bare table's first line
    comment: str | None  # text after `report:`; None: no comment
    start: int  # index of the table's first line
    stop: int  # index of the line after the table and its note; start if the comment has no table


def end_of_table(lines: list[str], start: int) -> int:
    """Return the index after the table that begins at `start`; `start` itself if no table begins there."""
    stop = start
    if start + 1 < len(lines) and re.fullmatch(r"\|?(\s*:?-+:?\s*\|)+(\s*:?-+:?\s*)?", lines[start + 1]):
        while stop < len(lines) and lines[stop].startswith("|"):
            stop += 1
    return stop


def find_tables(lines: list[str]) -> list[DocTable]:
    """Find all tables and report comments of a document, outside of code blocks."""
    tables = []
    in_code = False
    i = 0
    while i < len(lines):
        begin = i
        comment = None
        if lines[i].lstrip().startswith("```"):
            in_code = not in_code
        if not in_code and lines[i].startswith("<!-- report:"):
            while i + 1 < len(lines) and "-->" not in lines[i]:
                i += 1
            comment = " ".join(lines[begin : i + 1]).removeprefix("<!-- report:").partition("-->")[0].strip()
            i += 1
        has_blank_line = comment is not None and i < len(lines) and not lines[i].strip()
        start = i + has_blank_line
        stop = start if in_code else end_of_table(lines, start)
        if comment is not None or stop > start:
            has_table = stop > start
            has_note = has_table and stop + 1 < len(lines) and lines[stop + 1].startswith(NOTE)
            stop += 2 if has_note and not lines[stop].strip() else 0
            tables.append(DocTable(begin + 1, comment, start if has_table else i, stop if has_table else i))
        i = max(stop, begin + 1)
    return tables


def expected_lines(comment: str, folder: Path) -> list[str]:
    """Make the lines of the table that a comment describes, for a document in this folder."""
    words = shlex.split(comment)
    if words[:1] == ["module"]:
        if len(words) != 3:
            raise ValueError("expected `module PACKAGE.MODULE FILE.json` or FILE.jsonl")
        name, _, function = words[1].partition(":")
        module = importlib.import_module(name)
        make = getattr(module, function or "table_lines")
        file = folder / words[2]
        if file.suffix == ".json":
            return make(read_results(file))
        rows = read_rows([file], None, module.METRIC)
        return [*make(module.measure(rows)), *note_of(rows, {row: row for row in rows}, Shown())]
    args = table_options(comment)
    table, rows, note = make_rows(args, folder)
    return [*markdown(table, rows, args), *note]


def table_options(comment: str) -> argparse.Namespace:
    """Parse the options of a comment."""
    parser = Parser(add_help=False, allow_abbrev=False)
    add_table_options(parser)
    return parser.parse_args(shlex.split(comment))


def read_family(documents: list[Path]) -> list[Comparison]:
    """Return the comparisons of all tables of documents whose comments have --family, each once."""
    family: dict[Comparison, None] = {}
    for document in documents:
        for table in find_tables(document.read_text().splitlines()):
            args = table_options(table.comment) if "--family" in (table.comment or "") else None
            if args and args.family:
                rows, parents = read_table(args, document.parent)
                family |= dict.fromkeys(comparisons_of(rows, parents, args.metric, args.block))
    return list(family)


def cells_of(line: str) -> list[str]:
    """Split a line of a Markdown table into its cells; an escaped pipe is a part of its cell."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|"))]


def compare(document: list[str], expected: list[str]) -> tuple[list[str], int]:
    """Compare two tables with their notes; return the differences and the number of compared figures."""
    notes = [
        lines[-1].removeprefix(NOTE) if lines and lines[-1].startswith(NOTE) else ""
        for lines in (document, expected)
    ]
    differences, num_figures = compare_tables(
        *([line for line in lines if line and not line.startswith(NOTE)] for lines in (document, expected))
    )
    if document and notes[0] != notes[1]:
        differences.append(f"the note is {notes[0]!r} in the text, {notes[1]!r} in the record")
    return differences, num_figures


def compare_tables(document: list[str], expected: list[str]) -> tuple[list[str], int]:
    """Compare the lines of two tables; return the differences and the number of compared figures."""
    if not document:
        return ["the table below the comment is missing; --fix writes it"], 0
    texts = [cells_of(line) for line in [*document[:1], *document[2:]]]
    records = [cells_of(line) for line in [*expected[:1], *expected[2:]]]
    if texts[0] != records[0]:
        return [f"columns are {texts[0]} in the text, {records[0]} in the record"], 0
    text_names = [row[0] for row in texts]
    record_names = [row[0] for row in records]
    if text_names != record_names:
        in_record = ", ".join(record_names[1:])
        return [f"rows are {', '.join(text_names[1:])} in the text, {in_record} in the record"], 0
    differences = []
    num_figures = 0
    for text, record in zip(texts[1:], records[1:]):
        if len(text) != len(record):
            differences.append(
                f"row {text[0]} has {len(text)} cells in the text, {len(record)} in the record"
            )
        headers = records[0] + ["beyond the header"] * (len(record) - len(records[0]))
        for column, cell, right in zip(headers[1:], text[1:], record[1:]):
            num_figures += any(character.isdigit() for character in right)
            if cell != right:
                differences.append(
                    f"row {text[0]}, column {column}: {cell} in the text, {right} in the record"
                )
    return differences, num_figures


def check_table(table: DocTable, lines: list[str], file: Path, fix: bool) -> tuple[list[str], int]:
    """Return the problems of a table and the number of compared figures; with fix, correct `lines`."""
    if table.comment is None:
        has_record = any(file.parent.glob("*.jsonl"))
        problem = "a table without a `<!-- report: ... -->` comment; `none, REASON` if no record makes it"
        return ([problem] if has_record else []), 0
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


def list_documents(root: Path) -> list[str]:
    """List the *.md files below root that git tracks or would add."""
    done = subprocess.run(
        ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise ValueError(f"git cannot list the documents of {root} ({done.stderr.strip()})")
    return [name for name in sorted(set(done.stdout.split("\0")) - {""}) if (root / name).is_file()]


def check_documents(root: Path, fix: bool) -> int:
    """Check, or with fix rewrite, the tables of all documents below root; return the exit code."""
    num_tables = 0
    num_figures = 0
    documents = list_documents(root)
    studies = {file.parent for file in root.glob("experiments/studies/*/*.json*")}
    folders = sorted(studies | {(root / name).parent for name in documents})
    problems = [
        f"{folder}/declared.json: {text}"
        for folder in folders
        for text in (*check_study(folder), *check_tuning(folder), *check_records(folder))
    ]
    problems += all_problems(root / "experiments" / "starts")
    for name in documents:
        file = root / name
        lines = file.read_text().splitlines()
        original = list(lines)
        problems_of_file = []
        for table in reversed(find_tables(lines)):  # backwards: a corrected table may change in length
            problems_of_table, compared = check_table(table, lines, file, fix)
            problems_of_file = [
                f"{name}:{table.line}: {text}" for text in problems_of_table
            ] + problems_of_file
            num_tables += bool(compared)
            num_figures += compared
        problems += problems_of_file
        if lines != original:
            file.write_text("\n".join(lines) + "\n")
            print(f"{name}: rewritten")
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    verdict = f"problems: {len(problems)}" if problems else "all agree with their records"
    print(f"{num_figures:,} figures of {num_tables} tables checked; {verdict}")
    if not is_complete(root):
        print("history incomplete: declarations not checked")
        return 1 if problems else 3
    return 1 if problems else 0


# ------------------------------------------------------------------------------------------------------------
# The command line
# ------------------------------------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError, because the comments of documents are parsed too."""

    def error(self, message: str):
        """Raise argparse's message, so that main() prints it in one line."""
        raise ValueError(message)


def add_table_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a table."""
    parser.add_argument("--runs", type=Path, nargs="+", metavar="PATH", help="folders of runs, record files")
    parser.add_argument("--parent", metavar="ROW", help="row to which all other rows are compared")
    parser.add_argument(
        "--parents", nargs="+", default=[], metavar="ROW=PARENT", help="rows that have another parent"
    )
    parser.add_argument(
        "--rows", nargs="+", help="rows, in this order (default: the parent, then all other rows by name)"
    )
    parser.add_argument(
        "--metric", default="avg_at_8",
        help="metric of the evaluations, for example chains/avg_at_4, or train/METRIC (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--without-seeds", type=int, nargs="+", default=[], metavar="SEED",
        help="leave the runs of these seeds out",
    )  # fmt: skip
    parser.add_argument(
        "--target", type=float, help="target of tokens_to_target (default: the parent's final mean)"
    )
    parser.add_argument(
        "--block",
        type=int,
        default=1,
        metavar="N",
        help="seeds that are not independent of each other (default: 1)",
    )
    parser.add_argument(
        "--family", type=Path, nargs="+", default=[], metavar="DOCUMENT.md",
        help="Holm's correction over all tables of these documents that have --family",
    )  # fmt: skip
    parser.add_argument(
        "--columns", nargs="+", default=list(STANDARD), metavar="NAME", help="columns, in this order"
    )


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that write files, and those that check the docs."""
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="plot the metric's curves here, and cost.png beside it"
    )
    parser.add_argument(
        "--against", nargs=3, metavar=("SETTING", "METRIC", "FILE.png"),
        help="plot a metric against a setting",
    )  # fmt: skip
    parser.add_argument(
        "--curves", nargs="+", metavar=("FILE.png", "METRIC"), help="plot training metrics against tokens"
    )
    parser.add_argument("--export", type=Path, metavar="FILE.jsonl", help="write the record of the runs here")
    parser.add_argument(
        "--check", action="store_true", help="compare the tables of the docs with the records"
    )
    parser.add_argument("--fix", action="store_true", help="rewrite the tables of the docs that differ")


def parents_of(rows: dict[str, list[Run]], parent: str, pairs: list[str]) -> dict[str, str]:
    """Return {row: parent} from --parent and the pairs of --parents, for example gdpo=two_rewards."""
    parents = dict.fromkeys(rows, parent)
    for text in pairs:
        row, equals, name = text.partition("=")
        if not equals or row not in rows:
            raise ValueError(f"--parents {text}: expected ROW=PARENT, with a row of {', '.join(rows)}")
        parents[row] = name
    for name in parents.values():
        if name not in rows:
            raise ValueError(f"parent {name!r}: unknown row, choose among {', '.join(rows)}")
    return parents


def read_table(args: argparse.Namespace, folder: Path) -> tuple[dict[str, list[Run]], dict[str, str]]:
    """Read the runs of --runs, relative to a folder; return the runs by row, and {row: parent}."""
    if not args.runs or args.parent is None:
        raise ValueError("a table needs --runs and --parent")
    paths = [folder / path for path in args.runs]
    rows = read_rows(paths, args.rows, args.metric, tuple(args.without_seeds))
    if args.rows is None:
        rows = {name: rows[name] for name in sorted(rows, key=lambda name: name != args.parent)}
    check_columns(args.columns, rows)
    if args.block < 1:
        raise ValueError(f"--block {args.block} must be at least 1")
    independent = [column for column in args.columns if column in WELCH]
    if args.block > 1 and independent:
        raise ValueError(
            f"--block {args.block}: {', '.join(independent)} take every run as independent, and the runs of "
            "a block are not; choose paired, paired_interval, paired_p or detectable in --columns"
        )
    return rows, parents_of(rows, args.parent, args.parents)


def make_rows(args: argparse.Namespace, folder: Path) -> tuple[list[dict], dict[str, list[Run]], list[str]]:
    """Return the table of the runs of --runs, relative to a folder, the runs by row, and the note's lines."""
    rows, parents = read_table(args, folder)
    in_documents = read_family([folder / document for document in args.family])
    in_table = comparisons_of(rows, parents, args.metric, args.block) if in_documents else []
    family = [comparison for comparison in in_documents if comparison not in in_table]
    table = make_table(rows, parents, args.target, args.columns, args.block, family)
    compared = {pair for pair in parents.items() if pair[0] != pair[1]}
    in_family = {(comparison.row, comparison.parent) for comparison in family}
    shown = Shown(
        metric=args.metric,
        compared=compared if {*COMPARING} & {*args.columns} else set(),
        corrected=compared | in_family if {"p_holm", "paired_p_holm"} & {*args.columns} else set(),
        left_out=set(args.without_seeds),
    )
    return table, rows, note_of(rows, parents, shown)


def main(argv: list[str]) -> int:
    """Run the command line; return the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_table_options(parser)
    add_output_options(parser)
    try:
        args = parser.parse_args(argv)
        if args.plot and args.plot.stem == "cost":
            raise ValueError(
                f"--plot {args.plot}: choose another name, cost{args.plot.suffix} is its second plot"
            )
        if args.check or args.fix:
            if len(argv) > 1:
                raise ValueError(
                    "--check and --fix take no other options: the comments of the docs have them"
                )
            return check_documents(ROOT, args.fix)
        table, rows, note = make_rows(args, Path())
        print("\n".join([*markdown(table, rows, args), *note, "", *footnotes(table, args.target)]))
        if args.json:
            args.json.write_text(json.dumps(table, indent=1))
        if args.plot:
            plot(rows, args.metric, args.plot, args.block)
        if args.against:
            plot_against(rows, *args.against)
        if args.curves:
            plot_curves(rows, args.curves[1:], Path(args.curves[0]), args.block)
        if args.export:
            export(rows, args.metric, args.export)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
