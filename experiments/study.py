"""Run a declared study in portions: tune every row alike, choose, then test on other seeds and tasks.

    python -m experiments.study losses_tuned tune --runs 54    # the next 54 runs, two at a time
    python -m experiments.study losses_tuned keep              # writes finished runs to records
    python -m experiments.study losses_tuned choose            # writes tuning.json beside declared.json
    python -m experiments.study losses_tuned test --runs 60    # the rows as chosen
    python -m experiments.study losses_tuned test --rows espo --seeds 7      # a single run
    python -m experiments.study losses_tuned test --dry-run    # commands of the unfinished runs

Repeat a command to continue: runs that have finished here or are in the records of the study are skipped.
`keep` writes finished tuning runs to tuning_runs.json, and test runs to runs.jsonl if all rows of their seed
have finished here, on one machine and at one commit. Commit both files; another machine continues
from there. The test needs a committed tuning.json. Two optional keys of declared.json describe the runs:

    "instances": {"recipe": "chains", "seeds_each": 2}
        Seed S uses task instance S // seeds_each, so that seeds 6 and 7 use data/built/chains_3, which
        `bash experiments/prepare.sh chains_3` builds. Instance 0 is data/built/chains, as in the YAML files.
        Without "instances" all seeds use the files that the YAML files name.
    "tuning": {"seeds": [200, 201], "metric": "chains/avg_at_4", "rates": [2.5e-4, 5e-4],
               "clips": {"grpo": ["algorithm.clip_eps_high=0.1", "algorithm.clip_eps_high=0.2"]}}
        Each row is run at each rate with each of its clips. The candidate with the highest mean of the metric
        after the last step wins; of equal candidates the first wins. Without "tuning", or with a text in its
        place, the rows are tested as their YAML files are.

A run that ends with an error is repeated once, by the next `tune` or `test`. If the run fails again, a tuning
run counts as 0, and the seed of a test run is left out of all rows.

`tune` and `test` need a checkout without uncommitted changes, because `report.py --check` refuses records of
any other run. So commit the files that `keep` writes before the next portion.

Runs are in runs/STUDY/tune_N/ROW/seed_S, with the number N of the candidate, and runs/STUDY/test/ROW/seed_S.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

from experiments import report, run, starts
from experiments.bench.common import markdown, write_json
from experiments.declaration import check_order, read_declaration
from experiments.history import git
from experiments.records import missing_study
from experiments.tuning import candidates, choice_of, is_tuned, recorded_tuning
from runtime.checkpoint import digest_of_weights
from runtime.provenance import commit_of

JOBS = 2  # runs at a time
FIRST = "first_"  # prefix of the error files of a run's first failure


def instance_settings(row: Path, declared: dict, seed: int) -> list[str]:
    """Return the settings that move a row to the task instance of a seed: every path below data/built/RECIPE.

    For example ["model.path=\"data/built/chains_3/model\"", ...]; [] for instance 0, and without instances.
    """
    if "instances" not in declared:
        return []
    recipe = declared["instances"]["recipe"]
    number = seed // declared["instances"]["seeds_each"]
    config = run.load_script(Path("train_rl.py")).load_config(["--config", str(row)])
    settings: dict[str, object] = {}
    for section, values in config.model_dump(mode="json", exclude_defaults=True).items():
        is_list = isinstance(values, list)  # stages
        settings |= {section: values} if is_list else {f"{section}.{k}": value for k, value in values.items()}
    texts = {name: json.dumps(value) for name, value in settings.items()}
    moved = {name: text.replace(f"/{recipe}/", f"/{recipe}_{number}/") for name, text in texts.items()}
    return [f"{name}={moved[name]}" for name in texts if number and moved[name] != texts[name]]


def make_run(study: Path, declared: dict, row: str, seed: int, name: str, settings: str) -> run.Run:
    """Return a run of a row with further settings; name: the folder of the runs, for example "test"."""
    file = run.from_root(study / f"{row}.yaml")
    folder = Path("runs") / study.name / name / row / f"seed_{seed}"
    arguments = (
        "--config", str(file), f"run.dir={folder}", f"train.seed={seed}",
        *instance_settings(file, declared, seed), *settings.split(),
    )  # fmt: skip
    return run.Run(row, seed, folder, folder.with_name(f"seed_{seed}.log"), Path("train_rl.py"), arguments)


def runs_of_tuning(study: Path, declared: dict, rows: list[str], seeds: list[int]) -> list[run.Run]:
    """List the tuning runs in launch order: for each seed, all candidates of all rows.

    The choice reads the last evaluation alone, so tuning runs make no evaluations in between.
    """
    return [
        make_run(study, declared, row, seed, f"tune_{number}", f"{settings} eval.every=0")
        for seed in seeds
        for row in rows
        for number, settings in enumerate(candidates(declared["tuning"], row))
    ]


def runs_of_test(study: Path, declared: dict, rows: list[str], seeds: list[int]) -> list[run.Run]:
    """List the test runs in launch order: for each seed, all rows with the chosen settings."""
    chosen = dict.fromkeys(declared["rows"], "")
    if is_tuned(declared):
        file = study / "tuning.json"
        if not file.is_file():
            raise ValueError(f"{file} is missing: run `tune` and `choose` first, and commit the file")
        if git(study, "status", "--porcelain", file.name).stdout:
            raise ValueError(f"{file} is not committed: commit it before the test")
        chosen = {record["row"]: record["settings"] for record in json.loads(file.read_text())}
    return [make_run(study, declared, row, seed, "test", chosen[row]) for seed in seeds for row in rows]


def has_failed_twice(folder: Path) -> bool:
    """Tell whether a run has ended with an error at its first launch and again when it was repeated."""
    return any(folder.glob(f"{FIRST}error_rank_*.txt")) and any(folder.glob("error_rank_*.txt"))


def set_aside_errors(runs: list[run.Run]) -> None:
    """Rename the error files of runs that have failed once, because the next launch deletes them."""
    for failed in runs:
        for file in failed.folder.glob("error_rank_*.txt"):
            file.rename(file.with_name(FIRST + file.name))


def tuning_folders(study: Path, declared: dict) -> dict[tuple[str, str, int], Path]:
    """Return {(row, settings, seed): run folder} of all tuning runs."""
    tuning = declared["tuning"]
    return {
        (row, settings, seed): Path("runs") / study.name / f"tune_{number}" / row / f"seed_{seed}"
        for row in declared["rows"]
        for number, settings in enumerate(candidates(tuning, row))
        for seed in tuning["seeds"]
    }


def finished_tuning(study: Path, declared: dict) -> dict[tuple[str, str, int], dict]:
    """Return tuning_runs.json and the records of tuning runs that have finished or failed twice here."""
    records = recorded_tuning(study)
    for key, folder in tuning_folders(study, declared).items():
        finished = report.read_run(folder, declared["tuning"]["metric"]) if folder.is_dir() else None
        is_finished = isinstance(finished, report.Run)  # else the reason why it is not, as a text
        has_failed = not is_finished and has_failed_twice(folder)
        if key in records or not (is_finished or has_failed):
            continue
        row, settings, seed = key
        value = float(finished.values[-1]) if is_finished else 0.0
        record = {"row": row, "settings": settings, "seed": seed, "value": value, "error": has_failed}
        if (folder / "versions.json").is_file():  # a run that failed early has none
            record |= {"versions": report.versions_of(folder)}
        records[key] = record
    return records


def recorded_tests(study: Path) -> set[tuple[str, int]]:
    """Return (row, seed) of the test runs in the records of the study."""
    lines = [line for file in sorted(study.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return {(record["row"], record["seed"]) for record in map(json.loads, lines)}


def unrecorded(runs: list[run.Run], study: Path, declared: dict, stage: str) -> list[run.Run]:
    """Leave out the runs that the study's records hold, because their folders may be on another machine."""
    if stage == "test":
        recorded = recorded_tests(study)
        return [planned for planned in runs if (planned.row, planned.seed) not in recorded]
    folders = tuning_folders(study, declared)
    recorded_folders = {folders[key] for key in recorded_tuning(study)}
    return [planned for planned in runs if planned.folder not in recorded_folders]


