"""Make small judges from the pairs of data/judge_pairs.py: two starts for RL, and a Bradley-Terry model.

    python -m data.judge_start --pairs data/built/judge_pairs --kind reasoning --output runs/reasoning
    python -m data.judge_start --pairs data/built/judge_pairs --kind direct --output runs/direct
    python -m data.judge_start --pairs data/built/judge_pairs --kind scalar --output runs/scalar

A folder that is up to date is not rebuilt. All kinds have the same body, a small Qwen3 with random weights:

    reasoning  a language model that imitates the rationales of the pairs: reasoning, then the verdict
    direct     the same that imitates the verdicts alone, to show what the reasoning is worth
    scalar     a model with a score head, trained with the Bradley-Terry loss on the pairs that are no ties:
               -log sigmoid(score of the better - score of the worse), mean in nats

train_rl.py trains the first two further, on the same pairs. Why a start: RL reinforces correct verdicts that
the model already writes now and then, and a model with random weights writes none. The start is short on
purpose, so that RL has something to teach. Real judges start from a language model instead [ours].

The tokenizer is that of the policy, with one token for each of Better, Tie and Worse if the policy's lacks
them. recipe.json of a scalar judge holds the `margin` for reward.judge_margin: the difference of scores below
which a tie agrees best with the labels of the training pairs.
"""

import argparse
import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.tiny import build_once
from verifiers.verdict import SIGNS

KINDS = ("reasoning", "direct", "scalar")


@dataclass(frozen=True)
class Recipe:
    """All parameters of a judge; the cache key hashes recipe, pairs, tokenizer and source code."""

    kind: str = "reasoning"
    seed: int = 0  # of the weights and of the order of the pairs
    steps: int = 1000
    batch_size: int = 64  # pairs per step
    learning_rate: float = 3e-3  # peak; linear warm-up over 5 % of the steps, then linear decay to 0
    hidden_size: int = 128
    num_layers: int = 4
    num_margin_pairs: int = 1500  # training pairs on which the margin of a scalar judge is chosen


