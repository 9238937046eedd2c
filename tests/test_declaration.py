"""experiments/declaration.py: runs against the declaration of their study, in a repository of its own."""

import json

import pytest
from conftest import commit_all, git

from experiments import declaration
from experiments.notes import Shown, notes_of, ranges

DECLARED = {
    "question": "?", "rows": ["off", "on"], "seeds": [0, 1], "endpoint": "accuracy",
    "contrasts": [{"row": "on", "parent": "off"}], "test": "paired t-test", "correction": "none",
    "stop": "100 steps",
    "prediction": "+0.02",
}  # fmt: skip


@pytest.fixture
def study(tmp_path):
    """A study of two commits: without a declaration, and with one."""
    git(tmp_path, "init", "-q")
    before = commit_all(tmp_path)
    (tmp_path / "declared.json").write_text(json.dumps(DECLARED))
    for row in DECLARED["rows"]:
        (tmp_path / f"{row}.yaml").touch()
    return tmp_path, before, commit_all(tmp_path)


def dangling(folder) -> str:
    """Make a commit of the present files without history, and return its digest."""
    return git(folder, "commit-tree", "-m", "side", "HEAD^{tree}")


def problems(folder, **changes) -> list[str]:
    record = {"row": "on", "seed": 1, "versions": {"dirty": False}} | changes
    (folder / "runs.jsonl").write_text(json.dumps(record) + "\n")
    return declaration.check_study(folder)


