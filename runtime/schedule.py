"""Put work in order and spread it: requests into an engine, groups over ranks, rows over micro-batches.

Reading order: longest_first() and deal_groups() deal items to ranks or updates, WaitingLine feeds an engine
as long as CacheRoom has room, exchange() moves groups between ranks, split_micro_batches() cuts the rows of
an update.
"""

import copyreg
import heapq
import io
import math
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from rollout import Request


# ------------------------------------------------------------------------------------------------------------
# Order
# ------------------------------------------------------------------------------------------------------------
def longest_first(sizes: list[float], num_bins: int, load: list[float] | None = None) -> list[int]:
    """Deal items to bins: the largest goes first, each to the bin that holds the least (LPT, Graham 1969).

    load: what the bins hold already. Returns the bin of each item. Equal items go in their order, to equal
    bins in theirs.
    """
    bins = [0] * len(sizes)
    heap = [(held, number) for number, held in enumerate(load or [0.0] * num_bins)]
    heapq.heapify(heap)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        held, bins[item] = heapq.heappop(heap)
        heapq.heappush(heap, (held + sizes[item], bins[item]))
    return bins


def deal_groups(
    tokens: list[float], work: list[float], num_ranks: int, load: Sequence[Sequence[float]] | None = None
) -> list[int]:
    """Deal groups to ranks by the engine's work and by that of the reward workers; return each one's rank.

    tokens, work: a group's tokens, and its verdicts in the same unit (Request.work_tokens). The group with
    most of either goes first, each to the rank whose larger sum stays the least; of equal ranks to the one
    that holds less of both [ours]. Where verdicts take no time this is longest_first(). load: (tokens, work)
    that ranks hold already.
    """
    sizes = np.array([tokens, work], dtype=float)  # [2, groups]
    held = np.array(load or [(0.0, 0.0)] * num_ranks).T  # [2, ranks]
    ranks = [0] * len(tokens)
    for group in np.argsort(-sizes.max(0), kind="stable").tolist():
        sums = held + sizes[:, group, None]
        largest = sums.max(0)
        equal = np.flatnonzero(largest == largest.min())
        ranks[group] = rank = int(equal[sums.sum(0)[equal].argmin()])
        held[:, rank] = sums[:, rank]
    return ranks


def verdict_tokens(
    seconds: float, seconds_per_step: float, tokens_per_second: float, at_once: int
) -> tuple[float, float]:
    """Return what a verdict costs in tokens: latency_tokens and work_tokens of rollout.Request.

    seconds: that a worker takes for it; the engine's seconds per step and tokens per second; at_once: how
    many verdicts the workers find at the same time. The latency counts double [ours: in a
    simulation without Johnson's rule this was better than once or four times; with that rule the factor
    matters little].
    """
    return 2 * seconds / seconds_per_step, seconds * tokens_per_second / at_once


AHEAD = (0, 0.0)  # the place of a request that tells what to expect of its group


class WaitingLine:
    """Requests that an engine has not started yet, the next one first; equal ones in their order.

    The longest expected goes first: a long completion that starts last runs alone at the end. So does a slow
    verdict, and what it takes counts as length (latency_tokens). Requests whose verdicts take the workers
    longer than they take the engine (work_tokens > expected tokens) go before these, the shortest ahead, by
    Johnson's rule for two machines in a row (1954): workers that start late end late. That rule knows of no
    machine with many places, so what is longer than all that waits behind, spread over the slots, goes before
    them [ours].

    Siblings, expected alike, stay next to each other and share their prompt's keys and values. Where nothing
    is known of a group, one sibling goes ahead of all others, and the group counts as the longest until that
    one has finished; then what its finished siblings took on average stands for the rest [ours: the best of
    four rules simulated, see experiments/bench/README.md].
    """

    def __init__(self, requests: "list[Request]", slots: int):
        self.requests, self.waiting = requests, set(range(len(requests)))
        others = [r.expected_tokens for r in requests if r.work_tokens <= r.expected_tokens]
        self.long = sum(others) / slots if len(others) < len(requests) else math.inf  # tokens
        self.place = [
            self.place_of(r, r.max_new_tokens if r.guessed else r.expected_tokens) for r in requests
        ]
        self.siblings: dict[int, list[int]] = {}  # {group: requests}, of groups of which nothing is known
        self.finished: dict[int, list[int]] = {}  # {group: tokens of finished siblings}
        for index, request in enumerate(requests):
            if request.guessed:
                if request.group not in self.siblings:
                    self.place[index] = AHEAD
                self.siblings.setdefault(request.group, []).append(index)
        self.heap = [(place, index) for index, place in enumerate(self.place)]
        heapq.heapify(self.heap)

    def place_of(self, request: "Request", tokens: float) -> tuple[int, float]:
        """Return the place of a request that is expected to have so many tokens; the least is next.

        Behind AHEAD: 1 is too long to wait, 2 feeds the workers, 3 is all others.
        """
        if request.work_tokens > tokens:
            return 2, tokens
        return 1 if tokens > self.long else 3, -(tokens + request.latency_tokens)

    def __len__(self) -> int:
        return len(self.waiting)

    def peek(self) -> int:
        """Return the index of the next request; it stays in the line."""
        while True:
            place, index = self.heap[0]
            if index in self.waiting and place == self.place[index]:  # the others were entered anew
                return index
            heapq.heappop(self.heap)

    def pop(self) -> int:
        """Take out the next request and return its index."""
        index = self.peek()
        self.waiting.remove(index)
        return index

    def record_length(self, index: int, num_tokens: int) -> None:
        """Take note that a request has ended with num_tokens; its siblings are expected to be like it."""
        group = self.requests[index].group
        if self.requests[index].guessed:
            lengths = self.finished.setdefault(group, [])
            lengths.append(num_tokens)
            for sibling in self.waiting.intersection(self.siblings[group]):
                self.place[sibling] = self.place_of(self.requests[sibling], sum(lengths) / len(lengths))
                heapq.heappush(self.heap, (self.place[sibling], sibling))


