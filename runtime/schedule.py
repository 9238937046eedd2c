"""Order and distribute work: requests for an engine, groups over ranks, rows over micro-batches.

Reading order: longest_first() and deal_groups() assign items to ranks or updates, WaitingLine orders the
requests of an engine and CacheRoom limits how many run at once, exchange() moves groups between ranks,
micro_batches_of() splits the rows of an update.
"""

import copyreg
import functools
import heapq
import io
import math
import pickle
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from batch import Request, RolloutBatch
from settings import Config


# ------------------------------------------------------------------------------------------------------------
# Order
# ------------------------------------------------------------------------------------------------------------
def longest_first(sizes: list[float], num_bins: int, load: list[float] | None = None) -> list[int]:
    """Assign items to bins, largest item first, each to the bin with the smallest load (LPT, Graham 1969).

    Example: sizes 5, 4, 3 and two bins give bins 0, 1, 1. load: initial load of each bin. Returns the bin of
    each item. Ties go to the earlier item and the earlier bin.
    """
    bins = [0] * len(sizes)
    heap = [(size, number) for number, size in enumerate(load or [0.0] * num_bins)]
    heapq.heapify(heap)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        size, bins[item] = heapq.heappop(heap)
        heapq.heappush(heap, (size + sizes[item], bins[item]))
    return bins


def deal_groups(
    tokens: list[float], work: list[float], num_ranks: int, load: Sequence[Sequence[float]] | None = None
) -> list[int]:
    """Assign groups to ranks, balancing both the engines and the reward workers; return each group's rank.

    tokens, work: tokens of a group, and the cost of its verdicts in the same unit (Request.work_tokens).
    Groups are taken in descending order of the larger of the two numbers. Each goes to the rank where the
    larger of the two sums stays smallest; ties go to the smaller total [ours]. If verdicts take no time, this
    is longest_first(). load: initial (tokens, work) of each rank.
    """
    sizes = np.array([tokens, work], dtype=float)  # [2, groups]
    loads = np.array(load or [(0.0, 0.0)] * num_ranks).T  # [2, ranks]
    ranks = [0] * len(tokens)
    for group in np.argsort(-sizes.max(0), kind="stable").tolist():
        sums = loads + sizes[:, group, None]  # [2, ranks]
        largest = sums.max(0)  # [ranks]
        candidates = np.flatnonzero(largest == largest.min())
        ranks[group] = rank = int(candidates[sums.sum(0)[candidates].argmin()])
        loads[:, rank] = sums[:, rank]
    return ranks


def verdict_tokens(
    seconds: float, seconds_per_step: float, tokens_per_second: float, at_once: int
) -> tuple[float, float]:
    """Convert the cost of a verdict into tokens: latency_tokens and work_tokens of rollout.Request.

    seconds: a worker's time for the verdict; seconds_per_step, tokens_per_second: of the engine; at_once:
    number of verdicts that the workers compute in parallel. The latency counts double [ours: in a simulation,
    better than a factor of 1 or 4; with Johnson's rule, see WaitingLine, the factor matters little].
    """
    return 2 * seconds / seconds_per_step, seconds * tokens_per_second / at_once


