"""Constraints of IFEval: each check against texts that meet the constraint and texts that break it."""

import json
import time

import pytest

from tests.patience import limit
from verifiers.instructions import CHECKS, read_constraints, verify

# {name: (arguments, texts that meet the constraint, texts that break the constraint)}
CASES = {
    "keywords:existence": ({"keywords": ["tree", "C++"]}, ["Trees in c++."], ["A tree.", "C++"]),
    "keywords:frequency": (
        {"keyword": "cat", "frequency": 2, "relation": "at least"},
        ["Cat and cat", "concatenated category"],  # IFEval counts parts of words
        ["cat", "dog"],
    ),
    "keywords:forbidden_words": ({"forbidden_words": ["bad", "a.b"]}, ["badly", "axb"],
        ["It is BAD.", "a.b"]),
    "keywords:letter_frequency": (
        {"letter": "E", "let_frequency": 3, "let_relation": "less than"}, ["eE", "x"], ["eee"]),
    "language:response_language": (
        {"language": "ko"}, ["\uc548\ub155\ud558\uc138\uc694 OK"],
        ["Hello", "\u3053\u3093\u306b\u3061\u306f"]),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "at least"}, ["one two three", "it's two-fold"],
        ["one two", "one - two"]),
    "length_constraints:number_sentences": (
        {"num_sentences": 3, "relation": "less than"},
        ["Dr. Who came. He left.", "It costs 3.5 or 4.2. Yes!", "One?! Two...", "no end", "J. R. R. T.",
         "The U.S. leave is short. So.", "1. one thing.\n2. another thing."],
        ["One. Two. Three.", "One! Two? Three", "So.\nIt.\n\nIs.", "In the U.S. It is. So.",
         "\u4e00\u3002\u4e8c\u3002\u4e09\u3002"],
    ),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2}, ["a\n***\nb", "***\na***b\n***"],
        ["a\n\nb", "a***b***c", "a\n***\n***\nb"]),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        ["First.\n\nThen, more.", "a\n\n\"THEN\" b"],
        ["Then.\n\nFirst.", "Then.", "a\n\nthen\n\nb", "a\n\nthenceforth", "a\n\n\n\nthen b"]),
    "detectable_content:number_placeholders": (
        {"num_placeholders": 2}, ["[name] of [town]", "[a][b][c]"], ["[name", "[name] (town)"]),
    "detectable_content:postscript": (
        {"postscript_marker": "P.S."}, ["Bye\nP.S. more", "bye p. s. more"], ["Bye\nPS more"]),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2}, ["* a\n* b", "- a\n text\n  - b"],
        ["* a", "* a\n- b\n* c", "**bold**\n* a"]),
    "detectable_format:constrained_response": ({}, ["My answer is yes.", "So: My answer is maybe."],
        ["Yes."]),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2}, ["*a* and *b c*", "**a** and *b*"],
        ["*a*", "**a**", "** **, * *", "*a\nb* *c"]),
    "detectable_format:multiple_sections": (
        {"section_spliter": "SECTION", "num_sections": 2}, ["SECTION 1\na\nSECTION 2\nb"],
        ["SECTION 1", "Section 1 Section 2"]),
    "detectable_format:json_format": (
        {}, ['{"a": [1]}', '```json\n{"a": 1}\n```', "```\n[]\n```"],
        ["a: 1", '{"a": 1} so', "[" * 100_000]),
    "detectable_format:title": ({}, ["<<Joy>>\ntext", "x << a >> y"],
        ["<<>>", "<Joy>", "<<a\n>>", "<< >>"]),
    "combination:two_responses": ({}, ["a\n******\nb", "******a******b"],
        ["a******a", "a", "a******b******c"]),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say it. "}, ["say it. Fine"],
        ["Fine. Say it."]),
    "startend:end_checker": ({"end_phrase": "The end."}, ["It is THE END.", '"the end."\n'],
        ["The end. No."]),
    "startend:quotation": ({}, ['"all of it"'], ['"', 'a "b"', "'a'"]),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"}, ["I SAID so", "A WELL-KNOWN fact"],
        ["I said so", "iPhone X", "In the U.S.A. so"]),
    "change_case:english_capital": ({}, ["ALL, 1 OF IT!"],
        ["All", "123", "\u041f\u0420\u0418\u0412\u0415\u0422"]),
    "change_case:english_lowercase": ({}, ["all, 1 of it!", "a good caf\u00e9 is open"],
        ["All", "\u043f\u0440\u0438\u0432\u0435\u0442"]),
    "punctuation:no_comma": ({}, ["a; b. c"], ["a, b"]),
}  # fmt: skip


def reward(text: str, name: str, arguments: dict) -> float:
    score, status, detail = verify(text, json.dumps([{"id": name, **arguments}]))
    assert (status, detail) == (("ok", "") if score == 1 else ("wrong", f"not met: {name}"))
    return score


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_accepts_and_rejects_texts(name):
    arguments, good_texts, bad_texts = CASES[name]
    assert {text: reward(text, name, arguments) for text in good_texts} == dict.fromkeys(good_texts, 1.0)
    assert {text: reward(text, name, arguments) for text in bad_texts} == dict.fromkeys(bad_texts, 0.0)


