"""Measure the seconds of a training step by phase, on two ranks with the demo's settings.

    python -m experiments.bench.step                     # three runs of 60 steps: about a minute
    python -m experiments.bench.step --json step.json
    python -m experiments.bench.step reward.overlap=false                  # with settings of train_rl.py
    python -m experiments.bench.step --script changed.py                   # a changed copy of train_rl.py

A figure is the median over the steps of a run after the first five; the table shows the median over runs and
the range.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from experiments.bench.common import (
    ROOT,
    TINY,
    make_parser,
    markdown,
    spread,
    torchrun,
    with_range,
    write_results,
)

WARMUP_STEPS = 5  # the first steps allocate buffers
NUM_STEPS = 60
PHASES = ("rollout", "reward", "logprobs", "update", "sync")


def run_once(script: Path, settings: list[str]) -> dict[str, float]:
    """Return medians over the steps of one run of the trainer: seconds, and rates per second of a step."""
    with tempfile.TemporaryDirectory() as run_dir:
        command = [
            *torchrun(2), str(script.resolve()), "--config", "experiments/environments/demo.yaml",
            f"model.path={TINY}", f"run.dir={run_dir}", f"train.num_steps={NUM_STEPS}", "data.eval=[]",
            *settings,
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(f"the run failed:\n{done.stderr[-3000:]}")
        rows = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "score" in row][WARMUP_STEPS:]
    if not rows:
        sys.exit(f"train.num_steps must be above {WARMUP_STEPS}: the first steps are not counted")
    figures = {name: statistics.median(row.get(f"seconds/{name}", 0.0) for row in rows) for name in PHASES}
    figures["step"] = statistics.median(row["seconds_per_step"] for row in rows)
    tokens = statistics.median(row["tokens_total"] for row in rows)
    return figures | {"tokens/s": tokens / figures["step"], "tokens/s, rollout": tokens / figures["rollout"]}


def main() -> None:
    """Repeat the run and print the table."""
    parser = make_parser(__doc__, script=True)
    parser.add_argument("--repeats", type=int, default=3, help="runs (default: %(default)s)")
    parser.add_argument(
        "settings", nargs="*", metavar="section.key=value",
        help="settings of train_rl.py, for example reward.overlap=false",
    )  # fmt: skip
    args = parser.parse_args()
    if not TINY.is_dir():
        sys.exit("the tiny model is missing: run `bash experiments/prepare.sh tiny` first")
    rounds = tqdm(range(args.repeats), desc="bench", unit="run", disable=None)
    runs = [run_once(args.script, args.settings) for _ in rounds]
    table = {name: spread([run[name] for run in runs]) for name in runs[0]}
    rows = [[name, with_range(figure, ",.0f" if "/" in name else ".3f")] for name, figure in table.items()]
    print("\n".join(markdown(["seconds of a step", f"median (range) of {args.repeats} runs"], rows)))
    write_results(args.json, table)


if __name__ == "__main__":
    main()
