"""Pieces of experiments.bench.gpu that require vLLM and DeepSpeed; each process holds one engine.

A piece is a function (folder, dry) -> Report, as in gpu_kernels. Engines have four layers of Qwen3-30B-A3B
with all 128 experts; runs of train_rl.py have a random MoE of two billion parameters. The pieces share a
temporary folder for models (EXPERIMENTS_GPU_MODELS, set by the runner), separate from the reports.
"""

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from experiments.bench.common import ROOT, model_folder, read_results, torchrun
from experiments.bench.gpu_kernels import (
    NEEDS_GPU,
    SIZES,
    Report,
    flops_per_token,
    make_policy,
    on_gpu,
    shell,
)

GIB = 2**30
SEQUENCES = (8, 32, 64, 256)  # concurrent sequences; below 32 vLLM's FP8 uses a different kernel
NEW_TOKENS = 512
LONG_TOKENS = 16384
LONG_SEQUENCES = 16


def models() -> Path:
    """Return the temporary folder for models."""
    return Path(os.environ["EXPERIMENTS_GPU_MODELS"])


def model_of_size(size: str, with_weights: bool) -> Path:
    """Build a random Qwen3-MoE with the tiny task's tokenizer if it is missing; return its folder."""
    from transformers import Qwen3MoeConfig

    from data.tiny import build_tokenizer

    folder = models() / f"{size}{'_weights' * with_weights}"
    if (folder / "tokenizer.json").is_file():
        return folder
    config = Qwen3MoeConfig(
        **SIZES[size], intermediate_size=4 * SIZES[size]["hidden_size"], norm_topk_prob=True, eos_token_id=1,
        pad_token_id=0, max_position_embeddings=32768, tie_word_embeddings=False, initializer_range=0.02,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    if with_weights:
        import moe_model

        torch.set_default_dtype(torch.bfloat16)
        policy = moe_model.Policy(config)
        moe_model.random_weights(policy, seed=0)
        torch.set_default_dtype(torch.float32)
        moe_model.save_hf(policy, folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def size_of(dry: bool) -> str:
    """Return the model size of engines."""
    return "dry" if dry else "30B"


def make_engine(dry: bool, longest: int, **settings):
    """Start an engine for models of size_of(dry)."""
    from rollout import RolloutEngine
    from settings import RolloutSettings

    kv_cache_gib = {True: 0.05, False: 24.0}[dry]
    settings = {"kv_cache_gib": kv_cache_gib, "max_num_seqs": 256} | settings
    return RolloutEngine(model_of_size(size_of(dry), False), longest, RolloutSettings(**settings))


def used_gib() -> float:
    """Return the GiB of this GPU in use by all processes; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return (total_bytes - free_bytes) / GIB


def timed(call: Callable) -> float:
    """Return the seconds of a call, until the GPU has finished."""
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------------------
# Formats and syncs
# ------------------------------------------------------------------------------------------------------------
def formats(out: Path, dry: bool) -> Report:
    """Compare codes and scales with vLLM's own functions on this machine, in the environment of an engine."""
    from rollout import set_vllm_environment

    set_vllm_environment(on_gpu=not dry)  # before vLLM is imported
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used, per_block_cast_to_fp8

    from kernels.fp8_block import quantise_activation, quantise_weight

    report = Report()
    device = "cpu" if dry else "cuda"
    report.criteria["vLLM takes float32 scales, no powers of two"] = not is_deep_gemm_e8m0_used()
    values = torch.randn(1000, 4096, device=device).mul(torch.logspace(-3, 3, 4096, device=device)).bfloat16()
    for version in (False,) if dry else (False, True):
        name = "Triton" if version else "torch"
        codes, scales = quantise_weight(values, version)
        vllm_codes, vllm_scales = per_block_cast_to_fp8(values, [128, 128], use_ue8m0=False)
        max_difference = (scales.view(torch.int32) - vllm_scales.view(torch.int32)).abs().max().item()
        report.figures[f"weights, {name}: scales apart, last bits"] = max_difference
        steps = (codes.view(torch.uint8).int() - vllm_codes.view(torch.uint8).int()).abs()
        differing = (steps > 0).double().mean().item()
        report.figures[f"weights, {name}: share of codes that differ"] = differing
        # vLLM compiles its function, so that 1 / s may differ in the last bit and decide a tie of codes
        close = max_difference == 0 and steps.max().item() <= 1 and differing < 1e-3
        report.criteria[f"weights, {name}: vLLM's scales, codes but for ties"] = on_gpu(close, dry)
        if dry:
            report.criteria["activations: bit-equal to vLLM's"] = NEEDS_GPU
            continue
        codes, scales = quantise_activation(values, version, column_major=True)
        layout = {"column_major_scales": True, "tma_aligned_scales": True, "use_ue8m0": False}
        vllm_codes, vllm_scales = per_token_group_quant_fp8(values, 128, **layout)
        same = torch.equal(codes.view(torch.uint8), vllm_codes.view(torch.uint8))
        same &= torch.equal(scales, vllm_scales) and scales.stride() == vllm_scales.stride()
        report.criteria[f"activations, {name}: bit-equal to vLLM's, layout too"] = same
    return report


def sync_piece(out: Path, dry: bool, fp8: str) -> Report:
    """Measure weight syncs, the check, sleeping and waking at 30B's shapes, and memory by phase."""
    import moe_model

    report = Report()
    level = 0 if dry else 2
    engine = make_engine(dry, 256, fp8="simulate" if dry and fp8 == "on" else fp8, sleep_level=level)
    report.figures["GiB in use, engine built and asleep"] = used_gib()
    device = torch.device("cpu" if dry else "cuda")
    policy = make_policy(size_of(dry), device)
    report.figures["GiB in use, with the policy's weights"] = used_gib()
    tensors = partial(moe_model.hf_tensors, policy)
    num_bytes = engine.sync(tensors(), 0).num_bytes
    syncs = []
    checks = []
    sleeps = []
    report.figures["GiB in use, awake after a sync"] = used_gib()
    for version in range(1, 3 if dry else 6):
        sleeps.append(timed(engine.sleep))
        asleep = used_gib()
        syncs.append(timed(partial(engine.sync, tensors(), version)))
        checks.append(timed(partial(engine.check_weights, tensors())))
    report.figures |= {
        "GiB in use, asleep after a sync": asleep, "GiB sent": num_bytes / GIB,
        "sync with waking, s": syncs, "check, s": checks, "sleep, s": sleeps,
        "sync of 48 such layers, s": statistics.median(syncs) * 48 / SIZES[size_of(dry)]["num_hidden_layers"],
    }  # fmt: skip
    requests = fixed_requests(4, 8 if dry else 64)
    first = [c.token_ids for c in engine.generate(requests, version)]
    engine.sync(tensors(), version + 1)
    second = [c.token_ids for c in engine.generate(requests, version + 1)]
    report.criteria["the same weights after another sync give the same tokens"] = first == second
    freed = report.figures["GiB in use, awake after a sync"] - asleep
    report.criteria["sleep frees weights, keys and values: 24 GiB and more"] = on_gpu(freed > 24, dry)
    return report


def sync(out: Path, dry: bool) -> Report:
    """Measure syncs of a bfloat16 engine."""
    return sync_piece(out, dry, "off")


def sync_fp8(out: Path, dry: bool) -> Report:
    """Measure syncs of an FP8 engine, which quantises at every sync."""
    return sync_piece(out, dry, "on")


# ------------------------------------------------------------------------------------------------------------
# Generation
# ------------------------------------------------------------------------------------------------------------
def fixed_requests(count: int, num_tokens: int, temperature: float = 1.0) -> list:
    """Make requests of exactly num_tokens tokens."""
    from batch import Request

    return [Request([2, 3, 4, 5 + i % 50], i, temperature, num_tokens, num_tokens) for i in range(count)]


def rate(engine, requests: list, **options) -> float:
    """Return the tokens per second of a rollout."""
    tokens = sum(request.max_new_tokens for request in requests)
    return tokens / timed(lambda: engine.generate(requests, 0, **options))


def without_seeds():
    """Return a variant of rollout.sampling_params() that sets no seed per request."""
    import rollout

    real = rollout.sampling_params

    def changed(*given):
        params = real(*given)
        params.seed = None
        return params

    return changed


def generation(out: Path, dry: bool, name: str, **settings) -> Report:
    """Measure tokens per second by number of sequences, capture, seeds, length; write greedy samples."""
    import moe_model
    import rollout

    counts, new_tokens = ((2, 4), 6) if dry else (SEQUENCES, NEW_TOKENS)
    engine = make_engine(dry, 48 if dry else LONG_TOKENS + 64, **settings)
    policy = make_policy(size_of(dry), torch.device("cpu" if dry else "cuda"))
    engine.sync(moe_model.hf_tensors(policy), 0)
    report = Report({"engine": engine.describe()})
    rate(engine, fixed_requests(counts[-1], new_tokens // 4))  # warm-up
    for count in counts:
        requests = fixed_requests(count, new_tokens)
        report.figures[f"tokens/s, {count} sequences"] = rate(engine, requests, capture_routes=False)
    report.figures["tokens/s, the last with captured routes"] = rate(engine, requests)
    seeded = rollout.sampling_params
    rollout.sampling_params = without_seeds()
    report.figures["tokens/s, the last without seeds"] = rate(engine, requests, capture_routes=False)
    rollout.sampling_params = seeded
    if name != "eager":
        long = fixed_requests(1, 40) if dry else fixed_requests(LONG_SEQUENCES, LONG_TOKENS)
        report.figures["tokens/s, 16,384 tokens a sequence"] = rate(engine, long, capture_routes=False)
    greedy = engine.generate(fixed_requests(8, new_tokens // 2, temperature=0.0), 0)
    valid = all(c.routed_experts is not None and (c.routed_experts < 255).all() for c in greedy)
    report.criteria["captured routes are valid"] = valid
    samples = [{"token_ids": c.token_ids, "logprobs": c.logprobs} for c in greedy]
    (out / f"greedy_{name}.json").write_text(json.dumps(samples))
    return report


def tokens(out: Path, dry: bool) -> Report:
    """Measure a bfloat16 engine."""
    return generation(out, dry, "tokens")


def tokens_fp8(out: Path, dry: bool) -> Report:
    """Measure an FP8 engine and compare it with the bfloat16 engine, if that piece has run."""
    report = generation(out, dry, "tokens_fp8", fp8="simulate" if dry else "on")
    return compare(report, out, "tokens_fp8")


def eager(out: Path, dry: bool) -> Report:
    """Measure a bfloat16 engine without CUDA graphs and compare its greedy samples with `tokens`."""
    report = compare(generation(out, dry, "eager", enforce_eager=True), out, "eager")
    largest = report.figures.get("largest |dlogp| against `tokens`", 0.0)
    report.criteria["graphs and eager agree to 0.1 nats"] = on_gpu(largest < 0.1, dry)
    return report


def compare(report: Report, out: Path, name: str) -> Report:
    """Add ratios of rates, and differences of log-probabilities, to the piece `tokens`, if it has run."""
    if not (out / "tokens.json").is_file():
        return report
    other = json.loads((out / "tokens.json").read_text())["report"]["figures"]
    for key, value in [*report.figures.items()]:
        if key.startswith("tokens/s"):
            report.figures[f"{key}: / that of `tokens`"] = value / other[key]
    pairs = [json.loads((out / f"greedy_{n}.json").read_text()) for n in ("tokens", name)]
    differences = [
        abs(p - q)
        for first, second in zip(*pairs)
        for s, t, p, q in zip(first["token_ids"], second["token_ids"], first["logprobs"], second["logprobs"])
        if s == t
    ]
    report.figures |= {"largest |dlogp| against `tokens`": max(differences, default=0.0)}
    report.figures |= {"mean |dlogp| against `tokens`": statistics.fmean(differences or [0.0])}
    return report


# ------------------------------------------------------------------------------------------------------------
# Runs
# ------------------------------------------------------------------------------------------------------------
def train(name: str, out: Path, dry: bool, settings: list[str]) -> list[dict]:
    """Run one rank of train_rl.py; return the rows of its steps after the first two.

    A dry run only reads the settings, because tests/ trains on CPUs.
    """
    run_dir = models() / "runs" / name
    config = "experiments/environments/tiny.yaml"
    common = ["model.ep_size=1", "data.eval=[]", "checkpoint.every=0", f"run.dir={run_dir}"]
    if dry:
        from configure import load_config

        os.chdir(ROOT)
        load_config(["--config", config, *common, *settings])
        return []
    shutil.rmtree(run_dir, ignore_errors=True)  # a finished run would not start a second time
    model_folder("tiny")
    shell([*torchrun(1), "train_rl.py", "--config", config, *common, *settings], out / f"{name}.log")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "score" in row][2:]


def phase_seconds(rows: list[dict]) -> dict[str, float]:
    """Return the median seconds of every phase over steps."""
    phases = sorted({key for row in rows for key in row if key.startswith("seconds")})
    return {phase: statistics.median(row.get(phase, 0.0) for row in rows) for phase in phases}


def tiny(out: Path, dry: bool) -> Report:
    """Train the tiny model."""
    rows = train("tiny", out, dry, ["train.num_steps=200"])
    criterion = "it learns: score up by 0.2"
    if dry:
        return Report(criteria={criterion: NEEDS_GPU})
    score = [statistics.mean(row["score"] for row in ends) for ends in (rows[:10], rows[-10:])]
    figures = {"score, first and last ten steps": score} | phase_seconds(rows)
    return Report(figures, {criterion: score[1] > score[0] + 0.2})


def random_moe(name: str, out: Path, dry: bool, settings: list[str]) -> Report:
    """Train the random MoE of two billion parameters for five steps."""
    size = "dry" if dry else "2B"
    new_tokens = 512
    rows = train(name, out, dry, [
        f"model.path={model_of_size(size, True)}", f"rollout.max_new_tokens={new_tokens}",
        "train.num_steps=6", "train.learning_rate=1e-6", "model.dtype=bfloat16", "rollout.dtype=bfloat16",
        "reward.num_workers=2", "rollout.sleep_level=2", "train.micro_batch_tokens=16384",
        "model.activation_checkpointing=true", "rollout.check_every=2",
        "zero_variance.rl_zvp=true",  # gradients from entropies, because a random model earns no reward
        *settings,
    ])  # fmt: skip
    criterion = "it trains; parity and checksums hold"
    if dry:
        return Report(criteria={criterion: NEEDS_GPU})
    from experiments.bench.kernels import ceilings

    tokens = statistics.median(row["tokens_total"] for row in rows)
    reached = (
        tokens
        * flops_per_token(SIZES[size], new_tokens)
        / statistics.median(row["seconds/update"] for row in rows)
    )
    peak = ceilings(torch.device("cuda"), torch.bfloat16, 3)["flops"]
    report = Report({"tokens a step": tokens, "update, TFLOP/s": reached / 1e12, "MFU": reached / peak})
    report.figures |= phase_seconds(rows)
    report.figures["k3 KL"] = statistics.median(row["mismatch_k3"] for row in rows)
    report.criteria[criterion] = min(row["grad_norm"] for row in rows) > 0
    report.criteria["k3 KL below the gate of 0.015"] = report.figures["k3 KL"] < 0.015
    return report


def moe(out: Path, dry: bool) -> Report:
    """Train the random MoE with bfloat16 rollouts and an automatic KV cache size."""
    return random_moe("moe", out, dry, ["rollout.kv_cache_gib=null"])


def moe_fp8(out: Path, dry: bool) -> Report:
    """Train the random MoE with FP8 rollouts, replay and truncation."""
    fp8 = ["rollout.fp8=on", "algorithm.router_replay=r3", "algorithm.rollout_correction=token_tis"]
    return random_moe("moe_fp8", out, dry, fp8)


def mismatch(out: Path, dry: bool, model: str) -> Report:
    """Run experiments.bench.mismatch on a model, with one engine after another."""
    path = out / f"mismatch_{model}.json"
    criterion = "R3 takes the route mismatch to 0"
    if dry:
        return Report(criteria={criterion: NEEDS_GPU})
    command = [sys.executable, "-m", "experiments.bench.mismatch", "--models", model, "--json", path]
    shell(command, out / f"mismatch_{model}.log")
    rows = read_results(path)
    report = Report()
    for row in (r for r in rows if r["engine"] == "bfloat16" and r["trainer"] == "bfloat16"):
        name = f"fp8 {row['fp8']}, replay {row['router_replay']}"
        metrics = ("mismatch_routes", "abs_dlogp", "mismatch_k3", "mismatch_ess", "ess_tis")
        report.figures[name] = {key: row[key]["mean"] for key in metrics}
    replayed = [row["mismatch_routes"]["max"] for row in rows if row["router_replay"] == "r3"]
    report.criteria[criterion] = max(replayed) == 0
    return report


def mismatch_tiny(out: Path, dry: bool) -> Report:
    """Measure the mismatch of the model with two layers."""
    return mismatch(out, dry, "tiny")


def mismatch_deep(out: Path, dry: bool) -> Report:
    """Measure the mismatch of the model with eight layers."""
    return mismatch(out, dry, "deep")


# ------------------------------------------------------------------------------------------------------------
# Between GPUs
# ------------------------------------------------------------------------------------------------------------
def exchange(out: Path, dry: bool) -> Report:
    """Measure collectives between all GPUs of this machine: bytes per second that a rank of a ring sends."""
    num_ranks = 1 if dry else torch.cuda.device_count()
    path = out / "exchange_ranks.json"
    command = [*torchrun(num_ranks), "-m", "experiments.bench.gpu_engine", path]
    if num_ranks > 1:
        shell(command, out / "exchange.log")
    else:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        exchange_rank(path, dry)
    figures = {
        f"{name}, GB/s of {num_ranks} ranks": v / 1e9 for name, v in json.loads(path.read_text()).items()
    }
    return Report(figures, {"several GPUs": on_gpu(num_ranks > 1, num_ranks == 1)})


def exchange_rank(path: Path, dry: bool) -> None:
    """Time the collectives on this rank; rank 0 writes the rates."""
    import torch.distributed as dist

    device = torch.device("cpu") if dry else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not dry:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if dry else "nccl")
    num = (2**14 if dry else 2**28) // dist.get_world_size() * dist.get_world_size()
    source, target = (torch.ones(num, dtype=torch.bfloat16, device=device) for _ in range(2))
    shard = source[: num // dist.get_world_size()]
    calls = {
        "all to all": lambda: dist.all_to_all_single(target, source),
        "all gather": lambda: dist.all_gather_into_tensor(target, shard),
        "all reduce": lambda: dist.all_reduce(target),
    }
    size = dist.get_world_size()
    sent = {"all to all": 1, "all gather": 1, "all reduce": 2}  # times (n - 1) / n of the bytes, in a ring
    rates = {}
    for name, call in calls.items():
        times = []
        for _ in range(6):
            dist.barrier()
            times.append(timed(call))
        rates[name] = sent[name] * (size - 1) / size * 2 * num / min(times[1:])
    if dist.get_rank() == 0:
        path.write_text(json.dumps(rates))
    dist.destroy_process_group()


PIECES: dict[str, Callable[[Path, bool], Report]] = {
    piece.__name__: piece
    for piece in (formats, sync, sync_fp8, tokens, tokens_fp8, eager, tiny, moe, moe_fp8, mismatch_tiny,
                  mismatch_deep, exchange)
}  # fmt: skip
EXPECTED = {  # {piece: {start of a figure's name: value expected of one H200, written before the first run}}
    "formats": {"weights, torch: scales": "0", "weights, torch: share": "below 1e-3"},
    "sync": {
        "GiB in use, engine": "4: context, graphs and workspaces", "GiB in use, with": "10: 5.9 of weights",
        "GiB in use, awake": "40: 24 of keys and values, 5.9 of weights", "GiB in use, asleep": "10",
        "GiB sent": "5.7", "sync with": "0.4: reading and writing 6 GiB, 512 x 3 Python calls a layer",
        "check": "0.3", "sleep": "0.2", "sync of 48": "3",
    },
    "sync_fp8": {
        "sync with": "1.0: 1,024 casts of an expert more", "sync of 48": "8", "GiB in use, awake": "37",
    },
    "tokens": {
        "tokens/s, 8": "1,500: 5 ms a step for four layers and the head", "tokens/s, 32": "5,500",
        "tokens/s, 64": "10,000", "tokens/s, 256": "32,000", "tokens/s, the last with": "0.95 of without",
        "tokens/s, the last without": "as with seeds", "tokens/s, 16,384": "2,500",
    },
    "tokens_fp8": {
        "tokens/s, 8": "1,500", "tokens/s, 32": "6,000", "tokens/s, 64": "11,000", "tokens/s, 256": "36,000",
        "mean |dlogp|": "0.03",
    },
    "eager": {"tokens/s, 8": "0.5 of graphs", "tokens/s, 256": "0.7 of graphs", "largest |dlogp|": "0.05"},
    "tiny": {"score": "0.3 to 0.9", "seconds/update": "0.1", "seconds/sync": "0.05"},
    "moe": {"MFU": "0.2", "k3 KL": "0.001", "seconds/sync": "0.6", "update, TFLOP/s": "150"},
    "moe_fp8": {"MFU": "0.2", "k3 KL": "0.005", "seconds/sync": "1.2"},
    "mismatch_tiny": {"fp8 off, replay r3": "mismatch_routes 0, mismatch_k3 1e-4"},
    "mismatch_deep": {"fp8 off, replay r3": "mismatch_routes 0, mismatch_k3 1e-4"},
    "exchange": {"all to all": "150 over NVLink, 2,000 on one GPU", "all gather": "150", "all reduce": "150"},
}  # fmt: skip

if __name__ == "__main__":
    exchange_rank(Path(sys.argv[1]), dry=False)
