"""The YAML files of methods: what they resolve to is what their papers state, and every stage is used."""

import itertools
import math

import pytest
from conftest import ROOT

from train_rl import Config, ZeroVarianceSettings, load_config

METHODS = ROOT / "experiments" / "methods"
FILES = sorted((ROOT / "experiments").rglob("*.yaml"))
GRPO = {"ratio_level": "token", "clip_mode": "fixed", "loss_agg": "sequence_mean", "adv_norm": "group_std"}
UNCORRECTED = {"rollout_correction": "none"}
GSPO_CLIP = {"clip_mode": "fixed", "clip_eps_low": 3e-4, "clip_eps_high": 4e-4}

PAPERS = {  # what each method states about section algorithm; what it does not state is not here
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
    # RL-ZVP, 2509.21880: groups with variance are those of GRPO
    "rl_zvp": GRPO | UNCORRECTED,
    # GRESO, 2506.02177: GRPO's loss on what dynamic sampling leaves
    "greso": GRPO | UNCORRECTED,
    # ESPO, 2512.00499, eq. 5 to 11: two entropy groups of 20 and 80 %, alpha 0.02, mean over groups, no KL
    "espo": UNCORRECTED | {
        "ratio_level": "entropy_group", "ratio_form": "stop_gradient", "entropy_groups": (0.2, 0.8),
        "clip_mode": "entropy_adaptive", "entropy_clip_form": "token_group_mean", "entropy_clip_coef": 0.02,
        "loss_agg": "token_group_mean", "adv_norm": "group_std", "kl_coef": 0.0,
    },
    # the same with eq. 8 and 9 as printed, |tau| as in eq. 5; and |tau| as the tokens of the group
    "espo_literal": UNCORRECTED | {
        "ratio_level": "entropy_group", "ratio_form": "literal", "entropy_groups": (0.2, 0.8),
        "clip_mode": "entropy_adaptive", "entropy_clip_form": "over_token_groups", "entropy_clip_coef": 0.02,
        "loss_agg": "token_group_mean", "adv_norm": "group_std", "kl_coef": 0.0,
    },
    "espo_over_tokens": UNCORRECTED | {
        "ratio_level": "entropy_group", "ratio_form": "literal", "entropy_groups": (0.2, 0.8),
        "clip_mode": "entropy_adaptive", "entropy_clip_form": "over_tokens", "entropy_clip_coef": 0.02,
        "loss_agg": "token_group_mean", "adv_norm": "group_std", "kl_coef": 0.0,
    },
    # REINFORCE with a baseline: A grad log pi, nothing is clipped
    "reinforce": UNCORRECTED | {"ratio_level": "token", "clip_mode": "none"},
    # min(pi_train / pi_engine, 2) per token; the product per completion; completions above the cap left out
    "tis_token": GRPO | {"rollout_correction": "token_tis", "rollout_correction_cap": 2.0},
    "tis_sequence": GRPO | {"rollout_correction": "sequence_tis"},
    "mask_sequence": GRPO | {"rollout_correction": "sequence_mask"},
    # SAPO, 2511.20347: 4 / tau sigmoid(tau (r - 1)) A, tau 1.0 and 1.05
    "sapo": {**GRPO, "clip_mode": "soft", "soft_temperatures": (1.0, 1.05)} | UNCORRECTED,
    # INTELLECT-2, 2505.07291: min(min(r, delta) A, clip(r) A), delta 4
    "two_sided_clip": GRPO | UNCORRECTED | {"clip_cap": 4.0},
    # DPPO, 2602.04879: sg[min(r, 20)] A log pi where |p - p_old| or the binary KL is small
    "dppo_tv": {
        "clip_mode": "total_variation", "clip_eps_low": 0.15, "clip_eps_high": 0.15, "clip_cap": 20.0,
    },
    "dppo_kl": {"clip_mode": "binary_kl", "clip_eps_low": 0.05, "clip_eps_high": 0.05, "clip_cap": 20.0},
    # LUSPO, 2602.05261: |y| min(s A, clip(s) A)
    "luspo": GRPO | UNCORRECTED | GSPO_CLIP | {"ratio_level": "sequence", "loss_agg": "sequence_sum"},
    # VESPO, 2602.10693: sg[W^k exp(lambda (1 - W))] A log pi, (2, 3) and (3, 2)
    "vespo": UNCORRECTED | {
        "clip_mode": "gamma", "gamma_powers": (2.0, 3.0), "gamma_decays": (3.0, 2.0), "old_policy": "rollout",
    },
    # MaxRL, 2602.02710: (R - mean) / mean; ScaleRL, 2510.13786; RLOO, 2402.14740; GDPO, 2601.05242
    "maxrl": GRPO | UNCORRECTED | {"adv_norm": "group_mean"},
    "batch_std": GRPO | UNCORRECTED | {"adv_norm": "batch_std"},
    "rloo": UNCORRECTED | {"adv_norm": "leave_one_out", "clip_mode": "none"},
    "gdpo": GRPO | UNCORRECTED | {"part_norm": "before_sum"},
    # IcePop, 2510.18855: r in [0.5, 5], else 0
    "icepop": GRPO | {
        "rollout_correction": "token_mask", "rollout_correction_floor": 0.5, "rollout_correction_cap": 5.0,
    },
    "mask_geometric": GRPO | {"rollout_correction": "geometric_mask"},
    # DeepSeek-V3.2, 2512.02556, eq. 9 and 7
    "mask_off_policy": GRPO | UNCORRECTED | {"off_policy_mask": 0.5},
    "unbiased_kl": GRPO | UNCORRECTED | {"kl_form": "unbiased"},
    # 2506.01939: the 20 % of the tokens with the highest entropy
    "top_entropy": UNCORRECTED | {"top_entropy": 0.2, "loss_agg": "token_mean"},
    # DAPO, 3.4: no loss on truncated samples
    "leave_out_cut": GRPO | UNCORRECTED | {"leave_out_cut": True},
    # 2505.22617: Clip-Cov draws 2e-4 of the tokens in [1, 5]; KL-Cov takes the top 2e-3, coefficient 1
    "clip_cov": UNCORRECTED | {
        "covariance": "clip", "covariance_share": 2e-4, "covariance_range": (1.0, 5.0), "clip_mode": "fixed",
    },
    "kl_cov": UNCORRECTED | {
        "covariance": "kl", "covariance_share": 2e-3, "covariance_kl_coef": 1.0, "clip_mode": "none",
    },
    # DeepSeekMath, algorithm 1: mu updates on each batch
    "several_passes": GRPO | UNCORRECTED,
    # 2510.11370: the old policy's routes; the engine's
    "replay_r2": GRPO | UNCORRECTED | {"router_replay": "r2"},
    "replay_r3": GRPO | UNCORRECTED | {"router_replay": "r3"},
}  # fmt: skip
ZERO_VARIANCE = {
    # DAPO, eq. 11: groups that are all right or all wrong are replaced
    "dapo": {"drop": True, "refill": True, "rl_zvp": False},
    # GRESO: as DAPO; of the share of 0.25 without variance that it aims at, a third is easy
    "greso": {
        "drop": True,
        "refill": True,
        "rl_zvp": False,
        "history": True,
        "skip_rule": "consecutive",
        "round_size": "adaptive",
        "target_solved": 0.25 / 3,
        "target_unsolved": 0.25 * 2 / 3,
    },
    # RL-ZVP: they are reshaped instead
    "rl_zvp": {"drop": False, "refill": False, "rl_zvp": True},
}


