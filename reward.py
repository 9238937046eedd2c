r"""Score completions: `verify` in this process, `RewardPool` in worker processes that can be killed.

    verify("math", r"... so \boxed{\frac{1}{2}}", "0.5")     # Verdict(reward=1.0, status="ok")
    with RewardPool(num_workers=2) as pool:                  # scores completions while the engine generates
        pool.submit(key, "math", completion, answer)         # text or token ids, as soon as a completion ends
        pool.poll()                                          # once per engine step
        verdicts = pool.collect()                            # waits; {key: Verdict} in submit order

Why processes: computer algebra on model output can hang forever, exhaust the memory or crash, even in C code
that Python exceptions cannot interrupt. A worker that exceeds its limit is killed by the kernel, and the
completion gets status "timeout" or "error", which differs from "wrong". Workers run this file as a script,
because a trainer with a CUDA context and threads cannot fork safely. To start fast, this file must not import
torch (judges.py does).

Short rules are in this file; longer verifiers and the loader of custom functions are in verifiers/.

Reading order: verdicts and rules, the pool as the caller sees it, the worker process, checks before a run.
"""

import contextlib
import ctypes
import functools
import json
import operator
import os
import re
import resource
import secrets
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal

import verifiers.chain
import verifiers.math
import verifiers.tools
import verifiers.verdict
from settings import RewardSettings
from verifiers.kinds import RULE_KINDS, SLOW_KINDS, functions_of, parts_of
from verifiers.own import COMMON_ARGUMENTS, check_score, explain, load_function

# ------------------------------------------------------------------------------------------------------------
# 1 Verdicts: one rule per kind
# ------------------------------------------------------------------------------------------------------------

NUMERIC_RTOL = Decimal("1e-6")  # relative tolerance, unless both numbers are whole
FAILED = ("timeout", "error")


@dataclass(frozen=True)
class Verdict:
    """The verifier's score of one completion."""

    reward: float  # in [0, 1]; fractions are partly right
    status: str  # "ok" (reward 1) | "wrong" (less) | "no_answer" | "timeout" | "error"
    detail: str = ""  # reason of a timeout or error, at most 200 printable characters
    parts: dict[str, float] = field(default_factory=dict, hash=False)  # of a weighted sum: {kind: reward}

    @property
    def failed(self) -> bool:
        """Tell whether the verifier timed out or raised, so that the reward says nothing."""
        return self.status in FAILED


def score_of(verdict: Verdict, binary: bool) -> float:
    """Return the score in [0, 1] that enters the reward; binary: rewards below 1 count as 0."""
    return float(verdict.reward == 1) if binary else verdict.reward


def verify(kind: str, completion: str, answer: str, /, **fields) -> Verdict:
    r"""Score one completion against the reference answer, in this process and without a time limit.

    "exact"    the completion equals the answer, except for surrounding whitespace
    "characters"  fraction of characters that equal the answer's character at the same position
    "chain"    fraction of correct steps in the trace of a small machine (verifiers/chain.py)
    "verdict"  the last of Better, Tie and Worse equals the answer: trains a judge (verifiers/verdict.py)
    "numeric"  the last number equals the answer: exactly if both are whole, else within NUMERIC_RTOL
    "gsm8k"    the same for the first number after the last "####"; the answer may be a whole GSM8K solution
    "math"     the last \boxed{...} equals the answer according to math-verify (verifiers/math.py)
    "code", "instructions"  fraction of tests passed or constraints met (verifiers/code.py, instructions.py)
    "module:function", "path/file.py:function"  the score of a custom function (verifiers/own.py).
               Kinds from untrusted data must not get here: data.prompts.load_prompts refuses function names.
    "0.8*math + 0.2*rewards.py:brevity"  the weighted mean; the first kind decides the status

    fields: prompt, messages and the columns of the row, for custom functions and for code. Status "error"
    means that scoring raised an exception or that the reference answer cannot be parsed.
    Raises ValueError for an unknown kind, TypeError for a completion or an answer that is not a string.
    """
    _check(kind, completion, answer)
    verdict = _verify(kind, completion, answer, fields)
    if _is_async(kind):
        return _event_loop().run(verdict)
    try:
        verdict.send(None)  # synchronous kinds never wait, so the coroutine ends without an event loop
    except StopIteration as end:
        return end.value


async def _verify(kind: str, completion: str, answer: str, fields: dict) -> Verdict:
    verdicts = {term: await _verify_part(term, completion, answer, fields) for _, term in parts_of(kind)}
    if len(verdicts) == 1:
        return verdicts.popitem()[1]
    rewards = {term: verdict.reward for term, verdict in verdicts.items()}
    for term, verdict in verdicts.items():
        if verdict.failed:
            return Verdict(0.0, verdict.status, f"{term}: {verdict.detail}"[:200], rewards)
    weights = [weight for weight, _ in parts_of(kind)]
    mean = sum(map(operator.mul, weights, rewards.values())) / sum(weights)
    first = next(iter(verdicts.values()))
    return Verdict(mean, first.status, first.detail, rewards)


