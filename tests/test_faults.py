"""The campaign of tests/campaign/faults.py: the verdicts of the campaign, and the quick cases."""

import contextlib
import io
import json
import re
import shutil
import subprocess

import pytest
from conftest import NEEDS_BUBBLEWRAP, SMALL, TWO_ENDS

import train_rl
from data.chat import load_tokenizer
from data.stream import load_sets
from runtime.launch import run
from tests.campaign import hostile_input
from tests.campaign.soak import must_be_flat, prints_the_sum
from tests.campaign.verdicts import Bench, Failed, must_equal, refusal, try_case


def done(code: int, stderr: str) -> subprocess.CompletedProcess:
    return subprocess.CompletedProcess([], code, "", stderr)


def problem_of(function) -> str:
    """Return the problem that a check names; "" if the check passes."""
    try:
        function()
    except Failed as failed:
        return str(failed)
    return ""


def is_named(problem: str, text: str) -> bool:
    """Say whether a text names a problem, or is empty if there is none."""
    return re.search(problem, text) is not None if problem else text == ""


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
    assert is_named(problem, problem_of(lambda: refusal(done(code, stderr), "row 3")))
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
    assert is_named(problem, problem_of(lambda: must_equal(run_dir, reference)))


@pytest.mark.parametrize(
    "looks, growth, problem", [(80, 0.0, ""), (80, 0.4, ""), (80, 4.0, "rank 0 MiB"), (19, 0.0, "19 looks")]
)
def test_a_soak_that_grows_or_is_short_fails(looks, growth, problem):
    curve = [{"rank 0 MiB": 1000 + growth * look, "processes": 5 + look % 2} for look in range(looks)]
    assert is_named(problem, problem_of(lambda: must_be_flat(curve)))


@NEEDS_BUBBLEWRAP
def test_the_soak_scores_programs_in_a_sandbox():
    assert (prints_the_sum("0123", "0123"), prints_the_sum("0124", "0123")) == (1.0, 0.0)


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
        load_sets(config.data, tokenizer, config.rollout.max_prompt_tokens, config.reward.functions)

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