def resolved(path) -> Config:
    """The settings of a file, over a training set if it names none."""
    return load_config(["data.train=[{path: unused}]", "--config", str(path)])


@pytest.mark.parametrize("name", PAPERS)
def test_a_method_is_what_its_paper_states(name):
    config = resolved(METHODS / f"{name}.yaml")
    for setting, value in PAPERS[name].items():
        found = getattr(config.algorithm, setting)
        same = found == pytest.approx(value, rel=1e-12) if isinstance(value, float) else found == value
        assert same, f"algorithm.{setting} is {found}, not {value}"
    for setting, value in ZERO_VARIANCE.get(name, {"drop": False, "refill": False, "rl_zvp": False}).items():
        assert getattr(config.zero_variance, setting) == value, f"zero_variance.{setting}"


def test_every_method_file_differs_from_every_other():
    settings = {path.stem: resolved(path) for path in METHODS.glob("*.yaml")}
    assert settings.keys() >= PAPERS.keys()
    for one, other in itertools.combinations(settings, 2):
        assert settings[one] != settings[other], f"{one} and {other} are the same"


def test_a_method_leaves_model_data_and_run_alone():
    """So that it can be laid over any environment."""
    for path in METHODS.glob("*.yaml"):
        config, plain = resolved(path), load_config(["data.train=[{path: unused}]"])
        for section in ("model", "data", "train", "eval", "checkpoint", "run"):
            if (path.stem, section) != ("several_passes", "train"):
                assert getattr(config, section) == getattr(plain, section), f"{path.stem} sets {section}"


SWITCHES = [name for name, info in ZeroVarianceSettings.model_fields.items() if info.annotation is bool]


@pytest.mark.parametrize("name", [*SWITCHES, "offline_scores", "probe_size"])
def test_every_stage_is_used_by_some_file_and_left_out_by_another(name):
    off = getattr(ZeroVarianceSettings(), name)
    used = {getattr(resolved(path).zero_variance, name) != off for path in FILES}
    assert used == {False, True} and not off
