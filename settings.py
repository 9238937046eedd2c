"""Every setting of a run, with its default and its meaning.

    torchrun --nproc-per-node=2 train_rl.py --config exp.yaml algorithm.clip_eps_high=0.28
    python train_rl.py --help algorithm        # the texts below, for one section

A section is a frozen pydantic model: `algorithm.clip_eps_high` is the field clip_eps_high of
AlgorithmSettings. configure.py reads the command line and checks settings against each other. With every
setting at its default a run is plain GRPO.
"""

import datetime
import math
import os
import re
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from data.formats import stem_of
from extras.settings import CarrySettings, CenteringSettings, DraftsSettings, LoraSettings, TeacherSettings
from runtime.config import Section, Switch, setting
from verifiers.kinds import KINDS, functions_of, parts_of

# Ranges of numbers
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
FractionBelow1 = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(gt=0, le=86400)]  # of up to a day
SecondsUpToWeeks = Annotated[float, Field(gt=0, le=2e6)]  # of up to three weeks
Count = Annotated[int, Field(ge=1)]
CountOr0 = Annotated[int, Field(ge=0)]
CountOrNull = Annotated[int | None, Field(ge=1)]
TextOrNull = Annotated[str | None, Field(min_length=1)]


# ============================================================================================================
# The method
# ============================================================================================================
MAX_ENTROPY_GROUPS = 16  # the paper uses 2
HOOKS = ("gain", "advantage", "select")  # settings of section algorithm that name plug-ins


class ZeroVarianceSettings(Section):
    """Multi-stage zero-variance elimination (arXiv 2512.07710), stage by stage."""

    per_stage: ClassVar[bool] = True

    offline_scores: str | None = setting(
        None, "stage 1: file of pass rates written by data/score.py, for example scores.jsonl; null: off"
    )
    offline_pass_rate: tuple[float, float] = setting(
        (0.0, 0.9), "stage 1: keep the prompts whose offline pass rate lies in this closed range"
    )
    history: bool = setting(
        False, "stage 1b: skip prompts whose record predicts a group without variance, see skip_rule"
    )
    history_decay: Fraction = setting(
        0.1,
        "factor of a prompt's earlier counts at each new visit; 0: only the last visit counts; 1: all count "
        "alike",
    )
    prior: Positive = setting(
        0.2,
        "pseudo-counts of right and of wrong verdicts added to a record (Beta prior); below 0.5, most "
        "prompts are assumed to be nearly always or nearly never solved",
    )
    explore_solved: Fraction = setting(
        0.1, "approximate lower bound of the probability that a prompt with only right verdicts is sampled"
    )
    explore_unsolved: Fraction = setting(
        0.1, "approximate lower bound of the probability that a prompt with only wrong verdicts is sampled"
    )
    retest_steps: CountOr0 = setting(
        200,
        "expire a prompt's record after this many steps, so that the prompt is sampled again; 0: records "
        "never expire",
    )
    skip_rule: Literal["expected", "consecutive"] = setting(
        "expected",
        "rule by which history skips a prompt. expected: by the probability that the next group has zero "
        "variance. consecutive: by the number of consecutive visits with zero variance (GRESO).",
    )
    target_solved: Fraction = setting(
        1 / 12,
        "GRESO: explore solved prompts less after a step with at least this fraction of all-right groups, "
        "else more",
    )
    target_unsolved: Fraction = setting(
        1 / 6,
        "GRESO: explore unsolved prompts less after a step with at least this fraction of all-wrong groups, "
        "else more",
    )
    probe_size: CountOr0 = setting(
        0, "stage 1c: completions of each group that are sampled first, for example 4 of 8; 0: no probe"
    )
    probe_stop_prob: Positive = setting(
        0.9, "stage 1c: stop a group after its probe if zero variance is at least this probable"
    )
    rl_zvp: bool = setting(False, "stage 3: give groups without variance RL-ZVP advantages")
    rl_zvp_coef: Positive = setting(
        0.1, "stage 3: alpha of RL-ZVP, the factor of the tokens' entropies in the advantages"
    )
    drop: bool = setting(False, "comparison: leave groups without variance out of the update (DAPO's filter)")
    part: str | None = setting(
        None,
        "drop: the kind of a weighted mean whose scores decide whether a group has variance, for example "
        "math, so that groups which differ in format only are dropped; null: the whole score",
    )
    refill: bool = setting(
        False, "for comparison: sample new prompts in place of dropped groups (DAPO's dynamic sampling)"
    )
    round_size: Literal["missing", "adaptive"] = setting(
        "missing",
        "number of prompts in a round of refill. missing: one per missing group. adaptive: more, in "
        "proportion to the last round's zero-variance fraction; surplus groups are dropped (GRESO).",
    )
    max_rounds: Count = setting(
        4,
        "most sampling rounds of a step, also those that only complete probed groups; then one more may "
        "complete such groups, and the batch may stay short",
    )


LossAgg = Literal["sequence_mean", "token_mean", "token_group_mean", "sequence_sum", "fixed_length"]
OldPolicy = Literal["trainer", "rollout"]
Correction = Literal[
    "none", "token_tis", "sequence_tis", "token_mask", "sequence_mask", "geometric_mask"
]  # fmt: skip
Replay = Literal["off", "r2", "r3"]
JudgeMode = Literal["score", "pairwise_reference", "round_robin"]
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def numbers_of(arguments):
    """Turn texts that spell a number, such as 1e-3 in YAML, into numbers; keep other values."""
    if not isinstance(arguments, dict):
        return arguments
    return {
        name: float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value
        for name, value in arguments.items()
    }


