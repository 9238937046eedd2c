"""The order and distribution of work: waiting line, dealing, micro-batches, and exchanges between ranks."""

import functools
import itertools
import math
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_ranks import FakeRanks
from helpers import RankSuite, make_config, make_group, make_prompts
from rank_worker import PARCELS, parcels

import train_rl
from rollout import Request
from runtime import schedule
from runtime.schedule import (
    CacheRoom,
    WaitingLine,
    deal_groups,
    longest_first,
    split_micro_batches,
    split_rows,
    verdict_tokens,
)

# ---- the waiting line --------------------------------------------------------------------------------------


class NaiveLine:
    """Implements the description of WaitingLine; every expectation is computed anew each time."""

    def __init__(self, requests: list[Request], slots: int):
        self.requests = requests
        self.waiting = list(range(len(requests)))
        self.lengths = {}  # {group: completion lengths}
        feeders = [r for r in requests if r.work_tokens > r.expected_tokens]
        num_tokens = sum(r.expected_tokens for r in requests if r not in feeders)
        self.long = num_tokens / slots if feeders else math.inf
        self.pioneers = set()
        for index, request in enumerate(requests):
            siblings = [r for r in requests[:index] if r.group == request.group]
            if request.guessed and not siblings:
                self.pioneers.add(index)

    def tokens(self, index: int) -> float:
        request = self.requests[index]
        if request.guessed and self.lengths.get(request.group):
            return statistics.fmean(self.lengths[request.group])
        return request.max_new_tokens if request.guessed else request.expected_tokens

    def pop(self) -> int:
        tokens = {index: self.tokens(index) for index in self.waiting}
        lengths = {index: tokens[index] + self.requests[index].latency_tokens for index in self.waiting}
        pioneers = [index for index in self.waiting if index in self.pioneers]
        late = [index for index in self.waiting if self.requests[index].waited]
        feeders = [i for i in self.waiting if self.requests[i].work_tokens > tokens[i]]
        long = [i for i in self.waiting if i not in feeders and tokens[i] > self.long]
        if late:
            first = min(late, key=lambda index: (-self.requests[index].waited, index))
        elif pioneers:
            first = min(pioneers)
        elif feeders and not long:
            first = min(feeders, key=lambda index: (tokens[index], index))
        else:
            first = max(long or self.waiting, key=lambda index: (lengths[index], -index))
        self.waiting.remove(first)
        return first

    def record_length(self, index: int, num_tokens: int) -> None:
        self.lengths.setdefault(self.requests[index].group, []).append(num_tokens)


def random_requests(rng: random.Random) -> list[Request]:
    requests = []
    for group in rng.sample(range(50), rng.randint(1, 8)):
        tokens = rng.choice([0.0, 4.0, 9.5, rng.uniform(0, 20)])
        waited = rng.choice([0, 0, 0, 1, 2])
        guessed = rng.random() < 0.5 and not waited
        for _ in range(rng.randint(1, 5)):
            expected = rng.choice([tokens, tokens, rng.randint(0, 9)])  # siblings may differ
            latency, work = rng.choice([(0.0, 0.0), (0.0, 0.0), (4.0, 1.0), (7.25, 9.0), (4.0, 20.0)])
            requests.append(
                Request(
                    [1], 0, 1.0, rng.choice([9, 9, 12]), group=group, expected_tokens=float(expected),
                    guessed=guessed, latency_tokens=latency, work_tokens=work, waited=waited,
                )
            )  # fmt: skip
    if rng.random() < 0.3:
        rng.shuffle(requests)  # siblings are then no neighbours
    return requests


@pytest.mark.parametrize("seed", range(200))
def test_the_waiting_line_follows_its_description(seed):
    """Requests end in random order while others start. Lengths are whole, so that means are exact and tie."""
    rng = random.Random(seed)
    requests = random_requests(rng)
    slots = rng.randint(1, 3)
    line, naive = WaitingLine(requests, slots), NaiveLine(requests, slots)
    running = []
    while line or running:
        assert len(line) == len(naive.waiting) and bool(line) == bool(naive.waiting)
        if line and rng.random() < 0.6:
            index = line.pop()
            assert index == naive.pop()
            running.append(index)
        elif running:
            index = running.pop(rng.randrange(len(running)))
            tokens = rng.choice([0, 4, 9, rng.randint(1, 20)])
            line.record_length(index, tokens)
            naive.record_length(index, tokens)
    assert not naive.waiting


