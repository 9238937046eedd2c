"""Run an entry of the record to beat with ten seeds, and compare its generated tokens with the record's.

    python -m experiments.record.record                  # the holder of the record (make record)
    python -m experiments.record.record --entry mine     # experiments/record/mine.yaml
    python -m experiments.record.record --entry mine --add    # add its ten runs to records.json

An entry needs as few generated tokens as possible until pass@1 on the held-out sums is 0.75, from the weights
of experiments/starts/habits. FIXED holds the settings that no entry may change, FORBIDDEN settings that no
entry may have. All tokens count that the policy generates for training: rollouts, dropped groups, probes, and
the offline scoring of prompts. Evaluations are free.

The tokens of a run are read from the curve of its evaluations. An evaluation counts if at least MIN_SPACING
tokens were generated since the counted evaluation before: otherwise an entry of tiny steps would have many
evaluations, and the luckiest would decide. A point of the curve is the mean of pass@1 of an evaluation and
the one before, because a single lucky evaluation is not enough; the curve is linear between its points. The
tokens of offline scoring are added to the tokens at the target. A run that does not reach the target within
BUDGET counts with BUDGET if it belongs to the record, and disqualifies a new entry.

A new entry is a record if it has fewer tokens in the geometric mean and p < 0.01 in a two-sided t-test of
log(record's tokens / entry's tokens), paired by seed over ten seeds. Repeat a command to continue after a
stop.

records.json: [{"entry", "date", "commit", "settings", "weights", "versions", "offline_tokens",
                "curves": {seed: {"tokens": [...], "values": [...]}}}]
"""

import argparse
import datetime
import fnmatch
import itertools
import json
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments import report, run
from experiments.bench.common import markdown, write_json
from experiments.text_quality import read_rows
from runtime.provenance import commit_of, git

