"""Make the table of a set of runs, keep the runs in a record file, and check the tables of the docs.

    python experiments/report.py --runs runs/mine --parent grpo
    python experiments/report.py --runs runs/mine --parent grpo --parents a=gspo --columns row paired
    python experiments/report.py --runs runs/mine --parent grpo --export runs.jsonl
    python experiments/report.py --runs experiments/studies/elimination_tuned/runs.jsonl --parent grpo
    python experiments/report.py --check      # compare every table of the docs with its record
    python experiments/report.py --fix        # rewrite the tables that differ

--runs takes folders that experiments/run.py has filled (ROW/seed_S), record files, or several of both. A
figure is a mean over the finished runs (seeds) of a row. --metric NAME selects a metric of the evaluations,
eval/SET/NAME; --metric train/NAME one of the training steps, as the mean over the latest ten steps.

COLUMNS. By default, `row` to `seconds`.
  row, n            Name of the row and number of its runs.
  metric            The metric at the last step; for evaluations, the mean over the held-out sets.
  interval          95 % t-interval over runs; with --block over the means of the blocks.
  paired            Mean of row minus parent over the seeds (with --block: the blocks) that both have.
  paired_interval   95 % t-interval of this mean; n/a for fewer than two pairs.
  paired_p          Two-sided t-test of the differences; n/a if all differences are equal and not 0.
  paired_p_holm     The same after Holm's correction over all rows of the table that have a paired p.
  gradient_tokens   Sum of gradient_tokens_total, divided by the sum of tokens_total.
  seconds           Sum of seconds_per_step, which excludes the start-up.
  parent            The row to which this row is compared.
  runs              Final metric of each run, by seed.
  detectable        Smallest true difference that the paired test finds with 80 % power at the 5 % level,
                    without Holm's correction, if differences vary as in these pairs.
  mean:NAME         Mean over steps of a metric, then mean over runs, for example mean:abs_dlogp.
  max:NAME          Largest value of a metric over all steps of all runs.
                    "0.015 (4 of 5)": one of five runs lacks the metric.
  saving:SUM        The parent's SUM over all steps divided by the row's: geometric mean over the pairs, with
                    the 95 % t-interval of the logarithms. SUM is a metric, for example seconds_per_step, or a
                    weighted sum, for example tokens_total+0.25*draft_tokens_total. After a + a run may lack
                    the metric; a missing value is 0. --json has the logarithms.
  equal:SUM         Row minus parent at equal SUM: where the run that has less of it ends, and the other
                    interpolated linearly; with the 95 % interval, and p after Holm's correction.

BLOCKS. With --block N, N consecutive seeds (0 to N - 1, ...) share a judge or a task instance. Intervals and
paired tests then take the mean of each block as one value: 20 seeds with --block 2 are ten pairs.

NOTE. A line below the table names the digest of the declaration and everything that is not as declared
(experiments/notes.py). A new table of undeclared runs is refused.

RECORDS. --export writes one JSON line per finished run, and --runs reads such a file. Metrics are rounded to
seven digits, the precision of float32:
  {"row", "seed", "commit", "versions": {package: version},  # also "weights": digest of the initial weights;
                                                     # "machine", "date", "data": digests of the prompts,
                                                     # "dtype": of the policy;
                                                     # "earlier": versions of earlier launches, if different
   "settings": {dotted name: value},                  # settings that differ from the defaults
   "steps": {metric: [value of step 1, 2, ...]},      # includes step and generated_tokens; null: no value
   "evaluations": {metric: [value of each]},          # step, generated_tokens, eval/SET/METRIC
   "offline_tokens": 42000}                           # null: the run used scores whose file is missing

TABLES OF THE DOCS. A comment at the start of a line, directly above a markdown table, names the source of the
table. Paths in the comment are relative to the document.
  <!-- report: --runs runs.jsonl --parent grpo ... -->   Options of a table, see above; its note follows.
  <!-- report: module PACKAGE.MODULE FILE.json -->       Lines returned by MODULE.table_lines(data) for the
                                                         JSON file; MODULE:NAME calls NAME instead.
  <!-- report: closed COMMIT -->                         A table as it was at a commit, which has its program
                                                         and its record.
  <!-- report: none, REASON -->                          A table that no record makes.
--check reads all *.md files that git tracks or would add, and the declarations of studies (declaration.py).
If a *.jsonl lies beside a document, each table of the document needs a comment.
Exit codes: 0 if every figure agrees, 1 if a figure differs, 2 for invalid options, 3 if every figure agrees
in a shallow clone, which lacks the commits of runs: then declarations and small records are not checked.
"""

