r"""GSM8K (Cobbe et al. 2021): grade-school word problems whose answer is one number.

    python -m data.gsm8k                                              # from the hub
    python -m data.gsm8k --train raw/train.jsonl --test raw/test.jsonl  # columns question and answer

Writes train.jsonl, validation.jsonl and test.jsonl with the columns prompt, answer (the number after ####),
kind and difficulty (number of reasoning steps, counted as the << >> annotations of the solution, for example
"48/2 = <<48/2=24>>24 clips" is one step).

About one training question in twenty is moved to the validation set. The choice is made by a hash of the
question, so that it is independent of seeds and of the order of the rows, and copies of a question stay
together.
"""

import hashlib
import re
from dataclasses import replace
from pathlib import Path

from data.prompts import Prompt, check_disjoint, load_prompts, save_prompts
from runtime.config import command_line

INSTRUCTION = "Give the final answer after ####."
VALIDATION_ONE_IN = 20


def read_split(source: str, split: str) -> list[Prompt]:
    """Read the questions of a file or a hub split; answer: the final number, difficulty: number of steps."""
    columns = {"prompt": "question", "answer": "answer", "kind": None, "difficulty": None}
    prompts = []
    rows = load_prompts(source, subset="main", split=split, kind="gsm8k", columns=columns)
    for number, row in enumerate(rows, start=1):
        answer = final_number(row.answer, where=f"{source}: row {number}")
        prompts.append(replace(row, answer=answer, difficulty=row.answer.count("<<")))
    return prompts


def final_number(solution: str, where: str) -> str:
    """Return the number after ####, for example "1200" for "#### 1,200"; ValueError if there is none."""
    match = re.search(r"####\s*\$?(-?\d[\d,]*(?:\.\d+)?)\s*$", solution)
    if match is None:
        raise ValueError(f"{where}: column 'answer' must end in '#### number', found {solution[-80:]!r}")
    return match[1].replace(",", "")


def in_validation(question: str) -> bool:
    """Tell whether a question belongs to the validation set, by a hash of its words (spacing is ignored)."""
    digest = hashlib.blake2b(" ".join(question.split()).encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % VALIDATION_ONE_IN == 0


def main(argv=None) -> None:
    """Read the command line and write the files of the three splits."""
    parser = command_line(None, __doc__)
    parser.add_argument("--train", default="openai/gsm8k", help="file or hub dataset (default: %(default)s)")
    parser.add_argument("--test", default="openai/gsm8k", help="file or hub dataset (default: %(default)s)")
    parser.add_argument("--output", default="data/built/gsm8k", help="folder (default: %(default)s)")
    args = parser.parse_args(argv)

    train = read_split(args.train, "train")
    splits = {
        "train": [prompt for prompt in train if not in_validation(prompt.text)],
        "validation": [prompt for prompt in train if in_validation(prompt.text)],
        "test": read_split(args.test, "test"),
    }
    check_disjoint(splits["train"], splits["validation"] + splits["test"])
    for split, prompts in splits.items():
        path = Path(args.output) / f"{split}.jsonl"
        save_prompts(path, [replace(prompt, text=f"{prompt.text}\n{INSTRUCTION}") for prompt in prompts])
        chars = sum(len(prompt.text) for prompt in prompts) / max(1, len(prompts))
        steps = sum(prompt.difficulty for prompt in prompts) / max(1, len(prompts))
        print(f"{path}: {len(prompts)} rows, mean question {chars:.0f} characters, {steps:.1f} steps")


if __name__ == "__main__":
    main()
