"""Prompt sets and prepare scripts, on real files. The hub is replaced, and no test may open a socket."""

import csv
import gzip
import json
import os
import random
import re
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import datasets
import pytest
from conftest import ROOT
from conftest import SHARED_DATA as SHARED

from data import gsm8k, math_sets, random_model
from data.formats import load_tables
from data.prompts import DataSettings, Prompt, PromptSource, check_disjoint, load_prompts, save_prompts
from data.stream import load_sets, mixture_of, prompts_of_step, tokenize
from verifiers.math import last_boxed

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


def one_token(texts, add_special_tokens=True):
    return {"input_ids": [[1] for _ in texts]}


# ---- load_prompts: what it reads ---------------------------------------------------------------------------


def test_fields_of_a_jsonl_file(tmp_path):
    prompts = load_prompts(write_lines(tmp_path / "tiny.jsonl", ROWS))
    assert prompts == [
        Prompt("1+1=", "2", "exact", "tiny", 1.0, columns={"difficulty": 1}),
        Prompt("naïve 数 \u2028 😀", "é", "math", "tiny", 2.0, columns={"difficulty": 2}),
        Prompt("{x} and {} and \\frac{a}{b}", "{prompt}", "exact", "tiny", 3.5, columns={"difficulty": 3.5}),
    ]
    assert prompts[0].fields == {"prompt": "1+1=", "messages": None, "difficulty": 1}


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
    row = {"q": "q", "gold": "g", "level": "4", "verifier": "exact", "difficulty": "hard", "kind": "?"}
    path = write_lines(tmp_path / "set.jsonl", [row])
    columns = {"prompt": "q", "answer": "gold"}
    others = {"gold": "g", "level": "4", "verifier": "exact", "difficulty": "hard"}
    full = columns | {"difficulty": "level", "kind": "verifier"}
    assert load_prompts(path, columns=full, name="x") == [Prompt("q", "g", "exact", "x", 4.0, None, others)]
    ignored = columns | {"difficulty": None, "kind": None}
    expected = [Prompt("q", "g", "numeric", "set", None, None, others)]
    assert load_prompts(path, columns=ignored, kind="numeric") == expected


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
    assert prompts == [Prompt("q", "3", "math", "set.v2", None)]
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
    with pytest.raises(ValueError, match=rf"{name}: no such file or folder, seen from .*data.train\[\].path"):
        load_prompts(tmp_path / name)


NO_FILE, NO_DATA = "no such file or folder, seen from", "holds no .jsonl, .json, .csv, .parquet file"


