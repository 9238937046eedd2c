"""Test routed experts, simulated FP8 and weight checks of rollout.py and vllm_worker.py.

The engines are real vLLM engines on this CPU. Expected values come from the trainer's forward pass, from
vLLM's functions and from slow loops.
"""

import contextlib
import math
import pickle
from collections import Counter
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engines import (
    VOCAB,
    assert_samples_are_the_trainers,
    random_requests,
    save_model,
    token_ids,
)
from transformers import Glm4MoeConfig, Qwen3Config, Qwen3MoeConfig

import memory_plan
import rollout
import vllm_worker
from batch import Request
from data.tiny import Recipe, build_policy, build_tokenizer
from experiments.plan import model_config
from fp8 import FP8_QUANTIZATION, check_fp8, quantise_for_engine, simulate_rounding
from kernels.fp8_block import fp8_round, mxfp4_round
from moe_model import Policy, hf_tensors, random_weights
from rollout import RolloutEngine, invalid_route, validate_routes
from runtime import machine
from settings import RolloutSettings
from vllm_worker import engine_name

pytestmark = pytest.mark.slow
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "initializer_range": 0.2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
MOE = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
MIXED = SMALL | MOE | {"mlp_only_layers": [0], "attention_bias": True, "tie_word_embeddings": False}


