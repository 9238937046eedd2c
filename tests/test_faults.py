"""The campaign of tests/campaign/faults.py: the verdicts of the campaign, and the quick cases."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import NEEDS_BUBBLEWRAP, SMALL, TWO_ENDS

import train_rl
from data.chat import load_tokenizer
from data.stream import load_sets
from experiments.bench.common import TRAINER
from runtime.launch import run
from tests.campaign import faults, hostile_input
from tests.campaign.soak import draw, must_be_flat, prints_the_sum, starts_of, watch
from tests.campaign.started import Started
from tests.campaign.verdicts import Bench, Failed, must_equal, refusal, try_case


def done(code: int, stderr: str) -> subprocess.CompletedProcess:
    return subprocess.CompletedProcess([], code, "", stderr)


def check(function, problem: str) -> None:
    """Expect that a check passes, or that the check fails and names the problem."""
    if problem:
        with pytest.raises(Failed, match=problem):
            function()
    else:
        function()


# ---- verdicts ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "code, stderr, problem",
    [
        (2, "warning\n\nerror on rank 0: x.jsonl: row 3: no answer\n", ""),
        (0, "error on rank 0: x.jsonl: row 3: no answer", "exit code 0"),
        (2, "error on rank 0: no answer", "row 3"),
        (2, "error on rank 0: no answer; the stack is in row 3", "row 3"),
        (2, "error on rank 0: row 3 \x1b[31m", "printable"),
        (2, "error on rank 0: row 3 " + "x" * 3000, "printable"),
        (2, "error on rank 0: row 3 has\nno answer", "printable"),
        (2, "Traceback (most recent call last):\n  File\nerror on rank 0: row 3", "line"),
        (-9, "Killed", "Killed"),
    ],
)
def test_a_refusal_is_one_line_that_names_the_row(code, stderr, problem):
    check(lambda: refusal(done(code, stderr), "row 3"), problem)
    if not problem:
        assert refusal(done(code, stderr), "row 3") == "error on rank 0: x.jsonl: row 3: no answer"


def write_run(folder, rows, weights=b"weights"):
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_bytes(weights)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    "rows, weights, problem",
    [
        ([{"step": 1, "score": 0.5, "seconds_per_step": 9}], b"weights", ""),
        ([{"step": 1, "score": 0.25}], b"weights", "step 1 .*score"),
        ([{"step": 1, "score": 0.5, "loss": 1.0}], b"weights", "step 1 .*loss"),
        ([{"step": 1, "score": 0.5}] * 2, b"weights", r"\[1, 1\]"),
        ([], b"weights", r"\[\]"),
        ([{"step": 1, "score": 0.5}], b"weighty", "weights"),
    ],
)
def test_equal_runs_may_differ_in_times_only(rows, weights, problem, tmp_path):
    reference = write_run(tmp_path / "reference", [{"step": 1, "score": 0.5, "seconds_per_step": 1}])
    run_dir = write_run(tmp_path / "run", rows, weights)
    check(lambda: must_equal(run_dir, reference), problem)


@pytest.mark.parametrize(
    "looks, growth, problem", [(80, 0.0, ""), (80, 0.4, ""), (80, 4.0, "rank 0 MiB"), (19, 0.0, "19 looks")]
)
def test_a_soak_that_grows_or_is_short_fails(looks, growth, problem):
    curve = [{"rank 0 MiB": 1000 + growth * look, "processes": 5 + look % 2} for look in range(looks)]
    check(lambda: must_be_flat(curve), problem)


LEAKY = """
import json, os, subprocess, sys, threading, time
from pathlib import Path
trainer, leaks, folder = sys.argv[1:]
folder = Path(folder)
leaked = []
last_look = step = 0
num_leaks = 24
make = {
    "MiB": lambda: bytearray(b"x" * (3 << 20)),
    "descriptors": lambda: os.open("/dev/null", os.O_RDONLY),
    "threads": lambda: threading.Thread(target=time.sleep, args=(100,), daemon=True).start(),
    "processes": lambda: subprocess.Popen(["sleep", "100"]),
}
(folder / "run" / "metrics.jsonl").write_text('{"step": 0}')
while num_leaks:
    step += 1
    with (folder / "run" / "metrics.jsonl").open("a") as rows:
        rows.write("\\n" + json.dumps({"step": step}))
    looks = (folder / "rows.jsonl").read_text().count("\\n") if (folder / "rows.jsonl").is_file() else 0
    if looks > last_look:
        leaked += [make[name]() for name in leaks.split()]
        last_look = looks
        num_leaks -= 1
    time.sleep(0.005)
os._exit(0)
"""


@pytest.mark.slow(process="others")
@pytest.mark.parametrize("leaks", ["", "MiB descriptors threads processes"])
def test_a_leaking_process_fails_the_soak(leaks, tmp_path):
    """Watch a stand-in for a rank that leaks memory, a descriptor, a thread and a process at each look."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 999}')  # a row of an earlier start of the run
    command = [sys.executable, "-c", LEAKY, str(TRAINER), leaks, str(tmp_path)]
    run = Started(command, tmp_path / "run", RANK="0")
    try:
        watch(run, tmp_path / "rows.jsonl", every_s=0.01)
    finally:
        run.kill()
    assert run.process.returncode == 0, run.log.read_text()
    (rows,) = starts_of(tmp_path / "rows.jsonl")
    steps = [row["step"] for row in rows]
    assert 999 not in steps and steps == sorted(steps) and len(rows) > 20
    assert rows[-1]["rank 0 MiB"] > 5 and rows[-1]["rank 0 descriptors"] > 2
    if leaks:
        with pytest.raises(Failed) as caught:
            must_be_flat(rows)
        for leak in ("rank 0 MiB", "rank 0 descriptors", "rank 0 threads", "processes"):
            assert re.search(rf"(^|; ){leak} grows from \d+ to \d+", str(caught.value)), leak
        draw([rows], tmp_path / "curve.png")
        assert (tmp_path / "curve.png").stat().st_size > 10_000
    else:  # files in /dev/shm may belong to other tests that run at the same time
        must_be_flat([row | {"files in /dev/shm": 0} for row in rows])


