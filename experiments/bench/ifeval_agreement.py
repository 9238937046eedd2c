"""Compare verifiers/instructions.py with published verdicts of IFEval's own code on outputs of models.

    python -m experiments.bench.ifeval_agreement --prompts input_data.jsonl \\
        --verdicts eval_results_strict.jsonl
    python -m experiments.bench.ifeval_agreement --prompts en_input_data.jsonl \\
        --verdicts evaluations/en_*/eval_results_strict.jsonl --show 5 --json ifeval_agreement.json

--prompts is IFEval's dataset (prompt, instruction_id_list, kwargs). --verdicts are files that IFEval's
evaluation_main.py writes, one per model: each row has prompt, response and follow_instruction_list, one bool
for each instruction. M-IFEval (arXiv 2502.04688, github.com/lightblue-tech/M-IFEval, Apache-2.0) publishes
such files of 17 models; the prefix "en:" of its names is ignored.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from experiments.bench.common import make_parser, markdown, write_results
from verifiers.instructions import instruction_verdicts


def read_jsonl(file: Path) -> list[dict]:
    """Read a JSONL file; ValueError names the file."""
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot read JSONL ({error}); name a file as IFEval has it") from error


def compare(prompts: list[dict], verdict_files: list[Path]) -> list[dict]:
    """Return a row for each verdict: model file, kind, published and own verdict, response, arguments.

    ValueError if a file has a prompt that the dataset lacks.
    """
    constraints = {row["prompt"]: row for row in prompts}
    rows = []
    for file in verdict_files:
        for result in read_jsonl(file):
            if result["prompt"] not in constraints:
                raise ValueError(f"{file}: --prompts lacks the prompt {result['prompt'][:80]!r}")
            task = constraints[result["prompt"]]
            names = [name.removeprefix("en:") for name in task["instruction_id_list"]]
            columns = {"instruction_id_list": names, "kwargs": task["kwargs"]}
            # A few published responses are null: the model gave none.
            verdicts = instruction_verdicts(result["response"] or "", "", columns)
            for (kind, own), published, arguments in zip(
                verdicts, result["follow_instruction_list"], task["kwargs"], strict=True
            ):
                rows.append({
                    "file": str(file), "prompt": result["prompt"], "kind": kind, "own": own,
                    "published": published, "arguments": arguments, "response": result["response"],
                })  # fmt: skip
    return rows


def agreement(rows: list[dict]) -> list[dict]:
    """Return verdicts, agreement and both kinds of disagreement for each kind of instruction, and for all."""
    kinds = sorted({row["kind"] for row in rows})
    table = []
    for kind in [*kinds, "all"]:
        counts = Counter((row["published"], row["own"]) for row in rows if kind in (row["kind"], "all"))
        total = counts.total()
        table.append({
            "kind": kind, "verdicts": total, "agreement": (counts[True, True] + counts[False, False]) / total,
            "published_only": counts[True, False], "own_only": counts[False, True],
        })  # fmt: skip
    return table


def prompt_level(rows: list[dict]) -> dict:
    """Return agreement and accuracies at the prompt level: whether a response meets all its instructions."""
    results: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        results.setdefault((row["file"], row["prompt"]), []).append(row)
    published = [all(row["published"] for row in result) for result in results.values()]
    own = [all(row["own"] for row in result) for result in results.values()]
    total = len(results)
    return {
        "responses": total, "agreement": sum(a == b for a, b in zip(published, own)) / total,
        "accuracy_published": sum(published) / total, "accuracy_own": sum(own) / total,
    }  # fmt: skip


def table_lines(data: dict) -> list[str]:
    """Return the table of agreement; kinds of instructions without a disagreement share one row."""
    exact = [row for row in data["table"][:-1] if row["agreement"] == 1]
    same = {
        "kind": f"{len(exact)} other kinds", "verdicts": sum(row["verdicts"] for row in exact),
        "agreement": 1.0, "published_only": 0, "own_only": 0,
    }  # fmt: skip
    *kinds, total = data["table"]
    kinds = [row for row in kinds if row["agreement"] < 1]
    cells = [
        [
            row["kind"],
            f"{row['verdicts']:,}",
            f"{row['agreement']:.4f}",
            row["published_only"],
            row["own_only"],
        ]
        for row in [*kinds, same, total]
    ]
    return markdown(["instruction", "verdicts", "agreement", "met by IFEval only", "met by ours only"], cells)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="IFEval's dataset, JSONL")
    parser.add_argument(
        "--verdicts", type=Path, nargs="+", required=True, help="eval_results_strict.jsonl ..."
    )
    parser.add_argument("--show", type=int, default=0, help="print this many disagreements of each kind")
    return parser.parse_args()


def main() -> None:
    """Compare the verdicts and print the table."""
    args = parse()
    try:
        rows = compare(read_jsonl(args.prompts), args.verdicts)
    except ValueError as error:
        sys.exit(f"error: {error}")
    files = sorted({f"{file.parent.name}/{file.name}" for file in args.verdicts})
    data = {"files": files, "table": agreement(rows), "prompt_level": prompt_level(rows)}
    print("\n".join(table_lines(data)))
    level = data["prompt_level"]
    print(
        f"prompt level: {level['responses']:,} responses of {len(files)} models, agreement "
        f"{level['agreement']:.4f}; accuracy {level['accuracy_published']:.4f} by IFEval, "
        f"{level['accuracy_own']:.4f} by ours"
    )
    shown: Counter[str] = Counter()
    for row in rows:
        if row["own"] != row["published"] and shown[row["kind"]] < args.show:
            shown[row["kind"]] += 1
            arguments = {name: value for name, value in row["arguments"].items() if value is not None}
            print(f"\n--- {row['kind']} {arguments}: IFEval {row['published']}, ours {row['own']}")
            print(row["response"])
    write_results(args.json, data)


if __name__ == "__main__":
    main()
