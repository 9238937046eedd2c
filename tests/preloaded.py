"""Run scripts on several ranks from a server that has imported the slow libraries already.

Importing torch, DeepSpeed, transformers and vLLM takes three quarters of a short run. Python's own fork
server imports them once for all runs of a session. A rank is then a fork of it that runs its script as
`python SCRIPT` would, in the environment that torchrun gives. What torchrun itself does when a run fails or
is killed is tried with the real one.
"""

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from unittest import mock

import huggingface_hub.constants

from tests.patience import limit

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = [
    "pytest", "train_rl", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3_moe", "compressed_tensors", "torch.utils.tensorboard",
    "tensorboard.compat", "matplotlib.pyplot", "tests.frozen",
]  # fmt: skip


def start_server() -> multiprocessing.context.ForkServerContext:
    """Start the server unless it runs, with the environment that ranks set before they import vLLM."""
    from rollout import set_vllm_environment

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    with mock.patch.dict(os.environ, {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": ""}):
        set_vllm_environment(on_gpu=False)
        multiprocessing.forkserver.ensure_running()
    return context


def run_rank(arguments: list[str], environment: dict[str, str], folder: str, cwd: str) -> None:
    """Run a script, or a module after "-m", as a process of its own would; output goes to a folder."""
    rank = environment.get("RANK", "0")
    shared = open(f"{folder}/shared_{rank}", "a", buffering=1)  # remove_shared() is the tracker
    resource_tracker.register = lambda name, kind: shared.write(f"{kind} {name}\n")
    resource_tracker.unregister = lambda name, kind: None
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(environment)
    if "HF_HUB_CACHE" in os.environ:
        huggingface_hub.constants.HF_HUB_CACHE = os.environ["HF_HUB_CACHE"]  # libraries read it at import
    sys.executable = os.environ.pop("PYTHON_STAND_IN", sys.executable)
    os.chdir(cwd)
    sys.path[:0] = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def rank_environments(num_ranks: int, num_nodes: int) -> list[dict[str, str]]:
    """Return what torchrun adds to the environment of each rank; without ranks one process gets nothing."""
    per_node = num_ranks // num_nodes
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": per_node, "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    own = [shared | {"RANK": rank, "LOCAL_RANK": rank % per_node} for rank in range(num_ranks)] or [{}]
    return [{name: str(value) for name, value in of_rank.items()} for of_rank in own]


def remove_shared(folder: Path) -> None:
    """Remove the semaphores and the shared memory that ranks have registered in this folder."""
    for file in folder.glob("shared_*"):
        for line in file.read_text().splitlines():
            kind, name = line.split(" /")
            Path("/dev/shm", f"sem.{name}" if kind == "semaphore" else name).unlink(missing_ok=True)


def run(
    num_ranks: int,
    *arguments: object,
    timeout_s: float = 240,
    env: dict[str, str] | None = None,
    cwd: Path | list[Path] = ROOT,
    kill_when: Callable[[], bool] | None = None,
    num_nodes: int = 1,
) -> subprocess.CompletedProcess:
    """Run a script with its arguments on num_ranks processes. If a rank fails, end all ranks.

    0 ranks: one process without torchrun's environment. subprocess.TimeoutExpired after timeout_s
    on a quiet machine.
    cwd: the folder of all ranks, or of each rank.
    kill_when: polled while the ranks run; if True, all ranks are killed (SIGKILL). num_nodes: the nodes that
    the ranks believe to be on.
    """
    context, arguments = start_server(), [str(argument) for argument in arguments]
    common, ranks = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}, []
    with tempfile.TemporaryDirectory() as folder:
        environments = rank_environments(num_ranks, num_nodes)
        cwds = cwd if isinstance(cwd, list) else [cwd] * len(environments)
        for own, of_rank in zip(environments, cwds):
            arguments_of_rank = (arguments, common | own, folder, str(of_rank))
            ranks.append(context.Process(target=run_rank, args=arguments_of_rank))
            ranks[-1].start()
        deadline, waiting = time.monotonic() + limit(timeout_s), {rank.sentinel: rank for rank in ranks}
        killed = False
        while waiting and not any(rank.exitcode for rank in ranks) and time.monotonic() < deadline:
            for sentinel in multiprocessing.connection.wait(waiting, timeout=0.01 if kill_when else 1):
                waiting.pop(sentinel).join()
            if killed := kill_when is not None and kill_when():
                break
        timed_out = bool(waiting) and not killed and time.monotonic() >= deadline
        for rank in waiting.values():
            rank.kill()
            rank.join()
        remove_shared(Path(folder))
        texts = []
        for name in ("stdout", "stderr"):
            files = [Path(folder) / f"{name}_{rank}" for rank in range(len(ranks))]
            texts.append("".join(file.read_text(errors="replace") for file in files if file.is_file()))
    if timed_out:
        raise subprocess.TimeoutExpired(arguments, timeout_s, *texts)
    code = next((rank.exitcode for rank in ranks if rank.exitcode), 0)
    return subprocess.CompletedProcess(arguments, code, *texts)


STAND_IN = """\
#!/bin/sh
"exec" {python!r} "-SE" "$0" "$@"  # sh runs this, Python reads a string
import os, sys
if sys.argv[1] in ("-", "-c"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
from multiprocessing.connection import Client
with Client({address!r}) as server:
    server.send((sys.argv[1:], dict(os.environ), os.getcwd()))
    code, stdout, stderr = server.recv()
sys.stdout.write(stdout)
sys.stderr.write(stderr)
sys.exit(code)
"""


@contextlib.contextmanager
def python_stand_in() -> Iterator[Path]:
    """Provide a program that scripts start in place of Python; its runs are those of run().

    It knows `SCRIPT ...`, `-m MODULE ...` and `-m runtime.torchrun --nproc-per-node=N ...`. A script in
    Python that is run with PYTHON_STAND_IN=FILE finds the program in sys.executable. Output comes at the end.
    """
    with tempfile.TemporaryDirectory() as folder, Listener(family="AF_UNIX") as listener:
        file = Path(folder) / "python"
        file.write_text(STAND_IN.format(python=sys.executable, address=listener.address))
        file.chmod(0o755)
        server = threading.Thread(target=answer_clients, args=(listener,))
        server.start()
        yield file
        with Client(listener.address) as client:
            client.send(None)
        server.join()


def answer_clients(listener: Listener) -> None:
    """Answer each client in a thread of its own, because a program may start another; None ends the loop."""
    while True:
        client = listener.accept()
        if (request := client.recv()) is None:
            return
        threading.Thread(target=answer, args=(client, *request)).start()


def answer(client: Connection, arguments: list[str], environment: dict[str, str], cwd: str) -> None:
    num_ranks = 0
    if arguments[:2] == ["-m", "runtime.torchrun"]:
        options = list(itertools.takewhile(lambda word: word.startswith("--"), arguments[2:]))
        arguments = arguments[2 + len(options) :]
        (num_ranks,) = (int(word.split("=")[1]) for word in options if word.startswith("--nproc-per-node="))
    done = run(num_ranks, *arguments, env=environment, cwd=Path(cwd))
    client.send((done.returncode, done.stdout, done.stderr))
