"""Disturb runs from the outside, and compare what comes out with an undisturbed run.

    python -m experiments.bench.faults --out runs/faults --json faults.json     # twenty minutes, two cores
    python -m experiments.bench.faults --out runs/faults --kinds settings data

Every case ends with a verdict:

    same      after the fault the same command ends well; the rows of metrics.jsonl without their times and
              the SHA-256 of the exported weights are those of the undisturbed run
    refused   the command ends soon, with one line that names the file, the row, the setting or the function
    failed    anything else; its folder in --out is kept

Kinds:

    kills     SIGKILL to torchrun, a rank, all ranks or a reward worker: half of them while a checkpoint or a
              log is written or a rank imports, half at random moments; several hit a run before it may finish
    signals   SIGTERM and SIGINT to torchrun or to all processes, once and twice
    damage    files of the newest checkpoint flipped, cut, emptied, removed; folders and lines of others
    disk      a full file system (a tmpfs, which only root can mount)
    rewards   functions that hang, die, flood, forge
    data      rows, files and models that no run can use
    settings  values just and far outside of the bounds, unknown names, hostile YAML

A case that has ended with same or refused is not tried again by the same command; one that failed is.
The kinds from damage on start ranks as forks of a server that has imported the slow libraries.
"""

import argparse
import contextlib
import hashlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from unittest import mock

import psutil
from tqdm import tqdm

from experiments.bench.common import (
    ROOT,
    TINY,
    TRAINER,
    make_parser,
    markdown,
    model_folder,
    torchrun,
    write_json,
)

KINDS = ("kills", "signals", "damage", "disk", "rewards", "data", "settings")
WORKLOAD = [  # six quick steps with two checkpoints on the way
    "--config", "experiments/environments/tiny.yaml", "train.num_steps=6", "rollout.prompts_per_step=8",
    "rollout.group_size=4", "checkpoint.every=2", "eval.every=2", "eval.num_samples=2", "run.log_every=1",
    "data.eval=[{path: data/built/tiny/test.jsonl, name: additions, limit: 20}]",
]  # fmt: skip
TIMES = (  # metrics that measure time or memory
    "seconds", "completion_seconds", "peak_rss", "rollout_bubble", "rollout_tail", "straggler",
    "reward_latency",
)  # fmt: skip
LEFT_S = 10.0  # no process of a run may be left so long after a part of it was killed
END_S = 60.0  # nor so long after a signal that lets it write a checkpoint
REFUSAL_S = 20.0  # input that cannot be used must be refused in this time
RUN_S = 60.0  # a start takes a tenth of it


# ------------------------------------------------------------------------------------------------------------
# Cases and what is compared
# ------------------------------------------------------------------------------------------------------------
class Failed(Exception):
    """The verdict of a case is `failed`; the message says why."""


@dataclass(frozen=True)
class Bench:
    """What all cases share.

    launch(num_ranks, script, *arguments, timeout_s) runs a script on ranks and returns its exit code and
    what it printed; the workload's settings and an undisturbed run of it; the seconds that run took.
    """

    launch: Callable[..., subprocess.CompletedProcess]
    workload: list[str]
    reference: Path
    seconds: float = 15.0

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

    def must_refuse(
        self,
        name: str,
        *settings: object,
        ranks: int = 2,
        timeout_s: float = RUN_S,
        folder: Path | None = None,
    ) -> str:
        """Run the workload; return the line that refuses it, see refusal()."""
        return refusal(self.run(*settings, ranks=ranks, timeout_s=timeout_s), name, folder)


@dataclass(frozen=True)
class Case:
    """A fault. attempt(bench, folder) returns the verdict and what there is to say, or raises Failed."""

    name: str  # kind/what
    attempt: Callable[[Bench, Path], tuple[str, str]]


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
        names = [name for name in names if not name.startswith(but)]
        if names:
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


def try_case(bench: Bench, case: Case, out: Path) -> dict:
    """Try a case in a folder of its own, which is kept if the verdict is failed."""
    folder, start = out / case.name.replace(" ", "_").replace(",", ""), time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        verdict, detail = case.attempt(bench, folder)
    except Failed as failed:
        verdict, detail = "failed", str(failed)
    except Exception as error:  # a case that does not fit the code any more must not end the campaign
        verdict, detail = "failed", f"{type(error).__name__}: {error}"
    if verdict != "failed":
        shutil.rmtree(folder, ignore_errors=True)
    seconds = round(time.monotonic() - start, 1)
    kind = case.name.partition("/")[0]
    return {"name": case.name, "kind": kind, "verdict": verdict, "seconds": seconds, "detail": detail}


# ------------------------------------------------------------------------------------------------------------
# Ranks as forks of a server
# ------------------------------------------------------------------------------------------------------------
SLOW_LIBRARIES = ["train_rl", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "tensorboard.compat"]


def start_server() -> multiprocessing.context.ForkServerContext:
    """Start the server of forks, unless it runs."""
    from rollout import set_vllm_environment

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SLOW_LIBRARIES)
    with mock.patch.dict(os.environ, {"PYTHONPATH": str(ROOT)}):
        set_vllm_environment(on_gpu=False)
        multiprocessing.forkserver.ensure_running()
    return context


def run_rank(arguments: list[str], environment: dict[str, str], folder: Path) -> None:
    """Run a script as a process of its own would; what it prints goes to two files of a folder."""
    resource_tracker.register = resource_tracker.unregister = lambda *_: None  # what a rank leaves is no leak
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / f"{name}_{environment['RANK']}", os.O_WRONLY | os.O_CREAT), number)
        (sys.stdout, sys.stderr)[number - 1].reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv, sys.path[:0] = arguments, [str(Path(arguments[0]).parent), str(ROOT)]
    runpy.run_path(arguments[0], run_name="__main__")


