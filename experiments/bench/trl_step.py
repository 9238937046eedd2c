"""Measure the seconds of a training step here and in TRL, on the same tiny model, data and machine, in turns.

    python -m venv trl_venv && trl_venv/bin/pip install -r requirements-cpu.txt \\
        -r experiments/bench/requirements-trl.txt
    python -m experiments.bench.trl_step --trl-python trl_venv/bin/python --json trl_step.json
    python -m experiments.bench.trl_step --trl-python trl_venv/bin/python --trainers ep1 generate --repeats 5
    python -m experiments.bench.trl_step --trl-python trl_venv/bin/python run.log_every=10  # train_rl.py only

Two ranks, float32, GRPO on 32 prompts x 8 completions per step, one update, without a KL term. The workloads
are the ones of experiments.bench.step: at most 16 tokens, and 256 tokens from a model that hardly ever ends a
completion. These trainers take turns:
    ep1         train_rl.py, every rank with all experts.
    ep2         train_rl.py, half of the experts on each rank.
    all_tokens  ep1 with the extra work of TRL: rows without gradient (train.skip_zero_gradient=false), and
                the prompt of every completion (train.share_prompts=false). In the second workload all
                rewards are equal, so ep1 and ep2 skip the entire update.
    generate    TRL's GRPOTrainer with transformers' generate.
    vllm        TRL's GRPOTrainer with vLLM in its processes.
TRL's reward compares text, TRL uses "eager" experts, and nothing is compiled. TRL's weight sync fails in
vLLM's CPU build, which packs weights, so vllm_worker.py loads the weights. A figure is the median over the
steps of a run after the first five; the table shows the median over runs, the range, and ratios to ep1. The
JSON file holds {trainer: results as of experiments.bench.step}; TRL reports no phases.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from experiments.bench.common import ROOT, TINY, endless_model, make_parser, markdown, spread, write_results

OURS = {
    "ep1": ("model.ep_size=1",),
    "ep2": ("model.ep_size=2",),
    "all_tokens": ("model.ep_size=1", "train.skip_zero_gradient=false", "train.share_prompts=false"),
}
TRAINERS = (*OURS, "generate", "vllm")
NUM_PROMPTS = 32
GROUP_SIZE = 8
NUM_RANKS = 2


def trl_config(output: Path, max_new_tokens: int, num_steps: int, use_vllm: bool, **changes):
    """Return TRL's equivalent of the settings in experiments/environments/demo.yaml, with changes."""
    from trl import GRPOConfig

    settings = dict(
        output_dir=str(output), max_steps=num_steps, learning_rate=2e-4, lr_scheduler_type="constant",
        adam_beta1=0.9, adam_beta2=0.95, per_device_train_batch_size=NUM_PROMPTS * GROUP_SIZE // NUM_RANKS,
        gradient_accumulation_steps=1, num_generations=GROUP_SIZE, max_completion_length=max_new_tokens,
        temperature=1.0, loss_type="grpo", beta=0.0, epsilon=0.2, use_vllm=use_vllm, vllm_mode="colocate",
        vllm_importance_sampling_correction=False, vllm_gpu_memory_utilization=0.05,
        vllm_max_model_length=max_new_tokens + 16, bf16=False, use_cpu=True, gradient_checkpointing=False,
        save_strategy="no", logging_steps=1, report_to="none", disable_tqdm=True, seed=0,
        model_init_kwargs={"dtype": "float32", "experts_implementation": "eager"},
    )  # fmt: skip
    return GRPOConfig(**(settings | changes))


def is_right(completions: list[str], answer: list[str], **columns) -> list[float]:
    """Return 1.0 for each completion that equals the answer, as the verifier `exact` does."""
    return [float(text.strip() == right) for text, right in zip(completions, answer)]


def sync_weights(generation) -> None:
    """Send TRL's weights to its vLLM as train_rl.py does, in place of VLLMGeneration.sync_weights()."""
    from vllm_worker import load_weights_in_worker

    worker = generation.llm.llm_engine.model_executor.driver_worker
    load_weights_in_worker(worker, generation._iter_named_params(), on_cpu=True)
    generation.llm.reset_prefix_cache()


def timed_training(model: Path, reward: Callable, config, rows) -> dict[str, list[float]]:
    """Train with TRL; return the seconds, with generation, and the mean completion length of each step."""
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    start = [0.0]
    seconds = []
    lengths = []

    class Clock(TrainerCallback):
        """Measures the time of each step, including generation."""

        def on_step_begin(self, *_, **__):
            start[0] = start[0] or time.perf_counter()

        def on_step_end(self, *_, **__):
            seconds.append(time.perf_counter() - start[0])
            start[0] = time.perf_counter()

        def on_log(self, *_, logs: dict, **__):
            lengths.extend(value for key, value in logs.items() if key == "completions/mean_length")

    GRPOTrainer(
        model=str(model), reward_funcs=reward, args=config, train_dataset=rows, callbacks=[Clock()]
    ).train()
    return {"seconds": seconds, "lengths": lengths}


def train_with_trl(model: Path, max_new_tokens: int, num_steps: int, use_vllm: bool, result: Path) -> None:
    """Train on this rank; rank 0 writes the seconds and the mean completion length of each step."""
    import torch
    from datasets import load_dataset
    from trl.generation import vllm_generation

    vllm_generation.VLLMGeneration.sync_weights = sync_weights
    torch.set_num_threads(1)
    rows = load_dataset("json", data_files=str(ROOT / "data/built/tiny/train.jsonl"), split="train")
    with tempfile.TemporaryDirectory() as scratch:
        config = trl_config(Path(scratch), max_new_tokens, num_steps, use_vllm)
        figures = timed_training(model, is_right, config, rows)
    if int(os.environ["RANK"]) == 0:
        result.write_text(json.dumps(figures))


