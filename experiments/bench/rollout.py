"""Measure the time that overlapped rewards and length-aware scheduling save in a rollout.

    python -m experiments.bench.rollout                       # two ranks, tiny MoE, five rounds of all rows
    python -m experiments.bench.rollout --json rollout.json
    python -m experiments.bench.rollout --script changed.py   # with a changed copy of train_rl.py

The workload is heavy-tailed (experiments.bench.workload) and fixes the length of every completion, so that
all rows of a round do the same work. Sampling is greedy, and the benchmark fails if two rows give different
completions or rewards. Each round draws new lengths from the next seed.

Reward time is stated relative to the engine, because machines differ: the ratio is the seconds of a reward
worker over the seconds of an engine at peak throughput. For example, at ratio 1 the slow rewards of a step
keep the workers busy as long as its tokens keep the engine busy. At ratio 0 a rule scores all prompts. At
other ratios half of the prompts are scored by a function that sleeps, like a wait for a sandbox or a remote
judge. The engine, the reward workers and sample_step() are the ones of training; no update runs in between.

Rows take turns within a round. Ratios (between rows, and over the bound) are taken within a round, and the
table shows medians over rounds. Each row of the stack adds one change to the previous row; each contrast
differs from the full stack in one setting.

    bubble = 1 - sum(busy) / (ranks x makespan)      busy: seconds in which an engine has work
    bound = max(all work / ranks, longest completion alone with its reward, all rewards / workers)

Work is counted in tokens at peak throughput. The cost of an engine step, t(b) = a + c b for b sequences, is
fitted to the same run as the bound, because the machine's speed drifts.
"""

import dataclasses
import hashlib
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

from experiments.bench.common import (
    TINY,
    load_trainer,
    make_parser,
    markdown,
    run_rank,
    run_ranks,
    write_results,
)
from experiments.bench.workload import Recipe, Workload

SLOW = "experiments.bench.workload:slow_verify"
RATIOS = (0.0, 0.1, 1.0)  # worker seconds / engine seconds: rules only, a tenth, as long as the rollout
STACK = {  # name: (reward.decode, reward.overlap, schedule, rollout.count_reward_time)
    "sequential, arrival order": ("engine", False, "arrival", False),
    "+ rewards overlap": ("workers", True, "arrival", False),
    "+ longest first, rewards counted": ("workers", True, "longest_first", True),
}
CONTRASTS = {  # each replaces the last row of the stack
    "rewards not counted": ("workers", True, "longest_first", False),
    "true lengths known": ("workers", True, "oracle", True),  # longest first by true lengths
}
ROWS = STACK | CONTRASTS


# ------------------------------------------------------------------------------------------------------------
# In each rank
# ------------------------------------------------------------------------------------------------------------
def replay_workload(trainer: ModuleType) -> None:
    """Replace two functions of the trainer: sampling takes lengths and reward delays from run.workload.

    run.is_oracle: the schedule knows the true lengths in advance.
    """
    trainer_requests_of = trainer.requests_of
    trainer_set_expected_costs = trainer.set_expected_costs

    def set_expected_costs(run, jobs) -> None:
        """Set the trainer's own expectations, and for the oracle the true mean length."""
        trainer_set_expected_costs(run, jobs)
        lengths = run.workload.lengths[run.state.step]  # [prompt, sample]
        for group, _ in jobs if run.is_oracle else ():
            group.expected_tokens = float(lengths[group.prompt_index].mean())
            group.guessed = False

    def requests_of(run, jobs) -> tuple[list, list]:
        """Make greedy requests of the recorded lengths; the answer of a slow prompt is its delay."""
        requests, prompts = trainer_requests_of(run, jobs)
        lengths = run.workload.lengths[run.state.step]
        delays = run.workload.reward_seconds[run.state.step]
        samples = [(group.prompt_index, sample) for group, numbers in jobs for sample in numbers]
        for i, sample in enumerate(samples):
            tokens = int(lengths[sample])
            changes = {"temperature": 0.0, "max_new_tokens": tokens, "min_new_tokens": tokens}
            if run.is_oracle:
                changes["expected_tokens"] = float(tokens)
            requests[i] = dataclasses.replace(requests[i], **changes)
            if prompts[i].kind == SLOW:
                prompts[i] = dataclasses.replace(prompts[i], answer=str(float(delays[sample])))
        return requests, prompts

    trainer.set_expected_costs = set_expected_costs
    trainer.requests_of = requests_of


