"""moe_model.py against transformers (one unpadded sequence at a time) and slow loops.

model_suites.py runs the sections that need several ranks, once per world size; the tests here compare the
stored results.

Tolerances. float32 rounds at 6e-8. Activations and gradients here are of size 1 and pass about ten matrix
products of width 12 to 50, and the two sides add the terms in different orders: 1e-5 leaves a factor of ten.
A wrong formula is off by 1e-2 or more. If both sides do the same operations in the same order, results are
bitwise equal.
"""

import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, save_small_moe
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from helpers import RankSuite
from model_suites import (
    ADAMW,
    DISPATCH_CASES,
    EAGER,
    MAX_GRAD_NORM,
    MICRO_BATCHES,
    RESUME_CASES,
    STEP_CASES,
    backward,
    dispatch_inputs,
    gradients_after_another_choice,
    own_names,
    packed_batch,
    policy_like,
    reference_logprobs,
    tiny_batch,
    tiny_config,
    tiny_model,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GemmaConfig

import memory_plan
import moe_model
from moe_model import INDEX, Policy, grouped_linear, load_config, load_hf, pack, save_hf
from settings import ModelSettings, RolloutSettings

MOE_KINDS = ["moe", "moe_other", "olmoe", "mixtral", "glm", "glm_plain", "granite"]
KINDS = [*MOE_KINDS, "dense", "dense_tied", "llama"]
PARITY = 1e-5  # explained above


# ------------------------------------------------------------------------------------------------------------
# Helpers
# ------------------------------------------------------------------------------------------------------------
def block_of(layer) -> torch.nn.Module:
    """Return the MLP or MoE block of a layer of transformers."""
    return layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp


def pop_gradients(module) -> dict[str, Tensor]:
    gradients = own_names((name, p.grad) for name, p in module.named_parameters())
    module.zero_grad(set_to_none=True)
    return gradients


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], atol: float, alive: float = 0.0) -> None:
    """Check names and values within atol (0: bitwise); the largest value of each tensor exceeds `alive`."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].shape == value.shape and got[name].dtype == value.dtype, name
        difference = float((got[name] - value).detach().abs().max()) if value.numel() else 0.0
        assert difference <= atol, f"{name} differs by {difference}"
        assert alive == 0.0 or value.abs().max() > alive, f"{name} is too small to be compared"


def save_models(folder: Path) -> None:
    """Save the checkpoints that the ranks start from, in the format of transformers."""
    tiny_model("moe").save_pretrained(folder / "start", max_shard_size="40KB")
    tiny_model("dense").save_pretrained(folder / "dense")
    tiny_model("glm").save_pretrained(folder / "glm")
    tiny_model("granite").save_pretrained(folder / "granite")
    tiny_model("llama").save_pretrained(folder / "llama")
    assert len(list((folder / "start").glob("*.safetensors"))) > 1, "load_hf should meet several files"


SUITES = {world_size: RankSuite("model", world_size, save_models) for world_size in (1, 2, 4)}


def section(name: str, world_size: int) -> list[dict]:
    """Return the result of a section of model_suites.py on every rank."""
    return [result[name] for result in SUITES[world_size].results()]


# ------------------------------------------------------------------------------------------------------------
# Packing
# ------------------------------------------------------------------------------------------------------------
def test_pack_against_slow_construction():
    batch = tiny_batch()
    batch.prompt_ids.append([9])  # one token, which predicts nothing
    batch.completion_ids.append([])
    packed = packed_batch(batch)
    longest = max(max(1, len(p) + len(c) - 1) for p, c in zip(batch.prompt_ids, batch.completion_ids))
    tokens, positions, places, predictors, targets = [], [], [], [], []
    for b, (prompt, completion) in enumerate(zip(batch.prompt_ids, batch.completion_ids)):
        sequence = prompt + completion
        for i, token in enumerate(sequence):
            if i == len(sequence) - 1 and i > 0:
                continue  # the last token predicts nothing
            if i + 1 >= len(prompt) and i + 1 < len(sequence):  # the next token belongs to the completion
                predictors.append(len(tokens))
                targets.append(sequence[i + 1])
            tokens.append(token)
            positions.append(i)
            places.append(b * longest + i)
    assert packed.input_ids.tolist() == tokens
    assert packed.position_ids.tolist() == positions
    assert packed.padded_index.tolist() == places
    assert packed.padded_shape == (len(batch.prompt_ids), longest)
    assert packed.predictor_index.tolist() == predictors
    assert packed.target_ids.tolist() == targets == [t for c in batch.completion_ids for t in c]
    assert {t.dtype for t in vars(packed).values() if isinstance(t, Tensor)} == {torch.int64}


def test_pack_refuses_an_empty_prompt_and_a_missing_completion():
    with pytest.raises(AssertionError, match="prompt"):
        pack([[1], []], [[2], [3]], "cpu")
    with pytest.raises(ValueError):
        pack([[1], [2]], [[3]], "cpu")


# ------------------------------------------------------------------------------------------------------------
# Parity with transformers
# ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_gradients_match_transformers(kind, temperature):
    hf = tiny_model(kind)
    batch = tiny_batch()
    policy = policy_like(hf)
    logprobs, entropy, layer_ids, _ = policy(packed_batch(batch), temperature=temperature)
    expected = torch.cat(reference_logprobs(hf, batch, temperature)[0])
    assert logprobs.dtype == entropy.dtype == torch.float32
    routed = [hasattr(block_of(layer), "experts") for layer in hf.model.layers]
    assert [ids is not None for ids in layer_ids] == routed
    assert expected.std() > 0.5, "log-probabilities close to uniform would hide a mistake"
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=PARITY)
    backward(logprobs, batch)
    backward(expected, batch)
    assert_same(pop_gradients(policy), pop_gradients(hf), atol=PARITY, alive=1e-3)


@pytest.mark.parametrize("kind", MOE_KINDS)
def test_replay_of_random_routes_matches_transformers(kind):
    """Force random routes on transformers' router too; the weights come from each side's own softmax."""
    hf = tiny_model(kind)
    batch = tiny_batch()
    policy = policy_like(hf)
    config = hf.config
    is_glm = kind.startswith("glm")
    is_granite = kind == "granite"
    generator = torch.Generator().manual_seed(5)
    sizes = (len(packed_batch(batch).input_ids), config.num_hidden_layers, moe_model.num_experts_of(config))
    draws = torch.rand(sizes, generator=generator)
    routes = draws.argsort(dim=-1)[..., : config.num_experts_per_tok].to(torch.uint8)  # [T, L, K]
    forced = {}  # layer -> routes [S, K] of one sequence

    def force(layer: int):
        def hook(router, inputs, outputs):
            logits = outputs[2 if is_granite else 0]
            scores = logits.sigmoid() if is_glm else logits.softmax(dim=-1)
            weights = scores.gather(1, forced[layer])
            if kind in ("mixtral", "granite") or config.norm_topk_prob:
                weights = weights / weights.sum(1, keepdim=True)
            if is_granite:
                return forced[layer], weights, logits
            return outputs[0], weights * config.routed_scaling_factor if is_glm else weights, forced[layer]

        return hook

    for i, layer in enumerate(hf.model.layers):
        if hasattr(block_of(layer), "experts"):
            router = block_of(layer).router if is_granite else layer.mlp.gate
            router.register_forward_hook(force(i))
    expected, first = [], 0
    for prompt, completion in zip(batch.prompt_ids, batch.completion_ids):
        inputs = (prompt + completion)[:-1]
        forced |= {i: routes[first : first + len(inputs), i].long() for i in range(config.num_hidden_layers)}
        first += len(inputs)
        logp = hf(input_ids=torch.tensor([inputs]), use_cache=False).logits[0].log_softmax(-1)
        expected += [logp[len(prompt) - 1 + t, token] for t, token in enumerate(completion)]
    backward(torch.stack(expected), batch)
    logprobs, *_ = policy(packed_batch(batch), replay_ids_TLK=routes)
    backward(logprobs, batch)
    torch.testing.assert_close(logprobs, torch.stack(expected), rtol=0, atol=PARITY)
    assert_same(pop_gradients(policy), pop_gradients(hf), atol=PARITY, alive=1e-3)


# ------------------------------------------------------------------------------------------------------------
# Experts
# ------------------------------------------------------------------------------------------------------------
class CarelessGroupedMM(torch.autograd.Function):
    """Return NaN as the gradient of an expert without rows; some GPUs return old memory (pytorch #172439)."""

    @staticmethod
    def forward(ctx, x, weight, offs):
        ctx.save_for_backward(x, weight, offs)
        counts = offs.diff(prepend=offs.new_zeros(1)).tolist()
        return torch.cat([part @ w for part, w in zip(x.split(counts), weight)])

    @staticmethod
    def backward(ctx, grad):
        x, weight, offs = ctx.saved_tensors
        counts = offs.diff(prepend=offs.new_zeros(1)).tolist()
        by_expert = list(zip(x.split(counts), grad.split(counts), weight))
        grad_x = torch.cat([g @ w.mT for _, g, w in by_expert])
        grads = [part.mT @ g if len(part) else torch.full_like(w, math.nan) for part, g, w in by_expert]
        return grad_x, torch.stack(grads), None


@pytest.mark.parametrize("careless", [False, True])
@pytest.mark.parametrize("counts", [[3, 1, 4, 2], [0, 5, 0, 1], [0, 0, 7, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_grouped_linear_multiplies_every_row_by_the_matrix_of_its_expert(
    counts, dtype, careless, monkeypatch
):
    """Counts are unaligned, zero for some experts, or zero for all. float64 takes the loop, the other types
    take grouped_mm.

    Numbers are of size 5, sums of up to 24 products: atol is 20 roundings of that in each type.
    """
    calls = []
    real = F.grouped_mm

    def grouped_mm(x, weight, *, offs):
        calls.append(1)
        return CarelessGroupedMM.apply(x, weight, offs) if careless else real(x, weight, offs=offs)

    monkeypatch.setattr(F, "grouped_mm", grouped_mm)
    generator = torch.Generator().manual_seed(2)
    x, weight, grad = [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in [(sum(counts), 24), (4, 16, 24), (sum(counts), 16)]
    ]
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = grouped_linear(*leaves, torch.tensor(counts))
    out.backward(grad)
    assert bool(calls) == (dtype != torch.float64 and sum(counts) > 0)
    exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
    expert = [e for e, count in enumerate(counts) for _ in range(count)]
    expected = torch.einsum("pd,pod->po", exact[0], exact[1][expert])
    expected.backward(grad.double())
    assert out.dtype == dtype and out.shape == expected.shape
    atol = 20 * 5 * torch.finfo(dtype).eps / 2
    for got, want in [(out, expected), *((a.grad, b.grad) for a, b in zip(leaves, exact))]:
        torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


@pytest.mark.parametrize("counts", [[3, 0, 130, 64], [0, 0, 0, 0]])
def test_padded_rows_of_experts_change_no_result(counts, monkeypatch):
    """In bfloat16 on CPUs, oneDNN gets multiples of 64 rows: 64, 0, 192, 64.

    The float64 experts have the same weights. Values of size 1 pass three roundings of bfloat16, of 2^-9.
    """
    offsets = []
    real = F.grouped_mm
    record = lambda x, weight, *, offs: offsets.append(offs.tolist()) or real(x, weight, offs=offs)
    monkeypatch.setattr(F, "grouped_mm", record)
    experts = moe_model.Experts(tiny_config("moe"), 4, "ep_size_1").bfloat16()
    generator = torch.Generator().manual_seed(2)
    hidden = experts.down_proj.shape[1]
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    exact = moe_model.Experts(tiny_config("moe"), 4, "ep_size_1").double()
    exact.load_state_dict(experts.state_dict())
    x = torch.randn(sum(counts), hidden, generator=generator).bfloat16()
    inputs = [x.clone().requires_grad_(), x.double().requires_grad_()]
    results = [layer(rows, torch.tensor(counts)) for layer, rows in zip((experts, exact), inputs)]
    for result in results:
        result.sum().backward()
    assert offsets == ([[64, 64, 256, 320]] * 2 if sum(counts) else [])
    pairs = [results, *([a.grad, b.grad] for a, b in zip(experts.parameters(), exact.parameters()))]
    for got, want in [*pairs, [rows.grad for rows in inputs]]:
        scale = want.abs().max().item() if want.numel() else 0
        torch.testing.assert_close(got.double(), want, rtol=0, atol=3 * 2**-9 * max(scale, 1))


def slow_moe(x, gate, gate_up_proj, down_proj, top_k: int, renormalise: bool, forced=None) -> Tensor:
    """Compute a MoE layer from its equations, one token and one expert at a time."""
    rows = []
    for t, token in enumerate(x):
        scores = torch.stack([gate[e] @ token for e in range(len(gate))])
        scores = scores.exp() / scores.exp().sum()
        experts = sorted(range(len(gate)), key=lambda e: -scores[e].item())[:top_k]
        experts = experts if forced is None else forced[t].tolist()
        total = sum(scores[e] for e in experts) if renormalise else 1.0
        row = torch.zeros_like(token)
        for e in experts:
            gated, up = (gate_up_proj[e] @ token).chunk(2)
            row = row + scores[e] / total * (down_proj[e] @ (gated * torch.sigmoid(gated) * up))
        rows.append(row)
    return torch.stack(rows) if rows else x * 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(37, 576), (20, 9, 64), (0, 64)])
def test_the_norm_has_the_bits_of_torch_and_leaves_its_inputs_as_they_are(shape, dtype):
    """Values of sizes 0 to 1000, and a row of zeros."""
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, *shape, generator=generator)
    x = (x * torch.linspace(-2, 2, shape[-1]).pow(10)).to(dtype)
    x[:1] = 0
    grad = grad.to(dtype)
    results = []
    for norm in (moe_model.RMSNorm(shape[-1], eps=1e-6), torch.nn.RMSNorm(shape[-1], eps=1e-6)):
        norm.weight.data = torch.linspace(0.5, 2, shape[-1])
        norm.to(dtype)
        leaf = x.clone().requires_grad_()
        stream = leaf * 1
        y = stream + norm(stream)
        y.backward(grad.clone())
        assert torch.equal(leaf, x)
        results.append((y, leaf.grad, norm.weight.grad))
    for actual, expected in zip(*results):
        assert torch.equal(actual, expected)


def test_gradients_are_added_to_float32_sums_as_by_deepspeed():
    """Two gradients of more than one part, after a backward pass without a gradient."""
    gradients = torch.randn(2, 400, 700, generator=torch.Generator().manual_seed(0)).bfloat16()
    results = []
    for add in (moe_model.add_gradient, BF16_Optimizer._update_hp_grad):
        optimizer = SimpleNamespace(
            fp32_groups_gradients=[[torch.zeros(280_000)]], fp32_groups_has_gradients=[[False]],
            autoep_folding_tp_group=None,
        )  # fmt: skip
        parameter = torch.nn.Parameter(torch.zeros(400, 700, dtype=torch.bfloat16))
        add(optimizer, parameter, 0, 0, clear_lp_grads=False)
        assert not optimizer.fp32_groups_has_gradients[0][0]
        for parameter.grad in gradients:
            add(optimizer, parameter, 0, 0, clear_lp_grads=False)
        assert parameter._hp_grad is optimizer.fp32_groups_gradients[0][0]
        assert optimizer.fp32_groups_has_gradients[0][0]
        results.append(parameter._hp_grad)
    assert torch.equal(*results) and results[0].any()


def test_the_gradient_of_taken_rows_goes_to_their_places():
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    for index in ([3, 1], [4, 2, 0, 3, 1], []):
        assert torch.autograd.gradcheck(moe_model.TakeRows.apply, (x, torch.tensor(index).long()))


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("chunk", [1, 50, 2**20])
def test_moe_block_against_slow_loop(renormalise, chunk, monkeypatch):
    """Rows move to experts and back in chunks of at most this many elements."""
    monkeypatch.setattr(moe_model, "CHUNK_ELEMENTS", {"cpu": chunk})
    inputs = dispatch_inputs("live")
    config = tiny_config("moe")
    config.norm_topk_prob = renormalise
    block = moe_model.MoEBlock(config, None)
    exact = {name: value.double().requires_grad_() for name, value in inputs.weights.items()}
    block.load_state_dict(exact)
    x = inputs.x[0].requires_grad_()
    x_exact = inputs.x[0].detach().double().requires_grad_()
    y, ids = block(x)
    expected = slow_moe(x_exact, *exact.values(), top_k=3, renormalise=renormalise)
    torch.testing.assert_close(y.double(), expected, rtol=PARITY, atol=PARITY)
    assert ids.shape == (5, 3)
    loads = moe_model.take_expert_loads(block)
    assert loads.tolist() == [ids.flatten().bincount(minlength=block.num_experts).tolist()]
    assert moe_model.take_expert_loads(block) is None
    (y * inputs.loss_weights[0]).sum().backward()
    (expected * inputs.loss_weights[0]).sum().backward()
    for got, want in [(x, x_exact), *((p, exact[name]) for name, p in block.named_parameters())]:
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=PARITY, atol=PARITY)


