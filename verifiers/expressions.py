r"""Read the LaTeX of an answer and compare two answers as mathematics, on top of math-verify and SymPy.

    equal(r"\frac{1}{2^{20}}", r"2^{-20}")      # True: numbers are compared relative to their size
    equal("x<-1, x>2", r"(-\infty,-1)\cup(2,\infty)")                   # True: sets of numbers
    equal("5 kg", "5000 g"), equal("5 kg", "5 g"), equal("5 kg", "5")   # True, False, True: units

Reading order: plain_latex() rewrites what math-verify misreads; parse(); equal() and its three comparisons.
"""

import dataclasses
import functools
import logging
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from verifiers.lazy import LazyModule

logic = LazyModule("latex2sympy2_extended.logic")
sympy = LazyModule("sympy")
FLOAT_RTOL = 1.0001e-6  # relative tolerance of a number with a decimal point: 0.333333 is 1/3, 0.33333 is not
FLOAT_ATOL = 5e-7

# ---- LaTeX that math-verify reads as it is meant -----------------------------------------------------------
TEXT_COMMAND = r"\\(?:text(?:rm|bf|it|normal|up)?|math(?:rm|bf|it|normal)|mbox|hbox|operatorname)\s*"
SIGNS = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u2264": r"\leq ", "\u2265": r"\geq ", "\u2260": r"\neq ",
        "\u221e": r"\infty ", "\u03c0": r"\pi ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ",
        "\u2192": r"\rightarrow ", "\u2261": r"\equiv ", "\u00b0": r"^\circ ", "\u00f7": "/",
        "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u2124": r"\mathbb{Z}",
        "\u211d": r"\mathbb{R}", "\u2205": r"\emptyset ", "\u03b8": r"\theta ", "\u2019": "'",
        "\u00a2": r"\text{ cents}",
    }
)  # fmt: skip
_SMALL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻₀₁₂₃₄₅₆₇₈₉", "0123456789+-0123456789")
_GROUP = r"\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}"  # braces, up to four levels
_SPACE = r"(?:\\[,;:! ]|\\q?quad(?![a-z])|[\s~])"
_SCALE = {"ten": 1, "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALED = "|".join(name for name in _SCALE if name != "ten")
_STYLES = (
    (r"\\(?:text)?color\s*\{[^{}]*\}\s*" + _GROUP, r"\1"),
    (r"\\(?:text)?color\s*\{[^{}]*\}|\\colorbox\s*\{[^{}]*\}|\\[hv]space\*?\s*\{[^{}]*\}", ""),
    (r"\{\s*\\(?:rm|bf|it|tt|sf|bfseries)(?![a-z])\s*([^{}]*)\}", r"\\text{\1}"),
    (r"\\(?:[lL]arge|LARGE|[hH]uge|small|tiny|normalsize|bf|rm|it|bfseries|(?:display|text)style)(?![A-Za-z])",
     ""),
    (r"\\(?:text(?:tt|sf|sc|md)|emph|hbox)(?=\s*\{)", r"\\text"),
    (r"(?<![_^])\\(?:boldsymbol|bm|pmb|bold|underline|ensuremath|math(?:bf|sf|tt|it|normal))\s*" + _GROUP,
     r"\1"),
    (r"^\{([^{},;]*)\}$", r"\1"),
    (r"^\s*(\*\*|__|`|\"+)([^*_`\"]+)\1\s*$", r"\2"),
    (r"^\s*(?:\$\$?|\\[(\[])\s*((?:[^$\\]|\\(?![)\]]))*?)\s*(?:\$\$?|\\[)\]])\s*$", r"\1"),
    (rf"^{_SPACE}+|(?:\\\\|{_SPACE})+$|(?<!\\)\\$", ""),
    # words around a number: \text{The answer is }8, \text{3, 5, and 7}, Rs. 8, 13\text{ thousand}, minus 8
    (r"^\\text\s*\{[^{}]*(?:(?:\b(?:is|are)|[=:])\s*\}|\}\s*=)(?=\s*[\d(\[\\-])", ""),
    (TEXT_COMMAND + r"\{((?:[^{}A-Za-z]|and|or)*\d(?:[^{}A-Za-z]|and|or)*)\}$", r"\1"),
    (rf"(?:{TEXT_COMMAND}\{{\s*(?:\\?\$|Rs\.?|USD|EUR|GBP)\s*\}}|\bRs\.|\\mathdollar)\s*(?=\d)", ""),
    (rf"(?<=[\d}}]){_SPACE}*(?:{TEXT_COMMAND}\{{\s*)?(?:({SCALED})s?|({'|'.join(_SCALE)})ths?)\b(?P<end>\s*\}})?",
     lambda match: rf" \times 10^{{{_SCALE[match[1]] if match[1] else -_SCALE[match[2]]}}}"
     + (r"\text{" if "{" in match[0] and not match["end"] else "")),
    (r"^(?:\\text\s*\{\s*)?(?:negative|minus)\s*\}?\s*(?=\d)", "-"),
    (rf"(?<=\d)\s*\^?\s*\{{?\s*(?:{TEXT_COMMAND}\{{)?\s*(?:st|nd|rd|th)\s*\}}*$", ""),  # 3rd
    (r"\\mathcal\s*\{?\s*O\s*\}?(?=\s*(?:\\left)?\s*\()", "O"),
    (r"(\([^()]*,[^()]*\))\s*\^\s*\{?\s*(?:T|\\top|\\intercal|\\mathsf\s*\{?T\}?)\s*\}?$", r"\1"),
)  # fmt: skip
_FUNCTIONS = "sqrt|exp|ln|log|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh"
_TRIGONOMETRIC = "sin|cos|tan|cot|sec|csc"
_NUMERALS = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8",
             "nine": "9", "ten": "10", "twelve": "12", "sixteen": "16"}  # fmt: skip