# ---- Models, engines, samples ------------------------------------------------------------------------------
def make_policy(kind: str) -> Policy:
    """moe: 3 MoE layers, tied head. mixed: layer 0 dense, biases, untied head. dense, dense_tied: Qwen3."""
    if kind == "moe":
        return build_policy(Recipe(initializer_range=0.2, num_layers=3), VOCAB)
    dense = Qwen3Config(**SMALL, tie_word_embeddings=kind == "dense_tied")
    policy = Policy(Qwen3MoeConfig(**MIXED) if kind == "mixed" else dense)
    random_weights(policy, 0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("o_proj.bias"):  # vLLM's Qwen3 has no bias after o_proj
                parameter.zero_()
    return policy


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    """Return engine_of(kind, dtype, fp8), which makes each engine once, at its first call."""

    @cache
    def folder_of(kind):
        return save_model(make_policy(kind), tmp_path_factory.mktemp(kind))

    @cache
    def start(kind, settings):
        return RolloutEngine(folder_of(kind), 384, RolloutSettings.model_validate_json(settings))

    def engine_of(kind, dtype="float32", fp8="off", kv_cache_gib=0.05, **options):
        options = {"max_num_seqs": 8} | options
        settings = RolloutSettings(dtype=dtype, fp8=fp8, kv_cache_gib=kv_cache_gib, **options)
        return start(kind, settings.model_dump_json())

    return engine_of


@pytest.fixture
def synced(engine_of):
    """Return synced(kind, ...): a policy, and an engine that holds the weights of this policy."""

    def synced(kind, *arguments, **options):
        policy = make_policy(kind)
        engine = engine_of(kind, *arguments, **options)
        engine.sync(hf_tensors(policy), 0)
        return policy, engine

    return synced


def move(policy) -> None:
    """Change every parameter, as an update does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if not name.endswith("o_proj.bias"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_an_engine_that_fails_while_sampling_raises_one_short_error(engine_of, monkeypatch, capfd):
    """vLLM computes a prompt in chunks here, and on a CPU cannot rewind the random numbers of the request."""
    original = rollout.engine_options
    chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": 400}
    monkeypatch.setattr(rollout, "engine_options", lambda *arguments: original(*arguments) | chunked)
    engine = engine_of("moe", max_num_seqs=31)
    engine.sync(hf_tensors(make_policy("moe")), 0)
    requests = random_requests(4, 200, 300, max_new_tokens=20)
    capfd.readouterr()
    with pytest.raises(RuntimeError, match="CPU Generator"):
        engine.generate(requests, 0)
    assert sum(map(len, capfd.readouterr())) < 2000, "vLLM's dump of its state is 100 kB"
    with pytest.raises(RuntimeError, match="sync"):
        engine.generate(requests, 0)


# ---- Captured routes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["moe", "mixed", "dense", "dense_tied"])
def test_samples_are_the_trainers_with_more_requests_than_seats_in_any_order(kind, synced):
    policy, engine = synced(kind)
    requests = random_requests(60, 1, 40)
    completions = engine.generate(requests, 0)
    assert_samples_are_the_trainers(policy, requests, completions)
    order = np.random.default_rng(0).permutation(len(requests)).tolist()
    shuffled = engine.generate([requests[i] for i in order], 0)
    assert token_ids(shuffled) == token_ids([completions[i] for i in order])
    assert_samples_are_the_trainers(policy, [requests[i] for i in order], shuffled)
    assert engine.generate([], 0) == []


def test_routes_of_cached_prefixes_and_after_a_sync_of_other_weights(synced, monkeypatch):
    policy, engine = synced("moe")
    block = engine.engine.vllm_config.cache_config.block_size
    prompts = [request.prompt_ids for request in random_requests(4, 2 * block + 1, 2 * block + 60)]
    requests = [Request(p, 10 * i + k, 1.0, 16) for i, p in enumerate(prompts) for k in range(6)]
    num_cached = []
    real_step = engine.engine.step

    def step():
        outputs = real_step()
        num_cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    monkeypatch.setattr(engine.engine, "step", step)
    tables = []
    for version in (0, 1):
        engine.sync(hf_tensors(policy), version)
        num_cached.clear()
        completions = engine.generate(requests, version)
        # The first 8 requests take the 8 seats at once and may miss the cache. Of later requests, only the
        # first with a new prompt can.
        assert sum(n >= 2 * block for n in num_cached) >= len(requests) - 8 - 2
        assert_samples_are_the_trainers(policy, requests, completions)
        tables.append(completions[0].routed_experts[: len(prompts[0])])
        move(policy)
    assert not torch.equal(*tables), "other weights should route the same prompt to other experts"


def test_routes_of_preempted_requests(synced, monkeypatch):
    """13 blocks of 32 tokens serve 8 seats, whose sequences grow from one block into a second one."""
    policy, engine = synced("moe", kv_cache_gib=13 * 49152 / 2**30)
    block = engine.engine.vllm_config.cache_config.block_size
    scheduler = engine.engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request
    preempted = []

    def record(request, *arguments, **options):
        preempted.append(request)
        preempt(request, *arguments, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", record)
    requests = random_requests(16, block - 12, block - 2, max_new_tokens=24)
    with monkeypatch.context() as patch:
        patch.setattr(rollout.CacheRoom, "has_room_for", lambda self, index: True)
        completions = engine.generate(requests, 0)
    assert preempted, "the test needs a preemption"
    assert_samples_are_the_trainers(policy, requests, completions)
    preempted.clear()
    assert token_ids(engine.generate(requests, 0)) == token_ids(completions)
    assert not preempted, "the cache has room for six requests of two blocks each"
    assert engine.num_blocks == 12  # vLLM reserves one
    assert "384 tokens, that is 1 completions of full length (384 tokens" in engine.describe()


def test_routes_are_captured_only_on_demand(synced):
    """Prefixes that were cached without routes are computed again as soon as routes are needed."""
    policy, engine = synced("moe")
    block = engine.engine.vllm_config.cache_config.block_size
    requests = random_requests(8, block + 1, block + 60)
    plain = engine.generate(requests, 0, capture_routes=False)
    assert [c.routed_experts for c in plain] == [None] * 8
    manager = engine.engine.engine_core.engine_core.scheduler.routed_experts_mgr
    copied = manager.routed_experts_by_slot.copy()
    engine.generate(random_requests(1, 3, 4), 0, capture_routes=False)
    assert np.array_equal(copied, manager.routed_experts_by_slot), "no routes should have been copied"
    for _ in range(2):
        again = engine.generate(requests, 0)
        assert token_ids(again) == token_ids(plain)
        assert_samples_are_the_trainers(policy, requests, again)


def test_a_rank_of_a_shared_engine_keeps_the_routes_of_its_own_requests_alone(synced, monkeypatch):
    """Requests 3 and 4 are this rank's; the engine runs the requests of all ranks."""
    policy, engine = synced("moe")
    requests = random_requests(9, 1, 40)
    expected = token_ids(engine.generate(requests, 0))
    run_requests = engine.run_requests
    reported = []
    kept = []

    def record(*arguments):
        completions, captured = run_requests(*arguments)
        kept.extend(ids for ids in captured if ids is not None)
        return completions, captured

    monkeypatch.setattr(engine, "run_requests", record)
    monkeypatch.setattr(engine, "gather_requests", lambda local: (requests, 3))
    completions = engine.generate(requests[3:5], 0, lambda *result: reported.append(result))
    assert token_ids(completions) == expected[3:5]
    assert sorted((index, sample.token_ids) for index, sample in reported) == [*enumerate(expected[3:5])]
    assert_samples_are_the_trainers(policy, requests[3:5], completions)
    assert len(kept) == 2


# ---- validate_routes ---------------------------------------------------------------------------------------
def routes_config(num_layers, top_k, num_experts, dense=(), sparse_step=1):
    return SimpleNamespace(
        model_type="qwen3_moe", num_hidden_layers=num_layers, num_experts_per_tok=top_k,
        num_experts=num_experts, mlp_only_layers=list(dense), decoder_sparse_step=sparse_step,
    )  # fmt: skip


def slow_routes(captured, num_rows, config, sparse):
    """Compute the result of validate_routes() row by row, in Python lists; sparse: numbers of MoE layers."""
    top_k = config.num_experts_per_tok
    sentinel = [[255 if config.num_experts < 256 else 32767] * top_k] * config.num_hidden_layers

    def is_valid(row):
        return all(len(set(row[i])) == top_k and max(row[i]) < config.num_experts for i in sparse)

    return [
        [sentinel] * rows
        if ids is None or len(ids) != rows
        else [row if is_valid(row) else sentinel for row in ids.tolist()]
        for ids, rows in zip(captured, num_rows)
    ]


def fuzzed_routes(rng, config, rows, sparse):
    """Draw mostly valid ids in vLLM's layout, with every kind of fault; the array is read-only."""
    if rng.random() < 0.1:
        return None
    top_k = config.num_experts_per_tok
    dtype = np.uint8 if config.num_experts <= 256 else np.uint16
    largest = np.iinfo(dtype).max
    rows = max(0, rows + rng.choice([0, 0, 0, 0, -1, 1, 5]))
    noise = rng.random((rows, config.num_hidden_layers, config.num_experts))
    ids = noise.argsort(-1)[..., :top_k].astype(dtype)
    for layer in set(range(config.num_hidden_layers)) - set(sparse):
        ids[:, layer] = rng.integers(2)  # K times the same id, which is valid in a dense layer
    for t in np.flatnonzero(rng.random(rows) < 0.35):
        layer = rng.choice(sparse)
        faults = [config.num_experts, largest, *ids[t, layer]]  # an unknown expert, or one expert twice
        ids[t, layer, rng.integers(top_k)] = min(rng.choice(faults), largest)
    ids.setflags(write=False)
    return ids


# dense layers, decoder_sparse_step, numbers of the MoE layers
MOE_LAYERS = [((), 1, [0, 1, 2, 3]), ((0,), 1, [1, 2, 3]), ((1, 2), 1, [0, 3]), ((), 2, [1, 3])]


@pytest.mark.parametrize("num_experts", [4, 8, 255, 256, 300])
def test_validate_routes_is_the_slow_loop(num_experts):
    rng = np.random.default_rng(num_experts)
    counts = Counter()
    for top_k in (1, 2, 3, 4):
        for dense, step, sparse in MOE_LAYERS:
            config = routes_config(4, top_k, num_experts, dense, step)
            num_rows = rng.integers(1, 12, size=8).tolist()
            captured = [fuzzed_routes(rng, config, rows, sparse) for rows in num_rows]
            expected = slow_routes(captured, num_rows, config, sparse)
            result = validate_routes(captured, num_rows, config)
            assert [ids.tolist() for ids in result] == expected
            dtype = torch.uint8 if num_experts < 256 else torch.int16
            assert all(ids.dtype == dtype and ids.is_contiguous() for ids in result)
            counts.update(row[0][0] == invalid_route(num_experts) for rows in expected for row in rows)
    assert counts[True] > 100 and counts[False] > 100, "the fuzz needs valid and invalid rows"
    assert validate_routes([], [], config) == []


def test_routes_of_a_short_completion_do_not_hold_the_memory_of_a_long_one():
    config = routes_config(2, 2, 8)
    num_rows = [3, 20_000, 3]
    captured = [np.tile(np.array([0, 1], dtype=np.uint8), (rows, 2, 1)) for rows in num_rows]
    first, long, last = validate_routes(captured, num_rows, config)
    assert len(pickle.dumps(first)) < 2000 and len(pickle.dumps(last)) < 2000 < len(pickle.dumps(long))
    first[:] = 7
    assert captured[0].max() == 1 and long.max() == 1 and last.max() == 1


@pytest.mark.parametrize(("layers", "top_k"), [(3, 2), (2, 3)])
def test_another_number_of_layers_or_experts_per_token_is_an_error(layers, top_k):
    valid, other = (np.zeros((5, *shape), np.uint8) for shape in ((2, 2), (layers, top_k)))
    with pytest.raises(RuntimeError, match="capture_routes=off"):
        validate_routes([None, valid, other], [5, 5, 5], routes_config(2, 2, 8))


# ---- Simulated FP8; test_kernels.py compares fp8_round() with the formula ----------------------------------
def random_weight(shape, spread, seed=0):
    """Draw a matrix whose rows and columns differ in size by factors of 100, with 2 % zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * spread
    weight *= torch.logspace(0, 2, shape[-2]).unsqueeze(-1) * torch.logspace(0, -2, shape[-1])
    return weight * (torch.rand(shape, generator=generator) > 0.02)


def nearest_mxfp4(block):
    """Round 32 numbers or fewer to the nearest code, ties to the even code."""
    codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    largest = block.abs().max().item()
    scale = 2.0 ** (math.floor(math.log2(largest)) - 2) if largest else 1.0
    distances = (block.abs().unsqueeze(-1) / scale - codes).abs()  # [N, 8]
    nearest = [min(range(8), key=lambda code: (row[code], code % 2)) for row in distances.tolist()]
    return (codes[nearest] * scale).copysign(block)


@pytest.mark.parametrize("spread", [3e-5, 0.02, 1e6])
def test_mxfp4_round_takes_the_nearest_code_of_each_block(spread):
    weight = random_weight((5, 70), spread, seed=3)
    weight[0, :32] = torch.arange(32) * 0.25 - 4  # the scale is 1: ties between all codes
    weight[1, 32:64] = 0.0
    expected = torch.stack([torch.cat([nearest_mxfp4(block) for block in row.split(32)]) for row in weight])
    assert torch.equal(mxfp4_round(weight), expected)
    assert len(expected[0, :32].unique()) == 15 - 2, "all codes but 6 and -6"


def rounded_by_hand(named):
    """Return {name: tensor} with linear layers and experts rounded, fused as in vLLM."""
    result = dict(named)
    for name, tensor in list(result.items()):
        if tensor.dim() == 3:
            result[name] = torch.stack([fp8_round(expert) for expert in tensor])
        elif name.endswith(("o_proj.weight", "mlp.down_proj.weight")):
            result[name] = fp8_round(tensor)
        elif name.endswith(("q_proj.weight", "mlp.gate_proj.weight")):
            first, *partners = ("q", "k", "v") if "q_proj" in name else ("gate", "up")
            names = [name, *(name.replace(f"{first}_proj", f"{partner}_proj") for partner in partners)]
            parts = [result[n] for n in names]
            fused = fp8_round(torch.cat(parts))
            result.update(zip(names, fused.split([len(part) for part in parts])))
    return result


@pytest.mark.parametrize("kind", ["moe", "mixed", "dense"])
def test_simulate_rounding_rounds_linear_layers_and_experts_alone(kind):
    policy = make_policy(kind)
    sent = {name: tensor.clone() for name, tensor in hf_tensors(policy)}
    out = list(simulate_rounding(hf_tensors(policy)))
    assert Counter(name for name, _ in out) == Counter(sent.keys())
    expected = rounded_by_hand(sent)
    for name, tensor in out:
        assert torch.equal(tensor, expected[name]) and tensor.dtype == sent[name].dtype
        rounded = name.removesuffix(".weight").endswith(("_proj", "proj.bias")) and not name.endswith("bias")
        assert torch.equal(tensor, sent[name]) is not rounded
    assert all(torch.equal(tensor, sent[name]) for name, tensor in hf_tensors(policy))


def test_experts_of_a_width_that_is_no_multiple_of_128_are_rounded_as_in_vllm():
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineMoEMethod

    width = 64
    hidden = 96
    method = object.__new__(Fp8PerBlockOnlineMoEMethod)
    method.weight_block_size = [128, 128]
    one_gpu = type("", (), {"__getattr__": lambda self, name: False})()  # no parallelism of any kind
    padded_hidden, padded_width = method.maybe_roundup_sizes(hidden, width, torch.bfloat16, one_gpu)
    experts = random_weight((2, 2 * width, hidden), 0.02)
    stored = torch.zeros(2, 2 * padded_width, padded_hidden).bfloat16()  # gate in one half, up in the other
    for half, part in zip(stored.chunk(2, dim=1), experts.chunk(2, dim=1)):
        half[:, :width, :hidden] = part
    expected = []
    for expert in stored:
        full = fp8_round(expert.float())
        expected.append(torch.cat([full[:width, :hidden], full[padded_width:][:width, :hidden]]))
    ((_, rounded),) = simulate_rounding([("model.layers.0.mlp.experts.gate_up_proj", experts)])
    assert torch.equal(rounded, torch.stack(expected))


def test_simulate_rounding_of_an_incomplete_stream_is_an_error():
    named = [(n, tensor) for n, tensor in hf_tensors(make_policy("mixed")) if "1.self_attn.k_proj" not in n]
    with pytest.raises(ValueError, match="layers.1.self_attn.q_proj.weight"):
        list(simulate_rounding(named))


@pytest.mark.parametrize("kind", ["moe", "mixed"])
def test_vllm_would_quantise_exactly_the_tensors_that_the_simulation_rounds(kind, engine_of):
    """Ask vLLM how it would compute every module under the configuration that rollout.fp8=on passes."""
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.online import base, fp8

    def quantised_names(settings):
        config = base.OnlineQuantizationConfig(resolve_quantization_config("fp8_per_block", settings))
        (model,) = engine_of(kind).llm.collective_rpc(lambda worker: worker.model_runner.get_model())
        config.packed_modules_mapping = model.packed_modules_mapping
        names = set()
        for name, module in model.named_modules():
            prefix = getattr(module, "prefix" if isinstance(module, LinearBase) else "layer_name", name)
            resolved = config.resolve_quant_method_cls(module, prefix)
            if resolved is not None:
                experts = isinstance(module, RoutedExperts)
                linear_method = fp8.Fp8PerBlockOnlineLinearMethod
                assert resolved[-1] == (fp8.Fp8PerBlockOnlineMoEMethod if experts else linear_method)
                leaves = ("w13_weight", "w2_weight") if experts else ("weight",)
                names |= {vllm_worker.plain_name(f"{name}.{leaf}") for leaf in leaves}
        return names

    policy = make_policy(kind)
    sent = dict(hf_tensors(policy))
    out = simulate_rounding(hf_tensors(policy))
    changed = {engine_name(name) for name, tensor in out if not torch.equal(tensor, sent[name])}
    assert quantised_names(FP8_QUANTIZATION) == changed
    routers = {engine_name(name) for name in sent if name.endswith("mlp.gate.weight")}
    assert quantised_names(None) - changed == routers, "without the setting vLLM quantises routers too"


# ---- check_weights -----------------------------------------------------------------------------------------
def by_ulps(tensor, steps: dict[int, int]):
    """Copy a tensor; move elements, by flat index, by a number of units in the last place."""
    moved = tensor.contiguous().clone()
    bits = moved.view(-1).view({2: torch.int16, 4: torch.int32}[moved.dtype.itemsize])
    for index, count in steps.items():
        assert moved.view(-1)[index] != 0
        bits[index] += count
    return moved


def tamper(engine, name: str, steps: dict[int, int]) -> None:
    """Change a weight that the engine computes with: in place, or by a new product if vLLM's CPU backend has
    packed the weight."""

    def change(worker):
        model = worker.model_runner.get_model()
        path, leaf = name.rsplit(".", 1)
        module = model.get_submodule(path)
        if leaf == "weight" and hasattr(module, "cpu_linear") and "embed" not in name:
            width = module.embedding_dim if name == "lm_head.weight" else module.input_size
            dtype = next(model.parameters()).dtype
            matrix = module.cpu_linear(torch.eye(width, dtype=dtype), module.weight, None).T
            moved = by_ulps(matrix, steps)
            module.cpu_linear = lambda x, weight, bias: F.linear(x, moved, bias)
        else:
            parameter = getattr(module, leaf)
            parameter.data.copy_(by_ulps(parameter.data, steps))

    engine.llm.collective_rpc(change)


def assert_check_fails(engine, named, *parts, count=1):
    """Assert that the check names the differing parameters, and that the engine then refuses to sample."""
    version = engine.policy_version
    assert version is not None
    with pytest.raises(RuntimeError, match="other values") as caught:
        engine.check_weights(named)
    message = str(caught.value)
    assert count is None or f"in {count} parameters" in message
    assert all(part in message for part in parts)
    with pytest.raises(RuntimeError, match="sync"):
        engine.generate([Request([5], 0, 1.0, 2)], version)


DTYPES = ("float32", "bfloat16")
ENGINES = [(kind, dtype) for kind in ("moe", "mixed") for dtype in DTYPES]
ENGINES += [("dense", "float32"), ("dense_tied", "float32")]


@pytest.mark.parametrize(("kind", "dtype"), ENGINES)
def test_the_check_passes_after_every_sync_and_fails_for_other_weights(kind, dtype, synced):
    policy, engine = synced(kind, dtype)
    engine.check_weights(hf_tensors(policy))
    move(policy)
    # Embedding and head, last norm; per layer 4 norms, qkv, o, router, w13, w2. Each of them has changed.
    assert_check_fails(engine, hf_tensors(policy), count=2 + 1 + 3 * 9 if kind == "moe" else None)
    half = policy.bfloat16()
    engine.sync(hf_tensors(half), 2)
    engine.check_weights(hf_tensors(half))
    assert len(engine.generate([Request([5, 6], 0, 1.0, 3)], 2)) == 1


ENGINE_NAMES = {
    "moe": [
        "model.layers.1.mlp.experts.routed_experts.w13_weight", "model.layers.2.self_attn.qkv_proj.weight",
        "model.layers.2.mlp.experts.routed_experts.w2_weight", "model.layers.1.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate.weight", "model.layers.1.self_attn.q_norm.weight", "model.norm.weight",
        "lm_head.weight", "model.embed_tokens.weight",
    ],
    "mixed": [
        "model.layers.0.mlp.gate_up_proj.weight", "model.layers.2.self_attn.qkv_proj.bias", "lm_head.weight",
    ],
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "name"), [(kind, n) for kind, names in ENGINE_NAMES.items() for n in names])
def test_one_ulp_in_one_element_of_the_engine_fails_the_check(kind, name, dtype, synced):
    policy, engine = synced(kind, dtype)
    tamper(engine, name, {17: 1})
    count = None if "embed" in name else 1  # a tied head may count too
    assert_check_fails(engine, hf_tensors(policy), vllm_worker.plain_name(name) + " (from ", count=count)
    engine.sync(hf_tensors(policy), 1)
    engine.check_weights(hf_tensors(policy))


def test_a_parameter_without_a_sent_tensor_fails_the_check(synced):
    policy, engine = synced("moe")
    name = "model.layers.1.self_attn.q_norm.weight"
    incomplete = [(n, tensor) for n, tensor in hf_tensors(policy) if n != name]
    assert_check_fails(engine, incomplete, f"{name} (from nothing)")


@pytest.mark.parametrize(
    ("dtype", "integers", "largest_subnormal"),
    [(torch.float32, torch.int32, 0x7FFFFF), (torch.bfloat16, torch.int16, 0x7F)],
)
def test_the_checksum_is_the_sum_and_the_sum_of_squares_of_the_bits(dtype, integers, largest_subnormal):
    values = random_weight((300, 300), 1.0)
    tiny = torch.finfo(dtype).tiny
    values[0, :5] = torch.tensor([tiny, -tiny, float("nan"), float("inf"), -float("inf")])
    tensor = values.to(dtype)
    assert tensor.numel() > vllm_worker.CHECKSUM_CHUNK["cpu"] and (tensor == 0).any()
    bits = torch.where(tensor == 0, 0, tensor).view(integers).flatten().tolist()
    modulus = 2 ** (16 * dtype.itemsize)
    expected = [sum(bits) % modulus, sum(b * b for b in bits) % modulus]
    checksum = vllm_worker.checksum(values, dtype)
    assert [x % modulus for x in checksum.tolist()] == expected
    order = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(0))
    moved = F.pad(torch.where(tensor == 0, -tensor, tensor).flatten()[order], (5, 70_000))  # -0, padding
    moved.view(integers)[:2] = torch.tensor([1, largest_subnormal])
    assert torch.equal(vllm_worker.checksum(moved, dtype), checksum)
    moved = by_ulps(tensor, {1000: 1, 2000: -1})  # changes that cancel in the sum
    assert not torch.equal(vllm_worker.checksum(moved, dtype), checksum)


@pytest.mark.parametrize(("form", "other_form"), [("fp8", "mxfp4"), ("mxfp4", "fp8")])
def test_simulated_rounding_is_checked_against_the_rounded_weights(form, other_form, synced, monkeypatch):
    policy, engine = synced("moe", fp8="simulate", simulate_format=form)
    name = "model.layers.1.self_attn.k_proj.weight"
    rounding = {"fp8": fp8_round, "mxfp4": mxfp4_round}
    engine.check_weights(hf_tensors(policy))
    changed = [(n, tensor * 1.5 if n == name else tensor) for n, tensor in hf_tensors(policy)]
    assert_check_fails(engine, changed, name)
    engine.sync(hf_tensors(policy), 1)
    monkeypatch.setattr(engine, "settings", engine.settings.model_copy(update={"fp8": "off"}))
    engine.check_weights(list(simulate_rounding(hf_tensors(policy), rounding[form])))
    # 3 layers of qkv_proj, o_proj, w13 and w2
    other = list(simulate_rounding(hf_tensors(policy), rounding[other_form]))
    assert_check_fails(engine, other, "model.layers.0.self_attn.qkv_proj.weight", count=12)


def test_a_tied_head_with_a_packed_copy_of_the_old_embedding_fails_the_check(synced, monkeypatch):
    policy, engine = synced("moe")
    repack = vllm_worker.repack_for_cpu_kernels

    def without_head(model, packed):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.config, "tie_word_embeddings", False)
            repack(model, packed)

    monkeypatch.setattr(vllm_worker, "repack_for_cpu_kernels", without_head)
    move(policy)
    engine.sync(hf_tensors(policy), 1)
    assert_check_fails(engine, hf_tensors(policy), "lm_head.weight (from model.embed_tokens.weight)")


def test_a_tensor_without_a_place_in_the_engine_is_an_error(engine_of):
    """vLLM's Qwen3 has no bias after o_proj; the attention of transformers and of Policy has one."""
    policy = make_policy("mixed")
    engine = engine_of("mixed")
    with torch.no_grad():
        policy.model.layers[1].self_attn.o_proj.bias.fill_(1.0)
    with pytest.raises(RuntimeError, match="o_proj.bias"):
        engine.sync(hf_tensors(policy), 0)
        engine.check_weights(hf_tensors(policy))


# ---- Engines for GPUs, tested on a CPU ---------------------------------------------------------------------
def test_a_sync_calls_vllms_loader_once_per_projection_and_not_once_per_expert(synced, monkeypatch):
    """The CPU path, packing, is switched off. A reload of vLLM calls a loader to count, and again to load."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    policy, engine = synced("moe")
    copy_matrices = RoutedExperts._load_model_weight_or_group_weight_scale
    calls = []

    def counting(layer, **arguments):
        calls.append(arguments["shard_id"])
        copy_matrices(layer, **arguments)

    monkeypatch.setattr(RoutedExperts, "_load_model_weight_or_group_weight_scale", counting)
    monkeypatch.setattr(vllm_worker, "expert_storage", lambda model: {})
    move(policy)
    engine.sync(hf_tensors(policy), 1)
    engine.check_weights(hf_tensors(policy))
    requests = random_requests(8, 1, 20)
    assert_samples_are_the_trainers(policy, requests, engine.generate(requests, 1))
    assert Counter(calls) == {"w1": 3 * 2, "w3": 3 * 2, "w2": 3 * 2}  # 3 layers


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_whole_experts_are_cut_into_the_slices_of_the_ranks(rank):
    """Four ranks; kernels pad the width of a rank from 6 to 8, and the hidden size from 10 to 12."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    layer = object.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.quant_config = None
    layer.quant_method = None
    layer.expert_map_manager = SimpleNamespace(map_global_to_local=lambda expert: expert)
    parallel = SimpleNamespace(tp_size=4)
    layer.moe_config = SimpleNamespace(is_act_and_mul=True, tp_rank=rank, moe_parallel_config=parallel)
    gate, up, down = torch.randn(3, 5, 4 * 6, 10)
    tensors = {"w13_weight": torch.cat([gate, up], dim=1), "w2_weight": down.mT}
    expected = {"w13_weight": torch.zeros(5, 2 * 8, 12), "w2_weight": torch.zeros(5, 12, 8)}
    local = slice(6 * rank, 6 * rank + 6)
    expected["w13_weight"][:, :6, :10] = gate[:, local]
    expected["w13_weight"][:, 8:14, :10] = up[:, local]
    expected["w2_weight"][:, :10, :6] = down[:, local].mT
    for name, tensor in tensors.items():
        parameter = torch.nn.Parameter(torch.zeros_like(expected[name]), requires_grad=False)
        parameter.weight_loader = layer.weight_loader
        layer.register_parameter(name, parameter)
        vllm_worker.load_whole(layer, name, tensor)
        assert torch.equal(parameter, expected[name])


def test_options_of_an_engine_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = RolloutSettings(sleep_level=2, dtype="bfloat16")
    options = rollout.engine_options("folder", 100, settings, True, 7200.5)
    assert options["hf_overrides"] == {"head_dtype": "float32"} and options["enable_sleep_mode"]
    assert not options["enforce_eager"] and options["block_size"] == 64
    assert options["distributed_timeout_seconds"] == options["cpu_distributed_timeout_seconds"] == 7201
    assert options["max_num_seqs"] == 256 and "max_cudagraph_capture_size" not in options
    shared = rollout.engine_options("folder", 100, RolloutSettings(tensor_parallel=8), False)
    assert "block_size" not in shared, "a dense model shares more of its prompts in small blocks"
    assert shared["max_num_seqs"] == shared["max_cudagraph_capture_size"] == 1024, "not 512"
    fp8 = rollout.engine_options(
        "folder", 100, RolloutSettings(fp8="on", kv_cache_fp8=True, dtype="bfloat16"), True
    )
    assert fp8["quantization"] == "fp8_per_block" and fp8["kv_cache_dtype"] == "fp8"
    assert fp8["quantization_config"] == {"ignore": ["re:.*mlp\\.gate$"]}
    assert not options.keys() & {"quantization", "quantization_config", "kv_cache_dtype"}
    eager = rollout.engine_options("folder", 100, RolloutSettings(enforce_eager=True, dtype="float32"), True)
    assert eager["enforce_eager"] and not eager.keys() & {"hf_overrides", "distributed_timeout_seconds"}


QWEN3_30B = model_config("Qwen/Qwen3-30B-A3B")
GIB = 2**30


@pytest.mark.parametrize(
    ("settings", "trainer_gib", "expected"),
    [
        ({}, 0, 0.92),  # vLLM's own share
        ({"tensor_parallel": 8, "sleep_level": 2}, 75.5, (138.5 - 75.5) / 139.7 - 0.05),  # a margin of 5 %
        ({"tensor_parallel": 2, "fp8": "on", "sleep_level": 2}, 75.5, (138.5 - 75.5) / 139.7 - 0.05),
        ({"sleep_level": 2}, 80, "rollout.tensor_parallel=2 rollout.fp8=off"),
        ({"sleep_level": 0}, 130, "rollout.sleep_level=2"),
        ({"sleep_level": 2}, 130, "rollout.max_new_tokens"),
    ],
)
def test_the_engine_gets_the_memory_that_the_trainer_leaves(settings, trainer_gib, expected, monkeypatch):
    """Qwen3-30B-A3B on eight GPUs of 139.7 GiB."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    sizes = [int(gib * GIB) for gib in (trainer_gib, 138.5, 139.7)]
    arguments = (QWEN3_30B, RolloutSettings(dtype="bfloat16", **settings), 17408, *sizes)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            memory_plan.memory_share(*arguments)
    else:
        assert memory_plan.memory_share(*arguments) == pytest.approx(expected, rel=1e-6)


def test_an_engine_sleeps_as_soon_as_it_is_built(engine_of, monkeypatch):
    """On a mock GPU, vLLM's first call after the start is sleep(); segments are expandable from then on."""
    folder = engine_of("moe").llm.model_config.model
    calls = []
    record_level = lambda level: calls.append(level)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(), get_tokenizer=build_tokenizer, sleep=record_level)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda rank: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda rank: "a mock")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(rollout, "start_vllm", lambda options, captures: calls.append(options) or llm)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    first = RolloutEngine(folder, 64, RolloutSettings(sleep_level=2), trainer_bytes=30 * GIB)
    before, options, after, level = calls
    assert (before, after, level) == ("expandable_segments:False", "expandable_segments:True", 2)
    assert options["gpu_memory_utilization"] == pytest.approx((70 - 30 - 4) / 80)
    with pytest.raises(ValueError, match="enforce_eager"):
        rollout.refuse_beside_graphs_of_experts()
    del first
    second = RolloutEngine(folder, 64, RolloutSettings(enforce_eager=True, kv_cache_gib=1))
    assert calls[-2]["kv_cache_memory_bytes"] == GIB and calls[-2]["gpu_memory_utilization"] == 0.05
    assert second.settings.enforce_eager and rollout.refuse_beside_graphs_of_experts() is None