# ---- room for keys and values ------------------------------------------------------------------------------


def blocks_by_hand(requests, running, lengths, mean, block_size, shares) -> int:
    """Return the number of blocks that the running requests are expected to end with.

    lengths: {index: tokens so far}. Blocks have names, so that a shared block counts once.
    """
    blocks = set()
    for index in running:
        request = requests[index]
        expected = mean if request.guessed or request.expected_tokens == 0 else request.expected_tokens
        tokens = min(max(expected, lengths.get(index, 0)) + 1, request.max_new_tokens)
        length = len(request.prompt_ids) + tokens
        for block in range(math.ceil(length / block_size)):
            in_prompt = (block + 1) * block_size < len(request.prompt_ids)
            blocks.add((tuple(request.prompt_ids) if shares and in_prompt else index, block))
    return len(blocks)


@pytest.mark.parametrize("seed", range(100))
def test_the_room_for_keys_and_values_follows_its_description(seed):
    """Requests start in order if there is room, and end with any length, whatever was expected."""
    rng = random.Random(seed)
    requests = random_requests(rng)
    shares = rng.random() < 0.5
    block_size = rng.choice([1, 4, 5])
    num_blocks = rng.randint(1, 40)
    prompts = [list(range(rng.randint(1, 20))) for _ in range(3)]
    requests = [replace(request, prompt_ids=rng.choice(prompts)) for request in requests]
    total_and_number = rng.choice([(0, 0), (40, 4)])  # of completions of earlier rounds
    room = CacheRoom(requests, num_blocks, block_size, shares, total_and_number)
    ended = [10] * total_and_number[1]
    waiting = list(range(len(requests)))
    lengths = {}
    while waiting or lengths:
        for index in [*waiting]:
            total = sum(ended) + sum(lengths.values())
            mean = total / len(ended) if ended else math.inf
            num_needed = blocks_by_hand(requests, [*lengths, index], lengths, mean, block_size, shares)
            if not lengths or num_needed <= num_blocks:
                assert room.has_room_for(index)
                room.start(index)
                lengths[index] = 0
                waiting.remove(index)
            else:
                assert not room.has_room_for(index)
                break  # the request stays first in line until a running request ends
        for index in [*lengths]:
            lengths[index] += 1
        room.take_step()
        for index in [i for i, n in lengths.items() if n == requests[i].max_new_tokens or rng.random() < 0.1]:
            room.end(index, lengths[index])
            ended.append(lengths.pop(index))


# ---- groups with verdicts that take time -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_groups_are_dealt_by_tokens_and_verdicts_as_described(seed):
    """With initial loads, many equal groups, and groups that only need verdicts."""
    rng = random.Random(seed)
    num_ranks, num_groups = rng.randint(1, 5), rng.randint(0, 20)
    tokens = [rng.choice([0.0, 1.0, 2.0, float(rng.randint(0, 9))]) for _ in range(num_groups)]
    work = [rng.choice([0.0, 0.0, 1.0, float(rng.randint(0, 12))]) for _ in range(num_groups)]
    initial = [(float(rng.randint(0, 6)), float(rng.randint(0, 6))) for _ in range(num_ranks)]
    initial = rng.choice([None, initial])
    loads = list(initial or [(0.0, 0.0)] * num_ranks)
    expected = [None] * num_groups
    for group in sorted(range(num_groups), key=lambda g: (-max(tokens[g], work[g]), g)):
        sums = [(engine + tokens[group], workers + work[group]) for engine, workers in loads]
        rank = min(range(num_ranks), key=lambda r: (max(sums[r]), sum(sums[r]), r))
        expected[group] = rank
        loads[rank] = sums[rank]
    assert deal_groups(tokens, work, num_ranks, initial) == expected
    engine_loads = [engine for engine, _ in initial] if initial else None
    no_work = [(engine, 0.0) for engine in engine_loads] if initial else None
    without_verdicts = deal_groups(tokens, [0.0] * num_groups, num_ranks, no_work)
    assert without_verdicts == longest_first(tokens, num_ranks, engine_loads)


