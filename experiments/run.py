"""Run every row of a table with every seed: one run of train_rl.py each, several at once, resumable.

    python experiments/run.py --rows experiments/studies/zero_variance/*.yaml --seeds 0 1 2 3 4 --out runs/all
    python experiments/run.py --rows ROW.yaml --seeds 0 --out runs/try --jobs 2 --ranks 2 eval.every=5
    python experiments/run.py ... --script mine.py    run a changed copy of train_rl.py, with its settings
    python experiments/run.py ... --dry-run           print the commands of the runs still to do

A row is a YAML file and is named like it; settings on the command line go to all rows. Seed S of a row writes
to OUT/ROW/seed_S, and its console, since its latest start, to OUT/ROW/seed_S.log. All rows get the first seed
before any gets the second, so that an early table compares all of them.

The same command again goes on: finished runs are skipped, others resume from their checkpoints. A folder made
with other settings or by a script of another name is refused, with --redo removed and redone; a folder that
another run writes to is refused. Ctrl-C and SIGTERM end all runs. On a GPU machine use --jobs 1: every run
takes the first GPUs, as many as --ranks.
"""

import argparse
import fcntl
import functools
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import psutil
import yaml
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 60.0  # between SIGTERM to torchrun, which ends its ranks, and SIGKILL to what is left


@dataclass(frozen=True)
class Run:
    """One row with one seed. Paths are relative to the root where they lie below it."""

    row: str
    seed: int
    folder: Path
    log: Path
    script: Path
    arguments: tuple[str, ...]  # arguments of the script


def from_root(path: Path) -> Path:
    """Return the path as the script will see it; so no config.yaml names a folder of this machine."""
    path = path.resolve()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def plan(args: argparse.Namespace) -> list[Run]:
    """List all runs in the order in which they start: seeds outside, rows inside."""
    for name, values in (("--rows", [path.stem for path in args.rows]), ("--seeds", args.seeds)):
        twice = [str(value) for value, count in Counter(values).items() if count > 1]
        if twice:
            raise ValueError(
                f"{name}: {', '.join(twice)} is there twice, run folders are named by row and seed"
            )
    runs = []
    for seed in args.seeds:
        for path in args.rows:
            folder = from_root(args.out) / path.stem / f"seed_{seed}"
            own = (f"run.dir={folder}", f"train.seed={seed}", f"model.ep_size={args.ranks}")
            arguments = ("--config", str(from_root(path)), *own, *args.settings)
            log, script = folder.with_name(f"seed_{seed}.log"), from_root(args.script)
            runs.append(Run(path.stem, seed, folder, log, script, arguments))
    return runs


