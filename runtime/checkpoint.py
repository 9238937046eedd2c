"""Manage the folder of a run: lock it, record settings and source code, write and find checkpoints.

    config.yaml  versions.json  source/  metrics.jsonl  samples.jsonl  eval_samples.jsonl
    outcomes.json  tensorboard/
    checkpoints/step_N/

This file is independent of the model. To save, pass a function that writes one rank's files into a folder
(HashingWriter); to resume, read the folder that find_checkpoint() returns.
"""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
import yaml
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from runtime.config import complete, differences, free_on_resume, with_paths_to
from runtime.launch import one_line
from runtime.memory import GIB
from runtime.old_settings import OLD_DEFAULTS, present_counters, present_settings
from runtime.provenance import commit_of, git, machine_of, now, versions_of
from runtime.schedule import from_all_ranks, from_rank_0, longest_first
from runtime.stages import HandOver, StagePosition, after_measurement, after_step
from runtime.user_files import digest_of_file, file_of, user_file_digests


@dataclass
class TrainState:
    """Counters of the run that the next step or the summary reads; part of every checkpoint."""

    step: int = 0  # finished steps, which is also the version of the policy
    consumed_prompts: int = 0  # prompts offered so far, sampled or skipped: the position in the dataset
    generated_tokens: int = 0  # over all ranks, training rollouts only
    charged_tokens: float = 0.0  # by extras, in addition to generated_tokens
    gradient_tokens: int = 0  # generated tokens with a non-zero advantage
    trained_tokens: int = 0  # tokens over which the steps measured abs_dlogp
    abs_dlogp_sum: float = 0.0  # nats, over trained_tokens
    evaluated_step: int = -1  # step of the latest evaluation
    micro_batch_tokens: int | None = None  # chosen at the first launch, if train.micro_batch_tokens is null
    steps_above_gate: int = 0  # steps in a row with a trainer-engine mismatch above algorithm.mismatch_gate
    account: dict[str, float] = field(default_factory=dict)  # sums of the account/ metrics of all steps
    seconds: dict[str, float] = field(default_factory=dict)  # wall time by phase on rank 0
    peak_rss_bytes: int = 0  # peak resident memory, summed over the ranks
    first_eval: dict[str, float] = field(default_factory=dict)  # metrics before the first step
    last_eval: dict[str, float] = field(default_factory=dict)  # metrics of the latest evaluation
    first_sets: dict[str, str] = field(default_factory=dict)  # {held-out set: digest} of first_eval
    last_sets: dict[str, str] = field(default_factory=dict)  # of last_eval
    idle_steps: int = 0  # steps in a row without a gradient, or whose updates were all skipped
    stage: StagePosition = field(default_factory=StagePosition)
    judge: str | None = None  # digest of the weights of reward.judge_path
    reference: str | None = None  # digest of the weights of model.path, if there is a KL penalty to them
    extras: dict[str, dict] = field(default_factory=dict)  # {name of an extra: its values}

    def __post_init__(self):
        if isinstance(self.stage, dict):  # as read from state.json
            self.stage = StagePosition(**self.stage)

    def is_last(self, config) -> bool:
        """Tell whether the run has reached train.num_steps or train.max_generated_tokens.

        Tokens that extras charge are part of the budget, for example those that a teacher scores.
        The answer is the same for the settings of each stage.
        """
        budget = config.train.max_generated_tokens or math.inf
        spent = self.generated_tokens + self.charged_tokens
        return self.step >= config.train.num_steps or spent >= budget

    def add_evaluation(self, metrics: dict[str, float], rule: HandOver, sets: dict[str, str]) -> None:
        """Record the metrics of an evaluation at this step.

        rule: the hand-over of the current stage; sets: {held-out set: digest of its prompts}.
        """
        self.stage = after_measurement(self.stage, rule, metrics)
        if self.step == 0:
            self.first_eval = metrics
            self.first_sets = sets
        self.last_eval = metrics
        self.last_sets = sets
        self.evaluated_step = self.step

    def add_step(
        self, metrics: dict[str, float], rule: HandOver, num_dlogp_tokens: int, charged_tokens: float = 0.0
    ) -> None:
        """Add the tokens and the account/ metrics of a finished step.

        rule: of the current stage. num_dlogp_tokens: tokens behind the mean abs_dlogp. charged_tokens: of
        extras, besides the generated tokens.
        """
        self.stage = after_step(self.stage, rule, int(metrics["tokens_total"]), metrics)
        self.generated_tokens += int(metrics["tokens_total"])
        self.charged_tokens += charged_tokens
        self.idle_steps = 0 if metrics.get("grad_norm", 0.0) > 0 else self.idle_steps + 1  # NaN: no update
        self.gradient_tokens += int(metrics["gradient_tokens_total"])
        if math.isfinite(metrics.get("abs_dlogp", math.nan)):
            self.trained_tokens += num_dlogp_tokens
            self.abs_dlogp_sum += metrics["abs_dlogp"] * num_dlogp_tokens
        for name, value in metrics.items():
            if name.startswith("account/"):
                name = name.removeprefix("account/").removesuffix("_total")
                self.account[name] = self.account.get(name, 0) + value