def launches_of(folder: Path) -> set[str]:
    """Return commit and machine of each launch of a run, for example "1f2e3d4c on cpu AMD EPYC, cores 2"."""
    versions = report.versions_of(folder)
    launches = set()
    for launch in (versions, *versions.get("earlier", [])):
        machine = ", ".join(f"{name} {value}" for name, value in launch.get("machine", {}).items())
        launches.add(f"{str(launch.get('commit'))[:8]} on {machine or 'an unknown machine'}")
    return launches


def mixed_seeds(runs: list[report.Run]) -> dict[int, str]:
    """Return {seed: its commits and machines} for the seeds whose rows were run at several of them."""
    rows_by_launch: dict[int, dict[str, list[str]]] = {}
    for one in runs:
        rows = rows_by_launch.setdefault(one.record["seed"], {})
        for launch in launches_of(one.folder):
            rows.setdefault(launch, []).append(one.record["row"])
    return {
        seed: "; ".join(f"{launch}: {', '.join(rows[launch])}" for launch in sorted(rows))
        for seed, rows in rows_by_launch.items()
        if len(rows) > 1
    }


def keep_tests(study: Path, declared: dict) -> int:
    """Append the test runs of this machine to runs.jsonl, if all rows of their seed have finished here.

    A seed whose rows were run at several commits or on several machines is refused; return the number.
    """
    recorded = recorded_tests(study)
    folder = Path("runs") / study.name / "test"
    runs, _ = report.read_folder(folder, declared["rows"], run.ANY_METRIC)
    new_runs = [new for new in runs if (new.record["row"], new.record["seed"]) not in recorded]
    mixed = mixed_seeds(new_runs)
    for seed, launches in mixed.items():
        print(
            f"refused: seed {seed} was run at several commits or on several machines ({launches}); remove "
            f"{folder}/*/seed_{seed} and repeat `test --seeds {seed}`",
            file=sys.stderr,
        )
    counts = Counter(new.record["seed"] for new in new_runs if new.record["seed"] not in mixed)
    whole = sorted(seed for seed, count in counts.items() if count == len(declared["rows"]))
    print(f"kept: seeds {whole}; incomplete, not kept: seeds {sorted(counts.keys() - set(whole))}")
    with tempfile.TemporaryDirectory() as scratch:
        part = Path(scratch) / "runs.jsonl"
        report.export({"": [new for new in new_runs if new.record["seed"] in whole]}, run.ANY_METRIC, part)
        with (study / "runs.jsonl").open("a") as file:
            file.write(part.read_text())
    return len(mixed)


