"""Signals, and errors as one line that names the file with the stack."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from runtime import launch
from runtime.launch import Signals, Stopped, forget_errors, report_thread, run
from tests.patience import limit

WAITS = """
import os, resource, sys, time
from runtime import launch
launch.COPY_S = float(sys.argv[1])
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
many = min(1100, most - 50)  # as in a large run; select.select() refuses descriptors above 1023
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(many)]
class Telling(launch.Signals):
    def handle(self, *arguments):
        super().handle(*arguments)
        print("heard", self.received, flush=True)
Telling().listen()
print("ready", flush=True)
time.sleep(3000)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("copy_s", [-1, 3000])
def test_a_first_signal_is_remembered_and_a_second_ends_the_process(copy_s, number):
    """The same signal within COPY_S is torchrun's copy of the first."""
    command = [sys.executable, "-c", WAITS, str(copy_s)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        for _ in range(1 if copy_s < 0 else 3):
            process.send_signal(number)
            assert process.stdout.readline() == f"heard {number.value}\n"
        if copy_s < 0:
            process.send_signal(number)
            assert process.wait(limit(5)) == 128 + number
        process.kill()
        assert number.name in process.stderr.read()


@pytest.mark.parametrize(
    "parents, command, ends",
    [([7, 7], b"", False), ([7, 1], b"init", True), ([1, 1], b"init", True), ([1, 1], b"torchrun", False)],
)
def test_a_rank_whose_torchrun_has_died_ends_at_once(parents, command, ends, tmp_path, monkeypatch):
    """The first process adopts orphans; in some containers torchrun itself is the first process."""
    exits = []
    (tmp_path / "cmdline").write_bytes(command)
    monkeypatch.setattr(launch, "FIRST_PROCESS", tmp_path)
    monkeypatch.setattr(launch.ctypes, "CDLL", lambda name: SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(os, "getppid", lambda: parents.pop(0))
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    launch.die_with_torchrun()
    assert exits == [1] * ends


def test_ctrl_c_during_imports_ends_a_run_without_a_stack():
    trainer = subprocess.Popen(
        [sys.executable, ROOT / "train_rl.py", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while "libtorch" not in Path(f"/proc/{trainer.pid}/maps").read_text() and trainer.poll() is None:
        time.sleep(0.01)
    trainer.send_signal(signal.SIGINT)
    assert trainer.communicate(timeout=limit(20)) == (b"", b"")
    assert trainer.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    "error, code, line",
    [
        (KeyboardInterrupt(), 130, "interrupted"),  # in commands that install no handler, such as evaluate.py
        (Stopped("stopped by SIGTERM after step 3", signal.SIGTERM), 143, "stopped by SIGTERM after step 3"),
    ],
)
def test_a_signal_gives_its_exit_code_and_one_line(error, code, line, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert run(raising(error), list, []) == code
    assert capsys.readouterr().err.strip() == line


def test_a_signal_during_a_long_call_counts_as_arrived_at_its_start(monkeypatch):
    """A copy of the first signal may be read late, because a call in C held the interpreter."""
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    signals = Signals()
    signals.received, signals.received_at = signal.SIGTERM, 100.0
    signals.handle(signal.SIGTERM, arrived_at=100.9)
    assert exits == []
    signals.handle(signal.SIGTERM, arrived_at=101.1)
    assert exits == [128 + signal.SIGTERM]


def test_a_mistyped_command_ends_the_ranks_that_wait_on_other_nodes(monkeypatch, capsys):
    told = []
    monkeypatch.setattr(launch, "tell_others", told.append)
    monkeypatch.setenv("RANK", "1")
    parser = argparse.ArgumentParser()
    for argv in (["--confg"], ["--help"]):
        with pytest.raises(SystemExit):
            run(print, parser.parse_args, argv)
    assert [line.partition(":")[0] for line in told] == ["error on rank 1"]


def raising(error: BaseException):
    """Return a main function that raises this error."""

    def fails(options):
        raise error

    return fails


@pytest.mark.parametrize(
    "error, text",
    [
        (ValueError("train.x: too large"), "train.x: too large"),
        (OSError(13, "Permission denied", "runs/x"), "[Errno 13] Permission denied: 'runs/x'"),
        (KeyError("step"), "KeyError: 'step'"),
        (ValueError("of two\n  lines, '2    +1'"), "of two lines, '2    +1'"),
        (ValueError("red \x1b[31m, half \ud800, back \r, 7 °"), r"red \x1b[31m, half \ud800, back \r, 7 °"),
        (
            RuntimeError(
                "[/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:50890: Connection reset by peer. "
                "This is typically caused by a remote worker hanging. Check the logs."
            ),
            "another rank has ended, or its node is lost (Read error [10.0.0.2]:50890: Connection reset by "
            "peer)",
        ),
    ],
)
def test_an_error_is_one_line_with_the_file_of_its_stack(error, text, tmp_path, monkeypatch, capsys):
    """torchrun's error file gets the same line."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    stack = tmp_path / "error_rank_0.txt"
    stack.write_text("of an earlier start")

    def fails(options):
        assert not stack.exists(), "the file of an earlier start is deleted first"
        raise error

    assert run(fails, lambda argv: argv, [], lambda options: tmp_path) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith(f"error on rank 0: {text}") and "\n" not in line and str(stack) in line
    assert "in fails" in stack.read_text()
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == message["extraInfo"]["py_callstack"] == line


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit("done"), KeyError("format"), GeneratorExit()])
def test_code_that_ends_a_run_from_inside_is_an_error_with_its_place(error, monkeypatch, capsys):
    """For example sys.exit(0) in a function of the user; argparse may end only the reading of a command."""
    monkeypatch.setenv("RANK", "0")
    assert run(raising(error), lambda argv: argv, []) == 2
    line = capsys.readouterr().err
    assert type(error).__name__ in line and "test_launch.py, line" in line


@pytest.mark.parametrize("in_thread", [False, True])
def test_an_exit_that_looks_like_the_end_of_a_run_is_an_error(in_thread):
    call = (
        "threading.Thread(target=os._exit, args=(0,)).start(); time.sleep(60)" if in_thread else "os._exit(0)"
    )
    code = (
        "import os, threading, time\nfrom runtime import launch\n"
        "def main(options):\n    if not (child := os.fork()): os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0, 'a fork may end'\n"
        f"    {call}\nlaunch.leave(launch.run(main, list, []))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "os._exit(0)" in done.stderr, done


@pytest.mark.parametrize("error, text", [(OSError(28, "No space"), ""), (OSError(13, "Denied"), "Denied")])
def test_a_thread_leaves_a_full_disk_to_the_main_thread(error, text, monkeypatch, capsys):
    monkeypatch.setattr(threading, "excepthook", report_thread)
    thread = threading.Thread(target=raising(error), args=(None,))
    thread.start()
    thread.join()
    printed = capsys.readouterr().err
    assert text in printed and bool(text) == bool(printed)


def test_error_files_of_an_earlier_start_are_deleted(tmp_path, monkeypatch):
    """Rank 0 deletes the file of rank 0 and the files of ranks that no longer exist."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("0", "1", "2", "10", "x"):
        (tmp_path / f"error_rank_{name}.txt").touch()
    forget_errors(tmp_path, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["error_rank_1.txt", "error_rank_x.txt"]


def test_a_full_disk_names_the_folder_in_which_to_free_space(tmp_path, monkeypatch, capsys):
    """The error of a write to an open file has no file name."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    error = OSError(28, "No space left on device")
    assert run(raising(error), lambda argv: argv, [], lambda options: tmp_path) == 2
    assert f"free space in {tmp_path}" in capsys.readouterr().err
