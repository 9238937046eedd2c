r"""Judge a completion by running the program in it: the reward is the share of tests that it passes.

    verify("```python\nprint(int(input()) + 1)\n```", '{"inputs": ["1", "5"], "outputs": ["2", "7"]}')
    # (0.5, "wrong", "1 of 2 tests passed; test 2 gave '6'")

The answer is JSON in one of three forms:
    {"inputs": [text, ...], "outputs": [text, ...]}      a script: stdin, stdout (APPS, TACO, PRIME, verl)
    {"inputs": ..., "outputs": ..., "fn_name": "add"}    a function: its arguments and its result, as JSON
    {"asserts": ["assert add(1, 2) == 3", ...], "setup": code}, or the list of asserts alone (MBPP)

Expected outputs stay outside the sandbox: what a program prints or gives back is compared here, where it
cannot reach. That holds for asserts, too, if they compare with a constant, `f(x) == constant`; others are
judged in the program's own process, and a program that sets out to can forge those.
"""

import ast
import contextlib
import functools
import json
import math
import operator
import re
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass

from runtime.sandbox import Isolation, Limits, Result, Sandbox

TOTAL_LIMITS = 3  # all tests of a program together get so many times the limit of one [ours]
MAX_VALUE_CHARS = 1 << 18  # a longer result of a function is wrong; one so long is read in 0.7 s
FLOAT_TOLERANCE = (
    1e-6  # relative or absolute, where an expected output is written with a point or an exponent
)
CONSTRUCTORS = {kind.__name__: kind for kind in (set, frozenset, list, tuple, dict, sorted, float, int, str)}
FENCE = re.compile(  # fences of a block marked as Python need no lines of their own
    r"(?:^[ \t]*```[ \t]*(\w*)|```[ \t]*(python3?|py)\b)[^\n`]*\n"
    r"(.*?)(?:^[ \t]*```|```(?=[ \t]*(?:$|</))|\Z)",
    re.MULTILINE | re.DOTALL | re.IGNORECASE,
)


@dataclass(frozen=True)
class Test:
    """One test: what the program is given and who judges what comes of it."""

    passes: Callable[[Result], bool]
    stdin: str = ""
    expression: str = ""  # evaluated after the program; "" for a script


def verify(
    completion: str,
    answer: str,
    *,
    isolation: Isolation = "bubblewrap",
    timeout_s: float = 3.0,
    memory_bytes: int = 1 << 30,
) -> tuple[float, str, str]:
    """Return the share of tests passed, the status, and what became of the first test that failed.

    timeout_s: seconds of one test; all of them together get TOTAL_LIMITS times as much, and tests that are
    not reached have failed. memory_bytes: address space of the program. Status "error": the tests cannot be
    read, or the sandbox does not start.
    """
    program = extract_program(completion)
    try:
        setup, tests = read_tests(answer, program or "")
        if program is None:
            return 0.0, "no_answer", "there is no program"
        failed = _run_tests(_join(setup, program), tests, Limits(timeout_s, memory_bytes), isolation)
    except (ValueError, RuntimeError) as error:
        return 0.0, "error", str(error)[:200]
    if not failed:
        return 1.0, "ok", ""
    num_passed = len(tests) - len(failed)
    number, what = next(iter(failed.items()))
    return (
        num_passed / len(tests),
        "wrong",
        f"{num_passed} of {len(tests)} tests passed; test {number} {what}"[:200],
    )


