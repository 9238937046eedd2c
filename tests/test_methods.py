"""The YAML files of methods resolve to the values that their papers state, and every stage is used."""

import functools
import itertools
import math
from pathlib import Path

import pytest
from conftest import ROOT

from configure import load_config
from extras.settings import SECTIONS
from settings import HOOKS, Config, ZeroVarianceSettings

METHODS = ROOT / "experiments" / "methods"
FILES = sorted((ROOT / "experiments").rglob("*.yaml"))
GRPO = {"ratio_level": "token", "clip_mode": "fixed", "loss_agg": "sequence_mean", "adv_norm": "group_std"}
UNCORRECTED = {"rollout_correction": "none"}
GSPO_CLIP = {"clip_mode": "fixed", "clip_eps_low": 3e-4, "clip_eps_high": 4e-4}
ESPO = UNCORRECTED | {
    "ratio_level": "entropy_group", "ratio_form": "stop_gradient", "entropy_groups": (0.2, 0.8),
    "clip_mode": "entropy_adaptive", "entropy_clip_form": "token_group_mean", "entropy_clip_coef": 0.02,
    "loss_agg": "token_group_mean", "adv_norm": "group_std", "kl_coef": 0.0,
}  # fmt: skip

PAPERS = {  # values of section algorithm that each paper states, without the plug-ins of experiments
    # DeepSeekMath, 2402.03300, eq. 3: 1/G sum 1/|o_i| sum min(r A, clip(r, 1 - eps, 1 + eps) A), A by the std
    "grpo": GRPO | UNCORRECTED | {"clip_eps_low": 0.2, "clip_eps_high": 0.2},
    # Dr.GRPO, 2503.20783: A = R - mean R, and no 1/|o_i| but a constant
    "dr_grpo": GRPO | UNCORRECTED | {"adv_norm": "mean_only", "loss_agg": "fixed_length"},
    # DAPO, 2503.14476, eq. 8: 1 / sum |o_i| over all tokens, clip(r, 1 - 0.2, 1 + 0.28), no KL penalty
    "dapo": GRPO | UNCORRECTED | {
        "loss_agg": "token_mean", "clip_eps_low": 0.2, "clip_eps_high": 0.28, "kl_coef": 0.0,
    },
    # GSPO, 2507.18071, eq. 5 and 7: one ratio per completion, the geometric mean; 3e-4 and 4e-4
    "gspo": GRPO | UNCORRECTED | GSPO_CLIP | {"ratio_level": "sequence", "ratio_form": "geometric"},
    # eq. 13 and 14: sg[s_i] pi / sg[pi]
    "gspo_token": GRPO | UNCORRECTED | GSPO_CLIP | {"ratio_level": "sequence", "ratio_form": "stop_gradient"},
    # GMPO, 2507.20673, eq. 4: product of token ratios clipped to (e^-0.4, e^0.4), to the power 1/|o_i|
    "gmpo": GRPO | UNCORRECTED | {
        "ratio_level": "sequence", "ratio_form": "geometric", "clip_mode": "before_mean",
        "clip_eps_low": 1 - math.exp(-0.4), "clip_eps_high": math.exp(0.4) - 1,
    },
    # CISPO, 2506.13585, eq. 4 and 5: sg[clip(r)] A log pi over all tokens, no lower bound
    "cispo": GRPO | UNCORRECTED | {"clip_mode": "weight", "loss_agg": "token_mean", "clip_eps_low": 1.0},
    # RL-ZVP, 2509.21880: groups with variance have the loss of GRPO
    "rl_zvp": GRPO | UNCORRECTED,
    # RSTG, 2608.00782, and on-policy distillation: a token's advantage is the distance to the teacher
    "rstg": GRPO | UNCORRECTED,
    "distillation": GRPO | UNCORRECTED,
    # GRESO, 2506.02177: GRPO's loss on the groups of dynamic sampling
    "greso": GRPO | UNCORRECTED,
    # ESPO, 2512.00499, eq. 5 to 11: two entropy groups of 20 and 80 %, alpha 0.02, mean over groups, no KL
    "espo": ESPO,
    # the same with eq. 8 and 9 as printed, |tau| as in eq. 5; and |tau| as the tokens of the group
    "espo_literal": ESPO | {"ratio_form": "literal", "entropy_clip_form": "over_token_groups"},
    "espo_over_tokens": ESPO | {"ratio_form": "literal", "entropy_clip_form": "over_tokens"},
    # REINFORCE with a baseline: A grad log pi, nothing is clipped
    "reinforce": UNCORRECTED | {"ratio_level": "token", "clip_mode": "none"},
    # score centering, 2609.20807: REINFORCE minus the expected gradient under the engine
    "score_centering": UNCORRECTED | {"ratio_level": "token", "clip_mode": "none"},
    # min(pi_train / pi_engine, 2) per token; the product per completion; completions above the cap left out
    "tis_token": GRPO | {"rollout_correction": "token_tis", "rollout_correction_cap": 2.0},
    "tis_sequence": GRPO | {"rollout_correction": "sequence_tis"},
    "mask_sequence": GRPO | {"rollout_correction": "sequence_mask"},
    # INTELLECT-2, 2505.07291: min(min(r, delta) A, clip(r) A), delta 4
    "two_sided_clip": GRPO | UNCORRECTED | {"clip_cap": 4.0},
    # LUSPO, 2602.05261: |y| min(s A, clip(s) A)
    "luspo": GRPO | UNCORRECTED | GSPO_CLIP | {"ratio_level": "sequence", "loss_agg": "sequence_sum"},
    # IcePop, 2510.18855: r in [0.5, 5], else 0
    "icepop": GRPO | {
        "rollout_correction": "token_mask", "rollout_correction_floor": 0.5, "rollout_correction_cap": 5.0,
    },
    "mask_geometric": GRPO | {"rollout_correction": "geometric_mask"},
    # DAPO, 3.4: no loss on truncated samples
    "leave_out_cut": GRPO | UNCORRECTED | {"leave_out_cut": True},
    # DeepSeekMath, algorithm 1: mu updates on each batch
    "several_passes": GRPO | UNCORRECTED,
    # tokens of earlier policies are a mismatch like any other
    "partial_rollouts": GRPO | {"rollout_correction": "token_tis", "rollout_correction_cap": 2.0},
    # SPEC-RL, 2509.23232: GRPO, lenience e^0.5
    "spec_rl": GRPO | UNCORRECTED,
    # 2510.11370: the old policy's routes; the engine's
    "replay_r2": GRPO | UNCORRECTED | {"router_replay": "r2"},
    "replay_r3": GRPO | UNCORRECTED | {"router_replay": "r3"},
}  # fmt: skip
UNFILTERED = {"drop": False, "refill": False, "rl_zvp": False}
ZERO_VARIANCE = {
    # DAPO, eq. 11: groups that are all right or all wrong are replaced
    "dapo": {"drop": True, "refill": True, "rl_zvp": False},
    # GRESO: as DAPO; a third of its target zero-variance share of 0.25 is easy
    "greso": {
        "drop": True, "refill": True, "rl_zvp": False, "history": True, "skip_rule": "consecutive",
        "round_size": "adaptive", "target_solved": 0.25 / 3, "target_unsolved": 0.25 * 2 / 3,
    },
    # RL-ZVP: groups without variance are reshaped instead
    "rl_zvp": {"drop": False, "refill": False, "rl_zvp": True},
}  # fmt: skip
EXTRAS = {  # {method: {section: settings}}
    # RSTG: groups that are all wrong, by the teacher's pass rate; distillation: all groups, weight 1
    "rstg": {"teacher": {"groups": "all_wrong", "coef": 1.0}},
    "distillation": {"teacher": {"groups": "every", "coef": 1.0, "scores": None}},
    "score_centering": {"centering": {"enabled": True}},
    "partial_rollouts": {"carry": {"share": 0.75}},
    "spec_rl": {"drafts": {"form": "literal", "lenience": 1.6487}},
}


