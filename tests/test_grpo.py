"""GRPO against the equations of reference.py, the update against plain torch, and the order of prompts."""

import itertools
import math
import random

import pytest
import reference
import torch
from conftest import assert_close, save_small_moe
from helpers import (
    CLIP_EPS,
    EVERYTHING,
    GROUPS,
    HALVES,
    INTERLEAVED,
    LEARNING_RATE,
    SHARES,
    SHUFFLED,
    SMOOTH_EPS,
    TEMPERATURE,
    WORK,
    FakeRanks,
    RankSuite,
    make_batch,
    make_config,
    make_prompts,
    make_ragged_completions,
    parameter_distance,
    share_prompt_routes,
    update_case,
)
from transformers import Qwen3MoeForCausalLM

import train_rl
from data.stream import prompts_of_step, seed_of
from reward import Verdict
from rollout import Completion
from train_rl import AlgorithmSettings

# ---- advantages --------------------------------------------------------------------------------------------


def advantages_of(rewards, valid=None, group_index=None):
    """Call compute_advantages() on lists, by default one group, all valid; it must leave its inputs alone."""
    rewards = torch.as_tensor(rewards)
    valid = torch.tensor(valid or [True] * len(rewards))
    group_index = torch.tensor(group_index or [0] * len(rewards))
    given = (rewards, valid, group_index)
    kept = [tensor.clone() for tensor in given]
    advantages = train_rl.compute_advantages(*given)
    for tensor, copy in zip(given, kept):
        assert tensor._version == 0 and torch.equal(tensor.nan_to_num(), copy.nan_to_num())
    assert advantages.shape == rewards.shape and advantages.dtype == rewards.dtype
    return advantages


@pytest.mark.parametrize("seed", range(30))
def test_advantages_of_random_groups_in_any_order(seed, float64):
    rng = random.Random(seed)
    groups = [
        [(rng.choice([0.0, 1.0, rng.uniform(-1, 1)]), rng.random() < 0.8) for _ in range(rng.randint(1, 9))]
        for _ in range(rng.randint(1, 5))
    ]
    expected = [reference.group_advantages(*zip(*group)) for group in groups]
    rows = [(g, i) for g, group in enumerate(groups) for i in range(len(group))]
    rng.shuffle(rows)  # members of a group need not be neighbours
    actual = advantages_of(
        [groups[g][i][0] for g, i in rows], [groups[g][i][1] for g, i in rows], [g for g, _ in rows]
    )
    assert_close(actual, [expected[g][i] for g, i in rows])


def test_advantages_worked_out_by_hand(float64):
    std = math.sqrt(0.75 / 3)  # of 1, 0, 0, 0 with n - 1
    assert_close(advantages_of([1.0, 0.0, 0.0, 0.0]), [0.75 / (std + 1e-6)] + [-0.25 / (std + 1e-6)] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.3, 1 / 3, 0.7])
def test_equal_rewards_give_exactly_zero(reward, dtype):
    """A mean that is off by one rounding must not become an advantage: 6e-8 / eps is 0.06."""
    for size in range(2, 17):
        assert not advantages_of(torch.full((size,), reward, dtype=dtype)).any()


def test_groups_without_a_baseline_give_zero(float64):
    assert advantages_of([1.0]).tolist() == [0.0]
    assert advantages_of([1.0, 0.0, 0.0], [True, False, False]).tolist() == [0.0, 0.0, 0.0]
    assert advantages_of([1.0, 0.0], [False, False]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("failed_reward", [0.0, 1e9, float("nan")])
def test_a_failed_verdict_enters_no_mean(failed_reward, float64):
    without = advantages_of([1.0, 0.0, 0.5])
    actual = advantages_of([1.0, failed_reward, 0.0, 0.5], [True, False, True, True])
    assert_close(actual[[0, 2, 3]], without)
    assert actual[1] == 0 and without.abs().min() == 0 < without.abs().max()


# ---- loss --------------------------------------------------------------------------------------------------


def random_case(seed: int, num_rows: int, spread: float) -> dict:
    """Make ragged logprobs of num_rows completions; spread is the size of log ratios in nats."""
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 1, 2, 5, 8]) for _ in range(num_rows)]
    lengths[0] = max(1, lengths[0])
    old = [[-rng.expovariate(1.0) for _ in range(n)] for n in lengths]
    return {
        "logprobs": [[x + rng.uniform(-spread, spread) for x in row] for row in old],
        "old_logprobs": old,
        "ref_logprobs": [[x + rng.uniform(-spread, spread) for x in row] for row in old],
        "advantages": [[rng.choice([0.0, rng.gauss(0, 1)])] * n for n in lengths],
    }


def grpo(clip_eps=CLIP_EPS, kl_coef=0.0) -> AlgorithmSettings:
    return AlgorithmSettings(clip_eps_low=clip_eps, clip_eps_high=clip_eps, kl_coef=kl_coef)


def grpo_loss(logprobs, old_logprobs, advantages, weights, mask, algorithm, ref_logprobs=None):
    """Call policy_loss() without what GRPO does not look at: there are no entropies."""
    token_groups = train_rl.token_groups_of(None, mask, algorithm)
    return train_rl.policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        weights,
        token_groups,
        None,
        mask,
        math.nan,
        algorithm,
        ref_logprobs,
    )


def grpo_weights(mask, num_completions):
    """Call loss_weights() without what the mean over completions does not look at."""
    return train_rl.loss_weights(mask, None, num_completions, 0, 0, "sequence_mean")


def run_policy_loss(case: dict, clip_eps=CLIP_EPS, kl_coef=0.0, padding=0):
    """Return loss, gradient, statistics and mask of policy_loss(); it must leave its inputs alone."""
    lengths = torch.tensor([len(row) for row in case["logprobs"]])
    width = int(lengths.max()) + padding
    tensors = {
        name: torch.tensor([row + [0.0] * (width - len(row)) for row in rows]) for name, rows in case.items()
    }
    mask = torch.arange(width) < lengths.unsqueeze(1)
    weights = grpo_weights(mask, len(lengths))
    logprobs = tensors.pop("logprobs").requires_grad_()
    given = {**tensors, "weights": weights, "mask": mask, "logprobs": logprobs}
    kept = {name: tensor.detach().clone() for name, tensor in given.items()}
    loss, statistics = grpo_loss(
        logprobs, tensors["old_logprobs"], tensors["advantages"], weights, mask, grpo(clip_eps, kl_coef),
        tensors["ref_logprobs"] if kl_coef else None,
    )  # fmt: skip
    loss.backward()
    for name, tensor in given.items():
        assert tensor._version == 0 and torch.equal(tensor.detach(), kept[name]), f"{name} was written to"
    assert loss.shape == () and not any(value.requires_grad for value in statistics.values())
    return loss.detach(), logprobs.grad, statistics, mask


