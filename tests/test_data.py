"""Prompt sets and prepare scripts, on real files. The hub is replaced, and no test may open a socket."""

import json
import os
import random
import socket
import subprocess
import sys

import datasets
import pytest
from conftest import ROOT
from conftest import SHARED_DATA as SHARED

from data import gsm8k, math_sets
from data.prompts import Prompt, PromptSource, check_disjoint, load_prompts, save_prompts
from data.stream import load_sets
from reward import last_boxed

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the real sets are not in {SHARED}")

ROWS = [
    {"prompt": "1+1=", "answer": 2, "difficulty": 1, "kind": "exact"},
    {"prompt": "naïve 数 \u2028 😀", "answer": "é", "difficulty": 2, "kind": "math"},
    {"prompt": "{x} and {} and \\frac{a}{b}", "answer": "{prompt}", "difficulty": 3.5, "kind": "exact"},
]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    attempts = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert attempts == []  # a library may swallow the OSError


def write_lines(path, rows, end="\n", start=""):
    text = start + "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)
    path.write_bytes(text.encode("utf-8"))
    return path


def write_parquet(path, columns):
    datasets.Dataset.from_dict(columns).to_parquet(str(path))
    return path


def prompt(text, answer="1"):
    return Prompt(text, answer, "exact", "set")


# ---- load_prompts: what it reads ---------------------------------------------------------------------------


def test_fields_of_a_jsonl_file(tmp_path):
    prompts = load_prompts(write_lines(tmp_path / "tiny.jsonl", ROWS))
    assert prompts == [
        Prompt("1+1=", "2", "exact", "tiny", 1.0),
        Prompt("naïve 数 \u2028 😀", "é", "math", "tiny", 2.0),
        Prompt("{x} and {} and \\frac{a}{b}", "{prompt}", "exact", "tiny", 3.5),
    ]


@pytest.mark.parametrize("end, start", [("\r\n", ""), ("\n", "\ufeff"), ("\r\n", "\ufeff"), ("\n\n", "\n")])
def test_line_ends_byte_order_mark_and_blank_lines_do_not_matter(tmp_path, end, start):
    plain = write_lines(tmp_path / "plain.jsonl", ROWS)
    other = write_lines(tmp_path / "other.jsonl", ROWS, end, start)
    assert other.read_bytes() != plain.read_bytes()
    assert load_prompts(other, name="set") == load_prompts(plain, name="set")


@pytest.mark.parametrize("start", ["", "\ufeff\n "])
def test_json_list_equals_json_lines(tmp_path, start):
    lines = write_lines(tmp_path / "set.jsonl", ROWS)
    document = tmp_path / "set.json"
    document.write_text(start + json.dumps(ROWS, indent=1), encoding="utf-8")
    assert load_prompts(document) == load_prompts(lines)


def test_parquet_equals_jsonl_and_leaves_no_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [row | {"answer": str(row["answer"])} for row in ROWS]
    lines = write_lines(tmp_path / "set.jsonl", rows)
    parquet = write_parquet(tmp_path / "set.parquet", {key: [row[key] for row in rows] for key in rows[0]})
    assert load_prompts(parquet) == load_prompts(lines)
    assert not (tmp_path / "cache").exists()


def test_a_rewritten_parquet_file_is_read_again(tmp_path):
    path = tmp_path / "set.parquet"
    for answer in ("old", "new"):
        write_parquet(path, {"prompt": ["q"], "answer": [answer]})
        os.utime(path, (0, 0))
        assert [one.answer for one in load_prompts(path)] == [answer]


@pytest.mark.parametrize(
    "value, text",
    [
        (7, "7"),
        (-3, "-3"),
        (27.0, "27"),
        (2.5, "2.5"),
        (10**30, "1" + "0" * 30),
        ("007", "007"),
        (" x ", " x "),
        ("2020-01-01", "2020-01-01"),
    ],
)
def test_answers_become_text_without_a_change_of_value(tmp_path, value, text):
    rows = [{"prompt": "q", "answer": value}, {"prompt": "q", "answer": 0.5}, {"prompt": "q", "answer": "x"}]
    assert load_prompts(write_lines(tmp_path / "set.jsonl", rows))[0].answer == text


def test_integers_beside_an_empty_field_survive_parquet(tmp_path):
    path = write_parquet(tmp_path / "set.parquet", {"prompt": ["a", "b"], "answer": [27.0, 0.5]})
    assert [one.answer for one in load_prompts(path)] == ["27", "0.5"]


