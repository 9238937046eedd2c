"""Measure the seconds of a weight sync into vLLM by model size, and of plain copies of the same weights.

    python -m experiments.bench.sync                    # 1, 30, 300 million parameters: about three minutes
    python -m experiments.bench.sync --json sync.json --sizes 1M 30M

These ways take turns in every round, all into the same engine:
    one by one   The matrices of each expert are separate tensors and go through vLLM's loader.
    fused        Expert tensors are fused and go through vLLM's loader, which loops over experts in Python.
    packed       Expert tensors are fused and packed directly into the kernel's memory, as sync() does on
                 CPUs.
    check        check_weights() compares checksums of the sent weights with the engine's weights.
    packed, FP8  As packed, with block-wise E4M3 rounding (rollout.fp8 simulate).
    its copies   The minimal memory traffic of a sync on CPUs: every tensor is cast into memory of the
                 engine's dtype, and every matrix is copied a second time in that dtype, because kernels read
                 packed matrices. All memory is touched beforehand.
A figure is the median of --repeats rounds after a warm-up round, with the range in brackets. Python per
tensor is the time per tensor of a sync with the same tensors at tiny sizes, with next to no bytes to move.
"""

import dataclasses
import statistics
import tempfile
import time
from functools import partial

import torch
from tqdm import tqdm

import moe_model
import rollout
import vllm_worker
from data.tiny import build_tokenizer
from experiments.bench.common import (
    SIZES,
    make_parser,
    make_policy,
    markdown,
    spread,
    with_range,
    write_results,
)
from runtime.launch import leave
from settings import RolloutSettings

WAYS = ("one by one", "fused", "packed", "check", "packed, FP8")
COPIES = ("its copies", "plain copy", "plain cast")


def make_engine(policy: moe_model.Policy, dtype: str) -> rollout.RolloutEngine:
    """Start an engine for models of the policy's shape."""
    settings = RolloutSettings(
        max_num_seqs=8, dtype=dtype, kv_cache_gib=0.1, prefix_caching=False, capture_routes="off"
    )
    with tempfile.TemporaryDirectory() as folder:
        policy.config.save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        return rollout.RolloutEngine(folder, 64, settings)


def expert_by_expert(policy: moe_model.Policy):
    """Yield hf_tensors() with separate matrices for each expert, named as in a checkpoint."""
    for name, tensor in moe_model.hf_tensors(policy):
        if tensor.dim() == 3:
            yield from moe_model.expert_slices(policy.config, name, tensor, 0)
        else:
            yield name, tensor


def sync(way: str, engine: rollout.RolloutEngine, policy: moe_model.Policy) -> rollout.SyncReport | None:
    """Make one sync, or one check, in one of WAYS."""
    fp8 = "simulate" if way.endswith("FP8") else "off"
    engine.settings = engine.settings.model_copy(update={"fp8": fp8})
    storage = vllm_worker.expert_storage
    try:
        if way == "fused":
            vllm_worker.expert_storage = lambda model: {}
        if way == "check":
            return engine.check_weights(moe_model.hf_tensors(policy))
        tensors = expert_by_expert(policy) if way == "one by one" else moe_model.hf_tensors(policy)
        return engine.sync(tensors, 0)
    finally:
        vllm_worker.expert_storage = storage


def timed(call) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def make_copies(policy: moe_model.Policy, dtype: str):
    """Return a function that makes the minimal copies of a sync of this policy."""
    sent = [tensor for _, tensor in moe_model.hf_tensors(policy)]
    cast = [torch.zeros_like(tensor, dtype=getattr(torch, dtype)) for tensor in sent]
    packed = [torch.zeros_like(tensor) if tensor.dim() > 1 else None for tensor in cast]

    def copy() -> None:
        for source, target, second in zip(sent, cast, packed):
            target.copy_(source)
            if second is not None:
                second.copy_(target)

    return copy


