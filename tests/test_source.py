"""The copy of the source that a run saves (runtime/checkpoint.py: save_source)."""

import sys
from pathlib import Path

import pytest
from conftest import commit_all, git

from runtime import checkpoint, provenance


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """Make a folder with a script and a module, as if the folder were the checkout and the script ran."""
    root = tmp_path / "repository"
    (root / "runtime").mkdir(parents=True)
    (root / "mine.py").write_text("print('mine')\n")
    (root / "model.py").write_text("SIZE = 1\n")
    monkeypatch.setattr(provenance, "ROOT", root)
    monkeypatch.setattr(sys, "argv", [str(root / "mine.py"), "train.num_steps=1"])
    return root


def commit(repository: Path) -> str:
    git(repository, "init", "-q")
    (repository / ".gitignore").write_text("ignored.py\n")
    return commit_all(repository)


def test_of_a_clean_checkout_the_commit_and_the_script_are_saved(repository, tmp_path):
    first = commit(repository)
    folder = tmp_path / "source"
    (repository / "ignored.py").write_text("x = 1\n")
    assert checkpoint.save_source(folder) == {"commit": first, "dirty": False, "script": "mine.py"}
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"mine.py": "print('mine')\n"}


def test_changes_of_tracked_files_are_saved_as_a_diff_that_restores_them(repository, tmp_path):
    first = commit(repository)
    folder = tmp_path / "source"
    (repository / "model.py").write_text("SIZE = 2\n")
    (repository / "mine.py").write_text("print('staged')\n")
    git(repository, "add", "mine.py")
    assert checkpoint.save_source(folder) == {"commit": first, "dirty": True, "script": "mine.py"}
    assert (folder / "mine.py").read_text() == "print('staged')\n"
    git(repository, "reset", "-q", "--hard")
    git(repository, "apply", str(folder / "changes.diff"))
    assert (repository / "model.py").read_text() == "SIZE = 2\n"
    assert (repository / "mine.py").read_text() == "print('staged')\n"
    git(repository, "reset", "-q", "--hard")
    checkpoint.save_source(folder)
    assert [path.name for path in folder.iterdir()] == ["mine.py"], "files of the latest start only"


@pytest.mark.parametrize("name", ["runtime/new.py", "more.yaml"])
def test_untracked_code_or_settings_make_a_checkout_dirty(name, repository, tmp_path):
    commit(repository)
    (repository / "notes.txt").write_text("not code\n")
    assert checkpoint.save_source(tmp_path / "source")["dirty"] is False
    (repository / name).write_text("")
    assert checkpoint.save_source(tmp_path / "source")["dirty"] is True


def test_without_git_only_the_script_is_saved(repository, tmp_path, monkeypatch):
    expected = {"commit": None, "dirty": None, "script": "mine.py"}
    assert checkpoint.save_source(tmp_path / "source") == expected, "no repository"
    commit(repository)
    monkeypatch.setattr(checkpoint.shutil, "which", lambda name: None)
    assert checkpoint.save_source(tmp_path / "source") == expected, "no git"
    assert [path.name for path in (tmp_path / "source").iterdir()] == ["mine.py"]
