"""The task "sums with a tool": its chat template against episodes.py, its prompts, its score."""

import json
import re
from types import SimpleNamespace

import pytest
from helpers import make_config

from data import random_model, sums_with_tool
from data.chat import load_tokenizer
from data.prompts import load_prompts
from episodes import Call, calls_of, extension_of


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Make the task for a tiny random model with the special tokens of SmolLM2."""
    folder = tmp_path_factory.mktemp("task")
    (folder / "text.txt").write_text(sums_with_tool.TEMPLATE + "What is 518 + 267? 785 0123456789 \n")
    small = "--hidden 64 --layers 1 --experts 2 --expert-width 32 --vocab 400".split()
    random_model.main(["--output", str(folder / "model"), "--text", str(folder / "text.txt"), *small])
    sums_with_tool.main(["--model", str(folder / "model"), "--output", str(folder)])
    return SimpleNamespace(folder=folder, tokenizer=load_tokenizer(folder / "tools"))


def load(task, name: str) -> list:
    """Load a set of the task as a run does."""
    options = {"tokenizer": task.tokenizer, "chat": "always", "kind": "data.sums_with_tool:score"}
    return load_prompts(task.folder / f"{name}.jsonl", tools=["data.sums_with_tool:add"], **options)


def test_the_example_in_a_prompt_is_rendered_like_an_episode(task):
    """The example is text of the row; an episode renders the same call and result by the template."""
    prompts = load(task, "test")
    stop_ids = [task.tokenizer.convert_tokens_to_ids("<|im_end|>")]
    config = make_config("data.tools=['data.sums_with_tool:add']", "data.chat=always")
    extension = extension_of(config, task.tokenizer, stop_ids, prompts)
    assert extension.call_format("add") == "hermes"
    question, call, _, answer = sums_with_tool.example(518, 267)
    assert calls_of(call["content"], "hermes") == [Call("add", {"a": 518, "b": 267})]
    ids = extension.ids([{"role": "tool", "content": "785"}], last_id=stop_ids[0])
    turn = task.tokenizer(call["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
    assert task.tokenizer.decode(turn + ids) + answer["content"] in prompts[0].text
    function = {"name": "add", "arguments": {"a": 518, "b": 267}}
    calling = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    rendered = extension.template.text([question, calling, {"role": "tool", "content": "785"}, question])
    assert rendered.split("<|im_start|>")[3:5] == prompts[0].text.split("<|im_start|>")[3:5]
    assert '"name": "add"' in prompts[0].text and "integer" in prompts[0].text, "the schema"


def test_the_sets_are_disjoint_and_their_answers_are_right(task):
    """Answers are computed again from the numbers in the question."""
    numbers = set()
    for name in ("train", "test"):
        rows = [json.loads(line) for line in (task.folder / f"{name}.jsonl").read_text().splitlines()]
        for row in rows:
            a, b = map(
                int, re.fullmatch(r"What is (\d+) \+ (\d+)\?", row["messages"][-1]["content"]).groups()
            )
            assert int(row["answer"]) == sums_with_tool.add(a, b) > a
            numbers.add((a, b))
    assert len(numbers) == 400 + 128


def test_the_last_number_of_the_last_turn_is_scored():
    for text, value in (("518 + 267 = 785", 1), ("7,850", 0), ("785 is 518 + 267", 0), ("", 0), ("78 5", 0)):
        assert sums_with_tool.score(text, "785") == value, text


def test_the_files_of_two_models_do_not_mix(tmp_path):
    for name in ("dense", "moe"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    for _ in range(2):
        sums_with_tool.with_tools(tmp_path / "dense", tmp_path / "tools")
    assert (tmp_path / "tools" / "config.json").read_text() == "dense"
    with pytest.raises(ValueError, match="another model"):
        sums_with_tool.with_tools(tmp_path / "moe", tmp_path / "tools")


def test_a_missing_model_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"data\.smollm2"):
        sums_with_tool.main(["--model", str(tmp_path)])
