"""Evaluate a model on prompt sets, and make a page for reading the completions of a model or a training run.

    python experiments/evaluate.py --model data/built/tiny/model --data data/built/tiny/test.jsonl \\
        --samples 8 --max-new-tokens 16 --dtype float32 --kv-cache-gib 0.25 \\
        --json runs/tiny.json --html runs/tiny.html
    python experiments/evaluate.py --model runs/espo --data test.jsonl --json e.json  # or a running one
    torchrun --nproc-per-node=8 experiments/evaluate.py --model MODEL --data FILE --json F.json --html F.html
    python experiments/evaluate.py --run runs/espo --html espo.html    # reads samples.jsonl, needs no engine
    python experiments/evaluate.py --run runs/{espo,grpo}/eval_samples.jsonl --html both.html  # side by side

--model is the folder of a Hugging Face checkpoint, the name of a model on the hub, an export (run.dir/model),
a checkpoint of a run, or a run. For a run, the newest checkpoint is evaluated, even while the run trains.
Each prompt is completed once greedily and --samples times by sampling. Settings of train_rl.py's sections
data, rollout and reward may follow the options, for example rollout.stop=[...] reward.timeout_s=30
data.on_bad_row=drop. docs/evaluation.md explains the estimators of the figures and the use of the page.

Output files:
    --json         figures with 95 % intervals, over all prompts, by source, difficulty and task; the settings
    --completions  JSONL, one row per completion (default: NAME_completions.jsonl beside --json or --html)
    --html         one page for reading the completions; works offline

--data takes files and hub names or, in braces, a prompt set with the settings of data.eval:
    --data '{path: HuggingFaceH4/MATH-500, split: test, columns: {prompt: problem, difficulty: level}}'
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run as a script: for the modules of the project

import numpy as np
import yaml
from pydantic import ValidationError

from data.formats import find_files, is_saved_to_disk
from data.prompts import DataSettings, Prompt, PromptSource
from experiments.bench.common import replace_text, write_json
from experiments.page.build import build_page, finite, group_rows, reading_notes, text_pieces, token_details
from reward import RewardPool, Verdict, check_functions, impossible_references, start_pool
from runtime.config import (
    Section,
    command_line,
    explain,
    flat_settings,
    merge,
    read_mapping,
    read_override,
    with_settings_apart,
)
from runtime.launch import leave, one_line, run
from settings import RewardSettings
from workers import FAILED

NUM_RESAMPLES = 2000  # of a bootstrap
MAX_LEVELS = 12  # beyond, difficulties are merged into NUM_RANGES ranges
NUM_RANGES = 8


# ------------------------------------------------------------------------------------------------------------
# Which model
# ------------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def open_model(folder: Path) -> Iterator[tuple[Path, str]]:
    """Return a context with the folder of a model's files, and a name for the model.

    folder: a path, or the name of a model on the hub, which is downloaded.

    A running training deletes old checkpoints. The files of the newest checkpoint are therefore hard-linked
    into a temporary folder beside the checkpoints for the length of the context; links take no disk space.
    """
    from runtime.checkpoint import list_checkpoints

    name = folder.resolve().name
    if not folder.exists():
        from data.score import folder_of_model

        yield folder_of_model(folder), name
        return
    if (folder / "config.json").is_file():
        yield folder, (name if name != "model" else f"{folder.resolve().parent.name}/model")
        return
    checkpoints = folder / "checkpoints"
    finished = list_checkpoints(checkpoints)
    has_adapters = bool(finished) and (finished[-1] / "adapter").is_dir()  # of lora.rank, without a model
    if not finished or has_adapters:
        export = folder / "model" / "config.json"
        is_old = has_adapters and export.is_file() and export.stat().st_mtime < finished[-1].stat().st_mtime
        if is_old or not export.is_file():
            raise ValueError(
                f"--model {folder}: its checkpoints hold adapters alone, and model/ of the end of the run is "
                "missing or older than the last"
                if has_adapters
                else f"--model {folder}: not a model; expected a Hugging Face checkpoint (config.json), an "
                "export or checkpoint (model/config.json), or a run with a finished checkpoint "
                "(checkpoints/step_N)"
            )
        yield folder / "model", name
        return
    parent = checkpoints if os.access(checkpoints, os.W_OK) else None  # elsewhere, files are copied
    with tempfile.TemporaryDirectory(prefix="evaluate_", dir=parent) as scratch:
        step = link_newest(checkpoints, Path(scratch) / "model")
        yield Path(scratch) / "model", f"{name} at step {int(step.removeprefix('step_'))}"


def link_newest(checkpoints: Path, target: Path) -> str:
    """Link the model files of the newest checkpoint into a folder; return the name of the checkpoint.

    If the run deletes this checkpoint during the copy, a newer checkpoint exists and is tried next.
    ValueError if five checkpoints in a row cannot be read.
    """
    from runtime.checkpoint import list_checkpoints

    for _ in range(5):
        newest = list_checkpoints(checkpoints)[-1]
        try:
            shutil.copytree(newest / "model", target, copy_function=link_or_copy)
            return newest.name
        except (FileNotFoundError, shutil.Error):
            shutil.rmtree(target, ignore_errors=True)
    raise ValueError(f"--model: cannot read {newest}/model; check its permissions and files")


def link_or_copy(source: str, target: str) -> None:
    """Hard-link a file, or copy it if the file system lacks links."""
    try:
        os.link(source, target)
    except OSError:  # copying fails as well if the run has deleted the file
        shutil.copy2(source, target)


# ------------------------------------------------------------------------------------------------------------
# Figures
# ------------------------------------------------------------------------------------------------------------
def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Estimate without bias the probability that one of k samples is right (arXiv 2107.03374, eq. 1).

    1 - C(n - c, k) / C(n, k) for c right samples of n: the share of subsets of size k with a right sample.
    Example: with n = 8 and c = 1, pass@4 is 0.5.
    """
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def values_of_k(num_samples: int) -> list[int]:
    """Return the k of pass@k: powers of two up to num_samples, and num_samples; 6 gives [1, 2, 4, 6]."""
    return sorted({2**i for i in range(num_samples.bit_length())} | {num_samples} - {0})


