"""Measure a GRPO step of a pretrained model here and in TRL, and compare the update with its products alone.

    python -m data.smollm2 && python -m data.instructions
    python -m data.upcycle --model data/built/smollm2/dense --experts 4 --top-k 2 \\
        --output data/built/smollm2/moe
    python -m experiments.bench.real_step --trl-python trl_venv/bin/python --json real_step.json
    python -m experiments.bench.real_step --trainers dense moe --max-new-tokens 16

The environment of TRL has the packages of requirements-cpu.txt and experiments/bench/requirements-trl.txt. A
step has 8 prompts x 8 completions of at most 96 tokens, one update at a learning rate of 2e-5, and the reward
of verifiers/instructions.py. These trainers take turns, in reverse order in every second round:
    dense     train_rl.py, SmolLM2-135M, two ranks with one thread each, micro-batches of the default size.
    moe       train_rl.py, the same model upcycled to 4 experts of which a token uses 2, model.ep_size=2.
    moe_lora  moe with lora.rank=8 on attention and experts; only if named.
    trl       TRL's GRPOTrainer on the dense model with transformers' generate: one process, two threads, four
              micro-batches of 16 completions; everything in float32.
    trl_bf16  the same with TRL's bf16=True: float32 weights, products in bfloat16.
Our policies and our engine have the dtypes that auto takes on the processor (--dtype and rollout.dtype=DTYPE
take others); the record names both. The number of a round is the seed of its trainers, so rounds differ in
prompts and lengths. A figure is the median over the steps of a run after the first; the table shows the
median over rounds and the range. Ratios are computed within a round.

The bound of an update is the time of its matrix products: the floating-point operations (FLOP) of both ranks,
divided by the sum of the rates at which the ranks multiply in the dtype of our policies. product_flop()
counts the linear layers and the head for the tokens that the update computes, with a shared prompt counted
once. It leaves out the products of attention (about 2 % at these lengths) and second computations.
The ranks measure their rates at the same time, before and after every update, because the speed of a shared
host drifts; the seconds of this are subtracted from the step and the update.
results.update_over_bound of the record is {trainer: update / bound, the median over rounds}.

The bound of a rollout is the time of the products of its generated tokens, in the dtype of our engine, at the
rates of ranks that multiply 32 rows with as many weights as the dense model has, measured after the rollout.
So it contains reading the weights once per 32 tokens. It leaves out prompts, attention and sampling, and
counts 32 rows also after most completions have ended.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from experiments.bench.common import ROOT, make_parser, markdown, spread, torchrun, with_range, write_results
from runtime.provenance import versions_of

TRAINERS = ("dense", "moe", "moe_lora", "trl", "trl_bf16")
TRL_TRAINERS = TRAINERS[3:]
BESIDE_TRL = ("dense", "moe", *TRL_TRAINERS)
NUM_PROMPTS = 8
GROUP_SIZE = 8
NUM_RANKS = 2
LEARNING_RATE = 2e-5
WARMUP_STEPS = 1
MODELS = ROOT / "data" / "built" / "smollm2"
PROMPTS = ROOT / "data" / "built" / "instructions" / "train.jsonl"
OWN_SETTINGS = {
    "dense": ("model.ep_size=1", "train.fused_adamw=true"),
    "moe": ("model.ep_size=2", "train.fused_adamw=true", "train.micro_batch_tokens=1280"),
}
OWN_SETTINGS["moe_lora"] = (*OWN_SETTINGS["moe"], "lora.rank=8")
RATE_SHAPE = (1024, 576, 3072)  # rows, inputs and outputs: an MLP of the model, tokens of a micro-batch
LORA_FIGURES = ("update", "sync", "peak_gib")  # that adapters change


# ------------------------------------------------------------------------------------------------------------
# The bound of an update
# ------------------------------------------------------------------------------------------------------------
def parameter_uses(config) -> tuple[float, int]:
    """Return the parameters in matrix products (per computed token, per predicted token).

    A token uses every matrix of the layers, of the experts only top_k / num_experts, and the routers. The
    embedding is a lookup. The head is used once per predicted token.
    """
    import torch

    import moe_model

    with torch.device("meta"):
        policy = moe_model.Policy(config)
    matrices = {name: p.numel() for name, p in policy.model.layers.named_parameters() if p.dim() > 1}
    experts = sum(size for name, size in matrices.items() if ".experts." in name)
    others = sum(matrices.values()) - experts
    if experts:
        experts *= config.num_experts_per_tok / moe_model.num_experts_of(config)
    return others + experts, policy.lm_head.weight.numel()


def product_flop(config, tokens: dict[str, int], products: int = 3) -> float:
    """Return the floating-point operations of an update's matrix products.

        2 (products T + T') P + 2 (products N + N') V D

    T, N: tokens computed and predicted, forward and backward. T', N': the same of rows with a forward pass
    only. P: parameters that a token uses. V D: size of the head. A parameter costs a multiplication and an
    addition in each of three products: the forward pass and the gradients of inputs and of weights. Frozen
    weights have two; the products of adapters are left out.

    tokens: {"computed": T, "predicted": N, "forward_computed": T', "forward_predicted": N'}; 0 if absent.
    """
    per_computed, per_predicted = parameter_uses(config)
    computed = products * tokens.get("computed", 0) + tokens.get("forward_computed", 0)
    predicted = products * tokens.get("predicted", 0) + tokens.get("forward_predicted", 0)
    return 2 * (computed * per_computed + predicted * per_predicted)


def product_rate(dtype: str, repeats: int = 10) -> float:
    """Return the FLOP per second of this process's products, forward and backward; the median."""
    import torch

    rows, inputs, outputs = RATE_SHAPE
    numbers = {"dtype": getattr(torch, dtype)}
    x = torch.ones(rows, inputs, requires_grad=True, **numbers)  # no random numbers: runs keep theirs
    weight = torch.ones(outputs, inputs, requires_grad=True, **numbers)
    gradient = torch.ones(rows, outputs, **numbers)
    seconds = []
    for _ in range(repeats):
        x.grad = weight.grad = None
        start = time.perf_counter()
        with torch.enable_grad():
            torch.nn.functional.linear(x, weight).backward(gradient)
        seconds.append(time.perf_counter() - start)
    return 6 * rows * inputs * outputs / statistics.median(seconds)


