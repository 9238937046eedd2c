"""Test routed experts, FP8 rounding and weight checks of rollout.py and vllm_worker.py.

The engines are real vLLM engines on this CPU. Expected values come from the trainer's forward,
from vLLM's functions and from slow loops.
"""

import contextlib
import math
import pickle
import tracemalloc
from collections import Counter
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3MoeConfig

import rollout
import vllm_worker
from data.tiny import Recipe, build_policy, build_tokenizer
from kernels.fp8_block import fp8_round, mxfp4_round
from moe_model import Policy, hf_tensors, pack, random_weights, route_table, save_hf
from rollout import (
    Request,
    RolloutEngine,
    RolloutSettings,
    invalid_route,
    simulate_rounding,
    validate_routes,
)
from vllm_worker import engine_name

pytestmark = pytest.mark.slow
VOCAB = 98
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "initializer_range": 0.2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
MOE = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}


# ------------------------------------------------------------------------------------------------------------
# Models, engines, samples
# ------------------------------------------------------------------------------------------------------------
def make_policy(kind: str) -> Policy:
    """moe: 3 MoE layers, tied head. mixed: layer 0 dense, biases, untied head. dense, dense_tied: Qwen3."""
    if kind == "moe":
        return build_policy(Recipe(initializer_range=0.2, num_layers=3), VOCAB)
    if kind == "mixed":
        policy = Policy(
            Qwen3MoeConfig(
                **SMALL, **MOE, mlp_only_layers=[0], attention_bias=True, tie_word_embeddings=False
            )
        )
    else:
        policy = Policy(Qwen3Config(**SMALL, tie_word_embeddings=kind == "dense_tied"))
    random_weights(policy, 0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("o_proj.bias"):  # vLLM has none: see the test of tensors without a place
                parameter.zero_()
    return policy


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    """Make engine_of(kind, dtype, fp8): it makes one engine of each when it is first asked for."""

    @cache
    def folder_of(kind):
        folder = tmp_path_factory.mktemp(kind)
        save_hf(make_policy(kind), folder)
        build_tokenizer().save_pretrained(folder)
        return folder

    @cache
    def engine_of(kind, dtype="float32", fp8="off", kv_cache_gib=0.05, **options):
        options = {"max_num_seqs": 8} | options
        settings = RolloutSettings(dtype=dtype, fp8=fp8, kv_cache_gib=kv_cache_gib, **options)
        return RolloutEngine(folder_of(kind), 384, settings)

    return engine_of


def random_prompts(count: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, size=rng.integers(low, high)).tolist() for _ in range(count)]


def trained(policy, requests, completions, **options):
    """Run the trainer's forward on samples: log-probabilities [N], routes [T, L, K] or None."""
    packed = pack([r.prompt_ids for r in requests], [c.token_ids for c in completions], "cpu")
    with torch.no_grad():
        logprobs, _, layer_ids = policy(packed, **options)
    return logprobs, route_table(layer_ids, getattr(policy.config, "num_experts", 0))


def sampled_logprobs(completions):
    return torch.tensor([x for c in completions for x in c.logprobs])


def assert_routes_are_the_trainers(policy, requests, completions):
    """Compare routes as sets, row by row. No row is let off: with 8 experts, a few thousand rows and float32,
    the smallest gap between a chosen and a left-out score is far above the rounding of either side."""
    _, table = trained(policy, requests, completions)
    rows = [len(r.prompt_ids) + len(c.token_ids) - 1 for r, c in zip(requests, completions)]
    for request_rows, completion, expected in zip(rows, completions, table.split(rows)):
        ids = completion.routed_experts
        assert ids.shape == (request_rows, *table.shape[1:]) and ids.dtype == torch.uint8
        assert torch.equal(ids.sort(-1).values, expected.sort(-1).values)


def test_more_prompt_tokens_at_once_than_vllm_computes_in_a_step(engine_of):
    """vLLM computes 4,096 tokens a step. What does not fit waits, and changes no sample."""
    policy, engine = make_policy("moe"), engine_of("moe", max_num_seqs=32)
    engine.sync(hf_tensors(policy), 0)
    prompts = random_prompts(32, 200, 300)
    assert sum(map(len, prompts)) > 1.5 * 4096
    requests = [Request(prompt, seed, 1.0, 20) for seed, prompt in enumerate(prompts)]
    together = engine.generate(requests, 0)
    in_parts = sum((engine.generate(requests[i : i + 4], 0) for i in range(0, 32, 4)), [])
    assert [c.token_ids for c in together] == [c.token_ids for c in in_parts]
    logprobs, _ = trained(policy, requests, together)
    assert (logprobs - sampled_logprobs(together)).abs().max() < 1e-4


def test_an_engine_that_dies_says_so_in_a_line(engine_of, monkeypatch, capfd):
    """It computes a prompt in parts here, and cannot rewind that request's random numbers on a CPU."""
    original = rollout.engine_options
    in_parts = lambda *given: (
        original(*given) | {"enable_chunked_prefill": True, "max_num_batched_tokens": 400}
    )
    monkeypatch.setattr(rollout, "engine_options", in_parts)
    policy, engine = make_policy("moe"), engine_of("moe", max_num_seqs=31)
    engine.sync(hf_tensors(policy), 0)
    requests = [Request(prompt, seed, 1.0, 20) for seed, prompt in enumerate(random_prompts(4, 200, 300))]
    capfd.readouterr()
    with pytest.raises(RuntimeError, match="the engine failed while sampling: RuntimeError: CPU Generator"):
        engine.generate(requests, 0)
    assert sum(map(len, capfd.readouterr())) < 2000, "vLLM's dump of its state is 100 kB"


