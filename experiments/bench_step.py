"""Seconds per training step by phase, on two ranks with everything on: the README's step table.

    python experiments/bench_step.py                     both workloads, three runs each, about 5 minutes
    python experiments/bench_step.py --json step.json    and the same numbers as JSON

Workloads: the demo's (32 prompts x 8 completions of at most 16 tokens), and the same with completions of 256
tokens, from the same model with an end-of-sequence token it hardly ever says. A figure is the median over the
steps of a run after the first ones; the table shows the median run and the range of the runs.
"""

import argparse
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

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "data" / "built" / "tiny" / "model"
WARMUP_STEPS = 5  # first steps allocate buffers
PHASES = ("rollout", "reward", "logprobs", "update", "sync")
WORKLOADS = {"16 new tokens": (16, 60), "256 new tokens": (256, 12)}  # name -> (max_new_tokens, steps)


def endless_model(folder: Path, model: Path = MODEL) -> Path:
    """A copy of the tiny model with an end-of-sequence token that it hardly ever produces."""
    shutil.copytree(model, folder)
    for name, key, value in (
        ("config.json", "eos_token_id", 2),
        ("tokenizer_config.json", "eos_token", "<unk>"),
    ):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {key: value}))
    return folder


def run_once(max_new_tokens: int, num_steps: int, scratch: Path, settings: list[str]) -> dict[str, float]:
    """Medians over the steps of one run of train_rl.py, in seconds."""
    model = MODEL if max_new_tokens == 16 else scratch / "endless"
    run_dir = scratch / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train_rl.py",
        "--config", str(ROOT / "experiments/tiny/demo.yaml"), f"model.path={model}", f"run.dir={run_dir}",
        f"rollout.max_new_tokens={max_new_tokens}", f"train.num_steps={num_steps}", "data.eval=[]", *settings,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"the run failed:\n{done.stderr[-3000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "reward" in row][WARMUP_STEPS:]
    for row in rows:
        row["seconds/other"] = row["seconds_per_step"] - sum(
            row.get(f"seconds/{phase}", 0.0) for phase in PHASES
        )
    phases = [*PHASES, "other"]
    figures = {phase: statistics.median(row.get(f"seconds/{phase}", 0.0) for row in rows) for phase in phases}
    step = statistics.median(row["seconds_per_step"] for row in rows)
    tokens = statistics.median(row["tokens_total"] for row in rows)
    completions = round(rows[0]["tokens_total"] / rows[0]["completion_tokens"])
    copy = copy_seconds(rows[0]["sync_bytes"])
    return figures | {
        "step": step,
        "completions_per_s": completions / step,
        "tokens_per_s": tokens / step,
        "rollout_tokens_per_s": tokens / figures["rollout"],
        "sync_bytes": rows[0]["sync_bytes"],
        "sync_gb_per_s": rows[0]["sync_bytes"] / figures["sync"] / 1e9,
        "copy_gb_per_s": rows[0]["sync_bytes"] / copy / 1e9,
    }


def copy_seconds(num_bytes: int, repeats: int = 50) -> float:
    """Median time of a plain copy of as many bytes by one thread."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--repeats", type=int, default=3, help="runs per workload (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="steps per run (default: 60 and 12)")
    parser.add_argument(
        "settings", nargs="*", metavar="section.key=value", help="settings of train_rl.py to compare"
    )
    args = parser.parse_args()
    if args.steps is not None and args.steps <= WARMUP_STEPS:
        sys.exit(f"--steps must be above {WARMUP_STEPS}, the first steps that are not counted")
    if not MODEL.is_dir():
        sys.exit("the tiny model is not there yet: run `python -m data.tiny` first")
    torch.set_num_threads(1)
    table = {}
    with tempfile.TemporaryDirectory() as scratch:
        endless_model(Path(scratch) / "endless")
        progress = tqdm(total=args.repeats * len(WORKLOADS), desc="bench", unit="run", disable=None)
        for name, (max_new_tokens, num_steps) in WORKLOADS.items():
            runs = []
            for _ in range(args.repeats):
                runs.append(run_once(max_new_tokens, args.steps or num_steps, Path(scratch), args.settings))
                progress.update()
            table[name] = {
                figure: {
                    "median": statistics.median(values),
                    "min": min(values),
                    "max": max(values),
                    "n": len(values),
                }
                for figure, values in ((f, [run[f] for run in runs]) for f in runs[0])
            }
        progress.close()

    print(f"| seconds per step, median (range) of {args.repeats} runs | " + " | ".join(table) + " |")
    print("|---|" + "---|" * len(table))
    for figure in [*PHASES, "other", "step"]:
        cells = [
            f"{w[figure]['median']:.3f} ({w[figure]['min']:.3f}-{w[figure]['max']:.3f})"
            for w in table.values()
        ]
        print(f"| {figure} | " + " | ".join(cells) + " |")
    for figure, text, form in (
        ("completions_per_s", "completions/s", ".0f"),
        ("tokens_per_s", "generated tokens/s, whole step", ".0f"),
        ("rollout_tokens_per_s", "generated tokens/s, rollout alone", ".0f"),
        ("sync_bytes", "bytes per sync", ",.0f"),
        ("sync_gb_per_s", "sync, GB/s", ".2f"),
        ("copy_gb_per_s", "plain copy of the same bytes, GB/s", ".2f"),
    ):  # fmt: skip
        print(f"| {text} | " + " | ".join(format(w[figure]["median"], form) for w in table.values()) + " |")
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
