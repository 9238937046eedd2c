r"""Verify a completion by running the program in the completion; the reward is the share of passed tests.

    verify("```python\nprint(int(input()) + 1)\n```", '{"inputs": ["1", "5"], "outputs": ["2", "7"]}')
    # (0.5, "wrong", "1 of 2 tests passed; test 2 gave '6'")

The answer is JSON in one of these forms:
    {"inputs": [text, ...], "outputs": [text, ...]}      a script: stdin, stdout (APPS, TACO, PRIME, verl)
    {"inputs": ..., "outputs": ..., "fn_name": "add"}    a function: arguments and result, as JSON
    {"asserts": ["assert add(1, 2) == 3", ...], "setup": code, "test_setup": code}, or only the list (MBPP);
                                                         setup runs before the program, test_setup after it
    {"asserts": ["def check(candidate): ..."], "entry_point": "add"}     check(add) is called (HumanEval)

Expected outputs never enter the sandbox: the output of the program is compared in this process, so that a
program cannot forge the comparison, and in bubblewrap cannot read this process either. The same holds for
an assert that compares with a constant, for example `assert f(x) == 3`. Other asserts, for example
`assert is_sorted(f(x))`, are evaluated in the program's process, and a malicious program can forge their
results.
"""

import ast
import builtins
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

from verifiers.sandbox import Isolation, Limits, Result, Sandbox

TOTAL_LIMITS = 3  # time limit of all tests of a program together, as a multiple of the limit per test [ours]
MAX_VALUE_CHARS = 1 << 18  # of a result, or twice the expected length; parsing takes 0.7 s
FLOAT_TOLERANCE = 1e-6  # relative or absolute, for expected numbers with a decimal point or an exponent
PROVIDED = """from typing import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from builtins import pow
import bisect, collections, functools, heapq, itertools, math, random, re, string"""  # as on LeetCode
CONSTRUCTORS = {kind.__name__: kind for kind in (set, frozenset, list, tuple, dict, sorted, float, int, str)}
FENCE = re.compile(  # the fences of a block marked as Python may share a line with other text
    r"(?:^[ \t]*+```[ \t]*+(\w*+)|```[ \t]*+(python3?|py)\b)[^\n`]*+\n"  # possessive: linear time
    r"(.*?)(?:^[ \t]*```|```(?=[ \t]*(?:$|</))|\Z)",
    re.MULTILINE | re.DOTALL | re.IGNORECASE,
)


@dataclass(frozen=True)
class Test:
    """One test: the input of the program, and a function that checks the result."""

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
    """Return the share of passed tests, the status, and a description of the first failed test.

    timeout_s: time limit per test; all tests together have TOTAL_LIMITS * timeout_s, and tests beyond that
    limit count as failed. memory_bytes: address space of the program. Status "error": the tests cannot be
    parsed, or the sandbox does not start.
    """
    program = extract_program(completion)
    try:
        setup, tests = read_tests(answer, program or "")
        if program is None:
            return 0.0, "no_answer", "the completion holds no program"
        failed = _run_tests(_join(setup, program), tests, Limits(timeout_s, memory_bytes), isolation)
    except (ValueError, RuntimeError) as error:
        return 0.0, "error", str(error)[:200]
    if not failed:
        return 1.0, "ok", ""
    num_passed = len(tests) - len(failed)
    number, failure = next(iter(failed.items()))
    detail = f"{num_passed} of {len(tests)} tests passed; test {number} {failure}"
    return num_passed / len(tests), "wrong", detail[:200]


