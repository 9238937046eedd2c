"""Checkpoints: content, failed writes, damage, and rows that a resumed run writes again."""

import contextlib
import errno
import hashlib
import itertools
import json
import pickle
import resource
import shutil
from collections import Counter, deque
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import save_small_moe
from helpers import make_batch, make_config, make_group, make_prompts, names_in, no_history, rows_of
from safetensors import SafetensorError

import lifecycle
import moe_model
from batch import Rollout
from configure import load_config
from data.stages import Offers
from data.stream import digest_of
from data.tiny import build_tokenizer
from memory_plan import with_setting
from runtime import checkpoint
from runtime.checkpoint import (
    TrainState,
    check_fits,
    find_checkpoint,
    is_redone,
    lock_run_dir,
    prepare_run_dir,
    resumes_exactly,
    save_checkpoint,
    writing,
)
from runtime.launch import Stopped
from runtime.memory import GIB, NodeMemory
from runtime.metrics import append_rows, log_metrics, sample_rows
from runtime.tracking import send_histogram, send_texts
from runtime.user_files import DIGESTS, file_of, user_file_digests
from tests.campaign.verdicts import DAMAGE


@pytest.fixture
def run(tmp_path, one_rank) -> SimpleNamespace:
    """Make the fields of a run that write_rank() reads, on one rank."""
    save_small_moe(tmp_path / "model")
    policy = moe_model.Policy(moe_model.load_config(tmp_path / "model"), None)
    moe_model.load_hf(policy, tmp_path / "model")
    adamw = torch.optim.AdamW(policy.parameters(), lr=0.1)
    return SimpleNamespace(
        config=make_config(f"run.dir={tmp_path}/run", f"model.path={tmp_path}/model", "checkpoint.keep=2"),
        folder=tmp_path / "run" / "checkpoints",
        policy=policy,
        trainer=SimpleNamespace(module=policy, optimizer=SimpleNamespace(optimizer=adamw)),
        history=no_history(2),
        generation_config='{"eos_token_id": [1, 2]}',
        tokenizer=build_tokenizer(),
        prompts=make_prompts(2),
        stage_offers=[Offers(range(2))],
        queue=deque(),
    )


def save(run: SimpleNamespace, step: int) -> None:
    state = TrainState(step=step, account={"a": 1})
    save_checkpoint(run.config, asdict(state), lambda folder: lifecycle.write_rank(run, folder))


