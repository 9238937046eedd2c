"""Run every row of a table with every seed, one run of train_rl.py each; or reproduce one row of a study.

    python experiments/run.py --rows experiments/studies/tools/*.yaml --seeds 0 1 2 3 4 --out runs/all
    python experiments/run.py --rows ROW.yaml --seeds 0 --out runs/try --jobs 2 --ranks 2 eval.every=5
    python experiments/run.py ... --script mine.py    run a changed copy of train_rl.py
    python experiments/run.py ... --dry-run           print the commands of unfinished runs
    python experiments/run.py --row elimination_tuned/grpo --seed 0    reproduce one recorded run

A row is a YAML file, and the file names the row. Settings on the command line apply to all rows. Seed S of
a row writes to OUT/ROW/seed_S, and the console output of the latest launch goes to OUT/ROW/seed_S.log. All
rows run with the first seed before any row runs with the second seed, so that an early table has all rows.

Repeat a command to continue: finished runs are skipped, unfinished runs resume from checkpoints. A folder
made with other settings, or by a script of another name, is refused; --redo removes the folder and runs
again. A folder that another run is using is refused too. Ctrl-C and SIGTERM end all runs. On a GPU machine
use --jobs 1, because every run takes the first GPUs, as many as --ranks.

--row STUDY/ROW runs experiments/studies/STUDY/ROW.yaml with one seed and the recorded settings, and prints
the new figures beside the recorded figures. Recorded settings of an earlier version are read by their present
names (runtime/old_settings.py). The run begins with the recorded start weights, brought from history if
needed, with the prompts beside them (starts.py). If data/built lacks the model or prompts of the environment,
prepare.sh of the study or experiments/prepare.sh builds both first. The commands in the study's README make
all other files. model.ep_size is that of the record.

If the study declares task instances, seed S reads those of its number, for example data/built/habits_3.

A row may name kept weights, for example `model: {path: experiments/starts/habits/model}`. Before any run they
are brought from history if they have left the tree, and their files are compared with their digests.
"""

import argparse
import fcntl
import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import psutil
import yaml
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.append(str(ROOT))  # run as a script: for the modules of the project

from data.tiny import recipe_of
from experiments import records, report, starts
from experiments.bench.common import markdown, torchrun
from experiments.declaration import read_declaration, warnings_of_launch
from runtime.config import command_line, differences, flat_settings, with_paths_from
from runtime.old_settings import present_settings, settings_of_record
from runtime.provenance import commit_of
from runtime.user_files import user_file_digests

STUDIES = ROOT / "experiments" / "studies"
GRACE_S = 60.0  # between SIGTERM to torchrun, which ends the ranks, and SIGKILL to surviving processes
PREPARE = ROOT / "experiments" / "prepare.sh"
ANY_METRIC = "train/zero_variance_frac"  # a metric of every record, because reading a run requires one
OTHER_START = (
    "The initial weights of the recorded runs are not available: this run starts from weights built on this "
    "machine, which may differ. Results differ by rounding between processors, so expect similar figures."
)


@dataclass(frozen=True)
class Run:
    """One row with one seed. Paths below the root are relative to the root."""

    row: str
    seed: int
    folder: Path
    log: Path
    script: Path
    arguments: tuple[str, ...]  # arguments of the script


# ------------------------------------------------------------------------------------------------------------
# Which runs
# ------------------------------------------------------------------------------------------------------------
def from_root(path: Path) -> Path:
    """Return the path relative to the root, so that no config.yaml records a folder of this machine."""
    path = path.resolve()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def plan(args: argparse.Namespace) -> list[Run]:
    """List all runs in launch order: for each seed, all rows."""
    for name, values in (("--rows", [path.stem for path in args.rows]), ("--seeds", args.seeds)):
        duplicates = [str(value) for value, count in Counter(values).items() if count > 1]
        if duplicates:
            problem = f"{name}: {', '.join(duplicates)} occurs twice"
            raise ValueError(f"{problem}; name each once, because row and seed name the run folders")
    runs = []
    script = from_root(args.script)
    for seed in args.seeds:
        for path in args.rows:
            folder = from_root(args.out) / path.stem / f"seed_{seed}"
            settings = [f"run.dir={folder}", f"train.seed={seed}"]
            if not args.row:  # the recorded settings have both
                settings += [f"model.ep_size={args.ranks}", *instance_settings(path, script, seed)]
            arguments = ("--config", str(from_root(path)), *settings, *args.settings)
            log = folder.with_name(f"seed_{seed}.log")
            runs.append(Run(path.stem, seed, folder, log, script, arguments))
    return runs


