"""Make the task "sums with a tool" for a pretrained chat model, which gets most such sums wrong by itself.

    python -m data.smollm2 && python -m data.sums_with_tool
    # data/built/smollm2/tools: the model with a chat template that shows tools
    # data/built/sums_with_tool/{train,test}.jsonl: "What is 5428 + 1131?"
    # data/built/sums_with_tool/{pool,words}.jsonl: a pool with few learnable groups, and its held-out set

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
# The pool: a policy that has learnt to call solves the sums and some of the stories; products are hopeless,
# because add() is the only tool.
POOL_SIZE = 8  # of each kind, so that prompts recur within 20 steps of 4 prompts
WORDS_SIZE = 128  # held-out stories
STORIES = {
    "pool": (
        "Ann has {a} apples and gets {b} more. How many apples has she?",
        "A train has {a} seats and a bus has {b} seats. How many seats are there?",
        "Tom read {a} pages in May and {b} pages in June. How many pages did he read?",
        "A farm has {a} sheep and {b} goats. How many animals has it?",
    ),
    "words": (
        "Eva owns {a} stamps and buys {b} more. How many stamps has she?",
        "A hall has {a} chairs and {b} benches. How many places to sit are there?",
        "Max ran {a} metres in the morning and {b} metres at night. How many metres did he run?",
        "A lake holds {a} trout and {b} perch. How many fish are there?",
    ),
}
SMALLEST = 100
LARGEST = 9999
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


def row_of(question: str, answer: int) -> dict:
    """Return the row of a question, with the examples before it."""
    examples = [message for pair in EXAMPLES for message in example(*pair)]
    return {"messages": [*examples, {"role": "user", "content": question}], "answer": str(answer)}


def stories(name: str, pairs: list[tuple[int, int]]) -> list[dict]:
    """Return a story with the sum of each pair as its answer; name: pool or words."""
    texts = itertools.cycle(STORIES[name])
    return [row_of(text.format(a=a, b=b), a + b) for text, (a, b) in zip(texts, pairs)]


def sample_sets(seed: int) -> dict[str, list[dict]]:
    """Return disjoint sets of rows: train and test with sums, the pool, and words with held-out stories."""
    rng = random.Random(seed)
    sizes = {**SIZES, "sums": POOL_SIZE, "stories": POOL_SIZE, "products": POOL_SIZE, "words": WORDS_SIZE}
    drawn: dict[tuple[int, int], None] = {}
    while len(drawn) < sum(sizes.values()):
        drawn[rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)] = None
    left = iter(drawn)
    pairs = {name: list(itertools.islice(left, size)) for name, size in sizes.items()}
    sums = {name: [row_of(f"What is {a} + {b}?", a + b) for a, b in pairs[name]] for name in (*SIZES, "sums")}
    products = [row_of(f"What is {a} * {b}?", a * b) for a, b in pairs["products"]]
    pool = [*sums.pop("sums"), *stories("pool", pairs["stories"]), *products]
    return {**sums, "pool": pool, "words": stories("words", pairs["words"])}


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
    parser.add_argument("--model", type=Path, default=FOLDER / "dense", help="model (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, help="folder of the prompts (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sums (default: %(default)s)")
    args = parser.parse_args(argv)
    if not (args.model / "config.json").is_file():
        sys.exit(
            f"error: {args.model} is no model folder; run `python -m data.smollm2` first, or pass --model"
        )
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
