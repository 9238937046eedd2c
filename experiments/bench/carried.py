"""Compare rollouts that carry late groups (carry.share), drop them, or wait for all, in turns.

    python -m experiments.bench.carried --json carried.json           # chains, 4 rounds of 3 x 12 steps
    python -m experiments.bench.carried --share 0.5 rollout.prompts_per_step=8

The first run waits. From its lengths and seconds the gains are predicted before any run carries or drops:
rollouts of groups with these lengths are simulated, and a rollout takes a x (steps of the engine) + b x
(tokens) seconds, with a and b fitted to the first run. Measured: groups trained per second of rollout. The
second table has, for tenths of the prompts that the waiting run sampled, by length and by pass rate, the
share that the other runs have trained on after as many steps: even over the tenths if none starves. Its last
row has the age of the trained tokens, in steps, by tenths of the lengths of a step.
"""

import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

import numpy as np
import torch
from scipy.optimize import nnls

from experiments.bench.common import ROOT, make_parser, markdown, spread, torchrun, with_range, write_results
from experiments.text_quality import read_rows

RULES = {"wait": (), "carry": (), "drop": ("carry.late=drop", "carry.max_age=1")}
WARMUP_STEPS = 2
NUM_SIMULATED = 300  # rollouts


def simulate(
    groups: list[list[int]], num_groups: int, share: float, max_age: int, drops: bool = False
) -> tuple[int, int, int]:
    """Return engine steps, tokens and trained groups of rollouts of groups that are drawn with these lengths.

    All completions run at once, each gets a token in every step of the engine. drops: late groups end.
    """
    random = Random(0)
    waiting: list[tuple[int, list[int]]] = []  # (age, tokens that each completion still needs)
    engine_steps = tokens = trained = 0
    for _ in range(NUM_SIMULATED):
        new = [(0, random.choice(groups)) for _ in range(num_groups - len(waiting))]
        running = waiting + new
        ends = sorted(max(rest) for _, rest in running)
        late = [max(rest) for age, rest in running if age >= max_age]
        length = max([ends[math.ceil(share * num_groups) - 1], *late])
        engine_steps += length
        tokens += sum(min(length, rest) for _, of_group in running for rest in of_group)
        unfinished = [(age, rest) for age, rest in running if max(rest) > length]
        trained += len(running) - len(unfinished)
        waiting = [
            (age + 1, [max(0, need - length) for need in rest]) for age, rest in unfinished if not drops
        ]
    return engine_steps, tokens, trained


def predicted_gain(
    groups, num_groups: int, share: float, max_age: int, seconds: tuple, drops: bool = False
) -> float:
    """Return trained groups per second over those of waiting; seconds: of an engine step, of a token."""
    rates = []
    for fraction in (share, 1.0):
        engine_steps, tokens, trained = simulate(groups, num_groups, fraction, max_age, drops)
        rates.append(trained / (seconds[0] * engine_steps + seconds[1] * tokens))
    return rates[0] / rates[1]


def seconds_of(rows: list[dict]) -> tuple[float, float]:
    """Fit the seconds of an engine step and of a token, neither below 0, to the rollouts of a waiting run."""
    table = np.array([(row["completion_tokens_max"], row["tokens_total"]) for row in rows], dtype=float)
    per_step, per_token = nnls(table, np.array([row["seconds/rollout"] for row in rows]))[0]
    return float(per_step), float(per_token)


