"""The table of all tasks of reasoning-gym: the shares that a start model and a constant answer solve.

    python experiments/gym_table.py --model data/built/smollm2/dense --run-dir runs/gym_table

Each task is made at its lowest level. The prompt ends with "Answer:"; 8 prompts a task, 4 samples a prompt,
temperature 0.7, at most 14 tokens, one line. Writes rows.jsonl, completions.jsonl and record.json to the
folder; a repeated command resumes after the last of them. Prompts above --max-prompt-tokens are left out.
Another model or limit is sampled anew.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run as a script: for the modules of the project

from data import reasoning_gym as rows_of_tasks
from experiments.bench.common import markdown, replace_text, torchrun, write_json
from experiments.real import call
from experiments.text_quality import read_rows
from runtime.checkpoint import digest_of_weights
from runtime.config import command_line
from runtime.launch import leave, run
from verifiers import reasoning_gym

NUM_ROWS = 30  # of a task, on which constants are tried


def easiest_part(task: str) -> rows_of_tasks.Part:
    """Return rows of a task at its lowest level, or at the package's default if it refuses that level."""
    for level in (0, None):
        try:
            return rows_of_tasks.make_part(task, level, NUM_ROWS, 0, set())
        except ValueError as error:
            reason = error
    raise reason


def make_rows(run_dir: Path) -> None:
    """Write the prompts of all tasks, and the score of the best constant answer of each."""
    rows = []
    constants = {}
    for task in sorted(reasoning_gym.load().factory.DATASETS):
        if reasoning_gym.refusal(task) is None and (part := easiest_part(task)).rows:
            rows += part.rows[:8]  # the prompts; constants are tried on all rows
            constants[task] = rows_of_tasks.best_constant(part.rows)
    write_json(run_dir / "constants.json", constants)
    replace_text(run_dir / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def complete(run_dir: Path, model: Path, max_prompt_tokens: int) -> None:
    """Complete the prompts with one rank."""
    call(
        *torchrun(1), ROOT / "experiments" / "evaluate.py", "--model", model,
        "--data", run_dir / "rows.jsonl", "--chat", "never", "--template", "{prompt}\nAnswer:",
        "--samples", 4, "--temperature", 0.7, "--max-new-tokens", 14, "--dtype", "float32",
        "--kv-cache-gib", 0.5, "--max-num-seqs", 16, "--no-trainer-logprobs",
        "--completions", run_dir / "completions.jsonl", 'rollout.stop=["\\n"]',
        f"rollout.max_prompt_tokens={max_prompt_tokens}", "data.on_bad_row=drop",
    )  # fmt: skip


def record_of(run_dir: Path) -> dict:
    """Return the figures of each task, from the sampled completions."""
    constants = json.loads((run_dir / "constants.json").read_text())
    groups: dict[str, dict[int, list[dict]]] = {task: {} for task in constants}
    for row in read_rows(run_dir / "completions.jsonl"):
        if row["temperature"] > 0:
            task = json.loads(row["answer"])["task"]
            groups[task].setdefault(row["prompt_index"], []).append(row)
    record = {}
    for task, (constant, share, _) in constants.items():
        samples = [row for group in groups[task].values() for row in group]
        if samples:
            ties = [len({row["reward"] for row in group}) == 1 for group in groups[task].values()]
            record[task] = {
                "prompts": len(ties),
                "pass_at_1": sum(row["reward"] == 1 for row in samples) / len(samples),
                "constant": constant[:20],
                "constant_frac": share,
                "without_variance_frac": sum(ties) / len(ties),
                "tokens": sum(row["num_tokens"] for row in samples) / len(samples),
            }
    return record


def table_lines(record: dict[str, dict]) -> list[str]:
    """Return the table of the tasks with several right samples; the last row is the mean of the others."""
    solved = {task: row for task, row in record.items() if row["pass_at_1"] > 0.04}  # a sample is 0.03
    rows = []
    for task, row in sorted(solved.items(), key=lambda item: -item[1]["pass_at_1"]):
        shares = [f"{row[name]:.2f}" for name in ("pass_at_1", "constant_frac", "without_variance_frac")]
        rows.append([f"`{task}`", *shares, f"{row['tokens']:.1f}"])
    rest = [row for task, row in record.items() if task not in solved and task not in reasoning_gym.UNUSABLE]
    if rest:
        names = ("pass_at_1", "without_variance_frac", "tokens")
        score, ties, tokens = (sum(row[name] for row in rest) / len(rest) for name in names)
        rows.append([f"{len(rest)} others", f"{score:.3f}", "", f"{ties:.2f}", f"{tokens:.1f}"])
    heads = ["task at its lowest level", "pass@1", "best constant", "groups without variance", "tokens"]
    return markdown(heads, rows)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = command_line("experiments/gym_table.py", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/gym_table"), help="folder of the results")
    parser.add_argument("--max-prompt-tokens", type=int, default=384, help="default: %(default)s")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    """Make rows, complete them, and write the record."""
    args.run_dir.mkdir(parents=True, exist_ok=True)
    if not (args.run_dir / "rows.jsonl").is_file():
        make_rows(args.run_dir)
    made = {"weights": digest_of_weights(args.model), "max_prompt_tokens": args.max_prompt_tokens}
    made_by = args.run_dir / "made_by.json"
    if not made_by.is_file() or json.loads(made_by.read_text()) != made:
        complete(args.run_dir, args.model, args.max_prompt_tokens)
        write_json(made_by, made)
    record = record_of(args.run_dir)
    write_json(args.run_dir / "record.json", record)
    print("\n".join(table_lines(record)))


if __name__ == "__main__":
    leave(run(main, parse_args, sys.argv[1:]))
