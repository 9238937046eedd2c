"""Read the settings of a run from the command line, and check them against each other.

    config = load_config(["--config", "exp.yaml", "train.seed=1"])    # defaults < YAMLs < section.key=value

A wrong value raises ValueError before anything is loaded. The message names the setting and the remedy.
"""

import itertools
import math
from collections.abc import Iterator

import plugins
from data.prompts import check_data
from extras.base import active
from extras.settings import without_effect
from fp8 import check_fp8
from judges import has_places
from runtime.config import (
    explain,
    free_per_stage,
    mark,
    read_config,
    refuse_contradictions,
    setting_fields,
)  # fmt: skip
from runtime.learning_rate import learning_rate
from runtime.stages import check_hand_overs, place_of, settings_of_stages
from runtime.tracking import tracking_warnings
from runtime.user_files import all_functions
from settings import HOOKS, AlgorithmSettings, Config, TrainSettings
from verifiers.kinds import functions_of, is_kind, parts_of


def load_config(argv: list[str], description: str = "") -> Config:
    """Read a command line: defaults < YAMLs of --config < section.key=value; ValueError names the setting."""
    config = read_config(Config, argv, "train_rl.py", description)
    check_stages(config)
    functions = all_functions(config)
    if unused := sorted(set(config.reward.scale) - set(functions)):
        raise ValueError(
            f"reward.scale: no setting names the function {unused[0]!r}; functions of the run: "
            f"{', '.join(functions) or 'none'}"
        )
    return config


def check_stages(config: Config) -> None:
    """Check the settings of each stage and the rule that ends it; ValueError names the stage."""
    configs = stage_configs(config)
    for number, stage_config in enumerate(configs):
        try:
            check_config(stage_config)
        except ValueError as error:
            prefix = f"{place_of(config.stages, number)}: " if config.stages else ""
            raise ValueError(f"{prefix}{error}") from error
    for extra in dict.fromkeys(extra for stage_config in configs for extra in active(stage_config)):
        extra.check_stages(configs)
    if len(configs) > 1 and (lag := max(stage.rollout.lag for stage in configs)):
        raise ValueError(f"rollout.lag {lag}: a stage would train on rollouts of the one before: set 0")
    check_hand_overs(config.stages, configs, [hand_over_metrics(stage_config) for stage_config in configs])


def stage_configs(config: Config) -> list[Config]:
    """Return the complete settings of each stage; a run without `stages` is a single stage."""
    return settings_of_stages(config, free_per_stage(Config), lambda error, at: explain(error, Config, at))


def widest(configs: list[Config], on_gpu: bool) -> Config:
    """Return settings with the largest sizes of all stages, for which engine and policy are built."""
    if len(configs) == 1:
        return configs[0]
    largest: dict[str, dict] = {}
    for name, info in setting_fields(Config).items():
        if mark(info, "per_stage") == "largest":
            section, key = name.split(".")
            values = [getattr(getattr(config, section), key) for config in configs]
            largest.setdefault(section, {})[key] = max(values, key=lambda value: (value is not None, value))
    tokens = max(config.train.tokens_per_forward(on_gpu) for config in configs)
    largest["train"] = {"micro_batch_tokens": tokens}
    sections = {name: getattr(configs[0], name).model_copy(update=keys) for name, keys in largest.items()}
    return configs[0].model_copy(update=sections)


def hand_over_metrics(config: Config) -> set[str]:
    """List the metrics that can end a stage with these settings: the score and metrics of evaluations."""
    held_out = [*config.data.eval, *(source for source in config.data.train if source.holdout)]
    k = config.eval.num_samples
    names = ["accuracy", *([f"avg_at_{k}", f"pass_at_{k}"] if k else [])]
    return {"score", *(f"eval/{source.label}/{name}" for source in held_out for name in names)}


