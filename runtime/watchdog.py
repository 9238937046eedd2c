"""Say for which rank a run waits, and end a run that waits too long with the stacks of the silent rank.

On each rank a thread looks at the main thread every few seconds and leaves what it sees, a heartbeat, in the
store by which torch.distributed's ranks have found each other. The store needs no disk and is reached from
every node; under torchrun it lives in the agent of node 0 and not in a rank. The main thread does nothing for
this but name its phase (runtime/metrics.py: Clock). Of a rank the heartbeat says:

    waits   the main thread is inside a collective of torch.distributed
    still   the seconds since its phase, its stack or its number of begun collectives last changed

A rank that has waited for run.warn_s says which ranks do not wait, so that all others wait for them: these
are the silent ones. A rank that has waited for run.timeout_s asks the silent ones for their stacks, prints
them below the table of all ranks, and ends the run. The same is done where no rank moves, because then nobody
is left to wait. A thread in a collective does not hold the interpreter, so such a rank still has a heartbeat.
One whose interpreter is blocked has none; its stacks are then written by faulthandler, which needs no
interpreter, to run.dir/stacks/.
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
MARGIN_S = 60.0  # groups of ranks wait so much longer than run.timeout_s, so that the watchdog speaks first
STATES = {"T": "its process is stopped", "t": "a debugger has stopped it", "D": "the kernel waits for a disk"}
NO_BEAT = {
    "beat": 0, "host": "?", "pid": 0, "phase": "?", "step": 0, "phase_s": 0.0, "still_s": 0.0, "waits": "",
    "collectives": 0, "where": "", "work": "",
}  # fmt: skip
STARTING = ("start", "setup")  # phases in which a model may be loaded for hours without a sign of life


class Watchdog:
    """Watch the thread that starts it, on one rank of a run; start() is called by all ranks.

    clock: `now` holds (phase, function that says what is in work). warn_s, timeout_s: as in RunSettings.
    A process has one watchdog: starting another ends the one before.
    """

    running: ClassVar["Watchdog | None"] = None
    num_started: ClassVar[int] = 0

    def __init__(self, clock, warn_s: float, timeout_s: float):
        self.clock, self.warn_s, self.timeout_s = clock, min(warn_s, timeout_s), timeout_s
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.interval = min(5.0, self.warn_s / 4)
        self.main_thread, self.stopped = threading.get_ident(), threading.Event()
        self.state, self.folder, self.stacks_file = None, None, None
        self.signature, self.moved_at, self.num_beats = None, time.monotonic(), 0
        self.current, self.phase_since = None, time.monotonic()
        self.next_warning, self.store_is_gone = self.warn_s, False

    def start(self) -> "Watchdog":
        """Begin to watch. Collective: the ranks count their starts to use the same part of the store."""
        if Watchdog.running is not None:
            Watchdog.running.stop()
        Watchdog.running, Watchdog.num_started = self, Watchdog.num_started + 1
        store = distributed_c10d._get_default_store().clone()  # a connection of its own: one blocks the other
        self.store = dist.PrefixStore(f"watchdog_{Watchdog.num_started}", store)
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()
        return self

    def follow(self, state, folder: Path) -> None:
        """Report state.step from here on, and write to the folder of the run."""
        (folder / "stacks").mkdir(exist_ok=True)
        self.stacks_file = (folder / "stacks" / f"rank_{self.rank}.txt").open("w")
        self.state, self.folder = state, folder

    def stop(self) -> None:
        """End the watch."""
        self.stopped.set()
        self.thread.join(5.0)
        self._remove_stacks_file()

    def _remove_stacks_file(self) -> None:
        faulthandler.cancel_dump_traceback_later()  # before its file is closed and the number goes to another
        if self.stacks_file is not None:
            file, self.stacks_file = self.stacks_file, None
            file.close()
            with contextlib.suppress(OSError):
                Path(file.name).unlink()
                Path(file.name).parent.rmdir()  # the last rank's

    def _watch(self) -> None:
        while not self.stopped.is_set():
            self._judge(self.beat())
            self.stopped.wait(self.interval)

    def beat(self) -> dict:
        """Leave a heartbeat in the store and return it; end if another rank ends the run."""
        if self.stacks_file is not None:  # an interpreter that is blocked does not put this off again
            faulthandler.dump_traceback_later(self.warn_s, file=self.stacks_file)
        beat = self.look()
        try:
            if not self.store_is_gone:
                self.store.set(str(self.rank), json.dumps(beat))
                if self.store.check(["end"]):
                    self._leave_stacks()
        except RuntimeError:  # this is said when the rank waits; the connection does not come back
            self.store_is_gone = True
        return beat

    def look(self) -> dict:
        """Return what the main thread does, as a heartbeat."""
        frame, now = sys._current_frames().get(self.main_thread), time.monotonic()
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        inside = [f.f_code.co_name for f in frames if f.f_code.co_filename.endswith(COLLECTIVES)]
        phase, work = current = self.clock.now
        in_work = ""
        with contextlib.suppress(Exception):  # the main thread changes what it reads
            in_work = work()
        begun = collectives_begun()
        signature = (begun, in_work, *((id(f.f_code), f.f_lasti) for f in frames))
        if current is not self.current:
            self.current, self.phase_since, self.moved_at = current, now, now
        if signature != self.signature:
            self.signature, self.moved_at = signature, now
        self.num_beats += 1
        return {
            "beat": self.num_beats, "host": platform.node(), "pid": os.getpid(), "phase": phase,
            "step": self.state.step + 1 if self.state else 0, "phase_s": now - self.phase_since,
            "still_s": now - self.moved_at, "waits": inside[-1] if inside else "", "collectives": begun,
            "where": where_of(frames), "work": in_work,
        }  # fmt: skip

    def _judge(self, beat: dict) -> None:
        """Warn if this rank has waited for long, end the run if it has for too long."""
        still = beat["still_s"]
        if still < self.warn_s:
            self.next_warning = self.warn_s
        if still < min(self.next_warning, self.timeout_s):
            return
        self.next_warning = max(self.next_warning, self.warn_s) * 2
        is_over, beats = still >= self.timeout_s, self.everyone()
        if beats is None:
            return self._judge_without_store(still, is_over)
        if beats[self.rank]["still_s"] < still:  # it has moved meanwhile
            return
        limit = (self.timeout_s if is_over else self.warn_s) - 4 * self.interval
        late = [rank for rank, b in enumerate(beats) if not b["pulse"] or b["still_s"] > limit]
        waiting = [rank for rank in late if beats[rank]["pulse"] and beats[rank]["waits"]]
        if not beat["waits"]:  # a rank that waits knows more; one that works is not late while others work
            may_take_long = is_over and any(b["phase"] in STARTING for b in beats)
            if waiting or len(late) < self.num_ranks or may_take_long:
                return
        line = describe(beats, self.rank, still)
        if is_over:
            self._end(line, beats)
        speakers = waiting or [rank for rank in late if beats[rank]["pulse"]]
        if self.rank == min(speakers, default=self.rank):
            text = f"\n{line}. The run ends after {self.timeout_s:g} s of this (run.timeout_s)"
            print(text, file=sys.stderr, flush=True)

    def _judge_without_store(self, still: float, is_over: bool) -> None:
        """Say that nothing is known of the others; end this process if that is so for too long."""
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        line = f"rank {self.rank} has not moved for {still:.0f} s, and the store of node 0, {where}, is gone"
        if is_over:
            self._end(line, [])
        print(f"\n{line}", file=sys.stderr, flush=True)

    def everyone(self) -> list[dict] | None:
        """Return the latest heartbeat of every rank; None if the store does not answer.

        `pulse` of each says whether another one came while this looked twice.
        """
        keys, looks = [str(rank) for rank in range(self.num_ranks)], []
        for _ in range(2):
            try:
                if self.store_is_gone:
                    return None
                ranks = [rank for rank, key in enumerate(keys) if self.store.check([key])]
                found = self.store.multi_get([keys[rank] for rank in ranks]) if ranks else []
                looks.append({rank: json.loads(text) for rank, text in zip(ranks, found)})
            except RuntimeError:
                return None
            for _ in range(3 if len(looks) == 1 else 0):
                self.stopped.wait(self.interval)
                self.beat()
        pairs = [[look.get(rank, NO_BEAT) for look in looks] for rank in range(self.num_ranks)]
        return [last | {"pulse": first["beat"] < last["beat"]} for first, last in pairs]

    def _end(self, line: str, beats: list[dict]) -> None:
        """End this process with the table of all ranks and the stacks of the silent ones."""
        silent, answers = silent_ranks(beats)[:4], {}
        with contextlib.suppress(RuntimeError):  # without the store there are no beats either
            if beats and self.store.compare_set("end", "", str(self.rank)) != str(self.rank).encode():
                self._leave_stacks()
            answers = self._ask_for_stacks(silent) if beats else {}
        text = [table(beats), *(self._stacks_of(rank, beats[rank], answers) for rank in silent)]
        error = (
            f"error on rank {self.rank}: {line}. run.timeout_s allows no more. Checkpoints are whole: the "
            "same command goes on from the newest. Raise run.timeout_s if there was nothing wrong"
        )
        print("\n".join(["", *text, "", error]), file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError):
            if beats:
                self.store.set("done", "")
        self._leave("\n".join([*text, error]), error)

    def _ask_for_stacks(self, silent: list[int]) -> dict[int, str]:
        """Return the stacks of those silent ranks that answer within a few heartbeats."""
        answers = {self.rank: self.stacks()}
        deadline = time.monotonic() + 3 * self.interval + 4
        while not answers.keys() >= {*silent} and time.monotonic() < deadline:
            time.sleep(0.1)
            for rank in silent:
                if rank not in answers and self.store.check([f"stacks/{rank}"]):
                    answers[rank] = self.store.get(f"stacks/{rank}").decode()
        return answers

    def _leave(self, text: str = "", error: str = "") -> None:
        """End this process, also where the disk hangs to which it writes."""

        def write() -> None:
            if error:
                report_to_torchrun(error)
            if error and self.folder is not None:
                (self.folder / f"error_rank_{self.rank}.txt").write_text(text)
            self._remove_stacks_file()

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(2.0)
        os._exit(2)

    def _leave_stacks(self) -> None:
        """Hand this rank's stacks to the one that ends the run, and end, too; torchrun would wait longer."""
        self.store.set(f"stacks/{self.rank}", self.stacks())
        deadline = time.monotonic() + 15
        while not self.store.check(["done"]) and time.monotonic() < deadline:
            time.sleep(0.1)
        self._leave()

    def stacks(self) -> str:
        """Return the stacks of the main thread and of other threads that are not idle."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        parts = []
        for ident, frame in sys._current_frames().items():
            is_idle = frame.f_code.co_filename.endswith(("threading.py", "watchdog.py"))
            if ident == self.main_thread or not is_idle:
                text = "".join(traceback.format_stack(frame))
                parts.append((ident != self.main_thread, f"{names.get(ident, ident)}:\n{text}"))
        return "\n".join(text for _, text in sorted(parts))

    def _stacks_of(self, rank: int, beat: dict, answers: dict[int, str]) -> str:
        """Return what is known of where a silent rank is."""
        if rank in answers:
            return f"\nrank {rank}, {answers[rank]}"
        file, note = self.folder and self.folder / "stacks" / f"rank_{rank}.txt", ""
        if beat["host"] == platform.node():
            note = f" ({state_of(beat['pid'])})"
        with contextlib.suppress(OSError):
            if file and (text := file.read_text().strip()):
                return f"\nrank {rank}{note}, written by faulthandler to {file}:\n{text[-6000:]}"
        return f"\nrank {rank} left no stack{note}"


def collectives_begun() -> int:
    """Return how many collectives this rank has begun in all its process groups."""
    total = 0
    for group in list(distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # a backend that does not count
            total += group._get_sequence_number_for_group()
    return total


def where_of(frames: list) -> str:
    """Name the innermost line that belongs to no library, and the library's line inside it."""
    own = next((f for f in frames if not any(name in f.f_code.co_filename for name in LIBRARIES)), None)
    line = lambda f, parts: "/".join(Path(f.f_code.co_filename).parts[-parts:]) + f":{f.f_lineno}"
    text = f"{line(own, 1)} in {own.f_code.co_name}" if own else ""
    if frames and frames[0] is not own:
        text += f" -> {line(frames[0], 3)} in {frames[0].f_code.co_name}"
    return text


