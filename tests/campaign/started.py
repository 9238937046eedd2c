"""Start a run, recognise its processes by an entry in PYTHONPATH, and sort, count and signal them."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from experiments.bench.common import ROOT, torchrun
from tests.campaign.verdicts import TINY, TRAINER, Failed, tagged

SPARED = ("worker", "guard")  # roles that the run replaces after a kill
TARGETS = ("torchrun", "rank 0", "rank 1", "all ranks", "everything", *SPARED)


def role_below(parent: psutil.Process | None) -> str:
    """Return the role of a reward process: ranks start guards, and guards start workers."""
    return "worker" if parent is not None and "--worker" in parent.cmdline() else "guard"


def build_tiny() -> None:
    """Build the tiny model and its prompts if they are missing."""
    if not TINY.is_dir():
        prepare = ["bash", "experiments/prepare.sh", "tiny"]
        subprocess.run(prepare, cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, check=True)


def in_words(processes: list[psutil.Process]) -> str:
    """Return the ends of the processes' command lines."""
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline())[-60:])
    return f"{len(processes)} processes ({'; '.join(lines)})"


class Started:
    """A running command that writes metrics.jsonl to run_dir; its output goes to log.txt beside run_dir."""

    def __init__(self, command: list[str], run_dir: Path, **environment: str):
        self.run_dir = run_dir
        self.tag = str(run_dir.parent)
        self.log = run_dir.parent / "log.txt"
        self.shared_before = set(os.listdir("/dev/shm"))
        environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{self.tag}", "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | environment, stdout=log, stderr=log
            )
        self.since = time.monotonic()
        self.started = time.time()

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.since

    def parts(self) -> dict[str, list[psutil.Process]]:
        """Sort the processes by role: torchrun, ranks, reward workers with their children, guards."""
        roles: dict[str, list] = {"torchrun": [psutil.Process(self.process.pid)]}
        for process in tagged(self.tag):
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                rank = process.environ().get("RANK")
                if "--worker" in command:
                    roles.setdefault(role_below(process.parent()), []).append(process)
                elif rank and str(TRAINER) in command:
                    roles.setdefault(f"rank {rank}", []).append(process)
        return roles

    def processes(self) -> set[psutil.Process]:
        """Return all processes of the run: tagged processes, and descendants, for example sandboxes."""
        processes = set(tagged(self.tag))
        with contextlib.suppress(psutil.Error):
            processes |= {psutil.Process(self.process.pid)}
            processes |= set(psutil.Process(self.process.pid).children(recursive=True))
        return processes

    def hit(self, target: str, number: int) -> None:
        """Send a signal to one of TARGETS; to torchrun if the target has not started yet."""
        parts = self.parts()
        ranks = parts.get("rank 0", []) + parts.get("rank 1", [])
        groups = {"all ranks": ranks, "everything": parts["torchrun"] + ranks}
        processes = groups.get(target, parts.get(target, []))
        for process in (processes[:1] if target in SPARED else processes) or parts["torchrun"]:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def wait_until_gone(self, limit_s: float, event: str) -> float:
        """Return the seconds until all processes have exited; raise Failed after limit_s."""
        start = time.monotonic()
        while self.process.poll() is None or tagged(self.tag):
            if time.monotonic() - start > limit_s:
                raise Failed(f"{event}: after {limit_s:g} s there were still {in_words(tagged(self.tag))}")
            time.sleep(0.05)
        return time.monotonic() - start

    def kill(self) -> None:
        """Kill all processes."""
        for process in tagged(self.tag):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()

    def log_state(self) -> tuple[int, int]:
        """Return a value that changes with every write to metrics.jsonl."""
        with contextlib.suppress(OSError):
            status = (self.run_dir / "metrics.jsonl").stat()
            return status.st_ino, status.st_size
        return 0, 0

    def checkpoint_is_written(self) -> bool:
        """Tell whether an unfinished checkpoint of this start exists."""
        with contextlib.suppress(OSError):
            unfinished = (self.run_dir / "checkpoints").glob("step_*.tmp")
            return any(path.stat().st_mtime > self.started for path in unfinished)
        return False


def start_trainer(run_dir: Path, *settings: object) -> Started:
    """Start train_rl.py on two ranks."""
    return Started([*torchrun(2), str(TRAINER), *map(str, settings), f"run.dir={run_dir}"], run_dir)
