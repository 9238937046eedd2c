r"""Make prompt files of sets whose answer is compared as mathematics: MATH-500, AIME24, AMC23 and their like.

    python -m data.math_sets --input HuggingFaceH4/MATH-500 --output data/built/math500/test.jsonl
    python -m data.math_sets --input aime24.jsonl --output data/built/aime24/test.jsonl

Writes one file with the columns prompt, answer, kind and difficulty. Without an answer column, the answer is
the content of the last \boxed{...} in the solution column. The difficulty is the number in the level column
("Level 5" is 5), and null where there is none.
"""

import argparse
import re

from data.formats import field_text, load_rows
from data.prompts import Prompt, save_prompts
from verifiers.math import last_boxed

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def read_set(source: str, subset, split: str, prompt_column: str, answer_column: str | None) -> list[Prompt]:
    """Read a file or a hub split; ValueError names the column, or the row that lacks its text."""
    rows = load_rows(source, subset, split)
    available = list(dict.fromkeys(column for row in rows for column in row))
    if answer_column is None:
        answer_column = "solution" if "solution" in available and "answer" not in available else "answer"
    for option, column in {"--prompt-column": prompt_column, "--answer-column": answer_column}.items():
        if column not in available:
            raise ValueError(f"{source}: no column {column!r}; set {option} to one of {', '.join(available)}")
    prompts = []
    for number, row in enumerate(rows, start=1):
        where = f"{source}: row {number}"
        problem = field_text(row, prompt_column, where)
        answer = field_text(row, answer_column, where)
        if answer_column == "solution":
            answer = (last_boxed(answer) or "").strip()
            if not answer:
                raise ValueError(f"{where}: column 'solution' has no filled \\boxed{{...}} at its end")
        level = re.search(r"\d+(\.\d+)?", str(row.get("level", "")))
        difficulty = float(level[0]) if level else None
        prompts.append(Prompt(f"{problem}\n{INSTRUCTION}", answer, "math", source, difficulty))
    return prompts


def main(argv=None) -> None:
    """Read the command line and write the file."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep_lines)
    parser.add_argument("--input", required=True, help="file or hub dataset")
    parser.add_argument("--output", required=True, help=".jsonl file to write")
    parser.add_argument("--subset", help="configuration of a hub dataset (default: its only one)")
    parser.add_argument("--split", default="test", help="split of a hub dataset (default: %(default)s)")
    parser.add_argument("--prompt-column", default="problem", help="column (default: %(default)s)")
    parser.add_argument("--answer-column", help="column (default: answer, or else solution)")
    args = parser.parse_args(argv)

    prompts = read_set(args.input, args.subset, args.split, args.prompt_column, args.answer_column)
    save_prompts(args.output, prompts)
    chars = sum(len(prompt.text) for prompt in prompts) / len(prompts)
    graded = sum(prompt.difficulty is not None for prompt in prompts)
    print(f"{args.output}: {len(prompts)} rows, mean length {chars:.0f} characters, {graded} with difficulty")


if __name__ == "__main__":
    main()
