"""Seconds of a weight sync into vLLM by model size, against a plain copy of the same bytes.

    python experiments/bench_sync.py                    1, 30 and 300 million parameters, about three minutes
    python experiments/bench_sync.py --json sync.json --sizes 1M 30M

Ways, all into the same engine, one after another in every round:
    one by one   every expert's matrices as tensors of their own, through vLLM's loader
    fused        expert tensors fused, through vLLM's loader, which goes through Python for every expert
    copied       expert tensors fused, copied whole to where the kernel reads them: what sync() does on CPUs
    check        check_weights(): checksums of what was sent and of what the engine holds
    copied, FP8  as copied, with block-wise E4M3 rounding (rollout.fp8 simulate)
A figure is the median of --repeats rounds after one that is not counted, in brackets their range. Python per
tensor is the sync of a model with the same tensors and next to no bytes, per tensor sent.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from tqdm import tqdm
from transformers import Qwen3MoeConfig

import moe_model
import rollout
from data.tiny import build_tokenizer
from experiments import vllm_worker

SIZES = {  # hidden, layers, experts, expert width, vocabulary
    "1M": (128, 2, 8, 128, 128),
    "30M": (256, 4, 32, 256, 8192),
    "300M": (512, 8, 64, 352, 16384),
}
WAYS = ("one by one", "fused", "copied", "check", "copied, FP8")


def make_policy(hidden: int, layers: int, experts: int, width: int, vocab: int) -> moe_model.Policy:
    """A random Qwen3-MoE with a tied head."""
    config = Qwen3MoeConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, moe_intermediate_size=width,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=experts, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=512,
        tie_word_embeddings=True,
    )  # fmt: skip
    config.architectures = ["Qwen3MoeForCausalLM"]
    policy = moe_model.Policy(config)
    moe_model.random_weights(policy, seed=0)
    return policy


def make_engine(policy: moe_model.Policy, dtype: str) -> rollout.RolloutEngine:
    with tempfile.TemporaryDirectory() as folder:
        policy.config.save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        return rollout.RolloutEngine(
            folder, max_model_len=64, max_num_seqs=8, dtype=dtype, kv_cache_gib=0.1, prefix_caching=False,
            sleep_level=0,
        )  # fmt: skip


def expert_by_expert(policy: moe_model.Policy):
    """hf_tensors() with every expert's matrices apart, as a checkpoint names them."""
    for name, tensor in moe_model.hf_tensors(policy):
        if tensor.dim() == 3:
            yield from moe_model.expert_slices(name, tensor, 0)
        else:
            yield name, tensor


def sync(way: str, engine: rollout.RolloutEngine, policy: moe_model.Policy) -> rollout.SyncReport:
    """One sync, or one check, in one of the ways."""
    engine.fp8 = "simulate" if way.endswith("FP8") else "off"
    copied = vllm_worker.fused_expert_storage
    try:
        if way == "fused":
            vllm_worker.fused_expert_storage = lambda model: {}
        if way == "check":
            return engine.check_weights(moe_model.hf_tensors(policy))
        tensors = expert_by_expert(policy) if way == "one by one" else moe_model.hf_tensors(policy)
        return engine.sync(tensors, 0)
    finally:
        vllm_worker.fused_expert_storage = copied


def timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(size: str, dtype: str, repeats: int, progress) -> dict:
    """Seconds of every way, of a plain copy, and bytes and tensors of a sync, of one size."""
    policy = make_policy(*SIZES[size])
    engine = make_engine(policy, dtype)
    source = torch.cat([p.detach().flatten() for p in policy.parameters()])
    target = torch.empty_like(source)
    ways = {way: (lambda way=way: sync(way, engine, policy)) for way in WAYS}
    ways["plain copy"] = lambda: target.copy_(source)
    ways["plain cast"] = lambda: target.view(torch.bfloat16)[: len(source)].copy_(source)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(repeats + 1):
        for way, call in ways.items():
            elapsed = timed(call)
            if round_:
                seconds[way].append(elapsed)
            progress.update()
    reports = {way: dataclasses.asdict(sync(way, engine, policy)) for way in WAYS if way != "check"}
    sync("copied", engine, policy)
    engine.check_weights(moe_model.hf_tensors(policy))
    return {
        "parameters": sum(p.numel() for p in policy.parameters()),
        "dtype": dtype,
        "n": repeats,
        "reports": reports,
        "seconds": {
            way: {"median": statistics.median(found), "min": min(found), "max": max(found)}
            for way, found in seconds.items()
        },
    }


def python_per_tensor(dtype: str, repeats: int) -> dict[str, float]:
    """Seconds per tensor of the 30M model's tensors with next to no bytes in them."""
    _, layers, experts, _, _ = SIZES["30M"]
    policy = make_policy(32, layers, experts, 32, 128)
    engine, found = make_engine(policy, dtype), {}
    for way in ("one by one", "fused", "copied"):
        sync(way, engine, policy)
        seconds = statistics.median(timed(lambda: sync(way, engine, policy)) for _ in range(repeats))  # noqa: B023
        found[way] = seconds / sync(way, engine, policy).num_tensors
    return found


def print_table(table: dict, per_tensor: dict[str, float]) -> None:
    sizes = [size for size in SIZES if size in table]
    print(f"| seconds, median (range) of {table[sizes[0]]['n']} | " + " | ".join(sizes) + " |")
    print("|---|" + "---|" * len(sizes))
    for way in table[sizes[0]]["seconds"]:
        found = [table[size]["seconds"][way] for size in sizes]
        cells = [f"{v['median']:.4f} ({v['min']:.4f}-{v['max']:.4f})" for v in found]
        print(f"| {way} | " + " | ".join(cells) + " |")
    for way in (*[way for way in WAYS if way != "check"], "plain copy"):
        rates = []
        for size in sizes:
            num_bytes = table[size]["reports"]["copied"]["num_bytes"]
            rates.append(f"{num_bytes / table[size]['seconds'][way]['median'] / 1e9:.2f}")
        print(f"| {way}, GB/s of float32 weights | " + " | ".join(rates) + " |")
    for way in ("one by one", "copied"):
        counts = [str(table[size]["reports"][way]["num_tensors"]) for size in sizes]
        print(f"| {way}, tensors | " + " | ".join(counts) + " |")
    shares = ", ".join(f"{way} {seconds * 1e6:.0f}" for way, seconds in per_tensor.items())
    print(f"\nPython, microseconds per tensor sent: {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="default: all")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the engine")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    torch.set_num_threads(1)
    steps = len(args.sizes) * (args.repeats + 1) * (len(WAYS) + 2)
    progress = tqdm(total=steps, desc="bench", unit="sync", disable=None)
    table = {size: measure(size, args.dtype, args.repeats, progress) for size in args.sizes}
    progress.close()
    per_tensor = python_per_tensor(args.dtype, args.repeats)
    print_table(table, per_tensor)
    if args.json:
        args.json.write_text(json.dumps({"sizes": table, "python_per_tensor": per_tensor}, indent=1))
    sys.stdout.flush()
    os._exit(0)  # skips the leak reports that vLLM's native libraries print at a normal exit


if __name__ == "__main__":
    main()
