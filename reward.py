r"""Score completions, in this process (`verify`) or in killable children (`RewardPool`), and judge them.

    verify("math", r"... so \boxed{\frac{1}{2}}", "0.5")     # Verdict(reward=1.0, status="ok")
    with RewardPool(num_workers=2) as pool:                  # scores while the caller generates
        pool.submit(key, "math", completion, answer)         # text or token ids, as soon as it is finished
        pool.poll()                                          # once per engine step
        verdicts = pool.collect()                            # waits; {key: Verdict} in submit order

Computer algebra on model output can hang for ever, eat all memory or crash, also in C code that no Python
exception reaches. So the kernel kills a child at its limit, and "timeout" and "error" are not "wrong". The
child is this file run as a script: a caller with a CUDA context and threads cannot safely fork.

The kinds that are more than a few lines live in verifiers/, which is also where functions of one's own are
found. Judges (section 5) are reward models; they are asked in the trainer's process, after a rollout. torch
is imported there only, so that a child starts quickly.
"""

import contextlib
import ctypes
import functools
import itertools
import json
import math
import operator
import os
import pkgutil
import re
import resource
import secrets
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal

import verifiers.chain
import verifiers.math
from settings import RewardSettings
from verifiers.kinds import RULE_KINDS, SLOW_KINDS, functions_of, parts_of
from verifiers.own import check_score, explain, load_function

# ------------------------------------------------------------------------------------------------------------
# 1 Verdicts: one matcher per kind
# ------------------------------------------------------------------------------------------------------------

NUMERIC_RTOL = Decimal("1e-6")  # relative, for numbers that are not both whole
FAILED = ("timeout", "error")


@dataclass(frozen=True)
class Verdict:
    """The verifier's opinion of one completion."""

    reward: float  # in [0, 1], the share that is right
    status: str  # "ok" (a reward of 1) | "wrong" (less) | "no_answer" | "timeout" | "error"
    detail: str = ""  # the reason of a timeout or an error, at most 200 printable characters
    parts: dict[str, float] = field(default_factory=dict, hash=False)  # {kind: its own reward} of a sum

    @property
    def failed(self) -> bool:
        """Tell whether nothing is known of the completion: its verifier timed out or raised."""
        return self.status in FAILED


def score_of(verdict: Verdict, binary: bool) -> float:
    """Return the verifier's part of the reward in [0, 1]; binary: rewards below 1 count as 0."""
    return float(verdict.reward == 1) if binary else verdict.reward


def verify(kind: str, completion: str, answer: str, /, **fields) -> Verdict:
    r"""Score one completion against the reference answer, in this process and without a time limit.

    "exact"    the whole completion equals the answer, surrounding whitespace aside
    "characters"  the share of characters of the answer that are in their place
    "chain"    the share of right steps of a small machine's trace (verifiers/chain.py)
    "numeric"  the last number equals the answer: exactly if both are whole, else within NUMERIC_RTOL of it
    "gsm8k"    the same for the first number after the last "####"; the answer is a number or a GSM8K solution
    "math"     math-verify finds the last \boxed{...} equal to the answer (verifiers/math.py)
    "code", "instructions"  the share of tests or constraints met (verifiers/code.py, instructions.py)
    "module:function", "path/file.py:function"  a function of your own (verifiers/own.py) gives the share.
               A caller must not take such a kind from data (data.prompts.load_prompts refuses).
    "0.8*math + 0.2*rewards.py:brevity"  the weighted mean; the first kind decides the status

    fields: prompt, messages and the columns of the row, for functions of your own and for code. An exception
    while scoring and a reference answer that cannot be read give status "error".
    Raises ValueError for an unknown kind, TypeError for a completion or an answer that is not a string.
    """
    _check(kind, completion, answer)
    verdict = _verify(kind, completion, answer, fields)
    if _is_async(kind):
        return _event_loop().run(verdict)
    try:
        verdict.send(None)  # nothing in it waits, so that it needs no event loop
    except StopIteration as end:
        return end.value


async def _verify(kind: str, completion: str, answer: str, fields: dict) -> Verdict:
    verdicts = {part: await _verify_part(part, completion, answer, fields) for _, part in parts_of(kind)}
    if len(verdicts) == 1:
        return verdicts.popitem()[1]
    rewards = {part: verdict.reward for part, verdict in verdicts.items()}
    for part, verdict in verdicts.items():
        if verdict.failed:
            return Verdict(0.0, verdict.status, f"{part}: {verdict.detail}"[:200], rewards)
    weights = [weight for weight, _ in parts_of(kind)]
    mean = sum(map(operator.mul, weights, rewards.values())) / sum(weights)
    first = next(iter(verdicts.values()))
    return Verdict(mean, first.status, first.detail, rewards)


async def _verify_part(kind: str, completion: str, answer: str, fields: dict) -> Verdict:
    try:
        if kind in RULES:
            return RULES[kind](completion, answer)
        if kind in _SLOW:
            return _SLOW[kind](completion, answer, fields)
        function = load_function(kind)
        result = function.call(**function.arguments({**fields, "completion": completion, "answer": answer}))
        score = check_score(await result if function.is_async else result)
        return Verdict(score, "ok" if score == 1 else "wrong")
    except Exception as error:  # untrusted text; MemoryError and RecursionError are among them
        return Verdict(0.0, "error", explain(error)[:200])


@functools.cache
def _event_loop():
    """Return what runs coroutines in this process: one loop for all, so that clients stay connected."""
    import asyncio

    return asyncio.Runner()


