"""experiments/records.py and starts.py: small records, files from history, and the gate in a shallow clone.

The repositories are made here: a study with a whole record at one commit and its small form at the next.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, commit_all, edit, git

from experiments import records, report, run, starts

STEPS = {"step": [1, 2], "score": [0.25, 0.5], "seconds_per_step": [1.5, 2.5]}


@pytest.fixture
def repository(tmp_path) -> Path:
    """Make a repository with a record and an earlier study; then the record is thinned, the study leaves."""
    root = tmp_path / "repository"
    studies = root / "experiments" / "studies"
    (studies / "question").mkdir(parents=True)
    (studies / "earlier").mkdir()
    git(tmp_path, "init", "-q", str(root))
    whole = {"row": "grpo", "seed": 0, "commit": "c0ffee", "settings": {"train.num_steps": 2}, "steps": STEPS}
    whole |= {"evaluations": {"step": [0, 2], "generated_tokens": [0, 80], "eval/sums/avg_at_8": [0.2, 0.4]}}
    whole |= {"outcomes": {"eval/sums/avg_at_8": [0.0, 1.0]}, "offline_tokens": 0}
    lines = [json.dumps(whole | {"seed": seed}, separators=(",", ":")) for seed in (0, 1)]
    (studies / "question" / "runs.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (studies / "earlier" / "README.md").write_text("An earlier study.\n")
    source = tmp_path / "built"
    (source / "model").mkdir(parents=True)
    (source / "model" / "model.safetensors").write_bytes(b"weights")
    (source / "model" / "config.json").write_text("{}")
    first = commit_all(root)
    records.write_small("question/runs.jsonl", ["score"], studies)
    git(root, "rm", "-q", "experiments/studies/earlier/README.md")
    index = json.loads((studies / records.INDEX).read_text())
    assert index == {"question/runs.jsonl": first}
    (studies / records.INDEX).write_text(json.dumps(index | {"earlier": first}))
    commit_all(root)
    return root


def test_a_small_record_has_all_that_the_gate_reads_and_the_chosen_steps(repository):
    study = repository / "experiments" / "studies" / "question"
    record = json.loads((study / "runs.jsonl").read_text().splitlines()[0])
    assert record["steps"] == {"score": STEPS["score"]} and "outcomes" not in record
    assert record["settings"] == {"train.num_steps": 2} and record["offline_tokens"] == 0
    rows = report.read_rows([study / "runs.jsonl"], None, "sums/avg_at_8")
    assert [run.values[-1] for run in rows["grpo"]] == [0.4, 0.4], "the steps are numbered without `step`"
    assert records.check_records(study) == []
    with pytest.raises(ValueError, match=r"seconds_per_step.*records get"):
        report.check_columns(("row", "seconds"), rows)
    records.write_small("question/runs.jsonl", ["seconds_per_step"], study.parent)
    file = study / "runs.jsonl"
    assert "score" not in file.read_text(), "thinned anew from the whole file"
    file.write_text(file.read_text() + json.dumps(record | {"seed": 2}) + "\n")
    with pytest.raises(ValueError, match="more runs than its commit .* move new runs"):
        records.write_small("question/runs.jsonl", [], study.parent)


@pytest.mark.parametrize(("old", "new", "name"), [
    ('"commit":"c0ffee"', '"commit":"decade"', "commit"), ("0.5]", "0.6]", "steps"),
    ("0.4]", "0.9]", "evaluations"), ('"train.num_steps":2', '"train.num_steps":3', "settings"),
    ('"seed":1', '"seed":2', "seeds"), ('"offline_tokens":0', '"offline_tokens":9', "offline_tokens"),
])  # fmt: skip
def test_a_forged_record_is_refused_in_a_clone_with_history(old, new, name, repository):
    file = repository / "experiments" / "studies" / "question" / "runs.jsonl"
    edit(file, old, new)
    (problem,) = records.check_records(file.parent)
    assert "runs.jsonl" in problem and name in problem


def test_a_file_that_the_index_no_longer_names_holds_no_small_records(repository):
    file = repository / "experiments" / "studies" / "question" / "runs.jsonl"
    (file.parent.parent / records.INDEX).write_text("{}")
    edit(file, '{"score":[0.25,0.5]}', "{}")
    edit(file, "0.4]", "0.9]")
    assert records.check_records(file.parent) == ["whole.json no longer names runs.jsonl; restore its line"]
    with pytest.raises(ValueError, match="line 1: steps.step is missing"):
        report.read_rows([file], None, "sums/avg_at_8")


def test_whole_records_of_another_branch_are_refused(repository):
    studies = repository / "experiments" / "studies"
    other = git(repository, "commit-tree", "HEAD^{tree}", "-m", "no parent")
    (studies / records.INDEX).write_text(json.dumps({"question/runs.jsonl": other}))
    (problem,) = records.check_records(studies / "question")
    assert f"{other[:8]} is no ancestor of HEAD" in problem


def test_the_check_of_the_docs_names_a_forged_record(repository, capsys):
    assert report.check_documents(repository, fix=False) == 0
    edit(repository / "experiments" / "studies" / "question" / "runs.jsonl", "c0ffee", "decade")
    assert report.check_documents(repository, fix=False) == 1
    assert "commit: not as in the whole record" in capsys.readouterr().err


def test_a_new_record_is_committed_before_it_is_thinned(repository):
    studies = repository / "experiments" / "studies"
    (studies / "question" / "more.jsonl").write_text((studies / "question" / "runs.jsonl").read_text())
    with pytest.raises(ValueError, match="more.jsonl: commit the whole record file first"):
        records.write_small("question/more.jsonl", [], studies)
    with pytest.raises(ValueError, match="no record of question/runs.jsonl has this metric"):
        records.write_small("question/runs.jsonl", ["none"], studies)


def test_whole_records_and_earlier_studies_come_from_history(repository, tmp_path):
    studies = repository / "experiments" / "studies"
    (studies / "question" / "declared.json").write_text("{}")
    folder = records.get("question", studies, tmp_path / "out")
    assert (folder / "declared.json").is_file(), "report.py refuses records without it"
    whole = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    assert whole[1]["steps"] == STEPS and "outcomes" in whole[1]
    assert (records.get("earlier", studies, tmp_path / "out") / "README.md").is_file()
    with pytest.raises(ValueError, match="none: history holds no records.*earlier, question"):
        records.get("none", studies, tmp_path / "out")
    message = records.missing_study(studies / "earlier")
    assert "no longer in the tree" in message and "experiments.records get earlier" in message
    assert records.missing_study(studies / "question") is None


def test_a_shallow_clone_says_that_history_is_incomplete(repository, tmp_path, capsys):
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", str(clone))
    studies = clone / "experiments" / "studies"
    edit(studies / "question" / "runs.jsonl", "c0ffee", "decade")  # no history to compare with
    assert report.check_documents(clone, fix=False) == 3
    assert capsys.readouterr().out.splitlines()[-1] == "history incomplete: declarations not checked"
    (clone / "page.md").write_text("<!-- report: wrong -->\n| a |\n|---|\n| 1 |\n")
    assert report.check_documents(clone, fix=False) == 1, "a wrong figure is still a problem"
    for name in ("question", "earlier"):
        with pytest.raises(ValueError, match="shallow clone; `git fetch --unshallow`"):
            records.get(name, studies, tmp_path / "out")
    git(clone, "fetch", "-q", "--unshallow")
    (clone / "page.md").unlink()
    assert report.check_documents(clone, fix=False) == 1, "now the forged record is found"


@pytest.mark.parametrize(("code", "history", "passes"), [
    (0, "", True), (3, "", True), (1, "", False), (2, "", False),
    (0, "complete", True), (3, "complete", False),
])  # fmt: skip
def test_make_figures_accepts_an_incomplete_history_unless_told_otherwise(code, history, passes, tmp_path):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\nexit {code}\n")
    python.chmod(0o755)
    (tmp_path / "requirements-no-deps.txt").touch()
    os.utime(tmp_path / "requirements-no-deps.txt", (0, 0))  # nothing to install
    make = ["make", "-s", "STACK=cpu", f"HISTORY={history}", "STAMP=Makefile", "REQUIREMENTS=", "figures"]
    assert (subprocess.run(make, cwd=tmp_path, capture_output=True).returncode == 0) == passes


# ---- starts ------------------------------------------------------------------------------------------------


@pytest.fixture
def start(repository, tmp_path, monkeypatch) -> Path:
    """Add a start, commit it, and let its files leave the tree; return its folder."""
    monkeypatch.setattr(starts, "ROOT", repository)
    monkeypatch.setattr(starts, "STARTS", repository / "experiments" / "starts")
    monkeypatch.setattr("runtime.checkpoint.digest_of_weights", lambda folder: "5eed")
    folder = starts.add("mine", tmp_path / "built")
    first = commit_all(repository)
    record = {"commit": first} | json.loads((folder / starts.RECORD).read_text())
    git(repository, "rm", "-qr", "--cached", "experiments/starts/mine/model")
    (folder / starts.RECORD).write_text(json.dumps(record))
    shutil.rmtree(folder / "model")
    (repository / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    commit_all(repository)
    return folder


def test_a_start_comes_back_from_its_commit_and_git_ignores_it(start, repository, capsys):
    assert starts.is_left(start) and starts.main(["check"]) == 0
    path = "experiments/starts/mine/model"
    assert starts.is_held(path) and starts.is_held(f"{path}/model.safetensors")
    assert not starts.is_held("experiments/starts/mine/test.jsonl") and not starts.is_held("data/built/a")
    assert starts.main(["get", "mine"]) == 0
    assert (start / "model" / "model.safetensors").read_bytes() == b"weights"
    assert git(repository, "status", "--porcelain") == "" and not starts.is_held(path)
    (start / "model" / "model.safetensors").write_bytes(b"changed")
    assert starts.main(["check"]) == 1 and "experiments.starts get mine" in capsys.readouterr().err
    assert starts.main(["get", "mine"]) == 0 and starts.main(["check"]) == 0
    assert starts.main(["get", "other"]) == 1
    assert "other: no such start; choose among mine" in capsys.readouterr().err


def test_a_start_with_another_digest_is_refused(start, capsys):
    edit(start / starts.RECORD, '"model/model.safetensors": "', '"model/model.safetensors": "0')
    assert starts.main(["get", "mine"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "model/model.safetensors" in line and "SHA-256" in line
    assert not (start / "model" / "model.safetensors").exists()


def test_the_record_of_a_start_that_left_is_as_at_its_commit(start, repository, tmp_path):
    edit(start / starts.RECORD, "5eed", "f00d")
    edit(start / starts.RECORD, '"model/model.safetensors": "', '"model/model.safetensors": "0')
    (problem,) = starts.all_problems(starts.STARTS)
    assert "mine: files, weights of start.json: not as committed" in problem
    commit_all(repository)
    assert starts.all_problems(starts.STARTS) == [problem]
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", str(tmp_path / "clone"))
    assert starts.all_problems(tmp_path / "clone" / "experiments" / "starts") == []


def test_a_start_is_absent_until_all_files_are_here(start, monkeypatch):
    write = Path.write_bytes

    def interrupted(file: Path, content: bytes) -> None:
        write(file, content[:1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_bytes", interrupted)
        starts.get("mine")
    assert starts.is_left(start) and starts.all_problems(starts.STARTS) == []
    assert list(starts.STARTS.iterdir()) == [start]
    starts.get("mine")
    (start / "model" / "config.json").unlink()  # as between two files of a get
    assert starts.is_left(start) and starts.all_problems(starts.STARTS) == []
    arguments = ("model.path=experiments/starts/mine/model", "data.train=[{path: a.jsonl}]")
    run.check_starts([SimpleNamespace(script=ROOT / "train_rl.py", arguments=arguments)])
    assert (start / "model" / "config.json").read_text() == "{}"


def test_a_missing_start_in_a_shallow_clone_names_the_command(
    start, repository, tmp_path, monkeypatch, capsys
):
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", str(tmp_path / "clone"))
    monkeypatch.setattr(starts, "ROOT", tmp_path / "clone")
    monkeypatch.setattr(starts, "STARTS", tmp_path / "clone" / "experiments" / "starts")
    assert starts.main(["get", "mine"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "shallow clone" in line and "git fetch --unshallow" in line
    row = tmp_path / "row.yaml"
    row.write_text("model: {path: experiments/starts/mine/model}\ndata: {train: [{path: a.jsonl}]}\n")
    assert run.main(["--rows", str(row), "--seeds", "0", "--out", str(tmp_path / "out")]) == 2
    assert "git fetch --unshallow" in capsys.readouterr().err


def test_a_kept_start_is_not_trained_anew(tmp_path):
    """data.tiny and prepare.sh in a checkout made of links, whose starts are those of the repository."""
    for path in ROOT.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "data").unlink()
    (tmp_path / "data").mkdir()
    for path in (ROOT / "data").iterdir():
        if path.name != "built":
            (tmp_path / "data" / path.name).symlink_to(path)
    tiny = [sys.executable, "-m", "data.tiny", "--recipe", "chains_3"]
    done = subprocess.run(tiny, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "python -m experiments.starts get chains_3" in done.stderr
    assert not (tmp_path / "data" / "built").exists()