service = None  # this worker's: "tools" and "environment" return a text instead of a score
max_chars = 0  # of that text
_environments = verifiers.tools.Episodes()


async def _verify_part(kind: str, completion: str, answer: str, fields: dict) -> Verdict:
    try:
        if service == "tools":
            return Verdict(*await verifiers.tools.call_tool(load_function(kind), completion, max_chars))
        if service == "environment":
            return Verdict(*_environments.step(load_function(kind), completion, max_chars))
        if kind in RULES:
            return RULES[kind](completion, answer)
        if kind in _SLOW:
            return _SLOW[kind](completion, answer, fields)
        function = load_function(kind)
        result = function.call(**function.arguments({**fields, "completion": completion, "answer": answer}))
        score = check_score(await result if function.is_async else result)
        return Verdict(score, "ok" if score == 1 else "wrong")
    except Exception as error:  # untrusted text can raise anything, for example MemoryError or RecursionError
        return Verdict(0.0, "error", explain(error)[:200])


@functools.cache
def _event_loop():
    """Return the event loop of this process; a single loop lets HTTP clients keep connections open."""
    import asyncio

    return asyncio.Runner()


def _is_async(kind: str) -> bool:
    with contextlib.suppress(Exception):  # verify() reports why a function cannot be imported
        return any(load_function(name).is_async for name in functions_of(kind))
    return False


def _check(kind: str, completion: str | list[int], answer: str, types: tuple = (str,)) -> None:
    if not isinstance(kind, str):
        raise ValueError(f"unknown kind {kind!r}: a kind is a string, for example 'math'")
    parts_of(kind)
    if not (isinstance(completion, types) and isinstance(answer, str)):
        raise TypeError(f"completion and answer must be str, not {type(completion)} and {type(answer)}")


# ---- rules ----
def _equality(is_equal: bool) -> Verdict:
    return Verdict(1.0, "ok") if is_equal else Verdict(0.0, "wrong")


def _exact(completion: str, answer: str) -> Verdict:
    if not answer.strip():
        return Verdict(0.0, "error", "the reference answer is empty")
    if not completion.strip():
        return Verdict(0.0, "no_answer")
    return _equality(completion.strip() == answer.strip())


def _characters(completion: str, answer: str) -> Verdict:
    """Score matching characters / length of the longer text [ours]."""
    verdict = _exact(completion, answer)
    if verdict.status != "wrong":
        return verdict
    text = completion.strip()
    gold = answer.strip()
    return Verdict(sum(map(operator.eq, text, gold)) / max(len(text), len(gold)), "wrong")


# A minus is a sign unless it joins two terms, as in "3-5" or "x-5". Commas separate groups of three digits.
# Digits are ASCII. Exponents have at most the 17 digits that Decimal can hold. Matching takes linear time,
# because the pattern cannot backtrack.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z.)\]}])[-+\u2212\u2013])?\$?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,17}(?![0-9]))?"
)
_TO_PLAIN = str.maketrans("\u2212\u2013", "--", "$,")
_GROUPED = re.compile(r"(?<=[0-9])(?:\{,\}|\\!,|,\\!|\\,)(?=[0-9]{3})")  # LaTeX: 70{,}000
_DECIMAL = Context(prec=50, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])


def _compare_numbers(match: re.Match | None, answer: str) -> Verdict:
    gold_match = _NUMBER.fullmatch(answer.strip().strip("$% "))
    if gold_match is None:
        return Verdict(0.0, "error", f"the reference answer is not a number: {answer[:99]!r}"[:200])
    if match is None:
        return Verdict(0.0, "no_answer")
    number, gold = (Decimal(m[0].translate(_TO_PLAIN)) for m in (match, gold_match))  # exact
    if number == number.to_integral_value() and gold == gold.to_integral_value():
        return _equality(number == gold)
    tolerance = _DECIMAL.multiply(NUMERIC_RTOL, _DECIMAL.abs(gold))
    return _equality(_DECIMAL.abs(_DECIMAL.subtract(number, gold)) <= tolerance)


def _is_half_a_fraction(match: re.Match, text: str) -> bool:
    """Tell whether a slash joins a number to another one: 7 and 2 in 7/2."""
    before = text[: match.start()].rstrip()
    after = text[match.end() :].lstrip()
    return before[-1:] == "/" and before[-2:-1].isdigit() or after[:1] == "/" and after[1:2].isdigit()


