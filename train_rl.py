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
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

import moe_model
from data.history import PromptHistory
from data.prompts import Prompt
from data.stream import digest_of, load_sets, prompts_of_step, seed_of, tokenize
from experiments.balance import exchange, micro_batches_of, sequence_lengths
from experiments.checks import (
    check_parity,
    check_routes,
    check_verdicts,
    drop_nonfinite_rewards,
    handle_nonfinite,
    mismatch_gate,
)
from experiments.evaluation import evaluation_is_due, evaluation_metrics, plan_evaluation
from experiments.judges import build_judge, pairwise_reference, round_robin
from experiments.launch import announcement, build_policy, build_pool, build_sampler, check_ranks, run
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
    schedule_metrics,
    straggler,
    token_metrics,
)
from experiments.run_dir import CheckpointWriter, TrainState, find_checkpoint, prepare_run_dir
from experiments.settings import (
    MAX_ENTROPY_GROUPS,
    AlgorithmSection,
    Config,
    RewardSection,
    ZeroVarianceSection,
)
from experiments.summary import finish_run, print_summary
from moe_model import pack, route_table
from reward import RewardPool, Verdict
from rollout import Completion, Request, RolloutEngine, longest_first, no_route

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
    verdicts: list[Verdict | None] = field(default_factory=list)  # None: still out, or of one that was cut
    minibatch: int = 0  # the update of the step that it is part of
    expected_tokens: list[float] = field(default_factory=list)  # [G] of each completion; empty: no matter
    guessed: bool = False  # the expectation is not of this prompt

    @classmethod
    def from_dict(cls, saved: dict) -> "Group":
        """Undo asdict()."""
        completions = [Completion(**completion) for completion in saved["completions"]]
        verdicts = [verdict and Verdict(**verdict) for verdict in saved["verdicts"]]
        return cls(**saved | {"completions": completions, "verdicts": verdicts})

    def put(self, sample: int, completion: Completion, verdict: Verdict | None) -> None:
        """Enter a completion, the next one or in place of its beginning; no verdict of one that was cut."""
        self.completions[sample : sample + 1] = [completion]
        self.verdicts[sample : sample + 1] = [verdict]

    def unfinished(self, group_size: int) -> list[int]:
        """Which of its completions are still to be sampled, or to be continued."""
        ended = [c.finish_reason != "cut" for c in self.completions]
        return [i for i in range(group_size) if i >= len(ended) or not ended[i]]

    def expected(self, sample: int) -> float:
        """Tokens that a completion is expected to take from now on; 1 where that is no matter."""
        begun = len(self.completions[sample].token_ids) if sample < len(self.completions) else 0
        return max(1.0, self.expected_tokens[sample] - begun) if self.expected_tokens else 1.0

    def outcome(self, dense: bool) -> "Outcome":
        tokens = sum(len(c.token_ids) for c in self.completions)
        return Outcome.of(self.place, self.prompt_index, tokens, self.verdicts, dense)


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

    @classmethod
    def of(
        cls, place: int, prompt_index: int, tokens: int, verdicts: list[Verdict | None], dense: bool
    ) -> "Outcome":
        """tokens: of all completions; None stands for a verdict that is still out."""
        valid = [v for v in verdicts if v is not None and v.status not in ("timeout", "error")]
        scores = [score_of(v, dense) for v in valid]
        return cls(
            place=place,
            prompt_index=prompt_index,
            solved=sum(v.status == "ok" for v in valid),
            valid=len(valid),
            score_sum=sum(scores),
            tokens=tokens,
            completions=len(verdicts),
            # [ours] of the correctness part: penalties would hide that a group teaches nothing
            has_variance=len(scores) >= 2 and max(scores) - min(scores) > ZERO_VARIANCE,
        )


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


Work = list[tuple[Group, Sequence[int]]]  # completions to sample: of each group these, of its G


