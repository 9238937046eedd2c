"""Names of verifiers: a kind is built in, a function of your own, or a weighted sum of both.

gsm8k                                a built-in kind
rewards.py:brevity                   a function of your own (verifiers/own.py)
0.8*math + 0.2*rewards.py:brevity    a weighted sum
"""

import difflib
import functools
import re

from verifiers.own import FUNCTION

# Rules are fast and need only the completion and the answer. Slow kinds may run for seconds.
RULE_KINDS = ("exact", "characters", "chain", "verdict", "numeric", "gsm8k", "math")
SLOW_KINDS = ("code", "instructions", "reasoning_gym")
KINDS = (*RULE_KINDS, *SLOW_KINDS)
ENVIRONMENT = "environment"  # the rewards of data.environment are the score: no verifier is called

_TERM = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*\*\s*(\S.*?)\s*")  # weight*kind


@functools.lru_cache(maxsize=1024)
def parts_of(kind: str) -> tuple[tuple[float, str], ...]:
    """Split a kind into its (weight, kind) parts; a kind that is not a sum is returned with weight 1.

    For example, "0.8*math + 0.2*exact" gives ((0.8, "math"), (0.2, "exact")). ValueError explains why
    reward.verify() does not know a kind.
    """
    terms = re.split(r"\+(?=\s*[\d.]+\s*\*)", kind)  # a path may contain a +
    matches = [_TERM.fullmatch(term) for term in terms]
    parts = tuple((float(match[1]), match[2]) for match in matches if match)
    if len(parts) < len(terms):
        parts = ((1.0, kind),)
    for _, name in parts:
        refuse_unknown_kind(name, kind)
    if len(dict(map(reversed, parts))) < len(parts) or not sum(weight for weight, _ in parts):
        raise ValueError(f"kind {kind!r}: each part must be another one, and some weight more than 0")
    return parts


def with_shares(kind: str) -> str:
    """Return a kind for a reader: weights that sum to 1, and a weight of 0 in words."""
    parts = parts_of(kind)
    total = sum(weight for weight, _ in parts)
    terms = [f"{weight / total:.3g}*{name}" for weight, name in parts if weight > 0]
    terms += [f"{name} (only logged)" for weight, name in parts if weight == 0]
    return " + ".join(terms) if len(parts) > 1 else kind


MAX_SHOWN = 100  # characters of an unknown kind in an error


def refuse_unknown_kind(name: str, kind: str) -> None:
    """Raise ValueError for a part of a kind that is neither built in nor the name of a function."""
    if name in KINDS or kind == ENVIRONMENT or FUNCTION.fullmatch(name):
        return
    shown = name[:MAX_SHOWN]
    place = "" if name == kind else f" in {kind[:MAX_SHOWN]!r}"
    if " + " in name:
        place += ": each part of a sum has a weight, as in 0.8*math + 0.2*exact"
    if name == ENVIRONMENT:
        raise ValueError(f"kind {kind!r}: the rewards of data.environment cannot be part of a sum")
    if ":" in name or name.endswith(".py"):
        raise ValueError(f"unknown kind {shown!r}{place}: no module:function or path/file.py:function")
    names = (*KINDS, ENVIRONMENT)
    nearest, *alternatives = difflib.get_close_matches(name, names, n=len(names), cutoff=0.0)
    raise ValueError(
        f"unknown kind {shown!r}{place}: did you mean {nearest!r}? Others: {', '.join(alternatives)}"
    )


def is_kind(kind: str) -> bool:
    """Tell whether reward.verify() knows a kind: built in, a function's name, or a weighted sum."""
    try:
        return isinstance(kind, str) and bool(parts_of(kind))
    except ValueError:
        return False


def functions_of(kind: str) -> list[str]:
    """List the functions of your own in a kind; the kind runs user code unless the list is empty."""
    return [name for _, name in parts_of(kind) if name not in (*KINDS, ENVIRONMENT)]
