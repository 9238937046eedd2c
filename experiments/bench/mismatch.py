"""Measure the mismatch between trainer and engine on the same tokens, and the effect of replay and TIS.

    python -m experiments.bench.mismatch                      # both models: about five minutes on one core
    python -m experiments.bench.mismatch --json mismatch.json
    python -m experiments.bench.mismatch --script changed.py  # with a changed copy of train_rl.py

Models: data/built/tiny (2 layers, 8 experts, top 2) and data/built/deep (8 layers, 32 experts, top 4), built
by data.tiny if missing. The engine samples; the trainer computes the same tokens with its own routes (off;
r2, which replays the routes of the trainer's old pass, gives the same result here) or with the engine's
routes (r3). All steps use the functions of a training run. A figure is the mean over --repeats rollouts with
different samples, with the range in brackets.

The trainer computes in float32 or bfloat16, on a GPU if available. "engine's weights" means float32 products
on the weights that the engine holds, rounded to bfloat16 or FP8, so that the remaining mismatch comes from
rounding of activations alone. In the last rows the engine is float32 except for the router weights, so that
almost only the routes differ. On a GPU with FP8 there are also rows of tiny with vLLM's own FP8 kernels, for
both weights and activations (on).
"""

import argparse
import copy
import math
import statistics
import sys
from dataclasses import replace
from types import ModuleType

import torch
from tqdm import tqdm

import moe_model
from batch import Group, Request, collate
from data.chat import load_tokenizer
from data.prompts import load_prompts
from data.stream import seed_of
from experiments.bench.common import (
    load_trainer,
    make_parser,
    markdown,
    model_folder,
    write_results,
)
from fp8 import quantise_for_engine
from reward import Verdict
from rollout import RolloutEngine
from runtime.launch import leave, run
from runtime.metrics import effective_sample_size, mismatch_statistics, reduce_metrics, token_metrics
from settings import Config, RolloutSettings

MODELS = {"tiny": "2 layers, 8 experts, top 2", "deep": "8 layers, 32 experts, top 4"}
WHOLE_BLOCKS = ("tiny",)  # models with a hidden size that vLLM's FP8 kernels support (a multiple of 128)
ROUTER = "float32, router bfloat16"
ENGINES = {  # name: (FP8 settings, trainers)
    "bfloat16": (("off", "simulate"), ("float32", "engine's weights", "bfloat16")),
    "float32": (("off", "simulate"), ("float32", "engine's weights")),
    ROUTER: (("off",), ("float32",)),
}
REPLAY = ("off", "r2", "r3")
TIS_CAP = 2.0


def sample(engine: RolloutEngine, prompts, prompt_ids, config, seed: int):
    """Return completions of all prompts as a batch, with dummy verdicts."""
    settings = config.rollout
    size = settings.group_size
    requests = [
        Request(ids, seed_of(seed, i, k), settings.temperature, settings.max_new_tokens)
        for i, ids in enumerate(prompt_ids)
        for k in range(size)
    ]
    wrong = Verdict(0.0, "wrong")
    completions = [replace(completion, verdict=wrong) for completion in engine.generate(requests, 0)]
    groups = [Group(i, i, completions[i * size : (i + 1) * size]) for i in range(len(prompts))]
    return collate(groups, prompts, prompt_ids)


def measure(trainer: ModuleType, policy, batch, config, replay: str) -> dict[str, float]:
    """Return the mismatch metrics of a batch, with the effective sample size after truncation."""
    settings = {"algorithm": config.algorithm.model_copy(update={"router_replay": replay})}
    config = config.model_copy(update=settings)
    batch = copy.copy(batch)
    outputs = trainer.forward_batch(policy, batch, config, keep_routes=True)
    if replay == "r2":  # the forward pass of an update, with the routes of the old pass
        batch.old_routes = outputs.routes
        outputs = trainer.forward_batch(policy, batch, config, keep_routes=True)
    values = mismatch_statistics(outputs.logprobs, batch.rollout_logprobs)
    weight = values["mismatch_weight"]
    truncated = weight.clamp(max=TIS_CAP)
    values |= {"mismatch_routes": outputs.route_mismatch, "ratio": torch.ones_like(weight)}
    values |= {"truncated": (weight > TIS_CAP).float(), "tis": truncated, "tis_sq": truncated.square()}
    fractions = config.algorithm.entropy_groups
    groups = trainer.entropy_groups(outputs.entropy, batch.response_mask, fractions)
    values |= {"entropy": outputs.entropy, "entropy_group": groups}
    batch.advantages = torch.zeros(batch.response_mask.shape)  # nothing is trained
    rows = list(range(len(batch.prompts)))
    metrics = reduce_metrics(token_metrics(batch, [(rows, values)], len(fractions)))
    metrics |= effective_sample_size(metrics)
    metrics["ess_tis"] = metrics["tis"] ** 2 / metrics["tis_sq"]
    mask = batch.response_mask
    differ = outputs.route_mismatch.bool()
    for name, chosen in (("same_routes", mask & ~differ), ("other_routes", mask & differ)):
        dlogp = values["abs_dlogp"][chosen]
        metrics[f"abs_dlogp_of_{name}"] = dlogp.mean().item() if len(dlogp) else math.nan
    return metrics


def policy_of(trainer: str, policy, engine_dtype: str, fp8: str) -> torch.nn.Module:
    """Return the policy as a trainer computes it, for example a bfloat16 copy."""
    match trainer:
        case "float32":
            return policy
        case "bfloat16":
            return copy.deepcopy(policy).bfloat16()
        case "engine's weights":
            engine_policy = copy.deepcopy(policy)
            parameters = dict(engine_policy.named_parameters())
            with torch.no_grad():
                rounded = "simulate" if fp8 == "on" else fp8  # vLLM rounds the weights in the same way
                for tensor_name, tensor in quantise_for_engine(moe_model.hf_tensors(policy), rounded):
                    parameters[tensor_name].copy_(tensor.to(getattr(torch, engine_dtype)))
            return engine_policy