def test_named_columns_kind_and_name(tmp_path):
    row = {"question": "q", "gold": "g", "level": "4", "verifier": "exact", "difficulty": "hard", "kind": "?"}
    path = write_lines(tmp_path / "set.jsonl", [row])
    columns = {"prompt": "question", "answer": "gold"}
    full = columns | {"difficulty": "level", "kind": "verifier"}
    assert load_prompts(path, columns=full, name="x") == [Prompt("q", "g", "exact", "x", 4.0)]
    ignored = columns | {"difficulty": None, "kind": None}
    assert load_prompts(path, columns=ignored, kind="numeric") == [Prompt("q", "g", "numeric", "set", None)]


def test_kind_is_math_where_nothing_says_otherwise(tmp_path):
    path = write_lines(tmp_path / "set.jsonl", [{"prompt": "q", "answer": "a"}])
    assert load_prompts(path)[0].kind == "math"
    assert load_prompts(path, kind="numeric")[0].kind == "numeric"


def test_template_keeps_every_other_brace(tmp_path):
    path = write_lines(tmp_path / "set.jsonl", ROWS)
    prompts = load_prompts(path, template="{system} {prompt}\nin \\boxed{}: ")
    assert prompts[2].text == "{system} {x} and {} and \\frac{a}{b}\nin \\boxed{}: "


def test_difficulty_range_is_closed_and_limit_comes_after_it(tmp_path):
    levels = [5, 1, 3, None, 2, 3, 4]
    rows = [{"prompt": str(index), "answer": "a", "difficulty": level} for index, level in enumerate(levels)]
    path = write_lines(tmp_path / "set.jsonl", rows)
    assert [one.text for one in load_prompts(path, difficulty=(2, 4))] == ["2", "4", "5", "6"]
    assert [one.text for one in load_prompts(path, difficulty=[2, 4], limit=3)] == ["2", "4", "5"]
    assert [one.text for one in load_prompts(path, limit=2)] == ["0", "1"]
    assert [one.text for one in load_prompts(path, limit=99)] == list("0123456")


# ---- load_prompts: the hub and the network -----------------------------------------------------------------


