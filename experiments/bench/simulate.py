"""Simulate the rollout phase of a synchronous step on more engines than this machine has.

    python -m experiments.bench.simulate                       # 8 to 1,024 engines; costs are assumed
    python -m experiments.bench.simulate --json simulate.json --plot simulate.png
    python -m experiments.bench.simulate --fit rollout.json    # beside the measurements of bench.rollout

This is a discrete-event simulation: time jumps from one completion's end to the next.

Engines: one per rank, with at most S concurrent sequences (slots). An engine step gives one token to each of
b running sequences and takes a + c b seconds, plus p seconds per prompt token of new sequences. A sequence is
prefilled in its first step and gets its first token in the same step. The waiting line and the assignment of
prompts to ranks are the functions of runtime/schedule.py.

Rewards: W workers per rank score completions in the order in which they end, each as soon as a worker is idle
(overlap), or only after the rank's last completion has ended. A step ends with the last verdict of the
slowest rank.

Schedules: `arrival` deals prompts round robin, first come first served. `longest_first` orders by the mean
tokens of the prompt in the previous step; in the first step all lengths are unknown. `oracle` uses the true
lengths. With count_reward_time, the mean seconds of slow rewards count both in the order of the waiting line
and in the assignment of prompts to ranks, as in train_rl.generate_round().

Lower bound: the largest of all tokens at peak throughput, S / (a + c S), on all ranks; the longest completion
alone with its reward; and the seconds of all rewards over all workers.

Left out: costs that grow with the context, KV cache memory, pipes to the workers.
"""

import heapq
import sys
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path

import numpy as np
from tqdm import tqdm

from experiments.bench.common import make_parser, markdown, pyplot, read_results, write_results
from experiments.bench.workload import Recipe, Workload
from runtime.schedule import WaitingLine, deal_groups, verdict_tokens

SCHEDULES = ("arrival", "longest_first", "oracle")
PLACES = ("engine", "workers")  # processes that decode tokens into text


@dataclass(frozen=True)
class EngineModel:
    """Costs of the engines and of the reward workers."""

    a: float  # fixed seconds of a step
    c: float  # seconds of a step per running sequence
    p: float  # seconds per prompt token prefilled
    slots: int  # concurrent sequences, rollout.max_num_seqs
    ranks: int
    workers: int  # reward workers per rank
    decode: float = 0.0  # seconds to decode a token into text
    sibling_prefill: float = 1.0  # share of the prompt that later completions of a group prefill; <= 1

    def step_seconds(self, running: int) -> float:
        """Return the seconds of a step with this number of sequences."""
        return self.a + self.c * running


@dataclass(frozen=True)
class Job:
    """The fields of batch.Request that a WaitingLine reads."""

    group: int
    max_new_tokens: int
    expected_tokens: float
    latency_tokens: float = 0.0
    work_tokens: float = 0.0
    guessed: bool = False


@dataclass(frozen=True)
class EngineRun:
    """One training step on one engine; a completion is its index in the list of jobs."""

    seconds: float  # end of the last completion
    busy: float  # seconds inside engine steps
    ended: list[tuple[float, int]]  # (time, completion), in order of time


@dataclass(frozen=True)
class Result:
    """Seconds of each step [num_steps]."""

    makespan: np.ndarray  # time of the last verdict of the slowest rank
    busy: np.ndarray  # inside engine steps, mean over ranks
    bound: np.ndarray  # lower bound for any schedule

    @property
    def seconds(self) -> float:
        """Return the seconds of all steps."""
        return float(self.makespan.sum())

    @property
    def bubble(self) -> float:
        """Return the share of the time in which engines are idle."""
        return 1 - float(self.busy.sum()) / self.seconds


