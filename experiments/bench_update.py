"""Seconds of an update on a heavy-tailed batch, balanced and as the rows come; and of the old-logprob pass.

    python experiments/bench_update.py                       two ranks, tiny MoE, about a minute
    python experiments/bench_update.py --json update.json

The batch has the lengths of the rollout benchmark's first step and random tokens. train.balance deals prompts
to ranks and rows to micro-batches by tokens; without it both come as they are. Bypass (algorithm.old_policy:
rollout) saves the pass over all completions before the updates of a step with several. Cases take turns;
median (range).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments.workload import Workload

WORKLOAD = ROOT / "experiments" / "rollouts" / "workload.json"
CASES = {"as they come": "false", "balanced": "true"}  # train.balance


def worker(args) -> None:
    """Alternate the cases; rank 0 writes seconds and shares of all rounds."""
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    import moe_model
    import train_rl
    from data.prompts import Prompt
    from experiments.metrics import reduce_metrics
    from experiments.settings import load_config
    from reward import Verdict
    from rollout import Completion

    torch.set_num_threads(1)
    moe_model.init_deepspeed()
    rank, world_size, workload = dist.get_rank(), dist.get_world_size(), Workload.load(args.workload)
    group = moe_model.create_expert_parallel_group(world_size, 8)
    policy = moe_model.Policy(moe_model.load_config(args.model), group)
    moe_model.load_hf(policy, args.model)
    generator = torch.Generator().manual_seed(0)
    groups = []
    for place, row in enumerate(workload.lengths[0].tolist()):
        of_group = train_rl.Group(place, 0)
        for number, length in enumerate(row):
            tokens = torch.randint(3, 98, (length,), generator=generator).tolist()
            completion = Completion(tokens, [-3.0] * length, "stop", 0.0)
            of_group.put(number, completion, Verdict(float(number % 2), "ok" if number % 2 else "wrong"))
        groups.append(of_group)
    prompts = [Prompt("x", "1", "exact", "bench")]
    common = ["data.train=[{path: unused}]", f"train.micro_batch_tokens={args.micro_batch_tokens}"]
    configs = {name: load_config([*common, f"train.balance={on}"]) for name, on in CASES.items()}
    engine = moe_model.deepspeed_engine(policy, next(iter(configs.values())).train)
    found = {name: {"update": [], "pass": []} for name in CASES}
    for _ in tqdm(range(args.repeats + 1), desc="bench", unit="round", disable=rank > 0):
        for name, config in configs.items():
            outcomes = {group.place: group.outcome(False) for group in groups}
            own, _ = train_rl.drop_and_balance(groups[rank::world_size], outcomes, config)
            batch = train_rl.collate(own, prompts, [[1] * workload.recipe.prompt_tokens])
            batch.rewards = torch.tensor([verdict.reward for verdict in batch.verdicts])
            batch.advantages = train_rl.token_advantages(batch, config)
            dist.barrier()
            start = time.perf_counter()
            train_rl.outputs_of_batch(policy, batch, config)
            dist.barrier()
            middle = time.perf_counter()
            metrics = train_rl.update_policy(engine, batch, config)
            dist.barrier()
            found[name]["update"].append(time.perf_counter() - middle)
            found[name]["pass"].append(middle - start)
            kept = ("padding_frac", "update_tokens", "update_tokens_max")
            found[name] |= reduce_metrics({key: metrics[key] for key in kept})
            most = train_rl.micro_batches_of(batch, list(range(len(batch.prompts))), config.train)
            found[name]["micro_batches"] = len(most)
    if rank == 0:
        args.result.write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, help="write the rows here")
    add("--workload", type=Path, default=WORKLOAD, help="see experiments/workload.py")
    add("--repeats", type=int, default=9, help="rounds of both cases (default: %(default)s)")
    add("--micro-batch-tokens", type=int, default=1024, help="as in training (default: %(default)s)")
    add("--model", type=Path, default=ROOT / "data/built/tiny/model", help="folder of the model")
    add("--result", type=Path, help=argparse.SUPPRESS)  # set in the ranks
    args = parser.parse_args()
    if args.result:
        return worker(args)
    if not (args.model / "config.json").is_file():
        sys.exit(f"{args.model} is missing; make it by `python -m data.tiny`")
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__,
            *sys.argv[1:], "--result", str(result),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            sys.exit("the benchmark failed, see above")
        found = json.loads(result.read_text())
    rows = []
    print(
        "| rows | update, s | old-logprob pass, s | padding | tokens, rank max / mean | micro-batches |"
    )
    print("|---|---|---|---|---|---|")
    for name, case in found.items():
        update, old = case["update"][1:], case["pass"][1:]  # the first round allocates buffers
        row = {"name": name, "seconds": statistics.median(update), "pass": statistics.median(old)}
        row |= {"seconds_min": min(update), "seconds_max": max(update), "padding": case["padding_frac"]}
        row["imbalance"] = case["update_tokens_max"] / case["update_tokens"]
        row["micro_batches"] = case["micro_batches"]
        rows.append(row)
        print(
            f"| {name} | {row['seconds']:.3f} ({row['seconds_min']:.3f}-{row['seconds_max']:.3f}) | "
            f"{row['pass']:.3f} | {row['padding']:.3f} | {row['imbalance']:.3f} | {row['micro_batches']} |"
        )
    pairs = zip(found["as they come"]["update"][1:], found["balanced"]["update"][1:])
    print(f"as they come / balanced: {statistics.median(one / other for one, other in pairs):.2f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
