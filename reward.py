r"""Score completions: `verify` in this process, `RewardPool` in worker processes that can be killed.

    verify("math", r"... so \boxed{\frac{1}{2}}", "0.5")     # Verdict(reward=1.0, status="ok")
    with RewardPool(num_workers=2) as pool:                  # scores completions while the engine generates
        pool.submit(key, "math", completion, answer)         # text or token ids, as soon as a completion ends
        pool.poll()                                          # once per engine step
        verdicts = pool.collect()                            # waits; {key: Verdict} in submit order

A completion whose verifier hangs, dies or raises gets status "timeout" or "error". If the completion is the
cause, the verdict counts as reward 0 (Scoring.inquire); otherwise it is left out of training. Workers import
this file, so that it must not import torch (judges.py does).

Short rules are in this file; longer verifiers and the loader of custom functions are in verifiers/.

Reading order: verdicts and rules, the pool, checks before a run.
"""

import contextlib
import functools
import json
import operator
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from typing import TYPE_CHECKING

import verifiers.chain
import verifiers.instructions
import verifiers.math
import verifiers.reasoning_gym
import verifiers.verdict
from verifiers.answer import final_answer, opened_thought
from verifiers.kinds import ENVIRONMENT, KINDS, RULE_KINDS, SLOW_KINDS, functions_of, parts_of
from verifiers.lazy import LazyModule
from verifiers.own import COMMON_ARGUMENTS, BadResult, Scale, explain, load_function, read_result
from workers import (
    BAD_RESULT,
    MAX_DETAIL,
    OF_CPU_TIME,
    OUT_OF_MEMORY,
    WORKER_DIED,
    Reply,
    Task,
    Traits,
    Worker,
    WorkerPool,
    event_loop,
    finish,
)

if TYPE_CHECKING:  # workers start without pydantic
    from settings import RewardSettings

code = LazyModule("verifiers.code")
sandbox = LazyModule("verifiers.sandbox")

# ------------------------------------------------------------------------------------------------------------
# 1 Verdicts: one rule per kind
# ------------------------------------------------------------------------------------------------------------

NUMERIC_RTOL = Decimal("1e-6")  # relative tolerance, unless both numbers are whole


@dataclass(frozen=True)
class Verdict(Reply):
    """The verifier's score of one completion."""

    reward: float  # in [0, 1]; fractions are partly right
    status: str  # "ok" (reward 1) | "wrong" (less) | "no_answer" | "timeout" | "error"
    detail: str = ""  # reason of a timeout or error, at most 200 printable characters
    # {kind: reward} of a weighted sum, and {function/name: number} of a function that returns a dict
    parts: dict[str, float] = field(default_factory=dict, hash=False)
    by_text: bool = False  # the completion causes the timeout or error: reward 0, which is trained on

    @classmethod
    def failure(cls, status: str, detail: str) -> "Verdict":
        """Return the verdict of a verifier that timed out or raised."""
        return cls(0.0, status, detail)


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
    "reasoning_gym"  the score in [0, 1] of a task of that package (verifiers/reasoning_gym.py)
    "module:function", "path/file.py:function"  the score of a custom function (verifiers/own.py).
               Kinds from untrusted data must not get here: data.prompts.load_prompts refuses function names.
    "0.8*math + 0.2*rewards.py:brevity"  the weighted mean; the first kind decides the status. A kind of
               weight 0 is only logged, and may fail

    Built-in kinds judge the text after the thought (verifiers/answer.py), and a completion that ends inside
    of its thought has status "no_answer". Custom functions get the whole text.

    fields: prompt, messages and the columns of the row, for custom functions and for code. Status "error"
    means that scoring raised an exception or that the reference answer cannot be parsed; by_text tells the
    two apart. Raises ValueError for an unknown kind and for a function that returns no score in [0, 1],
    TypeError for a completion or an answer that is not a string.
    """
    _check(kind, completion, answer)

    def run(task: Scoring) -> Verdict:
        verdict = _verify(task.kind, task.completion, task.answer, fields, {}, task.opening)
        return event_loop().run(verdict) if _is_async(task.kind) else finish(verdict)

    task = Scoring(kind, completion, answer, fields, _opening(fields))
    verdict = run(task)
    if not verdict.failed:
        return verdict
    inquiry = task.inquire(verdict)
    reply = None
    while True:
        try:
            question = inquiry.send(reply)
        except StopIteration as end:
            return end.value
        reply = run(question)


def _opening(fields: dict, prefix: str = "") -> str:
    """Return the tag that opens the completion's thought in the prompt before the prefix, or ""."""
    prompt = fields.get("prompt")
    return opened_thought(prompt.removesuffix(prefix)) if isinstance(prompt, str) else ""


