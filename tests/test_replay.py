"""Router replay against transformers with forced routers; route mismatch, mismatch metrics and gate.

Updates run in rank_worker.py, once on one rank and once on two. The model "mixed" has a dense layer between
two MoE layers and gate weights that are not renormalised; "small" is the model of conftest.py.

Tolerances: float32 rounds at 6e-8, and sums of some dozen terms of size 1 are added in different orders. A
wrong choice of experts moves log-probabilities by 1e-2 and more.
"""

import math
import random
from functools import partial
from types import SimpleNamespace

import pytest
import reference
import torch
from conftest import assert_close, save_small_moe
from helpers import (
    CLIP_EPS,
    EVERYTHING,
    HALVES,
    INTERLEAVED,
    LEARNING_RATE,
    SHARES,
    SHUFFLED,
    TEMPERATURE,
    WORK,
    RankSuite,
    batch_of_rows,
    judged,
    make_batch,
    make_config,
    make_prompts,
    make_ragged_completions,
    parameter_distance,
    share_prompt_routes,
    update_case,
)
from transformers import Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

import lifecycle
import moe_model
import train_rl
from batch import Completion, Group, RolloutBatch, Turn
from configure import config_warnings
from reward import Verdict
from rollout import invalid_route
from runtime import metrics as M
from runtime.checkpoint import TrainState
from runtime.checks import check_parity, check_routes, mismatch_gate
from sampling import captures_routes

INVALID_ROUTE = invalid_route(6)
LAYERS = {"small": (0, 1), "mixed": (0, 2)}  # with experts
SIZES = {"small": (2, 4, 2), "mixed": (3, 6, 3)}  # layers, experts, experts per token
SMOOTH_EPS = 0.1  # of Adam: the rounding of a gradient near 0 moves a parameter by lr / eps = 1 times
TOLERANCE = 3e-6  # of parameters of size 1: a few roundings, amplified by a second update
ROUNDING, WRONG_EXPERTS = 1e-5, 1e-2  # of log-probabilities, see above


# ---- the models, the completions, the updates --------------------------------------------------------------


def save_mixed_moe(folder) -> None:
    """Save a model of layers MoE, dense, MoE; top 3 of 6 experts, gate weights straight from the softmax."""
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=24, hidden_size=16, intermediate_size=20, num_hidden_layers=3, mlp_only_layers=[1],
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=6, num_experts_per_tok=3,
        moe_intermediate_size=8, norm_topk_prob=False, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def random_routes(model: str, num_rows: int, rng: random.Random) -> torch.Tensor:
    """Draw expert ids [rows, L, K] as an engine may report them: distinct, unordered, 0 in dense layers."""
    num_layers, num_experts, top_k = SIZES[model]
    ids = torch.zeros(num_rows, num_layers, top_k, dtype=torch.uint8)
    for row in ids:
        for layer in LAYERS[model]:
            row[layer] = torch.tensor(rng.sample(range(num_experts), top_k))
    return ids


def make_completions() -> list[dict]:
    """Add random experts and advantages to the ragged completions; one row of completion 4 has no experts.

    All completions of a group have the same experts for the prompt, except for the last prompt token.
    """
    rng = random.Random(5)
    completions = make_ragged_completions()
    for c in completions:
        num_rows = len(c["prompt_ids"]) + len(c["completion_ids"]) - 1
        c["advantages"] = [rng.gauss(0, 1)] * len(c["completion_ids"])
        c["routes"] = {model: random_routes(model, num_rows, rng) for model in SIZES}
    share_prompt_routes(completions)
    for ids in completions[4]["routes"].values():
        ids[-1] = INVALID_ROUTE  # the row that predicts the last token
    return completions


@pytest.mark.parametrize("versions, chosen", [([5, 4, 5, 5], 2), ([5, 4, 4, 5], 1), (None, 1)])
def test_a_prompt_takes_the_first_valid_routes_of_the_newest_policy(versions, chosen):
    """The capture of the first completion is invalid; the last has another prompt."""
    batch = RolloutBatch.__new__(RolloutBatch)
    batch.prompt_ids = [[1, 2, 3]] * 3 + [[4, 5]]
    batch.policy_versions = versions and torch.tensor(versions)[:, None]
    routes = [torch.full((4, 1, 1), expert, dtype=torch.uint8) for expert in (255, 1, 2, 9)]
    batch.share_prompt_routes(routes)
    assert [ids.flatten().tolist() for ids in routes] == [
        [chosen, chosen, 255, 255], [chosen, chosen, 1, 1], [chosen, chosen, 2, 2], [9, 9, 9, 9],
    ]  # fmt: skip


def replay_case(name, *rows, replay="r3", ids="given", old="given", model="mixed", **options) -> dict:
    """Describe an update. ids: the sampler's routes, `given` with the completions or the policy's `own`."""
    options |= {"old": old, "adam_eps": SMOOTH_EPS, "algorithm__router_replay": replay, "padding": 2}
    return update_case(name, *rows, ids=ids, model=model, **options)


