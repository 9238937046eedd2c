r"""Completion text -> verdict, in this process (`verify`) or killable children (`RewardPool`); judges.

    verify("math", r"... so \boxed{\frac{1}{2}}", "0.5")     # Verdict(reward=1.0, status="ok")
    with RewardPool(num_workers=2) as pool:                  # scores while the caller generates
        pool.submit(key, "math", completion, answer)         # as soon as a completion is finished
        pool.poll()                                          # once per engine step
        verdicts = pool.collect()                            # waits; {key: Verdict} in submit order

Computer algebra on model output can hang for ever, eat all memory or crash, also in C code that no Python
exception reaches. So the kernel kills a child at its limit, and "timeout" and "error" are not "wrong". The
child is this file run as a script: a caller with a CUDA context and threads cannot safely fork.
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

# ---- 1. Verdicts: one matcher per kind ---------------------------------------------------------------------

NUMERIC_RTOL = Decimal("1e-6")  # relative, for numbers that are not both whole
MAX_PARSED_CHARS = 4096  # math-verify takes quadratic time or worse; the longest answer of MATH-500 has 53


@dataclass(frozen=True)
class Verdict:
    reward: float  # in [0, 1]; 0 unless status is "ok"
    status: str  # "ok" | "wrong" | "no_answer" | "timeout" | "error"
    detail: str = ""  # the reason of a timeout or an error, at most 200 characters
    pass_frac: float = 0.0  # in [0, 1], share of constraints met: 1 if "ok", partial for DENSE_KINDS, else 0


def verify(kind: str, completion: str, answer: str) -> Verdict:
    r"""Scores one completion against the reference answer, in this process and without a time limit.

    "exact"    the whole completion equals the answer, surrounding whitespace aside
    "numeric"  the last number equals the answer: exactly if both are whole, else within NUMERIC_RTOL of it
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
        return Verdict(0.0, "error", f"{type(error).__name__}: {error}"[:200])


def _check(kind: str, completion: str, answer: str) -> None:
    if kind not in KINDS:
        nearest, *others = difflib.get_close_matches(str(kind), KINDS, n=len(KINDS), cutoff=0.0)
        raise ValueError(f"unknown kind {kind!r}: did you mean {nearest!r}? Others: {', '.join(others)}")
    if not (isinstance(completion, str) and isinstance(answer, str)):
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
    r"(?:[eE][-+]?[0-9]{1,17}(?![0-9]))?")
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


