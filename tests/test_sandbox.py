"""Programs in a sandbox: attempts to escape, programs that exceed a limit, and the rewards of programs."""

import errno
import inspect
import json
import os
import re
import resource
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import psutil
import pytest
from conftest import NEEDS_BUBBLEWRAP, ROOT, alive

from reward import RewardPool, impossible_references
from tests.patience import limit, wait_until
from verifiers import sandbox
from verifiers.code import extract_program, same_output, verify
from verifiers.sandbox import Limits, Sandbox, bubblewrap_arguments, check_sandbox, run_program

pytestmark = pytest.mark.slow
SECRET = "a secret of the parent"

each_isolation = pytest.mark.parametrize(
    "isolation", [pytest.param("bubblewrap", marks=NEEDS_BUBBLEWRAP), "rlimits"]
)


@pytest.fixture(autouse=True)
def no_leftovers():
    """Check that a test leaves no process and no folder behind."""

    def children():
        return set(psutil.Process().children(recursive=True))

    def folders():
        return set(Path(tempfile.gettempdir()).glob("sandbox_*"))

    old_children = children()
    old_folders = folders()
    yield
    user = 2**30 + os.getpid()  # the user id of programs if root runs the tests
    assert not [process for process in psutil.process_iter(["uids"]) if process.info["uids"].real == user]
    assert children() <= old_children
    left = folders() - old_folders  # or the folder of a sandbox in tests that run at the same time
    assert wait_until(lambda: not any(folder.exists() for folder in left))


# ---- escapes -----------------------------------------------------------------------------------------------

