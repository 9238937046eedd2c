"""Disturb runs from outside, and compare the results with an undisturbed run.

    python -m tests.campaign.faults --json faults.json                  # about 350 cases, two cores
    python -m tests.campaign.faults --json faults.json --only damage/ rewards/
    python -m tests.campaign.faults --json soak.json --soak 2000        # one long run instead

Every case ends with a verdict:

    same      after the fault, the same command succeeds, and both the rows of metrics.jsonl (except times)
              and the SHA-256 of the exported weights equal the undisturbed run's
    refused   the command ends soon, with one line naming the file, the row, the setting or the function
    failed    all other outcomes; the case's folder in --out is preserved

Kinds:

    kills     SIGKILL to torchrun, a rank, all ranks, a reward worker or its guard: half of the kills while a
              checkpoint or a log is written or a rank imports, half at random moments; a run is killed
              several times before it may finish. Further cases kill runs whose reward functions have started
              processes in new sessions, which must all end as well
    signals   SIGTERM and SIGINT to torchrun or to all processes, once and twice; a stopped rank (SIGSTOP)
    damage    files of the newest checkpoint flipped, truncated, emptied, removed; changed numbers, extra
              lines, extra folders
    disk      a full file system (a tmpfs, which only root can mount; skipped for other users)
    rewards   functions that hang, die, flood, forge
    data      rows, files and models that are invalid
    settings  values just and far outside of the bounds, unknown names, hostile YAML

A case with a good verdict at the same commit is skipped, so that the same command resumes an interrupted
campaign. Runs without kills start as forks of a server that has imported the slow libraries. The final output
(a table of verdicts, and the number of survived kills) belongs in tests/campaign/README.md.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from tqdm import tqdm

from experiments.bench.common import ROOT, make_parser, markdown, torchrun, write_json
from tests import preloaded
from tests.campaign import hostile_input
from tests.campaign.soak import soak
from tests.campaign.started import SPARED, TARGETS, Started, build_tiny, start_trainer
from tests.campaign.verdicts import (
    DAMAGE,
    END_S,
    LEFT_S,
    RUN_S,
    TRAINER,
    VERDICTS,
    Attempt,
    Bench,
    Failed,
    end_of,
    must_equal,
    try_case,
)

WORKLOAD = [  # six quick steps with checkpoints in between
    "--config", "experiments/environments/tiny.yaml", "train.num_steps=6", "rollout.prompts_per_step=8",
    "rollout.group_size=4", "checkpoint.every=2", "eval.every=2", "eval.num_samples=2", "run.log_every=1",
    "data.eval=[{path: data/built/tiny/test.jsonl, name: additions, limit: 20}]",
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------
# Kills and signals
# ------------------------------------------------------------------------------------------------------------
AIMS = ("checkpoint", "random", "log", "random", "imports", "random")  # half of the kills wait for an event


@dataclass(frozen=True)
class Blow:
    """Signals to one of TARGETS, at a moment."""

    aim: str  # one of AIMS
    target: str  # one of TARGETS
    moment: float  # in [0, 1): position within the time span of the aim
    signals: tuple[int, ...] = (signal.SIGKILL,)


def moments_of(run: Started, blow: Blow, seconds: float) -> Iterator[bool]:
    """Yield, at each poll, whether the moment of a blow has come."""
    previous = run.log_state()
    num_changes = 0
    while True:
        if blow.aim in ("imports", "random"):
            yield run.seconds() >= (
                0.2 + 3.8 * blow.moment if blow.aim == "imports" else blow.moment * seconds
            )
            continue
        current = run.log_state()
        num_changes += current != previous
        previous = current
        is_there = run.checkpoint_is_written() if blow.aim == "checkpoint" else num_changes > 4 * blow.moment
        if is_there:
            time.sleep({"checkpoint": 0.05, "log": 0.01}[blow.aim] * blow.moment)
        yield is_there


def strike(bench: Bench, run_dir: Path, blow: Blow, settings: tuple[str, ...] = ()) -> str | None:
    """Start the run, deliver a blow and wait for the end; None if the run ended first, else a description."""
    run = start_trainer(run_dir, *bench.workload, *settings)
    try:
        for is_time in moments_of(run, blow, bench.seconds):
            if run.process.poll() is not None:
                if run.process.returncode:
                    raise Failed(f"before the blow: {end_of(run.log.read_text(errors='replace'))}")
                return None
            if is_time:
                break
            time.sleep(0.001)
        during = ", checkpoint being written" * run.checkpoint_is_written()
        event = f"{blow.target} at {run.seconds():.1f} s ({blow.aim}{during})"
        for i, number in enumerate(blow.signals):
            time.sleep(1.2 if i else 0)  # within a second it would count as the same signal
            run.hit(blow.target, number)
        if blow.target in SPARED:  # the run replaces these, so torchrun is killed a little later
            time.sleep(0.3)
            run.hit("torchrun", signal.SIGKILL)
        took = run.wait_until_gone(LEFT_S if signal.SIGKILL in blow.signals else END_S, event)
        log = run.log.read_text(errors="replace")
        if f'File "{TRAINER}"' in log:
            raise Failed(f"{event}: a raw stack of a rank is on the console")
        waited = rf"error on rank \d+: .*waited \d+ s for {blow.target}\b"
        if signal.SIGSTOP in blow.signals and not re.search(waited, log):
            raise Failed(f"{event}: no rank names the rank that it waited for: {end_of(log)}")
        return f"{event}, gone after {took:.1f} s"
    finally:
        run.kill()


def chain(blows: list[Blow], settings: tuple[str, ...], bench: Bench, folder: Path) -> tuple[str, str]:
    """Deliver blows to a run, one after another, and then let the run finish.

    If a run ends before its blow, it is compared, and the blow hits a new run at an earlier moment.
    """
    run_dir = folder / "run"
    survived = []
    try:
        for blow in blows:
            for attempt in range(5):
                earlier = replace(blow, moment=blow.moment / 2**attempt)
                if happened := strike(bench, run_dir, earlier, settings):
                    survived.append(happened)
                    break
                must_equal(run_dir, bench.reference)
                shutil.rmtree(run_dir)
        bench.must_be_same(run_dir)
    except Failed as failed:
        tried = min(len(survived) + 1, len(blows))  # the last blow was not survived
        history = "; ".join([*survived, str(failed)])
        raise Failed(f"{tried - 1} of {tried} survived: {history}") from failed
    return "same", f"{len(survived)} of {len(survived)} survived: {'; '.join(survived)}"


def fleeing(target: str, bench: Bench, folder: Path) -> tuple[str, str]:
    """Kill a run whose reward functions have started processes in new sessions."""
    trace, settings = hostile_input.fleeing_rows(folder)
    happened = strike(bench, folder / "run", Blow("log", target, 0.5), tuple(settings))
    if not happened or not trace.is_file():
        raise Failed(f"no process has fled: {happened}")
    return "same", happened


def kill_cases(num: int, seed: int, per_chain: int = 5) -> dict[str, Attempt]:
    """Return chains with `num` kills in total, and kills of runs with processes in new sessions."""
    aims = [AIMS[i % len(AIMS)] for i in range(num)]
    cases = {}
    for start in range(0, num, per_chain):
        rng = random.Random(f"{seed}/{start}")
        blows = [Blow(aim, rng.choice(TARGETS), rng.random()) for aim in aims[start : start + per_chain]]
        cases[f"{len(blows)} kills, chain {start // per_chain} of seed {seed}"] = partial(chain, blows, ())
    for target in ("torchrun", "all ranks", "worker"):
        cases[f"{target}, beside processes that fled"] = partial(fleeing, target)
    return cases


def signal_cases(seed: int) -> dict[str, Attempt]:
    """Return a chain of single signals, a chain of double signals, and stopped ranks."""
    rng = random.Random(f"{seed}/signals")
    cases = {}
    for times, word in ((1, "once"), (2, "twice")):
        blows = [
            Blow("log", target, 0.5 * rng.random(), (number,) * times)
            for number in (signal.SIGTERM, signal.SIGINT)
            for target in ("torchrun", "everything")
        ]
        cases[f"SIGTERM and SIGINT {word}"] = partial(chain, blows, ())
    for target in ("rank 0", "rank 1"):
        blow = Blow("log", target, 0.5, (signal.SIGSTOP,))
        cases[f"{target} stands still"] = partial(chain, [blow], ("run.timeout_s=15",))
    return cases


# ------------------------------------------------------------------------------------------------------------
# Damage and full disks
# ------------------------------------------------------------------------------------------------------------

CHECKPOINT_FILES = (
    "state.json", "history.pt", "rank_00000.pt", "rank_00001.pt", "model/config.json",
    "model/model-00001-of-00002.safetensors", "model/model-00002-of-00002.safetensors",
    "model/model.safetensors.index.json", "model/tokenizer.json", "model/tokenizer_config.json",
)  # fmt: skip
NUMBERS = ("step", "consumed_prompts", "generated_tokens", "evaluated_step", "seed")


def change_number(name: str, file: Path) -> None:
    """Change a digit in state.json, which remains valid JSON."""
    changed = re.sub(rf'("{name}": )(\d)', lambda m: m[1] + str(int(m[2]) ^ 1), file.read_text())
    assert changed != file.read_text()
    file.write_text(changed)


def damage(name: str, edit: Callable[[Path], None], bench: Bench, folder: Path) -> tuple[str, str]:
    """Damage a file of the newest checkpoint: the run names the file, and resumes with on_damage=older."""
    run_dir = shutil.copytree(bench.reference, folder / "run")
    shutil.rmtree(run_dir / "model")  # must be exported again
    newest = max((run_dir / "checkpoints").glob("step_*"))
    edit(newest / name)
    if not (newest / "state.json").is_file():  # a folder without state.json is not a checkpoint
        bench.must_be_same(run_dir)
        return "same", "a checkpoint without state.json is ignored"
    line = bench.must_refuse(f"{newest.name} is damaged: {name}", f"run.dir={run_dir}")
    bench.must_be_same(run_dir, "checkpoint.on_damage=older")
    return "refused", line


def unfinished(bench: Bench, folder: Path) -> Path:
    """Copy the undisturbed run without its last checkpoint and results, so that it resumes from step 4."""
    run_dir = shutil.copytree(bench.reference, folder / "run")
    shutil.rmtree(run_dir / "checkpoints" / "step_000006")
    shutil.rmtree(run_dir / "model")
    (run_dir / "summary.json").unlink()
    return run_dir


def other_folders(bench: Bench, folder: Path) -> tuple[str, str]:
    """Resume a run beside copies of checkpoints that a user has made."""
    run_dir = unfinished(bench, folder)
    names = ("step_old", "step_000004_best", "step_99", "best")
    for name in names:
        shutil.copytree(run_dir / "checkpoints" / "step_000004", run_dir / "checkpoints" / name)
    bench.must_be_same(run_dir)
    if missing := [name for name in names if not (run_dir / "checkpoints" / name / "state.json").is_file()]:
        raise Failed(f"{', '.join(missing)} was removed")
    return "same", ""


def broken_lines(bench: Bench, folder: Path) -> tuple[str, str]:
    """Resume a run with invalid lines in metrics.jsonl."""
    run_dir = unfinished(bench, folder)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (run_dir / name).open("ab") as file:
            file.write(b'garbage}\n[]\n{"score": 1}\n\xff\xfe\n{"step": "4"}\n{"step": 5, "sc')
    bench.must_be_same(run_dir)
    return "same", ""


def damage_cases() -> dict[str, Attempt]:
    """Return every file with every damage, and the cases beside checkpoints."""
    cases = {f"{n} {kind}": partial(damage, n, DAMAGE[kind]) for n in CHECKPOINT_FILES for kind in DAMAGE}
    for name in NUMBERS:
        cases[f"state.json, another {name}"] = partial(damage, "state.json", partial(change_number, name))
    return cases | {"copies beside checkpoints": other_folders, "lines that are no rows": broken_lines}


DISKS = {  # name: (free bytes at the start, settings); None: filled after the first row is logged
    "before the start": (0, []), "at the start": (60_000, []), "first checkpoint": (8 << 20, []),
    "second checkpoint": (20 << 20, []), "last checkpoint": (38 << 20, []),
    "export": (17 << 20, ["checkpoint.every=0"]), "between two steps": (None, ["checkpoint.every=0"]),
}  # fmt: skip


def fill(file: Path, free: int) -> None:
    """Write a file until its file system has this many bytes available."""
    with file.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        for _ in range((shutil.disk_usage(file.parent).free - free) >> 12):
            filler.write(bytes(4096))


def fill_after_a_step(filler: Path, run_dir: Path) -> None:
    """Fill a file system as soon as a run has logged a row."""
    deadline = time.monotonic() + RUN_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if (run_dir / "metrics.jsonl").stat().st_size:
                return fill(filler, 0)
        time.sleep(0.001)


def full_disk(free: int | None, settings: list[str], bench: Bench, folder: Path) -> tuple[str, str]:
    """Run on a file system that becomes full, then free space and resume."""
    (disk := folder / "disk").mkdir()
    filler = disk / "filler"
    run_dir = disk / "run"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=True)
    try:
        if free is not None:
            fill(filler, free)
        else:
            threading.Thread(target=fill_after_a_step, args=(filler, run_dir), daemon=True).start()
        line = bench.must_refuse(str(disk), f"run.dir={run_dir}", *settings)
        filler.unlink()
        bench.must_be_same(run_dir, *settings)
        return "refused", line
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


# ------------------------------------------------------------------------------------------------------------
# The campaign
# ------------------------------------------------------------------------------------------------------------
def all_cases(kills: int, seed: int) -> dict[str, Attempt]:
    """Return {kind/what: attempt}."""
    disks = DISKS if os.geteuid() == 0 else {}
    cases = {
        "kills": kill_cases(kills, seed),
        "signals": signal_cases(seed),
        "damage": damage_cases(),
        "disk": {name: partial(full_disk, *limits) for name, limits in disks.items()},
        "rewards": hostile_input.reward_cases(),
        "data": hostile_input.data_cases(),
        "settings": hostile_input.setting_cases(),
    }
    return {
        f"{kind}/{name}": attempt for kind, attempts in cases.items() for name, attempt in attempts.items()
    }


@cache
def commit() -> str:
    """Return the commit of this checkout."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def undisturbed(out: Path) -> tuple[Path, float]:
    """Return the folder and the seconds of an undisturbed run, made first if this commit has none."""
    run_dir = out / "undisturbed"
    note = out / "undisturbed.json"
    made = json.loads(note.read_text()) if note.is_file() else {}
    if made.get("commit") != commit():
        build_tiny()
        shutil.rmtree(run_dir, ignore_errors=True)
        start = time.monotonic()
        command = [*torchrun(2), str(TRAINER), *WORKLOAD, f"run.dir={run_dir}"]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
        )
        if done.returncode:
            sys.exit("the undisturbed run failed; its error is printed above")
        made = {"commit": commit(), "seconds": time.monotonic() - start}
        note.write_text(json.dumps(made))
    return run_dir, made["seconds"]


