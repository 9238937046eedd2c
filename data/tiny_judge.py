"""A flawed judge for the tiny task: a small Bradley-Terry reward model, for reward.judge scalar.

    python -m data.tiny_judge     # makes data/built/tiny_judge from data/built/tiny; does nothing twice

It is trained on pairs of answers to the same addition, one right and one wrong, by the loss
-log sigmoid(score of the chosen - score of the rejected). The wrong ones are mistakes that the policy makes:
carries forgotten, in all columns or in one, or a wrong digit. Pairs are few, some labels are flipped and
training is short, so it is wrong as reward models are: it prefers the right answer in about 3 of 4 pairs (the
paper's reports 74.1 % [secondary]), and the order of its scores near the mean of a group says little. Group
normalisation of its scores then gives many completions an advantage of the wrong sign (advantage inversion).
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

TINY = Path("data/built/tiny")
OUTPUT = Path("data/built/tiny_judge")


@dataclass(frozen=True)
class Recipe:
    """Hold what, with the training file, the tokenizer and this file's text, decides the judge."""

    seed: int = 0
    num_pairs: int = 6000  # for training; a problem may occur more than once, with another mistake
    num_held_out: int = 800  # problems without training pairs, at most a quarter of the file
    flipped_frac: float = 0.05  # share of pairs whose label is wrong
    all_carries_frac: float = 0.4  # share of mistakes that forget every carry
    one_carry_frac: float = 0.3  # share of mistakes that forget one carry; the others change one digit
    steps: int = 500
    batch_size: int = 32  # pairs per step
    learning_rate: float = 5e-3  # peak; linear warm-up over 5 % of the steps, then linear decay to 0
    hidden_size: int = 64
    num_layers: int = 2
    initializer_range: float = 0.125  # 1 / sqrt(hidden_size)