def assert_matches_reference(case: dict, clip_eps=CLIP_EPS, kl_coef=0.0, padding=0):
    loss, gradient, statistics, mask = run_policy_loss(case, clip_eps, kl_coef, padding)
    settings = {"clip_eps": clip_eps, "kl_coef": kl_coef}
    assert_close(loss, -reference.grpo_objective(**case, **settings))
    assert_close(
        gradient[mask], [-x for row in reference.grpo_objective_slope(**case, **settings) for x in row]
    )
    assert (gradient[~mask] == 0).all()
    tokens = [
        values
        for rows in zip(case["logprobs"], case["old_logprobs"], case["advantages"], case["ref_logprobs"])
        for values in zip(*rows)
    ]
    ratios = [reference.importance_ratio(new, old) for new, old, _, _ in tokens]
    assert_close(statistics["ratio"][mask], ratios)
    advantages = [advantage for _, _, advantage, _ in tokens]
    clipped = [float(reference.is_clipped(r, a, clip_eps, clip_eps)) for r, a in zip(ratios, advantages)]
    assert statistics["clipped"][mask].tolist() == clipped
    assert ("ref_kl_k3" in statistics) == (kl_coef > 0)
    if kl_coef:
        assert_close(statistics["ref_kl_k3"][mask], [reference.kl_k3(new, ref) for new, _, _, ref in tokens])
    return clipped


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("spread", [0.01, 0.5, 30.0])
def test_loss_of_random_batches(spread, kl_coef, float64):
    clipped = []
    for seed in range(40):
        case = random_case(seed, num_rows=1 + seed % 6, spread=spread)
        clipped += assert_matches_reference(case, 0.1 + 0.01 * seed, kl_coef, padding=seed % 3)
    assert (0 < sum(clipped) < len(clipped)) == (spread > 0.1)


@pytest.mark.parametrize("advantage", [1.5, -1.5, 0.0])
def test_a_ratio_beyond_float32_gives_no_nan(advantage):
    logprobs = torch.tensor([[0.0]], requires_grad=True)
    ones = torch.ones(1, 1)
    loss, _ = grpo_loss(
        logprobs, torch.tensor([[-200.0]]), torch.tensor([[advantage]]), ones, ones > 0, grpo()
    )
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logprobs.grad).all()
    assert (logprobs.grad == 0).all(), "clipped for A > 0, cut off for A < 0, nothing for A = 0"


@pytest.mark.parametrize("advantage", [1.5, -1.5, 0.0])
@pytest.mark.parametrize("difference", [0.0, 1e-9, 0.1, 0.3, -0.3, 40.0, -40.0, 79.0, -500.0])
def test_loss_of_one_token(difference, advantage, float64):
    case = {"logprobs": [[-1.0 + difference]], "old_logprobs": [[-1.0]], "advantages": [[advantage]]}
    case["ref_logprobs"] = [[-1.2]]
    assert_matches_reference(case)
    assert_matches_reference(case, kl_coef=0.1 if abs(difference) < 100 else 0.0)


def exactly_representable_ratio(near: float) -> tuple[float, float]:
    """Find a log ratio whose exponential is the same float in torch and in math; return it and that float."""
    candidate = math.log(near)
    for _ in range(1000):
        if torch.tensor([[candidate]]).exp().item() == math.exp(candidate):
            return candidate, math.exp(candidate)
        candidate = math.nextafter(candidate, 1.0)
    raise AssertionError("no such float")


@pytest.mark.parametrize("advantage", [1.0, -1.0, 2.0, -0.5])
@pytest.mark.parametrize("near", [1.2, 0.8])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_ratio_on_the_clip_edge_and_one_ulp_beside_it(near, beyond, advantage, float64):
    """On the edge both branches are equal and the gradient is the unclipped one. Only the edge is moved."""
    log_ratio, ratio = exactly_representable_ratio(near)
    edge = ratio
    if beyond:  # 1: the ratio is one ulp outside of [1 - eps, 1 + eps]; -1: one ulp inside
        edge = math.nextafter(ratio, ratio + beyond * (1.0 - ratio))
    clip_eps = abs(edge - 1.0)
    assert edge in (1.0 - clip_eps, 1.0 + clip_eps)
    case = {"logprobs": [[log_ratio]], "old_logprobs": [[0.0]], "ref_logprobs": [[0.0]]}
    case["advantages"] = [[advantage]]
    clipped = assert_matches_reference(case, clip_eps)
    assert clipped == [float(beyond == 1 and (advantage > 0) == (near > 1))]


def test_a_completion_without_tokens_counts_as_one_of_the_mean(float64):
    case = random_case(1, num_rows=4, spread=0.5)
    for rows in case.values():
        rows[2] = []
    assert_matches_reference(case, kl_coef=0.1)
    alone = {name: rows[:2] + rows[3:] for name, rows in case.items()}
    assert_close(run_policy_loss(case)[0] * 4, run_policy_loss(alone)[0] * 3)


def test_a_batch_without_any_token_has_loss_zero(float64):
    empty = {name: [[], []] for name in ("logprobs", "old_logprobs", "advantages", "ref_logprobs")}
    loss, gradient, _, _ = run_policy_loss(empty, kl_coef=0.1, padding=3)
    assert loss == 0 and (gradient == 0).all()


def test_loss_weights(float64):
    lengths = [3, 0, 1, 5]
    mask = torch.arange(7) < torch.tensor(lengths).unsqueeze(1)
    weights = grpo_weights(mask, 6)
    for row, length in enumerate(lengths):
        expected = [reference.sequence_mean_weight(length, 6) for _ in range(length)]
        assert_close(weights[row, :length], expected)
        assert (weights[row, length:] == 0).all()
    assert_close(grpo_weights(mask, 3).sum(), 1.0)  # three completions have tokens