def run_engine(
    jobs: list[Job], tokens: list[int], engine: EngineModel, prompt_tokens: int, decode_seconds: float = 0.0
) -> EngineRun:
    """Sample tokens[i] tokens for jobs[i], as RolloutEngine.run_requests() would.

    decode_seconds: per token; the engine waits for the decoding of each finished completion.
    """
    line = WaitingLine(jobs, engine.slots)
    prefilled = set()  # groups
    running: list[tuple[int, int, int]] = []  # heap of (engine step of the last token, start, completion)
    ended = []
    now = 0.0
    busy = 0.0
    step = 0
    num_started = 0
    while line or running:
        prefill = 0.0  # tokens
        while line and len(running) < engine.slots:
            index = line.pop()
            prefill += prompt_tokens
            if jobs[index].group in prefilled:
                prefill -= (1 - engine.sibling_prefill) * prompt_tokens
            prefilled.add(jobs[index].group)
            num_started += 1
            heapq.heappush(running, (step + tokens[index], num_started, index))
        num_steps = running[0][0] - step
        seconds = num_steps * engine.step_seconds(len(running)) + engine.p * prefill
        step += num_steps
        now += seconds
        busy += seconds
        while running and running[0][0] == step:  # reported in the order of their starts
            index = heapq.heappop(running)[2]
            now += decode_seconds * tokens[index]
            line.record_length(index, tokens[index])
            ended.append((now, index))
    return EngineRun(now, busy, ended)


def last_verdict(run: EngineRun, reward_seconds: list[float], workers: int, overlap: bool) -> float:
    """Return the time of a rank's last verdict. reward_seconds: of each completion."""
    idle_from = [0.0] * workers  # heap of times
    for when, index in run.ended:
        heapq.heapreplace(
            idle_from, max(when if overlap else run.seconds, idle_from[0]) + reward_seconds[index]
        )
    return max(idle_from)


def sample_step(
    workload: Workload,
    step: int,
    engine: EngineModel,
    schedule: str,
    decode_seconds: float = 0.0,
    count_reward_time: bool = False,
) -> list[tuple[list[int], EngineRun]]:
    """Return one step on every rank: the indices of its completions in the step's flat arrays, and its run.

    A prompt without a record is expected to have the longest length. decode_seconds: see run_engine().
    count_reward_time: the schedule knows the mean seconds of slow rewards in the previous step.
    """
    recipe = workload.recipe
    lengths = workload.lengths[step]
    expected = np.full(lengths.shape, recipe.longest_tokens)  # equal lengths: order of arrival
    if schedule == "oracle":
        expected = lengths
    elif schedule == "longest_first" and step:
        expected = np.broadcast_to(workload.lengths[step - 1].mean(1, keepdims=True), lengths.shape)
    slow = workload.is_slow
    latency = 0.0
    work = 0.0
    if count_reward_time and schedule != "arrival" and step and slow.any():
        seconds = float(workload.reward_seconds[step - 1][slow].mean())
        pace = engine.step_seconds(engine.slots)
        rate = min(engine.slots, lengths.size / engine.ranks) / pace  # peak, in tokens per second
        latency, work = verdict_tokens(seconds, pace, rate, engine.workers)
    costs = {"latency_tokens": latency, "work_tokens": work}
    common = {
        "max_new_tokens": recipe.longest_tokens,
        "guessed": schedule == "longest_first" and step == 0,
    }
    prompts: list[list[int]] = [[] for _ in range(engine.ranks)]
    group_tokens = expected.sum(1).tolist()
    group_work = (slow * work * lengths.shape[1]).tolist()
    for prompt, rank in enumerate(deal_groups(group_tokens, group_work, engine.ranks)):
        prompts[rank].append(prompt)
    runs = []
    for rank_prompts in prompts:
        items = [
            prompt * lengths.shape[1] + sample
            for prompt in rank_prompts
            for sample in range(lengths.shape[1])
        ]
        jobs = [
            Job(prompt, expected_tokens=tokens, **(costs if slow[prompt] else {}), **common)
            for prompt, prompt_tokens in zip(rank_prompts, expected[rank_prompts].tolist())
            for tokens in prompt_tokens
        ]
        tokens = lengths[rank_prompts].ravel().tolist()
        runs.append((items, run_engine(jobs, tokens, engine, recipe.prompt_tokens, decode_seconds)))
    return runs


