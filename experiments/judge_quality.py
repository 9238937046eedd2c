"""Measure judges against the verifier: agreement, ties, and inversion by the distance from a group's mean.

    python experiments/judge_quality.py --pairs data/built/judge_pairs --name reasoning --seed 0 \\
        --kind generative --judge runs/judges/reasoning/seed_0/model \\
        --question "{prompt}|{first}|{second}|" --out experiments/studies/judge/quality.json
    python experiments/judge_quality.py --pairs data/built/judge_pairs --name scalar --seed 0 \\
        --kind scalar --judge runs/judges/scalar/seed_0 --out experiments/studies/judge/quality.json

The measurements are on prompts that no judge was trained on: the pairs of test.jsonl and the groups of
groups.jsonl (data/judge_pairs.py). A record per judge and mapping replaces an earlier one in --out; a judge
with the same weights, pairs and options is not measured again. A record holds commit, date, machine and
digests, and these figures:

    agreement     share of pairs in which the judge's verdict is the label
    Better, Tie, Worse   the same for the pairs of one label
    tie_different the same for ties of two different texts
    unreadable    share of answers without a verdict, which count as ties
    inverted      share of completions, in groups with right and wrong ones, whose reward lies on the other
                  side of the group's mean than the verifier's score does: the advantage has the wrong sign
    silent        share of these completions whose reward equals the mean: no advantage
    curve         both shares by the distance |reward - mean| / standard deviation of the group's rewards

A scalar judge gives a record for each mapping to rewards: `score`, the sigmoid of its score as in training,
and `round_robin` with its margin. table_lines(), curve_lines() and near_lines() make the tables of
experiments/studies/judge/README.md.
"""

import argparse
import hashlib
import json
import math
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.append(str(ROOT))  # run as a script: for the modules of the project

from data.score import read_template_args
from judges import build_judge, round_robin
from runtime.checkpoint import digest_of_weights
from runtime.launch import leave, run
from runtime.provenance import commit_of, machine_of, now
from runtime.user_files import digest_of_file, file_of
from verifiers.verdict import SIGNS

EDGES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)  # of the distance from the mean, in standard deviations; then more
NEAR = 0.5  # standard deviations: the region of the paper's claim, near the mean of a group
EQUAL = 1e-6  # rewards this close to the mean of their group give no advantage


# A judge reads the prompt as in training (judges.py: prompts_for): a scalar judge the text that the policy
# continued, a generative judge the conversation.
PROMPT_COLUMN = {"scalar": "task", "generative": "conversation"}


def read_jsonl(file: Path) -> list[dict]:
    """Read the rows of a file; ValueError if it is missing or of an earlier version."""
    if not file.is_file():
        raise ValueError(f"{file}: no such file; `python -m data.judge_pairs` makes it")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    if any("conversation" not in row for row in rows):
        raise ValueError(f"{file}: a row lacks the column conversation; repeat `python -m data.judge_pairs`")
    return rows


def pair_figures(judge, kind: str, pairs: list[dict]) -> dict:
    """Return agreement, accuracy by label, and the share of answers without a verdict."""
    num_before = getattr(judge, "num_unreadable", 0)
    columns = (PROMPT_COLUMN[kind], "first", "second")
    signs = judge.compare(*([row[name] for row in pairs] for name in columns))
    right = [sign == SIGNS[row["answer"]] for sign, row in zip(signs, pairs)]
    of_label = {label: [ok for ok, row in zip(right, pairs) if row["answer"] == label] for label in SIGNS}
    different = [
        ok for ok, row in zip(right, pairs) if row["answer"] == "Tie" and row["first"] != row["second"]
    ]
    return {
        "num_pairs": len(pairs),
        "agreement": sum(right) / len(right),
        **{label: sum(values) / len(values) for label, values in of_label.items() if values},
        "tie_different": sum(different) / len(different) if different else None,
        "unreadable": (getattr(judge, "num_unreadable", 0) - num_before) / len(pairs),
    }


def mixed_groups(groups: list[dict], limit: int) -> list[dict]:
    """Return the first groups with right and wrong completions; ValueError if there is none."""
    mixed = [
        group for group in groups if group["scores"] and max(group["scores"]) - min(group["scores"]) > EQUAL
    ]
    if not mixed or limit < 1:
        raise ValueError(
            f"nothing to measure: {len(mixed)} of {len(groups)} groups have right and wrong completions, and "
            f"--groups is {limit}"
        )
    return mixed[:limit]


