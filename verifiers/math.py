r"""Compare the boxed answer of a completion with the reference answer, as mathematics or else as text.

    verify(r"so $\boxed{(2, 2)}$ and $\boxed{(6, 2)}$", "(6, 2), (2, 2)")  # (1.0, "ok", "")
    verify(r"\boxed{k \in \mathbb{Z}}", r"$k\in\mathbb Z$")             # text: math-verify cannot parse \in Z
    verify(r"\boxed{\text{Heavy rain}}", "heavy rain")                  # words: text, without case

Reading order: boxes() extracts the answer; _comparison() chooses how the answer is compared.
"""

import functools
import math
import re
from collections.abc import Callable

from verifiers import expressions
from verifiers.expressions import TEXT_COMMAND, equal, has_unit, is_math, pair_up, parse, same, undressed
from verifiers.forms import decide

MAX_PARSED_CHARS = 4096  # math-verify takes quadratic time or worse; answers of MATH-500 have at most 53
MAX_COMPARED_CHARS = 600  # of an expression; longer ones are compared as text, without math-verify
MAX_BARS = 16  # |1||1|... takes math-verify minutes: each bar may open or close
MAX_DEPTH = 40  # of braces
MAX_DIGITS = 50_000  # of a power


def verify(completion: str, answer: str) -> tuple[float, str, str]:
    r"""Return reward (0 or 1), status and detail of a completion; answer is LaTeX, a number or text.

    The last \boxed{...} is compared, unless <answer>5</answer> or "Final answer: 5" follows. Boxes separated
    only by "and", "or", punctuation or spaces form a list, for example \boxed{1} and \boxed{2} for "1, 2", or
    repeat an answer, in which case all must be right. Without a box, the expression in the last
    MAX_PARSED_CHARS characters is compared: the one after "the answer is", else the last. Words, times of
    day, and answers that math-verify cannot parse are compared as text, and require a box.
    """
    answer, completion = (_in_latin(text, is_prose=False) for text in (answer, completion))
    answer = undressed(answer)
    completion = _BLANK_BOX.sub("", completion)  # "inside \boxed{}" names the place of the answer
    matches = _comparison(answer)
    if matches is not equal and not _is_text(answer):
        detail = f"the reference answer {answer[:99]!r} has no letter or digit, or the braces do not match"
        return 0.0, "error", detail
    contents = last_boxes(completion, answer)
    if contents and (final := _last_word(completion, matches)):
        contents = [final]
    if re.search(r"\\(?:boxed|fbox)\s*\{", completion[boxes(completion)[-1][1] if contents else 0 :]):
        contents = []  # a cut box is no answer
    elif not contents:
        contents = [text] if (text := unboxed_answer(completion, matches in READ_IN_PROSE)) else []
        if matches is equal and re.fullmatch(r"\s*\(.*\)\s*", "".join(contents)):
            matches = functools.partial(equal, sums=True)
    if not any(content.strip(" .") for content in contents):
        return 0.0, "no_answer", ""
    if sum(map(len, contents)) > MAX_PARSED_CHARS:
        return 0.0, "wrong", ""
    contents = [undressed(_in_latin(content, is_prose=False)) for content in contents]
    joined = ", ".join(contents)
    if too_large(joined) or too_large(answer):
        return (1.0, "ok", "") if normal_text(joined) == normal_text(answer) else (0.0, "wrong", "")
    is_right = joined.split() == answer.split()  # the reference itself, also if nothing can read it
    decided = None if is_right else decide(joined, answer, _is_match)
    if decided is None and not is_right:
        decided = _fits_in_places(joined, answer)
    if decided is not None:
        return (1.0, "ok", "") if decided else (0.0, "wrong", "")
    is_right = is_right or _has_same_words(joined, answer) or _same_letters(joined, answer)
    if not is_right and (len(contents) == 1 or matches is not _matches_choice):
        is_right = matches(joined, answer) or matches is equal and _is_labelled(joined, answer)
    if not is_right and len(contents) > 1:  # one answer, repeated
        is_right = all(matches(content, answer) for content in contents)
    return (1.0, "ok", "") if is_right else (0.0, "wrong", "")


def _is_match(content: str, answer: str) -> bool:
    """Compare a part of an answer with a part of the reference."""
    return _has_same_words(content, answer) or _comparison(answer)(content, answer)


