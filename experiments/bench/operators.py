"""Measure the share of an update's time per kind of torch operator.

    python -m experiments.bench.operators                            # the demo, two ranks: about a minute
    python -m experiments.bench.operators --json operators.json
    python -m experiments.bench.operators --config my.yaml model.ep_size=2        # another run
    python -m experiments.bench.operators --script changed.py        # with a changed copy of train_rl.py

torch's profiler records the updates of the last steps of a run on rank 0. The time of an operator excludes
the operators that it calls. An operator belongs to the first kind below with a matching pattern, for example
aten::addmm to "matrix products". The remaining time is outside of all operators: Python, autograd and
DeepSpeed. The profiler itself takes time, so read shares here, and seconds in experiments.bench.step.
"""

import json
import re
import sys
import time
from collections import Counter
from pathlib import Path

from experiments.bench.common import (
    ROOT,
    load_trainer,
    make_parser,
    markdown,
    run_ranks,
    spread,
    write_results,
)

DEMO = ROOT / "experiments" / "environments" / "demo.yaml"
KINDS = {  # kind: pattern of operator names
    "matrix products": r"aten::_?(grouped_)?(addmm|mm|bmm|baddbmm)",
    "attention": r"aten::.*(scaled_dot_product|flash_attention).*",
    "collectives": r"(c10d::|gloo:|nccl:).*",
    "rows and copies": r"aten::(index|gather|scatter|masked_scatter|cat|copy_|clone|sort|fill_|zero_|nonz).*",
    "optimizer": r"Optimizer\..*|aten::(_foreach|_fused|addcdiv|addcmul|lerp).*",
    "element by element, sums": r"aten::.*",
    "autograd's and our functions": r".*",
}


def kind_of(name: str) -> str:
    """Return the kind of an operator: the first of KINDS with a matching pattern."""
    return next(kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, name))


def work(argv: list[str], script: Path, result: Path, num_profiled: int, num_steps: int) -> None:
    """Train on this rank; rank 0 writes the seconds per kind of each profiled update. Collective."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    from runtime.launch import leave, run

    torch.set_num_threads(1)
    trainer = load_trainer(script)
    updates = []
    update_policy = trainer.update_policy

    def profiled_update(engine, batch, config, step):
        if step < num_steps - num_profiled:
            return update_policy(engine, batch, config, step)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            start = time.perf_counter()
            metrics = update_policy(engine, batch, config, step)
            seconds = time.perf_counter() - start
        kinds = Counter()
        for event in profiler.key_averages():
            kinds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
        updates.append({"seconds": seconds, "kinds": kinds})
        if step == num_steps - 1 and dist.get_rank() == 0:
            result.write_text(json.dumps(updates))
        return metrics

    trainer.update_policy = profiled_update
    leave(run(trainer.main, trainer.load_config, argv))


def sum_up(updates: list[dict]) -> dict:
    """Return the spread of the seconds, and of each kind's share, over the profiled updates."""
    shares = []
    for update in updates:
        of_kind = {kind: update["kinds"].get(kind, 0.0) / update["seconds"] for kind in KINDS}
        shares.append(of_kind | {"outside of operators": 1 - sum(of_kind.values())})
    return {
        "seconds": spread([update["seconds"] for update in updates]),
        "shares": {kind: spread([share[kind] for share in shares]) for kind in shares[0]},
    }


def table_lines(data: dict) -> list[str]:
    """Return the table of kinds, largest share first."""
    shares = sorted(data["shares"].items(), key=lambda item: -item[1]["median"])
    rows = [[kind, f"{s['median']:.2f} ({s['min']:.2f}-{s['max']:.2f})"] for kind, s in shares]
    return markdown([f"operators, of {data['seconds']['n']} updates", "share of an update's time"], rows)


def main() -> None:
    """Start the ranks and print the table; in a rank, train."""
    parser = make_parser(__doc__, script=True)
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        metavar="FILE",
        default="experiments/environments/demo.yaml",
        help="settings of the run",
    )
    add("--ranks", type=int, default=2, help="number of ranks (default: %(default)s)")
    add("--steps", type=int, default=30, help="steps of the run (default: %(default)s)")
    add("--profiled", type=int, default=10, help="last steps to profile (default: %(default)s)")
    add("--result", type=Path, help="internal: set for the ranks")
    add("settings", nargs="*", metavar="section.key=value", help="further settings of train_rl.py")
    args = parser.parse_args()
    if not 0 < args.profiled < args.steps:
        parser.error("--profiled must be at least 1 and less than --steps")
    if args.result:
        run_dir = args.result.parent / "run"
        overrides = [
            f"run.dir={run_dir}",
            f"train.num_steps={args.steps}",
            "data.eval=[]",
            "checkpoint.every=0",
        ]
        argv = ["--config", str(args.config), *args.settings, *overrides]
        work(argv, args.script, args.result, args.profiled, args.steps)
    data = sum_up(run_ranks("experiments.bench.operators", args.ranks, sys.argv[1:]))
    print("\n".join(table_lines(data)))
    write_results(args.json, data)


if __name__ == "__main__":
    main()
