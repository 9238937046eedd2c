"""Choose the settings of a tuned study, and check the choice and the settings of the test runs.

tuning_runs.json (a record per tuning run) and tuning.json (the choice) lie beside
declared.json. If the declaration has `tuning` or `instances`, `python experiments/report.py --check` refuses

    a tuning.json that differs from the choice by the recorded tuning runs,
    a tuning run of a commit without this declaration, or of a checkout with uncommitted changes,
    a test run without tuning.json (declaration.py compares its settings with the chosen ones),
    a test run that reads files of another task instance than its seed's.
"""

import json
import re
import statistics
from pathlib import Path

from experiments.declaration import commit_problems, read_declaration, records_of

Key = tuple[str, str, int]  # row, settings, seed


def is_tuned(declared: dict) -> bool:
    """Tell whether a declaration tunes its rows; a text under `tuning` only describes an earlier choice."""
    return isinstance(declared.get("tuning"), dict)


def candidates(tuning: dict, row: str) -> list[str]:
    """List the settings that tuning tries for a row, for example "train.learning_rate=0.0005".

    ValueError for a setting with a space: spaces separate settings.
    """
    clips = tuning.get("clips", {}).get(row, [""])
    for word in " ".join(clips).split():
        if "=" not in word:
            raise ValueError(
                f"tuning.clips of {row}: {word!r} is not section.key=value; write an argument "
                "of a plug-in as algorithm.gain_args.NAME=VALUE"
            )
    return [f"train.learning_rate={rate} {clip}".strip() for rate in tuning["rates"] for clip in clips]


def recorded_tuning(study: Path) -> dict[Key, dict]:
    """Return {(row, settings, seed): record} of tuning_runs.json; {} without the file."""
    file = study / "tuning_runs.json"
    records = json.loads(file.read_text()) if file.is_file() else []
    return {(record["row"], record["settings"], record["seed"]): record for record in records}


def choice_of(declared: dict, finished: dict[Key, dict]) -> list[dict]:
    """Return, for each row, the chosen settings and the metric of every tuning run [candidate][seed].

    finished: the records of the tuning runs. ValueError names a run that is missing.
    """
    tuning = declared["tuning"]
    choice = []
    for row in declared["rows"]:
        settings = candidates(tuning, row)
        for key in ((row, each, seed) for each in settings for seed in tuning["seeds"]):
            if key not in finished:
                raise ValueError(f"the tuning run of {row}, {key[1]}, seed {key[2]} is unfinished")
        values = [[finished[row, each, seed]["value"] for seed in tuning["seeds"]] for each in settings]
        means = list(map(statistics.mean, values))
        best = means.index(max(means))
        choice.append({"row": row, "settings": settings[best], "candidates": dict(zip(settings, values))})
    return choice


def instance_problems(record: dict, instances: dict) -> list[str]:
    """Name the task instances that a test run reads, if they are not the instance of its seed."""
    folders = rf"(?:data/built|experiments/starts)/{instances['recipe']}(?:_(\d+))?/"
    numbers = {int(number or 0) for number in re.findall(folders, json.dumps(record.get("settings", {})))}
    expected = record["seed"] // instances["seeds_each"]
    is_right = numbers == {expected}
    return [] if is_right else [f"reads the task instances {sorted(numbers)}, and its seed has {expected}"]


def check_tuning(folder: Path) -> list[str]:
    """Return the problems of a study's tuning, choice and task instances; none without tuning and instances.

    check_study() reports a declaration or records that cannot be read, and settings that were not chosen.
    """
    file = folder / "declared.json"
    try:
        declared = read_declaration(file) if file.is_file() else {}
        records = records_of(folder) if is_tuned(declared) or "instances" in declared else []
    except ValueError:
        return []
    problems = choice_problems(folder, declared) if is_tuned(declared) else []
    if records and is_tuned(declared) and not (folder / "tuning.json").is_file():
        problems.append("test runs without tuning.json: commit the choice, then test")
    for record in records if "instances" in declared else ():
        texts = instance_problems(record, declared["instances"])
        problems += [f"row {record['row']}, seed {record['seed']}: {text}" for text in texts]
    return problems


def choice_problems(folder: Path, declared: dict) -> list[str]:
    """Check the recorded tuning runs of a study, and tuning.json against the choice by these runs."""
    finished = recorded_tuning(folder)
    launched = [
        {"row": record["row"], "seed": record["seed"], "commit": versions.get("commit"), "versions": versions}
        for record in finished.values()
        if (versions := record.get("versions", {})) or not record["error"]  # an early failure has no versions
    ]
    problems = commit_problems(folder / "declared.json", launched, with_choice=False)
    tuned = folder / "tuning.json"
    if tuned.is_file():
        try:
            is_repeated = choice_of(declared, finished) == json.loads(tuned.read_text())
        except ValueError as error:
            return [*problems, f"tuning.json: {error}; run `keep` and commit tuning_runs.json"]
        problems += [] if is_repeated else ["tuning.json is not the choice by tuning_runs.json; run `choose`"]
    return problems
