"""Tools and environments, as the reward workers run them: a call of a function, a step of an environment.

    data.tools: [my_tools.py:search, verifiers.tools:python]     functions with type hints and a docstring
    data.environment: games.py:Maze                              class with reset(row) and step(text)

A call never raises: an error becomes text for the policy. The functions below return (1.0, "ok", text) or
(0.0, "error", reason), the fields of a Verdict.
"""

import contextlib
import functools
import inspect
import json
import math
import signal
from typing import Any

from verifiers.own import OwnFunction, explain, load_function, printable
from verifiers.sandbox import Limits, run_program

Outcome = tuple[float, str, str]  # reward, status, detail of a Verdict
code_limits: dict = {}  # isolation, timeout_s, memory_bytes of python(); reward.py sets the worker's limits


# ------------------------------------------------------------------------------------------------------------
# Tools
# ------------------------------------------------------------------------------------------------------------
@functools.cache
def schema_of(name: str) -> dict:
    """Return the JSON schema of a tool for the chat template; ValueError explains a missing hint or text."""
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(load_function(name).call)
    except Exception as error:  # files of users raise anything
        raise ValueError(
            f"data.tools {name}: {explain(error)}. A tool is a function with a type hint for each parameter, "
            "and a docstring with a line for each parameter under `Args:`"
        ) from error


def schemas_of(names: list[str]) -> list[dict]:
    """Return the schemas of all tools; ValueError if two tools have one name."""
    schemas = [schema_of(name) for name in names]
    called = [schema["function"]["name"] for schema in schemas]
    for name in called:
        if called.count(name) > 1:
            raise ValueError(f"data.tools: two tools are called {name!r}, rename one of the functions")
    return schemas


async def call_tool(function: OwnFunction, arguments: str, max_chars: int) -> Outcome:
    """Call a tool with arguments in JSON; return the text of the result, cut at max_chars characters."""
    try:
        bound = inspect.signature(function.call).bind(**json.loads(arguments))
        result = function.call(*bound.args, **bound.kwargs)
        text = text_of(await result if function.is_async else result)
    except Exception as error:  # tools raise anything, for example MemoryError or RecursionError
        return 0.0, "error", cut(explain(error), max_chars)
    return 1.0, "ok", cut(text, max_chars)


def text_of(result) -> str:
    """Return a tool's result as text: text unchanged, other values as JSON; ValueError for bytes and None."""
    if isinstance(result, str):
        return result.encode(errors="replace").decode()  # halves of a character
    if result is None:
        raise ValueError("the tool returned nothing")
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"the tool returned {type(result).__name__}, not text, a number or JSON") from None


def cut(text: str, max_chars: int) -> str:
    """Cut a text at max_chars characters and say so."""
    return text if len(text) <= max_chars else f"{text[:max_chars]} ... (cut, {len(text):,} characters)"


def python(code: str) -> str:
    """Run a Python program without network or files, and return everything that the program prints.

    Args:
        code: The source code of the program.
    """
    limits = Limits(code_limits.get("timeout_s", 3.0), code_limits.get("memory_bytes", 1 << 30))
    result = run_program(code, "", limits, code_limits.get("isolation", "bubblewrap"))
    reasons = {"time": "the program was stopped at the time limit", "output": "the program wrote too much"}
    lines = [result.stdout, result.stderr, reasons.get(result.reason, "")]
    return "\n".join(line.rstrip("\n") for line in lines if line) or "(the program printed nothing)"


# ------------------------------------------------------------------------------------------------------------
# Environments
# ------------------------------------------------------------------------------------------------------------
class Episodes:
    """The environments of the episodes that live in this worker, one instance for each episode.

    A request is {episode, row, texts, messages}: all texts of the policy so far, and the environment's
    answers to all but the last. Usually only the last text is new. If this worker is younger than the episode
    (another episode's step has killed the worker before), the environment is rebuilt by reset(row) and the
    earlier texts; a different answer then is an error, because the policy has read the first answer. The
    worker's timer starts anew for each step, so that a rebuilt episode has as much time as the first one.
    """

    def __init__(self):
        self.running: dict[str, tuple[Any, int]] = {}  # {episode: (environment, number of steps)}

    def step(self, function: OwnFunction, request: str, max_chars: int) -> Outcome:
        """Give the last text to the environment; return JSON of (message or null, done, reward)."""
        request = json.loads(request)
        episode = request["episode"]
        limit_s, _ = signal.getitimer(signal.ITIMER_REAL)  # of reset or one step; 0 without a timer
        environment, num_steps = self.running.pop(episode, (None, 0))
        if request.get("close"):
            close(environment)
            return 1.0, "ok", "[]"
        try:
            if environment is None:
                environment = function.call()
                environment.reset(request["row"])
            texts = request["texts"]
            for number in range(num_steps, len(texts)):
                signal.setitimer(signal.ITIMER_REAL, limit_s)
                answer = checked_answer(environment.step(texts[number]), max_chars)
                if number < len(texts) - 1 and answer[0] != request["messages"][number]:
                    raise ValueError(
                        f"the environment was rebuilt after a crash, and its answer to turn {number + 1} is "
                        "another one: an environment has to depend on the row and the texts only"
                    )
            self.running[episode] = (environment, len(texts))
        except Exception as error:  # environments raise anything
            close(environment)
            return 0.0, "error", explain(error)[:200]
        return 1.0, "ok", json.dumps(answer)


def close(environment) -> None:
    """Call the close() of an environment, if there is one; errors do not matter any more."""
    with contextlib.suppress(Exception):
        if hasattr(environment, "close"):
            environment.close()


def checked_answer(answer, max_chars: int) -> tuple[str | None, bool, float]:
    """Return (message or None, done, reward) of a step; ValueError unless the answer has this form."""
    shown = printable(repr(answer))[:80]
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise ValueError(f"step() returned {shown}, not (message or None, done, reward)")
    message, done, reward = answer
    if not (message is None or isinstance(message, str)):
        raise ValueError(f"step() returned a message of type {type(message).__name__}, not text or None")
    if message is None and not done:
        raise ValueError("step() returned no message and done False: the policy needs a message to go on")
    if isinstance(reward, str) or not math.isfinite(float(reward)):
        raise ValueError(f"step() returned the reward {reward!r}, not a finite number")
    return message if message is None else cut(text_of(message), max_chars), bool(done), float(reward)


def check_environment(name: str, row: dict) -> None:
    """Raise ValueError unless an environment's class has reset and step, and reset accepts a row."""
    try:
        environment = load_function(name).call()
        for method in ("reset", "step"):
            if not callable(getattr(environment, method, None)):
                raise ValueError(f"the class has no method {method}")
        environment.reset(row)
        if hasattr(environment, "close"):
            environment.close()
    except Exception as error:
        raise ValueError(
            f"data.environment {name}: {explain(error)}. An environment is a class without arguments that "
            "has reset(row) and step(text) -> (message or None, done, reward)"
        ) from error
