"""Metrics of a step: (sum, count) pairs on each rank, reduced over ranks and written once per step.

docs/metrics.md lists names, estimators and units. The end of a name selects the reduction over ranks: _total
is a sum, _max a maximum, _p99 a quantile, _hist a histogram. Any other name, for example "score", is a mean:
sum / count over all ranks.
"""

import contextlib
import functools
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from batch import Completion, Group, GroupOutcome, RolloutBatch, Turn, verdicts_of
from runtime.checkpoint import TrainState, writing
from runtime.schedule import from_all_ranks
from runtime.summary import figure
from runtime.tracking import send_histogram, send_metrics
from settings import Config

MAX_LOG_WEIGHT = 40.0  # the square of a larger weight would overflow float32


def reduce_metrics(metrics: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Reduce (sum, count) pairs over all ranks to sum / count. Collective.

    _total gives the sum and _max the maximum of the first entries. For _p99 and _hist the first entry of a
    pair is a histogram(): _p99 gives the quantile of the summed histograms, _hist the sum itself. A rank may
    lack a name, for example a metric of completions on a rank without completions.
    """
    gathered = from_all_ranks(metrics)
    reduced = {}
    for name in {name: None for metrics_of_rank in gathered for name in metrics_of_rank}:
        pairs = (metrics_of_rank[name] for metrics_of_rank in gathered if name in metrics_of_rank)
        values, counts = zip(*pairs)
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
    """Return the exact sum of values, after rounding each value to a multiple of 2^-60.

    An exact sum is the same in any order, so a mean over all ranks is independent of how the prompts were
    distributed over the ranks.
    """
    return Fraction(sum(round(value * 2**60) for value in values), 2**60)


def rollout_metrics(
    groups: list[Group], binary: bool, invalid_route: int, part: str | None = None
) -> dict[str, tuple[float, float]]:
    """Measure all completions sampled on this rank, dropped groups included, as (sum, count).

    part: whose scores decide about variance (zero_variance.part); None: the whole score.
    """
    completions = [c for group in groups for c in group.completions]
    verdicts = verdicts_of(completions)
    outcomes = [group.outcome(binary, part) for group in groups]
    equal = [o for o in outcomes if not o.has_variance]
    lengths = [c.num_sampled for c in completions]
    seconds = seconds_of(groups)
    statuses = Counter(v.status for v in verdicts)
    num = len(verdicts)
    rewards_by_part = defaultdict(list)
    valid = [v for v in verdicts if not v.failed]
    for name, reward in (item for v in valid for item in v.parts.items()):
        rewards_by_part[name].append(reward)
    routes = [c.routed_experts for c in completions if c.routed_experts is not None]
    invalid = sum(int((ids[:, 0, 0] == invalid_route).sum()) for ids in routes)
    topk = [c.topk_logprobs for c in completions if c.topk_logprobs is not None]
    topk_mass = exact_sum(x.exp().sum().item() for x in topk)
    num_distinct = sum(len({tuple(c.token_ids) for c in group.completions}) for group in groups)
    measured = {"topk_mass": (topk_mass, sum(map(len, topk)))} if topk else {}
    return measured | {
        "score": (exact_sum(o.score_sum for o in outcomes), sum(o.valid for o in outcomes)),
        "zero_variance_frac": (len(equal), len(groups)),
        "zero_variance/all_right_frac": (sum(0 < o.solved == o.valid for o in equal), len(groups)),
        "zero_variance/all_wrong_frac": (sum(o.valid > 0 and o.score_sum == 0 for o in equal), len(groups)),
        "invalid_routes_frac": (invalid, sum(len(ids) for ids in routes)),
        "tokens_total": (sum(lengths), 1),
        "completion_tokens": (sum(lengths), num),
        "distinct_frac": (num_distinct, num),
        "completion_tokens_max": (max(lengths, default=0), 1),
        "completion_seconds": (sum(seconds), len(seconds)),
        "completion_seconds_max": (max(seconds, default=0.0), 1),
        "cut_at_limit_frac": (sum(c.finish_reason == "length" for c in completions), num),
        **{f"part/{name}/mean": (exact_sum(r), len(r)) for name, r in rewards_by_part.items()},
        **{f"verdict/{s}_frac": (statuses[s], num) for s in ("ok", "wrong", "no_answer", "timeout", "error")},
    }


def turn_metrics(completions: list[Completion]) -> dict[str, tuple[float, float]]:
    """Measure episodes as (sum, count): turns, calls and their errors, inserted tokens, used-up limits."""
    num = len(completions)
    num_calls = sum(c.num_calls for c in completions)
    reasons = Counter(c.finish_reason for c in completions)
    return {
        "turns": (sum(sum(turn.sampled for turn in c.turns) for c in completions), num),
        "tool_calls": (num_calls, num),
        "tool_errors_frac": (sum(c.num_call_errors for c in completions), num_calls),
        "tool_tokens": (sum(len(c.token_ids) - c.num_sampled for c in completions), num),
        "cut_at_turns_frac": (reasons["turns"], num),
        "cut_at_context_frac": (reasons["context"], num),
    }


def seconds_of(groups: list[Group]) -> list[float]:
    """Return the seconds from the start of the rollout to the end of each completion that ended in it."""
    return [c.seconds for group in groups for c in group.completions if not math.isnan(c.seconds)]


def schedule_metrics(
    groups: list[Group], pool, busy: float, seconds: float, num_rounds: int = 1
) -> dict[str, tuple[float, float]]:
    """Measure the use of time in a rollout on this rank, as (sum, count); empties pool.latencies.

    busy: seconds in which this rank's engine was generating. seconds: duration of the rollout, until the last
    verdict of the slowest rank. length_error: |expected - actual| / actual tokens of a group.
    """
    rank = dist.get_rank()
    finish_times = sorted(seconds_of(groups))
    last = finish_times[-1] if finish_times else 0.0
    tail = last - finish_times[int(0.9 * len(finish_times))] if finish_times else 0.0
    errors = []
    for group in groups:
        if group.expected_tokens and not group.guessed:
            actual = sum(len(c.token_ids) for c in group.completions)
            expected = sum(group.expected_tokens for _ in group.completions)
            errors.append(abs(expected - actual) / max(1, actual))
    latencies = torch.tensor(pool.latencies)
    pool.latencies = []
    bins = histogram(latencies)
    return {
        "rollout_bubble": (seconds - busy, seconds),
        "rollout_tail_frac": (tail, last) if num_rounds == 1 else (0.0, 0),  # each round counts from 0
        "straggler_max": ((busy, rank), 1),
        "length_error": (exact_sum(errors), len(errors)),
        "length_known_frac": (len(errors), len(groups)),
        "reward_latency": (latencies.sum().item(), len(latencies)),
        "reward_latency_p99": (bins, 1),
        "reward_latency_hist": (bins, 1),
    }


def straggler(metrics: dict) -> dict[str, float]:
    """Split straggler_max into the busy seconds and the rank number of the slowest engine."""
    seconds, rank = metrics.pop("straggler_max")
    return {"straggler_seconds": seconds, "straggler_rank": rank}


def batch_metrics(
    batch: RolloutBatch, groups: list[Group], config: Config, step: int = 0
) -> dict[str, tuple[float, float]]:
    """Measure the training batch, as (sum, count): reward, inversion, tokens with and without gradient.

    step: finished steps before this one, from which the age of tokens counts.

    inversion_frac: fraction of completions whose advantage contradicts the verifier, for example a right
    completion with a negative advantage (RolloutBatch.verifier_signs()). Completions whose
    advantages an extra has replaced have no common sign of their tokens and are not counted.
    """
    signs = batch.advantages.sum(dim=1).sign()  # [B]; all tokens of a completion share a sign
    is_judged = batch.valid if batch.replaced is None else batch.valid & ~batch.replaced  # [B]
    inverted = (signs * batch.verifier_signs() < 0) & is_judged
    with_gradient = (batch.advantages != 0).sum(dim=1)  # [B]
    without_gradient = batch.response_mask.sum(dim=1) - with_gradient  # [B]
    group_size = config.rollout.group_size
    is_probe = torch.tensor([len(g.completions) < group_size for g in groups], dtype=torch.bool)  # [groups]
    of_probe = is_probe[batch.group_index]  # [B]
    metrics = {**batch.hook_metrics}
    if config.rollout.lag and batch.policy_versions is not None:
        versions = batch.policy_versions[batch.response_mask]
        metrics["token_age_mean"] = ((step - versions).sum().item(), len(versions))
    return metrics | {
        "reward": (batch.rewards[batch.valid].sum().item(), batch.valid.sum().item()),
        "inversion_frac": (inverted.sum().item(), is_judged.sum().item()),
        "gradient_tokens_total": (with_gradient.sum().item(), 1),
        "account/wasted_stopped_tokens_total": (without_gradient[of_probe].sum().item(), 1),
        "account/wasted_kept_tokens_total": (without_gradient[~of_probe].sum().item(), 1),
    }


def prompt_account(
    account: Counter, outcomes: dict[int, GroupOutcome], trained: dict[int, GroupOutcome]
) -> dict[str, float]:
    """Count the prompts of a step by fate (skipped, probed, dropped, ...) and the tokens of dropped groups.

    outcomes: all groups sampled in the step, over all ranks, by slot; trained: the groups trained on.
    """
    dropped = [o for o in outcomes.values() if o.slot not in trained]
    return {
        "account/prompts_offered": account["offered"],
        "account/prompts_skipped": account["skipped"],
        "account/prompts_sampled": len(outcomes),
        "account/prompts_probed": account["probed"],
        "account/prompts_stopped": account["stopped"],
        "account/prompts_dropped": len(dropped),
        "account/prompts_refilled": account["refilled"],
        "account/rounds": account["rounds"],
        "account/wasted_dropped_tokens": sum(o.tokens - o.inserted_tokens for o in dropped),
    }


def token_metrics(
    batch: RolloutBatch, micro_batches: list[tuple[list[int], dict]], num_entropy_groups: int
) -> dict[str, tuple[float, float]]:
    """Measure the tokens of an update as (sum, count); clipping, entropy and mismatch also by entropy group.

    micro_batches: (rows, {name: [b, T] values}) of every micro-batch. The names include entropy_group and, in
    an update, ratio. With the weight w of mismatch_statistics() and the token's advantage A,

        skew_positive, skew_negative    mean of -(w - 1) A over the tokens with A > 0, or with A < 0

    (VeXact, arXiv 2605.14220) [secondary; ours: w is the trainer before the step's updates over the engine,
    and A is without rollout correction]. measured_tokens_total is the number of tokens with abs_dlogp, for
    the mean over a run; it is not logged.
    """
    sums = Counter()
    counts = Counter()
    maxima = Counter()
    bins = Counter()
    for rows, statistics in micro_batches:
        mask = batch.response_mask[rows]
        values = {name: value.cpu()[mask] for name, value in statistics.items()}  # [tokens]
        entropy_groups = values.pop("entropy_group")
        if "ratio" in values:
            values["abs_log_ratio"] = values["ratio"].clamp(min=1e-30).log().abs()
        if "mismatch_weight" in values:
            excess = (1 - values["mismatch_weight"]) * batch.advantages[rows][mask]  # [tokens]
            for name, sign in (("skew_positive", 1), ("skew_negative", -1)):
                chosen = batch.advantages[rows][mask].sign() == sign
                if chosen.any():  # a step without such tokens lacks the metric
                    sums[name] += excess[chosen].sum().item()
                    counts[name] += int(chosen.sum())
        for name, value in values.items():
            sums[name] += value.sum().item()
            counts[name] += value.numel()
            is_split = name.startswith("mismatch") or name in ("abs_dlogp", "entropy", "clipped", "clip_eps")
            for k in range(num_entropy_groups if is_split else 0):
                sums[f"{name}/entropy_group_{k}"] += value[entropy_groups == k].sum().item()
                counts[f"{name}/entropy_group_{k}"] += int((entropy_groups == k).sum())
            if name in ("abs_dlogp", "abs_log_ratio", "clip_eps") and len(value):
                maxima[f"{name}_max"] = max(maxima[f"{name}_max"], value.max().item())
        bins.update(histogram(values["abs_dlogp"]) if "abs_dlogp" in values else ())
    means = {name: (sums[name], counts[name]) for name in sums}
    means |= {name: (value, 1) for name, value in maxima.items()}
    return means | {"abs_dlogp_p99": (bins, 1), "measured_tokens_total": (counts["abs_dlogp"], 1)}


def clipped_by_update(
    batch: RolloutBatch, micro_batches: list[tuple[list[int], dict]], updates: list[int]
) -> dict[str, tuple[float, float]]:
    """Measure the share of clipped tokens of each update of a step: clipped/update_1, ... as (sum, count).

    micro_batches: as in token_metrics(); updates: the number of finished updates before each micro-batch.
    With algorithm.old_policy trainer the first update clips nothing, because its ratio is 1.
    """
    sums: Counter = Counter()
    counts: Counter = Counter()
    for (rows, statistics), number in zip(micro_batches, updates):
        values = statistics["clipped"].cpu()[batch.response_mask[rows]]  # [tokens]
        sums[f"clipped/update_{number + 1}"] += values.sum().item()
        counts[f"clipped/update_{number + 1}"] += values.numel()
    return {name: (sums[name], counts[name]) for name in sums}


@dataclass
class UpdateWork:
    """The work of a step's updates on this rank so far."""

    statistics: list[tuple[list[int], dict]] = field(default_factory=list)  # as in token_metrics()
    updates: list[int] = field(default_factory=list)  # finished updates before each micro-batch
    suspects: list[int] = field(default_factory=list)  # rows of this update whose loss is not finite
    grad_norms: list[float] = field(default_factory=list)
    num_updates: int = 0
    num_nonfinite: int = 0  # updates skipped because their gradient was not finite
    num_empty: int = 0  # updates in which no rank had a row with gradient
    num_tokens: int = 0  # of the sequences
    num_grid_tokens: int = 0  # of the padded grids that attention computes
    loads_LE: Tensor | None = None  # tokens by MoE layer and expert; None for a dense model

    def add_loads(self, loads_LE: Tensor | None, num_rows: int) -> None:
        """Count the tokens of the experts in a micro-batch; a pass without rows, of one token, adds none."""
        if loads_LE is not None:
            counted = loads_LE * (num_rows > 0)
            self.loads_LE = counted if self.loads_LE is None else self.loads_LE + counted

    def add_statistics(self, rows: list[int], statistics: dict, finite: Tensor | None) -> None:
        """Add the per-token statistics of a micro-batch.

        finite [b, T] bool: log-probabilities and advantages, if the loss is not finite; else None.
        """
        self.statistics.append((rows, statistics))
        self.updates.append(self.num_updates)
        if finite is not None:
            self.suspects += [row for row, ok in zip(rows, finite.all(dim=1).tolist()) if not ok] or rows

    def add_tokens(self, lengths: list[int]) -> None:
        """Count the tokens of a micro-batch with sequences of these lengths."""
        self.num_tokens += sum(lengths)
        self.num_grid_tokens += len(lengths) * max(lengths, default=0)

    def end_update(self, trainer) -> None:
        """Record the result of an optimizer step."""
        self.num_updates += 1
        self.suspects = []
        if trainer.optimizer.overflow:
            self.num_nonfinite += 1
        else:
            self.grad_norms.append(float(trainer.get_global_grad_norm()))

    def metrics(self, batch: RolloutBatch, config: Config) -> dict[str, tuple[float, float]]:
        """Return the metrics of the updates as (sum, count). Collective."""
        metrics = {
            "grad_norm": (sum(self.grad_norms), len(self.grad_norms)),
            "nonfinite_updates_max": (self.num_nonfinite, 1),
            "padding_frac": (self.num_grid_tokens - self.num_tokens, self.num_grid_tokens),
            "update_tokens": (self.num_tokens, 1),
            "update_tokens_max": (self.num_tokens, 1),
        }
        metrics |= token_metrics(batch, self.statistics, len(config.algorithm.entropy_groups))
        metrics |= clipped_by_update(batch, self.statistics, self.updates)
        if config.train.skip_zero_gradient:
            metrics["account/update_tokens_total"] = (self.num_tokens, 1)
            metrics["empty_updates_max"] = (self.num_empty, 1)
        return metrics | load_metrics(self.loads_LE, config.model.ep_size)


def old_pass_metrics(
    batch: RolloutBatch, entropy_groups: Tensor, num_entropy_groups: int
) -> dict[str, tuple[float, float]]:
    """Return entropies and the mismatch over all tokens of an old-logprob pass as (sum, count).

    entropy_groups [B, T]: the entropy group of each token.
    """
    statistics = {"entropy": batch.entropy, "entropy_group": entropy_groups}
    statistics |= mismatch_statistics(batch.old_logprobs, batch.rollout_logprobs)
    if batch.route_mismatch is not None:
        statistics["mismatch_routes"] = batch.route_mismatch
    all_rows = list(range(len(batch.prompts)))
    return token_metrics(batch, [(all_rows, statistics)], num_entropy_groups)


def mismatch_statistics(old_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Measure the mismatch between trainer and engine on each sampled token, [b, T].

    With d = log pi_old - log pi_rollout (trainer minus engine, nats):

        abs_dlogp           |d|
        mismatch_k3         exp(d) - 1 - d; the mean estimates KL(pi_rollout, pi_old) (k3)
        mismatch_extreme    1 if |d| > log 2, that is, if the probabilities differ by more than a factor of 2
        mismatch_weight     exp(d), the importance weight w
        mismatch_weight_sq  w^2, for effective_sample_size()
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
    """Replace the moments of the importance weights w by (mean w)^2 / mean w^2, also by entropy group.

    1: all weights are equal; 0.5: the sampled tokens are worth half as many tokens of the trainer's policy.
    """
    sizes = {}
    for name in [name for name in metrics if name.split("/")[0] == "mismatch_weight"]:
        suffix = name.removeprefix("mismatch_weight")
        mean = metrics.pop(name)
        mean_sq = metrics.pop(f"mismatch_weight_sq{suffix}")  # 0 by underflow
        sizes[f"mismatch_ess{suffix}"] = mean * mean / mean_sq if mean_sq else math.nan
    return sizes


BINS_PER_DECADE = 100  # a quantile of histogram() is at most 2.4 % too large


def histogram(values: Tensor) -> Counter:
    """Count non-negative values in logarithmic bins, {bin: count}; the first bin holds all values <= 1e-9."""
    bins = (values.double().clamp(min=1e-9).log10() * BINS_PER_DECADE).floor()
    edges, counts = bins.unique(return_counts=True)
    return Counter(dict(zip(edges.tolist(), counts.tolist())))


def quantile_of(bins: Counter, share: float) -> float:
    """Return the upper edge of the bin that contains the quantile; NaN for an empty histogram."""
    remaining = share * sum(bins.values())
    for edge in sorted(bins):
        remaining -= bins[edge]
        if remaining <= 0:
            return 10 ** ((edge + 1) / BINS_PER_DECADE)
    return float("nan")


class Clock:
    """Measure wall time by phase: `with clock("update"): ...`. A phase may be entered many times per step.

    total: seconds by phase over the whole run, updated in place.
    """

    def __init__(self, total: dict[str, float]):
        self.total = total
        self.step = {}  # seconds by phase in the current step
        self.now = ("start", str)  # (phase, function that describes the work), read by the watchdog's thread
        self.on_end: Callable[[str], object] = str  # called with the name of a phase that ends

    @contextlib.contextmanager
    def __call__(self, phase: str, work: Callable[[], str] = str):
        start = time.perf_counter()
        self.now = (phase, work)
        yield
        self.now = (f"after {phase}", str)
        self.on_end(phase)
        elapsed = time.perf_counter() - start
        self.step[phase] = self.step.get(phase, 0.0) + elapsed
        self.total[phase] = self.total.get(phase, 0.0) + elapsed

    def take_step(self) -> dict[str, float]:
        """Return the seconds by phase since the last call."""
        step = self.step
        self.step = {}
        return {f"seconds/{phase}": seconds for phase, seconds in step.items()}


def load_metrics(loads_LE: Tensor | None, ep_size: int) -> dict[str, tuple[float, float]]:
    """Return how uneven the load of experts is, as (sum, count): MaxVio (arXiv 2408.15664). Collective.

        MaxVio = largest load / mean load - 1, of the most uneven layer; 0: all experts have equal loads

    loads: tokens of this rank by layer and expert [L, E], None for a dense model or without updates.
    max_vio_ranks: the same for the experts of a rank together. {} if no rank computed a token.
    """
    if loads_LE is None:
        return {}
    dist.all_reduce(loads_LE)
    if not loads_LE.any():
        return {}
    loads = {"max_vio": loads_LE.float()}
    if ep_size > 1:
        loads["max_vio_ranks"] = loads["max_vio"].unflatten(1, (ep_size, -1)).sum(dim=2)
    return {name: (float((x.amax(dim=1) / x.mean(dim=1)).max()) - 1, 1) for name, x in loads.items()}


@functools.cache
def warn_once(text: str) -> None:
    """Print a warning once, however often it is raised."""
    tqdm.write(f"warning: {text}")


def log_metrics(accelerator, config: Config, state: TrainState, metrics: dict) -> None:
    """Write one row of metrics.jsonl, and the same scalars to the trackers (for example, TensorBoard)."""
    if accelerator.is_main_process:
        histograms = {name: metrics[name] for name in metrics if name.endswith("_hist")}
        metrics = {n: value for n, value in metrics.items() if n not in histograms and math.isfinite(value)}
        metrics |= {"stage": state.stage.number} if config.stages else {}
        metrics = {"generated_tokens": state.generated_tokens} | metrics
        path = Path(config.run.dir) / "metrics.jsonl"
        with writing(path), path.open("a") as file:
            file.write(json.dumps({"step": state.step} | metrics) + "\n")
        send_metrics(accelerator, metrics, state.step, warn_once)
        for name, bins in histograms.items() if state.step % config.run.log_every == 0 else ():
            values = [10 ** ((edge + 0.5) / BINS_PER_DECADE) for edge in sorted(bins.elements())]
            send_histogram(accelerator, name.removesuffix("_hist"), values, state.step)


def sample_rows(step: int, batch: RolloutBatch, tokenizer, is_trained: bool = True) -> list[dict]:
    """Return the rows of samples.jsonl for the first group; `experiments/evaluate.py --run` shows them.

    is_trained: False for a group that updates leave out, which has no advantages.
    advantage: mean over the sampled tokens of a completion.
    Log-probabilities and entropies are rounded to 4 decimals, which saves more than half of their text.
    """
    advantages = getattr(batch, "advantages", None)
    rows = []
    for i in (batch.group_index == 0).nonzero().flatten().tolist():
        prompt = batch.prompts[i]
        token_ids = batch.completion_ids[i]
        num = len(token_ids)
        text = prompt.prefix + tokenizer.decode(token_ids)
        row = {"step": step, "prompt": prompt.text, "completion": text}
        row |= asdict(batch.verdicts[i])
        row |= {name: getattr(prompt, name) for name in ("answer", "kind", "source", "difficulty")}
        row |= {"trained": is_trained, "advantage": None, "num_tokens": num}
        row |= {"finish_reason": batch.finish_reason[i], "token_ids": token_ids}
        mask = batch.response_mask[i, :num]
        if advantages is not None and mask.any():
            row["advantage"] = round(advantages[i, :num][mask].mean().item(), 4)
        nats = {"rollout_logprobs": batch.rollout_logprobs, "trainer_logprobs": batch.old_logprobs}
        for name, values in (nats | {"entropy": batch.entropy}).items():
            if values is not None:  # old_logprobs and entropy exist only if the update needs them
                row[name] = [round(value, 4) for value in values[i, :num].tolist()]
        if batch.turns is not None:
            row |= turns_of_row(row, batch.turns[i], mask.tolist())
        rows.append(row)
    return rows


def turns_of_row(row: dict, turns: tuple[Turn, ...], sampled: list[bool]) -> dict:
    """Return the turns of a row of samples.jsonl, and its lists of nats with null at inserted tokens."""
    listed = [{"role": t.role, "num_tokens": t.num_tokens, "sampled": t.sampled} for t in turns]
    names = [name for name in ("rollout_logprobs", "trainer_logprobs", "entropy") if name in row]
    values = {name: [x if own else None for x, own in zip(row[name], sampled)] for name in names}
    return {"turns": listed} | values


def append_rows(file: Path, rows: list[dict]) -> None:
    """Append rows to a JSONL file."""
    with writing(file), file.open("a") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def time_left(config: Config, state: TrainState) -> str:
    """Estimate the time until the end of the run from the mean time of a step, for example "1 h 40 min left".

    The end is train.num_steps, or train.max_generated_tokens if the mean tokens of a step reach it earlier.
    """
    num_steps = float(config.train.num_steps - state.step)
    if budget := config.train.max_generated_tokens:
        spent = state.generated_tokens + state.charged_tokens
        num_steps = min(num_steps, (budget - spent) / max(1, spent) * state.step)
    seconds = sum(value for phase, value in state.seconds.items() if phase != "setup")
    num_s = round(max(0.0, num_steps) * seconds / max(1, state.step))
    hours, minutes = divmod(num_s // 60, 60)
    text = f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{num_s} s"
    return f"{text} left"


def console_line(state: TrainState, metrics: dict[str, float], left: str) -> str:
    """Return the console's line about a step. left: the time until the end of the run."""
    share = metrics["gradient_tokens_total"] / max(1, metrics["tokens_total"])
    return (
        f"step {state.step:>5}  score {figure(metrics['score'], '.3f')}  "
        f"zero-variance {metrics['zero_variance_frac']:.2f}  gradient tokens {share:.2f}  "
        f"tokens {state.generated_tokens:,}  |dlogp| {figure(metrics.get('abs_dlogp'), '.1e')}  "
        f"{metrics['seconds_per_step']:.2f} s  {left}"
    )