def test_a_checkpoint_holds_counters_record_random_numbers_and_weights(run):
    run.history.solved += torch.tensor([1.0, 2.0])
    torch.manual_seed(5)
    rng_state = torch.get_rng_state()
    save(run, 3)
    assert names_in(run.folder) == ["step_000003"]
    folder = run.folder / "step_000003"
    saved = torch.load(folder / "history.pt", weights_only=True)
    assert saved["solved"].tolist() == [1.0, 2.0] and saved["prompts"] == digest_of(make_prompts(2))
    shard = torch.load(folder / "rank_00000.pt", weights_only=True)
    assert torch.equal(shard["torch_rng"], rng_state)
    record = json.loads((folder / "state.json").read_text())
    assert TrainState(**record["state"]) == TrainState(step=3, account={"a": 1})
    assert json.loads((folder / "model" / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}
    loaded = moe_model.Policy(moe_model.load_config(folder / "model"), None)
    moe_model.load_hf(loaded, folder / "model")
    assert all(map(torch.equal, loaded.parameters(), run.policy.parameters()))


def test_a_resume_takes_the_micro_batch_that_the_first_launch_has_chosen(run, monkeypatch):
    """The sizes need fake amounts of memory: a small one at the first launch, a large one on resume."""
    monkeypatch.setattr(lifecycle, "choose_micro_batch", lambda config, hf, num_ranks, node: node.num_bytes)
    open_stage = run.config
    fixed_stage = make_config("train.micro_batch_tokens=7")

    def tokens_of(state: TrainState, fake_memory: int) -> list[int]:
        node = NodeMemory(fake_memory, 1, "fake")
        configs = lifecycle.with_micro_batches([open_stage, fixed_stage], None, state, node)
        return [config.train.micro_batch_tokens for config in configs]

    state = TrainState(step=3)
    assert tokens_of(state, 512) == [512, 7]
    save_checkpoint(run.config, asdict(state), lambda folder: lifecycle.write_rank(run, folder))
    checkpoint_folder, record = find_checkpoint(run.config)
    resumed = checkpoint.state_of(record, run.config)
    assert checkpoint_folder.name == "step_000003" and tokens_of(resumed, 4096) == [512, 7]
    assert tokens_of(TrainState(), 4096) == [4096, 7]
    on_gpu = lifecycle.with_micro_batches([open_stage], None, TrainState(), None)
    assert on_gpu == [open_stage], "GPUs have a fixed default"


def imitate_processor(monkeypatch, **speedups: float) -> None:
    """Let this processor multiply that many times as fast in bfloat16; policy=, engine=."""
    rows = {moe_model.TRAINING_ROWS: "policy", moe_model.DECODING_ROWS: "engine"}
    rates = {number: {"float32": 50.0, "bfloat16": 50 * speedups[name]} for number, name in rows.items()}
    monkeypatch.setattr(moe_model, "product_rates", rates.get)


def with_both(config, policy: str, engine: str):
    return with_setting(with_setting(config, "model.dtype", policy), "rollout.dtype", engine)


@pytest.mark.parametrize(
    "policy, engine, dtypes",
    [
        (4.0, 4.0, ("bfloat16", "bfloat16")), (0.2, 0.2, ("float32", "float32")),
        (2.0, 0.2, ("bfloat16", "float32")), (0.2, 2.0, ("float32", "bfloat16")),
    ],
)  # fmt: skip
def test_a_resume_takes_the_dtypes_that_the_first_launch_has_chosen(
    run, policy, engine, dtypes, monkeypatch, capsys
):
    """The first launch is on a processor that is fast or slow in bfloat16, the resume on the other kind."""
    imitate_processor(monkeypatch, policy=policy, engine=engine)
    chosen = lifecycle.with_dtypes(run.config, None)
    assert chosen == with_both(run.config, *dtypes)
    lines = capsys.readouterr().out.splitlines()
    for line, name, dtype, speedup in zip(lines, ("model", "rollout"), dtypes, (policy, engine), strict=True):
        assert f"{name}.dtype auto: {dtype}" in line and f"float32 50, bfloat16 {50 * speedup:.0f}" in line
    save_checkpoint(chosen, asdict(TrainState(step=3)), lambda folder: lifecycle.write_rank(run, folder))
    imitate_processor(monkeypatch, policy=1 / policy, engine=1 / engine)
    _, record = find_checkpoint(run.config)
    assert lifecycle.with_dtypes(run.config, record) == chosen
    assert capsys.readouterr().out.count("as in the checkpoint") == 2
    assert lifecycle.with_dtypes(run.config, None) != chosen, "a new run chooses anew"
    assert find_checkpoint(chosen), "the same dtypes, but explicit"
    others = ["float32" if dtype == "bfloat16" else "bfloat16" for dtype in dtypes]
    with pytest.raises(ValueError, match=f"dtype {dtypes[0]} -> {others[0]}"):
        find_checkpoint(with_both(run.config, others[0], dtypes[1]))
    with pytest.raises(ValueError, match=f"rollout.dtype '{dtypes[1]}' -> '{others[1]}'"):
        find_checkpoint(with_both(run.config, dtypes[0], others[1]))


@pytest.mark.parametrize("saved", [{}, {"rollout": {}}, {"rollout": {"dtype": "bfloat16"}}])
def test_a_checkpoint_from_before_auto_keeps_bfloat16(saved, monkeypatch, ranks, capsys):
    imitate_processor(monkeypatch, policy=0.1, engine=0.1)
    record = {"topology": {"dtype": "float32"}, "config": {"data": {}} | saved}
    resumed = ranks(1).run(lambda rank: lifecycle.with_dtypes(make_config(), record))[0]
    assert (resumed.model.dtype, resumed.rollout.dtype) == ("float32", "bfloat16")
    assert "rollout.dtype auto: bfloat16 (as in the checkpoint; a new run would take float32" in (
        capsys.readouterr().out
    )


def test_rank_0_alone_chooses_the_dtypes_for_ranks_on_other_processors(ranks, monkeypatch):
    fake = ranks(2)
    measured = []

    def product_rates(rows: int) -> dict[str, float]:
        measured.append(fake.get_rank())
        return {"float32": 1.0, "bfloat16": 4.0}

    monkeypatch.setattr(moe_model, "product_rates", product_rates)
    configs = fake.run(lambda rank: lifecycle.with_dtypes(make_config(), None))
    assert [(c.model.dtype, c.rollout.dtype) for c in configs] == [("bfloat16", "bfloat16")] * 2
    assert set(measured) == {0}
    explicit = fake.run(lambda rank: lifecycle.with_dtypes(make_config("rollout.dtype=float32"), None))
    assert [config.rollout.dtype for config in explicit] == ["float32"] * 2


@pytest.mark.parametrize(
    "num_saved, settings, free_gib, is_refused",
    [
        (0, "every=10", 8.9, True), (0, "every=10", 9.1, False), (1, "every=10", 5.9, True),
        (2, "every=10", 3.1, False), (0, "keep=1", 5.9, True), (0, "every=50", 6.1, False),
        (0, "every=0", 2.9, True),
    ],
)  # fmt: skip
def test_a_disk_without_room_for_its_checkpoints_is_refused_at_the_start(
    num_saved, settings, free_gib, is_refused, run, tmp_path, monkeypatch
):
    """A checkpoint has 3 GiB. A run of 100 steps holds keep + 1 = 3, and at most those it writes."""
    (tmp_path / "run").mkdir(exist_ok=True)
    for step in range(num_saved):
        save(run, step)
    usage = SimpleNamespace(free=int(free_gib * GIB))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    config = make_config("train.num_steps=100", "checkpoint.every=10", f"checkpoint.{settings}")
    expectation = pytest.raises(ValueError, match="run.dir") if is_refused else contextlib.nullcontext()
    with expectation:
        checkpoint.check_free_disk(tmp_path / "run", 3 * GIB, lifecycle.max_checkpoints(config))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_planned_size_of_a_checkpoint_is_the_size_of_its_files(dtype, run):
    run.policy.to(getattr(torch, dtype))
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in run.policy.parameters()]
    adamw = run.trainer.optimizer.optimizer = torch.optim.AdamW(masters)
    for parameter in masters:
        parameter.grad = torch.zeros_like(parameter)
    adamw.step()
    save(run, 1)
    folder = run.folder / "step_000001"
    tensors = [path for path in folder.rglob("*") if path.suffix in (".pt", ".safetensors")]
    planned = lifecycle.checkpoint_bytes(moe_model.parameter_counts(run.policy.config), dtype)
    # Beside the tensors, a file has names and shapes: a few hundred bytes for each of the small tensors here
    assert planned < sum(path.stat().st_size for path in tensors) < planned + 1000 * 4 * len(masters)