PluginArgs = Annotated[dict[str, bool | int | float | str | list[float]], BeforeValidator(numbers_of)]


class AlgorithmSettings(Section):
    """The policy-gradient loss: ratio, clip, weights, advantages, corrections, and hooks for your own."""

    per_stage: ClassVar[bool] = True

    ratio_level: Literal["token", "sequence", "entropy_group"] = setting(
        "token",
        "tokens that share an importance ratio. token: every token has a ratio of its own. sequence: all "
        "tokens of a completion (GSPO). entropy_group: the tokens of one entropy group (ESPO).",
    )
    ratio_form: Literal["geometric", "stop_gradient", "literal"] = setting(
        "geometric",
        "gradient of a shared ratio. geometric: through the mean over the tokens (GSPO). stop_gradient: each "
        "token gets only the gradient of its own log-probability (GSPO-token). literal: ESPO eq. 9 as "
        "printed.",
    )
    entropy_groups: tuple[float, ...] = setting(
        (0.2, 0.8),
        "fraction of a completion's tokens in each entropy group, most uncertain group first, for example "
        "[0.2, 0.8]; must sum to 1",
        max_length=MAX_ENTROPY_GROUPS,
    )
    clip_mode: Literal["fixed", "entropy_adaptive", "weight", "before_mean", "none"] = setting(
        "fixed",
        "clip of the ratio. fixed: the interval [1 - clip_eps_low, 1 + clip_eps_high] (PPO, DAPO). "
        "entropy_adaptive: an interval that is wider for uncertain tokens (ESPO eq. 8). weight: the clipped "
        "ratio is a constant factor of log pi (CISPO). before_mean: clip each token's ratio, then average "
        "(GMPO). none: no clip.",
        hint="SAPO, DPPO, VESPO and your own are plug-ins: algorithm.gain, docs/plugins.md",
    )
    clip_eps_low: PositiveFraction = setting(0.2, "clip ratios below 1 - clip_eps_low")
    clip_eps_high: Positive = setting(0.2, "clip ratios above 1 + clip_eps_high")
    clip_cap: float | None = setting(
        None, "upper bound on the ratio for tokens with A < 0 (dual clip); null: no bound", gt=1
    )
    entropy_clip_coef: Positive = setting(0.02, "alpha of ESPO's entropy-adaptive clip")
    entropy_clip_form: Literal["token_group_mean", "over_token_groups", "over_tokens"] = setting(
        "token_group_mean",
        "reading of ESPO eq. 8. token_group_mean: the mean entropy of the token group. over_token_groups: "
        "the token's entropy divided by the number of groups of the completion. over_tokens: the token's "
        "entropy divided by the number of tokens of the group.",
    )
    loss_agg: LossAgg = setting(
        "sequence_mean",
        "weight of a token in the loss. sequence_mean: mean over the tokens of a completion, then over "
        "completions. token_mean: mean over all tokens. token_group_mean: mean over token groups, then over "
        "completions. sequence_sum: sum over the tokens, mean over completions (LUSPO). fixed_length: sum "
        "over the tokens divided by max_new_tokens (Dr.GRPO).",
    )  # fmt: skip
    leave_out_cut: bool = setting(False, "completions cut at max_new_tokens have no policy loss (DAPO)")
    adv_norm: Literal["group_std", "mean_only"] = setting(
        "group_std",
        "group_std: divide centred rewards by the standard deviation of the group. mean_only: only subtract "
        "the mean of the group (Dr.GRPO).",
        hint="MaxRL, RLOO, GDPO, batch_std and your own are plug-ins: algorithm.advantage, docs/plugins.md",
    )
    tie_band: NonNegative = setting(
        0.0, "treat rewards that are this close to the group's mean as ties with advantage 0; 0: off"
    )
    correctness_guard: bool = setting(
        False,
        "set an advantage to 0 if its sign contradicts the verifier: positive although the score is below "
        "the mean of the group, or negative although it is above. In a group of equal scores: positive with "
        "score 0, or negative with score 1. Advantages of an extra are exempt.",
    )
    rollout_correction: Correction = setting(
        "none",
        "importance weight pi_trainer / pi_engine. none: 1. token_tis: truncated per token. sequence_tis: "
        "product over the completion, truncated. token_mask, sequence_mask: the weight is 0 outside of "
        "[floor, cap]. geometric_mask: 0 if the completion's geometric mean lies outside, else 1.",
    )  # fmt: skip
    rollout_correction_cap: Positive = setting(
        2.0, "upper bound of the importance weight: tis truncates to it, a mask excludes above it"
    )
    rollout_correction_floor: NonNegative = setting(
        0.0, "lower bound of the importance weight, used like the upper one; 0: no bound"
    )
    old_policy: OldPolicy = setting(
        "trainer",
        "denominator of the ratio. trainer: the trainer's policy before the updates of the step. rollout: "
        "the engine's log-probabilities, which saves a forward pass (bypass).",
    )
    router_replay: Switch[Replay] = setting(
        "off",
        "experts that the trainer's forward pass uses. off: the live router's choice. r2: replay the routes "
        "recorded in the old-logprob pass (that pass uses the live router). r3: replay the engine's routes.",
    )
    mismatch_gate: NonNegative = setting(
        0.015,
        "warn if the k3 KL between trainer and engine exceeds this threshold, in nats; 0: no gate",
        on_resume="free",
    )
    mismatch_patience: CountOr0 = setting(
        10,
        "stop the run after this many consecutive steps above mismatch_gate or skew_gate; 0: never stop",
        on_resume="free",
    )
    skew_gate: NonNegative = setting(
        0.0,
        "warn if the absolute value of the metric skew_positive or skew_negative exceeds this threshold, for "
        "example 0.01; 0: no gate",
        on_resume="free",
    )
    kl_coef: NonNegative = setting(
        0.0,
        "beta of the KL penalty (k3) to the initial policy; 0: no reference model is loaded",
        per_stage="largest",
    )
    gain: str | None = setting(
        None,
        "path/file.py:function that computes the gain of each token in place of clip_mode, for example "
        "plugins/sapo.py:sapo; a path in a YAML is relative to that YAML; null: clip_mode",
        is_path=True,
    )
    gain_args: PluginArgs = setting({}, "keyword arguments of the gain function, for example {tau: 1.0}")
    advantage: str | None = setting(
        None,
        "path/file.py:function that computes advantages in place of adv_norm and tie_band, for example "
        "plugins/rloo.py:rloo; null: adv_norm",
        is_path=True,
    )
    advantage_args: PluginArgs = setting(
        {}, "keyword arguments of the advantage function, for example {share: 0.9}"
    )
    select: str | None = setting(
        None,
        "path/file.py:function that changes token advantages before an update, for example "
        "plugins/top_entropy.py:top_entropy; null: all tokens keep their advantages",
        is_path=True,
    )
    select_args: PluginArgs = setting({}, "arguments of the select function, for example {fraction: 0.2}")