def _numeric(completion: str, answer: str) -> Verdict:
    text = _GROUPED.sub(",", completion)
    last = deque(_NUMBER.finditer(text), maxlen=1)
    if last and _is_half_a_fraction(last[0], text):
        return Verdict(0.0, "wrong")
    return _compare_numbers(last[0] if last else None, answer)


def _gsm8k(completion: str, answer: str) -> Verdict:
    _, marker, tail = completion.rpartition("####")
    tail = _GROUPED.sub(",", tail)
    match = _NUMBER.search(tail) if marker else None
    if match and _is_half_a_fraction(match, tail):
        return Verdict(0.0, "wrong")
    return _compare_numbers(match, answer.rpartition("####")[2])


def _math(completion: str, answer: str) -> Verdict:
    return Verdict(*verifiers.math.verify(completion, answer))


def _chain(completion: str, answer: str) -> Verdict:
    return Verdict(*verifiers.chain.verify(completion, answer))


def _verdict(completion: str, answer: str) -> Verdict:
    return Verdict(*verifiers.verdict.verify(completion, answer))


code_limits: dict = {}  # limits of verifiers.code.verify; the pool sends the limits to each worker


def _code(completion: str, answer: str, fields: dict) -> Verdict:
    from verifiers import code

    return Verdict(*code.verify(completion, answer, **code_limits))


def _instructions(completion: str, answer: str, fields: dict) -> Verdict:
    from verifiers import instructions

    columns = {name: value for name, value in fields.items() if name not in COMMON_ARGUMENTS}
    return Verdict(*instructions.verify(completion, answer, **columns))


# Rules are fast and need only the completion and the answer. Slow kinds may run for seconds.
RULES = {
    "exact": _exact, "characters": _characters, "chain": _chain, "verdict": _verdict, "numeric": _numeric,
    "gsm8k": _gsm8k, "math": _math,
}  # fmt: skip
_SLOW = {"code": _code, "instructions": _instructions}
assert tuple(RULES) == RULE_KINDS and tuple(_SLOW) == SLOW_KINDS


# ------------------------------------------------------------------------------------------------------------
# 2 The pool, caller's side
# ------------------------------------------------------------------------------------------------------------

# Rules sent ahead to one worker. A larger window saves wake-ups on tiny items; a smaller window delays fewer
# items if one of the items hangs. Slow kinds, for example a sandbox or a custom function, are sent alone to a
# worker with an empty queue. Calls of `async def` functions are sent together, so that they wait in parallel.
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
MAX_DETAIL = 200  # characters of a Verdict's detail
OUT_OF_MEMORY = ("MemoryError", "failed to map segment", "annot allocate memory")  # parts of a detail
WORKER_DIED = "the worker died"


@dataclass(eq=False)
class _Item:
    """One completion on its way to a verdict."""

    key: Hashable
    kind: str
    completion: str | list[int]
    answer: str
    fields: dict
    num_limits: int = 1  # see RewardPool.submit
    is_timed: bool = True  # see RewardPool.submit
    submitted_at: float = field(default_factory=time.monotonic)
    # Replies must repeat this number, so that output of a custom function cannot pass as a verdict.
    number: str = field(default_factory=lambda: secrets.token_hex(8))
    is_suspect: bool = False  # a worker died while it ran this item with other items: run the item alone


@dataclass(eq=False)
class _Worker:
    """A worker process and the items sent to it. Lines are answered in order, so lines[0] is running."""

    process: subprocess.Popen
    lines: deque = field(default_factory=deque)  # {number: item} of the unanswered items of each line sent
    unwritten: bytearray = field(default_factory=bytearray)  # bytes that did not fit into the pipe so far
    unread: bytes = b""  # the beginning of an incomplete reply
    last_activity: float = field(
        default_factory=time.monotonic
    )  # time of the last reply, or of the last write
    imported_kinds: set = field(default_factory=set)
    is_exhausted: bool = False  # an item ran out of memory: replace the worker after the items sent to it

    def current(self) -> _Item | None:
        """Return the item that the worker is busy with; the first one if several run at once."""
        return next(iter(self.lines[0].values())) if self.lines else None

    def is_slow(self) -> bool:
        """Tell whether the worker is busy with a slow kind."""
        return bool(self.lines) and not _is_rule(self.current().kind)


@functools.cache
def _is_rule(kind: str) -> bool:
    return all(term in RULES for _, term in parts_of(kind))


