"""Checkpoints: what a folder holds, a folder that cannot be written, rows that a resumed run writes anew."""

import json
import pickle
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import save_small_moe
from helpers import FakeRanks, make_batch, make_config, make_prompts, no_history, rows_of
from safetensors import SafetensorError

import lifecycle
import moe_model
from data.stream import digest_of
from data.tiny import build_tokenizer
from runtime import checkpoint
from runtime.checkpoint import (
    TrainState,
    find_checkpoint,
    is_redone,
    keep_earlier_record,
    lock_run_dir,
    prepare_run_dir,
    save_checkpoint,
    writing,
)
from runtime.metrics import log_metrics, log_samples


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
        tokenizer=build_tokenizer(),
        prompts=make_prompts(2),
    )


def save(run: SimpleNamespace, step: int) -> None:
    state = TrainState(step=step, account={"a": 1})
    save_checkpoint(run.config, asdict(state), lambda folder: lifecycle.write_rank(run, folder))


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
    assert TrainState(**record["state"]) == TrainState(step=3, account={"a": 1})
    assert json.loads((folder / "model" / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}
    loaded = moe_model.Policy(moe_model.load_config(folder / "model"), None)
    moe_model.load_hf(loaded, folder / "model")
    assert all(map(torch.equal, loaded.parameters(), run.policy.parameters()))


@pytest.mark.parametrize("budget, is_last", [("null", False), (10, False), (9, True), (8, True)])
def test_a_run_ends_with_its_budget_of_tokens(budget, is_last):
    config = make_config("train.num_steps=5", f"train.max_generated_tokens={budget}")
    assert TrainState(step=4, generated_tokens=9).is_last(config) == is_last
    assert TrainState(step=5).is_last(config)


def test_the_record_of_other_prompts_is_dropped_on_resume(run, monkeypatch, capsys):
    FakeRanks(1).install(monkeypatch)
    run.history.solved += torch.tensor([1.0, 2.0])
    save(run, 3)
    config = make_config("checkpoint.resume=weights")
    resumed = lambda prompts: lifecycle.resume(
        run.folder / "step_000003", None, no_history(2), prompts, config
    ).solved.tolist()
    assert resumed(make_prompts(2)) == [1.0, 2.0]
    assert "the record of other prompts is dropped" not in capsys.readouterr().out
    assert resumed(make_prompts(2)[::-1]) == [0.0, 0.0]
    assert "the record of other prompts is dropped" in capsys.readouterr().out
    config = make_config()
    with pytest.raises(ValueError, match="checkpoint.resume=weights"):
        resumed(make_prompts(2)[::-1])


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


def test_what_a_kill_has_left_of_a_checkpoint_is_removed_by_the_next_one(run, monkeypatch):
    """In the midst of writing one of another step, and of removing the oldest."""
    for name in ("step_000137.tmp", "step_000138.tmp/model"):
        (run.folder / name).mkdir(parents=True)
    save(run, 1)
    assert names_in(run.folder) == ["step_000001"]
    save(run, 2)

    class Kill(BaseException): ...

    def die(folder, **options):
        if (folder / "state.json").is_file():
            (folder / "state.json").unlink()
            raise Kill

    with monkeypatch.context() as patch, pytest.raises(Kill):
        patch.setattr("shutil.rmtree", die)
        save(run, 3)
    assert names_in(run.folder) == ["step_000001.tmp", "step_000002", "step_000003"]
    save(run, 4)
    assert names_in(run.folder) == ["step_000003", "step_000004"]


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


# ---- damage ------------------------------------------------------------------------------------------------
def every_file(checkpoint: Path) -> list[str]:
    return sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 64
    file.write_bytes(content)


DAMAGE = {
    "a flipped bit": flip_a_bit,
    "cut in half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "emptied": lambda file: file.write_bytes(b""),
    "removed": Path.unlink,
}


def test_damage_to_any_file_of_a_checkpoint_is_named_and_the_one_before_can_be_taken(run, tmp_path):
    """But the removal of state.json, which unmakes the checkpoint."""
    save(run, 1)
    save(run, 2)
    names = every_file(run.folder / "step_000002")
    assert {"state.json", "history.pt", "rank_00000.pt", "model/config.json"} < set(names) and len(names) > 6
    older = run.config.model_copy(
        update={"checkpoint": run.config.checkpoint.model_copy(update={"on_damage": "older"})}
    )
    whole = shutil.copytree(run.folder, tmp_path / "whole")
    for name in names:
        for damage in DAMAGE:
            if (name, damage) == ("state.json", "removed"):
                continue
            shutil.rmtree(run.folder)
            shutil.copytree(whole, run.folder)
            DAMAGE[damage](run.folder / "step_000002" / name)
            with pytest.raises(ValueError, match="step_000002 is damaged: ") as caught:
                find_checkpoint(run.config)
            assert name in str(caught.value), (name, damage)
            assert "the next older one is step_000001" in str(caught.value)
            found, record = find_checkpoint(older)
            assert found.name == "step_000001" and record["state"]["step"] == 1
            assert names_in(run.folder) == ["damaged_step_000002", "step_000001"]
    assert find_checkpoint(run.config)[0].name == "step_000001"


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_agree_on_the_checkpoint_before_a_damaged_one_however_late_they_look(run, late, monkeypatch):
    """A rank may look when another one has set the damaged checkpoint aside."""
    save(run, 1)
    save(run, 2)
    (run.folder / "step_000002" / "state.json").write_text("{")
    checkpoint = run.config.checkpoint.model_copy(update={"on_damage": "older", "resume": "weights"})
    config = run.config.model_copy(update={"checkpoint": checkpoint})

    def find(rank: int) -> str:
        time.sleep(0.3 if rank == late else 0)
        return find_checkpoint(config)[0].name

    assert FakeRanks(2).install(monkeypatch).run(find) == ["step_000001", "step_000001"]


def test_a_state_of_another_shape_is_refused_by_name(run):
    save(run, 1)
    for text in ("[]", "{}", "17", '{"topology": {}, "config": {}, "state": {"unknown": 1}}', "{"):
        (run.folder / "step_000001" / "state.json").write_text(text)
        with pytest.raises(ValueError, match="step_000001 is damaged: state.json .*; no older one exists"):
            find_checkpoint(run.config)


def test_a_checkpoint_is_step_and_digits_and_the_highest_number_is_the_newest(run):
    save(run, 999999)
    copies = ("step_000004_best", "step_old", "step_12", "step_0000xx", "best")
    for name in copies:
        shutil.copytree(run.folder / "step_999999", run.folder / name)
    save(run, 1000000)
    assert find_checkpoint(run.config)[0].name == "step_1000000"
    save(run, 1000001)
    assert names_in(run.folder) == sorted([*copies, "step_1000000", "step_1000001"]), "checkpoint.keep is 2"


def test_a_broken_line_of_the_metrics_is_left_out_and_named(run, tmp_path, capsys):
    save(run, 2)
    folder = tmp_path / "run"
    good = [{"step": 1, "score": 1.0}, {"step": 2, "score": 0.5}, {"step": 3, "score": 0.1}]
    lines = [json.dumps(good[0]), "garbage}", json.dumps(good[1]), "[]", '{"score": 1}', json.dumps(good[2])]
    (folder / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"step": 4, "sc\xff')
    prepare_run_dir(folder, run.config, {"state": {"step": 2, "evaluated_step": -1}})
    kept = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == good[:2]
    said = capsys.readouterr().out
    assert [f"line {number}," in said for number in range(1, 8)] == [
        False, True, False, True, True, False, False,
    ]  # fmt: skip
    assert not list(folder.glob("*.partial"))


def test_versions_keep_what_earlier_starts_were_made_with(run, tmp_path, monkeypatch):
    """Three starts of one commit and a fourth of another: the record says both."""
    folder, resumed = tmp_path / "run", {"state": {"step": 2, "evaluated_step": -1}}
    read = lambda: json.loads((folder / "versions.json").read_text())
    folder.mkdir(exist_ok=True)
    for record in (None, resumed, resumed):
        prepare_run_dir(folder, run.config, record)
        assert "earlier" not in read()
    first = read()
    monkeypatch.setattr(checkpoint, "digest_of_weights", lambda folder: "other weights")
    prepare_run_dir(folder, run.config, resumed)
    prepare_run_dir(folder, run.config, resumed)
    assert read() == first | {"weights": "other weights", "earlier": [first]}
    (folder / "versions.json").write_text('{"torch": ')
    prepare_run_dir(folder, run.config, resumed)
    assert read() == first | {"weights": "other weights"}, "a file that is cut off says nothing"


def test_a_rewrite_of_the_metrics_that_ends_half_way_loses_no_row(run, tmp_path):
    """The file that is written aside is on a full disk, where a kill would leave it half written as well."""
    rows = "".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3))
    for name in ("metrics.jsonl", "samples.jsonl"):
        (folder := tmp_path / name.partition(".")[0]).mkdir()
        (folder / name).write_text(rows)
        (folder / f"{name}.partial").symlink_to("/dev/full")
        with pytest.raises(RuntimeError, match=f"{name} could not be written"):
            prepare_run_dir(folder, run.config, {"state": {"step": 2, "evaluated_step": -1}})
        assert (folder / name).read_text() == rows