@pytest.mark.parametrize(
    "path, message",
    [
        ("d/gsm8k.csv", NO_FILE),
        ("gsm8k.csv", NO_FILE),
        ("d/gsm8k.jsonl.gz", NO_FILE),
        ("owner/set.txt", NO_FILE),
        ("built/nothing", NO_FILE),  # the folder is here
        ("data/built/nothing", NO_FILE),
        ("./nothing", NO_FILE),
        ("/nothing", NO_FILE),
        ("built", NO_DATA),
        ("set.txt", "not a data file"),
        ("built/*.jsonl", "the pattern matches no .jsonl, .json, .csv, .parquet file"),
    ],
)
def test_what_is_neither_file_nor_hub_name(tmp_path, monkeypatch, path, message):
    """It is refused at once: nobody waits for the retries of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: pytest.fail("the hub was asked"))
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "readme.md").write_text("x")
    (tmp_path / "set.txt").write_text("x")
    with pytest.raises(ValueError, match=f"^{re.escape(path)}: .*{re.escape(message)}"):
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
        (
            '{"prompt": "a", "answer": 1}\n{"prompt": "a", "answer": 1, "answer": 2}',
            r"set.jsonl: line 2 cannot be read: key 'answer' is given twice",
        ),
        ('{"prompt": "a", "answer": ' + "7" * 5000 + "}", r"line 1 cannot be read: .*\(4300 digits\)"),
        ('{"prompt": "a", "answer": ' + "[" * 99999 + "]" * 99999 + "}", "line 1 cannot be read: maximum"),
        ('{"prompt": "a", "answer": 1e400}', "row 1: column 'answer' must hold text or a number, found inf"),
        ('{"prompt": "a", "answer": true}', "row 1: column 'answer' must hold text or a number, found True"),
        ('{"prompt": "a\\ud800", "answer": 1}', "row 1: column 'prompt' holds half a character"),
        (
            '{"prompt": "a", "answer": {"asserts": ["\\ud800"]}, "kind": "code"}',
            "row 1: column 'answer' holds half a character",
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
    with pytest.raises(ValueError, match="set.parquet: cannot be read as parquet: .*not a parquet file"):
        load_prompts(path)
    write_parquet(path, {"prompt": [], "answer": []})
    with pytest.raises(ValueError, match="set.parquet: no rows"):
        load_prompts(path)


GOLD = {"prompt": "task", "answer": "info.gold"}


@pytest.mark.parametrize(
    "columns, message",
    [
        (
            {},
            r"no column for the prompt \(looked for prompt, question, problem, messages\) among task, info, "
            r"info.gold, level; name it in the settings, columns: \{prompt: \.\.\.\}",
        ),
        (
            {"prompt": "task"},
            r"no column for the answer \(looked for reward_model.ground_truth, answer, ground_truth, solutio",
        ),
        (
            {"prompt": "task", "answer": "gold"},
            "no column 'gold' for columns.answer among task, info, info.gold",
        ),
        (
            {"prompt": "task", "answer": "info.x"},
            "no column 'info.x' for columns.answer among task, info, info.gold",
        ),
        (GOLD | {"difficulty": "steps"}, "no column 'steps' for columns.difficulty among"),
        (GOLD | {"kind": "type"}, "no column 'type' for columns.kind among"),
        (GOLD | {"prompt": None}, "no column for the prompt among"),
        (GOLD | {"answer": None}, "row 1: .* columns.answer"),
        ({"promt": "task"}, "columns.promt is unknown, expected one of prompt, answer, kind, difficulty"),
        (GOLD | {"difficulty": "level"}, "row 2: column 'level' must hold a number, found 'hard'"),
    ],
)
def test_wrong_columns(tmp_path, columns, message):
    rows = [{"task": "q", "info": {"gold": "a"}, "level": level} for level in (1, "hard")]
    with pytest.raises(ValueError, match=f"set.jsonl: {message}"):
        load_prompts(write_lines(tmp_path / "set.jsonl", rows), columns=columns)


@pytest.mark.parametrize("column", ["prompt", "answer", "kind"])
@pytest.mark.parametrize("value", [None, "", " \n\t", float("nan"), [], ["a", "b"], {"a": 1}, "absent"])
def test_rows_without_text(tmp_path, column, value):
    good = {"prompt": "q", "answer": "a", "kind": "exact"}
    bad = good | {column: value}
    if value == "absent":
        del bad[column]
    path = write_lines(tmp_path / "set.jsonl", [good, bad, good])
    message = f"column '{column}' must hold text or a number"
    if column == "prompt" and isinstance(value, list):
        message = "message 1 must have a role and a content" if value else "the list of messages is empty"
    with pytest.raises(ValueError, match=f"set.jsonl: row 2: {message}.*; data.on_bad_row=drop"):
        load_prompts(path)
    assert [one.text for one in load_prompts(path, on_bad_row="drop")] == ["q", "q"]


def test_rows_without_a_kind_have_that_of_the_settings(tmp_path):
    rows = [{"prompt": name, "answer": "1"} for name in "abc"]
    path = write_lines(
        tmp_path / "set.jsonl", [rows[0] | {"kind": "exact"}, rows[1], rows[2] | {"kind": None}]
    )
    assert [one.kind for one in load_prompts(path, kind="numeric")] == ["exact", "numeric", "numeric"]
    with pytest.raises(ValueError, match="row 2: column 'kind' must hold text"):
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
        with pytest.raises(ValueError, match="limit\n.*greater than or equal to 1"):
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
    message = r"set.jsonl: row 2: kind 'maths' is none of exact, .*math.*set columns: \{kind: null\}"
    with pytest.raises(ValueError, match=message):
        load_prompts(path)


def test_a_run_takes_functions_from_its_settings_alone(tmp_path):
    """A function that one source names may stand in the rows of all: both come from the same settings."""
    source = {"path": str(harmful_file(tmp_path, ".jsonl"))}
    for places in ({"train": [source]}, {"eval": [source]}):
        with pytest.raises(ValueError, match="set.jsonl: row 2: kind 'timeit:timeit' would run code"):
            load_sets(DataSettings(**places), one_token, 9, [], 0)
    plain = write_lines(tmp_path / "plain.jsonl", [{"prompt": "other", "answer": "1"}])
    named = {"path": str(plain), "kind": {"math": 0.5, "timeit:timeit": 0.5}}
    for functions, others in ((["timeit:timeit"], []), (["1*exact + 2*timeit:timeit"], []), ([], [named])):
        loaded = load_sets(DataSettings(train=[source], eval=others), one_token, 9, functions, 0)
        assert [one.kind for one in loaded.train] == ["exact", "timeit:timeit"]


@pytest.mark.parametrize(
    "kind, refused",
    [
        ("0.5*math + 0.5*exact", None),
        ("0.5*math + 0.5*timeit:timeit", "would run code"),
        ("rewards.py:f", "would run code"),
        ("0.5*math + 0.5*maths", "is none of"),
    ],
)
def test_a_row_may_name_a_sum_of_what_it_may_name(tmp_path, kind, refused):
    path = write_lines(tmp_path / "set.jsonl", [HARMLESS | {"kind": kind}])
    if refused is None:
        assert load_prompts(path)[0].kind == kind
        return
    with pytest.raises(ValueError, match=f"set.jsonl: row 1: kind .* {refused}"):
        load_prompts(path)
    with pytest.raises(ValueError, match=f"set.jsonl: row 1: kind .* {refused}"):
        load_prompts(path, on_bad_row="drop")


# ---- formats and shapes that people have -------------------------------------------------------------------

QUESTIONS = [
    {
        "question": f'Natalia has {n} clips, "half" of them 数;\n how many pairs?',
        "answer": f"<<{n}/2>>\n#### {n // 2}",
    }
    for n in range(2, 26, 2)
]
INSTRUCTION = "{prompt}\nAnswer after ####."


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level tokenizer with Qwen3's chat template in short."""
    return random_model.build_tokenizer([row["question"] for row in QUESTIONS], 300)


