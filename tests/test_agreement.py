"""Ranks that differ at the start are refused: settings, code, libraries, and each input that a rank reads."""

import hashlib
import json
import platform
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT, SMALL, train
from helpers import make_config, make_prompts
from safetensors.torch import load_file, save_file

import lifecycle
from data import score
from data.chat import ChatTemplate, load_tokenizer
from data.prompts import load_prompts
from data.stream import LoadedSets, keep_by_offline_scores
from lifecycle import input_files
from runtime import agreement
from runtime.agreement import (
    check_inputs_agree,
    check_ranks_agree,
    code_of,
    difference_from,
    digests_of_input,
    variable_digests,
)
from runtime.checkpoint import with_saved_choices
from runtime.user_files import user_module_digests

START = ROOT / "experiments" / "starts" / "tiny"


def record(**fields) -> dict:
    settings = {"train": {"learning_rate": 1e-4, "seed": 0}, "run": {"dir": "runs/a"}}
    return {"settings": settings, "code": {"reward.py": "ab"}, "versions": {"torch": "2.13.0"}} | fields


@pytest.mark.parametrize(
    "changed, difference",
    [
        (record(), ""),
        (record(settings={"train": {"learning_rate": 1e-4, "seed": 0}, "run": {"dir": "/disk/a"}}), ""),
        (
            record(settings={"train": {"learning_rate": 1e-3, "seed": 0}, "run": {"dir": "runs/a"}}),
            "settings (train.learning_rate 0.0001 -> 0.001)",
        ),
        (record(code={"reward.py": "cd", "mine.py": "ef"}), "code (mine.py, reward.py)"),
        (record(versions={"torch": "2.12.0"}), "libraries (torch 2.13.0 -> 2.12.0)"),
    ],
)
def test_the_difference_between_two_ranks_is_named(changed, difference):
    assert difference_from(record(), changed) == difference


def test_all_ranks_get_the_same_message(ranks):
    """Ranks 1 and 2 of three have another learning rate."""

    def message(rank: int) -> str:
        with pytest.raises(ValueError) as raised:
            check_ranks_agree(make_config(f"train.learning_rate={1e-4 * (1 + (rank > 0))}"))
        return str(raised.value)

    (text,) = set(ranks(3).run(message))
    assert "rank 1 on" in text and "train.learning_rate 0.0001 -> 0.0002" in text and "1, 2" in text


@pytest.mark.parametrize("name", ["MY_SERVER", "VLLM_USE_SOMETHING", "NVIDIA_TF32_OVERRIDE"])
def test_variables_that_change_results_are_compared(name, monkeypatch):
    config = make_config("reward.env=[MY_SERVER]")
    digests = []
    for value in ("a", "b"):
        monkeypatch.setenv(name, value)
        digests.append(variable_digests(config))
    assert digests[0][f"${name}"] != digests[1][f"${name}"] and "a" not in digests[0].values()


def test_the_compared_code_is_the_projects_own():
    code = code_of()
    assert code["runtime/agreement.py"] == hashlib.sha256(Path(agreement.__file__).read_bytes()).hexdigest()
    assert not [name for name in code if "site-packages" in name or name.startswith(".venv")]
    assert all((ROOT / name).is_file() for name in code if name.endswith(".py") and "/" in name)


