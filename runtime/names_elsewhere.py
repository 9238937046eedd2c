"""Settings of TRL, verl, OpenRLHF and transformers: our setting for each name, or why there is none.

    python -m runtime.names_elsewhere        # print the whole table

The error about an unknown setting reads this table (runtime/config.py), and the tables of
docs/from_trl_or_verl.md are tested against it. A name is the last part of a setting, or the last parts with a
dot (`val_kwargs.n`); `critic.*` is everything below `critic`.
"""

import csv
from pathlib import Path

with Path(__file__).with_suffix(".csv").open(newline="") as file:  # our setting, or "" for none; names; note
    TABLE = [(row["ours"] or None, row["names"], row["note"]) for row in csv.DictReader(file)]

# {name elsewhere: (our setting or None, how its value differs or why there is none)}
NAMES_ELSEWHERE = {name: (ours, note) for ours, names, note in TABLE for name in names.split()}


def entry_of(name: str) -> tuple[str | None, str] | None:
    """Return the entry of a dotted name: of a group such as critic.*, else of its longest and last part."""
    parts = name.split(".")
    keys = [f"{part}.*" for part in parts]
    for length in range(len(parts), 0, -1):
        keys += [".".join(parts[i : i + length]) for i in range(len(parts) - length, -1, -1)]
    return next((NAMES_ELSEWHERE[key] for key in keys if key in NAMES_ELSEWHERE), None)


if __name__ == "__main__":
    for name, (ours, note) in NAMES_ELSEWHERE.items():
        print(f"{name:<36} {ours or 'none':<36} {note}".rstrip())
