"""Measure a rollout whose episodes call a tool that takes 0, 0.1 and 1 s: does the engine ever wait in vain?

    python -m experiments.bench.turns                     # builds data.calculator, five rounds of three rows
    python -m experiments.bench.turns --json turns.json
    python -m experiments.bench.turns --seconds 0 0.5     # other seconds per call

The policy is the warm start of experiments/environments/calculator.yaml: about three of ten episodes call a
calculator and read the result. A step has 32 prompts x 8 episodes, and the engine runs 32 at once, so that
requests wait for a place. The tool is asynchronous, like a request to a server, and one worker runs up to 64
calls at a time. Rows take turns within a round and sample the same episodes: the benchmark fails if two rows
of a round differ in a token. The prompts have a record from one earlier visit, by which the order of
episodes counts expected waits (rollout.schedule: longest_first). No update runs in between.

    busy     seconds inside the engine's steps
    idle     seconds in which all unfinished episodes wait for the tool, so that the engine has no work
    between  the remaining seconds: adding requests, polling the workers, verdicts

If the engine never waits while it has work, a row with slow calls differs from the row with instant calls by
idle seconds only.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.bench.common import (
    ROOT,
    make_parser,
    markdown,
    run_rank,
    run_ranks,
    spread,
    with_range,
    write_results,
)

CONFIG = ROOT / "experiments" / "environments" / "calculator.yaml"
SECONDS_FILE = "WINNOW_BENCH_SECONDS"  # environment variable: a file with the seconds of a call
FIGURES = ("rollout", "busy", "idle", "between")


async def calc(sum: str) -> str:
    """Add two numbers.

    Args:
        sum: The sum, for example 12+34.
    """
    from data import calculator

    await asyncio.sleep(float(Path(os.environ[SECONDS_FILE]).read_text()))
    return calculator.calc(sum)


class Stopwatch:
    """Measures where the seconds of a rollout go, around two methods of an engine."""

    def __init__(self, engine):
        self.busy = 0.0
        self.idle = 0.0
        step = engine.step
        turn_events = engine.turn_events

        def timed_step():
            start = time.perf_counter()
            outputs = step()
            self.busy += time.perf_counter() - start
            return outputs

        def timed_events(episodes, local, line):
            has_work = line.has_work
            start = time.perf_counter()
            events = turn_events(episodes, local, line)
            self.idle += 0.0 if has_work else time.perf_counter() - start
            return events

        engine.step = timed_step
        engine.turn_events = timed_events

    def measure(self, run) -> tuple[dict[str, float], list, list]:
        """Sample a step; return the seconds by FIGURES, the episodes and the outcomes of the groups."""
        import train_rl

        self.busy = 0.0
        self.idle = 0.0
        run.state.consumed_prompts = 0  # the same prompts in every round, with other seeds
        run.engine.policy_version = run.state.step  # no update: all steps sample from the same policy
        start = time.perf_counter()
        groups, outcomes, _ = train_rl.sample_step(run)
        seconds = time.perf_counter() - start
        between = seconds - self.busy - self.idle
        figures = dict(zip(FIGURES, (seconds, self.busy, self.idle, between)))
        episodes = [completion for group in groups for completion in group.completions]
        return figures, episodes, list(outcomes.values())


def work(args) -> None:
    """Measure all rows in turn, round after round, and write the figures."""
    import lifecycle
    import train_rl
    from configure import load_config

    with tempfile.TemporaryDirectory() as scratch:
        seconds_file = Path(scratch) / "seconds"
        seconds_file.write_text("0")
        os.environ[SECONDS_FILE] = str(seconds_file)
        settings = [
            f"run.dir={scratch}/run", f"reward.env=[{SECONDS_FILE}]",
            "data.tools=['experiments.bench.turns:calc']", "data.eval=[]",
            f"rollout.max_num_seqs={args.slots}", "checkpoint.every=0",
        ]  # fmt: skip
        run = lifecycle.set_up(load_config(["--config", str(CONFIG), *settings]))
        train_rl.sync_engine(run, check=True)
        stopwatch = Stopwatch(run.engine)
        _, _, outcomes = stopwatch.measure(run)
        train_rl.update_history(run, outcomes)
        rounds = []
        for number in range(args.repeats):
            run.state.step = number + 1
            rows: dict[str, dict[str, float]] = {}
            tokens = []
            order = args.seconds[number % len(args.seconds) :] + args.seconds[: number % len(args.seconds)]
            for seconds in order:
                seconds_file.write_text(str(seconds))
                rows[str(seconds)], episodes, _ = stopwatch.measure(run)
                tokens.append([episode.token_ids for episode in episodes])
            if any(other != tokens[0] for other in tokens):
                raise RuntimeError("two rows of a round have sampled different episodes")
            num_calls = sum(episode.num_calls for episode in episodes)
            rounds.append({"rows": rows, "num_calls": num_calls, "num_episodes": len(episodes)})
        args.result.write_text(json.dumps({"slots": args.slots, "rounds": rounds}))
        run.pool.close()
        run.interaction.close()


def table_lines(data: dict) -> list[str]:
    """Return the table: a row for the seconds of a call, medians and ranges over rounds."""
    rounds = data["rounds"]
    rows = []
    for name in sorted(rounds[0]["rows"], key=float):
        of_rounds = [one["rows"][name] for one in rounds]
        cells = [with_range(spread([row[figure] for row in of_rounds]), ".2f") for figure in FIGURES]
        waits = spread([float(name) * one["num_calls"] for one in rounds])
        rows.append([name, *cells, f"{waits['median']:.1f}"])
    return markdown(["seconds of a call", *(f"{figure}, s" for figure in FIGURES), "all calls, s"], rows)


def main() -> None:
    """Run the rounds on one rank and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--seconds", nargs="+", type=float, default=[0.0, 0.1, 1.0], help="seconds of a call, by row"
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=32, help="episodes at once (default: %(default)s)")
    parser.add_argument("--result", type=Path, help="set by the benchmark itself: the file of a rank")
    args = parser.parse_args()
    if args.result:
        run_rank(work, args)
    subprocess.run([sys.executable, "-m", "data.calculator"], cwd=ROOT, check=True)
    argv = ["--repeats", str(args.repeats), "--slots", str(args.slots), "--seconds", *map(str, args.seconds)]
    data = run_ranks("experiments.bench.turns", 1, argv)
    print("\n".join(table_lines(data)))
    write_results(args.json, data)


if __name__ == "__main__":
    main()
