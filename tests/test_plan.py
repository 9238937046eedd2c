"""The planner: counts against transformers, arithmetic against loops, and the committed files."""

import ctypes
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from fake_cuda import FakeCuda
from fake_ranks import FakeRanks
from helpers import EMPTY_ACCOUNT
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3Config, Qwen3MoeConfig

import lifecycle
import memory_plan
import moe_model
from configure import load_config
from experiments import plan
from runtime import summary
from runtime.checkpoint import TrainState
from runtime.memory import (
    CONTEXT_BYTES,
    GIB,
    STANDING,
    NodeMemory,
    bytes_by_phase,
    fixed_segments,
    free_memory,
    node_memory,
    planned_rows,
    return_freed_memory,
    trainer_bytes,
    why_too_small,
)

CONFIGS = sorted((ROOT / "experiments" / "models").glob("*.yaml"))
PUBLISHED = {  # parameters according to the safetensors of the model cards, a tied head counted once
    "Qwen3-0.6B": 596_049_920, "Qwen3-4B": 4_022_468_096, "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264, "Qwen3-30B-A3B": 30_532_122_624, "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen2.5-0.5B-Instruct": 494_032_768, "Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-3B": 3_085_938_688,
    "granite-3.1-1b-a400m-instruct": 1_334_628_352, "granite-3.1-3b-a800m-instruct": 3_298_793_472,
}  # fmt: skip


def make_task(
    *settings: str, model="Qwen3-30B-A3B", gpus=8, machine="h100", prompts=200, new=2000
) -> plan.Task:
    """Describe a run of a known model; settings as on the command line."""
    config = load_config(["data.train=[{path: unused}]", f"model.path={model}", *settings])
    return plan.Task(config, plan.model_config(model), plan.MACHINES[machine], gpus, prompts, new)


def test_a_plan_for_gpus_resolves_the_dtype_by_the_gpu(monkeypatch):
    monkeypatch.setattr(moe_model, "product_rates", lambda rows: {"float32": 1.0, "bfloat16": 1.0})
    assert make_task() == make_task("model.dtype=bfloat16", "rollout.dtype=bfloat16")
    assert make_task().parts["weights"] * 2 == make_task("model.dtype=float32").parts["weights"]


FITTING = (
    "model.ep_size=8", "model.activation_checkpointing=true", "rollout.tensor_parallel=8",
    "rollout.sleep_level=2", "train.micro_batch_tokens=8192", "rollout.max_new_tokens=8192",
)  # fmt: skip


# ---- parameters --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PUBLISHED)
def test_known_shapes_have_the_published_number_of_parameters(name):
    assert sum(moe_model.parameter_counts(plan.model_config(name))) == PUBLISHED[name]