async def _verify(
    kind: str, completion: str, answer: str, fields: dict, code_limits: dict, opening: str, **scales: Scale
) -> Verdict:
    """Score a completion; code_limits: limits of verifiers.code.verify; opening: see final_answer().

    scales: reward.scale.
    """
    final = final_answer(completion, opening)
    terms = parts_of(kind)
    verdicts = {}
    for _, term in terms:
        if term in KINDS and final is None:
            verdicts[term] = Verdict(0.0, "no_answer", "the completion ends inside of its thought")
        else:
            text = final if term in KINDS else completion
            scale = scales.get(term, (0.0, 1.0))
            verdicts[term] = await _verify_part(term, text, answer, fields, code_limits, scale)
    return weighted_mean(kind, verdicts)


def weighted_mean(kind: str, verdicts: dict[str, Verdict]) -> Verdict:
    """Combine the verdicts of the terms of a kind. One that failed spoils the sum; by_text it scores 0."""
    if len(verdicts) == 1:
        return verdicts.popitem()[1]
    terms = parts_of(kind)
    rewards = {
        term: verdicts[term].reward for weight, term in terms if weight > 0 or not verdicts[term].failed
    }
    details = {name: value for verdict in verdicts.values() for name, value in verdict.parts.items()}
    for weight, term in terms:
        if weight > 0 and (verdict := verdicts[term]).failed:
            return Verdict(0.0, verdict.status, f"{term}: {verdict.detail}"[:MAX_DETAIL], rewards | details)
    mean = sum(weight * rewards.get(term, 0.0) for weight, term in terms) / sum(weight for weight, _ in terms)
    first = next(verdicts[term] for weight, term in terms if weight > 0)
    by_text = [f"{term}: {verdict.detail}" for term, verdict in verdicts.items() if verdict.by_text]
    detail = by_text[0][:MAX_DETAIL] if by_text else first.detail
    return Verdict(mean, first.status, detail, rewards | details, by_text=bool(by_text))


async def _verify_part(
    kind: str, completion: str, answer: str, fields: dict, code_limits: dict, scale: Scale
) -> Verdict:
    try:
        if kind in RULES:
            return RULES[kind](completion, answer)
        if kind == "code":
            return Verdict(*code.verify(completion, answer, **code_limits))
        if kind == "instructions":
            return _instructions(completion, answer, fields)
        if kind == "reasoning_gym":
            return Verdict(*verifiers.reasoning_gym.verify(completion, answer))
        function = load_function(kind)
        result = function.call(**function.arguments({**fields, "completion": completion, "answer": answer}))
        score, more = read_result(kind, await result if function.is_async else result, scale)
        parts = {f"{kind}/{name}": number for name, number in more.items()}
        return Verdict(score, "ok" if score == 1 else "wrong", parts=parts)
    except BadResult:
        raise
    except Exception as error:  # untrusted text can raise anything, for example MemoryError or RecursionError
        return Verdict(0.0, "error", explain(error)[:MAX_DETAIL])


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


