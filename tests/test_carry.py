"""Partial rollouts: which groups are trained on and when, their tokens and versions, settings, a resume."""

import math
from collections import Counter
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL, trained
from helpers import (
    FakeEngine,
    assert_resumes_exactly,
    make_completion,
    make_config,
    make_prompts,
    make_run,
    make_verdict,
    steps_of,
)

import train_rl
from batch import UNFINISHED, Group, RolloutBatch, collate
from extras import base
from extras.carry import Carried
from runtime.checks import check_parity

GROUP_SIZE, NUM_PROMPTS = 4, 6  # of a step


class FakeSlowEngine(FakeEngine):
    """Adds a token to every completion in each step; the first token of a completion is its length."""

    def generate(self, requests, version, on_finished, on_step, capture_routes, episodes=None, is_over=None):
        assert self.previous_rollout == (0, 0), "a resumed run has none"
        self.previous_rollout = (9, 9)
        assert not any(request.guessed for request in requests if request.prefix), (
            "a scout would start before"
        )
        tokens = [list(request.prefix.token_ids) if request.prefix else [] for request in requests]
        known = list(map(len, tokens))
        lengths = [ids[0] if ids else 1 + Random(r.seed).randrange(40) for ids, r in zip(tokens, requests)]

        def completion(row: int, reason: str):
            versions = requests[row].prefix.versions if requests[row].prefix else ()
            fields = {"token_ids": tokens[row], "finish_reason": reason, "versions": versions}
            return replace(make_completion(len(tokens[row])), **fields).with_version(version)

        completions = [None] * len(requests)
        while None in completions:
            for row in (row for row, ended in enumerate(completions) if ended is None):
                tokens[row].append(tokens[row][0] if tokens[row] else lengths[row])
                if len(tokens[row]) == lengths[row]:
                    completions[row] = completion(row, "stop")
                    self.rights[row] = lengths[row] % 2 == 0
                    on_finished(row, completions[row])
            if None in completions and is_over():
                rest = [row for row, ended in enumerate(completions) if ended is None]
                assert all(len(tokens[row]) > known[row] for row in rest)
                for row in rest:
                    completions[row] = completion(row, UNFINISHED)
        return completions


def make_carrying_run(share: float, *settings: str):
    config = make_config(
        f"carry.share={share}", f"rollout.group_size={GROUP_SIZE}", f"rollout.prompts_per_step={NUM_PROMPTS}",
        *settings,
    )  # fmt: skip
    run = make_run(config, None, 60, extras={})
    run.engine = run.pool = FakeSlowEngine(None)
    base.load("carry").build(run, None, None)
    return run


def test_0_28_of_25_groups_are_seven():
    run = make_carrying_run(0.28)
    requests = [SimpleNamespace(group=number) for number in range(25)]
    ended = [[number < complete for number in range(25)] for complete in (6, 7)]
    assert [base.load("carry").is_over(run, requests, each) for each in ended] == [False, True]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("share, max_age", [(0.5, 1), (0.5, 3), (0.01, 2), (1, 1)])
def test_every_group_is_trained_on_once_in_bounded_time(share, max_age):
    run = make_carrying_run(share, f"carry.max_age={max_age}")
    trained = Counter()
    born = {}  # {prompt: step of its first token}
    for step in range(9):
        groups, outcomes, account = train_rl.sample_step(run)
        waiting = run.extras["carry"].waiting
        assert len(groups) + len(waiting) == NUM_PROMPTS and sorted(outcomes) == [g.slot for g in groups]
        assert len(groups) >= share * NUM_PROMPTS and account["rounds"] == 1
        assert max((w.age for w in waiting), default=0) <= max_age
        assert all(math.isnan(c.seconds) for w in waiting for c in w.group.completions)
        for group in [*groups, *(w.group for w in waiting)]:
            born.setdefault(group.prompt_index, step)
        for group in groups:
            trained[group.prompt_index] += 1
            assert len(group.completions) == GROUP_SIZE and group.is_finished
            assert step - born[group.prompt_index] <= max_age
            for completion in group.completions:
                length = completion.token_ids[0]
                assert completion.token_ids == [length] * length and completion.verdict is not None
                versions = [v.policy_version for v in completion.versions for _ in range(v.num_tokens)]
                assert len(versions) == length and versions == sorted(versions)
                assert born[group.prompt_index] <= versions[0] <= versions[-1] <= step
        copy = make_carrying_run(share)
        base.load("carry").restore_rank_state(copy, base.load("carry").rank_state(run))
        assert copy.extras["carry"].waiting == waiting
        train_rl.update_history(run, list(outcomes.values()))
        run.state.step += 1
    assert set(trained.values()) == {1} and len(trained) == run.state.consumed_prompts - len(waiting)
    assert (share == 1) == (born.keys() == trained.keys())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("late, max_age", [("drop", 1), ("drop", 2), ("finish", 2)])
