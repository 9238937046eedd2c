"""moe_model.py against transformers (each sequence alone, unpadded), DeepSpeed's AutoEP and slow loops.

What needs several ranks runs in model_suites.py, once per world size; the tests here compare what it stored.

Tolerances. fp32 rounds at 6e-8; activations and gradients here are of size 1 and pass about ten matrix
products of width 12 to 50, whose sums come in another order on either side: 1e-5 leaves a factor of ten. A
wrong formula is off by 1e-2 and more. Where both sides do the same operations in the same order, results are
equal bit by bit.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers import RankSuite
from model_suites import (
    ADAMW,
    DISPATCH_CASES,
    EAGER,
    MAX_GRAD_NORM,
    MICRO_BATCHES,
    RESUME_CASES,
    SEND_ROWS,
    STEP_CASES,
    dispatch_inputs,
    stack_routes,
    tiny_batch,
    tiny_config,
    tiny_model,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import memory_plan
import moe_model
from kernels import linear_logprob_entropy
from moe_model import Policy, grouped_linear, load_config, load_hf, pack, save_hf
from runtime.memory import trainer_bytes
from settings import ModelSettings

KINDS = ["moe", "moe_other", "dense", "dense_tied", "olmoe", "mixtral", "glm", "glm_plain"]
MOE_KINDS = ["moe", "moe_other", "olmoe", "mixtral", "glm", "glm_plain"]
PARITY = 1e-5  # see above


# ------------------------------------------------------------------------------------------------------------
# Helpers
# ------------------------------------------------------------------------------------------------------------
def policy_like(hf) -> Policy:
    """Make a policy with the weights of a transformers model; the names are the same."""
    policy = Policy(hf.config)
    policy.load_state_dict(hf.state_dict())
    return policy


def packed_batch(batch=None) -> moe_model.PackedSequences:
    batch = batch or tiny_batch()
    return pack(batch.prompt_ids, batch.completion_ids, "cpu")


def reference_logprobs(hf, batch, temperature: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Return log-probabilities and entropies of each completion, each sequence alone, without packing."""
    logprobs, entropies = [], []
    for prompt, completion in zip(batch.prompt_ids, batch.completion_ids):
        logits = hf(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0] / temperature
        logp = logits - logits.logsumexp(dim=-1, keepdim=True)
        logp = logp[len(prompt) - 1 : len(prompt) - 1 + len(completion)]  # predicted by the token before
        logprobs.append(logp.gather(1, torch.tensor(completion, dtype=torch.int64).unsqueeze(1)).squeeze(1))
        entropies.append(-(logp.exp() * logp).sum(dim=-1))
    return logprobs, entropies


def gradients(module) -> dict[str, Tensor]:
    """Take the gradients away, so that the next backward starts from none."""
    found = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    return found


