"""What can be set, and how it is read: defaults < YAML files < section.key=value, as frozen pydantic models.

    python train_rl.py --help                  # every setting with default, unit and meaning
    base: [env.yaml, ../methods/espo.yaml]     # in a YAML: the files below it, the later above the earlier

A method of a paper is a choice along axes, never a name: see experiments/methods/. A key given twice, an
unknown key and a wrong type are errors that name the setting and the nearest one; settings that contradict
each other are refused with both names.
"""

import argparse
import difflib
import typing
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from reward import KINDS, is_kind

MAX_ENTROPY_GROUPS = 16  # the paper uses 2


# ---- 1. Settings: one line per field -----------------------------------------------------------------------
class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def setting(default, description: str, **limits):
    """A field with its meaning for --help; the default ... makes it required."""
    return Field(default, description=description, **limits)


def named(value):
    """YAML reads a bare off and on as booleans; here they are names."""
    return {False: "off", True: "on"}[value] if isinstance(value, bool) else value


Choice = TypeVar("Choice")
Switch = Annotated[Choice, BeforeValidator(named)]


class PromptSource(Section):
    path: str = setting(..., "JSONL or parquet file, or the name of a hub dataset")
    name: str | None = setting(None, "name in logs; null: the file's name")
    subset: str | None = setting(None, "configuration of a hub dataset, e.g. main; null: its default")
    split: str = setting("train", "split of a hub dataset; local files are taken whole")
    kind: str = setting("math", f"verifier of rows without their own: {', '.join(KINDS)}, module:function")
    columns: dict[str, str | None] = setting(
        {}, "column of prompt, answer, difficulty, kind where named otherwise"
    )
    template: str = setting("{prompt}", "text around each prompt")
    limit: int | None = setting(None, "take the first rows only, after the difficulty range; null: all", ge=1)
    difficulty: tuple[float, float] | None = setting(None, "keep this closed range; null: all")


class ModelSection(Section):
    path: str = setting("data/built/tiny/model", "folder of a Hugging Face Qwen3-MoE or Qwen3 checkpoint")
    ep_size: int = setting(1, "ranks that share one copy of the experts (expert parallelism)", ge=1)
    dtype: Literal["float32", "bfloat16"] = setting("bfloat16", "of the policy; the optimizer keeps float32")
    activation_checkpointing: bool = setting(False, "recompute layers in backward to save memory")
    head: Literal["auto", "naive", "chunked", "triton"] = setting(
        "auto",
        "log-probabilities and entropies from whole logits; by blocks in torch; by kernels (NVIDIA GPUs); "
        "auto: kernels where they run, else blocks",
    )


class DataSection(Section):
    train: list[PromptSource] = setting([], "prompt sets to train on, concatenated")
    eval: list[PromptSource] = setting([], "held-out prompt sets, reported one by one")


class RolloutSection(Section):
    prompts_per_step: int = setting(128, "prompts per step over all ranks", ge=1)
    group_size: int = setting(8, "G, completions per prompt", ge=1)
    temperature: float = setting(1.0, "of sampling; the trainer's log-probabilities use it too", gt=0)
    max_prompt_tokens: int = setting(1024, "longer prompts are an error at start", ge=1)
    max_new_tokens: int = setting(16384, "completions are cut here", ge=1)
    dtype: Literal["float32", "bfloat16"] = setting("bfloat16", "of the engine's weights and activations")
    max_num_seqs: int = setting(256, "completions an engine works on at once", ge=1)
    schedule: Literal["arrival", "longest_first", "oracle"] = setting(
        "longest_first",
        "order of prompts over and in engines: as they come; by expected length; by the true one, for which "
        "everything is sampled twice (for ablations)",
    )
    kv_cache_gib: float | None = setting(None, "GiB of keys and values per engine; null: vLLM decides", gt=0)
    prefix_caching: bool = setting(True, "share the prompt's keys and values within a group")
    sleep_level: Literal[0, 1, 2] = setting(0, "GPU memory freed in updates: 0 none, 1 to host, 2 dropped")
    reward_aware: bool = setting(True, "longest_first, oracle: count the time of slow rewards as tokens")
    overprovision: float = setting(
        0.0,
        "share of prompts begun beyond prompts_per_step; what is late goes on in the next step; 0: off",
        ge=0,
    )
    fp8: Switch[Literal["off", "simulate", "on"]] = setting(
        "off", "block-wise FP8 rollouts: on (GPUs); simulate rounds the weights alike at each sync"
    )
    tensor_parallel: int = setting(1, "neighbouring ranks that share an engine, for large models", ge=1)
    expert_parallel: bool = setting(False, "these ranks hold whole experts, not a part of each (GPUs)")
    kv_cache_fp8: bool = setting(False, "keys and values in FP8, scale 1 (GPUs)")
    capture_routes: bool = setting(True, "the engine returns the experts of each token: replay r3, mismatch")
    max_invalid_routes: float = setting(0.01, "stop if a larger share of captured rows is invalid", ge=0)
    check_every: int = setting(
        50, "steps between checks of the engine's weights and parity, besides the first; 0: never", ge=0
    )
    parity_mean: float = setting(0.1, "nats; a check stops the run if mean |dlogp| of both is above", gt=0)
    parity_p99: float = setting(1e-3, "nats; the same of its 99th percentile, float32 on both sides", gt=0)