def test_hub_name_subset_and_split_reach_the_library(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs, datasets.logging.get_verbosity()))
        return datasets.Dataset.from_list([{"question": "q", "answer": 3}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    prompts = load_prompts("owner/set.v2", subset="main", split="test", columns={"prompt": "question"})
    assert prompts == [Prompt("q", "3", "math", "owner/set.v2", None)]
    assert calls == [(("owner/set.v2", "main"), {"split": "test"}, datasets.logging.ERROR)]


def test_the_library_is_silent_and_then_as_before(tmp_path, capfd):
    path = write_parquet(tmp_path / "set.parquet", {"prompt": ["q"], "answer": ["a"]})
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not parquet")
    assert not datasets.are_progress_bars_disabled()
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity_info()
    capfd.readouterr()
    try:
        load_prompts(path)
        assert capfd.readouterr() == ("", "")
        with pytest.raises(ValueError):
            load_prompts(broken)
        assert datasets.logging.get_verbosity() == datasets.logging.INFO
        assert not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        load_prompts(path)
        assert datasets.are_progress_bars_disabled()
    finally:
        datasets.enable_progress_bars()
        datasets.logging.set_verbosity(verbosity)


def test_import_is_cheap():
    code = "import sys, data.prompts, data.gsm8k, data.math_sets; print('datasets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


# ---- load_prompts: errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.json", "missing.parquet"])
def test_missing_file(tmp_path, name):
    with pytest.raises(ValueError, match=rf"{name}: no such file; check data.train\[\].path or create"):
        load_prompts(tmp_path / name)


def test_what_is_neither_file_nor_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "built").mkdir()
    (tmp_path / "set.txt").write_text("x")
    for path in (tmp_path, "built", "set.txt", "data/built/nothing", "./nothing"):
        with pytest.raises(ValueError, match="neither a .jsonl, .json, .parquet file nor a hub name"):
            load_prompts(path)


@pytest.mark.parametrize(
    "content, message",
    [
        ("", r"set.jsonl: no rows"),
        ("\n\r\n", r"set.jsonl: no rows"),
        ("[]", r"set.jsonl: no rows"),
        (
            '{"prompt": "a", "answer": 1}\n\n{"prompt": "b", "ans',
            r"set.jsonl: line 3 is not JSON: Unterminated",
        ),
        ('[{"prompt": "a", "answer": 1},\n{"prompt" "b"}]', r"set.jsonl: line 2 is not JSON: Expecting ':'"),
        ('{"prompt": "a", "answer": 1}\n[1, 2]\n', r"set.jsonl: row 2 must be an object .* found \[1, 2\]"),
        ('["a"]', r"set.jsonl: row 1 must be an object .* found 'a'"),
    ],
)
def test_broken_json(tmp_path, content, message):
    path = tmp_path / "set.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_prompts(path)


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_bytes('{"prompt": "é", "answer": "a"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match="set.jsonl: not UTF-8"):
        load_prompts(path)


def test_broken_and_empty_parquet(tmp_path):
    path = tmp_path / "set.parquet"
    path.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match="set.parquet: cannot be read or has no rows: .*not a parquet file"):
        load_prompts(path)
    write_parquet(path, {"prompt": [], "answer": []})
    with pytest.raises(ValueError, match="set.parquet: cannot be read or has no rows"):
        load_prompts(path)


@pytest.mark.parametrize(
    "columns, message",
    [
        ({}, "no column 'prompt' for columns.prompt among question, answer, level"),
        (
            {"prompt": "question", "answer": "gold"},
            "no column 'gold' for columns.answer among question, answer",
        ),
        ({"prompt": "question", "difficulty": "steps"}, "no column 'steps' for columns.difficulty among"),
        ({"prompt": "question", "kind": "type"}, "no column 'type' for columns.kind among"),
        ({"prompt": None}, "no column None for columns.prompt among"),
        ({"promt": "question"}, "columns.promt is unknown, expected one of prompt, answer, kind, difficulty"),
        (
            {"prompt": "question", "difficulty": "level"},
            "row 2: column 'level' must hold a number, found 'hard'",
        ),
    ],
)
def test_wrong_columns(tmp_path, columns, message):
    rows = [{"question": "q", "answer": "a", "level": 1}, {"question": "q", "answer": "a", "level": "hard"}]
    with pytest.raises(ValueError, match=f"set.jsonl: {message}"):
        load_prompts(write_lines(tmp_path / "set.jsonl", rows), columns=columns)


@pytest.mark.parametrize("column", ["prompt", "answer", "kind"])
@pytest.mark.parametrize("value", [None, "", " \n\t", float("nan"), ["a"], {"a": 1}, "absent"])
def test_rows_without_text(tmp_path, column, value):
    good = {"prompt": "q", "answer": "a", "kind": "exact"}
    bad = good | {column: value}
    if value == "absent":
        del bad[column]
    path = write_lines(tmp_path / "set.jsonl", [good, bad, good])
    with pytest.raises(ValueError, match=f"set.jsonl: row 2: column '{column}' must hold text or a number"):
        load_prompts(path)


def test_difficulty_range_without_rows(tmp_path):
    path = write_lines(tmp_path / "set.jsonl", ROWS)
    with pytest.raises(ValueError, match="set.jsonl: no prompt has difficulty 4 to 9; available: 1 to 3.5"):
        load_prompts(path, difficulty=(4, 9))
    with pytest.raises(ValueError, match="available: none, set columns.difficulty"):
        load_prompts(path, difficulty=(4, 9), columns={"difficulty": None})


def test_wrong_template_and_limit(tmp_path):
    path = write_lines(tmp_path / "set.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"template 'Q: \{question\}' does not contain \{prompt\}"):
        load_prompts(path, template="Q: {question}")
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"limit {limit} must be at least 1"):
            load_prompts(path, limit=limit)


# ---- load_prompts: data cannot run code --------------------------------------------------------------------

HARMLESS = {"prompt": "q", "answer": "1", "kind": "exact"}
HARMFUL = {"prompt": "q", "answer": "open('ran', 'w')", "kind": "timeit:timeit"}


def harmful_file(folder, suffix):
    rows = [HARMLESS, HARMFUL]
    if suffix == ".parquet":
        return write_parquet(folder / "set.parquet", {key: [row[key] for row in rows] for key in HARMFUL})
    return write_lines(folder / f"set{suffix}", rows)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_row_that_names_a_function_is_refused_with_file_row_and_settings(tmp_path, suffix):
    path = harmful_file(tmp_path, suffix)
    message = rf"set{suffix}: row 2: kind 'timeit:timeit' would run code .* reward\.functions"
    for options in ({}, {"kind": "numeric"}, {"kind": "my:function"}, {"functions": ["timeit:repeat"]}):
        with pytest.raises(ValueError, match=message):
            load_prompts(path, **options)


def test_a_row_of_a_hub_set_that_names_a_function_is_refused(monkeypatch):
    rows = datasets.Dataset.from_list([HARMLESS, HARMFUL])
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: rows)
    with pytest.raises(ValueError, match="owner/set: row 2: kind 'timeit:timeit' would run code"):
        load_prompts("owner/set")


