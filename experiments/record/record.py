"""Run an entry of a record to beat with its seeds, and compare its generated tokens with the record's.

    python -m experiments.record.record                  # the holder of the record on sums (make record)
    python -m experiments.record.record --track tasks    # the holder on reasoning tasks
    python -m experiments.record.record --entry mine     # experiments/record/mine.yaml
    python -m experiments.record.record --entry mine --add    # add its runs to records.json

An entry needs as few generated tokens as possible until pass@1 on held-out prompts reaches the target of its
track, from the start weights of the track. FIXED holds the settings that no entry may change, FORBIDDEN
settings that no entry may have. All tokens count that the policy generates for training: rollouts, dropped
groups, probes, and the offline scoring of prompts. Evaluations are free.

The tokens of a run are read from the curve of its evaluations. An evaluation counts if at least `spacing`
tokens were generated since the counted evaluation before: otherwise an entry of tiny steps would have many
evaluations, and the luckiest would decide. A point of the curve is the mean of pass@1 of an evaluation and
the one before, because a single lucky evaluation is not enough; the curve is linear between its points. The
tokens of offline scoring are added to the tokens at the target. A run that does not reach the target within
the budget counts with the budget if it belongs to the record, and disqualifies a new entry.

A new entry is a record if it has fewer tokens in the geometric mean and p < 0.01 in a two-sided t-test of
log(record's tokens / entry's tokens), paired by seed. Repeat a command to continue after a stop.

records.json: [{"track", "entry", "date", "commit", "settings", "weights", "versions", "offline_tokens",
                "curves": {seed: {"tokens": [...], "values": [...]}}}]
"""

import datetime
import fnmatch
import itertools
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configure import load_config
from experiments import report, run
from experiments.bench.common import markdown, write_json
from experiments.text_quality import read_rows
from runtime.config import command_line, flat_settings
from runtime.provenance import commit_of, git

FOLDER = run.ROOT / "experiments" / "record"
VERIFIED_COST = 0.25  # least price of a verified token of a draft, in generated tokens
LEVEL = 0.01


@dataclass(frozen=True)
class Track:
    """A task with a target. FOLDER/NAME.yaml of a track holds its settings, the base of all its entries."""

    target: float  # pass@1, the mean of two counted evaluations in a row
    budget: int  # generated tokens, with the offline scoring; train.max_generated_tokens of the YAML
    spacing: int  # generated tokens between counted evaluations; a little less than plain GRPO has
    seeds: range
    metric: str
    first: str  # the entry that runs if records.json has none