def forked(num_ranks: int, *arguments: object, timeout_s: float = RUN_S) -> subprocess.CompletedProcess:
    """Run a script on forks; when one fails the others are ended. TimeoutExpired after timeout_s."""
    context, arguments, ranks = start_server(), [str(argument) for argument in arguments], []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            for rank in range(num_ranks):
                own = common | {"RANK": rank, "LOCAL_RANK": rank}
                own = os.environ | {name: str(value) for name, value in own.items()}
                ranks.append(context.Process(target=run_rank, args=(arguments, own, folder)))
                ranks[-1].start()
            deadline, waiting = time.monotonic() + timeout_s, {rank.sentinel: rank for rank in ranks}
            while waiting and not any(rank.exitcode for rank in ranks) and time.monotonic() < deadline:
                for sentinel in multiprocessing.connection.wait(waiting, timeout=1):
                    waiting.pop(sentinel).join()
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        texts = [
            "".join(file.read_text(errors="replace") for file in sorted(folder.glob(f"{name}_*")))
            for name in ("stdout", "stderr")
        ]
    if waiting and time.monotonic() >= deadline:
        raise subprocess.TimeoutExpired(arguments, timeout_s, *texts)
    code = next((rank.exitcode for rank in ranks if rank not in waiting.values() and rank.exitcode), 0)
    return subprocess.CompletedProcess(arguments, code, *texts)


# ------------------------------------------------------------------------------------------------------------
# Kills and signals
# ------------------------------------------------------------------------------------------------------------
AIMS = ("checkpoint", "random", "log", "random", "imports", "random")  # half of the moments are chosen
TARGETS = ("torchrun", "rank 0", "rank 1", "all ranks", "everything", "worker")


@dataclass(frozen=True)
class Blow:
    """Signals to a part of a run, at a moment."""

    aim: str  # one of AIMS
    target: str  # one of TARGETS
    moment: float  # in [0, 1): where in the span of its aim
    signals: tuple[int, ...] = (signal.SIGKILL,)


