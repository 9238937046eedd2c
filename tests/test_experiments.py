"""The scripts of experiments/ and data/tiny.py, run as the README says."""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from transformers import Qwen3MoeConfig

import moe_model
from data.tiny import Recipe, answer_without_carry, build_tokenizer, problem, sample_problems
from experiments import gpu_check
from experiments.settings import load_config


def run(*arguments: object, timeout_s: float = 300) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )


def test_bench_step_writes_the_table_it_prints(tmp_path):
    assert run("-m", "data.tiny", timeout_s=600).returncode == 0
    options = ("--repeats", 1, "--steps", 6, "--json", tmp_path / "step.json")
    done = run("experiments/bench_step.py", *options, "rollout.prompts_per_step=8")
    assert done.returncode == 0, done.stderr[-3000:]
    table = json.loads((tmp_path / "step.json").read_text())
    assert list(table) == ["16 new tokens", "256 new tokens"]
    for column, workload in enumerate(table.values()):
        phases = ["rollout", "reward", "logprobs", "update", "sync", "other"]
        assert sum(workload[phase]["median"] for phase in phases) == pytest.approx(workload["step"]["median"])
        for phase in [*phases, "step"]:
            (row,) = re.findall(rf"^\| {phase} \|(.*)\|$", done.stdout, re.M)
            assert f"{workload[phase]['median']:.3f}" in row.split("|")[column]
    long = table["256 new tokens"]
    tokens = long["tokens_per_s"]["median"] * long["step"]["median"]
    assert 0.9 * 64 * 256 < tokens <= 64 * 256 + 1, "nearly all of 8 x 8 completions are cut at 256"


def test_mismatch_writes_the_table_it_prints(tmp_path):
    options = ("--models", "tiny", "--prompts", 6, "--repeats", 2)
    files = ("--json", tmp_path / "mismatch.json", "--plot", tmp_path / "mismatch.png")
    done = run("experiments/mismatch.py", *options, *files)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "mismatch.json").read_text())
    cases = [(row["engine"], row["fp8"], row["trainer"], row["router_replay"]) for row in rows]
    assert len(cases) == len(set(cases)) == 33 and all(row["n"] == 2 for row in rows)
    of = {case: row for case, row in zip(cases, rows)}
    for case, row in of.items():
        assert row["abs_dlogp"]["min"] <= row["abs_dlogp"]["mean"] <= row["abs_dlogp"]["max"]
        assert case[3] != "r3" or row["mismatch_routes"]["max"] == 0
        exact = case[:2] == ("float32", "off") or case[:3] == ("float32", "simulate", "engine's weights")
        assert (row["abs_dlogp"]["mean"] < 1e-5) == exact, case  # else the weights or the products differ
    for row in (row for row in rows if row["router_replay"] == "off"):
        start = f"| tiny | {row['engine']} | {row['fp8']} | {row['trainer']} |"
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(start)]
        assert f"{row['mismatch_k3']['mean']:.1e} ->" in line
    assert (tmp_path / "mismatch.png").stat().st_size > 10_000


def test_bench_sync_writes_the_table_it_prints(tmp_path):
    done = run("experiments/bench_sync.py", "--sizes", "1M", "--repeats", 1, "--json", tmp_path / "sync.json")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "sync.json").read_text())
    size = found["sizes"]["1M"]
    for way, seconds in size["seconds"].items():
        assert f"| {way} | {seconds['median']:.4f} (" in done.stdout
    reports = size["reports"]
    assert reports["one by one"]["num_tensors"] == reports["fused"]["num_tensors"] + 2 * (3 * 8 - 2)
    # layers x experts x three matrices, and all that is not an expert's
    assert {report["num_bytes"] for report in reports.values()} == {4 * size["parameters"]}
    assert set(found["python_per_tensor"]) == {"one by one", "fused", "copied"}


def test_bench_routes_counts_layers_times_top_k_bytes_a_token(tmp_path):
    done = run("experiments/bench_routes.py", "--models", "tiny", "--pairs", 1, "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "r.json").read_text())
    assert [row["bytes_per_token"] for row in rows] == [row["layers_times_top_k"] for row in rows] == [4, 4]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["seconds_with"] / row["seconds_without"])
        assert f"| tiny, {row['workload']} | {row['seconds_without']:.3f} |" in done.stdout


def test_the_problems_are_right_disjoint_and_the_same_every_time():
    recipe = Recipe(train_per_difficulty=300, test_per_difficulty=50)
    train, test = sample_problems(recipe)
    assert (train, test) == sample_problems(recipe)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    assert len({row["prompt"] for row in train}) == len(train)
    assert {row["difficulty"] for row in train} == {row["difficulty"] for row in test} == {1, 2, 3, 4, 5}
    for row in train + test:
        left, right = row["prompt"].removesuffix("=").split("+")
        a, b = int(left.strip()[::-1]), int(right.strip()[::-1])
        assert int(row["answer"][::-1]) == a + b and len(row["answer"]) == row["difficulty"] + 1
        assert len(left) == len(right) == 5


