"""Measure how many programs a second one core judges: in bubblewrap, under rlimits, and by a bare subprocess.

    python -m experiments.bench.sandbox                      # about a minute
    python -m experiments.bench.sandbox --json sandbox.json

The process and all that it starts are pinned to one core. The way of a reward worker is measured: from the
text of a completion to its verdict (verifiers/code.py). "subprocess" starts a plain `python -c` for each
test and compares its output, with no protection at all. Workloads: a program of one line with one test, and
one that imports two modules with ten tests. The ways take turns; a figure is the median over rounds.

Prediction, written down before the first measurement: a start of the sandbox takes about 20 ms and each
test 1 to 2 ms, so that bubblewrap judges about 45 trivial programs a second, fewer than a subprocess' 100,
and about 30 of ten tests, more than a subprocess' 10, because tests share a start.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from experiments.bench.common import make_parser, markdown, spread, with_range, write_json
from verifiers.code import extract_program, same_output, verify
from verifiers.sandbox import check_sandbox

COUNT_WORDS = """import sys
from collections import Counter
words = sys.stdin.read().split()
for word, count in sorted(Counter(words).items()):
    print(word, count)"""
WORKLOADS = {  # name -> (program, stdin of its tests, their stdout)
    "one line, 1 test": ("print(int(input()) + 1)", ["41"], ["42"]),
    "two imports, 10 tests": (
        COUNT_WORDS,
        [f"b a {i} a" for i in range(10)],
        [f"{i} 1\na 2\nb 1" for i in range(10)],
    ),
}


def by_subprocess(completion: str, tests: dict) -> float:
    """Return the share of tests passed, each by a Python of its own that nothing holds back."""
    program, passed = extract_program(completion), 0
    for stdin, stdout in zip(tests["inputs"], tests["outputs"]):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=10)
        passed += done.returncode == 0 and same_output(done.stdout, stdout)
    return passed / len(tests["inputs"])


def by_sandbox(isolation: str) -> Callable[[str, dict], float]:
    """Return the verifier with one isolation as a function of completion and tests."""
    return lambda completion, tests: verify(completion, json.dumps(tests), isolation=isolation)[0]


def measure(programs: int, rounds: int) -> list[dict]:
    """Return a row for each workload and way, with programs a second by round."""
    ways = {
        "subprocess": by_subprocess,
        "rlimits": by_sandbox("rlimits"),
        "bubblewrap": by_sandbox("bubblewrap"),
    }
    progress = tqdm(total=len(WORKLOADS) * rounds * len(ways), desc="bench", unit="round", disable=None)
    rows = []
    for workload, (program, inputs, outputs) in WORKLOADS.items():
        completion, tests = f"```python\n{program}\n```", {"inputs": inputs, "outputs": outputs}
        seconds = {way: [] for way in ways}
        for _ in range(rounds):
            for way, judge in ways.items():
                start = time.perf_counter()
                rewards = [judge(completion, tests) for _ in range(programs)]
                seconds[way].append((time.perf_counter() - start) / programs)
                progress.update()
                assert set(rewards) == {1.0}, (workload, way, rewards)
        for way, found in seconds.items():
            per_second = spread([1 / value for value in found])
            rows.append(
                {"workload": workload, "way": way, "seconds": spread(found), "per_second": per_second}
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
    parser.add_argument("--programs", type=int, default=30, help="per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="per workload and way (default: %(default)s)")
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
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
