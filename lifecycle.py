"""The work around the method: set-up, resume, evaluation, logging, saving, finishing.

train_rl.main() calls these functions in this order:

    set_up()                                  settings, data, engine, policy, or a checkpoint's state
    evaluation_is_due() ... log_evaluation()  held-out sets
    next_stage_if_due()                       hand-over to the next stage
    measure_rollout() ... log_step()          metrics of a step
    stop_reason(), save_if_due()              checkpoints, signals, the mismatch gate
    finish()                                  export, summary

A function marked Collective must be called by all ranks.
"""

import contextlib
import copy
import json
import math
import os
import resource
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import save_file
from tqdm import tqdm

import moe_model
from batch import Completion, Group, Request, Rollout, RolloutBatch, collate, verdicts_of
from configure import config_warnings, stage_configs, widest
from data.chat import end_of_turn, load_tokenizer
from data.history import PromptHistory
from data.prompts import OfflineScore, Prompt, prompt_sha
from data.references import describe, lines_of
from data.stages import Offers, Window, digest_of_offers, load_stages, offers_of, unite
from data.stream import EvalSets, LoadedSets, digest_of, leave_out, refuse_unknown_tokens, seed_of
from episodes import Interaction
from extras.base import Extra, Launch, active
from fp8 import check_fp8, fp8_refusal
from judges import build_judge, refuse_failing_judge, refuse_mute_judge
from memory_plan import (
    check_memory,
    choose_micro_batch,
    engine_settings,
    max_model_len,
    plan_memory,
    trained_counts,
    trainer_memory,
    with_setting,
    with_sleep_level,
)
from moe_model import num_experts_of
from plugins import SUFFIXES
from reward import RewardPool, Verdict, check_functions, impossible_references, score_of, start_pool
from rollout import RolloutEngine, SyncReport, check_driver, invalid_route, stops_of
from runtime.agreement import check_inputs_agree, check_ranks_agree, digests_of_input, wait_for_ranks
from runtime.checkpoint import (
    HashingWriter,
    TrainState,
    check_free_disk,
    check_run_dir_is_shared,
    find_checkpoint,
    lock_run_dir,
    prepare_run_dir,
    remove_unfinished,
    resumes_exactly,
    save_checkpoint,
    state_of,
    with_saved_choices,
    write_text,
    writing,
)
from runtime.checks import (
    check_routes,
    check_verdicts,
    mismatch_gate,
    refuse_nonfinite_weights,
    same_digest,
    say,
    warn_of_idle_steps,
    warn_of_unreadable_answers,
)
from runtime.launch import Signals, Stopped, connect
from runtime.machine import check_address, check_gpus, check_machine, device_of_rank, open_store
from runtime.memory import MemoryMeter, NodeMemory, node_memory, planned_rows, trainer_bytes
from runtime.metrics import (
    Clock,
    append_rows,
    console_line,
    effective_sample_size,
    log_metrics,
    reduce_metrics,
    rollout_metrics,
    sample_rows,
    schedule_metrics,
    straggler,
    time_left,
    turn_metrics,
    warn_once,
)
from runtime.schedule import from_all_ranks, from_rank_0, host_group
from runtime.stages import StagePosition, end_of_stage, place_of
from runtime.summary import figure, plot_curves, print_summary, write_summary
from runtime.tracking import MAX_SENT, check_trackers, send_texts, start_trackers
from runtime.watchdog import MARGIN_S, Watchdog
from settings import Config, HandOver, TrainSettings
from verifiers.kinds import ENVIRONMENT, parts_of


@dataclass
class Run:
    """A running job: everything that main() and its functions work with."""

    config: Config  # settings of the current stage
    run_config: Config  # settings of the run with all stages and without auto; without stages, config
    stage_configs: list[Config]  # settings of each stage
    offers: Offers  # prompts of the current stage
    stage_offers: list[Offers]  # prompts of each stage
    lock: IO | None  # lock of run.dir, held by rank 0 for the lifetime of the run
    accelerator: Accelerator
    clock: Clock
    watchdog: Watchdog
    state: TrainState
    history: PromptHistory
    queue: deque[Rollout]  # sampled, not trained on yet (rollout.lag)
    tokenizer: Any  # of transformers
    prompts: list[Prompt]  # the training set
    prompt_ids: list[list[int]]  # token ids of the training set
    eval_sets: EvalSets
    engine: RolloutEngine
    pool: RewardPool
    interaction: Interaction | None  # tools and environment; None without
    trainer: Any  # DeepSpeed's engine around the policy
    reference: Any  # the initial policy, for a KL penalty; or None
    extras: dict[str, Any]  # {name of an extra: its objects of the launch}
    judge: Any  # of judges.py; None without a judge
    generation_config: str | None  # text of generation_config.json, which may list more end-of-sequence ids
    signals: Signals
    progress: tqdm
    meter: MemoryMeter | None  # of the GPU's memory; None on CPUs

    @property
    def policy(self) -> moe_model.Policy:
        """Return the trained model without DeepSpeed's wrapper."""
        return self.trainer.module

    @property
    def rule(self) -> HandOver:
        """Return the rule that ends the current stage; a run without stages has an empty rule."""
        stages = self.run_config.stages
        return stages[self.state.stage.number].until if stages else HandOver()


# ============================================================================================================
# Set-up
# ============================================================================================================
def set_up(config: Config) -> Run | None:
    """Build a run from the start or from its newest checkpoint; None for a finished run. Collective."""
    accelerator, clock, watchdog = connect_ranks(config)
    for stage_config in stage_configs(config):
        check_ranks(stage_config, dist.get_world_size())
    lock, checkpoint, record = open_run_dir(config)
    state = state_of(record, config) if record else TrainState()
    resolved = with_date(with_sleep(with_dtypes(config, record)))
    if is_finished(resolved, checkpoint, state):
        report_finished(resolved, checkpoint, state)
        return None
    clock.total = state.seconds
    watchdog.follow(state, Path(config.run.dir))
    data = prepare_data(resolved, checkpoint, state, accelerator.device)
    launch = data.launch
    loaded = launch.loaded
    stage = state.stage.number
    evaluates = bool(loaded.eval_sets) and evaluation_is_due(state, launch.configs[stage])
    record_launch(config, record, data, resolved, evaluates)
    start_trackers(accelerator, resolved, state.step)
    with clock("setup"):
        models = build_engine_and_policy(resolved, data, accelerator.device, clock)
        history = PromptHistory.from_offline(data.offline_scores, launch.configs[0].rollout.group_size)
        if checkpoint:
            history = resume(checkpoint, models["trainer"], history, loaded.train, launch.offers, resolved)
    generation = data.model_dir / "generation_config.json"
    run = Run(
        config=launch.configs[stage], run_config=resolved, stage_configs=launch.configs,
        offers=launch.offers[stage], stage_offers=launch.offers, lock=lock, accelerator=accelerator,
        clock=clock, watchdog=watchdog, state=state, history=history, queue=deque(),
        tokenizer=launch.tokenizer,
        prompts=loaded.train, prompt_ids=loaded.train_ids, eval_sets=loaded.eval_sets, pool=data.pool,
        interaction=data.interaction, extras=launch.extras, signals=listen(resolved),
        generation_config=generation.read_text() if generation.is_file() else None,
        progress=progress_bar(resolved, state),
        **models,
    )  # fmt: skip
    if checkpoint:
        restore_waiting(run, checkpoint)
    return run


