"""Evaluate models on IFEval before and after training: strict accuracy of prompts and of instructions.

    python experiments/ifeval.py --models START EXPORT                        # google/IFEval from the hub
    python experiments/ifeval.py --models START EXPORT --data ifeval.jsonl --ranks 2

IFEval (Zhou et al., arXiv 2311.07911) has 541 prompts with 834 instructions that a rule can verify.
experiments/evaluate.py completes every prompt greedily, rendered by the chat template. Strict means that a
completion is judged as it is: the prompt level counts prompts with all instructions met, the instruction
level counts instructions. Verdicts come from verifiers/instructions.py; docs/evaluation.md says how
often they agree with IFEval's own code. Intervals are Wilson's 95 %; at the instruction level they take the
instructions of a prompt as independent. The p-value is McNemar's exact test of the prompts on which the first
and the last model differ.

--models are folders of checkpoints, exports or runs. Before the evaluation starts, a few prompts are
completed by the first model, and the expected time is printed.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run as a script: for the modules of the project

from data.formats import load_rows
from experiments.bench.common import markdown, torchrun, write_results
from experiments.evaluate import open_model, prepare_outputs, write_aside
from experiments.text_quality import read_rows
from runtime.config import with_settings_apart
from runtime.launch import run
from verifiers.instructions import instruction_verdicts, read_constraints

LEVELS = ("prompt", "instruction")
NUM_TIMED = 64  # at most so many prompts make the estimate of the time


# ------------------------------------------------------------------------------------------------------------
# Prompts
# ------------------------------------------------------------------------------------------------------------
def load_prompts(path: str, limit: int | None) -> list[dict]:
    """Load IFEval from a file or the hub as rows {prompt, answer, kind} of experiments/evaluate.py.

    ValueError if the set cannot be read, or names the row whose instructions cannot be verified.
    """
    try:
        rows = load_rows(path)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"--data {path}: cannot read IFEval ({error}); connect to the hub, or name a JSONL file with "
            "prompt, instruction_id_list and kwargs, as in google-research/instruction_following_eval"
        ) from error
    prompts = []
    for number, row in enumerate(rows[:limit], start=1):
        missing = [name for name in ("prompt", "instruction_id_list", "kwargs") if name not in row]
        if missing:
            raise ValueError(
                f"--data {path}: row {number} lacks the column {missing[0]}; name IFEval's dataset"
            )
        # In the hub's version every row has the arguments of all checks; the irrelevant arguments are null.
        kwargs = [{key: v for key, v in (one or {}).items() if v is not None} for one in row["kwargs"]]
        answer = json.dumps({"instruction_id_list": list(row["instruction_id_list"]), "kwargs": kwargs})
        try:
            read_constraints(answer, {})
        except ValueError as error:
            raise ValueError(f"--data {path}: row {number}: {error}") from error
        prompts.append({"prompt": row["prompt"], "answer": answer, "kind": "instructions"})
    return prompts


# ------------------------------------------------------------------------------------------------------------
# Completions
# ------------------------------------------------------------------------------------------------------------
def complete(
    model: Path, prompts: list[dict], name: str, args: argparse.Namespace
) -> tuple[dict, list[dict]]:
    """Complete the prompts greedily by experiments/evaluate.py; return its result and the completions.

    Files are written beside --json: NAME_prompts.jsonl, NAME.json and NAME_completions.jsonl. RuntimeError if
    the evaluation fails; its error is printed above.
    """
    folder = args.json.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{name}_prompts.jsonl"
    write_aside(data, "".join(json.dumps(row) + "\n" for row in prompts))
    launcher = torchrun(args.ranks) if args.ranks > 1 else [sys.executable]
    options = {
        "--model": model, "--data": data, "--json": folder / f"{name}.json", "--samples": 0,
        "--chat": "always", "--max-new-tokens": args.max_new_tokens, "--dtype": args.dtype,
        "--kv-cache-gib": args.kv_cache_gib, "--max-num-seqs": args.max_num_seqs,
    }  # fmt: skip
    command = [*launcher, str(ROOT / "experiments" / "evaluate.py"), "--no-trainer-logprobs"]
    command += [str(word) for pair in options.items() if pair[1] is not None for word in pair]
    done = subprocess.run([*command, *args.settings], stdout=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"evaluating {model} failed with exit code {done.returncode}; see the error above")
    result = json.loads((folder / f"{name}.json").read_text())
    return result, read_rows(folder / f"{name}_completions.jsonl")


def estimate_minutes(prompts: list[dict], args: argparse.Namespace) -> float:
    """Estimate the minutes of the evaluation from a sample of prompts that the first model completes.

    The estimate is proportional to the number of prompts and takes all models as equally fast. The real time
    is usually shorter, because the sample ends with few completions at a time, which use a processor badly.
    """
    timed = prompts[:: math.ceil(len(prompts) / NUM_TIMED)]
    seconds = complete(args.models[0], timed, "timed", args)[0]["seconds"]
    start_s = seconds["engine"] - seconds["sampling"]
    return len(args.models) * (start_s + seconds["sampling"] * len(prompts) / len(timed)) / 60


# ------------------------------------------------------------------------------------------------------------
# Figures
# ------------------------------------------------------------------------------------------------------------
def share(successes: int, total: int) -> dict:
    """Return a share with Wilson's 95 % interval."""
    from scipy.stats import binomtest

    interval = binomtest(successes, total).proportion_ci(0.95, method="wilson")
    return {"share": successes / total, "low": interval.low, "high": interval.high, "total": total}


