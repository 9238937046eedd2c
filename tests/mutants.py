"""Put small faults into a copy of the tree, one at a time, and report which test notices each.

    python -m tests.mutants                            # all of mutants.txt, one to two hours on two cores
    python -m tests.mutants --only 1-20 57 --quick     # some of them, asking the tests of `make quick` alone
    python -m tests.mutants --record runs/mutants.jsonl    # append results; skip faults that the file has

A fault that no test notices calls for a test. Tests run with -x, the named ones first:

    quick    the named tests that `make quick` runs, then, if nothing else notices, all other tests of it
    others   the other named tests, without the slow ones
    slow     the slow ones among the named tests

Exit codes: 0 if every fault is noticed, 1 if one survives, 2 if the tests fail without a fault.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FAST = "not slow and not gpu"
SLOW = "slow and not gpu"
LIMIT_S = {FAST: 300, SLOW: 1200}  # a fault may make a loop endless
SLOW_LIBRARIES = """
    torch transformers transformers.models.qwen3_moe.modeling_qwen3_moe deepspeed accelerate sympy
    scipy.stats scipy.integrate safetensors.torch pytest
""".split()


class Mutant(NamedTuple):
    """A small fault: in `file`, `text` becomes `replacement`."""

    file: str
    text: str
    replacement: str
    tests: list[str]  # stems of test files without test_, the likeliest first


def read_mutants(source: str) -> list[Mutant]:
    """Parse mutants.txt: blocks of `FILE: TESTS`, lines of the text (-) and lines of the replacement (+)."""
    mutants = []
    for block in source.split("\n\n")[1:]:
        head, *lines = block.strip("\n").split("\n")
        file, _, tests = head.partition(": ")
        text, replacement = ("\n".join(x[2:] for x in lines if x[0] == sign) for sign in "-+")
        mutants.append(Mutant(file, text, replacement, tests.split()))
    return mutants


MUTANTS = read_mutants((ROOT / "tests" / "mutants.txt").read_text())


def method_tests() -> list[str]:
    """Return METHOD_TESTS of the Makefile, the tests of `make quick`."""
    return re.search(r"^METHOD_TESTS = (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()


def copy_tree(folder: Path) -> None:
    """Copy the files of the repository, and link the data that tests would build."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def run_tests(folder: Path, tests: list[str], marks: str) -> tuple[str | None, str]:
    """Run test files in a fork of this process; return the first test that fails, or None, and the output."""
    log = folder.parent / "log"
    pid = os.fork()
    if not pid:
        os.chdir(folder)
        sys.path[:0] = [str(folder), str(folder / "tests")]
        output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(LIMIT_S[marks])
        import pytest

        files = [f"tests/test_{name}.py" for name in tests]
        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", marks, *files]))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = log.read_text(errors="replace")
    if code in (0, 5):  # 5: no test has these marks
        return None, text
    failed = re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", text, re.M)
    return failed[0] if failed else f"exit code {code}", text


def stages(tests: list[str], quick_only: bool) -> list[tuple[str, list[str], str]]:
    """Return (name, test files, marks) of each attempt to notice a fault, in order."""
    quick = method_tests()
    named = [name for name in tests if name in quick]
    others = [name for name in tests if name not in quick]
    attempts = [("quick", named, FAST)]
    if not quick_only:
        attempts += [("others", others, FAST), ("slow", tests, SLOW)]
    attempts += [("quick", [name for name in quick if name not in named], FAST)]
    return [(name, files, marks) for name, files, marks in attempts if files]


def try_mutant(folder: Path, mutant: Mutant, quick_only: bool) -> dict:
    """Apply a fault, run tests until one fails, undo the fault; return what happened."""
    file = folder / mutant.file
    original = file.read_text()
    if original.count(mutant.text) != 1:
        raise SystemExit(f"tests/mutants.txt: {mutant.file} must have this text once: {mutant.text}")
    file.write_text(original.replace(mutant.text, mutant.replacement))
    start = time.perf_counter()
    noticed = None
    stage = "survives"
    for name, files, marks in stages(mutant.tests, quick_only):
        noticed, _ = run_tests(folder, files, marks)
        if noticed is not None:
            stage = name
            break
    file.write_text(original)
    seconds = round(time.perf_counter() - start)
    return {**mutant._asdict(), "stage": stage, "test": noticed, "seconds": seconds}


def numbers_of(words: list[str]) -> list[int]:
    """Return the numbers of --only; "3-5" stands for 3, 4 and 5."""
    numbers = []
    for word in words:
        first, _, last = word.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def recorded(file: Path | None) -> dict[tuple[str, str, str], dict]:
    """Return earlier results by (file, text, replacement)."""
    if file is None or not file.is_file():
        return {}
    rows = map(json.loads, file.read_text().splitlines())
    return {(row["file"], row["text"], row["replacement"]): row for row in rows}


def main() -> int:
    """Try the chosen faults and print a line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[f"1-{len(MUTANTS)}"], metavar="N")
    parser.add_argument("--quick", action="store_true", help="ask the tests of `make quick` alone")
    parser.add_argument("--record", type=Path, help="append results as JSON; skip faults that the file has")
    parser.add_argument("--trust", action="store_true", help="skip the run without a fault")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    for name in SLOW_LIBRARIES:
        __import__(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # remove the copy
    numbers = numbers_of(arguments.only)
    known = recorded(arguments.record)
    survivors = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "tree"
        copy_tree(folder)
        asked = sorted({name for number in numbers for name in MUTANTS[number - 1].tests})
        if not arguments.trust:
            failed, text = run_tests(folder, asked, FAST)
            if failed is not None:
                print(f"{text[-2000:]}\nwithout a fault, {failed} fails: mend it first")
                return 2
        for number in numbers:
            mutant = MUTANTS[number - 1]
            result = known.get(mutant[:3])
            if result is None or result["stage"] == "survives":
                result = try_mutant(folder, mutant, arguments.quick)
                if arguments.record:
                    with arguments.record.open("a") as file:
                        file.write(json.dumps(result) + "\n")
            survivors += result["stage"] == "survives"
            test = result["test"] or mutant.text.split("\n")[0][:70]
            print(
                f"{number:3} {result['stage']:8} {result['seconds']:4} s  {mutant.file}  {test}", flush=True
            )
    print(f"{len(numbers) - survivors} of {len(numbers)} noticed")
    return survivors > 0


if __name__ == "__main__":
    sys.exit(main())
