"""Custom reward functions: import a function by name, pass the arguments by name, check the returned score.

    load_function("rewards.py:brevity")                  # a file, relative to the working directory
    load_function("my_package.rewards:brevity")          # a module on PYTHONPATH

A function returns a number in [0, 1] (1 is right), a number in the range that reward.scale names, a bool, or
a dict with a number "score", and may be `async def`. Parameters are matched by name with completion, answer,
prompt, messages and every column of the row, for example `def brevity(completion, difficulty)`.
"""

import difflib
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import operator
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# "module:function" or "path/file.py:function"; a path with " + " would look like a sum.
FUNCTION = re.compile(r"([A-Za-z_]\w*(\.\w+)*|(?:(?! \+ )[^:*])+\.py):[A-Za-z_]\w*(\.\w+)*")
COMMON_ARGUMENTS = ("completion", "answer")  # available for every row, unlike columns
REMEDY = "wrap it in a Python function, for example def score(completion): ..."
ROUNDING = 1e-6  # tolerance for the rounding error of float32 scores and of sums of shares
PROJECT = Path(__file__).resolve().parents[1]
LIBRARY_PATHS = (  # excluded from the location of an error, because the mistake is in the user's file
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    *(str(PROJECT / f"{name}.py") for name in ("reward", "workers", "plugins", "judges", "runtime/launch")),
    str(PROJECT / "verifiers"),
)


@dataclass(frozen=True)
class OwnFunction:
    """A custom reward function with its parsed signature."""

    call: Callable
    required: tuple[str, ...]  # parameters that have no default
    optional: tuple[str, ...]  # parameters with a default
    takes_all: bool  # the function has **kwargs
    is_async: bool

    def fields(self) -> list[str] | None:
        """List the columns that the function can take, besides completion and answer; None: all columns."""
        names = [name for name in self.required + self.optional if name not in COMMON_ARGUMENTS]
        return None if self.takes_all else names

    def arguments(self, available: dict) -> dict:
        """Select the arguments of the function; ValueError names required parameters that are missing."""
        if missing := [name for name in self.required if name not in available]:
            raise ValueError(
                f"its parameters {', '.join(missing)} are not columns of the row; available: "
                f"{', '.join(available)}"
            )
        names = available if self.takes_all else [n for n in self.required + self.optional if n in available]
        return {name: available[name] for name in names}


@functools.cache
def load_function(name: str) -> OwnFunction:
    """Import a function by name, "path/file.py:function" or "module:function"; errors explain the cause."""
    location, _, attribute = name.rpartition(":")
    is_file = location.endswith(".py")
    module = _import_file(location) if is_file else call_own(importlib.import_module, location)
    try:
        function = operator.attrgetter(attribute)(module)
    except AttributeError:
        names = [name for name, value in vars(module).items() if callable(value)]
        nearest = difflib.get_close_matches(attribute, names, n=1)
        hint = f", did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"{location} has no {attribute!r}{hint}") from None
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"its parameters cannot be read ({error}); {REMEDY}") from None
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind == p.POSITIONAL_ONLY and p.default is p.empty for p in parameters):
        raise ValueError(f"it takes arguments by position only; {REMEDY}")
    return OwnFunction(
        function,
        required=tuple(p.name for p in by_name if p.default is p.empty),
        optional=tuple(p.name for p in by_name if p.default is not p.empty),
        takes_all=any(p.kind == p.VAR_KEYWORD for p in parameters),
        is_async=inspect.iscoroutinefunction(function),
    )


DIGESTS: dict[str, str] = {}  # in a worker: DIGESTS of runtime/user_files.py in the process that trains