def run_trl(
    python: Path, model: Path, max_new_tokens: int, num_steps: int, use_vllm: bool, warmup: int
) -> dict:
    """Return medians over the steps of one run of TRL, under the names of experiments.bench.step."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        command = [
            str(python), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}",
            "-m", "experiments.bench.trl_step", "--result", str(result), "--model", str(model),
            "--tokens", str(max_new_tokens), "--steps", str(num_steps),
            "--trainers", "vllm" if use_vllm else "generate",
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
        if done.returncode:
            message = done.stderr.partition("torch.distributed.elastic.multiprocessing.errors")[0]
            sys.exit(f"TRL's run failed:\n{message[-6000:]}")
        figures = json.loads(result.read_text())
    step = statistics.median(figures["seconds"][warmup:])
    completions = NUM_PROMPTS * GROUP_SIZE
    tokens = completions * statistics.median(figures["lengths"][warmup:])
    return {"step": step, "completions_per_s": completions / step, "tokens_per_s": tokens / step}


def table_lines(data: dict) -> list[str]:
    """Return the table of {trainer: {workload: {figure: spread}}}, with ratios to ep1."""
    workloads = list(next(iter(data.values())))
    rows = []
    for trainer, results in data.items():
        row = [trainer]
        for workload in workloads:
            step = results[workload]["step"]
            row.append(f"{step['median']:.3f} ({step['min']:.3f}-{step['max']:.3f})")
            base = data.get("ep1", results)[workload]["step"]["median"]
            row.append(f"{step['median'] / base:.2f}")
        rows.append(row)
    (num_runs,) = {figures["step"]["n"] for results in data.values() for figures in results.values()}
    heads = [head for workload in workloads for head in (f"{workload}, s", "/ ep1")]
    return markdown([f"seconds per step, median (range) of {num_runs} runs", *heads], rows)


def main() -> None:
    """Run the trainers in turns and print the table; in a rank of TRL, train."""
    parser = make_parser(__doc__, script=True)
    add = parser.add_argument
    add("--trl-python", type=Path, default=Path(sys.executable), help="Python interpreter with TRL installed")
    add(
        "--trainers",
        nargs="+",
        choices=TRAINERS,
        default=list(TRAINERS),
        help="trainers to run (default: all)",
    )
    add(
        "--workloads",
        nargs="+",
        metavar="NAME",
        help="workloads of experiments.bench.step, for example '16 new tokens' (default: all)",
    )
    add("--repeats", type=int, default=3, help="runs per workload and trainer (default: %(default)s)")
    add("--steps", type=int, help="steps per run (default: 60 and 12)")
    for name in ("--result", "--model"):
        add(name, type=Path, help="internal: set for the ranks of TRL")
    add("--tokens", type=int, help="internal: set for the ranks of TRL")
    add("settings", nargs="*", metavar="section.key=value", help="settings of train_rl.py (not of TRL)")
    args = parser.parse_intermixed_args()
    if args.result:
        train_with_trl(args.model, args.tokens, args.steps, args.trainers == ["vllm"], args.result)
        return
    from experiments.bench.step import WARMUP_STEPS, WORKLOADS

    if args.steps is not None and args.steps <= WARMUP_STEPS:
        sys.exit(f"--steps must be above {WARMUP_STEPS}, because the first steps are not counted")
    if unknown := set(args.workloads or ()).difference(WORKLOADS):
        sys.exit(f"--workloads: unknown {min(unknown)!r}, choose from {', '.join(map(repr, WORKLOADS))}")
    if not TINY.is_dir():
        sys.exit("the tiny model is missing: run `python -m data.tiny` first")
    table = measure(args)
    print("\n".join(table_lines(table)))
    write_results(args.json, table)


def measure(args) -> dict[str, dict]:
    """Run the trainers in turns; return {trainer: {workload: {figure: spread}}}."""
    from experiments.bench.step import WARMUP_STEPS, WORKLOADS, run_once

    table = {trainer: {} for trainer in args.trainers}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        endless_model(scratch / "endless")
        for name in args.workloads or WORKLOADS:
            tokens, num_steps = WORKLOADS[name]
            model = TINY if tokens == 16 else scratch / "endless"
            num_steps = args.steps or num_steps
            runs = {trainer: [] for trainer in args.trainers}
            for _ in range(args.repeats):
                for trainer, trainer_runs in runs.items():
                    if trainer in OURS:
                        settings = [*OURS[trainer], *args.settings]
                        trainer_runs.append(run_once(args.script, tokens, num_steps, scratch, settings))
                    else:
                        with_vllm = trainer == "vllm"
                        options = (args.trl_python, model, tokens, num_steps, with_vllm, WARMUP_STEPS)
                        trainer_runs.append(run_trl(*options))
                    print(f"{name}, {trainer}: {trainer_runs[-1]['step']:.3f} s a step", flush=True)
            for trainer, trainer_runs in runs.items():
                table[trainer][name] = {
                    figure: spread([run[figure] for run in trainer_runs]) for figure in trainer_runs[0]
                }
    return table


if __name__ == "__main__":
    main()
