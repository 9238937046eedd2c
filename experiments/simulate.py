"""The rollout phase of one synchronous RL step as a discrete-event simulation, for more engines than at hand.

    python experiments/simulate.py                       8 to 1,024 engines; costs of steps are assumed
    python experiments/simulate.py --fit bench.json      beside what experiments/bench_rollout.py measured

Engine: one per rank; it works on at most S sequences (slots). A step gives one token to each of b running
sequences and takes a + c b seconds, plus p seconds per prompt token prefilled; a sequence is prefilled in its
first step and gets its first token in it. Nothing changes between two completions: time jumps from one to the
next. The waiting line and the assignment of prompts to ranks are those of rollout.py.
Rewards: W workers per rank take completions in the order in which they ended, each once a worker is free
(overlap), or none before the rank's last has ended. A step ends with the last verdict of the slowest rank.
Schedules: arrival (prompts dealt round robin, first come first served); longest_first (by the mean tokens of
the prompt one step before; in the first step nothing is known); oracle (true lengths). reward_aware: the mean
seconds of slow rewards count as tokens in the order of the waiting line, see train_rl.count_rewards().
Tail cut: a rank holds more groups than its quota, stops at the quota, goes on with the rest one step later.
Bound: no schedule beats all tokens at the best rate, S / (a + c S), on all ranks, nor the longest completion
alone with its reward. A second bound, with slow judges: seconds of all rewards / number of all workers.
Left out: costs that grow with the context, memory of keys and values, pipes to the workers.
"""

import argparse
import heapq
import json
import sys
from collections import Counter
from dataclasses import dataclass, fields, replace
from itertools import islice, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tqdm import tqdm

from experiments.workload import Recipe, Workload
from rollout import Request, WaitingLine, longest_first

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
    workers: int  # of rewards, per rank
    decode: float = 0.0  # seconds per token turned into text
    sibling_prefill: float = 1.0  # share of the prompt that all but the first of a group prefill; <= 1

    def step_seconds(self, running: int) -> float:
        return self.a + self.c * running


@dataclass(frozen=True)
class Run:
    """One step of one engine; completions are named by their place in its list of requests."""

    seconds: float  # when the last completion ended
    busy: float  # seconds inside engine steps
    ended: list[tuple[float, int]]  # (when, completion), in this order
    cut: dict[int, int]  # {completion: tokens so far}


@dataclass(frozen=True)
class Result:
    """Seconds of each step [num_steps]."""

    makespan: np.ndarray  # until the slowest rank has its last verdict
    busy: np.ndarray  # inside engine steps, mean over ranks
    bound: np.ndarray  # no schedule is faster
    rewards: np.ndarray  # seconds of all rewards, mean over workers: no schedule is faster either

    @property
    def seconds(self) -> float:
        return float(self.makespan.sum())

    @property
    def bubble(self) -> float:
        """Share of the time in which an engine does not step."""
        return 1 - float(self.busy.sum()) / self.seconds


def run_engine(
    requests: list[Request],
    tokens: list[int],
    engine: EngineModel,
    prompt_tokens: int,
    decode_seconds: float = 0.0,
    quota: int | None = None,
) -> Run:
    """Sample tokens[i] tokens for requests[i], as RolloutEngine.drive() would.

    prompt_tokens: those that siblings share. decode_seconds: per token; the engine stands still for them when
    a completion ends. quota: stop after the step in which so many groups have ended.
    """
    line, prefilled, left = WaitingLine(requests), set(), Counter(request.group for request in requests)
    running: list[tuple[int, int, int]] = []  # heap of (engine step of the last token, start, completion)
    ended, now, busy, step, num_started, num_groups = [], 0.0, 0.0, 0, 0, 0
    while (line or running) and (quota is None or num_groups < quota):
        prefill = 0.0  # tokens
        while line and len(running) < engine.slots:
            index = line.pop()
            prefill += len(requests[index].prompt_ids)
            if requests[index].group in prefilled:
                prefill -= (1 - engine.sibling_prefill) * prompt_tokens
            prefilled.add(requests[index].group)
            num_started += 1
            heapq.heappush(running, (step + tokens[index], num_started, index))
        num_steps = running[0][0] - step
        seconds = num_steps * engine.step_seconds(len(running)) + engine.p * prefill
        step, now, busy = step + num_steps, now + seconds, busy + seconds
        while running and running[0][0] == step:  # the engine reports them in the order of their starts
            index = heapq.heappop(running)[2]
            now += decode_seconds * tokens[index]
            line.note(index, tokens[index])
            ended.append((now, index))
            left[requests[index].group] -= 1
            num_groups += left[requests[index].group] == 0
    cut = dict.fromkeys(line.left, 0) | {index: tokens[index] - (last - step) for last, _, index in running}
    return Run(now, busy, ended, cut)