P = "PermissionError"
M = "MemoryError"
F = "FileNotFoundError"
# {attempt: (end in bubblewrap, end under rlimits alone, program)}. An end is the name of an exception,
# "escaped", or the reason for a kill, for example "time"; None: skipped, because rlimits do not stop it.
ESCAPES = {
    "connect to a server here": (P, P, "import socket; socket.create_connection(('127.0.0.1', {port}), 1)"),
    "ask a name server": (
        P, P, "from socket import *; socket(AF_INET, SOCK_DGRAM).sendto(b'?', ('127.0.0.1', 53))"),
    "open a socket of Unix": (P, P, "import socket; socket.socket(socket.AF_UNIX)"),
    "write to a socket of Unix": (
        P, P, "from socket import *; socketpair(AF_UNIX, SOCK_DGRAM)[1].sendto(b'x', '{run}/a')"),
    "a pipe that kills another process": (
        P, P,
        "import fcntl\nr, w = os.pipe()\nfcntl.fcntl(r, 10, 9)\nfcntl.fcntl(r, fcntl.F_SETOWN, {other})\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, fcntl.fcntl(r, fcntl.F_GETFL) | os.O_ASYNC)\nos.write(w, b'x')"),
    "own another process's signals": (
        P, P, "import fcntl; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {other})"),
    "tie another process to a core": (P, P, "os.sched_setaffinity({other}, [0])"),
    "slow another process down": (P, P, "os.setpriority(os.PRIO_PROCESS, {other}, 19)"),
    "fork bomb": (P, P, "while True: os.fork()"),
    "fork by clone": (P, P, "check(libc.syscall(56, 17, 0, 0, 0, 0))"),
    "fork by clone3": ("OSError", "OSError", "check(libc.syscall(435, 0, 0))"),
    "leave a process behind": (P, P, "import subprocess; subprocess.Popen(['sleep', '60'])"),
    "become another program": (P, P, "os.execv('/bin/sh', ['sh', '-c', 'echo escaped'])"),
    "sudo": (P, P, "os.execv('/usr/bin/su', ['su'])"),
    "99 threads": (
        "RuntimeError", None,
        "import threading, time\nsleep = lambda: time.sleep(60)\n"
        "for i in range(99): threading.Thread(target=sleep, daemon=True).start()"),
    "too much memory": (M, M, "bytearray(1 << 30)"),
    "memory outside the address space": (P, P, "os.memfd_create('x')"),
    "fill the folder": ("OSError", None, "for i in range(99): open(str(i), 'wb').write(bytes(1 << 20))"),
    "a huge file": ("OSError", "OSError", "open('huge', 'wb').write(bytes(8 << 20))"),
    "a huge file of holes": ("OSError", "OSError", "open('huge', 'wb').truncate(1 << 40)"),
    "endless output": ("output", "output", "while True: print('x' * 65536)"),
    "endless errors": ("output", "output", "while True: sys.stderr.write('x' * 65536)"),
    "endless loop": ("time", "time", "while True: pass"),
    "endless loop that ignores signals": (
        "time", "time",
        "import signal\nfor n in (2, 14, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass"),
    "sleep": ("time", "time", "import time; time.sleep(3000)"),
    "read past the end of the input": ("EOFError", "EOFError", "input(); input()"),
    "another environment": (
        F, "escaped" if os.getuid() else P, "assert {secret!r} in open('/proc/{other}/environ').read()"),
    "the environment": ("AssertionError", "AssertionError", "assert {secret!r} in str(os.environ)"),
    "memory of another process": (F, None, "open('/proc/{other}/mem', 'rb')"),
    "a file of another run": (F, "escaped", "open('{run}/verdicts.json')"),
    "a link to another run": (F, "escaped", "os.symlink('{run}/verdicts.json', 'link'); open('link')"),
    "write beside another run": (F, "escaped", "open('{run}/new', 'w')"),
    "read the project": (F, "escaped", "open('{project}/README.md')"),
    "write to the project": ("(FileNotFound|Permission|OS)Error", None, "open('{project}/new', 'w')"),
    "write to home": ("(FileNotFound|Permission|OS)Error", None, "open('{home}/new', 'w')"),
    "write to /dev/shm": (F, None, "open('/dev/shm/new', 'w')"),
    "write to /usr": ("OSError", None, "open('/usr/new', 'w')"),
    "write to Python": ("OSError|PermissionError", None, "open(os.__file__, 'a')"),
    "write to the root": ("OSError|PermissionError", None, "open('/new', 'w')"),
    "read the passwords": (F, None, "open('/etc/shadow')"),
    "kill another process": (P, P, "os.kill({other}, 9)"),
    "kill the process inside": (P, P, "os.kill(os.getppid(), 9)"),
    "kill everything": (P, P, "os.kill(-1, 9)"),
    "limit the process inside": (P, P, "import resource; resource.prlimit(os.getppid(), 0, (0, 0))"),
    "raise its own limit": ("ValueError", None, "import resource; resource.setrlimit(9, (1 << 40, 1 << 40))"),
    "trace the process inside": (P, P, "check(libc.ptrace(16, os.getppid(), 0, 0))"),
    "become root": (P, None, "os.setuid(0)"),
    "mount": (P, P, "check(libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0))"),
    "a user namespace of its own": (P, P, "check(libc.unshare(0x10000000))"),
    "a disk": (P, None, "os.mknod('disk', 0o60600, os.makedev(8, 0)); open('disk')"),
    "leave the process group": (P, P, "os.setsid()"),
}  # fmt: skip
FRAME = """import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result == -1: raise OSError(ctypes.get_errno(), "refused")
try:
    exec({body!r})
    print("escaped")
except BaseException as error:
    print(type(error).__name__)
"""
SMALL = Limits(wall_s=limit(1.5), memory_bytes=256 << 20, output_bytes=1 << 20, folder_bytes=4 << 20)
ATTEMPTS = [
    pytest.param(isolation, name, marks=NEEDS_BUBBLEWRAP if isolation == "bubblewrap" else ())
    for name, ends in ESCAPES.items()
    for isolation, end in zip(("bubblewrap", "rlimits"), ends)
    if end is not None
]


@pytest.mark.parametrize("isolation, name", ATTEMPTS)
def test_a_program_does_not_escape(isolation, name, tmp_path, monkeypatch):
    *ends, body = ESCAPES[name]
    expected = ends[isolation == "rlimits"]
    (tmp_path / "verdicts.json").write_text("{}")
    other = subprocess.Popen(["sleep", "3000"], env={"PATH": os.environ["PATH"], "SECRET": SECRET})
    monkeypatch.setenv("SECRET", SECRET)
    folders = {"project": ROOT, "home": Path.home(), "run": tmp_path}
    with socket.create_server(("127.0.0.1", 0)) as server:
        body = body.format(port=server.getsockname()[1], other=other.pid, secret=SECRET, **folders)
        limits = (
            replace(SMALL, wall_s=limit(0.5)) if expected == "time" else SMALL
        )  # these programs never end
        start = time.monotonic()
        result = run_program(FRAME.format(body=body), "", limits, isolation)
        seconds = time.monotonic() - start
    is_alive = other.poll() is None
    other.kill()
    other.wait()
    assert re.fullmatch(expected, result.reason or result.stdout.strip()), result
    assert seconds < SMALL.wall_s + limit(3) and is_alive  # a program without limits takes 60 s
    assert not [folder for folder in (ROOT, Path.home(), Path("/dev/shm")) if (folder / "new").exists()]


