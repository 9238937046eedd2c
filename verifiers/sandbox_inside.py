"""The process inside a sandbox: run one Python program repeatedly, with a forked child for each test.

verifiers/sandbox.py starts this file by `python -P -s -S -c`. Few modules are imported, so that a start takes
milliseconds and a test only a fork. Only this process talks to the caller. A program runs in a child without
access to these pipes, and without the right to signal, trace or read this process. Expected answers stay
outside of the sandbox: this process sends back output and values, and the caller compares them.
"""

import atexit
import builtins
import ctypes
import gc
import os
import resource
import select
import sys

SIGINT = 2  # constants, because importing the module `signal` would take as long as a test
SIGKILL = 9
STDERR_BYTES = 2000  # only so many bytes from the end of stderr are sent back


class FilterProgram(ctypes.Structure):
    """The kernel's struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def receive(count: int) -> list[bytes]:
    """Read a message: `count` byte strings, each after a 4-byte length. EOFError at the end of the input."""

    def read(size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = os.read(0, size - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data

    return [read(int.from_bytes(read(4), "big")) for _ in range(count)]


def send(*fields: bytes) -> None:
    """Write a message: each byte string after a 4-byte length."""
    data = memoryview(b"".join(len(field).to_bytes(4, "big") + field for field in fields))
    while data:
        data = data[os.write(1, data) :]


def main() -> None:
    """Answer every request (stdin, expression, seconds) with (exit status, reason, stdout, stderr, value)."""
    own_pid = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, SIGKILL)  # PR_SET_PDEATHSIG: die together with the caller
    libc.signal(SIGINT, 1)  # SIG_IGN; process 1 of a namespace ignores all other signals by default
    limits, bpf, packages, modules, source = receive(5)
    memory, output, threads, files, uid = map(int, limits.split())
    sys.path.append(packages.decode())
    for name in modules.decode().split():  # imported once here instead of in every test
        try:
            __import__(name)
        except ImportError:
            pass  # the program's own import will fail with the same error
    send(b"ready")
    gc.freeze()  # keep the child's garbage collector from touching, and so copying, all existing objects
    while True:
        try:
            stdin, expression, seconds = receive(3)
        except EOFError:
            return
        pipes = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr", "value")]
        os.write(pipes[0], stdin)
        os.lseek(pipes[0], 0, os.SEEK_SET)
        child = os.fork()
        if not child:
            confine(libc, pipes, memory, output, threads, files, uid, float(seconds), bpf)
            if os.getppid() != own_pid:  # killed since the fork, too early for PR_SET_PDEATHSIG
                os._exit(1)
            run_and_exit(source, expression)
        exit_status, reason = wait_for(child, float(seconds))
        sizes = [os.fstat(pipe).st_size for pipe in pipes]
        reason = "output" if not reason and max(sizes[1:]) >= output else reason
        start = max(0, sizes[2] - STDERR_BYTES)
        texts = [os.pread(pipe, output, first) for pipe, first in zip(pipes[1:], (0, start, 0))]
        for pipe in pipes:
            os.close(pipe)
        send(b"%d" % exit_status, reason.encode(), *texts)
        empty_folder()


def wait_for(child: int, seconds: float) -> tuple[int, str]:
    """Wait for a child, then kill all other processes; return the exit status (or -signal) and a reason."""
    descriptor = os.pidfd_open(child)
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    is_late = not poller.poll(seconds * 1000)
    os.close(descriptor)
    os.kill(-1 if os.getpid() == 1 else child, SIGKILL)  # -1: all processes of this namespace but this one
    _, status, usage = os.wait4(child, 0)
    exit_status = os.waitstatus_to_exitcode(status)
    is_late |= exit_status == -SIGKILL and usage.ru_utime + usage.ru_stime >= seconds
    return exit_status, "time" if is_late else ""


def empty_folder(top: str = ".") -> None:
    """Empty a folder of any depth: folders move to the top before they are removed, so that paths stay short.

    An exception ends the sandbox: no test may see files of an earlier test.
    """
    number = 0
    while folders := [path for name in os.listdir(top) if (path := removed(f"{top}/{name}"))]:
        for folder in folders:
            for name in os.listdir(folder):
                if inner := removed(f"{folder}/{name}"):
                    while os.path.lexists(f"{top}/{number}"):
                        number += 1
                    os.rename(inner, f"{top}/{number}")
            os.rmdir(folder)


def removed(path: str) -> str:
    """Remove a file or link and return "", or make a folder writable and return its path."""
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return ""
    if os.stat(path).st_uid == os.geteuid():
        os.chmod(path, 0o700)
    return path


# ------------------------------------------------------------------------------------------------------------
# In the program's process
# ------------------------------------------------------------------------------------------------------------
def confine(
    libc,
    pipes: list[int],
    memory: int,
    output: int,
    threads: int,
    files: int,
    uid: int,
    seconds: float,
    bpf: bytes,
) -> None:
    """Drop all rights and resources beyond the limits, irreversibly, before the program starts."""
    for number, pipe in enumerate(pipes):  # stdin, stdout, stderr, and 3 for the value of an expression
        os.dup2(pipe, number)
    os.closerange(4, 64)
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: output,
        resource.RLIMIT_NOFILE: files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if threads:
        limits[resource.RLIMIT_NPROC] = threads
    for name, limit in limits.items():
        hard = resource.getrlimit(name)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(name, (limit, limit))
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    elif not os.getuid():  # without capabilities, root cannot read the memory of the caller
        libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    code = ctypes.create_string_buffer(bpf, len(bpf))

    program = FilterProgram(len(bpf) // 8, ctypes.addressof(code))
    libc.prctl(1, SIGKILL)
    # PR_SET_NO_NEW_PRIVS, then PR_SET_SECCOMP with SECCOMP_MODE_FILTER
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "the system calls cannot be filtered")


def run_program(source: bytes, expression: bytes) -> None:
    """Run a program as a script; or import it as a module, evaluate an expression and send back the value."""
    builtins.exit = builtins.quit = sys.exit  # usually defined by the module `site`, which -S leaves out
    name = "program" if expression else "__main__"
    module = sys.modules[name] = sys.modules["__main__"] = type(sys)(name)
    sys.argv = ["program.py"]
    exec(compile(source, "program.py", "exec"), module.__dict__)
    if expression:
        os.write(3, literal(eval(compile(expression, "test", "eval"), module.__dict__)).encode())


def run_and_exit(source: bytes, expression: bytes) -> None:
    """Run a program and exit as Python would, but skip the interpreter's slow clean-up."""
    status = _status_of(run_program, source, expression)
    if "threading" in sys.modules:
        status = _status_of(sys.modules["threading"]._shutdown) or status  # waits for threads
    atexit._run_exitfuncs()
    # First of all flush, because a replacement of sys.stdout may use names of the program.
    status = _flush(sys.stdout, sys.__stdout__) or status
    sys.modules["__main__"].__dict__.clear()  # closes the files that the program left open
    gc.collect()
    os._exit(_flush(sys.__stdout__) or status)