@pytest.mark.parametrize("budget, is_last", [("null", False), (10, False), (9, True), (8, True)])
def test_a_run_ends_with_its_budget_of_tokens(budget, is_last):
    config = make_config("train.num_steps=5", f"train.max_generated_tokens={budget}")
    assert TrainState(step=4, generated_tokens=9).is_last(config) == is_last
    assert TrainState(step=5).is_last(config)


def test_the_record_of_other_prompts_is_dropped_on_resume(run, capsys):
    run.history.solved += torch.tensor([1.0, 2.0])
    save(run, 3)
    folder = run.folder / "step_000003"

    def solved_after_resume(prompts, *settings: str) -> list[float]:
        config = make_config(*settings)
        lifecycle.refuse_other_prompts(folder, prompts, [Offers(range(2))], config)
        history = lifecycle.resume(folder, None, no_history(2), prompts, [Offers(range(2))], config)
        return history.solved.tolist()

    assert solved_after_resume(make_prompts(2), "checkpoint.resume=weights") == [1.0, 2.0]
    assert "dropped" not in capsys.readouterr().out
    assert solved_after_resume(make_prompts(2)[::-1], "checkpoint.resume=weights") == [0.0, 0.0]
    assert "dropped" in capsys.readouterr().out
    with pytest.raises(ValueError, match="checkpoint.resume=weights"):
        solved_after_resume(make_prompts(2)[::-1])
    for offers in (Offers([1, 0]), Offers(range(2), [(1, 0.5), (1, 1)])):  # as a stage of the same prompts
        with pytest.raises(ValueError, match="other prompts"):
            lifecycle.refuse_other_prompts(folder, make_prompts(2), [offers], make_config())
        lifecycle.resume(folder, None, no_history(2), make_prompts(2), [offers], make_config())
        assert "the optimizer is fresh" in capsys.readouterr().out


def test_a_failed_write_is_an_error_and_earlier_checkpoints_stay(run, monkeypatch):
    save(run, 1)

    def full(*arguments, **options):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(moe_model, "save_hf", full)
        with pytest.raises(RuntimeError, match="step_000002 .*No space left"):
            save(run, 2)
    assert names_in(run.folder) == ["step_000001"]
    save(run, 2)
    save(run, 3)
    assert names_in(run.folder) == ["step_000002", "step_000003"], "checkpoint.keep is 2"


def test_the_next_checkpoint_removes_the_remains_of_a_kill(run, monkeypatch):
    """The kills hit the writing of a checkpoint, and the removal of the oldest checkpoint."""
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


def test_a_launch_frees_the_room_of_a_checkpoint_that_was_killed(tmp_path, one_rank):
    """A disk that the start found large enough would otherwise be too small for the resume."""
    unfinished = tmp_path / "checkpoints" / "step_000003.tmp"
    (unfinished / "model").mkdir(parents=True)
    lock, *_ = lifecycle.open_run_dir(make_config(f"run.dir={tmp_path}"))
    assert not unfinished.exists()
    lock.close()