@pytest.mark.parametrize("kind", ["moe", "glm", "dense_tied"])
def test_a_backward_pass_leaves_the_saved_tensors_as_they_are(kind):
    """A second pass over the same graph gives the same bits, which gradcheck would not notice otherwise."""
    policy = policy_like(tiny_model(kind))
    batch = tiny_batch()
    packed = pack(batch.prompt_ids * 2, batch.completion_ids * 2, "cpu", share_prompts=True)
    ids = torch.randint(53, (2 * batch.num_targets, 3), generator=torch.Generator().manual_seed(0))
    logprobs, _, _, topk = policy(packed, topk_ids_Nk=ids)
    loss = (logprobs * torch.linspace(-1, 2, len(logprobs))).sum() + topk.square().sum()
    parameters = list(policy.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    first = [gradient.clone() for gradient in first]
    assert all(map(torch.equal, torch.autograd.grad(loss, parameters), first))


def test_recomputed_layers_use_the_experts_of_the_forward_pass():
    gradients = gradients_after_another_choice(policy_like(tiny_model("glm")), packed_batch())
    assert_same(gradients["checkpointed"], gradients["plain"], atol=0)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_the_host_waits_for_a_gpu_once_in_a_layer_with_expert_parallelism(ep_size, monkeypatch):
    """Fake tensors have no values. An operator that would stop the host on a GPU to read a value raises an
    error, for example item(), bincount() or repeat_interleave() without a size.

    tolist() returns the rows per rank: 6 tokens with 3 experts each have 18 rows.
    """
    products = lambda x, weight, tokens_per_expert: x.new_empty(len(x), weight.shape[1])
    waits = []
    monkeypatch.setattr(FakeTensor, "tolist", lambda self: waits.append(self) or [[10, 8], [9, 9]])
    monkeypatch.setattr(moe_model.dist, "all_to_all_single", lambda *tensors, group: None)
    monkeypatch.setattr(moe_model, "grouped_linear", products)  # fake products take bfloat16 only
    with FakeTensorMode():
        block = moe_model.MoEBlock(tiny_config("moe"), None)
        block.ep_size = ep_size
        block.num_local_experts = 8 // ep_size
        block.experts = moe_model.Experts(tiny_config("moe"), block.num_local_experts, "ep_size_2")
        output, _ = block(torch.empty(6, 32))
    assert output.shape == (6, 32)
    assert len(waits) == ep_size - 1


def test_attention_on_gpus_is_not_that_of_cudnn():
    assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()


# ------------------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------------------
def load_policy(folder: Path) -> Policy:
    """Load a folder into parameters that are NaN at first, so that a skipped parameter is noticed."""
    policy = Policy(load_config(folder))
    for parameter in policy.parameters():
        parameter.data.fill_(float("nan"))
    load_hf(policy, folder)
    return policy


def assert_transformers_loads(folder: Path, hf) -> torch.nn.Module:
    """Check that transformers reads a folder completely, with the weights of `hf`; return its model."""
    back, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **EAGER)
    assert type(back) is type(hf) and not any(info.values()), info
    assert_same(back.state_dict(), hf.state_dict(), atol=0)
    return back


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_to_policy_to_transformers(kind, tmp_path):
    hf = tiny_model(kind)
    hf.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    policy = load_policy(tmp_path / "hf")
    assert_same(dict(policy.named_parameters()), own_names(hf.named_parameters()), atol=0)
    save_hf(policy, tmp_path / "own")
    back = assert_transformers_loads(tmp_path / "own", hf)
    ids = torch.tensor([tiny_batch().prompt_ids[2]])
    with torch.no_grad():  # equal logits show that the configuration survived too: theta, eps, head size, ...
        assert torch.equal(back(input_ids=ids).logits, hf(input_ids=ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_names_index_and_dtypes_of_an_export_are_those_of_transformers(kind, tmp_path):
    hf = tiny_model(kind)
    hf.save_pretrained(tmp_path / "hf")
    save_hf(policy_like(hf), tmp_path / "own", torch.bfloat16)
    hf_tensors = load_file(tmp_path / "hf" / "model.safetensors")
    dtype_of = lambda name: torch.float32 if name.endswith("correction_bias") else torch.bfloat16
    expected = {name: tensor.to(dtype_of(name)) for name, tensor in hf_tensors.items()}
    shard = only_shard(tmp_path / "own")
    assert_same(load_file(shard), expected, atol=0)
    index = json.loads((tmp_path / "own" / INDEX).read_text())
    assert index["weight_map"] == dict.fromkeys(hf_tensors, shard.name)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert json.loads((tmp_path / "own" / "config.json").read_text())["dtype"] == "bfloat16"


LEFT_OUT = {  # kind of the model, changed fields of its config.json, added tensors, words of the refusal
    "a layer": ("dense", {"num_hidden_layers": 2, "layer_types": None}, {}, "11 tensors.*num_hidden_layers"),
    "biases": ("dense_tied", {"attention_bias": False}, {}, "q_proj.bias.*attention_bias"),
    "norms of queries": ("glm", {"use_qk_norm": False}, {}, "k_norm.*use_qk_norm"),
    "norms of another type": ("dense", {"model_type": "llama"}, {}, "k_norm.*model_type"),
    "experts": ("moe", {"num_experts": 4, "num_local_experts": 4}, {}, "experts.4.*number of experts"),
    "a head": ("dense", {"tie_word_embeddings": True}, {}, "lm_head.weight.*tie_word_embeddings"),
    "a head of other values": ("dense_tied", {}, {"lm_head.weight": 7.0}, "lm_head.*tie_word_embeddings"),
    "a layer after those of multi-token prediction": (
        "glm", {"num_nextn_predict_layers": 1}, {"model.layers.4.norm.weight": 0.0}, "num_hidden_layers",
    ),
    "an adapter": ("dense", {}, {"model.layers.0.self_attn.q_proj.lora_A.weight": 0.0}, "model_type"),
}  # fmt: skip
HARMLESS = {
    "frequencies": ("dense", {}, {"model.layers.0.self_attn.rotary_emb.inv_freq": 0.0}),
    "multi-token prediction": ("glm", {"num_nextn_predict_layers": 1}, {"model.layers.3.norm.weight": 0.0}),
    "a copy of the tied head": ("dense_tied", {}, {"lm_head.weight": None}),
}


def saved_with(folder: Path, kind: str, fields: dict, added: dict) -> None:
    """Save a tiny model, with other fields of config.json and with added tensors; None: the embedding."""
    tiny_model(kind).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(only_shard(folder))
    embedding = tensors["model.embed_tokens.weight"]
    tensors |= {
        n: embedding.clone() if v is None else torch.full_like(embedding, v) for n, v in added.items()
    }
    save_file(tensors, only_shard(folder))


@pytest.mark.parametrize("case", LEFT_OUT)
def test_tensors_that_the_config_gives_no_place_are_refused(case, tmp_path):
    *model, words = LEFT_OUT[case]
    saved_with(tmp_path, *model)
    with pytest.raises(ValueError, match=f"(?s){tmp_path}.*{words}"):
        load_policy(tmp_path)


@pytest.mark.parametrize("case", HARMLESS)
def test_harmless_tensors_of_a_file_are_left_out(case, tmp_path):
    saved_with(tmp_path, *HARMLESS[case])
    assert all(parameter.isfinite().all() for parameter in load_policy(tmp_path).parameters())


def only_shard(folder: Path) -> Path:
    (shard,) = folder.glob("*.safetensors")
    return shard


def test_shards_of_an_earlier_save_are_not_read(tmp_path):
    """After a save by two ranks, then by one, the folder still has the second shard of the first save."""
    policy = policy_like(tiny_model("moe"))
    save_hf(policy, tmp_path)
    stale = {name: torch.full_like(tensor, 7.0) for name, tensor in load_file(only_shard(tmp_path)).items()}
    save_file(stale, tmp_path / "model-00002-of-00002.safetensors")
    assert_same(dict(load_policy(tmp_path).named_parameters()), dict(policy.named_parameters()), atol=0)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    policy = policy_like(tiny_model("moe"))
    save_hf(policy, tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "z.safetensors")
    with pytest.raises(ValueError, match="model.norm.weight is in two files.*z.safetensors"):
        load_policy(tmp_path)


def test_errors_of_a_load_name_the_file_or_the_tensor(tmp_path):
    policy = policy_like(tiny_model("moe"))
    with pytest.raises(ValueError, match="safetensors"):
        load_hf(policy, tmp_path)
    save_hf(policy, tmp_path)
    shard = only_shard(tmp_path)
    tensors = load_file(shard)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    save_file(tensors | {name: torch.zeros(24, 31)}, shard)
    with pytest.raises(ValueError, match=rf"{name}.*\(24, 31\)"):
        load_hf(policy, tmp_path)
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, shard)  # its scales would be missing
    with pytest.raises(ValueError, match=f"{name} has dtype F8_E4M3"):
        load_hf(policy, tmp_path)


def test_a_frozen_router_of_a_dense_model_is_refused(tmp_path):
    tiny_model("dense").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model.freeze_router"):
        moe_model.build_policy(ModelSettings(freeze_router=True), tmp_path, None, torch.device("cpu"))


def test_other_model_types_are_refused(tmp_path):
    with pytest.raises(ValueError, match="config.json"):
        load_config(tmp_path)
    GemmaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gemma"):
        load_config(tmp_path)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}


