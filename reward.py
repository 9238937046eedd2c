r"""Score completions, in this process (`verify`) or in killable children (`RewardPool`), and judge them.

    verify("math", r"... so \boxed{\frac{1}{2}}", "0.5")     # Verdict(reward=1.0, status="ok")
    with RewardPool(num_workers=2) as pool:                  # scores while the caller generates
        pool.submit(key, "math", completion, answer)         # text or token ids, as soon as it is finished
        pool.poll()                                          # once per engine step
        verdicts = pool.collect()                            # waits; {key: Verdict} in submit order

Computer algebra on model output can hang for ever, eat all memory or crash, also in C code that no Python
exception reaches. So the kernel kills a child at its limit, and "timeout" and "error" are not "wrong". The
child is this file run as a script: a caller with a CUDA context and threads cannot safely fork.

Judges (section 5) are reward models; they are asked in the trainer's process, after a rollout. torch is
imported there only, so that a child starts quickly.
"""

import contextlib
import ctypes
import difflib
import functools
import itertools
import json
import logging
import operator
import os
import pkgutil
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import astuple, dataclass, field
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from typing import Literal

from runtime.config import Section, setting


# ------------------------------------------------------------------------------------------------------------
# 1 Settings
# ------------------------------------------------------------------------------------------------------------
class RewardSettings(Section):
    """Verdicts, the processes that make them, penalties and judges."""

    functions: list[str] = setting([], "module:function of your own that rows may name as their kind", True)
    num_workers: int = setting(1, "scoring processes per rank", True, ge=1)
    timeout_s: float = setting(10.0, "seconds; a verdict that takes longer is a timeout", True, gt=0)
    memory_gib: float = setting(2.0, "GiB of address space per scoring process", True, gt=0)
    max_failed_frac: float = setting(
        0.5, "stop if more verdicts of a step time out or crash", True, gt=0, le=1
    )
    overlap: bool = setting(
        True, "true: score each completion while others are generated. false: score all at the end.", True
    )
    decode: Literal["workers", "engine"] = setting(
        "workers",
        "where tokens become text. workers: in the scoring processes. engine: between two engine steps.",
        True,
    )
    max_backlog: int = setting(
        4096, "completions waiting for a verdict before the engine has to wait", True, ge=1
    )
    dense: bool = setting(False, "reward the share of the answer that is right instead of 0 or 1")
    overlong_buffer: int = setting(0, "last tokens before max_new_tokens that are penalised; 0: off", ge=0)
    overlong_coef: float = setting(1.0, "penalty of a completion that is max_new_tokens long", ge=0)
    repetition_coef: float = setting(0.0, "penalty of a completion that only repeats itself; 0: off", ge=0)
    repetition_ngram: int = setting(4, "tokens; repeated n-grams of this size are counted", ge=1)
    judge: Literal["none", "scalar", "generative"] = setting(
        "none",
        "reward model mixed with the verifier. scalar: a model that gives a score. generative: one that "
        "writes a verdict.",
    )
    judge_path: str | None = setting(None, "folder of the judge, or module:function; null: no judge")
    judge_weight: float = setting(0.5, "w of reward = (1 - w) verifier + w judge", gt=0, le=1)
    judge_mode: Literal["score", "pairwise_reference", "round_robin"] = setting(
        "score",
        "score: the judge's score of the completion alone. pairwise_reference: comparison with the reference "
        "answer. round_robin: comparison with the group's other completions.",
    )


# ------------------------------------------------------------------------------------------------------------
# 2 Verdicts: one matcher per kind
# ------------------------------------------------------------------------------------------------------------

NUMERIC_RTOL = Decimal("1e-6")  # relative, for numbers that are not both whole
MAX_PARSED_CHARS = 4096  # math-verify takes quadratic time or worse; the longest answer of MATH-500 has 53


@dataclass(frozen=True)
class Verdict:
    """The verifier's opinion of one completion."""

    reward: float  # in [0, 1]; 0 unless status is "ok"
    status: str  # "ok" | "wrong" | "no_answer" | "timeout" | "error"
    detail: str = ""  # the reason of a timeout or an error, at most 200 characters
    pass_frac: float = 0.0  # in [0, 1], share of constraints met: 1 if "ok", partial for DENSE_KINDS, else 0


