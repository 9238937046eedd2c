"""exchange() and micro_batches_of() on the ranks of torchrun: `schedule_worker.py FOLDER`.

Rank 0 writes FOLDER/results.pt: {"exchange": {case: what arrived at each rank}, "micro_batches": of each}.
"""

import sys
import warnings
from pathlib import Path

import torch

warnings.filterwarnings("ignore", category=FutureWarning)

import torch.distributed as dist

import train_rl
from data.prompts import Prompt
from experiments.settings import load_config
from reward import Verdict
from rollout import Completion

DTYPES = (torch.uint8, torch.int16, torch.float32)


def completion_with_routes(seed: int, tokens: int) -> Completion:
    generator = torch.Generator().manual_seed(seed)
    routes = torch.randint(0, 128, (tokens + 3, 2, 4), generator=generator, dtype=torch.uint8)
    return Completion(list(range(tokens)), [-0.25 * i for i in range(tokens)], "stop", 1.5, routes)


def parcels(case: str, rank: int) -> list[list]:
    """What a rank sends to ranks 0 and 1."""
    other = 1 - rank
    match case:
        case "objects":
            sent = [{"from": rank}, ("a", None, 1.5), "text \udcff", Verdict(1.0, "ok")]
            return [[*sent, f"to {r}"] for r in range(2)]
        case "tensors":
            values = [torch.arange(rank, 300, dtype=torch.int64).to(dtype) for dtype in DTYPES]
            empty, strided = torch.zeros(0, 3), torch.arange(12.0).view(3, 4).t()
            return [[*values, empty, strided, [values[0]]]] * 2
        case "one way":
            return [[], [b"x" * 100_000]] if rank == 0 else [[], []]
        case "nothing":
            return [[], []]
        case "stays":
            return [[f"own {rank}"] if r == rank else [] for r in range(2)]
        case "completions":
            return [[completion_with_routes(10 * rank + i, i) for i in range(r + 2)] for r in (0, other + 1)]


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), {}
    for case in ("objects", "tensors", "one way", "nothing", "stays", "completions"):
        sent = parcels(case, rank)
        arrived = train_rl.exchange(sent)
        number = len(sent[rank])
        assert all(one is other for one, other in zip(arrived[:number], sent[rank])), "no copy of what stays"
        every_rank = [None, None]
        dist.all_gather_object(every_rank, arrived)
        results[case] = every_rank
    lengths = [[40, 3, 9, 9, 1, 22, 5, 5, 30], [8, 2]][rank]
    completions = [Completion([0] * n, [0.0] * n, "stop", 0.0) for n in lengths]
    verdicts = [Verdict(1.0, "ok", pass_frac=1.0)] * len(lengths)
    group = train_rl.Group(0, 0, completions=completions, verdicts=verdicts)
    batch = train_rl.collate([group], [Prompt("a", "1", "exact", "set")], [[1]])
    config = load_config(["data.train=[{path: unused}]", "train.micro_batch_tokens=45"])
    split = train_rl.micro_batches_of(batch, list(range(len(lengths))), config.train)
    every_rank = [None, None]
    dist.all_gather_object(every_rank, split)
    if rank == 0:
        torch.save({"exchange": results, "micro_batches": every_rank}, folder / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