def test_the_kl_estimate_of_close_policies_is_exact_and_never_negative():
    """In float32, exp(d) - d - 1 is nothing but rounding at d = 1e-4 nats."""
    differences = [sign * 10.0**-k for k in range(1, 7) for sign in (1, -1)]
    logprobs, ref_logprobs = torch.zeros(1, 12), torch.tensor([differences])
    ones = torch.ones(1, 12)
    _, statistics = grpo_loss(logprobs, logprobs, ones, ones, ones > 0, grpo(kl_coef=0.1), ref_logprobs)
    kl_k3 = statistics["ref_kl_k3"][0]
    assert (kl_k3 >= 0).all()
    assert_close(
        kl_k3[:8], torch.tensor([reference.kl_k3(0.0, d) for d in differences[:8]]), rtol=1e-2, atol=0.0
    )


def test_slopes_of_the_reference_are_derivatives_of_its_values():
    case = random_case(3, num_rows=5, spread=0.5)
    fixed = (case["old_logprobs"], case["advantages"], case["ref_logprobs"], CLIP_EPS, 0.3)
    slopes = reference.grpo_objective_slope(case["logprobs"], *fixed)
    step = 1e-6
    for i, row in enumerate(case["logprobs"]):
        for t in range(len(row)):
            above, below = ([list(r) for r in case["logprobs"]] for _ in range(2))
            above[i][t] += step
            below[i][t] -= step
            difference = reference.grpo_objective(above, *fixed) - reference.grpo_objective(below, *fixed)
            assert difference / (2 * step) == pytest.approx(slopes[i][t], rel=1e-6, abs=1e-9)


# ---- bypass ------------------------------------------------------------------------------------------------
LOG_VOCAB = math.log(50)


def case_of_two_policies(seed: int, lengths: list[int] | None = None) -> dict:
    """Make ragged lists of some completions: trainer, old trainer and engine are 0.3 nats apart and more.

    Some entropies are equal, some are 0.
    """
    rng = random.Random(seed)
    lengths = lengths or [rng.choice([0, 1, 1, 2, 5, 8]) for _ in range(rng.randint(1, 5))]
    signs = [rng.choice([1, 1, -1, -1, 0]) for _ in lengths]
    near = lambda rows, size: [[x + rng.uniform(-size, size) for x in row] for row in rows]
    old = [[-rng.expovariate(1.0) for _ in range(n)] for n in lengths]
    return {
        "logprobs": near(old, 0.4),
        "old_logprobs": old,
        "rollout_logprobs": near(old, 0.3),
        "ref_logprobs": near(old, 1.0),
        "advantages": [[sign * rng.expovariate(1.0) for _ in range(n)] for sign, n in zip(signs, lengths)],
        "entropy": [[rng.choice([0.0, 0.7, rng.uniform(0, 3)]) for _ in range(n)] for n in lengths],
    }


def batch_of_case(case: dict, padding: int = 0) -> tuple[train_rl.RolloutBatch, torch.Tensor]:
    """Return the batch and the trainer's log-probabilities of a case; nothing on padding may matter."""
    fields = {name: rows for name, rows in case.items() if name != "logprobs"}
    ids = [[0] * len(row) for row in case["logprobs"]]
    batch = make_batch(ids, padding=padding, **fields)
    for name in fields:
        getattr(batch, name)[~batch.response_mask] = 9.0
    logprobs = make_batch(ids, padding=padding, old_logprobs=case["logprobs"]).old_logprobs
    return batch, logprobs