# ------------------------------------------------------------------------------------------------------------
# The folder
# ------------------------------------------------------------------------------------------------------------
def lock_run_dir(run_dir: Path) -> IO:
    """Create run.dir and lock it; a second run is refused until the returned file is closed."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        refuse_links(run_dir)
        if (run_dir / "source").exists() and not (run_dir / "config.yaml").exists():
            raise ValueError(f"run.dir: {run_dir}/source is of no run and would be replaced; choose another")
        lock = (run_dir / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except BlockingIOError as error:
        raise ValueError(f"run.dir: another run is writing to {run_dir}; choose another folder") from error
    except OSError as error:
        problem = f"run.dir: cannot write to {run_dir} ({error.strerror}); choose another"
        if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            problem += ", because its file system has no flock() (on Lustre: mount -o flock)"
        raise ValueError(problem) from error


def refuse_links(run_dir: Path) -> None:
    """Raise ValueError for a link or a pipe in run.dir, because writing would change another file.

    Hard links among the files of run.dir are fine: experiments/evaluate.py makes some while it runs.
    """
    names: dict[tuple[int, int], list[Path]] = {}  # of a file, by its number
    refused = []
    for folder, folders, files in os.walk(run_dir):
        for path in (Path(folder, name) for name in (*folders, *files)):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                names.setdefault((status.st_ino, status.st_nlink), []).append(path)
            elif not stat.S_ISDIR(status.st_mode):
                refused.append(path)
    refused += [paths[0] for (_, num_links), paths in names.items() if num_links > len(paths)]
    if refused:
        raise ValueError(
            f"run.dir: {refused[0]} is a symbolic link, a hard link or a pipe, and a run writes only "
            "inside its folder: replace it by a copy, or choose another run.dir (which itself may be a link)"
        )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of writing `path` into a RuntimeError that names the file and the remedy."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError for a full disk
        is_refused = getattr(error, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS)
        remedy = "Make it writable" if is_refused else "Free disk space"
        raise RuntimeError(
            f"{path} could not be written ({one_line(str(error))[:300]}); checkpoints are intact. {remedy}, "
            "then start the same command again"
        ) from error


def write_text(file: Path, text: str) -> None:
    """Write a text file atomically: a kill leaves the earlier content or the new one."""
    partial = file.with_name(file.name + ".partial")
    with writing(file):
        partial.write_text(text)
        partial.replace(file)


def check_run_dir_is_shared(run_dir: Path, patience_s: float = 10.0) -> None:
    """Raise ValueError on all ranks if any rank cannot see the files that rank 0 writes. Collective.

    patience_s: seconds that a network file system may take to show a new file on another node.
    """
    host = platform.node()
    file = run_dir / from_rank_0(f".seen_{uuid.uuid4().hex}")
    if dist.get_rank() == 0:
        file.write_text(host)
    dist.barrier()
    deadline = time.monotonic() + patience_s
    while not file.is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    reports = from_all_ranks((host, file.is_file()))
    if dist.get_rank() == 0:
        file.unlink()
    if blind := [f"rank {rank} on {name}" for rank, (name, sees) in enumerate(reports) if not sees]:
        raise ValueError(
            f"run.dir: {run_dir.resolve()} is not the same folder on all nodes: {', '.join(blind[:4])} "
            f"cannot see the files that rank 0 on {reports[0][0]} writes. Choose a folder on a shared file "
            "system"
        )


def keep_earlier_record(run_dir: Path) -> Path | None:
    """Move the files of a launch that died before its first checkpoint to earlier_N; return that folder.

    None if run.dir has no metrics of an earlier launch.
    """
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file() or metrics.stat().st_size == 0:
        return None
    folders = (run_dir / f"earlier_{number}" for number in itertools.count(1))
    backup = next(folder for folder in folders if not folder.exists())
    backup.mkdir()
    logs = ("metrics.jsonl", "samples.jsonl", "eval_samples.jsonl", "outcomes.json", "tensorboard")
    for name in (*logs, "nonfinite", "versions.json", "source", "config.yaml"):
        if (run_dir / name).exists():
            (run_dir / name).rename(backup / name)
    return backup


def prepare_run_dir(
    run_dir: Path, config, record: dict | None, evaluates: bool = True, models: dict[str, str] | None = None,
    facts: dict[str, object] | None = None,
) -> None:  # fmt: skip
    """Write settings, source code and versions, and drop metrics of steps after the checkpoint.

    record: the state.json of the checkpoint to resume from; None for a start from step 0, which moves the
    files of an earlier launch to earlier_N. evaluates: the launch begins with an evaluation. models: {name in
    versions.json: folder} of models, where `weights` is the start of the policy. facts: further entries of
    versions.json, see lifecycle.record_launch(). If the environment changed between launches, for example the
    version of torch or the commit, versions.json lists the earlier ones under `earlier`.
    """
    backup = None if record else keep_earlier_record(run_dir)
    if backup:
        print(f"run.dir: an earlier launch ended before its first checkpoint; its logs are kept in {backup}")
    settings = with_paths_to(run_dir, config.model_dump(mode="json"), type(config))
    user_files = user_file_digests(config)
    write_text(run_dir / "config.yaml", yaml.safe_dump(settings, sort_keys=False))
    with writing(run_dir / "source"):
        versions = versions_of() | save_source(run_dir / "source", map(file_of, user_files))
    versions |= {"date": now(), "machine": machine_of()}
    previous = previous_versions(run_dir / "versions.json") if record else {}
    models = {"weights": config.model.path, "judge_weights": config.reward.judge_path, **(models or {})}
    digests = {name: digest_of_weights(Path(folder)) for name, folder in models.items() if folder}
    # A resume does not download a model of the hub again.
    versions |= {name: digest or previous.get(name) for name, digest in digests.items()}
    versions |= {"plugins": user_files} if user_files else {}
    earlier = earlier_starts(previous, versions, facts or {})
    versions |= {"earlier": earlier} if earlier else {}
    write_text(run_dir / "versions.json", json.dumps(versions | (facts or {}), indent=1))
    (run_dir / "summary.json").unlink(missing_ok=True)  # an earlier, shorter run may have written one
    for file in (run_dir / f"{name}.jsonl" for name in ("metrics", "samples", "eval_samples")):
        drop_redone_rows(file, record["state"] if record else None, evaluates)


def drop_redone_rows(file: Path, state: dict | None, evaluates: bool = True) -> None:
    """Drop the rows of metrics.jsonl or samples.jsonl that a run from `state` writes again; None: all rows.

    The file is read line by line, because samples.jsonl may exceed the memory.
    """
    partial = file.with_name(file.name + ".partial")
    with writing(file):
        with partial.open("w") as rewritten:
            for number, line in enumerate(lines_of(file) if state else [], start=1):
                row = step_row(line)
                if row is not None and not is_redone(row, state, evaluates):
                    rewritten.write(line.removesuffix("\n") + "\n")
                elif row is None and line.endswith(("\n", "}")):  # a kill may cut the last line
                    start = line[:80].rstrip("\n")
                    print(f"{file}: dropping line {number}, which is no row of metrics: {start!r}")
        partial.replace(file)  # atomic: a kill at any time loses no row


def lines_of(file: Path) -> Iterator[str]:
    """Yield the lines of a text file with their line ends; none if the file does not exist."""
    if file.is_file():
        with file.open(errors="replace") as lines:
            yield from lines


def previous_versions(file: Path) -> dict:
    """Return the versions.json of the launch before; {} if a kill has cut the file off."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return {}