def tagged(folder: str) -> list[psutil.Process]:
    """List the processes that are alive and have a folder in their PYTHONPATH."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                paths = process.environ().get("PYTHONPATH", "").split(os.pathsep)
                found += [process] if folder in paths else []
    return found


class Started:
    """A run under torchrun whose processes are found by an entry of PYTHONPATH, which workers keep, too."""

    def __init__(self, bench: Bench, run_dir: Path):
        self.run_dir, self.tag = run_dir, str(run_dir.parent)
        self.log = run_dir.parent / "log.txt"
        environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{self.tag}", "OMP_NUM_THREADS": "1"}
        command = [*torchrun(2), str(TRAINER), *bench.workload, f"run.dir={run_dir}"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | environment, stdout=log, stderr=log
            )  # fmt: skip
        self.since, self.started = time.monotonic(), time.time()
        self.roles: dict[str, list[psutil.Process]] = {}

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.since

    def processes(self) -> list[psutil.Process]:
        """List the processes of the run that are alive."""
        return tagged(self.tag)

    def find_roles(self) -> None:
        """Sort the processes into torchrun, ranks and reward workers."""
        self.roles = {"torchrun": [psutil.Process(self.process.pid)]}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                command, rank = process.cmdline(), process.environ().get("RANK")
                role = "worker" if "--worker" in command else f"rank {rank}" if rank else ""
                if role == "worker" or (rank and str(TRAINER) in command):
                    self.roles.setdefault(role, []).append(process)

    def targets(self, name: str) -> list[psutil.Process]:
        """Return the processes that a blow hits; torchrun where there is no such process yet."""
        ranks = self.roles.get("rank 0", []) + self.roles.get("rank 1", [])
        groups = {"all ranks": ranks, "everything": self.roles["torchrun"] + ranks}
        found = groups.get(name, self.roles.get(name, []))
        return (found[:1] if name == "worker" else found) or self.roles["torchrun"]

    def wait_until_gone(self, limit_s: float, what: str) -> float:
        """Return the seconds until no process is left; Failed, and all are killed, if it takes too long."""
        start = time.monotonic()
        while (self.process.poll() is None) or self.processes():
            if time.monotonic() - start > limit_s:
                left = sorted({" ".join(process.cmdline())[-60:] for process in self.processes()})
                self.kill()
                raise Failed(f"{what}: after {limit_s:g} s there still was {'; '.join(left)}")
            time.sleep(0.05)
        return time.monotonic() - start

    def kill(self) -> None:
        """End all processes."""
        for process in self.processes():
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


def moments_of(run: Started, blow: Blow, seconds: float) -> Iterator[bool]:
    """Yield, at each look, whether it is time for a blow."""
    delay = {"checkpoint": 0.05, "log": 0.01}.get(blow.aim, 0.0) * blow.moment
    wanted = {"imports": 0.2 + 3.8 * blow.moment, "random": blow.moment * seconds}.get(blow.aim)
    before, changes = run.log_state(), 0
    while True:
        if wanted is not None:
            yield run.seconds() >= wanted
            continue
        present = run.log_state()
        changes, before = changes + (present != before), present
        is_there = run.checkpoint_is_written() if blow.aim == "checkpoint" else changes > 4 * blow.moment
        if is_there:
            time.sleep(delay)
        yield is_there


def strike(bench: Bench, run_dir: Path, blow: Blow) -> str | None:
    """Start the run, deal a blow and wait for its end; return what happened, None if it had ended before."""
    run, looked_at = Started(bench, run_dir), 0.0
    try:
        for is_time in moments_of(run, blow, bench.seconds):
            if run.process.poll() is not None:
                if run.process.returncode:
                    raise Failed(f"before the blow: {end_of(run.log.read_text(errors='replace'))}")
                return None
            if run.seconds() > looked_at + 0.5 or (is_time and blow.aim in ("imports", "random")):
                run.find_roles()
                looked_at = run.seconds()
            if is_time:
                break
            time.sleep(0.001)
        at, during = run.seconds(), ", checkpoint being written" * run.checkpoint_is_written()
        what = f"{blow.target} at {at:.1f} s ({blow.aim}{during})"
        for number in blow.signals:
            hit(run, blow.target, number)
            time.sleep(1.2 if number != blow.signals[-1] else 0)
        if blow.target == "worker":  # which is replaced, so the run itself is ended a little later
            time.sleep(0.3)
            hit(run, "torchrun", signal.SIGKILL)
        took = run.wait_until_gone(LEFT_S if signal.SIGKILL in blow.signals else END_S, what)
        if f'File "{TRAINER}"' in run.log.read_text(errors="replace"):
            raise Failed(f"{what}: a raw stack of a rank is on the console")
        return f"{what}, gone after {took:.1f} s"
    finally:
        run.kill()


def hit(run: Started, target: str, number: int) -> None:
    """Send a signal to a part of a run."""
    for process in run.targets(target):
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def chain(blows: list[Blow]) -> Callable[[Bench, Path], tuple[str, str]]:
    """Return the attempt that deals blows to a run, one after another, and then lets it finish.

    Where a run ends before its blow it is compared, and the blow is dealt to a fresh one.
    """

    def attempt(bench: Bench, folder: Path) -> tuple[str, str]:
        run_dir, dealt = folder / "run", []
        for blow in blows:
            for _ in range(5):
                happened = strike(bench, run_dir, blow)
                if happened is not None:
                    break
                must_equal(run_dir, bench.reference)
                shutil.rmtree(run_dir)
            dealt.append(happened or "the run always ended first")
            (folder / "blows.txt").write_text("\n".join(dealt))
        try:
            bench.must_be_same(run_dir)
        except Failed as failed:
            raise Failed(f"{failed}; {'; '.join(dealt)}") from failed
        return "same", "; ".join(dealt)

    return attempt


def kill_cases(num: int, seed: int, per_chain: int = 5) -> list[Case]:
    """List the chains of so many kills."""
    cases, aims = [], [AIMS[i % len(AIMS)] for i in range(num)]
    for start in range(0, num, per_chain):
        rng = random.Random(f"{seed}/{start}")
        blows = [Blow(aim, rng.choice(TARGETS), rng.random()) for aim in aims[start : start + per_chain]]
        name = f"kills/{len(blows)} kills, chain {start // per_chain} of seed {seed}"
        cases.append(Case(name, chain(blows)))
    return cases


def signal_cases(seed: int) -> list[Case]:
    """List a chain for signals that come once and one for those that come twice."""
    cases, rng = [], random.Random(f"{seed}/signals")
    for times, word in ((1, "once"), (2, "twice")):
        blows = [
            Blow("log", target, 0.5 * rng.random(), (number,) * times)
            for number in (signal.SIGTERM, signal.SIGINT)
            for target in ("torchrun", "everything")
        ]
        cases.append(Case(f"signals/SIGTERM and SIGINT {word}, seed {seed}", chain(blows)))
    return cases


# ------------------------------------------------------------------------------------------------------------
# Damage and full disks
# ------------------------------------------------------------------------------------------------------------
def flip(file: Path, share: float = 0.5) -> None:
    """Flip a bit of a file, in the middle or at another share of its length."""
    content = bytearray(file.read_bytes())
    content[int(len(content) * share)] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "flipped": flip,
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "emptied": lambda file: file.write_bytes(b""),
    "removed": Path.unlink,
}
CHECKPOINT_FILES = (
    "state.json", "history.pt", "rank_00000.pt", "rank_00001.pt", "model/config.json",
    "model/model-00001-of-00002.safetensors", "model/model-00002-of-00002.safetensors",
    "model/model.safetensors.index.json", "model/tokenizer.json", "model/tokenizer_config.json",
)  # fmt: skip


def damage(name: str, kind: str, file: str = "") -> Callable[[Bench, Path], tuple[str, str]]:
    """Return the attempt that damages a file of the newest checkpoint and goes on from an older one.

    file: the damaged one, where it is another than the one that the message has to name.
    """

    def attempt(bench: Bench, folder: Path) -> tuple[str, str]:
        run_dir = shutil.copytree(bench.reference, folder / "run")
        newest = max((run_dir / "checkpoints").glob("step_*"))
        DAMAGE[kind](newest / (file or name))
        if (name, kind) == ("state.json", "removed"):  # this unmakes the checkpoint
            bench.must_be_same(run_dir)
            return "same", "the checkpoint without it counts as none"
        line = bench.must_refuse(f"{newest.name} is damaged: {name}", f"run.dir={run_dir}", timeout_s=60)
        bench.must_be_same(run_dir, "checkpoint.on_damage=older")
        return "refused", line

    return attempt


COUNTERS = ("consumed_prompts", "generated_tokens", "learning_rate", "digest")


def counter(name: str) -> Callable[[Bench, Path], tuple[str, str]]:
    """Return the attempt that flips the lowest bit of a number in state.json, which stays valid JSON."""

    def flip_digit(file: Path) -> None:
        content = bytearray(file.read_bytes())
        place = content.index(b'"history.pt": "' if name == "digest" else f'"{name}": '.encode())
        place = next(
            i for i in range(content.index(b":", place) + 3, len(content)) if content[i] in b"0123456789"
        )
        content[place] ^= 1
        file.write_bytes(content)

    def attempt(bench: Bench, folder: Path) -> tuple[str, str]:
        with mock.patch.dict(DAMAGE, {"changed": flip_digit}):
            return damage("state.json" if name != "digest" else "history.pt", "changed", "state.json")(
                bench, folder
            )

    return attempt


def other_folders(bench: Bench, folder: Path) -> tuple[str, str]:
    """Go on beside copies of checkpoints that a user has made."""
    run_dir = unfinished(bench, folder)
    names = ("step_old", "step_000004_best", "step_99", "best")
    for name in names:
        shutil.copytree(run_dir / "checkpoints" / "step_000004", run_dir / "checkpoints" / name)
    bench.must_be_same(run_dir)
    if missing := [name for name in names if not (run_dir / "checkpoints" / name / "state.json").is_file()]:
        raise Failed(f"{', '.join(missing)} was removed")
    return "same", ""


def unfinished(bench: Bench, folder: Path) -> Path:
    """Copy the undisturbed run, and take its end away: it goes on from step 4."""
    run_dir = shutil.copytree(bench.reference, folder / "run")
    shutil.rmtree(run_dir / "checkpoints" / "step_000006")
    shutil.rmtree(run_dir / "model")
    (run_dir / "summary.json").unlink()
    return run_dir


def broken_lines(bench: Bench, folder: Path) -> tuple[str, str]:
    """Go on with lines in metrics.jsonl that are no rows."""
    run_dir = unfinished(bench, folder)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (run_dir / name).open("ab") as file:
            file.write(b'garbage}\n[]\n{"score": 1}\n\xff\xfe\n{"step": "4"}\n{"step": 5, "sc')
    bench.must_be_same(run_dir)
    return "same", ""


def damage_cases() -> list[Case]:
    """List every file with every damage, and what lies beside checkpoints."""
    cases = [
        Case(f"damage/{name} {kind}", damage(name, kind)) for name in CHECKPOINT_FILES for kind in DAMAGE
    ]
    cases += [Case(f"damage/state.json, {name} changed", counter(name)) for name in COUNTERS]
    return [
        *cases,
        Case("damage/copies beside checkpoints", other_folders),
        Case("damage/lines that are no rows", broken_lines),
    ]


DISKS = {  # bytes that are free, and settings
    "before the start": (0, []),
    "at the start": (60_000, []),
    "first checkpoint": (8 << 20, []),
    "second checkpoint": (20 << 20, []),
    "last checkpoint": (38 << 20, []),
    "export": (17 << 20, ["checkpoint.every=0"]),
    "between two steps": (None, ["checkpoint.every=0"]),
}


def fill(file: Path, free: int) -> None:
    """Write a file until so many bytes of its file system are free."""
    with file.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        for _ in range((shutil.disk_usage(file.parent).free - free) >> 12):
            filler.write(bytes(4096))


def fill_after_a_step(filler: Path, run_dir: Path) -> None:
    """Fill a file system as soon as a run logs something."""
    deadline = time.monotonic() + RUN_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if (run_dir / "metrics.jsonl").stat().st_size:
                return fill(filler, 0)
        time.sleep(0.001)


def full_disk(free: int | None, settings: list[str]) -> Callable[[Bench, Path], tuple[str, str]]:
    """Return the attempt that lets a run fill its file system and then gives it room.

    free: bytes that are free when the run starts; None: many, until the first row is logged.
    """

    def attempt(bench: Bench, folder: Path) -> tuple[str, str]:
        (disk := folder / "disk").mkdir()
        filler, run_dir = disk / "filler", disk / "run"
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=True)
        try:
            if free is not None:
                fill(filler, free)
            else:
                threading.Thread(target=fill_after_a_step, args=(filler, run_dir), daemon=True).start()
            line = bench.must_refuse(str(disk), f"run.dir={run_dir}", *settings)
            filler.unlink()
            bench.must_be_same(run_dir, *settings)
            return "refused", line
        finally:
            subprocess.run(["umount", "-l", disk], check=True)

    return attempt


# ------------------------------------------------------------------------------------------------------------
# Reward functions
# ------------------------------------------------------------------------------------------------------------
HOSTILE = """
import asyncio, json, os, signal, sys, time

