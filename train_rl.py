"""Reinforcement learning of Mixture-of-Experts language models, in one file.

    J = E_x E_{y_i ~ pi_old} 1/G sum_i 1/T_i sum_t min(r A, clip(r, 1 - eps, 1 + eps) A) - beta KL(pi, pi_ref)
    r_{i,t} = pi(y_{i,t}) / pi_old(y_{i,t}),   A_{i,t} = (R_i - mean_group R) / std_group R

With every setting at its default this is GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3) with beta = 0 [ours: as
in DAPO and Dr.GRPO]. Every other method is a choice along axes: where the ratio is taken and how it is
clipped (ESPO, arXiv 2512.00499; GSPO, GMPO, CISPO, DAPO, Dr.GRPO), how rewards become advantages, and what is
done about groups that teach nothing (multi-stage zero-variance elimination, arXiv 2512.07710).
experiments/methods/ has one YAML per method.

    python -m data.tiny            # makes the tiny model and its tasks, once
    torchrun --nproc-per-node=2 train_rl.py --config experiments/environments/demo.yaml
    torchrun --nproc-per-node=2 train_rl.py --config experiments/environments/tiny.yaml \
        --config experiments/methods/espo.yaml train.seed=1 run.dir=runs/espo
    python train_rl.py --help      # every setting

Reading order is the order of the data: 1 settings, 2 rollouts, 3 filter and batch, 4 rewards and advantages,
5 ratio, clip, loss, 6 forward and update, 7 evaluation, 8 set-up and loop. main() at the end names one phase
after another.

Vocabulary: G = group_size completions per prompt, B completions on this rank, T longest of them. logprobs
carry gradient; old_logprobs are the trainer's before the update; rollout_logprobs are the engine's; all in
nats. A verifier gives a score, training uses a reward. A function marked Collective must be called by all
ranks. Provenance of choices: [paper] printed in the source named, [secondary] reported by others, [ours]
where the sources are silent.
"""

import functools
import json
import math
import os
import random
import resource
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Annotated, Literal, NamedTuple

from runtime.launch import Signals, Stopped, check_gpus, die_with_torchrun, leave, run

if __name__ == "__main__":  # before the imports that take seconds
    die_with_torchrun()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until Signals.listen() Ctrl-C ends it without a stack
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import InitProcessGroupKwargs, set_seed
from pydantic import Field
from torch import Tensor
from tqdm import tqdm
from transformers import get_scheduler

import moe_model
from data.chat import load_tokenizer
from data.history import PromptHistory
from data.prompts import DataSettings, OfflineScore, Prompt, check_data, prompt_sha
from data.stages import Offers, Window, load_stages, offers_of, unite
from data.stream import (
    EvalSets,
    LoadedSets,
    digest_of,
    leave_out,
    refuse_unknown_tokens,
    seed_of,
)
from moe_model import ModelSettings, PackedSequences, num_experts_of, pack, route_table
from reward import (
    RewardPool,
    RewardSettings,
    Verdict,
    build_judge,
    check_functions,
    functions_of,
    impossible_references,
    is_kind,
    pairwise_reference,
    parts_of,
    round_robin,
    start_pool,
)
from rollout import (
    Completion,
    Request,
    RolloutEngine,
    RolloutSettings,
    SyncReport,
    engine_memory,
    invalid_route,
    kv_bytes_per_token,
    load_greedy_chat,
    stops_of,
)
from runtime.agreement import check_ranks_agree, wait_for_ranks
from runtime.checkpoint import (
    CheckpointSettings,
    RunSettings,
    TrainState,
    check_run_dir_is_shared,
    find_checkpoint,
    lock_run_dir,
    prepare_run_dir,
    save_checkpoint,
    state_of,
    writing,
)
from runtime.checks import (
    check_parity,
    check_routes,
    check_verdicts,
    handle_nonfinite,
    mismatch_gate,
    refuse_nonfinite_rewards,
    refuse_nonfinite_weights,
    say,
)
from runtime.config import (
    Section,
    Switch,
    explain,
    flat_settings,
    read_config,
    refuse_contradictions,
    setting,
)
from runtime.memory import GIB, trainer_bytes, why_too_small
from runtime.metrics import (
    Clock,
    batch_metrics,
    console_line,
    effective_sample_size,
    log_metrics,
    log_samples,
    mismatch_statistics,
    prompt_account,
    reduce_metrics,
    rollout_metrics,
    schedule_metrics,
    straggler,
    token_metrics,
)
from runtime.other_names import NAMES_ELSEWHERE
from runtime.schedule import (
    collective_device,
    deal_groups,
    exchange,
    longest_first,
    split_micro_batches,
    verdict_tokens,
)
from runtime.stages import (
    HandOver,
    Stage,
    StagePosition,
    check_hand_overs,
    end_of_stage,
    place_of,
    settings_of_stages,
)
from runtime.summary import plot_curves, print_summary, write_summary
from runtime.watchdog import MARGIN_S, Watchdog

# ============================================================================================================
# 1 Settings of the method; those of engine, model, rewards and checkpoints are in the files that read them
# ============================================================================================================
MAX_ENTROPY_GROUPS = 16  # the paper uses 2


class ZeroVarianceSettings(Section):
    """Multi-stage zero-variance elimination (arXiv 2512.07710), stage by stage."""

    offline_scores: str | None = setting(None, "pass rates written by data/score.py; null: stage 1 off")
    offline_pass_rate: tuple[float, float] = setting((0.0, 0.9), "closed range of offline pass rates kept")
    history: bool = setting(False, "stage 1b: skip prompts whose record makes zero variance likely")
    history_decay: float = setting(0.1, "weight of a prompt's past verdicts at each new visit", ge=0, le=1)
    prior: float = setting(0.2, "verdicts of each kind added to a record; below 0.5: bimodal", gt=0)
    explore_solved: float = setting(0.1, "least probability of sampling a prompt always solved", ge=0, le=1)
    explore_unsolved: float = setting(0.1, "least probability of sampling one never solved", ge=0, le=1)
    retest_steps: int = setting(200, "steps after which a record is too old to skip by; 0: never", ge=0)
    skip_rule: Literal["expected", "consecutive"] = setting(
        "expected",
        "how history skips. expected: by the probability of zero variance under the record. consecutive: by "
        "the number of visits in a row that had none (GRESO).",
    )
    target_solved: float = setting(1 / 12, "GRESO: share of all-right groups aimed at", ge=0, le=1)
    target_unsolved: float = setting(1 / 6, "GRESO: share of all-wrong groups aimed at", ge=0, le=1)
    probe_size: int = setting(0, "stage 1c: g0, completions sampled first of each group; 0: off", ge=0)
    probe_stop_prob: float = setting(0.9, "stop a probe if zero variance is at least so likely", gt=0)
    rl_zvp: bool = setting(False, "stage 3: groups left without variance get RL-ZVP advantages")
    rl_zvp_coef: float = setting(0.1, "alpha of RL-ZVP", gt=0)
    drop: bool = setting(False, "contrast: leave groups without variance out of the update (DAPO filter)")
    refill: bool = setting(False, "contrast: replace dropped groups by new prompts (DAPO dynamic sampling)")
    round_size: Literal["missing", "adaptive"] = setting(
        "missing",
        "prompts of a round of refill. missing: as many as useful groups are missing. adaptive: more, by the "
        "last round's share without variance; what is too much is dropped (GRESO).",
    )
    max_rounds: int = setting(4, "rounds of sampling in a step after which no new prompts are taken", ge=1)


Positive, NotNegative = Annotated[float, Field(gt=0)], Annotated[float, Field(ge=0)]


class AlgorithmSettings(Section):
    """The axes of the policy-gradient loss."""

    ratio_level: Literal["token", "sequence", "entropy_group"] = setting(
        "token",
        "which tokens share an importance ratio. token: none. sequence: those of a completion. "
        "entropy_group: those of one entropy group of a completion.",
    )
    ratio_form: Literal["geometric", "stop_gradient", "literal"] = setting(
        "geometric",
        "gradient of a shared ratio. geometric: through the mean. stop_gradient: each token its own. "
        "literal: ESPO eq. 9 as printed.",
    )
    entropy_groups: tuple[float, ...] = setting(
        (0.2, 0.8),
        "shares of a completion's tokens per entropy group, highest entropy first; sum 1",
        max_length=MAX_ENTROPY_GROUPS,
    )
    clip_mode: Literal[
        "fixed", "entropy_adaptive", "weight", "before_mean", "soft", "total_variation", "binary_kl", "gamma",
        "none",
    ] = setting(
        "fixed",
        "fixed: PPO, DAPO. entropy_adaptive: ESPO eq. 8. weight: CISPO, the clipped ratio as a constant "
        "factor. before_mean: GMPO, each token's ratio is clipped first. soft: SAPO. total_variation, "
        "binary_kl: DPPO, tokens that moved too far are left out. gamma: VESPO. none: no clip.",
    )  # fmt: skip
    clip_eps_low: float = setting(
        0.2, "ratios below 1 - this are clipped; DPPO: bound where A < 0", gt=0, le=1
    )
    clip_eps_high: float = setting(0.2, "ratios above 1 + this are clipped; DPPO: bound where A > 0", gt=0)
    clip_cap: float | None = setting(
        None,
        "ratios are cut here where A < 0, too (dual clip), or as a weight (DPPO); null: they are not",
        gt=1,
    )
    soft_temperatures: tuple[Positive, Positive] = setting((1.0, 1.05), "tau of SAPO for A > 0 and the rest")
    gamma_powers: tuple[NotNegative, NotNegative] = setting((2.0, 3.0), "k of VESPO for A >= 0 and A < 0")
    gamma_decays: tuple[Positive, Positive] = setting((3.0, 2.0), "lambda of VESPO for A >= 0 and A < 0")
    entropy_clip_coef: float = setting(0.02, "alpha of ESPO's entropy-adaptive clip", gt=0)
    entropy_clip_form: Literal["token_group_mean", "over_token_groups", "over_tokens"] = setting(
        "token_group_mean",
        "what ESPO eq. 8 divides entropy by. token_group_mean: it is averaged over the token group. "
        "over_token_groups, over_tokens: a token's own, by the completion's groups or the group's tokens.",
    )
    loss_agg: Literal[
        "sequence_mean", "token_mean", "token_group_mean", "sequence_sum", "fixed_length"
    ] = setting(
        "sequence_mean",
        "sequence_mean: mean over the tokens of a completion, then over completions. token_mean: over all "
        "tokens. token_group_mean: over token groups, then completions. sequence_sum: sum over the tokens, "
        "mean over completions. fixed_length: sum / max_new_tokens.",
    )  # fmt: skip
    top_entropy: float = setting(
        1.0, "share of an update's tokens, the most uncertain ones, that have a policy loss", gt=0, le=1
    )
    leave_out_cut: bool = setting(False, "completions cut at max_new_tokens have no policy loss")
    covariance_share: float = setting(
        0.0, "share of an update's tokens that algorithm.covariance treats; 0: none", ge=0, lt=1
    )
    covariance: Literal["clip", "kl"] = setting(
        "clip",
        "tokens whose log-probability and advantage covary. clip: of those in covariance_range some have no "
        "policy loss (Clip-Cov). kl: those that covary most have a KL term to the old policy (KL-Cov).",
    )
    covariance_range: tuple[float, float] = setting((1.0, 5.0), "covariances among which Clip-Cov draws")
    covariance_kl_coef: float = setting(1.0, "size of KL-Cov's term", gt=0)
    adv_norm: Literal["group_std", "mean_only", "batch_std", "group_mean", "leave_one_out"] = setting(
        "group_std",
        "group_std: divide by the standard deviation of the group. mean_only: do not divide. batch_std: by "
        "that of all ranks' centred rewards. group_mean: by the group's mean (MaxRL). leave_one_out: the "
        "baseline is the mean of the others (RLOO).",
    )
    part_norm: Literal["after_sum", "before_sum"] = setting(
        "after_sum",
        "rewards that are a sum of several. after_sum: the sum is normalised. before_sum: each of them is, "
        "and their weighted sum is divided by the batch's standard deviation (GDPO).",
    )
    tie_band: float = setting(0.0, "rewards so close to the group's mean are ties, advantage 0; 0: off", ge=0)
    correctness_guard: bool = setting(False, "no positive advantage if wrong, no negative one if right")
    rollout_correction: Literal[
        "none", "token_tis", "sequence_tis", "token_mask", "sequence_mask", "geometric_mask"
    ] = setting(
        "none",
        "importance weight trainer / engine. token_tis: truncated per token. sequence_tis: truncated per "
        "completion. token_mask, sequence_mask: 0 outside of floor and cap. geometric_mask: 0 for a "
        "completion whose mean per token is outside, else 1. none: 1.",
    )  # fmt: skip
    rollout_correction_cap: float = setting(2.0, "largest such weight", gt=0)
    rollout_correction_floor: float = setting(0.0, "least such weight", ge=0)
    off_policy_mask: float = setting(
        0.0, "completions with A < 0 have no policy loss if mean log(engine / policy) is above; 0: off", ge=0
    )
    old_policy: Literal["trainer", "rollout"] = setting(
        "trainer",
        "denominator of the ratio. trainer: the trainer's policy before the update. rollout: the engine's "
        "(bypass).",
    )
    router_replay: Switch[Literal["off", "r2", "r3"]] = setting(
        "off",
        "experts that the trainer uses. off: its own router's. r2: those of its old-logprob pass. r3: the "
        "engine's.",
    )
    mismatch_gate: float = setting(
        0.015, "warn if k3 KL of trainer and engine is above; 0: no gate", True, ge=0
    )
    mismatch_patience: int = setting(10, "stop after so many such steps in a row; 0: never", True, ge=0)
    kl_coef: float = setting(0.0, "beta of the KL penalty to the first policy; 0: no reference model", ge=0)
    kl_form: Literal["k3", "unbiased"] = setting(
        "k3",
        "k3: GRPO's estimate. unbiased: it times the token's ratio, so that its gradient is that of the KL.",
    )


ShareBelow1 = Annotated[float, Field(ge=0, lt=1)]


class TrainSettings(Section):
    """How long and how fast, and what an update is made of."""

    num_steps: int = setting(200, "steps; each is one rollout and minibatches_per_step updates", True, ge=1)
    max_generated_tokens: int | None = setting(
        None, "stop when so many were generated; null: off", True, ge=1
    )
    minibatches_per_step: int = setting(1, "updates per rollout; above 1 the later ones are off-policy", ge=1)
    micro_batch_tokens: int | None = setting(
        None,
        "padded tokens per forward and rank; longer rows go alone. null: 32768 on a GPU, 4096 on CPUs",
        True,
        ge=1,
    )
    balance: bool = setting(
        True,
        "true: as many tokens for each rank and forward. false: as many rows, as they come.",
        True,
    )
    skip_zero_gradient: bool = setting(
        True,
        "true: completions whose advantages are all 0 take no part in the forward and backward of updates. "
        "false: they do, and change nothing.",
        True,
    )
    share_prompts: bool = setting(
        True,
        "true: a prompt goes once through a forward and backward, for all of its completions there. "
        "false: with each of them",
        True,
    )
    passes_per_rollout: int = setting(1, "times that the updates of a step go over its completions", ge=1)
    learning_rate: float = setting(1e-6, "highest learning rate of AdamW", True, gt=0)
    lr_schedule: Literal[
        "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr",
        "polynomial", "inverse_sqrt",
    ] = setting(
        "constant_with_warmup",
        "learning rate after the warm-up, by transformers' names; those that fall do so over num_steps",
        True,
    )  # fmt: skip
    lr_schedule_args: dict[str, float] = setting(
        {},
        "what get_scheduler() of transformers takes for it, e.g. {min_lr_rate: 0.1}, {num_cycles: 2}",
        True,
    )
    warmup_steps: int = setting(0, "steps of linear warm-up", True, ge=0)
    betas: tuple[ShareBelow1, ShareBelow1] = setting(
        (0.9, 0.95), "decay rates of AdamW's two moving averages"
    )
    weight_decay: float = setting(0.0, "weight decay of AdamW", True, ge=0)
    max_grad_norm: float = setting(1.0, "gradients are scaled down to this global norm", gt=0)
    zero_stage: Literal[1, 2] = setting(
        1, "DeepSpeed ZeRO. 1: shards the optimizer's state. 2: gradients, too."
    )
    offload_optimizer: bool = setting(
        False,
        "true: float32 weights and the optimizer's state are on the host, and so is its step; gradients are "
        "on the GPU in an update only. For few GPUs. false: all on the GPU. Needs zero_stage 2.",
        True,
    )
    seed: int = setting(0, "seed of prompt order and sampling", ge=0, lt=2**32)

    @property
    def num_updates(self) -> int:
        """Return the updates of a step: minibatches, times passes over them."""
        return self.minibatches_per_step * self.passes_per_rollout


class EvalSettings(Section):
    """When and how held-out sets are evaluated."""

    every: int = setting(50, "steps between evaluations, besides first and last; 0: only those", True, ge=0)
    num_samples: int = setting(
        8, "k sampled completions per prompt for avg@k and pass@k; 0: greedy only", True, ge=0
    )
    max_new_tokens: int | None = setting(None, "completions are cut here; null: as in rollout", True, ge=1)


