"""The order of work and how it is spread: waiting line, dealing, micro-batches, what ranks exchange."""

import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from helpers import FakeRanks, RankSuite, make_config, make_group, make_prompts
from rank_worker import PARCELS, parcels

import train_rl
from experiments.bench.workload import Recipe, Workload
from rollout import Request
from runtime.schedule import (
    CacheRoom,
    WaitingLine,
    deal_groups,
    longest_first,
    split_micro_batches,
    split_rows,
    verdict_tokens,
)


@pytest.fixture
def ranks(monkeypatch):
    """ranks(N): from now on, torch.distributed are N threads of this process."""
    return lambda world_size: FakeRanks(world_size).install(monkeypatch)


# ---- the waiting line --------------------------------------------------------------------------------------


class NaiveLine:
    """Does what WaitingLine describes: every expectation is looked up anew whenever one is asked for."""

    def __init__(self, requests: list[Request], slots: int):
        self.requests, self.waiting, self.seen = requests, list(range(len(requests))), {}
        self.pioneers = set()
        feeders = [r for r in requests if r.work_tokens > r.expected_tokens]
        rest = sum(r.expected_tokens for r in requests if r not in feeders)
        self.long = rest / slots if feeders else math.inf
        for index, request in enumerate(requests):
            earlier = [r for r in requests[:index] if r.group == request.group]
            if request.guessed and not earlier:
                self.pioneers.add(index)

    def tokens(self, index: int) -> float:
        request = self.requests[index]
        if request.guessed and self.seen.get(request.group):
            return statistics.fmean(self.seen[request.group])
        return request.max_new_tokens if request.guessed else request.expected_tokens

    def pop(self) -> int:
        tokens = {index: self.tokens(index) for index in self.waiting}
        pioneers = [index for index in self.waiting if index in self.pioneers]
        feeders = [i for i in self.waiting if self.requests[i].work_tokens > tokens[i]]
        long = [i for i in self.waiting if i not in feeders and tokens[i] > self.long]
        length = lambda index: tokens[index] + self.requests[index].latency_tokens
        best = (
            min(pioneers) if pioneers
            else max(long, key=lambda index: (length(index), -index)) if long
            else min(feeders, key=lambda index: (tokens[index], index)) if feeders
            else max(self.waiting, key=lambda index: (length(index), -index))
        )  # fmt: skip
        self.waiting.remove(best)
        return best

    def record_length(self, index: int, num_tokens: int) -> None:
        self.seen.setdefault(self.requests[index].group, []).append(num_tokens)


def random_requests(rng: random.Random) -> list[Request]:
    requests = []
    for group in rng.sample(range(50), rng.randint(1, 8)):
        tokens, guessed = rng.choice([0.0, 4.0, 9.5, rng.uniform(0, 20)]), rng.random() < 0.5
        for _ in range(rng.randint(1, 5)):
            # siblings have one expectation, or each its own
            own = rng.choice([tokens, tokens, rng.randint(0, 9)])
            latency, work = rng.choice([(0.0, 0.0), (0.0, 0.0), (4.0, 1.0), (7.25, 9.0), (4.0, 20.0)])
            expected = {"expected_tokens": float(own), "guessed": guessed}
            expected |= {"latency_tokens": latency, "work_tokens": work}
            requests.append(Request([1], 0, 1.0, rng.choice([9, 9, 12]), group=group, **expected))
    if rng.random() < 0.3:
        rng.shuffle(requests)  # siblings need not be neighbours
    return requests


@pytest.mark.parametrize("seed", range(200))
def test_the_waiting_line_is_that_of_its_description(seed):
    """Requests end in any order while others start; lengths are whole, so that means are exact and tie."""
    rng = random.Random(seed)
    requests = random_requests(rng)
    slots = rng.randint(1, 3)
    line, naive, running = WaitingLine(requests, slots), NaiveLine(requests, slots), []
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