def check_config(config: Config) -> None:
    """Check settings against each other; ValueError names both settings of a contradiction."""
    if not config.data.train:
        raise ValueError("data.train: no prompt set to train on; see experiments/environments/tiny.yaml")
    check_data(config.data)
    for function in config.reward.functions:
        if not is_kind(function) or not functions_of(function):
            raise ValueError(
                f"reward.functions: {function!r} is neither module:function nor path/file.py:function"
            )
    fractions = config.algorithm.entropy_groups
    if not fractions or min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-6:
        raise ValueError(f"algorithm.entropy_groups: {list(fractions)} must be positive and sum to 1")
    contradictions = itertools.chain(
        zero_variance_contradictions(config),
        reward_contradictions(config),
        loss_contradictions(config),
        rollout_contradictions(config),
        without_effect(config),
        *(extra.contradictions(config) for extra in active(config)),
    )
    refuse_contradictions(config, contradictions)
    check_fp8(config.rollout)
    check_learning_rates(config.train)
    plugins.check_plugins(config)


def check_learning_rates(train: TrainSettings) -> None:
    """Raise ValueError if the first rate, the peak or the last is negative or exceeds train.learning_rate."""
    for step in sorted({0, min(train.warmup_steps, train.num_steps - 1), train.num_steps - 1}):
        try:
            rate = learning_rate(train, step)
        except ArithmeticError:
            rate = math.nan
        if not 0 <= rate <= train.learning_rate * (1 + 1e-9):
            raise ValueError(
                f"train.lr_schedule_args: the learning rate of step {step} is {rate:g}, outside of 0 to "
                f"train.learning_rate ({train.learning_rate:g}): change the arguments of {train.lr_schedule}"
            )


def zero_variance_contradictions(config: Config) -> Iterator[str]:
    """List contradictions in zero-variance elimination, for refuse_contradictions()."""
    zero = config.zero_variance
    explores_all = zero.explore_solved > 0 and zero.explore_unsolved > 0
    loses_prompts = zero.skip_rule == "expected" and not explores_all and zero.retest_steps == 0
    if zero.refill and not zero.drop:
        yield "{zero_variance.refill} needs {zero_variance.drop}"
    if zero.part is not None and not zero.drop:
        yield "{zero_variance.part} needs {zero_variance.drop}"
    kinds = [source.kind for source in config.data.train]
    if zero.part is not None and None not in kinds:
        parts = {name for kind in kinds for _, name in parts_of(kind)}
        if zero.part not in parts:
            yield f"{{zero_variance.part}} is no part of data.train[].kind: {', '.join(sorted(parts))}"
    if zero.round_size != "missing" and not zero.refill:
        yield "{zero_variance.round_size} needs {zero_variance.refill}"
    if zero.skip_rule != "expected" and not zero.history:
        yield "{zero_variance.skip_rule} needs {zero_variance.history}"
    if zero.rl_zvp and zero.drop:
        yield "{zero_variance.rl_zvp} reshapes the groups that {zero_variance.drop} removes: choose one"
    if config.has_turns and zero.offline_scores is not None:
        yield (
            "{zero_variance.offline_scores} holds pass rates of single turns, but completions have turns "
            "with data.tools or data.environment: set it to null"
        )
    if zero.history and loses_prompts:
        yield (
            "{zero_variance.explore_solved}, {zero_variance.explore_unsolved} and "
            "{zero_variance.retest_steps} would skip some prompts for ever: set one of them above 0"
        )
    if zero.probe_size >= config.rollout.group_size:
        yield "{zero_variance.probe_size} must be below {rollout.group_size}"


