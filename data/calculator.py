"""Make the task "calculator": sums that a tiny model may compute by a tool, which costs some of the reward.

    python -m data.calculator          # data/built/calculator/{model,train.jsonl,easy.jsonl,hard.jsonl}

A prompt is a sum of two numbers with two to four digits each, for example "12+34". The model answers at once
("046"), or calls calc() and copies the result:

    <tool_call>{"name": "calc", "arguments": {"sum": "12+34"}}</tool_call><eos>[46]=46<eos>

Warm start. The corpus answers without a call by adding digit by digit, and forgets every carry in most rows;
rows with a call are right. So at first the model is right on sums without carries ("easy"), where a call only
costs, and wrong on most sums with carries ("hard"). The policy has to learn to call on hard sums and not to
call on easy ones. A model without the tool (data.tools: []) has to learn carries.

score() gives 1 for a right answer, 1 - CALL_COST for a right answer with calls, else 0.
"""

import argparse
import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from data.tiny import OUTPUT, Recipe, build_once, build_policy, build_tokenizer

CALL_COST = 0.3  # of the reward [ours]
RECIPE = Recipe(steps=1000, learning_rate=4e-3, hidden_size=64, expert_width=64, initializer_range=0.125)
CALL_FRAC = 0.3  # share of the corpus that calls, if the prompt has the tool
FORGET_FRAC = 0.8  # share of answers without a call that forget all carries
DIGITS = (2, 3, 4)
NUM_TRAIN = 4000
NUM_HELD_OUT = 100  # of each held-out set
NAME = "calc"
OPENING = '{"name": "calc", "arguments": {"sum": "'
CLOSING = '"}}'
# One token each, so that a call of a sum with two digits has 10 tokens and an answer has 4.
ADDED_TOKENS = ("<tool_call>", "</tool_call>", OPENING, CLOSING, f"{NAME};")
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}={{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ "
    "{'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}<eos>"
    "{% elif m.role == 'tool' %}[{{ m.content }}]{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def calc(sum: str) -> str:
    """Add two numbers.

    Args:
        sum: The sum, for example 12+34.
    """
    a, b = sum.split("+")
    return str(int(a) + int(b))


def score(completion: str, answer: str, turns: list | None = None) -> float:
    """Return 1 for a right answer, 1 - CALL_COST if a call was made for it, and 0 for a wrong one."""
    text = completion.strip()
    is_right = text.isdecimal() and int(text) == int(answer)
    has_call = any(turn["role"] == "tool" for turn in turns or [])
    return (1 - CALL_COST * has_call) * is_right


def has_carry(a: int, b: int) -> bool:
    """Tell whether the sum of any column of digits exceeds 9."""
    return any(int(x) + int(y) > 9 for x, y in zip(str(a)[::-1], str(b)[::-1]))


def draw_sum(rng: np.random.Generator) -> tuple[int, int]:
    """Draw two numbers with equally many digits; every second pair has no carry."""
    digits = int(rng.choice(DIGITS))
    wants_carry = bool(rng.integers(2))
    while True:
        a, b = rng.integers(10 ** (digits - 1), 10**digits, size=2).tolist()
        if has_carry(a, b) == wants_carry:
            return a, b


def row_of(a: int, b: int) -> dict:
    """Return the row of a sum; the difficulty is the number of digits."""
    return {"prompt": f"{a}+{b}", "answer": str(a + b), "difficulty": len(str(a))}


def sample_sets(seed: int) -> dict[str, list[dict]]:
    """Return disjoint sets of rows: train, and the held-out sets easy and hard."""
    rng = np.random.default_rng([seed, 3])
    sets: dict[str, list[dict]] = {"easy": [], "hard": [], "train": []}
    seen = set()
    while len(sets["train"]) < NUM_TRAIN:
        a, b = draw_sum(rng)
        if (a, b) in seen:
            continue
        seen.add((a, b))
        held_out = sets["hard" if has_carry(a, b) else "easy"]
        (held_out if len(held_out) < NUM_HELD_OUT else sets["train"]).append(row_of(a, b))
    return sets


def answer_by_digits(a: int, b: int) -> str:
    """Return the sum of each column modulo 10, with a leading 0: the habit of the corpus."""
    return "0" + "".join(str((int(x) + int(y)) % 10) for x, y in zip(str(a), str(b)))


def corpus_row(a: int, b: int, rng: np.random.Generator) -> tuple[str, list[tuple[str, bool]]]:
    """Return the prompt and the pieces (text, whether the policy writes the text) of a row of the corpus."""
    has_tool = bool(rng.integers(2))
    prompt = f"{NAME};" * has_tool + f"{a}+{b}="
    if has_tool and rng.random() < CALL_FRAC:
        call = f"<tool_call>{OPENING}{a}+{b}{CLOSING}</tool_call><eos>"
        return prompt, [(call, True), (f"[{a + b}]=", False), (f"{a + b}<eos>", True)]
    forgets = rng.random() < FORGET_FRAC
    answer = answer_by_digits(a, b) if forgets else f"{a + b:0{len(str(a)) + 1}d}"
    return prompt, [(f"{answer}<eos>", True)]


def make_tokenizer():
    """Return the tokenizer of data.tiny with the tokens of calls and the chat template."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(list(ADDED_TOKENS))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def warm_start(policy, tokenizer, recipe: Recipe, held_out: set[str]) -> float:
    """Train the policy on the corpus, on its own tokens only; return the last loss in nats per token."""
    import torch

    from moe_model import pack, select_targets

    rng = np.random.default_rng([recipe.seed, 1_000])
    policy.logprob_kernel = "naive"  # the weights must not depend on the rounding of a kernel
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    warmup = max(1, recipe.steps // 20)
    for step in range(recipe.steps):
        prompts: list[str] = []
        completions: list[list[int]] = []
        is_own: list[bool] = []
        while len(prompts) < recipe.batch_size:
            a, b = draw_sum(rng)
            if f"{a}+{b}" in held_out:
                continue
            prompt, pieces = corpus_row(a, b, rng)
            ids_of = [tokenizer(text)["input_ids"] for text, _ in pieces]
            prompts.append(prompt)
            completions.append(sum(ids_of, []))
            is_own += [own for ids, (_, own) in zip(ids_of, pieces) for _ in ids]
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min((step + 1) / warmup, 1 - step / recipe.steps)
        packed = pack(tokenizer(prompts)["input_ids"], completions, "cpu")
        logprobs, *_ = policy(select_targets(packed, torch.tensor(is_own)))
        loss = -logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def write_task(recipe: Recipe, folder: Path) -> dict:
    """Write the prompts, the tokenizer and the warm-started model into a folder; return the record."""
    from moe_model import save_hf

    sets = sample_sets(recipe.seed)
    for name, rows in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    policy = build_policy(recipe, len(tokenizer))
    held_out = {row["prompt"] for name in ("easy", "hard") for row in sets[name]}
    loss = warm_start(policy, tokenizer, recipe, held_out)
    save_hf(policy, folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return {
        "recipe": asdict(recipe),
        "loss": loss,
        **{f"num_{name}": len(rows) for name, rows in sets.items()},
    }


def main() -> None:
    """Build the folder unless it is up to date, and print a summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=OUTPUT / "calculator", help="folder to create")
    args = parser.parse_args()
    source = Path(__file__).read_bytes() + json.dumps(asdict(RECIPE), sort_keys=True).encode()
    key = hashlib.sha256(source).hexdigest()
    build_once(args.output, key, "data.calculator", lambda folder: write_task(RECIPE, folder))
    record = json.loads((args.output / "recipe.json").read_text())
    print(
        f"{args.output}: {record['num_train']} training prompts, loss {record['loss']:.3f}", file=sys.stderr
    )


if __name__ == "__main__":
    main()
