"""The whole of train_rl.py as a user starts it: two ranks, EP = 2, real DeepSpeed, real vLLM, real
checkpoints."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, torchrun
from safetensors.torch import load_file

TINY = ROOT / "data" / "built" / "tiny"
SMALL = [  # six quick steps with two checkpoints on the way
    "--config", "experiments/tiny/grpo.yaml", "train.num_steps=6", "rollout.prompts_per_step=8",
    "rollout.group_size=4", "checkpoint.every=2", "eval.every=0", "eval.num_samples=2", "run.log_every=1",
    "data.eval=[{path: data/built/tiny/test.jsonl, name: additions, limit: 20}]",
]  # fmt: skip
TIMES = ("seconds", "completion_seconds", "peak_rss")  # what may differ between two runs of the same numbers


@pytest.fixture(scope="session", autouse=True)
def tiny_model():
    """The embedded default, made once as the demo makes it."""
    subprocess.run([sys.executable, "-m", "data.tiny"], cwd=ROOT, check=True, timeout=600)


def train(*settings, ranks=2, **options) -> subprocess.CompletedProcess:
    return torchrun(ranks, "train_rl.py", *settings, **options)


def numbers(run_dir: Path) -> tuple[dict, list[dict], dict]:
    """Summary, metrics and final weights without anything that measures time or memory."""
    summary = json.loads((run_dir / "summary.json").read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    drop = lambda values: {k: v for k, v in values.items() if not k.startswith(TIMES)}  # noqa: E731
    weights = {}
    for shard in sorted((run_dir / "model").glob("*.safetensors")):
        weights |= load_file(shard)
    return drop(summary), [drop(row) for row in rows], weights


def assert_same_run(one: Path, other: Path) -> None:
    (summary_1, rows_1, weights_1), (summary_2, rows_2, weights_2) = numbers(one), numbers(other)
    assert summary_1 == summary_2
    assert rows_1 == rows_2
    assert weights_1.keys() == weights_2.keys() and all(
        torch.equal(weights_1[n], weights_2[n]) for n in weights_1
    )


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("run") / "undisturbed"
    done = train(*SMALL, f"run.dir={run_dir}")
    assert done.returncode == 0, done.stderr[-3000:]
    return run_dir


def test_a_run_leaves_what_the_readme_promises(undisturbed):
    summary = json.loads((undisturbed / "summary.json").read_text())
    promised = {
        "accuracy_before", "accuracy_after", "pass_at_8_before", "pass_at_8_after", "generated_tokens",
        "gradient_token_share", "seconds_by_phase", "mean_abs_dlogp", "peak_rss_bytes", "num_steps",
    }  # fmt: skip
    assert promised <= summary.keys() and summary["num_steps"] == 6
    assert 0 < summary["mean_abs_dlogp"] < 1e-4  # float32 engine and policy: rounding only
    rows = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert summary["generated_tokens"] == sum(row["tokens_total"] for row in steps)
    account = summary["account"]
    assert account["prompts_offered"] == account["prompts_sampled"] == 6 * 8
    assert account["prompts_dropped"] == account["prompts_stopped"] == account["prompts_refilled"] == 0
    without_gradient = summary["generated_tokens"] * (1 - summary["gradient_token_share"])
    assert account["wasted_kept_tokens"] == pytest.approx(without_gradient)
    assert all(row["ratio"] == 1.0 and row["clipped"] == 0.0 for row in steps), (
        "one update per rollout is on-policy"
    )
    for name in ("curves.png", "config.yaml", "versions.json", "samples.jsonl"):
        assert (undisturbed / name).stat().st_size > 0
    assert sorted(p.name for p in (undisturbed / "checkpoints").iterdir()) == ["step_000004", "step_000006"]


def test_tensorboard_holds_the_metrics(undisturbed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(undisturbed / "tensorboard"))
    events.Reload()
    rows = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    expected = {row["step"]: row["reward"] for row in rows if "reward" in row}
    assert {e.step: pytest.approx(e.value, abs=1e-6) for e in events.Scalars("reward")} == expected


def test_the_exported_model_loads_in_transformers_and_generates(undisturbed):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(undisturbed / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(undisturbed / "model")
    ids = tokenizer("1    +1    =", return_tensors="pt")["input_ids"]
    text = tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :])
    assert text == "20<eos>"  # one digit without a carry: known from the start


@pytest.mark.parametrize("kill_after", [1, 3])
def test_a_killed_run_ends_with_the_numbers_of_an_undisturbed_one(kill_after, undisturbed, tmp_path):
    run_dir = tmp_path / "killed"
    command = [*SMALL, f"run.dir={run_dir}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "train_rl.py", *command],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.is_file() or f'"step": {kill_after},' not in metrics.read_text():
        assert process.poll() is None and time.monotonic() < deadline, (
            "the run ended before it could be killed"
        )
        time.sleep(0.002)
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(ranks) == 2
    os.kill(process.pid, signal.SIGKILL)  # torchrun alone: its ranks must not outlive it
    process.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < deadline, "a rank outlived torchrun"
        time.sleep(0.01)
    assert not (run_dir / "summary.json").exists()
    again = train(*command)
    assert again.returncode == 0, again.stderr[-3000:]
    if kill_after > 2:
        assert "resumed from" in again.stdout + again.stderr
    assert_same_run(undisturbed, run_dir)


def test_the_summary_of_a_shorter_run_does_not_stand_for_a_longer_one(undisturbed, tmp_path):
    import shutil

    run_dir = tmp_path / "copy"
    shutil.copytree(undisturbed, run_dir)
    (run_dir / "summary.json").write_text(json.dumps({"num_steps": 3}))
    shutil.rmtree(run_dir / "checkpoints" / "step_000006")  # go on from step 4, as if killed after it
    assert train(*SMALL, f"run.dir={run_dir}").returncode == 0
    assert_same_run(undisturbed, run_dir)


def test_a_finished_run_is_not_started_again(undisturbed):
    before = numbers(undisturbed)[1]
    again = train(*SMALL, f"run.dir={undisturbed}")
    assert again.returncode == 0 and "this run is finished" in again.stdout + again.stderr
    assert numbers(undisturbed)[1] == before


def test_more_steps_go_on_from_a_finished_run_as_if_never_stopped(undisturbed, tmp_path):
    short = tmp_path / "short"
    assert train(*SMALL, "train.num_steps=4", f"run.dir={short}").returncode == 0
    assert train(*SMALL, f"run.dir={short}").returncode == 0
    # the shorter run evaluated after step 4 too; all else is the same
    (_, rows, weights), (_, rows_undisturbed, weights_undisturbed) = numbers(short), numbers(undisturbed)
    training = lambda rows: [{k: v for k, v in r.items() if not k.startswith("eval/")} for r in rows]  # noqa: E731
    assert training(rows) == training(rows_undisturbed)
    assert all(torch.equal(weights[n], weights_undisturbed[n]) for n in weights)


def test_reference_minibatches_recomputation_and_zero_2_run_together(tmp_path):
    done = train(
        *SMALL, f"run.dir={tmp_path}", "train.num_steps=2", "algorithm.kl_coef=0.01", "train.zero_stage=2",
        "train.minibatches_per_step=2", "train.micro_batch_tokens=100", "model.activation_checkpointing=true",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first, second = (row for row in rows if "reward" in row)
    assert first["ratio"] != 1.0, "the second update of a rollout is off-policy"
    assert 0 < first["ref_kl_k3"] < second["ref_kl_k3"], "the policy moves away from the reference"


def test_bfloat16_fp8_and_replayed_routes_resume_exactly(tmp_path):
    bfloat16 = [
        "model.dtype=bfloat16", "rollout.dtype=bfloat16", "rollout.fp8=simulate", "rollout.check_every=3",
        "algorithm.router_replay=r3", "train.minibatches_per_step=2", "train.num_steps=4",
    ]  # fmt: skip
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert train(*SMALL, *bfloat16, f"run.dir={straight}").returncode == 0
    assert train(*SMALL, *bfloat16, "train.num_steps=2", f"run.dir={stopped}").returncode == 0
    again = train(*SMALL, *bfloat16, f"run.dir={stopped}")
    assert again.returncode == 0, again.stderr[-3000:]
    (_, rows, weights), (summary, rows_straight, weights_straight) = numbers(stopped), numbers(straight)
    assert [row for row in rows if row["step"] > 2] == [row for row in rows_straight if row["step"] > 2]
    assert all(torch.equal(weights[n], weights_straight[n]) for n in weights)
    assert 1e-3 < summary["mean_abs_dlogp"] < 0.1
    steps = [row for row in rows if "reward" in row]
    assert len(steps) == 4 and all(row["mismatch_routes"] == row["invalid_routes_frac"] == 0 for row in steps)


def test_a_gate_that_is_passed_too_often_stops_the_run_with_a_checkpoint(tmp_path):
    """FP8 rollouts of the tiny model: k3 KL is above 1e-4 at every step."""
    far = ["rollout.dtype=bfloat16", "rollout.fp8=simulate", "checkpoint.every=0"]
    gate = ["algorithm.mismatch_gate=1e-4", "algorithm.mismatch_patience=2"]
    done = train(*SMALL, *far, *gate, f"run.dir={tmp_path}")
    assert done.returncode != 0
    assert "warning: step 1: k3 KL of trainer and engine" in done.stdout + done.stderr
    assert "(2 steps in a row)" in done.stderr and "algorithm.router_replay=r3" in done.stderr
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]


def test_a_dense_model_runs_too(tmp_path):
    """Random weights earn nothing, so weight decay moves them and the sync has something to carry."""
    from transformers import Qwen3Config

    from data.tiny import build_tokenizer
    from moe_model import Policy, random_weights, save_hf

    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.2,
    )  # fmt: skip
    policy = Policy(config)
    random_weights(policy, seed=0)
    save_hf(policy, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    done = train(
        *SMALL, f"model.path={tmp_path / 'model'}", "model.ep_size=1", f"run.dir={tmp_path / 'run'}",
        "train.num_steps=3", "train.weight_decay=0.5", "train.learning_rate=0.1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    summary, _, weights = numbers(tmp_path / "run")
    assert summary["mean_abs_dlogp"] < 1e-4
    assert not torch.equal(weights["lm_head.weight"], policy.lm_head.weight)


def test_another_topology_is_refused_or_continues_from_weights_if_asked(undisturbed, tmp_path):
    import shutil

    run_dir = tmp_path / "copy"
    shutil.copytree(undisturbed, run_dir)
    more = [*SMALL, f"run.dir={run_dir}", "train.num_steps=7"]
    refused = train(*more, "model.ep_size=1")
    assert refused.returncode != 0
    assert (
        "another topology (ep_size 2 -> 1)" in refused.stderr
        and "checkpoint.resume=weights" in refused.stderr
    )
    alone = train(*more, "model.ep_size=1", ranks=1)
    assert alone.returncode != 0 and "world_size 2 -> 1" in alone.stderr
    changed = train(*more, "train.learning_rate=1e-5")
    assert changed.returncode != 0 and "train.learning_rate 0.0002 -> 1e-05" in changed.stderr
    weights_only = train(*more, "model.ep_size=1", "checkpoint.resume=weights", ranks=1)
    assert weights_only.returncode == 0, weights_only.stderr[-3000:]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 7 and rows[-1]["abs_dlogp"] < 1e-4


def test_a_full_disk_while_saving_leaves_the_earlier_checkpoint(tmp_path):
    """A file-size limit below the checkpoint's stands in for a full disk: writes fail in the same place."""
    run_dir = tmp_path / "full"
    limited = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)); "
        "sys.argv = ['train_rl.py', *sys.argv[1:]]; runpy.run_path('train_rl.py', run_name='__main__')"
    )
    script = tmp_path / "limited.py"
    script.write_text(limited)
    assert train(*SMALL, "train.num_steps=2", f"run.dir={run_dir}").returncode == 0
    done = torchrun(2, script, *SMALL, "train.num_steps=4", f"run.dir={run_dir}")
    assert done.returncode != 0
    assert "could not be written" in done.stderr and "earlier checkpoints are intact" in done.stderr
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step_000002"]