def raises(completion, answer): raise KeyError("no such test\\x1b[31m")
def gives_nan(completion, answer): return float("nan")
def gives_none(completion, answer): return None
def gives_2(completion, answer): return 2
def gives_text(completion, answer): return "1"
def leaves(completion, answer): sys.exit(0)
def exits(completion, answer): os._exit(0)
def aborts(completion, answer): os.abort()
def recurses(completion, answer): return recurses(completion, answer)
def eats(completion, answer): return bytearray(1 << 40)
def blocks(completion, answer): time.sleep(1000)
def hangs(completion, answer):
    while True: pass
def ignores_alarm(completion, answer):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True: time.sleep(1)
def masks_alarm(completion, answer):
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True: time.sleep(1)
async def blocks_the_loop(completion, answer): time.sleep(1000)
async def waits_for_ever(completion, answer):
    while True:
        try: await asyncio.sleep(1000)
        except asyncio.CancelledError: pass
def closes(completion, answer):
    os.closerange(0, 256)
    return 0.5
def leaves_children(completion, answer):
    for _ in range(20):
        if os.fork() == 0:
            time.sleep(1000); os._exit(0)
    return 0.5
def dies_with_children(completion, answer):
    leaves_children(completion, answer); os.abort()
def floods(completion, answer):
    for _ in range(50): os.write(1, b"x" * (1 << 20)); os.write(2, b"z" * (1 << 20)); print("y" * 1000)
    return 0.5
def write_everywhere(text):
    for fd in range(3, 256):
        try: os.write(fd, text)
        except OSError: pass
def writes_garbage(completion, answer): write_everywhere(b"garbage }\\n"); return 0.5
def writes_half(completion, answer): write_everywhere(b"[half a line"); return 0.5
def writes_much(completion, answer): write_everywhere(b"x" * (1 << 21)); return 0.5
def forges(completion, answer):
    write_everywhere(json.dumps(["0" * 16, 1.0, "ok", "", {}, 0.1]).encode() + b"\\n"); return 0.5
