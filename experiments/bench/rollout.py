"""Measure what overlapped rewards and length-aware scheduling save in a rollout.

    python -m experiments.bench.rollout                       # two ranks, tiny MoE, five rounds of all rows
    python -m experiments.bench.rollout --json rollout.json --plot rollout.png
    python -m experiments.bench.rollout --script changed.py   # with a changed copy of train_rl.py

The workload is fixed and heavy-tailed (experiments.bench.workload): the length of every completion is given,
so that all rows do the same work, and sampling is greedy, so that it can be checked that all rows give the
same completions and rewards. A rule scores three quarters of the prompts; a function that takes 50 to 500 ms,
as a sandbox or a remote judge does, scores the others. Engine, reward workers and Rollouts are those of
training; there is no update in between.

Rows are cumulative and take turns within a round; a ratio is taken within a round, and the table shows
medians over rounds. bubble = 1 - sum(busy) / (ranks x makespan), busy being the seconds in which an engine
has something to generate. bound = max(all work / ranks, longest completion alone): work is a completion's
tokens at the engine's best rate, by the cost of a step t(b) = a + c b with b sequences, fitted in the same
run.
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
ROWS = {  # name -> (reward.decode, reward.overlap, schedule, rollout.count_reward_time)
    "sequential, arrival order": ("engine", False, "arrival", False),
    "+ decoding in reward workers": ("workers", False, "arrival", False),
    "+ overlapped rewards": ("workers", True, "arrival", False),
    "+ longest first": ("workers", True, "longest_first", False),
    "+ slow rewards count in the order": ("workers", True, "longest_first", True),
    "oracle instead of learned lengths": ("workers", True, "oracle", True),  # longest first by true lengths
}


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

    def requests(self, jobs, step: int) -> tuple[list, list]:
        """Make greedy requests of the recorded lengths, and of each prompt one with its reward's delay."""
        requests, prompts = super().requests(jobs, step)
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

    def __init__(self, trainer, workload: Workload, slots: int, workers: int, model: Path):
        import torch

        import moe_model
        from data.chat import load_tokenizer
        from data.prompts import Prompt
        from reward import RewardPool, decoder_json
        from rollout import RolloutEngine, RolloutSettings

        torch.set_num_threads(1)
        moe_model.init_deepspeed()
        self.trainer, self.workload, recipe = trainer, workload, workload.recipe
        self.tokenizer = load_tokenizer(model)
        settings = RolloutSettings(
            max_num_seqs=slots, dtype="float32", kv_cache_gib=0.5, capture_routes="off"
        )
        self.engine = RolloutEngine(model, recipe.prompt_tokens + recipe.longest_tokens, settings)
        policy = moe_model.Policy(moe_model.load_config(model))
        moe_model.load_hf(policy, model)
        self.engine.sync(moe_model.hf_tensors(policy), 0)
        self.pool = RewardPool(workers, timeout_s=60, tokenizer=decoder_json(self.tokenizer))
        rng = np.random.default_rng(recipe.seed)
        texts = [" ".join(map(str, rng.integers(0, 10, 40))) for _ in range(recipe.num_prompts)]
        kinds = [SLOW if slow else "numeric" for slow in workload.is_slow]
        self.prompts = [Prompt(text, "7", kind, "bench") for text, kind in zip(texts, kinds)]
        self.prompt_ids = [ids[: recipe.prompt_tokens] for ids in self.tokenizer(texts)["input_ids"]]
        self.steps: list[tuple[int, int, float]] = []  # sequences, prompts among them, seconds
        self.watch_steps()

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
        from runtime.metrics import Clock

        recipe, is_oracle = self.workload.recipe, schedule == "oracle"
        config = self.trainer.load_config(
            [
                "data.train=[{path: unused}]", f"rollout.prompts_per_step={recipe.num_prompts}",
                f"rollout.group_size={recipe.group_size}", f"reward.overlap={overlap}",
                f"rollout.schedule={'longest_first' if is_oracle else schedule}",
                f"rollout.count_reward_time={count_reward_time}", f"reward.decode={decode}",
            ]
        )  # fmt: skip
        recorded = type("RecordedRollouts", (RecordedLengths, self.trainer.Rollouts), {})
        rollouts = recorded(
            config, self.engine, self.pool, self.tokenizer, self.prompts, self.prompt_ids, Clock({})
        )
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
        while state.step < recipe.num_steps:
            dist.barrier()
            self.steps.clear()
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
        return found