class Rank:
    """An engine with the tiny model, its reward workers, and the measured seconds of engine steps."""

    def __init__(self, trainer: ModuleType, recipe: Recipe, slots: int, workers: int, model: Path):
        import torch

        import moe_model
        from data.chat import load_tokenizer
        from reward import RewardPool, decoder_json
        from rollout import RolloutEngine
        from settings import RolloutSettings

        torch.set_num_threads(1)
        moe_model.init_deepspeed()
        replay_workload(trainer)
        self.trainer = trainer
        self.slots = slots
        self.tokenizer = load_tokenizer(model)
        settings = RolloutSettings(
            max_num_seqs=slots, dtype="float32", kv_cache_gib=0.5, capture_routes="off"
        )
        self.engine = RolloutEngine(model, recipe.prompt_tokens + recipe.longest_tokens, settings)
        policy = moe_model.Policy(moe_model.load_config(model))
        moe_model.load_hf(policy, model)
        self.engine.sync(moe_model.hf_tensors(policy), 0)
        self.pool = RewardPool(workers, timeout_s=60, tokenizer=decoder_json(self.tokenizer))
        self.steps: list[tuple[int, int, float]] = []  # (sequences, new prompts, seconds)
        self.time_steps()

    def set_workload(self, workload: Workload) -> None:
        """Set the workload of the next rows."""
        from data.prompts import Prompt

        self.workload = workload
        recipe = workload.recipe
        rng = np.random.default_rng(recipe.seed)
        texts = [" ".join(map(str, rng.integers(0, 10, 40))) for _ in range(recipe.num_prompts)]
        kinds = [SLOW if slow else "numeric" for slow in workload.is_slow]
        self.prompts = [Prompt(text, "7", kind, "bench") for text, kind in zip(texts, kinds)]
        self.prompt_ids = [ids[: recipe.prompt_tokens] for ids in self.tokenizer(texts)["input_ids"]]

    def time_steps(self) -> None:
        """Time every step of vLLM, including the time to add its new requests."""
        engine = self.engine.engine
        step = engine.step
        add_request = engine.add_request
        added = []  # seconds of each request that was added since the last step

        def timed_step():
            running = engine.get_num_unfinished_requests()
            start = time.perf_counter()
            outputs = step()
            self.steps.append((running, len(added), time.perf_counter() - start + sum(added)))
            added.clear()
            return outputs

        def timed_add(*args, **options):
            start = time.perf_counter()
            add_request(*args, **options)
            added.append(time.perf_counter() - start)

        engine.step = timed_step
        engine.add_request = timed_add

    def decode_seconds(self) -> float:
        """Return the seconds to decode a token into text."""
        completion = list(range(4, 60)) * 8
        times = []
        for _ in range(20):
            start = time.perf_counter()
            self.tokenizer.decode(completion, skip_special_tokens=True)
            times.append(time.perf_counter() - start)
        return statistics.median(times) / len(completion)

    def make_run(self, decode: str, overlap: bool, schedule: str, count_reward_time: bool) -> SimpleNamespace:
        """Return the fields of lifecycle.Run that sampling reads, with the settings of a row."""
        from data.history import PromptHistory
        from data.stages import Offers
        from runtime.checkpoint import TrainState
        from runtime.metrics import Clock

        recipe = self.workload.recipe
        is_oracle = schedule == "oracle"
        config = self.trainer.load_config(
            [
                "data.train=[{path: unused}]", f"rollout.prompts_per_step={recipe.num_prompts}",
                f"rollout.group_size={recipe.group_size}", f"reward.overlap={overlap}",
                f"rollout.schedule={'longest_first' if is_oracle else schedule}",
                f"rollout.count_reward_time={count_reward_time}", f"reward.decode={decode}",
                f"rollout.max_num_seqs={self.slots}",
            ]
        )  # fmt: skip
        return SimpleNamespace(
            config=config, engine=self.engine, pool=self.pool, interaction=None, tokenizer=self.tokenizer,
            clock=Clock({}),
            prompts=self.prompts, prompt_ids=self.prompt_ids, offers=Offers(range(recipe.num_prompts)),
            history=PromptHistory.from_offline([None] * recipe.num_prompts, recipe.group_size),
            state=TrainState(), workload=self.workload, is_oracle=is_oracle,
        )  # fmt: skip

    def measure(self, *row) -> dict:
        """Run the steps of a row; return this rank's seconds by step and a digest of all ranks' results."""
        import torch.distributed as dist

        run = self.make_run(*row)
        state = run.state
        self.pool.seconds.clear()
        self.steps.clear()
        figures = {"seconds": [], "busy": [], "digest": [], "latencies": []}
        while state.step < self.workload.recipe.num_steps:
            self.engine.policy_version = state.step  # no update: all steps sample from the same policy
            dist.barrier()
            start = time.perf_counter()
            groups, outcomes, _ = self.trainer.sample_step(run)
            figures["seconds"].append(time.perf_counter() - start)  # until the slowest rank's last verdict
            figures["busy"].append(run.clock.take_step()["seconds/rollout"])
            figures["latencies"] += self.pool.latencies
            self.pool.latencies = []
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, groups)
            groups = sorted(sum(gathered, []), key=lambda group: group.slot)
            results = [[(c.token_ids, c.verdict) for c in group.completions] for group in groups]
            figures["digest"].append(hashlib.sha256(repr(results).encode()).hexdigest())
            run.history.update(list(outcomes.values()), state.step, run.config.zero_variance.history_decay)
            state.step += 1
        return figures | {"engine": fit_engine(self.steps, self.workload.recipe.prompt_tokens)}

    def calibrate(self) -> dict[str, float]:
        """Return the cost of an engine step, averaged over ranks. Collective."""
        import torch.distributed as dist

        for _ in range(2):  # the first is a warm-up
            figures = self.measure(*list(STACK.values())[-1])
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, figures["engine"])
        return mean_engine(gathered) | {"slots": self.slots}


