"""Run the whole of train_rl.py as a user does: two ranks, EP = 2, real DeepSpeed, vLLM and checkpoints.

A start takes seconds, so tests share runs and resume copies of runs.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, TWO_ENDS, torchrun, train, trained
from helpers import (
    assert_resumes_exactly,
    assert_same_run,
    assert_same_weights,
    names_in,
    rows_of,
    steps_of,
    summary_of,
    weights_of,
)
from safetensors.torch import load_file, save_file

from data.calculator import TEMPLATE
from runtime import tracking
from runtime.checkpoint import digest_of_record
from tests import preloaded
from tests.patience import limit, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("demo_model")]
TINY = ROOT / "data" / "built" / "tiny"


def test_a_run_writes_the_files_and_figures_that_the_readme_promises(undisturbed):
    summary = json.loads((undisturbed / "summary.json").read_text())
    promised = {
        "accuracy_before", "accuracy_after", "pass_at_8_before", "pass_at_8_after", "generated_tokens",
        "gradient_token_share", "seconds_by_phase", "mean_abs_dlogp", "peak_rss_bytes", "num_steps",
    }  # fmt: skip
    assert promised <= summary.keys() and summary["num_steps"] == 6 and summary["gpu_memory"] is None
    assert 0 < summary["mean_abs_dlogp"] < 1e-4  # float32 engine and policy differ by rounding
    steps = steps_of(undisturbed)
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert summary["generated_tokens"] == sum(row["tokens_total"] for row in steps)
    account = summary["account"]
    assert account["prompts_offered"] == account["prompts_sampled"] == 6 * 8
    assert account["prompts_dropped"] == account["prompts_stopped"] == account["prompts_refilled"] == 0
    without_gradient = summary["generated_tokens"] * (1 - summary["gradient_token_share"])
    assert account["wasted_kept_tokens"] == pytest.approx(without_gradient)
    assert all(row["ratio"] == 1.0 and row["clipped"] == 0.0 for row in steps), "one update: on-policy"
    for name in ("curves.png", "config.yaml", "samples.jsonl"):
        assert (undisturbed / name).stat().st_size > 0
    assert (undisturbed / "source" / "train_rl.py").read_text() == (ROOT / "train_rl.py").read_text()
    outcomes = json.loads((undisturbed / "outcomes.json").read_text())
    assert outcomes["step"] == 6 and len(outcomes["outcomes"]["eval/additions/accuracy"]) == 20
    for name, by_prompt in outcomes["outcomes"].items():
        assert rows_of(undisturbed)[-1][name] == pytest.approx(np.mean(by_prompt), abs=1e-4)
    texts = [json.loads(line) for line in (undisturbed / "eval_samples.jsonl").read_text().splitlines()]
    greedy = [row["reward"] for row in texts if row["step"] == 6]
    assert greedy == outcomes["outcomes"]["eval/additions/accuracy"][: len(greedy)] and len(greedy) == 16
    assert {"prompt", "completion", "answer", "status", "detail", "source", "prompt_index"} <= texts[0].keys()
    versions = json.loads((undisturbed / "versions.json").read_text())
    assert len(bytes.fromhex(versions["weights"])) == 8 and versions["dtype"] == "float32"
    assert versions["script"] == "train_rl.py" and {"commit", "dirty", "torch", "python"} <= versions.keys()
    assert names_in(undisturbed / "checkpoints") == ["step_000004", "step_000006"]


GAME = """
class Game:
    def reset(self, row):
        self.num_turns = 0

    def step(self, text):  # three turns
        self.num_turns += 1
        return "12+34", self.num_turns == 3, (len(text) % 2) / 3

def score(completion, turns=None):  # the last turn, and all of them; None at the check at the start
    return float(turns is None or turns[-1]["content"] == completion and len(turns) == 5)