def verify(kind: str, completion: str, answer: str) -> Verdict:
    r"""Score one completion against the reference answer, in this process and without a time limit.

    "exact"    the whole completion equals the answer, surrounding whitespace aside
    "numeric"  the last number equals the answer: exactly if both are whole, else within NUMERIC_RTOL of it
    "gsm8k"    the same for the first number after the last "####"; the answer is a number or a GSM8K solution
    "math"     math-verify finds the last \boxed{...} equal to the answer, which is LaTeX or a number; without
               a box, the last expression that it finds in the last MAX_PARSED_CHARS characters
    "module:function"  a function of your own: (completion, answer) -> share of tests or constraints met, in
               [0, 1], where 1 is right. The module is imported from the working directory or PYTHONPATH.
               It runs code: a caller must not take such a kind from data (data.prompts.load_prompts refuses).

    An exception while scoring and a reference answer that cannot be read give status "error".
    Raises ValueError for an unknown kind, TypeError for a completion or an answer that is not a string.
    """
    _check(kind, completion, answer)
    try:
        return _MATCHERS[kind](completion, answer) if kind in _MATCHERS else _own(kind, completion, answer)
    except Exception as error:  # untrusted text; MemoryError and RecursionError are among them
        return Verdict(0.0, "error", f"{type(error).__name__}: {error}"[:200])


def _check(kind: str, completion: str | list[int], answer: str, types: tuple = (str,)) -> None:
    if not is_kind(kind):
        nearest, *others = difflib.get_close_matches(str(kind), KINDS, n=len(KINDS), cutoff=0.0)
        raise ValueError(f"unknown kind {kind!r}: did you mean {nearest!r}? Others: {', '.join(others)}")
    if not (isinstance(completion, types) and isinstance(answer, str)):
        raise TypeError(f"completion and answer must be str, not {type(completion)} and {type(answer)}")


def _compared(equal: bool, pass_frac: float = 0.0) -> Verdict:
    return Verdict(1.0, "ok", pass_frac=1.0) if equal else Verdict(0.0, "wrong", pass_frac=pass_frac)


