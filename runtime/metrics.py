"""Measure a step: (sum, count) pairs on each rank, reduced once a step, written once.

docs/metrics.md lists names, estimators and units. A name that ends in _total is a sum over ranks, one that
ends in _max a maximum, _p99 a quantile, _hist a histogram; all others are means over what they count.
"""

import contextlib
import functools
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from runtime.checkpoint import writing

if TYPE_CHECKING:
    from reward import RewardPool
    from runtime.checkpoint import TrainState
    from train_rl import Config, Group, GroupOutcome, RolloutBatch

MAX_LOG_WEIGHT = 40.0  # above, the square of a weight would overflow float32


def reduce_metrics(metrics: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Reduce (sum, count) pairs over all ranks to sum / count. Collective.

    A name in _total gives the sum alone, one in _max the largest. For a name in _p99 the first of the pair is
    a histogram() and the result its quantile, for one in _hist the histogram itself. A name may be missing on
    some ranks.
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
                reduced[name] = float(sum(values) / sum(counts)) if sum(counts) else math.nan
    return reduced


def exact_sum(values: Iterable[float]) -> Fraction:
    """Return the sum of values, each rounded to a multiple of 2^-60, without another rounding.

    So the mean over all ranks does not depend on which rank has sampled what, nor in which order.
    """
    return Fraction(sum(round(value * 2**60) for value in values), 2**60)


def rollout_metrics(
    groups: "list[Group]", binary: bool, invalid_route: int
) -> dict[str, tuple[float, float]]:
    """Measure all completions sampled on this rank, also those that will be dropped, as (sum, count)."""
    completions = [c for group in groups for c in group.completions]
    verdicts = [v for group in groups for v in group.verdicts]
    outcomes = [group.outcome(binary) for group in groups]
    equal = [o for o in outcomes if not o.has_variance]
    lengths = [len(c.token_ids) for c in completions]
    statuses, num = Counter(v.status for v in verdicts), len(verdicts)
    of_part = defaultdict(list)
    valid = [v for v in verdicts if not v.failed]
    for part, reward in (item for v in valid for item in v.parts.items()):
        of_part[part].append(reward)
    routes = [c.routed_experts for c in completions if c.routed_experts is not None]
    invalid = sum(int((ids[:, 0, 0] == invalid_route).sum()) for ids in routes)
    return {
        "score": (exact_sum(o.score_sum for o in outcomes), sum(o.valid for o in outcomes)),
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
        **{f"part/{name}/mean": (exact_sum(rewards), len(rewards)) for name, rewards in of_part.items()},
        **{f"verdict/{s}_frac": (statuses[s], num) for s in ("ok", "wrong", "no_answer", "timeout", "error")},
    }


def schedule_metrics(
    groups: "list[Group]", pool: "RewardPool", busy: float, seconds: float
) -> dict[str, tuple[float, float]]:
    """Measure where the time of a rollout went on this rank, as (sum, count); empties the pool's latencies.

    busy: seconds in which this rank's engine was generating, of all `seconds` until the slowest rank had its
    last verdict. length_error: difference between expected and found mean length of a group, relative to the
    found one.
    """
    rank, ended = dist.get_rank(), sorted(c.seconds for group in groups for c in group.completions)
    tail = ended[-1] - ended[int(0.9 * len(ended))] if ended else 0.0
    errors = []
    for group in groups:
        if group.expected_tokens and not group.guessed:
            found = sum(len(c.token_ids) for c in group.completions)
            expected = sum(group.expected_tokens for _ in group.completions)
            errors.append(abs(expected - found) / max(1, found))
    latencies, pool.latencies = torch.tensor(pool.latencies), []
    bins = histogram(latencies)
    return {
        "rollout_bubble": (seconds - busy, seconds),
        "rollout_tail_frac": (tail, ended[-1] if ended else 0.0),
        "straggler_max": ((busy, rank), 1),
        "length_error": (exact_sum(errors), len(errors)),
        "length_known_frac": (len(errors), len(groups)),
        "reward_latency": (latencies.sum().item(), len(latencies)),
        "reward_latency_p99": (bins, 1),
        "reward_latency_hist": (bins, 1),
    }


def straggler(metrics: dict) -> dict[str, float]:
    """Replace straggler_max by the seconds and the number of the rank whose engine worked longest."""
    seconds, rank = metrics.pop("straggler_max")
    return {"straggler_seconds": seconds, "straggler_rank": rank}


def batch_metrics(
    batch: "RolloutBatch", groups: "list[Group]", group_size: int
) -> dict[str, tuple[float, float]]:
    """Measure what is trained on, as (sum, count): inversion, and tokens with and without gradient."""
    correct = torch.tensor([v.status == "ok" for v in batch.verdicts], dtype=torch.bool)  # [B]
    signs = batch.advantages.sum(dim=1).sign()  # [B]; all tokens of a completion have one sign
    inverted = torch.where(correct, signs < 0, signs > 0) & batch.valid
    with_gradient = (batch.advantages != 0).sum(dim=1)  # [B]
    without = batch.response_mask.sum(dim=1) - with_gradient
    is_probe = torch.tensor([len(g.completions) < group_size for g in groups], dtype=torch.bool)
    of_probe = is_probe[batch.group_index]  # [B]
    return {
        "reward": (batch.rewards[batch.valid].sum().item(), batch.valid.sum().item()),
        "inversion_frac": (inverted.sum().item(), batch.valid.sum().item()),
        "gradient_tokens_total": (with_gradient.sum().item(), 1),
        "account/wasted_stopped_tokens_total": (without[of_probe].sum().item(), 1),
        "account/wasted_kept_tokens_total": (without[~of_probe].sum().item(), 1),
    }


def prompt_account(
    account: Counter, outcomes: "dict[int, GroupOutcome]", kept: "dict[int, GroupOutcome]"
) -> dict[str, float]:
    """Count where the prompts and rollouts of a step went, over all ranks."""
    dropped = [o for o in outcomes.values() if o.slot not in kept]
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
    batch: "RolloutBatch", seen: list[tuple[list[int], dict]], num_entropy_groups: int
) -> dict[str, tuple[float, float]]:
    """Measure the tokens of an update as (sum, count), some of them by entropy group; _max is the largest.

    seen: (rows, {name: [b, T] values}) of every micro-batch, among them entropy_group, and ratio
    if it is an update's.
    """
    sums, counts, largest, bins = Counter(), Counter(), Counter(), Counter()
    for rows, statistics in seen:
        mask = batch.response_mask[rows]
        values = {name: value.cpu()[mask] for name, value in statistics.items()}  # [tokens]
        entropy_groups = values.pop("entropy_group")
        if "ratio" in values:
            values["abs_log_ratio"] = values["ratio"].clamp(min=1e-30).log().abs()
        for name, value in values.items():
            sums[name] += value.sum().item()
            counts[name] += value.numel()
            is_split = name.startswith("mismatch") or name in ("abs_dlogp", "entropy", "clipped", "clip_eps")
            for k in range(num_entropy_groups if is_split else 0):
                sums[f"{name}/entropy_group_{k}"] += value[entropy_groups == k].sum().item()
                counts[f"{name}/entropy_group_{k}"] += int((entropy_groups == k).sum())
            if name in ("abs_dlogp", "abs_log_ratio", "clip_eps") and len(value):
                largest[f"{name}_max"] = max(largest[f"{name}_max"], value.max().item())
        bins.update(histogram(values["abs_dlogp"]) if "abs_dlogp" in values else ())
    means = {name: (sums[name], counts[name]) for name in sums}
    return means | {n: (value, 1) for n, value in largest.items()} | {"abs_dlogp_p99": (bins, 1)}