class Config(Section):
    """All settings of a run."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    reward: RewardSettings = RewardSettings()
    zero_variance: ZeroVarianceSettings = ZeroVarianceSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    train: TrainSettings = TrainSettings()
    eval: EvalSettings = EvalSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    run: RunSettings = RunSettings()
    stages: list[Stage] = setting(
        [], "parts of the run, one after another, with settings of their own; docs/stages.md; []: none"
    )


# Sections and settings that a stage may set: those that every step reads. The others build engine, policy,
# optimizer, judge and reward workers, once in a run.
STAGE_SETTINGS = frozenset(
    {
        "data.train", "zero_variance", "algorithm", "eval",
        "rollout.prompts_per_step", "rollout.group_size", "rollout.temperature", "rollout.max_prompt_tokens",
        "rollout.max_new_tokens", "rollout.schedule", "rollout.count_reward_time", "rollout.check_every",
        "rollout.parity_mean", "rollout.parity_p99",
        "reward.max_failed_frac", "reward.overlap", "reward.binary", "reward.overlong_buffer",
        "reward.overlong_coef", "reward.repetition_coef", "reward.repetition_ngram", "reward.judge_weight",
        "reward.judge_mode", "reward.judge_certainty",
        "train.minibatches_per_step", "train.passes_per_rollout", "train.micro_batch_tokens", "train.balance",
        "train.skip_zero_gradient", "train.share_prompts", "train.learning_rate",
    }
)  # fmt: skip


def check_config(config: Config) -> None:
    """Check settings against each other; ValueError names both."""
    if not config.data.train:
        raise ValueError("data.train: no prompt set to train on; see experiments/environments/demo.yaml")
    check_data(config.data)
    for function in config.reward.functions:
        if not is_kind(function) or not functions_of(function):
            raise ValueError(f"reward.functions: {function!r} is no module:function or path/file.py:function")
    shares = config.algorithm.entropy_groups
    if not shares or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"algorithm.entropy_groups: {list(shares)} must be positive and sum to 1")
    refuse_contradictions(
        config,
        algorithm_contradictions(config) | loss_contradictions(config) | rollout_contradictions(config),
    )
    learning_rate(config, 0)  # it refuses what the schedule does not take


def algorithm_contradictions(config: Config) -> dict[str, bool]:
    """List contradictions in rewards, zero-variance elimination and loss, for refuse_contradictions()."""
    rollout, reward, zero, algo = config.rollout, config.reward, config.zero_variance, config.algorithm
    is_scalar, by_score = reward.judge == "scalar", reward.judge_mode == "score"
    explores_all = zero.explore_solved > 0 and zero.explore_unsolved > 0
    return {
        "{zero_variance.refill} needs {zero_variance.drop}": zero.refill and not zero.drop,
        "{zero_variance.round_size} needs {zero_variance.refill}":
            zero.round_size != "missing" and not zero.refill,
        "{zero_variance.skip_rule} needs {zero_variance.history}":
            zero.skip_rule != "expected" and not zero.history,
        "{zero_variance.rl_zvp} reshapes the groups that {zero_variance.drop} removes: choose one":
            zero.rl_zvp and zero.drop,
        "{zero_variance.explore_solved}, {zero_variance.explore_unsolved} and {zero_variance.retest_steps} "
        "would lose prompts for ever":
            zero.history and zero.skip_rule == "expected" and not explores_all and zero.retest_steps == 0,
        "{reward.overlong_buffer} must be at most {rollout.max_new_tokens}":
            reward.overlong_buffer > rollout.max_new_tokens,
        "{reward.code_memory_gib} must be at most {reward.memory_gib}, which holds for all in a worker":
            reward.code_memory_gib > reward.memory_gib,
        "{reward.judge} and {reward.judge_path}: set both or neither":
            (reward.judge == "none") != (reward.judge_path is None),
        "{reward.judge_mode} needs a judge, not {reward.judge}": reward.judge == "none" and not by_score,
        "{reward.judge_margin} needs pairs and a scalar judge, not {reward.judge} and {reward.judge_mode}":
            reward.judge_margin > 0 and (not is_scalar or by_score),
        "{reward.judge_certainty} needs the scores of a scalar judge, not {reward.judge} and "
        "{reward.judge_mode}":
            reward.judge_certainty > 0 and not (is_scalar and by_score),
        "{reward.judge} gives verdicts on pairs only, not {reward.judge_mode}":
            reward.judge == "generative" and by_score,
        "{algorithm.clip_mode} clips each token before the mean: {algorithm.ratio_level} has none":
            algo.clip_mode == "before_mean" and algo.ratio_level == "token",
        "{algorithm.entropy_clip_form} has no effect with {algorithm.clip_mode}":
            algo.entropy_clip_form != "token_group_mean" and algo.clip_mode != "entropy_adaptive",
        "{algorithm.old_policy}: the ratio is the correction already, {algorithm.rollout_correction}":
            algo.old_policy == "rollout" and algo.rollout_correction != "none",
        "{algorithm.old_policy} makes no old-logprob pass, {algorithm.router_replay} replays one":
            algo.old_policy == "rollout" and algo.router_replay == "r2",
        "{algorithm.ratio_form} has no effect with {algorithm.ratio_level}":
            algo.ratio_form != "geometric" and algo.ratio_level == "token",
    }  # fmt: skip


def loss_contradictions(config: Config) -> dict[str, bool]:
    """List contradictions among clips, masks and normalisations, for refuse_contradictions()."""
    reward, algo = config.reward, config.algorithm
    of_tokens = algo.clip_mode in ("total_variation", "binary_kl", "gamma")
    is_capped = of_tokens and algo.clip_mode != "gamma" or algo.clip_mode in ("fixed", "entropy_adaptive")
    by_mean, by_part = algo.adv_norm == "group_mean", algo.part_norm == "before_sum"
    return {
        "{algorithm.clip_mode} looks at tokens: {algorithm.ratio_level} has no effect":
            of_tokens and algo.ratio_level != "token",
        "{algorithm.clip_mode} weighs the old policy itself: {algorithm.rollout_correction}, "
        "take algorithm.old_policy rollout instead":
            algo.clip_mode == "gamma" and algo.rollout_correction != "none",
        "{algorithm.clip_cap} has no effect with {algorithm.clip_mode}":
            algo.clip_cap is not None and not is_capped,
        "{algorithm.clip_cap} must be above 1 + {algorithm.clip_eps_high}":
            algo.clip_mode == "fixed" and (algo.clip_cap or math.inf) <= 1 + algo.clip_eps_high,
        "{algorithm.covariance} has no effect with {algorithm.covariance_share}":
            algo.covariance != "clip" and algo.covariance_share == 0,
        "{algorithm.covariance_range} is empty: give the lower bound first":
            algo.covariance_range[0] > algo.covariance_range[1],
        "{algorithm.kl_form} has no effect with {algorithm.kl_coef}":
            algo.kl_form != "k3" and algo.kl_coef == 0,
        "{algorithm.rollout_correction_floor} has no effect with {algorithm.rollout_correction}":
            algo.rollout_correction_floor > 0 and algo.rollout_correction == "none",
        "{algorithm.rollout_correction_floor} must be below {algorithm.rollout_correction_cap}":
            algo.rollout_correction_floor >= algo.rollout_correction_cap,
        "{algorithm.adv_norm} divides by the mean reward, {reward.judge_mode} gives negative ones":
            by_mean and reward.judge_mode == "pairwise_reference",
        "{algorithm.part_norm} divides by the std, {algorithm.adv_norm} does not":
            by_part and algo.adv_norm != "group_std",
        "{algorithm.part_norm} takes verifiers' rewards as they are, not {reward.binary}":
            by_part and reward.binary,
        "{algorithm.part_norm} takes verifiers' rewards as they are, not those of {reward.judge}":
            by_part and reward.judge != "none",
        **{
            f"{{algorithm.{norm}}} takes rewards without penalties: {{reward.{penalty}}}":
                is_set and getattr(reward, penalty) > 0
            for norm, is_set in (("adv_norm", by_mean), ("part_norm", by_part))
            for penalty in ("overlong_buffer", "repetition_coef")
        },
    }  # fmt: skip


def rollout_contradictions(config: Config) -> dict[str, bool]:
    """List contradictions in the rollout, for refuse_contradictions()."""
    train, rollout, algo = config.train, config.rollout, config.algorithm
    return {
        "{train.minibatches_per_step} must divide {rollout.prompts_per_step}":
            rollout.prompts_per_step % train.minibatches_per_step != 0,
        "{train.offload_optimizer} needs 2, not {train.zero_stage}: at 1 gradients stay on the GPU":
            train.offload_optimizer and train.zero_stage == 1,
        "{train.lr_schedule_args} are for another schedule than {train.lr_schedule}, which takes none":
            len(train.lr_schedule_args) > 0 and train.lr_schedule == "constant_with_warmup",
        "{zero_variance.probe_size} must be below {rollout.group_size}":
            config.zero_variance.probe_size >= rollout.group_size,
        "{algorithm.router_replay} needs routes, not {rollout.capture_routes}":
            algo.router_replay == "r3" and rollout.capture_routes == "off",
        "{rollout.expert_parallel} needs more than {rollout.tensor_parallel}":
            rollout.expert_parallel and rollout.tensor_parallel == 1,
        "{rollout.simulate_format} is what rollout.fp8 simulate rounds to, not {rollout.fp8}":
            rollout.simulate_format != "fp8" and rollout.fp8 != "simulate",
        "{rollout.expert_parallel} and {rollout.fp8}: vLLM quantises on GPUs itself, set fp8 to on":
            rollout.expert_parallel and rollout.fp8 == "simulate",
        "{rollout.fp8} needs bfloat16, not {rollout.dtype}":
            rollout.fp8 == "on" and rollout.dtype != "bfloat16",
    }  # fmt: skip


def config_warnings(config: Config) -> list[str]:
    """List legitimate but unusual combinations, to be said once at start."""
    algo, warnings = config.algorithm, []
    if algo.ratio_level != "token" and algo.clip_mode == "fixed" and algo.clip_eps_high >= 0.1:
        warnings.append(
            f"algorithm.clip_eps_high {algo.clip_eps_high} is wide for algorithm.ratio_level "
            f"{algo.ratio_level!r}: GSPO uses 3e-4 and 4e-4"
        )
    if algo.loss_agg == "token_group_mean" and algo.ratio_level != "entropy_group":
        warnings.append(
            f"algorithm.loss_agg 'token_group_mean' without entropy groups (algorithm.ratio_level "
            f"{algo.ratio_level!r}) is the mean over tokens"
        )
    num_updates = config.train.num_updates
    if algo.router_replay == "r2" and num_updates == 1:
        warnings.append(
            "algorithm.router_replay 'r2' with train.minibatches_per_step 1 changes nothing: the only update "
            "is made with the routes of the old policy anyway"
        )
    if algo.covariance == "kl" and algo.covariance_share > 0 and num_updates == 1:
        warnings.append(
            "algorithm.covariance 'kl' with train.minibatches_per_step 1 changes nothing: its term measures "
            "how far the policy has moved since it sampled"
        )
    selects = algo.top_entropy < 1 or algo.covariance == "clip" and algo.covariance_share > 0
    is_shared = algo.ratio_level != "token" and algo.ratio_form == "geometric" and algo.clip_mode != "weight"
    if is_shared and (selects or algo.rollout_correction == "token_mask"):
        warnings.append(
            f"algorithm.ratio_form 'geometric' at algorithm.ratio_level {algo.ratio_level!r} spreads the "
            "gradient over all tokens of a ratio, those without policy loss (top_entropy, covariance clip, "
            "token_mask) too: take algorithm.ratio_form stop_gradient to leave them out"
        )
    has_own_clip = algo.ratio_level != "token" or algo.clip_mode not in ("fixed", "none")
    if has_own_clip and num_updates == 1 and algo.old_policy == "trainer":
        warnings.append(
            f"algorithm.ratio_level {algo.ratio_level!r}, algorithm.clip_mode {algo.clip_mode!r}: no clip "
            "acts at train.minibatches_per_step 1, because every ratio of its only update is 1; GSPO takes 4"
        )
    if config.rollout.group_size == 1:
        warnings.append("rollout.group_size 1: a group of one has no baseline, all advantages are 0")
    return warnings


def load_config(argv: list[str], description: str = "") -> Config:
    """Read a command line: defaults < YAMLs of --config < section.key=value; ValueError names the setting."""
    config = read_config(Config, argv, "train_rl.py", description, NAMES_ELSEWHERE)
    check_stages(config)
    return config


def check_stages(config: Config) -> None:
    """Check the settings of each stage as those of a run, and how it ends; ValueError names the stage."""
    configs = stage_configs(config)
    for number, own in enumerate(configs):
        try:
            check_config(own)
        except ValueError as error:
            where = f"{place_of(config.stages, number)}: " if config.stages else ""
            raise ValueError(f"{where}{error}") from error
    check_hand_overs(config.stages, configs, [hand_over_metrics(own) for own in configs])


def stage_configs(config: Config) -> list[Config]:
    """Return the whole settings of each stage; those of the run alone where it has no stages."""
    words = lambda error, prefix: explain(error, Config, NAMES_ELSEWHERE, prefix)
    return settings_of_stages(config, STAGE_SETTINGS, words)


def hand_over_metrics(config: Config) -> set[str]:
    """List the metrics by which a stage with these settings can end: its score, and those of evaluations."""
    held_out = [*config.data.eval, *(source for source in config.data.train if source.holdout)]
    k = config.eval.num_samples
    figures = ["accuracy", *([f"avg_at_{k}", f"pass_at_{k}"] if k else [])]
    return {"score", *(f"eval/{source.label}/{figure}" for source in held_out for figure in figures)}


def widest(configs: list[Config]) -> Config:
    """Return settings with the largest sizes of all stages, for which engine and policy are built."""
    if len(configs) == 1:
        return configs[0]
    first, sections = configs[0], {}
    for section, keys in {
        "rollout": ("max_prompt_tokens", "max_new_tokens"), "eval": ("max_new_tokens",),
        "algorithm": ("kl_coef",),
    }.items():  # fmt: skip
        values = {key: [getattr(getattr(one, section), key) for one in configs] for key in keys}
        largest = {key: max(of_stages, key=lambda value: value or 0) for key, of_stages in values.items()}
        sections[section] = getattr(first, section).model_copy(update=largest)
    tokens = max(tokens_per_forward(one.train) for one in configs)
    sections["train"] = first.train.model_copy(update={"micro_batch_tokens": tokens})
    return first.model_copy(update=sections)


# ============================================================================================================
# 2 Rollouts: choose prompts, sample and score completions in rounds (arXiv 2512.07710, stages 1b and 1c)
# ============================================================================================================
ZERO_VARIANCE = 1e-6  # scores of a group closer than this are equal: no rounding error becomes an advantage


def score_of(verdict: Verdict, binary: bool) -> float:
    """Return the verifier's part of the reward in [0, 1], before penalties and judges."""
    return float(verdict.reward == 1) if binary else verdict.reward


@dataclass
class Group:
    """One prompt of a step with its completions so far."""

    slot: int  # its number among the prompts sampled in this step over all ranks
    prompt_index: int  # in the training set
    completions: list[Completion] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    minibatch: int = 0  # the update of the step that it is part of
    expected_tokens: float = 0.0  # expected length of each completion; 0: not used (schedule arrival)
    guessed: bool = False  # expected_tokens is a guess: nothing is known of this prompt

    def outcome(self, binary: bool) -> "GroupOutcome":
        """Sum up the group for the other ranks."""
        valid = [v for v in self.verdicts if not v.failed]
        scores = [score_of(v, binary) for v in valid]
        return GroupOutcome(
            slot=self.slot,
            prompt_index=self.prompt_index,
            solved=sum(v.reward == 1 for v in valid),
            unsolved=sum(v.reward == 0 for v in valid),
            valid=len(valid),
            score_sum=sum(scores),
            tokens=sum(len(c.token_ids) for c in self.completions),
            completions=len(self.verdicts),
            # [ours] the correctness part decides: penalties would hide that a group teaches nothing
            has_variance=len(scores) >= 2 and max(scores) - min(scores) > ZERO_VARIANCE,
        )


@dataclass(frozen=True)
class GroupOutcome:
    """What all ranks know of a group."""

    slot: int
    prompt_index: int
    solved: int  # completions that are right as a whole: reward 1
    unsolved: int  # those of which no part is right: reward 0, all others if the verifier gives no fractions
    valid: int  # verdicts that are neither timeouts nor errors
    score_sum: float  # over the valid ones
    tokens: int
    completions: int
    has_variance: bool


Jobs = list[tuple[Group, Sequence[int]]]  # completions to sample: of each group these, of its G