def strict_figures(rows: list[dict]) -> dict:
    """Return strict accuracy at both levels, mean tokens and the share of completions cut at the limit.

    rows: completions of experiments/evaluate.py whose answer holds the instructions. solved: for each row,
    whether all its instructions are met.
    """
    verdicts = [
        [is_met for _, is_met in instruction_verdicts(row["completion"], row["answer"], {})] for row in rows
    ]
    solved = [all(of_row) for of_row in verdicts]
    return {
        "prompt": share(sum(solved), len(rows)),
        "instruction": share(sum(map(sum, verdicts)), sum(map(len, verdicts))),
        "mean_tokens": sum(row["num_tokens"] for row in rows) / len(rows),
        "cut_at_limit_frac": sum(row["finish_reason"] == "length" for row in rows) / len(rows),
        "solved": solved,
    }


def difference(first: list[bool], last: list[bool]) -> dict:
    """Compare two models on the same prompts: prompts gained and lost, p of McNemar's exact test."""
    from scipy.stats import binomtest

    gained = sum(after and not before for before, after in zip(first, last))
    lost = sum(before and not after for before, after in zip(first, last))
    p_value = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    return {"gained": gained, "lost": lost, "p": p_value}


def table_lines(result: dict) -> list[str]:
    """Return the table of all models, with the difference between the first and the last model."""
    heads = ["model", *(f"{level} level" for level in LEVELS), "tokens", "cut at limit", "gained, lost"]
    lines = []
    for model in result["models"]:
        levels = [model[name] for name in LEVELS]
        shares = [f"{level['share']:.3f} ({level['low']:.3f} to {level['high']:.3f})" for level in levels]
        ends = [f"{model['mean_tokens']:.1f}", f"{model['cut_at_limit_frac']:.3f}"]
        lines.append([model["model"], *shares, *ends, "-"])
    if change := result["difference"]:
        lines[-1][-1] = f"{change['gained']}, {change['lost']} (p = {change['p']:.2g})"
    return markdown(heads, lines)


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------
def parse_args(argv: list[str]) -> argparse.Namespace:
    """Read the command line; ValueError names the invalid option."""
    parser = argparse.ArgumentParser("experiments/ifeval.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--models", type=Path, nargs="+", required=True, help="folders or hub names, for example START EXPORT"
    )
    add("--data", default="google/IFEval", help="JSONL file or hub name (default: %(default)s)")
    add("--json", type=Path, default=Path("runs/real/ifeval.json"), help="figures (default: %(default)s)")
    add("--limit", type=int, help="use only the first prompts")
    add("--max-new-tokens", type=int, default=1280, help="limit of a completion (default: %(default)s)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="dtype of the engine")
    add("--kv-cache-gib", type=float, help="GiB of keys and values per rank (default: chosen by vLLM)")
    add(
        "--max-num-seqs",
        type=int,
        default=64,
        help="simultaneous completions per rank (default: %(default)s)",
    )
    add("--ranks", type=int, default=1, help="processes, each with an engine (default: %(default)s)")
    add("--estimate", action=argparse.BooleanOptionalAction, default=True, help="time a few prompts first")
    add("settings", nargs="*", metavar="section.key=value", help="settings of experiments/evaluate.py")
    args = parser.parse_intermixed_args(argv)
    if args.ranks < 1 or (args.limit is not None and args.limit < 1):
        raise ValueError("--ranks and --limit must be at least 1")
    if args.json.suffix != ".json":
        raise ValueError(f"--json {args.json} must end in .json: a folder of this name gets the completions")
    prepare_outputs([args.json])
    return with_settings_apart(args, "models")


def main(args: argparse.Namespace) -> None:
    """Evaluate all models, print the table and write the JSON file."""
    prompts = load_prompts(args.data, args.limit)
    for model in args.models:  # a wrong name should not end the job after the first evaluation
        with open_model(model):
            pass
    if args.estimate and len(prompts) > 2 * NUM_TIMED:
        minutes = estimate_minutes(prompts, args)
        print(f"{len(prompts)} prompts, {len(args.models)} models: about {minutes:.1f} minutes", flush=True)
    models = []
    for number, model in enumerate(args.models, start=1):
        evaluation, rows = complete(model, prompts, f"model_{number}", args)
        if len(rows) < len(prompts):
            raise ValueError(
                f"{model}: {len(prompts) - len(rows)} of {len(prompts)} prompts were dropped, so its figures "
                "belong to other prompts; lower --max-new-tokens, or leave data.on_bad_row at its default"
            )
        models.append({"model": evaluation["model"], "weights": evaluation["weights"]} | strict_figures(rows))
    change = difference(models[0]["solved"], models[-1]["solved"]) if len(models) > 1 else None
    for model in models:
        model["solved"] = "".join("01"[is_solved] for is_solved in model["solved"])  # short in the file
    result = {
        "data": args.data, "max_new_tokens": args.max_new_tokens, "dtype": args.dtype, "models": models,
        "difference": change,
    }  # fmt: skip
    total = models[0]["instruction"]["total"]
    print(f"IFEval, strict, greedy: {len(prompts)} prompts, {total} instructions, 95 % intervals")
    print("\n".join(table_lines(result)))
    write_results(args.json, result)
    print(f"{args.json} and completions in {args.json.with_suffix('')}")


if __name__ == "__main__":
    sys.exit(run(main, parse_args, sys.argv[1:]))