class RewardSection(Section):
    num_workers: int = setting(1, "scoring processes per rank", ge=1)
    timeout_s: float = setting(10.0, "seconds; a verdict that takes longer is a timeout", gt=0)
    memory_gib: float = setting(2.0, "GiB of address space per scoring process", gt=0)
    max_failed_frac: float = setting(0.5, "stop if more verdicts of a step time out or crash", gt=0, le=1)
    overlap: bool = setting(True, "score each completion while others are generated; false: all at the end")
    decode: Literal["workers", "engine"] = setting(
        "workers", "where tokens become text: with the scoring, or between two steps of the engine"
    )
    max_backlog: int = setting(4096, "completions waiting for a verdict before the engine has to wait", ge=1)
    dense: bool = setting(False, "reward the share of the answer that is right instead of 0 or 1")
    overlong_buffer: int = setting(0, "last tokens before max_new_tokens that are penalised; 0: off", ge=0)
    overlong_coef: float = setting(1.0, "penalty of a completion that is max_new_tokens long", ge=0)
    repetition_coef: float = setting(0.0, "penalty of a completion that only repeats itself; 0: off", ge=0)
    repetition_ngram: int = setting(4, "tokens; repeated n-grams of this size are counted", ge=1)
    judge: Literal["none", "scalar", "generative"] = setting("none", "reward model mixed with the verifier")
    judge_path: str | None = setting(None, "folder of the judge, or module:function; null: no judge")
    judge_weight: float = setting(0.5, "reward = (1 - w) verifier + w judge", gt=0, le=1)
    judge_mode: Literal["score", "pairwise_reference", "round_robin"] = setting(
        "score", "judge alone; against the reference answer; against the group's other completions"
    )


class ZeroVarianceSection(Section):
    offline_scores: str | None = setting(None, "pass rates written by data/score.py; null: stage 1 off")
    offline_pass_rate: tuple[float, float] = setting((0.0, 0.9), "closed range of offline pass rates kept")
    history: bool = setting(False, "stage 1b: skip prompts whose record makes zero variance likely")
    history_decay: float = setting(0.1, "weight of a prompt's past verdicts at each new visit", ge=0, le=1)
    prior: float = setting(0.2, "verdicts of each kind added to a record; below 0.5: bimodal", gt=0)
    explore_solved: float = setting(0.1, "least probability of sampling a prompt always solved", ge=0, le=1)
    explore_unsolved: float = setting(0.1, "the same of a prompt never solved", ge=0, le=1)
    retest_steps: int = setting(200, "steps after which a record is too old to skip by; 0: never", ge=0)
    probe_size: int = setting(0, "stage 1c: g0, completions sampled first of each group; 0: off", ge=0)
    probe_stop_prob: float = setting(0.9, "stop a probe if zero variance is at least so likely", gt=0)
    rl_zvp: bool = setting(False, "stage 3: groups left without variance get RL-ZVP advantages")
    rl_zvp_coef: float = setting(0.1, "alpha of RL-ZVP", gt=0)
    drop: bool = setting(False, "contrast: leave groups without variance out of the update (DAPO filter)")
    refill: bool = setting(False, "contrast: replace dropped groups by new prompts (DAPO dynamic sampling)")
    max_rounds: int = setting(4, "rounds of sampling in a step after which no new prompts are taken", ge=1)