def _is_async(kind: str) -> bool:
    with contextlib.suppress(Exception):  # verify() says why a function cannot be imported
        return any(load_function(name).is_async for name in functions_of(kind))
    return False


def _check(kind: str, completion: str | list[int], answer: str, types: tuple = (str,)) -> None:
    if not isinstance(kind, str):
        raise ValueError(f"unknown kind {kind!r}: it must be text")
    parts_of(kind)
    if not (isinstance(completion, types) and isinstance(answer, str)):
        raise TypeError(f"completion and answer must be str, not {type(completion)} and {type(answer)}")


# ---- rules ----
def _compared(equal: bool) -> Verdict:
    return Verdict(1.0, "ok") if equal else Verdict(0.0, "wrong")


def _exact(completion: str, answer: str) -> Verdict:
    if not answer.strip():
        return Verdict(0.0, "error", "the reference answer is empty")
    if not completion.strip():
        return Verdict(0.0, "no_answer")
    return _compared(completion.strip() == answer.strip())


def _characters(completion: str, answer: str) -> Verdict:
    """Give characters in place / longer length [ours]."""
    verdict, found, gold = _exact(completion, answer), completion.strip(), answer.strip()
    if verdict.status != "wrong":
        return verdict
    return Verdict(sum(map(operator.eq, found, gold)) / max(len(found), len(gold)), "wrong")


# A minus counts unless it joins two terms, as in "3-5" or "x-5"; commas count in groups of three only; digits
# are ASCII; an exponent has at most the 17 digits that Decimal can hold. Nothing can backtrack: linear time.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z.)\]}])[-+\u2212])?\$?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,17}(?![0-9]))?"
)
_TO_PLAIN = str.maketrans("\u2212", "-", "$,")
_DECIMAL = Context(prec=50, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])


def _compare_numbers(match: re.Match | None, answer: str) -> Verdict:
    gold_match = _NUMBER.fullmatch(answer.strip().strip("$% "))
    if gold_match is None:
        return Verdict(0.0, "error", f"the reference answer is not a number: {answer[:99]!r}"[:200])
    if match is None:
        return Verdict(0.0, "no_answer")
    found, gold = (Decimal(number[0].translate(_TO_PLAIN)) for number in (match, gold_match))  # exact
    if found == found.to_integral_value() and gold == gold.to_integral_value():
        return _compared(found == gold)
    tolerance = _DECIMAL.multiply(NUMERIC_RTOL, _DECIMAL.abs(gold))
    return _compared(_DECIMAL.abs(_DECIMAL.subtract(found, gold)) <= tolerance)


def _numeric(completion: str, answer: str) -> Verdict:
    last = deque(_NUMBER.finditer(completion), maxlen=1)
    return _compare_numbers(last[0] if last else None, answer)


def _gsm8k(completion: str, answer: str) -> Verdict:
    _, marker, tail = completion.rpartition("####")
    return _compare_numbers(_NUMBER.search(tail) if marker else None, answer.rpartition("####")[2])


def _math(completion: str, answer: str) -> Verdict:
    return Verdict(*verifiers.math.verify(completion, answer))


def _chain(completion: str, answer: str) -> Verdict:
    return Verdict(*verifiers.chain.verify(completion, answer))


code_limits: dict = {}  # options of verifiers.code.verify; a worker gets them from its pool


def _code(completion: str, answer: str, fields: dict) -> Verdict:
    from verifiers import code

    return Verdict(*code.verify(completion, answer, **code_limits))


def _instructions(completion: str, answer: str, fields: dict) -> Verdict:
    from verifiers import instructions

    return Verdict(*instructions.verify(completion, answer, **_without_given(fields)))


def _without_given(fields: dict) -> dict:
    return {name: value for name, value in fields.items() if name not in ("completion", "answer")}


# Rules are quick, and completion and answer are all that they need. The others may take their time.
RULES = {
    "exact": _exact, "characters": _characters, "chain": _chain, "numeric": _numeric, "gsm8k": _gsm8k,
    "math": _math,
}  # fmt: skip
_SLOW = {"code": _code, "instructions": _instructions}
assert tuple(RULES) == RULE_KINDS and tuple(_SLOW) == SLOW_KINDS
# ------------------------------------------------------------------------------------------------------------
# 2 The pool: the caller's side
# ------------------------------------------------------------------------------------------------------------

# Items sent ahead to one worker. More saves wake-ups on tiny items; fewer strand less work behind a slow one.
# What may be slow (a sandbox, a function of your own) goes alone to a worker that has nothing else; calls of
# functions that are `async def` go together, so that they wait for their answers at the same time.
WINDOW = 16
ASYNC_CALLS = 64
# A child that is silent for this long past the limit did not even stop at its own timer: it is killed.
START_GRACE_S = 120.0  # while it starts, or imports what a kind needs
GRACE_S = 5.0
LOOK_S = 0.1  # between looks at workers that say nothing
STOP_S = 5.0  # a guard ends all processes of its worker in a few hundredths of this
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH")
MAX_REPLY_BYTES = 1 << 20


@dataclass(eq=False)
class _Item:
    """One completion on its way to a verdict."""

    key: Hashable
    kind: str
    completion: str | list[int]
    answer: str
    fields: dict
    since: float = field(default_factory=time.monotonic)
    # The reply has to name it, so that what a function writes into the pipe is taken for no verdict.
    number: str = field(default_factory=lambda: secrets.token_hex(8))
    is_suspect: bool = False  # a worker died with it and others in its hands: it goes alone


