"""Detect hangs: name the rank that blocks the run, and abort with its stack traces.

A background thread on every rank samples the main thread every few seconds and writes a heartbeat to
torch.distributed's rendezvous store (no shared disk needed; under torchrun the store lives in node 0's agent
and survives the death of a rank). Two fields of a heartbeat decide:

    waiting   name of the collective that the main thread is inside; "" outside of collectives
    idle_s    seconds since the phase, the stack or the count of collectives last changed

Example: rank 3 is stuck in a reward function while ranks 0, 1 and 2 wait in all_reduce. After `run.warn_s`
rank 0 prints "rank 0 has waited 300 s for rank 3 in all_reduce", with the phase and the code line of rank 3.
After `run.timeout_s` the stack traces of rank 3 are printed and the run is aborted. A run in which no rank
makes progress is aborted, too: then every rank is idle, and none is waiting for another.

A thread that waits in a collective releases the interpreter, so a waiting rank still writes heartbeats. If
the interpreter of rank 3 is blocked (for example, in a C extension), the heartbeat stops, and faulthandler,
which works without the interpreter, writes the traces to `run.dir/stacks/` instead. The main thread
contributes only the name of the current phase (runtime/metrics.py: Clock).
"""

import contextlib
import faulthandler
import json
import os
import platform
import sys
import sysconfig
import threading
import time
import traceback
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from runtime.launch import report_to_torchrun

LIBRARIES = (sysconfig.get_paths()["stdlib"], "<frozen", "site-packages", "dist-packages")
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
MARGIN_S = 60.0  # added to run.timeout_s for the timeout of process groups, so that the watchdog speaks first
STATES = {"T": "its process is stopped", "t": "a debugger has stopped it", "D": "the kernel waits for a disk"}
NO_BEAT = {
    "beat": 0, "host": "?", "pid": 0, "phase": "?", "step": 0, "phase_s": 0.0, "idle_s": 0.0, "waiting": "",
    "collectives": 0, "where": "", "work": "",
}  # fmt: skip
STARTING = ("start", "setup")  # phases in which a model is loaded and kernels are compiled, maybe for long