@each_isolation
def test_every_listed_system_call_is_refused(isolation):
    column = list(sandbox.ARCHITECTURES).index(os.uname().machine)
    numbers = {name: pair[column] for name, pair in sandbox.REFUSED.items() if pair[column] is not None}
    source = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in {list(numbers.values())}:
    assert libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1, number
    print(ctypes.get_errno())
"""
    result = run_program(source, isolation=isolation)
    assert result.stdout.split() == [str(errno.EPERM)] * len(numbers), result.stderr


@pytest.mark.parametrize(
    "column, header", [(0, "x86_64-linux-gnu/asm/unistd_64.h"), (1, "asm-generic/unistd.h")]
)
def test_the_numbers_of_system_calls_match_the_headers_of_the_kernel(column, header):
    path = Path("/usr/include", header)
    if not path.is_file():
        pytest.skip(f"{path} is not installed (linux-libc-dev)")
    definitions = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text())
    header_numbers = {name: int(number) for name, number in definitions}
    calls = dict(sandbox.REFUSED, clone=sandbox.CLONE, prlimit64=sandbox.PRLIMIT, clone3=sandbox.CLONE3)
    numbers = {
        name: pair[column] for name, pair in calls.items() if name in header_numbers or pair[column] is None
    }
    assert len(numbers) > 60
    assert {name: header_numbers.get(name) for name in numbers} == numbers


# ---- the tests of one program ------------------------------------------------------------------------------


@each_isolation
def test_a_test_is_isolated_from_the_previous_test(isolation):
    source = """
import os, sys
print(sorted(os.listdir(".")), hasattr(sys, "seen"), input())
sys.seen = True
os.makedirs("a/b/c")
os.chmod("a/b", 0)
os.symlink("/", "a/link")
open("kept", "w").write("x")
"""
    with Sandbox(source, isolation=isolation) as box:
        outputs = [box.run(text).stdout for text in ("one", "two", "two\nthree")]
    assert outputs == ["[] False one\n", "[] False two\n", "[] False two\n"]


@each_isolation
def test_a_program_cannot_forge_the_verdict(isolation):
    """The program writes forged verdicts to every open file descriptor, and closes all descriptors."""
    source = """
import os
message = b"".join(len(f).to_bytes(4, "big") + f for f in (b"0", b"", b"forged", b"", b"True"))
for fd in [0, *range(2, 64)]:
    try: os.write(fd, message)
    except OSError: pass
