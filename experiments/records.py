"""Keep small records of studies beside their tables, and bring the whole records from the history.

    python -m experiments.records get late_groups      # whole records, in runs/records/late_groups
    python -m experiments.records get zero_variance    # all files of a study that is no longer in the tree
    python -m experiments.records thin late_groups/runs.jsonl --steps tokens_total completion_tokens

`thin` keeps only these training metrics of a committed record file, drops the outcomes of single prompts, and
notes the commit of the whole file in experiments/studies/whole.json. A small record holds all that
`report.py --check` reads: row, seed, commit, versions, settings, offline_tokens and the evaluations. In a
clone with the whole history, the check refuses a small record that has another value than the whole one,
and a file that whole.json no longer names. Any other file has to hold whole records.

whole.json: {"STUDY/FILE.jsonl": commit of the whole file, "STUDY": commit of a study that left the tree}.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from experiments.history import content_at, files_at, git, is_complete
from runtime.config import command_line

STUDIES = ROOT / "experiments" / "studies"
INDEX = "whole.json"  # in the folder of all studies


def index_of(studies: Path) -> dict[str, str]:
    """Read {file or study: commit of the whole files}; {} without whole.json."""
    file = studies / INDEX
    return json.loads(file.read_text()) if file.is_file() else {}


def thin(record: dict, steps: list[str]) -> dict:
    """Return a record with these training metrics only, and without outcomes."""
    kept = {name: column for name, column in record["steps"].items() if name in steps}
    return {name: value for name, value in record.items() if name != "outcomes"} | {"steps": kept}


def whole_text(file: Path, or_small: bool = False) -> str:
    """Return the whole of a record file: from its commit if the file is small, else the file itself.

    or_small: return the small file in a shallow clone, which lacks the commit.
    """
    study = file.parent
    commit = index_of(study.parent).get(f"{study.name}/{file.name}")
    if commit is None or (or_small and not is_complete(study)):
        return file.read_text()
    return content_at(commit, study, file.name).decode()


def problems_of(file: Path) -> list[str]:
    """Return a sentence for each record of a small file that disagrees with the whole record."""
    small = [json.loads(line) for line in file.read_text().splitlines()]
    whole = [json.loads(line) for line in whole_text(file).splitlines()]
    if [(r["row"], r["seed"]) for r in small] != [(r["row"], r["seed"]) for r in whole]:
        return [f"{file.name} has other rows or seeds than the whole file; move new runs to another file"]
    problems = []
    for record, original in zip(small, whole):
        expected = thin(original, list(record["steps"]))
        names = sorted(name for name in record | expected if record.get(name) != expected.get(name))
        if names:
            run = f"row {record['row']}, seed {record['seed']}"
            problems.append(f"{file.name}, {run}: {', '.join(names)}: not as in the whole record")
    return problems


def is_dropped(file: Path) -> bool:
    """Tell whether whole.json named a record file at some commit, and no longer does."""
    name = f"{file.parent.name}/{file.name}"
    if name in index_of(file.parent.parent):
        return False
    return bool(git(file.parent, "log", "-1", "--format=%h", "-S", f'"{name}"', "--", f"../{INDEX}").stdout)


def check_records(study: Path) -> list[str]:
    """Return the problems of the small record files of a study; none in a shallow clone, which lacks them."""
    if not is_complete(study):
        return []
    dropped = [file.name for file in sorted(study.glob("*.jsonl")) if is_dropped(file)]
    problems = [f"{INDEX} no longer names {name}; restore its line" for name in dropped]
    names = [name for name in index_of(study.parent) if name.startswith(f"{study.name}/")]
    try:
        return problems + [problem for name in names for problem in problems_of(study.parent / name)]
    except (ValueError, OSError, KeyError) as error:
        return [*problems, f"small records: {error}"]


def get(name: str, studies: Path, output: Path) -> Path:
    """Write the whole records of a study, or all files of a study that left the tree; return the folder."""
    index = index_of(studies)
    study = studies / name
    files = {key.partition("/")[2]: commit for key, commit in index.items() if key.startswith(f"{name}/")}
    if name in index:
        files = dict.fromkeys(files_at(index[name], study), index[name])
    if not files:
        known = ", ".join(sorted({key.partition("/")[0] for key in index}))
        raise ValueError(f"{name}: history holds no records of this study; choose among {known}")
    for file, commit in files.items():
        target = output / name / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content_at(commit, study, file))
    if name not in index and (study / "declared.json").is_file():  # without it report.py refuses the records
        (output / name / "declared.json").write_bytes((study / "declared.json").read_bytes())
    return output / name


def missing_study(study: Path) -> str | None:
    """Return a sentence if a study is no longer in the tree, which names the command that brings it."""
    commit = index_of(study.parent).get(study.name)
    if commit is None:
        return None
    return (
        f"the study {study.name} is no longer in the tree; `python -m experiments.records get {study.name}` "
        f"brings its files of commit {commit[:8]}"
    )


def write_small(name: str, steps: list[str], studies: Path) -> None:
    """Replace a committed record file by its small form, and note the commit; ValueError if it cannot."""
    file = studies / name
    index = index_of(studies)
    if name not in index and (not file.is_file() or git(studies, "status", "--porcelain", name).stdout):
        raise ValueError(f"{name}: commit the whole record file first, because history has to keep it")
    commit = index.get(name) or git(file.parent, "rev-parse", "HEAD").stdout.strip()
    records = [json.loads(line) for line in whole_text(file).splitlines()]
    present = file.read_text().splitlines() if file.is_file() else []
    if len(present) > len(records):
        raise ValueError(f"{name} has more runs than its commit {commit[:8]}: move new runs to another file")
    unknown = sorted(set(steps) - {metric for record in records for metric in record["steps"]})
    if unknown:
        raise ValueError(f"--steps {' '.join(unknown)}: no record of {name} has this metric")
    lines = [json.dumps(thin(record, steps), separators=(",", ":")) + "\n" for record in records]
    file.write_text("".join(lines))
    (studies / INDEX).write_text(json.dumps(dict(sorted((index | {name: commit}).items())), indent=1) + "\n")


def main(argv: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = command_line(None, __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    getting = commands.add_parser("get", help="bring whole records, or a study that left the tree")
    getting.add_argument("study", help="name of a study")
    thinning = commands.add_parser("thin", help="replace a committed record file by its small form")
    thinning.add_argument("file", help="STUDY/FILE.jsonl")
    thinning.add_argument("--steps", nargs="*", default=[], help="training metrics to keep")
    args = parser.parse_args(argv)
    try:
        if args.command == "get":
            print(get(args.study, STUDIES, ROOT / "runs" / "records"))
        else:
            write_small(args.file, args.steps, STUDIES)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
