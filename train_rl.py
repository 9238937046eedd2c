"""Reinforcement learning of Mixture-of-Experts language models, in one file.

    J = E_x E_{y_i ~ pi_old} 1/G sum_i 1/T_i sum_t min(r A, clip(r, 1 - eps, 1 + eps) A) - beta KL(pi, pi_ref)
    r_{i,t} = pi(y_{i,t}) / pi_old(y_{i,t}),   A_{i,t} = (R_i - mean_group R) / std_group R

With every setting at its default this is GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3). Every other method is
a choice along axes: where the ratio is taken and how it is clipped (ESPO, arXiv 2512.00499; GSPO, GMPO,
CISPO, DAPO, Dr.GRPO), how rewards become advantages, and what is done about groups that teach nothing
(multi-stage zero-variance elimination, arXiv 2512.07710). experiments/methods/ has one YAML per method. The
loop in main() names its phases in the order of the paper: sample prompts, rollout (rewards arrive meanwhile),
eliminate zero variance, rewards, old log-probabilities, advantages, update, weight sync, log, evaluation,
checkpoint.

    python -m data.tiny            # makes the tiny model and its tasks, once
    torchrun --nproc-per-node=2 train_rl.py --config experiments/tiny/demo.yaml
    torchrun --nproc-per-node=2 train_rl.py --config experiments/tiny/grpo.yaml \
        --config experiments/methods/espo.yaml train.seed=1 run.dir=runs/espo
    python train_rl.py --help      # every setting

Vocabulary: G = group_size completions per prompt, B completions on this rank, T longest of them. logprobs
carry gradient; old_logprobs are the trainer's before the update; rollout_logprobs are the sampler's; all in
nats. Provenance of choices: [paper] printed in the source named, [secondary] reported by others, [ours] where
the sources are silent.
"""

# ============================================================================================================
# 1 Imports
# ============================================================================================================
import contextlib
import ctypes
import math
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

import moe_model
from data.prompts import Prompt
from data.stream import digest_of, load_sets, prompts_of_step, seed_of, tokenize
from experiments.checks import (
    check_parity,
    check_routes,
    check_verdicts,
    drop_nonfinite_rewards,
    handle_nonfinite,
    mismatch_gate,
)
from experiments.metrics import (
    Clock,
    account_of,
    batch_metrics,
    console_line,
    effective_sample_size,
    log_metrics,
    log_samples,
    mismatch_statistics,
    reduce_metrics,
    rollout_metrics,
    token_metrics,
)
from experiments.run_dir import find_checkpoint, prepare_run_dir, save_checkpoint
from experiments.settings import (
    MAX_ENTROPY_GROUPS,
    AlgorithmSection,
    Config,
    ZeroVarianceSection,
    config_warnings,
    load_config,
)
from experiments.summary import plot_curves, print_summary, write_summary
from moe_model import Policy, pack, route_table
from reward import RewardPool, Verdict, build_judge, pairwise_reference, round_robin
from rollout import Completion, Request, RolloutEngine, no_route

# ============================================================================================================
# 2 Zero-variance elimination before and during the rollout (arXiv 2512.07710; stages as in the README)
# ============================================================================================================
ZERO_VARIANCE = 1e-6  # scores of a group closer than this are equal: no rounding error becomes an advantage


def score_of(verdict: Verdict, dense: bool) -> float:
    """The correctness part of the reward in [0, 1], before penalties and judges: 0 or 1, or dense."""
    return verdict.pass_frac if dense else verdict.reward


@dataclass
class Group:
    """One prompt of a step with its completions so far."""

    place: int  # among the prompts sampled in this step over all ranks
    prompt_index: int  # in the training set
    completions: list[Completion] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def outcome(self, dense: bool) -> "Outcome":
        valid = [v for v in self.verdicts if v.status not in ("timeout", "error")]
        scores = [score_of(v, dense) for v in valid]
        return Outcome(
            place=self.place,
            prompt_index=self.prompt_index,
            solved=sum(v.status == "ok" for v in valid),
            valid=len(valid),
            score_sum=sum(scores),
            tokens=sum(len(c.token_ids) for c in self.completions),
            completions=len(self.completions),
            # [ours] of the correctness part: penalties would hide that a group teaches nothing
            has_variance=len(scores) >= 2 and max(scores) - min(scores) > ZERO_VARIANCE,
        )


@dataclass(frozen=True)
class Outcome:
    """What all ranks know of a group."""

    place: int
    prompt_index: int
    solved: int
    valid: int  # verdicts that are neither timeouts nor errors
    score_sum: float  # of the valid ones
    tokens: int
    completions: int
    has_variance: bool


def prob_all(hits: float, misses: float, num: int, prior: float) -> float:
    """Probability that the next num verdicts are all hits: E[p^num], p ~ Beta(hits + prior, misses + prior).

    With many verdicts this is p^num of the observed rate, with few it trusts it less [ours]. A prior below
    1/2 says that most prompts are nearly always or nearly never solved.
    """
    return math.prod((hits + prior + j) / (hits + misses + 2 * prior + j) for j in range(num))


@dataclass
class PromptHistory:
    """What has been seen of each training prompt; the same on all ranks, part of every checkpoint."""

    solved: Tensor  # [prompts] float64, decayed sum of scores: of right completions unless rewards are dense
    tried: Tensor  # [prompts] float64, decayed number of verdicts
    mean_tokens: Tensor  # [prompts] float64, length of completions at the last visit
    last_step: Tensor  # [prompts] int64, the step of the last visit, -1: never sampled

    @classmethod
    def from_offline(cls, pass_rates: list[float | None], group_size: int) -> "PromptHistory":
        """The record before the first step: an offline pass rate counts as one visit [ours], None as none."""
        seen = torch.tensor([rate is not None for rate in pass_rates])
        solved = torch.tensor([(rate or 0.0) * group_size for rate in pass_rates], dtype=torch.float64)
        return cls(solved, seen.double() * group_size, torch.zeros_like(solved), seen.long() - 1)

    def update(self, outcomes: list[Outcome], step: int, decay: float) -> None:
        for o in outcomes:
            if o.valid:
                i = o.prompt_index
                self.solved[i] = decay * self.solved[i] + o.score_sum
                self.tried[i] = decay * self.tried[i] + o.valid
                self.mean_tokens[i] = o.tokens / o.completions
                self.last_step[i] = step

    def skip_prob(self, prompt: int, step: int, group_size: int, settings: ZeroVarianceSection) -> float:
        """E[p^G] + E[(1 - p)^G], each at most 1 - explore; 0 for a prompt never tried or due for a re-test.

        Stage 1b [ours, after GRESO, arXiv 2506.02177, which also explores hard prompts more than easy ones].
        The expectation is over what the record says of p.
        """
        age = step - int(self.last_step[prompt])
        due = settings.retest_steps > 0 and age >= settings.retest_steps
        if not settings.history or self.last_step[prompt] < 0 or due:
            return 0.0
        hits = float(self.solved[prompt])
        misses = float(self.tried[prompt]) - hits
        all_right = prob_all(hits, misses, group_size, settings.prior)
        all_wrong = prob_all(misses, hits, group_size, settings.prior)
        return min(all_right, 1 - settings.explore_solved) + min(all_wrong, 1 - settings.explore_unsolved)

    def zero_variance_after(self, probe: Outcome, group_size: int, prior: float) -> float:
        """Probability that a probed group ends with zero variance: 0 if the probe already differs.

        Stage 1c [ours]: the rest must all come out as the probe and, by the record, as before.
        """
        if probe.has_variance or not probe.valid:
            return 0.0
        solved, tried = float(self.solved[probe.prompt_index]), float(self.tried[probe.prompt_index])
        hits, misses = solved + probe.score_sum, tried - solved + probe.valid - probe.score_sum
        same, different = (hits, misses) if 2 * probe.score_sum > probe.valid else (misses, hits)
        return prob_all(same, different, group_size - probe.completions, prior)