MICRO_BATCH_SIZES = (4096, 2048, 1024, 512)  # on CPUs; larger micro-batches are slower there


class TrainSettings(Section):
    """Length of a run, optimizer, and the composition of an update."""

    num_steps: Count = setting(200, "number of steps, each a rollout and its updates", on_resume="free")
    max_generated_tokens: CountOrNull = setting(
        None,
        "stop after this many tokens over all ranks: generated tokens, plus tokens that an extra charges "
        "(teacher.token_cost); null: no limit",
        on_resume="free",
    )
    minibatches_per_step: Count = setting(
        1,
        "split each rollout into this many minibatches of whole groups, with one update each; above 1, later "
        "updates are off-policy",
        per_stage=True,
    )
    micro_batch_tokens: CountOrNull = setting(
        None,
        "padded tokens per forward pass and rank, for example 1024; a longer row has a forward pass of its "
        "own. null: 32768 on GPUs; on CPUs the largest of 4096, 2048, 1024 and 512 that fits into memory, "
        "chosen at the first launch and kept on resume",
        on_resume="free",
        per_stage=True,
    )
    balance: bool = setting(
        True,
        "true: give every rank and micro-batch about the same number of tokens. false: the same number of "
        "rows, in their order.",
        on_resume="free",
        per_stage=True,
    )
    skip_zero_gradient: bool = setting(
        True,
        "true: completions whose advantages are all 0 skip the forward and backward passes of updates. "
        "false: compute them, with the same result.",
        on_resume="free",
        per_stage=True,
    )
    share_prompts: bool = setting(
        True,
        "true: the completions of a micro-batch that have the same prompt share one pass over the prompt. "
        "false: every completion repeats its prompt.",
        on_resume="free",
        per_stage=True,
    )
    passes_per_rollout: Count = setting(
        1, "epochs: passes over a step's completions, each with minibatches_per_step updates", per_stage=True
    )
    learning_rate: Positive = setting(1e-6, "AdamW's highest learning rate", on_resume="free", per_stage=True)
    lr_schedule: Literal[
        "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr",
        "polynomial", "inverse_sqrt",
    ] = setting(
        "constant_with_warmup",
        "learning rate schedule, by the name in transformers; decaying schedules decay over num_steps",
        on_resume="free",
    )  # fmt: skip
    lr_schedule_args: dict[str, float] = setting(
        {},
        "arguments of the schedule for transformers' get_scheduler(), for example {min_lr_rate: 0.1} or "
        "{num_cycles: 2}",
        on_resume="free",
    )
    warmup_steps: CountOr0 = setting(0, "steps of linear warm-up", on_resume="free")
    betas: tuple[FractionBelow1, FractionBelow1] = setting(
        (0.9, 0.95), "decay rates of AdamW's two moving averages"
    )
    weight_decay: NonNegative = setting(0.0, "weight decay of AdamW", on_resume="free")
    max_grad_norm: Positive = setting(1.0, "clip gradients to this global norm")
    fused_adamw: bool | None = setting(
        None,
        "true: one kernel computes a step of AdamW, several times faster and without temporary copies of the "
        "weights. false: one pass over memory per operation, which rounds differently. null: true on GPUs, "
        "false on CPUs, as in the published tables.",
    )
    zero_stage: Literal[1, 2] = setting(
        1, "ZeRO stage of DeepSpeed. 1: shard optimizer states. 2: shard gradients as well."
    )
    offload_optimizer: bool = setting(
        False,
        "true: keep float32 weights and optimizer states in host memory and run the optimizer step there; "
        "saves GPU memory on few GPUs, needs zero_stage 2. false: keep them on the GPU.",
        on_resume="free",
    )
    grad_reduce_dtype: Literal["model", "float32"] = setting(
        "model",
        "precision in which gradients are averaged over ranks. model: that of the policy, so bfloat16 rounds "
        "each sum. float32: no such rounding, for twice the traffic and, with zero_stage 2, up to 2 GB for a "
        "copy of a bucket of gradients.",
    )
    seed: int = setting(0, "seed of the prompt order and of sampling", ge=0, lt=2**32)

    @property
    def num_updates(self) -> int:
        """Return the number of updates of a step: minibatches times passes."""
        return self.minibatches_per_step * self.passes_per_rollout

    def tokens_per_forward(self, on_gpu: bool) -> int:
        """Return the padded tokens of a micro-batch: micro_batch_tokens, or the largest default."""
        return self.micro_batch_tokens or (32768 if on_gpu else MICRO_BATCH_SIZES[0])