CHECKPOINTED = {"model__activation_checkpointing": "true"}
BITWISE = {"ids": "own", "old": "computed", "micro_batch_tokens": 20}
TWO_UPDATES = {"old": "computed", "minibatches_per_step": 2}
SMALL_EP = {"ep_size": 2, "micro_batch_tokens": 20}
OWN_PROMPTS = {"share_prompts": "false"}
LIVE = {"replay": "off", "ids": "own"}
ONE_RANK = [
    replay_case("all rows", EVERYTHING),
    replay_case("small micro-batches", EVERYTHING, micro_batch_tokens=20),
    replay_case("shuffled single rows", SHUFFLED, micro_batch_tokens=1),
    replay_case("checkpointed", SHUFFLED, micro_batch_tokens=40, **CHECKPOINTED),
    replay_case("renormalised", EVERYTHING, model="small", micro_batch_tokens=20),
    replay_case("off", EVERYTHING, replay="off", old="computed"),
    replay_case("own off", SHUFFLED, replay="off", **BITWISE),
    replay_case("own r3", SHUFFLED, **BITWISE),
    replay_case("own r2", SHUFFLED, replay="r2", **BITWISE),
    replay_case("own prompts", EVERYTHING, **OWN_PROMPTS),
    replay_case("own prompts, small", SHUFFLED, micro_batch_tokens=40, **OWN_PROMPTS, **CHECKPOINTED),
    replay_case("two updates off", EVERYTHING, micro_batch_tokens=1, **LIVE, **TWO_UPDATES),
    replay_case("two updates r2", EVERYTHING, replay="r2", micro_batch_tokens=1, **TWO_UPDATES),
    replay_case("two updates r2, own prompts", EVERYTHING, replay="r2", micro_batch_tokens=30,
                **OWN_PROMPTS, **TWO_UPDATES),
    replay_case("two updates r3", EVERYTHING, micro_batch_tokens=1, **TWO_UPDATES),
]  # fmt: skip
TWO_RANKS = [
    replay_case("halves", *HALVES),
    replay_case("shares", *SHARES, micro_batch_tokens=20),
    replay_case("halves ep", *HALVES, ep_size=2),
    replay_case("shares ep checkpointed", *SHARES, **SMALL_EP, **CHECKPOINTED),
    replay_case("own prompts ep", *SHARES, **SMALL_EP, **OWN_PROMPTS),
    replay_case("renormalised ep", *SHARES, model="small", **SMALL_EP),
    replay_case("two updates off ep", *INTERLEAVED, **LIVE, **SMALL_EP, **OWN_PROMPTS, **TWO_UPDATES),
    replay_case("two updates r2 ep", *INTERLEAVED, replay="r2", **SMALL_EP, **TWO_UPDATES),
    replay_case("two updates r3 ep", *INTERLEAVED, **SMALL_EP, **TWO_UPDATES),
]


def save_models(folder) -> None:
    save_small_moe(folder / "small")
    save_mixed_moe(folder / "mixed")


def save_request(folder, cases: list[dict]) -> None:
    save_models(folder)
    torch.save({"completions": make_completions(), "cases": cases}, folder / "request.pt")


