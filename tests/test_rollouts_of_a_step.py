"""Rollouts of a step: expected lengths and costs, requests, and that a schedule changes no update."""

import random
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from helpers import hashed_answer, make_config, make_group, make_run
from rank_worker import contents

import sampling
import train_rl
from batch import Completion, Group, Request, Rollout
from data.history import PromptHistory
from data.prompts import OfflineScore, Prompt
from data.stream import seed_of
from runtime.checkpoint import TrainState
from sampling import Job

# ---- expected lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_an_expected_length_is_recorded_or_the_mean_of_the_set_or_of_all_prompts(seed):
    rng = random.Random(seed)
    sources = rng.choice([["a"], ["a", "b"], ["a", "b", "c"]])
    prompts = [Prompt(str(i), "1", "exact", rng.choice(sources)) for i in range(rng.randint(1, 12))]
    scores = [
        OfflineScore(0.5, rng.choice([0.5, rng.randint(1, 40)]), 0.5) if rng.random() < 0.3 else None
        for _ in prompts
    ]
    history = PromptHistory.from_offline(scores, 4)
    recorded = {i: float(score.mean_tokens) for i, score in enumerate(scores) if score}
    for step in range(rng.choice([0, 3])):
        i = rng.randrange(len(prompts))
        lengths = [rng.randint(1, 40) for _ in range(4)]
        history.update([make_group(0, i, lengths, [True] * 4).outcome(False)], step, 0.5)
        recorded[i] = statistics.fmean(lengths)
    expectations = history.expected_lengths(list(range(len(prompts))), prompts)
    for i, (tokens, guessed) in enumerate(expectations):
        same_set = [length for j, length in recorded.items() if prompts[j].source == prompts[i].source]
        if i in recorded:
            expected = recorded[i]
        elif same_set or recorded:
            expected = statistics.fmean(same_set or recorded.values())
        else:
            expected = 1.0
        assert tokens == pytest.approx(max(1.0, expected), rel=1e-12)
        assert guessed == (i not in recorded)


def jobs_of_round() -> list[Job]:
    """Make the second halves of two probed groups, and three new groups."""
    groups = [train_rl.Group(slot, slot) for slot in range(5)]
    return [Job(group, range(2, 4) if group.slot < 2 else range(4)) for group in groups]


@pytest.mark.parametrize("schedule", ["arrival", "longest_first"])
@pytest.mark.usefixtures("one_rank")
def test_only_longest_first_expects_lengths(schedule):
    config = make_config(f"rollout.schedule={schedule}", "rollout.group_size=4")
    run = make_run(config, None, 5)
    jobs = jobs_of_round()
    run.history.mean_tokens[3] = 7.0
    sampling.set_expected_costs(run, jobs)
    expected = {"arrival": [(0.0, False)] * 5, "longest_first": [(7.0, slot != 3) for slot in range(5)]}
    assert [(group.expected_tokens, group.guessed) for group, _ in jobs] == expected[schedule]


@pytest.mark.parametrize("count, extra", [(True, []), (False, []), (True, ["carry.share=0.5"])])
@pytest.mark.parametrize("schedule", ["arrival", "longest_first"])
def test_verdicts_cost_tokens_at_the_pace_of_the_engine(schedule, count, extra, ranks):
    """Two workers, 4 async calls each; two ranks share an engine; means over the ranks that know a kind.

    With carry.share, seconds would decide which groups a step trains on.
    """
    config = make_config(
        f"rollout.schedule={schedule}", f"rollout.count_reward_time={count}",
        *(extra or ["rollout.tensor_parallel=2"]),
    )  # fmt: skip
    calls = {"exact": 1, "my:judge": 1, "my:call": 4}
    seconds = [{"exact": 1e-3, "my:judge": 0.2}, {"my:judge": 0.4, "my:call": 0.3}]  # by rank

    def costs(rank):
        run = make_run(config, None, 4)
        run.prompts = [Prompt("x", "1", kind, "set") for kind in ("exact", "my:judge", "my:call", "my:new")]
        run.engine = SimpleNamespace(seconds_per_step=0.01, tokens_per_second=1200.0)
        run.pool = SimpleNamespace(seconds=seconds[rank], at_once=lambda kind: 2 * calls[kind])
        groups = [train_rl.Group(slot, slot) for slot in range(4)]
        sampling.set_expected_costs(run, [Job(group, range(4)) for group in groups])
        return [(group.latency_tokens, group.work_tokens) for group in groups]

    expected = [(0.2, 0.3), (60.0, 90.0), (60.0, 22.5), (0.0, 0.0)]
    for costs_of_rank in ranks(2).run(costs):
        for cost, tokens in zip(costs_of_rank, expected, strict=True):
            is_timed = schedule != "arrival" and count and not extra
            assert cost == pytest.approx(tokens if is_timed else (0.0, 0.0))