class WaitingLine:
    """Priority queue of the requests that an engine has not started yet; ties keep the order of arrival.

    Requests that earlier rollouts have left unfinished come first, the oldest before all. All others are
    served in four classes:

    0. Scouts: if a group has no record of earlier lengths, one of the group's requests starts first, as a
       measurement. Until the scout has finished, the group counts as the longest possible; then every waiting
       request of the group is expected to have the mean length of the finished ones [ours: the best of four
       simulated rules, see experiments/bench/README.md].
    1. Outliers: requests longer than one slot's share of all tokens outside of class 2. Only if class 2 has
       requests [ours, because Johnson's rule assumes a single slot].
    2. Requests that keep the reward workers busy longer than the engine (work_tokens > expected tokens),
       shortest first, because workers that start late finish late (Johnson's rule for two machines, 1954).
    3. All other requests, longest first, because a long completion that starts last runs alone at the end.
       The latency of a verdict counts as length (latency_tokens).

    Apart from the scout, the requests of a group have equal places: they start together and share the KV
    cache of the prompt.
    """

    def __init__(self, requests: list[Request], slots: int):
        self.requests = requests
        self.waiting = set(range(len(requests)))
        of_engine = [r.expected_tokens for r in requests if r.work_tokens <= r.expected_tokens]
        has_feeders = len(of_engine) < len(requests)
        self.long = sum(of_engine) / slots if has_feeders else math.inf  # tokens; longer ones are in class 1
        tokens = [r.max_new_tokens if r.guessed else r.expected_tokens for r in requests]
        self.place = list(map(self.place_of, requests, tokens))
        self.siblings: dict[int, list[int]] = {}  # {group: requests}, for groups without a record
        self.finished: dict[int, list[int]] = {}  # {group: tokens of finished siblings}
        for index, request in enumerate(requests):
            if request.guessed:
                if request.group not in self.siblings:
                    self.place[index] = (0, 0.0)  # a scout starts first to measure its group's length
                self.siblings.setdefault(request.group, []).append(index)
        self.heap = [(place, index) for index, place in enumerate(self.place)]
        heapq.heapify(self.heap)

    def place_of(self, request: Request, tokens: float) -> tuple[int, float]:
        """Return (class, rank within the class) of a request with this expected length; the least is next."""
        if request.waited:
            return -1, -request.waited
        if request.work_tokens > tokens:
            return 2, tokens
        return 1 if tokens > self.long else 3, -(tokens + request.latency_tokens)

    def __len__(self) -> int:
        return len(self.waiting)

    def peek(self) -> int:
        """Return the index of the next request, which stays in the queue."""
        while True:
            place, index = self.heap[0]
            if index in self.waiting and place == self.place[index]:  # skip outdated entries
                return index
            heapq.heappop(self.heap)

    def pop(self) -> int:
        """Remove the next request and return the index."""
        index = self.peek()
        self.waiting.remove(index)
        return index

    def record_length(self, index: int, num_tokens: int) -> None:
        """Record the length of a finished request, and re-rank the waiting requests of an unknown group."""
        group = self.requests[index].group
        if self.requests[index].guessed:
            lengths = self.finished.setdefault(group, [])
            lengths.append(num_tokens)
            for sibling in self.waiting.intersection(self.siblings[group]):
                self.place[sibling] = self.place_of(self.requests[sibling], sum(lengths) / len(lengths))
                heapq.heappush(self.heap, (self.place[sibling], sibling))


