"""Tools and environments, as tasks of workers.py: a call of a function, a step of an environment.

    data.tools: [my_tools.py:search, verifiers.tools:python]     functions with type hints and a docstring
    data.environment: games.py:Maze                              class with reset(row) and step(text)

The error of a tool becomes text for the policy, and the error of an environment ends the episode.
"""

import contextlib
import functools
import inspect
import json
import math
import types
import typing
from collections.abc import Generator
from dataclasses import dataclass, replace

from verifiers.own import BadResult, explain, load_function, printable
from verifiers.sandbox import Isolation, Limits, run_program
from workers import BAD_RESULT, MAX_DETAIL, Reply, Task, Worker


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


@dataclass(frozen=True)
class ToolResult(Reply):
    """The text of a tool's result; detail: the reason of a failure."""

    text: str = ""
    status: str = "ok"
    detail: str = ""

    is_for_policy = True


@dataclass(frozen=True)
class ToolCall(Task[ToolResult]):
    """A call of the tool `kind` with arguments in JSON; the text of the result is cut at max_chars."""

    arguments: str
    max_chars: int

    reply_type = ToolResult

    async def run(self, worker: Worker) -> ToolResult:
        """Call the tool."""
        try:
            function = load_function(self.kind)
            bound = inspect.signature(function.call).bind(**json.loads(self.arguments))
            refuse_other_types(function.call, bound.arguments)
            is_python = function.call is python
            call = functools.partial(run_python, **worker.code_limits) if is_python else function.call
            result = call(*bound.args, **bound.kwargs)
            text = text_of(await result if function.is_async else result)
        except BadResult as error:
            return ToolResult(status=BAD_RESULT, detail=f"tool {error}")
        except Exception as error:  # tools raise anything, for example MemoryError or RecursionError
            return ToolResult(status="error", detail=cut(explain(error), self.max_chars))
        return ToolResult(cut(text, self.max_chars))


def refuse_other_types(call, arguments: dict) -> None:
    """Raise ValueError for an argument of another type than its parameter's, for example NaN for an int."""
    hints = typing.get_type_hints(call)
    for name, value in arguments.items():
        if name in hints and not fits(value, hints[name]):
            shown = printable(repr(value))[:80]
            raise ValueError(f"{name} is {shown}, not {getattr(hints[name], '__name__', hints[name])}")


def fits(value, hint) -> bool:
    """Tell whether a value of JSON has the type of a hint; hints beyond JSON accept every value."""
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin is typing.Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(fits(item, *inner) for item in value if inner)
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, inner[1]) for item in value.values() if inner)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    if hint in (int, str, bool, list, dict, type(None)):
        return type(value) is hint
    return True


def text_of(result) -> str:
    """Return a tool's result as text: text unchanged, other values as JSON; ValueError for bytes and None."""
    if result is None:
        raise ValueError("the tool returned nothing")
    try:
        if not isinstance(result, str):  # tolist(): of numpy, torch
            result = json.dumps(result, ensure_ascii=False, default=lambda value: value.tolist())
        return result.encode(errors="replace").decode()  # halves of a character
    except (TypeError, ValueError, RecursionError, AttributeError):
        raise ValueError(f"the tool returned {type(result).__name__}, not text, a number or JSON") from None


def cut(text: str, max_chars: int) -> str:
    """Cut a text at max_chars characters and say so."""
    return text if len(text) <= max_chars else f"{text[:max_chars]} ... (cut, {len(text):,} characters)"


def python(code: str) -> str:
    """Run a Python program without network or files, and return everything that the program prints.

    Args:
        code: The source code of the program.
    """
    return run_python(code)


def run_python(
    code: str, isolation: Isolation = "bubblewrap", timeout_s: float = 3.0, memory_bytes: int = 1 << 30
) -> str:
    """Run python() within the limits of a run."""
    result = run_program(code, "", Limits(timeout_s, memory_bytes), isolation)
    reasons = {"time": "the program was stopped at the time limit", "output": "the program wrote too much"}
    lines = [result.stdout, result.stderr, reasons.get(result.reason, "")]
    return "\n".join(line.rstrip("\n") for line in lines if line) or "(the program printed nothing)"


# ------------------------------------------------------------------------------------------------------------
# Environments
# ------------------------------------------------------------------------------------------------------------
REBUILT = "the environment was rebuilt"


@dataclass(frozen=True)
class Answer(Reply):
    """An environment's answer to a turn; detail: the reason of a failure."""

    message: str | None = None
    done: bool = False
    reward: float = 0.0
    status: str = "ok"
    detail: str = ""
    by_text: bool = False  # the policy's text causes the failure: the episode scores 0


@dataclass(frozen=True)
class Step(Task[Answer]):
    """The next step of an episode in the environment `kind`; the worker holds an instance per episode.

    texts: all texts of the policy so far; messages: the environment's answers to all but the last text.
    Usually only the last text is new. If the worker is younger than the episode (another episode's step has
    killed the worker before), the environment is rebuilt by reset(row) and the earlier texts; a different
    answer then is an error, because the policy has read the first answer. The worker's timer starts anew for
    each step, so that a rebuilt episode has as much time as the first one.
    """

    episode: str
    row: dict
    texts: list[str]
    messages: list[str]
    max_chars: int  # of a message

    reply_type = Answer

    @property
    def num_limits(self) -> int:
        """Return the number of limits of reset and all steps."""
        return 1 + len(self.texts)

    async def run(self, worker: Worker) -> Answer:
        """Give the last text to the environment."""
        environment, num_steps = worker.environments.pop(self.episode, (None, 0))
        answer = Answer()
        try:
            if environment is None:
                environment = load_function(self.kind).call()
                environment.reset(self.row)
            for number in range(num_steps, len(self.texts)):
                worker.restart_limit()
                answer = checked_answer(environment.step(self.texts[number]), self.max_chars)
                if number < len(self.texts) - 1 and answer.message != self.messages[number]:
                    raise ValueError(
                        f"{REBUILT} after a crash, and its answer to turn {number + 1} is "
                        "another one: an environment has to depend on the row and the texts only"
                    )
        except BadResult as error:
            return Answer(status=BAD_RESULT, detail=f"environment {error}")
        except Exception as error:  # environments raise anything
            close(environment)
            return Answer(status="error", detail=explain(error)[:MAX_DETAIL])
        worker.environments[self.episode] = (environment, len(self.texts))
        return answer

    def inquire(self, answer: Answer) -> Generator[Task[Answer], Answer, Answer]:
        """Blame the text unless reset() alone fails, or the environment survives the same texts."""
        control = yield replace(self, episode=f"{self.episode} control", texts=[])
        yield Close(self.kind, f"{self.episode} control")
        if control.failed:
            return answer
        again = yield self
        return replace(again, by_text=again.failed and REBUILT not in again.detail)


@dataclass(frozen=True)
class Close(Task[Answer]):
    """The end of an episode in the environment `kind`."""

    episode: str

    reply_type = Answer
    is_timed = False

    async def run(self, worker: Worker) -> Answer:
        """Close the environment, if this worker holds it."""
        environment, _ = worker.environments.pop(self.episode, (None, 0))
        close(environment)
        return Answer()


def close(environment) -> None:
    """Call the close() of an environment, if there is one; errors do not matter any more."""
    with contextlib.suppress(Exception):
        if hasattr(environment, "close"):
            environment.close()


def checked_answer(answer, max_chars: int) -> Answer:
    """Return the answer of step(); ValueError unless it is (message or None, done, reward)."""
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
    shown_message = None if message is None else cut(text_of(message), max_chars)
    return Answer(shown_message, bool(done), float(reward))


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