def score_step(
    workload: Workload, step: int, engine: EngineModel, runs: list, overlap: bool, decode_seconds: float = 0.0
) -> tuple[float, float, float]:
    """Return makespan, busy seconds and bound of a step, see Result.

    decode_seconds: per token, in the reward workers.
    """
    lengths = workload.lengths[step]
    rewards = workload.reward_seconds[step]
    flat = (rewards + decode_seconds * lengths).ravel().tolist()
    done = [last_verdict(run, [flat[i] for i in items], engine.workers, overlap) for items, run in runs]
    num_prompts, size = lengths.shape
    prefill = num_prompts * workload.recipe.prompt_tokens * (1 + (size - 1) * engine.sibling_prefill)
    work = lengths.sum() * engine.step_seconds(engine.slots) / engine.slots + engine.p * prefill
    alone = (lengths * engine.step_seconds(1) + rewards).max()
    busy = sum(run.busy for _, run in runs) / engine.ranks
    rewarded = sum(flat) / engine.ranks / engine.workers
    return max(done), busy, max(work / engine.ranks, alone, rewarded)


def simulate(
    workload: Workload,
    engine: EngineModel,
    schedule: str,
    overlap: bool = True,
    decode: str = "workers",
    count_reward_time: bool = False,
) -> Result:
    """Simulate all steps of a workload under one of SCHEDULES; decode: one of PLACES."""
    if schedule not in SCHEDULES or decode not in PLACES:
        raise ValueError(f"schedule {schedule!r} is not in {SCHEDULES}, or decode {decode!r} not in {PLACES}")
    engine_decode, worker_decode = (engine.decode * (decode == place) for place in PLACES)
    steps = []
    for step in range(len(workload.lengths)):
        runs = sample_step(workload, step, engine, schedule, engine_decode, count_reward_time)
        steps.append(score_step(workload, step, engine, runs, overlap, worker_decode))
    return Result(*np.array(steps).T)


# ------------------------------------------------------------------------------------------------------------
# Extrapolation
# ------------------------------------------------------------------------------------------------------------
ASSUMED = EngineModel(a=0.008, c=4e-5, p=1e-5, slots=256, ranks=1, workers=8, sibling_prefill=0.03)
CHAINS = Recipe(num_steps=3, prompt_tokens=512, median_tokens=4000.0, longest_tokens=32768, slow_share=0.25)
ENGINES = (8, 64, 256, 1024)
LOADS = (128, 512)  # completions per engine and step
JUDGES = {  # seconds of slow rewards, which a quarter of the prompts has unless slow_share is set
    "rules": {"slow_share": 0.0},
    "0.05-0.5 s": {"slow_seconds": (0.05, 0.5)},
    "2-20 s": {"slow_seconds": (2.0, 20.0)},
    "2-20 s, half": {"slow_seconds": (2.0, 20.0), "slow_share": 0.5},
}
BASELINE = "arrival, no overlap"
ROWS = {  # schedule, overlap, count_reward_time
    BASELINE: ("arrival", False, False),
    "arrival": ("arrival", True, False),
    "longest_first": ("longest_first", True, False),
    "longest_first, count_reward_time": ("longest_first", True, True),
    "oracle, count_reward_time": ("oracle", True, True),
}