def instance_settings(row: Path, script: Path, seed: int) -> list[str]:
    """Return the settings that move a row to the task instance of its seed, if declared.json has `instances`.

    Every path below data/built/RECIPE becomes one below data/built/RECIPE_N, N = seed // seeds_each; instance
    0 has no number.
    """
    file = row.parent / "declared.json"
    instances = read_declaration(file).get("instances") if file.is_file() else None
    number = seed // instances["seeds_each"] if instances else 0
    if not number:
        return []
    config = load_script(ROOT / script).load_config(["--config", str(row)])
    recipe = instances["recipe"]
    return moved_settings(config, lambda text: text.replace(f"/{recipe}/", f"/{recipe}_{number}/"))


def moved_settings(config, move: Callable[[str], str]) -> list[str]:
    """Return the settings whose JSON changes by `move`, as words of a command line."""
    values = config.model_dump(mode="json", exclude_defaults=True)
    stages = {"stages": values.pop("stages")} if "stages" in values else {}
    texts = {name: json.dumps(value) for name, value in (flat_settings(values) | stages).items()}
    return [f"{name}={moved}" for name, text in texts.items() if (moved := move(text)) != text]


def command(run: Run, ranks: int) -> list[str]:
    """Return the command of a run, for the root as working directory."""
    return [*torchrun(ranks), str(run.script), *run.arguments]


@functools.cache
def load_script(path: Path) -> ModuleType:
    """Import train_rl.py or a changed copy from a file; ValueError for any other file."""
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"--script: {path} is not a Python file; name a copy of train_rl.py")
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # before the code runs: dataclasses look up the module by name
    spec.loader.exec_module(module)
    if not (hasattr(module, "Config") and hasattr(module, "load_config")):
        raise ValueError(f"--script: {path} lacks Config or load_config(); name a copy of train_rl.py")
    return module


def changed_settings(run: Run) -> list[str]:
    """List the settings that differ between the folder and the command; ValueError for invalid settings.

    If the folder is older than a setting, the setting counts as its default. The name of the script counts as
    a setting.
    """
    script = load_script(run.script)
    config = script.load_config(list(run.arguments))
    if (Path(config.run.dir), config.train.seed) != (run.folder, run.seed):
        raise ValueError("--out and --seeds set run.dir and train.seed; remove these two from the command")
    if not (run.folder / "config.yaml").is_file():
        return []
    try:
        values = present_settings(yaml.safe_load((run.folder / "config.yaml").read_text()))
        saved = script.Config.model_validate(with_paths_from(run.folder, values, script.Config))
    except (yaml.YAMLError, ValueError) as error:
        return [f"its config.yaml is not of this version ({' '.join(str(error).split())})"]
    file = run.folder / "versions.json"
    versions = {"script": run.script.name} | (json.loads(file.read_text()) if file.is_file() else {})
    name = versions["script"]
    changes = [] if name == run.script.name else [f"--script {name} -> {run.script.name}"]
    plugins = versions.get("plugins", {})
    digests = user_file_digests(config).items()
    changes += [f"{name} has changed" for name, digest in digests if plugins.get(name, digest) != digest]
    settings = differences(saved.model_dump(mode="json"), config.model_dump(mode="json"))
    return changes + [change for change in settings if not change.startswith("run.dir ")]


def unfinished(runs: list[Run], redo: bool, dry_run: bool) -> list[Run]:
    """List the unfinished runs; with redo, remove folders made with other settings.

    ValueError for a folder made with other settings, unless redo is set, and for a folder that another run
    has locked. A dry run ignores locks and removes nothing.
    """
    for run in [] if dry_run else runs:
        refuse_locked(run.folder)
    changes = {run: changed_settings(run) for run in runs}
    changed = [f"{run.folder}: {'; '.join(names)}" for run, names in changes.items() if names]
    if changed and not redo:
        raise ValueError(
            "folders were made with other settings; choose another --out, or --redo to remove these runs and "
            "run them again:\n" + "\n".join(changed)
        )
    for run in runs:
        if changes[run] and not dry_run:
            shutil.rmtree(run.folder)
    return [run for run in runs if changes[run] or not (run.folder / "summary.json").is_file()]


