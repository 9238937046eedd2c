"""Scheduling of a rollout and what overlaps with it: waiting line, expected lengths, ranks, micro-batches,
reward pool, background checkpoints. None of it may change what is computed."""

import itertools
import json
import math
import random
import statistics
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import reference
import schedule_worker
import torch
import torch.distributed as dist
from conftest import ROOT, assert_close, save_small_moe, torchrun
from test_losses import LOG_VOCAB, batch_of, random_case, reference_settings, run_loss
from test_losses import config_of as loss_config
from test_zero_variance import FakeRanks
from zero_variance_worker import (
    SMALLEST_TRAINING_SET,
    completion_of,
    contents,
    fake_generate,
    hashed_answer,
    length_ahead,
    no_history,
    prompts_of,
    verdict_of,
)

import moe_model
import reward
import train_rl
from data.prompts import OfflineScore, Prompt
from data.stream import decoder_json
from data.tiny import build_tokenizer
from experiments.run_dir import CheckpointWriter, TrainState, is_redone
from experiments.settings import load_config
from experiments.workload import Recipe, Workload
from reward import RewardPool, Verdict
from rollout import Completion, Request, WaitingLine, longest_first


@pytest.fixture
def ranks(monkeypatch):
    """ranks(N): from now on, torch.distributed and train_rl.exchange() are N threads of this process."""

    def start(world_size: int) -> FakeRanks:
        fake = FakeRanks(world_size)

        def all_reduce(tensor, op=None) -> None:
            everyone = [None] * world_size
            fake.all_gather_object(everyone, tensor)
            combine = torch.amax if op == dist.ReduceOp.MAX else torch.sum
            tensor.copy_(combine(torch.stack(everyone), dim=0))

        for name in ("get_rank", "get_world_size", "all_gather_object"):
            monkeypatch.setattr(dist, name, getattr(fake, name))
        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        monkeypatch.setattr(train_rl, "exchange", fake.exchange)
        return fake

    return start


def config_of(*settings: str):
    return load_config([SMALLEST_TRAINING_SET, *settings])


# ---- the waiting line --------------------------------------------------------------------------------------


class NaiveLine:
    """WaitingLine as its description has it: every expectation looked up anew whenever one is asked for."""

    def __init__(self, requests: list[Request]):
        self.requests, self.waiting, self.seen = requests, list(range(len(requests))), {}
        self.pioneers = set()
        for index, request in enumerate(requests):
            earlier = [r for r in requests[:index] if r.group == request.group]
            if request.guessed and not earlier:
                self.pioneers.add(index)

    def expected(self, index: int) -> float:
        request = self.requests[index]
        tokens = request.max_new_tokens if request.guessed else request.expected_tokens
        if request.guessed and self.seen.get(request.group):
            tokens = statistics.fmean(self.seen[request.group])
        return math.inf if index in self.pioneers else tokens + request.reward_tokens

    def pop(self) -> int:
        best = max(self.waiting, key=lambda index: (self.expected(index), -index))
        self.waiting.remove(best)
        return best

    def note(self, index: int, num_tokens: int) -> None:
        self.seen.setdefault(self.requests[index].group, []).append(num_tokens)

    def cut(self) -> None:
        self.waiting = [index for index in self.waiting if not self.requests[index].can_be_cut]


def random_requests(rng: random.Random) -> list[Request]:
    requests = []
    for group in rng.sample(range(50), rng.randint(1, 8)):
        tokens, guessed = rng.choice([0.0, 4.0, 9.5, rng.uniform(0, 20)]), rng.random() < 0.5
        for _ in range(rng.randint(1, 5)):
            # siblings have one expectation, or each its own
            own = rng.choice([tokens, tokens, rng.randint(0, 9)])
            delay = rng.choice([0.0, 0.0, 4.0, 7.25])
            expected = {"expected_tokens": float(own), "guessed": guessed, "reward_tokens": delay}
            request = Request([1], 0, 1.0, rng.choice([9, 9, 12]), group=group, **expected)
            requests.append(request if rng.random() < 0.8 else replace_cut(request))
    if rng.random() < 0.3:
        rng.shuffle(requests)  # siblings need not be neighbours
    return requests


def replace_cut(request: Request) -> Request:
    return Request(**vars(request) | {"can_be_cut": False})


@pytest.mark.parametrize("seed", range(200))
def test_the_waiting_line_is_that_of_its_description(seed):
    """Requests end in any order while others start; lengths are whole, so that means are exact and tie."""
    rng = random.Random(seed)
    requests = random_requests(rng)
    line, naive, running = WaitingLine(requests), NaiveLine(requests), []
    while line or running:
        assert len(line) == len(naive.waiting) and bool(line) == bool(naive.waiting)
        if line and rng.random() < 0.6:
            index = line.pop()
            assert index == naive.pop()
            running.append(index)
        elif running:
            index = running.pop(rng.randrange(len(running)))
            tokens = rng.choice([0, 4, 9, rng.randint(1, 20)])
            line.note(index, tokens)
            naive.note(index, tokens)
        if rng.random() < 0.02:
            line.cut()
            naive.cut()
    assert not naive.waiting


