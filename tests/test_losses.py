"""Every value of every axis of the method against the equations of reference.py, and how methods meet.

A batch goes through micro_batch_loss() or token_advantages() as in a run; the loss, its gradient and the
statistics are compared. A settings dict names what differs from the defaults.
"""

import ast
import inspect
import itertools
import math
import random
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

import pytest
import reference
import torch
from conftest import ROOT, assert_close
from helpers import FakeRanks

import train_rl
from data.prompts import Prompt
from reward import RewardSettings, Verdict
from rollout import Completion
from train_rl import AlgorithmSettings, Config

MAX_NEW_TOKENS, LOG_VOCAB = 13, math.log(50)


def axes_of(section) -> dict[str, tuple[str, ...]]:
    """{name: values} of the Literal settings of a section."""
    fields = {name: info.annotation for name, info in section.model_fields.items()}
    return {name: get_args(kind) for name, kind in fields.items() if get_origin(kind) is Literal}


AXES = axes_of(AlgorithmSettings)
UNCLIPPED = ("soft", "gamma", "none")  # clip modes in which no token loses its gradient
BY_WEIGHT = ("weight", "total_variation", "binary_kl", "gamma")  # gain sg[weight] A log pi
RATIOS = list(itertools.product(AXES["ratio_level"], AXES["ratio_form"]))
ALL_SHARES = [(0.2, 0.8), (0.1, 0.3, 0.6), (1.0,), (0.25, 0.25, 0.25, 0.25)]


def config_of(**algorithm) -> Config:
    return Config.model_validate({"algorithm": algorithm, "rollout": {"max_new_tokens": MAX_NEW_TOKENS}})


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    """Some normalisations and masks are over the tokens of all ranks."""
    FakeRanks(1).install(monkeypatch)


# ---- 1. Ragged lists through the project and through the reference -----------------------------------------


def random_case(seed: int, spread: float, lengths: list[int] | None = None) -> dict:
    """Ragged lists of some completions; spread is the size of log ratios in nats.

    Advantages of a completion have one sign. Some entropies are equal, some are 0.
    """
    rng = random.Random(seed)
    lengths = lengths or [rng.choice([0, 1, 1, 2, 5, 8]) for _ in range(rng.randint(1, 5))]
    signs = [rng.choice([1, 1, -1, -1, 0]) for _ in lengths]
    near = lambda rows: [[x + rng.uniform(-spread, spread) for x in row] for row in rows]
    old = [[-rng.expovariate(1.0) for _ in range(n)] for n in lengths]
    return {
        "logprobs": near(old),
        "old_logprobs": old,
        "rollout_logprobs": [[x + rng.uniform(-0.3, 0.3) for x in row] for row in old],
        "ref_logprobs": [[x + rng.uniform(-1, 1) for x in row] for row in old],
        "advantages": [[sign * rng.expovariate(1.0) for _ in range(n)] for sign, n in zip(signs, lengths)],
        "entropies": [[rng.choice([0.0, 0.7, rng.uniform(0, 3)]) for _ in range(n)] for n in lengths],
    }


def padded(rows: list[list[float]], width: int, filler: float = 0.0) -> torch.Tensor:
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows]).reshape(len(rows), width)


def batch_of(case: dict, padding: int = 0) -> train_rl.RolloutBatch:
    lengths = [len(row) for row in case["old_logprobs"]]
    width = max([1, *lengths]) + padding
    of = {name: padded(rows, width, filler=9.0) for name, rows in case.items()}  # it must not matter
    penalised = (of["penalised"] == 1) if "penalised" in case else None
    nothing = [None] * len(lengths)
    return train_rl.RolloutBatch(
        prompts=nothing, prompt_ids=nothing, completion_ids=[[0] * n for n in lengths], finish_reason=nothing,
        verdicts=nothing, response_mask=torch.arange(width) < torch.tensor(lengths).view(-1, 1),
        rollout_logprobs=of["rollout_logprobs"], group_index=torch.zeros(len(lengths), dtype=torch.int64),
        minibatch=torch.zeros(len(lengths), dtype=torch.int64),
        valid=torch.ones(len(lengths), dtype=torch.bool), old_logprobs=of["old_logprobs"],
        entropy=of["entropies"], advantages=of["advantages"], ref_logprobs=of["ref_logprobs"],
        penalised=penalised,
    )  # fmt: skip