def last_verdict(run: Run, reward_seconds: list[float], workers: int, overlap: bool) -> float:
    """When a rank has its last verdict; reward_seconds of each completion."""
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
    reward_aware: bool = False,
) -> list[tuple[list[int], Run]]:
    """One step on every rank: its completions, as places in the step's flattened arrays, and what it did.

    Of a prompt of which nothing is known the longest is expected. decode_seconds: see run_engine().
    reward_aware: see train_rl.count_rewards(); of slow rewards the mean of the step before is known.
    """
    recipe, lengths = workload.recipe, workload.lengths[step]
    expected = np.full(lengths.shape, recipe.longest_tokens)  # all alike: in order of arrival
    if schedule == "oracle":
        expected = lengths
    elif schedule == "longest_first" and step:
        expected = np.broadcast_to(workload.lengths[step - 1].mean(1, keepdims=True), lengths.shape)
    slow = (workload.reward_seconds >= recipe.slow_seconds[0]).any(axis=(0, 2))  # [prompts]
    seconds = workload.reward_seconds[max(step, 1) - 1][slow].mean() if slow.any() else 0.0
    counted = 2 * seconds / engine.step_seconds(engine.slots) if reward_aware and step else 0.0
    alike = {"prompt_ids": [0] * recipe.prompt_tokens, "seed": 0, "temperature": 1.0}
    alike |= {"max_new_tokens": recipe.longest_tokens, "guessed": schedule == "longest_first" and step == 0}
    prompts: list[list[int]] = [[] for _ in range(engine.ranks)]
    for prompt, rank in enumerate(longest_first(expected.sum(1).tolist(), engine.ranks)):
        prompts[rank].append(prompt)
    runs = []
    for own in prompts:
        items = [prompt * lengths.shape[1] + sample for prompt in own for sample in range(lengths.shape[1])]
        requests = [
            Request(group=prompt, expected_tokens=tokens, reward_tokens=counted * slow[prompt], **alike)
            for prompt, of_prompt in zip(own, expected[own].tolist())
            for tokens in of_prompt
        ]
        tokens = lengths[own].ravel().tolist()
        runs.append((items, run_engine(requests, tokens, engine, recipe.prompt_tokens, decode_seconds)))
    return runs


def score_step(
    workload: Workload, step: int, engine: EngineModel, runs: list, overlap: bool, decode_seconds: float = 0.0
) -> tuple[float, float, float, float]:
    """What Result holds of a step; decode_seconds: per token, in the reward workers."""
    lengths, rewards = workload.lengths[step], workload.reward_seconds[step]
    flat = (rewards + decode_seconds * lengths).ravel().tolist()
    done = [last_verdict(run, [flat[i] for i in items], engine.workers, overlap) for items, run in runs]
    num_prompts, size = lengths.shape
    prefill = num_prompts * workload.recipe.prompt_tokens * (1 + (size - 1) * engine.sibling_prefill)
    work = lengths.sum() * engine.step_seconds(engine.slots) / engine.slots + engine.p * prefill
    alone = (lengths * engine.step_seconds(1) + rewards).max()
    busy = sum(run.busy for _, run in runs) / engine.ranks
    return max(done), busy, max(work / engine.ranks, alone), sum(flat) / engine.ranks / engine.workers


