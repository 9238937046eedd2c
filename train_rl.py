"""Reinforcement learning of Mixture-of-Experts language models: the method and the training loop.

    J = E_x E_{y_i ~ pi_old} 1/G sum_i 1/T_i sum_t min(r A, clip(r, 1 - eps, 1 + eps) A) - beta KL(pi, pi_ref)
    r_{i,t} = pi(y_{i,t}) / pi_old(y_{i,t}),   A_{i,t} = (R_i - mean_group R) / std_group R

With every setting at its default this is GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3) with beta = 0 [ours: as
in DAPO and Dr.GRPO]. Every other method changes one or more axes: the tokens that share a ratio, the clip
(ESPO, arXiv 2512.00499; GSPO, GMPO, CISPO, DAPO, Dr.GRPO), the step from rewards to advantages, and the
treatment of groups without variance (multi-stage zero-variance elimination, arXiv 2512.07710).
experiments/methods/ has one YAML per method.

    torchrun --nproc-per-node=2 train_rl.py --config experiments/environments/demo.yaml
    torchrun --nproc-per-node=2 train_rl.py --config experiments/environments/tiny.yaml \
        --config experiments/methods/espo.yaml train.seed=1 run.dir=runs/espo
    python train_rl.py --help      # every setting; --help algorithm: one section

The file follows the data: 1 rollout rounds, 2 filter and batch, 3 rewards and advantages, 4 ratio, clip and
loss, 5 forward pass and update, 6 main loop. main() has a comment per phase. settings.py has the settings,
batch.py the types, sampling.py the calls of the engine and of the verifiers, lifecycle.py the work around the
method: set-up, evaluation, logging, saving.

Vocabulary: G = group_size completions per prompt, B completions on this rank, T tokens of the longest one.
`logprobs` carry gradient, `old_logprobs` are the trainer's before a step's updates, `rollout_logprobs` the
engine's; all are in nats. A verifier gives a score, training uses a reward. Every rank must call a function
marked Collective. Sources of choices: [paper] printed in the named source, [secondary] reported by others,
[ours] the sources are silent. In section 5 suffixes name the shape, as in moe_model.py: x_TLK is [T, L, K]
with T *packed tokens*, N sampled tokens, L layers, K experts per token, k top tokens.
"""

import math
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from runtime import launch

if __name__ == "__main__":  # before the imports that take seconds
    launch.die_with_torchrun()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until Signals.listen(), Ctrl-C ends the process silently
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported

import torch
import torch.distributed as dist
from torch import Tensor

import greso
import moe_model
from batch import (
    ZERO_VARIANCE,
    Group,
    GroupOutcome,
    Job,
    LossInputs,
    PolicyOutputs,
    Rollout,
    RolloutBatch,
    collate,
    pessimistic,
)  # fmt: skip
from configure import load_config
from data.history import PromptHistory
from data.stages import Offers
from data.stream import seed_of
from extras.base import MicroBatch, active, added_gain, charged_tokens, metrics_of
from judges import judge_metrics, judge_rewards
from lifecycle import (
    Run,
    evaluation_is_due,
    evaluation_requests,
    finish,
    log_evaluation,
    log_step,
    measure_rollout,
    next_stage_if_due,
    reduce_step_metrics,
    refuse_broken_policy,
    save_if_due,
    set_up,
    stop_reason,
    threads_of_step,
)
from memory_plan import syncs_own_experts
from moe_model import PackedSequences, num_experts_of, pack, route_table, select_targets
from plugins import call_hook, plugin_advantages, plugin_selection
from rollout import SyncReport, invalid_route
from runtime.checks import check_parity, handle_nonfinite, refuse_nonfinite_rewards
from runtime.learning_rate import learning_rate, set_learning_rate
from runtime.memory import return_freed_memory
from runtime.metrics import UpdateWork, batch_metrics, mismatch_statistics, old_pass_metrics, prompt_account
from runtime.schedule import (
    deal_groups,
    exchange,
    from_all_ranks,
    longest_first,
    micro_batches_of,
    sequence_lengths,
)
from sampling import generate, requests_of, rollout_number, set_expected_costs
from settings import (
    MAX_ENTROPY_GROUPS,
    AlgorithmSettings,
    Config,
    LossAgg,
    OldPolicy,
    Replay,
    ZeroVarianceSettings,
)
from verifiers.answer import final_answer, opened_thought


# ============================================================================================================
# 1 Rollouts: choose prompts, sample and score completions in rounds (arXiv 2512.07710, stages 1b and 1c)
# ============================================================================================================
def prob_all(hits: float, misses: float, num: int, prior: float) -> float:
    """Return the probability that the next num verdicts are all hits: E[p^num], a Beta-binomial estimate.

        p ~ Beta(hits + prior, misses + prior)

    With many verdicts the result approaches p^num of the observed rate p; with few verdicts the prior counts
    more [ours]. A prior below 1/2 expresses that most prompts are nearly always or nearly never solved.
    Example: 16 hits, 0 misses and prior 0.5 give 0.82 for num = 8.
    """
    return math.prod((hits + prior + j) / (hits + misses + 2 * prior + j) for j in range(num))


def skip_prob(prompt: int, history: PromptHistory, step: int, config: Config) -> float:
    """Return the probability of skipping a prompt, because its next group would have no variance (stage 1b).

        min(E[p^G], 1 - explore_solved) + min(E[q^G], 1 - explore_unsolved)

    p is the probability that a completion is fully right, q that a completion is fully wrong. For verifiers
    that return 0 or 1, and with reward.binary, q = 1 - p. The expectations are over the posterior of p and q
    given the record, see prob_all(). 0 for a prompt that was never tried, or whose record is retest_steps old
    [ours, after GRESO (arXiv 2506.02177), which also explores hard prompts more than easy prompts].
    zero_variance.skip_rule consecutive is the rule of GRESO itself.
    """
    zero = config.zero_variance
    group_size = config.rollout.group_size
    if zero.skip_rule == "consecutive":
        return greso.skip_prob(prompt, history)
    if not history.has_record(prompt, step, zero.retest_steps):
        return 0.0
    right, wrong, tried = history.counts(prompt, config.reward.binary)
    all_right = prob_all(right, tried - right, group_size, zero.prior)
    all_wrong = prob_all(wrong, tried - wrong, group_size, zero.prior)
    return min(all_right, 1 - zero.explore_solved) + min(all_wrong, 1 - zero.explore_unsolved)


def zero_variance_after(probe: GroupOutcome, history: PromptHistory, step: int, config: Config) -> float:
    """Return the probability that a probed group ends with zero variance (stage 1c) [ours].

    The remaining completions would all have to get the score of the probe. Their probability is estimated
    from the probe and, unless it has expired as in skip_prob(), from the record. 0 if the probe has variance
    already, if only one verdict of several is valid, and if all scores of the probe are the same fraction,
    for example 0.5, because the record does not count fractions.
    """
    zero = config.zero_variance
    is_right = probe.solved == probe.valid
    is_wrong = probe.score_sum == 0
    too_few = probe.valid < min(2, probe.completions)
    if probe.has_variance or too_few or not (is_right or is_wrong):
        return 0.0
    prompt = probe.prompt_index
    is_known = history.has_record(prompt, step, zero.retest_steps)
    right, wrong, tried = history.counts(prompt, config.reward.binary) if is_known else (0.0, 0.0, 0.0)
    num_same = (right if is_right else wrong) + probe.valid
    num_other = tried + probe.valid - num_same
    return prob_all(num_same, num_other, config.rollout.group_size - probe.completions, zero.prior)


