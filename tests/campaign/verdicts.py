"""Decide whether a disturbed run equals the undisturbed run, was refused, or failed (see faults.py)."""

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

from experiments.bench.common import ROOT

TRAINER = ROOT / "train_rl.py"
TINY = ROOT / "data" / "built" / "tiny" / "model"
TIMES = (  # metrics that measure time or memory
    "seconds", "completion_seconds", "peak_rss", "rollout_bubble", "rollout_tail", "straggler",
    "reward_latency",
)  # fmt: skip
VERDICTS = ("same", "refused", "failed")
LEFT_S = 20.0  # all processes of a run must exit within this time after a kill
END_S = 90.0  # the same after a signal that lets the run write a checkpoint
REFUSAL_S = 20.0  # invalid input must be refused within this time
RUN_S = 120.0  # time limit of a run; a start takes about a tenth


class Failed(Exception):
    """The verdict of a case is `failed`; the message gives the reason."""


@dataclass(frozen=True)
class Bench:
    """The environment that all cases share."""

    # launch(ranks, script, *arguments, timeout_s)
    launch: Callable[..., subprocess.CompletedProcess]
    workload: list[str]
    reference: Path  # folder of the undisturbed run of the workload
    seconds: float = 15.0  # duration of the undisturbed run
    limit_s: float = RUN_S  # time limit of a run

    def run(
        self, *settings: object, ranks: int = 2, timeout_s: float | None = None
    ) -> subprocess.CompletedProcess:
        """Run the workload with more settings; raise Failed after timeout_s, by default limit_s."""
        timeout_s = timeout_s or self.limit_s
        try:
            return self.launch(ranks, str(TRAINER), *self.workload, *settings, timeout_s=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"no end after {timeout_s:g} s") from error

    def must_be_same(self, run_dir: Path, *settings: object) -> None:
        """Start or resume the workload; raise Failed if its end differs from the undisturbed run."""
        done = self.run(f"run.dir={run_dir}", *settings)
        if done.returncode:
            raise Failed(f"exit code {done.returncode}: {end_of(done.stderr)}")
        must_equal(run_dir, self.reference)

    def must_refuse(self, name: str, *settings: object, folder: Path | None = None, **options) -> str:
        """Run the workload and return the line that refuses it, see refusal()."""
        return refusal(self.run(*settings, **options), name, folder)


Attempt = Callable[[Bench, Path], tuple[str, str]]  # (bench, folder of the case) -> (verdict, detail)


def rows_of(run_dir: Path) -> list[dict]:
    """Return the rows of metrics.jsonl, leaving out metrics of time and memory."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def weights_of(run_dir: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of exported weights."""
    files = sorted((run_dir / "model").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def must_equal(run_dir: Path, reference: Path, but: tuple[str, ...] = ()) -> None:
    """Raise Failed with the first difference between two finished runs.

    but: prefixes of metrics that may differ.
    """
    rows = rows_of(run_dir)
    expected = rows_of(reference)
    if [row["step"] for row in rows] != [row["step"] for row in expected]:
        raise Failed(f"metrics.jsonl has the steps {[row['step'] for row in rows]}")
    for row, expected_row in zip(rows, expected):
        names = [name for name in {**row, **expected_row} if row.get(name) != expected_row.get(name)]
        if names := [name for name in names if not name.startswith(but)]:
            raise Failed(f"step {row['step']} has another {', '.join(names[:5])}")
    if not weights_of(reference) or weights_of(run_dir) != weights_of(reference):
        raise Failed("the exported weights are others")


def end_of(text: str) -> str:
    """Return the last line of a text that is not blank or a ruler."""
    lines = [line for line in text.splitlines() if line.strip(" =-")]
    return lines[-1][:300] if lines else "nothing was printed"


def refusal(done: subprocess.CompletedProcess, name: str, folder: Path | None = None) -> str:
    """Return the line that refuses a command; raise Failed if the line is missing or the exit code is 0.

    name: must occur in the line, outside of the path of `folder`.
    """
    lines = done.stderr.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith("error on rank")), None)
    if done.returncode == 0:
        raise Failed("exit code 0")
    if "Traceback (most recent call last)" in done.stderr or start is None:
        raise Failed(f"exit code {done.returncode}, but no line of its own: {end_of(done.stderr)}")
    line, *after = lines[start:]
    message = line.partition("; the stack is in ")[0].replace(str(folder), "")
    if (after and after[0].strip()) or len(line) > 2000 or not line.isprintable():
        raise Failed(f"it is not one printable line of 2,000 characters: {lines[start : start + 5]!r}"[:1000])
    if name not in message:
        raise Failed(f"its line does not name {name!r}: {line}")
    return line[:300]


def try_case(bench: Bench | None, name: str, attempt: Attempt, out: Path) -> dict:
    """Try a case in a new folder, which is deleted unless the verdict is failed."""
    folder = out / re.sub(r"[^\w./=-]+", "_", name)
    start = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        verdict, detail = attempt(bench, folder)
    except Failed as failed:
        verdict = "failed"
        detail = str(failed)
    except Exception as error:  # an error in a case must not end the campaign
        verdict = "failed"
        detail = f"{type(error).__name__}: {error}"
    if verdict != "failed":
        shutil.rmtree(folder, ignore_errors=True)
    seconds = round(time.monotonic() - start, 1)
    return {"name": name, "verdict": verdict, "seconds": seconds, "detail": detail}


def tagged(folder: str) -> list[psutil.Process]:
    """List the live processes with a folder in their PYTHONPATH, which reward workers inherit."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            paths = process.environ().get("PYTHONPATH", "").split(os.pathsep)
            processes += [process] if folder in paths and process.status() != psutil.STATUS_ZOMBIE else []
    return processes


def flip(file: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    """Truncate a file to its first half."""
    os.truncate(file, file.stat().st_size // 2)


DAMAGE = {"flipped": flip, "cut": cut, "emptied": lambda file: os.truncate(file, 0), "removed": Path.unlink}
