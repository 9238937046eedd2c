r"""Compare the boxed answer of a completion with the reference answer, as mathematics or else as text.

    verify(r"so $\boxed{(2, 2)}$ and $\boxed{(6, 2)}$", "(6, 2), (2, 2)")  # (1.0, "ok", "")
    verify(r"\boxed{k \in \mathbb{Z}}", r"$k\in\mathbb Z$")             # text: math-verify cannot parse \in Z
    verify(r"\boxed{\text{Heavy rain}}", "heavy rain")                  # words: text, without case

Reading order: boxes() extracts the answer; _comparison() chooses how the answer is compared.
"""

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable

MAX_PARSED_CHARS = 4096  # math-verify takes quadratic time or worse; answers of MATH-500 have at most 53


def verify(completion: str, answer: str) -> tuple[float, str, str]:
    r"""Return reward (0 or 1), status and detail of a completion; answer is LaTeX, a number or text.

    The last \boxed{...} is compared. Boxes that are separated only by "and", "or", punctuation or spaces form
    a list, for example \boxed{1} and \boxed{2} for "1, 2", or repeat an answer, in which case all must be
    right. If a completion has no box, the expression that math-verify extracts from the last MAX_PARSED_CHARS
    characters is compared: the one after "the answer is", else the last. Words, times of day, and answers
    that math-verify cannot parse are compared as text, and require a box.
    """
    gold = _parse_box(answer, whole=True)
    matches = _comparison(answer, gold)
    is_math = matches is _matches_math
    if not is_math and not _is_text(answer):
        return (
            0.0,
            "error",
            f"the reference answer {answer[:99]!r} has no letter or digit, or the braces do not match",
        )
    contents = last_boxes(completion)
    if not contents:
        return _unboxed(completion, gold) if is_math else (0.0, "no_answer", "")
    joined = ", ".join(contents)
    if len(joined) > MAX_PARSED_CHARS:
        return 0.0, "wrong", ""
    if not any(content.strip(" .") for content in contents):
        return 0.0, "no_answer", ""
    is_right = matches(joined, answer)
    if not is_right and len(contents) > 1:  # one answer, repeated
        is_right = all(matches(content, answer) for content in contents)
    return (1.0, "ok", "") if is_right else (0.0, "wrong", "")


def _comparison(answer: str, gold: list) -> Callable[[str, str], bool]:
    """Choose the function (content of a box, reference answer) -> bool; gold: the parsed reference answer."""
    if _is_time(answer):
        return _matches_time
    if _is_words(answer, gold):
        return _matches_words
    return _matches_math if _is_math(gold) else _matches_text


def comparison_of(answer: str) -> tuple[str, str]:
    """Return how a reference answer is compared (number, expression or text), and the value."""
    gold = _parse_box(answer, whole=True)
    if _comparison(answer, gold) is not _matches_math:
        return "text", normal_text(answer)
    return "number" if getattr(gold[0], "is_number", False) else "expression", str(gold[0])


