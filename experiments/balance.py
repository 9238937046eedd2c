"""Work spread over ranks: groups that move, and micro-batches, as many on every rank."""

import copyreg
import io
import pickle

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.settings import TrainSection


def collective_device() -> torch.device:
    """Where a tensor has to lie for the process group: nccl takes GPU tensors, gloo CPU tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def to_bytes(parcel: list) -> bytes:
    """Pickle, of tensors their array: twenty times as fast for many small ones. No bfloat16, no gradients."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {Tensor: lambda t: (torch.from_numpy, (t.numpy(),))}
    pickler.dump(parcel)
    return buffer.getvalue()


def exchange(parcels: list[list]) -> list:
    """Send parcels[r] to rank r; returns what came from all ranks. What stays here is not copied."""
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


def split_rows(lengths: list[int], rows: list[int], max_tokens: int) -> list[list[int]]:
    """Rows, in their order, in micro-batches of at most max_tokens padded tokens; a longer row goes alone."""
    micro_batches: list[list[int]] = []
    longest = 0  # of the last micro-batch
    for row in rows:
        if micro_batches and max(longest, lengths[row]) * (len(micro_batches[-1]) + 1) <= max_tokens:
            micro_batches[-1].append(row)
            longest = max(longest, lengths[row])
        else:
            micro_batches.append([row])
            longest = lengths[row]
    return micro_batches


def split_evenly(lengths: list[int], rows: list[int], most: int) -> list[list[int]]:
    """split_rows() with the smallest limit that needs at most so many micro-batches."""
    low, high = 0, max(lengths[row] for row in rows) * len(rows)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len(split_rows(lengths, rows, middle)) <= most else (middle, high)
    return split_rows(lengths, rows, high)


def sequence_lengths(batch) -> list[int]:
    """[B] tokens that a forward computes of each row."""
    return [max(1, len(p) + len(c) - 1) for p, c in zip(batch.prompt_ids, batch.completion_ids)]


def micro_batches_of(batch, rows: list[int], settings: TrainSection) -> list[list[int]]:
    """Rows in micro-batches, as many on every rank: a forward is collective. Empty ones where rows run out.

    Attention works on a padded grid. Longest first, neighbours are about as long, so little of it is padding;
    the rank that needs most micro-batches sets their number, the others spread their tokens over as many.
    With train.balance off rows come as they are, and what is missing to that number are empty micro-batches.
    """
    lengths = sequence_lengths(batch)
    if settings.balance:
        rows = sorted(rows, key=lambda row: (-lengths[row], row))
    micro_batches = split_rows(lengths, rows, settings.micro_batch_tokens)
    most = torch.tensor(len(micro_batches), device=collective_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if settings.balance and rows and most > 1:
        micro_batches = split_evenly(lengths, rows, int(most))
    return micro_batches + [[]] * (int(most) - len(micro_batches))
