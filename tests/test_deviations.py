"""experiments/declaration.py: settings and files of runs against the declared rows, in a small repository."""

import json
from pathlib import Path

import pytest
from conftest import commit_all, git

from experiments import declaration

DECLARED = {
    "question": "?", "rows": ["off", "on"], "seeds": [0, 1, 2], "endpoint": "accuracy",
    "contrasts": [{"row": "on", "parent": "off"}], "test": "paired t-test", "correction": "none",
    "stop": "100 steps",
    "prediction": "+0.02", "instances": {"recipe": "chains", "seeds_each": 1},
}  # fmt: skip
BASE = 'data: {train: [{path: data/built/chains/train.jsonl, kind: "data.rewards:score"}]}\n'
CODE = '''"""Score."""
COST = 0.1


def score(completion, answer):
    """Return 1 - COST."""
    return 1 - COST
'''


@pytest.fixture
def study(tmp_path, monkeypatch) -> Path:
    """Write a declared study of two rows, whose reward is a function of data/rewards.py, and commit it."""
    monkeypatch.setattr(declaration, "ROOT", tmp_path)
    folder = tmp_path / "studies" / "question"
    folder.mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rewards.py").write_text(CODE)
    (folder.parent / "base.yaml").write_text(BASE)
    (folder / "off.yaml").write_text("# Plain.\nbase: ../base.yaml\n")
    (folder / "on.yaml").write_text("base: off.yaml\ntrain: {num_steps: 3}\n")
    (folder / "declared.json").write_text(json.dumps(DECLARED))
    git(tmp_path, "init", "-q")
    commit_all(tmp_path)
    return folder


def problems(study: Path, **changes) -> list[str]:
    """Check a run of row `on`, seed 1, at the present commit, with changes of the row's settings."""
    source = {"path": "data/built/chains_1/train.jsonl", "kind": "data.rewards:score"}
    settings = {"data.train": [source], "train.num_steps": 3} | changes
    settings = {name: value for name, value in settings.items() if value is not None}
    head = git(study, "rev-parse", "HEAD")
    record = {"row": "on", "seed": 1, "commit": head, "settings": settings}
    record["versions"] = {"dirty": False, "rollout_dtype": "bfloat16"}
    (study / "runs.jsonl").write_text(json.dumps(record) + "\n")
    return declaration.check_study(study)


def admit(study: Path, *names: str, reason: str = "the pool is small") -> None:
    (study / "deviations.json").write_text(json.dumps([{"names": names, "reason": reason}]))


# ---- settings ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({}, False),
        ({"checkpoint.every": 0}, False),
        ({"train.num_steps": 4}, True),
        ({"train.num_steps": None}, True),
        ({"eval.every": 5}, True),
        ({"data.train": [{"path": "data/built/chains_1/other.jsonl", "kind": "data.rewards:score"}]}, True),
    ],
)
def test_a_run_has_the_settings_of_its_row(changes, is_refused, study):
    """The task instance is that of the seed, and checkpoints may differ."""
    texts = problems(study, **changes)
    assert len(texts) == is_refused
    for text in texts:
        assert "row on" in text and text.endswith("seeds 1") and next(iter(changes)) in text
    admit(study, *changes)
    assert problems(study, **changes) == []


def test_a_run_has_the_chosen_settings_beside_those_of_its_row(study):
    (study / "tuning.json").write_text(json.dumps([{"row": "on", "settings": "train.learning_rate=5e-05"}]))
    commit_all(study)
    assert problems(study, **{"train.learning_rate": 5e-05}) == []
    assert "train.learning_rate" in problems(study)[0]


def test_a_deviation_needs_a_reason(study):
    admit(study, "train.num_steps", reason="")
    assert "deviations.json" in problems(study)[0]


def test_a_launch_warns_of_settings_that_the_rows_lack(study):
    settings = ["train.num_steps=4", "checkpoint.every=0"]
    (warning,) = declaration.warnings_of_launch([study / "on.yaml"], [0], True, settings)
    assert "train.num_steps" in warning and "checkpoint" not in warning
    admit(study, "train.num_steps")
    assert declaration.warnings_of_launch([study / "on.yaml"], [0], True, settings) == []


# ---- files -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "text", "is_refused"),
    [
        ("studies/question/off.yaml", "# GRPO.\nbase: [../base.yaml]\ntrain: {seed: 0}\n", True),
        ("studies/question/off.yaml", "# GRPO.\nbase: ../base.yaml\n", False),
        ("studies/base.yaml", BASE + "train: {seed: 0}\n", True),
        ("data/rewards.py", CODE.replace("0.1", "0.3"), True),
        ("data/rewards.py", CODE.replace("Return 1 - COST.", "Return the reward.") + "# the end\n", False),
        ("data/other.py", "COST = 0.3\n", False),
    ],
)
def test_the_files_of_the_rows_are_those_of_the_declaration(name, text, is_refused, study, tmp_path):
    """A comment or a docstring may change after the declaration; all these changes keep the settings."""
    (tmp_path / name).write_text(text)
    commit_all(tmp_path)
    texts = problems(study)
    assert len(texts) == is_refused
    assert all(name in problem and "after the declaration" in problem for problem in texts)
    admit(study, name.removeprefix("studies/question/"))
    assert problems(study) == []


def test_the_yaml_of_a_row_exists_at_the_commit_of_the_run(study, tmp_path):
    """The declaration was committed without the base of its rows, which appeared before the check."""
    git(tmp_path, "rm", "-q", "--cached", "studies/base.yaml")
    git(tmp_path, "commit", "-q", "-m", "forgotten")
    (problem,) = problems(study)
    assert "lacks studies/base.yaml" in problem