def choose_prompts(
    num_prompts: int,
    consumed: int,
    history: PromptHistory,
    step: int,
    config: Config,
    offers: Offers,
    first: int = 0,
) -> tuple[list[int], int]:
    """Return the next prompts that are not skipped (stage 1b), and the number of prompts offered for them.

    The dataset offers its prompts in a seeded order; `consumed` counts the offers of the run so far. Each
    offer is skipped with the probability of skip_prob(). Skipping is switched off after a full epoch of
    offers, so that the loop always ends.

    offers: the prompts of the current part of the run (setting `stages`). first: value of `consumed` when
    this part began; it is added to the seed, so that earlier prompts return in a new order.
    """
    chosen: list[int] = []
    num_offered = 0
    while len(chosen) < num_prompts:
        prompt = offers.prompt(consumed + num_offered - first, config.train.seed + first)
        may_skip = config.zero_variance.history and num_offered < offers.epoch_length
        probability = skip_prob(prompt, history, step, config) if may_skip else 0.0
        draw = random.Random(seed_of(config.train.seed, "skip", consumed + num_offered)).random()
        if draw >= probability:
            chosen.append(prompt)
        num_offered += 1
    return chosen, num_offered


def num_new_prompts(
    outcomes: dict[int, GroupOutcome], last_round: list[int], probing: list[int], config: Config
) -> int:
    """Return the number of new prompts in the next round; 0: no further round is needed for new prompts.

        refill         P - groups with variance; groups that are still being probed count as useful
        refill, GRESO  1.5 P at first, then corrected for the last round's zero-variance share (greso.py)
        otherwise      (P G - completions sampled - completions reserved for running probes) // G

    P: prompts_per_step, G: group_size. last_round: slots of the last round.
    """
    zero = config.zero_variance
    prompts_per_step = config.rollout.prompts_per_step
    group_size = config.rollout.group_size
    if not zero.refill:
        num_reserved = len(probing) * (group_size - zero.probe_size)
        num_sampled = sum(outcome.completions for outcome in outcomes.values())
        return (prompts_per_step * group_size - num_sampled - num_reserved) // group_size
    useful = {slot for slot, outcome in outcomes.items() if outcome.has_variance or slot in probing}
    num_missing = max(0, prompts_per_step - len(useful))
    if zero.round_size == "adaptive" and num_missing:
        num_useful = len(useful.intersection(last_round))
        return greso.next_round_size(num_missing, num_useful, len(last_round), prompts_per_step)
    return num_missing


def sample_step(run: Run) -> tuple[list[Group], dict[int, GroupOutcome], Counter]:
    """Sample and score the groups of one training step. Collective.

    By default this is a single round: prompts_per_step prompts, G completions each. Two options add rounds:

    - Probing (stage 1c): sample probe_size completions of each group first. If the group is likely to end
      without variance, stop it and spend the saved completions on new prompts. Example: with G = 8 and
      probe_size = 4, four wrong answers stop the group after half of its budget if the last visit gave eight
      wrong ones.
    - Refill (DAPO, arXiv 2503.14476, eq. 11): keep sampling new prompts until prompts_per_step groups have
      variance.

    After max_rounds rounds no new prompts are taken, even if the batch is short. In every round the ranks
    receive about the same number of expected tokens, longest prompts first.

    Returns this rank's groups, the outcomes of all ranks by slot, and the account over all ranks.
    """
    config = run.config
    zero = config.zero_variance
    group_size = config.rollout.group_size
    number = rollout_number(run)
    outcomes: dict[int, GroupOutcome] = {}
    account: Counter[str] = Counter()
    probing: list[int] = []  # slots whose probe has not stopped the group
    last_round: list[int] = []  # slots of the last round
    carried = [job for extra in active(config) for job in extra.jobs(run)]  # of earlier steps
    groups = [job.group for job in carried]  # of all ranks, by slot; only Group.rank holds the completions
    num_new = max(0, num_new_prompts(outcomes, last_round, probing, config) - len(carried))
    while num_new or probing or carried:
        chosen, num_offered = choose_prompts(
            num_new, run.state.consumed_prompts, run.history, number, config, run.offers,
            run.state.stage.first_prompt,
        )  # fmt: skip
        run.state.consumed_prompts += num_offered
        account["rounds"] += 1
        account["offered"] += num_offered
        account["skipped"] += num_offered - num_new
        account["refilled"] += num_new if outcomes else 0
        new_groups = [Group(len(groups) + i, prompt_index) for i, prompt_index in enumerate(chosen)]
        groups += new_groups
        first_samples = range(zero.probe_size or group_size)
        later_samples = range(zero.probe_size, group_size)  # of groups that go on after their probe
        jobs = [Job(groups[slot], later_samples) for slot in probing]
        jobs += [Job(group, first_samples) for group in new_groups]
        round_outcomes = generate_round(run, carried + jobs)
        carried = []
        outcomes |= {outcome.slot: outcome for outcome in round_outcomes}
        probing = [o.slot for o in round_outcomes if is_continued(o, run.history, number, config)]
        last_round = [outcome.slot for outcome in round_outcomes]
        is_over = account["rounds"] >= zero.max_rounds or any(e.ends_rollouts for e in active(config))
        num_new = 0 if is_over else num_new_prompts(outcomes, last_round, probing, config)
    num_stopped = sum(outcome.completions < group_size for outcome in outcomes.values())
    account["probed"] = len(outcomes) if zero.probe_size else 0
    account["stopped"] = num_stopped
    finished = [group for group in groups if group.rank == dist.get_rank() and group.slot in outcomes]
    return finished, outcomes, account


def next_rollout(run: Run) -> tuple[Rollout, int]:
    """Return the rollout that this step trains on, with `rollout.lag` later ones sampled. Collective.

    The second value is the number of tokens that this rank has sampled in this call.

    Step t trains on rollout t, which the policy of step max(0, t - lag) has sampled. So the first step
    samples lag + 1 rollouts and every later step one: the delay of an asynchronous run without its
    concurrency [ours].
    """
    num_tokens = 0
    while len(run.queue) <= run.config.rollout.lag:
        groups, outcomes, account = sample_step(run)
        update_history(run, list(outcomes.values()))
        run.queue.append(Rollout(run.state.step, groups, outcomes, account))
        num_tokens += sum(c.num_sampled for group in groups for c in group.completions)
    return run.queue.popleft(), num_tokens


def is_continued(outcome: GroupOutcome, history: PromptHistory, step: int, config: Config) -> bool:
    """Tell whether a group has been probed and receives its other completions (stage 1c)."""
    if outcome.completions == config.rollout.group_size:
        return False
    return zero_variance_after(outcome, history, step, config) < config.zero_variance.probe_stop_prob


def generate_round(run: Run, jobs: list[Job]) -> list[GroupOutcome]:
    """Deal jobs to ranks, sample and score; return the outcomes of finished groups by slot. Collective."""
    set_expected_costs(run, jobs)
    deal_jobs(jobs)
    local_jobs = [job for job in jobs if job.group.rank == dist.get_rank()]
    requests, prompts = requests_of(run, local_jobs)
    for extra in active(run.config):
        requests = extra.requests(run, local_jobs, requests)
    completions = iter(generate(run, requests, prompts, "rollout"))
    for group, samples in local_jobs:
        for sample in samples:
            group.add(sample, next(completions))
    finished = [group for group, _ in local_jobs if group.is_finished]
    for extra in active(run.config):
        extra.keep(run, [group for group, _ in local_jobs])
    binary, part = run.config.reward.binary, run.config.zero_variance.part
    outcomes = from_all_ranks([group.outcome(binary, part) for group in finished])
    return sorted(sum(outcomes, []), key=lambda outcome: outcome.slot)


def deal_jobs(jobs: list[Job]) -> None:
    """Set the rank of each new group. A group whose probe is continued stays on its rank.

    Length-aware scheduling (arXiv 2512.07710): ranks receive about the same number of expected tokens and the
    same reward work.
    """
    new_jobs = [job for job in jobs if job.group.rank is None]
    load = [[0.0, 0.0] for _ in range(dist.get_world_size())]  # [tokens, verdict work] of each rank
    for group, samples in jobs:
        if group.rank is not None:
            load[group.rank][0] += len(samples) * (group.expected_tokens or 1.0)
            load[group.rank][1] += len(samples) * group.work_tokens
    tokens = [len(samples) * (group.expected_tokens or 1.0) for group, samples in new_jobs]
    work = [len(samples) * group.work_tokens for group, samples in new_jobs]
    for (group, _), rank in zip(new_jobs, deal_groups(tokens, work, len(load), load)):
        group.rank = rank