def extract_program(completion: str) -> str | None:
    """Return the last ```python block, else the last block, else the whole text if that is Python.

    Text up to </think> is left out. A block that is not closed ends with the text, as in verl. A text counts
    as Python if it can be parsed and calls, assigns or defines something.
    """
    text = completion.rpartition("</think>")[2]
    blocks = [((match[1] or match[2] or "").lower(), match[3]) for match in FENCE.finditer(text)]
    blocks = [code for tag, code in blocks if tag in ("python", "py", "python3")] or [
        code for _, code in blocks
    ]
    if blocks:
        return textwrap.dedent(blocks[-1]) if blocks[-1].strip() else None
    try:
        nodes = ast.walk(ast.parse(text))
        kinds = (ast.Call, ast.Assign, ast.FunctionDef, ast.ClassDef)
        return text if any(isinstance(node, kinds) for node in nodes) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def read_tests(answer: str, program: str) -> tuple[str, list[Test]]:
    """Return (code that goes before the program, tests); ValueError names what is wrong with the answer."""
    try:
        given = json.loads(answer)
    except ValueError as error:
        raise ValueError(f"the answer of a code row must be JSON ({error}): {answer[:60]!r}") from error
    given = {"asserts": given} if isinstance(given, list) else given
    if isinstance(given, dict) and "asserts" in given:
        return given.get("setup") or "", [_assert_test(text) for text in _list(given, "asserts")]
    if not isinstance(given, dict) or not {"inputs", "outputs"} <= given.keys():
        raise ValueError('the answer of a code row needs "inputs" and "outputs", or "asserts"')
    inputs, outputs, function = _list(given, "inputs"), _list(given, "outputs"), given.get("fn_name")
    if len(inputs) != len(outputs):
        raise ValueError(f"the answer of a code row has {len(inputs)} inputs and {len(outputs)} outputs")
    if function is None:
        return "", [_script_test(*pair) for pair in zip(inputs, outputs)]
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f"fn_name must be the name of a function, not {function!r}")
    function = (
        f"Solution().{function}" if re.search(r"^class Solution\b", program, re.MULTILINE) else function
    )
    # LeetCode's frame imports these names, so programs use them without an import.
    return "from typing import *", [_function_test(function, *pair) for pair in zip(inputs, outputs)]


def _list(given: dict, name: str) -> list:
    if not isinstance(given[name], list) or not given[name]:
        raise ValueError(
            f"{name} of a code row must be a list that is not empty, not {str(given[name])[:60]!r}"
        )
    return given[name]


def _join(setup: str, program: str) -> str:
    """Put the setup before a program, or behind its imports from __future__, which have to come first."""
    lines, first = program.split("\n"), 0
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        if "__future__" in program:
            imports = [node for node in ast.parse(program).body if isinstance(node, ast.ImportFrom)]
            first = max((node.end_lineno for node in imports if node.module == "__future__"), default=0)
    return "\n".join([*lines[:first], setup, *lines[first:]])


# ------------------------------------------------------------------------------------------------------------
# Kinds of tests
# ------------------------------------------------------------------------------------------------------------
def _script_test(given: str | list, expected: str | list) -> Test:
    stdin, stdout = ("\n".join(map(str, v)) if isinstance(v, list) else v for v in (given, expected))
    if not isinstance(stdin, str) or not isinstance(stdout, str):
        raise ValueError(
            f"inputs and outputs of a script are text or lists of lines, not {str(given)[:60]!r}"
        )
    return Test(lambda result: result.exit == 0 and same_output(result.stdout, stdout), stdin=stdin)


def same_output(found: str, expected: str) -> bool:
    """Compare two outputs word by word and line by line; blank lines at the end do not count.

    Where an expected word is a number with a point or an exponent, FLOAT_TOLERANCE applies.
    """
    found_lines, lines = ([line.split() for line in text.rstrip().splitlines()] for text in (found, expected))
    return len(found_lines) == len(lines) and all(
        len(words) == len(others) and all(map(_same_word, words, others))
        for words, others in zip(found_lines, lines)
    )