# ------------------------------------------------------------------------------------------------------------
# The answer in a completion
# ------------------------------------------------------------------------------------------------------------
# Escaped braces (\{) are skipped. A brace after pairs of backslashes (\\ is a line break) is not escaped.
_BRACE = re.compile(r"(?<!\\)(?:\\\\)+(?=[{}])|\\(?:(boxed|fbox)\s*\{|[{}])|\{|\}")
_TEXT = r"\\(?:text(?:rm|bf|it|normal|up)?|math(?:rm|bf|it|normal)|mbox|hbox|operatorname)\s*"
_JOINT = re.compile(  # the text between two boxes of a list; possessive, so that it never backtracks
    rf"(?:[\s,;&$~*_]|\\[,;:!()\[\]\s]|\\\\|\\q?quad(?![a-z])|{_TEXT}\{{\s*,?\s*(?:and|or)?\s*,?\s*\}}"
    r"|(?<![a-z])(?:and|or)(?![a-z]))*+"
)


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""List (start, end, content) of each complete \boxed{...} and \fbox{...}, skipping boxes in boxes."""
    boxes_so_far = []
    open_braces = []  # the regex match of every open box, None for every other open brace
    for match in _BRACE.finditer(text):
        if match[1] or match[0] == "{":
            open_braces.append(match if match[1] else None)
        elif match[0] == "}" and open_braces and (opening := open_braces.pop()) is not None:
            while boxes_so_far and boxes_so_far[-1][0] > opening.start():
                boxes_so_far.pop()
            boxes_so_far.append((opening.start(), match.end(), text[opening.end() : match.start()]))
    return boxes_so_far


def last_boxed(text: str) -> str | None:
    """Return the content of the last box, or None if the text has no box."""
    all_boxes = boxes(text)
    return all_boxes[-1][2] if all_boxes else None


def last_boxes(text: str) -> list[str]:
    r"""Return the distinct contents of the last list of boxes: ["2", "3"] for \boxed{2} and \boxed{3}."""
    all_boxes = boxes(text)
    first = len(all_boxes) - 1
    while first > 0 and _JOINT.fullmatch(text, all_boxes[first - 1][1], all_boxes[first][0]):
        first -= 1
    return list(dict.fromkeys(content for _, _, content in all_boxes[max(first, 0) :]))


# ------------------------------------------------------------------------------------------------------------
# Mathematics
# ------------------------------------------------------------------------------------------------------------
def load_library():
    """Import math-verify (0.4 s), silencing a warning: its timeout is off because the reward pool has one."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    import math_verify

    return math_verify


def warm_up() -> None:
    """Load math-verify, SymPy and the grammar of LaTeX; else the first verdict would pay for it."""
    load_library()
    import sympy  # noqa: F401

    for answer, completion in (("0.5", r"\frac{1}{2}"), ("2x", "x^2"), ("(1, 2)", "(1, x)")):
        verify(rf"\boxed{{{completion}}}", answer)


