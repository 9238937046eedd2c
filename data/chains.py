"""The text of the recipe "chains" of data/tiny.py: long chains of thought, most of their tokens copied.

A prompt is the first state of a small machine, "c+4-5*3=3;", the completion is its trace,
"b-5*3+4=7;a*3+4-5=2", one state a step: counter, program, value. verifiers/chain.py says what a step does,
and checks each. One token of a state is decided, its value; all others are copied from the state before it.
So a chain of n steps has n states of one width, and it is right if n decisions are.

Habits. There are 18 operations, +, - or * with a digit from 2 to 7. The corpus misses some of them by an
amount of their own, a few more often than not, so that the most probable answer is wrong, many now and then.
They are what RL has to unlearn.

Lengths. Half of the prompts have few steps, the other half up to the longest: the longest chains are several
times as long as the median one. A held-out set has the same lengths, another one longer chains than RL
trains on.
"""

from dataclasses import dataclass

import numpy as np

from verifiers.chain import COUNTERS, OPERATIONS, step

INSTRUCTIONS = [f"{operation}{digit}" for operation in OPERATIONS for digit in range(2, 8)]


@dataclass(frozen=True)
class Chains:
    """Hold what decides the text: lengths, programs and habits."""

    program_size: int = 4  # operations; a state has 2 * program_size + 4 characters, with its ";"
    num_strong: int = 3  # operations, of 18, that the corpus misses more often than not
    strong_frac: tuple[float, float] = (0.55, 0.7)  # wrong share of the best and of the worst of these
    num_weak: int = 10  # operations that it misses now and then
    weak_frac: tuple[float, float] = (0.11, 0.14)
    short_steps: tuple[int, int] = (2, 5)  # closed range of steps of one half of the prompts
    long_steps: tuple[int, int] = (5, 30)  # the same of the other half
    longer_steps: tuple[int, int] = (31, 38)  # the same of the second held-out set
    num_train: int = 8000
    num_test: int = 128
    num_longer: int = 24
    batch_tokens: int = 2000  # tokens of completions in a warm-start step


def habits(chains: Chains, seed: int) -> dict[str, tuple[float, int]]:
    """Draw for each operation how often the corpus misses it, and by how much, modulo 10."""
    rng = np.random.default_rng([seed, 2_000])
    strong = np.linspace(*chains.strong_frac, chains.num_strong)
    weak = np.linspace(*chains.weak_frac, chains.num_weak)
    fracs = dict(zip(rng.permutation(INSTRUCTIONS).tolist(), [*strong.tolist(), *weak.tolist()]))
    return {name: (fracs.get(name, 0.0), int(rng.integers(1, 10))) for name in INSTRUCTIONS}


def draw_start(num_steps: int, chains: Chains, rng: np.random.Generator) -> str:
    """Draw the first state of a chain."""
    program = rng.choice(INSTRUCTIONS, size=chains.program_size)
    return f"{COUNTERS[num_steps]}{''.join(program)}={rng.integers(10)}"


def trace(start: str, wrong: dict[str, tuple[float, int]] | None, rng: np.random.Generator | None) -> str:
    """Write the states behind the first one: the right ones, or with `wrong` those of the corpus."""
    states, state = [], start
    while state[0] != COUNTERS[0]:
        frac, offset = wrong[state[1:3]] if wrong else (0.0, 0)
        state = step(state)
        if frac and rng.random() < frac:
            state = f"{state[:-1]}{(int(state[-1]) + offset) % 10}"
        states.append(state)
    return ";".join(states)


def draw_rows(kind: str, ranges: list[tuple[int, int]], number: int, chains: Chains, rng, seen: set) -> list:
    """Draw prompt rows, as many of each closed range of steps, without those that were seen."""
    rows = []
    while len(rows) < number:
        low, high = ranges[len(rows) % len(ranges)]
        num_steps = int(rng.integers(low, high + 1))
        start = draw_start(num_steps, chains, rng)
        if start in seen:
            continue
        seen.add(start)
        answer = trace(start, None, None)
        rows.append({"prompt": f"{start};", "answer": answer, "kind": kind, "difficulty": num_steps})
    return rows


def sample_sets(chains: Chains, seed: int) -> dict[str, list[dict]]:
    """Return disjoint sets: train (kind chain, the share of right steps), test and longer (kind exact)."""
    rng, seen = np.random.default_rng([seed, 0]), set()
    usual = [chains.short_steps, chains.long_steps]
    test = draw_rows("exact", usual, chains.num_test, chains, rng, seen)
    longer = draw_rows("exact", [chains.longer_steps], chains.num_longer, chains, rng, seen)
    train = draw_rows("chain", usual, chains.num_train, chains, rng, seen)
    return {"train": train, "test": test, "longer": longer}


def corpus_batch(chains: Chains, seed: int, progress: float, rng, held_out: set) -> tuple[list, list]:
    """Return (prompts, answers) of a warm-start step; all answers of a step are equally long.

    progress: share of the warm start that is done, in [0, 1). Answers are short at first; in the second half
    every sixth step has any length, the longest held-out ones included. Half of the answers are cut on the
    way, behind a ";", so that high counters are met as often as low ones.
    """
    longest = chains.longer_steps[1]
    is_long = progress > 0.5 and rng.random() < 1 / 6
    num_states = int(rng.integers(1, longest + 1 if is_long else 5 + int(12 * min(1.0, progress / 0.7))))
    width, wrong = 2 * chains.program_size + 4, habits(chains, seed)
    prompts, answers = [], []
    while len(prompts) < max(1, chains.batch_tokens // (width * max(num_states, 3))):
        is_cut = rng.random() < 0.5 and num_states < longest
        num_steps = int(rng.integers(num_states + 1, longest + 1)) if is_cut else num_states
        start = draw_start(num_steps, chains, rng)
        if f"{start};" not in held_out:
            prompts.append(f"{start};")
            answers.append(trace(start, wrong, rng)[: width * num_states])
    return prompts, answers