def simulate(
    workload: Workload,
    engine: EngineModel,
    schedule: str,
    overlap: bool = True,
    decode: str = "workers",
    reward_aware: bool = False,
) -> Result:
    """All steps of a workload under one of SCHEDULES; decode: one of PLACES."""
    if schedule not in SCHEDULES or decode not in PLACES:
        raise ValueError(f"schedule {schedule!r} is not in {SCHEDULES}, or decode {decode!r} not in {PLACES}")
    in_engine, in_worker = (engine.decode * (decode == place) for place in PLACES)
    steps = []
    for step in range(len(workload.lengths)):
        runs = sample_step(workload, step, engine, schedule, in_engine, reward_aware)
        steps.append(score_step(workload, step, engine, runs, overlap, in_worker))
    return Result(*np.array(steps).T)


def tail_cut(
    recipe: Recipe, engine: EngineModel, quota: int, extra: float, num_steps: int, warmup: int
) -> dict[str, float]:
    """Ranks hold (1 + extra) quota groups and stop at quota; what is cut goes on first, on the same rank.

    recipe: of prompts, each of which comes once, in order of arrival. Returns, over num_steps after warmup:
    seconds and bound (tokens at the best rate) per quota of groups; bubble; carried_share (of the tokens of
    groups that ended, those sampled in earlier steps), carried_age (how many steps earlier) and oldest.
    """
    held, total = round(quota * (1 + extra)), warmup + num_steps
    new = Workload.make(replace(recipe, num_steps=1, num_prompts=engine.ranks * held * total))
    lengths, rewards = new.lengths[0], new.reward_seconds[0]
    sampled = np.zeros((*lengths.shape, total), dtype=np.int32)  # tokens, in each step
    ended_in = np.full(len(lengths), -1)  # step of each group
    ranks, arriving = [np.array([], dtype=int)] * engine.ranks, iter(range(len(lengths)))
    makespan, busy = np.zeros(total), np.zeros(total)
    alike = {"seed": 0, "temperature": 1.0, "max_new_tokens": recipe.longest_tokens}
    for step, rank in product(range(total), range(engine.ranks)):
        groups = np.array([*ranks[rank], *islice(arriving, held - len(ranks[rank]))])
        so_far = sampled[groups].sum(-1)
        todo = so_far < lengths[groups]
        places = zip(np.nonzero(todo)[0].tolist(), so_far[todo].tolist())
        requests = [Request(range(recipe.prompt_tokens + n), group=g, **alike) for g, n in places]
        tokens = (lengths[groups] - so_far)[todo].tolist()
        run = run_engine(requests, tokens, engine, recipe.prompt_tokens, quota=quota)
        so_far[todo], so_far[~todo] = [run.cut.get(i, n) for i, n in enumerate(tokens)], 0
        sampled[groups, :, step] = so_far
        is_whole = (sampled[groups].sum(-1) == lengths[groups]).all(-1)
        ended_in[groups[is_whole]], ranks[rank] = step, groups[~is_whole]
        done = last_verdict(run, rewards[groups][todo].tolist(), engine.workers, overlap=True)
        makespan[step], busy[step] = max(makespan[step], done), busy[step] + run.busy
    useful = ended_in >= warmup
    age = ended_in[useful, None] - np.arange(total)  # [group, step]; of tokens sampled in that step
    tokens = sampled[useful].sum(1)
    carried = (tokens * (age > 0)).sum()
    seconds, steps = makespan[warmup:].sum(), useful.sum() / (engine.ranks * quota)  # some end above quota
    best = sampled[..., warmup:].sum() * engine.step_seconds(engine.slots) / engine.slots / engine.ranks
    return {
        "seconds": seconds / steps,
        "bubble": 1 - busy[warmup:].sum() / engine.ranks / seconds,
        "bound": best / steps,
        "carried_share": carried / tokens.sum(),
        "carried_age": (tokens * age).sum() / max(1, carried),
        "oldest": age[tokens > 0].max(),
    }


