"""Make flawed judges for two tiny tasks: small Bradley-Terry reward models, for reward.judge=scalar.

    python -m data.tiny_judge                     # makes data/built/tiny_judge from data/built/tiny
    python -m data.tiny_judge --recipe chains     # makes data/built/chains_judge from data/built/chains

A folder that is up to date is not rebuilt.

A judge is trained on pairs of a right and a wrong completion of one prompt, with the loss
-log sigmoid(score of the chosen - score of the rejected). The wrong completions have the mistakes of the
policy. In additions, either all carries or one carry are forgotten, or one digit is wrong. In chains, at
least one step has a wrong value (by the offset of the corpus), and the later steps continue from the wrong
value; the scores are compared at the end of every state from the first wrong state on.

The judge is flawed on purpose: pairs are few, some labels are flipped, training is short, and the training
chains are short. Like real reward models, the judge prefers the right completion in about 3 of 4 pairs (the
paper reports 74.1 % [secondary]), and near the mean of a group the order of scores carries little
information. Group normalisation of the scores then gives many completions an advantage of the wrong sign
(advantage inversion).
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

from data.chains import Chains, habits
from data.tiny import build_once
from verifiers.chain import COUNTERS, STATE, step

BUILT = Path("data/built")


@dataclass(frozen=True)
class Recipe:
    """All parameters of a judge; the cache key hashes recipe, training file, tokenizer and source code."""

    task: str = "tiny"  # a recipe of data.tiny: its additions, or "chains"
    seed: int = 0
    num_pairs: int = 6000  # training pairs; a problem may occur several times, with different mistakes
    num_held_out: int = 800  # problems for the evaluation of the judge, at most a quarter of the file
    flipped_frac: float = 0.05  # share of pairs with the wrong label
    max_difficulty: int | None = None  # maximum difficulty of training problems
    all_carries_frac: float = 0.4  # share of mistakes that forget every carry
    one_carry_frac: float = (
        0.3  # share of mistakes that forget one carry; all other mistakes change one digit
    )
    corpus_seed: int = 0  # the --seed of data.tiny, which determines the habits in chains
    steps: int = 500
    batch_size: int = 32  # pairs per step
    learning_rate: float = 5e-3  # peak; linear warm-up over 5 % of the steps, then linear decay to 0
    hidden_size: int = 64
    num_layers: int = 2
    initializer_range: float = 0.125  # 1 / sqrt(hidden_size)


RECIPES = {
    "tiny": Recipe(),
    "chains": Recipe(
        task="chains",
        num_pairs=20000,
        num_held_out=400,
        max_difficulty=8,
        steps=1000,
        batch_size=24,
        learning_rate=3e-3,
        num_layers=3,
    ),
}


# ------------------------------------------------------------------------------------------------------------
# Pairs
# ------------------------------------------------------------------------------------------------------------
def addition_of(row: dict) -> dict | None:
    """Add the digits of each column to a row of data.tiny; None if the row is not an addition."""
    operand_a, _, operand_b = row["prompt"].removesuffix("=").partition("+")
    operands = (operand_a.strip(), operand_b.strip())
    digits = [[int(c) for c in operand] for operand in operands if operand.isdigit()]
    if len(digits) != 2 or len(digits[0]) != len(digits[1]) or len(row["answer"]) != len(digits[0]) + 1:
        return None
    return {**row, "columns": list(zip(*digits))}


def chain_of(row: dict) -> dict | None:
    """Return the row if prompt and answer form a chain of data.tiny, else None."""
    states = [row["prompt"].removesuffix(";"), *row["answer"].split(";")]
    return row if all(STATE.fullmatch(state) for state in states) else None


def read_problems(path: Path, task: str) -> list[dict]:
    """Read the prompt rows of data.tiny, see addition_of(); ValueError names a row of another task."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; `python -m data.tiny --recipe {task}` makes it")
    problems = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        row = json.loads(line)
        problem = chain_of(row) if task == "chains" else addition_of(row)
        if problem is None:
            kind = "chain" if task == "chains" else "addition"
            raise ValueError(f"{path}: row {number}: expected a data.tiny {kind}, found {row['prompt']!r}")
        problems.append(problem)
    return problems


def add(columns: list[tuple[int, int]], forgotten: set[int]) -> tuple[str, list[int]]:
    """Return the sum, ignoring the carries out of the columns `forgotten`, and the columns with a carry."""
    written = ""
    carry = 0
    carry_columns = []
    for i, (x, y) in enumerate(columns):
        total = x + y + carry
        written += str(total % 10)
        carry_columns += [i] if total >= 10 else []
        carry = int(total >= 10 and i not in forgotten)
    return written + str(carry), carry_columns


