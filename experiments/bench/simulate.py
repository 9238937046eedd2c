"""Simulate the rollout phase of a synchronous step for more engines than are at hand.

    python -m experiments.bench.simulate                       # 8 to 1,024 engines; costs are assumed
    python -m experiments.bench.simulate --json simulate.json --plot simulate.png
    python -m experiments.bench.simulate --fit rollout.json    # beside what bench.rollout measured

It is a discrete-event simulation. Engines: one per rank; each works on at most S sequences (slots). A step
gives one token to each of b running sequences and takes a + c b seconds, plus p seconds per prompt token
prefilled; a sequence is prefilled in its first step and gets its first token in it. Nothing changes between
two completions: time jumps from one to the next. The waiting line and the assignment of prompts to ranks are
those of runtime/schedule.py.
Rewards: W workers per rank take completions in the order in which they ended, each once a worker is free
(overlap), or none before the rank's last has ended. A step ends with the last verdict of the slowest rank.
Schedules: arrival deals prompts round robin, first come first served. longest_first orders by the mean tokens
of the prompt one step before; in the first step nothing is known. oracle knows the true lengths.
count_reward_time: the mean seconds of slow rewards count in the order of the waiting line, and where prompts
are dealt to ranks, as in train_rl.generate_round().
Bound: no schedule beats all tokens at the best rate, S / (a + c S), on all ranks, nor the longest completion
alone with its reward, nor the seconds of all rewards over all workers.
Left out: costs that grow with the context, memory of keys and values, pipes to the workers.
"""

import heapq
import json
import sys
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path

import numpy as np
from tqdm import tqdm

from experiments.bench.common import make_parser, markdown, pyplot, write_json
from experiments.bench.workload import Recipe, Workload
from runtime.schedule import WaitingLine, deal_groups, verdict_tokens

SCHEDULES = ("arrival", "longest_first", "oracle")
PLACES = ("engine", "workers")  # where tokens become text


@dataclass(frozen=True)
class EngineModel:
    """What the engines and their reward workers cost."""

    a: float  # seconds of a step, whatever runs in it
    c: float  # seconds of a step per running sequence
    p: float  # seconds per prompt token prefilled
    slots: int  # sequences at once, rollout.max_num_seqs
    ranks: int
    workers: int  # reward workers per rank
    decode: float = 0.0  # seconds per token turned into text
    sibling_prefill: float = 1.0  # share of the prompt that all but the first of a group prefill; <= 1

    def step_seconds(self, running: int) -> float:
        """Return the seconds of a step with so many sequences."""
        return self.a + self.c * running


@dataclass(frozen=True)
class Job:
    """What a WaitingLine reads of a rollout.Request."""

    group: int
    max_new_tokens: int
    expected_tokens: float
    latency_tokens: float = 0.0
    work_tokens: float = 0.0
    guessed: bool = False


@dataclass(frozen=True)
class EngineRun:
    """One step of one engine; completions are named by their place in its list of jobs."""

    seconds: float  # when the last completion ended
    busy: float  # seconds inside engine steps
    ended: list[tuple[float, int]]  # (when, completion), in this order


@dataclass(frozen=True)
class Result:
    """Seconds of each step [num_steps]."""

    makespan: np.ndarray  # until the slowest rank has its last verdict
    busy: np.ndarray  # inside engine steps, mean over ranks
    bound: np.ndarray  # no schedule is faster

    @property
    def seconds(self) -> float:
        """Return the seconds of all steps."""
        return float(self.makespan.sum())

    @property
    def bubble(self) -> float:
        """Return the share of the time in which an engine does not step."""
        return 1 - float(self.busy.sum()) / self.seconds


def run_engine(
    jobs: list[Job], tokens: list[int], engine: EngineModel, prompt_tokens: int, decode_seconds: float = 0.0
) -> EngineRun:
    """Sample tokens[i] tokens for jobs[i], as RolloutEngine.run_requests() would.

    decode_seconds: per token; the engine stands still for them when a completion ends.
    """
    line, prefilled = WaitingLine(jobs, engine.slots), set()
    running: list[tuple[int, int, int]] = []  # heap of (engine step of the last token, start, completion)
    ended, now, busy, step, num_started = [], 0.0, 0.0, 0, 0
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
        step, now, busy = step + num_steps, now + seconds, busy + seconds
        while running and running[0][0] == step:  # the engine reports them in the order of their starts
            index = heapq.heappop(running)[2]
            now += decode_seconds * tokens[index]
            line.record_length(index, tokens[index])
            ended.append((now, index))
    return EngineRun(now, busy, ended)


def last_verdict(run: EngineRun, reward_seconds: list[float], workers: int, overlap: bool) -> float:
    """Return when a rank has its last verdict; reward_seconds of each completion."""
    free = [0.0] * workers  # heap: when each is
    for when, index in run.ended:
        heapq.heapreplace(free, max(when if overlap else run.seconds, free[0]) + reward_seconds[index])
    return max(free)


