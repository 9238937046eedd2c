"""Check this machine before anything is loaded, so that a missing compiler costs seconds instead of minutes.

Only runs on GPUs compile code during their start: Triton compiles a launcher for every kernel with a C
compiler and Python's header files, and vLLM compiles FP8 kernels for Hopper with nvcc.

The first half of the file judges: each function takes facts as arguments, for example the version of the
driver, and returns a line with cause and remedy, or None if all is well. The second half collects the facts,
and check_machine() raises the lines.
"""

import contextlib
import ctypes
import importlib.util
import os
import platform
import re
import shutil
import socket
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

DRIVER_FILE = Path("/proc/driver/nvidia/version")
FIRST_DRIVER = {12: 525, 13: 580}  # {CUDA version: first driver of NVIDIA for Linux}, CUDA's release notes


# ------------------------------------------------------------------------------------------------------------
# Judge
# ------------------------------------------------------------------------------------------------------------
def missing_compiler(compiler: str | None, headers: Path) -> str | None:
    """Explain that Triton lacks a compiler or Python.h.

    compiler: path of the C compiler; None if missing. headers: folder that should contain Python.h.
    """
    missing = [] if compiler else ["C compiler (gcc, clang, or the one that the variable CC names)"]
    if not (headers / "Python.h").is_file():
        missing.append(f"{headers / 'Python.h'}")
    if not missing:
        return None
    return (
        f"this machine has a GPU but no {' and no '.join(missing)}, with which Triton compiles the launchers "
        "of GPU kernels: install build-essential and python3-dev (so called on Debian and Ubuntu)"
    )


def old_driver(driver: str, cuda: str) -> str | None:
    """Explain that a driver is too old for the CUDA version of torch.

    driver: text of /proc/driver/nvidia/version. cuda: for example "13.0".
    """
    version = re.search(r"\b(\d{3,})\.[\d.]*\d", driver)
    first = FIRST_DRIVER.get(int(cuda.split(".")[0]))
    if version is None or first is None or int(version[1]) >= first:
        return None
    return (
        f"NVIDIA's driver {version[0]} is too old: torch is built for CUDA {cuda}, which needs driver "
        f"{first} or later. Install a newer driver, or install the CPU stack (make demo STACK=cpu)"
    )


def unsupported_gpu(
    name: str, capability: tuple[int, int], architectures: Sequence[str], bfloat16: bool
) -> str | None:
    """Explain that torch has no code for a GPU, or that the GPU cannot compute in bfloat16.

    architectures: torch.cuda.get_arch_list(), for example ["sm_90", "compute_120"]. bfloat16: tells whether
    policy or engine computes in bfloat16.
    """
    version = ".".join(map(str, capability))
    if architectures and not any(runs_on(architecture, capability) for architecture in architectures):
        return (
            f"this torch has no code for {name} (compute capability {version}), only for "
            f"{', '.join(architectures)}: take another GPU, or install the CPU stack "
            "(make demo STACK=cpu)"
        )
    if bfloat16 and capability < (8, 0):
        return (
            f"{name} (compute capability {version}) cannot compute in bfloat16, which needs 8.0 or later: "
            "set model.dtype and rollout.dtype to float32, or take another GPU"
        )
    return None