# A minus is a sign unless it joins two terms, as in "3-5" or "x-5"; after "=", ":" and "####" a space may
# follow it. Commas separate groups of three digits. Digits are ASCII. Exponents have at most the 17 digits
# that Decimal can hold. Matching takes linear time, because the pattern cannot backtrack.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z.)\]}])[-+\u2212\u2013]|(?<=[=:#] )[-\u2212] |(?<=[=:#])[-\u2212] )?\$?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,17}(?![0-9]))?"
)
_TO_PLAIN = str.maketrans("\u2212\u2013", "--", "$, ")
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
    tail = marker + _GROUPED.sub(",", tail)
    match = _NUMBER.search(tail) if marker else None
    if match and _is_half_a_fraction(match, tail):
        return Verdict(0.0, "wrong")
    return _compare_numbers(match, answer.rpartition("####")[2])


def _rule_of(module) -> Callable[[str, str], Verdict]:
    return lambda completion, answer: Verdict(*module.verify(completion, answer))


def _instructions(completion: str, answer: str, fields: dict) -> Verdict:
    columns = {name: value for name, value in fields.items() if name not in COMMON_ARGUMENTS}
    return Verdict(*verifiers.instructions.verify(completion, answer, **columns))


# Rules are fast and need only the completion and the answer. Slow kinds may run for seconds.
RULES = {
    "exact": _exact, "characters": _characters, "chain": _rule_of(verifiers.chain),
    "verdict": _rule_of(verifiers.verdict), "numeric": _numeric, "gsm8k": _gsm8k,
    "math": _rule_of(verifiers.math),
}  # fmt: skip
assert tuple(RULES) == RULE_KINDS
TRIED = (*RULES, "reasoning_gym")  # kinds whose rows hold a right answer, which the start tries


# ------------------------------------------------------------------------------------------------------------
# 2 The pool
# ------------------------------------------------------------------------------------------------------------
RULE_CPU_S = 2.0  # processor time for a verdict of rules [ours]; a fifth of reward.timeout_s if that is more


@dataclass(frozen=True)
class Scoring(Task[Verdict]):
    """The task to score one completion. fields: JSON values of prompt, messages and columns of the row."""

    completion: str | list[int]
    answer: str
    fields: dict
    opening: str = ""  # tag that opens the thought at the end of the prompt
    prefix: str = ""  # data.answer_prefix, which the verifier reads before the completion

    reply_type = Verdict

    @property
    def is_fast(self) -> bool:
        """Tell whether all terms are rules, which need neither fields nor much time."""
        return _is_rule(self.kind)

    def extra_s(self, code_limits: dict) -> float:
        """Return the time limit of the tests of a program."""
        if all(term != "code" for _, term in parts_of(self.kind)):
            return 0.0
        return code.TOTAL_LIMITS * code_limits.get("timeout_s", 0.0)

    def cpu_s(self, timeout_s: float) -> float:
        """Return the processor time of rules, so that a bad completion does not delay the others for long."""
        return min(timeout_s / 2, max(RULE_CPU_S, timeout_s / 5)) if self.is_fast else 0.0

    def values(self, traits: Traits) -> list:
        """Return the task with the fields that the kind reads."""
        names = [] if self.is_fast else traits.fields
        fields = {name: value for name, value in self.fields.items() if names is None or name in names}
        return [self.kind, self.completion, self.answer, fields, self.opening, self.prefix]

    def prepare(self) -> Traits:
        """Import the verifiers and functions of the kind; run() reports an import that fails."""
        terms = [term for _, term in parts_of(self.kind)]
        if "math" in terms:
            with contextlib.suppress(Exception):
                verifiers.math.warm_up()
        if "reasoning_gym" in terms:
            with contextlib.suppress(Exception):
                verifiers.reasoning_gym.load()
        names_of_functions = functions_of(self.kind)
        functions = []
        for name in names_of_functions:
            with contextlib.suppress(Exception):
                functions.append(load_function(name))
        required = [name for function in functions for name in function.required]
        is_async = any(function.is_async for function in functions)
        if any(term in SLOW_KINDS for term in terms):  # would block the event loop, and reads all fields
            return Traits(None, required, is_async)
        names = [function.fields() for function in functions]
        is_whole = len(functions) == len(names_of_functions)
        fields = None if None in names or not is_whole else sorted(set(sum(names, [])))
        return Traits(fields, required, is_async, can_share=is_async)

    async def run(self, worker: Worker) -> Verdict:
        """Score the completion."""
        text = self.prefix + worker.decode(self.completion)
        try:
            return await _verify(
                self.kind, text, self.answer, self.fields, worker.code_limits, self.opening, **worker.scales
            )
        except BadResult as error:
            return Verdict(0.0, BAD_RESULT, str(error))

    def inquire(self, verdict: Verdict) -> Generator["Scoring", Verdict, Verdict]:
        """Find the cause of a failure: the completion, or anything else.

        The completion is the cause if it fails again while the reference answer, as the completion, does not
        fail. For example, the reference answer fails as well if a library, the sandbox or a column is missing
        or if the answer cannot be parsed, and a worker that the system killed does not fail again. A rule
        that has used up its processor time is not repeated, because it would use it up again. The terms of a
        sum are asked one by one, so that the other terms count.
        """
        verdicts = {}
        for _, term in parts_of(self.kind):
            reference = as_completion(term, self.answer)
            control = yield replace(self, kind=term, completion=reference, opening="", prefix="")
            if control.failed and term == self.kind:
                return verdict
            is_certain = term == self.kind and OF_CPU_TIME in verdict.detail
            again = verdict if is_certain else (yield replace(self, kind=term))
            verdicts[term] = replace(again, by_text=again.failed and not control.failed)
        return weighted_mean(self.kind, verdicts)