def forges_shape(completion, answer): write_everywhere(b'["0", {"fields": 3}]\\n[]\\n7\\n'); return 0.5
"""
STATUSES = {  # of the item itself, where it is not "error"
    **dict.fromkeys(("blocks", "hangs", "ignores_alarm", "masks_alarm", "blocks_the_loop"), ("timeout",)),
    "waits_for_ever": ("timeout",),
    **dict.fromkeys(("leaves_children", "floods"), ("wrong",)),
    **dict.fromkeys(("closes", "writes_garbage", "writes_half", "writes_much", "forges", "forges_shape"),
                    ("wrong", "error")),
}  # fmt: skip


def hostile_functions() -> list[str]:
    """List the names of the functions."""
    names = [line.partition("(")[0].split()[-1] for line in HOSTILE.splitlines() if "def " in line]
    return [name for name in names if name != "write_everywhere"]


def hostile_function(name: str) -> Callable[[Bench, Path], tuple[str, str]]:
    """Return the attempt that scores items with a function between rules, and then checks it before a run."""

    def attempt(bench: Bench, folder: Path) -> tuple[str, str]:
        import reward

        (folder / "hostile.py").write_text(HOSTILE)
        kind, start, refused = f"{folder / 'hostile.py'}:{name}", time.monotonic(), ""
        rules = {("exact", "a", "a"): 1.0, ("exact", "b", "a"): 0.0, ("characters", "ab", "ac"): 0.5}
        tag = {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
        with mock.patch.object(reward, "GRACE_S", 1.0), mock.patch.dict(os.environ, tag):
            with reward.RewardPool(2, timeout_s=1.0, memory_bytes=1 << 30) as pool:
                for i in range(3):
                    for item in rules:
                        pool.submit((i, *item), *item)
                    pool.submit(i, kind, "x", "a", {})
                verdicts = pool.collect()
            try:
                reward.check_functions([kind], [(kind, "a", {})], reward.RewardSettings(timeout_s=1.0))
            except ValueError as error:
                refused = str(error)
        own = {verdicts.pop(i).status for i in range(3)}
        if any(verdict.reward != rules[key[1:]] for key, verdict in verdicts.items()):
            raise Failed("a rule beside it has another verdict")
        if not own <= set(STATUSES.get(name, ("error",))):
            raise Failed(f"its own verdicts are {sorted(own)}")
        if "wrong" not in own and not (f":{name}:" in refused and refused.isprintable()):
            raise Failed(f"the check before a run says {refused!r}")
        ended = time.monotonic()
        while left := tagged(str(folder)):
            if time.monotonic() - ended > LEFT_S:
                raise Failed(f"{len(left)} processes are left after {LEFT_S:g} s")
        if time.monotonic() - start > END_S:
            raise Failed(f"it took {time.monotonic() - start:.0f} s")
        return "same", f"{', '.join(sorted(own))}; before a run: {refused[:300] or 'let pass'}"

    return attempt


IN_A_RUN = ("raises", "gives_nan", "gives_2", "gives_text", "leaves", "exits", "aborts", "hangs", "recurses")


def hostile_run(bench: Bench, folder: Path) -> tuple[str, str]:
    """Train on rows of which every fourth has a hostile function; else it is one that only raises."""
    right = "    return lambda completion, answer: completion == answer or function(completion, answer)\n"
    text = [HOSTILE, "def unless_right(function):\n" + right]
    text += [f"in_run_{name} = unless_right({name})\n" for name in IN_A_RUN]
    (folder / "hostile.py").write_text("".join(text))
    rows = [
        json.loads(line) for line in (TINY.parent / "train.jsonl").read_text().splitlines()[:48]
    ]  # each is met
    runs = {"all": IN_A_RUN, "one": IN_A_RUN[:1]}
    for run, names in runs.items():
        functions = [f"{folder / 'hostile.py'}:in_run_{name}" for name in names]
        for i, row in enumerate(rows[::4]):
            row["kind"] = functions[i % len(functions)]
        (folder / f"{run}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        done = bench.run(
            f"data.train=[{{path: {folder / run}.jsonl}}]", f"reward.functions={json.dumps(functions)}",
            "reward.max_failed_frac=1", "reward.timeout_s=1", "data.eval=[]", "checkpoint.every=0",
            f"run.dir={folder / run}",
        )  # fmt: skip
        if done.returncode:
            raise Failed(f"exit code {done.returncode}: {end_of(done.stderr)}")
    must_equal(folder / "all", folder / "one", ("verdict/", "reward_worker_restarts", "length_"))
    for status in ("error", "timeout"):
        if not any(row.get(f"verdict/{status}_frac") for row in rows_of(folder / "all")):
            raise Failed(f"no verdict was {status}")
    return "same", "weights and rewards are those of a run in which all of them only raise"


# ------------------------------------------------------------------------------------------------------------
# Data and models
# ------------------------------------------------------------------------------------------------------------
LONG = "9" * 5000
ROWS = {  # the third row of a prompt file
    "answer 1e400": '{"prompt": "1+1=", "answer": 1e400}',
    "answer NaN": '{"prompt": "1+1=", "answer": NaN}',
    "answer true": '{"prompt": "1+1=", "answer": true}',
    "answer null": '{"prompt": "1+1=", "answer": null}',
    "answer a mapping": '{"prompt": "1+1=", "answer": {"a": 1}}',
    "no answer": '{"prompt": "1+1="}',
    "empty prompt": '{"prompt": "", "answer": "2"}',
    "prompt true": '{"prompt": true, "answer": "2"}',
    "prompt a list of numbers": '{"prompt": [1, 2], "answer": "2"}',
    "doubled key": '{"prompt": "1+1=", "prompt": "2+2=", "answer": "2"}',
    "5,000 digits": f'{{"prompt": "1+1=", "answer": {LONG}}}',
    "100,000 brackets": '{"prompt": "1+1=", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "surrogate in a prompt": r'{"prompt": "1+\ud800=", "answer": "2"}',
    "surrogate in an answer": r'{"prompt": "1+1=", "answer": "\ud800"}',
    "code as kind": """{"prompt": "1+1=", "answer": "open('TRACE', 'w')", "kind": "timeit:timeit"}""",
    "unknown kind": '{"prompt": "1+1=", "answer": "2", "kind": "exakt"}',
    "2 MB prompt": f'{{"prompt": "{"1+" * 1_000_000}", "answer": "2"}}',
    "a list": "[1, 2]",
    "cut": '{"prompt": "1+1=", "ans',
    "no JSON": "prompt: 1+1=",
    "NUL bytes": "\0" * 100,
}
FILES = {  # a prompt file as a whole, by its ending
    "empty": (".jsonl", b""), "blank lines": (".jsonl", b"\n\n\n"), "a brace": (".jsonl", b"{"),
    "no UTF-8": (".jsonl", b'{"prompt": "\xff", "answer": "2"}\n'), "zip": (".jsonl", b"PK\x03\x04" * 99),
    "no parquet": (".parquet", b"PAR1 and nothing"), "cut gz": (".jsonl.gz", b"\x1f\x8b\x08\x00\x00"),
    "empty CSV": (".csv", b""), "CSV of zeros": (".csv", bytes(1000)), "a number": (".json", b"7"),
    "nested list": (".json", b"[" * 100_000),
}  # fmt: skip


def bad_row(row: str) -> Callable[[Bench, Path], tuple[str, str]]:
    """Return the attempt that trains on a file whose third row is bad, and then on the mended file."""

    def attempt(bench: Bench, folder: Path) -> tuple[str, str]:
        file, trace = folder / "rows.jsonl", folder / "trace"
        good = (TINY.parent / "train.jsonl").read_text().splitlines()[:8]
        bad = row.replace("TRACE", str(trace)).replace(
            '{"prompt"', '{"kind": "exact", "prompt"', "kind" not in row
        )
        file.write_text("\n".join([*good[:2], bad, *good[2:]]) + "\n")
        line = refuse_data(bench, file, r"(row|line) 3\b")
        if trace.exists():
            raise Failed("code of a row was executed")
        return "refused", line

    return attempt


def refuse_data(bench: Bench, file: Path, place: str = "") -> str:
    """Train on a file; return the line that refuses it and names it, Failed without one in a short time."""
    settings = (f"data.train=[{{path: {file}}}]", "model.ep_size=1", f"run.dir={file.parent / 'run'}")
    line = bench.must_refuse(str(file), *settings, ranks=1, timeout_s=REFUSAL_S)
    if not re.search(place, line):
        raise Failed(f"the line does not name the place: {line}")
    return line


def bad_file(ending: str, content: bytes) -> Callable[[Bench, Path], tuple[str, str]]:
    """Return the attempt that trains on a file with this content."""

    def attempt(bench: Bench, folder: Path) -> tuple[str, str]:
        (file := folder / f"rows{ending}").write_bytes(content)
        return "refused", refuse_data(bench, file)

    return attempt


def edit_json(**changes: object) -> Callable[[Path], None]:
    """Return a function that changes values of a JSON file."""
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(change: Callable) -> Callable[[Path], None]:
    """Return a function that changes the tensors {name: tensor} of a safetensors file."""

    def edit(file: Path) -> None:
        from safetensors.torch import load_file, save_file

        save_file(change(load_file(file)), file, {"format": "pt"})

    return edit


def with_code(file: Path) -> None:
    """Have config.json name code beside it."""
    trace = f"open({str(file.parent / 'trace')!r}, 'w')\n"
    (file.parent / "own.py").write_text(trace + "from transformers import Qwen3MoeConfig as Own\n")
    names = {name: "own.Own" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}
    edit_json(auto_map=names)(file)


def with_fewer_tokens(file: Path) -> None:
    """Take the last tokens of the tokenizer out of config.json and of the weights."""
    edit_json(vocab_size=16)(file)
    cut = lambda all: {
        n: t[:16].clone() if "embed_tokens" in n or "lm_head" in n else t for n, t in all.items()
    }
    edit_weights(cut)(file.with_name(WEIGHTS))


WEIGHTS = "model-00001-of-00001.safetensors"
ROUTER = "model.layers.0.mlp.gate.weight"
MODELS = {  # (file, what is done to it, what the line names); None: the code in it is not to run
    "no config": ("config.json", Path.unlink, "config.json"),
    "cut config": ("config.json", DAMAGE["cut"], "config.json"),
    "config a list": ("config.json", lambda file: file.write_text("[]"), "config.json"),
    "config of another kind": ("config.json", edit_json(model_type="llama"), "llama"),
    "wrong shapes": ("config.json", edit_json(hidden_size=64), "embed_tokens"),
    "vocabulary below the tokenizer's": ("config.json", with_fewer_tokens, "vocab"),
    "code": ("config.json", with_code, None),
    "no tokenizer": ("tokenizer.json", Path.unlink, "tokenizer"),
    "cut tokenizer": ("tokenizer.json", DAMAGE["cut"], "tokenizer"),
    "no weights": (WEIGHTS, Path.unlink, "safetensors"),
    "cut weights": (WEIGHTS, DAMAGE["cut"], WEIGHTS),
    "empty weights": (WEIGHTS, DAMAGE["emptied"], WEIGHTS),
    "a weight less": (
        WEIGHTS, edit_weights(lambda all: {n: t for n, t in all.items() if n != ROUTER}), ROUTER),
    "a weight of NaN": (WEIGHTS, edit_weights(lambda all: all | {ROUTER: all[ROUTER] * math.nan}), ""),
}  # fmt: skip


def bad_model(name: str, edit: Callable[[Path], None], named: str | None):
    """Return the attempt that trains a damaged copy of the model, and then one without the damage."""

    def attempt(bench: Bench, folder: Path) -> tuple[str, str]:
        model = shutil.copytree(TINY, folder / "model")
        edit(model / name)
        settings = (f"model.path={model}", f"run.dir={folder / 'run'}", "train.num_steps=1", "data.eval=[]")
        if named is None:
            done = bench.run(*settings, timeout_s=60)
            if (model / "trace").exists():
                raise Failed("code of the model's folder was executed")
            return (
                ("same", "its code is not executed")
                if done.returncode == 0
                else ("refused", refusal(done, ""))
            )
        return "refused", bench.must_refuse(named, *settings, timeout_s=60, folder=folder)

    return attempt


def mended_data(bench: Bench, folder: Path) -> tuple[str, str]:
    """Start in a folder in which data and then a model were refused, as the undisturbed run does."""
    (file := folder / "rows.jsonl").write_text("{")
    refuse_data(bench, file)
    bench.must_refuse("nowhere", "model.path=nowhere", f"run.dir={folder / 'run'}", timeout_s=REFUSAL_S)
    bench.must_be_same(folder / "run")
    return "same", "a start in the same folder with the data and the model mended"


# ------------------------------------------------------------------------------------------------------------
# Settings
# ------------------------------------------------------------------------------------------------------------
def numbers_outside(info) -> list[str]:
    """List values just and far outside of a numeric setting's bounds, as YAML."""
    values, is_whole = [], "float" not in str(info.annotation)
    for bound in info.metadata:
        for name, sign in (("ge", -1), ("gt", -1), ("le", 1), ("lt", 1)):
            limit = getattr(bound, name, None)
            if isinstance(limit, (int, float)):
                next_one = limit + sign if is_whole else math.nextafter(limit, sign * math.inf)
                values += [repr(limit) if name in ("gt", "lt") else repr(next_one), str(sign * 10**30)]
    return values