def backward(logprobs: Tensor, batch, step: int = 0) -> None:
    (-(torch.cat(batch.weights[step]) * logprobs).sum() / batch.num_targets).backward()


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], atol: float, alive: float = 0.0) -> None:
    """Check names and values within atol (0: bit by bit); every expected tensor reaches `alive` somewhere."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].shape == value.shape and got[name].dtype == value.dtype, name
        difference = float((got[name] - value).detach().abs().max()) if value.numel() else 0.0
        assert difference <= atol, f"{name} differs by {difference}"
        assert alive == 0.0 or value.abs().max() > alive, f"{name} is too small to be compared"


def save_models(folder: Path) -> None:
    """Save the checkpoints that the ranks start from, as transformers writes them."""
    tiny_model("moe").save_pretrained(folder / "start", max_shard_size="40KB")
    tiny_model("dense").save_pretrained(folder / "dense")
    tiny_model("glm").save_pretrained(folder / "glm")
    assert len(list((folder / "start").glob("*.safetensors"))) > 1, "load_hf should meet several files"


SUITES = {world_size: RankSuite("model", world_size, save_models) for world_size in (1, 2, 4)}


def section(name: str, world_size: int) -> list[dict]:
    """Return what a section of model_suites.py gave on every rank."""
    return [result[name] for result in SUITES[world_size].results()]


# ------------------------------------------------------------------------------------------------------------
# Packing
# ------------------------------------------------------------------------------------------------------------
def test_pack_against_slow_construction():
    batch = tiny_batch()
    batch.prompt_ids.append([9]), batch.completion_ids.append([])  # one token, nothing predicted
    packed = packed_batch(batch)
    longest = max(max(1, len(p) + len(c) - 1) for p, c in zip(batch.prompt_ids, batch.completion_ids))
    tokens, positions, places, predictors, targets = [], [], [], [], []
    for b, (prompt, completion) in enumerate(zip(batch.prompt_ids, batch.completion_ids)):
        sequence = prompt + completion
        for i, token in enumerate(sequence):
            if i == len(sequence) - 1 and i > 0:
                continue  # the last token predicts nothing
            if i + 1 >= len(prompt) and i + 1 < len(sequence):  # the next token is one of the completion
                predictors.append(len(tokens))
                targets.append(sequence[i + 1])
            tokens.append(token), positions.append(i), places.append(b * longest + i)
    assert packed.input_ids.tolist() == tokens
    assert packed.position_ids.tolist() == positions
    assert packed.padded_index.tolist() == places
    assert packed.padded_shape == (len(batch.prompt_ids), longest)
    assert packed.predictor_index.tolist() == predictors
    assert packed.target_ids.tolist() == targets == [t for c in batch.completion_ids for t in c]
    assert {t.dtype for t in vars(packed).values() if isinstance(t, Tensor)} == {torch.int64}


def test_pack_pairs_a_target_with_the_token_before_it():
    packed = pack([[10, 11], [20]], [[12, 13], [21, 22, 23]], "cpu")
    assert packed.input_ids.tolist() == [10, 11, 12, 20, 21, 22]
    pairs = zip(packed.input_ids[packed.predictor_index].tolist(), packed.target_ids.tolist())
    assert list(pairs) == [(11, 12), (12, 13), (20, 21), (21, 22), (22, 23)]


def test_pack_refuses_what_it_cannot_lay_out():
    with pytest.raises(AssertionError, match="empty prompt"):
        pack([[1], []], [[2], [3]], "cpu")
    with pytest.raises(ValueError):
        pack([[1], [2]], [[3]], "cpu")


# ------------------------------------------------------------------------------------------------------------
# Parity with transformers
# ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_gradients_match_transformers(kind, temperature):
    hf, batch = tiny_model(kind), tiny_batch()
    policy = policy_like(hf)
    logprobs, entropy, layer_ids = policy(packed_batch(batch), temperature=temperature)
    expected, _ = reference_logprobs(hf, batch, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32
    routed = [hasattr(layer.mlp, "experts") for layer in hf.model.layers]
    assert [ids is not None for ids in layer_ids] == routed
    torch.testing.assert_close(logprobs, torch.cat(expected), rtol=0, atol=PARITY)
    backward(logprobs, batch), backward(torch.cat(expected), batch)
    assert_same(gradients(policy), gradients(hf), atol=PARITY, alive=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_match_transformers_at_every_position(kind):
    hf, batch = tiny_model(kind), tiny_batch()
    policy = policy_like(hf)
    with torch.no_grad():
        hidden, _ = policy.hidden(packed_batch(batch))
        expected = []
        for prompt, completion in zip(batch.prompt_ids, batch.completion_ids):
            expected.append(hf(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0, :-1])
        expected = torch.cat(expected)  # [T, V]
        assert expected.std() > 0.5, "logits close to uniform would hide a mistake"
        # Logits reach 10, hence the relative part.
        torch.testing.assert_close(policy.lm_head(hidden), expected, rtol=PARITY, atol=PARITY)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_matches_the_formula_in_fp64(temperature):
    batch = tiny_batch()
    with torch.no_grad():
        _, expected = reference_logprobs(tiny_model("moe", dtype=torch.float64), batch, temperature)
        _, entropy, _ = policy_like(tiny_model("moe"))(packed_batch(batch), temperature=temperature)
    expected = torch.cat(expected)
    assert expected.max() - expected.min() > 0.5 and entropy.dtype == torch.float32
    torch.testing.assert_close(entropy.double(), expected, rtol=0, atol=PARITY)


def test_batch_without_targets():
    policy = policy_like(tiny_model("moe"))
    logprobs, entropy, _ = policy(pack([[1, 2, 3], [4]], [[], []], "cpu"))
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert all(grad.count_nonzero() == 0 for grad in gradients(policy).values())


@pytest.mark.parametrize("backend", ["naive", "auto"])
def test_the_head_holds_no_logits(backend, monkeypatch):
    """23 targets, 16 columns of the vocabulary at a time: same numbers, and nothing of [N, V] is kept; whole
    logits, as a contrast, are."""
    policy, batch = policy_like(tiny_model("moe")), tiny_batch()
    policy.logprob_kernel = "naive"
    packed, vocab_size = packed_batch(batch), policy.config.vocab_size
    whole, whole_entropy, _ = policy(packed, temperature=0.7)
    backward(whole, batch)
    expected = gradients(policy)

    saved = []

    def keep(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(linear_logprob_entropy, "BLOCK_ELEMENTS", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(linear_logprob_entropy, "MIN_COLUMNS", 16)
    policy.logprob_kernel = backend
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, entropy, _ = policy(packed, temperature=0.7)
    assert ((len(packed.target_ids), vocab_size) in saved) == (backend == "naive")
    backward(logprobs, batch)
    # Sums over blocks run in another order: a few roundings of numbers up to 5.
    torch.testing.assert_close(logprobs, whole, rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy, whole_entropy, rtol=0, atol=2e-6)
    assert_same(gradients(policy), expected, atol=2e-6, alive=1e-3)


# ------------------------------------------------------------------------------------------------------------
# Recomputation and replay
# ------------------------------------------------------------------------------------------------------------
def run(policy: Policy, batch, replay_ids: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor], list]:
    logprobs, _, layer_ids = policy(packed_batch(batch), replay_ids_TLK=replay_ids)
    backward(logprobs, batch)
    return logprobs.detach(), gradients(policy), layer_ids


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_activation_checkpointing_changes_nothing(kind):
    policy, batch = policy_like(tiny_model(kind)), tiny_batch()
    logprobs, expected, _ = run(policy, batch)
    calls = []
    policy.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    policy.activation_checkpointing = True
    again, got, _ = run(policy, batch)
    assert len(calls) == 2, "the layer runs once more in backward"
    assert torch.equal(again, logprobs)
    assert_same(got, expected, atol=0)


@pytest.mark.parametrize("kind", MOE_KINDS)
def test_replay_of_own_routes_is_bitwise_equal(kind):
    policy, batch = policy_like(tiny_model(kind)), tiny_batch()
    logprobs, expected, layer_ids = run(policy, batch)
    routes = stack_routes(layer_ids)  # [T, L, K]
    again, got, used = run(policy, batch, routes)
    assert torch.equal(again, logprobs)
    assert_same(got, expected, atol=0)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(used, layer_ids))

    for shifted in (routes.roll(1, dims=0), routes.roll(1, dims=1)):  # by a token, by a layer
        other, _, _ = run(policy, batch, shifted)
        assert (other - logprobs).abs().max() > 1e-2


@pytest.mark.parametrize("kind", MOE_KINDS)
def test_replay_of_given_routes_matches_transformers(kind):
    """Random routes, forced on transformers' router too: ids from outside, weights from its own softmax."""
    hf, batch = tiny_model(kind), tiny_batch()
    policy, config = policy_like(hf), hf.config
    num_tokens = len(packed_batch(batch).input_ids)
    generator = torch.Generator().manual_seed(5)
    num_experts = moe_model.num_experts_of(config)
    draws = torch.rand(num_tokens, config.num_hidden_layers, num_experts, generator=generator)
    routes = draws.argsort(dim=-1)[..., : config.num_experts_per_tok].to(torch.uint8)  # [T, L, K]

    forced = {}  # layer -> [S, K] of the sequence at hand

    def force(layer: int):
        def hook(router, inputs, outputs):
            is_glm, ids = kind.startswith("glm"), forced[layer]
            scores = outputs[0].sigmoid() if is_glm else outputs[0].softmax(dim=-1)
            chosen = scores.gather(1, ids)
            if kind == "mixtral" or config.norm_topk_prob:
                chosen = chosen / chosen.sum(1, keepdim=True)
            return outputs[0], chosen * config.routed_scaling_factor if is_glm else chosen, ids

        return hook

    for i, layer in enumerate(hf.model.layers):
        if hasattr(layer.mlp, "experts"):
            layer.mlp.gate.register_forward_hook(force(i))
    expected, first = [], 0
    for prompt, completion in zip(batch.prompt_ids, batch.completion_ids):
        inputs = (prompt + completion)[:-1]
        forced |= {i: routes[first : first + len(inputs), i].long() for i in range(config.num_hidden_layers)}
        first += len(inputs)
        logp = hf(input_ids=torch.tensor([inputs]), use_cache=False).logits[0].log_softmax(-1)
        expected += [logp[len(prompt) - 1 + t, token] for t, token in enumerate(completion)]
    backward(torch.stack(expected), batch)
    logprobs, got, _ = run(policy, batch, routes)
    torch.testing.assert_close(logprobs, torch.stack(expected).detach(), rtol=0, atol=PARITY)
    assert_same(got, gradients(hf), atol=PARITY, alive=1e-3)