class EvalSettings(Section):
    """When and how held-out sets are evaluated."""

    per_stage: ClassVar[bool] = True
    free_on_resume: ClassVar[bool] = True

    every: CountOr0 = setting(
        50, "evaluate every N steps, and always at the first and last step; 0: only at the first and last"
    )
    num_samples: CountOr0 = setting(8, "k samples per prompt for avg@k and pass@k; 0: greedy only")
    max_new_tokens: CountOrNull = setting(
        None,
        "cut an evaluation's completions at this length; null: rollout.max_new_tokens",
        per_stage="largest",
    )
    num_texts: Annotated[int, Field(ge=0, le=10**6)] = setting(
        16,
        "keep the greedy completions of the first N prompts of each set at every evaluation, with reference "
        "and verdict, in eval_samples.jsonl; 0: none",
    )


# ============================================================================================================
# The policy and the engine
# ============================================================================================================
class ModelSettings(Section):
    """The policy and how it is computed."""

    path: str = setting(
        "data/built/tiny/model",
        "folder of a Hugging Face checkpoint, or name of a model on the hub, for example Qwen/Qwen3-0.6B: "
        "Llama, Qwen2, Qwen3, or a MoE of Qwen3, OLMoE, Mixtral, GLM-4.5 or Granite 3",
    )
    ep_size: Count = setting(1, "expert parallelism: number of ranks that share one copy of the experts")
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "precision of the policy; the optimizer keeps float32 weights. auto: bfloat16 on GPUs and on CPUs "
        "that multiply bfloat16 at least 1.5 times as fast, else float32; chosen at the first launch, and a "
        "resume keeps it.",
    )
    freeze_router: bool = setting(
        False, "true: the routers of a MoE keep their initial weights. false: routers are trained."
    )
    activation_checkpointing: bool = setting(
        False, "recompute layers in the backward pass to save memory", on_resume="free"
    )
    logprob_kernel: Literal["auto", "naive", "chunked", "triton"] = setting(
        "auto",
        "computation of log-probabilities and entropies. naive: from the full logits. chunked: over blocks "
        "of the vocabulary, in torch. triton: by kernels (NVIDIA GPUs). auto: triton if available, else "
        "chunked.",
        on_resume="free",
    )
    expert_kernel: Literal["auto", "torch", "triton"] = setting(
        "auto",
        "computation of the rows of a MoE between the products of its experts. torch: in torch. triton: by "
        "kernels (NVIDIA GPUs), compared with torch at the start. auto: torch.",
        on_resume="free",
    )


def without_empty_text(stops: list[int | str]) -> list[int | str]:
    """Return the entries of rollout.stop; ValueError for an empty text, which every completion contains."""
    if "" in stops:
        raise ValueError("an empty text would end every completion at once, leave it out")
    for text in (stop for stop in stops if isinstance(stop, str)):
        without_written_escapes(text)
    return stops


