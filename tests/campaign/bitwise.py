"""Compare short real runs of this tree with the same runs at a commit, bit for bit.

    python -m tests.campaign.bitwise COMMIT                  # all runs
    python -m tests.campaign.bitwise COMMIT demo teacher     # two of them

Every run takes two ranks, DeepSpeed and vLLM through a few steps. The tool compares all metrics of
metrics.jsonl, except measurements of time and memory, and the SHA-256 of the exported weights. A metric that
only this tree writes is no difference; a missing metric is one. The tool prints one line per run, with the
step and the metric of the first difference, and ends with status 1 if a run differs.

The results at the commit are computed once and kept in --cache, with the commit's files. Runs start from the
weights and prompts of the commit, so the tree may have moved or dropped its own. The run `resume` writes a
checkpoint at the commit, in the first of two stages with a teacher, and continues the run in this tree.
"""

import argparse
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from runtime.provenance import ROOT, git, versions_of
from tests.campaign.verdicts import end_of, rows_of

LIMIT_S = 1800.0  # prevents a run that hangs from blocking the tool forever
# Starts all ranks as forks of a server that has imported the libraries and the modules of the tree in the
# working directory. Prints one line of JSON per launch.
DRIVER = """\
import json, sys
sys.path.insert(0, ".")
from tests import preloaded
if __name__ == "__main__":
    for settings in json.load(sys.stdin):
        done = preloaded.run(2, "train_rl.py", *settings, timeout_s=float(sys.argv[1]))
        print(json.dumps([done.returncode, done.stderr[-4000:]]), flush=True)
"""
TINY = [
    "--config", "{tree}/experiments/environments/tiny.yaml", "model.path={starts}/tiny/model",
    "data.train=[{{path: {starts}/tiny/train.jsonl, limit: 400}}]",
    "data.eval=[{{path: {starts}/tiny/test.jsonl, name: additions, limit: 20}}]", "train.num_steps=3",
    "rollout.prompts_per_step=8", "rollout.group_size=4", "checkpoint.every=0", "eval.every=0",
    "eval.num_samples=2", "run.log_every=1", "reward.timeout_s=300",
]  # fmt: skip
HABITS = [
    *TINY, "model.path={starts}/habits/model",
    "data.train=[{{path: {starts}/habits/train.jsonl, limit: 60}}]",
    "data.eval=[{{path: {starts}/habits/test.jsonl, name: additions, limit: 20}}]",
]  # fmt: skip
# A teacher's settings are written in the form of older commits; see RENAMED.
TAUGHT = [*HABITS, "zero_variance.teacher={starts}/habits_teacher", "rollout.group_size=8"]
ROWS = "data.train=[{{path: {starts}/tiny/train.jsonl, "
FEW = [*TINY, f"{ROWS}limit: 24}}}}]", "train.num_steps=8"]
SHARES = f"{ROWS}limit: 40, kind: characters, columns: {{{{kind: null}}}}}}}}]"
SUM = f"{ROWS}kind: 0.7*exact + 0.3*characters, columns: {{{{kind: null}}}}}}}}]"
STAGES = """stages=[
    {{name: short, until: {{steps: 3}}, rollout: {{max_new_tokens: 4, group_size: 2}},
      data: {{train: [{{path: {starts}/tiny/train.jsonl, difficulty: [1, 3]}}]}}}},
    {{name: mixed, until: {{metric: eval/additions/accuracy, plateau: 1}}, eval: {{max_new_tokens: 1}},
      train: {{learning_rate: 1.0e-3}},
      data: {{train: [{{path: {starts}/tiny/train.jsonl, difficulty: [2, 2]}},
                      {{path: {starts}/tiny/train.jsonl, difficulty: [4, 5], name: hard, weight: 0.5}}]}}}},
    {{name: last, algorithm: {{kl_coef: 0.01}}, train: {{minibatches_per_step: 2}}}}]"""
TWO_STAGES = """stages=[
    {{name: short, until: {{steps: 3}}, rollout: {{max_new_tokens: 4}}}},
    {{name: long, train: {{minibatches_per_step: 2}}}}]"""
JUDGE = """\
import zlib
def ask(questions):
    return ["Verdict: " + ("Better", "Worse", "Tie")[zlib.crc32(q.encode()) % 3] for q in questions]
"""


def methods(base: list[str], *launches: str) -> list[list[str]]:
    """Return the settings of one launch per text, which names files of experiments/methods and settings."""
    return [
        [*base, *(part for word in words.split() for part in (
            [word] if "=" in word else ["--config", f"{{tree}}/experiments/methods/{word}.yaml"]
        ))]
        for words in launches
    ]  # fmt: skip