# ------------------------------------------------------------------------------------------------------------
# Extrapolation
# ------------------------------------------------------------------------------------------------------------
ASSUMED = EngineModel(a=0.008, c=4e-5, p=1e-5, slots=256, ranks=1, workers=8, sibling_prefill=0.03)
CHAINS = Recipe(num_steps=3, prompt_tokens=512, median_tokens=4000.0, longest_tokens=32768)
ENGINES = (8, 64, 256, 1024)
LOADS = (128, 512)  # completions per engine and step
JUDGES = {
    "rules": {"slow_share": 0.0},
    "0.05-0.5 s": {"slow_seconds": (0.05, 0.5)},
    "2-20 s": {"slow_seconds": (2.0, 20.0)},
    "2-20 s, half": {"slow_seconds": (2.0, 20.0), "slow_share": 0.5},  # of the prompts, else a quarter
}
ROWS = {  # schedule, overlap, reward_aware
    "arrival, no overlap": ("arrival", False, False),
    "arrival": ("arrival", True, False),
    "longest_first": ("longest_first", True, False),
    "longest_first, reward_aware": ("longest_first", True, True),
    "oracle, reward_aware": ("oracle", True, True),
}
EXTRA_GROUPS = (0.0, 0.25, 0.5)  # tail cut
TAIL_ENGINES = 64  # at most


def extrapolate(num_engines: int, load: int) -> list[dict]:
    """Rows of all judges and schedules: means over steps with a history, and over seeds for few engines."""
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
                runs = sample_step(work[judge], step, engine, case[0], reward_aware=case[1])
            for name in [name for name in ROWS if ROWS[name][::2] == case]:
                scores[judge, name].append(score_step(work[judge], step, engine, runs, ROWS[name][1]))
    rows, means = [], {key: Result(*np.array(steps).T) for key, steps in scores.items()}
    for (judge, name), result in means.items():
        numbers = {
            "seconds": result.makespan.mean(),
            "speedup": means[judge, next(iter(ROWS))].seconds / result.seconds,
            "bubble": result.bubble,
            "bound": result.bound.mean(),
            "ratio": result.makespan.mean() / result.bound.mean(),
            "rewards": result.rewards.mean(),
        }
        rows.append(row_of(name, num_engines, load, judge, numbers))
    return rows