def table_lines(results: list[dict]) -> list[str]:
    """Return the lines for tests/campaign/README.md: verdicts by kind, and survived kills of all kills."""
    rows = []
    kills = [0, 0]
    for kind in dict.fromkeys(result["name"].partition("/")[0] for result in results):
        kind_results = [result for result in results if result["name"].startswith(f"{kind}/")]
        verdicts = Counter(result["verdict"] for result in kind_results)
        seconds = round(sum(result["seconds"] for result in kind_results))
        rows.append([kind, len(kind_results), *(verdicts[name] for name in VERDICTS), seconds])
    for result in results:
        survived = re.match(r"(\d+) of (\d+) survived: ", result["detail"])
        if survived and result["name"].startswith("kills/"):
            kills = [total + int(more) for total, more in zip(kills, survived.groups())]
    total = ["all", *(sum(row[column] for row in rows) for column in range(1, 6))]
    summary = f"Commit {commit()[:7]}; {kills[0]} of {kills[1]} kills were survived, bit for bit."
    return [summary, "", *markdown(["kind", "cases", *VERDICTS, "seconds"], [*rows, total])]


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    out = ROOT / "runs" / "faults"
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=out,
        help="folder for results and for folders of failed cases (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="TEXT",
        default=[""],
        help="only cases whose name contains one of these texts, for example damage/",
    )
    parser.add_argument("--kills", type=int, default=40, help="number of SIGKILLs (default: %(default)s)")
    parser.add_argument(
        "--soak",
        type=int,
        metavar="STEPS",
        help="instead of the cases, watch one run of this many short steps",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of moments and targets (default: %(default)s)"
    )
    args = parser.parse_args()
    if args.kills < 1 or (args.soak is not None and args.soak < 1):
        parser.error("--kills and --soak must be at least 1")
    return args