def _exact(completion: str, answer: str) -> Verdict:
    if not answer.strip():
        return Verdict(0.0, "error", "the reference answer is empty")
    if not completion.strip():
        return Verdict(0.0, "no_answer")
    found, gold = completion.strip(), answer.strip()
    return _compared(found == gold, sum(map(operator.eq, found, gold)) / max(len(found), len(gold)))


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


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \fbox{...} whose braces close; None without one."""
    content, open_braces = None, []  # per open brace: where its box's content starts, None for other braces
    # Escaped braces are skipped; a brace after whole pairs of backslashes (line breaks) is none of these.
    for match in re.finditer(r"(?<!\\)(?:\\\\)+(?=[{}])|\\(?:(boxed|fbox)\s*\{|[{}])|\{|\}", text):
        if match[1] or match[0] == "{":
            open_braces.append(match.end() if match[1] else None)
        elif match[0] == "}" and open_braces and (start := open_braces.pop()) is not None:
            content = text[start : match.start()]
    return content


def _math_verify():
    # Imported when first used: it takes 0.4 s. The pool's limit replaces its own, the lack of which it logs.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    import math_verify

    return math_verify


@functools.lru_cache(maxsize=256)  # the completions of a group share their reference answer
def _parse_box(content: str) -> list:
    """Return [expression, normalised text] of a boxed answer; [text] if it is no mathematics; [] if empty."""
    library = _math_verify()
    # LaTeX only, else it picks a number out of a box that it cannot parse: 10 from \boxed{7^{7^7} \bmod 10}.
    return library.parse(
        r"\boxed{" + content.strip().rstrip(".") + "}",
        [library.LatexExtractionConfig()],
        parsing_timeout=None,
        raise_on_error=True,
    )


def _math(completion: str, answer: str) -> Verdict:
    gold = _parse_box(answer)
    if not gold or isinstance(gold[0], str):
        return Verdict(0.0, "error", f"math-verify cannot parse the reference answer {answer[:99]!r}"[:200])
    content = last_boxed(completion)
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
DENSE_KINDS: tuple[str, ...] = ("exact",)  # pass_frac if wrong: characters in place / longer length [ours]


def is_kind(kind: str) -> bool:
    """Tell whether verify() knows this kind: one of KINDS, or the "module:function" of a function."""
    return kind in KINDS or (isinstance(kind, str) and re.fullmatch(r"[\w.]+:[\w.]+", kind) is not None)


def _own(kind: str, completion: str, answer: str) -> Verdict:
    score = float(pkgutil.resolve_name(kind)(completion, answer))
    if not 0 <= score <= 1:
        return Verdict(0.0, "error", f"{kind} gave {score}, not a score in [0, 1]")
    return _compared(score == 1, score)


# ------------------------------------------------------------------------------------------------------------
# 3 The pool: the caller's side
# ------------------------------------------------------------------------------------------------------------

# Items sent ahead to one worker. More saves wake-ups on tiny items; fewer strand less work behind a slow one.
# Functions of your own may be slow (a sandbox, a judge): one at a time to a worker that has nothing else.
WINDOW = 16
GRACE_S = 120.0  # a child silent for this long past the limit did not even start its own timer: it is killed


@dataclass(eq=False)
class _Worker:
    """One child and what is on its way to it. It answers in order, so it is busy with sent[0]."""

    process: subprocess.Popen
    sent: deque = field(default_factory=deque)  # items without a reply
    unwritten: bytearray = field(default_factory=bytearray)  # bytes that the pipe to the child has not taken
    unread: bytes = b""  # the beginning of a reply
    alive_at: float = field(default_factory=time.monotonic)  # the last reply, or the last bytes taken
    is_up: bool = False  # it has answered before

    def is_slow(self) -> bool:
        return bool(self.sent) and self.sent[0][1] not in KINDS


class RewardPool(contextlib.AbstractContextManager):
    """Score completions in child processes while the caller goes on.

    num_workers child processes score one item at a time each, for at most timeout_s wall-clock seconds and
    with at most memory_bytes of address space. A child that dies costs the item it was busy with its verdict
    ("timeout" or "error"); the other items go to a fresh child. Rules (KINDS) go before functions of your
    own. At most max_backlog items wait; then submit does. tokenizer: JSON of the tokenizer with which the
    children turn token ids into text. Data moves only inside submit, poll and collect. One thread makes and
    uses the pool: Linux ends the children together with that thread.
    """

    def __init__(
        self,
        num_workers: int = 1,
        timeout_s: float = 10.0,
        memory_bytes: int = 2 << 30,
        *,
        max_backlog: int = 4096,
        tokenizer: str = "",
    ):
        if num_workers < 1 or timeout_s <= 0 or max_backlog < 1:
            raise ValueError(f"{num_workers=}, {timeout_s=} and {max_backlog=} must be positive")
        self.timeout_s, self.memory_bytes, self.max_backlog = timeout_s, memory_bytes, max_backlog
        self.latencies: list[float] = []  # seconds from submit to verdict, of all items since it was emptied
        self.seconds: dict[str, float] = {}  # {kind: that an item takes in a worker}, a moving mean
        self.num_timeouts = self.num_errors = self.num_restarts = 0  # verdicts, verdicts, children replaced
        self._tokenizer = os.memfd_create("tokenizer") if tokenizer else None  # a file that ends with us
        if tokenizer:
            with open(os.dup(self._tokenizer), "w") as file:
                file.write(tokenizer)
        self._rules, self._slow = deque(), deque()  # not yet sent: (key, kind, completion, answer, since)
        self._verdicts: dict[Hashable, Verdict | None] = {}  # in submit order; None while outstanding
        self._workers = [self._start() for _ in range(num_workers)]

    def submit(self, key: Hashable, kind: str, completion: str | list[int], answer: str) -> None:
        """Hand over one item; return at once but for a full backlog. `key`: new since the last collect.

        A completion may be token ids, if the pool has a tokenizer: the text without special tokens is scored.
        """
        _check(kind, completion, answer, (str, list))
        if not self._workers:
            raise ValueError("the pool is closed")
        if key in self._verdicts:
            raise ValueError(f"key {key!r} was submitted before and is not yet collected")
        if isinstance(completion, list) and self._tokenizer is None:
            raise ValueError("token ids need a pool with a tokenizer")
        while self.poll() >= self.max_backlog:
            self._wait()
        self._verdicts[key] = None
        item = (key, kind, completion, answer, time.monotonic())
        (self._rules if kind in KINDS else self._slow).append(item)
        self._send()

    def poll(self) -> int:
        """Move what the pipes take and hold, without waiting; return how many items still lack a verdict."""
        self._send()  # first, so that nobody is called silent who waited for the rest of a long item
        for worker in list(self._workers):
            self._receive(worker)
        self._send()
        return len(self._rules) + len(self._slow) + sum(len(worker.sent) for worker in self._workers)

    def collect(self) -> dict[Hashable, Verdict]:
        """Wait for all items submitted since the last collect; return their verdicts, in submit order."""
        while self.poll():
            self._wait()
        verdicts, self._verdicts = self._verdicts, {}
        return verdicts

    def _wait(self) -> None:
        """Wait until a pipe moves, at most a second: then poll looks for silent workers."""
        poller = select.poll()  # select.select refuses file descriptors above 1023
        for worker in self._workers:
            poller.register(worker.process.stdout, select.POLLIN)
            if worker.unwritten:
                poller.register(worker.process.stdin, select.POLLOUT)
        poller.poll(1000)  # ms

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

    def _start(self) -> _Worker:
        # No LD_PRELOAD, no PYTHON* switches of the caller. sympy's order of terms can follow the hash seed.
        keep = ("PATH", "HOME", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH")
        env = {name: os.environ[name] for name in keep if name in os.environ} | {"PYTHONHASHSEED": "0"}
        inherited = [] if self._tokenizer is None else [self._tokenizer]
        limits = [str(self.timeout_s), str(self.memory_bytes)]
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", *limits, *map(str, inherited)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=env,
            pass_fds=inherited,
        )
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)
        return _Worker(process)

    def _send(self) -> None:
        """Give queued items to the least loaded workers and write what the pipes take."""
        while self._rules or self._slow:
            # a worker with a slow item counts as full
            worker = min(self._workers, key=lambda worker: WINDOW if worker.is_slow() else len(worker.sent))
            queue = self._rules or self._slow
            if worker.is_slow() or len(worker.sent) >= (WINDOW if queue is self._rules else 1):
                break
            worker.sent.append(queue.popleft())
            # ASCII JSON: newlines, null bytes and lone surrogates are escaped and come out as they were.
            worker.unwritten += json.dumps(worker.sent[-1][1:4]).encode() + b"\n"
        for worker in self._workers:
            # A full pipe is for the next call; a dead child shows in _receive, as the end of its replies.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                while worker.unwritten:
                    del worker.unwritten[: os.write(worker.process.stdin.fileno(), worker.unwritten)]
                    worker.alive_at = time.monotonic()

    def _receive(self, worker: _Worker) -> None:
        """Book the replies of a worker; replace it if it has died or gone silent."""
        verdicts, data = [], None  # verdicts: with the seconds that they took
        with contextlib.suppress(BlockingIOError):
            while data := os.read(worker.process.stdout.fileno(), 1 << 16):
                *replies, worker.unread = (worker.unread + data).split(b"\n")
                verdicts += [(Verdict(*fields), took) for *fields, took in map(json.loads, replies)]
                worker.alive_at, worker.is_up = time.monotonic(), True
        ended = data == b""
        grace = 1.0 if worker.is_up and worker.is_slow() else GRACE_S  # alone, it starts at once
        silent = not ended and worker.sent and time.monotonic() > worker.alive_at + self.timeout_s + grace
        if ended or silent:
            status = _stop(worker.process)
            late = Verdict(0.0, "timeout", f"killed after the limit of {self.timeout_s:g} s")
            dead = Verdict(0.0, "error", f"the worker died with exit status {status}")
            is_late = silent or status == -signal.SIGALRM
            verdicts.append((late, self.timeout_s) if is_late else (dead, 0.0))
            self._workers[self._workers.index(worker)] = self._start()
            self.num_restarts += 1
        for verdict, took in verdicts[: len(worker.sent)]:  # an idle worker that dies costs no item
            key, kind, _, _, since = worker.sent.popleft()
            if took:  # 0 where the child died
                self.seconds[kind] = 0.95 * self.seconds.get(kind, took) + 0.05 * took
            self._verdicts[key] = verdict
            self.latencies.append(time.monotonic() - since)
            self.num_timeouts += verdict.status == "timeout"
            self.num_errors += verdict.status == "error"
        if ended or silent:
            self._rules.extendleft(reversed(worker.sent))  # a slow item is alone: it had the verdict


def _stop(process: subprocess.Popen) -> int:
    """Kill a child, if it still lives, and return its exit status: minus the signal that ended it."""
    process.kill()
    process.stdin.close()
    process.stdout.close()
    return process.wait()


def start_pool(settings: RewardSettings, tokenizer) -> RewardPool:
    """Start the reward workers of this rank."""
    return RewardPool(
        settings.num_workers,
        settings.timeout_s,
        int(settings.memory_gib * 2**30),
        max_backlog=settings.max_backlog,
        tokenizer=decoder_json(tokenizer) if settings.decode == "workers" else "",
    )


def decoder_json(tokenizer) -> str:
    """Return the library inside a tokenizer as JSON, for workers; ValueError if it decodes otherwise."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    cleans = tokenizer.clean_up_tokenization_spaces and type(getattr(inner, "model", None)).__name__ != "BPE"
    if inner is None or cleans:
        raise ValueError("reward.decode workers: this tokenizer does more than its library: set it to engine")
    return inner.to_str()


