"""Untrusted folders and texts, for example a downloaded model: their code does not run."""

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, save_small_moe
from helpers import FakeRanks, make_prompts
from tokenizers import AddedToken

import moe_model
from data.chat import load_tokenizer, read_messages
from data.formats import BadRow
from data.stream import refuse_unknown_tokens
from data.tiny import build_tokenizer
from reward import Verdict
from runtime.checks import check_verdicts


@pytest.fixture
def model(tmp_path) -> Path:
    """Save a small model with its tokenizer."""
    save_small_moe(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# ---- code in a model's folder ------------------------------------------------------------------------------
def test_every_call_that_could_run_code_of_a_folder_forbids_it():
    """A transformers class named Auto... reads the name of a class, and of its file, from the folder."""
    names = "data extras runtime experiments experiments/bench verifiers tests/campaign"
    folders = ["", *names.split()]
    calls = []
    for file in (file for name in folders for file in (ROOT / name).glob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and re.fullmatch(
                r"Auto.*\.from_pretrained", ast.unparse(node.func)
            ):
                calls.append((file, node, tree))
    assert len(calls) >= 6
    for file, node, tree in calls:
        code = ast.unparse(node)
        if "**local" in code:
            code += ast.unparse(tree)
        assert "trust_remote_code=False" in code or "'trust_remote_code': False" in code, (file, node.lineno)


@pytest.mark.parametrize("load", [moe_model.load_config, load_tokenizer])
def test_code_in_a_models_folder_does_not_run_even_if_the_user_says_yes(load, model, monkeypatch):
    trace = model / "trace"
    (model / "own.py").write_text(f"open({str(trace)!r}, 'w')")
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((model / name).read_text()) | {"model_type": "own", "tokenizer_class": "Own"}
        names = {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}
        (model / name).write_text(json.dumps(settings | {"auto_map": names}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="custom code"):
        load(model)
    assert not trace.exists()


# ---- incomplete folders ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "damage",
    [
        {"tokenizer.json": None},
        {"tokenizer.json": None, "tokenizer_config.json": None},
        {"tokenizer.json": 0.5},
        {"tokenizer_config.json": 0.5},
    ],
)
def test_a_folder_with_an_incomplete_tokenizer_is_named(damage, model):
    load_tokenizer(model)
    for name, fraction in damage.items():
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: int(len(content) * (fraction or 0))])
        if fraction is None:
            (model / name).unlink()
    with pytest.raises(ValueError, match=f"{model}.* tokenizer.*; .*tokenizer.json") as caught:
        load_tokenizer(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": 7}', '{"model_type": "nothing"}'])
def test_an_unusable_config_is_named(text, model):
    (model / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"{model}/config.json"):
        moe_model.load_config(model)


def test_a_vocabulary_smaller_than_the_tokenizer_is_named():
    prompts = make_prompts(2)
    loaded = SimpleNamespace(by_name=lambda: {"": (prompts, [[1, 2], [0, 7]])})
    refuse_unknown_tokens(loaded, 8, "folder")
    with pytest.raises(ValueError, match="folder.*token 7.*'prompt 1'"):
        refuse_unknown_tokens(loaded, 7, "folder")


# ---- texts -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("role", ["system", "user"])
def test_half_a_character_in_a_message_is_a_bad_row(role):
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert len(read_messages(messages, "x: row 3")) == 2
    messages[role == "user"]["content"] += "\ud800"
    with pytest.raises(BadRow, match=r"message [12].*'[ab].ud800'"):
        read_messages(messages, "x: row 3")


def test_the_text_of_a_reward_function_cannot_move_the_cursor(capsys, monkeypatch):
    FakeRanks(1).install(monkeypatch)
    verdicts = [Verdict(0.0, "error", "KeyError: '\x1b[2J\rall is well\n'"), Verdict(1.0, "ok")]
    check_verdicts(verdicts, 0.5, "step 1")
    printed = "".join(capsys.readouterr())
    assert r"KeyError: '\x1b[2J\rall is well '" in printed
    assert not {"\x1b", "\r"} & set(printed)


@pytest.mark.parametrize("tag", ["<think>", "</think>", "[THINK]", "</answer>"])
def test_a_tag_that_decoding_would_remove_is_refused(tag, tmp_path):
    """The same tag as an ordinary token is read, as in Qwen 3 and GLM."""
    for special in (False, True):
        tokenizer = build_tokenizer()
        tokenizer.add_tokens([AddedToken(tag, special=special)])
        tokenizer.save_pretrained(tmp_path / str(special))
    load_tokenizer(tmp_path / "False")
    with pytest.raises(ValueError, match=f"{re.escape(tag)} is a special token.*special.*false"):
        load_tokenizer(tmp_path / "True")
