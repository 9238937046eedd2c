"""The benchmarks of experiments/bench/ and data/tiny.py, run by the commands of the READMEs."""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT
from helpers import EMPTY_ACCOUNT, make_config
from transformers import Qwen3MoeConfig

import moe_model
from configure import load_config
from data import tiny
from data.prompts import Prompt
from data.tiny import Recipe, answer_without_carry, build_tokenizer, problem, sample_problems
from experiments.bench import gpu as bench_gpu
from experiments.bench import gpu_kernels, gpu_runs
from experiments.bench.common import read_results, spread, write_results
from experiments.bench.gpu import MODES
from lifecycle import conditions_of, groups_of
from runtime import summary
from runtime.checkpoint import TrainState
from tests import preloaded
from tests.patience import limit


def run(*arguments: object, timeout_s: float = 300) -> subprocess.CompletedProcess:
    return preloaded.run(0, *arguments, timeout_s=timeout_s)


# ---- experiments/bench/ ------------------------------------------------------------------------------------
def test_results_hold_their_origin_and_the_rounds(tmp_path):
    results = {"seconds": spread([0.5, 0.25, 1.0])}
    write_results(tmp_path / "new.json", results)
    (tmp_path / "old.json").write_text(json.dumps(results))
    assert read_results(tmp_path / "new.json") == read_results(tmp_path / "old.json") == results
    assert results["seconds"]["rounds"] == [0.5, 0.25, 1.0] and results["seconds"]["median"] == 0.5
    made = json.loads((tmp_path / "new.json").read_text())["made"]
    name, family, model = re.fullmatch(r"(.+) \(family (\d+), model (\d+)\)", made["machine"]["cpu"]).groups()
    for line in (f"model name\t: {name}", f"cpu family\t: {family}", f"model\t\t: {model}"):
        assert f"{line}\n" in Path("/proc/cpuinfo").read_text()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert (
        made["commit"] == (head.stdout.strip() or None)
        and made["versions"]["torch"].split("+")[0] in torch.__version__
    )


# ---- data/tiny.py ------------------------------------------------------------------------------------------
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


@pytest.mark.parametrize("a, b, wrong", [(12, 34, "640"), (99, 1, "090"), (85, 17, "290"), (0, 0, "000")])
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


@pytest.mark.slow
def test_a_second_build_is_served_from_the_cache_and_a_changed_recipe_is_not(tmp_path):
    command = ["-m", "data.tiny", "--output", tmp_path / "tiny", "--steps", 2]
    assert "made in" in run(*command).stderr
    weights = Path(tmp_path / "tiny" / "model" / "model-00001-of-00001.safetensors")
    first = weights.read_bytes()
    assert "already there" in run(*command).stderr
    assert "made in" in run(*command[:-1], 3).stderr and weights.read_bytes() != first
    assert "made in" in run(*command).stderr and weights.read_bytes() == first, "the build is deterministic"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"tiny", ".tiny.lock"}, "no temporary files remain"


def test_a_committed_model_takes_the_place_of_the_warm_start(tmp_path, capsys):
    start = ROOT / "experiments" / "starts" / "habits"
    arguments = ["--recipe", "habits", "--model", str(start / "model"), "--output", str(tmp_path / "habits")]
    for state in ("made in", "already there"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["data.tiny", *arguments])
            tiny.main()
        assert state in capsys.readouterr().err
    for name in ("train.jsonl", "test.jsonl", "model/model-00001-of-00001.safetensors"):
        assert (tmp_path / "habits" / name).read_bytes() == (start / name).read_bytes(), name
    with pytest.raises(ValueError, match="safetensors"):
        tiny.build(tiny.RECIPES["habits"], tmp_path / "none", model=tmp_path)


# ---- experiments/bench/, without an engine -----------------------------------------------------------------
def gpu(mode: str, out: Path, *options: object) -> subprocess.CompletedProcess:
    return run("-m", "experiments.bench.gpu", "--mode", mode, "--dry-run", "--out", out, *options)


