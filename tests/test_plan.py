"""The planner: its counts against transformers, its arithmetic against loops, its files as they stand."""

import gc
import json
from pathlib import Path

import preloaded
import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

import moe_model
import rollout
from experiments import plan
from moe_model import GIB
from train_rl import check_model, load_config

CONFIGS = sorted((ROOT / "experiments" / "models").rglob("*.yaml"))
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
    load = plan.Workload(prompts, new)
    return plan.Task(config, plan.shape_of(model), plan.MACHINES[machine], gpus, load)


FITTING = (
    "model.ep_size=8", "model.activation_checkpointing=true", "rollout.tensor_parallel=8",
    "rollout.sleep_level=2", "train.micro_batch_tokens=8192", "rollout.max_new_tokens=8192",
)  # fmt: skip


# ---- parameters --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PUBLISHED)
def test_known_shapes_have_the_published_number_of_parameters(name):
    assert sum(plan.shape_of(name).counts) == PUBLISHED[name]


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-30B-A3B"])
def test_counts_are_those_of_transformers_model(name):
    shape = plan.shape_of(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config)
    experts = embeddings = others = active = 0
    for key, parameter in model.named_parameters():
        if ".experts." in key:
            experts += parameter.numel()
            active += parameter.numel() * 8 // 128
        elif "embed_tokens" in key or "lm_head" in key:
            embeddings += parameter.numel()
        else:
            others += parameter.numel()
    active += others + shape.config.vocab_size * shape.config.hidden_size  # of two matrices only the head
    assert shape.counts == (experts, embeddings, others) and shape.active == active


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


