"""From a command line to main(config), with errors that people can read; a run's policy and sampler."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError

import moe_model
from data.stream import decoder_json
from experiments.run_dir import lock_run_dir
from experiments.settings import Config, RewardSection, config_warnings, load_config
from kernels.linear_logprob_entropy import choose_backend
from moe_model import Policy
from reward import RewardPool
from rollout import RolloutEngine


def die_with_torchrun() -> None:
    """Ask Linux to end this rank when torchrun is killed: it would go on writing to run.dir on its own."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(main: Callable[[Config], None], argv: list[str], description: str) -> int:
    """main(config) with errors as one line; returns the exit code. The stack goes to error_rank_R.txt.

    argv and description: of the command line, see load_config().
    """
    die_with_torchrun()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (alone | {"MASTER_PORT": "0"}).items():  # without torchrun: a world of one process
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # old names inside libraries
    rank, run_dir = int(os.environ["RANK"]), None
    try:
        config = load_config(argv, description)
        run_dir = Path(config.run.dir)
        with lock_run_dir(config) if rank == 0 else contextlib.nullcontext():
            main(config)
        return 0
    except (ValueError, RuntimeError, OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            if run_dir is not None and run_dir.is_dir():
                (run_dir / f"error_rank_{rank}.txt").write_text(traceback.format_exc())
        for thread in threading.enumerate():
            if thread.name == "checkpoint":  # of the last finished step, still being written
                thread.join(60)
        if rank > 0:
            time.sleep(5)  # most errors are the same on all ranks; rank 0 speaks, torchrun ends the others
        print(f"\nerror on rank {rank}: {error}\n", file=sys.stderr, flush=True)
        return 2


def check_ranks(config: Config, world_size: int) -> None:
    """ValueError where the settings do not go with the number of ranks."""
    if torch.cuda.is_available() and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
        raise ValueError(f"torchrun --nproc-per-node: one rank a GPU, there are {torch.cuda.device_count()}")
    per_step, minibatches = config.rollout.prompts_per_step, config.train.minibatches_per_step
    if per_step % (world_size * minibatches):
        raise ValueError(
            f"rollout.prompts_per_step {per_step} must be a multiple of ranks x train.minibatches_per_step "
            f"({world_size} x {minibatches})"
        )
    if world_size % config.rollout.tensor_parallel:
        shared = f"rollout.tensor_parallel {config.rollout.tensor_parallel}"
        raise ValueError(f"{shared} must divide the number of ranks, {world_size}")


def head_backend(config: Config, hf_config, device: torch.device) -> str:
    """Version of kernels/linear_logprob_entropy.py that a run uses. ValueError where it cannot run here."""
    dtype = getattr(torch, config.model.dtype)
    best = choose_backend(torch.empty(0, hf_config.hidden_size, dtype=dtype, device=device))
    if config.model.head == "triton" != best:
        raise ValueError(
            "model.head triton: needs model.dtype bfloat16, a hidden size that is a multiple of 8, and an "
            "NVIDIA GPU with 160 KiB of shared memory (A100, H100 and later); set it to auto or chunked"
        )
    return best if config.model.head == "auto" else config.model.head


def announcement(
    config: Config, hf_config, num_prompts: int, num_dropped: int, eval_sets: dict, world_size: int
) -> list[str]:
    """What a run says before it starts: odd settings, then what there is."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = [f"warning: {warning}" for warning in config_warnings(config)]
    dropped = f" ({num_dropped} more dropped by their offline pass rate)" if num_dropped else ""
    return found + [
        f"{num_prompts} training prompts{dropped}, "
        f"{sum(len(prompts) for prompts, _ in eval_sets.values())} held out; "
        f"{world_size} ranks, expert parallel {config.model.ep_size}, ZeRO {config.train.zero_stage}, "
        f"policy {config.model.dtype}, head {head_backend(config, hf_config, device)}, engine "
        f"{config.rollout.dtype}; starting vLLM and DeepSpeed"
    ]


def build_pool(settings: RewardSection, tokenizer) -> RewardPool:
    """The reward workers of this rank."""
    return RewardPool(
        settings.num_workers,
        settings.timeout_s,
        int(settings.memory_gib * 2**30),
        max_backlog=settings.max_backlog,
        tokenizer=decoder_json(tokenizer) if settings.decode == "workers" else "",
    )


def build_policy(config: Config, weights: Path | str, group, device: torch.device) -> Policy:
    """The policy with the weights of a folder, this rank's experts only."""
    torch.set_default_dtype(getattr(torch, config.model.dtype))  # so that no float32 copy is made on the way
    with device:
        policy = Policy(moe_model.load_config(weights), group)
    torch.set_default_dtype(torch.float32)
    moe_model.load_hf(policy, weights)
    policy.activation_checkpointing, policy.head = config.model.activation_checkpointing, config.model.head
    return policy


def attention_width(hf_config) -> int:
    return hf_config.num_attention_heads * moe_model.head_dim(hf_config)


def build_sampler(config: Config, weights: Path, hf_config) -> RolloutEngine:
    """The vLLM engine, still with random weights; the policy's come with the first sync."""
    longest = max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)
    context = config.rollout.max_prompt_tokens + longest
    if context > hf_config.max_position_embeddings:
        raise ValueError(
            f"rollout.max_prompt_tokens + the larger max_new_tokens of rollout and eval is {context}, "
            f"the model's context is {hf_config.max_position_embeddings}: lower one of them"
        )
    sizes = {"hidden size": hf_config.hidden_size, "heads x head size": attention_width(hf_config)}
    odd = [f"{name} {size}" for name, size in sizes.items() if size % 128]
    if config.rollout.fp8 == "on" and odd:
        raise ValueError(
            f"rollout.fp8 on: vLLM quantises activations by 128 values, the model has {' and '.join(odd)}: "
            "set it to simulate or off"
        )
    replay, is_dense = config.algorithm.router_replay, moe_model.num_experts_of(hf_config) == 0
    if replay != "off" and is_dense:
        raise ValueError(f"algorithm.router_replay {replay}: the model is dense, it has no router; set off")
    return RolloutEngine(
        weights,
        max_model_len=context,
        max_num_seqs=config.rollout.max_num_seqs,
        dtype=config.rollout.dtype,
        kv_cache_gib=config.rollout.kv_cache_gib,
        prefix_caching=config.rollout.prefix_caching,
        sleep_level=config.rollout.sleep_level,
        capture_routes=config.rollout.capture_routes,
        fp8=config.rollout.fp8,
        kv_cache_fp8=config.rollout.kv_cache_fp8,
        tensor_parallel=config.rollout.tensor_parallel,
        expert_parallel=config.rollout.expert_parallel,
    )
