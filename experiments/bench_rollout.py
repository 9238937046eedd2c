"""What overlapped rewards and length-aware scheduling save in a rollout: the README's system table.

    python experiments/bench_rollout.py                       two ranks, tiny MoE, five rounds of all rows
    python experiments/bench_rollout.py --json rollout.json --plot rollout.png

A fixed heavy-tailed workload (experiments/rollouts/workload.json, made by experiments/workload.py): the
length of every completion is given, so that all rows do the same work, and greedy, so that it can be checked
that all rows give the same completions and rewards. A rule scores three quarters of the prompts; a function
that takes 50 to 500 ms, as a sandbox or a remote judge does, the others. Engine, reward workers,
sample_groups() and sample_and_score() are those of training; there is no update in between.

Rows are cumulative and take turns within a round; a ratio is taken within a round, and the table shows
medians over rounds. bubble = 1 - sum(busy) / (ranks x makespan), busy being the seconds in which an engine
has something to generate. bound = max(all work / ranks, longest completion alone): work is a completion's
tokens at the engine's best rate, by the cost of a step t(b) = a + c b with b sequences, fitted in the same
run.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

from experiments.workload import Workload

WORKLOAD = ROOT / "experiments" / "rollouts" / "workload.json"
SLOW = "experiments.bench_rollout:slow_verify"
ROWS = {  # name -> (reward.decode, reward.overlap, rollout.schedule, rollout.reward_aware)
    "sequential, arrival order": ("engine", False, "arrival", False),
    "+ decoding in reward workers": ("workers", False, "arrival", False),
    "+ overlapped rewards": ("workers", True, "arrival", False),
    "+ longest first": ("workers", True, "longest_first", False),
    "+ slow rewards count in the order": ("workers", True, "longest_first", True),
    "oracle instead of learned lengths": ("workers", True, "oracle", True),
}


def slow_verify(completion: str, answer: str) -> float:
    """A reward that takes as many seconds as its answer says; the score is a hash of the text."""
    time.sleep(float(answer))
    return zlib.crc32(completion.encode()) % 2


# ---- In each rank ------------------------------------------------------------------------------------------
class Rank:
    """An engine with the tiny model, reward workers, and the clock of the engine's steps."""

    def __init__(self, workload: Workload, slots: int, workers: int, model: Path):
        import torch
        from transformers import AutoTokenizer

        import moe_model
        from data.prompts import Prompt
        from data.stream import decoder_json
        from reward import RewardPool
        from rollout import RolloutEngine

        torch.set_num_threads(1)
        moe_model.init_deepspeed()
        self.workload, self.tokenizer = workload, AutoTokenizer.from_pretrained(model, local_files_only=True)
        longest = workload.recipe.prompt_tokens + workload.recipe.longest_tokens
        self.sampler = RolloutEngine(
            model, max_model_len=longest, max_num_seqs=slots, dtype="float32", kv_cache_gib=0.5,
            prefix_caching=True, sleep_level=0,
        )  # fmt: skip
        policy = moe_model.Policy(moe_model.load_config(model))
        moe_model.load_hf(policy, model)
        self.sampler.sync(moe_model.hf_tensors(policy), 0)
        self.pool = RewardPool(workers, timeout_s=60, tokenizer=decoder_json(self.tokenizer))
        rng = np.random.default_rng(workload.recipe.seed)
        texts = [" ".join(map(str, rng.integers(0, 10, 40))) for _ in range(workload.recipe.num_prompts)]
        self.prompts = [Prompt(text, "7", "numeric", "bench") for text in texts]
        self.prompt_ids = [ids[: workload.recipe.prompt_tokens] for ids in self.tokenizer(texts)["input_ids"]]
        self.steps: list[tuple[int, int, float]] = []  # sequences, prompts among them, seconds
        self.watch_steps()

    def watch_steps(self) -> None:
        engine, step, add = self.sampler.engine, self.sampler.engine.step, self.sampler.engine.add_request
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
        """Per token turned into text."""
        completion, times = list(range(4, 60)) * 8, []
        for _ in range(20):
            start = time.perf_counter()
            self.tokenizer.decode(completion, skip_special_tokens=True)
            times.append(time.perf_counter() - start)
        return statistics.median(times) / len(completion)

    def requests_of(self, work, step: int) -> tuple[list, list]:
        """Greedy requests of the recorded lengths, and a prompt with its reward's delay for each."""
        from rollout import Request

        recipe, requests, prompts = self.workload.recipe, [], []
        for group, samples in work:
            for sample in samples:
                tokens = int(self.workload.lengths[step, group.prompt_index, sample])
                delay = float(self.workload.reward_seconds[step, group.prompt_index, sample])
                ids, expected = self.prompt_ids[group.prompt_index], group.expected(sample)
                requests.append(
                    Request(ids, 0, 0.0, tokens, tokens, group.place, expected, group.guessed)
                )  # fmt: skip
                own = {"kind": SLOW, "answer": str(delay)} if delay >= recipe.slow_seconds[0] else {}
                prompts.append(dataclasses.replace(self.prompts[group.prompt_index], **own))
        return requests, prompts

    def run(self, decode: str, overlap: bool, schedule: str, reward_aware: bool) -> dict:
        """Seconds and busy seconds of this rank by step; a digest of all completions and verdicts."""
        import torch.distributed as dist

        import train_rl
        from experiments.metrics import Clock
        from experiments.settings import load_config

        recipe, state, clock = self.workload.recipe, train_rl.TrainState(), Clock({})
        config = load_config(
            [
                "data.train=[{path: unused}]", f"rollout.prompts_per_step={recipe.num_prompts}",
                f"rollout.group_size={recipe.group_size}", f"rollout.schedule={schedule}",
                f"rollout.reward_aware={reward_aware}", f"reward.decode={decode}",
                f"reward.overlap={overlap}",
            ]
        )  # fmt: skip
        history = train_rl.PromptHistory.from_offline([None] * recipe.num_prompts, recipe.group_size)
        self.pool.seconds.clear()
        found = {"seconds": [], "busy": [], "digest": [], "latencies": []}

        def generate(work):
            requests, prompts = self.requests_of(work, state.step)
            requests = train_rl.count_rewards(requests, prompts, self.sampler, self.pool, config)
            results = train_rl.sample_and_score(
                self.sampler, self.pool, self.tokenizer, requests, prompts, 0, clock, "rollout", config.reward
            )
            owners = [group for group, samples in work for _ in samples]
            for group, completion, verdict in zip(owners, *results):
                group.completions.append(completion)
                group.verdicts.append(verdict)

        def look_ahead(work):
            return [self.workload.lengths[state.step, group.prompt_index].tolist() for group, _ in work]

        while state.step < recipe.num_steps:
            dist.barrier()
            self.steps.clear()
            start = time.perf_counter()
            groups, outcomes, _ = train_rl.sample_groups(
                generate, look_ahead, state, history, self.prompts, config
            )  # until the slowest rank has its last verdict
            found["seconds"].append(time.perf_counter() - start)
            found["busy"].append(clock.take_step()["seconds/rollout"])
            found["latencies"] += self.pool.latencies
            self.pool.latencies = []
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, groups)
            groups = sorted(sum(everyone, []), key=lambda group: group.place)
            results = [([c.token_ids for c in group.completions], group.verdicts) for group in groups]
            found["digest"].append(hashlib.sha256(repr(results).encode()).hexdigest())
            history.update(list(outcomes.values()), state.step, config.zero_variance.history_decay)
            state.step += 1
        return found