class AlgorithmSection(Section):
    ratio_level: Literal["token", "sequence", "entropy_group"] = setting(
        "token", "tokens that share an importance ratio: one; a completion; one entropy group of it"
    )
    ratio_form: Literal["geometric", "stop_gradient", "literal"] = setting(
        "geometric", "gradient of a shared ratio: of the mean; of each token; ESPO eq. 9 as printed"
    )
    entropy_groups: tuple[float, ...] = setting(
        (0.2, 0.8),
        "shares of a completion's tokens per entropy group, highest entropy first; sum 1",
        max_length=MAX_ENTROPY_GROUPS,
    )
    clip_mode: Literal["fixed", "entropy_adaptive", "weight", "before_mean", "none"] = setting(
        "fixed", "PPO; eps from entropy (ESPO); ratio as bounded weight (CISPO); each token first (GMPO); off"
    )
    clip_eps_low: float = setting(0.2, "ratios below 1 - this are clipped", gt=0, le=1)
    clip_eps_high: float = setting(0.2, "ratios above 1 + this are clipped", gt=0)
    entropy_clip_coef: float = setting(0.02, "alpha of ESPO's entropy-adaptive clip", gt=0)
    entropy_clip_form: Literal["group_mean", "literal"] = setting(
        "group_mean", "eps from the group's mean entropy, or ESPO eq. 8 as printed"
    )
    loss_agg: Literal["sequence_mean", "token_mean", "group_mean", "fixed_length"] = setting(
        "sequence_mean", "mean over tokens then completions; tokens; entropy groups; / max_new_tokens"
    )
    adv_norm: Literal["group_std", "mean_only"] = setting("group_std", "divide by the group's std, or not")
    tie_band: float = setting(0.0, "rewards so close to the group's mean are ties, advantage 0; 0: off", ge=0)
    correctness_guard: bool = setting(False, "no positive advantage if wrong, no negative one if right")
    rollout_correction: Literal["none", "token_tis", "sequence_tis", "sequence_mask"] = setting(
        "none", "importance weight trainer/engine: truncated per token, per completion; masked above the cap"
    )
    rollout_correction_cap: float = setting(2.0, "largest such weight", gt=0)
    old_policy: Literal["trainer", "rollout"] = setting(
        "trainer", "denominator of the ratio: the trainer before the update, or the engine itself (bypass)"
    )
    router_replay: Switch[Literal["off", "r2", "r3"]] = setting(
        "off", "experts used in the trainer: its own; those of its old-logprob pass; those of the engine"
    )
    mismatch_gate: float = setting(0.015, "warn if k3 KL of trainer and engine is above; 0: no gate", ge=0)
    mismatch_patience: int = setting(10, "stop after so many such steps in a row; 0: never", ge=0)
    kl_coef: float = setting(0.0, "beta of the KL penalty to the first policy; 0: no reference model", ge=0)


class TrainSection(Section):
    num_steps: int = setting(200, "steps; each is one rollout and minibatches_per_step updates", ge=1)
    max_generated_tokens: int | None = setting(None, "stop when so many were generated; null: off", ge=1)
    minibatches_per_step: int = setting(1, "updates per rollout; above 1 the later ones are off-policy", ge=1)
    micro_batch_tokens: int = setting(32768, "padded tokens per forward and rank; longer rows go alone", ge=1)
    balance: bool = setting(True, "as many tokens for each rank and forward; false: rows as they come")
    learning_rate: float = setting(1e-6, "of AdamW", gt=0)
    warmup_steps: int = setting(0, "steps of linear warm-up; then constant", ge=0)
    betas: tuple[float, float] = setting((0.9, 0.95), "of AdamW")
    weight_decay: float = setting(0.0, "of AdamW", ge=0)
    max_grad_norm: float = setting(1.0, "gradients are scaled down to this global norm", gt=0)
    zero_stage: Literal[1, 2] = setting(1, "DeepSpeed ZeRO: 1 shards optimizer state, 2 gradients too")
    seed: int = setting(0, "of prompt order and sampling", ge=0)


class EvalSection(Section):
    every: int = setting(50, "steps between evaluations, besides before and after; 0: only those", ge=0)
    num_samples: int = setting(8, "k sampled completions per prompt for avg@k, pass@k; 0: greedy only", ge=0)
    max_new_tokens: int | None = setting(None, "null: as in rollout", ge=1)
    overlap: bool = setting(True, "sample along with the next rollout, which has the same weights")


