"""Settings of earlier versions: refused with their successor, read in checkpoints and records."""

import re

import pytest
from conftest import ROOT

from runtime import old_settings
from runtime.config import complete, differences, setting_fields
from runtime.old_settings import OLD_VALUES, REMOVED, RENAMED, present_settings, with_present_names
from train_rl import Config, load_config

SETTINGS = setting_fields(Config)
OLD = [*RENAMED, *REMOVED, *((name, value) for name, values in OLD_VALUES.items() for value in values)]


@pytest.fixture
def renamed(monkeypatch):
    """Pretend that train.seed was called train.random_seed, and that train.luck had the default 7."""
    monkeypatch.setattr(old_settings, "RENAMED", {"train.random_seed": "train.seed"})
    monkeypatch.setattr(old_settings, "REMOVED", {"train.luck": (7, "gone: no run was lucky")})


def test_the_table_has_old_names_and_leads_to_present_ones():
    assert not {*RENAMED, *REMOVED} & set(SETTINGS)
    assert {*RENAMED.values(), *OLD_VALUES} <= set(SETTINGS)


@pytest.mark.parametrize("old", OLD, ids=str)
def test_an_old_setting_is_refused_with_its_successor(old):
    name, value = old if isinstance(old, tuple) else (old, "1")
    for setting in (f"{name}={value}", f"stages=[{{name: a, {name.replace('.', ': {')}: {value}}}}}]"):
        with pytest.raises(ValueError) as caught:
            load_config(["data.train=a.jsonl", setting])
        successor = old_settings.successor_of(name, value)
        assert f"{name}" in str(caught.value) and successor in str(caught.value)
    assert successor.startswith("gone: ") or re.split("=| ", successor)[0] in SETTINGS
    for file, function in re.findall(r"([\w/]+\.py):(\w+)", successor):
        assert f"\ndef {function}(" in (ROOT / file).read_text()


def test_a_checkpoint_of_an_earlier_version_has_the_same_settings(renamed):
    config = load_config(["data.train=a.jsonl", "train.seed=3"])
    present = config.model_dump(mode="json")
    old = config.model_dump(mode="json")
    old["train"] |= {"random_seed": old["train"].pop("seed"), "luck": 7}
    assert differences(complete(Config, present_settings(old)), present) == []
    old["train"]["luck"] = 8
    assert differences(complete(Config, present_settings(old)), present) == ["train.luck 8 -> None"]


def test_stages_of_an_earlier_version_have_present_names(renamed):
    stages = [{"name": "a", "until": {"steps": 1}, "train": {"random_seed": 1}}, {"name": "b"}]
    expected = [{"name": "a", "until": {"steps": 1}, "train": {"seed": 1}}, {"name": "b"}]
    assert present_settings({"stages": stages}) == {"stages": expected}


def test_a_record_of_an_earlier_version_has_present_names(renamed):
    record = {"train.random_seed": 1, "stages[1].train.random_seed": 2, "stages[1].train.luck": 7}
    assert with_present_names(record) == {"train.seed": 1, "stages[1].train.seed": 2}
    assert with_present_names({"train.luck": 8, "run.dir": "x"}) == {"train.luck": 8, "run.dir": "x"}