def extract_program(completion: str) -> str | None:
    """Return the last ```python block, else the last block, else the full text if the text is Python.

    An unclosed block extends to the end of the text, as in verl. Text counts as Python if it parses and has a
    call, an assignment, a function or a class.
    """
    tagged_blocks = [((match[1] or match[2] or "").lower(), match[3]) for match in FENCE.finditer(completion)]
    python_blocks = [code for tag, code in tagged_blocks if tag in ("python", "py", "python3")]
    blocks = python_blocks or [code for _, code in tagged_blocks]
    if blocks:
        return textwrap.dedent(blocks[-1]) if blocks[-1].strip() else None
    try:
        nodes = ast.walk(ast.parse(completion))
        kinds = (ast.Call, ast.Assign, ast.FunctionDef, ast.ClassDef)
        return completion if any(isinstance(node, kinds) for node in nodes) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def read_tests(answer: str, program: str) -> tuple[str, list[Test]]:
    """Return (code to run before the program, tests); ValueError describes the problem with the answer."""
    spec = _spec_of(answer)
    if isinstance(spec, dict) and "asserts" in spec:
        return _source(spec, "setup"), [_assert_test(text) for text in _texts(spec)]
    if not isinstance(spec, dict) or not {"inputs", "outputs"} <= spec.keys():
        raise ValueError('the answer of a code row needs "inputs" and "outputs", or "asserts"')
    inputs = _list(spec, "inputs")
    outputs = _list(spec, "outputs")
    function = spec.get("fn_name")
    if len(inputs) != len(outputs):
        raise ValueError(f"the answer of a code row has {len(inputs)} inputs and {len(outputs)} outputs")
    if function is None:
        return "", [_script_test(*pair) for pair in zip(inputs, outputs)]
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f"fn_name must be the name of a function, not {function!r}")
    if re.search(r"^class Solution\b", program, re.MULTILINE):
        function = f"Solution().{function}"
    return PROVIDED, [_function_test(function, *pair) for pair in zip(inputs, outputs)]


def _spec_of(answer: str):
    try:
        spec = json.loads(answer)
    except ValueError as error:
        raise ValueError(f"the answer of a code row must be JSON ({error}): {answer[:60]!r}") from error
    return {"asserts": spec} if isinstance(spec, list) else spec


def _source(spec: dict, name: str) -> str:
    """Return a field with code, text or a list of lines; "" without the field."""
    code = spec.get(name) or ""
    code = "\n".join(map(str, code)) if isinstance(code, list) else code
    if not isinstance(code, str):
        raise ValueError(f"{name} of a code row must be text or a list of lines, not {str(code)[:60]!r}")
    return code


def _texts(spec: dict) -> list:
    """Return the texts of asserts, each after test_setup; check(candidate) of HumanEval gets its call."""
    texts = _list(spec, "asserts")
    if before := _source(spec, "test_setup"):
        texts = [f"{before}\n{text}" if isinstance(text, str) else text for text in texts]
    name = spec.get("entry_point")
    if not isinstance(name, str) or not name.isidentifier():
        return texts
    uncalled = re.compile(r"^def check\((?!.*^check\()", re.MULTILINE | re.DOTALL)
    return [f"{text}\ncheck({name})" if uncalled.search(str(text)) else text for text in texts]


def _list(spec: dict, name: str) -> list:
    if not isinstance(spec[name], list) or not spec[name]:
        raise ValueError(f"{name} of a code row must be a non-empty list, not {str(spec[name])[:60]!r}")
    return spec[name]


def _join(setup: str, program: str) -> str:
    """Put the setup before the program, but after imports from __future__, which must be the first lines."""
    lines = program.split("\n")
    start = 0
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        if "__future__" in program:
            imports = [node for node in ast.parse(program).body if isinstance(node, ast.ImportFrom)]
            start = max((node.end_lineno for node in imports if node.module == "__future__"), default=0)
    return "\n".join([*lines[:start], setup, *lines[start:]])


# ---- Kinds of tests ----------------------------------------------------------------------------------------
def _script_test(script_input: str | list, expected: str | list) -> Test:
    stdin, stdout = ("\n".join(map(str, v)) if isinstance(v, list) else v for v in (script_input, expected))
    if not isinstance(stdin, str) or not isinstance(stdout, str):
        shown = str(script_input)[:60]
        raise ValueError(f"inputs and outputs of a script must be text or lists of lines, not {shown!r}")
    return Test(lambda result: result.exit == 0 and same_output(result.stdout, stdout), stdin=stdin)