def move(policy, seed: int = 1) -> None:
    """Make another policy of it: every parameter is changed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if not name.endswith("o_proj.bias"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


# ------------------------------------------------------------------------------------------------------------
# Captured routes
# ------------------------------------------------------------------------------------------------------------
def test_routes_are_the_trainers_with_many_more_requests_than_seats_and_in_any_order(engine_of):
    policy, engine = make_policy("moe"), engine_of("moe")
    engine.sync(hf_tensors(policy), 0)
    requests = [Request(p, i, 1.0, 3 + i % 20) for i, p in enumerate(random_prompts(60, 1, 40))]
    completions = engine.generate(requests, 0)
    assert_routes_are_the_trainers(policy, requests, completions)
    order = np.random.default_rng(0).permutation(len(requests)).tolist()
    shuffled = engine.generate([requests[i] for i in order], 0)
    for i, again in zip(order, shuffled):
        assert again.token_ids == completions[i].token_ids
        same = again.routed_experts.sort(-1).values == completions[i].routed_experts.sort(-1).values
        assert same.all()
    assert engine.generate([], 0) == []


def test_routes_of_cached_prefixes_and_after_a_sync_of_other_weights(engine_of, monkeypatch):
    policy, engine = make_policy("moe"), engine_of("moe")
    block = engine.engine.vllm_config.cache_config.block_size
    prompts = random_prompts(4, 2 * block + 1, 2 * block + 60)
    assert min(map(len, prompts)) > 2 * block and max(map(len, prompts)) + 16 <= 384
    requests = [Request(p, 10 * i + k, 1.0, 16) for i, p in enumerate(prompts) for k in range(6)]
    cached, real_step = [], engine.engine.step

    def step():
        outputs = real_step()
        cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    monkeypatch.setattr(engine.engine, "step", step)
    tables = []
    for version in (0, 1):
        engine.sync(hf_tensors(policy), version)
        cached.clear()
        completions = engine.generate(requests, version)
        # Seats are taken in order: the first 8 requests are of two prompts, of the others only the first of a
        # prompt can miss the cache.
        assert sum(n >= 2 * block for n in cached) >= len(requests) - 8 - 2
        assert_routes_are_the_trainers(policy, requests, completions)
        tables.append(completions[0].routed_experts[: len(prompts[0])])
        move(policy)
    assert not torch.equal(tables[0], tables[1]), "other weights should route the same prompt otherwise"


def test_routes_of_requests_that_were_preempted(engine_of, monkeypatch):
    """13 blocks of 128 tokens for 8 seats whose sequences grow from one block into a second."""
    policy, engine = make_policy("moe"), engine_of("moe", kv_cache_gib=13 * 196608 / 2**30)
    engine.sync(hf_tensors(policy), 0)
    block = engine.engine.vllm_config.cache_config.block_size
    scheduler = engine.engine.engine_core.engine_core.scheduler
    preempted, preempt = [], scheduler._preempt_request
    spy = lambda request, *args, **kwargs: (preempted.append(request), preempt(request, *args, **kwargs))
    monkeypatch.setattr(scheduler, "_preempt_request", spy)
    requests = [Request(p, i, 1.0, 24) for i, p in enumerate(random_prompts(16, block - 12, block - 2))]
    with monkeypatch.context() as patch:
        patch.setattr(rollout.CacheRoom, "has_room_for", lambda self, index: True)
        completions = engine.generate(requests, 0)
    assert preempted, "the test needs a preemption"
    assert_routes_are_the_trainers(policy, requests, completions)
    preempted.clear()
    queued = engine.generate(requests, 0)
    assert not preempted, "there is room for six of them, two blocks each"
    assert [c.token_ids for c in queued] == [c.token_ids for c in completions]
    assert engine.num_blocks == 12  # vLLM keeps one
    assert "1,536 tokens, that is 4 completions of full length (384 tokens" in engine.describe()


def test_routes_are_captured_where_they_are_asked_for(engine_of):
    """Prefixes that were cached without routes are computed again when routes are asked for."""
    policy, engine = make_policy("moe"), engine_of("moe")
    engine.sync(hf_tensors(policy), 0)
    block = engine.engine.vllm_config.cache_config.block_size
    requests = [Request(p, i, 1.0, 12) for i, p in enumerate(random_prompts(8, block + 1, block + 60))]
    plain = engine.generate(requests, 0, capture_routes=False)
    assert [c.routed_experts for c in plain] == [None] * 8
    manager = engine.engine.engine_core.engine_core.scheduler.routed_experts_mgr
    before = manager.routed_experts_by_slot.copy()
    engine.generate([Request([5, 6, 7], 3, 1.0, 9)], 0, capture_routes=False)
    assert np.array_equal(before, manager.routed_experts_by_slot), "nothing should have been copied"
    for _ in range(2):
        again = engine.generate(requests, 0)
        assert [c.token_ids for c in again] == [c.token_ids for c in plain]
        assert_routes_are_the_trainers(policy, requests, again)


def test_capture_is_switched_in_both_of_vllms_model_runners():
    first = SimpleNamespace(routed_experts_initialized=True)
    second = SimpleNamespace(routed_experts_capturer="capturer")
    for on in (False, True, False, True):
        for runner in (first, second):
            vllm_worker.switch_capture_in_worker(SimpleNamespace(model_runner=runner), on)
        assert first.routed_experts_initialized is on
        assert second.routed_experts_capturer == ("capturer" if on else None)


def test_the_layer_axis_counts_dense_layers(engine_of):
    policy, engine = make_policy("mixed"), engine_of("mixed")
    engine.sync(hf_tensors(policy), 0)
    requests = [Request(p, i, 1.0, 12) for i, p in enumerate(random_prompts(24, 1, 30))]
    completions = engine.generate(requests, 0)
    assert completions[0].routed_experts.shape[1:] == (3, 2)
    assert all(not c.routed_experts[:, 0].any() for c in completions)  # dense: zeros, as in route_table()
    assert_routes_are_the_trainers(policy, requests, completions)


def test_replaying_the_engines_own_routes_changes_nothing_in_the_trainer(engine_of):
    policy, engine = make_policy("moe"), engine_of("moe")
    engine.sync(hf_tensors(policy), 0)
    requests = [Request(p, i, 1.0, 16) for i, p in enumerate(random_prompts(40, 1, 30))]
    completions = engine.generate(requests, 0)
    routes = torch.cat([c.routed_experts for c in completions])
    live, _ = trained(policy, requests, completions)
    replayed, used = trained(policy, requests, completions, replay_ids_TLK=routes)
    # The same experts; only the order in which a row's K products are added may differ: a few float32 ulps.
    assert torch.equal(used, routes) and (replayed - live).abs().max() < 1e-5
    others, _ = trained(policy, requests, completions, replay_ids_TLK=(routes + 1) % 8)
    assert (others - live).abs().max() > 1e-2, "the trainer should have used the given routes"


# ------------------------------------------------------------------------------------------------------------
# validate_routes
# ------------------------------------------------------------------------------------------------------------
def routes_config(num_layers, top_k, num_experts, dense=(), sparse_step=1):
    return SimpleNamespace(
        model_type="qwen3_moe", num_hidden_layers=num_layers, num_experts_per_tok=top_k,
        num_experts=num_experts, mlp_only_layers=list(dense), decoder_sparse_step=sparse_step,
    )  # fmt: skip


def moe_layers(config):
    return [
        layer for layer in range(config.num_hidden_layers)
        if layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    ]  # fmt: skip


def slow_routes(captured, num_rows, config):
    """Do what validate_routes() promises, row by row in Python lists."""
    top_k, num_experts = config.num_experts_per_tok, config.num_experts
    sentinel = [[255 if num_experts < 256 else 32767] * top_k] * config.num_hidden_layers
    result = []
    for ids, rows in zip(captured, num_rows):
        if ids is None or len(ids) != rows:
            result.append([sentinel] * rows)
            continue
        result.append([])
        for row in ids.tolist():
            valid = True
            for layer in moe_layers(config):
                valid = valid and len(set(row[layer])) == top_k and max(row[layer]) < num_experts
            result[-1].append(row if valid else sentinel)
    return result


def fuzzed_routes(rng, config, num_rows):
    """Draw mostly valid ids as vLLM lays them out, with every kind of fault; the arrays are read-only."""
    top_k, num_experts = config.num_experts_per_tok, config.num_experts
    dtype = np.uint8 if num_experts <= 256 else np.uint16
    sparse = moe_layers(config)
    captured = []
    for rows in num_rows:
        if rng.random() < 0.1:
            captured.append(None)
            continue
        rows = max(0, rows + rng.choice([0, 0, 0, 0, -1, 1, 5]))
        noise = rng.random((rows, config.num_hidden_layers, num_experts))
        ids = noise.argsort(-1)[..., :top_k].astype(dtype)
        dense = [layer for layer in range(config.num_hidden_layers) if layer not in sparse]
        ids[:, dense] = rng.integers(2)  # K times the same id, which is no fault there
        for t in range(rows):
            layer, fault = rng.choice(sparse), rng.random()
            if fault < 0.1:
                ids[t, layer, rng.integers(top_k)] = min(num_experts, np.iinfo(dtype).max)
            elif fault < 0.2:
                ids[t, layer, rng.integers(top_k)] = np.iinfo(dtype).max
            elif fault < 0.3:
                ids[t, layer, rng.integers(top_k)] = ids[t, layer, rng.integers(top_k)]
            elif fault < 0.35:
                ids[t, layer] = 0
        ids.setflags(write=False)
        captured.append(ids)
    return captured


@pytest.mark.parametrize("num_experts", [4, 8, 255, 256, 300])
def test_validate_routes_is_the_slow_loop(num_experts):
    rng = np.random.default_rng(num_experts)
    seen = Counter()
    for top_k in (1, 2, 3, 4):
        for dense, sparse_step in (((), 1), ((0,), 1), ((1, 2), 1), ((), 2)):
            config = routes_config(4, top_k, num_experts, dense, sparse_step)
            num_rows = rng.integers(1, 12, size=8).tolist()
            captured = fuzzed_routes(rng, config, num_rows)
            before = [None if ids is None else ids.copy() for ids in captured]
            expected = slow_routes(captured, num_rows, config)
            result = validate_routes(captured, num_rows, config)
            assert [ids.tolist() for ids in result] == expected
            dtype = torch.uint8 if num_experts < 256 else torch.int16
            assert all(ids.dtype == dtype and ids.is_contiguous() for ids in result)
            for ids, old in zip(captured, before):
                assert old is None or np.array_equal(ids, old)
            for rows in expected:
                seen.update(row[0][0] == invalid_route(num_experts) for row in rows)
    assert seen[True] > 100 and seen[False] > 100, "the fuzz needs valid and invalid rows"


def test_the_sentinel_is_no_experts_id_and_fits_the_dtype():
    for num_experts in range(1, 600):
        sentinel = invalid_route(num_experts)
        dtype = torch.uint8 if num_experts < 256 else torch.int16
        assert num_experts <= sentinel <= torch.iinfo(dtype).max
    rows = np.array([[[254, 255]], [[255, 0]]], dtype=np.uint8)  # 255 is an expert here
    assert validate_routes([rows], [2], routes_config(1, 2, 256))[0].tolist() == rows.tolist()


def test_routes_of_one_completion_do_not_carry_those_of_the_others():
    config = routes_config(2, 2, 8)
    captured = [np.tile(np.array([0, 1], dtype=np.uint8), (rows, 2, 1)) for rows in (3, 20_000, 3)]
    first, long, last = validate_routes(captured, [3, 20_000, 3], config)
    assert len(pickle.dumps(first)) < 2000 and len(pickle.dumps(last)) < 2000 < len(pickle.dumps(long))
    first[:] = 7
    assert captured[0].max() == 1 and long.max() == 1 and last.max() == 1
    del first, long, last
    tracemalloc.start()  # NumPy reports its arrays
    try:
        kept = validate_routes(captured, [3, 20_000, 3], config)[0]
        assert kept.shape == (3, 2, 2) and tracemalloc.get_traced_memory()[0] < 20_000 * 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("layers", "top_k"), [(3, 2), (1, 2), (2, 3), (2, 1)])
def test_another_number_of_layers_or_experts_per_token_is_an_error(layers, top_k):
    good, bad = (np.zeros((5, *shape), np.uint8) for shape in ((2, 2), (layers, top_k)))
    with pytest.raises(RuntimeError, match="capture_routes=off") as caught:
        validate_routes([None, good, bad], [5, 5, 5], routes_config(2, 2, 8))
    assert f"{layers} layers and {top_k} experts per token" in str(caught.value)
    assert "has 2 and 2" in str(caught.value)


def test_no_completions_have_no_routes():
    assert validate_routes([], [], routes_config(2, 2, 8)) == []


# ------------------------------------------------------------------------------------------------------------
# FP8
# ------------------------------------------------------------------------------------------------------------
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # all codes; two are NaN


def nearest_e4m3(values):
    """Return the nearest value of the list, of two equally near ones that with the even code; float64."""
    codes = E4M3[:127]  # 0 to 448, ascending
    distance = (values.abs().unsqueeze(-1) - codes).abs()
    near = distance == distance.min(-1, keepdim=True).values  # one code, or two neighbours
    even = torch.arange(127) % 2 == 0
    code = torch.where(near.sum(-1, keepdim=True) == 2, near & even, near).to(torch.uint8).argmax(-1)
    return codes[code].copysign(values)


def slow_fp8(weight):
    """Round block by block, from the bfloat16-rounded weight [M, N].

    w / s is taken as w (1 / s), and s as max |w| (1 / 448), all rounded to float32, as in vLLM on a GPU:
    bfloat16 has so few significant bits that about 1 % of all weights lie in the middle of two codes, and
    their rounding decides.
    """
    weight = weight.bfloat16().float()
    result = torch.empty_like(weight)
    for i in range(0, weight.shape[0], 128):
        for j in range(0, weight.shape[1], 128):
            block = weight[i : i + 128, j : j + 128]
            amax = np.float32(max(block.abs().max().item(), np.float32(1e-4)))
            scale = amax * (np.float32(1) / np.float32(448))
            scaled = block * (np.float32(1) / scale).item()
            result[i : i + 128, j : j + 128] = nearest_e4m3(scaled.double()) * scale.item()
    return result


def random_weight(shape, spread, seed=0):
    """Draw rows and columns of very different sizes, so that blocks have scales of their own; some zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * spread
    weight *= torch.logspace(0, 2, shape[-2]).unsqueeze(-1) * torch.logspace(0, -2, shape[-1])
    return weight * (torch.rand(shape, generator=generator) > 0.02)