class RewardPool(contextlib.AbstractContextManager):
    """Score completions in worker processes while the caller does other work.

    Each of the num_workers processes scores one item at a time (async functions: up to ASYNC_CALLS), within
    timeout_s seconds of wall-clock time and memory_bytes of address space. If a worker dies, the item that
    was running gets status "timeout" or "error", and a new worker scores the remaining items. Rules are sent
    before slow kinds. If max_backlog items are waiting, submit() blocks. Data is moved only inside submit(),
    poll() and collect(). A pool belongs to the thread that made it: Linux ends the workers with that thread.

    tokenizer: JSON of a tokenizer, with which workers decode token ids. env: environment variables that
    workers get in addition to KEPT_VARIABLES. log_path: file for the output of custom functions; None
    discards the output. code_limits: isolation, timeout_s and memory_bytes of verifiers.code.verify; the time
    limit for all tests of a program is added to timeout_s. A log above MAX_LOG_BYTES is renamed to NAME.1.

    service: "tools" or "environment": the kind is a tool or an environment, the completion is a request in
    JSON (verifiers/tools.py), and the detail of the Verdict is the result, a text of at most about max_chars
    characters.
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
        service: str | None = None,
        max_chars: int = 0,
    ):
        if num_workers < 1 or timeout_s <= 0 or max_backlog < 1:
            raise ValueError(f"reward pool: {num_workers=}, {timeout_s=} and {max_backlog=} must be positive")
        if missing := [name for name in env if name not in os.environ]:
            raise ValueError(f"reward.env: {', '.join(missing)} is not set; export it before the run")
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self.max_backlog = max_backlog
        self.env = tuple(env)
        self.log_path = log_path
        self.code_limits = code_limits or {}
        self.service = service
        self.max_chars = max_chars
        self.latencies: list[float] = []  # seconds from submit to verdict; the reader empties the list
        self.seconds: dict[str, float] = {}  # {kind: moving average of the seconds per item}
        self.num_timeouts = 0
        self.num_errors = 0
        self.num_restarts = 0  # workers replaced
        # {kind: {"fields": names or None for all, "required": names, "async": bool}}, set at the first use
        self.signatures: dict[str, dict] = {}
        set_aside_large_log(log_path)
        self._tokenizer = os.memfd_create("tokenizer") if tokenizer else None  # freed when this process ends
        if tokenizer:
            with open(os.dup(self._tokenizer), "w") as file:
                file.write(tokenizer)
        self._rules = deque()  # items that are not sent yet
        self._slow = deque()
        self._verdicts: dict[Hashable, Verdict | None] = {}  # in submit order; None while outstanding
        self._next_check = 0.0  # time.monotonic() of the next check of all workers, silent ones included
        self._workers = [self._start() for _ in range(num_workers)]

    def at_once(self, kind: str) -> int:
        """Return the number of items of a kind that the workers can score at the same time."""
        is_async = self.signatures.get(kind, {}).get("async")
        return len(self._workers) * (ASYNC_CALLS if is_async else 1)

    def submit(
        self,
        key: Hashable,
        kind: str,
        completion: str | list[int],
        answer: str,
        fields: dict | None = None,
        num_limits: int = 1,
        is_timed: bool = True,
    ) -> None:
        """Queue one item; blocks only if the backlog is full. `key` must be new since the last collect().

        A completion may be a list of token ids if the pool has a tokenizer; special tokens are dropped.
        fields: {name: JSON value} of prompt, messages and columns; a worker gets the fields that its kind
        takes. num_limits: how often the worker may start the time limit anew, for steps of an environment.
        is_timed: the item counts in `seconds`, the mean of its kind.
        """
        _check(kind, completion, answer, (str, list))
        if not self._workers:
            raise ValueError("the pool is closed")
        if key in self._verdicts:
            raise ValueError(f"key {key!r} is already submitted: collect() first")
        if isinstance(completion, list) and self._tokenizer is None:
            raise ValueError("token ids need a pool with a tokenizer; pass tokenizer= or text")
        while self.poll() >= self.max_backlog:
            self._ready(1000)
        self._verdicts[key] = None
        queue = self._rules if _is_rule(kind) else self._slow
        queue.append(_Item(key, kind, completion, answer, fields or {}, num_limits, is_timed))
        self._send()

    def poll(self) -> int:
        """Write and read pipes without waiting; return the number of items that still lack a verdict."""
        workers = self._ready(0)
        if time.monotonic() >= self._next_check:  # also finds workers that died with their pipe still open
            self._next_check = time.monotonic() + LOOK_S
            self._send()  # first, so that a worker with unwritten bytes does not count as silent
            workers = list(self._workers)
        for worker in workers:
            self._receive(worker)
        self._send()
        num_sent = sum(len(line) for worker in self._workers for line in worker.lines)
        return len(self._rules) + len(self._slow) + num_sent

    def collect(self) -> dict[Hashable, Verdict]:
        """Wait for all items since the last collect(); return {key: Verdict} in submit order."""
        while self.poll():
            self._ready(1000)
        verdicts = self._verdicts
        self._verdicts = {}
        return verdicts

    def take(self) -> dict:
        """Return {key: Verdict} of the verdicts that have arrived since the last call, without waiting."""
        self.poll()
        arrived = {key: verdict for key, verdict in self._verdicts.items() if verdict is not None}
        for key in arrived:
            del self._verdicts[key]
        return arrived

    def describe(self) -> str:
        """Describe the outstanding work in a log line, for example for the watchdog's thread."""
        items = [item for worker in list(self._workers) if (item := worker.current()) is not None]
        kinds = ", ".join(dict.fromkeys(item.kind for item in items))
        num_waiting = sum(verdict is None for verdict in list(self._verdicts.values()))
        return f"{num_waiting} verdicts awaited" + (f", workers are busy with {kinds}" if items else "")

    def close(self) -> None:
        """Kill the workers and drop all outstanding items."""
        while self._workers:
            _stop(self._workers.pop().process)
        if self._tokenizer is not None:
            os.close(self._tokenizer)
            self._tokenizer = None
        self._rules.clear()
        self._slow.clear()
        self._verdicts = {}

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _ready(self, wait_ms: int) -> list[_Worker]:
        """Wait until a pipe can be read or written; return the workers that have output."""
        poller = select.poll()  # select.select() refuses file descriptors above 1023
        readers = {}
        for worker in self._workers:
            readers[worker.process.stdout.fileno()] = worker
            poller.register(worker.process.stdout, select.POLLIN)
            if worker.unwritten:
                poller.register(worker.process.stdin, select.POLLOUT)
        return [readers[pipe] for pipe, _ in poller.poll(wait_ms) if pipe in readers]

    def _start(self) -> _Worker:
        # LD_PRELOAD and PYTHON* switches are not inherited. The hash seed can change sympy's order of terms.
        names = (*KEPT_VARIABLES, *self.env)
        env = {name: os.environ[name] for name in names if name in os.environ} | {"PYTHONHASHSEED": "0"}
        inherited = [] if self._tokenizer is None else [self._tokenizer]
        options = {
            "memory_bytes": self.memory_bytes,
            "tokenizer": self._tokenizer,
            "code": self.code_limits,
            "service": [self.service, self.max_chars],
            "parent": os.getpid(),
        }
        with open(self.log_path or os.devnull, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-u", __file__, "--worker", json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=env,
                pass_fds=inherited,
                start_new_session=True,  # one process group for the worker and its children
            )
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)
        return _Worker(process)

    def _send(self) -> None:
        """Assign queued items to the least loaded workers, and write as much as the pipes take."""
        while self._rules or self._slow:
            worker = min(self._workers, key=_load)
            if _load(worker) >= (WINDOW if self._rules else 1):
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
        if self._rules:
            return [self._rules.popleft()]
        items = [self._slow.popleft()]
        if self._can_share(items[0]):
            while self._slow and self._can_share(self._slow[0]) and len(items) < ASYNC_CALLS:
                items.append(self._slow.popleft())
        return items

    def _can_share(self, item: _Item) -> bool:
        """Tell whether an item may run in a worker together with other items."""
        return bool(self.signatures.get(item.kind, {}).get("async")) and not item.is_suspect

    def _line(self, items: list[_Item]) -> bytes:
        """Encode items for a worker, with the fields that each kind takes."""
        rows = []
        for item in items:
            names = [] if _is_rule(item.kind) else self.signatures.get(item.kind, {}).get("fields")
            fields = {n: v for n, v in item.fields.items() if names is None or n in names}
            rows.append([item.number, item.kind, item.completion, item.answer, fields])
        # ASCII JSON escapes newlines, null bytes and lone surrogates, and so preserves any text.
        return json.dumps([self._limit_s(items), rows]).encode() + b"\n"

    def _limit_s(self, items: Iterable[_Item]) -> float:
        """Return the time limit of items that are sent in one line."""
        if not any(term == "code" for item in items for _, term in parts_of(item.kind)):
            return self.timeout_s
        from verifiers.code import TOTAL_LIMITS

        return self.timeout_s + TOTAL_LIMITS * self.code_limits.get("timeout_s", 0.0)

    def _receive(self, worker: _Worker) -> None:
        """Record the replies of a worker; replace it if it died, hangs or wrote an invalid reply."""
        # Checked before reading: the last replies of a worker that has ended are still in the pipe.
        has_ended = _has_ended(worker.process)
        is_invalid = False
        data = None
        try:
            while data := os.read(worker.process.stdout.fileno(), 1 << 16):
                *replies, worker.unread = (worker.unread + data).split(b"\n")
                for reply in replies:
                    worker.is_exhausted |= self._book(worker, json.loads(reply))
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

    def _is_silent(self, worker: _Worker) -> bool:
        """Tell whether a worker has exceeded the limit of its item and the grace period."""
        item = worker.current()
        if item is None:
            return False
        grace = GRACE_S if item.kind in worker.imported_kinds else START_GRACE_S
        limit = self._limit_s(worker.lines[0].values()) * item.num_limits
        return time.monotonic() > worker.last_activity + limit + grace

    def _book(self, worker: _Worker, reply: list) -> bool:
        """Record one reply: [number, signature of the kind] or [number, *fields of a Verdict, seconds].

        Returns whether the worker ran out of memory.
        """
        number, *values = reply
        line = worker.lines[0]
        if isinstance(values[0], dict):
            kind = line[number].kind
            self.signatures[kind] = values[0]
            worker.imported_kinds.add(kind)
            return False
        *values, seconds = values
        item = line.pop(number)
        if not line:
            worker.lines.popleft()
        if item.is_timed:
            self._add_seconds(item.kind, seconds)
        verdict = Verdict(*values)
        note = self.memory_note(verdict)
        is_out_of_memory = verdict.status == "error" and "MemoryError" in verdict.detail
        if note and self.service != "tools":  # the policy reads the details of tools
            verdict = replace(verdict, detail=verdict.detail[: MAX_DETAIL - len(note)] + note)
        self._finish(item, verdict)
        return is_out_of_memory

    def memory_note(self, verdict: Verdict) -> str:
        """Return the end of an error that the limit of memory has caused, which names the setting, or ""."""
        if verdict.status != "error" or not any(sign in verdict.detail for sign in OUT_OF_MEMORY):
            return ""
        return f"; workers have {self.memory_bytes / 2**30:g} GiB of address space (reward.memory_gib)"

    def _add_seconds(self, kind: str, seconds: float) -> None:
        self.seconds[kind] = 0.95 * self.seconds.get(kind, seconds) + 0.05 * seconds

    def _finish(self, item: _Item, verdict: Verdict) -> None:
        self._verdicts[item.key] = verdict
        self.latencies.append(time.monotonic() - item.submitted_at)
        self.num_timeouts += verdict.status == "timeout"
        self.num_errors += verdict.status == "error"

    def _replace(self, worker: _Worker, is_silent: bool, is_invalid: bool) -> None:
        """Replace a worker. The item that it was scoring gets a verdict, all other items are requeued.

        If the old worker was busy with several async calls, the culprit is unknown, so each call is retried
        alone.
        """
        status = _stop(worker.process)
        self._workers[self._workers.index(worker)] = self._start()
        self.num_restarts += 1
        lines = [list(line.values()) for line in worker.lines]
        for item in reversed(sum(lines[1:], [])):
            self._rules.appendleft(item)  # only rules are sent ahead
        if lines and len(lines[0]) > 1:
            for item in reversed(lines[0]):
                item.is_suspect = True
                self._slow.appendleft(item)
        elif lines:
            (item,) = lines[0]
            is_ready = item.kind in worker.imported_kinds
            self._finish(item, self._verdict_of_death(item, status, is_ready, is_silent, is_invalid))

    def _verdict_of_death(
        self, item: _Item, status: int, is_ready: bool, is_silent: bool, is_invalid: bool
    ) -> Verdict:
        """Return the verdict of the item that a worker with this exit status was busy with."""
        log = f"; see {self.log_path}" if self.log_path else ""
        if is_invalid:
            return Verdict(
                0.0,
                "error",
                "the function wrote to the worker's pipe of verdicts, which only the worker may use",
            )
        if is_silent and not is_ready:
            return Verdict(0.0, "timeout", f"the worker was not ready after {START_GRACE_S:g} s{log}")
        if is_silent or status == -signal.SIGALRM:
            limit = self._limit_s([item])
            self._add_seconds(item.kind, limit)
            return Verdict(0.0, "timeout", f"killed after the limit of {limit:g} s")
        return Verdict(0.0, "error", f"{WORKER_DIED} with exit status {status}{log}")


