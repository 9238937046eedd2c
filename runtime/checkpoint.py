"""Keep the folder of a run: one run at a time, what made it, its checkpoints.

    config.yaml  versions.json  source/  metrics.jsonl  samples.jsonl  tensorboard/  checkpoints/step_N/

This file knows no model. Who saves hands over a function that writes one rank's files into a folder, and who
resumes reads the folder that find_checkpoint() returns.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Literal

import torch.distributed as dist
import yaml
from safetensors import SafetensorError

from runtime.agreement import versions_of
from runtime.config import Section, complete, differences, free_on_resume, setting
from runtime.launch import one_line
from runtime.schedule import from_rank_0, longest_first
from runtime.stages import HandOver, StagePosition, after_measurement, after_step


@dataclass
class TrainState:
    """Counters that the next step or the summary reads; part of every checkpoint."""

    step: int = 0  # steps finished, the version of the policy
    consumed_prompts: int = 0  # prompts offered so far, sampled or skipped: the position in the data
    generated_tokens: int = 0  # over all ranks, training rollouts only
    gradient_tokens: int = 0  # those of generated_tokens with a non-zero advantage
    trained_tokens: int = 0  # tokens of completions that were not dropped, in steps that measured abs_dlogp
    abs_dlogp_sum: float = 0.0  # nats, over trained_tokens
    evaluated_step: int = -1  # step of the latest evaluation
    steps_above_gate: int = 0  # steps in a row with a trainer-engine mismatch above algorithm.mismatch_gate
    account: dict[str, float] = field(default_factory=dict)  # sums of the account/ metrics of all steps
    seconds: dict[str, float] = field(default_factory=dict)  # wall time by phase on rank 0
    first_eval: dict[str, float] = field(default_factory=dict)  # metrics before the first step
    last_eval: dict[str, float] = field(default_factory=dict)  # metrics of the latest evaluation
    stage: StagePosition = field(default_factory=StagePosition)

    def __post_init__(self):
        if isinstance(self.stage, dict):  # read from state.json
            self.stage = StagePosition(**self.stage)

    def is_last(self, config) -> bool:
        """Tell whether the run is over, by steps or by generated tokens."""
        budget = config.train.max_generated_tokens or math.inf
        return self.step >= config.train.num_steps or self.generated_tokens >= budget

    def add_evaluation(self, metrics: dict[str, float], rule: HandOver) -> None:
        """Take the metrics of an evaluation of the policy at this step; rule: of the stage's end."""
        self.stage = after_measurement(self.stage, rule, metrics)
        self.first_eval, self.last_eval = metrics if self.step == 0 else self.first_eval, metrics
        self.evaluated_step = self.step

    def add_step(self, metrics: dict[str, float], rule: HandOver) -> None:
        """Count the tokens and the account of a finished step; rule: of the stage's end."""
        self.stage = after_step(self.stage, rule, int(metrics["tokens_total"]), metrics)
        trained = metrics["tokens_total"] - metrics["account/wasted_dropped_tokens"]
        self.generated_tokens += int(metrics["tokens_total"])
        self.gradient_tokens += int(metrics["gradient_tokens_total"])
        if math.isfinite(metrics.get("abs_dlogp", math.nan)):
            self.trained_tokens += int(trained)
            self.abs_dlogp_sum += metrics["abs_dlogp"] * trained
        for name, value in metrics.items():
            if name.startswith("account/"):
                name = name.removeprefix("account/").removesuffix("_total")
                self.account[name] = self.account.get(name, 0) + value