@pytest.mark.parametrize("schedule, tokens", [("longest_first", 60.0), ("arrival", 0.0)])
@pytest.mark.usefixtures("one_rank")
def test_an_episode_waits_for_its_tools_between_its_turns(schedule, tokens):
    """(3 turns - 1) x 0.3 s are 60 steps of 0.01 s; a prompt without a record is not expected to wait."""
    run = make_run(make_config(f"rollout.schedule={schedule}"), None, 5)
    run.interaction = SimpleNamespace(mean_seconds=lambda: 0.3, environment=None)
    run.engine = SimpleNamespace(seconds_per_step=0.01, tokens_per_second=1200.0)
    outcome = make_group(0, 3, [5] * 4, [True] * 4).outcome(False)
    run.history.update([replace(outcome, turns=12)], 0, 0.5)
    run.pool = SimpleNamespace(seconds={})

    def latencies() -> list[float]:
        groups = [train_rl.Group(0, 3), train_rl.Group(1, 1)]
        sampling.set_expected_costs(run, [Job(group, range(4)) for group in groups])
        return [group.latency_tokens for group in groups]

    assert latencies() == pytest.approx([tokens, 0.0])
    run.interaction.environment = "game.py:Game"  # which answers the last turn, too
    assert latencies() == pytest.approx([1.5 * tokens, 0.0])


def test_a_request_holds_everything_that_its_completion_depends_on():
    """Seeds depend on run, step, slot and sample; temperature and limit are settings of the rollout."""
    config = make_config("rollout.temperature=0.7", "rollout.max_new_tokens=9", "train.seed=3")
    jobs = jobs_of_round()
    jobs[3][0].expected_tokens = 7.0
    jobs[3][0].guessed = True
    for group, _ in jobs:
        group.latency_tokens = 2.0
        group.work_tokens = 3.0
    run = make_run(config, None, 5, state=TrainState(step=6))
    requests, prompts = sampling.requests_of(run, jobs)
    samples = [(group, sample) for group, of_group in jobs for sample in of_group]
    assert len(requests) == len(prompts) == len(samples) == 16
    for request, prompt, (group, sample) in zip(requests, prompts, samples):
        assert prompt.text == f"prompt {group.slot}"
        assert request == Request(
            [group.slot], seed_of(3, 6, group.slot, sample), 0.7, 9, group=group.slot,
            group_seed=seed_of(3, 6, group.slot),
            expected_tokens=7.0 if group.slot == 3 else 0.0, guessed=group.slot == 3,
            latency_tokens=2.0, work_tokens=3.0,
        )  # fmt: skip


# ---- training batches do not depend on the schedule --------------------------------------------------------

MODES = {
    "plain": [],
    "probe": ["zero_variance.probe_size=2", "zero_variance.probe_stop_prob=0.5"],
    "refill": ["zero_variance.drop=true", "zero_variance.refill=true"],
    "history, probe, refill": [
        "zero_variance.history=true", "zero_variance.probe_size=2", "zero_variance.drop=true",
        "zero_variance.refill=true", "zero_variance.retest_steps=3",
    ],
    "minibatches": ["train.minibatches_per_step=4"],
    "minibatches of kept groups": ["train.minibatches_per_step=2", "zero_variance.drop=true"],
    "without balance": ["train.balance=false", "train.minibatches_per_step=2"],
}  # fmt: skip