def _load(worker: _Worker) -> int:
    """Return the number of lines that a worker is busy with; WINDOW if the worker takes no further line."""
    return WINDOW if worker.is_slow() or worker.is_exhausted else len(worker.lines)


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


def start_pool(
    settings: RewardSettings, tokenizer, log_path: str | os.PathLike | None = None, num_workers: int = 0
) -> RewardPool:
    """Start the reward workers of this rank; num_workers overrides reward.num_workers unless 0."""
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
    """Return a tokenizer's Rust tokenizer as JSON, for workers.

    Raises ValueError if transformers changes the text after the Rust tokenizer has decoded it, for example
    WordPiece tokenizers, which clean up spaces.
    """
    rust_tokenizer = getattr(tokenizer, "backend_tokenizer", None)
    is_bpe = type(getattr(rust_tokenizer, "model", None)).__name__ == "BPE"
    if rust_tokenizer is None or (tokenizer.clean_up_tokenization_spaces and not is_bpe):
        raise ValueError(
            "reward.decode=workers: this tokenizer cannot be sent to workers, because transformers changes "
            "its text after decoding; set reward.decode=engine"
        )
    return rust_tokenizer.to_str()


# ------------------------------------------------------------------------------------------------------------
# 3 The pool, worker's side
# ------------------------------------------------------------------------------------------------------------
def main() -> None:
    """Run a worker: read lines of items from stdin, write replies to stdout.

    request  [limit in seconds, [[number, kind, completion, answer, fields], ...]]
    replies  [number, *fields of a Verdict, seconds] per item; before the first item of a kind also
             [number, signature], as soon as the libraries of the kind are imported
    """
    options = json.loads(sys.argv[2])  # reward.py --worker OPTIONS
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _fork_worker(options["parent"])
    resource.setrlimit(resource.RLIMIT_AS, (options["memory_bytes"], options["memory_bytes"]))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # kills; the caller may have ignored or blocked the signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    requests = os.dup(0)
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # print() of custom functions goes to the log instead of the replies
    sys.path.append(os.getcwd())  # for modules in the working directory; sys.path starts with this folder
    code_limits.update(options["code"])
    verifiers.tools.code_limits.update(options["code"])
    global service, max_chars
    service, max_chars = options["service"]
    decode = _decoder(options["tokenizer"])

    def reply(*values) -> None:
        os.write(replies, json.dumps(values).encode() + b"\n")

    prepared_kinds = set()
    for line in os.fdopen(requests, "rb"):  # ends when the parent closes the pipe or dies
        limit_s, items = json.loads(line)
        for number, kind, *_ in items:
            if kind not in prepared_kinds:
                prepared_kinds.add(kind)
                reply(number, _prepare(kind))
        items = [[number, kind, decode(completion), *rest] for number, kind, completion, *rest in items]
        if _is_async(items[0][1]):
            signal.setitimer(signal.ITIMER_REAL, limit_s + 2.0)  # for a function that blocks the event loop
            _event_loop().run(_answer_together(items, limit_s, reply))
            signal.setitimer(signal.ITIMER_REAL, 0)
        else:
            (item,) = items
            _answer(*item, limit_s, reply)


