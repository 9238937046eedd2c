"""Test what runtime/checkpoint.py keeps of the source of a run."""

import subprocess
import sys
from pathlib import Path

import pytest

from runtime import checkpoint


def git(repository: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(repository), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """Make a folder of a script and its modules, as if checkpoint.py stood in it and the script ran."""
    root = tmp_path / "repository"
    (root / "runtime").mkdir(parents=True)
    (root / "mine.py").write_text("print('mine')\n")
    (root / "model.py").write_text("SIZE = 1\n")
    monkeypatch.setattr(checkpoint, "__file__", str(root / "runtime" / "checkpoint.py"))
    monkeypatch.setattr(sys, "argv", [str(root / "mine.py"), "train.num_steps=1"])
    return root


def commit(repository: Path) -> str:
    git(repository, "init", "-q")
    (repository / ".gitignore").write_text("ignored.py\n")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "first")
    return git(repository, "rev-parse", "HEAD")


def test_a_clean_checkout_is_its_commit_and_the_script(repository, tmp_path):
    found, folder = commit(repository), tmp_path / "source"
    (repository / "ignored.py").write_text("x = 1\n")
    expected = {"commit": found, "dirty": False, "script": "mine.py"}
    assert checkpoint.save_source(folder) == expected
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"mine.py": "print('mine')\n"}


def test_changes_of_tracked_files_are_kept_as_a_diff_that_gives_them_back(repository, tmp_path):
    found, folder = commit(repository), tmp_path / "source"
    (repository / "model.py").write_text("SIZE = 2\n")
    (repository / "mine.py").write_text("print('staged')\n")
    git(repository, "add", "mine.py")
    assert checkpoint.save_source(folder) == {"commit": found, "dirty": True, "script": "mine.py"}
    assert (folder / "mine.py").read_text() == "print('staged')\n"
    git(repository, "reset", "-q", "--hard")
    git(repository, "apply", str(folder / "changes.diff"))
    assert (repository / "model.py").read_text() == "SIZE = 2\n"
    assert (repository / "mine.py").read_text() == "print('staged')\n"
    git(repository, "reset", "-q", "--hard")
    checkpoint.save_source(folder)
    assert [path.name for path in folder.iterdir()] == ["mine.py"], "of the latest start only"


def test_a_python_file_that_git_does_not_track_makes_a_checkout_dirty(repository, tmp_path):
    commit(repository)
    (repository / "notes.txt").write_text("not code\n")
    assert checkpoint.save_source(tmp_path / "source")["dirty"] is False
    (repository / "runtime" / "new.py").write_text("x = 1\n")
    assert checkpoint.save_source(tmp_path / "source")["dirty"] is True


def test_without_git_the_script_alone_is_kept(repository, tmp_path, monkeypatch):
    expected = {"commit": None, "dirty": None, "script": "mine.py"}
    assert checkpoint.save_source(tmp_path / "source") == expected, "no repository"
    commit(repository)
    monkeypatch.setattr(checkpoint.shutil, "which", lambda name: None)
    assert checkpoint.save_source(tmp_path / "source") == expected, "no git"
    assert [path.name for path in (tmp_path / "source").iterdir()] == ["mine.py"]
