"""Write the note below a table: its declaration, another metric than the declared endpoint, seeds without a
run, start weights, held-out prompts, undeclared contrasts.

report.py prints the note with the table, and compares both with the documents. Example:

    > Note: Declared: `0e11a5be0a51`. Secondary metric: `train/score`. Seeds without a run: 3 to 9 of grpo.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from experiments.declaration import contrasts_of, digest_of, is_before_declarations, read_declaration

Records = dict[str, list[dict]]  # {row: records of its runs, by seed}


@dataclass(frozen=True)
class Shown:
    """The parts of a table on which its note depends."""

    metric: str = ""  # --metric
    compared: set[tuple[str, str]] = field(default_factory=set)  # (row, parent) of the shown differences
    corrected: set[tuple[str, str]] = field(default_factory=set)  # (row, parent) under one Holm correction
    block: int = 1  # --block


def seeds_of(records: list[dict]) -> set[int]:
    """Return the seeds of the runs of a row."""
    return {record["seed"] for record in records}


def ranges(seeds: Iterable[int]) -> str:
    """Join three or more consecutive numbers, for example "0, 3 to 5, 8, 9"."""
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 2 else ", ".join(map(str, p)) for p in parts)


def declarations_of(rows: Records, studies: dict[str, set[Path]]) -> dict[str, dict]:
    """Return {row: declaration} for the rows whose runs all come from a study that declares the row."""
    declarations = {}
    for row in rows:
        files = [study / "declared.json" for study in studies[row]]
        declared = [read_declaration(file) for file in files if file.is_file()]
        if declared and len(declared) == len(files) and all(row in each["rows"] for each in declared):
            declarations[row] = declared[0]
    return declarations


def declaration_notes(rows: Records, studies: dict[str, set[Path]], declared: dict[str, dict]) -> list[str]:
    """Name the digests of the declarations, or say "Undeclared"; ValueError for new undeclared runs."""
    undeclared = [row for row in rows if row not in declared]
    for row in undeclared:
        for record in rows[row]:
            if not all(is_before_declarations(record.get("commit"), study) for study in studies[row]):
                raise ValueError(
                    f"row {row}, seed {record['seed']} was not declared: write declared.json beside the rows "
                    "and commit it before the first run, or take the row out of the table"
                )
    digests = sorted({digest_of(each) for each in declared.values()})
    notes = [f"Declared: {', '.join(f'`{digest}`' for digest in digests)}."] if digests else []
    names = f": {', '.join(undeclared)}" if declared else ""
    return notes + ([f"Undeclared{names}."] if undeclared else [])


def seed_notes(rows: Records, parents: dict[str, str], declared: dict[str, dict]) -> list[str]:
    """Name the seeds that a row lacks: of its declaration, else of any row."""
    of_table = {seed for records in rows.values() for seed in seeds_of(records)}
    by_seeds: dict[str, list[str]] = {}
    for row, records in rows.items():
        expected = set(declared[row]["seeds"]) if row in declared else of_table
        if missing := expected - seeds_of(records):
            by_seeds.setdefault(ranges(missing), []).append(row)
    texts = []
    for seeds, names in by_seeds.items():
        texts.append(f"{seeds} of {'all rows' if 2 < len(names) == len(rows) else ', '.join(names)}")
    notes = [f"Seeds without a run: {'; '.join(texts)}."] if texts else []
    apart = [row for row in rows if not seeds_of(rows[row]) & seeds_of(rows[parents[row]])]
    return notes + ([f"No seed in common with the parent: {', '.join(apart)}."] if apart else [])


def start_notes(rows: Records, parents: dict[str, str]) -> list[str]:
    """Name the rows whose runs do not start from the weights of the parent's runs with the same seeds.

    A record without the digest of its start counts as another start.
    """
    weights = {
        row: {record["seed"]: record.get("versions", {}).get("weights") for record in records}
        for row, records in rows.items()
    }
    pairs = {pair for of_row in weights.values() for pair in of_row.items()}  # (seed, start) of all rows
    starts = {start for _, start in pairs}
    if len(starts) < 2:
        return []
    differing = []
    for row, of_row in weights.items():
        of_parent = weights[parents[row]]
        common = of_row.keys() & of_parent.keys()
        is_apart = not common and len({*of_row.values(), *of_parent.values()}) > 1
        if is_apart or any(of_row[seed] != of_parent[seed] for seed in common):
            differing.append(row)
    unknown = ", and some records lack their start" if None in starts else ""
    num_starts = Counter(seed for seed, _ in pairs)
    split = ranges(seed for seed, number in num_starts.items() if number > 1)
    if not differing:
        by_row = f"the same for a row and its parent; seeds {split} have several"
        return [f"{len(starts)} start weights, {by_row if split else 'one for all runs of a seed'}{unknown}."]
    return [
        f"Other start weights than the parent's: {', '.join(differing)}{unknown}; their differences include "
        "the effect of the start."
    ]


def data_notes(rows: Records, parents: dict[str, str]) -> list[str]:
    """Name the rows with other held-out prompts than the parent's runs with the same seeds, by digest."""
    held_out = {
        row: {record["seed"]: record.get("versions", {}).get("data", {}) for record in records}
        for row, records in rows.items()
    }
    differing = []
    for row, of_row in held_out.items():
        of_parent = held_out[parents[row]]
        pairs = [(of_row[seed], of_parent[seed]) for seed in of_row.keys() & of_parent.keys()]
        if any(own[key] != other.get(key, own[key]) for own, other in pairs for key in own if key != "train"):
            differing.append(row)
    return [f"Other held-out prompts than the parent's: {', '.join(differing)}."] if differing else []


