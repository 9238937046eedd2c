"""experiments.bench.gpu_pack: GPU code of other cards, slim wheels, and the installation of a package."""

import base64
import csv
import hashlib
import io
import os
import shlex
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from experiments.bench import gpu_pack
from tests.patience import limit

PTX, CUBIN = 1, 2


def container(*entries: tuple[int, int], version: int = 1, cut: int = 0) -> bytes:
    """Return a fatbin of (kind, architecture), whose entries hold 40 bytes of their architecture's number."""
    body = b""
    for kind, architecture in entries:
        head = struct.pack("<HHIQ", kind, 1, 64, 40).ljust(28, b"\1") + struct.pack("<I", architecture)
        body += head.ljust(64, b"\2") + bytes([architecture]) * 40
    return struct.pack("<IHHQ", 0xBA55ED50, version, 16, len(body) + cut) + body


@pytest.mark.parametrize(
    "entries, kept",
    [
        ([(PTX, 80), (CUBIN, 80), (CUBIN, 90), (CUBIN, 120), (PTX, 90)], [2]),
        ([(CUBIN, 90), (CUBIN, 90)], [0, 1]),
        ([(PTX, 80), (CUBIN, 80), (PTX, 90), (PTX, 100)], [0, 2]),  # compiled at the first launch
        ([(CUBIN, 100), (PTX, 100)], []),
        ([], []),
    ],
)
def test_gpu_code_of_other_architectures_becomes_zeros(entries, kept):
    before = b"\x50\xed\x55\xba" + b"text" * 5
    library = before + container(*entries) + b"between" + container((CUBIN, 75), (CUBIN, 90)) + b"end"
    slim = gpu_pack.keep_gpu_code(library)
    assert len(slim) == len(library) and slim.startswith(before) and slim.endswith(b"end")
    start = len(before) + 16
    for i, (_, architecture) in enumerate(entries):
        payload = slim[start + 104 * i + 64 : start + 104 * (i + 1)]
        assert payload == bytes([architecture if i in kept else 0]) * 40
        assert slim[start + 104 * i :][:64] == library[start + 104 * i :][:64], "heads stay"
    assert slim[-43:-3] == bytes([90]) * 40 and slim[-147:-107] == bytes(40)


@pytest.mark.parametrize(
    "library",
    [b"", b"\x50\xed\x55\xba", container((CUBIN, 80), version=2), container((CUBIN, 80), cut=1),
     container((CUBIN, 80))[:-1], container() + b"\x50\xed\x55\xba\1\0\x10\0"],
)  # fmt: skip
def test_bytes_that_are_no_complete_container_stay(library):
    assert gpu_pack.keep_gpu_code(library) == library


def write_wheel(folder: Path, name: str, version: str, files: dict[str, bytes | str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: none\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "of another content,,\n",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, content in files.items():
            wheel.writestr(file, content)
    return path


def test_a_slim_wheel_lacks_unused_files_and_its_record_fits(tmp_path):
    dropped = [
        "vllm/vllm-rs", "vllm/benchmarks/a.py", "vllm/_flashmla_C.abi3.so", "vllm/third_party/fmha_sm100/a.h",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "vllm/third_party/deep_gemm/_C.cpython-311-x86_64-linux-gnu.so",
    ]  # fmt: skip
    kept = [
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "vllm/__init__.py", 'vllm/a,"b".py',
        "vllm/third_party/deep_gemm/_C.cpython-312-x86_64-linux-gnu.so",
    ]  # fmt: skip
    content = container((CUBIN, 80), (CUBIN, 90))
    wheel = write_wheel(tmp_path, "vllm", "1.0", dict.fromkeys([*dropped, *kept], content))
    gpu_pack.slim(wheel, tmp_path / "slim.whl")
    with zipfile.ZipFile(tmp_path / "slim.whl") as slim:
        record = "vllm-1.0.dist-info/RECORD"
        rows = {name: rest for name, *rest in csv.reader(io.StringIO(slim.read(record).decode()))}
        assert rows.keys() == set(slim.namelist()) and rows.pop(record) == ["", ""]
        assert rows.keys() == {*kept, "vllm-1.0.dist-info/METADATA", "vllm-1.0.dist-info/WHEEL"}
        for name, (digest, size) in rows.items():
            sha256 = base64.urlsafe_b64encode(hashlib.sha256(slim.read(name)).digest()).decode()
            assert (digest, size) == (f"sha256={sha256.rstrip('=')}", str(len(slim.read(name))))
        assert slim.read("vllm/__init__.py") == content != slim.read(kept[0])


BROKEN = "raise ImportError('libcudart.so.99 is missing')"


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """Pack wheels of a few lines: vLLM 0.30.0 cannot be imported, and 0.26.0 can."""
    out = tmp_path_factory.mktemp("pack") / "out"

    def pip(folder: Path, command: str, *_) -> None:
        texts = {"engine": ("0.30.0", BROKEN), "fallback": ("0.26.0", "")}
        if folder.name in texts:
            version, text = texts[folder.name]
            files = {
                "vllm/__init__.py": f"__version__ = '{version}'; LLM = None",
                "vllm/_custom_ops.py": text,
            }
            write_wheel(folder, "vllm", version, files)
        elif command == "download":
            write_wheel(folder, "packed_package", "1.0", {"packed_package.py": "number = 5\n" * 2000})

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(gpu_pack, "pip", pip)
        assert gpu_pack.main(["--out", str(out), "--part-mib", "0.001", "--with", "fallback"]) == 0
    assert len([*out.glob("part_*")]) > 1
    return out


def install(packed: Path, target: Path) -> subprocess.CompletedProcess:
    command = ["bash", packed / "install.sh", target]
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit(120))


@pytest.mark.slow
def test_a_package_is_installed_with_the_older_engine_if_the_newer_one_does_not_launch(packed, tmp_path):
    done = install(packed, tmp_path / "site")
    assert done.returncode == 0 and "libcudart.so.99" in done.stderr, done.stderr
    assert "vLLM 0.26.0 with torch" in done.stdout
    code = "import packed_package, vllm; print(vllm.__file__)"
    script = f"source {tmp_path}/site/env.sh && {shlex.quote(sys.executable)} -c '{code}'"
    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=limit(60))
    assert shown.stdout.strip() == f"{tmp_path}/site/vllm/vllm/__init__.py", shown.stderr


@pytest.mark.parametrize("fault", ["changed", "missing", "cut"])
def test_a_part_that_is_not_the_packed_one_is_refused(fault, packed, tmp_path):
    part = packed / "part_01"
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if fault == "changed" else content[:-1])
    if fault == "missing":
        part.unlink()
    done = install(packed, tmp_path / "site")
    part.write_bytes(content)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "part_01" in line and not (tmp_path / "site" / "vllm").exists()
