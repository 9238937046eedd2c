"""experiments/studies/real_regime: metrics of the plug-in against loops, and figures against a record."""

import math

import pytest
import torch

import train_rl
from batch import LossInputs
from experiments.studies.real_regime.recorded_gain import ALPHAS
from experiments.studies.real_regime.recorded_gain import LENGTHS as BINS
from settings import AlgorithmSettings

PLUGIN = "experiments/studies/real_regime/recorded_gain.py:recorded_gain"
LENGTHS = (3, 8, 20)  # tokens of the completions


def make_inputs(algorithm: AlgorithmSettings) -> LossInputs:
    """Return random inputs of three completions; the second has no advantage."""
    torch.manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS))
    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS).unsqueeze(1)
    entropy = 2 * torch.rand(shape)
    old_logprobs = -torch.rand(shape)
    return LossInputs(
        logprobs=(old_logprobs + 0.01 * torch.randn(shape)).requires_grad_(),
        old_logprobs=old_logprobs,
        rollout_logprobs=old_logprobs,
        ref_logprobs=None,
        advantages=torch.tensor([[1.0], [0.0], [-0.5]]) * mask,
        entropy=entropy,
        token_groups=train_rl.token_groups_of(entropy, mask, algorithm),
        mask=mask,
        log_vocab=math.log(98),
        settings=algorithm,
    )


def expected_figures(inputs: LossInputs) -> dict[str, float]:
    """Return the sums of the plug-in's metrics over all tokens, computed group by group."""
    sums = dict.fromkeys(f"squared_{kind}_{n}" for kind in ("uncertain", "completion") for n in BINS)
    sums = dict.fromkeys([*sums, *(name.replace("squared", "groups") for name in sums)], 0.0)
    sums |= dict.fromkeys([f"cut_{alpha}" for alpha in ALPHAS] + ["cut_tokens"], 0.0)
    for row, length in enumerate(LENGTHS):
        log_ratio = inputs.log_ratio[row, :length].tolist()
        entropy = inputs.entropy[row, :length].tolist()
        uncertain = sorted(range(length), key=lambda t: -entropy[t])[: math.ceil(0.2 * length)]
        largest = min(n for n in BINS if length <= n)
        for kind, tokens in (("uncertain", uncertain), ("completion", range(length))):
            mean = sum(log_ratio[t] for t in tokens) / len(tokens)
            sums[f"squared_{kind}_{largest}"] += mean**2
            sums[f"groups_{kind}_{largest}"] += 1
        advantage = inputs.advantages[row, 0].item()
        if advantage == 0:
            continue
        sums["cut_tokens"] += len(uncertain)
        excess = math.exp(sum(log_ratio[t] for t in uncertain) / len(uncertain)) - 1
        for alpha in ALPHAS:
            eps = alpha * sum(entropy[t] for t in uncertain) / len(uncertain) / math.log(98)
            is_cut = excess > eps if advantage > 0 else excess < -eps
            sums[f"cut_{alpha}"] += len(uncertain) * is_cut
    return sums


def test_metrics_of_token_groups_equal_a_loop(float64):
    inputs = make_inputs(AlgorithmSettings(gain=PLUGIN))
    _, statistics = train_rl.token_gain(inputs)
    expected = expected_figures(inputs)
    sums = {name: (statistics[f"regime/{name}"] * inputs.mask).sum().item() for name in expected}
    assert sums == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert 0 < expected["cut_0.02"] and expected["cut_0.6"] < expected["cut_tokens"]


@pytest.mark.parametrize("level, clip_mode", [("token", "fixed"), ("entropy_group", "entropy_adaptive")])
def test_the_loss_is_the_built_in_loss(level, clip_mode, float64):
    built_in = make_inputs(AlgorithmSettings(ratio_level=level, clip_mode=clip_mode))
    recorded = make_inputs(
        AlgorithmSettings(ratio_level=level, gain=PLUGIN, gain_args={"clip_mode": clip_mode})
    )
    results = []
    for inputs in (built_in, recorded):
        gain, statistics = train_rl.token_gain(inputs)
        gain.sum().backward()
        results.append((gain.tolist(), inputs.logprobs.grad.tolist(), statistics["clipped"].tolist()))
    assert results[0] == results[1]