def test_a_row_may_name_the_function_that_the_settings_name(tmp_path):
    path = harmful_file(tmp_path, ".jsonl")
    for options in ({"kind": "timeit:timeit"}, {"functions": ["timeit:timeit"]}):
        assert [one.kind for one in load_prompts(path, **options)] == ["exact", "timeit:timeit"]
    ignored = load_prompts(path, columns={"kind": None})
    assert [one.kind for one in ignored] == ["math", "math"]


def test_a_row_of_an_unknown_kind_is_refused(tmp_path):
    path = write_lines(tmp_path / "set.jsonl", [HARMLESS, HARMLESS | {"kind": "maths"}])
    with pytest.raises(
        ValueError, match="set.jsonl: row 2: kind 'maths' is none of exact, numeric, gsm8k, math"
    ):
        load_prompts(path)


def test_a_run_takes_functions_from_its_settings_alone(tmp_path):
    """A function that one source names may stand in the rows of all: both come from the same settings."""
    source = PromptSource(path=str(harmful_file(tmp_path, ".jsonl")))
    tokenizer = lambda texts: {"input_ids": [[1] for _ in texts]}
    for places in (([source], []), ([], [source])):
        with pytest.raises(ValueError, match="set.jsonl: row 2: kind 'timeit:timeit' would run code"):
            load_sets(*places, tokenizer, 9, [])
    plain = write_lines(tmp_path / "plain.jsonl", [{"prompt": "other", "answer": "1"}])
    named = PromptSource(path=str(plain), kind="timeit:timeit")
    for functions, others in ((["timeit:timeit"], []), ([], [named])):
        train, _ = load_sets([source], others, tokenizer, 9, functions)
        assert [one.kind for one in train] == ["exact", "timeit:timeit"]


# ---- check_disjoint, save_prompts --------------------------------------------------------------------------


def test_check_disjoint_names_count_and_example():
    train = [prompt("a"), prompt("b"), prompt("c")]
    check_disjoint(train, [prompt("d"), prompt("a ")])
    with pytest.raises(ValueError, match="2 evaluation prompts are also training .* example 'c' of 'set'"):
        check_disjoint(train, [prompt("d"), prompt("c", answer="2"), prompt("a")])


def test_saved_prompts_are_loaded_back(tmp_path):
    path = tmp_path / "new" / "folder" / "set.jsonl"
    prompts = load_prompts(write_lines(tmp_path / "set.jsonl", ROWS)) + [prompt("no difficulty")]
    save_prompts(path, prompts)
    assert load_prompts(path, name="set") == [Prompt(**vars(one) | {"source": "set"}) for one in prompts]
    assert [file.name for file in path.parent.iterdir()] == ["set.jsonl"]
    assert '"naïve 数 \u2028 😀"' in path.read_text(encoding="utf-8")  # readable, not escaped


def test_a_failed_save_keeps_the_old_file(tmp_path):
    path = tmp_path / "set.jsonl"
    save_prompts(path, [prompt("old")])
    with pytest.raises(TypeError):
        save_prompts(path, [prompt("new"), prompt("new", answer=object())])
    assert [one.text for one in load_prompts(path)] == ["old"]


# ---- data.gsm8k --------------------------------------------------------------------------------------------


def gsm8k_rows(count, tag):
    """One to three reasoning steps in turn; the answers are 0,000, 1,000, 2,000, ..."""
    return [
        {"question": f"{tag} {index}?", "answer": "<<1+1=2>> " * (1 + index % 3) + f"\n#### {index},000"}
        for index in range(count)
    ]


def build_gsm8k(folder, train, test):
    train, test = write_lines(folder / "raw_train.jsonl", train), write_lines(folder / "raw_test.jsonl", test)
    return run_gsm8k(train, test, folder / "out")


def run_gsm8k(train, test, output):
    gsm8k.main(["--train", str(train), "--test", str(test), "--output", str(output)])
    return {split: load_prompts(output / f"{split}.jsonl") for split in ("train", "validation", "test")}


