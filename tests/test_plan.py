"""The planner: its counts against transformers, its arithmetic against loops, its files as they stand."""

import gc
import inspect
import json
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

import lifecycle
import memory_plan
import moe_model
import rollout
from configure import load_config
from experiments import plan
from runtime.memory import CONTEXT_BYTES, GIB, STANDING, bytes_by_phase, trainer_bytes, why_too_small
from tests import preloaded

CONFIGS = sorted((ROOT / "experiments" / "models").glob("*.yaml"))
PUBLISHED = {  # parameters as the model cards' safetensors say, a tied head counted once
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
}


def make_task(
    *settings: str, model="Qwen3-30B-A3B", gpus=8, machine="h100", prompts=200, new=2000
) -> plan.Task:
    """Describe a run of a known model; settings as on the command line."""
    config = load_config(["data.train=[{path: unused}]", f"model.path={model}", *settings])
    return plan.Task(config, plan.model_config(model), plan.MACHINES[machine], gpus, prompts, new)


FITTING = (
    "model.ep_size=8", "model.activation_checkpointing=true", "rollout.tensor_parallel=8",
    "rollout.sleep_level=2", "train.micro_batch_tokens=8192", "rollout.max_new_tokens=8192",
)  # fmt: skip


# ---- parameters --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PUBLISHED)
def test_known_shapes_have_the_published_number_of_parameters(name):
    assert sum(moe_model.parameter_counts(plan.model_config(name))) == PUBLISHED[name]


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-30B-A3B"])
def test_counts_are_those_of_transformers_model(name):
    task = make_task(model=name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(task.model)
    experts = embeddings = others = active = 0
    for key, parameter in model.named_parameters():
        if ".experts." in key:
            experts += parameter.numel()
            active += parameter.numel() * 8 // 128
        elif "embed_tokens" in key or "lm_head" in key:
            embeddings += parameter.numel()
        else:
            others += parameter.numel()
    active += others + task.model.vocab_size * task.model.hidden_size  # of two matrices only the head
    assert task.counts == (experts, embeddings, others) and task.active == active


def test_variants_differ_in_context_only():
    contexts = {v: plan.model_config(f"Qwen/Qwen3-30B-A3B{v}").max_position_embeddings for v in plan.CONTEXTS}
    assert contexts == {"": 40960, "-Base": 32768, "-Instruct-2507": 262144, "-Thinking-2507": 262144}
    with pytest.raises(ValueError, match="model.path: x/Qwen9-1B is no folder.*Qwen3-0.6B"):
        plan.model_config("x/Qwen9-1B")


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
    """Add up the storages that a forward of rows of prompt + length tokens keeps, parameters left out."""
    torch.set_default_dtype(dtype)
    policy = moe_model.Policy(small_config(kind, layers))
    torch.set_default_dtype(torch.float32)
    own, kept = {p.untyped_storage().data_ptr() for p in policy.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    packed = moe_model.pack([[1] * prompt] * rows, [[2] * length] * rows, "cpu", share)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = policy(packed)
    total = sum(storage.nbytes() for storage in kept.values())
    del outputs
    gc.collect()
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_layer_keeps_so_many_bytes_for_its_backward(kind, dtype):
    rows, length = 4, 64
    one, two = (saved_bytes(kind, layers, dtype, rows, length) for layers in (1, 2))
    per_token = memory_plan.saved_bytes_per_token(small_config(kind, 1), 0, dtype.itemsize, on_gpu=False)
    assert (two - one) / (rows * length) == pytest.approx(per_token, abs=2), "but for offsets of the experts"


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_shared_prompts_leave_what_attention_keeps(kind):
    """Of four rows with a prompt of 33 tokens 3 x 32 tokens are left out, and stay in attention's grid."""
    config, sizes = small_config(kind, 1), (torch.bfloat16, 4, 32, 33, True)
    one, two = (saved_bytes(kind, layers, *sizes) for layers in (1, 2))
    whole, grid = (
        memory_plan.saved_bytes_per_token(config, 0, 2, False),
        memory_plan.grid_bytes_per_token(config, 2),
    )
    places, left_out = 4 * 64, 3 * 32
    assert two - one == pytest.approx(places * whole - left_out * (whole - grid), abs=2 * places)
    settings = load_config(["data.train=[{path: unused}]", "model.dtype=bfloat16"]).model
    planned = [
        memory_plan.passing_bytes(small_config(kind, layers), settings, places, "cpu", left_out)[
            "activations"
        ]
        for layers in (1, 2)
    ]
    assert planned[1] - planned[0] == places * whole - left_out * (whole - grid)


def test_fused_norms_of_gpus_keep_their_inputs_only():
    config = plan.model_config("Qwen3-30B-A3B")
    both = [memory_plan.saved_bytes_per_token(config, 0, 2, on_gpu) for on_gpu in (True, False)]
    queries, keys = 32 * 128, 4 * 128
    # CPU: two norms keep 2 D float32 each, those of queries and keys 2 float32; GPU: their inputs
    assert both[1] - both[0] == 4 * 4 * 2048 + 8 * (queries + keys) - 2 * (2 * 2048 + queries + keys)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_what_stands_is_counted_by_parameter(zero_stage):
    """With EP 8 on 16 GPUs: experts in eighths, two ranks update each of them; all else is updated by 16."""
    bytes_of = dict.fromkeys((*STANDING[:4], "gradients in an update"), 0)
    with torch.device("meta"):
        policy = moe_model.Policy(plan.model_config("Qwen3-30B-A3B"))
    for name, parameter in policy.named_parameters():
        held = parameter.numel() / (8 if ".experts." in name else 1)
        share = held / (2 if ".experts." in name else 16)
        bytes_of["weights"] += 2 * held
        bytes_of["gradients"] += 4 * held * (zero_stage == 1)
        bytes_of["gradients in an update"] += 4 * share * (zero_stage == 2)
        bytes_of["master weights"] += 4 * share
        bytes_of["AdamW"] += 8 * share
    found = make_task("model.ep_size=8", f"train.zero_stage={zero_stage}", gpus=16).parts
    assert {name: found[name] for name in bytes_of} == pytest.approx(bytes_of, rel=1e-6)


def test_the_published_sum_for_30b_on_one_node():
    """By hand for 8 GPUs, EP 8, ZeRO 1: weights 9.6, gradients 19.2, masters 14.2, AdamW 28.4 GiB."""
    parts = make_task(*FITTING).parts
    found = [parts[name] / GIB for name in STANDING[:4]]
    assert found == pytest.approx([9.6, 19.2, 14.2, 28.4], abs=0.06)


def test_a_row_longer_than_a_micro_batch_counts_whole():
    limits = ("rollout.max_prompt_tokens=1000", "rollout.max_new_tokens=7000")
    sizes = {
        tokens: make_task(*limits, f"train.micro_batch_tokens={tokens}").parts["activations"]
        for tokens in (2000, 4000, 8000, 16000)
    }
    assert sizes[2000] == sizes[4000] == sizes[8000] == sizes[16000] / 2
    assert make_task(*limits).parts["activations"] == 32768 / 8000 * sizes[8000], "what is left out, on a GPU"


def test_a_reference_and_own_experts_count():
    plain, other = make_task("model.ep_size=8"), make_task("model.ep_size=8", "algorithm.kl_coef=0.1")
    assert plain.parts["reference"] == 0 and other.parts["reference"] == plain.parts["weights"]
    own = make_task("model.ep_size=8", "rollout.tensor_parallel=8", "rollout.expert_parallel=true")
    layer = 128 * 3 * 768 * 2048 * 2
    assert (plain.parts["sync buffers"], own.parts["sync buffers"]) == (layer + layer * 2 // 3, layer // 8)


PARTS = {
    "weights": 10, "gradients": 20, "master weights": 5, "AdamW": 6, "reference": 0, "activations": 8,
    "gradients in an update": 0, "on the way back": 2, "optimizer step": 7, "sync buffers": 3,
    "engine weights": 11, "engine workspace": 1, "KV cache": 30,
}  # fmt: skip


def test_phases_share_a_gpu():
    """An engine that sleeps is away during updates, its keys and values also during a sync."""
    standing = 10 + 20 + 5 + 6 + 1 + CONTEXT_BYTES
    asleep, awake = ({"rollout": 41, "update": a + 10, "optimizer step": a + 7, "sync": b + 3}
                     for a, b in ((0, 11), (41, 41)))  # fmt: skip
    for sleeps, expected in ((True, asleep), (False, awake)):
        found = bytes_by_phase(PARTS, sleeps)
        assert {name: value - standing for name, value in found.items()} == expected
    assert trainer_bytes(PARTS, True) == 41 + CONTEXT_BYTES
    assert trainer_bytes(PARTS, False) == 41 + 10 + CONTEXT_BYTES
    assert trainer_bytes(PARTS | {"optimizer step": 12}, False) == 41 + 12 + CONTEXT_BYTES
    summed = PARTS | {"gradients in an update": 100}  # ZeRO 2: until the optimizer's step, not in a sync
    assert trainer_bytes(summed, True) == 41 + CONTEXT_BYTES
    assert trainer_bytes(summed, False) == 41 + 100 + 10 + CONTEXT_BYTES
    found = bytes_by_phase(summed, True)
    assert {n: v - standing for n, v in found.items()} == asleep | {"update": 110, "optimizer step": 107}


@pytest.mark.parametrize(
    "total, needed, sleeps, words",
    [
        (41 + 1 + 41, 30, True, None),
        (41 + 1 + 41 - 1, 30, True, "phase rollout needs 4.0 GiB (with the KV cache"),
        (41 + 1 + 41, 30, False, "phase update needs"),
        (41 + 1 + 41, 31, True, "phase rollout needs"),  # one completion more than there are keys and values
        (41 + 1 + 60, 31, True, "the KV cache has 0.0 GiB"),
    ],
)
def test_what_does_not_fit_is_named(total, needed, sleeps, words):
    found = why_too_small(PARTS, sleeps, total + CONTEXT_BYTES, needed)
    assert (found is None) if words is None else (words in found)


def test_a_phase_without_keys_and_values_does_not_speak_of_them():
    large = PARTS | {"activations": 10**12}
    assert "needs 935.3 GiB, but the GPU has" in why_too_small(large, True, CONTEXT_BYTES, 30)
    assert "KV cache" in why_too_small(large, False, CONTEXT_BYTES, 30)


def test_keys_and_values_take_what_the_engine_is_given():
    """The plan and the running engine divide a GPU alike."""
    task = make_task(*FITTING, machine="h200")
    total, beside = int(task.machine.memory_gib * GIB), trainer_bytes(task.parts, engine_sleeps=True)
    limit = task.config.rollout.max_prompt_tokens + task.config.rollout.max_new_tokens
    share = rollout.memory_share(task.model, task.config.rollout, limit, beside, total, total)
    engine = sum(task.parts[name] for name in ("engine weights", "engine workspace", "KV cache"))
    assert engine == pytest.approx(share * total, abs=2)
    fixed = task.with_settings({"rollout.kv_cache_gib": 2.0})
    assert fixed.parts["KV cache"] == 2 * GIB


def test_the_trainer_asks_before_anything_is_loaded():
    source = inspect.getsource(lifecycle.set_up)
    later = (
        source.index(name) for name in ("load_tokenizer(", "load_data(", "start_engine(", "build_policy(")
    )
    assert source.index("check_memory(") < min(later)


def test_the_trainer_refuses_in_the_words_of_the_planner(monkeypatch):
    task = make_task("model.ep_size=8", "rollout.sleep_level=2", "rollout.tensor_parallel=8")
    total = int(task.machine.memory_gib * GIB)
    memory_plan.check_memory(task.config, task.model, num_ranks=8)  # no GPU, no estimate
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total, total))
    with pytest.raises(ValueError) as caught:
        memory_plan.check_memory(task.config, task.model, num_ranks=8)
    assert plan.why_not(task) in str(caught.value)
    assert "--gpus 8 --gpu-memory-gib 79.6" in str(caught.value)
    fitting = task.with_settings({"model.activation_checkpointing": True, "train.micro_batch_tokens": 8192})
    fitting = fitting.with_settings({"rollout.max_new_tokens": 1024, "train.zero_stage": 2})
    memory_plan.check_memory(fitting.config, fitting.model, num_ranks=64)
    said = []
    monkeypatch.setattr(memory_plan, "say", said.append)
    own = task.with_settings({"rollout.kv_cache_gib": 5.0})
    memory_plan.check_memory(own.config, own.model, num_ranks=8)
    assert len(said) == 1 and "warning" in said[0] and plan.why_not(own) in said[0]


# ---- the host, and an optimizer that is there ----
OFFLOAD = ("train.zero_stage=2", "train.offload_optimizer=true")


def test_an_offloaded_optimizer_by_hand():
    """Qwen3-30B-A3B on 8 GPUs: 3.624 and 0.193 billion parameters a rank, four bytes and two pinned."""
    task = make_task(*FITTING, *OFFLOAD)
    pinned = 2 * (2**34 + 2**30) + 2**33 + 2**29  # 14.5 and 0.8 GB of float32, twice, and half of them
    expected = pinned + 8 * (task.counts.experts // 8 + (sum(task.counts) - task.counts.experts) // 8)
    host = plan.host_memory(task)
    assert host["offloaded optimizer"] == expected and 60 * GIB < expected < 75 * GIB
    assert host["checkpoint"] == pytest.approx(12 * 30_532_122_624 / 8, rel=1e-6), "a resumed run reads it"
    on_gpu = make_task(*FITTING)
    assert plan.host_memory(on_gpu)["offloaded optimizer"] == 0
    assert task.parts["master weights"] == task.parts["AdamW"] == 0
    assert task.parts["gradients in an update"] == 4 * task.owned, "summed on the GPU, handed over once"
    assert task.parts["KV cache"] > on_gpu.parts["KV cache"] + 50 * GIB


def test_offloading_costs_the_bus_and_a_core():
    """An update of 3.8 billion parameters a rank: 6 bytes over 64 GB/s x 0.6, 42 bytes at 20 GB/s."""
    settings = (*FITTING, "train.minibatches_per_step=2", "rollout.prompts_per_step=16")
    task, on_gpu = make_task(*settings, *OFFLOAD), make_task(*settings, "train.zero_stage=2")
    billions = 2 * 30.532122624 / 8
    cost = plan.offload_cost(task)
    assert cost["GB over PCIe"] == pytest.approx(6 * billions)
    assert cost["seconds of PCIe"] == pytest.approx(6 * billions / 64 / 0.6)
    assert cost["seconds of AdamW"] == pytest.approx(42 * billions / 20)
    seconds = [plan.phase_seconds(one)["update"] for one in (task, on_gpu)]
    fused = 28 * billions / 3350 / 0.6  # AdamW on the GPU instead
    assert seconds[0] - seconds[1] == pytest.approx((6 / 38.4 + 42 / 20) * billions - fused)
    assert set(plan.offload_cost(on_gpu).values()) == {0}


def test_a_host_that_is_too_small_is_named():
    task = make_task(*FITTING, *OFFLOAD)
    gib = plan.node_bytes(task) / GIB
    for room, fits in ((gib + 1, True), (gib - 1, False)):
        found = plan.why_not(plan.replace(task, machine=plan.replace(task.machine, host_gib=room)))
        expected = f"the host of a node needs {gib:.0f} GiB for 8 GPUs and has {room:.0f}"
        assert found == (None if fits else expected)
    assert plan.node_bytes(make_task(*FITTING, gpus=16)) < 8 * sum(plan.host_memory(task).values())


# ---- prompts that are shared ----
@pytest.mark.parametrize("tokens, together", [(32768, 8), (8800, 4), (1000, 1)])
def test_shared_prompts_are_computed_once_in_a_micro_batch(tokens, together):
    """Groups of 8 rows of 1,200 + 1,000 tokens: all of one in a micro-batch, half of one, a row."""
    settings = ("rollout.prompts_per_step=16", f"train.micro_batch_tokens={tokens}", "model.ep_size=8")
    make = lambda share: make_task(*settings, f"train.share_prompts={share}", prompts=1200, new=1000)
    shared, whole = make("true"), make("false")
    num_groups, computed = 16 * 8 / together / 8, 0
    for _ in range(int(num_groups)):
        computed += 1200 + together * 1000
    assert shared.trained_tokens == computed and whole.trained_tokens == whole.grid_tokens == 16 * 2200
    assert shared.grid_tokens == whole.grid_tokens
    sent = [plan.wire_bytes(one)["all-to-all"] for one in (shared, whole)]
    assert sent[0] == pytest.approx(sent[1] * computed / 35200)
    assert (plan.activation_bytes(shared) < plan.activation_bytes(whole)) == (together > 1)
    assert shared.parts == whole.parts, "the largest micro-batch may have short prompts only"


def test_short_prompts_are_not_planned_as_shared():
    """The completions of a group differ in length by more than its prompt has tokens."""
    assert make_task(prompts=999, new=1000).rows_together == 1
    assert make_task(prompts=1000, new=1000).rows_together > 1


def test_attention_works_on_all_places_of_shared_prompts():
    task = plan.replace(make_task(), model=small_config("dense", 2))
    both, less, none = (plan.product_seconds(task, *sizes) for sizes in ((7, 10), (3, 10, 7), (3, 0)))
    attention = 4 * 2 * 6 * 32 * 10 / 0.5 / 989e12
    assert both - less == pytest.approx(4 / 3 * none) and less - none == pytest.approx(7 * attention)


# ---- bytes over the wire -----------------------------------------------------------------------------------
def ring_all_reduce(num_bytes: float, ranks: int) -> float:
    """Count what a rank sends: ranks - 1 parts to reduce, as many to spread the result."""
    return sum(num_bytes / ranks for _ in range(ranks - 1)) * 2


@pytest.mark.parametrize("ep_size", [1, 4])
@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_wire_bytes_are_those_of_a_loop(ep_size, checkpointing):
    task = make_task(
        f"model.ep_size={ep_size}", f"model.activation_checkpointing={checkpointing}",
        "rollout.prompts_per_step=16", "rollout.group_size=4", "train.minibatches_per_step=2", gpus=8,
    )  # fmt: skip
    found = plan.wire_bytes(task)
    experts, embeddings, others = task.counts
    sent = 0.0
    for _ in range(48):  # layers: rows to the experts of others and back, in each pass over them
        for _ in range(
            1 + 1 + (checkpointing == "true") + 1
        ):  # forward, backward, again, old log-probabilities
            for rank in range(ep_size):
                sent += 2 * (16 * 4 * 2200 / 8) * 8 * 2048 * 2 / ep_size * (rank != 0)
    assert found["all-to-all"] == pytest.approx(sent)
    reduced = ring_all_reduce(2 * (embeddings + others), 8) + ring_all_reduce(
        2 * experts / ep_size, 8 // ep_size
    )
    assert found["gradients"] == pytest.approx(2 * reduced), "two updates"
    assert found["updated weights"] == pytest.approx(reduced), "an all-gather is half of an all-reduce"


@pytest.mark.parametrize("tokens, micro_batches", [(8192, 3), (1024, 8)])  # a row of 2,200 goes alone
def test_zero_2_reduces_after_every_micro_batch(tokens, micro_batches):
    settings = "model.ep_size=8", "rollout.prompts_per_step=8", "rollout.group_size=8"
    once = plan.wire_bytes(make_task(*settings))
    again = plan.wire_bytes(make_task(*settings, "train.zero_stage=2", f"train.micro_batch_tokens={tokens}"))
    assert again["gradients"] == pytest.approx(micro_batches * once["gradients"])
    assert again["updated weights"] == once["updated weights"]


@pytest.mark.parametrize("own", [False, True])
def test_sync_bytes_are_those_of_the_tensors_that_are_sent(own):
    options = ["rollout.expert_parallel=true"] if own else []
    task = make_task("model.ep_size=8", "rollout.tensor_parallel=8", *options)
    with torch.device("meta"):
        policy = moe_model.Policy(task.model)
    wire = given = 0
    for name, parameter in policy.named_parameters():
        size = 2 * parameter.numel()
        is_expert = ".experts." in name
        wire += size - size // 8 if is_expert and not own else 0
        given += size // 8 if is_expert and own else size
    found = plan.sync_bytes(task)
    assert (found["over the wire"], found["handed over"]) == (wire, given)
    assert found["kept"] == rollout.engine_weight_bytes(task.model, task.config.rollout)


# ---- seconds -----------------------------------------------------------------------------------------------
MEASURED = [  # NeMo-RL 0.4 on H100s: GPUs, EP, TP of engines, prompts, updates, mean, limit, seconds
    ("Qwen3-30B-A3B", 32, 8, 4, 64, 4, 3154, 4096, 225),
    ("Qwen3-235B-A22B", 128, 16, 16, 16, 1, 5671, 8192, 506),
    ("Qwen3-32B", 32, 1, 4, 64, 4, 3206, 4096, 393),
    ("Qwen3-8B", 16, 1, 1, 64, 4, 1060, 4096, 97.7),  # Llama 3.1 8B there
]


def measured_task(case: tuple) -> plan.Task:
    """Describe a published run; memory is not asked about, Megatron divides a model otherwise."""
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
    published, found = case[-1], sum(plan.phase_seconds(measured_task(case)).values())
    assert 0.5 < found / published < 2
    row = f"| {published:.0f} | {found:.0f} | {found / published:.2f} |"
    assert row in (ROOT / "docs" / "gpu.md").read_text()


def test_fp8_speeds_rollouts_up_as_published():
    """By 1.35 for Qwen3-30B-A3B, and 1.44 with FP8 keys and values; the page has those of 1, 2 and 4 GPUs."""
    found = []
    for settings in ({"rollout.fp8": "on"}, {"rollout.fp8": "on", "rollout.kv_cache_fp8": True}):
        for parallel in (1, 2, 4):
            task = measured_task((*MEASURED[0][:3], parallel, *MEASURED[0][4:]))
            found.append(plan.rollout_seconds(task) / plan.rollout_seconds(task.with_settings(settings)))
    assert found[0] > 1.35 > found[2] and found[3] > 1.44 > found[5]
    page = " ".join((ROOT / "docs" / "gpu.md").read_text().split())
    for three in (found[:3], found[3:]):
        assert "{:.2f}, {:.2f} and {:.2f}".format(*three) in page


@pytest.mark.parametrize("mean, limit", [(2000, 4096), (100, 16384), (4096, 4096)])
def test_a_rollout_samples_every_token_once(mean, limit, monkeypatch):
    """With steps that cost a second for each completion in them, seconds are tokens."""
    task = make_task(*FITTING, f"rollout.max_new_tokens={limit}", new=mean, machine="h200")
    assert plan.completions_at_once(task) == 256
    prompts = 128 * plan.product_seconds(task, 200, 100) / 8  # prompts of a step, on the 8 GPUs of its engine
    monkeypatch.setattr(plan, "decode_step_seconds", lambda task, batch, context: batch)
    assert plan.rollout_seconds(task) - prompts == pytest.approx(task.completions * mean, rel=1e-6)


def test_a_sync_is_beside_the_published_seconds():
    """0.74 to 1.0 s for Qwen3-30B-A3B in bfloat16."""
    task = make_task("model.ep_size=8", "rollout.tensor_parallel=8")
    assert 0.5 * 0.74 < plan.sync_seconds(task) < 2 * 1.0
    own = make_task("model.ep_size=8", "rollout.tensor_parallel=8", "rollout.expert_parallel=true")
    assert plan.sync_seconds(own) < plan.sync_seconds(task) / 4
    far = make_task("model.ep_size=16", gpus=16)
    assert plan.sync_seconds(far) > 2 * plan.sync_seconds(task), "experts of another node come by the network"


def test_a_machine_twice_as_fast_takes_half_the_products_and_more_tokens_take_longer():
    task = make_task(*FITTING)
    fast = plan.replace(task, machine=plan.replace(task.machine, tflops=2 * 989))
    slow, half = (plan.product_seconds(one, 1e6, 1000) for one in (task, fast))
    assert half == pytest.approx(slow / 2)
    steps = [plan.decode_step_seconds(task, batch, 4000) for batch in (1, 8, 64, 512)]
    assert steps == sorted(steps) and steps[-1] < 100 * steps[0], "a batch shares the reading of weights"


def test_products_by_hand():
    """A dense toy: 2 operations a parameter and token at half of the peak, and attention."""
    task = plan.replace(make_task(), model=small_config("dense", 2))
    layer = 96 * (6 + 2 + 2) * 32 + 6 * 32 * 96 + 3 * 96 * 80 + 2 * 96 + 2 * 32
    operations = 2 * (2 * layer + 96 + 64 * 96) + 4 * 2 * 6 * 32 * 10
    assert plan.product_seconds(task, 7, 10) == pytest.approx(7 * operations / 0.5 / 989e12)


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
    "settings, gpus, part",
    [
        (["model.ep_size=3"], 8, "model.ep_size 3 must divide the number of GPUs, 8"),
        (["model.ep_size=3"], 9, "model.ep_size 3 must divide the 128 experts"),
        (["rollout.tensor_parallel=3"], 8, "rollout.tensor_parallel 3 must divide"),
        (["rollout.prompts_per_step=12"], 8, "rollout.prompts_per_step 12 must be a multiple"),
        (["rollout.fp8=on", "rollout.tensor_parallel=4"], 8, "rollout.fp8 on"),
    ],
)
def test_settings_that_contradict_each_other_are_named(settings, gpus, part):
    assert part in plan.contradiction(make_task(*settings, gpus=gpus))


@pytest.mark.parametrize("stage, words", [(1, "train.zero_stage=2 train.offload"), (2, "train.offload")])
def test_advice_names_an_optimizer_on_the_host(stage, words):
    settings = ("model.activation_checkpointing=true", "rollout.sleep_level=2", f"train.zero_stage={stage}")
    lengths = ("rollout.max_new_tokens=4096", "train.micro_batch_tokens=8192")
    lines = plan.advice(make_task(*settings, *lengths, model="Qwen3-4B", gpus=1, new=1200))
    assert any(line.startswith(words) for line in lines)


def test_advice_for_prompts_that_cannot_be_dealt():
    assert plan.advice(make_task(*FITTING, "rollout.prompts_per_step=60", machine="h200")) == [
        "rollout.prompts_per_step=64"
    ]


def test_search_offloads_where_nothing_else_fits():
    """Qwen3-4B on one GPU: 68 GiB between updates are too much of 80, and not of 140."""
    settings = ("rollout.max_new_tokens=4096",)
    for machine, offloaded in (("h100", {True}), ("h200", {False, True})):
        found = plan.search(make_task(*settings, model="Qwen3-4B", gpus=1, machine=machine, new=1200))
        assert {change["train.offload_optimizer"] for change, _ in found} == offloaded
        assert found[0][0]["train.offload_optimizer"] == (machine == "h100")
        kinds = [{k: v for k, v in c.items() if "sleep" not in k and "micro" not in k} for c, _ in found]
        assert all(kinds.count(kind) == 1 for kind in kinds)
    assert all(one.config.train.zero_stage == 2 for c, one in found if c["train.offload_optimizer"])


SEARCHED = ("--config", str(ROOT / "experiments/models/qwen3_30b_a3b_one_node.yaml"))


def test_search_proposes_what_fits_fastest_first():
    found = plan.search(make_task(gpus=8, machine="h200"), most=4)
    seconds = [sum(plan.phase_seconds(tried).values()) for _, tried in found]
    assert len(found) == 4 and seconds == sorted(seconds)
    assert all(plan.why_not(tried) is None for _, tried in found)
    assert {"model.ep_size", "rollout.tensor_parallel", "train.micro_batch_tokens"} < found[0][0].keys()
    again = plan.read_task(plan.parse_args([*SEARCHED, *plan.as_settings(found[0][0]).split()]))
    assert plan.why_not(again) is None, "what is printed can be given on the command line"


# ---- command line ------------------------------------------------------------------------------------------
@pytest.fixture
def small(tmp_path) -> Path:
    """Write a YAML of a model that nobody knows by name, and its config.json."""
    small_config("moe", 2).save_pretrained(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {tmp_path}/model, ep_size: 2, dtype: float32}}\n"
        "data: {train: [{path: unused}]}\n"
        "rollout: {max_prompt_tokens: 64, max_new_tokens: 128, dtype: float32, prompts_per_step: 8}\n"
    )
    return tmp_path / "run.yaml"