def inversion_figures(groups: list[dict], rewards: list[list[float]]) -> dict:
    """Return the shares of inverted and silent completions, overall and by distance from the mean.

    rewards: the judge's, in the order of the groups' completions. A group whose rewards are all equal is
    silent at distance 0.
    """
    num_bins = len(EDGES)
    counts = [[0, 0, 0] for _ in range(num_bins)]  # completions, inverted, silent
    for group, row in zip(groups, rewards):
        if not all(map(math.isfinite, row)):
            raise ValueError("a score of the judge is NaN or infinite: look for NaN in its weights")
        mean = statistics.fmean(row)
        std = statistics.stdev(row)
        true_mean = statistics.fmean(group["scores"])
        for reward, score in zip(row, group["scores"]):
            distance = abs(reward - mean)
            is_silent = distance <= EQUAL
            gap = score - true_mean  # without a gap the verifier gives no advantage that could be inverted
            is_inverted = not is_silent and abs(gap) > EQUAL and (reward > mean) != (gap > 0)
            bin_number = 0 if is_silent else sum(distance / std >= edge for edge in EDGES) - 1
            counts[bin_number][0] += 1
            counts[bin_number][1] += is_inverted
            counts[bin_number][2] += is_silent
    total, inverted, silent = map(sum, zip(*counts))
    return {
        "num_groups": len(groups),
        "inverted": inverted / total,
        "silent": silent / total,
        "curve": [
            {"from": low, "completions": num, "inverted": num_inverted, "silent": num_silent}
            for low, (num, num_inverted, num_silent) in zip(EDGES, counts)
        ],
    }


def flat(groups: list[dict], kind: str) -> tuple[list[str], list[str], list[int]]:
    """Return prompt, completion and group number of each completion."""
    rows = [
        (group[PROMPT_COLUMN[kind]], text, number)
        for number, group in enumerate(groups)
        for text in group["completions"]
    ]
    prompts, texts, numbers = zip(*rows)
    return list(prompts), list(texts), list(numbers)


def by_group(groups: list[dict], values: list[float]) -> list[list[float]]:
    """Cut a list of values into the groups' lists."""
    cut = iter(values)
    return [[next(cut) for _ in group["completions"]] for group in groups]


def measure(judge, kind: str, pairs: list[dict], groups: list[dict]) -> list[dict]:
    """Return the records of a judge, one per mapping to rewards."""
    figures = pair_figures(judge, kind, pairs)
    prompts, texts, numbers = flat(groups, kind)
    rewards = {"round_robin": round_robin(judge, prompts, texts, numbers)}
    if kind == "scalar":
        scores = torch.tensor(judge.scores(prompts, texts), dtype=torch.float64)
        rewards = {"score": scores.sigmoid().tolist()} | rewards  # as train_rl.py: judge_rewards
    return [
        {"mapping": mapping, **figures, **inversion_figures(groups, by_group(groups, values))}
        for mapping, values in rewards.items()
    ]