# ------------------------------------------------------------------------------------------------------------
# The folder
# ------------------------------------------------------------------------------------------------------------
def lock_run_dir(run_dir: Path) -> IO:
    """Create run.dir and return the open file whose lock keeps a second run out until it is closed."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        refuse_links(run_dir)
        lock = (run_dir / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except BlockingIOError as error:
        raise ValueError(f"run.dir: another run is writing to {run_dir}; choose another folder") from error
    except OSError as error:
        raise ValueError(f"run.dir: cannot write to {run_dir} ({error.strerror}); choose another") from error


def refuse_links(run_dir: Path) -> None:
    """Raise ValueError if run.dir holds a symbolic link: a run would write through it into another folder."""
    for path in [*run_dir.iterdir(), *(run_dir / "model").glob("*")]:
        if path.is_symlink():
            raise ValueError(
                f"run.dir: {path} is a symbolic link, and a run writes through none: remove it, or choose "
                "another folder (run.dir itself may be a link)"
            )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in the error of what could not be written: RuntimeError, with what to do."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError for a full disk
        raise RuntimeError(
            f"{path} could not be written ({one_line(str(error))[:300]}); checkpoints are whole. Free space, "
            "then start the same command again"
        ) from error


def check_run_dir_is_shared(run_dir: Path, patience_s: float = 10.0) -> None:
    """Raise ValueError on all ranks if one of them does not see the files that rank 0 writes. Collective.

    patience_s: seconds that a network's file system may take to show a new file on another node.
    """
    host, file = platform.node(), run_dir / from_rank_0(f".seen_{uuid.uuid4().hex}")
    if dist.get_rank() == 0:
        file.write_text(host)
    dist.barrier()
    deadline = time.monotonic() + patience_s
    while not file.is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    reports = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (host, file.is_file()))
    if dist.get_rank() == 0:
        file.unlink()
    blind = [f"rank {rank} on {name}" for rank, (name, sees) in enumerate(reports) if not sees]
    if blind:
        raise ValueError(
            f"run.dir: {run_dir.resolve()} is not the same folder on all nodes: {', '.join(blind[:4])} "
            f"does not see what rank 0 on {reports[0][0]} writes. Choose a folder of a shared file system"
        )


def keep_earlier_record(run_dir: Path) -> Path | None:
    """Move the record of a start that left no checkpoint into a folder earlier_N; return it, None without."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file() or metrics.stat().st_size == 0:
        return None
    aside = next(p for number in itertools.count(1) if not (p := run_dir / f"earlier_{number}").exists())
    aside.mkdir()
    for name in ("metrics.jsonl", "samples.jsonl", "config.yaml", "versions.json", "source", "tensorboard"):
        if (run_dir / name).exists():
            (run_dir / name).rename(aside / name)
    return aside


