"""Score centering: the expected gradient over all completions, by brute force over a small vocabulary.

A tabular policy has one row of logits per prefix: VOCAB tokens, completions of two tokens. All VOCAB^2
completions form a batch, and each advantage is multiplied by the probability that the engine samples the
completion, so that the gradient of the loss is minus the expected gradient. The oracle sums over completions
and over the vocabulary in loops, with s_v = e_v - p as the gradient of log p_v by the logits.
"""

import itertools
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import reference
import torch
from conftest import SMALL, assert_close, trained
from helpers import FakeRanks, make_batch, make_config, make_group, make_prompts, rows_of

import moe_model
import train_rl
from batch import PolicyOutputs, Request
from extras.base import active
from kernels.linear_logprob_entropy import linear_logprob_entropy, topk_logprobs
from rollout import topk_of
from settings import Config

VOCAB = 5
COMPLETIONS = list(itertools.product(range(VOCAB), repeat=2))
CORRECTIONS = ("none", "token_tis", "token_mask")  # corrections per completion are refused
BOUNDS = {"rollout_correction_cap": 1.4, "rollout_correction_floor": 0.7}
LIKE_THE_SOURCE = {"clip_mode": "none", "loss_agg": "sequence_sum"}


def config_of(topk: int = VOCAB, **algorithm) -> Config:
    bounds = BOUNDS if algorithm.get("rollout_correction", "none") != "none" else {}
    algorithm = LIKE_THE_SOURCE | bounds | {"centering__enabled": True} | algorithm
    return make_config(section="algorithm", centering__topk=topk, **algorithm)


def table(seed: int, spread: float = 1.0) -> list[list[float]]:
    """Draw log-probabilities of the tokens after each prefix: the empty one, then each first token."""
    rng = random.Random(seed)
    logits = torch.tensor([[rng.gauss(0, spread) for _ in range(VOCAB)] for _ in range(1 + VOCAB)])
    return logits.double().log_softmax(dim=1).tolist()


POLICY = table(1)
OLD = table(2, 0.8)
ENGINE = table(3, 1.2)
ADVANTAGES = {y: random.Random(str(y)).gauss(0, 1) for y in COMPLETIONS}


def prefixes_of(completion: tuple[int, int]) -> tuple[int, int]:
    """Return the row of the table of each token."""
    return 0, 1 + completion[0]


def logprobs_of(table: list[list[float]], completion: tuple[int, int]) -> list[float]:
    return [table[row][token] for row, token in zip(prefixes_of(completion), completion)]


def heads(engine: list[list[float]], topk: int) -> list[list[int]]:
    """Return the engine's most likely tokens after each prefix."""
    return [sorted(range(VOCAB), key=lambda v: -row[v])[:topk] for row in engine]


def expected_gradient(config: Config, policy=POLICY, old=OLD, engine=ENGINE, advantages=ADVANTAGES):
    """Return the gradient by the logits of the tables that train_rl expects over all completions.

    old None: an update without an old-logprob pass.
    """
    topk = config.centering.topk
    logits = torch.tensor(policy).requires_grad_()
    table = logits.log_softmax(dim=1)
    weights = {y: math.exp(sum(logprobs_of(engine, y))) for y in COMPLETIONS}
    batch = make_batch(
        [list(y) for y in COMPLETIONS],
        rollout_logprobs=[logprobs_of(engine, y) for y in COMPLETIONS],
        advantages=[[weights[y] * advantages[y]] * 2 for y in COMPLETIONS],
    )
    ids = [[heads(engine, topk)[row] for row in prefixes_of(y)] for y in COMPLETIONS]
    places = list(zip(ids, map(prefixes_of, COMPLETIONS)))

    def topk_rows(table: torch.Tensor) -> list[torch.Tensor]:
        return [torch.stack([table[row][v] for row, v in zip(rows, tokens)]) for tokens, rows in places]

    batch.topk_ids = [torch.tensor(tokens) for tokens in ids]
    batch.topk_logprobs = topk_rows(torch.tensor(engine))
    if old is not None:
        batch.old_logprobs = torch.tensor([logprobs_of(old, y) for y in COMPLETIONS])
        batch.extras["centering"] = topk_rows(torch.tensor(old))
    logprobs = torch.stack([table[list(prefixes_of(y)), list(y)] for y in COMPLETIONS])
    counts = torch.tensor([1, 1])
    topk = topk_rows(table) if config.centering.enabled else None
    outputs = PolicyOutputs(logprobs, torch.zeros_like(logprobs), topk_logprobs=topk)
    rows = list(range(len(COMPLETIONS)))
    loss, _ = train_rl.micro_batch_loss(outputs, batch, rows, counts, math.log(VOCAB), config)
    loss.backward()
    return -logits.grad


# ---- the oracle --------------------------------------------------------------------------------------------