UPDATES = "train.minibatches_per_step=4"
RUNS: dict[str, list[list[str]]] = {  # the settings of each launch of a run
    "demo": methods(
        [*TINY, "eval.every=3"], "rollout.prompts_per_step=32 rollout.group_size=8 train.num_steps=6"
    ),
    "methods": methods(
        TINY, f"espo {UPDATES}", f"gspo {UPDATES}", f"dapo {UPDATES}", f"gmpo {UPDATES}",
        "cispo several_passes", f"dr_grpo algorithm.kl_coef=0.01 {UPDATES}",
    ),
    "plugins": methods(TINY, f"sapo top_entropy batch_std {UPDATES}", f"vespo clip_cov {UPDATES}", "rloo")
    + methods([*TINY, SUM], f"dppo_tv gdpo {UPDATES}"),
    "greso": methods(FEW, "greso"),
    "probing": methods([*FEW, SHARES, "rollout.group_size=8"], "zero_variance train.num_steps=6")
    + methods([*FEW, "rollout.group_size=8"], f"rl_zvp zero_variance espo {UPDATES}"),
    "corrected": methods(
        [*TINY, "rollout.dtype=bfloat16"], f"tis_token replay_r3 rollout.fp8=simulate {UPDATES}",
        f"tis_sequence replay_r2 {UPDATES}", f"icepop {UPDATES}", "bypass",
    ),
    "centering": methods([*TINY, "rollout.dtype=bfloat16"], "score_centering", "score_centering tis_token"),
    "teacher": [
        [*TAUGHT, "zero_variance.teacher_coef=0.5", "zero_variance.teacher_token_cost=0.5", UPDATES],
        [*TAUGHT, "zero_variance.teacher_groups=zero_variance", "model.ep_size=1"],
    ],
    "distillation": [[*TAUGHT, "zero_variance.teacher_groups=every", UPDATES]],
    "stages": [[
        *TINY, STAGES, "train.num_steps=7", "eval.every=2", "zero_variance.history=true",
        "eval.max_new_tokens=8",
    ]],
    "turns": [[
        *TINY, "model.path={starts}/calculator/model", "data.chat=always",
        "data.tools=[data.calculator:calc]",
        "data.train=[{{path: {starts}/calculator/train.jsonl, kind: 'data.calculator:score'}}]",
        "data.eval=[{{path: {starts}/calculator/hard.jsonl, name: hard, kind: numeric, limit: 20}}]",
        "rollout.max_new_tokens=48", "rollout.max_turns=3", "rollout.tool_workers=1",
        "rollout.tool_timeout_s=300", "rollout.max_tool_chars=16",
    ]],
    "judge": methods(
        [*TINY, "reward.judge=generative", "reward.judge_path={inputs}/judge.py:ask"],
        "reward.judge_mode=pairwise_reference", "reward.judge_mode=round_robin",
    ),
    "resume": [[*TAUGHT, TWO_STAGES, "train.num_steps=5", "checkpoint.every=2", "checkpoint.keep=9"]],
}  # fmt: skip
RENAMED = {  # settings of older commits and their names in a tree with extras/
    "zero_variance.teacher=": "teacher.path=",
    "zero_variance.teacher_groups=": "teacher.groups=",
    "zero_variance.teacher_coef=": "teacher.coef=",
    "zero_variance.teacher_token_cost=": "teacher.token_cost=",
}
KEPT = "step_2"  # the checkpoint from which `resume` continues


def settings_in(tree: Path, settings: list[str], inputs: Path) -> list[str]:
    """Fill in the folders, and use the names of settings that the tree knows."""
    starts = inputs / "tree" / "experiments" / "starts"
    words = [word.format(tree=tree, starts=starts, inputs=inputs) for word in settings]
    for old, new in RENAMED.items() if (tree / "extras").is_dir() else ():
        words = [new + word.removeprefix(old) if word.startswith(old) else word for word in words]
    return words


def launch(tree: Path, launches: list[list[str]]) -> None:
    """Launch a tree's train_rl.py once per list of settings; RuntimeError if a launch fails."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(LIMIT_S)], input=json.dumps(launches), cwd=tree, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        code, errors = json.loads(line)
        if code:
            raise RuntimeError(end_of(errors))
    if done.returncode:
        raise RuntimeError(end_of(done.stderr))


def digest_of(model: Path) -> str:
    """Return the SHA-256 of all names and bytes of exported weights."""
    import torch
    from safetensors.torch import load_file

    weights = {
        name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def results_of(folders: list[Path]) -> list[dict]:
    """Return the metrics and the digest of the weights of each finished run."""
    return [{"rows": rows_of(folder), "weights": digest_of(folder / "model")} for folder in folders]


def replace_folder(source: Path, target: Path) -> None:
    """Move a finished folder to its place in the cache, unless another process was faster."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        source.rename(target)
    except OSError:
        shutil.rmtree(source)