import argparse
import fnmatch
import importlib
import itertools
import json
import math
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run as a script: for the modules of the project

import numpy as np
import yaml
from scipy import optimize, stats

from experiments.bench import common
from experiments.declaration import check_study
from experiments.history import content_at, git, is_complete
from experiments.notes import Shown, notes_of
from experiments.records import check_records, index_of
from experiments.starts import all_problems
from runtime.config import flat_settings, with_paths
from runtime.old_settings import present_settings
from settings import Config

POSITION = ("step", "generated_tokens")
STEP_KEYS = ("tokens_total", "gradient_tokens_total", "zero_variance_frac", "seconds_per_step")
RECORDED = (  # patterns of the optional training metrics that a record keeps
    "inversion_frac", "score", "reward", "verdict/ok_frac", "completion_tokens", "abs_dlogp", "mismatch_k3",
    "mismatch_routes", "mismatch_ess", "skew_*", "topk_mass", "abs_log_ratio", "entropy", "clipped",
    "clip_eps", "grad_norm", "clipped/update_*", "entropy/entropy_group_*", "clipped/entropy_group_*",
    "cut_at_limit_frac", "distinct_frac", "draft_*", "rollout_bubble", "seconds/*", "lora/*",
    "zero_variance/*", "account/prompts_skipped", "account/prompts_stopped", "regime/*", "teacher_*",
    "account/teacher_tokens_total", "masked", "part/*", "turns", "tool_*", "token_age_mean", "carr*",
)  # fmt: skip
SMOOTHING_STEPS = 10  # width of moving sums and means
TRAINING = "train/"  # prefix of a metric of the training steps in --metric
NONE = "n/a"
NOTE = "> Note: "  # start of the line below a table


@dataclass(frozen=True)
class Run:
    """A finished run: its record, and the arrays from which the table is made."""

    record: dict  # a line of a record file; for a run folder, the same without commit, versions, settings
    place: str  # file and line of the record, for messages
    folder: Path | None  # None: the run comes from a record file
    steps: dict[str, np.ndarray]  # {metric: [steps]}; NaN in steps that lack the metric
    values: np.ndarray  # the metric at each evaluation, or its moving mean at each training step
    at: np.ndarray  # steps of these values
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


def is_recorded_evaluation(name: str, metric: str) -> bool:
    """Tell whether a record keeps a metric of an evaluation: --metric, accuracy, tool_calls, avg_at_K ..."""
    leaf = name.split("/")[-1]
    is_standard = leaf in ("accuracy", "tool_calls") or leaf.startswith(("avg_at_", "pass_at_"))
    return name.startswith("eval/") and (name.endswith(f"/{metric}") or is_standard)