def as_completion(term: str, answer: str) -> str:
    """Return a completion that a verifier must be able to score: for most kinds the reference answer."""
    if term == "code":
        return "```python\npass\n```"
    if term == "reasoning_gym":
        with contextlib.suppress(ValueError):  # the verifier reports that an answer is not JSON
            return f"<answer>{verifiers.reasoning_gym.reference_of(answer)}</answer>"
    return {"math": rf"\boxed{{{answer}}}", "gsm8k": f"#### {answer.rpartition('####')[2]}"}.get(term, answer)


class IdleCheck(Scoring):
    """The task to run the tests of a code row on programs without any work; "wrong": one tests nothing."""

    async def run(self, worker: Worker) -> Verdict:
        """Run the tests."""
        try:
            reason = code.idle_test(self.answer, **worker.code_limits)
        except (RuntimeError, SyntaxError, ValueError):  # other checks explain the tests and the sandbox
            return Verdict(0.0, "no_answer")
        return Verdict(0.0, "wrong", reason) if reason else Verdict(1.0, "ok")


class ReferenceCheck(Scoring):
    """The task to score a reference answer as a completion; the detail of a valid one is its comparison."""

    async def run(self, worker: Worker) -> Verdict:
        """Score the reference answer."""
        verdict = await super().run(worker)
        if verdict.status == "ok" and self.kind in TRIED:
            return replace(verdict, detail="\n".join(_comparison_of(self.kind, self.answer)))
        if self.kind == "instructions" and not verdict.failed:
            shares = {text: _instructions(text, self.answer, self.fields).reward for text in TRIVIAL_TEXTS}
            return replace(verdict, detail=f"{COMPARISONS[self.kind]}\n{json.dumps(shares)}")
        return verdict


def _comparison_of(kind: str, answer: str) -> tuple[str, str]:
    """Return how a rule compares a reference answer, and the value, in which equal answers agree."""
    if kind == "math":
        return verifiers.math.comparison_of(answer)
    if kind == "reasoning_gym":
        row = verifiers.reasoning_gym.read_row(answer)
        return str(row["task"]), verifiers.reasoning_gym.reference_of(answer)
    if kind not in ("numeric", "gsm8k"):
        return "text", answer.strip()
    match = _NUMBER.search(answer.rpartition("####")[2])
    return "number", f"{Decimal(match[0].translate(_TO_PLAIN)).normalize():f}" if match else ""