def prepare_run_dir(run_dir: Path, config, record: dict | None) -> None:
    """Write what makes the run, and drop the metrics that come after the checkpoint resumed from.

    record: the state.json of that checkpoint; None for a start from the beginning, which keeps the record of
    an earlier one aside. versions.json keeps in `earlier` what earlier starts were made with, if that
    was something else.
    """
    aside = None if record else keep_earlier_record(run_dir)
    if aside:
        print(f"run.dir: an earlier start left no checkpoint; what it had logged is kept in {aside}")
    with writing(run_dir / "config.yaml"):
        (run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    with writing(run_dir / "source"):
        versions = versions_of() | save_source(run_dir / "source")
        versions["weights"] = digest_of_weights(Path(config.model.path))
        earlier = earlier_starts(run_dir / "versions.json", versions) if record else []
        versions |= {"earlier": earlier} if earlier else {}
        (run_dir / "versions.json").write_text(json.dumps(versions, indent=1))
    (run_dir / "summary.json").unlink(missing_ok=True)  # a shorter run may have left one
    for file in (run_dir / "metrics.jsonl", run_dir / "samples.jsonl"):
        lines = file.read_text(errors="replace").splitlines() if file.is_file() and record else []
        rows = [(line, step_row(line)) for line in lines]
        for number, (line, row) in enumerate(rows, start=1):
            if row is None and (number < len(rows) or line.endswith("}")):  # the last one may be cut off
                print(f"{file}: line {number} is no row of metrics and left out: {line[:80]!r}")
        kept = [line for line, row in rows if row is not None and not is_redone(row, record["state"])]
        partial = file.with_name(file.name + ".partial")
        with writing(file):
            partial.write_text("".join(line + "\n" for line in kept))
            partial.replace(file)  # a kill in between loses no row


def earlier_starts(file: Path, versions: dict) -> list[dict]:
    """Return what earlier starts of a run were made with, as far as it was something else than now."""
    try:
        before = json.loads(file.read_text())
    except (OSError, ValueError):  # a kill may have cut it off
        return []
    earlier = before.pop("earlier", [])
    return earlier + [before] if before != versions else earlier


def step_row(line: str) -> dict | None:
    """Return a line of metrics.jsonl or samples.jsonl as a row with its step; None if it is none."""
    try:
        row = json.loads(line)
        return row if isinstance(row, dict) and type(row.get("step")) is int else None
    except (ValueError, RecursionError):
        return None


DIGESTED_BYTES = 2**20


def digest_of_weights(folder: Path) -> str | None:
    """Hash name, size, first and last mebibyte of each file of weights; None where there are none.

    It tells trained models apart without reading hundreds of gigabytes: the last mebibyte is of weights.
    """
    files = sorted(folder.glob("*.safetensors"))
    return digest_of_files(files) if files else None


def digest_of_files(files: list[Path]) -> str:
    """Hash name, size, first and last mebibyte of each file."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as weights:
            digest.update(weights.read(DIGESTED_BYTES))
            weights.seek(max(0, size - DIGESTED_BYTES))
            digest.update(weights.read(DIGESTED_BYTES))
    return digest.hexdigest()[:16]


def save_source(folder: Path) -> dict[str, str | bool | None]:
    """Copy the script that runs, and what git says of the checkout that it stands in, into a folder.

    The folder gets the script and changes.diff: all tracked changes against the commit. Returns {"commit",
    "dirty", "script"}; dirty also where Python files lie there that git does not track. Without git both are
    None and only the script is kept.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    script = Path(sys.argv[0]).resolve()
    if script.is_file():
        shutil.copy(script, folder / script.name)

    def git(*arguments: str) -> str | None:
        root = Path(__file__).resolve().parents[1]
        command = [shutil.which("git") or "false", "-C", root, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        return done.stdout if done.returncode == 0 else None

    commit, changes = git("rev-parse", "HEAD"), git("diff", "HEAD")
    untracked = git("ls-files", "--others", "--exclude-standard", "*.py")
    if changes:
        (folder / "changes.diff").write_text(changes)
    dirty = None if commit is None else bool(changes or untracked)
    return {"commit": commit and commit.strip(), "dirty": dirty, "script": script.name}


def is_redone(row: dict, state: dict) -> bool:
    """Tell whether a run that goes on from `state` writes this row of metrics anew."""
    is_evaluation = any(name.startswith("eval/") for name in row)
    return row["step"] > (state["evaluated_step"] if is_evaluation else state["step"])


# ------------------------------------------------------------------------------------------------------------
# Checkpoints
# ------------------------------------------------------------------------------------------------------------
def topology(config) -> dict:
    """Name what a checkpoint's optimizer shards depend on."""
    return {
        "world_size": dist.get_world_size(),
        "ep_size": config.model.ep_size,
        "zero_stage": config.train.zero_stage,
        "dtype": config.model.dtype,
    }


def save_checkpoint(config, state: dict, write: Callable[[Path], None]) -> None:
    """Write run.dir/checkpoints/step_N; a folder of that name is always whole. Collective.

    state: the counters as plain values, for state.json, which also holds settings, topology and the SHA-256
    of each file. write(folder) writes this rank's files; it makes no collective call, because another rank's
    may have failed. They lie in step_N.tmp until all ranks have written. RuntimeError on all ranks if one
    could not (disk full): earlier checkpoints stay.
    """
    checkpoints, rank = Path(config.run.dir) / "checkpoints", dist.get_rank()
    name = f"step_{state['step']:06d}"
    aside = checkpoints / f"{name}.tmp"
    if rank == 0:
        for unfinished in checkpoints.glob("step_*.tmp"):  # also those that a killed run has left
            shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()

    def write_own() -> None:
        aside.mkdir(parents=True, exist_ok=True)
        write(aside)

    def write_record() -> None:
        if rank == 0:
            record = {"topology": topology(config), "config": config.model_dump(mode="json"), "state": state}
            record["files"] = digests
            record["sha256"] = digest_of_record(record)
            (aside / "state.json").write_text(json.dumps(record, indent=1))
        os.sync()  # a folder must not get its final name before its files are on the disk

    problems, digests = problems_of(write_own), {}
    if not problems:
        digests, problems = digests_of(aside)
    problems = problems or problems_of(write_record)
    if rank == 0 and not problems:
        shutil.rmtree(checkpoints / name, ignore_errors=True)
        aside.rename(checkpoints / name)
        for old in list_checkpoints(checkpoints)[: -config.checkpoint.keep]:
            shutil.rmtree(old.rename(f"{old}.tmp"))  # a kill in the midst leaves what the next one removes
    elif rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
    dist.barrier()
    if problems:
        raise RuntimeError(
            f"checkpoint {checkpoints / name} could not be written ({problems[0]}); "
            "earlier checkpoints are intact. Free space, then start the same command again"
        )


def problems_of(action: Callable[[], None]) -> list[str]:
    """Call a function on every rank and return what went wrong on any of them, by rank. Collective."""
    problem = None
    try:
        action()
    except Exception as error:  # torch and safetensors wrap a full disk in errors of their own
        problem = f"rank {dist.get_rank()}: {' '.join(str(error).split())[:300]}"
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return [problem for problem in problems if problem]


def digests_of(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the SHA-256 of each file of a folder but state.json, and what could not be read. Collective.

    Each rank reads about as many bytes.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "state.json")
    owner = longest_first([path.stat().st_size for path in files], dist.get_world_size())
    own = {}

    def read_own() -> None:
        for path in (path for path, rank in zip(files, owner) if rank == dist.get_rank()):
            with open(path, "rb") as file:
                own[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()

    problems, parts = problems_of(read_own), [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return dict(sorted(item for part in parts for item in part.items())), problems


def digest_of_record(record: dict) -> str:
    """Return the SHA-256 of a record's values, however they are written."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def list_checkpoints(folder: Path) -> list[Path]:
    """List finished checkpoints, oldest first. Folders of other names, such as a copy of one, are none."""
    found = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    found = [path for path in found if (path / "state.json").is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def find_checkpoint(config) -> tuple[Path, dict] | None:
    """Return the newest checkpoint of run.dir and its state.json, or None. Collective.

    ValueError if it does not fit the settings or is damaged; with checkpoint.on_damage older a damaged one is
    set aside and the one before is taken.
    """
    found = from_rank_0(list_checkpoints(Path(config.run.dir) / "checkpoints"))  # one may be set aside below
    if not found:
        return None
    if config.checkpoint.resume == "never":
        raise ValueError(
            f"{found[-1]} exists and checkpoint.resume is never: remove it or choose another run.dir"
        )
    while found:
        record, problems = read_record(found[-1])
        if not problems:
            check_fits(config, found[-1], record)
            return found[-1], record
        damaged = found.pop()
        earlier = f"the newest before it is {found[-1].name}" if found else "there is none before it"
        if config.checkpoint.on_damage == "stop" or not found:
            raise ValueError(
                f"{damaged} is damaged: {problems[0]}; {earlier}. Restore the file, or set "
                "checkpoint.on_damage=older to go on from an older checkpoint"
            )
        if dist.get_rank() == 0:
            damaged.rename(damaged.with_name(f"damaged_{damaged.name}"))
            print(f"{damaged} is damaged ({problems[0]}) and set aside as damaged_{damaged.name}")
        dist.barrier()


def read_state(checkpoint: Path) -> tuple[dict, list[str]]:
    """Return state.json of a checkpoint, and what is wrong with it."""
    record, problem = {}, []
    try:
        record = json.loads((checkpoint / "state.json").read_text())
        is_complete = record.keys() >= {"topology", "config", "state"}
        if not is_complete or unknown_counters(record["state"]):
            problem = ["state.json was not written by this version of the program"]
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        problem = [f"state.json cannot be read: {error}"]
    if not problem and "sha256" in record and record.pop("sha256") != digest_of_record(record):
        problem = ["state.json has other content"]
    return record, problem


def unknown_counters(state: dict) -> set[str]:
    """List the keys of a saved state that neither TrainState nor StagePosition has."""
    counters = state.keys() - {counter.name for counter in fields(TrainState)}
    return counters | (state.get("stage", {}).keys() - {counter.name for counter in fields(StagePosition)})


def read_record(checkpoint: Path) -> tuple[dict, list[str]]:
    """Return state.json of a checkpoint, and what is wrong with it and with the other files. Collective."""
    record, problem = from_rank_0(read_state(checkpoint))
    if problem or "files" not in record:  # a checkpoint of a version that kept no digests
        return record, problem
    found, problems = digests_of(checkpoint)
    for name, digest in record["files"].items():
        if found.get(name) != digest:
            problems.append(f"{name} {'has other content' if name in found else 'is missing'}")
    return record, problems


def state_of(record: dict, config) -> TrainState:
    """Return the counters of a checkpoint; those of its stage begin anew if the stages have changed."""
    state, stages = TrainState(**record["state"]), config.model_dump(mode="json")["stages"]
    if complete(type(config), record["config"])["stages"] != stages:
        state.stage = StagePosition(state.stage.number, first_prompt=state.stage.first_prompt)
    return state


def check_fits(config, checkpoint: Path, record: dict) -> None:
    """Raise ValueError if a run with these settings cannot go on exactly from a checkpoint."""
    if config.checkpoint.resume != "auto":
        number, num_stages = record["state"].get("stage", {}).get("number", 0), len(config.stages)
        if number >= max(1, num_stages):
            raise ValueError(
                f"{checkpoint} was written in stages[{number}], the settings have {num_stages} stages: "
                "restore them, or start a run of its own from these weights (model.path)"
            )
        return
    saved, present = record["topology"], topology(config)
    changed = [f"{name} {saved[name]} -> {present[name]}" for name in present if saved[name] != present[name]]
    if changed:
        raise ValueError(
            f"{checkpoint} was written by another topology ({', '.join(changed)}): restore it, or set "
            "checkpoint.resume=weights to go on with these weights and a fresh optimizer"
        )
    free, saved = free_on_resume(type(config)), complete(type(config), record["config"])
    changed = [
        change
        for change in differences(saved, config.model_dump(mode="json"))
        if change.split(" ", 1)[0] not in free
    ]
    if changed:
        raise ValueError(
            f"{checkpoint} was written with other settings ({'; '.join(sorted(changed))}): choose another "
            "run.dir, or set checkpoint.resume=weights to go on from its weights"
        )