@dataclass
class LaunchData:
    """The data and workers of a launch, checked before an engine starts."""

    launch: Launch  # settings of the stages, tokenizer, prompts, state of the extras
    checkpoint: Path | None
    model_dir: Path
    ep_group: Any  # process group of the ranks that share the experts
    pool: RewardPool
    interaction: Interaction | None
    offline_scores: list[OfflineScore | None]


def prepare_data(
    config: Config, checkpoint: Path | None, state: TrainState, device: torch.device
) -> LaunchData:
    """Check model, memory and files, load the prompts, and start the reward workers. Collective."""
    has_base = any(extra.keeps_base for extra in active(config))
    weights = checkpoint / "model" if checkpoint and not has_base else config.model.path
    model_dir = moe_model.model_folder(weights)
    check_inputs_agree(input_files(stage_configs(config), model_dir))
    hf_config = moe_model.load_config(model_dir)
    ep_group = moe_model.create_expert_parallel_group(config.model.ep_size, num_experts_of(hf_config))
    node = None if torch.cuda.is_available() else node_memory(config.run.memory_gib)
    configs = with_micro_batches(stage_configs(config), hf_config, state, node)
    largest = widest(configs, torch.cuda.is_available())
    memory_line = check_sizes(largest, configs, hf_config, node)
    tokenizer = load_tokenizer(model_dir)
    pool = start_pool(config.reward, tokenizer, worker_log(config, "reward"))
    loaded, offline_scores, offers = load_data(configs, tokenizer, pool, checkpoint)
    check_inputs_agree(loaded.digests() | {"the prompts of stages": digest_of_offers(offers)})
    refuse_unknown_tokens(loaded, hf_config.vocab_size, model_dir)
    refuse_other_prompts(checkpoint, loaded.train, offers, config)
    check_fixed_models(largest, state)
    launch = Launch(largest, configs, hf_config, tokenizer, loaded, offers, state, max_model_len(largest))
    for extra in active(largest):
        extra.check(launch)
    interaction = start_interaction(configs[0], loaded, tokenizer, model_dir)
    announce(configs, hf_config, loaded, model_dir, tokenizer, device, memory_line)
    return LaunchData(launch, checkpoint, model_dir, ep_group, pool, interaction, offline_scores)


def input_files(configs: list[Config], model_dir: Path) -> dict[str, str]:
    """Return {setting and file: digest} of the files beside those of data.train and data.eval.

    configs: settings of each stage; model_dir: of the policy, which at a resume is in the checkpoint.
    """
    digests = digests_of_input("model.path", model_dir)
    if any(config.algorithm.kl_coef > 0 for config in configs):
        reference = moe_model.model_folder(configs[0].model.path)
        digests |= digests_of_input("model.path (reference)", reference)
    for config in configs:
        paths = {
            "reward.judge_path": config.reward.judge_path,
            "zero_variance.offline_scores": config.zero_variance.offline_scores,
        }
        for extra in active(config):
            paths |= extra.inputs(config)
        for setting, path in paths.items():
            digests |= digests_of_input(setting, Path(path)) if path else {}
    return digests


def build_engine_and_policy(
    config: Config, data: LaunchData, device: torch.device, clock: Clock
) -> dict[str, Any]:
    """Start the engine, and build judge, policy and reference, as fields of Run. Collective.

    A scalar judge is loaded first, because the engine takes the GPU memory that is free then.
    """
    launch = data.launch
    scalar_judge = load_judge(config) if config.reward.judge == "scalar" else None
    engine = start_engine(launch.config, launch.hf_config, data.model_dir)
    judge = scalar_judge or load_judge(config)
    dist.barrier()
    meter = MemoryMeter() if torch.cuda.is_available() else None
    extras = active(launch.config)
    trainer = build_trainer(config, extras, data.model_dir, data.ep_group, device, data.checkpoint)
    if meter:
        meter.watch(trainer)
        clock.on_end = meter.end_phase
    reference = build_reference(launch.config, trainer.module, data.ep_group, device)
    for extra in extras:
        extra.build(launch, data.ep_group, device)
    return {"engine": engine, "judge": judge, "trainer": trainer, "reference": reference, "meter": meter}


def connect_ranks(config: Config) -> tuple[Accelerator, Clock, Watchdog]:
    """Check this machine, connect and watch the ranks, and refuse ranks with different settings or code.

    Collective. A rank whose machine is unfit ends the ranks that wait for it, before anything is loaded.
    """
    check_trackers(config)
    dtypes = (config.model.dtype, config.rollout.dtype)
    has_bfloat16 = "bfloat16" in dtypes or "auto" in dtypes
    check_gpus()  # first, because a rank without a GPU of its own has no device to ask
    check_machine(has_bfloat16, fp8_refusal(config.rollout, device=device_of_rank()))
    check_driver()
    check_address()
    wait_for_ranks(config.run.warn_s, config.run.timeout_s)
    wait_s = setup_timeout_s(config)
    on_gpu = torch.cuda.is_available()
    connect("nccl" if on_gpu else "gloo", timedelta(seconds=wait_s + MARGIN_S))
    accelerator = Accelerator(
        cpu=not on_gpu, log_with=config.run.trackers or None, project_dir=config.run.dir
    )
    clock = Clock({})
    watchdog = Watchdog(clock, config.run.warn_s, config.run.timeout_s, wait_s).start()
    moe_model.init_deepspeed()
    host_group()  # before set_group_timeouts()
    if warning := open_store():
        say(f"warning: {warning}")
    check_ranks_agree(config)
    set_seed(config.train.seed)
    return accelerator, clock, watchdog


# Seconds that the set-up may take in addition to run.timeout_s if FP8 kernels are compiled. [ours: kernels of
# FlashInfer for experts take more than ten minutes, and the ranks of a node wait for each other's compiler]
COMPILE_S = 3600.0


def setup_timeout_s(config: Config) -> float:
    """Return the seconds that a rank may wait for another rank until the set-up ends; then run.timeout_s.

    With rollout.fp8 on, vLLM compiles kernels at the first start and keeps them in ~/.cache.
    """
    compiles = config.rollout.fp8 == "on" and torch.cuda.is_available()
    return config.run.timeout_s + (COMPILE_S if compiles else 0.0)


def check_ranks(config: Config, world_size: int) -> None:
    """Raise ValueError if the settings do not fit the number of ranks."""
    prompts_per_step = config.rollout.prompts_per_step
    num_minibatches = config.train.minibatches_per_step
    if prompts_per_step % (world_size * num_minibatches):
        raise ValueError(
            f"rollout.prompts_per_step {prompts_per_step} must be a multiple of ranks x "
            f"train.minibatches_per_step ({world_size} x {num_minibatches})"
        )
    if world_size % config.rollout.tensor_parallel:
        raise ValueError(
            f"rollout.tensor_parallel {config.rollout.tensor_parallel} must divide the number of ranks, "
            f"{world_size}"
        )


def with_micro_batches(
    configs: list[Config], hf_config, state: TrainState, node: NodeMemory | None
) -> list[Config]:
    """Fill in train.micro_batch_tokens in the stages in which it is null, on CPUs; unchanged on GPUs.

    The size of a micro-batch changes the order of sums. An exact resume therefore takes the size that the
    first launch has chosen, which is in `state`, also on a machine with another amount of memory.
    """
    is_open = [config.train.micro_batch_tokens is None for config in configs]
    if node is None or not any(is_open):
        return configs
    if state.micro_batch_tokens is None:
        largest = widest(configs, torch.cuda.is_available())
        state.micro_batch_tokens = choose_micro_batch(largest, hf_config, dist.get_world_size(), node)
    return [
        with_setting(config, "train.micro_batch_tokens", state.micro_batch_tokens) if is_open_here else config
        for config, is_open_here in zip(configs, is_open)
    ]