def is_recorded(name: str, metric: str) -> bool:
    """Tell whether a record keeps a training metric: STEP_KEYS, RECORDED and --metric."""
    patterns = (*POSITION, *STEP_KEYS, *RECORDED)
    return TRAINING + name == metric or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def is_finite(value: object) -> bool:
    """Tell whether a value is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def read_metrics(file: Path, metric: str) -> dict[str, dict[str, list]]:
    """Read metrics.jsonl into the columns of a record: {"steps": ..., "evaluations": ...}.

    A row with eval/ metrics is an evaluation, any other row is a training step. Numbers outside of RECORDED
    are read too, because --columns may name any metric.
    """
    if not file.is_file():
        raise ValueError(f"{file} does not exist")
    rows: dict[str, list[dict]] = {"steps": [], "evaluations": []}
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        row = parse_object(line, f"{file}, line {number}")
        is_evaluation = any(name.startswith("eval/") for name in row)
        if is_evaluation:
            kept = [name for name in row if name in POSITION or is_recorded_evaluation(name, metric)]
        else:
            kept = [name for name in row if is_recorded(name, metric) or is_finite(row[name])]
        rows["evaluations" if is_evaluation else "steps"].append({name: row[name] for name in kept})
    names = {kind: dict.fromkeys([*POSITION, *(name for row in rows[kind] for name in row)]) for kind in rows}
    return {kind: {name: [row.get(name) for row in rows[kind]] for name in names[kind]} for kind in rows}


def check_curves(record: dict, place: str, is_small: bool) -> None:
    """Check the columns of a record: equal lengths, finite numbers, steps in order; else ValueError.

    is_small: the record lacks columns of its steps (experiments/records.py).
    """
    of_steps = ("step",) if is_small else (*POSITION, *STEP_KEYS)
    for kind, required in (("steps", of_steps), ("evaluations", POSITION)):
        columns = record.get(kind)
        if not isinstance(columns, dict) or not all(isinstance(column, list) for column in columns.values()):
            raise ValueError(f"{place}: {kind} must be an object of lists, {{metric: [values]}}")
        for name in required:
            if name not in columns:
                raise ValueError(f"{place}: {kind}.{name} is missing")
        num_steps = len(columns["step"])
        for name, column in columns.items():
            if len(column) != num_steps:
                raise ValueError(f"{place}: {kind}.{name} has {len(column)} values, step has {num_steps}")
            for step, value in zip(columns["step"], column):
                is_optional = value is None and name not in (*required, *STEP_KEYS)
                if not is_optional and not is_finite(value):
                    where = f"{place}: {kind}.{name} at step {step}"
                    raise ValueError(f"{where} is {value!r}, expected a finite number")
        check_order(kind, columns, place)


def check_order(kind: str, columns: dict[str, list], place: str) -> None:
    """Raise ValueError if steps or generated tokens decrease, or if a training step is missing."""
    tokens_of_steps = columns.get("generated_tokens", [0] * len(columns["step"]))
    points = [(0 if kind == "steps" else -1, 0), *zip(columns["step"], tokens_of_steps)]
    for (last_step, last_tokens), (step, tokens) in itertools.pairwise(points):
        skips = kind == "steps" and step != last_step + 1
        if skips or step <= last_step or tokens < last_tokens:
            where = f"{place}: {kind}: step {step} at {tokens} generated_tokens"
            raise ValueError(f"{where} cannot follow step {last_step} at {last_tokens}")


def evaluation_curve(record: dict, metric: str) -> np.ndarray:
    """Return (step, mean of the metric over the held-out sets) of each evaluation [evaluations, 2]."""
    evaluations = record["evaluations"]
    last_step = len(record["steps"]["step"])
    columns = [column for name, column in evaluations.items() if name.endswith(f"/{metric}")]
    curve = []
    for i, step in enumerate(evaluations["step"]):
        values = [column[i] for column in columns if column[i] is not None]
        if values:
            curve.append((step, sum(values) / len(values)))
    if not curve or (curve[0][0], curve[-1][0]) != (0, last_step):
        names = sorted({name.split("/")[-1] for name in evaluations if name.startswith("eval/")})
        raise ValueError(
            f"eval/SET/{metric} is missing at step 0 or at the last step; choose --metric among the metrics "
            f"of this run: {', '.join(names) or 'none'}"
        )
    return np.array(curve)


def training_curve(steps: dict[str, np.ndarray], metric: str) -> np.ndarray:
    """Return (step, mean of a metric over the latest steps) of each step that has the metric [steps, 2]."""
    if metric not in steps:
        raise ValueError(f"no step has {metric}; choose --metric train/NAME among {', '.join(sorted(steps))}")
    has_value = ~np.isnan(steps[metric])
    values = steps[metric][has_value]
    means = moving_sum(values) / moving_sum(np.ones(len(values)))
    return np.column_stack([steps["step"][has_value], means])


def moving_sum(values: np.ndarray) -> np.ndarray:
    """Sum over the last SMOOTHING_STEPS steps; over fewer steps at the start."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[1:] - total[np.maximum(0, np.arange(1, len(total)) - SMOOTHING_STEPS)]


def make_run(record: dict, place: str, folder: Path | None, metric: str, is_small: bool = False) -> Run:
    """Check the record of a run and make its arrays."""
    record = with_steps(record) if is_small else record
    check_curves(record, place, is_small)
    columns = record["steps"].items()
    steps = {name: np.array(column, dtype=float) for name, column in columns}  # None becomes NaN
    try:
        if metric.startswith(TRAINING):
            curve = training_curve(steps, metric.removeprefix(TRAINING))
        else:
            curve = evaluation_curve(record, metric)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    settings = record.get("settings", {}).items()
    is_scored = any(name.endswith("zero_variance.offline_scores") and file for name, file in settings)
    offline = record.get("offline_tokens", None if is_scored else 0)
    if offline is not None and not is_finite(offline):
        raise ValueError(f"{place}: offline_tokens is {offline!r}, expected a finite number")
    return Run(record, place, folder, steps, curve[:, 1], curve[:, 0].astype(int), offline)


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


