"""Run untrusted Python programs, for example completions of a model, without network, files or rights.

    check_sandbox("bubblewrap")                               # ValueError says what to install or to set
    run_program("print(int(input()) + 1)", "41").stdout       # "42\n"
    with Sandbox(source, Limits(wall_s=2)) as sandbox:        # one start for many tests of one program
        sandbox.run("1 2\n").stdout                           # each test in a fresh process
        sandbox.run(expression="add(1, 2)").value             # "3": the value of the expression, as a literal

A program is confined in two layers:

1. The namespaces of bubblewrap (`bwrap`). The program sees /usr, the Python installation and an empty folder,
   but no network and no other process.
2. Limits of the process (rlimits) and a filter of system calls (seccomp), also without bubblewrap. The filter
   refuses system calls that a script should not need, for example creating processes, executing files,
   opening sockets, sending signals, tracing and mounting. A program is therefore a single process with some
   threads, and the memory limit of the process covers all of its work.

docs/rewards.md lists the attacks that were tried, and the attacks that these layers do not stop.
"""

import contextlib
import csv
import errno
import functools
import marshal
import os
import platform
import re
import select
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from socket import SOCK_STREAM
from typing import Literal

from verifiers.sandbox_inside import empty_folder

Isolation = Literal["bubblewrap", "rlimits"]
INSIDE = Path(__file__).with_name("sandbox_inside.py")
PACKAGES = "/packages"  # site-packages inside bubblewrap, because /tmp there is the program's folder
START_S = 20.0  # seconds; a sandbox that takes longer to start counts as broken
# Modules that are imported once, before the first test, if the program imports them: each test starts faster.
SHARED_MODULES = frozenset(
    "bisect collections copy datetime decimal fractions functools heapq itertools json math numpy operator "
    "random re statistics string typing".split()
)
GRACE_S = 5.0  # seconds beyond a test's time limit after which the process inside counts as lost


@dataclass(frozen=True)
class Limits:
    """The resources of one test."""

    wall_s: float = 5.0  # wall time; also the CPU time of all threads together, rounded up to full seconds
    memory_bytes: int = 1 << 30  # address space; capped at the limit of the calling process
    output_bytes: int = 4 << 20  # stdout, stderr, and each written file
    folder_bytes: int = 64 << 20  # all files together (bubblewrap only)
    threads: int = 64  # bubblewrap only: elsewhere the kernel counts the threads of all the user's processes
    open_files: int = 64


@dataclass(frozen=True)
class Result:
    """The outcome of one test."""

    exit: int  # exit status, or minus the number of the fatal signal
    reason: str  # "" | "time": killed at the limit | "output": wrote too much | "lost": the sandbox ended
    stdout: str
    stderr: str  # the last 2,000 bytes
    value: str  # value of the expression, as a literal; "" without an expression