def values_outside(info) -> list[str]:
    """List values that a setting cannot have, as YAML."""
    kinds = str(info.annotation)
    values = ["{a: 1}", ".inf", "-.inf", ".nan", "1.0e+400", "!!python/object/apply:os.getcwd []", "9" * 5000]
    if "int" in kinds or "float" in kinds:
        values += numbers_outside(info) + ["true", "many", "''"]
    if "list" not in kinds and "tuple" not in kinds:
        values += ["[1]"]
    if "Literal" in kinds:
        values += ["nonsense", "7.5"]
    if kinds == "<class 'bool'>":
        values += ["maybe", "2"]
    return [value for value in values if not ("dict" in kinds and value == "{a: 1}")]


def must_refuse_settings(name: str, argv: list[str]) -> None:
    """Raise Failed unless these arguments are refused soon, in a line that holds a name."""
    import train_rl

    def stop(*_: object) -> None:
        raise Failed(f"{' '.join(argv)[:200]}: no answer after {REFUSAL_S:g} s")

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, REFUSAL_S)
    try:
        train_rl.load_config(argv)
    except ValueError as error:
        line = str(error)
        if name not in line or len(line) > 5000:
            raise Failed(f"{' '.join(argv)[:200]}: does not name {name}: {line[:300]!r}") from error
    except (Exception, SystemExit) as error:
        raise Failed(f"{' '.join(argv)[:200]}: {type(error).__name__}: {str(error)[:300]}") from error
    else:
        raise Failed(f"{' '.join(argv)[:200]}: accepted")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def bad_setting(name: str, info) -> Callable[[Bench, Path], tuple[str, str]]:
    """Return the attempt that gives a setting values that it cannot have."""

    def attempt(bench: Bench, folder: Path) -> tuple[str, str]:
        problems, values = [], values_outside(info)
        section, _, key = name.partition("[].")
        for value in values:
            override = f"{section}=[{{path: unused, {key}: {value}}}]" if key else f"{name}={value}"
            argv = ["data.train=[{path: unused}]", override]
            try:
                must_refuse_settings(section if key else name, argv)
            except Failed as failed:
                problems.append(str(failed))
        if problems:
            raise Failed("; ".join(problems))
        return "refused", f"{len(values)} values"

    return attempt