BAD_INPUT = {
    "unknown setting": (["train.learning_rat=1"], "did you mean train.learning_rate"),
    "wrong type": (["train.num_steps=many"], "train.num_steps"),
    "missing data": (["data.train=[{path: nowhere.jsonl}]"], "nowhere.jsonl"),
    "no such set": (["data.train=[{path: data/trian}]"], "data/trian: neither a file here nor a hub set"),
    "unknown verifier": (["data.train=[{path: ODD_KIND}]"], "kind 'exakt' of '1+1='"),
    "two sets of one name": (
        ["data.eval=[{path: data/built/tiny/test.jsonl}, {path: data/built/tiny/test.jsonl}]"],
        "data.eval[].name: test, test are not all different",
    ),
    "no model": (["model.path=nowhere"], "model.path: nowhere holds no config.json"),
    "ep_size": (["model.ep_size=3"], "model.ep_size 3 must divide the number of experts (8)"),
    "long prompts": (["rollout.max_prompt_tokens=4"], "rollout.max_prompt_tokens is 4"),
    "context": (["rollout.max_new_tokens=1000"], "the model's context is 512"),
    "zero prompts left": (
        ["data.train=[{path: data/built/tiny/train.jsonl, difficulty: [8, 9]}]"],
        "no prompt has difficulty 8 to 9; available: 1 to 5",
    ),
    "overlap": (["data.eval=[{path: data/built/tiny/train.jsonl}]"], "also training prompts"),
    "run folder": (["run.dir=/proc/nowhere"], "run.dir: cannot write to /proc/nowhere"),
    "sleep": (["rollout.sleep_level=1"], "rollout.sleep_level needs a GPU"),
    "minibatches": (["train.minibatches_per_step=5"], "must divide rollout.prompts_per_step 32"),
    "fp8": (["rollout.fp8=on", "rollout.dtype=bfloat16"], "rollout.fp8 on needs a GPU of compute capability"),
    "fp8 keys": (["rollout.kv_cache_fp8=true"], "rollout.kv_cache_fp8 needs a GPU of compute capability"),
    "shared engine": (["rollout.tensor_parallel=2"], "rollout.tensor_parallel 2 must divide the number of"),
    "whole experts": (["rollout.expert_parallel=true"], "expert_parallel True needs rollout.tensor_parallel"),
    "replay without routes": (
        ["algorithm.router_replay=r3", "rollout.capture_routes=false"],
        "algorithm.router_replay 'r3' needs rollout.capture_routes, which is False",
    ),
}


