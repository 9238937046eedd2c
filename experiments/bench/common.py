"""Helpers that several benchmarks share: options, ranks, statistics and tables.

Slow imports happen inside the functions.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from runtime.provenance import commit_of, machine_of, now, versions_of

ROOT = Path(__file__).resolve().parents[2]


def make_parser(description: str) -> argparse.ArgumentParser:
    """Make a parser with --json."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this JSON file")
    return parser


def torchrun(num_ranks: int) -> list[str]:
    """Return the start of a command that launches a script, or -m and a module, on local ranks."""
    return [sys.executable, "-m", "runtime.torchrun", f"--nproc-per-node={num_ranks}"]


def spread(values: list[float]) -> dict[str, Any]:
    """Summarise repeated measurements as median, min, max and n, and keep them as rounds."""
    ends = {"min": min(values), "max": max(values)}
    return {"median": statistics.median(values), **ends, "n": len(values), "rounds": values}


def with_range(values: dict[str, Any], form: str) -> str:
    """Format a spread() as median (min-max)."""
    return f"{values['median']:{form}} ({values['min']:{form}}-{values['max']:{form}})"


def mean_with_range(values: list[float], form: str = ".3g") -> str:
    """Format the mean and, in brackets, the range of values."""
    mean, low, high = (format(value, form) for value in (sum(values) / len(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low}-{high})"


def markdown(names: list[str], rows: list[list]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| " + " | ".join(map(str, line)) + " |" for line in (names, *rows)]
    return [lines[0], "|" + "---|" * len(names), *lines[1:]]


def write_json(path: Path | None, data: dict | list) -> None:
    """Write results to a file, if a path is set; each row of a list gets its own line."""
    if isinstance(data, list):
        replace_text(path, "[\n" + ",\n".join(map(json.dumps, data)) + "\n]\n")
    else:
        replace_text(path, json.dumps(data, indent=1) + "\n")


def replace_text(path: Path | None, text: str) -> None:
    """Write a text file, if a path is set, atomically: a kill leaves the earlier content or the new one."""
    if path is not None:
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def write_results(path: Path | None, results: dict | list) -> None:
    """Write the results of a benchmark to a file, if a path is set, with their origin under `made`."""
    made = {**commit_of(), "date": now(), "machine": machine_of(), "versions": versions_of()}
    write_json(path, {"made": made, "results": results})


def read_results(path: Path) -> Any:
    """Read the results of a benchmark; files of older versions hold the results alone."""
    data = json.loads(path.read_text())
    is_wrapped = isinstance(data, dict) and data.keys() == {"made", "results"}
    return data["results"] if is_wrapped else data
