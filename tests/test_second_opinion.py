"""Our losses against TRL's own code, in float64; skipped if TRL is not installed.

    pip install --no-deps --target FOLDER trl==1.16.0
    PYTHONPATH=FOLDER python -m pytest tests/test_second_opinion.py

The loss of TRL's trainer is called on random log-probabilities, with a stand-in for the trainer that has the
attributes which the loss reads. TRL multiplies its KL term by the ratio unless use_bias_correction_kl is off.
"""

import functools
import importlib.util
import math
import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_close
from helpers import FakeRanks, make_batch, plugin

import train_rl
from batch import PolicyOutputs, RolloutBatch
from settings import AlgorithmSettings, Config

pytestmark = [
    pytest.mark.slow(process="others"),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed"),
]
MAX_NEW_TOKENS = 13
GSPO = {"ratio_level": "sequence", "clip_eps_low": 0.1, "clip_eps_high": 0.15}
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15}
KL = {"beta": 0.3, "use_bias_correction_kl": False}


CASES = {  # {method: (our settings, TRL's)}
    "grpo": ({}, {}),
    "grpo with kl": ({"kl_coef": 0.3}, KL),
    "dr_grpo": ({"loss_agg": "fixed_length"}, {"loss_type": "dr_grpo"}),
    "dapo": ({"loss_agg": "token_mean", "clip_eps_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "two_sided_clip": ({"clip_cap": 1.5}, {"delta": 1.5}),
    "gspo": (GSPO, SEQUENCE),
    "gspo with kl": (GSPO | {"kl_coef": 0.3}, SEQUENCE | KL),
    "luspo": (GSPO | {"loss_agg": "sequence_sum"}, SEQUENCE | {"loss_type": "luspo"}),
    "cispo": (
        {"clip_mode": "weight", "clip_eps_low": 1.0, "clip_eps_high": 0.3, "loss_agg": "token_mean"},
        {"loss_type": "cispo", "epsilon_high": 1.3},
    ),
    "sapo": (plugin("gain", "sapo.py:sapo", tau_positive=0.7, tau_negative=2.0), {"loss_type": "sapo"}),
    "vespo": (
        plugin("gain", "vespo.py:vespo", power_positive=1.5, power_negative=2.5, decay_positive=2.0,
               decay_negative=1.0) | {"loss_agg": "token_mean"},
        {"loss_type": "vespo"},
    ),
    "mask_off_policy": (
        plugin("gain", "off_policy_mask.py:off_policy_mask", max_divergence=0.05),
        {"off_policy_mask_threshold": 0.05},
    ),
    "top_entropy": (
        plugin("select", "top_entropy.py:top_entropy", fraction=0.2), {"top_entropy_quantile": 0.2},
    ),
    "tis_token": ({"rollout_correction": "token_tis", "rollout_correction_cap": 1.1}, {"correction": True}),
    "icepop": (
        {"rollout_correction": "token_mask", "rollout_correction_cap": 1.1, "rollout_correction_floor": 0.8},
        {"correction": True},
    ),
    "mask_sequence": ({"rollout_correction": "sequence_mask"}, {"correction": True}),
    "gmpo": (
        {"ratio_level": "sequence", "clip_mode": "before_mean", "clip_eps_low": 1 - math.exp(-0.1),
         "clip_eps_high": math.exp(0.15) - 1},
        {"trainer": "gmpo", "epsilon_low": 0.1, "epsilon_high": 0.15},
    ),
}  # fmt: skip


def random_batch(seed: int) -> tuple[RolloutBatch, torch.Tensor]:
    """Return completions with one advantage each, and their log-probabilities by the policy."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 9) for _ in range(rng.randint(2, 6))]

    def near(rows: list[list[float]], spread: float) -> list[list[float]]:
        return [[x + rng.uniform(-spread, spread) for x in row] for row in rows]

    ids = [[0] * n for n in lengths]
    old = [[-rng.expovariate(1.0) for _ in range(n)] for n in lengths]
    batch = make_batch(
        ids, padding=2, old_logprobs=old, rollout_logprobs=near(old, 0.2), ref_logprobs=near(old, 0.5),
        entropy=near([[1.0] * n for n in lengths], 1.0), advantages=[[rng.gauss(0, 1)] * n for n in lengths],
    )  # fmt: skip
    logprobs = make_batch(ids, padding=2, old_logprobs=near(old, 0.3)).old_logprobs
    return batch, logprobs.requires_grad_()


def our_loss(batch: RolloutBatch, logprobs: torch.Tensor, settings: dict) -> torch.Tensor:
    config = Config.model_validate({"algorithm": settings, "rollout": {"max_new_tokens": MAX_NEW_TOKENS}})
    batch.advantages = train_rl.select_tokens(batch.advantages, batch, config, 0)
    rows = list(range(len(logprobs)))
    counts = torch.tensor([len(logprobs), int(batch.response_mask.sum())])
    return train_rl.micro_batch_loss(
        PolicyOutputs(logprobs, batch.entropy), batch, rows, counts, 1.0, config
    )[0]


def their_loss(batch: RolloutBatch, logprobs: torch.Tensor, ours: dict, settings: dict) -> torch.Tensor:
    """Return the loss of TRL's trainer, called on a stand-in."""
    from trl.experimental.gmpo import GMPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer = GMPOTrainer if settings.get("trainer") == "gmpo" else GRPOTrainer
    arguments = {
        "delta": settings.get("delta"),
        "use_bias_correction_kl": settings.get("use_bias_correction_kl", True),
        "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0, "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.0,
        "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.0, "steps_per_generation": 1,
    }  # fmt: skip
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, dim, pad_index: x,
    )  # fmt: skip
    stand_in = SimpleNamespace(
        args=SimpleNamespace(**arguments), accelerator=accelerator, model=SimpleNamespace(training=False),
        loss_type="grpo", importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.2, beta=0.0,
        off_policy_mask_threshold=None, top_entropy_quantile=1.0, max_completion_length=MAX_NEW_TOKENS,
        use_vllm="correction" in settings, vllm_importance_sampling_correction=True, aux_loss_enabled=False,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)), get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, batch.entropy, None),
    )  # fmt: skip
    vars(stand_in).update({name: value for name, value in settings.items() if name in vars(stand_in)})
    stand_in.get_high_entropy_mask = functools.partial(GRPOTrainer.get_high_entropy_mask, stand_in)
    mask = batch.response_mask
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    algorithm = AlgorithmSettings(**{key: ours[key] for key in ours if "rollout_correction" in key})
    weights = train_rl.correction_weights(batch.old_logprobs, batch.rollout_logprobs, mask, algorithm)
    return trainer._compute_loss(stand_in, None, {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
        "completion_mask": mask.long(),
        "advantages": batch.advantages[:, 0], "old_per_token_logps": batch.old_logprobs,
        "ref_per_token_logps": batch.ref_logprobs, "sampling_per_token_logps": batch.rollout_logprobs,
        "importance_sampling_ratio": weights, "num_items_in_batch": mask.sum(),
    })  # fmt: skip


@pytest.mark.parametrize("method", CASES)
def test_loss_and_gradient_equal_those_of_trl(method, monkeypatch, float64):
    FakeRanks(1).install(monkeypatch)
    ours, theirs = CASES[method]
    num_with_gradient = 0
    for seed in range(10):
        batch, logprobs = random_batch(seed)
        expected = their_loss(batch, logprobs, ours, theirs)
        (expected_gradient,) = torch.autograd.grad(expected, logprobs)
        loss = our_loss(batch, logprobs, ours)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=1e-14)
        assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-14)
        num_with_gradient += gradient.abs().max().item() > 1e-6
    assert num_with_gradient > 7