def test_the_command_says_whether_it_fits_by_its_exit_code(small, tmp_path, capsys):
    argv = ["--config", str(small), "--gpus", "2", "--json", str(tmp_path / "plan.json")]
    assert plan.main([*argv, "--gpu-memory-gib", "80"]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["fits"] and found["advice"] == [] and found["gpus"] == 2
    assert {"weights", "gradients", "master weights", "AdamW", "activations", "KV cache"} < found[
        "memory_gib"
    ].keys()
    assert "it fits" in capsys.readouterr().out
    assert plan.main([*argv, "--gpu-memory-gib", "4"]) == 1
    found = json.loads((tmp_path / "plan.json").read_text())
    assert not found["fits"] and found["why_not"] and found["advice"]
    assert "it does not fit" in capsys.readouterr().out
    with pytest.raises(ValueError, match="model.path: nowhere"):
        plan.main([*argv, "model.path=nowhere"])


@pytest.mark.parametrize(
    "argv, part",
    [
        (["--new-tokens", "129"], "completions 129 must be above 0 and at most.*max_new_tokens 128"),
        (["--gpus", "0"], "--gpus 0 must be above 0"),
        (["--gpu-memory-gib", "-1"], "--gpu-memory-gib -1 must be above 0"),
        (["--host-memory-gib", "nan"], "--host-memory-gib nan must be above 0"),
        (["--prompt-tokens", "0"], "prompts 0 and completions 64 must be above 0"),
        (["--shape", "Qwen9-1B"], "model.path: Qwen9-1B is no folder.*by --shape"),
        (["rollout.max_new_tokens=999999"], "max_new_tokens of rollout and eval"),
    ],
)
def test_bad_input_is_named(argv, part, small):
    with pytest.raises(ValueError, match=part):
        plan.main(["--config", str(small), *argv])


def test_stages_are_planned_with_the_largest_sizes(small):
    argv = ["--config", str(small), "--gpus", "2"]
    stages = "stages: [{name: a, rollout: {max_new_tokens: 200}, until: {steps: 1}}, {name: b}]"
    one = plan.read_task(plan.parse_args([*argv, "rollout.max_new_tokens=200"]))
    small.write_text(small.read_text() + stages)
    both = plan.read_task(plan.parse_args([*argv, "--new-tokens", "100"]))
    assert both.parts == one.parts and both.config.train.micro_batch_tokens == 32768


@pytest.mark.parametrize("argv", [[], ["--tables", "a.yaml", "--search"], ["--config", "a", "--tables", "b"]])
def test_the_command_asks_for_one_thing(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        plan.main(argv)
    assert caught.value.code == 2 and "--config" in capsys.readouterr().err.splitlines()[-1]


def test_a_file_without_a_known_machine_is_named(small):
    with pytest.raises(ValueError, match="run.yaml: .* # Machine: 8 x h100"):
        plan.main(["--write-headers", str(small)])
    said = "# Machine: 8 x x999; shape of Qwen/Qwen3-8B; mean prompt 20, completion 30 tokens\n"
    small.write_text(said + small.read_text())
    with pytest.raises(ValueError, match="# Machine: x999 is not known, known are h100"):
        plan.main(["--config", str(small)])


def test_a_search_says_what_the_settings_do_and_what_to_try(small, capsys):
    argv = ["--config", str(small), "--gpus", "2", "--search"]
    assert plan.main(argv) == 0
    head, as_it_is, *proposals = capsys.readouterr().out.splitlines()
    assert head.split() == ["seconds", "KV,", "GiB", "host,", "GiB", "settings"]
    assert as_it_is.endswith("as it is") and 0 < len(proposals) <= 5
    assert plan.main([*argv, "--gpu-memory-gib", "4"]) == 1
    reason, nothing, *tried = capsys.readouterr().out.splitlines()
    assert reason.startswith("as it is, it does not fit: phase") and nothing.startswith("nothing fits")
    assert tried == ["  try a larger GPU, a shorter rollout.max_new_tokens or a smaller model"]


def test_contradictions_are_printed_without_numbers(small, capsys):
    assert plan.main(["--config", str(small), "--gpus", "2", "model.ep_size=3"]) == 1
    printed = capsys.readouterr().out
    assert "it does not fit: model.ep_size 3 must divide" in printed and "GiB of a GPU" not in printed
    assert "  try model.ep_size=1\n" in printed


# ---- the complete configurations ---------------------------------------------------------------------------
def task_of(file: Path) -> plan.Task:
    return plan.read_task(plan.parse_args(["--config", str(file)]))


def shrunken(config):
    """Return a model of the same layout with two layers and small widths."""
    values = config.to_dict() | {
        "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 64, "vocab_size": 64, "head_dim": 32,
        "num_attention_heads": 8, "num_key_value_heads": 4, "layer_types": None,
    }  # fmt: skip
    if moe_model.num_experts_of(config):
        values |= {"moe_intermediate_size": 32}
    return type(config)(**values)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_config_fits_its_machine_and_says_what_the_planner_says(file):
    assert plan.why_not(task_of(file)) is None
    assert plan.header(file) == plan.comment_of(file), "write them with --write-headers"


def test_headers_are_written_over_old_ones(tmp_path, monkeypatch):
    text = (ROOT / "experiments/models/qwen3_0_6b_one_gpu.yaml").read_text()
    file = tmp_path / "a.yaml"
    file.write_text(
        text.replace("rollout 7", "rollout 9").replace("#   torchrun --nproc", "#   torchrun --old")
    )
    monkeypatch.setattr(plan, "ROOT", tmp_path)
    assert plan.main(["--write-headers", str(file)]) == 0
    written = text.replace("experiments/models/qwen3_0_6b_one_gpu.yaml", "a.yaml")
    assert file.read_text() == written
    (said,) = [line for line in text.splitlines() if plan.MACHINE_LINE.match(line)]
    settings = text.splitlines()[len(plan.comment_of(file)) :]
    file.write_text("\n".join(["# Mine", said, *settings]) + "\n")  # as somebody writes it by hand
    for _ in range(2):
        assert plan.main(["--write-headers", str(file)]) == 0
        assert file.read_text() == "# Mine\n" + written[written.index("#   torchrun") :]


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_config_loads_with_a_shrunken_model_of_its_layout(file, tmp_path):
    task = task_of(file)
    small = shrunken(task.model)
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path / "model")
    lifecycle.check_model(task.config, moe_model.load_config(tmp_path / "model"))
    settings = task.config.model.model_copy(update={"dtype": "float32"})
    policy = moe_model.build_policy(settings, tmp_path / "model", None, torch.device("cpu"))
    logprobs, _, routes = policy(moe_model.pack([[1, 2]], [[3, 4, 5]], "cpu"))
    assert logprobs.shape == (3,) and logprobs.isfinite().all() and len(routes) == 2
    assert (routes[0] is None) == (moe_model.num_experts_of(small) == 0)


def test_stages_and_phases_go_on_from_the_run_before():
    for first, second in (("8b_stage_1", "8b_stage_2"), ("8b_stage_2", "8b_stage_3"),
                          ("235b_a22b_phase_1", "235b_a22b_phase_2")):  # fmt: skip
        before, after = (
            load_config(["--config", f"{ROOT}/experiments/models/qwen3_{n}.yaml"]) for n in (first, second)
        )
        assert after.model.path == f"{before.run.dir}/model" and after.run.dir != before.run.dir
        assert after.data.train != before.data.train


def test_the_tables_of_the_page_are_the_planners():
    lines, page = plan.tables({file.stem: task_of(file) for file in CONFIGS}), ROOT / "docs" / "gpu.md"
    for table in "\n".join(lines).split("\n\n"):
        assert table in page.read_text(), "print them with --tables"


def test_the_rows_of_espo_differ_in_their_method_only():
    """Each has section algorithm of its own; of all that is left they have the set-up's."""
    rows = sorted((ROOT / "experiments/models/espo_30b").glob("*.yaml"))
    configs = {file.stem: load_config(["--config", str(file)]) for file in rows}
    configs["espo"] = load_config(["--config", str(ROOT / "experiments/models/qwen3_30b_a3b_4_nodes.yaml")])
    methods = {config.algorithm.model_dump_json() for config in configs.values()}
    folders = {config.run.dir for config in configs.values()}
    assert len(methods) == len(folders) == len(configs) == 14
    apart = {"algorithm": configs["setup"].algorithm, "run": configs["setup"].run}
    for name, config in configs.items():
        assert config.model_copy(update=apart) == configs["setup"], name
        assert config.algorithm.router_replay == "r3" and config.run.timeout_s == 7200, name


# ---- measured ----------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, case",
    [
        (1, "dtype=float32,tokens=1024,layers=2"),
    ],
)
def test_memory_of_updates_on_cpus_is_within_a_tenth_of_what_is_measured(ranks, case, tmp_path):
    result = tmp_path / "result.json"
    arguments = ("-m", "experiments.bench.memory", "--case", case, "--result", result)
    done = preloaded.run(ranks, *arguments, env={"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(result.read_text())
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.1)
    elements = found["parts"]["master weights"] / 4  # what DeepSpeed really partitions, but for its padding
    assert sum(found["shares"]) == pytest.approx(elements, rel=1e-4)
