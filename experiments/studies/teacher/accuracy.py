"""Print the table of the teachers' and students' accuracy, from the probabilities of the right answers.

    python -m experiments.studies.teacher.accuracy

pass@1 at temperature 1 is the mean probability of the whole right answer with its end of sequence, so that
nothing is sampled.
"""

import json
from pathlib import Path

import torch

from data.chat import load_tokenizer
from experiments.bench.common import markdown
from moe_model import Policy, load_config, load_hf, pack

BUILT = Path("data/built")
ROWS_AT_ONCE = 64
HEADS = ["set", "prompts", "policy at the start", "teacher"]


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


def sets() -> dict[str, tuple[str, list[dict]]]:
    """Return {name of a set: (task, prompt rows)}."""

    def rows_of(task: str, name: str, limit: int | None = None) -> list[dict]:
        return [
            json.loads(line) for line in (BUILT / task / f"{name}.jsonl").read_text().splitlines()[:limit]
        ]

    pool = rows_of("habits", "train")
    return {
        "short, held out: sums": ("habits", rows_of("habits", "test")),
        "short, training: sums": ("habits", [row for row in pool if "*" not in row["prompt"]]),
        "short, training: products": ("habits", [row for row in pool if "*" in row["prompt"]]),
        "chains, held out": ("chains", rows_of("chains", "test")),
        "chains, training": ("chains", rows_of("chains", "train", 192)),
    }


def main() -> None:
    """Print the table of all sets."""
    lines = []
    for name, (task, rows) in sets().items():
        models = [BUILT / task / "model", BUILT / f"{task}_teacher" / "model"]
        shares = [f"{probabilities(folder, rows).mean():.3f}" for folder in models]
        lines.append([name, str(len(rows)), *shares])
    print("\n".join(markdown(HEADS, lines)))


if __name__ == "__main__":
    main()