_DIGITS = r"(?<![\w.^_{\\])(\d{1,9})"
_NOTATIONS = (  # numbers and functions as people, books and programs write them
    (r"\u221a\s*(\d+(?:\.\d+)?|\w|\([^()]*\)|\{[^{}]*\})", r"\\sqrt{\1}"),
    (r"\\sqrt\s*(\[[^\[\]]*\])\s*(\w)", r"\\sqrt\1{\2}"),
    (r"\\varnothing", r"\\emptyset"),
    ("~", " "),
    (r"\\\\\s*\[\s*\d[\d.]*\s*[a-z]{2}\s*\]", r"\\\\"),
    (r"(?:\{|^)([^{}]*)\\choose(?![a-z])([^{}]*)(?:\}|$)", r"\\binom{\1}{\2}"),
    (rf"\\operatorname\s*\{{\s*({_FUNCTIONS})\s*\}}", r"\\\1"),
    (r"\\degree(?:Celsius)?(?![a-z])|\\celsius", r"^\\circ "),
    (rf"(\^\s*(\{{)?\s*\\circ\s*(?(2)\}}))\s*({TEXT_COMMAND}\{{\s*)?[CFK]\s*(?(3)\}})$", r"\1"),
    (rf"\\({_TRIGONOMETRIC})\s*([({{])?\s*(\d+(?:\.\d+)?)\s*\^\s*(\{{)?\s*\\circ\s*(?(4)\}})\s*(?(2)[)}}])",
     r"\\\1(\\frac{\3\\pi}{180})"),
    (r"^\s*(-?\d+(?:\.\d+)?|\\frac\{-?\d+\}\{\d+\})\s*=\s*([A-Za-z])\s*$", r"\2 = \1"),
    (r"^(\d+(?:\.\d+)?)(?:\s|\\text\{)*to(?:\s|\})*(\d+(?:\.\d+)?)$", r"\1:\2"),
    # {x | x > 2}, and the open interval ]1, 2[
    (r"^\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\\vert|:|\|)([^{}]*(?:<|>|\\[lg]eq?|\\neq?)"
     r"(?:[^{}]|\{[^{}]*\})*)\\\}$", r"\1"),
    (r"(?<![\w)\]])\]([^\[\](),]+,[^\[\](),]+[\[\]])", r"(\1"),
    (r"([(\[][^\[\](),]+,[^\[\](),]+)\[", r"\1)"),
    # (110)_2 and 110_{\text{two}} are 110_2
    (rf"(?:\(|{TEXT_COMMAND}\{{)\s*([\dA-F]+)\s*[)}}]\s*_", r"\1_"),
    (r"^\s*\\approx\s*", ""),
    (rf"(?<=\w)_\s*(\{{)?\s*(\(|\\text\{{)?\s*({'|'.join(_NUMERALS)}|\d+)\s*(?(2)[)}}])\s*(?(1)\}})(?<=[)}}])",
     lambda match: f"_{{{_NUMERALS.get(match[3], match[3])}}}"),
    (r"\\[dtc]?frac\s*(\d)\s+(\d)(?!\d)", r"\\frac{\1}{\2}"),
    (r"\\mathrm\{\s*([ei])\s*\}", r" \1 "),
    (r"\\text(?:bf|rm|it)?\s*\{\s*\((-?\d[\d.,]*)\)\s*\}", r"\1"),
    (r"(?<![\w\\])pi(?![A-Za-z])", r"\\pi "),
    (rf"(?<![A-Za-z\\])({_FUNCTIONS})(?=\s*[(^{{\\]|\s*\d)", r"\\\1"),
    (r"\\log_\s*\{?\s*e\s*\}?(?![A-Za-z])", r"\\ln "),
    (r"\*\*\s*(-?\d+(?:\.\d+)?|\w)", r"^{\1}"),
    (r"\*\*", "^"),
    (r"\^\s*(-\s*\d+)", r"^{\1}"),
    (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r" \\times "),
    # 1e-05, which is no product with e
    (r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([+-]?)0*(\d{1,3})(?![\w.]*\w)", r"\1 \\times 10^{\2\3}"),
    (r"(\^\{)\+", r"\1"),
    # 10\,000, 10 000, 10{,}000 and 10'000 are one number
    (rf"(?<![\w.,'])\d{{1,3}}(?:(?:{_SPACE}|\{{,\}}|\\text\{{,\}}|,\\!|')\d{{3}})+(?!\d|{_SPACE}*/)",
     lambda match: re.sub(r"\\text|\D", "", match[0])),
    # 2 1/2 and 2\frac{1}{2} are mixed numbers
    (rf"{_DIGITS}(?:{_SPACE}|\\text\{{\s*and\s*\}}| and )+(\d{{1,9}})\s*/\s*(\d{{1,9}})(?![\w.])",
     lambda match: _improper(match)),
    (rf"{_DIGITS}{_SPACE}*\\[dtc]?frac\s*(?:\{{\s*(\d{{1,9}})\s*\}}|(\d))\s*(?:\{{\s*(\d{{1,9}})\s*\}}|(\d))",
     lambda match: _improper(match)),
    (r"\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", r"\\overline{\1\2\3}"),
    (r"(?<![\w\\])(\d{0,9})\.(\d{0,9})\\(?:overline|bar|dot)\s*\{\s*(\d{1,9})\s*\}",
     lambda match: _repeating(match)),
    (r"(?<![\w\\])(\d{0,9})\.(\d{0,3}?)(\d{1,6}?)\3+\s*(?:\\[lc]?dots|\.\.\.)",
     lambda match: _repeating(match)),
    (r"[\u20ac\u00a3\u00a5]", ""),
    (r"(?<!\\)%", r"\\%"),
    (r"(?<=[})])\s*\\%", r" \\cdot 1\\%"),
    # 12\text{ cats and }13\text{ dogs}; 12\text{ cats}, 13\text{ cats}
    (rf"(?<=[\w)}}]){_SPACE}*{TEXT_COMMAND}\{{[A-Za-z\s,;]*\b(?:and|or)\s*\}}(?=\s*[-\\\w(])", ","),
    (rf"(?<=[\w)}}]){_SPACE}*{TEXT_COMMAND}\{{[A-Za-z\s]*\}}(?=\s*[,;]\s*[-\\\w(])", ""),
    (r"\\mathbb\s*\{?R\}?\s*(?:-|\\backslash)\s*(?=\\\{)", r"\\mathbb{R}\\setminus "),
    (r"(?<![A-Za-z])([A-Za-z])('{1,3})(?![A-Za-z])", lambda match: f"{match[1]}_{{{'p' * len(match[2])}}}"),
)  # fmt: skip
_COMPILED = {patterns: [(re.compile(p), r) for p, r in patterns] for patterns in (_STYLES, _NOTATIONS)}


def _rewrite(text: str, patterns: tuple) -> str:
    for pattern, replacement in _COMPILED[patterns]:
        text = pattern.sub(replacement, text)
    return text


def _improper(match: re.Match) -> str:
    whole, *parts = match.groups()
    numerator, denominator = map(int, [part for part in parts if part])
    if not 0 < numerator < denominator:
        return match[0]
    return rf"\frac{{{int(whole) * denominator + numerator}}}{{{denominator}}}"


def _repeating(match: re.Match) -> str:
    r"""Write 0.1\overline{6} as \frac{15}{90}."""
    start = match[1] + match[2]
    nines = 10 ** len(match[2]) * (10 ** len(match[3]) - 1)
    return rf"\frac{{{int(start + match[3]) - int(start or 0)}}}{{{nines}}}"


_BASIS = re.compile(r"(?:\\(?:mathbf|hat|vec|bm|boldsymbol)\s*\{?\s*)+\\?([ijk])(?:math)?(?![A-Za-z])[\s}]*")


def _as_tuple(text: str) -> str:
    r"""Write \mathbf{i} + 2\mathbf{j} as the tuple (1, 2); any other text stays as it is."""
    *parts, rest = _BASIS.split(text.strip("$ "))
    names = parts[1::2]
    coefficients = [part.replace(" ", "").removeprefix("+") for part in parts[::2]]
    is_sum = all(c.count("{") == c.count("}") and not set("(=[+-") & set(c[1:]) for c in coefficients)
    if len(names) < 2 or rest or not is_sum or len(set(names)) < len(names):
        return text
    values = {name: f"{c}1" if c in ("", "-") else c for name, c in zip(names, coefficients)}
    return f"({', '.join(values.get(name, '0') for name in 'ijk' if name != 'k' or 'k' in values)})"


@functools.lru_cache(maxsize=256)
def undressed(text: str) -> str:
    r"""Remove colours, bold face, sizes, delimiters: \textcolor{red}{13}, **13** and $13$ become 13."""
    before = None
    while text != before:
        before = text
        text = _rewrite(_as_tuple(text.strip()), _STYLES)
    return text


def plain_latex(text: str) -> str:
    r"""Rewrite an answer for math-verify, for example 2 1/2, 1 234, 1e-5, x**2, sqrt(2) and 10⁸."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda match: f"^{{{match[0].translate(_SMALL)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda match: f"_{{{match[0].translate(_SMALL)}}}", text)
    text = unicodedata.normalize("NFKC", text).translate(SIGNS)  # narrow and full-width forms, ½
    text = re.sub(r"(\d)\u2044(\d)", r"\\frac{\1}{\2}", text)
    text = _rewrite(_braced(text), _NOTATIONS)
    if "," not in text and len(re.findall(r"\\[pm][mp](?![a-z])", text)) == 1:
        return ", ".join(re.sub(r"\\[pm][mp](?![a-z])", sign, text) for sign in "+-")
    return text


def _braced(text: str) -> str:
    r"""Write the argument of sqrt(...) and ^(...) in braces."""
    for match in reversed(list(re.finditer(r"(\\?(?<![A-Za-z])sqrt|\\sqrt|\^|\*\*)\s*\(", text))):
        depth = 0
        for end in range(match.end() - 1, len(text)):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            if depth == 0:
                command = r"\sqrt" if "sqrt" in match[0] else "^"
                text = f"{text[: match.start()]}{command}{{{text[match.end() : end]}}}{text[end + 1 :]}"
                break
    return text


# ---- Parsing -----------------------------------------------------------------------------------------------
def load_library():
    """Import math-verify (0.4 s). Its warning is silenced: the reward pool limits the time.

    math-verify's comparison of numbers is replaced: it drops factors below 1e-15 and rounds to six decimals.
    """
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    import math_verify
    from math_verify import grader

    if grader.sympy_numeric_eq is not _same_number:
        grader.sympy_numeric_eq = _same_number
        grader.sympy_symbolic_eq = lambda gold, answer: False  # _same_number() simplifies if it has to
    return math_verify


@functools.lru_cache(maxsize=256)  # the completions of a group share their reference answer
def parse(content: str, whole: bool = False, units: bool = True) -> list:
    """Return [expression, normalised text] of an answer, [text] if it cannot be parsed, or [] if empty.

    whole: parse all of the content; do not fall back to a fraction inside the content. units: remove units,
    and letters that may be units, at the end.
    """
    library = load_library()
    # LaTeX only: math-verify's other parsers pick a number out of a box that cannot be parsed, for example
    # 10 from \boxed{7^{7^7} \bmod 10}.
    config = library.LatexExtractionConfig(try_extract_without_anchor=not whole)
    text = plain_latex(content).strip().rstrip(".")
    if not units or ends_in_variable(text) or _MORE_THAN_UNITS.search(text):
        normal = dataclasses.replace(config.normalization_config, units=False)
        config = dataclasses.replace(config, normalization_config=normal)
    if re.search(r"(?<![\w}_^])\d+(?:\.\d+)?(?:\s|~|\\ )+\d", text):  # numbers without a sign between
        return [text]
    return library.parse(r"\boxed{" + text + "}", [config], parsing_timeout=None, raise_on_error=True)


HALVES = (  # 4 quarters may be coins, 5 squared meters are units
    r"(?:(?:squared|cubed)\b(?!\W+[A-Za-z])|half|halves|quarters?\W+of"
    r"|(?:third|fourth|fifth|sixth|seventh|eighth|ninth)s?)\b(?!-)"
)
JOINED = (  # out of 4, to the power of 10, in 4; but 3.14 to 2 decimal places, 20 in 5 days, 7 in 2024
    r"(?:(?:out of|to|(?:raised )?to the(?: power(?: of)?)?)\b[\s}$~]*\d++"
    r"(?![\s}$]*(?:decimal|significant|place|digit|[ds]\.?[pf]\b))"
    r"|(?:of|in(?!\W+[12]\d{3}\b)|over)\b[\s}$~]*\d++(?![\s}$]*[A-Za-z]{2}))"
)
_OPERATION = r"\s*(?:squared|cubed|factorial)\b"
_HALF = re.compile(  # 3 out of 4, 3 halves, 5 squared
    rf"\d\$?{_SPACE}*(?:{TEXT_COMMAND}\{{\s*)?(?:{JOINED}|(?:and an? )?{HALVES})"
)
# 5\text{ or }6\text{ m}: math-verify drops all from the first text on as units, and would read 5.
_MORE_THAN_UNITS = re.compile(
    rf"(?<=[\w)}}]){_SPACE}*{TEXT_COMMAND}\{{(?:"
    r"(?!\s*(?:(?:for|if|when|where|with)\b[^{}]*\}\s*[A-Za-z][^,;]*$|\((?!or\b|and\b)))[^{}]*\}"
    rf"(?!\s*(?:=|\\approx)|(?:{_SPACE}|[/*()]|\\cdot|\\times|\^\s*(?:\{{-?\d+\}}|\d)|{TEXT_COMMAND}\{{[^{{}}]*\}})*$)"
    rf"|{_OPERATION}|[^{{}}(]*\b(?:or|nor|not|but|and(?=\s+(?:\d|an?\b)))\b)"
)
_LAST_LETTER = re.compile(r"(?<![A-Za-z\\/])([A-Za-z]|mg)$")


def ends_in_variable(text: str, is_gold: bool = False) -> bool:
    r"""Tell whether the last letter of a formula is a variable and no unit: h in \pi r^2 h, d in 3 + 2d.

    A letter right after a digit, as in 2m, is a variable in a reference, and may be a unit in a completion.
    """
    match = _LAST_LETTER.search(text := text.strip())
    before = re.sub(r"\\(?:cdot|times)\s*$", "*", text[: match.start()]) if match else ""
    before = re.sub(r"\\[A-Za-z]+", "", before)
    is_product = is_gold and before[-1:].isdigit()
    return is_product or re.search(r"[A-Za-z]|[\d)}\]]\s*[-+]|[-+*/=^_]\s*$", before) is not None


def is_math(parsed: list) -> bool:
    """Tell whether parse() has found an expression."""
    return bool(parsed) and not isinstance(parsed[0], str)


# ---- Comparison --------------------------------------------------------------------------------------------
_LETTERS = re.compile(TEXT_COMMAND + r"\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z]")
_TRANSPOSED = re.compile(r"\^\s*\{?\s*(?:T|\\top|\\intercal)(?![A-Za-z])")


def with_cases_apart(*texts: str) -> list[str]:
    r"""Rename the capital letters of formulas that also have the small letter: M - m is not 0.

    latex2sympy turns capitals into small letters. Texts with I and without i would become imaginary.
    """
    found = [{name for name in _LETTERS.findall(text) if "{" not in name} for text in texts]
    used = set().union(*found)
    apart = {name for names in found for name in names if name != name.lower() and name.lower() in names}
    unused = iter([letter for letter in "zyxqpobruw" if not {letter, letter.upper()} & used])
    renamed = {name: next(unused, name) for name in sorted(apart)}
    if "I" in used and "i" not in used:
        renamed |= dict.fromkeys("Ii", next(unused, "I"))
    return [_LETTERS.sub(lambda match: renamed.get(match[0], match[0]), text) for text in texts]


def equal(content: str, answer: str, sums: bool = False) -> bool:
    """Tell whether the answer of a completion equals the reference answer, as mathematics.

    sums: a sum of numbers is a number, see _is_unfinished().
    """
    if "langle" not in answer and "," in content:
        content = content.replace(r"\langle", "(").replace(r"\rangle", ")")
    if (_TRANSPOSED.search(answer) is None) != (_TRANSPOSED.search(content) is None):
        return False  # latex2sympy drops the T
    if re.search(r"\\circ|\\degree|\u00b0", answer) and re.search(r"\brad(?:ian)?s?\b", content):
        return False
    if _HALF.search(content) and not re.search(r"[a-z/:]", answer) or _differ_in_unit(content, answer):
        return False
    if not has_unit(answer):
        content, answer = with_cases_apart(content, answer)
    if ends_in_variable(answer, is_gold=True):
        content = re.sub(rf"{TEXT_COMMAND}\{{(?!\s*[ei]\s*\}})[^{{}}]*\}}(?:\^\{{?\d\}}?)?$", "", content)
        return same(parse(answer, whole=True, units=False), parse(content, units=False), sums)
    gold_list, found_list = _quantities(answer), _quantities(content)
    if gold_list and found_list:
        return pair_up(found_list, gold_list, _same_quantity)
    texts = ((answer, gold_list), (content, found_list))
    quantities = [_quantity(", ".join(each[2] for each in listed) or text) for text, listed in texts]
    (gold_dimension, gold_size, gold), (dimension, size, text) = quantities
    if gold_dimension and dimension:
        if gold_dimension != dimension:
            return False
        if gold_size != size:
            return _same_quantity(*quantities)
    elif gold_dimension and _COMPOUND in gold or dimension and _COMPOUND in text:
        return False  # 2 hours 30 minutes is neither 2 nor 30
    ratios = [re.sub(r"\\text\{[^{}]*\}", "", side).rpartition("=")[2].split(":") for side in (gold, text)]
    if len(ratios[0]) > 2 and "dots" not in gold:
        return _same_ratio(*ratios)
    names = [re.match(r"\s*(y|[a-z]\(x\))\s*=", side) for side in (gold, text)]
    if None not in names and (names[0][1] == "y") != (names[1][1] == "y"):  # y = 2x and f(x) = 2x
        gold, text = (side.partition("=")[2] for side in (gold, text))
    if "=" not in gold:
        text = re.sub(r"^\s*[A-Za-z]\([^()=]*\)\s*=", "", text)  # f(3) = 17
    if "mod" not in gold:
        text = re.sub(r"(?<=\d)\s*(?:\\pmod|\(\s*\\?b?mod)(?![a-z])[^,;]*$", "", text)  # 9 \pmod{26}
    if "_" not in gold:
        text = re.sub(r"\b([a-z])_\{?\d\}?(?=\s*=)", r"\1", text)  # x_1 = 2, x_2 = -3
    functions = [re.match(r"\s*([a-z])\(([a-z])\)\s*=", side) for side in (gold, text)]
    if None not in functions and functions[0][1] == functions[1][1] and functions[0][2] not in text:
        variable = rf"(?<![A-Za-z\\]){functions[1][2]}(?![A-Za-z])"  # f(t) = t^2 is f(x) = x^2
        text = re.sub(variable, functions[0][2], text)
    calls = [re.fullmatch(r"\s*([A-Za-z]\(-?\d+\))\s*=([^,]*)", side) for side in (gold, text)]
    if None not in calls and calls[0][1] == calls[1][1]:  # f(0) = 1, which math-verify cannot compare
        gold, text = (match[2] for match in calls)
    decimals = [re.fullmatch(r"(-?\d+)(\.|,|\{,\})(\d{1,2}|\d{4,})", side.strip()) for side in (gold, text)]
    if None not in decimals and (decimals[0][2] == ".") != (decimals[1][2] == "."):  # 2,74 and 2.74
        gold, text = (f"{match[1]}.{match[3]}" for match in decimals)
    return same(parse(gold, whole=True), parse(text), sums)


def same(gold: list, answer: list, sums: bool = False) -> bool:
    """Compare two values of parse(). sums: a sum of numbers is a number."""
    if not is_math(answer) or _is_unfinished(gold, answer, sums) or _has_other_base(gold, answer):
        return False
    if _is_false(answer[0]) or _is_unsolved(gold[0], answer[0]):
        return False
    if None not in (regions := [_region(gold[0]), _region(answer[0])]):
        return _same_region(*regions)
    sides = _in_order(*_as_tuples(gold[0], answer[0]))
    are_unequal = [isinstance(side, sympy.Ne) for side in sides]  # which math-verify cannot compare
    if any(are_unequal):
        if not all(are_unequal):
            return False
        sides = [sympy.Eq(*side.args) for side in sides]
    return load_library().verify(*sides, timeout_seconds=None, raise_on_error=True)


_BASE = re.compile(r"(?<!\w)(?:[0-9][0-9A-Za-z]*|[0-9A-F]{2,})_\{?(\d+)\}?$")


def _has_other_base(gold: list, answer: list) -> bool:
    """Tell whether both texts are numbers with a base, such as 101_2, and the bases differ."""
    bases = [_BASE.search(str(parsed[-1])) for parsed in (gold, answer)]
    return None not in bases and bases[0][1] != bases[1][1]


def _is_false(expression) -> bool:
    """Tell whether an answer is a false equation of numbers, for example 13 = 12."""
    if not isinstance(expression, sympy.Equality):
        return False
    are_numbers = all(isinstance(side, sympy.Expr) and not side.free_symbols for side in expression.args)
    return are_numbers and not _close(*expression.args)


def _as_tuples(*sides) -> list:
    """Write a row or a column as a tuple if the other side is a tuple."""
    is_tuple = any(isinstance(side, sympy.Tuple) for side in sides)
    return [
        sympy.Tuple(*side) if is_tuple and isinstance(side, sympy.MatrixBase) and 1 in side.shape else side
        for side in sides
    ]


def _in_order(gold, answer) -> tuple:
    """Write x = 1, y = 2 as the tuple (1, 2) if the other side is a tuple."""

    def values(side):
        parts = side.args if isinstance(side, sympy.FiniteSet) else ()
        if len(parts) < 2 or not all(isinstance(x, sympy.Eq) and x.lhs.is_Symbol for x in parts):
            return side
        return sympy.Tuple(*(part.rhs for part in sorted(parts, key=lambda part: part.lhs.name)))

    if isinstance(gold, sympy.Tuple | sympy.Interval) or isinstance(answer, sympy.Tuple | sympy.Interval):
        return values(gold), values(answer)
    return gold, answer


# ---- numbers and formulas ----
def _same_number(gold, answer, float_rounding: int = 6, numeric_precision: int = 15) -> bool:
    """Compare two expressions in place of math-verify's sympy_numeric_eq and sympy_symbolic_eq.

    A percentage equals both numbers that it may stand for: 20% is 0.2 and 20 [ours].
    """
    if any(isinstance(side, sympy.MatrixBase | sympy.MatrixExpr) for side in (gold, answer)):
        return _same_matrix(gold, answer)
    percents = [_percent_of(side) for side in (gold, answer)]
    if None not in percents:
        return _close(*percents)
    if percents[1] is not None:
        gold, answer, percents = answer, gold, percents[::-1]
    if percents[0] is not None:
        return _close(percents[0], answer) or _close(percents[0] / 100, answer)
    return _close(gold, answer)


def _same_matrix(gold, answer) -> bool:
    try:
        gold, answer = (sympy.Matrix(side.doit()) for side in (gold, answer))  # a power has no elements
        return gold.shape == answer.shape and all(map(_same_number, gold, answer))
    except (AttributeError, TypeError, NotImplementedError):
        return False


def _percent_of(expression):
    """Return 20 for 20%, None for anything else."""
    hundredth = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    if not isinstance(expression, sympy.Mul) or hundredth not in expression.args:
        return None
    return sympy.Mul(*(arg for arg in expression.args if arg != hundredth))


def _close(gold, answer) -> bool:
    """Tell whether two expressions are equal, or agree in value up to FLOAT_RTOL if one is a decimal."""
    try:
        if gold == answer:
            return True
        gold, answer = _evaluated(gold), _evaluated(answer)
        if gold == answer:
            return True
        if isinstance(gold, sympy.Rational) and isinstance(answer, sympy.Rational):
            return False
        symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
        if not gold.has(*_open_parts()) and not answer.has(*_open_parts()):
            verdicts = [_agree(gold, answer, symbols, signs) for signs in (_SIGNS_OF if symbols else "+")]
            if False in verdicts:
                return False
            if True in verdicts:
                return True
        return bool(sympy.simplify(gold - answer).is_zero)
    except (AttributeError, TypeError, ValueError, NotImplementedError, ArithmeticError, RecursionError):
        return False


def _evaluated(expression):
    """Work out sums and products; i is the imaginary unit. dy/dx stays, which SymPy takes for 0."""
    if not expression.has(sympy.Derivative) or expression.doit() != 0:
        expression = expression.doit()
    return expression.subs({symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"})


_SIGNS_OF = ("+", "-", "+-", "-+")  # signs of the symbols at the points of comparison


@functools.cache
def _open_parts() -> tuple:
    """Return the parts of a formula that are slow to evaluate, or have no value at a point."""
    from sympy.core.function import AppliedUndef

    return sympy.Sum, sympy.Product, sympy.Integral, sympy.Derivative, sympy.Limit, AppliedUndef


def _agree(gold, answer, symbols: list, signs: str) -> bool | None:
    """Compare the values at one point; None if there are no two values, or if both are complex.

    Outside of the reals both formulas are undefined in real mathematics: x sqrt(x) is sqrt(x^3).
    """
    point = {
        symbol: sympy.Rational(7 + 4 * index, 3 + index) * (1 if signs[index % len(signs)] == "+" else -1)
        for index, symbol in enumerate(symbols)
    }
    x, y = (
        (_real_roots(side).subs(point).evalf(50) for side in (gold, answer))
        if symbols
        else (side.evalf(150) for side in (gold, answer))
    )
    if not (x.is_number and y.is_number and x.is_finite and y.is_finite):
        return None
    if symbols and "-" in signs and not x.is_real and not y.is_real:
        return None
    difference = abs(x - y)
    size = max(abs(x), abs(y))
    if difference <= size * sympy.Float("1e-40" if symbols else "1e-120"):
        return True
    if not gold.has(sympy.Float) and not answer.has(sympy.Float):
        return None if min(abs(x), abs(y)) < 1e-40 else False  # zero, of a sum that has to be simplified
    if difference <= size * 1e-12:
        return True
    is_rounded = not symbols and any(map(_is_short, (x, y)))  # 5 is not 5.0000001, and 1/3 is 0.333333
    return not is_rounded and bool(difference <= size * FLOAT_RTOL and difference <= FLOAT_ATOL)


def _is_short(number) -> bool:
    """Tell whether a number has at most five significant digits."""
    if not number.is_real or number == 0:
        return number == 0
    mantissa = number * sympy.Integer(10) ** (4 - sympy.floor(sympy.log(abs(number), 10)))
    return abs(mantissa - round(mantissa)) < 1e-6


def _real_roots(expression):
    """Write cube roots and the like so that they are real below zero, too: x^{2/3} is \\sqrt[3]{x^2}."""

    def is_odd(part) -> bool:
        return part.is_Pow and part.exp.is_Rational and part.exp.q % 2 == 1 and part.exp.q > 1

    def real_root(part):
        sign = sympy.sign(part.base) if part.exp.p % 2 else 1
        return sign * sympy.Abs(part.base) ** part.exp

    return (
        expression.replace(is_odd, real_root) if any(map(is_odd, expression.atoms(sympy.Pow))) else expression
    )


# Formulas that only the text shows: math-verify evaluates determinants during parsing, and reads only the
# first number of an unboxed 2^{10} \bmod 7.
_EVALUATED = re.compile(r"\\(?:operatorname\*?\s*\{\s*)?(?:gcd|lcm|det|b?mod)(?![A-Za-z])|\\begin\{vmatrix\}")

_MATRICES = re.compile(  # a product, a sum or a power of matrices
    r"\\end\{(?:\w*matrix|array)\}"
    r"(?:[^,;A-Za-z\\]|\\(?:[,;:! ]|(?:cdot|times|left|right|[dt]?frac|sqrt|q?quad)(?![a-z])))*"
    r"(?:\\begin\{(?:\w*matrix|array)|\^\s*\{?(?:\s|\\,)*-?\s*\(?\w)"
)


def _is_unfinished(gold: list, answer: list, sums: bool) -> bool:
    r"""Tell whether an answer is still a sum, an integral, a product of matrices, ... to work out [ours].

    math-verify evaluates the answer, so a policy could copy the question's formula into the box. Powers,
    roots, products, fractions, 10! and \binom{10}{3} count as numbers. A reference that is no rational number
    may be met by sums, logarithms and functions of angles, and whatever it has itself, the answer may have.
    gold and answer: the values of parse(). sums: a sum of numbers is worked out, as in (9+1).
    """
    expression = _right_side(answer[0])
    right_side = str(answer[-1]).rpartition("=")[2]
    has_letters = getattr(expression, "free_symbols", ())  # a + tb is a line in space, and worked out
    patterns = (_EVALUATED,) if has_letters else (_EVALUATED, _MATRICES)
    if any(each.search(right_side) and not each.search(str(gold[-1])) for each in patterns):
        return True
    if not isinstance(expression, sympy.Basic) or not isinstance(gold[0], sympy.Basic):
        return False
    open_forms = (sympy.Sum, sympy.Integral, sympy.Derivative, sympy.Limit)
    if not isinstance(gold[0], sympy.Number):
        is_open = expression.has(*open_forms) and not gold[0].has(*open_forms)
        return is_open or _has_complex_product(expression) and not _has_complex_product(gold[0])
    elementary = sympy.functions.elementary
    open_forms += (
        sympy.Product, sympy.Max, sympy.Min, sympy.floor, sympy.ceiling, sympy.log,
        elementary.trigonometric.TrigonometricFunction, elementary.trigonometric.InverseTrigonometricFunction,
        elementary.hyperbolic.HyperbolicFunction,
    )  # fmt: skip
    return expression.has(*open_forms) or not sums and expression.has(sympy.Add)


def _right_side(expression):
    """Return the last side of an equation or chain, 5 of S = 2 + 3 = 5, also for each element of a list."""
    if isinstance(expression, sympy.FiniteSet | sympy.Tuple):
        return type(expression)(*map(_right_side, expression.args))
    if isinstance(expression, logic.And):
        expression = expression._unsorted_args[-1]
    return expression.rhs if isinstance(expression, sympy.Equality) else expression


def _has_complex_product(expression) -> bool:
    """Tell whether a formula without letters multiplies complex numbers, as in (3+4i)(1-2i) and 1/(1+i)."""
    if any(symbol.name != "i" for symbol in expression.free_symbols):
        return False

    def is_complex_sum(part) -> bool:
        return part.is_Add and (part.has(sympy.I) or bool(part.free_symbols))

    return any(
        part.is_Pow and is_complex_sum(part.base) or part.is_Mul and sum(map(is_complex_sum, part.args)) > 1
        for part in sympy.preorder_traversal(expression)
    )


# ---- relations ----
def _relations(expression) -> list:
    """List the equations and inequalities of an answer, of a chain such as 1 < x < 2, or of a list."""
    if isinstance(expression, sympy.Rel):
        return [expression]
    is_list = isinstance(expression, sympy.FiniteSet | sympy.Tuple)
    parts = getattr(expression, "_unsorted_args", expression.args if is_list else ())
    if parts and not is_list and all(isinstance(part, sympy.Eq) for part in parts):  # b = 2a = 6
        return [sympy.Eq(parts[0].lhs, parts[-1].rhs, evaluate=False)]
    return [relation for part in parts for relation in _relations(part)]


def _is_solved(relation) -> bool:
    """Tell whether a variable stands alone, as in x = 3, 2 < f(x), |x| < 2 and (x, y) = (1, 2)."""
    for one, other in (relation.args, relation.args[::-1]):
        variable = one.args[0] if isinstance(one, sympy.Abs) else one
        is_alone = variable.is_Symbol or isinstance(variable, (sympy.Tuple, _open_parts()[-1]))
        if is_alone and not other.free_symbols:
            return True
    return False


def _is_unsolved(gold, answer) -> bool:
    """Tell whether an answer to a solved reference is a relation to solve [ours]: the question, copied.

    An equation in other letters or in none gives a value, for example AB = 5 and 2 + 3 = 5.
    """
    known = _relations(gold)
    letters = gold.free_symbols if known else set()
    return all(map(_is_solved, known)) and any(
        not _is_solved(relation)
        and (not isinstance(relation, sympy.Eq) or set() < relation.free_symbols <= letters)
        for relation in _relations(answer)
    )


# ---- sets of numbers: inequalities and intervals ----
def _region(expression):
    """Return (set of numbers, variable or None) of an interval or of inequalities, else None."""
    try:
        variable = None
        if isinstance(expression, sympy.Equality) and isinstance(expression.rhs, sympy.Set):  # x \in [1, 2]
            variable, expression = expression.args
        if isinstance(expression, sympy.Interval | sympy.Union | sympy.Complement):
            return (expression, variable) if not expression.free_symbols else None
        parts = [expression]
        if isinstance(expression, logic.And):
            parts = list(expression._unsorted_args)
        elif isinstance(expression, sympy.FiniteSet | sympy.Tuple):
            parts = list(expression.args)
        if isinstance(expression, sympy.Equality) or not all(_is_inequality(part) for part in parts):
            return None
        variables = set().union(*(part.free_symbols for part in parts))
        if len(variables) != 1:
            return None
        if len(parts) == 1 and not isinstance(expression, logic.And):
            from math_verify.grader import unwrap_fcs  # f(x) becomes a variable

            return unwrap_fcs(expression).as_set(), variables.pop()
        sets = [_region(part)[0] for part in parts]
        common = sympy.Intersection(*sets)
        is_or = common is sympy.S.EmptySet and not isinstance(expression, logic.And)
        return (sympy.Union(*sets) if is_or else common), variables.pop()
    except (AttributeError, TypeError, NotImplementedError, ValueError):
        return None


def _is_inequality(expression) -> bool:
    if isinstance(expression, logic.And):
        return all(map(_is_inequality, expression._unsorted_args))
    return isinstance(expression, sympy.Rel) and not isinstance(expression, sympy.Eq)


def _same_region(gold: tuple, answer: tuple) -> bool:
    """Compare two values of _region(); the variable of an interval is free, as in m >= 2 and [2, oo)."""
    if None not in (gold[1], answer[1]) and gold[1] != answer[1]:
        return False
    sets = [sympy.Union(_without_points(side[0])).doit() for side in (gold, answer)]
    if sets[0] == sets[1]:
        return True
    if not all(isinstance(side, sympy.Interval | sympy.Union | sympy.FiniteSet) for side in sets):
        return False
    boundaries = [sorted(side.boundary, key=lambda x: x.evalf()) for side in sets]
    return (
        len(boundaries[0]) == len(boundaries[1])
        and all(map(_same_number, *boundaries))
        and sympy.SymmetricDifference(*sets).measure < 1e-5
        and all((x in sets[0]) == (y in sets[1]) for x, y in zip(*boundaries))
    )


def _without_points(numbers):
    """Return R without some points as a union of intervals, and any other set as it is."""
    everything = sympy.Interval(-sympy.oo, sympy.oo)
    if isinstance(numbers, sympy.Complement) and isinstance(
        numbers.args[1], sympy.FiniteSet | sympy.Interval | sympy.Union
    ):
        base, points = numbers.args
        return (everything if base == sympy.S.Reals else base) - points
    return everything if numbers == sympy.S.Reals else numbers


# ---- ratios ----
def _same_ratio(gold: list[str], answer: list[str]) -> bool:
    """Tell whether a ratio of three or more numbers is the same: 1:2:3 is 2:4:6."""
    if len(gold) != len(answer):
        return False
    sides = [[parse(part, whole=True) for part in side] for side in (gold, answer)]
    if not all(is_math(part) for side in sides for part in side):
        return gold == answer
    (x0, *xs), (y0, *ys) = [[part[0] for part in side] for side in sides]
    return all(_close(x * y0, y * x0) for x, y in zip(xs, ys))


# ---- units ----
_COMPOUND = "+"
_UNITS = {  # {dimension: {size: names}}
    "length": {"1e-9": "nm nanometer", "1e-6": "\u03bcm", "0.001": "mm millimeter millimetre",
               "0.01": "cm centimeter centimetre", "0.1": "dm decimeter", "1": "m meter metre",
               "1000": "km kilometer kilometre", "0.0254": "inch inche in", "0.3048": "ft foot feet",
               "0.9144": "yd yard", "1609.344": "mi mile"},
    "mass": {"0.000001": "mg milligram", "0.001": "g gram gramme", "1": "kg kilogram", "1000": "tonne"},
    "weight": {"1": "oz ounce", "16": "lb pound"},
    "time": {"1e-9": "ns", "1e-6": "\u03bcs", "0.001": "ms millisecond", "1": "s sec second",
             "60": "min minute", "3600": "h hr hour", "86400": "day", "604800": "week"},
    "years": {"1": "month", "12": "yr year"},
    "money": {"0.01": "cent \u00a2", "1": "dollar"},
    "force": {"1": "N newton", "1000": "kN"},
    "energy": {"0.001": "mJ", "1": "J joule", "1000": "kJ kilojoule", "1e6": "MJ megajoule"},
    "power": {"0.001": "mW", "1": "W watt", "1000": "kW kilowatt", "1e6": "MW megawatt"},
    "pressure": {"1": "Pa pascal", "100": "hPa", "1000": "kPa kilopascal", "1e6": "MPa", "1e5": "bar"},
    "charge": {"1e-9": "nC", "1e-6": "\u03bcC", "0.001": "mC", "1": "C coulomb"},
    "current": {"1e-6": "\u03bcA", "0.001": "mA", "1": "A ampere amp"},
    "voltage": {"0.001": "mV", "1": "V volt", "1000": "kV kilovolt"},
    "resistance": {"1": "\u03a9 ohm", "1000": "k\u03a9", "1e6": "M\u03a9"},
    "frequency": {"1": "Hz hertz", "1000": "kHz", "1e6": "MHz", "1e9": "GHz"},
    "photon": {"1": "eV", "1000": "keV", "1e6": "MeV", "1e9": "GeV"},
    "volume": {"0.001": "ml mL milliliter millilitre", "0.01": "cl", "1": "l L liter litre"},
    "speed": {"1": "m/s", "1000": "km/s", "0.01": "cm/s", "5/18": "km/h kmh kph kmph", "0.44704": "mph"},
}  # fmt: skip
_UNIT = {
    name: (dimension, Fraction(size))
    for dimension, units in _UNITS.items()
    for size, names in units.items()
    for name in names.split()
}
_NAMES = "|".join(sorted(map(re.escape, _UNIT), key=len, reverse=True))
_ONE_UNIT = rf"(?P<power>square|cubic|sq\.?|cu\.?)?\s*(?P<unit>{_NAMES})s?(?![A-Za-z/])\.?\s*"
_UNIT_WORD = TEXT_COMMAND + r"\{[^{}]*\}(?:\^\{?\d\}?)?"
_UNIT_FRACTION = re.compile(
    rf"(?<=[\d}}\s,]){_SPACE}*\\[dt]?frac\s*\{{\s*{_UNIT_WORD}\s*\}}\s*\{{\s*{_UNIT_WORD}\s*\}}$"
)
_AT_END = re.compile(rf"(?<=[\d)}}\s])\s*{_ONE_UNIT}(?:\^?\s*\{{?(?P<exponent>\d)\}}?)?$")
_PRICE = re.compile(r"^(-?)\s*\\?\$\s*(\d[\d.,]*)$")
_PAIR = re.compile(rf"(\d+(?:\.\d+)?)\s*({_NAMES})s?(?![A-Za-z/])\.?(?:\s|,|and\b)*")


@functools.lru_cache(maxsize=256)
def _quantity(text: str) -> tuple[tuple | None, Fraction, str]:
    """Return (dimension, size of the unit, number) of a text such as 5 kg; (None, 1, text) without a unit.

    The number of 2 hours 30 minutes is in the smallest unit, after _COMPOUND.
    """
    text = _UNIT_FRACTION.sub("", text)
    plain = re.sub(rf"{TEXT_COMMAND}\{{([^{{}}]*)\}}", r" \1 ", text)
    plain = _PRICE.sub(r"\1\2 dollar", plain.strip())
    plain = re.sub(r"\\mu(?![a-z])\s*", "\u03bc", plain.replace("\u00b5", "\u03bc"))
    plain = re.sub(r"\\Omega(?![a-z])|\u2126", "\u03a9", plain)
    plain = plain.replace(r"\$", "").replace("\u00b2", "^2").replace("\u00b3", "^3")
    plain = " ".join(re.sub(rf"{_SPACE}+", " ", plain).split()).rstrip(".")
    pairs = _PAIR.findall(plain)
    if len(pairs) > 1 and not _PAIR.sub("", plain):
        dimensions, sizes = zip(*(_UNIT[name] for _, name in pairs))
        if len({*dimensions}) == 1 and [*sizes] == sorted({*sizes}, reverse=True):
            total = sum(Fraction(number) * size for (number, _), size in zip(pairs, sizes))
            return (dimensions[0], 1), sizes[-1], f"{_COMPOUND}{total / sizes[-1]}"
    match = _AT_END.search(plain)
    number = plain[: match.start()] if match else re.sub(r"(?:(?<=[\d}\s])\s*[A-Za-z]{3,})+$", "", plain)
    is_number = re.search(r"\d", number) and not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", number))
    if not is_number or re.search(rf"(?<=[\d}}]){_OPERATION}", plain):
        return None, Fraction(1), text
    if match is None:
        return None, Fraction(1), number if number != plain else text
    dimension, size = _UNIT[match["unit"]]
    words = {"s": 2, "c": 3}.get((match["power"] or " ")[0], 1)
    power = int(match["exponent"] or words)
    return (dimension, power), size**power, number


_LISTED = re.compile(r"\s*(?:(?<!\\)[,;]|\\q?quad(?![a-z])|(?<![a-z])(?:and|or)(?![a-z]))[,;\s]*")


@functools.lru_cache(maxsize=256)
def _quantities(text: str) -> list[tuple]:
    """Return _quantity() of each element of a list such as 3 cm or 4 cm; [] for any other text."""
    parts = _LISTED.split(re.sub(rf"{TEXT_COMMAND}\{{([^{{}}]*)\}}", r" \1 ", text))
    quantities = [_quantity(part) for part in parts if part.strip()]
    has_units = all(dimension for dimension, *_ in quantities)
    return quantities if len(quantities) > 1 and has_units and not _quantity(text)[0] else []


def pair_up(found: list, gold: list, is_pair: Callable) -> bool:
    """Pair each part of the reference with a part of the answer, in any order; False if any part is left."""
    rest = list(found)
    for part in gold:
        partner = next((each for each in rest if is_pair(each, part)), None)
        if partner is None:
            return False
        rest.remove(partner)
    return not rest


_PREFIX = "(?:[TGMKkhdcmunp\u03bc]|kilo|mega|giga|hecto|deci|centi|milli|micro|nano)?"
_DEGREES = "(?:[cfk]|celsius|fahrenheit|kelvin)"
_OTHER_UNIT = re.compile(rf"{_PREFIX}(\w+) {_PREFIX}\1|(?i:(?!(\w)\w* \2){_DEGREES} {_DEGREES}|am pm|pm am)")
_NO_UNIT = re.compile(rf"{TEXT_COMMAND}|\^?\s*\{{?\s*\\circ|\\(?:cdot|times)|\b[Dd]egrees?\b|\\[,;:! ]")


def _differ_in_unit(*texts: str) -> bool:
    """Tell whether unknown units differ in a prefix, in the scale of degrees, or in a.m. and p.m."""
    if all(_quantity(text)[0] or _quantities(text) for text in texts):
        return False
    units = []
    for text in texts:
        plain = re.sub(r"\.(?!\d)|(?<=[a-z]{3})(?<!u)s\b", "", _NO_UNIT.sub(" ", text.translate(SIGNS)))
        tail = re.search(r"\d[^\\+*=(),\d]*(?:\d\W*)?$|$", re.sub(r"\\[A-Za-z]+", "1", plain))
        units.append(re.findall("[A-Za-z\u03bc]+", tail[0]))
    pairs = zip(*units) if len(units[0]) == len(units[1]) else ()
    return any(one != other and _OTHER_UNIT.fullmatch(f"{one} {other}") for one, other in pairs)


def has_unit(text: str) -> bool:
    """Tell whether a text is a number with a unit that is known here."""
    dimension, _, number = _quantity(text)
    return dimension is not None and is_math(parse(number.removeprefix(_COMPOUND), whole=True))


def _same_quantity(*quantities: tuple) -> bool:
    """Compare two values of _quantity(): 1 km is 1000 m."""
    if len({dimension for dimension, *_ in quantities}) > 1:
        return False
    sides = []
    for _, size, number in quantities:
        parsed = parse(number.removeprefix(_COMPOUND), whole=True)
        if not is_math(parsed) or not isinstance(parsed[0], sympy.Expr):
            return False
        sides.append(parsed[0] * sympy.Rational(size.numerator, size.denominator))
    return _close(*sides)