FOLDER = run.ROOT / "experiments" / "record"
FIRST_HOLDER = "online"  # runs if records.json has no entry yet
TARGET = 0.75
BUDGET = 200_000  # generated tokens, with the offline scoring
MIN_SPACING = 5_000  # generated tokens between counted evaluations; five steps of plain GRPO have 5,600
VERIFIED_COST = 0.25  # least price of a verified token of a draft, in generated tokens
SEEDS = range(10)
LEVEL = 0.01
METRIC = "avg_at_8"
START = "experiments/starts/habits/model"
FIXED = (
    f"model.path={START}",
    "data.train=[{path: experiments/starts/habits/train.jsonl}]",
    "data.eval=[{path: experiments/starts/habits/test.jsonl, name: additions}]",
    "eval.every=5",
    "eval.num_samples=8",
    "eval.max_new_tokens=16",
    "rollout.temperature=1",  # evaluations sample at this temperature, too
    f"train.max_generated_tokens={BUDGET}",
    "train.num_steps=100000",
)
FORBIDDEN = (  # patterns of settings
    "stages*.data.*", "data.chat*", "data.system_prompt", "data.on_bad_row",  # other prompts
    "data.tools", "data.environment",  # programs that could compute the sums
    "*teacher.*", "*reward.judge",  # models whose tokens would not be counted
    "stages*.eval.*", "stages*.rollout.temperature", "rollout.stop",  # other evaluations
    "stages*.until.metric",  # held-out figures are for measuring, not for training
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------
# Tokens
# ------------------------------------------------------------------------------------------------------------
def spaced(curve: dict) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and values of the counted evaluations, which are MIN_SPACING tokens or more apart."""
    counted: list[int] = []
    for i, tokens in enumerate(curve["tokens"]):
        if not counted or tokens - curve["tokens"][counted[-1]] >= MIN_SPACING:
            counted.append(i)
    return np.array(curve["tokens"])[counted], np.array(curve["values"])[counted]


def first_crossing(target: float, grid: np.ndarray, values: np.ndarray) -> float | None:
    """Return the tokens at which a curve, linear between its points, first reaches the target."""
    reached = np.flatnonzero(values >= target - 1e-9)  # rounding may lift the mean of equal values
    if not len(reached):
        return None
    i = reached[0]
    if i == 0:
        return float(grid[0])
    share = min(1.0, (target - values[i - 1]) / (values[i] - values[i - 1]))
    return float(grid[i - 1] + share * (grid[i] - grid[i - 1]))


def tokens_of(record: dict) -> dict[int, float | None]:
    """Return {seed: tokens to the target, with the offline scoring}; None for a run that exceeds BUDGET."""
    needed: dict[int, float | None] = {}
    for seed, curve in record["curves"].items():
        tokens, values = spaced(curve)
        crossing = first_crossing(TARGET, tokens[1:], (values[1:] + values[:-1]) / 2)
        total = math.inf if crossing is None else crossing + record["offline_tokens"]
        needed[int(seed)] = total if total <= BUDGET else None
    return needed


def curve_of(rows: list[dict]) -> dict[str, list[float]]:
    """Return the curve of the rows of metrics.jsonl, with the verified tokens of drafts at their price."""
    verified = itertools.accumulate(row.get("draft_tokens_total", 0) for row in rows)
    evaluations = [pair for pair in zip(rows, verified) if f"eval/additions/{METRIC}" in pair[0]]
    return {
        "tokens": [row["generated_tokens"] + math.ceil(VERIFIED_COST * n) for row, n in evaluations],
        "values": [row[f"eval/additions/{METRIC}"] for row, _ in evaluations],
    }


def track_of(rows: list[dict]) -> dict[str, float | None]:
    """Return tokens and seconds to the target of a run's metrics so far, for the track of one GPU.

    seconds: of the training steps until then, without start and evaluations. None: not reached yet.
    """
    curve = curve_of(rows)
    is_curve = len(curve["tokens"]) > 1
    tokens = tokens_of({"curves": {"0": curve}, "offline_tokens": 0})[0] if is_curve else None
    steps = [row for row in rows if "seconds_per_step" in row and row["generated_tokens"] <= (tokens or 0)]
    return {"tokens": tokens, "seconds": sum(row["seconds_per_step"] for row in steps) if tokens else None}


def compared(record: dict, holder: dict) -> dict:
    """Return the comparison of an entry with the record: ratio of tokens, its interval, p, and the verdict.

    ratio: geometric mean over seeds of the record's tokens divided by the entry's.
    """
    tokens = tokens_of(record)
    old_tokens = {seed: value or BUDGET for seed, value in tokens_of(holder).items()}
    logs = np.array([math.log(old_tokens[seed] / (tokens[seed] or BUDGET)) for seed in SEEDS])
    p = report.paired_p(logs)
    is_reached = None not in tokens.values()
    return {
        "ratio": float(np.exp(logs.mean())),
        "interval": np.exp(report.t_interval(logs)).tolist(),
        "p": p,
        "is_record": is_reached and bool(logs.mean() > 0) and p is not None and p < LEVEL,
    }


def broken_rules(settings: Iterable[str]) -> list[str]:
    """Return the names of settings that no entry may have, in alphabetical order."""
    return sorted(name for name in settings if any(fnmatch.fnmatch(name, rule) for rule in FORBIDDEN))


def foreign_scores(runs: list[report.Run]) -> list[str]:
    """Return the files of offline scores that another model than the start has made."""
    settings = [setting for one in runs for setting in one.record["settings"].items()]
    named = {file for name, file in settings if name.endswith("zero_variance.offline_scores") and file}
    files = [file for file in sorted(named) if Path(file).is_file()]  # problems_of() names a missing file
    if not files:
        return []
    from data.score import model_digest  # takes seconds, because it imports the engine

    digest = model_digest(run.ROOT / START)
    headers = {file: json.loads(Path(file).read_text().splitlines()[0]) for file in files}
    return [file for file, header in headers.items() if header["model"].split()[-1] != digest]


def problems_of(runs: list[report.Run], holder: dict | None) -> list[str]:
    """Return why the runs cannot enter records.json: broken rules, uncommitted changes, several machines."""
    problems = []
    settings = {name for one in runs for name in one.record["settings"]}
    if forbidden := broken_rules(settings):
        problems.append(f"{', '.join(forbidden)}: an entry may not set this, see FORBIDDEN in record.py")
    if foreign := foreign_scores(runs):
        problems.append(f"{', '.join(foreign)}: scores of another model; run data.score with --model {START}")
    missing = set(SEEDS) - {one.record["seed"] for one in runs}
    if missing:
        problems.append(f"seeds {', '.join(map(str, sorted(missing)))} are missing; repeat the command")
    drafting = [one.record["settings"] for one in runs if "drafts.form" in one.record["settings"]]
    prices = [settings_of_run.get("drafts.token_cost", 0) for settings_of_run in drafting]
    if min(prices, default=1) < VERIFIED_COST:
        problems.append(f"drafts.token_cost is below {VERIFIED_COST}, the least price of a verified token")
    versions = [one.record["versions"] for one in runs]
    earlier = [launch for v in versions for launch in v.get("earlier", [])]
    commits = {one.record["commit"] for one in runs} | {launch.get("commit") for launch in earlier}
    if len(commits) > 1 or any(launch.get("dirty") is not False for launch in versions + earlier):
        problems.append("the runs need one commit without uncommitted changes; commit, and run all again")
    starts = {v.get("weights") for v in versions} | ({holder["weights"]} if holder else set())
    if len(starts) > 1:
        problems.append(
            f"start weights differ: {', '.join(map(str, starts))}; restore experiments/starts/habits with git"
        )
    if len({json.dumps(v.get("machine")) for v in versions + earlier if v.get("machine")}) > 1:
        problems.append("the runs need one machine, because rounding differs between processors")
    if any(one.offline_tokens is None for one in runs):
        problems.append("offline_tokens: the file of scores is missing, so its tokens cannot be counted")
    return problems


def record_of(entry: str, runs: list[report.Run]) -> dict:
    """Return the record of an entry's runs."""
    first = runs[0].record
    versions = first["versions"]
    curves = {
        str(one.record["seed"]): {"tokens": one.tokens.tolist(), "values": one.values.tolist()}
        for one in runs
    }
    return {
        "entry": entry, "date": f"{datetime.date.today()}", "commit": first["commit"],
        "settings": first["settings"], "weights": versions.get("weights"), "versions": versions,
        "offline_tokens": runs[0].offline_tokens or 0, "curves": curves,
    }  # fmt: skip


def uncommitted(entry: str) -> str | None:
    """Return why the next runs of an entry could not enter records.json; None if all have finished."""
    folders = [Path("runs/record") / entry / f"seed_{seed}" for seed in SEEDS]
    if all((folder / "summary.json").is_file() for folder in folders):
        return None
    if commit_of()["dirty"] is not False:
        return "the checkout has uncommitted changes, or no git history"
    if git("ls-files", "--error-unmatch", str(FOLDER / f"{entry}.yaml")) is None:
        return f"{entry}.yaml is not committed"
    return None


def holder_of(records: list[dict]) -> dict | None:
    """Return the record that stands: the first entry, or the latest entry that beat the record before."""
    holder = None
    for record in records:
        if holder is None or compared(record, holder)["is_record"]:
            holder = record
    return holder


# ------------------------------------------------------------------------------------------------------------
# The table
# ------------------------------------------------------------------------------------------------------------
def table_lines(records: list[dict]) -> list[str]:
    """Return the table of the entries in their order, each compared with the record of its time."""
    lines = []
    for number, record in enumerate(records):
        tokens = tokens_of(record)
        logs = np.log([value or BUDGET for value in tokens.values()])
        mean = f"{math.exp(logs.mean()):,.0f}"
        interval = " to ".join(f"{math.exp(bound):,.0f}" for bound in report.t_interval(logs))
        reached = f"{sum(value is not None for value in tokens.values())} of {len(tokens)}"
        cells = ["-", "-", "the first entry"]
        holder = holder_of(records[:number])
        if holder is not None:
            result = compared(record, holder)
            ratio = f"{result['ratio']:.2f} ({report.show_interval(result['interval'], '.2f')})"
            cells = [ratio, report.show_p(result["p"]), "yes" if result["is_record"] else "no"]
        name = f"[{record['entry']}]({record['entry']}.yaml)"
        lines.append([record["date"], name, f"`{record['commit'][:8]}`", mean, interval, reached, *cells])
    heads = ["date", "entry", "commit", "tokens", "95 % interval", "seeds that reach it"]
    return markdown([*heads, "times fewer than the record", "p", "record"], lines)


# ------------------------------------------------------------------------------------------------------------
# The command line
# ------------------------------------------------------------------------------------------------------------
def read_runs(entry: str) -> list[report.Run]:
    """Read the finished runs of an entry, with commit, versions and settings."""
    runs = report.read_rows([Path("runs/record")], [entry], METRIC)[entry]
    for one in runs:
        one.record.update(report.provenance(one.folder))
    curves = [curve_of(read_rows(one.folder / "metrics.jsonl")) for one in runs]
    runs = [replace(one, tokens=np.array(curve["tokens"])) for one, curve in zip(runs, curves)]
    return [one for one in runs if one.record["seed"] in SEEDS]


def main(argv: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entry", help="name of a YAML in experiments/record (default: the record's)")
    parser.add_argument("--add", action="store_true", help="add the entry to records.json")
    args = parser.parse_args(argv)
    os.chdir(run.ROOT)
    records = json.loads((FOLDER / "records.json").read_text())
    holder = holder_of(records)
    entry = args.entry or (holder["entry"] if holder else FIRST_HOLDER)
    if reason := uncommitted(entry):
        print(f"warning: these runs cannot enter records.json: {reason}", file=sys.stderr)
    rows = ("--rows", str(FOLDER / f"{entry}.yaml"), "--seeds", *map(str, SEEDS))
    code = run.main([*rows, "--out", "runs/record", "--jobs", "2", *FIXED])
    if code:
        return code
    runs = read_runs(entry)
    problems = problems_of(runs, holder)
    record = record_of(entry, runs)
    is_comparable = holder is not None and holder["weights"] == record["weights"]
    print("\n".join(table_lines([holder, record] if is_comparable else [record])))
    print("\n".join(f"not for records.json: {problem}" for problem in problems), file=sys.stderr)
    if args.add and not problems:
        write_json(FOLDER / "records.json", [*records, record])
    return 1 if args.add and problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