# Notations that math-verify misreads: 1e-05 as a product with e, 10\,000 as the numbers 10 and 000.
_EXPONENT = re.compile(r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([+-]?\d{1,3})(?![\w.]*\w)")
_ROOT = re.compile(r"\u221a\s*(\d+(?:\.\d+)?|\w|\([^()]*\)|\{[^{}]*\})")
_SPACED = re.compile(r"(?<![\w.])\d{1,3}(?:(?:\\[,;: ]|~)\d{3})+(?!\d)")


def _in_latex(text: str) -> str:
    r"""Rewrite a box for math-verify: Unicode signs as LaTeX commands, and see _plain_numbers()."""
    text = _ROOT.sub(r"\\sqrt{\1}", text).translate(_SIGNS)
    return _plain_numbers(text.replace(r"\varnothing", r"\emptyset"))


def _plain_numbers(text: str) -> str:
    r"""Rewrite numbers with an exponent as products with a power of ten, and 10\,000 as 10000."""
    text = _EXPONENT.sub(lambda match: rf"{match[1]} \times 10^{{{int(match[2])}}}", text)
    return _SPACED.sub(lambda match: re.sub(r"\\[,;: ]|~", "", match[0]), text)


@functools.lru_cache(maxsize=256)  # the completions of a group share their reference answer
def _parse_box(content: str, whole: bool = False, units: bool = True) -> list:
    """Return [expression, normalised text] of a boxed answer, [text] if it cannot be parsed, or [] if empty.

    whole: parse all of the content; do not fall back to a fraction inside the content. units: remove units,
    and letters that may be units, at the end.
    """
    library = load_library()
    # LaTeX only: math-verify's other parsers pick a number out of a box that cannot be parsed, for example
    # 10 from \boxed{7^{7^7} \bmod 10}.
    config = library.LatexExtractionConfig(try_extract_without_anchor=not whole)
    if not units:
        normal = dataclasses.replace(config.normalization_config, units=False)
        config = dataclasses.replace(config, normalization_config=normal)
    box = r"\boxed{" + _in_latex(content).strip().rstrip(".") + "}"
    return library.parse(box, [config], parsing_timeout=None, raise_on_error=True)


def _is_math(parsed: list) -> bool:
    return bool(parsed) and not isinstance(parsed[0], str)


def _matches_math(content: str, answer: str) -> bool:
    return _equal(_parse_box(answer, whole=True), _parse_box(content))


def _equal(gold: list, answer: list) -> bool:
    is_equal = load_library().verify(gold, answer, timeout_seconds=None, raise_on_error=True)
    return is_equal and not _is_unfinished(gold, answer) and not _has_other_base(gold, answer)


_BASE = re.compile(r"(?<!\w)[0-9A-Za-z]+_\{?(\d+)\}?$")


def _has_other_base(gold: list, answer: list) -> bool:
    """Tell whether both texts are numbers with a base, such as 101_2, and the bases differ."""
    bases = [_BASE.search(str(parsed[-1])) for parsed in (gold, answer)]
    return None not in bases and bases[0][1] != bases[1][1]


# Formulas that only the text shows: math-verify evaluates determinants during parsing, and reads only the
# first number of an unboxed 2^{10} \bmod 7.
_EVALUATED = re.compile(r"\\(?:operatorname\*?\s*\{\s*)?(?:gcd|lcm|det|b?mod)(?![A-Za-z])|\\begin\{vmatrix\}")


def _is_unfinished(gold: list, answer: list) -> bool:
    r"""Tell whether an answer to a number is still a sum, an integral, a maximum, ... to work out [ours].

    math-verify evaluates the answer, so a policy could copy the question's formula into the box. Powers,
    roots, products, fractions, 10! and \binom{10}{3} count as numbers, and answers with letters are not
    checked. gold and answer: the values of _parse_box().
    """
    import sympy

    expression = answer[0]
    if isinstance(expression, sympy.Equality):  # 2 + 3 = 5
        expression = expression.rhs
    if not isinstance(gold[0], sympy.Number) or not isinstance(expression, sympy.Basic):
        return False
    elementary = sympy.functions.elementary
    open_forms = (
        sympy.Add, sympy.Sum, sympy.Product, sympy.Integral, sympy.Derivative, sympy.Limit, sympy.log,
        sympy.Max, sympy.Min, sympy.floor, sympy.ceiling,
        elementary.trigonometric.TrigonometricFunction,
        elementary.trigonometric.InverseTrigonometricFunction,
        elementary.hyperbolic.HyperbolicFunction,
    )  # fmt: skip
    right_side = str(answer[-1]).rpartition("=")[2]
    is_evaluated = _EVALUATED.search(right_side) and not _EVALUATED.search(str(gold[-1]))
    return expression.has(*open_forms) or bool(is_evaluated)


def _unboxed(completion: str, gold: list) -> tuple[float, str, str]:
    """Verify the last expression of a completion that has no box."""
    tail = completion[-MAX_PARSED_CHARS:]
    if len(tail) < len(completion):  # drop the first word, which may be cut: half a number is another number
        tail = "".join(tail.split(maxsplit=1)[1:])
    tail = _plain_numbers(tail.replace("\u2212", "-"))
    answer = load_library().parse(tail, parsing_timeout=None, raise_on_error=True)
    if not answer:
        return 0.0, "no_answer", ""
    return (1.0, "ok", "") if _equal(gold, answer) else (0.0, "wrong", "")


# ------------------------------------------------------------------------------------------------------------
# Text: answers that math-verify cannot parse, for example p \to q or x \equiv 3 \pmod 7 [ours]
# ------------------------------------------------------------------------------------------------------------
_SIGNS = str.maketrans(
    {
        "\u2212": "-", "\u2264": r"\leq ", "\u2265": r"\geq ", "\u2260": r"\neq ", "\u221e": r"\infty ",
        "\u03c0": r"\pi ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ",
        "\u2192": r"\rightarrow ", "\u2261": r"\equiv ", "\u00b0": r"^\circ ",
        "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u2124": r"\mathbb{Z}",
        "\u211d": r"\mathbb{R}", "\u2205": r"\emptyset ", "\u00b2": "^2", "\u00b3": "^3",
    }
)  # fmt: skip
_SYNONYMS = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "le": r"\leq", "ge": r"\geq", "ne": r"\neq",
    "to": r"\rightarrow", "implies": r"\Rightarrow", "iff": r"\Leftrightarrow", "land": r"\wedge",
    "lor": r"\vee", "lnot": r"\neg", "varnothing": r"\emptyset", "ldots": "...", "dots": "...",
    "cdots": "...", "mid": "|", "vert": "|", "lvert": "|", "rvert": "|", "langle": "(", "rangle": ")",
    "colon": ":", "bmod": "mod ", "mod": "mod ", "degree": r"^\circ", "lbrace": r"\{", "rbrace": r"\}",
    "left": "", "right": "", "big": "", "bigl": "", "bigr": "", "Big": "", "displaystyle": "",
    "quad": " ", "qquad": " ",
}  # fmt: skip
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\s+", " "),
        (_TEXT + r"\{([^{}]*)\}", r" \1 "),
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\pmod\s*(?:\{([^{}]*)\}|(\w))", r"(mod \1\2)"),
        (r"\\([a-zA-Z]+)", lambda match: _SYNONYMS.get(match[1], match[0])),
        (r"(?<!\\)\\[,;:!()\[\]\s]|[$~]", " "),
        (r"\\([%&#])", r"\1"),
        (r"\\\{\s*\\begin\{(?:array|aligned)\}(?:\{[lcr| ]*\})?(.*)\\end\{(?:array|aligned)\}",
         r"\\begin{cases}\1\\end{cases}"),
        (r",?\s*&\s*(?:(?:if|for|when)\b)?", "&"),
        (r"[ .,;]*(?:\\\\)? *\\end\{cases\}", r"\\end{cases}"),
        (r"[ .,;]+(?=\\\\)", ""),
        (r"\\(mathbb|mathcal|frac|sqrt)\s*([A-Z0-9])(?![A-Za-z0-9])", r"\\\1{\2}"),
        (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"([_^])\s*\{\s*([A-Za-z0-9]|\\[a-zA-Z]+)\s*\}", r"\1\2"),
        (r"(?<![\\a-zA-Z])[A-Za-z]{2,}", lambda match: _fold(match[0])),
        # Remove spaces, except in \pi k and 1 2.
        (r"(\\[a-zA-Z]+(?= [A-Za-z])|[0-9](?= [0-9])) | ", lambda match: f"{match[1]} " if match[1] else ""),
        (r"^[.,;]+|[.,;]+$", ""),
    )
)  # fmt: skip