class CacheRoom:
    """Estimate the KV cache blocks that the running requests will need, and tell whether one more fits.

    Why: an engine that runs out of blocks preempts a request and later recomputes it from the first token. So
    a running request counts with its final length: the expected tokens, or the tokens generated so far if
    they exceed the expectation. If a prompt has no record (guessed, or expected_tokens 0), the expectation is

        tokens of all requests so far, running ones included / number of finished requests,

    the maximum-likelihood mean of exponentially distributed lengths of which some are censored [ours], and
    max_new_tokens until the first request has finished. Full blocks of a shared prompt count once. An idle
    engine accepts any request.

    previous: (tokens, requests) finished in the previous rollout, added to numerator and denominator.
    """

    def __init__(
        self, requests: list[Request], num_blocks: int, block_size: int, shares_prompts: bool,
        previous: tuple[int, int] = (0, 0),
    ):  # fmt: skip
        self.requests = requests
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.previous_tokens, self.previous_requests = previous
        self.started: dict[int, int] = {}  # {running request: the step at which it started}
        self.step = 0  # steps of the engine so far
        self.tokens = 0  # total of all finished requests
        self.ended = 0  # number of finished requests
        self.is_full = False  # a request did not fit, and none has finished since
        self.prompts = range(len(requests))  # number of each request's prompt
        self.shared = [0] * len(requests)  # full blocks of each request's prompt, shared by equal prompts
        if shares_prompts:
            numbers: dict[tuple[int, ...], int] = {}
            self.prompts = [numbers.setdefault(tuple(r.prompt_ids), len(numbers)) for r in requests]
            self.shared = [(len(request.prompt_ids) - 1) // block_size for request in requests]
        self.is_counted = False  # whether the next three attributes are up to date
        self.typical = math.inf  # expected tokens of a request without a record
        self.blocks = 0  # expected of all running requests
        self.sharing = set()  # numbers of the running requests' prompts

    def take_step(self) -> None:
        """Record a step of the engine, which adds at most one token to every running request."""
        self.step += 1
        self.is_counted = False

    def start(self, index: int) -> None:
        """Record the start of a request."""
        self.started[index] = self.step
        if self.is_counted:
            self.count(index)

    def end(self, index: int, num_tokens: int) -> None:
        """Record the end of a request and the number of its tokens."""
        del self.started[index]
        self.tokens += num_tokens
        self.ended += 1
        self.is_full = False
        self.is_counted = False

    def typical_tokens(self) -> float:
        """Return the expected length of a request without a record; infinite until a request has finished."""
        running = sum(self.step - start for start in self.started.values())
        ended = self.previous_requests + self.ended
        return (self.previous_tokens + self.tokens + running) / ended if ended else math.inf

    def own_blocks(self, index: int, typical: float) -> int:
        """Return the blocks that a request is expected to need beside the shared blocks of the prompt."""
        request = self.requests[index]
        has_record = request.expected_tokens > 0 and not request.guessed
        generated = self.step - self.started.get(index, self.step)
        expected = request.expected_tokens if has_record else typical
        new_tokens = max(expected, generated) + 1  # + 1: the engine may run one step ahead
        tokens = len(request.prompt_ids) + min(new_tokens, request.max_new_tokens)
        return math.ceil(tokens / self.block_size) - self.shared[index]

    def more_blocks(self, index: int) -> int:
        """Return the blocks that a request would add to the running requests."""
        is_shared = self.prompts[index] in self.sharing
        return self.own_blocks(index, self.typical) + (0 if is_shared else self.shared[index])

    def count(self, index: int) -> None:
        """Add the blocks of a running request."""
        self.blocks += self.more_blocks(index)
        self.sharing.add(self.prompts[index])

    def has_room_for(self, index: int) -> bool:
        """Tell whether a waiting request fits beside the running requests."""
        if self.started and not self.is_full:
            if not self.is_counted:
                self.is_counted = True
                self.typical = self.typical_tokens()
                self.blocks = 0
                self.sharing = set()
                for running in self.started:
                    self.count(running)
            self.is_full = self.blocks + self.more_blocks(index) > self.num_blocks
        return not (self.started and self.is_full)


# ------------------------------------------------------------------------------------------------------------
# Ranks
# ------------------------------------------------------------------------------------------------------------
def collective_device() -> torch.device:
    """Return the device of tensors in collectives: nccl needs GPU tensors, gloo CPU tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@functools.cache
def host_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks for tensors in host memory: gloo on GPUs, None (the default) on CPUs.

    The first call creates the group. Collective. lifecycle.connect_ranks() makes that call, so that the group
    exists before moe_model.set_group_timeouts() sets the timeout of all groups.
    """
    return dist.new_group(backend="gloo") if torch.cuda.is_available() else None


def to_bytes(parcel: list) -> bytes:
    """Pickle a list with its tensors as NumPy arrays, 20 times faster than torch for many small tensors.

    Tensors that need gradients and bfloat16 are not supported.
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {Tensor: lambda t: (torch.from_numpy, (t.numpy(),))}
    pickler.dump(parcel)
    return buffer.getvalue()


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value on all ranks. Collective."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def from_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks, in their order. Collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def exchange(parcels: list[list]) -> list:
    """Send parcels[r] to rank r and return the items for this rank, from all ranks, as one list. Collective.

    Items that stay on this rank are not copied. The items stay in host memory: with routes, the parcels of a
    step of long completions take more than a GiB, which the plan of a GPU has no room for.
    """
    rank = dist.get_rank()
    group = host_group()
    messages = [to_bytes(parcel) if parcel and r != rank else b"" for r, parcel in enumerate(parcels)]
    send_sizes = torch.tensor([len(message) for message in messages])  # [ranks], bytes
    receive_sizes = torch.empty_like(send_sizes)
    dist.all_to_all_single(receive_sizes, send_sizes, group=group)
    outgoing = torch.frombuffer(bytearray().join(messages) or bytearray(1), dtype=torch.uint8)
    outgoing = outgoing[: int(send_sizes.sum())]
    incoming = torch.empty(int(receive_sizes.sum()), dtype=torch.uint8)
    dist.all_to_all_single(incoming, outgoing, receive_sizes.tolist(), send_sizes.tolist(), group=group)
    chunks = incoming.split(receive_sizes.tolist())
    received = [pickle.loads(chunk.numpy()) for chunk in chunks if len(chunk)]
    return parcels[rank] + sum(received, [])


# ------------------------------------------------------------------------------------------------------------
# Micro-batches
# ------------------------------------------------------------------------------------------------------------
def split_rows(lengths: list[int], rows: list[int], max_tokens: int) -> list[list[int]]:
    """Split rows, in this order, into micro-batches of at most max_tokens padded tokens.

    A row with more than max_tokens tokens gets a micro-batch of its own.
    """
    micro_batches: list[list[int]] = []
    longest = 0  # longest row of the last micro-batch
    for row in rows:
        if micro_batches and max(longest, lengths[row]) * (len(micro_batches[-1]) + 1) <= max_tokens:
            micro_batches[-1].append(row)
            longest = max(longest, lengths[row])
        else:
            micro_batches.append([row])
            longest = lengths[row]
    return micro_batches


def split_evenly(lengths: list[int], rows: list[int], max_micro_batches: int) -> list[list[int]]:
    """Call split_rows() with the smallest token limit that gives at most max_micro_batches micro-batches."""
    too_small = 0
    limit = max(lengths[row] for row in rows) * len(rows)
    while limit - too_small > 1:  # bisection
        middle = (too_small + limit) // 2
        if len(split_rows(lengths, rows, middle)) <= max_micro_batches:
            limit = middle
        else:
            too_small = middle
    return split_rows(lengths, rows, limit)


def split_micro_batches(
    lengths: list[int], rows: list[int], max_tokens: int, balance: bool
) -> list[list[int]]:
    """Split rows into micro-batches of at most max_tokens padded tokens. Collective.

    lengths [B]: tokens that a forward pass computes for each row of the batch. Every rank returns the same
    number of micro-batches, some of them empty, because a forward pass is collective.

    balance: sort the rows by length, so that rows of a micro-batch have similar lengths and little padding.
    The rank that needs the most micro-batches sets the number, and every other rank spreads its tokens evenly
    over this number.
    """
    if balance:
        rows = sorted(rows, key=lambda row: (-lengths[row], row))
    micro_batches = split_rows(lengths, rows, max_tokens)
    most = torch.tensor(len(micro_batches), device=collective_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if balance and rows and most > 1:
        micro_batches = split_evenly(lengths, rows, int(most))
    return micro_batches + [[]] * (int(most) - len(micro_batches))


def sequence_lengths(batch: RolloutBatch) -> list[int]:
    """Return [B], the number of tokens that a forward pass computes for each row: all but the last."""
    return [max(1, len(p) + len(c) - 1) for p, c in zip(batch.prompt_ids, batch.completion_ids)]


def split_lengths(batch: RolloutBatch, config: Config) -> list[int]:
    """Return [B], the length of each row for the split into micro-batches.

    With train.share_prompts all rows of a group get the length of its longest row, so that they follow each
    other and share micro-batches. This applies only if the saved prompt tokens cover the added padding of
    attention.
    """
    lengths = sequence_lengths(batch)
    if not config.train.share_prompts:
        return lengths
    rows_of = defaultdict(list)
    for row, group in enumerate(batch.group_index.tolist()):
        rows_of[group].append(row)
    for rows in rows_of.values():
        longest = max(lengths[row] for row in rows)
        num_padding = len(rows) * longest - sum(lengths[row] for row in rows)
        num_saved = (len(rows) - 1) * (len(batch.prompt_ids[rows[0]]) - 1)
        if num_padding <= num_saved:
            for row in rows:
                lengths[row] = longest
    return lengths


def micro_batches_of(batch: RolloutBatch, rows: list[int], config: Config) -> list[list[int]]:
    """Split rows into micro-batches of at most train.micro_batch_tokens padded tokens."""
    max_tokens = config.train.tokens_per_forward(on_gpu=torch.cuda.is_available())
    return split_micro_batches(split_lengths(batch, config), rows, max_tokens, config.train.balance)
