"""data/references.py and the start of a run: references that no completion can equal, and trivial sets."""

import json
from collections import Counter

import pytest
from helpers import FakeRanks, make_config

import lifecycle
from data.prompts import Prompt, load_prompts
from data.references import MAX_CONSTANT_FRAC, describe
from data.stream import LoadedSets, digest_of
from reward import RewardPool, impossible_references


def written(path, rows: list[dict]):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


FRAMED = {
    "5": "5", "<answer> 5 </answer>": "5", "<ANSWER>\n5\n</ANSWER>": "5", "The answer is 5.": "5",
    "Answer: 4.5": "4.5", r"So the final answer is \boxed{7}.": "7",
    "the correct answer is: (1, 2)": "(1, 2)",
    "['5']": "5", '{"answer": "5"}': "5",
    '["5"]': "5", "She has 3. Then she buys 2 more.\n#### 5": "5", r"\boxed{1} and \boxed{2}": "1, 2",
    r"We get \boxed{\frac{1}{2}}.": r"\frac{1}{2}", "[5, 6]": "[5, 6]", r"p \to q": r"p \to q",
    r"\text{no solution}": r"\text{no solution}", "2 hours 30 minutes": "2 hours 30 minutes", "None": "None",
    "All primes p congruent to 1 mod 4": "All primes p congruent to 1 mod 4", "8:30 a.m.": "8:30 a.m.",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["math", "1*math + 1*exact"])
def test_a_reference_loses_the_frame_that_a_dataset_puts_around_it(kind, tmp_path):
    rows = [{"prompt": f"q{i}", "answer": text} for i, text in enumerate(FRAMED)]
    prompts = load_prompts(written(tmp_path / "set.jsonl", rows), kind=kind)
    assert [prompt.answer for prompt in prompts] == list(FRAMED.values())
    exact = load_prompts(tmp_path / "set.jsonl", kind="exact")
    assert [prompt.answer for prompt in exact] == list(FRAMED), "whole texts are compared as they are"


SOLUTION = "Natalia sold 48 clips in April. Then she sold half as many in May, so 24, and 72 altogether."
NO_ANSWERS = {  # {answer: word of the reason}
    "proof": "place of an answer", "Proof.": "place", r"\text{Proof}": "place", "notfound": "place",
    "N/A": "place", "nan": "place", "see solution": "place", "Q.E.D.": "place", "Prove it": "place",
    "Answers will vary": "place", "['5', '6']": "list of 2", '["5", "6"]': "list of 2",
    SOLUTION: "columns.answer", "3 + 4 = <<3+4=7>>7": "columns.answer",
    f"<answer>{SOLUTION}</answer>": "columns",
    '{"inputs": ["1\\n"], "outputs": ["2\\n"]}': "kind code",
    '["assert f(1) == 2", "assert f(2) == 3"]': "code",
    "def check(candidate):\n    assert candidate(1) == 2": "kind code", "assert f(1) == 2": "kind code",
}  # fmt: skip


@pytest.mark.parametrize("answer, word", NO_ANSWERS.items(), ids=lambda text: text[:12])
def test_a_row_without_an_answer_under_its_kind_is_refused_and_named(answer, word, tmp_path):
    """Between other rows, so that the decision is one per row; dropped on demand."""
    rows = [{"prompt": f"q{i}", "answer": text} for i, text in enumerate(["5", answer, "6"])]
    file = written(tmp_path / "set.jsonl", rows)
    for kind in ("math", None):
        with pytest.raises(ValueError) as error:
            load_prompts(file, kind=kind)
        assert all(text in str(error.value) for text in ("row 2", "'answer'", word, "on_bad_row=drop"))
    assert [prompt.answer for prompt in load_prompts(file, on_bad_row="drop")] == ["5", "6"]
    assert len(load_prompts(file, kind="exact")) == 3


@pytest.mark.parametrize(
    "value", [["5", "6"], ["assert f(1) == 2", "assert f(2) == 3"], {"inputs": [], "outputs": []}]
)
def test_lists_and_objects_are_no_values(value, tmp_path):
    file = written(tmp_path / "set.jsonl", [{"prompt": "q", "answer": "5"}, {"prompt": "r", "answer": value}])
    with pytest.raises(ValueError, match="row 2"):
        load_prompts(file)