class RolloutSettings(Section):
    """Sampling: how much, in which order, and by which engine."""

    prompts_per_step: int = setting(128, "prompts per step, over all ranks", per_stage=True, ge=1, le=2**20)
    group_size: int = setting(8, "G: completions per prompt", per_stage=True, ge=1, le=2**16)
    temperature: float = setting(
        1.0, "temperature of sampling and of the trainer's log-probabilities", per_stage=True, ge=0.01, le=2
    )
    max_prompt_tokens: Count = setting(
        1024, "longest prompt; data.on_bad_row decides on longer ones", per_stage="largest"
    )
    max_new_tokens: Count = setting(
        16384,
        "cut completions at this many tokens; all turns of an episode share them, tool results included",
        per_stage="largest",
    )
    lag: Annotated[int, Field(ge=0, le=64)] = setting(
        0,
        "train on the completions of N steps ago: the delay of asynchronous training, without its speed; 0: "
        "on those of the same step",
    )
    max_turns: int = setting(
        8, "end an episode after this many turns of the policy (data.tools, data.environment)", ge=1, le=1000
    )
    tool_timeout_s: Seconds = setting(
        10.0,
        "seconds for a tool call or a step of an environment; afterwards the policy reads an error (tool), "
        "or the episode ends with the verdict timeout (environment)",
    )
    tool_workers: Count = setting(
        4,
        "processes per rank for tools, and as many again for environments; each runs at most 64 async calls",
        on_resume="free",
    )
    max_tool_chars: Annotated[int, Field(ge=1, le=50_000)] = setting(
        2000, "cut the result of a call, or the message of an environment, at this many characters"
    )
    stop: Annotated[list[int | str], AfterValidator(without_empty_text)] = setting(
        [],
        "token ids and texts that end a completion, in addition to the model's end-of-sequence tokens, for "
        'example ["</answer>"]',
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "precision of the engine's weights and activations. auto: bfloat16 on GPUs, for fp8 on, and on CPUs "
        "that multiply few rows at least 1.5 times as fast in bfloat16, else float32; chosen at the first "
        "launch, and a resume keeps it.",
    )
    max_num_seqs: int | None = setting(
        None,
        "completions that an engine generates at once; null: 256 for each rank of the engine "
        "(tensor_parallel), at most 1024",
        on_resume="free",
        ge=1,
        le=4096,  # the smallest limit of vLLM's tokens per step, on CPUs (engine/arg_utils.py)
    )
    schedule: Literal["arrival", "longest_first"] = setting(
        "longest_first",
        "order of prompts across and within engines. arrival: the order of the data. longest_first: "
        "longest expected completions first.",
        on_resume="free",
        per_stage=True,
    )
    count_reward_time: bool = setting(
        True,
        "longest_first: count the seconds of slow verifiers as additional tokens",
        on_resume="free",
        per_stage=True,
    )
    kv_cache_gib: float | None = setting(
        None,
        "size of the KV cache per rank, in GiB, at least one completion of full length; null: on a GPU the "
        "memory that trainer and weights leave free, on a CPU at most 1 GiB",
        on_resume="free",
        gt=0,
        le=2**16,
    )
    prefix_caching: bool = setting(True, "share the prompt's KV cache within a group", on_resume="free")
    sleep_level: Literal[0, 2] | None = setting(
        None,
        "GPU memory that the engine frees during updates. 0: none. 2: weights and KV cache, which the next "
        "sync restores. null: 2 in a training run on GPUs, else 0.",
        on_resume="free",
        hint="vLLM's level 1 keeps weights that the next sync overwrites; 2 frees as much",
    )
    enforce_eager: bool = setting(
        False, "disable CUDA graphs and compilation on GPUs, for example to debug an error", on_resume="free"
    )
    fp8: Switch[Literal["off", "simulate", "on"]] = setting(
        "off",
        "block-wise FP8 rollouts. off: none. on: vLLM quantises weights and activations (Hopper GPUs). "
        "simulate: round weights to simulate_format at each sync and compute in dtype (any device).",
    )
    simulate_format: Literal["fp8", "mxfp4"] = setting(
        "fp8",
        "number format of fp8 simulate. fp8: E4M3 in blocks, as in vLLM. mxfp4: 4 bits (E2M1) with a power "
        "of two as the scale of 32 values.",
    )
    tensor_parallel: Count = setting(1, "consecutive ranks that share an engine, for models beyond one GPU")
    expert_parallel: bool = setting(
        False, "the ranks of an engine hold whole experts instead of slices of every expert (GPUs)"
    )
    kv_cache_fp8: bool = setting(False, "store the KV cache in FP8 with scale 1 (GPUs)")
    capture_routes: Switch[Literal["auto", "on", "off"]] = setting(
        "auto",
        "return the experts of each token from the engine. auto: for router_replay r3, else at steps 0, N, "
        "2N, ... of check_every N. on: at every step. off: never.",
    )
    max_invalid_routes: NonNegative = setting(
        0.01, "stop the run if a larger fraction of the captured routes is invalid", on_resume="free"
    )
    check_every: CountOr0 = setting(
        50,
        "check the engine's weights and parity at the first sync and every N steps; 0: at the first sync "
        "only",
        on_resume="free",
        per_stage=True,
    )
    parity_mean: Positive = setting(
        0.1,
        "stop the run if a parity check finds a mean difference between the log-probabilities of trainer and "
        "engine above this, in nats",
        on_resume="free",
        per_stage=True,
    )
    parity_p99: Positive = setting(
        1e-3,
        "the same for the 99th percentile, in nats; checked only if policy and engine are float32",
        on_resume="free",
        per_stage=True,
    )

    @property
    def sequences_at_once(self) -> int:
        """Return the number of completions that an engine generates at once.

        The default of max_num_seqs grows with the GPUs of an engine, whose KV caches hold more completions
        together. 1,024 is vLLM's own default on an H100 (engine/arg_utils.py: default_max_num_seqs).
        """
        return self.max_num_seqs or min(256 * self.tensor_parallel, 1024)


# ============================================================================================================
# Data and rewards
# ============================================================================================================
LATEX_WORDS = set(  # LaTeX commands that begin with \n or \t, which a template may contain
    "nabla ne neq newline newpage ngeq ni nleq nmid noindent not notin nsubseteq nu tag tan tanh tau tbinom "
    "text textbf textit textrm texttt tfrac therefore theta thickapprox tilde times to top triangle".split()
)


def kind_of_mapping(value):
    """Write a mapping {kind: weight} as the kind "0.8*math + 0.2*my.py:brevity"; keep other values."""
    if not isinstance(value, dict):
        return value
    for kind, weight in value.items():
        if not isinstance(kind, str) or type(weight) not in (int, float) or not 0 <= weight < math.inf:
            raise ValueError(
                f"each kind needs a weight of 0 (only logged) or more, as in {{math: 0.8, exact: 0.2}}; "
                f"not {kind}: {weight}"
            )
    # in full and without an exponent: 2.0 as 2, 1e-7 as 0.0000001
    terms = [f"{Decimal(str(weight)).normalize():f}*{kind}" for kind, weight in value.items()]
    return " + ".join(terms) or None


def with_known_kinds(kind: str | None) -> str | None:
    """Return the kind; ValueError if reward.verify() does not know the kind or a term of the sum."""
    if kind is not None:
        parts_of(kind)
    return kind


def without_written_escapes(text: str | None) -> str | None:
    """Return a text; ValueError if it contains a line break or tab written as backslash and letter."""
    for command in re.findall(r"\\([nt][a-z]*)", text or ""):
        if command not in LATEX_WORDS:
            raise ValueError(
                f"contains a backslash followed by {command!r} instead of a line break or a tab: write the "
                'text in double quotes in YAML ("{prompt}\\n"), or as a block after |'
            )
    return text


def with_place_of_prompt(template: str) -> str:
    """Return the template; ValueError if it lacks the placeholder {prompt}."""
    if "{prompt}" not in template:
        raise ValueError(f"template {template!r} does not contain {{prompt}}, the place of the prompt")
    if doubled := re.search(r"{{prompt}}|\w{{}}", template):
        raise ValueError(f"template {template!r}: braces are single here, {doubled[0]} would stay doubled")
    return template


