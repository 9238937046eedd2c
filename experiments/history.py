"""Read commits of this repository: files that have left the tree, and the ancestors of a commit."""

import subprocess
from pathlib import Path


def git(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Run git in a folder."""
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)


def is_known(commit: str, folder: Path) -> bool:
    """Tell whether the repository of a folder has a commit."""
    return git(folder, "cat-file", "-e", f"{commit}^{{commit}}").returncode == 0


def is_complete(folder: Path) -> bool:
    """Tell whether the repository has all ancestors of its commits; a shallow clone has not."""
    return git(folder, "rev-parse", "--is-shallow-repository").stdout.strip() == "false"


def descends(commit: str, ancestor: str, folder: Path) -> bool:
    """Tell whether a commit is another one or descends from it."""
    return git(folder, "merge-base", "--is-ancestor", ancestor, commit).returncode == 0


def check_commit(commit: str, folder: Path) -> None:
    """Raise ValueError unless HEAD descends from a commit; name the command that deepens a shallow clone."""
    is_shallow = not is_complete(folder)
    if descends("HEAD", commit, folder) or (is_shallow and is_known(commit, folder)):
        return
    if not is_shallow:
        raise ValueError(f"commit {commit[:8]} is no ancestor of HEAD")
    raise ValueError(f"commit {commit[:8]} is not in this shallow clone; `git fetch --unshallow` brings it")


def files_at(commit: str, folder: Path) -> list[str]:
    """List the files below a folder, which need not exist any more, at a commit; paths from the folder."""
    check_commit(commit, folder.parent)
    listed = git(folder.parent, "ls-tree", "-r", "--name-only", "-z", commit, "--", f"{folder.name}/").stdout
    return [name.removeprefix(f"{folder.name}/") for name in listed.split("\0") if name]


def content_at(commit: str, folder: Path, name: str) -> bytes:
    """Return the content of a file below a folder at a commit; ValueError if there is none."""
    check_commit(commit, folder.parent)
    path = f"{commit}:./{folder.name}/{name}"
    shown = subprocess.run(["git", "-C", str(folder.parent), "show", path], capture_output=True)
    if shown.returncode:
        raise ValueError(f"commit {commit[:8]} has no {folder.name}/{name}")
    return shown.stdout