@functools.lru_cache(maxsize=256)  # the completions of a group share their reference answer
def _comparison(answer: str) -> Callable[[str, str], bool]:
    """Choose the function (answer of the completion, reference answer) -> bool."""
    if _is_time(answer):
        return _matches_time
    if _choice_of(answer)[0] and not _choice_of(answer)[1]:
        return _matches_choice
    if _value_of_choice(answer):
        return _matches_choice_or_value
    if too_large(answer):
        return _matches_text
    gold = parse(answer, whole=True)
    if _is_words(answer, gold):
        return _matches_words
    return equal if is_math(gold) or has_unit(answer) else _matches_text


def comparison_of(answer: str) -> tuple[str, str]:
    """Return how a reference answer is compared (number, expression or text), and the value."""
    answer = undressed(answer)
    if _comparison(answer) is not equal:
        return "text", normal_text(answer)
    gold = parse(answer, whole=True)
    if not is_math(gold):  # a number with a unit, for example 10 km/h
        return "number", answer
    return "number" if getattr(gold[0], "is_number", False) else "expression", str(gold[0])


# ---- The answer in a completion ----------------------------------------------------------------------------
# Escaped braces (\{) are skipped. A brace after pairs of backslashes (\\ is a line break) is not escaped.
_BRACE = re.compile(
    r"(?<!\\)(?:\\\\)+(?=[{}])|\\(?:(boxed|fbox)\s*\{|[{}])|\{|\}"
    r"|\\boxed\s+(?P<bare>[\w+-](?:[\w/,.+-]{0,30}[\w])?)"  # \boxed 8
)
_JOINTS = (  # the text between two boxes of a list; possessive, so that it never backtracks
    rf"(?:[\s,;&~*_]|\\[,;:!()\[\]\s]|\\\\|\\q?quad(?![a-z])|{TEXT_COMMAND}\{{\s*,?\s*\}}"
    rf"|{TEXT_COMMAND}\{{[^{{}}]{{0,40}}(?<![a-z])(?:and|or)(?![a-z])[^{{}}]{{0,40}}\}}"
    r"|(?<![a-z])(?:and|or)(?![a-z])|(?<![A-Za-z])[A-Za-z](?:_\{?\w\}?)?\s*=%s)*+"
)
_JOINT = re.compile(_JOINTS % r"|\$")
_MATH_JOINT = re.compile(_JOINTS.replace(r"()\[\]", "") % "")  # the next dollar or \( begins math
_NAME_OF_BOX = re.compile(r"(?<![A-Za-z\\])([A-Za-z](?:_\{?\w\}?)?)\s*=[\s$]*$")
_BLANK_BOX = re.compile(r"\\f?box(?:ed)?\{(?:[\s.~…]|\\(?:[,;:! ]|\w?dots|q?quad)|\\text\w*\{[\s.]*+\})*+\}")


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""List (start, end, content) of each complete \boxed{...} and \fbox{...}, skipping boxes in boxes."""
    boxes_so_far = []
    open_braces = []  # the regex match of every open box, None for every other open brace
    for match in _BRACE.finditer(text):
        if match["bare"]:
            boxes_so_far.append((match.start(), match.end(), match["bare"]))
        elif match[1] or match[0] == "{":
            open_braces.append(match if match[1] else None)
        elif match[0] == "}" and open_braces and (opening := open_braces.pop()) is not None:
            while boxes_so_far and boxes_so_far[-1][0] > opening.start():
                boxes_so_far.pop()
            boxes_so_far.append((opening.start(), match.end(), text[opening.end() : match.start()]))
    return boxes_so_far


def last_boxes(text: str, answer: str = "") -> list[str]:
    r"""Return the distinct contents of the last list of boxes: ["2", "3"] for \boxed{2} and \boxed{3}.

    Repeats and names (["x=2", "y=2"]) are kept if the reference answer has as many elements as the boxes.
    """
    all_boxes = boxes(text)
    first = len(all_boxes) - 1
    while first > 0 and _JOINT.fullmatch(text, all_boxes[first - 1][1], all_boxes[first][0]):
        first -= 1
    last = all_boxes[max(first, 0) :]
    contents = [content for *_, content in last]
    if not 1 < len(last) < 20 or sum(len(_pieces(each)) for each in contents) != len(_pieces(answer)):
        return list(dict.fromkeys(contents))
    names = [_NAME_OF_BOX.search(text, max(0, start - 20), start) for start, *_ in last]
    is_named = "=" in answer and all(names)
    return [f"{name[1]}={each}" if is_named else each for name, each in zip(names, contents)]


_DENIED = re.compile(  # before a number: "cannot be", "a wrong" answer, "3 out of"
    r"(?i)(?:\b(?:can ?not|not|never|wrong|incorrect)|n['’]t)[^\w.!?:;,\n]*(?:\b(?:be|equals?|to)\b\s*){0,3}$"
    r"|\d\s+(?:out of|to the power of)\s+$"
)
_WRONG = re.compile(
    r"(?i)\b(?:an?|the|common|typical|usual|possible|tempting)\s+(?:\w+\s+)?(?:wrong|incorrect)\s*$"
)
# Where an answer without a box begins. "answer to the question is", "Answer:", "Answer $73$", "#### 73"
_ANCHOR = re.compile(
    r"\b(?:answers?|(?:correct|right|best)\s+(?:option|choice))\b(?:[^\n.=:$\\]{0,60}?(?:\b(?:is|are|equals?|be)\b|[:=]|\s[-\u2013\u2014]\s)|(?<!s)(?=\W*\d)|(?=[\s*]*(?:\$|\\[(\[])))|^####",
    re.IGNORECASE | re.MULTILINE,
)
_TAGGED = re.compile(
    r"<answer>(?!.*<answer>)(.*?)(?:</answer>|\Z)|\*\*([^*\n]+)\*\*[.!]?\s*\Z", re.DOTALL | re.IGNORECASE
)
_PROSE = re.compile(r"(?<![\\A-Za-z{])[a-z]{3,}")
_DELIMITED = re.compile(
    r"(?:(?<![\\\d])\$\$(?P<a>(?:\\.|[^$\\])+)\$\$|(?<![\\\d])\$(?P<b>(?:\\.|[^$\\])+)\$"
    r"|\\\[(?P<c>(?:(?!\\\]).)+)\\\]|\\\((?P<d>(?:(?!\\\)).)+)\\\))\s*(?P<percent>\\?%)?",
    re.DOTALL,
)
_END = r"[.!?;]?\s*(?:\n|\Z)|[.?;](?=\s|$)|\*\*|\s?\((?=[a-z]{2,}\s)|<[/|]|[`\"]"
_END += r"|,?\s+(?:not|because|since|which|so|as|where|when|with|but"
_SENTENCE_END = re.compile(_END + r")\b")
_CLAUSE_END = re.compile(_END + r"|for|of|if|that|after|in|on|to)\b")
_COMPARING = re.compile(
    r"\b(?:not|no|nor|neither|either|between|than|least|most|less|more|fewer|greater|over|under|above|below)\b",
    re.IGNORECASE,
)
_OPENING_WORDS = re.compile(
    r"(?:(?:the|an?(?=\s+(?:total|number|value)\b)|(?-i:an?(?=\s+\w|\W*\Z))|exactly|equal|to|simply|just|therefore"
    r"|thus|approximately|about|indeed|then|is|number|value|given|by|now|option|choice|total|of|we|have|get)\b[\s:*]*|[:*_`\"'=#]+\s*)+",
    re.IGNORECASE,
)
_HALF = re.compile(rf"\$?-?\d+(?:[.,]\d+)*\$?\s+(?:{expressions.JOINED}|(?:and an?\s+)?{expressions.HALVES})")
_CLOSING_WORD = re.compile(
    rf"(?<=[^\s,])\s+(?!(?:and|or|dozen|ten|{expressions.SCALED}|{expressions.HALVES})(?:(?:th)?s?)\b)[A-Za-z]{{2,}}[\s,!]*$"
)

# Letters and full stops of other scripts, outside of braces: "答案是 5。" and "Ответ равен 5."
_LETTERS = r"[\u0400-\u052f\u0590-\u1cff\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff]"
_FOREIGN = re.compile(rf"(?<!{_LETTERS}){_LETTERS}++(?:\s++{_LETTERS}++)*+(?![^{{}}]*\}})")
_FOREIGN_ANSWER = re.compile(
    rf"(?:答案(?=[是为為即:])|(?<!{_LETTERS})答(?=:)|答え(?=[は:])|(?<!{_LETTERS})정?답(?=[은이\s:])"
    rf"|(?<!{_LETTERS})[Оо]твет(?!{_LETTERS})|(?:الجواب|الإجابة)(?=\s*(?:هو|هي|:))|उत्तर(?=\s*:)|คำตอบ)"
    rf"(?:{_LETTERS}|[\s:]){{0,20}}"
)
_FULL_WIDTH = str.maketrans("：，；！？（）、", ":,;!?(),")
_LINKS = frozenset("或 或者 和 与 及 且 と または 또는 와 과 и или أو و या और".split())  # "and", "or"
# Words that change a number: 5万 is 50,000, 负5 is -5, 不是5 is not 5.
_CHANGES = re.compile(
    rf"[万亿千百만억천负負不非零]|大于|小于|至少|至多|分之|之间|(?<!得)到|以[下上内]|左右|可能|тыс|млн|милл|(?<!{_LETTERS})не(?!{_LETTERS})|больш|меньш"
    "|ألف|ليس"
)


def _in_latin(text: str, is_prose: bool) -> str:
    """Write digits, signs, "and" and "or" of other scripts in English; other words of prose end a clause."""
    if text.isascii() or not re.search(rf"{_LETTERS}|[\uff00-\uffef]", text) or not re.search(r"\w", text):
        return text
    text = re.sub(r"(?![0-9])\d", lambda digit: str(int(digit[0])), text.translate(_FULL_WIDTH))
    if is_prose:
        changes = lambda match: "".join(_CHANGES.findall(match[0]))
        text = _FOREIGN_ANSWER.sub(lambda match: f"\nThe answer is {changes(match)}", text)

    def in_english(match: re.Match) -> str:
        if match[0] in _LINKS:
            return " or "
        return " `\n" if is_prose and not _CHANGES.search(match[0]) else match[0]

    return _FOREIGN.sub(in_english, text).strip(" `\u3002")


def unboxed_answer(completion: str, is_math: bool) -> str:
    """Return the answer of a completion without a box, "" if there is none.

    It is the text between <answer> tags, else the expression after the last "the answer is", else the last
    expression: math between dollars or in \\(...\\), or a number with everything that belongs to it.
    is_math: the reference answer is mathematics, so that words such as "this answer is helpful" are none.
    """
    tail = completion[-MAX_PARSED_CHARS:]
    if len(tail) < len(completion):  # drop the first word, which may be cut: half a number is another number
        tail = "".join(tail.split(maxsplit=1)[1:])
    if tagged := _TAGGED.search(tail):
        tail = (tagged[1] or tagged[2] or "").strip()
    tail = re.sub(r"\b(?:negative|minus)\s+(?=\d)", "-", _in_latin(tail, is_prose=True) if is_math else tail)
    for anchor in reversed(list(_ANCHOR.finditer(tail))):
        is_count = anchor[0][:7].lower() == "answers"  # "The number of wrong answers is 5."
        if not is_count and _WRONG.search(tail[: anchor.start()][-40:]):  # "A common wrong answer is 5."
            tail = tail[: anchor.start()]
        if anchor.start() >= len(tail) or _DENIED.search(anchor[0]):  # "The answer cannot be 5, so it is 6."
            continue
        rest = _after_opening_words(tail[anchor.end() :])
        if half := _HALF.match(rest):
            return half[0].replace("$", "").rstrip(".,")
        match = _DELIMITED.match(rest)
        if match and _is_math_text(match):
            return _list_of_math(rest, [match])
        answer = _in_clause(rest)
        if is_math and (_REMARK.match(answer) or answer.startswith("not ")):
            tail = tail[: anchor.start()]
        elif answer:
            return answer
    is_short = tagged or len(tail.split()) < 4 and not re.search(r"\d", tail)
    is_prose = len(tail) > 40 and _PROSE.search(tail)
    if is_short and not is_prose and not _DELIMITED.search(tail):
        return tail
    return _last_expression(tail)


_REMARK = re.compile(  # "I hope this answer is helpful!"
    r"(?:\w+ly |very |also )?(?:acceptable|accurate|(?:un)?clear|complete|consistent|(?:in)?correct|final"
    r"|fine|good|helpful|okay|reasonable|right|satisfactory|sufficient|understandable|unique|useful|valid|wrong)\b",
    re.IGNORECASE,
)
_LAST_CHOICE = re.compile(r"\b[Aa]nswer(?:\s+is)?\s*:?[\s*]*\(?([A-J])\)?[\s.*]*\Z")
_LAST_TAGS = re.compile(r"(?is)<answer>(?!.*<answer>|[^<]*\b(?:above|box|boxed)\b|\s*</)(.*?)</answer>")
_FINAL = re.compile(  # no decimal, which may round the box
    r"(?im)\bfinal answer(?:\s+is)?[\s*:]*"
    r"(?:(?=\$|\\[(\[])|([-\u2212\u2013]?\\?\$?\d[\d,]*(?:/\d+)?(?:\\?%)?)[.\s*]*?$)"
)
_ANSWER_ALONE = re.compile(  # one letter of a choice, or mathematics without words
    r"\s*\(?[A-J]\)?\s*|(?=[^\d\\]*+[\d\\])(?!\s*[A-Za-z]\))"
    r"(?:\\[A-Za-z]+|[A-Za-z](?![A-Za-z])|[^A-Za-z\\]|\\[^A-Za-z])*+"
)


def _last_word(completion: str, matches: Callable) -> str:
    """Return the text in <answer>, the choice, or what follows "the final answer is", after all boxes."""
    tail = completion[max(boxes(completion)[-1][1], len(completion) - MAX_PARSED_CHARS) :]
    if (tagged := _LAST_TAGS.search(tail)) and _ANSWER_ALONE.fullmatch(tagged[1]):
        return tagged[1].strip(" $*")
    if matches in (_matches_choice, _matches_choice_or_value) and (choice := _LAST_CHOICE.search(tail)):
        return choice[1]
    anchors = list(_FINAL.finditer(tail))
    if anchors and anchors[-1][1] and matches in (equal, _matches_choice_or_value):
        return anchors[-1][1]
    match = _DELIMITED.match(tail, anchors[-1].end()) if anchors else None
    return _list_of_math(tail, [match]) if match and _is_math_text(match) else ""


def _after_opening_words(text: str) -> str:
    text = re.sub(r"^[\s:*]*\n\s*(?:[->*\u2022]\s+)?", "", text).lstrip()  # an item or a quotation
    opening = _OPENING_WORDS.match(text)
    return text[opening.end() :] if opening else text


def _in_clause(text: str) -> str:
    """Return the answer at the beginning of a text, before words such as "because"; "" if there is none."""
    sentence = _SENTENCE_END.split(text, maxsplit=1)[0]
    *_, last = re.split(r"\b(?:is|are|equals)\b", sentence)
    if last != sentence:
        text = _after_opening_words(last)
        if (match := _DELIMITED.match(text)) and _is_math_text(match):
            return _list_of_math(text, [match])
    answer = _without_closing_words(_CLAUSE_END.split(text, maxsplit=1)[0])
    has_words = re.match(r"[A-Za-z]{3,}\s", answer) and re.search(r"\d", answer)
    return _last_expression(answer) if has_words and not _COMPARING.search(answer) else answer


def _without_closing_words(text: str) -> str:
    """Drop the words after a number: 73 apples. Units of verifiers/expressions.py stay."""
    text = text.lstrip(" ,:").rstrip(" ,.:*_`")
    if not re.search(r"\d", text):
        return text
    while not has_unit(text) and (closing := _CLOSING_WORD.search(text)):
        text = text[: closing.start()].rstrip(" ,")
    return text


def _is_math_text(match: re.Match) -> bool:
    """Tell whether the text between two dollars is no price: "$5 and then $6"."""
    content = match["b"] or ""
    return not (re.match(r"\s*\d", content) and _PROSE.search(content))


def _list_of_math(text: str, matches: list[re.Match]) -> str:
    """Join the math of a match with the math that follows after "and", "or" or a comma."""
    while following := _DELIMITED.match(text, _MATH_JOINT.match(text, matches[-1].end()).end()):
        matches.append(following)
    contents = [next(filter(None, m.group("a", "b", "c", "d"))) + (m["percent"] or "") for m in matches]
    return ", ".join(contents)


def _last_expression(text: str) -> str:
    matches = [match for match in _DELIMITED.finditer(text) if _is_math_text(match)]
    end = matches[-1].end() if matches else 0
    numbers = list(re.finditer(r"\d(?:[.,]\d|\d)*", text[end:]))
    if not numbers:
        first = len(matches) - 1
        while first > 0 and _JOINT.fullmatch(text, matches[first - 1].end(), matches[first].start()):
            first -= 1
        is_denied = not matches or _DENIED.search(text[: matches[first].start()][-20:])
        return "" if is_denied else _list_of_math(text, [matches[first]])
    number = numbers[-1]
    is_half = re.match(rf"\s+{expressions.HALVES}", text[end + number.end() :])  # 5 squared
    if is_half or _DENIED.search(text[: end + number.start()][-30:]):
        return ""
    start = text.rfind("\n", 0, end + number.start()) + 1
    tokens = list(re.finditer(r"\S+", text[max(start, end) :].split("\n")[0]))
    place = next(i for i, token in enumerate(tokens) if token.end() > end + number.start() - max(start, end))
    first = last = place
    while first > 0 and _belongs(tokens[first - 1][0]) and not re.search(r"[.;:?]$", tokens[first - 1][0]):
        first -= 1
    while last + 1 < len(tokens) and _belongs(tokens[last + 1][0]) and tokens[last][0][-1] not in ".;:?":
        last += 1
    answer = " ".join(token[0] for token in tokens[first : last + 1])
    return _without_closing_words(answer.strip("*_`\"'=:").lstrip(" ,:;").rstrip(" ,.:;?*"))


def _belongs(token: str) -> bool:
    """Tell whether a word is part of a formula: it has no two letters in sequence, and is no article."""
    plain = re.sub(r"\\[A-Za-z]+|sqrt|pi|ln|log|sin|cos|tan|and|or", "", token)
    return not re.search(r"[A-Za-z]{2}", plain) and token.strip(".") not in ("a", "I", "A", "$")


@functools.lru_cache(maxsize=256)
def too_large(text: str) -> bool:
    """Tell whether an expression would take seconds: long ones, towers of powers, factorials, deep braces."""
    if len(text) > MAX_COMPARED_CHARS or text.count("|") + text.count("vert") > MAX_BARS:
        return True
    text = re.sub(r"\\[,;:! ]|[\s$]|\\left|\\right", "", text)
    depth = deepest = 0
    for sign in text:
        depth += (sign in "{([") - (sign in "})]")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH or re.search(r"![)}\]]+!|!!!", text):
        return True
    if any(len(match[1]) > 4 for match in re.finditer(r"(\d+)[)}\]]*!", text)):
        return True
    for match in re.finditer(r"[({\[]((?:[^(){}\[\]]|\{[^{}]*\})*+)[)}\]]+!", text):  # such as (10^9)!
        if re.search(r"\^|\*|\\times|\\cdot|\d{5}", match[1]):
            return True
    if re.search(r"\\(?:binom|[dt]binom|prod|sum|choose)[^A-Za-z]\S{0,40}?(?:\d{6}|\d\^)", text):
        return True
    for match in re.finditer(r"(?<![\d.])(\d[\d.]*)((?:[)}\]]*(?:\^|\*\*)[{(]*-?\d+)+)", text):
        exponent = 1
        for power in reversed(re.findall(r"\d+", match[2])):
            if len(power) > 6 or exponent * math.log10(int(power) or 1) > 7:
                return True
            exponent = int(power) ** exponent if exponent else 1
        if exponent * max(1.0, math.log10(float(match[1].strip(".")[:200]) + 1)) > MAX_DIGITS:
            return True
    return re.search(r"(?:\^|\*\*)[{(]*-?\d{5}", text) is not None


def warm_up() -> None:
    """Load math-verify, SymPy and the grammar of LaTeX; else the first verdict would pay for it."""
    for answer, completion in (("0.5", r"\frac{1}{2}"), ("2x", "x^2"), ("(1, 2)", "(1, x)"), ("x<1", "x>2")):
        verify(rf"\boxed{{{completion}}}", answer)


# ---- Text: answers that math-verify cannot parse, for example p \to q or x \equiv 3 \pmod 7 [ours] ---------
_BLANK = r"(?:\\[,;:! ]|[\s~])"
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
        (TEXT_COMMAND + r"\{([^{}]*)\}", r" \1 "),
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
        (r"\\begin\{cases\}(.*)\\end\{cases\}",
         lambda match: "\\\\".join(sorted(match[1].split("\\\\")))),
        (r"(\\equiv|^|,)(-?\d{1,9})(?=\(mod(0*[1-9]\d{0,8})\)$)",
         lambda match: f"{match[1]}{int(match[2]) % int(match[3])}"),
    )
)  # fmt: skip


def _fold(word: str) -> str:
    """Lowercase a word, except up to three capitals: AB can be a segment and ABC a triangle."""
    return word if word.isupper() and len(word) <= 3 else word.lower()


def normal_text(text: str) -> str:
    """Normalise a text: remove spaces, $ and text commands, lowercase words, and unify LaTeX synonyms."""
    text = text.translate(expressions.SIGNS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _is_text(answer: str) -> bool:
    """Tell whether a text has matching braces and at least one letter or digit."""
    all_boxes = boxes(rf"\boxed{{{answer}}}")
    is_whole = len(all_boxes) == 1 and all_boxes[0][2] == answer
    return is_whole and re.search(r"\w", normal_text(answer)) is not None


_TIME = re.compile(r"(\d{1,2}):([0-5]\d)(?::[0-5]\d)?\s*([ap])?\.?\s*(?:m\b\.?)?", re.IGNORECASE)


def _time_of(text: str) -> tuple[int, str, str] | None:
    """Return (hour, minutes, "a", "p" or "") of a time of day such as 3:30 p.m., None for other texts."""
    text = re.sub(rf"{TEXT_COMMAND}(?=\{{)|\\[!,;:. ]|[{{}}$]", "", text).strip()
    match = _TIME.fullmatch(text)
    return (int(match[1]), match[2], (match[3] or "").lower()) if match else None


def _is_time(answer: str) -> bool:
    """Tell whether a reference answer is a time of day; math-verify reads 3:30 as 1/10, which 2:20 equals.

    A reduced ratio, for example 5:17, stays mathematics [ours].
    """
    hour, minutes, half = _time_of(answer) or (1, "1", "")
    return bool(half) or minutes[0] == "0" or math.gcd(hour, int(minutes)) > 1


def _matches_time(content: str, answer: str) -> bool:
    """Compare times; a reference without a.m. or p.m. accepts both."""
    times = [_time_of(text) for text in (content, answer)]
    return None not in times and times[0][:2] == times[1][:2] and times[1][2] in ("", times[0][2])


# ---- choices ----
def _is_labelled(content: str, answer: str) -> bool:
    """Tell whether the answer stands after the letter of its choice, as in (B) 12."""
    letter, text = _choice_of(content)
    return bool(letter and text) and _in_words(content)[1] != "," and equal(text, answer)


_SEVERAL_LETTERS = re.compile(r"\(?[A-J]\)?(?:[\s,;&]*(?:and\b\s*)?\(?[A-J]\)?){1,4}")
# (A) and (B), (A) 12 or (B) 13; but (D) both (A) and (B)
_SECOND_CHOICE = re.compile(
    r"(?:[,;/&+\s]|and\b|or\b)+(?:[A-HJ]|I(?! +[a-z]))(?![A-Za-z'])|[^()A-Za-z]*(?:and|or)?\s*\([A-J]\)"
)


def _matches_choice(content: str, answer: str) -> bool:
    letter, text = _choice_of(content)
    if letter and _SECOND_CHOICE.match(text):
        return False
    return letter == _choice_of(answer)[0] if letter else _matches_words(content, answer)


_VALUE_OF_CHOICE = re.compile(rf"\s*(?:(\()[A-J]\)|[A-J][).](?=[\s~\\])){_BLANK}*([-.\w\\(].*)", re.DOTALL)


def _value_of_choice(text: str) -> str:
    r"""Return 24 of \textbf{(B)}\ 24; "" if the text is not one letter and one value."""
    plain = re.sub(rf"{TEXT_COMMAND}\{{\s*(\(?[A-J][^{{}}]*)\}}", r"\1 ", text, count=1)
    match = _VALUE_OF_CHOICE.fullmatch(plain)
    words = re.sub(r"\\[A-Za-z]+", "", match[2]) if match else "A"
    is_other = re.search(r"(?<![A-Za-z])[A-J](?![A-Za-z])", words) or len(_pieces(match[2])) > 1
    return "" if is_other or not match[1] and re.search("[A-Za-z]{2}", words) else match[2]


def _matches_choice_or_value(content: str, answer: str) -> bool:
    """Accept the letter, the value or both of a reference such as (B) 24."""
    letter, text = _choice_of(content)
    if match := re.fullmatch(r"([A-J])(?:\s*=)?\s+(.+)", _in_words(content)):  # B 24, C = 24
        letter, text = match.groups()
    if letter and (not text or letter != _choice_of(answer)[0]):
        return letter == _choice_of(answer)[0]
    return _is_match(_value_of_choice(content) or text, _value_of_choice(answer))


# Comparisons for which unboxed_answer() reads remarks and other scripts.
READ_IN_PROSE = (equal, _matches_choice, _matches_choice_or_value)


def _same_letters(content: str, answer: str) -> bool:
    """Compare choices of several letters: A, C is AC; the order is free if the reference is a list."""
    sides = [_in_words(text) for text in (content, answer)]
    order = sorted if re.search("[,;a]", sides[1]) else list
    letters = [order(re.findall("[A-J]", side)) for side in sides if _SEVERAL_LETTERS.fullmatch(side)]
    return len(letters) == 2 and letters[0] == letters[1]


_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\(([A-J])\)|([A-J])(?:[).:](?=\s|$)|[,.)](?=\s?[-\\.\d/%]+$)|$))(.*)",
    re.IGNORECASE,
)


def _choice_of(text: str) -> tuple[str | None, str]:
    """Return the letter of a choice and the text after the letter: (B) 12, B. 12 and B are choice B."""
    match = _CHOICE.fullmatch(_in_words(text))
    letter = (match[1] or match[2]) if match else None
    return (letter, match[3].strip()) if letter and letter.isupper() else (None, text)


_NOT_IN_WORDS = re.compile(  # text commands, braces, spaces, quotes and signs of products
    rf"{TEXT_COMMAND}(?=\{{)|(?<!\\)[{{}}]|\\(?:cdot|times)(?![A-Za-z])|\\[,;:! ]"
    "|[\\s$~*\"'`\u2018\u2019\u201c\u201d\u00b7\u00d7\u22c5]"
)


def _in_words(text: str) -> str:
    r"""Reduce a text to its words and punctuation: \text{Heavy}\ rain. becomes "Heavy rain"."""
    return " ".join(_NOT_IN_WORDS.sub(" ", text).split()).rstrip(" .")


def _has_same_words(content: str, answer: str) -> bool:
    r"""Tell whether two texts with a word are the same, for example \text{May 5} and \text{May } 5."""
    words = _in_words(answer)  # without braces, which decide in \frac{1}{2 \pi}: no text with commands
    is_text = re.search("[A-Za-z]{3}", words) is not None and "\\" not in words
    return is_text and _in_words(content).lower() == words.lower()


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
    three letters, and a vowel or only capitals (the order HTT): mgh, xyz and AB = BA stay products. gold: the
    parsed answer, without units ("x meters" is x) and with "infinity" as a number: both stay mathematics.
    """
    if not _has_only_words(answer):
        return False
    if not is_math(gold):
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
        r"\\(?:begin|end|langle|rangle)|\\?[({\[\])}]|(?<!\\)[,;]|(?<![\\a-zA-Z])(?:and|or)(?![a-zA-Z])", text
    ):
        sign = match[0].removeprefix("\\")
        depth += (sign in _OPEN) - (sign in _CLOSE)
        is_comma_in_number = sign == "," and re.match(r"\d,\d{3}(?!\d)", text[max(0, match.start() - 1) :])
        if sign in (",", ";", "and", "or") and depth == 0 and not is_comma_in_number:
            pieces.append(text[start : match.start()])
            start = match.end()
    return [piece for piece in (*pieces, text[start:]) if normal_text(piece)]


