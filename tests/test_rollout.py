"""Test rollout.py with a real vLLM engine on this CPU, against the trainer's policy and transformers."""

import json
import re
from collections.abc import Collection
from dataclasses import replace
from random import Random

import pytest
import torch
from engines import assert_samples_are_the_trainers, logprob_distance, save_model, token_ids, trained
from helpers import make_config
from turns import chat_tokenizer, make_interaction, make_prompt, write_tools

from batch import Completion, Prefix, Request, Version
from data.tiny import Recipe, build_policy, build_tokenizer, problem
from episodes import FORMATS, Call, Episodes, Extension
from extras import lora
from extras.drafts import Tokens, begin, score_drafts
from moe_model import hf_tensors, pack
from rollout import RolloutEngine, TurnLine, set_vllm_environment, stops_of
from settings import RolloutSettings
from tests import preloaded
from vllm_worker import tokens_at

pytestmark = pytest.mark.slow(process="others")
NUMBERS = ((1, 2), (123, 456), (999, 1), (507, 893), (40, 4), (77, 700))
PROMPTS = [problem(a, b, 3, 5)["prompt"] for a, b in NUMBERS]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def policy(tokenizer):
    """Make a tiny random MoE: two layers, eight experts, tied head."""
    return build_policy(Recipe(initializer_range=0.2), len(tokenizer))


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    policy = build_policy(Recipe(initializer_range=0.2), len(tokenizer))
    return save_model(policy, tmp_path_factory.mktemp("model"))


def make_engine(folder, dtype="float32", more_options=None, **settings):
    settings = RolloutSettings(max_num_seqs=64, dtype=dtype, kv_cache_gib=0.25, **settings)
    return RolloutEngine(folder, 64, settings, more_options=more_options)


@pytest.fixture(scope="module")
def shared_engine(folder, tokenizer):
    return make_engine(folder, more_options={"max_logprobs": len(tokenizer)})


@pytest.fixture
def engine(shared_engine, policy):
    """Return the engine of this file with the weights of `policy`, at version 0."""
    shared_engine.sync(hf_tensors(policy), 0)
    return shared_engine


def requests_for(tokenizer, temperature=1.0, per_prompt=4, max_new_tokens=12):
    prompts = [ids for ids in tokenizer(PROMPTS)["input_ids"] for _ in range(per_prompt)]
    return [Request(ids, seed, temperature, max_new_tokens) for seed, ids in enumerate(prompts)]


def test_an_export_and_a_sync_give_the_text_that_transformers_gives(folder, engine, tokenizer):
    from transformers import Qwen3MoeForCausalLM
    from vllm import LLM, SamplingParams

    reference = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = tokenizer(PROMPTS)["input_ids"]
    expected = []
    for ids in prompts:
        out = reference.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        expected.append(out[0, len(ids) :].tolist())
    set_vllm_environment(on_gpu=False)
    from_disk = LLM(
        str(folder), dtype="float32", max_model_len=64, enforce_eager=True, kv_cache_memory_bytes=2**28,
        use_tqdm_on_load=False,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=12)
    outputs = from_disk.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    completions = engine.generate(requests_for(tokenizer, temperature=0.0, per_prompt=1), 0)
    assert token_ids(completions) == expected


@pytest.mark.parametrize(
    "part", ["experts.down_proj", "experts.gate_up_proj", "gate.weight", "embed", "q_proj", "norm"]
)
def test_a_sync_carries_every_kind_of_parameter(part, policy, engine, tokenizer):
    requests = requests_for(tokenizer)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if part in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * parameter.std().clamp(min=0.3))
    stale = engine.generate(requests, 0)
    logprobs, _ = trained(policy, requests, stale)
    assert logprob_distance(logprobs, stale).max() > 1e-2, "the change is too small to show a stale engine"
    for version in (2, 3):  # a second sync of the same weights must not drift
        engine.sync(hf_tensors(policy), version)
        assert_samples_are_the_trainers(policy, requests, engine.generate(requests, version))


