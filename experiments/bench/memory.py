"""Measure the memory of updates on CPUs and compare it with memory_plan.memory_by_part().

    python -m experiments.bench.memory --json memory.json        # all cases, about three minutes
    torchrun --nproc-per-node=2 -m experiments.bench.memory --case experts=16,ep=2,dtype=bfloat16

A rank makes a random model, wraps the model in DeepSpeed and takes two steps of two micro-batches each. The
second step gives the rows of runtime.memory.planned_rows(): resident memory after a forward pass, its peaks
(VmHWM) up to the end of the backward passes and in the optimizer step, and afterwards. The memory before the
model is made is subtracted, and values are means over ranks. Three precautions: the allocator returns freed
memory at once; an update of a tiny model comes first, so that libraries are loaded; and oneDNN's primitive
cache is off, because the cache keeps the products of every shape, which happens on CPUs only.
"""

import argparse
import ctypes
import gc
import json
import os
from pathlib import Path
from types import SimpleNamespace

MMAP_THRESHOLD = -3  # option of mallopt(): allocate tensors by mmap, so that freed pages are returned
TRIM_THRESHOLD = -1  # option of mallopt(): return freed memory of the heap
LIBRARY_BYTES = int(0.15 * 2**30)  # oneDNN's scratch for bfloat16 products on CPUs, measured
CASES = (
    "dtype=float32,tokens=512",
    "dtype=bfloat16,tokens=512",
    "dtype=float32,tokens=4096,layers=4",
    "dtype=bfloat16,tokens=4096,layers=4",
    "dtype=bfloat16,tokens=4096,checkpointing=1",
    "dtype=float32,tokens=2048,experts=0,width=2048,layers=12",
    "dtype=float32,tokens=1024,ep=1,ranks=2",
    "dtype=float32,tokens=1024,ep=2,ranks=2",
    "dtype=bfloat16,tokens=1024,ep=1,ranks=2",
    "dtype=bfloat16,tokens=1024,ep=2,ranks=2",
    "dtype=bfloat16,tokens=1024,ep=2,zero=2,ranks=2",
)
DEFAULTS = {
    "dtype": "float32", "tokens": 512, "length": 256, "hidden": 512, "layers": 8, "experts": 16, "width": 512,
    "vocab": 8192, "ep": 1, "zero": 1, "checkpointing": 0, "ranks": 1,
}  # fmt: skip


def read_case(text: str) -> SimpleNamespace:
    """Read name=value,... over the defaults, for example experts=16,ep=2,dtype=bfloat16."""
    values = dict(item.split("=") for item in text.split(","))
    if unknown := values.keys() - DEFAULTS.keys():
        raise ValueError(f"--case: unknown {', '.join(sorted(unknown))}; known are {', '.join(DEFAULTS)}")
    return SimpleNamespace(**{name: type(value)(values.get(name, value)) for name, value in DEFAULTS.items()})