@dataclass(eq=False)
class _Worker:
    """One child and what is on its way to it. It answers line after line, so it is busy with sent[0]."""

    process: subprocess.Popen
    sent: deque = field(default_factory=deque)  # a line's items without a reply: {number: item}
    unwritten: bytearray = field(default_factory=bytearray)  # bytes that the pipe to the child has not taken
    unread: bytes = b""  # the beginning of a reply
    alive_at: float = field(default_factory=time.monotonic)  # the last reply, or the last bytes taken
    ready: set = field(default_factory=set)  # kinds whose imports are done

    def current(self) -> _Item | None:
        """Return the item that it is busy with, or one of them."""
        return next(iter(self.sent[0].values())) if self.sent else None

    def is_slow(self) -> bool:
        """Tell whether it is busy with what may take long."""
        return bool(self.sent) and not _is_rule(self.current().kind)


@functools.cache
def _is_rule(kind: str) -> bool:
    return all(part in RULES for _, part in parts_of(kind))


class RewardPool(contextlib.AbstractContextManager):
    """Score completions in child processes while the caller goes on.

    num_workers child processes score one item at a time each (calls of async functions: ASYNC_CALLS), for at
    most timeout_s wall-clock seconds and with at most memory_bytes of address space. A child that dies costs
    the item it was busy with its verdict ("timeout" or "error"); the other items go to a fresh child. Rules
    go before everything that may be slow. At most max_backlog items wait; then submit does. Data moves only
    inside submit, poll and collect. One thread makes and uses the pool: Linux ends the children together with
    that thread.

    tokenizer: JSON of the tokenizer with which the children turn token ids into text. env: names of variables
    that they get besides KEPT_VARIABLES. log_path: file to which what functions print is appended; without
    one it is lost. code_limits: isolation, timeout_s and memory_bytes of verifiers.code.verify, whose limit
    for all tests of a program is added to timeout_s.
    """

    def __init__(
        self,
        num_workers: int = 1,
        timeout_s: float = 10.0,
        memory_bytes: int = 2 << 30,
        *,
        max_backlog: int = 4096,
        tokenizer: str = "",
        env: Sequence[str] = (),
        log_path: str | os.PathLike | None = None,
        code_limits: dict | None = None,
    ):
        if num_workers < 1 or timeout_s <= 0 or max_backlog < 1:
            raise ValueError(f"{num_workers=}, {timeout_s=} and {max_backlog=} must be positive")
        if missing := [name for name in env if name not in os.environ]:
            raise ValueError(f"reward.env: {', '.join(missing)} is not set in the environment of this run")
        self.timeout_s, self.memory_bytes, self.max_backlog = timeout_s, memory_bytes, max_backlog
        self.env, self.log_path, self.code_limits = tuple(env), log_path, code_limits or {}
        self.latencies: list[float] = []  # seconds from submit to verdict, of all items since it was emptied
        self.seconds: dict[str, float] = {}  # {kind: mean seconds of an item}, moving
        self.num_timeouts = self.num_errors = self.num_restarts = 0  # verdicts, verdicts, children replaced
        # {kind: {"fields": names it can take or None for all, "required": names, "async": bool}}, once met
        self.signatures: dict[str, dict] = {}
        self._tokenizer = os.memfd_create("tokenizer") if tokenizer else None  # a file that ends with us
        if tokenizer:
            with open(os.dup(self._tokenizer), "w") as file:
                file.write(tokenizer)
        self._rules, self._slow = deque(), deque()  # items that are not yet sent
        self._verdicts: dict[Hashable, Verdict | None] = {}  # in submit order; None while outstanding
        self._look_at = 0.0  # when all workers are looked at again, of time.monotonic()
        self._workers = [self._start() for _ in range(num_workers)]

    def at_once(self, kind: str) -> int:
        """Return how many verdicts of a kind the workers find at the same time."""
        is_async = self.signatures.get(kind, {}).get("async")
        return len(self._workers) * (ASYNC_CALLS if is_async else 1)

    def submit(
        self, key: Hashable, kind: str, completion: str | list[int], answer: str, fields: dict | None = None
    ) -> None:
        """Hand over one item; return at once but for a full backlog. `key`: new since the last collect.

        A completion may be token ids, if the pool has a tokenizer: the text without special tokens is scored.
        fields: {name: JSON value} of prompt, messages and columns; a worker gets those that the kind takes.
        """
        _check(kind, completion, answer, (str, list))
        if not self._workers:
            raise ValueError("the pool is closed")
        if key in self._verdicts:
            raise ValueError(f"key {key!r} was submitted before and is not yet collected")
        if isinstance(completion, list) and self._tokenizer is None:
            raise ValueError("token ids need a pool with a tokenizer")
        while self.poll() >= self.max_backlog:
            self._ready(1000)
        self._verdicts[key] = None
        queue = self._rules if _is_rule(kind) else self._slow
        queue.append(_Item(key, kind, completion, answer, fields or {}))
        self._send()

    def poll(self) -> int:
        """Move what the pipes take and hold, without waiting; return how many items still lack a verdict."""
        workers = self._ready(0)
        if time.monotonic() >= self._look_at:  # the silent ones too, and who has ended with its pipe open
            self._look_at = time.monotonic() + LOOK_S
            self._send()  # first, so that nobody is called silent who waited for the rest of a long item
            workers = list(self._workers)
        for worker in workers:
            self._receive(worker)
        self._send()
        sent = sum(len(line) for worker in self._workers for line in worker.sent)
        return len(self._rules) + len(self._slow) + sent

    def collect(self) -> dict[Hashable, Verdict]:
        """Wait for all items submitted since the last collect; return their verdicts, in submit order."""
        while self.poll():
            self._ready(1000)
        verdicts, self._verdicts = self._verdicts, {}
        return verdicts

    def describe(self) -> str:
        """Say how many verdicts are awaited, and what the workers are busy with; another thread may ask."""
        items = [item for worker in list(self._workers) if (item := worker.current()) is not None]
        kinds = ", ".join(dict.fromkeys(item.kind for item in items))
        num_waiting = sum(verdict is None for verdict in list(self._verdicts.values()))
        return f"{num_waiting} verdicts awaited" + (f", workers are busy with {kinds}" if items else "")

    def close(self) -> None:
        """Kill the workers; items without verdict are dropped."""
        while self._workers:
            _stop(self._workers.pop().process)
        if self._tokenizer is not None:
            os.close(self._tokenizer)
            self._tokenizer = None
        self._rules, self._slow, self._verdicts = deque(), deque(), {}

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _ready(self, wait_ms: int) -> list[_Worker]:
        """Return the workers with something to read, after waiting at most so long until any pipe moves."""
        poller, readers = select.poll(), {}  # select.select refuses file descriptors above 1023
        for worker in self._workers:
            readers[worker.process.stdout.fileno()] = worker
            poller.register(worker.process.stdout, select.POLLIN)
            if worker.unwritten:
                poller.register(worker.process.stdin, select.POLLOUT)
        return [readers[pipe] for pipe, _ in poller.poll(wait_ms) if pipe in readers]

    def _start(self) -> _Worker:
        # No LD_PRELOAD, no PYTHON* switches of the caller. sympy's order of terms can follow the hash seed.
        keep = (*KEPT_VARIABLES, *self.env)
        env = {name: os.environ[name] for name in keep if name in os.environ} | {"PYTHONHASHSEED": "0"}
        inherited = [] if self._tokenizer is None else [self._tokenizer]
        options = {"memory_bytes": self.memory_bytes, "tokenizer": self._tokenizer, "code": self.code_limits}
        options["parent"] = os.getpid()
        with open(self.log_path or os.devnull, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-u", __file__, "--worker", json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=env,
                pass_fds=inherited,
                start_new_session=True,  # it and what it leaves behind are one process group
            )
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)
        return _Worker(process)

    def _send(self) -> None:
        """Give queued items to the least loaded workers and write what the pipes take."""
        while self._rules or self._slow:
            # a worker with a slow item counts as full
            worker = min(self._workers, key=lambda worker: WINDOW if worker.is_slow() else len(worker.sent))
            if worker.is_slow() or len(worker.sent) >= (WINDOW if self._rules else 1):
                break
            items = self._next_items()
            worker.sent.append({item.number: item for item in items})
            worker.unwritten += self._line(items)
        for worker in self._workers:
            # A full pipe is for the next call; a dead child shows in _receive, as the end of its replies.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                while worker.unwritten:
                    del worker.unwritten[: os.write(worker.process.stdin.fileno(), worker.unwritten)]
                    worker.alive_at = time.monotonic()

    def _next_items(self) -> list[_Item]:
        """Take one item off its queue, or several calls of async functions that follow each other."""
        if self._rules:
            return [self._rules.popleft()]
        together = lambda item: self.signatures.get(item.kind, {}).get("async") and not item.is_suspect
        items = [self._slow.popleft()]
        while together(items[0]) and self._slow and together(self._slow[0]) and len(items) < ASYNC_CALLS:
            items.append(self._slow.popleft())
        return items

    def _line(self, items: list[_Item]) -> bytes:
        """Write items for a worker, without the fields that their kind does not take."""
        rows = []
        for item in items:
            names = [] if _is_rule(item.kind) else self.signatures.get(item.kind, {}).get("fields")
            fields = {n: v for n, v in item.fields.items() if names is None or n in names}
            rows.append([item.number, item.kind, item.completion, item.answer, fields])
        # ASCII JSON: newlines, null bytes and lone surrogates are escaped and come out as they were.
        return json.dumps([self._limit_s(items), rows]).encode() + b"\n"

    def _limit_s(self, items: Iterable[_Item]) -> float:
        """Return how long a worker may take for items that go together."""
        if not any(part == "code" for item in items for _, part in parts_of(item.kind)):
            return self.timeout_s
        from verifiers.code import TOTAL_LIMITS

        return self.timeout_s + TOTAL_LIMITS * self.code_limits.get("timeout_s", 0.0)

    def _receive(self, worker: _Worker) -> None:
        """Book the replies of a worker; replace it if it has died, gone silent or sent what is no reply."""
        # It is looked up before reading, so that the last replies of a worker that has ended are read.
        has_ended = _has_ended(worker.process)
        data, is_wrong, is_full = None, False, False
        try:
            while data := os.read(worker.process.stdout.fileno(), 1 << 16):
                *replies, worker.unread = (worker.unread + data).split(b"\n")
                for reply in replies:
                    is_full |= self._book(worker, json.loads(reply))
                worker.alive_at = time.monotonic()
                is_wrong = len(worker.unread) > MAX_REPLY_BYTES
                if is_wrong:
                    break
        except BlockingIOError:
            pass
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            is_wrong = True
        item, is_silent = worker.current(), False
        if item is not None:
            grace = GRACE_S if item.kind in worker.ready else START_GRACE_S
            limit = self._limit_s(worker.sent[0].values())
            is_silent = time.monotonic() > worker.alive_at + limit + grace
        is_full = is_full and not worker.sent  # all later calls would fail, too
        if data == b"" or has_ended or is_wrong or is_silent or is_full:
            self._replace(worker, is_silent, is_wrong)

    def _book(self, worker: _Worker, reply: list) -> bool:
        """Take in one reply: [number, signature of the kind] or [number, fields of a Verdict, seconds].

        Returns whether the worker had no memory left.
        """
        number, *values = reply
        line = worker.sent[0]
        if isinstance(values[0], dict):
            kind = line[number].kind
            self.signatures[kind] = values[0]
            worker.ready.add(kind)
            return False
        *values, took = values
        item = line.pop(number)
        if not line:
            worker.sent.popleft()
        self.seconds[item.kind] = 0.95 * self.seconds.get(item.kind, took) + 0.05 * took
        verdict = Verdict(*values)
        self._finish(item, verdict)
        return verdict.status == "error" and "MemoryError" in verdict.detail

    def _finish(self, item: _Item, verdict: Verdict) -> None:
        self._verdicts[item.key] = verdict
        self.latencies.append(time.monotonic() - item.since)
        self.num_timeouts += verdict.status == "timeout"
        self.num_errors += verdict.status == "error"

    def _replace(self, worker: _Worker, is_silent: bool, is_wrong: bool) -> None:
        """Start another worker. The item that this one was busy with gets its verdict, the others wait again.

        If it was busy with several calls, nobody knows which one to blame: each of them is tried alone.
        """
        limit = self._limit_s(worker.sent[0].values() if worker.sent else ())
        status = _stop(worker.process)
        self._workers[self._workers.index(worker)] = self._start()
        self.num_restarts += 1
        lines = [list(line.values()) for line in worker.sent]
        for item in reversed(sum(lines[1:], [])):
            self._rules.appendleft(item)  # only rules are sent ahead
        if lines and len(lines[0]) > 1:
            for item in reversed(lines[0]):
                item.is_suspect = True
                self._slow.appendleft(item)
        elif lines:
            (item,) = lines[0]
            log = f"; see {self.log_path}" if self.log_path else ""
            if is_wrong:
                verdict = Verdict(
                    0.0, "error", "something else than the worker wrote to its pipe of verdicts"
                )
            elif is_silent and item.kind not in worker.ready:
                verdict = Verdict(0.0, "timeout", f"the worker was not ready after {START_GRACE_S:g} s{log}")
            elif is_silent or status == -signal.SIGALRM:
                verdict = Verdict(0.0, "timeout", f"killed after the limit of {limit:g} s")
                self.seconds[item.kind] = 0.95 * self.seconds.get(item.kind, limit) + 0.05 * limit
            else:
                verdict = Verdict(0.0, "error", f"the worker died with exit status {status}{log}")
            self._finish(item, verdict)