def _answer(
    number: str, kind: str, completion: str, answer: str, fields: dict, limit_s: float, reply: Callable
) -> None:
    """Score one item; the timer kills the worker at the limit."""
    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    verdict = verify(kind, completion, answer, **fields)
    signal.setitimer(signal.ITIMER_REAL, 0)
    reply(number, *astuple(verdict), time.monotonic() - start)


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
    statuses = {}
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
    statuses = {}
    with contextlib.suppress(ChildProcessError):  # all children have ended
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            statuses |= [child]
    return statuses


def _end_children() -> dict[int, int]:
    """Kill descendants of this process until all have ended; return {process id: status} of the children."""
    import psutil

    statuses = {}
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        time.sleep(0.002)
        statuses |= _reap()
    return statuses


async def _answer_together(items: list[list], limit_s: float, reply: Callable) -> None:
    """Run async functions in parallel, and send each reply as soon as a function returns."""
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
    """Import the libraries of a kind outside of the time limit; return the signature of its functions.

    Failed imports are ignored here, because verify() reports the error.
    """
    signature = {"fields": None, "required": [], "async": False}
    with contextlib.suppress(Exception):
        for _, term in parts_of(kind):
            if term == "math":
                verifiers.math.load_library()
        functions = [load_function(name) for name in functions_of(kind)]
        signature["required"] = [name for function in functions for name in function.required]
        is_slow = any(term in _SLOW for _, term in parts_of(kind))  # slow kinds would block the event loop
        signature["async"] = any(function.is_async for function in functions) and not is_slow
        fields = [function.fields() for function in functions]
        if None not in fields and not is_slow:
            signature["fields"] = sorted(set(sum(fields, [])))
    return signature


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


