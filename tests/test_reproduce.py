"""Reruns: the YAML file and the record that `experiments/run.py --row` takes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from experiments import run


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def dry_run(tmp_path):
    """Return a function that prints the command of a row, for a folder without runs."""
    return lambda row, *options: run.main(["--row", row, *options, "--out", str(tmp_path), "--dry-run"])


@pytest.mark.parametrize(
    "row, setting",
    [
        ("elimination_tuned/grpo", "model.path=experiments/starts/habits"),
        ("losses_tuned/espo", "algorithm.entropy_clip_coef=0.2"),
    ],
)
def test_the_settings_of_a_record_are_those_of_the_run(row, setting, dry_run, capsys):
    assert dry_run(row) == 0
    output = capsys.readouterr()
    assert any(word.startswith(setting) for word in output.out.split())
    assert f"seed 0 of experiments/studies/{row.split('/')[0]}/runs.jsonl" in output.err


def test_two_records_of_a_run_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "from_root", Path)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"row": "grpo", "seed": 3}\n')
    monkeypatch.setattr(run.records, "whole_text", lambda file, or_small: file.read_text())
    with pytest.raises(ValueError, match=r"recorded in a.jsonl, b.jsonl"):
        run.recorded_run(tmp_path, "grpo", 3)


def test_a_row_that_does_not_exist_names_the_rows_of_the_study(tmp_path):
    (tmp_path / "grpo.yaml").touch()
    with pytest.raises(ValueError, match=r"espo\.yaml .*: grpo$"):
        run.row_file(tmp_path / "espo.yaml")


@pytest.mark.parametrize("study", ["variants", "zero_variance"])
def test_a_study_that_left_the_tree_names_the_command_that_brings_it(study, dry_run, capsys):
    """The YAML files of zero_variance that are bases of other rows are still in its folder."""
    assert dry_run(f"{study}/grpo") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"python -m experiments.records get {study}" in line and "4210a6b" in line


def test_the_recorded_ep_size_wins_over_the_number_of_ranks(dry_run, capsys):
    """A record of one rank has ep_size 1, which it omits because that is the default."""
    assert dry_run("elimination_tuned/grpo", "--ranks", "2") == 0
    words = capsys.readouterr().out.split()
    assert "--nproc-per-node=2" in words
    assert [word for word in words if word.startswith("model.ep_size=")] == ["model.ep_size=1"]
    file = ROOT / "experiments" / "studies" / "elimination_tuned" / "grpo.yaml"
    args = SimpleNamespace(rows=[file], script=ROOT / "train_rl.py")
    assert "model.ep_size=4" in run.recorded_settings(args, {"settings": {"model.ep_size": 4}})