os.write(1, b"own\\n")
os.closerange(0, 64)
os._exit(0)
"""
    with Sandbox(source, isolation=isolation) as box:
        assert [box.run().stdout for _ in range(3)] == ["own\n"] * 3


@cache
def end_under_python(source: str) -> subprocess.CompletedProcess:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
        program.write(source)
        program.flush()
        command = [sys.executable, program.name]
        return subprocess.run(command, input="é\n", capture_output=True, text=True, timeout=limit(10))


@each_isolation
def test_a_program_ends_as_under_python(isolation):
    """Exit status and output are equal to `python program.py`."""
    for source in (
        "print(input()); exit(3)",
        "import sys; sys.exit('a message')",
        "import atexit; atexit.register(print, 'bye'); raise SystemExit",
        "from threading import Timer; Timer(0.02, print, ['late']).start()",
        "import sys, io; sys.stdout = io.TextIOWrapper(open(1, 'wb')); print('left open')",
        "import sys; f = open(1, 'w', closefd=False); f.write('not closed')",
        "import sys, os\nclass Fast:\n    text = ''\n    def write(self, text): self.text += text\n"
        "    def flush(self): os.write(1, self.text.encode()); self.text = ''\n"
        "sys.stdout = Fast()\nprint('by own names')",
        "import sys; print('closed'); sys.stdout.close()",
        "import sys; print('closed below'); sys.stdout.flush(); sys.stdout.buffer.close()",
        "import sys; print('gone'); sys.stdout = None",
        "class Late:\n    def __del__(self): print('late')\nlate = Late()",
        "if __name__ == '__main__': print(open(0).read(), end='')",
        "1 / 0",
        "import os; os.abort()",
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))",
        "import asyncio; asyncio.run(asyncio.sleep(0)); print('done')",
        "import sys; sys.setrecursionlimit(10**6)\ndef f(n): return n and f(n - 1)\nprint(f(20000))",
        "import numpy; print(numpy.arange(3) @ numpy.arange(3))",
        "def",
    ):  # fmt: skip
        done = end_under_python(source)
        result = run_program(source, "é\n", Limits(wall_s=limit(20)), isolation)
        assert (result.stdout, result.reason) == (done.stdout, ""), source
        assert result.exit == done.returncode or "abort" in source and result.exit < 0, source
        assert result.stderr.splitlines()[-1:] == done.stderr.splitlines()[-1:], source


@NEEDS_BUBBLEWRAP
def test_packages_below_tmp_can_be_imported_and_survive_the_emptying_of_tmp(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as packages:
        os.chmod(packages, 0o755)  # the program runs as another user
        Path(packages, "installed.py").write_text("ANSWER = 42\n")
        monkeypatch.setattr(sysconfig, "get_path", lambda name: packages)
        sandbox.bubblewrap_arguments.cache_clear()
        try:
            with Sandbox("import installed; open('new', 'w'); print(installed.ANSWER)") as started:
                results = [started.run(), started.run()]
        finally:
            sandbox.bubblewrap_arguments.cache_clear()
        assert [result.stdout for result in results] == ["42\n"] * 2, results


@NEEDS_BUBBLEWRAP
@pytest.mark.skipif(os.getuid() != 0, reason="only root can change the user")
def test_the_sandbox_works_for_a_user_without_rights(tmp_path):
    """The system's Python runs as a user without any files or groups."""
    python = "/usr/bin/python3"
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from verifiers.sandbox import *;"
        "check_sandbox('bubblewrap');"
        "print(run_program('import os; print(os.getpid(), os.listdir(\"/tmp\")); os.fork()').stdout, end='')"
    )
    version = subprocess.run(
        [python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True
    )
    closed = [folder for folder in (ROOT, *ROOT.parents) if not folder.stat().st_mode & 1]
    if version.stdout != b"True\n" or closed:
        pytest.skip("the user cannot run a Python 3.11, or cannot read the project folder")
    done = subprocess.run(
        [python, "-B", "-c", script], user=12345, group=12345, extra_groups=[], cwd="/",
        env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=limit(30),
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("2 []\n", "")


@each_isolation
def test_killing_a_worker_ends_its_program(isolation, tmp_path):
    """The caller has 2 GiB of address space, like a reward worker, and is killed in the middle of a test."""
    script = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
from verifiers.sandbox import *
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
print(run_program("bytearray(3 << 30)", "", Limits(memory_bytes=8 << 30), {isolation!r}).stderr.split()[-1])
print("looping", flush=True)
run_program("while True: pass", "", Limits(wall_s=3000), {isolation!r})
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    worker = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert [worker.stdout.readline() for _ in range(2)] == ["MemoryError\n", "looping\n"]
    programs = []

    def start() -> bool:
        programs[:] = psutil.Process(worker.pid).children(recursive=True)
        return len(programs) >= 2

    assert wait_until(start)
    worker.kill()
    worker.wait()
    worker.stdout.close()
    assert wait_until(lambda: not any(alive(process.pid) for process in programs))
    assert len(list(tmp_path.iterdir())) == (
        isolation == "rlimits"
    )  # the empty folder of the killed worker remains


def test_a_program_does_not_start_after_its_sandbox_was_killed(tmp_path):
    """The sandbox dies between the fork and the child's PR_SET_PDEATHSIG, which then has no effect."""
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from verifiers import sandbox_inside as inside
parent, confine = os.getpid(), inside.confine

def late(*arguments):
    os.kill(parent, 9)
    while os.getppid() == parent:
        pass
    open("child", "w").write(str(os.getpid()))
    confine(*arguments)

inside.confine = late
inside.main()
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.PIPE)
    program = b"open('ran', 'w')"
    limits = f"{8 << 30} {1 << 20} 0 64 0".encode()
    fields = (limits, sandbox.system_call_filter(), b"", b"", program, b"", b"", b"60")
    process.communicate(b"".join(len(field).to_bytes(4, "big") + field for field in fields))
    file = tmp_path / "child"
    assert wait_until(lambda: file.is_file() and file.read_text())
    child = int(file.read_text())
    programs = [process for process in psutil.process_iter() if process.pid == child]
    assert wait_until(lambda: not any(alive(process.pid) for process in programs))
    assert not (tmp_path / "ran").exists()


# ---- a machine without bubblewrap --------------------------------------------------------------------------


def test_an_error_names_bubblewrap_and_the_alternative(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="bubblewrap.*reward.sandbox=rlimits"):
        check_sandbox("bubblewrap")
    refuses = tmp_path / "bwrap"
    refuses.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    refuses.chmod(0o755)
    with pytest.raises(ValueError, match="No permissions.*reward.sandbox=rlimits"):
        check_sandbox("bubblewrap")
    score, status, detail = verify("```python\nprint(1)\n```", '{"inputs": [""], "outputs": ["1"]}')
    assert (score, status) == (0.0, "error") and "No permissions" in detail
    with pytest.raises(ValueError, match="'docker'"):
        run_program("", isolation="docker")


# ---- rewards -----------------------------------------------------------------------------------------------


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\n"


@pytest.mark.parametrize(
    "completion, program",
    [
        ("```python\na = 1\n```\nor\n```python\na = 2\n```", "a = 2\n"),
        ("```python\na = 1\n```\nIt prints\n```\n5\n```", "a = 1\n"),
        ("```Python3\na = 1\n```", "a = 1\n"),
        ("```\na = 1\n```\n```\na = 2\n```", "a = 2\n"),
        ("1. So:\n   ```py\n   if a:\n       b = 1\n   ```", "if a:\n    b = 1\n"),
        ("<answer>```python\na = 1\n```</answer>", "a = 1\n"),
        ("<answer>```Python\na = 1```</answer>", "a = 1"),
        ("Here is the code: ```python\na = 1\n```\nIt sets a.", "a = 1\n"),
        ("1. ```py\n   a = 1\n   ```\n2. ```text\n   out\n   ```", "a = 1\n"),
        ("```python\na = 1```", "a = 1"),
        ("```python\na = '```'\nb = 2\n```", "a = '```'\nb = 2\n"),
        ("```python\na = 1\nb = '``'", "a = 1\nb = '``'"),  # cut off
        ("a = int(input())\nprint(a)", "a = int(input())\nprint(a)"),
        ("def f():\n    return 1", "def f():\n    return 1"),
        ("```python\n\n```", None), ("42", None), ("Yes", None), ("I cannot do it.", None), ("", None),
        ("(" * 100_000, None),
    ],
)  # fmt: skip
def test_the_program_of_a_completion(completion, program):
    assert extract_program(completion) == program


@pytest.mark.parametrize(
    "output, expected, same",
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 \n3\n\n", "1 2\n3", True),
        ("\n \n1 2\n3", "1 2\n3", True),
        ("1 2\n\n3", "1 2\n3", False),
        ("1\n2\n3", "1 2\n3", False),
        ("", "1", False),
        ("0.3333333", "0.33333333333", True),
        ("0.3334", "0.33333", False),
        ("1", "1.0", True),
        ("1.0", "1", False),  # an integer must be printed without a decimal point
        ("10000001", "10000000", False),
        ("nan", "0.5", False),
        ("1e3", "1000.0", True),
        ("YES", "yes", False),
    ],
)
def test_outputs_are_compared_by_lines_and_words(output, expected, same):
    assert same_output(output, expected) is same