def check_sizes(largest: Config, configs: list[Config], hf_config, node: NodeMemory | None) -> str:
    """Return the line about the memory; ValueError if model, memory or disk refuse the settings. Collective.

    largest: settings with the largest sizes of all stages; configs: settings of each stage.
    """
    for stage_config in (largest, *configs):
        check_model(stage_config, hf_config)
    memory_line = check_memory(largest, hf_config, dist.get_world_size(), node)
    num_bytes = checkpoint_bytes(trained_counts(largest, hf_config), largest.model.dtype)
    check_free_disk(Path(largest.run.dir), num_bytes, max_checkpoints(largest))
    return memory_line


def max_checkpoints(config: Config) -> int:
    """Return how many checkpoints a run holds at a time: a new one, and checkpoint.keep older ones."""
    every = config.checkpoint.every or config.train.num_steps  # 0: only at the end
    return min(config.checkpoint.keep + 1, math.ceil(config.train.num_steps / every))


def checkpoint_bytes(trained: moe_model.ParameterCounts, dtype: str) -> int:
    """Return the size of a checkpoint: the trained weights, in float32 as well, and AdamW's two averages.

    dtype: of the policy. The remaining files, for example the tokenizer's, are small.
    """
    itemsize = getattr(torch, dtype).itemsize
    return sum(trained) * (itemsize + 4 + 8)


def check_model(config: Config, hf_config) -> None:
    """Raise ValueError if the settings do not fit the model."""
    context = max_model_len(config)
    if context > hf_config.max_position_embeddings:
        raise ValueError(
            "rollout.max_prompt_tokens + the larger max_new_tokens of rollout and eval, each the largest of "
            f"all stages, is {context}, but the model's context is {hf_config.max_position_embeddings}"
        )
    if hf_config.model_type in ("qwen3", "qwen3_moe") and hf_config.attention_bias:
        raise ValueError(
            "model.path: attention_bias is true, but vLLM's Qwen3 has none in o_proj: set it false"
        )
    check_fp8(config.rollout, hf_config)
    for extra in active(config):
        extra.check_model(config, hf_config)
    replay = config.algorithm.router_replay
    if replay != "off" and num_experts_of(hf_config) == 0:
        raise ValueError(f"algorithm.router_replay {replay}: the model is dense and has no router; set off")


# ---- judge and reference ----
def check_fixed_models(config: Config, state: TrainState) -> None:
    """Raise ValueError if judge or reference are unfit, or differ from those of the checkpoint."""
    reward = config.reward
    refuse_mute_judge(reward.judge, reward.judge_path, reward.judge_chat_template_args)
    refuse_failing_judge(reward.judge, reward.judge_path, reward.judge_template)
    if reward.judge_path:
        state.judge = same_digest(config, "reward.judge_path", Path(reward.judge_path), state.judge)
    if config.algorithm.kl_coef > 0:  # the reference is read from model.path at every launch
        folder = moe_model.model_folder(config.model.path)
        state.reference = same_digest(config, "model.path", folder, state.reference)


def build_trainer(
    config: Config, extras: list[Extra], model_dir: Path, ep_group, device, checkpoint: Path | None = None
) -> Any:
    """Build the policy and DeepSpeed's engine around it. Collective."""
    policy = moe_model.build_policy(config.model, model_dir, ep_group, device)
    refuse_nonfinite_weights(policy, f"model.path: {model_dir}", "take a model whose weights are finite")
    for extra in extras:
        extra.adapt(policy, config)
        if checkpoint:
            extra.load(policy, checkpoint)
    trainer = moe_model.deepspeed_engine(policy, config.train)
    moe_model.set_group_timeouts(config.run.timeout_s + MARGIN_S)
    return trainer


def build_reference(config: Config, policy: moe_model.Policy, ep_group, device: torch.device) -> Any:
    """Return the initial policy, the reference of a KL penalty, if there is one. Collective."""
    if config.algorithm.kl_coef == 0:
        return None
    for reference in (extra.reference(policy) for extra in active(config)):
        if reference is not None:
            return reference
    return moe_model.build_policy(config.model, config.model.path, ep_group, device)


# ---- data ----
def load_data(
    configs: list[Config], tokenizer, pool: RewardPool, checkpoint: Path | None
) -> tuple[LoadedSets, list[OfflineScore | None], list[Offers]]:
    """Load the sets of a run, offline scores of the training prompts, and each stage's offers. Collective.

    configs: settings of each stage. Rows whose reference answer cannot be scored are left out;
    run.dir/dropped_rows.jsonl lists them. ValueError if the data do not fit the settings.
    """
    config = configs[0]
    stages = config.stages
    places = [place_of(stages, number) for number in range(len(stages))] or [""]
    functions = config.reward.functions
    data = [stage_config.data for stage_config in configs]
    max_tokens = [stage_config.rollout.max_prompt_tokens for stage_config in configs]
    sets = load_stages(data, max_tokens, tokenizer, functions, places)
    loaded = unite(sets)
    rows = [(prompt.kind, prompt.answer, prompt.fields) for prompt in loaded.everyone()]
    sources = [source for of_stage in data for source in (*of_stage.train, *of_stage.eval)]
    kinds = [source.kind for source in sources if source.kind]
    loaded.notes += check_functions([*functions, *kinds], rows, config.reward)
    parts = {name for prompt in loaded.train for _, name in parts_of(prompt.kind)}
    for part in {stage_config.zero_variance.part for stage_config in configs} - {None, *parts}:
        raise ValueError(
            f"zero_variance.part: no prompt has the part {part!r}; choose from {', '.join(sorted(parts))}"
        )
    drop_impossible(loaded, pool, config, checkpoint)
    windows = [
        Window(c.zero_variance.offline_scores, c.zero_variance.offline_pass_rate, c.reward.binary, c.rollout)
        for c in configs
    ]
    offers, scores = offers_of(loaded, sets, windows, places)
    for stage, of_stage in zip(stages, offers):
        loaded.notes.append(f"stage {stage.name}: {len(of_stage.indices):,} training prompts")
    return loaded, scores, offers


def start_interaction(config: Config, loaded: LoadedSets, tokenizer, model_dir: Path) -> Interaction | None:
    """Start the workers of tools and environment, if there are any; ValueError names what is unfit."""
    prompts = loaded.everyone()
    of_environment = [prompt for prompt in prompts if prompt.kind == ENVIRONMENT]
    if of_environment and config.data.environment is None:
        raise ValueError(
            f"kind {ENVIRONMENT} of {of_environment[0].source}: the score is the sum of an environment's "
            "rewards; name the environment in data.environment"
        )
    if not config.has_turns:
        return None
    stop_ids, _ = stops_of(model_dir, tokenizer, config.rollout.stop)
    return Interaction(config, tokenizer, stop_ids, prompts, worker_log(config, "tool"))


def worker_log(config: Config, name: str) -> Path:
    """Return the file for the output of this rank's workers, for example run.dir/reward_workers_0.log."""
    return Path(config.run.dir) / f"{name}_workers_{dist.get_rank()}.log"


