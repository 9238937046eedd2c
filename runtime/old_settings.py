"""Settings of earlier versions under their present names.

The tables of old_settings.yaml are all that the project knows of its earlier settings. They serve

    a command line or a YAML   the error about an old name or value names the successor (runtime/config.py)
    a checkpoint               a resume reads its settings by their present names (runtime/checkpoint.py)
    a record of a run          report.py --check compares its settings, run.py --row repeats them

    a row of a declared study  keeps the names of its time (runtime/config.py: read_yaml)

For example, zero_variance.teacher=x raises "of an earlier version, now teacher.path", and a checkpoint that
holds the old name resumes. RENAMED_COUNTERS does the same for the counters of a checkpoint.
"""

import re
from pathlib import Path

import yaml

_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
RENAMED: dict[str, str] = _TABLES["renamed"]
RENAMED_COUNTERS: dict[str, list[str]] = _TABLES["counters"]
REMOVED: dict[str, tuple[object, str]] = {name: tuple(entry) for name, entry in _TABLES["removed"].items()}
OLD_DEFAULTS: dict[str, object] = _TABLES["old_defaults"]
OLD_VALUES: dict[str, dict[object, str]] = _TABLES["old_values"]


def successor_of(name: str, value: object = None) -> str | None:
    """Name what takes the place of an old setting, or of an old value of a setting; None for any other."""
    if name in RENAMED:
        return RENAMED[name]
    if name in REMOVED:
        return REMOVED[name][1]
    return OLD_VALUES.get(name, {}).get(value) if isinstance(value, str) else None


def with_present_names(settings: dict[str, object]) -> dict[str, object]:
    """Return the settings of a record, {"section.key": value}, by their present names.

    A name may begin with a stage, for example stages[0].teacher.path. Removed settings that had an effect
    stay, so that the caller can refuse or name them.
    """
    present = {}
    for name, value in settings.items():
        place, plain = re.fullmatch(r"((?:stages\[\d+\]\.)?)(.*)", name).groups()
        had_no_effect = plain in REMOVED and value == REMOVED[plain][0]
        if not had_no_effect:
            present[place + RENAMED.get(plain, plain)] = value
    return present


def settings_of_record(record: dict) -> dict[str, object]:
    """Return the settings of a record by their present names, with the changed defaults of its time.

    Records name the settings that differ from the defaults. Later ones have rollout_dtype in their versions.
    """
    is_old = "rollout_dtype" not in record.get("versions", {})
    return (OLD_DEFAULTS if is_old else {}) | with_present_names(record.get("settings", {}))


def present_settings(dump: dict) -> dict:
    """Do the same for sections of settings and their stages, as in config.yaml and in checkpoints."""
    present: dict = {}
    for section, values in dump.items():
        if section == "stages":
            present[section] = [present_settings(stage) for stage in values]
        elif isinstance(values, dict) and values:
            flat = with_present_names({f"{section}.{key}": value for key, value in values.items()})
            for name, value in flat.items():
                present_section, _, key = name.partition(".")
                present.setdefault(present_section, {})[key] = value
        else:
            present[section] = values
    return present


def present_counters(counters: dict) -> dict:
    """Return the counters of a checkpoint's state.json in their present places; None has no place."""
    present = {name: value for name, value in counters.items() if name not in RENAMED_COUNTERS}
    for old, (*groups, key) in RENAMED_COUNTERS.items():
        if counters.get(old) is not None:
            inner = present
            for group in groups:
                inner = inner.setdefault(group, {})
            inner[key] = counters[old]
    return present
