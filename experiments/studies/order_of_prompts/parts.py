"""Write the prompts of the stages, so that other rows can visit the same prompts in another order.

    python -m experiments.studies.order_of_prompts.parts chains chains_1    # task instances, already built

Writes part_short.jsonl, part_middle.jsonl and part_long.jsonl into data/built/INSTANCE: disjoint rows of
train.jsonl, up to 5, 15 and 30 steps long. The numbers of prompts are those of 18, 24 and 19 training steps
of 16 prompts, which generate about 100,000, 200,000 and 300,000 tokens.
"""

import json
import sys

from data.tiny import OUTPUT

PROMPTS_PER_STEP = 16
PARTS = {"short": (18, 5), "middle": (24, 15), "long": (19, 30)}  # {part: (training steps, longest chain)}


def parts_of(rows: list[dict]) -> dict[str, list[dict]]:
    """Return the rows of each part: the first rows that are short enough, after the previous part's last row.

    A part with rows that the previous part passed over would hold too many long chains.
    """
    parts = {}
    first = 0
    for name, (num_steps, longest) in PARTS.items():
        chosen = [i for i in range(first, len(rows)) if rows[i]["difficulty"] <= longest]
        chosen = chosen[: num_steps * PROMPTS_PER_STEP]
        parts[name] = [rows[i] for i in chosen]
        first = chosen[-1] + 1
    return parts


if __name__ == "__main__":
    for instance in sys.argv[1:]:
        prompts = (OUTPUT / instance / "train.jsonl").read_text().splitlines()
        for name, part in parts_of([json.loads(line) for line in prompts]).items():
            file = OUTPUT / instance / f"part_{name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in part))