def earlier_starts(previous: dict, versions: dict, facts: dict) -> list[dict]:
    """List the environments (versions, commit, weights) of earlier launches that differ from `versions`.

    Dates and facts may differ.
    """
    earlier = previous.pop("earlier", [])
    variable = {name: previous[name] for name in ("date", *facts) if name in previous}
    return earlier + [previous] if previous and previous != versions | variable else earlier


def step_row(line: str) -> dict | None:
    """Parse a line of metrics.jsonl or samples.jsonl; None for anything but a mapping with a step."""
    try:
        row = json.loads(line)
        return row if isinstance(row, dict) and type(row.get("step")) is int else None
    except (ValueError, RecursionError):
        return None


DIGESTED_BYTES = 2**20


def digest_of_weights(folder: Path) -> str | None:
    """Hash name, size, first and last mebibyte of each *.safetensors file; None if there is no file.

    The last mebibyte consists of weights, so two trained models differ in it. Reading all files would take
    minutes for a model of hundreds of gigabytes.
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


def save_source(folder: Path, user_files: Iterable[Path] = ()) -> dict[str, str | bool | None]:
    """Copy the script, the user's files and uncommitted changes (changes.diff, tracked files) into a folder.

    If two files have one name, the second gets its digest in front, for example 3f2a91c0d4e5b687_mine.py.
    Returns {"commit", "dirty", "script"}. dirty: True also if the checkout has untracked Python or YAML
    files. If git is missing, commit and dirty are None, and the folder gets the copies alone.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    script = Path(sys.argv[0]).resolve()
    if script.is_file():
        shutil.copy(script, folder / script.name)
    for file in dict.fromkeys(file for file in user_files if file.is_file()):
        is_taken = (folder / file.name).exists()
        shutil.copy(file, folder / (f"{digest_of_file(file)}_{file.name}" if is_taken else file.name))
    if changes := git("diff", "HEAD"):
        (folder / "changes.diff").write_text(changes)
    return {**commit_of(), "script": script.name}


