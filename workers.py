"""Run tasks in worker processes that can be killed: verifiers (reward.py), tools and environments.

    with WorkerPool("verifiers.tools", num_workers=2, timeout_s=5.0) as pool:
        pool.put(key, ToolCall("my_tools.py:search", '{"query": "x"}', max_chars=500))
        pool.poll()                                          # once per engine step
        replies = pool.take()                                # {key: ToolResult} of the calls that have ended
        replies = pool.collect()                             # waits for all calls

Why processes: computer algebra on model output can hang forever, exhaust the memory or crash, even in C code
that Python exceptions cannot interrupt. A worker that exceeds its limit is killed by the kernel, and its task
gets a reply with status "timeout" or "error". A failed task may ask further tasks for the cause, for example
whether it fails again (Task.inquire). Workers run this file as a script, because a trainer with a CUDA
context and threads cannot fork safely. To start fast, this file and modules of tasks must not import torch.

Tasks and replies travel as lines of JSON, never as pickles: untrusted code can write into a worker's pipes.

Reading order: tasks and replies, the pool as the caller sees it, the worker process.
"""

import contextlib
import ctypes
import functools
import importlib
import json
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Generator, Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from verifiers import own

# ------------------------------------------------------------------------------------------------------------
# 1 Tasks and replies
# ------------------------------------------------------------------------------------------------------------
FAILED = ("timeout", "error")
BAD_RESULT = "bad result"  # status of a verifiers.own.BadResult, for which a pool raises
MAX_DETAIL = 200  # characters of a reply's detail


class Reply:
    """Base of replies: dataclasses of JSON values with a status, and the reason of a timeout or error."""

    status: str
    detail: str
    is_for_policy: ClassVar[bool] = False  # the policy reads the detail, which then names no setting

    by_text: bool = False  # the policy's text causes the failure, not the machine

    @property
    def failed(self) -> bool:
        """Tell whether the task timed out or raised for a reason outside of the policy's text."""
        return self.status in FAILED and not self.by_text

    @classmethod
    def failure(cls, status: str, detail: str):
        """Return the reply of a task that has no result."""
        return cls(status=status, detail=detail)  # type: ignore[call-arg]


class Traits(NamedTuple):
    """A worker's report about a kind, after the import of the libraries of the kind; before, the defaults."""

    fields: list[str] | None = None  # columns that the kind reads; None: all
    required: list[str] = []  # columns without which the kind raises an error
    is_async: bool = False  # runs in an event loop
    can_share: bool = False  # several tasks run at once in a worker


R = TypeVar("R", bound=Reply)


@dataclass(frozen=True)
class Task(Generic[R]):
    """One call in a worker. Subclasses add fields of JSON values, and define reply_type and run().

    kind: the name of the code that runs, for example a rule, a tool or an environment. Before the time limit
    of the first task of a kind begins, a worker calls prepare(), which imports libraries.
    """

    kind: str
    reply_type: ClassVar[type[Reply]]
    is_timed: ClassVar[bool] = True  # counts in WorkerPool.seconds, the mean of its kind

    @property
    def is_fast(self) -> bool:
        """Tell whether several of these tasks are sent ahead to a worker."""
        return False

    @property
    def num_limits(self) -> int:
        """Return how often the worker may start the time limit anew, see Worker.restart_limit."""
        return 1

    def extra_s(self, code_limits: dict) -> float:
        """Return the seconds by which the task's limit exceeds the pool's."""
        return 0.0

    def cpu_s(self, timeout_s: float) -> float:
        """Return the limit of processor time, which no busy machine shortens; 0: none."""
        return 0.0

    def values(self, traits: Traits) -> list:
        """Return the fields to send to a worker."""
        return [getattr(self, column.name) for column in fields(self)]

    def prepare(self) -> Traits:
        """Import the function or class of the kind; errors are ignored, because run() reports them."""
        is_async = own.load_function(self.kind).is_async
        return Traits(is_async=is_async, can_share=is_async)

    async def run(self, worker: "Worker") -> R:
        """Run the task in a worker. It may await only if Traits.is_async."""
        raise NotImplementedError

    def inquire(self, reply: R) -> Generator["Task[R]", R, R]:
        """Yield tasks that tell why this one failed, one by one, and return the reply that counts."""
        yield from ()
        return reply