def metric_notes(rows: Records, declared: dict[str, dict], metric: str) -> list[str]:
    """Call a metric secondary or exploratory unless it is the endpoint of every declaration.

    A metric is the endpoint's if its name occurs in the text of `endpoint`, and secondary if the name, also
    without train/, occurs in `secondary`. Example: the endpoint "chains/avg_at_4 of the last evaluation". A
    mean over several sets is not the metric of one of them.
    """
    kinds = set()
    for row, each in declared.items():
        names = {name for record in rows[row] for name in record.get("evaluations", ())}
        is_mean = sum(name.endswith(f"/{metric}") for name in names) > 1
        if metric and not has_metric(each["endpoint"], metric, is_mean):
            text = str(each.get("secondary", ""))
            names = (metric, metric.removeprefix("train/"))
            is_secondary = any(has_metric(text, name, is_mean) for name in names)
            kinds.add("Secondary" if is_secondary else "Exploratory")
    return [f"{kind} metric: `{metric}`." for kind in sorted(kinds)]


def has_metric(text: str, metric: str, is_mean: bool) -> bool:
    """Tell whether a text has the name of a metric; a mean of sets is not that of "hard/avg_at_8 of ..."."""
    before = r"(?<!/)" if is_mean else "(?<!train/)"
    return re.search(rf"(?<!\w){before}{re.escape(metric)}(?![\w/])", text) is not None


def check_blocks(declared: dict[str, dict], block: int) -> None:
    """Raise ValueError if seeds of one declared task instance would count as independent."""
    sizes = {each["instances"]["seeds_each"] for each in declared.values() if each.get("instances")}
    if sizes - {block}:
        size = max(sizes - {block})
        raise ValueError(f"--block {block}: the declaration has seeds_each {size}, set --block {size}")


def contrast_notes(declared: dict[str, dict], shown: Shown) -> list[str]:
    """Name comparisons outside of the declaration, and declared contrasts that Holm's correction lacks."""
    contrasts = {pair for each in declared.values() for pair in contrasts_of(each)}
    notes = []
    for text, pairs in (
        ("Exploratory, not among the declared contrasts", (shown.compared | shown.corrected) - contrasts),
        ("Declared contrasts that the correction lacks", shown.corrected and contrasts - shown.corrected),
    ):
        if declared and pairs:
            names = ", ".join(f"{row} - {parent}" for row, parent in sorted(pairs))
            notes.append(f"{text}: {names if len(pairs) < 8 else len(pairs)}.")
    return notes


def notes_of(rows: Records, parents: dict[str, str], studies: dict[str, set[Path]], shown: Shown) -> str:
    """Return the note of a table; "" for run folders with equal seeds and starts.

    studies: the folders of the record files of each row; empty for run folders, which say nothing about
    declarations.
    """
    recorded = {row: records for row, records in rows.items() if studies[row]}
    declared = declarations_of(recorded, studies)
    check_blocks(declared, shown.block)
    sentences = [
        *declaration_notes(recorded, studies, declared),
        *metric_notes(rows, declared, shown.metric),
        *seed_notes(rows, parents, declared),
        *start_notes(rows, parents),
        *data_notes(rows, parents),
        *contrast_notes(declared, shown),
    ]
    return " ".join(sentences)