def test_runs_must_be_younger_than_the_declaration(study):
    folder, before, declared = study
    resumed = {"dirty": False, "earlier": [{"dirty": False, "commit": before}]}
    assert declaration.check_study(folder) == [], "no runs yet"
    assert problems(folder, commit=declared) == []
    for changes, keyword in (
        ({"commit": before}, "has no declaration"),
        ({"commit": declared, "seed": 2}, "seed 2 is not declared"),
        ({"commit": declared, "versions": {"dirty": True}}, "uncommitted"),
        ({"commit": declared, "versions": {}}, "uncommitted"),
        ({"commit": declared, "versions": {"dirty": False, "earlier": [{"dirty": True}]}}, "uncommitted"),
        ({"commit": None}, "uncommitted"),
        ({"commit": declared, "versions": resumed}, "has no declaration"),
        ({"commit": "0" * 40}, "unknown"),
        ({"commit": dangling(folder)}, "of another branch"),
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


def test_a_shallow_clone_checks_the_commits_that_it_has(study, tmp_path):
    folder, before, declared = study
    clone = tmp_path / "clone"
    git(folder, "clone", "-q", "--depth", "1", f"file://{folder}", clone)
    assert problems(clone, commit=before) == [], "cannot be checked"
    assert "not declared" in problems(clone, commit=declared, seed=2)[0]


def test_a_mistake_is_found_before_the_first_run(study):
    folder, _, _ = study
    file = folder / "declared.json"
    for changes, keyword in (
        ({"seeds": 5}, "seeds must be a list of whole numbers, not 5"),
        ({"seeds": ["0"]}, "seeds"),
        ({"rows": "on"}, "rows must be a list of names"),
        ({"contrasts": ["on - off"]}, "contrasts"),
        ({"contrasts": [["on"]]}, "contrasts"),
        ({"contrasts": {"row": "on", "parent": "off"}}, "contrasts"),
        ({"contrasts": [{"row": "on"}]}, "contrasts"),
        ({"contrasts": [{"row": "on", "parents": "off"}]}, "contrasts"),
        ({"contrasts": [{"row": "on", "parent": "of"}]}, "of, which is not among the rows"),
        ({"contrasts": [["on", "of"]]}, "of, which is not among the rows"),
        ({"rows": ["off", "on", "max"]}, "max has no max.yaml"),
    ):
        file.write_text(json.dumps(DECLARED | changes))
        (problem,) = declaration.check_study(folder)
        assert keyword in problem
    file.write_text(json.dumps(DECLARED))
    (folder / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert "train.jsonl, line 1: no record" in declaration.check_study(folder)[0]


def test_a_launch_warns_of_runs_that_no_table_would_take(study):
    folder, _, _ = study
    rows = [folder / "on.yaml", folder / "more.yaml"]
    assert declaration.warnings_of_launch(rows[:1], [0, 1], is_clean=True, settings=[]) == []
    (undeclared,) = declaration.warnings_of_launch(rows, [1, 2], is_clean=True, settings=[])
    assert "does not declare more, seed 2" in undeclared
    (unclean,) = declaration.warnings_of_launch(rows[:1], [1], is_clean=False, settings=[])
    assert "uncommitted" in unclean
    (folder / "declared.json").unlink()
    assert declaration.warnings_of_launch(rows, [2], is_clean=False, settings=[]) == []


@pytest.mark.parametrize("pairs", [[["off", "on"]], [["on", "off"], {"row": "on", "parent": "off"}]])
def test_contrasts_without_names_are_refused_before_the_first_run_and_valid_after_it(study, pairs):
    folder, _, commit = study
    (folder / "declared.json").write_text(json.dumps(DECLARED | {"contrasts": pairs}))
    with pytest.raises(ValueError, match=" - ".join(pairs[0])):
        declaration.warnings_of_launch([folder / "on.yaml"], [0], is_clean=True, settings=[])
    problems(folder, commit=commit)  # writes a record
    assert declaration.warnings_of_launch([folder / "on.yaml"], [0], is_clean=True, settings=[]) == []
    assert declaration.contrasts_of({"contrasts": pairs})[0] == tuple(pairs[0])


def test_a_test_run_has_the_instance_of_its_seed_and_the_tuned_settings(study):
    folder, _, _ = study
    declared = DECLARED | {"instances": {"recipe": "chains", "seeds_each": 1}, "tuning": {"rates": [1, 2]}}
    (folder / "declared.json").write_text(json.dumps(declared))
    (folder / "tuning.json").write_text("[]")
    commit = commit_all(folder)

    def found(seed: int, **settings) -> list[str]:
        settings = {"model.path": f"data/built/chains{f'_{seed}' if seed else ''}/model"} | settings
        return problems(folder, commit=commit, seed=seed, settings=settings)

    assert found(0) == found(1) == []
    for changes, keyword in (
        ({"model.path": "data/built/chains/model"}, "[0]"),
        ({"data.train": [{"path": "data/built/chains_2/train.jsonl"}]}, "[1, 2]"),
    ):
        (problem,) = found(1, **changes)
        assert "row on, seed 1" in problem and keyword in problem
    (folder / "tuning.json").write_text('[{"row": "on", "settings": ""}]')
    assert "another tuning.json" in found(0)[0]
    (folder / "tuning.json").unlink()
    assert found(0) == ["runs without tuning.json: commit the choice, then test"]


# ---- the note below a table --------------------------------------------------------------------------------
def records(row: str, seeds, commit: str = "", weights=None) -> list[dict]:
    weights = weights or {}
    return [
        {"row": row, "seed": seed, "commit": commit, "versions": {"weights": weights.get(seed, "aa")}}
        for seed in seeds
    ]


EMPTY = Shown()


def note(folder, shown=EMPTY, **rows: list[dict]) -> str:
    """Return the note of a table whose rows have the parent off."""
    studies = {row: {folder} if folder else set() for row in rows}
    return notes_of(rows, dict.fromkeys(rows, "off"), studies, shown)


def test_the_note_names_the_declaration_and_the_missing_seeds(study):
    folder, _, declared = study
    digest = declaration.digest_of(DECLARED)
    rows = {"off": records("off", [0, 1], declared), "on": records("on", [0], declared)}
    assert note(folder, **rows) == f"Declared: `{digest}`. Seeds without a run: 1 of on."
    pair = {("on", "off")}
    complete = rows | {"on": records("on", [0, 1], declared)}
    assert note(folder, Shown("accuracy", pair, pair), **complete) == f"Declared: `{digest}`."


@pytest.mark.parametrize(
    ("metric", "kind"),
    [
        ("sums/avg_at_8", ""), ("avg_at_8", ""), ("train/score", ""), ("sums/avg_at_80", "Exploratory"),
        ("score", "Secondary"), ("sums/accuracy", "Secondary"), ("train/entropy", "Secondary"),
        ("train/clipped", "Secondary"), ("train/entropy/entropy_group_0", "Exploratory"),
        ("chains/avg_at_8", "Exploratory"), ("", ""),
    ],
)  # fmt: skip
def test_the_note_names_a_metric_that_is_not_the_endpoint(metric, kind, study):
    folder, _, declared = study
    secondary = ["score", "sums/accuracy (greedy)", "mean entropy", "train/clipped"]
    changes = {"endpoint": "sums/avg_at_8 of the last evaluation, and train/score", "secondary": secondary}
    (folder / "declared.json").write_text(json.dumps(DECLARED | changes))
    rows = records("off", [0, 1], declared)
    text = note(folder, Shown(metric), off=rows)
    assert (f"{kind} metric: `{metric}`." in text) if kind else ("metric" not in text)
    two_sets = [row | {"evaluations": {"eval/sums/avg_at_8": [], "eval/b/avg_at_8": []}} for row in rows]
    assert (metric == "avg_at_8") == (note(folder, Shown(metric), off=two_sets) != text)


def test_seeds_of_one_task_instance_are_no_pairs(study):
    folder, _, declared = study
    instances = {"instances": {"recipe": "chains", "seeds_each": 2}}
    (folder / "declared.json").write_text(json.dumps(DECLARED | instances))
    rows = records("off", [0, 1], declared)
    assert "Declared" in note(folder, Shown(block=2), off=rows)
    with pytest.raises(ValueError, match="set --block 2"):
        note(folder, off=rows)


def test_a_table_of_new_undeclared_runs_is_refused(study, monkeypatch):
    """v0.1 is the commit before the declaration: its runs are marked, later runs are refused."""
    folder, before, declared = study
    monkeypatch.setattr(declaration, "BEFORE", before)
    old = {"off": records("off", [0], before), "other": records("other", [0], before)}
    (folder / "elsewhere").mkdir()
    assert note(folder / "elsewhere", **old) == "Undeclared."
    assert "Undeclared: other." in note(folder, **old)
    for commit in (declared, "0" * 40, None):
        with pytest.raises(ValueError, match="declared.json"):
            note(folder, **old | {"other": records("other", [0], commit)})
    assert note(None, **old) == "", "run folders say nothing"


def test_the_note_names_seeds_and_starts_that_differ():
    off = records("off", range(4))
    assert note(None, off=off, on=records("on", range(4))) == ""
    apart = note(None, off=off, on=records("on", [5, 6, 8]))
    assert "5, 6, 8 of off; 0 to 3 of on." in apart and "common with the parent: on." in apart
    moved = note(None, off=off, on=records("on", range(4), weights={2: "bb"}))
    assert "than the parent's: on; their" in moved
    unknown = note(None, off=off, on=records("on", range(4), weights={2: None, 3: None}))
    assert "than the parent's: on, and some records" in unknown
    by_seed = {0: "aa", 1: "aa", 2: "bb", 3: "bb"}
    pairs = note(
        None, off=records("off", range(4), weights=by_seed), on=records("on", range(4), weights=by_seed)
    )
    assert pairs == "2 start weights, one for all runs of a seed."


def test_consecutive_seeds_are_joined():
    assert [ranges(seeds) for seeds in ([], [3], {2, 1, 0, 7, 9, 8, 5})] == ["", "3", "0 to 2, 5, 7 to 9"]
