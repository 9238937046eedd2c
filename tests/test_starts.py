"""experiments/starts.py: committed start weights, their digests, and the runs that name them."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from experiments import run, starts
from runtime.checkpoint import digest_of_weights
from train_rl import load_config


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Write a small model with prompts, and let starts live in another folder."""
    source = tmp_path / "built"
    (source / "model").mkdir(parents=True)
    save_file({"w": np.arange(6.0, dtype=np.float32)}, source / "model" / "model.safetensors")
    (source / "model" / "config.json").write_text("{}")
    (source / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    monkeypatch.setattr(starts, "ROOT", tmp_path)
    monkeypatch.setattr(starts, "STARTS", tmp_path / "experiments" / "starts")
    return source


def test_a_start_is_copied_and_a_changed_file_is_named(built, capsys):
    start = starts.add("mine", built)
    record = json.loads((start / "start.json").read_text())
    weights = (built / "model" / "model.safetensors").read_bytes()
    assert record["files"]["model/model.safetensors"] == hashlib.sha256(weights).hexdigest()
    assert len(record["files"]) == 3 and {"commit", "date", "machine"} <= record["added"].keys()
    assert starts.main(["check"]) == 0
    digest = digest_of_weights(built / "model")
    assert starts.start_with(digest) == start / "model"
    assert starts.start_with("0" * 16) is starts.start_with(None) is None
    (start / "train.jsonl").write_text("")
    (start / "model" / "config.json").unlink()
    (start / "new.jsonl").write_text("")
    assert starts.main(["check"]) == 1
    problem = capsys.readouterr().err
    assert "model/config.json, train.jsonl: not as committed" in problem
    assert "new.jsonl: not of the start" in problem and "model.safetensors" not in problem


@pytest.mark.parametrize(("name", "file", "size"), [
    ("mine", "optimizer.pt", 1), ("mine", "model/big.json", starts.MAX_BYTES), ("../mine", "a.json", 1),
])  # fmt: skip
def test_a_folder_that_does_not_fit_is_refused(name, file, size, built, capsys):
    (built / file).write_bytes(b" " * size)
    assert starts.main(["add", name, str(built)]) == 1
    assert (name if "/" in name else str(built)) in capsys.readouterr().err
    assert not list(starts.STARTS.glob("*"))


def test_all_starts_together_have_a_limit(built, monkeypatch, capsys):
    starts.add("one", built)
    monkeypatch.setattr(starts, "MAX_TOTAL_BYTES", 10)
    assert starts.main(["check"]) == 1 and "more than 10" in capsys.readouterr().err


def test_a_run_from_changed_weights_is_refused(built, tmp_path, monkeypatch, capsys):
    start = starts.add("mine", built)
    row = tmp_path / "row.yaml"
    row.write_text("model: {path: experiments/starts/mine/model}\n"
                   "data: {train: [{path: experiments/starts/mine/train.jsonl}]}\n")  # fmt: skip
    command = ["--rows", str(row), "--seeds", "0", "--out", str(tmp_path / "out"), "--dry-run"]
    monkeypatch.chdir(tmp_path)
    assert run.main(command) == 0 and "row.yaml" in capsys.readouterr().out
    (start / "model" / "model.safetensors").write_bytes(b"others")
    assert run.main(command) == 2
    assert "model/model.safetensors" in capsys.readouterr().err


def test_a_recorded_row_begins_with_the_committed_weights(built):
    """A record names the digest of its start; a start that was replaced is an error."""
    weights = digest_of_weights(built / "model")
    start = starts.add("mine", built)

    def recorded(weights, path) -> dict:
        return {"versions": {"weights": weights}, "settings": {"model.path": path}}

    assert run.committed_start(recorded(weights, "data/built/habits/model")) == start / "model"
    assert run.committed_start(recorded("0" * 16, "data/built/habits/model")) is None
    with pytest.raises(ValueError, match="experiments/starts/mine"):
        run.committed_start(recorded("0" * 16, "experiments/starts/mine/model"))


def test_settings_name_starts_by_paths(built):
    settings = ["model.path=experiments/starts/a/model", "reward.judge=scalar"]
    settings.append("reward.judge_path=/x/experiments/starts/b-1/judge")
    config = load_config(["data.train=[{path: experiments/starts/a/train.jsonl}]", *settings])
    names = {folder.name for folder in starts.starts_of(config.model_dump(mode="json"))}
    assert names == {"a", "b-1"}


def test_a_recorded_row_also_reads_the_prompts_of_its_start():
    row = starts.ROOT / "experiments" / "studies" / "drafts_chains" / "grpo.yaml"
    args = SimpleNamespace(rows=[row], script=starts.ROOT / "train_rl.py", settings=["train.num_steps=7"])
    settings = run.start_settings(args, Path("experiments/starts/chains/model"))
    config = load_config(["--config", str(row), *args.settings, *settings])
    assert config.model.path == "experiments/starts/chains/model" and config.train.num_steps == 7
    (source,) = config.data.train
    assert (source.path, source.limit) == ("experiments/starts/chains/train.jsonl", 64)
    assert [s.name for s in config.data.eval] == ["chains"]
    kept = json.loads((starts.STARTS / "chains" / "start.json").read_text())["files"]
    assert all(Path(s.path).name in kept for s in config.data.eval)


@pytest.mark.parametrize(("start", "study", "row", "in_start", "in_built"), [
    ("habits", "elimination_tuned", "online_pool_50", "test.jsonl", "pool_50.jsonl"),
    ("habits", "elimination_tuned", "grpo_skip", "train.jsonl", "scores.jsonl"),
])  # fmt: skip
def test_files_that_a_start_lacks_stay_in_the_built_folder(start, study, row, in_start, in_built):
    file = starts.ROOT / "experiments" / "studies" / study / f"{row}.yaml"
    args = SimpleNamespace(rows=[file], script=starts.ROOT / "train_rl.py", settings=[])
    settings = run.start_settings(args, Path(f"experiments/starts/{start}/model"))
    text = load_config(["--config", str(file), *settings]).model_dump_json()
    assert f"experiments/starts/{start}/{in_start}" in text and f"data/built/{start}/{in_built}" in text
    assert in_built not in text.replace(f"data/built/{start}/{in_built}", "")
