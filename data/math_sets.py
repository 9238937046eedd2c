r"""Make prompt files from datasets of competition mathematics, for example MATH-500, AIME24 and AMC23.

    python -m data.math_sets --input HuggingFaceH4/MATH-500 --output data/built/math500/test.jsonl
    python -m data.math_sets --input aime24.jsonl --output data/built/aime24/test.jsonl

Writes one file with the columns prompt, answer, kind and difficulty. If the dataset has no answer column, the
answer is the content of the last \boxed{...} in the solution column. The difficulty is the number in the
level column, for example 5 for "Level 5", and null if the row has no level.
"""

import argparse
import re

from data.formats import field_text, load_rows
from data.prompts import Prompt, save_prompts
from verifiers.math import last_boxed

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def read_set(source: str, subset, split: str, prompt_column: str, answer_column: str | None) -> list[Prompt]:
    """Read a file or a hub split; ValueError names the missing column, or the row with an empty field."""
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
                raise ValueError(f"{where}: column 'solution' has no \\boxed{{...}} or an empty one")
        level = re.search(r"\d+(\.\d+)?", str(row.get("level", "")))
        difficulty = float(level[0]) if level else None
        prompts.append(Prompt(f"{problem}\n{INSTRUCTION}", answer, "math", source, difficulty))
    return prompts


def main(argv=None) -> None:
    """Read the command line and write the prompt file."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep_lines)
    parser.add_argument("--input", required=True, help="file or hub dataset")
    parser.add_argument("--output", required=True, help=".jsonl file to write")
    parser.add_argument("--subset", help="configuration of a hub dataset (default: its only one)")
    parser.add_argument("--split", default="test", help="split of a hub dataset (default: %(default)s)")
    parser.add_argument(
        "--prompt-column", default="problem", help="column of the problem (default: %(default)s)"
    )
    parser.add_argument("--answer-column", help="column of the answer (default: answer, or else solution)")
    args = parser.parse_args(argv)

    prompts = read_set(args.input, args.subset, args.split, args.prompt_column, args.answer_column)
    save_prompts(args.output, prompts)
    chars = sum(len(prompt.text) for prompt in prompts) / len(prompts)
    graded = sum(prompt.difficulty is not None for prompt in prompts)
    print(f"{args.output}: {len(prompts)} rows, mean length {chars:.0f} characters, {graded} with difficulty")


if __name__ == "__main__":
    main()