def work(args) -> None:
    """Measure all rows in turn, round after round; rank 0 writes the figures of all ranks. Collective."""
    import torch.distributed as dist
    from tqdm import tqdm

    recipe = Recipe.load(args.workload)
    rank = Rank(load_trainer(args.script), recipe, args.slots, args.workers, args.model)
    rank.set_workload(Workload.make(recipe_at(0.0, recipe, {}, args.workers)))
    engine = rank.calibrate()
    cases = [{"recipes": [], "rounds": []} for _ in args.ratios]  # recipe and {row: figures} of each round
    total = args.repeats * len(ROWS) * len(cases)
    progress = tqdm(total=total, desc="bench", unit="row", disable=dist.get_rank() > 0)
    for repeat in range(args.repeats):
        names = list(ROWS)[repeat % len(ROWS) :] + list(ROWS)[: repeat % len(ROWS)]
        round_recipe = dataclasses.replace(recipe, seed=recipe.seed + repeat)
        for ratio, case in zip(args.ratios, cases):
            workload = Workload.make(recipe_at(ratio, round_recipe, engine, args.workers))
            rows = {}
            rank.set_workload(workload)
            case["recipes"].append(dataclasses.asdict(workload.recipe))
            case["rounds"].append(rows)
            for name in names:
                rows[name] = rank.measure(*ROWS[name])
                progress.update()
    rank_figures = {"cases": cases, "decode": rank.decode_seconds()}
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rank_figures)
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(gathered))
    dist.barrier()
    rank.pool.close()