class CheckpointSection(Section):
    every: int = setting(50, "steps between checkpoints, besides the last; 0: only the last", ge=0)
    keep: int = setting(2, "newest checkpoints kept", ge=1)
    overlap: bool = setting(True, "write during the next rollout; false: the run waits for the disk")
    resume: Literal["auto", "weights", "never"] = setting(
        "auto",
        "auto: go on exactly from run.dir's newest checkpoint; weights: with a fresh optimizer, for another "
        "number of ranks; never: refuse a run.dir that has one",
    )


class RunSection(Section):
    dir: str = setting("runs/default", "folder of everything the run writes")
    log_every: int = setting(10, "steps between lines on the console and in samples.jsonl", ge=1)
    timeout_s: float = setting(1800.0, "seconds a rank waits for another before it gives up", gt=0)
    on_nonfinite: Literal["stop", "skip"] = setting("stop", "NaN or infinite reward, gradient: end, or go on")


class Config(Section):
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    zero_variance: ZeroVarianceSection = ZeroVarianceSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    run: RunSection = RunSection()


def eval_name(source: PromptSource) -> str:
    """Name of a held-out set in the metrics."""
    return source.name or Path(source.path).stem


# ---- 2. Checks across settings -----------------------------------------------------------------------------
def rollout_contradictions(config: Config) -> dict[str, tuple]:
    """{message: (one setting, the other, whether they contradict each other)} of the rollout section."""
    rollout, zero, algo = config.rollout, config.zero_variance, config.algorithm
    return {
        "algorithm.router_replay {!r} needs rollout.capture_routes, which is {}": (
            algo.router_replay, rollout.capture_routes,
            algo.router_replay == "r3" and not rollout.capture_routes),
        "rollout.expert_parallel {} needs rollout.tensor_parallel above 1, which is {}": (
            rollout.expert_parallel, rollout.tensor_parallel,
            rollout.expert_parallel and rollout.tensor_parallel == 1),
        "rollout.expert_parallel {} and rollout.fp8 {!r}: vLLM quantises on GPUs itself, set fp8 to on": (
            rollout.expert_parallel, rollout.fp8,
            rollout.expert_parallel and rollout.fp8 == "simulate"),
        "rollout.overprovision {} samples in one round: not with zero_variance.probe_size {}": (
            rollout.overprovision, zero.probe_size, rollout.overprovision and zero.probe_size),
        "rollout.overprovision {} samples in one round: not with zero_variance.refill {}": (
            rollout.overprovision, zero.refill, rollout.overprovision and zero.refill),
        "rollout.overprovision {} cuts completions, rollout.schedule {!r} has to know them": (
            rollout.overprovision, rollout.schedule, rollout.overprovision and rollout.schedule == "oracle"),
        "rollout.overprovision {} stops each rank on its own, rollout.tensor_parallel {} share an engine": (
            rollout.overprovision, rollout.tensor_parallel,
            rollout.overprovision and rollout.tensor_parallel > 1),
        "rollout.fp8 {!r} needs rollout.dtype bfloat16, not {!r}": (
            rollout.fp8, rollout.dtype, rollout.fp8 == "on" and rollout.dtype != "bfloat16"),
    }  # fmt: skip