def finish(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine that never waits, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the coroutine waits and needs an event loop")


@functools.cache
def event_loop():
    """Return the event loop of this process; a single loop lets HTTP clients keep connections open."""
    import asyncio

    return asyncio.Runner()


# ------------------------------------------------------------------------------------------------------------
# 2 The pool, caller's side
# ------------------------------------------------------------------------------------------------------------

# Fast tasks sent ahead to one worker. A larger window saves wake-ups on tiny tasks; a smaller window delays
# fewer tasks if one of the tasks hangs. Slow tasks, for example a custom function, are sent alone to a worker
# with an empty queue. Calls of `async def` functions are sent together, so that they wait in parallel.
WINDOW = 16
ASYNC_CALLS = 64
# A worker has a timer of its own. The pool kills a worker that is silent for longer than limit + grace.
START_GRACE_S = 120.0  # grace while the worker starts or imports the libraries of a kind
GRACE_S = 5.0
LOOK_S = 0.1  # interval between checks of silent workers
STOP_S = 20.0  # time for a guard to end the processes of its worker, which usually takes under 0.1 s
# Without OMP_NUM_THREADS, BLAS or torch in a custom function would start a thread for each core.
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
MAX_REPLY_BYTES = 1 << 20
MAX_LOG_BYTES = 64 << 20  # a larger log is renamed to NAME.1 when a pool starts
OUT_OF_MEMORY = ("MemoryError", "failed to map segment", "annot allocate memory")  # parts of a detail
WORKER_DIED = "the worker died"
OF_CPU_TIME = "of processor time"  # in the detail of a timeout that no busy machine can cause


@dataclass(frozen=True)
class WorkerOptions:
    """Limits and surroundings of the workers of a pool."""

    timeout_s: float = 10.0  # wall-clock time of a task
    memory_bytes: int = 2 << 30  # address space of a worker
    tokenizer: str = ""  # JSON of a tokenizer, with which workers decode token ids
    env: Sequence[str] = ()  # environment variables that workers get in addition to KEPT_VARIABLES
    log_path: str | os.PathLike | None = None  # file for output of custom functions; None discards the output
    code_limits: dict = field(default_factory=dict)  # isolation, timeout_s, memory_bytes of programs
    scales: dict = field(default_factory=dict)  # {function of the user: its values for 0 and for 1}


@dataclass(eq=False)
class _Item:
    """One task on its way to a reply."""

    key: Hashable
    task: Task
    submitted_at: float = field(default_factory=time.monotonic)
    # Replies must repeat this number, so that output of a custom function cannot pass as a reply.
    number: str = field(default_factory=lambda: secrets.token_hex(8))
    is_suspect: bool = False  # it failed, or a worker died while it ran this task: run the task alone
    inquiry: Generator | None = None  # after a failure, see Task.inquire
    asker: "_Item | None" = None  # the failed item whose inquiry yielded this one


@dataclass(eq=False)
class _Process:
    """A worker process and the items sent to it. Lines are answered in order, so lines[0] is running."""

    process: subprocess.Popen
    lines: deque = field(default_factory=deque)  # {number: item} of the unanswered items of each line sent
    unwritten: bytearray = field(default_factory=bytearray)  # bytes that did not fit into the pipe so far
    unread: bytes = b""  # the beginning of an incomplete reply
    last_activity: float = field(default_factory=time.monotonic)  # of the last reply, or of the last write
    ready_kinds: set = field(default_factory=set)  # whose libraries are imported
    is_exhausted: bool = False  # a task ran out of memory: replace the worker after the items sent to it

    def current(self) -> _Item | None:
        """Return the item that the worker is busy with; the first one if several run at once."""
        return next(iter(self.lines[0].values())) if self.lines else None

    def load(self) -> int:
        """Return the number of lines that the worker is busy with; WINDOW if it takes no further line."""
        current = self.current()
        is_full = self.is_exhausted or (current is not None and not current.task.is_fast)
        return WINDOW if is_full else len(self.lines)


class WorkerPool(contextlib.AbstractContextManager, Generic[R]):
    """Run tasks in worker processes while the caller does other work.

    Each of the num_workers processes runs one task at a time (async functions: up to ASYNC_CALLS), within
    timeout_s seconds of wall-clock time and memory_bytes of address space. If a worker dies, the task that
    was running gets status "timeout" or "error", and a new worker runs the remaining tasks. Fast tasks are
    sent before slow ones. If max_backlog tasks are waiting, put() blocks. Data is moved only inside put(),
    poll(), take() and collect(). A pool belongs to the thread that made it: Linux ends the workers with that
    thread.

    module: the module of the tasks, which workers import when they start. options: fields of WorkerOptions.
    """

    def __init__(self, module: str, num_workers: int = 1, max_backlog: int = 4096, **options):
        self.options = WorkerOptions(**options)
        timeout_s = self.options.timeout_s
        if num_workers < 1 or timeout_s <= 0 or max_backlog < 1:
            raise ValueError(f"workers: {num_workers=}, {timeout_s=} and {max_backlog=} must be positive")
        if missing := [name for name in self.options.env if name not in os.environ]:
            raise ValueError(f"reward.env: {', '.join(missing)} is not set; export it before the run")
        self.module = module
        self.max_backlog = max_backlog
        self.latencies: list[float] = []  # seconds from put to reply; the reader empties the list
        self.seconds: dict[str, float] = {}  # {kind: moving average of the seconds per task}
        self.num_timeouts = 0
        self.num_errors = 0
        self.num_restarts = 0  # workers replaced
        self.traits: dict[str, Traits] = defaultdict(Traits)  # by kind
        set_aside_large_log(self.options.log_path)
        self._tokenizer: int | None = None  # a file in memory, freed when this process ends
        if self.options.tokenizer:
            self._tokenizer = os.memfd_create("tokenizer")
            with open(os.dup(self._tokenizer), "w") as file:
                file.write(self.options.tokenizer)
        self._fast: deque[_Item] = deque()  # items that are not sent yet
        self._slow: deque[_Item] = deque()
        self._replies: dict[Any, R | None] = {}  # in the order of put(); None while outstanding
        self._next_check = 0.0  # time.monotonic() of the next check of all workers, silent ones included
        self._workers = [self._start() for _ in range(num_workers)]

    def at_once(self, kind: str) -> int:
        """Return the number of tasks of a kind that the workers can run at the same time."""
        return len(self._workers) * (ASYNC_CALLS if self.traits[kind].can_share else 1)

    def put(self, key: Hashable, task: Task[R]) -> None:
        """Queue a task; blocks only if the backlog is full. `key` must be new since the last collect()."""
        if not self._workers:
            raise ValueError("the pool is closed")
        if key in self._replies:
            raise ValueError(f"key {key!r} is already submitted: collect() first")
        while self.poll() >= self.max_backlog:
            self._ready(1000)
        self._replies[key] = None
        (self._fast if task.is_fast else self._slow).append(_Item(key, task))
        self._send()

    def poll(self) -> int:
        """Write and read pipes without waiting; return the number of tasks that still lack a reply."""
        workers = self._ready(0)
        if time.monotonic() >= self._next_check:  # also finds workers that died with their pipe still open
            self._next_check = time.monotonic() + LOOK_S
            self._send()  # first, so that a worker with unwritten bytes does not count as silent
            workers = list(self._workers)
        for worker in workers:
            self._receive(worker)
        self._send()
        num_sent = sum(len(line) for worker in self._workers for line in worker.lines)
        return len(self._fast) + len(self._slow) + num_sent

    def collect(self) -> dict[Any, R]:
        """Wait for all tasks since the last collect(); return {key: reply} in the order of put()."""
        while self.poll():
            self._ready(1000)
        replies = self._replies
        self._replies = {}
        return replies

    def take(self) -> dict[Any, R]:
        """Return {key: reply} of the replies that have arrived since the last call, without waiting."""
        self.poll()
        arrived = {key: reply for key, reply in self._replies.items() if reply is not None}
        for key in arrived:
            del self._replies[key]
        return arrived

    def withdraw(self, key: Hashable) -> bool:
        """Drop a task that no worker has got yet; tell whether there was one."""
        for queue in (self._fast, self._slow):
            for item in queue:
                if item.key == key and item.asker is None:
                    queue.remove(item)
                    del self._replies[key]
                    return True
        return False

    def describe(self) -> str:
        """Describe the outstanding work in a log line, for example for the watchdog's thread."""
        items = [item for worker in list(self._workers) if (item := worker.current()) is not None]
        kinds = ", ".join(dict.fromkeys(item.task.kind for item in items))
        num_waiting = sum(reply is None for reply in list(self._replies.values()))
        return f"{num_waiting} verdicts awaited" + (f", workers are busy with {kinds}" if items else "")

    def memory_note(self, reply: Reply) -> str:
        """Return the end of an error that the limit of memory has caused, which names the setting, or ""."""
        if reply.status != "error" or not any(sign in reply.detail for sign in OUT_OF_MEMORY):
            return ""
        gib = self.options.memory_bytes / 2**30
        return f"; workers have {gib:g} GiB of address space (reward.memory_gib)"

    def close(self) -> None:
        """Kill the workers and drop all outstanding tasks."""
        while self._workers:
            _stop(self._workers.pop().process)
        if self._tokenizer is not None:
            os.close(self._tokenizer)
            self._tokenizer = None
        self._fast.clear()
        self._slow.clear()
        self._replies = {}

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _ready(self, wait_ms: int) -> list[_Process]:
        """Wait until a pipe can be read or written; return the workers that have output."""
        poller = select.poll()  # select.select() refuses file descriptors above 1023
        readers = {}
        for worker in self._workers:
            readers[worker.process.stdout.fileno()] = worker
            poller.register(worker.process.stdout, select.POLLIN)
            if worker.unwritten:
                poller.register(worker.process.stdin, select.POLLOUT)
        return [readers[pipe] for pipe, _ in poller.poll(wait_ms) if pipe in readers]

    def _start(self) -> _Process:
        from runtime.user_files import DIGESTS  # here, because workers would import pydantic

        # LD_PRELOAD and PYTHON* switches are not inherited. The hash seed can change sympy's order of terms.
        names = (*KEPT_VARIABLES, *self.options.env)
        env = {name: os.environ[name] for name in names if name in os.environ} | {"PYTHONHASHSEED": "0"}
        options = {
            "module": self.module,
            "memory_bytes": self.options.memory_bytes,
            "tokenizer": self._tokenizer,
            "code_limits": self.options.code_limits,
            "scales": self.options.scales,
            "files": {str(file): digest for file, digest in DIGESTS.items() if digest},
            "parent": os.getpid(),
        }
        with open(self.options.log_path or os.devnull, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-u", __file__, "--worker", json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=env,
                pass_fds=[] if self._tokenizer is None else [self._tokenizer],
                start_new_session=True,  # one process group for the worker and its children
            )
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)
        return _Process(process)

    def _send(self) -> None:
        """Assign queued items to the least loaded workers, and write as much as the pipes take."""
        while self._fast or self._slow:
            worker = min(self._workers, key=_Process.load)
            if worker.load() >= (WINDOW if self._fast else 1):
                break
            items = self._next_items()
            worker.lines.append({item.number: item for item in items})
            worker.unwritten += self._line(items)
        for worker in self._workers:
            # The next call retries a full pipe. _receive() notices a dead worker.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                while worker.unwritten:
                    del worker.unwritten[: os.write(worker.process.stdin.fileno(), worker.unwritten)]
                    worker.last_activity = time.monotonic()

    def _next_items(self) -> list[_Item]:
        """Take one item, or several consecutive calls of async functions, from a queue."""
        if self._fast:
            return [self._fast.popleft()]
        items = [self._slow.popleft()]
        if self._can_share(items[0]):
            while self._slow and self._can_share(self._slow[0]) and len(items) < ASYNC_CALLS:
                items.append(self._slow.popleft())
        return items

    def _can_share(self, item: _Item) -> bool:
        """Tell whether an item may run in a worker together with other items."""
        return self.traits[item.task.kind].can_share and not item.is_suspect

    def _line(self, items: list[_Item]) -> bytes:
        """Encode items for a worker."""
        rows = []
        for item in items:
            values = item.task.values(self.traits[item.task.kind])
            rows.append([item.number, type(item.task).__name__, *values])
        # ASCII JSON escapes newlines, null bytes and lone surrogates, and so preserves any text.
        cpu_s = min(item.task.cpu_s(self.options.timeout_s) for item in items)
        return json.dumps([self._limit_s(items), cpu_s, rows]).encode() + b"\n"

    def _limit_s(self, items: Iterable[_Item]) -> float:
        """Return the time limit of items that are sent in one line."""
        return self.options.timeout_s + max(item.task.extra_s(self.options.code_limits) for item in items)

    def _receive(self, worker: _Process) -> None:
        """Record the replies of a worker; replace it if it died, hangs or wrote an invalid reply."""
        # Checked before reading: the last replies of a worker that has ended are still in the pipe.
        has_ended = _has_ended(worker.process)
        is_invalid = False
        data = None
        try:
            while data := os.read(worker.process.stdout.fileno(), 1 << 16):
                *lines, worker.unread = (worker.unread + data).split(b"\n")
                for line in lines:
                    self._book(worker, json.loads(line))
                worker.last_activity = time.monotonic()
                is_invalid = len(worker.unread) > MAX_REPLY_BYTES
                if is_invalid:
                    break
        except BlockingIOError:
            pass
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            is_invalid = True
        is_silent = self._is_silent(worker)
        is_exhausted = worker.is_exhausted and not worker.lines  # all later calls would fail as well
        if data == b"" or has_ended or is_invalid or is_silent or is_exhausted:
            self._replace(worker, is_silent, is_invalid)

    def _is_silent(self, worker: _Process) -> bool:
        """Tell whether a worker has exceeded the limit of its task and the grace period."""
        item = worker.current()
        if item is None:
            return False
        grace = GRACE_S if item.task.kind in worker.ready_kinds else START_GRACE_S
        limit = self._limit_s(worker.lines[0].values()) * item.task.num_limits
        return time.monotonic() > worker.last_activity + limit + grace

    def _book(self, worker: _Process, line: list) -> None:
        """Record a line of a worker: the traits of a kind or the reply to a task, see Worker."""
        number, values, *more = line
        items = worker.lines[0]
        task = items[number].task
        if not more:
            self.traits[task.kind] = Traits(*values)
            worker.ready_kinds.add(task.kind)
            return
        (seconds,) = more
        reply = task.reply_type(*values)
        worker.is_exhausted |= reply.status == "error" and "MemoryError" in reply.detail
        note = "" if reply.is_for_policy else self.memory_note(reply)
        if note:
            reply = replace(reply, detail=reply.detail[: MAX_DETAIL - len(note)] + note)  # type: ignore
        item = items.pop(number)
        if not items:
            worker.lines.popleft()
        if task.is_timed:
            self._add_seconds(task.kind, seconds)
        self._finish(item, reply)

    def _add_seconds(self, kind: str, seconds: float) -> None:
        self.seconds[kind] = 0.95 * self.seconds.get(kind, seconds) + 0.05 * seconds

    def _finish(self, item: _Item, reply) -> None:
        """Record the reply of an item, or queue the next task that inquires into its failure."""
        if reply.status == BAD_RESULT:
            raise RuntimeError(reply.detail)
        answer = None
        if item.asker is not None:
            answer = reply
            item = item.asker
        elif reply.status in FAILED:
            item.inquiry = item.task.inquire(reply)
        if item.inquiry is not None:
            try:
                task = item.inquiry.send(answer)
            except StopIteration as end:
                reply = end.value
            else:
                self._slow.append(_Item(item.key, task, is_suspect=True, asker=item))
                return
        self._replies[item.key] = reply
        self.latencies.append(time.monotonic() - item.submitted_at)
        self.num_timeouts += reply.status == "timeout"
        self.num_errors += reply.status == "error"

    def _replace(self, worker: _Process, is_silent: bool, is_invalid: bool) -> None:
        """Replace a worker. The task that it was running gets a reply, all other items are requeued.

        If the old worker was busy with several async calls, the culprit is unknown, so each call is retried
        alone.
        """
        status = _stop(worker.process)
        self._workers[self._workers.index(worker)] = self._start()
        self.num_restarts += 1
        lines = [list(line.values()) for line in worker.lines]
        for item in reversed(sum(lines[1:], [])):
            self._fast.appendleft(item)  # only fast tasks are sent ahead
        if lines and len(lines[0]) > 1:
            for item in reversed(lines[0]):
                item.is_suspect = True
                self._slow.appendleft(item)
        elif lines:
            (item,) = lines[0]
            item.is_suspect = True
            is_ready = item.task.kind in worker.ready_kinds
            reason = self._reason_of_death(item, status, is_ready, is_silent, is_invalid)
            self._finish(item, item.task.reply_type.failure(*reason))

    def _reason_of_death(
        self, item: _Item, exit_status: int, is_ready: bool, is_silent: bool, is_invalid: bool
    ) -> tuple[str, str]:
        """Return status and detail of the task that a worker with this exit status was busy with."""
        log = f"; see {self.options.log_path}" if self.options.log_path else ""
        if is_invalid:
            return "error", "the function wrote to the worker's pipe, which only the worker may use"
        if is_silent and not is_ready:
            return "timeout", f"the worker was not ready after {START_GRACE_S:g} s{log}"
        if exit_status == -signal.SIGPROF:
            cpu_s = item.task.cpu_s(self.options.timeout_s)
            self._add_seconds(item.task.kind, cpu_s)
            return "timeout", f"killed after {cpu_s:g} s {OF_CPU_TIME}"
        if is_silent or exit_status == -signal.SIGALRM:
            limit = self._limit_s([item])
            self._add_seconds(item.task.kind, limit)
            return "timeout", f"killed after the limit of {limit:g} s"
        return "error", f"{WORKER_DIED} with exit status {exit_status}{log}"


