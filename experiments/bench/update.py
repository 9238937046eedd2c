"""Measure an update on a heavy-tailed batch: with and without balancing, and by the share with a gradient.

    python -m experiments.bench.update                       # two ranks, tiny MoE: about three minutes
    python -m experiments.bench.update --json update.json
    python -m experiments.bench.update --script changed.py   # with a changed copy of train_rl.py

The batch has the lengths of the rollout benchmark's first step and random tokens. train.balance deals prompts
to ranks and rows to micro-batches by tokens; without balancing both keep the order of arrival. The pass over
all completions before the updates is measured as well, because algorithm.old_policy: rollout skips this pass.
For train.skip_zero_gradient, all scores are equal in some groups, so that the remaining groups hold about a
chosen share of the tokens. The cases take turns.
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
    write_results,
)
from experiments.bench.workload import Recipe, Workload

CASES = {"as they come": "false", "balanced": "true"}  # name: train.balance; all groups have a gradient
SHARES = (0.1, 0.33, 0.66, 1.0)  # fraction of tokens that have a gradient
SKIPPING = {"off": "false", "on": "true"}  # train.skip_zero_gradient


def slots_with_gradient(tokens: list[int], share: float) -> set[int]:
    """Choose groups of all sizes that together hold about a share of the tokens, for example 0.33."""
    chosen = set()
    num_chosen = 0  # tokens of the chosen groups
    num_tokens = 0  # tokens of all groups so far
    for slot in sorted(range(len(tokens)), key=lambda slot: -tokens[slot]):
        num_tokens += tokens[slot]
        if num_chosen + tokens[slot] / 2 <= share * num_tokens:
            chosen.add(slot)
            num_chosen += tokens[slot]
    return chosen


def make_groups(workload: Workload, share: float) -> list:
    """Make the groups of the workload's first step.

    In groups that hold about a share of the tokens, every second completion is right. In the remaining groups
    every completion is right.
    """
    import torch

    from batch import Completion, Group
    from reward import Verdict

    generator = torch.Generator().manual_seed(0)
    groups = []
    rows = workload.lengths[0].tolist()
    varied = slots_with_gradient([sum(lengths) for lengths in rows], share)
    for slot, lengths in enumerate(rows):
        group = Group(slot, 0)
        for sample, length in enumerate(lengths):
            tokens = torch.randint(3, 98, (length,), generator=generator).tolist()
            right = sample % 2 == 1 or slot not in varied
            verdict = Verdict(float(right), "ok" if right else "wrong")
            group.completions.append(Completion(tokens, [-3.0] * length, "stop", 0.0, verdict=verdict))
        groups.append(group)
    return groups


def make_batch(trainer, groups: list, prompt_tokens: int, config):
    """Deal the groups to ranks and make this rank's batch with rewards and advantages. Collective."""
    import torch
    import torch.distributed as dist

    from batch import collate
    from data.prompts import Prompt

    outcomes = {group.slot: group.outcome(False) for group in groups}
    local_groups, _ = trainer.drop_and_deal(
        groups[dist.get_rank() :: dist.get_world_size()], outcomes, config
    )
    batch = collate(local_groups, [Prompt("x", "1", "exact", "bench")], [[1] * prompt_tokens])
    batch.rewards = torch.tensor([verdict.reward for verdict in batch.verdicts])
    batch.advantages = trainer.token_advantages(batch, config)
    return batch


def work(args) -> None:
    """Measure the cases in turns; rank 0 writes the seconds and shares of all rounds. Collective."""
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    import moe_model
    from runtime.metrics import reduce_metrics
    from runtime.schedule import micro_batches_of

    torch.set_num_threads(1)
    moe_model.init_deepspeed()
    trainer = load_trainer(args.script)
    workload = Workload.make(Recipe.load(args.workload))
    group = moe_model.create_expert_parallel_group(dist.get_world_size(), 8)
    policy = moe_model.Policy(moe_model.load_config(args.model), group)
    moe_model.load_hf(policy, args.model)
    cases = {name: (balance, "false", 1.0) for name, balance in CASES.items()}
    cases |= {f"{skip} {share}": ("true", on, share) for share in SHARES for skip, on in SKIPPING.items()}
    common = ["data.train=[{path: unused}]", "train.share_prompts=false"]
    common += [f"train.micro_batch_tokens={args.micro_batch_tokens}"]
    configs = {
        name: trainer.load_config([*common, f"train.balance={balance}", f"train.skip_zero_gradient={skip}"])
        for name, (balance, skip, _) in cases.items()
    }
    groups = {name: make_groups(workload, share) for name, (_, _, share) in cases.items()}
    engine = moe_model.deepspeed_engine(policy, next(iter(configs.values())).train)
    figures = {name: {"update": [], "pass": []} for name in cases}
    for _ in tqdm(range(args.repeats + 1), desc="bench", unit="round", disable=dist.get_rank() > 0):
        for name, config in configs.items():
            batch = make_batch(trainer, groups[name], workload.recipe.prompt_tokens, config)
            dist.barrier()
            start = time.perf_counter()
            if name in CASES:
                trainer.forward_batch(policy, batch, config)
            dist.barrier()
            middle = time.perf_counter()
            metrics = trainer.update_policy(engine, batch, config)
            dist.barrier()
            figures[name]["update"].append(time.perf_counter() - middle)
            figures[name]["pass"].append(middle - start)
            names = ("padding_frac", "update_tokens", "update_tokens_max")
            figures[name] |= reduce_metrics({key: metrics[key] for key in names})
            figures[name]["micro_batches"] = len(micro_batches_of(batch, range(len(batch.prompts)), config))
            figures[name] |= reduce_metrics({
                "gradient_share": ((batch.advantages != 0).sum().item(), batch.response_mask.sum().item())
            })  # fmt: skip
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(figures))
    dist.barrier()


