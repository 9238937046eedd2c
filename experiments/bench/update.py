"""Measure an update on a heavy-tailed batch, balanced and as its rows come, and the pass that bypass saves.

    python -m experiments.bench.update                       # two ranks, tiny MoE: about a minute
    python -m experiments.bench.update --json update.json
    python -m experiments.bench.update --script changed.py   # with a changed copy of train_rl.py

The batch has the lengths of the rollout benchmark's first step and random tokens. train.balance deals prompts
to ranks and rows to micro-batches by tokens; without it both come as they are. Bypass (algorithm.old_policy:
rollout) saves the pass over all completions before the updates of a step with several. The cases take turns.
"""

import json
import statistics
import sys
import time
from pathlib import Path

from experiments.bench.common import (
    TINY,
    load_trainer,
    make_parser,
    markdown,
    run_rank,
    run_ranks,
    write_json,
)
from experiments.bench.workload import Recipe, Workload

CASES = {"as they come": "false", "balanced": "true"}  # train.balance


def make_groups(trainer, workload: Workload) -> list:
    """Make the groups of the workload's first step; every second completion is right."""
    import torch

    from reward import Verdict
    from rollout import Completion

    generator, groups = torch.Generator().manual_seed(0), []
    for slot, lengths in enumerate(workload.lengths[0].tolist()):
        group = trainer.Group(slot, 0)
        for sample, length in enumerate(lengths):
            tokens = torch.randint(3, 98, (length,), generator=generator).tolist()
            group.completions.append(Completion(tokens, [-3.0] * length, "stop", 0.0))
            group.verdicts.append(Verdict(float(sample % 2), "ok" if sample % 2 else "wrong"))
        groups.append(group)
    return groups


def make_batch(trainer, groups: list, prompt_tokens: int, config):
    """Deal the groups to ranks and make this rank's batch, ready for an update. Collective."""
    import torch
    import torch.distributed as dist

    from data.prompts import Prompt

    outcomes = {group.slot: group.outcome(False) for group in groups}
    own, _ = trainer.drop_and_deal(groups[dist.get_rank() :: dist.get_world_size()], outcomes, config)
    batch = trainer.collate(own, [Prompt("x", "1", "exact", "bench")], [[1] * prompt_tokens])
    batch.rewards = torch.tensor([verdict.reward for verdict in batch.verdicts])
    batch.valid = trainer.has_verdict(batch.verdicts)
    batch.advantages = trainer.token_advantages(batch, config)
    return batch


def work(args) -> None:
    """Alternate the cases; rank 0 writes seconds and shares of all rounds. Collective."""
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    import moe_model
    from runtime.metrics import reduce_metrics
    from runtime.schedule import split_micro_batches

    torch.set_num_threads(1)
    moe_model.init_deepspeed()
    trainer, workload = load_trainer(args.script), Workload.make(Recipe.load(args.workload))
    group = moe_model.create_expert_parallel_group(dist.get_world_size(), 8)
    policy = moe_model.Policy(moe_model.load_config(args.model), group)
    moe_model.load_hf(policy, args.model)
    groups = make_groups(trainer, workload)
    common = ["data.train=[{path: unused}]", f"train.micro_batch_tokens={args.micro_batch_tokens}"]
    configs = {name: trainer.load_config([*common, f"train.balance={on}"]) for name, on in CASES.items()}
    engine = moe_model.deepspeed_engine(policy, next(iter(configs.values())).train)
    found = {name: {"update": [], "pass": []} for name in CASES}
    for _ in tqdm(range(args.repeats + 1), desc="bench", unit="round", disable=dist.get_rank() > 0):
        for name, config in configs.items():
            batch = make_batch(trainer, groups, workload.recipe.prompt_tokens, config)
            dist.barrier()
            start = time.perf_counter()
            trainer.forward_batch(policy, batch, config)
            dist.barrier()
            middle = time.perf_counter()
            metrics = trainer.update_policy(engine, batch, config)
            dist.barrier()
            found[name]["update"].append(time.perf_counter() - middle)
            found[name]["pass"].append(middle - start)
            kept = ("padding_frac", "update_tokens", "update_tokens_max")
            found[name] |= reduce_metrics({key: metrics[key] for key in kept})
            lengths, settings = trainer.sequence_lengths(batch), config.train
            rows, limit = list(range(len(lengths))), settings.micro_batch_tokens
            found[name]["micro_batches"] = len(split_micro_batches(lengths, rows, limit, settings.balance))
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(found))
    dist.barrier()


def make_rows(found: dict) -> list[dict]:
    """Sum the rounds up; the first of them allocates buffers and is not counted."""
    rows = []
    for name, case in found.items():
        update, old = case["update"][1:], case["pass"][1:]
        row = {"name": name, "seconds": statistics.median(update), "pass": statistics.median(old)}
        row |= {"seconds_min": min(update), "seconds_max": max(update), "padding": case["padding_frac"]}
        row["imbalance"] = case["update_tokens_max"] / case["update_tokens"]
        row["micro_batches"] = case["micro_batches"]
        rows.append(row)
    return rows


def table_lines(data: list[dict]) -> list[str]:
    """Return the table of the cases."""
    rows = [
        [
            row["name"], f"{row['seconds']:.3f} ({row['seconds_min']:.3f}-{row['seconds_max']:.3f})",
            f"{row['pass']:.3f}", f"{row['padding']:.3f}", f"{row['imbalance']:.3f}", row["micro_batches"],
        ]
        for row in data
    ]  # fmt: skip
    names = ["rows", "update, s", "old-logprob pass, s", "padding", "tokens, rank max / mean"]
    return markdown([*names, "micro-batches"], rows)


def main() -> None:
    """Start the ranks and print the table; in a rank, do its part."""
    parser = make_parser(__doc__, script=True)
    add = parser.add_argument
    add("--workload", type=Path, metavar="FILE", help="a recipe, see experiments.bench.workload")
    add("--repeats", type=int, default=9, help="rounds of both cases (default: %(default)s)")
    add("--micro-batch-tokens", type=int, default=1024, help="as in training (default: %(default)s)")
    add("--model", type=Path, default=TINY, help="folder of the model")
    add("--result", type=Path, help="set by the benchmark itself in its ranks")
    args = parser.parse_args()
    if args.result:
        run_rank(work, args)
    if not (args.model / "config.json").is_file():
        sys.exit(f"{args.model} is missing; make it by `python -m data.tiny`")
    found = run_ranks("experiments.bench.update", 2, sys.argv[1:])
    rows = make_rows(found)
    print("\n".join(table_lines(rows)))
    pairs = zip(found["as they come"]["update"][1:], found["balanced"]["update"][1:])
    print(f"as they come / balanced: {statistics.median(one / other for one, other in pairs):.2f}")
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