@pytest.mark.parametrize(("kind", "field", "value"), [
    ("moe", "rope_parameters", YARN), ("moe", "use_sliding_window", True), ("dense", "hidden_act", "gelu"),
    ("granite", "sliding_window", 64), ("glm", "sliding_window", 64), ("mixtral", "norm_topk_prob", False),
    ("granite", "norm_topk_prob", False),
    ("olmoe", "norm_topk_prob", True), ("olmoe", "clip_qkv", 8.0), ("olmoe", "rms_norm_eps", 1e-6),
    ("mixtral", "sliding_window", 4096), ("mixtral", "router_jitter_noise", 0.1), ("glm", "n_group", 4),
    ("granite", "attention_bias", True), ("granite", "head_dim", 16),
    *((kind, "partial_rotary_factor", 0.5) for kind in ("moe", "mixtral", "olmoe", "granite", "dense")),
    ("moe", "quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
])  # fmt: skip
def test_variants_of_a_family_that_are_not_computed_are_refused(kind, field, value, tmp_path):
    config = tiny_config(kind)
    Policy(config)
    config = type(config)(**config.to_dict() | {field: value})
    config.save_pretrained(tmp_path)
    for refuse in (lambda: Policy(config), lambda: load_config(tmp_path)):
        with pytest.raises(ValueError, match="rope_type" if value is YARN else field):
            refuse()


# ------------------------------------------------------------------------------------------------------------
# Several ranks: weights
# ------------------------------------------------------------------------------------------------------------
def joined(ranks: list[dict[str, Tensor]], ep_size: int) -> dict[str, Tensor]:
    """Join the parameters of all ranks into one model; copies on several ranks must be bitwise equal."""
    for rank, parameters in enumerate(ranks):
        for name, value in parameters.items():
            twin = rank % ep_size if ".experts." in name else 0
            assert torch.equal(value, ranks[twin][name]), f"{name} differs between ranks {twin} and {rank}"
    return {
        name: torch.cat([ranks[r][name] for r in range(ep_size)]) if ".experts." in name else value
        for name, value in ranks[0].items()
    }


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.slow
def test_ranks_load_and_gather_the_tensors_of_transformers(world_size):
    """test_checkpoints_at_scale.py checks which tensors a rank reads."""
    expected = dict(tiny_model("moe").named_parameters())
    ranks = section("weights", world_size)
    assert_same(joined([rank["parameters"] for rank in ranks], 2), expected, atol=0)
    for rank in ranks:  # every rank feeds an engine
        assert_same(dict(rank["hf_tensors"]), expected, atol=0)
        assert len(rank["hf_tensors"]) == len(expected)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.slow
def test_a_checkpoint_of_several_ranks_loads_anywhere(world_size):
    start = SUITES[world_size].folder()
    hf = tiny_model("moe")
    folder = start / f"saved_{world_size}"
    files = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    assert len(files) == 2
    index = json.loads((folder / INDEX).read_text())
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert sum(map(len, files.values())) == len(index["weight_map"]), "a tensor is written twice"
    assert_same(dict(load_policy(folder).named_parameters()), dict(hf.named_parameters()), atol=0)
    assert_transformers_loads(folder, hf)
    assert_transformers_loads(start / f"saved_bf16_{world_size}", hf.bfloat16())


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.slow
def test_fused_experts_of_granite_are_gathered_for_the_engine_and_for_files(world_size):
    """Files have the names of transformers, the engine's tensors have the names of other families."""
    hf = tiny_model("granite")
    folder = SUITES[world_size].folder() / f"saved_granite_{world_size}"
    assert_transformers_loads(folder, hf)
    names = load_file(only_shard(folder)).keys()
    assert "model.layers.1.block_sparse_moe.input_linear.weight" in names
    assert_same(dict(load_policy(folder).named_parameters()), own_names(hf.named_parameters()), atol=0)
    sent = {name.replace(".router.", ".gate."): tensor for name, tensor in hf.named_parameters()}
    ranks = section("weights", world_size)
    for rank in ranks:
        assert_same(rank["granite"], sent, atol=0)
    errors = [rank["full disk"] for rank in ranks]
    assert errors == ["full"] + [""] * (world_size - 1), "rank 0 writes, and no rank waits for a failed write"


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.slow
def test_random_weights_do_not_depend_on_ranks(world_size):
    policy = Policy(tiny_config("moe"))
    moe_model.random_weights(policy, seed=3)
    whole = {name: p.detach().clone() for name, p in policy.named_parameters()}
    assert_same(joined([rank["random"] for rank in section("weights", world_size)], 2), whole, atol=0)
    moe_model.random_weights(policy, seed=4)
    for name, value in whole.items():
        if name.endswith("norm.weight"):
            assert (value == 1).all()
            continue
        # The relative standard error of a deviation of n numbers is 1 / sqrt(2 n); 5 of them never happen.
        relative = float(value.std()) / policy.config.initializer_range - 1
        assert abs(relative) < 5 / math.sqrt(2 * value.numel()), name
        assert not torch.equal(value, policy.get_parameter(name)), "the seed is not used"
    experts = whole["model.layers.0.mlp.experts.down_proj"]
    assert len({expert.sum().item() for expert in experts}) == 8, "experts must differ"
    assert not torch.equal(experts, whole["model.layers.2.mlp.experts.down_proj"]), "layers must differ"


# ------------------------------------------------------------------------------------------------------------
# Several ranks: optimizer steps
# ------------------------------------------------------------------------------------------------------------
def reference_steps(hf, optimizer: torch.optim.Optimizer, num_steps: int) -> tuple[list, dict[str, Tensor]]:
    """Take clipped steps of transformers' model in this process, on all sequences at once."""
    batch = tiny_batch()
    norms = []
    for step in range(num_steps):
        optimizer.zero_grad()
        backward(torch.cat(reference_logprobs(hf, batch)[0]), batch, step)
        norms.append(float(torch.nn.utils.clip_grad_norm_(hf.parameters(), MAX_GRAD_NORM)))
        optimizer.step()
    return norms, own_names((name, p.detach()) for name, p in hf.named_parameters())


@pytest.fixture(scope="module")
def reference() -> dict[tuple[str, str], tuple[list[float], dict[str, Tensor]]]:
    results = {}
    for checkpoint, kind in (("start", "moe"), ("dense", "dense"), ("glm", "glm"), ("granite", "granite")):
        hf = tiny_model(kind)
        results["sgd", checkpoint] = reference_steps(hf, torch.optim.SGD(hf.parameters(), lr=1.0), 1)
    hf = tiny_model("moe")
    results["adamw", "start"] = reference_steps(hf, torch.optim.AdamW(hf.parameters(), **ADAMW), 2)
    return results


STEPS = [(world_size, *case) for world_size, cases in STEP_CASES.items() for case in cases]


@pytest.mark.parametrize("world_size, ep_size, zero_stage, optimizer, checkpoint", STEPS)
@pytest.mark.slow
def test_step_equals_one_process(reference, world_size, ep_size, zero_stage, optimizer, checkpoint):
    """SGD with lr 1 shows the clipped gradient. Its norm is 0.1 and weights are of size 1, so that weights
    differ by the error of the gradients (about 1e-8) and by rounding (6e-8): 1e-6 leaves a factor of ten.

    AdamW: an update is lr m / (sqrt(v) + eps). With eps = 1e-3 its slope in the gradient is at most
    lr / eps = 10 for any gradient (at the usual 1e-8 the sign of a rounding error would decide), so errors of
    1e-8 become 1e-7; the second step adds as much. Elements are near 1e-3: half a full step.
    """
    case = (ep_size, zero_stage, optimizer, checkpoint)
    ranks = [rank[case] for rank in section("steps", world_size)]
    norms, expected = reference[optimizer, checkpoint]
    assert min(norms) > 3 * MAX_GRAD_NORM, "clipping must change the step"
    for rank in ranks:  # the norm counts every expert once
        torch.testing.assert_close(rank["norms"], norms, rtol=1e-5, atol=0)
    assert_same(joined([rank["parameters"] for rank in ranks], ep_size), expected, atol=1e-6)
    start = own_names(tiny_model("moe" if checkpoint == "start" else checkpoint).named_parameters())
    assert all((expected[name] - start[name]).abs().max() > 1e-4 for name in expected), "a step too small"


@pytest.mark.parametrize("case", RESUME_CASES)
@pytest.mark.slow
def test_resumed_step_is_bitwise_equal(reference, case):
    dtype, zero_stage, _ = case
    for rank in section("resume", 2):
        straight, masters = rank[case]["straight"]
        without_offload = rank[dtype, zero_stage, False]["straight"]
        for parameters, other_masters in (rank[case]["resumed"], without_offload):
            assert_same(parameters, straight, atol=0)
            assert len(masters) == len(other_masters) > 0
            assert all(torch.equal(a, b) for a, b in zip(masters, other_masters))
        assert {value.dtype for value in straight.values()} == {dtype}
        assert {master.dtype for master in masters} == {torch.float32}
        # bf16 has 8 bits, 0.4 % per rounding, and a flipped route changes the gradient of a token. A rank
        # that is counted twice or skipped changes the norm by tens of percent.
        rtol = 1e-5 if dtype == torch.float32 else 0.05
        assert rank[case]["norm"] == pytest.approx(reference["adamw", "start"][0][0], rel=rtol)


def assert_float32_values(kind: str, values: dict[str, Tensor]) -> None:
    """Frequencies of the rotary embedding, also Llama 3's, and GLM's bias of the choice of experts."""
    hf = tiny_model(kind)
    expected = {name: buffer for name, buffer in hf.named_buffers() if "bias" in name}
    expected |= {"inv_freq": hf.model.rotary_emb.inv_freq}
    assert len(expected) == (3 if kind == "glm" else 1)
    assert_same(values, expected, atol=1e-8)  # frequencies are computed in float64 here
    assert all((value != value.bfloat16()).any() for value in expected.values())


@pytest.mark.parametrize("kind", ["glm", "llama"])
def test_a_bfloat16_policy_is_built_with_its_float32_values(kind, tmp_path):
    tiny_model(kind).save_pretrained(tmp_path)
    policy = moe_model.build_policy(ModelSettings(dtype="bfloat16"), tmp_path, None, torch.device("cpu"))
    assert_float32_values(kind, dict(policy.named_buffers()) | {"inv_freq": policy.inv_freq})


@pytest.mark.slow
def test_a_bfloat16_policy_keeps_its_float32_values_through_a_step():
    for rank in section("rounded", 2):
        for kind, (values, dtypes) in rank.items():
            assert dtypes == {torch.bfloat16}
            assert_float32_values(kind, values)


# ------------------------------------------------------------------------------------------------------------
# Memory
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("zero_stage", "offload"), [(1, False), (2, False), (2, True)])
@pytest.mark.slow
def test_memory_of_an_optimizer_is_as_planned(zero_stage, offload):
    """Bytes on a rank at EP = 2 of 2 ranks, bfloat16; DeepSpeed pads each of its groups to an even number."""
    config = tiny_config("moe")
    settings = ModelSettings(ep_size=2, dtype="bfloat16")
    planned = memory_plan.memory_by_part(config, settings, zero_stage, 2, tokens=1, offload_optimizer=offload)
    num_elements = sum(moe_model.parameter_counts(config)) // 2
    near = lambda value: pytest.approx(value, abs=64)
    for rank in section("resume", 2):
        measured = rank[torch.bfloat16, zero_stage, offload]["bytes"]
        if zero_stage == 1:
            assert measured["gradients of weights"] == 0
            for part in ("weights", "gradients", "master weights", "AdamW"):
                assert measured[part] == near(planned[part])
            continue
        assert measured["between"] == 0 and measured["gradients in an update"] == near(4 * num_elements)
        assert planned["gradients in an update"] == 4 * num_elements
        buffer = 2 * offload * memory_plan.largest_parameter(config, settings)
        assert planned["gradients"] == measured["buffer"] == buffer
        bytes_per_element = {"master weights": 4, "handed gradients": 4 * offload, "weights": 2 * offload}
        for part, size in (bytes_per_element | {"AdamW": 8}).items():
            assert measured[part] == near(size * num_elements)
        if offload:
            assert planned["master weights"] == planned["AdamW"] == 0
            slack = sum(measured[part] for part in bytes_per_element)
            host = slack + measured["AdamW"]
            counts = moe_model.parameter_counts(config)
            assert host - 128 <= memory_plan.offloaded_bytes(counts, settings, 2) <= host + slack
        else:
            assert (planned["master weights"], planned["AdamW"]) == (4 * num_elements, 8 * num_elements)