def set_aside_large_log(path: str | os.PathLike | None) -> None:
    """Rename a log above MAX_LOG_BYTES to NAME.1; an earlier NAME.1 is overwritten."""
    if path and os.path.isfile(path) and os.path.getsize(path) > MAX_LOG_BYTES:
        os.replace(path, f"{path}.1")


def _has_ended(process: subprocess.Popen) -> bool:
    """Tell whether a process has ended, without reaping the process, so that the pid stays reserved."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _stop(process: subprocess.Popen) -> int:
    """End a worker and all processes that it started; return the exit status, or minus the signal."""
    process.stdin.close()
    process.stdout.close()
    os.kill(process.pid, signal.SIGTERM)  # the guard; its pid cannot be reused before wait()
    deadline = time.monotonic() + STOP_S
    while not _has_ended(process) and time.monotonic() < deadline:
        time.sleep(0.001)
    with contextlib.suppress(ProcessLookupError):  # in case a custom function stopped or killed the guard
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


# ------------------------------------------------------------------------------------------------------------
# 3 The worker process
# ------------------------------------------------------------------------------------------------------------
class Worker:
    """A worker process: runs the tasks that it is sent, until the pool closes the pipe or dies.

    request  [limit in seconds, limit of processor time, [[number, class of the task, *fields], ...]]
    replies  [number, fields of the reply, seconds] per task; before the first task of a kind also
             [number, traits], as soon as the libraries of the kind are imported
    """

    def __init__(self, module, options: dict, replies: int):
        self.module = module
        self.code_limits: dict = options["code_limits"]
        self.scales: dict = options["scales"]
        own.DIGESTS.update(options["files"])
        self.decode = _decoder(options["tokenizer"])  # token ids to text; text stays as it is
        self.environments: dict[str, Any] = {}  # of the episodes that live here, see verifiers/tools.py
        self.limit_s = 0.0
        self.cpu_s = 0.0
        self.traits: dict[str, Traits] = {}
        self.replies = replies

    def serve(self, requests: Iterable[bytes]) -> None:
        """Run all requests."""
        for line in requests:
            self.limit_s, self.cpu_s, rows = json.loads(line)
            tasks = {number: getattr(self.module, name)(*values) for number, name, *values in rows}
            for number, task in tasks.items():
                if task.kind not in self.traits:
                    self.traits[task.kind] = Traits()
                    with contextlib.suppress(Exception):
                        self.traits[task.kind] = task.prepare()
                    self.send(number, self.traits[task.kind])
            if any(self.traits[task.kind].is_async for task in tasks.values()):
                signal.setitimer(signal.ITIMER_REAL, self.limit_s + 2.0)  # for one that blocks the event loop
                event_loop().run(self.run_together(tasks))
                signal.setitimer(signal.ITIMER_REAL, 0)
            else:
                ((number, task),) = tasks.items()
                start = time.monotonic()
                self.restart_limit()
                reply = finish(task.run(self))
                self.limit_s = self.cpu_s = 0.0
                self.restart_limit()  # switches the timers off
                self.send(number, astuple(reply), time.monotonic() - start)

    def send(self, *values) -> None:
        """Write a line to the pool."""
        os.write(self.replies, json.dumps(values).encode() + b"\n")

    def restart_limit(self) -> None:
        """Start the time limits anew; at their end the kernel kills this process."""
        signal.setitimer(signal.ITIMER_REAL, self.limit_s)
        signal.setitimer(signal.ITIMER_PROF, self.cpu_s)

    async def run_together(self, tasks: dict[str, Task]) -> None:
        """Run async functions in parallel, and send each reply as soon as a function returns."""
        import asyncio

        async def run_one(number: str, task: Task) -> None:
            start = time.monotonic()
            try:
                async with asyncio.timeout(self.limit_s):
                    reply = await task.run(self)
            except TimeoutError:
                reply = task.reply_type.failure("timeout", f"stopped after the limit of {self.limit_s:g} s")
            self.send(number, astuple(reply), time.monotonic() - start)

        await asyncio.gather(*(run_one(*item) for item in tasks.items()))


def main() -> None:
    """Run a worker: workers.py --worker OPTIONS."""
    options = json.loads(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    sys.modules["workers"] = sys.modules["__main__"]  # so that the module of the tasks imports no second copy
    module = importlib.import_module(options["module"])
    _fork_worker(options["parent"])
    resource.setrlimit(resource.RLIMIT_AS, (options["memory_bytes"], options["memory_bytes"]))
    for alarm in (signal.SIGALRM, signal.SIGPROF):  # kill; the caller may have ignored or blocked them
        signal.signal(alarm, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {alarm})
    requests = os.dup(0)
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # print() of custom functions goes to the log instead of the replies
    sys.path.append(os.getcwd())  # for modules in the working directory; sys.path starts with this folder
    Worker(module, options, replies).serve(os.fdopen(requests, "rb"))


def _fork_worker(parent: int) -> None:
    """Fork: the child returns as the worker; this process stays behind as the guard and never returns.

    The guard ends all processes that the worker leaves behind, for example a server that a custom function
    has started. The guard is a subreaper, which adopts orphans, and so also finds processes that left the
    group by setsid(). It acts when the worker ends, on SIGTERM, or when the parent is killed. If a custom
    function kills the guard, processes outside the group survive.
    """
    guard = os.getpid()
    prctl = ctypes.CDLL(None).prctl
    signals = {signal.SIGTERM, signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    if not (worker := os.fork()):
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != guard:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    os.closerange(0, 256)  # closes the pipes, so that the pool sees their end when the worker dies
    prctl(1, signal.SIGTERM)
    statuses: dict[int, int] = {}
    is_over = os.getppid() != parent
    while worker not in statuses and not is_over:
        is_over = signal.sigwait(signals) == signal.SIGTERM
        statuses |= _reap()
    statuses |= _end_children()
    code = os.waitstatus_to_exitcode(statuses[worker])
    if code < 0:  # a signal ended the worker: end the guard by the same signal
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(guard, -code)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os._exit(code)


def _reap() -> dict[int, int]:
    """Return {process id: status} of the children that have ended since the last call."""
    statuses: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):  # all children have ended
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            statuses |= [child]
    return statuses


def _end_children() -> dict[int, int]:
    """Kill descendants of this process until all have ended; return {process id: status} of the children."""
    import psutil

    statuses: dict[int, int] = {}
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        time.sleep(0.002)
        statuses |= _reap()
    return statuses


def _decoder(tokenizer_fd: int | None) -> Callable:
    """Return a function that decodes token ids and passes text through."""
    if tokenizer_fd is None:
        return lambda completion: completion
    import tokenizers  # the Rust library inside the trainer's tokenizer

    tokenizer = tokenizers.Tokenizer.from_file(f"/proc/self/fd/{tokenizer_fd}")

    def decode(completion: str | list[int]) -> str:
        if isinstance(completion, str):
            return completion
        return tokenizer.decode(completion, skip_special_tokens=True)

    return decode


if __name__ == "__main__":
    main()
