"""LoRA against peft, against a loop over experts, and against the merged weights.

peft adapts transformers' own models, so that neither layout nor names of extras/lora.py are assumed. The
ranks of model_suites.lora() repeat updates under expert parallelism, ZeRO, offload and activation
checkpointing.
"""

import json
import os
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from conftest import SMALL, trained
from helpers import RankSuite, assert_resumes_exactly, make_batch, make_config
from model_suites import (
    ADAMW,
    LORA,
    LORA_CASES,
    MAX_GRAD_NORM,
    backward,
    packed_batch,
    policy_like,
    reference_logprobs,
    tiny_batch,
    tiny_config,
    tiny_model,
)  # fmt: skip
from safetensors.torch import load_file
from test_plan import make_task as plan_task

import lifecycle
import moe_model
import train_rl
from configure import load_config
from experiments import evaluate
from extras import lora
from fp8 import simulate_rounding
from runtime import checkpoint
from runtime.checkpoint import TrainState

PARITY = 1e-5  # as in test_model.py
KINDS = ("dense", "dense_tied", "llama", "moe", "mixtral", "olmoe", "glm", "granite")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def adapted(kind: str, hf=None, b_scale: float = 0.1, **settings) -> moe_model.Policy:
    """Make a policy with adapters whose B is random, so that they have an effect."""
    policy = policy_like(hf or tiny_model(kind))
    config = make_config("rollout.dtype=bfloat16", section="lora", **({"rank": 3, "alpha": 6.0} | settings))
    lora.EXTRA.check_model(config, policy.config)
    lora.EXTRA.adapt(policy, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for merged in policy.merged.values():
            merged.b.copy_(b_scale * torch.randn(merged.b.shape, generator=generator))
    return policy


def through_peft(policy: moe_model.Policy, hf, folder: Path, **settings):
    """Save the adapters of a policy, and load them with peft on transformers' model."""
    config = make_config("rollout.dtype=bfloat16", section="lora", **({"rank": 3, "alpha": 6.0} | settings))
    lora.EXTRA.save(policy, config, folder, lora.save_file)
    return peft.PeftModel.from_pretrained(hf, folder / "adapter", is_trainable=True)


def gradients(policy: moe_model.Policy) -> dict[str, torch.Tensor]:
    """Return the gradients of the adapters by their names in a file of PEFT and in its layout."""
    named = {}
    for name, merged in policy.merged.items():
        grads = [merged.a.grad, merged.b.grad]
        if grads[0].dim() == 3:
            grads = [grads[0].flatten(0, 1), grads[1].permute(1, 2, 0).flatten(1)]
        named |= zip(lora.file_names(policy.config, name), grads)
    return named


@pytest.mark.parametrize("kind", KINDS)
def test_peft_computes_the_exported_adapter_and_its_gradients_alike(kind, tmp_path):
    """A random B also for experts, dense MLPs of a MoE, shared experts; rsLoRA in half of the families."""
    hf = tiny_model(kind)
    rslora = kind in KINDS[::2]
    policy = adapted(kind, hf, rslora=rslora)
    logprobs, *_ = policy(packed_batch())
    base, *_ = lora.Base(policy)(packed_batch())
    expected_base, _ = reference_logprobs(hf, tiny_batch())
    assert (base - torch.cat(expected_base)).abs().max() < PARITY
    model = through_peft(policy, hf, tmp_path, rslora=rslora)
    expected, _ = reference_logprobs(model, tiny_batch())
    assert (base - logprobs).abs().max() > 0.1
    assert (torch.cat(expected) - logprobs).abs().max() < PARITY

    backward(logprobs, tiny_batch())
    backward(torch.cat(expected), tiny_batch())
    theirs = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if "lora_" in name}
    ours = gradients(policy)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() < PARITY and gradient.abs().max() > 1e-4, name
    assert all(p.grad is None for name, p in policy.named_parameters() if "lora_" not in name)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_experts_with_adapters_are_a_loop_over_experts(rank):
    """Written without peft and grouped products; two experts have no row."""
    experts = adapted("moe", rank=rank, alpha=2.0).model.layers[0].mlp.experts
    rows = [2, 0, 1, 17, 3, 0, 4, 5]
    x = torch.randn(sum(rows), 32, requires_grad=True)
    inputs = [x, *(matrix for name in lora.FUSED for matrix in lora.pair_of(experts, name))]
    expected = []
    for e, rows_of_expert in enumerate(x.split(rows)):
        a_in, b_in, a_out, b_out = (matrix[e] for matrix in inputs[1:])
        gate_up = rows_of_expert @ experts.gate_up_proj[e].T + 2.0 / rank * (rows_of_expert @ a_in.T @ b_in.T)
        hidden = torch.nn.functional.silu(gate_up[:, :24]) * gate_up[:, 24:]
        expected.append(hidden @ experts.down_proj[e].T + 2.0 / rank * (hidden @ a_out.T @ b_out.T))
    outputs = [experts(x, torch.tensor(rows)), torch.cat(expected)]
    gradients_of = [torch.autograd.grad((out * x.detach()).sum(), inputs) for out in outputs]
    for our, their in zip(*([out, *grads] for out, grads in zip(outputs, gradients_of)), strict=True):
        assert (our - their).abs().max() < PARITY and their.abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_computes_like_the_adapters(kind, tmp_path):
    policy = adapted(kind, rslora=True)
    logprobs, *_ = policy(packed_batch())
    moe_model.save_hf(policy, tmp_path)
    merged = moe_model.Policy(policy.config)
    moe_model.load_hf(merged, tmp_path)
    assert (merged(packed_batch())[0] - logprobs).abs().max() < PARITY
    sent = dict(moe_model.hf_tensors(policy))
    for name, tensor in moe_model.hf_tensors(merged):
        assert torch.equal(sent[name], tensor), name
    own = dict(moe_model.hf_tensors(policy, own_experts=True))
    assert all(torch.equal(own[name], tensor) for name, tensor in moe_model.hf_tensors(merged, True))