@pytest.mark.parametrize(
    ("a", "b", "wrong"), [(12, 34, "640"), (99, 1, "090"), (85, 17, "290"), (0, 0, "000")]
)
def test_the_habit_of_the_corpus_forgets_carries(a, b, wrong):
    assert answer_without_carry(a, b, 2) == wrong
    has_carry = problem(a, b, 2, 5)["answer"] != wrong
    assert has_carry == (a % 10 + b % 10 > 9 or a // 10 + b // 10 > 9)


def test_the_tokenizer_is_one_token_per_character_and_survives_a_round_trip(tmp_path):
    from transformers import AutoTokenizer

    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(map(chr, range(32, 127))) + "  two  spaces "
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_a_second_build_is_served_from_the_cache_and_a_changed_recipe_is_not(tmp_path):
    command = ["-m", "data.tiny", "--output", tmp_path / "tiny", "--steps", 2]
    assert "made in" in run(*command).stderr
    weights = Path(tmp_path / "tiny" / "model" / "model-00001-of-00001.safetensors")
    first = weights.read_bytes()
    assert "already there" in run(*command).stderr
    assert "made in" in run(*command[:-1], 3).stderr and weights.read_bytes() != first
    assert "made in" in run(*command).stderr and weights.read_bytes() == first, "the build is deterministic"
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"], "nothing is left beside the result"


YAMLS = sorted(path for path in (ROOT / "experiments").rglob("*.yaml") if "logs" not in path.parts)


@pytest.mark.parametrize("path", YAMLS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_yaml_says_how_to_run_it_and_loads(path):
    first_lines = path.read_text().splitlines()[:6]
    assert first_lines[0].startswith("# ")
    assert any(
        "train_rl.py --config" in line or "make " in line for line in first_lines if line.startswith("#")
    )
    is_method = path.parent.name == "methods"  # loaded over an environment, as its first lines say
    environment = ["--config", str(ROOT / "experiments/tiny/grpo.yaml")] if is_method else []
    assert load_config([*environment, "--config", str(path)]).data.train


def test_bench_kernels_writes_what_it_prints(tmp_path):
    sizes = ("--rows", 48, "--vocab", 500, 8000, "--hidden", 64, "--fp8-shape", 130, 300, "--repeats", 2)
    files = ("--json", tmp_path / "kernels.json", "--plot", tmp_path / "kernels.png")
    done = run("experiments/bench_kernels.py", *sizes, *files)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "kernels.json").read_text())
    versions = {row["version"] for row in found["head"]}
    assert {"naive", "chunked"} <= versions and len(found["head"]) == 2 * len(versions)
    for row in found["head"]:
        line = f"| 48 | {row['vocab']} | 64 | {row['version']} |"
        (cells,) = [text.split("|") for text in done.stdout.splitlines() if text.startswith(line)]
        assert f"{statistics.median(row['update_s']):.3g} (" in cells[6] and len(row["update_s"]) == 2
        floor = 6 * 48 * row["vocab"] * 64 / found["ceilings"]["flops"]
        assert row["floor_s"] == pytest.approx(floor)
        if row["errors"]:  # float32 against float64
            assert all(0 < error < 1e-4 for error in row["errors"].values())
    assert [row["operation"] for row in found["fp8"]] == ["weights", "activations"]
    assert all(1e-3 < row["error"] < 2**-4 for row in found["fp8"]), "E4M3 rounds to 3 bits"
    assert (tmp_path / "kernels.png").stat().st_size > 10_000


def test_gpu_check_runs_dry_and_says_what_needs_a_gpu(tmp_path):
    steps = ("bench", "tiles", "profile")
    done = run("experiments/gpu_check.py", "--dry-run", "--steps", *steps, "--out", tmp_path, timeout_s=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) == {"versions", *steps} and report["versions"]["deepspeed"]
    assert sum(report["profile"]["figures"].values()) == pytest.approx(1)
    verdicts = [verdict for step in steps for verdict in report[step]["criteria"].values()]
    assert False not in verdicts and verdicts.count("needs a GPU") >= 4
    text = (tmp_path / "report.md").read_text()
    assert text.count("**needs a GPU**") == verdicts.count("needs a GPU") and text in done.stdout + text


def test_gpu_check_reports_a_step_that_fails_and_goes_on(tmp_path):
    (tmp_path / "random_moe_dry").write_text("a file where the model's folder should be")
    steps = ("throughput", "tiles")
    done = run("experiments/gpu_check.py", "--dry-run", "--steps", *steps, "--out", tmp_path)
    assert done.returncode == 1 and "**FAIL** it ran to its end" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["throughput"]["criteria"] == {"it ran to its end": False}
    assert "random_moe" in report["throughput"]["figures"]["error"]
    assert report["tiles"]["criteria"] == {"tiles compared": "needs a GPU"}


def test_flops_per_token_are_those_that_torch_counts():
    """torch counts forward products, attention without regard to the causal mask: twice ours. Embeddings cost
    nothing; the last token of a sequence predicts nothing, and is left out."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    size, length, count = gpu_check.SIZES["dry"], 24, 3
    config = Qwen3MoeConfig(**size, intermediate_size=64, norm_topk_prob=True, tie_word_embeddings=False)
    policy = moe_model.Policy(config).double()  # float64 goes through plain products
    moe_model.random_weights(policy, seed=0)
    packed = moe_model.pack([[1]] * count, [[2] * length] * count, "cpu")
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        policy(packed)
    heads = size["num_attention_heads"] * size["head_dim"]
    attention = 2 * size["num_hidden_layers"] * heads * length  # what the mask forbids
    counted = counter.get_total_flops() / (count * length)
    assert counted - attention == pytest.approx(gpu_check.flops_per_token(size, length) / 3, rel=1e-12)
