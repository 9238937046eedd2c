"""Make the task "sums with a tool" for a pretrained chat model, which gets most such sums wrong by itself.

    python -m data.smollm2 && python -m data.sums_with_tool
    # data/built/smollm2/tools: the model with a chat template that shows tools
    # data/built/sums_with_tool/{train,test}.jsonl: "What is 5428 + 1131?"

The template of SmolLM2-135M-Instruct knows no tools, so the folder gets TEMPLATE, with the calls of Hermes
and Qwen. A model of this size never calls a tool that is only described, so each prompt begins with two
examples: a question, a call, its result, an answer. With these, about one sample in four calls add() with the
right numbers; with a single example, none of 24 did.
"""

import itertools
import json
import os
import random
import re
import sys
from pathlib import Path

from data.smollm2 import FOLDER
from runtime.config import command_line

OUTPUT = Path("data/built/sums_with_tool")
SIZES = {"train": 400, "test": 128}
# A result is a message of the user in <tool_response>, as in Qwen 2.5 and Qwen 3.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nYou can call these tools:\n"
    "{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}"
    'A call is one line: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EXAMPLES = ((518, 267), (4107, 896))  # sums at the start of every prompt


def example(a: int, b: int) -> list[dict]:
    """Return the messages of an example: a question, a call, its result, an answer."""
    call = f'{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}'
    return [
        {"role": "user", "content": f"What is {a} + {b}?"},
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "user", "content": f"<tool_response>{a + b}</tool_response>"},
        {"role": "assistant", "content": str(a + b)},
    ]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return int(a) + int(b)


def score(completion: str, answer: str) -> float:
    """Return 1 if the last number of the last turn is the answer, else 0."""
    numbers = re.findall(r"\d+", completion.replace(",", ""))
    return float(bool(numbers) and int(numbers[-1]) == int(answer))


def row_of(a: int, b: int) -> dict:
    """Return the row of a sum, with the examples before it."""
    examples = [message for pair in EXAMPLES for message in example(*pair)]
    question = {"role": "user", "content": f"What is {a} + {b}?"}
    return {"messages": [*examples, question], "answer": str(a + b)}


def sample_sets(seed: int) -> dict[str, list[dict]]:
    """Return disjoint sets of sums, train and test."""
    rng = random.Random(seed)
    drawn: dict[tuple[int, int], None] = {}
    while len(drawn) < sum(SIZES.values()):
        drawn[rng.randint(100, 9999), rng.randint(100, 9999)] = None
    left = iter(drawn)
    return {name: [row_of(*pair) for pair in itertools.islice(left, size)] for name, size in SIZES.items()}


def with_tools(model: Path, output: Path) -> None:
    """Make a folder with the files of a model and TEMPLATE; ValueError if it holds files of another model."""
    output.mkdir(parents=True, exist_ok=True)
    files = {file.name: file for file in model.iterdir() if file.is_file()}
    files.pop("chat_template.jinja", None)
    for target in output.iterdir():
        is_ours = target.name in files and target.samefile(files[target.name])
        if not is_ours and target.name != "chat_template.jinja":
            raise ValueError(f"{output} holds files of another model than {model}: delete {output}")
    for name, file in files.items():
        if not (output / name).exists():
            os.link(file, output / name)
    (output / "chat_template.jinja").write_text(TEMPLATE)


def main(argv: list[str] | None = None) -> None:
    """Read the command line and make the folder and the prompts."""
    parser = command_line("python -m data.sums_with_tool", __doc__)
    add = parser.add_argument
    add("--model", type=Path, default=FOLDER / "dense", help="model (default: %(default)s)")
    add("--output", type=Path, default=OUTPUT, help="folder of the prompts (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the sums (default: %(default)s)")
    args = parser.parse_args(argv)
    if not (args.model / "config.json").is_file():
        sys.exit(f"error: {args.model}: no model folder; run `python -m data.smollm2` first, or pass --model")
    try:
        with_tools(args.model, args.model.with_name("tools"))
    except ValueError as error:
        sys.exit(f"error: {error}")
    args.output.mkdir(parents=True, exist_ok=True)
    for name, rows in sample_sets(args.seed).items():
        (args.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        question = rows[0]["messages"][-1]["content"]
        print(f"{args.output / name}.jsonl: {len(rows)} prompts, for example: {question}")


if __name__ == "__main__":
    main()