"""


def test_a_run_plays_an_environment_in_training_and_evaluation(tmp_path):
    """Training takes the environment's rewards; a verifier gets the last and all turns."""
    shutil.copytree(TINY / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "games.py").write_text(GAME)
    for name, first in (("train", 100), ("test", 200)):
        rows = [{"prompt": f"{first + i}+1", "answer": str(first + i + 1)} for i in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained(
        "--config", "experiments/environments/tiny.yaml", f"model.path={tmp_path}/model", "model.ep_size=1",
        f"data.train=[{{path: {tmp_path}/train.jsonl, kind: environment}}]", "data.chat=always",
        f"data.eval=[{{path: {tmp_path}/test.jsonl, kind: '{tmp_path}/games.py:score', name: games}}]",
        f"data.environment={tmp_path}/games.py:Game", "rollout.prompts_per_step=4", "rollout.group_size=4",
        "rollout.max_new_tokens=100", f"rollout.stop={[*'0123456789']}", "train.num_steps=2", "eval.every=2",
        "eval.num_samples=1", "checkpoint.every=0", "run.log_every=1", f"run.dir={tmp_path}/run", ranks=1,
    )  # fmt: skip
    steps = steps_of(tmp_path / "run")
    assert all(row["turns"] == 3.0 and row["abs_dlogp"] < 1e-4 and 0 < row["score"] < 1 for row in steps)
    start, end = [row for row in rows_of(tmp_path / "run") if "eval/games/accuracy" in row]
    assert start["eval/games/accuracy"] == end["eval/games/turns"] / 3 == 1.0
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    roles = [[turn["role"] for turn in json.loads(line)["turns"]] for line in samples]
    assert roles == [["assistant", "user", "assistant", "user", "assistant"]] * len(samples) != []


NOTHING = """
import sys
def zero(completion):
    return 0.0
calls = []
def advantage(inputs):
    calls.append(1)
    if len(calls) > 13:  # two calls at the start
        sys.exit(0)
    return inputs.rewards
"""


def test_a_run_that_learns_nothing_says_so_and_code_of_the_user_cannot_end_it_in_silence(tmp_path):
    (tmp_path / "mine.py").write_text(NOTHING)
    kind = f"kind: '{tmp_path}/mine.py:zero', columns: {{kind: null}}"
    done = train(
        "--config", "experiments/environments/tiny.yaml", "--config", "experiments/methods/dapo.yaml",
        f"data.train=[{{path: {TINY}/train.jsonl, {kind}}}]",
        "zero_variance.max_rounds=1", f"algorithm.advantage={tmp_path}/mine.py:advantage", "data.eval=[]",
        "model.ep_size=1", "train.num_steps=12", "rollout.prompts_per_step=4", "rollout.group_size=4",
        "checkpoint.every=10", "run.log_every=1", f"run.dir={tmp_path}/run", ranks=1,
    )  # fmt: skip
    assert done.returncode != 0 and len(steps_of(tmp_path / "run")) == 11
    assert "algorithm.advantage" in done.stderr and "mine.py, line 9" in done.stderr
    assert names_in(tmp_path / "run" / "checkpoints") == ["step_000010"]
    assert "nan" not in done.stdout and "|dlogp| not measured" in done.stdout
    assert done.stdout.count("no gradient in the last 10 steps") == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 11 * 4 and not any(row["trained"] for row in rows)


def test_tensorboard_holds_the_metrics(undisturbed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(undisturbed / "tensorboard"))
    events.Reload()
    for name in ("score", "reward", "abs_dlogp"):
        expected = {row["step"]: row[name] for row in steps_of(undisturbed)}
        points = events.Scalars(tracking.tag_of(name))
        assert {e.step: pytest.approx(e.value, abs=1e-6) for e in points} == expected
    groups = list(dict.fromkeys(tag.partition("/")[0] for tag in sorted(events.Tags()["scalars"])))
    assert groups[:2] == ["01_score", "02_accuracy"] and "12_other" not in groups


def test_the_exported_model_loads_in_transformers_and_generates(undisturbed):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(undisturbed / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(undisturbed / "model")
    ids = tokenizer("1    +1    =", return_tensors="pt")["input_ids"]
    text = tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :])
    assert text == "20<eos>"  # one digit without a carry: known from the start


def test_the_second_end_token_of_the_generation_config_ends_completions_and_is_saved(undisturbed):
    """Qwen's folders name one end token in config.json, and both only in generation_config.json."""
    source = (TWO_ENDS / "generation_config.json").read_text()
    for folder in (undisturbed / "model", *(undisturbed / "checkpoints").glob("*/model")):
        assert (folder / "generation_config.json").read_text() == source
    texts = [
        json.loads(line)["completion"] for line in (undisturbed / "samples.jsonl").read_text().splitlines()
    ]
    assert any(text.endswith("7") for text in texts)
    assert not any("7" in text[:-1].removesuffix("<eos>") for text in texts)