ADD = [f"assert add({a}, {b}) == {a + b}" for a, b in ((1, 2), (3, 4))]
LISTS = [
    "assert set(f(3)) == set([0, 1, 2])",
    "import math\nassert math.isclose(sum(f(3)), 3.0000001, rel_tol=1e-6)",
    "assert f(0) == []",
    "x = f(2)\nassert len(x) == 2",
    "assert (f(1) == [0]) is True",
]
NEAR = [  # each function has its own default tolerances
    *(f"assert np.isclose(half(1), 0.5{tolerance})" for tolerance in ("", ", atol=1e-3")),
    *(f"assert math.isclose(half(1), 0.5{tolerance})" for tolerance in ("", ", abs_tol=1e-3")),
]
SETUP = {"asserts": [*ADD, "assert add(zero, 5) == 0"], "setup": "zero = 0"}
ECHO = {"inputs": ["1", "5"], "outputs": ["2", "6"]}
CALL = {"fn_name": "join", "inputs": ['[1, 2]\n{"a": null}', [[3], {}]], "outputs": ['[1, 2, "a"]', [[3]]]}
TYPED = [  # the names of typing exist, whether or not the program imports them
    "def join(a: List, b) -> Any: return (*a, *b)",
    "def join(a: Union[list, str], b): return (*a, *b)",
    "import typing\ndef join(a: List[int], b): return (*a, *b)",
    "# a typing game\nclass Solution:\n    def join(self, a: List[int], b): return (*a, *b)",
    "from __future__ import (\n    annotations)\ndef join(a: List[int], b): return (*a, *b)\nList[int]",
    "class List: pass\ndef join(a, b): return (*a, *b) if List() else 0",
]
FLOATS = {  # the expected values are 0.3, and a list with floats in a list and in a dict
    "fn_name": "f",
    "inputs": ["0", "1", "2"],
    "outputs": ["0.3", '[[0.3], {"a": 1.0}]', "[3]"],
}
RESULTS = "f = lambda n: [{}, [({},), {{'a': {}}}], {}][n]"  # one value per expected float, and one for the 3
SEPARATED = {"fn_name": "len", "inputs": ['"a\u2028b"\n'], "outputs": ["3"]}
LONG = list(range(100_000, 140_000))  # as text longer than a result may be that nobody expects
KEYS = {"fn_name": "f", "inputs": [[{"1": 5, "2": 7}], [{"1": 5, "b": 7}]], "outputs": [12, 12]}
NODE = {"asserts": ["assert root.value == 1", "assert root.next is None"], "test_setup": "root = Node(1)"}
LEETCODE = """class Solution:
    def f(self, rows: List[int]):
        counts, queue = defaultdict(int), deque(rows)
        heapq.heappush(rows, inf)
        return pow(len(queue), 3, 5) + len(Counter(rows))"""