def reward_contradictions(config: Config) -> Iterator[str]:
    """List contradictions in rewards and judges, for refuse_contradictions()."""
    rollout = config.rollout
    reward = config.reward
    is_scalar = reward.judge == "scalar"
    by_score = reward.judge_mode == "score"
    if reward.overlong_buffer > rollout.max_new_tokens:
        yield "{reward.overlong_buffer} must be at most {rollout.max_new_tokens}"
    if reward.code_memory_gib > reward.memory_gib:
        yield "{reward.code_memory_gib} must be at most {reward.memory_gib}, the limit of the whole worker"
    if (reward.judge == "none") != (reward.judge_path is None):
        yield "{reward.judge} and {reward.judge_path}: set both or neither"
    if reward.judge == "none" and not by_score:
        yield "{reward.judge_mode} needs a judge, not {reward.judge}"
    if reward.judge_margin > 0 and (by_score or not is_scalar):
        yield (
            "{reward.judge_margin} needs pairs and a scalar judge, not {reward.judge} and {reward.judge_mode}"
        )
    if reward.judge == "generative" and by_score:
        yield "{reward.judge} compares pairs only: choose another mode than {reward.judge_mode}"
    if reward.judge == "generative" and ":" not in (reward.judge_path or ":") and rollout.tensor_parallel > 1:
        yield (
            "{reward.judge} in a folder is an engine of one rank, beside one of {rollout.tensor_parallel} "
            "ranks: ask a server with a function, {reward.judge_path}"
        )
    if reward.judge_template is not None and reward.judge != "generative":
        yield "{reward.judge_template} is a question to a generative judge, not to {reward.judge}"
    if reward.judge_chat_template_args and reward.judge != "generative":
        yield (
            "{reward.judge_chat_template_args} are for the folder of a generative judge, "
            "not for {reward.judge}"
        )
    if reward.judge_template is not None and not has_places(reward.judge_template):
        yield "{reward.judge_template} must have the places of prompt, first and second, each in braces"


def loss_contradictions(config: Config) -> Iterator[str]:
    """List contradictions among ratio, clips, corrections and hooks, for refuse_contradictions()."""
    algo = config.algorithm
    is_capped = algo.clip_mode in ("fixed", "entropy_adaptive")
    if algo.clip_mode == "before_mean" and algo.ratio_level == "token":
        yield "{algorithm.clip_mode} clips each token before the mean: {algorithm.ratio_level} has no mean"
    if algo.entropy_clip_form != "token_group_mean" and algo.clip_mode != "entropy_adaptive":
        yield "{algorithm.entropy_clip_form} has no effect with {algorithm.clip_mode}"
    if algo.ratio_form != "geometric" and algo.ratio_level == "token":
        yield "{algorithm.ratio_form} has no effect with {algorithm.ratio_level}"
    if algo.ratio_form == "stop_gradient" and algo.clip_mode == "weight":
        yield "{algorithm.ratio_form} has no effect with {algorithm.clip_mode}"
    if algo.clip_cap is not None and not is_capped:
        yield "{algorithm.clip_cap} has no effect with {algorithm.clip_mode}"
    if algo.clip_mode == "fixed" and (algo.clip_cap or math.inf) <= 1 + algo.clip_eps_high:
        yield "{algorithm.clip_cap} must be above 1 + {algorithm.clip_eps_high}"
    if algo.gain is not None and algo.clip_mode != "fixed":
        yield "{algorithm.gain} replaces {algorithm.clip_mode}: leave clip_mode at fixed"
    if algo.gain is not None and algo.clip_cap is not None:
        yield "{algorithm.gain} replaces the clip of {algorithm.clip_cap}: pass a bound by gain_args"
    if algo.advantage is not None and algo.adv_norm != "group_std":
        yield "{algorithm.advantage} replaces {algorithm.adv_norm}: leave adv_norm at group_std"
    if algo.advantage is not None and algo.tie_band > 0:
        yield "{algorithm.advantage} replaces {algorithm.tie_band}: pass a band by advantage_args"
    if algo.old_policy == "rollout" and algo.rollout_correction != "none":
        yield (
            "{algorithm.old_policy} corrects the mismatch by the ratio, "
            "without {algorithm.rollout_correction}"
        )
    if algo.old_policy == "rollout" and algo.router_replay == "r2":
        yield (
            "{algorithm.old_policy} has no old-logprob pass whose routes "
            "{algorithm.router_replay} could replay"
        )
    if algo.rollout_correction_floor > 0 and algo.rollout_correction == "none":
        yield "{algorithm.rollout_correction_floor} has no effect with {algorithm.rollout_correction}"
    default = AlgorithmSettings().rollout_correction_cap
    if algo.rollout_correction == "none" and algo.rollout_correction_cap != default:
        yield "{algorithm.rollout_correction_cap} has no effect with {algorithm.rollout_correction}"
    if algo.rollout_correction_floor >= algo.rollout_correction_cap:
        yield "{algorithm.rollout_correction_floor} must be below {algorithm.rollout_correction_cap}"
    for hook in HOOKS:
        if getattr(algo, f"{hook}_args") and getattr(algo, hook) is None:
            yield f"{{algorithm.{hook}_args}} has no effect without algorithm.{hook}"