def _last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} or \fbox{...} whose braces close, in one pass; None without one."""
    content, open_braces = None, []  # per open brace: where its box's content starts, None for other braces
    for match in re.finditer(r"\\(?:(boxed|fbox)\s*\{|[{}])|\{|\}", text):  # \{ and \} are skipped
        if match[1] or match[0] == "{":
            open_braces.append(match.end() if match[1] else None)
        elif match[0] == "}" and open_braces and (start := open_braces.pop()) is not None:
            content = text[start:match.start()]
    return content


def _math_verify():
    # Imported when first used: it takes 0.4 s. The pool's limit replaces its own, the lack of which it logs.
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
        return Verdict(0.0, "error", f"math-verify cannot parse the reference answer {answer[:99]!r}"[:200])
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
DENSE_KINDS: tuple[str, ...] = ("exact",)  # pass_frac if wrong: characters in place / longer length [ours]

# ---- 2. The pool: the caller's side ------------------------------------------------------------------------

# Items sent ahead to one worker. More saves wake-ups on tiny items; fewer strand less work behind a slow one.
WINDOW = 16
GRACE_S = 120.0  # a child silent for this long past the limit did not even start its own timer: it is killed


@dataclass(eq=False)
class _Worker:
    """One child and what is on its way to it. It answers in order, so it is busy with sent[0]."""
    process: subprocess.Popen
    sent: deque = field(default_factory=deque)  # items without a reply
    unwritten: bytearray = field(default_factory=bytearray)  # what the pipe to the child has not yet taken
    unread: bytes = b""  # the beginning of a reply
    alive_at: float = field(default_factory=time.monotonic)  # the last reply, or the last bytes taken


class RewardPool(contextlib.AbstractContextManager):
    """Scores completions in child processes while the caller goes on.

    num_workers child processes score one item at a time each, for at most timeout_s wall-clock seconds and
    with at most memory_bytes of address space. A child that dies costs the item it was busy with its verdict
    ("timeout" or "error"); the other items go to a fresh child. Data moves only inside submit, poll and
    collect. One thread makes and uses the pool: Linux ends the children together with that thread.
    """

    def __init__(self, num_workers: int = 1, timeout_s: float = 10.0, memory_bytes: int = 2 << 30):
        if num_workers < 1 or timeout_s <= 0:
            raise ValueError(f"num_workers={num_workers} and timeout_s={timeout_s} must be positive")
        self.timeout_s, self.memory_bytes = timeout_s, memory_bytes
        self.num_timeouts = self.num_errors = self.num_restarts = 0  # verdicts, verdicts, children replaced
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
        self._send()  # first, so that nobody is called silent who waited for the rest of a long item
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
        self._queue, self._verdicts = deque(), {}

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _start(self) -> _Worker:
        # No LD_PRELOAD, no PYTHON* switches of the caller. sympy's order of terms can follow the hash seed.
        keep = ("PATH", "HOME", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH")
        env = {name: os.environ[name] for name in keep if name in os.environ} | {"PYTHONHASHSEED": "0"}
        command = [sys.executable, __file__, "--worker", str(self.timeout_s), str(self.memory_bytes)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=env)
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)
        return _Worker(process)

    def _send(self) -> None:
        """Gives queued items to the least loaded workers and writes what the pipes take."""
        while self._queue:
            worker = min(self._workers, key=lambda worker: len(worker.sent))
            if len(worker.sent) >= WINDOW:
                break
            worker.sent.append(self._queue.popleft())
            # ASCII JSON: newlines, null bytes and lone surrogates are escaped and come out as they were.
            worker.unwritten += json.dumps(worker.sent[-1][1:]).encode() + b"\n"
        for worker in self._workers:
            # A full pipe is for the next call; a dead child shows in _receive, as the end of its replies.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                while worker.unwritten:
                    del worker.unwritten[:os.write(worker.process.stdin.fileno(), worker.unwritten)]
                    worker.alive_at = time.monotonic()

    def _receive(self, worker: _Worker) -> None:
        """Books the replies of a worker; replaces it if it has died or gone silent."""
        verdicts, data = [], None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(worker.process.stdout.fileno(), 1 << 16):
                *replies, worker.unread = (worker.unread + data).split(b"\n")
                verdicts += [Verdict(*json.loads(reply)) for reply in replies]
                worker.alive_at = time.monotonic()
        ended = data == b""
        silent = not ended and worker.sent and time.monotonic() > worker.alive_at + self.timeout_s + GRACE_S
        if ended or silent:
            status = _stop(worker.process)
            late = Verdict(0.0, "timeout", f"killed after the limit of {self.timeout_s:g} s")
            dead = Verdict(0.0, "error", f"the worker died with exit status {status}")
            verdicts.append(late if silent or status == -signal.SIGALRM else dead)
            self._workers[self._workers.index(worker)] = self._start()
            self.num_restarts += 1
        for verdict in verdicts[:len(worker.sent)]:  # an idle worker that dies costs no item
            self._verdicts[worker.sent.popleft()[0]] = verdict
            self.num_timeouts += verdict.status == "timeout"
            self.num_errors += verdict.status == "error"
        if ended or silent:
            self._queue.extendleft(reversed(worker.sent))


def _stop(process: subprocess.Popen) -> int:
    """Kills a child, if it still lives, and returns its exit status: minus the signal that ended it."""
    process.kill()
    process.stdin.close()
    process.stdout.close()
    return process.wait()


# ---- 3. The pool: the child's side -------------------------------------------------------------------------

def main() -> None:
    """Answers each line [kind, completion, answer] on stdin by a line of Verdict's fields on stdout."""
    _, _, timeout_s, memory_bytes = sys.argv  # reward.py --worker TIMEOUT_S MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the end of the parent ends a computation
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # kills; the caller may have left it ignored or blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    requests, replies, null = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)  # whatever a library prints stays out of the replies
    for line in os.fdopen(requests, "rb"):  # ends when the parent closes it or dies
        kind, completion, answer = json.loads(line)
        if kind == "math":  # a slow import is not the item's fault; verify reports one that fails
            with contextlib.suppress(Exception):
                _math_verify()
        signal.setitimer(signal.ITIMER_REAL, float(timeout_s))
        verdict = verify(kind, completion, answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(replies, json.dumps(astuple(verdict)).encode() + b"\n")


# ---- 4. Judges: reward models, asked in the caller's process after a rollout -------------------------------

TEMPLATE = """Task:\n{prompt}\n\nFirst answer:\n{first}\n\nSecond answer:\n{second}\n
Is each answer right, and where does it go wrong? Think step by step. Then say in one last line whether the
first answer is better than the second, as good or worse:\nVerdict: Better|Tie|Worse"""  # [ours]


class ScalarJudge:
    """A reward model with one label, such as a Bradley-Terry model, of prompt + completion as they are.

    path: Hugging Face folder. batch_size: texts per forward. max_tokens: a longer text loses its beginning.
    """

    def __init__(self, path: str | os.PathLike, batch_size: int = 32, max_tokens: int = 4096):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        model, loading = AutoModelForSequenceClassification.from_pretrained(  # [ours]: bfloat16 makes ties
            path, dtype=torch.float32, use_safetensors=True, local_files_only=True, output_loading_info=True)
        if model.config.num_labels != 1 or loading["missing_keys"]:  # a causal LM's head would be random
            raise ValueError(f"judge {path} has {model.config.num_labels} labels, not 1, or no trained head")
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, truncation_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id  # it marks the end of a text
        self.batch_size, self.tokenize = batch_size, functools.partial(
            tokenizer, padding=True, padding_side="right", truncation=True, max_length=max_tokens,
            return_token_type_ids=False, return_tensors="pt")
        self.model = model.eval().requires_grad_(False).to("cuda" if torch.cuda.is_available() else "cpu")

    def scores(self, prompts: list[str], completions: list[str]) -> list[float]:
        """Raw scores; NaN and inf are handed on. Equal texts are read once and get equal scores."""
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        order, scores = sorted(set(texts), key=lambda text: (len(text), text)), {}  # little padding
        for start in range(0, len(order), self.batch_size):
            batch = order[start:start + self.batch_size]
            logits = self.model(**self.tokenize(batch).to(self.model.device)).logits  # [B, 1]
            scores |= zip(batch, logits[:, 0].tolist())
        return [scores[text] for text in texts]

    def compare(self, prompts, firsts, seconds, margin: float = 0.0) -> list[int]:
        """+1 where the first completion scores more than margin above the second, -1 below it, else 0."""
        scores = self.scores([*prompts, *prompts], [*firsts, *seconds])
        return [(a - b > margin) - (b - a > margin) for a, b in zip(scores, scores[len(prompts):])]


class GenerativeJudge:
    """A language model: a chain of thought on two completions, then Better, Tie or Worse [secondary].

    generate: prompts -> answers, in order. num_unreadable: answers without a verdict so far; they are ties.
    """

    def __init__(self, generate: Callable[[list[str]], list[str]], template: str = TEMPLATE):
        self.generate, self.template, self.num_unreadable = generate, template, 0

    def compare(self, prompts, firsts, seconds) -> list[int]:
        """+1 where the answer's last verdict finds the first completion better, -1 where worse, else 0."""
        questions = [self.template.format(prompt=prompt, first=first, second=second)
                     for prompt, first, second in zip(prompts, firsts, seconds, strict=True)]
        answers = self.generate(questions) if questions else []
        if len(answers) != len(questions):
            raise ValueError(f"the generative judge gave {len(answers)} answers to {len(questions)} prompts")
        found = [re.findall(r"(?<!\|)\b(Better|Tie|Worse)\b(?!\|)", answer) for answer in answers]  # no echo
        self.num_unreadable += found.count([])
        return [{"Better": 1, "Worse": -1}.get(words[-1], 0) if words else 0 for words in found]


def pairwise_reference(judge, prompts, completions, references) -> list[float]:
    """r_i = +1, 0 or -1: completion i is better than, as good as or worse than reference i [ours]."""
    return [float(sign) for sign in judge.compare(prompts, completions, references)]


def round_robin(judge, prompts, completions, group_index: list[int]) -> list[float]:
    """r_i = mean over j != i in i's group of [better 1, tie 0.5, worse 0]; 0.5 for a group of one [ours].

    group_index: group of each completion, in any order. A pair i < j is asked once, i first, for both.
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


def build_judge(kind: str, path: str, batch_size: int = 32, max_tokens: int = 4096):
    """The judge in a folder, or the generative one "module:function"; ValueError says why it cannot be."""
    if os.path.isfile(os.path.join(path, "config.json")):
        return {"scalar": ScalarJudge, "generative": _vllm_judge}[kind](path, batch_size, max_tokens)
    if kind == "scalar" or ":" not in path:
        raise ValueError(f"judge {path!r}: no folder with the config.json of a Hugging Face model")
    try:
        return GenerativeJudge(pkgutil.resolve_name(path))
    except Exception as error:  # whatever its import raises
        raise ValueError(f"cannot import the judge {path!r}: {type(error).__name__}: {error}") from error


def _vllm_judge(path: str, batch_size: int, max_tokens: int) -> GenerativeJudge:
    """Greedy answers of a second vLLM engine in this process; of a long question only the end is read.

    Tried after the policy's, on 1 and 2 CPU ranks, vLLM 0.30: exact, but an MoE after a dense policy fails.
    """
    import rollout
    rollout.set_vllm_environment(on_gpu := rollout.torch.cuda.is_available())
    from vllm import LLM, SamplingParams
    llm = LLM(path, load_format="safetensors", dtype="auto" if on_gpu else "float32", max_num_seqs=batch_size,
              kv_cache_memory_bytes=1 << 30, max_model_len=-1, gpu_memory_utilization=0.01,  # what fits
              distributed_executor_backend="external_launcher" if "RANK" in os.environ else None,
              enforce_eager=not on_gpu, generation_config="vllm", use_tqdm_on_load=False)
    half = llm.model_config.max_model_len // 2
    options = {"sampling_params": SamplingParams(temperature=0.0, max_tokens=min(max_tokens, half)),
               "tokenization_kwargs": {"truncate_prompt_tokens": half, "truncation_side": "left"},
               "chat_template": None if llm.get_tokenizer().chat_template else "{{ messages[0].content }}"}
    return GenerativeJudge(lambda questions: [output.outputs[0].text for output in llm.chat(
        [[{"role": "user", "content": question}] for question in questions], use_tqdm=False, **options)])


if __name__ == "__main__":
    main()