def decoding_rate(dtype: str, repeats: int = 3) -> float:
    """Return the FLOP per second of a process that decodes: 32 rows times 150 matrices in turn; the median.

    Together the matrices have 133 M values, so that each product reads its weights from memory.
    """
    import torch

    rows, outputs = NUM_PROMPTS * GROUP_SIZE // NUM_RANKS, 1536
    x = torch.ones(rows, RATE_SHAPE[1], dtype=getattr(torch, dtype))
    weights = torch.ones(150, outputs, RATE_SHAPE[1], dtype=x.dtype)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for weight in weights:
            torch.nn.functional.linear(x, weight)
        seconds.append(time.perf_counter() - start)
    return 2 * rows * weights.numel() / statistics.median(seconds)


# ------------------------------------------------------------------------------------------------------------
# Ranks
# ------------------------------------------------------------------------------------------------------------
def train_and_count(args: argparse.Namespace) -> None:
    """Train on this rank; write the tokens and rates of each step to a file of this rank. Collective."""
    import torch

    import moe_model
    import train_rl as trainer
    from runtime.launch import leave, run

    torch.set_num_threads(1)
    steps_file = args.result.with_suffix(f".{os.environ['RANK']}")
    steps = []
    step_tokens = Counter()
    forward = moe_model.Policy.forward
    update_policy = trainer.update_policy

    def counted_forward(policy, packed, *args, **kwargs):
        kind = "" if torch.is_grad_enabled() else "forward_"
        step_tokens[f"{kind}computed"] += len(packed.input_ids)
        step_tokens[f"{kind}predicted"] += len(packed.target_ids)
        return forward(policy, packed, *args, **kwargs)

    def rate_beside_others(measure_rate: Callable[[str], float], dtype: str) -> float:
        """Return the rate of this rank while all ranks multiply. Collective."""
        torch.distributed.barrier()
        return measure_rate(dtype)

    def counted_update(*arguments, **kwargs):
        step_tokens.clear()  # of passes outside of updates
        start = time.perf_counter()
        decoding = rate_beside_others(decoding_rate, args.engine_dtype)
        before = rate_beside_others(product_rate, args.dtype)
        measuring = time.perf_counter() - start
        metrics = update_policy(*arguments, **kwargs)
        start = time.perf_counter()
        after = rate_beside_others(product_rate, args.dtype)
        measuring += time.perf_counter() - start
        rates = {"products": (before + after) / 2, "decoding": decoding}
        steps.append({"tokens": dict(step_tokens), "rates": rates, "measuring": measuring})
        steps_file.write_text(json.dumps(steps))
        return metrics

    moe_model.Policy.forward = counted_forward
    trainer.update_policy = counted_update
    leave(run(trainer.main, trainer.load_config, args.settings))