TRACKS = {
    "sums": Track(0.75, 200_000, 5_000, range(10), "additions/avg_at_8", "online"),
    "tasks": Track(0.28, 16_000, 800, range(6), "tasks/avg_at_4", "tasks_grpo"),
}
# Patterns of settings that every entry shares with the YAML of its track:
FIXED = (
    "model.path", "data.*", "eval.*", "rollout.temperature", "rollout.stop", "train.max_generated_tokens",
    "train.num_steps", "reward.binary",
)  # fmt: skip
FORBIDDEN = (  # patterns of settings that no entry may have
    "stages*.data.*", "stages*.eval.*", "stages*.rollout.temperature", "stages*.reward.binary",  # evaluations
    "*teacher.*", "*reward.judge",  # models whose tokens would not be counted
    "stages*.until.metric",  # held-out figures are for measuring, not for training
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------
# Tokens
# ------------------------------------------------------------------------------------------------------------
def spaced(curve: dict, spacing: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and values of the counted evaluations, which are `spacing` tokens or more apart."""
    counted: list[int] = []
    for i, tokens in enumerate(curve["tokens"]):
        if not counted or tokens - curve["tokens"][counted[-1]] >= spacing:
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
    """Return {seed: tokens to the target, with the offline scoring}; None if they exceed the budget."""
    track = TRACKS[record["track"]]
    needed: dict[int, float | None] = {}
    for seed, curve in record["curves"].items():
        tokens, values = spaced(curve, track.spacing)
        crossing = first_crossing(track.target, tokens[1:], (values[1:] + values[:-1]) / 2)
        total = math.inf if crossing is None else crossing + record["offline_tokens"]
        needed[int(seed)] = total if total <= track.budget else None
    return needed


def curve_of(rows: list[dict], metric: str) -> dict[str, list[float]]:
    """Return the curve of the rows of metrics.jsonl, with the verified tokens of drafts at their price."""
    verified = itertools.accumulate(row.get("draft_tokens_total", 0) for row in rows)
    evaluations = [pair for pair in zip(rows, verified) if f"eval/{metric}" in pair[0]]
    return {
        "tokens": [row["generated_tokens"] + math.ceil(VERIFIED_COST * n) for row, n in evaluations],
        "values": [row[f"eval/{metric}"] for row, _ in evaluations],
    }


def compared(record: dict, holder: dict) -> dict:
    """Return the comparison of an entry with the record: ratio of tokens, its interval, p, and the verdict.

    ratio: geometric mean over seeds of the record's tokens divided by the entry's.
    """
    track = TRACKS[record["track"]]
    tokens = tokens_of(record)
    old_tokens = {seed: value or track.budget for seed, value in tokens_of(holder).items()}
    logs = np.array([math.log(old_tokens[seed] / (tokens[seed] or track.budget)) for seed in track.seeds])
    p = report.paired_p(logs)
    is_reached = None not in tokens.values()
    return {
        "ratio": float(np.exp(logs.mean())),
        "interval": np.exp(report.t_interval(logs)).tolist(),
        "p": p,
        "is_record": is_reached and bool(logs.mean() > 0) and p is not None and p < LEVEL,
    }


def settings_of(name: str) -> dict[str, object]:
    """Return the settings of FOLDER/NAME.yaml that differ from the defaults, by name."""
    config = load_config(["--config", str(FOLDER / f"{name}.yaml")])
    return flat_settings(config.model_dump(mode="json", exclude_defaults=True))


def broken_rules(settings: dict[str, object], track: str) -> list[str]:
    """Return the names of settings that no entry of a track may have or change, in alphabetical order."""
    fixed = settings_of(track)
    changed = [name for name in {*settings, *fixed} if settings.get(name) != fixed.get(name)]
    rules = (*FIXED, *FORBIDDEN)
    return sorted(name for name in changed if any(fnmatch.fnmatch(name, rule) for rule in rules))


def foreign_scores(runs: list[report.Run]) -> list[str]:
    """Return the files of offline scores that another model than the start has made."""
    settings = [setting for one in runs for setting in one.record["settings"].items()]
    named = {file for name, file in settings if name.endswith("zero_variance.offline_scores") and file}
    files = [file for file in sorted(named) if Path(file).is_file()]  # problems_of() names a missing file
    if not files:
        return []
    from data.score import model_digest  # takes seconds, because it imports the engine

    digest = model_digest(run.ROOT / runs[0].record["settings"]["model.path"])
    headers = {file: json.loads(Path(file).read_text().splitlines()[0]) for file in files}
    return [file for file, header in headers.items() if header["model"].split()[-1] != digest]


def problems_of(runs: list[report.Run], track: str, holder: dict | None) -> list[str]:
    """Return why the runs cannot enter records.json: broken rules, uncommitted changes, several machines."""
    problems = []
    if broken := {name for one in runs for name in broken_rules(one.record["settings"], track)}:
        problems.append(f"{', '.join(sorted(broken))}: an entry may not set this, see FIXED and FORBIDDEN")
    if foreign := foreign_scores(runs):
        problems.append(f"{', '.join(foreign)}: scores of another model; run data.score on the track's start")
    missing = set(TRACKS[track].seeds) - {one.record["seed"] for one in runs}
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
    for name in ("weights", "data"):
        digests = {json.dumps(v.get(name)) for v in (*versions, *([holder["versions"]] if holder else ()))}
        if len(digests) > 1:
            problems.append(f"{name} differ: {', '.join(sorted(digests))}; make those of {track}.yaml again")
    if len({json.dumps(v.get("machine")) for v in versions + earlier if v.get("machine")}) > 1:
        problems.append("the runs need one machine, because rounding differs between processors")
    if any(one.offline_tokens is None for one in runs):
        problems.append("offline_tokens: the file of scores is missing, so its tokens cannot be counted")
    return problems


def record_of(entry: str, track: str, runs: list[report.Run]) -> dict:
    """Return the record of an entry's runs."""
    first = runs[0].record
    versions = first["versions"]
    metrics = {str(one.record["seed"]): read_rows(one.folder / "metrics.jsonl") for one in runs}
    curves = {seed: curve_of(rows, TRACKS[track].metric) for seed, rows in metrics.items()}
    return {
        "track": track, "entry": entry, "date": f"{datetime.date.today()}", "commit": first["commit"],
        "settings": first["settings"], "weights": versions.get("weights"), "versions": versions,
        "offline_tokens": runs[0].offline_tokens or 0, "curves": curves,
    }  # fmt: skip


def obstacles(entry: str, track: str) -> list[str]:
    """Return why the next runs of an entry could not enter records.json; [] if all have finished.

    ValueError for an entry that breaks the rules of the track.
    """
    folders = [Path("runs/record") / entry / f"seed_{seed}" for seed in TRACKS[track].seeds]
    if all((folder / "summary.json").is_file() for folder in folders):
        return []
    if broken := broken_rules(settings_of(entry), track):
        raise ValueError(f"{entry}.yaml sets {', '.join(broken)}: an entry may not, see FIXED and FORBIDDEN")
    reasons = []
    if commit_of()["dirty"] is not False:
        reasons.append("the checkout has uncommitted changes, or no git history")
    if git("ls-files", "--error-unmatch", str(FOLDER / f"{entry}.yaml")) is None:
        reasons.append(f"{entry}.yaml is not committed")
    return reasons


def holder_of(records: list[dict], track: str) -> dict | None:
    """Return the record that stands: a track's first entry, or the latest that beat the record before."""
    holder = None
    for record in [record for record in records if record["track"] == track]:
        if holder is None or compared(record, holder)["is_record"]:
            holder = record
    return holder


# ------------------------------------------------------------------------------------------------------------
# The table
# ------------------------------------------------------------------------------------------------------------
def table_lines(records: list[dict]) -> list[str]:
    """Return the table of the entries in their order, each compared with its track's record of the time."""
    lines = []
    for number, record in enumerate(records):
        track = TRACKS[record["track"]]
        tokens = tokens_of(record)
        logs = np.log([value or track.budget for value in tokens.values()])
        mean = f"{math.exp(logs.mean()):,.0f}"
        interval = " to ".join(f"{math.exp(bound):,.0f}" for bound in report.t_interval(logs))
        reached = f"{sum(value is not None for value in tokens.values())} of {len(tokens)}"
        cells = ["-", "-", "the first entry"]
        holder = holder_of(records[:number], record["track"])
        if holder is not None:
            result = compared(record, holder)
            ratio = f"{result['ratio']:.2f} ({report.show_interval(result['interval'], '.2f')})"
            cells = [ratio, report.show_p(result["p"]), "yes" if result["is_record"] else "no"]
        name = f"[{record['entry']}]({record['entry']}.yaml)"
        commit = f"`{record['commit'][:8]}`"
        lines.append([record["track"], record["date"], name, commit, mean, interval, reached, *cells])
    heads = ["track", "date", "entry", "commit", "tokens", "95 % interval", "seeds that reach it"]
    return markdown([*heads, "times fewer than the record", "p", "record"], lines)


# ------------------------------------------------------------------------------------------------------------
# The command line
# ------------------------------------------------------------------------------------------------------------
def read_runs(entry: str, track: Track) -> list[report.Run]:
    """Read the finished runs of an entry, with commit, versions and settings."""
    runs = report.read_rows([Path("runs/record")], [entry], track.metric)[entry]
    for one in runs:
        one.record.update(report.provenance(one.folder))
    return [one for one in runs if one.record["seed"] in track.seeds]


def main(argv: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = command_line(None, __doc__)
    parser.add_argument("--track", choices=TRACKS, default="sums", help="default: sums")
    parser.add_argument("--entry", help="name of a YAML in experiments/record (default: the record's)")
    parser.add_argument("--add", action="store_true", help="add the entry to records.json")
    args = parser.parse_args(argv)
    os.chdir(run.ROOT)
    track = TRACKS[args.track]
    records = json.loads((FOLDER / "records.json").read_text())
    holder = holder_of(records, args.track)
    entry = args.entry or (holder["entry"] if holder else track.first)
    try:
        reasons = obstacles(entry, args.track)
    except ValueError as error:
        parser.error(str(error))
    if reasons:
        print(f"warning: these runs cannot enter records.json: {'; '.join(reasons)}", file=sys.stderr)
    rows = ("--rows", str(FOLDER / f"{entry}.yaml"), "--seeds", *map(str, track.seeds))
    if code := run.main([*rows, "--out", "runs/record", "--jobs", "2"]):
        return code
    runs = read_runs(entry, track)
    problems = problems_of(runs, args.track, holder)
    record = record_of(entry, args.track, runs)
    is_comparable = holder is not None and holder["weights"] == record["weights"]
    print("\n".join(table_lines([holder, record] if is_comparable else [record])))
    print("\n".join(f"not for records.json: {problem}" for problem in problems), file=sys.stderr)
    if args.add and not problems:
        write_json(FOLDER / "records.json", [*records, record])
    return 1 if args.add and problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