SOLUTION = "class Solution:\n    def join(self, a: List[int], b): return (*a, *b)"


@NEEDS_BUBBLEWRAP
@pytest.mark.parametrize(
    "program, tests, reward, detail",
    [
        ("print(int(input()) + 1)", ECHO, 1.0, ""),
        ("print(2)", ECHO, 0.5, "1 of 2"),
        ("print(int(input()) + 1); 1 / 0", ECHO, 0.0, "0 of 2"),
        ("print(2)\nwhile True: pass", ECHO, 0.0, "0 of 2 tests passed; test 1 was killed"),
        ("print(2)", {"inputs": [["1", 5]], "outputs": [["2"]]}, 1.0, ""),
        ("def add(a, b): return a + b", ADD, 1.0, ""),
        ("def add(a, b): return a", SETUP, 1 / 3, "1 of 3"),
        ("def f(n): return list(range(n))", LISTS, 1.0, ""),
        ("def f(n): return [1] * n", LISTS, 0.6, "3 of 5"),
        ("def f(n): return dict.fromkeys(range(n)).keys()", ["assert f(2) == {0, 1}"], 1.0, ""),
        ("def f(n): return bytearray(n)", ["assert f(2) == b'\\0\\0'"], 1.0, ""),
        ("def add(a, b): return a", SETUP | {"setup": ["a = 0", "zero = a"]}, 1 / 3, "1 of 3"),
        (SOLUTION, CALL, 1.0, ""),
        *((program, CALL, 1.0, "") for program in TYPED),
        ("size = len", SEPARATED, 1.0, ""),
        (RESULTS.format("0.1 + 0.2", "0.3000001", "1", "3.0"), FLOATS, 1.0, ""),
        (RESULTS.format("0.30001", "0.30001", "1.0", "3.0000001"), FLOATS, 0.0, "0 of 3"),
        (RESULTS.format("'0.3'", "0.3", "0.9999", "True"), FLOATS, 0.0, "0 of 3"),
        ("f = lambda: True", {"fn_name": "f", "inputs": [[]], "outputs": [0.9999999]}, 0.0, "0 of 1"),
        ("def join(a, b): return a", CALL, 0.5, "1 of 2"),
        ("def", ADD, 0.0, "0 of 2"),
        ("import math\nimport numpy as np\ndef half(x): return x / 2 + 1e-7", NEAR, 0.75, "3 of 4"),
        ("def f(n): return list(range(100_000, 140_000))",
         {"fn_name": "f", "inputs": [[0], [0]], "outputs": [LONG, [3]]}, 0.5, "1 of 2"),
        ("def f(n): return list(range(100_000, 140_000))", [f"assert f(0) == {LONG}"], 1.0, ""),
        ("def f(d): return sum(v for k, v in d.items() if k in (1, 2, '1', 'b'))", KEYS, 1.0, ""),
        ("def f(d): return d[1] + d[2]", KEYS, 0.5, "1 of 2"),
        ("class Node:\n    next = None\n    def __init__(self, value): self.value = value", NODE, 1.0, ""),
        (LEETCODE, {"fn_name": "f", "inputs": [[[1, 1]]], "outputs": [5]}, 1.0, ""),
        # programs that cheat
        ("import os; os._exit(0)", ADD, 0.0, "0 of 2"),
        ("raise SystemExit(0)", ADD, 0.0, "0 of 2"),
        ("class E:\n    __eq__ = lambda a, b: True\nadd = lambda a, b: E()", ADD, 0.0, "0 of 2"),
        ("import os; os.write(3, b'True'); os._exit(0)", ADD, 0.0, "0 of 2"),
        ("import builtins; builtins.set = lambda x: {1}\nf = lambda n: [1]", LISTS[:1], 0.0, "0 of 1"),
        ("print('[(1, 2), 3]')\nadd = lambda a, b: float('nan')", ADD, 0.0, "0 of 2"),
        ("add = lambda a, b: '(' * 99999", ADD, 0.0, "0 of 2"),
        ("import os; os.write(3, b'(' * 99999); os._exit(0)", ADD, 0.0, "0 of 2"),
        ("import os; os.write(3, b'{{}}'); os._exit(0)", ADD, 0.0, "0 of 2"),
    ],
)  # fmt: skip
def test_the_reward_is_the_share_of_tests_passed(program, tests, reward, detail):
    timeout_s = limit(0.3 if "while True" in program else 5)
    score, status, explanation = verify(fenced(program), json.dumps(tests), timeout_s=timeout_s)
    assert (score, status) == (reward, "ok" if reward == 1 else "wrong")
    assert explanation.startswith(detail) and len(explanation) <= 200