@pytest.mark.parametrize(("shape", "spread"), [((130, 257), 0.02), ((20, 30), 3e-5), ((5, 7), 1e-9)])
def test_fp8_round_takes_the_nearest_code(shape, spread):
    weight = random_weight(shape, spread, seed=1)
    assert torch.equal(fp8_round(weight), slow_fp8(weight))


def test_fp8_round_sends_ties_to_the_even_code():
    codes = E4M3[:127]
    ties = (codes[1:] + codes[:-1]) / 2  # in bfloat16 without rounding; 448 in the block: the scale is 1
    block = torch.cat([ties, torch.tensor([448.0]), -ties, torch.zeros(3)]).float().reshape(16, 16)
    assert torch.equal(block.bfloat16().float(), block)
    even = codes[torch.arange(126) + torch.arange(126) % 2]
    expected = torch.cat([even, torch.tensor([448.0]), -even, torch.zeros(3)]).float().reshape(16, 16)
    for power in (0, -10, 40):  # scales that are powers of two: all arithmetic is exact
        assert torch.equal(fp8_round(block * 2.0**power), expected * 2.0**power)


@pytest.mark.parametrize("spread", [3e-5, 0.02, 1e6])
def test_fp8_round_errs_by_half_a_step_at_most(spread):
    weight = random_weight((256, 256), spread, seed=2).bfloat16().double()
    error = (fp8_round(weight.float()).double() - weight).abs()
    for i in (0, 128):
        for j in (0, 128):
            block, part = weight[i : i + 128, j : j + 128], error[i : i + 128, j : j + 128]
            scale = max(block.abs().max().item(), 1e-4) / 448
            # E4M3 has 3 bits after the leading one: half a step is 2^-4 of the largest power of two below a
            # normal value (>= 2^-6), and 2^-10 for smaller ones; 2^-20 is for the float32 arithmetic.
            half_step = 2**-4 * 2 ** (block.abs() / scale).clamp(min=2**-6).log2().floor() * scale
            assert (part <= half_step * (1 + 2**-20) + 2**-20 * block.abs()).all()
            assert part.max() > 0.2 * half_step.max(), "a rounding to more bits would pass too"


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # by code


