"""Say whether a disturbed run ended as an undisturbed one, was refused, or failed (see faults.py)."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from experiments.bench.common import TRAINER

TIMES = (  # metrics that measure time or memory
    "seconds", "completion_seconds", "peak_rss", "rollout_bubble", "rollout_tail", "straggler",
    "reward_latency",
)  # fmt: skip
VERDICTS = ("same", "refused", "failed")
LEFT_S = 20.0  # no process of a run may be left so long after a part of it was killed
END_S = 90.0  # nor so long after a signal that lets it write a checkpoint
REFUSAL_S = 20.0  # input that cannot be used must be refused in this time
RUN_S = 120.0  # a start takes a tenth of it


class Failed(Exception):
    """The verdict of a case is `failed`; the message says why."""


@dataclass(frozen=True)
class Bench:
    """What all cases share."""

    launch: Callable[
        ..., subprocess.CompletedProcess
    ]  # (ranks, script, *arguments, timeout_s) -> what it did
    workload: list[str]
    reference: Path  # the folder of an undisturbed run of the workload
    seconds: float = 15.0  # the time of that run

    def run(self, *settings: object, ranks: int = 2, timeout_s: float = RUN_S) -> subprocess.CompletedProcess:
        """Run the workload with more settings; Failed if it does not end in time."""
        try:
            return self.launch(ranks, str(TRAINER), *self.workload, *settings, timeout_s=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"no end after {timeout_s:g} s") from error

    def must_be_same(self, run_dir: Path, *settings: object) -> None:
        """Run the workload, or go on with it; Failed if its end differs from that of the undisturbed run."""
        done = self.run(f"run.dir={run_dir}", *settings)
        if done.returncode:
            raise Failed(f"exit code {done.returncode}: {end_of(done.stderr)}")
        must_equal(run_dir, self.reference)

    def must_refuse(self, name: str, *settings: object, folder: Path | None = None, **options) -> str:
        """Run the workload; return the line that refuses it, see refusal()."""
        return refusal(self.run(*settings, **options), name, folder)


Attempt = Callable[[Bench, Path], tuple[str, str]]  # (bench, own folder) -> verdict and what there is to say


def rows_of(run_dir: Path) -> list[dict]:
    """Return the rows of metrics.jsonl without anything that measures time or memory."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def weights_of(run_dir: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of exported weights."""
    files = sorted((run_dir / "model").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def must_equal(run_dir: Path, reference: Path, but: tuple[str, ...] = ()) -> None:
    """Raise Failed with the first difference between two finished runs; but: metrics that may differ."""
    rows, expected = rows_of(run_dir), rows_of(reference)
    if [row["step"] for row in rows] != [row["step"] for row in expected]:
        raise Failed(f"metrics.jsonl has the steps {[row['step'] for row in rows]}")
    for row, wanted in zip(rows, expected):
        names = [name for name in {**row, **wanted} if row.get(name) != wanted.get(name)]
        if names := [name for name in names if not name.startswith(but)]:
            raise Failed(f"step {row['step']} has another {', '.join(names[:5])}")
    if not weights_of(reference) or weights_of(run_dir) != weights_of(reference):
        raise Failed("the exported weights are others")


def end_of(text: str) -> str:
    """Return the last line that says something."""
    lines = [line for line in text.splitlines() if line.strip(" =-")]
    return lines[-1][:300] if lines else "nothing was printed"


def refusal(done: subprocess.CompletedProcess, name: str, folder: Path | None = None) -> str:
    """Return the line that says why a command ended; Failed if it ended well, or without such a line.

    name: what it must hold, be it outside of the path of this folder.
    """
    lines = done.stderr.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith("error on rank")), None)
    if done.returncode == 0:
        raise Failed("exit code 0")
    if "Traceback (most recent call last)" in done.stderr or start is None:
        raise Failed(f"exit code {done.returncode}, but no line of its own: {end_of(done.stderr)}")
    line, *after = lines[start:]
    said = line.partition("; the stack is in ")[0].replace(str(folder), "")
    if (after and after[0].strip()) or len(line) > 2000 or not line.isprintable():
        raise Failed(f"it is not one printable line of 2,000 characters: {lines[start : start + 5]!r}"[:1000])
    if name not in said:
        raise Failed(f"its line does not name {name!r}: {line}")
    return line[:300]


def try_case(bench: Bench | None, name: str, attempt: Attempt, out: Path) -> dict:
    """Try a case in a folder of its own, which is kept if the verdict is failed."""
    folder, start = out / re.sub(r"[^\w./=-]+", "_", name), time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        verdict, detail = attempt(bench, folder)
    except Failed as failed:
        verdict, detail = "failed", str(failed)
    except Exception as error:  # a case that does not fit the code any more must not end the campaign
        verdict, detail = "failed", f"{type(error).__name__}: {error}"
    if verdict != "failed":
        shutil.rmtree(folder, ignore_errors=True)
    seconds = round(time.monotonic() - start, 1)
    return {"name": name, "verdict": verdict, "seconds": seconds, "detail": detail}


def tagged(folder: str) -> list[psutil.Process]:
    """List the processes that are alive and have a folder in their PYTHONPATH, which reward workers keep."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            paths = process.environ().get("PYTHONPATH", "").split(os.pathsep)
            found += [process] if folder in paths and process.status() != psutil.STATUS_ZOMBIE else []
    return found


def flip(file: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    """Leave the first half of a file."""
    os.truncate(file, file.stat().st_size // 2)


DAMAGE = {"flipped": flip, "cut": cut, "emptied": lambda file: os.truncate(file, 0), "removed": Path.unlink}