def weight_of(p: float, old: float, q: float, config: Config) -> float:
    """Return the factor of A grad log p of a token with these probabilities."""
    algorithm = config.algorithm
    weight = 1.0
    if algorithm.rollout_correction != "none":
        bounds = algorithm.rollout_correction_cap, algorithm.rollout_correction_floor
        weight = reference.correction_weight(
            [math.log(old)], [math.log(q)], 0, algorithm.rollout_correction, *bounds
        )
    ratio = p / old
    if algorithm.clip_mode == "weight":
        ratio = max(1 - algorithm.clip_eps_low, min(ratio, 1 + algorithm.clip_eps_high))
    return weight * ratio


def oracle(config: Config, policy=POLICY, old=OLD, engine=ENGINE, advantages=ADVANTAGES) -> list[list[float]]:
    """Return E_{y ~ q} sum_t A(y) ( W_y s_y - sum_v q_v W_v s_v ) by the logits, in loops.

    Tokens outside of the head have q_v = rho p_v, and old_v in proportion to p_v.
    """
    algorithm = config.algorithm
    old = policy if old is None else old
    old = engine if algorithm.old_policy == "rollout" else old
    gradient = [[0.0] * VOCAB for _ in policy]
    for y in COMPLETIONS:
        factor = math.exp(sum(logprobs_of(engine, y))) * advantages[y]
        for row, token in zip(prefixes_of(y), y):
            p, o, q = ([math.exp(x) for x in table[row]] for table in (policy, old, engine))
            weight = weight_of(p[token], o[token], q[token], config)
            head = heads(engine, config.centering.topk)[row]
            p_tail, o_tail, q_tail = (1 - sum(x[v] for v in head) for x in (p, o, q))
            for v in range(VOCAB):  # the score of token v is e_v - p
                if v not in head:
                    o[v], q[v] = o_tail / p_tail * p[v], q_tail / p_tail * p[v]
                share = (v == token) * weight - q[v] * weight_of(p[v], o[v], q[v], config)
                for u in range(VOCAB):
                    gradient[row][u] += factor * share * ((u == v) - p[u])
    return gradient


# ---- the loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [VOCAB, 3, 1])
@pytest.mark.parametrize("clip_mode", ["none", "weight"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_expected_gradient_is_the_oracles(correction, clip_mode, topk, float64):
    config = config_of(topk, rollout_correction=correction, clip_mode=clip_mode)
    for old in (OLD, None):  # None: a single update, whose policy is the old one
        assert_close(expected_gradient(config, old=old), oracle(config, old=old))


@pytest.mark.parametrize("topk", [VOCAB, 2])
def test_the_expected_gradient_with_the_engine_as_the_old_policy(topk, float64):
    """CISPO with the ratio p / q: the weight min(p / q, C) of the source."""
    clip = {"clip_eps_low": 1.0, "clip_eps_high": 0.5}
    config = config_of(topk, clip_mode="weight", old_policy="rollout", **clip)
    gradient = expected_gradient(config)
    assert_close(gradient, oracle(config))
    source = config_of(topk, rollout_correction="token_tis", **{"rollout_correction_cap": 1.5} | FLOOR)
    assert_close(expected_gradient(source, old=None), gradient, rtol=1e-12)


FLOOR = {"rollout_correction_floor": 0.0}


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_an_advantage_of_the_prefix_alone_moves_nothing(correction, float64):
    """What remains is a covariance. RL-ZVP gives such advantages, which are pure drift without centering."""
    constant = dict.fromkeys(COMPLETIONS, 0.7)
    config = config_of(rollout_correction=correction)
    assert_close(expected_gradient(config, old=None, advantages=constant), [[0.0] * VOCAB] * (1 + VOCAB))
    plain = config_of(rollout_correction=correction, centering__enabled=False)
    assert expected_gradient(plain, old=None, advantages=constant).abs().max() > 0.03


def test_probabilities_that_underflow_give_finite_gradients():
    """In float32 a head of nearly all probability has a tail of rounding only."""
    certain = [[0.0, -30.0, -60.0, -90.0, -110.0]] * (1 + VOCAB)
    for correction in CORRECTIONS:
        for topk in (VOCAB, 2):
            config = config_of(topk, rollout_correction=correction)
            gradient = expected_gradient(config, policy=table(1), old=certain, engine=certain)
            assert gradient.isfinite().all()


# ---- log-probabilities of further tokens -------------------------------------------------------------------


@pytest.mark.parametrize("vocab, k", [(7, 7), (300, 4)])  # all logits; gathered rows of the head
def test_logprobs_of_further_tokens_and_their_gradient(vocab, k, float64, monkeypatch):
    monkeypatch.setattr("kernels.linear_logprob_entropy.ROW_ELEMENTS", {"cpu": 3 * 5 * 6})  # blocks of 3 rows
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 6, generator=generator).requires_grad_()
    weight = torch.randn(vocab, 6, generator=generator).requires_grad_()
    targets = torch.randint(vocab, (8,), generator=generator)
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(8)])
    scale = torch.randn(8, k, generator=generator)
    logprobs, _ = linear_logprob_entropy(x, weight, targets, 0.7, "chunked")
    values = topk_logprobs(x, weight, ids.int(), targets, logprobs, 0.7)
    (values * scale).sum().backward()
    gradients = [x.grad, weight.grad]
    x.grad = weight.grad = None
    expected = (x @ weight.T / 0.7).log_softmax(dim=1).gather(1, ids)
    (expected * scale).sum().backward()
    assert_close(values, expected)
    assert_close(gradients[0], x.grad)
    assert_close(gradients[1], weight.grad)