CHEAP = {  # pieces that start no run of train_rl.py; all of them: --mode visit --dry-run --out FOLDER
    "visit": ["ready", "fp8", "update", "experts", "trl"],
    "kernels": ["tests"],
}


@pytest.mark.slow
def test_pieces_for_a_gpu_run_dry_and_those_that_are_there_are_not_run_again(tmp_path):
    for mode, pieces in CHEAP.items():
        for name in pieces:
            done = gpu(mode, tmp_path, "--alone", name)
            assert done.returncode == 0, done.stderr[-3000:]
    (tmp_path / "trl.json").unlink()  # it is tried again, because TRL was missing
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    done = gpu("visit", tmp_path, "--json", tmp_path / "copy.json", "--pieces", *CHEAP["visit"][:4])
    assert done.returncode == 0 and "0 criteria failed" in done.stdout, done.stdout
    changed = {path.name for path, time in times.items() if path.stat().st_mtime_ns != time}
    assert changed <= {"experts.json"}
    report = json.loads((tmp_path / "report_visit.json").read_text())
    assert report == json.loads((tmp_path / "copy.json").read_text())
    figures = json.loads((tmp_path / "fp8.json").read_text())["report"]["figures"]
    assert figures["other experts, R3"] == 0 < figures["other experts, live routes"]
    with tarfile.open(tmp_path / "visit.tar") as archive:
        assert {"fp8.json", "report_visit.md"} <= {*archive.getnames()}


@pytest.mark.parametrize("seed", range(3))
def test_a_report_that_is_killed_holds_every_figure_that_was_measured(seed, tmp_path):
    """A process tells in a pipe of each figure that it adds; it is killed at a random moment."""
    file = tmp_path / "piece.json"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):  # a failed child must not go on with the tests
            report = gpu_kernels.Report(tmp_path, "piece", True, {"torch": "x" * 10_000})
            for number in itertools.count():
                report.figures[f"figure {number}"] = number
                os.write(writer, b".")
        os._exit(1)
    os.close(writer)
    num_told = 0
    while num_told <= random.Random(seed).randrange(1, 400):
        assert os.read(reader, 1), "the child failed"
        num_told += 1
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    num_told += len(os.read(reader, 2**16))
    record = json.loads(file.read_text())
    assert list(record["report"]["figures"].values())[:num_told] == [*range(num_told)]
    assert not record["finished"]


