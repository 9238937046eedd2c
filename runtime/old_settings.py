"""Settings of earlier versions under their present names.

RENAMED, REMOVED and OLD_VALUES are all that the project knows of its earlier settings. They serve

    a command line or a YAML   the error about an old name or value names the successor (runtime/config.py)
    a checkpoint               a resume reads its settings by their present names (runtime/checkpoint.py)
    a record of a run          report.py --check compares its settings, run.py --row repeats them

    a row of a declared study  keeps the names of its time (runtime/config.py: read_yaml)

For example, zero_variance.teacher=x raises "of an earlier version, now teacher.path", and a checkpoint that
holds the old name resumes. RENAMED_COUNTERS does the same for the counters of a checkpoint.
"""

import re

# {name of a setting in an earlier version: its present name, with the same values and the same default}
RENAMED: dict[str, str] = {
    "algorithm.score_centering": "centering.enabled",
    "rollout.topk_logprobs": "centering.topk",
    "zero_variance.teacher": "teacher.path",
    "zero_variance.teacher_coef": "teacher.coef",
    "zero_variance.teacher_groups": "teacher.groups",
    "zero_variance.teacher_scores": "teacher.scores",
    "zero_variance.teacher_token_cost": "teacher.token_cost",
}

# {counter of runtime.checkpoint.TrainState: keys of its present place}
RENAMED_COUNTERS = {
    "charged_for_teacher": ("charged_tokens",),
    "teacher": ("extras", "teacher", "weights"),
    "teacher_scores": ("extras", "teacher", "scores"),
}

# {name: (old default, successor)}. The old default had no effect, so that old checkpoints and records that
# hold it stay valid without the setting.
REMOVED: dict[str, tuple[object, str]] = {
    "algorithm.covariance": ("clip", "algorithm.select=experiments/plugins/clip_cov.py:clip_cov"),
    "algorithm.covariance_kl_coef": (1.0, "gone: no run showed a gain"),
    "algorithm.covariance_range": ([1.0, 5.0], "algorithm.select_args={low: 1.0, high: 5.0}"),
    "algorithm.covariance_share": (0.0, "algorithm.select_args={fraction: 0.0002}"),
    "algorithm.gamma_decays": ([3.0, 2.0], "algorithm.gain_args of experiments/plugins/vespo.py:vespo"),
    "algorithm.gamma_powers": ([2.0, 3.0], "algorithm.gain_args of experiments/plugins/vespo.py:vespo"),
    "algorithm.kl_form": ("k3", "gone: algorithm.kl_coef penalises k3"),
    "algorithm.off_policy_mask": (
        0.0,
        "algorithm.gain=experiments/plugins/off_policy_mask.py:off_policy_mask",
    ),
    "algorithm.part_norm": ("after_sum", "algorithm.advantage=experiments/plugins/gdpo.py:gdpo"),
    "algorithm.soft_temperatures": ([1.0, 1.05], "algorithm.gain_args of experiments/plugins/sapo.py:sapo"),
    "algorithm.top_entropy": (1.0, "algorithm.select=experiments/plugins/top_entropy.py:top_entropy"),
    "reward.judge_certainty": (0.0, "gone: no run showed a gain"),
    "zero_variance.tournament": (False, "gone: no study had a row with it"),
}

# {setting whose default has changed: the old default}
OLD_DEFAULTS: dict[str, object] = {"rollout.dtype": "bfloat16"}

# {setting: {value of an earlier version: successor}}
OLD_VALUES: dict[str, dict[object, str]] = {
    "algorithm.adv_norm": {
        "batch_std": "algorithm.advantage=experiments/plugins/batch_std.py:batch_std",
        "group_mean": "algorithm.advantage=experiments/plugins/maxrl.py:maxrl",
        "leave_one_out": "algorithm.advantage=experiments/plugins/rloo.py:rloo",
    },
    "algorithm.clip_mode": {
        "binary_kl": "algorithm.gain=experiments/plugins/dppo.py:binary_kl",
        "gamma": "algorithm.gain=experiments/plugins/vespo.py:vespo",
        "soft": "algorithm.gain=experiments/plugins/sapo.py:sapo",
        "total_variation": "algorithm.gain=experiments/plugins/dppo.py:total_variation",
    },
}


def successor_of(name: str, value: object = None) -> str | None:
    """Name what takes the place of an old setting, or of an old value of a setting; None for any other."""
    if name in RENAMED:
        return RENAMED[name]
    if name in REMOVED:
        return REMOVED[name][1]
    return OLD_VALUES.get(name, {}).get(value) if isinstance(value, str) else None


def present_name(name: str) -> str:
    """Return the present name of a setting, also behind stages[0], for example stages[0].teacher.path."""
    place, plain = re.fullmatch(r"((?:stages\[\d+\]\.)?)(.*)", name).groups()
    return place + RENAMED.get(plain, plain)


def had_no_effect(name: str, value: object) -> bool:
    """Tell whether a removed setting has its old default."""
    plain = re.sub(r"^stages\[\d+\]\.", "", name)
    return plain in REMOVED and value == REMOVED[plain][0]


def with_present_names(settings: dict[str, object]) -> dict[str, object]:
    """Return the settings of a record, {"section.key": value}, by their present names.

    Removed settings that had an effect stay, so that the caller can refuse or name them.
    """
    kept = {name: value for name, value in settings.items() if not had_no_effect(name, value)}
    return {present_name(name): value for name, value in kept.items()}


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
