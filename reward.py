r"""Completion text -> verdict, in this process (`verify`) or in killable child processes (`RewardPool`).

    verify("math", r"... so \boxed{\frac{1}{2}}", "0.5")       # Verdict(reward=1.0, status="ok")
    with RewardPool(num_workers=2) as pool:                  # scores while the caller generates
        pool.submit(key, "math", completion, answer)         # as soon as a completion is finished
        pool.poll()                                          # once per engine step
        verdicts = pool.collect()                            # waits; {key: Verdict} in submit order

Computer algebra on model output can hang for ever, eat all memory or crash, also inside C code that no Python
exception reaches. So the kernel kills the child at the time limit, and "timeout" and "error" stay apart from
"wrong". The child is this file run as a script: the caller has a CUDA context and threads, is unsafe to fork
and expensive to import again.
"""
import contextlib
import difflib
import functools
import json
import logging
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal

# ---- 1. Verdicts: one matcher per kind ---------------------------------------------------------------------

NUMERIC_RTOL = Decimal("1e-6")  # relative, for numbers that are not both whole
# math-verify's regular expressions and parser are quadratic and worse: 4,096 nested braces cost it 10 s. The
# longest reference answer of MATH-500 has 53 characters.
MAX_PARSED_CHARS = 4096


@dataclass(frozen=True)
class Verdict:
    reward: float  # in [0, 1]; 0 unless status is "ok"
    status: str  # "ok" | "wrong" | "no_answer" | "timeout" | "error"
    detail: str = ""  # the reason of a timeout or an error, at most 200 characters


def verify(kind: str, completion: str, answer: str) -> Verdict:
    r"""Scores one completion against the reference answer, in this process and without a time limit.

    "exact"    the whole completion equals the answer, surrounding whitespace aside
    "numeric"  the last number of the completion equals the answer: exactly if both are whole, else within
               NUMERIC_RTOL of the answer
    "gsm8k"    the same for the first number after the last "####"; the answer is a number or a GSM8K solution
    "math"     math-verify finds the last \boxed{...} equal to the answer, which is LaTeX or a number; without
               a box, the last expression that it finds in the last MAX_PARSED_CHARS characters

    An exception while scoring and a reference answer that cannot be read give status "error".
    Raises ValueError for an unknown kind, TypeError for a completion or an answer that is not a string.
    """
    _check(kind, completion, answer)
    try:
        return _MATCHERS[kind](completion, answer)
    except Exception as error:  # untrusted text; MemoryError and RecursionError are among them
        return _error(f"{type(error).__name__}: {error}")


def _check(kind: str, completion: str, answer: str) -> None:
    if kind not in KINDS:
        nearest = difflib.get_close_matches(str(kind), KINDS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown reward kind {kind!r}: did you mean {nearest!r}? Kinds: {', '.join(KINDS)}")
    if not (isinstance(completion, str) and isinstance(answer, str)):
        raise TypeError(f"completion and answer must be str, not {type(completion)} and {type(answer)}")


def _error(detail: str) -> Verdict:
    return Verdict(0.0, "error", detail[:200])


def _compared(equal: bool) -> Verdict:
    return Verdict(1.0, "ok") if equal else Verdict(0.0, "wrong")


def _exact(completion: str, answer: str) -> Verdict:
    if not answer.strip():
        return _error("the reference answer is empty")
    if not completion.strip():
        return Verdict(0.0, "no_answer")
    return _compared(completion.strip() == answer.strip())


# A minus counts unless it joins two terms, as in "3-5" or "x-5"; commas count in groups of three only; digits
# are ASCII; an exponent has at most the 17 digits that Decimal can hold. Nothing can backtrack: linear time.
_NUMBER = re.compile(
    r"(?P<sign>(?<![0-9A-Za-z.)\]}])[-+\u2212])?\$?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?P<exponent>[eE][-+]?[0-9]{1,17}(?![0-9]))?"
)
_DECIMAL = Context(prec=50, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])


def _to_decimal(match: re.Match) -> Decimal:
    sign = "-" if match["sign"] in ("-", "\u2212") else ""
    return Decimal(sign + match["digits"].replace(",", "") + (match["exponent"] or ""))  # exact, linear time


def _compare_numbers(match: re.Match | None, answer: str) -> Verdict:
    gold_match = _NUMBER.fullmatch(answer.strip().strip("$% "))
    if gold_match is None:
        return _error(f"the reference answer is not a number: {answer[:100]!r}")
    if match is None:
        return Verdict(0.0, "no_answer")
    found, gold = _to_decimal(match), _to_decimal(gold_match)
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