SUITES = [
    RankSuite("replay", 1, lambda folder: save_request(folder, ONE_RANK)),
    RankSuite("replay", 2, lambda folder: save_request(folder, TWO_RANKS)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    save_models(folder)
    return folder


@pytest.fixture(scope="module")
def updates() -> dict:
    """Return {case name: result} of one and two ranks."""
    one, two = (suite.results()[0] for suite in SUITES)
    return one | two


# ---- the update: plain torch -------------------------------------------------------------------------------


class ForcedModel:
    """Runs transformers' model, sequence by sequence; routers use forced experts in rows that have some."""

    def __init__(self, folder):
        self.hf = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.forced = None  # [rows, L, K] of the current sequence
        self.used = None
        for i, layer in enumerate(self.hf.model.layers):
            if hasattr(layer.mlp, "experts"):
                layer.mlp.gate.register_forward_hook(partial(self.choose, i))

    def choose(self, layer: int, router, inputs, outputs):
        scores = outputs[0].softmax(dim=-1)
        ids = outputs[2].clone()
        for row in range(len(ids) if self.forced is not None else 0):
            if self.forced[row, layer, 0] != INVALID_ROUTE:
                ids[row] = self.forced[row, layer].long()
        self.used[:, layer] = ids
        weights = scores.gather(1, ids)
        if self.hf.config.norm_topk_prob:
            weights = weights / weights.sum(1, keepdim=True)
        return outputs[0], weights, ids

    def __call__(self, completion: dict, forced=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probability of each completion token, and the experts used in each row."""
        prompt, tokens = completion["prompt_ids"], completion["completion_ids"]
        inputs = (prompt + tokens)[:-1]
        config = self.hf.config
        self.forced = forced
        self.used = torch.zeros(len(inputs), config.num_hidden_layers, config.num_experts_per_tok).byte()
        logits = self.hf(torch.tensor([inputs]), use_cache=False).logits[0] / TEMPERATURE
        rows = logits[len(prompt) - 1 :].log_softmax(dim=-1)
        return torch.stack([row[token] for row, token in zip(rows, tokens)]), self.used


def plain_update(folder, model: str, minibatches, replay: str, old="computed") -> dict:
    """Update with transformers' model and torch's AdamW; the derivative of the loss is reference.py's."""
    completions = make_completions()
    policy = ForcedModel(folder / model)
    optimizer = torch.optim.AdamW(
        policy.hf.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=SMOOTH_EPS, weight_decay=0.0
    )
    sampled = [c["routes"][model] if replay == "r3" else None for c in completions]
    with torch.no_grad():
        first = [policy(c, ids) for c, ids in zip(completions, sampled)]
    old_logprobs = [c["old_logprobs"] for c in completions]
    if old == "computed":
        old_logprobs = [logprobs.tolist() for logprobs, _ in first]
    routes = [used for _, used in first] if replay == "r2" else sampled
    losses = []
    for rows in minibatches:
        logprobs = [policy(completions[row], routes[row])[0] for row in rows]
        values = ([x.tolist() for x in logprobs], [old_logprobs[row] for row in rows])
        values += ([completions[row]["advantages"] for row in rows], [[0.0] * len(x) for x in logprobs], None)
        grpo = settings(f"algorithm.clip_eps_low={CLIP_EPS}").algorithm.model_dump()
        optimizer.zero_grad()
        slopes = [x for row in reference.policy_objective_slope(*values, grpo) for x in row]
        torch.cat(logprobs).backward(-torch.tensor(slopes))
        optimizer.step()
        losses.append(-reference.policy_objective(*values, grpo))
    parameters = {name: parameter.detach() for name, parameter in policy.hf.named_parameters()}
    return {"parameters": parameters, "loss": sum(losses), "first": first, "model": policy}


@pytest.fixture(scope="module")
def plain(folder) -> dict:
    """Return {name: plain_update()} of the updates that the cases compute in several ways."""
    run = partial(plain_update, folder)
    once, twice = [EVERYTHING], [EVERYTHING[:6], EVERYTHING[6:]]
    return {
        "r3": run("mixed", once, "r3", old="given"),
        "r3 renormalised": run("small", once, "r3", old="given"),
        "live": run("mixed", once, "off", old="given"),
        "two updates off": run("mixed", twice, "off"),
        "two updates r2": run("mixed", twice, "r2"),
        "two updates r3": run("mixed", twice, "r3"),
    }


SAME_UPDATE = {
    "r3": [
        "all rows", "small micro-batches", "shuffled single rows", "checkpointed", "halves", "shares",
        "halves ep", "shares ep checkpointed", "own prompts", "own prompts, small", "own prompts ep",
    ],
    "r3 renormalised": ["renormalised", "renormalised ep"],
    "two updates off": ["two updates off", "two updates off ep"],
    "two updates r2": ["two updates r2", "two updates r2 ep", "two updates r2, own prompts"],
    "two updates r3": ["two updates r3", "two updates r3 ep"],
}  # fmt: skip


@pytest.mark.parametrize("kind, name", [(kind, name) for kind in SAME_UPDATE for name in SAME_UPDATE[kind]])
@pytest.mark.slow
def test_an_update_equals_plain_torch_with_forced_routers(kind, name, updates, plain):
    """With random experts of the sampler, a row without experts, and experts of the old policy."""
    update = updates[name]
    expected = plain[kind]
    assert parameter_distance(update["parameters"], expected["parameters"]) < TOLERANCE
    assert update["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)  # sums over 60 tokens
    metrics = update["metrics"]
    unsplit = updates[SAME_UPDATE[kind][0]]["metrics"]
    assert metrics["nonfinite_updates_max"] == 0 and metrics.keys() >= {"mismatch_k3", "abs_dlogp_p99"}
    for metric in metrics.keys() - WORK:
        assert metrics[metric] == pytest.approx(unsplit[metric], rel=1e-5, abs=1e-6), metric


@pytest.mark.parametrize("name", ["two updates off", "two updates r2", "two updates r3"])
@pytest.mark.slow
def test_the_first_minibatch_repeats_the_old_pass_bit_by_bit(name, updates, plain):
    """Single rows pass through the same kernels in both passes: the ratio of the first minibatch is 1."""
    result = updates[name]
    expected = plain[name]["first"]
    values = {rows[0]: (logprobs[0], ratio[0]) for rows, logprobs, ratio in result["micro_batches"]}
    assert sorted(list(values)[:6]) == EVERYTHING[:6] and len(values) == 12
    for row, (logprobs, ratio) in values.items():
        length = len(expected[row][0])
        old = result["old_logprobs"][row, :length]
        assert_close(old, expected[row][0], rtol=0, atol=ROUNDING)
        if row in EVERYTHING[:6]:
            assert torch.equal(logprobs[:length], old) and (ratio == 1).all()
        else:
            assert (ratio[:length] != 1).any()


@pytest.mark.parametrize("name", ["own r2", "own r3"])
@pytest.mark.slow
def test_replay_of_own_routes_is_bitwise_off(name, updates):
    off, replayed = updates["own off"], updates[name]
    assert parameter_distance(off["parameters"], replayed["parameters"]) == 0
    assert torch.equal(off["old_logprobs"], replayed["old_logprobs"])
    assert off["metrics"] == replayed["metrics"] and off["metrics"]["ratio"] == 1
    for (rows, *expected), (replayed_rows, *values) in zip(
        off["micro_batches"], replayed["micro_batches"], strict=True
    ):
        assert rows == replayed_rows and all(map(torch.equal, expected, values))


# ---- episodes of several turns -----------------------------------------------------------------------------
TURNS = [[3, 2, 4], [5], [2, 6, 1, 1, 3], [1, 7, 2]]  # tokens by the policy and by a tool in alternation


def make_episodes(rng: random.Random) -> list[Completion]:
    """Make two groups of two episodes with random tokens and random experts of all tokens."""
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    episodes = []
    for number, lengths in enumerate(TURNS):
        prompt = prompts[number // 2]
        ids = [rng.randrange(24) for _ in range(sum(lengths))]
        turns = tuple(Turn("tool" if i % 2 else "assistant", n) for i, n in enumerate(lengths))
        routes = random_routes("mixed", len(prompt) + len(ids) - 1, rng)
        episodes.append({
            "group": number // 2, "prompt_ids": prompt, "completion_ids": ids, "turns": turns,
            "routes": {"mixed": routes}, "gain": rng.gauss(0, 1),
        })  # fmt: skip
    share_prompt_routes(episodes)
    return episodes


@pytest.mark.parametrize("share", [True, False])
def test_r3_over_several_turns_equals_transformers_with_forced_routers(share, folder, one_rank):
    """Log-probabilities of sampled tokens and the gradient of every parameter, float32 in other orders.

    The engine's experts of inserted tokens are replayed, too: they are part of the context. Without them the
    log-probabilities of later turns differ.
    """
    episodes = make_episodes(random.Random(3))
    completions = [
        Completion(e["completion_ids"], [-1.0] * len(e["completion_ids"]), "stop", 0.0, e["routes"]["mixed"],
                   turns=e["turns"], texts=("",) * len(e["turns"]))
        for e in episodes
    ]  # fmt: skip
    verdicts = [Verdict(1.0, "ok"), Verdict(0.0, "wrong")]
    groups = [Group(slot, slot, judged(completions[2 * slot : 2 * slot + 2], verdicts)) for slot in range(2)]
    prompt_ids = [episodes[0]["prompt_ids"], episodes[2]["prompt_ids"]]
    batch = train_rl.collate(groups, make_prompts(2), prompt_ids)
    config = settings("algorithm.router_replay=r3", "model.dtype=float32", f"train.share_prompts={share}")
    policy = moe_model.build_policy(config.model, folder / "mixed", None, torch.device("cpu"))
    outputs = train_rl.forward_rows(policy, batch, [0, 1, 2, 3], config)
    gains = torch.tensor([e["gain"] for e in episodes]).unsqueeze(1)
    (outputs.logprobs * gains).sum().backward()

    forced = ForcedModel(folder / "mixed")
    expected = []
    without_results = []  # the experts of inserted tokens are the model's own
    for episode in episodes:
        routes = episode["routes"]["mixed"]
        own = torch.tensor([turn.sampled for turn in episode["turns"] for _ in range(turn.num_tokens)])
        logprobs, _ = forced(episode, routes)
        expected.append(logprobs * own)
        inserted = torch.cat([torch.zeros(len(episode["prompt_ids"]), dtype=torch.bool), ~own])[:-1]
        partly = routes.masked_fill(inserted.view(-1, 1, 1), INVALID_ROUTE)
        without_results.append((forced(episode, partly)[0] * own).detach())
    sum(episode["gain"] * logprobs.sum() for episode, logprobs in zip(episodes, expected)).backward()
    for row, logprobs in enumerate(expected):
        assert_close(outputs.logprobs[row, : len(logprobs)], logprobs.detach(), rtol=0, atol=ROUNDING)
    moved = [(a - b).abs().max() for a, b in zip(expected, without_results)]
    assert min(moved[0], moved[2], moved[3]) > WRONG_EXPERTS > moved[1] == 0, "episode 1 has no result"

    for parameter in policy.parameters():
        parameter.data = parameter.grad
    gradients = dict(moe_model.hf_tensors(policy))
    expected_gradients = {name: parameter.grad for name, parameter in forced.hf.named_parameters()}
    assert parameter_distance(gradients, expected_gradients) < TOLERANCE * 10  # sums over 28 tokens
    assert all(gradient.abs().max() > WRONG_EXPERTS for gradient in gradients.values())


def test_r3_of_a_shared_prompt_does_not_depend_on_the_rows_of_the_micro_batch(folder, one_rank):
    """An update may leave out the first row of a prompt, and the engine may route the prompt row by row."""
    rng = random.Random(5)
    prompt, ids = [5, 6, 7, 8], [[1, 2, 3], [4, 5]]
    config = settings("algorithm.router_replay=r3", "model.dtype=float32")
    policy = moe_model.build_policy(config.model, folder / "mixed", None, torch.device("cpu"))

    def logprobs_of_row_1(with_rows: list[int], batch) -> torch.Tensor:
        outputs = train_rl.forward_rows(policy, batch, with_rows, config)
        return outputs.logprobs[with_rows.index(1)].detach()

    distances = []
    completions = []
    for row in ids:
        routes = random_routes("mixed", len(prompt) + len(row) - 1, rng)
        completions.append(Completion(row, [-1.0] * len(row), "stop", 0.0, routes))
    groups = [Group(0, 0, judged(completions, [Verdict(1.0, "ok"), Verdict(0.0, "wrong")]))]
    run = SimpleNamespace(config=config, prompts=make_prompts(1), prompt_ids=[prompt])
    for share in (False, True):
        batch = train_rl.collate(groups, make_prompts(1), [prompt])
        if share:
            batch = train_rl.batch_of(run, groups)
        distances.append((logprobs_of_row_1([0, 1], batch) - logprobs_of_row_1([1], batch)).abs().max())
    assert distances[0] > WRONG_EXPERTS and distances[1] < ROUNDING
    assert torch.equal(batch.routed_experts[1][3:], completions[1].routed_experts[3:])
    run.config = settings("algorithm.router_replay=r3", "train.share_prompts=false")
    batch = train_rl.batch_of(run, groups)
    assert all(a is c.routed_experts for a, c in zip(batch.routed_experts, completions))


# ---- the old-logprob pass, route mismatch ------------------------------------------------------------------


def settings(*overrides: str) -> train_rl.Config:
    return make_config(f"rollout.temperature={TEMPERATURE}", *overrides)


def run_old_pass(folder, model, routes, *overrides, rows=EVERYTHING, **options):
    """Call forward_batch() on the completions, with the sampler's routes of each completion or None."""
    config = settings("model.dtype=float32", *overrides)
    policy = moe_model.build_policy(config.model, folder / model, None, torch.device("cpu"))
    batch = batch_of_rows(make_completions(), rows, padding=1)
    batch.routed_experts = None if routes is None else [routes[row] for row in rows]
    return train_rl.forward_batch(policy, batch, config, **({"keep_routes": True} | options))


@pytest.mark.parametrize("other", ["reference", "teacher"])
@pytest.mark.parametrize("replay", ["r2", "r3"])
def test_another_model_than_the_policy_uses_its_own_router(replay, other, folder, one_rank):
    """The policy's routers differ from those of the file, so that its routes are not those of the model."""
    choice = (
        ["algorithm.kl_coef=0.1"] if other == "reference" else ["teacher.path=unused", "teacher.groups=every"]
    )
    config = settings(
        "model.dtype=float32", f"algorithm.router_replay={replay}", "train.minibatches_per_step=2", *choice
    )
    model, policy = (
        moe_model.build_policy(config.model, folder / "mixed", None, torch.device("cpu")) for _ in range(2)
    )
    for layer in LAYERS["mixed"]:
        policy.model.layers[layer].mlp.gate.weight.data.neg_()
    batch = batch_of_rows(make_completions(), EVERYTHING)
    batch.routed_experts = [c["routes"]["mixed"] for c in make_completions()]
    run = SimpleNamespace(
        config=config, policy=policy, reference=model if other == "reference" else None, state=TrainState(),
        extras={"teacher": SimpleNamespace(model=model)}, clock=M.Clock({}),
    )  # fmt: skip
    train_rl.add_old_outputs(run, batch, parity_is_due=False)
    assert (batch.old_routes is not None) == (replay == "r2"), "the updates of R2 replay them"
    for extra in train_rl.active(config):
        extra.after_rewards(run, batch, train_rl.forward_batch)
    logprobs = batch.ref_logprobs if other == "reference" else batch.extras["teacher"].logprobs
    plain = ForcedModel(folder / "mixed")
    for row, completion in enumerate(make_completions()):
        expected = plain(completion)[0].detach()
        assert_close(logprobs[row, : len(expected)], expected, rtol=0, atol=ROUNDING)
    assert (batch.old_logprobs - logprobs).abs().max() > WRONG_EXPERTS


def test_each_replay_takes_its_own_routes():
    batch = SimpleNamespace(old_routes=["of the old pass"], routed_experts=["of the engine"])
    assert train_rl.routes_to_replay(batch, "off") is None
    assert train_rl.routes_to_replay(batch, "r2") is batch.old_routes
    assert train_rl.routes_to_replay(batch, "r3") is batch.routed_experts


def perturbed_routes(live: list[torch.Tensor], rng: random.Random) -> list[torch.Tensor]:
    """Copy and change routes, including rows of the prompts.

    A third of the rows gets another expert in one layer, a third another order of the experts, and a tenth
    no route.
    """
    copies = [ids.clone() for ids in live]
    for row in (row for ids in copies for row in ids):  # [L, K]
        draw = rng.random()
        if draw < 0.33:
            ids = row[rng.choice(LAYERS["mixed"])]
            ids[rng.randrange(3)] = rng.choice([e for e in range(6) if e not in ids.tolist()])
        elif draw < 0.66:
            for layer in LAYERS["mixed"]:
                row[layer] = row[layer][torch.tensor(rng.sample(range(3), 3))]
        elif draw < 0.76:
            row[:] = INVALID_ROUTE
    return copies


def slow_mismatch(live: torch.Tensor, sampled: torch.Tensor, completion: dict) -> list[float]:
    """Return 1 for each token whose row has another set of experts in some layer, 0 without a route."""
    result = []
    for t in range(len(completion["completion_ids"])):
        row = len(completion["prompt_ids"]) - 1 + t  # predicts token t
        pairs = zip(live[row].tolist(), sampled[row].tolist())
        differs = any(set(a) != set(b) for a, b in pairs)
        result.append(float(differs and sampled[row, 0, 0] != INVALID_ROUTE))
    return result


@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 10**6])
def test_route_mismatch_against_a_loop_over_tokens(micro_batch_tokens, folder, one_rank):
    completions = make_completions()
    policy = ForcedModel(folder / "mixed")
    with torch.no_grad():
        live = [policy(c)[1] for c in completions]
    sampled = perturbed_routes(live, random.Random(2))
    # Prompts are not shared, because the perturbed routes differ between the copies of a prompt.
    split = f"train.micro_batch_tokens={micro_batch_tokens}", "train.share_prompts=false"
    outputs = run_old_pass(folder, "mixed", sampled, *split, rows=SHUFFLED)
    expected = [slow_mismatch(live[row], sampled[row], completions[row]) for row in SHUFFLED]
    assert all(torch.equal(ids, live[row]) for ids, row in zip(outputs.routes, SHUFFLED))
    without = run_old_pass(folder, "mixed", sampled, *split, rows=SHUFFLED, keep_routes=False)
    assert without.routes is None and torch.equal(without.logprobs, outputs.logprobs)
    for mismatch, values in zip(outputs.route_mismatch, expected):
        assert mismatch.tolist() == values + [0.0] * (len(mismatch) - len(values))
    assert 0.1 < sum(map(sum, expected)) / sum(map(len, expected)) < 0.6
    reordered = [ids.flip(-1) for ids in sampled]
    outputs_of_reordered = run_old_pass(folder, "mixed", reordered, *split, rows=SHUFFLED)
    assert torch.equal(outputs_of_reordered.route_mismatch, outputs.route_mismatch)
    replayed = run_old_pass(folder, "mixed", sampled, *split, "algorithm.router_replay=r3", rows=SHUFFLED)
    assert not replayed.route_mismatch.any()
    valid = [ids[:, 0, 0] != INVALID_ROUTE for ids in sampled]
    for used, row in zip(replayed.routes, SHUFFLED):
        assert torch.equal(used[valid[row]], sampled[row][valid[row]]) and (used < 6).all()


# ---- metrics of the mismatch -------------------------------------------------------------------------------


def slow_statistics(old: float, rollout: float) -> dict[str, float]:
    d = old - rollout
    weight = math.exp(min(d, 40.0))
    return {
        "abs_dlogp": abs(d), "mismatch_k3": math.expm1(min(d, 40.0)) - d,
        "mismatch_extreme": float(abs(d) > math.log(2)), "mismatch_weight": weight,
        "mismatch_weight_sq": weight**2,
    }  # fmt: skip


def test_mismatch_statistics_of_single_tokens(float64):
    differences = [0.0, 1e-6, -1e-4, 0.3, -0.6, 0.69, 0.7, -0.7, 5.0, -20.0, 39.0, 41.0, 800.0, -800.0]
    statistics = M.mismatch_statistics(torch.tensor([differences]) - 2.0, torch.full((1, 14), -2.0))
    expected = [slow_statistics(d - 2.0, -2.0) for d in differences]
    assert statistics.keys() == expected[0].keys()
    for name, values in statistics.items():
        assert_close(values[0], torch.tensor([one[name] for one in expected]), rtol=1e-12, atol=1e-18)
    single = M.mismatch_statistics(torch.tensor([differences]).float(), torch.zeros(1, 14).float())
    assert all(values.isfinite().all() for values in single.values()) and (single["mismatch_k3"] >= 0).all()
    # In float32, exp(d) - 1 - d would be rounding only at d = 1e-4; the value is 5e-9.
    assert single["mismatch_k3"][0, 2].item() == pytest.approx(5e-9, rel=1e-2)
    moments = {"mismatch_weight": 0.5, "mismatch_weight_sq": 1.0, "mismatch_weight/entropy_group_0": 0.0}
    sizes = M.effective_sample_size(moments | {"mismatch_weight_sq/entropy_group_0": 0.0})
    assert sizes.pop("mismatch_ess") == 0.25 and math.isnan(sizes.pop("mismatch_ess/entropy_group_0"))


# ---- checks ------------------------------------------------------------------------------------------------


def gate_steps(k3s, limit, patience) -> tuple[list, list[int]]:
    """Return the results of mismatch_gate() for each step, and the counts. k3 None: a step without update."""
    config = settings(f"algorithm.mismatch_gate={limit}", f"algorithm.mismatch_patience={patience}")
    state = SimpleNamespace(step=7, steps_above_gate=0)
    results, counts = [], []
    for k3 in k3s:
        results.append(mismatch_gate({} if k3 is None else {"mismatch_k3": k3}, state, config))
        counts.append(state.steps_above_gate)
    return results, counts


def test_the_gate_warns_and_stops_after_its_patience(one_rank, capsys):
    results, counts = gate_steps([0.3, 0.3, 0.1, 0.2, 0.0, 0.3, 0.21, 0.3], limit=0.2, patience=3)
    assert counts == [1, 2, 0, 0, 0, 1, 2, 3]  # 0.2 does not exceed the gate
    assert results[:-1] == [None] * 7
    warnings = capsys.readouterr().out.splitlines()
    assert len(warnings) == 1 and "algorithm.mismatch_gate" in warnings[0]  # said once
    assert all(figure in warnings[0] for figure in ("0.3", "1 steps", "step 7"))
    names = ("router_replay=r3", "rollout_correction", "mismatch_patience", "mismatch_gate")
    for name in [f"algorithm.{name}" for name in names] + ["rollout.fp8=off", "rollout.dtype=float32"]:
        assert name in results[-1]
    assert "0.3" in results[-1] and "3 steps" in results[-1]


@pytest.mark.parametrize(
    "k3s, limit, patience, counts, num_warnings",
    [
        ([0.3] * 30, 0.2, 0, list(range(1, 31)), 1),  # patience 0 never stops, and warns once
        ([1e9, 0.3, None], 0, 1, [0, 0, 0], 0),  # limit 0 is off
        ([0.1, None, 0.3], 0.2, 1, [0, 0, 1], 0),
        ([0.3, None, math.nan], 0.2, 2, [1, 1, 2], 1),  # a step without update leaves the count
    ],
)
def test_the_gate_counts_steps(k3s, limit, patience, counts, num_warnings, one_rank, capsys):
    results, actual = gate_steps(k3s, limit, patience)
    assert actual == counts and results[:-1] == [None] * (len(k3s) - 1)
    assert (results[-1] is not None) == bool(limit and patience)
    assert len(capsys.readouterr().out.splitlines()) == num_warnings


def test_a_skew_counts_like_the_kl_and_only_if_it_is_measured(one_rank, capsys):
    """Either gate raises the count; a step in which a metric is missing does not measure it."""
    config = settings(
        "algorithm.mismatch_gate=0.2", "algorithm.skew_gate=0.01", "algorithm.mismatch_patience=4"
    )
    state = SimpleNamespace(step=7, steps_above_gate=0)
    counts = []
    steps = [
        {"mismatch_k3": 1e-4, "skew_positive": 0.01, "skew_negative": -0.01},  # on the gate
        {"mismatch_k3": 1e-4, "skew_positive": 0.002, "skew_negative": -0.011},
        {"mismatch_k3": 0.3, "skew_positive": 0.0},
        {},
        {"mismatch_k3": 1e-4, "skew_positive": math.nan},
    ]
    for metrics in steps:
        assert mismatch_gate(metrics, state, config) is None
        counts.append(state.steps_above_gate)
    assert counts == [0, 1, 2, 2, 3]
    (first,) = capsys.readouterr().out.splitlines()
    assert "algorithm.skew_gate" in first and "-0.011" in first and "mismatch_gate" not in first
    problem = mismatch_gate({"skew_positive": 0.02}, state, config)
    assert "0.02" in problem and "raise algorithm.skew_gate" in problem
    assert "centering.enabled" in problem


def test_invalid_routes_are_tolerated_up_to_the_threshold(one_rank):
    for invalid, total, limit in ((0, 0, 0.0), (0, 100, 0.0), (2, 200, 0.01), (50, 200, 0.25)):
        check_routes(invalid, total, limit)
        with pytest.raises(RuntimeError, match=f"{invalid + 1} of {total}") as error:
            check_routes(invalid + 1, total, limit)
        for name in ("max_invalid_routes", "router_replay=off", "capture_routes=off"):
            assert name in str(error.value)


def parity(differences: list[float], *overrides: str) -> None:
    """Call check_parity() on a batch of 100 tokens, with 20 places of padding that differ by 9 nats."""
    d = torch.tensor(differences + [9.0] * 20).view(10, 12)
    batch = make_batch([[0] * 12] * 10, rollout_logprobs=[[-2.0] * 12] * 10)
    batch.response_mask = torch.arange(120).view(10, 12) < 100
    config = settings("rollout.parity_mean=0.1", "rollout.parity_p99=1e-3", *overrides)
    check_parity(d - 2.0, batch, config, step=4)


FLOAT32 = ("model.dtype=float32", "rollout.dtype=float32")


def test_parity_in_float32_checks_the_tail(one_rank):
    parity([5e-4] * 100, *FLOAT32)
    parity([5e-4] * 99 + [5.0], *FLOAT32)  # one of 100 lies above the quantile; the mean is 0.05
    parity([-5.0] + [0.0] * 99, *FLOAT32)
    engine = [f"rollout.{name}" for name in ("dtype=bfloat16", "fp8=simulate", "kv_cache_fp8=true")]
    for differences in ([0.0] * 98 + [5e-3] * 2, [0.0] * 90 + [-2e-3] * 10):
        with pytest.raises(RuntimeError, match="parity_p99 0.001"):
            parity(differences, *FLOAT32)
        for rounded in ("model.dtype=bfloat16", *engine):
            parity(differences, *FLOAT32, rounded)


@pytest.mark.parametrize("dtypes", [FLOAT32, ("model.dtype=bfloat16",)])
def test_parity_checks_the_mean(dtypes, one_rank):
    for differences in ([0.11, -0.11] * 50, [0.0] * 99 + [12.0], [float("nan")] + [0.0] * 99):
        with pytest.raises(RuntimeError, match="parity_mean 0.1"):
            parity(differences, *dtypes)
    parity([0.0] * 99 + [-9.0], *dtypes)


# ---- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, value", [("off", "off"), ("'off'", "off"), ("r2", "r2"), ("r3", "r3")])
def test_replay_in_a_yaml(text, value, tmp_path):
    """YAML reads a bare off as a boolean."""
    (tmp_path / "a.yaml").write_text(f"algorithm:\n  router_replay: {text}\n")
    file = ["--config", str(tmp_path / "a.yaml")]
    assert make_config(*file).algorithm.router_replay == value
    assert make_config(*file, "algorithm.router_replay=off").algorithm.router_replay == "off"


@pytest.mark.parametrize(
    "change, expected",
    [
        ("algorithm.router_replay=off", [0, 3, 6]),
        ("algorithm.router_replay=r2", [0, 3, 6]),
        ("rollout.check_every=0", [0]),
        ("rollout.capture_routes=off", []),
        ("algorithm.router_replay=r3", list(range(8))),
        ("rollout.capture_routes=on", list(range(8))),
    ],
)
def test_routes_are_captured_at_steps_that_replay_or_check_them(change, expected):
    config = settings("rollout.check_every=3", change)
    assert [step for step in range(8) if captures_routes(config, step)] == expected


@pytest.mark.parametrize("replay, minibatches, warns", [("r2", 1, True), ("r2", 2, False), ("r3", 1, False)])
def test_r2_without_off_policy_updates_warns(replay, minibatches, warns):
    config = settings(f"algorithm.router_replay={replay}", f"train.minibatches_per_step={minibatches}")
    assert any("algorithm.router_replay" in line for line in config_warnings(config)) == warns


def test_replay_of_a_dense_model_is_refused():
    dense, moe = (kind(max_position_embeddings=100000) for kind in (Qwen3Config, Qwen3MoeConfig))
    for replay in ("r2", "r3"):
        with pytest.raises(ValueError, match="algorithm.router_replay"):
            lifecycle.check_model(settings(f"algorithm.router_replay={replay}"), dense)
    lifecycle.check_model(settings(), dense)
    with pytest.raises(ValueError, match="attention_bias"):  # vLLM's o_proj has none
        lifecycle.check_model(settings(), type(dense)(**dense.to_dict() | {"attention_bias": True}))
    lifecycle.check_model(settings("algorithm.router_replay=r3"), moe)
    assert settings().rollout.capture_routes == "auto"