@pytest.fixture(scope="session")
def bad_input_outcomes(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """(exit code, standard error) of every case, one after another in one process to save its start."""
    folder = tmp_path_factory.mktemp("bad")
    script = folder / "cases.py"
    script.write_text(
        "import contextlib, io, json, os, sys, train_rl\n"
        "outcomes = {}\n"
        "for name, argv in json.loads(sys.argv[1]).items():\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as error:\n"
        "        code = train_rl.run(argv)\n"
        "    outcomes[name] = (code, error.getvalue())\n"
        "print('OUTCOMES' + json.dumps(outcomes), flush=True)\n"
        "os._exit(0)\n"
    )
    common = ["--config", "experiments/tiny/grpo.yaml", "model.ep_size=1", f"run.dir={folder / 'run'}"]
    odd_kind = folder / "odd.jsonl"
    odd_kind.write_text(json.dumps({"prompt": "1+1=", "answer": "2", "kind": "exakt"}))
    cases = {
        name: [*common, *(setting.replace("ODD_KIND", str(odd_kind)) for setting in settings)]
        for name, (settings, _) in BAD_INPUT.items()
    }
    done = subprocess.run(
        [sys.executable, script, json.dumps(cases)], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "OUTCOMES" in done.stdout, done.stderr[-3000:]
    assert not (folder / "run" / "checkpoints").exists()
    return json.loads(done.stdout.partition("OUTCOMES")[2])


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_message(case, bad_input_outcomes):
    code, error = bad_input_outcomes[case]
    assert code != 0
    lines = [line for line in error.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error on rank 0: "), error
    assert BAD_INPUT[case][1] in lines[0]


def test_the_message_comes_first_under_torchrun_too(tmp_path):
    done = train(
        "--config", "experiments/tiny/grpo.yaml", "rollout.prompts_per_step=7", f"run.dir={tmp_path}"
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert lines[0].startswith("error on rank 0: rollout.prompts_per_step 7 must be a multiple of ranks x")
    assert "Traceback" in (tmp_path / "error_rank_0.txt").read_text()


def test_a_second_run_into_the_same_folder_is_refused(undisturbed):
    import fcntl

    with (undisturbed / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = train(*SMALL, "train.num_steps=8", f"run.dir={undisturbed}", timeout_s=120)
    assert done.returncode != 0 and "another run is writing to" in done.stderr


def test_a_broken_model_folder_names_the_tensor(tmp_path):
    """The missing expert is one that rank 0 does not hold: all ranks check all names."""
    import shutil

    from safetensors.torch import save_file

    folder = tmp_path / "model"
    shutil.copytree(TINY / "model", folder)
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    name = "model.layers.1.mlp.experts.7.down_proj.weight"
    del tensors[name]
    save_file(tensors, shard)
    done = train(*SMALL, f"model.path={folder}", f"run.dir={tmp_path / 'run'}")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode != 0 and lines[0].startswith("error on rank"), lines[:3]
    assert f"lacks 1 of {len(tensors) + 1} tensors: {name}" in lines[0]


@pytest.mark.parametrize(
    ("dtype", "part", "factor"),
    [("float32", "layers.1.mlp.gate", 1.1), ("bfloat16", "layers.1.mlp.experts", -1)],
)
def test_a_tampered_engine_is_caught_by_the_parity_check(dtype, part, factor, tmp_path):
    """An engine that answers from other weights than the policy's, here because the sync is tampered with."""
    script = tmp_path / "tampered.py"
    script.write_text(
        "import runpy, sys, moe_model\n"
        "original = moe_model.hf_tensors\n"
        "def tampered(*given):\n"
        f"    return ((n, t * {factor} if {part!r} in n else t) for n, t in original(*given))\n"
        "moe_model.hf_tensors = tampered\n"
        "sys.argv = ['train_rl.py', *sys.argv[1:]]\n"
        "runpy.run_path('train_rl.py', run_name='__main__')\n"
    )
    done = torchrun(2, script, *SMALL, f"rollout.dtype={dtype}", f"run.dir={tmp_path / 'run'}")
    assert done.returncode != 0 and "trainer and engine disagree" in done.stderr


def test_the_demo_learns(tmp_path):
    """A quarter of the demo: held-out accuracy rises clearly above the warm start."""
    done = train(
        "--config", "experiments/tiny/demo.yaml", "train.num_steps=50", f"run.dir={tmp_path}", timeout_s=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0.15 < summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.25
    assert summary["pass_at_8_before"] > summary["avg_at_8_before"] + 0.2, "the start knows more than it says"
    assert summary["mean_abs_dlogp"] < 1e-4
    assert summary["peak_rss_bytes"] < 8 * 2**30
