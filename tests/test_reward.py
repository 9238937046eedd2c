"""reward.py: reference answers are right for themselves; the pool survives hostile text and dying workers.

math-verify and the worker processes are real.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import psutil
import pytest
from conftest import NEEDS_BUBBLEWRAP, alive
from conftest import SHARED_DATA as DATA
from helpers import FakeRanks, make_config

import lifecycle
import reward
import workers
from data.prompts import Prompt
from data.stream import LoadedSets, digest_of
from reward import RewardPool, Verdict, impossible_references, verify
from runtime.user_files import digest_of_file
from tests.patience import limit, wait_until
from verifiers import expressions
from verifiers.answer import final_answer

OK, WRONG, NO_ANSWER = Verdict(1.0, "ok"), Verdict(0.0, "wrong"), Verdict(0.0, "no_answer")
SLOW = [rf"\exp(\exp(\exp({number})))" for number in (96, 97)]
HANGS = r"\boxed{\exp(\exp(\exp(99)))}"  # sympy computes this power in C for hours
TOO_LARGE = [  # wrong without a look at their value, so that no completion escapes its advantage
    "9^{9^{9^9}}", "{9}^{{9}^{9}}", "(9^9)^{9^9}", "9**9**9**9", "2^{2^{2^{99}}}", "1.5^{999999}",
    "x^{999999}", "99999999!", "(9!)!", "9!!!!",
    "(10^9)!", r"(2\cdot 10^8)!", r"\prod_{k=1}^{10^7} k", r"\binom{10^9}{5\cdot 10^8}",
    "(" * 99 + "1" + ")" * 99, r"\frac{1}{" * 50 + "2" + "}" * 50,
    r"7^{7^{7^{7}}} \bmod 10", r"\sqrt{" * 50 + "2" + "}" * 50,
    "x=" * 900, r"\sin 1 " * 550, "13 thousand " * 320, "|1|" * 300, r"\left|1\right|" * 250, "x_1=" * 900,
]  # fmt: skip


def rows(name: str) -> list[dict]:
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"needs {path}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def score(items: list[tuple[str, str, str]], **options) -> list[Verdict]:
    """Return the verdicts of (kind, completion, answer) from a pool of two workers."""
    with RewardPool(2, **options) as pool:
        for index, item in enumerate(items):
            pool.submit(index, *item)
        return list(pool.collect().values())


def children(parent: int) -> list[int]:
    """Return the process ids of the living reward workers of a process, oldest first.

    A worker is a child of a guard, and the guard is a child of the process.
    """
    pids = []
    for guard in psutil.Process(parent).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # the guard ended meanwhile
            if "--worker" in guard.cmdline():  # the server of tests/preloaded.py is a child as well
                pids += [child.pid for child in guard.children()]
    return sorted(pids)


# ---- the kinds ---------------------------------------------------------------------------------------------

CASES = [
    ("exact", " abc\n", "abc", OK), ("exact", "Abc", "abc", WRONG), ("exact", " \n", "abc", NO_ANSWER),
    ("characters", "abd", "abc", Verdict(2 / 3, "wrong")), ("characters", " \n", "abc", NO_ANSWER),
    ("numeric", "first 7, then 1,234,567.50 dollars", "1234567.5", OK), ("numeric", "it is -$5", "-5", OK),
    ("numeric", "it is \u22125", "-5", OK), ("numeric", "8-5", "5", OK), ("numeric", "x = -5", "5", WRONG),
    ("numeric", "50%", "50", OK), ("numeric", "1.5e3", "1500", OK), ("numeric", ".5", "0.50", OK),
    ("numeric", "1,2,3", "3", OK), ("numeric", "1,2345", "12345", WRONG),
    ("numeric", "version 3.1.4", "4", OK), ("numeric", "0.3333333", "0.333333333", OK),
    ("numeric", "0.3333", "0.333333333", WRONG), ("numeric", "10000001", "10000000", WRONG),
    ("numeric", "0.0000001", "0", WRONG), ("numeric", "-0", "0", OK), ("numeric", "none", "5", NO_ANSWER),
    ("numeric", "it is 70{,}000", "70000", OK), ("numeric", r"it is $1,\!234\,567$", "1234567", OK),
    ("numeric", "x = \u20135", "-5", OK), ("numeric", "x = - 5", "-5", OK),
    ("numeric", "x = 8 - 5", "5", OK), ("numeric", "they are:\n- 5", "5", OK),
    ("gsm8k", "#### - 5", "-5", OK), ("numeric", "pages 3\u20135", "5", OK), ("numeric", "7/2", "2", WRONG),
    ("numeric", "7/2 = 3.5", "3.5", OK), ("numeric", "5 km/h", "5", OK),
    ("numeric", "\u0665", "5", NO_ANSWER), ("numeric", "\x005\x00", "5", OK),
    ("numeric", "1e999999999", "1e999999999", OK), ("numeric", "1e-999999999", "5.5", WRONG),
    ("gsm8k", "3 + 4 = 7\n#### 7", "so <<3+4=7>>7\n#### 7", OK), ("gsm8k", "#### 7 no, #### 8", "7", WRONG),
    ("gsm8k", "#### $70,000.00", "70000", OK), ("gsm8k", "7 ####", "7", NO_ANSWER),
    ("gsm8k", "#### 70{,}000", "70000", OK), ("gsm8k", "#### 70{,}000", "70", WRONG),
    ("gsm8k", "#### 7/2", "7", WRONG),
    ("math", r"first \boxed{4}, finally \boxed{3}", "4", WRONG),
    ("math", r"\boxed{4} and then \boxed{\frac{1}{", "4", NO_ANSWER),
    ("math", r"\boxed{4}, or rather \boxed{\left\{ 5 \right.}", "4", WRONG),
    ("math", r"\boxed{\boxed{4}}", "4", OK),
    ("math", r"\boxed{4.}", "4", OK),
    ("math", r"\boxed{\left\{ 1, 2 \right\}}", r"\{2, 1\}", OK),
    ("math", r"\boxed{(x+1)^2}", "x^2+2x+1", OK),
    ("math", r"\boxed{}", "4", NO_ANSWER),
    ("math", r"\boxed{7^{7^{7}} \bmod 10}", "10", WRONG),
    ("math", "The final answer is $4$. I hope it is correct.", "4", OK),
    ("math", "Therefore x is 4", "4", OK),
    ("math", "The answer is \u22125.", "-5", OK),
    ("math", "The answer is \u22125.", "5", WRONG),
    ("math", "I do not know.", "4", NO_ANSWER),
    ("math", r"it is p \to q", r"p \to q", NO_ANSWER),
    ("math", r"\boxed{" + "p" * 5000 + "}", r"p \to q", WRONG),
    ("math", r"\boxed{" + "{" * 3000 + "4" + "}" * 3000 + "}", "4", WRONG),
    ("math", "5" * 5000 + "4", "4", NO_ANSWER),
]  # fmt: skip


@pytest.mark.parametrize("kind, completion, answer, expected", CASES)
def test_verdicts(kind, completion, answer, expected):
    assert verify(kind, completion, answer) == expected


RIGHT = {  # {kind: (reference answer, right completion, wrong completion)}
    "exact": ("Rome", "Rome", "Oslo"),
    "characters": ("Rome", "Rome", "####"),
    "numeric": ("4", "It is 4.", "It is 5."),
    "gsm8k": ("so 4\n#### 4", "#### 4", "#### 5"),
    "math": ("4", r"The answer is 4.", r"So \boxed{5}."),
    "verdict": ("Worse", "Verdict: Worse", "Verdict: Better"),
    "chain": ("b-5*3+4=7", "b-5*3+4=7", "b-5*3+4=8"),
    "code": ('["assert f(1) == 2"]', "```python\nf = lambda x: x + 1\n```", "```python\nf = abs\n```"),
    "instructions": ('[{"id": "punctuation:no_comma"}]', "Yes it is", "Yes, it is"),
}
TAGS = [
    ("<think>", "</think>"), ("<thinking>\n", "\n</thinking>\n\n"), ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ("Let me see. <reasoning>", "</reasoning>"), ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
]  # fmt: skip


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=NEEDS_BUBBLEWRAP if kind == "code" else ()) for kind in RIGHT]
)
def test_the_answer_of_every_kind_is_the_text_after_the_thought(kind):
    """The same holds if the prompt opens the thought, so that the completion has the closing tag or none."""

    def rewards(pairs: list[tuple[str, str]]) -> list[tuple[float, str]]:
        verdicts = [verify(kind, text, answer, prompt=prompt) for prompt, text in pairs]
        return [(verdict.reward, verdict.status) for verdict in verdicts]

    answer, right, wrong = RIGHT[kind]
    for opening, closing in TAGS:
        prompt = "Hi?<|im_start|>assistant\n" + opening
        for before, end in ((right, wrong), (wrong, right)):
            texts = [("Hi?", opening + before + closing + end), (prompt, before + closing + end)]
            texts += [("Hi?", before + closing + end), ("Hi?", opening + closing + end)]
            texts += [("Hi?", opening + "a" + closing + opening + before + closing + end), ("Hi?", end)]
            assert rewards(texts) == [(1.0, "ok") if end is right else (0.0, "wrong")] * 6
        cut = [("Hi?", opening + right), ("Hi?", wrong + opening + right), (prompt, right)]
        cut += [("Hi?", opening + "a" + closing + opening + right), (prompt, opening + right), (prompt, "")]
        if opening != TAGS[0][0]:
            cut.append(("Hi?", opening + "</think>" + right))
        assert rewards(cut) == [(0.0, "no_answer")] * len(cut)
        done = [(prompt + closing, right), (f"Use {opening} and {closing}.\nHi?", right)]
        assert rewards([*done, (f"Think after {opening}. Hi?", right)]) == [(1.0, "ok")] * 3


def test_a_second_closing_tag_discards_no_answer():
    assert final_answer("2</think>It is 4.</think>", "<think>") == "It is 4.</think>"
    assert final_answer("2</think>It is 4.</think>") == "It is 4.</think>"
    assert final_answer("<think>2</think>It is <think>5</think>4.") == "4."


def test_workers_know_the_thought_that_the_prompt_opened(tmp_path):
    """A function of your own gets the whole text; the rule of a sum judges the text after the thought."""
    (tmp_path / "own.py").write_text("def score(completion):\n    return completion.startswith('so')\n")
    name = f"{tmp_path}/own.py:score"
    for kind, rewards in (("numeric", [0.0, 1.0, 1.0]), (f"1*numeric + 1*{name}", [0.5, 1.0, 1.0])):
        with RewardPool() as pool:
            pool.submit("cut", kind, "so 4", "4", {"prompt": "2 + 2?\n<think>\n"})
            pool.submit("ended", kind, "so 5</think>4", "4", {"prompt": "2 + 2?\n<think>\n"})
            pool.submit("none", kind, "so 4", "4", {"prompt": "2 + 2?\n<think>\n\n</think>\n"})
            verdicts = pool.collect()
        assert [verdict.reward for verdict in verdicts.values()] == rewards
        assert not any(verdict.failed for verdict in verdicts.values())


BAD_REFERENCES = [
    ("exact", "  "), ("characters", "  "), ("numeric", "five"), ("numeric", "1 or 2"), ("gsm8k", "#### "),
    ("math", " "), ("math", r"\frac{1}{"), ("math", r"}, {"), ("math", r"$\text{ }$"), ("math", "?"),
]  # fmt: skip


@pytest.mark.parametrize("kind, answer", BAD_REFERENCES)
def test_bad_reference_answer_is_an_error_whatever_the_completion(kind, answer):
    for completion in ("5", rf"\boxed{{{answer}}}", "#### 5"):
        verdict = verify(kind, completion, answer)
        assert (verdict.reward, verdict.status) == (0.0, "error") and "reference answer" in verdict.detail


def test_callers_mistakes_raise():
    with RewardPool() as pool:
        for call in (verify, lambda *item: pool.submit("key", *item)):
            with pytest.raises(ValueError, match="numeric"):  # the nearest kind
                call("numerc", "5", "5")
            for item in ((5, "5"), ("5", 5.0)):
                with pytest.raises(TypeError, match="str"):
                    call("exact", *item)
        pool.submit("key", "exact", "5", "5")
        with pytest.raises(ValueError, match="'key'"):
            pool.submit("key", "exact", "6", "6")
        assert pool.collect() == {"key": OK}
        pool.submit("key", "exact", "6", "5")  # a key can be used again after collect()
        assert pool.collect() == {"key": WRONG}
        assert pool.collect() == {} and pool.poll() == 0
    with pytest.raises(ValueError, match="closed"):
        pool.submit("key", "exact", "5", "5")
    for options in ({"num_workers": 0}, {"timeout_s": 0}):
        with pytest.raises(ValueError, match="positive"):
            RewardPool(**options)


def test_import_is_cheap_and_verify_is_quiet():
    """After the warm-up, usual verdicts of math import nothing within their time limits."""
    code = (
        "import sys, reward; assert not {'sympy', 'math_verify', 'torch'} & set(sys.modules);"
        "reward.verify('exact', 'a', 'a'); assert 'sympy' not in sys.modules;"
        "reward.verifiers.math.warm_up(); modules = set(sys.modules);"
        r"assert reward.verify('math', r'\boxed{\frac{1}{}}', '5').status == 'wrong';"
        r"[reward.verify('math', a, b) for a in ('it is 5', r'\boxed{x+1}') for b in '5x'];"
        "assert set(sys.modules) == modules"
    )
    folder = Path(reward.__file__).parent
    result = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


# ---- reference data ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gsm8k_reference_answers():
    """Every reference answer is right, and wrong with another sign, digit or value."""
    answers = [row["answer"] for row in rows("gsm8k_test")]
    assert len(answers) == 1319
    wrong = []
    for answer in answers:
        solution, _, number = answer.rpartition("#### ")
        value = int(number.replace(",", ""))
        corrupted = {str(value + 1), "1" + number, str(-value or 1)}
        if len(number) > 1 and number[0] != number[1] and number[:2].isdigit():
            corrupted.add(number[1] + number[0] + number[2:])
        wrong += [("gsm8k", solution + "#### " + other, answer) for other in corrupted]
    assert set(score([("gsm8k", answer, answer) for answer in answers])) == {OK}
    assert len(wrong) > 4000 and set(score(wrong)) == {WRONG}


SLOW_SET = pytest.param("math500", marks=pytest.mark.slow)
SETS = ["aime24", "amc23", SLOW_SET]


def last_digit_up(answer: str) -> str:
    return re.sub(r"[0-9](?=[^0-9]*$)", lambda digit: str((int(digit[0]) + 1) % 10), answer)


@pytest.fixture(scope="class")
def verdicts():
    """Return the function from pairs (completion, answer) to verdicts."""
    with RewardPool(2) as pool:

        def verdicts(pairs: Iterable[tuple[str, str]]) -> list[Verdict]:
            for index, (completion, answer) in enumerate(pairs):
                pool.submit(index, "math", completion, answer)
            return list(pool.collect().values())

        yield verdicts


class TestReferences:
    """Answers and solutions of benchmarks; the workers, which import math-verify, serve all tests."""

    @pytest.mark.parametrize("name", SETS)
    def test_math_reference_answers(self, name, verdicts):
        answers = [str(row["answer"]) for row in rows(name)]
        assert set(verdicts((rf"so it is $\boxed{{{answer}}}$.", answer) for answer in answers)) == {OK}

    @pytest.mark.parametrize("name", SETS)
    def test_math_corrupted_answers(self, name, verdicts):
        answers = [answer for row in rows(name) if last_digit_up(answer := str(row["answer"])) != answer]
        assert len(answers) == {"math500": 489, "aime24": 30, "amc23": 40}[name]
        results = verdicts((rf"\boxed{{{last_digit_up(answer)}}}", answer) for answer in answers)
        assert {answer for answer, verdict in zip(answers, results) if verdict != WRONG} == set()

    @pytest.mark.parametrize("name", [SLOW_SET, "aime24"])
    def test_math_reference_solutions(self, name, verdicts):
        solved = [row for row in rows(name) if r"\boxed" in row["solution"]]
        assert len(solved) == {"math500": 500, "aime24": 29}[name]
        results = verdicts((row["solution"], row["answer"]) for row in solved)
        assert {row["answer"] for row, verdict in zip(solved, results) if verdict != OK} == set()


# ---- pairs, large expressions, references ------------------------------------------------------------------


PAIRS_FILE = Path(__file__).parent / "pairs" / "math.jsonl"
PAIRS = [json.loads(line) for line in PAIRS_FILE.read_text().splitlines()]


@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in PAIRS}))
def test_pairs_of_reference_and_completion_have_the_verdict_by_hand(kind):
    pairs = [pair for pair in PAIRS if pair["kind"] == kind]
    verdicts = [verify("math", pair["completion"], pair["gold"]) for pair in pairs]
    wrong = [pair for pair, verdict in zip(pairs, verdicts) if bool(verdict.reward) != pair["right"]]
    assert not wrong and not any(verdict.status in ("error", "timeout") for verdict in verdicts)


ATOMS = (
    "x_1", "101_2", "(110)_2", r"110_{\text{two}}", r"\sin 30^\circ", r"\cos{45^{\circ}}", r"90^\circ C",
    "x'", r"\log_2 8", "10{,}000", r"2 \frac{1}{2}", r"0.\overline{3}", r"\mathrm{e}", r"13\text{ thousand}",
)  # fmt: skip


@pytest.mark.parametrize("outer", [r"\frac{%s}{2}", r"\sqrt{%s}", "x_{%s}", "{%s}^{2}", r"\frac{1}{%s + 1}"])
def test_rewritten_notations_keep_the_braces_of_what_is_around_them(outer):
    for atom in ATOMS:
        text = re.sub(r"\\[{}]", "", expressions.plain_latex(outer % atom))
        depths = list(accumulate((char == "{") - (char == "}") for char in text))
        assert min(depths) >= 0 == depths[-1], atom


@pytest.mark.parametrize("content", TOO_LARGE)
def test_an_expression_that_is_too_large_is_wrong_at_once(content):
    started = time.perf_counter()
    assert verify("math", rf"\boxed{{{content}}}", "5") == WRONG
    assert time.perf_counter() - started < limit(1)
    assert verify("math", rf"\boxed{{{content}}}", content) == OK, "as text"


REFERENCES = [  # from OlympiadBench and from collections of college mathematics
    r"\text{monotonically decreasing}", "y = C e^{x}", r"12 \mathrm{~cm}", r"(-\infty, 3) \cup (5, \infty)",
    r"5 \text{ apples}", "A, C", r"\text{No solution}", "x=1, y=2", r"\frac{1}{2} \text{ or } 3", "3:2",
    "50%", r"\$5", r"$11^{\circ}$", "None", r"$(1,8,19), (2,7,13), (4,5,7)$", "5,000", r"\mathbb{R}",
    r"9.8 \mathrm{~m}/\mathrm{s}^{2}", r"\langle 1,2,3\rangle", r"y(x)=c_1 e^{-x}+c_2 e^{2x}", r"\ln|x|+C",
    r"x \in [1,2)", r"a \mid b", r"n=3k+1 \text{ for some integer } k", r"k=0, \pm 1", r"\lim_{x\to 0} f(x)",
]  # fmt: skip


def test_impossible_references_have_a_reason():
    possible = [("math", answer, {}) for answer in REFERENCES]
    possible += [("gsm8k", "3 + 4 = 7\n#### 7", {}), ("exact", "a b", {}), ("numeric", " 5%", {})]
    possible += [("code", '["assert f(1) == 1"]', {}), ("own:function", "?", {})]
    possible += [("0.5*gsm8k + 0.5*characters", "7", {}), ("0*numeric + 1*exact", "five", {})]
    impossible = {
        ("math", r"\frac{1}{", "braces"),
        ("math", "?", "letter"),
        ("exact", " ", "empty"),
        ("numeric", "five", "number"),
        ("0.9*exact + 0.1*gsm8k", "five", "number"),
        ("code", "print(1)", "JSON"),
        ("code", '{"inputs": ["1", "2"], "outputs": ["1"]}', "outputs"),
    }
    items = possible + [(kind, answer, {}) for kind, answer, _ in impossible] * 2
    with RewardPool(1, timeout_s=limit(60)) as pool:
        reasons = impossible_references(pool, items)
        assert (pool.latencies, pool.collect()) == ([], {})
        after = impossible_references(pool, [(k, "4", {}, "Answer: ") for k in ("exact", "numeric", "math")])
    assert list(after) == [0] and "data.answer_prefix 'Answer: '" in after[0]
    assert list(reasons) == list(range(len(possible), len(items)))
    for index, (_, answer, word) in zip(reasons, 2 * list(impossible)):
        assert word in reasons[index] and repr(answer) in reasons[index]


def test_impossible_rows_are_dropped_and_again_on_resume(tmp_path, monkeypatch):
    """One file serves as two held-out sets with two verifiers; on resume only held-out sets may be new."""
    FakeRanks(1).install(monkeypatch)
    config = make_config(f"run.dir={tmp_path}")

    def prompts_of(name: str, kind: str) -> tuple[list[Prompt], list[list[int]]]:
        return [Prompt("q", r"\frac{1}{2}", kind, name), Prompt("r", "2", kind, name)], [[1], [2]]

    def texts_after_drop(checkpoint: Path | None, **kinds: str) -> dict[str, str]:
        sets = {name: prompts_of(name, kind) for name, kind in kinds.items()}
        loaded = LoadedSets(*sets.pop("train"), None, sets, [], [])
        lifecycle.drop_impossible(loaded, pool, config, checkpoint)
        if checkpoint is None:  # a later launch may be refused, and then writes no list
            lifecycle.write_dropped(tmp_path / "dropped_rows.jsonl", loaded.dropped)
            saved.append(digest_of(loaded.train))
        return {name: "".join(p.text for p in prompts) for name, (prompts, _) in loaded.by_name().items()}

    checkpoint = tmp_path / "checkpoint"
    saved: list[str] = []
    monkeypatch.setattr(lifecycle, "prompts_of_checkpoint", lambda folder: saved[-1])
    with RewardPool(1, timeout_s=limit(60)) as pool:
        texts = texts_after_drop(None, train="math", a="math", b="numeric")
        assert texts == {"": "qr", "a": "qr", "b": "r"}
        (row,) = map(json.loads, (tmp_path / "dropped_rows.jsonl").read_text().splitlines())
        assert (row["set"], row["kind"], row["prompt"]) == ("b", "numeric", "q")
        kinds = {"b": "numeric", "c": "exact", "d": "0.5*exact + 0.5*numeric"}
        texts = texts_after_drop(checkpoint, train="math", **kinds)
        assert texts == {"": "qr", "b": "r", "c": "qr", "d": "r"}
        (tmp_path / "dropped_rows.jsonl").write_text(json.dumps(row | {"kind": "math"}) + "\n")
        texts = texts_after_drop(checkpoint, train="math", b="exact")
        assert texts == {"": "r", "b": "qr"}, "a resumed run trains on the prompts of the first start"
        row |= {"set": "train", "kind": "math"}
        (tmp_path / "dropped_rows.jsonl").write_text(json.dumps(row) + "\n")
        assert texts_after_drop(checkpoint, train="exact") == {"": "qr"}  # refused later, as other prompts
        assert texts_after_drop(checkpoint, train="math") == {"": "r"}, "the list outlives a refused resume"
    checked: list[list[str]] = []
    spy = lambda pool, rows, *rest: checked.append([row[0] for row in rows]) or {}  # noqa: E731
    monkeypatch.setattr(lifecycle, "impossible_references", spy)
    (tmp_path / "dropped_rows.jsonl").unlink()
    for resume in ("auto", "weights"):
        config = make_config(f"run.dir={tmp_path}", f"checkpoint.resume={resume}")
        for train in ("math", "exact"):
            texts_after_drop(checkpoint, train=train, a="numeric")
    held_out = ["numeric"] * 2
    assert checked == [held_out, ["exact"] * 2 + held_out] * 2, "the checkpoint's prompts need no check"


# ---- the pool ----------------------------------------------------------------------------------------------


def hostile_items(count: int) -> list[tuple[str, str, str]]:
    rng = random.Random(0)
    n = rng.randint
    templates = [
        lambda: "",
        lambda: "9" * n(1, 6000),
        lambda: f"1e{n(1, 10**9)}",
        lambda: rf"\boxed{{{n(-9, 9)}e{'9' * n(1, 30)}}}",
        lambda: r"\boxed{" * n(1, 200),
        lambda: "}" * n(1, 50) + r"\boxed{5" + "{" * n(0, 9) + "}" * n(0, 9),
        lambda: r"\boxed{" + r"\frac{1}{" * (k := n(1, 6)) + "2" + "}" * k + "}",
        lambda: "\x00" * n(1, 9) + "5" + chr(n(0, 31)) + r"\boxed{" + chr(n(0, 31)) + "5}",
        lambda: r"\boxed{" + chr(n(0xD800, 0xDFFF)) + "5}" + chr(n(0xD800, 0xDFFF)),
        lambda: "#### \u202e" + str(n(0, 99)) + "\u202c" + chr(n(0x660, 0x669)),
        lambda: "".join(chr(n(1, 0xD7FF)) for _ in range(n(1, 60))),
        lambda: "".join(rng.choice("$\\{}[]()^_&%#0159xyi,.=+- \n") for _ in range(n(1, 40))),
        lambda: r"\def\x{\x\x}\x $\input{/etc/passwd}$ \write18{exit} \boxed{\x}",
        lambda: '"], "ok"]\n[1.0, "ok", ""]\n' + "\r\n" * n(1, 5),
        lambda: r"\boxed{__import__('os')._exit(0)}" + "import os; os._exit(1)",
        lambda: rf"\boxed{{\frac{{0}}{{0}} + \infty - \infty \cdot {n(0, 9)}}}",
        lambda: "$" * n(1, 99) + r"\[" * n(1, 99) + "answer: " * n(1, 99),
    ]
    rare = [
        lambda: "7" * 1_000_000,
        lambda: r"\boxed{" * 150_000,
        lambda: "1,234 " * 200_000,
        lambda: "\ud800\x00" * 100_000,
        lambda: r"\boxed{" + r"\frac{1}{" * 3000 + "5" + "}" * 3000 + "}",
        lambda: r"\boxed{" + "1+" * 500_000 + "1}",
    ]
    answers = {"gsm8k": "so 5\n#### 5", "math": r"\frac{10}{2}"}  # other kinds: "5"
    items = []
    for index in range(count):
        kind = rng.choice(3 * ("exact", "characters", "numeric", "gsm8k") + ("math",))  # math is slow
        make = rng.choice(rare if index % (count // 25) == 0 else templates)
        items.append((kind, make(), answers.get(kind, "5")))
    for index, content in enumerate(SLOW):  # seconds each, because a late text is tried twice
        items[(2 * index + 1) * count // 4] = ("math", rf"\boxed{{{content}}}", "5")
    return items


@pytest.mark.slow
def test_a_thousand_hostile_completions():
    items = hostile_items(1_000)
    with RewardPool(2, timeout_s=limit(1)) as pool:
        for key, item in enumerate(items):
            pool.submit(key, *item)
        verdicts = pool.collect()
        assert list(verdicts) == list(range(1_000))
        statuses = {verdict.status for verdict in verdicts.values()}
        assert statuses <= {"ok", "wrong", "no_answer", "timeout", "error"}
        for verdict in verdicts.values():
            assert (verdict.reward == 1) == (verdict.status == "ok") and 0 <= verdict.reward <= 1
        late = [key for key, verdict in verdicts.items() if verdict.status == "timeout"]
        assert {250, 750} <= set(late)
        assert len(late) == pool.num_timeouts < 25, "only timeouts end a worker"
        # A late text is tried twice; a text that a busy machine delays is right at its second try.
        assert len(late) <= pool.num_restarts < 50
        assert pool.num_errors == sum(verdict.status == "error" for verdict in verdicts.values())
        assert len(children(os.getpid())) <= 2, "killed workers are gone; a new worker may be about to start"
        for key in range(50):
            pool.submit(key, "math", r"\boxed{\frac{10}{2}}", "5")
        assert set(pool.collect().values()) == {OK}


def test_pool_agrees_with_verify_in_any_order():
    cases = random.Random(0).sample(CASES, len(CASES))
    assert score([case[:3] for case in cases]) == [case[3] for case in cases]


@pytest.mark.parametrize("mask", [False, True])
def test_timeout_holds_when_the_caller_ignores_or_blocks_alarms(mask):
    old = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    if mask:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    try:
        assert [verdict.status for verdict in score([("math", HANGS, "5")], timeout_s=limit(0.3))] == [
            "timeout"
        ]
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.signal(signal.SIGALRM, old)


@pytest.mark.slow
def test_stopped_worker_is_replaced(monkeypatch):
    monkeypatch.setattr(workers, "START_GRACE_S", limit(3))
    with RewardPool(1, timeout_s=limit(0.5)) as pool:
        assert wait_until(lambda: children(os.getpid()))
        (stopped,) = children(os.getpid())
        os.kill(stopped, signal.SIGSTOP)
        big = "7" * 1_000_000  # fills the pipe, which the stopped child does not empty
        for n in range(3):
            pool.submit(n, "exact", big, big)
        verdicts = pool.collect()
        assert [verdicts[n].status for n in range(3)] == ["ok"] * 3, "the first is repeated"
        assert not alive(stopped) and (pool.num_timeouts, pool.num_restarts) == (0, 1)


@pytest.mark.slow
def test_workers_are_not_late_while_the_caller_is_busy(monkeypatch):
    monkeypatch.setattr(workers, "START_GRACE_S", 0.0)
    monkeypatch.setattr(workers, "GRACE_S", 0.0)
    timeout_s = limit(0.5)
    with RewardPool(1, timeout_s=timeout_s) as pool:
        big = "7" * 1_000_000  # does not fit the pipe, so most of the text waits for the next poll
        for n in range(3):
            pool.submit(n, "exact", big, big)
        time.sleep(timeout_s + 0.2)
        assert pool.collect() == dict.fromkeys(range(3), OK)


@pytest.mark.slow
def test_submit_and_poll_do_not_wait():
    with RewardPool(1, timeout_s=limit(20)) as pool:
        pool.submit("hangs", "math", HANGS, "5")
        start = time.monotonic()
        for n in range(20):
            pool.submit(n, "exact", "7" * 1_000_000, "7")
        assert pool.poll() == 21
        assert time.monotonic() - start < limit(10)  # a call that waits for the child waits twice as long


@pytest.mark.slow
def test_a_slow_import_is_no_timeout(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text(
        f"import time; time.sleep({limit(1)})\n"
        "class grader: sympy_numeric_eq = None\n"
        "def LatexExtractionConfig(**options): pass\n"
        "def parse(text, *args, **options): return [len(text)]\n"
        "def verify(gold, parsed, **options): return gold == parsed\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert score([("math", r"\boxed{7}", "7")], timeout_s=limit(0.5)) == [OK]


def test_a_function_that_cannot_be_imported_hides_no_other(tmp_path):
    """The first function waits in an event loop, whatever happens to the second."""
    (tmp_path / "good.py").write_text(
        "import asyncio\nasync def f(completion):\n    await asyncio.sleep(0)\n    return 1\n"
    )
    (tmp_path / "bad.py").write_text("raise OSError('the service is down')\n")
    kind = f"0.5*{tmp_path}/good.py:f + 0.5*{tmp_path}/bad.py:g"
    traits = reward.Scoring(kind, "1", "1", {}).prepare()
    assert (traits.is_async, traits.fields) == (True, None)
    with reward.RewardPool() as pool:
        pool.submit(0, kind, "1", "1")
        (verdict,) = pool.collect().values()
    assert verdict.status == "error" and "the service is down" in verdict.detail


@pytest.mark.slow
def test_a_worker_does_not_score_by_a_file_that_has_changed_since_the_start(tmp_path):
    """A worker imports a function with its first task; a new one takes the place of a worker that died."""
    file = tmp_path / "mine.py"
    file.write_text("def half(completion): return 0.5\n")
    digest_of_file(file)  # as at the start of a run
    with RewardPool(1) as pool:
        pool.submit("first", f"{file}:half", "x", "y")
        assert pool.collect()["first"].reward == 0.5
        file.write_text("def half(completion): return 1.0\n")
        pool.submit("second", f"{file}:half", "x", "y")
        assert pool.collect()["second"].reward == 0.5, "the worker has imported the file"
        (worker,) = children(os.getpid())
        os.kill(worker, signal.SIGKILL)
        pool.submit("third", f"{file}:half", "x", "y")
        with pytest.raises(RuntimeError, match="mine.py has changed since the run started"):
            pool.collect()
