"""Shared by all tests: the root on the path, quiet libraries, and a way to run something on several ranks."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
SHARED_DATA = ROOT.parent / "shared" / "data"  # public sets as JSONL (README); tests skip without them


def torchrun(
    num_ranks: int, *arguments: object, timeout_s: float = 240, **options
) -> subprocess.CompletedProcess:
    """Run a script with its arguments on num_ranks processes of this machine; output is captured as text."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}",
        "--master-addr=127.0.0.1", f"--master-port={port}", *map(str, arguments),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | options.pop("env", {})
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, **options
    )