@functools.cache
def resolved(*paths) -> Config:
    """Return the configuration of some YAML files, over a training set if they name none."""
    return load_config(["data.train=[{path: unused}]", *(x for p in paths for x in ("--config", str(p)))])


@pytest.mark.parametrize("name", PAPERS)
def test_a_method_has_the_values_of_its_paper(name):
    config = resolved(METHODS / f"{name}.yaml")
    for setting, expected in PAPERS[name].items():
        value = getattr(config.algorithm, setting)
        is_float = isinstance(expected, float)
        assert value == (pytest.approx(expected, rel=1e-12) if is_float else expected), f"algorithm.{setting}"
    for setting, expected in ZERO_VARIANCE.get(name, UNFILTERED).items():
        assert getattr(config.zero_variance, setting) == expected, f"zero_variance.{setting}"
    for section in SECTIONS:
        expected = EXTRAS.get(name, {}).get(section)
        assert getattr(config, section).is_on == (expected is not None)
        assert getattr(config, section).model_dump().items() >= (expected or {}).items()


def test_method_files_differ_and_leave_model_data_and_run_alone():
    """A method can be combined with any environment."""
    configs = {path.stem: resolved(path) for path in METHODS.glob("*.yaml")}
    assert configs.keys() >= PAPERS.keys()
    for first, second in itertools.combinations(configs, 2):
        assert configs[first] != configs[second], f"{first} and {second} are equal"
    for name, config in configs.items():
        for section in ("model", "data", "train", "eval", "checkpoint", "run"):
            if (name, section) != ("several_passes", "train"):
                assert getattr(config, section) == getattr(resolved(), section), f"{name} sets {section}"


SWITCHES = [name for name, info in ZeroVarianceSettings.model_fields.items() if info.annotation is bool]


@pytest.mark.parametrize("name", [*SWITCHES, "offline_scores", "probe_size"])
def test_every_stage_is_on_in_one_file_and_off_in_another(name):
    off = getattr(ZeroVarianceSettings(), name)
    is_on = {getattr(resolved(path).zero_variance, name) != off for path in FILES}
    assert is_on == {False, True} and not off


def test_every_plugin_has_a_method_file_and_a_test():
    plugins = {file.stem for file in (ROOT / "experiments" / "plugins").glob("*.py")}
    algorithms = [resolved(path).algorithm for path in METHODS.glob("*.yaml")]
    named = {Path(name.partition(":")[0]).stem for a in algorithms for h in HOOKS if (name := getattr(a, h))}
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    assert plugins - named == set() and [name for name in plugins if f"{name}.py:" not in tests] == []