@pytest.mark.parametrize(
    "name", ["Qwen3-0.6B", "Qwen3-30B-A3B", "Qwen2.5-0.5B", "granite-3.1-1b-a400m-instruct"]
)
def test_counts_equal_the_model_of_transformers(name):
    task = make_task(model=name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(task.model)
    experts = embeddings = dense = 0
    for key, parameter in model.named_parameters():
        if ".experts." in key:
            experts += parameter.numel()
        elif "embed_tokens" in key or "lm_head" in key:
            embeddings += parameter.numel()
        else:
            dense += parameter.numel()
    head = task.model.vocab_size * task.model.hidden_size  # a token reads one row of the other matrix
    active_experts = experts * 8 // max(1, moe_model.num_experts_of(task.model))
    assert task.counts == (experts, embeddings, dense) and task.active == active_experts + dense + head


# ---- memory ------------------------------------------------------------------------------------------------
def small_config(kind: str, layers: int):
    sizes = dict(
        vocab_size=64, hidden_size=96, intermediate_size=80, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    if kind == "dense":
        return Qwen3Config(**sizes)
    return Qwen3MoeConfig(
        **sizes, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=72, norm_topk_prob=True
    )


def saved_bytes(kind: str, layers: int, dtype: torch.dtype, rows: int, length: int, prompt=1, share=False):
    """Add up the storages that a forward pass of rows of prompt + length tokens saves, without parameters."""
    torch.set_default_dtype(dtype)
    policy = moe_model.Policy(small_config(kind, layers))
    torch.set_default_dtype(torch.float32)
    parameters = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    saved = {}

    def save(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    packed = moe_model.pack([[1] * prompt] * rows, [[2] * length] * rows, "cpu", share)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        outputs = policy(packed)
    del outputs
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_bytes_that_a_layer_saves_for_the_backward_pass(kind, dtype, monkeypatch):
    monkeypatch.setattr(moe_model, "ROW_BLOCK", 1)  # the plan leaves out padded rows
    rows, length = 4, 64
    one, two = (saved_bytes(kind, layers, dtype, rows, length) for layers in (1, 2))
    per_token = memory_plan.saved_bytes_per_token(small_config(kind, 1), 0, dtype.itemsize, on_gpu=False)
    assert (two - one) / (rows * length) == pytest.approx(per_token, abs=2), "except for offsets of experts"


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_bytes_that_a_layer_saves_with_shared_prompts(kind, monkeypatch):
    """Four rows share a prompt of 33 tokens: 3 x 32 tokens are computed by attention only."""
    monkeypatch.setattr(moe_model, "ROW_BLOCK", 1)  # the plan leaves out padded rows
    config = small_config(kind, 1)
    one, two = (saved_bytes(kind, layers, torch.bfloat16, 4, 32, 33, True) for layers in (1, 2))
    per_token = memory_plan.saved_bytes_per_token(config, 0, 2, False)
    attention = memory_plan.grid_bytes_per_token(config, 2, on_gpu=False)
    expected = 4 * 64 * per_token - 3 * 32 * (per_token - attention)
    assert two - one == pytest.approx(expected, abs=2 * 4 * 64)
    settings = load_config(["data.train=[{path: unused}]", "model.dtype=bfloat16"]).model
    planned = [
        memory_plan.passing_bytes(small_config(kind, layers), settings, 4 * 64, "cpu", 3 * 32)["activations"]
        for layers in (1, 2)
    ]
    assert planned[1] - planned[0] == expected


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_permanent_memory_is_counted_by_parameter(zero_stage):
    """EP 8 on 16 GPUs: a rank holds an eighth of the experts; 2 ranks share the optimizer state of an expert,
    and 16 ranks share the state of all other parameters."""
    expected = dict.fromkeys((*STANDING[:4], "gradients in an update"), 0)
    with torch.device("meta"):
        policy = moe_model.Policy(plan.model_config("Qwen3-30B-A3B"))
    for name, parameter in policy.named_parameters():
        held = parameter.numel() / (8 if ".experts." in name else 1)
        share = held / (2 if ".experts." in name else 16)
        expected["weights"] += 2 * held
        expected["gradients"] += 4 * held * (zero_stage == 1)
        expected["gradients in an update"] += 4 * share * (zero_stage == 2)
        expected["master weights"] += 4 * share
        expected["AdamW"] += 8 * share
    parts = make_task("model.ep_size=8", f"train.zero_stage={zero_stage}", gpus=16).parts
    assert {name: parts[name] for name in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "dtype, zero_stage, held", [("float32", 1, 0), ("bfloat16", 1, 1), ("float32", 2, 0)]
)
def test_only_bfloat16_under_zero_1_holds_gradients_between_updates(dtype, zero_stage, held):
    parts = make_task(f"model.dtype={dtype}", f"train.zero_stage={zero_stage}", model="Qwen3-0.6B").parts
    sums = {"gradients": held * 4 * 596_049_920, "gradients in an update": (1 - held) * 4 * 596_049_920}
    if zero_stage == 2:
        sums["gradients in an update"] //= 8
    assert {name: parts[name] for name in sums} == sums


def test_a_micro_batch_holds_at_least_one_row():
    limits = ("rollout.max_prompt_tokens=1000", "rollout.max_new_tokens=7000")
    activations = {
        tokens: make_task(*limits, f"train.micro_batch_tokens={tokens}").parts["activations"]
        for tokens in (2000, 8000, 16000)
    }
    assert activations[2000] == activations[8000] == activations[16000] / 2


def test_memory_of_a_reference_model_and_of_a_sync():
    plain = make_task("model.ep_size=8")
    with_reference = make_task("model.ep_size=8", "algorithm.kl_coef=0.1")
    assert plain.parts["reference"] == 0 and with_reference.parts["reference"] == plain.parts["weights"]
    parallel = make_task("model.ep_size=8", "rollout.tensor_parallel=8", "rollout.expert_parallel=true")
    layer = 128 * 3 * 768 * 2048 * 2
    buffers = [task.parts["sync buffers"] for task in (plain, parallel)]
    assert buffers == [layer + layer * 2 // 3, layer // 8]


PARTS = {
    "weights": 10, "gradients": 20, "master weights": 5, "AdamW": 6, "reference": 0, "activations": 8,
    "gradients in an update": 0, "on the way back": 2, "optimizer step": 7, "sync buffers": 3,
    "recomputed layer": 0,
    "engine weights": 11, "engine workspace": 1, "KV cache": 30,
}  # fmt: skip


def test_phases_share_a_gpu():
    """A sleeping engine frees all memory in an update, and the KV cache in a sync."""
    standing = 10 + 20 + 5 + 6 + 1 + CONTEXT_BYTES
    summed = PARTS | {"gradients in an update": 100}  # ZeRO 2: until the optimizer step
    for parts, gradients in ((PARTS, 0), (summed, 100)):
        for sleeps, weights, engine in ((True, 0, 11), (False, 41, 41)):
            phases = bytes_by_phase(parts, sleeps)
            assert {name: value - standing for name, value in phases.items()} == {
                "rollout": 41, "update": weights + gradients + 10,
                "optimizer step": weights + gradients + 7, "sync": engine + 3,
            }  # fmt: skip
    assert trainer_bytes(summed, True) == 41 + CONTEXT_BYTES
    assert trainer_bytes(summed, False) == 41 + 100 + 10 + CONTEXT_BYTES
    assert trainer_bytes(PARTS | {"optimizer step": 12}, False) == 41 + 12 + CONTEXT_BYTES
    gpu = {"communicators": 1000, "error of activations": 400}  # not estimated on CPUs
    assert trainer_bytes(PARTS | gpu, True) == 41 + 1000 + CONTEXT_BYTES
    assert trainer_bytes(PARTS | gpu, False) == 41 + 1000 + 400 + 10 + CONTEXT_BYTES


LARGE = PARTS | {"activations": 10**12}


@pytest.mark.parametrize(
    "parts, total, needed, sleeps, words",
    [
        (PARTS, 41 + 1 + 41, 30, True, ""),
        (PARTS, 41 + 1 + 41 - 1, 30, True, "phase rollout"),
        (PARTS, 41 + 1 + 41, 30, False, "phase update"),
        (PARTS, 41 + 1 + 41, 31, True, "phase rollout"),  # the KV cache is too small for one completion
        (PARTS, 41 + 1 + 60, 31, True, "KV cache"),
        (LARGE, 0, 30, True, "phase update"),
    ],
)
def test_the_phase_that_does_not_fit_is_named(parts, total, needed, sleeps, words):
    margin = 4 * GIB  # more than 5 % of this GPU
    reason = why_too_small(parts, sleeps, total + CONTEXT_BYTES + margin, needed)
    assert (reason is None) if not words else (words in reason)
    assert not (parts is LARGE and "KV cache" in reason), "a sleeping engine has no KV cache"


# ---- measured peaks beside the plan ----
@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize(
    "changes",
    [{}, {"gradients": 0, "gradients in an update": 20}, {"activations": 5, "recomputed layer": 3},
     {"reference": 10, "on the way back": 40, "communicators": 5}],
)  # fmt: skip
def test_a_run_that_takes_its_planned_memory_measures_the_rows_of_the_plan(changes, sleeps, monkeypatch):
    parts = PARTS | changes
    cuda = FakeCuda(parts, sleeps).install(monkeypatch)
    meter = cuda.run(num_steps=2)
    planned = planned_rows(parts, sleeps)
    assert {row: meter.largest[row] for row in planned} == planned
    cuda = FakeCuda(parts | {"activations": 100}, sleeps).install(monkeypatch)
    measured = cuda.run(num_steps=2).largest
    higher = {row for row in planned if measured[row] > planned[row]}
    assert higher == {"activations", "trainer in update", "GPU in update"}


def test_a_run_on_a_gpu_ends_with_measured_peaks_beside_the_plan(tmp_path, monkeypatch, capsys):
    settings = ("train.zero_stage=2", "rollout.max_new_tokens=1024", "rollout.kv_cache_gib=4")
    task = make_task(*FITTING, *settings)
    parts, _ = memory_plan.plan_memory(task.config, task.model, 64, 80 * GIB)
    FakeRanks(64).install(monkeypatch)
    others = [{}] * 63
    monkeypatch.setattr(
        dist, "all_gather_object", lambda gathered, item: gathered.__setitem__(slice(64), [*others, item])
    )
    meter = FakeCuda(parts | {"sync buffers": 9 * GIB}, True, 80 * GIB).install(monkeypatch).run(num_steps=2)
    del meter.largest["freed by sleep"]
    line = memory_plan.check_memory(task.config, task.model, 64, node=None)
    policy = SimpleNamespace(config=task.model)
    memory = lifecycle.gpu_memory(SimpleNamespace(meter=meter, stage_configs=[task.config], policy=policy))
    (tmp_path / "metrics.jsonl").write_text("")
    summary.write_summary(tmp_path, TrainState(account=EMPTY_ACCOUNT), memory)
    rows = json.loads((tmp_path / "summary.json").read_text())["gpu_memory"]
    summary.print_summary(tmp_path)
    printed = capsys.readouterr().out
    for row, num_bytes in planned_rows(parts, True).items():
        planned = f"{num_bytes / GIB:.2f}"
        assert rows[row]["planned"] == num_bytes and f"{row} {planned}" in line
        assert re.search(rf"{row} +{planned} .* planned", printed)
    assert "weights 9.62" in line and rows["freed by sleep"]["measured"] is None
    assert re.search("freed by sleep.*not measured", printed)
    assert rows["trainer in sync"]["measured"] - rows["trainer between updates"]["planned"] == 9 * GIB


def test_plan_and_engine_divide_a_gpu_alike():
    task = make_task(*FITTING, machine="h200")
    total = int(task.machine.memory_gib * GIB)
    trainer = trainer_bytes(task.parts, engine_sleeps=True)
    limit = task.config.rollout.max_prompt_tokens + task.config.rollout.max_new_tokens
    share = memory_plan.memory_share(task.model, task.config.rollout, limit, trainer, total, total)
    engine = sum(task.parts[name] for name in ("engine weights", "engine workspace", "KV cache"))
    assert engine == pytest.approx(share * total, abs=2)
    assert task.with_settings({"rollout.kv_cache_gib": 2.0}).parts["KV cache"] == 2 * GIB


@pytest.mark.parametrize(
    "model, gpus, ep_size, parallel, expected",
    [
        ("Qwen3-0.6B", 1, 1, 1, 0),
        ("Qwen3-8B", 8, 1, 1, 2),  # all ranks, twice
        ("Qwen3-8B", 8, 1, 2, 3),  # and vLLM's tensor-parallel group
        ("Qwen3-30B-A3B", 8, 8, 8, 5),  # and the expert-parallel groups of DeepSpeed and of vLLM
        ("Qwen3-30B-A3B", 32, 8, 4, 6),  # and the four ranks that hold the same experts
        ("Qwen3-30B-A3B", 8, 1, 1, 3),  # all ranks hold the same experts
    ],
)
def test_every_group_of_several_ranks_has_a_communicator(model, gpus, ep_size, parallel, expected):
    task = make_task(
        f"model.ep_size={ep_size}", f"rollout.tensor_parallel={parallel}", model=model, gpus=gpus
    )
    assert task.parts["communicators"] == expected * GIB / 2


def test_rounded_weights_of_a_sync_are_counted():
    """rollout.fp8 simulate sends float32, 4 bytes for each value of the experts of a layer."""
    plain = make_task("model.ep_size=8")
    rounded = plain.with_settings({"rollout.fp8": "simulate"})
    assert rounded.parts["sync buffers"] - plain.parts["sync buffers"] == 128 * 3 * 768 * 2048 * 4


def test_an_engine_sleeps_by_default_on_gpus_only(monkeypatch, capsys):
    FakeRanks(1).install(monkeypatch)
    config = load_config(["data.train=[{path: unused}]"])
    awake = memory_plan.with_setting(config, "rollout.sleep_level", 0)
    assert lifecycle.with_sleep(config).rollout.sleep_level == 0 and capsys.readouterr().out == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert lifecycle.with_sleep(config).rollout.sleep_level == 2 and "sleep_level" in capsys.readouterr().out
    assert lifecycle.with_sleep(awake) == awake and capsys.readouterr().out == ""
    assert make_task() == make_task("rollout.sleep_level=2") != make_task("rollout.sleep_level=0")


@pytest.mark.parametrize("choice", [None, "True", "False"])
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_of_gpu_memory_are_fixed_while_an_engine_starts(name, choice, monkeypatch):
    """vLLM reads the variable and would switch expandable segments on again after its first pool."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    text = f"max_split_size_mb:512,expandable_segments:{choice}"
    if choice is not None:
        monkeypatch.setenv(name, text)
    with fixed_segments():
        calls.append("start")
        assert "expandable_segments:True" not in os.environ.get(name, "")
    assert os.environ.get(name) == (text if choice else None)
    around = ["expandable_segments:False", "start", "expandable_segments:True"]
    assert calls == (["start"] if choice == "False" else around)


def test_the_trainer_refuses_a_run_that_the_planner_refuses(monkeypatch):
    task = make_task("model.ep_size=8", "rollout.sleep_level=2", "rollout.tensor_parallel=8")
    total = int(task.machine.memory_gib * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total, total))
    with pytest.raises(ValueError) as error:
        memory_plan.check_memory(task.config, task.model, num_ranks=8, node=None)
    assert plan.why_not(task) in str(error.value) and "--gpus 8" in str(error.value)
    fitting = make_task(*FITTING, "rollout.max_new_tokens=1024", "train.zero_stage=2")
    memory_plan.check_memory(fitting.config, fitting.model, num_ranks=64, node=None)
    warnings = []
    monkeypatch.setattr(memory_plan, "say", warnings.append)
    fixed = task.with_settings({"rollout.kv_cache_gib": 5.0})
    memory_plan.check_memory(fixed.config, fixed.model, num_ranks=8, node=None)
    assert len(warnings) == 1 and plan.why_not(fixed) in warnings[0]


# ---- ranks that share the memory of a node with CPUs ----
UPCYCLED = MixtralConfig(  # four copies of SmolLM2-135M's MLPs, 373 M parameters
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=True,
)  # fmt: skip


def host_config(*settings: str):
    """Return the settings of the measured run of UPCYCLED."""
    return load_config([
        "data.train=[{path: unused}]", "model.ep_size=2", "model.dtype=float32", "rollout.dtype=bfloat16",
        "rollout.max_prompt_tokens=128", "rollout.max_new_tokens=96", "rollout.kv_cache_gib=0.25", *settings,
    ])  # fmt: skip


def fake_node(gib: float) -> NodeMemory:
    return NodeMemory(int(gib * GIB), num_ranks=2, source="fake")


@pytest.mark.parametrize("kv_cache_gib, measured_gib", [(0.25, 19.64), (1.0, 21.03)])
def test_the_estimate_on_cpus_is_within_a_tenth_of_measured_runs(kv_cache_gib, measured_gib):
    """Resident memory of two ranks and their reward workers, in micro-batches of 1,024 tokens."""
    config = host_config("train.micro_batch_tokens=1024", f"rollout.kv_cache_gib={kv_cache_gib}")
    estimate = 2 * max(memory_plan.host_bytes_by_phase(config, UPCYCLED, num_ranks=2).values())
    assert estimate / GIB == pytest.approx(measured_gib, rel=0.1)


@pytest.mark.parametrize("gib, tokens", [(40, 4096), (30, 2048), (22, 1024), (18, 512), (4, 512)])
def test_a_micro_batch_is_the_largest_that_fits(gib, tokens):
    assert memory_plan.choose_micro_batch(host_config(), UPCYCLED, 2, fake_node(gib)) == tokens


@pytest.mark.parametrize("gib, num_advices", [(22, 2), (17, 2), (16.5, 1)])
def test_a_run_that_cannot_fit_is_refused_with_settings_that_fit(gib, num_advices):
    config = host_config("train.micro_batch_tokens=4096")
    with pytest.raises(ValueError, match="phase update .*fake") as error:
        memory_plan.check_memory(config, UPCYCLED, 2, fake_node(gib))
    advices = re.search(r"; set (.*?)\. ", str(error.value))[1].split(" or ")
    assert len(advices) == num_advices
    for advice in advices:
        changed = host_config("train.micro_batch_tokens=4096", *advice.split())
        line = memory_plan.check_memory(changed, UPCYCLED, 2, fake_node(gib))
        assert "warning" not in line and "GiB a rank" in line


def test_between_the_estimate_and_its_error_a_run_gets_a_warning():
    config = host_config("train.micro_batch_tokens=1024")
    needed = 2 * max(memory_plan.host_bytes_by_phase(config, UPCYCLED, 2).values()) / GIB
    assert "warning" not in memory_plan.check_memory(config, UPCYCLED, 2, fake_node(needed * 1.001))
    line = memory_plan.check_memory(config, UPCYCLED, 2, fake_node(needed / 1.14))
    assert line.startswith("warning") and "train.micro_batch_tokens=512" in line
    with pytest.raises(ValueError, match="run.memory_gib"):
        memory_plan.check_memory(config, UPCYCLED, 2, fake_node(needed / 1.16))


def test_the_node_with_the_least_memory_per_rank_decides(monkeypatch):
    fake = FakeRanks(3).install(monkeypatch)
    rooms = [9, 8, 30]  # GiB of the nodes
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    nodes = fake.run(lambda rank: node_memory(rooms[rank]))
    assert nodes == [NodeMemory(8 * GIB, 4, "run.memory_gib")] * 3


V2_LINE = "0::/a/job\n"
V1_LINES = "5:cpu:/\n4:memory:/a/job\n0::/\n"


@pytest.mark.parametrize(
    "lines, top, names",
    [
        (V2_LINE, "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")),
        (V1_LINES, "sys/fs/cgroup/memory",
         ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)  # fmt: skip
def test_the_limit_of_a_parent_control_group_counts(lines, top, names, tmp_path):
    """The group itself has no limit; its parent has 1,000 bytes, of which 300 are used and 50 page cache."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)
    assert free_memory(tmp_path)[1] == "MemAvailable", "the groups are invisible"
    for folder, limit in (("a", "1000"), ("a/job", "max")):
        (tmp_path / top / folder).mkdir(parents=True)
        for name, text in zip((*names[:2], "memory.stat"), (limit, "300", f"anon 7\n{names[2]} 50\n")):
            (tmp_path / top / folder / name).write_text(text)
    assert free_memory(tmp_path) == (1000 - 300 + 50, f"the limit of control group {tmp_path / top / 'a'}")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_gaps_between_used_blocks_are_given_back_if_memory_is_short(monkeypatch):
    """Of 4,000 blocks of 64 KiB, 250 MiB in all, every eighth block stays in use."""
    process = psutil.Process()
    blocks = [b"x" * 2**16 for _ in range(4000)]
    used = blocks[::8]
    del blocks
    before = process.memory_info().rss
    total = psutil.virtual_memory().total
    monkeypatch.setattr("runtime.memory.free_memory", lambda: (0.3 * total, ""))
    return_freed_memory()
    assert before - process.memory_info().rss < 50 * 2**20, "memory is plentiful"
    monkeypatch.setattr("runtime.memory.free_memory", lambda: (0.2 * total, ""))
    return_freed_memory()
    assert before - process.memory_info().rss > 150 * 2**20 and len(used) == 500


@pytest.mark.parametrize("block_size, tokens, num_blocks", [(128, 224, 3), (128, 128, 2), (16, 17, 3)])
def test_a_kv_cache_for_less_than_one_completion_is_refused(block_size, tokens, num_blocks):
    """Blocks of 30 layers x 3 heads x 64 keys and values of 2 bytes; vLLM keeps one block for itself."""
    smallest = num_blocks * block_size * 30 * 3 * 64 * 2 * 2 / GIB
    settings = host_config().rollout
    exact = settings.model_copy(update={"kv_cache_gib": smallest})
    memory_plan.check_kv_cache(UPCYCLED, exact, tokens, block_size)
    with pytest.raises(ValueError, match="rollout.kv_cache_gib") as error:
        memory_plan.check_kv_cache(
            UPCYCLED, settings.model_copy(update={"kv_cache_gib": 0.99 * smallest}), tokens, block_size
        )
    advised = float(re.search("set it to ([0-9.]+)", str(error.value))[1])
    assert smallest <= advised < smallest + 2e-4


@pytest.mark.parametrize("num_seqs, expected", [(4, 4 * 8 * 32 * 23040), (256, GIB)])
def test_the_default_kv_cache_of_a_cpu_is_bounded(num_seqs, expected, monkeypatch):
    """A completion of 224 tokens takes seven blocks of 32, and vLLM keeps one for itself."""
    settings = host_config("rollout.kv_cache_gib=null", f"rollout.max_num_seqs={num_seqs}").rollout
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert memory_plan.engine_settings(settings, UPCYCLED, 224).kv_cache_gib * GIB == expected
    assert memory_plan.engine_settings(host_config().rollout, UPCYCLED, 224).kv_cache_gib == 0.25
    for gib in ("0", "0.5"):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", gib)
        with pytest.raises(ValueError, match=f"VLLM_CPU_KVCACHE_SPACE is '{gib}'"):
            memory_plan.engine_settings(settings, UPCYCLED, 224)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert memory_plan.engine_settings(settings, UPCYCLED, 224).kv_cache_gib is None


# ---- an optimizer on the host ----
OFFLOAD = ("train.zero_stage=2", "train.offload_optimizer=true")


def test_an_offloaded_optimizer_by_hand():
    """Qwen3-30B-A3B on 8 GPUs: 3.624 and 0.193 billion parameters a rank, four bytes and two pinned."""
    task = make_task(*FITTING, *OFFLOAD)
    pinned = 2 * (2**34 + 2**30) + 2**33 + 2**29  # 14.5 and 0.8 GB of float32, twice, and half of them
    expected = pinned + 8 * (task.counts.experts // 8 + (sum(task.counts) - task.counts.experts) // 8)
    host = plan.host_memory(task)
    assert host["offloaded optimizer"] == expected
    assert host["checkpoint"] == pytest.approx(12 * 30_532_122_624 / 8, rel=1e-6), "read by a resumed run"
    assert plan.host_memory(make_task(*FITTING))["offloaded optimizer"] == 0
    assert task.parts["master weights"] == task.parts["AdamW"] == 0
    assert task.parts["gradients in an update"] == 4 * task.owned, "the GPU sums gradients"


def test_a_host_that_is_too_small_is_named():
    task = make_task(*FITTING, *OFFLOAD)
    gib = plan.node_bytes(task) / GIB
    small, large = (
        plan.why_not(plan.replace(task, machine=plan.replace(task.machine, host_gib=gib + more)))
        for more in (-1, 1)
    )
    assert large is None and "host" in small and f"{gib:.0f}" in small
    assert plan.node_bytes(make_task(*FITTING, gpus=16)) < 8 * sum(plan.host_memory(task).values())


# ---- shared prompts ----
@pytest.mark.parametrize("tokens, together", [(32768, 8), (8800, 4), (1000, 1)])
def test_a_micro_batch_computes_a_shared_prompt_once(tokens, together):
    """Groups of 8 rows of 1,200 + 1,000 tokens: a micro-batch holds a group, half a group, or a row."""
    settings = ("rollout.prompts_per_step=16", f"train.micro_batch_tokens={tokens}", "model.ep_size=8")
    shared, separate = (
        make_task(*settings, f"train.share_prompts={share}", prompts=1200, new=1000)
        for share in ("true", "false")
    )
    computed = 0
    for _ in range(16 * 8 // together // 8):  # micro-batches of a rank
        computed += 1200 + together * 1000
    assert shared.trained_tokens == computed and separate.trained_tokens == separate.grid_tokens == 16 * 2200
    assert shared.grid_tokens == separate.grid_tokens
    sent, sent_separate = (plan.wire_bytes(task)["all-to-all"] for task in (shared, separate))
    assert sent == pytest.approx(sent_separate * computed / 35200)
    assert shared.parts == separate.parts, "the largest micro-batch may have short prompts only"


# ---- bytes over the wire -----------------------------------------------------------------------------------
def ring_all_reduce(num_bytes: float, ranks: int) -> float:
    """Count the bytes that a rank sends: ranks - 1 parts to reduce, and as many to spread the result."""
    return sum(num_bytes / ranks for _ in range(ranks - 1)) * 2


@pytest.mark.parametrize("ep_size", [1, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_wire_bytes_equal_a_loop(ep_size, checkpointing):
    task = make_task(
        f"model.ep_size={ep_size}", f"model.activation_checkpointing={checkpointing}".lower(),
        "rollout.prompts_per_step=16", "rollout.group_size=4", "train.minibatches_per_step=2", gpus=8,
    )  # fmt: skip
    num_bytes = plan.wire_bytes(task)
    experts, embeddings, dense = task.counts
    sent = 0.0
    for _ in range(48):  # layers
        for _ in range(3 + checkpointing):  # old log-probabilities, forward, backward, recomputation
            for rank in range(ep_size):  # tokens travel to the experts of other ranks and back
                sent += 2 * (16 * 4 * 2200 / 8) * 8 * 2048 * 2 / ep_size * (rank != 0)
    assert num_bytes["all-to-all"] == pytest.approx(sent)
    reduced = ring_all_reduce(2 * (embeddings + dense), 8)
    reduced += ring_all_reduce(2 * experts / ep_size, 8 // ep_size)
    assert num_bytes["gradients"] == pytest.approx(2 * reduced), "two updates"
    assert num_bytes["updated weights"] == pytest.approx(reduced), "an all-gather is half of an all-reduce"


@pytest.mark.parametrize("tokens, micro_batches", [(8192, 3), (1024, 8)])  # a row of 2,200 tokens is alone
def test_zero_2_reduces_after_every_micro_batch(tokens, micro_batches):
    settings = ("model.ep_size=8", "rollout.prompts_per_step=8", "rollout.group_size=8")
    zero_1 = plan.wire_bytes(make_task(*settings))
    zero_2 = plan.wire_bytes(make_task(*settings, "train.zero_stage=2", f"train.micro_batch_tokens={tokens}"))
    assert zero_2["gradients"] == pytest.approx(micro_batches * zero_1["gradients"])
    assert zero_2["updated weights"] == zero_1["updated weights"]


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_sync_bytes_equal_a_loop_over_tensors(expert_parallel):
    options = ["rollout.expert_parallel=true"] if expert_parallel else []
    task = make_task("model.ep_size=8", "rollout.tensor_parallel=8", *options)
    with torch.device("meta"):
        policy = moe_model.Policy(task.model)
    wire = loaded = 0
    for name, parameter in policy.named_parameters():
        size = 2 * parameter.numel()
        is_expert = ".experts." in name
        wire += size - size // 8 if is_expert and not expert_parallel else 0
        loaded += size // 8 if is_expert and expert_parallel else size
    num_bytes = plan.sync_bytes(task)
    assert (num_bytes["over the wire"], num_bytes["handed over"]) == (wire, loaded)
    assert num_bytes["kept"] == memory_plan.engine_weight_bytes(task.model, task.config.rollout)


# ---- seconds -----------------------------------------------------------------------------------------------
MEASURED = [  # NeMo-RL 0.4 on H100s: GPUs, EP, TP of engines, prompts, updates, mean, limit, seconds
    ("Qwen3-30B-A3B", 32, 8, 4, 64, 4, 3154, 4096, 225),
    ("Qwen3-235B-A22B", 128, 16, 16, 16, 1, 5671, 8192, 506),
    ("Qwen3-32B", 32, 1, 4, 64, 4, 3206, 4096, 393),
    ("Qwen3-8B", 16, 1, 1, 64, 4, 1060, 4096, 97.7),  # Llama 3.1 8B there
]


def measured_task(case: tuple) -> plan.Task:
    """Describe a published run. Megatron divides a model differently, so memory is not compared."""
    model, gpus, ep_size, parallel, prompts, updates, mean, limit, _ = case
    return make_task(
        f"model.ep_size={ep_size}", f"rollout.tensor_parallel={parallel}", "rollout.group_size=32",
        f"rollout.prompts_per_step={prompts}", f"train.minibatches_per_step={updates}",
        "rollout.max_prompt_tokens=256", f"rollout.max_new_tokens={limit - 256}",
        "rollout.kv_cache_gib=30", "model.activation_checkpointing=true",
        model=model, gpus=gpus, prompts=160, new=mean - 160,
    )  # fmt: skip


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case[0])
def test_a_step_is_within_a_factor_of_two_of_public_measurements(case):
    published = case[-1]
    planned = sum(plan.phase_seconds(measured_task(case)).values())
    assert 0.5 < planned / published < 2


@pytest.mark.parametrize("mean, limit", [(2000, 4096), (100, 16384), (4096, 4096)])
def test_a_rollout_samples_every_token_once(mean, limit, monkeypatch):
    """If a step costs a second per completion, seconds count tokens."""
    limits = (f"rollout.max_new_tokens={limit}", "rollout.max_num_seqs=256")
    task = make_task(*FITTING, *limits, new=mean, machine="h200")
    assert plan.completions_at_once(task) == 256
    prompts_s = 128 * plan.product_seconds(task, 200, 100) / 8  # on the 8 GPUs of an engine
    monkeypatch.setattr(plan, "decode_step_seconds", lambda task, batch, context: batch)
    assert plan.rollout_seconds(task) - prompts_s == pytest.approx(task.completions * mean, rel=1e-6)


# ---- fits, advice, search ----------------------------------------------------------------------------------
TOO_LARGE = [
    ("Qwen3-30B-A3B", 8, "h100", ("model.ep_size=8",)),
    ("Qwen3-4B", 1, "h200", ("train.micro_batch_tokens=65536",)),
    ("Qwen3-8B", 8, "h100", ("model.activation_checkpointing=true", "rollout.sleep_level=2")),
    ("Qwen3-4B", 1, "h100", ()),
    ("Qwen3-0.6B", 1, "h100", ("rollout.kv_cache_gib=90",)),
]


@pytest.mark.parametrize("model, gpus, machine, settings", TOO_LARGE)
def test_every_advice_makes_the_run_fit(model, gpus, machine, settings):
    task = make_task(*settings, model=model, gpus=gpus, machine=machine)
    assert plan.why_not(task)
    lines = plan.advice(task)
    assert lines
    for line in lines:
        words = line.split()
        more = int(words[words.index("--gpus") + 1]) if "--gpus" in words else gpus
        changed = [word for word in words if "=" in word]
        assert plan.why_not(make_task(*settings, *changed, model=model, gpus=more, machine=machine)) is None


@pytest.mark.parametrize(
    "settings, gpus, words",
    [
        (["model.ep_size=3"], 8, "number of GPUs"),
        (["model.ep_size=3"], 9, "128 experts"),
        (["rollout.tensor_parallel=3"], 8, "rollout.tensor_parallel"),
        (["rollout.prompts_per_step=12"], 8, "rollout.prompts_per_step"),
        (["rollout.prompts_per_step=96"], 12, "nodes of 8"),
        (["rollout.fp8=on", "rollout.tensor_parallel=4"], 8, "rollout.fp8"),
    ],
)
def test_settings_that_contradict_each_other_are_named(settings, gpus, words):
    assert words in plan.contradiction(make_task(*settings, gpus=gpus))


def test_advice_does_not_split_an_expert_parallel_engine_into_one():
    """The configuration of a run refuses these settings, and a search reaches them by changing one."""
    task = make_task("rollout.expert_parallel=true", "rollout.tensor_parallel=2")
    assert "rollout.expert_parallel" in plan.contradiction(task.with_settings({"rollout.tensor_parallel": 1}))


ON_HOPPER = [("h100", True), ("h200", True), ("a100", False), ("b200", False)]


@pytest.mark.parametrize("machine, has_fp8", ON_HOPPER)
def test_fp8_is_planned_on_the_machines_that_run_it(machine, has_fp8):
    """On the others fp8.py refuses the start."""
    problem = plan.contradiction(make_task("rollout.fp8=on", machine=machine))
    assert (problem is None) == has_fp8 and (has_fp8 or "Hopper" in problem)


def test_advice_for_prompts_that_do_not_divide_among_ranks():
    task = make_task(*FITTING, "rollout.prompts_per_step=60", machine="h200")
    lines = plan.advice(task)
    assert lines and all("rollout.prompts_per_step=64" in line.split() for line in lines)


@pytest.mark.parametrize("machine, offloads", [("h100", {True}), ("h200", {False, True})])
def test_search_offloads_if_nothing_else_fits(machine, offloads):
    """Qwen3-4B on one GPU needs 68 GiB between updates: too much for 80 GiB, but not for 140 GiB."""
    task = make_task("rollout.max_new_tokens=4096", model="Qwen3-4B", gpus=1, machine=machine, new=1200)
    proposals = plan.search(task)
    assert {change["train.offload_optimizer"] for change, _ in proposals} == offloads
    assert proposals[0][0]["train.offload_optimizer"] == (machine == "h100")
    for change, proposal in proposals:
        assert proposal.config.train.zero_stage == 2 or not change["train.offload_optimizer"]


SEARCHED = ("--config", str(ROOT / "experiments/models/qwen3_30b_a3b_one_node.yaml"))


def test_search_proposes_fitting_runs_fastest_first(small, capsys):
    proposals = plan.search(make_task(gpus=8, machine="h200"), most=4)
    seconds = [sum(plan.phase_seconds(task).values()) for _, task in proposals]
    assert len(proposals) == 4 and seconds == sorted(seconds)
    assert all(plan.why_not(task) is None for _, task in proposals)
    command = [*SEARCHED, *plan.as_settings(proposals[0][0]).split()]
    assert plan.why_not(plan.read_task(plan.parse_args(command))) is None, "a proposal is a command line"
    argv = ["--config", str(small), "--gpus", "2", "--search"]
    assert plan.main(argv) == 0 and "as it is" in capsys.readouterr().out
    assert plan.main([*argv, "--gpu-memory-gib", "4"]) == 1 and "phase" in capsys.readouterr().out


# ---- command line ------------------------------------------------------------------------------------------
@pytest.fixture
def small(tmp_path) -> Path:
    """Write a YAML of an unpublished model, and its config.json."""
    small_config("moe", 2).save_pretrained(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {tmp_path}/model, ep_size: 2, dtype: float32}}\n"
        "data: {train: [{path: unused}]}\n"
        "rollout: {max_prompt_tokens: 64, max_new_tokens: 128, dtype: float32, prompts_per_step: 8}\n"
    )
    return tmp_path / "run.yaml"


@pytest.mark.parametrize("gib, code", [(80, 0), (4, 1)])
def test_the_exit_code_tells_whether_a_run_fits(gib, code, small, tmp_path):
    argv = ["--config", str(small), "--gpus", "2", "--json", str(tmp_path / "plan.json")]
    assert plan.main([*argv, "--gpu-memory-gib", str(gib)]) == code
    result = json.loads((tmp_path / "plan.json").read_text())
    assert result["gpus"] == 2 and result["memory_gib"].keys() > {"weights", "activations", "KV cache"}
    assert result["margin_gib"] == 4
    assert result["fits"] == (not result["why_not"]) == (not result["advice"]) == (code == 0)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--new-tokens", "129"], "max_new_tokens"),
        (["--gpus", "0"], "--gpus"),
        (["--gpu-memory-gib", "-1"], "--gpu-memory-gib"),
        (["--prompt-tokens", "0"], "prompts 0"),
        (["--shape", "Qwen9-1B"], "--shape"),
        (["model.path=nowhere"], "model.path"),
        (["rollout.max_new_tokens=999999"], "max_new_tokens"),
    ],
)
def test_bad_input_is_named(argv, words, small):
    with pytest.raises(ValueError, match=words):
        plan.main(["--config", str(small), *argv])


def test_stages_are_planned_with_the_largest_sizes(small):
    largest = task_of(small, "--gpus", "2", "rollout.max_new_tokens=200")
    stages = "stages: [{name: a, rollout: {max_new_tokens: 200}, until: {steps: 1}}, {name: b}]"
    small.write_text(small.read_text() + stages)
    staged = task_of(small, "--gpus", "2", "--new-tokens", "100")
    assert staged.parts == largest.parts


def test_a_file_without_a_known_machine_is_named(small):
    line = "# Machine: 8 x x999; shape of Qwen/Qwen3-8B; mean prompt 20, completion 30 tokens\n"
    small.write_text(line + small.read_text())
    with pytest.raises(ValueError, match="x999"):
        plan.main(["--config", str(small)])


# ---- the complete configurations ---------------------------------------------------------------------------
def task_of(file: Path, *options: str) -> plan.Task:
    return plan.read_task(plan.parse_args(["--config", str(file), *options]))


def test_every_plan_leaves_a_twentieth_of_a_gpu_free(tmp_path):
    """The rows of ESPO's table run on the machine of qwen3_30b_a3b_4_nodes.yaml, README's on eight H100s."""
    example = tmp_path / "readme.yaml"
    example.write_text(re.search("```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1])
    tasks = {file.stem: task_of(file) for file in CONFIGS} | {"README": task_of(example, "--gpus", "8")}
    for row in (ROOT / "experiments/models/espo_30b").glob("*.yaml"):
        tasks[row.stem] = task_of(row, "--gpus", "32")
    for name, task in tasks.items():
        assert plan.why_not(task) is None, name
        lifecycle.check_model(task.config, task.model)
        assert max(task.phases.values()) <= 0.95 * task.machine.memory_gib * GIB, name


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_recipe_is_nearly_as_fast_as_the_advice_of_the_planner(file):
    """Differences below a fifth are within the error of the planner's seconds."""
    assert plan.MACHINE_LINE.search(file.read_text()), "it names its machine"
    task = task_of(file)
    ((change, fastest),) = plan.search(task, most=1)
    assert plan.step_seconds(task) <= 1.2 * plan.step_seconds(fastest), plan.as_settings(change)


@pytest.mark.parametrize(
    "first, second",
    [("8b_stage_1", "8b_stage_2"), ("8b_stage_2", "8b_stage_3"),
     ("235b_a22b_phase_1", "235b_a22b_phase_2")],
)  # fmt: skip
def test_a_stage_starts_from_the_model_of_the_previous_stage(first, second):
    previous, current = (
        load_config(["--config", f"{ROOT}/experiments/models/qwen3_{name}.yaml"]) for name in (first, second)
    )
    assert current.model.path == f"{previous.run.dir}/model" and current.run.dir != previous.run.dir
    assert current.data.train != previous.data.train


def test_the_rows_of_espo_differ_only_in_the_method():
    """Each row has a different section `algorithm`; all other settings are the settings of setup.yaml."""
    rows = sorted((ROOT / "experiments/models/espo_30b").glob("*.yaml"))
    configs = {file.stem: load_config(["--config", str(file)]) for file in rows}
    configs["espo"] = load_config(["--config", str(ROOT / "experiments/models/qwen3_30b_a3b_4_nodes.yaml")])
    methods = {config.algorithm.model_dump_json() for config in configs.values()}
    folders = {config.run.dir for config in configs.values()}
    assert len(methods) == len(folders) == len(configs) == 14
    common = {"algorithm": configs["setup"].algorithm, "run": configs["setup"].run}
    for name, config in configs.items():
        assert config.model_copy(update=common) == configs["setup"], name
        assert config.algorithm.router_replay == "r3" and config.run.timeout_s == 7200, name