class CacheRoom:
    """Count what running requests will hold of an engine's keys and values, and say if one more fits.

    An engine that runs out of blocks throws a request out and later computes it again from its first token.
    So a request counts from its start with the tokens that it is expected to end with, or with those that it
    has where they are more. Expected are its own expected_tokens; where nothing is known of its prompt
    (guessed, or 0), the tokens of all requests so far, running ones included, over the number of those that
    have ended. That is the most likely mean of exponentially distributed lengths of which some are not seen
    to their end [ours]; before the first has ended it is max_new_tokens. A full block of a prompt counts once
    for all requests that share it. When nothing runs, anything fits.

    seen: (tokens, requests) that have ended in an earlier rollout; they count as the first ones of this one.
    """

    def __init__(
        self,
        requests: "list[Request]",
        num_blocks: int,
        block_size: int,
        shares_prompts: bool,
        seen: tuple[int, int] = (0, 0),
    ):
        self.requests, self.num_blocks, self.block_size, self.seen = requests, num_blocks, block_size, seen
        self.started: dict[int, int] = {}  # {running request: the step at which it started}
        self.step, self.tokens, self.ended = 0, 0, 0  # steps so far; tokens and number of ended requests
        self.is_full = False  # one did not fit, and none has ended since
        self.prompts, self.shared = range(len(requests)), [0] * len(requests)
        if shares_prompts:  # number of each request's prompt, and its blocks that all with this prompt share
            numbers: dict[tuple[int, ...], int] = {}
            self.prompts = [numbers.setdefault(tuple(r.prompt_ids), len(numbers)) for r in requests]
            self.shared = [(len(request.prompt_ids) - 1) // block_size for request in requests]
        self.is_counted = False  # the next three hold until the next step or end
        self.typical = math.inf  # tokens of a request of which nothing is known
        self.blocks, self.sharing = 0, set()  # blocks and prompts (by number) of all that run

    def take_step(self) -> None:
        """Take note of a step of the engine: every running request has at most one token more."""
        self.step, self.is_counted = self.step + 1, False

    def start(self, index: int) -> None:
        """Take note that a request has started."""
        self.started[index] = self.step
        if self.is_counted:
            self.count(index)

    def end(self, index: int, num_tokens: int) -> None:
        """Take note that a request has ended with so many tokens."""
        del self.started[index]
        self.tokens, self.ended, self.is_full = self.tokens + num_tokens, self.ended + 1, False
        self.is_counted = False

    def typical_tokens(self) -> float:
        """Return the expected length of a request of which nothing is known; infinite if none has ended."""
        running = sum(self.step - start for start in self.started.values())
        ended = self.seen[1] + self.ended
        return (self.seen[0] + self.tokens + running) / ended if ended else math.inf

    def own_blocks(self, index: int, typical: float) -> int:
        """Return the blocks that a request is expected to need for itself."""
        request = self.requests[index]
        known = request.expected_tokens > 0 and not request.guessed
        generated = self.step - self.started.get(index, self.step)
        tokens = max(request.expected_tokens if known else typical, generated) + 1  # steps may overlap by one
        tokens = len(request.prompt_ids) + min(tokens, request.max_new_tokens)
        return math.ceil(tokens / self.block_size) - self.shared[index]

    def more_blocks(self, index: int) -> int:
        """Return the blocks that a request adds to those that are counted."""
        is_shared = self.prompts[index] in self.sharing
        return self.own_blocks(index, self.typical) + (0 if is_shared else self.shared[index])

    def count(self, index: int) -> None:
        """Count the blocks of a request that runs."""
        self.blocks += self.more_blocks(index)
        self.sharing.add(self.prompts[index])

    def has_room_for(self, index: int) -> bool:
        """Tell whether a request that waits fits beside the running ones."""
        if self.started and not self.is_full:
            if not self.is_counted:
                self.is_counted, self.typical = True, self.typical_tokens()
                self.blocks, self.sharing = 0, set()
                for running in self.started:
                    self.count(running)
            self.is_full = self.blocks + self.more_blocks(index) > self.num_blocks
        return not (self.started and self.is_full)


# ------------------------------------------------------------------------------------------------------------
# Ranks
# ------------------------------------------------------------------------------------------------------------
def collective_device() -> torch.device:
    """Return where a tensor has to lie for the process group: nccl takes GPU tensors, gloo CPU tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def to_bytes(parcel: list) -> bytes:
    """Pickle with tensors as NumPy arrays, which is 20 times faster for many small tensors.

    Does not support bfloat16 and drops gradients.
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {Tensor: lambda t: (torch.from_numpy, (t.numpy(),))}
    pickler.dump(parcel)
    return buffer.getvalue()


def from_rank_0(value: Any) -> Any:
    """Return the value that rank 0 has. Collective."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def exchange(parcels: list[list]) -> list:
    """Send parcels[r] to rank r and return what came from all ranks. Collective.

    What stays on this rank is not copied.
    """
    rank, device = dist.get_rank(), collective_device()
    data = [to_bytes(parcel) if parcel and r != rank else b"" for r, parcel in enumerate(parcels)]
    sizes = torch.tensor([len(part) for part in data], device=device)
    arriving = torch.empty_like(sizes)
    dist.all_to_all_single(arriving, sizes)
    sent = torch.frombuffer(bytearray(b"".join(data)) or bytearray(1), dtype=torch.uint8).to(device)
    sent = sent[: int(sizes.sum())]
    received = torch.empty(int(arriving.sum()), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, sent, arriving.tolist(), sizes.tolist())
    parts = received.cpu().split(arriving.tolist())
    others = [pickle.loads(part.numpy().tobytes()) for part in parts if len(part)]
    return parcels[rank] + sum(others, [])


# ------------------------------------------------------------------------------------------------------------
# Micro-batches
# ------------------------------------------------------------------------------------------------------------
def split_rows(lengths: list[int], rows: list[int], max_tokens: int) -> list[list[int]]:
    """Split rows, in their order, into micro-batches of at most max_tokens padded tokens.

    A row that is longer than that goes alone.
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
    """Call split_rows() with the smallest limit that needs at most so many micro-batches."""
    low, high = 0, max(lengths[row] for row in rows) * len(rows)
    while high - low > 1:
        middle = (low + high) // 2
        fits = len(split_rows(lengths, rows, middle)) <= max_micro_batches
        low, high = (low, middle) if fits else (middle, high)
    return split_rows(lengths, rows, high)


def split_micro_batches(
    lengths: list[int], rows: list[int], max_tokens: int, balance: bool
) -> list[list[int]]:
    """Split rows into micro-batches of at most max_tokens padded tokens. Collective.

    lengths [B]: tokens that a forward computes of each row of the batch. Every rank gets the same number (a
    forward is collective); ranks with fewer rows get empty ones. Attention works on a padded grid, so with
    balance the longest rows go first: neighbours are about as long and little of the grid is padding. The
    rank that needs most micro-batches then sets their number, and the others spread their tokens over as
    many.
    """
    if balance:
        rows = sorted(rows, key=lambda row: (-lengths[row], row))
    micro_batches = split_rows(lengths, rows, max_tokens)
    most = torch.tensor(len(micro_batches), device=collective_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if balance and rows and most > 1:
        micro_batches = split_evenly(lengths, rows, int(most))
    return micro_batches + [[]] * (int(most) - len(micro_batches))
