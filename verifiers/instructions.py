"""Verify constraints that a rule can decide, with the names of IFEval: length, keywords, format, language.

    verify("YES, IT IS.", '[{"id": "change_case:english_capital"}, {"id": "punctuation:no_comma"}]')
    # (0.5, "wrong", "not met: punctuation:no_comma")

Names, arguments and meanings: Zhou et al., Instruction-Following Evaluation for Large Language Models
(arXiv 2311.07911) and google-research/instruction_following_eval, strict version. Differences [ours]:
- Keywords are literal text and not regular expressions.
- Sentences are split by a rule instead of NLTK's trained model.
- Languages with their own script (for example Thai) are recognised by the script, all other languages by
  py3langid instead of langdetect.
- English in capitals or lower case is text with nine of ten letters in ASCII. IFEval asks langdetect, which
  takes short texts and lists of names for other languages: "ocean crest properties" or a list of first names.
- Words are found by a rule: DON'T is one word in capitals, for NLTK two.
- The frequency of a character such as # is counted. IFEval's code replaces it by a random letter.
"""

import difflib
import inspect
import json
import operator
import re
import unicodedata
from collections import Counter
from collections.abc import Callable

RELATIONS = {"less than": operator.lt, "at least": operator.ge}
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
ABBREVIATIONS = frozenset("mr mrs ms dr prof st jr sr inc ltd co vs etc e.g i.e".split())
SCRIPTS = {  # {language with its own script: first word of the Unicode names of the letters}
    "bn": "BENGALI", "gu": "GUJARATI", "he": "HEBREW", "kn": "KANNADA", "ko": "HANGUL", "ml": "MALAYALAM",
    "pa": "GURMUKHI", "ta": "TAMIL", "te": "TELUGU", "th": "THAI", "zh": "CJK",
}  # fmt: skip


def verify(completion: str, answer: str, **columns) -> tuple[float, str, str]:
    """Return the share of constraints met, the status, and the names of the violated constraints.

    answer: JSON, either [{"id": name, argument: value, ...}, ...] or IFEval's {"instruction_id_list": [name,
    ...], "kwargs": [{argument: value, ...}, ...]}. Otherwise the columns instruction_id_list and kwargs of
    the row are used. Status "error": the answer cannot be parsed.
    """
    try:
        constraints = read_constraints(answer, columns)
    except ValueError as error:
        return 0.0, "error", str(error)
    text = completion.strip()
    if not text:
        return 0.0, "no_answer", ""
    failed = [name for name, is_met in constraints if not is_met(text)]
    reward = 1 - len(failed) / len(constraints)
    return (reward, "wrong", "not met: " + ", ".join(failed)) if failed else (1.0, "ok", "")


def read_constraints(answer: str, columns: dict) -> list[tuple[str, Callable[[str], bool]]]:
    """Return (name, function that checks a text) for each constraint; ValueError for a bad constraint."""
    try:
        rows = json.loads(answer) if answer.strip() else None
    except ValueError as error:
        raise ValueError(f"the answer is not JSON ({error}): {answer[:99]!r}") from error
    if not isinstance(rows, list):
        source = rows if isinstance(rows, dict) and "instruction_id_list" in rows else columns
        names = _parsed(source.get("instruction_id_list"))
        arguments = _parsed(source.get("kwargs"))
        if not isinstance(names, list) or not isinstance(arguments, list) or len(names) != len(arguments):
            raise ValueError(
                'the answer must be a list of {"id": name, ...}, or there must be instruction_id_list and '
                "kwargs, two lists of one length, in the answer or as columns"
            )
        arguments = [_parsed(row) or {} for row in arguments]
        if wrong := [row for row in arguments if not isinstance(row, dict)]:
            raise ValueError(
                f"kwargs must hold an object of arguments or null for each, not {str(wrong[0])[:80]!r}"
            )
        rows = [{"id": name} | row for name, row in zip(names, arguments)]
    if not rows:
        raise ValueError("the list of constraints is empty")
    return [_read_constraint(row) for row in rows]