def sample_step(
    workload: Workload,
    step: int,
    engine: EngineModel,
    schedule: str,
    decode_seconds: float = 0.0,
    count_reward_time: bool = False,
) -> list[tuple[list[int], EngineRun]]:
    """Return one step on every rank: its completions, as places in the step's flattened arrays, and its run.

    A prompt of which nothing is known is expected to be as long as the longest. decode_seconds: see
    run_engine(). count_reward_time: of slow rewards the mean of the step before is known.
    """
    recipe, lengths = workload.recipe, workload.lengths[step]
    expected = np.full(lengths.shape, recipe.longest_tokens)  # all alike: in order of arrival
    if schedule == "oracle":
        expected = lengths
    elif schedule == "longest_first" and step:
        expected = np.broadcast_to(workload.lengths[step - 1].mean(1, keepdims=True), lengths.shape)
    slow, latency, work = workload.is_slow, 0.0, 0.0
    if count_reward_time and schedule != "arrival" and step and slow.any():
        seconds = float(workload.reward_seconds[step - 1][slow].mean())
        pace = engine.step_seconds(engine.slots)
        rate = min(engine.slots, lengths.size / engine.ranks) / pace  # the best one
        latency, work = verdict_tokens(seconds, pace, rate, engine.workers)
    costs = {"latency_tokens": latency, "work_tokens": work}
    alike = {
        "max_new_tokens": recipe.longest_tokens,
        "guessed": schedule == "longest_first" and step == 0,
    }
    prompts: list[list[int]] = [[] for _ in range(engine.ranks)]
    of_groups = expected.sum(1).tolist(), (slow * work * lengths.shape[1]).tolist()
    for prompt, rank in enumerate(deal_groups(*of_groups, engine.ranks)):
        prompts[rank].append(prompt)
    runs = []
    for own in prompts:
        items = [prompt * lengths.shape[1] + sample for prompt in own for sample in range(lengths.shape[1])]
        jobs = [
            Job(prompt, expected_tokens=tokens, **(costs if slow[prompt] else {}), **alike)
            for prompt, of_prompt in zip(own, expected[own].tolist())
            for tokens in of_prompt
        ]
        tokens = lengths[own].ravel().tolist()
        runs.append((items, run_engine(jobs, tokens, engine, recipe.prompt_tokens, decode_seconds)))
    return runs


def score_step(
    workload: Workload, step: int, engine: EngineModel, runs: list, overlap: bool, decode_seconds: float = 0.0
) -> tuple[float, float, float]:
    """Return what Result holds of a step; decode_seconds: per token, in the reward workers."""
    lengths, rewards = workload.lengths[step], workload.reward_seconds[step]
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
    in_engine, in_worker = (engine.decode * (decode == place) for place in PLACES)
    steps = []
    for step in range(len(workload.lengths)):
        runs = sample_step(workload, step, engine, schedule, in_engine, count_reward_time)
        steps.append(score_step(workload, step, engine, runs, overlap, in_worker))
    return Result(*np.array(steps).T)