def messages_of(row, *before):
    return [*before, {"role": "user", "content": row["question"]}]


VERL = [
    {
        "data_source": "openai/gsm8k", "prompt": messages_of(row), "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"split": "train", "index": index},
    }
    for index, row in enumerate(QUESTIONS)
]  # fmt: skip


def rows_as_parquet(path, rows):
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


def write_csv(path, rows, opened=open):
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_gz(path, rows):
    path.write_bytes(gzip.compress(write_lines(path.with_suffix(""), rows).read_bytes()))
    path.with_suffix("").unlink()
    return path


def write_parts(folder, rows, pattern):
    """Three files of two formats; what stands beside them is not read."""
    folder.mkdir()
    write_lines(folder / "train-0.jsonl", rows[:5])
    write_csv(folder / "train-1.csv", rows[5:6])
    rows_as_parquet(folder / "train-2.parquet", rows[6:])
    write_lines(folder / "test-0.jsonl", rows)
    (folder / "README.md").write_text("x")
    (folder / ".train-3.jsonl").write_text("x")
    return folder / pattern


def save_to_disk(folder, rows, split=None):
    saved = datasets.Dataset.from_list(rows)
    (datasets.DatasetDict({split: saved, "test": saved.select([0])}) if split else saved).save_to_disk(folder)
    return folder


PLAIN = [{"prompt": row["question"], "answer": row["answer"]} for row in QUESTIONS]
FORMATS = {  # {name: how a folder gets a path that holds QUESTIONS}
    "jsonl": lambda d: write_lines(d / "set.jsonl", QUESTIONS),
    "plain columns": lambda d: write_lines(d / "set.jsonl", PLAIN),
    "jsonl.gz": lambda d: write_gz(d / "set.jsonl.gz", QUESTIONS),
    "csv": lambda d: write_csv(d / "set.csv", QUESTIONS),
    "csv.gz": lambda d: write_csv(d / "set.csv.gz", QUESTIONS, gzip.open),
    "parquet": lambda d: rows_as_parquet(d / "set.parquet", QUESTIONS),
    "pattern": lambda d: write_parts(d / "set", QUESTIONS, "train-*"),
    "folder": lambda d: write_parts(d / "set", QUESTIONS, ""),
    "save_to_disk": lambda d: save_to_disk(d / "set", QUESTIONS),
    "save_to_disk with splits": lambda d: save_to_disk(d / "set", QUESTIONS, "train"),
}
CONVERSATIONS = {
    "verl parquet": lambda d: rows_as_parquet(d / "set.parquet", VERL),
    "TRL conversational": lambda d: write_lines(
        d / "set.jsonl", [{"prompt": messages_of(row), "solution": row["answer"]} for row in QUESTIONS]
    ),
    "messages": lambda d: save_to_disk(
        d / "set", [{"messages": messages_of(row), "answer": row["answer"]} for row in QUESTIONS]
    ),
    "JSON in CSV": lambda d: write_csv(
        d / "set.csv",
        [{"prompt": json.dumps(messages_of(row)), "ground_truth": row["answer"]} for row in QUESTIONS],
    ),
}


def loaded(path, tokenizer, **settings):
    data = DataSettings(train=[{"path": str(path), "name": "set", "template": INSTRUCTION}], **settings)
    return load_sets(data, tokenizer, 1000, [], 0)


def essence(sets):
    return [(p.text, p.answer, p.kind, p.source, p.messages, p.is_chat) for p in sets.train], sets.train_ids


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_prompts_and_tokens(tmp_path, tokenizer, name):
    sets = loaded(FORMATS[name](tmp_path), tokenizer, chat="never")
    texts = [f"{row['question']}\nAnswer after ####." for row in QUESTIONS]
    expected = [(text, row["answer"], "gsm8k", "set", None, False) for text, row in zip(texts, QUESTIONS)]
    assert essence(sets) == (expected, [tokenizer(text)["input_ids"] for text in texts])


@pytest.mark.parametrize("name", {**FORMATS, **CONVERSATIONS})
@pytest.mark.parametrize("args", [{}, {"enable_thinking": False}])
def test_every_shape_is_rendered_as_transformers_renders_it(tmp_path, tokenizer, name, args):
    """Texts with data.chat always, lists of messages as they are; the same tokens either way."""
    make, chat = (FORMATS[name], "always") if name in FORMATS else (CONVERSATIONS[name], "auto")
    settings = {"system_prompt": "Be brief.", "chat_template_args": args}
    sets = loaded(make(tmp_path), tokenizer, chat=chat, **settings)
    conversations = [
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"{row['question']}\nAnswer after ####."},
        ]
        for row in QUESTIONS
    ]
    render = lambda m, **more: tokenizer.apply_chat_template(m, add_generation_prompt=True, **args, **more)
    assert sets.train_ids == [list(render(m, tokenize=True)["input_ids"]) for m in conversations]
    texts = [render(m, tokenize=False) for m in conversations]
    assert essence(sets)[0] == [
        (text, row["answer"], "gsm8k", "set", messages, True)
        for text, row, messages in zip(texts, QUESTIONS, conversations)
    ]
    assert all(text.endswith("<think>\n\n</think>\n\n" if args else "assistant\n") for text in texts)