def _has_ended(process: subprocess.Popen) -> bool:
    """Tell whether a child has ended; its status and its process id stay until it is waited for."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _stop(process: subprocess.Popen) -> int:
    """End a worker and what it started; return its exit status: minus the signal that ended it."""
    process.stdin.close()
    process.stdout.close()
    os.kill(process.pid, signal.SIGTERM)  # an order to its guard, whose id is its own until it is waited for
    deadline = time.monotonic() + STOP_S
    while not _has_ended(process) and time.monotonic() < deadline:
        time.sleep(0.001)
    with contextlib.suppress(ProcessLookupError):  # for a guard that a function has stopped or killed
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def start_pool(
    settings: RewardSettings, tokenizer, log_path: str | os.PathLike | None = None, num_workers: int = 0
) -> RewardPool:
    """Start the reward workers of this rank; num_workers: how many, where it is not what the settings say."""
    decodes = tokenizer is not None and settings.decode == "workers"
    return RewardPool(
        num_workers or settings.num_workers,
        settings.timeout_s,
        int(settings.memory_gib * 2**30),
        max_backlog=settings.max_backlog,
        tokenizer=decoder_json(tokenizer) if decodes else "",
        env=settings.env,
        log_path=log_path,
        code_limits={
            "isolation": settings.sandbox,
            "timeout_s": settings.code_timeout_s,
            "memory_bytes": int(settings.code_memory_gib * 2**30),
        },
    )


def decoder_json(tokenizer) -> str:
    """Return the library inside a tokenizer as JSON, for workers; ValueError if it decodes otherwise."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    cleans = tokenizer.clean_up_tokenization_spaces and type(getattr(inner, "model", None)).__name__ != "BPE"
    if inner is None or cleans:
        raise ValueError("reward.decode workers: this tokenizer does more than its library: set it to engine")
    return inner.to_str()