def drop_impossible(loaded: LoadedSets, pool: RewardPool, config: Config, checkpoint: Path | None) -> None:
    """Leave out prompts whose reference answer is wrong by their own verifier. Collective.

    Each rank checks a share of the prompts with its reward workers. A resumed run reuses the list of dropped
    training prompts from its first launch. If the other prompts are those of the checkpoint, only held-out
    sets are checked again, because these may have changed.
    """
    file = Path(config.run.dir) / "dropped_rows.jsonl"
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    rows: list[dict] = []
    if checkpoint:
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        leave_out(loaded, {(r["prompt_sha"], r.get("kind")): r["detail"] for r in rows if "prompt_sha" in r})
    is_resumed = checkpoint and prompts_of_checkpoint(checkpoint) == digest_of(loaded.train)
    held_out = [prompt for prompts, _ in loaded.eval_sets.values() for prompt in prompts]
    local_prompts = (held_out if is_resumed else loaded.everyone())[rank::world_size]
    references = [(prompt.kind, prompt.answer, prompt.fields, prompt.prefix) for prompt in local_prompts]
    comparisons: dict[int, tuple[str, str]] = {}
    impossible = impossible_references(pool, references, warn_once, comparisons)
    reasons = {
        (prompt_sha(local_prompts[i]), local_prompts[i].kind): reason for i, reason in impossible.items()
    }
    gathered = from_all_ranks(reasons)
    leave_out(loaded, {name: reason for of_rank in gathered for name, reason in of_rank.items()})
    compared = [(local_prompts[i], *how) for i, how in comparisons.items()]
    describe_references(loaded, compared, Path(config.run.dir) / "references.json", bool(is_resumed))
    if loaded.dropped:
        loaded.notes.append(f"{file} lists the rows left out")


def write_dropped(file: Path, rows: list[dict]) -> None:
    """Write dropped_rows.jsonl, which an exact resume needs; no file without rows."""
    lines = dict.fromkeys(map(json.dumps, rows))
    if lines:
        write_text(file, "".join(f"{line}\n" for line in lines))
    else:
        file.unlink(missing_ok=True)


def prompts_of_checkpoint(checkpoint: Path) -> str:
    """Return the digest of the training prompts of a checkpoint."""
    return torch.load(checkpoint / "history.pt", map_location="cpu", weights_only=True)["prompts"]


def describe_references(
    loaded: LoadedSets, compared: list[tuple[Prompt, str, str]], file: Path, is_resumed: bool
) -> None:
    """Add notes about the references of each set, and write the file references.json. Collective.

    compared: this rank's prompts with the comparison and the value of their references. A resume checks the
    held-out sets only, and keeps the training sets of the file.
    """
    held_out = {id(prompt): name for name, (prompts, _) in loaded.eval_sets.items() for prompt in prompts}
    counts = Counter((held_out.get(id(prompt)), prompt.source, *how) for prompt, *how in compared)
    gathered: list[Counter] = from_all_ranks(counts)
    if dist.get_rank() != 0:
        return
    reports = json.loads(file.read_text()) if is_resumed and file.is_file() else {}
    reports = {name: report for name, report in reports.items() if not name.startswith("eval/")}
    of_set: dict[str, Counter] = {}
    for (held_out_set, source, *how), count in sum(gathered, Counter()).items():
        name = source if held_out_set is None else f"eval/{held_out_set}"
        of_set.setdefault(name, Counter())[tuple(how)] += count
    for name, references in of_set.items():
        reports[name] = describe(references)
        loaded.notes += lines_of(name, reports[name])
    write_text(file, json.dumps(reports, indent=1))


# ---- the folder of the run ----
def open_run_dir(config: Config) -> tuple[IO | None, Path | None, dict | None]:
    """Lock run.dir. Collective.

    Returns the lock (on rank 0), and the folder and the state.json of the newest checkpoint.
    """
    run_dir = Path(config.run.dir)
    lock = lock_run_dir(run_dir) if dist.get_rank() == 0 else None
    if lock:
        remove_unfinished(run_dir / "checkpoints")  # their room may be all that is left on the disk
    dist.barrier()
    check_run_dir_is_shared(run_dir)
    return lock, *(find_checkpoint(config) or (None, None))


def record_launch(
    config: Config, record: dict | None, data: LaunchData, resolved: Config, evaluates: bool
) -> None:
    """Write the record of a launch that has passed all checks; a refused launch leaves the earlier one.

    config, resolved: the settings as written, which may say auto, and without auto. record, evaluates: see
    prepare_run_dir(). versions.json gets the digests of the loaded prompts, {name of the set: digest}, the
    dtypes of policy and engine, the products {setting that says auto: {dtype: GFLOP/s}}, and the date that
    chat templates write.
    """
    if dist.get_rank() == 0:
        run_dir = Path(config.run.dir)
        loaded = data.launch.loaded
        digests = {
            name or "train": digest_of(prompts)[:16] for name, (prompts, _) in loaded.by_name().items()
        }
        facts: dict[str, object] = {"dtype": resolved.model.dtype, "rollout_dtype": resolved.rollout.dtype}
        facts |= {"data": digests, "prompt_date": resolved.data.date, "products": measured_products(config)}
        models = {} if record else {"weights": str(data.model_dir)}  # a resume begins with the checkpoint's
        prepare_run_dir(run_dir, config, record, evaluates, models | data.launch.models(), facts)
        write_dropped(run_dir / "dropped_rows.jsonl", loaded.dropped)


def measured_products(config: Config) -> dict[str, dict[str, float]]:
    """Return {setting: {dtype: GFLOP/s}} of the dtypes that this processor chooses; {} on GPUs."""
    rows = {"model.dtype": moe_model.TRAINING_ROWS, "rollout.dtype": moe_model.DECODING_ROWS}
    is_auto = {"model.dtype": config.model.dtype == "auto", "rollout.dtype": config.rollout.dtype == "auto"}
    is_auto["rollout.dtype"] &= config.rollout.fp8 != "on"
    on_gpu = torch.cuda.is_available()
    return {name: moe_model.product_rates(rows[name]) for name in rows if is_auto[name] and not on_gpu}


def with_dtypes(config: Config, record: dict | None) -> Config:
    """Return the settings with dtypes in place of model.dtype and rollout.dtype auto; print them. Collective.

    record: the state.json of the checkpoint to resume from, whose dtypes the run keeps. None at the first
    launch: rank 0 then chooses for all ranks, because nodes may have different processors.
    """
    on_gpu = torch.cuda.is_available()
    choice = None
    if dist.get_rank() == 0:
        policy = moe_model.policy_dtype(config.model, on_gpu)
        engine = moe_model.engine_dtype(config.rollout, on_gpu)
        choice = (policy, engine, measured_products(config))
    policy, engine, products = from_rank_0(choice)
    resolved = with_saved_choices(config, record) if record else config
    for name, section, dtype in (
        ("model.dtype", config.model, policy),
        ("rollout.dtype", config.rollout, engine),
    ):
        if section.dtype != "auto":
            continue
        reason = "for a GPU" if on_gpu else "for rollout.fp8 on"
        if name in products:
            rates = ", ".join(f"{key} {rate:.0f}" for key, rate in products[name].items())
            reason = f"GFLOP/s of one core: {rates}"
        kept = getattr(resolved, name.partition(".")[0]).dtype
        if kept == "auto":
            resolved = with_setting(resolved, name, dtype)
            say(f"{name} auto: {dtype} ({reason})")
        else:
            say(f"{name} auto: {kept} (as in the checkpoint; a new run would take {dtype}, {reason})")
    return resolved