def slow_mxfp4(weight):
    """Round 32 numbers of a row [N] after the other, each to the nearest code, ties to the even one."""
    result = []
    for start in range(0, len(weight), 32):
        block = weight[start : start + 32]
        largest = max(map(abs, block))
        scale = 2.0 ** (math.floor(math.log2(largest)) - 2) if largest else 1.0
        for value in block:
            size = min(abs(value) / scale, 6.0)
            code = min(range(8), key=lambda code: (abs(E2M1[code] - size), code % 2))
            result.append(math.copysign(E2M1[code] * scale, value))
    return result


@pytest.mark.parametrize("spread", [3e-5, 0.02, 1e6])
def test_mxfp4_round_takes_the_nearest_code_of_each_block(spread):
    weight = random_weight((5, 70), spread, seed=3)
    weight[0, :32] = torch.arange(32) * 0.25 - 4  # the scale is 1: ties between all codes
    weight[1, 32:64] = 0.0
    expected = torch.tensor([slow_mxfp4(row) for row in weight.tolist()])
    assert torch.equal(mxfp4_round(weight), expected)
    assert torch.equal(mxfp4_round(mxfp4_round(weight)), expected)
    assert len(expected[0, :32].unique()) == 15 - 2, "all codes but 6 and -6"


def test_fp8_round_of_its_own_result_changes_nothing():
    """True where the largest weight is not within bfloat16 rounding of the floor 1e-4: it becomes 448 s, and
    bfloat16 rounds that back; so the scale stays, and 2^-9 is too little to reach another code."""
    for shape, spread in (((130, 257), 0.02), ((3, 100, 130), 1e6), ((5, 7), 1e-9)):
        once = fp8_round(random_weight(shape, spread))
        assert once.abs().max() > 0 or spread == 1e-9
        assert torch.equal(fp8_round(once), once)


ROUNDED = (
    "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "mlp.gate_proj.weight",
    "mlp.up_proj.weight", "mlp.down_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
)  # fmt: skip


def rounded_by_hand(named):
    """Return {name: tensor} with linear layers and experts through slow_fp8(), fused as in vLLM."""
    result = dict(named)
    for name, tensor in list(result.items()):
        if tensor.dim() == 3:
            result[name] = torch.stack([slow_fp8(expert) for expert in tensor])
        elif name.endswith(("o_proj.weight", "mlp.down_proj.weight")):
            result[name] = slow_fp8(tensor)
        elif name.endswith(("q_proj.weight", "mlp.gate_proj.weight")):
            other = ("q", "k", "v") if "q_proj" in name else ("gate", "up")
            names = [name.replace(f"{other[0]}_proj", f"{x}_proj") for x in other]
            parts = [result[n] for n in names]
            fused = slow_fp8(torch.cat(parts))
            result.update(zip(names, fused.split([len(part) for part in parts])))
    return result


@pytest.mark.parametrize("kind", ["moe", "mixed", "dense"])
def test_simulate_rounding_rounds_the_linear_layers_and_experts_and_nothing_else(kind):
    policy = make_policy(kind)
    given = {name: tensor.clone() for name, tensor in hf_tensors(policy)}
    out = list(simulate_rounding(hf_tensors(policy)))
    assert Counter(name for name, _ in out) == Counter(given.keys())
    by_hand = rounded_by_hand(given)
    for name, tensor in out:
        if name.endswith(ROUNDED):
            assert not torch.equal(tensor, given[name])
            assert torch.equal(tensor, by_hand[name])
        else:
            assert torch.equal(tensor, given[name]) and tensor.dtype == given[name].dtype
    assert all(torch.equal(tensor, given[name]) for name, tensor in hf_tensors(policy))
    untouched = {name for name in given if not name.endswith(ROUNDED)}
    for part in {"moe": ["mlp.gate.weight"], "mixed": ["mlp.gate.weight", "q_proj.bias"], "dense": []}[kind]:
        assert any(name.endswith(part) for name in untouched)


def test_fused_projections_share_the_scales_of_their_blocks():
    """128 rows of queries, then keys and values of 64: those two share blocks."""
    given = dict(hf_tensors(make_policy("mixed")))
    prefix = "model.layers.1.self_attn."
    given[prefix + "k_proj.weight"] *= 10
    out = dict(simulate_rounding(given.items()))
    q, k, v = (prefix + f"{x}_proj.weight" for x in "qkv")
    together = fp8_round(torch.cat([given[q], given[k], given[v]])).split([128, 64, 64])
    assert all(torch.equal(out[name], part) for name, part in zip((q, k, v), together))
    assert torch.equal(out[q], fp8_round(given[q]))  # a block of its own
    assert not torch.equal(out[v], fp8_round(given[v])), "values get the coarser scale of the keys"


def test_experts_of_a_width_that_is_no_multiple_of_128_are_rounded_as_vllm_does():
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineMoEMethod

    width, hidden = 64, 96
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
        full = slow_fp8(expert)
        expected.append(torch.cat([full[:width, :hidden], full[padded_width:][:width, :hidden]]))
    ((_, rounded),) = simulate_rounding([("model.layers.0.mlp.experts.gate_up_proj", experts)])
    assert torch.equal(rounded, torch.stack(expected))


@pytest.mark.parametrize("missing", ["layers.1.self_attn.k_proj.weight", "layers.0.mlp.up_proj.weight"])
def test_simulate_rounding_of_an_incomplete_stream_is_an_error(missing):
    policy = make_policy("mixed")
    named = [(name, tensor) for name, tensor in hf_tensors(policy) if not name.endswith(missing)]
    partner = "model." + missing.replace("k_proj", "q_proj").replace("up_proj", "gate_proj")
    with pytest.raises(ValueError, match="no partner of") as caught:
        list(simulate_rounding(named))
    assert partner in str(caught.value) and "experts" not in str(caught.value)