class Watchdog:
    """Watch the thread that starts it, on one rank of a run; start() is called by all ranks.

    clock: `now` holds (phase, function that describes the work in progress). warn_s, timeout_s: see
    RunSettings. setup_timeout_s: replaces timeout_s until the set-up has ended; None: timeout_s. A process
    has one watchdog: a second start() stops the first watchdog.
    """

    running: ClassVar["Watchdog | None"] = None
    num_started: ClassVar[int] = 0

    def __init__(self, clock, warn_s: float, timeout_s: float, setup_timeout_s: float | None = None):
        self.clock = clock
        self.warn_s = min(warn_s, timeout_s)
        self.timeout_s = timeout_s
        self.setup_timeout_s = timeout_s if setup_timeout_s is None else setup_timeout_s
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self.interval = min(5.0, self.warn_s / 4)
        self.main_thread = threading.get_ident()
        self.stopped = threading.Event()
        self.state = None
        self.folder = None
        self.stacks_file = None
        self.signature = None
        self.moved_at = time.monotonic()
        self.num_beats = 0
        self.current = None
        self.phase_since = time.monotonic()
        self.next_warning = self.warn_s
        self.store_is_gone = False

    def start(self) -> "Watchdog":
        """Begin to watch. Collective: all ranks count the starts, and so share one prefix of the store."""
        if Watchdog.running is not None:
            Watchdog.running.stop()
        Watchdog.running = self
        Watchdog.num_started += 1
        # A separate connection, because calls on a shared connection block each other.
        store = distributed_c10d._get_default_store().clone()
        self.store = dist.PrefixStore(f"watchdog_{Watchdog.num_started}", store)
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()
        return self

    def follow(self, state, folder: Path) -> None:
        """Report state.step from this call on, and write stack traces to the folder of the run."""
        (folder / "stacks").mkdir(exist_ok=True)
        self.stacks_file = (folder / "stacks" / f"rank_{self.rank}.txt").open("w")
        self.state = state
        self.folder = folder

    def tell_failure(self, line: str) -> None:
        """End the other ranks at their next heartbeat, with the error of this rank as their report.

        torchrun ends the ranks of its own node only; the others would wait for this rank until timeout_s.
        """
        with contextlib.suppress(RuntimeError):  # node 0 may have ended
            self.store.set("failed", line)

    def stop(self) -> None:
        """Stop watching."""
        self.stopped.set()
        self.thread.join(5.0)
        self._remove_stacks_file()

    def _remove_stacks_file(self) -> None:
        faulthandler.cancel_dump_traceback_later()  # first, because a later file may reuse the descriptor
        if self.stacks_file is not None:
            file = self.stacks_file
            self.stacks_file = None
            file.close()
            with contextlib.suppress(OSError):
                Path(file.name).unlink()
                Path(file.name).parent.rmdir()  # succeeds on the last rank, when the folder is empty

    def _watch(self) -> None:
        while not self.stopped.is_set():
            self._judge(self.beat())
            self.stopped.wait(self.interval)

    def beat(self) -> dict:
        """Write a heartbeat to the store and return it; exit if another rank aborts the run."""
        if self.stacks_file is not None:  # a blocked interpreter cannot postpone this dump again
            faulthandler.dump_traceback_later(self.warn_s, file=self.stacks_file)
        beat = self.look()
        try:
            if not self.store_is_gone:
                self.store.set(str(self.rank), json.dumps(beat))
                if self.store.check(["failed"]):
                    self._leave(error=self.store.get("failed").decode())
                if self.store.check(["end"]):
                    self._send_stacks()
        except RuntimeError:  # the connection is lost for good; _judge() reports this once the rank is idle
            self.store_is_gone = True
        return beat

    def look(self) -> dict:
        """Sample the main thread and return the heartbeat."""
        innermost = sys._current_frames().get(self.main_thread)
        now = time.monotonic()
        frames = [frame for frame, _ in traceback.walk_stack(innermost)] if innermost else []
        collectives = [f.f_code.co_name for f in frames if f.f_code.co_filename.endswith(COLLECTIVES)]
        current = self.clock.now
        phase, describe_work = current
        work = ""
        with contextlib.suppress(Exception):  # the main thread may change the objects that this call reads
            work = describe_work()
        num_collectives = collectives_begun()
        signature = (num_collectives, work, *((id(f.f_code), f.f_lasti) for f in frames))
        if current is not self.current:
            self.current = current
            self.phase_since = now
            self.moved_at = now
        if signature != self.signature:
            self.signature = signature
            self.moved_at = now
        self.num_beats += 1
        return {
            "beat": self.num_beats, "host": platform.node(), "pid": os.getpid(), "phase": phase,
            "step": self.state.step + 1 if self.state else 0, "phase_s": now - self.phase_since,
            "idle_s": now - self.moved_at, "waiting": collectives[-1] if collectives else "",
            "collectives": num_collectives, "where": where_of(frames), "work": work,
        }  # fmt: skip

    def _judge(self, beat: dict) -> None:
        """Warn if this rank has been idle for warn_s, abort the run after timeout_s (or setup_timeout_s)."""
        idle_s = beat["idle_s"]
        timeout_s = self.setup_timeout_s if beat["phase"] in STARTING else self.timeout_s
        if idle_s < self.warn_s:
            self.next_warning = self.warn_s
        if idle_s < min(self.next_warning, timeout_s):
            return
        self.next_warning = max(self.next_warning, self.warn_s) * 2
        is_over = idle_s >= timeout_s
        beats = self.read_beats()
        if beats is None:
            return self._judge_without_store(idle_s, is_over)
        if beats[self.rank]["idle_s"] < idle_s:  # this rank has made progress since `beat`
            return
        limit = (timeout_s if is_over else self.warn_s) - 4 * self.interval
        late = [rank for rank, b in enumerate(beats) if not b["alive"] or b["idle_s"] > limit]
        waiting = [rank for rank in late if beats[rank]["alive"] and beats[rank]["waiting"]]
        if not beat["waiting"]:  # waiting ranks decide; a busy rank is fine while other ranks work, too
            may_take_long = is_over and any(b["phase"] in STARTING for b in beats)
            if waiting or len(late) < self.num_ranks or may_take_long:
                return
        line = describe(beats, self.rank, idle_s)
        if is_over:
            self._end(line, beats)
        speakers = waiting or [rank for rank in late if beats[rank]["alive"]]
        if self.rank == min(speakers, default=self.rank):
            text = f"\n{line}. The run is aborted after {timeout_s:g} s of this (run.timeout_s)"
            print(text, file=sys.stderr, flush=True)

    def _judge_without_store(self, idle_s: float, is_over: bool) -> None:
        """Warn that the other ranks are out of reach; end this process after timeout_s."""
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        line = (
            f"rank {self.rank} has been idle for {idle_s:.0f} s and cannot reach the store of node 0 at "
            f"{address}: node 0 may be lost"
        )
        if is_over:
            self._end(line, [])
        print(f"\n{line}", file=sys.stderr, flush=True)

    def read_beats(self) -> list[dict] | None:
        """Return the latest heartbeat of every rank; None if the store does not answer.

        The store is read twice, a few intervals apart: `alive` of a rank is True if its heartbeat advanced.
        """
        keys = [str(rank) for rank in range(self.num_ranks)]
        readings = []
        for _ in range(2):
            try:
                if self.store_is_gone:
                    return None
                ranks = [rank for rank, key in enumerate(keys) if self.store.check([key])]
                texts = self.store.multi_get([keys[rank] for rank in ranks]) if ranks else []
                readings.append({rank: json.loads(text) for rank, text in zip(ranks, texts)})
            except RuntimeError:
                return None
            for _ in range(3 if len(readings) == 1 else 0):
                self.stopped.wait(self.interval)
                self.beat()
        pairs = [[reading.get(rank, NO_BEAT) for reading in readings] for rank in range(self.num_ranks)]
        return [last | {"alive": first["beat"] < last["beat"]} for first, last in pairs]

    def _end(self, line: str, beats: list[dict]) -> None:
        """End this process with the table of all ranks and the stack traces of the silent ranks."""
        silent = silent_ranks(beats)[:4]
        answers = {}
        with contextlib.suppress(RuntimeError):  # if the store is gone, `beats` is empty
            if beats and self.store.compare_set("end", "", str(self.rank)) != str(self.rank).encode():
                self._send_stacks()
            answers = self._ask_for_stacks(silent) if beats else {}
        text = [table(beats), *(self._stacks_of(rank, beats[rank], answers) for rank in silent)]
        error = (
            f"error on rank {self.rank}: {line}. This is more than run.timeout_s allows. Checkpoints are "
            "intact: the same command resumes from the newest. If nothing was wrong, raise run.timeout_s"
        )
        print("\n".join(["", *text, "", error]), file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError):
            if beats:
                self.store.set("done", "")
        self._leave("\n".join([*text, error]), error)

    def _ask_for_stacks(self, silent: list[int]) -> dict[int, str]:
        """Return the stack traces of the silent ranks that answer within a few heartbeats."""
        answers = {self.rank: self.stacks()}
        deadline = time.monotonic() + 3 * self.interval + 4
        while not answers.keys() >= {*silent} and time.monotonic() < deadline:
            time.sleep(0.1)
            for rank in silent:
                if rank not in answers and self.store.check([f"stacks/{rank}"]):
                    answers[rank] = self.store.get(f"stacks/{rank}").decode()
        return answers

    def _leave(self, text: str = "", error: str = "") -> None:
        """End this process within two seconds, even if writing the error files hangs on a broken disk."""

        def write() -> None:
            if error:
                report_to_torchrun(error)
            if text and self.folder is not None:
                (self.folder / f"error_rank_{self.rank}.txt").write_text(text)
            self._remove_stacks_file()

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(2.0)
        os._exit(2)

    def _send_stacks(self) -> None:
        """Send this rank's stack traces to the rank that aborts the run, then exit (torchrun is slower)."""
        self.store.set(f"stacks/{self.rank}", self.stacks())
        deadline = time.monotonic() + 15
        while not self.store.check(["done"]) and time.monotonic() < deadline:
            time.sleep(0.1)
        self._leave()

    def stacks(self) -> str:
        """Return the stack traces of the main thread, then of all other threads that are busy."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        sections = []
        for ident, frame in sys._current_frames().items():
            is_idle = frame.f_code.co_filename.endswith(("threading.py", "watchdog.py"))
            if ident == self.main_thread or not is_idle:
                text = "".join(traceback.format_stack(frame))
                sections.append((ident != self.main_thread, f"{names.get(ident, ident)}:\n{text}"))
        return "\n".join(text for _, text in sorted(sections))

    def _stacks_of(self, rank: int, beat: dict, answers: dict[int, str]) -> str:
        """Return the stack traces of a silent rank, from its answer or else from faulthandler's file."""
        if rank in answers:
            return f"\nrank {rank}, {answers[rank]}"
        file = self.folder and self.folder / "stacks" / f"rank_{rank}.txt"
        note = f" ({state_of(beat['pid'])})" if beat["host"] == platform.node() else ""
        with contextlib.suppress(OSError):
            if file and (text := file.read_text().strip()):
                return f"\nrank {rank}{note}, written by faulthandler to {file}:\n{text[-6000:]}"
        return f"\nrank {rank}{note}: no stack trace"