def with_date(config: Config) -> Config:
    """Return the settings with rank 0's date in place of data.date null. Collective."""
    today = from_rank_0(datetime.now().date().isoformat())
    return with_setting(config, "data.date", config.data.date or today)


def with_sleep(config: Config) -> Config:
    """Return the settings with a number in place of rollout.sleep_level null; print the number on GPUs.

    Checkpoints record the number. A resume chooses anew, because the level of sleep changes no result.
    """
    on_gpu = torch.cuda.is_available()
    resolved = with_sleep_level(config, on_gpu)
    if on_gpu and config.rollout.sleep_level is None:
        say(f"rollout.sleep_level null: {resolved.rollout.sleep_level} (for a GPU)")
    return resolved


def is_finished(config: Config, checkpoint: Path | None, state: TrainState) -> bool:
    """Tell whether run.dir contains a finished run that asks for no further steps."""
    has_summary = (Path(config.run.dir) / "summary.json").is_file()
    return checkpoint is not None and state.is_last(config) and has_summary


def refuse_other_prompts(
    checkpoint: Path | None, prompts: list[Prompt], offers: list[Offers], config: Config
) -> None:
    """Raise ValueError if an exact resume (checkpoint.resume=auto) would train on other prompts."""
    if checkpoint is None:
        return
    is_exact = resumes_exactly(config, checkpoint) and config.checkpoint.resume == "auto"
    if is_exact and not has_same_prompts(checkpoint, prompts, offers, config):
        raise ValueError(
            f"{checkpoint} was trained on other prompts than the settings select: a file of data.train, "
            "zero_variance.offline_scores or dropped_rows.jsonl of run.dir has changed. Restore it, or "
            "resume from the weights alone with checkpoint.resume=weights"
        )


def has_same_prompts(checkpoint: Path, prompts: list[Prompt], offers: list[Offers], config: Config) -> bool:
    """Tell whether a checkpoint has these prompts, and with the same list of stages these of each stage."""
    saved = torch.load(checkpoint / "history.pt", map_location="cpu", weights_only=True)
    stages = json.loads((checkpoint / "state.json").read_text())["config"].get("stages")
    digests = {"prompts": digest_of(prompts)}
    if stages == config.model_dump(mode="json")["stages"]:
        digests["offers"] = digest_of_offers(offers)
    return all(saved.get(name, digest) == digest for name, digest in digests.items())


def report_finished(config: Config, checkpoint: Path, state: TrainState) -> None:
    """Say that a run is finished and how to get further steps, and print its summary."""
    limit = "num_steps" if state.step >= config.train.num_steps else "max_generated_tokens"
    say(f"{checkpoint}: this run is finished; raise train.{limit} to resume, or choose another run.dir")
    if dist.get_rank() == 0:
        print_summary(Path(config.run.dir))


def resume(
    checkpoint: Path, trainer, history: PromptHistory, prompts: list[Prompt], offers: list, config: Config
) -> PromptHistory:
    """Load the parts of a checkpoint besides the weights; return the record of the prompts."""
    saved = torch.load(checkpoint / "history.pt", map_location="cpu", weights_only=True)
    same_prompts = saved.pop("prompts") == digest_of(prompts)
    saved.pop("offers", None)  # missing in checkpoints of older versions
    is_exact = resumes_exactly(config, checkpoint) and has_same_prompts(checkpoint, prompts, offers, config)
    dropped = "" if same_prompts else "; the record of other prompts is dropped"
    fresh = "" if is_exact else "; the optimizer is fresh (checkpoint.resume=weights)"
    say(f"resumed from {checkpoint}{dropped}{fresh}")
    if is_exact:
        load_shard(file_of_rank(checkpoint), trainer)
    return PromptHistory(**saved) if same_prompts else history


def file_of_rank(checkpoint: Path) -> Path:
    """Return this rank's file of a checkpoint."""
    return checkpoint / f"rank_{dist.get_rank():05d}.pt"


def restore_waiting(run: Run, checkpoint: Path) -> None:
    """Take over the rollouts and the state of extras that wait for later steps in a checkpoint.

    Without an exact resume they are dropped, because a fresh optimizer starts a new course.
    """
    if not resumes_exactly(run.run_config, checkpoint):
        return
    if not has_same_prompts(checkpoint, run.prompts, run.stage_offers, run.run_config):
        return
    shard = torch.load(file_of_rank(checkpoint), map_location="cpu", weights_only=True, mmap=True)
    waiting = copy.deepcopy(shard.get("waiting", {}))  # not in the file, which may be deleted
    run.queue.extend(map(Rollout.restored, waiting.get("queue", [])))
    for extra in active(run.config):
        if (values := waiting.get("extras", {}).get(extra.name)) is not None:
            extra.restore_rank_state(run, values)


def load_shard(file: Path, trainer) -> None:
    """Restore the optimizer and the random numbers of this rank from the rank's file of a checkpoint.

    The file is mapped, because reading it whole would double the memory of the optimizer: for Qwen3-30B-A3B
    on eight GPUs, 46 GB per rank. Tensors that AdamW then holds on the host are copied one by one, so that
    the run holds no file of a checkpoint that may be deleted.
    """
    shard = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    moe_model.load_optimizer_shard(trainer, shard["optimizer"])
    for values in trainer.optimizer.optimizer.state.values():
        on_host = {name: value for name, value in values.items() if value.device.type == "cpu"}
        values.update({name: value.clone() for name, value in on_host.items()})
    torch.set_rng_state(shard["torch_rng"])


# ---- judge, engine, trackers, signals ----
def load_judge(config: Config):
    """Load the judge, or None if reward.judge is none. A generative judge runs in a second engine."""
    settings = config.reward
    return build_judge(
        settings.judge, settings.judge_path, margin=settings.judge_margin, template=settings.judge_template,
        template_args=settings.judge_chat_template_args, date=config.data.date,
    )  # fmt: skip


def start_engine(config: Config, hf_config, model_dir: Path) -> RolloutEngine:
    """Start vLLM in the GPU memory that policy, optimizer and update leave free, and print its capacity."""
    parts = trainer_memory(config, hf_config, dist.get_world_size())
    reserved = trainer_bytes(parts, engine_sleeps=config.rollout.sleep_level > 0)
    timeout_s = setup_timeout_s(config) + MARGIN_S
    settings = engine_settings(config.rollout, hf_config, max_model_len(config))
    options: dict[str, Any] = {}
    for extra in active(config):
        options |= extra.engine_options(config)
    engine = RolloutEngine(model_dir, max_model_len(config), settings, reserved, timeout_s, options)
    say(engine.describe())
    return engine