def saved_bytes(kind: str, layers: int, dtype: torch.dtype, rows: int, length: int) -> int:
    """Add up the storages that a forward keeps for its backward, parameters left out."""
    torch.set_default_dtype(dtype)
    policy = moe_model.Policy(small_config(kind, layers))
    torch.set_default_dtype(torch.float32)
    own, kept = {p.untyped_storage().data_ptr() for p in policy.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    packed = moe_model.pack([[1]] * rows, [[2] * length] * rows, "cpu")
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
    per_token = plan.saved_bytes_per_token(small_config(kind, 1), 0, dtype.itemsize, on_gpu=False)
    assert (two - one) / (rows * length) == pytest.approx(per_token, abs=2), "but for offsets of the experts"


def test_fused_norms_of_gpus_keep_their_inputs_only():
    config = plan.model_config("Qwen3-30B-A3B")
    both = [plan.saved_bytes_per_token(config, 0, 2, on_gpu) for on_gpu in (True, False)]
    queries, keys = 32 * 128, 4 * 128
    # CPU: two norms keep 2 D float32 each, those of queries and keys 2 float32; GPU: their inputs
    assert both[1] - both[0] == 4 * 4 * 2048 + 8 * (queries + keys) - 2 * (2 * 2048 + queries + keys)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_what_stands_is_counted_by_parameter(zero_stage):
    """With EP 8 on 16 GPUs: experts in eighths, two ranks update each of them; all else is updated by 16."""
    shape, bytes_of = plan.shape_of("Qwen3-30B-A3B"), dict.fromkeys(plan.STANDING[:4], 0)
    with torch.device("meta"):
        policy = moe_model.Policy(shape.config)
    for name, parameter in policy.named_parameters():
        held = parameter.numel() / (8 if ".experts." in name else 1)
        share = held / (2 if ".experts." in name else 16)
        bytes_of["weights"] += 2 * held
        bytes_of["gradients"] += 4 * (share if zero_stage == 2 else held)
        bytes_of["master weights"] += 4 * share
        bytes_of["AdamW"] += 8 * share
    task = make_task("model.ep_size=8", f"train.zero_stage={zero_stage}", gpus=16)
    found = plan.memory_parts(task)
    assert {name: found[name] for name in bytes_of} == pytest.approx(bytes_of, rel=1e-6)


def test_the_published_sum_for_30b_on_one_node():
    """By hand for 8 GPUs, EP 8, ZeRO 1: weights 9.6, gradients 19.2, masters 14.2, AdamW 28.4 GiB."""
    parts = plan.memory_parts(make_task(*FITTING))
    found = [parts[name] / GIB for name in plan.STANDING[:4]]
    assert found == pytest.approx([9.6, 19.2, 14.2, 28.4], abs=0.06)


def test_a_row_longer_than_a_micro_batch_counts_whole():
    tokens = [
        plan.micro_batch_tokens(
            make_task(f"train.micro_batch_tokens={n}", "rollout.max_new_tokens=8192").config
        )
        for n in (4096, 32768)
    ]
    assert tokens == [8192 + 1024 - 1, 32768]


def test_keys_and_values_take_what_is_left_and_phases_share_the_gpu():
    task = make_task(*FITTING)
    parts = plan.memory_parts(task)
    phases = plan.phase_memory(task.config, parts)
    standing = sum(parts[name] for name in plan.STANDING[:4])
    total = int(task.machine.memory_gib * GIB)
    assert phases["rollout"] <= max(total, standing + parts["engine weights"] + 8 * GIB)
    awake = plan.memory_parts(task.with_settings(rollout__sleep_level=0, rollout__kv_cache_gib=2.0))
    level_0 = plan.phase_memory(task.with_settings(rollout__sleep_level=0).config, awake)
    engine = parts["engine weights"] + 2 * GIB
    assert level_0["update"] - phases["update"] == engine, "an engine that sleeps makes room for the update"


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
    found = plan.wire_bytes(task.config, task.shape, 8, task.load)
    experts, embeddings, others = task.shape.counts
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


@pytest.mark.parametrize("own", [False, True])
def test_sync_bytes_are_those_of_the_tensors_that_are_sent(own):
    options = ["rollout.expert_parallel=true"] if own else []
    task = make_task("model.ep_size=8", "rollout.tensor_parallel=8", *options)
    with torch.device("meta"):
        policy = moe_model.Policy(task.shape.config)
    wire = given = 0
    for name, parameter in policy.named_parameters():
        size = 2 * parameter.numel()
        is_expert = ".experts." in name
        wire += size - size // 8 if is_expert and not own else 0
        given += size // 8 if is_expert and own else size
    found = plan.sync_bytes(task.config, task.shape)
    assert (found["over the wire"], found["handed over"]) == (wire, given)
    assert found["kept"] == rollout.engine_weight_bytes(task.shape.config, task.config.rollout)


# ---- seconds -----------------------------------------------------------------------------------------------
MEASURED = [  # NeMo-RL 0.4 on H100s: GPUs, EP, TP of engines, prompts, group, mean, limit, seconds
    ("Qwen3-30B-A3B", 32, 8, 4, 64, 32, 3154, 4096, 225),
    ("Qwen3-235B-A22B", 128, 16, 16, 16, 32, 5671, 8192, 506),
    ("Qwen3-32B", 32, 1, 4, 64, 32, 3206, 4096, 393),
    ("Qwen3-8B", 16, 1, 1, 64, 32, 1060, 4096, 97.7),  # Llama 3.1 8B there
]


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case[0])
def test_a_step_is_within_a_factor_of_two_of_public_measurements(case):
    model, gpus, ep_size, parallel, prompts, group, mean, limit, seconds = case
    task = make_task(
        f"model.ep_size={ep_size}", f"rollout.tensor_parallel={parallel}",
        f"rollout.prompts_per_step={prompts}", f"rollout.group_size={group}",
        "rollout.max_prompt_tokens=256", f"rollout.max_new_tokens={limit - 256}",
        "rollout.kv_cache_gib=30", "model.activation_checkpointing=true", "train.minibatches_per_step=4",
        model=model, gpus=gpus, prompts=160, new=mean - 160,
    )  # fmt: skip
    parts = plan.memory_parts(task)
    found = plan.phase_seconds(task.config, task.shape, parts, gpus, task.machine, task.load)
    assert 0.5 < sum(found.values()) / seconds < 2


def test_a_machine_twice_as_fast_takes_half_the_products_and_more_tokens_take_longer():
    task = make_task(*FITTING)
    slow = plan.product_seconds(task.shape, task.machine, 1e6, 1000, 1)
    fast = plan.product_seconds(task.shape, plan.replace(task.machine, tflops=2 * 989), 1e6, 1000, 1)
    assert fast == pytest.approx(slow / 2)
    steps = [
        plan.decode_step_seconds(task.config, task.shape, task.machine, b, 4000) for b in (1, 8, 64, 512)
    ]
    assert steps == sorted(steps) and steps[-1] < 100 * steps[0], "a batch shares the reading of weights"


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
    assert not plan.fits(task)
    lines = plan.advice(task)
    assert lines
    for line in lines:
        words = line.split()
        more = int(words[words.index("--gpus") + 1]) if "--gpus" in words else gpus
        changed = [word for word in words if "=" in word]
        assert plan.fits(make_task(*settings, *changed, model=model, gpus=more, machine=machine)), line


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


