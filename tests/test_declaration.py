"""experiments/declaration.py: runs against the declaration of their study, in a repository of its own."""

import json
import subprocess

import pytest

from experiments import declaration

DECLARED = {
    "question": "?", "rows": ["off", "on"], "seeds": [0, 1], "endpoint": "accuracy",
    "contrasts": [["on", "off"]], "test": "paired t-test", "correction": "none", "stop": "100 steps",
    "prediction": "+0.02",
}  # fmt: skip


@pytest.fixture
def study(tmp_path):
    """A study of two commits: without a declaration, and with one."""

    def git(*words: str) -> str:
        identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        return subprocess.run(
            ["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "before")
    before = git("rev-parse", "HEAD")
    (tmp_path / "declared.json").write_text(json.dumps(DECLARED))
    git("add", "declared.json")
    git("commit", "-q", "-m", "declared")
    return tmp_path, before, git("rev-parse", "HEAD")


def problems(folder, **changes) -> list[str]:
    record = {"row": "on", "seed": 1, "versions": {"dirty": False}} | changes
    (folder / "runs.jsonl").write_text(json.dumps(record) + "\n")
    return declaration.check_study(folder)


def test_runs_must_be_younger_than_the_declaration(study):
    folder, before, declared = study
    assert declaration.check_study(folder) == [], "no runs yet"
    assert problems(folder, commit=declared) == []
    assert problems(folder, commit="0" * 40) == [], "a commit that a shallow clone lacks"
    for changes, keyword in (
        ({"commit": before}, "has no declaration"),
        ({"commit": declared, "seed": 2}, "seed 2 is not declared"),
        ({"commit": declared, "versions": {"dirty": True}}, "uncommitted"),
        ({"commit": None}, "uncommitted"),
    ):
        (problem,) = problems(folder, **changes)
        assert keyword in problem


def test_a_declaration_that_was_changed_after_the_runs_is_refused(study):
    folder, _, declared = study
    (folder / "declared.json").write_text(json.dumps(DECLARED, indent=1))
    assert problems(folder, commit=declared) == [], "another layout only"
    (folder / "declared.json").write_text(json.dumps(DECLARED | {"prediction": "-0.02"}))
    assert "another declaration" in problems(folder, commit=declared)[0]
    (folder / "declared.json").write_text(json.dumps(DECLARED | {"contrasts": [["on", "of"]]}))
    assert "of, which is not among the rows" in problems(folder, commit=declared)[0]


def test_a_declaration_is_shown_with_its_digest():
    text = "\n".join(declaration.table_lines(DECLARED))
    assert "| contrasts | on - off |" in text and declaration.digest_of(DECLARED) in text