def missing_instructions(machine: str, has_avx2: bool) -> str | None:
    """Explain that vLLM has no kernels for a processor. machine: for example x86_64."""
    if machine != "x86_64" or has_avx2:
        return None
    return "this processor lacks AVX2, without which vLLM computes in no dtype: take another machine or a GPU"


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Tell whether code for an architecture runs on a GPU.

    sm_XY is machine code, for GPUs of the same major version and no older minor version. compute_XY is PTX,
    which the driver compiles for any later GPU.
    """
    kind, _, digits = architecture.partition("_")
    version = divmod(int(re.sub(r"\D", "", digits)), 10)  # sm_90a has a letter
    return version <= capability and (kind == "compute" or version[0] == capability[0])


def is_one_node(environment: Mapping[str, str]) -> bool:
    """Tell whether all ranks of the job run on this node."""
    num_ranks = environment.get("WORLD_SIZE", "1")
    return environment.get("LOCAL_WORLD_SIZE", num_ranks) == num_ranks


def unreachable_address(address: str | None, environment: Mapping[str, str]) -> str | None:
    """Explain that gloo would tell ranks on other nodes an address of this node that only this node knows.

    gloo publishes the address of the hostname, which is 127.0.1.1 on a freshly installed Debian or Ubuntu,
    and 127.0.0.1 if the hostname has no address (createDefaultDevice() in torch's ProcessGroupGloo). address:
    of this node's hostname; None if it has none. Nodes on one machine (MASTER_ADDR 127.0.0.1) pass.
    """
    is_one_machine = environment.get("MASTER_ADDR", "127.0.0.1").startswith(("127.", "localhost"))
    is_reachable = address is not None and not address.startswith("127.")
    if is_one_node(environment) or is_one_machine or is_reachable or "GLOO_SOCKET_IFNAME" in environment:
        return None
    return (
        f"the hostname of this node has {address or 'no address'}, where other nodes cannot reach the node: "
        "set GLOO_SOCKET_IFNAME on every node to the network interface between the nodes, for example eth0 "
        f"(`ip -4 route get {environment['MASTER_ADDR']}` names it after dev)"
    )


# ------------------------------------------------------------------------------------------------------------
# Collect facts
# ------------------------------------------------------------------------------------------------------------
def find_compiler(environment: Mapping[str, str]) -> str | None:
    """Return the C compiler that Triton takes (triton/runtime/build.py); None if missing."""
    path = environment.get("PATH", "")
    if "CC" in environment:
        return shutil.which(environment["CC"], path=path)
    return shutil.which("gcc", path=path) or shutil.which("clang", path=path)


def find_headers() -> Path:
    """Return the folder in which Triton looks for Python.h (triton/runtime/build.py)."""
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    return Path(sysconfig.get_paths(scheme=scheme)["include"])


def find_toolkit(environment: Mapping[str, str], installed: Sequence[Path]) -> Path | None:
    """Return the folder of the CUDA toolkit whose nvcc compiles vLLM's FP8 kernels; None if nvcc is missing.

    The choice of the user comes first, in the order of DeepGEMM (deep_gemm/__init__.py): CUDA_HOME,
    CUDA_PATH, nvcc on PATH. The folders of `installed` come last.
    """
    chosen = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=environment.get("PATH", ""))
    candidates = [Path(chosen)] if chosen else [Path(nvcc).parents[1]] if nvcc else installed
    return next((folder for folder in candidates if (folder / "bin" / "nvcc").is_file()), None)


def installed_toolkits(cuda: str) -> list[Path]:
    """List the usual folders of CUDA toolkits, including folders that do not exist.

    First the toolkit that pip installs with torch, for example site-packages/nvidia/cu13, because its CUDA
    version is torch's; then the toolkit of the system.
    """
    packages = importlib.util.find_spec("nvidia")
    folders = (packages.submodule_search_locations if packages else None) or []
    return [*(Path(folder) / f"cu{cuda.split('.')[0]}" for folder in folders), Path("/usr/local/cuda")]


def fp8_toolkit() -> Path | None:
    """Return the CUDA toolkit that compiles vLLM's FP8 kernels on this machine; None if nvcc is missing."""
    import torch

    return find_toolkit(os.environ, installed_toolkits(torch.version.cuda or ""))


@dataclass(frozen=True)
class Device:
    """The facts of a rank's device on which FP8 rollouts depend (fp8.py)."""

    name: str
    capability: tuple[int, int]  # compute capability of a GPU; (0, 0) for a CPU
    has_nvcc: bool = True  # in a CUDA toolkit that fp8_toolkit() finds
    has_cxx: bool = True  # the C++ compiler that nvcc calls


def device_of_rank() -> Device:
    """Collect the facts of this rank's device."""
    import torch

    if not torch.cuda.is_available():
        return Device("a CPU", (0, 0))
    rank = int(os.environ.get("LOCAL_RANK", 0))
    compiler = os.environ.get("NVCC_CCBIN") or shutil.which("g++")
    return Device(
        torch.cuda.get_device_name(rank), torch.cuda.get_device_capability(rank),
        has_nvcc=fp8_toolkit() is not None, has_cxx=compiler is not None,
    )  # fmt: skip


def check_gpus() -> None:
    """Raise ValueError if torchrun started more ranks on this machine than it has GPUs."""
    import torch

    if torch.cuda.is_available() and int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        raise ValueError(
            f"torchrun --nproc-per-node must be at most {torch.cuda.device_count()}, the number of GPUs of "
            "this machine: each rank needs one"
        )


def check_address() -> None:
    """Raise ValueError if ranks on other nodes could not connect to this node."""
    address = None
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    if line := unreachable_address(address, os.environ):
        raise ValueError(line)


def listening_addresses() -> list[tuple[str, int]]:
    """List the addresses and ports on which processes of this machine listen for TCP connections."""
    with contextlib.suppress(OSError, psutil.Error):  # some systems do not show them
        connections = psutil.net_connections("tcp")
        return [tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN]
    return []


def is_loopback(address: str) -> bool:
    """Tell whether only this machine reaches an address of listening_addresses()."""
    return address == "::1" or address.removeprefix("::ffff:").startswith("127.")


LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


def open_store() -> str | None:
    """Warn of a job on one node whose sockets, by torchrun or the user's variables, others can reach."""
    if not is_one_node(os.environ):
        return None
    for name, value in LOOPBACK.items():
        if os.environ.get(name, value) != value:
            return f"{name}={os.environ[name]} opens sockets without a password: unset it (docs/trust.md)"
    port = int(os.environ.get("MASTER_PORT", 0))
    if all(is_loopback(address) for address, number in listening_addresses() if number == port):
        return None
    return (
        f"torchrun's store listens on all interfaces (port {port}) without a password; "
        "`python -m runtime.torchrun` with the same arguments keeps it on this machine (docs/trust.md)"
    )


def has_library(name: str) -> bool:
    """Tell whether the system has a shared library."""
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL(name))
    return False