LARGE = {  # what a run is given, and what the line names if it is refused
    "run.timeout_s=1.0e+308": "run.timeout_s", "rollout.kv_cache_gib=1.0e+308": "rollout.kv_cache_gib",
    f"rollout.max_num_seqs={10**30}": "rollout.max_num_seqs",
    f"rollout.group_size={10**30}": "rollout.group_size",
    f"rollout.prompts_per_step={8**30}": "rollout.prompts_per_step",
    f"rollout.max_new_tokens={10**30}": "max_new_tokens",
    f"train.warmup_steps={10**30}": "train.warmup_steps",
    f"train.num_steps={10**30} train.max_generated_tokens=1": "train.num_steps",
    "train.learning_rate=1.0e+308": "", "algorithm.kl_coef=1.0e+308": "", "rollout.temperature=1.0e+308": "",
}  # fmt: skip


def too_large(settings: str, name: str) -> Callable[[Bench, Path], tuple[str, str]]:
    """Return the attempt that runs two steps with a value that has no bound, and looks at what it exports."""

    def attempt(bench: Bench, folder: Path) -> tuple[str, str]:
        common = ("train.num_steps=2", "data.eval=[]", "model.ep_size=1", f"run.dir={folder / 'run'}")
        done = bench.run(*common, *settings.split(), ranks=1, timeout_s=2 * REFUSAL_S)
        if done.returncode:
            return "refused", refusal(done, name)
        from safetensors.torch import load_file

        for file in (folder / "run" / "model").glob("*.safetensors"):
            if odd := [name for name, tensor in load_file(file).items() if not tensor.isfinite().all()]:
                raise Failed(f"exit code 0, and {len(odd)} exported tensors are not finite")
        return "same", "it runs, and the weights are finite"

    return attempt


YAMLS = {  # the text of a file, and what the line names
    "aliases of aliases": ("\n".join(
        ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
        + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]), "values"),
    "aliases of mappings": ("\n".join(
        ["a0: &a0 {x: 1, y: 2}"]
        + [f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 30)]), "values"),
    "an alias of itself": ("train: &a {betas: [*a]}", ""),
    "merge keys": ("a: &a {x: 1}\ntrain: {<<: *a, seed: 1}", ""),
    "deep nesting": ("train: {betas: " + "[" * 3000 + "]" * 3000 + "}", "nested too deeply"),
    "20,000 unknown names": (
        "train:\n" + "".join(f"  k{i}: 1\n" for i in range(20_000)), "unknown setting"),
    "long name": (f"train: {{{'k' * 1000}: 1}}", "unknown setting"),
    "doubled name": ("train: {seed: 1, seed: 2}", "given twice"),
    "a tag": ("train: !!python/object/apply:os.getcwd []", "tag"),
    "a key that is a list": ("? [1, 2]\n: 3", ""),
    "tabs": ("train:\n\tseed: 1", ""), "NUL": ("train: {seed: 1}\0", ""), "no UTF-8": ("\udcff\udcfe: 1", ""),
    "a list": ("- 1\n- 2", "expected sections"), "a number": ("7", "expected sections"),
    "a base that is itself": ("base: hostile.yaml", "leads back"), "a base that is a folder": ("base: .", ""),
    "two documents": ("train: {seed: 1}\n---\ntrain: {seed: 2}", ""),
}  # fmt: skip