@pytest.mark.parametrize(
    "row, step, evaluated_step, redone",
    [
        ({"step": 4, "score": 1.0}, 4, 2, False),
        ({"step": 5, "score": 1.0}, 4, 2, True),
        ({"step": 4, "eval/a/accuracy": 1.0}, 4, 2, True),
        ({"step": 4, "eval/a/accuracy": 1.0}, 4, 4, False),
        ({"step": 4, "sample": 0, "completion": "of an evaluation"}, 4, 2, True),
        ({"step": 4, "sample": 0, "completion": "of an evaluation"}, 4, 4, False),
        ({"step": 2, "eval/a/accuracy": 1.0}, 4, 2, False),
        ({"step": 0, "eval/a/accuracy": 1.0}, 0, -1, True),
        ({"step": 0, "eval/a/accuracy": 1.0}, 0, 0, False),
    ],
)
def test_a_row_is_dropped_if_the_resumed_run_writes_it_again(row, step, evaluated_step, redone):
    """A step is evaluated after the checkpoint, so the checkpoint may lack the evaluation."""
    assert is_redone(row, {"step": step, "evaluated_step": evaluated_step}, True) == redone


@pytest.mark.parametrize("every, kept", [(50, True), (41, False)])
def test_the_last_evaluation_of_a_run_that_gets_more_steps_is_lost_only_if_it_is_made_again(every, kept):
    row = {"step": 205, "eval/a/accuracy": 1.0}
    state = {"step": 205, "evaluated_step": 200}
    config = make_config("train.num_steps=300", f"eval.every={every}")
    evaluates = lifecycle.evaluation_is_due(TrainState(**state), config)
    assert is_redone(row, state, evaluates) != kept
    assert is_redone(row | {"step": 206}, state, evaluates)


@pytest.mark.parametrize("resume, num_waiting", [("auto", 1), ("weights", 0)])
def test_rollouts_that_wait_return_at_an_exact_resume(resume, num_waiting, run):
    """Otherwise a fresh optimizer starts a new course, and they are dropped."""
    run.queue.append(Rollout(3, [make_group(0, 1, [2], [True])], {}, Counter(offered=1)))
    save(run, 4)
    config = with_setting(run.config, "checkpoint.resume", resume)
    resumed = SimpleNamespace(**vars(run) | {"run_config": config, "config": config, "queue": deque()})
    lifecycle.restore_waiting(resumed, run.folder / "step_000004")
    assert list(resumed.queue) == list(run.queue)[:num_waiting]
    resumed.queue.clear()
    resumed.prompts = make_prompts(3)
    lifecycle.restore_waiting(resumed, run.folder / "step_000004")
    assert not resumed.queue, "its groups are of other prompts"


def test_random_numbers_continue_after_a_resume(run, monkeypatch):
    torch.manual_seed(5)
    save(run, 1)
    expected = torch.rand(3)
    monkeypatch.setattr(moe_model, "load_optimizer_shard", lambda *_: None)
    lifecycle.load_shard(run.folder / "step_000001" / "rank_00000.pt", run.trainer)
    assert torch.equal(torch.rand(3), expected)


# ---- damage ------------------------------------------------------------------------------------------------
def test_damage_to_any_file_is_named_and_the_previous_checkpoint_can_be_used(run, tmp_path):
    """One case is left out: without state.json, the folder is not a checkpoint."""
    save(run, 1)
    save(run, 2)
    newest = run.folder / "step_000002"
    names = sorted(str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file())
    assert {"state.json", "history.pt", "rank_00000.pt", "model/config.json"} < set(names) and len(names) > 6
    tolerant = with_checkpoint_settings(run.config, on_damage="older")
    intact = shutil.copytree(run.folder, tmp_path / "intact")
    for name in names:
        for damage in DAMAGE:
            if (name, damage) == ("state.json", "removed"):
                continue
            shutil.rmtree(run.folder)
            shutil.copytree(intact, run.folder)
            DAMAGE[damage](run.folder / "step_000002" / name)
            with pytest.raises(ValueError, match="step_000002") as caught:
                find_checkpoint(run.config)
            assert name in str(caught.value) and "step_000001" in str(caught.value), (name, damage)
            folder, record = find_checkpoint(tolerant)
            assert folder.name == "step_000001" and record["state"]["step"] == 1
            assert names_in(run.folder) == ["damaged_step_000002", "step_000001"]
    assert find_checkpoint(run.config)[0].name == "step_000001"


def with_checkpoint_settings(config, **settings):
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=settings)})