class Sandbox(contextlib.AbstractContextManager):
    """Run the tests of one program, each in a fresh process and an empty folder.

    isolation: "bubblewrap" (both layers) or "rlimits" (the second layer only). With "rlimits" a program can
    read every file that the user can read, environments in /proc included, can write and delete the user's
    files, and can start any number of threads. Use this only on machines that refuse namespaces and hold
    nothing worth protecting. If the caller is killed, the temporary folder stays behind. RuntimeError if the
    sandbox does not start.
    """

    def __init__(self, source: str, limits: Limits = Limits(), isolation: Isolation = "bubblewrap"):
        self.limits = limits
        self._folder = None
        command = inside_command()
        environment = {
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }
        uid = 0
        if isolation == "bubblewrap":
            # RLIMIT_NPROC is ignored for root, so each caller's programs run under a separate user ID.
            uid = 0 if os.getuid() else 2**30 + os.getpid()
            if (program := shutil.which("bwrap")) is None:
                raise RuntimeError("bubblewrap is not installed: `apt-get install bubblewrap`")
            command = [program, *bubblewrap_arguments(limits.folder_bytes, bool(uid)), *command]
        elif isolation == "rlimits":
            self._folder = tempfile.mkdtemp(prefix="sandbox_")
        else:
            raise ValueError(f"isolation must be 'bubblewrap' or 'rlimits', not {isolation!r}")
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._folder or "/",
            env=environment,
            start_new_session=True,
        )
        threads = limits.threads if isolation == "bubblewrap" else 0
        numbers = (limits.memory_bytes, limits.output_bytes, threads, limits.open_files, uid)
        imports = " ".join(re.findall(r"^[ \t]*(?:import|from)[ \t].*", source, re.MULTILINE))
        modules = " ".join(sorted(SHARED_MODULES & set(re.findall(r"\w+", imports))))
        try:
            packages = PACKAGES if isolation == "bubblewrap" else sysconfig.get_path("purelib")
            self._send(" ".join(map(str, numbers)), system_call_filter(), packages, modules, source)
            self._deadline = time.monotonic() + START_S
            self._read_message(1)
        except (OSError, EOFError) as error:
            message = f"the sandbox does not start: {self._last_words() or error}"
            self.close()
            raise RuntimeError(message) from error

    def run(self, stdin: str = "", expression: str = "", wall_s: float | None = None) -> Result:
        """Run the program as a script with this stdin, or as a module, and evaluate an expression."""
        wall_s = self.limits.wall_s if wall_s is None else wall_s
        self._deadline = time.monotonic() + wall_s + GRACE_S
        if self._process.stdout.closed:
            return Result(-9, "lost", "", "", "")
        try:
            self._send(stdin, expression, str(wall_s))
            exit_status, *texts = self._read_message(5)
        except (OSError, EOFError):
            self._process.kill()  # otherwise a late answer would be read as the answer of the next test
            self._process.wait()
            self._process.stdout.close()
            return Result(-9, "lost", "", "", "")
        return Result(int(exit_status), *(text.decode(errors="replace") for text in texts))

    def _send(self, *fields: str | bytes) -> None:
        encoded = [f if isinstance(f, bytes) else f.encode(errors="surrogatepass") for f in fields]
        message = memoryview(b"".join(len(field).to_bytes(4, "big") + field for field in encoded))
        while message:
            message = message[self._process.stdin.write(message) :]

    def _read_message(self, count: int) -> list[bytes]:
        return [self._read(int.from_bytes(self._read(4), "big")) for _ in range(count)]

    def _read(self, size: int) -> bytes:
        data = bytearray()
        poller = select.poll()
        poller.register(self._process.stdout, select.POLLIN)
        while len(data) < size:
            if not poller.poll(max(0, self._deadline - time.monotonic()) * 1000):
                raise OSError(errno.ETIMEDOUT, "the process inside is silent")
            chunk = self._process.stdout.read(size - len(data))
            if not chunk:
                raise EOFError("the process inside has ended")
            data += chunk
        return bytes(data)

    def _last_words(self) -> str:
        self._process.kill()
        return self._process.stderr.read().decode(errors="replace").strip()[-300:]

    def close(self) -> None:
        """Kill all processes of the sandbox and remove the temporary folder."""
        with contextlib.suppress(ProcessLookupError):
            # The filter refuses setsid and setpgid, so no program can leave the process group.
            os.killpg(self._process.pid, 9)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            pipe.close()
        self._process.wait()
        if self._folder:
            with contextlib.suppress(OSError):
                empty_folder(self._folder)
                os.rmdir(self._folder)

    def __exit__(self, *exc_info) -> None:
        self.close()


def run_program(
    source: str, stdin: str = "", limits: Limits = Limits(), isolation: Isolation = "bubblewrap"
) -> Result:
    """Run a program once."""
    with Sandbox(source, limits, isolation) as sandbox:
        return sandbox.run(stdin)


def check_sandbox(isolation: Isolation) -> None:
    """Run a program to test whether this machine supports the isolation; ValueError names the remedy."""
    if isolation == "bubblewrap" and shutil.which("bwrap") is None:
        raise ValueError(
            "code rewards run programs in bubblewrap, which is not installed: `apt-get install bubblewrap`, "
            "or set reward.sandbox=rlimits, which does not protect your files"
        )
    try:
        result = run_program("print(6 * 7)", "", Limits(wall_s=START_S), isolation)
    except RuntimeError as error:
        result = Result(1, "", "", str(error), "")
    if result.stdout != "42\n":
        raise ValueError(
            f"programs cannot be run with reward.sandbox={isolation} "
            f"({(result.stderr or result.reason).strip()}). bubblewrap needs permission to create namespaces "
            "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; "
            "--cap-add SYS_ADMIN for a container); reward.sandbox=rlimits works without namespaces, but does "
            "not protect your files"
        )


@functools.cache
def inside_command() -> list[str]:
    """Return the command line of the process inside. The code is compiled once, here, to start faster."""
    code = marshal.dumps(compile(INSIDE.read_text(), INSIDE.name, "exec")).hex()
    start = "import marshal, sys; exec(marshal.loads(bytes.fromhex(sys.argv[1])))"
    return [os.path.realpath(sys.executable), "-P", "-s", "-S", "-B", "-X", "utf8", "-c", start, code]