@each_isolation
def test_threads_are_limited_only_in_a_namespace(isolation):
    """Outside of a namespace the kernel would count all threads of the user, including the trainer's."""
    program = "import resource; print(resource.getrlimit(resource.RLIMIT_NPROC)[0])"
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    expected = {"rlimits": limit, "bubblewrap": 64}
    assert int(run_program(program, isolation=isolation).stdout) == expected[isolation]


def test_a_linked_python_folder_is_bound_by_link_and_target(tmp_path, monkeypatch):
    (tmp_path / "python").mkdir()
    (tmp_path / "link").symlink_to("python")
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "link"))
    command = " ".join(bubblewrap_arguments.__wrapped__(1 << 20, True))
    for name in ("link", "python"):
        assert f"--ro-bind {tmp_path / name} {tmp_path / name}" in command


@NEEDS_BUBBLEWRAP
def test_all_tests_of_a_program_share_a_limit_of_time():
    timeout_s = limit(0.1)
    start = time.monotonic()
    tests = {"inputs": ["1"] * 50, "outputs": ["1"] * 50}
    score, _, detail = verify(fenced("while True: pass"), json.dumps(tests), timeout_s=timeout_s)
    assert score == 0 and detail.startswith("0 of 50")
    assert 3 * timeout_s < time.monotonic() - start < 8 * timeout_s


@pytest.mark.parametrize(
    "answer, word",
    [
        ("print(1)", "JSON"),
        ("{}", "asserts"),
        ("3", "asserts"),
        ("[]", "asserts"),
        ('{"inputs": "1", "outputs": ["1"]}', "inputs"),
        ('{"inputs": ["1", "2"], "outputs": ["1"]}', "2 inputs and 1 outputs"),
        ('{"inputs": [1], "outputs": ["1"]}', "lines"),
        ('{"inputs": ["1"], "outputs": ["1"], "fn_name": "a b"}', "fn_name"),
        ('{"inputs": ["x"], "outputs": ["1"], "fn_name": "a"}', "inputs of a function"),
        ('{"inputs": ["1"], "outputs": ["x"], "fn_name": "a"}', "outputs of a function"),
        ('["assert add(1"]', "not Python"),
        ("[3]", "text"),
    ],
)
def test_unreadable_tests_are_an_error(answer, word):
    for completion in (fenced("print(1)"), "no program"):
        score, status, detail = verify(completion, answer)
        assert (score, status) == (0.0, "error") and word in detail
    assert verify("no program", json.dumps(ADD))[:2] == (0.0, "no_answer")


# ---- tests that test nothing, texts that take long --------------------------------------------------
RLIMITS = {"isolation": "rlimits", "timeout_s": 3.0, "memory_bytes": 1 << 30}
ROW = -1  # a trivial result passes all tests of the row
CHECK = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 3\n"