def test_an_engine_holds_the_format_that_the_settings_name(engine_of):
    policy, engine = make_policy("moe"), engine_of("moe", fp8="simulate", simulate_format="mxfp4")
    sent = [(name, tensor.clone()) for name, tensor in hf_tensors(policy)]
    engine.sync(sent, 0)
    engine.check_weights(sent)
    engine.settings = engine.settings.model_copy(update={"fp8": "off"})
    engine.check_weights(list(simulate_rounding(sent, mxfp4_round)))
    assert_check_fails(engine, list(simulate_rounding(sent)), count=None)
    engine.settings = engine.settings.model_copy(update={"fp8": "simulate"})


def test_an_engine_with_simulated_fp8_computes_with_the_rounded_weights(engine_of):
    policy, engine = make_policy("mixed"), engine_of("mixed", fp8="simulate")
    engine.sync(hf_tensors(policy), 0)
    requests = [Request(p, i, 1.0, 12) for i, p in enumerate(random_prompts(24, 1, 30))]
    completions = engine.generate(requests, 0)
    unrounded, _ = trained(policy, requests, completions)
    by_hand = rounded_by_hand((name, tensor.clone()) for name, tensor in hf_tensors(policy))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(by_hand[name])
    rounded, _ = trained(policy, requests, completions)
    engines = sampled_logprobs(completions)
    assert (engines - rounded).abs().max() < 1e-4  # float32 rounding through three layers; measured 1e-5
    assert (engines - unrounded).abs().mean() > 1e-2
    assert_routes_are_the_trainers(policy, requests, completions)


@pytest.mark.parametrize("kind", ["moe", "mixed"])
def test_vllm_would_quantise_exactly_what_the_simulation_rounds(kind, engine_of):
    """Its own choice for every module of a real model, under the configuration that fp8 "on" passes."""
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.online import base, fp8

    def chosen(settings):
        config = base.OnlineQuantizationConfig(resolve_quantization_config("fp8_per_block", settings))
        (model,) = engine_of(kind).llm.collective_rpc(lambda worker: worker.model_runner.get_model())
        config.packed_modules_mapping = model.packed_modules_mapping
        methods = {}
        for name, module in model.named_modules():
            prefix = getattr(module, "prefix" if isinstance(module, LinearBase) else "layer_name", name)
            resolved = config.resolve_quant_method_cls(module, prefix)
            if resolved is not None:
                experts = isinstance(module, RoutedExperts)
                assert resolved[-1] == (
                    fp8.Fp8PerBlockOnlineMoEMethod if experts else fp8.Fp8PerBlockOnlineLinearMethod
                )
                leaves = ("w13_weight", "w2_weight") if experts else ("weight",)
                methods |= {vllm_worker.plain_name(f"{name}.{leaf}"): prefix for leaf in leaves}
        return methods

    policy = make_policy(kind)
    given = dict(hf_tensors(policy))
    out = simulate_rounding(hf_tensors(policy))
    changed = {engine_name(name) for name, tensor in out if not torch.equal(tensor, given[name])}
    quantised = chosen(rollout.FP8_QUANTIZATION)
    assert set(quantised) == changed
    assert "model.layers.1.self_attn.qkv_proj" in quantised.values()
    assert set(chosen(None)) - set(quantised) == {
        engine_name(name) for name in given if name.endswith("mlp.gate.weight")
    }, "without the setting vLLM quantises the router too: the setting is needed, and does no more"


# ------------------------------------------------------------------------------------------------------------
# check_weights
# ------------------------------------------------------------------------------------------------------------
def in_engine(engine, function):
    """Run function(vLLM's model) in its worker."""
    (result,) = engine.llm.collective_rpc(lambda worker: function(worker.model_runner.get_model()))
    return result


def by_ulps(tensor, steps: dict[int, int]):
    """Copy a tensor with some elements, by flat index, moved by so many units in the last place."""
    moved = tensor.contiguous().clone()
    bits = moved.view(-1).view({2: torch.int16, 4: torch.int32}[moved.dtype.itemsize])
    for index, count in steps.items():
        assert moved.view(-1)[index] != 0
        bits[index] += count
    return moved


def tamper(engine, name: str, steps: dict[int, int]) -> None:
    """Change what the engine computes with: in place or, where the CPU backend packs it, by a new product."""

    def change(model):
        path, leaf = name.rsplit(".", 1)
        module = model.get_submodule(path)
        if leaf == "weight" and hasattr(module, "cpu_linear") and "embed" not in name:
            width = module.embedding_dim if name == "lm_head.weight" else module.input_size
            dtype = next(model.parameters()).dtype
            held = module.cpu_linear(torch.eye(width, dtype=dtype), module.weight, None).T
            moved = by_ulps(held, steps)
            module.cpu_linear = lambda x, weight, bias: F.linear(x, moved, bias)
        else:
            parameter = getattr(module, leaf)
            parameter.data.copy_(by_ulps(parameter.data, steps))

    in_engine(engine, change)


def assert_check_fails(engine, named, *parts, count=1):
    """Assert that check_weights() names what differs, and that the engine then refuses to sample."""
    version = engine.policy_version
    assert version is not None
    with pytest.raises(RuntimeError, match="holds other values than the policy's") as caught:
        engine.check_weights(named)
    message = str(caught.value)
    assert count is None or f"in {count} parameters" in message
    for part in parts:
        assert part in message
    with pytest.raises(RuntimeError, match="sync was skipped"):
        engine.generate([Request([5], 0, 1.0, 2)], version)


DTYPES = ("float32", "bfloat16")
ENGINES = [(kind, dtype, "off") for kind in ("moe", "mixed", "dense", "dense_tied") for dtype in DTYPES]
ENGINES += [("moe", "float32", "simulate"), ("mixed", "bfloat16", "simulate")]


@pytest.mark.parametrize(("kind", "dtype", "fp8"), ENGINES)
def test_weights_are_found_right_after_a_sync(kind, dtype, fp8, engine_of):
    policy, engine = make_policy(kind), engine_of(kind, dtype, fp8)
    for version in (0, 1):
        engine.sync(hf_tensors(policy), version)
        engine.check_weights(hf_tensors(policy))
        assert engine.policy_version == version
        move(policy)
    with pytest.raises(RuntimeError, match="other values"):  # of the policy before the move
        engine.check_weights(hf_tensors(policy))
    half = policy.bfloat16()
    engine.sync(hf_tensors(half), 2)
    engine.check_weights(hf_tensors(half))
    assert len(engine.generate([Request([5, 6], 0, 1.0, 3)], 2)) == 1


HELD = [
    ("moe", "model.layers.1.mlp.experts.routed_experts.w13_weight"),
    ("moe", "model.layers.2.mlp.experts.routed_experts.w2_weight"),
    ("moe", "model.layers.0.mlp.gate.weight"),
    ("moe", "model.layers.2.self_attn.qkv_proj.weight"),
    ("moe", "model.layers.1.self_attn.o_proj.weight"),
    ("moe", "model.layers.1.self_attn.q_norm.weight"),
    ("moe", "model.layers.2.post_attention_layernorm.weight"),
    ("moe", "model.norm.weight"),
    ("moe", "lm_head.weight"),
    ("moe", "model.embed_tokens.weight"),
    ("mixed", "lm_head.weight"),
    ("mixed", "model.embed_tokens.weight"),
    ("mixed", "model.layers.0.mlp.gate_up_proj.weight"),
    ("mixed", "model.layers.0.mlp.down_proj.weight"),
    ("mixed", "model.layers.2.self_attn.qkv_proj.bias"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "name"), HELD)