def announce(
    configs: list[Config], hf_config, loaded: LoadedSets, model_dir: Path, tokenizer, device: torch.device,
    memory_line: str,
) -> None:  # fmt: skip
    """Print warnings about the settings of the stages, and the composition and the memory of the run."""
    config = configs[0]
    warnings = [warning for stage_config in configs for warning in config_warnings(stage_config)]
    for line in [*(f"warning: {warning}" for warning in dict.fromkeys(warnings)), *loaded.notes]:
        say(line)
    stop_ids, stop_texts = stops_of(model_dir, tokenizer, config.rollout.stop)
    tokens = [f"{tokenizer.convert_ids_to_tokens(i) or 'a token without a text'} ({i})" for i in stop_ids]
    say(f"a completion ends at {', '.join([*tokens, *map(repr, stop_texts)]) or 'its length limit only'}")
    chat = next((prompt.messages for prompt in loaded.everyone() if prompt.is_chat), None)
    end = end_of_turn(tokenizer, chat) if chat else ""
    if end and tokenizer.convert_tokens_to_ids(end) not in stop_ids:
        say(f"warning: the chat template's end of a turn, {end}, ends no completion: add it to rollout.stop")
    num_held_out = sum(len(prompts) for prompts, _ in loaded.eval_sets.values())
    kernel = moe_model.choose_logprob_kernel(config.model, hf_config, device)
    experts = ", experts triton" if config.model.expert_kernel == "triton" else ""
    say(
        f"{len(loaded.train)} training prompts, {num_held_out} held out; {dist.get_world_size()} ranks, "
        f"expert parallel {config.model.ep_size}, ZeRO {config.train.zero_stage}, policy "
        f"{config.model.dtype}, log-probabilities {kernel}{experts}, engine {config.rollout.dtype}; "
        "starting vLLM and DeepSpeed"
    )
    most_tokens = max(stage.train.tokens_per_forward(device.type == "cuda") for stage in configs)
    say(f"{memory_line}; micro-batches of {most_tokens:,} tokens")


def progress_bar(config: Config, state: TrainState) -> tqdm:
    """Return the progress bar over the steps of the run, visible on rank 0 only."""
    return tqdm(
        total=config.train.num_steps, initial=state.step, desc="train", unit="step",
        disable=None if dist.get_rank() == 0 else True, mininterval=0.5,
    )  # fmt: skip


def listen(config: Config) -> Signals:
    """Return the record of received signals, with handlers installed if run.on_signal is checkpoint."""
    signals = Signals()
    if config.run.on_signal == "checkpoint":
        signals.listen()
    return signals


# ============================================================================================================
# Evaluation on held-out sets
# ============================================================================================================
def evaluation_is_due(state: TrainState, config: Config) -> bool:
    """Tell whether to evaluate the policy of this step: the first, every eval.every steps, the last."""
    every = config.eval.every
    is_scheduled = state.step == 0 or (every > 0 and state.step % every == 0)
    return state.evaluated_step < state.step and (is_scheduled or state.is_last(config))


def evaluation_requests(eval_sets: EvalSets, config: Config) -> tuple[list[Request], list[Prompt]]:
    """Return this rank's requests of an evaluation, and the prompt of each.

    The order is set by set and prompt by prompt; a rank takes every world_size-th prompt of a set. Each
    prompt has one greedy request, then k samples. Samples use the same random numbers at each evaluation.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    max_new_tokens = config.eval.max_new_tokens or config.rollout.max_new_tokens
    temperatures = [0.0] + [config.rollout.temperature] * config.eval.num_samples
    requests = []
    request_prompts = []
    for name, (prompts, prompt_ids) in eval_sets.items():
        for i in range(rank, len(prompts), world_size):
            for sample, temperature in enumerate(temperatures):
                seed = seed_of(config.train.seed, "eval", name, i, sample)
                group_seed = seed_of(config.train.seed, "eval", name, i)
                requests.append(
                    Request(prompt_ids[i], seed, temperature, max_new_tokens, group_seed=group_seed)
                )
                request_prompts.append(prompts[i])
    return requests, request_prompts


def places_of_sets(eval_sets: EvalSets, k: int) -> Iterator[tuple[str, range, slice]]:
    """Yield name, indices of this rank's prompts, and place of their 1 + k requests each, set by set."""
    start = 0
    for name, (prompts, _) in eval_sets.items():
        indices = range(dist.get_rank(), len(prompts), dist.get_world_size())
        end = start + len(indices) * (1 + k)
        yield name, indices, slice(start, end)
        start = end


def groups_of(prompts: list[Prompt], indices: range) -> dict[str, list[int]]:
    """Return {"difficulty_2": its rows among this rank's prompts, "task_lcm": ...}: 12 levels, 64 tasks."""
    levels = sorted({p.difficulty for p in prompts if p.difficulty is not None})[:12]
    tasks = sorted({p.task for p in prompts if p.task})[:64]
    of_level = [("difficulty", level, f"difficulty_{level:g}") for level in levels]
    of_task = [("task", task, f"task_{task.replace('/', '_')}") for task in tasks]
    groups: dict[str, list[int]] = {}
    for name, value, label in (*of_level, *of_task):
        # An end such as _max would choose another reduction, see reduce_metrics().
        while label in groups or label.rpartition("_")[2] in SUFFIXES:
            label += "_"
        groups[label] = [row for row, i in enumerate(indices) if getattr(prompts[i], name) == value]
    return groups


def evaluation_metrics(
    completions: list[Completion], verdicts: list[Verdict], eval_sets: EvalSets, config: Config
) -> dict[str, float]:
    """Return accuracy (mean greedy score), avg@k and pass@k (at least one right) of each set. Collective.

    completions, verdicts: of the requests by evaluation_requests().
    """
    k = config.eval.num_samples
    check_verdicts(verdicts, config.reward.max_failed_frac, "evaluation")
    sums: dict[str, tuple[float, float]] = {}
    for name, indices, place in places_of_sets(eval_sets, k):
        prompts, _ = eval_sets[name]
        set_completions = completions[place]
        set_verdicts = verdicts[place]
        scores = torch.tensor([score_of(verdict, config.reward.binary) for verdict in set_verdicts])
        scores = scores.view(-1, 1 + k)  # [prompts, 1 + k]
        sums[f"eval/{name}/accuracy"] = (scores[:, 0].sum().item(), len(indices))
        if k:
            right = torch.tensor([verdict.status == "ok" for verdict in set_verdicts])
            right = right.view(-1, 1 + k)[:, 1:]  # [prompts, k]
            sums[f"eval/{name}/avg_at_{k}"] = (scores[:, 1:].mean(1).sum().item(), len(indices))
            sums[f"eval/{name}/pass_at_{k}"] = (right.any(1).sum().item(), len(indices))
        for group, rows in groups_of(prompts, indices).items():
            greedy = [scores[row, 0].item() for row in rows]
            sums[f"eval/{name}/accuracy_{group}"] = (sum(greedy), len(greedy))
        num_tokens = sum(completion.num_sampled for completion in set_completions)
        sums[f"eval/{name}/mean_tokens"] = (num_tokens, len(set_verdicts))
        num_failed = sum(verdict.failed for verdict in set_verdicts)
        sums[f"eval/{name}/failed_frac"] = (num_failed, len(set_verdicts))
        if config.has_turns:
            of_turns = turn_metrics(set_completions).items()
            sums |= {f"eval/{name}/{metric}": value for metric, value in of_turns}
    return reduce_metrics(sums)


def prompt_outcomes(verdicts: list[Verdict], eval_sets: EvalSets, config: Config) -> dict[str, list[float]]:
    """Return the greedy score and the mean score of k samples of each held-out prompt, in order. Collective.

    verdicts: of the requests by evaluation_requests(). The mean of a list is the figure of
    evaluation_metrics() with the same name, for example eval/additions/avg_at_8.
    """
    k = config.eval.num_samples
    figures: dict[str, dict[int, float]] = {}
    for name, indices, place in places_of_sets(eval_sets, k):
        scores = torch.tensor([score_of(verdict, config.reward.binary) for verdict in verdicts[place]])
        scores = scores.view(-1, 1 + k)  # [prompts, 1 + k]
        figures[f"eval/{name}/accuracy"] = dict(zip(indices, scores[:, 0].tolist()))
        if k:
            figures[f"eval/{name}/avg_at_{k}"] = dict(zip(indices, scores[:, 1:].mean(1).tolist()))
    gathered: list[dict] = from_all_ranks(figures)
    pairs = {name: sorted(pair for part in gathered for pair in part[name].items()) for name in figures}
    return {name: [round(value, 4) for _, value in of_name] for name, of_name in pairs.items()}