def choose_prompts(
    num_prompts: int,
    consumed: int,
    history: PromptHistory,
    step: int,
    config: Config,
    offers: Offers | None = None,
    first: int = 0,
) -> tuple[list[int], int]:
    """Return the next prompts that their record does not rule out, and how many were offered for them.

    This is stage 1b. After a full epoch of offers skipping is switched off, so that the loop always ends.
    offers: the prompts of the stage, None for all alike; first: how many of `consumed` were offered before
    the stream of this stage's prompts began.
    """
    offers = offers or Offers(range(len(history.tried)))
    zero, chosen, offered, set_size = config.zero_variance, [], 0, len(offers.indices)
    while len(chosen) < num_prompts:
        prompt = offers.prompt(consumed + offered - first, config.train.seed)
        may_skip = zero.history and offered < set_size
        skip_prob = skip_prob_of(prompt, history, step, config) if may_skip else 0.0
        if random.Random(seed_of(config.train.seed, "skip", consumed + offered)).random() >= skip_prob:
            chosen.append(prompt)
        offered += 1
    return chosen, offered


def skip_prob_of(prompt: int, history: PromptHistory, step: int, config: Config) -> float:
    """Return the probability with which a prompt is skipped, by zero_variance.skip_rule."""
    zero = config.zero_variance
    match zero.skip_rule:
        case "expected":
            return history.skip_prob(
                prompt, step, config.rollout.group_size, binary=config.reward.binary, prior=zero.prior,
                retest_steps=zero.retest_steps, explore_solved=zero.explore_solved,
                explore_unsolved=zero.explore_unsolved,
            )  # fmt: skip
        case "consecutive":
            return history.consecutive_skip_prob(prompt)


FIRST_ROUND, SAFETY = 1.5, 1.25  # GRESO: 384 prompts for updates on 256; factor of the expected number


def num_first_prompts(config: Config) -> int:
    """Return how many prompts the first round of a step samples."""
    per_step = config.rollout.prompts_per_step
    return math.ceil(FIRST_ROUND * per_step) if config.zero_variance.round_size == "adaptive" else per_step


def num_refilled(
    outcomes: dict[int, GroupOutcome], last: list[int], probing: list[int], config: Config
) -> int:
    """Return how many prompts the next round of a refill samples, and 0 if enough groups are useful.

        missing    B - useful
        adaptive   min(1.5 B, 1.25 (B - useful) / (1 - share without variance in the last round))  (GRESO)

    B: prompts_per_step; last: slots of the last round. GRESO's floor of 64 prompts a round and its rounding
    to the number of GPUs are left out [ours: they belong to its batch of 256].
    """
    useful = {slot for slot, o in outcomes.items() if o.has_variance or slot in probing}
    missing = max(0, config.rollout.prompts_per_step - len(useful))
    if config.zero_variance.round_size == "missing" or not missing:
        return missing
    found, most = len(useful.intersection(last)), num_first_prompts(config)
    return min(most, math.ceil(SAFETY * missing * len(last) / found)) if found else most


def num_new_prompts(
    outcomes: dict[int, GroupOutcome], last: list[int], probing: list[int], config: Config
) -> int:
    """Return how many prompts the next round samples, given what was sampled and whose probes go on.

    last: slots of the round that has ended.
    """
    zero, group_size = config.zero_variance, config.rollout.group_size
    if zero.refill:
        return num_refilled(outcomes, last, probing, config)
    reserved = len(probing) * (group_size - zero.probe_size)
    spent = sum(o.completions for o in outcomes.values())
    return (config.rollout.prompts_per_step * group_size - spent - reserved) // group_size


def captures_routes(config: Config, step: int) -> bool:
    """Say whether the engine returns the experts of the tokens that it samples at a step."""
    rollout = config.rollout
    match config.algorithm.router_replay:
        case "r3":
            return True
        case "off" | "r2":
            is_checked = step % rollout.check_every == 0 if rollout.check_every else step == 0
            return rollout.capture_routes == "on" or (rollout.capture_routes == "auto" and is_checked)


@dataclass
class Rollouts:
    """Samples completions on this rank and has each scored while others are being generated."""

    config: Config
    engine: RolloutEngine
    pool: RewardPool
    tokenizer: object
    prompts: list[Prompt]  # the training set
    prompt_ids: list[list[int]]  # their token ids
    clock: Clock
    offers: Offers  # which of them the stage offers

    def sample_step(
        self, state: TrainState, history: PromptHistory
    ) -> tuple[list[Group], dict[int, GroupOutcome], Counter]:
        """Sample the groups of one step. Collective.

        Returns this rank's groups, {slot: outcome} of all ranks, and an account over all ranks. Plain: one
        round of prompts_per_step groups. With probing (stage 1c), a group first gets probe_size completions;
        if it would end with zero variance it stops there, and the completions it does not use buy other
        prompts. With refill (DAPO, arXiv 2503.14476, eq. 11), new prompts are sampled until prompts_per_step
        groups have variance. max_rounds ends both: the batch is then short. In each round the ranks get about
        as many expected tokens, longest prompts first.
        """
        config, zero, group_size = self.config, self.config.zero_variance, self.config.rollout.group_size
        groups: list[Group] = []  # those of all ranks, by slot; completions are with the owner only
        owner: list[int] = []  # [groups] rank
        outcomes: dict[int, GroupOutcome] = {}
        account, probing, num_new = Counter(), [], num_first_prompts(config)
        while num_new or probing:
            chosen, offered = choose_prompts(
                num_new, state.consumed_prompts, history, state.step, config, self.offers,
                state.stage.first_prompt,
            )  # fmt: skip
            state.consumed_prompts += offered
            account.update(offered=offered, skipped=offered - num_new, rounds=1)
            account.update(refilled=num_new if outcomes else 0)
            new = [Group(len(groups) + i, prompt_index) for i, prompt_index in enumerate(chosen)]
            groups += new
            rest, first = range(zero.probe_size, group_size), range(zero.probe_size or group_size)
            jobs = [(groups[slot], rest) for slot in probing] + [(group, first) for group in new]
            self.set_expected_lengths(jobs, history)
            found = self.generate_round(jobs, owner, state.step)
            outcomes |= {outcome.slot: outcome for outcome in found}
            probing = [
                outcome.slot
                for outcome in found
                if outcome.completions < group_size
                and history.zero_variance_after(outcome, group_size, zero.prior, self.config.reward.binary)
                < zero.probe_stop_prob
            ]
            last, is_over = [outcome.slot for outcome in found], account["rounds"] >= zero.max_rounds
            num_new = 0 if is_over else num_new_prompts(outcomes, last, probing, config)
        stopped = sum(o.completions < group_size for o in outcomes.values())
        account.update(probed=len(outcomes) if zero.probe_size else 0, stopped=stopped)
        rank = dist.get_rank()
        return [group for group in groups if owner[group.slot] == rank], outcomes, account

    def set_expected_lengths(self, jobs: Jobs, history: PromptHistory) -> None:
        """Set expected_tokens and guessed of the groups, by rollout.schedule.

        arrival        lengths are not used: prompts keep their order (the contrast)
        longest_first  lengths are those of each prompt's record
        """
        match self.config.rollout.schedule:
            case "arrival":
                pass
            case "longest_first":
                lengths = history.expected_lengths([group.prompt_index for group, _ in jobs], self.prompts)
                for (group, _), (tokens, guessed) in zip(jobs, lengths):
                    group.expected_tokens, group.guessed = tokens, guessed

    def generate_round(self, jobs: Jobs, owner: list[int], step: int) -> list[GroupOutcome]:
        """Deal jobs to ranks, sample this rank's, and return the outcomes of all ranks by slot. Collective.

        owner: the rank of each group so far, by slot; those of new groups are appended.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        costs = self.verdict_costs()
        work_of = lambda group: costs[self.prompts[group.prompt_index].kind][1]
        tokens = [len(samples) * (group.expected_tokens or 1.0) for group, samples in jobs]
        work = [len(samples) * work_of(group) for group, samples in jobs]
        load = [[0.0, 0.0] for _ in range(world_size)]
        num_started = sum(group.slot < len(owner) for group, _ in jobs)
        for number, (group, _) in enumerate(jobs[:num_started]):  # a started group stays where it is
            load[owner[group.slot]][0] += tokens[number]
            load[owner[group.slot]][1] += work[number]
        owner += deal_groups(tokens[num_started:], work[num_started:], world_size, load)
        own = [(group, samples) for group, samples in jobs if owner[group.slot] == rank]
        requests, prompts = self.requests(own, step, costs)
        completions, verdicts = self.generate(requests, prompts, step, "rollout")
        for (group, _), completion, verdict in zip(samples_of(own), completions, verdicts):
            group.completions.append(completion)
            group.verdicts.append(verdict)
        everyone = [None] * world_size
        dist.all_gather_object(everyone, [group.outcome(self.config.reward.binary) for group, _ in own])
        return sorted(sum(everyone, []), key=lambda outcome: outcome.slot)

    def requests(self, jobs: Jobs, step: int, costs: dict) -> tuple[list[Request], list[Prompt]]:
        """Make the engine's requests of jobs, and return the prompt of each; costs: see verdict_costs()."""
        settings, prompts = self.config.rollout, [self.prompts[g.prompt_index] for g, _ in samples_of(jobs)]
        requests = [
            Request(
                prompt_ids=self.prompt_ids[group.prompt_index],
                seed=seed_of(self.config.train.seed, step, group.slot, sample),
                temperature=settings.temperature,
                max_new_tokens=settings.max_new_tokens,
                group=group.slot,
                expected_tokens=group.expected_tokens,
                guessed=group.guessed,
                latency_tokens=costs[prompt.kind][0],
                work_tokens=costs[prompt.kind][1],
            )
            for (group, sample), prompt in zip(samples_of(jobs), prompts)
        ]
        return requests, prompts

    def verdict_costs(self) -> dict[str, tuple[float, float]]:
        """Return latency_tokens and work_tokens of a verdict by kind, the means over ranks. Collective.

        A rank that has not met a kind has no part in its mean. A kind that no rank has met costs 0, and so do
        all without rollout.count_reward_time.
        """
        settings, pool, engine = self.config.rollout, self.pool, self.engine
        costs = defaultdict(lambda: (0.0, 0.0))
        if not settings.count_reward_time or settings.schedule == "arrival":
            return costs
        rate = engine.tokens_per_second / settings.tensor_parallel
        own = {
            kind: verdict_tokens(seconds, engine.seconds_per_step, rate, pool.at_once(kind))
            for kind, seconds in pool.seconds.items()
        }
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        for kind in sorted(set().union(*everyone)):
            of_ranks = [of_rank[kind] for of_rank in everyone if kind in of_rank]
            costs[kind] = tuple(map(statistics.fmean, zip(*of_ranks)))
        return costs

    def generate(
        self, requests: list[Request], prompts: list[Prompt], version: int, label: str
    ) -> tuple[list[Completion], list[Verdict]]:
        """Complete all requests and return completions and verdicts in their order.

        prompts: that of each request; version: of the policy that the engine must hold. The clock's phase
        `label` is the generation, "reward" the wait for verdicts that it did not hide. With reward.overlap
        off all scoring comes after all generation.
        """
        overlap = self.config.reward.overlap
        hidden = None if dist.get_rank() == 0 else True  # None: shown on a terminal only
        progress = tqdm(total=len(requests), desc=label, position=1, leave=False, delay=1.0, disable=hidden)

        num_ended = 0

        def on_finished(index: int, completion: Completion) -> None:
            nonlocal num_ended
            num_ended += 1
            if overlap:
                self.submit(index, prompts[index], completion)
            progress.update()

        in_work = lambda: f"{len(requests) - num_ended} of {len(requests)} completions to generate"
        captures = label == "rollout" and captures_routes(self.config, version)
        with self.clock(label, in_work):
            completions = self.engine.generate(requests, version, on_finished, self.pool.poll, captures)
        progress.close()
        with self.clock("reward", self.pool.describe):
            for index, completion in enumerate([] if overlap else completions):
                self.submit(index, prompts[index], completion)
            verdicts = self.pool.collect()
        return completions, [verdicts[index] for index in range(len(requests))]

    def submit(self, key: Hashable, prompt: Prompt, completion: Completion) -> None:
        """Hand a completion to the reward workers as tokens, or with reward.decode engine as text."""
        match self.config.reward.decode:
            case "workers":
                text = completion.token_ids
            case "engine":
                text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        self.pool.submit(key, prompt.kind, text, prompt.answer, prompt.fields)


def samples_of(jobs: Jobs) -> list[tuple[Group, int]]:
    """List (group, sample) of every completion that jobs ask for."""
    return [(group, sample) for group, samples in jobs for sample in samples]


# ============================================================================================================
# 3 Filter groups without variance, deal what is kept to ranks and updates, make the batch
# ============================================================================================================
def is_kept(outcome: GroupOutcome, settings: ZeroVarianceSettings) -> bool:
    """Tell whether a group takes part in the update."""
    return outcome.has_variance or not settings.drop


def only_variance_teaches(config: Config) -> bool:
    """Tell whether a group of equal scores has no gradient: no other reward, no RL-ZVP, no KL term."""
    reward, algorithm = config.reward, config.algorithm
    has_penalties = reward.overlong_buffer > 0 or reward.repetition_coef > 0
    has_kl_term = algorithm.kl_coef > 0 or algorithm.covariance_share > 0
    by_part = algorithm.part_norm == "before_sum"
    others = (config.zero_variance.rl_zvp, has_kl_term, has_penalties, by_part, reward.judge != "none")
    return not any(others)