@functools.cache
def _is_rule(kind: str) -> bool:
    return all(term in RULES for _, term in parts_of(kind))


class RewardPool(WorkerPool[Verdict]):
    """Score completions in worker processes while the caller does other work; see WorkerPool.

    RuntimeError in put(), poll() and collect() if a function of the user returns no score in its range.
    """

    def __init__(self, num_workers: int = 1, **options):
        super().__init__("reward", num_workers, **options)

    def submit(
        self,
        key: Hashable,
        kind: str,
        completion: str | list[int],
        answer: str,
        fields: dict | None = None,
        task: type[Scoring] = Scoring,
        prefix: str = "",
    ) -> None:
        """Queue one completion, see WorkerPool.put().

        A completion may be a list of token ids if the pool has a tokenizer; special tokens are dropped.
        fields: {name: JSON value} of prompt, messages and columns; a worker gets the fields that its kind
        takes. prefix: data.answer_prefix, the end of fields["prompt"], with which the judged text begins.
        """
        _check(kind, completion, answer, (str, list))
        if isinstance(completion, list) and not self.options.tokenizer:
            raise ValueError("token ids need a pool with a tokenizer; pass tokenizer= or text")
        fields = fields or {}
        self.put(key, task(kind, completion, answer, fields, _opening(fields, prefix), prefix))

    def _finish(self, item, reply) -> None:
        if reply.status == BAD_RESULT:
            task = item.task
            prompt = f", prompt {str(task.fields['prompt'])[:80]!r}" if "prompt" in task.fields else ""
            raise RuntimeError(
                f"reward function {reply.detail}. The row: reference answer {task.answer[:80]!r}{prompt}"
            )
        super()._finish(item, reply)


def worker_options(settings: "RewardSettings", log_path: str | os.PathLike | None) -> dict:
    """Return the options that all workers of a run share, see WorkerOptions."""
    return {
        "memory_bytes": int(settings.memory_gib * 2**30),
        "env": settings.env,
        "log_path": log_path,
        "scales": settings.scale,
        "code_limits": {
            "isolation": settings.sandbox,
            "timeout_s": settings.code_timeout_s,
            "memory_bytes": int(settings.code_memory_gib * 2**30),
        },
    }


