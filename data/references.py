"""Reference answers: bring the answer of a row into the form that its verifier compares, and describe a set.

    plain_reference("<answer> 5 </answer>")          # "5"
    plain_reference("The answer is 5.")              # "5"
    refusal("proof", ("math",))                      # why a row is refused
    lines_of("gsm8k", describe(references))          # lines for the start

A reference that no completion can equal gives reward 0 for ever, and one that all rows share gives reward 1
to a policy that repeats it. The start prints what it compares, so that a user sees both.
"""

import ast
import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable

from verifiers.math import last_boxes

COMPARED = ("numeric", "gsm8k", "math")  # kinds whose references are values, not whole texts
MAX_CONSTANT_FRAC = 0.2  # of the rows, that one constant completion may solve without a warning [ours]
MAX_WORDS = 15  # of a reference that is compared as a value; the longest of MATH-500 has 3 [ours]
# Words in place of an answer: NuminaMath writes "proof" and "notfound".
_PLACEHOLDERS = re.compile(
    r"(?i)\W*(?:(?:see )?(?:the )?proof(?: is)?(?: given| omitted)?(?: above| below)?|proved|prove(?: it)?"
    r"|not ?found|n/?a|nan|null|unknown|todo|(?:no )?(?:final )?answer|solution|q\.?e\.?d|\u8bc1\u660e"
    r"|omitted|not applicable|(?:answers? (?:will |may )?)?var(?:y|ies)"
    r"|see (?:the )?(?:solution|explanation|above|below)(?: above)?)\W*"
)
_TAGS = re.compile(r"(?is)\s*<(answer|solution|final_answer)>(.*)</\1>\s*")
_SENTENCE = re.compile(
    r"(?is)\s*(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+|correct\s+)?answer\s*(?:is|:|=)"
    r"\s*:?\s*(.+?)\.?\s*"
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_TWO_SENTENCES = re.compile(r"[A-Za-z]{2,}[.!?]\s+[A-Z][a-z]+ ")


def plain_reference(text: str) -> str:
    r"""Return a value without the frame that datasets put around it.

    Frames: <answer>5</answer>, "The answer is 5.", \boxed{5}, a solution before "####", and ["5"] as JSON.
    """
    for frame in (_TAGS, _SENTENCE):
        if match := frame.fullmatch(text):
            text = match[match.lastindex].strip()
    if "####" in text:
        text = text.rpartition("####")[2].strip() or text
    contents = [content.strip() for content in last_boxes(text)]
    text = ", ".join(contents) if any(contents) else text
    items = json_list(text)
    return items[0] if len(items) == 1 and isinstance(items[0], str) else text


def json_list(text: str) -> list:
    """Return the texts of a list such as ["5", "6"], or of {"answer": "5"}; [] for others such as [5, 6]."""
    if not re.match(r"\s*(?:\[|\{\s*[\"'](?:final_?)?answer[\"']\s*:)\s*[\"']", text):
        return []
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            items = read(text)
            return items if isinstance(items, list) else list(items.values())
    return []


def refusal(text: str, kinds: Iterable[str]) -> str | None:
    """Return why a text cannot be the reference answer of built-in kinds; None if it can."""
    kinds = [kind for kind in kinds if kind in COMPARED]
    if not kinds:
        return None
    shown = f"the reference answer {text[:80]!r} of kind {kinds[0]}"
    items = json_list(text)
    is_object = re.match(r'\s*\{\s*"(?:inputs|outputs|fn_name|asserts|setup|tests?)"', text)
    if is_object or re.match(r"\s*(?:\[\s*[\"'])?\s*(?:assert |def check\(|import )", text):
        return f"{shown} holds the tests of a program: name kind code for the row or for the set"
    if len(items) > 1:
        return f"{shown} is a list of {len(items)} answers: keep one, or write them as one, such as 5, 6"
    words = _COMMAND.sub(" ", text)
    if _PLACEHOLDERS.fullmatch(words):
        return f"{shown} stands in place of an answer"
    if "math" not in kinds:
        return None  # the start tries the other two, which accept numbers only
    num_words = len(_WORD.findall(words))
    if num_words > MAX_WORDS or "<<" in text or num_words > 5 and _TWO_SENTENCES.search(text):
        return (
            f"{shown} is a solution or a text, which no completion repeats: name the column of the final "
            "answer in columns.answer, or another kind"
        )
    return None


# ------------------------------------------------------------------------------------------------------------
# What the start says about a set
# ------------------------------------------------------------------------------------------------------------
References = Counter[tuple[str, str]]  # {(comparison, value): rows}; value "": has none
FRACTIONAL = ("tests", "constraints")  # comparisons whose value is JSON: {constant completion: its reward}


def describe(references: References) -> dict:
    """Return the report of a set: rows by comparison, examples, frequent values, the best constant answer."""
    total = sum(references.values())
    compared: Counter = Counter()
    values: Counter = Counter()  # {constant: sum of its rewards}
    examples: dict[str, list[str]] = {}
    for (comparison, value), count in sorted(references.items(), key=lambda item: (-item[1], item[0])):
        compared[comparison] += count
        is_fraction = comparison in FRACTIONAL
        for constant, share in (json.loads(value or "{}") if is_fraction else {value: 1}).items():
            values[constant] += count * share
        if value and not is_fraction and len(examples.setdefault(comparison, [])) < 3:
            examples[comparison].append(shown(value))
    values.pop("", None)
    most_frequent = [(shown(value), count) for value, count in values.most_common(3)]
    constant, count = most_frequent[0] if most_frequent else (None, 0)
    frac = count / total if most_frequent else None  # null: no value is known, for example of tests
    verb = "earns the reward of" if set(compared) & set(FRACTIONAL) else "is right in"
    is_trivial = frac is not None and frac > MAX_CONSTANT_FRAC
    return {
        "compared_as": dict(compared.most_common()),
        "examples": examples,
        "most_frequent": most_frequent,
        "constant_frac": frac,
        "warning": f"the constant answer {constant} {verb} {frac:.1%} of the rows" if is_trivial else None,
    }


def lines_of(name: str, report: dict) -> list[str]:
    """Describe the references of a set in a line, and warn if a constant completion solves much of it."""
    examples = {how: f" ({', '.join(values)})" for how, values in report["examples"].items()}
    counts = report["compared_as"]
    compared = ", ".join(f"{how} {count:,}{examples.get(how, '')}" for how, count in counts.items())
    total = sum(counts.values())
    frequent = ", ".join(f"{value} {count / total:.1%}" for value, count in report["most_frequent"])
    line = f"{name}: references compared as {compared}" + (f"; most frequent: {frequent}" if frequent else "")
    return [line, f"warning: {name}: {report['warning']}"] if report["warning"] else [line]


def shown(value: str) -> str:
    """Return a value for a line of the console, cut at 30 characters."""
    return value if len(value) <= 30 else f"{value[:27]}..."
