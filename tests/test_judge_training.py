"""Judges that train_rl.py trains: verdicts, and the folder of such a judge."""

import json

import pytest
from helpers import make_config

import lifecycle
from judges import has_places, refuse_mute_judge
from reward import verify
from settings import RewardSettings

QUESTION = "{prompt}|{first}|{second}|"


# ---- the verifier of verdicts ------------------------------------------------------------------------------
@pytest.mark.parametrize("completion, label, reward, status", [
    ("046;1;0;Better", "Better", 1.0, "ok"),
    ("046;1;0;Better", "Worse", 0.0, "wrong"),
    ("Better. No, a carry is missing: Worse", "Worse", 1.0, "ok"),
    ("046;1;0;", "Tie", 0.0, "no_answer"),
    ("Better|Tie|Worse", "Worse", 0.0, "no_answer"),
    ("Tie", "better", 0.0, "error"),
])  # fmt: skip
def test_the_reward_of_a_judge_says_whether_its_last_verdict_is_the_label(completion, label, reward, status):
    verdict = verify("verdict", completion, label)
    assert (verdict.reward, verdict.status) == (reward, status)


def test_a_question_has_three_places():
    assert has_places(QUESTION) and has_places("{{}} {prompt}{first}{second}")
    for template in ("{prompt}", "{prompt}{first}{second}{answer}", "{prompt}{first}{second}{", "{}{}{}"):
        assert not has_places(template)


def test_a_generative_judge_asks_the_question_of_the_settings():
    settings = RewardSettings(
        judge="generative", judge_path="tests.helpers:make_prompts", judge_template=QUESTION
    )
    config = make_config().model_copy(update={"reward": settings})
    assert lifecycle.load_judge(config).template == QUESTION


# ---- judges that cannot write a verdict --------------------------------------------------------------------
def test_a_judge_that_cannot_write_a_verdict_is_refused_before_an_engine_starts(tmp_path):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = {token: number for number, token in enumerate(["<unk>", "<eos>", *"0123456789Tie"])}
    backend = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")
    tokenizer.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"vocab_size": len(tokenizer)}))
    with pytest.raises(ValueError, match="Better, Worse"):
        refuse_mute_judge("generative", str(tmp_path))
    refuse_mute_judge("scalar", str(tmp_path))  # a scalar judge writes nothing
    refuse_mute_judge("generative", "module:function")
    tokenizer.add_tokens(["Better", "Tie", "Worse"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Better, Tie, Worse"):
        refuse_mute_judge("generative", str(tmp_path))  # the model has no row for the new tokens
    config.write_text(json.dumps({"vocab_size": len(tokenizer)}))
    refuse_mute_judge("generative", str(tmp_path))
    tokenizer.chat_template = "{% if thinks %}1{% endif %}"
    tokenizer.save_pretrained(tmp_path)
    refuse_mute_judge("generative", str(tmp_path), {"thinks": False})
    with pytest.raises(ValueError, match=r"reward.judge_chat_template_args.think is not read"):
        refuse_mute_judge("generative", str(tmp_path), {"think": False})