def evaluation_texts(run: Run, completions: list[Completion], verdicts: list[Verdict]) -> list[dict]:
    """Return rows of the greedy completions of the first eval.num_texts prompts of each set. Collective."""
    rows = []
    for name, indices, place in places_of_sets(run.eval_sets, run.config.eval.num_samples):
        stride = 1 + run.config.eval.num_samples
        for i, completion, verdict in zip(indices, completions[place][::stride], verdicts[place][::stride]):
            if i < run.config.eval.num_texts:
                prompt = run.eval_sets[name][0][i]
                text = run.tokenizer.decode(completion.token_ids)
                row = {
                    "step": run.state.step,
                    "source": name,
                    "prompt_index": i,
                    "sample": 0,
                    "temperature": 0,
                }
                row |= {key: getattr(prompt, key) for key in ("answer", "kind", "difficulty")}
                row |= {"prompt": prompt.text, "completion": prompt.prefix + text, **asdict(verdict)}
                length = len(completion.token_ids)
                rows.append(row | {"num_tokens": length, "finish_reason": completion.finish_reason})
    return sorted(sum(from_all_ranks(rows), []), key=lambda row: (row["source"], row["prompt_index"]))


def conditions_of(config: Config) -> str:
    """Return the settings of an evaluation that change its figures; a resume may have changed them."""
    max_new_tokens = config.eval.max_new_tokens or config.rollout.max_new_tokens
    rollout = config.rollout
    turns = (rollout.max_turns, config.data.tools, config.data.environment)
    return f"{max_new_tokens, rollout.temperature, rollout.stop, config.reward.binary, *turns}"


def log_evaluation(run: Run, completions: list[Completion]) -> None:
    """Record and log the result of an evaluation; outcomes.json holds it prompt by prompt. Collective."""
    verdicts = verdicts_of(completions)
    run.pool.latencies = []  # only latencies of training are reported
    metrics = evaluation_metrics(completions, verdicts, run.eval_sets, run.config)
    conditions = conditions_of(run.config)
    sets = {name: f"{digest_of(prompts)} {conditions}" for name, (prompts, _) in run.eval_sets.items()}
    run.state.add_evaluation(metrics, run.rule, sets)
    outcomes = prompt_outcomes(verdicts, run.eval_sets, run.config)
    texts = evaluation_texts(run, completions, verdicts)
    if dist.get_rank() == 0:
        file = Path(run.config.run.dir) / "outcomes.json"
        with writing(file):
            file.write_text(json.dumps({"step": run.state.step, "outcomes": outcomes}))
        append_rows(file.with_name("eval_samples.jsonl"), texts)
        send_texts(run.accelerator, texts[:MAX_SENT], "evaluation", run.state.step)
    log_metrics(run.accelerator, run.config, run.state, metrics)


# ============================================================================================================
# Stages
# ============================================================================================================
def next_stage_if_due(run: Run) -> Config:
    """Switch to the next stage if the current one is over; return the settings of the current stage.

    The record of prompts, the optimizer and all counters carry over. A stage with other prompts starts a new
    stream of prompts; a stage with the same prompts continues the stream.
    """
    state = run.state
    position = state.stage
    reason = end_of_stage(position, run.rule)
    if reason is None:
        return run.config
    number = position.number + 1
    same_prompts = run.stage_offers[number] == run.stage_offers[position.number]
    first_prompt = position.first_prompt if same_prompts else state.consumed_prompts
    state.stage = StagePosition(number, first_prompt=first_prompt)
    run.config = run.stage_configs[number]
    run.offers = run.stage_offers[number]
    ended = place_of(run.run_config.stages, number - 1)
    begun = place_of(run.run_config.stages, number)
    say(f"step {state.step}: {ended} ends ({reason}); {begun} begins")
    return run.config


# ============================================================================================================
# Update
# ============================================================================================================
@contextlib.contextmanager
def threads_of_step(settings: TrainSettings) -> Iterator[None]:
    """Give this rank's share of the node's cores to an optimizer step on the host (train.offload_optimizer).

    Ranks otherwise compute with one thread (OMP_NUM_THREADS=1), because the rest of a step runs on the GPU.
    Example: 8 ranks on a node of 96 cores take the step with 12 threads each. No effect on CPUs, where the
    setting moves nothing and another number of threads would change the order of sums.
    """
    if not (settings.offload_optimizer and torch.cuda.is_available()):
        yield
        return
    num_threads = torch.get_num_threads()
    num_cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


# ============================================================================================================
# Metrics and logs of a step
# ============================================================================================================
def measure_rollout(run: Run, rollout: Rollout, seconds: float) -> dict[str, tuple[float, float]]:
    """Return the metrics of a step's rollout as (sum, count); RuntimeError for bad verdicts or routes.

    seconds: until the slowest rank had its last verdict.
    """
    config = run.config
    sampled = rollout.groups
    num_experts = num_experts_of(run.policy.config)
    part = config.zero_variance.part
    metrics = rollout_metrics(sampled, config.reward.binary, invalid_route(num_experts), part)
    busy = run.clock.step["rollout"]
    metrics |= schedule_metrics(sampled, run.pool, busy, seconds, rollout.account["rounds"])
    if config.has_turns:
        metrics |= turn_metrics([completion for group in sampled for completion in group.completions])
    verdicts = verdicts_of([completion for group in sampled for completion in group.completions])
    check_verdicts(verdicts, config.reward.max_failed_frac, f"step {run.state.step + 1}")
    num_invalid, num_routes = metrics["invalid_routes_frac"]
    check_routes(int(num_invalid), int(num_routes), config.rollout.max_invalid_routes)
    return metrics | {"reward_worker_restarts_total": (run.pool.num_restarts, 1)}


def refuse_broken_policy(run: Run) -> None:
    """Stop the run if the update left a weight that is NaN or infinite. Collective."""
    refuse_nonfinite_weights(
        run.policy,
        f"step {run.state.step + 1}: after the update",
        "these weights were not saved, earlier checkpoints are intact; lower train.learning_rate "
        f"({run.config.train.learning_rate:g}), then start the same command again",
    )


def reduce_step_metrics(
    metrics: dict[str, tuple[float, float]], account: dict[str, float]
) -> dict[str, float]:
    """Reduce a step's metrics over the ranks and add derived metrics. Collective."""
    reduced = reduce_metrics(metrics)
    derived = effective_sample_size(reduced) | straggler(reduced)  # both remove their sums from reduced
    return reduced | derived | account


SHOWN_RANKS = 4  # ranks whose completions samples.jsonl shows at a time