def bad_yaml(text: str, name: str) -> Callable[[Bench, Path], tuple[str, str]]:
    """Return the attempt that reads settings from this text."""

    def attempt(bench: Bench, folder: Path) -> tuple[str, str]:
        (file := folder / "hostile.yaml").write_bytes(text.encode(errors="surrogateescape"))
        must_refuse_settings(name, ["--config", str(file)])
        return "refused", ""

    return attempt


def setting_cases() -> list[Case]:
    """List every setting, unknown names and files."""
    import train_rl
    from runtime.config import setting_fields

    known = setting_fields(train_rl.Config)
    cases = [Case(f"settings/{name}", bad_setting(name, info)) for name, info in known.items()]
    unknown = ["nonsense", "nonsense.x", "train", "train.", ".train", "", "a" * 1000]
    unknown += [f"{section}.nonsense" for section in train_rl.Config.model_fields]

    def unknown_names(bench: Bench, folder: Path) -> tuple[str, str]:
        for name in unknown:
            must_refuse_settings(name[:80], ["data.train=[{path: unused}]", f"{name}=1"])
        return "refused", f"{len(unknown)} names"

    return [
        *cases,
        Case("settings/unknown names", unknown_names),
        *(Case(f"settings/run, {given[0]}", too_large(*given)) for given in LARGE.items()),
        *(Case(f"settings/YAML, {name}", bad_yaml(*given)) for name, given in YAMLS.items()),
    ]


# ------------------------------------------------------------------------------------------------------------
# The campaign
# ------------------------------------------------------------------------------------------------------------
def cases_of(kind: str, kills: int, seed: int) -> list[Case]:
    """List the cases of a kind."""
    match kind:
        case "kills":
            return kill_cases(kills, seed)
        case "signals":
            return signal_cases(seed)
        case "damage":
            return damage_cases()
        case "disk":
            return [Case(f"disk/{name}", full_disk(*given)) for name, given in DISKS.items()]
        case "rewards":
            each = [Case(f"rewards/{name}", hostile_function(name)) for name in hostile_functions()]
            return [*each, Case("rewards/a run with them", hostile_run)]
        case "data":
            rows = [Case(f"data/{name}", bad_row(row)) for name, row in ROWS.items()]
            files = [Case(f"data/file, {name}", bad_file(*given)) for name, given in FILES.items()]
            models = [Case(f"data/model, {name}", bad_model(*given)) for name, given in MODELS.items()]
            return [*rows, *files, *models, Case("data/mended", mended_data)]
        case "settings":
            return setting_cases()


def undisturbed(out: Path) -> tuple[Path, float]:
    """Return the folder of an undisturbed run by torchrun, made if it is not there, and its seconds."""
    run_dir, note = out / "undisturbed", out / "undisturbed_seconds.json"
    if not note.is_file():
        model_folder("tiny")
        shutil.rmtree(run_dir, ignore_errors=True)
        start, command = time.monotonic(), [*torchrun(2), str(TRAINER), *WORKLOAD, f"run.dir={run_dir}"]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
        )
        if done.returncode:
            sys.exit("the undisturbed run failed, see above")
        note.write_text(json.dumps(time.monotonic() - start))
    return run_dir, json.loads(note.read_text())


def table_lines(results: list[dict]) -> list[str]:
    """Return the table of verdicts by kind."""
    rows = []
    for kind in dict.fromkeys(result["kind"] for result in results):
        own = [result for result in results if result["kind"] == kind]
        verdicts = Counter(result["verdict"] for result in own)
        seconds = round(sum(result["seconds"] for result in own))
        rows.append([kind, len(own), *(verdicts[name] for name in ("same", "refused", "failed")), seconds])
    total = ["all", *(sum(row[column] for row in rows) for column in range(1, 6))]
    return markdown(["kind", "cases", "same", "refused", "failed", "seconds"], [*rows, total])


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", required=True, help="finished cases, failed folders"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    parser.add_argument("--kills", type=int, default=40, help="number of SIGKILLs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of moments and targets (default: %(default)s)")
    args = parser.parse_args()
    if args.kills < 1:
        parser.error("--kills must be at least 1")
    return args


def known_results(record: Path) -> dict[str, dict]:
    """Return the results of earlier calls by the names of cases; of one that was tried again the last."""
    lines = record.read_text().splitlines() if record.is_file() else []
    return {result["name"]: result for result in map(json.loads, lines)}


def main() -> None:
    """Try the cases that are not finished and print the table."""
    args = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is ended, too
    sys.path.insert(0, str(ROOT))
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    reference, seconds = undisturbed(out)
    bench = Bench(forked, WORKLOAD, reference, seconds)
    cases = [case for kind in args.kinds for case in cases_of(kind, args.kills, args.seed)]
    record = out / "cases.jsonl"
    known = known_results(record)
    for case in tqdm(cases, desc="faults", unit="case", disable=None):
        if known.get(case.name, {}).get("verdict", "failed") == "failed":
            known[case.name] = try_case(bench, case, out)
            with record.open("a") as file:
                file.write(json.dumps(known[case.name]) + "\n")
            if known[case.name]["verdict"] == "failed":
                tqdm.write(f"failed: {case.name}: {known[case.name]['detail']}")
    results = [known[case.name] for case in cases]
    print("\n".join(table_lines(results)))
    for result in results:
        if result["verdict"] == "failed":
            print(f"failed: {result['name']}: {result['detail']}")
    write_json(args.json, results)
    sys.exit(any(result["verdict"] == "failed" for result in results))


if __name__ == "__main__":
    main()