def test_the_engines_tokens_reach_the_update_and_the_old_policy(monkeypatch):
    """collate() and add_old_outputs(), against log-softmax; several updates need the policy before them."""
    from transformers import Qwen3Config

    FakeRanks(1).install(monkeypatch)
    size = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = Qwen3Config(vocab_size=40, num_hidden_layers=1, intermediate_size=8, **size)
    policy = moe_model.Policy(model)
    moe_model.random_weights(policy, seed=0)
    config = config_of(6, train__minibatches_per_step=2, train__micro_batch_tokens=8)
    generator = torch.Generator().manual_seed(1)
    group = make_group(0, 0, [3, 1, 2], [True, False, True])
    group.completions = [
        replace(
            completion,
            topk_ids=torch.rand(num_tokens, 40, generator=generator).topk(6).indices.int(),
            topk_logprobs=torch.rand(num_tokens, 6, generator=generator).log(),
        )
        for num_tokens, completion in zip([3, 1, 2], group.completions)
    ]
    batch = train_rl.collate([group], make_prompts(1), [[1, 2]])
    run = SimpleNamespace(config=config, policy=policy, reference=None)
    train_rl.add_old_outputs(run, batch, parity_is_due=False)
    for row, completion in enumerate(group.completions):
        assert torch.equal(batch.topk_ids[row], completion.topk_ids)
        assert torch.equal(batch.topk_logprobs[row], completion.topk_logprobs)
        packed = moe_model.pack([[1, 2]], [completion.token_ids], "cpu")
        with torch.no_grad():
            x_ND = policy.hidden(packed)[0][packed.predictor_index]
            log_p = (x_ND @ policy.lm_head.weight.T).log_softmax(dim=1)
        expected = log_p.gather(1, completion.topk_ids.long())
        torch.testing.assert_close(batch.extras["centering"][row], expected, rtol=1e-4, atol=1e-5)  # float32


@pytest.mark.slow
def test_a_run_on_two_ranks_centers(demo_model, tmp_path):
    """The whole vocabulary has a probability of 1 (float32, a sum of 98 terms)."""
    trained(
        *SMALL, "--config", "experiments/methods/score_centering.yaml",
        "train.minibatches_per_step=2", "train.num_steps=2", "rollout.fp8=simulate",
        "rollout.simulate_format=mxfp4", "rollout.parity_mean=0.2", f"run.dir={tmp_path}/run",
    )  # fmt: skip
    steps = [row for row in rows_of(tmp_path / "run") if "topk_mass" in row]
    assert len(steps) == 2
    for step in steps:
        assert step["topk_mass"] == pytest.approx(1, abs=1e-4)
        assert step["mismatch_k3"] > 1e-4 and step["grad_norm"] > 0


@pytest.mark.parametrize("topk, expected", [
    (6, 32 * 40 * 6 + 4 * 300 * 16),  # k log-probabilities and more of each token, and a gradient of the head
    (40, 32 * (40 * 40 + 2 * 4 * 300)),  # more than an eighth of the vocabulary: all logits, their gradient
])  # fmt: skip
def test_the_plan_counts_the_memory_of_centering(topk, expected):
    hf_config = SimpleNamespace(vocab_size=300, hidden_size=16)
    config = config_of(topk)
    assert [e.memory(config, hf_config, 32) for e in active(config)] == [{"on the way back": expected}]


# ---- the engine's side -------------------------------------------------------------------------------------


def test_the_engines_flat_list_becomes_a_table():
    flat = SimpleNamespace(token_ids=[5, 5, 1, 2, 7, 2], logprobs=[-0.5, -0.5, -2.0, -4.0, -0.1, -4.0])
    ids, logprobs = topk_of(flat, 2)
    assert ids.tolist() == [[5, 1], [7, 2]]
    assert_close(logprobs, [[-0.5, -2.0], [-0.1, -4.0]], rtol=1e-6)
    flat.logprobs[2] = -math.inf  # as top-p sampling leaves it
    with pytest.raises(RuntimeError, match="top-p"):
        topk_of(flat, 2)


def test_more_tokens_than_the_vocabulary_are_refused():
    model = SimpleNamespace(vocab_size=92)
    (centering,) = active(config_of())
    centering.check(SimpleNamespace(config=config_of(92), hf_config=model))
    with pytest.raises(ValueError, match=r"centering\.topk 93.*92"):
        centering.check(SimpleNamespace(config=config_of(93), hf_config=model))
    assert centering.engine_options(config_of(92)) == {"max_logprobs": 92}


def test_requests_of_a_rollout_ask_for_the_likeliest_tokens():
    requests = [Request([slot], slot, 1.0, 4, group=slot) for slot in range(3)]
    for config, topk in ((config_of(6), 6), (make_config("centering.topk=6"), 0)):
        asked = requests
        for extra in active(config):
            asked = extra.requests(SimpleNamespace(config=config), [], asked)
        assert asked == [replace(request, topk=topk) for request in requests]