def build_model(recipe: Recipe, tokenizer):
    """Make a randomly initialised small Qwen3 with a language-model head or a head that scores a text."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=3 * recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=recipe.hidden_size // 4,
        max_position_embeddings=512,
        initializer_range=recipe.hidden_size**-0.5,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return (Qwen3ForSequenceClassification if recipe.kind == "scalar" else Qwen3ForCausalLM)(config)


def imitation_loss(model, tokenizer, rows: list[dict], column: str):
    """Return the cross-entropy of a column and the end token after the prompts, mean over tokens in nats.

    The prompts are rendered by the chat template of the tokenizer, if it has one, as a judge is asked.
    """
    import torch

    prompts = [row["prompt"] for row in rows]
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer(prompts, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    targets = tokenizer([row[column] for row in rows], add_special_tokens=False)["input_ids"]
    target_ids = [[*ids, tokenizer.eos_token_id] for ids in targets]
    length = max(len(p) + len(t) for p, t in zip(prompt_ids, target_ids))
    ids = torch.full((len(rows), length), tokenizer.pad_token_id)  # [B, T]
    labels = torch.full((len(rows), length), -100)  # [B, T], -100 is left out of the mean
    for number, (prompt, target) in enumerate(zip(prompt_ids, target_ids)):
        ids[number, : len(prompt) + len(target)] = torch.tensor([*prompt, *target])
        labels[number, len(prompt) : len(prompt) + len(target)] = torch.tensor(target)
    # padding is on the right, so causal attention never sees it before a token that counts
    return model(input_ids=ids, labels=labels).loss


def bradley_terry_loss(model, tokenizer, rows: list[dict]):
    """Return -log sigmoid(score of the better - score of the worse) of pairs without ties, mean in nats."""
    import torch.nn.functional as F

    from judges import beginning_of_texts

    is_better = [row["answer"] == "Better" for row in rows]
    added = beginning_of_texts(tokenizer)  # a judge in use adds it once, too
    tasks = [row["task"].removeprefix(added) for row in rows]
    chosen = [task + row["first" if yes else "second"] for task, row, yes in zip(tasks, rows, is_better)]
    rejected = [task + row["second" if yes else "first"] for task, row, yes in zip(tasks, rows, is_better)]
    inputs = tokenizer([*chosen, *rejected], padding=True, padding_side="right", return_tensors="pt")
    scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0]
    chosen_scores, rejected_scores = scores.chunk(2)  # [B] each
    return -F.logsigmoid(chosen_scores - rejected_scores).mean()


def train(model, tokenizer, rows: list[dict], recipe: Recipe) -> float:
    """Train on random batches of the pairs, and return the mean loss of the last tenth of the steps."""
    import torch

    if recipe.kind == "scalar":
        rows = [row for row in rows if row["answer"] != "Tie"]
    rng = np.random.default_rng([recipe.seed, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    warmup = max(1, recipe.steps // 20)
    losses = []
    progress = tqdm(range(recipe.steps), desc=recipe.kind, unit="step", mininterval=1.0, disable=None)
    for num_done in progress:
        batch = [
            rows[i] for i in rng.choice(len(rows), size=min(len(rows), recipe.batch_size), replace=False)
        ]
        match recipe.kind:
            case "reasoning":
                loss = imitation_loss(model, tokenizer, batch, "rationale")
            case "direct":
                loss = imitation_loss(model, tokenizer, batch, "answer")
            case "scalar":
                loss = bradley_terry_loss(model, tokenizer, batch)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min((num_done + 1) / warmup, 1 - num_done / recipe.steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return float(np.mean(losses[-max(1, recipe.steps // 10) :]))


def best_margin(gaps: list[float], labels: list[str]) -> float:
    """Return the margin, of all distances, at which the signs of the gaps agree most often with the labels.

    gaps: score of the first completion minus score of the second. A gap of at most the margin is a tie.
    """
    signs = np.array([SIGNS[label] for label in labels])
    gap = np.array(gaps)
    order = np.argsort(abs(gap), kind="stable")
    ties = np.concatenate([[0], np.cumsum(signs[order] == 0)])  # right ties if the first k are ties
    agrees = np.sign(gap[order]) == signs[order]
    others = agrees.sum() - np.concatenate([[0], np.cumsum(agrees)])  # right signs of all other pairs
    best = int(np.argmax(ties + others))
    return float(abs(gap[order][best - 1])) if best else 0.0


def write_judge(recipe: Recipe, pairs: Path, folder: Path) -> dict:
    """Train a judge, write the model and the tokenizer into a folder, and return the record."""
    from data.chat import load_tokenizer
    from judges import ScalarJudge

    record = json.loads((pairs / "recipe.json").read_text())
    tokenizer = load_tokenizer(record["model"])
    vocabulary = tokenizer.get_vocab()
    tokenizer.add_tokens([verdict for verdict in SIGNS if verdict not in vocabulary])
    rows = read_pairs(pairs)
    model = build_model(recipe, tokenizer)
    loss = train(model, tokenizer, rows, recipe)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    result = {"recipe": asdict(recipe), "pairs": str(pairs), "loss": loss}
    result["num_parameters"] = sum(parameter.numel() for parameter in model.parameters())
    if recipe.kind == "scalar":
        chosen = rows[: recipe.num_margin_pairs]
        columns = [[row[name] for row in chosen] for name in ("task", "first", "second")]
        judge = ScalarJudge(folder)
        first_scores = judge.scores(columns[0], columns[1])
        second_scores = judge.scores(columns[0], columns[2])
        gaps = [first - second for first, second in zip(first_scores, second_scores)]
        result["margin"] = best_margin(gaps, [row["answer"] for row in chosen])
    return result


def read_pairs(pairs: Path) -> list[dict]:
    """Read the training pairs; ValueError if the folder has none."""
    file = pairs / "train.jsonl"
    if not file.is_file():
        raise ValueError(f"--pairs {pairs} holds no train.jsonl; `python -m data.judge_pairs` makes it")
    return [json.loads(line) for line in file.read_text().splitlines()]


def build(recipe: Recipe, pairs: Path, output: Path) -> bool:
    """Build the folder unless it is up to date; return True if it was built."""
    read_pairs(pairs)
    content = b"".join(
        hashlib.sha256(file.read_bytes()).digest()
        for file in (Path(__file__), pairs / "train.jsonl", pairs / "recipe.json")
    )
    key = hashlib.sha256(content + json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()
    return build_once(output, key, "data.judge_start", lambda folder: write_judge(recipe, pairs, folder))


def main() -> None:
    """Read the command line, train the judge, and print its loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_option = parser.add_argument
    add_option("--pairs", type=Path, required=True, help="folder of data.judge_pairs")
    add_option("--kind", choices=KINDS, required=True, help="reasoning, direct or scalar")
    add_option("--output", type=Path, required=True, help="folder to create")
    add_option("--steps", type=int, help="training steps (default: the recipe's)")
    add_option("--seed", type=int, help="seed of weights and batches (default: the recipe's)")
    add_option("--learning-rate", type=float, help="peak learning rate (default: the recipe's)")
    args = parser.parse_args()
    start = time.perf_counter()
    names = ("steps", "seed", "learning_rate")
    overrides = {name: value for name in names if (value := getattr(args, name)) is not None}
    try:
        is_new = build(replace(Recipe(kind=args.kind), **overrides), args.pairs, args.output)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    record = json.loads((args.output / "recipe.json").read_text())
    margin = f", margin {record['margin']:.4f}" if "margin" in record else ""
    print(
        f"{args.output}: {record['num_parameters']:,} parameters, loss {record['loss']:.3f}{margin} "
        + (f"(made in {time.perf_counter() - start:.0f} s)" if is_new else "(already there)"),
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
