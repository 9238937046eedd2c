"""The rollouts of a step: what is expected and asked of the engine, and that a schedule changes no update."""

import random
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from helpers import (
    FakeRanks,
    hashed_answer,
    make_config,
    make_group,
    make_run,
)
from rank_worker import contents

import train_rl
from batch import Request
from data.history import PromptHistory
from data.prompts import OfflineScore, Prompt
from data.stream import seed_of
from runtime.checkpoint import TrainState


@pytest.fixture
def ranks(monkeypatch):
    """ranks(N): from now on, torch.distributed are N threads of this process."""
    return lambda world_size: FakeRanks(world_size).install(monkeypatch)


# ---- expected lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_expectations_are_the_record_or_a_mean_over_the_set_or_over_all(seed):
    rng = random.Random(seed)
    sources = rng.choice([["a"], ["a", "b"], ["a", "b", "c"]])
    prompts = [Prompt(str(i), "1", "exact", rng.choice(sources)) for i in range(rng.randint(1, 12))]
    scores = [OfflineScore(0.5, rng.randint(1, 40), 0.5) if rng.random() < 0.3 else None for _ in prompts]
    history, visited = PromptHistory.from_offline(scores, 4), {}
    for step in range(rng.choice([0, 3])):
        i, lengths = rng.randrange(len(prompts)), [rng.randint(1, 40) for _ in range(4)]
        history.update([make_group(0, i, lengths, [True] * 4).outcome(False)], step, 0.5)
        visited[i] = statistics.fmean(lengths)
    lengths = {i: float(score.mean_tokens) for i, score in enumerate(scores) if score} | visited
    found = history.expected_lengths(list(range(len(prompts))), prompts)
    for i, (tokens, guessed) in enumerate(found):
        alike = [tokens for j, tokens in lengths.items() if prompts[j].source == prompts[i].source]
        if i in lengths:
            expected = lengths[i]
        elif alike:
            expected = statistics.fmean(alike)
        else:
            expected = statistics.fmean(lengths.values()) if lengths else 1.0
        assert tokens == pytest.approx(expected, rel=1e-12)
        assert guessed == (i not in lengths)


def jobs_of_round() -> train_rl.Jobs:
    """Make the rest of two probed groups and three new ones."""
    groups = [train_rl.Group(slot, slot) for slot in range(5)]
    return [(group, range(2, 4) if group.slot < 2 else range(4)) for group in groups]


@pytest.mark.parametrize("schedule", ["arrival", "longest_first"])
def test_each_schedule_knows_of_lengths_what_it_should(schedule):
    config = make_config(f"rollout.schedule={schedule}", "rollout.group_size=4")
    run = make_run(config, None, 5)
    jobs = jobs_of_round()
    run.history.mean_tokens[3] = 7.0
    train_rl.set_expected_lengths(run, jobs)
    expected = {"arrival": [(0.0, False)] * 5, "longest_first": [(7.0, slot != 3) for slot in range(5)]}
    assert [(group.expected_tokens, group.guessed) for group, _ in jobs] == expected[schedule]


@pytest.mark.parametrize("count", [True, False])
@pytest.mark.parametrize("schedule", ["arrival", "longest_first"])
def test_verdicts_cost_tokens_at_the_pace_of_the_engine(schedule, count, ranks):
    """Two workers, 4 async calls each; two ranks share an engine; means of the ranks that know a kind."""
    config = make_config(
        f"rollout.schedule={schedule}", f"rollout.count_reward_time={count}", "rollout.tensor_parallel=2"
    )
    calls = {"exact": 1, "my:judge": 1, "my:call": 4}

    def costs(rank):
        run = make_run(config, None, 1)
        run.engine = SimpleNamespace(seconds_per_step=0.01, tokens_per_second=1200.0)
        seconds = [{"exact": 1e-3, "my:judge": 0.2}, {"my:judge": 0.4, "my:call": 0.3}][rank]
        run.pool = SimpleNamespace(seconds=seconds, at_once=lambda kind: 2 * calls[kind])
        return train_rl.verdict_costs(run)

    expected = {"exact": (0.2, 0.3), "my:judge": (60.0, 90.0), "my:call": (60.0, 22.5)}
    for found in ranks(2).run(costs):
        assert found.keys() == (expected.keys() if schedule != "arrival" and count else set())
        assert all(found[kind] == pytest.approx(expected[kind]) for kind in found)


