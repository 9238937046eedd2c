"""Reruns: the YAML file and the record that `experiments/run.py --row` takes."""

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
    ("row", "file", "setting"),
    [
        ("real_regime/chains_grpo", "chains_own.jsonl", "model.path=experiments/starts/chains/model"),
        ("real_regime/chains_grpo", "chains_third.jsonl", "train.learning_rate=0.00017"),
        ("real_regime/chains_grpo", "chains_triple.jsonl", "train.learning_rate=0.0015"),
    ],
)
def test_one_of_several_records_of_a_row_is_named(row, file, setting, dry_run, capsys):
    """Row and seed alone are refused, because these records have other rates or starts."""
    assert dry_run(row) == 2
    error = capsys.readouterr().err
    assert file in error and "--record" in error
    assert dry_run(row, "--record", file) == 0
    output = capsys.readouterr()
    assert setting in output.out.split()
    assert f"seed 0 of experiments/studies/{row.split('/')[0]}/{file}" in output.err
    assert dry_run(row, "--record", "none.jsonl") == 2 and file in capsys.readouterr().err


def test_a_record_is_named_for_a_row_of_a_study_alone(capsys):
    with pytest.raises(SystemExit):
        run.main(["--rows", "a.yaml", "--seeds", "0", "--out", "runs/a", "--record", "runs.jsonl"])
    assert "--record" in capsys.readouterr().err


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
    assert dry_run("teacher/short_grpo", "--ranks", "2") == 0
    words = capsys.readouterr().out.split()
    assert "--nproc-per-node=2" in words
    assert [word for word in words if word.startswith("model.ep_size=")] == ["model.ep_size=1"]
    file = ROOT / "experiments" / "studies" / "teacher" / "short_grpo.yaml"
    args = SimpleNamespace(rows=[file], script=ROOT / "train_rl.py")
    assert "model.ep_size=4" in run.recorded_settings(args, {"settings": {"model.ep_size": 4}})