def inputs_of(commit: str, cache: Path) -> Path:
    """Return the folder of a commit in the cache, with its files in `tree`."""
    folder = cache / commit[:12]
    if not (folder / "tree").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "judge.py").write_text(JUDGE)
        unpacked = Path(tempfile.mkdtemp(dir=folder))
        command = ["git", "-C", str(ROOT), "archive", commit, "--", ".", ":(exclude)experiments/studies"]
        archive = subprocess.run(command, check=True, capture_output=True).stdout
        tarfile.open(fileobj=io.BytesIO(archive)).extractall(unpacked, filter="data")
        replace_folder(unpacked, folder / "tree")
    return folder


def reference_of(name: str, inputs: Path) -> Path:
    """Return the cached folder of a run at the commit: results.json and, for `resume`, the run's folder."""
    key = hashlib.sha256(json.dumps([RUNS[name], JUDGE, versions_of()]).encode()).hexdigest()[:8]
    target = inputs / f"{name}_{key}"
    if not target.is_dir():
        folder = Path(tempfile.mkdtemp(dir=inputs))
        tree = inputs / "tree"
        run_dirs = [folder / str(i) for i in range(len(RUNS[name]))]
        pairs = zip(RUNS[name], run_dirs, strict=True)
        launch(tree, [[*settings_in(tree, words, inputs), f"run.dir={run_dir}"] for words, run_dir in pairs])
        (folder / "results.json").write_text(json.dumps(results_of(run_dirs)))
        for run_dir in run_dirs if name != "resume" else ():
            shutil.rmtree(run_dir)
        replace_folder(folder, target)
    return target


def results_here(name: str, inputs: Path, reference: Path) -> list[dict]:
    """Run the launches in this tree, or continue the reference's run from its checkpoint KEPT."""
    with tempfile.TemporaryDirectory() as folder:
        run_dirs = [Path(folder) / str(i) for i in range(len(RUNS[name]))]
        if name == "resume":
            shutil.copytree(reference / "0", run_dirs[0])
            shutil.rmtree(run_dirs[0] / "model")
            for checkpoint in (run_dirs[0] / "checkpoints").iterdir():
                if checkpoint.name != KEPT:
                    shutil.rmtree(checkpoint)
        pairs = zip(RUNS[name], run_dirs, strict=True)
        launch(ROOT, [[*settings_in(ROOT, words, inputs), f"run.dir={run_dir}"] for words, run_dir in pairs])
        return results_of(run_dirs)


def difference(expected: list[dict], actual: list[dict]) -> str | None:
    """Return the first difference between the launches of a run, or None."""
    for number, (one, other) in enumerate(zip(expected, actual, strict=True), 1):
        where = f"launch {number}, " if len(expected) > 1 else ""
        for row, recorded in zip(other["rows"], one["rows"]):
            for name, value in recorded.items():
                if name not in row:
                    return f"{where}step {recorded['step']}: {name} is missing"
                if json.dumps(row[name]) != json.dumps(value):  # NaN equals NaN
                    return f"{where}step {recorded['step']}: {name} is {row[name]}, was {value}"
        if len(one["rows"]) != len(other["rows"]):
            return f"{where}{len(other['rows'])} rows, not {len(one['rows'])}"
        if one["weights"] != other["weights"]:
            return f"{where}the exported weights differ"
    return None


def main() -> None:
    """Compare the named runs and print one line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"default: all of {', '.join(RUNS)}")
    cache = Path(tempfile.gettempdir()) / "bitwise"
    text = "folder for the results at the commit (default: %(default)s)"
    parser.add_argument("--cache", type=Path, metavar="FOLDER", default=cache, help=text)
    args = parser.parse_args()
    if unknown := [name for name in args.runs if name not in RUNS]:
        parser.error(f"no run {', '.join(unknown)}; choose among {', '.join(RUNS)}")
    commit = git("rev-parse", "--verify", "--quiet", f"{args.commit}^{{commit}}")
    if commit is None:
        parser.error(f"COMMIT {args.commit}: no such commit in this repository")
    inputs = inputs_of(commit.strip(), args.cache.resolve())
    differs = False
    for name in args.runs or RUNS:
        try:
            reference = reference_of(name, inputs)
            expected = json.loads((reference / "results.json").read_text())
            found = difference(expected, results_here(name, inputs, reference))
        except RuntimeError as error:
            found = f"failed: {error}"
        differs |= found is not None
        print(f"{name}: {found or 'equal'}", flush=True)
    sys.exit(differs)


if __name__ == "__main__":
    main()
