"""Hang on one of two watched ranks: watched_ranks.py KIND FOLDER TIMEOUT_S.

Rank 1 hangs in a phase of a step, as the rank of a run would; rank 0 continues to the next collective and
waits. KIND fails: rank 1 reports an error, but does not end.
"""

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

from runtime.launch import die_with_torchrun

if __name__ == "__main__":
    die_with_torchrun()

import torch
import torch.distributed as dist

from runtime.agreement import wait_for_ranks
from runtime.metrics import Clock
from runtime.watchdog import Watchdog

FOREVER_S = 3000


def hangs_here(seconds: float = FOREVER_S) -> None:
    """Hang in a function whose name appears in the stack trace."""
    time.sleep(seconds)


def hang(kind: str, clock: Clock, folder: Path) -> None:
    match kind:
        case "before a collective":
            with clock("update"):
                hangs_here()
        case "generate":
            with clock("rollout", lambda: "3 of 16 completions to generate"):
                hangs_here()
        case "disk":
            os.mkfifo(folder / "pipe")
            with clock("checkpoint"):
                (folder / "pipe").write_text("nobody reads")
        case "other collective":
            pair = dist.new_group([0, 1])
            dist.barrier(group=pair)
        case "interpreter":
            with clock("deal"):
                ctypes.PyDLL(None).sleep(FOREVER_S)  # PyDLL keeps the interpreter's lock
        case "fails":
            Watchdog.running.stop()  # first: a heartbeat of rank 1 would end rank 1, and with it the test
            Watchdog.running.tell_failure("error on rank 1: no memory")
            hangs_here()
        case "stopped":
            with clock("sync"):
                os.kill(os.getpid(), signal.SIGSTOP)


def main(kind: str, folder: Path, timeout_s: float) -> None:
    warn_s = timeout_s / 3
    wait_for_ranks(10 * timeout_s, 20 * timeout_s)  # in the store of torchrun's agent, if there is one
    dist.init_process_group("gloo", timeout=timedelta(seconds=10 * timeout_s))
    clock, rank = Clock({}), dist.get_rank()
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"report_{rank}")
    watchdog = Watchdog(clock, warn_s, timeout_s).start()
    watchdog.follow(SimpleNamespace(step=4), folder)
    with clock("reward"):
        dist.all_reduce(torch.ones(1))
    if kind == "everybody":
        with clock("rollout"):
            hangs_here()
    time.sleep(warn_s)  # some heartbeats
    if rank == 1:
        hang(kind, clock, folder)
    if rank == 0 and kind == "other collective":
        dist.new_group([0, 1])
    if kind != "slow":
        dist.all_gather_object([None, None], rank)
    for _ in range(12):
        time.sleep(rank * timeout_s / 6)
        dist.barrier()
    watchdog.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
