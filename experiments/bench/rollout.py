"""Measure what overlapped rewards and length-aware scheduling save in a rollout.

    python -m experiments.bench.rollout                       # two ranks, tiny MoE, five rounds of all rows
    python -m experiments.bench.rollout --json rollout.json --plot rollout.png
    python -m experiments.bench.rollout --script changed.py   # with a changed copy of train_rl.py

The workload is heavy-tailed (experiments.bench.workload): the length of every completion is given, so that
all rows of a round do the same work, and sampling is greedy, so that it can be checked that they give the
same completions and rewards. Each round has lengths of its own, by the next seed. Rewards are stated at the
engine's own pace, for machines differ: the ratio is the seconds of a reward worker over those of an engine at
its best rate. At 0 a rule scores all prompts; else a function that sleeps, as long as a sandbox or a remote
judge would take, scores half of them. Engine, reward workers and Rollouts are those of training; there is no
update in between.

Rows take turns within a round; ratios, of rows and over the bound, are taken within a round, and the table
shows medians over rounds. Each row of the stack adds to the one before; contrasts differ from the whole stack
in one thing. bubble = 1 - sum(busy) / (ranks x makespan), busy being the seconds in which an engine has
something to generate. bound = max(all work / ranks, longest completion alone with its reward, all rewards /
workers): work is a completion's tokens at the engine's best rate, by the cost of a step t(b) = a + c b with b
sequences, fitted to the very run that the bound stands beside: the machine's pace drifts.
"""

import dataclasses
import hashlib
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from experiments.bench.common import (
    TINY,
    load_trainer,
    make_parser,
    markdown,
    pyplot,
    run_rank,
    run_ranks,
    write_json,
)
from experiments.bench.workload import Recipe, Workload

SLOW = "experiments.bench.workload:slow_verify"
RATIOS = (0.0, 0.1, 1.0)  # worker seconds over engine seconds: rules only, a tenth, as long as the rollout
STACK = {  # name -> (reward.decode, reward.overlap, schedule, rollout.count_reward_time)
    "sequential, arrival order": ("engine", False, "arrival", False),
    "+ rewards overlap": ("workers", True, "arrival", False),
    "+ longest first, rewards counted": ("workers", True, "longest_first", True),
}
CONTRASTS = {  # in place of the last row of the stack
    "rewards not counted": ("workers", True, "longest_first", False),
    "true lengths known": ("workers", True, "oracle", True),  # longest first by true lengths
}
ROWS = STACK | CONTRASTS


# ------------------------------------------------------------------------------------------------------------
# In each rank
# ------------------------------------------------------------------------------------------------------------
class RecordedLengths:
    """Take lengths and seconds of rewards from a workload; it is mixed in before the trainer's Rollouts."""

    workload: Workload
    is_oracle: bool  # the schedule knows the lengths that are to come

    def sample_step(self, state, history):
        """Sample a step; remember its lengths, which a schedule cannot know otherwise."""
        self.lengths = self.workload.lengths[state.step]  # [prompt, sample]
        self.engine.policy_version = state.step  # there is no update: the policy of this step is the first
        return super().sample_step(state, history)

    def set_expected_lengths(self, jobs, history) -> None:
        """Set expected_tokens of the groups: the true mean for the oracle, else what the schedule expects."""
        if not self.is_oracle:
            return super().set_expected_lengths(jobs, history)
        for group, _ in jobs:
            group.expected_tokens = float(self.lengths[group.prompt_index].mean())

    def requests(self, jobs, step: int, costs: dict) -> tuple[list, list]:
        """Make greedy requests of the recorded lengths, and of each prompt one with its reward's delay."""
        requests, prompts = super().requests(jobs, step, costs)
        samples = [(group.prompt_index, sample) for group, samples in jobs for sample in samples]
        for i, place in enumerate(samples):
            tokens = int(self.lengths[place])
            greedy = {"temperature": 0.0, "max_new_tokens": tokens, "min_new_tokens": tokens}
            known = {"expected_tokens": float(tokens)} if self.is_oracle else {}
            requests[i] = dataclasses.replace(requests[i], **greedy, **known)
            delay = str(float(self.workload.reward_seconds[(step, *place)]))
            if prompts[i].kind == SLOW:
                prompts[i] = dataclasses.replace(prompts[i], answer=delay)
        return requests, prompts


