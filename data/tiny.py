"""Make the built-in tasks: a character tokenizer, prompts, and a tiny Qwen3-MoE with a warm start.

    python -m data.tiny --recipe deep     # makes data/built/deep/{model,train.jsonl,test.jsonl}
    python -m data.tiny --recipe chains_3 --model experiments/starts/chains_3     # with a kept model
    python -m data.tiny --recipe chains --output data/built/mine      # a new warm start for long chains

A folder that is up to date is not rebuilt. Prompts are the same on every machine, warm starts are not: so a
recipe whose start is kept (experiments/starts.py) is trained anew only in another folder than its own, and
`bash experiments/prepare.sh habits chains_3` builds folders with the kept models.

Task. Additions, for example "21   +43   =" -> "640" (12 + 34 = 046). Both numbers have the same number of
digits, from 1 to 5, which is the difficulty. The least significant digit comes first, so that a carry is
known when the next digit is written. Numbers are padded to one width, so that a digit always has the same
position. The sum has one digit more than the operands.

Warm start. RL amplifies the latent knowledge of a base model, and a randomly initialised model has none. The
tiny model is therefore trained on a corpus of mixed quality, like the corpus of a base model: most answers
forget every carry. The model then answers wrongly by habit and rightly now and then (pass@8 far above
pass@1). Longer numbers are rarer in the corpus, and sums of many digits have more chances for a mistake. Some
prompts are therefore solved from the start and some are out of reach, and both kinds of zero-variance groups
occur.

Recipe "habits". Forgetting carries is a single habit, which RL unlearns within 25 steps: too easy to compare
methods that differ in wasted rollouts. This recipe has many habits. Of the 100 digit pairs, the corpus always
adds 40 correctly. Each of the other 60 pairs is added with a fixed wrong offset and with an error rate from
0.3 to 0.8. RL has to unlearn every pair separately, so that accuracy rises slowly. The training set imitates
the prompt pool of a large model, with 0.7 to 0.8 of the groups without variance: 0.3 of the prompts are sums
of correct pairs, solved from the start; 0.4 are products, which are missing in the corpus and out of reach;
0.3 are sums with bad pairs, which RL can learn. The held-out set has sums only. Model and sums are small, for
a run of about a minute on one core.

Recipe "deep". The additions of "habits" for a model with 8 layers and 4 active of 32 experts. A token is
routed to 32 experts in total (4 in each of 8 layers) instead of 4, so that trainer and engine disagree about
routes as often as in large models.

Recipe "habits_teacher". A teacher for the student "habits" (teacher.path): the same prompts and
model size, but a corpus with fewer mistakes, half of which consists of right products. The teacher still
makes mistakes of the same kinds. Recipe "chains_teacher" does the same for "chains": one of the three strong
habits remains, and weak habits are a third as frequent.

Recipe "chains". Another task, see data/chains.py: chains of 125 tokens on average. "chains_gpu" is the same
task for one GPU, with longer programs and a model of 8 layers and 13 million parameters.

Task instances. RECIPE_SEED is a recipe with another seed: other habits, prompts, held-out prompts and start
weights. Studies that vary the task use several instances, for example habits, habits_1 and habits_2.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

import data.chains
import verifiers.chain
from data.chains import Chains, corpus_batch, sample_sets

OUTPUT = Path("data/built")
STARTS = Path("experiments/starts")


@dataclass(frozen=True)
class Recipe:
    """All parameters of the built files; the cache key hashes the recipe and the source code of this file."""

    seed: int = 0
    max_digits: int = 5  # difficulty range of train.jsonl and test.jsonl
    train_per_difficulty: int = 2000  # distinct problems; there are only 100 with 1 digit
    test_per_difficulty: int = 100
    corpus_weights: tuple[float, ...] = (0.1, 0.25, 0.3, 0.25, 0.1)  # share of each difficulty in the corpus
    forget_carry_frac: float = 0.65  # share of corpus answers that ignore all carries
    num_bad_pairs: int = 0  # number of digit pairs, out of 100, that the corpus tends to add wrongly
    right_frac: tuple[float, float] = (1.0, 1.0)  # range of the accuracy on bad pairs, geometrically spaced
    product_frac: float = 0.0  # share of right products of two-digit numbers in the corpus
    pool: tuple[int, int, int] | None = None  # training prompts: solved sums, sums with bad pairs, products
    steps: int = 600
    batch_size: int = 128  # problems per warm-start step
    learning_rate: float = 3e-3  # peak; linear warm-up over 5 % of the steps, then linear decay to 0
    hidden_size: int = 128
    num_layers: int = 2
    num_experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 128
    initializer_range: float = 0.09  # 1 / sqrt(hidden_size); the usual 0.02 learns nothing in 600 steps
    max_positions: int = 512  # tokens of a prompt and its completion together
    chains: Chains | None = None  # the task, replacing additions and ignoring their parameters


HABITS = Recipe(
    max_digits=4,
    test_per_difficulty=40,
    corpus_weights=(0.1, 0.3, 0.3, 0.3),
    forget_carry_frac=0.0,
    num_bad_pairs=60,
    right_frac=(0.2, 0.7),
    pool=(360, 360, 480),
    steps=800,
    hidden_size=64,
    expert_width=64,
    initializer_range=0.125,
)
CHAINS = Recipe(
    chains=Chains(),
    steps=800,
    learning_rate=5e-3,
    hidden_size=64,
    num_layers=4,
    num_experts=16,
    experts_per_token=4,
    expert_width=32,
    initializer_range=0.125,
)
RECIPES = {
    "tiny": Recipe(),
    "habits": HABITS,
    "habits_teacher": replace(HABITS, right_frac=(0.45, 0.97), product_frac=0.5, steps=3200),
    "deep": replace(HABITS, num_layers=8, num_experts=32, experts_per_token=4, expert_width=32),
    "chains": CHAINS,
    "chains_teacher": replace(
        CHAINS, chains=Chains(num_strong=1, strong_frac=(0.6, 0.6), num_weak=12, weak_frac=(0.03, 0.06))
    ),
    "chains_gpu": replace(
        CHAINS,
        chains=Chains(program_size=6, short_steps=(2, 6), batch_tokens=16000),
        steps=3000,
        learning_rate=2e-3,
        hidden_size=256,
        num_layers=8,
        num_experts=32,
        expert_width=64,
        initializer_range=0.0625,
        max_positions=1024,
    ),
}


def recipe_of(name: str) -> Recipe:
    """Return a recipe by name, for example habits, or with another seed, for example habits_3."""
    task, _, seed = name.rpartition("_")
    if task in RECIPES and seed.isdecimal():
        return replace(RECIPES[task], seed=int(seed))
    if name not in RECIPES:
        raise ValueError(f"--recipe {name}: unknown recipe, choose among {', '.join(RECIPES)} or RECIPE_SEED")
    return RECIPES[name]


# ------------------------------------------------------------------------------------------------------------
# Tokenizer and task
# ------------------------------------------------------------------------------------------------------------
def build_tokenizer():
    """Make a Hugging Face tokenizer with one token per printable ASCII character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=512,
    )