def run_steps(schedule: str, mode: str) -> list[tuple]:
    """Return this rank's sampled groups, trained groups and minibatches, for each step."""
    config = make_config(
        f"rollout.schedule={schedule}", "rollout.group_size=4", "rollout.prompts_per_step=8", *MODES[mode]
    )
    hashed = hashed_answer([0.0, 1.0, 0.5, 0.8] * 6)

    def answer(prompt: int, *where: int) -> tuple[bool, int]:
        right, length = hashed(prompt, *where)
        return right, length * (1 + prompt % 5)

    run = make_run(config, answer, 24)
    run.prompts[::3] = [replace(prompt, kind="my:judge") for prompt in run.prompts[::3]]
    run.pool.seconds = {"my:judge": 0.05 * (1 + dist.get_rank())}  # ranks measure different times
    steps = []
    for _ in range(5):
        groups, outcomes, _ = train_rl.sample_step(run)
        train_rl.update_history(run, list(outcomes.values()))
        trained, trained_outcomes = train_rl.drop_and_deal(groups, outcomes, config)
        run.state.step += 1
        batches = [(group.minibatch, *of_group) for group, of_group in zip(trained, contents(trained))]
        steps.append((contents(groups), batches, sorted(trained_outcomes)))
    return steps


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_schedule_changes_the_sampling_rank_of_a_group_but_no_training_batch(mode, world_size, ranks):
    if "minibatches" in mode and world_size == 3:
        world_size = 4
    fake = ranks(world_size)
    sampled, results = {}, {}
    for schedule in ("arrival", "longest_first"):
        of_ranks = fake.run(lambda rank, schedule=schedule: run_steps(schedule, mode))
        sampled[schedule] = [[step[0] for step in steps] for steps in of_ranks]
        gathered = [sorted(sum(step, [])) for step in zip(*sampled[schedule])]
        trained = [[step[1:] for step in steps] for steps in of_ranks]
        results[schedule] = (gathered, trained)
    assert results["arrival"] == results["longest_first"]
    assert any(batches for batches, _ in results["longest_first"][1][0])
    assert world_size == 1 or sampled["arrival"] != sampled["longest_first"], "schedules differ"


def test_a_continued_group_keeps_its_rank_and_counts_as_tokens_there(ranks):
    """Rank 0 expects 400 tokens. Two new groups take workers 300 each: side by side on rank 1, 600 would be
    more than the 410 tokens of rank 0 with one of them.
    """
    ranks(2)
    continued = Group(0, 0, expected_tokens=100.0, rank=0)
    new = [Group(slot, slot, expected_tokens=10.0, work_tokens=300.0) for slot in (1, 2)]
    train_rl.deal_jobs([Job(continued, range(4, 8)), *(Job(group, range(1)) for group in new)])
    assert [group.rank for group in (continued, *new)] == [0, 1, 0]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", MODES)
def test_a_lag_delays_the_same_rollouts(mode):
    """If the engine's answers do not depend on the policy, lag changes only when a rollout is trained on."""
    hashed = hashed_answer([0.0, 1.0, 0.5, 0.8] * 6)
    answer = lambda prompt, version, slot, sample: hashed(prompt, 0, slot, sample % 2)

    def rollouts(lag: int) -> list[tuple]:
        settings = ("rollout.group_size=4", "rollout.prompts_per_step=8", f"rollout.lag={lag}", *MODES[mode])
        run = make_run(make_config(*settings), answer, 24)
        trained = []
        counted = []
        for step in range(6):
            rollout, num_tokens = train_rl.next_rollout(run)
            counted.append(num_tokens)
            assert rollout.policy_version == max(0, step - lag) and len(run.queue) == lag
            run.state.step += 1
            restored = Rollout.restored(rollout.saved())
            assert restored == rollout and all(type(g.completions[0]) is Completion for g in restored.groups)
            trained.append((rollout.groups, rollout.outcomes, rollout.account))
        sampled = [groups for groups, *_ in trained] + [rollout.groups for rollout in run.queue]
        tokens = [sum(c.num_sampled for group in groups for c in group.completions) for groups in sampled]
        assert counted == [sum(tokens[: lag + 1]), *tokens[lag + 1 :]] and min(counted) > 0
        return trained

    assert rollouts(0) == rollouts(1) == rollouts(3)
