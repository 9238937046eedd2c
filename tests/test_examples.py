"""The scripts of examples/ run end to end, with two CPU ranks and a tiny random model instead of GPUs."""

import json
import os
import subprocess

import pytest
from conftest import ROOT

from data import random_model
from tests.patience import limit

REVISION = "0" * 40  # of a model in the cache of the hub


@pytest.mark.slow(process="ranks")
def test_gsm8k_runs_from_raw_questions_to_an_evaluated_model(python_stand_in, tmp_path):
    rows = [
        {"question": f"What is {i} + {i}?", "answer": f"<<{i}+{i}={2 * i}>> #### {2 * i}"} for i in range(80)
    ]
    for name, split in (("train", rows[:72]), ("test", rows[72:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in split))
    sizes = ["--hidden", "64", "--layers", "2", "--experts", "4", "--expert-width", "64", "--vocab", "400"]
    model = tmp_path / "hub" / "models--owner--tiny"  # a name on the hub as in the script's default MODEL
    output = str(model / "snapshots" / REVISION)
    random_model.main(["--output", output, "--text", str(tmp_path / "train.jsonl"), *sizes])
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REVISION)
    environment = os.environ | {
        "RANKS": "1", "MODEL": "owner/tiny", "RUN": f"{tmp_path}/run", "PYTHON": str(python_stand_in),
        "HF_HUB_CACHE": f"{tmp_path}/hub", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
        "TRAIN": f"{tmp_path}/train.jsonl", "TEST": f"{tmp_path}/test.jsonl",
        "EVAL": "--max-new-tokens 8 --samples 2 --dtype float32 --kv-cache-gib 0.05",
    }  # fmt: skip
    settings = [
        "model.dtype=float32", "rollout.dtype=float32", "rollout.kv_cache_gib=0.05",
        "rollout.max_new_tokens=8", "rollout.max_prompt_tokens=96", "rollout.prompts_per_step=8",
        "rollout.group_size=2", "train.num_steps=1", "eval.num_samples=0",
    ]  # fmt: skip
    done = subprocess.run(
        ["bash", "examples/gsm8k_8gpu.sh", *settings],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit(300),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "before: " in done.stdout and "after: " in done.stdout
    for name in ("before.json", "after.json", "after.html", "summary.json", "model/config.json"):
        assert (tmp_path / "run" / name).is_file(), name