def test_the_reference_of_a_kl_penalty_is_the_model_without_adapters(one_rank):
    """Through the same function that computes the old policy, and without weights of its own."""
    policy = adapted("moe")
    config = make_config("lora.rank=3", "algorithm.kl_coef=0.1")
    reference = lifecycle.build_reference(config, policy, None, torch.device("cpu"))
    batch = make_batch([[5, 6], [7]], [[1, 2], [3]], rollout_logprobs=[[-1.0, -2.0], [-0.5]],
                       advantages=[[1.0, 1.0], [-1.0]])  # fmt: skip
    plain = policy_like(tiny_model("moe"))
    expected = train_rl.forward_batch(plain, batch, config, replay=False).logprobs
    assert torch.equal(train_rl.forward_batch(reference, batch, config, replay=False).logprobs, expected)
    assert (train_rl.forward_batch(policy, batch, config).logprobs - expected).abs().max() > 0.01
    assert {p.data_ptr() for p in reference.parameters()} == {p.data_ptr() for p in policy.parameters()}


@pytest.mark.parametrize("kind, replay", [("dense", False), ("moe", False), ("moe", True), ("mixtral", True)])
def test_a_step_of_b_moves_the_weights_by_the_projected_gradient(kind, replay):
    """By -rate dW P with P the projection on the rows of A, orthonormal here; P = 1 if A has full rank.

    dW is the gradient of full training. Random routes are replayed as with R3.
    """
    full = policy_like(tiny_model(kind))
    policy = adapted(kind, b_scale=0.0, rank=24, alpha=24.0)
    for merged in policy.merged.values():
        merged.a.data.copy_(torch.linalg.qr(merged.a.data.mT).Q.mT)
    routes = torch.rand(len(packed_batch().input_ids), 3, 8).argsort(-1)[..., :3] if replay else None
    for model in (full, policy):
        backward(model(packed_batch(), replay_ids_TLK=routes)[0], tiny_batch())
    num_full = 0
    for name, merged in policy.merged.items():
        projection = (merged.a.mT @ merged.a).detach()
        num_full += torch.allclose(projection, torch.eye(len(projection[-1])), atol=1e-6)
        merged.b.data.sub_(0.5 * merged.b.grad)
        move = merged.to(torch.float32) - merged.weight
        expected = -0.5 * full.get_parameter(name).grad @ projection
        assert (move - expected).abs().max() < PARITY and expected.abs().max() > 1e-4, name
    assert num_full > 0 or kind == "dense", "down_proj of the experts has 24 inputs"