def start_pool(
    settings: "RewardSettings", tokenizer, log_path: str | os.PathLike | None = None, num_workers: int = 0
) -> RewardPool:
    """Start the reward workers of this rank; num_workers overrides reward.num_workers unless 0."""
    decodes = tokenizer is not None and settings.decode == "workers"
    return RewardPool(
        num_workers or settings.num_workers,
        max_backlog=settings.max_backlog,
        timeout_s=settings.timeout_s,
        tokenizer=decoder_json(tokenizer) if decodes else "",
        **worker_options(settings, log_path),
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
# 3 Checks before a run: every reference answer can be right, every custom function works
# ------------------------------------------------------------------------------------------------------------
Row = tuple  # kind, reference answer, fields; data.answer_prefix, if there is one
MAX_TRIED = 250  # code rows whose doubtful tests run at the start: about 20 seconds of one core
COMPARISONS = {"code": "tests", "instructions": "constraints", ENVIRONMENT: "rewards of the environment"}
TRIVIAL_TEXTS = ("yes", "YES", "My answer is yes.")  # whose share of the constraints the start reports
ANSWER_FORMS = (r"\boxed{{{}}}", "<answer>{}</answer>", "#### {}")


def impossible_references(
    pool: RewardPool,
    rows: Sequence[Row],
    warn: Callable[[str], object] = print,
    comparisons: dict[int, tuple[str, str]] | None = None,
) -> dict[int, str]:
    r"""Return {index: reason} of the rows whose reference answer cannot be right by its own rule.

    Every completion of such a prompt would be wrong or an error, for example if a numeric answer is "five".
    Each rule has to accept the reference answer, written as a completion would write it, for example in
    \boxed{}. Constraints and tests only have to be readable. Terms of weight 0 are not checked.

    A timeout or a dead worker says nothing about an answer, for example on a busy machine. An answer that
    ends so is checked once more, alone. If the second check fails in the same way, the rows are not in the
    result, so that no prompt is lost, and warn() gets one line with the reason.

    comparisons: receives {index: (how the reference is compared, value)} of the other rows; value "": none.
    The value of tests and constraints is JSON: {constant completion: share of them that it meets}.
    """
    reasons = _idle_tests(pool, rows, warn)
    # {(kind, answer, fields if the kind reads fields, prefix): indices of rows}
    indices_of: dict[tuple, list[int]] = {}
    for index, (kind, answer, fields, *prefix) in enumerate(rows):
        for term in _weighted_terms(kind):
            if term == "code":
                try:
                    code.read_tests(answer, "")
                except Exception as error:  # broken data can raise anything
                    reasons[index] = f"{answer[:80]!r}: error: {explain(error)}"
            if term in TRIED or term == "instructions":
                of_row = "" if term in TRIED else json.dumps(fields, default=str)
                indices_of.setdefault((term, answer, of_row, *prefix), []).append(index)
    fields_of = {key: {} if key[0] in TRIED else rows[of_key[0]][2] for key, of_key in indices_of.items()}
    verdicts = _check_references(pool, fields_of)
    undecided = {key: verdict for key, verdict in verdicts.items() if _is_undecided(verdict)}
    if undecided:
        (term, answer, *_), verdict = next(iter(undecided.items()))
        num_rows = sum(len(indices_of[key]) for key in undecided)
        warn(
            f"{num_rows} reference answers could not be checked, and their prompts stay; the first, "
            f"{answer[:80]!r} of kind {term}, failed twice: {verdict.detail}. If their verdicts fail in the "
            "run as well, raise reward.timeout_s or reward.memory_gib"
        )
    for key, verdict in verdicts.items():
        term, answer, _, *prefix = key
        if key not in undecided and (verdict.failed or (verdict.status != "ok" and term in TRIED)):
            after = f" after data.answer_prefix {prefix[0]!r}" if any(prefix) else ""
            reason = verdict.detail or f"{term} does not accept the reference answer as a completion{after}"
            reasons |= dict.fromkeys(indices_of[key], f"{answer[:80]!r}: {verdict.status}: {reason}")
    pool.latencies = []  # only latencies of training are reported
    if comparisons is not None:
        details = {(i, key[0]): verdicts[key].detail for key, of_key in indices_of.items() for i in of_key}
        hows = {i: _how(i, row, details) for i, row in enumerate(rows) if i not in reasons}
        comparisons |= {i: how for i, how in hows.items() if how}
    return dict(sorted(reasons.items()))


def _how(index: int, row: Row, details: dict[tuple[int, str], str]) -> tuple[str, str] | None:
    """Return how the reference of a row is compared, and its value; None if a rule has no value."""
    kind, answer, *_ = row
    terms = _weighted_terms(kind)
    term = next((term for term in terms if term in TRIED), terms[0])
    if term == "code":
        return COMPARISONS[term], json.dumps(code.constant_shares(answer))
    if (index, term) not in details:
        return COMPARISONS.get(term, "the score of a function"), ""
    how, _, value = details[index, term].partition("\n")
    return (how, value) if value else None


def _weighted_terms(kind: str) -> list[str]:
    return [term for weight, term in parts_of(kind) if weight > 0]


def _idle_tests(pool: RewardPool, rows: Sequence[Row], warn: Callable[[str], object]) -> dict[int, str]:
    """Return {index: reason} of code rows with a test that tests nothing; warn() counts rows left untried."""
    indices_of: dict[str, list[int]] = {}
    for index, (kind, answer, *_) in enumerate(rows):
        if "code" in _weighted_terms(kind):
            with contextlib.suppress(Exception):  # broken data can raise anything; see read_tests()
                if code.doubtful_tests(answer):
                    indices_of.setdefault(answer, []).append(index)
    if not indices_of:
        return {}
    tried = list(indices_of)[:: -(-len(indices_of) // MAX_TRIED)]
    if num_left := len(indices_of) - len(tried):
        warn(
            f"the tests of {num_left:,} of {len(indices_of):,} code answers may test nothing, "
            "and were not tried: the start tries an even sample"
        )
    for answer in tried:
        pool.submit(answer, "code", "", answer, task=IdleCheck)
    return {
        index: f"{answer[:80]!r}: {verdict.detail}"
        for answer, verdict in pool.collect().items()
        for index in indices_of[answer]
        if verdict.status == "wrong"
    }


def _check_references(pool: RewardPool, fields_of: dict[tuple, dict]) -> dict:
    """Return {(kind, answer, ...): Verdict} of reference answers as completions; see impossible_references().

    fields_of: {(kind, answer, ...): fields}.
    """

    def submit(key: tuple) -> None:
        term, answer, _, *prefix = key
        form = "".join(prefix) + as_completion(term, answer)
        pool.submit(key, term, form, answer, fields_of[key], task=ReferenceCheck)

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


def check_functions(kinds: Iterable[str], rows: Sequence[Row], settings: "RewardSettings") -> list[str]:
    """Call each custom function of the kinds and rows once in a worker; ValueError names a broken function.

    A function is called with the first row of its kind, or else with the first row of all, and with the
    reference answer as the completion; if the score is 0, also in the usual forms (ANSWER_FORMS). A second
    call shows the score of an empty completion. All rows of its kind must have the columns that it requires.
    Returns a line with the scores of each function, for the console. If a kind runs programs, the sandbox is
    started.
    """
    kinds = dict.fromkeys([*kinds, *(kind for kind, _, _ in rows)])
    first_row = {kind: row for kind, *row in reversed(rows)}
    kind_of = {name: kind for kind in reversed(kinds) for name in functions_of(kind)}
    if any(term == "code" for kind in kinds for _, term in parts_of(kind)):
        sandbox.check_sandbox(settings.sandbox)
    if not kind_of:
        return []
    if not rows:
        raise ValueError("there are no prompts to try the reward functions on: are the datasets empty?")
    tried = {name: first_row.get(kind, rows[0][1:]) for name, kind in kind_of.items()}
    with start_pool(settings, None, num_workers=1) as pool:
        for name, (answer, fields) in tried.items():
            pool.submit(name, name, answer, answer, fields)
        verdicts = pool.collect()
        for name in [name for name, v in verdicts.items() if v.reward == 0 and not v.failed]:
            answer, fields = tried[name]
            for form in ANSWER_FORMS:
                pool.submit(form, name, form.format(answer), answer, fields)
            verdicts[name] = max(pool.collect().values(), key=operator.attrgetter("reward"))
        for name in [name for name, verdict in verdicts.items() if not verdict.failed]:
            pool.submit(f"{name}, empty", name, "", *tried[name])
        of_empty = pool.collect()
    lines = []
    for name, verdict in verdicts.items():
        answer, _ = tried[name]
        if verdict.failed:
            raise ValueError(
                f"reward function {name}: {verdict.detail}. It was called with the reference answer "
                f"{answer[:80]!r} as the completion"
            )
        line = f"{name} gives the first reference answer {verdict.reward:.2f}"
        score = of_empty[f"{name}, empty"].reward
        line += f", and an empty completion {score:.2f}" if score > 0 else ""
        forms = ", ".join(form.format("...") for form in ANSWER_FORMS)
        suspicion = f"warning: {line}, also as {forms}: suspicious, because a right answer should score"
        lines.append(line if verdict.reward > 0 else suspicion)
    for index, (kind, _, fields) in enumerate(rows):
        for name in functions_of(kind):
            missing = set(pool.traits[name].required) - {*fields, "completion", "answer"}
            if missing:
                raise ValueError(
                    f"reward function {name}: its parameter {min(missing)} is not a column of prompt "
                    f"{index + 1} of {len(rows)}, {str(fields.get('prompt'))[:80]!r}"
                )
    return lines