@pytest.mark.slow(process="others")
def test_a_killed_visit_keeps_its_figures_and_leaves_no_process(tmp_path):
    """SIGKILL of the visit alone, as soon as its piece has written a figure."""
    command = [sys.executable, "-m", "experiments.bench.gpu", "--mode", "kernels", "--dry-run", "--pieces"]
    visit = subprocess.Popen([*command, "update", "--out", tmp_path], cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + limit(120)
    file = tmp_path / "update.json"
    children: list[psutil.Process] = []
    while not file.is_file() and time.monotonic() < deadline:
        children = psutil.Process(visit.pid).children(recursive=True) or children
        time.sleep(0.01)
    visit.kill()
    visit.wait()
    figures = json.loads(file.read_text())["report"]["figures"]
    assert figures and children
    psutil.wait_procs(children, timeout=limit(30))
    assert not any(child.is_running() and child.status() != "zombie" for child in children)
    later = json.loads(file.read_text())  # the piece may have ended before its process was killed
    assert later["report"]["figures"].items() >= figures.items()


def visit_options(folder: Path, *options: str) -> list[str]:
    return ["--mode", "visit", "--dry-run", "--out", str(folder), *options]


def test_a_piece_over_its_time_keeps_its_figures_and_says_so_in_a_line(tmp_path):
    """The process of the piece is stopped while it imports torch."""
    args = argparse.Namespace(out=tmp_path, mode="kernels", dry_run=True, tar=None)
    (tmp_path / "update.json").write_text("{}")  # of an earlier visit
    report = bench_gpu.run_piece(args, "update", 0.2)["report"]
    assert report["figures"]["error"].startswith("not done after 0 s")
    assert report["criteria"] == {"it ran to its end": False}


def test_a_piece_that_is_cut_keeps_its_verdicts(tmp_path, monkeypatch):
    """The piece has written a criterion when its time is over."""
    args = argparse.Namespace(out=tmp_path, mode="kernels", dry_run=True, tar=None)

    def write(process) -> None:
        report = gpu_kernels.Report(tmp_path, "update", True)
        report.figures["GiB"] = 3.5
        report.criteria["bit-equal"] = True
        process.kill()
        process.wait()

    monkeypatch.setattr(bench_gpu, "end_piece", write)
    record = bench_gpu.run_piece(args, "update", 0.2)
    assert record["report"]["criteria"] == {"bit-equal": True, "it ran to its end": False}
    assert record["report"]["figures"]["GiB"] == 3.5 and record["seconds"] >= 0.2


def test_pieces_start_if_their_time_and_their_engines_are_left(tmp_path, monkeypatch, capsys):
    started = []

    def run_piece(args, name, limit_s):
        started.append(name)
        monkeypatch.setattr(bench_gpu.time, "monotonic", lambda: 70.0 * len(started))  # each takes 70 s
        report = gpu_kernels.Report(args.out, name, True, {"date": "2026-01-01"})
        report.figures["error" if name == "fp8" else "figure"] = "gone"
        report.criteria["it ran to its end"] = name != "fp8"
        return bench_gpu.read_piece(args, name)

    monkeypatch.setattr(bench_gpu, "run_piece", run_piece)
    monkeypatch.setattr(bench_gpu, "versions", lambda: {"date": "2026-01-01"})
    monkeypatch.setattr(bench_gpu, "DRY_LIMIT_S", 100)
    monkeypatch.setattr(bench_gpu.time, "monotonic", lambda: 0.0)
    assert bench_gpu.main(visit_options(tmp_path, "--limit-s", "300")) == 1, "fp8 has failed"
    assert started == ["ready", "fp8", "update"]
    assert "real: not started: it may take 100 s, 90 s are left" in capsys.readouterr().out
    monkeypatch.setattr(bench_gpu, "MAX_ENGINES", 2)
    started.clear()
    bench_gpu.main(visit_options(tmp_path / "again"))
    assert started == ["ready", "fp8", "update", "experts", "moe_fp8"]
    assert "bf16: not started: 2 engines have started" in capsys.readouterr().out


def test_a_visit_has_at_most_five_starts_of_vllm_and_every_figure_has_an_expectation():
    visit = MODES["visit"]
    assert [*visit] == "ready fp8 update experts moe_fp8 real bf16 trl".split()
    assert sum(piece.num_engines for piece in visit.values()) == 5 == bench_gpu.MAX_ENGINES
    assert all(piece.expected and piece.claim for piece in visit.values())
    assert all("vllm" in piece.needs for piece in visit.values() if piece.num_engines)


def test_the_page_holds_the_expectations_of_the_code():
    text = (ROOT / "docs" / "gpu.md").read_text()
    data = read_results(ROOT / "experiments" / "bench" / "results" / "gpu_visit.json")
    assert "\n".join(bench_gpu.visit_lines(data)) in text
    assert not data or "not run" not in bench_gpu.visit_lines(data)[2]
    ran = {"other experts, R3": 0.0}  # a visit fills the row of its piece
    versions = {"date": "2026-12-01", "device": "H100", "vllm": "0.30.0"}
    visit = {"fp8": {"report": {"figures": ran}, "versions": versions}}
    (row,) = [line for line in bench_gpu.visit_lines(visit) if line.startswith("| `fp8`")]
    assert row.endswith("| other experts, R3: 0 | 2026-12-01 | H100 | vllm 0.30.0 |")


@pytest.mark.parametrize("name", ["moe_fp8", "real"])
@pytest.mark.parametrize("wheel", [False, True])
def test_the_settings_of_a_run_are_valid_on_a_gpu_and_in_a_dry_run(name, wheel, tmp_path, monkeypatch):
    """The run itself is left out, so that the piece misses its figures at the end."""
    launched = []
    monkeypatch.setattr(gpu_runs, "train", lambda report, *run: launched.append(run) or [])
    monkeypatch.setattr(gpu_runs, "model_of_size", lambda *size: "experiments/starts/tiny/model")
    monkeypatch.setattr(gpu_runs, "smollm2", lambda report: ("dense", "data/built/smollm2/moe"))
    if wheel:
        monkeypatch.setenv(gpu_runs.WHEEL, "x.whl")
    for dry in (False, True):
        with contextlib.suppress(KeyError, ValueError):
            gpu_runs.PIECES[name].run(gpu_kernels.Report(tmp_path, name, dry))
    assert len(launched) == 2
    for config, settings, _ in launched:
        load_config(["--config", config, "model.ep_size=1", "checkpoint.every=0", *settings])


def test_figures_of_a_run_come_from_the_steps_so_far(tmp_path):
    rows = [{"eval/additions/avg_at_8": 0.3}]
    rows += [{"score": n / 10, "seconds_per_step": float(n), "seconds/update": 0.5} for n in (1, 2, 3)]
    file = tmp_path / "metrics.jsonl"
    rows[1]["abs_dlogp"] = 0.5
    file.write_text("\n".join(map(json.dumps, rows)) + '\n{"score": 0.')
    assert gpu_runs.rows_of(file) == rows and gpu_runs.rows_of(tmp_path / "no") == []
    report = gpu_kernels.Report(tmp_path, "piece", True)
    gpu_runs.show_steps(report, rows[:3])
    assert report.figures["steps"] == 2 and report.figures["seconds_per_step"] == 2.0
    gpu_runs.show_steps(report, rows)
    assert report.figures["abs_dlogp"] == 0.5, "later steps have no gradient"
    assert report.figures["seconds_per_step"] == 3.0, "the first two steps are a warm-up"


WITHOUT_LIBRARIES = """
import importlib.util, sys
from pathlib import Path

gone, find_spec = ("deepspeed", "transformers", "safetensors", "vllm", "accelerate"), importlib.util.find_spec
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in gone:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
importlib.util.find_spec = lambda name: None if name in gone else find_spec(name)
from experiments.bench import gpu  # the runner itself
from experiments.bench.gpu_kernels import Report, update
report = Report(Path(sys.argv[1]), "update", dry=True)
update(report)
print(len(report.figures))
"""


@pytest.mark.slow(process="others")
def test_pieces_of_kernels_need_torch_and_triton_alone(tmp_path):
    command = [sys.executable, "-c", WITHOUT_LIBRARIES, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(120))
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


@pytest.mark.slow
def test_a_piece_that_fails_is_reported_and_run_again(tmp_path):
    gpu_kernels.Report(tmp_path, "experts", True, {"date": "2026-01-01"}).figures["error"] = "x"
    (tmp_path / "greedy_bf16.json").mkdir()  # where `bf16` writes
    done = gpu("visit", tmp_path, "--pieces", "experts", "bf16")
    assert done.returncode == 1 and "**FAIL** it ran to its end" in done.stdout
    report = json.loads((tmp_path / "report_visit.json").read_text())
    assert "greedy_bf16.json" in report["bf16"]["report"]["figures"]["error"]
    assert report["experts"]["finished"] and "triton" in report["experts"]["report"]["figures"]
    assert gpu("visit", tmp_path, "--pieces", "experts").returncode == 0  # it is there: not run again
    again = json.loads((tmp_path / "report_visit.json").read_text())
    assert again["bf16"] == report["bf16"], "the report holds the pieces of both calls"
    assert "## bf16" in (tmp_path / "report_visit.md").read_text()
    assert "known in kernels are tests, update" in gpu("kernels", tmp_path, "--pieces", "x").stderr


@pytest.mark.parametrize(
    ("capability", "free", "needs", "message"),
    [(None, 0, (), "torch finds no GPU here"), ((8, 0), 140, (), "made for compute capability 9.0"),
     ((10, 0), 140, (), "made for compute capability 9.0"),
     ((9, 0), 30, (), "needs 70 GiB of free GPU memory, here are 30 of 140"), ((9, 0), 130, (), None),
     ((9, 0), 130, ("no_such_package",), "no_such_package is not installed"),
     (None, 0, ("trl",), "TRL is not installed")],
)  # fmt: skip
def test_a_missing_card_or_package_is_told_in_a_line(capability, free, needs, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * 2**30, 140 * 2**30))
    monkeypatch.setattr(bench_gpu, "FREE_S", 0)
    monkeypatch.setattr(bench_gpu.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = bench_gpu.what_is_missing(gpu_kernels.Piece(lambda report: None, "", needs=needs))
    assert found is None if message is None else found.startswith(message) and "\n" not in found


def test_flops_per_token_are_those_that_torch_counts():
    """torch counts the forward pass, with attention over the full square: twice the causal part.

    Embeddings cost nothing, and the last token of a sequence is omitted because it predicts nothing.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    size = gpu_kernels.SIZES["dry"]
    length = 24
    count = 3
    config = Qwen3MoeConfig(**size, intermediate_size=64, norm_topk_prob=True, tie_word_embeddings=False)
    policy = moe_model.Policy(config).double()  # float64 goes through plain products
    moe_model.random_weights(policy, seed=0)
    packed = moe_model.pack([[1]] * count, [[2] * length] * count, "cpu")
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        policy(packed)
    heads = size["num_attention_heads"] * size["head_dim"]
    attention = 2 * size["num_hidden_layers"] * heads * length  # what the mask forbids
    counted = counter.get_total_flops() / (count * length)
    assert counted - attention == pytest.approx(gpu_kernels.flops_per_token(size, length) / 3, rel=1e-12)


def test_the_advantage_collapse_rate_is_that_of_steps_91_to_100():
    rows = [{"step": step, "score": 0.5, "zero_variance_frac": step / 1000} for step in range(1, 120)]
    rows.insert(95, {"step": 95, "eval/set/accuracy": 0.5})
    assert summary.advantage_collapse_rate(rows) == pytest.approx(0.0955, rel=1e-12)
    assert summary.advantage_collapse_rate(rows[:100]) is None  # 99 steps


def test_a_summary_lists_difficulties_of_sets_of_any_name_and_trivial_references(tmp_path, capsys):
    """A set may itself be called difficulty."""
    figures = {"accuracy": 0.5, "avg_at_8": 0.25, "accuracy_difficulty_2.5": 0.75, "cut_at_turns_frac": 0.1}
    figures["accuracy_task_lcm"] = 0.25  # a mean over the sets
    names = ("difficulty", "high-difficulty_8")
    found = {f"eval/{name}/{leaf}": value for name in names for leaf, value in figures.items()}
    (tmp_path / "metrics.jsonl").write_text("")
    sets = dict.fromkeys(names, "digest")
    state = TrainState(
        account=EMPTY_ACCOUNT, first_eval=found, last_eval=found, first_sets=sets, last_sets=sets
    )
    state.evaluated_step = 0
    reports = {"eval/a": {"warning": "the constant answer A is right in 40.0%"}, "b": {"warning": None}}
    (tmp_path / "references.json").write_text(json.dumps(reports))
    summary.write_summary(tmp_path, state)
    assert json.loads((tmp_path / "summary.json").read_text())["references"] == reports
    assert "cut_at_turns_frac_after" not in json.loads((tmp_path / "summary.json").read_text())
    summary.print_summary(tmp_path)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines if "constant" in line] == [["warning:", "eval/a:"]]
    expected = ["difficulty", "2.5", "0.750", "->", "0.750"]
    assert [line for line in lines if line[:1] == ["difficulty"]] == [expected, expected]
    assert ["task", "lcm", "0.250", "->", "0.250"] in lines


def test_an_evaluation_groups_its_prompts_by_level_and_task():
    """The second rank has the prompts 1 and 3; a long text in the column is no task."""
    tasks = ["a/max", "lcm", 5, "lcm" * 20]  # accuracy_task_a_max would be a maximum over ranks
    prompts = [Prompt("", "", "", "", i % 2, columns={"task": task}) for i, task in enumerate(tasks)]
    expected = {"difficulty_0": [], "difficulty_1": [0, 1], "task_a_max_": [], "task_lcm": [0]}
    assert groups_of(prompts, range(1, 4, 2)) == expected
    tasks, levels = ["a/b", "a_b"], [0.1234561, 0.1234562]
    prompts = [Prompt("", "", "", "", level, columns={"task": t}) for level, t in zip(levels, tasks)]
    names = ("difficulty_0.123456", "difficulty_0.123456_", "task_a_b", "task_a_b_")
    assert groups_of(prompts, range(2)) == dict(zip(names, [[0], [1], [0], [1]])), "no name has two groups"


FIRST = {"eval/a/accuracy": 0.25, "eval/b/accuracy": 0.5, "eval/b/accuracy_difficulty_2": 0.5}


@pytest.mark.parametrize("setting", [
    "eval.max_new_tokens=3", "rollout.max_new_tokens=3", "rollout.temperature=0.5", "reward.binary=true",
    "rollout.stop=[x]", "train.num_steps=7",
])  # fmt: skip
def test_settings_that_change_an_evaluation_are_conditions_of_its_figures(setting):
    is_changed = conditions_of(make_config(setting)) != conditions_of(make_config())
    assert is_changed == (not setting.startswith("train"))


AFTER = {  # sets of the last evaluation, its step of 9, and the accuracies before and after
    "the same sets": ({"a": "1", "b": "2"}, 9, 0.375, 0.75),
    "no evaluation at the end": ({"a": "1", "b": "2"}, 0, 0.375, None),
    "one set has other prompts": ({"a": "1", "b": "3"}, 9, 0.25, 0.75),
    "one set is new": ({"b": "2", "c": "4"}, 9, 0.5, 0.75),
    "all sets are new": ({"c": "4"}, 9, None, 0.75),
}


@pytest.mark.parametrize("case", AFTER)
def test_a_summary_compares_the_sets_of_both_evaluations(case, tmp_path, capsys):
    """A run that was extended with other settings of data.eval; figures that nobody measured are null."""
    sets, step, before, after = AFTER[case]
    last = {f"eval/{name}/accuracy": 0.75 for name in sets}
    state = TrainState(step=9, evaluated_step=step, first_eval=FIRST, last_eval=last, account=EMPTY_ACCOUNT)
    state.first_sets, state.last_sets = {"a": "1", "b": "2"}, sets
    rows = [{"step": n, "learning_rate": 1.0} | ({"grad_norm": 1.0} if n < 3 else {}) for n in range(1, 10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary.write_summary(tmp_path, state)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["accuracy_before"], written["accuracy_after"]) == (before, after)
    assert written["mean_abs_dlogp"] is None and written["steps_without_gradient"] == 7
    summary.print_summary(tmp_path)
    printed = capsys.readouterr().out
    assert "nan" not in printed and "7   of 9" in printed
    values = f"{summary.figure(before, '6.3f')} -> {summary.figure(after, '.3f')}"
    assert f"{values}   held-out" in printed and "|dlogp| trainer - engine     not measured" in printed