def extrapolate(num_engines: int, load: int) -> list[dict]:
    """Return the rows of all judges and schedules, averaged over the steps in which prompts have a record.

    With few engines the rows are also averaged over seeds, for example over 8 seeds with 32 engines or fewer.
    """
    engine = replace(ASSUMED, ranks=num_engines)
    recipe = replace(CHAINS, num_prompts=num_engines * load // CHAINS.group_size)
    works = [
        {judge: Workload.make(replace(recipe, seed=seed, **changes)) for judge, changes in JUDGES.items()}
        for seed in range(max(1, min(8, 256 // num_engines)))
    ]
    cases = list(product(works, range(1, recipe.num_steps), sorted({row[::2] for row in ROWS.values()})))
    scores: dict[tuple[str, str], list] = {key: [] for key in product(JUDGES, ROWS)}
    for work, step, case in tqdm(cases, f"{num_engines} engines x {load}", leave=False, disable=None):
        runs = None
        for judge in JUDGES:
            if runs is None or case[1]:  # all judges have the same lengths
                runs = sample_step(work[judge], step, engine, case[0], count_reward_time=case[1])
            for name in [name for name in ROWS if ROWS[name][::2] == case]:
                scores[judge, name].append(score_step(work[judge], step, engine, runs, ROWS[name][1]))
    means = {key: Result(*np.array(steps).T) for key, steps in scores.items()}
    rows = []
    for (judge, name), result in means.items():
        numbers = {
            "seconds": result.makespan.mean(),
            "speedup": means[judge, BASELINE].seconds / result.seconds,
            "bubble": result.bubble,
            "bound": result.bound.mean(),
            "ratio": result.makespan.mean() / result.bound.mean(),
        }
        case = {"name": name, "engines": num_engines, "completions": load, "judge": judge}
        rows.append(case | rounded(numbers))
    return rows


def rounded(numbers: dict[str, float]) -> dict[str, float]:
    """Round to four significant digits, the precision of the printed tables."""
    return {name: float(f"{number:.4g}") for name, number in numbers.items()}


def table_lines(data: list[dict]) -> list[str]:
    """Return the table of speed-ups over BASELINE; a cell lists the speed-ups of the other four ROWS."""
    speedups_of = {(r["completions"], r["judge"], r["engines"], r["name"]): r["speedup"] for r in data}
    engines = sorted({row["engines"] for row in data})
    rows = []
    for load, judge in dict.fromkeys((row["completions"], row["judge"]) for row in data):
        cell_values = (
            [speedups_of[load, judge, num, name] for name in ROWS if name != BASELINE] for num in engines
        )
        cells = [" / ".join(f"{speedup:.2f}" for speedup in cell) for cell in cell_values]
        rows.append([f"{load}, {judge}", *cells])
    return markdown(["completions per engine, slow rewards", *(f"{num} engines" for num in engines)], rows)


def plot_rows(rows: list[dict], path: Path) -> None:
    """Draw the speed-up over the number of engines, one panel per load and judge."""
    plt = pyplot()
    size = (4 * len(JUDGES), 3.2 * len(LOADS))
    figure, axes = plt.subplots(len(LOADS), len(JUDGES), figsize=size, layout="constrained", sharey="row")
    ticks = sorted({row["engines"] for row in rows})
    for axis, (load, judge) in zip(axes.flat, product(LOADS, JUDGES)):
        for name, marker in zip(ROWS, "so^dv"):
            series = [r for r in rows if (r["name"], r["completions"], r["judge"]) == (name, load, judge)]
            points = [(row["engines"], row["speedup"]) for row in series]
            axis.semilogx(*zip(*points), marker=marker, label=name)
        axis.set_xticks(ticks, ticks)
        axis.minorticks_off()
        axis.set(title=f"{load} completions per engine, {judge}", xlabel="engines", ylabel="speed-up")
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=8)
    figure.suptitle("simulated rollout phase; costs of steps are assumed")
    figure.savefig(path, dpi=120)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------------------
# Comparison with a benchmark
# ------------------------------------------------------------------------------------------------------------
REQUIRED = {
    "engine": ("a", "c", "p", "slots", "ranks", "workers", "decode"),
    "cases": ("ratio", "recipes", "rows"),
    "recipe": ("seed", "num_steps", "num_prompts", "group_size"),
    "rows": ("name", "overlap", "decode", "schedule", "count_reward_time", "seconds"),
}


def check_record(record: dict) -> None:
    """Raise ValueError naming every field that is missing in the benchmark's record."""
    if not isinstance(record, dict):
        raise ValueError(
            "expected a JSON object with engine and cases, as experiments.bench.rollout --json writes"
        )
    sections = {("engine", "engine"): record.get("engine", {})}
    for i, case in enumerate(record.get("cases") or [{}]):
        sections["cases", f"cases[{i}]"] = case
        for k, recipe in enumerate(case.get("recipes") or [{}]):
            sections["recipe", f"cases[{i}].recipes[{k}]"] = recipe
        for k, row in enumerate(case.get("rows") or [{}]):
            sections["rows", f"cases[{i}].rows[{k}]"] = row
    missing = [
        f"{path}.{name}"
        for (kind, path), section in sections.items()
        for name in REQUIRED[kind]
        if name not in section
    ]
    if missing:
        raise ValueError(f"there is no {', no '.join(missing)}")


def fit(record: dict) -> list[dict]:
    """Return the rows of a benchmark with the measured and simulated seconds of all steps, and the error.

    Seconds are medians over the rounds of the benchmark.
    """
    check_record(record)
    field_names = {field.name for field in fields(EngineModel)}
    engine = EngineModel(**{name: value for name, value in record["engine"].items() if name in field_names})
    measured = [(case, row) for case in record["cases"] for row in case["rows"]]
    rows = []
    for case, row in tqdm(measured, "simulate", leave=False, disable=None):
        settings = {name: row[name] for name in ("schedule", "overlap", "decode", "count_reward_time")}
        works = [Workload.make(Recipe.of(recipe)) for recipe in case["recipes"]]
        simulated = float(np.median([simulate(workload, engine, **settings).seconds for workload in works]))
        numbers = {"seconds": row["seconds"], "simulated": simulated, "error": simulated / row["seconds"] - 1}
        rows.append({"ratio": case["ratio"], "name": row["name"]} | settings | rounded(numbers))
    return rows


def fit_table(rows: list[dict]) -> list[str]:
    """Return the table of the rows of fit()."""
    cells = [
        [f"{r['ratio']:g}", r["name"], f"{r['seconds']:.2f}", f"{r['simulated']:.2f}", f"{r['error']:+.1%}"]
        for r in rows
    ]
    return markdown(["rewards", "row", "measured, s", "simulated, s", "error"], cells)


def fit_lines(data: dict) -> list[str]:
    """Simulate the cases of a benchmark's record and return the table of both."""
    return fit_table(fit(data))


def main() -> None:
    """Print the extrapolation, or compare a benchmark's record with the simulation."""
    parser = make_parser(__doc__, plot=True)
    parser.add_argument(
        "--fit", type=Path, metavar="FILE", help="compare with this record of experiments.bench.rollout"
    )
    parser.add_argument(
        "--engines", type=int, nargs="+", default=ENGINES, help="numbers of engines (default: %(default)s)"
    )
    args = parser.parse_args()
    if min(args.engines) < 1 or (args.fit and args.plot):
        parser.error("--engines must be at least 1, and --plot cannot be combined with --fit")
    if args.fit:
        try:
            rows = fit(read_results(args.fit))
        except (OSError, ValueError) as error:
            sys.exit(f"error: {args.fit}: {error}")
        worst = max(rows, key=lambda row: abs(row["error"]))
        case = f"rewards {worst['ratio']:g}, {worst['name']}"
        lines = [*fit_table(rows), "", f"largest error: {worst['error']:+.1%} ({case})"]
    else:
        print(f"assumed, not measured: {ASSUMED} with more ranks;\n{CHAINS}\nspeed-up over `{BASELINE}` of")
        print(" / ".join(name for name in ROWS if name != BASELINE) + "\n")
        rows = [row for num, load in product(args.engines, LOADS) for row in extrapolate(num, load)]
        lines = table_lines(rows)
    print("\n".join(lines))
    write_results(args.json, rows)
    if args.plot:
        plot_rows(rows, args.plot)


if __name__ == "__main__":
    main()