def refuse_locked(folder: Path) -> None:
    """Raise ValueError if a run is writing to the folder, because a second launch would truncate the log."""
    if (folder / "lock").is_file():
        with (folder / "lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{folder}: a run is writing to it; wait, or choose another --out") from None


# ------------------------------------------------------------------------------------------------------------
# Running
# ------------------------------------------------------------------------------------------------------------
def start(run: Run, ranks: int) -> subprocess.Popen:
    """Launch a run in a separate session: Ctrl-C reaches this script only, which then ends all runs."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # for a copy elsewhere
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path}
    with run.log.open("w") as log:
        return subprocess.Popen(
            command(run, ranks), cwd=ROOT, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def end_trees(processes: list[subprocess.Popen]) -> None:
    """End processes and all child processes.

    torchrun puts each rank into a separate session, so a signal to a process group would miss the ranks.
    """
    trees = [psutil.Process(process.pid) for process in processes]
    trees += [child for parent in trees for child in parent.children(recursive=True)]
    for process in processes:
        process.terminate()
    _, alive = psutil.wait_procs(trees, timeout=GRACE_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)


def end_of(log: Path, num_lines: int = 15) -> str:
    """Return the last lines of a console, without the report that torchrun adds after a rank has failed."""
    lines = log.read_text(errors="replace").splitlines()
    is_footer = ["torch/distributed/elastic" in line and "] failed" in line for line in lines]
    rank_lines = lines[: is_footer.index(True)] if True in is_footer else lines
    return "\n".join(rank_lines[-num_lines:])


def print_result(run: Run, returncode: int, seconds: float) -> bool:
    """Print the final figures of a run, or the end of a failed run's log; return whether it succeeded."""
    name = f"{run.row} seed {run.seed}"
    if returncode == 0 and (run.folder / "summary.json").is_file():
        summary = json.loads((run.folder / "summary.json").read_text())
        final = [(k.removesuffix("_after"), v) for k, v in summary.items() if k.endswith("_after")]
        figures = ", ".join(f"{k} {v:.4f}" for k, v in final if isinstance(v, float | int))
        tqdm.write(f"{name}: {seconds:.0f} s, {figures}")
        return True
    tqdm.write(f"{name} FAILED (exit code {returncode}) after {seconds:.0f} s; the end of {run.log}:")
    tqdm.write(end_of(run.log) + "\n")
    return False


def run_all(runs: list[Run], jobs: int, ranks: int) -> list[Run]:
    """Run all, at most `jobs` at a time; return the failed runs. A signal raises KeyboardInterrupt."""
    waiting = deque(runs)
    running: dict[Run, tuple[subprocess.Popen, float]] = {}
    failed = []
    signals = []
    for number in (signal.SIGINT, signal.SIGTERM):
        # The handler only records the signal: an exception could strike between the launch of a run and the
        # entry in `running`, and the run would survive this script.
        signal.signal(number, lambda number, frame: signals.append(number))
    progress = tqdm(total=len(runs), desc="table", unit="run", disable=None)
    try:
        while (waiting or running) and not signals:
            while waiting and len(running) < jobs:
                running[waiting[0]] = (start(waiting[0], ranks), time.monotonic())
                waiting.popleft()
            for run, (process, started) in list(running.items()):
                if process.poll() is not None:
                    del running[run]
                    if not print_result(run, process.returncode, time.monotonic() - started):
                        failed.append(run)
                    progress.update()
            progress.refresh()
            time.sleep(0.2)
    finally:
        end_trees([process for process, _ in running.values()])
        progress.close()
    if signals:
        raise KeyboardInterrupt
    return failed


# ------------------------------------------------------------------------------------------------------------
# Reproducing a row
# ------------------------------------------------------------------------------------------------------------
def row_file(row: Path) -> Path:
    """Return the YAML file of a row; ValueError names the rows of the study."""
    if not row.is_file():
        names = ", ".join(sorted(file.stem for file in row.parent.glob("*.yaml"))) or "none"
        raise ValueError(f"--row: {from_root(row)} does not exist; rows in this folder: {names}")
    return row


