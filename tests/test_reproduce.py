"""Reruns: the YAML file and the record that `experiments/run.py --row` takes, and `make table`."""

import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT

from experiments import report, run
from train_rl import load_config


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
        ("long_chains/grpo", "others.jsonl", "checkpoint.every=0"),
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


@pytest.mark.parametrize(
    ("study", "other"), [("variants", "zero_variance"), ("chains_penalties", "long_chains")]
)
def test_a_row_without_a_yaml_file_takes_the_one_that_the_readme_names(study, other, dry_run, capsys):
    assert dry_run(f"{study}/grpo") == 0
    output = capsys.readouterr()
    assert f"--config experiments/studies/{other}/grpo.yaml run.dir=" in output.out
    assert f"experiments/studies/{study}/runs.jsonl" in output.err


def test_a_row_that_was_removed_names_the_commit_of_its_runs(dry_run, capsys):
    assert dry_run("variants/kl_cov") == 2
    error = capsys.readouterr().err
    assert "git worktree add ../old e3b71aa4" in error and "kl_cov.yaml" in error


def test_a_readme_that_names_two_files_decides_nothing(tmp_path):
    names = [f"experiments/studies/{study}/grpo.yaml" for study in ("zero_variance", "long_chains")]
    (tmp_path / "README.md").write_text(names[0])
    assert run.row_file(tmp_path / "grpo.yaml") == ROOT / names[0]
    (tmp_path / "README.md").write_text(" ".join(names))
    (tmp_path / "espo.yaml").touch()
    with pytest.raises(ValueError, match=r"grpo\.yaml does not exist; rows in this folder: espo$"):
        run.row_file(tmp_path / "grpo.yaml")


def test_the_recorded_ep_size_wins_over_the_number_of_ranks(dry_run, capsys):
    """The runs of `system` had two ranks and ep_size 1, which a record omits because it is the default."""
    assert dry_run("system/off", "--ranks", "2") == 0
    words = capsys.readouterr().out.split()
    assert "--nproc-per-node=2" in words
    assert [word for word in words if word.startswith("model.ep_size=")] == ["model.ep_size=1"]
    past = {"settings": {"model.ep_size": 4}}
    recorded = report.Run(past, "", None, {}, *[np.zeros(1)] * 3, None)
    file = ROOT / "experiments" / "studies" / "system" / "off.yaml"
    args = SimpleNamespace(rows=[file], script=ROOT / "train_rl.py")
    assert "model.ep_size=4" in run.recorded_settings(args, recorded)


def test_the_commands_of_zero_variance_make_the_scores_of_all_rows():
    """A row without its scores fails, and `make table` would end before its table."""
    study = run.STUDIES / "zero_variance"
    configs = [load_config(["--config", str(file)]) for file in study.glob("*.yaml")]
    scores = {config.zero_variance.offline_scores for config in configs} - {None}
    commands = subprocess.run(["make", "-n", "table"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(scores) == 2
    for text in (commands.stdout, (study / "README.md").read_text()):
        assert "experiments/prepare.sh habits" in text, "the start of everything.jsonl is committed"
        assert [score for score in scores if f"--output {score}" not in text] == []