_NUMBER_OF = re.compile(
    rf"([^A-Za-z]*\d){_BLANK}*(?:{TEXT_COMMAND}\{{)?\s*([A-Za-z]{{2}}[A-Za-z ]*?)s?\s*\}}?\s*"
)


def _elements(text: str) -> list[tuple[str, str]]:
    """List (label, value) of each element of a list; the label is x in x = 3, boy in 3 boys, or ""."""
    elements = []
    for piece in _pieces(re.sub(TEXT_COMMAND + r"\{([^{}]*\b(?:and|or)\b[^{}]*)\}", r" \1 ", text)):
        name, _, value = piece.rpartition("=")
        label = re.sub(r"_\{?\w+\}?", "", normal_text(name))  # x_1 and x_2 are roots in any order
        if not name and (match := _NUMBER_OF.fullmatch(piece)):
            value, label = match.groups()
        elements.append((label, undressed(value)))
    return elements


_LINK = re.compile(TEXT_COMMAND + r"\{\s*,?\s*(and|or)\s*,?\s*\}")
_OTHER_FORM = re.compile(
    r"^-?\d+(?:\.|\{,\})\d+$|^\s*(?:\\left|\\begin|\\langle|\\?[(\[{])|=[^,;]*=|\\[pm][mp]|dots"
    r"|\b(?:each|both|double|twice|all)\b"
)


