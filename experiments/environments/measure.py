"""Describe an environment by the completions of its starting model: lengths, uncertain tokens, pass rates.

    python experiments/evaluate.py --model data/built/chains/model --samples 8 --max-new-tokens 480 \\
        --data '{path: data/built/chains/train.jsonl, limit: 200}' --dtype float32 --kv-cache-gib 0.5 \\
        --completions runs/start.jsonl --json runs/start.json
    python -m experiments.environments.measure runs/start.jsonl

The figures are over the sampled completions, at the sampling temperature. Greedy completions are omitted.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

UNCERTAIN_NATS = 0.3  # entropy above which a token counts as uncertain


def describe(rows: list[dict]) -> dict[str, float]:
    """Return the figures of sampled completions; a pass rate is a prompt's share of right completions."""
    rows = [row for row in rows if row["temperature"] > 0]
    if not rows:
        raise ValueError("no sampled completions; run evaluate.py with --samples above 0")
    tokens = np.array([row["num_tokens"] for row in rows])
    of_tokens = [nats for row in rows for nats in row["entropy"]]  # None: a token that a tool inserted
    entropy = np.array([nats for nats in of_tokens if nats is not None])
    of_prompt = defaultdict(list)
    for row in rows:
        of_prompt[row["source"], row["prompt_index"]].append(row["status"] == "ok")
    rates = np.array([np.mean(right) for right in of_prompt.values()])
    return {
        "prompts": len(rates),
        "completions": len(rows),
        "mean tokens": tokens.mean(),
        "median tokens": np.median(tokens),
        "99th percentile / median": np.quantile(tokens, 0.99) / np.median(tokens),
        f"share of tokens above {UNCERTAIN_NATS} nats": np.mean(entropy > UNCERTAIN_NATS),
        "mean reward": np.mean([row["reward"] for row in rows]),
        "pass@1": rates.mean(),
        "prompts never solved": np.mean(rates == 0),
        "prompts solved in between": np.mean((rates > 0) & (rates < 1)),
        "prompts always solved": np.mean(rates == 1),
    }


def main() -> int:
    """Print the table of a file of completions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("completions", type=Path, help="JSONL of experiments/evaluate.py")
    path = parser.parse_args().completions
    try:
        figures = describe([json.loads(line) for line in path.read_text().splitlines()])
    except KeyError as error:
        print(
            f"error: {path}: rows lack {error}; make the file by experiments/evaluate.py, without the option "
            "--no-trainer-logprobs",
            file=sys.stderr,
        )
        return 1
    except (OSError, ValueError) as error:
        print(f"error: {path}: expected completions of experiments/evaluate.py: {error}", file=sys.stderr)
        return 1
    print("| figure | value |\n|---|---|")
    for name, value in figures.items():
        print(f"| {name} | {value:,}" if isinstance(value, int) else f"| {name} | {value:.3g}", "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