# ------------------------------------------------------------------------------------------------------------
# Tables
# ------------------------------------------------------------------------------------------------------------
def grouped(records: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Return the records of each (name, mapping), in the order of the file."""
    rows: dict[tuple[str, str], list[dict]] = {}
    for record in records:
        rows.setdefault((record["name"], record["mapping"]), []).append(record)
    return rows


def mean_and_range(values: list[float]) -> str:
    """Return the mean over judges, and the range in brackets; n/a if a judge lacks the figure."""
    if None in values:
        return "n/a"
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def table_lines(records: list[dict]) -> list[str]:
    """Return a table of all judges: means over the seeds of a judge, and ranges."""
    columns = {
        "agreement": "agreement", "ties": "Tie", "ties of different texts": "tie_different",
        "unreadable": "unreadable", "inverted": "inverted", "silent": "silent",
    }  # fmt: skip
    lines = [f"| judge | reward | n | {' | '.join(columns)} |", "|" + "---|" * (3 + len(columns))]
    for (name, mapping), rows in grouped(records).items():
        figures = [mean_and_range([row.get(key) for row in rows]) for key in columns.values()]
        lines.append(f"| {name} | {mapping} | {len(rows)} | {' | '.join(figures)} |")
    return lines


def curve_lines(records: list[dict]) -> list[str]:
    """Return a table of the share of inverted completions by distance from the mean; all seeds together."""
    names = [f"{low:g} to {high:g}" for low, high in zip(EDGES, EDGES[1:])] + [f"above {EDGES[-1]:g}"]
    lines = [f"| judge | reward | {' | '.join(names)} |", "|" + "---|" * (2 + len(names))]
    for (name, mapping), rows in grouped(records).items():
        cells = []
        for bins in zip(*(row["curve"] for row in rows)):
            num = sum(part["completions"] - part["silent"] for part in bins)
            share = sum(part["inverted"] for part in bins) / num if num else None
            cells.append("n/a" if share is None else f"{share:.3f} ({num})")
        lines.append(f"| {name} | {mapping} | {' | '.join(cells)} |")
    return lines


def near_shares(record: dict) -> dict[str, float]:
    """Return shares of the completions within NEAR standard deviations of their group's mean.

    inverted, silent: of all these completions; inverted of trained: of the completions with an advantage.
    """
    bins = [part for part in record["curve"] if part["from"] < NEAR]
    total, inverted, silent = (
        sum(part[name] for part in bins) for name in ("completions", "inverted", "silent")
    )
    trained = total - silent
    return {
        "inverted": inverted / total if total else 0.0,
        "silent": silent / total if total else 0.0,
        "inverted of trained": inverted / trained if trained else 0.0,
    }


def near_lines(records: list[dict]) -> list[str]:
    """Return a table of near_shares() per judge, and paired differences by seed to `reasoning`."""
    from experiments import report

    rows = {
        key: {record["seed"]: near_shares(record) for record in of_judge}
        for key, of_judge in grouped(records).items()
    }
    reference = rows.get(("reasoning", "round_robin"), {})
    heads = ["inverted", "silent", "inverted of trained", "`reasoning` minus this, inverted", "p"]
    lines = [f"| judge | reward | n | {' | '.join(heads)} |", "|" + "---|" * (3 + len(heads))]
    for (name, mapping), by_seed in rows.items():
        cells = [mean_and_range([shares[head] for shares in by_seed.values()]) for head in heads[:3]]
        common = sorted(by_seed.keys() & reference.keys())
        pairs = np.array([reference[seed]["inverted"] - by_seed[seed]["inverted"] for seed in common])
        if by_seed is reference or len(pairs) < 2:
            cells += ["", ""]
        else:
            interval = report.show_interval(report.t_interval(pairs), "+.3f")
            cells += [f"{pairs.mean():+.3f} ({interval})", report.show_p(report.paired_p(pairs))]
        lines.append(f"| {name} | {mapping} | {len(by_seed)} | {' | '.join(cells)} |")
    return lines


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------
def add_records(file: Path, records: list[dict]) -> None:
    """Add records to a file, in place of records with the same name, seed and mapping."""
    old = json.loads(file.read_text()) if file.is_file() else []
    keys = [(record["name"], record["seed"], record["mapping"]) for record in records]
    kept = [record for record in old if (record["name"], record["seed"], record["mapping"]) not in keys]
    file.parent.mkdir(parents=True, exist_ok=True)
    merged = sorted(kept + records, key=lambda record: (record["name"], record["mapping"], record["seed"]))
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(merged, indent=1) + "\n")
    partial.replace(file)  # atomic: a kill loses no record


def origin_of(args: argparse.Namespace, margin: float) -> dict:
    """Return the digests and options on which the figures of a judge depend."""
    files = [args.pairs / name for name in ("test.jsonl", "groups.jsonl")]
    return {
        "judge_weights": digest_of_weights(Path(args.judge)),
        "function": None if Path(args.judge).is_dir() else [args.judge, digest_of_file(file_of(args.judge))],
        "pairs": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16],
        "options": [args.kind, args.question, margin, args.groups, args.chat_template_args],
    }


def is_measured(file: Path, args: argparse.Namespace, origin: dict) -> bool:
    """Tell whether a file has records of this judge with the same origin."""
    records = json.loads(file.read_text()) if file.is_file() else []
    return any(
        record["name"] == args.name and record["seed"] == args.seed and record.get("origin") == origin
        for record in records
    )


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pairs", type=Path, required=True, help="folder of data.judge_pairs")
    add("--name", required=True, help="name of the judge in the tables")
    add("--seed", type=int, default=0, help="seed of the judge (default: %(default)s)")
    add("--kind", choices=("scalar", "generative"), required=True, help="as reward.judge")
    add("--judge", required=True, help="as reward.judge_path")
    add("--question", help="as reward.judge_template (default: an instruction in English)")
    add("--chat-template-args", metavar="YAML", help="as reward.judge_chat_template_args, for example "
        '"{enable_thinking: false}"')  # fmt: skip
    add("--margin", type=float, help="as reward.judge_margin (default: the margin of recipe.json, or 0)")
    add("--groups", type=int, default=200, help="mixed groups to measure (default: %(default)s)")
    add("--out", type=Path, required=True, help="JSON file of the records")
    args = parser.parse_args(argv)
    args.chat_template_args = read_template_args(args.chat_template_args)
    return args


def main(args: argparse.Namespace) -> None:
    """Measure a judge and add the records to a file; ValueError names what is missing."""
    pairs = read_jsonl(args.pairs / "test.jsonl")
    groups = mixed_groups(read_jsonl(args.pairs / "groups.jsonl"), args.groups)
    recipe = Path(args.judge) / "recipe.json"
    margin = args.margin
    if margin is None:
        margin = json.loads(recipe.read_text()).get("margin", 0.0) if recipe.is_file() else 0.0
    origin = origin_of(args, margin)
    if is_measured(args.out, args, origin):
        print(f"{args.out}: {args.name}, seed {args.seed}, is already measured")
        return
    judge = build_judge(
        args.kind, args.judge, batch_size=128, margin=margin, template=args.question,
        template_args=args.chat_template_args,
    )  # fmt: skip
    records = measure(judge, args.kind, pairs, groups)
    made = {"origin": origin, "made": {**commit_of(), "date": now(), "machine": machine_of()}}
    add_records(args.out, [{"name": args.name, "seed": args.seed, **record, **made} for record in records])
    print("\n".join(table_lines([{"name": args.name, **record} for record in records])))


if __name__ == "__main__":
    leave(run(main, parse_args, sys.argv[1:]))