def _fits_in_places(content: str, answer: str) -> bool | None:
    """Compare a list with names or repeats: x = 3, y = 4, 3 boys, 4 girls and 2, 2, 3; None for other lists.

    An answer without names must have the order of a reference with names.
    """
    gold = _elements(answer)
    elements = _elements(content)
    labels = [label for label, _ in gold]
    own_labels = {label for label, _ in elements}
    is_named = len({*labels}) == len(gold) and all(labels["=" in answer :])  # undressed() drops a \text{max}=
    is_repeated = len({*labels}) == 1 and len({normal_text(value) for _, value in gold}) < len(gold)
    is_other = any(own_labels) and any(labels) and own_labels != {*labels} or _OTHER_FORM.search(content)
    is_other = is_other or "=" not in answer and is_named and len(elements) != len(gold)  # 2 hours 30 minutes
    if len(gold) < 2 or is_other or not (is_named or is_repeated):
        return None

    def is_pair(one: tuple[str, str], other: tuple[str, str]) -> bool:
        return _is_match(one[1], other[1])

    if len(elements) != len(gold) or is_repeated:
        return len(elements) == len(gold) and pair_up(elements, gold, is_pair)
    values = dict(elements)
    in_order = [(label, values[label]) for label in labels] if any(own_labels) else elements
    return all(map(is_pair, in_order, gold))


def _matches_text(content: str, answer: str) -> bool:
    """Tell whether two texts are equal, or are lists of equal pieces in any order."""
    if normal_text(content) == normal_text(answer):
        return True
    pieces, gold_pieces = (_pieces(_LINK.sub(r" \1 ", text)) for text in (content, answer))
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
    parsed = [parse(text, whole=True, units=False) for text in (gold, piece)]
    return all(map(is_math, parsed)) and same(*parsed)