@pytest.mark.parametrize(
    "make, line",
    [
        (FORMATS["plain columns"], "columns (prompt, answer), verified by gsm8k, plain text"),
        (FORMATS["jsonl"], "GSM8K's columns (question, answer), verified by gsm8k, plain text"),
        (FORMATS["folder"], "3 files, GSM8K's columns (question, answer), verified by gsm8k, plain text"),
        (
            CONVERSATIONS["verl parquet"],
            "verl's columns (prompt: messages, reward_model.ground_truth), verified by gsm8k, rendered by "
            "the chat template",
        ),
        (
            CONVERSATIONS["TRL conversational"],
            "TRL's conversational columns (prompt: messages, solution), verified by gsm8k, rendered by the "
            "chat template",
        ),
        (
            lambda d: write_lines(
                d / "set.jsonl", [{"prompt": f"{i}", "ground_truth": i} for i in range(12)]
            ),
            "TRL's standard columns (prompt, ground_truth), verified by math, plain text",
        ),
    ],
)
def test_the_shape_of_a_set_is_said(tmp_path, tokenizer, make, line):
    path = make(tmp_path)
    note, *warnings = loaded(path, tokenizer).notes
    assert note == f"set ({path}): 12 prompts, {line}"
    assert bool(warnings) == line.endswith("plain text")


def test_what_a_verifier_may_ask_for_of_a_row_of_verl(tmp_path, tokenizer):
    rows = [VERL[0] | {"difficulty": 2.0, "kind": "numeric", "completion": "kept from verify()"}]
    rows[0]["reward_model"] = {"style": "rule", "ground_truth": "34"}
    (one,) = load_prompts(rows_as_parquet(tmp_path / "set.parquet", rows), tokenizer=tokenizer)
    assert (one.answer, one.kind, one.difficulty) == ("34", "numeric", 2.0)
    assert one.fields == {
        "data_source": "openai/gsm8k", "ability": "math", "reward_model": rows[0]["reward_model"],
        "extra_info": {"split": "train", "index": 0}, "difficulty": 2.0, "prompt": one.text,
        "messages": messages_of(QUESTIONS[0]),
    }  # fmt: skip
    assert json.loads(json.dumps(one.fields)) == one.fields


def test_dapo_rows_and_columns_by_dots(tmp_path, tokenizer):
    rows = [
        {
            "data_source": "math_dapo", "prompt": messages_of(QUESTIONS[0]), "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079", "level": 3},
        }
    ]  # fmt: skip
    path = rows_as_parquet(tmp_path / "dapo.parquet", rows)
    columns = {"difficulty": "extra_info.level"}
    (one,) = load_prompts(path, tokenizer=tokenizer, columns=columns)
    assert (one.answer, one.kind, one.difficulty, one.source) == ("34", "math", 3.0, "dapo")
    rows[0] |= {"extra_info.level": 7, "data_source": "openai/gsm8k"}
    path = write_lines(tmp_path / "dapo.jsonl", [*rows, rows[0] | {"data_source": "lighteval/MATH"}])
    found = load_prompts(path, tokenizer=tokenizer, columns=columns)
    assert [one.difficulty for one in found] == [7, 7], "a column of that very name goes first"
    assert [one.kind for one in found] == ["gsm8k", "math"]
    (note,) = load_sets(DataSettings(train=[{"path": str(path)}]), tokenizer, 999, [], 0).notes
    assert (
        "(prompt: messages, reward_model.ground_truth, data_source), verified by gsm8k, math, rendered"
        in note
    )


@pytest.mark.parametrize(
    "row, kind, answer",
    [
        ({"solution": r"It is $x = \\boxed{\\frac{1}{2}}$."}, None, r"\\frac{1}{2}"),
        ({"solution": "$-2$"}, None, "$-2$"),
        ({"solution": r"so \\boxed{4}"}, "rewards.py:f", r"so \\boxed{4}"),
        ({"answer": ["34"]}, None, "34"),
        ({"answer": [{"input": "1", "output": "2"}]}, "code", '[{"input": "1", "output": "2"}]'),
        ({"answer": {"é": [1, 2.5]}}, "rewards.py:f", '{"é": [1, 2.5]}'),
        ({"other": 1}, "rewards.py:f", ""),
        ({"other": 1}, {"rewards.py:f": 1, "mod:g": 3}, ""),
        ({"answer": 5}, {"math": 0.8, "rewards.py:f": 0.2}, "5"),
    ],
)
def test_answers_of_other_shapes(tmp_path, row, kind, answer):
    (one,) = load_prompts(write_lines(tmp_path / "set.jsonl", [{"prompt": "q"} | row]), kind=kind)
    assert one.answer == answer
    if isinstance(kind, dict):
        assert one.kind == " + ".join(f"{weight}*{name}" for name, weight in kind.items())