def same_output(output: str, expected: str) -> bool:
    """Compare two outputs word by word and line by line, ignoring blank lines at the start and at the end.

    FLOAT_TOLERANCE applies to expected words that are numbers with a point or an exponent, for example 0.50.
    """
    lines = [[line.split() for line in text.strip().splitlines()] for text in (output, expected)]
    return len(lines[0]) == len(lines[1]) and all(
        len(words) == len(expected_words) and all(map(_same_word, words, expected_words))
        for words, expected_words in zip(*lines)
    )


def _same_word(word: str, expected: str) -> bool:
    if word == expected or not re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?", expected):
        return word == expected
    try:
        return math.isclose(float(word), float(expected), rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    except ValueError:
        return False


def _function_test(function: str, function_input: str | list, expected: object) -> Test:
    arguments = function_input
    if isinstance(function_input, str):
        arguments = [_from_json("inputs", line) for line in function_input.split("\n") if line.strip()]
    expected = _from_json("outputs", expected) if isinstance(expected, str) else expected
    if not isinstance(arguments, list):
        shown = str(function_input)[:60]
        raise ValueError(f"the inputs of a function must be a list of arguments, not {shown!r}")
    # APPS wraps a result into a list of length 1, so that both [3] and 3 are accepted.
    results = [expected, *expected] if isinstance(expected, list) and len(expected) == 1 else [expected]

    code = f"__import__('json').loads({json.dumps(arguments)!r})"  # parsed ten times as fast as literals
    first = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], dict) else {}
    if first and all(re.fullmatch(r"-?\d+", key) for key in first):  # keys that JSON made text, as in APPS
        code = repr([{int(key): value for key, value in first.items()}])
    max_chars = 2 * len(json.dumps(expected))

    def passes(result: Result) -> bool:
        value = json.loads(json.dumps(_value(result, max_chars)))  # as JSON: tuples become lists, keys text
        return any(_same_value(value, expected_value) for expected_value in results)

    return Test(passes, expression=f"{function}(*{code})")