def run_loss(case: dict, config: Config, padding=0, others=(0, 0)):
    """Loss, gradient by token, {statistic: by token} of micro_batch_loss(); the batch must stay as it was.

    others: completions and tokens of the update in other micro-batches.
    """
    batch = batch_of(case, padding)
    mask = batch.response_mask
    if config.algorithm.kl_coef == 0:
        batch.ref_logprobs = None
    logprobs = padded(case["logprobs"], mask.shape[1]).requires_grad_()
    given = {name: x for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    kept = {name: x.clone() for name, x in given.items()}
    counts = torch.tensor([len(mask) + others[0], int(mask.sum()) + others[1]])
    rows = list(range(len(mask)))
    loss, statistics = train_rl.micro_batch_loss(
        logprobs, torch.full_like(logprobs, math.nan), batch, rows, counts, LOG_VOCAB, config
    )
    loss.backward()
    for name, tensor in given.items():
        assert torch.equal(tensor, kept[name]), f"{name} was written to"
    assert loss.shape == () and not any(value.requires_grad for value in statistics.values())
    assert (logprobs.grad[~mask] == 0).all()
    return loss.detach(), logprobs.grad[mask], {name: value[mask] for name, value in statistics.items()}


def reference_settings(config: Config, case: dict, others=(0, 0)) -> dict:
    rows = case["old_logprobs"]
    return (
        config.algorithm.model_dump()
        | {
            "max_new_tokens": config.rollout.max_new_tokens,
            "log_vocab": LOG_VOCAB,
            "num_completions": len(rows) + others[0],
            "num_tokens": sum(map(len, rows)) + others[1],
        }
        | ({"penalised": case["penalised"]} if "penalised" in case else {})
    )


def corrected(case: dict, config: Config) -> list[list[float]]:
    """The advantages with the weights of the rollout correction and of the off-policy mask."""
    algorithm = config.algorithm
    bounds = algorithm.rollout_correction_cap, algorithm.rollout_correction_floor
    of_completions = zip(case["advantages"], case["logprobs"], case["old_logprobs"], case["rollout_logprobs"])
    return [
        [
            a
            * reference.correction_weight(old, rollout, t, algorithm.rollout_correction, *bounds)
            * reference.off_policy_mask(new, rollout, a, algorithm.off_policy_mask)
            for t, a in enumerate(row)
        ]
        for row, new, old, rollout in of_completions
    ]


def assert_matches_reference(case: dict, config: Config, padding=0, others=(0, 0)) -> list[float]:
    """Loss, gradient and statistics; returns which tokens were clipped."""
    loss, gradient, statistics = run_loss(case, config, padding, others)
    settings = reference_settings(config, case, others)
    lists = [case["logprobs"], case["old_logprobs"], corrected(case, config), case["entropies"]]
    assert_close(loss, -reference.policy_objective(*lists, case["ref_logprobs"], settings))
    slopes = reference.policy_objective_slope(*lists, case["ref_logprobs"], settings)
    assert_close(gradient, [-x for row in slopes for x in row])
    terms = {(i, t): one for i, t, _, one in reference.policy_terms(*lists, settings)}
    terms = [one for _, one in sorted(terms.items())]
    assert_close(statistics["ratio"], [one.ratio for one in terms])
    assert statistics["clipped"].tolist() == [float(one.clipped) for one in terms]
    assert ("clip_eps" in statistics) == (config.algorithm.clip_mode == "entropy_adaptive")
    if "clip_eps" in statistics:
        assert_close(statistics["clip_eps"], [one.clip_eps for one in terms])
    groups = [
        reference.entropy_groups(row, config.algorithm.entropy_groups) for row in case["entropies"]
    ]  # of each completion
    numbers = [
        next(k for k, tau in enumerate(groups[i]) if t in tau)
        for i, row in enumerate(case["entropies"])
        for t in range(len(row))
    ]
    assert statistics["entropy_group"].tolist() == numbers
    if "masked" in statistics:
        weighed = zip(sum(case["advantages"], []), sum(lists[2], []), statistics["masked"].tolist())
        assert all(masked == (now == 0) for before, now, masked in weighed if before != 0)
    return statistics["clipped"].tolist()


# ---- 2. Every value of every axis --------------------------------------------------------------------------


@pytest.mark.parametrize("clip_mode", AXES["clip_mode"])
@pytest.mark.parametrize("ratio_level, ratio_form", RATIOS)
def test_loss_and_gradient_of_every_combination(ratio_level, ratio_form, clip_mode, float64):
    """Levels, forms, clip modes and aggregations all together; the other axes take turns."""
    clipped = []
    for seed, loss_agg in enumerate(AXES["loss_agg"] * 4):
        config = config_of(
            ratio_level=ratio_level, ratio_form=ratio_form, clip_mode=clip_mode, loss_agg=loss_agg,
            entropy_groups=ALL_SHARES[seed % 3], entropy_clip_form=AXES["entropy_clip_form"][seed // 2 % 3],
            entropy_clip_coef=0.4, clip_eps_low=0.1, clip_eps_high=0.2 + 0.01 * seed,
            rollout_correction=AXES["rollout_correction"][(seed + seed // 6) % 6],
            rollout_correction_cap=1.1, rollout_correction_floor=0.9 * (seed % 2), kl_coef=0.3 * (seed // 10),
            kl_form=AXES["kl_form"][seed % 2], off_policy_mask=0.05 * (seed % 3 == 2),
            clip_cap=None if seed % 3 else 1.5, soft_temperatures=(0.7, 3.0), gamma_powers=(1.0, 2.5),
            gamma_decays=(2.0, 0.5), covariance_kl_coef=0.7,
        )  # fmt: skip
        case = random_case(seed, spread=0.4)
        if seed % 4 == 3:
            case["penalised"] = [[float(t % 2) for t in range(len(row))] for row in case["logprobs"]]
        clipped += assert_matches_reference(case, config, padding=seed % 3, others=(seed % 5, seed % 7))
    assert (0 < sum(clipped) < len(clipped)) == (clip_mode not in UNCLIPPED), "both branches are reached"


@pytest.mark.parametrize("clip_mode", AXES["clip_mode"])
@pytest.mark.parametrize("ratio_level, ratio_form", RATIOS)
def test_ratios_of_many_orders_of_magnitude(ratio_level, ratio_form, clip_mode, float64):
    for seed in range(4):
        case = random_case(seed, spread=30.0, lengths=[3, 1, 6])
        config = config_of(ratio_level=ratio_level, ratio_form=ratio_form, clip_mode=clip_mode)
        assert_matches_reference(case, config)


@pytest.mark.parametrize("clip_mode", AXES["clip_mode"])
@pytest.mark.parametrize("loss_agg", AXES["loss_agg"])
@pytest.mark.parametrize(
    "lengths", [[1], [1, 1], [0, 3], [3, 0, 0], [2], [1, 2]], ids=lambda lengths: f"lengths {lengths}"
)
def test_short_and_empty_completions(lengths, loss_agg, clip_mode, float64):
    """Also with more entropy groups than tokens. A completion without tokens counts in N."""
    for seed, shares in enumerate(ALL_SHARES):
        levels = {"ratio_level": "entropy_group", "entropy_groups": shares, "clip_mode": clip_mode}
        config = config_of(loss_agg=loss_agg, ratio_form="stop_gradient", **levels)
        assert_matches_reference(random_case(seed, 0.4, lengths), config)


@pytest.mark.parametrize("loss_agg", AXES["loss_agg"])
@pytest.mark.parametrize("ratio_level", AXES["ratio_level"])
@pytest.mark.parametrize("num_rows", [0, 2])
def test_nothing_to_learn_from_is_a_loss_of_zero(num_rows, ratio_level, loss_agg, float64):
    """No rows, and rows without any token. Not NaN: a rank would spread it to all others."""
    case = {name: [[]] * num_rows for name in random_case(0, 0.1)}
    for clip_mode in AXES["clip_mode"]:
        config = config_of(ratio_level=ratio_level, loss_agg=loss_agg, clip_mode=clip_mode)
        loss, gradient, _ = run_loss(case, config, padding=2)
        assert loss == 0 and gradient.numel() == 0


@pytest.mark.parametrize("loss_agg", AXES["loss_agg"])
def test_weights_of_a_batch_sum_to_one_and_do_not_depend_on_how_it_is_split(loss_agg, float64):
    case = random_case(3, 0.3, [4, 1, 7, 2])
    config = config_of(loss_agg=loss_agg, ratio_level="entropy_group", clip_mode="none")
    total = sum(map(len, case["logprobs"]))
    whole, gradient, _ = run_loss(case, config)
    parts = []
    for rows in ([0, 2], [1], [3]):
        part = {name: [values[row] for row in rows] for name, values in case.items()}
        tokens = sum(map(len, part["logprobs"]))
        parts.append(run_loss(part, config, padding=1, others=(4 - len(rows), total - tokens)))
    assert_close(sum(loss for loss, _, _ in parts), whole)
    split = torch.cat([parts[0][1][:4], parts[1][1], parts[0][1][4:], parts[2][1]])
    assert_close(split, gradient)
    mask = batch_of(case).response_mask
    groups = train_rl.token_groups_of(batch_of(case).entropy, mask, config.algorithm)
    weights = train_rl.loss_weights(mask, groups, 4, total, MAX_NEW_TOKENS, loss_agg)
    sums = {"fixed_length": total / (4 * MAX_NEW_TOKENS), "sequence_sum": total / 4}
    assert_close(weights.sum(), sums.get(loss_agg, 1.0))


@pytest.mark.parametrize("mode", AXES["rollout_correction"])
def test_rollout_correction(mode, float64):
    old, rollout = [-1.0, -2.0, -0.5], [-1.3, -1.5, -1.4]  # product exp(0.7) = 2.01
    mask = torch.tensor([[True] * 3 + [False]])
    for cap, floor in itertools.product((0.5, 1.4, 2.0, 2.02, 9.0), (0.0, 0.4, 0.7, 1.3)):
        rows = [torch.tensor([row + [7.0 * k]]) for k, row in enumerate((old, rollout))]  # noise on padding
        if floor < cap:
            weights = train_rl.correction_weights(*rows, mask, mode, cap, floor)
            expected = [reference.correction_weight(old, rollout, t, mode, cap, floor) for t in range(3)]
            assert_close(weights[0, :3], expected)
    long = torch.zeros(1, 400)
    weights = train_rl.correction_weights(long, long - 1.0, long == 0, mode, 2.0)
    assert torch.isfinite(weights).all(), "a product of 400 ratios is beyond any float"


# ---- 3. Edges of the clip, groups --------------------------------------------------------------------------


def one_token(log_ratio: float, advantage: float, entropy: float = 0.0, num: int = 1) -> dict:
    """A completion of `num` tokens that are all alike."""
    rows = {"logprobs": log_ratio, "old_logprobs": 0.0, "rollout_logprobs": 0.0, "ref_logprobs": 0.0}
    rows |= {"advantages": advantage, "entropies": entropy}
    return {name: [[value] * num] for name, value in rows.items()}


def same_ratio_everywhere(near: float) -> tuple[float, float]:
    """A log ratio whose exponential is the same float in torch and in math, and that float."""
    candidate = math.log(near)
    for _ in range(1000):
        if torch.tensor([candidate]).exp().item() == math.exp(candidate):
            return candidate, math.exp(candidate)
        candidate = math.nextafter(candidate, 1.0)
    raise AssertionError("no such float")


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("near", [1.2, 0.8])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("clip_mode", ["fixed", "weight"])
@pytest.mark.parametrize("ratio_level", AXES["ratio_level"])
def test_a_ratio_on_the_clip_edge_and_one_ulp_beside_it(
    ratio_level, clip_mode, beyond, near, advantage, float64
):
    """On the edge it counts as not clipped. Only the edge is moved."""
    log_ratio, ratio = same_ratio_everywhere(near)
    edge = math.nextafter(ratio, ratio + beyond * (1.0 - ratio)) if beyond else ratio
    eps = abs(edge - 1.0)
    assert edge in (1.0 - eps, 1.0 + eps)
    for form in ("geometric", "stop_gradient"):  # the literal one is a product: another rounding
        settings = {"clip_eps_low": eps, "clip_eps_high": eps, "ratio_form": form}
        config = config_of(ratio_level=ratio_level, clip_mode=clip_mode, **settings)
        clipped = assert_matches_reference(one_token(log_ratio, advantage), config)
        to_its_gain = (advantage > 0) == (near > 1)
        assert clipped == [float(beyond == 1 and (to_its_gain or clip_mode == "weight"))]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("near", [1.2, 0.8])
@pytest.mark.parametrize("ratio_level", AXES["ratio_level"])
@pytest.mark.parametrize("form", AXES["entropy_clip_form"])
def test_a_ratio_on_the_edge_of_its_entropy(form, ratio_level, near, advantage, float64):
    log_ratio, ratio = same_ratio_everywhere(near)
    entropy = abs(ratio - 1.0)
    assert ratio in (1.0 - entropy, 1.0 + entropy) and LOG_VOCAB * entropy / LOG_VOCAB == entropy
    config = config_of(
        ratio_level=ratio_level, clip_mode="entropy_adaptive", entropy_clip_form=form,
        entropy_clip_coef=LOG_VOCAB,
    )  # fmt: skip
    assert assert_matches_reference(one_token(log_ratio, advantage, entropy), config) == [0.0]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("edge", [0.3, -0.3])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("ratio_form", AXES["ratio_form"])
def test_each_token_on_the_edge_of_gmpo_and_one_ulp_beside_it(ratio_form, beyond, edge, advantage, float64):
    eps = {"clip_eps_low": 0.3, "clip_eps_high": 0.3}
    log_ratio = math.log(1.0 + edge)
    if beyond:
        log_ratio = math.nextafter(log_ratio, math.inf * beyond * edge)
    config = config_of(ratio_level="sequence", ratio_form=ratio_form, clip_mode="before_mean", **eps)
    clipped = assert_matches_reference(one_token(log_ratio, advantage, num=3), config)
    assert clipped == [float(beyond == 1 and (advantage > 0) == (edge > 0))] * 3


def test_a_masked_token_is_clipped_in_gmpo_as_its_completion(float64):
    """A mask sets advantages to 0, whose sign says nothing; the bound is that of the unmasked tokens."""
    config = config_of(ratio_level="sequence", clip_mode="before_mean", clip_eps_low=0.2, clip_eps_high=0.2)
    old, mask = torch.full((1, 6), -1.0), torch.ones(1, 6, dtype=torch.bool)
    groups = train_rl.token_groups_of(None, mask, config.algorithm)
    for sign in (1.0, -1.0):
        moved = sign * torch.tensor([[0.0, 0.0, 0.8, 0.8, 0.8, 0.8]])
        gains = []
        for kept in (6, 2):
            advantages = sign * (torch.arange(6) < kept).double().unsqueeze(0)
            args = (moved, old + moved, old, advantages, groups, None, mask, 1.0, config.algorithm)
            gains.append(train_rl.token_gain(*args)[0][0, :2].tolist())
        expected = sign * (1 + sign * 0.2) ** (4 / 6)
        assert gains == [pytest.approx([expected] * 2)] * 2


def test_gmpo_without_a_lower_bound(float64):
    config = config_of(ratio_level="sequence", clip_mode="before_mean", clip_eps_low=1.0)
    for seed in range(4):
        assert_matches_reference(random_case(seed, 3.0), config)


@pytest.mark.parametrize("form", AXES["entropy_clip_form"])
@pytest.mark.parametrize("ratio_level", AXES["ratio_level"])
def test_without_entropy_the_clip_interval_is_one_point(ratio_level, form, float64):
    """eps is 0: what moved to the gain of the objective is clipped; the rest, and a ratio of 1, is not."""
    config = config_of(ratio_level=ratio_level, clip_mode="entropy_adaptive", entropy_clip_form=form)
    for log_ratio, advantage in itertools.product([0.3, 0.0, -0.3], [1.5, -1.5]):
        case = one_token(log_ratio, advantage, entropy=0.0, num=4)
        clipped = assert_matches_reference(case, config)
        assert clipped == [float(log_ratio * advantage > 0)] * 4
        assert not run_loss(case, config)[2]["clip_eps"].any()


def groups_of(entropies: list[float], shares, padding=0) -> list[list[int]]:
    """The tokens of each group, of one completion."""
    row = padded([entropies], len(entropies) + padding, filler=9.0)
    mask = (torch.arange(row.shape[1]) < len(entropies)).unsqueeze(0)
    numbers = train_rl.entropy_groups(row, mask, shares)[mask].tolist()
    return [[t for t, number in enumerate(numbers) if number == k] for k in range(len(shares))]


@pytest.mark.parametrize("shares", [*ALL_SHARES, (0.1, 0.9), (0.4, 0.6), (0.05, 0.1, 0.85), (0.6, 0.3, 0.1)])
def test_entropy_groups(shares, float64):
    """Numbers of tokens up to 60 meet every way in which share x tokens is whole or just is not."""
    rng = random.Random(0)
    for num_tokens in range(61):
        entropies = [rng.choice([0.0, 0.5, rng.uniform(0, 4)]) for _ in range(num_tokens)]
        expected = reference.entropy_groups(entropies, shares)
        assert groups_of(entropies, shares, padding=num_tokens % 4) == [sorted(tau) for tau in expected]
        assert sorted(sum(expected, [])) == list(range(num_tokens))


def test_entropy_groups_worked_out_by_hand():
    assert groups_of([0.1, 2.0, 0.3, 1.0, 0.2], (0.2, 0.8)) == [[1], [0, 2, 3, 4]]
    assert groups_of([0.1, 2.0, 0.3, 1.0, 0.2, 0.0], (0.2, 0.8)) == [[1, 3], [0, 2, 4, 5]], "1.2 is 2"
    assert groups_of([0.1, 2.0, 0.3, 1.0, 0.2], (0.2, 0.4, 0.4)) == [[1], [2, 3], [0, 4]]
    assert groups_of([1.0] * 5, (0.4, 0.6), padding=2) == [[0, 1], [2, 3, 4]], "text order where equal"
    assert groups_of([0.0] * 5, (0.4, 0.6), padding=2) == [[0, 1], [2, 3, 4]], "padding is no token"
    assert groups_of([3.0], (0.2, 0.8)) == [[0], []], "one token is the most uncertain one"


def test_equal_entropies_are_grouped_in_the_order_of_the_text_on_long_completions():
    expected = reference.entropy_groups([0.0] * 1000, (0.2, 0.8))
    assert groups_of([0.0] * 1000, (0.2, 0.8), padding=24) == expected
    assert expected == [list(range(200)), list(range(200, 1000))]


@pytest.mark.parametrize("clip_mode", AXES["clip_mode"])
@pytest.mark.parametrize("ratio_level, ratio_form", RATIOS)
def test_a_ratio_beyond_float32_gives_no_nan(ratio_level, ratio_form, clip_mode):
    shapes = [[200.0], [-200.0], [200.0, -200.0, 0.0, 90.0], [500.0] * 3]
    for log_ratios, advantage in itertools.product(shapes, [1.5, -1.5, 0.0]):
        case = one_token(0.0, advantage, entropy=0.7, num=len(log_ratios)) | {"logprobs": [log_ratios]}
        for mode in AXES["rollout_correction"]:
            settings = {"ratio_level": ratio_level, "ratio_form": ratio_form, "clip_mode": clip_mode}
            config = config_of(rollout_correction=mode, **settings)
            loss, gradient, statistics = run_loss(case | {"rollout_logprobs": [log_ratios]}, config)
            assert torch.isfinite(loss) and torch.isfinite(gradient).all()
            assert all(torch.isfinite(value).all() for value in statistics.values())
            assert advantage or not gradient.any()


def test_a_zero_advantage_has_neither_gradient_nor_clip(float64):
    case = random_case(5, 1.0, [6, 3]) | {"advantages": [[0.0] * 6, [0.0] * 3]}
    for clip_mode, (level, form) in itertools.product(AXES["clip_mode"], RATIOS):
        config = config_of(clip_mode=clip_mode, ratio_level=level, ratio_form=form)
        loss, gradient, statistics = run_loss(case, config)
        assert loss == 0 and not gradient.any()
        assert clip_mode in ("weight", "before_mean") or not statistics["clipped"].any(), clip_mode


# ---- 4. Where methods meet ---------------------------------------------------------------------------------
ESPO = {
    "ratio_level": "entropy_group", "ratio_form": "stop_gradient", "clip_mode": "entropy_adaptive",
    "loss_agg": "token_group_mean",
}  # fmt: skip


def assert_same(cases: list[dict], one: dict, other: dict):
    """Two choices of settings give the same loss, gradient, ratios and clips; most cases have a gradient."""
    with_gradient = 0
    for case in cases:
        (loss, gradient, seen), (other_loss, other_gradient, also) = (
            run_loss(case, config_of(**settings)) for settings in (one, other)
        )
        assert_close(loss, other_loss, rtol=1e-12)
        assert_close(gradient, other_gradient, rtol=1e-12)
        assert_close(seen["ratio"], also["ratio"], rtol=1e-12)
        assert torch.equal(seen["clipped"], also["clipped"])
        with_gradient += bool(gradient.any())
    assert with_gradient > len(cases) / 2


def cases_of(lengths: list[int], spread: float) -> list[dict]:
    return [random_case(seed, spread, lengths) for seed in range(6)]


@pytest.mark.parametrize("clip_mode", AXES["clip_mode"])
def test_espo_with_one_group_is_gspo_token(clip_mode, float64):
    clip = {"clip_mode": clip_mode, "entropy_clip_coef": 0.5}
    gspo_token = {"ratio_level": "sequence", "ratio_form": "stop_gradient"} | clip
    assert_same(cases_of([5, 1, 0, 8], 0.3), ESPO | clip | {"entropy_groups": (1.0,)}, gspo_token)


@pytest.mark.parametrize("clip_mode", AXES["clip_mode"])
@pytest.mark.parametrize("ratio_form", ["geometric", "stop_gradient"])
def test_groups_of_one_token_have_the_ratio_of_the_token(ratio_form, clip_mode, float64):
    shared = {"ratio_form": ratio_form, "clip_mode": clip_mode}
    alone = {"ratio_level": "entropy_group", "entropy_groups": (0.25,) * 4, "loss_agg": "token_group_mean"}
    assert_same(cases_of([4, 4, 4], 0.3), shared | alone, shared | {"ratio_level": "token"})


@pytest.mark.parametrize("ratio_level, ratio_form", RATIOS)
def test_a_clip_that_is_wide_enough_is_none(ratio_level, ratio_form, float64):
    ratio, cases = {"ratio_level": ratio_level, "ratio_form": ratio_form}, cases_of([5, 1, 3], 2.0)
    for case in cases:  # where the entropy is 0, no alpha makes the interval wide
        case["entropies"] = [[x + 0.1 for x in row] for row in case["entropies"]]
    without = ratio | {"clip_mode": "none"}
    assert_same(cases, ratio | {"clip_mode": "entropy_adaptive", "entropy_clip_coef": 1e9}, without)
    wide = {"clip_eps_low": 1.0, "clip_eps_high": 1e9}
    assert_same(cases, ratio | wide, without)
    assert_same(cases, ratio | wide | {"clip_mode": "before_mean"}, without)


def test_while_the_policy_is_the_old_one_all_ratios_and_clips_have_one_gradient(float64):
    """w A; the ratio is 1. Also for tokens without entropy, whose clip interval is one point."""
    for seed in range(5):
        lengths = [5, 1, 0, 8]
        case = random_case(seed, 0.0, lengths)
        case["logprobs"] = case["old_logprobs"]
        case["advantages"] = [[a] * n for a, n in zip((1.5, -0.5, 1.0, -2.0), lengths)]
        expected = [-a / (4 * len(row)) for row in case["advantages"] for a in row]
        for clip_mode, (level, form) in itertools.product(AXES["clip_mode"], RATIOS):
            config = config_of(clip_mode=clip_mode, ratio_level=level, ratio_form=form)
            _, gradient, statistics = run_loss(case, config)
            assert_close(gradient, expected)
            assert_close(statistics["ratio"], [1.0] * 14)


def test_gspo_and_gspo_token_have_one_value_and_one_gradient_by_completion(float64):
    """The gradients of a completion's tokens are spread differently, their sum is the same."""
    settings = {"ratio_level": "sequence", "clip_eps_low": 0.1, "clip_eps_high": 0.1}
    for seed in range(5):
        case = random_case(seed, 0.3, [5, 8])
        loss, gradient, _ = run_loss(case, config_of(**settings, ratio_form="geometric"))
        token_loss, token_gradient, _ = run_loss(case, config_of(**settings, ratio_form="stop_gradient"))
        assert_close(loss, token_loss)
        for part in (slice(0, 5), slice(5, 13)):
            assert_close(gradient[part].sum(), token_gradient[part].sum())


def test_an_engine_that_agrees_with_the_trainer_needs_no_correction(float64):
    cases = [case | {"rollout_logprobs": case["old_logprobs"]} for case in cases_of([5, 8, 2], 0.3)]
    for mode in AXES["rollout_correction"]:
        assert_same(cases, {"rollout_correction": mode}, {})


def test_luspo_is_gspo_times_the_length_of_the_completion(float64):
    gspo = {"ratio_level": "sequence", "clip_eps_low": 0.1, "clip_eps_high": 0.1}
    for case in cases_of([5, 1, 8], 0.3):
        _, gradient, _ = run_loss(case, config_of(**gspo))
        _, longer, _ = run_loss(case, config_of(**gspo, loss_agg="sequence_sum"))
        assert_close(longer, gradient * torch.tensor([5.0] * 5 + [1.0] + [8.0] * 8))


def test_the_two_sided_clip_is_dual_clip(float64):
    """max(min(r A, clip(r) A), c A) for A < 0, as 1912.09729 writes it, and plain PPO for A > 0."""
    clip, num_clipped = {"clip_eps_low": 0.2, "clip_eps_high": 0.3}, 0
    for case in cases_of([5, 1, 8], 2.0):
        loss, gradient, statistics = run_loss(case, config_of(**clip, clip_cap=3.0))
        total, clipped, plain = 0.0, [], run_loss(case, config_of(**clip))
        for new, old, advantages in zip(case["logprobs"], case["old_logprobs"], case["advantages"]):
            for x, y, a in zip(new, old, advantages):
                gain = reference.clipped_surrogate(math.exp(x - y), a, 0.2, 0.3)
                total += (max(gain, 3.0 * a) if a < 0 else gain) / (3 * len(new))
                clipped.append(a < 0 and x - y > math.log(3))
        assert_close(loss, -total)
        assert (
            not gradient[torch.tensor(clipped)].any() and statistics["clipped"][torch.tensor(clipped)].all()
        )
        assert_close(gradient[~torch.tensor(clipped)], plain[1][~torch.tensor(clipped)])
        num_clipped += sum(clipped)
    assert num_clipped > 5


def test_vespo_is_the_gradient_of_its_kernel_and_one_at_the_old_policy(float64):
    """Worked out by hand: two tokens of ratio 2, W = 4."""
    for advantage, power, decay in ((1.5, 2.0, 3.0), (-1.5, 3.0, 2.0)):
        case = one_token(math.log(2), advantage, num=2)
        _, gradient, statistics = run_loss(case, config_of(clip_mode="gamma"))
        assert_close(gradient, [-advantage / 2 * 4**power * math.exp(decay * (1 - 4))] * 2)
        assert not statistics["clipped"].any()


@pytest.mark.parametrize("divergence, bound", [("total_variation", 0.15), ("binary_kl", 0.05)])
def test_dppo_leaves_out_what_moved_too_far_and_moves_further(divergence, bound, float64):
    """p_old 0.5: total variation 0.15 is p 0.65 or 0.35; binary KL 0.05 is p near 0.655 or 0.345."""
    clip = {"clip_mode": divergence, "clip_eps_low": bound, "clip_eps_high": bound, "clip_cap": 1.2}
    for new, advantage in itertools.product((0.3, 0.36, 0.5, 0.64, 0.7), (1.0, -1.0)):
        case = one_token(math.log(new), advantage) | {"old_logprobs": [[math.log(0.5)]]}
        assert_matches_reference(case, config_of(**clip))
        _, gradient, statistics = run_loss(case, config_of(**clip))
        left_out = new == 0.7 and advantage > 0 or new == 0.3 and advantage < 0
        assert statistics["clipped"].tolist() == [float(left_out)]
        assert_close(gradient, [0.0 if left_out else -advantage * min(new / 0.5, 1.2)])


def test_sapo_worked_out_by_hand(float64):
    """At r = 1 the slope is A; at r = 3 and tau = 1 it is 4 s(2) (1 - s(2)) 3 A."""
    for ratio, advantage in itertools.product((1.0, 3.0), (1.0, -1.0)):
        tau = 1.0 if advantage > 0 else 1.05
        s = 1 / (1 + math.exp(-tau * (ratio - 1)))
        _, gradient, _ = run_loss(one_token(math.log(ratio), advantage), config_of(clip_mode="soft"))
        assert_close(gradient, [-4 * s * (1 - s) * ratio * advantage])


def test_the_unbiased_kl_has_the_gradient_of_the_kl(float64):
    """At the old policy d/dlogp of r k3 is log pi - log pi_ref; summed over a vocabulary it is that of KL."""
    logits = torch.tensor([0.3, -1.0, 0.9, 0.1], requires_grad=True)
    ref = torch.tensor([0.5, 0.2, 0.1, 0.2]).log()
    logprobs = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)
    values = {"logprobs": logprobs, "old_logprobs": logprobs.detach(), "ref_logprobs": ref}
    rows = {name: value.view(4, 1) for name, value in values.items()}
    mask, nothing = torch.ones(4, 1, dtype=torch.bool), torch.zeros(4, 1)
    algorithm = config_of(kl_coef=1.0, kl_form="unbiased").algorithm
    groups = train_rl.token_groups_of(None, mask, algorithm)
    weights = logprobs.detach().exp().view(4, 1)  # the mean over what the policy samples
    loss, _ = train_rl.policy_loss(
        rows["logprobs"], rows["old_logprobs"], nothing, weights, groups, nothing, mask, 1.0, algorithm,
        rows["ref_logprobs"],
    )  # fmt: skip
    assert_close(torch.autograd.grad(loss, logits)[0], expected)


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask", "geometric_mask"])
def test_a_mask_that_leaves_no_token_is_a_loss_of_zero_and_is_counted(mode, float64):
    case = random_case(3, 0.3, [4, 1, 7]) | {"rollout_logprobs": [[-9.0] * n for n in (4, 1, 7)]}
    config = config_of(rollout_correction=mode, rollout_correction_cap=1.5, rollout_correction_floor=0.5)
    loss, gradient, statistics = run_loss(case, config)
    assert loss == 0 and not gradient.any() and statistics["masked"].all()
    loss, gradient, statistics = run_loss(case | {"advantages": [[-1.0] * n for n in (4, 1, 7)],
                                                  "rollout_logprobs": [[5.0] * n for n in (4, 1, 7)]},
                                          config_of(off_policy_mask=1.0))  # fmt: skip
    assert loss == 0 and not gradient.any() and statistics["masked"].all()


def test_the_token_ratio_has_two_forms_of_one_value_and_gradient(float64):
    assert_same(cases_of([5, 8], 0.3), {"ratio_form": "stop_gradient"}, {"ratio_form": "geometric"})


# GRPO alone, without any axis: what the defaults have to give bit by bit.
def grpo_advantages(rewards, valid, group_index, eps=1e-6):
    advantages = torch.zeros_like(rewards)
    for group in group_index.unique():
        members = (group_index == group) & valid
        group_rewards = rewards[members]
        if len(group_rewards) >= 2 and group_rewards.max() - group_rewards.min() > 1e-6:
            advantages[members] = (group_rewards - group_rewards.mean()) / (group_rewards.std() + eps)
    return advantages


def grpo_loss(logprobs, old_logprobs, advantages, mask, num_completions, kl_coef, ref_logprobs):
    weights = mask / (mask.sum(dim=1, keepdim=True).clamp(min=1) * num_completions)
    ratio = (logprobs - old_logprobs).clamp(max=80).exp()
    clipped_ratio = ratio.clamp(1 - 0.2, 1 + 0.2)
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if kl_coef > 0:
        log_ref_ratio = (ref_logprobs - logprobs).clamp(max=80)
        objective = objective - kl_coef * (log_ref_ratio.expm1() - log_ref_ratio)
    return -(weights * objective).sum()


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 100.0])
def test_the_defaults_are_grpo_bit_by_bit(spread, kl_coef):
    """In float32, advantages, loss and gradient; only kl_coef is not at its default."""
    rng = random.Random(0)
    for seed in range(10):
        case = random_case(seed, spread, [7, 3, 1, 0, 5, 8, 2, 2])
        batch, config = batch_of(case, padding=seed % 2), config_of(kl_coef=kl_coef)
        statuses = [rng.choice(["ok", "ok", "wrong", "no_answer", "timeout"]) for _ in range(8)]
        batch.verdicts = [Verdict(float(status == "ok"), status) for status in statuses]
        batch.valid = torch.tensor([status != "timeout" for status in statuses])
        batch.group_index = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
        batch.rewards = train_rl.compute_rewards(batch, None, [], config)
        batch.advantages = train_rl.token_advantages(batch, config)
        expected = grpo_advantages(batch.rewards, batch.valid, batch.group_index)
        expected = expected.unsqueeze(1).expand_as(batch.response_mask) * batch.response_mask
        assert torch.equal(batch.advantages, expected)
        ours, theirs = (padded(case["logprobs"], expected.shape[1]).requires_grad_() for _ in range(2))
        counts, rows = torch.tensor([11, 99]), list(range(8))
        loss, _ = train_rl.micro_batch_loss(ours, batch.entropy, batch, rows, counts, LOG_VOCAB, config)
        fixed = (batch.old_logprobs, expected, batch.response_mask, 11, kl_coef, batch.ref_logprobs)
        expected_loss = grpo_loss(theirs, *fixed)
        (loss + expected_loss).backward()
        assert loss.dtype == torch.float32 and torch.equal(loss, expected_loss)
        assert torch.equal(ours.grad, theirs.grad)


# ---- 5. Rewards and advantages -----------------------------------------------------------------------------


def test_the_overlong_penalty():
    for num_tokens in range(21):
        for buffer in (0, 1, 5, 20):
            expected = reference.soft_overlong_punishment(num_tokens, 20, buffer)
            assert_close(train_rl.overlong_penalty(num_tokens, 20, buffer), expected)
    assert [train_rl.overlong_penalty(n, 20, 4) for n in (16, 17, 20)] == [0.0, -0.25, -1.0]


@pytest.mark.parametrize("ngram", [1, 2, 4])
def test_the_repetition_ratio(ngram):
    rng = random.Random(0)
    for num_tokens in range(30):
        token_ids = [rng.randrange(3) for _ in range(num_tokens)]
        expected = reference.repetition_ratio(token_ids, ngram)
        assert_close(train_rl.repetition_ratio(token_ids, ngram), expected)
    assert train_rl.repetition_ratio([7] * 10, ngram) == 1 - 1 / (11 - ngram)
    assert train_rl.repetition_ratio(list(range(10)), ngram) == 0 == train_rl.repetition_ratio([], ngram)


STATUSES = ("ok", "ok", "wrong", "wrong", "no_answer", "timeout", "error")


def random_groups(seed: int, num_groups: int = 4) -> list[train_rl.Group]:
    """Groups of 1 to 5 completions, some of them all right, all wrong, or without verdicts."""
    rng, groups = random.Random(seed), []
    for slot in range(num_groups):
        size, choices = rng.randint(1, 5), rng.choice([STATUSES, STATUSES, ["ok"], ["wrong", "timeout"]])
        completions, verdicts = [], []
        for _ in range(size):
            ids = [rng.randrange(4) for _ in range(rng.randint(1, MAX_NEW_TOKENS))]
            completions.append(Completion(ids, [-1.0] * len(ids), "stop", 0.0))
            status = rng.choice(choices)
            share = 1.0 if status == "ok" else rng.choice([0.0, 0.5]) if status == "wrong" else 0.0
            verdicts.append(Verdict(share, status))
        groups.append(train_rl.Group(slot, 0, completions=completions, verdicts=verdicts))
    return groups


def batch_of_groups(groups: list[train_rl.Group], seed: int = 0) -> train_rl.RolloutBatch:
    batch = train_rl.collate(groups, [Prompt("a", "1", "exact", "set")], [[1]])
    batch.valid = train_rl.has_verdict(batch.verdicts)
    generator = torch.Generator().manual_seed(seed)
    batch.entropy = torch.rand(batch.response_mask.shape, generator=generator) * 2 * batch.response_mask
    return batch


def settings_of(**values) -> Config:
    """Settings of any section, named section__name."""
    sections = {"rollout": {"max_new_tokens": MAX_NEW_TOKENS}}
    for name, value in values.items():
        section, _, name = name.partition("__")
        sections.setdefault(section, {})[name] = value
    return Config.model_validate(sections)


SHAPES = [
    {},
    {"binary": True},
    {"overlong_buffer": 5, "overlong_coef": 0.7},
    {"repetition_coef": 0.4, "repetition_ngram": 2},
    {"judge_weight": 0.3},
    {"binary": True, "overlong_buffer": 9, "repetition_coef": 0.1, "judge_weight": 1.0},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rewards(shape, float64):
    """judge: a stand-in whose score is the number of the completion, mapped to (0, 1)."""
    config = settings_of(**{f"reward__{name}": value for name, value in shape.items()})
    with_judge = "judge_weight" in shape
    judge = SimpleNamespace(scores=lambda prompts, texts: [len(text) - 3.0 for text in texts])
    for seed in range(5):
        batch = batch_of_groups(random_groups(seed))
        texts = ["x" * i for i in range(len(batch.verdicts))]
        rewards = train_rl.compute_rewards(batch, judge if with_judge else None, texts, config)
        settings = config.reward
        expected = [
            reference.shaped_reward(
                float(verdict.status == "ok") if settings.binary else verdict.reward,
                1 / (1 + math.exp(3.0 - i)) if with_judge else None,
                settings.judge_weight,
                settings.overlong_coef,
                reference.soft_overlong_punishment(len(ids), MAX_NEW_TOKENS, settings.overlong_buffer),
                settings.repetition_coef,
                reference.repetition_ratio(ids, settings.repetition_ngram),
            )
            for i, (verdict, ids) in enumerate(zip(batch.verdicts, batch.completion_ids))
        ]
        assert_close(rewards, expected)


@pytest.mark.parametrize("adv_norm", AXES["adv_norm"])
@pytest.mark.parametrize("tie_band", [0.0, 0.2])
@pytest.mark.parametrize("correctness_guard", [False, True])
@pytest.mark.parametrize("rl_zvp, binary", [(False, False), (True, False), (True, True)])
def test_advantages_of_tokens(adv_norm, tie_band, correctness_guard, rl_zvp, binary, float64):
    settings = {"adv_norm": adv_norm, "tie_band": tie_band, "correctness_guard": correctness_guard}
    config = settings_of(
        **{f"algorithm__{name}": value for name, value in settings.items()},
        zero_variance__rl_zvp=rl_zvp, zero_variance__rl_zvp_coef=0.3, reward__binary=binary,
    )  # fmt: skip
    settings |= {"rl_zvp": rl_zvp, "rl_zvp_coef": 0.3}
    is_valid = lambda group: [v.status in ("ok", "wrong", "no_answer") for v in group.verdicts]
    reshaped = 0
    for seed in range(8):
        rng, groups = random.Random(seed), random_groups(seed)
        batch = batch_of_groups(groups, seed)
        of_status = [float(v.status == "ok") if binary else v.reward for v in batch.verdicts]
        batch.rewards = torch.tensor([x - rng.choice([0.0, rng.random()]) for x in of_status])
        if adv_norm == "group_mean":
            batch.rewards = batch.rewards + 1  # a mean of 0 is none to divide by
        actual, start = train_rl.token_advantages(batch, config), 0
        sizes = [len(group.verdicts) for group in groups]
        rewards_of = zip(batch.rewards.split(sizes), map(is_valid, groups))
        settings["std_of_batch"] = reference.batch_std([(r.tolist(), valid) for r, valid in rewards_of])
        assert actual.shape == batch.response_mask.shape and not actual[~batch.response_mask].any()
        for group in groups:
            end = start + len(group.verdicts)
            entropies = [batch.entropy[i, : len(batch.completion_ids[i])].tolist() for i in range(start, end)]
            correct = [v.status == "ok" for v in group.verdicts]
            valid = is_valid(group)
            lists = (batch.rewards[start:end].tolist(), of_status[start:end], correct, valid, entropies)
            expected = reference.token_advantages(*lists, settings)
            assert_close(actual[start:end][batch.response_mask[start:end]], sum(expected, []))
            reshaped += any(len(set(row)) > 1 for row in expected)
            start = end
    assert (reshaped > 3) == rl_zvp, "the groups reach both branches"


@pytest.mark.parametrize("share, weight", [(0.0, 1.0), (0.25, 0.3), (0.9, 1.0)])
def test_weights_by_the_certainty_of_a_sign(share, weight, float64):
    """Gradients of the rewards by autograd, radii and weights by loops; some completions have no verdict."""
    config, zeros = settings_of(reward__judge_certainty=share, reward__judge_weight=weight), 0
    for seed in range(6):
        batch = batch_of_groups(random_groups(seed), seed)
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(len(batch.verdicts), 5, generator=generator)
        head = torch.randn(5, generator=generator).requires_grad_()
        judged = (features @ head).sigmoid()
        verified = torch.tensor([verdict.reward for verdict in batch.verdicts])
        rewards = (1 - weight) * verified + weight * judged
        batch.rewards = rewards.detach()
        gradients = [torch.autograd.grad(r, head, retain_graph=True)[0].tolist() for r in rewards]
        groups = []
        for group in batch.group_index.unique():
            rows = (batch.group_index == group).nonzero()[:, 0].tolist()
            groups.append({
                "rewards": [batch.rewards[i].item() for i in rows],
                "gradients": [gradients[i] for i in rows], "valid": [bool(batch.valid[i]) for i in rows],
            })  # fmt: skip
        actual = train_rl.sign_weights(batch, (features @ head).detach(), features, config)
        expected = reference.sign_weights(groups, share)
        assert_close(actual, expected)
        zeros += expected.count(0.0)
        plain = train_rl.token_advantages(batch, config)
        batch.certainty = actual
        assert torch.equal(train_rl.token_advantages(batch, config), plain * actual.unsqueeze(1))
    assert zeros > 6


def test_a_radius_is_the_least_change_of_the_head_that_flips_the_sign(float64):
    """Scores near 0, where the sigmoid is straight: 0.99 radii flip no sign, 1.01 do."""
    config = settings_of(reward__judge_certainty=0.01, reward__judge_weight=1.0)
    completion, verdict = Completion([1], [-1.0], "stop", 0.0), Verdict(0.0, "wrong")
    batch = batch_of_groups([train_rl.Group(0, 0, completions=[completion] * 8, verdicts=[verdict] * 8)])
    generator = torch.Generator().manual_seed(0)
    features, head = (torch.randn(*size, generator=generator) for size in ((8, 3), (3,)))
    head = head * 1e-4
    rewards = lambda head: (features @ head).sigmoid()
    batch.rewards = rewards(head)
    weights = train_rl.sign_weights(batch, features @ head, features, config)
    advantages = rewards(head) - rewards(head).mean()
    centred = features - features.mean(dim=0)
    radii = advantages.abs() / (centred / 4).norm(dim=1)
    assert_close(weights, (1 - radii.min() / radii).tolist(), atol=1e-6)  # the sigmoid's bend
    for i in range(8):
        away = -advantages[i].sign() * centred[i] / centred[i].norm()
        for factor, flips in ((0.99, False), (1.01, True)):
            moved = rewards(head + factor * radii[i] * away)
            assert bool((moved[i] - moved.mean()) * advantages[i] < 0) == flips


def test_rl_zvp_worked_out_by_hand(float64):
    entropy, mask = torch.tensor([[1.0, 3.0, 0.0], [1.0, 3.0, 9.0]]), torch.ones(2, 3, dtype=torch.bool)
    mask[1, 2] = False  # what lies on padding is not the highest entropy
    right = train_rl.rl_zvp_advantages(entropy, mask, torch.tensor([True, True]), 0.5)
    wrong = train_rl.rl_zvp_advantages(entropy, mask, torch.tensor([False, False]), 0.5)
    assert right.tolist() == [[0.5, 1.5, 0.0], [0.5, 1.5, 0.0]]
    assert wrong.tolist() == [[-1.0, 0.0, -1.5], [-1.0, 0.0, 0.0]]
    assert not train_rl.rl_zvp_advantages(entropy, mask, torch.tensor([True, False]), 0.0).any()


def test_a_penalty_does_not_hide_zero_variance_and_a_group_without_two_verdicts_is_skipped(float64):
    """Zero variance is one of the correctness part of the reward."""
    verdicts = {"ok": Verdict(1.0, "ok"), "timeout": Verdict(0.0, "timeout")}
    completion = Completion([1, 2], [-1.0, -1.0], "stop", 0.0)
    of_statuses = [("ok", "ok"), ("ok", "timeout"), ("timeout", "timeout")]
    groups = [
        train_rl.Group(
            slot, 0, completions=[completion] * 2, verdicts=[verdicts[status] for status in statuses]
        )
        for slot, statuses in enumerate(of_statuses)
    ]
    batch = batch_of_groups(groups)
    batch.rewards = torch.tensor([1.0, 0.5, 1.0, 0.0, 0.0, 0.0])  # the second of group 0 was too long
    advantages = train_rl.token_advantages(batch, settings_of(zero_variance__rl_zvp=True))
    assert_close(advantages[:2], 0.1 * batch.entropy[:2])
    assert not advantages[2:].any()


@pytest.mark.parametrize("binary", [False, True])
def test_rl_zvp_pushes_a_group_up_that_is_tied_above_zero(binary, float64):
    """Half right is R > 0; with reward.binary it is R = 0. The wrong group is pushed down either way."""
    completion = Completion([1, 2, 3], [-1.0] * 3, "stop", 0.0)
    groups = [
        train_rl.Group(slot, 0, completions=[completion] * 2, verdicts=[Verdict(share, "wrong")] * 2)
        for slot, share in enumerate((0.5, 0.0))
    ]
    batch = batch_of_groups(groups)
    batch.rewards = torch.zeros(4)
    config = settings_of(zero_variance__rl_zvp=True, reward__binary=binary)
    advantages = train_rl.token_advantages(batch, config)
    assert (advantages[2:] <= 0).all() and (advantages[2:] < 0).any()
    assert ((advantages[:2] > 0) != binary).all() or binary and (advantages[:2] <= 0).all()


def test_clip_cov_draws_other_tokens_at_another_step(float64):
    completions = completions_to_select_from(20, share_of_zeros=0.0)
    config = config_of(covariance_share=0.3, covariance_range=(-9.0, 9.0))
    batch = batch_of({
        **{name: [one[name] for one in completions] for name in ("old_logprobs", "advantages", "entropies")},
        **{f"{name}_logprobs": [one["old_logprobs"] for one in completions] for name in ("rollout", "ref")},
    }, 1)  # fmt: skip
    batch.prompt_ids = [one["prompt_ids"] for one in completions]
    batch.completion_ids = [one["completion_ids"] for one in completions]
    batch.finish_reason, batch.minibatch = ["stop"] * 20, torch.zeros(20, dtype=torch.int64)
    masked = batch.advantages * batch.response_mask
    drawn = [train_rl.select_tokens(masked, batch, config, step)[0] == 0 for step in (0, 0, 1)]
    assert (drawn[0] == drawn[1]).all() and (drawn[0] != drawn[2]).any()


def test_a_reference_that_gives_a_token_no_chance_leaves_the_loss_finite():
    logprobs = torch.full((1, 3), -300.0, requires_grad=True)
    mask, config = torch.ones(1, 3, dtype=torch.bool), config_of(kl_coef=0.1)
    groups, zeros = train_rl.token_groups_of(None, mask, config.algorithm), torch.zeros(1, 3)
    weights = torch.full((1, 3), 1 / 3)
    loss, _ = train_rl.policy_loss(
        logprobs, logprobs.detach(), zeros, weights, groups, None, mask, 1.0, config.algorithm, zeros
    )
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("clip_mode", ["none", "before_mean"])
@pytest.mark.parametrize("num_tokens", [256, 4096, 16384])
def test_the_float32_gradient_of_a_geometric_ratio_keeps_its_digits(num_tokens, clip_mode):
    """Against float64, relative to the gradient's norm; eight completions, since rounding is luck."""
    generator = torch.Generator().manual_seed(num_tokens)
    old = torch.randn(8, num_tokens, generator=generator, dtype=torch.float64) - 2
    new = old + 0.02 * torch.randn(8, num_tokens, generator=generator, dtype=torch.float64)
    old, new = old.float().double(), new.float().double()  # both precisions see the same numbers
    advantages = torch.randn(8, 1, generator=generator).expand(8, num_tokens)
    algorithm = config_of(ratio_level="sequence", clip_mode=clip_mode).algorithm
    mask, gradients = torch.ones(8, num_tokens, dtype=torch.bool), []
    for dtype in (torch.float32, torch.float64):
        logprobs = new.to(dtype).requires_grad_()
        token_groups = train_rl.token_groups_of(None, mask, algorithm)
        weights = (mask.double() / (8 * num_tokens)).to(dtype)
        loss, _ = train_rl.policy_loss(
            logprobs, old.to(dtype), advantages.to(dtype), weights, token_groups, None, mask, 1.0, algorithm
        )
        loss.backward()
        gradients.append(logprobs.grad.double())
    assert (gradients[0] - gradients[1]).norm() < 1e-7 * gradients[1].norm()


def test_a_batch_without_rows_has_no_advantages():
    batch, config = train_rl.collate([], [], []), settings_of(zero_variance__rl_zvp=True)
    batch.valid = train_rl.has_verdict([])
    batch.rewards = train_rl.compute_rewards(batch, None, [], config)
    assert train_rl.token_advantages(batch, config).shape == (0, 1)


@pytest.mark.parametrize("settings", [{"top_entropy": 0.2}, {"covariance_share": 0.1}])
def test_a_step_in_which_no_group_is_kept_selects_no_tokens(settings):
    """Then there is no pass for old log-probabilities and entropies on any rank."""
    batch = train_rl.collate([], [], [])
    advantages, penalised = train_rl.select_tokens(torch.zeros(0, 1), batch, config_of(**settings), 0)
    assert advantages.shape == (0, 1) and penalised is None


# ---- 6. Tokens and rewards that are chosen over all ranks --------------------------------------------------
SEVERAL = "0.7*exact + 0.3*characters"  # a kind whose reward is a sum
SELECTIONS = [
    {"top_entropy": 0.2},
    {"top_entropy": 0.5, "leave_out_cut": True},
    {"covariance_share": 0.1, "covariance": "kl"},
    {"covariance_share": 0.25, "covariance_range": (0.0, 0.8)},
    {"covariance_share": 0.9, "covariance_range": (0.0, 0.8)},  # more than there are
    {"covariance_share": 0.01, "covariance_range": (50.0, 60.0)},  # there are none
]


def selected_by_rank(config: Config, cases: list[list[dict]], monkeypatch) -> list[tuple]:
    """(advantages, penalised) of each rank as ragged lists; a case is that of one completion."""
    ranks = FakeRanks(len(cases)).install(monkeypatch)

    def select(rank: int) -> tuple[list, list]:
        case = {
            name: [one[name] for one in cases[rank]] for name in ("old_logprobs", "advantages", "entropies")
        }
        batch = batch_of(
            case | {name: case["old_logprobs"] for name in ("rollout_logprobs", "ref_logprobs")}, 1
        )
        batch.prompt_ids = [one["prompt_ids"] for one in cases[rank]]
        batch.completion_ids = [one["completion_ids"] for one in cases[rank]]
        batch.finish_reason = [one["finish_reason"] for one in cases[rank]]
        batch.minibatch = torch.tensor([one["minibatch"] for one in cases[rank]], dtype=torch.int64)
        masked = batch.advantages * batch.response_mask
        advantages, penalised = train_rl.select_tokens(masked, batch, config, 0)
        penalised = torch.zeros_like(batch.response_mask) if penalised is None else penalised
        assert not penalised[~batch.response_mask].any() and not advantages[~batch.response_mask].any()
        lists = [
            [row[mask].tolist() for row, mask in zip(x, batch.response_mask)] for x in (advantages, penalised)
        ]
        return tuple(lists)

    return ranks.run(select)


def completions_to_select_from(num: int, share_of_zeros: float = 0.5) -> list[dict]:
    rng, completions = random.Random(num), []
    for i in range(num):
        length = rng.choice([1, 2, 5, 9])
        completions.append({
            "old_logprobs": [-rng.expovariate(1.0) for _ in range(length)],
            "advantages": [rng.gauss(0, 1) * (rng.random() >= share_of_zeros)] * length,
            "entropies": [rng.choice([0.0, 0.7, rng.uniform(0, 3)]) for _ in range(length)],
            "prompt_ids": [i], "completion_ids": [rng.randrange(9) for _ in range(length)],
            "finish_reason": rng.choice(["stop", "length"]), "minibatch": i % 2,
        })  # fmt: skip
    return completions


@pytest.mark.parametrize("settings", SELECTIONS, ids=str)
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_tokens_are_chosen_over_the_ranks_of_an_update(settings, num_minibatches, monkeypatch, float64):
    """As the equations say, and the same however completions are dealt to 1, 2 or 3 ranks, one empty."""
    is_drawn = settings.get("covariance", "clip") == "clip" and "covariance_share" in settings
    completions = (
        completions_to_select_from(60, share_of_zeros=0.0) if is_drawn else completions_to_select_from(13)
    )
    sections = {"algorithm": settings, "train": {"minibatches_per_step": num_minibatches}}
    config = Config.model_validate(sections)
    if num_minibatches == 1:
        completions = [one | {"minibatch": 0} for one in completions]
    deals = [[completions], [completions[:4], completions[4:]], [completions[5:], [], completions[:5]]]
    found = []
    for deal in deals:
        of_ranks = selected_by_rank(config, deal, monkeypatch)
        rows = [row for lists in of_ranks for row in zip(*lists)]
        order = [completions.index(one) for of_rank in deal for one in of_rank]
        found.append([row for _, row in sorted(zip(order, rows))])
    assert found[0] == found[1] == found[2]
    for number in range(num_minibatches):
        chosen = [(one, row) for one, row in zip(completions, found[0]) if one["minibatch"] == number]
        check_selection([one for one, _ in chosen], *zip(*(row for _, row in chosen)), config.algorithm)


def check_selection(completions: list[dict], advantages, penalised, algorithm) -> None:
    """Compare what was selected of one update with the equations."""
    was_cut = [algorithm.leave_out_cut and one["finish_reason"] == "length" for one in completions]
    expected = [[0.0 if cut else a for a in one["advantages"]] for cut, one in zip(was_cut, completions)]
    if algorithm.top_entropy < 1:
        kept = reference.most_uncertain([one["entropies"] for one in completions], algorithm.top_entropy)
        expected = [[a if keep else 0.0 for a, keep in zip(*rows)] for rows in zip(expected, kept)]
    logprobs, num = [one["old_logprobs"] for one in completions], sum(map(len, expected))
    if algorithm.covariance_share > 0 and algorithm.covariance == "clip":
        low, high = algorithm.covariance_range
        values = zip(expected, reference.covariances(expected, logprobs), advantages)
        tokens = [token for rows in values for token in zip(*rows)]
        assert all(now in (a, 0.0) for a, _, now in tokens)
        eligible = [(a, now) for a, covariance, now in tokens if low < covariance < high]
        assert all(now == a for a, covariance, now in tokens if not low < covariance < high)
        assert all(a for a, _ in eligible), "a token without advantage would not show that it was left out"
        limit = max(1, int(algorithm.covariance_share * num))
        assert sum(now == 0 for _, now in eligible) == min(limit, len(eligible))
    else:
        assert list(advantages) == expected
    if algorithm.covariance_share > 0 and algorithm.covariance == "kl":
        assert list(penalised) == reference.kl_cov_tokens(expected, logprobs, algorithm.covariance_share)
        assert 0 < sum(map(sum, penalised)) < num
    else:
        assert not any(map(any, penalised))


def test_rewards_that_are_normalised_one_by_one(monkeypatch, float64):
    """Against the equations, over two ranks; kinds that are a sum, and one that is not."""
    rng, groups = random.Random(0), []
    for kind in [SEVERAL, SEVERAL, "exact", "2*exact + 1*characters", SEVERAL]:
        size = rng.randint(2, 6)
        weights = dict((part, weight) for weight, part in train_rl.parts_of(kind))
        rewards = {part: [rng.choice([0.0, 0.5, 1.0]) for _ in range(size)] for part in weights}
        valid = [rng.random() < 0.8 for _ in range(size)]
        groups.append({"kind": kind, "weights": weights, "rewards": rewards, "valid": valid})
    groups[1]["rewards"] = {part: [0.5] * len(row) for part, row in groups[1]["rewards"].items()}
    config = config_of(part_norm="before_sum")
    deals = [groups[:3], groups[3:]]

    def advantages_of(rank: int) -> list[float]:
        prompts, verdicts, index, valid = [], [], [], []
        for slot, group in enumerate(deals[rank]):
            for i, ok in enumerate(group["valid"]):
                parts = {part: row[i] for part, row in group["rewards"].items()}
                prompts.append(Prompt("a", "1", group["kind"], "set"))
                only = next(iter(parts.values()))
                verdicts.append(Verdict(only, "wrong", parts=parts if len(parts) > 1 else {}))
                index.append(slot), valid.append(ok)
        num = len(prompts)
        batch = SimpleNamespace(
            certainty=None,
            prompts=prompts,
            verdicts=verdicts,
            group_index=torch.tensor(index),
            valid=torch.tensor(valid),
            rewards=torch.zeros(num),
            response_mask=torch.ones(num, 1, dtype=torch.bool),
        )
        return train_rl.token_advantages(batch, config)[:, 0].tolist()

    found = sum(FakeRanks(2).install(monkeypatch).run(advantages_of), [])
    expected = sum(reference.gdpo_advantages(groups, tie_band=0.0), [])
    assert_close(found, expected)
    assert 0.0 in found and len(set(found)) > 6


def test_the_standard_deviation_of_a_batch_is_that_of_all_ranks(monkeypatch, float64):
    rng = random.Random(1)
    groups = [
        ([rng.random() for _ in range(n)], [rng.random() < 0.8 for _ in range(n)]) for n in (3, 5, 2, 4)
    ]
    std = reference.batch_std(groups)

    def advantages_of(rank: int) -> list[float]:
        mine = groups[2 * rank : 2 * rank + 2]
        rewards, valid = (torch.tensor(sum((group[k] for group in mine), [])) for k in (0, 1))
        index = torch.tensor([g for g, (row, _) in enumerate(mine) for _ in row])
        return train_rl.compute_advantages(rewards, valid, index, "batch_std").tolist()

    found = FakeRanks(2).install(monkeypatch).run(advantages_of)
    expected = [reference.group_advantages(*group, "batch_std", std_of_batch=std) for group in groups]
    assert_close(sum(found, []), sum(expected, []))


def test_maxrl_and_leave_one_out_worked_out_by_hand(float64):
    rewards, valid, index = (
        torch.tensor([1.0, 0.0, 0.0, 0.0]),
        torch.ones(4, dtype=torch.bool),
        torch.zeros(4),
    )
    assert_close(train_rl.compute_advantages(rewards, valid, index, "group_mean"), [3.0, -1.0, -1.0, -1.0])
    assert_close(train_rl.compute_advantages(rewards, valid, index, "leave_one_out"), [1.0] + [-1 / 3] * 3)
    nothing = train_rl.compute_advantages(rewards - 0.25, valid, index, "group_mean")
    assert not nothing.any(), "a mean of 0 is none to divide by"


# ---- 7. Every value of every axis does something -----------------------------------------------------------
SHARED_RATIO = {"ratio_level": "entropy_group", "ratio_form": "stop_gradient"}
OFF_POLICY_BASE = {"clip_eps_low": 0.1, "clip_eps_high": 0.2}
BASES = {  # settings under which the values of an axis differ
    "ratio_level": {},
    # with one advantage for all tokens of a completion, the geometric and the token form of GSPO agree
    "ratio_form": {"ratio_level": "sequence", "rollout_correction": "token_tis"},
    "clip_mode": {"ratio_level": "sequence", "entropy_clip_coef": 0.1},
    "entropy_clip_form": SHARED_RATIO | {"clip_mode": "entropy_adaptive", "entropy_clip_coef": 2.0},
    "loss_agg": {"ratio_level": "entropy_group"},
    "adv_norm": {},
    "part_norm": {},
    "covariance": {"covariance_share": 0.3, "covariance_range": (-9.0, 9.0)},
    "rollout_correction": {"rollout_correction_cap": 1.2, "rollout_correction_floor": 0.9},
    "kl_form": {"kl_coef": 0.1},
    "old_policy": {},
}
OTHERS = {  # another value of each setting that is no axis, and settings under which it has an effect
    "entropy_groups": ((0.5, 0.5), {"ratio_level": "entropy_group"}),
    "clip_eps_low": (0.3, {}),
    "clip_eps_high": (0.05, {}),
    "entropy_clip_coef": (0.2, {"clip_mode": "entropy_adaptive"}),
    "tie_band": (0.3, {}),
    "correctness_guard": (True, {}),
    "rollout_correction_cap": (1.05, {"rollout_correction": "token_tis"}),
    "rollout_correction_floor": (0.95, {"rollout_correction": "token_mask"}),
    "kl_coef": (0.1, {}),
    "clip_cap": (1.3, {}),
    "soft_temperatures": ((1.5, 2.0), {"clip_mode": "soft"}),
    "gamma_powers": ((1.0, 1.0), {"clip_mode": "gamma"}),
    "gamma_decays": ((1.0, 1.0), {"clip_mode": "gamma"}),
    "top_entropy": (0.2, {}),
    "leave_out_cut": (True, {}),
    "covariance_share": (0.2, {"covariance_range": (-9.0, 9.0)}),
    "covariance_range": ((0.0, 0.1), {"covariance_share": 0.2}),
    "covariance_kl_coef": (2.0, {"covariance_share": 0.2, "covariance": "kl"}),
    "off_policy_mask": (0.01, {}),
}


def outcome_of(**algorithm) -> torch.Tensor:
    """Gradient of a crafted off-policy batch, from its rewards on."""
    completion = lambda n: Completion(list(range(n)), [-1.0] * n, "length" if n == 5 else "stop", 0.0)
    parts = [
        {"exact": 1.0, "characters": 1.0},
        {"exact": 0.0, "characters": 0.2},
        {"exact": 0.0, "characters": 0.6},
    ]
    verdicts = [
        Verdict(float(i == 0), ("ok", "wrong", "wrong")[i], parts=part) for i, part in enumerate(parts)
    ]
    completions = [completion(n) for n in (4, 7, 5)]
    groups = [train_rl.Group(g, 0, completions=completions, verdicts=verdicts) for g in range(4)]
    batch = batch_of_groups(groups)
    batch.prompts = [Prompt("a", "1", SEVERAL, "set")] * 12
    generator = torch.Generator().manual_seed(1)
    noise = lambda size: (torch.rand(batch.response_mask.shape, generator=generator) - 0.5) * size
    batch.old_logprobs = (batch.rollout_logprobs + noise(0.8)) * batch.response_mask
    batch.ref_logprobs = batch.old_logprobs + noise(1.0)
    batch.rewards = torch.tensor([1.0, 0.0, 0.4, 0.1, 0.6, 0.2] * 2)  # 0.1: a right one with many penalties
    config = config_of(**algorithm)
    advantages = train_rl.token_advantages(batch, config)
    batch.advantages, batch.penalised = train_rl.select_tokens(advantages, batch, config, 0)
    logprobs = (batch.old_logprobs + noise(1.5)).requires_grad_()
    rows, counts = list(range(12)), torch.tensor([12, int(batch.response_mask.sum())])
    loss, _ = train_rl.micro_batch_loss(logprobs, batch.entropy, batch, rows, counts, LOG_VOCAB, config)
    loss.backward()
    return logprobs.grad


def assert_different(one: torch.Tensor, other: torch.Tensor) -> None:
    """By more than rounding, relative to the size of a gradient."""
    assert (one - other).abs().max() > 1e-4 * one.abs().max() > 0


ELSEWHERE = {"router_replay", "mismatch_gate", "mismatch_patience"}  # not in the loss: tests/test_replay.py
PAIRS = [(axis, *p) for axis in AXES if axis not in ELSEWHERE for p in itertools.combinations(AXES[axis], 2)]
SETTINGS = [name for name in AlgorithmSettings.model_fields if name not in AXES and name not in ELSEWHERE]


@pytest.mark.parametrize("axis, one, other", PAIRS)
def test_two_values_of_an_axis_give_two_gradients(axis, one, other, float64):
    base = OFF_POLICY_BASE | BASES[axis]
    assert_different(outcome_of(**base | {axis: one}), outcome_of(**base | {axis: other}))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_other_setting_of_the_algorithm_has_an_effect(name, float64):
    value, base = OTHERS[name]
    base = OFF_POLICY_BASE | base
    assert_different(outcome_of(**base), outcome_of(**base | {name: value}))


# ---- 8. Every axis is branched on in one place -------------------------------------------------------------


def axis_of(node: ast.expr, parameters: dict[str, str], axes: dict) -> str | None:
    """The axis an expression reads: as an attribute, or as a parameter that receives it."""
    if isinstance(node, ast.Attribute):
        return node.attr if node.attr in axes else None
    return parameters.get(node.id) if isinstance(node, ast.Name) else None


def parameters_that_receive(tree: ast.Module, axes: dict) -> dict[str, dict[str, str]]:
    """{function: {parameter: axis}} from the calls of a module's functions."""
    functions = {node.name: node.args.args for node in tree.body if isinstance(node, ast.FunctionDef)}
    found: dict[str, dict[str, str]] = {name: {} for name in functions}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in functions:
            names = [parameter.arg for parameter in functions[call.func.id]]
            given = [*zip(names, call.args), *((word.arg, word.value) for word in call.keywords)]
            for name, value in given:
                axis = axis_of(value, {}, axes)
                if axis:
                    assert found[call.func.id].setdefault(name, axis) == axis, f"{name} takes two axes"
    return found


def branches_of(source: str, axes: dict[str, tuple[str, ...]]) -> dict[str, list[list[str]]]:
    """{axis: [values told apart by each branch on it]}; `==` tells a value from the other of a pair.

    Functions that check settings against each other (READERS) compute nothing and are left out.
    """
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if getattr(node, "name", None) not in READERS]
    received, branches = parameters_that_receive(tree, axes), {axis: [] for axis in axes}
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Match):
                axis = axis_of(node.subject, received[function.name], axes)
                constants = [c for case in node.cases for c in ast.walk(case.pattern)]
                values = [c.value for c in constants if isinstance(c, ast.Constant)]
            elif isinstance(node, ast.Compare):
                axis = axis_of(node.left, received[function.name], axes)
                constants = [c for right in node.comparators for c in ast.walk(right)]
                values = [c.value for c in constants if isinstance(c, ast.Constant)]
                if axis and len(axes[axis]) == 2:
                    values += [value for value in axes[axis] if value not in values]
            else:
                continue
            if axis:
                branches[axis].append(values)
    return branches


BRANCHED = AXES | {"judge_mode": axes_of(RewardSettings)["judge_mode"]}
PLACES = {
    "old_policy": 2,  # the loss, and the pass over the batch that it does without
    "router_replay": 3,  # the routes of a forward; whether the engine captures them; whether they are kept
    "part_norm": 2,  # advantages, and whether equal scores mean that there is no gradient
}
READERS = (
    "check_config", "algorithm_contradictions", "loss_contradictions", "rollout_contradictions",
    "config_warnings",
)  # fmt: skip


@pytest.mark.parametrize("axis", BRANCHED)
def test_an_axis_is_branched_on_in_one_place_that_knows_every_value(axis):
    branches = branches_of((ROOT / "train_rl.py").read_text(), BRANCHED)[axis]
    assert len(branches) == PLACES.get(axis, 1), f"{axis} is the subject of {len(branches)} branches"
    assert all(sorted(values) == sorted(BRANCHED[axis]) for values in branches)


def test_the_search_for_branches_finds_them():
    source = inspect.cleandoc("""
        def top(algorithm):
            inner(algorithm.form, 3)
            match algorithm.mode:
                case "a" | "b": pass
        def inner(form, number):
            if form == "x" and number == 3: pass
            match number:
                case "a": pass
        def again(settings):
            return 1 if settings.mode in ("b",) else 2
        """)
    found = branches_of(source, {"mode": ("a", "b", "c"), "form": ("x", "y")})
    assert found == {"mode": [["a", "b"], ["b"]], "form": [["x", "y"]]}


# ---- 9. The reference itself -------------------------------------------------------------------------------


# where nothing is stopped, the gradient is the derivative of the value
SMOOTH_RATIOS = [("token", "geometric"), ("sequence", "geometric"), ("entropy_group", "geometric")]


@pytest.mark.parametrize("clip_mode", [mode for mode in AXES["clip_mode"] if mode not in BY_WEIGHT])
@pytest.mark.parametrize("ratio_level, ratio_form", SMOOTH_RATIOS)
def test_slopes_of_the_reference_are_derivatives_of_its_values(ratio_level, ratio_form, clip_mode):
    config = config_of(
        ratio_level=ratio_level, ratio_form=ratio_form, clip_mode=clip_mode, entropy_clip_coef=0.4,
        kl_coef=0.3, kl_form="unbiased", loss_agg="token_group_mean", clip_cap=1.3,
        soft_temperatures=(0.7, 3.0),
    )  # fmt: skip
    case, step = random_case(2, 0.4, [5, 1, 8]), 1e-6
    case["penalised"] = [[float(t % 2) for t in range(len(row))] for row in case["logprobs"]]
    fixed = [case[name] for name in ("old_logprobs", "advantages", "entropies", "ref_logprobs")]
    fixed.append(reference_settings(config, case))
    slopes = reference.policy_objective_slope(case["logprobs"], *fixed)
    for i, row in enumerate(case["logprobs"]):
        for t in range(len(row)):
            above, below = ([list(r) for r in case["logprobs"]] for _ in range(2))
            above[i][t] += step
            below[i][t] -= step
            difference = reference.policy_objective(above, *fixed) - reference.policy_objective(below, *fixed)
            assert difference / (2 * step) == pytest.approx(slopes[i][t], rel=1e-6, abs=1e-9)


def test_the_reference_with_defaults_is_its_grpo():
    for seed in range(5):
        case = random_case(seed, 0.4)
        config = config_of(kl_coef=0.1)
        lists = [case[name] for name in ("logprobs", "old_logprobs", "advantages")]
        settings = reference_settings(config, case)
        for name in ("objective", "objective_slope"):
            general = getattr(reference, f"policy_{name}")(
                *lists, case["entropies"], case["ref_logprobs"], settings
            )
            grpo = getattr(reference, f"grpo_{name}")(*lists, case["ref_logprobs"], 0.2, 0.1)
            flat = lambda value: sum(value, []) if isinstance(value, list) else value
            assert_close(flat(general), flat(grpo))
