"""Run a main function so that its errors are one line, its ranks end together, and signals are heard."""

import contextlib
import ctypes
import errno
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

Options = TypeVar("Options")


def die_with_torchrun() -> None:
    """Ask Linux to end this rank when torchrun is killed: it would go on writing to its folder on its own.

    A script calls it before it imports anything slow: a parent that is dead already sends no signal.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died in between
            os._exit(1)


FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Stopped(Exception):
    """A signal ended the run between two steps, with a checkpoint."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number


class Signals:
    """Remember that SIGTERM or SIGINT came; a second one ends the process at once.

    torchrun hands a signal on to its ranks, which on a terminal have had it already: what comes within a
    second of the first is the same one.
    """

    def __init__(self):
        self.received, self.at = 0, 0.0

    def listen(self) -> None:
        """Handle both signals from here on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle)

    def handle(self, number: int, frame: object) -> None:
        """Take note of the first signal, end the process at the second."""
        if self.received and time.monotonic() > self.at + 1:
            os._exit(128 + number)
        if not self.received:
            self.received, self.at = number, time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                text = (
                    f"\n{signal.Signals(number).name}: the run ends with a checkpoint after this step, if "
                    "torchrun waits so long (torchrun --shutdown-timeout, 30 s); once more ends it at once\n"
                )
                os.write(2, text.encode())


def one_line(text: str) -> str:
    """Return a text as one line without control characters: a terminal acts on those that a model writes."""
    text = re.sub(r"\s*\n\s*", " ", text.strip())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def report_thread(failure: threading.ExceptHookArgs) -> None:
    """Leave a full disk to the main thread, which meets it next: TensorBoard writes in a thread."""
    if not (isinstance(failure.exc_value, OSError) and failure.exc_value.errno in FULL_DISK):
        threading.__excepthook__(failure)


def report_to_torchrun(line: str) -> None:
    """Have torchrun end its own report, which comes last on the screen, with this line."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))


def tell_others(line: str) -> None:
    """Have ranks on other nodes end with this line if they still wait for this one to start."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from runtime.agreement import tell_ranks  # imports torch

        tell_ranks(line)


def in_words(error: Exception) -> str:
    """Return the text of an error; gloo's on a neighbour that is gone gets a meaning and one line."""
    text = str(error)
    if "gloo" in text and re.search("closed by peer|reset by peer|Broken pipe", text):
        detail = text.partition("]")[2].partition(". This is")[0].strip()
        return (
            f"another rank has ended, or its node is lost ({detail}). What that rank says is the cause. "
            "Checkpoints are whole: the same command goes on from the newest"
        )
    return text


def forget_errors(folder: Path, rank: int) -> None:
    """Remove the errors that an earlier start has left; rank 0 also those of ranks that there are not."""
    for file in folder.glob("error_rank_*.txt"):
        number = file.stem.removeprefix("error_rank_")
        is_nobodys = number.isdecimal() and int(number) >= int(os.environ["WORLD_SIZE"])
        if number == str(rank) or (rank == 0 and is_nobodys):
            file.unlink(missing_ok=True)


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
    threading.excepthook = report_thread
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}).items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # old names inside libraries
    rank, folder = int(os.environ["RANK"]), None
    try:
        options = read(argv)
        folder = folder_of(options)
        if folder is not None:
            forget_errors(folder, rank)
        main(options)
        return 0
    except Stopped as stopped:
        if rank == 0:
            print(f"\n{stopped}\n", file=sys.stderr, flush=True)
        return 128 + stopped.signal_number
    except KeyboardInterrupt:
        if rank == 0:
            print("\ninterrupted\n", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    except Exception as error:
        expected = isinstance(error, (ValueError, RuntimeError, OSError))
        said = one_line(("" if expected else f"{type(error).__name__}: ") + in_words(error))
        line = f"error on rank {rank}: {said}"
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            line += f"; free space in {folder}, then start the same command again"
        with contextlib.suppress(OSError):
            if folder is not None and folder.is_dir():
                stack = folder / f"error_rank_{rank}.txt"
                stack.write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
                line += f"; the stack is in {stack}"
        with contextlib.suppress(OSError):
            report_to_torchrun(line)
        tell_others(line)
        if rank > 0:
            time.sleep(5)  # most errors are the same on all ranks; rank 0 speaks, torchrun ends the others
        print(f"\n{line}\n", file=sys.stderr, flush=True)
        return 2


def leave(code: int) -> None:
    """End the process without the leak reports that vLLM's native libraries print at a normal exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def join_ranks() -> None:
    """Let the processes of torchrun find each other, and give each its GPU, for work without a trainer.

    A rank may wait long for another's completions; torchrun notices one that died.
    """
    import torch
    import torch.distributed as dist

    check_gpus()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backends, timeout=timedelta(days=1))


def check_gpus() -> None:
    """Raise ValueError if torchrun started more ranks on this machine than it has GPUs."""
    import torch

    if torch.cuda.is_available() and int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        raise ValueError(f"torchrun --nproc-per-node: one rank a GPU, there are {torch.cuda.device_count()}")