class OpensAFile:
    """Pickled, it is the call of a function."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["history.pt", "rank_00000.pt"])
def test_code_in_a_pickle_of_a_checkpoint_is_refused(name, run, tmp_path):
    """Who makes the file can make the digests, too."""
    save(run, 1)
    checkpoint, trace = run.folder / "step_000001", tmp_path / "trace"
    torch.save({"optimizer": OpensAFile(trace)}, checkpoint / name)
    with pytest.raises(pickle.UnpicklingError, match="open"):
        lifecycle.resume(checkpoint, run.trainer, run.history, run.prompts, run.config)
    assert not trace.exists()
    torch.load(checkpoint / name, weights_only=False)["optimizer"].close()
    assert trace.exists(), "read without care it would have run"


# ---- full disks and links ----------------------------------------------------------------------------------
def test_a_tracker_that_fails_is_named_once_and_costs_no_step(run, tmp_path, capsys):
    """Its server is gone; the other tracker and metrics.jsonl have every step."""
    (tmp_path / "run").mkdir()
    logged, gone = [], SimpleNamespace(name="mlflow", log=lambda values, step: 1 / 0)
    other = SimpleNamespace(name="other", log=lambda values, step: logged.append((step, values["score"])))
    accelerator = SimpleNamespace(is_main_process=True, trackers=[gone, other])
    for step in (1, 2):
        log_metrics(accelerator, run.config, TrainState(step=step), {"score": step / 2})
    assert logged == [(1, 0.5), (2, 1.0)]
    assert [row["score"] for row in rows_of(tmp_path / "run")] == [0.5, 1.0]
    assert capsys.readouterr().out.count("tracker mlflow") == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "config.yaml"])
def test_a_full_disk_names_the_file_and_what_to_do(name, run, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to("/dev/full")
    accelerator = SimpleNamespace(is_main_process=True, trackers=[])
    batch, state = make_batch([[1, 2]]), TrainState()
    writers = {
        "metrics.jsonl": lambda: log_metrics(accelerator, run.config, state, {"score": 1.0}),
        "samples.jsonl": lambda: log_samples(run.config, state, batch, build_tokenizer()),
        "config.yaml": lambda: prepare_run_dir(folder, run.config, None),
    }
    wanted = f"{folder / name} could not be written .*No space left.*; checkpoints are intact"
    with pytest.raises(RuntimeError, match=wanted):
        writers[name]()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space"), RuntimeError("No space"), SafetensorError("No space")]
)
def test_an_export_that_does_not_fit_is_named_whatever_its_library_raises(error):
    with (
        pytest.raises(RuntimeError, match="runs/x/model could not be written .*No space"),
        writing("runs/x/model"),
    ):
        raise error


@pytest.mark.parametrize(
    "name", ["lock", "metrics.jsonl", "config.yaml", "checkpoints", "model/config.json", "lost"]
)
def test_a_run_writes_through_no_link(name, tmp_path):
    real, folder = tmp_path / "precious", tmp_path / "run"
    real.write_text("content")
    (folder / "model").mkdir(parents=True)
    lock_run_dir(folder).close()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(real if name != "lost" else tmp_path / "nowhere")
    with pytest.raises(ValueError, match=f"run.dir: {folder / name} is a symbolic link"):
        lock_run_dir(folder)
    assert real.read_text() == "content" and not (tmp_path / "nowhere").exists()
    (folder / name).unlink()
    (tmp_path / "link").symlink_to(folder)
    lock_run_dir(tmp_path / "link").close()


def test_the_record_of_an_earlier_start_gets_a_free_name(tmp_path):
    (tmp_path / "earlier_2").mkdir()
    for number in (1, 3):
        (tmp_path / "metrics.jsonl").write_text("{}")
        assert keep_earlier_record(tmp_path) == tmp_path / f"earlier_{number}"


def test_weights_are_told_apart_by_their_first_and_last_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "DIGESTED_BYTES", 4)
    assert checkpoint.digest_of_weights(tmp_path) is checkpoint.digest_of_weights(tmp_path / "no") is None
    file, found = tmp_path / "a.safetensors", []
    for content in ("head..tail", "head..tail", "Head..tail", "head..taiL", "head...tail", "ab"):
        file.write_text(content)
        found.append(checkpoint.digest_of_weights(tmp_path))
    assert found[0] == found[1] and len(set(found)) == 5
    file.rename(tmp_path / "b.safetensors")
    assert checkpoint.digest_of_weights(tmp_path) not in found