def test_all_tokens_of_a_step_are_counted_and_late_groups_dropped(late, max_age):
    """A dropped group never comes back; with max_age 1 it is one of the longest."""
    run = make_carrying_run(0.5, f"carry.late={late}", f"carry.max_age={max_age}")
    seen, num_dropped, known = [], 0, 0
    for step in range(9):
        groups, outcomes, account = train_rl.sample_step(run)
        carried = run.extras["carry"]
        batch = RolloutBatch.__new__(RolloutBatch)
        batch.policy_versions, batch.response_mask = torch.full((2, 3), step), torch.ones(2, 3).bool()
        batch.extras = {}
        base.load("carry").after_rollout(run, batch, groups)
        metrics = base.load("carry").metrics(batch)
        waiting = [w.group for w in carried.waiting]
        assert metrics["carried_groups"] == (len(waiting), 1) and metrics["token_age_mean"] == (0, 6)
        dropped = metrics["carry_dropped_total"][0]
        assert (metrics["account/wasted_late_tokens_total"][0] > 0) == (dropped > 0)
        assert len(groups) + len(waiting) + dropped == NUM_PROMPTS
        now = sum(len(c.token_ids) for group in [*groups, *waiting] for c in group.completions)
        if max_age == 1:
            assert dropped and not waiting and account["offered"] == NUM_PROMPTS
            longest = max(len(c.token_ids) for group in groups for c in group.completions)
            assert dropped * longest <= metrics["tokens_total"][0] - now <= dropped * GROUP_SIZE * longest
        elif late == "finish":
            assert not dropped and metrics["tokens_total"][0] == now - known
        num_dropped, known = (
            num_dropped + dropped, sum(len(c.token_ids) for group in waiting for c in group.completions)
        )  # fmt: skip
        train_rl.update_history(run, list(outcomes.values()))
        seen += [group.prompt_index for group in groups]
        run.state.step += 1
    assert len(seen) == len(set(seen)) == run.state.consumed_prompts - len(waiting) - num_dropped
    assert bool(num_dropped) == (late == "drop")


def test_ages_by_tenths_of_the_lengths():
    """Twenty completions of 1 to 20 tokens, of which those with 11 and more began a step earlier."""
    run = make_carrying_run(0.5)
    run.state.step = 7
    run.extras["carry"] = Carried()
    lengths = torch.randperm(20, generator=torch.Generator().manual_seed(0)) + 1
    batch = RolloutBatch.__new__(RolloutBatch)
    batch.response_mask = torch.arange(20) < lengths[:, None]
    batch.policy_versions = torch.where((lengths > 10)[:, None] & (torch.arange(20) < 10), 6, 7)
    batch.extras = {}
    base.load("carry").after_rollout(run, batch, [])
    ages = batch.extras["carry"]
    assert ages["token_age_mean"] == (100, 210)
    assert [ages[f"token_age_tenth_{k}"] for k in (1, 5, 6, 10)] == [(0, 3), (0, 19), (20, 23), (20, 39)]


@pytest.mark.parametrize("name, first, second", [
    ("rollout.temperature", 1.0, 0.9), ("rollout.group_size", 8, 4), ("rollout.max_new_tokens", 32, 64),
    ("carry.share", 0.5, "null"), ("algorithm.router_replay", "off", "r3"),
    ("teacher.scores", "a.jsonl", "b.jsonl"),
])  # fmt: skip
def test_stages_fit_completions_that_wait(name, first, second):
    teacher = ("teacher.path=folder", "teacher.coef=1") if name.startswith("teacher") else ()
    configs = [make_config(*teacher, "carry.share=0.5", f"{name}={value}") for value in (first, second)]
    base.load("carry").check_stages([configs[0], configs[0]])
    with pytest.raises(ValueError, match=name):
        base.load("carry").check_stages(configs)


def test_routes_of_a_part_of_the_completions_are_none():
    """The engine has captured routes in the step in which the first completion ended, not in the second."""
    routes = torch.zeros(3, 2, 2, dtype=torch.uint8)
    completions = [replace(make_completion(2), routed_experts=routes), make_completion(2)]
    for number in (1, 2):
        judged = [replace(completion, verdict=make_verdict(True)) for completion in completions[:number]]
        routed = collate([Group(0, 0, judged)], make_prompts(1), [[1, 2]]).routed_experts
        assert (routed is None) == (number == 2)


@pytest.mark.usefixtures("one_rank")
def test_parity_leaves_out_tokens_of_earlier_policies():
    config = make_config("rollout.dtype=float32", "model.dtype=float32")
    batch = RolloutBatch.__new__(RolloutBatch)
    batch.response_mask = torch.ones(4, 25).bool()
    batch.rollout_logprobs = -torch.ones(4, 25)
    batch.policy_versions = torch.full((4, 25), 7)
    batch.policy_versions[0, :10] = 6
    logprobs = batch.rollout_logprobs + 0.01 * (batch.policy_versions == 6)
    check_parity(logprobs, batch, config, 7)
    batch.policy_versions[0, 9] = 7
    with pytest.raises(RuntimeError, match="weight sync is faulty"):
        check_parity(logprobs + 0.01 * (batch.policy_versions == 7), batch, config, 7)


@pytest.mark.slow
@pytest.mark.usefixtures("demo_model")
@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.router_replay=r3", "rollout.check_every=1", "train.learning_rate=1e-30", "eval.every=2"],
        ["rollout.check_every=2", "train.learning_rate=1e-2", "algorithm.rollout_correction=token_tis",
         "eval.every=0", "algorithm.mismatch_patience=0"],
    ],
)  # fmt: skip
def test_a_run_with_waiting_completions_resumes_exactly(settings, tmp_path):
    """The engine's log-probabilities of all tokens are those of the policies that sampled them.

    The weights of the first run stand still, so all log-probabilities are comparable. The second run has
    routes and parity checks in every second step only. Evaluations do not disturb what waits.
    """
    fixed = ["carry.share=0.5", "train.num_steps=5", "checkpoint.every=3", "train.weight_decay=0"]
    settings = [*SMALL, *fixed, *settings]
    straight = tmp_path / "straight"
    trained(*settings, f"run.dir={straight}")
    steps = steps_of(straight)
    assert max(row["carried_groups"] for row in steps) > 0 < max(row["token_age_mean"] for row in steps)
    if "train.learning_rate=1e-30" in settings:
        assert max(row["abs_dlogp"] for row in steps if "abs_dlogp" in row) < 1e-4
    assert_resumes_exactly(straight, 5, *settings, kill=True)