def check_config(config: Config) -> None:
    """Checks across settings; ValueError names both."""
    rollout, reward, zero, algo = config.rollout, config.reward, config.zero_variance, config.algorithm
    if not config.data.train:
        raise ValueError("data.train: no prompt set to train on; see experiments/tiny/demo.yaml")
    for place, sources in (("train", config.data.train), ("eval", config.data.eval)):
        for source in sources:
            if not is_kind(source.kind):
                raise ValueError(f"data.{place}[].kind: {source.kind!r} is none of {', '.join(KINDS)}")
    names = [eval_name(source) for source in config.data.eval]
    if len(set(names)) < len(names):
        raise ValueError(f"data.eval[].name: {', '.join(names)} are not all different; name the sets")
    shares, explore = algo.entropy_groups, min(zero.explore_solved, zero.explore_unsolved)
    if not shares or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"algorithm.entropy_groups: {list(shares)} must be positive and sum to 1")
    contradictions = {
        "train.minibatches_per_step {} must divide rollout.prompts_per_step {}": (
            config.train.minibatches_per_step, rollout.prompts_per_step,
            rollout.prompts_per_step % config.train.minibatches_per_step != 0),
        "zero_variance.probe_size {} must be below rollout.group_size {}": (
            zero.probe_size, rollout.group_size, zero.probe_size >= rollout.group_size),
        "zero_variance.refill {} needs zero_variance.drop, which is {}": (
            zero.refill, zero.drop, zero.refill and not zero.drop),
        "zero_variance.rl_zvp {} reshapes the groups that zero_variance.drop {} removes: choose one": (
            zero.rl_zvp, zero.drop, zero.rl_zvp and zero.drop),
        "zero_variance.explore_solved or _unsolved {} and retest_steps {} would lose prompts for ever": (
            explore, zero.retest_steps, zero.history and explore == 0 and zero.retest_steps == 0),
        "reward.overlong_buffer {} must be at most rollout.max_new_tokens {}": (
            reward.overlong_buffer, rollout.max_new_tokens, reward.overlong_buffer > rollout.max_new_tokens),
        "reward.judge {!r} and reward.judge_path {!r}: set both or neither": (
            reward.judge, reward.judge_path, (reward.judge == "none") != (reward.judge_path is None)),
        "reward.judge_mode {!r} needs a judge, reward.judge is {!r}": (
            reward.judge_mode, reward.judge, reward.judge == "none" and reward.judge_mode != "score"),
        "reward.judge {!r} gives verdicts on pairs only, not reward.judge_mode {!r}": (
            reward.judge, reward.judge_mode, reward.judge == "generative" and reward.judge_mode == "score"),
        "algorithm.clip_mode {!r} clips each token before the mean: algorithm.ratio_level {!r} has none": (
            algo.clip_mode, algo.ratio_level,
            algo.clip_mode == "before_mean" and algo.ratio_level == "token"),
        "algorithm.entropy_clip_form {!r} has no effect with algorithm.clip_mode {!r}": (
            algo.entropy_clip_form, algo.clip_mode,
            algo.entropy_clip_form == "literal" and algo.clip_mode != "entropy_adaptive"),
        "algorithm.old_policy {!r}: the ratio is the correction already, algorithm.rollout_correction {!r}": (
            algo.old_policy, algo.rollout_correction,
            algo.old_policy == "rollout" and algo.rollout_correction != "none"),
        "algorithm.old_policy {!r} makes no old-logprob pass, algorithm.router_replay {!r} replays one": (
            algo.old_policy, algo.router_replay, algo.old_policy == "rollout" and algo.router_replay == "r2"),
        "algorithm.ratio_form {!r} has no effect with algorithm.ratio_level {!r}": (
            algo.ratio_form, algo.ratio_level,
            algo.ratio_form != "geometric" and algo.ratio_level == "token"),
    }  # fmt: skip
    contradictions |= rollout_contradictions(config)
    for message, (one, other, refused) in contradictions.items():
        if refused:
            raise ValueError(message.format(one, other))


def config_warnings(config: Config) -> list[str]:
    """Legitimate but unusual combinations, said once at start."""
    algo, found = config.algorithm, []
    if algo.ratio_level != "token" and algo.clip_mode == "fixed" and algo.clip_eps_high >= 0.1:
        found.append(
            f"algorithm.clip_eps_high {algo.clip_eps_high} is wide for algorithm.ratio_level "
            f"{algo.ratio_level!r}: GSPO uses 3e-4 and 4e-4"
        )
    if algo.loss_agg == "group_mean" and algo.ratio_level != "entropy_group":
        found.append(
            f"algorithm.loss_agg 'group_mean' without entropy groups (algorithm.ratio_level "
            f"{algo.ratio_level!r}) is the mean over tokens"
        )
    if algo.router_replay == "r2" and config.train.minibatches_per_step == 1:
        found.append(
            "algorithm.router_replay 'r2' with train.minibatches_per_step 1 changes nothing: the only update "
            "is made with the routes of the old policy anyway"
        )
    if config.rollout.overprovision and (algo.rollout_correction, algo.old_policy) == ("none", "trainer"):
        found.append(
            f"rollout.overprovision {config.rollout.overprovision} trains on tokens of older policies, and "
            "algorithm.rollout_correction 'none' does not weigh them: token_tis does"
        )
    if config.rollout.group_size == 1:
        found.append("rollout.group_size 1: a group of one has no baseline, all advantages are 0")
    return found