def test_gsm8k_columns_and_summary(tmp_path, capsys):
    splits = build_gsm8k(tmp_path, gsm8k_rows(200, "train"), gsm8k_rows(5, "test"))
    text = "test 2?\nGive the final answer after ####."
    assert splits["test"][2] == Prompt(text, "2000", "gsm8k", "test", 3.0)
    assert len(splits["train"]) + len(splits["validation"]) == 200
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3
    assert printed[2].endswith("test.jsonl: 5 rows, mean question 7 characters, 1.8 steps")


def test_gsm8k_validation_depends_on_the_question_alone(tmp_path):
    rows = gsm8k_rows(400, "train")
    shuffled = random.Random(0).sample(rows, len(rows))
    runs = []
    for name, train in (("a", rows), ("b", rows), ("c", shuffled), ("d", rows[:300])):
        (tmp_path / name).mkdir()
        splits = build_gsm8k(tmp_path / name, train, gsm8k_rows(5, "test"))
        runs.append({split: {one.text for one in prompts} for split, prompts in splits.items()})
    first, second, reordered, fewer = runs
    assert first == second == reordered
    assert not first["train"] & first["validation"]
    assert 8 <= len(first["validation"]) <= 40  # 400 questions, one in twenty
    assert fewer["validation"] < first["validation"]


def test_gsm8k_validation_of_a_known_question():
    """The choice is part of the data: another hash would move questions between the splits of old runs."""
    chosen = [index for index in range(100) if gsm8k.in_validation(f"Question {index}?")]
    assert chosen == [19, 25, 35, 44, 45, 74]
    assert gsm8k.in_validation(f" Question \n {chosen[0]}? ")


def test_gsm8k_second_run_writes_the_same_bytes(tmp_path):
    files = []
    for _ in range(2):
        build_gsm8k(tmp_path, gsm8k_rows(100, "train"), gsm8k_rows(5, "test"))
        files.append({path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()})
    assert files[0] == files[1]
    assert sorted(files[0]) == ["test.jsonl", "train.jsonl", "validation.jsonl"]


@pytest.mark.parametrize(
    "solution, number",
    [
        ("#### 18", "18"),
        ("a #### 1\n#### -2", "-2"),
        ("####1,234,567 \n", "1234567"),
        ("#### $0.50", "0.50"),
    ],
)
def test_gsm8k_final_number(solution, number):
    assert gsm8k.final_number(solution, "here") == number


@pytest.mark.parametrize("solution", ["18", "#### eighteen", "#### 18 dollars", "####"])
def test_gsm8k_solution_without_number(tmp_path, solution):
    rows = gsm8k_rows(2, "train") + [{"question": "q", "answer": solution}]
    with pytest.raises(ValueError, match="raw_train.jsonl: row 3: column 'answer' must end in '#### number'"):
        build_gsm8k(tmp_path, rows, gsm8k_rows(5, "test"))
    assert not (tmp_path / "out").exists()


def test_gsm8k_refuses_a_test_question_in_train(tmp_path):
    with pytest.raises(ValueError, match="evaluation prompts are also training prompts"):
        build_gsm8k(tmp_path, gsm8k_rows(50, "same"), gsm8k_rows(50, "same"))
    assert not (tmp_path / "out").exists()


@needs_shared
def test_gsm8k_real_files(tmp_path):
    splits = run_gsm8k(SHARED / "gsm8k_train.jsonl", SHARED / "gsm8k_test.jsonl", tmp_path)
    sizes = {split: len(prompts) for split, prompts in splits.items()}
    assert sizes == {"train": 7095, "validation": 378, "test": 1319}
    assert splits["test"][0].answer == "18"
    assert all(float(one.answer).is_integer() for prompts in splits.values() for one in prompts)
    assert {one.difficulty for one in splits["train"]} == set(range(10))


# ---- data.math_sets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "solution, answer",
    [
        (r"so \boxed{5}.", "5"),
        (r"first \boxed{1}, then \boxed{2} holds", "2"),
        (r"\boxed{\frac{a_{1}}{\sqrt{b}}} {x}", r"\frac{a_{1}}{\sqrt{b}}"),
        (r"\boxed{\left\{ 1, 2 \right\}}", r"\left\{ 1, 2 \right\}"),
        (r"\boxed{\{x : x > 0}", r"\{x : x > 0"),
        (r"\boxed{a \\{b}}", r"a \\{b}"),
        (r"\boxed {7 }", "7"),
        ("\\boxed{\n\\text{no}\n}", r"\text{no}"),
        (r"\boxed{}", ""),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{2 and so on", None),
        (r"no box {5}", None),
        (r"\fbox{5}", "5"),
    ],
)
def test_last_boxed(solution, answer):
    found = last_boxed(solution)
    assert (None if found is None else found.strip()) == answer