@NEEDS_BUBBLEWRAP
def test_the_soak_scores_programs_in_a_sandbox():
    assert (prints_the_sum("0123", "0123"), prints_the_sum("0124", "0123")) == (1.0, 0.0)


def test_finished_cases_are_skipped_and_failed_cases_are_repeated(tmp_path, monkeypatch, capsys):
    attempts = []
    broken = True

    def passes(bench, folder):
        attempts.append("passes")
        return "same", "5 of 5 survived: rank 1 at 2.0 s"

    def may_fail(bench, folder):
        attempts.append("may fail")
        (folder / "trace").touch()
        if broken:
            raise Failed("1 of 3 survived: rank 0")
        return "refused", "a line"

    cases = {"kills/passes": passes, "kills/may fail": may_fail, "data/other": None}
    monkeypatch.setattr(faults, "all_cases", lambda *_: cases)
    monkeypatch.setattr(faults, "undisturbed", lambda out: (tmp_path, 1.0))
    monkeypatch.setattr(faults.signal, "signal", lambda *_: None)
    argv = ["faults", "--out", str(tmp_path / "out"), "--json", str(tmp_path / "f.json"), "--only", "kills/"]
    monkeypatch.setattr(sys, "argv", argv)
    for code, verdict, has_trace in ((1, "failed", True), (0, "refused", False), (0, "refused", False)):
        with pytest.raises(SystemExit) as caught:
            faults.main()
        results = json.loads((tmp_path / "f.json").read_text())
        verdicts = {result["name"]: result["verdict"] for result in results}
        assert (caught.value.code, verdicts) == (code, {"kills/passes": "same", "kills/may fail": verdict})
        assert (tmp_path / "out" / "kills" / "may_fail" / "trace").exists() == has_trace
        broken = False
    assert attempts == ["passes", "may fail", "may fail"]
    output = capsys.readouterr().out
    assert "| kills | 2 | 1 | 0 | 1 |" in output and "| kills | 2 | 1 | 1 | 0 |" in output
    assert "; 6 of 8 kills were survived, bit for bit." in output
    assert "failed: kills/may fail: 1 of 3 survived: rank 0" in output
    monkeypatch.setattr(sys, "argv", [*argv[:-1], "nothing/"])
    with pytest.raises(SystemExit, match="nothing/"):
        faults.main()


# ---- cases that need no ranks ------------------------------------------------------------------------------
def must_pass(cases: dict, bench: Bench | None, folder) -> None:
    """Try all cases, then list every failure."""
    results = [try_case(bench, name, attempt, folder) for name, attempt in cases.items()]
    failed = [f"{result['name']}: {result['detail']}" for result in results if result["verdict"] == "failed"]
    assert not failed, "\n".join(failed)


SETTINGS = {n: attempt for n, attempt in hostile_input.setting_cases().items() if not n.startswith("run, ")}
NAMES = sorted(SETTINGS)


@pytest.mark.parametrize("first", range(8))
def test_settings_out_of_bounds_are_refused_by_name(first, tmp_path):
    assert len(NAMES) > 100
    must_pass({name: SETTINGS[name] for name in NAMES[first::8]}, None, tmp_path)


@pytest.fixture
def reads_only(monkeypatch) -> Bench:
    """Return a bench whose runs only read the prompts."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def launch(num_ranks, script, *arguments, timeout_s, **options):
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            code = run(read_prompts, train_rl.load_config, list(arguments))
        return done(code, stderr.getvalue())

    def read_prompts(config):
        tokenizer = load_tokenizer(TWO_ENDS)
        load_sets(config.data, tokenizer, config.rollout.max_prompt_tokens, config.reward.functions, seed=0)

    return Bench(launch, SMALL, TWO_ENDS)


@pytest.mark.usefixtures("demo_model")
@pytest.mark.slow
def test_unusable_rows_and_files_are_refused_with_file_and_row(reads_only, tmp_path):
    cases = hostile_input.data_cases()
    cases = {name: cases[name] for name in cases if not name.startswith(("model, ", "mended"))}
    assert len(cases) > 30
    must_pass(cases, reads_only, tmp_path)


# ---- cases with ranks --------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_run_with_other_weights_fails_its_case(undisturbed, tmp_path):
    """Flip one byte of the exported weights, so that a case that compares nothing is noticed."""

    def launch(num_ranks, script, *arguments, timeout_s):
        copy = arguments[-1].removeprefix("run.dir=")
        shutil.copytree(undisturbed, copy)
        with open(f"{copy}/model/model-00001-of-00002.safetensors", "r+b") as file:
            file.seek(100_000)
            file.write(b"\1")
        return done(0, "")

    def attempt(bench, folder):
        bench.must_be_same(folder / "run")
        return "same", ""

    result = try_case(Bench(launch, SMALL, undisturbed), "kills/none", attempt, tmp_path)
    assert result["verdict"] == "failed" and "weights" in result["detail"]
