"""Check that the runs of a study are as declared and younger than the declaration, and show the declaration.

A study declares in declared.json, before its first run that counts: question, rows, seeds, endpoint,
contrasts ([{"row": ..., "parent": ...}, ...]; the effect is row - parent), test, correction, stop and
prediction. Each line of the study's *.jsonl names the commit of its run. The command
`python experiments/report.py --check` refuses a study

    whose run is of a commit without this declaration: the declaration is younger, or was changed later,
    with a run of a row or a seed that is not declared,
    with a run whose record lacks the commit, or whose checkout had uncommitted changes,
    with a run of a commit that is no ancestor of the present commit (a shallow clone skips this check),
    with a run whose settings differ from the present YAML file of its row; checkpoints, the settings of
        tuning.json and the number of the task instance may differ,
    with a run that reads files of another task instance than its seed's, if `instances` declares them,
    with a run of a commit that lacks the YAML file of a row, or at which this file, its bases, or the code
        that its settings name (a reward, a tool, a plug-in) is not as it was when the study was declared.

deviations.json beside the declaration admits the last two, for example
[{"names": ["checkpoint.keep", "data/calculator.py"], "reason": "..."}]: names of settings, or of files, from
the folder of the study or from the root. A file counts as changed if its YAML values or its Python statements
differ, docstrings aside. The check does not see code that no setting names, for example data/tiny.py; records
hold digests of its prompts.

Declared seeds may lack a run, because studies run in portions: the note below a table names these seeds.
Runs of commits before v0.1 need no declaration; a table of any other undeclared run is refused (notes.py).
"""

import ast
import contextlib
import functools
import json
import re
from hashlib import sha256
from pathlib import Path

import yaml

from experiments.history import descends, git, is_complete, is_known
from runtime.config import flat_settings, read_config
from runtime.old_settings import settings_of_record
from settings import Config

ROOT = Path(__file__).resolve().parents[1]
KEYS = ("question", "rows", "seeds", "endpoint", "contrasts", "test", "correction", "stop", "prediction")
BEFORE = "c144752728363ce7c9ec10e54b50d489af68f345"  # v0.1: runs of its ancestors need no declaration


def read_declaration(file: Path) -> dict:
    """Read a declaration; ValueError names a missing or wrong key, or a contrast of an undeclared row."""
    declared = json.loads(file.read_text())
    missing = [key for key in KEYS if key not in declared]
    if missing:
        raise ValueError(f"{file}: {', '.join(missing)} is missing")
    contrasts = declared["contrasts"] if isinstance(declared["contrasts"], list) else [None]
    for key, form, has_form in (
        ("rows", "a list of names", is_list_of(declared["rows"], str)),
        ("seeds", "a list of whole numbers", is_list_of(declared["seeds"], int)),
        ("contrasts", 'a list of {"row": ..., "parent": ...}', all(map(is_contrast, contrasts))),
        ("instances", '{"recipe": name, "seeds_each": number}', is_instances(declared.get("instances"))),
    ):
        if not has_form:
            raise ValueError(f"{file}: {key} must be {form}, not {json.dumps(declared[key])[:80]}")
    unknown = {row for pair in contrasts_of(declared) for row in pair} - set(declared["rows"])
    if unknown:
        raise ValueError(f"{file}: contrasts name {', '.join(sorted(unknown))}, which is not among the rows")
    return declared


def is_list_of(values: object, kind: type) -> bool:
    """Tell whether a value is a list of values of a type."""
    return isinstance(values, list) and all(type(value) is kind for value in values)


def is_instances(value: object) -> bool:
    """Tell whether a value is {"recipe": name, "seeds_each": number, ...}, or None: no task instances."""
    return value is None or (
        isinstance(value, dict)
        and isinstance(value.get("recipe"), str)
        and type(value.get("seeds_each")) is int
        and value["seeds_each"] > 0
    )


def is_contrast(value: object) -> bool:
    """Tell whether a value is {"row": name, "parent": name}, or [row, parent] as in older declarations."""
    names = list(value.values()) if isinstance(value, dict) and value.keys() == {"row", "parent"} else value
    return is_list_of(names, str) and len(names) == 2