def extrapolate_tail_cut(num_engines: int, load: int) -> list[dict]:
    """Rows of the tail cut, rewards by rules."""
    engine, recipe, rows = replace(ASSUMED, ranks=num_engines), replace(CHAINS, slow_share=0.0), []
    for extra in tqdm(EXTRA_GROUPS, f"tail cut, {num_engines} engines x {load}", leave=False, disable=None):
        found = tail_cut(recipe, engine, load // recipe.group_size, extra, num_steps=6, warmup=6)
        first = rows[0]["seconds"] if rows else found["seconds"]
        found |= {"speedup": first / found["seconds"], "ratio": found["seconds"] / found["bound"]}
        rows.append(row_of(f"tail cut, {extra:.0%} more groups", num_engines, load, "rules", found))
    return rows


def row_of(name: str, num_engines: int, load: int, judge: str, numbers: dict[str, float]) -> dict:
    return {"name": name, "engines": num_engines, "completions": load, "judge": judge} | rounded(numbers)


def rounded(numbers: dict[str, float]) -> dict[str, float]:
    """To four significant digits, as printed."""
    return {name: float(f"{number:.4g}") for name, number in numbers.items()}


def print_rows(rows: list[dict]) -> None:
    print("\n| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")


def print_extrapolation(engines: list[int]) -> list[dict]:
    """All rows, in two tables."""
    print(f"assumed, not measured: {ASSUMED} with more ranks;\n{CHAINS}\nseconds per step")
    rows = [row for num_engines, load in product(engines, LOADS) for row in extrapolate(num_engines, load)]
    num_engines = min(TAIL_ENGINES, max(engines))
    cut = [row for load in LOADS for row in extrapolate_tail_cut(num_engines, load)]
    print_rows(rows)
    print_rows(cut)
    return rows + cut


def plot_rows(rows: list[dict], path: Path) -> None:
    """Speed-up by engines, a panel per load and judge."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (4 * len(JUDGES), 3.2 * len(LOADS))
    figure, axes = plt.subplots(len(LOADS), len(JUDGES), figsize=size, layout="constrained", sharey="row")
    ticks = sorted({row["engines"] for row in rows})
    for axis, (load, judge) in zip(axes.flat, product(LOADS, JUDGES)):
        for name, marker in zip(ROWS, "so^d"):
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
# Beside a benchmark, command line
# ------------------------------------------------------------------------------------------------------------
NEEDED = {
    "engine": ("a", "c", "p", "slots", "ranks", "workers", "decode"),
    "workload": ("recipe", "lengths", "reward_seconds"),
    "rows": ("name", "overlap", "decode", "schedule", "seconds"),
}


def load_bench(path: Path) -> dict:
    """The benchmark's JSON; ValueError names all that is missing."""
    saved = json.loads(path.read_text())
    if not isinstance(saved, dict):
        raise ValueError("this is not an object with engine, workload and rows")
    parts = {part: saved.get(part, {}) for part in ("engine", "workload")}
    parts |= {f"rows[{i}]": row for i, row in enumerate(saved.get("rows") or [{}])}
    needed = [(part, name) for part in parts for name in NEEDED[part.partition("[")[0]]]
    lacks = [f"{part}.{name}" for part, name in needed if name not in parts[part]]
    if lacks:
        raise ValueError(f"there is no {', no '.join(lacks)}")
    return saved


def fit(path: Path) -> list[dict]:
    """Rows of a benchmark with the seconds of all steps, measured and simulated, and the relative error."""
    saved = load_bench(path)
    known = {field.name for field in fields(EngineModel)}
    engine = EngineModel(**{name: value for name, value in saved["engine"].items() if name in known})
    recipe = {k: tuple(v) if isinstance(v, list) else v for k, v in saved["workload"]["recipe"].items()}
    arrays = [np.array(saved["workload"][name]) for name in ("lengths", "reward_seconds")]
    workload, rows = Workload(Recipe(**recipe), *arrays), []
    for row in tqdm(saved["rows"], "simulate", leave=False, disable=None):
        case = (row["schedule"], row["overlap"], row["decode"], row.get("reward_aware", False))
        found = simulate(workload, engine, *case).seconds
        numbers = {"seconds": row["seconds"], "simulated": found, "error": found / row["seconds"] - 1}
        rows.append({name: row[name] for name in NEEDED["rows"]} | rounded(numbers))
    print_rows(rows)
    worst = max(rows, key=lambda row: abs(row["error"]))
    print(f"\nlargest error: {worst['error']:+.1%} ({worst['name']})")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the printed rows here")
    parser.add_argument("--plot", type=Path, help="write a plot here; not with --fit")
    parser.add_argument("--fit", type=Path, help="JSON of experiments/bench_rollout.py")
    parser.add_argument("--engines", type=int, nargs="+", default=ENGINES, help="default: %(default)s")
    args = parser.parse_args()
    if min(args.engines) < 1 or (args.fit and args.plot):
        parser.error("--engines must be at least 1, and --plot goes without --fit")
    try:
        rows = fit(args.fit) if args.fit else print_extrapolation(args.engines)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {f'{args.fit}: ' if args.fit else ''}{error}")
    if args.json:
        args.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    if args.plot:
        plot_rows(rows, args.plot)


if __name__ == "__main__":
    main()