def test_adapters_reach_the_engine_at_each_of_20_syncs(policy, engine, tokenizer):
    """The trainer computes W x + s B A x, the engine (W + s B A) x: no error may add up over syncs."""
    config = make_config("lora.rank=4", "rollout.dtype=float32")
    weights = [parameter.clone() for parameter in policy.parameters()]
    lora.EXTRA.adapt(policy, config)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    requests = requests_for(tokenizer, per_prompt=2)
    packed = pack([request.prompt_ids for request in requests], [[5, 6, 7]] * len(requests), "cpu")
    first = policy(packed)[0].detach()
    for version in range(1, 21):
        (-policy(packed)[0].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.sync(hf_tensors(policy), version, hf_tensors(policy) if version % 5 == 0 else None)
        if version % 5 == 0:
            assert_samples_are_the_trainers(policy, requests, engine.generate(requests, version))
    assert (policy(packed)[0] - first).mean() > 1.0, "20 steps move the policy"
    frozen = [parameter for parameter in policy.parameters() if not parameter.requires_grad]
    assert all(map(torch.equal, frozen, weights)) and len(frozen) == len(weights)


def test_logprobs_are_those_of_the_sampling_temperature(policy, engine, tokenizer):
    requests = requests_for(tokenizer, temperature=0.7)
    assert_samples_are_the_trainers(policy, requests, engine.generate(requests, 0))


@pytest.mark.parametrize("whole", [True, False])
def test_the_most_likely_tokens_are_the_trainers(whole, policy, engine, tokenizer):
    """Their log-probabilities are of the sampling temperature, and the samples are the same without them."""
    requests = requests_for(tokenizer, temperature=0.7)
    topk = len(tokenizer) if whole else 5
    plain = engine.generate(requests, 0)
    completions = engine.generate([replace(request, topk=topk) for request in requests], 0)
    assert [(c.token_ids, c.logprobs) for c in completions] == [(c.token_ids, c.logprobs) for c in plain]
    assert plain[0].topk_ids is None
    packed = pack([request.prompt_ids for request in requests], token_ids(completions), "cpu")
    ids = torch.cat([c.topk_ids for c in completions])
    logprobs = torch.cat([c.topk_logprobs for c in completions])
    with torch.no_grad():
        every = torch.arange(len(tokenizer)).expand(len(ids), -1)
        *_, expected = policy(packed, temperature=0.7, topk_ids_Nk=every)
    assert ids.shape == (len(packed.target_ids), topk) and ids.dtype == torch.int32
    assert (logprobs - expected.gather(1, ids.long())).abs().max() < 1e-4  # rounding, see engines.py
    assert (logprobs - expected.topk(topk).values).abs().max() < 1e-4, "the likeliest come first"
    if whole:
        assert (logprobs.exp().sum(dim=1) - 1).abs().max() < 1e-5
    for completion in completions:  # a sampled token among the k has the log-probability of the sample
        for token, logprob, top, values in zip(
            completion.token_ids, completion.logprobs, completion.topk_ids, completion.topk_logprobs
        ):
            assert (
                logprob == pytest.approx(values[top == token].tolist()[0], abs=1e-6)
                if token in top
                else not whole
            )


def test_a_sample_depends_on_its_seed_and_not_on_the_batch(engine, tokenizer):
    requests = requests_for(tokenizer)
    together = token_ids(engine.generate(requests, 0))
    assert together[:4] == [engine.generate([request], 0)[0].token_ids for request in requests[:4]]
    assert len(set(map(tuple, together[:4]))) > 1, "completions of a prompt with other seeds should differ"


def drawn(sampler, seeds: list[int], logits_V, top_k: int | None = None):
    """Return the tokens that seeded requests draw from the same logits, and their log-probabilities."""
    generators = {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}
    k = None if top_k is None else torch.full((len(seeds),), top_k)
    return sampler(logits_V.repeat(len(seeds), 1), generators, k, None)


@pytest.mark.parametrize("vocab_size, top_k", [(98, None), (98, 5), (4097, None), (4097, 5), (49152, None)])
def test_seeded_requests_draw_from_the_engines_probabilities(vocab_size, top_k, engine):
    """In a small vocabulary as vLLM does; else by one uniform number, compared with one cumulative sum."""
    from vllm.v1.sample.ops import topk_topp_sampler as ops

    sampler = ops.TopKTopPSampler("processed_logprobs")
    logits_V = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    logits_V[1::2] = -torch.inf
    seeds = list(range(300))
    tokens, logprobs = drawn(sampler, seeds, logits_V, top_k)
    assert logits_V[tokens].isfinite().all()
    assert torch.equal(drawn(sampler, seeds[7:8], logits_V, top_k)[0], tokens[7:8])
    k_2 = None if top_k is None else torch.full((2,), top_k)  # beside a greedy request, without a generator
    beside, _ = sampler(logits_V.repeat(2, 1), {1: torch.Generator().manual_seed(7)}, k_2, None)
    assert beside[1] == tokens[7]
    if vocab_size == 98:
        theirs, same = drawn(sampler.forward_of_vllm, seeds, logits_V, top_k)
        assert torch.equal(tokens, theirs) and torch.equal(logprobs, same)
        return
    sums_V = logprobs[0].double().exp().cumsum(0)
    u = [torch.rand((), generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in seeds]
    assert tokens.tolist() == [int((sums_V <= x * sums_V[-1]).sum()) for x in u]
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    finite = logprobs[0].isfinite().nonzero()
    assert tokens_at(logprobs[:2].exp(), ends).tolist() == [finite[0], finite[-1]]


def test_completions_end_at_eos_or_at_the_limit_and_are_reported_as_they_end(engine, tokenizer):
    requests = requests_for(tokenizer, per_prompt=10, max_new_tokens=40)
    order = []
    record = lambda index, completion: order.append((index, len(completion.token_ids)))
    completions = engine.generate(requests, 0, record)
    assert sorted(index for index, _ in order) == list(range(len(requests)))
    assert [length for _, length in order] == sorted(length for _, length in order), "the shortest ends first"
    assert {c.finish_reason for c in completions} == {"stop", "length"}, "the test needs both kinds"
    for completion in completions:
        assert len(completion.logprobs) == len(completion.token_ids) <= 40
        ends = [token == tokenizer.eos_token_id for token in completion.token_ids]
        assert ends[-1] == (completion.finish_reason == "stop") and not any(ends[:-1])


def drop(named, part):
    return ((name, tensor) for name, tensor in named if part not in name)


def half_of_the_experts(named):
    return ((name, tensor[: len(tensor) // 2] if tensor.dim() == 3 else tensor) for name, tensor in named)


def misnamed(named):
    return ((name.replace("mlp.gate.", "mlp.router."), tensor) for name, tensor in named)


def wrong_shape(named):
    return ((name, tensor[:, :-1] if "k_proj" in name else tensor) for name, tensor in named)


@pytest.mark.parametrize(
    ("faulty", "keyword"),
    [
        (lambda named: drop(named, "layers.1.mlp.experts.down_proj"), "layers.1.mlp.experts.w2_weight"),
        (half_of_the_experts, "4 experts"),
        (misnamed, "router"),
        (wrong_shape, "layers.0.self_attn.k_proj"),
    ],
    ids=["expert tensor missing", "half of the experts", "misnamed", "wrong shape"],
)
def test_after_a_faulty_sync_the_engine_refuses_to_sample(faulty, keyword, policy, folder, monkeypatch):
    """A failed reload spoils the engine, and the tables of rotations that vLLM shares among engines."""
    monkeypatch.setattr("vllm.model_executor.layers.rotary_embedding._ROPE_DICT", {})
    engine = make_engine(folder)
    with pytest.raises(RuntimeError, match=keyword):
        engine.sync(faulty(hf_tensors(policy)), 7)
    with pytest.raises(RuntimeError, match="sync"):
        engine.generate([], 7)


def test_a_skipped_sync_is_an_error(engine):
    with pytest.raises(RuntimeError, match="sync"):
        engine.generate([], 1)


def test_sleep_without_a_gpu_is_refused(folder):
    with pytest.raises(ValueError, match="rollout.sleep_level"):
        make_engine(folder, sleep_level=2)


def test_the_next_turn_of_an_episode_starts_before_a_waiting_request():
    requests = [Request([5, 6, 7], seed, 1.0, 4) for seed in range(2)]
    settings = RolloutSettings(max_num_seqs=1)
    line = TurnLine(requests, settings, num_blocks=100, block_size=16, previous=(0, 0))
    ((turn_id, request),) = line.starting()
    first = line.end_turn(turn_id, 2)
    line.take_event(first, request)
    for expected in (first, 1 - first):
        ((turn_id, _),) = line.starting()
        assert line.end_turn(turn_id, 2) == expected


def results_of_two_ranks(folder, mode) -> list[dict]:
    """Return the lines of shared_engine_worker.py by rank."""
    done = preloaded.run(2, "tests/shared_engine_worker.py", folder, mode)
    lines = re.findall(r"RESULT(\{.*?\})(?=RESULT|\s)", done.stdout + "\n")
    assert len(lines) == 2, done.stderr[-3000:]
    return sorted(map(json.loads, lines), key=lambda result: result["rank"])


@pytest.mark.slow  # the server of libraries belongs to the process `ranks`
def test_two_ranks_share_an_engine_and_each_gets_its_own_completions(folder):
    first, second = results_of_two_ranks(folder, "tensor")
    assert (first["reported"], second["reported"]) == ([0, 1, 2, 3], [0, 1, 2, 3, 4])
    assert len(first["tokens"]) == 4 and first["tokens"] != second["tokens"][:4]
    assert (first["turns"], second["turns"]) == ([3] * 3, [3] * 4), "episodes, with tools of different speed"


@pytest.mark.slow
def test_a_rank_feeds_its_own_experts_to_its_part_of_the_engine(folder):
    """Each rank sends its own parameters, without a gather, and its engine holds exactly these."""
    for rank, result in enumerate(results_of_two_ranks(folder, "expert")):
        assert result["num_bytes"] == result["parameter_bytes"]
        assert f"model.layers.1.mlp.experts.{4 * rank}.down_proj.weight" in result["error"]


def test_every_file_that_names_an_end_of_sequence_counts(tmp_path, tokenizer):
    (tmp_path / "config.json").write_text('{"eos_token_id": 4}')
    assert stops_of(tmp_path, tokenizer) == ([tokenizer.eos_token_id, 4], [])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 4]}')
    stops = stops_of(tmp_path, tokenizer, ["7", "12", 3, "<pad>"])
    assert stops == ([tokenizer.eos_token_id, 4, 9, 3, tokenizer.pad_token_id], ["7", "12"])
    with pytest.raises(ValueError, match="rollout.stop"):
        stops_of(tmp_path, tokenizer, [4000])
    (tmp_path / "config.json").write_text('{"vocab_size": 500}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 499}')
    assert stops_of(tmp_path, tokenizer)[0] == [tokenizer.eos_token_id, 499], (
        "a padded vocabulary has more ids"
    )
    for eos in (500, [1, 151643], -1, "2"):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        with pytest.raises(ValueError, match="model.path: eos_token_id .*generation_config.json.* 500"):
            stops_of(tmp_path, tokenizer)


def test_completions_end_at_the_stops_of_the_settings(folder, engine, tokenizer, monkeypatch):
    """With the same seeds, a completion with stops is the completion without stops, cut at the first stop."""
    requests = requests_for(tokenizer, max_new_tokens=30)
    plain = engine.generate(requests, 0)
    texts = [tokenizer.decode(c.token_ids) for c in plain]
    stop_text = next(text[i : i + 2] for text in texts for i in range(5, 9) if "<" not in text[i : i + 2])
    stop_token = next(c for c in plain if len(c.token_ids) > 7).token_ids[7]
    special = {*tokenizer.get_added_vocab().values()} - {tokenizer.eos_token_id}
    pairs = [c.token_ids[i : i + 2] for c in plain for i in range(len(c.token_ids) - 1)]
    special_text = next(tokenizer.decode(pair) for pair in pairs if pair[0] in special)
    for stops in ([stop_text, stop_token], [special_text]):
        stop_ids, stop_texts = stops_of(folder, tokenizer, stops)
        monkeypatch.setattr(engine, "stop_ids", stop_ids)
        monkeypatch.setattr(engine, "stop_texts", stop_texts)
        expected = []
        for completion in plain:
            ids = completion.token_ids
            prefixes = [ids[:n] for n in range(1, len(ids) + 1)]
            ends = [p[-1] in stop_ids or tokenizer.decode(p).endswith(tuple(stop_texts)) for p in prefixes]
            expected.append(prefixes[ends.index(True)] if any(ends) else ids)
        stopped = engine.generate(requests, 0)
        assert token_ids(stopped) == expected != token_ids(plain)
        assert [len(completion.logprobs) for completion in stopped] == list(map(len, expected))


@pytest.mark.parametrize("stopped", [False, True])
def test_a_completion_goes_on_after_its_prefix(stopped, policy, engine, tokenizer):
    """A greedy completion that is cut anywhere and continued is the whole one, with its routes and versions.

    stopped: the prefix is a whole completion, of which the engine computes the routes.
    """
    requests = requests_for(tokenizer, temperature=0.0, per_prompt=1)
    requests = [replace(request, min_new_tokens=8) for request in requests]
    whole = engine.generate(requests, 0)
    engine.sync(hf_tensors(policy), 7)
    cuts = [len(c.token_ids) if stopped else 1 + 2 * i for i, c in enumerate(whole)]
    assert stopped or all(cut < len(c.token_ids) for cut, c in zip(cuts, whole)), "nothing to continue"
    cut_off = []
    for request, completion, cut in zip(requests, whole, cuts):
        versions = (Version(3, 1), Version(5, cut - 1)) if cut > 1 else (Version(3, 1),)
        prefix = Prefix(completion.token_ids[:cut], [-0.5] * cut, versions, "stop" if stopped else None)
        cut_off.append(replace(request, prefix=prefix))
    reported = {}
    completions = engine.generate(cut_off, 7, reported.__setitem__)
    assert token_ids(completions) == token_ids(whole) and [reported[i] for i in range(len(whole))] == [
        replace(completion, routed_experts=None) for completion in completions
    ]
    for request, completion, before, cut in zip(cut_off, completions, whole, cuts):
        assert completion.logprobs[:cut] == [-0.5] * cut
        assert completion.logprobs[cut:] == pytest.approx(before.logprobs[cut:], abs=1e-4)  # engines.py
        assert torch.equal(completion.routed_experts, before.routed_experts)
        added = () if stopped else (Version(7, len(before.token_ids) - cut),)
        assert completion.versions == (*request.prefix.versions, *added)
        assert completion.finish_reason == ("stop" if stopped else before.finish_reason)
    assert [c.versions for c in whole] == [(Version(0, len(c.token_ids)),) for c in whole]


def test_a_prefill_scores_tokens_as_they_were_sampled(engine, tokenizer):
    """So the drafts of the policy that has sampled them are accepted, up to rounding."""
    requests = [replace(request, topk=len(tokenizer)) for request in requests_for(tokenizer)]
    sampled = [
        Tokens.of(c.token_ids, c.logprobs, c.topk_ids, c.topk_logprobs) for c in engine.generate(requests, 0)
    ]
    pairs = [(request.prompt_ids, tokens) for request, tokens in zip(requests, sampled)]
    for tokens, scored, alone in zip(
        sampled, score_drafts(engine, pairs, len(tokenizer)), score_drafts(engine, pairs, 0)
    ):
        assert torch.equal(tokens.ids, scored.ids) and torch.equal(tokens.ids, alone.ids)
        for mine in (scored, alone):
            assert torch.allclose(mine.logprobs, tokens.logprobs, atol=1e-4)
        for position in range(len(tokens.ids)):
            assert scored.row(position) == pytest.approx(tokens.row(position), abs=1e-4)
        num, beginning = begin(tokens, scored, "residual", 1.0, Random(0))
        assert num == len(tokens.ids) == len(beginning.ids)


def test_drafts_with_tokens_in_the_prefix_cache_are_scored_as_alone(engine, monkeypatch):
    """A cached prompt is not read again; cached tokens of another draft have no log-probabilities and are."""
    random = Random(0)
    long, short, start, *ends = ([random.randrange(60) for _ in range(num)] for num in (33, 20, 20, 15, 15))
    pairs = [
        (prompt, Tokens.of(ids, [0.0] * len(ids)))
        for prompt, ids in (
            (long, start), (long, start), (long, [*start[:10], *ends[0]]),
            (short, [*start, *ends[0]]), (short, [*start, *ends[1]]),
        )
    ]  # fmt: skip
    outputs = []
    step = engine.step

    def counted_step():
        outputs.extend(new := step())
        return new

    monkeypatch.setattr(engine, "step", counted_step)
    together = score_drafts(engine, pairs, 5)
    assert sorted(output.num_cached_tokens for output in outputs) == [0, 0, 0, 32, 32]
    for pair, scored in zip(pairs, together):
        assert engine.llm.reset_prefix_cache()
        (alone,) = score_drafts(engine, [pair], 5)
        for mine, reference in zip(scored, alone):
            assert mine.dtype == reference.dtype and torch.allclose(mine, reference, atol=1e-4)


# ---- episodes of several turns -----------------------------------------------------------------------------
TURN_ENDS = [1, *range(60, 97)]  # with random weights, <eos> alone would be too rare


class Anything:
    """A tool call in every turn with an even number of letters; the result is the number of letters."""

    @staticmethod
    def calls(text: str, tools: Collection[str]) -> list[Call]:
        letters = sum(map(str.isalpha, text))
        call = Call("slow_add", {"a": letters, "b": 0, "seconds": (len(text) % 3) / 100})
        return [] if letters % 2 else [call]


@pytest.fixture
def conversation(engine, tmp_path, monkeypatch):
    """Return converse(requests), which lets the engine sample episodes with a tool."""
    monkeypatch.setitem(FORMATS, "hermes", Anything.calls)
    monkeypatch.setattr(Extension, "call_format", lambda self, tool: "hermes")
    monkeypatch.setattr(engine, "stop_ids", TURN_ENDS)
    chat = chat_tokenizer()
    prompts = [make_prompt(chat, f"{i}+{i}", tools=[{"function": {"name": "slow_add"}}]) for i in range(12)]
    ids = [chat(prompt.text)["input_ids"] for prompt in prompts]
    requests = [Request(prompt_ids, seed, 1.0, 44) for seed, prompt_ids in enumerate(ids)]
    path = write_tools(tmp_path)
    interaction = make_interaction(path, prompts, "rollout.max_turns=4", tools=["slow_add"], stops=TURN_ENDS)

    def converse(version: int, **options) -> list[Completion]:
        episodes = interaction.episodes(requests, prompts)
        ended = []
        completions = engine.generate(
            requests, version, lambda row, c: ended.append((row, c.token_ids)), episodes=episodes, **options
        )
        assert sorted(ended) == list(enumerate(token_ids(completions)))
        return completions

    yield requests, converse
    interaction.close()


def test_episodes_are_the_trainers_token_by_token(policy, engine, conversation):
    """Log-probabilities of sampled tokens and routes of all tokens are those of one pass of the trainer."""
    requests, converse = conversation
    completions = converse(0)
    assert {c.finish_reason for c in completions} >= {"stop", "turns"}
    assert max(len(c.turns) for c in completions) == 7 and sum(c.num_calls for c in completions) > 10
    logprobs, table = trained(policy, requests, completions)
    is_sampled = torch.tensor([own for c in completions for own in c.sampled_mask])
    distance = logprob_distance(logprobs, completions)
    assert distance[is_sampled].max() < 1e-4 < distance[~is_sampled].min()
    rows = [len(r.prompt_ids) + len(c.token_ids) - 1 for r, c in zip(requests, completions)]
    for completion, expected in zip(completions, table.split(rows)):
        assert torch.equal(completion.routed_experts.sort(-1).values.long(), expected.sort(-1).values.long())
    assert [c.token_ids for c in converse(0)] == token_ids(completions), "the pace of tools changes no token"


def test_the_engine_waits_for_tools_only_if_it_has_nothing_else_to_do(engine, conversation, monkeypatch):
    waits = []
    poll = Episodes.poll

    def recording(self, wait_s: float):
        is_running = engine.engine.has_unfinished_requests()
        waits.append((wait_s > 0, is_running, self.num_waiting > 0))
        return poll(self, wait_s)

    monkeypatch.setattr(Episodes, "poll", recording)
    conversation[1](0)
    assert (False, True, True) in waits, "tokens were sampled while tools ran"
    assert not any(waited and is_running for waited, is_running, _ in waits)
