"""Checkpoints: what a folder holds, a folder that cannot be written, rows that a resumed run writes anew."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from conftest import save_small_moe
from helpers import FakeRanks, make_config, make_prompts, no_history

import moe_model
import train_rl
from data.stream import digest_of
from data.tiny import build_tokenizer
from runtime.checkpoint import is_redone, save_checkpoint


@pytest.fixture
def run(tmp_path, monkeypatch) -> SimpleNamespace:
    """Make what write_rank() reads of a run, on one rank."""
    FakeRanks(1).install(monkeypatch)
    save_small_moe(tmp_path / "model")
    policy = moe_model.Policy(moe_model.load_config(tmp_path / "model"), None)
    moe_model.load_hf(policy, tmp_path / "model")
    adamw = torch.optim.AdamW(policy.parameters(), lr=0.1)
    return SimpleNamespace(
        config=make_config(f"run.dir={tmp_path / 'run'}", "checkpoint.keep=2"),
        folder=tmp_path / "run" / "checkpoints",
        policy=policy,
        trainer=SimpleNamespace(module=policy, optimizer=SimpleNamespace(optimizer=adamw)),
        history=no_history(2),
        generation_config='{"eos_token_id": [1, 2]}',
        rollouts=SimpleNamespace(tokenizer=build_tokenizer(), prompts=make_prompts(2)),
    )


def save(run: SimpleNamespace, step: int) -> None:
    state = train_rl.TrainState(step=step, account={"a": 1})
    save_checkpoint(run.config, asdict(state), lambda folder: train_rl.write_rank(run, folder))


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_holds_counters_record_random_numbers_and_weights(run):
    run.history.solved += torch.tensor([1.0, 2.0])
    torch.manual_seed(5)
    at_start = torch.get_rng_state()
    save(run, 3)
    assert names_in(run.folder) == ["step_000003"]
    folder = run.folder / "step_000003"
    saved = torch.load(folder / "history.pt", weights_only=True)
    assert saved["solved"].tolist() == [1.0, 2.0] and saved["prompts"] == digest_of(make_prompts(2))
    shard = torch.load(folder / "rank_00000.pt", weights_only=True)
    assert torch.equal(shard["torch_rng"], at_start)
    record = json.loads((folder / "state.json").read_text())
    assert train_rl.TrainState(**record["state"]) == train_rl.TrainState(step=3, account={"a": 1})
    assert json.loads((folder / "model" / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}
    loaded = moe_model.Policy(moe_model.load_config(folder / "model"), None)
    moe_model.load_hf(loaded, folder / "model")
    assert all(map(torch.equal, loaded.parameters(), run.policy.parameters()))


def test_a_checkpoint_that_cannot_be_written_is_an_error_and_the_earlier_ones_stay(run, monkeypatch):
    save(run, 1)

    def full(*arguments):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(moe_model, "save_hf", full)
        with pytest.raises(RuntimeError, match="step_000002 could not be written .rank 0: No space left"):
            save(run, 2)
    assert names_in(run.folder) == ["step_000001"]
    save(run, 2)
    save(run, 3)
    assert names_in(run.folder) == ["step_000002", "step_000003"], "checkpoint.keep is 2"


@pytest.mark.parametrize(
    "row, step, evaluated_step, redone",
    [
        ({"step": 4, "score": 1.0}, 4, 2, False),
        ({"step": 5, "score": 1.0}, 4, 2, True),
        ({"step": 4, "eval/a/accuracy": 1.0}, 4, 2, True),
        ({"step": 4, "eval/a/accuracy": 1.0}, 4, 4, False),
        ({"step": 2, "eval/a/accuracy": 1.0}, 4, 2, False),
        ({"step": 0, "eval/a/accuracy": 1.0}, 0, -1, True),
        ({"step": 0, "eval/a/accuracy": 1.0}, 0, 0, False),
    ],
)
def test_a_row_is_dropped_if_the_run_that_goes_on_writes_it_anew(row, step, evaluated_step, redone):
    """An evaluation comes after the checkpoint of its step, so that it may be missing there."""
    assert is_redone(row, {"step": step, "evaluated_step": evaluated_step}) == redone
