"""Kill and starve runs of a pretrained model (see faults.py): out of memory, kills in rollout and update.

The model is the folder of --real, by default the dense SmolLM2-135M of `python -m data.smollm2`. Two ranks
take about 8 GiB together. Without the folder, or without the prompts of `python -m data.instructions`, the
cases are left out.
"""

import json
import shutil
import signal
import time
from functools import partial
from pathlib import Path

from experiments.bench.common import ROOT, TRAINER
from tests import preloaded
from tests.campaign.started import Started, start_trainer
from tests.campaign.verdicts import LEFT_S, Attempt, Bench, Failed, end_of, refusal

DENSE = ROOT / "data" / "built" / "smollm2" / "dense"
PROMPTS = ROOT / "data" / "built" / "instructions" / "train.jsonl"
LIMIT_S = 400.0  # time limit of a run; three steps take about a minute
STARVE_BYTES = 64 * 2**20  # memory that a starved update may add: less than the gradients

# Both functions leave a mark when they are called, which tells the campaign the phase of a run. With STARVE
# in the environment, the first update gets that many bytes on top of the rank's memory (RLIMIT_DATA).
MARKS = """
import os, re, resource
import torch.distributed as dist

def score(completion, answer):
    with open(__file__ + "_rollout", "a") as file: file.write("x")
    return sum(letter in "aeiou" for letter in completion) / (1 + len(completion))

def unchanged(inputs):
    with open(__file__ + "_update", "a") as file: file.write("x")
    if "STARVE" in os.environ and dist.is_initialized():
        with open("/proc/self/status") as file: status = file.read()
        limit = 1024 * int(re.search("VmData:[^0-9]*([0-9]+)", status)[1]) + int(os.environ["STARVE"])
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return inputs.advantages
"""


def has_experts(model: Path) -> bool:
    """Tell whether a model is a Mixtral with several experts."""
    return json.loads((model / "config.json").read_text()).get("num_local_experts", 1) > 1


def workload(model: Path, marks: Path) -> list[str]:
    """Return the settings of three steps with a checkpoint after each."""
    source = f"{{path: {PROMPTS}, kind: '{marks}:score', columns: {{kind: null}}}}"
    return [
        f"model.path={model}", f"model.ep_size={2 if has_experts(model) else 1}", "model.dtype=float32",
        "model.activation_checkpointing=true", f"data.train=[{source}]", "data.chat=always",
        "rollout.prompts_per_step=4", "rollout.group_size=2", "rollout.max_prompt_tokens=128",
        "rollout.max_new_tokens=16", "rollout.kv_cache_gib=0.05", "rollout.max_num_seqs=2",
        f"algorithm.select={marks}:unchanged", "train.num_steps=3", "train.learning_rate=2.0e-5",
        "train.micro_batch_tokens=512", "eval.every=0", "checkpoint.every=1", "run.log_every=1",
    ]  # fmt: skip


def real_bench(model: Path, folder: Path, commit: str) -> Bench:
    """Return the bench of the cases beside `folder`, after an undisturbed run if this commit has none."""
    marks = folder.parent / "marks.py"
    marks.write_text(MARKS)
    reference = folder.parent / "undisturbed"
    note = folder.parent / "undisturbed.json"
    made = {"commit": commit, "model": str(model)}
    bench = Bench(preloaded.run, workload(model, marks), reference, limit_s=LIMIT_S)
    if not note.is_file() or json.loads(note.read_text()) != made:
        shutil.rmtree(reference, ignore_errors=True)
        done = bench.run(f"run.dir={reference}")
        if done.returncode:
            raise Failed(f"the undisturbed run: {end_of(done.stderr)}")
        note.write_text(json.dumps(made))
    return bench


def wait_for(run: Started, is_time, event: str) -> None:
    """Poll until is_time() is true; raise Failed if the run ends first or after LIMIT_S."""
    while not is_time():
        if run.process.poll() is not None or run.seconds() > LIMIT_S:
            raise Failed(f"the run ended before {event}: {end_of(run.log.read_text(errors='replace'))}")
        time.sleep(0.01)


def num_rows(run_dir: Path) -> int:
    """Return the number of finished steps in metrics.jsonl."""
    file = run_dir / "metrics.jsonl"
    return file.read_text().count("\n") if file.is_file() else 0


def kill_in(phase: str, target: str, model: Path, commit: str, _: Bench, folder: Path) -> tuple[str, str]:
    """Kill a rank in this phase of the second step, resume, and compare with the undisturbed run."""
    bench = real_bench(model, folder, commit)
    marks = {name: folder.parent / f"marks.py_{name}" for name in ("rollout", "update")}
    run_dir = folder / "run"
    run = start_trainer(run_dir, *bench.workload)
    try:
        wait_for(run, lambda: num_rows(run_dir) == 1, "the end of step 1")
        sizes = {name: mark.stat().st_size for name, mark in marks.items()}
        wait_for(run, lambda: marks[phase].stat().st_size > sizes[phase], f"the {phase} of step 2")
        run.hit(target, signal.SIGKILL)
        took = run.wait_until_gone(LEFT_S, f"{target} killed in the {phase} of step 2")
        is_later = phase == "rollout" and marks["update"].stat().st_size > sizes["update"]
        if is_later or num_rows(run_dir) != 1:
            raise Failed(f"the kill came after the {phase} of step 2")
    finally:
        run.kill()
    bench.must_be_same(run_dir)
    return "same", f"{target} killed in the {phase} of step 2, gone after {took:.1f} s"


def refuse_estimate(model: Path, commit: str, _: Bench, folder: Path) -> tuple[str, str]:
    """Give a run less memory than its estimate: the refusal names a setting that fits."""
    bench = real_bench(model, folder, commit)
    too_large = ("train.micro_batch_tokens=8192", "model.activation_checkpointing=false")
    memory = f"run.memory_gib={18 if has_experts(model) else 12}"
    name = "model.activation_checkpointing=true"
    return "refused", bench.must_refuse(name, f"run.dir={folder / 'run'}", *too_large, memory)


def starve(model: Path, commit: str, _: Bench, folder: Path) -> tuple[str, str]:
    """Let the ranks run out of memory in the first update: one line says so.

    With the limit lifted the same command then finishes.
    """
    bench = real_bench(model, folder, commit)
    run_dir = folder / "run"
    settings = (*bench.workload, f"run.dir={run_dir}")
    environment = {"STARVE": str(STARVE_BYTES)}
    done = preloaded.run(2, str(TRAINER), *settings, timeout_s=LIMIT_S, env=environment)
    line = refusal(done, "memory")
    bench.must_be_same(run_dir)
    return "refused", line


def real_cases(model: Path, commit: str) -> dict[str, Attempt]:
    """Return the cases at the size of a pretrained model; none if the model or its prompts are missing."""
    if not (model / "config.json").is_file() or not PROMPTS.is_file():
        return {}
    cases = {
        f"{target} killed in the {phase}": partial(kill_in, phase, target, model, commit)
        for phase, target in (("rollout", "rank 1"), ("update", "rank 0"))
    }
    cases["estimate exceeds the memory"] = partial(refuse_estimate, model, commit)
    cases["out of memory in an update"] = partial(starve, model, commit)
    return cases
