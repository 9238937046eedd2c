"""Measure the cost of returning routed experts in a rollout: ratio of seconds, and bytes per token.

    python -m experiments.bench.routes                     # about four minutes
    python -m experiments.bench.routes --json routes.json

Two engines of the same model, one with rollout.capture_routes, take turns on the same requests. A pair is one
generate() of each; a figure is the median over pairs, with the middle half in brackets. One workload has 256
completions of at most 16 tokens (as in the demo), the second has 64 completions of 256 tokens, from the same
model with an end-of-sequence token that is rarely sampled. Models: tiny (2 layers, top 2) and deep (8 layers,
top 4) of data.tiny, and random weights of 30 million parameters (4 layers, top 2), in which vLLM's Python
code takes a smaller share of the time.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

import moe_model
from batch import Request
from data.chat import load_tokenizer
from data.prompts import load_prompts
from experiments.bench.common import (
    SIZES,
    endless_model,
    make_parser,
    make_policy,
    markdown,
    model_folder,
    write_results,
)
from rollout import RolloutEngine
from runtime.launch import leave
from settings import RolloutSettings

WORKLOADS = {"16 new tokens": (256, 16), "256 new tokens": (64, 256)}  # name: (completions, max_new_tokens)


def start_engines(folder: Path, dtype: str, policy: moe_model.Policy) -> dict[bool, RolloutEngine]:
    """Start two engines with the policy's weights; return {captures routes: engine}."""
    engines = {}
    for captures in (False, True):
        settings = RolloutSettings(dtype=dtype, kv_cache_gib=0.25, capture_routes="on" if captures else "off")
        engines[captures] = RolloutEngine(folder, 512, settings)
        engines[captures].sync(moe_model.hf_tensors(policy), 0)
    return engines


def measure(name: str, workload: str, dtype: str, pairs: int, scratch: Path, progress) -> dict:
    """Return the seconds of generate() with and without capture, and the bytes of routes per token."""
    num_completions, max_new_tokens = WORKLOADS[workload]
    folder = model_folder("tiny" if name in SIZES else name)
    model = folder / "model"
    tokenizer = load_tokenizer(model)
    prompts = tokenizer([p.text for p in load_prompts(str(folder / "test.jsonl"))])["input_ids"]
    if name in SIZES:  # random weights hardly ever end a completion
        policy = make_policy(*SIZES[name])
        model = scratch / name
        moe_model.save_hf(policy, model)
        tokenizer.save_pretrained(model)
    else:
        policy = moe_model.Policy(moe_model.load_config(model))
        moe_model.load_hf(policy, model)
        model = endless_model(scratch / name, model) if max_new_tokens > 16 else model
    engines = start_engines(model, dtype, policy)
    requests = [Request(prompts[i // 8], i, 1.0, max_new_tokens) for i in range(num_completions)]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(pairs + 1):  # the first is not counted
        for captures in (False, True) if pair % 2 else (True, False):
            start = time.perf_counter()
            completions = engines[captures].generate(requests, 0)
            if pair:
                seconds[captures].append(time.perf_counter() - start)
            if captures:
                routes = [c.routed_experts for c in completions]
        progress.update()
    ratios = sorted(with_ / without for with_, without in zip(seconds[True], seconds[False]))
    return {
        "model": name, "workload": workload, "dtype": dtype, "n": pairs,
        "rounds": {"without": seconds[False], "with": seconds[True]},
        "seconds_without": statistics.median(seconds[False]),
        "seconds_with": statistics.median(seconds[True]),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[(3 * len(ratios) - 1) // 4]],
        "bytes_per_token": sum(ids.numel() * ids.element_size() for ids in routes) / sum(map(len, routes)),
        "layers_times_top_k": policy.config.num_hidden_layers * policy.config.num_experts_per_tok,
    }  # fmt: skip


def table_lines(data: list[dict]) -> list[str]:
    """Return the table of all models and workloads."""
    rows = [
        [
            f"{row['model']}, {row['workload']}", f"{row['seconds_without']:.3f}",
            f"{row['seconds_with']:.3f}",
            "{:.3f} ({:.3f}-{:.3f})".format(row["ratio"], *row["ratio_quartiles"]),
            f"{row['bytes_per_token']:g}", row["layers_times_top_k"],
        ]
        for row in data
    ]  # fmt: skip
    names = ["model, workload", "without, s", "with, s", "with / without (middle half)", "bytes a token"]
    return markdown([*names, "L x K"], rows)


def main() -> None:
    """Measure all models and workloads and print the table."""
    parser = make_parser(__doc__)
    models = ["tiny", "deep", "30M"]
    parser.add_argument(
        "--models", nargs="+", choices=models, default=models, help="models to measure (default: all)"
    )
    parser.add_argument("--pairs", type=int, default=15, help="pairs per workload (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="dtype of the engine (default: %(default)s)",
    )
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error("--pairs must be at least 1")
    torch.set_num_threads(1)
    total = len(args.models) * len(WORKLOADS) * (args.pairs + 1)
    progress = tqdm(total=total, desc="bench", unit="pair", disable=None)
    with tempfile.TemporaryDirectory() as scratch:
        rows = [
            measure(name, workload, args.dtype, args.pairs, Path(scratch), progress)
            for name in args.models
            for workload in WORKLOADS
        ]
    progress.close()
    print("\n".join(table_lines(rows)))
    write_results(args.json, rows)
    leave(0)


if __name__ == "__main__":
    main()
