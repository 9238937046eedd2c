"""Answers whose form decides how they are compared [ours]: parts, points, cycles, multisets, families."""

import operator
import re
from collections.abc import Callable

from verifiers.expressions import TEXT_COMMAND, equal

_SPACE = r"(?:\\[,;:! ]|\\q?quad(?![a-z])|\\(?:left|right)(?![a-z])|[\s~$])"


def decide(content: str, answer: str) -> bool | None:
    """Compare an answer with a reference answer of a form below; None if one of them has no such form."""
    for read, compare in _FORMS:
        gold = read(answer)
        found = read(content) if gold is not None else None
        if found is not None:
            return compare(found, gold)
    return None


# ---- lists with labels: (a) 3 (b) 4, and points such as P(0, 3), Q = (4, 0) ----
def _parts(text: str) -> dict[str, str] | None:
    plain = re.sub(rf"{TEXT_COMMAND}\{{\s*(\([a-h]\))\s*\}}", r"\1", text)
    first, *rest = re.split(r"\(([a-h])\)", plain)
    if first.strip() or len(rest) < 4:
        return None
    ends = re.compile(rf"^(?:{_SPACE}|[=:])|(?:{_SPACE}|[,;.])+$")
    return {label: ends.sub("", part) for label, part in zip(rest[::2], rest[1::2])}


_POINT = r"([A-Z]?)=?(\([^()]*,[^()]*\))"


def _points(text: str) -> dict[str, str] | None:
    plain = re.sub(rf"{_SPACE}|{TEXT_COMMAND}\{{\s*(?:,|and)\s*\}}", "", text)
    return dict(re.findall(_POINT, plain)) if re.fullmatch(rf"(?:{_POINT}(?:,|and)?)+", plain) else None


def _same_parts(found: dict[str, str], gold: dict[str, str]) -> bool | None:
    if "" in gold:
        return None  # points without labels
    if len(gold) == 1 and "" in found:
        found = dict.fromkeys(gold, *found.values())
    return found.keys() == gold.keys() and all(equal(found[label], gold[label]) for label in gold)


# ---- permutations in cycles: (1 3 2) is (3 2 1) ----
def _cycles(text: str) -> set[tuple[int, ...]] | None:
    plain = re.sub(f"{_SPACE}+", " ", text).strip()
    if not re.fullmatch(r"(?:\( ?\d{1,4}(?: \d{1,4})+ ?\) ?)+", plain):
        return None
    cycles = [tuple(map(int, cycle.split())) for cycle in re.findall(r"\(([\d ]+)\)", plain)]
    starts = [cycle.index(min(cycle)) for cycle in cycles]
    return {cycle[start:] + cycle[:start] for cycle, start in zip(cycles, starts)}


# ---- multisets: SymPy's sets drop the second 1 of {1, 1, 2} ----
def _elements(text: str) -> list[str] | None:
    match = re.fullmatch(r"\s*\\\{([^{}()\[\]\\]*)\\\}\s*", text)
    return [element.strip() for element in match[1].split(",")] if match else None


def _same_elements(found: list[str], gold: list[str]) -> bool | None:
    if len(set(gold)) == len(gold):
        return None  # a set, in which the completion may repeat an element
    rest = list(found)
    for element in gold:
        match = next((each for each in rest if equal(each, element)), None)
        if match is None:
            return False
        rest.remove(match)
    return not rest


# ---- families: x = k pi, k in Z; the name of the parameter is free ----
_FAMILY = re.compile(
    rf"(?P<value>.*?)(?:{_SPACE}|[,;:|]|\\mid|{TEXT_COMMAND}\{{\s*,?\s*(?:for|where|with|and)[^{{}}]*\}})+"
    rf"(?P<name>[a-z]){_SPACE}*(?:\\in{_SPACE}*\\mathbb\s*\{{?Z\}}?"
    rf"|{TEXT_COMMAND}\{{\s*(?:is )?an(?:y)? integer\s*\}})(?:{_SPACE}|\\\}}|[.)])*",
    re.DOTALL,
)


def _family(text: str) -> str | None:
    match = _FAMILY.fullmatch(text.strip())
    if not match:
        return None
    value = re.sub(rf"(?<![A-Za-z\\]){match['name']}(?![A-Za-z])", "n", match["value"])
    return re.sub(r"^\s*(?:\\left)?\s*\\\{|^\s*\(?(?=[a-z]\s*=)", "", value).rpartition("=")[2]


# ---- words ----
_NOTHING = {
    "no solution": r"no (?:real )?(?:solutions?|roots?)|(?:the )?empty set|\\(?:emptyset|varnothing)|\u2205",
    "no limit": r"(?:the limit )?does not exist|dne|d\.n\.e",
}


def _nothing(text: str) -> str | None:
    words = re.sub(rf"{TEXT_COMMAND}|(?<!\\)[{{}}]|{_SPACE}", " ", text).split()
    text = " ".join(words).strip(" .").lower()
    return next((name for name, pattern in _NOTHING.items() if re.fullmatch(pattern, text)), None)


def _yes_or_no(text: str) -> str | None:
    """Return the first word if it is yes, no, true or false and ends a clause; None if the other follows."""
    words = re.sub(rf"{TEXT_COMMAND}|[{{}}$*]", " ", text).strip().lower()
    match = re.match(r"(yes|no|true|false)\s*(?:[,.;:]|\Z)", words)
    others = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
    return match[1] if match and not re.search(rf"\b{others[match[1]]}\b", words) else None


_FORMS: tuple[tuple[Callable, Callable], ...] = (
    (_parts, _same_parts),
    (_points, _same_parts),
    (_cycles, operator.eq),
    (_elements, _same_elements),
    (_family, equal),
    (_nothing, operator.eq),
    (_yes_or_no, operator.eq),
)