class Rank:
    """An engine with the tiny model, reward workers, and the clock of the engine's steps."""

    def __init__(self, trainer, recipe: Recipe, slots: int, workers: int, model: Path):
        import torch

        import moe_model
        from data.chat import load_tokenizer
        from reward import RewardPool, decoder_json
        from rollout import RolloutEngine, RolloutSettings

        torch.set_num_threads(1)
        moe_model.init_deepspeed()
        self.trainer, self.slots = trainer, slots
        self.tokenizer = load_tokenizer(model)
        settings = RolloutSettings(
            max_num_seqs=slots, dtype="float32", kv_cache_gib=0.5, capture_routes="off"
        )
        self.engine = RolloutEngine(model, recipe.prompt_tokens + recipe.longest_tokens, settings)
        policy = moe_model.Policy(moe_model.load_config(model))
        moe_model.load_hf(policy, model)
        self.engine.sync(moe_model.hf_tensors(policy), 0)
        self.pool = RewardPool(workers, timeout_s=60, tokenizer=decoder_json(self.tokenizer))
        self.steps: list[tuple[int, int, float]] = []  # sequences, prompts among them, seconds
        self.watch_steps()

    def take(self, workload: Workload) -> None:
        """Have the next rows do this work."""
        from data.prompts import Prompt

        self.workload, recipe = workload, workload.recipe
        rng = np.random.default_rng(recipe.seed)
        texts = [" ".join(map(str, rng.integers(0, 10, 40))) for _ in range(recipe.num_prompts)]
        kinds = [SLOW if slow else "numeric" for slow in workload.is_slow]
        self.prompts = [Prompt(text, "7", kind, "bench") for text, kind in zip(texts, kinds)]
        self.prompt_ids = [ids[: recipe.prompt_tokens] for ids in self.tokenizer(texts)["input_ids"]]

    def watch_steps(self) -> None:
        """Have every step of vLLM's timed, with the requests that were added before it."""
        engine, step, add = self.engine.engine, self.engine.engine.step, self.engine.engine.add_request
        added = []  # seconds

        def timed_step():
            running = engine.get_num_unfinished_requests()
            start = time.perf_counter()
            outputs = step()
            self.steps.append((running, len(added), time.perf_counter() - start + sum(added)))
            added.clear()
            return outputs

        def timed_add(*args, **options):
            start = time.perf_counter()
            add(*args, **options)
            added.append(time.perf_counter() - start)

        engine.step, engine.add_request = timed_step, timed_add

    def decode_seconds(self) -> float:
        """Return the seconds per token turned into text."""
        completion, times = list(range(4, 60)) * 8, []
        for _ in range(20):
            start = time.perf_counter()
            self.tokenizer.decode(completion, skip_special_tokens=True)
            times.append(time.perf_counter() - start)
        return statistics.median(times) / len(completion)

    def make_rollouts(self, decode: str, overlap: bool, schedule: str, count_reward_time: bool):
        """Return the trainer's Rollouts with recorded lengths and the settings of a row."""
        from data.stages import Offers
        from runtime.metrics import Clock

        recipe, is_oracle = self.workload.recipe, schedule == "oracle"
        config = self.trainer.load_config(
            [
                "data.train=[{path: unused}]", f"rollout.prompts_per_step={recipe.num_prompts}",
                f"rollout.group_size={recipe.group_size}", f"reward.overlap={overlap}",
                f"rollout.schedule={'longest_first' if is_oracle else schedule}",
                f"rollout.count_reward_time={count_reward_time}", f"reward.decode={decode}",
                f"rollout.max_num_seqs={self.slots}",
            ]
        )  # fmt: skip
        recorded = type("RecordedRollouts", (RecordedLengths, self.trainer.Rollouts), {})
        rollouts = recorded(
            config, self.engine, self.pool, self.tokenizer, self.prompts, self.prompt_ids, Clock({}),
            Offers(range(len(self.prompts))),
        )  # fmt: skip
        rollouts.workload, rollouts.is_oracle = self.workload, is_oracle
        return rollouts

    def run(self, *row) -> dict:
        """Return seconds and busy seconds of this rank by step, and a digest of completions and verdicts."""
        import torch.distributed as dist

        from data.history import PromptHistory
        from runtime.checkpoint import TrainState

        recipe, rollouts, state = self.workload.recipe, self.make_rollouts(*row), TrainState()
        history = PromptHistory.from_offline([None] * recipe.num_prompts, recipe.group_size)
        self.pool.seconds.clear()
        found = {"seconds": [], "busy": [], "digest": [], "latencies": []}
        self.steps.clear()
        while state.step < recipe.num_steps:
            dist.barrier()
            start = time.perf_counter()
            groups, outcomes, _ = rollouts.sample_step(state, history)
            found["seconds"].append(time.perf_counter() - start)  # the slowest rank has its last verdict
            found["busy"].append(rollouts.clock.take_step()["seconds/rollout"])
            found["latencies"] += self.pool.latencies
            self.pool.latencies = []
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, groups)
            groups = sorted(sum(everyone, []), key=lambda group: group.slot)
            results = [([c.token_ids for c in group.completions], group.verdicts) for group in groups]
            found["digest"].append(hashlib.sha256(repr(results).encode()).hexdigest())
            history.update(list(outcomes.values()), state.step, rollouts.config.zero_variance.history_decay)
            state.step += 1
        return found | {"engine": fit_engine(self.steps, recipe.prompt_tokens)}

    def calibrate(self) -> dict[str, float]:
        """Return the cost of an engine's step, the mean over ranks. Collective."""
        import torch.distributed as dist

        for _ in range(2):  # the first is a warm-up
            found = self.run(*list(STACK.values())[-1])
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found["engine"])
        return mean_engine(everyone) | {"slots": self.slots}