Text = Annotated[str, AfterValidator(without_written_escapes)]


class PromptSource(Section):
    """One prompt set of a run."""

    path: str = setting(
        ...,
        ".jsonl, .json, .csv or .parquet file (also .gz), a glob pattern or a folder of such files, a "
        "save_to_disk folder, or the name of a dataset on the hub",
    )
    name: str | None = setting(None, "name in logs and metrics; null: the file name")
    subset: str | None = setting(None, "configuration of a hub dataset, for example main; null: its default")
    split: str = setting(
        "train",
        "split of a hub dataset or a saved dataset. In a folder, read the files with the split as a word in "
        "their names; if no name has it, train reads all files of one split.",
    )
    kind: Annotated[str | None, BeforeValidator(kind_of_mapping), AfterValidator(with_known_kinds)] = setting(
        None,
        "verifier of rows without a kind of their own. null: gsm8k if the answer contains #### or "
        f"data_source is openai/gsm8k, else math. One of {', '.join(KINDS)}, environment (the rewards of "
        "data.environment), a function (module:name or path/file.py:name), or a weighted mean, for example "
        "{math: 0.8, my.py:brevity: 0.2}; weight 0: only logged. A column named kind takes precedence; "
        "columns {kind: null} ignores that column",
    )
    columns: dict[str, str | None] = setting(
        {},
        "columns of prompt, answer, difficulty and kind, if their names differ, for example {prompt: "
        "question, answer: info.gold}; a.b is field b inside of a. null: the set has no such column (answer: "
        "for functions that need no reference)",
    )
    template: Annotated[Text, AfterValidator(with_place_of_prompt)] = setting(
        "{prompt}",
        "text around each prompt, or around the last user message of a chat, for example {prompt} Think "
        "step by step.",
    )
    distinct: bool = setting(
        False, "drop rows that repeat question and answer of an earlier row of this set, before the limit"
    )
    limit: CountOrNull = setting(None, "use the first N rows, counted after the difficulty range; null: all")
    difficulty: tuple[float, float] | None = setting(
        None, "keep rows whose difficulty lies in this closed range, for example [2, 4]; null: all"
    )
    weight: Positive = setting(
        1.0, "how often a prompt of this training set is offered; 2: twice as often as a prompt of weight 1"
    )
    holdout: NonNegative = setting(
        0,
        "rows split off this training set as an evaluation set with the same name: a fraction below 1 or a "
        "number of rows, for example 0.05 or 20; 0: none",
    )

    @property
    def label(self) -> str:
        """Return the name of the set in the metrics."""
        return self.name or stem_of(self.path)

    @property
    def place(self) -> str:
        """Return the path, preceded by the name if there is one, for messages."""
        return f"{self.name} ({self.path})" if self.name else self.path


def list_of_sets(value):
    """Turn a path or a mapping into a list with one set, and a path in a list into {path: ...}."""
    value = [value] if isinstance(value, (str, dict)) else value
    if not isinstance(value, list):
        return value
    return [{"path": entry} if isinstance(entry, str) else entry for entry in value]


PromptSources = Annotated[list[PromptSource], BeforeValidator(list_of_sets)]


def iso_date(value: object) -> str:
    """Return a date of YAML or a text as YYYY-MM-DD; ValueError for anything else."""
    try:
        return datetime.date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError(f"{str(value)[:40]!r} is no date such as 2026-11-28") from None


class DataSettings(Section):
    """Training sets, held-out sets, and how rows become prompts."""

    train: PromptSources = setting(
        [],
        "prompt sets to train on, concatenated: paths, or mappings with the settings of a set, for example "
        "[a.jsonl, {path: b.jsonl, weight: 2}]",
        per_stage=True,
    )
    eval: PromptSources = setting(
        [],
        "held-out prompt sets, in the notation of train; each has its own metrics, for example "
        "eval/test/accuracy",
        on_resume="free",
    )
    chat: Literal["auto", "always", "never"] = setting(
        "auto",
        "prompts that the tokenizer's chat template renders. auto: lists of messages; plain text is left as "
        "is. always: plain text as well, as a user message. never: none, lists of messages raise an error.",
    )
    system_prompt: Text | None = setting(
        None, "system message of rendered prompts that have no system message; null: none"
    )
    chat_template_args: dict[str, Any] = setting(
        {}, "arguments of the chat template, for example {enable_thinking: false}"
    )
    answer_prefix: Text = setting(
        "",
        "text that opens every completion, for example Answer: (a prefill of the assistant's turn). It is "
        "part of the prompt for the policy, and part of the text for verifiers, judges and pages",
    )
    date: Annotated[str, BeforeValidator(iso_date)] | None = setting(
        None,
        "date that a chat template writes, for example the templates of Llama 3.2 and Granite 3, as "
        "2026-11-28; null: the day of the first launch, also after a resume",
    )
    tools: list[str] = setting(
        [],
        "functions that the policy may call between its turns, path/file.py:function or module:function, for "
        "example [my_tools.py:search, verifiers.tools:python]; each needs type hints and a docstring",
    )
    environment: str | None = setting(
        None,
        "path/file.py:class with reset(row) and step(text) -> (message or None, done, reward), which answers "
        "the policy's turns; null: no environment",
    )
    on_bad_row: Literal["stop", "drop"] = setting(
        "stop",
        "rows that lack a prompt or an answer, cannot be rendered or are too long. stop: raise an error at "
        "the first. drop: leave them out, count and list them.",
    )
    special_tokens: bool = setting(
        False,
        "messages of rows may contain special tokens, for example <|im_end|>, which end a turn and begin "
        "another. false: such a row is a bad row. Prompts of plain text may always contain them.",
    )