def test_equal_expectations_keep_the_order_of_the_requests():
    requests = [Request([1], 0, 1.0, 9, group=i // 3, expected_tokens=5.0) for i in range(12)]
    line = WaitingLine(requests, 4)
    assert [line.pop() for _ in requests] == list(range(12))


# ---- room for keys and values ------------------------------------------------------------------------------


def blocks_by_hand(requests, running, held, mean, block_size, shares) -> int:
    """Return the blocks that running requests, {index: tokens it has}, are expected to end with.

    Blocks have names, so that one that is shared counts once.
    """
    blocks = set()
    for index in running:
        request = requests[index]
        expected = mean if request.guessed or request.expected_tokens == 0 else request.expected_tokens
        tokens = min(max(expected, held.get(index, 0)) + 1, request.max_new_tokens)
        length = len(request.prompt_ids) + tokens
        for block in range(math.ceil(length / block_size)):
            in_prompt = (block + 1) * block_size < len(request.prompt_ids)
            blocks.add((tuple(request.prompt_ids) if shares and in_prompt else index, block))
    return len(blocks)


@pytest.mark.parametrize("seed", range(100))
def test_room_is_that_of_its_description(seed):
    """Requests start in their order where there is room, and end with any length, whatever was expected."""
    rng = random.Random(seed)
    requests, shares, block_size = random_requests(rng), rng.random() < 0.5, rng.choice([1, 4, 5])
    prompts = [list(range(rng.randint(1, 20))) for _ in range(3)]
    requests = [replace(request, prompt_ids=rng.choice(prompts)) for request in requests]
    seen = rng.choice([(0, 0), (40, 4)])
    room = CacheRoom(requests, num_blocks := rng.randint(1, 40), block_size, shares, seen)
    waiting, held, ended = list(range(len(requests))), {}, [] if seen == (0, 0) else [10] * 4
    while waiting or held:
        for index in [*waiting]:
            total = sum(ended) + sum(held.values())
            mean = total / len(ended) if ended else math.inf
            needed = blocks_by_hand(requests, [*held, index], held, mean, block_size, shares)
            if not held or needed <= num_blocks:
                assert room.has_room_for(index)
                room.start(index)
                held[index] = 0
                waiting.remove(index)
            else:
                assert not room.has_room_for(index)
                break  # it stays the next one until another ends
        for index in [*held]:
            held[index] += 1
        room.take_step()
        for index in [i for i, n in held.items() if n == requests[i].max_new_tokens or rng.random() < 0.1]:
            room.end(index, held[index])
            ended.append(held.pop(index))


def test_where_all_go_to_the_limit_no_more_start_than_there_is_room_for():
    """12 requests of 4 + 12 tokens, 5 blocks of 8: two at once, before and after the first have ended."""
    requests = [Request([index] * 4, 0, 1.0, 12) for index in range(12)]
    room, line, running, most = CacheRoom(requests, 5, 8, True), WaitingLine(requests, 4), {}, 0
    while line or running:
        while line and room.has_room_for(line.peek()):
            running[index := line.pop()] = 0
            room.start(index)
        most = max(most, len(running))
        room.take_step()
        running = {index: tokens + 1 for index, tokens in running.items()}
        for index in [index for index, tokens in running.items() if tokens == 12]:
            room.end(index, running.pop(index))
    assert most == 2


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


# ---- groups with verdicts that take time -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_groups_are_dealt_by_both_sums_as_described(seed):
    """With loads before, many equal groups, and groups that have verdicts only."""
    rng = random.Random(seed)
    num_ranks, num_groups = rng.randint(1, 5), rng.randint(0, 20)
    tokens = [rng.choice([0.0, 1.0, 2.0, float(rng.randint(0, 9))]) for _ in range(num_groups)]
    work = [rng.choice([0.0, 0.0, 1.0, float(rng.randint(0, 12))]) for _ in range(num_groups)]
    load = rng.choice(
        [None, [(float(rng.randint(0, 6)), float(rng.randint(0, 6))) for _ in range(num_ranks)]]
    )
    held, expected = [list(of_rank) for of_rank in load or [(0, 0)] * num_ranks], [None] * num_groups
    for group in sorted(range(num_groups), key=lambda g: (-max(tokens[g], work[g]), g)):
        options = []
        for rank, (of_engine, of_workers) in enumerate(held):
            of_engine, of_workers = of_engine + tokens[group], of_workers + work[group]
            options.append((max(of_engine, of_workers), of_engine + of_workers, rank))
        expected[group] = rank = min(options)[2]
        held[rank] = [held[rank][0] + tokens[group], held[rank][1] + work[group]]
    assert deal_groups(tokens, work, num_ranks, load) == expected
    alone = [of_engine for of_engine, _ in load] if load else None
    no_work = [(of_engine, 0.0) for of_engine in alone] if load else None
    nothing = [0.0] * num_groups
    assert deal_groups(tokens, nothing, num_ranks, no_work) == longest_first(tokens, num_ranks, alone)


def two_machines(order: list[tuple[float, float]]) -> float:
    """Return when the second machine has done all jobs, (seconds on the first, on the second), in order."""
    first = second = 0.0
    for on_first, on_second in order:
        first += on_first
        second = max(first, second) + on_second
    return second


@pytest.mark.parametrize("seed", range(40))
def test_one_sequence_and_one_worker_are_fed_as_quickly_as_any_order_could(seed):
    """Johnson's rule is optimal for two machines. A verdict takes longer than its completion, or nothing."""
    rng = random.Random(seed)
    jobs = [(rng.randint(1, 9), rng.choice([0, 0, rng.randint(10, 30)])) for _ in range(rng.randint(1, 6))]
    requests = [
        Request([1], 0, 1.0, 9, group=i, expected_tokens=float(tokens), latency_tokens=2.0 * verdict,
                work_tokens=float(verdict))
        for i, (tokens, verdict) in enumerate(jobs)
    ]  # fmt: skip
    line = WaitingLine(requests, 1)
    order = [jobs[line.pop()] for _ in jobs]
    assert two_machines(order) == min(map(two_machines, itertools.permutations(jobs)))


def test_what_is_too_long_to_wait_starts_before_what_feeds_the_workers():
    """By hand: 90 tokens on 4 sequences are 22.5 each, so that 40 tokens would run alone at the end."""
    tokens, fed = [40.0, 20.0, 30.0, 5.0, 8.0], [False, False, False, True, True]
    requests = [
        Request([1], 0, 1.0, 99, group=i, expected_tokens=t, work_tokens=50.0 * feeds)
        for i, (t, feeds) in enumerate(zip(tokens, fed))
    ]
    line = WaitingLine(requests, 4)
    assert [line.pop() for _ in requests] == [0, 2, 3, 4, 1]
    line = WaitingLine(requests[:3], 4)
    assert [line.pop() for _ in range(3)] == [0, 2, 1]


def test_a_verdict_costs_what_engine_and_workers_do_meanwhile():
    """By hand: 0.3 s are 30 steps of 10 ms; at 1,600 tokens a second they are 480, shared by 8 verdicts."""
    assert verdict_tokens(0.3, 0.01, 1600.0, 8) == pytest.approx((60.0, 60.0))
    assert verdict_tokens(0.3, math.inf, 0.0, 8) == (0.0, 0.0), "before the first step nothing is known"


# ---- micro-batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 7, 64, 300, 10**6])
def test_rows_are_split_within_the_budget(max_tokens):
    rng = random.Random(0)
    for size in (0, 1, 2, 50):
        lengths = [rng.randint(1, 100) for _ in range(2 * size)]
        rows = rng.sample(range(2 * size), size)
        micro_batches = split_rows(lengths, rows, max_tokens)
        assert sorted(row for part in micro_batches for row in part) == sorted(rows)
        for part in micro_batches:
            assert part and (len(part) == 1 or len(part) * max(lengths[row] for row in part) <= max_tokens)
        assert [row for part in micro_batches for row in part] == rows, "in the order given"
        for part, after in itertools.pairwise(micro_batches):  # the next row would not have fitted
            whole = [*part, after[0]]
            assert len(whole) * max(lengths[row] for row in whole) > max_tokens


def test_rows_in_the_order_of_their_lengths_keep_padding_and_the_number_of_micro_batches_low():
    """256 rows of 1 to 1000 tokens in micro-batches of 16384: 10 % padding (45 % in the given order), and 10
    micro-batches where 9 would do without padding."""
    rng = random.Random(0)
    lengths = [rng.randint(1, 1000) for _ in range(256)]

    def padding_share(micro_batches):
        places = sum(len(part) * max(lengths[row] for row in part) for part in micro_batches)
        return 1 - sum(lengths) / places

    in_order = sorted(range(256), key=lambda row: -lengths[row])
    micro_batches = split_rows(lengths, in_order, 16384)
    assert padding_share(micro_batches) < 0.12
    assert padding_share(split_rows(lengths, list(range(256)), 16384)) > 0.4
    assert len(micro_batches) <= 1 + math.ceil(sum(lengths) / 16384)


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_hold_every_row_once_within_the_budget_and_are_as_many_on_all_ranks(
    seed, balance, ranks
):
    rng = random.Random(seed)
    budget, world_size = rng.choice([1, 20, 60, 200, 10**6]), rng.choice([1, 2, 3])
    lengths_of_ranks = [
        [rng.randint(1, 60) + 2 for _ in range(rng.choice([0, 1, 7, 30]))] for _ in range(world_size)
    ]
    chosen = [rng.sample(range(len(rows)), rng.randint(0, len(rows))) for rows in lengths_of_ranks]
    split = ranks(world_size).run(
        lambda rank: split_micro_batches(lengths_of_ranks[rank], chosen[rank], budget, balance)
    )
    assert len({len(parts) for parts in split}) == 1
    for parts, rows, lengths in zip(split, chosen, lengths_of_ranks):
        assert sorted(sum(parts, [])) == sorted(rows)
        assert balance or sum(parts, []) == rows, "as they come"
        for part in parts:
            assert len(part) < 2 or len(part) * max(lengths[row] for row in part) <= budget
        with_rows = [bool(part) for part in parts]
        assert with_rows == sorted(with_rows, reverse=True), "empty ones last"


def split_of_workload(num: int, balance: bool, ranks) -> tuple[float, list[list[list[int]]], list[list[int]]]:
    """Return the padding share of all grids of two ranks, micro-batches of each, row lengths of each.

    The limit of a micro-batch is what about num of them hold on a rank.
    """
    recipe = Recipe()
    lengths = Workload.make(recipe).lengths[0].tolist()
    total = sum(map(sum, lengths)) + recipe.num_prompts * recipe.group_size * (recipe.prompt_tokens - 1)
    config, budget = make_config(f"train.balance={balance}"), math.ceil(total / 2 / num)

    def split(rank):
        groups = [make_group(i, 0, row, [True] * len(row)) for i, row in enumerate(lengths)]
        outcomes = {group.slot: group.outcome(False) for group in groups}
        own, _ = train_rl.drop_and_deal(groups[rank::2], outcomes, config)
        batch = train_rl.collate(own, make_prompts(1), [[1] * recipe.prompt_tokens])
        row_lengths = train_rl.sequence_lengths(batch)
        assert row_lengths == [recipe.prompt_tokens + len(ids) - 1 for ids in batch.completion_ids]
        return split_micro_batches(row_lengths, list(range(len(row_lengths))), budget, balance), row_lengths

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
    """Return the tokens of the smallest grids that num contiguous parts of the sorted rows can have."""
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


# ---- real ranks --------------------------------------------------------------------------------------------
SUITES = {num: RankSuite("schedule", num, lambda folder: None) for num in (1, 2)}


def equal(one, other) -> bool:
    """Compare as == does; tensors by all elements and the dtype."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        same = type(one) is type(other) and len(one) == len(other)
        return same and all(map(equal, one, other))
    if hasattr(one, "__dict__"):
        return type(one) is type(other) and equal(list(vars(one).items()), list(vars(other).items()))
    return one == other


@pytest.mark.slow
@pytest.mark.parametrize("case", PARCELS)
def test_exchange_brings_to_each_rank_its_own_parcel_then_that_of_the_other(case):
    for rank in range(2):
        own, other = (parcels(case, sender)[rank] for sender in (rank, 1 - rank))
        assert equal(SUITES[2].results()[rank]["exchange"][case], own + other)


@pytest.mark.slow
def test_the_bytes_of_moved_routes_are_those_that_were_sent():
    arrived = SUITES[2].results()[1]["exchange"]["completions"]
    routes = [completion.routed_experts for completion in arrived]
    sent = [c.routed_experts for sender in (1, 0) for c in parcels("completions", sender)[1]]
    assert len(routes) == len(sent) > 3
    assert [ids.numpy().tobytes() for ids in routes] == [ids.numpy().tobytes() for ids in sent]


@pytest.mark.slow
def test_two_gloo_ranks_have_as_many_micro_batches():
    many, few = (result["micro_batches"] for result in SUITES[2].results())
    assert len(many) == len(few) > 2
    assert sorted(sum(many, [])) == list(range(9)) and sorted(sum(few, [])) == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("balance", [True, False])
def test_every_rank_gets_the_largest_number_of_micro_batches(balance):
    """Rank r has 1 + 2 r rows that go alone; empty micro-batches come last."""
    alone, first, second = (r["alone"][balance] for num in (1, 2) for r in SUITES[num].results())
    assert alone == [[0]] and first == [[0], [], []] and sorted(second) == [[0], [1], [2]]
    assert balance or second == [[0], [1], [2]], "as they come"


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks, mean, total", [(1, 1.0, 5.0), (2, 3.0 / 4.0, 11.0)])
def test_metrics_are_reduced_by_their_suffix(num_ranks, mean, total):
    for result in SUITES[num_ranks].results():
        reduced = dict(result["reduced"])
        assert math.isnan(reduced.pop("none"))  # a mean of nothing
        assert reduced == {
            "mean": mean, "tokens_total": total, "length_max": 7.0, "below_max": -2.0,
            "max_of_total": 3.0 * num_ranks,
        }  # fmt: skip