def _flush(*files) -> int:
    """Flush the open files among `files` and return the exit status."""
    open_files = [file for file in files if file is not None and not getattr(file, "closed", False)]
    return max([_status_of(file.flush) for file in open_files], default=0)


def _status_of(function, *arguments) -> int:
    try:
        function(*arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def literal(value: object) -> str:
    """Write a value as a literal of plain types, for example a NumPy array as a list."""
    if value is None or isinstance(value, (bool, complex)):
        return repr(value)
    if isinstance(value, float):
        return {"inf": "1e999", "-inf": "-1e999"}.get(text := float.__repr__(value), text)
    for kind in (int, str, bytes):
        if isinstance(value, kind):
            return ascii(kind(value))
    if isinstance(value, bytearray):
        return ascii(bytes(value))
    if isinstance(value, (type({}.keys()), type({}.items()))):  # views of a dict equal sets
        value = set(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{literal(key)}:{literal(item)}" for key, item in value.items()) + "}"
    for kinds, start, end, empty in (
        (list, "[", "]", "[]"),
        (tuple, "(", ",)", "()"),
        ((set, frozenset), "{", "}", "set()"),
    ):
        if isinstance(value, kinds):
            return start + ",".join(map(literal, value)) + end if value else empty
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        return literal(value.tolist())
    return literal(float(value))  # Fraction, Decimal; TypeError for anything but a number


if __name__ == "__main__":
    main()
