"""Accuracy on held-out sets: completions to ask for, and what they say of the policy."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from data.prompts import Prompt
from data.stream import seed_of
from experiments.checks import check_verdicts
from experiments.metrics import reduce_metrics
from experiments.run_dir import TrainState
from experiments.settings import Config
from reward import Verdict
from rollout import Completion, Request


@dataclass(frozen=True)
class Evaluation:
    """One evaluation's share of this rank: every world-th prompt, greedy and k samples of each."""

    requests: list[Request]  # set after set, prompt after prompt, the greedy one first
    prompts: list[Prompt]  # of each request


def evaluation_is_due(state: TrainState, config: Config) -> bool:
    """Whether the policy of this step is to be evaluated and has not been: first, last, every eval.every."""
    every = config.eval.every
    on_the_way = state.step == 0 or (every > 0 and state.step % every == 0)
    return state.evaluated_step < state.step and (on_the_way or state.is_last(config))


def plan_evaluation(sets: dict[str, tuple[list[Prompt], list[list[int]]]], config: Config) -> Evaluation:
    """The requests of an evaluation; samples use the same random numbers at each.

    sets: {name: (prompts, token ids)}. They are expected to take no time, so that they are admitted last.
    """
    rank, world_size, k = dist.get_rank(), dist.get_world_size(), config.eval.num_samples
    budget, seed = config.eval.max_new_tokens or config.rollout.max_new_tokens, config.train.seed
    requests, owners = [], []
    for name, (prompts, prompt_ids) in sets.items():
        for i in range(rank, len(prompts), world_size):
            for sample, temperature in enumerate([0.0] + [config.rollout.temperature] * k):
                own_seed = seed_of(seed, "eval", name, i, sample)
                requests.append(Request(prompt_ids[i], own_seed, temperature, budget, can_be_cut=False))
                owners.append(prompts[i])
    return Evaluation(requests, owners)


def evaluation_metrics(
    evaluation: Evaluation, completions: list[Completion], verdicts: list[Verdict], sets, config: Config
) -> dict[str, float]:
    """Of each set accuracy (greedy), avg@k, pass@k (one or more right); all ranks call it."""
    rank, world_size, k = dist.get_rank(), dist.get_world_size(), config.eval.num_samples
    check_verdicts(verdicts, config.reward.max_failed_frac)
    sums, start = {}, 0
    for name, (prompts, _) in sets.items():
        mine = range(rank, len(prompts), world_size)
        part = slice(start, start := start + len(mine) * (1 + k))
        own = verdicts[part]
        solved = torch.tensor([v.reward for v in own]).view(-1, 1 + k)  # [prompts, 1 + k]
        sums[f"eval/{name}/accuracy"] = (solved[:, 0].sum().item(), len(mine))
        if k:
            sums[f"eval/{name}/avg_at_{k}"] = (solved[:, 1:].mean(1).sum().item(), len(mine))
            sums[f"eval/{name}/pass_at_{k}"] = ((solved[:, 1:] == 1).any(1).sum().item(), len(mine))
        for level in sorted({p.difficulty for p in prompts if p.difficulty is not None})[:12]:
            greedy = [solved[row, 0].item() for row, i in enumerate(mine) if prompts[i].difficulty == level]
            sums[f"eval/{name}/accuracy_difficulty_{level:g}"] = (sum(greedy), len(greedy))
        num_tokens = sum(len(c.token_ids) for c in completions[part])
        sums[f"eval/{name}/mean_tokens"] = (num_tokens, len(own))
        failed = sum(v.status in ("timeout", "error") for v in own)
        sums[f"eval/{name}/failed_frac"] = (failed, len(own))
    return reduce_metrics(sums)