def test_degenerate_text_takes_linear_time():
    """These texts would take minutes in quadratic time."""
    start = time.process_time()
    sentences = {"num_sentences": 2, "relation": "less than"}
    for text in ("." * 200_000 + "x", "a. " * 100_000, ".)" * 100_000 + "x"):
        assert reward(text, "length_constraints:number_sentences", sentences) == 1.0
    bold = {"num_highlights": 1}
    for text in ("**" + "a" * 200_000, "**" * 100_000, "* " * 2):
        assert reward(text, "detectable_format:number_highlighted_sections", bold) == 0.0
    assert time.process_time() - start < limit(5)


def test_every_form_of_the_answer_gives_the_same_reward():
    names = ["punctuation:no_comma", "change_case:english_capital", "keywords:existence"]
    arguments = [{}, None, {"keywords": ["it"], "relation": None, "num_words": None}]
    rows = [{"id": name} | (options or {}) for name, options in zip(names, arguments)]
    columns = {"instruction_id_list": names, "kwargs": arguments, "key": 7}
    expected = (2 / 3, "wrong", "not met: change_case:english_capital")
    for answer, fields in ((json.dumps(rows), {}), (json.dumps(columns), {}), ("", columns), ("7", columns)):
        score, status, detail = verify("So is it", answer, **fields)
        assert (pytest.approx(score), status, detail) == expected
    assert verify("IT", json.dumps(rows)) == (1.0, "ok", "")
    assert verify("\n", json.dumps(rows)) == (0.0, "no_answer", "")


WORDS = {"id": "length_constraints:number_words", "num_words": 3}


@pytest.mark.parametrize(
    "answer, word",
    [
        ("no commas", "JSON"),
        ("", "instruction_id_list and kwargs"),
        ('{"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}', "two lists"),
        ("[]", "empty"),
        ('["punctuation:no_comma"]', '"id"'),
        ('[{"id": "punctuation:no_commas"}]', "'punctuation:no_comma'"),
        (json.dumps([WORDS]), "'relation'"),
        ('[{"id": "punctuation:no_comma", "num_words": 3}]', "'num_words'"),
        (json.dumps([WORDS | {"relation": "over"}]), "less than, at least"),
        (json.dumps([WORDS | {"num_words": "3", "relation": "at least"}]), "whole number"),
        (json.dumps([WORDS | {"num_words": -3, "relation": "less than"}]), "whole number"),
        ('[{"id": "length_constraints:number_words", "num_words": Infinity}]', "whole number"),
        ('[{"id": "keywords:existence", "keywords": "word"}]', "list"),
        ('[{"id": "keywords:existence", "keywords": []}]', "list"),
        ('[{"id": "keywords:existence", "keywords": [""]}]', "list"),
        ('[{"id": "detectable_format:number_bullet_lists", "num_bullets": "2"}]', "num_bullets"),
        ('[{"id": "language:response_language", "language": "english"}]', "for example en"),
        ('[{"id": "language:response_language", "language": "xx-US"}]', "'xx'"),
        ('[{"id": "keywords:letter_frequency", "letter": "", "let_frequency": 1}]', "letter"),
    ],
)
def test_an_unreadable_constraint_is_an_error_for_every_text(answer, word):
    for text in ("A text.", ""):
        score, status, detail = verify(text, answer)
        assert (score, status) == (0.0, "error") and word in detail


def test_languages_are_recognised_by_script_or_by_a_library(monkeypatch):
    japanese = "\u79c1\u306f\u5b66\u751f\u3067\u3059"
    chinese = "\u6211\u662f\u5b66\u751f"
    for text, language, wrong in ((japanese, "ja", "zh"), (chinese, "zh", "ja")):
        assert reward(text, "language:response_language", {"language": language}) == 1
        assert reward(text, "language:response_language", {"language": wrong}) == 0
    answer = '[{"id": "language:response_language", "language": "de"}]'
    monkeypatch.setitem(__import__("sys").modules, "py3langid", None)  # as if it were not installed
    assert "make install" in verify("Das ist gut.", answer)[2]
    monkeypatch.undo()
    assert verify("Das ist ein guter Tag für uns alle.", answer)[1] == "ok"
    assert verify("This is a good day for all of us.", answer)[1] == "wrong"


@pytest.mark.parametrize("language", ["en-US", "EN", "zh-cn", "ZH-Hant-TW"])
def test_the_region_and_the_case_of_a_language_code_have_no_effect(language):
    texts = {"en": "This is a good day for all of us.", "zh": "\u6211\u662f\u5b66\u751f"}
    for code, text in texts.items():
        expected = float(language[:2].lower() == code)
        assert reward(text, "language:response_language", {"language": language}) == expected


EVERY_FORM = [
    (["{}"], []), ([None], []), (['{"keywords": null}'], []), ("[{}]", []),
    ([{"keywords": ["a"]}], ["keywords"]),
    (["5"], ["kwargs", "object", "5"]), ([["a"]], ["kwargs", "object"]), (["{bad"], ["kwargs", "{bad"]),
    ([7], ["kwargs", "7"]), ({}, ["instruction_id_list"]), ([], ["one length"]),
]  # fmt: skip


@pytest.mark.parametrize("kwargs, words", EVERY_FORM, ids=str)
def test_arguments_in_every_form_of_copies_of_ifeval(kwargs, words):
    """Arguments may be written as JSON text; other values are refused in words of the dataset."""
    columns = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": kwargs}
    if not words:
        assert [name for name, _ in read_constraints("", columns)] == columns["instruction_id_list"]
        return
    with pytest.raises(ValueError) as error:
        read_constraints("", columns)
    assert all(word in str(error.value) for word in words), error.value