@functools.cache
def _import_file(path: str):
    """Import a file by path; the file can import modules from its folder, as when run as a script.

    BadResult if the file has changed since the run started: a new worker would score by new rules.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    if DIGESTS.get(str(file), digest) != digest:
        raise BadResult(f"{path} has changed since the run started: restore the file, and resume")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    name = f"{file.stem} in {file.parent}"  # unique, so that it cannot shadow an imported module
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        call_own(spec.loader.exec_module, module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def call_own(function: Callable, *arguments):
    """Call code of the user. RuntimeError if it exits, or changes the state of a process that trains.

    A copy of the process that the code has made by os.fork() ends here, because it would train as well.
    """
    process = os.getpid()
    before = state_of_process()
    try:
        result = function(*arguments)
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}").with_traceback(error.__traceback__) from None
    finally:
        if os.getpid() != process:
            os._exit(1)
    after = state_of_process()
    if changed := [name for name in before if before[name] != after[name]]:
        name = changed[0]
        raise RuntimeError(f"it changed {name} from {before[name]} to {after[name]}: restore it")
    return result


OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def state_of_process() -> dict[str, object]:
    """Return the state that code of the user could change and later steps read; {} in a worker."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "torch's number of threads": torch.get_num_threads(),
        "torch's precision": (torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")),
        "the working directory": os.getcwd(),
        "the handlers of signals": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
        "torchrun's variables": [os.environ.get(name) for name in OF_TORCHRUN],
    }


class BadResult(ValueError):
    """A result that no completion excuses, for example 2.0 or None: a mistake in a function, ends a run."""


Scale = tuple[float, float]  # the results of a function that mean 0 (wrong) and 1 (right)


def read_result(name: str, result, scale: Scale = (0.0, 1.0)) -> tuple[float, dict[str, float]]:
    """Return the score in [0, 1], and the further numbers of a dict {"score": ..., ...}, as in verl.

    name: of the function, for errors. scale: mapped to [0, 1] linearly; a bool needs no scale. Scores within
    ROUNDING of 0 or 1, for example a sum of shares like 0.9999999, become exactly 0 or 1. BadResult for a
    result outside of the scale, or of another type; ValueError for NaN and infinity.
    """
    if inspect.iscoroutine(result):
        result.close()  # prevents the warning "coroutine was never awaited"
        raise BadResult(f"{name} returned a coroutine: define it with `async def`, so that it is awaited")
    value = result.get("score") if isinstance(result, dict) else result
    is_bool = isinstance(value, bool) or f"{getattr(value, 'dtype', '')}".endswith("bool")  # of numpy, torch
    low, high = (0.0, 1.0) if is_bool else scale
    number = _number(value)
    if number is None:
        shown = printable(repr(result))[:80]
        raise BadResult(f"{name} returned {shown}, not a number or a dict with a number called score")
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}")
    score = (number - low) / (high - low)
    if not -ROUNDING <= score <= 1 + ROUNDING:
        is_above_zero = number > high and low >= 0
        range_ = (low, number) if is_above_zero else (min(low, number, -number), max(high, number, -number))
        remedy = json.dumps({name: [float(f"{bound:g}") for bound in range_]})
        raise BadResult(
            f"{name} returned {number:g}, outside of {low:g} (wrong) to {high:g} (right): return another "
            f"value, or name the smallest and the largest value, for example reward.scale='{remedy}'"
        )
    items = result.items() if isinstance(result, dict) else ()
    numbers = {f"{key}": _number(item) for key, item in items if key != "score"}
    more = {key: n for key, n in numbers.items() if n is not None and math.isfinite(n)}
    return 1.0 if score >= 1 - ROUNDING else 0.0 if score <= ROUNDING else score, more


def _number(value) -> float | None:
    try:
        return None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        return None


def explain(error: BaseException) -> str:
    """Describe an error in one line, with the last file and line number in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if not frame.filename.startswith(("<", *LIBRARY_PATHS))]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    kind = "" if type(error) is ValueError and not frames else f"{type(error).__name__}: "
    return printable(f"{kind}{error}{where}")


def printable(text: str) -> str:
    """Escape line breaks and control characters, which could move a terminal's cursor or change colours."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