def test_a_finer_engine_gets_the_update_that_weights_in_bfloat16_would_round_away(capsys):
    policy = adapted("moe", b_scale=1e-5).bfloat16()
    for dtype, share in ((torch.bfloat16, 0.1), (torch.float32, 1.0)):
        policy.lora.engine_dtype = dtype
        policy.lora.survival = None
        sent = dict(moe_model.hf_tensors(policy))
        kept, whole = policy.lora.survival
        assert kept / whole == pytest.approx(share, abs=0.1)
        assert sent["model.layers.0.mlp.experts.down_proj"].dtype == dtype
        assert sent["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16


# ---- Ranks -------------------------------------------------------------------------------------------------
def save_starts(folder: Path) -> None:
    """Save the models, and for each case adapters that a policy of one process has made."""
    for name, (kind, *_, dtype, targets) in LORA_CASES.items():
        if not (folder / kind).exists():
            tiny_model(kind).save_pretrained(folder / kind)
        policy = adapted(kind, targets=targets).to(dtype)
        lora.EXTRA.save(policy, make_config(*LORA, f"lora.targets={targets}"), folder / name, lora.save_file)


SUITE = RankSuite("lora", 2, save_starts)


def peft_steps(kind: str, adapter: Path, num_steps: int = 2) -> dict[str, torch.Tensor]:
    """Train the adapters with peft, transformers and torch's AdamW in one process."""
    model = peft.PeftModel.from_pretrained(tiny_model(kind), adapter, is_trainable=True)
    named = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(named.values(), **{**ADAMW, "betas": tuple(ADAMW["betas"])})
    for step in range(num_steps):
        optimizer.zero_grad()
        expected, _ = reference_logprobs(model, tiny_batch())
        backward(torch.cat(expected), tiny_batch(), step)
        assert torch.nn.utils.clip_grad_norm_(named.values(), MAX_GRAD_NORM) > 2 * MAX_GRAD_NORM
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", LORA_CASES)
def test_two_updates_of_two_ranks_are_those_of_peft_and_resume_bit_for_bit(name):
    kind, ep_size, *_, dtype, targets = LORA_CASES[name]
    expected = peft_steps(kind, SUITE.folder() / name / "adapter")
    start = load_file(SUITE.folder() / name / "adapter" / lora.TENSORS)
    base = policy_like(tiny_model(kind)).to(dtype).state_dict()
    results = SUITE.results()
    num_held = sum(tensor.numel() for tensor in start.values())
    num_masters = sum(master.numel() for result in results for master in result[name]["shard"]["masters"])
    assert num_held <= num_masters <= num_held + 16, "frozen weights have no optimizer state"
    for result in (of_rank[name] for of_rank in results):
        assert result["adapter"].keys() == expected.keys() == start.keys()
        for key, value in expected.items():
            assert torch.equal(result["resumed"][key], result["adapter"][key])
            tolerance = 1e-6 if dtype == torch.float32 else 2e-2
            assert (result["adapter"][key] - value).abs().max() < tolerance, key
            assert (start[key] - value).abs().max() > 1e-3, "two updates move every adapter"
        for key, tensor in result["frozen"].items():
            slices = base[key].split(len(tensor))  # experts of each rank
            assert any(torch.equal(tensor, of_rank) for of_rank in slices), key
    merged = moe_model.Policy(moe_model.load_config(SUITE.folder() / f"{name}_merged")).to(dtype)
    moe_model.load_hf(merged, SUITE.folder() / f"{name}_merged")
    for key, tensor in moe_model.hf_tensors(merged):
        assert all(torch.equal(of_rank[name]["sent"][key], tensor) for of_rank in results), key


# ---- Plan --------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_adapters_start_as_those_of_peft_whichever_rank_holds_the_experts():
    """B is zero; A is uniform within 1 / sqrt(inputs), as far as a draw shows."""
    folders = [SUITE.folder() / f"{name}_new" / "adapter" for name in ("ep_1", "ep_2")]
    ours, of_two = (load_file(folder / lora.TENSORS) for folder in folders)
    model = peft.get_peft_model(tiny_model("moe"), peft.PeftConfig.from_pretrained(folders[0]))
    theirs = {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name}
    assert ours.keys() == theirs.keys() == of_two.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, of_two[name])
        bound = 0 if "lora_B" in name else tensor.shape[-1] ** -0.5
        for values in (tensor, theirs[name].detach()):
            assert 0.9 * bound <= values.abs().max() <= bound
            assert values.square().mean() == pytest.approx(bound**2 / 3, rel=0.3)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_frozen_weights_take_no_gradients_and_no_optimizer_states(zero_stage):
    """Qwen3-30B-A3B on 2 GPUs, EP 2, rank 8: adapters of 48 layers, counted by hand."""
    attention = (2048 + 4096) + 2 * (2048 + 512) + (4096 + 2048)  # q, k and v, o
    num_attention = 48 * 8 * attention
    num_experts = 48 * 128 * 8 * ((2048 + 1536) + (768 + 2048))
    full = plan_task("model.ep_size=2", f"train.zero_stage={zero_stage}", gpus=2).parts
    task = plan_task("model.ep_size=2", f"train.zero_stage={zero_stage}", "lora.rank=8",
                     "algorithm.kl_coef=0.1", gpus=2)  # fmt: skip
    assert task.trained == (num_experts, 0, num_attention)
    held = num_experts // 2 + num_attention
    assert task.parts["weights"] == full["weights"] + 2 * held
    assert task.parts["master weights"] == 4 * ((num_experts + num_attention) // 2)
    assert task.parts["AdamW"] == 2 * task.parts["master weights"]
    assert lifecycle.checkpoint_bytes(task.trained, "bfloat16") == (2 + 4 + 8) * (num_experts + num_attention)
    summed = {1: 4 * held, 2: task.parts["master weights"]}[zero_stage]
    assert task.parts["gradients"] + task.parts["gradients in an update"] == summed
    assert task.parts["reference"] == 0 and task.parts["activations"] == full["activations"]
    assert task.parts["on the way back"] < full["on the way back"]


# ---- Bad input ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("settings, words", [
    (["lora.rank=0"], "lora.rank"),
    (["lora.rank=true"], "lora.rank"),
    (["lora.alpha=0"], "lora.alpha"),
    (["lora.rank=4", "lora.targets=[]"], "lora.targets"),
    (["lora.rank=4", "lora.targets=[expert]"], "lora.targets.*'attention', 'mlp' or 'experts'.*'expert'"),
    (["lora.rank=4", "lora.targets=[router]"], "lora.targets.*'attention', 'mlp' or 'experts'.*'router'"),
    (["lora.alpha=4"], "lora.alpha.*lora.rank"),
    (["lora.rank=4", "model.freeze_router=true"], "model.freeze_router.*lora.rank"),
])  # fmt: skip
def test_wrong_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        load_config(["data.train=[{path: x}]", *settings])