def rollout_contradictions(config: Config) -> Iterator[str]:
    """List contradictions in the optimizer and the rollout, for refuse_contradictions()."""
    train = config.train
    rollout = config.rollout
    if rollout.prompts_per_step % train.minibatches_per_step != 0:
        yield "{train.minibatches_per_step} must divide {rollout.prompts_per_step}"
    if train.offload_optimizer and train.zero_stage == 1:
        yield "{train.offload_optimizer} needs stage 2, not {train.zero_stage}: 1 keeps gradients on the GPU"
    if train.lr_schedule_args and train.lr_schedule == "constant_with_warmup":
        yield "{train.lr_schedule_args} belong to another schedule than {train.lr_schedule}, which takes none"
    if config.algorithm.router_replay == "r3" and rollout.capture_routes == "off":
        yield "{algorithm.router_replay} needs routes, not {rollout.capture_routes}"
    if rollout.max_turns != type(rollout)().max_turns and not config.has_turns:
        yield "{rollout.max_turns} needs tools or an environment: {data.tools}, {data.environment}"
    if rollout.expert_parallel and rollout.tensor_parallel == 1:
        yield "{rollout.expert_parallel} needs several ranks per engine, more than {rollout.tensor_parallel}"


def config_warnings(config: Config) -> list[str]:
    """List legitimate but unusual combinations, to be printed once at the start."""
    of_extras = [warning for extra in active(config) for warning in extra.warnings(config)]
    warnings = (precision_warnings, loss_warnings, elimination_warnings, timeout_warnings, tracking_warnings)
    return [*(text for warn in warnings for text in warn(config)), *of_extras]


DLOGP_OF_BFLOAT16 = (4e-4, 4e-2)  # smallest and largest mean of SmolLM2's runs with either dtype bfloat16


def precision_warnings(config: Config) -> Iterator[str]:
    """Say how far trainer and engine will differ, if a dtype makes a larger difference than need be."""
    policy, engine = config.model.dtype, config.rollout.dtype
    limit = config.rollout.parity_mean
    low, high = DLOGP_OF_BFLOAT16
    is_mixed = {policy, engine} == {"float32", "bfloat16"}
    if is_mixed or (engine == "bfloat16" and limit < high):
        effect = f"; rollout.parity_mean {limit:g} may stop the run" if limit < high else ""
        yield (
            f"model.dtype {policy!r} and rollout.dtype {engine!r}: expect a mean abs(dlogp) of {low:g} to "
            f"{high:g} nats, or of about 1e-5 with float32 for both{effect}"
        )