def command(run: Run, ranks: int) -> list[str]:
    """Return the command of a run, to be started in the root."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, str(run.script), *run.arguments]


@functools.cache
def load_script(path: Path) -> ModuleType:
    """Import train_rl.py or a changed copy of it from its file; ValueError if it is neither."""
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"--script: {path} is no Python file")
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    if not (hasattr(module, "Config") and hasattr(module, "load_config")):
        raise ValueError(f"--script: {path} has no Config and load_config(), it is no copy of train_rl.py")
    return module


def changed_settings(run: Run) -> list[str]:
    """List the settings in which the run's folder differs from what would be run; ValueError for wrong ones.

    A setting that is younger than the folder counts as having had its default. The script's name counts as a
    setting.
    """
    script = load_script(run.script)
    from runtime.config import differences  # main() puts the root on the path

    config = script.load_config(list(run.arguments))
    if (Path(config.run.dir), config.train.seed) != (run.folder, run.seed):
        raise ValueError("run.dir and train.seed are set by --out and --seeds; leave them out")
    if not (run.folder / "config.yaml").is_file():
        return []
    try:
        saved = script.Config.model_validate(yaml.safe_load((run.folder / "config.yaml").read_text()))
    except (yaml.YAMLError, ValueError) as error:
        return [f"its config.yaml is not of this version ({' '.join(str(error).split())})"]
    versions = run.folder / "versions.json"
    name = json.loads(versions.read_text())["script"] if versions.is_file() else run.script.name
    changes = [] if name == run.script.name else [f"--script {name} -> {run.script.name}"]
    settings = differences(saved.model_dump(mode="json"), config.model_dump(mode="json"))
    return changes + [change for change in settings if not change.startswith("run.dir ")]


def unfinished(runs: list[Run], redo: bool, dry_run: bool) -> list[Run]:
    """List the runs to do. A folder made with other settings is a ValueError, or with redo is removed.

    ValueError also for a folder whose lock another run holds, unless the list is only printed.
    """
    for run in [] if dry_run else runs:
        refuse_locked(run.folder)
    changes = {run: changed_settings(run) for run in runs}
    changed = [f"{run.folder}: {'; '.join(names)}" for run, names in changes.items() if names]
    if changed and not redo:
        raise ValueError(
            "made with other settings; choose another --out, or --redo to remove these runs and redo them:\n"
            + "\n".join(changed)
        )
    for run in runs:
        if changes[run] and not dry_run:
            shutil.rmtree(run.folder)
    return [run for run in runs if changes[run] or not (run.folder / "summary.json").is_file()]


def refuse_locked(folder: Path) -> None:
    """Raise ValueError if a run writes to the folder now: starting another would cut its log off."""
    if (folder / "lock").is_file():
        with (folder / "lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{folder}: a run is writing to it; wait for it or choose another --out"
                ) from None


def start(run: Run, ranks: int) -> subprocess.Popen:
    """Start a run in a session of its own: a Ctrl-C reaches this script alone, which then ends every tree."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # for a copy elsewhere
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path}
    with run.log.open("w") as log:
        return subprocess.Popen(
            command(run, ranks), cwd=ROOT, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def end_trees(processes: list[subprocess.Popen]) -> None:
    """End processes and all their children.

    torchrun puts each rank in a session of its own, so the trees are found by parentage, not by group.
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
    """Return the last lines of a console, without the screens that torchrun adds below a rank's own words."""
    lines = log.read_text(errors="replace").splitlines()
    footers = [
        i for i, line in enumerate(lines) if "torch/distributed/elastic" in line and "] failed" in line
    ]
    own = lines[: footers[0]] if footers else lines
    return "\n".join(own[-num_lines:])


def report(run: Run, returncode: int, seconds: float) -> bool:
    """Print a line for a run that ended well, the end of its log for another; tell whether it ended well."""
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
    """Run all, at most `jobs` at once, and return those that failed; KeyboardInterrupt once a signal came."""
    waiting, running, failed, signals = deque(runs), {}, [], []
    for number in (signal.SIGINT, signal.SIGTERM):
        # A handler only takes note: an exception could fall between the start of a run and its entry below.
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
                    failed += [] if report(run, process.returncode, time.monotonic() - started) else [run]
                    progress.update()
            progress.refresh()
            time.sleep(0.2)
    finally:
        end_trees([process for process, _ in running.values()])
        progress.close()
    if signals:
        raise KeyboardInterrupt
    return failed


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, nargs="+", required=True, help="YAML files, one per row")
    parser.add_argument("--seeds", type=int, nargs="+", required=True, help="train.seed of each row's runs")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run folders")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (default: %(default)s)")
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes per run, and model.ep_size (default: %(default)s)"
    )
    parser.add_argument(
        "--script", type=Path, default=ROOT / "train_rl.py",
        help="what to run: a changed copy of train_rl.py (default: train_rl.py itself)",
    )  # fmt: skip
    parser.add_argument("--redo", action="store_true", help="remove and redo runs made with other settings")
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="settings of all rows")
    args = parser.parse_intermixed_args(argv)
    if args.jobs < 1 or args.ranks < 1:
        parser.error("--jobs and --ranks must be at least 1")
    return args


def main(argv: list[str]) -> int:
    """Run what the command line asks for and return the exit code."""
    args = parse(argv)
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # run as a script: for what train_rl.py and its copies import
    try:
        runs = plan(args)
        os.chdir(ROOT)  # where train_rl.py runs and its settings look for files
        todo = unfinished(runs, args.redo, args.dry_run)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.dry_run:
        for run in todo:
            path = "" if run.script.parent == Path() else "PYTHONPATH=. "  # as start() sets it
            print(path + shlex.join(command(run, args.ranks)))
        return 0
    print(f"{len(runs) - len(todo)} of {len(runs)} runs are finished already", flush=True)
    try:
        failed = run_all(todo, args.jobs, args.ranks)
    except KeyboardInterrupt:
        print(
            "interrupted: all runs are ended; with the same command finished ones are skipped, those with a "
            "checkpoint go on, and the others start anew",
            file=sys.stderr,
        )
        return 130
    for run in failed:
        print(f"failed: {run.row} seed {run.seed}, see {run.log}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