def state_of(pid: int) -> str:
    """Return in words what a process of this machine does."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "its process has ended"
    return STATES.get(letter, "its process runs, but its interpreter is blocked")


def silent_ranks(beats: list[dict]) -> list[int]:
    """List the ranks that are in no collective, so that others wait for them; all of them if all wait."""
    silent = [rank for rank, beat in enumerate(beats) if not (beat["pulse"] and beat["waits"])]
    return silent or list(range(len(beats)))


def describe(beats: list[dict], rank: int, seconds: float) -> str:
    """Say in one line who waits for whom and what the silent ranks do."""
    own, silent = beats[rank], silent_ranks(beats)
    named = ", ".join(map(str, silent[:8])) + (f" and {len(silent) - 8} more" if len(silent) > 8 else "")
    others = f"rank{'s' * (len(silent) > 1)} {named}"
    if all(beat["pulse"] and beat["waits"] for beat in beats):
        line = f"all ranks have waited {seconds:.0f} s for each other, in different collectives"
    elif own["waits"]:
        line = f"rank {rank} has waited {seconds:.0f} s for {others} in {own['waits']}, {own['phase']}"
    else:
        line = f"no rank has moved for {seconds:.0f} s"
    return f"step {own['step']}: {line}; " + "; ".join(doing(beats[r], r) for r in silent[:4])


def doing(beat: dict, rank: int) -> str:
    """Say in one clause what a rank does."""
    if not beat["pulse"]:
        note = f": {state_of(beat['pid'])}" if beat["host"] == platform.node() else ""
        return f"rank {rank} on {beat['host']} has no heartbeat{note}; it was last in {beat['phase']}"
    work = f", {beat['work']}" if beat["work"] else ""
    return (
        f"rank {rank} on {beat['host']} has been in {beat['phase']} for {beat['phase_s']:.0f} s{work}, at "
        f"{beat['where']}"
    )


def table(beats: list[dict]) -> str:
    """Return a line for every rank: step, phase, seconds, what it does."""
    silent, lines = silent_ranks(beats), []
    for rank, beat in enumerate(beats):
        does = f"waits in {beat['waits']}" if beat["waits"] else "works"
        does = does if beat["pulse"] else "has no heartbeat"
        work = f"; {beat['work']}" if beat["work"] else ""
        lines.append(
            f"{'*' if rank in silent else ' '}{rank:>5}  {beat['host']:<16.16}  {beat['step']:>6}  "
            f"{beat['phase']:<16}  {beat['phase_s']:>7.0f}  {beat['still_s']:>7.0f}  "
            f"{beat['collectives']:>11}  {does}; {beat['where']}{work}"
        )
    head = "  rank  host                step  phase             in it s  still s  collectives  "
    return "\n".join([head + "(* silent)", *lines]) if beats else ""