def test_equal_expectations_keep_the_order_of_the_requests():
    requests = [Request([1], 0, 1.0, 9, group=i // 3, expected_tokens=5.0) for i in range(12)]
    line = WaitingLine(requests)
    assert [line.pop() for _ in requests] == list(range(12))


# ---- longest first -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_longest_first_is_the_loop_of_its_description(seed):
    """With loads before, and many equal items and bins."""
    rng = random.Random(seed)
    num_bins = rng.randint(1, 5)
    sizes = [rng.choice([0.0, 1.0, 2.0, float(rng.randint(0, 9))]) for _ in range(rng.randint(0, 20))]
    load = rng.choice([None, [float(rng.randint(0, 6)) for _ in range(num_bins)]])
    held, expected = list(load or [0.0] * num_bins), [None] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        expected[item] = held.index(min(held))
        held[expected[item]] += sizes[item]
    before = list(load) if load else None
    assert longest_first(sizes, num_bins, load) == expected
    assert load == before, "the load is the caller's"


@pytest.mark.parametrize("seed", range(60))
def test_longest_first_is_within_grahams_bound_of_the_optimum(seed):
    rng = random.Random(seed)
    num_bins = rng.choice([2, 3])
    sizes = [rng.randint(1, 30) for _ in range(rng.randint(1, 8))]
    bins = longest_first(sizes, num_bins)
    assert len(bins) == len(sizes) and set(bins) <= set(range(num_bins))
    largest = lambda way: max(sum(s for s, b in zip(sizes, way) if b == n) for n in range(num_bins))
    best = min(map(largest, itertools.product(range(num_bins), repeat=len(sizes))))
    assert largest(bins) <= (4 / 3 - 1 / (3 * num_bins)) * best + 1e-9


# ---- expected lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_expectations_are_the_record_or_a_mean_over_the_set_or_over_all(seed):
    rng = random.Random(seed)
    sources = rng.choice([["a"], ["a", "b"], ["a", "b", "c"]])
    prompts = [Prompt(str(i), "1", "exact", rng.choice(sources)) for i in range(rng.randint(1, 12))]
    scores = [OfflineScore(0.5, rng.randint(1, 40)) if rng.random() < 0.3 else None for _ in prompts]
    history, visited = train_rl.PromptHistory.from_offline(scores, 4), {}
    for step in range(rng.choice([0, 3])):
        i, lengths = rng.randrange(len(prompts)), [rng.randint(1, 40) for _ in range(4)]
        verdicts = [verdict_of(True)] * 4
        group = train_rl.Group(0, i, completions=[completion_of(n) for n in lengths], verdicts=verdicts)
        history.update([group.outcome(False)], step, 0.5)
        visited[i] = statistics.fmean(lengths)
    lengths = {i: float(score.mean_tokens) for i, score in enumerate(scores) if score} | visited
    groups = [train_rl.Group(i, i) for i in range(len(prompts))]
    history.expect(groups, prompts, 3)
    for i, group in enumerate(groups):
        alike = [tokens for j, tokens in lengths.items() if prompts[j].source == prompts[i].source]
        if i in lengths:
            expected = lengths[i]
        elif alike:
            expected = statistics.fmean(alike)
        else:
            expected = statistics.fmean(lengths.values()) if lengths else 1.0
        assert group.expected_tokens == pytest.approx([expected] * 3, rel=1e-12)
        assert group.guessed == (i not in lengths)


def work_of_round() -> list:
    """The rest of two probed groups and three new ones."""
    groups = [train_rl.Group(place, place) for place in range(5)]
    return [(group, range(2, 4) if group.place < 2 else range(4)) for group in groups]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["arrival", "longest_first", "oracle"])
def test_each_schedule_knows_of_lengths_what_it_should(schedule, world_size, ranks):
    config = config_of(f"rollout.schedule={schedule}", "rollout.group_size=4")
    true_length = lambda prompt, step, place, sample: (True, 10 * prompt + sample + 1)

    def expect(rank):
        work, history = work_of_round(), no_history(5)
        history.mean_tokens[3] = 7.0
        look_ahead = length_ahead(TrainState(), true_length) if schedule == "oracle" else None
        train_rl.expect_lengths(work, look_ahead, history, prompts_of(5), config)
        return [(group.expected_tokens, group.guessed) for group, _ in work]

    expected = {
        "arrival": [([], False)] * 5,
        "longest_first": [([7.0] * 4, place != 3) for place in range(5)],
        "oracle": [
            ([10.0 * place + s + 1 if place > 1 or s > 1 else 0.0 for s in range(4)], False)
            for place in range(5)
        ],
    }
    assert ranks(world_size).run(expect) == [expected[schedule]] * world_size


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
    "minibatches of what is left": ["train.minibatches_per_step=2", "zero_variance.drop=true"],
    "without balance": ["train.balance=false", "train.minibatches_per_step=2"],
}  # fmt: skip