def test_one_element_moved_by_one_ulp_in_the_engine_is_found(kind, name, dtype, engine_of):
    policy, engine = make_policy(kind), engine_of(kind, dtype)
    engine.sync(hf_tensors(policy), 0)
    tamper(engine, name, {17: 1})
    count = None if "embed" in name else 1  # a tied head may count too
    assert_check_fails(engine, hf_tensors(policy), vllm_worker.plain_name(name) + " (from ", count=count)
    engine.sync(hf_tensors(policy), 1)
    engine.check_weights(hf_tensors(policy))


SENT = [
    ("moe", "model.layers.1.mlp.experts.gate_up_proj", 1),
    ("moe", "model.layers.0.mlp.experts.down_proj", 1),
    ("moe", "model.layers.2.mlp.gate.weight", 1),
    ("moe", "model.layers.0.self_attn.q_proj.weight", 1),
    ("moe", "model.layers.1.self_attn.v_proj.weight", 1),
    ("moe", "model.layers.1.self_attn.k_norm.weight", 1),
    ("moe", "model.embed_tokens.weight", 2),  # and the head, which is tied to it
    ("mixed", "model.embed_tokens.weight", 1),
    ("mixed", "lm_head.weight", 1),
    ("mixed", "model.layers.1.self_attn.k_proj.bias", 1),
    ("mixed", "model.layers.0.mlp.up_proj.weight", 1),
]


def with_one_changed(policy, name, change):
    return [(n, change(tensor) if n == name else tensor) for n, tensor in hf_tensors(policy)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "name", "count"), SENT)
def test_one_element_moved_by_one_ulp_in_the_policy_is_found(kind, name, count, dtype, engine_of):
    policy, engine = make_policy(kind), engine_of(kind, dtype)
    engine.sync(hf_tensors(policy), 0)
    change = lambda tensor: by_ulps(tensor.to(getattr(torch, dtype)), {20: -1}).float()
    assert_check_fails(engine, with_one_changed(policy, name, change), engine_name(name), name, count=count)


def test_a_parameter_that_nothing_was_sent_into_is_found(engine_of):
    policy, engine = make_policy("moe"), engine_of("moe")
    engine.sync(hf_tensors(policy), 0)
    name = "model.layers.1.self_attn.q_norm.weight"
    others = [(n, tensor) for n, tensor in hf_tensors(policy) if n != name]
    assert_check_fails(engine, others, f"{name} (from nothing)")


def test_changes_that_cancel_in_a_sum_are_found(engine_of):
    policy, engine = make_policy("moe"), engine_of("moe")
    name = "model.layers.1.mlp.experts.down_proj"
    weight = dict(hf_tensors(policy))[name].flatten()
    bits = weight.view(torch.int32)
    large, small = weight.argmax().item(), weight.abs().argmin().item()
    assert bits[large] - bits[small] > 1000
    engine.sync(hf_tensors(policy), 0)
    change = lambda tensor: by_ulps(tensor, {large: 1, small: -1})  # the sum of the bits stays
    assert_check_fails(engine, with_one_changed(policy, name, change), name)

    def exchange(tensor):  # the sum of the values stays
        moved = tensor.clone()
        first, second = moved.flatten()[:2].tolist()
        moved.view(-1)[:2] = torch.tensor([first + 0.5, second - 0.5])
        return moved

    engine.sync(hf_tensors(policy), 1)
    assert_check_fails(engine, with_one_changed(policy, name, exchange), name)
    engine.sync(hf_tensors(policy), 2)
    tamper(engine, "model.layers.1.mlp.experts.routed_experts.w2_weight", {0: 3, 1: -3})
    assert_check_fails(engine, hf_tensors(policy), name)


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
    tensor.view(integers)[7, 7] += 1  # one ulp
    assert not torch.equal(vllm_worker.checksum(tensor, dtype), checksum)


def test_fp8_simulation_is_checked_against_the_rounded_weights(engine_of, monkeypatch):
    policy, engine = make_policy("moe"), engine_of("moe", fp8="simulate")
    engine.sync(hf_tensors(policy), 0)
    name = "model.layers.1.self_attn.k_proj.weight"
    assert_check_fails(engine, with_one_changed(policy, name, lambda tensor: tensor * 1.5), name)
    engine.sync(hf_tensors(policy), 1)
    monkeypatch.setattr(engine, "settings", engine.settings.model_copy(update={"fp8": "off"}))
    # 3 layers of qkv_proj, o_proj, w13 and w2
    assert_check_fails(engine, hf_tensors(policy), "model.layers.0.self_attn.qkv_proj.weight", count=12)


# ------------------------------------------------------------------------------------------------------------
# Syncs that go wrong without an error
# ------------------------------------------------------------------------------------------------------------
def test_a_sync_that_does_nothing_is_found(engine_of, monkeypatch):
    policy, engine = make_policy("moe"), engine_of("moe")
    engine.sync(hf_tensors(policy), 0)
    move(policy)
    monkeypatch.setattr(rollout, "load_weights_in_worker", lambda worker, named, on_cpu: [])
    engine.sync(hf_tensors(policy), 1)
    held = 2 + 1 + 3 * 9  # embedding and head, last norm; per layer 4 norms, qkv, o, router, w13, w2
    assert_check_fails(engine, hf_tensors(policy), "model.embed_tokens.weight", count=held)


def test_a_sync_that_leaves_a_layer_behind_is_found(engine_of, monkeypatch):
    policy, engine = make_policy("mixed"), engine_of("mixed")
    engine.sync(hf_tensors(policy), 0)
    load = vllm_worker.load_weights_in_worker

    def partial(worker, named, on_cpu):
        kept = ((name, tensor) for name, tensor in named if ".layers.1." not in name)
        assert load(worker, kept, on_cpu), "without the lie the sync itself would have found it"
        return []

    monkeypatch.setattr(rollout, "load_weights_in_worker", partial)
    move(policy)
    engine.sync(hf_tensors(policy), 1)
    # 4 norms, qkv with its bias, o, router, w13, w2; nothing of other layers
    assert_check_fails(engine, hf_tensors(policy), "model.layers.1.", count=10)
    monkeypatch.undo()
    engine.sync(hf_tensors(policy), 2)
    engine.check_weights(hf_tensors(policy))


def test_a_tied_head_with_a_packed_copy_of_the_old_embedding_is_found(engine_of, monkeypatch):
    policy, engine = make_policy("moe"), engine_of("moe")
    engine.sync(hf_tensors(policy), 0)
    repack = vllm_worker.repack_for_cpu_kernels

    def without_head(model, packed):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.config, "tie_word_embeddings", False)
            repack(model, packed)

    monkeypatch.setattr(vllm_worker, "repack_for_cpu_kernels", without_head)
    move(policy)
    engine.sync(hf_tensors(policy), 1)
    assert_check_fails(engine, hf_tensors(policy), "lm_head.weight (from model.embed_tokens.weight)")