def with_two_values(scale: tuple[float, float]) -> tuple[float, float]:
    """Return the scale of a function; ValueError unless its two values are finite and rise."""
    if not -math.inf < scale[0] < scale[1] < math.inf:
        raise ValueError(f"a scale is [value for wrong, value for right], for example [-1, 1], not {scale}")
    return scale


class RewardSettings(Section):
    """Verdicts, the worker processes that compute them, penalties and judges."""

    functions: list[str] = setting(
        [],
        "functions of your own that rows may name in the column kind, for example rewards.py:brevity, "
        "my_module:score or 0.8*math + 0.2*rewards.py:brevity",
        on_resume="free",
    )
    env: list[str] = setting(
        [], "environment variables that workers receive, for example [JUDGE_API_KEY]", on_resume="free"
    )
    scale: dict[str, Annotated[tuple[float, float], AfterValidator(with_two_values)]] = setting(
        {},
        "results of functions of your own (or of data.environment) that mean 0 (wrong) and 1 (right), for "
        "example {my.py:score: [-1, 1]}; others are mapped linearly. A function without an entry returns 0 "
        "to 1",
    )
    num_workers: Count = setting(2, "processes per rank that score completions", on_resume="free")
    timeout_s: Seconds = setting(10.0, "seconds after which a verdict counts as a timeout", on_resume="free")
    memory_gib: Annotated[float, Field(ge=0.125, le=65536)] = setting(
        2.0, "address space of a worker process, and of each of its children, in GiB", on_resume="free"
    )
    max_failed_frac: PositiveFraction = setting(
        0.5,
        "stop the run if a larger fraction of a step's verdicts fails for a reason outside of the completion",
        on_resume="free",
        per_stage=True,
    )
    overlap: bool = setting(
        True,
        "true: score each completion as soon as it ends, during generation. false: score all completions "
        "after generation.",
        on_resume="free",
        per_stage=True,
    )
    decode: Literal["workers", "engine"] = setting(
        "workers",
        "process that turns tokens into text. workers: the worker processes. engine: the engine's process, "
        "between two engine steps.",
        on_resume="free",
    )
    max_backlog: Count = setting(
        4096,
        "completions that may wait for a verdict; the engine pauses if the backlog is full",
        on_resume="free",
    )
    binary: bool = setting(False, "true: rewards below 1 count as 0. false: fractions count.", per_stage=True)
    sandbox: Literal["bubblewrap", "rlimits"] = setting(
        "bubblewrap",
        "isolation of programs of kind code. bubblewrap: Linux namespaces without network and without this "
        "machine's files. rlimits: limits of time, memory, output and system calls, for trusted programs.",
    )
    code_timeout_s: Seconds = setting(
        3.0,
        "seconds for one test of a program of kind code; all tests of a program together get three times as "
        "much",
    )
    code_memory_gib: float = setting(
        1.0, "address space of a program of kind code, in GiB; at most memory_gib", gt=0, le=65536
    )
    overlong_buffer: CountOr0 = setting(
        0,
        "tokens before max_new_tokens over which the overlong penalty grows from 0 to overlong_coef (DAPO); "
        "0: off",
        per_stage=True,
    )
    overlong_coef: NonNegative = setting(1.0, "penalty of a completion of max_new_tokens", per_stage=True)
    repetition_coef: NonNegative = setting(
        0.0, "factor of the fraction of repeated n-grams, subtracted from the reward; 0: off", per_stage=True
    )
    repetition_ngram: Count = setting(
        4, "length of the n-grams whose repetitions are counted, in tokens", per_stage=True
    )
    judge: Literal["none", "scalar", "generative"] = setting(
        "none",
        "reward model that is mixed with the verifier. none: the verifier alone. scalar: a model with a "
        "score head. generative: a language model that writes a verdict.",
    )
    judge_path: str | None = setting(
        None,
        "folder of the judge, or path/file.py:function that maps a list of questions to answers; null: no "
        "judge",
    )
    judge_weight: PositiveFraction = setting(0.5, "w in reward = (1 - w) verifier + w judge", per_stage=True)
    judge_margin: NonNegative = setting(
        0.0, "largest difference of a scalar judge's scores that counts as a tie; 0: only equal scores tie"
    )
    judge_mode: JudgeMode = setting(
        "score",
        "question to the judge. score: each completion alone, for scalar judges. pairwise_reference: "
        "comparison with the reference answer. round_robin: comparison with every other completion of the "
        "group.",
        per_stage=True,
    )
    judge_template: Text | None = setting(
        None,
        "question to a generative judge, with {prompt}, {first} and {second}, for example the question with "
        "which the judge was trained; null: an instruction in English (judges.py)",
    )
    judge_chat_template_args: dict[str, Any] = setting(
        {},
        "arguments of a generative judge's chat template, for example {enable_thinking: false} if the judge "
        "was trained without thinking",
    )


# ============================================================================================================
# The run: checkpoints, folder, stages
# ============================================================================================================
class CheckpointSettings(Section):
    """When checkpoints are written, and how a run resumes from them."""

    free_on_resume: ClassVar[bool] = True

    every: CountOr0 = setting(50, "write a checkpoint every N steps and at the last; 0: only at the last")
    keep: Count = setting(2, "number of newest checkpoints to keep")
    resume: Literal["auto", "weights", "never"] = setting(
        "auto",
        "use of the newest checkpoint in run.dir. auto: resume exactly. weights: resume with a fresh "
        "optimizer, for example on another number of ranks; later launches of the same command then resume "
        "exactly. never: raise an error if there is a checkpoint.",
    )
    on_damage: Literal["stop", "older"] = setting(
        "stop",
        "reaction to a damaged newest checkpoint. stop: raise an error that names it. older: set it aside "
        "and resume from the newest intact one.",
    )