def run_steps(schedule: str, mode: str) -> list[tuple]:
    """Of each step on this rank: the groups sampled, and those trained on with their minibatches."""
    config = config_of(
        f"rollout.schedule={schedule}", "rollout.group_size=4", "rollout.prompts_per_step=8", *MODES[mode]
    )
    rates = [0.0, 1.0, 0.5, 0.8] * 6
    state, history, answer, steps = TrainState(), no_history(24), hashed_answer(rates), []
    longer = lambda prompt, *where: (answer(prompt, *where)[0], answer(prompt, *where)[1] * (1 + prompt % 5))
    for _ in range(5):
        groups, outcomes, _ = train_rl.sample_groups(
            fake_generate(state, longer), length_ahead(state, longer), state, history, prompts_of(24), config
        )
        history.update(list(outcomes.values()), state.step, config.zero_variance.history_decay)
        trained, left = train_rl.drop_and_balance(groups, outcomes, config)
        state.step += 1
        batches = [(group.minibatch, *of_group) for group, of_group in zip(trained, contents(trained))]
        steps.append((contents(groups), batches, sorted(left)))
    return steps


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_schedule_changes_who_samples_and_not_what_is_trained_on(mode, world_size, ranks):
    if "minibatches" in mode and world_size == 3:
        world_size = 4
    fake, sampled, by_schedule = ranks(world_size), {}, {}
    for schedule in ("arrival", "longest_first", "oracle"):
        of_ranks = fake.run(lambda rank, schedule=schedule: run_steps(schedule, mode))
        sampled[schedule] = [[step[0] for step in steps] for steps in of_ranks]
        together = [sorted(sum(step, [])) for step in zip(*sampled[schedule])]
        trained = [[step[1:] for step in steps] for steps in of_ranks]
        by_schedule[schedule] = (together, trained)
    assert by_schedule["arrival"] == by_schedule["longest_first"] == by_schedule["oracle"]
    assert any(batches for batches, _ in by_schedule["oracle"][1][0])
    if world_size > 1:
        assert sampled["arrival"] != sampled["oracle"] != sampled["longest_first"], "schedules do differ"


# ---- micro-batches -----------------------------------------------------------------------------------------


def batch_of_lengths(lengths: list[list[int]], prompt_tokens: int) -> train_rl.RolloutBatch:
    """Groups of completions of these lengths."""
    groups = [
        train_rl.Group(
            i, 0, completions=[completion_of(n) for n in row], verdicts=[verdict_of(True)] * len(row)
        )
        for i, row in enumerate(lengths)
    ]
    return train_rl.collate(groups, prompts_of(1), [[1] * prompt_tokens])


def row_lengths(batch: train_rl.RolloutBatch) -> list[int]:
    return [len(p) + len(c) - 1 for p, c in zip(batch.prompt_ids, batch.completion_ids)]


@pytest.mark.parametrize("balance", ["true", "false"])
@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_hold_every_row_once_within_the_budget_and_are_as_many_on_all_ranks(
    seed, balance, ranks
):
    rng = random.Random(seed)
    budget, world_size = rng.choice([1, 20, 60, 200, 10**6]), rng.choice([1, 2, 3])
    config = config_of(f"train.micro_batch_tokens={budget}", f"train.balance={balance}")
    batches = [
        batch_of_lengths([[rng.randint(1, 60) for _ in range(rng.choice([0, 1, 7, 30]))]], 3)
        for _ in range(world_size)
    ]
    chosen = [rng.sample(range(len(b.prompts)), rng.randint(0, len(b.prompts))) for b in batches]
    split = ranks(world_size).run(
        lambda rank: train_rl.micro_batches_of(batches[rank], chosen[rank], config.train)
    )
    assert len({len(parts) for parts in split}) == 1
    for parts, rows, batch in zip(split, chosen, batches):
        lengths = row_lengths(batch)
        assert sorted(sum(parts, [])) == sorted(rows)
        assert balance == "true" or sum(parts, []) == rows, "as they come"
        for part in parts:
            assert len(part) < 2 or len(part) * max(lengths[row] for row in part) <= budget
        with_rows = [bool(part) for part in parts]
        assert with_rows == sorted(with_rows, reverse=True), "empty ones last"


def split_of_workload(num: int, balance: bool, ranks) -> tuple[float, list[list[list[int]]], list[list[int]]]:
    """Padding share of all grids of two ranks, micro-batches of each, row lengths of each.

    micro_batch_tokens is what about num micro-batches of a rank hold.
    """
    recipe = Recipe()
    lengths = Workload.make(recipe).lengths[0].tolist()
    total = sum(map(sum, lengths)) + recipe.num_prompts * recipe.group_size * (recipe.prompt_tokens - 1)
    config = config_of(
        f"train.balance={str(balance).lower()}", f"train.micro_batch_tokens={math.ceil(total / 2 / num)}"
    )

    def split(rank):
        groups = [
            train_rl.Group(
                i, 0, completions=[completion_of(n) for n in row], verdicts=[verdict_of(True)] * len(row)
            )
            for i, row in enumerate(lengths)
        ]
        outcomes = {group.place: group.outcome(False) for group in groups}
        own, _ = train_rl.drop_and_balance(groups[rank::2], outcomes, config)
        batch = train_rl.collate(own, prompts_of(1), [[1] * recipe.prompt_tokens])
        rows = list(range(len(batch.prompts)))
        return train_rl.micro_batches_of(batch, rows, config.train), row_lengths(batch)

    parts_of_ranks, lengths_of_ranks = zip(*ranks(2).run(split))
    grids = [
        len(part) * max(of_rank[row] for row in part)
        for parts, of_rank in zip(parts_of_ranks, lengths_of_ranks)
        for part in parts
        if part
    ]
    return 1 - total / sum(grids), list(parts_of_ranks), list(lengths_of_ranks)