def choose_prompts(
    wanted: int, consumed: int, history: PromptHistory, step: int, config: Config
) -> tuple[list[int], int]:
    """The next `wanted` prompts that their record does not rule out, and how many were offered for them.

    A whole epoch of offers that does not fill the list ends the skipping: what comes next is taken.
    """
    chosen, offered, num_prompts = [], 0, len(history.tried)
    while len(chosen) < wanted:
        (prompt,) = prompts_of_step(num_prompts, 1, consumed + offered, config.train.seed)
        skip_prob = history.skip_prob(prompt, step, config.rollout.group_size, config.zero_variance)
        draw = random.Random(seed_of(config.train.seed, "skip", consumed + offered)).random()
        if draw >= skip_prob or offered >= num_prompts:
            chosen.append(prompt)
        offered += 1
    return chosen, offered


def stays(outcome: Outcome, settings: ZeroVarianceSection) -> bool:
    """Whether a group takes part in the update."""
    return outcome.has_variance or not settings.drop


def num_wanted(outcomes: dict[int, Outcome], probing: list[int], config: Config) -> int:
    """New prompts of the next round, given what has been sampled and whose probes go on."""
    settings, group_size = config.zero_variance, config.rollout.group_size
    if settings.refill:
        useful = sum(o.has_variance or o.place in probing for o in outcomes.values())
        return config.rollout.prompts_per_step - useful
    reserved = len(probing) * (group_size - settings.probe_size)
    spent = sum(o.completions for o in outcomes.values())
    return (config.rollout.prompts_per_step * group_size - spent - reserved) // group_size


def sample_groups(
    generate: Callable[[list[tuple[Group, range]]], None],
    state: "TrainState",
    history: PromptHistory,
    config: Config,
) -> tuple[list[Group], dict[int, Outcome], Counter]:
    """The rollouts of one step: this rank's groups, {place: outcome} of all ranks, account over all ranks.

    generate(work) samples the completions of each range for its group and appends them with their verdicts.
    Plain: one round of prompts_per_step groups. With probing (stage 1c), a group first gets probe_size
    completions; if it would end with zero variance it stops there, and the completions it does not use buy
    other prompts. With refill (DAPO, arXiv 2503.14476, eq. 11), new prompts are sampled until
    prompts_per_step groups have variance. A new prompt goes to the rank with the fewest completions to train
    on. max_rounds ends both: the batch is then short.
    """
    settings, group_size = config.zero_variance, config.rollout.group_size
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups: dict[int, Group] = {}  # {place: group} of this rank
    outcomes: dict[int, Outcome] = {}  # {place: outcome} of all ranks
    owner: dict[int, int] = {}  # {place: rank}
    account, probing, wanted = Counter(), [], config.rollout.prompts_per_step
    while wanted or probing:
        chosen, offered = choose_prompts(wanted, state.consumed_prompts, history, state.step, config)
        state.consumed_prompts += offered
        account.update(offered=offered, skipped=offered - wanted, rounds=1)
        account.update(refilled=wanted if outcomes else 0)
        load = [0] * world_size  # completions to train on
        for o in outcomes.values():
            kept = o.completions if stays(o, settings) else 0
            load[owner[o.place]] += group_size if o.place in probing else kept
        rest = range(settings.probe_size, group_size)
        work = [(groups[place], rest) for place in probing if place in groups]
        for prompt_index in chosen:
            place, least = len(owner), min(range(world_size), key=lambda r: load[r])
            owner[place] = least
            load[least] += group_size
            if least == rank:
                groups[place] = Group(place, prompt_index)
                work.append((groups[place], range(settings.probe_size or group_size)))
        generate(work)
        everyone = [None] * world_size
        dist.all_gather_object(everyone, [group.outcome(config.reward.dense) for group, _ in work])
        probing = []
        for outcome in sorted(sum(everyone, []), key=lambda o: o.place):
            outcomes[outcome.place] = outcome
            if outcome.completions < group_size:
                zero_variance = history.zero_variance_after(outcome, group_size, settings.prior)
                if zero_variance < settings.probe_stop_prob:
                    probing.append(outcome.place)
        wanted = num_wanted(outcomes, probing, config) if account["rounds"] < settings.max_rounds else 0
    stopped = sum(o.completions < group_size for o in outcomes.values())
    account.update(probed=len(outcomes) if settings.probe_size else 0, stopped=stopped)
    return [groups[place] for place in sorted(groups)], outcomes, account


def drop_and_balance(
    groups: list[Group], outcomes: dict[int, Outcome], settings: ZeroVarianceSection
) -> tuple[list[Group], dict[int, Outcome]]:
    """This rank's groups of the update, and the outcomes of those of all ranks."""
    left = {place: outcome for place, outcome in outcomes.items() if stays(outcome, settings)}
    groups = [group for group in groups if group.place in left]
    uneven = len(left) < len(outcomes) or len({o.completions for o in left.values()}) > 1
    return balance_groups(groups, left) if uneven else groups, left