def drop_and_deal(
    groups: list[Group], outcomes: dict[int, GroupOutcome], config: Config
) -> tuple[list[Group], dict[int, GroupOutcome]]:
    """Return this rank's groups of the update, and the outcomes of those of all ranks. Collective.

    What is kept after dropping is cut, in its order, into the minibatches of the step, and each of them is
    dealt to the ranks so that they train on about as many tokens (train.balance; else on as many
    completions). Groups that the update will skip, as far as their scores say, are dealt by themselves: they
    cost no more than a pass for old log-probabilities. Which rank sampled a group has no part in it:
    scheduling does not change an update.
    """
    world_size = dist.get_world_size()
    kept = {slot: o for slot, o in sorted(outcomes.items()) if is_kept(o, config.zero_variance)}
    if config.zero_variance.round_size == "adaptive":  # it may have sampled too much
        kept = dict(list(kept.items())[: config.rollout.prompts_per_step])
    slots, per_minibatch = list(kept), -(-len(kept) // config.train.minibatches_per_step) or 1
    owner, minibatch = {}, {slot: i // per_minibatch for i, slot in enumerate(slots)}
    may_skip = config.train.skip_zero_gradient and only_variance_teaches(config)
    for start in range(0, len(slots), per_minibatch):
        part = slots[start : start + per_minibatch]
        for skipped in (False, True):
            dealt = [slot for slot in part if (may_skip and not kept[slot].has_variance) == skipped]
            sizes = [kept[s].tokens if config.train.balance else kept[s].completions for s in dealt]
            owner |= zip(dealt, longest_first(sizes, world_size))
    parcels = [[group for group in groups if owner.get(group.slot) == r] for r in range(world_size)]
    groups = sorted(exchange(parcels), key=lambda group: group.slot)
    return [replace(group, minibatch=minibatch[group.slot]) for group in groups], kept


@dataclass
class RolloutBatch:
    """What flows through a step on one rank: completions, group after group. Each field is written once."""

    prompts: list[Prompt]  # [B]
    prompt_ids: list[list[int]]  # [B] ragged
    completion_ids: list[list[int]]  # [B] ragged
    finish_reason: list[str]  # [B] "stop" or "length"
    verdicts: list[Verdict]  # [B]
    response_mask: Tensor  # [B, T] bool, where the policy chose the token and the loss applies
    rollout_logprobs: Tensor  # [B, T] nats, the engine's
    group_index: Tensor  # [B] int64, which prompt of this rank
    minibatch: Tensor  # [B] int64, which update of the step
    routed_experts: list[Tensor] | None = None  # [B] of [p + c - 1, L, K] expert ids, the engine's
    old_logprobs: Tensor | None = None  # [B, T] nats, the trainer's before the update
    entropy: Tensor | None = None  # [B, T] nats, full vocabulary, of the policy before the update
    old_routes: list[Tensor] | None = None  # [B] of [p + c - 1, L, K], the trainer's before the update
    route_mismatch: Tensor | None = None  # [B, T], 1 where old_routes are not those of the engine
    ref_logprobs: Tensor | None = None  # [B, T] nats, the first policy's; only with kl_coef > 0
    rewards: Tensor | None = None  # [B]
    valid: Tensor | None = None  # [B] bool, False where there is no verdict or the reward is not finite
    certainty: Tensor | None = None  # [B], weights of sign_weights(); None: every completion has weight 1
    advantages: Tensor | None = None  # [B, T]
    penalised: Tensor | None = None  # [B, T] bool, tokens with KL-Cov's term; None: there are none


def collate(groups: list[Group], prompts: list[Prompt], prompt_ids: list[list[int]]) -> RolloutBatch:
    """Make the batch of one rank's groups, log-probabilities padded right with 0.

    prompts, prompt_ids: the training set.
    """
    rows = [(index, group, i) for index, group in enumerate(groups) for i in range(len(group.completions))]
    completions = [group.completions[i] for _, group, i in rows]
    lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int64)
    longest = max([1, *lengths.tolist()])
    response_mask = torch.arange(longest) < lengths.unsqueeze(1)  # [B, T]
    rollout_logprobs = torch.zeros(response_mask.shape)
    rollout_logprobs[response_mask] = torch.tensor([x for c in completions for x in c.logprobs])
    routes = [c.routed_experts for c in completions]
    return RolloutBatch(
        prompts=[prompts[group.prompt_index] for _, group, _ in rows],
        prompt_ids=[prompt_ids[group.prompt_index] for _, group, _ in rows],
        completion_ids=[c.token_ids for c in completions],
        finish_reason=[c.finish_reason for c in completions],
        verdicts=[group.verdicts[i] for _, group, i in rows],
        response_mask=response_mask,
        rollout_logprobs=rollout_logprobs,
        group_index=torch.tensor([index for index, _, _ in rows], dtype=torch.int64),
        minibatch=torch.tensor([group.minibatch for _, group, _ in rows], dtype=torch.int64),
        routed_experts=None if all(ids is None for ids in routes) else routes,
    )


# ============================================================================================================
# 4 Rewards, advantages
# ============================================================================================================
def overlong_penalty(num_tokens: int, max_new_tokens: int, buffer: int) -> float:
    """Return the soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13).

    It falls from 0 to -1 over the last `buffer` tokens.
    """
    return -max(0, num_tokens - (max_new_tokens - buffer)) / buffer if buffer else 0.0


def repetition_ratio(token_ids: list[int], ngram: int) -> float:
    """Return the share of n-grams that occurred before [ours: shape]: 1 - distinct / all, 0 without any."""
    ngrams = [tuple(token_ids[i : i + ngram]) for i in range(len(token_ids) - ngram + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def judge_rewards(judge, batch: RolloutBatch, texts: list[str], mode: str) -> list[float]:
    """Return the judge's reward of each completion [ours: the mapping from verdicts to rewards].

    score               sigmoid of a scalar model's score
    pairwise_reference  better / tie / worse than the reference answer as 1 / 0 / -1
    round_robin         mean over the group's others of better 1, tie 1/2, worse 0
    """
    prompts = [prompt.text for prompt in batch.prompts]
    match mode:
        case "score":
            return torch.tensor(judge.scores(prompts, texts), dtype=torch.float64).sigmoid().tolist()
        case "pairwise_reference":
            return pairwise_reference(judge, prompts, texts, [p.answer for p in batch.prompts])
        case "round_robin":
            return round_robin(judge, prompts, texts, batch.group_index.tolist())


def compute_rewards(batch: RolloutBatch, judge, texts: list[str], config: Config) -> Tensor:
    """Return the reward of each completion [B]: verifier, mixed with the judge, minus penalties (stage 2)."""
    settings = config.reward
    rewards = [score_of(v, settings.binary) for v in batch.verdicts]
    if judge is not None and rewards:
        judged, weight = judge_rewards(judge, batch, texts, settings.judge_mode), settings.judge_weight
        rewards = [(1 - weight) * r + weight * j for r, j in zip(rewards, judged)]
    for i, token_ids in enumerate(batch.completion_ids):
        length = overlong_penalty(len(token_ids), config.rollout.max_new_tokens, settings.overlong_buffer)
        repeats = settings.repetition_coef and repetition_ratio(token_ids, settings.repetition_ngram)
        rewards[i] += settings.overlong_coef * length - settings.repetition_coef * repeats
    return torch.tensor(rewards)


def has_verdict(verdicts: list[Verdict]) -> Tensor:
    """Return [B] bool, False where the verifier timed out or failed."""
    return torch.tensor([not v.failed for v in verdicts], dtype=torch.bool)


def sum_over_ranks(*values: float) -> list[float]:
    """Sum numbers over all ranks in float64. Collective."""
    sums = torch.tensor(values, dtype=torch.float64, device=collective_device())
    dist.all_reduce(sums)
    return sums.tolist()


def batch_std(centred: Tensor, valid: Tensor) -> float:
    """Return the standard deviation (n - 1) of centred rewards [B] of all ranks where valid. Collective."""
    total, num = sum_over_ranks(float(centred[valid].double().square().sum()), int(valid.sum()))
    return math.sqrt(total / max(1.0, num - 1))


def compute_advantages(
    rewards: Tensor,
    valid: Tensor,
    group_index: Tensor,
    adv_norm: str = "group_std",
    tie_band: float = 0.0,
    eps: float = 1e-6,
) -> Tensor:
    """Return the group-relative advantage of each completion (DeepSeekMath, section 4.1.2; ESPO, eq. 11).

        group_std      (R_i - mean R) / (std R + eps)       0 if rewards lie within ZERO_VARIANCE
        mean_only       R_i - mean R                        (Dr.GRPO, arXiv 2503.20783)
        batch_std      (R_i - mean R) / (std_batch + eps)   (ScaleRL, arXiv 2510.13786) [secondary]
        group_mean     (R_i - mean R) / mean R              (MaxRL, arXiv 2602.02710) [secondary]
        leave_one_out   R_i - mean_{j != i} R_j             (RLOO, arXiv 2402.14740)

    rewards [B] float; valid [B] bool, False where the verifier gave no verdict (timeout, crash): such a
    completion enters no mean and gets 0; group_index [B] int64. Returns [B]. Rewards within tie_band of the
    mean get 0 [ours]. std divides by n - 1 and eps is 1e-6 [ours: what the common implementations do]; a
    group with fewer than two valid rewards gets 0 [ours: it has no baseline]. std_batch is that of the
    centred rewards of all completions with a verdict [ours: TRL takes the rewards', not centred]; it makes
    the call collective.
    """
    mean, std, size = torch.zeros_like(rewards), torch.ones_like(rewards), torch.full_like(rewards, 2.0)
    has_variance = torch.zeros_like(valid)
    for group in group_index.unique():
        members = (group_index == group) & valid
        group_rewards = rewards[members]
        if len(group_rewards) >= 2 and group_rewards.max() - group_rewards.min() > ZERO_VARIANCE:
            has_variance |= members
            mean[members], std[members] = group_rewards.mean(), group_rewards.std()
            size[members] = float(len(group_rewards))
    centred = torch.where(has_variance, rewards - mean, 0.0)  # [B]
    match adv_norm:
        case "group_std":
            normed = centred / (std + eps)
        case "mean_only":
            normed = centred
        case "batch_std":
            normed = centred / (batch_std(centred, valid) + eps)
        case "group_mean":
            normed = torch.where(mean > ZERO_VARIANCE, centred / mean, 0.0)
        case "leave_one_out":
            normed = centred * size / (size - 1)
    return torch.where(centred.abs() > tie_band, normed, 0.0)


def part_advantages(batch: RolloutBatch, tie_band: float, eps: float = 1e-6) -> Tensor:
    """Return advantages [B] of several rewards, each normalised by itself (GDPO, 2601.05242). Collective.

        A_i = sum_k w_k A_i^(k) / (std_batch + eps),   A^(k) by compute_advantages() of the k-th reward alone

    The rewards and their weights w_k, which sum to 1, are those of the prompt's kind. The paper also
    subtracts the batch's mean; it is 0, because each A^(k) is centred in its group [ours: left out, so that
    A_i is exactly 0 where nothing can be learned].
    """
    weights = [{part: weight for weight, part in parts_of(prompt.kind)} for prompt in batch.prompts]
    total = torch.zeros(len(weights))
    for part in sorted({part for row in weights for part in row}):
        rewards = torch.tensor([verdict.parts.get(part, verdict.reward) for verdict in batch.verdicts])
        share = torch.tensor([row.get(part, 0.0) / sum(row.values()) for row in weights])
        total += share * compute_advantages(
            rewards, batch.valid & (share > 0), batch.group_index, tie_band=tie_band
        )
    return total / (batch_std(total, batch.valid) + eps)


def guard_correctness(advantages: Tensor, correct: Tensor) -> Tensor:
    """Allow no positive advantage for a wrong completion and no negative one for a right one [ours].

    advantages [B]; correct [B] bool, by the verifier. Returns [B].
    """
    return torch.where(correct, advantages.clamp(min=0), advantages.clamp(max=0))


def sign_weights(batch: RolloutBatch, scores: Tensor, features: Tensor, config: Config) -> Tensor:
    """Return how certain the sign of each completion's advantage is, [B] in [0, 1] (SignCert-PO). Collective.

        r_i = |R_i - mean R| / ||g_i - mean g||,   g_i = dR_i / dhead = w s'(x_i) h_i
        weight_i = max(0, 1 - Delta / r_i)

    r_i is the least change of the weights of the judge's linear head that takes the advantage's sign away
    (arXiv 2604.02986; its reward is linear in the head, ours a sigmoid s mixed with the verifier's: to first
    order). Delta is the least of the positive radii of all ranks above the smallest judge_certainty of them;
    means are those of the group [secondary: radius and quantile are the paper's, the form of the weight is
    our reading]. scores x [B] and features h [B, d] are of ScalarJudge.head_inputs().
    """
    sigmoid = scores.double().sigmoid()
    slope = config.reward.judge_weight * sigmoid * (1 - sigmoid)  # [B]
    gradients = slope.unsqueeze(1) * features.double()  # [B, d]
    radii = torch.zeros(len(scores), dtype=torch.float64)
    for group in batch.group_index.unique():
        members = (batch.group_index == group) & batch.valid
        rewards, own = batch.rewards[members].double(), gradients[members]
        if len(rewards) >= 2 and rewards.max() - rewards.min() > ZERO_VARIANCE:  # equal ones have no sign
            slopes = (own - own.mean(dim=0)).norm(dim=1)  # how quickly advantages move with the head
            radii[members] = (rewards - rewards.mean()).abs() / slopes.clamp(min=1e-12)
    share = config.reward.judge_certainty
    (num,) = sum_over_ranks(int((radii > 0).sum()))
    delta = largest_of_all(radii[radii > 0], max(1, math.ceil((1 - share) * num - 1e-9)))
    return torch.where(radii > delta, 1 - delta / radii, 0.0).to(batch.rewards.dtype)


def zero_variance_rows(batch: RolloutBatch, binary: bool) -> Tensor:
    """Mark, [B] bool, the valid completions of groups whose valid scores, two or more, are all equal."""
    scores = torch.tensor([score_of(v, binary) for v in batch.verdicts])
    rows = torch.zeros(len(scores), dtype=torch.bool)
    for group in batch.group_index.unique():
        members = (batch.group_index == group) & batch.valid
        if members.sum() >= 2:  # [ours] fewer verdicts say nothing: skipped, not reshaped
            rows |= members & bool(scores[members].max() - scores[members].min() <= ZERO_VARIANCE)
    return rows


def rl_zvp_advantages(entropy: Tensor, mask: Tensor, rewarded: Tensor, coef: float) -> Tensor:
    """Return token advantages of completions of zero-variance groups (RL-ZVP, arXiv 2509.21880, eq. 5).

        R > 0: +alpha H_t        R = 0: -alpha (max_k H_k - H_t)

    entropy [B, T] nats, detached; mask [B, T] bool; rewarded [B] bool, where the score is above 0. Returns
    [B, T], 0 on padding. The most uncertain token of a completion that is not rewarded is not pushed down.
    The paper branches on the sign of the reward and has binary rewards only; a group tied at one half counts
    as rewarded, too [ours: the letter of eq. 5]. Its H is the current policy's in every update, ours is the
    old policy's [ours: one advantage for all updates of a step]; in the first update they are the same.
    """
    highest = entropy.masked_fill(~mask, 0).amax(dim=1, keepdim=True)  # [B, 1], entropies are >= 0
    return torch.where(rewarded.unsqueeze(1), coef * entropy, coef * (entropy - highest)) * mask


def token_advantages(batch: RolloutBatch, config: Config) -> Tensor:
    """Return the advantage of each token [B, T], of rewards, verdicts and, for RL-ZVP, entropies.

    Collective where a standard deviation of the batch is taken: adv_norm batch_std, part_norm before_sum.
    """
    algorithm, index = config.algorithm, batch.group_index
    correct = torch.tensor([v.status == "ok" for v in batch.verdicts], dtype=torch.bool)  # [B]
    match algorithm.part_norm:
        case "after_sum":
            advantages = compute_advantages(
                batch.rewards, batch.valid, index, algorithm.adv_norm, algorithm.tie_band
            )  # [B]
        case "before_sum":
            advantages = part_advantages(batch, algorithm.tie_band)  # [B]
    if algorithm.correctness_guard:
        advantages = guard_correctness(advantages, correct)
    if batch.certainty is not None:
        advantages = advantages * batch.certainty
    advantages = advantages.unsqueeze(1) * batch.response_mask  # [B, T]
    if config.zero_variance.rl_zvp and batch.entropy is not None:  # None: no rank keeps a group
        rows = zero_variance_rows(batch, config.reward.binary)  # [B]
        rewarded = torch.tensor([score_of(v, config.reward.binary) for v in batch.verdicts]) > 0  # [B]
        mask, coef = batch.response_mask[rows], config.zero_variance.rl_zvp_coef
        advantages[rows] = rl_zvp_advantages(batch.entropy[rows], mask, rewarded[rows], coef)
    return advantages


def largest_of_all(values: Tensor, num: int) -> float:
    """Return the num-th largest of the values [n] of all ranks, the least if there are fewer. Collective."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values.double().topk(min(num, len(values))).values.cpu())
    largest = torch.cat(everyone)
    return largest.topk(min(num, len(largest))).values[-1].item() if len(largest) else math.inf


def most_uncertain(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """Mark the share of the tokens of all ranks that has the highest entropy, [B, T] bool. Collective.

    "Beyond the 80/20 rule", arXiv 2506.01939, eq. 5: tau is the entropy that the share of the tokens of an
    update reaches, and tokens below it have no policy loss; they count in its mean. The number is rounded up,
    tokens as uncertain as the last are in [ours]. entropy [B, T] nats, of the old policy.
    """
    (num,) = sum_over_ranks(int(mask.sum()))
    return (entropy >= largest_of_all(entropy[mask], math.ceil(share * num - 1e-9))) & mask


def treat_covariant_tokens(
    advantages: Tensor, batch: RolloutBatch, mask: Tensor, config: Config, step: int
) -> tuple[Tensor, Tensor]:
    """Treat tokens whose log-probability and advantage covary (arXiv 2505.22617). Collective.

        cov_t = (A_t - mean A) (log pi_old(y_t) - mean log pi_old),   means over the tokens of mask, all ranks

        clip   covariance_share of the tokens, at least one, drawn among those with cov_t in covariance_range,
               have no policy loss
        kl     covariance_share of the tokens, at least one, with the largest cov_t, have a KL term

    Returns the advantages [B, T], and which tokens have a KL term, [B, T] bool.

    The paper takes the current policy's log-probabilities [ours: the old policy's, so that how an update is
    split has no part in the choice; in the first update of a step they are the same].
    """
    algorithm, logprobs = config.algorithm, batch.old_logprobs
    sums = [float((values * mask).double().sum()) for values in (advantages, logprobs)]
    *sums, num_tokens = sum_over_ranks(*sums, int(mask.sum()))
    mean_advantage, mean_logprob = (total / max(1.0, num_tokens) for total in sums)
    covariance = (advantages - mean_advantage) * (logprobs - mean_logprob)  # [B, T]
    num = max(1, int(algorithm.covariance_share * num_tokens))
    match algorithm.covariance:
        case "clip":
            low, high = algorithm.covariance_range
            eligible = mask & (covariance > low) & (covariance < high)
            keys = torch.zeros(mask.shape, dtype=torch.float64)  # drawn by a row's content, on any rank
            for row in eligible.any(dim=1).nonzero().flatten().tolist():
                ids = batch.completion_ids[row]
                content = (*batch.prompt_ids[row], *ids)
                draws = random.Random(seed_of(config.train.seed, "covariance", step, *content))
                keys[row, : len(ids)] = torch.tensor([draws.random() for _ in ids], dtype=torch.float64)
            drawn = eligible & (keys >= largest_of_all(keys[eligible], num))
            return advantages.masked_fill(drawn, 0.0), torch.zeros_like(mask)
        case "kl":
            return advantages, mask & (covariance.double() >= largest_of_all(covariance[mask], num))


def select_tokens(
    advantages: Tensor, batch: RolloutBatch, config: Config, step: int
) -> tuple[Tensor, Tensor | None]:
    """Return the advantages with 0 for tokens without policy loss, and which have KL-Cov's term, both [B, T].

    Completions cut at the limit (leave_out_cut: DAPO, arXiv 2503.14476, section 3.4), tokens of low entropy
    and tokens drawn by Clip-Cov have no policy loss. All of them count in means and weights [ours]. Chosen
    among the tokens of each update over all ranks. Collective where a setting is on.
    """
    algorithm, penalised = config.algorithm, torch.zeros_like(batch.response_mask)
    if algorithm.leave_out_cut:
        was_cut = torch.tensor([reason == "length" for reason in batch.finish_reason], dtype=torch.bool)
        advantages = advantages.masked_fill(was_cut.unsqueeze(1), 0.0)
    if batch.entropy is None:  # nothing is chosen by the old policy's outputs, or no rank keeps a group
        return advantages, None
    for number in range(config.train.minibatches_per_step):
        mask = batch.response_mask & (batch.minibatch == number).unsqueeze(1)
        if algorithm.top_entropy < 1:
            keep = most_uncertain(batch.entropy, mask, algorithm.top_entropy)
            advantages = advantages.masked_fill(mask & ~keep, 0.0)
        if algorithm.covariance_share > 0:
            advantages, chosen = treat_covariant_tokens(advantages, batch, mask, config, step)
            penalised = penalised | chosen
    return advantages, penalised if penalised.any() else None


# ============================================================================================================
# 5 Ratio, clip, loss
# ============================================================================================================
def entropy_groups(entropy: Tensor, mask: Tensor, shares: tuple[float, ...]) -> Tensor:
    """Return the entropy group of each token, 0 the most uncertain (ESPO, arXiv 2512.00499, eq. 7).

    The tokens of a completion in falling order of entropy are cut where the cumulative shares end, rounded up
    [paper: 20 % and 80 %; ours: per completion, rounding, equal entropies in the order of the text].
    entropy [B, T] nats, of the old policy; mask [B, T] bool. Returns [B, T] int64, any value on padding.
    """
    order = entropy.masked_fill(~mask, -1.0).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)  # [B, T], 0 for the highest entropy
    lengths, groups, total = mask.sum(dim=1, keepdim=True), torch.zeros_like(rank), 0.0
    for share in shares[:-1]:
        total += share
        groups += rank >= (lengths.double() * total - 1e-9).ceil()
    return groups


def token_groups_of(entropy: Tensor, mask: Tensor, algorithm: AlgorithmSettings) -> Tensor:
    """Return the token group of each token, [B, T] int64: tokens of a completion that share a ratio.

    token          each token is a group                   sequence   a completion is a group
    entropy_group  tokens of about one entropy are a group (ESPO)
    """
    match algorithm.ratio_level:
        case "token":
            return torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
        case "sequence":
            return torch.zeros(mask.shape, dtype=torch.int64, device=mask.device)
        case "entropy_group":
            return entropy_groups(entropy, mask, algorithm.entropy_groups)


class TokenGroupSum(torch.autograd.Function):
    """Sum values over token groups; the gradient is summed in float64.

    A token's gradient is the sum of the gradients of all tokens of its group. Added one after the other in
    float32 it is 1e-4 off on completions of 16,000 tokens.
    """

    @staticmethod
    def forward(values: Tensor, token_groups: Tensor) -> Tensor:
        """Return, for each token, the sum of values [B, T] over its token group, [B, T]."""
        sums = values.new_zeros(len(values), max(values.shape[1], MAX_ENTROPY_GROUPS))  # short rows: T < K
        return sums.scatter_add(1, token_groups, values).gather(1, token_groups)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Keep the token groups."""
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient by the values: the same sum."""
        (token_groups,) = ctx.saved_tensors
        return TokenGroupSum.forward(gradient.double(), token_groups).to(gradient.dtype), None


def token_group_sum(values: Tensor, token_groups: Tensor, mask: Tensor) -> Tensor:
    """Return, for each token, the sum of values over its token group, [B, T]; padding counts nowhere."""
    return TokenGroupSum.apply(values * mask, token_groups)


def token_group_size(token_groups: Tensor, mask: Tensor) -> Tensor:
    """Return, for each token, the number of tokens in its token group, [B, T] float, at least 1."""
    return token_group_sum(mask.to(torch.get_default_dtype()), token_groups, mask).clamp(min=1)


def num_token_groups(token_groups: Tensor, mask: Tensor) -> Tensor:
    """Return K_i, the token groups of each completion that are not empty, [B, 1] float, at least 1."""
    per_token = mask / token_group_size(token_groups, mask)  # sums to 1 over a token group
    return per_token.sum(dim=1, keepdim=True).round().clamp(min=1)


def token_group_mean(values: Tensor, token_groups: Tensor, mask: Tensor) -> Tensor:
    """Return, for each token, the mean of values over its token group, [B, T]."""
    sums = token_group_sum(values, token_groups, mask)
    return sums / token_group_size(token_groups, mask).to(values.dtype)


MAX_LOG_RATIO = 80.0  # above, float32 overflows and 0 * inf is NaN


def importance_ratio(log_ratio: Tensor, token_groups: Tensor, mask: Tensor, form: str) -> Tensor:
    """Return the ratio of each token's group, [B, T]: s = exp(mean log r) (ESPO, eq. 10; GSPO, eq. 7).

    geometric      s                    gradient through the mean (GSPO, arXiv 2507.18071)
    stop_gradient  sg[s] r / sg[r]      the value s, each token its own gradient (GSPO-token, eq. 14;
                                        ESPO, eq. 9 in our reading [ours: as printed the value is not s])
    literal        sg[s] r              ESPO, eq. 9 as printed: pi_old in the denominator [paper]
    """
    log_s = token_group_mean(log_ratio, token_groups, mask)
    match form:
        case "geometric":
            pass
        case "stop_gradient":
            log_s = log_s.detach() + (log_ratio - log_ratio.detach())
        case "literal":
            log_s = log_s.detach() + log_ratio
    return log_s.clamp(max=MAX_LOG_RATIO).exp()


def entropy_clip_eps(
    entropy: Tensor, token_groups: Tensor, mask: Tensor, log_vocab: float, algorithm: AlgorithmSettings
) -> Tensor:
    """Return the half-width of ESPO's clip interval, [B, T]: wider where the old policy was uncertain.

    Eq. 8 prints eps_t = alpha e_t / (|tau| log|V|). Three readings of it [ours]:

    token_group_mean   alpha mean_{t in tau}(e_t) / log|V|   the text: groups with a higher average entropy
    over_token_groups  alpha e_t / (K_i log|V|)              |tau| as in eq. 5, where it counts the groups
    over_tokens        alpha e_t / (|tau| log|V|)            |tau| as the number of tokens of the group
    """
    match algorithm.entropy_clip_form:
        case "token_group_mean":
            mean_entropy = token_group_mean(entropy, token_groups, mask)
        case "over_token_groups":
            mean_entropy = entropy / num_token_groups(token_groups, mask)
        case "over_tokens":
            mean_entropy = entropy / token_group_size(token_groups, mask)
    return algorithm.entropy_clip_coef * mean_entropy / log_vocab


def loss_weights(
    mask: Tensor,
    token_groups: Tensor,
    num_completions: int,
    num_tokens: int,
    max_new_tokens: int,
    loss_agg: str,
) -> Tensor:
    """Return the weight of each token in the loss, [B, T], 0 on padding.

        sequence_mean     1 / (N T_i)             over tokens, then completions (DeepSeekMath, eq. 3)
        token_mean        1 / sum_i T_i           over all tokens (DAPO, eq. 8)
        token_group_mean  1 / (N K_i |tau|)       over token groups, then completions (ESPO, eq. 5)
        sequence_sum      1 / N                   over completions only (LUSPO, 2602.05261) [secondary]
        fixed_length      1 / (N max_new_tokens)  the length has no part in it (Dr.GRPO, 2503.20783)

    mask [B, T] bool; N = num_completions and num_tokens count all ranks and micro-batches, so that the loss
    does not depend on how an update is split. K_i counts the token groups that are not empty.
    """
    match loss_agg:
        case "sequence_mean":
            return mask / (mask.sum(dim=1, keepdim=True).clamp(min=1) * num_completions)
        case "token_mean":
            return mask / torch.tensor(float(max(1, num_tokens)))
        case "token_group_mean":
            per_token = mask / token_group_size(token_groups, mask)  # sums to 1 over a token group
            return per_token / (num_token_groups(token_groups, mask) * num_completions)
        case "sequence_sum":
            return mask / torch.tensor(float(max(1, num_completions)))
        case "fixed_length":
            return mask / torch.tensor(float(num_completions * max_new_tokens))


def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, mode: str, cap: float, floor: float = 0.0
) -> Tensor:
    """Return the importance weight of trainer over engine, [B, T]: the engine is not quite the old policy.

    With r = pi_old / pi_rollout of a token, C = cap and c = floor:

    token_tis       max(c, min(r, C))                             (arXiv 2510.11370 and verl: C = 2, c = 0)
    sequence_tis    the same of the product of r over the completion
    token_mask      r where c <= r <= C, else 0                   (IcePop, arXiv 2510.18855) [secondary]
    sequence_mask   the product of r if it is in [c, C], else 0   (TRL: sequence_mask)
    geometric_mask  1 if the product to the power 1/T_i is in [c, C], else 0     (verl's docs) [secondary]
    """
    difference = ((old_logprobs - rollout_logprobs) * mask).clamp(max=MAX_LOG_RATIO)  # [B, T]
    total = difference.sum(dim=1, keepdim=True)  # [B, 1]
    product = total.clamp(max=MAX_LOG_RATIO).exp().expand(mask.shape)
    inside = lambda ratio: (ratio >= floor) & (ratio <= cap)
    match mode:
        case "none":
            return torch.ones_like(difference)
        case "token_tis":
            return difference.exp().clamp(floor, cap)
        case "sequence_tis":
            return product.clamp(floor, cap)
        case "token_mask":
            return torch.where(inside(difference.exp()), difference.exp(), 0.0)
        case "sequence_mask":
            return torch.where(inside(product), product, 0.0)
        case "geometric_mask":
            mean = (total / mask.sum(dim=1, keepdim=True).clamp(min=1)).exp()  # [B, 1]
            return inside(mean).to(difference.dtype).expand(mask.shape)


def off_policy_weights(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, mask: Tensor, limit: float
) -> Tensor:
    """Return 0 for tokens that the off-policy sequence mask leaves out and 1 for the others, [B, T].

    DeepSeek-V3.2, arXiv 2512.02556, eq. 9 [secondary: TRL]: a completion with A < 0 is left out if the mean
    of log(pi_rollout / pi) over its tokens is above the limit. Its pi_old is the engine that sampled, pi is
    the current policy, so the mask acts from the first update on. limit 0: off.
    """
    apart = ((rollout_logprobs - logprobs.detach()) * mask).sum(dim=1, keepdim=True)
    is_far = apart / mask.sum(dim=1, keepdim=True).clamp(min=1) > (limit or math.inf)  # [B, 1]
    return (~is_far | (advantages >= 0)).to(logprobs.dtype)


def pessimistic(ratio: Tensor, advantages: Tensor, low, high, cap: float | None) -> tuple[Tensor, Tensor]:
    """Return min( min(s, cap) A, clip(s, low, high) A ), and where it has lost its gradient, both [B, T].

    On an edge the gradient is the unclipped one. cap bounds what a token with A < 0 can cost: dual clip
    (arXiv 1912.09729) with c = cap, which the two-sided clip of INTELLECT-2 (arXiv 2505.07291, delta = cap)
    equals for cap > high.
    """
    bounded, free = ratio.clamp(low, high), ratio.clamp(max=cap or math.inf)
    is_capped = (free < ratio) & (advantages < 0)
    gain = torch.minimum(free * advantages, bounded * advantages)
    return gain, (bounded * advantages < free * advantages) | is_capped


def moved_too_far(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, divergence: str, algorithm: AlgorithmSettings
) -> Tensor:
    """Mark tokens that DPPO (arXiv 2602.04879) leaves out, [B, T] bool: far, and on their way further.

        total_variation   |p - p_old|
        binary_kl         p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))

    of the two outcomes "this token" and "another one", above clip_eps_high where A > 0 and p > p_old, above
    clip_eps_low where A < 0 and p < p_old. [ours: 1 - p is at least 1e-8; the authors add 1e-8.]
    """
    new, old = logprobs.detach().exp(), old_logprobs.exp()
    match divergence:
        case "total_variation":
            distance = (new - old).abs()
        case "binary_kl":
            log_others = [(1 - p).clamp(min=1e-8).log() for p in (old, new)]
            distance = old * (old_logprobs - logprobs.detach()) + (1 - old) * (log_others[0] - log_others[1])
    is_far_up = (advantages > 0) & (new > old) & (distance > algorithm.clip_eps_high)
    return is_far_up | ((advantages < 0) & (new < old) & (distance > algorithm.clip_eps_low))


def sequence_gamma(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, algorithm: AlgorithmSettings
) -> Tensor:
    """Return VESPO's weight of each token, [B, T]: W^k exp(lambda (1 - W)), 1 at W = 1 (arXiv 2602.10693).

    W is the product of the completion's ratios, kept in [1e-8, e^20] [secondary: TRL, after the authors'
    code] and without gradient; k and lambda go by the sign of the advantage.
    """
    log_w = (log_ratio.detach() * mask).sum(dim=1, keepdim=True).clamp(math.log(1e-8), 20.0)  # [B, 1]
    by_sign = lambda pair: torch.where(advantages >= 0, *map(log_w.new_tensor, pair))  # [B, T]
    power, decay = by_sign(algorithm.gamma_powers), by_sign(algorithm.gamma_decays)
    return (power * log_w + decay * (1 - log_w.exp())).exp()


def token_gain(
    log_ratio: Tensor, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, token_groups: Tensor,
    entropy: Tensor, mask: Tensor, log_vocab: float, algorithm: AlgorithmSettings,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return the gain of each token before its weight, [B, T], and statistics: ratio, clipped, clip_eps.

    fixed             min( min(s, cap) A, clip(s, 1 - eps_low, 1 + eps_high) A )   (PPO; DAPO, two eps)
    entropy_adaptive  the same with eps from entropy_clip_eps()                    (ESPO, eq. 5)
    weight            sg[clip(s, 1 - eps_low, 1 + eps_high)] A log pi              (CISPO, 2506.13585, eq. 4)
    before_mean       s A, each token's ratio clipped before the mean              (GMPO, 2507.20673, eq. 4)
    soft              4 / tau sigmoid(tau (s - 1)) A, tau by the sign of A         (SAPO, 2511.20347)
    total_variation   sg[min(s, cap)] A log pi, 0 where moved_too_far()            (DPPO, 2602.04879)
    binary_kl         the same by another distance                                 (DPPO)
    gamma             sg[sequence_gamma()] A log pi                                (VESPO, 2602.10693)
    none              s A
    """
    low, high, cap = 1 - algorithm.clip_eps_low, 1 + algorithm.clip_eps_high, algorithm.clip_cap
    ratio = importance_ratio(log_ratio, token_groups, mask, algorithm.ratio_form)
    capped, statistics = ratio.detach().clamp(max=cap or math.inf), {"ratio": ratio}
    clipped = torch.zeros_like(mask)
    match algorithm.clip_mode:
        case "fixed":
            gain, clipped = pessimistic(ratio, advantages, low, high, cap)
        case "entropy_adaptive":
            eps = statistics["clip_eps"] = entropy_clip_eps(entropy, token_groups, mask, log_vocab, algorithm)
            gain, clipped = pessimistic(ratio, advantages, 1 - eps, 1 + eps, cap)
        case "weight":
            bounded = ratio.detach().clamp(low, high)
            gain, clipped = bounded * advantages * logprobs, bounded != ratio
        case "before_mean":
            inside = log_ratio.clamp(math.log(low) if low > 0 else -math.inf, math.log(high))
            lower, upper = torch.minimum(log_ratio, inside), torch.maximum(log_ratio, inside)
            of_group = token_group_sum(advantages, token_groups, mask)  # for tokens that are masked
            is_good = torch.where(advantages == 0, of_group, advantages) > 0
            worse = torch.where(is_good, lower, upper)
            gain = importance_ratio(worse, token_groups, mask, algorithm.ratio_form) * advantages
            clipped = worse != log_ratio
        case "soft":
            tau = torch.where(advantages > 0, *map(ratio.new_tensor, algorithm.soft_temperatures))
            gain = 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
        case "total_variation" | "binary_kl" as distance:
            clipped = moved_too_far(logprobs, old_logprobs, advantages, distance, algorithm)
            gain = capped * advantages * logprobs * ~clipped
        case "gamma":
            gain = sequence_gamma(log_ratio, advantages, mask, algorithm) * advantages * logprobs
        case "none":
            gain = ratio * advantages
    return gain, statistics | {"clipped": clipped.to(ratio.dtype)}


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, token_groups: Tensor,
    entropy: Tensor, mask: Tensor, log_vocab: float, algorithm: AlgorithmSettings,
    ref_logprobs: Tensor | None = None, penalised: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return the loss of a micro-batch, its share of -J, and detached per-token statistics [B, T].

        loss = -sum_{i,t} w_{i,t} [ gain(s, A) - beta KL_{i,t} - beta_cov |log r_{i,t}| ]

        k3         KL = exp(d) - d - 1, d = ref_logprobs - logprobs        (DeepSeekMath, eq. 4)
        unbiased   KL = r (exp(d) - d - 1), r of the token, with gradient  (DeepSeek-V3.2, eq. 7) [secondary]

    The policy enters by its ratio (token_groups_of(), importance_ratio()), which token_gain() turns into a
    gain; masks and corrections are factors of the advantages, and loss_weights() sums up. All tensors are
    [B, T]: entropy of the old policy, ref_logprobs only with kl_coef > 0, penalised the tokens with KL-Cov's
    term (arXiv 2505.22617, the last one). log_vocab is the log of the vocabulary's size. The loss is a scalar
    with gradient.
    """
    log_ratio = logprobs - old_logprobs
    gain, statistics = token_gain(
        log_ratio, logprobs, old_logprobs, advantages, token_groups, entropy, mask, log_vocab, algorithm
    )
    if algorithm.kl_coef > 0:
        log_ref_ratio = (ref_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
        statistics["ref_kl_k3"] = log_ref_ratio.expm1() - log_ref_ratio  # >= 0, unbiased under pi
        match algorithm.kl_form:
            case "k3":
                penalty = statistics["ref_kl_k3"]
            case "unbiased":
                penalty = log_ratio.clamp(max=MAX_LOG_RATIO).exp() * statistics["ref_kl_k3"]
        gain = gain - algorithm.kl_coef * penalty
    if penalised is not None:
        gain = gain - algorithm.covariance_kl_coef * log_ratio.abs() * penalised
    return -(weights * gain).sum(), {name: value.detach() for name, value in statistics.items()}


# ============================================================================================================
# 6 Forward with replayed routes, update
# ============================================================================================================
class PolicyOutputs(NamedTuple):
    """What a forward computes for the completions of b rows; 0 on padding."""

    logprobs: Tensor  # [b, T] nats
    entropy: Tensor  # [b, T] nats, detached
    routes: list[Tensor] | None  # [b] of [p + c - 1, L, K], ids of the experts used; None of a dense model
    route_mismatch: Tensor | None  # [b, T], 1 where these are not the engine's; None where it gave none


def routes_to_replay(batch: RolloutBatch, router_replay: str) -> list[Tensor] | None:
    """Return the expert ids that the trainer's forward uses for each row; None: the live router's.

        r2   those of the old-logprob pass, which records them and itself is live
        r3   the engine's, in the old-logprob pass and in every update (arXiv 2510.11370) [secondary]

    Only the choice is replayed, its weights are live. Both passes replay alike, or the first ratio would not
    be 1 [ours].
    """
    match router_replay:
        case "off":
            return None
        case "r2":
            return batch.old_routes
        case "r3":
            return batch.routed_experts


def routes_of_tokens(routes: list[Tensor], rows: list[int], packed: PackedSequences) -> Tensor:
    """Return the expert ids [T, L, K] of the packed tokens of rows; of shared ones the first row's."""
    ids = torch.cat([routes[i] for i in rows]).to(packed.input_ids.device)
    return ids if packed.kept is None else ids[packed.kept]