def contrasts_of(declared: dict) -> list[tuple[str, str]]:
    """Return the declared contrasts as (row, parent)."""
    pairs = declared["contrasts"]
    return [(pair["row"], pair["parent"]) if isinstance(pair, dict) else tuple(pair) for pair in pairs]


def check_order(file: Path, declared: dict) -> None:
    """Raise ValueError for lists as contrasts before the first run: their order has no names to check."""
    lists = [f"{row} - {parent}" for row, parent in contrasts_of(declared)]
    if any(isinstance(pair, list) for pair in declared["contrasts"]) and not records_of(file.parent):
        raise ValueError(
            f"{file}: contrasts are lists, which would be read as {', '.join(lists)}; name the order before "
            'the first run: {"row": ..., "parent": ...}'
        )


def digest_of(declared: dict) -> str:
    """Return the first 12 digits of the SHA-256 of a declaration's values, whatever its layout is."""
    return sha256(json.dumps(declared, sort_keys=True).encode()).hexdigest()[:12]


@functools.cache
def is_before_declarations(commit: str | None, folder: Path) -> bool:
    """Tell whether a run's commit belongs to v0.1, or cannot be checked: a shallow clone, another history."""
    if not is_complete(folder) or not is_known(BEFORE, folder):
        return True
    return commit is not None and descends(BEFORE, commit, folder)


def declaration_at(commit: str, file: Path) -> dict | None:
    """Return the declaration of a commit; None if the commit has no such file."""
    shown = git(file.parent, "show", f"{commit}:./{file.name}")
    return None if shown.returncode else json.loads(shown.stdout)


def commit_problems(file: Path, records: list[dict]) -> list[str]:
    """Return a sentence for each commit of a run that lacks the declaration, and for each unclean checkout.

    The commits must also hold the present tuning.json, if the study has the file.
    """
    declared = read_declaration(file)
    problems = []
    tuned = file.with_name("tuning.json")
    for record in records:
        versions = record.get("versions", {})
        launches = [versions, *versions.get("earlier", [])]
        if not record.get("commit") or any(launch.get("dirty") is not False for launch in launches):
            run = f"row {record['row']}, seed {record['seed']}"
            problems.append(f"{run}: no commit, or uncommitted changes; repeat the run from a clean checkout")
    launches = [launch for r in records for launch in (r, *r.get("versions", {}).get("earlier", []))]
    for commit in sorted({launch["commit"] for launch in launches if launch.get("commit")}):
        if not descends("HEAD", commit, file.parent):
            if is_complete(file.parent):  # a shallow clone cannot check this commit
                problems.append(f"commit {commit} of a run is unknown or of another branch; push or merge it")
            continue
        earlier = declaration_at(commit, file)
        if earlier != declared:
            state = "has no declaration" if earlier is None else "has another declaration"
            problems.append(f"commit {commit} of a run {state}; declare first, then run")
        elif tuned.is_file() and declaration_at(commit, tuned) != json.loads(tuned.read_text()):
            problems.append(f"commit {commit} of a run has another tuning.json; commit the choice, then test")
    return problems


def admitted_deviations(study: Path) -> set[str]:
    """Return the names in deviations.json of a study; ValueError for an entry without names or a reason."""
    file = study / "deviations.json"
    entries = json.loads(file.read_text()) if file.is_file() else []
    if not all(
        isinstance(entry, dict) and is_list_of(entry.get("names"), str) and entry.get("reason")
        for entry in entries
    ):
        raise ValueError(f"{file}: each entry needs names, a list, and a reason")
    return {name for entry in entries for name in entry["names"]}


def may_differ(name: str) -> bool:
    """Tell whether runs of a row may have different values of a setting."""
    return name in ("run.dir", "train.seed") or name.startswith("checkpoint.")