def expect_lengths(
    work: Work, look_ahead: Callable[[Work], list[list[int]]], history: PromptHistory, prompts, config: Config
) -> None:
    """Set expected_tokens of the groups in work, by rollout.schedule.

        arrival        all alike: no order but that of the prompts (the contrast)
        longest_first  by the record of each prompt
        oracle         as they will be: everything is sampled twice (for ablations of the record)

    work is that of all ranks; all ranks call it.
    """
    rank, world_size, group_size = dist.get_rank(), dist.get_world_size(), config.rollout.group_size
    match config.rollout.schedule:
        case "arrival":
            pass
        case "longest_first":
            history.expect([group for group, _ in work], prompts, group_size)
        case "oracle":
            lengths = [None] * world_size
            dist.all_gather_object(lengths, look_ahead(work[rank::world_size]))
            for i, (group, samples) in enumerate(work):
                group.expected_tokens = group.expected_tokens or [0.0] * group_size
                for sample, tokens in zip(samples, lengths[i % world_size][i // world_size]):
                    group.expected_tokens[sample] = float(tokens)


def sample_groups(
    generate: Callable[[Work], None],
    look_ahead: Callable[[Work], list[list[int]]],
    state: TrainState,
    history: PromptHistory,
    prompts: list[Prompt],
    config: Config,
) -> tuple[list[Group], dict[int, Outcome], Counter]:
    """The rollouts of one step: this rank's groups, {place: outcome} of all ranks, account over all ranks.

    generate(work) samples the completions of each range for its group and appends them with their verdicts;
    look_ahead(work) tells their lengths and changes nothing; prompts: the training set.
    Plain: one round of prompts_per_step groups. With probing (stage 1c), a group first gets probe_size
    completions; if it would end with zero variance it stops there, and the completions it does not use buy
    other prompts. With refill (DAPO, arXiv 2503.14476, eq. 11), new prompts are sampled until
    prompts_per_step groups have variance. max_rounds ends both: the batch is then short.
    In each round the ranks get about as many expected tokens, longest prompts first.
    """
    settings, group_size = config.zero_variance, config.rollout.group_size
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups: list[Group] = []  # of all ranks, by place; completions are with the owner only
    outcomes: dict[int, Outcome] = {}  # {place: outcome} of all ranks
    owner: list[int] = []  # [groups] rank
    account, probing, wanted = Counter(), [], config.rollout.prompts_per_step
    while wanted or probing:
        chosen, offered = choose_prompts(wanted, state.consumed_prompts, history, state.step, config)
        state.consumed_prompts += offered
        account.update(offered=offered, skipped=offered - wanted, rounds=1)
        account.update(refilled=wanted if outcomes else 0)
        rest, first = range(settings.probe_size, group_size), range(settings.probe_size or group_size)
        new = [Group(len(groups) + i, prompt_index) for i, prompt_index in enumerate(chosen)]
        groups += new
        work = [(groups[place], rest) for place in probing] + [(group, first) for group in new]
        expect_lengths(work, look_ahead, history, prompts, config)
        tokens = [sum(group.expected(i) for i in samples) for group, samples in work]
        load = [0.0] * world_size
        for place, size in zip(probing, tokens):
            load[owner[place]] += size
        owner += longest_first(tokens[len(probing) :], world_size, load)
        own = [(group, samples) for group, samples in work if owner[group.place] == rank]
        generate(own)
        everyone = [None] * world_size
        dist.all_gather_object(everyone, [group.outcome(config.reward.dense) for group, _ in own])
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
    return [group for group in groups if owner[group.place] == rank], outcomes, account


def sample_ahead(
    generate: Callable[[Work, int], None],
    carried: list[Group],
    state: TrainState,
    history: PromptHistory,
    prompts: list[Prompt],
    config: Config,
) -> tuple[list[Group], list[Group], dict[int, Outcome], Counter]:
    """sample_groups() without waiting for the longest: also returns the groups to carry to the next step.

    A rank works on (1 + overprovision) times its share of groups, those carried among them, and stops when
    its share is complete. The others keep their tokens, log-probabilities and the versions of the policy that
    drew them; the next step goes on from there (after APRIL, arXiv 2509.18521, and others). Tokens of an
    older policy are off-policy: rollout_correction weighs them. Short groups are trained on before long ones.
    """
    rank, world_size, group_size = dist.get_rank(), dist.get_world_size(), config.rollout.group_size
    share = config.rollout.prompts_per_step // world_size
    each = math.ceil(share * (1 + config.rollout.overprovision))
    everyone = [None] * world_size
    dist.all_gather_object(everyone, len(carried))
    wanted = each * world_size - sum(everyone)
    chosen, offered = choose_prompts(wanted, state.consumed_prompts, history, state.step, config)
    state.consumed_prompts += offered
    first = sum(everyone[:rank])
    own = [replace(group, place=first + i) for i, group in enumerate(carried)]
    new = [Group(sum(everyone) + i, prompt_index) for i, prompt_index in enumerate(chosen)]
    expect_lengths([(group, range(group_size)) for group in new], lambda work: [], history, prompts, config)
    room = [each - number for number in everyone]
    owner = longest_first([group.expected(0) for group in new], world_size, room=room)
    own += [group for group, r in zip(new, owner) if r == rank]
    missing = share - sum(not group.unfinished(group_size) for group in own)  # some were complete in time
    generate([(group, group.unfinished(group_size)) for group in own], missing)
    complete = [group for group in own if not group.unfinished(group_size)][:share]
    dist.all_gather_object(everyone, [group.outcome(config.reward.dense) for group in complete])
    outcomes = {o.place: o for o in sorted(sum(everyone, []), key=lambda o: o.place)}
    account = Counter(offered=offered, skipped=offered - wanted, rounds=1)
    places = {group.place for group in complete}
    return complete, [group for group in own if group.place not in places], outcomes, account


def drop_and_balance(
    groups: list[Group], outcomes: dict[int, Outcome], config: Config
) -> tuple[list[Group], dict[int, Outcome]]:
    """This rank's groups of the update, and the outcomes of those of all ranks; all ranks call it.

    What is left after dropping is cut, in its order, into the minibatches of the step, and each of them is
    dealt to the ranks so that they train on about as many tokens (train.balance; else on as many
    completions). Which rank sampled a group has no part in it: scheduling does not change an update.
    """
    world_size = dist.get_world_size()
    left = {place: o for place, o in sorted(outcomes.items()) if stays(o, config.zero_variance)}
    places, per_minibatch = list(left), -(-len(left) // config.train.minibatches_per_step) or 1
    owner, minibatch = {}, {place: i // per_minibatch for i, place in enumerate(places)}
    for start in range(0, len(places), per_minibatch):
        part = places[start : start + per_minibatch]
        sizes = [left[place].tokens if config.train.balance else left[place].completions for place in part]
        owner |= zip(part, longest_first(sizes, world_size))
    parcels = [[group for group in groups if owner.get(group.place) == r] for r in range(world_size)]
    groups = sorted(exchange(parcels), key=lambda group: group.place)
    return [replace(group, minibatch=minibatch[group.place]) for group in groups], left


# ============================================================================================================
# 3 The batch
# ============================================================================================================
@dataclass
class RolloutBatch:
    """What flows through a step on one rank: completions, group after group. Each field is written once,
    but for verdicts and valid where verdicts come late."""

    prompts: list[Prompt]  # [B]
    prompt_ids: list[list[int]]  # [B] ragged
    completion_ids: list[list[int]]  # [B] ragged
    finish_reason: list[str]  # [B] "stop" or "length"
    verdicts: list[Verdict | None]  # [B] None: still out
    response_mask: Tensor  # [B, T] bool, where the policy chose the token and the loss applies
    rollout_logprobs: Tensor  # [B, T] nats, the sampler's
    group_index: Tensor  # [B] int64, which prompt of this rank
    minibatch: Tensor  # [B] int64, which update of the step
    valid: Tensor  # [B] bool, False where the verifier gave no verdict or the reward is not finite
    policy_lag: Tensor  # [B, T] int64, steps since the policy that drew the token; 0 but for what was cut
    routed_experts: list[Tensor] | None = None  # [B] of [p + c - 1, L, K] expert ids, the sampler's
    rewards: Tensor | None = None  # [B]
    old_logprobs: Tensor | None = None  # [B, T] nats, the trainer's before the update
    entropy: Tensor | None = None  # [B, T] nats, full vocabulary, of the policy before the update
    old_routes: list[Tensor] | None = None  # [B] of [p + c - 1, L, K], the trainer's before the update
    route_mismatch: Tensor | None = None  # [B, T], 1 where old_routes are not those of the sampler
    advantages: Tensor | None = None  # [B, T]
    ref_logprobs: Tensor | None = None  # [B, T] nats, the first policy's; only with kl_coef > 0


def verdicts_of(groups: list[Group]) -> tuple[list[Verdict | None], Tensor]:
    """Verdicts [B] of a batch, and which are valid [B] bool."""
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    valid = [v is not None and v.status not in ("timeout", "error") for v in verdicts]
    return verdicts, torch.tensor(valid, dtype=torch.bool)


def collate(
    groups: list[Group], prompts: list[Prompt], prompt_ids: list[list[int]], version: int = 0
) -> RolloutBatch:
    """Groups of one rank as a batch, log-probabilities padded right with 0.

    prompts, prompt_ids: the training set; version: of the policy that is about to be updated.
    """
    rows = [(index, group, i) for index, group in enumerate(groups) for i in range(len(group.completions))]
    completions = [group.completions[i] for _, group, i in rows]
    verdicts, valid = verdicts_of(groups)
    lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int64)
    longest = max([1, *lengths.tolist()])
    response_mask = torch.arange(longest) < lengths.unsqueeze(1)  # [B, T]
    rollout_logprobs = torch.zeros(response_mask.shape)
    rollout_logprobs[response_mask] = torch.tensor([x for c in completions for x in c.logprobs])
    policy_lag = torch.zeros(response_mask.shape, dtype=torch.int64)
    for row, completion in enumerate(completions):
        lag = [version - v for v, tokens in completion.spans for _ in range(tokens)]
        if any(lag):
            policy_lag[row, : len(lag)] = torch.tensor(lag)
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
        minibatch=torch.tensor([group.minibatch for _, group, _ in rows], dtype=torch.int64),
        valid=valid,
        policy_lag=policy_lag,
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
    logprobs, entropy = (zeros.masked_scatter(mask, x * scale) for x in (logprobs, entropy.detach()))
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
def outputs_of_batch(
    policy,
    batch: RolloutBatch,
    config: Config,
    replay: bool = True,
    meanwhile: Callable[[], object] = lambda: None,
) -> PolicyOutputs:
    """completion_outputs of all rows on the CPU, without gradient; all ranks call it.

    meanwhile is called after each micro-batch.
    """
    logprobs, entropy, mismatch = (torch.zeros(batch.response_mask.shape) for _ in range(3))
    routes = [None] * len(batch.prompts)
    for rows in micro_batches_of(batch, list(range(len(routes))), config.train):
        part = completion_outputs(policy, batch, rows, config, replay)
        meanwhile()
        if rows:
            logprobs[rows], entropy[rows] = part.logprobs.float().cpu(), part.entropy.float().cpu()
        for row, ids in zip(rows, part.routes or []):
            routes[row] = ids.cpu()
        if part.route_mismatch is not None:
            mismatch[rows] = part.route_mismatch.float().cpu()
    routes = None if any(ids is None for ids in routes) else routes
    return PolicyOutputs(logprobs, entropy, routes, None if batch.routed_experts is None else mismatch)


def micro_batch_loss(
    logprobs: Tensor,
    entropy: Tensor,
    batch: RolloutBatch,
    rows: list[int],
    counts: Tensor,
    log_vocab: float,
    config: Config,
) -> tuple[Tensor, dict[str, Tensor]]:
    """policy_loss() of some rows and its per-token statistics [b, T].

    counts: completions and tokens of the update over all ranks. The old policy of the ratio, old_policy:

        trainer  the trainer's before the update; where the batch has no old_logprobs that is the current one,
                 and the ratio exactly 1
        rollout  the sampler's (bypass): the ratio pi / pi_rollout is itself the correction of what separates
                 the two, and no pass is needed for old log-probabilities
    """
    device, algorithm = logprobs.device, config.algorithm
    mask = batch.response_mask[rows].to(device)  # [b, T]
    sampled = batch.rollout_logprobs[rows].to(device)
    before = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[rows].to(device)
    match algorithm.old_policy:
        case "trainer":
            old = before
        case "rollout":
            old = sampled
    entropy = entropy.detach() if batch.entropy is None else batch.entropy[rows].to(device)
    groups = ratio_groups(entropy, mask, algorithm)
    num_completions, num_tokens = counts.tolist()
    weights = loss_weights(
        mask, groups, num_completions, num_tokens, config.rollout.max_new_tokens, algorithm.loss_agg
    )
    correction = rollout_weights(
        old, sampled, mask, algorithm.rollout_correction, algorithm.rollout_correction_cap
    )
    loss, statistics = policy_loss(
        logprobs, old, batch.advantages[rows].to(device) * correction, weights, groups, entropy, mask,
        log_vocab, algorithm,
        None if batch.ref_logprobs is None else batch.ref_logprobs[rows].to(device),
    )  # fmt: skip
    statistics["entropy"] = entropy
    statistics["entropy_group"] = entropy_groups(entropy, mask, algorithm.entropy_groups)
    if batch.old_logprobs is None and batch.minibatch[rows[0]] > 0:
        return loss, statistics  # the policy has moved since: the distance to the sampler is not known
    return loss, statistics | mismatch_statistics(before, sampled)


def update_policy(
    engine, batch: RolloutBatch, config: Config, step: int = 0
) -> dict[str, tuple[float, float]]:
    """Take minibatches_per_step optimizer steps on the batch; returns metrics as (sum, count).

    An update whose gradient is not finite leaves the weights as they are (DeepSpeed skips it on all ranks).
    """
    device, world_size = engine.device, dist.get_world_size()
    log_vocab = math.log(engine.module.lm_head.weight.shape[0])
    seen = []  # (rows, statistics) of every micro-batch, for the metrics
    grad_norms, num_skipped, lengths = [], 0, sequence_lengths(batch)
    num_computed, num_padded = 0, 0  # tokens: of the sequences, of the grids that attention works on
    for number in range(config.train.minibatches_per_step):
        minibatch = (batch.minibatch == number).nonzero().flatten().tolist()  # whole groups
        counts = torch.tensor([len(minibatch), int(batch.response_mask[minibatch].sum())], device=device)
        dist.all_reduce(counts)  # before the first backward: the loss must not depend on the split
        if counts[0] == 0:  # groups were dropped: there is nothing left for this update on any rank
            continue
        suspects = []
        for rows in micro_batches_of(batch, minibatch, config.train):
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
            num_computed += sum(lengths[row] for row in rows)
            num_padded += len(rows) * max(lengths[row] for row in rows)
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
    metrics["padding_frac"] = (num_padded - num_computed, num_padded)
    metrics["update_tokens"] = metrics["update_tokens_max"] = (num_computed, 1)
    return metrics | token_metrics(batch, seen, len(config.algorithm.entropy_groups))


# ============================================================================================================
# 7 Rollouts with rewards
# ============================================================================================================
def count_rewards(
    requests: list[Request], prompts: list[Prompt], engine: RolloutEngine, pool: RewardPool, config: Config
) -> list[Request]:
    """The requests, their rewards counted in the order in which they start [ours].

    Longest first alone leaves many short ones to the end, whose slow rewards then queue up while the engine
    idles. So the seconds that a kind of reward takes count as tokens, at the pace of the engine's last steps:
    twice, because rewards queue too (simulated: 1, 2, 4). Not where the order decides what is cut: measured
    seconds must not.
    """
    settings = config.rollout
    if not settings.reward_aware or settings.schedule == "arrival" or settings.overprovision:
        return requests
    pace = engine.seconds_per_step / 2
    return [
        replace(request, reward_tokens=pool.seconds.get(prompt.kind, 0.0) / pace)
        for request, prompt in zip(requests, prompts)
    ]


def sample_and_score(
    engine: RolloutEngine,
    pool: RewardPool,
    tokenizer,
    requests: list[Request],
    prompts: list[Prompt],
    version: int,
    clock,
    label: str,
    settings: RewardSection,
    quota: int | None = None,
    keys: list[Hashable] | None = None,
    wait: bool = True,
) -> tuple[list[Completion], list[Verdict | None]]:
    """Complete all requests, or as many groups as quota says; what ends goes to the reward workers at once.

    keys: of the completions in the pool, None: their numbers. Without wait verdicts stay there for settle().
    The clock's phases: label for the generation, "reward" for the wait for verdicts that it did not hide.
    With settings.overlap off all rewards come after all completions; settings.decode says where tokens become
    text.
    """
    keys = list(range(len(requests))) if keys is None else keys
    hidden = None if dist.get_rank() == 0 else True  # None: shown on a terminal only
    progress = tqdm(total=len(requests), desc=label, position=1, leave=False, delay=1.0, disable=hidden)

    def submit(index: int, completion: Completion) -> None:
        match settings.decode:
            case "workers":
                text = completion.token_ids
            case "engine":
                text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        pool.submit(keys[index], prompts[index].kind, text, prompts[index].answer)

    def on_finished(index: int, completion: Completion) -> None:
        if settings.overlap:
            submit(index, completion)
        if requests[index].can_be_cut:
            left[requests[index].group] -= 1
        progress.update()

    def enough() -> bool:
        return sum(number == 0 for number in left.values()) >= quota

    left = Counter(request.group for request in requests if request.can_be_cut)  # unfinished completions
    with clock(label):
        completions = engine.generate(
            requests, version, on_finished, pool.poll, None if quota is None else enough
        )
    progress.close()
    with clock("reward"):
        ended = [i for i, completion in enumerate(completions) if completion.finish_reason != "cut"]
        for index in [] if settings.overlap else ended:
            submit(index, completions[index])
        verdicts = pool.collect() if wait else {}
    return completions, [verdicts.get(key) for key in keys]


def settle(
    pool: RewardPool, groups: list[Group], outcomes: dict[int, Outcome], dense: bool
) -> dict[int, Outcome]:
    """Wait for the verdicts still out, for all ranks, and enter them where the groups are now.

    Their keys in the pool are (place, sample). Returns the outcomes with them; all ranks call it.
    """
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pool.collect())
    found = {key: verdict for part in everyone for key, verdict in part.items()}
    if not found:  # they were waited for, with an evaluation
        return outcomes
    for group in groups:
        group.verdicts = [found[group.place, i] for i in range(len(group.completions))]
    verdicts = {place: [found[place, i] for i in range(o.completions)] for place, o in outcomes.items()}
    return {
        place: Outcome.of(place, o.prompt_index, o.tokens, verdicts[place], dense)
        for place, o in outcomes.items()
    }


# ============================================================================================================
# 8 Main
# ============================================================================================================
def learning_rate(config: Config, step: int) -> float:
    """Of update number step (from 0): linear warm-up, then constant."""
    return config.train.learning_rate * min(1.0, (step + 1) / (config.train.warmup_steps + 1))


def main(config: Config) -> None:
    # ---- process group, data -------------------------------------------------------------------------------
    on_gpu = torch.cuda.is_available()
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=config.run.timeout_s))
    accelerator = Accelerator(
        cpu=not on_gpu, log_with="tensorboard", project_dir=config.run.dir, kwargs_handlers=[timeout]
    )
    moe_model.init_deepspeed()
    rank, world_size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    say = tqdm.write if rank == 0 else (lambda line: None)
    set_seed(config.train.seed)
    group_size = config.rollout.group_size
    check_ranks(config, world_size)
    found, record = find_checkpoint(config) or (None, None)
    weights = found / "model" if found else Path(config.model.path)
    state = TrainState(**record["state"]) if record else TrainState()
    if found and state.is_last(config) and (Path(config.run.dir) / "summary.json").is_file():
        say(f"{found}: this run is finished; raise train.num_steps to go on, or choose another run.dir")
        return print_summary(Path(config.run.dir)) if rank == 0 else None
    if rank == 0:
        prepare_run_dir(config, record)
    hf_config = moe_model.load_config(weights)
    num_experts = moe_model.num_experts_of(hf_config)
    group = moe_model.create_expert_parallel_group(config.model.ep_size, num_experts)
    tokenizer = AutoTokenizer.from_pretrained(weights, local_files_only=True)
    train_prompts, offline_scores, eval_sets, num_dropped = load_sets(config, tokenizer)
    train_ids = tokenize(train_prompts, tokenizer, config.rollout.max_prompt_tokens)
    for line in announcement(config, hf_config, len(train_prompts), num_dropped, eval_sets, world_size):
        say(line)

    # ---- reward workers, sampler, policy ------------------------------------------------------------------
    clock = Clock(state.seconds)
    with clock("setup"):
        pool = build_pool(config.reward, tokenizer)
        sampler = build_sampler(config, weights, hf_config)
        judge = build_judge(config.reward.judge, config.reward.judge_path)
        dist.barrier()
        policy = build_policy(config, weights, group, device)
        engine = moe_model.deepspeed_engine(policy, config.train)
        with_reference = config.algorithm.kl_coef > 0
        reference = build_policy(config, config.model.path, group, device) if with_reference else None
        checkpoints = CheckpointWriter(engine, tokenizer, config)
        history = PromptHistory.from_offline(offline_scores, group_size)
        if found:
            saved = torch.load(found / "history.pt", map_location="cpu", weights_only=True)
            same_prompts = saved.pop("prompts") == digest_of(train_prompts)
            history = PromptHistory(**saved) if same_prompts else history
            say(f"resumed from {found}" + "; the record of other prompts is dropped" * (not same_prompts))
        carried: list[Group] = []  # of this rank, begun in the last step (rollout.overprovision)
        if found and config.checkpoint.resume == "auto":
            shard = torch.load(found / f"rank_{rank:05d}.pt", map_location="cpu", weights_only=True)
            moe_model.load_optimizer_shard(engine, shard["optimizer"])
            torch.set_rng_state(shard["torch_rng"])
            carried = [Group.from_dict(group) for group in shard["carried"] if same_prompts]
    accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": state.step + 1}})
    own_experts = config.rollout.expert_parallel and config.rollout.tensor_parallel == config.model.ep_size

    def weights_for_sampler():
        return moe_model.hf_tensors(policy, own_experts)

    with clock("sync"):
        sampler.sync(weights_for_sampler(), state.step)
        sampler.check_weights(weights_for_sampler())
    check_is_due = True  # of the engine against the policy: at the first step, then every check_every steps
    zero, later = config.zero_variance, config.train.minibatches_per_step > 1
    old_pass_is_due = zero.rl_zvp or (later and config.algorithm.old_policy == "trainer")
    # what is sampled or trained on depends on verdicts: they are waited for at once
    verdicts_decide = bool(zero.probe_size or zero.drop or config.rollout.overprovision)
    pass_is_due = False  # over the new completions, while the last verdicts come

    def requests_of(jobs: list[tuple[Group, int]]) -> list[Request]:
        return [
            Request(
                prompt_ids=train_ids[group.prompt_index],
                seed=seed_of(config.train.seed, state.step, group.place, sample),
                temperature=config.rollout.temperature,
                max_new_tokens=config.rollout.max_new_tokens,
                group=group.place,
                expected_tokens=group.expected(sample),
                guessed=group.guessed,
                begun=group.completions[sample] if sample < len(group.completions) else None,
            )
            for group, sample in jobs
        ]

    def generate(work: Work, quota: int | None = None, label: str = "rollout") -> None:
        """Completions for these groups, scored while others are still being generated.

        It ends when so many of the groups are complete, if there is a quota. An evaluation that is due rides
        along: the engine holds the very weights, and works on it last.
        """
        jobs = [(group, sample) for group, samples in work for sample in samples]
        prompts = [train_prompts[group.prompt_index] for group, _ in jobs]
        requests = count_rewards(requests_of(jobs), prompts, sampler, pool, config)
        riders = None
        if evaluation_is_due(state, config):
            riders = plan_evaluation(eval_sets, config)
            requests, prompts = requests + riders.requests, prompts + riders.prompts
        keys = [(group.place, sample) for group, sample in jobs]
        keys += [("eval", i) for i in range(len(requests) - len(jobs))]
        completions, verdicts = sample_and_score(
            sampler, pool, tokenizer, requests, prompts, state.step, clock, label, config.reward, quota,
            keys, wait=riders is not None or verdicts_decide or not pass_is_due,
        )  # fmt: skip
        for (group, sample), completion, verdict in zip(jobs, completions, verdicts):
            group.put(sample, completion, verdict)
        if riders is not None:
            theirs = slice(len(jobs), None)
            metrics = evaluation_metrics(riders, completions[theirs], verdicts[theirs], eval_sets, config)
            state.add_evaluation(metrics)
            log_metrics(accelerator, config, state, metrics)

    def look_ahead(work: Work) -> list[list[int]]:
        """Lengths that generate() will find."""
        jobs = [(group, sample) for group, samples in work for sample in samples]
        with clock("look_ahead"):
            lengths = [len(c.token_ids) for c in sampler.generate(requests_of(jobs), state.step)]
        return [[lengths.pop(0) for _ in samples] for _, samples in work]

    if not config.eval.overlap and evaluation_is_due(state, config):
        generate([], label="eval")
    clock.take_step()

    # ---- the loop -----------------------------------------------------------------------------------------
    progress = tqdm(
        total=config.train.num_steps, initial=state.step, desc="train", unit="step",
        disable=None if rank == 0 else True, mininterval=0.5,
    )  # fmt: skip
    while not state.is_last(config):
        step_start = time.perf_counter()

        # sample prompts and roll out, in rounds where probing or refill asks for more
        pass_is_due = old_pass_is_due or check_is_due or reference is not None
        if config.rollout.overprovision:
            sampled, carried, outcomes, account = sample_ahead(
                generate, carried, state, history, train_prompts, config
            )
        else:
            sampled, outcomes, account = sample_groups(
                generate, look_ahead, state, history, train_prompts, config
            )
        seconds = time.perf_counter() - step_start - clock.step.get("look_ahead", 0.0)
        sampler.sleep()

        # eliminate zero variance
        with clock("balance"):
            groups, left = drop_and_balance(sampled, outcomes, config)
        batch = collate(groups, train_prompts, train_ids, state.step)

        # old log-probabilities and entropies, where the update's own forward does not give them in time
        with clock("logprobs"):
            if left and (old_pass_is_due or check_is_due):
                old = outputs_of_batch(policy, batch, config, meanwhile=pool.poll)
                batch.old_logprobs, batch.entropy, batch.old_routes, batch.route_mismatch = old
            if left and check_is_due:
                check_parity(batch, config, state.step)
                check_is_due = False
                if not old_pass_is_due:  # a check must not change the update
                    batch.old_logprobs = batch.entropy = None
            if left and reference is not None:  # with its own router
                of_reference = outputs_of_batch(reference, batch, config, False, meanwhile=pool.poll)
                batch.ref_logprobs = of_reference.logprobs

        # rewards: verifier, whose last verdicts may have come meanwhile, judge, penalties
        with clock("reward"):
            if pass_is_due and not verdicts_decide:
                outcomes = settle(pool, sampled + groups, outcomes, config.reward.dense)
            batch.verdicts, batch.valid = verdicts_of(groups)
        check_verdicts([v for group in sampled for v in group.verdicts], config.reward.max_failed_frac)
        sampled_metrics = rollout_metrics(sampled, config.reward.dense, no_route(num_experts))
        sampled_metrics |= schedule_metrics(sampled, pool, clock.step["rollout"], seconds)
        check_routes(*sampled_metrics["invalid_routes_frac"], config.rollout.max_invalid_routes)
        history.update(list(outcomes.values()), state.step, config.zero_variance.history_decay)
        with clock("judge"):
            texts = tokenizer.batch_decode(batch.completion_ids, skip_special_tokens=True) if judge else []
            batch.rewards = compute_rewards(batch, judge, texts, config)  # [B]
            drop_nonfinite_rewards(batch, config, state.step)

        # advantages
        batch.advantages = token_advantages(batch, config)  # [B, T]

        # update; a checkpoint under way is of the weights as they are
        with clock("checkpoint"):
            checkpoints.finish()
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
        metrics |= effective_sample_size(metrics) | straggler(metrics)
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
        last = state.is_last(config)
        with clock("log"):
            log_metrics(accelerator, config, state, metrics)
            if rank == 0 and state.step % config.run.log_every == 0:
                log_samples(config, state, batch, tokenizer)
        if (last or not config.eval.overlap) and evaluation_is_due(state, config):
            generate([], label="eval")
        if last or too_far or (config.checkpoint.every and state.step % config.checkpoint.every == 0):
            with clock("checkpoint"):
                record = vars(history) | {"prompts": digest_of(train_prompts)}
                checkpoints.start(asdict(state), record, [asdict(group) for group in carried])
                if last or too_far or not config.checkpoint.overlap:
                    checkpoints.finish()
        if too_far:
            raise RuntimeError(too_far)
        clock.take_step()
    progress.close()

    # ---- export, summary ----------------------------------------------------------------------------------
    pool.close()
    finish_run(policy, tokenizer, state, Path(config.run.dir))
    accelerator.end_training()


if __name__ == "__main__":
    code = run(main, sys.argv[1:], __doc__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips the leak reports that vLLM's native libraries print at a normal exit