@pytest.mark.parametrize("kind, settings, words", [
    ("dense", {"targets": ["experts"]}, "lora.targets.*dense model.*experts.*attention, mlp"),
    ("mixtral", {"targets": ["mlp"]}, "lora.targets.*MoE.*mlp.*attention, experts"),
    ("dense", {"rank": 25}, "lora.rank 25.*24"),  # keys and values have 2 x 12 outputs
    ("moe", {"rank": 25, "targets": ["experts"]}, "lora.rank 25.*24"),
])  # fmt: skip
def test_settings_that_do_not_fit_the_model_are_named(kind, settings, words):
    config = make_config(section="lora", **({"rank": 4} | settings))
    with pytest.raises(ValueError, match=words):
        lora.EXTRA.check_model(config, tiny_config(kind))


@pytest.mark.parametrize("saved, rank", [({"rank": 4}, "null"), ({}, "4"), ({"rank": 4}, "8")])
@pytest.mark.parametrize("resume", ["auto", "weights"])
def test_adapters_and_all_weights_do_not_resume_each_other(saved, rank, resume, one_rank):
    record = {"config": make_config(section="lora", **saved).model_dump(mode="json"), "state": {}}
    record["topology"] = checkpoint.topology(make_config())
    config = make_config(f"lora.rank={rank}", f"checkpoint.resume={resume}")
    if resume == "weights" and rank == "8":  # load() then refuses the shapes
        return checkpoint.check_fits(config, Path("step_1"), record)
    with pytest.raises(ValueError, match=f"step_1.*lora.rank.*{saved.get('rank')}"):
        checkpoint.check_fits(config, Path("step_1"), record)