# ------------------------------------------------------------------------------------------------------------
# 3 The pool: the child's side
# ------------------------------------------------------------------------------------------------------------
def main() -> None:
    """Answer lines [seconds, [[number, kind, completion, answer, fields], ...]] on stdin by lines on stdout.

    The first item of each kind is answered by [number, signature] once what the kind needs is imported; every
    item by [number, *Verdict's fields, seconds].
    """
    options = json.loads(sys.argv[2])  # reward.py --worker OPTIONS
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    _fork_worker(options["parent"])
    resource.setrlimit(resource.RLIMIT_AS, (options["memory_bytes"], options["memory_bytes"]))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # kills; the caller may have left it ignored or blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    requests, replies, null = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # whatever is printed goes to the log and stays out of the replies
    sys.path.append(os.getcwd())  # modules beside a run; sys.path begins with this file's folder
    code_limits.update(options["code"])
    decode = _decoder(options["tokenizer"])
    reply = lambda *values: os.write(replies, json.dumps(values).encode() + b"\n")
    known = set()
    for line in os.fdopen(requests, "rb"):  # ends when the parent closes it or dies
        limit_s, items = json.loads(line)
        for number, kind, *_ in items:
            if kind not in known:
                known.add(kind)
                reply(number, _prepare(kind))
        items = [[number, kind, decode(completion), *rest] for number, kind, completion, *rest in items]
        if _is_async(items[0][1]):
            signal.setitimer(signal.ITIMER_REAL, limit_s + 2.0)  # for a call that keeps the loop to itself
            _event_loop().run(_answer_together(items, limit_s, reply))
            signal.setitimer(signal.ITIMER_REAL, 0)
            continue
        ((number, kind, completion, answer, fields),) = items
        start = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        verdict = verify(kind, completion, answer, **fields)
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(number, *astuple(verdict), time.monotonic() - start)