def try_all(bench: Bench | None, cases: dict[str, Attempt], out: Path) -> list[dict]:
    """Try the cases without a good verdict at this commit; return the results of all cases."""
    record = out / "cases.jsonl"
    lines = record.read_text().splitlines() if record.is_file() else []
    results = {row["name"]: row for row in map(json.loads, lines) if row["commit"] == commit()}
    for name, attempt in tqdm(cases.items(), desc="faults", unit="case", disable=None):
        if results.get(name, {}).get("verdict", "failed") == "failed":
            results[name] = try_case(bench, name, attempt, out) | {"commit": commit()}
            with record.open("a") as file:
                file.write(json.dumps(results[name]) + "\n")
    return [results[name] for name in cases]


def main() -> None:
    """Try the unfinished cases and print the table."""
    args = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the runs end as well
    sys.path.insert(0, str(ROOT))
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.soak:
        folder = out / f"soak_{args.soak}_{commit()[:7]}"  # the same for a repeated command, which resumes
        cases = {f"soak/{args.soak} steps": lambda *_: soak(args.soak, folder)}
        bench = None
    else:
        cases = all_cases(args.kills, args.seed)
        cases = {name: case for name, case in cases.items() if any(text in name for text in args.only)}
        if not cases:
            sys.exit(f"--only: no name of a case holds {' or '.join(args.only)}")
        bench = Bench(preloaded.run, WORKLOAD, *undisturbed(out))
    results = try_all(bench, cases, out)
    print("\n".join(table_lines(results)))
    for result in results:
        if result["verdict"] == "failed":
            print(f"failed: {result['name']}: {result['detail']}")
    write_json(args.json, results)
    sys.exit(any(result["verdict"] == "failed" for result in results))


if __name__ == "__main__":
    main()