def work(args) -> None:
    """Run all rows in turn, again and again; rank 0 writes what each rank measured. Collective."""
    import torch.distributed as dist
    from tqdm import tqdm

    workload = Workload.make(Recipe.load(args.workload))
    rank = Rank(load_trainer(args.script), workload, args.slots, args.workers, args.model)
    rank.run(*list(ROWS.values())[-1])  # warm-up
    rounds, steps = [], []
    progress = tqdm(total=args.repeats * len(ROWS), desc="bench", unit="row", disable=dist.get_rank() > 0)
    for repeat in range(args.repeats):
        names = list(ROWS)[repeat % len(ROWS) :] + list(ROWS)[: repeat % len(ROWS)]
        found = {}
        for name in names:
            found[name] = rank.run(*ROWS[name])
            steps += rank.steps  # engine steps of the row's last rollout
            progress.update()
        rounds.append(found)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {"rounds": rounds, "steps": steps, "decode": rank.decode_seconds()})
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


def lower_bound(workload: Workload, step: int, engine: dict, ranks: int) -> float:
    """Return the seconds that no schedule beats: all work over the ranks, or the longest completion alone."""
    lengths, slots = workload.lengths[step], engine["slots"]
    full = (engine["a"] + engine["c"] * slots) / slots
    prefill = engine["p"] * workload.recipe.prompt_tokens
    work = lengths.sum() * full + lengths.size * prefill
    return max(work / ranks, lengths.max() * (engine["a"] + engine["c"]) + prefill)


def make_record(ranks: list[dict], workload: Workload, slots: int, workers: int) -> dict:
    """Sum up what the ranks measured: rows with medians over rounds, the engine's cost, the recipe."""
    recipe, num_ranks = workload.recipe, len(ranks)
    engine = fit_engine([tuple(s) for of_rank in ranks for s in of_rank["steps"]], recipe.prompt_tokens)
    engine |= {"slots": slots, "ranks": num_ranks, "workers": workers, "decode": ranks[0]["decode"]}
    bounds = [lower_bound(workload, step, engine, num_ranks) for step in range(recipe.num_steps)]
    rounds = [of_rank["rounds"] for of_rank in ranks]
    digests = {json.dumps(found["digest"]) for of_rank in rounds for r in of_rank for found in r.values()}
    if len(digests) != 1:
        sys.exit("the rows do not give the same completions and rewards: scheduling has changed a result")
    rows, before = [], None
    for name in ROWS:
        rows.append(make_row(name, before, rounds, bounds, int(workload.lengths.sum())))
        before = name
    return {"rows": rows, "engine": engine, "recipe": dataclasses.asdict(recipe), "rounds": len(rounds[0])}


def make_row(
    name: str, before: str | None, rounds: list[list[dict]], bounds: list[float], num_tokens: int
) -> dict:
    """Sum a row up: medians over rounds; a gain is over the row before it."""
    seconds, bubbles, speedups, gains = [], [], [], []
    for of_ranks in zip(*rounds):  # the same round on every rank
        total = {other: sum(of_ranks[0][other]["seconds"]) for other in ROWS}
        makespans = [max(part) for part in zip(*(of_rank[name]["seconds"] for of_rank in of_ranks))]
        seconds.append(sum(makespans))
        busy = sum(sum(of_rank[name]["busy"]) for of_rank in of_ranks)
        bubbles.append(1 - busy / (len(of_ranks) * seconds[-1]))
        speedups.append(total[next(iter(ROWS))] / total[name])
        gains.append(total[before or name] / total[name])
    latencies = sorted(x for of_rank in rounds for r in of_rank for x in r[name]["latencies"])
    decode, overlap, schedule, count_reward_time = ROWS[name]
    by_step = seconds_by_step(rounds, name)
    return {
        "name": name, "decode": decode, "overlap": overlap, "schedule": schedule,
        "count_reward_time": count_reward_time, "seconds": statistics.median(seconds),
        "seconds_min": min(seconds), "seconds_max": max(seconds), "speedup": statistics.median(speedups),
        "speedup_min": min(speedups), "speedup_max": max(speedups), "gain": statistics.median(gains),
        "seconds_by_step": by_step, "bubble": statistics.median(bubbles), "bound": sum(bounds),
        "over_bound": statistics.median(seconds) / sum(bounds),
        "over_bound_later": sum(by_step[1:]) / sum(bounds[1:]),
        "tokens_per_s": num_tokens / statistics.median(seconds),
        "latency_median": statistics.median(latencies),
        "latency_p99": latencies[int(0.99 * len(latencies))],
    }  # fmt: skip