def forward_rows(
    policy, batch: RolloutBatch, rows: list[int], config: Config, replay: bool = True
) -> PolicyOutputs:
    """Compute log-probabilities, entropies and routes of the completions of `rows`. Collective.

    Without rows one dummy sequence goes through the model, so that this rank takes part in its collectives;
    the result [1, T] is multiplied by 0.
    """
    device = next(policy.parameters()).device
    routes = routes_to_replay(batch, config.algorithm.router_replay) if replay and rows else None
    if rows:
        ids = [batch.prompt_ids[i] for i in rows], [batch.completion_ids[i] for i in rows]
        packed = pack(*ids, device, config.train.share_prompts)
        mask = batch.response_mask[rows].to(device)  # [b, T]
    else:
        packed = pack([[0]], [[0]], device)
        mask = torch.zeros(1, batch.response_mask.shape[1], dtype=torch.bool, device=device)
        mask[0, 0] = True
    replay_ids_TLK = None if routes is None else routes_of_tokens(routes, rows, packed)
    logprobs, entropy, layer_ids = policy(
        packed, temperature=config.rollout.temperature, replay_ids_TLK=replay_ids_TLK
    )  # [N], [N]
    scale = 1.0 if rows else 0.0
    zeros = logprobs.new_zeros(mask.shape)
    logprobs, entropy = (zeros.masked_scatter(mask, x * scale) for x in (logprobs, entropy.detach()))
    num_experts = num_experts_of(getattr(policy, "module", policy).config)
    used_TLK, mismatch = route_table(layer_ids, num_experts), None
    if used_TLK is None or not rows:
        return PolicyOutputs(logprobs, entropy, None, None)
    if batch.routed_experts is not None:
        sampled_TLK = routes_of_tokens(batch.routed_experts, rows, packed)
        differs_T = (used_TLK.sort().values != sampled_TLK.sort().values).flatten(1).any(dim=1)
        differs_T &= sampled_TLK[:, 0, 0] != invalid_route(num_experts)  # those are counted apart
        differs_N = differs_T.index_select(0, packed.predictor_index)
        mismatch = zeros.detach().masked_scatter(mask, differs_N.to(zeros.dtype))
    lengths = [len(batch.prompt_ids[i]) + len(batch.completion_ids[i]) - 1 for i in rows]
    used_TLK = used_TLK if packed.spread is None else used_TLK[packed.spread]
    return PolicyOutputs(logprobs, entropy, list(used_TLK.split(lengths)), mismatch)