def start_torchrun(command: list[str]) -> subprocess.Popen:
    launcher = [sys.executable, "-m", "runtime.torchrun", "--nproc-per-node=2"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*launcher, "train_rl.py", *command], cwd=ROOT, **quiet)


def children_of(process: subprocess.Popen) -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def has_logged(run_dir: Path, step: int) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.is_file() and f'"step": {step},' in metrics.read_text()


def start_and_terminate(command: list[str], run_dir: Path) -> subprocess.Popen:
    """Send SIGTERM to torchrun alone after step 2; return the ended process. No rank may outlive torchrun."""
    process = start_torchrun(command)
    assert wait_until(lambda: has_logged(run_dir, 2) or process.poll() is not None, 120)
    assert process.poll() is None, "ended before the signal"
    ranks = children_of(process)
    assert len(ranks) == 2
    process.terminate()
    process.wait(limit(60))
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks)), "a rank outlived it"
    assert not (run_dir / "summary.json").exists()
    return process


def test_ranks_that_still_import_end_with_torchrun(tmp_path):
    """A rank that has mapped torch's libraries still imports for seconds."""
    process = start_torchrun([*SMALL, f"run.dir={tmp_path}"])
    ranks = []

    def import_torch() -> bool:
        ranks[:] = [pid for pid in children_of(process) if b"train_rl" in read(f"/proc/{pid}/cmdline")]
        return len(ranks) == 2 and all(b"libtorch" in read(f"/proc/{pid}/maps") for pid in ranks)

    assert wait_until(import_torch)
    process.kill()
    process.wait()
    assert wait_until(lambda: not any(b"train_rl" in read(f"/proc/{pid}/cmdline") for pid in ranks))
    assert not (tmp_path / "lock").exists(), "the ranks were still importing"


def read(file: str) -> bytes:
    """Return the content of a process's file in /proc, or nothing if the process has ended."""
    try:
        return Path(file).read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="session")
def killed(tmp_path_factory) -> Path:
    """Make a run of four steps: killed after step 1, started again, killed after a checkpoint, resumed.

    test_ranks_that_still_import_end_with_torchrun kills torchrun itself.
    """
    run_dir = tmp_path_factory.mktemp("run") / "killed"
    command = [*SMALL, "train.num_steps=4", f"run.dir={run_dir}"]
    done = train(*command, kill_when=lambda: has_logged(run_dir, 1))
    assert done.returncode == -signal.SIGKILL and not (run_dir / "checkpoints" / "step_000002").exists()
    done = train(*command, kill_when=lambda: has_logged(run_dir, 3))
    assert done.returncode == -signal.SIGKILL and not (run_dir / "summary.json").exists()
    resumed = train(*command)
    assert resumed.returncode == 0 and "resumed from" in resumed.stdout, resumed.stderr[-3000:]
    return run_dir


