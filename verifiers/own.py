"""Reward functions of one's own: find one by its name, give it what its parameters name, check what it gives.

    load_function("rewards.py:brevity")                  # a file, found from the working directory
    load_function("my_package.rewards:brevity")          # a module, found on PYTHONPATH

A function gives a number in [0, 1], where 1 is right, or a bool, and may be `async def`. Its arguments come
by name: completion, answer, prompt, messages, and every column of the row.
"""

import difflib
import functools
import importlib.util
import inspect
import operator
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# "module:function" or "path/file.py:function"; a path with " + " would look like a sum.
FUNCTION = re.compile(r"([A-Za-z_]\w*(\.\w+)*|(?:(?! \+ )[^:*])+\.py):[A-Za-z_]\w*(\.\w+)*")
GIVEN = ("completion", "answer")  # every function can have them; the others depend on the row
ROUNDING = 1e-6  # a float32 score or a sum of shares can be off by this
PROJECT = Path(__file__).resolve().parents[1]
NOT_OWN = (  # places whose lines do not help to find a mistake
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(PROJECT / "reward.py"),
    str(PROJECT / "verifiers"),
)


@dataclass(frozen=True)
class OwnFunction:
    """A function and what its signature says."""

    name: str
    call: Callable
    required: tuple[str, ...]  # parameters without a default
    optional: tuple[str, ...]
    takes_all: bool  # it has **kwargs
    is_async: bool

    def fields(self) -> list[str] | None:
        """List the fields of a row that it can take, besides completion and answer; None: all."""
        names = [name for name in self.required + self.optional if name not in GIVEN]
        return None if self.takes_all else names

    def arguments(self, given: dict) -> dict:
        """Choose its arguments; ValueError names parameters that are none of `given`."""
        if missing := [name for name in self.required if name not in given]:
            raise ValueError(
                f"its parameters {', '.join(missing)} are no columns of the row; there are {', '.join(given)}"
            )
        names = given if self.takes_all else [n for n in self.required + self.optional if n in given]
        return {name: given[name] for name in names}


@functools.cache
def load_function(name: str) -> OwnFunction:
    """Import the function that a name means; what is raised says why it cannot be."""
    place, _, attribute = name.rpartition(":")
    module = _import_file(place) if place.endswith(".py") else importlib.import_module(place)
    try:
        function = operator.attrgetter(attribute)(module)
    except AttributeError:
        near = difflib.get_close_matches(attribute, [n for n, v in vars(module).items() if callable(v)], n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{place} has no {attribute!r}{hint}") from None
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"its parameters cannot be read ({error}); call it in a function of yours") from None
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind == p.POSITIONAL_ONLY and p.default is p.empty for p in parameters):
        raise ValueError("it takes arguments by position only; call it in a function of yours")
    return OwnFunction(
        name,
        function,
        required=tuple(p.name for p in by_name if p.default is p.empty),
        optional=tuple(p.name for p in by_name if p.default is not p.empty),
        takes_all=any(p.kind == p.VAR_KEYWORD for p in parameters),
        is_async=inspect.iscoroutinefunction(function),
    )


@functools.cache
def _import_file(path: str):
    """Import a file by its path; the files beside it are found as they are when it runs as a script."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    name = f"{file.stem} in {file.parent}"  # like no other module's, whatever the file is called
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def check_score(result) -> float:
    """Return what a function gave as a float; ValueError if it is no number in [0, 1].

    A score that rounding has moved off 0 or 1, as sums of shares are, is taken for 0 or 1.
    """
    if inspect.iscoroutine(result):
        result.close()  # it would warn that nobody waited for it
        raise ValueError("it gave a coroutine: define it by `async def`, so that it is waited for")
    try:
        score = None if isinstance(result, (str, bytes)) else float(result)
    except (TypeError, ValueError):
        score = None
    if score is None or not -ROUNDING <= score <= 1 + ROUNDING:
        raise ValueError(f"it gave {printable(repr(result))}, not a number in [0, 1]")
    return 1.0 if score >= 1 - ROUNDING else 0.0 if score <= ROUNDING else score


def explain(error: Exception) -> str:
    """Say in one line what was raised, and at which line of which file of the function's own."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if not frame.filename.startswith(("<", *NOT_OWN))]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    kind = "" if type(error) is ValueError and not frames else f"{type(error).__name__}: "
    return printable(f"{kind}{error}{where}")


def printable(text: str) -> str:
    """Escape what would move a terminal's cursor or colour it, line breaks included."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