def collectives_begun() -> int:
    """Count the collectives that this rank has begun, over all its process groups."""
    total = 0
    for group in list(distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # a backend without a counter
            total += group._get_sequence_number_for_group()
    return total


def where_of(frames: list) -> str:
    """Name the innermost line of the project's code, and the library line that this code is calling.

    For example "rollout.py:7 in step -> torch/nn/functional.py:90 in linear".
    """
    in_project = (f for f in frames if not any(name in f.f_code.co_filename for name in LIBRARIES))
    caller = next(in_project, None)
    text = f"{line_of(caller, 1)} in {caller.f_code.co_name}" if caller else ""
    if frames and frames[0] is not caller:
        text += f" -> {line_of(frames[0], 3)} in {frames[0].f_code.co_name}"
    return text


def line_of(frame, num_path_parts: int) -> str:
    """Return "path:line" of a frame, the path shortened to its last parts."""
    return "/".join(Path(frame.f_code.co_filename).parts[-num_path_parts:]) + f":{frame.f_lineno}"


def state_of(pid: int) -> str:
    """Describe the state of a process on this machine."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "its process has ended"
    return STATES.get(letter, "its process runs, but its interpreter is blocked")


def silent_ranks(beats: list[dict]) -> list[int]:
    """List the ranks outside of collectives, for which the other ranks wait; all ranks if all are waiting."""
    silent = [rank for rank, beat in enumerate(beats) if not (beat["alive"] and beat["waiting"])]
    return silent or list(range(len(beats)))


def describe(beats: list[dict], rank: int, seconds: float) -> str:
    """Say in one line which rank waits for which, with the activity of each silent rank."""
    beat = beats[rank]
    silent = silent_ranks(beats)
    numbers = ", ".join(map(str, silent[:8])) + (f" and {len(silent) - 8} more" if len(silent) > 8 else "")
    ranks = f"rank{'s' * (len(silent) > 1)} {numbers}"
    if all(b["alive"] and b["waiting"] for b in beats):
        line = f"all ranks have waited {seconds:.0f} s for each other, in different collectives"
    elif beat["waiting"]:
        line = f"rank {rank} has waited {seconds:.0f} s for {ranks} in {beat['waiting']}, {beat['phase']}"
    else:
        line = f"no rank has made progress for {seconds:.0f} s"
    return f"step {beat['step']}: {line}; " + "; ".join(doing(beats[r], r) for r in silent[:4])


def doing(beat: dict, rank: int) -> str:
    """Describe the activity of a rank in one clause."""
    if not beat["alive"]:
        note = f": {state_of(beat['pid'])}" if beat["host"] == platform.node() else ""
        return f"rank {rank} on {beat['host']} has no heartbeat{note}; it was last in {beat['phase']}"
    work = f", {beat['work']}" if beat["work"] else ""
    return (
        f"rank {rank} on {beat['host']} has been in {beat['phase']} for {beat['phase_s']:.0f} s{work}, at "
        f"{beat['where']}"
    )


def table(beats: list[dict]) -> str:
    """Return one line per rank with its step, phase, seconds and activity; silent ranks have a star."""
    silent = silent_ranks(beats)
    lines = []
    for rank, beat in enumerate(beats):
        activity = f"waits in {beat['waiting']}" if beat["waiting"] else "works"
        activity = activity if beat["alive"] else "has no heartbeat"
        work = f"; {beat['work']}" if beat["work"] else ""
        lines.append(
            f"{'*' if rank in silent else ' '}{rank:>5}  {beat['host']:<16.16}  {beat['step']:>6}  "
            f"{beat['phase']:<16}  {beat['phase_s']:>7.0f}  {beat['idle_s']:>7.0f}  "
            f"{beat['collectives']:>11}  {activity}; {beat['where']}{work}"
        )
    head = "  rank  host                step  phase             in it s   idle s  collectives  "
    return "\n".join([head + "(* silent)", *lines]) if beats else ""