def test_ranks_agree_on_the_checkpoint_before_a_damaged_one(run, ranks, monkeypatch):
    """Rank 1 is late: it looks after rank 0 has moved the damaged checkpoint aside, and finds none."""
    save(run, 1)
    save(run, 2)
    (run.folder / "step_000002" / "state.json").write_text("{")
    config = with_checkpoint_settings(run.config, on_damage="older", resume="weights")

    of_rank_0 = checkpoint.list_checkpoints
    look = lambda folder: [] if checkpoint.dist.get_rank() else of_rank_0(folder)  # noqa: E731
    monkeypatch.setattr(checkpoint, "list_checkpoints", look)
    assert ranks(2).run(lambda rank: find_checkpoint(config)[0].name) == ["step_000001", "step_000001"]


def test_a_signal_to_one_rank_stops_all_but_not_after_the_last_step(run, ranks):
    """Otherwise the others would wait for ever in the next collective call."""
    run.config = make_config("train.num_steps=5")

    def stop(rank: int, step: int) -> int | None:
        of_rank = SimpleNamespace(
            config=run.config, state=TrainState(step=step), signals=SimpleNamespace(received=15 * rank)
        )
        reason = lifecycle.stop_reason(of_rank, {})
        return reason and (type(reason), reason.args)

    first, second = ranks(2).run(lambda rank: stop(rank, 3))
    assert first == second and first[0] is Stopped and "SIGTERM after step 3" in first[1][0]
    assert ranks(2).run(lambda rank: stop(rank, 5)) == [None, None]


def test_a_checkpoint_is_set_aside_under_an_unused_name(run):
    tolerant = with_checkpoint_settings(run.config, on_damage="older")
    save(run, 1)
    for _ in range(2):
        save(run, 2)
        (run.folder / "step_000002" / "history.pt").write_bytes(b"")
        assert find_checkpoint(tolerant)[0].name == "step_000001"
    assert names_in(run.folder) == ["damaged_step_000002", "damaged_step_000002_2", "step_000001"]


def test_every_node_reads_a_checkpoint_where_it_mounts_the_folder(run, ranks, tmp_path):
    save(run, 1)
    (tmp_path / "mounted_elsewhere").symlink_to(tmp_path / "run")
    dirs = ("run", "mounted_elsewhere")
    configs = [with_setting(run.config, "run.dir", str(tmp_path / name)) for name in dirs]
    configs = [with_checkpoint_settings(config, resume="weights") for config in configs]
    found = ranks(2).run(lambda rank: find_checkpoint(configs[rank])[0])
    assert found == [tmp_path / name / "checkpoints" / "step_000001" for name in dirs]


def test_a_checkpoint_is_named_step_and_digits_and_the_highest_number_is_the_newest(run):
    save(run, 999999)
    copies = ("step_000004_best", "step_old", "step_12", "step_0000xx", "best")
    for name in copies:
        shutil.copytree(run.folder / "step_999999", run.folder / name)
    save(run, 1000000)
    assert find_checkpoint(run.config)[0].name == "step_1000000"
    save(run, 1000001)
    assert names_in(run.folder) == sorted([*copies, "step_1000000", "step_1000001"]), "checkpoint.keep is 2"


def test_a_broken_line_of_the_metrics_is_skipped_and_named(run, tmp_path, capsys):
    save(run, 2)
    folder = tmp_path / "run"
    rows = [{"step": 1, "score": 1.0}, {"step": 2, "score": 0.5}, {"step": 3, "score": 0.1}]
    lines = [json.dumps(rows[0]), "garbage}", json.dumps(rows[1]), "[]", '{"score": 1}', json.dumps(rows[2])]
    (folder / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"step": 4, "sc\xff')
    prepare_run_dir(folder, run.config, {"state": {"step": 2, "evaluated_step": -1}})
    assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] == rows[:2]
    output = capsys.readouterr().out
    assert [number for number in range(1, 8) if f"line {number}," in output] == [2, 4, 5]
    assert not list(folder.glob("*.partial"))