def test_each_row_of_gsm8k_decides_for_itself(tmp_path):
    """One row without #### must not turn all others into whole solutions."""
    rows = [{"question": f"q{i}", "answer": f"{SOLUTION}\n#### {i}"} for i in range(4)]
    short = {"question": "short", "answer": "12"}
    prompts = load_prompts(written(tmp_path / "set.jsonl", [*rows, short]))
    assert [prompt.kind for prompt in prompts] == ["gsm8k"] * 4 + ["math"]
    with pytest.raises(ValueError, match="row 3"):
        load_prompts(written(tmp_path / "bad.jsonl", [*rows[:2], {"question": "q", "answer": SOLUTION}]))


def described(folder, monkeypatch, checkpoint=None, **sets: list[tuple[str, str]]) -> list[str]:
    """Return the notes of a start about sets of (kind, answer); `train` is the training set."""
    FakeRanks(1).install(monkeypatch)

    def prompts_of(name: str) -> tuple[list[Prompt], list[list[int]]]:
        rows = sets[name]
        return [Prompt(f"{name} {i}", answer, kind, name) for i, (kind, answer) in enumerate(rows)], [
            [1]
        ] * len(rows)

    loaded = LoadedSets(*prompts_of("train"), None, {n: prompts_of(n) for n in sets if n != "train"}, [], [])
    monkeypatch.setattr(lifecycle, "prompts_of_checkpoint", lambda checkpoint: digest_of(loaded.train))
    with RewardPool(1) as pool:
        lifecycle.drop_impossible(loaded, pool, make_config(f"run.dir={folder}"), checkpoint)
    return loaded.notes


OUTPUTS = {"inputs": ["1", "2", "3"], "outputs": ["YES", "NO", "YES"]}
COMMAS = [{"id": "punctuation:no_comma"}, {"id": "change_case:english_capital"}]


@pytest.mark.parametrize(
    "kind, reference, constant, share",
    [("code", OUTPUTS, "YES", 2 / 3),
     ("code", ["assert f(1) == 7", "assert f(2) == 7", "assert f(3) == 8"], "7", 2 / 3),
     ("code", {"inputs": [[1], [2]], "outputs": [True, False], "fn_name": "f"}, "True", 0.5),
     ("instructions", COMMAS[:1], "yes", 1.0), ("instructions", COMMAS, "YES", 1.0),
     ("code", {"inputs": ["1", "2"], "outputs": ["5", "6"]}, "5", 0.5),
     ("code", ["assert f(1) == [1]"], None, None)],
)  # fmt: skip
def test_a_constant_that_earns_a_part_of_a_fraction_is_reported(kind, reference, constant, share):
    comparisons = {}
    rows = [(kind, json.dumps(reference), {})]
    with RewardPool(
        1, code_limits={"isolation": "rlimits", "timeout_s": 3.0, "memory_bytes": 1 << 30}
    ) as pool:
        assert impossible_references(pool, rows, comparisons=comparisons) == {}
    report = describe(Counter(comparisons.values()))
    assert report["constant_frac"] == (pytest.approx(share) if share else None)
    assert (f"{constant} earns" in report["warning"]) if share else report["warning"] is None


def test_the_start_says_how_references_are_compared_and_which_are_frequent(tmp_path, monkeypatch):
    mixed = ["1/2", "0.5", "7", "x+1", "Monday", r"p \to q"]
    notes = described(
        tmp_path, monkeypatch,
        train=[("math", answer) for answer in mixed] + [("code", '["assert f(1) == 1"]'), ("a.py:f", "?")],
        test=[("gsm8k", f"a #### {n}") for n in ("1,000", "1000.0", "3", "4", "5")],
        flat=[("0.5*numeric + 0.5*exact", str(n)) for n in range(10)],
    )  # fmt: skip
    train, warning, test, test_warning, flat = notes
    assert train.startswith("train: ") and "number 3 (1/2, 7)" in train and "text 2 (" in train
    assert "expression 1 (x + 1)" in train and "tests 1" in train and "function 1" in train
    assert "most frequent: 1/2 25.0%" in train and "warning: train: " in warning and "25.0%" in warning
    assert test.startswith("eval/test: references compared as number 5 (1000, 3, 4)")
    assert "1000 is right in 40.0%" in test_warning and flat.startswith("eval/flat: ")
    reports = json.loads((tmp_path / "references.json").read_text())
    assert list(reports) == ["train", "eval/test", "eval/flat"]
    assert (
        reports["eval/test"]["constant_frac"] == 0.4 > MAX_CONSTANT_FRAC
        and not reports["eval/flat"]["warning"]
    )
    notes = described(tmp_path, monkeypatch, tmp_path, train=[("math", "8")], new=[("math", "9")])
    assert len(notes) == 2 and notes[0].startswith("eval/new"), "a resume checks held-out sets only"
    assert list(json.loads((tmp_path / "references.json").read_text())) == ["train", "eval/new"]