def test_a_tensor_that_has_no_place_in_the_engine_is_an_error(engine_of):
    """The attention of vLLM's Qwen3 has no bias after o_proj, that of transformers and of Policy has one."""
    policy, engine = make_policy("mixed"), engine_of("mixed")
    with torch.no_grad():
        policy.model.layers[1].self_attn.o_proj.bias.fill_(1.0)
    with pytest.raises(RuntimeError, match="o_proj.bias"):
        engine.sync(hf_tensors(policy), 0)
        engine.check_weights(hf_tensors(policy))


# ------------------------------------------------------------------------------------------------------------
# Engines for GPUs, as far as a CPU can show them
# ------------------------------------------------------------------------------------------------------------
def test_a_float32_head_brings_a_bfloat16_engine_nearer_to_the_trainer(engine_of, monkeypatch):
    """Logits of 16 to 32 have steps of 1/8 in bfloat16; the trainer sums them in float32.

    The layers change little, so that what is left of the difference is the head's and the last norm's.
    """
    policy, options, found = make_policy("dense"), rollout.engine_options, {}
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.mul_(0.01 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
        policy.lm_head.weight.mul_(4)
    policy.bfloat16()
    requests = [Request(p, i, 1.0, 12) for i, p in enumerate(random_prompts(96, 1, 30))]
    for dtype in ("model", "float32"):
        overrides = {"hf_overrides": {"head_dtype": dtype}}
        with monkeypatch.context() as patch:
            with_head = lambda *given, more=overrides: options(*given) | more
            patch.setattr(rollout, "engine_options", with_head)
            seats = {"model": 7, "float32": 6}[dtype]  # engine_of() remembers engines by their settings
            engine = engine_of("dense", "bfloat16", max_num_seqs=seats)
        engine.sync(hf_tensors(policy), 0)
        completions = engine.generate(requests, 0)
        logprobs, _ = trained(policy, requests, completions)
        found[dtype] = (logprobs - sampled_logprobs(completions)).abs().mean()
        assert f"to {'bfloat16' if dtype == 'model' else 'float32'}" in engine.describe()
    assert found["float32"] < 0.95 * found["model"]  # measured 0.018 and 0.022 nats


def test_options_of_an_engine_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = rollout.engine_options("folder", 100, RolloutSettings(sleep_level=2), 7200.5)
    assert found["hf_overrides"] == {"head_dtype": "float32"} and found["enable_sleep_mode"]
    assert not found["enforce_eager"] and found["block_size"] == 64
    assert found["distributed_timeout_seconds"] == found["cpu_distributed_timeout_seconds"] == 7201
    eager = rollout.engine_options("folder", 100, RolloutSettings(enforce_eager=True, dtype="float32"))
    assert (
        eager["enforce_eager"] and "hf_overrides" not in eager and "distributed_timeout_seconds" not in eager
    )


QWEN3_30B = Qwen3MoeConfig(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
    num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
    num_experts_per_tok=8, norm_topk_prob=True, tie_word_embeddings=False,
)  # fmt: skip
GIB = 2**30


@pytest.mark.parametrize(
    ("settings", "trainer_gib", "expected"),
    [
        ({}, 0, 0.92),  # vLLM's own share
        ({"tensor_parallel": 8, "sleep_level": 2}, 75.5, (138.5 - 75.5) / 139.7),
        ({"tensor_parallel": 2, "fp8": "on", "sleep_level": 2}, 75.5, (138.5 - 75.5) / 139.7),
        ({"sleep_level": 2}, 80, "rollout.tensor_parallel=2 rollout.fp8=off"),
        ({"sleep_level": 0}, 130, "too small: of 140 GiB 138 are free, the trainer takes 130"),
        ({"sleep_level": 0}, 130, "try rollout.sleep_level=2, or"),
        ({"sleep_level": 2}, 130, "try more GPUs, a shorter rollout.max_new_tokens or a smaller model"),
    ],
)
def test_the_engines_share_is_what_the_trainer_leaves(settings, trainer_gib, expected, monkeypatch):
    """Qwen3-30B-A3B on eight GPUs of 139.7 GiB."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    arguments = (QWEN3_30B, RolloutSettings(**settings), 17408, int(trainer_gib * GIB))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match="this GPU is too small") as caught:
            rollout.memory_share(*arguments, int(138.5 * GIB), int(139.7 * GIB))
        assert expected in str(caught.value) and "rollout.kv_cache_gib" in str(caught.value)
    else:
        share = rollout.memory_share(*arguments, int(138.5 * GIB), int(139.7 * GIB))
        assert share == pytest.approx(expected, rel=1e-6)


def test_an_engine_sleeps_as_soon_as_it_is_built(engine_of, monkeypatch):
    """The GPU of this test is made up: vLLM is told to sleep before anything else is asked of it."""
    calls = []
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(), get_tokenizer=build_tokenizer, sleep=lambda level: calls.append(level)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(rollout, "start_vllm", lambda options, captures: calls.append(options) or llm)
    folder = engine_of("moe").llm.model_config.model
    first = RolloutEngine(folder, 64, RolloutSettings(sleep_level=2), trainer_bytes=30 * GIB)
    options, level = calls
    assert level == 2 and options["gpu_memory_utilization"] == pytest.approx(0.5)
    with pytest.raises(ValueError, match="frees memory that the first one's CUDA graphs use.*enforce_eager"):
        rollout.refuse_beside_graphs_of_experts()
    del first
    second = RolloutEngine(folder, 64, RolloutSettings(enforce_eager=True, kv_cache_gib=1))
    assert calls[-1]["kv_cache_memory_bytes"] == GIB and calls[-1]["gpu_memory_utilization"] == 0.05
    assert second.settings.enforce_eager and rollout.refuse_beside_graphs_of_experts() is None


def test_keys_and_values_wake_up_after_the_check_of_the_weights(monkeypatch):
    """A check gathers experts again; an engine whose memory cannot be had says which setting helps."""
    calls = []
    answers = {"load_weights_in_worker": [[]], "compare_weights_in_worker": [[]]}
    llm = SimpleNamespace(
        wake_up=lambda tags: calls.append(*tags),
        collective_rpc=lambda work, args: calls.append(work.__name__) or answers[work.__name__],
        reset_prefix_cache=lambda: calls.append("prefixes") or True,
    )
    engine = object.__new__(RolloutEngine)
    engine.settings, engine.llm, engine.on_gpu = RolloutSettings(sleep_level=2), llm, False
    engine.num_experts = 8
    engine.sync([], 3, [])
    expected = ["weights", "load_weights_in_worker", "prefixes", "compare_weights_in_worker", "kv_cache"]
    assert (calls, engine.policy_version) == (expected, 3)
    calls.clear()
    engine.sync([], 4)
    assert (calls, engine.policy_version) == ([*expected[:3], "kv_cache"], 4)
    calls.clear()
    answers["compare_weights_in_worker"] = [["norm.weight"]]
    with pytest.raises(RuntimeError, match="holds other values.*norm.weight"):
        engine.sync([], 5, [])
    assert engine.policy_version is None
    llm.wake_up = lambda tags: 1 / 0
    with pytest.raises(RuntimeError, match="memory of its weights.*set rollout.kv_cache_gib"):
        engine.sync([], 6)
    assert engine.policy_version is None


def test_fp8_is_the_one_that_is_simulated(monkeypatch):
    settings = lambda **options: RolloutSettings(fp8="on", **options)
    for size, whole_experts in ((1, False), (2, False), (3, False), (8, True)):
        rollout.check_fp8(settings(tensor_parallel=size, expert_parallel=whole_experts), QWEN3_30B)
    for size in (4, 8):
        with pytest.raises(ValueError, match="no whole blocks of 128.*expert_parallel=true.*the 6 blocks"):
            rollout.check_fp8(settings(tensor_parallel=size), QWEN3_30B)
    assert rollout.check_fp8(RolloutSettings(tensor_parallel=4), QWEN3_30B) is None
    monkeypatch.delenv("VLLM_USE_DEEP_GEMM_E8M0", raising=False)
    rollout.set_vllm_environment(on_gpu=True)
    import vllm.envs

    assert vllm.envs.VLLM_USE_DEEP_GEMM_E8M0 is False
    monkeypatch.setattr("vllm.utils.deep_gemm.is_deep_gemm_e8m0_used", lambda: True)
    with pytest.raises(ValueError, match="VLLM_USE_DEEP_GEMM_E8M0 is on"):
        rollout.check_fp8(settings(), QWEN3_30B)


def test_a_driver_that_torch_cannot_use_is_an_error_of_one_line(monkeypatch):
    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nMore.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.setattr(rollout.Path, "exists", lambda path: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert rollout.check_driver() is None, "the GPU is hidden on purpose"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ValueError, match=r"built for CUDA 13.0, cannot use: .* too old .*11040\)\. Install"):
        rollout.check_driver()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert rollout.check_driver() is None


# ------------------------------------------------------------------------------------------------------------
# What is refused
# ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ({"fp8": "on"}, ("rollout.fp8", "simulate", "off")),
        ({"kv_cache_fp8": True}, ("rollout.kv_cache_fp8", "to false")),
    ],
)
def test_fp8_without_its_hardware_is_refused(option, parts, engine_of, monkeypatch):
    setting = {"fp8": "off", "kv_cache_fp8": False} | option
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="a CPU") as caught:
        engine_of("moe", **option)
    assert all(part in str(caught.value) for part in parts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(ValueError, match="8.9 or later, this is an old GPU") as caught:
        rollout.check_hardware(RolloutSettings(**setting))
    assert all(part in str(caught.value) for part in parts)
    for capability in ((8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert rollout.check_hardware(RolloutSettings(sleep_level=2, **setting)) is None


def test_a_vllm_without_routed_experts_is_refused(engine_of, monkeypatch):
    import vllm

    fields = rollout.dataclasses.fields
    without = lambda cls: tuple(f for f in fields(cls) if f.name != "enable_return_routed_experts")
    with monkeypatch.context() as patch:
        patch.setattr(rollout.dataclasses, "fields", without)
        with pytest.raises(ValueError, match="rollout.capture_routes=off"):
            engine_of("moe", prefix_caching=False)

    def failing(message):
        def make(**options):
            raise NotImplementedError(message)

        return make

    monkeypatch.setattr(vllm, "LLM", failing("Routed-experts capture is not supported with router X"))
    with pytest.raises(ValueError, match="router X.*rollout.capture_routes=off"):
        engine_of("moe", prefix_caching=False)
    with pytest.raises(NotImplementedError, match="router X"):  # capture was not asked for: not the reason
        engine_of("moe", prefix_caching=False, capture_routes="off")
    monkeypatch.setattr(vllm, "LLM", failing("no such file"))
    with pytest.raises(NotImplementedError, match="no such file"):
        engine_of("moe", prefix_caching=False)


@pytest.mark.parametrize("kind", ["dense", "dense_tied"])
def test_a_dense_model_has_no_routes_to_capture(kind, engine_of):
    policy, engine = make_policy(kind), engine_of(kind)
    assert engine.captures_routes is False
    engine.sync(hf_tensors(policy), 0)
    requests = [Request(p, i, 1.0, 8) for i, p in enumerate(random_prompts(6, 2, 20))]
    completions = engine.generate(requests, 0)
    assert [c.routed_experts for c in completions] == [None] * 6
    logprobs, table = trained(policy, requests, completions)
    assert table is None
    assert (logprobs - sampled_logprobs(completions)).abs().max() < 1e-4  # float32 through three layers


class Fp8LinearStandIn(torch.nn.Module):
    """What vLLM's FP8 leaves of a linear layer on a GPU: codes, and scales that it has made a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = torch.nn.Parameter(torch.ones(1, 1), requires_grad=False)


class Fp8ModelStandIn(torch.nn.Module):
    """An engine's model on a GPU with FP8: load_weights() returns the names that it was given."""

    def __init__(self):
        super().__init__()
        self.o_proj, self.norm = Fp8LinearStandIn(), torch.nn.RMSNorm(4)
        self.config = SimpleNamespace(tie_word_embeddings=False)

    def load_weights(self, named_tensors):
        return {name for name, _ in named_tensors}


def fp8_worker_stand_in():
    model = Fp8ModelStandIn()
    runner = SimpleNamespace(get_model=lambda: model, model_config=SimpleNamespace(dtype=torch.float32))
    parallel = SimpleNamespace(tensor_parallel_size=1)
    return SimpleNamespace(model_runner=runner, parallel_config=parallel, vllm_config=None), model


def test_scales_that_vllm_makes_itself_are_not_missed_in_a_sync(monkeypatch):
    import vllm.config
    from vllm.model_executor.model_loader import reload

    monkeypatch.setattr(reload, "initialize_layerwise_reload", lambda model: None)
    monkeypatch.setattr(reload, "finalize_layerwise_reload", lambda model, config: None)
    monkeypatch.setattr(vllm.config, "set_current_vllm_config", lambda config: contextlib.nullcontext())
    sent = [("o_proj.weight", torch.ones(4, 4)), ("norm.weight", torch.ones(4))]
    worker, _ = fp8_worker_stand_in()
    assert vllm_worker.load_weights_in_worker(worker, sent, on_cpu=False) == []
    worker, _ = fp8_worker_stand_in()
    assert vllm_worker.load_weights_in_worker(worker, sent[1:], on_cpu=False) == ["o_proj.weight"]


def test_checksums_leave_out_what_vllm_quantises_and_only_that():
    worker, model = fp8_worker_stand_in()
    sent = [("o_proj.weight", torch.ones(4, 4)), ("norm.weight", torch.ones(4))]
    assert vllm_worker.compare_weights_in_worker(worker, sent) == []
    model.norm.weight.data[2] = 2
    assert vllm_worker.compare_weights_in_worker(worker, sent) == ["norm.weight (from norm.weight)"]