def test_a_killed_run_ends_with_the_numbers_of_an_undisturbed_one(killed, undisturbed):
    assert rows_of(killed) == [row for row in rows_of(undisturbed) if row["step"] <= 4]
    assert [row["step"] for row in rows_of(killed)] == [0, 1, 2, 2, 3, 4, 4], "with evaluations at 0, 2, 4"
    assert_same_weights(killed / "model", undisturbed / "checkpoints" / "step_000004" / "model")
    # The metrics of the first start, which had no checkpoint, are preserved.
    rows = [json.loads(line) for line in (killed / "earlier_1" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows][:2] == [0, 1]
    assert (killed / "earlier_1" / "config.yaml").is_file() and not (killed / "earlier_2").exists()


def test_a_finished_run_continues_with_more_steps_as_if_never_stopped(killed, undisturbed, tmp_path):
    """The summary of the shorter run does not count as the summary of the longer run, but its memory does."""
    longer = shutil.copytree(killed, tmp_path / "longer")
    assert summary_of(longer)["num_steps"] == 4
    file = longer / "checkpoints" / "step_000004" / "state.json"
    record = json.loads(file.read_text())
    del record["sha256"]
    assert record["state"]["peak_rss_bytes"] > 2**28
    record["state"]["peak_rss_bytes"] = 2**50
    file.write_text(json.dumps(record | {"sha256": digest_of_record(record)}))
    trained(*SMALL, f"run.dir={longer}")
    assert_same_run(undisturbed, longer)
    assert json.loads((longer / "summary.json").read_text())["peak_rss_bytes"] == 2**50


def test_sigterm_leaves_a_checkpoint_of_the_last_finished_step(undisturbed, tmp_path):
    command = [*SMALL, f"run.dir={tmp_path}", "checkpoint.every=0"]
    assert start_and_terminate(command, tmp_path).returncode != 0
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert "step_000002" <= checkpoint.name < "step_000006"
    assert rows_of(tmp_path)[-1]["step"] == int(checkpoint.name[-6:])
    done = train(*command)
    assert done.returncode == 0 and f"resumed from {checkpoint}" in done.stdout, done.stderr[-3000:]
    assert_same_run(undisturbed, tmp_path)


def test_no_scheduling_and_no_overlap_give_the_same_run_bit_for_bit(undisturbed, tmp_path):
    """Both change the order of work only. Without a schedule there are no predicted lengths (length_*)."""
    settings = ["rollout.schedule=arrival", "reward.overlap=false", "reward.decode=engine"]
    trained(*SMALL, *settings, f"run.dir={tmp_path}")
    rows, expected = (
        [{k: v for k, v in row.items() if not k.startswith("length_")} for row in rows_of(run_dir)]
        for run_dir in (tmp_path, undisturbed)
    )
    assert rows == expected
    assert_same_weights(tmp_path / "model", undisturbed / "model")


def test_reference_minibatches_recomputation_zero_2_and_frozen_routers_run_together(tmp_path):
    settings = [
        *SMALL, f"run.dir={tmp_path}", "train.num_steps=2", "algorithm.kl_coef=0.01", "train.zero_stage=2",
        "train.minibatches_per_step=2", "train.micro_batch_tokens=100", "model.activation_checkpointing=true",
        "algorithm.old_policy=rollout", "model.freeze_router=true", "checkpoint.every=1",
        "train.warmup_steps=3", "train.learning_rate=1e-3",
        "algorithm.select=experiments/plugins/top_entropy.py:top_entropy",
        "algorithm.select_args={fraction: 0.1}", "teacher.path=data/built/tiny/model",
    ]  # fmt: skip
    trained(*settings)
    start, learned = weights_of(TINY / "model"), weights_of(tmp_path / "model")
    unchanged = {name for name in start if torch.equal(start[name], learned[name])}
    frozen = {name for name in start if name.endswith("mlp.gate.weight")}
    assert frozen and frozen <= unchanged
    assert all(".experts." in name for name in unchanged - frozen), "an expert may have received no token"
    first, second = steps_of(tmp_path)
    assert (first["learning_rate"], second["learning_rate"]) == (2.5e-4, 5e-4), "a fourth more each step"
    for row in (first, second):
        assert 0 < row["gradient_tokens_total"] < 0.2 * row["tokens_total"], "the most uncertain tenth"
        assert row["account/teacher_tokens_total"] > 0 and 0 < row["teacher_frac"] < 1, "all wrong"
    assert first["ratio"] != 1.0, "the second update of a rollout is off-policy"
    assert abs(first["teacher_kl_k1"]) < 1e-5 < abs(second["teacher_kl_k1"]), "the initial policy teaches"
    assert min(first["ref_kl_k3"], second["ref_kl_k3"]) > 0, "the policy has left the reference"
    shutil.rmtree(tmp_path / "checkpoints" / "step_000002")
    trained(*settings)
    assert steps_of(tmp_path)[1]["ref_kl_k3"] == second["ref_kl_k3"], "the reference is the initial policy"


CUSTOM_REWARD = """
def even_total(completion, answer, prompt, color):
    assert prompt.endswith("=") and color == "green"
    return 0.5 * completion.startswith(tuple("02468")) + 0.5 * answer.startswith(completion[:1])
"""
SUM = "0.75*exact + 0.25*mine:even_total"


@dataclass(frozen=True)
class CustomReward:
    """A prompt set of which two of three rows choose a reward function that the settings allow."""

    rows: dict[str, dict]  # {prompt: row}
    settings: list[str]
    env: dict[str, str]


@pytest.fixture(scope="session")
def custom_reward(demo_model, tmp_path_factory) -> CustomReward:
    folder = tmp_path_factory.mktemp("custom_reward")
    (folder / "mine.py").write_text(CUSTOM_REWARD)
    rows = [json.loads(line) for line in (TINY / "train.jsonl").read_text().splitlines()[:400]]
    for row in rows[::3]:
        row |= {"kind": "mine:even_total", "color": "green"}
    for row in rows[1::3]:
        row |= {"kind": SUM, "color": "green"}
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"data.train=[{{path: {folder / 'train.jsonl'}}}]"
    settings = [data, f"reward.functions=[mine:even_total, {SUM}]"]
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    return CustomReward({row["prompt"]: row for row in rows}, settings, env)


BFLOAT16 = [
    *SMALL, "model.dtype=bfloat16", "rollout.dtype=bfloat16", "rollout.fp8=simulate", "rollout.check_every=3",
    "algorithm.router_replay=r3", "train.minibatches_per_step=2", "checkpoint.every=3", "eval.every=5",
]  # fmt: skip


@pytest.fixture(scope="session")
def gated(custom_reward, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """Run FP8 rollouts of the tiny model, with a custom reward. k3 exceeds 1e-4 at every step."""
    run_dir = tmp_path_factory.mktemp("run") / "gated"
    gate = ["algorithm.mismatch_gate=1e-4", "algorithm.mismatch_patience=5"]
    settings = [*BFLOAT16, *custom_reward.settings, *gate, f"run.dir={run_dir}"]
    return run_dir, train(*settings, env=custom_reward.env)


def test_the_mismatch_gate_stops_a_run_with_a_checkpoint(gated):
    run_dir, done = gated
    assert done.returncode != 0
    assert "warning: step 1" in done.stdout + done.stderr
    assert "5 steps" in done.stderr and "algorithm.router_replay" in done.stderr
    assert names_in(run_dir / "checkpoints") == ["step_000003", "step_000005"]


def test_rows_choose_a_reward_function_that_the_settings_name(gated, custom_reward):
    run_dir = gated[0]
    rewards = set()
    for line in (run_dir / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        row = custom_reward.rows[sample["prompt"]]
        text = sample["completion"].removesuffix("<eos>")
        even = text.startswith(tuple("02468"))
        same_start = row["answer"].startswith(text[:1])
        custom = 0.5 * even + 0.5 * same_start
        exact = float(text == row["answer"])
        reward = {"mine:even_total": custom, "exact": exact, SUM: 0.75 * exact + 0.25 * custom}[row["kind"]]
        right = exact if row["kind"] == SUM else reward
        assert sample["reward"] == reward and sample["status"] == ("ok" if right == 1 else "wrong")
        parts = {"exact": exact, "mine:even_total": custom} if row["kind"] == SUM else {}
        assert sample["parts"] == parts
        rewards.add((row["kind"], reward))
    # The first groups of a step depend on lengths, and so on the processor.
    assert len({kind for kind, _ in rewards}) >= 2 and any(0 < reward < 1 for _, reward in rewards)
    for row in steps_of(run_dir):
        assert all(0 <= row[f"part/{name}/mean"] <= 1 for name in ("exact", "mine:even_total"))
        assert row["verdict/error_frac"] == 0


def test_bfloat16_fp8_and_replayed_routes_resume_exactly(gated, custom_reward, tmp_path):
    """Resume from the second-newest checkpoint, up to the step at which the gate stopped the run."""
    straight, _ = gated
    resumed = shutil.copytree(straight, tmp_path / "resumed")
    shutil.rmtree(resumed / "checkpoints" / "step_000005")
    settings = [*BFLOAT16, *custom_reward.settings, "train.num_steps=5", f"run.dir={resumed}"]
    done = train(*settings, env=custom_reward.env)
    assert done.returncode == 0 and "resumed from" in done.stdout + done.stderr, done.stderr[-3000:]
    *rows, evaluation = rows_of(resumed)  # step 5 is the last step here
    assert rows == rows_of(straight) and evaluation["step"] == 5 and "score" not in evaluation
    assert_same_weights(resumed / "model", straight / "checkpoints" / "step_000005" / "model")
    assert 1e-3 < summary_of(resumed)["mean_abs_dlogp"] < 0.1
    steps = steps_of(resumed)
    assert len(steps) == 5 and all(row["mismatch_routes"] == row["invalid_routes_frac"] == 0 for row in steps)


def test_a_run_with_a_lag_resumes_its_queue_exactly(tmp_path):
    """Parity is checked on the rollout of the present policy; the queue holds the engine's routes."""
    settings = [
        *SMALL, "rollout.lag=2", "rollout.check_every=2", "algorithm.router_replay=r3", "checkpoint.every=3",
        "train.num_steps=5", "algorithm.rollout_correction=token_tis",
    ]  # fmt: skip
    straight = tmp_path / "straight"
    trained(*settings, f"run.dir={straight}")
    assert [row["token_age_mean"] for row in steps_of(straight)] == [0, 1, 2, 2, 2]
    measured = [row["abs_dlogp"] for row in steps_of(straight) if "abs_dlogp" in row]  # of a gradient
    assert measured[0] < 1e-4 < min(measured[1:])
    assert_resumes_exactly(straight, 5, *settings)


def test_another_topology_continues_from_weights_on_request(undisturbed, tmp_path):
    run_dir = shutil.copytree(undisturbed, tmp_path / "copy")
    settings = ["train.num_steps=7", "model.ep_size=1", "checkpoint.resume=weights"]
    frozen = ["train.learning_rate=1e-30", "train.weight_decay=0"]
    trained(*SMALL, *settings, *frozen, f"run.dir={run_dir}", ranks=1)
    last = steps_of(run_dir)[-1]
    assert last["step"] == 7 and last["abs_dlogp"] < 1e-4
    assert_same_weights(run_dir / "model", undisturbed / "model")


CASES = """
import contextlib, functools, itertools, json, os, resource, sys, tempfile, types
import lifecycle, moe_model, runtime.launch, train_rl
hf_tensors, write_rank, outcomes = moe_model.hf_tensors, lifecycle.write_rank, {}
runtime.launch.time = types.SimpleNamespace(sleep=lambda seconds: None)  # rank 1 would wait 5 s to print
lifecycle.check_run_dir_is_shared = functools.partial(lifecycle.check_run_dir_is_shared, patience_s=0.3)

def write_to_full_disk(*arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
    try:
        write_rank(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

runtime.launch.end_others = lambda line: None  # because the next case runs in the same processes
for name, case in json.loads(sys.argv[1]).items():
    part, factor, *calls = case.get("tampered", (None, 1))
    number = itertools.count()
    tampered = lambda *arguments: (
        hf_tensors(*arguments)
        if next(number) not in (calls or itertools.count())
        else ((n, t * factor if part in n else t) for n, t in hf_tensors(*arguments))
    )
    moe_model.hf_tensors = tampered if part else hf_tensors
    lifecycle.write_rank = write_to_full_disk if case.get("full_disk") else write_rank
    error, output = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    rank_folder = "of_rank_" + os.environ.get("RANK", "0")
    argv = [argument.replace("RANK_FOLDER", rank_folder) for argument in case["argv"]]
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(output):
        code = runtime.launch.run(train_rl.main, train_rl.load_config, argv)
    outcomes[name] = (code, *(file.seek(0) or file.read() for file in (error, output)))
print("OUTCOMES" + json.dumps(outcomes) if os.environ.get("RANK", "0") == "0" else "", flush=True)
os._exit(1)  # ends the second rank, whatever it is doing
"""


def outcomes_of(cases: dict[str, dict], folder: Path, ranks: int) -> dict[str, tuple[int, str, str]]:
    """Return (exit code, standard error, output) of rank 0 in every case; one process runs all cases.

    A case has "argv". It may have "tampered": (weights, factor, *calls), which multiplies these weights in
    all or in some calls of hf_tensors(), and "full_disk". 0 ranks: without torchrun's environment.
    """
    (script := folder / "cases.py").write_text(CASES)
    done = preloaded.run(ranks, script, json.dumps(cases), timeout_s=300)
    assert "OUTCOMES" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.partition("OUTCOMES")[2].splitlines()[0])


TRAIN_SET = "data/built/tiny/train.jsonl"
BAD_INPUT = {  # case: (settings, keyword of the message)
    "unknown setting": (["train.learning_rat=1"], "train.learning_rate"),
    "no such file": (["data.train=[{path: nowhere.jsonl}]"], "nowhere.jsonl"),
    "code in training data": (["data.train=[{path: CODE}]"], "timeit:timeit"),
    "code in held-out data": (["data.eval=[{path: CODE, kind: exact}]"], "timeit:timeit"),
    "no such file of rewards": (
        [f"data.train=[{{path: {TRAIN_SET}, kind: 'nowhere.py:score', columns: {{kind: null}}}}]"],
        "nowhere.py:score",
    ),
    "a reward of 2": (
        [f"data.train=[{{path: {TRAIN_SET}, kind: 'TWO:two', columns: {{kind: null}}}}]"],
        "2.0",
    ),
    "two sets of one name": (
        ["data.eval=[{path: data/built/tiny/test.jsonl}, {path: data/built/tiny/test.jsonl}]"],
        "data.eval",
    ),
    "no model": (["model.path=nowhere"], "model.path"),
    "ep_size": (["model.ep_size=3"], "model.ep_size"),
    "no GPU for the kernels": (["model.logprob_kernel=triton"], "model.logprob_kernel"),
    "long prompts": (["rollout.max_prompt_tokens=4"], "rollout.max_prompt_tokens"),
    "context": (["rollout.max_new_tokens=1000"], "512"),
    "overlap": ([f"data.eval=[{{path: {TRAIN_SET}}}]"], "training prompts"),
    "run folder": (["run.dir=/proc/nowhere"], "run.dir"),
    "sleep": (["rollout.sleep_level=2"], "rollout.sleep_level"),
    "fp8": (["rollout.fp8=on", "rollout.dtype=bfloat16"], "rollout.fp8"),
    "shared engine": (["rollout.tensor_parallel=2"], "rollout.tensor_parallel"),
    "ranks": ([*SMALL[2:], "run.dir=FINISHED"], "world_size 2 -> 1"),
}


def write_code(folder: Path) -> tuple[Path, Path]:
    """Write a prompt set that asks to run code; return its path and the path that the code would write."""
    trace, file = folder / "trace", folder / "code.jsonl"
    answer = f"open({str(trace)!r}, 'w').close()"
    rows = [("1+1=", "2", "exact"), ("2+2=", answer, "timeit:timeit")]
    lines = [json.dumps(dict(zip(("prompt", "answer", "kind"), row))) for row in rows]
    file.write_text("\n".join(lines))
    return file, trace


@pytest.fixture(scope="session")
def bad_input_outcomes(undisturbed, tmp_path_factory) -> dict[str, tuple[int, str, str]]:
    folder = tmp_path_factory.mktemp("bad")
    finished = shutil.copytree(undisturbed, folder / "finished")
    code, trace = write_code(folder)
    (two := folder / "two.py").write_text("def two(completion, answer):\n    return 2.0\n")
    common = [
        "--config",
        "experiments/environments/tiny.yaml",
        "model.ep_size=1",
        f"run.dir={folder / 'run'}",
    ]
    cases = {case: {"argv": [*common, *settings]} for case, (settings, _) in BAD_INPUT.items()}
    files = {"CODE": code, "FINISHED": finished, "TWO": two}
    for name, file in files.items():
        cases = json.loads(json.dumps(cases).replace(name, str(file)))
    outcomes = outcomes_of(cases, folder, ranks=0)
    assert not (folder / "run" / "checkpoints").exists() and not trace.exists()
    return outcomes


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_message(case, bad_input_outcomes):
    code, error, _ = bad_input_outcomes[case]
    assert code != 0
    lines = [line for line in error.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error on rank 0: "), error
    assert BAD_INPUT[case][1] in lines[0]


FAILS = """
import sys
from pathlib import Path
from runtime.launch import leave, run

def main(folder):
    raise ValueError(f"{folder}: refused")

leave(run(main, lambda argv: Path(argv[0]), sys.argv[1:], lambda folder: folder))
"""


def test_the_message_of_an_error_comes_last_under_torchrun(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    done = torchrun(2, tmp_path / "fails.py", tmp_path)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert re.match("error on rank [01]: ", lines[0]) and "refused" in lines[0]
    rank, message = re.search(r" : error on rank ([01]): (.*)", lines[-2]).groups()  # torchrun picks a rank
    assert lines[-1].startswith("=====") and message.startswith(str(tmp_path))
    stack = tmp_path / f"error_rank_{rank}.txt"
    assert str(stack) in message and "Traceback" in stack.read_text()


LOST = "model.layers.1.mlp.experts.7.down_proj.weight"  # on rank 1: all ranks check all names
TAMPERED = {"float32": ("layers.1.mlp.gate", 1.1), "bfloat16": ("layers.1.mlp.experts", -1)}
REFUSED = {  # case: (settings, keyword of the message)
    "prompts": (["rollout.prompts_per_step=7"], "rollout.prompts_per_step"),
    "EP": (["model.ep_size=1"], "checkpoint.resume=weights"),
    "settings": (["rollout.group_size=8"], "rollout.group_size 4 -> 8"),
    "settings of one rank": (["model.path=RANK_FOLDER"], "'of_rank_0' -> 'of_rank_1'"),
    "no shared folder": (["run.dir=FINISHED/RANK_FOLDER"], "not the same folder"),
    "second run": ([], "another run"),  # last, because only rank 0 refuses this case
}


@pytest.fixture(scope="session")
def two_rank_outcomes(undisturbed, tmp_path_factory) -> dict[str, tuple[int, str, str]]:
    """Run cases that end early. Cases that start the engine come first, because both ranks take part."""
    folder = tmp_path_factory.mktemp("cases")
    finished = shutil.copytree(undisturbed, folder / "finished")
    broken = shutil.copytree(TINY / "model", folder / "broken")
    (shard,) = broken.glob("*.safetensors")
    save_file({name: tensor for name, tensor in load_file(shard).items() if name != LOST}, shard)
    cases = {"broken": {"argv": [*SMALL, f"model.path={broken}", f"run.dir={folder / 'broken_run'}"]}}
    for dtype, tampered in TAMPERED.items():
        argv = [*SMALL, f"rollout.dtype={dtype}", f"run.dir={folder / dtype}"]
        cases[dtype] = {"argv": argv, "tampered": tampered}
    # calls 0 and 1 are the first sync and its check, calls 2 and 3 those after the first step
    argv = [*SMALL, "rollout.check_every=1", "eval.every=0", f"run.dir={folder / 'late'}"]
    cases["late"] = {"argv": argv, "tampered": ("layers.1.mlp.gate", 1.1, 2)}
    full = shutil.copytree(undisturbed, folder / "full")
    cases["full disk"] = {"argv": [*SMALL, "train.num_steps=7", f"run.dir={full}"], "full_disk": True}
    cases["finished"] = {"argv": [*SMALL, f"run.dir={finished}"]}
    locked = shutil.copytree(undisturbed, folder / "locked")
    for case, (settings, _) in REFUSED.items():
        settings = [setting.replace("FINISHED", str(finished)) for setting in settings]
        run_dir = locked if case == "second run" else finished
        cases[case] = {"argv": [*SMALL, f"run.dir={run_dir}", "train.num_steps=7", *settings]}
    with (locked / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcomes = outcomes_of(cases, folder, ranks=2)
    assert rows_of(finished) == rows_of(undisturbed)
    assert names_in(full / "checkpoints") == ["step_000004", "step_000006"]
    assert steps_of(full)[-1]["step"] == 7, "only the checkpoint failed"
    return outcomes


def test_a_full_disk_while_saving_leaves_the_earlier_checkpoints(two_rank_outcomes):
    """A file-size limit below the checkpoint's size fails the same write as a full disk."""
    code, error, _ = two_rank_outcomes["full disk"]
    assert code != 0 and "could not be written" in error and "intact" in error


def test_a_finished_run_is_not_started_again(two_rank_outcomes):
    code, _, output = two_rank_outcomes["finished"]
    assert code == 0 and "finished" in output


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_fit_the_run_in_the_folder_are_refused(case, two_rank_outcomes):
    code, error, _ = two_rank_outcomes[case]
    assert code != 0 and REFUSED[case][1] in error


def test_a_broken_model_folder_names_the_missing_tensor(two_rank_outcomes):
    code, error, _ = two_rank_outcomes["broken"]
    lines = [line for line in error.splitlines() if line.strip()]
    assert code != 0 and lines[0].startswith("error on rank"), lines[:3]
    assert f"1 of {len(weights_of(TINY / 'model'))} tensors" in lines[0] and LOST in lines[0]


def test_a_late_sync_with_other_weights_is_caught_by_the_checksum(two_rank_outcomes):
    code, error, _ = two_rank_outcomes["late"]
    assert code != 0 and "holds other values" in error and "layers.1.mlp.gate" in error


@pytest.mark.parametrize("dtype", TAMPERED)
def test_a_tampered_engine_is_caught_by_the_parity_check(dtype, two_rank_outcomes):
    """The weight sync is tampered with, so the engine samples from other weights than the policy's."""
    code, error, _ = two_rank_outcomes[dtype]
    assert code != 0 and "trainer and engine disagree" in error
