"""Every value of every axis of the loss against the equations of reference.py.

A batch goes through micro_batch_loss() or token_advantages() as in a run, and the loss, its gradient and the
statistics are compared. Plug-ins of experiments/plugins are tested like built-in values: CLIPS and ADVANTAGES
list both, each as the settings that differ from the defaults.
"""

import itertools
import math
import random
import statistics
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

import pytest
import reference
import torch
from conftest import assert_close
from helpers import FakeRanks, judge_batch, judged, loss_inputs, make_batch, plugin

import train_rl
from batch import AdvantageInputs, Completion, Group, PolicyOutputs, RolloutBatch, collate, pessimistic
from data.prompts import Prompt
from plugins import ONE_RANK, load_plugin
from reward import Verdict
from settings import AlgorithmSettings, Config
from verifiers.kinds import parts_of

MAX_NEW_TOKENS = 13
LOG_VOCAB = math.log(50)


AXES = {  # {setting: values} for each setting of the section that is a Literal
    name: get_args(info.annotation)
    for name, info in AlgorithmSettings.model_fields.items()
    if get_origin(info.annotation) is Literal
}
DPPO = {"eps_low": 0.1, "eps_high": 0.15, "cap": 1.5}
VESPO = {"power_positive": 1.0, "power_negative": 2.5, "decay_positive": 2.0, "decay_negative": 0.5}
CLIPS = {clip_mode: {"clip_mode": clip_mode} for clip_mode in AXES["clip_mode"]} | {
    "sapo": plugin("gain", "sapo.py:sapo", tau_positive=0.7, tau_negative=3.0),
    "total_variation": plugin("gain", "dppo.py:total_variation", **DPPO),
    "binary_kl": plugin("gain", "dppo.py:binary_kl", **DPPO),
    "vespo": plugin("gain", "vespo.py:vespo", **VESPO),
    "off_policy_mask": plugin("gain", "off_policy_mask.py:off_policy_mask", max_divergence=0.05),
}
ADVANTAGES = {adv_norm: {"adv_norm": adv_norm} for adv_norm in AXES["adv_norm"]} | {
    name.partition(".")[0]: plugin("advantage", name)
    for name in ("batch_std.py:batch_std", "maxrl.py:maxrl", "rloo.py:rloo")
}
UNCLIPPED = ("none", "sapo", "vespo")  # no token loses its gradient
WEIGHTED = ("weight", "total_variation", "binary_kl", "vespo")  # gain sg[weight] A log pi
RATIOS = list(itertools.product(AXES["ratio_level"], AXES["ratio_form"]))
ALL_FRACTIONS = [(0.2, 0.8), (0.1, 0.3, 0.6), (1.0,), (0.25, 0.25, 0.25, 0.25)]

each_clip = pytest.mark.parametrize("clip", CLIPS)
each_ratio = pytest.mark.parametrize("ratio_level, ratio_form", RATIOS)
each_loss_agg = pytest.mark.parametrize("loss_agg", AXES["loss_agg"])


def settings_of(**values) -> Config:
    """Return a configuration; values: settings of any section, named section__name."""
    sections = {"rollout": {"max_new_tokens": MAX_NEW_TOKENS}}
    for name, value in values.items():
        section, _, name = name.partition("__")
        sections.setdefault(section, {})[name] = value
    return Config.model_validate(sections)


def config_of(**algorithm) -> Config:
    return settings_of(**{f"algorithm__{name}": value for name, value in algorithm.items()})


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    """Make this process the only rank: some normalisations and selections are over the tokens of all
    ranks."""
    FakeRanks(1).install(monkeypatch)


# ---- 1. Ragged lists through the project and through the reference -----------------------------------------


def random_case(seed: int, spread: float, lengths: list[int] | None = None) -> dict:
    """Draw ragged lists of some completions; spread is the size of log-ratios in nats.

    The advantages of a completion have one sign. Some entropies are equal, some are 0.
    """
    rng = random.Random(seed)
    lengths = lengths or [rng.choice([0, 1, 1, 2, 5, 8]) for _ in range(rng.randint(1, 5))]
    signs = [rng.choice([1, 1, -1, -1, 0]) for _ in lengths]

    def near(rows: list[list[float]], size: float) -> list[list[float]]:
        return [[x + rng.uniform(-size, size) for x in row] for row in rows]

    old = [[-rng.expovariate(1.0) for _ in range(n)] for n in lengths]
    return {
        "logprobs": near(old, spread),
        "old_logprobs": old,
        "rollout_logprobs": near(old, 0.3),
        "ref_logprobs": near(old, 1.0),
        "advantages": [[sign * rng.expovariate(1.0) for _ in range(n)] for sign, n in zip(signs, lengths)],
        "entropy": [[rng.choice([0.0, 0.7, rng.uniform(0, 3)]) for _ in range(n)] for n in lengths],
    }


def batch_of(case: dict, padding: int = 0) -> tuple[RolloutBatch, torch.Tensor]:
    """Return the batch of a case and the policy's log-probabilities; 9.0 on padding must not matter."""
    fields = {name: rows for name, rows in case.items() if name != "logprobs"}
    ids = [[0] * len(row) for row in case["logprobs"]]
    batch = make_batch(ids, padding=padding, **fields)
    for name in fields:
        getattr(batch, name)[~batch.response_mask] = 9.0
    logprobs = make_batch(ids, padding=padding, old_logprobs=case["logprobs"]).old_logprobs
    return batch, logprobs


def run_loss(case: dict, config: Config, padding: int = 0, elsewhere: tuple[int, int] = (0, 0)):
    """Return loss, gradient and statistics by token of micro_batch_loss(); the batch must not change.

    elsewhere: completions and tokens of the update in other micro-batches.
    """
    batch, logprobs = batch_of(case, padding)
    mask = batch.response_mask
    if config.algorithm.kl_coef == 0:
        batch.ref_logprobs = None
    logprobs.requires_grad_()
    tensors = {name: x for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    copies = {name: x.clone() for name, x in tensors.items()}
    counts = torch.tensor([len(mask) + elsewhere[0], int(mask.sum()) + elsewhere[1]])
    unused = torch.full_like(logprobs, math.nan)  # the batch has the old policy's entropies
    loss, statistics = train_rl.micro_batch_loss(
        PolicyOutputs(logprobs, unused), batch, list(range(len(mask))), counts, LOG_VOCAB, config
    )
    loss.backward()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, copies[name]), f"{name} was written to"
    assert loss.shape == () and not any(value.requires_grad for value in statistics.values())
    assert (logprobs.grad[~mask] == 0).all()
    return loss.detach(), logprobs.grad[mask], {name: value[mask] for name, value in statistics.items()}


