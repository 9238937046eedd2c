"""Measure the seconds of a training step by phase, on two ranks with all features of the demo.

    python -m experiments.bench.step                     # both workloads, three runs each: about 5 minutes
    python -m experiments.bench.step --json step.json
    python -m experiments.bench.step reward.overlap=false                  # with settings of train_rl.py
    python -m experiments.bench.step --script changed.py                   # a changed copy of train_rl.py

The first workload is the demo's: 32 prompts x 8 completions of at most 16 tokens. The second has completions
of 256 tokens, from the same model with an end-of-sequence token that is rarely sampled. A figure is the
median over the steps of a run after the first five; the table shows the median over runs and the range.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

from experiments.bench.common import (
    ROOT,
    TINY,
    endless_model,
    make_parser,
    markdown,
    spread,
    torchrun,
    with_range,
    write_results,
)

WARMUP_STEPS = 5  # the first steps allocate buffers
PHASES = ("rollout", "reward", "logprobs", "update", "sync")
WORKLOADS = {"16 new tokens": (16, 60), "256 new tokens": (256, 12)}  # name: (max_new_tokens, steps)
RATES = (
    ("completions_per_s", "completions/s", ".0f"),
    ("tokens_per_s", "generated tokens/s, whole step", ".0f"),
    ("rollout_tokens_per_s", "generated tokens/s, rollout alone", ".0f"),
    ("sync_bytes", "bytes per sync", ",.0f"),
    ("sync_gb_per_s", "sync, GB/s", ".2f"),
    ("copy_gb_per_s", "plain copy of the same bytes, GB/s", ".2f"),
)


def run_once(
    script: Path, max_new_tokens: int, num_steps: int, scratch: Path, settings: list[str]
) -> dict[str, float]:
    """Return medians over the steps of one run of the trainer, in seconds."""
    model = TINY if max_new_tokens == 16 else scratch / "endless"
    run_dir = scratch / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [
        *torchrun(2), str(script.resolve()), "--config", "experiments/environments/demo.yaml",
        f"model.path={model}", f"run.dir={run_dir}", f"rollout.max_new_tokens={max_new_tokens}",
        f"train.num_steps={num_steps}", "data.eval=[]", *settings,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"the run failed:\n{done.stderr[-3000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "score" in row][WARMUP_STEPS:]
    for row in rows:
        named = sum(row.get(f"seconds/{phase}", 0.0) for phase in PHASES)
        row["seconds/other"] = row["seconds_per_step"] - named
    phases = [*PHASES, "other"]
    figures = {phase: statistics.median(row.get(f"seconds/{phase}", 0.0) for row in rows) for phase in phases}
    step = statistics.median(row["seconds_per_step"] for row in rows)
    tokens = statistics.median(row["tokens_total"] for row in rows)
    completions = round(rows[0]["tokens_total"] / rows[0]["completion_tokens"])
    return figures | {
        "step": step,
        "completions_per_s": completions / step,
        "tokens_per_s": tokens / step,
        "rollout_tokens_per_s": tokens / figures["rollout"],
        "sync_bytes": rows[0]["sync_bytes"],
        "sync_gb_per_s": rows[0]["sync_bytes"] / figures["sync"] / 1e9,
        "copy_gb_per_s": rows[0]["sync_bytes"] / copy_seconds(rows[0]["sync_bytes"]) / 1e9,
    }


def copy_seconds(num_bytes: int, repeats: int = 50) -> float:
    """Return the median seconds to copy this number of bytes with one thread."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.empty(num_bytes, dtype=torch.uint8)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def table_lines(data: dict) -> list[str]:
    """Return the table of {workload: {figure: spread}}."""
    (num_runs,) = {figure["n"] for workload in data.values() for figure in workload.values()}
    rows = [
        [figure, *(with_range(workload[figure], ".3f") for workload in data.values())]
        for figure in (*PHASES, "other", "step")
    ]
    rows += [[text, *(format(w[name]["median"], form) for w in data.values())] for name, text, form in RATES]
    return markdown([f"seconds per step, median (range) of {num_runs} runs", *data], rows)


def main() -> None:
    """Run the workloads one after another and print the table."""
    parser = make_parser(__doc__, script=True)
    parser.add_argument("--repeats", type=int, default=3, help="runs per workload (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="steps per run (default: 60 and 12)")
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS, metavar="NAME",
        help=f"workloads to run, of {', '.join(map(repr, WORKLOADS))} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="section.key=value",
        help="settings of train_rl.py, for example reward.overlap=false",
    )
    args = parser.parse_args()
    if args.steps is not None and args.steps <= WARMUP_STEPS:
        sys.exit(
            f"--steps must be above {WARMUP_STEPS}, because the first {WARMUP_STEPS} steps are not counted"
        )
    if not TINY.is_dir():
        sys.exit("the tiny model is missing: run `bash experiments/prepare.sh tiny` first")
    torch.set_num_threads(1)
    table = {}
    with tempfile.TemporaryDirectory() as scratch:
        endless_model(Path(scratch) / "endless")
        progress = tqdm(total=args.repeats * len(args.workloads), desc="bench", unit="run", disable=None)
        for name in args.workloads:
            max_new_tokens, num_steps = WORKLOADS[name]
            num_steps = args.steps or num_steps
            runs = []
            for _ in range(args.repeats):
                runs.append(run_once(args.script, max_new_tokens, num_steps, Path(scratch), args.settings))
                progress.update()
            table[name] = {figure: spread([run[figure] for run in runs]) for figure in runs[0]}
        progress.close()
    print("\n".join(table_lines(table)))
    write_results(args.json, table)


if __name__ == "__main__":
    main()
