"""The campaign of tests/campaign/faults.py: its verdicts, and the part of its cases that is quick."""

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


# ---- verdicts ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "code, stderr, problem",
    [
        (2, "warning\n\nerror on rank 0: x.jsonl: row 3: no answer\n", ""),
        (0, "error on rank 0: x.jsonl: row 3: no answer", "exit code 0"),
        (2, "error on rank 0: no answer", "does not name 'row 3'"),
        (2, "error on rank 0: no answer; the stack is in row 3", "does not name 'row 3'"),
        (2, "error on rank 0: row 3 \x1b[31m", "not one printable line"),
        (2, "error on rank 0: row 3 " + "x" * 3000, "not one printable line"),
        (2, "error on rank 0: row 3 has\nno answer", "not one printable line"),
        (2, "Traceback (most recent call last):\n  File\nerror on rank 0: row 3", "no line of its own"),
        (-9, "Killed", "no line of its own: Killed"),
    ],
)
def test_a_refusal_is_one_line_that_names_the_thing(code, stderr, problem):
    if problem:
        with pytest.raises(Failed, match=problem):
            refusal(done(code, stderr), "row 3")
    else:
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
        ([{"step": 1, "score": 0.25}], b"weights", "step 1 has another score"),
        ([{"step": 1, "score": 0.5, "loss": 1.0}], b"weights", "step 1 has another loss"),
        ([{"step": 1, "score": 0.5}] * 2, b"weights", r"has the steps \[1, 1\]"),
        ([], b"weights", r"has the steps \[\]"),
        ([{"step": 1, "score": 0.5}], b"weighty", "the exported weights are others"),
    ],
)
def test_runs_are_the_same_but_for_times(rows, weights, problem, tmp_path):
    reference = write_run(tmp_path / "reference", [{"step": 1, "score": 0.5, "seconds_per_step": 1}])
    other = write_run(tmp_path / "other", rows, weights)
    if problem:
        with pytest.raises(Failed, match=problem):
            must_equal(other, reference)
    else:
        must_equal(other, reference)


@pytest.mark.parametrize("growth, problem", [(0.0, ""), (0.4, ""), (4.0, "rank 0 MiB grows from 1")])
def test_a_soak_that_grows_fails(growth, problem):
    curve = [{"rank 0 MiB": 1000 + growth * look, "processes": 5 + look % 2} for look in range(80)]
    if problem:
        with pytest.raises(Failed, match=problem):
            must_be_flat(curve)
    else:
        must_be_flat(curve)


def test_a_soak_of_a_few_looks_fails():
    with pytest.raises(Failed, match="19 looks at the run are too few"):
        must_be_flat([{"processes": 5}] * 19)


LEAKY = """
import json, os, subprocess, sys, threading, time
from pathlib import Path
trainer, leaks, folder = sys.argv[1:]
folder, kept, seen, step = Path(folder), [], 0, 0
make = {
    "MiB": lambda: bytearray(b"x" * (3 << 20)),
    "descriptors": lambda: os.open("/dev/null", os.O_RDONLY),
    "threads": lambda: threading.Thread(target=time.sleep, args=(100,), daemon=True).start(),
    "processes": lambda: subprocess.Popen(["sleep", "100"]),
}
(folder / "run" / "metrics.jsonl").write_text('{"step": 0}')
while seen < 24:
    step += 1
    with (folder / "run" / "metrics.jsonl").open("a") as rows:
        rows.write("\\n" + json.dumps({"step": step}))
    looks = (folder / "rows.jsonl").read_text().count("\\n") if (folder / "rows.jsonl").is_file() else 0
    if looks > seen:
        kept += [make[name]() for name in leaks.split()]
        seen = looks
    time.sleep(0.005)
os._exit(0)
"""


@pytest.mark.slow(process="others")
@pytest.mark.parametrize("leaks", ["", "MiB descriptors threads processes"])
def test_a_process_that_holds_more_at_each_look_fails_the_soak(leaks, tmp_path):
    """A stand-in for a rank, watched as the soak watches a run, leaks one of each between two looks."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 999}')  # a run goes on from before this row
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
    else:
        must_be_flat(rows)


@NEEDS_BUBBLEWRAP
def test_verdicts_of_the_soak_come_from_a_sandbox():
    assert (prints_the_sum("0123", "0123"), prints_the_sum("0124", "0123")) == (1.0, 0.0)


def test_finished_cases_are_skipped_and_failed_ones_are_tried_again(tmp_path, monkeypatch, capsys):
    tried, broken = [], True

    def passes(bench, folder):
        tried.append("passes")
        return "same", "5 of 5 survived: rank 1 at 2.0 s"

    def may_fail(bench, folder):
        tried.append("may fail")
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
    for code, verdict, kept in ((1, "failed", True), (0, "refused", False), (0, "refused", False)):
        with pytest.raises(SystemExit) as caught:
            faults.main()
        found = {
            result["name"]: result["verdict"] for result in json.loads((tmp_path / "f.json").read_text())
        }
        assert (caught.value.code, found) == (code, {"kills/passes": "same", "kills/may fail": verdict})
        assert (tmp_path / "out" / "kills" / "may_fail" / "trace").exists() == kept
        broken = False
    assert tried == ["passes", "may fail", "may fail"]
    output = capsys.readouterr().out
    assert "| kills | 2 | 1 | 0 | 1 |" in output and "| kills | 2 | 1 | 1 | 0 |" in output
    assert "; 6 of 8 kills were survived, bit for bit." in output
    assert "failed: kills/may fail: 1 of 3 survived: rank 0" in output
    monkeypatch.setattr(sys, "argv", [*argv[:-1], "nothing/"])
    with pytest.raises(SystemExit, match="no name of a case holds nothing/"):
        faults.main()


# ---- cases that need no ranks ------------------------------------------------------------------------------
def must_pass(cases: dict, bench: Bench | None, folder) -> None:
    """Try cases; show all that fail at once."""
    results = [try_case(bench, name, attempt, folder) for name, attempt in cases.items()]
    failed = [f"{result['name']}: {result['detail']}" for result in results if result["verdict"] == "failed"]
    assert not failed, "\n".join(failed)


SETTINGS = {n: attempt for n, attempt in hostile_input.setting_cases().items() if not n.startswith("run, ")}
NAMES = sorted(SETTINGS)


@pytest.mark.parametrize("part", range(8))
def test_settings_outside_of_their_bounds_are_refused_by_name(part, tmp_path):
    assert len(NAMES) > 100
    must_pass({name: SETTINGS[name] for name in NAMES[part::8]}, None, tmp_path)


@pytest.fixture
def reads_only(monkeypatch) -> Bench:
    """Return a bench that stops after the prompts are read."""
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
def test_rows_and_files_that_are_no_prompts_are_refused_with_file_and_row(reads_only, tmp_path):
    cases = hostile_input.data_cases()
    cases = {name: cases[name] for name in cases if not name.startswith(("model, ", "mended"))}
    assert len(cases) > 30
    must_pass(cases, reads_only, tmp_path)


# ---- cases with ranks --------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_run_with_other_numbers_fails_its_case(undisturbed, tmp_path):
    """The case would pass whatever a run gives, if it did not look."""

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
    assert (result["verdict"], result["detail"]) == ("failed", "the exported weights are others")