@pytest.mark.parametrize("num", [4, 8, 16])
def test_little_of_the_grids_is_padding_on_a_heavy_tailed_workload(num, ranks):
    """Under a tenth with many micro-batches; with few, within 3 points of the best cut of the sorted rows.

    As they come, rows have more than a quarter of padding, and more than twice as much.
    """
    share, parts, lengths = split_of_workload(num, True, ranks)
    contrast, _, _ = split_of_workload(num, False, ranks)
    assert num - 1 <= len(parts[0]) <= 1.5 * num + 2
    assert contrast > 1 / 4 and contrast > 2 * share
    best = 1 - sum(map(sum, lengths)) / sum(smallest_grids(of, len(p)) for of, p in zip(lengths, parts))
    assert share < (0.1 if num == 16 else best + 0.03), f"{share:.3f}, best {best:.3f}"


def smallest_grids(lengths: list[int], num: int) -> int:
    """Tokens of the smallest grids that num contiguous parts of the sorted rows can have, by all cuts."""
    rows = sorted(lengths, reverse=True)
    of_parts = [0] + [math.inf] * len(rows)  # [rows placed], with the parts used so far
    for _ in range(num):
        of_parts = [0] + [
            min(of_parts[start] + rows[start] * (end - start) for start in range(end))
            for end in range(1, len(rows) + 1)
        ]
    return of_parts[-1]


@pytest.mark.parametrize("num", [4, 8, 16])
def test_the_tokens_of_a_rank_are_spread_over_its_micro_batches(num, ranks):
    """No grid is larger than the smallest limit that gives as many micro-batches would allow."""
    _, parts_of_ranks, lengths_of_ranks = split_of_workload(num, True, ranks)
    for parts, lengths in zip(parts_of_ranks, lengths_of_ranks):
        grids = [len(part) * max(lengths[row] for row in part) for part in parts]
        rows = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))

        def needed(limit: int, rows=rows, lengths=lengths) -> int:
            number, size, longest = 0, 0, 0
            for row in rows:  # the first row of a micro-batch is its longest
                if size and longest * (size + 1) <= limit:
                    size += 1
                else:
                    number, size, longest = number + 1, 1, lengths[row]
            return number

        assert all(parts) and needed(max(grids)) <= len(parts) < needed(max(grids) - 1)


# ---- carried completions, rewards in the order, verdicts that come late ------------------------------------