def test_the_kv_cache_wakes_up_after_the_check_of_the_weights(monkeypatch):
    """The check gathers experts, which needs memory. An error of wake_up() names the setting that helps."""
    calls = []
    answers = {"load_weights_in_worker": [[]], "compare_weights_in_worker": [[]]}
    llm = SimpleNamespace(
        wake_up=lambda tags: calls.append(*tags),
        collective_rpc=lambda work, args: calls.append(work.__name__) or answers[work.__name__],
        reset_prefix_cache=lambda: calls.append("prefixes") or True,
    )
    engine = object.__new__(RolloutEngine)
    engine.settings = RolloutSettings(sleep_level=2)
    engine.llm = llm
    engine.on_gpu = False
    engine.num_experts = 8
    engine.sync([], 3, [])
    expected = ["weights", "load_weights_in_worker", "prefixes", "compare_weights_in_worker", "kv_cache"]
    assert (calls, engine.policy_version) == (expected, 3)
    answers["compare_weights_in_worker"] = [["norm.weight"]]
    with pytest.raises(RuntimeError, match="norm.weight"):
        engine.sync([], 5, [])
    assert engine.policy_version is None
    llm.wake_up = lambda tags: 1 / 0
    with pytest.raises(RuntimeError, match="rollout.kv_cache_gib"):
        engine.sync([], 6)
    assert engine.policy_version is None