def _last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} or \\fbox{...} whose braces close, in one pass; None without one."""
    content, open_braces = None, []  # per open brace: where its box's content starts, None for other braces
    for match in re.finditer(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]", text):
        token = match.group()
        if token == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None:
                content = text[start:match.start()]
        elif token not in (r"\{", r"\}"):
            open_braces.append(None if token == "{" else match.end())
    return content


def _math_verify():
    # Imported when first used: it takes 0.4 s. It logs that its own time limits are off. They use signal.alarm,
    # which works in a main thread only and does not stop C code; the pool's limit replaces them.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    import math_verify
    return math_verify


@functools.lru_cache(maxsize=256)  # the completions of a group share their reference answer
def _parse_box(content: str) -> list:
    """[expression, normalised text] of a boxed answer; [text] if it is no mathematics; [] if it is empty."""
    library = _math_verify()
    # LaTeX only, else it picks a number out of a box that it cannot parse: 10 from \boxed{7^{7^7} \bmod 10}.
    return library.parse(r"\boxed{" + content.strip().rstrip(".") + "}", [library.LatexExtractionConfig()],
                         parsing_timeout=None, raise_on_error=True)


def _math(completion: str, answer: str) -> Verdict:
    gold = _parse_box(answer)
    if not gold or isinstance(gold[0], str):
        return _error(f"math-verify cannot parse the reference answer {answer[:100]!r}")
    content = _last_boxed(completion)
    if content is None:
        tail = completion[-MAX_PARSED_CHARS:]
        if len(tail) < len(completion):  # drop the word that was cut: half a number is another number
            tail = "".join(tail.split(maxsplit=1)[1:])
        found = _math_verify().parse(tail, parsing_timeout=None, raise_on_error=True)
    elif len(content) <= MAX_PARSED_CHARS:
        found = _parse_box(content)
    else:
        return Verdict(0.0, "wrong")
    if not found:
        return Verdict(0.0, "no_answer")
    return _compared(_math_verify().verify(gold, found, timeout_seconds=None, raise_on_error=True))


_MATCHERS = {"exact": _exact, "numeric": _numeric, "gsm8k": _gsm8k, "math": _math}
KINDS: tuple[str, ...] = tuple(_MATCHERS)

# ---- 2. The pool: the caller's side ------------------------------------------------------------------------

# Items sent ahead to one worker. More saves wake-ups on tiny items; fewer strand less work behind a slow one.
WINDOW = 16
# The child's own timer ends every item. A worker still silent this long after it is stopped, swapped out or
# starting up on a very slow file system, and gets killed.
GRACE_S = 120.0


@dataclass(eq=False)
class _Worker:
    """One child and what is on its way to it. It answers in order, so it is busy with sent[0]."""
    process: subprocess.Popen
    sent: deque = field(default_factory=deque)  # items without a reply
    unwritten: bytearray = field(default_factory=bytearray)  # what the pipe to the child has not yet taken
    unread: bytes = b""  # the beginning of a reply
    alive_at: float = field(default_factory=time.monotonic)  # the last reply, or the last bytes taken


class RewardPool:
    """Scores completions in child processes while the caller goes on. To be used from one thread.

    num_workers child processes score one item at a time each, for at most timeout_s wall-clock seconds and
    with at most memory_bytes of address space. A child that dies costs the item it was busy with its verdict
    ("timeout" or "error"); the other items go to a fresh one. Bytes move inside submit, poll and collect only.
    """

    def __init__(self, num_workers: int = 1, timeout_s: float = 10.0, memory_bytes: int = 2 << 30):
        if num_workers < 1 or timeout_s <= 0:
            raise ValueError(f"num_workers={num_workers} and timeout_s={timeout_s} must be positive")
        self.timeout_s, self.memory_bytes = timeout_s, memory_bytes
        self.num_timeouts = self.num_errors = 0  # verdicts with that status
        self.num_restarts = 0  # workers replaced
        self._queue = deque()  # items not yet sent: (key, kind, completion, answer)
        self._verdicts: dict[Hashable, Verdict | None] = {}  # in submit order; None while outstanding
        self._workers = [self._start() for _ in range(num_workers)]

    def submit(self, key: Hashable, kind: str, completion: str, answer: str) -> None:
        """Hands over one item and returns at once. `key` must be new since the last collect."""
        _check(kind, completion, answer)
        if not self._workers:
            raise ValueError("the pool is closed")
        if key in self._verdicts:
            raise ValueError(f"key {key!r} was submitted before and is not yet collected")
        self._verdicts[key] = None
        self._queue.append((key, kind, completion, answer))
        self._send()

    def poll(self) -> int:
        """Moves what the pipes take and hold, without waiting; the number of items still without verdict."""
        for worker in list(self._workers):
            self._receive(worker)
        self._send()
        return len(self._queue) + sum(len(worker.sent) for worker in self._workers)

    def collect(self) -> dict[Hashable, Verdict]:
        """Waits for all items submitted since the last collect; their verdicts, in submit order."""
        while self.poll():
            poller = select.poll()  # select.select refuses file descriptors above 1023
            for worker in self._workers:
                poller.register(worker.process.stdout, select.POLLIN)
                if worker.unwritten:
                    poller.register(worker.process.stdin, select.POLLOUT)
            poller.poll(1000)  # ms, then look for silent workers
        verdicts, self._verdicts = self._verdicts, {}
        return verdicts

    def close(self) -> None:
        """Kills the workers; items without verdict are dropped."""
        while self._workers:
            _stop(self._workers.pop().process)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _start(self) -> _Worker:
        # No LD_PRELOAD and no PYTHON* switches of the caller; a fixed hash seed, because sympy's order of terms
        # can follow hashes.
        keep = ("PATH", "HOME", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH")
        env = {name: os.environ[name] for name in keep if name in os.environ} | {"PYTHONHASHSEED": "0"}
        command = [sys.executable, os.path.abspath(__file__)]
        command += ["--worker", str(self.timeout_s), str(self.memory_bytes)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=env)
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        return _Worker(process)

    def _send(self) -> None:
        """Gives queued items to the least loaded workers and writes what the pipes take."""
        while self._queue:
            worker = min(self._workers, key=lambda worker: len(worker.sent))
            if len(worker.sent) >= WINDOW:
                break
            if not worker.sent:
                worker.alive_at = time.monotonic()
            worker.sent.append(self._queue.popleft())
            # ASCII JSON: newlines, null bytes and lone surrogates are escaped and come out as they were.
            worker.unwritten += json.dumps(worker.sent[-1][1:]).encode("ascii") + b"\n"
        for worker in self._workers:
            # A full pipe is for the next call; a dead child shows in _receive, as the end of its replies.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                while worker.unwritten:
                    del worker.unwritten[:os.write(worker.process.stdin.fileno(), worker.unwritten)]
                    worker.alive_at = time.monotonic()

    def _receive(self, worker: _Worker) -> None:
        """Books the replies of a worker; replaces it if it has died or gone silent."""
        data = None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(worker.process.stdout.fileno(), 1 << 16):
                *replies, worker.unread = (worker.unread + data).split(b"\n")
                for reply in replies:
                    self._book(worker.sent.popleft(), Verdict(*json.loads(reply)))
                worker.alive_at = time.monotonic()
        if data == b"":
            status = _stop(worker.process)
            loss = (Verdict(0.0, "timeout", f"killed after {self.timeout_s:g} s") if status == -signal.SIGALRM
                    else _error(f"the worker died with exit status {status}"))
        elif worker.sent and time.monotonic() > worker.alive_at + self.timeout_s + GRACE_S:
            _stop(worker.process)
            loss = Verdict(0.0, "timeout", f"the worker was silent until {GRACE_S:g} s past the limit")
        else:
            return
        self._workers[self._workers.index(worker)] = self._start()
        self.num_restarts += 1
        if worker.sent:
            self._book(worker.sent.popleft(), loss)
            self._queue.extendleft(reversed(worker.sent))

    def _book(self, item: tuple, verdict: Verdict) -> None:
        self._verdicts[item[0]] = verdict
        self.num_timeouts += verdict.status == "timeout"
        self.num_errors += verdict.status == "error"


def _stop(process: subprocess.Popen) -> int:
    """Kills a child, if it still lives, and returns its exit status: minus the signal that ended it."""
    process.kill()
    process.stdin.close()
    process.stdout.close()
    return process.wait()


# ---- 3. The pool: the child's side -------------------------------------------------------------------------

def _lines(fd: int) -> Iterator[bytes]:
    """Lines of a pipe, to its end or the parent's: other children of the parent may hold the pipe open."""
    parent, rest = os.getppid(), b""
    while os.getppid() == parent:
        if not select.select([fd], [], [], 5.0)[0]:
            continue
        data = os.read(fd, 1 << 20)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def main() -> None:
    """Answers each line [kind, completion, answer] on stdin by a line [reward, status, detail] on stdout."""
    _, _, timeout_s, memory_bytes = sys.argv  # reward.py --worker TIMEOUT_S MEMORY_BYTES
    requests, replies, null = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)  # whatever a library prints stays out of the replies
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    # The kernel's default for an alarm is to kill. A caller may have left it ignored or blocked.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    for line in _lines(requests):
        kind, completion, answer = json.loads(line)
        if kind == "math":  # a slow import is not the item's fault; verify reports one that fails
            with contextlib.suppress(Exception):
                _math_verify()
        signal.setitimer(signal.ITIMER_REAL, float(timeout_s))
        verdict = verify(kind, completion, answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply = json.dumps([verdict.reward, verdict.status, verdict.detail])
        os.write(replies, reply.encode("ascii") + b"\n")


if __name__ == "__main__":
    main()