def _same_word(found: str, expected: str) -> bool:
    if found == expected or not re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?", expected):
        return found == expected
    try:
        return math.isclose(float(found), float(expected), rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    except ValueError:
        return False


def _function_test(function: str, given: str | list, expected: object) -> Test:
    arguments = given
    if isinstance(given, str):
        arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
    expected = json.loads(expected) if isinstance(expected, str) else expected
    if not isinstance(arguments, list):
        raise ValueError(f"the inputs of a function are a list of arguments, not {str(given)[:60]!r}")
    # APPS puts a result into a list of one.
    results = [expected, *expected] if isinstance(expected, list) and len(expected) == 1 else [expected]
    return Test(
        lambda result: json.loads(json.dumps(_value(result))) in results,  # tuples are lists, keys are text
        # JSON is read ten times as fast as literals.
        expression=f"{function}(*__import__('json').loads({json.dumps(arguments)!r}))",
    )


def _assert_test(text: str) -> Test:
    """Make the test of an assert; where one side is constant, only the other goes into the sandbox."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"an assert must be text, not {str(text)[:60]!r}")
    try:
        *before, last = ast.parse(text).body or [None]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"an assert is not Python ({error}): {text[:60]!r}") from error
    if not isinstance(last, ast.Assert):
        return Test(lambda result: _value(result) is True, expression=f"exec({text!r}) is None")
    first = ast.unparse(ast.Module(before, []))
    test, sides, same = last.test, [], operator.eq
    match test:
        case ast.Compare(left, [ast.Eq()], [right]):
            sides = [(left, right), (right, left)]
        case ast.Compare(left, [ast.Is()], [right]):
            sides, same = [(left, right)], operator.is_
        case ast.Call(ast.Name("isclose") | ast.Attribute(ast.Name("math"), "isclose"), [left, right], given):
            keywords = [key for key in given if key.arg in ("rel_tol", "abs_tol")]  # numpy's has others
            if len(keywords) == len(given) and all(isinstance(key.value, ast.Constant) for key in keywords):
                sides = [(left, right), (right, left)]
                same = functools.partial(math.isclose, **{key.arg: key.value.value for key in keywords})
    for computed, constant in sides:
        with contextlib.suppress(ValueError):
            compare = functools.partial(same, _constant(constant))
            return Test(functools.partial(_holds, compare), expression=_after(first, computed))
    return Test(lambda result: _value(result) is True, expression=f"bool({_after(first, test)})")


def _holds(compare: Callable[[object], bool], result: Result) -> bool:
    return bool(compare(_value(result)))


def _after(first: str, node: ast.expr) -> str:
    return f"(exec({first!r}), {ast.unparse(node)})[1]" if first else ast.unparse(node)


def _constant(node: ast.expr) -> object:
    """Evaluate an expression without names but those of CONSTRUCTORS; ValueError for any other."""
    match node:
        case ast.Call(ast.Name(name), [argument], []) if name in CONSTRUCTORS:
            try:
                return CONSTRUCTORS[name](_constant(argument))
            except TypeError as error:
                raise ValueError(str(error)) from error
    try:
        return ast.literal_eval(node)
    except (TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _value(result: Result) -> object:
    if len(result.value) > MAX_VALUE_CHARS:
        raise ValueError("the value is too long")
    return ast.literal_eval(result.value)


# ------------------------------------------------------------------------------------------------------------
# Running and judging
# ------------------------------------------------------------------------------------------------------------
def _run_tests(source: str, tests: list[Test], limits: Limits, isolation: Isolation) -> dict[int, str]:
    """Run a program's tests; return {number of a test that failed, from 1: what happened}."""
    failed, end = {}, time.monotonic() + TOTAL_LIMITS * limits.wall_s
    with Sandbox(source, limits, isolation) as sandbox:
        for number, test in enumerate(tests, start=1):
            seconds = min(limits.wall_s, end - time.monotonic())
            if seconds <= 0:
                failed[number] = "was not reached in time"
                continue
            result = sandbox.run(test.stdin, test.expression, seconds)
            if not _passes(test, result):
                failed[number] = _what_happened(result, seconds)
    return failed


def _passes(test: Test, result: Result) -> bool:
    try:
        return result.exit == 0 and not result.reason and test.passes(result)
    except (ValueError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError):
        return False  # the value is untrusted text


def _what_happened(result: Result, seconds: float) -> str:
    if result.reason == "time":
        return f"was killed after {seconds:.3g} s"
    if result.reason:
        return {"output": "wrote too much", "lost": "ended its sandbox"}[result.reason]
    if result.exit:
        last_line = (result.stderr.strip().splitlines() or [""])[-1]
        return f"ended with exit status {result.exit}: {last_line}"
    return f"gave {(result.value or result.stdout.strip())[:60]!r}"
