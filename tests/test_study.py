"""The declared studies: rows, commands, task instances and prompts."""

import re
import shlex
from dataclasses import replace

import pytest
from conftest import ROOT

from data.tiny import RECIPES, pair_habits, recipe_of
from experiments import report, run
from experiments.declaration import read_declaration
from train_rl import load_config

DECLARED = sorted(file.parent for file in run.STUDIES.glob("*/declared.json"))

each_declared_study = pytest.mark.parametrize("folder", DECLARED, ids=lambda folder: folder.name)


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@each_declared_study
def test_every_declared_row_is_a_yaml_that_loads(folder):
    for row in read_declaration(folder / "declared.json")["rows"]:
        assert load_config(["--config", str(folder / f"{row}.yaml")]).data.train


PAGES = sorted([*run.STUDIES.glob("*/README.md"), *run.STUDIES.glob("*/run.sh")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_a_command_for_a_table_has_its_runs_and_its_parent(page):
    """A pipeline of hours must not end at its last line, for example at an export without --parent."""
    parser = report.Parser()
    report.add_table_options(parser)
    report.add_output_options(parser)
    text = page.read_text().replace("\\\n", " ")
    for command in re.findall(r"^ *python experiments/report\.py (.*)$", text, re.M):
        args = parser.parse_args(shlex.split(command, comments=True))
        assert args.check or (args.runs and args.parent is not None), command


# ---- task instances ----------------------------------------------------------------------------------------


def test_a_recipe_with_a_seed_is_another_task_instance():
    assert recipe_of("habits") == RECIPES["habits"] and recipe_of("chains_gpu") == RECIPES["chains_gpu"]
    other = recipe_of("habits_3")
    assert other == replace(RECIPES["habits"], seed=3)
    assert (pair_habits(other)[0] != pair_habits(RECIPES["habits"])[0]).any()
    for name in ("habit", "habits_", "habits_x", "nothing_3"):
        with pytest.raises(ValueError, match=name):
            recipe_of(name)
