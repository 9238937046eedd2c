"""Refuse to start if any rank differs from rank 0 in settings, code or inputs; all ranks raise one error.

Every node of a job is launched with a separate command, checkout and copy of data and weights. A difference
between nodes, for example another learning rate, an older rollout.py or half of the experts from an earlier
checkpoint, would deadlock in a collective or train a mixture that no settings file describes.
"""

import contextlib
import hashlib
import os
import platform
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from runtime.config import differences
from runtime.provenance import versions_of
from runtime.user_files import user_file_digests, user_module_digests

# A module whose path contains one of these belongs to Python or a library, not to the project.
INSTALLED = (sysconfig.get_paths()["stdlib"], "site-packages", "dist-packages")


def wait_for_ranks(warn_s: float, timeout_s: float) -> None:
    """Wait until every rank has reached this call, and name the ranks that are missing. Collective.

    torch.distributed's own rendezvous would wait silently. If a rank fails during its start, for example
    because of a typing error in its command, RuntimeError carries the reason to all ranks. Under torchrun
    only, whose store is used; elsewhere this function returns at once.
    """
    store = agent_store()
    if store is None:
        return
    rank = int(os.environ["RANK"])
    num_ranks = int(os.environ["WORLD_SIZE"])
    start = time.monotonic()
    store.set(f"here/{rank}", "")
    store.add("here", 1)
    next_warning = warn_s
    while num_here(store) < num_ranks:
        if store.check(["failed"]):
            raise RuntimeError(f"another rank could not start: {store.get('failed').decode()}")
        waited = time.monotonic() - start
        if waited > min(next_warning, timeout_s):
            missing = [number for number in range(num_ranks) if not store.check([f"here/{number}"])]
            line = f"waited {waited:.0f} s for {len(missing)} of {num_ranks} ranks to start: {missing[:16]}"
            if waited > timeout_s:
                raise RuntimeError(f"{line}; check the nodes of these ranks, or raise run.timeout_s")
            if rank == min(set(range(num_ranks)) - {*missing}):
                print(line, file=sys.stderr, flush=True)
            next_warning *= 2
        time.sleep(0.2)


def num_here(store: dist.Store) -> int:
    """Count the ranks that have reached wait_for_ranks(); RuntimeError if node 0, the counter, has ended."""
    try:
        return store.add("here", 0)
    except RuntimeError as error:
        raise RuntimeError(
            "node 0 has ended before all ranks had started: see the message of node 0 for the cause"
        ) from error


def tell_ranks(line: str) -> None:
    """End the ranks inside wait_for_ranks() with this line; later ranks get a closed connection."""
    with contextlib.suppress(RuntimeError):  # node 0 may have ended
        if not dist.is_initialized() and (store := agent_store()) is not None:
            store.set("failed", line)