# ============================================================================================================
# 2 Filter groups without variance, deal the others to ranks and updates
# ============================================================================================================
def is_trained(outcome: GroupOutcome, settings: ZeroVarianceSettings) -> bool:
    """Tell whether a group takes part in the update."""
    return outcome.has_variance or not settings.drop


def only_variance_teaches(config: Config) -> bool:
    """Tell whether a group with equal scores certainly has zero gradient.

    This is the case if rewards consist of the verifier's score alone and the loss has no further term.
    """
    reward = config.reward
    has_penalties = reward.overlong_buffer > 0 or reward.repetition_coef > 0
    has_plugin = config.algorithm.advantage is not None
    reshapes = config.zero_variance.rl_zvp or any(extra.replaces_advantages for extra in active(config))
    sources = (reshapes, config.algorithm.kl_coef > 0, has_penalties, has_plugin)
    return not any(sources) and reward.judge == "none"


def drop_and_deal(
    groups: list[Group], outcomes: dict[int, GroupOutcome], config: Config
) -> tuple[list[Group], dict[int, GroupOutcome]]:
    """Return the groups that this rank trains on, and the outcomes of all ranks' trained groups. Collective.

    The groups that remain after dropping are cut, in their order, into the minibatches of the step, whose
    sizes differ by at most one group (example: 37 groups into 4 give 10, 9, 9, 9). Each minibatch is dealt
    to the ranks so that they train on about the same number of tokens (train.balance; else the same number of
    completions). Groups expected to have zero gradient are balanced separately, because they only need the
    old-logprob pass. The assignment does not depend on which rank sampled a group, so scheduling cannot
    change the update.
    """
    train = config.train
    world_size = dist.get_world_size()
    trained = {slot: o for slot, o in sorted(outcomes.items()) if is_trained(o, config.zero_variance)}
    if config.zero_variance.round_size == "adaptive":  # GRESO may sample a surplus
        trained = dict(list(trained.items())[: config.rollout.prompts_per_step])
    slots = list(trained)
    minibatch = {slot: i * train.minibatches_per_step // len(slots) for i, slot in enumerate(slots)}
    may_skip = train.skip_zero_gradient and only_variance_teaches(config)
    owner: dict[int, int] = {}
    for number in range(train.minibatches_per_step):
        for is_skipped in (False, True):
            dealt = [
                slot
                for slot in slots
                if minibatch[slot] == number and (may_skip and not trained[slot].has_variance) == is_skipped
            ]
            sizes: list[float] = [
                trained[s].tokens if train.balance else trained[s].completions for s in dealt
            ]
            owner |= zip(dealt, longest_first(sizes, world_size))
    parcels = [[group for group in groups if owner.get(group.slot) == rank] for rank in range(world_size)]
    received = sorted(exchange(parcels), key=lambda group: group.slot)
    return [replace(group, minibatch=minibatch[group.slot]) for group in received], trained


# ============================================================================================================
# 3 Rewards, advantages
# ============================================================================================================
def overlong_penalty(num_tokens: int, max_new_tokens: int, buffer: int) -> float:
    """Return the soft overlong penalty of DAPO (arXiv 2503.14476, eq. 13).

    The penalty falls linearly from 0 to -1 over the last `buffer` tokens before max_new_tokens. Inserted
    tokens of an episode count, because max_new_tokens bounds them as well [ours].
    """
    return -max(0, num_tokens - (max_new_tokens - buffer)) / buffer if buffer else 0.0


def repetition_ratio(token_ids: list[int], ngram: int, sampled: list[bool] | None = None) -> float:
    """Return the fraction of repeated n-grams, 1 - distinct / all; 0 for short completions [ours: shape].

    sampled: marks the tokens of the policy; an n-gram with an inserted token does not count. None: all.
    """
    ngrams = [
        tuple(token_ids[i : i + ngram])
        for i in range(len(token_ids) - ngram + 1)
        if sampled is None or all(sampled[i : i + ngram])
    ]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def compute_rewards(batch: RolloutBatch, judge, texts: list[str], config: Config) -> Tensor:
    """Return the reward of each completion [B]: verifier mixed with the judge, minus penalties (stage 2)."""
    settings = config.reward
    rewards = batch.scores.tolist()
    if judge is not None and rewards:
        weight = settings.judge_weight
        judged = judge_rewards(judge, batch, texts, settings.judge_mode)
        rewards = [(1 - weight) * score + weight * j for score, j in zip(rewards, judged)]
    for i, token_ids in enumerate(batch.completion_ids):
        length = overlong_penalty(len(token_ids), config.rollout.max_new_tokens, settings.overlong_buffer)
        sampled = None if batch.turns is None else batch.response_mask[i, : len(token_ids)].tolist()
        repeats = settings.repetition_coef and repetition_ratio(token_ids, settings.repetition_ngram, sampled)
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
    """Return the group-relative advantage of each completion (DeepSeekMath, section 4.1.2; ESPO, eq. 11).

        group_std   (R_i - mean R) / (std R + eps)   0 if the group's rewards lie within ZERO_VARIANCE
        mean_only    R_i - mean R                    (Dr.GRPO, arXiv 2503.20783)

    rewards [B] float; valid [B] bool, False if there is no verdict (timeout, crash): this completion enters
    no mean and gets 0; group_index [B] int64. Returns [B]. Rewards within tie_band of the mean get 0 [ours].
    std divides by n - 1 and eps is 1e-6 [ours: as in the common implementations]. A group with fewer than two
    valid rewards gets 0, because it has no baseline [ours].

    Example: rewards 1, 0, 0, 1 of one group give 0.866, -0.866, -0.866, 0.866.
    """
    mean = torch.zeros_like(rewards)
    std = torch.ones_like(rewards)
    has_variance = torch.zeros_like(valid)
    for group in group_index.unique():
        members = (group_index == group) & valid
        group_rewards = rewards[members]
        if len(group_rewards) >= 2 and group_rewards.max() - group_rewards.min() > ZERO_VARIANCE:
            has_variance |= members
            mean[members] = group_rewards.mean()
            std[members] = group_rewards.std()
    centred = torch.where(has_variance, rewards - mean, 0.0)  # [B]
    match adv_norm:
        case "group_std":
            normed = centred / (std + eps)
        case "mean_only":
            normed = centred
        case _:
            raise ValueError(f"unknown algorithm.adv_norm {adv_norm!r}")
    return torch.where(centred.abs() > tie_band, normed, 0.0)


def guard_correctness(advantages: Tensor, signs: Tensor) -> Tensor:
    """Remove advantages whose sign contradicts the verifier [ours].

    advantages [B, T]; signs [B], see RolloutBatch.verifier_signs(). Returns [B, T].
    """
    signs = signs.unsqueeze(1)
    return torch.where(advantages.sign() * signs < 0, 0.0, advantages)


def rl_zvp_advantages(entropy: Tensor, mask: Tensor, rewarded: Tensor, coef: float) -> Tensor:
    """Return token advantages of completions of zero-variance groups (RL-ZVP, arXiv 2509.21880, eq. 5).

        R > 0: +alpha H_t        R = 0: -alpha (max_k H_k - H_t)

    entropy [B, T] nats, detached; mask [B, T] bool; rewarded [B] bool, True if the score is above 0. Returns
    [B, T], 0 on padding. In a completion with R = 0 the most uncertain token gets 0 and certain tokens are
    pushed down most. The paper branches on the sign of the reward and has binary rewards only; a group tied
    at one half counts as rewarded as well [ours: the letter of eq. 5]. The paper's H is the current policy's
    in every update, ours is the old policy's [ours: one advantage for all updates of a step]; in the first
    update both are equal.
    """
    highest = entropy.masked_fill(~mask, 0).amax(dim=1, keepdim=True)  # [B, 1], entropies are >= 0
    return torch.where(rewarded.unsqueeze(1), coef * entropy, coef * (entropy - highest)) * mask


def completion_advantages(batch: RolloutBatch, algorithm: AlgorithmSettings) -> Tensor:
    """Return the advantages [B] by algorithm.advantage or else by compute_advantages()."""
    if algorithm.advantage is not None:
        return plugin_advantages(batch, algorithm)
    return compute_advantages(
        batch.rewards, batch.valid, batch.group_index, algorithm.adv_norm, algorithm.tie_band
    )


def token_advantages(batch: RolloutBatch, config: Config) -> Tensor:
    """Return token advantages [B, T] from rewards, after RL-ZVP, the correctness guard and extras.

    Collective if an algorithm.advantage plug-in calls collectives.
    """
    algorithm = config.algorithm
    advantages = completion_advantages(batch, algorithm).unsqueeze(1) * batch.response_mask  # [B, T]
    if config.zero_variance.rl_zvp and batch.entropy is not None:  # None: every group was dropped
        rows = batch.is_tied & batch.valid  # [B]
        advantages[rows] = rl_zvp_advantages(
            batch.entropy[rows], batch.response_mask[rows], batch.scores[rows] > 0,
            config.zero_variance.rl_zvp_coef,
        )  # fmt: skip
    if algorithm.correctness_guard:
        advantages = guard_correctness(advantages, batch.verifier_signs())
    for extra in active(config):
        advantages = extra.advantages(batch, advantages, config)
    return advantages


def select_tokens(advantages: Tensor, batch: RolloutBatch, config: Config, step: int) -> Tensor:
    """Return the advantages [B, T] after leave_out_cut and algorithm.select set some of them to 0.

    leave_out_cut: completions cut at max_new_tokens, and episodes whose next text would exceed it, have no
    policy loss (DAPO, arXiv 2503.14476, section 3.4). Tokens with advantage 0 still count in means and
    weights [ours]. Collective if the plug-in calls collectives.
    """
    algorithm = config.algorithm
    if algorithm.leave_out_cut:
        reasons = batch.finish_reason
        was_cut = torch.tensor([reason in ("length", "context") for reason in reasons], dtype=torch.bool)
        advantages = advantages.masked_fill(was_cut.unsqueeze(1), 0.0)
    return advantages if algorithm.select is None else plugin_selection(advantages, batch, config, step)


# ============================================================================================================
# 4 Ratio, clip, loss
# ============================================================================================================
def entropy_groups(entropy: Tensor, mask: Tensor, fractions: tuple[float, ...]) -> Tensor:
    """Return the entropy group of each token, 0 for the most uncertain (ESPO, arXiv 2512.00499, eq. 7).

    The tokens of a completion are sorted by falling entropy and cut at the cumulative fractions, rounded up
    [paper: 20 % and 80 %; ours: per completion, the rounding, and equal entropies in the order of the text].
    Example: with fractions (0.2, 0.8) the two most uncertain of ten tokens form group 0.

    entropy [B, T] nats, of the old policy; mask [B, T] bool. Returns [B, T] int64, any value on padding.
    """
    order = entropy.masked_fill(~mask, -1.0).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)  # [B, T], 0 for the highest entropy
    lengths = mask.sum(dim=1, keepdim=True)  # [B, 1]
    groups = torch.zeros_like(rank)
    cumulative = 0.0
    for fraction in fractions[:-1]:
        cumulative += fraction
        groups += rank >= (lengths.double() * cumulative - 1e-9).ceil()
    return groups