def test_a_request_holds_what_its_completion_depends_on():
    """The seed is of run, step, slot and sample; the temperature and the limit are the rollout's."""
    config = make_config("rollout.temperature=0.7", "rollout.max_new_tokens=9", "train.seed=3")
    jobs = jobs_of_round()
    jobs[3][0].expected_tokens, jobs[3][0].guessed = 7.0, True
    run = make_run(config, None, 5, state=TrainState(step=6))
    requests, prompts = train_rl.requests_of(run, jobs, costs={"exact": (2.0, 3.0)})
    samples = [(group, sample) for group, of_group in jobs for sample in of_group]
    assert len(requests) == len(prompts) == len(samples) == 16
    for request, prompt, (group, sample) in zip(requests, prompts, samples):
        assert prompt.text == f"prompt {group.slot}"
        assert request == Request(
            [group.slot], seed_of(3, 6, group.slot, sample), 0.7, 9, group=group.slot,
            expected_tokens=7.0 if group.slot == 3 else 0.0, guessed=group.slot == 3,
            latency_tokens=2.0, work_tokens=3.0,
        )  # fmt: skip


# ---- what is trained on does not depend on the schedule ----------------------------------------------------

MODES = {
    "plain": [],
    "probe": ["zero_variance.probe_size=2", "zero_variance.probe_stop_prob=0.5"],
    "refill": ["zero_variance.drop=true", "zero_variance.refill=true"],
    "history, probe, refill": [
        "zero_variance.history=true", "zero_variance.probe_size=2", "zero_variance.drop=true",
        "zero_variance.refill=true", "zero_variance.retest_steps=3",
    ],
    "minibatches": ["train.minibatches_per_step=4"],
    "minibatches of what is kept": ["train.minibatches_per_step=2", "zero_variance.drop=true"],
    "without balance": ["train.balance=false", "train.minibatches_per_step=2"],
}  # fmt: skip


def run_steps(schedule: str, mode: str) -> list[tuple]:
    """Return of each step on this rank the groups sampled, and those trained on with their minibatches."""
    config = make_config(
        f"rollout.schedule={schedule}", "rollout.group_size=4", "rollout.prompts_per_step=8", *MODES[mode]
    )
    rates = [0.0, 1.0, 0.5, 0.8] * 6
    answer = hashed_answer(rates)
    steps = []
    longer = lambda prompt, *where: (answer(prompt, *where)[0], answer(prompt, *where)[1] * (1 + prompt % 5))
    run = make_run(config, longer, 24)
    run.prompts[::3] = [replace(prompt, kind="my:judge") for prompt in run.prompts[::3]]
    run.pool.seconds = {"my:judge": 0.05 * (1 + dist.get_rank())}  # each rank has measured something else
    for _ in range(5):
        groups, outcomes, _ = train_rl.sample_step(run)
        train_rl.update_history(run, list(outcomes.values()))
        trained, kept = train_rl.drop_and_deal(groups, outcomes, config)
        run.state.step += 1
        batches = [(group.minibatch, *of_group) for group, of_group in zip(trained, contents(trained))]
        steps.append((contents(groups), batches, sorted(kept)))
    return steps


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_schedule_changes_who_samples_and_not_what_is_trained_on(mode, world_size, ranks):
    if "minibatches" in mode and world_size == 3:
        world_size = 4
    fake, sampled, by_schedule = ranks(world_size), {}, {}
    for schedule in ("arrival", "longest_first"):
        of_ranks = fake.run(lambda rank, schedule=schedule: run_steps(schedule, mode))
        sampled[schedule] = [[step[0] for step in steps] for steps in of_ranks]
        together = [sorted(sum(step, [])) for step in zip(*sampled[schedule])]
        trained = [[step[1:] for step in steps] for steps in of_ranks]
        by_schedule[schedule] = (together, trained)
    assert by_schedule["arrival"] == by_schedule["longest_first"]
    assert any(batches for batches, _ in by_schedule["longest_first"][1][0])
    if world_size > 1:
        assert sampled["arrival"] != sampled["longest_first"], "schedules do differ"
