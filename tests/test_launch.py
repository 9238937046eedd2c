"""Signals, and errors as one line that names the file with the stack."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT

from runtime.launch import Stopped, forget_errors, report_thread, run

WAITS = """
import sys, time
from runtime.launch import Signals
signals = Signals()
signals.listen()
print("ready", flush=True)
while not signals.received:
    time.sleep(0.01)
print("heard", signals.received, flush=True)
time.sleep(30)
"""


@pytest.fixture
def waiting():
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_is_noted_and_a_second_ends_at_once(waiting, number):
    """The same signal again within a second is torchrun's copy of it."""
    waiting.send_signal(number)
    assert waiting.stdout.readline() == f"heard {number.value}\n"
    waiting.send_signal(number)
    time.sleep(1.1)
    assert waiting.poll() is None
    waiting.send_signal(number)
    assert waiting.wait(5) == 128 + number
    assert f"{number.name}: " in waiting.stderr.read()


def test_ctrl_c_before_a_run_listens_ends_it_without_a_stack():
    """It comes while torch is being imported."""
    trainer = subprocess.Popen(
        [sys.executable, ROOT / "train_rl.py", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while "libtorch" not in Path(f"/proc/{trainer.pid}/maps").read_text():
        time.sleep(0.01)
    trainer.send_signal(signal.SIGINT)
    assert trainer.communicate(timeout=20) == (b"", b"")
    assert trainer.returncode == -signal.SIGINT


def test_ctrl_c_is_one_line(capsys):
    """In commands that do not listen for signals, as evaluate.py."""

    def interrupted(options):
        raise KeyboardInterrupt

    assert run(interrupted, read=list, argv=[]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "\ninterrupted\n\n"


@pytest.mark.parametrize(
    "error, shown",
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
            "peer). See the message of that rank for the cause. Checkpoints are intact: the same command "
            "resumes from the newest",
        ),
    ],
)
def test_an_error_is_one_line_with_the_file_of_its_stack_also_for_torchrun(
    error, shown, tmp_path, monkeypatch, capsys
):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    stack = tmp_path / "error_rank_0.txt"
    stack.write_text("of an earlier start")

    def fails(options):
        assert not stack.exists(), "it would stand beside the summary of a good run"
        raise error

    assert run(fails, lambda argv: argv, [], lambda options: tmp_path) == 2
    line = f"error on rank 0: {shown}; the stack is in {stack}"
    assert capsys.readouterr().err.strip() == line
    assert "in fails" in stack.read_text()
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == message["extraInfo"]["py_callstack"] == line


def test_a_run_that_a_signal_stopped_ends_with_the_signals_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")

    def stops(options):
        raise Stopped("stopped by SIGTERM after step 3", signal.SIGTERM)

    assert run(stops, lambda argv: argv, []) == 143
    assert capsys.readouterr().err.strip() == "stopped by SIGTERM after step 3"


@pytest.mark.parametrize("error, shown", [(OSError(28, "No space"), ""), (OSError(13, "Denied"), "Denied")])
def test_a_thread_leaves_a_full_disk_to_the_main_one(error, shown, monkeypatch, capsys):
    monkeypatch.setattr(threading, "excepthook", report_thread)

    def fails():
        raise error

    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    assert (shown in capsys.readouterr().err) if shown else capsys.readouterr().err == ""


def test_errors_of_an_earlier_start_go_and_those_of_this_one_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("0", "1", "2", "10", "x"):
        (tmp_path / f"error_rank_{name}.txt").touch()
    forget_errors(tmp_path, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["error_rank_1.txt", "error_rank_x.txt"]


def test_a_full_disk_says_where_to_free_space(tmp_path, monkeypatch, capsys):
    def fails(options):
        raise OSError(28, "No space left on device")  # of a file that is open already: it has no name

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert run(fails, lambda argv: argv, [], lambda options: tmp_path) == 2
    wanted = (
        f"No space left on device; free space in {tmp_path}, then start the same command again; the stack"
    )
    assert wanted in capsys.readouterr().err