def token_groups_of(entropy: Tensor, mask: Tensor, algorithm: AlgorithmSettings) -> Tensor:
    """Return the token group of each token, [B, T] int64: tokens of a completion that share a ratio.

    token          every token is a group                     sequence   every completion is a group
    entropy_group  tokens of similar entropy are a group (ESPO)
    """
    match algorithm.ratio_level:
        case "token":
            return torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
        case "sequence":
            return torch.zeros(mask.shape, dtype=torch.int64, device=mask.device)
        case "entropy_group":
            return entropy_groups(entropy, mask, algorithm.entropy_groups)


class TokenGroupSum(torch.autograd.Function):
    """Sum values over token groups, with the gradient summed in float64.

    The gradient of a token is the sum of the gradients of all tokens of its group. Summed one after the other
    in float32, the result is off by 1e-4 on completions of 16,000 tokens.
    """

    @staticmethod
    def forward(values: Tensor, token_groups: Tensor) -> Tensor:
        """Return, for each token, the sum of values [B, T] over its token group, [B, T]."""
        num_slots = max(values.shape[1], MAX_ENTROPY_GROUPS)  # short rows have fewer tokens than groups
        sums = values.new_zeros(len(values), num_slots)
        return sums.scatter_add(1, token_groups, values).gather(1, token_groups)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save the token groups for the backward pass."""
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient with respect to the values: its sum over the token group."""
        (token_groups,) = ctx.saved_tensors
        return TokenGroupSum.forward(gradient.double(), token_groups).to(gradient.dtype), None


def token_group_sum(values: Tensor, token_groups: Tensor, mask: Tensor) -> Tensor:
    """Return, for each token, the sum of values over its token group, [B, T]; padding is left out."""
    return TokenGroupSum.apply(values * mask, token_groups)


def token_group_size(token_groups: Tensor, mask: Tensor) -> Tensor:
    """Return, for each token, the number of tokens in its token group, [B, T] float, at least 1."""
    return token_group_sum(mask.to(torch.get_default_dtype()), token_groups, mask).clamp(min=1)


def num_token_groups(token_groups: Tensor, mask: Tensor) -> Tensor:
    """Return K_i, the number of non-empty token groups of each completion, [B, 1] float, at least 1."""
    per_token = mask / token_group_size(token_groups, mask)  # sums to 1 over a token group
    return per_token.sum(dim=1, keepdim=True).round().clamp(min=1)


def token_group_mean(values: Tensor, token_groups: Tensor, mask: Tensor) -> Tensor:
    """Return, for each token, the mean of values over its token group, [B, T]."""
    sums = token_group_sum(values, token_groups, mask)
    return sums / token_group_size(token_groups, mask).to(values.dtype)


MAX_LOG_RATIO = 80.0  # exp() of larger values overflows in float32, and 0 * inf is NaN


def importance_ratio(log_ratio: Tensor, token_groups: Tensor, mask: Tensor, form: str) -> Tensor:
    """Return the ratio of each token's group, [B, T]: s = exp(mean log r) (ESPO, eq. 10; GSPO, eq. 7).

    geometric      s                    gradient through the mean (GSPO, arXiv 2507.18071)
    stop_gradient  sg[s] r / sg[r]      the value s, each token its own gradient (GSPO-token, eq. 14;
                                        ESPO, eq. 9 in our reading [ours: as printed the value is not s])
    literal        sg[s] r              ESPO, eq. 9 as printed: pi_old in the denominator [paper]

    log_ratio [B, T]: log pi - log pi_old in nats, with gradient; r = exp(log_ratio). token_groups [B, T]:
    int64; mask [B, T]: bool.
    """
    log_s = token_group_mean(log_ratio, token_groups, mask)
    if form == "stop_gradient":
        log_s = log_s.detach() + (log_ratio - log_ratio.detach())
    elif form == "literal":
        log_s = log_s.detach() + log_ratio
    return log_s.clamp(max=MAX_LOG_RATIO).exp()


