"""Keep the start weights and judges of studies, with their prompts: bring them from history, and check them.

    python -m experiments.starts get chains_3                  # to experiments/starts/chains_3
    python -m data.tiny --recipe habits_10                     # a start that history does not hold yet
    python -m experiments.starts add habits_10 data/built/habits_10
    python -m experiments.starts check                         # compares all files with their digests

A start is a folder: a model (model/ of data.tiny, or a judge) as safetensors, the prompts as *.jsonl, and
start.json with the SHA-256 of each file, the digest of the weights that records also hold, and the commit,
machine and date of `add`. `commit` in start.json says that the files have left the tree, and at which commit
they are; git ignores the files that `get` brings. `tiny` and `habits` stay in the tree, because the demo,
`make record` and tests read them. Rows name a start by path, for example by laying
experiments/starts/habits.yaml over their base. experiments/run.py brings and checks these starts before any
run, and `report.py --check` checks all.
"""

import json
import re
import shutil
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from experiments.history import content_at, is_complete
from runtime.config import command_line
from runtime.provenance import commit_of, machine_of, now, versions_of

STARTS = ROOT / "experiments" / "starts"
RECORD = "start.json"
MAX_BYTES = 8 * 2**20  # of a start
MAX_TOTAL_BYTES = 40 * 2**20  # of all starts
FORMATS = (".safetensors", ".json", ".jsonl", ".jinja", ".txt")


def digests_of(start: Path) -> dict[str, str]:
    """Return {path: SHA-256} of the files of a start, without its record."""
    files = sorted(file for file in start.rglob("*") if file.is_file() and file != start / RECORD)
    return {str(file.relative_to(start)): sha256(file.read_bytes()).hexdigest() for file in files}


def record_of(start: Path) -> dict:
    """Read start.json of a start; {} without it."""
    file = start / RECORD
    return json.loads(file.read_text()) if file.is_file() else {}


def is_left(start: Path) -> bool:
    """Tell whether history holds files of a start that are not here, and those here are as committed."""
    record = record_of(start)
    return "commit" in record and digests_of(start).items() < record["files"].items()


def is_held(path: str) -> bool:
    """Tell whether history holds a file or folder that settings name, below the folder of a start."""
    (start,) = starts_of(path) or {None}
    if start is None or not is_left(start):
        return False
    name = path.partition(f"/{start.name}")[2].strip("/")
    return any(f"{file}/".startswith(f"{name}/") or not name for file in record_of(start)["files"])


def problems_of(start: Path) -> list[str]:
    """Return a sentence for each file of a start that differs from the record."""
    record = record_of(start)
    if not record:
        return [f"{start}: {RECORD} is missing; `python -m experiments.starts add` writes it"]
    recorded = record["files"]
    present = digests_of(start)
    changed = sorted(name for name in recorded if recorded[name] != present.get(name))
    extra = sorted(present.keys() - recorded.keys())
    remedy = f"`python -m experiments.starts get {start.name}`" if "commit" in record else "git"
    problems = [f"{start}: {', '.join(changed)}: not as committed; restore with {remedy}"] if changed else []
    return problems + ([f"{start}: {', '.join(extra)}: not of the start; move elsewhere"] if extra else [])


def record_problems(start: Path) -> list[str]:
    """Return a sentence if start.json is not as at its commit; none in a shallow clone, which lacks it."""
    record = record_of(start)
    if "commit" not in record or not is_complete(start):
        return []
    try:
        committed = json.loads(content_at(record["commit"], start, RECORD))
    except ValueError as error:
        return [f"{start}: {RECORD}: {error}"]
    names = sorted(name for name in record | committed if record.get(name) != committed.get(name))
    changed = ", ".join(name for name in names if name != "commit")
    return [f"{start}: {changed} of {RECORD}: not as committed; restore with git"] if changed else []