def test_csv_keeps_the_text_of_answers_and_empty_fields_are_missing(tmp_path):
    path = tmp_path / "set.csv"
    path.write_bytes('\ufeffprompt,answer,difficulty\r\n"a, ""b""\nc",007,\r\nq,1.50,2\r\n'.encode())
    found = load_prompts(path)
    assert [(one.text, one.answer, one.difficulty) for one in found] == [
        ('a, "b"\nc', "007", None), ("q", "1.50", 2.0)
    ]  # fmt: skip
    assert found[0].columns == {"difficulty": None}
    long = "x" * 200_000
    assert load_prompts(write_csv(path, [{"prompt": long, "answer": 1}]))[0].text == long


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("set.csv", b"prompt,answer\na,1\nb\n", "set.csv: row 2 has 1 fields, the first line 2"),
        ("set.csv", b'prompt,answer\n"a,1\n', "set.csv: line 2 is not CSV: unexpected end of data"),
        (
            "set.csv",
            b"prompt,prompt\na,1\n",
            "set.csv: .*: prompt, prompt",
        ),
        ("set.csv", b"prompt,answer\n", "set.csv: no rows"),
        ("set.csv", b"", "set.csv: no rows"),
        ("set.csv", b"prompt;answer\na;1\n", "set.csv: no column for the prompt .* among prompt;answer"),
        ("set.csv", b"prompt\xff", "set.csv: not UTF-8 text"),
        ("set.jsonl.gz", b"no gzip", "set.jsonl.gz: .*gzip"),
        ("set.jsonl.gz", gzip.compress(b"{}" * 99)[:-12], "set.jsonl.gz: .*gzip"),
    ],
)
def test_broken_csv_and_gz(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_prompts(tmp_path / name)


def test_a_saved_set_without_the_split_and_broken_files_of_a_folder_are_named(tmp_path):
    save_to_disk(tmp_path / "saved", PLAIN, "train")
    with pytest.raises(ValueError, match="saved: no split 'dev' among train, test; set data.train"):
        load_prompts(tmp_path / "saved", split="dev")
    (tmp_path / "saved" / "train" / "data-00000-of-00001.arrow").write_bytes(b"x")
    with pytest.raises(ValueError, match="saved: save_to_disk wrote this folder, but it cannot be read"):
        load_prompts(tmp_path / "saved")
    write_parts(tmp_path / "parts", PLAIN, "")
    write_lines(tmp_path / "parts" / "train-1.jsonl", [PLAIN[0], {"prompt": "q"}])
    with pytest.raises(ValueError, match="parts/train-1.jsonl: row 2: column 'answer' must hold"):
        load_prompts(tmp_path / "parts")
    tables = load_tables(str(tmp_path / "parts"), split="other")  # no file is called so: all are taken
    assert [os.path.basename(name) for name, _ in tables] == [
        "test-0.jsonl", "train-0.jsonl", "train-1.csv", "train-1.jsonl", "train-2.parquet"
    ]  # fmt: skip


# ---- chat: errors ------------------------------------------------------------------------------------------

USER, ASSISTANT, SYSTEM = ({"role": role, "content": role} for role in ("user", "assistant", "system"))


@pytest.mark.parametrize(
    "messages, message",
    [
        (
            [USER, ASSISTANT],
            "the last message is from the assistant, but a prompt ends with one from the user",
        ),
        ([SYSTEM], "the last message is from the system"),
        ([USER, USER], "message 2 has role 'user' where the assistant's turn is"),
        ([SYSTEM, ASSISTANT, USER], "message 2 has role 'assistant' where the user's turn is"),
        ([SYSTEM, SYSTEM, USER], "message 2 has role 'system', which may only come first and once"),
        ([USER, SYSTEM, USER], "message 2 has role 'system'"),
        ([USER | {"role": "human"}], "message 1 has role 'human'; expected system, user, assistant"),
        ([{"content": "x"}], "message 1 must have a role and a content"),
        ([USER | {"content": None}], "message 1: only text can be rendered, found the content None"),
        ([USER | {"content": [{"type": "image", "url": "x"}]}], "message 1: only text can be rendered"),
        ([USER | {"content": []}], "message 1: only text can be rendered"),
        ([USER | {"content": " "}], "the last message is empty"),
        ("[{'role': 'user', 'content': 'x'}]", "a list of messages that is written as text must be JSON"),
    ],
)
def test_messages_that_make_no_prompt(tmp_path, tokenizer, messages, message):
    path = write_lines(tmp_path / "set.jsonl", [{"prompt": p, "answer": 1} for p in ([USER], messages)])
    with pytest.raises(ValueError, match=re.escape(f"set.jsonl: row 2: {message}")):
        load_prompts(path, tokenizer=tokenizer)
    sets = load_sets(DataSettings(train=[{"path": str(path)}], on_bad_row="drop"), tokenizer, 99, [], 0)
    assert sets.notes[1] == "set: 1 rows dropped: 1 whose messages cannot be rendered"
    (dropped,) = sets.dropped
    assert (dropped["file"], dropped["row"]) == (str(path), 2) and message in dropped["detail"]


def test_messages_that_make_a_prompt(tmp_path, tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [SYSTEM, USER, ASSISTANT, {"role": "user", "content": parts, "name": None}]
    path = write_lines(tmp_path / "set.jsonl", [{"prompt": messages, "answer": 1}])
    (one,) = load_prompts(path, tokenizer=tokenizer, system_prompt="not used", template="<{prompt}>")
    assert one.messages == [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "<ab>"}]
    assert one.text == tokenizer.apply_chat_template(one.messages, tokenize=False, add_generation_prompt=True)


def chat_file(folder, prompt):
    return write_lines(folder / "set.jsonl", [{"prompt": prompt, "answer": "1"}])


def test_templates_that_are_missing_or_fail(tmp_path):
    tokenizer = random_model.build_tokenizer(["x"], 300)
    conversation, text = chat_file(tmp_path, [USER]), write_lines(tmp_path / "text.jsonl", PLAIN)
    with pytest.raises(ValueError, match="set.jsonl: row 1: column .prompt. .* data.chat"):
        load_prompts(conversation, tokenizer=tokenizer, chat="never")
    for args in ({"enable_thinkin": 1}, {"tokenize": True}):
        with pytest.raises(ValueError, match=f"data.chat_template_args.{min(args)} is"):
            load_prompts(conversation, tokenizer=tokenizer, chat_template_args=args)
    tokenizer.chat_template = (
        "{% if messages|length > 1 %}{{ raise_exception('No system role!') }}{% endif %}x"
    )
    load_prompts(conversation, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="set.jsonl: row 1: the chat template failed: .*No system role!"):
        load_prompts(conversation, tokenizer=tokenizer, system_prompt="s")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="set.jsonl: row 1: .* but the tokenizer has no chat template"):
        load_prompts(conversation, tokenizer=tokenizer, on_bad_row="drop")
    with pytest.raises(ValueError, match="text.jsonl: .* but the tokenizer has no chat template"):
        load_prompts(text, tokenizer=tokenizer, chat="always")
    assert len(load_prompts(text, tokenizer=tokenizer)) == len(PLAIN)