# ------------------------------------------------------------------------------------------------------------
# 4 Checks before a run: every reference answer can be right, every custom function works
# ------------------------------------------------------------------------------------------------------------
Row = tuple[str, str, dict]  # kind, reference answer, fields


def impossible_references(
    pool: RewardPool, rows: Sequence[Row], warn: Callable[[str], object] = print
) -> dict[int, str]:
    r"""Return {index: reason} of the rows whose reference answer cannot be right by its own rule.

    Every completion of such a prompt would be wrong or an error, for example if a numeric answer is "five".
    Each rule has to accept the reference answer, written as a completion would write it, for example in
    \boxed{}. Constraints and tests only have to be readable. All terms of a weighted sum are checked.

    A timeout or a dead worker says nothing about an answer, for example on a busy machine. An answer that
    ends so is checked once more, alone. If the second check fails in the same way, the rows are not in the
    result, so that no prompt is lost, and warn() gets one line with the reason.
    """
    reasons = {}
    indices_of = {}  # {(kind, answer, fields if the kind reads fields): indices of rows}
    for index, (kind, answer, fields) in enumerate(rows):
        for _, term in parts_of(kind):
            if term == "code":
                from verifiers.code import read_tests

                try:
                    read_tests(answer, "")
                except Exception as error:  # broken data can raise anything
                    reasons[index] = f"{answer[:80]!r}: error: {explain(error)}"
            if term in RULES:
                indices_of.setdefault((term, answer, ""), []).append(index)
            elif term == "instructions":
                indices_of.setdefault((term, answer, json.dumps(fields, default=str)), []).append(index)
    fields_of = {key: {} if key[0] in RULES else rows[of_key[0]][2] for key, of_key in indices_of.items()}
    verdicts = _check_references(pool, fields_of)
    undecided = {key: verdict for key, verdict in verdicts.items() if _is_undecided(verdict)}
    if undecided:
        (term, answer, _), verdict = next(iter(undecided.items()))
        num_rows = sum(len(indices_of[key]) for key in undecided)
        warn(
            f"{num_rows} reference answers could not be checked, and their prompts stay; the first, "
            f"{answer[:80]!r} of kind {term}, failed twice: {verdict.detail}. If their verdicts fail in the "
            "run as well, raise reward.timeout_s or reward.memory_gib"
        )
    for key, verdict in verdicts.items():
        term, answer, _ = key
        if key not in undecided and (verdict.failed or (verdict.status != "ok" and term in RULES)):
            reason = verdict.detail or f"{term} does not accept the reference answer as a completion"
            reasons |= dict.fromkeys(indices_of[key], f"{answer[:80]!r}: {verdict.status}: {reason}")
    pool.latencies = []  # only latencies of training are reported
    return dict(sorted(reasons.items()))