def reference_settings(config: Config, case: dict, elsewhere: tuple[int, int] = (0, 0)) -> dict:
    lengths = [len(row) for row in case["old_logprobs"]]
    return config.algorithm.model_dump() | {
        "max_new_tokens": MAX_NEW_TOKENS, "log_vocab": LOG_VOCAB,
        "num_completions": len(lengths) + elsewhere[0], "num_tokens": sum(lengths) + elsewhere[1],
    }  # fmt: skip


def factors_of(case: dict, old: str, config: Config) -> tuple[list, list]:
    """Return the rollout correction and the off-policy mask of each token, as ragged lists."""
    algorithm = config.algorithm
    correction = algorithm.rollout_correction
    bounds = algorithm.rollout_correction_cap, algorithm.rollout_correction_floor
    limit = algorithm.gain_args.get("max_divergence", math.inf)
    corrections = []
    masks = []
    for new, before, rollout, row in zip(
        case["logprobs"], case[old], case["rollout_logprobs"], case["advantages"]
    ):
        tokens = range(len(row))
        corrections.append(
            [reference.correction_weight(before, rollout, t, correction, *bounds) for t in tokens]
        )
        masks.append([reference.off_policy_mask(new, rollout, a, limit) for a in row])
    return corrections, masks


def assert_matches_reference(case: dict, config: Config, padding=0, elsewhere=(0, 0)) -> list[float]:
    """Compare loss, gradient and statistics with the reference; return 1.0 for each clipped token."""
    loss, gradient, statistics = run_loss(case, config, padding, elsewhere)
    algorithm = config.algorithm
    settings = reference_settings(config, case, elsewhere)
    old = "old_logprobs" if algorithm.old_policy == "trainer" else "rollout_logprobs"
    corrections, masks = factors_of(case, old, config)
    advantages = [[a * c * m for a, c, m in zip(*r)] for r in zip(case["advantages"], corrections, masks)]
    lists = [case["logprobs"], case[old], advantages, case["entropy"]]
    assert_close(loss, -reference.policy_objective(*lists, case["ref_logprobs"], settings))
    slopes = reference.policy_objective_slope(*lists, case["ref_logprobs"], settings)
    assert_close(gradient, [-x for row in slopes for x in row])
    by_token = {(i, t): term for i, t, _, term in reference.policy_terms(*lists, settings)}
    terms = [term for _, term in sorted(by_token.items())]
    assert_close(statistics["ratio"], [term.ratio for term in terms])
    assert statistics["clipped"].tolist() == [float(term.clipped) for term in terms]
    assert ("clip_eps" in statistics) == (algorithm.clip_mode == "entropy_adaptive")
    if "clip_eps" in statistics:
        assert_close(statistics["clip_eps"], [term.clip_eps for term in terms])
    assert ("ref_kl_k3" in statistics) == (algorithm.kl_coef > 0)
    if "ref_kl_k3" in statistics:
        pairs = zip(sum(case["logprobs"], []), sum(case["ref_logprobs"], []))
        assert_close(statistics["ref_kl_k3"], [reference.kl_k3(new, ref) for new, ref in pairs])
    numbers = []
    for row in case["entropy"]:
        groups = reference.entropy_groups(row, algorithm.entropy_groups)
        numbers += [next(k for k, tau in enumerate(groups) if t in tau) for t in range(len(row))]
    assert statistics["entropy_group"].tolist() == numbers
    has_mask = "mask" in algorithm.rollout_correction
    assert ("masked" in statistics) == (has_mask or "max_divergence" in algorithm.gain_args)
    if "masked" in statistics:
        pairs = zip(sum(corrections, []), sum(masks, []))
        is_masked = [has_mask and correction == 0 or mask == 0 for correction, mask in pairs]
        assert statistics["masked"].tolist() == [float(masked) for masked in is_masked]
    distances = [a - b for rows in zip(case["old_logprobs"], case["rollout_logprobs"]) for a, b in zip(*rows)]
    assert_close(statistics["abs_dlogp"], [abs(d) for d in distances])
    return statistics["clipped"].tolist()


# ---- 2. Every value of every axis --------------------------------------------------------------------------