def test_warnings_about_what_is_not_rendered(tmp_path, tokenizer):
    text, bare = write_lines(tmp_path / "text.jsonl", PLAIN), random_model.build_tokenizer(["x"], 300)
    bare.chat_template = None
    notes = lambda tokenizer, **settings: loaded(text, tokenizer, **settings).notes[1:]
    assert notes(bare) == notes(tokenizer, chat="never") == notes(tokenizer, chat="always") == []
    (warning,) = notes(tokenizer)
    assert warning.startswith(
        "warning: the prompts of set are plain text, though the tokenizer has a chat template"
    )
    (warning,) = notes(bare, system_prompt="s")
    assert warning == "warning: data.system_prompt has no effect, no prompt is rendered"


def test_special_tokens_are_added_to_plain_text_only():
    tokenizer = random_model.build_tokenizer(["x"], 300)
    tokenizer.bos_token = "<|endoftext|>"
    adds = lambda texts, add_special_tokens: {
        "input_ids": [[0] * add_special_tokens + tokenizer(text)["input_ids"] for text in texts]
    }
    prompts = [prompt("ab"), replace(prompt("c"), is_chat=True), prompt("d")]
    ids = [tokenizer(text)["input_ids"] for text in ("ab", "c", "d")]
    assert tokenize(prompts, adds) == [[0, *ids[0]], ids[1], [0, *ids[2]]]
    assert tokenize([], adds) == []


# ---- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [r"{prompt}\\nA:", r"{prompt}\\n", r"\\t{prompt}", r"{prompt}\\nthink"])
def test_a_line_break_written_as_two_characters_is_refused(text):
    for settings in ({"train": [{"path": "x", "template": text}]}, {"system_prompt": text}):
        with pytest.raises(ValueError, match="line break"):
            DataSettings(**settings)


@pytest.mark.parametrize("text", ["{prompt}\nA:", r"\\boxed{} {prompt}", r"{prompt} \\text{a} \\neq \\times"])
def test_line_breaks_and_latex_are_no_mistake(text):
    assert PromptSource(path="x", template=text).template == text


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"train": [{"path": "a/x.jsonl"}, {"path": "b/x.csv"}]},
            r"data.train\[\].name: two sets are called 'x'",
        ),
        (
            {"eval": [{"path": "a/x.jsonl"}, {"path": "y", "name": "x"}]},
            r"data.eval\[\].name: two sets are called",
        ),
        (
            {"train": [{"path": "x.jsonl", "holdout": 5}], "eval": [{"path": "d/x.jsonl"}]},
            r"data.eval\[\].name: two sets are called 'x' \(a holdout is an eval set, too\)",
        ),
        ({"eval": [{"path": "x", "holdout": 5}]}, r"data.eval\[\] x: weight and holdout are for data.train"),
        ({"eval": [{"path": "x", "weight": 2}]}, r"data.eval\[\] x: weight and holdout are for data.train"),
        (
            {"train": [{"path": "x", "holdout": 1.5}]},
            "holdout 1.5: a share below 1, or a whole number of rows",
        ),
        ({"chat": "never", "system_prompt": "s"}, "data.chat never renders nothing"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ValueError, match=message):
        load_sets(DataSettings(**settings), one_token, 9, [], 0)


@pytest.mark.parametrize(
    "kind, message",
    [
        *[(kind, "each kind needs a weight above 0") for kind in ({"math": 0}, {"math": "1"}, {1: 1.0})],
        ("maths", "unknown kind 'maths': did you mean 'math'"),
        ({"maths": 0.5, "exact": 0.5}, "unknown kind 'maths' in '0.5[*]maths"),
        (5, "valid string"),
    ],
)
def test_kinds_that_there_are_not(kind, message):
    with pytest.raises(ValueError, match=message):
        PromptSource(path="x", kind=kind)