def test_a_verdict_costs_the_tokens_that_the_engine_generates_meanwhile():
    """By hand: 0.3 s are 30 steps of 10 ms; at 1,600 tokens a second, 480 tokens, shared by 8 verdicts."""
    assert verdict_tokens(0.3, 0.01, 1600.0, 8) == pytest.approx((60.0, 60.0))
    assert verdict_tokens(0.3, math.inf, 0.0, 8) == (0.0, 0.0), "before the first step"


# ---- micro-batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 7, 64, 300, 10**6])
def test_rows_are_split_in_their_order_within_the_budget(max_tokens):
    rng = random.Random(0)
    for size in (0, 1, 2, 50):
        lengths = [rng.randint(1, 100) for _ in range(2 * size)]
        rows = rng.sample(range(2 * size), size)
        micro_batches = split_rows(lengths, rows, max_tokens)
        assert [row for part in micro_batches for row in part] == rows
        for part in micro_batches:
            assert part and (len(part) == 1 or len(part) * max(lengths[row] for row in part) <= max_tokens)
        for part, following in itertools.pairwise(micro_batches):
            extended = [*part, following[0]]
            assert len(extended) * max(lengths[row] for row in extended) > max_tokens


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_hold_every_row_once_and_are_equally_many_on_all_ranks(seed, balance, ranks):
    rng = random.Random(seed)
    budget = rng.choice([1, 20, 60, 200, 10**6])
    world_size = rng.choice([1, 2, 3])
    lengths_of_ranks = [
        [rng.randint(1, 60) + 2 for _ in range(rng.choice([0, 1, 7, 30]))] for _ in range(world_size)
    ]
    rows_of_ranks = [rng.sample(range(len(rows)), rng.randint(0, len(rows))) for rows in lengths_of_ranks]
    split = ranks(world_size).run(
        lambda rank: split_micro_batches(lengths_of_ranks[rank], rows_of_ranks[rank], budget, balance)
    )
    assert len({len(parts) for parts in split}) == 1
    for parts, rows, lengths in zip(split, rows_of_ranks, lengths_of_ranks):
        assert sorted(sum(parts, [])) == sorted(rows)
        assert balance or sum(parts, []) == rows, "without balance, in their order"
        for part in parts:
            assert len(part) < 2 or len(part) * max(lengths[row] for row in part) <= budget
        has_rows = [bool(part) for part in parts]
        assert has_rows == sorted(has_rows, reverse=True), "empty micro-batches come last"


def num_micro_batches(lengths: list[int], limit: int) -> int:
    """Return the number of micro-batches that sorted rows need with this limit of tokens."""
    number = size = longest = 0
    for length in sorted(lengths, reverse=True):  # the first row of a micro-batch is its longest
        if size and longest * (size + 1) <= limit:
            size += 1
        else:
            number += 1
            size = 1
            longest = length
    return number