def entropy_clip_eps(
    entropy: Tensor, token_groups: Tensor, mask: Tensor, log_vocab: float, algorithm: AlgorithmSettings
) -> Tensor:
    """Return the half-width of ESPO's clip interval, [B, T]: wider for tokens of an uncertain old policy.

    Eq. 8 prints eps_t = alpha e_t / (|tau| log|V|), with alpha = entropy_clip_coef, e_t = entropy, tau the
    group of token t and K_i = num_token_groups(). Three readings of it:

    token_group_mean   alpha mean_{t in tau}(e_t) / log|V|   the text: groups with a higher average entropy
                                                             [ours]
    over_token_groups  alpha e_t / (K_i log|V|)              the letter [paper]: |tau| counts the groups,
                                                             as in eq. 5
    over_tokens        alpha e_t / (|tau| log|V|)            |tau| counts the tokens of the group [ours]

    Example: alpha 0.02, a group of 1.2 nats and a vocabulary of 151,936 give eps = 0.0020.
    """
    match algorithm.entropy_clip_form:
        case "token_group_mean":
            scaled_entropy = token_group_mean(entropy, token_groups, mask)
        case "over_token_groups":
            scaled_entropy = entropy / num_token_groups(token_groups, mask)
        case "over_tokens":
            scaled_entropy = entropy / token_group_size(token_groups, mask)
    return algorithm.entropy_clip_coef * scaled_entropy / log_vocab


def loss_weights(
    mask: Tensor,
    token_groups: Tensor,
    num_completions: int,
    num_tokens: int,
    max_new_tokens: int,
    loss_agg: LossAgg,
) -> Tensor:
    """Return the weight of each token in the loss, [B, T], 0 on padding.

        sequence_mean     1 / (N T_i)             over tokens, then completions (DeepSeekMath, eq. 3)
        token_mean        1 / sum_i T_i           over all tokens (DAPO, eq. 8)
        token_group_mean  1 / (N K_i |tau|)       over token groups, then completions (ESPO, eq. 5)
        sequence_sum      1 / N                   over completions only (LUSPO, 2602.05261) [secondary]
        fixed_length      1 / (N max_new_tokens)  independent of the length (Dr.GRPO, 2503.20783)

    mask [B, T] bool; N = num_completions and num_tokens are over all ranks and micro-batches of the update,
    so that the loss does not depend on how an update is split. K_i is the number of non-empty token groups.
    """
    match loss_agg:
        case "sequence_mean":
            return mask / (mask.sum(dim=1, keepdim=True).clamp(min=1) * num_completions)
        case "token_mean":
            return mask / torch.tensor(float(max(1, num_tokens)))
        case "token_group_mean":
            per_token = mask / token_group_size(token_groups, mask)  # sums to 1 over a token group
            return per_token / (num_token_groups(token_groups, mask) * num_completions)
        case "sequence_sum":
            return mask / torch.tensor(float(max(1, num_completions)))
        case "fixed_length":
            return mask / torch.tensor(float(num_completions * max_new_tokens))


def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, algorithm: AlgorithmSettings
) -> Tensor:
    """Return the importance weight of trainer over engine, [B, T].

    The engine differs slightly from the trainer's policy, for example by FP8 weights. With
    r = pi_old / pi_rollout of a token, C = rollout_correction_cap and c = rollout_correction_floor:

    token_tis       max(c, min(r, C))                             (arXiv 2510.11370 and verl: C = 2, c = 0)
    sequence_tis    max(c, min(R, C)), R: the product of r over the completion
    token_mask      r if c <= r <= C, else 0                      (IcePop, arXiv 2510.18855) [secondary]
    sequence_mask   R if c <= R <= C, else 0                      (TRL: sequence_mask)
    geometric_mask  1 if R to the power 1/T_i is in [c, C], else 0     (verl's docs) [secondary]
    """
    cap = algorithm.rollout_correction_cap
    floor = algorithm.rollout_correction_floor
    log_ratio = ((old_logprobs - rollout_logprobs) * mask).clamp(max=MAX_LOG_RATIO)  # [B, T]
    log_product = log_ratio.sum(dim=1, keepdim=True)  # [B, 1]
    product = log_product.clamp(max=MAX_LOG_RATIO).exp().expand(mask.shape)
    match algorithm.rollout_correction:
        case "none":
            return torch.ones_like(log_ratio)
        case "token_tis":
            return log_ratio.exp().clamp(floor, cap)
        case "sequence_tis":
            return product.clamp(floor, cap)
        case "token_mask":
            ratio = log_ratio.exp()
            return torch.where((ratio >= floor) & (ratio <= cap), ratio, 0.0)
        case "sequence_mask":
            return torch.where((product >= floor) & (product <= cap), product, 0.0)
        case "geometric_mask":
            mean = (log_product / mask.sum(dim=1, keepdim=True).clamp(min=1)).exp()  # [B, 1]
            return ((mean >= floor) & (mean <= cap)).to(log_ratio.dtype).expand(mask.shape)