def is_followed(completions: list, answer: list[str], **columns) -> list[float]:
    """Return the share of instructions that each completion follows, as our trainer scores it."""
    from verifiers.instructions import verify

    return [verify(chat[0]["content"], constraints)[0] for chat, constraints in zip(completions, answer)]


def trl_config(args: argparse.Namespace, output: Path, **changes):
    """Return TRL's equivalent of the settings of our trainers, with changes, for example use_cpu=False."""
    from trl import GRPOConfig

    settings = dict(
        output_dir=str(output), max_steps=args.steps + WARMUP_STEPS, learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95, per_device_train_batch_size=16,
        gradient_accumulation_steps=NUM_PROMPTS * GROUP_SIZE // 16, num_generations=GROUP_SIZE,
        max_completion_length=args.max_new_tokens, temperature=1.0, loss_type="grpo", beta=0.0, epsilon=0.2,
        use_vllm=False, vllm_importance_sampling_correction=False, bf16=args.trainers == ["trl_bf16"],
        use_cpu=True, gradient_checkpointing=False, save_strategy="no", logging_steps=1, report_to="none",
        disable_tqdm=True, seed=args.seed, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    return GRPOConfig(**settings | changes)


def timed_training(
    model: Path, config, show: Callable[[list[float]], None] = lambda seconds: None
) -> dict[str, list[float]]:
    """Train with TRL on PROMPTS; return seconds, with generation, and mean completion length of each step.

    show: called after each step with the seconds of all steps so far.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    chats = [{"prompt": [{"role": "user", "content": r["prompt"]}], "answer": r["answer"]} for r in rows]
    start = [0.0]
    seconds = []
    lengths = []

    class Clock(TrainerCallback):
        """Measures the time of each step, including generation."""

        def on_step_begin(self, *_, **__):
            start[0] = start[0] or time.perf_counter()

        def on_step_end(self, *_, **__):
            seconds.append(time.perf_counter() - start[0])
            show(seconds)
            start[0] = time.perf_counter()

        def on_log(self, *_, logs: dict, **__):
            lengths.extend(value for key, value in logs.items() if key == "completions/mean_length")

    GRPOTrainer(
        model=str(model), reward_funcs=is_followed, args=config, train_dataset=Dataset.from_list(chats),
        callbacks=[Clock()],
    ).train()  # fmt: skip
    return {"seconds": seconds, "lengths": lengths}


def train_with_trl(args: argparse.Namespace) -> None:
    """Train with TRL in this process; write the seconds and mean completion lengths of the steps."""
    import torch

    torch.set_num_threads(NUM_RANKS)
    with tempfile.TemporaryDirectory() as scratch:
        figures = timed_training(args.dense, trl_config(args, Path(scratch)))
    figures["versions"] = versions_of("trl")
    args.result.write_text(json.dumps(figures))


# ------------------------------------------------------------------------------------------------------------
# Runs
# ------------------------------------------------------------------------------------------------------------
def run_to_the_end(command: list[str], num_threads: int) -> None:
    """Run a trainer; exit with the end of its output if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": str(num_threads), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"the run failed:\n{done.stderr[-4000:]}")


def run_ours(trainer: str, seed: int, args: argparse.Namespace, scratch: Path) -> list[dict[str, float]]:
    """Return the figures of each step of one run of train_rl.py."""
    from moe_model import load_config

    model = args.dense if trainer == "dense" else args.moe
    num_steps = args.steps + WARMUP_STEPS
    settings = [
        f"model.path={model.resolve()}", f"model.dtype={args.dtype}", f"rollout.dtype={args.engine_dtype}",
        f"data.train=[{{path: {PROMPTS}}}]", "data.chat=always", "data.eval=[]",
        f"rollout.prompts_per_step={NUM_PROMPTS}", f"rollout.group_size={GROUP_SIZE}",
        "rollout.max_prompt_tokens=128", f"rollout.max_new_tokens={args.max_new_tokens}",
        f"train.learning_rate={LEARNING_RATE}", f"train.num_steps={num_steps}", f"train.seed={seed}",
        "checkpoint.every=0", f"run.dir={scratch / 'run'}", *OWN_SETTINGS[trainer], *args.settings,
    ]  # fmt: skip
    result = scratch / "steps.json"
    options = ["--trainers", trainer, "--result", str(result)]
    options += ["--dtype", args.dtype, "--engine-dtype", args.engine_dtype]
    run_to_the_end([*torchrun(NUM_RANKS), "-m", "experiments.bench.real_step", *options, *settings], 1)
    ranks = [json.loads(result.with_suffix(f".{rank}").read_text()) for rank in range(NUM_RANKS)]
    rows = [json.loads(line) for line in (scratch / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "score" in row]
    peak = json.loads((scratch / "run" / "summary.json").read_text())["peak_rss_bytes"]
    config = load_config(model)
    products = 2 if trainer == "moe_lora" else 3
    figures = []
    for row, *of_ranks in zip(rows, *ranks, strict=True):
        generated = row["tokens_total"]
        decoded = {"forward_computed": generated, "forward_predicted": generated}
        flop = [product_flop(config, rank["tokens"], products) for rank in of_ranks]
        measuring = of_ranks[0]["measuring"]  # the trainer's clock is rank 0's
        figures.append({
            "step": row["seconds_per_step"] - measuring,
            "rollout": row["seconds/rollout"],
            "update": row["seconds/update"] - measuring,
            "sync": row["seconds/sync"],
            "tokens": generated,
            "peak_gib": peak / 2**30,
            "score": row["score"],
            "ranks": of_ranks,
            "flop": sum(flop),
            "decode_flop": product_flop(config, decoded),
            "busiest_rank": max(flop) * NUM_RANKS / (sum(flop) or 1),
        })  # fmt: skip
    return figures


def run_trl(trainer: str, seed: int, args: argparse.Namespace, scratch: Path) -> tuple[list[dict], dict]:
    """Return the figures of each step of one run of TRL, and the versions of TRL's environment."""
    result = scratch / "result.json"
    command = [
        str(args.trl_python), "-m", "experiments.bench.real_step", "--trainers", trainer,
        "--dense", str(args.dense), "--max-new-tokens", str(args.max_new_tokens),
        "--steps", str(args.steps), "--seed", str(seed), "--result", str(result),
    ]  # fmt: skip
    run_to_the_end(command, NUM_RANKS)
    run = json.loads(result.read_text())
    figures = [
        {"step": seconds, "tokens": length * NUM_PROMPTS * GROUP_SIZE}
        for seconds, length in zip(run["seconds"], run["lengths"])
    ]
    return figures, run["versions"]


def measure(args: argparse.Namespace) -> dict:
    """Run the trainers in turns; return the environment and the steps of all rounds."""
    environment = {"policy_dtype": args.dtype, "engine_dtype": args.engine_dtype}
    environment |= {"max_new_tokens": args.max_new_tokens, "settings": args.settings}
    data = {"environment": environment, "rounds": []}
    for number in range(args.repeats):
        order = args.trainers if number % 2 == 0 else args.trainers[::-1]
        runs = {}
        for trainer in order:
            with tempfile.TemporaryDirectory() as scratch:
                if trainer in TRL_TRAINERS:
                    runs[trainer], trl_versions = run_trl(trainer, number, args, Path(scratch))
                    data["environment"]["trl_versions"] = trl_versions
                else:
                    runs[trainer] = run_ours(trainer, number, args, Path(scratch))
            seconds = ", ".join(f"{step['step']:.1f}" for step in runs[trainer])
            print(f"round {number + 1}, {trainer}: steps of {seconds} s", flush=True)
        data["rounds"].append({"order": list(order), "runs": runs})
        data["update_over_bound"] = update_over_bound(data)
        write_results(args.json, data)  # a stopped benchmark keeps its finished rounds
    return data


# ------------------------------------------------------------------------------------------------------------
# Tables
# ------------------------------------------------------------------------------------------------------------
def round_figures(steps: list[dict]) -> dict[str, float]:
    """Return the medians over the steps after the first."""
    rows = []
    for step in steps[WARMUP_STEPS:]:
        row = {name: value for name, value in step.items() if name != "ranks"}
        row["tokens_per_s"] = step["tokens"] / step["step"]
        if "ranks" in step:
            rates = Counter()
            for rank in step["ranks"]:
                rates.update(rank["rates"])
            row |= {f"{name}_rate": rate / NUM_RANKS / 1e9 for name, rate in rates.items()}
            row["rollout_bound"] = step["decode_flop"] / rates["decoding"]
            row["rollout_over_bound"] = step["rollout"] / row["rollout_bound"]
            if step["flop"]:  # an update without a row with gradient has no products
                row["bound"] = step["flop"] / rates["products"]
                row["over_bound"] = step["update"] / row["bound"]
                row["over_busiest"] = row["over_bound"] / step["busiest_rank"]
        rows.append(row)
    names = {name for row in rows for name in row}
    return {name: statistics.median(row[name] for row in rows if name in row) for name in names}


def summary(data: dict) -> dict[str, dict]:
    """Return {trainer: {figure: spread over rounds}}, with ratios computed within a round."""
    values = {}  # {trainer: {figure: [value of each round]}}
    for this_round in data["rounds"]:
        figures = {trainer: round_figures(steps) for trainer, steps in this_round["runs"].items()}
        for other in figures.keys() & set(TRL_TRAINERS):
            for own in (figures[name] for name in figures if name not in TRL_TRAINERS):
                own[f"{other}_over_step"] = figures[other]["step"] / own["step"]
                own[f"rate_over_{other}"] = own["tokens_per_s"] / figures[other]["tokens_per_s"]
        if {"dense", "moe"} <= figures.keys():
            moe = figures["moe"]
            moe["over_arithmetic"] = moe["over_bound"] / figures["dense"]["over_bound"]
        if {"moe", "moe_lora"} <= figures.keys():
            moe, adapted = figures["moe"], figures["moe_lora"]
            adapted |= {f"{name}_over_moe": adapted[name] / moe[name] for name in LORA_FIGURES}
        for name, own in figures.items():
            for figure, value in own.items():
                values.setdefault(name, {}).setdefault(figure, []).append(value)
    return {name: {figure: spread(v) for figure, v in own.items()} for name, own in values.items()}


def update_over_bound(data: dict) -> dict[str, float]:
    """Return the update's time divided by that of its products, {trainer: median over rounds}."""
    figures = summary(data)
    return {name: own["over_bound"]["median"] for name, own in figures.items() if "over_bound" in own}


ROWS = (  # figure, text, form
    ("step", "step, s", ".1f"),
    ("trl_over_step", "step of `trl` / step", ".2f"),
    ("trl_bf16_over_step", "step of `trl_bf16` / step", ".2f"),
    ("rollout", "rollout, s", ".1f"),
    ("update", "update, s", ".1f"),
    ("sync", "sync, s", ".2f"),
    ("tokens", "generated tokens per step", ",.0f"),
    ("tokens_per_s", "generated tokens/s, whole step", ".1f"),
    ("rate_over_trl", "tokens/s / tokens/s of `trl`", ".2f"),
    ("rate_over_trl_bf16", "tokens/s / tokens/s of `trl_bf16`", ".2f"),
    ("flop", "FLOP of an update's products", ".2e"),
    ("products_rate", "products of a rank beside the update, GFLOP/s", ".0f"),
    ("bound", "bound of the update, s", ".1f"),
    ("over_bound", "update / bound", ".2f"),
    ("over_busiest", "update / bound of the busiest rank", ".2f"),
    ("decoding_rate", "products of 32 rows, of a rank, GFLOP/s", ".0f"),
    ("rollout_bound", "bound of the rollout, s", ".1f"),
    ("rollout_over_bound", "rollout / bound", ".2f"),
    ("over_arithmetic", "update / update of `dense`, divided by the same ratio of FLOP", ".2f"),
    ("peak_gib", "peak memory of both ranks, GiB", ".1f"),
    ("update_over_moe", "update / update of `moe`", ".2f"),
    ("sync_over_moe", "sync / sync of `moe`", ".2f"),
    ("peak_gib_over_moe", "peak memory / peak memory of `moe`", ".2f"),
)


def table_lines(data: dict) -> list[str]:
    """Return the table of the trainers' figures, for the trainers of the record."""
    figures = summary(data)
    trainers = [name for name in TRAINERS if name in figures]
    rows = [
        [text, *(with_range(figures[t][name], form) if name in figures[t] else "" for t in trainers)]
        for name, text, form in ROWS
        if any(name in figures[t] for t in trainers)
    ]
    return markdown([f"median (range) of {len(data['rounds'])} rounds", *trainers], rows)


def lora_lines(data: dict) -> list[str]:
    """Return the figures of training with adapters beside full training."""
    figures = summary(data)["moe_lora"]
    rows = [[text, with_range(figures[name], form)] for name, text, form in ROWS if "over_moe" in name]
    return markdown([f"median (range) of {len(data['rounds'])} rounds", "moe_lora"], rows)


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------
def read_options() -> argparse.Namespace:
    """Read the command line, and exit if a model or the prompts are missing."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--trl-python", type=Path, default=Path(sys.executable), help="Python interpreter with TRL installed")
    add("--trainers", nargs="+", choices=TRAINERS, default=BESIDE_TRL, help="default: %(default)s")
    add("--repeats", type=int, default=3, help="rounds of all trainers (default: %(default)s)")
    add("--steps", type=int, default=3, help="measured steps per run (default: %(default)s)")
    add("--max-new-tokens", type=int, default=96, help="tokens of a completion (default: %(default)s)")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="dtype of our policies")
    add("--dense", type=Path, default=MODELS / "dense", metavar="FOLDER", help="the dense model")
    add("--moe", type=Path, default=MODELS / "moe", metavar="FOLDER", help="the MoE")
    add("--result", type=Path, help="internal: set for the ranks")
    add("--engine-dtype", help="internal: set for the ranks")
    add("--seed", type=int, default=0, help="internal: set for TRL")
    add("settings", nargs="*", metavar="section.key=value", help="settings of train_rl.py (not of TRL)")
    args = parser.parse_intermixed_args()
    if args.steps < 1 or args.repeats < 1:
        parser.error("--steps and --repeats must be at least 1")
    for trainer in args.trainers if not args.result else ():
        option = "moe" if trainer.startswith("moe") else "dense"
        if not (getattr(args, option) / "config.json").is_file():
            sys.exit(f"--{option}: {getattr(args, option)} holds no config.json; --help has the commands")
    if not PROMPTS.is_file():
        sys.exit(f"{PROMPTS} is missing: run `python -m data.instructions` first")
    return args


def choose_dtypes(args: argparse.Namespace) -> None:
    """Replace auto by the dtypes that train_rl.py takes on this processor; settings come before --dtype."""
    import moe_model
    from settings import ModelSettings, RolloutSettings

    words = dict(word.split("=", 1) for word in args.settings)
    policy = ModelSettings(dtype=words.get("model.dtype", args.dtype))
    engine = RolloutSettings(dtype=words.get("rollout.dtype", "auto"))
    args.dtype = moe_model.policy_dtype(policy, on_gpu=False)
    args.engine_dtype = moe_model.engine_dtype(engine, on_gpu=False)


def main() -> None:
    """Run the trainers in turns and print the table; in a rank, train."""
    args = read_options()
    if args.result and args.trainers[0] in TRL_TRAINERS:
        train_with_trl(args)
        return
    if args.result:
        train_and_count(args)
    choose_dtypes(args)
    data = measure(args)
    print("\n".join(table_lines(data)))
    print("; ".join(f"{name}: {value}" for name, value in data["environment"].items()))


if __name__ == "__main__":
    main()