class RunSettings(Section):
    """Folder of a run, reports, and limits of waiting."""

    free_on_resume: ClassVar[bool] = True

    dir: Annotated[str, AfterValidator(os.path.expanduser)] = setting(
        "runs/default", "folder of all files that the run writes", pattern=r"^[^\x00]+$"
    )
    memory_gib: float | None = setting(
        None,
        "memory that all ranks of a node may take together on CPUs, in GiB, for example 16 on a shared node; "
        "null: the memory that is available at the start",
        gt=0,
        le=2**20,
    )
    log_every: Count = setting(10, "print a console line and write a group to samples.jsonl every N steps")
    trackers: list[str] = setting(
        ["tensorboard"],
        "trackers that receive the metrics in addition to metrics.jsonl, by accelerate's names, for example "
        "wandb or mlflow",
    )
    warn_s: SecondsUpToWeeks = setting(
        300.0,
        "warn after a rank has waited this many seconds for another rank, naming it; then double the "
        "interval",
    )
    timeout_s: SecondsUpToWeeks = setting(
        1800.0,
        "abort after a rank has waited this many seconds for another rank, and print the other rank's stacks",
    )
    on_signal: Literal["checkpoint", "stop"] = setting(
        "checkpoint",
        "reaction to SIGTERM or Ctrl-C. checkpoint: finish the step, write a checkpoint, exit; a second "
        "signal exits at once. stop: exit at once.",
    )
    on_nonfinite: Literal["stop", "skip"] = setting(
        "stop",
        "reaction to a NaN or infinite reward or gradient. stop: end the run. skip: continue without that "
        "update.",
    )


class TrackingSettings(Section):
    """Where the trackers of run.trackers file a run; TensorBoard, which writes into run.dir, ignores them."""

    free_on_resume: ClassVar[bool] = True

    project: TextOrNull = setting(
        None,
        "project, or experiment in mlflow; null: the tracker's own variable, for example WANDB_PROJECT, else "
        "the last part of run.dir",
    )
    entity: TextOrNull = setting(
        None, "account or team that owns the project, for wandb and swanlab; null: the tracker's default"
    )
    name: TextOrNull = setting(None, "name of the run; null: the tracker's default, for example WANDB_NAME")
    tags: list[str] = setting([], "tags of the run, for wandb, swanlab and clearml")


class HandOver(Section):
    """The rule that ends a stage: the next stage begins when the first of these limits is reached."""

    steps: CountOrNull = setting(None, "end the stage after this many steps; null: no limit")
    tokens: CountOrNull = setting(
        None, "end the stage after this many tokens were generated in it; null: no limit"
    )
    accuracy: float | None = setting(
        None, "end the stage when the metric reaches this value; null: no limit", gt=0, le=1
    )
    plateau: CountOrNull = setting(
        None,
        "end the stage after this many consecutive values of the metric without a new best; null: no limit",
    )
    metric: str = setting(
        "score",
        "metric of accuracy and plateau: score (of each step), or a metric of evaluations, for example "
        "eval/SET/accuracy, eval/SET/avg_at_K or eval/SET/pass_at_K",
    )

    def measurements(self) -> list[int]:
        """List the smallest numbers of measurements after which accuracy or plateau can end the stage."""
        by_accuracy = [1] if self.accuracy is not None else []
        by_plateau = [1 + self.plateau] if self.plateau is not None else []
        return by_plateau + by_accuracy


class Stage(Section):
    """A part of a run. Besides these fields a stage takes sections of settings, for example `rollout:`."""

    model_config = ConfigDict(extra="allow")

    name: str = setting(..., "name of the stage in messages", min_length=1)
    until: HandOver = HandOver()


class Config(Section):
    """All settings of a run."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    reward: RewardSettings = RewardSettings()
    zero_variance: ZeroVarianceSettings = ZeroVarianceSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    teacher: TeacherSettings = TeacherSettings()
    centering: CenteringSettings = CenteringSettings()
    lora: LoraSettings = LoraSettings()
    carry: CarrySettings = CarrySettings()
    drafts: DraftsSettings = DraftsSettings()
    train: TrainSettings = TrainSettings()
    eval: EvalSettings = EvalSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    run: RunSettings = RunSettings()
    tracking: TrackingSettings = TrackingSettings()
    stages: list[Stage] = setting(
        [], "parts of the run, in their order, each with settings of its own (docs/stages.md); []: one stage"
    )

    @property
    def has_turns(self) -> bool:
        """Tell whether completions are episodes of several turns."""
        return bool(self.data.tools) or self.data.environment is not None

    @property
    def functions(self) -> list[str]:
        """List the functions of the user's own that are named here, from the hooks to the judge."""
        hooks = [getattr(self.algorithm, hook) for hook in HOOKS]
        kinds = [source.kind for source in (*self.data.train, *self.data.eval) if source.kind]
        verifiers = [name for kind in kinds for name in functions_of(kind)]
        judge = self.reward.judge_path or ""
        judges = [judge] if ":" in judge and not os.path.isdir(judge) else []
        names = [*hooks, *self.reward.functions, *verifiers, *self.data.tools, self.data.environment, *judges]
        return list(dict.fromkeys(name for name in names if name))