def log_step(
    run: Run,
    batch: RolloutBatch,
    sampled: list[Group],
    metrics: dict[str, float],
    report: SyncReport,
    step_start: float,
) -> None:
    """Complete the metrics of a finished step and write them to files, trackers and console.

    sampled: this rank's groups. If none of them is trained on, samples.jsonl gets the first one.
    """
    state = run.state
    config = run.config
    metrics |= {
        "learning_rate": run.trainer.optimizer.param_groups[0]["lr"],
        "sync_bytes": report.num_bytes,
        "sync_tensors": report.num_tensors,
        "seconds_per_step": time.perf_counter() - step_start,
    }
    metrics |= run.clock.take_step()
    run.progress.set_postfix(score=figure(metrics["score"], ".3f"), refresh=False)
    run.progress.update()
    is_shown = state.step % config.run.log_every == 0
    if is_shown:
        say(console_line(state, metrics, time_left(config, state)))
    warn_of_unreadable_answers(metrics, state.step)
    warn_of_idle_steps(metrics, state)
    with run.clock("log"):
        log_metrics(run.accelerator, config, state, metrics)
        if is_shown and (memory := gpu_memory(run)) and dist.get_rank() == 0:
            write_text(Path(config.run.dir) / "gpu_memory.json", json.dumps(memory, indent=1))
        rows = shown_rows(run, batch, sampled) if is_shown else []
        if rows and dist.get_rank() == 0:
            append_rows(Path(config.run.dir) / "samples.jsonl", rows)
            send_texts(run.accelerator, rows[:MAX_SENT], "samples", state.step)


def shown_rows(run: Run, batch: RolloutBatch, sampled: list[Group]) -> list[dict]:
    """Return the rows of samples.jsonl: the first group of each of SHOWN_RANKS ranks, in turn. Collective.

    The first trained group or, if this rank trains on none, the first sampled one.
    """
    number = run.state.step // run.config.run.log_every
    is_due = (dist.get_rank() - SHOWN_RANKS * number) % dist.get_world_size() < SHOWN_RANKS
    rows = []
    if is_due and (batch.prompts or sampled):
        is_trained = bool(batch.prompts)
        if not is_trained:
            batch = collate(sampled[:1], run.prompts, run.prompt_ids, run.config.reward.binary)
        rows = sample_rows(run.state.step, batch, run.tokenizer, is_trained)
    gathered: list[list[dict]] | None = [[]] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(rows, gathered, group=host_group())
    return sum(gathered or [], [])


# ============================================================================================================
# Checkpoints, end
# ============================================================================================================
def stop_reason(run: Run, metrics: dict[str, float]) -> RuntimeError | Stopped | None:
    """Return the error with which the run stops after this step; None if it continues. Collective.

    RuntimeError if trainer and engine drift apart (algorithm.mismatch_gate), Stopped after a signal.
    """
    state = run.state
    mismatch_problem = mismatch_gate(metrics, state, run.config)
    signal_number = int(reduce_metrics({"signal_max": (run.signals.received, 1)})["signal_max"])
    if mismatch_problem:
        return RuntimeError(mismatch_problem)
    if signal_number == 0 or state.is_last(run.config):
        return None
    name = signal.Signals(signal_number).name
    checkpoint = f"{run.config.run.dir}/checkpoints/step_{state.step:06d}"
    return Stopped(
        f"stopped by {name} after step {state.step}: the same command resumes from {checkpoint}",
        signal_number,
    )


def save_if_due(run: Run, reason: RuntimeError | Stopped | None) -> None:
    """Write a checkpoint if one is due or the run stops, and raise the reason to stop. Collective."""
    state = run.state
    every = run.config.checkpoint.every
    if reason or state.is_last(run.config) or (every and state.step % every == 0):
        state.peak_rss_bytes = peak_rss_bytes(state)
        with run.clock("checkpoint"):
            save_checkpoint(run.run_config, asdict(state), lambda folder: write_rank(run, folder))
    if isinstance(reason, Stopped):
        run.accelerator.end_training()  # some trackers send their last rows now
    if reason:
        raise reason


def write_rank(run: Run, folder: Path) -> dict[Path, str]:
    """Write this rank's files of a checkpoint, which resume() and load_hf() read; see write_model().

    Returns the SHA-256 of the files of weights, optimizer and history.
    """
    rank = dist.get_rank()
    writer = HashingWriter()
    extras = active(run.config)
    if not any(extra.keeps_base for extra in extras):
        write_model(run, folder / "model", writer.save_tensors)
    for extra in extras:
        extra.save(run.policy, run.config, folder, writer.save_tensors)
    shard = {"optimizer": moe_model.optimizer_shard(run.trainer), "torch_rng": torch.get_rng_state()}
    states = {e.name: values for e in active(run.config) if (values := e.rank_state(run)) is not None}
    if run.queue or states:
        shard["waiting"] = {"queue": [rollout.saved() for rollout in run.queue], "extras": states}
    writer.save(shard, file_of_rank(folder))
    if rank == 0:
        digests = {"prompts": digest_of(run.prompts), "offers": digest_of_offers(run.stage_offers)}
        writer.save(vars(run.history) | digests, folder / "history.pt")
    return writer.digests


def write_model(run: Run, folder: Path, save: Callable = save_file) -> None:
    """Write this rank's part of a model folder for transformers and vLLM; save: as in save_hf().

    There are no collective calls, except for Granite with expert parallelism: its files hold fused experts,
    which save_hf() gathers.
    """
    moe_model.save_hf(run.policy, folder, save=save)
    if dist.get_rank() == 0:
        run.tokenizer.save_pretrained(folder)
        if run.generation_config is not None:
            (folder / "generation_config.json").write_text(run.generation_config)


def peak_rss_bytes(state: TrainState) -> int:
    """Return the peak memory of all launches of the run, resident, summed over the ranks. Collective."""
    peak: dict[str, tuple[float, float]] = {
        "bytes_total": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 1)
    }
    return max(state.peak_rss_bytes, int(reduce_metrics(peak)["bytes_total"]))


def gpu_memory(run: Run) -> dict[str, dict[str, int | None]] | None:
    """Return the plan's rows with planned and measured bytes, of the rank with the most; None on CPUs.

    A row that this launch did not measure is None, for example `update` after a resume from the last step.
    Collective.
    """
    if run.meter is None:
        return None
    measured: list[dict[str, int]] = from_all_ranks(run.meter.largest)
    config = widest(run.stage_configs, on_gpu=True)
    total = torch.cuda.mem_get_info()[1]
    parts, _ = plan_memory(config, run.policy.config, dist.get_world_size(), total)
    return {
        row: {"planned": num_bytes, "measured": max((r[row] for r in measured if row in r), default=None)}
        for row, num_bytes in planned_rows(parts, bool(config.rollout.sleep_level)).items()
    }


def finish(run: Run) -> None:
    """Export the policy, write and print the summary. Collective."""
    run.progress.close()
    run.pool.close()
    if run.interaction:
        run.interaction.close()
    run_dir = Path(run.config.run.dir)
    with writing(run_dir / "model"):
        write_model(run, run_dir / "model")
        for extra in active(run.config):
            extra.save(run.policy, run.config, run_dir, save_file)
    run.state.peak_rss_bytes = peak_rss_bytes(run.state)
    memory = gpu_memory(run)
    if dist.get_rank() == 0:
        with writing(run_dir / "summary.json"):
            write_summary(run_dir, run.state, memory)
            plot_curves(run_dir)
        print_summary(run_dir)
        for stage in run.config.stages[run.state.stage.number + 1 :]:
            print(f"warning: stage {stage.name} was not reached")
    dist.barrier()
    run.watchdog.stop()
    run.accelerator.end_training()
