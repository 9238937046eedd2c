"""Scheduling and overlapped phases in whole runs: they change when things happen, not what comes out."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, SMALL, torchrun, train
from test_run import assert_same_weights, rows_of, steps_of

from experiments.workload import Recipe, Workload

pytestmark = pytest.mark.usefixtures("demo_model")
ALL_OFF = [
    "rollout.schedule=arrival", "reward.overlap=false", "reward.decode=engine", "eval.overlap=false",
    "checkpoint.overlap=false",
]  # fmt: skip
AHEAD = ["rollout.overprovision=0.5", "algorithm.rollout_correction=token_tis", "train.num_steps=4"]


def in_order(rows: list[dict]) -> list[dict]:
    """An evaluation that rides along is logged after the step that follows it, else before."""
    return sorted(rows, key=lambda row: (row["step"], "reward" in row))


def without_expectations(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("length_")} for row in in_order(rows)]


def test_no_scheduling_and_no_overlap_give_the_same_run_bit_for_bit(undisturbed, tmp_path):
    done = train(*SMALL, *ALL_OFF, f"run.dir={tmp_path}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert without_expectations(rows_of(tmp_path)) == without_expectations(rows_of(undisturbed))
    assert_same_weights(tmp_path / "model", undisturbed / "model")


def test_the_oracle_looks_ahead_and_changes_nothing(undisturbed, tmp_path):
    done = train(*SMALL, "rollout.schedule=oracle", "train.num_steps=3", f"run.dir={tmp_path}")
    assert done.returncode == 0, done.stderr[-3000:]
    steps = steps_of(tmp_path)
    assert without_expectations(steps) == without_expectations(steps_of(undisturbed)[:3])
    assert all(row["length_error"] == 0 and row["length_known_frac"] == 1 for row in steps)


@pytest.fixture(scope="module")
def ahead(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("run") / "ahead"
    done = train(*SMALL, *AHEAD, f"run.dir={run_dir}")
    assert done.returncode == 0, done.stderr[-3000:]
    return run_dir


def test_what_was_cut_goes_on_in_the_next_step(ahead):
    first, *later = steps_of(ahead)
    assert first["stale_frac"] == 0
    assert all(0 < row["stale_frac"] < 1 and 1 <= row["policy_lag_max"] <= 3 for row in later)
    for row in (first, *later):  # a full batch at each step, of groups that are complete
        assert row["account/prompts_sampled"] == 8 and row["ratio"] == 1.0
        assert row["tokens_total"] == pytest.approx(row["completion_tokens"] * 32)
        assert row["invalid_routes_frac"] == 0, "a continued completion has the routes of all its tokens"
    assert all(row["mismatch_k3"] < 1e-9 for row in (first, *later)), "of the tokens of the policy itself"


def test_groups_that_were_begun_survive_a_resume(ahead, tmp_path):
    resumed = shutil.copytree(ahead, tmp_path / "resumed")
    shutil.rmtree(resumed / "checkpoints" / "step_000004")
    again = train(*SMALL, *AHEAD, f"run.dir={resumed}")
    assert again.returncode == 0 and "resumed from" in again.stdout + again.stderr, again.stderr[-3000:]
    assert rows_of(resumed) == rows_of(ahead)
    assert_same_weights(resumed / "model", ahead / "model")


def test_an_engine_that_fails_while_a_checkpoint_is_written_leaves_it_whole(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(
        "import runpy, sys, threading, time, moe_model\n"
        "from rollout import RolloutEngine\n"
        "save, step = moe_model.save_hf, RolloutEngine.step\n"
        "def slow(*given):\n"
        "    time.sleep(2)\n"
        "    save(*given)\n"
        "def die():\n"
        "    raise AssertionError('engine core died')\n"
        "def fail_while_saving(self):\n"
        "    if any(t.name.startswith('checkpoint') for t in threading.enumerate()):\n"
        "        self.engine.step = die\n"
        "    return step(self)\n"
        "moe_model.save_hf, RolloutEngine.step = slow, fail_while_saving\n"
        "sys.argv = ['train_rl.py', *sys.argv[1:]]\n"
        "runpy.run_path('train_rl.py', run_name='__main__')\n"
    )
    command = [*SMALL, "eval.every=0", "train.num_steps=3", f"run.dir={tmp_path / 'run'}"]
    done = torchrun(2, script, *command)
    assert done.returncode != 0
    assert "the engine failed while sampling: AssertionError: engine core died" in done.stderr
    assert steps_of(tmp_path / "run")[-1]["step"] == 2
    again = train(*command)
    assert again.returncode == 0 and "resumed from" in again.stdout + again.stderr, again.stderr[-3000:]
    assert [row["step"] for row in steps_of(tmp_path / "run")] == [1, 2, 3]


def test_bench_rollout_writes_what_it_prints_and_the_simulator_reads_it(tmp_path):
    recipe = Recipe(num_steps=2, num_prompts=4, group_size=2, median_tokens=12, longest_tokens=40,
                    slow_share=0.5, slow_seconds=(0.05, 0.1), seed=3)  # fmt: skip
    Workload.make(recipe).save(tmp_path / "work.json")
    files = ["--json", tmp_path / "rollout.json", "--plot", tmp_path / "rollout.png"]
    options = ["--workload", tmp_path / "work.json", "--repeats", 1, "--slots", 2, "--workers", 2, *files]
    run = lambda *command: subprocess.run(  # noqa: E731
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    done = run("experiments/bench_rollout.py", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all rows gave the same completions and rewards" in done.stdout
    table = json.loads((tmp_path / "rollout.json").read_text())
    rows = table["rows"]
    assert rows[0]["speedup"] == 1 and len(rows) == 6 and (tmp_path / "rollout.png").stat().st_size > 10_000
    for row in rows:
        assert {"name", "seconds", "speedup", "bubble", "bound"} <= row.keys()
        assert row["seconds"] > row["bound"] > 0 and 0 < row["bubble"] < 1
        assert row["seconds"] == pytest.approx(sum(row["seconds_by_step"]))
        assert f"| {row['name']} | {row['seconds']:.2f} (" in done.stdout
    assert rows[2]["seconds"] < rows[1]["seconds"], "8 slow rewards of 75 ms behind 4 workers"
    fitted = run(
        "experiments/simulate.py", "--fit", tmp_path / "rollout.json", "--json", tmp_path / "fit.json"
    )
    assert fitted.returncode == 0, fitted.stderr[-3000:]
    found = json.loads((tmp_path / "fit.json").read_text())
    assert [row["name"] for row in found] == [row["name"] for row in rows]
    assert re.search(r"largest error: [+-]\d", fitted.stdout)


def test_the_recorded_workload_is_what_its_recipe_makes():
    saved = Workload.load(ROOT / "experiments" / "rollouts" / "workload.json")
    made = Workload.make(saved.recipe)
    assert saved.recipe == Recipe()
    assert np.array_equal(saved.lengths, made.lengths)
    assert np.array_equal(saved.reward_seconds, made.reward_seconds)
    assert np.percentile(saved.lengths, 99) > 5 * np.median(saved.lengths), "heavy-tailed"