def prompt_figures(rows: list[dict]) -> dict[str, float]:
    """Return the figures of a prompt from the rows of its completions.

    accuracy: reward of the greedy completion. avg_at_K: mean reward of the K samples. pass_at_k: estimated
    from the samples, which are right if their status is "ok". All other figures are means over all
    completions.
    """
    greedy = [row["reward"] for row in rows if row["temperature"] == 0]
    sampled = [row["reward"] for row in rows if row["temperature"] > 0]
    num_right = sum(row["status"] == "ok" for row in rows if row["temperature"] > 0)
    figures = {"accuracy": greedy[0]} if greedy else {}
    if sampled:
        figures[f"avg_at_{len(sampled)}"] = sum(sampled) / len(sampled)
    for k in values_of_k(len(sampled)):
        figures[f"pass_at_{k}"] = pass_at_k(len(sampled), num_right, k)
    figures["completion_tokens"] = sum(row["num_tokens"] for row in rows) / len(rows)
    figures["cut_at_limit_frac"] = sum(row["finish_reason"] == "length" for row in rows) / len(rows)
    failed = [row["by_text"] for row in rows if row["status"] in FAILED]
    figures["failed_frac"] = failed.count(False) / len(rows)
    figures["failed_by_text_frac"] = failed.count(True) / len(rows)
    return figures