def test_versions_record_earlier_starts_that_differ(run, tmp_path, monkeypatch):
    """Three starts with the same weights, then two starts with other weights: the record holds both."""
    folder = tmp_path / "run"
    resumed = {"state": {"step": 2, "evaluated_step": -1}}
    folder.mkdir(exist_ok=True)

    dates = map(str, itertools.count())
    rates = ({"model.dtype": {"float32": 50.0 + number}} for number in itertools.count())
    monkeypatch.setattr(checkpoint, "now", lambda: next(dates))
    # A test beside this one may change the checkout for a moment.
    monkeypatch.setattr(checkpoint, "commit_of", lambda: {"commit": "c0ffee", "dirty": False})

    def versions_after_start(record: dict | None) -> dict:
        facts = {"data": {"train": "aa"}, "dtype": "float32", "products": next(rates)}
        prepare_run_dir(folder, run.config, record, facts=facts)
        versions = json.loads((folder / "versions.json").read_text())
        assert (
            int(versions.pop("date")) >= 0 and versions["machine"]["cores"] >= 1 and versions.pop("products")
        )
        for earlier in versions.get("earlier", []):
            del earlier["date"], earlier["products"]
        return versions

    for record in (None, resumed, resumed):
        first = versions_after_start(record)
        assert first.get("earlier", []) == [], first
    monkeypatch.setattr(checkpoint, "digest_of_weights", lambda folder: "other weights")
    versions_after_start(resumed)
    assert versions_after_start(resumed) == first | {"weights": "other weights", "earlier": [first]}
    (folder / "versions.json").write_text('{"torch": ')
    assert versions_after_start(resumed) == first | {"weights": "other weights"}, "a cut file is ignored"


def test_a_resume_keeps_the_digest_of_a_model_of_the_hub(run, tmp_path, monkeypatch):
    """Without a download, because all weights are in the checkpoint."""
    monkeypatch.setattr(checkpoint, "commit_of", lambda: {"commit": "c0ffee", "dirty": False})
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "a.safetensors").write_text("weights")
    config = with_setting(run.config, "model.path", "someone/model")
    versions = []
    for record, models in (
        (None, {"weights": str(cache)}),
        ({"state": {"step": 2, "evaluated_step": -1}}, {}),
    ):
        prepare_run_dir(tmp_path, config, record, models=models)
        versions.append(json.loads((tmp_path / "versions.json").read_text()))
    first, resumed = versions
    assert first["weights"] == resumed["weights"] == checkpoint.digest_of_weights(cache)
    assert "earlier" not in resumed


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_an_interrupted_rewrite_of_the_metrics_loses_no_row(name, run, tmp_path):
    """The partial file is on a full disk; a kill would leave a partial file as well."""
    rows = "".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3))
    (tmp_path / name).write_text(rows)
    (tmp_path / f"{name}.partial").symlink_to("/dev/full")
    with pytest.raises(RuntimeError, match=name):
        prepare_run_dir(tmp_path, run.config, {"state": {"step": 2, "evaluated_step": -1}})
    assert (tmp_path / name).read_text() == rows


class OpensAFile:
    """An object whose pickle calls a function."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["history.pt", "rank_00000.pt"])
def test_code_in_a_pickle_of_a_checkpoint_is_refused(name, run, tmp_path):
    """An attacker can compute the digests of changed files, so digests are no protection."""
    save(run, 1)
    folder, trace = run.folder / "step_000001", tmp_path / "trace"
    torch.save({"optimizer": OpensAFile(trace)}, folder / name)
    with pytest.raises(pickle.UnpicklingError, match="open"):
        lifecycle.resume(folder, run.trainer, run.history, run.prompts, run.stage_offers, run.config)
    assert not trace.exists()
    torch.load(folder / name, weights_only=False)["optimizer"].close()
    assert trace.exists(), "loading without weights_only would run the code"


# ---- full disks and links ----------------------------------------------------------------------------------
def test_a_write_that_fails_inside_torch_save_raises_the_error_of_the_system(tmp_path):
    """A limit on the size of files stands in for a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            checkpoint.HashingWriter().save({"optimizer": torch.zeros(10**6)}, tmp_path / "rank_00000.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_failing_tracker_is_named_once_and_costs_no_step(run, tmp_path, capsys):
    """The other tracker and metrics.jsonl get every step."""
    (tmp_path / "run").mkdir()
    logged = []
    broken = SimpleNamespace(name="mlflow", log=lambda values, step: 1 / 0)
    working = SimpleNamespace(name="other", log=lambda values, step: logged.append((step, values["score"])))
    accelerator = SimpleNamespace(is_main_process=True, trackers=[broken, working])
    for step in (1, 2):
        log_metrics(accelerator, run.config, TrainState(step=step), {"score": step / 2})
    assert logged == [(1, 0.5), (2, 1.0)]
    assert [row["score"] for row in rows_of(tmp_path / "run")] == [0.5, 1.0]
    assert capsys.readouterr().out.count("mlflow") == 1
    writer = SimpleNamespace(add_histogram=lambda *rest: 1 / 0, add_text=lambda *rest: 1 / 0)
    accelerator = SimpleNamespace(
        is_main_process=True, trackers=[SimpleNamespace(name="tensorboard")],
        get_tracker=lambda *names, unwrap: writer,
    )  # fmt: skip
    send_histogram(accelerator, "score", [1.0], 1)
    texts = {"status": "ok", "reward": 1.0, "answer": "4", "prompt": "2 + 2 =", "completion": "4"}
    send_texts(accelerator, [texts], "samples", 1)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "config.yaml"])
