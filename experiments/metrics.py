"""What a step reports: (sum, count) pairs on each rank, reduced once a step, written once.

Names, estimators and units are listed in the README. A name ending in _total is a sum over ranks, one ending
in _max a maximum, all others are means over what they count.
"""

import contextlib
import json
import math
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

MAX_LOG_WEIGHT = 40.0  # above, the square of a weight would overflow float32


def reduce_metrics(metrics: dict[str, tuple[float, float]]) -> dict[str, float]:
    """(sum, count) over all ranks to sum / count; to the sum for names in _total, the maximum for _max.

    For names in _p99 the first is a histogram() and the result a quantile, for names in _hist it is the
    result. All ranks call it; a name may be missing on some.
    """
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, metrics)
    reduced = {}
    for name in {name: None for metrics_of_rank in everyone for name in metrics_of_rank}:
        values, counts = zip(*(of_rank[name] for of_rank in everyone if name in of_rank))
        match name.rpartition("_")[2]:
            case "p99":
                reduced[name] = quantile_of(sum(values, Counter()), 0.99)
            case "hist":
                reduced[name] = sum(values, Counter())
            case "max":
                reduced[name] = max(values)
            case "total":
                reduced[name] = sum(values)
            case _:
                reduced[name] = sum(values) / sum(counts) if sum(counts) else math.nan
    return reduced


def rollout_metrics(groups, dense: bool, no_route: int) -> dict[str, tuple[float, float]]:
    """Metrics of all completions sampled on this rank, also those that will be dropped, as (sum, count)."""
    completions = [c for group in groups for c in group.completions]
    verdicts = [v for group in groups for v in group.verdicts]
    outcomes = [group.outcome(dense) for group in groups]
    equal = [o for o in outcomes if not o.has_variance]
    lengths = [len(c.token_ids) for c in completions]
    statuses, num = Counter(v.status for v in verdicts), len(verdicts)
    routes = [c.routed_experts for c in completions if c.routed_experts is not None]
    invalid = sum(int((ids[:, 0, 0] == no_route).sum()) for ids in routes)
    return {
        "reward": (sum(o.score_sum for o in outcomes), sum(o.valid for o in outcomes)),
        "zero_variance_frac": (len(equal), len(groups)),
        "zero_variance/all_right_frac": (sum(0 < o.solved == o.valid for o in equal), len(groups)),
        "zero_variance/all_wrong_frac": (sum(o.valid > 0 and o.score_sum == 0 for o in equal), len(groups)),
        "invalid_routes_frac": (invalid, sum(len(ids) for ids in routes)),
        "tokens_total": (sum(lengths), 1),
        "completion_tokens": (sum(lengths), num),
        "completion_tokens_max": (max(lengths, default=0), 1),
        "completion_seconds": (sum(c.seconds for c in completions), num),
        "completion_seconds_max": (max((c.seconds for c in completions), default=0.0), 1),
        "cut_at_limit_frac": (sum(c.finish_reason == "length" for c in completions), num),
        **{f"verdict/{s}_frac": (statuses[s], num) for s in ("ok", "wrong", "no_answer", "timeout", "error")},
    }


def schedule_metrics(groups, pool, busy: float, seconds: float) -> dict[str, tuple[float, float]]:
    """Where the time of a rollout went on this rank, as (sum, count).

    busy: seconds its engine was generating, of all `seconds` until the slowest rank was done; with its last
    verdict, unless verdicts are left to come in during the pass over the batch.
    Empties the pool's latencies. length_error: of the expected mean length of a group, relative to the found.
    """
    rank, ended = dist.get_rank(), sorted(c.seconds for group in groups for c in group.completions)
    tail = ended[-1] - ended[int(0.9 * len(ended))] if ended else 0.0
    errors = []
    for group in groups:
        if group.expected_tokens and not group.guessed:
            found = sum(len(c.token_ids) for c in group.completions)
            expected = sum(group.expected_tokens[: len(group.completions)])
            errors.append(abs(expected - found) / max(1, found))
    latencies, pool.latencies = torch.tensor(pool.latencies), []
    bins = histogram(latencies)
    return {
        "rollout_bubble": (seconds - busy, seconds),
        "rollout_tail_frac": (tail, ended[-1] if ended else 0.0),
        "straggler_max": ((busy, rank), 1),
        "length_error": (sum(errors), len(errors)),
        "length_known_frac": (len(errors), len(groups)),
        "reward_latency": (latencies.sum().item(), len(latencies)),
        "reward_latency_p99": (bins, 1),
        "reward_latency_hist": (bins, 1),
    }