def cutting_generate(state, answer, tokens_per_step: dict, share: int):
    """A fake engine that gives the completions of a prompt so many tokens in a step, then stops."""

    def generate(work, quota: int) -> None:
        assert quota == share - sum(not samples for _, samples in work), "complete ones count"
        for group, samples in work:
            for sample in samples:
                right, length = answer(group.prompt_index, 0, group.prompt_index, sample)
                begun = group.completions[sample] if sample < len(group.completions) else None
                so_far = len(begun.token_ids) if begun else 0
                have = min(length, so_far + tokens_per_step[state.step, group.prompt_index])
                spans = (*(begun.spans if begun else ()), (state.step, have - so_far))
                ended = have == length
                completion = Completion(
                    [5] * have, [-0.5] * have, "stop" if ended else "cut", 0.0, spans=spans
                )
                group.put(sample, completion, verdict_of(right) if ended else None)

    return generate


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_groups_are_carried_until_they_are_complete_and_none_is_lost(seed, world_size, ranks):
    """Every prompt that was begun is trained on once, or is still carried."""
    rng = random.Random(seed)
    config = config_of("rollout.prompts_per_step=4", "rollout.group_size=3", "rollout.overprovision=0.5")
    pace = {(step, prompt): rng.choice([1, 3, 9]) for step in range(12) for prompt in range(300)}
    answer = hashed_answer([0.5] * 300, seed)

    def run(rank):
        state, history, carried, steps = TrainState(), no_history(300), [], []
        for _ in range(12):
            generate = cutting_generate(state, answer, pace, share=4 // world_size)
            complete, carried, outcomes, account = train_rl.sample_ahead(
                generate, carried, state, history, prompts_of(300), config
            )
            history.update(list(outcomes.values()), state.step, 0.1)
            steps.append(([g.prompt_index for g in complete], [g.prompt_index for g in carried], outcomes))
            for group in complete:
                lengths = [answer(group.prompt_index, 0, group.prompt_index, i)[1] for i in range(3)]
                assert [len(c.token_ids) for c in group.completions] == lengths
                assert all(sum(n for _, n in c.spans) == len(c.token_ids) for c in group.completions)
            batch = train_rl.collate(complete, prompts_of(300), [[1]] * 300, state.step)
            for row, completion in enumerate(c for g in complete for c in g.completions):
                lags = [state.step - version for version, number in completion.spans for _ in range(number)]
                assert batch.policy_lag[row, : len(lags)].tolist() == lags
            state.step += 1
        return steps, state.consumed_prompts

    results = ranks(world_size).run(run)
    consumed = results[0][1]
    trained = [prompt for steps, _ in results for complete, _, _ in steps for prompt in complete]
    left = [prompt for steps, _ in results for prompt in steps[-1][1]]
    assert sorted(trained + left) == sorted(set(trained + left)) and len(trained + left) == consumed
    for steps in zip(*(steps for steps, _ in results)):
        assert len({tuple(outcomes) for _, _, outcomes in steps}) == 1, "all ranks know the same"
        assert {len(complete) + len(carried) for complete, carried, _ in steps} == {6 // world_size}
        assert all(len(complete) <= 4 // world_size for complete, _, _ in steps)


def test_a_group_that_was_begun_survives_being_saved(tmp_path):
    begun = Completion([5, 6], [-0.5, -1.0], "cut", 0.25, torch.zeros(4, 2, 2, dtype=torch.uint8), ((3, 2),))
    whole = Completion([7], [-0.1], "stop", 0.5, None, ((3, 1),))
    group = train_rl.Group(4, 9, [begun, whole], [None, Verdict(1.0, "ok")], 1, [5.0, 6.0], True)
    torch.save({"carried": [asdict(group)]}, tmp_path / "rank.pt")
    (saved,) = torch.load(tmp_path / "rank.pt", weights_only=True)["carried"]
    again = train_rl.Group.from_dict(saved)
    assert torch.equal(again.completions[0].routed_experts, begun.routed_experts)
    plain = {"routed_experts": None, "spans": ()}
    assert [tuple(map(tuple, c.spans)) for c in again.completions] == [((3, 2),), ((3, 1),)]
    assert [replace(c, **plain) for c in again.completions] == [
        replace(c, **plain) for c in group.completions
    ]
    assert replace(again, completions=[]) == replace(group, completions=[])
    assert group.unfinished(3) == [0, 2] and group.expected(0) == 3.0 and group.expected(1) == 5.0


@pytest.mark.parametrize("aware", [True, False])
@pytest.mark.parametrize("schedule", ["arrival", "longest_first"])
def test_seconds_of_rewards_count_as_tokens_of_the_pace_of_the_engine(schedule, aware):
    config = config_of(f"rollout.schedule={schedule}", f"rollout.reward_aware={aware}")
    prompts = [Prompt("x", "1", kind, "set") for kind in ("exact", "my:judge", "new:judge")]
    requests = [Request([1], 0, 1.0, 9, expected_tokens=4.0) for _ in prompts]
    engine, pool = (
        SimpleNamespace(seconds_per_step=0.01),
        SimpleNamespace(seconds={"exact": 1e-4, "my:judge": 0.3}),
    )
    counted = train_rl.count_rewards(requests, prompts, engine, pool, config)
    expected = [0.02, 60.0, 0.0] if schedule != "arrival" and aware else [0.0] * 3
    assert [request.reward_tokens for request in counted] == pytest.approx(expected)
    assert [replace(request, reward_tokens=0.0) for request in counted] == requests
    engine.seconds_per_step = math.inf  # before the first step nothing is known
    assert [r.reward_tokens for r in train_rl.count_rewards(requests, prompts, engine, pool, config)] == [
        0.0
    ] * 3


@pytest.mark.parametrize("world_size", [1, 3])
def test_late_verdicts_reach_the_ranks_that_hold_the_groups(world_size, ranks):
    """As if they had been waited for: verdicts of all groups, outcomes of all ranks."""
    config = config_of("rollout.prompts_per_step=9", "rollout.group_size=4")
    answer = hashed_answer([0.2, 0.9, 0.5], timeout_prob=0.2)

    def late(rank, wait: bool):
        state, history, pending = TrainState(), no_history(9), {}

        def generate(work):
            for group, samples in work:
                for sample in samples:
                    right, length = answer(group.prompt_index % 3, 0, group.place, sample)
                    pending[group.place, sample] = verdict_of(right)
                    group.put(sample, completion_of(length), verdict_of(right) if wait else None)

        sampled, outcomes, _ = train_rl.sample_groups(
            generate, lambda work: [], state, history, prompts_of(9), config
        )
        groups, _ = train_rl.drop_and_balance(sampled, outcomes, config)
        if not wait:
            assert not any(o.valid for o in outcomes.values())
            pool = SimpleNamespace(collect=lambda: pending)
            outcomes = train_rl.settle(pool, sampled + groups, outcomes, dense=False)
        return contents(groups), contents(sampled), outcomes, train_rl.verdicts_of(groups)[1].tolist()

    fake = ranks(world_size)
    assert fake.run(lambda rank: late(rank, False)) == fake.run(lambda rank: late(rank, True))


# ---- two real ranks ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gloo(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("gloo")
    done = torchrun(2, ROOT / "tests" / "schedule_worker.py", folder, timeout_s=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "results.pt", weights_only=False)


def equal(one, other) -> bool:
    """As ==, of tensors all elements and the dtype."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        same = type(one) is type(other) and len(one) == len(other)
        return same and all(map(equal, one, other))
    if hasattr(one, "__dict__"):
        return type(one) is type(other) and equal(list(vars(one).items()), list(vars(other).items()))
    return one == other


@pytest.mark.parametrize("case", ["objects", "tensors", "one way", "nothing", "stays", "completions"])
def test_exchange_brings_to_each_rank_its_own_parcel_then_that_of_the_other(case, gloo):
    for rank in range(2):
        own, other = (schedule_worker.parcels(case, sender)[rank] for sender in (rank, 1 - rank))
        assert equal(gloo["exchange"][case][rank], own + other)


def test_the_bytes_of_moved_routes_are_those_that_were_sent(gloo):
    arrived = gloo["exchange"]["completions"][1]
    routes = [completion.routed_experts for completion in arrived]
    sent = [c.routed_experts for sender in (1, 0) for c in schedule_worker.parcels("completions", sender)[1]]
    assert len(routes) == len(sent) > 3
    assert [ids.numpy().tobytes() for ids in routes] == [ids.numpy().tobytes() for ids in sent]


def test_two_gloo_ranks_have_as_many_micro_batches(gloo):
    many, few = gloo["micro_batches"]
    assert len(many) == len(few) > 2
    assert sorted(sum(many, [])) == list(range(9)) and sorted(sum(few, [])) == [0, 1]


# ---- bypass ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio_level, ratio_form", [("token", "geometric"), ("entropy_group", "literal")])
@pytest.mark.parametrize("clip_mode", ["fixed", "weight", "entropy_adaptive"])
def test_bypass_is_the_loss_with_the_sampler_as_the_old_policy(ratio_level, ratio_form, clip_mode, float64):
    config = loss_config(
        old_policy="rollout", ratio_level=ratio_level, ratio_form=ratio_form, clip_mode=clip_mode, kl_coef=0.1
    )
    different = 0
    for seed in range(6):
        case = random_case(seed, 0.4)
        loss, gradient, statistics = run_loss(case, config, padding=seed % 3)
        settings = reference_settings(config, case)
        lists = [case[name] for name in ("logprobs", "rollout_logprobs", "advantages", "entropies")]
        assert_close(loss, -reference.policy_objective(*lists, case["ref_logprobs"], settings))
        slopes = reference.policy_objective_slope(*lists, case["ref_logprobs"], settings)
        assert_close(gradient, [-x for row in slopes for x in row])
        lists[1] = case["old_logprobs"]
        trainer = -reference.policy_objective(*lists, case["ref_logprobs"], settings)
        different += abs(loss.item() - trainer) > 1e-3
        apart = [a - b for name in zip(case["old_logprobs"], case["rollout_logprobs"]) for a, b in zip(*name)]
        assert_close(statistics["abs_dlogp"], [abs(d) for d in apart])
    assert different > 3


@pytest.mark.parametrize("minibatch", [0, 1])
@pytest.mark.parametrize("old_policy", ["trainer", "rollout"])
def test_the_distance_to_the_sampler_is_left_out_where_the_policy_has_moved_unseen(
    old_policy, minibatch, float64
):
    """Without a pass for old log-probabilities it is known of the first update only, from its own forward."""
    case = random_case(1, 0.4, [3, 5])
    batch, config = batch_of(case), loss_config(old_policy=old_policy)
    batch.old_logprobs, batch.ref_logprobs = None, None
    batch.minibatch = torch.full_like(batch.minibatch, minibatch)
    logprobs, counts = batch.rollout_logprobs + 0.25, torch.tensor([2, 8])
    _, statistics = train_rl.micro_batch_loss(
        logprobs, batch.entropy, batch, [0, 1], counts, LOG_VOCAB, config
    )
    assert ("abs_dlogp" in statistics) == ("mismatch_k3" in statistics) == (minibatch == 0)
    if minibatch == 0:
        assert_close(statistics["abs_dlogp"][batch.response_mask], [0.25] * 8)


# ---- the reward pool ---------------------------------------------------------------------------------------

OWN = """
import os, signal, sys, time

def given(completion, answer): return float(answer)
def equal(completion, answer): return completion == answer
def raises(completion, answer): raise KeyError("no such test")
def text(completion, answer): return "half"
def hangs(completion, answer):
    while True: pass
def deaf(completion, answer):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True: time.sleep(1)
def aborts(completion, answer): os.abort()
def leaves(completion, answer): sys.exit(0)
def eats(completion, answer):
    kept = []
    while True: kept.append(bytearray(1 << 24))
def floods(completion, answer):
    for _ in range(100):
        os.write(1, b"x" * (1 << 20)); sys.stdout.write("y" * 1000); os.write(2, b"z" * (1 << 20))
    return 1.0
def sleeps(completion, answer):
    time.sleep(float(completion)); return 1.0
"""
OK = Verdict(1.0, "ok", pass_frac=1.0)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The module `own_rewards` where the workers find it."""
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def scored(*items: tuple, **options) -> list[Verdict]:
    with RewardPool(**{"num_workers": 2, "timeout_s": 5.0} | options) as pool:
        for key, item in enumerate(items):
            pool.submit(key, *item)
        return list(pool.collect().values())


def test_a_function_of_your_own_gives_a_share_and_one_is_right(own):
    shares = [0, 0.25, 1 - 2**-53, 1]
    verdicts = scored(*(("own_rewards:given", "x", repr(share)) for share in shares))
    assert verdicts == [Verdict(0.0, "wrong", pass_frac=share) for share in shares[:3]] + [OK]


@pytest.mark.parametrize(
    "kind, answer, reason",
    [
        ("own_rewards:given", "1.001", "gave 1.001, not a score"),
        ("own_rewards:given", "-0.1", "gave -0.1, not a score"),
        ("own_rewards:given", "nan", "gave nan, not a score"),
        ("own_rewards:given", "inf", "gave inf, not a score"),
        ("own_rewards:text", "", "could not convert string to float"),
        ("own_rewards:raises", "", "no such test"),
        ("own_rewards:absent", "", "AttributeError"),
        ("no_such_module:f", "", "No module named 'no_such_module'"),
    ],
)
def test_what_is_no_score_is_an_error_with_its_reason(kind, answer, reason, own):
    (verdict,) = scored((kind, "x", answer), num_workers=1)
    assert (verdict.reward, verdict.status, verdict.pass_frac) == (0.0, "error", 0.0)
    assert reason in verdict.detail and len(verdict.detail) <= 200


@pytest.mark.parametrize(
    "name, status, restarts",
    [("hangs", "timeout", 1), ("aborts", "error", 1), ("leaves", "error", 1), ("eats", "error", 0),
     ("floods", "ok", 0)],
)  # fmt: skip
def test_a_function_that_misbehaves_costs_its_own_item_only(name, status, restarts, own):
    """Within the limit of 2 s and what a fresh worker takes to start, on a machine with other work."""
    start = time.monotonic()
    with RewardPool(1, timeout_s=2.0, memory_bytes=1 << 29) as pool:
        pool.submit("before", "exact", "a", "a")
        pool.submit("bad", f"own_rewards:{name}", "x", "")
        for key in range(20):
            pool.submit(key, "exact", "a", "a")
        pool.submit("after", "own_rewards:given", "x", "1")
        verdicts = pool.collect()
        assert pool.num_restarts == restarts and len(pool.latencies) == 23
    assert verdicts.pop("bad").status == status
    assert set(verdicts.values()) == {OK} and len(verdicts) == 22
    assert time.monotonic() - start < 2 + 20


def test_a_function_that_ignores_the_alarm_is_killed_after_the_grace(own, monkeypatch):
    monkeypatch.setattr(reward, "GRACE_S", 1.0)
    with RewardPool(1, timeout_s=0.5) as pool:
        pool.submit("warm", "own_rewards:given", "x", "1")
        pool.collect()
        pool.submit("deaf", "own_rewards:deaf", "x", "")
        pool.submit("after", "exact", "a", "a")
        verdicts = pool.collect()
        assert pool.num_restarts == 1
    assert verdicts["deaf"].status == "timeout" and verdicts["after"] == OK


def test_rules_do_not_wait_for_slow_items_that_came_before(own):
    """One worker is busy with the first slow item; then the rules are due, and the other slow items last."""
    with RewardPool(1, timeout_s=10.0) as pool:
        for key in range(3):
            pool.submit(("slow", key), "own_rewards:sleeps", "0.2", "")
        for key in range(40):  # more than one window
            pool.submit(("rule", key), "exact", "a", "a")
        order = []
        while pool.poll():
            order += [k for k, v in pool._verdicts.items() if v is not None and k not in order]
        order += [k for k in pool._verdicts if k not in order]
        assert set(pool.collect().values()) == {OK}
    first_slow, second_slow = order.index(("slow", 0)), order.index(("slow", 1))
    rules = [order.index(("rule", key)) for key in range(40)]
    assert first_slow < min(rules) < max(rules) < second_slow < order.index(("slow", 2))


def test_a_full_backlog_makes_submit_wait_and_is_never_exceeded(own):
    with RewardPool(1, timeout_s=10.0, max_backlog=3) as pool:
        pool.submit("warm", "own_rewards:sleeps", "0", "")
        pool.collect()
        start, outstanding = time.monotonic(), []
        for key in range(9):
            pool.submit(key, "own_rewards:sleeps", "0.05", "")
            outstanding.append(sum(verdict is None for verdict in pool._verdicts.values()))
        waited = time.monotonic() - start
        assert len(pool.collect()) == 9
    assert max(outstanding) == 3, "it is used, and never exceeded"
    assert waited >= 6 * 0.05, "six had to be finished before the ninth was taken"


def test_latencies_are_of_every_item_from_submit_to_verdict(own):
    """In order of the verdicts; an item behind another waits for it too."""
    start = time.monotonic()
    with RewardPool(1, timeout_s=10.0) as pool:
        for key in range(3):
            pool.submit(key, "own_rewards:sleeps", "0.1", "")
        pool.submit("rule", "exact", "a", "a")
        pool.collect()
        wall, latencies = time.monotonic() - start, pool.latencies
    assert len(latencies) == 4
    first, rule, second, third = latencies
    assert 0.1 <= first and second >= 0.2 and third >= 0.3
    assert first <= second <= third <= wall and 0 < rule <= wall


def byte_level_tokenizer():
    """A BPE over bytes, so that a token may be part of a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    texts = [
        "".join(chr(rng.choice([97, 98, 32, 0xE9, 0x4E2D, 0x1F600])) for _ in range(40)) for _ in range(50)
    ]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


@pytest.mark.parametrize("make", [build_tokenizer, byte_level_tokenizer])
def test_workers_decode_tokens_as_the_tokenizer_does(make, own):
    """Random ids, special ones and parts of characters among them, are scored by equality with the text."""
    tokenizer, rng = make(), random.Random(1)
    ids = [[rng.randrange(len(tokenizer)) for _ in range(rng.randint(0, 12))] for _ in range(150)]
    ids += [[tokenizer.eos_token_id], [*ids[0], tokenizer.eos_token_id]]
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    if make is byte_level_tokenizer:
        assert sum("\ufffd" in text for text in texts) > 20, "parts of characters"
    items = [("own_rewards:equal", row, text) for row, text in zip(ids, texts)]
    of_ids = [("exact", row, "abc") for row in ids]
    of_texts = [("exact", text, "abc") for text in texts]
    verdicts = scored(*items, *of_ids, *of_texts, tokenizer=decoder_json(tokenizer))
    assert verdicts[: len(ids)] == [OK] * len(ids)
    assert verdicts[len(ids) : 2 * len(ids)] == verdicts[2 * len(ids) :]


def test_token_ids_need_a_tokenizer():
    with RewardPool(1) as pool, pytest.raises(ValueError, match="token ids need a pool with a tokenizer"):
        pool.submit(0, "exact", [1, 2], "a")


# ---- checkpoints in the background -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    """A gloo group of one."""
    started = not dist.is_initialized()
    if started:
        store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    if started:
        dist.destroy_process_group()


@pytest.fixture
def writer(process_group, tmp_path):
    save_small_moe(tmp_path / "model")
    policy = moe_model.Policy(moe_model.load_config(tmp_path / "model"), None)
    moe_model.load_hf(policy, tmp_path / "model")
    adamw = torch.optim.AdamW(policy.parameters(), lr=0.1)
    engine = SimpleNamespace(module=policy, optimizer=SimpleNamespace(optimizer=adamw))
    config = config_of(f"run.dir={tmp_path / 'run'}", "checkpoint.keep=2")
    return CheckpointWriter(engine, build_tokenizer(), config)


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_of_the_state_at_its_start(writer, monkeypatch):
    """What the loop goes on with, record, random numbers and place in the folder, comes after it."""
    go_on, save_hf = threading.Event(), moe_model.save_hf

    def slow_save(*arguments):
        assert go_on.wait(30)
        save_hf(*arguments)

    monkeypatch.setattr(moe_model, "save_hf", slow_save)
    history = {"solved": torch.tensor([1.0, 2.0]), "prompts": "digest"}
    torch.manual_seed(5)
    at_start = torch.get_rng_state()
    writer.start({"step": 3, "account": {"a": 1}}, history, [{"place": 4}])
    history["solved"] += 7  # start() has returned although nothing is written
    torch.rand(10)
    assert not (writer.folder / "step_000003").exists()
    go_on.set()
    writer.finish()
    assert names_in(writer.folder) == ["step_000003"]
    folder = writer.folder / "step_000003"
    saved = torch.load(folder / "history.pt", weights_only=True)
    assert saved["solved"].tolist() == [1.0, 2.0] and saved["prompts"] == "digest"
    shard = torch.load(folder / "rank_00000.pt", weights_only=True)
    assert torch.equal(shard["torch_rng"], at_start) and shard["carried"] == [{"place": 4}]
    assert json.loads((folder / "state.json").read_text())["state"] == {"step": 3, "account": {"a": 1}}
    loaded = moe_model.Policy(moe_model.load_config(folder / "model"), None)
    moe_model.load_hf(loaded, folder / "model")
    assert all(map(torch.equal, loaded.parameters(), writer.engine.module.parameters()))
    writer.finish()  # without a checkpoint under way it does nothing
    assert names_in(writer.folder) == ["step_000003"]


def test_a_checkpoint_that_cannot_be_written_is_an_error_at_the_end_and_the_earlier_ones_stay(
    writer, monkeypatch
):
    writer.start({"step": 1}, {}, [])
    writer.finish()

    def full(*arguments):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(moe_model, "save_hf", full)
        writer.start({"step": 2}, {}, [])
        with pytest.raises(RuntimeError, match="step_000002 could not be written .rank 0: No space left"):
            writer.finish()
    assert names_in(writer.folder) == ["step_000001"]
    writer.start({"step": 2}, {}, [])  # the problem is forgotten
    writer.finish()
    writer.start({"step": 3}, {}, [])
    writer.finish()
    assert names_in(writer.folder) == ["step_000002", "step_000003"], "checkpoint.keep is 2"


@pytest.mark.parametrize(
    "row, step, evaluated_step, redone",
    [
        ({"step": 4, "reward": 1.0}, 4, 2, False),
        ({"step": 5, "reward": 1.0}, 4, 2, True),
        ({"step": 4, "eval/a/accuracy": 1.0}, 4, 2, True),
        ({"step": 4, "eval/a/accuracy": 1.0}, 4, 4, False),
        ({"step": 2, "eval/a/accuracy": 1.0}, 4, 2, False),
        ({"step": 0, "eval/a/accuracy": 1.0}, 0, -1, True),
        ({"step": 0, "eval/a/accuracy": 1.0}, 0, 0, False),
    ],
)
def test_a_row_is_dropped_if_the_run_that_goes_on_writes_it_anew(row, step, evaluated_step, redone):
    """An evaluation rides along with the next rollout, so it may be missing at its own checkpoint."""
    assert is_redone(row, {"step": step, "evaluated_step": evaluated_step}) == redone