def _from_json(field: str, text: str) -> object:
    """Parse a value of "inputs" or "outputs" of a function; ValueError names the field."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{field} of a function (fn_name) must be JSON, for example [1, 2] or, for text, "
            f'"abc" in double quotes, not {text[:60]!r} ({error})'
        ) from error


def _same_value(value: object, expected: object) -> bool:
    """Compare JSON values; expected floats have FLOAT_TOLERANCE, but True is not close to 0.9999999."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        same_keys = value.keys() == expected.keys()
        return same_keys and all(_same_value(value[key], expected[key]) for key in expected)
    if isinstance(expected, float) and type(value) in (int, float):
        return math.isclose(value, expected, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    return value == expected


def _assert_test(text: str) -> Test:
    """Make the test of an assert; if one side is a constant, only the other side enters the sandbox."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"an assert must be text, not {str(text)[:60]!r}")
    try:
        *statements, last = ast.parse(text).body or [None]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"an assert is not Python ({error}): {text[:60]!r}") from error
    if not isinstance(last, ast.Assert):
        return Test(lambda result: _value(result) is True, expression=f"exec({text!r}) is None")
    setup = ast.unparse(ast.Module(statements, []))
    test = last.test
    sides = []  # pairs (computed, constant) to try
    relation = operator.eq
    match test:
        case ast.Compare(a, [ast.Eq()], [b]):
            sides = [(a, b), (b, a)]
        case ast.Compare(a, [ast.Is()], [b]):
            sides = [(a, b)]
            relation = operator.is_
        case ast.Call(ast.Name("isclose") | ast.Attribute(ast.Name("math"), "isclose"), [a, b], keywords):
            # numpy has rtol, atol
            tolerances = [key for key in keywords if key.arg in ("rel_tol", "abs_tol")]
            is_constant = all(isinstance(key.value, ast.Constant) for key in tolerances)
            if len(tolerances) == len(keywords) and is_constant:
                sides = [(a, b), (b, a)]
                relation = functools.partial(math.isclose, **{key.arg: key.value.value for key in tolerances})
    for computed, constant in sides:
        with contextlib.suppress(ValueError):
            compare = functools.partial(relation, _constant(constant))
            return Test(functools.partial(_holds, compare, 2 * len(text)), expression=_after(setup, computed))
    return Test(lambda result: _value(result) is True, expression=f"bool({_after(setup, test)})")


def _holds(compare: Callable[[object], bool], max_chars: int, result: Result) -> bool:
    return bool(compare(_value(result, max_chars)))


def _after(setup: str, node: ast.expr) -> str:
    return f"(exec({setup!r}), {ast.unparse(node)})[1]" if setup else ast.unparse(node)


def _constant(node: ast.expr) -> object:
    """Evaluate a literal, or a call of one of CONSTRUCTORS, for example set([1, 2]); ValueError otherwise."""
    if (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CONSTRUCTORS
        and len(node.args) == 1 and not node.keywords
    ):  # fmt: skip
        try:
            return CONSTRUCTORS[node.func.id](_constant(node.args[0]))
        except TypeError as error:
            raise ValueError(str(error)) from error
    try:
        return ast.literal_eval(node)
    except (TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _value(result: Result, max_chars: int = 0) -> object:
    if len(result.value) > max(MAX_VALUE_CHARS, max_chars):
        raise ValueError(f"the value has more than {MAX_VALUE_CHARS} characters")
    return ast.literal_eval(result.value)


# ---- Tests that test nothing -------------------------------------------------------------------------------
def doubtful_tests(answer: str) -> list[int]:
    """Return the numbers of the tests, from 1, that a program without any work may pass."""
    spec = _spec_of(answer)
    if "asserts" in spec:
        known = _defined(read_tests(answer, "")[0])
        return [number for number, text in enumerate(_texts(spec), start=1) if not _is_plain(text, known)]
    outputs = ["\n".join(map(str, out)) if isinstance(out, list) else out for out in spec["outputs"]]
    if spec.get("fn_name") is not None:
        nothing = (None, [None], "null")
        return [number for number, out in enumerate(spec["outputs"], start=1) if out in nothing]
    return [number for number, text in enumerate(outputs, start=1) if not text.strip()]


def constant_shares(answer: str) -> dict[str, float]:
    """Return {value: share of the tests that a program passes if it always prints or returns the value}."""
    spec = _spec_of(answer)
    if "asserts" not in spec:
        outputs = ["\n".join(map(str, out)) if isinstance(out, list) else str(out) for out in spec["outputs"]]
        results = [output.strip() for output in outputs]
    else:
        results = []
        for text in _texts(spec):
            match ast.parse(text).body:
                case [*_, ast.Assert(test=ast.Compare(_, [ast.Eq() | ast.Is()], [ast.Constant(value)]))]:
                    results.append(repr(value))
                case _:
                    results.append("")
    return {result: results.count(result) / len(results) for result in results if result}


def _defined(source: str) -> set[str]:
    """Return the names of the functions, classes and modules that a source defines or imports."""
    kinds = (ast.alias, ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)}


def _is_plain(text: str, known: set[str]) -> bool:
    """Tell whether a test is a single assert about the result of a call, and so fails without a program."""
    match ast.parse(text).body:
        case [ast.Assert(test=ast.Compare(left, [ast.Eq() | ast.Is()], [right]))]:
            for call, constant in ((left, right), (right, left)):
                with contextlib.suppress(ValueError):
                    return _constant(constant) is not None and _calls_program(call, known)
        case [ast.Assert(test=ast.Call() as call)]:  # of a library, such as math.isclose; f(x) alone is true
            is_library = isinstance(call.func, ast.Attribute) or getattr(call.func, "id", "") in known
            return is_library and _calls_program(call, known)
    return False


def _calls_program(node: ast.expr, known: set[str]) -> bool:
    """Tell whether an expression calls a function of the program, perhaps inside of calls like set(...)."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.id if isinstance(node.func, ast.Name) else None
    is_own = name is not None and not hasattr(builtins, name) and name not in known
    return is_own or any(_calls_program(argument, known) for argument in node.args)


IDLE_RESULTS = ("None", "object()", "[]")  # a program whose functions return one of these has done no work


def idle_test(answer: str, *, isolation: Isolation, timeout_s: float, memory_bytes: int) -> str:
    """Return which test of a row tests nothing, or imports a missing module, or "".

    Doubtful tests run on programs without any work: the empty program, functions that return one of
    IDLE_RESULTS, and functions that return a constant of the test. A test tests nothing if the empty program
    passes, or all others do. A row tests nothing if one of IDLE_RESULTS passes all tests.
    """
    spec = _spec_of(answer)
    setup, tests = read_tests(answer, "")
    numbers = doubtful_tests(answer)
    texts = _texts(spec) if "asserts" in spec else [""] * len(tests)
    nodes = list(ast.walk(ast.parse("\n".join([texts[number - 1] for number in numbers]))))
    names = {node.id for node in nodes if isinstance(node, ast.Name)} - _defined(setup) - set(dir(builtins))
    names |= {spec["fn_name"]} if "asserts" not in spec and spec.get("fn_name") else set()
    constants = dict.fromkeys(repr(node.value) for node in nodes if isinstance(node, ast.Constant))
    limits = Limits(timeout_s, memory_bytes)
    untested = numbers
    for value in ("", *IDLE_RESULTS, *list(constants)[:4]):
        program = "".join(f"def {name}(*a, **k): return {value}\n" for name in sorted(names) if value)
        doubtful = [tests[number - 1] for number in numbers]
        failed = _run_tests(_join(setup, program), doubtful, limits, isolation)
        passed = [number for place, number in enumerate(numbers, start=1) if place not in failed]
        if passed and not value:
            return f"test {passed[0]} tests nothing: the empty program passes it"
        absent = [failure for failure in failed.values() if "ModuleNotFoundError" in failure]
        if absent and not value:
            return f"no program can pass: a test {absent[0]}"
        if value in IDLE_RESULTS and len(passed) == len(tests):
            return f"the tests test nothing: functions that return {value} pass all of them"
        untested = [number for number in untested if number in passed or not value]
        if not untested and (len(numbers) < len(tests) or value == IDLE_RESULTS[-1]):
            return ""
    return f"test {untested[0]} tests nothing: functions without any work pass it"


# ---- Running and judging -----------------------------------------------------------------------------------
def _run_tests(source: str, tests: list[Test], limits: Limits, isolation: Isolation) -> dict[int, str]:
    """Run the tests; return {number of the failed test, from 1: description of the failure}."""
    failed = {}
    end = time.monotonic() + TOTAL_LIMITS * limits.wall_s
    with Sandbox(source, limits, isolation) as sandbox:
        for number, test in enumerate(tests, start=1):
            seconds = min(limits.wall_s, end - time.monotonic())
            if seconds <= 0:
                failed[number] = "was not reached in time"
                continue
            result = sandbox.run(test.stdin, test.expression, seconds)
            if not _passes(test, result):
                failed[number] = _describe_failure(result, seconds)
    return failed


def _passes(test: Test, result: Result) -> bool:
    try:
        return result.exit == 0 and not result.reason and test.passes(result)
    except (ValueError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError):
        return False  # the value is untrusted text, and parsing it may raise any of these


def _describe_failure(result: Result, seconds: float) -> str:
    if result.reason == "time":
        return f"was killed after {seconds:.3g} s"
    if result.reason:
        return {"output": "wrote too much", "lost": "ended its sandbox"}[result.reason]
    if result.exit:
        last_line = (result.stderr.strip().splitlines() or [""])[-1]
        return f"ended with exit status {result.exit}: {last_line}"
    return f"gave {(result.value or result.stdout.strip())[:60]!r}"