def tokens_per_forward(train: TrainSettings, on_gpu: bool | None = None) -> int:
    """Return the padded tokens of a micro-batch: train.micro_batch_tokens, or what suits the device."""
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    return train.micro_batch_tokens or (32768 if on_gpu else 4096)


def sequence_lengths(batch: RolloutBatch) -> list[int]:
    """Return [B], the tokens that a forward computes of each row: all but the last."""
    return [max(1, len(p) + len(c) - 1) for p, c in zip(batch.prompt_ids, batch.completion_ids)]


def split_lengths(batch: RolloutBatch, config: Config) -> list[int]:
    """Return [B], the tokens of each row by which rows are put into micro-batches.

    With train.share_prompts the rows of a group are taken to be as long as its longest, so that they stay
    together, where this saves at least as many tokens of the prompt as it adds to attention's padded grid.
    """
    lengths = sequence_lengths(batch)
    if not config.train.share_prompts:
        return lengths
    rows_of = defaultdict(list)
    for row, group in enumerate(batch.group_index.tolist()):
        rows_of[group].append(row)
    for rows in rows_of.values():
        longest, total = max(lengths[row] for row in rows), sum(lengths[row] for row in rows)
        saved = (len(rows) - 1) * (len(batch.prompt_ids[rows[0]]) - 1)
        if len(rows) * longest - total <= saved:
            for row in rows:
                lengths[row] = longest
    return lengths


@torch.no_grad()
def forward_batch(
    policy, batch: RolloutBatch, config: Config, replay: bool = True, keep_routes: bool = False
) -> PolicyOutputs:
    """Call forward_rows() on all rows without gradient and return its outputs on the CPU. Collective.

    keep_routes: return the routes of each row, too.
    """
    logprobs, entropy, mismatch = (torch.zeros(batch.response_mask.shape) for _ in range(3))
    routes, train = [None] * len(batch.prompts), config.train
    micro_batches = split_micro_batches(
        split_lengths(batch, config), list(range(len(routes))), tokens_per_forward(train), train.balance
    )
    for rows in micro_batches:
        part = forward_rows(policy, batch, rows, config, replay)
        if rows:
            logprobs[rows], entropy[rows] = part.logprobs.float().cpu(), part.entropy.float().cpu()
        for row, ids in zip(rows, part.routes if keep_routes and part.routes else []):
            routes[row] = ids.cpu()
        if part.route_mismatch is not None:
            mismatch[rows] = part.route_mismatch.float().cpu()
    routes = None if any(ids is None for ids in routes) else routes
    return PolicyOutputs(logprobs, entropy, routes, None if batch.routed_experts is None else mismatch)


def needs_old_pass(config: Config) -> bool:
    """Tell whether the update needs old log-probabilities or entropies before its own forward gives them."""
    num_updates = config.train.num_updates
    is_off_policy = num_updates > 1 and config.algorithm.old_policy == "trainer"
    selects_tokens = config.algorithm.top_entropy < 1 or config.algorithm.covariance_share > 0
    return config.zero_variance.rl_zvp or is_off_policy or selects_tokens