def test_the_bias_of_a_router_is_sent_in_float32_also_with_fp8():
    tensors = [
        ("layers.0.mlp.gate.e_score_correction_bias", torch.tensor([7.0, 7.001])),
        ("w", torch.ones(2)),
    ]
    (_, bias), (_, weight) = quantise_for_engine(tensors, "on")
    assert bias.tolist() == tensors[0][1].tolist() and weight.dtype == torch.bfloat16


def test_vllms_fp8_is_refused_if_it_would_differ_from_the_simulation(monkeypatch):
    def check(**options):
        check_fp8(RolloutSettings(**options), QWEN3_30B)

    check(fp8="on", tensor_parallel=8, expert_parallel=True)
    with pytest.raises(ValueError, match="expert_parallel=true"):
        check(fp8="on", tensor_parallel=4)
    air = Glm4MoeConfig(  # GLM-4.5-Air: parts that expert parallelism leaves to tensor parallelism
        moe_intermediate_size=1408,
        intermediate_size=12288,
        n_shared_experts=1,
        first_k_dense_replace=1,
        head_dim=128,
    )
    settings = RolloutSettings(fp8="on", tensor_parallel=8, expert_parallel=True)
    with pytest.raises(ValueError, match="the shared experts of width 1408 into parts of 176"):
        check_fp8(settings, air)
    monkeypatch.delenv("VLLM_USE_DEEP_GEMM_E8M0", raising=False)
    rollout.set_vllm_environment(on_gpu=True)
    import vllm.envs

    assert vllm.envs.VLLM_USE_DEEP_GEMM_E8M0 is False
    monkeypatch.setattr("vllm.utils.deep_gemm.is_deep_gemm_e8m0_used", lambda: True)
    with pytest.raises(ValueError, match="VLLM_USE_DEEP_GEMM_E8M0"):
        rollout.refuse_scales_of_two()