def mismatch_statistics(old_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Measure how far the trainer is from the sampler that drew a token, [b, T].

    With d = log pi_old - log pi_rollout:

        abs_dlogp |d|,   mismatch_k3 exp(d) - 1 - d, whose mean is KL(pi_rollout, pi_old),
        mismatch_extreme |d| > log 2,   mismatch_weight exp(d), mismatch_weight_sq its square

    effective_sample_size() is made of the last two.
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
    """Replace the moments of the trainer-engine weights by (mean w)^2 / mean w^2, also by entropy group."""
    sizes = {}
    for name in [name for name in metrics if name.split("/")[0] == "mismatch_weight"]:
        suffix = name.removeprefix("mismatch_weight")
        mean, mean_sq = metrics.pop(name), metrics.pop(f"mismatch_weight_sq{suffix}")
        sizes[f"mismatch_ess{suffix}"] = mean * mean / mean_sq if mean_sq else math.nan  # it underflowed
    return sizes


BINS_PER_DECADE = 100  # a quantile of histogram() is at most 2.4 % too large


def histogram(values: Tensor) -> Counter:
    """Count non-negative values in logarithmic bins, {bin: count}; all below 1e-9 are in the first bin."""
    bins = (values.double().clamp(min=1e-9).log10() * BINS_PER_DECADE).floor()
    return Counter(dict(zip(*(part.tolist() for part in bins.unique(return_counts=True)))))


def quantile_of(bins: Counter, share: float) -> float:
    """Return the upper edge of the bin that holds the quantile; NaN without values."""
    remaining = share * sum(bins.values())
    for edge in sorted(bins):
        remaining -= bins[edge]
        if remaining <= 0:
            return 10 ** ((edge + 1) / BINS_PER_DECADE)
    return float("nan")


class Clock:
    """Measure wall time by phase: `with clock("update"): ...`. A phase may be entered many times a step."""

    def __init__(self, total: dict[str, float]):
        self.total, self.step = total, {}
        self.now = ("start", str)  # phase, and what says what is in work; read by the watchdog's thread

    @contextlib.contextmanager
    def __call__(self, phase: str, work: Callable[[], str] = str):
        start = time.perf_counter()
        self.now = (phase, work)
        yield
        self.now = (f"after {phase}", str)
        elapsed = time.perf_counter() - start
        self.step[phase] = self.step.get(phase, 0.0) + elapsed
        self.total[phase] = self.total.get(phase, 0.0) + elapsed

    def take_step(self) -> dict[str, float]:
        """Return the seconds by phase since the last call."""
        taken, self.step = self.step, {}
        return {f"seconds/{phase}": seconds for phase, seconds in taken.items()}


@functools.cache
def warn_once(text: str) -> None:
    """Print a warning that may come at every step."""
    tqdm.write(f"warning: {text}")


def log_metrics(accelerator, config: "Config", state: "TrainState", metrics: dict) -> None:
    """Write one row of metrics.jsonl and the same scalars to the trackers."""
    if accelerator.is_main_process:
        histograms = {name: metrics[name] for name in metrics if name.endswith("_hist")}
        metrics = {n: value for n, value in metrics.items() if n not in histograms and math.isfinite(value)}
        metrics |= {"stage": state.stage.number} if config.stages else {}
        metrics = {"generated_tokens": state.generated_tokens} | metrics
        path = Path(config.run.dir) / "metrics.jsonl"
        with writing(path), path.open("a") as file:
            file.write(json.dumps({"step": state.step} | metrics) + "\n")
        for tracker in accelerator.trackers:
            try:
                tracker.log(metrics, step=state.step)
            except Exception as error:  # its server may be gone; the row is in metrics.jsonl
                warn_once(f"tracker {tracker.name} does not take metrics: {type(error).__name__}")
        is_due = state.step % config.run.log_every == 0 and "tensorboard" in config.run.trackers
        for name, bins in histograms.items() if is_due else ():
            values = [10 ** ((edge + 0.5) / BINS_PER_DECADE) for edge in sorted(bins.elements())]
            if values:
                writer = accelerator.get_tracker("tensorboard", unwrap=True)
                writer.add_histogram(name.removesuffix("_hist"), np.array(values), state.step)


def log_samples(config: "Config", state: "TrainState", batch: "RolloutBatch", tokenizer) -> None:
    """Write the first group of a step to samples.jsonl; experiments/evaluate.py --run makes a page of it."""
    path = Path(config.run.dir) / "samples.jsonl"
    with writing(path), path.open("a") as file:
        for i in (batch.group_index == 0).nonzero().flatten().tolist():
            prompt, token_ids = batch.prompts[i], batch.completion_ids[i]
            num = len(token_ids)
            row = {"step": state.step, "prompt": prompt.text, "completion": tokenizer.decode(token_ids)}
            row |= asdict(batch.verdicts[i])
            row |= {name: getattr(prompt, name) for name in ("answer", "kind", "source", "difficulty")}
            row |= {"num_tokens": num, "finish_reason": batch.finish_reason[i], "token_ids": token_ids}
            nats = {"rollout_logprobs": batch.rollout_logprobs, "trainer_logprobs": batch.old_logprobs}
            for name, values in (nats | {"entropy": batch.entropy}).items():
                if values is not None:  # the trainer's only where the update needs them beforehand
                    row[name] = values[i, :num].tolist()
            file.write(json.dumps(row) + "\n")


def console_line(state: "TrainState", metrics: dict[str, float]) -> str:
    """Write what the console shows of a step."""
    share = metrics["gradient_tokens_total"] / max(1, metrics["tokens_total"])
    return (
        f"step {state.step:>5}  score {metrics['score']:.3f}  "
        f"zero-variance {metrics['zero_variance_frac']:.2f}  gradient tokens {share:.2f}  "
        f"tokens {state.generated_tokens:,}  |dlogp| {metrics.get('abs_dlogp', math.nan):.1e}  "
        f"{metrics['seconds_per_step']:.2f} s"
    )