def settings_of_rows(study: Path, declared: dict) -> dict[str, dict[str, object]]:
    """Return {row: its settings that are not defaults}, from the YAML files and tuning.json.

    A row without prompts is left out, because its YAML file cannot be run as it is.
    """
    tuned = study / "tuning.json"
    choices = json.loads(tuned.read_text()) if tuned.is_file() else []
    chosen = {choice["row"]: choice["settings"].split() for choice in choices}
    rows = {}
    with contextlib.chdir(ROOT):  # as in a run, so that paths of plug-ins are relative to the root
        for row in declared["rows"]:
            argv = ["--config", str(study / f"{row}.yaml"), *chosen.get(row, [])]
            config = read_config(Config, argv, prog="")
            if config.data.train:
                rows[row] = flat_settings(config.model_dump(mode="json", exclude_defaults=True))
    return rows


def setting_problems(study: Path, declared: dict, records: list[dict], settings_by_row: dict) -> list[str]:
    """Return a sentence for each setting in which runs differ from their row (settings_of_rows)."""
    admitted = admitted_deviations(study)
    recipe = declared.get("instances", {}).get("recipe", "")
    seeds_by_text: dict[str, list[int]] = {}
    for record in records:
        row = record["row"]
        expected = settings_by_row.get(row)
        text = json.dumps(settings_of_record(record))
        recorded = json.loads(re.sub(rf"/{recipe}_\d+/", f"/{recipe}/", text) if recipe else text)
        for name in sorted(recorded.keys() | expected.keys()) if expected else ():
            if recorded.get(name) != expected.get(name) and not may_differ(name) and name not in admitted:
                old, new = (json.dumps(s.get(name, "the default"))[:200] for s in (recorded, expected))
                text = f"row {row}: the run has {name} {old}, and {row}.yaml has {new}"
                seeds_by_text.setdefault(text, []).append(record["seed"])
    return [f"{text}; seeds {', '.join(map(str, seeds))}" for text, seeds in seeds_by_text.items()]


def instance_problems(records: list[dict], instances: dict | None) -> list[str]:
    """Name the runs that do not read the task instance of their seed, and no other."""
    problems = []
    for record in records if instances else ():
        folders = rf"(?:data/built|experiments/starts)/{instances['recipe']}(?:_(\d+))?/"
        numbers = {int(each or 0) for each in re.findall(folders, json.dumps(record.get("settings", {})))}
        expected = record["seed"] // instances["seeds_each"]
        if numbers != {expected}:
            run = f"row {record['row']}, seed {record['seed']}"
            problems.append(f"{run}: reads the task instances {sorted(numbers)}, its seed has {expected}")
    return problems


def yaml_files(rows: list[Path]) -> set[Path]:
    """Return the YAML files of rows and all their bases."""
    files: set[Path] = set()
    waiting = list(rows)
    while waiting:
        file = waiting.pop().resolve()
        if file not in files:
            files.add(file)
            base = (yaml.safe_load(file.read_text()) or {}).get("base", [])
            waiting += [file.parent / name for name in (base if isinstance(base, list) else [base])]
    return files


def code_files(settings: dict[str, object]) -> set[Path]:
    """Return the Python files that settings name, such as data/calculator.py for data.calculator:score."""
    names = re.findall(r'"([\w./-]+):\w+"', json.dumps(settings))
    files = {ROOT / (name if name.endswith(".py") else name.replace(".", "/") + ".py") for name in names}
    return {file for file in files if file.is_file()}


def content_at(commit: str, file: Path) -> str | None:
    """Return values or statements of a YAML or Python file at a commit; None if there is no such file."""
    shown = git(file.parent, "show", f"{commit}:./{file.name}")
    if shown.returncode:
        return None
    if file.suffix == ".yaml":
        return json.dumps(yaml.safe_load(shown.stdout))
    tree = ast.parse(shown.stdout)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):  # without docstrings
            node.body = [
                e for e in body if not (isinstance(e, ast.Expr) and isinstance(e.value, ast.Constant))
            ]
    return ast.dump(tree)