def seconds_by_step(rounds: list[list[dict]], name: str) -> list[float]:
    """Return the seconds of each step of a row, median over rounds."""
    makespans = [
        [max(part) for part in zip(*(of_rank[name]["seconds"] for of_rank in of_ranks))]
        for of_ranks in zip(*rounds)
    ]
    return [statistics.median(of_step) for of_step in zip(*makespans)]


def table_lines(data: dict) -> list[str]:
    """Return the table of all rows."""
    rows = [
        [
            r["name"],
            f"{r['seconds']:.2f} ({r['seconds_min']:.2f}-{r['seconds_max']:.2f})",
            f"{r['speedup']:.2f} ({r['speedup_min']:.2f}-{r['speedup_max']:.2f})",
            f"{r['gain']:.2f}",
            f"{r['bubble']:.3f}",
            f"{r['tokens_per_s']:,.0f}",
            f"{r['over_bound']:.2f}, {r['over_bound_later']:.2f}",
            f"{r['latency_median']:.3f}, {r['latency_p99']:.2f}",
        ]
        for r in data["rows"]
    ]
    names = ["row", "seconds", "speed-up", "over the row above", "bubble", "tokens/s"]
    names += ["over the bound, from the second step on", "reward latency, p99, s"]
    return markdown(names, rows)


def print_record(record: dict) -> None:
    """Print what was measured and on what."""
    engine = record["engine"]
    print(
        f"{Workload.make(Recipe.of(record['recipe'])).describe()}; {engine['ranks']} ranks, "
        f"{engine['slots']} sequences at once, {engine['workers']} reward workers each; a step of the engine "
        f"takes {engine['a'] * 1e3:.2f} ms + {engine['c'] * 1e3:.3f} ms per sequence + "
        f"{engine['p'] * 1e3:.3f} ms per token of a new prompt; median (range) of {record['rounds']} rounds"
    )
    print("\n".join(table_lines(record)))
    print(f"lower bound: {record['rows'][0]['bound']:.2f} s; all rows gave the same completions and rewards")


def plot_record(record: dict, path: Path) -> None:
    """Draw the seconds of each row beside the lower bound, busy and idle."""
    plt, rows = pyplot(), record["rows"][::-1]
    names, seconds = [r["name"] for r in rows], np.array([r["seconds"] for r in rows])
    idle = seconds * np.array([r["bubble"] for r in rows])
    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    axes.barh(names, seconds - idle, label="engines busy, mean over ranks")
    axes.barh(names, idle, left=seconds - idle, alpha=0.4, label="idle (bubble)")
    axes.axvline(rows[0]["bound"], color="black", linestyle="--", label="lower bound")
    for i, r in enumerate(rows):
        axes.text(seconds[i], i, f" {r['speedup']:.2f}x", va="center")
    axes.set(xlabel=f"seconds of {record['recipe']['num_steps']} rollouts")
    axes.margins(x=0.1)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Start the ranks and print the table; in a rank, do its part."""
    parser = make_parser(__doc__, plot=True, script=True)
    add = parser.add_argument
    add("--workload", type=Path, metavar="FILE", help="a recipe, see experiments.bench.workload")
    add("--repeats", type=int, default=5, help="rounds of all rows (default: %(default)s)")
    add("--slots", type=int, default=16, help="sequences an engine works on at once (default: %(default)s)")
    add("--workers", type=int, default=8, help="reward workers per rank (default: %(default)s)")
    add("--ranks", type=int, default=2, help="engines (default: %(default)s)")
    add("--model", type=Path, default=TINY, help="folder of the model")
    add("--result", type=Path, help="set by the benchmark itself in its ranks")
    args = parser.parse_args()
    if args.result:
        run_rank(work, args)
    workload = Workload.make(Recipe.load(args.workload))
    if not (args.model / "config.json").is_file():
        sys.exit(f"{args.model} is missing; make it by `python -m data.tiny`")
    ranks = run_ranks("experiments.bench.rollout", args.ranks, sys.argv[1:])
    record = make_record(ranks, workload, args.slots, args.workers)
    print_record(record)
    write_json(args.json, record)
    if args.plot:
        plot_record(record, args.plot)


if __name__ == "__main__":
    main()