def worker(args) -> None:
    """All rows in turn, again and again; rank 0 writes what each rank measured."""
    import torch.distributed as dist
    from tqdm import tqdm

    rank = Rank(Workload.load(args.workload), args.slots, args.workers, args.model)
    rank.run(*list(ROWS.values())[-1])  # warm-up
    rounds, steps = [], []
    progress = tqdm(total=args.repeats * len(ROWS), desc="bench", unit="row", disable=dist.get_rank() > 0)
    for repeat in range(args.repeats):
        names = list(ROWS)[repeat % len(ROWS) :] + list(ROWS)[: repeat % len(ROWS)]
        found = {}
        for name in names:
            found[name] = rank.run(*ROWS[name])
            steps += rank.steps  # of the last step of the row
            progress.update()
        rounds.append(found)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {"rounds": rounds, "steps": steps, "decode": rank.decode_seconds()})
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(everyone))
    dist.barrier()
    rank.pool.close()
    sys.stdout.flush()
    os._exit(0)  # skips the leak reports of vLLM's native libraries


# ---- The table ---------------------------------------------------------------------------------------------
def fit_engine(steps: list[tuple[int, int, float]], prompt_tokens: int) -> dict[str, float]:
    """Seconds of an engine's step, a + c b with b sequences, and p per token of a prompt that starts in it.

    Least squares over the medians of steps alike: the machine's hiccups are not the engine's.
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
    """Seconds that no schedule can beat: all work over the ranks, or the longest completion alone."""
    lengths, slots = workload.lengths[step], engine["slots"]
    full = (engine["a"] + engine["c"] * slots) / slots
    prefill = engine["p"] * workload.recipe.prompt_tokens
    work = lengths.sum() * full + lengths.size * prefill
    return max(work / ranks, lengths.max() * (engine["a"] + engine["c"]) + prefill)


def table_of(ranks: list[dict], workload: Workload, slots: int, workers: int) -> dict:
    """Rows with medians over rounds; what was measured, and the engine's cost."""
    steps = [tuple(step) for of_rank in ranks for step in of_rank["steps"]]
    engine = fit_engine(steps, workload.recipe.prompt_tokens)
    engine |= {"slots": slots, "ranks": len(ranks), "workers": workers, "decode": ranks[0]["decode"]}
    bounds = [lower_bound(workload, step, engine, len(ranks)) for step in range(workload.recipe.num_steps)]
    bound = sum(bounds)
    rounds = [of_rank["rounds"] for of_rank in ranks]
    digests = {json.dumps(found["digest"]) for of_rank in rounds for r in of_rank for found in r.values()}
    if len(digests) != 1:
        sys.exit("the rows do not give the same completions and rewards: scheduling has changed a result")
    baseline, rows = next(iter(ROWS)), []
    before = None
    for name, (decode, overlap, schedule, reward_aware) in ROWS.items():
        seconds, bubbles, speedups, gains = [], [], [], []
        for r in range(len(rounds[0])):
            of_ranks = [of_rank[r][name] for of_rank in rounds]
            makespans = [max(part) for part in zip(*(found["seconds"] for found in of_ranks))]
            seconds.append(sum(makespans))
            busy = sum(sum(found["busy"]) for found in of_ranks)
            bubbles.append(1 - busy / (len(ranks) * seconds[-1]))
            total = {other: sum(rounds[0][r][other]["seconds"]) for other in ROWS}
            speedups.append(total[baseline] / total[name])
            gains.append(total[before or name] / total[name])
        latencies = sorted(x for of_rank in rounds for r in of_rank for x in r[name]["latencies"])
        tokens = int(workload.lengths.sum())
        rows.append(
            {
                "name": name, "decode": decode, "overlap": overlap, "schedule": schedule,
                "reward_aware": reward_aware,
                "seconds": statistics.median(seconds), "seconds_min": min(seconds),
                "seconds_max": max(seconds), "speedup": statistics.median(speedups),
                "speedup_min": min(speedups), "speedup_max": max(speedups),
                "gain": statistics.median(gains),
                "seconds_by_step": steps_of(rounds, name), "bubble": statistics.median(bubbles),
                "bound": bound,
                "over_bound": statistics.median(seconds) / bound,
                "over_bound_later": sum(steps_of(rounds, name)[1:]) / sum(bounds[1:]),
                "tokens_per_s": tokens / statistics.median(seconds),
                "latency_median": statistics.median(latencies),
                "latency_p99": latencies[int(0.99 * len(latencies))],
            }
        )  # fmt: skip
        before = name
    saved = {"lengths": workload.lengths.tolist(), "reward_seconds": workload.reward_seconds.tolist()}
    saved["recipe"] = dataclasses.asdict(workload.recipe)
    return {"rows": rows, "engine": engine, "workload": saved, "rounds": len(rounds[0])}