# ------------------------------------------------------------------------------------------------------------
# The table
# ------------------------------------------------------------------------------------------------------------
def fit_engine(steps: list[tuple[int, int, float]], prompt_tokens: int) -> dict[str, float]:
    """Fit the seconds of an engine step: a + c b for b sequences, and p per prompt token of a new sequence.

    The fit is least squares over the medians of equal steps, so that outliers have little weight.
    """
    by_kind = defaultdict(list)
    for running, started, seconds in steps:
        by_kind[running, started].append(seconds)
    plain = {b: statistics.median(times) for (b, started), times in by_kind.items() if started == 0}
    weight = np.sqrt([len(by_kind[b, 0]) for b in plain])
    matrix = np.stack([np.ones(len(plain)), np.array(list(plain))], axis=1)
    (a, c), *_ = np.linalg.lstsq(matrix * weight[:, None], np.array(list(plain.values())) * weight)
    extra = [(t - a - c * b) / n for (b, n), times in by_kind.items() if n for t in times]
    return {"a": float(a), "c": float(c), "p": max(0.0, statistics.median(extra)) / prompt_tokens}


def mean_engine(engines: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of the costs that fit_engine() returned."""
    return {name: statistics.fmean(engine[name] for engine in engines) for name in ("a", "c", "p")}


def engine_seconds(workload: Workload, step: int, engine: dict) -> float:
    """Return the seconds of all tokens of a step on one engine at peak throughput."""
    lengths = workload.lengths[step]
    slots = engine["slots"]
    prefill = engine["p"] * workload.recipe.prompt_tokens
    return lengths.sum() * (engine["a"] + engine["c"] * slots) / slots + lengths.size * prefill


def lower_bound(workload: Workload, step: int, engine: dict) -> float:
    """Return a lower bound for any schedule: engines, workers, or the longest completion alone."""
    prefill = engine["p"] * workload.recipe.prompt_tokens
    rewards = workload.reward_seconds[step]
    alone = workload.lengths[step] * (engine["a"] + engine["c"]) + prefill + rewards
    worker_seconds = rewards.sum() / engine["workers"]
    return max(max(engine_seconds(workload, step, engine), worker_seconds) / engine["ranks"], alone.max())


def recipe_at(ratio: float, recipe: Recipe, engine: dict, workers: int) -> Recipe:
    """Return the recipe whose slow rewards take a worker `ratio` times an engine's seconds for the tokens."""
    rules = {"rule_seconds": (0.0, 0.0)}
    if not ratio:
        return dataclasses.replace(recipe, slow_share=0.0, **rules)
    workload = Workload.make(dataclasses.replace(recipe, **rules))
    total_seconds = sum(engine_seconds(workload, step, engine) for step in range(recipe.num_steps))
    factor = ratio * total_seconds * workers / workload.reward_seconds.sum()
    slow = tuple(round(float(seconds * factor), 6) for seconds in recipe.slow_seconds)  # rounded like rewards
    return dataclasses.replace(recipe, slow_seconds=slow, **rules)


def make_record(ranks: list[dict], ratios: list[float], slots: int, workers: int) -> dict:
    """Summarise the figures of all ranks: medians over rounds per ratio, and mean engine costs."""
    common = {"slots": slots, "ranks": len(ranks), "workers": workers, "decode": ranks[0]["decode"]}
    cases = []
    engines = []
    for number, ratio in enumerate(ratios):
        recipes = ranks[0]["cases"][number]["recipes"]
        rounds = [rank["cases"][number]["rounds"] for rank in ranks]
        cases.append({"ratio": ratio, "recipes": recipes, "rows": make_rows(rounds, recipes, common)})
        engines += [
            figures["engine"] for rank_rounds in rounds for rows in rank_rounds for figures in rows.values()
        ]
    return {"cases": cases, "engine": mean_engine(engines) | common, "rounds": len(rounds[0])}


def make_rows(rounds: list[list[dict]], recipes: list[dict], common: dict) -> list[dict]:
    """Summarise the rows of one ratio. rounds: by rank and round; common: costs that all engines share."""
    for rank_rows in zip(*rounds):
        if len({json.dumps(figures["digest"]) for rows in rank_rows for figures in rows.values()}) != 1:
            sys.exit("two rows gave different completions or rewards: scheduling has changed a result")
    rows = []
    previous = None
    works = [Workload.make(Recipe.of(recipe)) for recipe in recipes]
    for name in ROWS:
        engines = [
            mean_engine([rows[name]["engine"] for rows in rank_rows]) | common for rank_rows in zip(*rounds)
        ]
        bounds = [
            [lower_bound(workload, step, engine) for step in range(workload.recipe.num_steps)]
            for workload, engine in zip(works, engines)
        ]
        rows.append(make_row(name, previous, rounds, bounds))
        previous = name if name in STACK else previous
    return rows


def make_row(name: str, before: str | None, rounds: list[list[dict]], bounds: list[list[float]]) -> dict:
    """Summarise a row: medians over rounds; a gain is over the previous row of the stack.

    rounds: by rank and round; bounds: by round and step.
    """
    steps = {other: seconds_of_steps(rounds, other) for other in ROWS}  # [round][step]
    totals = {other: [sum(round_steps) for round_steps in steps[other]] for other in ROWS}
    seconds = totals[name]
    first = totals[next(iter(ROWS))]
    previous = totals[before or name]
    busy = [sum(sum(rows[name]["busy"]) for rows in rank_rows) for rank_rows in zip(*rounds)]
    latencies = sorted(x for rank_rounds in rounds for rows in rank_rounds for x in rows[name]["latencies"])
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
    for figure, values in figures.items():
        row |= {figure: statistics.median(values), f"{figure}_min": min(values), f"{figure}_max": max(values)}
        row[f"{figure}_rounds"] = values
    row["seconds_by_step"] = [statistics.median(step_seconds) for step_seconds in zip(*steps[name])]
    row["bubble"] = statistics.median(1 - b / (len(rounds) * s) for b, s in zip(busy, seconds))
    row["bound"] = statistics.median(map(sum, bounds))
    row["latency_median"] = statistics.median(latencies)
    row["latency_p99"] = latencies[int(0.99 * len(latencies))]
    return row


def seconds_of_steps(rounds: list[list[dict]], name: str) -> list[list[float]]:
    """Return the slowest rank's seconds of a row's steps, by round."""
    return [list(map(max, zip(*(rows[name]["seconds"] for rows in rank_rows)))) for rank_rows in zip(*rounds)]


def table_lines(data: dict) -> list[str]:
    """Return the table of all rows at all ratios; ratios with their range over the rounds."""
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
    names = ["rewards", "row", "seconds", "speed-up", "over the bound"]
    return markdown(names, rows)


def print_record(record: dict) -> None:
    """Print the figures and the set-up."""
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


def main() -> None:
    """Start the ranks and print the table; in a rank, run work()."""
    parser = make_parser(__doc__, script=True)
    add = parser.add_argument
    add("--workload", type=Path, metavar="FILE", help="recipe file, written by experiments.bench.workload")
    add(
        "--ratios",
        type=float,
        nargs="+",
        default=RATIOS,
        help="reward seconds of a worker over engine seconds, for example 0 1",
    )
    add("--repeats", type=int, default=5, help="rounds of all rows (default: %(default)s)")
    add("--slots", type=int, default=16, help="concurrent sequences per engine (default: %(default)s)")
    add("--workers", type=int, default=2, help="reward workers per rank (default: %(default)s)")
    add("--ranks", type=int, default=2, help="engines (default: %(default)s)")
    add("--model", type=Path, default=TINY, help="folder of the model")
    add("--result", type=Path, help="internal: set for the ranks")
    args = parser.parse_args()
    if args.result:
        run_rank(work, args)
    if any(args.ratios) and not Recipe.load(args.workload).slow_share:
        parser.error(f"{args.workload}: slow_share is 0, which allows only --ratios 0")
    if not (args.model / "config.json").is_file():
        sys.exit(f"{args.model} is missing; make it by `bash experiments/prepare.sh tiny`")
    ranks = run_ranks("experiments.bench.rollout", args.ranks, sys.argv[1:])
    record = make_record(ranks, args.ratios, args.slots, args.workers)
    print_record(record)
    write_results(args.json, record)


if __name__ == "__main__":
    main()