def make_rows(figures: dict) -> list[dict]:
    """Summarise the rounds; the first round allocates buffers and is not counted."""
    rows = []
    for name, case in figures.items():
        update = case["update"][1:]
        old_pass = case["pass"][1:]
        row = {"name": name, "gradient_share": case["gradient_share"], "seconds": statistics.median(update)}
        row |= {"seconds_min": min(update), "seconds_max": max(update), "n": len(update)}
        row |= {"rounds": {"update": update, "pass": old_pass}}
        row["padding"] = case["padding_frac"]
        row["imbalance"] = case["update_tokens_max"] / case["update_tokens"]
        if name in CASES:
            row |= {"pass": statistics.median(old_pass), "micro_batches": case["micro_batches"]}
        else:
            row["skipping"], row["share"] = name.split()
        rows.append(row)
    share_rows = {(row["share"], row["skipping"]): row for row in rows if "share" in row}
    for (share, skipping), row in share_rows.items():
        if skipping == "on":
            pairs = zip(*(figures[f"{skip} {share}"]["update"][1:] for skip in ("on", "off")))
            row["of_whole"] = statistics.median(on / off for on, off in pairs)
    return rows


def table_lines(data: list[dict]) -> list[str]:
    """Return the table of the cases of train.balance."""
    rows = [
        [
            row["name"], f"{row['seconds']:.3f} ({row['seconds_min']:.3f}-{row['seconds_max']:.3f})",
            f"{row['pass']:.3f}", f"{row['padding']:.3f}", f"{row['imbalance']:.3f}", row["micro_batches"],
        ]
        for row in data
        if row["name"] in CASES
    ]  # fmt: skip
    names = ["rows", "update, s", "old-logprob pass, s", "padding", "tokens, rank max / mean"]
    return markdown([*names, "micro-batches"], rows)


def skipping_lines(data: list[dict]) -> list[str]:
    """Return the table of update seconds by the share of tokens with a gradient."""
    rows = []
    share_rows = {(row["share"], row["skipping"]): row for row in data if "share" in row}
    for share in SHARES:
        off, on = (share_rows[str(share), skip] for skip in SKIPPING)
        seconds = [f"{r['seconds']:.3f} ({r['seconds_min']:.3f}-{r['seconds_max']:.3f})" for r in (off, on)]
        rows.append([share, f"{on['gradient_share']:.3f}", *seconds, f"{on['of_whole']:.3f}"])
    names = ["share asked for", "share of the tokens", "update, nothing skipped, s", "skipping, s"]
    return markdown([*names, "ratio, median over pairs"], rows)


def main() -> None:
    """Start the ranks and print the table; in a rank, run work()."""
    parser = make_parser(__doc__, script=True)
    add = parser.add_argument
    add("--workload", type=Path, metavar="FILE", help="recipe file, written by experiments.bench.workload")
    add("--repeats", type=int, default=9, help="rounds of all cases (default: %(default)s)")
    add(
        "--micro-batch-tokens", type=int, default=1024, help="train.micro_batch_tokens (default: %(default)s)"
    )
    add("--model", type=Path, default=TINY, help="folder of the model")
    add("--result", type=Path, help="internal: set for the ranks")
    args = parser.parse_args()
    if args.result:
        run_rank(work, args)
    if not (args.model / "config.json").is_file():
        sys.exit(f"{args.model} is missing; make it by `bash experiments/prepare.sh tiny`")
    figures = run_ranks("experiments.bench.update", 2, sys.argv[1:])
    rows = make_rows(figures)
    print("\n".join([*table_lines(rows), "", *skipping_lines(rows)]))
    pairs = zip(figures["as they come"]["update"][1:], figures["balanced"]["update"][1:])
    print(f"as they come / balanced: {statistics.median(slow / fast for slow, fast in pairs):.2f}")
    write_results(args.json, rows)


if __name__ == "__main__":
    main()