def read_run(folder: Path, metric: str) -> Run | None:
    """Read a run folder; None for an unfinished run."""
    file = folder / "metrics.jsonl"
    seed = folder.name.removeprefix("seed_")
    if not seed.isdigit():
        raise ValueError(f"{folder}: expected a folder seed_S with a number S")
    if not (folder / "summary.json").is_file():  # a run writes its summary last
        return None
    record = {"row": folder.parent.name, "seed": int(seed), "offline_tokens": offline_tokens_of(folder)}
    record |= read_metrics(file, metric)
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
            runs += [run] if run else []
            if run is None:
                print(f"skipped, not finished: {folder}", file=sys.stderr)
    return runs, {folder.parent.name for folder in folders}


def read_records(file: Path, names: list[str] | None, metric: str) -> tuple[list[Run], set[str]]:
    """Read the runs of a record file; return them, and the names of all rows in the file."""
    runs = []
    row_names = set()
    study = file.parent.resolve()
    is_small = f"{study.name}/{file.name}" in index_of(study.parent)
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        place = f"{file}, line {number}"
        record = parse_object(line, place)
        if not isinstance(record.get("row"), str) or type(record.get("seed")) is not int:
            raise ValueError(f"{place}: expected a row and a seed; --export writes record files")
        row_names.add(record["row"])
        if names is None or record["row"] in names:
            runs.append(make_run(record, place, None, metric, is_small))
    return runs, row_names


def with_steps(record: dict) -> dict:
    """Return a record with the numbers of its steps, which a small record lacks (experiments/records.py)."""
    steps = record.get("steps")
    if not isinstance(steps, dict) or "step" in steps:
        return record
    lengths = [len(column) for column in steps.values() if isinstance(column, list)]
    last = max(lengths) if lengths else max(record["evaluations"]["step"], default=0)
    return record | {"steps": {"step": list(range(1, last + 1))} | steps}