def split_of_workload(num: int, balance: bool, ranks) -> list[tuple[list[list[int]], list[int]]]:
    """Return the micro-batches and the row lengths of each of two ranks.

    The token limit of a micro-batch is chosen so that a rank has about `num` micro-batches.
    """
    rng = np.random.default_rng(0)  # 32 prompts x 8 completions; long prompts have long completions
    logs = rng.standard_normal((32, 1)) + 0.4 * rng.standard_normal((6, 32, 8))[0]
    lengths = (64 * np.exp(logs)).round().clip(1, 490).astype(int).tolist()
    prompt_tokens = 12
    total = sum(map(sum, lengths)) + 32 * 8 * (prompt_tokens - 1)
    config = make_config(f"train.balance={balance}")

    def split(rank):
        groups = [make_group(i, 0, row, [True] * len(row)) for i, row in enumerate(lengths)]
        outcomes = {group.slot: group.outcome(False) for group in groups}
        trained, _ = train_rl.drop_and_deal(groups[rank::2], outcomes, config)
        batch = train_rl.collate(trained, make_prompts(1), [[1] * prompt_tokens])
        row_lengths = schedule.sequence_lengths(batch)
        assert row_lengths == [prompt_tokens + len(ids) - 1 for ids in batch.completion_ids]
        rows = list(range(len(row_lengths)))
        return split_micro_batches(row_lengths, rows, math.ceil(total / 2 / num), balance), row_lengths

    return ranks(2).run(split)


def padded_sizes(parts: list[list[int]], lengths: list[int]) -> list[int]:
    return [len(part) * max(lengths[row] for row in part) for part in parts if part]


@pytest.mark.parametrize("num", [4, 8, 16])
def test_balanced_micro_batches_are_even_and_have_little_padding(num, ranks):
    """A smaller limit than the largest micro-batch would need more micro-batches.

    With 16 micro-batches, less than a tenth is padding. Without balance, more than a quarter, and more than
    doubled.
    """

    def padding(split) -> float:
        sizes = sum(sum(padded_sizes(*of_rank)) for of_rank in split)
        return 1 - sum(sum(lengths) for _, lengths in split) / sizes

    balanced = split_of_workload(num, True, ranks)
    for parts, lengths in balanced:
        largest = max(padded_sizes(parts, lengths))
        assert all(parts) and num - 1 <= len(parts) <= 1.5 * num + 2
        assert num_micro_batches(lengths, largest) <= len(parts) < num_micro_batches(lengths, largest - 1)
    unbalanced = padding(split_of_workload(num, False, ranks))
    assert num < 16 or padding(balanced) < 0.1
    assert unbalanced > max(1 / 4, 2 * padding(balanced))


# ---- real ranks --------------------------------------------------------------------------------------------
SUITES = {num: RankSuite("schedule", num, lambda folder: None) for num in (1, 2)}


def equal(one, other) -> bool:
    """Compare like ==, and tensors by dtype and all elements."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "__dict__"):
        return type(one) is type(other) and equal(list(vars(one).items()), list(vars(other).items()))
    return one == other


@pytest.mark.slow
@pytest.mark.parametrize("case", PARCELS)
def test_exchange_brings_each_rank_its_own_parcel_and_then_the_other_ranks_parcel(case):
    for rank in range(2):
        expected = parcels(case, rank)[rank] + parcels(case, 1 - rank)[rank]
        assert equal(SUITES[2].results()[rank]["exchange"][case], expected)


def test_an_exchange_on_gpus_stays_in_host_memory(monkeypatch):
    """A tensor for the mock GPU would raise an error here. NCCL takes no tensors of the host, gloo does."""
    fake = FakeRanks(2).install(monkeypatch)
    backends = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "new_group", lambda backend: backends.append(backend))
    monkeypatch.setattr(schedule, "host_group", functools.cache(schedule.host_group.__wrapped__))
    sent = [[[f"{rank} to {other}"] for other in range(2)] for rank in range(2)]
    received = fake.run(lambda rank: schedule.exchange(sent[rank]))
    assert received == [["0 to 0", "1 to 0"], ["1 to 1", "0 to 1"]] and set(backends) == {"gloo"}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks, mean, total", [(1, 1.0, 5.0), (2, 3.0 / 4.0, 11.0)])
def test_metrics_are_reduced_by_their_suffix(num_ranks, mean, total):
    for result in SUITES[num_ranks].results():
        reduced = dict(result["reduced"])
        assert math.isnan(reduced.pop("none"))  # the mean of no values
        assert reduced == {
            "mean": mean, "tokens_total": total, "length_max": 7.0, "below_max": -2.0,
            "max_of_total": 3.0 * num_ranks,
        }  # fmt: skip