def recorded_run(study: Path, row: str, seed: int) -> dict:
    """Find the record of a row with a seed in the record files of a study.

    The whole record, with all figures, if history holds it and is not shallow; else the small one.
    """
    runs = [
        (file.name, run)
        for file in sorted(study.glob("*.jsonl"))
        for run in map(json.loads, records.whole_text(file, or_small=True).splitlines())
        if run["row"] == row
    ]
    matches = [(name, run) for name, run in runs if run["seed"] == seed]
    if len(matches) > 1:
        raise ValueError(f"--seed {seed}: row {row} is recorded in {', '.join(n for n, _ in matches)}")
    if not matches:
        seeds = ", ".join(map(str, sorted({run["seed"] for _, run in runs}))) or "none"
        raise ValueError(f"--seed {seed}: not recorded for row {row}; recorded seeds: {seeds}")
    name, run = matches[0]
    print(f"record: row {row}, seed {seed} of {from_root(study / name)}", file=sys.stderr)
    return run


def missing_files(run: Run) -> dict[str, str]:
    """Return {setting: path} of the models, prompts and scores that a run reads and that do not exist."""
    config = load_script(run.script).load_config(list(run.arguments)).model_dump(mode="json")
    files = {"model.path": config["model"]["path"], "reward.judge_path": config["reward"]["judge_path"]}
    sections = {"": config} | {f"stages[{number}].": stage for number, stage in enumerate(config["stages"])}
    for prefix, section in sections.items():
        for kind, sources in section.get("data", {}).items():
            if kind in ("train", "eval"):
                files |= {f"{prefix}data.{kind}[{i}].path": each["path"] for i, each in enumerate(sources)}
        for name in ("zero_variance.offline_scores", "teacher.path", "teacher.scores"):
            group, _, key = name.partition(".")
            files[prefix + name] = section.get(group, {}).get(key)
    return {
        name: path
        for name, path in files.items()
        if path is not None and not Path(path).exists() and not starts.is_held(path)
    }


def is_recipe(name: str) -> bool:
    """Tell whether prepare.sh can build the folder data/built/NAME."""
    try:
        return bool(re.fullmatch(r"tasks_(small|hard)(_\d+)?", name) or recipe_of(name))
    except ValueError:
        return False


def build_start(run: Run, study: Path, dry_run: bool) -> None:
    """Build the task instances of a run that data/built lacks, by prepare.sh of the study or of experiments.

    ValueError if a file is missing afterwards: the README of the study makes it. A dry run prints the command
    only.
    """
    folders = {Path(path).parts[2] for path in missing_files(run).values() if path.startswith("data/built/")}
    recipes = sorted(filter(is_recipe, folders))
    script = study / "prepare.sh"
    build = ["bash", str(from_root(script if script.is_file() else PREPARE)), *recipes]
    if recipes and dry_run:
        print(shlex.join(build))
        return
    if recipes and subprocess.run(build, cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}).returncode:
        raise ValueError(f"cannot build the start, `{shlex.join(build)}` failed")
    if missing := [f"{name}: {path}" for name, path in missing_files(run).items()]:
        readme = from_root(study / "README.md")
        raise ValueError(f"missing files ({'; '.join(missing)}): make them by the commands in {readme}")


def committed_start(recorded: dict) -> Path | None:
    """Return the committed model folder with the recorded start weights, relative to the root.

    None if the record has no digest or its start is not committed. ValueError if the record names a committed
    start whose weights have been replaced since the run.
    """
    weights = recorded.get("versions", {}).get("weights")
    start = starts.start_with(weights)
    named = recorded.get("settings", {}).get("model.path", "")
    if start is None and starts.starts_of(named):
        raise ValueError(f"{named}: other weights ({weights}) at the recorded run; restore them with git")
    return start and from_root(start)