@functools.cache
def bubblewrap_arguments(folder_bytes: int, is_root: bool) -> list[str]:
    """Return the arguments of bwrap that run the command after them in new namespaces.

    Under root, bwrap creates no user namespace, and the process inside keeps the capabilities to switch to
    another user, to kill the program and to empty the folder. The program itself gets no capability.
    """
    command = "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try".split()
    command += ["--as-pid-1", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    for right in ("SETUID", "SETGID", "KILL", "DAC_OVERRIDE") if is_root else ():
        command += ["--cap-add", f"CAP_{right}"]
    command += [] if is_root else ["--unshare-user"]
    # Create every folder explicitly, because bwrap creates missing parents without access for other users.
    command += ["--dir", "/etc", "--dir", "/dev"]
    command += ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for folder in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            command += ["--ro-bind", folder, folder]
    folders = [sys.base_prefix, os.path.realpath(sys.base_prefix)]
    for folder in map(Path, dict.fromkeys(folders)):  # base_prefix may be a link, and Python uses both names
        if Path("/usr") not in [folder, *folder.parents]:
            for parent in list(folder.parents)[-2::-1]:
                command += ["--dir", str(parent)]
            command += ["--ro-bind", str(folder), str(folder)]
    command += ["--ro-bind-try", sysconfig.get_path("purelib"), PACKAGES]
    for device in ("null", "zero", "random", "urandom"):  # /dev/shm is left out, because no limit covers it
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    command += ["--size", str(folder_bytes), "--perms", "1777", "--tmpfs", "/tmp"]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp"]


# ------------------------------------------------------------------------------------------------------------
# The filter of system calls
# ------------------------------------------------------------------------------------------------------------
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH of each
with INSIDE.with_name("system_calls.csv").open(newline="") as file:
    # {system call: number on each of ARCHITECTURES}; None: does not exist there
    REFUSED = {
        row["name"]: tuple(int(row[name]) if row[name] else None for name in ARCHITECTURES)
        for row in csv.DictReader(file)
    }
CLONE = (56, 220)  # allowed with restrictions: numbers as in REFUSED
PRLIMIT = (302, 261)
SOCKETPAIR = (53, 199)
FCNTL = (72, 25)
SENDS_SIGNALS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: a pipe would send a signal to any process
CLONE3 = (435, 435)  # passes flags in memory, so ENOSYS makes libc fall back to clone
CLONE_THREAD = 0x10000


@functools.cache
def system_call_filter() -> bytes:
    """Return the kernel's filter program (classic BPF), which fails every call in REFUSED with EPERM.

    clone is allowed for threads only, prlimit64 for the calling process only, socketpair for streams only
    (asyncio needs one; a pair of datagram sockets could write to other sockets), and fcntl without the
    commands in SENDS_SIGNALS. ValueError on a processor outside of ARCHITECTURES.
    """
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise ValueError(f"the sandbox supports {', '.join(ARCHITECTURES)}, not {machine}")
    column = list(ARCHITECTURES).index(machine)
    load = 0x20  # LD W ABS
    equal = 0x15  # JEQ K
    bits = 0x45  # JSET K
    keep = 0x54  # AND K
    at_least = 0x35  # JGE K
    give = 0x06  # RET K
    allow = 0x7FFF0000
    kill = 0x80000000
    refuse = 0x50000 | errno.EPERM
    unknown = 0x50000 | errno.ENOSYS
    steps = [  # code, steps skipped if true, steps skipped if false, operand
        (load, 0, 0, 4), (equal, 1, 0, ARCHITECTURES[machine]), (give, 0, 0, kill),
        (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (give, 0, 0, refuse),  # x32 calls have other numbers
        (equal, 0, 1, CLONE3[column]), (give, 0, 0, unknown),
    ]  # fmt: skip
    for numbers in REFUSED.values():
        if numbers[column] is not None:
            steps += [(equal, 0, 1, numbers[column]), (give, 0, 0, refuse)]
    steps += [
        (equal, 0, 4, CLONE[column]), (load, 0, 0, 16), (bits, 0, 1, CLONE_THREAD),
        (give, 0, 0, allow), (give, 0, 0, refuse),
        (equal, 0, 4, PRLIMIT[column]), (load, 0, 0, 16), (equal, 0, 1, 0),
        (give, 0, 0, allow), (give, 0, 0, refuse),
        (equal, 0, 5, SOCKETPAIR[column]), (load, 0, 0, 24), (keep, 0, 0, 0xF), (equal, 0, 1, SOCK_STREAM),
        (give, 0, 0, allow), (give, 0, 0, refuse),
        (equal, 0, 2 + 2 * len(SENDS_SIGNALS), FCNTL[column]), (load, 0, 0, 24),
        *(step for command in SENDS_SIGNALS for step in ((equal, 0, 1, command), (give, 0, 0, refuse))),
        (give, 0, 0, allow),
        (give, 0, 0, allow),
    ]  # fmt: skip
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