@each_clip
@each_ratio
def test_loss_and_gradient_of_every_combination(ratio_level, ratio_form, clip, float64):
    """Levels, forms, clips and aggregations in all combinations; the other axes take turns."""
    clipped = []
    for seed, loss_agg in enumerate(AXES["loss_agg"] * 4):
        config = config_of(
            ratio_level=ratio_level, ratio_form=ratio_form, loss_agg=loss_agg,
            entropy_groups=ALL_FRACTIONS[seed % 3], entropy_clip_coef=0.4,
            entropy_clip_form=AXES["entropy_clip_form"][seed // 2 % 3],
            clip_eps_low=1.0 if seed == 13 else 0.1, clip_eps_high=0.2 + 0.01 * seed,
            rollout_correction=AXES["rollout_correction"][(seed + seed // 6) % 6],
            rollout_correction_cap=1.1, rollout_correction_floor=0.9 * (seed % 2), kl_coef=0.3 * (seed // 10),
            clip_cap=None if seed % 3 else 1.5, old_policy=AXES["old_policy"][seed % 4 == 1], **CLIPS[clip],
        )  # fmt: skip
        case = random_case(seed, spread=0.4)
        clipped += assert_matches_reference(case, config, padding=seed % 3, elsewhere=(seed % 5, seed % 7))
    assert (0 < sum(clipped) < len(clipped)) == (clip not in UNCLIPPED), "both branches are reached"
    for seed, clip_cap in ((2, None), (5, 3.0), (6, 3.0), (8, 3.0)):  # ratios of many orders of magnitude
        config = config_of(ratio_level=ratio_level, ratio_form=ratio_form, clip_cap=clip_cap, **CLIPS[clip])
        assert_matches_reference(random_case(seed, 30.0, [3, 1, 6]), config)


@each_clip
def test_short_and_empty_completions(clip, float64):
    """Also with more entropy groups than tokens. A completion without tokens counts in N.

    The loss is a weight, which loss_agg chooses, times a gain, so the values of loss_agg take turns.
    """
    all_lengths = ([1], [1, 1], [0, 3], [3, 0, 0], [2], [1, 2])
    cases = itertools.product(all_lengths, enumerate(ALL_FRACTIONS))
    loss_aggs = itertools.islice(itertools.cycle(AXES["loss_agg"]), list(CLIPS).index(clip), None)
    for (lengths, (seed, fractions)), loss_agg in zip(cases, loss_aggs):
        level = {"ratio_level": "entropy_group", "entropy_groups": fractions}
        config = config_of(loss_agg=loss_agg, ratio_form="stop_gradient", **level, **CLIPS[clip])
        assert_matches_reference(random_case(seed, 0.4, lengths), config)


@each_loss_agg
@pytest.mark.parametrize("ratio_level", AXES["ratio_level"])
@pytest.mark.parametrize("num_rows", [0, 2])
def test_a_batch_without_tokens_has_loss_zero(num_rows, ratio_level, loss_agg, float64):
    """A NaN would spread from this rank to the other ranks."""
    case = {name: [[]] * num_rows for name in random_case(0, 0.1)}
    for clip in CLIPS.values():
        config = config_of(ratio_level=ratio_level, loss_agg=loss_agg, **clip)
        loss, gradient, _ = run_loss(case, config, padding=2)
        assert loss == 0 and gradient.numel() == 0


# ---- 3. Edges of the clip, groups, extreme ratios ----------------------------------------------------------


def equal_tokens(log_ratio: float, advantage: float, entropy: float = 0.0, num: int = 1) -> dict:
    """Return the case of one completion of `num` equal tokens."""
    values = {"logprobs": log_ratio, "advantages": advantage, "entropy": entropy}
    values |= dict.fromkeys(("old_logprobs", "rollout_logprobs", "ref_logprobs"), 0.0)
    return {name: [[value] * num] for name, value in values.items()}


def portable_log_ratio(near: float) -> tuple[float, float]:
    """Return a log-ratio whose exponential is the same float in torch and in math, and this float."""
    candidate = math.log(near)
    for _ in range(1000):
        if torch.tensor([candidate]).exp().item() == math.exp(candidate):
            return candidate, math.exp(candidate)
        candidate = math.nextafter(candidate, 1.0)
    raise AssertionError("no such float")


def test_a_geometric_mask_knows_the_length_of_each_completion(float64):
    """With r = e^0.5 of each token the geometric mean is e^0.5 whatever the length, outside of e^0.4."""
    algorithm = AlgorithmSettings(rollout_correction="geometric_mask", rollout_correction_cap=math.exp(0.4))
    mask = torch.tensor([[True, False, False, False], [True, True, True, True]])
    weights = train_rl.correction_weights(0.5 * mask, torch.zeros(2, 4), mask, algorithm)
    assert not weights.any()
    on_edges = algorithm.model_copy(update={"rollout_correction_floor": 1.0, "rollout_correction_cap": 1.0})
    assert train_rl.correction_weights(torch.zeros(2, 4), torch.zeros(2, 4), mask, on_edges).all()


def test_a_cap_inside_of_the_interval_ends_the_gradient_of_negative_advantages_alone(float64):
    ratio = torch.tensor([1.1, 1.1], requires_grad=True)
    gain, clipped = pessimistic(ratio, torch.tensor([-1.0, 1.0]), 0.8, 1.2, cap=1.05)
    gain.sum().backward()
    assert (gain.tolist(), ratio.grad.tolist(), clipped.tolist()) == ([-1.05, 1.1], [0, 1], [True, False])


@pytest.mark.parametrize("advantage", [1.0, -0.5])
@pytest.mark.parametrize("near", [1.2, 0.8])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("clip_mode", ["fixed", "weight"])
@pytest.mark.parametrize("ratio_level", AXES["ratio_level"])
def test_a_ratio_on_the_clip_edge_and_one_ulp_beside_it(
    ratio_level, clip_mode, beyond, near, advantage, float64
):
    """A ratio on the edge counts as unclipped. The edge is moved, the ratio stays."""
    log_ratio, ratio = portable_log_ratio(near)
    edge = math.nextafter(ratio, ratio + beyond * (1.0 - ratio)) if beyond else ratio
    eps = abs(edge - 1.0)
    assert edge in (1.0 - eps, 1.0 + eps)
    for form in ("geometric", "stop_gradient"):  # the literal ratio is a product, which rounds once more
        settings = {"clip_eps_low": eps, "clip_eps_high": eps, "ratio_form": form}
        config = config_of(ratio_level=ratio_level, clip_mode=clip_mode, **settings)
        clipped = assert_matches_reference(equal_tokens(log_ratio, advantage), config)
        raises_objective = (advantage > 0) == (near > 1)
        assert clipped == [float(beyond == 1 and (raises_objective or clip_mode == "weight"))]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("edge", [0.3, -0.3])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("ratio_form", AXES["ratio_form"])
def test_each_token_on_the_edge_of_gmpo_and_one_ulp_beside_it(ratio_form, beyond, edge, advantage, float64):
    log_ratio = math.log(1.0 + edge)
    if beyond:
        log_ratio = math.nextafter(log_ratio, math.inf * beyond * edge)
    gmpo = {"ratio_level": "sequence", "clip_mode": "before_mean", "clip_eps_low": 0.3, "clip_eps_high": 0.3}
    case = equal_tokens(log_ratio, advantage, num=3)
    clipped = assert_matches_reference(case, config_of(ratio_form=ratio_form, **gmpo))
    assert clipped == [float(beyond == 1 and (advantage > 0) == (edge > 0))] * 3


def test_gmpo_clips_a_masked_token_like_its_completion(float64):
    """A mask sets advantages to 0, which have no sign; the sign is taken from the unmasked tokens."""
    gmpo = {"ratio_level": "sequence", "clip_mode": "before_mean", "clip_eps_low": 0.2, "clip_eps_high": 0.2}
    algorithm = config_of(**gmpo).algorithm
    old = torch.full((1, 6), -1.0)
    for sign in (1.0, -1.0):
        log_ratio = sign * torch.tensor([[0.0, 0.0, 0.8, 0.8, 0.8, 0.8]])
        for num_unmasked in (6, 2):
            advantages = sign * (torch.arange(6) < num_unmasked).double().unsqueeze(0)
            gain, _ = train_rl.token_gain(loss_inputs(old + log_ratio, old, algorithm, advantages=advantages))
            assert gain[0, :2].tolist() == pytest.approx([sign * (1 + sign * 0.2) ** (4 / 6)] * 2)


def groups_of(entropies: list[float], fractions: tuple[float, ...], padding: int = 0) -> list[list[int]]:
    """Return the tokens of each entropy group of one completion, by the project."""
    row = torch.tensor([entropies + [9.0] * padding])
    mask = (torch.arange(row.shape[1]) < len(entropies)).unsqueeze(0)
    numbers = train_rl.entropy_groups(row, mask, fractions)[mask].tolist()
    return [[t for t, number in enumerate(numbers) if number == k] for k in range(len(fractions))]


@pytest.mark.parametrize(
    "fractions", [*ALL_FRACTIONS, (0.1, 0.9), (0.4, 0.6), (0.05, 0.1, 0.85), (0.6, 0.3, 0.1)]
)
def test_entropy_groups(fractions, float64):
    """Up to 60 tokens: fraction x tokens is whole, or one rounding away from whole, in every way."""
    rng = random.Random(0)
    for num_tokens in range(61):
        entropies = [rng.choice([0.0, 0.5, rng.uniform(0, 4)]) for _ in range(num_tokens)]
        expected = reference.entropy_groups(entropies, fractions)
        assert groups_of(entropies, fractions, padding=num_tokens % 4) == [sorted(tau) for tau in expected]
        assert sorted(sum(expected, [])) == list(range(num_tokens))
    expected = reference.entropy_groups([0.0] * 1000, fractions)
    assert groups_of([0.0] * 1000, fractions, padding=24) == expected, "equal entropies keep their order"


@each_clip
@each_ratio
def test_a_ratio_beyond_float32_gives_no_nan(ratio_level, ratio_form, clip):
    shapes = [[200.0], [-200.0], [200.0, -200.0, 0.0, 90.0], [500.0] * 3]
    rows = list(itertools.product(shapes, [1.5, -1.5, 0.0]))  # of one batch
    log_ratios = [row for row, _ in rows]
    advantages = [[advantage] * len(row) for row, advantage in rows]
    zeros = [[0.0] * len(row) for row in log_ratios]
    case = {
        "logprobs": log_ratios,
        "rollout_logprobs": log_ratios,
        "old_logprobs": zeros,
        "ref_logprobs": zeros,
    }
    case |= {"advantages": advantages, "entropy": [[0.7] * len(row) for row in log_ratios]}
    for mode in AXES["rollout_correction"]:
        ratio = {"ratio_level": ratio_level, "ratio_form": ratio_form}
        loss, gradient, statistics = run_loss(
            case, config_of(rollout_correction=mode, **ratio, **CLIPS[clip])
        )
        assert torch.isfinite(loss) and torch.isfinite(gradient).all()
        assert all(torch.isfinite(value).all() for value in statistics.values())
        assert not gradient[torch.tensor(sum(advantages, [])) == 0].any()


def test_a_kl_estimate_of_close_policies_is_exact_and_of_distant_ones_finite():
    """In float32, exp(d) - d - 1 would be pure rounding at d = 1e-4 nats, and exp(300) infinite."""
    algorithm = config_of(kl_coef=0.1).algorithm
    differences = [sign * 10.0**-k for k in range(1, 7) for sign in (1, -1)]
    old = torch.zeros(1, 12)
    inputs = loss_inputs(old, old, algorithm, ref_logprobs=torch.tensor([differences]))
    estimates = train_rl.policy_loss(inputs, torch.ones(1, 12))[1]["ref_kl_k3"][0]
    assert (estimates >= 0).all()
    expected = torch.tensor([reference.kl_k3(0.0, d) for d in differences[:8]])
    assert_close(estimates[:8], expected, rtol=1e-2, atol=0.0)
    logprobs = torch.full((1, 3), -300.0, requires_grad=True)
    zeros = torch.zeros(1, 3)
    inputs = loss_inputs(logprobs, logprobs.detach(), algorithm, ref_logprobs=zeros)
    loss, _ = train_rl.policy_loss(inputs, torch.full((1, 3), 1 / 3))
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("clip_mode", ["none", "before_mean"])
@pytest.mark.parametrize("num_tokens", [256, 4096, 16384])
def test_the_float32_gradient_of_a_geometric_ratio_keeps_its_digits(num_tokens, clip_mode):
    """Compare with float64, relative to the gradient's norm, on eight completions, because rounding is
    random."""
    generator = torch.Generator().manual_seed(num_tokens)
    old = torch.randn(8, num_tokens, generator=generator, dtype=torch.float64) - 2
    new = old + 0.02 * torch.randn(8, num_tokens, generator=generator, dtype=torch.float64)
    advantages = torch.randn(8, 1, generator=generator).expand(8, num_tokens)
    algorithm = config_of(ratio_level="sequence", clip_mode=clip_mode).algorithm
    gradients = []
    for dtype in (torch.float32, torch.float64):
        logprobs = new.float().to(dtype).requires_grad_()  # both precisions read the same numbers
        inputs = loss_inputs(logprobs, old.float().to(dtype), algorithm, advantages=advantages.to(dtype))
        loss, _ = train_rl.policy_loss(inputs, torch.full(new.shape, 1 / (8 * num_tokens), dtype=dtype))
        loss.backward()
        gradients.append(logprobs.grad.double())
    assert (gradients[0] - gradients[1]).norm() < 1e-7 * gradients[1].norm()


# ---- 4. Equal methods --------------------------------------------------------------------------------------


@each_clip
def test_at_the_old_policy_every_ratio_and_clip_has_one_gradient(clip, float64):
    """The ratio is 1 and the gradient w A, also for tokens whose clip interval is one point (entropy 0)."""
    lengths = [5, 1, 0, 8]
    for seed in range(5):
        case = random_case(seed, 0.0, lengths)
        case["logprobs"] = case["rollout_logprobs"] = case["old_logprobs"]
        case["advantages"] = [[a] * n for a, n in zip((1.5, -0.5, 1.0, -2.0), lengths)]
        expected = [-a / (4 * len(row)) for row in case["advantages"] for a in row]
        for level, form in RATIOS:
            config = config_of(ratio_level=level, ratio_form=form, **CLIPS[clip])
            _, gradient, statistics = run_loss(case, config)
            assert_close(gradient, expected)
            assert_close(statistics["ratio"], [1.0] * 14)


@pytest.mark.parametrize("has_moved", [False, True])
@pytest.mark.parametrize("old_policy", AXES["old_policy"])
def test_the_distance_to_the_engine_is_unknown_after_an_update_without_an_old_pass(
    old_policy, has_moved, float64
):
    """Without an old-logprob pass, only the forward pass of the first update measures the distance."""
    batch, _ = batch_of(random_case(1, 0.3, [3, 5]))
    batch.old_logprobs = None
    batch.ref_logprobs = None
    logprobs = batch.rollout_logprobs + 0.25
    _, statistics = train_rl.micro_batch_loss(
        PolicyOutputs(logprobs, batch.entropy), batch, [0, 1], torch.tensor([2, 8]), LOG_VOCAB,
        config_of(old_policy=old_policy), has_moved,
    )  # fmt: skip
    assert ("abs_dlogp" in statistics) == ("mismatch_k3" in statistics) == (not has_moved)
    if not has_moved:
        assert_close(statistics["abs_dlogp"][batch.response_mask], [0.25] * 8)


def test_the_first_update_of_a_step_has_ratio_one_whatever_the_old_pass_rounded(float64):
    """The recorded log-probabilities are off by 0.01, as in bfloat16; ESPO's clip is narrower. They still
    measure the distance to the engine."""
    batch, _ = batch_of(random_case(1, 0.3, [3, 5]))
    logprobs = (batch.old_logprobs + 0.01).requires_grad_()
    config = config_of(ratio_level="entropy_group", clip_mode="entropy_adaptive")
    arguments = PolicyOutputs(logprobs, batch.entropy), batch, [0, 1], torch.tensor([2, 8]), LOG_VOCAB, config
    _, statistics = train_rl.micro_batch_loss(*arguments, has_moved=False)
    assert (statistics["ratio"] == 1).all() and not statistics["clipped"].any()
    distance = (batch.old_logprobs - batch.rollout_logprobs).abs()
    assert torch.equal(statistics["abs_dlogp"], distance)
    _, statistics = train_rl.micro_batch_loss(*arguments, has_moved=True)
    assert (statistics["ratio"] != 1)[batch.response_mask].all() and statistics["clipped"].any()


# GRPO without any axis, which the defaults have to equal bit by bit
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
    """Compare advantages, loss and gradient in float32; only kl_coef differs from its default."""
    rng = random.Random(0)
    config = config_of(kl_coef=kl_coef)
    for seed in range(10):
        batch, logprobs = batch_of(random_case(seed, spread, [7, 3, 1, 0, 5, 8, 2, 2]), padding=seed % 2)
        statuses = [rng.choice(["ok", "ok", "wrong", "no_answer", "timeout"]) for _ in range(8)]
        batch.group_index = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
        judge_batch(batch, [Verdict(float(status == "ok"), status) for status in statuses])
        batch.rewards = train_rl.compute_rewards(batch, None, [], config)
        batch.advantages = train_rl.token_advantages(batch, config)
        expected = grpo_advantages(batch.rewards, batch.valid, batch.group_index)
        expected = expected.unsqueeze(1).expand_as(batch.response_mask) * batch.response_mask
        assert torch.equal(batch.advantages, expected)
        ours = logprobs.clone().requires_grad_()
        theirs = logprobs.clone().requires_grad_()
        counts = torch.tensor([11, 99])
        loss, _ = train_rl.micro_batch_loss(
            PolicyOutputs(ours, batch.entropy), batch, list(range(8)), counts, LOG_VOCAB, config
        )
        expected_loss = grpo_loss(
            theirs, batch.old_logprobs, expected, batch.response_mask, 11, kl_coef, batch.ref_logprobs
        )
        (loss + expected_loss).backward()
        assert loss.dtype == torch.float32 and torch.equal(loss, expected_loss)
        assert torch.equal(ours.grad, theirs.grad)


# ---- 5. Rewards and advantages -----------------------------------------------------------------------------


def test_the_overlong_penalty():
    for num_tokens, buffer in itertools.product(range(21), (0, 1, 5, 20)):
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


def random_groups(seed: int, num_groups: int = 4) -> list[Group]:
    """Draw groups of 1 to 5 completions; some are all right, some all wrong or without verdicts."""
    rng = random.Random(seed)
    groups = []
    for slot in range(num_groups):
        size = rng.randint(1, 5)
        choices = rng.choice([STATUSES, STATUSES, ["ok"], ["wrong", "timeout"]])
        completions = []
        verdicts = []
        for _ in range(size):
            ids = [rng.randrange(4) for _ in range(rng.randint(1, MAX_NEW_TOKENS))]
            completions.append(Completion(ids, [-1.0] * len(ids), "stop", 0.0))
            status = rng.choice(choices)
            score = 1.0 if status == "ok" else rng.choice([0.0, 0.5]) if status == "wrong" else 0.0
            verdicts.append(Verdict(score, status))
        groups.append(Group(slot, 0, judged(completions, verdicts)))
    return groups


def batch_of_groups(groups: list[Group], seed: int = 0, binary: bool = False) -> RolloutBatch:
    batch = collate(groups, [Prompt("a", "1", "exact", "set")], [[1]], binary)
    generator = torch.Generator().manual_seed(seed)
    entropy = torch.rand(batch.response_mask.shape, generator=generator) * 2
    batch.entropy = entropy.masked_fill(~batch.response_mask, 9.0)  # padding is no uncertain token
    return batch


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"binary": True},
        {"overlong_buffer": 5, "overlong_coef": 0.7},
        {"repetition_coef": 0.4, "repetition_ngram": 2},
        {"judge_weight": 0.3},
        {"binary": True, "overlong_buffer": 9, "repetition_coef": 0.1, "judge_weight": 1.0},
    ],
    ids=str,
)
def test_rewards(shape, float64):
    """The score of the judge's stand-in is the number of the completion, mapped to (0, 1)."""
    config = settings_of(**{f"reward__{name}": value for name, value in shape.items()})
    settings = config.reward
    judge = None
    if "judge_weight" in shape:
        judge = SimpleNamespace(scores=lambda prompts, texts: [len(text) - 3.0 for text in texts])
    for seed in range(5):
        batch = batch_of_groups(random_groups(seed), binary=settings.binary)
        texts = ["x" * i for i in range(len(batch.verdicts))]
        expected = [
            reference.shaped_reward(
                float(verdict.status == "ok") if settings.binary else verdict.reward,
                1 / (1 + math.exp(3.0 - i)) if judge else None,
                settings.judge_weight,
                settings.overlong_coef,
                reference.soft_overlong_punishment(len(ids), MAX_NEW_TOKENS, settings.overlong_buffer),
                settings.repetition_coef,
                reference.repetition_ratio(ids, settings.repetition_ngram),
            )
            for i, (verdict, ids) in enumerate(zip(batch.verdicts, batch.completion_ids))
        ]
        assert_close(train_rl.compute_rewards(batch, judge, texts, config), expected)


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("tie_band", [0.0, 0.2])
@pytest.mark.parametrize("correctness_guard", [False, True])
@pytest.mark.parametrize("rl_zvp, binary", [(False, False), (True, False), (True, True)])
def test_advantages_of_tokens(advantage, tie_band, correctness_guard, rl_zvp, binary, float64):
    algorithm = ADVANTAGES[advantage] | {"tie_band": tie_band, "correctness_guard": correctness_guard}
    config = settings_of(
        **{f"algorithm__{name}": value for name, value in algorithm.items()},
        zero_variance__rl_zvp=rl_zvp, zero_variance__rl_zvp_coef=0.3, reward__binary=binary,
    )  # fmt: skip
    settings = algorithm | {"adv_norm": advantage, "rl_zvp": rl_zvp, "rl_zvp_coef": 0.3}
    if "advantage" in algorithm:
        settings["tie_band"] = 0.0  # replaced by the plug-in
    num_reshaped = 0
    for seed in range(8):
        rng = random.Random(seed)
        groups = random_groups(seed)
        batch = batch_of_groups(groups, seed, binary)
        scores = [float(v.status == "ok") if binary else v.reward for v in batch.verdicts]
        batch.rewards = torch.tensor([x - rng.choice([0.0, rng.random()]) for x in scores])
        if advantage == "maxrl":
            batch.rewards = batch.rewards + 1  # MaxRL divides by the mean
        sizes = [len(group.completions) for group in groups]
        has_verdict = ("ok", "wrong", "no_answer")
        valid = [[c.verdict.status in has_verdict for c in group.completions] for group in groups]
        rewards = [row.tolist() for row in batch.rewards.split(sizes)]
        settings["std_of_batch"] = reference.batch_std(list(zip(rewards, valid)))
        actual = train_rl.token_advantages(batch, config)
        assert actual.shape == batch.response_mask.shape and not actual[~batch.response_mask].any()
        start = 0
        for number, size in enumerate(sizes):
            rows = slice(start, start + size)
            start = rows.stop
            entropies = [row[m].tolist() for row, m in zip(batch.entropy[rows], batch.response_mask[rows])]
            lists = rewards[number], scores[rows], valid[number], entropies
            expected = reference.token_advantages(*lists, settings)
            assert_close(actual[rows][batch.response_mask[rows]], sum(expected, []))
            num_reshaped += any(len(set(row)) > 1 for row in expected)
    assert (num_reshaped > 3) == rl_zvp, "the groups reach both branches"


def test_maxrl_refuses_negative_rewards(float64):
    inputs = AdvantageInputs(
        torch.tensor([0.75, -0.25]), [{}] * 2, torch.ones(2, dtype=torch.bool), *torch.zeros(2, 2), ONE_RANK
    )
    with pytest.raises(ValueError, match="negative"):
        load_plugin(config_of(**ADVANTAGES["maxrl"]).algorithm, "advantage")(inputs)


def test_a_batch_without_rows_has_no_advantages():
    batch = collate([], [], [])
    config = settings_of(zero_variance__rl_zvp=True)
    batch.rewards = train_rl.compute_rewards(batch, None, [], config)
    assert train_rl.token_advantages(batch, config).shape == (0, 1)


# ---- 6. Tokens and rewards of all ranks --------------------------------------------------------------------
SEVERAL = "0.7*exact + 0.3*characters"  # a kind with several rewards
TOP_ENTROPY = "top_entropy.py:top_entropy"
CLIP_COV = "clip_cov.py:clip_cov"
SELECTIONS = {
    "top entropy": plugin("select", TOP_ENTROPY, fraction=0.2),
    "top entropy of uncut": plugin("select", TOP_ENTROPY, fraction=0.5) | {"leave_out_cut": True},
    "clip_cov": plugin("select", CLIP_COV, fraction=0.25, low=0.0, high=0.8),
    "clip_cov of more than there are": plugin("select", CLIP_COV, fraction=0.9, low=0.0, high=0.8),
    "clip_cov of an empty range": plugin("select", CLIP_COV, fraction=0.01, low=50.0, high=60.0),
}


def completions_to_select_from(num: int, share_of_zeros: float, num_minibatches: int) -> list[dict]:
    rng = random.Random(num)
    completions = []
    for i in range(num):
        length = rng.choice([1, 2, 5, 9])
        completions.append({
            "old_logprobs": [-rng.expovariate(1.0) for _ in range(length)],
            "advantages": [rng.gauss(0, 1) * (rng.random() >= share_of_zeros)] * length,
            "entropy": [rng.choice([0.0, 0.7, rng.uniform(0, 3)]) for _ in range(length)],
            "group": i // 2, "prompt_ids": [i // 2],
            "completion_ids": [rng.randrange(9) for _ in range(length)],
            "finish_reason": rng.choice(["stop", "length"]), "minibatch": i % num_minibatches,
        })  # fmt: skip
    return completions


def selected(completions: list[dict], config: Config, step: int = 0) -> list[list[float]]:
    """Return the advantages after select_tokens() as ragged lists. Collective."""
    batch = make_batch(
        [c["completion_ids"] for c in completions],
        [c["prompt_ids"] for c in completions],
        [c["group"] for c in completions],
        padding=1,
        **{name: [c[name] for c in completions] for name in ("old_logprobs", "advantages", "entropy")},
    )
    batch.finish_reason = [c["finish_reason"] for c in completions]
    batch.minibatch = torch.tensor([c["minibatch"] for c in completions], dtype=torch.int64)
    advantages = train_rl.select_tokens(batch.advantages, batch, config, step)
    assert not advantages[~batch.response_mask].any()
    return [row[mask].tolist() for row, mask in zip(advantages, batch.response_mask)]


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_tokens_are_selected_over_the_ranks_of_an_update(name, num_minibatches, monkeypatch, float64):
    """The selection follows the equations, however groups are dealt to 1, 2 or 3 ranks, one of them empty."""
    is_drawn = name.startswith("clip_cov")
    completions = completions_to_select_from(
        60 if is_drawn else 13, 0.0 if is_drawn else 0.5, num_minibatches
    )
    algorithm = {f"algorithm__{key}": value for key, value in SELECTIONS[name].items()}
    config = settings_of(train__minibatches_per_step=num_minibatches, **algorithm)
    results = []
    for deal in ([completions], [completions[:4], completions[4:]], [completions[6:], [], completions[:6]]):
        ranks = FakeRanks(len(deal)).install(monkeypatch)
        rows = sum(ranks.run(lambda rank, deal=deal: selected(deal[rank], config)), [])
        order = [completions.index(c) for of_rank in deal for c in of_rank]
        results.append([row for _, row in sorted(zip(order, rows))])
    assert results[0] == results[1] == results[2]
    for number in range(num_minibatches):
        pairs = [(c, row) for c, row in zip(completions, results[0]) if c["minibatch"] == number]
        check_selection([c for c, _ in pairs], [row for _, row in pairs], config.algorithm)


def check_selection(completions: list[dict], advantages: list[list[float]], algorithm) -> None:
    """Compare the advantages of one update after the selection with the equations."""
    was_cut = [algorithm.leave_out_cut and c["finish_reason"] == "length" for c in completions]
    expected = [[0.0 if cut else a for a in c["advantages"]] for cut, c in zip(was_cut, completions)]
    arguments = algorithm.select_args
    if algorithm.select.endswith(TOP_ENTROPY):
        uncertain = reference.most_uncertain([c["entropy"] for c in completions], arguments["fraction"])
        assert advantages == [[a if u else 0.0 for a, u in zip(*rows)] for rows in zip(expected, uncertain)]
        return
    covariances = reference.covariances(expected, [c["old_logprobs"] for c in completions])
    tokens = [token for rows in zip(expected, covariances, advantages) for token in zip(*rows)]
    assert all(a and result in (a, 0.0) for a, _, result in tokens), "a dropped token would not show"
    eligible = [token for token in tokens if arguments["low"] < token[1] < arguments["high"]]
    limit = max(1, int(arguments["fraction"] * len(tokens)))
    num_dropped = sum(result == 0 for _, _, result in tokens)
    assert num_dropped == sum(result == 0 for _, _, result in eligible) == min(limit, len(eligible))


def test_clip_cov_draws_as_many_tokens_if_completions_are_equal(float64):
    """Of four equal right and four equal wrong answers one token is drawn, a different one at each step."""
    batch = make_batch([[0]] * 8, old_logprobs=[[-0.2]] * 4 + [[-1.6]] * 4, entropy=[[0.0]] * 8)
    advantages = torch.tensor([[1.0]] * 4 + [[-1.0]] * 4)
    config = config_of(**plugin("select", CLIP_COV, fraction=0.01, low=0.0, high=9.0))
    drawn = []
    for step in range(60):
        (row,) = (train_rl.select_tokens(advantages, batch, config, step) == 0).flatten().nonzero().tolist()
        drawn += row
    assert set(drawn) == set(range(8))


def test_clip_cov_draws_among_all_sampled_tokens_of_an_episode(float64):
    """Of 2 sampled, 3 inserted and 2 sampled tokens, which covary alike, each sampled one is drawn."""
    sampled = [True, True, False, False, False, True, True]
    drawn = set()
    for step in range(40):
        batch = make_batch([[0] * 7] * 2, old_logprobs=[[-0.5] * 7, [-1.5] * 7], entropy=[[0.0] * 7] * 2)
        batch.response_mask = torch.tensor([sampled] * 2)
        batch.finish_reason = ["stop"] * 2
        advantages = torch.tensor([[1.0], [-1.0]]) * batch.response_mask
        config = config_of(**plugin("select", CLIP_COV, fraction=0.1, low=-9.0, high=9.0))
        kept = train_rl.select_tokens(advantages, batch, config, step) != 0
        drawn |= {tuple(place) for place in (batch.response_mask & ~kept).nonzero().tolist()}
    assert drawn == {(row, t) for row in (0, 1) for t in (0, 1, 5, 6)}


@pytest.mark.parametrize("name", ["top entropy", "clip_cov"])
def test_a_step_without_groups_selects_no_tokens(name):
    """No rank has run an old-logprob pass then, so there are no entropies."""
    advantages = train_rl.select_tokens(
        torch.zeros(0, 1), collate([], [], []), config_of(**SELECTIONS[name]), 0
    )
    assert advantages.shape == (0, 1)


def advantages_of_ranks(monkeypatch, deals: list[list[dict]], config: Config) -> list[float]:
    """Return the advantages of all ranks' completions; a deal is one rank's groups, see gdpo_groups()."""

    def on_rank(rank: int) -> list[float]:
        rows = [(slot, g, i) for slot, g in enumerate(deals[rank]) for i in range(len(g["valid"]))]
        batch = make_batch([[1]] * len(rows), group_index=[slot for slot, _, _ in rows])
        batch.prompts = [Prompt("a", "1", group["kind"], "set") for _, group, _ in rows]
        parts = [{kind: row[i] for kind, row in group["rewards"].items()} for _, group, i in rows]
        batch.verdicts = [
            Verdict(next(iter(p.values())), "wrong", parts=p if len(p) > 1 else {}) for p in parts
        ]
        batch.valid = torch.tensor([group["valid"][i] for _, group, i in rows], dtype=torch.bool)
        batch.rewards = torch.tensor([verdict.reward for verdict in batch.verdicts])
        if "gdpo" in config.algorithm.advantage:  # refuses rewards that are not the sums of their parts
            weights = [group["weights"] for _, group, _ in rows]
            sums = [sum(w[kind] * p[kind] for kind in p) / sum(w.values()) for w, p in zip(weights, parts)]
            batch.rewards = torch.tensor(sums)
        return train_rl.token_advantages(batch, config)[:, 0].tolist()

    return sum(FakeRanks(2).install(monkeypatch).run(on_rank), [])


def gdpo_groups() -> list[dict]:
    """Draw groups with several rewards and, for the kind exact, with one; group 1 has equal rewards."""
    rng = random.Random(0)
    groups = []
    for kind in [SEVERAL, SEVERAL, "exact", "2*exact + 1*characters", SEVERAL]:
        size = rng.randint(4, 7)
        weights = {part: weight for weight, part in parts_of(kind)}
        rewards = {part: [rng.choice([0.0, 0.5, 1.0]) for _ in range(size)] for part in weights}
        valid = [rng.random() < 0.8 for _ in range(size)]
        groups.append({"kind": kind, "weights": weights, "rewards": rewards, "valid": valid})
    groups[1]["rewards"] = {part: [0.5] * len(row) for part, row in groups[1]["rewards"].items()}
    return groups


def test_gdpo_normalises_each_reward_over_two_ranks(monkeypatch, float64):
    groups = gdpo_groups()
    config = config_of(**plugin("advantage", "gdpo.py:gdpo"))
    advantages = advantages_of_ranks(monkeypatch, [groups[:3], groups[3:]], config)
    expected = reference.gdpo_advantages(groups)
    assert_close(advantages, sum(expected, []))
    assert [any(row) for row in expected] == [True, False, True, True, True]


def test_the_standard_deviation_of_a_batch_is_over_all_ranks(monkeypatch, float64):
    groups = gdpo_groups()
    rewards = [(group["rewards"]["exact"], group["valid"]) for group in groups]
    std = reference.batch_std(rewards)
    expected = [reference.group_advantages(*group, "batch_std", std_of_batch=std) for group in rewards]
    advantages = advantages_of_ranks(
        monkeypatch, [groups[:2], groups[2:]], config_of(**ADVANTAGES["batch_std"])
    )
    assert_close(advantages, sum(expected, []))


@pytest.mark.parametrize("split", [0, 1, 3, 5])
def test_the_variance_filter_is_over_all_ranks(split, monkeypatch, float64):
    """Groups that hold 0.7 of the spread of all ranks keep their advantages. A rank may have no group."""
    groups = gdpo_groups()
    rewards = [(next(iter(group["rewards"].values())), group["valid"]) for group in groups]
    deviations = [statistics.stdev([r for r, ok in zip(*group) if ok]) for group in rewards]
    order = sorted(range(len(groups)), key=lambda i: -deviations[i])
    shares = list(itertools.accumulate(deviations[i] / sum(deviations) for i in order))
    kept = order[: 1 + sum(share < 0.7 for share in shares)]
    assert 1 < len(kept) < 4
    expected = [
        reference.group_advantages(*group) if i in kept else [0.0] * len(group[0])
        for i, group in enumerate(rewards)
    ]
    config = config_of(**plugin("advantage", "variance_filter.py:variance_filter", share=0.7))
    advantages = advantages_of_ranks(monkeypatch, [groups[:split], groups[split:]], config)
    assert_close(advantages, sum(expected, []))


# ---- 7. The reference itself -------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [clip for clip in CLIPS if clip not in WEIGHTED])
@pytest.mark.parametrize("ratio_level", AXES["ratio_level"])
def test_slopes_of_the_reference_are_derivatives_of_its_values(ratio_level, clip):
    """Without sg[], the gradient is the derivative of the value."""
    config = config_of(
        ratio_level=ratio_level, entropy_clip_coef=0.4, kl_coef=0.3, loss_agg="token_group_mean",
        clip_cap=1.3, **CLIPS[clip],
    )  # fmt: skip
    case = random_case(2, 0.4, [5, 1, 8])
    step = 1e-6
    fixed = [case[name] for name in ("old_logprobs", "advantages", "entropy", "ref_logprobs")]
    fixed.append(reference_settings(config, case))
    slopes = reference.policy_objective_slope(case["logprobs"], *fixed)
    for i, row in enumerate(case["logprobs"]):
        for t in range(len(row)):
            above = [list(r) for r in case["logprobs"]]
            below = [list(r) for r in case["logprobs"]]
            above[i][t] += step
            below[i][t] -= step
            difference = reference.policy_objective(above, *fixed) - reference.policy_objective(below, *fixed)
            assert difference / (2 * step) == pytest.approx(slopes[i][t], rel=1e-6, abs=1e-9)