def balance_groups(groups: list[Group], outcomes: dict[int, Outcome]) -> list[Group]:
    """Hand whole groups from rank to rank so that all train on about as many tokens; all ranks call it.

    outcomes: of the groups that are left, on all ranks. Longest first to the rank with the fewest tokens.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    load, owner = [0] * world_size, {}
    for outcome in sorted(outcomes.values(), key=lambda o: (-o.tokens, o.place)):
        owner[outcome.place] = min(range(world_size), key=lambda r: load[r])
        load[owner[outcome.place]] += outcome.tokens
    moving = [None] * world_size
    dist.all_gather_object(moving, [group for group in groups if owner[group.place] != rank])
    arrived = [group for group in sum(moving, []) if owner[group.place] == rank]
    kept = [group for group in groups if owner[group.place] == rank]
    return sorted(kept + arrived, key=lambda group: group.place)


# ============================================================================================================
# 3 The batch
# ============================================================================================================
@dataclass
class RolloutBatch:
    """What flows through a step on one rank: completions, group after group. Each field is written once."""

    prompts: list[Prompt]  # [B]
    prompt_ids: list[list[int]]  # [B] ragged
    completion_ids: list[list[int]]  # [B] ragged
    finish_reason: list[str]  # [B] "stop" or "length"
    verdicts: list[Verdict]  # [B]
    response_mask: Tensor  # [B, T] bool, where the policy chose the token and the loss applies
    rollout_logprobs: Tensor  # [B, T] nats, the sampler's
    group_index: Tensor  # [B] int64, which prompt of this rank
    valid: Tensor  # [B] bool, False where the verifier gave no verdict or the reward is not finite
    routed_experts: list[Tensor] | None = None  # [B] of [p + c - 1, L, K] expert ids, the sampler's
    rewards: Tensor | None = None  # [B]
    old_logprobs: Tensor | None = None  # [B, T] nats, the trainer's before the update
    entropy: Tensor | None = None  # [B, T] nats, full vocabulary, of the policy before the update
    old_routes: list[Tensor] | None = None  # [B] of [p + c - 1, L, K], the trainer's before the update
    route_mismatch: Tensor | None = None  # [B, T], 1 where old_routes are not those of the sampler
    advantages: Tensor | None = None  # [B, T]
    ref_logprobs: Tensor | None = None  # [B, T] nats, the first policy's; only with kl_coef > 0


def collate(groups: list[Group], prompts: list[Prompt], prompt_ids: list[list[int]]) -> RolloutBatch:
    """Groups of one rank as a batch, log-probabilities padded right with 0. prompts, prompt_ids: the set."""
    rows = [(index, group, i) for index, group in enumerate(groups) for i in range(len(group.completions))]
    completions = [group.completions[i] for _, group, i in rows]
    verdicts = [group.verdicts[i] for _, group, i in rows]
    lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int64)
    longest = max([1, *lengths.tolist()])
    response_mask = torch.arange(longest) < lengths.unsqueeze(1)  # [B, T]
    rollout_logprobs = torch.zeros(response_mask.shape)
    rollout_logprobs[response_mask] = torch.tensor([x for c in completions for x in c.logprobs])
    routes = [c.routed_experts for c in completions]
    return RolloutBatch(
        prompts=[prompts[group.prompt_index] for _, group, _ in rows],
        prompt_ids=[prompt_ids[group.prompt_index] for _, group, _ in rows],
        completion_ids=[c.token_ids for c in completions],
        finish_reason=[c.finish_reason for c in completions],
        verdicts=verdicts,
        response_mask=response_mask,
        rollout_logprobs=rollout_logprobs,
        group_index=torch.tensor([index for index, _, _ in rows], dtype=torch.int64),
        valid=torch.tensor([v.status not in ("timeout", "error") for v in verdicts], dtype=torch.bool),
        routed_experts=None if all(ids is None for ids in routes) else routes,
    )


# ============================================================================================================
# 4 Rewards, advantages
# ============================================================================================================
def overlong_penalty(num_tokens: int, max_new_tokens: int, buffer: int) -> float:
    """Soft overlong punishment, 0 to -1 over the last `buffer` tokens (DAPO, arXiv 2503.14476, eq. 13)."""
    return -max(0, num_tokens - (max_new_tokens - buffer)) / buffer if buffer else 0.0


def repetition_ratio(token_ids: list[int], ngram: int) -> float:
    """Share of n-grams that occurred before: 1 - distinct / all, 0 if there is none [ours: shape]."""
    ngrams = [tuple(token_ids[i : i + ngram]) for i in range(len(token_ids) - ngram + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def judge_rewards(judge, batch: RolloutBatch, texts: list[str], mode: str) -> list[float]:
    """The judge's reward of each completion (method, section 4; mapping to rewards [ours]).

    score: sigmoid of a scalar model's score; pairwise_reference: better / tie / worse than the reference
    answer as 1 / 0 / -1; round_robin: mean over the group's others of better 1, tie 1/2, worse 0.
    """
    prompts = [prompt.text for prompt in batch.prompts]
    match mode:
        case "score":
            return torch.tensor(judge.scores(prompts, texts), dtype=torch.float64).sigmoid().tolist()
        case "pairwise_reference":
            return pairwise_reference(judge, prompts, texts, [p.answer for p in batch.prompts])
        case "round_robin":
            return round_robin(judge, prompts, texts, batch.group_index.tolist())


def compute_rewards(batch: RolloutBatch, judge, texts: list[str], config: Config) -> Tensor:
    """Reward of each completion [B]: verifier, mixed with the judge, minus penalties (stage 2)."""
    settings = config.reward
    rewards = [score_of(v, settings.dense) for v in batch.verdicts]
    if judge is not None and rewards:
        judged, weight = judge_rewards(judge, batch, texts, settings.judge_mode), settings.judge_weight
        rewards = [(1 - weight) * r + weight * j for r, j in zip(rewards, judged)]
    for i, token_ids in enumerate(batch.completion_ids):
        length = overlong_penalty(len(token_ids), config.rollout.max_new_tokens, settings.overlong_buffer)
        repeats = settings.repetition_coef and repetition_ratio(token_ids, settings.repetition_ngram)
        rewards[i] += settings.overlong_coef * length - settings.repetition_coef * repeats
    return torch.tensor(rewards)


def compute_advantages(
    rewards: Tensor,
    valid: Tensor,
    group_index: Tensor,
    adv_norm: str = "group_std",
    tie_band: float = 0.0,
    eps: float = 1e-6,
) -> Tensor:
    """Group-relative advantage of each completion (DeepSeekMath, section 4.1.2; ESPO, eq. 11).

        A_i = (R_i - mean R) / (std R + eps) over the group; 0 if its rewards lie within ZERO_VARIANCE

    rewards [B] float; valid [B] bool, False where the verifier gave no verdict (timeout, crash): such a
    completion enters no mean and gets 0; group_index [B] int64. Returns [B]. adv_norm "mean_only" does not
    divide (Dr.GRPO, arXiv 2503.20783). Rewards within tie_band of the mean get 0 [ours]. std divides by n - 1
    and eps is 1e-6 [ours: what the common implementations do]; a group with fewer than two valid rewards gets
    0 [ours: it has no baseline].
    """
    advantages = torch.zeros_like(rewards)
    for group in group_index.unique():
        members = (group_index == group) & valid
        group_rewards = rewards[members]
        if len(group_rewards) >= 2 and group_rewards.max() - group_rewards.min() > ZERO_VARIANCE:
            centred = group_rewards - group_rewards.mean()
            match adv_norm:
                case "group_std":
                    normed = centred / (group_rewards.std() + eps)
                case "mean_only":
                    normed = centred
            advantages[members] = torch.where(centred.abs() > tie_band, normed, 0.0)
    return advantages


def guard_correctness(advantages: Tensor, correct: Tensor) -> Tensor:
    """No positive advantage for a wrong completion, no negative one for a right one [ours].

    advantages [B]; correct [B] bool, by the verifier. Returns [B].
    """
    return torch.where(correct, advantages.clamp(min=0), advantages.clamp(max=0))


def zero_variance_rows(batch: RolloutBatch, dense: bool) -> Tensor:
    """[B] bool: valid completions of groups whose valid scores, two or more, are all equal."""
    scores = torch.tensor([score_of(v, dense) for v in batch.verdicts])
    rows = torch.zeros(len(scores), dtype=torch.bool)
    for group in batch.group_index.unique():
        members = (batch.group_index == group) & batch.valid
        if members.sum() >= 2:  # [ours] fewer verdicts say nothing: skipped, not reshaped
            rows |= members & bool(scores[members].max() - scores[members].min() <= ZERO_VARIANCE)
    return rows


def rl_zvp_advantages(entropy: Tensor, mask: Tensor, correct: Tensor, coef: float) -> Tensor:
    """Token advantages of completions of zero-variance groups (RL-ZVP, arXiv 2509.21880) [secondary].

        right: +alpha H_t        wrong: -alpha (max_k H_k - H_t)

    entropy [B, T] nats, of the old policy, detached; mask [B, T] bool; correct [B] bool. Returns [B, T], 0 on
    padding. The most uncertain token of a wrong completion is not pushed down.
    """
    highest = entropy.masked_fill(~mask, 0).amax(dim=1, keepdim=True)  # [B, 1], entropies are >= 0
    return torch.where(correct.unsqueeze(1), coef * entropy, coef * (entropy - highest)) * mask


def token_advantages(batch: RolloutBatch, config: Config) -> Tensor:
    """Advantage of each token [B, T] from the batch's rewards, verdicts and, for RL-ZVP, entropies."""
    algorithm = config.algorithm
    correct = torch.tensor([v.status == "ok" for v in batch.verdicts], dtype=torch.bool)  # [B]
    advantages = compute_advantages(
        batch.rewards, batch.valid, batch.group_index, algorithm.adv_norm, algorithm.tie_band
    )  # [B]
    if algorithm.correctness_guard:
        advantages = guard_correctness(advantages, correct)
    advantages = advantages.unsqueeze(1) * batch.response_mask  # [B, T]
    if config.zero_variance.rl_zvp:
        rows = zero_variance_rows(batch, config.reward.dense)  # [B]
        mask, coef = batch.response_mask[rows], config.zero_variance.rl_zvp_coef
        advantages[rows] = rl_zvp_advantages(batch.entropy[rows], mask, correct[rows], coef)
    return advantages


