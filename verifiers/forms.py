"""Answers whose form decides how they are compared [ours]: parts, points, cycles, multisets, families."""

import re
from collections.abc import Callable

from verifiers.expressions import TEXT_COMMAND, pair_up

Comparison = Callable[[str, str], bool]  # of a part of the completion with a part of the reference
Labelled = list[tuple[str, str]]  # (label, value); a label may be ""
_SPACE = r"(?:\\[,;:! ]|\\q?quad(?![a-z])|\\(?:left|right)(?![a-z])|[\s~$])"


def decide(content: str, answer: str, matches: Comparison) -> bool | None:
    """Compare an answer with a reference answer of a form below; None if one of them has no such form.

    matches: compares a part with a part of the reference, as if both were whole answers.
    """
    for read, compare in _FORMS:
        gold = read(answer)
        found = read(content) if gold is not None else None
        if found is not None:
            return compare(found, gold, matches)
    return None


def _is_same(found, gold, matches: Comparison) -> bool:
    return found == gold


# ---- lists with labels: (a) 3 (b) 4, and points such as P(0, 3), Q = (4, 0) ----
def _parts(text: str) -> Labelled | None:
    plain = re.sub(rf"{TEXT_COMMAND}\{{\s*(\([a-h]\))\s*\}}", r"\1", text)
    first, *rest = re.split(r"\(([a-h])\)", plain)
    if first.strip() or len(rest) < 4:
        return None
    ends = re.compile(rf"^(?:{_SPACE}|[=:])|(?:{_SPACE}|[,;.])+$")
    return [(label, ends.sub("", part)) for label, part in zip(rest[::2], rest[1::2])]


_POINT = r"([A-Z]?)=?(\([^()]*,[^()]*\))"


def _points(text: str) -> Labelled | None:
    plain = re.sub(rf"{_SPACE}|{TEXT_COMMAND}\{{\s*(?:,|and)\s*\}}", "", text).removeprefix("(x,y)=")
    return re.findall(_POINT, plain) if re.fullmatch(rf"(?:{_POINT}(?:,|and)?)+", plain) else None


def _same_parts(found: Labelled, gold: Labelled, matches: Comparison) -> bool | None:
    if any(not label for label, _ in gold):
        return None  # points without labels
    if len(gold) == len(found) == 1 and not found[0][0]:
        return matches(found[0][1], gold[0][1])
    return pair_up(found, gold, lambda each, part: each[0] == part[0] and matches(each[1], part[1]))


# ---- permutations in cycles: (1 3 2) is (3 2 1) ----
def _cycles(text: str) -> list[tuple[int, ...]] | None:
    plain = re.sub(f"{_SPACE}+", " ", text).strip()
    if not re.fullmatch(r"(?:\( ?\d{1,4}(?: \d{1,4})+ ?\) ?)+", plain):
        return None
    cycles = [tuple(map(int, cycle.split())) for cycle in re.findall(r"\(([\d ]+)\)", plain)]
    starts = [cycle.index(min(cycle)) for cycle in cycles]
    turned = [cycle[start:] + cycle[:start] for cycle, start in zip(cycles, starts)]
    shares = len({number for cycle in cycles for number in cycle}) < sum(map(len, cycles))
    return turned if shares else sorted(turned)  # the order of cycles that share a number decides


# ---- multisets: SymPy's sets drop the second 1 of {1, 1, 2} ----
def _elements(text: str) -> list[str] | None:
    match = re.fullmatch(r"\s*\\\{([^{}()\[\]\\]*)\\\}\s*", text)
    return [element.strip() for element in match[1].split(",")] if match else None


def _same_elements(found: list[str], gold: list[str], matches: Comparison) -> bool | None:
    if len(set(gold)) == len(gold):
        return None  # a set, in which the completion may repeat an element
    return pair_up(found, gold, matches)


