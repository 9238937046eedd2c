"""Bad teachers, judges and numbers of log-probabilities end a run before vLLM starts (without_engine.py)."""

import json
import shutil

import pytest
from conftest import ROOT

from data.tiny import build_tokenizer
from tests import preloaded

START = ROOT / "experiments" / "starts" / "tiny"
JUDGE = ["reward.judge=generative", "reward.judge_mode=round_robin"]
CENTERING = ["--config", "experiments/methods/score_centering.yaml"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Copies of the policy: with one more token, without a tokenizer; and scores by another teacher."""
    root = tmp_path_factory.mktemp("models")
    shutil.copytree(START / "model", root / "other_tokens")
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(root / "other_tokens")
    shutil.copytree(START / "model", root / "no_tokenizer", ignore=shutil.ignore_patterns("tokenizer*"))
    (root / "scores.jsonl").write_text(json.dumps({"model": "other 0123", "samples": 1}) + "\n")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("settings, words", [
    ([], ["vLLM would start now"]),
    ([*CENTERING, "rollout.topk_logprobs=99"], ["rollout.topk_logprobs 99", "98"]),
    (["zero_variance.teacher={}/other_tokens"], ["zero_variance.teacher", "'new'"]),
    (["zero_variance.teacher={}/no_tokenizer"], ["zero_variance.teacher", "tokenizer"]),
    ([f"zero_variance.teacher={START}/model", "zero_variance.teacher_scores={}/scores.jsonl"],
     ["zero_variance.teacher_scores", "other"]),
    ([*JUDGE, f"reward.judge_path={START}/model"], ["reward.judge_path", "Better"]),
    ([*JUDGE, "reward.judge_path={}/no_tokenizer"], ["reward.judge_path", "tokenizer"]),
])  # fmt: skip
def test_a_bad_model_is_named_before_the_engine_starts(settings, words, folders, tmp_path):
    done = preloaded.run(
        1, "tests/without_engine.py", "--config", "experiments/environments/tiny.yaml",
        "--config", "experiments/starts/tiny.yaml", "model.ep_size=1", f"run.dir={tmp_path}/run",
        *(setting.format(folders) for setting in settings),
    )  # fmt: skip
    assert done.returncode != 0
    message = done.stderr.strip().splitlines()[-1]
    assert all(word in done.stderr for word in words), done.stderr[-2000:]
    assert words[0] in message or not settings
