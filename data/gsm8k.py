r"""GSM8K (Cobbe et al. 2021): grade-school word problems whose answer is one number.

    python -m data.gsm8k                                              # from the hub
    python -m data.gsm8k --train raw/train.jsonl --test raw/test.jsonl  # columns question and answer

Writes train.jsonl, validation.jsonl and test.jsonl with the columns prompt, answer (the number after ####),
kind and difficulty (reasoning steps, counted as the << >> annotations of the solution).

Validation is about one training question in twenty, chosen by a hash of the question: the choice depends
neither on a seed nor on the order of the rows, and equal questions stay on one side.
"""

import argparse
import hashlib
import re
from dataclasses import replace
from pathlib import Path

from data.prompts import Prompt, check_disjoint, load_prompts, save_prompts

INSTRUCTION = "Give the final answer after ####."
VALIDATION_ONE_IN = 20


def read_split(source: str, split: str) -> list[Prompt]:
    """Read bare questions of a file or a hub split; answers are final numbers, difficulties steps."""
    columns = {"prompt": "question", "answer": "answer", "kind": None, "difficulty": None}
    prompts = []
    rows = load_prompts(source, subset="main", split=split, kind="gsm8k", columns=columns)
    for number, row in enumerate(rows, start=1):
        answer = final_number(row.answer, where=f"{source}: row {number}")
        prompts.append(replace(row, answer=answer, difficulty=row.answer.count("<<")))
    return prompts


def final_number(solution: str, where: str) -> str:
    """Return the number after the last ####, without thousands separators; ValueError without one."""
    match = re.search(r"####\s*\$?(-?\d[\d,]*(?:\.\d+)?)\s*$", solution)
    if match is None:
        raise ValueError(f"{where}: column 'answer' must end in '#### number', found {solution[-80:]!r}")
    return match[1].replace(",", "")


def in_validation(question: str) -> bool:
    """Tell whether a question is held out, by its words alone; spacing does not count."""
    digest = hashlib.blake2b(" ".join(question.split()).encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % VALIDATION_ONE_IN == 0


def main(argv=None) -> None:
    """Read the command line and write the three files."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep_lines)
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
