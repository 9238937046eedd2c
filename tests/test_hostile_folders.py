"""Folders and texts that come from elsewhere: no code in them runs, nothing is written through them."""

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, save_small_moe
from helpers import FakeRanks, make_prompts

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
def test_every_load_by_a_class_that_could_run_a_folders_code_forbids_it():
    """A class named Auto... reads the name of the class, and of the file that has it, from the folder."""
    folders = ("", "data", "runtime", "experiments", "experiments/bench", "verifiers", "tests/campaign")
    files, calls = [file for name in folders for file in (ROOT / name).glob("*.py")], []
    for file in (file for file in files if ".from_pretrained(" in file.read_text()):
        for node in ast.walk(tree := ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("Auto"):
                if ast.unparse(node.func).endswith(".from_pretrained"):
                    calls.append((file, node, tree))
    assert len(calls) >= 6
    for file, node, tree in calls:
        said = ast.unparse(node)
        if "**local" in said:
            said += ast.unparse(tree)
        assert "trust_remote_code=False" in said or "'trust_remote_code': False" in said, (file, node.lineno)


@pytest.mark.parametrize("load", [moe_model.load_config, load_tokenizer])
def test_code_in_a_models_folder_does_not_run_even_if_somebody_would_say_yes(load, model, monkeypatch):
    trace = model / "trace"
    (model / "own.py").write_text(f"open({str(trace)!r}, 'w')")
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((model / name).read_text()) | {"model_type": "own", "tokenizer_class": "Own"}
        names = {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}
        (model / name).write_text(json.dumps(settings | {"auto_map": names}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="contains custom code"):
        load(model)
    assert not trace.exists()


# ---- what a folder lacks -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "damage",
    [
        {"tokenizer.json": None},
        {"tokenizer.json": None, "tokenizer_config.json": None},
        {"tokenizer.json": 0.5},
        {"tokenizer_config.json": 0.5},
    ],
)
def test_a_folder_without_a_whole_tokenizer_is_named(damage, model):
    load_tokenizer(model)
    for name, share in damage.items():
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: int(len(content) * (share or 0))])
        if share is None:
            (model / name).unlink()
    with pytest.raises(ValueError, match=f"{model}.* tokenizer.*; .*tokenizer.json") as caught:
        load_tokenizer(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": 7}', '{"model_type": "nothing"}'])
def test_a_config_that_is_none_is_named(text, model):
    (model / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"{model}/config.json cannot be read as that of a model: "):
        moe_model.load_config(model)


def test_a_vocabulary_below_the_tokenizers_is_named():
    prompts = make_prompts(2)
    loaded = SimpleNamespace(by_name=lambda: {"": (prompts, [[1, 2], [0, 7]])})
    refuse_unknown_tokens(loaded, 8, "folder")
    with pytest.raises(ValueError, match="tokenizer in folder gives token 7 in the prompt 'prompt 1'"):
        refuse_unknown_tokens(loaded, 7, "folder")


# ---- texts -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("role", ["system", "user"])
def test_half_a_character_in_a_message_is_a_bad_row(role):
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert len(read_messages(messages, "x: row 3")) == 2
    messages[role == "user"]["content"] += "\ud800"
    with pytest.raises(BadRow, match=r"message [12] holds half a character .a surrogate.: '[ab].ud800'"):
        read_messages(messages, "x: row 3")


def test_what_a_reward_function_says_cannot_move_the_cursor(capsys, monkeypatch):
    FakeRanks(1).install(monkeypatch)
    verdicts = [Verdict(0.0, "error", "KeyError: '\x1b[2J\rall is well\n'"), Verdict(1.0, "ok")]
    check_verdicts(verdicts, 0.5, "step 1")
    printed = "".join(capsys.readouterr())
    assert r"first: error: KeyError: '\x1b[2J\rall is well '" in printed
    assert not {"\x1b", "\r"} & set(printed)