def start_settings(args: argparse.Namespace, start: Path) -> list[str]:
    """Return the settings that name committed weights, and the files beside them in place of data/built.

    A file that is not beside the start, for example a pool of prompts, stays in data/built. start: model
    folder of the start, for example experiments/starts/chains/model.
    """
    script = load_script(ROOT / from_root(args.script))
    config = script.load_config(["--config", str(args.rows[0]), *args.settings])
    files = starts.record_of(ROOT / start.parent).get("files", {})

    def committed(match: re.Match) -> str:
        """Return the path beside the start, if the start has the file."""
        file = start.parent / match[1]
        return str(file) if match[1] in files or (ROOT / file).exists() else match[0]

    path = re.compile(rf'data/built/{re.escape(start.parent.name)}/([^"]+)')
    settings = moved_settings(config, lambda text: path.sub(committed, text))
    return [f"model.path={start}", *(text for text in settings if not text.startswith("model.path="))]


def check_starts(runs: list[Run], dry_run: bool = False) -> None:
    """Bring the starts that runs name from history; ValueError for one that differs from its digests.

    A dry run brings none.
    """
    folders: set[Path] = set()
    for run in runs:
        config = load_script(run.script).load_config(list(run.arguments))
        folders |= starts.starts_of(config.model_dump(mode="json"))
    left = {folder for folder in folders if starts.is_left(folder)}
    for folder in sorted(left) if not dry_run else ():
        starts.get(folder.name)
    problems = [problem for folder in sorted(folders - left) for problem in starts.problems_of(folder)]
    if problems:
        raise ValueError("\n".join(problems))


def nested_stages(flat: dict[str, object]) -> list[dict]:
    """Return the stages of recorded settings, for example {"stages[0].until.steps": 18} as a nested list."""
    stages: dict[int, dict] = {}
    for name, value in flat.items():
        if match := re.fullmatch(r"stages\[(\d+)\]\.(.+)", name):
            *sections, key = match[2].split(".")
            inner = stages.setdefault(int(match[1]), {})
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[key] = value
    return [stages[number] for number in sorted(stages)]


def recorded_settings(args: argparse.Namespace, recorded: dict) -> list[str]:
    """List the recorded settings that the row's YAML lacks, for example eval.every=100 of a command line.

    Also model.ep_size, because plan() would set it to the number of ranks, which may have been another one.
    """
    script = load_script(ROOT / from_root(args.script))
    defaults = flat_settings(script.Config().model_dump(mode="json"))
    config = script.load_config(["--config", str(args.rows[0])])
    present = flat_settings(config.model_dump(mode="json", exclude_defaults=True))
    past = settings_of_record(recorded)
    stages = nested_stages(past)
    overrides = [] if stages == nested_stages(present) else [f"stages={json.dumps(stages)}"]
    overrides.append(f"model.ep_size={past.get('model.ep_size', defaults['model.ep_size'])}")
    names = [n for n in past | present if past.get(n) != present.get(n) and not n.startswith("stages[")]
    names = [name for name in names if name not in ("run.dir", "train.seed", "model.ep_size")]
    return overrides + [f"{name}={json.dumps(past.get(name, defaults.get(name)))}" for name in names]


def figures_of(record: dict) -> dict[str, str]:
    """Return the figures of a record: evaluations at the first and last step, tokens and seconds.

    A small record lacks some of them.
    """
    figures = {}
    for name, values in record["evaluations"].items():
        values = [value for value in values if value is not None]
        if name.startswith("eval/") and values:
            figures[name.removeprefix("eval/")] = f"{values[0]:.4f} -> {values[-1]:.4f}"
    steps = record["steps"]
    if "generated_tokens" in steps:
        figures["steps"] = str(len(steps["generated_tokens"]))
        figures["generated tokens"] = f"{steps['generated_tokens'][-1]:,.0f}"
    if {"gradient_tokens_total", "tokens_total"} <= steps.keys():
        share = sum(steps["gradient_tokens_total"]) / sum(steps["tokens_total"])
        figures["share of tokens with gradient"] = f"{share:.3f}"
    if "seconds_per_step" in steps:
        figures["seconds of training"] = f"{sum(steps['seconds_per_step']):.0f}"
    return figures


def comparison(run: Run, recorded: dict) -> list[str]:
    """Return the table of new and recorded figures, and the note about weights."""
    new_figures = figures_of(report.read_run(ROOT / run.folder, ANY_METRIC).record)
    old_figures = figures_of(recorded)
    rows = [[name, value, old_figures.get(name, "-")] for name, value in new_figures.items()]
    start = committed_start(recorded)
    note = f"This run and the recorded run begin with the weights in {start}." if start else OTHER_START
    commit = str(recorded.get("commit"))[:8]
    heads = [f"{run.row}, seed {run.seed}", "this run", f"recorded (commit {commit})"]
    return [*markdown(heads, rows), "", note]


