"""Run a main function under torchrun: print errors as one line, end all ranks together, handle signals."""

import contextlib
import ctypes
import errno
import json
import os
import re
import select
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from runtime.machine import LOOPBACK, check_machine, is_one_node, open_store

Options = TypeVar("Options")
FIRST_PROCESS = Path("/proc/1")


def die_with_torchrun() -> None:
    """Have Linux kill this rank when torchrun dies, because an orphan would keep writing to the run's folder.

    Call this before slow imports: the kernel sends no signal if torchrun has died earlier. The system's first
    process has then adopted the rank. In some containers torchrun itself is the first process.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent or parent == 1 and not first_process_may_be_torchrun():
            os._exit(1)


def first_process_may_be_torchrun() -> bool:
    """Look at the command of the system's first process; True also if it cannot be read."""
    with contextlib.suppress(OSError):
        command = (FIRST_PROCESS / "cmdline").read_bytes()
        return b"torch" in command or b"python" in command
    return True


COPY_S = 1.0  # one request to stop may arrive twice within this time
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Stopped(Exception):
    """The run ended on a signal, between two steps, after writing a checkpoint."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number


class Signals:
    """Remember a first SIGTERM or SIGINT; end the process at the second.

    One request to stop can reach a rank twice, from torchrun and from a scheduler that signals all processes
    of a job, so a repetition within COPY_S counts as the same signal. A thread notes when signals
    arrive, because Python's handlers wait for the end of a long call in C, for example of a collective.
    """

    def __init__(self):
        self.received = 0
        self.received_at = 0.0

    def listen(self) -> None:
        """Receive both signals from now on."""
        arrivals, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # gets the number of each signal as a byte
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self.watch, args=(arrivals,), name="signals", daemon=True).start()

    def watch(self, arrivals: int) -> None:
        """Handle the signals whose numbers arrive at a pipe.

        A call in C that holds the interpreter delays this thread. A signal is then taken to have arrived just
        after the thread's last look at the pipe.
        """
        pipe = select.poll()  # select.select() refuses file descriptors above 1023
        pipe.register(arrivals, select.POLLIN)
        looked_at = time.monotonic()
        while True:
            for number in os.read(arrivals, 64) if pipe.poll(100) else ():
                if number in (signal.SIGTERM, signal.SIGINT):
                    self.handle(number, looked_at)
            looked_at = time.monotonic()

    def handle(self, number: int, arrived_at: float) -> None:
        """Remember the first signal, end the process at the second."""
        if self.received and arrived_at > self.received_at + COPY_S:
            os._exit(128 + number)
        if not self.received:
            self.received = number
            self.received_at = time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                text = (
                    f"\n{signal.Signals(number).name}: finishing this step and writing a checkpoint, then "
                    "ending. torchrun kills the run after 30 s unless torchrun --shutdown-timeout is larger; "
                    "a second signal ends the run immediately\n"
                )
                os.write(2, text.encode())


def one_line(text: str) -> str:
    """Return a text as one line, with control characters escaped, because a terminal would execute them."""
    text = re.sub(r"\s*\n\s*", " ", text.strip())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def report_thread(failure: threading.ExceptHookArgs) -> None:
    """Print a thread's exception, except for a full disk, which the main thread reports at its next write.

    For example, TensorBoard writes its events in a thread.
    """
    if not (isinstance(failure.exc_value, OSError) and failure.exc_value.errno in FULL_DISK):
        threading.__excepthook__(failure)


def report_to_torchrun(line: str) -> None:
    """Make this line the end of torchrun's own report, the last thing on the screen."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))