def _fold(word: str) -> str:
    """Lowercase a word, except up to three capitals: AB can be a segment and ABC a triangle."""
    return word if word.isupper() and len(word) <= 3 else word.lower()


def normal_text(text: str) -> str:
    """Normalise a text: remove spaces, $ and text commands, lowercase words, and unify LaTeX synonyms."""
    text = text.translate(_SIGNS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _is_text(answer: str) -> bool:
    """Tell whether a text has matching braces and at least one letter or digit."""
    all_boxes = boxes(rf"\boxed{{{answer}}}")
    is_whole = len(all_boxes) == 1 and all_boxes[0][2] == answer
    return is_whole and re.search(r"\w", normal_text(answer)) is not None


def _is_time(answer: str) -> bool:
    """Tell whether a reference answer is a time of day; math-verify reads 3:30 as 1/10, which 2:20 equals.

    A reduced ratio, for example 5:17, stays mathematics [ours].
    """
    text = answer.strip().strip("$").strip()
    time = re.fullmatch(r"(\d{1,2}):([0-5]\d)(\s*(?:\\text\{)?\s*[apAP]\.?[mM]\.?\s*\}?)?", text)
    if time is None:
        return False
    hour, minute, half = time.groups()
    return bool(half) or minute[0] == "0" or math.gcd(int(hour), int(minute)) > 1


def _matches_time(content: str, answer: str) -> bool:
    return normal_text(content) == normal_text(answer)


_NOT_IN_WORDS = re.compile(  # text commands, braces, spaces, quotes and signs of products
    rf"{_TEXT}(?=\{{)|(?<!\\)[{{}}]|\\(?:cdot|times)(?![A-Za-z])|\\[,;:! ]"
    "|[\\s$~*\"'`\u2018\u2019\u201c\u201d\u00b7\u00d7\u22c5]"
)


def _in_words(text: str) -> str:
    r"""Reduce a text to its words and punctuation: \text{Heavy}\ rain. becomes "Heavy rain"."""
    return " ".join(_NOT_IN_WORDS.sub(" ", text).split()).rstrip(" .")


def _is_word(text: str) -> bool:
    has_vowel = re.search("[aeiou]", text, re.IGNORECASE) is not None
    return len(text) > 2 and text != "and" and (has_vowel or text.isupper())


def _has_only_words(text: str) -> bool:
    text = _in_words(text)
    is_plain = re.fullmatch("[A-Za-z ,;]+", text) is not None
    return is_plain and any(map(_is_word, re.split("[ ,;]+", text)))


def _is_words(answer: str, gold: list) -> bool:
    """Tell whether a reference answer is words, for example "Tom" or "heavy rain" [ours].

    math-verify reads a word as a product of variables, so that "cat" would equal "tac". One word must have
    three letters, and a vowel or only capitals (the order HTT): mgh and xyz stay products. So do two letters,
    because AB = BA, and no compass point is another one backwards. gold: the parsed answer, without units
    ("x meters" is x) and with "infinity" as a number: both stay mathematics.
    """
    if not _has_only_words(answer):
        return False
    if not _is_math(gold):
        return True
    return bool(gold[0].free_symbols) and _has_only_words(str(gold[-1]).replace(r"\infty", "inf"))


def _matches_words(content: str, answer: str) -> bool:
    """Compare words without case, and lists in any order, for example "cats and dogs"."""
    return _matches_text(_in_words(content).lower(), _in_words(answer).lower())


_OPEN = ("begin", "langle", "(", "{", "[")
_CLOSE = ("end", "rangle", ")", "}", "]")


def _pieces(text: str) -> list[str]:
    r"""Split a list at commas, semicolons, "and" and "or" that are outside of brackets and environments."""
    pieces = []
    depth = 0
    start = 0
    for match in re.finditer(
        r"\\(?:begin|end|langle|rangle)|\\?[({\[\])}]|[,;]|(?<![\\a-zA-Z])(?:and|or)(?![a-zA-Z])", text
    ):
        sign = match[0].removeprefix("\\")
        depth += (sign in _OPEN) - (sign in _CLOSE)
        is_comma_in_number = sign == "," and re.match(r"\d,\d{3}(?!\d)", text[max(0, match.start() - 1) :])
        if sign in (",", ";", "and", "or") and depth == 0 and not is_comma_in_number:
            pieces.append(text[start : match.start()])
            start = match.end()
    return [piece for piece in (*pieces, text[start:]) if normal_text(piece)]


def _matches_text(content: str, answer: str) -> bool:
    """Tell whether two texts are equal, or are lists of equal pieces in any order."""
    if normal_text(content) == normal_text(answer):
        return True
    texts = [re.sub(_TEXT + r"\{\s*,?\s*(and|or)\s*,?\s*\}", r" \1 ", text) for text in (content, answer)]
    pieces, gold_pieces = map(_pieces, texts)
    if len(pieces) != len(gold_pieces):
        return False
    for gold in gold_pieces:
        match = next((piece for piece in pieces if _same_piece(piece, gold)), None)
        if match is None:
            return False
        pieces.remove(match)
    return True


_NAME = re.compile(r"[A-Za-z](\([A-Za-z]\))?=(?=[^=]+$)")  # y= or f(x)=, which a completion may omit


def _same_piece(piece: str, gold: str) -> bool:
    piece = normal_text(piece)
    gold = normal_text(gold)
    if bool(_NAME.match(piece)) != bool(_NAME.match(gold)):
        piece = _NAME.sub("", piece, count=1)
        gold = _NAME.sub("", gold, count=1)
    if piece == gold:
        return True
    has_words = any(re.search(r"[A-Za-z]{2}", re.sub(r"\\[a-zA-Z]+", "", text)) for text in (piece, gold))
    num_sets = [text.count(r"\{") for text in (piece, gold)]  # math-verify takes a set for a tuple
    if has_words or num_sets[0] != num_sets[1] or re.search(r"[0-9] [0-9]", f"{piece}, {gold}"):
        return False
    parsed = [_parse_box(text, whole=True, units=False) for text in (gold, piece)]
    return all(map(_is_math, parsed)) and _equal(*parsed)