def micro_batch_loss(
    logprobs: Tensor,
    entropy: Tensor,
    batch: RolloutBatch,
    rows: list[int],
    counts: Tensor,
    log_vocab: float,
    config: Config,
    has_moved: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return policy_loss() of some rows and its per-token statistics [b, T].

    counts: completions and tokens of the update over all ranks. has_moved: the policy was updated since it
    sampled these rows. algorithm.old_policy is that of the ratio:

        trainer  the trainer's before the update; where the batch has no old_logprobs that is the current one,
                 and the ratio exactly 1
        rollout  the engine's (bypass): the ratio pi / pi_rollout is itself the correction of what separates
                 the two, and no pass is needed for old log-probabilities
    """
    device, algorithm = logprobs.device, config.algorithm
    mask = batch.response_mask[rows].to(device)  # [b, T]
    sampled = batch.rollout_logprobs[rows].to(device)
    before = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[rows].to(device)
    match algorithm.old_policy:
        case "trainer":
            old = before
        case "rollout":
            old = sampled
    entropy = entropy.detach() if batch.entropy is None else batch.entropy[rows].to(device)
    token_groups = token_groups_of(entropy, mask, algorithm)
    num_completions, num_tokens = counts.tolist()
    weights = loss_weights(
        mask, token_groups, num_completions, num_tokens, config.rollout.max_new_tokens, algorithm.loss_agg
    )
    advantages = batch.advantages[rows].to(device)
    correction = correction_weights(
        old, sampled, mask, algorithm.rollout_correction, algorithm.rollout_correction_cap,
        algorithm.rollout_correction_floor,
    ) * off_policy_weights(logprobs, sampled, advantages, mask, algorithm.off_policy_mask)  # fmt: skip
    loss, statistics = policy_loss(
        logprobs, old, advantages * correction, weights, token_groups, entropy, mask, log_vocab, algorithm,
        None if batch.ref_logprobs is None else batch.ref_logprobs[rows].to(device),
        None if batch.penalised is None else batch.penalised[rows].to(device),
    )  # fmt: skip
    if "mask" in algorithm.rollout_correction or algorithm.off_policy_mask > 0:
        statistics["masked"] = (correction == 0).to(logprobs.dtype)
    statistics["entropy"] = entropy
    statistics["entropy_group"] = entropy_groups(entropy, mask, algorithm.entropy_groups)
    if batch.old_logprobs is None and has_moved:
        return loss, statistics  # the distance of the old policy to the engine is not known
    return loss, statistics | mismatch_statistics(before, sampled)


def rows_with_gradient(batch: RolloutBatch, config: Config) -> Tensor:
    """Mark the rows that updates compute, [B] bool: an advantage is not 0, or there is a KL term."""
    if not config.train.skip_zero_gradient or config.algorithm.kl_coef > 0:
        return torch.ones(len(batch.prompts), dtype=torch.bool)
    has_gradient = batch.advantages != 0  # [B, T]
    return (has_gradient if batch.penalised is None else has_gradient | batch.penalised).any(dim=1)


@dataclass
class UpdateWork:
    """What the updates of a step have done on this rank so far."""

    seen: list[tuple[list[int], dict]] = field(default_factory=list)  # (rows, statistics) by micro-batch
    suspects: list[int] = field(default_factory=list)  # rows of this update whose loss is not finite
    grad_norms: list[float] = field(default_factory=list)
    num_updates: int = 0
    num_nonfinite: int = 0  # updates that were not made, because the gradient was not finite
    num_empty: int = 0  # updates without a row that has a gradient, on any rank
    num_computed: int = 0  # tokens of the sequences
    num_padded: int = 0  # tokens of the grids that attention works on

    def add_tokens(self, lengths: list[int]) -> None:
        """Count the tokens of a micro-batch whose sequences are so long."""
        self.num_computed += sum(lengths)
        self.num_padded += len(lengths) * max(lengths, default=0)

    def end_update(self, trainer) -> None:
        """Take note of the optimizer step that was just taken."""
        self.num_updates, self.suspects = self.num_updates + 1, []
        if trainer.optimizer.overflow:
            self.num_nonfinite += 1
        else:
            self.grad_norms.append(float(trainer.get_global_grad_norm()))


def loss_of_rows(
    policy, batch: RolloutBatch, rows: list[int], counts: Tensor, config: Config, work: UpdateWork
) -> Tensor:
    """Return the loss of some rows and add their statistics to `work`. Collective.

    counts: completions and tokens of the update over all ranks. Without rows the loss is a zero that takes
    part in the model's collectives.
    """
    logprobs, entropy, _, mismatch = forward_rows(policy, batch, rows, config)  # [b, T]
    if not rows:
        return logprobs.sum()
    log_vocab = math.log(getattr(policy, "module", policy).lm_head.weight.shape[0])
    loss, statistics = micro_batch_loss(
        logprobs, entropy, batch, rows, counts, log_vocab, config, work.num_updates > 0
    )
    if mismatch is not None:
        before = batch.route_mismatch
        statistics["mismatch_routes"] = mismatch if before is None else before[rows].to(logprobs.device)
    work.seen.append((rows, statistics))
    if not torch.isfinite(loss):
        finite = (logprobs.cpu().isfinite() & batch.advantages[rows].isfinite()).all(dim=1)
        work.suspects += [row for row, ok in zip(rows, finite.tolist()) if not ok] or rows
    return loss


def old_pass_metrics(batch: RolloutBatch, config: Config) -> dict[str, tuple[float, float]]:
    """Measure entropies and the distance to the engine over all tokens, if a pass before the update ran."""
    if batch.old_logprobs is None or batch.entropy is None:
        return {}
    shares, mask = config.algorithm.entropy_groups, batch.response_mask
    statistics = {"entropy": batch.entropy, "entropy_group": entropy_groups(batch.entropy, mask, shares)}
    statistics |= mismatch_statistics(batch.old_logprobs, batch.rollout_logprobs)
    if batch.route_mismatch is not None:
        statistics["mismatch_routes"] = batch.route_mismatch
    return token_metrics(batch, [(list(range(len(mask))), statistics)], len(shares))


def update_policy(
    trainer, batch: RolloutBatch, config: Config, step: int = 0
) -> dict[str, tuple[float, float]]:
    """Take the optimizer steps of a step of training; return metrics as (sum, count). Collective.

    trainer: DeepSpeed's engine. There are minibatches_per_step x passes_per_rollout updates. Rows without
    gradient are left out (train.skip_zero_gradient), but an update that is left without rows on all ranks
    still takes its optimizer step, because AdamW's momentum moves the weights. Every run.log_every steps the
    rows left out go through a forward without gradient, so that the metrics are over all tokens. An update
    whose gradient is not finite leaves the weights as they are (DeepSpeed skips it on all ranks).
    """
    train, work, lengths = config.train, UpdateWork(), sequence_lengths(batch)
    has_gradient, is_shown = rows_with_gradient(batch, config), (step + 1) % config.run.log_every == 0
    padded = split_lengths(batch, config)
    split = lambda rows: split_micro_batches(padded, rows, tokens_per_forward(train), train.balance)
    for number in [*range(train.minibatches_per_step)] * train.passes_per_rollout:
        in_update = batch.minibatch == number  # [B], whole groups
        rows = (in_update & has_gradient).nonzero().flatten().tolist()
        sums = [int(in_update.sum()), int(batch.response_mask[in_update].sum()), len(rows)]
        counts = torch.tensor(sums, device=trainer.device)
        dist.all_reduce(counts)  # before the first backward: the loss must not depend on the split
        if counts[0] == 0:  # groups were dropped: there is nothing left for this update on any rank
            continue
        work.num_empty += int(counts[2] == 0)
        for part in split(rows) or [[]]:
            loss = loss_of_rows(trainer, batch, part, counts[:2], config, work)
            trainer.backward(loss * dist.get_world_size(), scale_wrt_gas=False)  # DeepSpeed takes the mean
            work.add_tokens([lengths[row] for row in part])
        if is_shown:
            with torch.no_grad():
                for part in split((in_update & ~has_gradient).nonzero().flatten().tolist()):
                    loss_of_rows(trainer.module, batch, part, counts[:2], config, work)
        trainer.step()
        if trainer.optimizer.overflow:
            handle_nonfinite("loss", batch, work.suspects, config, step)
        work.end_update(trainer)
    metrics = {"grad_norm": (sum(work.grad_norms), len(work.grad_norms))}
    metrics["nonfinite_updates_max"] = (work.num_nonfinite, 1)
    metrics["padding_frac"] = (work.num_padded - work.num_computed, work.num_padded)
    metrics["update_tokens"] = metrics["update_tokens_max"] = (work.num_computed, 1)
    metrics |= token_metrics(batch, work.seen, len(config.algorithm.entropy_groups))
    if train.skip_zero_gradient:
        metrics["account/update_tokens_total"] = (work.num_computed, 1)
        metrics["empty_updates_max"] = (work.num_empty, 1)
        metrics |= old_pass_metrics(batch, config)
    return metrics


@functools.cache
def lr_function(
    schedule: str, highest: float, warmup: int, num_steps: int, options: tuple[tuple[str, float], ...]
) -> Callable[[int], float]:
    """Return transformers' function from a step to the factor of the highest learning rate."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=highest)
    try:
        scheduler = get_scheduler(
            schedule, optimizer, num_warmup_steps=warmup, num_training_steps=num_steps,
            scheduler_specific_kwargs=dict(options),
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise ValueError(f"train.lr_schedule_args: {dict(options)} for {schedule}: {error}") from error
    return scheduler.lr_lambdas[0]


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of update `step` (counted from 0), by train.lr_schedule.

    [ours] transformers' schedules begin at 0 and end at 0; shifted by one step, neither the first nor the
    last update is one of rate 0.
    """
    train, options = config.train, config.train.lr_schedule_args
    if train.lr_schedule == "inverse_sqrt" and train.warmup_steps == 0:
        # transformers' own timescale without a warm-up; the shift below would count as one of one step
        options = {"timescale": 10_000} | options
    options, highest = tuple(sorted(options.items())), train.learning_rate
    factor = lr_function(train.lr_schedule, highest, train.warmup_steps + 1, train.num_steps + 1, options)
    return highest * factor(step + 1)


# ============================================================================================================
# 7 Evaluation on held-out sets
# ============================================================================================================
def evaluation_is_due(state: TrainState, config: Config) -> bool:
    """Tell whether the policy of this step has to be evaluated: at first, every eval.every steps, at last."""
    every = config.eval.every
    on_the_way = state.step == 0 or (every > 0 and state.step % every == 0)
    return state.evaluated_step < state.step and (on_the_way or state.is_last(config))


def evaluation_requests(eval_sets: EvalSets, config: Config) -> tuple[list[Request], list[Prompt]]:
    """Make this rank's requests of an evaluation, and return the prompt of each with them.

    They go set after set and prompt after prompt, every world_size-th prompt of a set; of each prompt the
    greedy one first, then k samples. Samples use the same random numbers at each evaluation.
    """
    rank, world_size, k = dist.get_rank(), dist.get_world_size(), config.eval.num_samples
    max_new_tokens = config.eval.max_new_tokens or config.rollout.max_new_tokens
    requests, asked = [], []
    for name, (prompts, prompt_ids) in eval_sets.items():
        for i in range(rank, len(prompts), world_size):
            for sample, temperature in enumerate([0.0] + [config.rollout.temperature] * k):
                seed = seed_of(config.train.seed, "eval", name, i, sample)
                requests.append(Request(prompt_ids[i], seed, temperature, max_new_tokens))
                asked.append(prompts[i])
    return requests, asked


def evaluation_metrics(
    completions: list[Completion], verdicts: list[Verdict], eval_sets: EvalSets, config: Config
) -> dict[str, float]:
    """Return accuracy (mean greedy score), avg@k and pass@k (one or more right) of each set. Collective.

    completions, verdicts: of evaluation_requests().
    """
    rank, world_size, k = dist.get_rank(), dist.get_world_size(), config.eval.num_samples
    check_verdicts(verdicts, config.reward.max_failed_frac, "evaluation")
    sums, start = {}, 0
    for name, (prompts, _) in eval_sets.items():
        mine = range(rank, len(prompts), world_size)
        part = slice(start, start := start + len(mine) * (1 + k))
        own = verdicts[part]
        scores = [score_of(v, config.reward.binary) for v in own]
        scores = torch.tensor(scores).view(-1, 1 + k)  # [prompts, 1 + k]
        sums[f"eval/{name}/accuracy"] = (scores[:, 0].sum().item(), len(mine))
        if k:
            right = torch.tensor([v.status == "ok" for v in own]).view(-1, 1 + k)[:, 1:]  # [prompts, k]
            sums[f"eval/{name}/avg_at_{k}"] = (scores[:, 1:].mean(1).sum().item(), len(mine))
            sums[f"eval/{name}/pass_at_{k}"] = (right.any(1).sum().item(), len(mine))
        for level in sorted({p.difficulty for p in prompts if p.difficulty is not None})[:12]:
            greedy = [scores[row, 0].item() for row, i in enumerate(mine) if prompts[i].difficulty == level]
            sums[f"eval/{name}/accuracy_difficulty_{level:g}"] = (sum(greedy), len(greedy))
        num_tokens = sum(len(c.token_ids) for c in completions[part])
        sums[f"eval/{name}/mean_tokens"] = (num_tokens, len(own))
        failed = sum(v.failed for v in own)
        sums[f"eval/{name}/failed_frac"] = (failed, len(own))
    return reduce_metrics(sums)


# ============================================================================================================
# 8 Set-up, loop
# ============================================================================================================
@dataclass
class Run:
    """Everything that main() works with. Functions of sections 2 to 7 take from it what they read."""

    config: Config  # settings of the stage
    given: Config  # those of the run as they were read; without stages they are the same
    configs: list[Config]  # settings of each stage
    offers: list[Offers]  # the prompts of each stage
    lock: IO | None  # held by rank 0 as long as the run lives
    accelerator: Accelerator
    clock: Clock
    watchdog: Watchdog
    state: TrainState
    history: PromptHistory
    eval_sets: EvalSets
    rollouts: Rollouts
    trainer: object  # DeepSpeed's engine around the policy
    reference: moe_model.Policy | None  # the first policy, for a KL penalty
    judge: object | None
    generation_config: str | None  # the text of the file, which may list more end-of-sequence ids
    signals: Signals
    progress: tqdm
    parity_is_due: bool = True  # at the first step, then every rollout.check_every steps

    @property
    def policy(self) -> moe_model.Policy:
        """Return the model that is trained, without DeepSpeed around it."""
        return self.trainer.module

    @property
    def rule(self) -> HandOver:
        """Return when the stage ends; never by a rule of its own where there are no stages."""
        stages = self.given.stages
        return stages[self.state.stage.number].until if stages else HandOver()


def check_ranks(config: Config, world_size: int) -> None:
    """Raise ValueError where the settings do not go with the number of ranks."""
    check_gpus()
    per_step, minibatches = config.rollout.prompts_per_step, config.train.minibatches_per_step
    if per_step % (world_size * minibatches):
        raise ValueError(
            f"rollout.prompts_per_step {per_step} must be a multiple of ranks x train.minibatches_per_step "
            f"({world_size} x {minibatches})"
        )
    if world_size % config.rollout.tensor_parallel:
        shared = f"rollout.tensor_parallel {config.rollout.tensor_parallel}"
        raise ValueError(f"{shared} must divide the number of ranks, {world_size}")


def check_model(config: Config, hf_config) -> None:
    """Raise ValueError where the settings do not go with the model."""
    context = max_model_len(config)
    if context > hf_config.max_position_embeddings:
        raise ValueError(
            "rollout.max_prompt_tokens + the larger max_new_tokens of rollout and eval, each the largest of "
            f"all stages, is {context}, the model's context is {hf_config.max_position_embeddings}"
        )
    width = hf_config.num_attention_heads * moe_model.head_dim(hf_config)
    sizes = {"hidden size": hf_config.hidden_size, "heads x head size": width}
    odd = [f"{name} {size}" for name, size in sizes.items() if size % 128]
    if config.rollout.fp8 == "on" and odd:
        raise ValueError(
            f"rollout.fp8 on: vLLM quantises activations by 128 values, the model has {' and '.join(odd)}: "
            "set it to simulate or off"
        )
    replay, is_dense = config.algorithm.router_replay, num_experts_of(hf_config) == 0
    if replay != "off" and is_dense:
        raise ValueError(f"algorithm.router_replay {replay}: the model is dense, it has no router; set off")


def max_model_len(config: Config) -> int:
    """Return the longest prompt + completion in tokens that the engine has to hold."""
    longest = max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)
    return config.rollout.max_prompt_tokens + longest


def load_data(
    configs: list[Config], tokenizer, pool: RewardPool, checkpoint: Path | None
) -> tuple[LoadedSets, list[OfflineScore | None], list[Offers]]:
    """Load what a run trains on and evaluates, the offline scores of its training prompts, and which of them
    each stage offers. Collective.

    configs: settings of each stage. Rows that cannot be rewarded, whatever a completion says, are left out;
    dropped_rows.jsonl of run.dir lists them. ValueError on what the settings cannot do with the data.
    """
    config, stages = configs[0], configs[0].stages
    places = [place_of(stages, number) for number in range(len(stages))] or [""]
    functions, data = config.reward.functions, [own.data for own in configs]
    max_tokens = [own.rollout.max_prompt_tokens for own in configs]
    sets = load_stages(data, max_tokens, tokenizer, functions, places)
    loaded = unite(sets)
    rows = [(prompt.kind, prompt.answer, prompt.fields) for prompt in loaded.everyone()]
    kinds = [source.kind for own in data for source in (*own.train, *own.eval) if source.kind]
    check_functions([*functions, *kinds], rows, config.reward)
    drop_impossible(loaded, pool, config, checkpoint)
    windows = [
        Window(own.zero_variance.offline_scores, own.zero_variance.offline_pass_rate, own.reward.binary)
        for own in configs
    ]
    offers, scores = offers_of(loaded, sets, windows, places)
    for stage, own in zip(stages, offers):
        loaded.notes.append(f"stage {stage.name}: {len(own.indices):,} training prompts")
    return loaded, scores, offers


def drop_impossible(loaded: LoadedSets, pool: RewardPool, config: Config, checkpoint: Path | None) -> None:
    """Leave out prompts whose reference answer is not right by its own verifier. Collective.

    Each rank asks its reward workers about a part of them. For training prompts a run that goes on where it
    was goes by the list of its first start; held-out sets may have changed.
    """
    file = Path(config.run.dir) / "dropped_rows.jsonl"
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if checkpoint:
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        leave_out(loaded, {(r["prompt_sha"], r.get("kind")): r["detail"] for r in rows if "prompt_sha" in r})
    held_out = [prompt for prompts, _ in loaded.eval_sets.values() for prompt in prompts]
    goes_on = checkpoint and config.checkpoint.resume == "auto"  # with weights alone prompts may be others
    mine = (held_out if goes_on else loaded.everyone())[rank::world_size]
    found = impossible_references(pool, [(p.kind, p.answer, p.fields) for p in mine])
    parts = [None] * world_size
    reasons = {(prompt_sha(mine[i]), mine[i].kind): reason for i, reason in found.items()}
    dist.all_gather_object(parts, reasons)
    leave_out(loaded, {name: reason for part in parts for name, reason in part.items()})
    if rank == 0:
        file.unlink(missing_ok=True)
        if loaded.dropped:
            file.write_text("".join(json.dumps(row) + "\n" for row in loaded.dropped))
            loaded.notes.append(f"the rows left out are listed in {file}")


def open_run_dir(config: Config) -> tuple[IO | None, Path | None, TrainState]:
    """Lock run.dir and prepare it for a new run or one that goes on from its newest checkpoint. Collective.

    Returns the lock (on rank 0), the folder of the checkpoint, and the counters to start from.
    """
    run_dir, rank = Path(config.run.dir), dist.get_rank()
    lock = lock_run_dir(run_dir) if rank == 0 else None
    dist.barrier()
    check_run_dir_is_shared(run_dir)
    checkpoint, record = find_checkpoint(config) or (None, None)
    state = state_of(record, config) if record else TrainState()
    if rank == 0 and not is_finished(config, checkpoint, state):
        prepare_run_dir(run_dir, config, record)
    return lock, checkpoint, state


def is_finished(config: Config, checkpoint: Path | None, state: TrainState) -> bool:
    """Tell whether run.dir holds a run that has ended and asks for no more steps."""
    has_summary = (Path(config.run.dir) / "summary.json").is_file()
    return checkpoint is not None and state.is_last(config) and has_summary


def connect_ranks(config: Config) -> tuple[Accelerator, Clock, Watchdog]:
    """Let the ranks find each other, watch them, and refuse what does not go together. Collective."""
    check_trackers(config)
    wait_for_ranks(config.run.warn_s, config.run.timeout_s)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), log_with=config.run.trackers, project_dir=config.run.dir,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=config.run.timeout_s + MARGIN_S))],
    )  # fmt: skip
    clock = Clock({})
    watchdog = Watchdog(clock, config.run.warn_s, config.run.timeout_s).start()
    moe_model.init_deepspeed()
    check_ranks_agree(config)
    set_seed(config.train.seed)
    return accelerator, clock, watchdog


def set_up(config: Config) -> Run | None:
    """Make all that a run needs, from the beginning or from its newest checkpoint. Collective.

    Returns None if the run in run.dir is finished; its summary has then been printed.
    """
    accelerator, clock, watchdog = connect_ranks(config)
    configs = stage_configs(config)
    for own in configs:
        check_ranks(own, dist.get_world_size())
    lock, checkpoint, state = open_run_dir(config)
    if is_finished(config, checkpoint, state):
        say(f"{checkpoint}: this run is finished; raise train.num_steps to go on, or choose another run.dir")
        if dist.get_rank() == 0:
            print_summary(Path(config.run.dir))
        return None

    clock.total = state.seconds
    watchdog.follow(state, Path(config.run.dir))

    # ---- prompts, reward workers ----
    model_dir = moe_model.model_folder(checkpoint / "model" if checkpoint else config.model.path)
    hf_config = moe_model.load_config(model_dir)
    ep_group = moe_model.create_expert_parallel_group(config.model.ep_size, num_experts_of(hf_config))
    for own in (largest := widest(configs), *configs):
        check_model(own, hf_config)
    check_memory(largest, hf_config, dist.get_world_size())
    tokenizer = load_tokenizer(model_dir)
    log = Path(config.run.dir) / f"reward_workers_{dist.get_rank()}.log"
    pool = start_pool(config.reward, tokenizer, log)
    loaded, offline_scores, offers = load_data(configs, tokenizer, pool, checkpoint)
    refuse_unknown_tokens(loaded, hf_config.vocab_size, model_dir)
    announce(configs, hf_config, loaded, model_dir, tokenizer, accelerator.device)

    # ---- engine, policy ----
    with clock("setup"):
        scalar = load_judge(config.reward) if config.reward.judge == "scalar" else None
        engine = start_engine(largest, hf_config, model_dir)  # it takes what a scalar judge leaves of a GPU
        judge = scalar or load_judge(config.reward)
        dist.barrier()
        policy = moe_model.build_policy(config.model, model_dir, ep_group, accelerator.device)
        refuse_nonfinite_weights(policy, f"model.path: {model_dir}", "take a model whose weights are finite")
        trainer = moe_model.deepspeed_engine(policy, config.train)
        moe_model.set_group_timeouts(config.run.timeout_s + MARGIN_S)
        reference = None
        if largest.algorithm.kl_coef > 0:
            reference = moe_model.build_policy(config.model, config.model.path, ep_group, accelerator.device)
        history = PromptHistory.from_offline(offline_scores, configs[0].rollout.group_size)
        if checkpoint:
            history = resume(checkpoint, trainer, history, loaded.train, config)
    start_trackers(accelerator, config, state.step)
    own, own_offers = configs[state.stage.number], offers[state.stage.number]
    rollouts = Rollouts(own, engine, pool, tokenizer, loaded.train, loaded.train_ids, clock, own_offers)
    return Run(
        config=own, given=config, configs=configs, offers=offers, lock=lock, accelerator=accelerator,
        clock=clock, watchdog=watchdog, state=state, history=history, eval_sets=loaded.eval_sets,
        trainer=trainer, reference=reference, judge=judge, progress=progress_bar(config, state),
        rollouts=rollouts, signals=listen(config), generation_config=read_generation_config(model_dir),
    )  # fmt: skip


def load_judge(settings: RewardSettings):
    """Load the judge, None without one. A generative one is a second engine, made after the first."""
    return build_judge(settings.judge, settings.judge_path, load_greedy_chat, margin=settings.judge_margin)


def start_engine(config: Config, hf_config, model_dir: Path) -> RolloutEngine:
    """Start vLLM in what policy, optimizer and update leave of a GPU, and say what it has room for."""
    parts = trainer_memory(config, hf_config, dist.get_world_size())
    beside = trainer_bytes(parts, engine_sleeps=config.rollout.sleep_level > 0)
    timeout_s = config.run.timeout_s + MARGIN_S
    engine = RolloutEngine(model_dir, max_model_len(config), config.rollout, beside, timeout_s)
    say(engine.describe())
    return engine


def trainer_memory(config: Config, hf_config, num_ranks: int) -> dict[str, int]:
    """Return the bytes of the trainer on a GPU, by part; a forward holds at least one row of full length.

    train.share_prompts saves nothing of the largest micro-batch, whose rows may have the shortest prompts.
    """
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    return moe_model.memory_by_part(
        hf_config, config.model, config.train.zero_stage, num_ranks,
        tokens=max(tokens_per_forward(config.train, on_gpu=True), longest),
        with_reference=config.algorithm.kl_coef > 0, own_experts=syncs_own_experts(config),
        offload_optimizer=config.train.offload_optimizer,
    )  # fmt: skip


def plan_memory(config: Config, hf_config, num_ranks: int, total: int) -> tuple[dict[str, int], str | None]:
    """Return the bytes of a GPU by part, trainer and engine, and what does not fit into `total` bytes."""
    parts, engine_sleeps = trainer_memory(config, hf_config, num_ranks), config.rollout.sleep_level > 0
    parts |= engine_memory(hf_config, config.rollout, trainer_bytes(parts, engine_sleeps), total)
    needed = max_model_len(config) * kv_bytes_per_token(hf_config, config.rollout)
    return parts, why_too_small(parts, engine_sleeps, total, needed)


def check_memory(config: Config, hf_config, num_ranks: int) -> None:
    """Refuse a run that cannot fit into the GPUs, before anything is loaded, in the words of the planner.

    ValueError; with rollout.kv_cache_gib, which goes without an estimate, a warning.
    """
    if not torch.cuda.is_available():
        return
    total = torch.cuda.mem_get_info()[1]
    _, reason = plan_memory(config, hf_config, num_ranks, total)
    if reason is None:
        return
    if config.rollout.kv_cache_gib is not None:
        return say(f"warning: by the planner's arithmetic this run does not fit: {reason}")
    raise ValueError(
        f"this run does not fit: {reason}; settings that fit are listed by python experiments/plan.py "
        f"--config FILE --gpus {num_ranks} --gpu-memory-gib {total / GIB:.1f}, and rollout.kv_cache_gib goes "
        "without this estimate"
    )


def progress_bar(config: Config, state: TrainState) -> tqdm:
    """Return the bar over the steps of the run; ranks other than 0 show none."""
    return tqdm(
        total=config.train.num_steps, initial=state.step, desc="train", unit="step",
        disable=None if dist.get_rank() == 0 else True, mininterval=0.5,
    )  # fmt: skip


def read_generation_config(model_dir: Path) -> str | None:
    """Return the text of generation_config.json; None if the folder has none."""
    file = model_dir / "generation_config.json"
    return file.read_text() if file.is_file() else None


def listen(config: Config) -> Signals:
    """Return what remembers signals, and have it handle them if the settings say so."""
    signals = Signals()
    if config.run.on_signal == "checkpoint":
        signals.listen()
    return signals


def announce(
    configs: list[Config], hf_config, loaded: LoadedSets, model_dir: Path, tokenizer, device: torch.device
) -> None:
    """Say what is odd about the settings of the stages, and what the run consists of."""
    config, warnings = configs[0], [warning for own in configs for warning in config_warnings(own)]
    for line in [*dict.fromkeys(f"warning: {warning}" for warning in warnings), *loaded.notes]:
        say(line)
    stop_ids, stop_texts = stops_of(model_dir, tokenizer, config.rollout.stop)
    tokens = [f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in stop_ids]
    say(f"a completion ends at {', '.join([*tokens, *map(repr, stop_texts)]) or 'its limit only'}")
    num_held_out = sum(len(prompts) for prompts, _ in loaded.eval_sets.values())
    kernel = moe_model.choose_logprob_kernel(config.model, hf_config, device)
    say(
        f"{len(loaded.train)} training prompts, {num_held_out} held out; {dist.get_world_size()} ranks, "
        f"expert parallel {config.model.ep_size}, ZeRO {config.train.zero_stage}, policy "
        f"{config.model.dtype}, log-probabilities {kernel}, engine {config.rollout.dtype}; "
        "starting vLLM and DeepSpeed"
    )


def check_trackers(config: Config) -> None:
    """Raise ValueError for a tracker that accelerate does not know or that is not installed."""
    available = [str(tracker) for tracker in get_available_trackers()]
    for name in config.run.trackers:
        if name not in available:
            raise ValueError(
                f"run.trackers: {name} is not installed here, or accelerate has no such tracker; there are "
                f"{', '.join(available)}"
            )


def start_trackers(accelerator: Accelerator, config: Config, step: int) -> None:
    """Start what run.trackers names; TensorBoard drops what it holds of steps after this one."""
    settings = {name: str(value) for name, value in flat_settings(config.model_dump(mode="json")).items()}
    started = []
    for name in config.run.trackers:  # one by one: TensorBoard takes the project's name for its folder
        accelerator.log_with = [name]
        if name == "tensorboard":
            accelerator.init_trackers(name, init_kwargs={name: {"purge_step": step + 1}})
        else:
            accelerator.init_trackers(Path(config.run.dir).name, config=settings)
        started += accelerator.trackers
    accelerator.trackers = started


def resume(
    checkpoint: Path, trainer, history: PromptHistory, prompts: list[Prompt], config: Config
) -> PromptHistory:
    """Load what a checkpoint holds besides the weights; return the record of the prompts.

    ValueError where a run would go on (checkpoint.resume=auto) with other training prompts.
    """
    saved = torch.load(checkpoint / "history.pt", map_location="cpu", weights_only=True)
    same_prompts = saved.pop("prompts") == digest_of(prompts)
    is_exact = config.checkpoint.resume == "auto"
    if is_exact and not same_prompts:
        raise ValueError(
            f"{checkpoint}: was trained on other prompts than the settings give now: a file of data.train, "
            "zero_variance.offline_scores or dropped_rows.jsonl of run.dir has changed. Put it back, or take "
            "the weights alone with checkpoint.resume=weights"
        )
    dropped = "" if same_prompts else "; the record of other prompts is dropped"
    fresh = "" if is_exact else "; the optimizer is fresh (checkpoint.resume=weights)"
    say(f"resumed from {checkpoint}{dropped}{fresh}")
    if is_exact:
        shard = checkpoint / f"rank_{dist.get_rank():05d}.pt"
        shard = torch.load(shard, map_location="cpu", weights_only=True)
        moe_model.load_optimizer_shard(trainer, shard["optimizer"])
        torch.set_rng_state(shard["torch_rng"])
    return PromptHistory(**saved) if same_prompts else history


def main(config: Config) -> None:
    """Train: one phase of a step after another, in the order of the data."""
    run = set_up(config)
    if run is None:
        return
    state = run.state
    sync_engine(run, check=True)
    while not state.is_last(config):
        evaluate_if_due(run)
        config = next_stage_if_due(run)  # settings of the stage
        run.clock.take_step()  # evaluations and checkpoints are no part of a step's seconds
        step_start = time.perf_counter()

        # Rollout: choose prompts, generate, score completions as they end; probe and refill in rounds
        sampled, outcomes, account = run.rollouts.sample_step(state, run.history)
        rollout_seconds = time.perf_counter() - step_start
        run.rollouts.engine.sleep()
        metrics = measure_rollout(run, sampled, rollout_seconds)

        # Eliminate zero variance, deal what is kept to ranks and minibatches
        with run.clock("deal"):
            groups, kept = drop_and_deal(sampled, outcomes, config)
        batch = collate(groups, run.rollouts.prompts, run.rollouts.prompt_ids)
        enter_outcomes(run, list(outcomes.values()))

        # Old and reference log-probabilities, where the update needs them
        if kept:
            with run.clock("logprobs"):
                add_old_outputs(run, batch)

        # Rewards: verifier, judge, penalties; advantages
        with run.clock("judge"):
            add_rewards(run, batch)
        advantages = token_advantages(batch, config)
        batch.advantages, batch.penalised = select_tokens(advantages, batch, config, state.step)

        # Update
        with run.clock("update"):
            set_learning_rate(run.trainer, learning_rate(config, state.step))
            metrics |= update_policy(run.trainer, batch, config, state.step)
            refuse_broken_policy(run)
        state.step += 1

        # Weight sync
        every = config.rollout.check_every
        report = sync_engine(run, check=every > 0 and state.step % every == 0)

        # Log, checkpoint
        metrics |= batch_metrics(batch, groups, config.rollout.group_size)
        metrics = reduce_step_metrics(metrics, prompt_account(account, outcomes, kept))
        state.add_step(metrics, run.rule)
        log_step(run, batch, metrics, report, step_start)
        save_if_due(run, metrics)
    evaluate_if_due(run)
    finish(run)


def syncs_own_experts(config: Config) -> bool:
    """Tell whether a rank's engine holds the experts that the rank trains, so that none are gathered."""
    return config.rollout.expert_parallel and config.rollout.tensor_parallel == config.model.ep_size


def sync_engine(run: Run, check: bool) -> SyncReport:
    """Give the engine the policy's weights. Collective.

    check: compare the weights that it holds, and log-probabilities at the next step.
    """
    engine, own_experts = run.rollouts.engine, syncs_own_experts(run.config)
    tensors = lambda: moe_model.hf_tensors(run.policy, own_experts)
    with run.clock("sync"):
        report = engine.sync(tensors(), run.state.step, tensors() if check else None)
    run.parity_is_due |= check
    return report


def evaluate_if_due(run: Run) -> None:
    """Evaluate the policy on the held-out sets, if it is time to, and log what was found. Collective."""
    if not run.eval_sets or not evaluation_is_due(run.state, run.config):
        return
    requests, prompts = evaluation_requests(run.eval_sets, run.config)
    completions, verdicts = run.rollouts.generate(requests, prompts, run.state.step, "eval")
    run.rollouts.pool.latencies = []  # those of training are reported
    metrics = evaluation_metrics(completions, verdicts, run.eval_sets, run.config)
    run.state.add_evaluation(metrics, run.rule)
    log_metrics(run.accelerator, run.config, run.state, metrics)


def next_stage_if_due(run: Run) -> Config:
    """Go on to the next stage if this one is over; return the settings of the stage from here on.

    The record of prompts, the optimizer and all counters go on. A stage with other prompts begins a stream of
    its own; one with the same prompts goes on with theirs.
    """
    state, position = run.state, run.state.stage
    reason = end_of_stage(position, run.rule)
    if reason is None:
        return run.config
    number = position.number + 1
    same = run.offers[number] == run.offers[position.number]
    first_prompt = position.first_prompt if same else state.consumed_prompts
    state.stage = StagePosition(number, first_prompt=first_prompt)
    run.config = run.rollouts.config = run.configs[number]
    run.rollouts.offers = run.offers[number]
    one, next_one = (place_of(run.given.stages, n) for n in (number - 1, number))
    say(f"step {state.step}: {one} ends ({reason}); {next_one} begins")
    return run.config


def measure_rollout(run: Run, sampled: list[Group], seconds: float) -> dict[str, tuple[float, float]]:
    """Return the metrics of a step's rollout as (sum, count); RuntimeError for bad verdicts or routes.

    sampled: this rank's groups; seconds: until the slowest rank had its last verdict.
    """
    config, pool = run.config, run.rollouts.pool
    num_experts = num_experts_of(run.policy.config)
    metrics = rollout_metrics(sampled, config.reward.binary, invalid_route(num_experts))
    metrics |= schedule_metrics(sampled, pool, run.clock.step["rollout"], seconds)
    verdicts = [v for group in sampled for v in group.verdicts]
    check_verdicts(verdicts, config.reward.max_failed_frac, f"step {run.state.step + 1}")
    check_routes(*metrics["invalid_routes_frac"], config.rollout.max_invalid_routes)
    return metrics | {"reward_worker_restarts_total": (pool.num_restarts, 1)}


def enter_outcomes(run: Run, outcomes: list[GroupOutcome]) -> None:
    """Enter what a step's groups came to into the record of the prompts."""
    zero, state = run.config.zero_variance, run.state
    run.history.update(outcomes, state.step, zero.history_decay)
    offered = state.consumed_prompts - state.stage.first_prompt
    if offered > run.rollouts.offers.epoch_length:  # GRESO: from the second epoch on, here of the stage
        run.history.adjust_exploration(outcomes, zero.target_solved, zero.target_unsolved)


def add_old_outputs(run: Run, batch: RolloutBatch) -> None:
    """Add what the policy and the reference say before the update, where it is needed. Collective.

    A parity check makes a pass of its own where the update needs none; what it finds is then dropped, because
    a check must not change an update.
    """
    if needs_old_pass(run.config) or run.parity_is_due:
        match run.config.algorithm.router_replay:
            case "r2":
                keep_routes = True
            case "off" | "r3":
                keep_routes = False  # nobody reads them
        outputs = forward_batch(run.policy, batch, run.config, keep_routes=keep_routes)
        if run.parity_is_due:
            check_parity(outputs.logprobs, batch, run.config, run.state.step)
            run.parity_is_due = False
        if needs_old_pass(run.config):
            batch.old_logprobs, batch.entropy, batch.old_routes, batch.route_mismatch = outputs
    if run.reference is not None and run.config.algorithm.kl_coef > 0:  # it keeps its own router
        batch.ref_logprobs = forward_batch(run.reference, batch, run.config, replay=False).logprobs


def add_rewards(run: Run, batch: RolloutBatch) -> None:
    """Add rewards [B] and which of them count, [B] bool. Collective."""
    decode = run.rollouts.tokenizer.batch_decode
    ids = batch.completion_ids if run.judge else []
    texts = decode(ids, skip_special_tokens=True) if ids else []  # an empty list would become one empty text
    rewards = compute_rewards(batch, run.judge, texts, run.config)
    valid = has_verdict(batch.verdicts)
    batch.rewards, batch.valid = refuse_nonfinite_rewards(rewards, valid, batch, run.config, run.state.step)
    if run.config.reward.judge_certainty > 0:
        scores, features = run.judge.head_inputs([prompt.text for prompt in batch.prompts], texts)
        batch.certainty = sign_weights(batch, scores, features, run.config)


def refuse_broken_policy(run: Run) -> None:
    """Stop the run if the update has left a weight that is NaN or infinite. Collective."""
    refuse_nonfinite_weights(
        run.policy,
        f"step {run.state.step + 1}: after the update",
        "nothing was saved of them, earlier checkpoints are whole; lower train.learning_rate "
        f"({run.config.train.learning_rate:g}), then start the same command again",
    )


def set_learning_rate(trainer, value: float) -> None:
    """Set the learning rate of the next update."""
    for parameter_group in trainer.optimizer.param_groups:
        parameter_group["lr"] = value


def reduce_step_metrics(
    metrics: dict[str, tuple[float, float]], account: dict[str, float]
) -> dict[str, float]:
    """Reduce a step's metrics over the ranks and add what follows from them. Collective."""
    reduced = reduce_metrics(metrics)
    derived = effective_sample_size(reduced) | straggler(reduced)  # these take their sums out of reduced
    return reduced | derived | account


def log_step(
    run: Run, batch: RolloutBatch, metrics: dict[str, float], report: SyncReport, step_start: float
) -> None:
    """Complete a finished step's metrics and write them to files, TensorBoard and console."""
    state, config = run.state, run.config
    metrics |= {
        "learning_rate": run.trainer.optimizer.param_groups[0]["lr"],
        "sync_bytes": report.num_bytes,
        "sync_tensors": report.num_tensors,
        "seconds_per_step": time.perf_counter() - step_start,
    }
    metrics |= run.clock.take_step()
    run.progress.set_postfix(score=f"{metrics['score']:.3f}", refresh=False)
    run.progress.update()
    is_shown = state.step % config.run.log_every == 0
    if is_shown:
        say(console_line(state, metrics))
    with run.clock("log"):
        log_metrics(run.accelerator, config, state, metrics)
        if is_shown and dist.get_rank() == 0:
            log_samples(config, state, batch, run.rollouts.tokenizer)


def save_if_due(run: Run, metrics: dict[str, float]) -> None:
    """Write a checkpoint if it is time to or a signal came; the run ends at the latter. Collective.

    RuntimeError if trainer and engine drift apart, Stopped after a signal.
    """
    state, every = run.state, run.config.checkpoint.every
    too_far = mismatch_gate(metrics, state, run.config)
    signal_number = int(reduce_metrics({"signal_max": (run.signals.received, 1)})["signal_max"])
    is_due = state.is_last(run.config) or bool(every and state.step % every == 0)
    if is_due or too_far or signal_number:
        with run.clock("checkpoint"):
            save_checkpoint(run.given, asdict(state), lambda folder: write_rank(run, folder))
    if too_far:
        raise RuntimeError(too_far)
    if signal_number and not state.is_last(run.config):
        name = signal.Signals(signal_number).name
        where = f"{run.config.run.dir}/checkpoints/step_{state.step:06d}"
        raise Stopped(
            f"stopped by {name} after step {state.step}: the same command goes on from {where}", signal_number
        )


def write_rank(run: Run, folder: Path) -> None:
    """Write this rank's files of a checkpoint, which resume() and load_hf() read. No collective calls."""
    rank = dist.get_rank()
    write_model(run, folder / "model")
    shard = {"optimizer": moe_model.optimizer_shard(run.trainer), "torch_rng": torch.get_rng_state()}
    torch.save(shard, folder / f"rank_{rank:05d}.pt")
    if rank == 0:
        torch.save(vars(run.history) | {"prompts": digest_of(run.rollouts.prompts)}, folder / "history.pt")


def write_model(run: Run, folder: Path) -> None:
    """Write this rank's part of a folder that transformers and vLLM load. No collective calls."""
    moe_model.save_hf(run.policy, folder)
    if dist.get_rank() == 0:
        run.rollouts.tokenizer.save_pretrained(folder)
        if run.generation_config is not None:
            (folder / "generation_config.json").write_text(run.generation_config)


def finish(run: Run) -> None:
    """Export the policy, write and print the summary. Collective."""
    run.progress.close()
    run.rollouts.pool.close()
    run_dir = Path(run.config.run.dir)
    with writing(run_dir / "model"):
        write_model(run, run_dir / "model")
    peak_rss = {"bytes_total": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 1)}
    peak_rss_bytes = int(reduce_metrics(peak_rss)["bytes_total"])
    if dist.get_rank() == 0:
        with writing(run_dir / "summary.json"):
            write_summary(run_dir, run.state, peak_rss_bytes)
            plot_curves(run_dir)
        print_summary(run_dir)
    dist.barrier()
    run.watchdog.stop()
    run.accelerator.end_training()


if __name__ == "__main__":
    read = lambda argv: load_config(argv, __doc__)
    leave(run(main, read, sys.argv[1:], lambda config: Path(config.run.dir)))