@pytest.mark.parametrize(
    "on_gpu, speedup, dtype",
    [(True, 0.5, "bfloat16"), (False, 1.5, "bfloat16"), (False, 1.4, "float32")],
)
def test_the_dtype_of_a_policy_is_the_fast_one_of_its_processor(
    on_gpu, speedup, dtype, tmp_path, monkeypatch
):
    rates = {moe_model.TRAINING_ROWS: speedup, moe_model.DECODING_ROWS: 100.0}
    monkeypatch.setattr(moe_model, "product_rates", lambda rows: {"float32": 1.0, "bfloat16": rates[rows]})
    assert moe_model.policy_dtype(ModelSettings(), on_gpu) == dtype
    for explicit in ("float32", "bfloat16"):
        assert moe_model.policy_dtype(ModelSettings(dtype=explicit), on_gpu) == explicit
    if not on_gpu:
        save_small_moe(tmp_path)
        policy = moe_model.build_policy(ModelSettings(), tmp_path, None, torch.device("cpu"))
        assert policy.lm_head.weight.dtype == getattr(torch, dtype)


@pytest.mark.parametrize(
    "on_gpu, fp8, speedup, dtype",
    [
        (True, "off", 0.1, "bfloat16"), (False, "on", 0.1, "bfloat16"), (False, "off", 1.5, "bfloat16"),
        (False, "off", 1.4, "float32"), (False, "simulate", 0.1, "float32"),
    ],
)  # fmt: skip
def test_the_dtype_of_an_engine_is_the_fast_one_of_few_rows(on_gpu, fp8, speedup, dtype, monkeypatch):
    rates = {moe_model.TRAINING_ROWS: 100.0, moe_model.DECODING_ROWS: speedup}
    monkeypatch.setattr(moe_model, "product_rates", lambda rows: {"float32": 1.0, "bfloat16": rates[rows]})
    assert moe_model.engine_dtype(RolloutSettings(fp8=fp8), on_gpu) == dtype
    for explicit in ("float32", "bfloat16"):
        assert moe_model.engine_dtype(RolloutSettings(dtype=explicit), on_gpu) == explicit


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86")
def test_a_processor_with_avx2_alone_computes_in_float32():
    code = (
        "import moe_model, torch; from settings import ModelSettings, RolloutSettings\n"
        "assert torch.backends.cpu.get_cpu_capability() == 'AVX2'\n"
        "print(moe_model.policy_dtype(ModelSettings(), False))\n"
        "print(moe_model.engine_dtype(RolloutSettings(), False))"
    )
    isa = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | isa, capture_output=True, text=True
    )
    assert done.stdout.split() == ["float32", "float32"], done.stderr