def test_a_kind_of_the_settings_is_never_without_effect(tmp_path):
    path = write_lines(tmp_path / "set.jsonl", [HARMLESS])
    message = (
        r"set.jsonl: kind 'math' of the settings is not used, because the column 'kind' says exact; set "
    )
    with pytest.raises(ValueError, match=message + r"columns: \{kind: null\} to ignore"):
        load_prompts(path, kind="math")
    assert load_prompts(path, kind="exact")[0].kind == load_prompts(path)[0].kind == "exact"
    assert load_prompts(path, kind="math", columns={"kind": None})[0].kind == "math"


# ---- rows that are dropped, held out, weighted -------------------------------------------------------------


def test_dropped_rows_are_counted_by_reason(tmp_path, tokenizer):
    good = [{"prompt": f"q{i}", "answer": "1", "difficulty": i} for i in range(3)]
    bad = [
        {"prompt": "q", "answer": " "}, {"prompt": None, "answer": 1}, {"prompt": "long " * 99, "answer": 1},
        {"prompt": "q", "difficulty": "hard", "answer": 2}, {"answer": 1}, {"prompt": "x" * 200, "answer": 1},
    ]  # fmt: skip
    path = write_lines(tmp_path / "set.jsonl", [good[0], *bad, *good[1:]])
    data = lambda **more: DataSettings(train=[{"path": str(path)}], chat="never", **more)
    sets = load_sets(data(on_bad_row="drop"), tokenizer, 50, [], 0)
    assert [one.text for one in sets.train] == ["q0", "q1", "q2"] and len(sets.train_ids) == 3
    assert sets.notes[1] == (
        "set: 6 rows dropped: 2 without a prompt, 2 longer than rollout.max_prompt_tokens 50, "
        "1 without an answer, 1 whose difficulty is no number"
    )
    assert sorted(row["row"] for row in sets.dropped) == [2, 3, 4, 5, 6, 7]
    assert {row["set"] for row in sets.dropped} == {"set"} and json.dumps(sets.dropped)
    with pytest.raises(ValueError, match="set.jsonl: row 2: column 'answer' must hold.*data.on_bad_row=drop"):
        load_sets(data(), tokenizer, 50, [], 0)
    write_lines(path, [good[0], bad[2]])
    with pytest.raises(
        ValueError, match="set.jsonl: row 2: the prompt has .* tokens, rollout.max_prompt_tokens 50"
    ):
        load_sets(data(), tokenizer, 50, [], 0)
    write_lines(path, [*QUESTIONS, {"question": "q"}])
    sets = load_sets(data(on_bad_row="drop"), tokenizer, 50, [], 0)
    assert {one.kind for one in sets.train} == {"gsm8k"}, "answers that are missing do not say otherwise"
    write_lines(path, bad)
    with pytest.raises(ValueError, match="set.jsonl: .*; set: 6 rows dropped: 2 without a prompt"):
        load_sets(data(on_bad_row="drop"), tokenizer, 50, [], 0)


def numbered(path, count, tag):
    return write_lines(path, [{"prompt": f"{tag} {i}", "answer": i} for i in range(count)])


@pytest.mark.parametrize("holdout, count", [(7, 7), (0.25, 25), (1, 1)])
def test_a_holdout_is_disjoint_stable_and_of_the_wanted_size(tmp_path, holdout, count):
    path = numbered(tmp_path / "set.jsonl", 100, "q")

    def split(seed=0, **more):
        data = DataSettings(train=[{"path": str(path), "holdout": holdout, **more}])
        sets = load_sets(data, one_token, 9, [], seed)
        held_out, ids = sets.eval_sets[more.get("name", "set")]
        assert len(ids) == len(held_out) == count and len(sets.train_ids) == len(sets.train) == 100 - count
        assert f"100 prompts ({count} of them held out)" in sets.notes[0]
        assert sorted(int(one.answer) for one in sets.train + held_out) == list(range(100))
        return {one.answer for one in held_out}

    first = split()
    assert (
        split() == first == split(template="{prompt}!", name="other")
    )  # the questions decide, not their text
    assert split(seed=1) != first
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, rows[::-1])
    assert split() == first