def work(args) -> None:
    """Run all rows in turn, again and again; rank 0 writes what each rank measured. Collective."""
    import torch.distributed as dist
    from tqdm import tqdm

    recipe = Recipe.load(args.workload)
    rank = Rank(load_trainer(args.script), recipe, args.slots, args.workers, args.model)
    rank.take(Workload.make(recipe_at(0.0, recipe, {}, args.workers)))
    engine = rank.calibrate()
    cases = [{"recipes": [], "rounds": []} for _ in args.ratios]  # a recipe and {row: found} of each round
    total = args.repeats * len(ROWS) * len(cases)
    progress = tqdm(total=total, desc="bench", unit="row", disable=dist.get_rank() > 0)
    for repeat in range(args.repeats):
        names = list(ROWS)[repeat % len(ROWS) :] + list(ROWS)[: repeat % len(ROWS)]
        of_round = dataclasses.replace(recipe, seed=recipe.seed + repeat)
        for ratio, case in zip(args.ratios, cases):
            workload, found = Workload.make(recipe_at(ratio, of_round, engine, args.workers)), {}
            rank.take(workload)
            case["recipes"].append(dataclasses.asdict(workload.recipe))
            case["rounds"].append(found)
            for name in names:
                found[name] = rank.run(*ROWS[name])
                progress.update()
    of_rank = {"cases": cases, "decode": rank.decode_seconds()}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, of_rank)
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(everyone))
    dist.barrier()
    rank.pool.close()


# ------------------------------------------------------------------------------------------------------------
# The table
# ------------------------------------------------------------------------------------------------------------
def fit_engine(steps: list[tuple[int, int, float]], prompt_tokens: int) -> dict[str, float]:
    """Fit the seconds of an engine's step: a + c b with b sequences, and p per token of a prompt that starts.

    These are least squares over the medians of steps alike: the machine's hiccups are not the engine's.
    """
    by_kind = defaultdict(list)
    for running, started, seconds in steps:
        by_kind[running, started].append(seconds)
    plain = {b: statistics.median(found) for (b, started), found in by_kind.items() if started == 0}
    weight = np.sqrt([len(by_kind[b, 0]) for b in plain])
    matrix = np.stack([np.ones(len(plain)), np.array(list(plain))], axis=1)
    (a, c), *_ = np.linalg.lstsq(matrix * weight[:, None], np.array(list(plain.values())) * weight)
    extra = [(t - a - c * b) / n for (b, n), found in by_kind.items() if n for t in found]
    return {"a": float(a), "c": float(c), "p": max(0.0, statistics.median(extra)) / prompt_tokens}