def test_modules_of_the_user_are_compared(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_of_a_node.py").write_text("def score(completion): return 1.0")
    monkeypatch.syspath_prepend(tmp_path)
    names = ["my_rewards_of_a_node:score", "no_such_module:score"]
    config = make_config(f"reward.functions=[{', '.join(names)}]")
    assert user_module_digests(config).keys() == {names[0]}
    (first,) = user_module_digests(config).values()
    assert first == hashlib.sha256((tmp_path / "my_rewards_of_a_node.py").read_bytes()).hexdigest()[:16]


# ---- inputs ------------------------------------------------------------------------------------------------
def sets_of(prompts: list, ids: list[list[int]] | None = None, name: str = "set") -> LoadedSets:
    """Return a training set of the prompts, and a held-out set of two others."""
    held_out = {"test": (make_prompts(2), [[1], [2]])}
    return LoadedSets(prompts, ids or [[i] for i in range(len(prompts))], None, held_out, [], [])


PROMPTS = make_prompts(3)
OTHERS = {  # another copy of a set on one node
    "fewer rows": sets_of(PROMPTS[:2]),
    "another order": sets_of(PROMPTS[::-1]),
    "another answer": sets_of([replace(PROMPTS[0], answer="2"), *PROMPTS[1:]]),
    "another verifier": sets_of([*PROMPTS[:2], replace(PROMPTS[2], kind="math")]),
    "another column": sets_of([*PROMPTS[:2], replace(PROMPTS[2], columns={"tests": "x"})]),
    "another tokenizer": sets_of(PROMPTS, [[0], [1], [3]]),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_copy_of_the_rows_is_refused_on_all_ranks(ranks, other):
    def message(rank: int) -> str:
        with pytest.raises(ValueError) as raised:
            check_inputs_agree((other if rank == 1 else sets_of(PROMPTS)).digests())
        return str(raised.value)

    (text,) = set(ranks(3).run(message))
    assert "rank 1 on" in text and "data.train set" in text and "3 rows" in text and "differ: 1)" in text


@pytest.mark.parametrize("place", [0, 0.37, 1], ids=["begin", "middle", "end"])
def test_large_weights_are_told_apart_by_a_part_of_their_bytes(tmp_path, monkeypatch, place):
    monkeypatch.setattr(agreement, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(agreement, "STRIDE_BYTES", 8192)
    digests = []
    for value in (0.0, 1.0):
        weights = torch.zeros(40_000)
        start = int(place * (40_000 - 2048))
        weights[start : start + 2048] = value  # one stride
        save_file({"w": weights}, tmp_path / "model.safetensors")
        digests.append(digests_of_input("model.path", tmp_path))
    assert [*digests[0]] == ["model.path model.safetensors"] and digests[0] != digests[1]


def make_node(folder: Path) -> Path:
    """Copy the demo's model and rows into the folder of a node."""
    shutil.copytree(START / "model", folder / "model")
    for name in ("train.jsonl", "test.jsonl"):
        lines = (START / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:40]))
    shutil.copytree(folder / "model", folder / "teacher")
    (folder / "scores.jsonl").write_text(json.dumps({"model": "m", "kinds": []}) + "\n")
    return folder


def add_to_experts(folder: Path) -> None:
    """Change the experts of one layer, as in a later checkpoint."""
    (file,) = folder.glob("*.safetensors")
    weights = {name: w + 0.01 * ("experts" in name) for name, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def append(text: str):
    return lambda file: file.write_text(file.read_text() + text)


ROW = '{"prompt": "1+1=", "answer": "2"}\n'
CHANGES = {  # input: (path, change on one node, settings)
    "model.path model-00001-of-00001.safetensors": ("model", add_to_experts, []),
    "data.train train": ("train.jsonl", append(ROW), []),
    "teacher.path tokenizer_config.json":
        ("teacher/tokenizer_config.json", append(" "), ["teacher.path=teacher"]),
}  # fmt: skip


def test_every_file_that_a_rank_reads_is_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(make_node(tmp_path))
    first = make_config(
        "model.path=model", "reward.judge=scalar", "reward.judge_path=judge", "algorithm.kl_coef=0.1",
        "data.chat=never",
    )  # fmt: skip
    second = make_config(
        "teacher.path=teacher", "teacher.scores=rates.jsonl", "zero_variance.offline_scores=scores.jsonl"
    )
    shutil.copytree("model", "judge")
    shutil.copytree("model", "checkpoint")
    shutil.copy("scores.jsonl", "rates.jsonl")
    places = [name.rpartition(" ")[0] for name in input_files([first, second], Path("checkpoint"))]
    expected = ["model.path", "model.path (reference)", "reward.judge_path", "teacher.path"]
    expected += ["teacher.scores", "zero_variance.offline_scores"]
    assert sorted(set(places)) == expected
    assert all(places.count(name) == 5 for name in expected[:4])


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_node_with_another_copy_of_an_input_stops_the_run(tmp_path, name):
    """Two folders stand for two nodes with one rank each."""
    nodes = [make_node(tmp_path / node) for node in ("a", "b")]
    place, change, settings = CHANGES[name]
    change(nodes[1] / place)
    done = train(
        *SMALL[:1], ROOT / SMALL[1], "model.path=model", "data.train=[{path: train.jsonl}]",
        "data.eval=[{path: test.jsonl}]", f"run.dir={tmp_path}/run", *settings, cwd=nodes, num_nodes=2,
    )  # fmt: skip
    assert done.returncode != 0
    assert f"differs from rank 0 on {platform.node()} in {name} (digest " in done.stderr, done.stderr[-2000:]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# ---- the clock ---------------------------------------------------------------------------------------------
CLOCK = "{{ strftime_now('%d') }}{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def clock_model(tmp_path) -> Path:
    """A copy of the demo's model whose chat template writes the day, as Llama 3.2 does."""
    folder = make_node(tmp_path / "node") / "model"
    (folder / "chat_template.jinja").write_text(CLOCK)
    return folder


def test_a_template_writes_the_date_of_the_settings(clock_model):
    tokenizer = load_tokenizer(clock_model)
    messages = [{"role": "user", "content": "1+1="}]
    for date in ("2024-02-29", "1999-12-31"):
        assert ChatTemplate(tokenizer, date=date).text(messages) == f"{date[-2:]}1+1="
        options = {"tokenizer": tokenizer, "chat": "always", "date": date, "limit": 1}
        (prompt,) = load_prompts(clock_model.parent / "train.jsonl", **options)
        assert prompt.text.startswith(date[-2:])


@pytest.mark.parametrize("value", ["2026-11-28", "20261128"])
def test_a_date_has_one_spelling(value):
    assert make_config(f"data.date={value}").data.date == "2026-11-28"


def test_ranks_take_the_date_of_rank_0_and_a_resume_that_of_the_checkpoint(ranks):
    fake = ranks(2)

    def date(rank: int, *settings: str, record: dict | None = None) -> str:
        with mock.patch.object(lifecycle, "datetime") as clock:
            clock.now = lambda: datetime(2026, 11, 28 + fake.get_rank())
            config = make_config(*settings)
            config = with_saved_choices(config, record) if record else config
            return lifecycle.with_date(config).data.date

    assert fake.run(date) == ["2026-11-28"] * 2
    assert fake.run(lambda rank: date(rank, "data.date=2020-01-01")) == ["2020-01-01"] * 2
    record = {"topology": {"dtype": "float32"}, "config": {"data": {"date": "2025-05-05"}}}
    assert fake.run(lambda rank: date(rank, record=record)) == ["2025-05-05"] * 2
    record["config"]["data"] = {}  # of an earlier version
    assert fake.run(lambda rank: date(rank, record=record)) == ["2026-11-28"] * 2


def test_scores_of_another_date_are_named(tmp_path):
    file = tmp_path / "scores.jsonl"
    file.write_text(json.dumps({"model": "m", "kinds": [], "date": "2020-01-01"}) + "\n")
    with pytest.raises(ValueError, match="data.date=2020-01-01"):
        keep_by_offline_scores(make_prompts(2), str(file), 0, 1, False)
    assert score.earlier_choice(file, "date") == "2020-01-01"