def loss_warnings(config: Config) -> Iterator[str]:
    """List unusual combinations of ratio, clip and correction."""
    algo = config.algorithm
    has_built_in_clip = algo.gain is None
    is_wide = algo.clip_mode == "fixed" and algo.clip_eps_high >= 0.1
    if has_built_in_clip and algo.ratio_level != "token" and is_wide:
        yield (
            f"algorithm.clip_eps_high {algo.clip_eps_high} is wide for algorithm.ratio_level "
            f"{algo.ratio_level!r}: GSPO uses 3e-4 and 4e-4"
        )
    if algo.loss_agg == "token_group_mean" and algo.ratio_level != "entropy_group":
        yield (
            f"algorithm.loss_agg 'token_group_mean' without entropy groups (algorithm.ratio_level "
            f"{algo.ratio_level!r}) is the mean over tokens"
        )
    if config.rollout.lag and algo.old_policy == "trainer" and algo.rollout_correction == "none":
        yield (
            f"rollout.lag {config.rollout.lag} without algorithm.rollout_correction: nothing corrects for "
            "the delay, because ratios are to the trainer's policy of the same step (algorithm.old_policy)"
        )
    num_updates = config.train.num_updates
    if algo.router_replay == "r2" and num_updates == 1:
        yield (
            "algorithm.router_replay 'r2' with train.minibatches_per_step 1 changes nothing: the only update "
            "uses the routes of the old policy anyway"
        )
    is_shared = algo.ratio_level != "token" and algo.ratio_form == "geometric" and algo.clip_mode != "weight"
    sources = [extra.name for extra in active(config) if extra.replaces_advantages]
    sources += ["zero_variance.rl_zvp"] if config.zero_variance.rl_zvp else []
    if is_shared and sources:
        yield (
            f"algorithm.ratio_form 'geometric' at algorithm.ratio_level {algo.ratio_level!r} averages the "
            f"advantages of the tokens of a ratio, but {sources[0]} has an advantage for each token: take "
            "algorithm.ratio_form stop_gradient to keep them"
        )
    if is_shared and (algo.select is not None or algo.rollout_correction == "token_mask"):
        yield (
            f"algorithm.ratio_form 'geometric' at algorithm.ratio_level {algo.ratio_level!r} spreads the "
            "gradient over all tokens of a ratio, also over tokens without policy loss (algorithm.select, "
            "token_mask): take algorithm.ratio_form stop_gradient to exclude them"
        )
    has_own_clip = algo.ratio_level != "token" or algo.clip_mode not in ("fixed", "none")
    has_own_clip |= algo.clip_mode != "none" and algo.clip_eps_low != algo.clip_eps_high
    has_own_clip |= algo.clip_cap is not None
    if has_built_in_clip and has_own_clip and num_updates == 1 and algo.old_policy == "trainer":
        yield (
            "no clip acts at train.minibatches_per_step 1, because every ratio of the only update is 1: set "
            f"it above 1 (algorithm.ratio_level {algo.ratio_level!r}, clip_mode {algo.clip_mode!r})"
        )
    if algo.rollout_correction == "geometric_mask" and algo.rollout_correction_cap >= 2:
        yield (
            "algorithm.rollout_correction 'geometric_mask' with algorithm.rollout_correction_cap "
            f"{algo.rollout_correction_cap:g} masks hardly anything: the mean is per token, "
            "experiments/methods/mask_geometric.yaml takes 0.98 and 1.02"
        )


def elimination_warnings(config: Config) -> Iterator[str]:
    """List unusual combinations of zero-variance elimination with a judge and small groups."""
    zero = config.zero_variance
    by_record = [name for name in ("history", "offline_scores", "probe_size") if getattr(zero, name)]
    by_scores = by_record + [name for name in ("rl_zvp", "drop") if getattr(zero, name)]
    if config.reward.judge != "none" and by_scores:
        yield (
            f"reward.judge with zero_variance.{', '.join(by_scores)}: the verifier's scores alone decide "
            "whether a group has variance, so differences that only the judge sees do not count"
        )
    needs_baseline = config.algorithm.advantage is None and all(
        e.needs_baseline(config) for e in active(config)
    )
    if config.rollout.group_size == 1 and needs_baseline:
        yield "rollout.group_size 1: a group of one has no baseline, all advantages are 0"


def timeout_warnings(config: Config) -> list[str]:
    """List the waits that the watchdog would end before their own limit."""
    limits = {"reward.timeout_s": config.reward.timeout_s}
    if config.has_turns:
        limits["rollout.tool_timeout_s"] = config.rollout.tool_timeout_s
    return [
        f"{name} {seconds:g} with run.timeout_s {config.run.timeout_s:g}: a call that takes this long aborts "
        "the run, because its rank counts as one that hangs; raise run.timeout_s"
        for name, seconds in limits.items()
        if seconds >= config.run.timeout_s
    ]