def test_a_driver_that_torch_cannot_use_is_an_error_of_one_line(monkeypatch):
    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nMore.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.setattr(rollout.Path, "exists", lambda path: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert rollout.check_driver() is None, "the GPU is hidden on purpose"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ValueError, match="CUDA 13.0") as caught:
        rollout.check_driver()
    assert "11040" in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert rollout.check_driver() is None


# ---- Refusals ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("option", [{"fp8": "on"}, {"kv_cache_fp8": True}])
def test_fp8_without_its_hardware_is_refused(option, engine_of, monkeypatch):
    (name,) = option
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"rollout.{name}"):
        engine_of("moe", **option)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda rank: "an old GPU")
    for capability, is_old in (((8, 6), True), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda rank, version=capability: version)
        with pytest.raises(ValueError, match="an old GPU") if is_old else contextlib.nullcontext():
            rollout.check_hardware(RolloutSettings(sleep_level=2, **option))
            check_fp8(RolloutSettings(**option), device=machine.device_of_rank())


def test_a_vllm_without_routed_experts_is_refused(engine_of, monkeypatch):
    import vllm

    def unsupported(**options):
        raise NotImplementedError("Routed-experts capture is not supported with router X")

    fields = rollout.dataclasses.fields
    with monkeypatch.context() as patch:
        patch.setattr(rollout.dataclasses, "fields", lambda cls: [
            field for field in fields(cls) if field.name != "enable_return_routed_experts"
        ])  # fmt: skip
        with pytest.raises(ValueError, match="rollout.capture_routes=off"):
            engine_of("moe", prefix_caching=False)
    monkeypatch.setattr(vllm, "LLM", unsupported)
    with pytest.raises(ValueError, match="router X.*rollout.capture_routes=off"):
        engine_of("moe", prefix_caching=False)
    with pytest.raises(
        NotImplementedError, match="router X"
    ):  # capture is off, so the error has another cause
        engine_of("moe", prefix_caching=False, capture_routes="off")