# ============================================================================================================
# 5 Ratio, clip, loss
# ============================================================================================================
def entropy_groups(entropy: Tensor, mask: Tensor, shares: tuple[float, ...]) -> Tensor:
    """Entropy group of each token of each completion, 0 the most uncertain (ESPO, arXiv 2512.00499, eq. 7).

    The tokens of a completion in falling order of entropy are cut where the cumulative shares end, rounded up
    [paper: 20 % and 80 %; ours: per completion, rounding, equal entropies in the order of the text].
    entropy [B, T] nats, of the old policy; mask [B, T] bool. Returns [B, T] int64, any value on padding.
    """
    order = entropy.masked_fill(~mask, -1.0).argsort(dim=1, descending=True, stable=True)
    place = order.argsort(dim=1)  # [B, T], 0 for the highest entropy
    lengths, groups, total = mask.sum(dim=1, keepdim=True), torch.zeros_like(place), 0.0
    for share in shares[:-1]:
        total += share
        groups += place >= (lengths.double() * total - 1e-9).ceil()
    return groups


def ratio_groups(entropy: Tensor, mask: Tensor, algorithm: AlgorithmSection) -> Tensor:
    """[B, T] int64: tokens of a completion with the same number share an importance ratio."""
    match algorithm.ratio_level:
        case "token":
            return torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
        case "sequence":
            return torch.zeros(mask.shape, dtype=torch.int64, device=mask.device)
        case "entropy_group":
            return entropy_groups(entropy, mask, algorithm.entropy_groups)