# ---- families: x = k pi, k in Z; the name of the parameter is free ----
_FAMILY = re.compile(
    rf"(?P<value>.*?)(?:{_SPACE}|[,;:|]|\\mid|{TEXT_COMMAND}\{{\s*,?\s*(?:for|where|with|and)[^{{}}]*\}})+"
    rf"(?P<name>[a-z]){_SPACE}*(?:\\in{_SPACE}*\\mathbb\s*\{{?Z\}}?"
    rf"|{TEXT_COMMAND}\{{\s*(?:is )?an(?:y)? integer\s*\}})(?:{_SPACE}|\\\}}|[.)])*",
    re.DOTALL,
)
_BUILDER = re.compile(  # the start of {x | x = ...}, of {k pi} and of (x = ...)
    r"^\s*(?:\\left)?\s*\\\{(?:\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\||:))?"
    r"|^\s*\((?=[a-z]\s*=)"
)
_MEMBERS = re.compile(
    rf"(?:(?<!\\)[,;](?!(?:[^()\[\]]|\([^()]*\))*[)\]])|\\(?:lor|vee)(?![a-z])|(?<![a-z\\])(?:or|and)(?![a-z])"
    rf"|{TEXT_COMMAND}\{{\s*,?\s*(?:or|and)\s*\}})"
)


def _family(text: str) -> Labelled | None:
    """Return (variable, formula) of each member; a plus-minus makes two."""
    match = _FAMILY.fullmatch(text.strip())
    if not match:
        return None
    value = re.sub(rf"(?<![A-Za-z\\]){match['name']}(?![A-Za-z])", "n", match["value"])
    value = re.sub(r",?\s*n\s*\\in\s*\\mathbb\s*\{?Z\}?", "", value)  # after each member
    members = [member for member in _MEMBERS.split(_BUILDER.sub("", value)) if member.strip()]
    both = [re.sub(r"\\pm(?![a-z])", sign, member) for member in members for sign in "+-"]
    parts = [member.rpartition("=") for member in dict.fromkeys(both)]
    edges = re.compile(f"^{_SPACE}+|{_SPACE}+$")
    return [(re.sub(_SPACE, "", name), edges.sub("", formula)) for name, _, formula in parts]


def _same_families(found: Labelled, gold: Labelled, matches: Comparison) -> bool:
    """Compare members in any order; the names count if there are several, as in x = 5t, y = 2t."""
    if len({name for name, _ in gold} - {""}) > 1:
        return pair_up(found, gold, lambda each, part: each[0] == part[0] and matches(each[1], part[1]))
    return pair_up(found, gold, lambda each, part: matches(each[1], part[1]))


# ---- words ----
_NOTHING = {
    "no solution": r"no (?:real )?(?:solutions?|roots?)|(?:the )?empty set|\\(?:emptyset|varnothing)|\u2205",
    "no limit": r"(?:the limit )?does not exist|dne|d\.n\.e",
}


def _nothing(text: str) -> str | None:
    words = re.sub(rf"{TEXT_COMMAND}|(?<!\\)[{{}}]|{_SPACE}", " ", text).split()
    text = " ".join(words).strip(" .").lower()
    return next((name for name, pattern in _NOTHING.items() if re.fullmatch(pattern, text)), None)


def _yes_or_no(text: str) -> tuple[str, str] | None:
    """Return yes, no, true or false at the start of a clause, and what follows; None if the opposite does."""
    words = re.sub(rf"{TEXT_COMMAND}|[{{}}$*]", " ", text).strip()
    match = re.match(r"(yes|no|true|false)\s*(?=[,.;:]|\Z)", words, re.IGNORECASE)
    if not match:
        return None
    first = match[1].lower()
    other = {"yes": "no", "no": "yes", "true": "false", "false": "true"}[first]
    return None if re.search(rf"\b{other}\b", words.lower()) else (first, words[match.end() :])


def _same_first_word(found: tuple[str, str], gold: tuple[str, str], matches: Comparison) -> bool:
    """Compare the words, and the value after one, as in yes, x = 5; an explanation is no value."""
    has_value = re.search(r"[\d=]", gold[1]) and not re.match(r"\.|\W*(?:because|since|as|for)\b", gold[1])
    lead = re.compile(r"^(?:\W|(?:because|since|as|for|with|it is)\b)+")
    return found[0] == gold[0] and (
        not has_value or matches(*(lead.sub("", end) for _, end in (found, gold)))
    )


_FORMS: tuple[tuple[Callable, Callable], ...] = (
    (_parts, _same_parts),
    (_points, _same_parts),
    (_cycles, _is_same),
    (_elements, _same_elements),
    (_family, _same_families),
    (_nothing, _is_same),
    (_yes_or_no, _same_first_word),
)