def build_math(folder, rows, *options):
    source, output = write_lines(folder / "raw.jsonl", rows), folder / "built" / "test.jsonl"
    math_sets.main(["--input", str(source), "--output", str(output), *options])
    return load_prompts(output)


def test_math_set_columns_and_levels(tmp_path, capsys):
    levels = ["Level 5", 3, "2.5", "Level ?", None]
    rows = [
        {"problem": f"p{index}", "solution": r"\boxed{other}", "answer": index, "level": level}
        for index, level in enumerate(levels)
    ]
    prompts = build_math(tmp_path, rows)
    assert [one.difficulty for one in prompts] == [5.0, 3.0, 2.5, None, None]
    assert [one.answer for one in prompts] == list("01234")
    assert {one.kind for one in prompts} == {"math"}
    assert prompts[0].text == "p0\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert "test.jsonl: 5 rows, mean length 73 characters, 3 with difficulty\n" in capsys.readouterr().out


def test_math_set_answers_from_solutions_or_named_columns(tmp_path):
    rows = [{"problem": "p", "solution": r"\boxed{1} is \boxed{\frac{1}{2}}", "question": "q", "gold": "g"}]
    assert build_math(tmp_path, rows)[0].answer == r"\frac{1}{2}"
    named = build_math(tmp_path, rows, "--prompt-column", "question", "--answer-column", "gold")[0]
    assert (named.text.splitlines()[0], named.answer) == ("q", "g")


def test_math_set_solution_is_used_over_answer_when_asked(tmp_path):
    rows = [{"problem": "p", "solution": r"\boxed{1}", "answer": "2"}]
    assert build_math(tmp_path, rows, "--answer-column", "solution")[0].answer == "1"


@pytest.mark.parametrize(
    "row, options, message",
    [
        ({"question": "q", "answer": "a"}, (), "no column 'problem'; set --prompt-column to one of question"),
        (
            {"problem": "p", "gold": "g"},
            (),
            "no column 'answer'; set --answer-column to one of problem, gold",
        ),
        (
            {"problem": "p", "solution": "s"},
            ("--answer-column", "gold"),
            "no column 'gold'; set --answer-column",
        ),
        ({"problem": " ", "answer": "a"}, (), "row 1: column 'problem' must hold text"),
        ({"problem": "p", "answer": None}, (), "row 1: column 'answer' must hold text"),
        ({"problem": "p", "solution": "no box"}, (), r"row 1: column 'solution' has no filled \\boxed"),
        ({"problem": "p", "solution": r"\boxed{ }"}, (), r"row 1: column 'solution' has no filled \\boxed"),
    ],
)
def test_math_set_errors(tmp_path, row, options, message):
    with pytest.raises(ValueError, match=f"raw.jsonl: {message}"):
        build_math(tmp_path, [row], *options)
    assert not (tmp_path / "built").exists()


@needs_shared
@pytest.mark.parametrize(
    "name, count, first, graded",
    [
        ("math500", 500, r"\left( 3, \frac{\pi}{2} \right)", 500),
        ("aime24", 30, "204", 0),
        ("amc23", 40, "27", 0),
    ],
)
def test_math_real_files(tmp_path, name, count, first, graded):
    output = tmp_path / "test.jsonl"
    math_sets.main(["--input", str(SHARED / f"{name}.jsonl"), "--output", str(output)])
    prompts = load_prompts(output, name=name)
    assert (len(prompts), prompts[0].answer, prompts[0].source) == (count, first, name)
    assert sum(one.difficulty is not None for one in prompts) == graded


@needs_shared
def test_boxes_of_math500_are_its_answers():
    for row in map(json.loads, (SHARED / "math500.jsonl").read_text(encoding="utf-8").splitlines()):
        assert last_boxed(row["solution"]) == row["answer"]


# ---- commands ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module, default", [("data.gsm8k", "openai/gsm8k"), ("data.math_sets", "problem")])
def test_help_shows_the_defaults(module, default):
    done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert f"(default: {default})" in done.stdout