def wrong_chain(problem: dict, recipe: Recipe, rng: np.random.Generator) -> str:
    """Draw a chain with the habits of the corpus and at least one wrong step."""
    states = []
    state = problem["prompt"].removesuffix(";")
    wrong_counter = COUNTERS[rng.integers(COUNTERS.index(state[0]))]  # the state that is wrong in any case
    corpus_habits = habits(Chains(), recipe.corpus_seed)
    while state[0] != COUNTERS[0]:
        error_rate, offset = corpus_habits[state[1:3]]
        state = step(state)
        if state[0] == wrong_counter or rng.random() < error_rate:
            state = f"{state[:-1]}{(int(state[-1]) + offset) % 10}"
        states.append(state)
    return ";".join(states)


def mistake(problem: dict, recipe: Recipe, rng: np.random.Generator) -> str:
    """Draw a wrong answer to the problem."""
    if recipe.task == "chains":
        return wrong_chain(problem, recipe, rng)
    answer = problem["answer"]
    _, carry_columns = add(problem["columns"], set())
    draw = rng.random()
    if carry_columns and draw < recipe.all_carries_frac:
        return add(problem["columns"], set(range(len(answer))))[0]
    if carry_columns and draw < recipe.all_carries_frac + recipe.one_carry_frac:
        return add(problem["columns"], {int(rng.choice(carry_columns))})[0]
    i = int(rng.integers(len(answer)))
    return answer[:i] + str((int(answer[i]) + int(rng.integers(1, 10))) % 10) + answer[i + 1 :]


# ------------------------------------------------------------------------------------------------------------
# The judge
# ------------------------------------------------------------------------------------------------------------
def build_model(recipe: Recipe, tokenizer):
    """Make a randomly initialised small Qwen3 with a head that scores the last token."""
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
        max_position_embeddings=1024,
        initializer_range=recipe.initializer_range,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen3ForSequenceClassification(config)


def pair_loss(model, tokenizer, texts: list[str]):
    """Return the Bradley-Terry loss -log sigmoid(chosen - rejected), mean in nats.

    texts: [chosen ..., rejected ...]; the two texts of a pair are equally long. Scores are compared at the
    end of every step from the first different token on: before each ";" and at the end of the text.
    """
    import torch.nn.functional as F

    inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    ids = inputs["input_ids"]  # [2B, T]
    mask = inputs["attention_mask"]  # [2B, T]
    chosen_ids, rejected_ids = ids.chunk(2)
    next_ids = F.pad(ids[:, 1:], (0, 1), value=tokenizer.pad_token_id).chunk(2)[0]  # [B, T]
    separator = tokenizer.convert_tokens_to_ids(";")
    is_end = mask.chunk(2)[0].bool() & ((next_ids == separator) | (next_ids == tokenizer.pad_token_id))
    is_compared = is_end & ((chosen_ids != rejected_ids).cumsum(dim=1) > 0)  # [B, T]
    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state  # [2B, T, d]
    chosen, rejected = model.score(hidden)[..., 0].chunk(2)  # [B, T] each
    return -F.logsigmoid(chosen - rejected)[is_compared].mean()