def is_redone(row: dict, state: dict, evaluates: bool) -> bool:
    """Tell whether a run that resumes from `state` will write this row of metrics again.

    evaluates: the run begins with an evaluation. If not, the last evaluation is kept. Example: a finished run
    gets more steps, and the longer run does not evaluate at the old last step.
    """
    is_evaluation = "sample" in row or any(name.startswith("eval/") for name in row)
    return row["step"] > (state["evaluated_step"] if is_evaluation and evaluates else state["step"])


# ------------------------------------------------------------------------------------------------------------
# Checkpoints
# ------------------------------------------------------------------------------------------------------------
def check_free_disk(run_dir: Path, checkpoint_bytes: int, num_checkpoints: int) -> None:
    """Raise ValueError on all ranks if the disk of run.dir has no room for checkpoints. Collective.

    num_checkpoints: checkpoints that the run holds at a time, including checkpoints of earlier launches.
    """
    num_missing = max(1, num_checkpoints - len(list_checkpoints(run_dir / "checkpoints")))
    free, needed = from_rank_0((shutil.disk_usage(run_dir).free, num_missing * checkpoint_bytes))
    if free < needed:
        raise ValueError(
            f"run.dir: the disk of {run_dir} has {free / GIB:.3g} GiB free, but checkpoints need another "
            f"{needed / GIB:.3g} GiB ({num_missing} of {checkpoint_bytes / GIB:.3g} GiB; a new one is "
            "complete before an older one is deleted): free disk space, lower checkpoint.keep, or choose a "
            "run.dir on another disk"
        )