# ------------------------------------------------------------------------------------------------------------
# 4 The pool: the child's side
# ------------------------------------------------------------------------------------------------------------
def main() -> None:
    """Answer each line [kind, completion, answer] on stdin by a line of Verdict's fields on stdout."""
    _, _, timeout_s, memory_bytes, *tokenizer_fd = sys.argv  # reward.py --worker SECONDS BYTES [TOKENIZER]
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the end of the parent ends a computation
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # kills; the caller may have left it ignored or blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    requests, replies, null = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)  # whatever a library prints stays out of the replies
    if tokenizer_fd:
        import tokenizers  # the library that is inside the trainer's tokenizer

        tokenizer = tokenizers.Tokenizer.from_file(f"/proc/self/fd/{tokenizer_fd[0]}")
    for line in os.fdopen(requests, "rb"):  # ends when the parent closes it or dies
        kind, completion, answer = json.loads(line)
        if isinstance(completion, list):
            completion = tokenizer.decode(completion, skip_special_tokens=True)
        if kind == "math":  # a slow import is not the item's fault; verify reports one that fails
            with contextlib.suppress(Exception):
                _math_verify()
        start = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, float(timeout_s))
        verdict = verify(kind, completion, answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(replies, json.dumps([*astuple(verdict), time.monotonic() - start]).encode() + b"\n")


# ------------------------------------------------------------------------------------------------------------
# 5 Judges: reward models, asked in the trainer's process after a rollout
# ------------------------------------------------------------------------------------------------------------
TEMPLATE = """Task:\n{prompt}\n\nFirst answer:\n{first}\n\nSecond answer:\n{second}\n
Is each answer right, and where does it go wrong? Think step by step. Then say in one last line whether the
first answer is better than the second, as good or worse:\nVerdict: Better|Tie|Worse"""  # [ours]


class ScalarJudge:
    """Score texts by a reward model with one label, such as a Bradley-Terry model, as prompt + completion.

    path: Hugging Face folder. batch_size: texts per forward. max_tokens: a longer text loses its beginning.
    """

    def __init__(self, path: str | os.PathLike, batch_size: int = 32, max_tokens: int = 4096):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        model, loading = AutoModelForSequenceClassification.from_pretrained(  # [ours]: bfloat16 makes ties
            path, dtype=torch.float32, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
        if model.config.num_labels != 1 or loading["missing_keys"]:  # a causal LM's head would be random
            raise ValueError(f"judge {path} has {model.config.num_labels} labels, not 1, or no trained head")
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, truncation_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id  # it marks the end of a text
        self.batch_size = batch_size
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

    def scores(self, prompts: list[str], completions: list[str]) -> list[float]:
        """Return raw scores; NaN and inf are handed on. Equal texts are read once and get equal scores."""
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        order, scores = sorted(set(texts), key=lambda text: (len(text), text)), {}  # little padding
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            logits = self.model(**self.tokenize(batch).to(self.model.device)).logits  # [B, 1]
            scores |= zip(batch, logits[:, 0].tolist())
        return [scores[text] for text in texts]

    def compare(self, prompts, firsts, seconds, margin: float = 0.0) -> list[int]:
        """Return +1 where the first completion scores over margin above the second, -1 below it, else 0."""
        scores = self.scores([*prompts, *prompts], [*firsts, *seconds])
        return [(a - b > margin) - (b - a > margin) for a, b in zip(scores, scores[len(prompts) :])]


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
    kind: str, path: str | None, load_generate: Callable, batch_size: int = 32, max_tokens: int = 4096
):
    """Load the judge in a folder, or the generative one "module:function"; ValueError says why it cannot be.

    kind: "scalar", "generative", or "none", which gives None. load_generate(path, batch_size, max_tokens)
    makes the function of a generative judge from the folder of a causal language model.
    """
    if kind == "none":
        return None
    if os.path.isfile(os.path.join(path, "config.json")):
        if kind == "scalar":
            return ScalarJudge(path, batch_size, max_tokens)
        return GenerativeJudge(load_generate(path, batch_size, max_tokens))
    if kind == "scalar" or ":" not in path:
        raise ValueError(f"judge {path!r}: no folder with the config.json of a Hugging Face model")
    try:
        return GenerativeJudge(pkgutil.resolve_name(path))
    except Exception as error:  # whatever its import raises
        raise ValueError(f"cannot import the judge {path!r}: {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
