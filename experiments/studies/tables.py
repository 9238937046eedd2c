"""Print the tables of a module that measures the runs of a study, for example clip_scale/scaling.py."""

import argparse
from collections.abc import Callable
from pathlib import Path

from experiments import report


def print_tables(
    description: str, measure: Callable, metric: str, makers: list[Callable[[list[dict]], list[str]]]
) -> None:
    """Read runs from the command line, and print the tables that `makers` make of their measurement.

    measure: of {row: runs}; ValueError if no seed has all of the rows. metric: one that all runs have.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, record files")
    args = parser.parse_args()
    try:
        data = measure(report.read_rows(args.runs, None, metric))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print("\n\n".join("\n".join(make(data)) for make in makers))