def test_search_proposes_what_fits_fastest_first():
    found = plan.search(make_task(gpus=8, machine="h200"), most=4)
    seconds = [one["seconds"]["step"] for _, one in found]
    assert len(found) == 4 and seconds == sorted(seconds) and all(one["fits"] for _, one in found)
    assert {"model__ep_size", "rollout__tensor_parallel", "train__micro_batch_tokens"} < found[0][0].keys()


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


# ---- the complete configurations ---------------------------------------------------------------------------
NOTHING_GIVEN = plan.parse_args(["--config", "unused"])


def shrunken(config):
    """Return a model of the same layout with two layers and small widths."""
    values = config.to_dict() | {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "intermediate_size": 64,
        "vocab_size": 64,
    }
    values |= {"head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "layer_types": None}
    if moe_model.num_experts_of(config):
        values |= {"moe_intermediate_size": 32}
    return type(config)(**values)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: str(file.relative_to(ROOT / "experiments/models")))
def test_a_config_fits_its_machine_and_says_what_the_planner_says(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    task, words = plan.make_task([file], NOTHING_GIVEN)
    assert plan.fits(task)
    assert plan.first_lines(file, task, words) == plan.comment_of(file), "write them with --write-header"
    assert all(len(line) <= 110 for line in file.read_text().splitlines())


@pytest.mark.parametrize(
    "file", [f for f in CONFIGS if f.parent.name == "models"], ids=lambda file: file.stem
)
def test_a_config_loads_with_a_shrunken_model_of_its_layout(file, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    task, _ = plan.make_task([file], NOTHING_GIVEN)
    small = shrunken(task.shape.config)
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path / "model")
    config = task.config
    check_model(config, moe_model.load_config(tmp_path / "model"))
    rollout.check_fp8(config.rollout, task.shape.config)
    policy = moe_model.build_policy(
        config.model.model_copy(update={"dtype": "float32"}), tmp_path / "model", None, torch.device("cpu")
    )
    logprobs, _, routes = policy(moe_model.pack([[1, 2]], [[3, 4, 5]], "cpu"))
    assert logprobs.shape == (3,) and logprobs.isfinite().all() and len(routes) == 2
    assert (routes[0] is None) == (moe_model.num_experts_of(small) == 0)


def test_the_rows_of_espo_differ_from_their_parent_in_one_thing():
    rows = {f.stem: load_config(["--config", str(f)]) for f in CONFIGS if f.parent.name == "espo_30b"}
    parent = load_config(["--config", str(ROOT / "experiments/models/qwen3_30b_a3b_4_nodes.yaml")])
    dumps = {name: json.dumps(config.algorithm.model_dump(), sort_keys=True) for name, config in rows.items()}
    assert rows["espo"].algorithm == parent.algorithm and len(set(dumps.values())) == len(rows) == 13
    for name, config in rows.items():
        same = {
            section: getattr(config, section) for section in ("model", "data", "rollout", "train", "eval")
        }
        assert all(getattr(parent, section) == value for section, value in same.items()), name
    for name in ("espo", "gspo", "gmpo", "cispo"):
        method = load_config(
            [
                "data.train=[{path: x}]",
                "algorithm.router_replay=r3",
                "--config",
                str(ROOT / f"experiments/methods/{name}.yaml"),
            ]
        )
        unused = ("entropy_groups", "entropy_clip_coef")
        if name != "espo":
            assert method.algorithm.model_dump(exclude=unused) == rows[name].algorithm.model_dump(
                exclude=unused
            )
    dapo = load_config(
        ["data.train=[{path: x}]", "--config", str(ROOT / "experiments/methods/dapo.yaml")]
    ).algorithm
    assert (dapo.loss_agg, dapo.clip_eps_high) == (rows["dapo"].algorithm.loss_agg, 0.28)


# ---- measured ----------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, case",
    [
        (1, "dtype=float32,tokens=2048,layers=3"),
        (1, "dtype=float32,tokens=8192,layers=6,experts=4,checkpointing=1"),
        (2, "dtype=float32,tokens=512,ep=2,ranks=2,layers=4"),
        (2, "dtype=bfloat16,tokens=2048,ep=1,ranks=2,layers=4"),
        (2, "dtype=bfloat16,tokens=512,ep=2,zero=2,ranks=2"),
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