def measure(size: str, dtype: str, repeats: int, progress) -> dict:
    """Return seconds of every way and of plain copies, and bytes and tensors of a sync, at one size."""
    policy = make_policy(*SIZES[size])
    engine = make_engine(policy, dtype)
    source = torch.cat([p.detach().flatten() for p in policy.parameters()])
    target = torch.empty_like(source)
    ways = {way: partial(sync, way, engine, policy) for way in WAYS}
    ways["its copies"] = make_copies(policy, dtype)
    ways["plain copy"] = partial(target.copy_, source)
    ways["plain cast"] = partial(target.view(torch.bfloat16)[: len(source)].copy_, source)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(repeats + 1):
        for way, call in ways.items():
            elapsed = timed(call)
            if round_:
                seconds[way].append(elapsed)
            progress.update()
    reports = {way: dataclasses.asdict(sync(way, engine, policy)) for way in WAYS if way != "check"}
    sync("packed", engine, policy)
    engine.check_weights(moe_model.hf_tensors(policy))
    return {
        "parameters": sum(p.numel() for p in policy.parameters()),
        "dtype": dtype,
        "n": repeats,
        "reports": reports,
        "seconds": {way: spread(times) for way, times in seconds.items()},
        "packed / its copies": spread([a / b for a, b in zip(seconds["packed"], seconds["its copies"])]),
    }


def python_per_tensor(dtype: str, repeats: int) -> dict[str, float]:
    """Return the seconds per tensor for the 30M model's tensors at tiny sizes."""
    _, layers, experts, _, _ = SIZES["30M"]
    policy = make_policy(32, layers, experts, 32, 128)
    engine = make_engine(policy, dtype)
    per_tensor = {}
    for way in ("one by one", "fused", "packed"):
        sync(way, engine, policy)
        seconds = statistics.median(timed(partial(sync, way, engine, policy)) for _ in range(repeats))
        per_tensor[way] = seconds / sync(way, engine, policy).num_tensors
    return per_tensor


def table_lines(data: dict) -> list[str]:
    """Return the table of all sizes."""
    sizes = data["sizes"]
    num_rounds = next(iter(sizes.values()))["n"]
    rows = [
        [way, *(with_range(size["seconds"][way], ".4f") for size in sizes.values())]
        for way in (*WAYS, *COPIES)
    ]
    ratio = "packed / its copies"
    rows.append([f"{ratio}, of a round", *(with_range(size[ratio], ".2f") for size in sizes.values())])
    for way in (*[way for way in WAYS if way != "check"], "plain copy"):
        sent = [(size["reports"]["packed"]["num_bytes"], size["seconds"][way]) for size in sizes.values()]
        rates = [f"{num_bytes / times['median'] / 1e9:.2f}" for num_bytes, times in sent]
        rows.append([f"{way}, GB/s of float32 weights", *rates])
    for way in ("one by one", "packed"):
        rows.append([f"{way}, tensors", *(size["reports"][way]["num_tensors"] for size in sizes.values())])
    return markdown([f"seconds, median (range) of {num_rounds}", *sizes], rows)


def main() -> None:
    """Measure all sizes and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="model sizes (default: all)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="dtype of the engine (default: %(default)s)",
    )
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    torch.set_num_threads(1)
    steps = len(args.sizes) * (args.repeats + 1) * (len(WAYS) + len(COPIES))
    progress = tqdm(total=steps, desc="bench", unit="sync", disable=None)
    sizes = {size: measure(size, args.dtype, args.repeats, progress) for size in args.sizes}
    progress.close()
    table = {"sizes": sizes, "python_per_tensor": python_per_tensor(args.dtype, args.repeats)}
    print("\n".join(table_lines(table)))
    shares = [f"{way} {seconds * 1e6:.0f}" for way, seconds in table["python_per_tensor"].items()]
    print(f"\nPython, microseconds per tensor sent: {', '.join(shares)}")
    write_results(args.json, table)
    leave(0)


if __name__ == "__main__":
    main()