def file_problems(file: Path, declared: dict, commit: str, files: set[Path]) -> list[str]:
    """Return a sentence for each file that a run's commit lacks or has in another version.

    The other version is that of the first commit with this declaration.
    """
    study = file.parent.resolve()
    root = Path(git(study, "rev-parse", "--show-toplevel").stdout.strip())
    log = git(study, "log", "--format=%H", "--reverse", commit, "--", file.name).stdout.split()
    first = next((each for each in log if declaration_at(each, file) == declared), commit)
    names = sorted(str(path.relative_to(root)) for path in files if path.is_relative_to(root))
    tracked = git(root, "ls-tree", "-r", "--name-only", commit, "--", *names).stdout.splitlines()
    changed = git(root, "diff", "--name-only", first, commit, "--", *names).stdout.splitlines()
    admitted = admitted_deviations(study)
    problems = []
    for name in names:
        path = root / name
        if {name, path.name if path.parent == study else name} & admitted:
            continue
        if name not in tracked:
            problems.append(f"commit {commit} of a run lacks {name}; commit the file, then run")
        elif name in changed and content_at(first, path) != content_at(commit, path):
            problems.append(f"{name} was changed after the declaration and before commit {commit} of a run")
    return problems


def problems_of(file: Path, records: list[dict]) -> list[str]:
    """Return a sentence for each disagreement of a declaration with the records of its study."""
    study = file.parent
    declared = read_declaration(file)
    problems = commit_problems(file, records)
    expected = {(row, seed) for row in declared["rows"] for seed in declared["seeds"]}
    found = {(record["row"], record["seed"]) for record in records}
    problems += [f"row {row}, seed {seed} is not declared" for row, seed in sorted(found - expected)]
    settings_by_row = settings_of_rows(study.resolve(), declared)
    problems += setting_problems(study, declared, records, settings_by_row)
    problems += instance_problems(records, declared.get("instances"))
    if isinstance(declared.get("tuning"), dict) and records and not file.with_name("tuning.json").is_file():
        problems.append("runs without tuning.json: commit the choice, then test")
    files = yaml_files([study / f"{row}.yaml" for row in declared["rows"]])
    files = files.union(*map(code_files, settings_by_row.values()))
    for commit in sorted({record["commit"] for record in records if record.get("commit")}):
        if descends("HEAD", commit, study) and declaration_at(commit, file) == declared:
            problems += file_problems(file, declared, commit, files)
    return problems


def records_of(folder: Path) -> list[dict]:
    """Return the records of all *.jsonl files of a study; ValueError for a line that is no record."""
    files = sorted(folder.glob("*.jsonl"))
    records = []
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            record = json.loads(line)
            if not isinstance(record, dict) or not {"row", "seed"} <= record.keys():
                raise ValueError(
                    f"{file}, line {number}: no record of a run, as all *.jsonl files of a study are; keep "
                    "data in a subfolder"
                )
            records.append(record)
    return records


def check_study(folder: Path) -> list[str]:
    """List the problems of a study's declaration; [] if the study has no declaration or no runs yet."""
    file = folder / "declared.json"
    if not file.is_file():
        return []
    try:
        rows = read_declaration(file)["rows"]
        records = records_of(folder)
        problems = [f"row {row} has no {row}.yaml" for row in rows if not (folder / f"{row}.yaml").is_file()]
        return problems or (problems_of(file, records) if records else [])
    except ValueError as error:
        return [str(error)]


def warnings_of_launch(rows: list[Path], seeds: list[int], is_clean: bool, settings: list[str]) -> list[str]:
    """Return why report.py --check would refuse runs of these rows (YAML files), if studies declare them.

    settings: of the command line, for example ["train.num_steps=5"].
    """
    set_names = [setting.partition("=")[0] for setting in settings]
    warnings = []
    for folder in sorted({row.parent for row in rows}):
        file = folder / "declared.json"
        if not file.is_file():
            continue
        declared = read_declaration(file)
        check_order(file, declared)
        names = [row.stem for row in rows if row.parent == folder and row.stem not in declared["rows"]]
        names += [f"seed {seed}" for seed in seeds if seed not in declared["seeds"]]
        admitted = admitted_deviations(folder)
        names += [name for name in set_names if not may_differ(name) and name not in admitted]
        warnings += [f"{file} does not declare {', '.join(names)}"] if names else []
        if not is_clean:
            warnings.append(f"{file} is a declaration, and the checkout has uncommitted changes")
    return warnings