@pytest.mark.parametrize(
    "answer, number",
    [
        ([CHECK], 1), ({"asserts": [CHECK], "entry_point": "f"}, 0), ([CHECK + "check(f)"], 0),
        (["def test_f():\n    assert f(1) == 2"], 1), (["assert f(1) == 2", "print(f(1))"], 2),
        (["assert (f(1) == 2, 'm')"], ROW), (["assert True"], 1),
        (["assert len([1]) == 1"], 1), (["f(1)"], ROW),
        (["try:\n    assert f(1) == 2\nexcept Exception:\n    pass"], 1), (["assert f(1) == 2 or True"], ROW),
        (["import math\nassert math.isclose(f(1), 2)",
          "assert f(1) != 2", "assert not f(0)", "assert f(3)"], 0),
        (["assert f(1) == g(1) and f(1) > 0", "assert f(1) is None", "assert set(f(1)) == {1}"], 0),
        ({"asserts": ["assert np.sum(f(1)) == 2"], "setup": "import math as np\nnp.sum = sum"}, 0),
        ({"inputs": ["1", "2"], "outputs": ["", "3"]}, 1), ({"inputs": ["1"], "outputs": [["3"]]}, 0),
        ({"inputs": ["[1]"], "outputs": ["null"], "fn_name": "f"}, ROW), ({"inputs": []}, 0),
        ({"inputs": ["1", "2"], "outputs": ["null", "3"], "fn_name": "f"}, 0), (["assert f(1) is None"], ROW),
        (["import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        assert f(1)"], 1),
        (["for x in f(3):\n    assert x == 1"], ROW), (["assert all(x > 0 for x in f(3))"], ROW),
        (["assert f(1) is not None"], ROW), (["assert f(1) == f(1)"], ROW),
        (["for x in []:\n    assert f(x)"], 1),
        ({"asserts": ["assert g(1) == 2"], "setup": "def g(x): return x + 1"}, 1), (["assert not f(1)"], ROW),
        (["import contextlib\nwith contextlib.suppress(Exception):\n    assert f(1) == 2"], 1),
        (["class TestF:\n    def test(self):\n        assert f(1) == 2"], 1),
        (["s = S()\nassert s.pop() == 1"], 0), (["assert f(1)", "assert f(2, 3)"], ROW),
        (["from solution import f\n\ndef test_f():\n    assert f(1) == 2"], "no program can pass"),
        ({"asserts": ["from solution import f\nf(1)"], "test_setup": "x = 1"}, "no program can pass"),
    ],
)  # fmt: skip
def test_a_test_that_a_program_without_work_passes_is_refused(answer, number):
    """A set with such a row is refused at the start, because wrong programs would be rewarded."""
    rows = [("code", json.dumps(answer), {}), ("1*code + 1*exact", '["assert f(1) == 2"]', {})]
    with RewardPool(1, code_limits=RLIMITS, timeout_s=limit(10)) as pool:
        reasons = impossible_references(pool, rows)
    if number:
        reason = reasons.pop(0)
        texts = {ROW: "tests test nothing", "no program can pass": number}
        assert texts.get(number, f"test {number} tests nothing") in reason
    assert all("inputs" in reason for reason in reasons.values())


def test_a_start_says_how_many_doubtful_rows_are_not_tried(monkeypatch):
    monkeypatch.setattr("reward.MAX_TRIED", 2)
    rows = [("code", json.dumps([CHECK + f"check(f{i})"]), {}) for i in range(5)]
    warnings = []
    with RewardPool(1, code_limits=RLIMITS, timeout_s=limit(10)) as pool:
        assert impossible_references(pool, rows, warnings.append) == {}
    assert len(warnings) == 1 and "3 of 5" in warnings[0]


HOSTILE = (
    " ", "`", "```", "``` ", "```p ", "\n```", "```\n", "\t", "*", "**", "a. ", "[", "<<", "1,", "{", "1. ",
    "\n- ",
)  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_no_expression_of_a_verifier_is_quadratic(text):
    """Twice the length takes about twice the time; 120,000 characters took 19 s."""
    from verifiers.code import FENCE
    from verifiers.instructions import CHECKS

    arguments = {"num_sentences": 3, "relation": "at least", "num_words": 3, "num_highlights": 1,
                 "num_placeholders": 1,
                 "num_bullets": 1, "capital_frequency": 1, "capital_relation": "at least"}  # fmt: skip
    start = time.process_time()
    for hostile in ("```" + text * (120_000 // len(text)), text * (120_000 // len(text)) + "x"):
        list(FENCE.finditer(hostile))
        for check in CHECKS.values():
            names = inspect.signature(check).parameters.keys() - {"text"}
            if names <= arguments.keys():
                check(hostile, **{name: arguments[name] for name in names})
    assert time.process_time() - start < limit(2)


@each_isolation
def test_deep_folders_are_removed(isolation, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import os\nfor i in range(3000):\n    os.mkdir('d'); os.chdir('d')\nprint(1)"
    with Sandbox(program, replace(SMALL, wall_s=limit(5)), isolation) as sandbox:
        assert [sandbox.run().stdout for _ in range(2)] == ["1\n"] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="other users are not protected under rlimits")
def test_a_program_under_rlimits_reads_no_memory_of_root():
    program = f"print(open('/proc/{os.getpid()}/mem', 'rb'))"
    result = run_program(program, "", SMALL, "rlimits")
    assert result.exit == 1 and "PermissionError" in result.stderr
