"""Summarise a finished run: summary.json, a printed summary, and a plot of the learning curves.

python -m runtime.summary runs/demo        # print the summary and draw the plot again
"""

import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.checkpoint import TrainState

DIFFICULTY = "accuracy_difficulty_"  # a metric's name ends in this and the level, for example _3
TASK = "accuracy_task_"  # the same for tasks


def figure(value: float | None, form: str) -> str:
    """Format a figure; "not measured" for None and NaN."""
    return "not measured" if value is None or math.isnan(value) else format(value, form)


def comparable(state: "TrainState") -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics of the first and the last evaluation, reduced to the sets that both have measured.

    An evaluation before the last step says nothing about the trained policy and counts as none. If no set is
    in both, the last one is whole and the first one is empty. Two sets are equal if their prompts are.
    """
    last = state.last_eval if state.evaluated_step == state.step else {}
    sets = {name for name, digest in state.last_sets.items() if state.first_sets.get(name) == digest}
    first = {key: v for key, v in state.first_eval.items() if key[len("eval/") :].rpartition("/")[0] in sets}
    if not last:
        return state.first_eval, {}
    return first, {key: value for key, value in last.items() if key in first} if first else last


def write_summary(
    run_dir: Path, state: "TrainState", gpu_memory: dict[str, dict[str, int | None]] | None = None
) -> None:
    """Write run_dir/summary.json. Evaluation figures are means over the held-out sets of comparable().

    A figure that was not measured is null. gpu_memory: {row of the plan: planned and measured bytes}.
    """
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    grad_norms = [row.get("grad_norm", 0.0) for row in rows if "learning_rate" in row]
    summary = {"num_steps": state.step, "steps_without_gradient": sum(not norm > 0 for norm in grad_norms)}
    first_eval, last_eval = comparable(state)
    names = {key.split("/")[-1] for key in first_eval | last_eval}
    sampled = {name for name in names if re.fullmatch(r"(avg|pass)_at_\d+", name)}
    for name in ("accuracy", "mean_tokens", *sorted(sampled | {"avg_at_8", "pass_at_8"})):
        for when, evaluation in (("before", first_eval), ("after", last_eval)):
            values = [value for key, value in evaluation.items() if key.split("/")[-1] == name]
            summary[f"{name}_{when}"] = sum(values) / len(values) if values else None
    summary |= {
        "generated_tokens": state.generated_tokens,
        "gradient_token_share": state.gradient_tokens / max(1, state.generated_tokens),
        "mean_abs_dlogp": state.abs_dlogp_sum / state.trained_tokens if state.trained_tokens else None,
        "account": state.account,
        "seconds_by_phase": state.seconds,
        "peak_rss_bytes": state.peak_rss_bytes,
        "gpu_memory": gpu_memory,
        "accuracy_by_difficulty_before": by_difficulty(first_eval),
        "accuracy_by_difficulty_after": by_difficulty(last_eval),
        "accuracy_by_task_before": by_task(first_eval),
        "accuracy_by_task_after": by_task(last_eval),
    }
    for name in ("mismatch_k3", "mismatch_routes", "mismatch_ess", "length_error"):
        values = [row[name] for row in rows if name in row]
        summary[f"mean_{name}"] = sum(values) / len(values) if values else None
    summary["advantage_collapse_rate"] = advantage_collapse_rate(rows)
    waits = [(row["rollout_bubble"], row["straggler_rank"]) for row in rows if "rollout_bubble" in row]
    slowest = Counter(rank for _, rank in waits).most_common(1)
    summary["seconds_waited"] = {  # a measurement of time, so it varies between repetitions of a run
        "share_of_rollouts": sum(share for share, _ in waits) / len(waits) if waits else None,
        "slowest_rank": slowest[0][0] if slowest else None,
        "slowest_rank_share": slowest[0][1] / len(waits) if slowest else None,
    }
    versions = run_dir / "versions.json"
    facts = json.loads(versions.read_text()) if versions.is_file() else {}
    summary |= {"model_dtype": facts.get("dtype"), "rollout_dtype": facts.get("rollout_dtype")}
    references = run_dir / "references.json"  # written at the start; {set: report}, see data/references.py
    summary["references"] = json.loads(references.read_text()) if references.is_file() else {}
    partial = run_dir / "summary.json.partial"  # the finished file says that the run is finished
    partial.write_text(json.dumps(summary, indent=1))
    partial.replace(run_dir / "summary.json")


def advantage_collapse_rate(rows: list[dict]) -> float | None:
    """Return the mean zero_variance_frac of steps 91 to 100; None for a shorter run.

    ACR (arXiv 2605.21125) is the share of groups whose advantages collapse because their rewards are equal.
    Its early value predicts the final accuracy [secondary; ours: ten steps, because a step has few groups].
    """
    values = [row["zero_variance_frac"] for row in rows if 91 <= row["step"] <= 100 and "score" in row]
    return sum(values) / len(values) if len(values) == 10 else None


def by_difficulty(evaluation: dict[str, float]) -> dict[str, float]:
    """Select the accuracies by difficulty from an evaluation: eval/SET/accuracy_difficulty_N."""
    return {name: value for name, value in evaluation.items() if f"/{DIFFICULTY}" in name}


def by_task(evaluation: dict[str, float]) -> dict[str, float]:
    """Return {task: accuracy} of an evaluation, as means over the sets that have the task."""
    values: dict[str, list[float]] = {}
    for name, value in evaluation.items():
        leaf = name.rpartition("/")[2]
        if leaf.startswith(TASK):
            values.setdefault(leaf.removeprefix(TASK), []).append(value)
    return {task: sum(of_sets) / len(of_sets) for task, of_sets in values.items()}


def print_summary(run_dir: Path) -> None:
    """Print the summary of a finished run, from run_dir/summary.json."""
    summary = json.loads((run_dir / "summary.json").read_text())
    print(f"\n{run_dir}: {summary['num_steps']} steps, {summary['generated_tokens']:,} generated tokens")
    for key in [key for key in summary if key.endswith("_after") and not key.startswith("accuracy_by")]:
        name = key.removesuffix("_after")
        first = summary[f"{name}_before"]
        last = summary[key]
        text = name.replace("avg_at_", "pass@1, mean of ").replace("pass_at_", "pass@")
        text = "accuracy, greedy" if name == "accuracy" else text
        if name == "accuracy" or not first is last is None:
            print(f"  {text:<28} {figure(first, '6.3f')} -> {figure(last, '.3f')}   held-out problems")
    for name, report in summary.get("references", {}).items():
        if report["warning"]:
            print(f"    warning: {name}: {report['warning']}")
    for kind in ("difficulty", "task"):
        first, last = (summary.get(f"accuracy_by_{kind}_{when}", {}) for when in ("before", "after"))
        for name in first | last:
            label = f"{kind} {name.rpartition(DIFFICULTY)[2]}"
            print(f"    {label:<27} {figure(first.get(name), '6.3f')} -> {figure(last.get(name), '.3f')}")
    if idle := summary.get("steps_without_gradient"):
        print(f"  steps without gradient       {idle:6}   of {summary['num_steps']}, which taught nothing")
    print(f"  tokens that carry gradient   {summary['gradient_token_share']:6.3f}   of all generated")
    if (rate := summary["advantage_collapse_rate"]) is not None:
        print(f"  advantage collapse rate      {rate:6.3f}   groups with equal scores, steps 91 to 100")
    print_account(summary["account"], summary["generated_tokens"])
    dlogp = figure(summary["mean_abs_dlogp"], "6.1e")
    print(f"  |dlogp| trainer - engine     {dlogp}   nats, mean over trained tokens")
    if summary["mean_mismatch_k3"] is not None:
        routes = summary["mean_mismatch_routes"]
        ess = f"effective sample size {summary['mean_mismatch_ess']:.4f}"
        experts = "" if routes is None else f", other experts for {routes:.4f} of the tokens"
        print(f"  k3 KL engine, trainer        {summary['mean_mismatch_k3']:6.1e}   nats, {ess}{experts}")
    waits = summary["seconds_waited"]
    error = summary["mean_length_error"]
    if waits["share_of_rollouts"] is not None:
        slowest = f"rank {waits['slowest_rank']} was last in {waits['slowest_rank_share']:.2f} of the steps"
        off = "" if error is None else f"; expected lengths off by {error:.2f}"
        print(f"  engines idle in rollouts     {waits['share_of_rollouts']:6.3f}   of time; {slowest}{off}")
    total = sum(summary["seconds_by_phase"].values())
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in summary["seconds_by_phase"].items())
    print(f"  seconds                      {total:6.1f}   {phases}")
    print(f"  peak memory of all ranks     {summary['peak_rss_bytes'] / 2**30:6.2f}   GiB")
    for row, memory in (summary.get("gpu_memory") or {}).items():
        measured = memory["measured"]
        text = figure(None if measured is None else measured / 2**30, ".2f")
        print(f"    {row:<26} {memory['planned'] / 2**30:6.2f}   GiB of a GPU planned, {text} measured")
    for name, text in (
        ("curves.png", "score and accuracy"), ("tensorboard", "tensorboard --logdir"),
        ("metrics.jsonl", "every metric"),
        ("samples.jsonl", "completions, for experiments/evaluate.py --run"),
        ("model", "the trained policy, Hugging Face format"),
        ("adapter", "its adapters, PEFT's format"),
        ("checkpoints", "to resume from"),
    ):  # fmt: skip
        if (run_dir / name).exists():  # no tensorboard/ with run.trackers=[]
            print(f"  {run_dir / name}: {text}")


def print_account(account: dict[str, float], generated_tokens: int) -> None:
    """Print the number of prompts by fate, and tokens without gradient per generated token."""
    kinds = ("offered", "skipped", "sampled", "probed", "stopped", "dropped", "refilled")
    prompts = ", ".join(f"{account[f'prompts_{kind}']:,.0f} {kind}" for kind in kinds)
    print(f"  prompts                      {prompts}")
    names = {"stopped": "in stopped probes", "dropped": "in dropped groups", "kept": "trained on"}
    names |= {"late": "in late groups"} if "wasted_late_tokens" in account else {}
    total = max(1, generated_tokens)
    wasted = {text: account[f"wasted_{name}_tokens"] / total for name, text in names.items()}
    shares = ", ".join(f"{share:.3f} {text}" for text, share in wasted.items())
    print(f"  tokens without gradient      {sum(wasted.values()):6.3f}   per generated token: {shares}")
    if scored := account.get("teacher_tokens"):
        print(f"  tokens scored by the teacher {scored / total:6.3f}   per generated token")


def label_of(name: str) -> str:
    """Return a label for a metric of evaluations, for example "additions: pass@1, mean of 8 samples"."""
    name_of_set, figure = name.removeprefix("eval/").rsplit("/", 1)
    if match := re.fullmatch(r"avg_at_(\d+)", figure):
        return f"{name_of_set}: pass@1, mean of {match[1]} samples"
    if match := re.fullmatch(r"pass_at_(\d+)", figure):
        return f"{name_of_set}: pass@{match[1]}"
    return f"{name_of_set}: greedy accuracy"


def plot_curves(run_dir: Path) -> Path:
    """Draw run_dir/curves.png: training score and held-out accuracy over generated tokens.

    A dotted line marks each hand-over from one stage to the next.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "score" in row]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    tokens = [row["generated_tokens"] / 1e3 for row in steps]
    axes.plot(tokens, [row["score"] for row in steps], alpha=0.35, label="training score of each step")
    for previous, row in zip(steps, steps[1:]):
        if row.get("stage") != previous.get("stage"):
            axes.axvline(previous["generated_tokens"] / 1e3, color="gray", linestyle=":")
    names = {name for row in rows for name in row if name.startswith("eval/")}
    for name in sorted(names, key=lambda name: (name.endswith("/accuracy"), name)):
        if re.search(r"/(avg_at_\d+|pass_at_\d+|accuracy)$", name):
            points = [(row["generated_tokens"] / 1e3, row[name]) for row in rows if name in row]
            axes.plot(*zip(*points), marker="o", label=label_of(name))
    axes.set(
        title=f"Training of {run_dir.resolve().name}: score and held-out accuracy", ylim=(0, 1.02),
        xlabel="generated tokens (thousands)", ylabel="fraction right",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(run_dir / "curves.png", dpi=120)
    plt.close(figure)
    return run_dir / "curves.png"


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "summary.json").is_file():
        sys.exit("usage: python -m runtime.summary RUN_DIR   (a folder with a summary.json)")
    plot_curves(Path(sys.argv[1]))
    print_summary(Path(sys.argv[1]))