def test_a_full_disk_is_an_error_that_names_the_file(name, run, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    partial = ".partial" if name == "config.yaml" else ""  # written beside the file, then renamed
    (folder / f"{name}{partial}").symlink_to("/dev/full")
    accelerator = SimpleNamespace(is_main_process=True, trackers=[])
    batch, state = make_batch([[1, 2]]), TrainState()
    writers = {
        "metrics.jsonl": lambda: log_metrics(accelerator, run.config, state, {"score": 1.0}),
        "samples.jsonl": lambda: append_rows(
            folder / "samples.jsonl", sample_rows(1, batch, build_tokenizer())
        ),
        "config.yaml": lambda: prepare_run_dir(folder, run.config, None),
    }
    with pytest.raises(RuntimeError, match=f"{folder / name} .*No space left"):
        writers[name]()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space"), RuntimeError("No space"), SafetensorError("No space")]
)
def test_a_failed_export_names_its_folder_for_the_errors_of_all_libraries(error):
    with pytest.raises(RuntimeError, match="runs/x/model .*No space.*Free disk"), writing("runs/x/model"):
        raise error


def test_a_file_that_may_not_be_written_is_not_blamed_on_the_disk():
    with (
        pytest.raises(RuntimeError, match="runs/x/model .*denied.*Make it writable"),
        writing("runs/x/model"),
    ):
        raise OSError(errno.EACCES, "Permission denied")


def test_a_folder_source_of_another_program_is_not_replaced(tmp_path):
    (tmp_path / "source").mkdir()
    with pytest.raises(ValueError, match="source is of no run"):
        lock_run_dir(tmp_path)


@pytest.mark.parametrize("name", ["versions.json", "dropped_rows.jsonl"])
def test_a_file_that_a_resume_needs_is_replaced_atomically(name, run, tmp_path):
    file = tmp_path / name
    file.write_text("{}")
    (tmp_path / f"{name}.partial").symlink_to("/dev/full")
    writers = {
        "versions.json": lambda: prepare_run_dir(tmp_path, run.config, record=None),
        "dropped_rows.jsonl": lambda: lifecycle.write_dropped(file, [{"row": 1}]),
    }
    with pytest.raises(RuntimeError, match=name):
        writers[name]()
    assert file.read_text() == "{}"


def test_the_digest_of_weights_depends_on_first_and_last_bytes_size_and_name(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "DIGESTED_BYTES", 4)
    assert checkpoint.digest_of_weights(tmp_path) is checkpoint.digest_of_weights(tmp_path / "no") is None
    file = tmp_path / "a.safetensors"
    digests = []
    for content in ("head..tail", "head..tail", "Head..tail", "head..taiL", "head...tail", "ab"):
        file.write_text(content)
        digests.append(checkpoint.digest_of_weights(tmp_path))
    assert digests[0] == digests[1] and len(set(digests)) == 5
    file.rename(tmp_path / "b.safetensors")
    assert checkpoint.digest_of_weights(tmp_path) not in digests


def test_a_run_that_went_on_with_weights_alone_then_resumes_exactly(run, tmp_path):
    """A job script keeps checkpoint.resume=weights, but only the first launch has another topology."""
    folder = f"run.dir={tmp_path / 'run'}"
    run.config = make_config(folder)
    save(run, 1)
    with_weights = make_config(folder, "checkpoint.resume=weights")
    assert not resumes_exactly(with_weights, run.folder / "step_000001")
    run.config = with_weights
    save(run, 2)
    assert resumes_exactly(with_weights, run.folder / "step_000002")
    other = make_config(folder, "checkpoint.resume=weights", "algorithm.clip_eps_high=0.3")
    assert not resumes_exactly(other, run.folder / "step_000002")


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_the_run(run, tmp_path, monkeypatch):
    """For example on NFS, where a file that is read cannot be deleted."""
    run.config = make_config(f"run.dir={tmp_path / 'run'}", "checkpoint.keep=1")
    save(run, 1)

    def fail(folder, ignore_errors=False):
        if not ignore_errors:
            raise OSError(39, "Directory not empty")

    monkeypatch.setattr(shutil, "rmtree", fail)
    save(run, 2)
    assert (run.folder / "step_000002" / "state.json").is_file()