# ---- 3. Reading --------------------------------------------------------------------------------------------


class StrictLoader(yaml.SafeLoader):
    """safe_load that refuses a key given twice."""

    def construct_mapping(self, node, deep=False):
        mapping = super().construct_mapping(node, deep)  # first: it refuses keys that cannot be one
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ValueError(f"line {key_node.start_mark.line + 1}: key {key!r} is given twice")
            seen.add(key)
        return mapping


def read_yaml(path: Path, above: tuple[Path, ...] = ()) -> dict:
    """The settings of a YAML file over those of the files its top-level `base` names (relative to it)."""
    if path.resolve() in above:
        raise ValueError(f"{path}: its `base` leads back to itself")
    if not path.is_file():
        raise ValueError(f"config file {path} does not exist")
    try:
        values = yaml.load(path.read_text(), Loader=StrictLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected sections such as `train:`, found a {type(values).__name__}")
    if "base" not in values:
        return values
    base = values.pop("base")
    bases = base if isinstance(base, list) else [base]
    if not all(isinstance(name, str) for name in bases):
        raise ValueError(f"{path}: base must be the path of a YAML file or a list of them, found {base!r}")
    below: dict = {}
    for name in bases:
        below = merge(below, read_yaml(path.parent / name, (*above, path.resolve())))
    return merge(below, values)


def merge(below: dict, above: dict) -> dict:
    """Recursive union of nested mappings; above wins, lists are replaced whole."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = merge(below[key], value) if both else value
    return merged


def setting_names(section: type[BaseModel] = Config, prefix: str = "") -> dict[str, object]:
    """{dotted name: pydantic field} of every setting, with [] for the entries of a list of sections."""
    names = {}
    for name, info in section.model_fields.items():
        inner = info.annotation
        if typing.get_origin(inner) is list and issubclass(typing.get_args(inner)[0], BaseModel):
            names[prefix + name] = info
            inner, name = typing.get_args(inner)[0], f"{name}[]"
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            names |= setting_names(inner, f"{prefix}{name}.")
        else:
            names[prefix + name] = info
    return names


def explain(error: ValidationError) -> str:
    """One line per wrong setting: dotted name, what is wrong, the nearest known name."""
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"]).replace(".0.", "[].")
        if item["type"] == "extra_forbidden":
            known = [*setting_names(), *Config.model_fields]
            same_leaf = [k for k in known if k.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
            (near,) = difflib.get_close_matches(name, same_leaf or known, n=1, cutoff=0.0)
            lines.append(f"{name}: unknown setting, did you mean {near}?")
        else:
            lines.append(f"{name}: {item['msg'].lower()}, found {item['input']!r}")
    return "; ".join(lines)


def settings_help() -> str:
    """Every setting with its default and meaning, for --help."""
    lines = ["settings (section.key=value, or in YAML):"]
    for name, info in setting_names().items():
        default = "required" if info.is_required() else f"default {info.default!r}"
        lines.append(f"  {name}  ({default})\n      {info.description}")
    return "\n".join(lines).replace("%", "%%")


def load_config(argv: list[str], description: str = "") -> Config:
    """Defaults < YAMLs of --config, in their order < section.key=value. ValueError names setting and fix."""
    parser = argparse.ArgumentParser(
        prog="train_rl.py",
        description=description,
        epilog=settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", type=Path, action="append", default=[],
        help="YAML file of settings that differ from the defaults; given again: over the one before",
    )  # fmt: skip
    overrides = {"nargs": "*", "metavar": "section.key=value", "help": "single settings, over the files'"}
    parser.add_argument("settings", **overrides)
    args = parser.parse_intermixed_args(argv)
    values: dict = {}
    for file in args.config:
        values = merge(values, read_yaml(file))
    for override in args.settings:
        name, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"{override!r}: expected section.key=value")
        try:
            value = yaml.load(text, Loader=StrictLoader)
        except (yaml.YAMLError, ValueError) as error:
            raise ValueError(f"{name}: {' '.join(str(error).split())}") from error
        for part in reversed(name.split(".")):
            value = {part: value}
        values = merge(values, value)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ValueError(explain(error)) from error
    check_config(config)
    return config