def run_once(folder: Path, num_steps: int, settings: list[str]) -> list[dict]:
    """Return the rows of metrics of a run on one rank."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        *torchrun(1), str(ROOT / "train_rl.py"), "--config", "experiments/environments/chains.yaml",
        f"run.dir={folder}", f"train.num_steps={num_steps}", "data.eval=[]", "run.log_every=1", *settings,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the run failed:\n{done.stderr[-3000:]}")
    return read_rows(folder / "metrics.jsonl")


def groups_of(folder: Path) -> list[list[int]]:
    """Return the lengths of each group in samples.jsonl, which has one group of every step."""
    groups: dict[int, list[int]] = {}
    for row in read_rows(folder / "samples.jsonl"):
        groups.setdefault(row["step"], []).append(row["num_tokens"])
    return list(groups.values())


def trained_by_tenth(waiting: dict, other: dict) -> dict[str, list[float]]:
    """Return the share of prompts that another run has trained on, by tenths of length and of pass rate.

    Arguments: records of prompts (history.pt). Only prompts that the waiting run has sampled count.
    """
    sampled = waiting["tried"] > 0
    trained = (other["tried"] > 0)[sampled].double()
    keys = {"length": waiting["mean_tokens"], "pass rate": waiting["solved"] / waiting["tried"].clamp(min=1)}
    return {
        name: [trained[part].mean().item() for part in values[sampled].argsort(stable=True).tensor_split(10)]
        for name, values in keys.items()
    }


def table_lines(data: dict) -> list[str]:
    """Return the tables of rates and of shares."""
    predicted = data["predicted"]
    gains = {name: [f"{predicted[name]:.2f}", with_range(data["gains"][name], ".2f")] for name in predicted}
    rates = [
        [name, with_range(rate, ".2f"), *gains.get(name, ["", ""])] for name, rate in data["rates"].items()
    ]
    tenths = [[name, *(f"{value:.2f}" for value in values)] for name, values in data["tenths"].items()]
    header = ["late groups", "groups trained per second of rollout", "gain, predicted", "gain"]
    tenths_header = ["share trained, by tenth", *map(str, range(1, 11))]
    return [*markdown(header, rates), "", *markdown(tenths_header, tenths)]


def main() -> None:
    """Predict the gain, run the rounds and print both tables."""
    parser = make_parser(__doc__)
    parser.add_argument("--share", type=float, default=0.75, help="carry.share (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="pairs of runs (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="steps per run (default: %(default)s)")
    args, settings = parser.parse_known_args()
    scratch = Path(tempfile.mkdtemp())
    rates: dict[str, list[float]] = {name: [] for name in RULES}
    histories = {}
    predicted = {}
    for number in range(args.rounds):
        for name in RULES:
            switch = [] if name == "wait" else [f"carry.share={args.share}", *RULES[name]]
            more = [f"train.seed={number}", *switch]
            rows = run_once(scratch / name, args.steps, [*settings, *more])[WARMUP_STEPS:]
            num_groups = [row["account/prompts_sampled"] for row in rows]
            rates[name].append(sum(num_groups) / sum(row["seconds/rollout"] for row in rows))
            (record,) = (scratch / name / "checkpoints").glob(f"*{args.steps:06d}/history.pt")
            histories[name] = torch.load(record, weights_only=True)
            if name == "carry":
                ages = [statistics.fmean(row[f"token_age_tenth_{k}"] for row in rows) for k in range(1, 11)]
            if not number and name == "wait":
                size = round(statistics.fmean(num_groups))
                conditions = (groups_of(scratch / name), size, args.share, 2, seconds_of(rows))
                predicted = {rule: predicted_gain(*conditions, rule == "drop") for rule in ("carry", "drop")}
                print(f"predicted gain in trained groups per second: {predicted}", flush=True)
    shutil.rmtree(scratch)
    tenths = {
        f"{rule}, {key}": shares
        for rule in predicted
        for key, shares in trained_by_tenth(histories["wait"], histories[rule]).items()
    }
    data = {
        "predicted": predicted,
        "rates": {name: spread(values) for name, values in rates.items()},
        "gains": {
            name: spread([own / wait for own, wait in zip(rates[name], rates["wait"])]) for name in predicted
        },
        "tenths": tenths | {"carry, age by length": ages},
    }
    print("\n".join(table_lines(data)))
    write_results(args.json, data)


if __name__ == "__main__":
    main()
