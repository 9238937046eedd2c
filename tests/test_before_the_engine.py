"""Bad teachers, judges and numbers of log-probabilities end a run before vLLM starts (without_engine.py)."""

import json
import shutil

import pytest
from conftest import ROOT

from data.tiny import build_tokenizer
from tests import preloaded

START = ROOT / "experiments" / "starts" / "tiny"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Copies of the policy: with one more token, and with a vocabulary that cannot write Better."""
    root = tmp_path_factory.mktemp("models")
    for name in ("more", "mute"):
        shutil.copytree(START / "model", root / name)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(root / "more")
    file = root / "mute" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["\u00df"] = vocabulary.pop("B")
    file.write_text(json.dumps(content))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("settings, words", [
    (["centering.enabled=true", "algorithm.clip_mode=none", "centering.topk=99"],
     ["centering.topk 99", "98"]),
    (["teacher.path={}/more"], ["teacher.path", "'new'"]),
    (["reward.judge=generative", "reward.judge_mode=round_robin", "reward.judge_path={}/mute"],
     ["reward.judge_path", "Better"]),
])  # fmt: skip
def test_a_bad_model_is_named_before_the_engine_starts(settings, words, folders, tmp_path):
    """A run that passes the checks ends with `vLLM would start now`."""
    done = preloaded.run(
        1, "tests/without_engine.py", "--config", "experiments/environments/tiny.yaml",
        "--config", "experiments/starts/tiny.yaml", "model.ep_size=1", f"run.dir={tmp_path}/run",
        *(setting.format(folders) for setting in settings),
    )  # fmt: skip
    assert done.returncode != 0
    message = done.stderr.strip().splitlines()[-1]
    assert all(word in message for word in words), done.stderr[-2000:]