def straggler(metrics: dict) -> dict[str, float]:
    """Seconds and number of the rank whose engine worked longest, in place of straggler_max."""
    seconds, rank = metrics.pop("straggler_max")
    return {"straggler_seconds": seconds, "straggler_rank": rank}


def batch_metrics(batch, groups, group_size: int) -> dict[str, tuple[float, float]]:
    """Metrics of what is trained on, as (sum, count): inversion, and tokens with and without gradient."""
    correct = torch.tensor([v.status == "ok" for v in batch.verdicts], dtype=torch.bool)  # [B]
    signs = batch.advantages.sum(dim=1).sign()  # [B]; all tokens of a completion have one sign
    inverted = torch.where(correct, signs < 0, signs > 0) & batch.valid
    with_gradient = (batch.advantages != 0).sum(dim=1)  # [B]
    without = batch.response_mask.sum(dim=1) - with_gradient
    is_probe = torch.tensor([len(g.completions) < group_size for g in groups], dtype=torch.bool)
    of_probe = is_probe[batch.group_index]  # [B]
    return {
        "shaped_reward": (batch.rewards[batch.valid].sum().item(), batch.valid.sum().item()),
        "inversion_frac": (inverted.sum().item(), batch.valid.sum().item()),
        "gradient_tokens_total": (with_gradient.sum().item(), 1),
        "stale_frac": ((batch.policy_lag > 0).sum().item(), batch.response_mask.sum().item()),
        "policy_lag_max": (batch.policy_lag.max().item() if batch.policy_lag.numel() else 0, 1),
        "account/wasted_stopped_tokens_total": (without[of_probe].sum().item(), 1),
        "account/wasted_kept_tokens_total": (without[~of_probe].sum().item(), 1),
    }


def account_of(account: Counter, outcomes, left) -> dict[str, float]:
    """Where the prompts and rollouts of a step went, over all ranks."""
    dropped = [o for o in outcomes.values() if o.place not in left]
    return {
        "account/prompts_offered": account["offered"],
        "account/prompts_skipped": account["skipped"],
        "account/prompts_sampled": len(outcomes),
        "account/prompts_probed": account["probed"],
        "account/prompts_stopped": account["stopped"],
        "account/prompts_dropped": len(dropped),
        "account/prompts_refilled": account["refilled"],
        "account/rounds": account["rounds"],
        "account/wasted_dropped_tokens": sum(o.tokens for o in dropped),
    }


def token_metrics(
    batch, seen: list[tuple[list[int], dict]], num_groups: int
) -> dict[str, tuple[float, float]]:
    """(sum, count) over the tokens of an update, some of them by entropy group; _max is the largest.

    seen: (rows, {name: [b, T] values}) of every micro-batch, among them entropy_group and ratio. What
    compares trainer and sampler is of tokens that the policy itself drew, not an older one.
    """
    sums, counts, largest, bins = Counter(), Counter(), Counter(), Counter()
    for rows, statistics in seen:
        mask = batch.response_mask[rows]
        values = {name: value.cpu()[mask] for name, value in statistics.items()}  # [tokens]
        all_groups, fresh = values.pop("entropy_group"), (batch.policy_lag[rows] == 0)[mask]
        values["abs_log_ratio"] = values["ratio"].clamp(min=1e-30).log().abs()
        for name, value in values.items():
            of_sampler = name == "abs_dlogp" or name.startswith("mismatch")
            value, groups = (value[fresh], all_groups[fresh]) if of_sampler else (value, all_groups)
            sums[name] += value.sum().item()
            counts[name] += value.numel()
            by_group = of_sampler or name in ("entropy", "clipped", "clip_eps")
            for k in range(num_groups if by_group else 0):
                sums[f"{name}/entropy_group_{k}"] += value[groups == k].sum().item()
                counts[f"{name}/entropy_group_{k}"] += int((groups == k).sum())
            if name in ("abs_dlogp", "abs_log_ratio", "clip_eps") and len(value):
                largest[f"{name}_max"] = max(largest[f"{name}_max"], value.max().item())
        bins.update(histogram(values["abs_dlogp"][fresh]) if "abs_dlogp" in values else ())
    means = {name: (sums[name], counts[name]) for name in sums}
    return means | {n: (value, 1) for n, value in largest.items()} | {"abs_dlogp_p99": (bins, 1)}