def starts(model: str, engine: str) -> list[tuple[bool, tuple[str, ...]]]:
    """List the engines to start one after another, as (vLLM quantises, FP8 settings)."""
    has_fp8 = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    quantises = has_fp8 and engine == "bfloat16" and model in WHOLE_BLOCKS
    return [(False, ENGINES[engine][0])] + [(True, ("on",))] * quantises


def weights_for(engine: str, policy):
    """Yield the weights to send to an engine."""
    for name, tensor in moe_model.hf_tensors(policy):
        yield name, tensor.bfloat16() if engine == ROUTER and name.endswith("mlp.gate.weight") else tensor


def rows_of_model(
    trainer: ModuleType, name: str, num_prompts: int, repeats: int, progress: tqdm
) -> list[dict]:
    """Return all rows of the table for one model."""
    folder = model_folder(name)
    config = Config.model_validate(
        {"rollout": {"max_new_tokens": 16, "max_prompt_tokens": 16}, "train": {"micro_batch_tokens": 8192}}
    )
    tokenizer = load_tokenizer(folder / "model")
    prompts = load_prompts(str(folder / "test.jsonl"))[:num_prompts]
    prompt_ids = tokenizer([prompt.text for prompt in prompts])["input_ids"]
    policy = moe_model.Policy(moe_model.load_config(folder / "model"))
    moe_model.load_hf(policy, folder / "model")
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for engine_name, quantises, fp8_settings in ((e, *start) for e in ENGINES for start in starts(name, e)):
        dtype = engine_name.partition(",")[0]
        trainers = ENGINES[engine_name][1]
        settings = RolloutSettings(dtype=dtype, kv_cache_gib=0.25, fp8="on" if quantises else "off")
        engine = None  # a GPU holds one MoE engine at a time
        engine = RolloutEngine(folder / "model", 64, settings)
        for fp8 in fp8_settings:
            engine.settings = settings.model_copy(update={"fp8": fp8})
            engine.sync(weights_for(engine_name, policy), 0)
            engine.check_weights(weights_for(engine_name, policy))
            batches = [sample(engine, prompts, prompt_ids, config, seed) for seed in range(repeats)]
            num_tokens = sum(int(batch.response_mask.sum()) for batch in batches)
            for trainer_name in trainers:
                computed = policy_of(trainer_name, policy, dtype, fp8)
                for replay in REPLAY:
                    measured = [measure(trainer, computed, batch, config, replay) for batch in batches]
                    case = {"model": name, "trainer": trainer_name, "engine": engine_name, "fp8": fp8}
                    rows.append(
                        case
                        | {"router_replay": replay, "n": repeats, "tokens": num_tokens}
                        | {
                            metric: summary([metrics[metric] for metrics in measured])
                            for metric in sorted(measured[0])
                        }
                    )
                    progress.update()
    return rows


def summary(values: list[float]) -> dict[str, float | list[float] | None]:
    """Return mean and range of the finite values, and the values themselves."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return {"mean": None, "min": None, "max": None}
    return {"mean": statistics.fmean(finite), "min": min(finite), "max": max(finite), "rounds": finite}


def table_lines(data: list[dict]) -> list[str]:
    """Return one line per model, engine and trainer: without replay -> with the engine's routes (r3).

    Rows without route differences, of a trainer in bfloat16, ranges and maxima are in the record alone.
    """
    names = ["model", "engine", "fp8", "trainer"]
    rows = []
    for row in data:
        is_shown = row["trainer"] != "bfloat16" and row["mismatch_routes"]["mean"] > 0
        if row["router_replay"] == "off" and is_shown:
            (replayed,) = (
                other for other in data
                if other["router_replay"] == "r3" and all(other[name] == row[name] for name in names)
            )  # fmt: skip
            figures = [
                [f"{side[m]['mean']:.1e}" for side in (row, replayed)] for m in ("abs_dlogp", "mismatch_k3")
            ]
            cells = [row[name] for name in names]
            rows.append([*cells, f"{row['mismatch_routes']['mean']:.4f}", *(" -> ".join(f) for f in figures)])
    return markdown([*names, "routes differ", "mean abs(dlogp)", "k3 KL"], rows)


def read(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__, script=True)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="models to measure (default: both)"
    )
    parser.add_argument("--prompts", type=int, default=64, help="prompts per rollout (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="rollouts per row (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.prompts < 1 or args.repeats < 1:
        parser.error("--prompts and --repeats must be at least 1")
    return args


def main(args: argparse.Namespace) -> None:
    """Measure all models and print the table."""
    torch.set_num_threads(1)
    moe_model.init_deepspeed()
    trainer = load_trainer(args.script)
    cases = [(model, engine) for model in args.models for engine in ENGINES]
    num_rows = sum(len(fp8) * len(ENGINES[e][1]) for m, e in cases for _, fp8 in starts(m, e)) * len(REPLAY)
    progress = tqdm(total=num_rows, desc="mismatch", unit="row", disable=None)
    rows = []
    for name in args.models:
        rows += rows_of_model(trainer, name, args.prompts, args.repeats, progress)
    progress.close()
    print("\n".join(table_lines(rows)))
    write_results(args.json, rows)


if __name__ == "__main__":
    leave(run(main, read, sys.argv[1:]))