# ------------------------------------------------------------------------------------------------------------
# Several ranks: expert parallelism
# ------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_expert_parallel_groups_refuse_sizes_that_do_not_divide():
    for rank in section("groups", 2):
        assert rank["timeouts"] == [4321.0, 4321.0]  # of the expert-parallel group and of the world
        assert rank["dense"] is None and rank["ranks"] == [0, 1]
        assert all(f"model.ep_size {size}" in rank["messages"][size, 8] for size in (3, 4))
        assert "(9)" in rank["messages"][2, 9] and "dense" in rank["messages"][2, 0]


@pytest.mark.parametrize("case", DISPATCH_CASES)
@pytest.mark.slow
def test_uneven_dispatch_against_slow_loop(case):
    assert_dispatch(case, [rank[case] for rank in section("dispatch", 2)])


def assert_dispatch(case: str, ranks: list[dict]) -> None:
    """Compare two ranks, each with its own tokens, with a slow loop over all tokens and all experts."""
    inputs = dispatch_inputs(case)
    exact = {name: value.double().requires_grad_() for name, value in inputs.weights.items()}
    x = [tokens.double().requires_grad_() for tokens in inputs.x]
    for r in range(2):
        y = slow_moe(x[r], *exact.values(), inputs.top_k, renormalise=True, forced=inputs.replay_ids[r])
        (y * inputs.loss_weights[r]).sum().backward()
        torch.testing.assert_close(ranks[r]["y"].double(), y.detach(), rtol=PARITY, atol=PARITY)
        torch.testing.assert_close(ranks[r]["x_grad"].double(), x[r].grad, rtol=PARITY, atol=PARITY)
    for name, value in exact.items():  # the gradient of an expert comes from the tokens of both ranks
        parts = [rank[name].double() for rank in ranks]
        got = sum(parts) if name == "gate.weight" else torch.cat(parts)
        torch.testing.assert_close(got, value.grad, rtol=PARITY, atol=PARITY)
        assert value.grad.abs().max() > 0.1 or name == "gate.weight"


@pytest.mark.slow
def test_expert_parallelism_matches_transformers_also_recomputed_and_replayed():
    with torch.no_grad():
        expected, _ = reference_logprobs(tiny_model("moe"), tiny_batch())
    for rows, results in zip(MICRO_BATCHES[2], section("recomputed_and_replayed", 2)):
        logprobs = torch.cat([expected[i] for i in rows[0]])
        torch.testing.assert_close(results["plain"]["logprobs"], logprobs, rtol=0, atol=PARITY)
        assert results.pop("num_forwards") == {"plain": 1, "checkpointed": 2, "replayed": 1, "both": 2}
        for name in ("checkpointed", "replayed", "both"):
            assert_same(results[name], results["plain"], atol=0)
    for gradients in section("another_choice", 2):
        assert_same(gradients["checkpointed"], gradients["plain"], atol=0)