# ------------------------------------------------------------------------------------------------------------
# Experts
# ------------------------------------------------------------------------------------------------------------
def grouped_by_row(x: Tensor, weight: Tensor, tokens_per_expert: list[int]) -> Tensor:
    """Multiply every row by its own copy of its expert's matrix."""
    expert = [e for e, count in enumerate(tokens_per_expert) for _ in range(count)]
    return torch.einsum("pd,pod->po", x, weight[expert])


@pytest.mark.parametrize("counts", [[3, 1, 4, 2], [0, 5, 0, 1], [0, 0, 7, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_grouped_linear_against_rows(counts, dtype):
    """Unaligned counts, empty experts, no row at all. fp64 takes the loop, the others grouped_mm.

    Numbers are of size 5, sums of up to 24 products: atol is 20 roundings of that in each type.
    """
    generator = torch.Generator().manual_seed(2)
    x, weight, grad = [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in [(sum(counts), 24), (4, 16, 24), (sum(counts), 16)]
    ]
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = grouped_linear(*leaves, torch.tensor(counts))
    out.backward(grad)
    exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
    expected = grouped_by_row(*exact, counts)
    expected.backward(grad.double())
    assert out.dtype == dtype and out.shape == expected.shape
    atol = 20 * 5 * torch.finfo(dtype).eps / 2
    for got, want in [(out, expected), *((a.grad, b.grad) for a, b in zip(leaves, exact))]:
        torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


class CarelessGroupedMM(torch.autograd.Function):
    """As on some GPUs: the gradient of an expert without rows is what was in memory (pytorch #172439)."""

    @staticmethod
    def forward(ctx, x, weight, offs):
        ctx.save_for_backward(x, weight, offs)
        counts = offs.diff(prepend=offs.new_zeros(1)).tolist()
        return torch.cat([part @ w for part, w in zip(x.split(counts), weight)])

    @staticmethod
    def backward(ctx, grad):
        x, weight, offs = ctx.saved_tensors
        counts = offs.diff(prepend=offs.new_zeros(1)).tolist()
        of_experts = list(zip(x.split(counts), grad.split(counts), weight))
        grad_x = torch.cat([g @ w.mT for _, g, w in of_experts])
        grads = [part.mT @ g if len(part) else torch.full_like(w, math.nan) for part, g, w in of_experts]
        return grad_x, torch.stack(grads), None


@pytest.mark.parametrize("counts", [[3, 1, 4, 2], [0, 5, 0, 1], [0, 0, 0, 0]])
def test_experts_without_rows_have_no_gradient_whatever_a_kernel_leaves_there(counts, monkeypatch):
    x = torch.randn(sum(counts), 24, requires_grad=True)
    weight = torch.randn(4, 16, 24, requires_grad=True)
    grouped_linear(x, weight, torch.tensor(counts)).square().sum().backward()
    expected = weight.grad.clone()
    weight.grad = None
    monkeypatch.setattr(F, "grouped_mm", lambda x, weight, offs: CarelessGroupedMM.apply(x, weight, offs))
    grouped_linear(x, weight, torch.tensor(counts)).square().sum().backward()
    torch.testing.assert_close(weight.grad, expected)
    assert all(bool(grad.any()) == (count > 0) for grad, count in zip(expected, counts))


@pytest.mark.parametrize("counts", [[3, 1, 4, 2], [0, 5, 0, 1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm_equals_the_loop(counts, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(sum(counts), 24, generator=generator).to(dtype)
    weight = torch.randn(4, 16, 24, generator=generator).to(dtype)
    parts = [F.linear(part, w) for part, w in zip(x.split(counts), weight)]
    calls, grouped_mm = [], F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *a, **k: calls.append(1) or grouped_mm(*a, **k))
    out = grouped_linear(x, weight, torch.tensor(counts))
    assert calls, "the loop would be compared with itself"
    # Both accumulate in fp32 and round once; the order of 24 terms may differ by one rounding.
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(out, torch.cat(parts), rtol=rtol, atol=rtol)


def slow_moe(x, gate, gate_up_proj, down_proj, top_k: int, renormalise: bool, forced=None) -> Tensor:
    """Compute a MoE layer from its equations, one token and one expert at a time."""
    rows = []
    for t, token in enumerate(x):
        scores = torch.stack([gate[e] @ token for e in range(len(gate))])
        scores = scores.exp() / scores.exp().sum()
        chosen = sorted(range(len(gate)), key=lambda e: -scores[e].item())[:top_k]
        chosen = chosen if forced is None else forced[t].tolist()
        total = sum(scores[e] for e in chosen) if renormalise else 1.0
        row = torch.zeros_like(token)
        for e in chosen:
            gated, up = (gate_up_proj[e] @ token).chunk(2)
            row = row + scores[e] / total * (down_proj[e] @ (gated * torch.sigmoid(gated) * up))
        rows.append(row)
    return torch.stack(rows) if rows else x * 1.0


def moved_by_hand(x_TD, weights_TK, experts_TK):
    """Send each token to its experts, double the rows of the odd ones, and add them up, by plain indexing."""
    num_tokens, top_k = experts_TK.shape
    pairs = sorted((int(experts_TK[t, k]), t, k) for t in range(num_tokens) for k in range(top_k))
    rows = torch.stack([x_TD[t] for _, t, _ in pairs]) if pairs else x_TD[:0]
    factors = torch.tensor([1.0 + (expert % 2) for expert, _, _ in pairs], dtype=x_TD.dtype)
    out = rows * factors.unsqueeze(-1)
    places = {(t, k): place for place, (_, t, k) in enumerate(pairs)}
    sums = [sum(weights_TK[t, k] * out[places[t, k]] for k in range(top_k)) for t in range(num_tokens)]
    return torch.stack(sums).to(x_TD.dtype) if sums else x_TD[:0]


@pytest.mark.parametrize("chunk", [1, 50, 2**20])
@pytest.mark.parametrize(("shape", "dtype", "atol"), [
    ((7, 3), torch.float64, 1e-12), ((7, 3), torch.float32, 5e-6), ((5, 1), torch.float32, 5e-6),
    ((0, 2), torch.float32, 0.0), ((9, 4), torch.bfloat16, 0.06),
])  # fmt: skip
def test_rows_to_experts_and_back_against_plain_indexing(shape, dtype, atol, chunk, monkeypatch):
    """Compare CopyToExperts and SumOfExperts, whole and in chunks, with float64 sums."""
    monkeypatch.setattr(moe_model, "CHUNK_ELEMENTS", {"cpu": chunk})
    generator = torch.Generator().manual_seed(0)
    experts = torch.stack([torch.randperm(6, generator=generator)[: shape[1]] for _ in range(shape[0])] or
                          [torch.zeros(0, dtype=torch.int64)]).reshape(shape)  # fmt: skip
    x = torch.randn(shape[0], 16, generator=generator).to(dtype)
    weights = torch.rand(shape, generator=generator, dtype=torch.float64 if atol == 1e-12 else torch.float32)
    loss_weights = torch.randn(shape[0], 16, generator=generator).to(dtype)
    found = {}
    for name in ("by hand", "moved"):
        wide = torch.float64 if name == "by hand" else None
        inputs = [tensor.to(wide or tensor.dtype, copy=True).requires_grad_() for tensor in (x, weights)]
        if name == "moved":
            order = experts.flatten().argsort(stable=True)
            inverse = order.argsort()
            rows = moe_model.CopyToExperts.apply(inputs[0], order, inverse)
            factors = 1.0 + (experts.flatten()[order] % 2).to(dtype)
            y = moe_model.SumOfExperts.apply(rows * factors.unsqueeze(-1), inputs[1], order, inverse)
        else:
            y = moved_by_hand(*inputs, experts)
        (y * loss_weights).sum().backward()
        found[name] = {"y": y, "x": inputs[0].grad, "weights": inputs[1].grad}
    moved = found["moved"]
    assert moved["y"].dtype == dtype and moved["weights"].dtype == weights.dtype
    expected = {n: torch.zeros_like(moved[n]) if v is None else v for n, v in found["by hand"].items()}
    doubles = [{name: value.double() for name, value in of.items()} for of in (moved, expected)]
    assert_same(*doubles, atol)


def test_the_gradient_of_taken_rows_goes_to_their_places():
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    for index in ([3, 1], [4, 2, 0, 3, 1], []):
        assert torch.autograd.gradcheck(
            lambda x, i=index: moe_model.TakeRows.apply(x, torch.tensor(i).long()), x
        )


@pytest.mark.parametrize("renormalise", [True, False])
def test_moe_block_against_slow_loop(renormalise):
    inputs, config = dispatch_inputs("live"), tiny_config("moe")
    config.norm_topk_prob = renormalise
    block = moe_model.MoEBlock(config, None)
    names = {"gate.weight": "gate", "experts.gate_up_proj": "gate_up_proj", "experts.down_proj": "down_proj"}
    exact = {name: getattr(inputs, field).double().requires_grad_() for name, field in names.items()}
    block.load_state_dict(exact)
    x, x_exact = inputs.x[0].requires_grad_(), inputs.x[0].detach().double().requires_grad_()
    y, ids = block(x)
    expected = slow_moe(x_exact, *exact.values(), top_k=3, renormalise=renormalise)
    torch.testing.assert_close(y.double(), expected, rtol=PARITY, atol=PARITY)
    assert ids.shape == (5, 3)
    (y * inputs.loss_weights[0]).sum().backward()
    (expected * inputs.loss_weights[0]).sum().backward()
    for got, want in [(x, x_exact), *((p, exact[name]) for name, p in block.named_parameters())]:
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=PARITY, atol=PARITY)


# ------------------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------------------
def fresh_policy(config) -> Policy:
    """Make parameters that no loader would leave alone unnoticed."""
    policy = Policy(config)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(float("nan"))
    return policy


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_to_policy_to_transformers(kind, tmp_path):
    hf = tiny_model(kind)
    hf.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    policy = fresh_policy(load_config(tmp_path / "hf"))
    load_hf(policy, tmp_path / "hf")
    assert_same(dict(policy.named_parameters()), dict(hf.named_parameters()), atol=0)

    save_hf(policy, tmp_path / "own")
    again = fresh_policy(load_config(tmp_path / "own"))
    load_hf(again, tmp_path / "own")
    assert_same(dict(again.named_parameters()), dict(policy.named_parameters()), atol=0)

    back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "own", output_loading_info=True, **EAGER)
    assert type(back) is type(hf) and not any(info.values()), info
    assert_same(back.state_dict(), hf.state_dict(), atol=0)
    ids = torch.tensor([tiny_batch().prompt_ids[2]])
    with torch.no_grad():  # the configuration survived too: theta, eps, head size, top-k, ...
        assert torch.equal(back(input_ids=ids).logits, hf(input_ids=ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_names_and_index(kind, tmp_path):
    """Names, index and size agree with what transformers writes for the same model."""
    hf = tiny_model(kind)
    hf.save_pretrained(tmp_path / "hf")
    save_hf(policy_like(hf), tmp_path / "own", torch.bfloat16)
    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    own = load_file(shard := only_shard(tmp_path / "own"))
    dtype_of = lambda name: torch.float32 if name.endswith("correction_bias") else torch.bfloat16
    expected = {name: tensor.to(dtype_of(name)) for name, tensor in theirs.items()}
    assert_same(own, expected, atol=0)
    index = json.loads((tmp_path / "own" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(theirs, shard.name)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert json.loads((tmp_path / "own" / "config.json").read_text())["dtype"] == "bfloat16"


def only_shard(folder: Path) -> Path:
    (shard,) = folder.glob("*.safetensors")
    return shard


def test_files_left_by_another_save_are_not_read(tmp_path):
    """A folder saved first by two ranks, then by one, still holds the second shard of the first save."""
    policy = policy_like(tiny_model("moe"))
    save_hf(policy, tmp_path)
    stale = {name: torch.full_like(tensor, 7.0) for name, tensor in load_file(only_shard(tmp_path)).items()}
    save_file(stale, tmp_path / "model-00002-of-00002.safetensors")
    again = fresh_policy(policy.config)
    load_hf(again, tmp_path)
    assert_same(dict(again.named_parameters()), dict(policy.named_parameters()), atol=0)


def test_load_names_what_is_wrong(tmp_path):
    policy = policy_like(tiny_model("moe"))
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        load_hf(policy, tmp_path)
    save_hf(policy, tmp_path)
    tensors = load_file(shard := only_shard(tmp_path))

    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, shard)
    with pytest.raises(ValueError, match=f"lacks 1 of .*{name}"):
        load_hf(policy, tmp_path)
    save_file(tensors | {name: torch.zeros(24, 31)}, shard)
    with pytest.raises(ValueError, match=rf"{name} has shape \(24, 31\).*\(24, 32\)"):
        load_hf(policy, tmp_path)


def test_unsupported_configurations_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no config.json"):
        load_config(tmp_path)
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type is 'llama'"):
        load_config(tmp_path)
    changes = {
        "rope_type is 'yarn'": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}},
        "use_sliding_window is True": {"use_sliding_window": True},
        "hidden_act is 'gelu'": {"hidden_act": "gelu"},
    }
    for kind in ("moe", "dense"):
        for message, change in changes.items():
            config = tiny_config(kind)
            config = type(config)(**config.to_dict() | change)
            config.save_pretrained(tmp_path)
            with pytest.raises(ValueError, match=message):
                load_config(tmp_path)
            with pytest.raises(ValueError, match=message):
                Policy(config)


@pytest.mark.parametrize(("kind", "field", "value"), [
    ("olmoe", "norm_topk_prob", True), ("olmoe", "clip_qkv", 8.0), ("olmoe", "rms_norm_eps", 1e-6),
    ("mixtral", "sliding_window", 4096), ("mixtral", "router_jitter_noise", 0.1), ("glm", "n_group", 4),
])  # fmt: skip
def test_what_a_family_could_have_and_is_not_computed_is_refused(kind, field, value):
    config = tiny_config(kind)
    Policy(config)
    setattr(config, field, value)
    with pytest.raises(ValueError, match=f"model not supported: {field} is {value}"):
        Policy(config)


# ------------------------------------------------------------------------------------------------------------
# Several ranks: weights
# ------------------------------------------------------------------------------------------------------------
def joined(ranks: list[dict[str, Tensor]], ep_size: int) -> dict[str, Tensor]:
    """Join the model from the parameters of every rank; copies on several ranks must agree bit by bit."""
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
def test_each_rank_loads_its_own_experts_only(world_size):
    hf, ranks = tiny_model("moe"), section("weights", world_size)
    assert_same(joined([r["parameters"] for r in ranks], 2), dict(hf.named_parameters()), atol=0)
    projections = [f"{p}_proj.weight" for p in ("gate", "up", "down")]
    shared = [name for name, _ in hf.named_parameters() if ".experts." not in name]
    for rank, result in enumerate(ranks):
        own = range(4 * (rank % 2), 4 * (rank % 2) + 4)
        names = [f"model.layers.{i}.mlp.experts.{e}.{p}" for i in (0, 2) for e in own for p in projections]
        assert sorted(result["read"]) == sorted(shared + names)  # each tensor once, no other rank's


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.slow
def test_gathered_tensors_equal_transformers(world_size):
    expected = dict(tiny_model("moe").named_parameters())
    for result in section("weights", world_size):  # every rank feeds a sampler
        names = [name for name, _ in result["hf_tensors"]]
        assert len(set(names)) == len(names)
        assert_same(dict(result["hf_tensors"]), expected, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_one_process_equal_transformers(kind):
    hf = tiny_model(kind)
    named = list(moe_model.hf_tensors(policy_like(hf)))
    assert len({name for name, _ in named}) == len(named)
    expected = dict(hf.named_parameters())  # a tied head is not among them
    expected |= {n: b for n, b in hf.named_buffers() if n.endswith("correction_bias")}
    if kind == "mixtral":  # the engine's names are a checkpoint's
        expected = {name.replace(".mlp.", ".block_sparse_moe."): value for name, value in expected.items()}
    assert_same(dict(named), expected, atol=0)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.slow
def test_checkpoint_saved_by_ranks_loads_anywhere(world_size):
    start = SUITES[world_size].folder()
    section("weights", world_size)
    hf, folder = tiny_model("moe"), start / f"saved_{world_size}"
    files = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    assert len(files) == 2
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert sum(map(len, files.values())) == len(index["weight_map"]), "a tensor is written twice"
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in hf.parameters())
    policy = fresh_policy(load_config(folder))
    load_hf(policy, folder)
    assert_same(dict(policy.named_parameters()), dict(hf.named_parameters()), atol=0)
    back, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **EAGER)
    assert not any(info.values()), info
    assert_same(back.state_dict(), hf.state_dict(), atol=0)
    half = AutoModelForCausalLM.from_pretrained(start / f"saved_bf16_{world_size}", **EAGER)
    assert_same(half.state_dict(), hf.bfloat16().state_dict(), atol=0)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.slow
def test_random_weights_do_not_depend_on_ranks(world_size):
    policy = Policy(tiny_config("moe"))
    moe_model.random_weights(policy, seed=3)
    whole = {name: p.detach().clone() for name, p in policy.named_parameters()}
    assert_same(joined([r["random"] for r in section("weights", world_size)], 2), whole, atol=0)

    moe_model.random_weights(policy, seed=4)
    for name, value in whole.items():
        if name.endswith("norm.weight"):
            assert (value == 1).all()
            continue
        # The standard error of a deviation from n numbers is 1 / sqrt(2 n) of it; 5 of them never happen.
        relative = float(value.std()) / policy.config.initializer_range - 1
        assert abs(relative) < 5 / math.sqrt(2 * value.numel()), name
        assert not torch.equal(value, policy.get_parameter(name)), "the seed is not used"
    experts = whole["model.layers.0.mlp.experts.down_proj"]
    assert len({e.sum().item() for e in experts}) == 8, "experts must differ"
    assert not torch.equal(experts, whole["model.layers.2.mlp.experts.down_proj"]), "layers must differ"


# ------------------------------------------------------------------------------------------------------------
# Several ranks: optimizer steps
# ------------------------------------------------------------------------------------------------------------
def reference_steps(hf, optimizer: torch.optim.Optimizer, num_steps: int) -> tuple[list, dict[str, Tensor]]:
    """Take clipped steps of transformers' model in this process, on all sequences at once."""
    batch, norms = tiny_batch(), []
    for step in range(num_steps):
        optimizer.zero_grad()
        backward(torch.cat(reference_logprobs(hf, batch)[0]), batch, step)
        norms.append(float(torch.nn.utils.clip_grad_norm_(hf.parameters(), MAX_GRAD_NORM)))
        optimizer.step()
    return norms, {name: p.detach() for name, p in hf.named_parameters()}


@pytest.fixture(scope="module")
def reference() -> dict[tuple[str, str], tuple[list[float], dict[str, Tensor]]]:
    moe, dense, adam, glm = (tiny_model(kind) for kind in ("moe", "dense", "moe", "glm"))
    return {
        ("sgd", "start"): reference_steps(moe, torch.optim.SGD(moe.parameters(), lr=1.0), 1),
        ("sgd", "dense"): reference_steps(dense, torch.optim.SGD(dense.parameters(), lr=1.0), 1),
        ("sgd", "glm"): reference_steps(glm, torch.optim.SGD(glm.parameters(), lr=1.0), 1),
        ("adamw", "start"): reference_steps(adam, torch.optim.AdamW(adam.parameters(), **ADAMW), 2),
    }


STEPS = [(world_size, *case) for world_size, cases in STEP_CASES.items() for case in cases]


@pytest.mark.parametrize("world_size, ep_size, zero_stage, optimizer, checkpoint", STEPS)
@pytest.mark.slow
def test_step_equals_one_process(reference, world_size, ep_size, zero_stage, optimizer, checkpoint):
    """SGD with lr 1 shows the clipped gradient. Its norm is 0.1 and weights are of size 1, so the difference
    is that of the gradients (about 1e-8) and the rounding of weights (6e-8): 1e-6 leaves a factor of ten.

    AdamW: an update is lr m / (sqrt(v) + eps). With eps = 1e-3 its slope in the gradient is at most
    lr / eps = 10 whatever the gradient (at the usual 1e-8 the sign of a rounding error would decide), so
    errors of 1e-8 become 1e-7; the second step adds as much. Elements are near 1e-3: half a full step.
    """
    case = (ep_size, zero_stage, optimizer, checkpoint)
    ranks = [rank[case] for rank in section("steps", world_size)]
    norms, expected = reference[optimizer, checkpoint]
    assert min(norms) > 3 * MAX_GRAD_NORM, "clipping must bite"
    for rank in ranks:  # the norm counts every expert once
        torch.testing.assert_close(rank["norms"], norms, rtol=1e-5, atol=0)
    got = joined([rank["parameters"] for rank in ranks], ep_size)
    assert_same(got, expected, atol=1e-6)
    before = dict(tiny_model("moe" if checkpoint == "start" else checkpoint).named_parameters())
    assert all((expected[name] - before[name]).abs().max() > 1e-4 for name in expected), "a step too small"


@pytest.mark.parametrize("case", RESUME_CASES)
@pytest.mark.slow
def test_resumed_step_is_bitwise_equal(reference, case):
    dtype, zero_stage, _ = case
    for rank in section("resume", 2):
        (once, once_masters), (again, again_masters) = rank[case]["once"], rank[case]["again"]
        assert_same(again, once, atol=0)
        assert {value.dtype for value in once.values()} == {dtype}
        assert len(once_masters) == len(again_masters) > 0
        assert all(torch.equal(a, b) for a, b in zip(once_masters, again_masters))
        assert {master.dtype for master in once_masters} == {torch.float32}
        # bf16 keeps 8 bits: 0.4 % a rounding; a route that flips changes a token's gradient. A rank counted
        # twice or not at all changes the norm by tens of percent.
        rtol = 1e-5 if dtype == torch.float32 else 0.05
        plain, plain_masters = rank[dtype, zero_stage, False]["once"]  # on the host as on the device
        assert_same(once, plain, atol=0)
        assert all(torch.equal(a, b) for a, b in zip(once_masters, plain_masters))
        assert rank[case]["norm"] == pytest.approx(reference["adamw", "start"][0][0], rel=rtol)


def test_micro_batches_of_the_steps_are_uneven():
    """What the steps above claim to cover."""
    for world_size, ranks in MICRO_BATCHES.items():
        assert len(ranks) == world_size and len({len(rank) for rank in ranks}) == 1
        assert sorted(i for rank in ranks for rows in rank for i in rows) == list(range(6))
        assert world_size == 1 or len({len(sum(rank, [])) for rank in ranks}) > 1
        assert world_size == 1 or any([] in rank for rank in ranks)


@pytest.mark.slow
def test_step_equals_deepspeed_autoep():
    """AutoEP's step on transformers' model at EP = 2. Its w1 and w3 are gate_up_proj, its w2 is down_proj."""
    theirs = []
    for rank in section("autoep", 2):
        named = {name.replace(".router.gate.", ".gate."): value for name, value in rank["parameters"].items()}
        for name in [name for name in named if name.endswith(".experts.w1")]:
            prefix = name.removesuffix("w1")
            gate, up, down = (named.pop(prefix + leaf) for leaf in ("w1", "w3", "w2"))
            named |= {prefix + "gate_up_proj": torch.cat([gate, up], dim=1), prefix + "down_proj": down}
        theirs.append(named)
    ours = [rank[2, 1, "sgd", "start"] for rank in section("steps", 2)]
    torch.testing.assert_close(ours[0]["norms"][0], section("autoep", 2)[0]["norm"], rtol=1e-5, atol=0)
    # The tolerance is that of test_step_equals_one_process.
    assert_same(joined([rank["parameters"] for rank in ours], 2), joined(theirs, 2), atol=1e-6)


# ------------------------------------------------------------------------------------------------------------
# Several ranks: pieces
# ------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_what_an_optimizer_holds_is_what_the_plan_says():
    """Elements on a rank at EP = 2 of 2 ranks; DeepSpeed pads each of its groups to an even number."""
    counts = moe_model.parameter_counts(tiny_config("moe"))
    settings = ModelSettings(ep_size=2)
    planned = memory_plan.memory_by_part(tiny_config("moe"), settings, 1, num_ranks=2, tokens=1)
    size = {"weights": 2, "gradients": 4, "master weights": 4, "AdamW": 4}
    for found in section("optimizer_memory", 2):
        as_it_is, undone, fused = (found[name] for name in ("as it is", "gradients held", "fused"))
        for part, itemsize in size.items():
            assert as_it_is["held"][part] == pytest.approx(planned[part] / itemsize, abs=8)
        assert as_it_is["held"]["gradients of weights"] == fused["held"]["gradients of weights"] == 0
        whole = counts.experts // 2 + counts.embeddings + counts.others
        assert undone["held"]["gradients of weights"] == whole
        assert as_it_is["norms"] == undone["norms"]
        assert_same(as_it_is["parameters"], undone["parameters"], atol=0)
        assert fused["fused"] == ({True}, {None}) and as_it_is["fused"] == ({False}, {None})
        for name, value in fused["parameters"].items():  # one unit in the last of bfloat16's places
            assert torch.allclose(value, as_it_is["parameters"][name], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.slow
def test_what_zero_2_holds_is_what_the_plan_says(offload):
    """Bytes on a rank at EP = 2 of 2 ranks, bfloat16; DeepSpeed pads each of its groups to an even number."""
    config, settings = tiny_config("moe"), ModelSettings(ep_size=2)
    planned = memory_plan.memory_by_part(config, settings, 2, 2, tokens=1, offload_optimizer=offload)
    own, on_host = sum(moe_model.parameter_counts(config)) // 2, offload
    for rank in section("resume", 2):
        held = rank[torch.bfloat16, 2, offload]["held"]
        near = lambda value: pytest.approx(value, abs=64)
        assert held["between"] == 0 and held["gradients in an update"] == near(4 * own)
        assert planned["gradients in an update"] == 4 * own
        assert (
            planned["gradients"]
            == held["buffer"]
            == 2 * offload * memory_plan.largest_parameter(config, settings)
        )
        whole = [held[name] for name in ("master weights", "gradients handed over", "weights to hand back")]
        assert whole == [near(4 * own), near(4 * own * on_host), near(2 * own * on_host)]
        assert held["AdamW"] == near(8 * own)
        if offload:
            assert planned["master weights"] == planned["AdamW"] == 0
            host = sum(whole) + held["AdamW"]
            assert host - 128 <= memory_plan.offloaded_bytes(config, settings, 2) <= host + sum(whole)
        else:
            assert (planned["master weights"], planned["AdamW"]) == (4 * own, 8 * own)


@pytest.mark.slow
def test_all_groups_wait_as_long():
    assert section("timeouts", 2) == [[4321.0, 4321.0]] * 2


def test_memory_of_a_large_model_by_part():
    """Qwen3-30B-A3B: 28.99 billion parameters in experts, 0.62 in embeddings, 0.92 elsewhere."""
    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip
    assert moe_model.parameter_counts(config) == (28_991_029_248, 622_329_856, 918_763_520)
    settings = ModelSettings(ep_size=8, activation_checkpointing=True)
    gib = lambda parts: [round(value / 2**30, 1) for value in parts.values()]
    plan = lambda settings, *sizes: memory_plan.memory_by_part(config, settings, *sizes, 32768)
    assert gib(plan(settings, 1, 8)) == [9.6, 19.2, 14.2, 28.4, 0.0, 0.0, 11.4, 4.1, 6.8, 1.9]
    # ZeRO 2: gradients in updates only; 0.9 GiB of its buffer, twice, beside the backward of the head
    assert gib(plan(settings, 2, 16)) == [9.6, 0.0, 7.1, 14.2, 0.0, 7.1, 11.4, 6.0, 0.0, 1.9]
    whole = ModelSettings(ep_size=8)
    assert plan(whole, 1, 8)["activations"] > 15 * plan(settings, 1, 8)["activations"]
    asleep, awake = (trainer_bytes(plan(settings, 1, 8), sleeps) for sleeps in (True, False))
    assert round(asleep / 2**30, 1) == 75.5 and round((awake - asleep) / 2**30, 1) == 15.5
    with_reference = memory_plan.memory_by_part(config, settings, 1, 8, 32768, with_reference=True)
    assert round((trainer_bytes(with_reference, True) - asleep) / 2**30, 1) == 9.6
    on_host = memory_plan.memory_by_part(config, settings, 2, 8, 32768, offload_optimizer=True)
    assert gib(on_host)[:6] == [9.6, 0.6, 0.0, 0.0, 0.0, 14.2]  # 0.6: a buffer for the largest gradient


@pytest.mark.slow
def test_expert_parallel_group_errors():
    for rank in section("group_errors", 2):
        messages = rank["messages"]
        assert messages.keys() == {(3, 8), (4, 8), (2, 9), (2, 0)}
        assert "model.ep_size 3 must divide the number of experts (8) and of processes (2" in messages[3, 8]
        assert "model.ep_size 4 must divide the number of experts (8) and of processes (2" in messages[4, 8]
        assert messages[4, 8].endswith("e.g. 2")
        assert "model.ep_size 2 must divide the number of experts (9)" in messages[2, 9]
        assert "model.ep_size is 2, but the model is dense" in messages[2, 0]
        assert rank["dense"] is None and rank["ranks"] == [0, 1]


@pytest.mark.slow
def test_all_to_all_against_gathered_rows():
    ranks = section("all_to_all", 2)
    x = [rank["x"].clone().requires_grad_() for rank in ranks]
    received = [torch.cat([x[s].split(SEND_ROWS[s])[r] for s in range(2)]) for r in range(2)]
    sum((received[r] * ranks[r]["loss_weights"]).sum() for r in range(2)).backward()
    for r in range(2):  # rows are only moved: bit by bit
        assert torch.equal(ranks[r]["received"], received[r])
        assert torch.equal(ranks[r]["grad"], x[r].grad)


@pytest.mark.parametrize("case", DISPATCH_CASES)
@pytest.mark.slow
def test_uneven_dispatch_against_slow_loop(case):
    """Two ranks with tokens of their own; a slow loop over the tokens of both with all experts."""
    ranks, inputs = [rank[case] for rank in section("dispatch", 2)], dispatch_inputs(case)
    names = {"gate.weight": "gate", "experts.gate_up_proj": "gate_up_proj", "experts.down_proj": "down_proj"}
    exact = {name: getattr(inputs, field).double().requires_grad_() for name, field in names.items()}
    x = [tokens.double().requires_grad_() for tokens in inputs.x]
    gate_grads = 0.0
    for r in range(2):
        y = slow_moe(x[r], *exact.values(), inputs.top_k, renormalise=True, forced=inputs.replay_ids[r])
        (y * inputs.loss_weights[r]).sum().backward()
        torch.testing.assert_close(ranks[r]["y"].double(), y.detach(), rtol=PARITY, atol=PARITY)
        torch.testing.assert_close(ranks[r]["x_grad"].double(), x[r].grad, rtol=PARITY, atol=PARITY)
        gate_grads = gate_grads + ranks[r]["gate.weight"].double()
    torch.testing.assert_close(gate_grads, exact.pop("gate.weight").grad, rtol=PARITY, atol=PARITY)
    for name, value in exact.items():  # an expert's gradient comes from the tokens of both ranks
        got = torch.cat([rank[name] for rank in ranks]).double()
        torch.testing.assert_close(got, value.grad, rtol=PARITY, atol=PARITY)
        assert value.grad.abs().max() > 0.1


@pytest.mark.slow
def test_recomputation_and_replay_with_expert_parallelism():
    for rank in section("recomputed_and_replayed", 2):
        for name in ("checkpointed", "replayed", "both"):
            assert_same(rank[name], rank["plain"], atol=0)


@pytest.mark.slow
def test_logprobs_with_expert_parallelism_match_transformers():
    batch, hf = tiny_batch(), tiny_model("moe")
    with torch.no_grad():
        expected, _ = reference_logprobs(hf, batch)
    for rows, result in zip(MICRO_BATCHES[2], section("recomputed_and_replayed", 2)):
        rank_expected = torch.cat([expected[i] for i in rows[0]])
        torch.testing.assert_close(result["plain"]["logprobs"], rank_expected, rtol=0, atol=PARITY)