def run_micro_batch_loss(case: dict, config: train_rl.Config, padding: int):
    """Return loss, gradient by token and {statistic: by token}; the batch must stay as it was."""
    batch, logprobs = batch_of_case(case, padding)
    mask, given = batch.response_mask, {n: x for n, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    kept, logprobs = {name: x.clone() for name, x in given.items()}, logprobs.requires_grad_()
    counts, rows = torch.tensor([len(mask), int(mask.sum())]), list(range(len(mask)))
    loss, statistics = train_rl.micro_batch_loss(
        logprobs, torch.full_like(logprobs, math.nan), batch, rows, counts, LOG_VOCAB, config
    )
    loss.backward()
    for name, tensor in given.items():
        assert torch.equal(tensor, kept[name]), f"{name} was written to"
    assert (logprobs.grad[~mask] == 0).all()
    return loss.detach(), logprobs.grad[mask], {name: value[mask] for name, value in statistics.items()}


@pytest.mark.parametrize("ratio_level, ratio_form", [("token", "geometric"), ("entropy_group", "literal")])
@pytest.mark.parametrize("clip_mode", ["fixed", "weight", "entropy_adaptive"])
def test_bypass_is_the_loss_with_the_sampler_as_the_old_policy(ratio_level, ratio_form, clip_mode, float64):
    config = make_config(
        section="algorithm", old_policy="rollout", ratio_level=ratio_level, ratio_form=ratio_form,
        clip_mode=clip_mode, kl_coef=0.1,
    )  # fmt: skip
    different = 0
    for seed in range(6):
        case = case_of_two_policies(seed)
        loss, gradient, statistics = run_micro_batch_loss(case, config, padding=seed % 3)
        lengths = [len(row) for row in case["logprobs"]]
        settings = config.algorithm.model_dump() | {
            "max_new_tokens": config.rollout.max_new_tokens, "log_vocab": LOG_VOCAB,
            "num_completions": len(lengths), "num_tokens": sum(lengths),
        }  # fmt: skip
        lists = [case[name] for name in ("logprobs", "rollout_logprobs", "advantages", "entropy")]
        assert_close(loss, -reference.policy_objective(*lists, case["ref_logprobs"], settings))
        slopes = reference.policy_objective_slope(*lists, case["ref_logprobs"], settings)
        assert_close(gradient, [-x for row in slopes for x in row])
        lists[1] = case["old_logprobs"]
        trainer = -reference.policy_objective(*lists, case["ref_logprobs"], settings)
        different += abs(loss.item() - trainer) > 1e-3
        apart = [a - b for name in zip(case["old_logprobs"], case["rollout_logprobs"]) for a, b in zip(*name)]
        assert_close(statistics["abs_dlogp"], [abs(d) for d in apart])
    assert different > 3


@pytest.mark.parametrize("has_moved", [False, True])
@pytest.mark.parametrize("old_policy", ["trainer", "rollout"])
def test_the_distance_to_the_sampler_is_left_out_where_the_policy_has_moved_unseen(
    old_policy, has_moved, float64
):
    """Without a pass for old log-probabilities it is known of the first update only, from its own forward."""
    config = make_config(f"algorithm.old_policy={old_policy}")
    batch, _ = batch_of_case(case_of_two_policies(1, [3, 5]))
    batch.old_logprobs, batch.ref_logprobs = None, None
    logprobs, counts = batch.rollout_logprobs + 0.25, torch.tensor([2, 8])
    _, statistics = train_rl.micro_batch_loss(
        logprobs, batch.entropy, batch, [0, 1], counts, LOG_VOCAB, config, has_moved
    )
    assert ("abs_dlogp" in statistics) == ("mismatch_k3" in statistics) == (not has_moved)
    if not has_moved:
        assert_close(statistics["abs_dlogp"][batch.response_mask], [0.25] * 8)


# ---- prompts, rows, batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prompts, per_step", [(12, 4), (10, 4), (7, 3), (5, 12), (1, 3), (6, 6), (9, 1)])
def test_consecutive_steps_tile_shuffled_epochs(num_prompts, per_step):
    stream = []
    for step in range(3 * num_prompts):
        stream += prompts_of_step(num_prompts, per_step, step * per_step, seed=3)
        assert len(stream) == (step + 1) * per_step
    epochs = [stream[i : i + num_prompts] for i in range(0, len(stream) - num_prompts + 1, num_prompts)]
    assert all(sorted(epoch) == list(range(num_prompts)) for epoch in epochs)
    assert num_prompts < 5 or len({tuple(epoch) for epoch in epochs}) > len(epochs) // 2
    assert num_prompts < 5 or epochs[0] != sorted(epochs[0])


def test_prompts_depend_on_the_number_consumed_and_the_seed_only():
    stream = prompts_of_step(11, 60, 0, seed=0)
    for consumed in (0, 1, 10, 11, 12, 37):
        for per_step in (1, 5, 23):
            expected = stream[consumed : consumed + per_step]
            torch.manual_seed(consumed)
            assert prompts_of_step(11, per_step, consumed, seed=0) == expected
    assert prompts_of_step(11, 11, 0, seed=1) != stream[:11]


def test_seeds_are_63_bits_distinct_and_the_same_in_every_process():
    parts = list(itertools.product(range(4), range(25), range(50), range(8)))  # as (seed, step, prompt, n)
    parts += [(seed, "epoch", epoch) for seed in range(4) for epoch in range(500)]
    parts += [(0, "eval", name, i, n) for name in ("a", "b") for i in range(500) for n in range(9)]
    parts += [(1, 23), (12, 3), (123,), (1, 2, 3)]
    seeds = {seed_of(*p) for p in parts}
    assert len(seeds) == len(parts)
    either = every = next(iter(seeds))
    for seed in seeds:
        either, every = either | seed, every & seed
    assert either == 2**63 - 1 and every == 0  # each of 63 bits is used, none is fixed, the sign is never set
    assert seed_of(0, "epoch", 0) == 5326116194759978245  # another value is another order of prompts


def test_collate_shapes_and_values():
    prompts = make_prompts(3)
    prompt_ids = [[7], [2, 3], [1]]
    ids = [[5, 6], [5, 7], [8], [9, 9, 9], [4]]
    reasons = ["stop", "stop", "stop", "length", "stop"]
    statuses = ["ok", "wrong", "timeout", "error", "no_answer"]
    completions = [
        Completion(ids[i], [-0.5 - i - t for t in range(len(ids[i]))], reasons[i], float(i)) for i in range(5)
    ]
    verdicts = [Verdict(float(status == "ok"), status) for status in statuses]
    of_group = lambda rows: {"completions": completions[rows], "verdicts": verdicts[rows]}
    groups = [train_rl.Group(4, 2, **of_group(slice(2)))]  # their number in the set, not in the step
    groups += [train_rl.Group(9, 1, minibatch=1, **of_group(slice(2, 5)))]  # groups need not be of one size
    batch = train_rl.collate(groups, prompts, prompt_ids)
    assert batch.prompts == [prompts[2]] * 2 + [prompts[1]] * 3
    assert batch.prompt_ids == [[1], [1], [2, 3], [2, 3], [2, 3]] and batch.completion_ids == ids
    assert batch.finish_reason == reasons and batch.verdicts == verdicts
    assert batch.group_index.tolist() == [0, 0, 1, 1, 1] and batch.group_index.dtype == torch.int64
    assert batch.minibatch.tolist() == [0, 0, 1, 1, 1] and batch.minibatch.dtype == torch.int64
    valid = train_rl.has_verdict(batch.verdicts)
    assert valid.tolist() == [True, True, False, False, True] and valid.dtype == torch.bool
    assert batch.response_mask.dtype == torch.bool
    assert batch.response_mask.tolist() == [[t < len(row) for t in range(3)] for row in ids]
    rows = [[-0.5, -1.5, 0.0], [-1.5, -2.5, 0.0], [-2.5, 0.0, 0.0], [-3.5, -4.5, -5.5], [-4.5, 0.0, 0.0]]
    assert_close(batch.rollout_logprobs, torch.tensor(rows))
    later = ("rewards", "valid", "advantages", "old_logprobs", "entropy", "ref_logprobs")
    assert [getattr(batch, name) for name in later] == [None] * 6


def test_a_rank_whose_groups_were_all_dropped_has_a_batch_without_rows():
    batch = train_rl.collate([], [], [])
    assert batch.response_mask.shape == batch.rollout_logprobs.shape == (0, 1)
    assert batch.group_index.shape == batch.minibatch.shape == (0,)
    assert train_rl.has_verdict(batch.verdicts).shape == (0,)


def test_minibatches_are_whole_groups_as_many_as_there_are_for_all_ranks(monkeypatch):
    """The first groups make the first update; the last ones may be short of groups."""
    FakeRanks(1).install(monkeypatch)

    def split(num_groups, num_minibatches):
        outcomes = {
            slot: train_rl.GroupOutcome(slot, 0, 1, 1, 2, 1.0, 4, 2, True) for slot in range(num_groups)
        }
        groups = [train_rl.Group(slot, 0) for slot in reversed(outcomes)]
        config = make_config("rollout.prompts_per_step=12", f"train.minibatches_per_step={num_minibatches}")
        groups, kept = train_rl.drop_and_deal(groups, outcomes, config)
        assert [group.slot for group in groups] == list(kept) == list(range(num_groups))
        return [group.minibatch for group in groups]

    assert split(4, 2) == [0, 0, 1, 1]
    assert split(3, 2) == [0, 0, 1]
    assert split(1, 2) == [0]
    assert split(2, 1) == [0, 0]
    assert split(3, 3) == [0, 1, 2]
    assert split(0, 2) == []


@pytest.mark.parametrize("warmup_steps", [0, 1, 4])
def test_learning_rate_warms_up_and_stays(warmup_steps):
    config = make_config(f"train.warmup_steps={warmup_steps}", "train.learning_rate=1e-3")
    for step in range(8):
        expected = reference.warmed_up_learning_rate(1e-3, warmup_steps, step)
        assert_close(train_rl.learning_rate(config, step), expected)


@pytest.mark.parametrize(
    "settings, is_needed",
    [
        ({}, False),
        ({"train__minibatches_per_step": 2, "algorithm__old_policy": "rollout"}, False),
        ({"train__minibatches_per_step": 2}, True),
        ({"train__passes_per_rollout": 2}, True),
        ({"zero_variance__rl_zvp": True}, True),
        ({"zero_variance__rl_zvp": True, "algorithm__old_policy": "rollout"}, True),
        ({"algorithm__top_entropy": 0.2}, True),
        ({"algorithm__covariance_share": 0.1}, True),
    ],
    ids=str,
)
def test_a_pass_before_the_update_where_the_update_needs_what_it_says(settings, is_needed):
    """Old log-probabilities of later updates, entropies that weigh or select tokens."""
    assert train_rl.needs_old_pass(make_config(**settings)) == is_needed


def test_rows_that_an_update_computes():
    """An advantage that is not 0, a token that KL-Cov penalises, or all of them with a KL term."""
    batch = make_batch([[1, 2], [3], [4, 5]])
    batch.advantages = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    computed = lambda **settings: train_rl.rows_with_gradient(batch, make_config(**settings)).tolist()
    assert computed() == [True, False, False]
    assert computed(algorithm__kl_coef=0.1) == computed(train__skip_zero_gradient="false") == [True] * 3
    batch.penalised = torch.tensor([[False, False], [False, False], [False, True]])
    assert computed() == [True, False, True]


# ---- the update: cases -------------------------------------------------------------------------------------
TORCH_EPS = 1e-8  # of Adam in the case "adam"; the others have helpers.SMOOTH_EPS
TOLERANCE = 1e-6  # a few roundings of parameters of size 1 in float32
ALL_ROWS = {"skip_zero_gradient": "false"}  # so that metrics are over all tokens
OFF_POLICY = {
    "old": "given",
    "algorithm__kl_coef": 0.1,
    "weight_decay": 0.1,
    "max_grad_norm": 0.05,
} | ALL_ROWS
ESPO = {  # with a clip that is wide enough for some tokens of this policy
    "ratio_level": "entropy_group", "ratio_form": "stop_gradient", "clip_mode": "entropy_adaptive",
    "entropy_clip_coef": 1.0, "loss_agg": "token_group_mean", "rollout_correction": "token_tis",
}  # fmt: skip
DAPO = {"clip_eps_low": 0.1, "clip_eps_high": 0.9, "loss_agg": "token_mean"}
DAPO |= {"rollout_correction": "sequence_tis", "rollout_correction_cap": 30.0}
ESPO_UPDATE = OFF_POLICY | {f"algorithm__{name}": value for name, value in ESPO.items()}
DAPO_UPDATE = OFF_POLICY | {f"algorithm__{name}": value for name, value in DAPO.items()}
TWO_UPDATES = ALL_ROWS | {"old": "computed", "minibatches_per_step": 2, "betas": "[0.8, 0.9]"}
BYPASS = ALL_ROWS | {"algorithm__old_policy": "rollout", "minibatches_per_step": 2}
ONE_RANK = [
    update_case("whole", EVERYTHING, **ALL_ROWS),
    update_case("small micro-batches", EVERYTHING, micro_batch_tokens=20, **ALL_ROWS),
    update_case("single rows", EVERYTHING, micro_batch_tokens=1, **ALL_ROWS),
    update_case("padded", EVERYTHING, padding=5, **ALL_ROWS),
    update_case("shuffled", SHUFFLED, micro_batch_tokens=40, **ALL_ROWS),
    update_case("computed old", EVERYTHING, old="computed", **ALL_ROWS),
    update_case("off-policy", EVERYTHING, **OFF_POLICY),
    update_case("off-policy small", EVERYTHING, micro_batch_tokens=20, padding=2, **OFF_POLICY),
    update_case("two updates", EVERYTHING, **TWO_UPDATES),
    update_case("two passes of two", EVERYTHING, passes_per_rollout=2, **TWO_UPDATES),
    update_case("bypass", EVERYTHING, **BYPASS),
    update_case("adam", EVERYTHING, adam_eps=TORCH_EPS, **OFF_POLICY),
    update_case("espo", EVERYTHING, padding=3, **ESPO_UPDATE),
    update_case("dapo small", SHUFFLED, micro_batch_tokens=20, **DAPO_UPDATE),
]
TWO_RANKS = [
    update_case("halves", *HALVES, **ALL_ROWS),
    update_case("shares", *SHARES, micro_batch_tokens=20, **ALL_ROWS),
    update_case("halves ep", *HALVES, ep_size=2, **ALL_ROWS),
    update_case("shares ep", *SHARES, ep_size=2, micro_batch_tokens=20, **ALL_ROWS),
    update_case("off-policy halves", *HALVES, **OFF_POLICY),
    update_case("off-policy shares ep", *SHARES, ep_size=2, micro_batch_tokens=20, **OFF_POLICY),
    update_case("off-policy ep zero 2", *HALVES, ep_size=2, zero_stage=2, **OFF_POLICY),
    update_case("two updates halves", *INTERLEAVED, **TWO_UPDATES),
    update_case("two updates shares ep", *SHARES, ep_size=2, **TWO_UPDATES),
    update_case("espo shares ep", *SHARES, ep_size=2, micro_batch_tokens=20, **ESPO_UPDATE),
    update_case("dapo shares", *SHARES, micro_batch_tokens=40, **DAPO_UPDATE),
]

# updates that leave out rows without gradient beside the same updates without leaving any out
LAST_TWO = EVERYTHING[6:]  # with two updates the second has no row with gradient
SKIPPING = {
    "grpo": {},
    "espo": {"old": "given"} | {f"algorithm__{name}": value for name, value in ESPO.items()},
    "r3": {"old": "given", "ids": "given", "algorithm__router_replay": "r3"},
    "two updates": {key: value for key, value in TWO_UPDATES.items() if key not in ALL_ROWS},
    "two passes": {"old": "computed", "passes_per_rollout": 2, "betas": "[0.8, 0.9]"},
    "logged": {"run__log_every": 1},
    "kl": {"old": "given", "algorithm__kl_coef": 0.1},
}  # fmt: skip
PLACES = {  # rows of each rank; the second of SHARES has none with gradient
    "one rank": ([EVERYTHING], {"micro_batch_tokens": 40}),
    "last two": ([LAST_TWO], {}),
    "halves": (HALVES, {"micro_batch_tokens": 20}),
    "shares ep": (SHARES, {"ep_size": 2, "micro_batch_tokens": 20}),
}
PAIRS = list(itertools.product(SKIPPING, PLACES))
for kind, where in PAIRS:
    rows, split = PLACES[where]
    cases = ONE_RANK if len(rows) == 1 else TWO_RANKS
    for name, options in (("skipping", {}), ("all of", ALL_ROWS)):
        cases.append(update_case(f"{name} {kind}, {where}", *rows, **SKIPPING[kind] | split | options))


def save_request(folder, cases: list[dict]) -> None:
    save_small_moe(folder / "model")
    rng, completions = random.Random(3), make_ragged_completions()
    for c in completions:
        num = len(c["prompt_ids"]) + len(c["completion_ids"]) - 1
        drawn = [[rng.sample(range(4), 2) for _ in range(2)] for _ in range(num)]
        c["routes"] = {"model": torch.tensor(drawn, dtype=torch.uint8)}  # [rows, layers, experts per token]
    share_prompt_routes(completions)
    torch.save({"completions": completions, "cases": cases}, folder / "request.pt")


SUITES = {
    1: RankSuite("grpo", 1, lambda folder: save_request(folder, ONE_RANK)),
    2: RankSuite("grpo", 2, lambda folder: save_request(folder, TWO_RANKS)),
}


@pytest.fixture(scope="module")
def updates():
    """Return the folder of the model, its completions, and {case name: result} of one and two ranks."""
    results = SUITES[1].results()[0] | SUITES[2].results()[0]
    return SUITES[1].folder() / "model", make_ragged_completions(), results


# ---- the update: plain torch -------------------------------------------------------------------------------


def plain_logprobs(model, completion: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability and entropy of each completion token, from one sequence without padding."""
    prompt, tokens = completion["prompt_ids"], completion["completion_ids"]
    logits = model(torch.tensor([prompt + tokens])).logits[0] / TEMPERATURE
    rows = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    return torch.stack([row[token] for row, token in zip(rows, tokens)]), -(rows.exp() * rows).sum(dim=-1)


def plain_update(folder, completions, minibatches, old="current", max_grad_norm=1e3, method=None, **adam):
    """Update on minibatches (lists of rows) with transformers' model and torch's AdamW.

    The loss enters as its derivative by the log-probabilities, which reference.py writes out by hand.
    method: settings of the algorithm that differ from GRPO.
    """
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": LEARNING_RATE, "eps": SMOOTH_EPS} | adam)
    with torch.no_grad():
        pairs = [plain_logprobs(model, c) for c in completions]
    current, entropies = ([pair[k].tolist() for pair in pairs] for k in (0, 1))
    settings = AlgorithmSettings(**method or {}).model_dump() | {"log_vocab": math.log(24)}
    grad_norms, tokens = [], []
    for rows in minibatches:
        chosen = [completions[row] for row in rows]
        logprobs = [plain_logprobs(model, c)[0] for c in chosen]
        old_values = [c["old_logprobs"] if old == "given" else current[row] for row, c in zip(rows, chosen)]
        values = {
            "logprobs": [x.tolist() for x in logprobs],
            "old_logprobs": old_values,
            "advantages": [corrected_advantages(c, old, settings) for c, old in zip(chosen, old_values)],
            "entropies": [entropies[row] for row in rows],
        }
        slopes = reference.policy_objective_slope(
            **values, ref_logprobs=[c["ref_logprobs"] for c in chosen], settings=settings
        )
        optimizer.zero_grad()
        torch.cat(logprobs).backward(-torch.tensor([x for row in slopes for x in row]))
        grad_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item())
        optimizer.step()
        tokens += plain_statistics(chosen, values, settings)
    metrics = {"grad_norm": sum(grad_norms) / len(grad_norms), "nonfinite_updates_max": 0}
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"parameters": parameters, "metrics": metrics | plain_metrics(tokens), "old": current}


def corrected_advantages(completion: dict, old_logprobs: list[float], settings: dict) -> list[float]:
    """Return the advantages of a completion with the weights of the rollout correction."""
    mode, cap = settings["rollout_correction"], settings["rollout_correction_cap"]
    logprobs, advantages = (old_logprobs, completion["rollout_logprobs"]), completion["advantages"]
    return [a * reference.correction_weight(*logprobs, t, mode, cap) for t, a in enumerate(advantages)]


def plain_statistics(completions: list[dict], values: dict, settings: dict) -> list[dict]:
    """Return {metric: value} of each token, and its entropy group."""
    tokens = []
    for i, t, _, term in reference.policy_terms(**values, settings=settings):
        entropies, new, before = (values[name][i] for name in ("entropies", "logprobs", "old_logprobs"))
        groups = reference.entropy_groups(entropies, settings["entropy_groups"])
        token = {
            "entropy_group": next(k for k, group in enumerate(groups) if t in group),
            "ratio": term.ratio,
            "clipped": float(term.clipped),
            "entropy": entropies[t],
            "abs_log_ratio": abs(math.log(term.ratio)),
        }
        apart = before[t] - completions[i]["rollout_logprobs"][t]  # log of trainer over sampler
        token |= {
            "abs_dlogp": abs(apart),
            "mismatch_k3": reference.kl_k3(0.0, apart),
            "mismatch_extreme": float(abs(apart) > math.log(2)),
            "mismatch_weight": math.exp(apart),
            "mismatch_weight_sq": math.exp(2 * apart),
        }
        if settings["kl_coef"]:
            token["ref_kl_k3"] = reference.kl_k3(new[t], completions[i]["ref_logprobs"][t])
        if term.clip_eps is not None:
            token["clip_eps"] = term.clip_eps
        tokens.append(token)
    return tokens


def plain_metrics(tokens: list[dict]) -> dict[str, float]:
    """Return the means of plain_statistics(), some by entropy group, and its maxima."""
    metrics, mean = {}, lambda rows, name: sum(row[name] for row in rows) / len(rows)
    for name in tokens[0].keys() - {"entropy_group"}:
        metrics[name] = mean(tokens, name)
        if name in ("entropy", "clipped", "clip_eps", "abs_dlogp") or name.startswith("mismatch"):
            for k in (0, 1):
                of_group = [token for token in tokens if token["entropy_group"] == k]
                metrics[f"{name}/entropy_group_{k}"] = mean(of_group, name)
        if name in ("abs_dlogp", "abs_log_ratio", "clip_eps"):
            metrics[f"{name}_max"] = max(token[name] for token in tokens)
    in_order = sorted(token["abs_dlogp"] for token in tokens)
    return metrics | {"abs_dlogp_p99": in_order[math.ceil(0.99 * len(in_order)) - 1]}


@pytest.fixture(scope="module")
def plain(updates):
    """Return {name: plain_update()} of what the cases compute in their several ways."""
    folder, completions, _ = updates
    off_policy = {"old": "given", "weight_decay": 0.1, "max_grad_norm": 0.05}
    kl = {"kl_coef": 0.1}
    two_updates = {"betas": (0.8, 0.9), "weight_decay": 0.0}
    uneven = [GROUPS[0] + GROUPS[1] + GROUPS[3], GROUPS[2]]  # rank 1 has one group, and takes it first
    run = lambda *minibatches, **settings: plain_update(folder, completions, minibatches, **settings)
    return {
        "whole": run(EVERYTHING, weight_decay=0.0),
        "off-policy": run(EVERYTHING, method=kl, **off_policy),
        "two updates": run(EVERYTHING[:6], EVERYTHING[6:], **two_updates),
        "two updates shares": run(*uneven, **two_updates),
        "two passes of two": run(*[EVERYTHING[:6], EVERYTHING[6:]] * 2, **two_updates),
        "adam": run(EVERYTHING, method=kl, eps=TORCH_EPS, **off_policy),
        "espo": run(EVERYTHING, method=kl | ESPO, **off_policy),
        "dapo": run(EVERYTHING, method=kl | DAPO, **off_policy),
    }


SAME_UPDATE = {
    "whole": [
        "whole", "small micro-batches", "single rows", "padded", "shuffled", "computed old",
        "halves", "shares", "halves ep", "shares ep",
    ],
    "off-policy": [
        "off-policy", "off-policy small",
        "off-policy halves", "off-policy shares ep", "off-policy ep zero 2",
    ],
    "two updates": ["two updates", "two updates halves"],
    "two updates shares": ["two updates shares ep"],
    "two passes of two": ["two passes of two"],
    "espo": ["espo", "espo shares ep"],
    "dapo": ["dapo small", "dapo shares"],
}  # fmt: skip


@pytest.mark.parametrize("kind, name", [(kind, name) for kind in SAME_UPDATE for name in SAME_UPDATE[kind]])
@pytest.mark.slow
def test_update_equals_plain_torch_however_it_is_split(kind, name, updates, plain):
    result = updates[2][name]
    # A later update starts from what the rounding of those before left, and adds its own.
    num_updates = 4 if kind == "two passes of two" else 2 if kind.startswith("two updates") else 1
    tolerance = num_updates * TOLERANCE
    assert parameter_distance(result["parameters"], plain[kind]["parameters"]) < tolerance
    assert result["metrics"].keys() == plain[kind]["metrics"].keys() | WORK
    for metric, value in plain[kind]["metrics"].items():
        rel = 0.024 if metric.endswith("_p99") else 1e-5  # a quantile is the edge of a bin 2.4 % wide
        assert result["metrics"][metric] == pytest.approx(value, rel=rel, abs=1e-6), metric
    assert result["written"] == []


@pytest.mark.slow
def test_the_work_of_an_update_is_counted_by_rank_and_its_padding_by_grid(updates):
    """A sequence costs its tokens less the last; a grid is as long as the longest of its rows."""
    _, completions, results = updates
    length = lambda row: len(completions[row]["prompt_ids"]) + len(completions[row]["completion_ids"]) - 1
    for one in (case for case in ONE_RANK + TWO_RANKS if case["name"] in sum(SAME_UPDATE.values(), [])):
        passes = 1 + ("passes" in one["name"])
        metrics = results[one["name"]]["metrics"]
        loads = [passes * sum(map(length, rows)) for rows in one["rows"]]
        assert metrics["update_tokens"] == pytest.approx(sum(loads) / len(loads))
        assert metrics["update_tokens_max"] == max(loads)
        assert 0 <= metrics["padding_frac"] < 1
    assert results["single rows"]["metrics"]["padding_frac"] == 0
    grid = len(EVERYTHING) * max(map(length, EVERYTHING))
    expected = 1 - sum(map(length, EVERYTHING)) / grid
    assert results["whole"]["metrics"]["padding_frac"] == pytest.approx(expected)
    assert results["small micro-batches"]["metrics"]["padding_frac"] < expected


SKIPPED_WORK = {"account/update_tokens_total", "empty_updates_max"}


@pytest.mark.slow
@pytest.mark.parametrize("kind, where", PAIRS)
def test_rows_without_gradient_are_left_out_and_nothing_else_changes(kind, where, updates):
    """Parameters agree to a few roundings, and so do metrics over all tokens; work is less."""
    _, completions, results = updates
    skipping, whole = results[f"skipping {kind}, {where}"], results[f"all of {kind}, {where}"]
    later = 1 + 9 * kind.startswith("two")  # a second update enlarges the rounding of the first
    assert parameter_distance(skipping["parameters"], whole["parameters"]) < later * TOLERANCE
    assert skipping["loss"] == pytest.approx(whole["loss"], rel=1e-5, abs=1e-6)
    assert skipping["metrics"].keys() == whole["metrics"].keys() | SKIPPED_WORK
    assert skipping["metrics"]["grad_norm"] == pytest.approx(whole["metrics"]["grad_norm"], rel=1e-5)
    length = lambda row: len(completions[row]["prompt_ids"]) + len(completions[row]["completion_ids"]) - 1
    rows = [row for of_rank in PLACES[where][0] for row in of_rank]
    rows = [row for row in rows if kind == "kl" or any(completions[row]["advantages"])]
    computed = (1 + (kind == "two passes")) * sum(map(length, rows))
    assert skipping["metrics"]["account/update_tokens_total"] == computed
    assert (whole["metrics"]["update_tokens"] * len(PLACES[where][0]) > computed) == (kind != "kl")
    empty = int(kind == "two updates" and where == "last two")
    assert skipping["metrics"]["empty_updates_max"] == empty
    for metric, value in whole["metrics"].items():
        of_old_pass = metric.startswith(("entropy", "mismatch", "abs_dlogp")) and "old" in SKIPPING[kind]
        if metric not in WORK and (kind == "logged" or of_old_pass and SKIPPING[kind]["old"] == "computed"):
            rel = 0.024 if metric.endswith("_p99") else 1e-5
            assert skipping["metrics"][metric] == pytest.approx(value, rel=rel, abs=1e-6), metric


@pytest.mark.slow
def test_without_a_pass_before_the_update_metrics_are_over_the_tokens_computed(updates):
    _, completions, results = updates
    skipping, whole = (results[f"{name} grpo, one rank"] for name in ("skipping", "all of"))
    rows = [row for row in EVERYTHING if any(completions[row]["advantages"])]
    distances = [
        abs(new - old)
        for of_batch, logprobs, _ in whole["micro_batches"]
        for row, values in zip(of_batch, logprobs.tolist())
        for new, old in zip(values, completions[row]["rollout_logprobs"])
        if row in rows
    ]
    expected = sum(distances) / len(distances)
    assert skipping["metrics"]["abs_dlogp"] == pytest.approx(expected, rel=1e-5)
    assert whole["metrics"]["abs_dlogp"] != pytest.approx(expected, rel=1e-3), "the others differ"


@pytest.mark.slow
def test_without_old_log_probabilities_the_distance_to_the_engine_is_that_of_the_first_update(updates):
    """The second update meets a policy that has moved."""
    _, completions, results = updates

    def distance(rows) -> float:
        parts = results["bypass"]["micro_batches"]
        values = [pair for of_batch, logprobs, _ in parts for pair in zip(of_batch, logprobs.tolist())]
        sampled = {row: completions[row]["rollout_logprobs"] for row in rows}
        apart = [abs(a - b) for row, new in values if row in rows for a, b in zip(new, sampled[row])]
        return sum(apart) / len(apart)

    assert results["bypass"]["metrics"]["abs_dlogp"] == pytest.approx(distance(EVERYTHING[:6]), rel=1e-5)
    assert distance(EVERYTHING) != pytest.approx(distance(EVERYTHING[:6]), rel=1e-3)


@pytest.mark.slow
def test_the_updates_that_leave_rows_out_could_fail(updates):
    """They move the weights, the kinds differ, and momentum does, too, where an update has no rows left."""
    results = updates[2]
    start = {n: p for n, p in Qwen3MoeForCausalLM.from_pretrained(updates[0]).named_parameters()}
    for kind, where in PAIRS:
        if where != "last two" or SKIPPING[kind].get("old") != "given":  # else all their tokens are clipped
            result = results[f"skipping {kind}, {where}"]["parameters"]
            assert parameter_distance(result, start) > 1e4 * TOLERANCE, (kind, where)
    one, two = (results[f"skipping {kind}, last two"]["parameters"] for kind in ("grpo", "two updates"))
    assert parameter_distance(one, two) > 1e3 * TOLERANCE


@pytest.mark.slow
def test_update_with_the_eps_of_torch(updates, plain):
    """Rounding shows where a gradient is near 0: in under 1 % of parameters, by under 1 % of a step."""
    expected, actual = plain["adam"]["parameters"], updates[2]["adam"]["parameters"]
    distances = torch.cat([(expected[name] - actual[name]).abs().flatten() for name in expected])
    assert (distances > TOLERANCE).double().mean() < 0.01
    assert distances.max() < 0.01 * LEARNING_RATE


@pytest.mark.slow
def test_the_cases_above_could_fail(updates, plain):
    """The update is large, every setting under test is active, and the kinds of updates differ."""
    start = {n: p for n, p in Qwen3MoeForCausalLM.from_pretrained(updates[0]).named_parameters()}
    for kind, one in plain.items():
        assert parameter_distance(one["parameters"], start) > 1e4 * TOLERANCE
        for other in plain.keys() - {kind}:
            assert parameter_distance(one["parameters"], plain[other]["parameters"]) > 1e3 * TOLERANCE
    assert plain["off-policy"]["metrics"]["grad_norm"] > 2 * 0.05
    for kind in ("off-policy", "espo", "dapo"):
        assert 0.1 < plain[kind]["metrics"]["clipped"] < 0.9
    by_group = ("clipped/entropy_group_0", "clipped/entropy_group_1", "clip_eps_max", "abs_log_ratio_max")
    assert plain["espo"]["metrics"].keys() > set(by_group)
    assert plain["two updates"]["metrics"]["clipped"] > 0.02


@pytest.mark.slow
def test_ratio_is_exactly_one_where_the_old_policy_is_the_current_one(updates):
    results = updates[2]
    for name in SAME_UPDATE["whole"]:
        exact = results[name]["old_logprobs"] is None
        assert results[name]["metrics"]["ratio"] == (1.0 if exact else pytest.approx(1.0, abs=1e-6))
        assert results[name]["metrics"]["clipped"] == 0
    assert results["two updates"]["metrics"]["ratio"] != pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_old_logprobs_computed_before_give_bitwise_the_same_update(updates):
    computed, without = updates[2]["computed old"], updates[2]["whole"]
    assert without["old_logprobs"] is None and computed["old_logprobs"] is not None
    assert parameter_distance(computed["parameters"], without["parameters"]) == 0
    assert computed["metrics"] == without["metrics"]


@pytest.mark.slow
def test_logprobs_of_a_batch_equal_those_of_transformers(updates, plain):
    actual = updates[2]["computed old"]["old_logprobs"]
    expected = plain["whole"]["old"]
    for row, values in enumerate(expected):
        assert_close(actual[row, : len(values)], torch.tensor(values), rtol=1e-5, atol=1e-5)
        assert (actual[row, len(values) :] == 0).all()