def mean_engine(engines: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean cost of what fit_engine() found."""
    return {name: statistics.fmean(engine[name] for engine in engines) for name in ("a", "c", "p")}


def engine_seconds(workload: Workload, step: int, engine: dict) -> float:
    """Return the seconds of all tokens of a step at the best rate of one engine."""
    lengths, slots = workload.lengths[step], engine["slots"]
    prefill = engine["p"] * workload.recipe.prompt_tokens
    return lengths.sum() * (engine["a"] + engine["c"] * slots) / slots + lengths.size * prefill


def lower_bound(workload: Workload, step: int, engine: dict) -> float:
    """Return the seconds that no schedule beats: engines, workers, or the longest completion alone."""
    prefill, rewards = engine["p"] * workload.recipe.prompt_tokens, workload.reward_seconds[step]
    alone = workload.lengths[step] * (engine["a"] + engine["c"]) + prefill + rewards
    of_workers = rewards.sum() / engine["workers"]
    return max(max(engine_seconds(workload, step, engine), of_workers) / engine["ranks"], alone.max())


def recipe_at(ratio: float, recipe: Recipe, engine: dict, workers: int) -> Recipe:
    """Return the recipe whose slow rewards take a worker `ratio` times as long as its tokens an engine."""
    rules = {"rule_seconds": (0.0, 0.0)}
    if not ratio:
        return dataclasses.replace(recipe, slow_share=0.0, **rules)
    workload = Workload.make(dataclasses.replace(recipe, **rules))
    of_engine = sum(engine_seconds(workload, step, engine) for step in range(recipe.num_steps))
    factor = ratio * of_engine * workers / workload.reward_seconds.sum()
    slow = tuple(round(float(seconds * factor), 6) for seconds in recipe.slow_seconds)  # as rewards are
    return dataclasses.replace(recipe, slow_seconds=slow, **rules)


def make_record(ranks: list[dict], ratios: list[float], slots: int, workers: int) -> dict:
    """Sum up what the ranks measured: of each ratio medians over rounds, and the engine's mean cost."""
    common = {"slots": slots, "ranks": len(ranks), "workers": workers, "decode": ranks[0]["decode"]}
    cases, engines = [], []
    for number, ratio in enumerate(ratios):
        recipes = ranks[0]["cases"][number]["recipes"]
        rounds = [of_rank["cases"][number]["rounds"] for of_rank in ranks]
        cases.append({"ratio": ratio, "recipes": recipes, "rows": make_rows(rounds, recipes, common)})
        engines += [found["engine"] for of_rank in rounds for rows in of_rank for found in rows.values()]
    return {"cases": cases, "engine": mean_engine(engines) | common, "rounds": len(rounds[0])}


def make_rows(rounds: list[list[dict]], recipes: list[dict], common: dict) -> list[dict]:
    """Sum up the rows of one ratio; rounds: by rank and round; common: what all engines have alike."""
    for of_ranks in zip(*rounds):
        if len({json.dumps(found["digest"]) for rows in of_ranks for found in rows.values()}) != 1:
            sys.exit("the rows do not give the same completions and rewards: scheduling has changed a result")
    rows, before, works = [], None, [Workload.make(Recipe.of(recipe)) for recipe in recipes]
    for name in ROWS:
        engines = [
            mean_engine([rows[name]["engine"] for rows in of_ranks]) | common for of_ranks in zip(*rounds)
        ]
        bounds = [
            [lower_bound(workload, step, engine) for step in range(workload.recipe.num_steps)]
            for workload, engine in zip(works, engines)
        ]
        rows.append(make_row(name, before, rounds, bounds))
        before = name if name in STACK else before
    return rows


def make_row(name: str, before: str | None, rounds: list[list[dict]], bounds: list[list[float]]) -> dict:
    """Sum a row up: medians over rounds; a gain is over the row before it in the stack.

    rounds: by rank and round; bounds: by round and step.
    """
    steps = {other: seconds_of_steps(rounds, other) for other in ROWS}  # [round][step]
    seconds, first, previous = (
        [sum(of_round) for of_round in steps[other]] for other in (name, next(iter(ROWS)), before or name)
    )
    busy = [sum(sum(rows[name]["busy"]) for rows in of_ranks) for of_ranks in zip(*rounds)]
    latencies = sorted(x for of_rank in rounds for rows in of_rank for x in rows[name]["latencies"])
    decode, overlap, schedule, count_reward_time = ROWS[name]
    figures = {
        "seconds": seconds,
        "speedup": [f / s for f, s in zip(first, seconds)],
        "gain": [p / s for p, s in zip(previous, seconds)],
        "over_bound": [s / sum(bound) for s, bound in zip(seconds, bounds)],
        "over_bound_later": [sum(s[1:]) / sum(b[1:]) for s, b in zip(steps[name], bounds)],
    }
    row = {"name": name, "decode": decode, "overlap": overlap, "schedule": schedule}
    row["count_reward_time"] = count_reward_time
    for figure, found in figures.items():
        row |= {figure: statistics.median(found), f"{figure}_min": min(found), f"{figure}_max": max(found)}
    row["seconds_by_step"] = [statistics.median(of_step) for of_step in zip(*steps[name])]
    row["bubble"] = statistics.median(1 - b / (len(rounds) * s) for b, s in zip(busy, seconds))
    row["bound"] = statistics.median(map(sum, bounds))
    row["latency_median"] = statistics.median(latencies)
    row["latency_p99"] = latencies[int(0.99 * len(latencies))]
    return row


def seconds_of_steps(rounds: list[list[dict]], name: str) -> list[list[float]]:
    """Return the seconds of a row's steps, those of the slowest rank, by round."""
    return [list(map(max, zip(*(rows[name]["seconds"] for rows in of_ranks)))) for of_ranks in zip(*rounds)]


def table_lines(data: dict) -> list[str]:
    """Return the table of all rows at all ratios."""
    rows = [
        [
            f"{case['ratio']:g}",
            r["name"],
            *(
                f"{r[figure]:.2f} ({r[f'{figure}_min']:.2f}-{r[f'{figure}_max']:.2f})"
                for figure in ("seconds", "speedup", "gain", "over_bound", "over_bound_later")
            ),
            f"{r['bubble']:.3f}",
            f"{r['latency_median']:.3f}, {r['latency_p99']:.2f}",
        ]
        for case in data["cases"]
        for r in case["rows"]
    ]
    names = ["rewards", "row", "seconds", "speed-up", "over the stack before", "over the bound"]
    names += ["from the second step on", "bubble", "reward latency, p99, s"]
    return markdown(names, rows)


def print_record(record: dict) -> None:
    """Print what was measured and on what."""
    engine = record["engine"]
    print(
        f"{engine['ranks']} ranks, {engine['slots']} sequences at once, {engine['workers']} reward workers "
        f"each; a step takes {engine['a'] * 1e3:.2f} ms + {engine['c'] * 1e3:.3f} ms per sequence + "
        f"{engine['p'] * 1e3:.3f} ms per token of a new prompt; median (range) of {record['rounds']} rounds"
    )
    for case in record["cases"]:
        described = Workload.make(Recipe.of(case["recipes"][0])).describe()
        print(f"rewards {case['ratio']:g}: in the first round {described}")
    print("\n".join(table_lines(record)))
    print("all rows of a ratio gave the same completions and rewards")


def plot_record(record: dict, path: Path) -> None:
    """Draw the seconds of each row beside its lower bound, busy and idle, a panel per ratio."""
    plt, cases = pyplot(), record["cases"]
    size = (2 + 3.2 * len(cases), 2.8)
    figure, axes = plt.subplots(1, len(cases), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for axis, case in zip(axes[0], cases):
        rows = case["rows"][::-1]
        names, seconds = [r["name"] for r in rows], np.array([r["seconds"] for r in rows])
        idle = seconds * np.array([r["bubble"] for r in rows])
        axis.barh(names, seconds - idle, label="engines busy, mean over ranks")
        axis.barh(names, idle, left=seconds - idle, alpha=0.4, label="idle (bubble)")
        bounds = [r["bound"] for r in rows]
        axis.scatter(bounds, names, marker="|", s=250, color="black", label="lower bound at the row's pace")
        for i, r in enumerate(rows):
            axis.text(seconds[i], i, f" {r['speedup']:.2f}x", va="center", fontsize=8)
        axis.set(
            xlabel=f"seconds of {case['recipes'][0]['num_steps']} rollouts",
            title=f"rewards {case['ratio']:g}",
        )
        axis.margins(x=0.2)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Start the ranks and print the table; in a rank, do its part."""
    parser = make_parser(__doc__, plot=True, script=True)
    add = parser.add_argument
    add("--workload", type=Path, metavar="FILE", help="a recipe, see experiments.bench.workload")
    add("--ratios", type=float, nargs="+", default=RATIOS, help="seconds of a worker over an engine's")
    add("--repeats", type=int, default=5, help="rounds of all rows (default: %(default)s)")
    add("--slots", type=int, default=16, help="sequences an engine works on at once (default: %(default)s)")
    add("--workers", type=int, default=2, help="reward workers per rank (default: %(default)s)")
    add("--ranks", type=int, default=2, help="engines (default: %(default)s)")
    add("--model", type=Path, default=TINY, help="folder of the model")
    add("--result", type=Path, help="set by the benchmark itself in its ranks")
    args = parser.parse_args()
    if args.result:
        run_rank(work, args)
    if any(args.ratios) and not Recipe.load(args.workload).slow_share:
        parser.error(f"{args.workload}: slow_share is 0, so only --ratios 0 is left")
    if not (args.model / "config.json").is_file():
        sys.exit(f"{args.model} is missing; make it by `python -m data.tiny`")
    ranks = run_ranks("experiments.bench.rollout", args.ranks, sys.argv[1:])
    record = make_record(ranks, args.ratios, args.slots, args.workers)
    print_record(record)
    write_json(args.json, record)
    if args.plot:
        plot_record(record, args.plot)


if __name__ == "__main__":
    main()