def read_rows(paths: list[Path], names: list[str] | None, metric: str) -> dict[str, list[Run]]:
    """Return {row: runs by seed}, in the order of names; without names, in alphabetical order."""
    runs = []
    row_names = set()
    for path in paths:
        read = read_records if path.is_file() else read_folder
        runs_of_path, names_of_path = read(path, names, metric)
        runs += runs_of_path
        row_names |= names_of_path
    rows: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.record["row"], run.record["seed"])):
        row = rows.setdefault(run.record["row"], [])
        if row and row[-1].record["seed"] == run.record["seed"]:
            where = f"in {row[-1].place} and in {run.place}"
            raise ValueError(f"row {run.record['row']}, seed {run.record['seed']} occurs twice: {where}")
        row.append(run)
    missing = [name for name in names or () if name not in rows]
    if missing or not rows:
        where = f"{', '.join(map(str, paths))}: no finished run of {', '.join(missing) or 'any row'}"
        raise ValueError(f"{where}; rows found: {', '.join(sorted(row_names))}")
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
def block_means(runs: list[Run], values: np.ndarray, block: int) -> np.ndarray:
    """Average the values [runs] of each block of consecutive seeds, which are not independent, to [blocks].

    Example: with block 2, seeds 0 to 3 give two means.
    """
    numbers = np.array([run.record["seed"] // block for run in runs])
    return np.array([values[numbers == number].mean() for number in dict.fromkeys(numbers.tolist())])


def t_interval(values: np.ndarray) -> list[float] | None:
    """Return the 95 % interval of the mean by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    error = values.std(ddof=1) / math.sqrt(len(values))
    half = stats.t.ppf(0.975, len(values) - 1) * error
    return [float(values.mean() - half), float(values.mean() + half)]


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


def terms_of(text: str) -> list[tuple[float, str]]:
    """Parse a weighted sum, such as tokens_total+0.25*draft_tokens_total, to [(weight, metric), ...]."""
    parts = [re.fullmatch(r"(?:(\d+(?:\.\d+)?)\*)?([^*]+)", term) for term in text.split("+")]
    if None in parts:
        raise ValueError(f"--columns ...:{text}: expected metrics or WEIGHT*METRIC, joined by +")
    return [(float(part[1] or 1), part[2]) for part in parts]


def running_sum(run: Run, text: str) -> np.ndarray:
    """Add up a weighted sum of metrics over the steps, from 0 [steps + 1]; a missing value is 0."""
    terms = (weight * np.nan_to_num(run.steps.get(metric, 0.0)) for weight, metric in terms_of(text))
    sums = np.concatenate([[0.0], np.cumsum(sum(terms))])
    if sums[-1] <= 0:
        raise ValueError(f"{run.place}: {text} sums to {sums[-1]:g}; --columns needs a positive sum here")
    return sums


def log_saving(run: Run, parent: Run, terms: str) -> float:
    """Return the logarithm of the parent's sum over all steps divided by the run's."""
    return math.log(running_sum(parent, terms)[-1] / running_sum(run, terms)[-1])


def difference_at_equal(run: Run, parent: Run, terms: str) -> float:
    """Return the metric of a run minus the parent's at the smaller of their final sums, by linear curves."""
    sums = [running_sum(each, terms)[each.at] for each in (run, parent)]
    end = min(of_run[-1] for of_run in sums)
    return float(np.interp(end, sums[0], run.values) - np.interp(end, sums[1], parent.values))


EFFECTS = {"saving": log_saving, "equal": difference_at_equal}  # by kind of column


def are_equal(differences: np.ndarray) -> bool:
    """Tell whether differences are equal up to the rounding of records, which have seven digits."""
    return bool(np.ptp(differences) <= 1e-4 * np.abs(differences).max())


def paired_p(differences: np.ndarray) -> float | None:
    """Return p of a two-sided t-test of mean 0; None for fewer than two values or without variance.

    1 if all differences are 0, so that the contrast counts in a correction.
    """
    if len(differences) < 2 or are_equal(differences):
        return 1.0 if len(differences) > 1 and not differences.any() else None
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def detectable_difference(differences: np.ndarray) -> float | None:
    """Return the true difference that a paired t-test at 0.05 finds with power 0.8.

    The statistic of a true difference d has a noncentral t-distribution with noncentrality d / error. The far
    tail on the other side, below 1e-4 at five pairs, is left out. None for fewer than two pairs, and if all
    differences are equal.
    """
    n = len(differences)
    if n < 2 or are_equal(differences):
        return None
    critical = stats.t.ppf(0.975, n - 1)
    noncentrality = optimize.brentq(lambda c: stats.nct.sf(critical, n - 1, c) - 0.8, 0.0, 10 * critical)
    return float(noncentrality * differences.std(ddof=1) / math.sqrt(n))


def paired_figures(
    rows: dict[str, list[Run]], parents: dict[str, str], block: int = 1, column: str = ""
) -> dict[str, dict]:
    """Return the figures of an effect of each row, by seeds that the parent has; none for its own parent.

    column: KIND:SUM of EFFECTS; "": the final difference. block: number of consecutive seeds whose effects
    are averaged to one.
    """
    kind, _, terms = column.partition(":")
    effect_of = EFFECTS.get(kind, lambda run, parent, _: run.values[-1] - parent.values[-1])
    differences = {}
    for name, runs in rows.items():
        parent = {} if parents[name] == name else {run.record["seed"]: run for run in rows[parents[name]]}
        common = [run for run in runs if run.record["seed"] in parent]
        effects = [effect_of(run, parent[run.record["seed"]], terms) for run in common]
        differences[name] = block_means(common, np.array(effects), block)
    p_values = [paired_p(values) for values in differences.values()]
    return {
        name: {
            "pairs": len(values),
            "paired": float(values.mean()) if len(values) else None,
            "paired_interval": t_interval(values),
            "paired_p": p,
            "paired_p_holm": corrected,
            "detectable": detectable_difference(values),
        }
        for (name, values), p, corrected in zip(differences.items(), p_values, holm(p_values))
    }


def curves_with(runs: list[Run], column: str) -> list[np.ndarray]:
    """Return the values of a column, for example mean:entropy, of each run that has any."""
    metric = column.partition(":")[2]
    curves = [run.steps[metric] for run in runs if metric in run.steps]
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


def sums_of(runs: list[Run], metric: str) -> np.ndarray | None:
    """Return the sum of a metric over the steps of each run; None if a record lacks the metric."""
    if not all(metric in run.steps for run in runs):
        return None
    return np.array([run.steps[metric].sum() for run in runs])


def make_table(
    rows: dict[str, list[Run]], parents: dict[str, str], columns: tuple[str, ...] = (), block: int = 1
) -> list[dict]:
    """Return one dictionary per row; None stands for n/a. A column with a colon is a key as well.

    runs_with: number of runs that have the metric of such a column.
    """
    paired = paired_figures(rows, parents, block)
    effects = {c: paired_figures(rows, parents, block, c) for c in columns if c.partition(":")[0] in EFFECTS}
    statistics = [column for column in columns if ":" in column and column not in effects]
    table = []
    for name, runs in rows.items():
        final = np.array([run.values[-1] for run in runs])
        gradient, tokens, seconds = (
            sums_of(runs, metric) for metric in ("gradient_tokens_total", "tokens_total", "seconds_per_step")
        )
        is_known = gradient is not None and tokens is not None
        table.append({
            "row": name,
            "n": len(runs),
            "mean": float(final.mean()),
            "finals": final.tolist(),
            "interval": t_interval(block_means(runs, final, block)),
            "gradient_token_share": float((gradient / tokens).mean()) if is_known else None,
            "seconds": None if seconds is None else float(seconds.mean()),
            "parent": parents[name],
            **paired[name],
            **{column: statistic(runs, column) for column in statistics},
            **{column: figures[name] for column, figures in effects.items()},
            "runs_with": {column: len(curves_with(runs, column)) for column in statistics},
        })  # fmt: skip
    return table


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


def show_effect(figures: dict, kind: str) -> str:
    """Format an effect with its interval: a ratio for a saving, else a difference and the corrected p."""
    if not figures["pairs"]:
        return NONE
    if kind == "saving":
        mean, *interval = np.exp([figures["paired"], *(figures["paired_interval"] or ())])
        return f"{mean:.2f} ({show_interval(interval or None, '.2f')})"
    interval = show_interval(figures["paired_interval"], "+.4f")
    return f"{figures['paired']:+.4f} ({interval}), p {show_p(figures['paired_p_holm'])}"


def show_statistic(row: dict, column: str) -> str:
    """Format three significant digits, whole numbers from 1,000 on; "0.075 (3 of 5)" if two runs lack it."""
    value = row[column]
    if isinstance(value, dict):
        return show_effect(value, column.partition(":")[0])
    count = row["runs_with"][column]
    form = ",.0f" if value is not None and abs(value) >= 1000 else ".3g"
    return show(value, form) + (f" ({count} of {row['n']})" if 0 < count < row["n"] else "")


COLUMNS: dict[str, tuple[str, Callable[[dict], str]]] = {  # {name: (header, cell of a row)}
    "row": ("row", lambda row: row["row"]),
    "n": ("n", lambda row: str(row["n"])),
    "metric": ("{metric}", lambda row: f"{row['mean']:.4f}"),
    "interval": ("95 % interval", lambda row: show_interval(row["interval"], ".4f")),
    "paired": ("paired difference", lambda row: show(row["paired"], "+.4f")),
    "paired_interval": ("its 95 % interval", lambda row: show_interval(row["paired_interval"], "+.4f")),
    "paired_p": ("paired p", lambda row: show_p(row["paired_p"])),
    "paired_p_holm": ("paired p, Holm", lambda row: show_p(row["paired_p_holm"])),
    "gradient_tokens": ("gradient tokens", lambda row: show(row["gradient_token_share"], ".3f")),
    "seconds": ("seconds", lambda row: show(row["seconds"], ".1f")),
    "parent": ("parent", lambda row: row["parent"]),
    "runs": ("each run", lambda row: ", ".join(f"{value:.2f}" for value in row["finals"])),
    "detectable": ("detectable", lambda row: show(row["detectable"], ".4f")),
}
STANDARD = tuple(COLUMNS)[: list(COLUMNS).index("seconds") + 1]
COMPARING = ("paired", "detectable", "saving:", "equal:")
KINDS = {  # {kind of a column with a colon: header}
    "mean": "mean {name}",
    "max": "largest {name}",
    "saving": "saving of {name}",
    "equal": "at equal {name}",
}
NEEDED = {  # training metrics behind columns, which a small record may lack
    "gradient_tokens": ("gradient_tokens_total", "tokens_total"),
    "seconds": ("seconds_per_step",),
}


def check_columns(columns: tuple[str, ...], rows: dict[str, list[Run]]) -> None:
    """Raise ValueError for an unknown column, or for a metric that no run has."""
    metrics = sorted({name for runs in rows.values() for run in runs for name in run.steps})
    needed = {name for column in columns for name in NEEDED.get(column, ())}
    for column in columns:
        kind, colon, text = column.partition(":")
        if kind not in (KINDS if colon else COLUMNS):
            known = ", ".join((*COLUMNS, *(f"{kind}:NAME" for kind in KINDS)))
            raise ValueError(f"--columns {column}: unknown column, choose among {known}")
        is_sum = kind in EFFECTS
        names = [name for _, name in terms_of(text)] if is_sum else [text] * len(colon)
        for name in names:
            if name not in metrics:
                raise ValueError(f"--columns {column}: no run has {name}; choose among {', '.join(metrics)}")
            of_rows = [{name in run.steps for run in runs} for runs in rows.values()]
            if is_sum and (name == names[0] or {True, False} in of_rows):
                needed.add(name)
    lacking = sorted(needed - set.intersection(*(set(run.steps) for runs in rows.values() for run in runs)))
    if lacking:
        raise ValueError(
            f"--columns: a record lacks {', '.join(lacking)}; choose other columns, bring the whole record "
            "by `python -m experiments.records get STUDY`, or add what a row lacks in all its runs after a +"
        )


def markdown(table: list[dict], args: argparse.Namespace) -> list[str]:
    """Return the lines of the table in Markdown."""
    lines = [
        [show_statistic(row, c) if ":" in c else COLUMNS[c][1](row) for c in args.columns] for row in table
    ]
    headers = KINDS | {name: header for name, (header, _) in COLUMNS.items()}
    parts = [column.partition(":") for column in args.columns]
    return common.markdown([headers[kind].format(metric=args.metric, name=n) for kind, _, n in parts], lines)


def note_of(rows: dict[str, list[Run]], parents: dict[str, str], shown: Shown) -> list[str]:
    """Return the note below a table, with an empty line above; [] if there is nothing to say."""
    records = {}
    studies = {}
    for name, runs in rows.items():
        folders = [run.folder for run in runs]
        versions = [versions_of(f) if f and (f / "versions.json").is_file() else {} for f in folders]
        records[name] = [{"versions": of_run} | run.record for run, of_run in zip(runs, versions)]
        studies[name] = {Path(run.place.rpartition(", line ")[0]).parent for run in runs if not run.folder}
    note = notes_of(records, parents, studies, shown)
    return ["", NOTE + note] if note else []


# ------------------------------------------------------------------------------------------------------------
# Records
# ------------------------------------------------------------------------------------------------------------
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
        flat = flat_settings(config)
        settings = {n: value for n, value in flat.items() if n not in defaults or value != defaults[n]}
    settings = {name: value for name, value in settings.items() if name not in ("run.dir", "train.seed")}
    return {"commit": versions.pop("commit", None), "versions": versions, "settings": settings}


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


def expected_lines(comment: str, file: Path, header: str) -> list[str]:
    """Make the lines of the table that a comment describes, for a document whose table has this header."""
    words = shlex.split(comment)
    if words[:1] == ["module"]:
        if len(words) != 3:
            raise ValueError("expected `module PACKAGE.MODULE FILE.json`")
        name, _, function = words[1].partition(":")
        make = getattr(importlib.import_module(name), function or "table_lines")
        return make(common.read_results(file.parent / words[2]))
    if words[:1] == ["closed"]:
        return closed_lines(" ".join(words[1:]), file, header)
    parser = Parser(add_help=False, allow_abbrev=False)
    add_table_options(parser)
    args = parser.parse_args(words)
    table, rows, note = make_rows(args, file.parent)
    return [*markdown(table, args), *note]


def closed_lines(commit: str, file: Path, header: str) -> list[str]:
    """Return the lines of a document's table with this header at a commit."""
    lines = content_at(commit, file.resolve().parent, file.name).decode().splitlines()
    for table in find_tables(lines):
        if table.stop > table.start and cells_of(lines[table.start]) == cells_of(header):
            return lines[table.start : table.stop]
    raise ValueError(f"the document has no table with these columns at commit {commit}")


def cells_of(line: str) -> list[str]:
    """Split a line of a Markdown table into its cells; an escaped pipe is a part of its cell."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|"))]


def compare(document: list[str], expected: list[str]) -> tuple[list[str], int]:
    """Compare the lines of two tables with their notes; return the difference and the number of figures."""
    if not document:
        return ["the table below the comment is missing; --fix writes it"], 0
    texts, records = (
        [cells_of(line) for line in lines if not set(line) <= set("|-: ")] for lines in (document, expected)
    )
    num_figures = sum(any(map(str.isdigit, cell)) for row in records[1:] for cell in row[1:])
    differences = [
        f"{' | '.join(text)} in the text, {' | '.join(record)} in the record"
        for text, record in itertools.zip_longest(texts, records, fillvalue=["nothing"])
        if text != record
    ]
    return ["; ".join(differences)] if differences else [], num_figures


def check_table(table: DocTable, lines: list[str], file: Path, fix: bool) -> tuple[list[str], int]:
    """Return the problems of a table and the number of compared figures; with fix, correct `lines`."""
    if table.comment is None:
        has_record = any(file.parent.glob("*.jsonl"))
        problem = "a table without a `<!-- report: ... -->` comment; `none, REASON` if no record makes it"
        return ([problem] if has_record else []), 0
    if re.match(r"none\b", table.comment):
        reason = table.comment.removeprefix("none").lstrip(", ")
        return ([] if reason else ["`none` needs a reason: `<!-- report: none, REASON -->`"]), 0
    if table.comment.startswith("closed ") and not is_complete(file.parent):
        return [], 0
    try:
        expected = expected_lines(table.comment, file, "".join(lines[table.start : table.start + 1]))
    except (ValueError, OSError, ImportError, AttributeError, KeyError, TypeError) as error:
        return [f"the table cannot be made ({type(error).__name__}: {error})"], 0
    differences, num_figures = compare(lines[table.start : table.stop], expected)
    if differences and fix:
        lines[table.start : table.stop] = expected
        return [], compare(expected, expected)[1]
    return differences, num_figures


def list_documents(root: Path) -> list[str]:
    """List the *.md files below root that git tracks or would add."""
    done = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md")
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
        f"{f}/declared.json: {text}" for f in folders for text in (*check_study(f), *check_records(f))
    ]
    problems += all_problems(root / "experiments" / "starts")
    for name in documents:
        file = root / name
        lines = file.read_text().splitlines()
        original = list(lines)
        problems_of_file = []
        for table in reversed(find_tables(lines)):  # backwards: a corrected table may change in length
            texts, compared = check_table(table, lines, file, fix)
            problems_of_file = [f"{name}:{table.line}: {text}" for text in texts] + problems_of_file
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
    add = parser.add_argument
    add("--runs", type=Path, nargs="+", metavar="PATH", help="folders of runs, record files")
    add("--parent", metavar="ROW", help="row to which all other rows are compared")
    add("--parents", nargs="+", default=[], metavar="ROW=PARENT", help="rows that have another parent")
    add("--rows", nargs="+", help="rows, in this order (default: the parent, then all other rows by name)")
    add("--metric", default="avg_at_8", help="metric of the evaluations, for example chains/avg_at_4, or "
        "train/METRIC (default: %(default)s)")  # fmt: skip
    add("--block", type=int, default=1, metavar="N", help="seeds that depend on each other (default: 1)")
    add("--columns", nargs="+", default=list(STANDARD), metavar="NAME", help="columns, in this order")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that write files, and those that check the docs."""
    add = parser.add_argument
    add("--json", type=Path, help="write the table here")
    add("--export", type=Path, metavar="FILE.jsonl", help="write the record of the runs here")
    add("--check", action="store_true", help="compare the tables of the docs with the records")
    add("--fix", action="store_true", help="rewrite the tables of the docs that differ")


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


def make_rows(args: argparse.Namespace, folder: Path) -> tuple[list[dict], dict[str, list[Run]], list[str]]:
    """Return the table of the runs of --runs, relative to a folder, the runs by row, and the note's lines."""
    if not args.runs or args.parent is None:
        raise ValueError("a table needs --runs and --parent")
    rows = read_rows([folder / path for path in args.runs], args.rows, args.metric)
    if args.rows is None:
        rows = {name: rows[name] for name in sorted(rows, key=lambda name: name != args.parent)}
    check_columns(args.columns, rows)
    if args.block < 1:
        raise ValueError(f"--block {args.block} must be at least 1")
    parents = parents_of(rows, args.parent, args.parents)
    table = make_table(rows, parents, args.columns, args.block)
    compared = {pair for pair in parents.items() if pair[0] != pair[1]}
    shown = Shown(
        metric=args.metric,
        block=args.block,
        compared=compared if any(c.startswith(COMPARING) for c in args.columns) else set(),
        corrected=compared if any(c.startswith(("paired_p_holm", "equal:")) for c in args.columns) else set(),
    )
    return table, rows, note_of(rows, parents, shown)


def main(argv: list[str]) -> int:
    """Run the command line; return the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_table_options(parser)
    add_output_options(parser)
    try:
        args = parser.parse_args(argv)
        if args.check or args.fix:
            if len(argv) > 1:
                raise ValueError("--check and --fix take no other options: comments of the docs have them")
            return check_documents(ROOT, args.fix)
        table, rows, note = make_rows(args, Path())
        print("\n".join([*markdown(table, args), *note]))
        if args.json:
            args.json.write_text(json.dumps(table, indent=1))
        if args.export:
            export(rows, args.metric, args.export)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