def _fork_worker(parent: int) -> None:
    """Return in a fork, the worker. This process guards it: it ends all that the worker leaves behind.

    The guard adopts processes whose parents have ended, so that it finds those, too, that have left the group
    by setsid(). They end when the worker ends, when the guard gets SIGTERM, and when the parent is killed. A
    function that kills the guard itself keeps what has left the group.
    """
    guard, prctl, watched = os.getpid(), ctypes.CDLL(None).prctl, {signal.SIGTERM, signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    if not (worker := os.fork()):
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != guard:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    os.closerange(0, 256)  # above all the pipes: their end tells the pool that the worker has died
    prctl(1, signal.SIGTERM)
    ends, is_over = {}, os.getppid() != parent
    while worker not in ends and not is_over:
        is_over = signal.sigwait(watched) == signal.SIGTERM
        ends |= _reap()
    ends |= _end_children()
    code = os.waitstatus_to_exitcode(ends[worker])
    if code < 0:  # it ends as the worker has ended
        with contextlib.suppress(OSError):  # SIGKILL cannot be set, and needs not
            signal.signal(-code, signal.SIG_DFL)
        os.kill(guard, -code)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os._exit(code)


def _reap() -> dict[int, int]:
    """Return {process id: status} of the children that have ended since the last call."""
    found = {}
    with contextlib.suppress(ChildProcessError):  # there is no child left
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            found |= [child]
    return found


def _end_children() -> dict[int, int]:
    """Kill all processes below this one until none is left; return {process id: status} of the children."""
    import psutil

    found = {}
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        time.sleep(0.002)
        found |= _reap()
    return found


async def _answer_together(items: list[list], limit_s: float, reply: Callable) -> None:
    """Answer each item as soon as its function, waiting beside the others, has given its score."""
    import asyncio

    async def answer_one(number, kind, completion, answer, fields) -> None:
        start = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                verdict = await _verify(kind, completion, answer, fields)
        except TimeoutError:
            verdict = Verdict(0.0, "timeout", f"stopped after the limit of {limit_s:g} s")
        reply(number, *astuple(verdict), time.monotonic() - start)

    await asyncio.gather(*(answer_one(*item) for item in items))


def _prepare(kind: str) -> dict:
    """Import what a kind needs, which is not the item's fault, and return the signature of its functions.

    verify() reports an import that fails.
    """
    signature = {"fields": None, "required": [], "async": False}
    with contextlib.suppress(Exception):
        for _, part in parts_of(kind):
            if part == "math":
                verifiers.math.load_library()
        functions = [load_function(name) for name in functions_of(kind)]
        signature["required"] = [name for function in functions for name in function.required]
        is_slow = any(part in _SLOW for _, part in parts_of(kind))  # it would keep others waiting
        signature["async"] = any(function.is_async for function in functions) and not is_slow
        fields = [function.fields() for function in functions]
        if None not in fields and not is_slow:
            signature["fields"] = sorted(set(sum(fields, [])))
    return signature


def _decoder(tokenizer_fd: int | None) -> Callable:
    """Return the function that turns token ids into text, and leaves text as it is."""
    if tokenizer_fd is None:
        return lambda completion: completion
    import tokenizers  # the library that is inside the trainer's tokenizer

    tokenizer = tokenizers.Tokenizer.from_file(f"/proc/self/fd/{tokenizer_fd}")
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    return lambda completion: decode(completion) if isinstance(completion, list) else completion


# ------------------------------------------------------------------------------------------------------------
# 4 Checks before a run: can every reference answer be right, does every function of one's own work?
# ------------------------------------------------------------------------------------------------------------
Row = tuple[str, str, dict]  # kind, reference answer, fields


def impossible_references(pool: RewardPool, rows: Sequence[Row]) -> dict[int, str]:
    """Return {index: reason} of the rows whose reference answer is wrong by its own rule.

    Every completion of such a prompt would be wrong or an error. Of a sum each part that is a rule is asked.
    The answer is written as a completion writes it; for constraints and tests it counts only that they can be
    read.
    """
    asked, reasons = {}, {}  # {(kind, answer, fields where they matter): indices}
    for index, (kind, answer, fields) in enumerate(rows):
        for _, part in parts_of(kind):
            if part == "code":
                from verifiers.code import read_tests

                try:
                    read_tests(answer, "")
                except Exception as error:  # broken data may raise anything
                    reasons[index] = f"{answer[:80]!r}: error: {explain(error)}"
            if part in RULES:
                asked.setdefault((part, answer, ""), []).append(index)
            elif part == "instructions":
                asked.setdefault((part, answer, json.dumps(fields, default=str)), []).append(index)
    for key, indices in asked.items():
        part, answer, _ = key
        completion = {"math": rf"\boxed{{{answer}}}", "gsm8k": f"#### {answer.rpartition('####')[2]}"}
        fields = {} if part in RULES else rows[indices[0]][2]
        pool.submit(key, part, completion.get(part, answer), answer, fields)
    for key, verdict in pool.collect().items():
        if verdict.failed or (verdict.status != "ok" and key[0] in RULES):
            reason = verdict.detail or f"{key[0]} does not find it equal to itself"
            reasons |= dict.fromkeys(asked[key], f"{key[1][:80]!r}: {verdict.status}: {reason}")
    pool.latencies = []  # no training has begun
    return dict(sorted(reasons.items()))


def check_functions(kinds: Iterable[str], rows: Sequence[Row], settings: RewardSettings) -> None:
    """Import and call each function of one's own in the kinds and rows, as workers do; ValueError names it.

    A function is called with the first row of its kind, else with the first of all, and the reference answer
    as the completion. Where a kind runs programs, the sandbox must start. Then every row of a function's kind
    must hold the columns that it needs.
    """
    kinds = dict.fromkeys([*kinds, *(kind for kind, _, _ in rows)])
    first = {kind: row for kind, *row in reversed(rows)}
    names = {name: kind for kind in reversed(kinds) for name in functions_of(kind)}
    if any(part == "code" for kind in kinds for _, part in parts_of(kind)):
        from verifiers.sandbox import check_sandbox

        check_sandbox(settings.sandbox)
    if not names:
        return
    if not rows:
        raise ValueError("no prompts to try the reward functions on")
    with start_pool(settings, None, num_workers=1) as pool:
        for name, kind in names.items():
            answer, fields = first.get(kind, rows[0][1:])
            pool.submit(name, name, answer, answer, fields)
        verdicts = pool.collect()
    for name, verdict in verdicts.items():
        answer, _ = first.get(names[name], rows[0][1:])
        if verdict.failed:
            raise ValueError(
                f"reward function {name}: {verdict.detail}. It was called with the reference answer "
                f"{answer[:80]!r} as the completion"
            )
    for index, (kind, _, fields) in enumerate(rows):
        for name in functions_of(kind):
            missing = set(pool.signatures[name]["required"]) - {*fields, "completion", "answer"}
            if missing:
                raise ValueError(
                    f"reward function {name}: its parameter {min(missing)} is no column of prompt "
                    f"{index + 1} of {len(rows)}, {str(fields.get('prompt'))[:80]!r}"
                )


# ------------------------------------------------------------------------------------------------------------
# 5 Judges: reward models, asked in the trainer's process after a rollout
# ------------------------------------------------------------------------------------------------------------
TEMPLATE = """Task:\n{prompt}\n\nFirst answer:\n{first}\n\nSecond answer:\n{second}\n
Is each answer right, and where does it go wrong? Think step by step. Then say in one last line whether the
first answer is better than the second, as good or worse:\nVerdict: Better|Tie|Worse"""  # [ours]


class ScalarJudge:
    """Score texts by a reward model with one label, such as a Bradley-Terry model, as prompt + completion.

    path: Hugging Face folder. batch_size: texts per forward. max_tokens: a longer text loses its beginning.
    margin: scores of a pair that differ by no more are a tie.
    """

    def __init__(
        self, path: str | os.PathLike, batch_size: int = 32, max_tokens: int = 4096, margin: float = 0.0
    ):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        local = {"local_files_only": True, "trust_remote_code": False}
        model, loading = AutoModelForSequenceClassification.from_pretrained(  # [ours]: bfloat16 makes ties
            path, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **local
        )
        if model.config.num_labels != 1 or loading["missing_keys"]:  # a causal LM's head would be random
            raise ValueError(f"judge {path} has {model.config.num_labels} labels, not 1, or no trained head")
        tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left", **local)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id  # it marks the end of a text
        model.config.get_text_config().use_cache = False  # nothing reads keys and values again
        self.batch_size, self.margin = batch_size, margin
        self.tokenize = functools.partial(
            tokenizer,
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=max_tokens,
            return_token_type_ids=False,
            return_tensors="pt",
        )
        self.model = model.eval().requires_grad_(False).to("cuda" if torch.cuda.is_available() else "cpu")

    def _batches(self, texts: list[str]) -> Iterator[tuple[list[str], dict]]:
        """Yield distinct texts, short ones first for little padding, and what a forward of them takes."""
        order = sorted(set(texts), key=lambda text: (len(text), text))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            yield batch, self.tokenize(batch).to(self.model.device)

    def scores(self, prompts: list[str], completions: list[str]) -> list[float]:
        """Return raw scores; NaN and inf are handed on. Equal texts are read once and get equal scores."""
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        scores = {}
        for batch, inputs in self._batches(texts):
            scores |= zip(batch, self.model(**inputs).logits[:, 0].tolist())
        return [scores[text] for text in texts]

    def head_inputs(self, prompts: list[str], completions: list[str]) -> tuple:
        """Return scores [n] and h [n, d], float32 on the CPU: score = head(h), the last layer of the judge.

        It costs a forward. ValueError if no linear layer of one output makes the scores.
        """
        import torch

        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        heads = [m for m in self.model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 1]
        if not heads:
            raise ValueError("the scalar judge has no linear layer that makes its score")
        head, seen, found = heads[-1], [], {}
        with head.register_forward_pre_hook(lambda _, given: seen.append(given[0])):
            for batch, inputs in self._batches(texts):
                logits, h = self.model(**inputs).logits, seen.pop()
                if h.dim() == 3:  # [B, T, d]: the score is that of the last token
                    h = h[torch.arange(len(batch)), inputs["attention_mask"].sum(dim=1) - 1]
                made = torch.nn.functional.linear(h, head.weight, head.bias)  # [B, 1]
                if not torch.allclose(made, logits, rtol=1e-4, atol=1e-4, equal_nan=True):
                    raise ValueError("the scalar judge's score is not the output of its last linear layer")
                found |= zip(batch, zip(logits[:, 0].cpu(), h.cpu()))
        scores = torch.tensor([found[text][0] for text in texts])
        return scores, torch.stack([found[text][1] for text in texts]) if texts else torch.zeros(0, 1)

    def compare(self, prompts, firsts, seconds) -> list[int]:
        """Return +1 where the first completion scores over margin above the second, -1 below it, else 0.

        NaN where one of the two scores is NaN.
        """
        scores, margin = self.scores([*prompts, *prompts], [*firsts, *seconds]), self.margin
        pairs = zip(scores, scores[len(prompts) :])
        return [
            math.nan if math.isnan(a) or math.isnan(b) else (a - b > margin) - (b - a > margin)
            for a, b in pairs
        ]


class GenerativeJudge:
    """Ask a language model for a chain of thought on two completions, then Better, Tie or Worse [secondary].

    generate: prompts -> answers, in order. num_unreadable: answers without a verdict so far; they are ties.
    """

    def __init__(self, generate: Callable[[list[str]], list[str]], template: str = TEMPLATE):
        self.generate, self.template, self.num_unreadable = generate, template, 0

    def compare(self, prompts, firsts, seconds) -> list[int]:
        """Return +1 where an answer's last verdict finds the first completion better, -1 if worse, else 0."""
        questions = [
            self.template.format(prompt=prompt, first=first, second=second)
            for prompt, first, second in zip(prompts, firsts, seconds, strict=True)
        ]
        answers = self.generate(questions) if questions else []
        if len(answers) != len(questions):
            raise ValueError(f"the generative judge gave {len(answers)} answers to {len(questions)} prompts")
        found = [re.findall(r"(?<!\|)\b(Better|Tie|Worse)\b(?!\|)", answer) for answer in answers]  # no echo
        self.num_unreadable += found.count([])
        return [{"Better": 1, "Worse": -1}.get(words[-1], 0) if words else 0 for words in found]


def pairwise_reference(judge, prompts, completions, references) -> list[float]:
    """Return r_i = +1, 0 or -1: completion i is better than, as good as or worse than reference i [ours]."""
    return [float(sign) for sign in judge.compare(prompts, completions, references)]


def round_robin(judge, prompts, completions, group_index: list[int]) -> list[float]:
    """Return r_i, the mean over j != i in i's group of [better 1, tie 0.5, worse 0] [ours].

    A group of one gets 0.5. group_index: group of each completion, in any order. A pair i < j is asked once,
    i first, for both.
    """
    items = sorted(zip(group_index, range(len(prompts)), prompts, completions, strict=True))
    groups = [list(group) for _, group in itertools.groupby(items, key=operator.itemgetter(0))]
    pairs = [pair for group in groups for pair in itertools.combinations(group, 2)]
    signs = judge.compare([a[2] for a, _ in pairs], [a[3] for a, _ in pairs], [b[3] for _, b in pairs])
    points = [[] for _ in items]
    for (a, b), sign in zip(pairs, signs):
        points[a[1]].append((1 + sign) / 2)
        points[b[1]].append((1 - sign) / 2)
    return [sum(won) / len(won) if won else 0.5 for won in points]


def build_judge(
    kind: str,
    path: str | None,
    load_generate: Callable,
    batch_size: int = 32,
    max_tokens: int = 4096,
    margin: float = 0.0,
):
    """Load the judge in a folder, or the generative one "module:function"; ValueError says why it cannot be.

    kind: "scalar", "generative", or "none", which gives None. load_generate(path, batch_size, max_tokens)
    makes the function of a generative judge from the folder of a causal language model. margin: see
    ScalarJudge.
    """
    if kind == "none":
        return None
    if os.path.isfile(os.path.join(path, "config.json")):
        if kind == "scalar":
            return ScalarJudge(path, batch_size, max_tokens, margin)
        return GenerativeJudge(load_generate(path, batch_size, max_tokens))
    if kind == "scalar" or ":" not in path:
        raise ValueError(f"judge {path!r}: no folder with the config.json of a Hugging Face model")
    try:
        return GenerativeJudge(pkgutil.resolve_name(path))
    except Exception as error:  # whatever its import raises
        raise ValueError(f"cannot import the judge {path!r}: {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
