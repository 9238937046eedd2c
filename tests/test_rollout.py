"""Test rollout.py with a real vLLM engine on this CPU, against the trainer's policy and transformers."""

import json
import re

import pytest
import torch

from data.tiny import Recipe, build_policy, build_tokenizer, problem
from moe_model import hf_tensors, pack, save_hf
from rollout import Request, RolloutEngine, RolloutSettings, set_vllm_environment, stops_of
from tests import preloaded

pytestmark = pytest.mark.slow
PROMPTS = [
    problem(a, b, 3, 5)["prompt"] for a, b in ((1, 2), (123, 456), (999, 1), (507, 893), (40, 4), (77, 700))
]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """Save a tiny random MoE in Hugging Face format: two layers, eight experts, tied head."""
    folder = tmp_path_factory.mktemp("model")
    save_hf(build_policy(Recipe(initializer_range=0.2), len(tokenizer)), folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policy(folder, tokenizer):
    return build_policy(Recipe(initializer_range=0.2), len(tokenizer))


def make_engine(folder, dtype, **settings):
    settings = RolloutSettings(max_num_seqs=64, dtype=dtype, kv_cache_gib=0.25, **settings)
    return RolloutEngine(folder, 64, settings)


@pytest.fixture(scope="module")
def engine(folder):
    return make_engine(folder, "float32")


def requests_for(tokenizer, temperature=1.0, per_prompt=4, max_new_tokens=12):
    ids = tokenizer(PROMPTS)["input_ids"]
    return [
        Request(p, 1000 * i + k, temperature, max_new_tokens)
        for i, p in enumerate(ids)
        for k in range(per_prompt)
    ]


def dlogp(policy, requests, completions) -> torch.Tensor:
    """Return |log-probability by the policy - by the engine| of every sampled token."""
    packed = pack([r.prompt_ids for r in requests], [c.token_ids for c in completions], "cpu")
    with torch.no_grad():
        logprobs, _, _ = policy(packed, temperature=requests[0].temperature)
    return (logprobs - torch.tensor([x for c in completions for x in c.logprobs])).abs()


def change(policy, part: str, seed: int = 0) -> None:
    """Move one kind of parameter far enough that an engine with the old one is off by much more than
    rounding."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if part in name:
                parameter.add_(
                    torch.randn(parameter.shape, generator=generator) * parameter.std().clamp(min=0.3)
                )


def test_export_and_sync_give_the_text_that_transformers_gives(folder, policy, engine, tokenizer):
    from transformers import Qwen3MoeForCausalLM
    from vllm import LLM, SamplingParams

    reference = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(PROMPTS)["input_ids"]
    expected = []
    for prompt in ids:
        out = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        expected.append(out[0, len(prompt) :].tolist())
    set_vllm_environment(on_gpu=False)
    from_disk = LLM(
        str(folder), dtype="float32", max_model_len=64, enforce_eager=True, kv_cache_memory_bytes=2**28,
        use_tqdm_on_load=False,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=12)
    outputs = from_disk.generate([{"prompt_token_ids": p} for p in ids], greedy, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == expected
    engine.sync(hf_tensors(policy), 0)
    completions = engine.generate(requests_for(tokenizer, temperature=0.0, per_prompt=1), 0)
    assert [c.token_ids for c in completions] == expected


@pytest.mark.parametrize(
    "part", ["experts.down_proj", "experts.gate_up_proj", "gate.weight", "embed", "q_proj", "norm"]
)
def test_sync_carries_every_kind_of_parameter(part, policy, engine, tokenizer):
    engine.sync(hf_tensors(policy), 1)
    requests = requests_for(tokenizer)
    change(policy, part)
    stale = dlogp(policy, requests, engine.generate(requests, 1))
    assert stale.max() > 1e-2, "the change is too small to tell a stale engine from a fresh one"
    for version in (2, 3):  # a second sync of the same weights must not drift
        engine.sync(hf_tensors(policy), version)
        fresh = dlogp(policy, requests, engine.generate(requests, version))
        assert fresh.max() < 1e-4  # float32 rounding through two layers; measured 1e-5


def test_logprobs_are_those_of_the_sampling_temperature(policy, engine, tokenizer):
    engine.sync(hf_tensors(policy), 4)
    requests = requests_for(tokenizer, temperature=0.7)
    assert dlogp(policy, requests, engine.generate(requests, 4)).max() < 1e-4


def test_a_bfloat16_engine_stays_near_the_float32_policy(folder, tokenizer):
    policy = build_policy(Recipe(), len(tokenizer))
    engine = make_engine(folder, "bfloat16")
    engine.sync(hf_tensors(policy), 0)
    requests = requests_for(tokenizer)
    difference = dlogp(policy, requests, engine.generate(requests, 0))
    assert 0 < difference.mean() < 0.05


def test_a_sample_depends_on_its_seed_and_not_on_the_batch(policy, engine, tokenizer):
    engine.sync(hf_tensors(policy), 5)
    requests = requests_for(tokenizer)
    together = engine.generate(requests, 5)
    reversed_order = engine.generate(requests[::-1], 5)[::-1]
    alone = [engine.generate([request], 5)[0] for request in requests[:4]]
    assert [c.token_ids for c in together] == [c.token_ids for c in reversed_order]
    assert [c.token_ids for c in together[:4]] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in together[:4]}) > 1, "siblings with different seeds should differ"


def test_completions_end_at_eos_or_at_the_limit_and_are_reported_as_they_end(policy, engine, tokenizer):
    engine.sync(hf_tensors(policy), 6)
    requests = requests_for(tokenizer, per_prompt=10, max_new_tokens=40)
    order = []
    completions = engine.generate(
        requests, 6, lambda index, completion: order.append((index, len(completion.token_ids)))
    )
    assert sorted(index for index, _ in order) == list(range(len(requests)))
    assert [length for _, length in order] == sorted(length for _, length in order), "the shortest ends first"
    reasons = {c.finish_reason for c in completions}
    assert reasons == {"stop", "length"}, "the test needs both kinds"
    for completion in completions:
        assert len(completion.logprobs) == len(completion.token_ids) <= 40
        ended = completion.token_ids[-1] == tokenizer.eos_token_id
        assert (
            ended == (completion.finish_reason == "stop")
            and tokenizer.eos_token_id not in completion.token_ids[:-1]
        )


def drop(named, part):
    return ((name, tensor) for name, tensor in named if part not in name)


def half_of_the_experts(named):
    return ((name, tensor[: len(tensor) // 2] if tensor.dim() == 3 else tensor) for name, tensor in named)


def misnamed(named):
    return ((name.replace("mlp.gate.", "mlp.router."), tensor) for name, tensor in named)


def wrong_shape(named):
    return ((name, tensor[:, :-1] if "k_proj" in name else tensor) for name, tensor in named)


@pytest.mark.parametrize(
    ("faulty", "named_in_message"),
    [
        (lambda named: drop(named, "layers.1.mlp.experts.down_proj"), "layers.1.mlp.experts.w2_weight"),
        (lambda named: drop(named, "layers.0.self_attn.q_norm"), "layers.0.self_attn.q_norm"),
        (half_of_the_experts, "holds 4 experts, the model has 8"),
        (misnamed, "router"),
        (wrong_shape, "layers.0.self_attn.k_proj"),
    ],
    ids=["without an expert tensor", "without a norm", "half of the experts", "misnamed", "wrong shape"],
)
def test_a_faulty_sync_is_an_error_and_the_engine_refuses_to_sample(
    faulty, named_in_message, policy, folder, tokenizer, monkeypatch
):
    """A failed reload leaves an engine that nothing should use, nor the tables of rotations that vLLM shares
    among the engines of a process."""
    monkeypatch.setattr("vllm.model_executor.layers.rotary_embedding._ROPE_DICT", {})
    engine = make_engine(folder, "float32")
    with pytest.raises(RuntimeError, match="weight sync") as caught:
        engine.sync(faulty(hf_tensors(policy)), 7)
    assert named_in_message in str(caught.value)
    with pytest.raises(RuntimeError, match="sync was skipped"):
        engine.generate(requests_for(tokenizer), 7)


def test_a_skipped_sync_is_an_error(policy, engine, tokenizer):
    engine.sync(hf_tensors(policy), 8)
    with pytest.raises(RuntimeError, match="after update 8, the policy is at 9"):
        engine.generate(requests_for(tokenizer), 9)


def test_sleep_without_a_gpu_is_refused(folder):
    with pytest.raises(ValueError, match="rollout.sleep_level"):
        make_engine(folder, "float32", sleep_level=2)


def test_an_engine_that_dies_while_sampling_is_one_clear_error_and_is_not_used_again(
    policy, engine, tokenizer, monkeypatch
):
    def die():
        raise AssertionError("engine core died")

    engine.sync(hf_tensors(policy), 10)
    requests = requests_for(tokenizer, per_prompt=1)
    with monkeypatch.context() as patch:
        patch.setattr(engine.engine, "step", die)
        with pytest.raises(RuntimeError, match="failed while sampling: AssertionError: engine core died"):
            engine.generate(requests, 10)
    with pytest.raises(RuntimeError, match="sync was skipped"):
        engine.generate(requests, 10)
    while engine.engine.has_unfinished_requests():  # the engine is shared by the tests of this file
        engine.engine.step()


def shared_engine(folder, mode) -> list[dict]:
    """Return what shared_engine_worker.py prints, by rank."""
    done = preloaded.run(2, "tests/shared_engine_worker.py", folder, mode)
    found = [json.loads(text) for text in re.findall(r"RESULT(\{.*?\})(?=RESULT|\s)", done.stdout + "\n")]
    assert len(found) == 2, done.stderr[-3000:]
    return sorted(found, key=lambda result: result["rank"])


def test_two_ranks_share_an_engine_and_each_gets_its_own_completions(folder):
    first, second = shared_engine(folder, "tensor")
    assert (first["seen"], second["seen"]) == ([0, 1, 2, 3], [0, 1, 2, 3, 4])
    assert [len(r["tokens"]) for r in (first, second)] == [4, 5] and first["tokens"] != second["tokens"][:4]
    for result in (first, second):
        assert result["largest_dlogp"] < 1e-4 and result["same_routes"]


def test_a_rank_feeds_its_own_experts_to_its_part_of_the_engine(folder):
    """Each rank sends what it holds and nothing is gathered; the engine holds exactly that."""
    for rank, result in enumerate(shared_engine(folder, "expert")):
        assert result["num_bytes"] == result["parameter_bytes"]
        assert f"model.layers.1.mlp.experts.{4 * rank}.down_proj.weight" in result["error"]


def test_all_places_that_name_an_end_of_sequence_count(tmp_path, tokenizer):
    (tmp_path / "config.json").write_text('{"eos_token_id": 4}')
    assert stops_of(tmp_path, tokenizer) == ([tokenizer.eos_token_id, 4], [])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 4]}')
    assert stops_of(tmp_path, tokenizer) == ([tokenizer.eos_token_id, 4, 9], [])
    found = stops_of(tmp_path, tokenizer, ["7", "12", 3, "<pad>"])
    assert found == ([tokenizer.eos_token_id, 4, 9, 3, tokenizer.pad_token_id], ["7", "12"])
    with pytest.raises(ValueError, match="rollout.stop: 4000 is no token id"):
        stops_of(tmp_path, tokenizer, [4000])


def test_completions_end_at_the_stops_of_the_settings(folder, policy, engine, tokenizer):
    """The same seeds, with and without stops: a completion is the other one up to the first stop."""
    engine.sync(hf_tensors(policy), 0)
    requests = requests_for(tokenizer, max_new_tokens=30)
    plain = engine.generate(requests, 0)
    texts = [tokenizer.decode(c.token_ids) for c in plain]
    stop_text = next(text[i : i + 2] for text in texts for i in range(5, 9) if "<" not in text[i : i + 2])
    stop_token = next(c for c in plain if len(c.token_ids) > 7).token_ids[7]
    try:
        stops = [stop_text, stop_token]
        engine.stop_ids, engine.stop_texts = stops_of(folder, tokenizer, stops)
        stopped = engine.generate(requests, 0)
    finally:
        engine.stop_ids, engine.stop_texts = stops_of(folder, tokenizer)
    num_shorter = 0
    for before, after in zip(plain, stopped):
        assert before.token_ids[: len(after.token_ids)] == after.token_ids
        ends = [n for n in range(1, len(before.token_ids) + 1) if before.token_ids[n - 1] == stop_token
                or tokenizer.decode(before.token_ids[:n]).endswith(stop_text)]  # fmt: skip
        assert len(after.token_ids) == min([*ends, len(before.token_ids)])
        assert len(after.logprobs) == len(after.token_ids)
        num_shorter += len(after.token_ids) < len(before.token_ids)
    assert num_shorter > 0