# ------------------------------------------------------------------------------------------------------------
# Extrapolation
# ------------------------------------------------------------------------------------------------------------
ASSUMED = EngineModel(a=0.008, c=4e-5, p=1e-5, slots=256, ranks=1, workers=8, sibling_prefill=0.03)
CHAINS = Recipe(num_steps=3, prompt_tokens=512, median_tokens=4000.0, longest_tokens=32768, slow_share=0.25)
ENGINES = (8, 64, 256, 1024)
LOADS = (128, 512)  # completions per engine and step
JUDGES = {  # seconds of slow rewards; a quarter of the prompts has them where nothing else is said
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
    """Return the rows of all judges and schedules: means over steps with a history.

    For few engines they are means over seeds too.
    """
    engine = replace(ASSUMED, ranks=num_engines)
    recipe = replace(CHAINS, num_prompts=num_engines * load // CHAINS.group_size)
    works = [
        {judge: Workload.make(replace(recipe, seed=seed, **of_judge)) for judge, of_judge in JUDGES.items()}
        for seed in range(max(1, min(8, 256 // num_engines)))
    ]
    cases = list(product(works, range(1, recipe.num_steps), sorted({row[::2] for row in ROWS.values()})))
    scores: dict[tuple[str, str], list] = {key: [] for key in product(JUDGES, ROWS)}
    for work, step, case in tqdm(cases, f"{num_engines} engines x {load}", leave=False, disable=None):
        runs = None
        for judge in JUDGES:
            if runs is None or case[1]:  # lengths are the same for all judges
                runs = sample_step(work[judge], step, engine, case[0], count_reward_time=case[1])
            for name in [name for name in ROWS if ROWS[name][::2] == case]:
                scores[judge, name].append(score_step(work[judge], step, engine, runs, ROWS[name][1]))
    rows, means = [], {key: Result(*np.array(steps).T) for key, steps in scores.items()}
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
    """Round to four significant digits, as printed."""
    return {name: float(f"{number:.4g}") for name, number in numbers.items()}


def table_lines(data: list[dict]) -> list[str]:
    """Return the speed-ups over BASELINE: a cell has those of the other four of ROWS."""
    found = {(r["completions"], r["judge"], r["engines"], r["name"]): r["speedup"] for r in data}
    engines = sorted({row["engines"] for row in data})
    rows = []
    for load, judge in dict.fromkeys((row["completions"], row["judge"]) for row in data):
        speedups = ([found[load, judge, num, name] for name in ROWS if name != BASELINE] for num in engines)
        cells = [" / ".join(f"{speedup:.2f}" for speedup in cell) for cell in speedups]
        rows.append([f"{load}, {judge}", *cells])
    return markdown(["completions per engine, slow rewards", *(f"{num} engines" for num in engines)], rows)


def plot_rows(rows: list[dict], path: Path) -> None:
    """Draw the speed-up by engines, a panel per load and judge."""
    plt, size = pyplot(), (4 * len(JUDGES), 3.2 * len(LOADS))
    figure, axes = plt.subplots(len(LOADS), len(JUDGES), figsize=size, layout="constrained", sharey="row")
    ticks = sorted({row["engines"] for row in rows})
    for axis, (load, judge) in zip(axes.flat, product(LOADS, JUDGES)):
        for name, marker in zip(ROWS, "so^dv"):
            found = [r for r in rows if (r["name"], r["completions"], r["judge"]) == (name, load, judge)]
            points = [(row["engines"], row["speedup"]) for row in found]
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
# Beside a benchmark
# ------------------------------------------------------------------------------------------------------------
NEEDED = {
    "engine": ("a", "c", "p", "slots", "ranks", "workers", "decode"),
    "cases": ("ratio", "recipes", "rows"),
    "recipe": ("seed", "num_steps", "num_prompts", "group_size"),
    "rows": ("name", "overlap", "decode", "schedule", "count_reward_time", "seconds"),
}


def check_record(record: dict) -> None:
    """Raise ValueError that names all that is missing in the benchmark's record."""
    if not isinstance(record, dict):
        raise ValueError("this is not an object with engine and cases")
    parts = {("engine", "engine"): record.get("engine", {})}
    for i, case in enumerate(record.get("cases") or [{}]):
        parts["cases", f"cases[{i}]"] = case
        for k, recipe in enumerate(case.get("recipes") or [{}]):
            parts["recipe", f"cases[{i}].recipes[{k}]"] = recipe
        for k, row in enumerate(case.get("rows") or [{}]):
            parts["rows", f"cases[{i}].rows[{k}]"] = row
    lacks = [f"{p}.{name}" for (kind, p), part in parts.items() for name in NEEDED[kind] if name not in part]
    if lacks:
        raise ValueError(f"there is no {', no '.join(lacks)}")


def fit(record: dict) -> list[dict]:
    """Return the rows of a benchmark with the seconds of all steps, measured, simulated, and the error.

    Seconds are medians over the benchmark's rounds.
    """
    check_record(record)
    known = {field.name for field in fields(EngineModel)}
    engine = EngineModel(**{name: value for name, value in record["engine"].items() if name in known})
    rows, measured = [], [(case, row) for case in record["cases"] for row in case["rows"]]
    for case, row in tqdm(measured, "simulate", leave=False, disable=None):
        settings = {name: row[name] for name in ("schedule", "overlap", "decode", "count_reward_time")}
        works = [Workload.make(Recipe.of(recipe)) for recipe in case["recipes"]]
        found = float(np.median([simulate(workload, engine, **settings).seconds for workload in works]))
        numbers = {"seconds": row["seconds"], "simulated": found, "error": found / row["seconds"] - 1}
        rows.append({"ratio": case["ratio"], "name": row["name"]} | settings | rounded(numbers))
    return rows


def fit_table(rows: list[dict]) -> list[str]:
    """Return the lines of the table of fit()'s rows."""
    cells = [
        [f"{r['ratio']:g}", r["name"], f"{r['seconds']:.2f}", f"{r['simulated']:.2f}", f"{r['error']:+.1%}"]
        for r in rows
    ]
    return markdown(["rewards", "row", "measured, s", "simulated, s", "error"], cells)


def fit_lines(data: dict) -> list[str]:
    """Return the table of a benchmark's record beside the simulation, which it runs."""
    return fit_table(fit(data))


def main() -> None:
    """Print the extrapolation, or a benchmark's record beside the simulation."""
    parser = make_parser(__doc__, plot=True)
    parser.add_argument("--fit", type=Path, metavar="FILE", help="the record of experiments.bench.rollout")
    parser.add_argument("--engines", type=int, nargs="+", default=ENGINES, help="default: %(default)s")
    args = parser.parse_args()
    if min(args.engines) < 1 or (args.fit and args.plot):
        parser.error("--engines must be at least 1, and --plot goes without --fit")
    if args.fit:
        try:
            rows = fit(json.loads(args.fit.read_text()))
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
    write_json(args.json, rows)
    if args.plot:
        plot_rows(rows, args.plot)


if __name__ == "__main__":
    main()
