"""experiments/record/record.py: tokens to the target, and when an entry is a record."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT, edit
from scipy.stats import ttest_rel
from test_table import write_run

from data.score import model_digest
from experiments import report, run
from experiments.record import record
from runtime.config import flat_settings


def entry(name: str, crossings: list[float | None], offline_tokens: int = 0) -> dict:
    """An entry whose runs reach the target at the given tokens, each by a line of four evaluations."""
    curves = {}
    for seed, tokens in enumerate(crossings):
        # means of two evaluations in a row: 0.5 at half of the tokens, 0.75 at the tokens, 1 at twice as many
        values = [0.5, 0.5, 1.0, 1.0] if tokens else [0.5, 0.5, 0.5, 0.5]
        curves[str(seed)] = {
            "tokens": [0, (tokens or 100) / 2, tokens or 100, 2 * (tokens or 100)],
            "values": values,
        }
    return {
        "track": "sums", "entry": name, "date": "2026-11-26", "commit": "c0ffee00", "settings": {},
        "weights": "aa", "versions": {"weights": "aa"}, "offline_tokens": offline_tokens, "curves": curves,
    }  # fmt: skip


SUMS = record.TRACKS["sums"]
START = record.settings_of("sums")
SLOW = entry("slow", [90_000 + 1000 * seed for seed in range(10)])
FAST = entry("fast", [80_000 + 500 * (seed % 3) for seed in range(10)])


def test_tokens_count_the_offline_scoring_and_need_two_evaluations():
    """A single evaluation above the target, between two far below it, is not enough."""
    tokens = record.tokens_of(entry("x", [10_000, None], offline_tokens=50))
    assert tokens == {0: pytest.approx(10_050), 1: None}
    lucky = entry("x", [10_000])
    grid = [10_000 * number for number in range(5)]
    lucky["curves"]["0"] = {"tokens": grid, "values": [0.1, 0.2, 0.8, 0.2, 0.3]}
    assert record.tokens_of(lucky) == {0: None}


def test_a_run_whose_tokens_exceed_the_budget_with_the_offline_scoring_counts_as_never():
    """Otherwise a run that reaches the target could count more than a run that does not."""
    expensive = entry("x", [SUMS.budget - 10, SUMS.budget - 50], offline_tokens=42)
    assert record.tokens_of(expensive) == {0: None, 1: pytest.approx(SUMS.budget - 8)}


def test_many_evaluations_of_tiny_steps_give_no_more_chances():
    """Pairs of lucky evaluations, 100 tokens apart, between counted evaluations below the target."""
    tokens = [100 * number for number in range(300)]
    lucky = entry("x", [10_000])
    lucky["curves"]["0"] = {
        "tokens": tokens,
        "values": [0.9 if t % 5000 in (100, 200) else 0.2 for t in tokens],
    }
    assert record.tokens_of(lucky) == {0: None}
    counted, values = record.spaced(lucky["curves"]["0"], SUMS.spacing)
    assert counted.tolist() == [0, 5000, 10_000, 15_000, 20_000, 25_000] and set(values) == {0.2}


def test_an_entry_is_a_record_by_the_paired_test():
    result = record.compared(FAST, SLOW)
    old = [math.log(value) for value in record.tokens_of(SLOW).values()]
    new = [math.log(value) for value in record.tokens_of(FAST).values()]
    assert result["p"] == pytest.approx(ttest_rel(old, new).pvalue) and result["p"] < 0.01
    assert result["ratio"] == pytest.approx(math.exp(np.mean(old) - np.mean(new)))
    assert result["is_record"] and not record.compared(SLOW, FAST)["is_record"], "more tokens, equal p"
    noisy = entry("noisy", [60_000 if seed % 2 else 110_000 for seed in range(10)])
    result = record.compared(noisy, SLOW)
    assert result["ratio"] > 1 and result["p"] > 0.01 and not result["is_record"]


def test_a_run_without_the_target_counts_with_the_budget_and_disqualifies_a_new_entry():
    failing = entry("failing", [None, *[80_000] * 9])
    assert not record.compared(failing, SLOW)["is_record"]
    result = record.compared(FAST, failing)
    first_log = math.log(SUMS.budget / 80_000)
    other_logs = [math.log(80_000 / value) for value in list(record.tokens_of(FAST).values())[1:]]
    assert result["ratio"] == pytest.approx(math.exp((first_log + sum(other_logs)) / 10))


def test_the_table_compares_each_entry_with_the_record_of_its_time():
    other = entry("other", [10_000] * 6) | {"track": "tasks"}
    records = [SLOW, FAST, other, SLOW | {"entry": "late"}]
    assert record.holder_of(records, "sums") is FAST and record.holder_of(records, "tasks") is other
    assert record.holder_of([], "sums") is None
    first, second, first_of_tasks, third = record.table_lines(records)[2:]
    assert first_of_tasks.startswith("| tasks |") and "the first entry" in first_of_tasks
    assert "the first entry" in first and second.endswith("| yes |") and third.endswith("| no |")
    assert "[late](late.yaml)" in third and "10 of 10" in third
    assert len(record.table_lines([])) == 2, "a head without entries"


# ---- runs --------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path) -> list[report.Run]:
    """Ten finished runs of an entry, read from their folders."""
    for seed in range(10):
        folder = write_run(tmp_path / "runs" / "record", "mine", seed, [0.5, 0.5, 1.0, 1.0])
        versions = {"commit": "c0ffee", "dirty": False, "weights": "aa", "machine": {"cpu": "x"}}
        (folder / "versions.json").write_text(json.dumps(versions))
        (folder / "config.yaml").write_text((record.FOLDER / "sums.yaml").read_text())
    return tmp_path


@pytest.fixture
def short_spacing(monkeypatch) -> None:
    monkeypatch.setitem(record.TRACKS, "sums", replace(SUMS, spacing=200))


def read(root, monkeypatch) -> list[report.Run]:
    monkeypatch.chdir(root)
    return record.read_runs("mine", record.TRACKS["sums"])


def test_runs_become_an_entry(runs, short_spacing, monkeypatch):
    """Two steps of 100 tokens between evaluations: the mean of two evaluations is 0.75 at 400 tokens."""
    made = record.record_of("mine", "sums", read(runs, monkeypatch))
    assert record.problems_of(read(runs, monkeypatch), "sums", SLOW) == []
    assert record.tokens_of(made) == {seed: pytest.approx(400) for seed in range(10)}
    assert (made["commit"], made["weights"]) == ("c0ffee", "aa")
    assert made["versions"]["machine"] == {"cpu": "x"}


def test_the_next_runs_need_a_committed_entry(runs, monkeypatch):
    """Before the runs, because ten of them take twenty minutes; finished runs need no commit."""
    monkeypatch.chdir(runs)
    monkeypatch.setattr(record, "commit_of", lambda: {"commit": "c0ffee", "dirty": True})
    assert record.obstacles("mine", "sums") == [], "all runs have finished"
    (reason,) = record.obstacles("grpo", "sums")
    assert "changes" in reason
    monkeypatch.setattr(record, "commit_of", lambda: {"commit": "c0ffee", "dirty": False})
    assert record.obstacles("grpo", "sums") == []
    with pytest.raises(ValueError, match="data.eval.*model.path") as error:
        record.obstacles("grpo", "tasks")
    assert "learning_rate" not in str(error.value)
    with pytest.raises(ValueError, match="other.yaml"):
        record.obstacles("other", "sums")
    monkeypatch.setattr(record, "git", lambda *words: None)
    (reason,) = record.obstacles("grpo", "sums")
    assert "not committed" in reason


@pytest.mark.parametrize("name", record.TRACKS)
def test_the_first_entries_keep_the_rules_of_their_track(name):
    """And the budget of the rules ends their runs."""
    for entry in {record.TRACKS[name].first, name}:
        settings = record.settings_of(entry)
        assert record.broken_rules(settings, name) == []
        assert settings["train.max_generated_tokens"] == record.TRACKS[name].budget


def test_entries_have_the_settings_of_their_records():
    for recorded in json.loads((record.FOLDER / "records.json").read_text()):
        settings = record.settings_of(recorded["entry"])
        settings = {name: value for name, value in settings.items() if name not in ("run.dir", "train.seed")}
        assert settings == recorded["settings"], recorded["entry"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("false", "true", "uncommitted"), ('"commit"', '"earlier": [{"dirty": true}], "commit"', "uncommitted"),
     ('"x"', '"y"', "machine"), ("c0ffee", "beef", "commit"),
     ('"aa"', '"bb"', "weights"), ("", "", "missing")],
)  # fmt: skip
def test_runs_that_break_a_rule_do_not_enter_the_file(old, new, message, runs, monkeypatch):
    folder = runs / "runs" / "record" / "mine" / "seed_3"
    if old:
        edit(folder / "versions.json", old, new)
    else:
        (folder / "summary.json").unlink()
    problems = record.problems_of(read(runs, monkeypatch), "sums", SLOW)
    assert len(problems) == 1 and message in problems[0]


BROKEN = [
    {"teacher.path": "x"},
    {"data.tools": ["sums.py:add"]},
    {"data.environment": "sums.py:Sums"},
    {"data.chat_template_args": {"chat_template": "x"}},
    {"data.on_bad_row": "drop"},
    {"rollout.stop": [3]},
    {"model.path": "other"},
    {"eval.every": 1},
    {"reward.binary": True},
    {"train.max_generated_tokens": 300_000},
    *(
        flat_settings({"stages": [{"name": "a", "until": {"steps": 1}}, {"name": "b"} | stage]})
        for stage in (
            {"data": {"train": []}},
            {"eval": {"every": 1}},
            {"eval": {"max_new_tokens": 5}},
            {"rollout": {"temperature": 0.2}},
            {"teacher": {"path": "x"}},
            {"until": {"metric": "eval/additions/avg_at_8", "accuracy": 0.7}},
        )
    ),
]


@pytest.mark.parametrize("settings", BROKEN)
def test_settings_that_no_entry_may_have(settings, runs, monkeypatch):
    """Other prompts, models and programs, and evaluations under other conditions."""
    read_runs = read(runs, monkeypatch)
    read_runs[0].record["settings"] = START | settings
    (problem,) = record.problems_of(read_runs, "sums", None)
    (name,) = record.broken_rules(START | settings, "sums")
    assert name in problem


@pytest.mark.parametrize(
    ("settings", "num"),
    [({}, 0), ({"token_cost": 0.1}, 1), ({"token_cost": 0.25}, 0), ({"token_cost": 1.0, "topk": 8}, 0)],
)
def test_verified_tokens_have_a_price(settings, num, runs, monkeypatch):
    read_runs = read(runs, monkeypatch)
    read_runs[4].record["settings"] |= {f"drafts.{name}": value for name, value in settings.items()}
    assert record.problems_of(read_runs, "sums", None) == [], "no drafts"
    read_runs[4].record["settings"]["drafts.form"] = "residual"
    problems = record.problems_of(read_runs, "sums", None)
    assert len(problems) == (num or not settings) and all("drafts.token_cost" in p for p in problems)


def test_verified_tokens_of_drafts_count_a_quarter():
    rows = [
        {"generated_tokens": 0, "eval/additions/avg_at_8": 0.25}, {"generated_tokens": 9},
        {"generated_tokens": 9, "draft_tokens_total": 5}, {"generated_tokens": 20, "draft_tokens_total": 3},
        {"generated_tokens": 20, "eval/additions/avg_at_8": 0.5},
    ]  # fmt: skip
    assert record.curve_of(rows, SUMS.metric) == {"tokens": [0, 22], "values": [0.25, 0.5]}


def test_offline_scores_of_another_model_do_not_enter_the_file(runs, monkeypatch):
    read_runs = read(runs, monkeypatch)
    scores = runs / "scores.jsonl"
    for name in ("zero_variance.offline_scores", "stages[1].zero_variance.offline_scores"):
        read_runs[0].record["settings"] = START | {name: str(scores)}
        for digest, num_problems in (("0123456789abcdef", 1), (model_digest(ROOT / START["model.path"]), 0)):
            scores.write_text(json.dumps({"model": f"model {digest}"}) + "\n")
            problems = record.problems_of(read_runs, "sums", None)
            assert len(problems) == num_problems and all("scores.jsonl" in problem for problem in problems)


def test_the_first_command_runs_ten_seeds_and_adds_the_entry(runs, short_spacing, monkeypatch, capsys):
    """The runs are finished, so that only reading, table and file remain."""
    shutil.copy(record.FOLDER / "sums.yaml", runs)
    monkeypatch.setattr(record, "FOLDER", runs)
    monkeypatch.setattr(run, "ROOT", runs)
    (runs / "records.json").write_text(json.dumps([SLOW]))
    commands = []
    monkeypatch.setattr(run, "main", lambda argv: commands.append(argv) or 0)
    monkeypatch.chdir(runs)
    assert record.main(["--entry", "mine", "--add"]) == 0
    assert commands[0][1].endswith("mine.yaml")
    assert [str(seed) for seed in range(10)] == commands[0][3:13]
    added = json.loads((runs / "records.json").read_text())
    assert [one["entry"] for one in added] == ["slow", "mine"] and "| yes |" in capsys.readouterr().out
    edit(runs / "runs/record/mine/seed_3/versions.json", "false", "true")
    assert record.main(["--entry", "mine", "--add"]) == 1 and "uncommitted" in capsys.readouterr().err
    assert record.main(["--entry", "mine"]) == 0, "an entry can be tried before the commit"
    assert json.loads((runs / "records.json").read_text()) == added