def agent_store() -> dist.Store | None:
    """Connect to the store in torchrun's agent on node 0; None without an agent."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    port = int(os.environ["MASTER_PORT"])
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, timeout=timedelta(seconds=30))
    return dist.PrefixStore(f"start_{start}", store)


def check_ranks_agree(config) -> None:
    """Raise ValueError on all ranks if any rank differs from rank 0. Collective.

    Compares all settings except run.dir, the loaded source files of the project, the user's files
    (runtime/user_files.py), and the versions of Python and of the libraries that affect results.
    """
    code = code_of() | user_file_digests(config) | user_module_digests(config) | variable_digests(config)
    record = {"settings": config.model_dump(mode="json"), "code": code, "versions": versions_of()}
    refuse_difference(record, difference_from, "Start every node with the same command and the same checkout")


def variable_digests(config) -> dict[str, str]:
    """Return {variable: digest} of the environment that reward functions or kernels read.

    Torchrun gives every rank another RANK, LOCAL_RANK and GROUP_RANK, which are left out.
    """
    names = [name for name in os.environ if re.match("VLLM_(USE|ATTENTION|MOE|FLASH)_|NVIDIA_TF32", name)]
    names += [name for name in config.reward.env if not name.endswith("RANK")]
    values = {name: os.environ.get(name, "") for name in names}
    return {f"${name}": hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in values.items()}


def check_inputs_agree(inputs: Mapping[str, str | None]) -> None:
    """Raise ValueError on all ranks if a rank has read another input than rank 0. Collective.

    inputs: {input: digest}, for example of digests_of_input() or LoadedSets.digests().
    """

    def difference(first: dict, own: dict) -> str:
        name = next((name for name in {**first, **own} if first.get(name) != own.get(name)), None)
        return f"{name} (digest {own.get(name)} instead of {first.get(name)})" if name else ""

    refuse_difference(dict(inputs), difference, "Give every node the same copy of this input")


def refuse_difference(record: dict, difference: Callable[[dict, dict], str], remedy: str) -> None:
    """Raise one ValueError on all ranks if the record of any rank differs from that of rank 0. Collective.

    difference(record of rank 0, record of this rank): in words; "" if there is none.
    """
    record_of_rank_0 = [record]
    dist.broadcast_object_list(record_of_rank_0)
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, (platform.node(), difference(record_of_rank_0[0], record)))
    if differing := [(rank, host, text) for rank, (host, text) in enumerate(problems) if text]:
        rank, host, text = differing[0]
        ranks = ", ".join(str(rank) for rank, _, _ in differing[:8]) + (", ..." if len(differing) > 8 else "")
        raise ValueError(
            f"rank {rank} on {host} differs from rank 0 on {problems[0][0]} in {text}. {remedy} (ranks that "
            f"differ: {ranks})"
        )


def difference_from(first: dict, record: dict) -> str:
    """Describe how a rank's record differs from the record of rank 0; "" if both are equal."""
    changes = differences(first["settings"], record["settings"])
    # Mount points may differ between nodes; check_run_dir_is_shared() compares the folder itself.
    if changed := [change for change in changes if change.split(" ", 1)[0] != "run.dir"]:
        return f"settings ({'; '.join(changed[:4])})"
    for name in ("code", "versions"):
        expected = first[name]
        actual = record[name]
        changed = [key for key in sorted({*expected, *actual}) if expected.get(key) != actual.get(key)]
        if changed and name == "code":
            return f"code ({', '.join(changed[:4])})"
        if changed:
            pairs = [f"{key} {expected.get(key)} -> {actual.get(key)}" for key in changed[:4]]
            return f"libraries ({', '.join(pairs)})"
    return ""


def code_of() -> dict[str, str]:
    """Return {path: SHA-256} of the script and of the loaded modules of this project."""
    root = Path(__file__).resolve().parents[1]
    script = Path(sys.argv[0])
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = {Path(file).resolve() for file in files if file and not any(name in file for name in INSTALLED)}
    paths = {path for path in paths if path.is_file()}  # generated modules name files that do not exist
    names = {str(path.relative_to(root)): path for path in paths if path.is_relative_to(root)}
    names |= {script.name: script} if script.is_file() else {}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(names.items())}


# Files of a model's folder that a run reads, as patterns.
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*.jinja")
WHOLE_BYTES = 64 * 2**20  # a larger file is read in part
BLOCK_BYTES = 4096  # read at the beginning of each stride of a larger file
STRIDE_BYTES = 2 * 2**20


def digests_of_input(setting: str, path: Path) -> dict[str, str]:
    """Return {"setting file": digest} of a file or of a model's folder; {} if the path is neither."""
    if path.is_file():
        return {f"{setting} {path.name}": digest_of_part(path)}
    files = sorted(file for pattern in MODEL_FILES for file in path.glob(pattern))
    if others := [file for file in files if not file.is_file()]:
        raise ValueError(f"{setting}: {others[0]} is no file, but a folder, pipe, device or broken link")
    return {f"{setting} {file.relative_to(path)}": digest_of_part(file) for file in files}


def digest_of_part(file: Path) -> str:
    """Hash a file of up to 64 MiB whole; of a larger one the size, and 4 KiB at the beginning of each 2 MiB.

    A fifth of a percent of a model of 60 GB is then read. Two checkpoints of a training differ everywhere; a
    difference in a part of less than 2 MiB, for example in a single weight, may stay unnoticed.
    """
    size = file.stat().st_size
    with file.open("rb") as content:
        if size <= WHOLE_BYTES:
            return hashlib.file_digest(content, "sha256").hexdigest()[:16]
        digest = hashlib.sha256(f"{size}".encode())
        digest.update(content.read(2**20))  # the names and shapes of a shard's tensors
        for start in range(0, size, STRIDE_BYTES):
            content.seek(start)
            digest.update(content.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