def test_equal_questions_are_held_out_together_and_both_sides_keep_something(tmp_path):
    rows = [{"prompt": f"q {i // 2}{' ' * (i % 2)}", "answer": i} for i in range(40)]
    path = write_lines(tmp_path / "set.jsonl", rows)
    load = lambda n: load_sets(DataSettings(train=[{"path": str(path), "holdout": n}]), one_token, 9, [], 0)
    held_out = {int(one.answer) // 2 for one in load(6).eval_sets["set"][0]}
    assert len(held_out) == 3 and not held_out & {int(one.answer) // 2 for one in load(6).train}
    for holdout in (0.001, 40, 99):
        with pytest.raises(ValueError, match="holdout"):
            load(holdout)


def test_an_evaluation_set_that_shares_a_prompt_with_training_is_refused(tmp_path):
    train, held_out = numbered(tmp_path / "a.jsonl", 9, "q"), numbered(tmp_path / "b.jsonl", 2, "q")
    with pytest.raises(ValueError, match="2 evaluation prompts are also training prompts"):
        load_sets(
            DataSettings(train=[{"path": str(train)}], eval=[{"path": str(held_out)}]), one_token, 9, [], 0
        )


def test_weights_decide_how_often_prompts_are_offered(tmp_path):
    """Over many epochs, counted; each set goes through all its prompts before any comes again."""
    sizes, weights = {"a": 10, "b": 7, "c": 20}, {"a": 1.0, "b": 3.0, "c": 0.3}
    train = [
        {"path": str(numbered(tmp_path / f"{name}.jsonl", size, name)), "weight": weights[name]}
        for name, size in sizes.items()
    ]
    sets = load_sets(DataSettings(train=train), one_token, 9, [], 0)
    assert sets.train_weights == weights and "weight 0.3" in sets.notes[2]
    mixture = mixture_of(sets.train, sets.train_weights)
    per_epoch = 10 + 21 + 6
    offered = prompts_of_step(37, 100 * per_epoch, 0, 5, mixture)
    counts = Counter(offered)
    assert {counts[i] for i in range(10)} == {100}
    assert {counts[i] for i in range(10, 17)} == {300}
    assert {counts[i] for i in range(17, 37)} == {30}  # 100 epochs of 6 are 30 rounds of 20
    for first, size in ((0, 10), (10, 7), (17, 20)):
        of_set = [i for i in offered if first <= i < first + size]
        early = Counter(of_set[: len(of_set) // 2])
        assert max(early.values()) - min(early[i] for i in range(first, first + size)) <= 2
    steps = [i for step in range(50) for i in prompts_of_step(37, 8, 8 * step, 5, mixture)]
    assert steps == offered[:400] and steps != prompts_of_step(37, 400, 0, 6, mixture)


def test_without_weights_the_order_is_that_of_one_shuffled_set(tmp_path):
    paths = [numbered(tmp_path / f"{name}.jsonl", 5, name) for name in "ab"]
    sets = load_sets(DataSettings(train=[{"path": str(path)} for path in paths]), one_token, 9, [], 0)
    assert sets.train_weights is None and mixture_of(sets.train, None) is None
    assert prompts_of_step(10, 10, 0, 0) == [8, 6, 9, 3, 7, 5, 4, 1, 0, 2]  # part of every run that there is
    with pytest.raises(
        ValueError, match="weight 0.05 of a, which has 5 prompts: less than one prompt an epoch"
    ):
        mixture_of(sets.train, {"a": 0.05, "b": 1.0})


# ---- data.random_model -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_random_model_is_a_small_chat_model_and_the_same_again(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = write_lines(tmp_path / "set.jsonl", CONVERSATION_ROWS)
    (tmp_path / "notes.md").write_text("naïve 数")
    sizes = "--vocab 320 --hidden 64 --layers 1 --experts 2 --top-k 1 --expert-width 16".split()
    texts = ["--text", str(text), "--text", str(tmp_path / "notes.md")]
    for name in ("one", "two"):
        random_model.main(["--output", str(tmp_path / name), *texts, *sizes])
    for file in ("model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert model.config.model_type == "qwen3_moe" and 270 < len(tokenizer) == model.config.vocab_size <= 320
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == ends and tokenizer.eos_token == "<|im_end|>"
    words = "any naïve 数 😀\n\t  text"
    assert tokenizer.decode(tokenizer(words)["input_ids"]) == words
    assert len(tokenizer("many clips")["input_ids"]) < len("many clips")  # the words of the file are known
    thought = tokenizer("<think>x</think><|im_end|>")["input_ids"]
    assert len(thought) == 4 and tokenizer.decode(thought, skip_special_tokens=True) == "<think>x</think>"
    with pytest.raises(ValueError, match="one exists and is not empty"):
        random_model.main(["--output", str(tmp_path / "one"), *texts])


CONVERSATION_ROWS = [
    {"prompt": [{"role": "user", "content": f"many clips {i}"}], "answer": i} for i in range(9)
]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--vocab", "100"], "--vocab 100 must be at least 261"),
        (["--hidden", "100"], "--hidden 100 must be a multiple of 64"),
        (["--top-k", "99"], "--top-k 99 must be at most --experts 16"),
        (["--layers", "0"], "--layers 0 must be at least 1"),
        (["--text", "no.txt"], "--text no.txt: neither a data file nor a file of UTF-8 text"),
        (["--text", "no.jsonl"], "no.jsonl: no such file"),
    ],
)
def test_wrong_options_of_a_random_model(tmp_path, options, message):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=message):
        random_model.main(["--output", str(tmp_path / "x"), "--text", str(tmp_path / "a.txt"), *options])
    assert not (tmp_path / "x").exists()


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
    level = lambda one: {"difficulty": one.difficulty}
    assert load_prompts(path, name="set") == [
        replace(one, source="set", columns=level(one)) for one in prompts
    ]
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
    assert splits["test"][2] == Prompt(text, "2000", "gsm8k", "test", 3.0, columns={"difficulty": 3})
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
        ({"problem": "p", "solution": "no box"}, (), r"row 1: column 'solution' has no"),
        ({"problem": "p", "solution": r"\boxed{ }"}, (), r"row 1: column 'solution' has no"),
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