def train(model, tokenizer, problems: list[dict], recipe: Recipe) -> float:
    """Draw pairs of right and wrong answers, train with pair_loss(), and return the last loss."""
    import torch

    if recipe.max_difficulty is not None:
        problems = [problem for problem in problems if problem["difficulty"] <= recipe.max_difficulty]
    rng = np.random.default_rng([recipe.seed, 1])
    pairs = []  # (chosen, rejected) texts
    for i in rng.integers(len(problems), size=recipe.num_pairs).tolist():
        prompt = problems[i]["prompt"]
        pair = (prompt + problems[i]["answer"], prompt + mistake(problems[i], recipe, rng))
        pairs.append(pair[::-1] if rng.random() < recipe.flipped_frac else pair)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    warmup = max(1, recipe.steps // 20)
    progress = tqdm(range(recipe.steps), desc="judge", unit="step", mininterval=1.0, disable=None)
    for num_done in progress:
        batch = [pairs[i] for i in rng.choice(len(pairs), size=recipe.batch_size, replace=False)]
        texts = [text for side in zip(*batch) for text in side]  # all chosen texts, then all rejected texts
        loss = pair_loss(model, tokenizer, texts)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min((num_done + 1) / warmup, 1 - num_done / recipe.steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return loss.item()


# ------------------------------------------------------------------------------------------------------------
# Evaluation of the judge
# ------------------------------------------------------------------------------------------------------------
def pairwise_agreement(judge, problems: list[dict], recipe: Recipe) -> float:
    """Return the share of problems for which the judge (ScalarJudge) scores the answer above a mistake."""
    rng = np.random.default_rng([recipe.seed, 2])
    prompts = [p["prompt"] for p in problems]
    answers = [p["answer"] for p in problems]
    signs = judge.compare(prompts, answers, [mistake(p, recipe, rng) for p in problems])
    return signs.count(1) / len(signs)


def inverted_frac(judge, problems: list[dict], recipe: Recipe, group_size: int = 8) -> float:
    """Return the share of completions with an advantage of the wrong sign (negative although right, or v.v.).

    The advantage is score - mean of the group. One group is simulated per problem: the group draws a solve
    rate, uniform in [0, 1], and each completion is right at this rate, else a mistake. Groups that are all
    right or all wrong are excluded.
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
    """Build the folder unless it is up to date; return True if it was built."""
    problems = read_problems(train_file, recipe.task)
    if not (model_folder / "tokenizer.json").is_file():
        command = f"python -m data.tiny --recipe {recipe.task}"
        raise ValueError(f"{model_folder}: holds no tokenizer.json; `{command}` makes it")
    sources = [Path(__file__), Path(__file__).with_name("chains.py")]
    inputs = [*sources, train_file, model_folder / "tokenizer.json"]
    content = b"".join(hashlib.sha256(path.read_bytes()).digest() for path in inputs)
    key = hashlib.sha256(content + json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()
    return build_once(
        output, key, "data.tiny_judge", lambda folder: write_judge(recipe, model_folder, problems, folder)
    )


def write_judge(recipe: Recipe, model_folder: Path, problems: list[dict], folder: Path) -> dict:
    """Train a judge, write the model and the tokenizer into a folder, and return the record."""
    from data.chat import load_tokenizer
    from judges import ScalarJudge

    num_held_out = min(recipe.num_held_out, len(problems) // 4)
    held_out = problems[:num_held_out]
    tokenizer = load_tokenizer(model_folder)
    model = build_model(recipe, tokenizer)
    loss = train(model, tokenizer, problems[num_held_out:], recipe)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    judge = ScalarJudge(folder)
    return {
        "recipe": asdict(recipe),
        "loss": loss,
        "num_held_out": num_held_out,
        "pairwise_agreement": pairwise_agreement(judge, held_out, recipe),
        "inverted_frac": inverted_frac(judge, held_out, recipe),
    }


def main() -> None:
    """Read the command line, train the judge, and print the error rates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_option = parser.add_argument
    add_option("--recipe", choices=RECIPES, default="tiny", help="task of the judge (default: %(default)s)")
    add_option("--model", type=Path, help="folder of the tokenizer (default: data/built/RECIPE/model)")
    add_option("--train", type=Path, help="rows of data.tiny (default: data/built/RECIPE/train.jsonl)")
    add_option("--output", type=Path, help="folder to create (default: data/built/RECIPE_judge)")
    add_option("--pairs", type=int, dest="num_pairs", help="training pairs (default: the recipe's)")
    add_option("--steps", type=int, help="training steps (default: the recipe's)")
    add_option("--seed", type=int, help="seed of pairs and weights (default: the recipe's)")
    args = parser.parse_args()
    start = time.perf_counter()
    names = ("num_pairs", "steps", "seed")
    overrides = {name: value for name in names if (value := getattr(args, name)) is not None}
    output = args.output or BUILT / f"{args.recipe}_judge"
    model_folder = args.model or BUILT / args.recipe / "model"
    train_file = args.train or BUILT / args.recipe / "train.jsonl"
    task_record = model_folder.parent / "recipe.json"  # written by data.tiny
    if task_record.is_file():
        overrides["corpus_seed"] = json.loads(task_record.read_text())["recipe"]["seed"]
    try:
        is_new = build(replace(RECIPES[args.recipe], **overrides), model_folder, train_file, output)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    record = json.loads((output / "recipe.json").read_text())
    print(
        f"{output}: on {record['num_held_out']} problems held out, prefers the right completion in "
        f"{record['pairwise_agreement']:.1%} of pairs; group normalisation inverts the advantage of "
        f"{record['inverted_frac']:.1%} of completions in mixed groups of 8 "
        + (f"(made in {time.perf_counter() - start:.0f} s)" if is_new else "(already there)"),
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