def _check_references(pool: RewardPool, fields_of: dict[tuple[str, str, str], dict]) -> dict:
    """Return {(kind, answer, ...): Verdict} of reference answers as completions; see impossible_references().

    fields_of: {(kind, answer, ...): fields}.
    """

    def submit(key: tuple[str, str, str]) -> None:
        term, answer, _ = key
        completion = {"math": rf"\boxed{{{answer}}}", "gsm8k": f"#### {answer.rpartition('####')[2]}"}
        pool.submit(key, term, completion.get(term, answer), answer, fields_of[key])

    for key in fields_of:
        submit(key)
    verdicts = pool.collect()
    for key in [key for key, verdict in verdicts.items() if _is_undecided(verdict)]:
        submit(key)
        verdicts |= pool.collect()  # before the next one, so that each is alone
    return verdicts


def _is_undecided(verdict: Verdict) -> bool:
    """Tell whether a check failed because of a worker or a limit, and may succeed at another time."""
    died = verdict.status == "error" and any(s in verdict.detail for s in (WORKER_DIED, *OUT_OF_MEMORY))
    return verdict.status == "timeout" or died


def check_functions(kinds: Iterable[str], rows: Sequence[Row], settings: RewardSettings) -> list[str]:
    """Call each custom function of the kinds and rows once in a worker; ValueError names a broken function.

    A function is called with the first row of its kind, or else with the first row of all, and with the
    reference answer as the completion. All rows of its kind must have the columns that it requires. Returns a
    line with the score of each function, for the console. If a kind runs programs, the sandbox is started.
    """
    kinds = dict.fromkeys([*kinds, *(kind for kind, _, _ in rows)])
    first_row = {kind: row for kind, *row in reversed(rows)}
    kind_of = {name: kind for kind in reversed(kinds) for name in functions_of(kind)}
    if any(term == "code" for kind in kinds for _, term in parts_of(kind)):
        from verifiers.sandbox import check_sandbox

        check_sandbox(settings.sandbox)
    if not kind_of:
        return []
    if not rows:
        raise ValueError("there are no prompts to try the reward functions on: are the datasets empty?")
    with start_pool(settings, None, num_workers=1) as pool:
        for name, kind in kind_of.items():
            answer, fields = first_row.get(kind, rows[0][1:])
            pool.submit(name, name, answer, answer, fields)
        verdicts = pool.collect()
    for name, verdict in verdicts.items():
        answer, _ = first_row.get(kind_of[name], rows[0][1:])
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
                    f"reward function {name}: its parameter {min(missing)} is not a column of prompt "
                    f"{index + 1} of {len(rows)}, {str(fields.get('prompt'))[:80]!r}"
                )
    return [f"{name} gives the first reference answer {v.reward:.2f}" for name, v in verdicts.items()]


if __name__ == "__main__":
    main()