# ------------------------------------------------------------------------------------------------------------
# The command line
# ------------------------------------------------------------------------------------------------------------
def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(None, __doc__)
    add = parser.add_argument
    add("--rows", type=Path, nargs="+", help="YAML files, one per row")
    add("--seeds", type=int, nargs="+", help="train.seed of the runs of each row")
    add("--out", type=Path, help="folder of the run folders (with --row: runs/reproduce/STUDY)")
    add("--row", metavar="STUDY/ROW", help="instead of --rows: reproduce a row of a study")
    add("--seed", type=int, default=0, help="seed of --row (default: %(default)s)")
    add("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    add("--ranks", type=int, default=1, help="ranks per run, and model.ep_size unless --row takes it from "
        "a record; end the line with model.ep_size=1 for a dense model (default: %(default)s)")  # fmt: skip
    add("--script", type=Path, default=ROOT / "train_rl.py", help="train_rl.py (default), or a changed copy")
    add("--redo", action="store_true", help="remove and repeat runs made with other settings")
    add("--dry-run", action="store_true", help="print the commands only")
    add("settings", nargs="*", metavar="section.key=value", help="settings for all rows")
    args = parser.parse_intermixed_args(argv)
    if args.jobs < 1 or args.ranks < 1:
        parser.error("--jobs and --ranks must be at least 1")
    if args.row is None and None in (args.rows, args.seeds, args.out):
        parser.error("expected --rows, --seeds and --out; or --row STUDY/ROW")
    if args.row is not None:
        study, _, row = args.row.removesuffix(".yaml").rpartition("/")
        if args.rows or args.seeds or not study:
            parser.error("--row STUDY/ROW takes --seed, and neither --rows nor --seeds")
        args.rows = [STUDIES / study / f"{row}.yaml"]
        args.seeds = [args.seed]
        args.out = args.out or ROOT / "runs" / "reproduce" / study
    return args


def prepare(args: argparse.Namespace) -> tuple[list[Run], list[Run], dict | None]:
    """Return all runs, the unfinished runs and, for --row, the recorded run. Build the start of --row."""
    recorded = None
    if args.row:
        study = args.rows[0].parent
        if left := records.missing_study(study):
            raise ValueError(left)
        args.rows = [row_file(args.rows[0])]
        recorded = recorded_run(study, args.rows[0].stem, args.seed)
        start = committed_start(recorded)
        args.settings = [*recorded_settings(args, recorded), *args.settings]
        args.settings += start_settings(args, start) if start else []
    runs = plan(args)
    args.rows = [row.absolute() for row in args.rows]
    os.chdir(ROOT)  # the working directory of train_rl.py, for relative paths in settings
    todo = unfinished(runs, args.redo, args.dry_run)
    check_starts(todo, args.dry_run)
    if recorded and todo:
        build_start(todo[0], study, args.dry_run)
    return runs, todo, recorded


def main(argv: list[str]) -> int:
    """Run the command line and return the exit code."""
    args = parse(argv)
    try:
        runs, todo, recorded = prepare(args)
        is_clean = commit_of()["dirty"] is False
        warnings = [] if recorded else warnings_of_launch(args.rows, args.seeds, is_clean, args.settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.dry_run:
        for run in todo:
            path = "" if run.script.parent == Path() else "PYTHONPATH=. "  # as start() sets it
            print(path + shlex.join(command(run, args.ranks)))
        return 0
    for warning in warnings if todo else ():
        print(f"warning: {warning}: `report.py --check` will refuse these runs", file=sys.stderr)
    print(f"{len(runs) - len(todo)} of {len(runs)} runs are already finished", flush=True)
    try:
        failed = run_all(todo, args.jobs, args.ranks)
    except KeyboardInterrupt:
        print(
            "interrupted: all runs are ended; repeat the command to skip finished runs, resume runs with a "
            "checkpoint and restart all other runs",
            file=sys.stderr,
        )
        return 130
    for run in failed:
        print(f"failed: {run.row} seed {run.seed}, see {run.log}", file=sys.stderr)
    if recorded and not failed:
        print("\n".join(comparison(runs[0], recorded)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
