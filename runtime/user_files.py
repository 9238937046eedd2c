"""The Python files of the user that a run names: plug-ins, reward functions, tools and the environment.

Records and checkpoints hold a digest of each file. Functions of modules (module:function) are compared across
ranks only, and the modules that a file imports have no digest.
"""

import contextlib
import hashlib
import importlib.util
from pathlib import Path

from runtime.config import merge


def all_functions(config) -> list[str]:
    """List all functions of the user's own that the settings of a run and of its stages name."""
    run = config.model_dump(mode="json")
    stages = [type(config).model_validate(merge(run, stage.model_extra or {})) for stage in config.stages]
    return list(dict.fromkeys(name for of_stage in stages or [config] for name in of_stage.functions))


def function_names(config) -> list[str]:
    """List the names of the form path/file.py:function in all_functions()."""
    return [name for name in all_functions(config) if file_of(name).suffix == ".py"]


def file_of(name: str) -> Path:
    """Return the file of path/file.py:function."""
    return Path(name.rpartition(":")[0]).expanduser()


DIGESTS: dict[Path, str | None] = {}  # of files as they were at the start of this process


def digest_of_file(file: Path) -> str | None:
    """Return the digest of a file as it was at the first call in this process; None without the file."""
    file = file.resolve()
    if file not in DIGESTS:
        DIGESTS[file] = hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else None
    return DIGESTS[file]


def user_file_digests(config) -> dict[str, str | None]:
    """Return {path/file.py:function: digest of the file} of all functions that the settings name."""
    return {name: digest_of_file(file_of(name)) for name in function_names(config)}


def user_module_digests(config) -> dict[str, str | None]:
    """Return {module:function: digest of the module's file} of all functions that the settings name so."""
    digests = {}
    for name in {*all_functions(config)} - {*function_names(config)}:
        with contextlib.suppress(Exception):  # packages of users raise anything; check_functions() explains
            spec = importlib.util.find_spec(name.partition(":")[0])
            digests[name] = digest_of_file(Path(spec.origin))
    return digests