# ------------------------------------------------------------------------------------------------------------
# Pairs
# ------------------------------------------------------------------------------------------------------------
def read_problems(path: Path) -> list[dict]:
    """Read rows of data.tiny, with the digits by column; ValueError names a row that is no addition."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; `python -m data.tiny` makes one")
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        row = json.loads(line)
        left, plus, right = row["prompt"].removesuffix("=").partition("+")
        digits = [[int(c) for c in operand.strip()] for operand in (left, right) if operand.strip().isdigit()]
        if len(digits) != 2 or len(digits[0]) != len(digits[1]) or len(row["answer"]) != len(digits[0]) + 1:
            raise ValueError(f"{path}: row {number} is no addition of data.tiny: {row['prompt']!r}")
        rows.append({**row, "columns": list(zip(*digits))})
    return rows


def add(columns: list[tuple[int, int]], forgotten: set[int]) -> tuple[str, list[int]]:
    """Return the sum without the carries out of the columns `forgotten`, and the columns with a carry."""
    written, carry, carrying = "", 0, []
    for i, (x, y) in enumerate(columns):
        total = x + y + carry
        written += str(total % 10)
        carrying += [i] if total >= 10 else []
        carry = int(total >= 10 and i not in forgotten)
    return written + str(carry), carrying


def mistake(problem: dict, recipe: Recipe, rng: np.random.Generator) -> str:
    """Draw a wrong answer to the problem."""
    _, carrying = add(problem["columns"], set())
    kind, answer = rng.random(), problem["answer"]
    if carrying and kind < recipe.all_carries_frac:
        return add(problem["columns"], set(range(len(answer))))[0]
    if carrying and kind < recipe.all_carries_frac + recipe.one_carry_frac:
        return add(problem["columns"], {int(rng.choice(carrying))})[0]
    i = int(rng.integers(len(answer)))
    return answer[:i] + str((int(answer[i]) + int(rng.integers(1, 10))) % 10) + answer[i + 1 :]


# ------------------------------------------------------------------------------------------------------------
# The judge
# ------------------------------------------------------------------------------------------------------------
def build_model(recipe: Recipe, tokenizer):
    """Make a randomly initialised small Qwen3 with a head of one score, which reads the last token."""
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=2 * recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=recipe.hidden_size // 4,
        max_position_embeddings=512,
        initializer_range=recipe.initializer_range,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen3ForSequenceClassification(config)


def train(model, tokenizer, problems: list[dict], recipe: Recipe) -> float:
    """Train on pairs by -log sigmoid(chosen - rejected) (Bradley-Terry); return the last loss (nats)."""
    import torch

    rng = np.random.default_rng([recipe.seed, 1])
    pairs = []  # (chosen, rejected) texts
    for i in rng.integers(len(problems), size=recipe.num_pairs).tolist():
        prompt, answer = problems[i]["prompt"], problems[i]["answer"]
        pair = prompt + answer, prompt + mistake(problems[i], recipe, rng)
        pairs.append(pair[::-1] if rng.random() < recipe.flipped_frac else pair)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    warmup = max(1, recipe.steps // 20)
    progress = tqdm(range(recipe.steps), desc="judge", unit="step", mininterval=1.0, disable=None)
    for step in progress:
        batch = [pairs[i] for i in rng.choice(len(pairs), size=recipe.batch_size, replace=False)]
        texts = [text for side in zip(*batch) for text in side]  # first all chosen, then all rejected
        inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0]
        chosen, rejected = scores.chunk(2)  # [B] each
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min((step + 1) / warmup, 1 - step / recipe.steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return loss.item()


# ------------------------------------------------------------------------------------------------------------
# How wrong it is
# ------------------------------------------------------------------------------------------------------------
def pairwise_agreement(judge, problems: list[dict], recipe: Recipe) -> float:
    """Return the share of problems whose right answer the judge (reward.ScalarJudge) puts above a mistake."""
    rng = np.random.default_rng([recipe.seed, 2])
    prompts, answers = [p["prompt"] for p in problems], [p["answer"] for p in problems]
    signs = judge.compare(prompts, answers, [mistake(p, recipe, rng) for p in problems])
    return signs.count(1) / len(signs)


def inverted_frac(judge, problems: list[dict], recipe: Recipe, group_size: int = 8) -> float:
    """Return the share of completions whose score - mean of the group has the wrong sign, + if right.

    One simulated group per problem: each completion is right with a probability that is drawn for the group,
    uniform in [0, 1], else a mistake. Groups that are all right or all wrong do not count.
    """
    rng = np.random.default_rng([recipe.seed, 3])
    right = rng.random((len(problems), group_size)) < rng.random((len(problems), 1))  # [problems, group_size]
    completions = [
        p["answer"] if is_right else mistake(p, recipe, rng)
        for p, row in zip(problems, right)
        for is_right in row
    ]
    prompts = [p["prompt"] for p in problems for _ in range(group_size)]
    scores = np.array(judge.scores(prompts, completions)).reshape(right.shape)
    advantages = scores - scores.mean(axis=1, keepdims=True)
    mixed = right.any(axis=1) & ~right.all(axis=1)
    inverted = np.where(right, advantages < 0, advantages > 0)
    return float(inverted[mixed].mean())


def build(recipe: Recipe, model_folder: Path, train_file: Path, output: Path) -> bool:
    """Make the folder unless it already holds what this recipe makes; return True if something was made."""
    from data.chat import load_tokenizer
    from reward import ScalarJudge

    problems = read_problems(train_file)
    if not (model_folder / "tokenizer.json").is_file():
        raise ValueError(f"{model_folder}: holds no tokenizer.json; `python -m data.tiny` makes one")
    inputs = [Path(__file__), train_file, model_folder / "tokenizer.json"]
    content = b"".join(hashlib.sha256(path.read_bytes()).digest() for path in inputs)
    key = hashlib.sha256(content + json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()
    made = output / "recipe.json"
    if made.is_file() and json.loads(made.read_text())["key"] == key:
        return False
    num_held_out = min(recipe.num_held_out, len(problems) // 4)
    held_out, known = problems[:num_held_out], problems[num_held_out:]
    tokenizer = load_tokenizer(model_folder)
    model = build_model(recipe, tokenizer)
    loss = train(model, tokenizer, known, recipe)
    aside = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    judge = ScalarJudge(aside)
    record = {
        "key": key,
        "recipe": asdict(recipe),
        "loss": loss,
        "num_held_out": num_held_out,
        "pairwise_agreement": pairwise_agreement(judge, held_out, recipe),
        "inverted_frac": inverted_frac(judge, held_out, recipe),
    }
    (aside / "recipe.json").write_text(json.dumps(record, indent=1))
    shutil.rmtree(output, ignore_errors=True)
    aside.rename(output)  # a killed build leaves no folder that looks finished
    return True


def main() -> None:
    """Read the command line, make the judge, and say how wrong it is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_option = parser.add_argument
    add_option("--model", type=Path, default=TINY / "model", help="has the tokenizer (default: %(default)s)")
    add_option("--train", type=Path, default=TINY / "train.jsonl", help="additions (default: %(default)s)")
    add_option("--output", type=Path, default=OUTPUT, help="folder to make (default: %(default)s)")
    add_option("--pairs", type=int, default=Recipe.num_pairs, help="training pairs (default: %(default)s)")
    add_option("--steps", type=int, default=Recipe.steps, help="steps of training (default: %(default)s)")
    add_option("--seed", type=int, default=Recipe.seed, help="for pairs and weights (default: %(default)s)")
    args = parser.parse_args()
    start = time.perf_counter()
    recipe = Recipe(seed=args.seed, num_pairs=args.pairs, steps=args.steps)
    made = build(recipe, args.model, args.train, args.output)
    record = json.loads((args.output / "recipe.json").read_text())
    print(
        f"{args.output}: on {record['num_held_out']} problems held out, prefers the right answer in "
        f"{record['pairwise_agreement']:.1%} of pairs; group normalisation inverts the advantage of "
        f"{record['inverted_frac']:.1%} of completions in mixed groups of 8 "
        + (f"(made in {time.perf_counter() - start:.0f} s)" if made else "(already there)"),
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
