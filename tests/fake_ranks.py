"""A stand-in for torch.distributed whose ranks are threads of one process."""

import pickle
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.patience import limit


class FakeRanks:
    """Stands in for torch.distributed: ranks are threads of this process."""

    def __init__(self, world_size: int):
        self.barrier_of_ranks = threading.Barrier(world_size)
        self.items = [None] * world_size
        self.local = threading.local()

    def install(self, monkeypatch) -> "FakeRanks":
        """Replace functions of torch.distributed until the test ends."""
        names = ("get_rank", "get_world_size", "barrier", "all_gather_object", "all_reduce")
        for name in (*names, "all_to_all_single", "broadcast_object_list"):
            monkeypatch.setattr(dist, name, getattr(self, name))
        return self

    def get_rank(self) -> int:
        return getattr(self.local, "rank", 0)

    def get_world_size(self) -> int:
        return len(self.items)

    def barrier(self) -> None:
        self.barrier_of_ranks.wait(limit(20))

    def gather(self, item) -> list:
        """Return the items of all ranks, as copies, like between processes."""
        self.items[self.get_rank()] = pickle.dumps(item)
        self.barrier()
        gathered = [pickle.loads(item) for item in self.items]
        self.barrier()
        return gathered

    def all_gather_object(self, gathered: list, item) -> None:
        gathered[:] = self.gather(item)

    def broadcast_object_list(self, items: list) -> None:
        items[:] = self.gather(items)[0]

    def all_reduce(self, tensor: torch.Tensor, op=dist.ReduceOp.SUM) -> None:
        combine = {dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.MAX: torch.amax}[op]
        tensor.copy_(combine(torch.stack(self.gather(tensor)), dim=0))

    def all_to_all_single(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes=None, sent_sizes=None, group=None
    ) -> None:
        parts = sent.split(sent_sizes or len(sent) // len(self.items))
        arrived = [row[self.get_rank()] for row in self.gather([part.clone() for part in parts])]
        assert received_sizes is None or received_sizes == [len(part) for part in arrived]
        received.copy_(torch.cat(arrived))

    def run(self, function: Callable[[int], object]) -> list:
        """Call function(rank) on every rank and return the results."""
        results = [None] * len(self.items)
        errors = []

        def work(rank: int) -> None:
            self.local.rank = rank
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier_of_ranks.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self.items))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return results