def get(name: str) -> Path:
    """Bring the files of a start from their commit, check their digests and return the folder.

    Each file appears at once and complete, so that a start of which some files are here counts as absent.
    ValueError if there is no such start, if history lacks the commit, or if a digest differs.
    """
    start = STARTS / name
    record = record_of(start)
    if not record:
        names = ", ".join(sorted(file.parent.name for file in STARTS.glob(f"*/{RECORD}")))
        raise ValueError(f"{name}: no such start; choose among {names}")
    if "commit" not in record or digests_of(start) == record["files"]:
        return start
    contents = {file: content_at(record["commit"], start, file) for file in record["files"]}
    wrong = [file for file, data in contents.items() if sha256(data).hexdigest() != record["files"][file]]
    if wrong:
        raise ValueError(
            f"{name}: {', '.join(wrong)} of commit {record['commit'][:8]} differs from the SHA-256 in "
            f"{RECORD}; restore {RECORD} with git"
        )
    with tempfile.TemporaryDirectory(prefix=".", dir=STARTS) as folder:
        for number, (file, content) in enumerate(contents.items()):
            part = Path(folder) / str(number)
            part.write_bytes(content)
            (start / file).parent.mkdir(parents=True, exist_ok=True)
            part.rename(start / file)
    return start


def all_problems(starts: Path) -> list[str]:
    """Return the problems of all starts in a folder, and of their sizes."""
    folders = sorted(path for path in starts.glob("[!.]*") if path.is_dir())
    problems = [text for folder in folders for text in record_problems(folder)]
    problems += [text for folder in folders if not is_left(folder) for text in problems_of(folder)]
    sizes = {folder: sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) for folder in folders}
    problems += [f"{folder}: {size:,} bytes, more than {MAX_BYTES:,}" for folder, size in sizes.items()
                 if size > MAX_BYTES]  # fmt: skip
    if sum(sizes.values()) > MAX_TOTAL_BYTES:
        problems.append(f"{starts}: {sum(sizes.values()):,} bytes, more than {MAX_TOTAL_BYTES:,}")
    return problems


def starts_of(settings: object) -> set[Path]:
    """Return the folders of the starts that settings name, for example by model.path or reward.judge_path."""
    below = re.escape(f"{STARTS.relative_to(ROOT)}/")
    return {STARTS / name for name in re.findall(rf"{below}([\w.-]+)", json.dumps(settings))}


def start_with(weights: str | None) -> Path | None:
    """Return the model folder of the start whose weights have a digest; None without one."""
    for file in sorted(STARTS.glob(f"*/{RECORD}")):
        for folder, digest in record_of(file.parent)["weights"].items():
            if weights is not None and digest == weights:
                return file.parent / folder
    return None


def add(name: str, source: Path) -> Path:
    """Copy a built folder to a new start and record the digests; ValueError if the folder does not fit."""
    from runtime.checkpoint import digest_of_weights

    start = STARTS / name
    if not re.fullmatch(r"[\w.-]+", name) or start.exists():
        raise ValueError(f"{name}: the name is invalid or taken; choose another")
    files = [file for file in sorted(source.rglob("*")) if file.is_file()]
    models = sorted({file.parent for file in files if file.suffix == ".safetensors"})
    strange = [str(file) for file in files if file.suffix not in FORMATS]
    size = sum(file.stat().st_size for file in files)
    if not models or strange or size > MAX_BYTES:
        raise ValueError(
            f"{source}: expected safetensors and only {', '.join(FORMATS)}, {MAX_BYTES:,} bytes at most; got "
            f"{size:,} bytes, {len(models)} models, other files: {', '.join(strange) or 'none'}"
        )
    shutil.copytree(source, start)
    weights = {str(model.relative_to(source)): digest_of_weights(model) for model in models}
    added = {**commit_of(), "date": now(), "machine": machine_of(), "versions": versions_of()}
    record = {"weights": weights, "files": digests_of(start), "added": added}
    (start / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return start


def main(argv: list[str]) -> int:
    """Run the command line and return the exit code."""
    parser = command_line(None, __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    getting = commands.add_parser("get", help="bring a start from its commit")
    getting.add_argument("name", nargs="+", help="name of a start, for example chains_3")
    adding = commands.add_parser("add", help="copy a built folder to a new start")
    adding.add_argument("name", help="name of the start")
    adding.add_argument("source", type=Path, help="model and prompts, for example data/built/habits_10")
    commands.add_parser("check", help="compare all starts with their digests")
    args = parser.parse_args(argv)
    try:
        if args.command == "add":
            start = add(args.name, args.source)
            print(f"commit this folder: git add -f {start.relative_to(ROOT)}")
        for name in args.name if args.command == "get" else ():
            print(get(name).relative_to(ROOT))
        problems = [] if args.command == "get" else all_problems(STARTS)
    except (ValueError, OSError) as error:
        problems = [str(error)]
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