def mean_figures(figures: list[dict[str, float]], seed: int) -> dict:
    """Average the figures of prompts, with 95 % intervals by the percentile bootstrap over prompts.

    Returns {"num_prompts": n, name: {"mean", "low", "high"}}; low and high are None for a single prompt.
    """
    from scipy.stats import bootstrap

    table = np.array([list(prompt.values()) for prompt in figures])  # [prompts, figures]
    lows = [None] * table.shape[1]
    highs = [None] * table.shape[1]
    if len(table) > 1:
        interval = bootstrap(
            (table,), np.mean, axis=0, n_resamples=NUM_RESAMPLES, batch=100, method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval  # fmt: skip
        lows = interval.low.tolist()
        highs = interval.high.tolist()
    means = zip(figures[0], table.mean(axis=0).tolist(), lows, highs)
    return {"num_prompts": len(table)} | {n: {"mean": m, "low": lo, "high": hi} for n, m, lo, hi in means}


def grouped(pairs: Iterable[tuple]) -> dict:
    """Return {key: list of its values} of (key, value) pairs, by the first occurrence of each key."""
    groups: dict = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def level_labels(rows: Iterable[dict]) -> dict[tuple[str, float], str]:
    """Return {(set, difficulty): label} in order; of several sets a label begins with the set.

    The difficulties of two sets have different units, so that they are never counted together.
    """
    by_set = grouped((row["source"], row["difficulty"]) for row in rows if row["difficulty"] is not None)
    return {
        (name, value): label if len(by_set) == 1 else f"{name} {label}"
        for name, values in by_set.items()
        for value, label in range_labels(sorted(values)).items()
    }


def range_labels(values: list[float]) -> dict[float, str]:
    """Label each of the sorted difficulties by its number or, if there are many, by a range: "10 to 19".

    The ranges have about equally many prompts.
    """
    distinct = sorted(set(values))
    if len(distinct) <= MAX_LEVELS:
        return {value: f"{value:g}" for value in distinct}
    edges = [values[len(values) * i // NUM_RANGES] for i in range(1, NUM_RANGES)]
    ranges = grouped((sum(value >= edge for edge in edges), value) for value in distinct)
    return {value: f"{levels[0]:g} to {levels[-1]:g}" for levels in ranges.values() for value in levels}


def all_figures(rows: list[dict], seed: int) -> dict:
    """Return the figures over all prompts, by source, and by difficulty and task if prompts have them."""
    groups = grouped((row["prompt_index"], row) for row in rows)
    prompts = [(group[0], prompt_figures(group)) for group in groups.values()]
    by_source = grouped((first["source"], figures) for first, figures in prompts)
    by_task = grouped((first["task"], figures) for first, figures in prompts if first.get("task"))
    rows_of_task = grouped((first["task"], first) for first, _ in prompts if first.get("task"))
    labels = level_labels(first for first, _ in prompts)
    levels = [labels.get((first["source"], first["difficulty"])) for first, _ in prompts]
    by_level = grouped((level, figures) for level, (_, figures) in zip(levels, prompts))
    tasks = {task: mean_figures(by_task[task], seed) for task in sorted(by_task)}
    for task, constant in best_constants(rows_of_task).items():
        tasks[task]["best_constant"] = {"mean": constant}
    return {
        "all": mean_figures([figures for _, figures in prompts], seed),
        "source": {source: mean_figures(figures, seed) for source, figures in by_source.items()},
        "difficulty": {name: mean_figures(by_level[name], seed) for name in dict.fromkeys(labels.values())},
        "task": tasks,
    }


def best_constants(rows_of_task: dict[str, list[dict]]) -> dict[str, float]:
    """Return the share of rows that the best constant answer solves, of each task of kind reasoning_gym.

    Rows whose verifier raises on their own reference answer are left out.
    """
    from data.reasoning_gym import best_constant
    from verifiers import reasoning_gym

    shares = {}
    for task, rows in sorted(rows_of_task.items()):
        usable = []
        for row in rows:
            with contextlib.suppress(Exception):  # of any type, because the row may hold anything
                if row["kind"] == "reasoning_gym":
                    answer = row["answer"]
                    reasoning_gym.score(reasoning_gym.read_row(answer), reasoning_gym.reference_of(answer))
                    usable.append(row)
        if usable:
            shares[task] = best_constant(usable)[1]
    return shares


def mismatch_figures(rows: list[dict]) -> dict[str, float]:
    """Compare the log-probabilities of trainer and engine over all tokens; {} without the trainer's.

    Returns mean, maximum and 99th percentile of abs_dlogp in nats, and mismatch_k3, see docs/metrics.md.
    """
    compared = [row for row in rows if row.get("trainer_logprobs")]
    if not compared:
        return {}
    trainer = np.concatenate([row["trainer_logprobs"] for row in compared]).astype(float)
    engine = np.concatenate([row["rollout_logprobs"] for row in compared]).astype(float)
    d = (trainer - engine)[~np.isnan(engine)]  # inserted tokens of episodes have none
    return {
        "abs_dlogp": float(np.abs(d).mean()),
        "abs_dlogp_p99": float(np.percentile(np.abs(d), 99)),
        "abs_dlogp_max": float(np.abs(d).max()),
        "mismatch_k3": float((np.expm1(d) - d).mean()),
    }


LABELS = {
    "accuracy": "greedy",
    "best_constant": "constant",
    "completion_tokens": "tokens",
    "cut_at_limit_frac": "cut at limit",
    "failed_frac": "failed",
    "failed_by_text_frac": "failed by text",
}


def label_of(name: str) -> str:
    """Return the short name of a figure, for example greedy, avg@8 or pass@4."""
    return LABELS.get(name, name.replace("_at_", "@"))


def show_figure(name: str, value: float | None) -> str:
    """Format a figure: one digit for tokens, three digits for shares; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.1f}" if "tokens" in name else f"{value:.3f}"


def table_text(figures: dict) -> str:
    """Format the figures for a terminal: intervals over all prompts, then means by source, level and task."""
    names = [name for name in figures["all"] if name != "num_prompts"]
    lines = [f"{figures['all']['num_prompts']} prompts; 95 % intervals by bootstrap over prompts"]
    for name in names:
        mean, low, high = (show_figure(name, figures["all"][name][key]) for key in ("mean", "low", "high"))
        lines.append(f"  {label_of(name):<22}{mean:>9}   {low} to {high}")
    groups = [(k, n, f) for k in figures if k != "all" for n, f in figures[k].items() if len(figures[k]) > 1]
    if groups:
        width = max(len(f"{kind} {name}") for kind, name, _ in groups) + 2
        columns = [name for name in names if not name.endswith("_frac")]
        columns += ["best_constant"] if any("best_constant" in means for *_, means in groups) else []
        heads = [label_of(name) for name in columns]
        lines += ["", " " * (width + 2) + f"{'prompts':>8}" + "".join(f"{head:>10}" for head in heads)]
        for kind, name, means in groups:
            cells = "".join(f"{show_figure(c, means.get(c, {}).get('mean')):>10}" for c in columns)
            lines.append(f"  {kind + ' ' + name:<{width}}{means['num_prompts']:>8}{cells}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------
# Prompts, completions
# ------------------------------------------------------------------------------------------------------------
class Task(NamedTuple):
    """One prompt of the evaluation."""

    prompt_index: int  # number of the prompt over all sets
    place: int  # number of the prompt in its set
    prompt: Prompt
    prompt_ids: list[int]


def load_tasks(settings, tokenizer) -> tuple[list[Task], list[str]]:
    """Load and tokenise the prompts of all sets; return the tasks, and notes to print.

    ValueError names an unusable row of a set, or a reward function that cannot be called.
    """
    from data.stream import load_sets

    functions = settings.reward.functions
    loaded = load_sets(settings.data, tokenizer, settings.rollout.max_prompt_tokens, functions)
    tasks: list[Task] = []
    for prompts, prompt_ids in loaded.eval_sets.values():
        for place, (prompt, ids) in enumerate(zip(prompts, prompt_ids)):
            tasks.append(Task(len(tasks), place, prompt, ids))
    kinds = [source.kind for source in settings.data.eval if source.kind]
    check_functions([*kinds, *functions], [row[:3] for row in verifier_rows(tasks)], settings.reward)
    return tasks, loaded.notes


def verifier_rows(tasks: list[Task]) -> list[tuple[str, str, dict, str]]:
    """Return (kind, answer, fields, prefix of the completion) of each task, the arguments of a verifier."""
    return [(p.kind, p.answer, p.fields, p.prefix) for p in (task.prompt for task in tasks)]


def sample(engine, pool, interaction, tokenizer, tasks: list[Task], args, settings, progress) -> list[dict]:
    """Complete each task greedily and args.samples times; return the rows.

    The seed of a sample is the same as in an evaluation of train_rl.py with this train.seed. interaction:
    tools and environment of data.tools and data.environment, or None.
    """
    from data.stream import seed_of
    from rollout import Request

    temperatures = [0.0] + [settings.rollout.temperature] * args.samples
    jobs = [(task, number, value) for task in tasks for number, value in enumerate(temperatures)]
    requests = [
        Request(
            task.prompt_ids, seed_of(args.seed, "eval", task.prompt.source, task.place, number), temperature,
            settings.rollout.max_new_tokens, group=task.prompt_index,
            group_seed=seed_of(args.seed, "eval", task.prompt.source, task.place),
        )
        for task, number, temperature in jobs
    ]  # fmt: skip
    texts: dict[int, str] = {}

    def submit(index: int, completion) -> None:
        prompt = jobs[index][0].prompt
        texts[index] = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        if completion.verdict is None:
            answer = tokenizer.decode(completion.answer_ids, skip_special_tokens=True)
            fields = {**prompt.fields, **completion.fields}
            pool.submit(index, prompt.kind, answer, prompt.answer, fields, prefix=prompt.prefix)
        progress.update(int(os.environ["WORLD_SIZE"]))  # an estimate: ranks advance at about the same pace

    prompts = [task.prompt for task, _, _ in jobs]
    episodes = interaction.episodes(requests, prompts) if interaction else None
    completions = engine.generate(requests, 0, submit, pool.poll, episodes=episodes)
    verdicts = pool.collect()
    binary = settings.reward.binary
    return [
        row_of(*jobs[index], completion, completion.verdict or verdicts[index], texts[index], binary)
        for index, completion in enumerate(completions)
    ]


def row_of(
    task: Task, number: int, temperature: float, completion, verdict: Verdict, text: str, binary: bool
) -> dict:
    """Make the row of a completion in the JSONL file. binary: rewards below 1 become 0."""
    prompt = task.prompt
    if binary:
        verdict = replace(verdict, reward=float(verdict.reward == 1))
    turns = [{"role": t.role, "num_tokens": t.num_tokens, "sampled": t.sampled} for t in completion.turns]
    episode = {"turns": turns, "num_calls": completion.num_calls} if turns else {}
    return episode | {
        "prompt_index": task.prompt_index, "source": prompt.source, "kind": prompt.kind,
        "difficulty": prompt.difficulty, "task": prompt.task, "prompt": prompt.text,
        "messages": prompt.messages, "answer": prompt.answer, "sample": number,
        "temperature": temperature, "completion": prompt.prefix + text, **asdict(verdict),
        "num_tokens": len(completion.token_ids), "finish_reason": completion.finish_reason,
        "prompt_ids": task.prompt_ids, "token_ids": completion.token_ids,
        "rollout_logprobs": of_sampled(completion.logprobs, completion.sampled_mask),
    }  # fmt: skip


def of_sampled(values: list[float], sampled: list[bool]) -> list[float | None]:
    """Replace the values of inserted tokens by null."""
    return [value if own else None for value, own in zip(values, sampled)]


# ------------------------------------------------------------------------------------------------------------
# The policy of the trainer
# ------------------------------------------------------------------------------------------------------------
def add_trainer_outputs(policy, rows: list[dict], args: argparse.Namespace) -> None:
    """Add trainer_logprobs and entropy to rows.

    Log-probabilities are at the sampling temperature of the row. For greedy completions the temperature is 1,
    because vLLM reports log-probabilities at 1.
    """
    import torch

    from moe_model import pack
    from runtime.schedule import split_rows

    device = next(policy.parameters()).device
    lengths = [len(row["prompt_ids"]) + row["num_tokens"] for row in rows]
    temperatures = [row["temperature"] or 1.0 for row in rows]
    order = sorted(range(len(rows)), key=lambda i: -lengths[i])
    batches = []
    for temperature in sorted(set(temperatures)):
        at_temperature = [i for i in order if temperatures[i] == temperature]
        batches += split_rows(lengths, at_temperature, args.micro_batch_tokens)
    progress = progress_bar(len(rows), "trainer")
    for batch in batches:
        packed = pack([rows[i]["prompt_ids"] for i in batch], [rows[i]["token_ids"] for i in batch], device)
        with torch.no_grad():
            logprobs, entropy, _, _ = policy(packed, temperatures[batch[0]])  # [N], [N]
        sizes = [rows[i]["num_tokens"] for i in batch]
        row_logprobs = logprobs.float().cpu().split(sizes)
        row_entropies = entropy.float().cpu().split(sizes)
        for i, logprobs_of_row, entropy_of_row in zip(batch, row_logprobs, row_entropies):
            sampled = [value is not None for value in rows[i]["rollout_logprobs"]]
            rows[i]["trainer_logprobs"] = of_sampled(logprobs_of_row.tolist(), sampled)
            rows[i]["entropy"] = of_sampled(entropy_of_row.tolist(), sampled)
        progress.update(len(batch))
    progress.close()


# ------------------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------------------
def evaluation_header(result: dict) -> dict:
    """Return the header of an evaluation's page: figures, tables and settings."""
    figures = result["figures"]
    settings = result["settings"]
    means = {name: value for name, value in figures["all"].items() if name != "num_prompts"}
    names = [name for name, value in means.items() if not name.endswith("_frac") or value["mean"] != 0]
    tiles = [tile_of(name, means) for name in names]
    if result["mismatch"]:
        note = "mean difference of the log-probabilities of trainer and engine, in nats"
        mean = f"{result['mismatch']['abs_dlogp']:.1e}"
        tiles.append({"name": "|\u0394 log p|", "unit": "text", "note": note, "mean": mean})
    tables = [
        {
            "name": f"By {kind}",
            "columns": [kind, "prompts", *map(label_of, names)],
            "rows": [
                [group, each["num_prompts"], *(tile_of(name, each) for name in names)]
                for group, each in groups.items()
            ],
        }
        for kind, groups in figures.items()
        if kind != "all" and len(groups) > 1
    ]
    facts = [["prompts", ", ".join(figures["source"])]]
    named = {name: value for name, value in settings.items() if name not in ("data", "changed")}
    facts += [[name.replace("_", " "), value] for name, value in named.items()]
    shown = {f"rollout.{name}" for name in named} | {"data.eval", "data.chat"}
    changed = flat_settings(settings["changed"])
    facts += [[name, json.dumps(value)] for name, value in changed.items() if name not in shown]
    return {
        "title": result["model"], "facts": facts, "tiles": tiles, "tables": tables, "mode": "evaluation",
        "bins": min(settings["samples"] or 1, 20),
    }  # fmt: skip


def tile_of(name: str, means: dict) -> dict:
    """Return the entry of a figure in the header of a page: label, unit, mean and interval."""
    unit = "tokens" if name == "completion_tokens" else "share"
    return {"name": label_of(name), "unit": unit, **means[name]}


def samples_page(*places: Path) -> str:
    """Return the page of the completions of runs; ValueError for a place without any.

    places: folders of runs, for their samples.jsonl, or files of rows: samples.jsonl, eval_samples.jsonl, or
    --completions of this program. Completions of one prompt stand side by side, labelled with the place and
    the step of an evaluation. Of several places the text tells which prompts are one, because numbers shift
    with the sets beside them. Rows with token_ids show tokens if their place is the folder of a run.
    """
    names = [places[0].resolve().name] if len(places) == 1 else list(map(str, places))
    rows = []
    details: list[dict | None] = []
    for place, name in zip(places, names):
        rows_of_place = read_rows(place)
        with_tokens = any("token_ids" in row for row in rows_of_place) and place.is_dir()
        tokenizer = tokenizer_of_run(place) if with_tokens else None
        for row in rows_of_place:
            is_evaluation = "sample" in row
            step = f"step {row['step']}" if is_evaluation and "step" in row else ""
            label = " ".join([name] * (len(places) > 1) + [step] * bool(step))
            has_tokens = tokenizer is not None and "token_ids" in row
            pieces = text_pieces(tokenizer, row["token_ids"]) if has_tokens else []
            details.append(token_details(row, pieces) if has_tokens else None)
            changes = {"step": None} if is_evaluation else {}
            changes |= {"label": label} if label else {}
            rows.append(row | changes | ({"prompt_index": None} if len(places) > 1 else {}))
    order = sorted(range(len(rows)), key=lambda n: rows[n].get("step") or 0)  # steps of two runs by turns
    rows = [rows[n] for n in order]
    prompts, groups = group_rows(rows)
    prompt_details = [[details[order[number]] for number in numbers] for numbers in groups]
    return build_page(samples_header(names, rows, len(prompts)), prompts, prompt_details)


def read_rows(place: Path) -> list[dict]:
    """Read the rows of a run's samples or of a file, without an incomplete last line of a run in training."""
    if not place.exists():
        raise ValueError(f"--run {place}: no such folder or file; name the run.dir of a run, or its *.jsonl")
    file = place / "samples.jsonl" if place.is_dir() else place
    *lines, _ = file.read_text(encoding="utf-8").split("\n") if file.is_file() else [""]
    try:
        rows = [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"--run {place}: {file.name} is no JSONL of completions ({error})") from error
    if not all(isinstance(row, dict) and "completion" in row for row in rows):
        raise ValueError(f"--run {place}: a row of {file.name} holds no completion; name a samples.jsonl")
    if not rows:
        raise ValueError(f"--run {place}: {file.name} has no row yet; rows come every run.log_every steps")
    return rows


def tokenizer_of_run(run_dir: Path):
    """Load the tokenizer of a run from the newest checkpoint or, before the first one, from model.path."""
    from data.chat import load_tokenizer

    try:
        with open_model(run_dir) as (folder, _):
            return load_tokenizer(folder)
    except ValueError:  # no checkpoint yet
        config = yaml.safe_load((run_dir / "config.yaml").read_text())
        return load_tokenizer(config["model"]["path"])


def samples_header(names: list[str], rows: list[dict], num_groups: int) -> dict:
    """Return the header of the page of completions of runs or files with these names.

    Tiles show the first and the last of the models that have labels, and a table shows all: the mean over all
    completions, that of the last tenth of a training, and the share with status ok.
    """
    steps = sorted({row["step"] for row in rows if row.get("step") is not None})
    parts = grouped((row.get("label", ""), row) for row in rows)
    figure_names = ["mean reward", "at the end", "right"] if steps else ["mean reward", "right"]
    cells: dict[str, list[dict]] = {}
    for label, part in parts.items():
        rewards = [row["reward"] for row in part]
        values = {"mean reward": rewards, "at the end": rewards[-max(1, len(part) // 10) :]}
        values["right"] = [row["status"] == "ok" for row in part]
        common = {"unit": "share", "low": None, "note": "of its completions"}
        cells[label] = [
            common | {"name": f"{label} {name}".strip(), "mean": sum(values[name]) / len(values[name])}
            for name in figure_names
        ]
    first, last = next(iter(cells)), next(reversed(cells))
    tiles = [tile for label in dict.fromkeys((first, last)) for tile in cells[label]]
    columns = ["model", "samples", *figure_names]
    table = [[label, len(parts[label]), *cells[label]] for label in cells]
    tables = [{"name": "By model", "columns": columns, "rows": table}] if len(table) > 1 else []
    facts = [["steps", f"{steps[0]} to {steps[-1]}"]] if steps else []
    facts += [["groups", num_groups], ["completions", len(rows)], *reading_notes(rows)]
    return {
        "title": f"{' and '.join(names)}: {'samples of the training' if steps else 'evaluations'}",
        "facts": facts, "tiles": tiles, "tables": tables, "mode": "samples" if steps else "evaluation",
        "pooled": len(parts) > 1, "bins": 0 if steps else 10, "layers": [], "num_experts": 0,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------
def parse_args(argv: list[str]) -> argparse.Namespace:
    """Read the command line; ValueError names the invalid option."""
    parser = command_line("experiments/evaluate.py", __doc__)
    add = parser.add_argument
    add("--model", type=Path, help="folder of a checkpoint, an export or a run; or a name on the hub")
    add("--run", type=Path, nargs="+", help="instead of --model: folders of runs, or their *.jsonl files, "
        "to make the page of their completions, side by side")  # fmt: skip
    add("--data", nargs="+", action="extend", default=[], help="prompt sets: files, hub names, {path: ...}")
    add("--json", type=Path, help="file of the figures")
    add("--html", type=Path, help="file of the page")
    add("--completions", type=Path, help="file of all completions, JSONL (default: beside --json or --html)")
    add("--samples", type=int, default=8, help="K, samples a prompt; 0: greedy only (default: %(default)s)")
    add("--kind", help="verifier of rows without a kind: math, gsm8k, path/file.py:function ...")
    add("--template", help='text around each prompt, with "{prompt}" in it')
    add("--columns", help="names of the columns, for example '{prompt: problem, difficulty: level}'")
    add("--limit", type=int, help="use only the first rows of each set")
    add("--chat", choices=["auto", "always", "never"], help="which prompts are rendered, see data.chat")
    add("--system-prompt", help="system message for rendered prompts that lack a system message")
    add("--max-new-tokens", type=int, default=512, help="limit of a completion (default: %(default)s)")
    add("--temperature", type=float, default=1.0, help="sampling temperature (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of sampling and bootstrap (default: %(default)s)")
    add("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="of engine and trainer")
    add("--kv-cache-gib", type=float, help="GiB of keys and values per rank (default: at most 1 on CPUs)")
    add("--max-num-seqs", type=int, default=256, help="completions at once per rank (default: %(default)s)")
    add("--trainer-logprobs", action=argparse.BooleanOptionalAction, default=True,
        help="also compute entropies and log-probabilities by the trainer's policy")  # fmt: skip
    add("--micro-batch-tokens", type=int, default=16384, help="padded tokens per forward pass of the trainer")
    add("settings", nargs="*", metavar="section.key=value", help="settings of data, rollout and reward")
    args = with_settings_apart(parser.parse_intermixed_args(argv), "data")
    if (args.model is None) == (args.run is None):
        raise ValueError("expected either --model MODEL with --data FILE, or --run RUN_DIR with --html FILE")
    if args.run is not None and (args.html is None or args.data or args.json or args.completions):
        raise ValueError(
            "--run RUN_DIR needs --html FILE and takes no --data, --json or --completions: the page shows "
            "samples of the training"
        )
    if args.model is not None and not args.data:
        raise ValueError("--model needs --data FILE with the prompts")
    if args.samples < 0 or args.micro_batch_tokens < 1:
        raise ValueError("--samples must be at least 0 and --micro-batch-tokens at least 1")
    output = args.json or args.html
    if args.completions is None and output is not None and args.run is None:
        args.completions = output.with_name(f"{output.stem}_completions.jsonl")
    files = [file.resolve() for file in (args.json, args.html, args.completions) if file is not None]
    if len(set(files)) < len(files):
        raise ValueError("--json, --html and --completions must be different files")
    for file in files:  # at once, before work is lost
        if file.is_dir():
            raise ValueError(f"{file} is a folder; name a file for the output")
        file.parent.mkdir(parents=True, exist_ok=True)
    return args


def refuse_overwriting(args: argparse.Namespace, sources: list[PromptSource]) -> None:
    """Raise ValueError if an output file is also a file of prompts."""
    outputs = {file.resolve() for file in (args.json, args.html, args.completions) if file is not None}
    for source in sources:
        local = os.path.expanduser(source.path)
        for file in [] if is_saved_to_disk(local) else find_files(source.path, local, source.split):
            if Path(file).resolve() in outputs:
                problem = f"{file} holds prompts and would be overwritten by the results"
                raise ValueError(f"{problem}; choose another --json, --html or --completions")


def read_settings(args: argparse.Namespace, context: int):
    """Return the settings of data, rollout and reward: defaults < options < section.key=value.

    context: length of the model's context in tokens. rollout.max_prompt_tokens defaults to the context minus
    --max-new-tokens.
    """
    import torch

    from rollout import RolloutSettings

    class EvaluationSettings(Section):
        data: DataSettings
        rollout: RolloutSettings
        reward: RewardSettings = RewardSettings()

    common = {"kind": args.kind, "template": args.template, "limit": args.limit}
    common |= {"columns": read_mapping("--columns", args.columns) if args.columns else None}
    data = {"eval": [], "chat": args.chat, "system_prompt": args.system_prompt}
    for text in args.data:
        source = read_mapping("--data", text) if text.lstrip().startswith("{") else {"path": text}
        data["eval"].append({key: value for key, value in common.items() if value is not None} | source)
    names = ("temperature", "max_new_tokens", "dtype", "kv_cache_gib", "max_num_seqs")
    trainer_needs_gpu = args.trainer_logprobs and torch.cuda.is_available()  # level 2 frees the weights
    rollout = {"sleep_level": 2 if trainer_needs_gpu else 0, "capture_routes": "off"}
    rollout |= {name: getattr(args, name) for name in names}
    values = {"data": {key: value for key, value in data.items() if value is not None}, "rollout": rollout}
    for override in args.settings:
        values = merge(values, read_override(override))
    try:
        settings = EvaluationSettings.model_validate(values)
    except ValidationError as error:
        raise ValueError(explain(error, EvaluationSettings)) from error
    most = context - settings.rollout.max_new_tokens
    if "max_prompt_tokens" not in settings.rollout.model_fields_set:
        filled = settings.rollout.model_copy(update={"max_prompt_tokens": max(most, 1)})
        settings = settings.model_copy(update={"rollout": filled})
    if most < 1:
        raise ValueError(
            f"--max-new-tokens {settings.rollout.max_new_tokens} leaves no room for a prompt in the model's "
            f"context of {context} tokens; choose a smaller number"
        )
    if settings.rollout.max_prompt_tokens > most:
        raise ValueError(
            f"rollout.max_prompt_tokens {settings.rollout.max_prompt_tokens} + --max-new-tokens "
            f"{settings.rollout.max_new_tokens} exceed the model's context of {context} tokens; lower either"
        )
    return settings


def without_auto(settings, tokenizer, date: str | None):
    """Return the settings with rank 0's choices of rollout.dtype auto and data.date null. Collective.

    date: of the prompts if the chat template writes one; None: today.
    """
    import torch

    from data.chat import reads_clock
    from lifecycle import with_date
    from memory_plan import with_setting
    from moe_model import engine_dtype
    from runtime.schedule import from_rank_0

    dtype = from_rank_0(engine_dtype(settings.rollout, torch.cuda.is_available()))
    settings = with_setting(settings, "rollout.dtype", dtype)
    if not reads_clock(tokenizer):
        return settings
    return with_date(with_setting(settings, "data.date", date))


def evaluate(args: argparse.Namespace, folder: Path, name: str) -> None:
    """Evaluate the model in a folder and write the output files. Collective."""
    from data.chat import load_tokenizer
    from data.stream import digest_of_rows
    from moe_model import load_config
    from runtime.agreement import check_inputs_agree, digests_of_input
    from runtime.checkpoint import digest_of_weights

    hf_config = load_config(folder)
    settings = read_settings(args, hf_config.max_position_embeddings)
    refuse_overwriting(args, settings.data.eval)
    tokenizer = load_tokenizer(folder)
    settings = without_auto(settings, tokenizer, date_of(args.model, settings))
    tasks, notes = load_tasks(settings, tokenizer)
    rows_of_rank = {"--data": digest_of_rows((task.prompt, task.prompt_ids) for task in tasks)}
    check_inputs_agree(digests_of_input("--model", folder) | rows_of_rank)
    say("\n".join([*notes, *training_warnings(args.model, settings)]))
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    local_tasks = tasks[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
    engine, rows, seconds["sampling"] = generate(args, settings, folder, tokenizer, tasks, local_tasks)
    seconds["engine"] = time.perf_counter() - start
    result = {"model": name, "weights": digest_of_weights(folder)}
    result |= {"settings": settings_of(args, settings), "seconds": seconds}
    write_results(args, result, gather(rows))  # before the trainer, which may fail
    if args.trainer_logprobs:
        engine.sleep()
        start = time.perf_counter()
        add_trainer_outputs(build_trainer(folder, settings), rows, args)
        seconds["trainer"] = time.perf_counter() - start
    rows = gather(rows)
    if rows:
        write_results(args, result, rows)
        if args.html:
            replace_text(args.html, evaluation_page(result, rows, tokenizer))
        report(args, result)


TRAINED_WITH = (
    "data.chat", "data.system_prompt", "data.chat_template_args", "data.answer_prefix", "data.tools",
    "data.environment", "rollout.stop", "rollout.temperature", "rollout.max_turns", "reward.binary",
    "reward.scale",
)  # fmt: skip


def record_of(model: Path, name: str) -> dict:
    """Read config.yaml or versions.json of the run that trained a model; {} for any other folder."""
    folders = (model, *model.resolve().parents[:3])  # at most run/checkpoints/step_N/model
    file = next((file for folder in folders if (file := folder / name).is_file()), None)
    try:
        record = yaml.safe_load(file.read_text()) if file else {}
    except (OSError, ValueError, yaml.YAMLError):
        record = {}
    return record if isinstance(record, dict) else {}


def date_of(model: Path, settings) -> str | None:
    """Return the date that the chat template writes: data.date, or that of the run; None: today."""
    return settings.data.date or record_of(model, "versions.json").get("prompt_date")


def training_warnings(model: Path, settings) -> list[str]:
    """Warn of settings in TRAINED_WITH that differ from the settings of the run that trained the model.

    model: a run, its export or one of its checkpoints. Returns [] for any other folder, and if all are equal.
    """
    trained = record_of(model, "config.yaml")
    try:
        pairs = [(name, *name.split(".")) for name in TRAINED_WITH]
        # runs of older versions lack settings
        values = {name: trained[section][key] for name, section, key in pairs if key in trained[section]}
        templates = [source.get("template") for source in trained["data"]["train"]]
    except (AttributeError, KeyError, TypeError):
        return []  # not a run of this project
    present = flat_settings(settings.model_dump(mode="json"))
    changes = [f"{n} was {old!r} and is {present[n]!r}" for n, old in values.items() if old != present[n]]
    asked = [source["template"] for source in present["data.eval"]]
    if templates and not {*templates} & {*asked}:
        changes.append(f"the template was {templates[0]!r} and is {asked[0]!r}")
    text = f"warning: in training (config.yaml) {'; '.join(changes)}: set the same, unless you mean it"
    return [text] if changes else []


def say(text: str) -> None:
    """Print on rank 0."""
    if os.environ["RANK"] == "0" and text:
        print(text, file=sys.stderr, flush=True)


def progress_bar(num_completions: int, label: str):
    """Return a bar that counts completions; visible on rank 0 of a terminal only."""
    from tqdm import tqdm

    hidden = None if os.environ["RANK"] == "0" else True
    return tqdm(total=num_completions, desc=label, unit="completion", disable=hidden, mininterval=0.5)


def gather(rows: list[dict]) -> list[dict]:
    """Gather the rows of all ranks on rank 0 in the order of the set; other ranks get []. Collective."""
    import torch.distributed as dist

    gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(rows, gathered)
    rows = [row for rank_rows in gathered or [] for row in rank_rows]
    return sorted(rows, key=lambda row: (row["prompt_index"], row["sample"]))


def generate(args, settings, folder: Path, tokenizer, tasks: list[Task], local_tasks: list[Task]):
    """Complete and score the tasks of this rank; return engine, rows and seconds of sampling."""
    from data.score import weights_of
    from memory_plan import engine_settings
    from moe_model import load_config
    from rollout import RolloutEngine

    num_completions = len(tasks) * (1 + args.samples)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(start_pool(settings.reward, tokenizer))
        turns = stack.enter_context(interaction_of(settings, tokenizer, folder, tasks))
        say(reference_warning(pool, tasks))
        say(f"{num_completions:,} completions of {len(tasks):,} prompts; starting vLLM")
        longest = max(len(task.prompt_ids) for task in tasks)  # of all ranks, which may share an engine
        max_len = longest + settings.rollout.max_new_tokens
        rollout = engine_settings(settings.rollout, load_config(folder), max_len)
        engine = RolloutEngine(folder, max_len, rollout)
        engine.sync(weights_of(folder), policy_version=0)
        start = time.perf_counter()
        with progress_bar(num_completions, "generate") as progress:
            rows = sample(engine, pool, turns, tokenizer, local_tasks, args, settings, progress)
        seconds = time.perf_counter() - start
    return engine, rows, seconds


def interaction_of(settings, tokenizer, folder: Path, tasks: list[Task]):
    """Return a context with tools and environment of an evaluation, or None; its end ends their workers."""
    if not (settings.data.tools or settings.data.environment):
        return contextlib.nullcontext()
    from episodes import Interaction
    from rollout import stops_of

    stop_ids, _ = stops_of(folder, tokenizer, settings.rollout.stop)
    interaction = Interaction(settings, tokenizer, stop_ids, [task.prompt for task in tasks], os.devnull)
    return contextlib.closing(interaction)


def reference_warning(pool: RewardPool, tasks: list[Task]) -> str:
    """Warn of prompts that no answer can solve, because the verifier rejects the reference answer."""
    reasons = impossible_references(pool, verifier_rows(tasks), warn=lambda line: say(f"warning: {line}"))
    if not reasons:
        return ""
    index, reason = next(iter(reasons.items()))
    example = f"prompt {index + 1} of {tasks[index].prompt.source}: {reason}"
    return f"warning: {len(reasons)} reference answers fail their own verifier, for example {example}"


def build_trainer(folder: Path, settings):
    """Load the trainer's policy, with all experts on this rank."""
    import torch

    from moe_model import ModelSettings, build_policy

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return build_policy(ModelSettings(path=str(folder), dtype=settings.rollout.dtype), folder, None, device)


def settings_of(args: argparse.Namespace, settings) -> dict:
    """Return the settings that determine the figures, for the JSON and the page.

    changed: settings of the sections data, rollout and reward that differ from the defaults.
    """
    rollout = settings.rollout
    return {
        "samples": args.samples, "temperature": rollout.temperature, "max_new_tokens": rollout.max_new_tokens,
        "dtype": rollout.dtype, "seed": args.seed, "chat": settings.data.chat,
        "data": settings.model_dump(mode="json")["data"]["eval"],
        "changed": settings.model_dump(mode="json", exclude_defaults=True),
    }  # fmt: skip


def write_results(args: argparse.Namespace, result: dict, rows: list[dict]) -> None:
    """Add the figures of the rows to the result and write JSON and JSONL; do nothing for an empty list."""
    if rows:
        figures = all_figures(rows, args.seed)
        by_task = {task: means["accuracy"]["mean"] for task, means in figures["task"].items()}
        result |= {"figures": figures, "accuracy_by_task": by_task, "mismatch": mismatch_figures(rows)}
        failed = sorted((row for row in rows if row["status"] in FAILED), key=lambda row: row["by_text"])
        result["first_failure"] = f"{failed[0]['status']}: {failed[0]['detail']}" if failed else None
        write_json(args.json, finite(result))
        lines = [json.dumps(finite(row), allow_nan=False) + "\n" for row in rows]
        replace_text(args.completions, "".join(lines))


def evaluation_page(result: dict, rows: list[dict], tokenizer) -> str:
    """Return the page of an evaluation."""
    prompts, groups = group_rows(rows, level_labels(rows))
    details = [token_details(row, text_pieces(tokenizer, row["token_ids"])) for row in rows]
    header = evaluation_header(result)
    header["facts"] += reading_notes(rows)
    return build_page(header, prompts, [[details[n] for n in numbers] for numbers in groups])


def report(args: argparse.Namespace, result: dict) -> None:
    """Print the figures and the names of the output files."""
    print(f"{result['model']}: {table_text(result['figures'])}")
    if mismatch := result["mismatch"]:
        mean = mismatch["abs_dlogp"]
        largest = mismatch["abs_dlogp_max"]
        print(f"  trainer and engine: |dlogp| mean {mean:.1e}, largest {largest:.1e}")
    if result["first_failure"]:
        print(f"  first failed verdict: {one_line(result['first_failure'])}")
    for file in (args.json, args.completions, args.html):
        if file is not None:
            print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")


def main(args: argparse.Namespace) -> None:
    """Evaluate --model, or make the page of --run."""
    if args.run is not None:
        replace_text(args.html, samples_page(*args.run))
        print(f"{args.html}: {args.html.stat().st_size / 1e6:.1f} MB")
        return
    import torch.distributed as dist

    from data.score import folder_of_model
    from runtime.launch import join_ranks
    from runtime.schedule import from_rank_0

    join_ranks()
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(open_model(args.model)) if dist.get_rank() == 0 else None
        folder, name = from_rank_0(model)
        if not folder.exists():  # another node: it needs a download of its own
            folder = folder_of_model(args.model)
        evaluate(args, folder, name)
        dist.barrier()  # rank 0 keeps the linked files until all ranks have read them
    dist.destroy_process_group()


if __name__ == "__main__":
    leave(run(main, parse_args, sys.argv[1:]))