def _parsed(value):
    """Return a value that is written as JSON text, as some copies of IFEval do; other values as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _read_constraint(row: dict) -> tuple[str, Callable[[str], bool]]:
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        raise ValueError(f'a constraint must be an object with an "id", not {str(row)[:99]}')
    name = row["id"]
    check = CHECKS.get(name)
    if check is None:
        nearest = difflib.get_close_matches(name, CHECKS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown constraint {name!r}: did you mean {nearest!r}?")
    # In IFEval's dataset every row has the arguments of all checks; the irrelevant arguments are null.
    arguments = {key: value for key, value in row.items() if key != "id" and value is not None}
    for key, value in arguments.items():
        refuse_argument(name, key, value)
    try:
        inspect.signature(check).bind("", **arguments)
        check("Some text.", **arguments)  # raises for arguments of wrong types and for unknown relations
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"constraint {name!r}: {error}") from error
    return name, lambda text: check(text, **arguments)


def refuse_argument(name: str, key: str, value: object) -> None:
    """Raise ValueError for an argument that no text could meet, or every text, because of its type."""
    if key in ("keywords", "forbidden_words"):
        is_valid = isinstance(value, list) and value and all(isinstance(w, str) and w.strip() for w in value)
        form = "a list of words"
    elif key.startswith(("num_", "nth_")) or key.endswith("frequency"):
        is_valid = type(value) in (int, float) and value >= 0 and value % 1 == 0
        form = "a whole number of 0 or more"
    elif key == "language":
        is_valid = isinstance(value, str) and re.fullmatch(r"[A-Za-z]{2,3}(-[A-Za-z0-9]+)*", value)
        form = "a code, for example en or zh-cn"
    else:
        is_valid = isinstance(value, str) and value.strip()
        form = "a text"
    if not is_valid:
        raise ValueError(f"constraint {name!r}: {key} must be {form}, not {value!r}")


# ------------------------------------------------------------------------------------------------------------
# Checks: True if the text meets the constraint. The arguments have the names of IFEval.
# ------------------------------------------------------------------------------------------------------------
def _compare(count: int, relation: str, limit: int) -> bool:
    if relation not in RELATIONS:
        raise ValueError(f"the relation must be one of {', '.join(RELATIONS)}, not {relation!r}")
    return RELATIONS[relation](count, limit)


def _sentences(text: str) -> int:
    """Count sentences, which end at . ! or ? before white space; dots of some words and numbers end none.

    These are abbreviations (Dr.), initials (J.), dotted abbreviations before a word in lower case (the U.S.
    maternity leave), and numbers of list items in lower case (1. mobile apps).
    """
    text = re.sub(r"^[ \t]*\d+\.[ \t]+(?=[a-z])", "", text, flags=re.MULTILINE)
    count = 0
    start = 0
    for end in re.finditer(r"(?<![.!?])[.!?]++[\"'\u201d)\]*]*+(?=\s|$)|[\u3002\uff01\uff1f]++", text):
        words = text[start : end.start()].rsplit(maxsplit=1)
        last = words[-1].lower().lstrip("(\"'") if words else ""
        is_dot = end[0] == "." and end.end() < len(text)
        is_dotted = (
            re.fullmatch(r"(?:[a-z]\.)+[a-z]", last)
            and text[end.end() : end.end() + 9].lstrip()[:1].islower()
        )
        is_short = last in ABBREVIATIONS or (len(last) == 1 and last.isalpha())
        if words and not (is_dot and (is_short or is_dotted)):
            count += 1
            start = end.end()
    return count + bool(re.search(r"\w", text[start:]))


def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
    if sum(map(bool, paragraphs)) != num_paragraphs or not 0 < nth_paragraph <= num_paragraphs:
        return False
    words = paragraphs[nth_paragraph - 1].split()  # blank paragraphs are counted here, as in IFEval
    if not words:
        return False
    word = words[0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _divided(text: str, divider: str) -> list[str]:
    """Return the sections between dividers; blank sections at the ends are dropped, others give []."""
    sections = [section.strip() for section in text.split(divider)]
    sections = sections[not sections[0] : len(sections) - (not sections[-1])]
    return sections if all(sections) else []


def _is_json(text: str) -> bool:
    text = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str) -> bool:
    ends = [(line.find("<<"), line.rfind(">>"), line) for line in text.splitlines()]
    return any(0 <= start < end and line[start:end].strip("<> \t") for start, end, line in ends)


def _highlights(text: str) -> int:
    single = [highlight.strip("*").strip() for highlight in re.findall(r"\*[^\n*]*\*", text)]
    double = [highlight.strip() for highlight in re.findall(r"\*\*([^\n*]*+)\*\*", text)]
    return sum(map(bool, single)) + sum(map(bool, double))


def _postscript(text: str, postscript_marker: str) -> bool:
    letters = [re.escape(letter) for letter in postscript_marker if not letter.isspace()]
    return re.search(r"\s?".join(letters), text, re.IGNORECASE) is not None


def _is_language(text: str, language: str) -> bool:
    """Tell whether a text is in a language: by the script of most letters if possible, else by py3langid.

    A region has no effect: zh-cn and zh-TW are zh. ValueError for a code that py3langid does not know; it is
    raised when the constraint is read, because every check is tried on a text then.
    """
    language = language.partition("-")[0].lower()
    scripts = Counter(
        unicodedata.name(letter, "").split(" ")[0].split("-")[0] for letter in text if letter.isalpha()
    )
    if language in SCRIPTS or language == "ja":
        kana = scripts.pop("HIRAGANA", 0) + scripts.pop("KATAKANA", 0)
        if language == "ja":
            return kana > 0 and kana + scripts["CJK"] > scripts.total() / 2
        return kana == 0 and scripts[SCRIPTS[language]] > scripts.total() / 2
    try:
        import py3langid
    except ImportError as error:
        raise ValueError(
            f"recognising the language {language!r} requires py3langid, which requirements.txt names: run "
            "`make install`"
        ) from error
    codes = [code for code, _ in py3langid.rank(text)]  # all languages, most likely first
    if language not in codes:
        raise ValueError(
            f"py3langid does not know the language {language!r}; it knows {len(codes)} codes, for example "
            "de, en, es, fr, hi, pt and ru"
        )
    return codes[0] == language


def _is_english_case(text: str, is_case: Callable[[str], bool]) -> bool:
    """Tell whether a text is in one case and nine of ten letters are ASCII, which allows a word like café."""
    letters = [letter for letter in text if letter.isalpha()]
    return is_case(text) and 10 * sum(map(str.isascii, letters)) >= 9 * len(letters)


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(word.lower() in text.lower() for word in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: _compare(
        text.lower().count(keyword.strip().lower()), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(
            re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words
        )
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _compare(
        text.lower().count(letter.strip().lower()), let_relation, let_frequency
    ),
    "language:response_language": _is_language,
    "length_constraints:number_words": lambda text, num_words, relation: _compare(
        len(re.findall(r"\w+", text)), relation, num_words
    ),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _compare(
        _sentences(text), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: (
        len(_divided(text, "***")) == num_paragraphs
    ),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(re.findall(r"^[ \t]*(?:\*[^*\n]|-)", text, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: any(option in text for option in OPTIONS),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        _highlights(text) >= num_highlights
    ),
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(re.escape(section_spliter.strip()) + r"\s?\d+", text)) >= num_sections
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _has_title,
    "combination:two_responses": lambda text: len(texts := _divided(text, "******")) == 2 == len(set(texts)),
    "combination:repeat_prompt": lambda text, prompt_to_repeat: text.lower().startswith(
        prompt_to_repeat.strip().lower()
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: len(text) > 1 and text[0] == text[-1] == '"',
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: _compare(
        sum(word.isupper() for word in re.findall(r"(?:[A-Z]\.){2,}|\w[\w'-]*", text)),
        capital_relation,
        capital_frequency,
    ),
    "change_case:english_capital": lambda text: _is_english_case(text, str.isupper),
    "change_case:english_lowercase": lambda text: _is_english_case(text, str.islower),
    "punctuation:no_comma": lambda text: "," not in text,
}