def problem(a: int, b: int, digits: int, width: int) -> dict:
    """Return the prompt row of an addition of two numbers with `digits` digits."""
    operands = [f"{n:0{digits}d}"[::-1].ljust(width) for n in (a, b)]
    answer = f"{a + b:0{digits + 1}d}"[::-1]
    return {"prompt": "+".join(operands) + "=", "answer": answer, "kind": "exact", "difficulty": digits}


def product(a: int, b: int, width: int) -> dict:
    """Return the prompt row of a product of two numbers of two digits."""
    row = problem(a, b, 2, width)
    return row | {"prompt": row["prompt"].replace("+", "*"), "answer": f"{a * b:04d}"[::-1]}


def answer_without_carry(a: int, b: int, digits: int) -> str:
    """Return the sum of the digits of each column modulo 10: the common mistake in the corpus."""
    columns = zip(f"{a:0{digits}d}"[::-1], f"{b:0{digits}d}"[::-1])
    return "".join(str((int(x) + int(y)) % 10) for x, y in columns) + "0"


def pair_habits(recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Draw the error rate and the wrong offset of each digit pair in the corpus, both [10, 10]."""
    rng = np.random.default_rng([recipe.seed, 2_000])
    wrong_frac = np.zeros(100)
    offset = rng.integers(1, 10, size=100)
    bad_pairs = rng.permutation(100)[: recipe.num_bad_pairs]
    wrong_frac[bad_pairs] = 1 - np.geomspace(*recipe.right_frac, recipe.num_bad_pairs)
    return wrong_frac.reshape(10, 10), offset.reshape(10, 10)


def answer_by_pairs(a: int, b: int, digits: int, wrong_frac, offset, rng) -> str:
    """Return the sum with random wrong digits, at the error rates of the pairs; carries stay right."""
    written = [int(digit) for digit in f"{a + b:0{digits + 1}d}"[::-1]]
    columns = zip(f"{a:0{digits}d}"[::-1], f"{b:0{digits}d}"[::-1])
    for i, (x, y) in enumerate(columns):
        if rng.random() < wrong_frac[int(x), int(y)]:
            written[i] = (written[i] + offset[int(x), int(y)]) % 10
    return "".join(map(str, written))


def pool_of(recipe: Recipe, sums: list[dict]) -> list[dict]:
    """Choose solved, learnable and hopeless training prompts, in the numbers of recipe.pool."""
    wrong_frac, _ = pair_habits(recipe)
    rng = np.random.default_rng([recipe.seed, 3_000])
    solved = []
    learnable = []
    for i in rng.permutation(len(sums)):
        operand_a, operand_b = sums[i]["prompt"].rstrip("=").split("+")
        pairs = zip(operand_a.strip(), operand_b.strip())
        has_bad_pair = any(wrong_frac[int(x), int(y)] for x, y in pairs)
        (learnable if has_bad_pair else solved).append(sums[i])
    products = {}
    for a, b in rng.integers(10, 100, size=(4 * recipe.pool[2], 2)).tolist():
        row = product(a, b, recipe.max_digits)
        products.setdefault(row["prompt"], row)
    kinds = zip((solved, learnable, list(products.values())), recipe.pool)
    return [row for rows, size in kinds for row in rows[:size]]


def sample_problems(recipe: Recipe) -> tuple[list[dict], list[dict]]:
    """Return disjoint, shuffled rows (train, test), determined by the recipe."""
    train = []
    test = []
    for digits in range(1, recipe.max_digits + 1):
        rng = np.random.default_rng([recipe.seed, digits])
        num_rows = recipe.train_per_difficulty + recipe.test_per_difficulty
        distinct = {}
        # Draws of few digits repeat, for example 1-digit pairs; 4 x num_rows draws cover nearly all pairs.
        for a, b in rng.integers(10**digits, size=(4 * num_rows, 2)).tolist():
            row = problem(a, b, digits, recipe.max_digits)
            distinct.setdefault(row["prompt"], row)
        rows = list(distinct.values())[:num_rows]
        num_test = min(recipe.test_per_difficulty, len(rows) // 4)
        test += rows[:num_test]
        train += rows[num_test:]
    if recipe.pool:
        train = pool_of(recipe, train)
    rng = np.random.default_rng([recipe.seed, 0])
    return [train[i] for i in rng.permutation(len(train))], [test[i] for i in rng.permutation(len(test))]


# ------------------------------------------------------------------------------------------------------------
# Warm start
# ------------------------------------------------------------------------------------------------------------
def build_policy(recipe: Recipe, vocab_size: int):
    """Make a randomly initialised tiny Qwen3-MoE with tied embeddings."""
    from transformers import Qwen3MoeConfig

    from moe_model import Policy, random_weights

    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=4 * recipe.hidden_size,
        moe_intermediate_size=recipe.expert_width,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=recipe.num_experts,
        num_experts_per_tok=recipe.experts_per_token,
        norm_topk_prob=True,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        initializer_range=recipe.initializer_range,
        eos_token_id=1,
        pad_token_id=0,
    )
    policy = Policy(config)
    random_weights(policy, recipe.seed)
    return policy


def additions_batch(recipe: Recipe, rng, held_out: set[str]) -> tuple[list[str], list[str]]:
    """Draw the prompts and answers of a warm-start step, with the mistakes of the corpus."""
    wrong_frac, offset = pair_habits(recipe)
    prompts = []
    answers = []
    while len(prompts) < recipe.batch_size:
        if recipe.product_frac and rng.random() < recipe.product_frac:
            row = product(*rng.integers(10, 100, size=2).tolist(), recipe.max_digits)
            prompts.append(row["prompt"])
            answers.append(row["answer"])
            continue
        digits = int(rng.choice(recipe.max_digits, p=recipe.corpus_weights)) + 1
        a, b = rng.integers(10**digits, size=2).tolist()
        row = problem(a, b, digits, recipe.max_digits)
        if row["prompt"] in held_out:
            continue
        prompts.append(row["prompt"])
        if recipe.num_bad_pairs:
            answers.append(answer_by_pairs(a, b, digits, wrong_frac, offset, rng))
        else:
            forget = rng.random() < recipe.forget_carry_frac
            answers.append(answer_without_carry(a, b, digits) if forget else row["answer"])
    return prompts, answers


def warm_start(policy, tokenizer, recipe: Recipe, held_out: set[str]) -> float:
    """Train the policy on the corpus of mixed quality; return the last loss in nats per token."""
    import torch

    from moe_model import pack

    rng = np.random.default_rng([recipe.seed, 1_000])
    policy.logprob_kernel = "naive"  # the weights must not depend on the rounding of a kernel
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    warmup = max(1, recipe.steps // 20)
    progress = tqdm(range(recipe.steps), desc="warm start", unit="step", mininterval=1.0, disable=None)
    for step in progress:
        if recipe.chains:
            fraction_done = step / recipe.steps
            prompts, answers = corpus_batch(recipe.chains, recipe.seed, fraction_done, rng, held_out)
        else:
            prompts, answers = additions_batch(recipe, rng, held_out)
        completions = [
            ids if answer.endswith(";") else [*ids, tokenizer.eos_token_id]  # no EOS after a cut chain
            for answer, ids in zip(answers, tokenizer(answers)["input_ids"])
        ]
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min((step + 1) / warmup, 1 - step / recipe.steps)
        logprobs, *_ = policy(pack(tokenizer(prompts)["input_ids"], completions, "cpu"))
        loss = -logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return loss.item()


def build(recipe: Recipe, output: Path, model: Path | None = None) -> bool:
    """Build the folder unless it is up to date; return True if it was built.

    model: folder of a model to copy in place of a warm start; ValueError without weights in it.
    """
    weights = sorted(model.glob("*.safetensors")) if model else []
    if model and not weights:
        raise ValueError(f"--model {model} holds no *.safetensors file")
    files = (Path(__file__), Path(data.chains.__file__), Path(verifiers.chain.__file__))
    source = b"".join(file.read_bytes() for file in (files if recipe.chains else files[:1]))
    source += b"".join(hashlib.sha256(file.read_bytes()).digest() for file in weights)
    key = hashlib.sha256(source + json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()
    return build_once(output, key, "data.tiny", lambda folder: write_task(recipe, folder, model))


def build_once(output: Path, key: str, tool: str, write: Callable[[Path], dict]) -> bool:
    """Build a folder unless the folder has the same key; return True if it was built.

    A folder with another key is replaced if the same tool has built it, for example "data.tiny". Any other
    folder holds other work, for example a policy, and is refused with ValueError. write(folder) writes the
    files and returns a record, which is saved as recipe.json together with the key. Processes that build the
    same folder wait for each other. The folder is renamed last, so that the rest of a killed build is not
    taken for a complete folder.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.with_name(f".{output.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = output / "recipe.json"
        earlier = json.loads(file.read_text()) if file.is_file() else {}
        if earlier.get("key") == key:
            return False
        is_replaced = bool(earlier) and earlier.get("tool", tool) == tool
        if not is_replaced and output.exists() and any(output.iterdir()):
            raise ValueError(
                f"{output} is not empty and was not built by {tool}: remove it or choose another folder"
            )
        partial = output.with_name(f"{output.name}.{os.getpid()}.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        record = {"key": key, "tool": tool} | write(partial)
        (partial / "recipe.json").write_text(json.dumps(record, indent=1))
        shutil.rmtree(output, ignore_errors=True)
        partial.rename(output)
    return True


def write_task(recipe: Recipe, folder: Path, model: Path | None) -> dict:
    """Write the prompts, the tokenizer and the model into a folder; return the record."""
    from moe_model import save_hf

    if recipe.chains:
        sets = sample_sets(recipe.chains, recipe.seed)
    else:
        sets = dict(zip(("train", "test"), sample_problems(recipe)))
    for name, rows in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {f"num_{name}": len(rows) for name, rows in sets.items()}
    if model:
        shutil.copytree(model, folder / "model", ignore=shutil.ignore_patterns("start.json"))
        return {"recipe": asdict(recipe), "model": str(model), **sizes}
    tokenizer = build_tokenizer()
    policy = build_policy(recipe, len(tokenizer))
    held_out = {row["prompt"] for name, rows in sets.items() if name != "train" for row in rows}
    loss = warm_start(policy, tokenizer, recipe, held_out)
    save_hf(policy, folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return {"recipe": asdict(recipe), "loss": loss, **sizes}


def check_start(name: str) -> None:
    """Raise ValueError if the start of a recipe is kept, because a new one would have other weights."""
    if (STARTS / name / "start.json").is_file():
        raise ValueError(
            f"the start {name} is kept, and a new one would have other weights: `python -m "
            f"experiments.starts get {name}` brings it, and `bash experiments/prepare.sh {name}` builds "
            f"{OUTPUT / name} with it; --output FOLDER trains a new one"
        )


def main() -> None:
    """Read the command line, build the folder of a recipe, and print a summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipe", default="tiny", metavar="RECIPE[_SEED]",
        help=f"task to make: {', '.join(RECIPES)}; with _SEED another instance (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, help=f"folder to create (default: {OUTPUT}/RECIPE)")
    parser.add_argument("--steps", type=int, help="warm-start steps (default: the recipe's)")
    parser.add_argument("--seed", type=int, help="seed of tasks and weights (default: the recipe's)")
    parser.add_argument("--model", type=Path, help="copy the model of this folder in place of a warm start")
    args = parser.parse_args()
    overrides = {name: value for name in ("steps", "seed") if (value := getattr(args, name)) is not None}
    output = args.output or OUTPUT / args.recipe
    try:
        recipe = replace(recipe_of(args.recipe), **overrides)
        if not (args.model or args.output or overrides):
            check_start(args.recipe)
        start = time.perf_counter()
        is_new = build(recipe, output, args.model)
    except ValueError as error:
        parser.error(str(error))
    record = json.loads((output / "recipe.json").read_text())
    print(
        f"{output}: {record['num_train']} train and {record['num_test']} test problems, "
        + (f"warm-start loss {record['loss']:.3f} " if "loss" in record else f"model of {record['model']} ")
        + (f"(made in {time.perf_counter() - start:.0f} s)" if is_new else "(already there)"),
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