def check_machine(bfloat16: bool = False, fp8_refusal: str | None = None) -> None:
    """Raise ValueError if the device of this rank, its driver or a compiler is unfit or missing.

    bfloat16: tells whether the run computes in bfloat16. fp8_refusal: see fp8.py. A machine whose GPU is
    hidden by the user counts as a CPU, a machine whose GPU is hidden by an old driver is refused.
    """
    import torch

    problems = [fp8_refusal, missing_instructions(platform.machine(), torch.cpu._is_avx2_supported())]
    # Without libnuma, vLLM's CPU build would name another cause.
    if torch.version.cuda is None and not has_library("libnuma.so.1"):
        problems.append("vLLM needs libnuma: apt-get install libnuma1, or dnf install numactl-libs")
    if torch.version.cuda is not None and torch.cuda.is_available():
        device = device_of_rank()
        gpu_problem = unsupported_gpu(device.name, device.capability, torch.cuda.get_arch_list(), bfloat16)
        problems = [missing_compiler(find_compiler(os.environ), find_headers()), gpu_problem, fp8_refusal]
    elif torch.version.cuda is not None:  # otherwise a build of torch for CPUs
        is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        if DRIVER_FILE.is_file() and not is_hidden:
            problems = [old_driver(DRIVER_FILE.read_text(), torch.version.cuda) or fp8_refusal]
    if lines := [line for line in problems if line]:
        raise ValueError(". ".join(lines))
