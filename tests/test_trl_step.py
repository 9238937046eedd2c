"""experiments.bench.trl_step: the reward, the table, and the settings that both sides share."""

import importlib.util
from pathlib import Path

import pytest
from conftest import ROOT

from configure import load_config
from experiments.bench import trl_step
from experiments.bench.common import spread

DEMO = load_config(["--config", str(ROOT / "experiments" / "environments" / "demo.yaml")])


def test_the_reward_strips_the_text():
    assert trl_step.is_right([" 12", "12 3", "", "7"], answer=["12", "123", "4", "7"]) == [1.0, 0.0, 0.0, 1.0]


def test_the_table_has_ratios_to_ep1():
    def figures(*seconds: float) -> dict:
        return {"step": spread(list(seconds)), "tokens_per_s": spread([1.0])}

    data = {
        "ep1": {"16 new tokens": figures(0.1, 0.2, 0.3), "256 new tokens": figures(2, 4, 5)},
        "vllm": {"16 new tokens": figures(0.3, 0.3, 0.3), "256 new tokens": figures(3, 2, 1)},
    }
    assert trl_step.table_lines(data)[2:] == [
        "| ep1 | 0.200 (0.100-0.300) | 1.00 | 4.000 (2.000-5.000) | 1.00 |",
        "| vllm | 0.300 (0.300-0.300) | 1.50 | 2.000 (1.000-3.000) | 0.50 |",
    ]


def test_a_step_of_trl_is_as_large_as_ours():
    assert trl_step.NUM_PROMPTS == DEMO.rollout.prompts_per_step
    assert trl_step.GROUP_SIZE == DEMO.rollout.group_size
    assert DEMO.algorithm.kl_coef == 0 and DEMO.train.minibatches_per_step == 1


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.slow
def test_trl_has_the_settings_of_the_demo(tmp_path: Path):
    config = trl_step.trl_config(tmp_path, 16, 7, use_vllm=False)
    assert (config.learning_rate, config.epsilon) == (DEMO.train.learning_rate, DEMO.algorithm.clip_eps_low)
    assert (config.adam_beta1, config.adam_beta2) == DEMO.train.betas
    assert config.max_completion_length == DEMO.rollout.max_new_tokens
    assert config.weight_decay == DEMO.train.weight_decay and config.max_grad_norm == DEMO.train.max_grad_norm
    assert config.per_device_train_batch_size * 2 == 256 and config.steps_per_generation == 1
