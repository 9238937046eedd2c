"""Start a run whose processes are found again by an entry of PYTHONPATH, and sort, count and signal them."""

import contextlib
import os
import subprocess
import time
from pathlib import Path

import psutil

from experiments.bench.common import ROOT, TRAINER, torchrun
from tests.campaign.verdicts import Failed, tagged

SPARED = ("worker", "guard")  # the run replaces them and goes on
TARGETS = ("torchrun", "rank 0", "rank 1", "all ranks", "everything", *SPARED)


def role_below(parent: psutil.Process | None) -> str:
    """Return the role of a reward process: guards are started by a rank, workers by their guard."""
    return "worker" if parent is not None and "--worker" in parent.cmdline() else "guard"


def in_words(processes: list[psutil.Process]) -> str:
    """Return the ends of the command lines of processes."""
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline())[-60:])
    return f"{len(processes)} processes ({'; '.join(lines)})"


class Started:
    """A command that writes metrics.jsonl to run_dir; what it prints goes to log.txt beside run_dir."""

    def __init__(self, command: list[str], run_dir: Path, **environment: str):
        self.run_dir, self.tag = run_dir, str(run_dir.parent)
        self.log, self.shared_before = run_dir.parent / "log.txt", set(os.listdir("/dev/shm"))
        environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{self.tag}", "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | environment, stdout=log, stderr=log
            )
        self.since, self.started = time.monotonic(), time.time()

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.since

    def parts(self) -> dict[str, list[psutil.Process]]:
        """Sort the processes into torchrun, ranks, reward workers with what they start, and their guards."""
        roles: dict[str, list] = {"torchrun": [psutil.Process(self.process.pid)]}
        for process in tagged(self.tag):
            with contextlib.suppress(psutil.Error):
                command, rank = process.cmdline(), process.environ().get("RANK")
                if "--worker" in command:
                    roles.setdefault(role_below(process.parent()), []).append(process)
                elif rank and str(TRAINER) in command:
                    roles.setdefault(f"rank {rank}", []).append(process)
        return roles

    def processes(self) -> set[psutil.Process]:
        """Return all processes of the run: those with the entry, and descendants, such as sandboxes."""
        found = set(tagged(self.tag))
        with contextlib.suppress(psutil.Error):
            found |= {psutil.Process(self.process.pid)}
            found |= set(psutil.Process(self.process.pid).children(recursive=True))
        return found

    def hit(self, target: str, number: int) -> None:
        """Send a signal to one of TARGETS; to torchrun where there is no such part yet."""
        parts = self.parts()
        ranks = parts.get("rank 0", []) + parts.get("rank 1", [])
        groups = {"all ranks": ranks, "everything": parts["torchrun"] + ranks}
        found = groups.get(target, parts.get(target, []))
        for process in (found[:1] if target in SPARED else found) or parts["torchrun"]:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def wait_until_gone(self, limit_s: float, what: str) -> float:
        """Return the seconds until no process is left; Failed if it takes too long."""
        start = time.monotonic()
        while self.process.poll() is None or tagged(self.tag):
            if time.monotonic() - start > limit_s:
                raise Failed(f"{what}: after {limit_s:g} s there were still {in_words(tagged(self.tag))}")
            time.sleep(0.05)
        return time.monotonic() - start

    def kill(self) -> None:
        """End all processes."""
        for process in tagged(self.tag):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()

    def log_state(self) -> tuple[int, int]:
        """Return what changes with every write to metrics.jsonl."""
        with contextlib.suppress(OSError):
            found = (self.run_dir / "metrics.jsonl").stat()
            return found.st_ino, found.st_size
        return 0, 0

    def checkpoint_is_written(self) -> bool:
        """Tell whether an unfinished checkpoint lies there that no earlier start has left."""
        with contextlib.suppress(OSError):
            unfinished = (self.run_dir / "checkpoints").glob("step_*.tmp")
            return any(path.stat().st_mtime > self.started for path in unfinished)
        return False


def start_trainer(run_dir: Path, *settings: object) -> Started:
    """Start train_rl.py on two ranks."""
    return Started([*torchrun(2), str(TRAINER), *map(str, settings), f"run.dir={run_dir}"], run_dir)