def test_a_resume_with_changed_weights_of_a_judge_is_refused(tmp_path, one_rank, capsys):
    (tmp_path / "a.safetensors").write_text("old")
    digest = lifecycle.same_digest(make_config(), "reward.judge_path", tmp_path, None)
    assert lifecycle.same_digest(make_config(), "reward.judge_path", tmp_path, digest) == digest
    (tmp_path / "a.safetensors").write_text("new")
    with pytest.raises(ValueError, match=r"reward\.judge_path: the weights in"):
        lifecycle.same_digest(make_config(), "reward.judge_path", tmp_path, digest)
    with_weights = make_config("checkpoint.resume=weights")
    assert lifecycle.same_digest(with_weights, "reward.judge_path", tmp_path, digest) != digest
    assert "reward.judge_path: the weights" in capsys.readouterr().out
    assert lifecycle.same_digest(make_config(), "reward.judge_path", tmp_path / "none", None) is None


def test_a_resume_with_a_changed_reference_is_refused(run, tmp_path, one_rank):
    """The reference of the KL penalty is loaded from model.path at every launch."""
    settings = [f"model.path={tmp_path / 'model'}", "algorithm.kl_coef=0.1"]
    state = TrainState()
    for _ in range(2):
        lifecycle.check_fixed_models(make_config(*settings), state)
    (file,) = (tmp_path / "model").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"model\.path: the weights in"):
        lifecycle.check_fixed_models(make_config(*settings), state)
    for other in ("algorithm.kl_coef=0", "checkpoint.resume=weights"):
        lifecycle.check_fixed_models(make_config(*settings, other), state)
    saved = asdict(state)
    del saved["reference"]  # a checkpoint of an earlier version
    lifecycle.check_fixed_models(make_config(*settings), TrainState(**saved))


def test_a_resume_with_a_changed_plugin_is_refused(run, tmp_path):
    """The digest of the file is in the checkpoint and in versions.json; weights alone may continue."""
    file = tmp_path / "mine.py"
    file.write_text("def gain(inputs): return inputs.ratio * inputs.advantages, {}\n")
    settings = [f"run.dir={tmp_path / 'run'}", f"algorithm.gain={file}:gain"]
    run.config = make_config(*settings)
    save(run, 1)
    checkpoint = run.folder / "step_000001"
    record = json.loads((checkpoint / "state.json").read_text())
    assert list(record["plugins"]) == [f"{file}:gain"]
    check_fits(run.config, checkpoint, record)
    file.write_text("def gain(inputs): return inputs.ratio * inputs.advantages * 2, {}\n")
    DIGESTS.clear()  # as in a new process
    with pytest.raises(ValueError, match="mine.py"):
        check_fits(run.config, checkpoint, record)
    check_fits(make_config(*settings, "checkpoint.resume=weights"), checkpoint, record)


def test_a_resume_without_the_reward_function_of_an_evaluation_is_accepted(run, tmp_path):
    """data.eval is free on resume; the functions of data.train are not."""
    file = tmp_path / "mine.py"
    file.write_text("def score(completion): return 1.0\n")
    own = f"data.eval=[{{path: y.jsonl, kind: {file}:score}}]"
    run.config = make_config(f"run.dir={tmp_path / 'run'}", own)
    save(run, 1)
    record = json.loads((run.folder / "step_000001" / "state.json").read_text())
    assert list(record["plugins"]) == [f"{file}:score"]
    check_fits(make_config(f"run.dir={tmp_path / 'run'}"), run.folder / "step_000001", record)


def test_every_file_of_the_user_is_recorded(tmp_path, monkeypatch):
    """Plug-ins, reward functions, tools and environments, of stages as well; but no modules."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def gain(inputs): return inputs.ratio * inputs.advantages, {}\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "mine.py").write_text("def short(completion): return 1.0\n")
    (tmp_path / "exp.yaml").write_text(
        "data: {train: [{path: x.jsonl, kind: {math: 0.5, more/mine.py:short: 0.5}}], environment: g.py:Go, "
        "tools: [verifiers.tools:python, t.py:add]}\nreward: {functions: [other.py:score, mine.py:gain]}\n"
        "stages: [{name: a, until: {steps: 1}}, {name: b, algorithm: {gain: 'mine.py:gain'}}]\n"
    )
    digests = user_file_digests(load_config(["--config", "exp.yaml"]))
    own = "more/mine.py:short"
    assert digests.keys() == {own, "other.py:score", "mine.py:gain", "t.py:add", "g.py:Go"}
    expected = hashlib.sha256((tmp_path / "more" / "mine.py").read_bytes()).hexdigest()[:16]
    assert (digests[own], digests["t.py:add"]) == (expected, None)  # no such file
    checkpoint.save_source(tmp_path / "source", map(file_of, digests))
    copies = {file.name: file.read_text() for file in (tmp_path / "source").glob("*mine.py")}
    assert copies.keys() == {"mine.py", f"{expected}_mine.py"}
    assert "short" in copies[f"{expected}_mine.py"] and "gain" in copies["mine.py"]