def steps_of(rounds: list[list[dict]], name: str) -> list[float]:
    """Seconds of each step of a row, median over rounds."""
    makespans = [
        [max(of) for of in zip(*(r[name]["seconds"] for r in of_round))] for of_round in zip(*rounds)
    ]
    return [statistics.median(of_step) for of_step in zip(*makespans)]


def print_table(table: dict) -> None:
    engine, lengths = table["engine"], np.array(table["workload"]["lengths"])
    steps, prompts, completions = lengths.shape
    print(
        f"{steps} steps x {prompts} prompts x {completions} completions, {lengths.sum():,} tokens, median "
        f"{np.median(lengths):.0f}, 99th percentile {np.percentile(lengths, 99):.0f}, longest {lengths.max()}"
        f"; {engine['ranks']} ranks, "
        f"{engine['slots']} sequences at once, {engine['workers']} reward workers each; a step of the engine "
        f"takes {engine['a'] * 1e3:.2f} ms + {engine['c'] * 1e3:.3f} ms per sequence + "
        f"{engine['p'] * 1e3:.3f} ms per token of a new prompt; median (range) of {table['rounds']} rounds"
    )
    head = (
        "row | seconds | speed-up | of this row | bubble | tokens/s | over the bound, from the second step on"
    )
    print(f"| {head} | reward latency, p99 |")
    print("|---|---|---|---|---|---|---|---|")
    for r in table["rows"]:
        print(
            f"| {r['name']} | {r['seconds']:.2f} ({r['seconds_min']:.2f}-{r['seconds_max']:.2f}) | "
            f"{r['speedup']:.2f} ({r['speedup_min']:.2f}-{r['speedup_max']:.2f}) | {r['gain']:.2f} | "
            f"{r['bubble']:.3f} | {r['tokens_per_s']:,.0f} | "
            f"{r['over_bound']:.2f}, {r['over_bound_later']:.2f} | "
            f"{r['latency_median']:.3f} s, {r['latency_p99']:.2f} s |"
        )
    print(f"lower bound: {table['rows'][0]['bound']:.2f} s; all rows gave the same completions and rewards")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, help="write the table here")
    add("--plot", type=Path, help="draw speed-up and bubble of the rows here")
    add("--workload", type=Path, default=WORKLOAD, help="see experiments/workload.py")
    add("--repeats", type=int, default=5, help="rounds of all rows (default: %(default)s)")
    add(
        "--slots", type=int, default=16, help="sequences at once, rollout.max_num_seqs (default: %(default)s)"
    )
    add("--workers", type=int, default=8, help="reward workers per rank (default: %(default)s)")
    add("--ranks", type=int, default=2, help="engines (default: %(default)s)")
    add("--model", type=Path, default=ROOT / "data/built/tiny/model", help="folder of the model")
    add("--result", type=Path, help=argparse.SUPPRESS)  # set in the ranks
    args = parser.parse_args()
    if args.result:
        return worker(args)
    for path in (args.workload, args.model / "config.json"):
        if not path.is_file():
            sys.exit(
                f"{path} is missing" + "; make it by `python -m data.tiny`" * (path.name == "config.json")
            )
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}",
            __file__, *sys.argv[1:], "--result", str(result),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            sys.exit("the benchmark failed, see above")
        table = table_of(
            json.loads(result.read_text()), Workload.load(args.workload), args.slots, args.workers
        )
    print_table(table)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))
    if args.plot:
        plot_table(table, args.plot)


def plot_table(table: dict, path: Path) -> None:
    """Seconds of each row beside the lower bound, busy and idle."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = table["rows"][::-1]
    names, seconds = [r["name"] for r in rows], np.array([r["seconds"] for r in rows])
    idle = seconds * np.array([r["bubble"] for r in rows])
    figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    axes.barh(names, seconds - idle, label="engines busy, mean over ranks")
    axes.barh(names, idle, left=seconds - idle, alpha=0.4, label="idle (bubble)")
    axes.axvline(rows[0]["bound"], color="black", linestyle="--", label="lower bound")
    for i, r in enumerate(rows):
        axes.text(seconds[i], i, f" {r['speedup']:.2f}x", va="center")
    axes.set(xlabel=f"seconds of {table['workload']['recipe']['num_steps']} rollouts")
    axes.margins(x=0.1)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