def test_adapters_of_other_matrices_or_of_another_base_are_refused(tmp_path, one_rank):
    lora.EXTRA.save(adapted("moe"), make_config("lora.rank=3", "lora.alpha=6"), tmp_path, lora.save_file)
    for settings, names in (
        ({"rank": 4}, "lora.rank, lora.targets"), ({"targets": ["experts"]}, "lora.rank, lora.targets"),
        ({"alpha": 12.0}, "lora.alpha"), ({"rslora": True}, "lora.alpha, lora.rslora"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=names):
            lora.EXTRA.load(adapted("moe", **settings), tmp_path)
    lora.EXTRA.load(adapted("moe"), tmp_path)
    folders = [tmp_path / name for name in ("one", "one_expert", "other")]
    for seed, folder in enumerate(folders):
        tiny_model("moe", seed // 2).save_pretrained(folder)
    (file,) = folders[1].glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.6.up_proj.weight"][12, 16] += 1
    lora.save_file(tensors, file, metadata={"format": "pt"})
    names = sorted(tensors)
    again = tmp_path / "again"  # the same weights in two files
    shutil.copytree(folders[0], again)
    tensors = load_file(again / file.name)
    (again / file.name).unlink()
    for number, part in enumerate((names[::2], names[1::2])):
        lora.save_file({name: tensors[name] for name in part}, again / f"model-{number}.safetensors")
    index = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    (again / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert lora.digest_of_base(again) == lora.digest_of_base(folders[0])
    for value in (0, 1):  # one value of a large matrix
        tensor = torch.zeros(64, 64)
        tensor[19, 34] = value
        (tmp_path / str(value)).mkdir()
        lora.save_file({"weight": tensor}, tmp_path / str(value) / "model.safetensors")
    assert lora.digest_of_base(tmp_path / "0") != lora.digest_of_base(tmp_path / "1")
    state = TrainState()
    for folder, resume in ((folders[0], "auto"), (again, "auto"), *((f, "weights") for f in folders[1:])):
        config = make_config(f"model.path={folder}", "lora.rank=3", f"checkpoint.resume={resume}")
        launch = SimpleNamespace(config=config, state=state)
        if folder in (folders[0], again):
            lora.EXTRA.check(launch)
        else:
            with pytest.raises(ValueError, match="model.path.*other weights than"):
                lora.EXTRA.check(launch)
    (folders[0] / "generation_config.json").write_text('{"eos_token_id": 5}')
    launch.config = make_config(f"model.path={folders[0]}", "lora.rank=3")
    with pytest.raises(ValueError, match="model.path.*other generation_config.json than"):
        lora.EXTRA.check(launch)


@pytest.mark.slow
@pytest.mark.usefixtures("demo_model")
def test_a_run_with_adapters_resumes_exactly_and_is_evaluated(tmp_path):
    settings = [*SMALL, "train.num_steps=4", "lora.rank=2", "eval.every=0", "train.learning_rate=1e-2"]
    straight = tmp_path / "straight"
    done = trained(*settings, f"run.dir={straight}")
    assert f"{straight / 'adapter'}: its adapters" in done.stdout
    checkpoint = straight / "checkpoints" / "step_000002"
    assert (checkpoint / "adapter").is_dir() and not (checkpoint / "model").exists()
    with evaluate.open_model(straight) as (folder, name):
        assert folder == straight / "model" and name == "straight"
    assert_resumes_exactly(straight, 4, *settings)
    (ours, theirs) = (
        load_file(run / "adapter" / "adapter_model.safetensors")
        for run in (straight, straight.with_name("resumed"))
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(tensor.abs().max() > 0 for name, tensor in ours.items() if "lora_B" in name)
    os.utime(straight / "model" / "config.json", (0, 0))
    for words in ("adapters alone", "missing or older"):
        with pytest.raises(ValueError, match=words), evaluate.open_model(straight):
            pass
        shutil.rmtree(straight / "model", ignore_errors=True)


def test_a_sync_holds_one_merged_tensor_at_a_time_and_fp8_rounds_the_merged_weights():
    policy = adapted("moe")
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    made: list[weakref.ref] = []
    most = 0
    for _, tensor in moe_model.hf_tensors(policy):
        if tensor.untyped_storage().data_ptr() not in own:
            made.append(weakref.ref(tensor))
        del tensor
        most = max(most, sum(each() is not None for each in made))
    assert len(made) >= len(policy.merged) and most <= 1
    merged = [(name, tensor.clone()) for name, tensor in moe_model.hf_tensors(policy)]
    sent, expected = (
        dict(simulate_rounding(iter(named))) for named in (moe_model.hf_tensors(policy), merged)
    )
    assert all(torch.equal(sent[name], expected[name]) for name, _ in merged)
    assert any(not torch.equal(expected[name], tensor) for name, tensor in merged)


# ---- What a sync loses -------------------------------------------------------------------------------------
def test_merged_frac_is_the_share_of_the_update_that_rounding_leaves(capsys):
    """By hand: 1 + 2^-10 rounds back to 1 in bfloat16, whose next value is 1 + 2^-7; 1 + 2^-6 is exact."""
    for steps, frac in ((2**-10, 0.0), (2**-6, 1.0), (2**-7 * 0.75, 1 / 0.75)):
        adapters = lora.Adapters(scale=2.0, engine_dtype=torch.bfloat16)
        b = torch.full((3, 1), steps / 2)
        lora.Merged(torch.ones(3, 2), torch.ones(1, 2), b, adapters).to(torch.float32)
        lora.Merged(torch.ones(3, 2), torch.ones(1, 2), 0 * b, adapters).to(torch.float32)
        batch = SimpleNamespace(extras={"lora": adapters})
        kept, whole = lora.EXTRA.metrics(batch)["lora/merged_frac"]
        assert kept / whole == pytest.approx(frac)
        assert ("lora/merged_frac" in capsys.readouterr().out) == (frac < 0.5)
        run = SimpleNamespace(policy=SimpleNamespace(lora=adapters))
        lora.EXTRA.after_rollout(run, batch, [])
        assert lora.EXTRA.metrics(batch) == {"lora/merged_frac": (0.0, 0.0)}


def test_the_share_does_not_depend_on_expert_parallelism():
    """The ranks of ep_1 and ep_2 start alike; only the first has all experts on each rank."""
    sums = {name: sum(of_rank[name]["survival"] for of_rank in SUITE.results()) for name in ("ep_1", "ep_2")}
    shares = {name: (pair[0] / pair[1]).item() for name, pair in sums.items()}
    assert shares["ep_1"] == pytest.approx(shares["ep_2"], rel=1e-4) and 0.5 < shares["ep_1"] < 1.1