def clip_before_mean(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return the gain of GMPO (arXiv 2507.20673, eq. 4) and the clipped tokens, [B, T].

    Each token's log-ratio is clipped to its pessimistic side, then averaged over the token group: with A > 0
    from above at log(1 + eps_high), with A < 0 from below at log(1 - eps_low).
    """
    settings = inputs.settings
    low = 1 - settings.clip_eps_low
    log_low = math.log(low) if low > 0 else -math.inf
    clamped = inputs.log_ratio.clamp(log_low, math.log(1 + settings.clip_eps_high))
    lower = torch.minimum(inputs.log_ratio, clamped)
    upper = torch.maximum(inputs.log_ratio, clamped)
    group_advantage = token_group_sum(inputs.advantages, inputs.token_groups, inputs.mask)
    # A masked token (advantage 0) is clipped like the unmasked tokens of its group.
    is_good = torch.where(inputs.advantages == 0, group_advantage, inputs.advantages) > 0
    clipped_log_ratio = torch.where(is_good, lower, upper)
    ratio = importance_ratio(clipped_log_ratio, inputs.token_groups, inputs.mask, settings.ratio_form)
    return ratio * inputs.advantages, clipped_log_ratio != inputs.log_ratio


def token_gain(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the gain of each token before its weight, [B, T], and statistics: ratio, clipped, clip_eps.

    fixed             min( min(s, cap) A, clip(s, 1 - eps_low, 1 + eps_high) A )   (PPO; DAPO, two eps)
    entropy_adaptive  the same with eps from entropy_clip_eps()                    (ESPO, eq. 5)
    weight            sg[clip(s, 1 - eps_low, 1 + eps_high)] A log pi              (CISPO, 2506.13585, eq. 4)
    before_mean       s A, each token's ratio clipped before the mean              (GMPO, 2507.20673, eq. 4)
    none              s A

    algorithm.gain replaces all of them by a plug-in, for example experiments/plugins/sapo.py.
    """
    settings = inputs.settings
    advantages = inputs.advantages
    low = 1 - settings.clip_eps_low
    high = 1 + settings.clip_eps_high
    ratio = importance_ratio(inputs.log_ratio, inputs.token_groups, inputs.mask, settings.ratio_form)
    inputs.ratio = ratio
    if settings.gain is not None:
        gain, statistics = call_hook(settings, "gain", inputs)
        return gain, {"ratio": ratio, "clipped": torch.zeros_like(ratio), **statistics}
    statistics = {"ratio": ratio}
    clipped = torch.zeros_like(inputs.mask)
    match settings.clip_mode:
        case "fixed":
            gain, clipped = pessimistic(ratio, advantages, low, high, settings.clip_cap)
        case "entropy_adaptive":
            eps = entropy_clip_eps(
                inputs.entropy, inputs.token_groups, inputs.mask, inputs.log_vocab, settings
            )
            statistics["clip_eps"] = eps
            gain, clipped = pessimistic(ratio, advantages, 1 - eps, 1 + eps, settings.clip_cap)
        case "weight":
            weight = ratio.detach().clamp(low, high)
            clipped = weight != ratio
            gain = weight * advantages * inputs.logprobs
        case "before_mean":
            gain, clipped = clip_before_mean(inputs)
        case "none":
            gain = ratio * advantages
    return gain, statistics | {"clipped": clipped.to(ratio.dtype)}


def policy_loss(inputs: LossInputs, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a micro-batch, its share of -J, and detached per-token statistics [B, T].

        loss = -sum_{i,t} w_{i,t} [ gain(s, A) - beta KL_{i,t} ]
        KL = exp(d) - d - 1,   d = ref_logprobs - logprobs        (k3; DeepSeekMath, eq. 4)

    token_gain() turns the ratio of the policies into a gain; masks and corrections are factors of the
    advantages; weights [B, T] are those of loss_weights(); extras may add terms to the gain. The loss is a
    scalar with gradient.
    """
    settings = inputs.settings
    gain, statistics = token_gain(inputs)
    if inputs.added_gain is not None:
        gain = gain + inputs.added_gain
    if settings.kl_coef > 0:
        assert inputs.ref_logprobs is not None, "algorithm.kl_coef needs the reference model's pass"
        log_ref_ratio = (inputs.ref_logprobs - inputs.logprobs).clamp(max=MAX_LOG_RATIO)
        statistics["ref_kl_k3"] = log_ref_ratio.expm1() - log_ref_ratio  # k3, >= 0
        gain = gain - settings.kl_coef * statistics["ref_kl_k3"]
    loss = -(weights * gain).sum()
    return loss, {name: value.detach() for name, value in statistics.items()}


# ============================================================================================================
# 5 Forward with replayed routes, update
# ============================================================================================================
def routes_to_replay(batch: RolloutBatch, router_replay: Replay) -> list[Tensor] | None:
    """Return the expert ids that the trainer's forward pass uses for each row; None: the live router chooses.

        r2   replay the routes recorded in the old-logprob pass (that pass uses the live router)
        r3   replay the engine's routes, in the old-logprob pass and in every update (arXiv 2510.11370)
             [secondary]

    Only the choice of experts is replayed; their weights come from the live router, so that gradient reaches
    the router. All updates use the routes of the old-logprob pass, because otherwise the first ratio would
    differ from 1 [ours].
    """
    match router_replay:
        case "off":
            return None
        case "r2":
            return batch.old_routes
        case "r3":
            return batch.routed_experts


def routes_of_tokens(routes: list[Tensor], rows: list[int], packed: PackedSequences) -> Tensor:
    """Return the expert ids [T, L, K] of the packed tokens; a shared prompt uses its first row's routes."""
    ids = torch.cat([routes[i] for i in rows]).to(packed.input_ids.device)
    return ids if packed.kept is None else ids[packed.kept]  # kept: without repeated prompts


def routes_differ(used_TLK: Tensor, sampled_TLK: Tensor, num_experts: int) -> Tensor:
    """Mark the tokens whose set of experts differs from the engine's in any layer, [T] bool.

    Tokens whose route could not be captured are counted separately and are not marked.
    """
    differs_T = (used_TLK.sort().values != sampled_TLK.sort().values).flatten(1).any(dim=1)
    return differs_T & (sampled_TLK[:, 0, 0] != invalid_route(num_experts))


def forward_rows(
    policy, batch: RolloutBatch, rows: list[int], config: Config, replay: bool = True, with_topk: bool = True
) -> PolicyOutputs:
    """Compute log-probabilities, entropies and routes of the completions of `rows`. Collective.

    with_topk: also compute the log-probabilities of the engine's most likely tokens, if it returned them.
    A rank without rows sends one dummy sequence through the model, because the other ranks wait for it in the
    model's collectives; its result [1, T] is multiplied by 0. replay: False for other models than the
    policy, which use their own router; their routes are not compared with the engine's.
    """
    device = next(policy.parameters()).device
    routes = routes_to_replay(batch, config.algorithm.router_replay) if replay and rows else None
    if rows:
        prompt_ids = [batch.prompt_ids[i] for i in rows]
        completion_ids = [batch.completion_ids[i] for i in rows]
        packed = pack(prompt_ids, completion_ids, device, config.train.share_prompts)
        is_sampled = batch.sampled_targets(rows)  # [tokens of completions]
        if is_sampled is not None:
            packed = select_targets(packed, is_sampled)
        mask = batch.response_mask[rows].to(device)  # [b, T]
    else:
        packed = pack([[0]], [[0]], device)
        mask = torch.zeros(1, batch.response_mask.shape[1], dtype=torch.bool, device=device)
        mask[0, 0] = True
    replay_ids_TLK = None if routes is None else routes_of_tokens(routes, rows, packed)
    topk_ids_Nk = None
    if rows and with_topk and batch.topk_ids is not None:
        topk_ids_Nk = torch.cat([batch.topk_ids[i] for i in rows]).to(device)
    logprobs_N, entropy_N, layer_ids, topk_Nk = policy(
        packed, temperature=config.rollout.temperature, replay_ids_TLK=replay_ids_TLK, topk_ids_Nk=topk_ids_Nk
    )  # N sampled tokens
    topk = None if topk_Nk is None else list(topk_Nk.split([len(batch.completion_ids[i]) for i in rows]))
    scale = 1.0 if rows else 0.0
    zeros = logprobs_N.new_zeros(mask.shape)
    logprobs = zeros.masked_scatter(mask, logprobs_N * scale)  # [b, T]
    entropy = zeros.masked_scatter(mask, entropy_N.detach() * scale)  # [b, T]
    num_experts = num_experts_of(getattr(policy, "module", policy).config)
    used_TLK = route_table(layer_ids, num_experts)
    if used_TLK is None or not rows:
        return PolicyOutputs(logprobs, entropy, None, None, topk)
    mismatch = None
    if batch.routed_experts is not None and replay:
        sampled_TLK = routes_of_tokens(batch.routed_experts, rows, packed)
        differs_N = routes_differ(used_TLK, sampled_TLK, num_experts)[packed.predictor_index]
        mismatch = zeros.detach().masked_scatter(mask, differs_N.to(zeros.dtype))
    lengths = [len(batch.prompt_ids[i]) + len(batch.completion_ids[i]) - 1 for i in rows]
    # spread: from shared prompts back to one row for each token of each sequence
    used_TLK = used_TLK if packed.spread is None else used_TLK[packed.spread]
    return PolicyOutputs(logprobs, entropy, list(used_TLK.split(lengths)), mismatch, topk)


@torch.no_grad()
def forward_batch(
    policy,
    batch: RolloutBatch,
    config: Config,
    replay: bool = True,
    keep_routes: bool = False,
    keep_topk: bool = False,
    rows: list[int] | None = None,
) -> PolicyOutputs:
    """Call forward_rows() on some rows without gradient and return its outputs on the CPU. Collective.

    keep_routes, keep_topk: return the routes of each row, or the log-probabilities of batch.topk_ids.
    rows: the rows to compute, None: all; the outputs of the other rows are 0.
    """
    logprobs, entropy, mismatch = (torch.zeros(batch.response_mask.shape) for _ in range(3))
    routes: list = [None] * len(batch.prompts)
    topk: list = [None] * len(batch.prompts)
    rows = list(range(len(routes))) if rows is None else rows
    for micro_batch in micro_batches_of(batch, rows, config):
        outputs = forward_rows(policy, batch, micro_batch, config, replay, with_topk=keep_topk)
        if micro_batch:
            logprobs[micro_batch] = outputs.logprobs.float().cpu()
            entropy[micro_batch] = outputs.entropy.float().cpu()
        if keep_routes and outputs.routes:
            for row, ids in zip(micro_batch, outputs.routes):
                routes[row] = ids.cpu()
        for row, values in zip(micro_batch, outputs.topk_logprobs or []):
            topk[row] = values.cpu()
        if outputs.route_mismatch is not None:
            mismatch[micro_batch] = outputs.route_mismatch.float().cpu()
    return PolicyOutputs(
        logprobs,
        entropy,
        None if any(ids is None for ids in routes) else routes,
        None if batch.routed_experts is None else mismatch,
        None if any(values is None for values in topk) else topk,
    )


def needs_old_pass(config: Config) -> bool:
    """Tell whether the update needs old log-probabilities or entropies before its own forward pass."""
    is_off_policy = config.train.num_updates > 1 and config.algorithm.old_policy == "trainer"
    has_token_advantages = config.zero_variance.rl_zvp or any(e.replaces_advantages for e in active(config))
    return has_token_advantages or is_off_policy or config.algorithm.select is not None


def old_logprobs_of(
    logprobs: Tensor, recorded: Tensor | None, rollout: Tensor, has_moved: bool, old_policy: OldPolicy
) -> Tensor:
    """Return the log-probabilities of the ratio's denominator, without gradient, in any common shape.

        trainer  the trainer's policy before the step's first update, in which the ratio is exactly 1: a
                 second pass rounds differently, in bfloat16 by more than the clips of GSPO and ESPO allow
        rollout  the engine's (bypass), without an old-logprob pass: the ratio also corrects the mismatch

    logprobs: of the current policy; recorded: of the old-logprob pass, None without one; rollout: of the
    engine. has_moved: False in the first update of a step, whose policy has sampled the completions.
    """
    if old_policy == "trainer":
        return logprobs.detach() if recorded is None or not has_moved else recorded
    return rollout


def micro_batch_loss(
    outputs: PolicyOutputs,
    batch: RolloutBatch,
    rows: list[int],
    counts: Tensor,
    log_vocab: float,
    config: Config,
    has_moved: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return policy_loss() of some rows and its per-token statistics [b, T].

    counts: completions and tokens of the update over all ranks. has_moved: see old_logprobs_of().
    """
    algorithm = config.algorithm
    inputs, correction = loss_inputs(outputs, batch, rows, log_vocab, has_moved, algorithm)
    micro_batch = MicroBatch(inputs, outputs, batch, rows, has_moved, old_logprobs_of, correction_weights)
    inputs.added_gain = added_gain(config, micro_batch)
    num_completions, num_tokens = counts.tolist()
    weights = loss_weights(
        inputs.mask, inputs.token_groups, num_completions, num_tokens, config.rollout.max_new_tokens,
        algorithm.loss_agg,
    )  # fmt: skip
    loss, statistics = policy_loss(inputs, weights)
    if "mask" in algorithm.rollout_correction:
        masked = (correction == 0).to(inputs.logprobs.dtype)
        statistics["masked"] = torch.maximum(masked, statistics.get("masked", masked))
    statistics["entropy"] = inputs.entropy
    statistics["entropy_group"] = entropy_groups(inputs.entropy, inputs.mask, algorithm.entropy_groups)
    recorded = batch.old_logprobs
    if recorded is None and has_moved:
        return loss, statistics  # the old policy's distance to the engine is unknown
    trainer = outputs.logprobs.detach() if recorded is None else recorded[rows].to(inputs.mask.device)
    return loss, statistics | mismatch_statistics(trainer, inputs.rollout_logprobs)


def loss_inputs(
    outputs: PolicyOutputs,
    batch: RolloutBatch,
    rows: list[int],
    log_vocab: float,
    has_moved: bool,
    algorithm: AlgorithmSettings,
) -> tuple[LossInputs, Tensor]:
    """Return the inputs of the loss of some rows, and the correction that is a factor of the advantages."""

    def take(values: Tensor) -> Tensor:
        return values[rows].to(outputs.logprobs.device)  # [b, T]

    mask = take(batch.response_mask)
    rollout = take(batch.rollout_logprobs)
    recorded = None if batch.old_logprobs is None else take(batch.old_logprobs)
    old = old_logprobs_of(outputs.logprobs, recorded, rollout, has_moved, algorithm.old_policy)
    entropy = outputs.entropy.detach() if batch.entropy is None else take(batch.entropy)
    correction = correction_weights(old, rollout, mask, algorithm)
    inputs = LossInputs(
        logprobs=outputs.logprobs,
        old_logprobs=old,
        rollout_logprobs=rollout,
        ref_logprobs=None if batch.ref_logprobs is None else take(batch.ref_logprobs),
        advantages=take(batch.advantages) * correction,
        entropy=entropy,
        token_groups=token_groups_of(entropy, mask, algorithm),
        mask=mask,
        log_vocab=log_vocab,
        settings=algorithm,
    )
    return inputs, correction


def rows_with_gradient(batch: RolloutBatch, config: Config) -> Tensor:
    """Mark the rows that updates compute, [B] bool: an advantage differs from 0, or there is a KL term."""
    if not config.train.skip_zero_gradient or config.algorithm.kl_coef > 0:
        return torch.ones(len(batch.prompts), dtype=torch.bool)
    return (batch.advantages != 0).any(dim=1)


def loss_of_rows(
    policy, batch: RolloutBatch, rows: list[int], counts: Tensor, config: Config, work: UpdateWork
) -> Tensor:
    """Return the loss of some rows and add their statistics to `work`. Collective.

    counts: completions and tokens of the update over all ranks. Without rows the loss is a zero that takes
    part in the model's collectives.
    """
    outputs = forward_rows(policy, batch, rows, config)
    logprobs = outputs.logprobs  # [b, T]
    if not rows:
        return logprobs.sum()
    log_vocab = math.log(getattr(policy, "module", policy).lm_head.weight.shape[0])
    has_moved = work.num_updates > 0
    loss, statistics = micro_batch_loss(outputs, batch, rows, counts, log_vocab, config, has_moved)
    if batch.route_mismatch is not None:
        statistics["mismatch_routes"] = batch.route_mismatch[rows].to(logprobs.device)
    elif outputs.route_mismatch is not None and not (batch.old_logprobs is None and has_moved):
        statistics["mismatch_routes"] = outputs.route_mismatch
    finite = None
    if not loss.isfinite():
        finite = logprobs.cpu().isfinite() & batch.advantages[rows].isfinite()
    work.add_statistics(rows, statistics, finite)
    return loss


def update_policy(
    trainer, batch: RolloutBatch, config: Config, step: int = 0
) -> dict[str, tuple[float, float]]:
    """Take the optimizer steps of one training step; return metrics as (sum, count). Collective.

    trainer: DeepSpeed's engine. There are minibatches_per_step x passes_per_rollout updates, fewer if the
    step has fewer groups than minibatches. Rows without gradient are skipped (train.skip_zero_gradient), and
    metrics of the update do not cover them. An update without any row on all ranks still takes its optimizer
    step, because AdamW's momentum moves the weights. An update whose gradient is not finite leaves the
    weights unchanged (DeepSpeed skips it on all ranks).
    """
    train = config.train
    work = UpdateWork()
    lengths = sequence_lengths(batch)
    has_gradient = rows_with_gradient(batch, config)  # [B]
    moe_model.take_expert_loads(trainer.module)  # discards the loads of earlier passes
    for number in [*range(train.minibatches_per_step)] * train.passes_per_rollout:
        in_update = batch.minibatch == number  # [B], whole groups
        rows = (in_update & has_gradient).nonzero().flatten().tolist()
        sums = [int(in_update.sum()), int(batch.response_mask[in_update].sum()), len(rows)]
        counts = torch.tensor(sums, device=trainer.device)  # completions, tokens, rows with gradient
        dist.all_reduce(counts)  # before the first backward pass: the loss must not depend on the split
        if counts[0] == 0:  # all groups of this update were dropped, on all ranks
            continue
        work.num_empty += int(counts[2] == 0)
        for micro_batch in micro_batches_of(batch, rows, config) or [[]]:
            loss = loss_of_rows(trainer, batch, micro_batch, counts[:2], config, work)
            trainer.backward(loss * dist.get_world_size(), scale_wrt_gas=False)  # DeepSpeed takes the mean
            work.add_loads(moe_model.take_expert_loads(trainer.module), len(micro_batch))
            work.add_tokens([lengths[row] for row in micro_batch])
        with threads_of_step(train):
            trainer.step()
        if trainer.optimizer.overflow:
            moe_model.forget_gradients(trainer)
            handle_nonfinite("loss", batch, work.suspects, config, step)
        work.end_update(trainer)
    metrics = work.metrics(batch, config)
    if train.skip_zero_gradient and batch.entropy is not None:  # updates have left out rows without gradient
        fractions = config.algorithm.entropy_groups
        groups = entropy_groups(batch.entropy, batch.response_mask, fractions)
        metrics |= old_pass_metrics(batch, groups, len(fractions))
    return metrics


# ============================================================================================================
# 6 The main loop
# ============================================================================================================
def main(config: Config) -> None:
    """Train: one phase of a step after another, in the order of the data."""
    run = set_up(config)
    if run is None:
        return
    state = run.state
    parity_is_due = sync_engine(run, is_first=True).is_checked
    while not state.is_last(config):
        evaluate_if_due(run)
        config = next_stage_if_due(run)  # settings of the current stage
        run.clock.take_step()  # evaluations and checkpoints are not part of a step's seconds
        step_start = time.perf_counter()

        # Rollout: choose prompts, generate, score each completion as it ends; probe and refill in rounds
        rollout, num_tokens = next_rollout(run)
        rollout_seconds = time.perf_counter() - step_start
        run.engine.sleep()
        metrics = measure_rollout(run, rollout, rollout_seconds) | {"tokens_total": (num_tokens, 1)}

        # Eliminate zero variance, deal the other groups to ranks and minibatches
        with run.clock("deal"):
            groups, trained = drop_and_deal(rollout.groups, rollout.outcomes, config)
        batch = batch_of(run, groups)

        # Old and reference log-probabilities, if the update needs them
        if trained:
            with run.clock("logprobs"):
                newest = collated(run, run.queue[-1].groups) if run.queue and parity_is_due else None
                add_old_outputs(run, batch, parity_is_due, newest)
            parity_is_due = False

        # Rewards: verifier, judge, penalties; advantages
        with run.clock("judge"):
            metrics |= add_rewards(run, batch)
        for extra in active(config):
            extra.after_rewards(run, batch, forward_batch)
        batch.advantages = select_tokens(token_advantages(batch, config), batch, config, state.step)

        # Update
        with run.clock("update"):
            set_learning_rate(run.trainer, learning_rate(config.train, state.step))
            metrics |= update_policy(run.trainer, batch, config, state.step)
            refuse_broken_policy(run)
            return_freed_memory()
        state.step += 1

        # Weight sync
        report = sync_engine(run)
        parity_is_due |= report.is_checked

        # Log, checkpoint
        metrics |= batch_metrics(batch, groups, config, state.step - 1) | metrics_of(config, batch)
        reduced = reduce_step_metrics(metrics, prompt_account(rollout.account, rollout.outcomes, trained))
        num_dlogp_tokens = int(reduced.pop("measured_tokens_total", 0))  # weight of this step's abs_dlogp
        state.add_step(reduced, run.rule, num_dlogp_tokens, charged_tokens(config, reduced))
        log_step(run, batch, rollout.groups, reduced, report, step_start)
        save_if_due(run, stop_reason(run, reduced))
        del rollout, groups, batch  # or their routes would stay in memory during the next rollout
    evaluate_if_due(run)
    finish(run)


def batch_of(run: Run, groups: list[Group]) -> RolloutBatch:
    """Return the batch of the groups that this rank trains on."""
    batch = collated(run, groups)
    for extra in active(run.config):
        extra.after_rollout(run, batch, groups)
    return batch


def collated(run: Run, groups: list[Group]) -> RolloutBatch:
    """Return the batch of some groups of this rank."""
    config = run.config
    batch = collate(groups, run.prompts, run.prompt_ids, config.reward.binary)
    if config.train.share_prompts and config.algorithm.router_replay == "r3" and batch.routed_experts:
        batch.share_prompt_routes(batch.routed_experts)
    return batch


def sync_engine(run: Run, is_first: bool = False) -> SyncReport:
    """Send the policy's weights to the engine. Collective.

    In the first sync of a launch, then every rollout.check_every steps, the engine's weights are compared
    with the policy's, and main() has the next old-logprob pass compare log-probabilities, too.
    """
    own_experts = syncs_own_experts(run.config)
    every = run.config.rollout.check_every
    check = is_first or every > 0 and run.state.step % every == 0
    with run.clock("sync"):
        named = moe_model.hf_tensors(run.policy, own_experts)
        again = moe_model.hf_tensors(run.policy, own_experts) if check else None
        return run.engine.sync(named, run.state.step, again)


def evaluate_if_due(run: Run) -> None:
    """Evaluate the policy on the held-out sets if an evaluation is due. Collective."""
    if run.eval_sets and evaluation_is_due(run.state, run.config):
        requests, prompts = evaluation_requests(run.eval_sets, run.config)
        log_evaluation(run, generate(run, requests, prompts, "eval"))


def update_history(run: Run, outcomes: list[GroupOutcome]) -> None:
    """Record a step's outcomes in the prompts' records."""
    zero = run.config.zero_variance
    run.history.update(outcomes, rollout_number(run), zero.history_decay)
    num_offered = run.state.consumed_prompts - run.state.stage.first_prompt
    greso.update(run.history, outcomes, zero, is_first_epoch=num_offered <= run.offers.epoch_length)


def add_old_outputs(
    run: Run, batch: RolloutBatch, parity_is_due: bool, newest: RolloutBatch | None = None
) -> None:
    """Add the outputs of the policy and of the reference model before the updates, if needed. Collective.

    If only a parity check needs the pass, its outputs are discarded, because a check must not change an
    update. newest: completions of the present policy, to check in place of those of `batch` (rollout.lag).
    """
    config = run.config
    algorithm = config.algorithm
    is_needed = needs_old_pass(config)
    if newest is not None:
        check_parity(forward_batch(run.policy, newest, config).logprobs, newest, config, run.state.step)
        parity_is_due = False
    if is_needed or parity_is_due:
        keep_topk = batch.topk_ids is not None and is_needed
        keep_routes = algorithm.router_replay == "r2"
        outputs = forward_batch(run.policy, batch, config, keep_routes=keep_routes, keep_topk=keep_topk)
        if parity_is_due:
            check_parity(outputs.logprobs, batch, config, run.state.step)
        if is_needed:
            batch.old_logprobs = outputs.logprobs
            batch.entropy = outputs.entropy
            batch.old_routes = outputs.routes
            if config.train.share_prompts and batch.old_routes:
                batch.share_prompt_routes(batch.old_routes)
            batch.route_mismatch = outputs.route_mismatch
            for extra in active(config):
                extra.after_old_pass(batch, outputs)
    if run.reference is not None and algorithm.kl_coef > 0:  # the reference uses its own router
        batch.ref_logprobs = forward_batch(run.reference, batch, config, replay=False).logprobs


def add_rewards(run: Run, batch: RolloutBatch) -> dict[str, tuple[float, float]]:
    """Add the rewards [B] and their validity, [B] bool; return metrics of the judge. Collective."""
    ids = batch.answer_ids if run.judge else []
    # batch_decode([]) would return one empty text
    texts = run.tokenizer.batch_decode(ids, skip_special_tokens=True) if ids else []
    opened = [opened_thought(prompt.text.removesuffix(prompt.prefix)) for prompt in batch.prompts]
    texts = [prompt.prefix + text for prompt, text in zip(batch.prompts, texts)]
    texts = [final_answer(text, opening) or "" for text, opening in zip(texts, opened)]
    rewards = compute_rewards(batch, run.judge, texts, run.config)
    batch.rewards, batch.valid = refuse_nonfinite_rewards(
        rewards, batch.valid, batch, run.config, run.state.step
    )
    return judge_metrics(run.judge)


def read_arguments(argv: list[str]) -> Config:
    """Read the command line of a run."""
    return load_config(argv, __doc__)


if __name__ == "__main__":
    launch.leave(launch.run(main, read_arguments, sys.argv[1:], lambda config: Path(config.run.dir)))
