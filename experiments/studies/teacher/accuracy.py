"""Print the probabilities of right answers: of the start and the teacher, or of the final policies of runs.

    python -m experiments.studies.teacher.accuracy                                    # start and teacher
    python -m experiments.studies.teacher.accuracy --models runs/teacher/short/*/seed_*/model \\
        --json experiments/studies/teacher/accuracy.json                              # policies

pass@1 at temperature 1 is the mean probability of the whole right answer with its end of sequence, so that
nothing is sampled. The table of policies has the mean over the runs of a row, and the paired difference to
the row short_grpo or chains_grpo over common seeds. --json keeps the policies that the file already holds, so
that the portions of the study share one file.
"""

import json
from pathlib import Path

import numpy as np
import torch

from data.chat import load_tokenizer
from experiments.bench.common import make_parser, markdown, write_json
from experiments.report import paired_p, show, show_interval, show_p, t_interval
from moe_model import Policy, load_config, load_hf, pack

STARTS = Path("experiments/starts")
TASKS = {"short": "habits", "chains": "chains"}  # {first word of a row's name: name of the start}
ROWS_AT_ONCE = 64
HEADS = ["set", "prompts", "policy at the start", "teacher"]
POLICY_HEADS = ["row", "set", "n", "probability", "minus grpo", "its 95 % interval", "paired p"]


def probabilities(folder: Path, rows: list[dict]) -> torch.Tensor:
    """Return the probability of the right answer of each prompt, [prompts]."""
    policy = Policy(load_config(folder))
    load_hf(policy, folder)
    tokenizer = load_tokenizer(folder)
    values = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[start : start + ROWS_AT_ONCE]
        answers = [
            [*ids, tokenizer.eos_token_id] for ids in tokenizer([row["answer"] for row in part])["input_ids"]
        ]
        prompts = tokenizer([row["prompt"] for row in part])["input_ids"]
        with torch.no_grad():
            logprobs, *_ = policy(pack(prompts, answers, torch.device("cpu")))
        values += [of_row.sum().exp() for of_row in logprobs.split([len(ids) for ids in answers])]
    return torch.stack(values)


def sets_of(task: str) -> dict[str, list[dict]]:
    """Return {name of a set: prompt rows} of a task, for example of "short"."""

    def rows_of(name: str, limit: int | None = None) -> list[dict]:
        file = STARTS / TASKS[task] / f"{name}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()[:limit]]

    if task == "chains":
        return {"chains, held out": rows_of("test"), "chains, training": rows_of("train", 192)}
    pool = rows_of("train")
    return {
        "short, held out: sums": rows_of("test"),
        "short, training: sums": [row for row in pool if "*" not in row["prompt"]],
        "short, training: products": [row for row in pool if "*" in row["prompt"]],
    }


def start_lines() -> list[str]:
    """Return the table of start and teacher, for the sets of all tasks."""
    lines = []
    for task, start in TASKS.items():
        models = [STARTS / start / "model", STARTS / f"{start}_teacher"]
        for name, rows in sets_of(task).items():
            shares = [f"{probabilities(folder, rows).mean():.3f}" for folder in models]
            lines.append([name, str(len(rows)), *shares])
    return markdown(HEADS, lines)


def figures_of(model: Path) -> dict:
    """Return the figures of an exported policy, ROW/seed_S/model."""
    row = model.parents[1].name
    sets = sets_of(row.partition("_")[0])
    means = {name: float(f"{probabilities(model, rows).mean():.7g}") for name, rows in sets.items()}
    return {"row": row, "seed": int(model.parent.name.removeprefix("seed_")), "probabilities": means}


def table_lines(data: list[dict]) -> list[str]:
    """Return the table of policies: for each set of a task, the rows of the task, grpo first."""
    by_set: dict[str, dict[str, dict[int, float]]] = {}  # {set: {row: {seed: probability}}}
    for run in data:
        for name, value in run["probabilities"].items():
            by_set.setdefault(name, {}).setdefault(run["row"], {})[run["seed"]] = value
    lines = []
    for name, rows in by_set.items():
        parent = f"{name.partition(',')[0]}_grpo"
        for row in sorted(rows, key=lambda row: (row != parent, row)):
            common = sorted(rows[row].keys() & rows.get(parent, {}).keys()) if row != parent else []
            differences = np.array([rows[row][seed] - rows[parent][seed] for seed in common])
            lines.append([
                row, name, str(len(rows[row])), f"{np.mean(list(rows[row].values())):.4f}",
                show(differences.mean() if common else None, "+.4f"),
                show_interval(t_interval(differences), "+.4f"), show_p(paired_p(differences)),
            ])  # fmt: skip
    return markdown(POLICY_HEADS, lines)


def main() -> None:
    """Print the table of start and teacher, or the table of policies."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--models", type=Path, nargs="+", metavar="ROW/seed_S/model", help="exported policies of runs"
    )
    args = parser.parse_args()
    if not args.models:
        if args.json:
            parser.error("--json needs --models")
        print("\n".join(start_lines()))
        return
    earlier = json.loads(args.json.read_text()) if args.json and args.json.is_file() else []
    runs = {(run["row"], run["seed"]): run for run in [*earlier, *map(figures_of, args.models)]}
    data = [runs[key] for key in sorted(runs)]
    print("\n".join(table_lines(data)))
    write_json(args.json, data)


if __name__ == "__main__":
    main()