class Fp8ModelStandIn(torch.nn.Module):
    """The model of an engine on a GPU with FP8: o_proj holds codes, and scales that vLLM has made itself."""

    def __init__(self):
        super().__init__()
        codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
        self.o_proj = torch.nn.Module()
        self.o_proj.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.o_proj.weight_scale_inv = torch.nn.Parameter(torch.ones(1, 1), requires_grad=False)
        self.norm = torch.nn.RMSNorm(4)
        self.config = SimpleNamespace(tie_word_embeddings=False)

    def load_weights(self, named_tensors):
        """Return the names of the tensors, as vLLM's models do."""
        return {name for name, _ in named_tensors}


def test_a_sync_of_vllms_fp8_skips_scales_and_its_checksums_skip_codes(monkeypatch):
    import vllm.config
    from vllm.model_executor.model_loader import reload

    monkeypatch.setattr(reload, "initialize_layerwise_reload", lambda model: None)
    monkeypatch.setattr(reload, "finalize_layerwise_reload", lambda model, config: None)
    monkeypatch.setattr(vllm.config, "set_current_vllm_config", lambda config: contextlib.nullcontext())
    model = Fp8ModelStandIn()
    runner = SimpleNamespace(get_model=lambda: model, model_config=SimpleNamespace(dtype=torch.float32))
    parallel = SimpleNamespace(tensor_parallel_size=1)
    worker = SimpleNamespace(model_runner=runner, parallel_config=parallel, vllm_config=None)
    sent = [("o_proj.weight", torch.ones(4, 4)), ("norm.weight", torch.ones(4))]
    assert vllm_worker.load_weights_in_worker(worker, sent, on_cpu=False) == []
    assert vllm_worker.load_weights_in_worker(worker, sent[1:], on_cpu=False) == ["o_proj.weight"]
    assert vllm_worker.compare_weights_in_worker(worker, sent) == []
    model.norm.weight.data[2] = 2
    assert vllm_worker.compare_weights_in_worker(worker, sent) == ["norm.weight (from norm.weight)"]
