"""The files of the plug-ins that a run uses (algorithm.gain, .advantage, .select), for records and checks."""

import functools
import hashlib
from pathlib import Path

from runtime.config import merge

HOOKS = ("gain", "advantage", "select")


def plugin_names(config) -> list[str]:
    """List path/file.py:function of the plug-ins of a run: those of its stages, or its own without stages."""
    algorithm = config.algorithm.model_dump()
    changes = [(stage.model_extra or {}).get("algorithm") or {} for stage in config.stages] or [{}]
    algorithms = [merge(algorithm, change) for change in changes]
    names = [of_stage.get(hook) for of_stage in algorithms for hook in HOOKS]
    return list(dict.fromkeys(name for name in names if name))


def file_of(name: str) -> Path:
    """Return the file of path/file.py:function."""
    return Path(name.rpartition(":")[0])


@functools.cache
def digest_of_plugin(name: str) -> str:
    """Return the digest of a plug-in's file, as it was at the first call in this process."""
    return hashlib.sha256(file_of(name).read_bytes()).hexdigest()[:16]


def plugin_digests(config) -> dict[str, str]:
    """Return {path/file.py:function: digest of the file} of the plug-ins of a run."""
    return {name: digest_of_plugin(name) for name in plugin_names(config)}