class HashingWriter:
    """Writes files of a checkpoint and computes their SHA-256 on the way, so that no file is read again.

    A checkpoint of Qwen3-30B-A3B has 427 GB, so that reading all of it back takes minutes.
    """

    def __init__(self):
        self.digests: dict[Path, str] = {}

    def save(self, values: object, path: Path) -> None:
        """Write any values by torch.save()."""
        with path.open("wb") as file:
            hashing_file = HashingFile(file)
            try:
                torch.save(values, hashing_file)
            except RuntimeError:  # after a failed write torch ends the file, which fails differently
                if hashing_file.failure is not None:
                    raise hashing_file.failure from None
                raise
        self.digests[path] = hashing_file.digest.hexdigest()

    def save_tensors(self, tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        """Write contiguous tensors on the host by safetensors' save_file().

        The format is the length of the header in 8 bytes, the header, and the tensors without gaps in the
        order of their data_offsets, so that only the header has to be read for the digest.
        """
        save_file(tensors, path, metadata=metadata)
        with path.open("rb") as file:
            length = file.read(8)
            header = file.read(int.from_bytes(length, "little"))
        digest = hashlib.sha256(length + header)
        entries = json.loads(header)
        for name in sorted(tensors, key=lambda name: entries[name]["data_offsets"]):
            digest.update(tensors[name].flatten().view(torch.uint8).numpy())
        self.digests[path] = digest.hexdigest()


class HashingFile:
    """An open file that hashes the bytes that torch.save() writes to it; torch.save() never seeks."""

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.digest = hashlib.sha256()
        self.failure: OSError | None = None  # the error of a write, for example on a full disk

    def write(self, data) -> int:
        """Write and hash bytes."""
        self.digest.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        """Flush the file, which torch.save() asks for at its end."""
        self.file.flush()


def topology(config) -> dict:
    """Return the settings on which the optimizer shards of a checkpoint depend."""
    return {
        "world_size": dist.get_world_size(), "ep_size": config.model.ep_size,
        "zero_stage": config.train.zero_stage, "dtype": config.model.dtype,
    }  # fmt: skip


def save_checkpoint(config, state: dict, write: Callable[[Path], dict[Path, str] | None]) -> None:
    """Write run.dir/checkpoints/step_N; a folder of that name is always complete. Collective.

    state: the counters as plain values, for state.json, which also holds settings, topology and the SHA-256
    of each file. write(folder) writes this rank's files and may return digests (HashingWriter.digests); files
    without a digest are read again. write() may raise on one rank only, so any collective calls in it have to
    end before it raises (moe_model.save_hf). The files stay in step_N.tmp until all ranks have written. If
    any rank fails, for example on a full disk, all ranks raise RuntimeError and earlier checkpoints stay.
    """
    checkpoints = Path(config.run.dir) / "checkpoints"
    rank = dist.get_rank()
    name = f"step_{state['step']:06d}"
    partial = checkpoints / f"{name}.tmp"
    if rank == 0:
        remove_unfinished(checkpoints)

    def make_folder() -> None:
        if rank == 0:
            partial.mkdir(parents=True)  # fails for a folder or a link that could not be removed

    def write_files() -> None:
        partial.mkdir(parents=True, exist_ok=True)
        known.update(write(partial) or {})

    def write_record() -> None:
        if rank == 0:
            record = {"topology": topology(config), "config": config.model_dump(mode="json"), "state": state}
            record |= {"plugins": user_file_digests(config), "files": digests}
            record["sha256"] = digest_of_record(record)
            (partial / "state.json").write_text(json.dumps(record, indent=1))
        os.sync()  # the files have to be on the disk before the folder gets its final name

    def publish() -> None:
        if rank == 0:
            shutil.rmtree(checkpoints / name, ignore_errors=True)
            partial.rename(checkpoints / name)

    digests = {}
    known: dict[Path, str] = {}
    problems = problems_of(make_folder) or problems_of(write_files)
    if not problems:
        digests, problems = digests_of(partial, known)
    problems = problems or problems_of(write_record) or problems_of(publish)
    if rank == 0 and not problems:
        for old in list_checkpoints(checkpoints)[: -config.checkpoint.keep]:
            # If a reader on NFS keeps a file, or after a kill, the next checkpoint deletes the .tmp.
            with contextlib.suppress(OSError):
                shutil.rmtree(old.rename(f"{old}.tmp"))
    elif rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    if problems:
        raise RuntimeError(
            f"checkpoint {checkpoints / name} could not be written ({problems[0]}); "
            "earlier checkpoints are intact. If the disk is full, free space; start the same command again"
        )


def remove_unfinished(checkpoints: Path) -> None:
    """Delete the checkpoints that a killed run has not finished writing or deleting."""
    for unfinished in checkpoints.glob("step_*.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)


def problems_of(action: Callable[[], None]) -> list[str]:
    """Call a function on every rank and return the errors of all ranks, for example "rank 3: disk full".

    Collective.
    """
    problem = None
    try:
        action()
    except Exception as error:  # torch and safetensors wrap the OSError of a full disk in other types
        is_plain = isinstance(error, (OSError, RuntimeError, SafetensorError))
        name = "" if is_plain else f"{type(error).__name__} "
        problem = f"rank {dist.get_rank()}: {name}{' '.join(str(error).split())[:300]}"
    return [problem for problem in from_all_ranks(problem) if problem]


def digests_of(folder: Path, known: dict[Path, str] | None = None) -> tuple[dict[str, str], list[str]]:
    """Return the SHA-256 of each file of a folder except state.json, and the read errors. Collective.

    known: digests that this rank has computed already. All other files are dealt to the ranks so that every
    rank reads about the same number of bytes.
    """
    known = known or {}
    digests = union_of_ranks({str(path.relative_to(folder)): digest for path, digest in known.items()})
    sizes: dict[str, int] = {}
    read: dict[str, str] = {}

    def list_files() -> None:  # by rank 0 for all: another node may see new files late
        for path in sorted(folder.rglob("*")) if dist.get_rank() == 0 else ():
            if path.is_file() and path.name != "state.json":
                sizes[str(path.relative_to(folder))] = path.stat().st_size

    def read_files() -> None:
        unread = [name for name in sizes if name not in digests]
        owners = longest_first([sizes[name] for name in unread], dist.get_world_size())
        for name in (name for name, rank in zip(unread, owners) if rank == dist.get_rank()):
            with open(folder / name, "rb") as file:
                read[name] = hashlib.file_digest(file, "sha256").hexdigest()

    problems = problems_of(list_files)
    sizes = from_rank_0(sizes)
    problems = problems or problems_of(read_files)
    return dict(sorted((digests | union_of_ranks(read)).items())), problems


def union_of_ranks(items: dict) -> dict:
    """Return the items of the dictionaries of all ranks. Collective."""
    return {key: value for of_rank in from_all_ranks(items) for key, value in of_rank.items()}


def digest_of_record(record: dict) -> str:
    """Return the SHA-256 of a record's values, independent of the order of keys and of indentation."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def list_checkpoints(folder: Path) -> list[Path]:
    """List finished checkpoints, oldest first. Other names, for example step_000100_copy, are ignored."""
    folders = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]
    checkpoints = [path for path in folders if (path / "state.json").is_file()]
    return sorted(checkpoints, key=lambda path: int(path.name.removeprefix("step_")))


def find_checkpoint(config) -> tuple[Path, dict] | None:
    """Return the newest checkpoint of run.dir and its state.json, or None. Collective.

    ValueError if the checkpoint is damaged or does not match the settings. With checkpoint.on_damage=older, a
    damaged checkpoint is renamed to damaged_step_N and the next older one is tried.
    """
    # Rank 0 lists for all ranks, because a late rank could miss a checkpoint that is renamed below; the ranks
    # get names, because another node may mount run.dir elsewhere.
    folder = Path(config.run.dir) / "checkpoints"
    checkpoints = [folder / name for name in from_rank_0([path.name for path in list_checkpoints(folder)])]
    if not checkpoints:
        return None
    if config.checkpoint.resume == "never":
        raise ValueError(
            f"{checkpoints[-1]} exists and checkpoint.resume is never: remove the checkpoint or choose "
            "another run.dir"
        )
    while checkpoints:
        record, problems = read_record(checkpoints[-1])
        if problems == [OTHER_VERSION]:
            raise ValueError(
                f"{checkpoints[-1]} was written by another version of this program and cannot be resumed "
                f"exactly: choose another run.dir and start with model.path={checkpoints[-1]}/model"
            )
        if not problems:
            check_fits(config, checkpoints[-1], record)
            return checkpoints[-1], record
        damaged = checkpoints.pop()
        older = f"the next older one is {checkpoints[-1].name}" if checkpoints else "no older one exists"
        if config.checkpoint.on_damage == "stop" or not checkpoints:
            raise ValueError(
                f"{damaged} is damaged: {problems[0]}; {older}. Restore the file, or set "
                "checkpoint.on_damage=older to resume from an older checkpoint"
            )
        if dist.get_rank() == 0:
            name = f"damaged_{damaged.name}"
            names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
            aside = next(path for path in map(damaged.with_name, names) if not path.exists())
            damaged.rename(aside)
            print(f"{damaged} is damaged ({problems[0]}); renamed to {aside.name}")
        dist.barrier()


OTHER_VERSION = "state.json was written by another version of this program"


def read_state(checkpoint: Path) -> tuple[dict, list[str]]:
    """Return state.json of a checkpoint, and a list with the problem of this file, if any.

    Settings of an earlier version are returned by their present names.
    """
    record = {}
    problem = []
    try:
        record = json.loads((checkpoint / "state.json").read_text())
        is_complete = record.keys() >= {"topology", "config", "state"}
        has_changed = "sha256" in record and record.pop("sha256") != digest_of_record(record)
        counters = present_counters(record["state"]) if is_complete else {}
        if not is_complete or unknown_counters(counters):
            problem = [OTHER_VERSION]
        elif wrong := wrong_counters(counters):
            value = (counters | counters.get("stage", {}))[wrong[0]]
            problem = [f"state.json: {wrong[0]} is {value!r}, which no run writes"]
        elif has_changed:
            problem = ["state.json has changed since it was written"]
        else:
            record |= {"config": present_settings(record["config"]), "state": counters}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        problem = [f"state.json cannot be read: {error}"]
    return record, problem


def unknown_counters(state: dict) -> set[str]:
    """List the keys of a saved state that neither TrainState nor StagePosition has."""
    counters = state.keys() - {counter.name for counter in fields(TrainState)}
    return counters | (state.get("stage", {}).keys() - {counter.name for counter in fields(StagePosition)})


def wrong_counters(state: dict) -> list[str]:
    """List the counters of a saved state that are no number, infinite, or below the value of a new run."""
    starts = {counter.name: counter.default for counter in (*fields(TrainState), *fields(StagePosition))}
    starts = {name: start for name, start in starts.items() if type(start) in (int, float)}
    state = state | state.get("stage", {})
    return [
        name for name, start in starts.items()
        if type(value := state.get(name, start)) not in (int, float, type(start))
        or not start <= value < math.inf
        or (type(start) is int and type(value) is not int)
    ]  # fmt: skip


def read_record(checkpoint: Path) -> tuple[dict, list[str]]:
    """Return state.json of a checkpoint, and the problems of all files of the checkpoint. Collective."""
    record, problem = from_rank_0(read_state(checkpoint))
    if problem or "files" not in record:  # without digests the files cannot be checked
        return record, problem
    digests, problems = digests_of(checkpoint)
    for name, digest in record["files"].items():
        if digests.get(name) != digest:
            problems.append(f"{name} {'has other content' if name in digests else 'is missing'}")
    return record, problems


def with_saved_choices(config, record: dict):
    """Return the settings with both dtypes and data.date of the checkpoint, if the settings leave them open.

    The optimizer shards and the bits of the next step depend on the dtypes, and prompts may hold the date. A
    resume therefore takes the saved ones, also on a machine with another processor, and on another day.
    """
    saved = {
        "model": {"dtype": record["topology"]["dtype"]},
        "rollout": {"dtype": record["config"].get("rollout", {}).get("dtype", OLD_DEFAULTS["rollout.dtype"])},
        "data": {"date": record["config"]["data"].get("date")},
    }
    for section, values in saved.items():
        chosen = getattr(config, section)
        values = {key: value for key, value in values.items() if getattr(chosen, key) in (None, "auto")}
        config = config.model_copy(update={section: chosen.model_copy(update=values)})
    return config


def state_of(record: dict, config) -> TrainState:
    """Return the counters of a checkpoint; after a change of stages, the stage counters restart."""
    state = TrainState(**record["state"])
    stages = config.model_dump(mode="json")["stages"]
    if complete(type(config), record["config"])["stages"] != stages:
        state.stage = StagePosition(state.stage.number, first_prompt=state.stage.first_prompt)
    return state


def check_fits(config, checkpoint: Path, record: dict) -> None:
    """Raise ValueError if a run with these settings cannot resume from a checkpoint.

    An exact resume needs the same topology and the same settings, except for settings that are free to change
    on resume, such as run.log_every. With checkpoint.resume=weights the stage has to exist, and both runs
    train adapters (lora.rank) or both all weights.
    """
    saved_rank = complete(type(config), record["config"])["lora"]["rank"]
    if (saved_rank is None) != (config.lora.rank is None):
        kind = "all weights" if saved_rank is None else "adapters only"
        raise ValueError(
            f"{checkpoint} holds {kind}, and lora.rank is {config.lora.rank}: restore lora.rank "
            f"{saved_rank}, or choose another run.dir"
        )
    if config.checkpoint.resume != "auto":
        number = record["state"].get("stage", {}).get("number", 0)
        num_stages = len(config.stages)
        if number >= max(1, num_stages):
            raise ValueError(
                f"{checkpoint} was written in stages[{number}], the settings have {num_stages} stages: "
                "restore the list of stages, or start a new run from these weights (model.path)"
            )
        return
    if problem := misfit(config, checkpoint, record):
        raise ValueError(problem)


def resumes_exactly(config, checkpoint: Path) -> bool:
    """Tell whether a run continues with the optimizer of a checkpoint.

    With checkpoint.resume=weights the first launch starts a fresh optimizer. The checkpoints that it writes
    hold the setting, so that later launches of the same command continue exactly.
    """
    if config.checkpoint.resume == "auto":
        return True
    record, _ = read_state(checkpoint)
    was_fresh = record["config"]["checkpoint"]["resume"] == "weights"
    return was_fresh and misfit(config, checkpoint, record) is None


def misfit(config, checkpoint: Path, record: dict) -> str | None:
    """Return why a run with these settings cannot resume exactly from a checkpoint, or None."""
    config = with_saved_choices(config, record)
    saved_topology = record["topology"]
    changed = [
        f"{name} {saved_topology[name]} -> {value}"
        for name, value in topology(config).items()
        if saved_topology[name] != value
    ]
    if changed:
        return (
            f"{checkpoint} was written by another topology ({', '.join(changed)}): restore it, or set "
            "checkpoint.resume=weights to continue with these weights and a fresh optimizer"
        )
    changeable = free_on_resume(type(config))
    changed = [
        change
        for change in differences(complete(type(config), record["config"]), config.model_dump(mode="json"))
        if change.split(" ", 1)[0] not in changeable
    ]
    if changed:
        return (
            f"{checkpoint} was written with other settings ({'; '.join(sorted(changed))}): choose another "
            "run.dir, or set checkpoint.resume=weights to continue from the weights of this checkpoint"
        )
    recorded = record.get("plugins", {})  # only files that the settings still name are compared
    digests = user_file_digests(config).items()
    changed = [name for name, digest in digests if recorded.get(name, digest) != digest]
    if changed:
        return (
            f"{checkpoint} was written with another version of {changed[0]}: restore the file, "
            "choose another run.dir, or set checkpoint.resume=weights"
        )
    return None
