"""Tables of closed measurements: their records are kept, their programs are in history.

For example, `git show d2b9be8:experiments/bench/rollout.py` shows the program behind results/rollout.json.
"""

import math

from experiments.bench.common import markdown

ALPHAS = (0.02, 0.06, 0.2, 0.6)
VOCABULARY = {"instructions": 49152, "sums": 49152, "habits": 98, "chains": 98}  # tokens of each environment
RL_ZVP_COEF = 0.1  # the coefficient of RL-ZVP's paper
STEP_FIGURES = {  # name in metrics.jsonl: (heading, format)
    "score": ("score", ".2f"),
    "tool_calls": ("calls per episode", ".2f"),
    "tool_errors_frac": ("share of calls with an error", ".2f"),
    "completion_tokens": ("sampled tokens", ".1f"),
    "tool_tokens": ("inserted tokens", ".1f"),
    "zero_variance_frac": ("groups without variance", ".2f"),
}
TARGET = 0.1  # share of uncertain tokens that the clip should cut, the middle of 0.05 to 0.15


def rollout_lines(data: dict) -> list[str]:
    """Return the table of rollouts (experiments/bench/rollout.py): medians, with ranges over the rounds."""
    rows = [
        [
            f"{case['ratio']:g}",
            row["name"],
            f"{row['seconds']:.1f}",
            f"{row['speedup']:.2f} ({row['speedup_min']:.2f}-{row['speedup_max']:.2f})",
            f"{row['over_bound']:.2f}",
        ]
        for case in data["cases"]
        for row in case["rows"]
    ]
    return markdown(["rewards", "row", "seconds", "speed-up", "over the bound"], rows)


def ifeval_lines(data: dict) -> list[str]:
    """Return the table of models on IFEval (experiments/ifeval.py); the last line compares last and first."""
    lines = []
    for model in data["models"]:
        levels = [model[name] for name in ("prompt", "instruction")]
        shares = [f"{level['share']:.3f} ({level['low']:.3f} to {level['high']:.3f})" for level in levels]
        lines.append([
            model["model"], *shares, f"{model['mean_tokens']:.1f}", f"{model['cut_at_limit_frac']:.3f}", "-"
        ])  # fmt: skip
    change = data["difference"]
    lines[-1][-1] = f"{change['gained']}, {change['lost']} (p = {change['p']:.2g})"
    heads = ["model", "prompt level", "instruction level", "tokens", "cut at limit", "gained, lost"]
    return markdown(heads, lines)


def tool_lines(data: dict) -> list[str]:
    """Return the table of a run of environments/real_tool.yaml: five steps, and the accuracy at both ends."""
    accuracy = {row["step"]: f"{row['accuracy']:.3f}" for row in data["held_out"]}
    rows = [["start", *[""] * len(STEP_FIGURES), accuracy[0]]]
    for step in data["steps"]:
        if step["step"] in (1, 3, 5, 8, 12):
            cells = [format(step[name], form) for name, (_, form) in STEP_FIGURES.items()]
            rows.append([step["step"], *cells, accuracy.get(step["step"], "")])
    return markdown(["step", *(heading for heading, _ in STEP_FIGURES.values()), "held out, greedy"], rows)


def runs_of(data: list[dict], method: str) -> list[dict]:
    """Return the runs of a method at each environment's own rate, in the order of VOCABULARY."""
    own = [run for run in data if (run["method"], run["rate"]) == (method, "own")]
    return sorted(own, key=lambda run: list(VOCABULARY).index(run["environment"]))


def regime_lines(data: list[dict]) -> list[str]:
    """Return the table of the regimes (studies/real_regime/panel.py): GRPO, by environment.

    The last two columns are the sizes that RL-ZVP's advantages would have in a group of right and in a group
    of wrong completions. Both are means over the tokens of trained groups.
    """
    heads = [
        "environment", "tokens", "entropy", "top fifth", "top fifth / log V", "eps at alpha 0.02",
        "zero variance", "0.1 x entropy", "0.1 x (largest entropy - entropy)",
    ]  # fmt: skip
    lines = []
    for run in runs_of(data, "grpo"):
        normalized = run["top_entropy"] / math.log(VOCABULARY[run["environment"]])
        lines.append([
            run["environment"], f"{run['tokens']:.1f}", f"{run['entropy']:.3f}", f"{run['top_entropy']:.3f}",
            f"{normalized:.3f}", f"{0.02 * normalized:.1e}", f"{run['zero_variance']:.2f}",
            f"{RL_ZVP_COEF * run['entropy']:.3f}", f"{RL_ZVP_COEF * run['wrong']:.3f}",
        ])  # fmt: skip
    return markdown(heads, lines)


def alpha_lines(data: list[dict]) -> list[str]:
    """Return the table of ESPO's clip: share of uncertain tokens beyond the clip of each alpha."""
    lines = []
    for run in runs_of(data, "espo"):
        nearest = min(ALPHAS, key=lambda alpha: abs(run["cut"][str(alpha)] - TARGET))
        lines.append([run["environment"], *(f"{share:.3f}" for share in run["cut"].values()), f"{nearest:g}"])
    return markdown(["environment", *(f"alpha {alpha:g}" for alpha in ALPHAS), "nearest to 0.1"], lines)