def read_status(key: str) -> int:
    """Return a value of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def reset_peak() -> None:
    """Let VmHWM start again from the resident memory of this moment."""
    Path("/proc/self/clear_refs").write_text("5")


def model_of(case: SimpleNamespace, **smaller: int):
    """Return the configuration of a case's model; smaller: sizes to override."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    size = SimpleNamespace(**vars(case) | smaller)
    sizes = dict(
        vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.width, head_dim=64,
        num_hidden_layers=size.layers, num_attention_heads=size.hidden // 64, max_position_embeddings=4096,
        num_key_value_heads=max(1, size.hidden // 128), tie_word_embeddings=False,
    )  # fmt: skip
    if not size.experts:
        return Qwen3Config(**sizes)
    moe_sizes = {"num_experts_per_tok": 2, "moe_intermediate_size": size.width, "norm_topk_prob": True}
    return Qwen3MoeConfig(**sizes, num_experts=size.experts, **moe_sizes)


def update(config, case: SimpleNamespace, tokens: int, group) -> tuple[list[int], dict[str, int]]:
    """Take two steps of two micro-batches; return the elements that the rank updates in each group.

    The second result holds the bytes of each measured row.
    """
    resident = read_status("VmRSS")
    import torch

    import moe_model

    torch.set_default_dtype(getattr(torch, case.dtype))
    policy = moe_model.Policy(config, group)
    torch.set_default_dtype(torch.float32)
    policy.activation_checkpointing = bool(case.checkpointing)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.fill_(1.0) if name.endswith("norm.weight") else parameter.normal_(std=0.02)
    settings = SimpleNamespace(
        learning_rate=1e-4, betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0, zero_stage=case.zero,
        fused_adamw=None,
        offload_optimizer=False,
        grad_reduce_dtype="model",
    )  # fmt: skip
    engine = moe_model.deepspeed_engine(policy, settings)
    rows = {}
    for _ in range(2):
        reset_peak()
        for _ in range(2):
            ids = torch.randint(config.vocab_size, (tokens // case.length, case.length + 1)).tolist()
            packed = moe_model.pack([row[:1] for row in ids], [row[1:] for row in ids], "cpu")
            before = read_status("VmRSS")
            logprobs, *_ = engine(packed)
            rows["activations"] = read_status("VmRSS") - before
            engine.backward(-logprobs.mean(), scale_wrt_gas=False)
            del logprobs, packed
            gc.collect()
        rows["trainer in update"] = read_status("VmHWM") - resident
        reset_peak()
        engine.step()
        rows["trainer in optimizer step"] = read_status("VmHWM") - resident
        rows["trainer between updates"] = read_status("VmRSS") - resident
    shares = [
        p.numel() for param_group in engine.optimizer.optimizer.param_groups for p in param_group["params"]
    ]
    engine.destroy()
    return shares, rows


def measure(case: SimpleNamespace) -> dict:
    """Return measured and predicted bytes of a case, in total and by row. Collective."""
    libc = ctypes.CDLL("libc.so.6")
    for option, value in ((MMAP_THRESHOLD, 1 << 16), (TRIM_THRESHOLD, 0)):
        libc.mallopt(option, value)
    import torch
    import torch.distributed as dist

    import memory_plan
    import moe_model
    from runtime.memory import planned_rows
    from settings import ModelSettings

    moe_model.init_deepspeed()
    group = moe_model.create_expert_parallel_group(case.ep, case.experts)
    update(model_of(case, hidden=64, layers=1, width=64, vocab=512), case, case.length, group)
    gc.collect()
    config = model_of(case)
    shares, rows = update(config, case, case.tokens, group)
    measured = torch.tensor([float(num_bytes) for num_bytes in rows.values()])
    dist.all_reduce(measured)
    ranks = dist.get_world_size()
    settings = ModelSettings(
        ep_size=case.ep, dtype=case.dtype, activation_checkpointing=bool(case.checkpointing)
    )
    parts = memory_plan.memory_by_part(config, settings, case.zero, ranks, case.tokens, on_gpu=False)
    parts["sync buffers"] = 0  # no engine runs here
    libraries = LIBRARY_BYTES if case.dtype == "bfloat16" else 0
    planned = planned_rows(parts, engine_sleeps=False)
    of_rows = {
        row: {"measured": num_bytes / ranks, "predicted": planned[row] + libraries * (row != "activations")}
        for row, num_bytes in zip(rows, measured.tolist(), strict=True)
    }
    total = {key: max(row[key] for row in of_rows.values()) for key in ("measured", "predicted")}
    return total | {
        "rows": of_rows, "parts": parts, "shares": shares, "ranks": ranks,
        "parameters": sum(moe_model.parameter_counts(config)),
    }  # fmt: skip


def run_all(cases: tuple[str, ...], path: Path | None) -> None:
    """Measure cases, each in new processes, and print the measured rows of each."""
    from experiments.bench.common import markdown, run_ranks, write_results

    names = ["case", "million parameters", "row", "measured, MiB", "predicted, MiB", "ratio"]
    print("\n".join(markdown(names, [])), flush=True)
    results = {}
    for name in cases:
        result = results[name] = run_ranks(
            "experiments.bench.memory", read_case(name).ranks, ["--case", name]
        )
        for row, of_row in result["rows"].items():
            measured, predicted = (f"{of_row[key] / 2**20:,.0f}" for key in ("measured", "predicted"))
            ratio = f"{of_row['predicted'] / of_row['measured']:.3f}"
            cells = [name, f"{result['parameters'] / 1e6:.0f}", row, measured, predicted, ratio]
            print(markdown(names, [cells])[-1], flush=True)
        write_results(path, results)


def main(argv: list[str] | None = None) -> None:
    """Read the command line; measure one case on this rank, or launch all cases in turn."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep_lines)
    parser.add_argument("--case", help="measure one case, for example experts=16,ep=2 (default: all cases)")
    parser.add_argument("--first", type=int, default=0, help="index of the first case (default: 0)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results of all cases to this file"
    )
    parser.add_argument("--result", type=Path, metavar="FILE", help="write the result of --case to this file")
    args = parser.parse_args(argv)
    if args.case is None:
        return run_all(CASES[args.first :], args.json)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")  # read when torch is imported
    case = read_case(args.case)
    result = measure(case)
    if args.result and os.environ["RANK"] == "0":
        args.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