def mismatch_statistics(old_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """How far the trainer is from the sampler that drew a token, [b, T]; d = log pi_old - log pi_rollout.

        abs_dlogp |d|,   mismatch_k3 exp(d) - 1 - d, whose mean is KL(pi_rollout, pi_old),
        mismatch_extreme |d| > log 2,   mismatch_weight exp(d), mismatch_weight_sq its square

    The effective sample size, (mean w)^2 / mean w^2, is made of the last two (token_metrics).
    """
    d = old_logprobs - rollout_logprobs
    weight = d.clamp(max=MAX_LOG_WEIGHT).exp()
    return {
        "abs_dlogp": d.abs(),
        "mismatch_k3": d.clamp(max=MAX_LOG_WEIGHT).expm1() - d,
        "mismatch_extreme": (d.abs() > math.log(2)).to(d.dtype),
        "mismatch_weight": weight,
        "mismatch_weight_sq": weight * weight,
    }


def effective_sample_size(metrics: dict[str, float]) -> dict[str, float]:
    """(mean w)^2 / mean w^2 in place of the two moments of the trainer-engine weights, also by group."""
    sizes = {}
    for name in [name for name in metrics if name.split("/")[0] == "mismatch_weight"]:
        group = name.removeprefix("mismatch_weight")
        mean, mean_sq = metrics.pop(name), metrics.pop(f"mismatch_weight_sq{group}")
        sizes[f"mismatch_ess{group}"] = mean * mean / mean_sq if mean_sq else math.nan  # it underflowed
    return sizes


BINS_PER_DECADE = 100  # of histogram(): a quantile is at most 2.4 % too large


def histogram(values: Tensor) -> Counter:
    """{bin: number of values}; bins are logarithmic from 1e-9 on. Of values not below 0."""
    bins = (values.double().clamp(min=1e-9).log10() * BINS_PER_DECADE).floor()
    return Counter(dict(zip(*(part.tolist() for part in bins.unique(return_counts=True)))))


def quantile_of(bins: Counter, share: float) -> float:
    """The upper edge of the bin that holds the quantile; NaN without values."""
    left = share * sum(bins.values())
    for edge in sorted(bins):
        left -= bins[edge]
        if left <= 0:
            return 10 ** ((edge + 1) / BINS_PER_DECADE)
    return float("nan")


class Clock:
    """Wall time by phase: `with clock("update"): ...`. Phases may be entered many times a step."""

    def __init__(self, total: dict[str, float]):
        self.total, self.step = total, {}

    @contextlib.contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        elapsed = time.perf_counter() - start
        self.step[phase] = self.step.get(phase, 0.0) + elapsed
        self.total[phase] = self.total.get(phase, 0.0) + elapsed

    def take_step(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        taken, self.step = self.step, {}
        return {f"seconds/{phase}": seconds for phase, seconds in taken.items()}


def log_metrics(accelerator, config, state, metrics: dict) -> None:
    """One row of metrics.jsonl and the same scalars in TensorBoard."""
    if accelerator.is_main_process:
        histograms = {name: metrics[name] for name in metrics if name.endswith("_hist")}
        metrics = {n: value for n, value in metrics.items() if n not in histograms and math.isfinite(value)}
        row = {"step": state.step, "generated_tokens": state.generated_tokens} | metrics
        with (Path(config.run.dir) / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        accelerator.log(metrics, step=state.step)
        for name, bins in histograms.items() if state.step % config.run.log_every == 0 else ():
            values = [10 ** ((edge + 0.5) / BINS_PER_DECADE) for edge in sorted(bins.elements())]
            writer = accelerator.get_tracker("tensorboard", unwrap=True)
            writer.add_histogram(name.removesuffix("_hist"), np.array(values), state.step) if values else None


def log_samples(config, state, batch, tokenizer) -> None:
    """The first group of a step in samples.jsonl, to be read by people."""
    with (Path(config.run.dir) / "samples.jsonl").open("a") as file:
        for i in (batch.group_index == 0).nonzero().flatten().tolist():
            text, verdict = tokenizer.decode(batch.completion_ids[i]), batch.verdicts[i]
            row = {"step": state.step, "prompt": batch.prompts[i].text, "completion": text} | asdict(verdict)
            file.write(json.dumps(row) + "\n")


def console_line(state, metrics: dict[str, float]) -> str:
    share = metrics["gradient_tokens_total"] / max(1, metrics["tokens_total"])
    return (
        f"step {state.step:>5}  reward {metrics['reward']:.3f}  "
        f"zero-variance {metrics['zero_variance_frac']:.2f}  gradient tokens {share:.2f}  "
        f"tokens {state.generated_tokens:,}  |dlogp| {metrics.get('abs_dlogp', math.nan):.1e}  "
        f"{metrics['seconds_per_step']:.2f} s"
    )