def group_sum(values: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: sum of values over the group of each token; padding counts nowhere."""
    sums = values.new_zeros(len(values), max(values.shape[1], MAX_ENTROPY_GROUPS))  # short rows: T < K
    return sums.scatter_add(1, groups, values * mask).gather(1, groups)


def group_size_of(groups: Tensor, mask: Tensor) -> Tensor:
    """[B, T] float: number of tokens in the group of each token, at least 1."""
    return group_sum(mask.to(torch.get_default_dtype()), groups, mask).clamp(min=1)


def group_mean(values: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: mean of values over the group of each token."""
    return group_sum(values, groups, mask) / group_size_of(groups, mask).to(values.dtype)


MAX_LOG_RATIO = 80.0  # above, float32 overflows and 0 * inf is NaN


def importance_ratio(log_ratio: Tensor, groups: Tensor, mask: Tensor, form: str) -> Tensor:
    """Ratio of each token's group, [B, T]: s = exp(mean over the group of log r) (ESPO, eq. 10; GSPO, eq. 7).

        geometric      s                    gradient through the mean (GSPO, arXiv 2507.18071)
        stop_gradient  sg[s] r / sg[r]      the value s, each token its own gradient (GSPO-token, eq. 14;
                                            ESPO, eq. 9 in our reading [ours: as printed the value is not s])
        literal        sg[s] r              ESPO, eq. 9 as printed: pi_old in the denominator [paper]
    """
    log_s = group_mean(log_ratio, groups, mask)
    match form:
        case "geometric":
            pass
        case "stop_gradient":
            log_s = log_s.detach() + (log_ratio - log_ratio.detach())
        case "literal":
            log_s = log_s.detach() + log_ratio
    return log_s.clamp(max=MAX_LOG_RATIO).exp()


def entropy_clip_eps(
    entropy: Tensor, groups: Tensor, mask: Tensor, log_vocab: float, algorithm: AlgorithmSection
) -> Tensor:
    """Half-width of ESPO's clip interval, [B, T]: wider where the old policy was uncertain.

        group_mean  eps = alpha mean_{t in tau}(e_t) / log|V|       [ours: reading of eq. 8]
        literal     eps_t = alpha e_t / (|tau| log|V|)              [paper: eq. 8 as printed]
    """
    match algorithm.entropy_clip_form:
        case "group_mean":
            mean_entropy = group_mean(entropy, groups, mask)
        case "literal":
            mean_entropy = entropy / group_size_of(groups, mask)
    return algorithm.entropy_clip_coef * mean_entropy / log_vocab


def loss_weights(
    mask: Tensor, groups: Tensor, num_completions: int, num_tokens: int, max_new_tokens: int, loss_agg: str
) -> Tensor:
    """Weight of each token in the loss, [B, T], 0 on padding.

        sequence_mean  1 / (N T_i)             completions, of each the mean over tokens (DeepSeekMath, eq. 3)
        token_mean     1 / sum_i T_i           all tokens alike (DAPO, eq. 8)
        group_mean     1 / (N K_i |tau|)       completions, of each the mean of group means (ESPO, eq. 5)
        fixed_length   1 / (N max_new_tokens)  no length in the weight (Dr.GRPO, arXiv 2503.20783)

    mask [B, T] bool; N = num_completions and num_tokens count all ranks and micro-batches, so that the loss
    does not depend on how an update is split. K_i counts the groups that are not empty.
    """
    match loss_agg:
        case "sequence_mean":
            return mask / (mask.sum(dim=1, keepdim=True).clamp(min=1) * num_completions)
        case "token_mean":
            return mask / torch.tensor(float(max(1, num_tokens)))
        case "group_mean":
            per_token = mask / group_size_of(groups, mask)  # sums to 1 over a group
            num_groups = per_token.sum(dim=1, keepdim=True).round().clamp(min=1)  # [B, 1] K_i
            return per_token / (num_groups * num_completions)
        case "fixed_length":
            return mask / torch.tensor(float(num_completions * max_new_tokens))


def rollout_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, mode: str, cap: float
) -> Tensor:
    """Importance weight of trainer over engine, [B, T]: the sampler is not quite the old policy.

        token_tis      min(pi_old / pi_rollout, C) per token          (arXiv 2510.11370 and verl: C = 2)
        sequence_tis   min(product over the completion, C)
        sequence_mask  the product where it is at most C, else 0      (IcePop-like) [ours: names]
    """
    difference = ((old_logprobs - rollout_logprobs) * mask).clamp(max=MAX_LOG_RATIO)  # [B, T]
    product = difference.sum(dim=1, keepdim=True).clamp(max=MAX_LOG_RATIO).exp().expand(mask.shape)
    match mode:
        case "none":
            return torch.ones_like(difference)
        case "token_tis":
            return difference.exp().clamp(max=cap)
        case "sequence_tis":
            return product.clamp(max=cap)
        case "sequence_mask":
            return torch.where(product <= cap, product, 0.0)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    groups: Tensor,
    entropy: Tensor,
    mask: Tensor,
    log_vocab: float,
    algorithm: AlgorithmSection,
    ref_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch, its share of -J.

        loss = -sum_{i,t} w_{i,t} [ objective(s, A) - beta (exp(d) - d - 1) ],   d = ref_logprobs - logprobs

        fixed             min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)         (PPO; DAPO with two eps)
        entropy_adaptive  the same with eps from entropy_clip_eps()              (ESPO, eq. 5)
        weight            sg[clip(s, 1 - eps_low, 1 + eps_high)] A log pi        (CISPO, 2506.13585, eq. 4)
        before_mean       s A, each token's ratio clipped before the mean        (GMPO, 2507.20673, eq. 4)
        none              s A

    All [B, T]; weights from loss_weights(), groups from ratio_groups(), entropy of the old policy;
    ref_logprobs only with kl_coef > 0 (DeepSeekMath, eq. 4); log_vocab: log of the vocabulary's size.
    Returns the loss (scalar with gradient) and detached per-token statistics [B, T].
    """
    low, high = 1 - algorithm.clip_eps_low, 1 + algorithm.clip_eps_high
    log_ratio = logprobs - old_logprobs
    ratio = importance_ratio(log_ratio, groups, mask, algorithm.ratio_form)
    statistics = {"ratio": ratio}
    match algorithm.clip_mode:
        case "fixed":
            bounded = ratio.clamp(low, high)
            objective = torch.minimum(ratio * advantages, bounded * advantages)
            clipped = bounded * advantages < ratio * advantages
        case "entropy_adaptive":
            eps = entropy_clip_eps(entropy, groups, mask, log_vocab, algorithm)
            bounded = ratio.clamp(1 - eps, 1 + eps)  # on the edge the gradient is the unclipped one
            objective = torch.minimum(ratio * advantages, bounded * advantages)
            clipped = bounded * advantages < ratio * advantages
            statistics["clip_eps"] = eps
        case "weight":
            bounded = ratio.detach().clamp(low, high)
            objective = bounded * advantages * logprobs
            clipped = bounded != ratio
        case "before_mean":
            inside = log_ratio.clamp(math.log(low) if low > 0 else -math.inf, math.log(high))
            lower, upper = torch.minimum(log_ratio, inside), torch.maximum(log_ratio, inside)
            pessimistic = torch.where(advantages > 0, lower, upper)
            objective = importance_ratio(pessimistic, groups, mask, algorithm.ratio_form) * advantages
            clipped = pessimistic != log_ratio
        case "none":
            objective = ratio * advantages
            clipped = torch.zeros_like(mask)
    statistics["clipped"] = clipped.to(ratio.dtype)
    if algorithm.kl_coef > 0:
        log_ref_ratio = ref_logprobs - logprobs
        statistics["ref_kl_k3"] = log_ref_ratio.expm1() - log_ref_ratio  # >= 0, unbiased under pi
        objective = objective - algorithm.kl_coef * statistics["ref_kl_k3"]
    return -(weights * objective).sum(), {name: value.detach() for name, value in statistics.items()}


# ============================================================================================================
# 6 Micro-batches, log-probabilities, update
# ============================================================================================================
def split_rows(lengths: list[int], rows: list[int], max_tokens: int) -> list[list[int]]:
    """Rows in micro-batches of at most max_tokens padded tokens, longest first; a longer row goes alone."""
    micro_batches: list[list[int]] = []
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        if micro_batches and lengths[micro_batches[-1][0]] * (len(micro_batches[-1]) + 1) <= max_tokens:
            micro_batches[-1].append(row)
        else:
            micro_batches.append([row])
    return micro_batches


def collective_device() -> torch.device:
    """Where a tensor has to lie for the process group: nccl takes GPU tensors, gloo CPU tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def micro_batches_of(batch: RolloutBatch, rows: list[int], max_tokens: int) -> list[list[int]]:
    """split_rows(), then empty ones up to the largest number on any rank: a forward is collective."""
    lengths = [len(p) + len(c) for p, c in zip(batch.prompt_ids, batch.completion_ids)]
    micro_batches = split_rows(lengths, rows, max_tokens)
    most = torch.tensor(len(micro_batches), device=collective_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return micro_batches + [[]] * (int(most) - len(micro_batches))


class PolicyOutputs(NamedTuple):
    """What a forward says of the completions of b rows; 0 on padding."""

    logprobs: Tensor  # [b, T] nats
    entropy: Tensor  # [b, T] nats, detached
    routes: list[Tensor] | None  # [b] of [p + c - 1, L, K], ids of the experts used; None of a dense model
    route_mismatch: Tensor | None  # [b, T], 1 where these are not the sampler's; None where it gave none


def routes_to_replay(batch: RolloutBatch, router_replay: str) -> list[Tensor] | None:
    """Expert ids that the trainer's forward uses, for each row of the batch; None: the live router's.

        r2   those of the old-logprob pass, which records them and itself is live
        r3   the sampler's, in the old-logprob pass and in every update (arXiv 2510.11370) [secondary]

    Only the choice is replayed, its weights are live. Both passes replay alike, or the first ratio would not
    be 1 [ours].
    """
    match router_replay:
        case "off":
            return None
        case "r2":
            return batch.old_routes
        case "r3":
            return batch.routed_experts


def completion_outputs(
    policy, batch: RolloutBatch, rows: list[int], config: Config, replay: bool = True
) -> PolicyOutputs:
    """Log-probabilities, entropies and routes of the completions of `rows`.

    No rows: one dummy sequence goes through the model, so that all ranks take part in its collectives; the
    result [1, T] is multiplied by 0.
    """
    device = next(policy.parameters()).device
    routes = routes_to_replay(batch, config.algorithm.router_replay) if replay and rows else None
    if rows:
        packed = pack([batch.prompt_ids[i] for i in rows], [batch.completion_ids[i] for i in rows], device)
        mask = batch.response_mask[rows].to(device)  # [b, T]
    else:
        packed = pack([[0]], [[0]], device)
        mask = torch.zeros(1, batch.response_mask.shape[1], dtype=torch.bool, device=device)
        mask[0, 0] = True
    replay_ids_TLK = None if routes is None else torch.cat([routes[i] for i in rows]).to(device)
    logprobs, entropy, layer_ids = policy(
        packed, temperature=config.rollout.temperature, replay_ids_TLK=replay_ids_TLK
    )  # [N], [N]
    scale = 1.0 if rows else 0.0
    zeros = logprobs.new_zeros(mask.shape)
    logprobs, entropy = (zeros.masked_scatter(mask, values * scale) for values in (logprobs, entropy))
    num_experts = moe_model.num_experts_of(getattr(policy, "module", policy).config)
    used_TLK, mismatch = route_table(layer_ids, num_experts), None
    if used_TLK is None or not rows:
        return PolicyOutputs(logprobs, entropy, None, None)
    if batch.routed_experts is not None:
        sampled_TLK = torch.cat([batch.routed_experts[i] for i in rows]).to(device)
        differs_T = (used_TLK.sort().values != sampled_TLK.sort().values).flatten(1).any(dim=1)
        differs_T &= sampled_TLK[:, 0, 0] != no_route(num_experts)  # those are counted apart
        of_targets = differs_T.index_select(0, packed.predictor_index)
        mismatch = zeros.detach().masked_scatter(mask, of_targets.to(zeros.dtype))
    lengths = [len(batch.prompt_ids[i]) + len(batch.completion_ids[i]) - 1 for i in rows]
    return PolicyOutputs(logprobs, entropy, list(used_TLK.split(lengths)), mismatch)


@torch.no_grad()
def outputs_of_batch(policy, batch: RolloutBatch, config: Config, replay: bool = True) -> PolicyOutputs:
    """completion_outputs of all rows on the CPU, without gradient; all ranks call it."""
    logprobs, entropy, mismatch = (torch.zeros(batch.response_mask.shape) for _ in range(3))
    routes = [None] * len(batch.prompts)
    for rows in micro_batches_of(batch, list(range(len(routes))), config.train.micro_batch_tokens):
        part = completion_outputs(policy, batch, rows, config, replay)
        if rows:
            logprobs[rows], entropy[rows] = part.logprobs.float().cpu(), part.entropy.float().cpu()
        for row, ids in zip(rows, part.routes or []):
            routes[row] = ids.cpu()
        if part.route_mismatch is not None:
            mismatch[rows] = part.route_mismatch.float().cpu()
    routes = None if any(ids is None for ids in routes) else routes
    return PolicyOutputs(logprobs, entropy, routes, None if batch.routed_experts is None else mismatch)


def split_minibatches(batch: RolloutBatch, num_minibatches: int) -> list[list[int]]:
    """Rows of each update: whole groups, the first groups first; as many lists on every rank."""
    groups = batch.group_index.tolist()
    per_minibatch = -(-(max(groups, default=0) + 1) // num_minibatches)
    return [[i for i, g in enumerate(groups) if g // per_minibatch == m] for m in range(num_minibatches)]


def micro_batch_loss(
    logprobs: Tensor, entropy: Tensor, batch: RolloutBatch, rows: list[int], counts: Tensor, log_vocab: float,
    config: Config,
) -> tuple[Tensor, dict[str, Tensor]]:
    """policy_loss() of some rows and its per-token statistics [b, T].

    Where the batch has no old_logprobs, the old policy is the current one and these are its own values: the
    ratio is exactly 1. counts: completions and tokens of the update over all ranks.
    """
    device, algorithm = logprobs.device, config.algorithm
    mask = batch.response_mask[rows].to(device)  # [b, T]
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[rows].to(device)
    entropy = entropy.detach() if batch.entropy is None else batch.entropy[rows].to(device)
    groups = ratio_groups(entropy, mask, algorithm)
    num_completions, num_tokens = counts.tolist()
    weights = loss_weights(
        mask, groups, num_completions, num_tokens, config.rollout.max_new_tokens, algorithm.loss_agg
    )
    correction = rollout_weights(
        old, batch.rollout_logprobs[rows].to(device), mask,
        algorithm.rollout_correction, algorithm.rollout_correction_cap,
    )  # fmt: skip
    loss, statistics = policy_loss(
        logprobs, old, batch.advantages[rows].to(device) * correction, weights, groups, entropy, mask,
        log_vocab, algorithm,
        None if batch.ref_logprobs is None else batch.ref_logprobs[rows].to(device),
    )  # fmt: skip
    statistics["entropy"] = entropy
    statistics["entropy_group"] = entropy_groups(entropy, mask, algorithm.entropy_groups)
    return loss, statistics | mismatch_statistics(old, batch.rollout_logprobs[rows].to(device))


def update_policy(
    engine, batch: RolloutBatch, config: Config, step: int = 0
) -> dict[str, tuple[float, float]]:
    """Take minibatches_per_step optimizer steps on the batch; returns metrics as (sum, count).

    An update whose gradient is not finite leaves the weights as they are (DeepSpeed skips it on all ranks).
    """
    device, world_size = engine.device, dist.get_world_size()
    log_vocab = math.log(engine.module.lm_head.weight.shape[0])
    seen = []  # (rows, statistics) of every micro-batch, for the metrics
    grad_norms, num_skipped = [], 0
    for minibatch in split_minibatches(batch, config.train.minibatches_per_step):
        counts = torch.tensor([len(minibatch), int(batch.response_mask[minibatch].sum())], device=device)
        dist.all_reduce(counts)  # before the first backward: the loss must not depend on the split
        if counts[0] == 0:  # groups were dropped: there is nothing left for this update on any rank
            continue
        suspects = []
        for rows in micro_batches_of(batch, minibatch, config.train.micro_batch_tokens):
            logprobs, entropy, _, mismatch = completion_outputs(engine, batch, rows, config)  # [b, T]
            if not rows:
                engine.backward(logprobs.sum(), scale_wrt_gas=False)
                continue
            loss, statistics = micro_batch_loss(logprobs, entropy, batch, rows, counts, log_vocab, config)
            if mismatch is not None:
                before = batch.route_mismatch
                statistics["mismatch_routes"] = mismatch if before is None else before[rows].to(device)
            engine.backward(loss * world_size, scale_wrt_gas=False)  # DeepSpeed averages gradients over ranks
            seen.append((rows, statistics))
            if not torch.isfinite(loss):
                finite = (logprobs.isfinite() & batch.advantages[rows].to(device).isfinite()).all(dim=1)
                suspects += [row for row, ok in zip(rows, finite.tolist()) if not ok] or rows
        engine.step()
        if engine.optimizer.overflow:
            handle_nonfinite("loss", batch, suspects, config, step)
            num_skipped += 1
        else:
            grad_norms.append(float(engine.get_global_grad_norm()))
    metrics = {"grad_norm": (sum(grad_norms), len(grad_norms)), "nonfinite_updates_max": (num_skipped, 1)}
    return metrics | token_metrics(batch, seen, len(config.algorithm.entropy_groups))


# ============================================================================================================
# 7 Rollouts with rewards, evaluation
# ============================================================================================================
def sample_and_score(
    engine: RolloutEngine,
    pool: RewardPool,
    tokenizer,
    requests: list[Request],
    prompts: list[Prompt],
    version: int,
    clock,
    label: str,
    phases: tuple[str, str] = ("rollout", "reward"),
) -> tuple[list[Completion], list[Verdict]]:
    """Complete all requests; each completion goes to the reward workers the moment it ends.

    phases: what the clock calls the generation, and the wait for verdicts that generation did not hide.
    """
    hidden = None if dist.get_rank() == 0 else True  # None: shown on a terminal only
    progress = tqdm(total=len(requests), desc=label, position=1, leave=False, delay=1.0, disable=hidden)

    def score(index: int, completion: Completion) -> None:
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        pool.submit(index, prompts[index].kind, text, prompts[index].answer)
        pool.poll()
        progress.update()

    with clock(phases[0]):
        completions = engine.generate(requests, version, score)
    progress.close()
    with clock(phases[1]):
        verdicts = pool.collect()
    return completions, [verdicts[i] for i in range(len(requests))]


def evaluate(
    engine: RolloutEngine, pool: RewardPool, tokenizer, sets, config: Config, version: int, clock
) -> dict:
    """Metrics of each held-out set: accuracy (greedy), and of k samples avg@k and pass@k (one or more right).

    Rank r takes every world-th prompt. Samples use the same random numbers at every evaluation.
    """
    rank, world_size, k = dist.get_rank(), dist.get_world_size(), config.eval.num_samples
    budget = config.eval.max_new_tokens or config.rollout.max_new_tokens
    metrics = {}
    for name, (prompts, prompt_ids) in sets.items():
        mine = range(rank, len(prompts), world_size)
        requests = [
            Request(prompt_ids[i], seed_of(config.train.seed, "eval", name, i, sample), temperature, budget)
            for i in mine
            for sample, temperature in enumerate([0.0] + [config.rollout.temperature] * k)
        ]
        owners = [prompts[i] for i in mine for _ in range(1 + k)]
        completions, verdicts = sample_and_score(
            engine, pool, tokenizer, requests, owners, version, clock, f"eval {name}", ("eval", "eval")
        )
        check_verdicts(verdicts, config.reward.max_failed_frac)
        solved = torch.tensor([v.reward for v in verdicts]).view(-1, 1 + k)  # [prompts, 1 + k]
        sums = {f"eval/{name}/accuracy": (solved[:, 0].sum().item(), len(mine))}
        if k:
            sums[f"eval/{name}/avg_at_{k}"] = (solved[:, 1:].mean(1).sum().item(), len(mine))
            sums[f"eval/{name}/pass_at_{k}"] = ((solved[:, 1:] == 1).any(1).sum().item(), len(mine))
        for level in sorted({p.difficulty for p in prompts if p.difficulty is not None})[:12]:
            greedy = [solved[row, 0].item() for row, i in enumerate(mine) if prompts[i].difficulty == level]
            sums[f"eval/{name}/accuracy_difficulty_{level:g}"] = (sum(greedy), len(greedy))
        num_tokens = sum(len(c.token_ids) for c in completions)
        sums[f"eval/{name}/mean_tokens"] = (num_tokens, len(completions))
        failed = sum(v.status in ("timeout", "error") for v in verdicts)
        sums[f"eval/{name}/failed_frac"] = (failed, len(verdicts))
        metrics |= reduce_metrics(sums)
    return metrics


# ============================================================================================================
# 8 State
# ============================================================================================================
@dataclass
class TrainState:
    """Counters that the next step or the summary reads; part of every checkpoint."""

    step: int = 0  # steps finished, the version of the policy
    consumed_prompts: int = 0
    generated_tokens: int = 0  # over all ranks, training rollouts only
    gradient_tokens: int = 0  # of these, tokens with a non-zero advantage
    trained_tokens: int = 0  # tokens of completions that were not dropped
    abs_dlogp_sum: float = 0.0  # nats, over trained_tokens
    steps_above_gate: int = 0  # steps in a row with a trainer-engine mismatch above algorithm.mismatch_gate
    account: dict[str, float] = field(default_factory=dict)  # sums of the account/ metrics of all steps
    seconds: dict[str, float] = field(default_factory=dict)  # wall time by phase on rank 0
    first_eval: dict[str, float] = field(default_factory=dict)  # metrics of evaluate() before the first step
    last_eval: dict[str, float] = field(default_factory=dict)  # and of the latest

    def add(self, metrics: dict[str, float]) -> None:
        """Count the tokens and the account of a finished step."""
        trained = metrics["tokens_total"] - metrics["account/wasted_dropped_tokens"]
        self.generated_tokens += int(metrics["tokens_total"])
        self.gradient_tokens += int(metrics["gradient_tokens_total"])
        self.trained_tokens += int(trained)
        self.abs_dlogp_sum += metrics.get("abs_dlogp", 0.0) * trained
        for name, value in metrics.items():
            if name.startswith("account/"):
                name = name.removeprefix("account/").removesuffix("_total")
                self.account[name] = self.account.get(name, 0) + value


# ============================================================================================================
# 9 Main
# ============================================================================================================
def build_policy(config: Config, weights: Path | str, group, device: torch.device) -> Policy:
    """The policy with the weights of a folder, this rank's experts only."""
    torch.set_default_dtype(getattr(torch, config.model.dtype))  # so that no float32 copy is made on the way
    with device:
        policy = Policy(moe_model.load_config(weights), group)
    torch.set_default_dtype(torch.float32)
    moe_model.load_hf(policy, weights)
    policy.activation_checkpointing = config.model.activation_checkpointing
    return policy


def build_sampler(config: Config, weights: Path, hf_config) -> RolloutEngine:
    """The vLLM engine, still with random weights; the policy's come with the first sync."""
    longest = max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)
    context = config.rollout.max_prompt_tokens + longest
    if context > hf_config.max_position_embeddings:
        raise ValueError(
            f"rollout.max_prompt_tokens + the larger max_new_tokens of rollout and eval is {context}, "
            f"the model's context is {hf_config.max_position_embeddings}: lower one of them"
        )
    replay, is_dense = config.algorithm.router_replay, moe_model.num_experts_of(hf_config) == 0
    if replay != "off" and is_dense:
        raise ValueError(f"algorithm.router_replay {replay}: the model is dense, it has no router; set off")
    return RolloutEngine(
        weights,
        max_model_len=context,
        max_num_seqs=config.rollout.max_num_seqs,
        dtype=config.rollout.dtype,
        kv_cache_gib=config.rollout.kv_cache_gib,
        prefix_caching=config.rollout.prefix_caching,
        sleep_level=config.rollout.sleep_level,
        capture_routes=config.rollout.capture_routes,
        fp8=config.rollout.fp8,
        kv_cache_fp8=config.rollout.kv_cache_fp8,
        tensor_parallel=config.rollout.tensor_parallel,
        expert_parallel=config.rollout.expert_parallel,
    )


def learning_rate(config: Config, step: int) -> float:
    """Of update number step (from 0): linear warm-up, then constant."""
    return config.train.learning_rate * min(1.0, (step + 1) / (config.train.warmup_steps + 1))


def is_last(state: TrainState, config: Config) -> bool:
    """Whether the run is over: by steps, or by generated tokens."""
    budget = config.train.max_generated_tokens or math.inf
    return state.step >= config.train.num_steps or state.generated_tokens >= budget


def main(config: Config) -> None:
    # ---- process group, data -------------------------------------------------------------------------------
    on_gpu = torch.cuda.is_available()
    if on_gpu and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
        raise ValueError(f"torchrun --nproc-per-node: one rank a GPU, there are {torch.cuda.device_count()}")
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=config.run.timeout_s))
    accelerator = Accelerator(
        cpu=not on_gpu, log_with="tensorboard", project_dir=config.run.dir, kwargs_handlers=[timeout]
    )
    moe_model.init_deepspeed()
    rank, world_size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    say = tqdm.write if rank == 0 else (lambda line: None)
    set_seed(config.train.seed)
    per_step, group_size = config.rollout.prompts_per_step, config.rollout.group_size
    if per_step % (world_size * config.train.minibatches_per_step):
        raise ValueError(
            f"rollout.prompts_per_step {per_step} must be a multiple of ranks x train.minibatches_per_step "
            f"({world_size} x {config.train.minibatches_per_step})"
        )
    if world_size % config.rollout.tensor_parallel:
        shared = f"rollout.tensor_parallel {config.rollout.tensor_parallel}"
        raise ValueError(f"{shared} must divide the number of ranks, {world_size}")
    found, record = find_checkpoint(config) or (None, None)
    weights = found / "model" if found else Path(config.model.path)
    state = TrainState(**record["state"]) if record else TrainState()
    if found and is_last(state, config) and (Path(config.run.dir) / "summary.json").is_file():
        say(f"{found}: this run is finished; raise train.num_steps to go on, or choose another run.dir")
        return print_summary(Path(config.run.dir)) if rank == 0 else None
    lock = prepare_run_dir(config, record) if rank == 0 else None
    hf_config = moe_model.load_config(weights)
    num_experts = moe_model.num_experts_of(hf_config)
    group = moe_model.create_expert_parallel_group(config.model.ep_size, num_experts)
    tokenizer = AutoTokenizer.from_pretrained(weights, local_files_only=True)
    train_prompts, pass_rates, eval_sets, num_dropped = load_sets(config, tokenizer)
    train_ids = tokenize(train_prompts, tokenizer, config.rollout.max_prompt_tokens)
    for warning in config_warnings(config):
        say(f"warning: {warning}")
    say(
        f"{len(train_prompts)} training prompts"
        + (f" ({num_dropped} more dropped by their offline pass rate)" if num_dropped else "")
        + f", {sum(len(p) for p, _ in eval_sets.values())} held out; "
        f"{world_size} ranks, expert parallel {config.model.ep_size}, ZeRO {config.train.zero_stage}, "
        f"policy {config.model.dtype}, engine {config.rollout.dtype}; starting vLLM and DeepSpeed"
    )

    # ---- reward workers, sampler, policy ------------------------------------------------------------------
    clock = Clock(state.seconds)
    with clock("setup"):
        memory_bytes = int(config.reward.memory_gib * 2**30)
        pool = RewardPool(config.reward.num_workers, config.reward.timeout_s, memory_bytes)
        sampler = build_sampler(config, weights, hf_config)
        with_judge = config.reward.judge != "none"
        judge = build_judge(config.reward.judge, config.reward.judge_path) if with_judge else None
        dist.barrier()
        policy = build_policy(config, weights, group, device)
        engine = moe_model.deepspeed_engine(policy, config.train)
        with_reference = config.algorithm.kl_coef > 0
        reference = build_policy(config, config.model.path, group, device) if with_reference else None
        history = PromptHistory.from_offline(pass_rates, group_size)
        if found:
            saved = torch.load(found / "history.pt", map_location="cpu", weights_only=True)
            same_prompts = saved.pop("prompts") == digest_of(train_prompts)
            history = PromptHistory(**saved) if same_prompts else history
            say(f"resumed from {found}" + "; the record of other prompts is dropped" * (not same_prompts))
        if found and config.checkpoint.resume == "auto":
            shard = torch.load(found / f"rank_{rank:05d}.pt", map_location="cpu", weights_only=True)
            moe_model.load_optimizer_shard(engine, shard["optimizer"])
            torch.set_rng_state(shard["torch_rng"])
    accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": state.step + 1}})
    own_experts = config.rollout.expert_parallel and config.rollout.tensor_parallel == config.model.ep_size

    def weights_for_sampler():
        return moe_model.hf_tensors(policy, own_experts)

    with clock("sync"):
        sampler.sync(weights_for_sampler(), state.step)
        sampler.check_weights(weights_for_sampler())
    check_is_due = True  # of the engine against the policy: at the first step, then every check_every steps

    def run_evaluation() -> dict[str, float]:
        return evaluate(sampler, pool, tokenizer, eval_sets, config, state.step, clock)

    def generate(work: list[tuple[Group, range]]) -> None:
        """Completions of each range for its group; each is scored while others are still being generated."""
        owners = [group for group, samples in work for _ in samples]
        requests = [
            Request(
                prompt_ids=train_ids[group.prompt_index],
                seed=seed_of(config.train.seed, state.step, group.place, sample),
                temperature=config.rollout.temperature,
                max_new_tokens=config.rollout.max_new_tokens,
            )
            for group, samples in work
            for sample in samples
        ]
        prompts = [train_prompts[group.prompt_index] for group in owners]
        results = sample_and_score(sampler, pool, tokenizer, requests, prompts, state.step, clock, "rollout")
        for group, completion, verdict in zip(owners, *results):
            group.completions.append(completion)
            group.verdicts.append(verdict)

    if state.step == 0:
        state.first_eval = run_evaluation()
        log_metrics(accelerator, config, state, state.first_eval)
    clock.take_step()

    # ---- the loop -----------------------------------------------------------------------------------------
    progress = tqdm(
        total=config.train.num_steps, initial=state.step, desc="train", unit="step",
        disable=None if rank == 0 else True, mininterval=0.5,
    )  # fmt: skip
    while not is_last(state, config):
        step_start = time.perf_counter()

        # sample prompts and roll out, in rounds where probing or refill asks for more
        groups, outcomes, account = sample_groups(generate, state, history, config)
        sampler.sleep()
        check_verdicts([v for group in groups for v in group.verdicts], config.reward.max_failed_frac)
        sampled_metrics = rollout_metrics(groups, config.reward.dense, no_route(num_experts))
        check_routes(*sampled_metrics["invalid_routes_frac"], config.rollout.max_invalid_routes)
        history.update(list(outcomes.values()), state.step, config.zero_variance.history_decay)

        # eliminate zero variance
        groups, left = drop_and_balance(groups, outcomes, config.zero_variance)
        batch = collate(groups, train_prompts, train_ids)

        # rewards: verifier, judge, penalties
        with clock("judge"):
            texts = tokenizer.batch_decode(batch.completion_ids, skip_special_tokens=True) if judge else []
            batch.rewards = compute_rewards(batch, judge, texts, config)  # [B]
            drop_nonfinite_rewards(batch, config, state.step)

        # old log-probabilities and entropies, where the update's own forward does not give them in time
        with clock("logprobs"):
            off_policy = config.train.minibatches_per_step > 1
            if left and (off_policy or config.zero_variance.rl_zvp or check_is_due):
                old = outputs_of_batch(policy, batch, config)
                batch.old_logprobs, batch.entropy, batch.old_routes, batch.route_mismatch = old
            if left and check_is_due:
                check_parity(batch, config, state.step)
                check_is_due = False
            if left and reference is not None:  # with its own router
                batch.ref_logprobs = outputs_of_batch(reference, batch, config, replay=False).logprobs

        # advantages
        batch.advantages = token_advantages(batch, config)  # [B, T]

        # update
        with clock("update"):
            for parameter_group in engine.optimizer.param_groups:
                parameter_group["lr"] = learning_rate(config, state.step)
            update_metrics = update_policy(engine, batch, config, state.step)
        state.step += 1

        # weight sync
        with clock("sync"):
            report = sampler.sync(weights_for_sampler(), state.step)
            if config.rollout.check_every and state.step % config.rollout.check_every == 0:
                sampler.check_weights(weights_for_sampler())
                check_is_due = True

        # log
        restarts = {"reward_worker_restarts_total": (pool.num_restarts, 1)}
        trained_metrics = batch_metrics(batch, groups, group_size)
        metrics = reduce_metrics(sampled_metrics | trained_metrics | update_metrics | restarts)
        metrics |= effective_sample_size(metrics)
        metrics |= account_of(account, outcomes, left)
        state.add(metrics)
        metrics |= {
            "learning_rate": learning_rate(config, state.step - 1),
            "sync_bytes": report.num_bytes,
            "sync_tensors": report.num_tensors,
            "seconds_per_step": time.perf_counter() - step_start,
        }
        metrics |= clock.take_step()
        progress.set_postfix(reward=f"{metrics['reward']:.3f}", refresh=False)
        progress.update()
        if state.step % config.run.log_every == 0:
            say(console_line(state, metrics))

        # evaluation, checkpoint
        too_far = mismatch_gate(metrics, state, config)
        last = is_last(state, config)
        if last or (config.eval.every and state.step % config.eval.every == 0):
            state.last_eval = run_evaluation()
            metrics |= state.last_eval
        with clock("log"):
            log_metrics(accelerator, config, state, metrics)
            if rank == 0 and state.step % config.run.log_every == 0:
                log_samples(config, state, batch, tokenizer)
        if last or too_far or (config.checkpoint.every and state.step % config.checkpoint.every == 0):
            with clock("checkpoint"):
                record = vars(history) | {"prompts": digest_of(train_prompts)}
                save_checkpoint(engine, tokenizer, asdict(state), record, config)
        if too_far:
            raise RuntimeError(too_far)
        clock.take_step()
    progress.close()

    # ---- export, summary ----------------------------------------------------------------------------------
    pool.close()
    run_dir = Path(config.run.dir)
    moe_model.save_hf(policy, run_dir / "model")
    peak_rss = {"bytes_total": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 1)}
    peak_rss_bytes = int(reduce_metrics(peak_rss)["bytes_total"])
    if rank == 0:
        write_summary(run_dir, state, peak_rss_bytes)
        tokenizer.save_pretrained(run_dir / "model")
        plot_curves(run_dir)
        print_summary(run_dir)
        lock.close()
    dist.barrier()
    accelerator.end_training()


def die_with_torchrun() -> None:
    """Ask Linux to end this rank when torchrun is killed: it would go on writing to run.dir on its own."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(argv: list[str]) -> int:
    """main() with errors as one line; returns the exit code. The stack goes to run.dir/error_rank_R.txt."""
    die_with_torchrun()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (alone | {"MASTER_PORT": "0"}).items():  # without torchrun: a world of one process
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # old names inside libraries
    rank, run_dir = int(os.environ["RANK"]), None
    try:
        config = load_config(argv, __doc__)
        run_dir = Path(config.run.dir)
        main(config)
        return 0
    except (ValueError, RuntimeError, OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            if run_dir is not None and run_dir.is_dir():
                (run_dir / f"error_rank_{rank}.txt").write_text(traceback.format_exc())
        if rank > 0:
            time.sleep(
                5
            )  # most errors are the same on all ranks; rank 0 speaks, and torchrun ends the others
        print(f"\nerror on rank {rank}: {error}\n", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    code = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips the leak reports that vLLM's native libraries print at a normal exit
