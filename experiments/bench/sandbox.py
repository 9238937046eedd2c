"""Measure the programs judged per second and core: in bubblewrap, under rlimits, and by a bare subprocess.

    python -m experiments.bench.sandbox                      # about a minute
    python -m experiments.bench.sandbox --json sandbox.json

The process and all of its children are pinned to one core. The time runs from the text of a completion to its
verdict, as in a reward worker (verifiers/code.py). "subprocess" starts a plain `python -c` for each test and
compares the output, without any protection. Workloads: a program of one line with one test, and a program
with two imports and ten tests. The ways take turns; a figure is the median over rounds.

Prediction, written before the first measurement: starting the sandbox takes about 20 ms and each test 1 to 2
ms. For trivial programs, bubblewrap then judges about 45 per second, fewer than the 100 of a subprocess. For
programs with ten tests it judges about 30, more than the 10 of a subprocess, because the tests share one
start.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from experiments.bench.common import make_parser, markdown, spread, with_range, write_results
from verifiers.code import extract_program, same_output, verify
from verifiers.sandbox import check_sandbox

COUNT_WORDS = """import sys
from collections import Counter
words = sys.stdin.read().split()
for word, count in sorted(Counter(words).items()):
    print(word, count)"""
WORKLOADS = {  # name: (program, stdin of each test, stdout of each test)
    "one line, 1 test": ("print(int(input()) + 1)", ["41"], ["42"]),
    "two imports, 10 tests": (
        COUNT_WORDS,
        [f"b a {i} a" for i in range(10)],
        [f"{i} 1\na 2\nb 1" for i in range(10)],
    ),
}


def by_subprocess(completion: str, tests: dict) -> float:
    """Return the share of tests passed, each in a new Python process without limits."""
    program = extract_program(completion)
    passed = 0
    for stdin, stdout in zip(tests["inputs"], tests["outputs"]):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=10)
        passed += done.returncode == 0 and same_output(done.stdout, stdout)
    return passed / len(tests["inputs"])


def by_sandbox(isolation: str) -> Callable[[str, dict], float]:
    """Return the code verifier under one isolation, as a function of completion and tests."""
    return lambda completion, tests: verify(completion, json.dumps(tests), isolation=isolation)[0]


def measure(programs: int, rounds: int) -> list[dict]:
    """Return a row for each workload and way, with programs per second by round."""
    ways = {
        "subprocess": by_subprocess,
        "rlimits": by_sandbox("rlimits"),
        "bubblewrap": by_sandbox("bubblewrap"),
    }
    progress = tqdm(total=len(WORKLOADS) * rounds * len(ways), desc="bench", unit="round", disable=None)
    rows = []
    for workload, (program, inputs, outputs) in WORKLOADS.items():
        completion = f"```python\n{program}\n```"
        tests = {"inputs": inputs, "outputs": outputs}
        seconds = {way: [] for way in ways}
        for _ in range(rounds):
            for way, judge in ways.items():
                start = time.perf_counter()
                rewards = [judge(completion, tests) for _ in range(programs)]
                seconds[way].append((time.perf_counter() - start) / programs)
                progress.update()
                assert set(rewards) == {1.0}, (workload, way, rewards)
        for way, times in seconds.items():
            per_second = spread([1 / value for value in times])
            rows.append(
                {"workload": workload, "way": way, "seconds": spread(times), "per_second": per_second}
            )
    return rows


def table_lines(rows: list[dict]) -> list[str]:
    """Return the table of the rows."""
    cells = []
    for row in rows:
        milliseconds = f"{1000 * row['seconds']['median']:.1f}"
        cells.append([row["workload"], row["way"], with_range(row["per_second"], ".1f"), milliseconds])
    return markdown(["program", "way", "programs a second and core (range)", "ms a program"], cells)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--programs", type=int, default=30, help="programs per round (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds per workload and way (default: %(default)s)"
    )
    args = parser.parse_args()
    if args.programs < 1 or args.rounds < 1:
        parser.error("--programs and --rounds must be at least 1")
    return args


def main() -> None:
    """Measure on one core and print the table."""
    args = parse()
    check_sandbox("bubblewrap")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows = measure(args.programs, args.rounds)
    print("\n".join(table_lines(rows)))
    write_results(args.json, rows)


if __name__ == "__main__":
    main()