def choose(study: Path, declared: dict) -> list[dict]:
    """Return the choice by the recorded tuning runs and the tuning runs of this machine."""
    finished = finished_tuning(study, declared)
    for key, folder in tuning_folders(study, declared).items():
        if key not in finished:
            raise ValueError(f"{folder}: unfinished; repeat `tune`")
    return choice_of(declared, finished)


def table_lines(records: list[dict]) -> list[str]:
    """Return the table of tuning.json: the chosen settings, and the means of all candidates."""
    lines = []
    for record in records:
        means = [f"{statistics.mean(values):.3f}" for values in record["candidates"].values()]
        lines.append([record["row"], f"`{record['settings']}`", ", ".join(means)])
    return markdown(["row", "chosen", "means of all candidates"], lines)


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", help="name of a folder of experiments/studies")
    parser.add_argument("stage", choices=("tune", "keep", "choose", "test"))
    parser.add_argument("--rows", nargs="+", help="some of the declared rows (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", help="some of the declared seeds (default: all)")
    parser.add_argument("--runs", type=int, help="launch at most this many unfinished runs (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    return parser.parse_args(argv)


def planned(args: argparse.Namespace, study: Path, declared: dict) -> list[run.Run]:
    """List the runs of the command line; ValueError for a row or a seed that is not declared."""
    is_tuning = args.stage == "tune"
    if is_tuning and not is_tuned(declared):
        raise ValueError(f"{study.name}: `tuning` of declared.json is no mapping with seeds; run `test`")
    declared_seeds = declared["tuning"]["seeds"] if is_tuning else declared["seeds"]
    rows = args.rows or declared["rows"]
    seeds = args.seeds or declared_seeds
    unknown = [str(name) for name in (*rows, *seeds) if name not in (*declared["rows"], *declared_seeds)]
    if unknown:
        raise ValueError(f"{study.name}: {', '.join(unknown)} is not declared for `{args.stage}`")
    return (runs_of_tuning if is_tuning else runs_of_test)(study, declared, rows, seeds)


def check_files(runs: list[run.Run], study: Path) -> None:
    """Raise ValueError if a run lacks a file, or if a built model differs from its committed start.

    Such a run would fail twice, or begin with other weights than the study's other machines.
    """
    missing = {path for one in runs for path in run.missing_files(one).values()}
    if missing:
        names = ", ".join(sorted(missing)[:3]) + (", ..." if len(missing) > 3 else "")
        raise ValueError(f"{len(missing)} files are missing ({names}): make them by the commands in the "
                         f"README of {study.name}")  # fmt: skip
    models = {Path(run.load_script(one.script).load_config(list(one.arguments)).model.path) for one in runs}
    for model in sorted(models):
        start = starts.STARTS / model.parent.name / starts.RECORD
        if model.parts[:2] != ("data", "built") or not start.is_file():
            continue
        committed = json.loads(start.read_text())["weights"].values()
        if digest_of_weights(model) not in committed:
            raise ValueError(
                f"{model}: other weights than the committed start {run.from_root(start.parent)}; build the "
                f"folder by the command in the README of {study.name}, which names the start"
            )


def check_checkout() -> None:
    """Raise ValueError if report.py --check would refuse the record of a run of this checkout."""
    if commit_of()["dirty"] is not False:
        raise ValueError(
            "the checkout has uncommitted changes or no git history, and `report.py --check` refuses runs of "
            "such a checkout: commit the changes first, also tuning_runs.json, tuning.json and runs.jsonl"
        )


def runs_to_launch(args: argparse.Namespace, study: Path, declared: dict) -> list[run.Run]:
    """List the next unfinished runs of the command line, without the runs that have failed twice.

    ValueError if a committed start has changed, if a file is missing, or if the records of the runs would be
    refused.
    """
    runs = unrecorded(planned(args, study, declared), study, declared, args.stage)
    unfinished = run.unfinished(runs, redo=False, dry_run=args.dry_run)
    failed = [one for one in unfinished if has_failed_twice(one.folder)]
    for one in failed:
        print(f"failed twice, not repeated: {one.folder}", file=sys.stderr)
    todo = [one for one in unfinished if one not in failed][: args.runs]
    run.check_starts(todo, args.dry_run)
    if todo and not args.dry_run:
        check_order(study / "declared.json", declared)
        check_files(todo, study)
        check_checkout()
    return todo


def main(argv: list[str]) -> int:
    """Run the command line and return the exit code."""
    args = parse(argv)
    study = run.STUDIES / args.study
    os.chdir(run.ROOT)  # the working directory of train_rl.py, for relative paths in settings
    try:
        if left := missing_study(study):
            raise ValueError(left)
        declared = read_declaration(study / "declared.json")
        if args.stage in ("keep", "choose") and (args.rows or args.seeds or args.runs or args.dry_run):
            raise ValueError(f"`{args.stage}` takes all rows and seeds: leave out the options")
        if args.stage == "keep":
            if is_tuned(declared):
                write_json(study / "tuning_runs.json", list(finished_tuning(study, declared).values()))
            if (Path("runs") / study.name / "test").is_dir():
                return 1 if keep_tests(study, declared) else 0
            return 0
        if args.stage == "choose":
            records = choose(study, declared)
            write_json(study / "tuning.json", records)
            print("\n".join(table_lines(records)))
            return 0
        todo = runs_to_launch(args, study, declared)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.dry_run:
        print("\n".join(shlex.join(run.command(one, 1)) for one in todo))
        return 0
    set_aside_errors(todo)
    try:
        failed = run.run_all(todo, JOBS, ranks=1)
    except KeyboardInterrupt:
        print("interrupted: all runs are ended; repeat the command to continue", file=sys.stderr)
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