def tell_others(line: str) -> None:
    """End the ranks on other nodes that are still waiting for this rank to start, with this line."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from runtime.agreement import tell_ranks  # imports torch

        tell_ranks(line)


def end_others(line: str) -> None:
    """End the other ranks of a run, also those of other nodes, through their watchdogs."""
    watchdog = sys.modules.get("runtime.watchdog")  # imported by a run only
    if watchdog and watchdog.Watchdog.running:
        watchdog.Watchdog.running.tell_failure(line)


def in_words(error: BaseException) -> str:
    """Return the text of an error; explain a lost connection of gloo, and memory that has run out.

    An error of another type than our own errors is named, with the last file and line outside of libraries.
    """
    text = str(error)
    if not isinstance(error, (ValueError, RuntimeError, OSError)):
        libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
        frames = traceback.extract_tb(error.__traceback__)
        places = [f" ({f.filename}, line {f.lineno})" for f in frames if not f.filename.startswith(libraries)]
        return f"{type(error).__name__}: {text}{places[-1] if places else ''}"
    if "can't allocate memory" in text or "CUDA out of memory" in text:
        return (
            "out of memory: lower train.micro_batch_tokens (not below one row of full length) or, on CPUs, "
            "rollout.kv_cache_gib, or set model.activation_checkpointing=true. Checkpoints are intact: the "
            f"same command resumes from the newest. {text}"
        )
    if "gloo" in text and re.search("closed by peer|reset by peer|Broken pipe", text):
        detail = text.partition("]")[2].partition(". This is")[0].strip()
        return (
            f"another rank has ended, or its node is lost ({detail}). See the message of that rank for the "
            "cause. Checkpoints are intact: the same command resumes from the newest"
        )
    return text


def forget_errors(folder: Path, rank: int) -> None:
    """Delete error files from earlier launches. Rank 0 also deletes files of ranks that no longer exist."""
    for file in folder.glob("error_rank_*.txt"):
        number = file.stem.removeprefix("error_rank_")
        is_orphan = number.isdecimal() and int(number) >= int(os.environ["WORLD_SIZE"])
        if number == str(rank) or (rank == 0 and is_orphan):
            file.unlink(missing_ok=True)


END_PROCESS = os._exit


@contextlib.contextmanager
def no_silent_end() -> Iterator[None]:
    """Have os._exit(0) in code of the user raise an error, because it would look like the end of a run."""
    process = os.getpid()

    def exit_of_user(code: int) -> None:
        if code or os.getpid() != process:  # a forked process may end
            END_PROCESS(code)
        if threading.current_thread() is threading.main_thread():
            raise SystemExit("os._exit(0)")
        place = traceback.extract_stack()[-2]
        print(f"\nerror: a thread ends the run by os._exit(0): {place}", file=sys.stderr)
        leave(2)

    os._exit = exit_of_user  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = END_PROCESS


@no_silent_end()
def run(
    main: Callable[[Options], None], read: Callable[[list[str]], Options], argv: list[str],
    folder_of: Callable[[Options], Path | None] = lambda options: None,
) -> int:  # fmt: skip
    """Call main(read(argv)), print any error as one line, and return the exit code.

    read: parses the command line into the options of main. folder_of: returns the folder for the stack trace
    of an error (error_rank_R.txt), written if the folder exists. Without torchrun the world size is 1.
    """
    die_with_torchrun()
    threading.excepthook = report_thread
    single_process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (single_process | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}).items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # deprecations inside libraries
    stay_on_loopback()
    # On a GPU torch warns at every barrier that it takes the current device, which is the rank's.
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device")
    rank = int(os.environ["RANK"])
    folder = None
    options = None
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
    except BaseException as error:  # code of users raises anything
        if isinstance(error, SystemExit) and options is None:
            if error.code:  # argparse has printed the error of this rank's command
                tell_others(f"error on rank {rank}: its command is wrong; see the message on its node")
            raise
        line = f"error on rank {rank}: {one_line(in_words(error))}"
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
            time.sleep(5)  # most errors occur on all ranks alike: rank 0 prints, then torchrun ends the ranks
        print(f"\n{line}\n", file=sys.stderr, flush=True)
        end_others(line)
        return 2


def leave(code: int) -> None:
    """End the process without the leak reports that vLLM's native libraries print at a normal exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    END_PROCESS(code)


def stay_on_loopback() -> None:
    """Have gloo, NCCL and vLLM listen on loopback if all ranks share a node; the user's values have priority.

    Their sockets have no password. Any host that reaches another interface could connect.
    """
    if is_one_node(os.environ) and "lo" in [name for _, name in socket.if_nameindex()]:
        for name, value in LOOPBACK.items():
            os.environ.setdefault(name, value)


def connect(backends: str, timeout: timedelta) -> None:
    """Initialise torch.distributed, one GPU per rank. Collective.

    Without torchrun, rank 0 would open a store on all interfaces. Ranks of one node get a store on loopback
    instead, and a single process gets a store without a socket. Ranks that are connected stay so.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    options = {}
    if is_one_node(os.environ) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        rank = int(os.environ["RANK"])
        num_ranks = int(os.environ["WORLD_SIZE"])
        address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
        if num_ranks == 1:
            store = dist.HashStore()
        elif rank == 0:
            listener = socket.create_server(address).detach()
            store = dist.TCPStore(*address, num_ranks, True, timeout, master_listen_fd=listener)
        else:
            store = dist.TCPStore(*address, num_ranks, False, timeout)
        options = {"store": store, "rank": rank, "world_size": num_ranks}
    dist.init_process_group(backends, timeout=timeout, **options)


def join_ranks() -> None:
    """Check this machine and initialise torch.distributed, one GPU per rank, for programs without a trainer.

    The timeout is a day, because a rank may have to wait for long completions of another rank; torchrun
    notices a rank that dies.
    """
    import torch

    check_machine()
    if os.environ["RANK"] == "0" and (warning := open_store()):
        print(f"warning: {warning}", file=sys.stderr)
    connect("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timedelta(days=1))
