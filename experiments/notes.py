"""Write the note below a table: its declaration, seeds without a run, start weights, undeclared contrasts.

report.py prints the note with the table, and compares both with the documents. Example:

    > Note: Declared: `0e11a5be0a51`. Seeds without a run: 3 to 9 of grpo.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from experiments.declaration import digest_of, is_before_declarations, read_declaration

Records = dict[str, list[dict]]  # {row: records of its runs, by seed}


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
    return ", ".join(
        f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts
    )


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


def seed_notes(
    rows: Records, parents: dict[str, str], declared: dict[str, dict], left_out: set[int]
) -> list[str]:
    """Name the seeds left out, and the seeds that a row lacks: of its declaration, else of any row."""
    of_table = {seed for records in rows.values() for seed in seeds_of(records)}
    missing = {
        row: set(declared[row]["seeds"] if row in declared else of_table) - seeds_of(records) - left_out
        for row, records in rows.items()
    }
    by_seeds: dict[str, list[str]] = {}
    for row, seeds in missing.items():
        if seeds:
            by_seeds.setdefault(ranges(seeds), []).append(row)
    texts = [f"{seeds} of {', '.join(names)}" for seeds, names in by_seeds.items()]
    notes = [f"Seeds left out: {ranges(left_out)}."] if left_out else []
    notes += [f"Seeds without a run: {'; '.join(texts)}."] if texts else []
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
    starts = {start for of_row in weights.values() for start in of_row.values()}
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
    by_seed: dict[int, set] = defaultdict(set)
    for of_row in weights.values():
        for seed, start in of_row.items():
            by_seed[seed].add(start)
    split = ranges(seed for seed, of_seed in by_seed.items() if len(of_seed) > 1)
    if not differing:
        by_row = f"the same for a row and its parent; seeds {split} have several"
        return [f"{len(starts)} start weights, {by_row if split else 'one for all runs of a seed'}{unknown}."]
    return [
        f"Other start weights than the parent's: {', '.join(differing)}{unknown}; their differences include "
        "the effect of the start."
    ]


def contrast_notes(declared: dict[str, dict], compared: set[tuple[str, str]]) -> list[str]:
    """Name comparisons outside of the declaration, and declared contrasts that Holm's correction lacks.

    compared: (row, parent) of all comparisons that share the correction.
    """
    contrasts = {tuple(pair) for each in declared.values() for pair in each["contrasts"]}
    notes = []
    for text, pairs in (
        ("Exploratory, not among the declared contrasts", compared - contrasts),
        ("Declared contrasts that the correction lacks", contrasts - compared),
    ):
        if declared and pairs:
            notes.append(f"{text}: {', '.join(f'{row} - {parent}' for row, parent in sorted(pairs))}.")
    return notes


def notes_of(
    rows: Records,
    parents: dict[str, str],
    studies: dict[str, set[Path]],
    compared: set[tuple[str, str]],
    left_out: set[int] | None = None,
) -> str:
    """Return the note of a table; "" for a table without gaps, for example of run folders with equal seeds.

    studies: the folders of the record files of each row; empty for run folders, which say nothing about
    declarations. compared: as in contrast_notes(); empty without a correction. left_out: seeds whose runs the
    table leaves out on request.
    """
    recorded = {row: records for row, records in rows.items() if studies[row]}
    declared = declarations_of(recorded, studies)
    sentences = [
        *declaration_notes(recorded, studies, declared),
        *seed_notes(rows, parents, declared, left_out or set()),
        *start_notes(rows, parents),
        *(contrast_notes(declared, compared) if compared else []),
    ]
    return " ".join(sentences)
