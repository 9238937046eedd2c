"""Run a main function so that its errors are one line and its ranks end together."""

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

Options = TypeVar("Options")


def die_with_torchrun() -> None:
    """Ask Linux to end this rank when torchrun is killed: it would go on writing to its folder on its own."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(
    main: Callable[[Options], None],
    read: Callable[[list[str]], Options],
    argv: list[str],
    folder_of: Callable[[Options], Path | None] = lambda options: None,
) -> int:
    """Call main(read(argv)) and return the exit code, with errors as one line.

    read: from the arguments of the command line to what main takes. folder_of: where the stack of an error is
    written to error_rank_R.txt, if the folder exists. Without torchrun the process is a world of one.
    """
    die_with_torchrun()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}).items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # old names inside libraries
    rank, folder = int(os.environ["RANK"]), None
    try:
        options = read(argv)
        folder = folder_of(options)
        main(options)
        return 0
    except (ValueError, RuntimeError, OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            if folder is not None and folder.is_dir():
                (folder / f"error_rank_{rank}.txt").write_text(traceback.format_exc())
        if rank > 0:
            time.sleep(5)  # most errors are the same on all ranks; rank 0 speaks, torchrun ends the others
        print(f"\nerror on rank {rank}: {error}\n", file=sys.stderr, flush=True)
        return 2


def leave(code: int) -> None:
    """End the process without the leak reports that vLLM's native libraries print at a normal exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_gpus() -> None:
    """Raise ValueError if torchrun started more ranks on this machine than it has GPUs."""
    import torch

    if torch.cuda.is_available() and int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        raise ValueError(f"torchrun --nproc-per-node: one rank a GPU, there are {torch.cuda.device_count()}")
