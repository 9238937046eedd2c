"""The task of the recipe "chains" of data/tiny.py: long chains of thought in which most tokens are copied.

The prompt is the first state of a small machine, for example "c+4-5*3=3;". The completion is the trace of the
machine, for example "b-5*3+4=7;a*3+4-5=2", with one state per step. A state has a counter ("b"), a program
("-5*3+4") and a value ("7"). verifiers/chain.py defines a step and checks every step. The policy has to
compute a single token of each state, the value; the other tokens are copied from the previous state. A chain
of n steps therefore has n states of equal width, and is right if n computed values are right.

Habits. The program uses 18 operations: +, - or * with a digit from 2 to 7. The corpus of the warm start gets
some operations wrong, always by the same offset, for example +4 as +7. A few operations are wrong in most
cases, so that the most probable answer is wrong; others are wrong now and then. RL has to unlearn the habits.

Lengths. Half of the prompts have few steps, the other half have up to the maximum, so that the longest chains
are several times as long as the median chain. The held-out set "test" has the same distribution of lengths;
the set "longer" has chains that are longer than all training chains.
"""

from dataclasses import dataclass

import numpy as np

from verifiers.chain import COUNTERS, OPERATIONS, step

INSTRUCTIONS = [f"{operation}{digit}" for operation in OPERATIONS for digit in range(2, 8)]


@dataclass(frozen=True)
class Chains:
    """The parameters of the task: lengths, programs and habits."""

    program_size: int = 4  # operations; a state has 2 * program_size + 4 characters, including the ";"
    num_strong: int = 3  # number of operations, out of 18, that the corpus gets wrong in most cases
    strong_frac: tuple[float, float] = (0.55, 0.7)  # error rates of the strong habits, evenly spaced
    num_weak: int = 10  # number of operations that the corpus gets wrong now and then
    weak_frac: tuple[float, float] = (0.11, 0.14)  # error rates of the weak habits, evenly spaced
    short_steps: tuple[int, int] = (2, 5)  # closed range of steps for the short half of the prompts
    long_steps: tuple[int, int] = (5, 30)  # closed range of steps for the long half of the prompts
    longer_steps: tuple[int, int] = (31, 38)  # closed range of steps for the held-out set "longer"
    num_train: int = 8000
    num_test: int = 128
    num_longer: int = 24
    batch_tokens: int = 2000  # tokens of completions in a warm-start step


def habits(chains: Chains, seed: int) -> dict[str, tuple[float, int]]:
    """Draw the habits of the corpus: {operation: (error rate, offset of a wrong value modulo 10)}."""
    rng = np.random.default_rng([seed, 2_000])
    strong = np.linspace(*chains.strong_frac, chains.num_strong)
    weak = np.linspace(*chains.weak_frac, chains.num_weak)
    fracs = dict(zip(rng.permutation(INSTRUCTIONS).tolist(), [*strong.tolist(), *weak.tolist()]))
    return {name: (fracs.get(name, 0.0), int(rng.integers(1, 10))) for name in INSTRUCTIONS}


def draw_start(num_steps: int, chains: Chains, rng: np.random.Generator) -> str:
    """Draw the first state of a chain."""
    program = rng.choice(INSTRUCTIONS, size=chains.program_size)
    return f"{COUNTERS[num_steps]}{''.join(program)}={rng.integers(10)}"


def trace(start: str, corpus_habits: dict | None, rng: np.random.Generator | None) -> str:
    """Write the states that follow `start`, with the errors of corpus_habits; None: all states are right."""
    states = []
    state = start
    while state[0] != COUNTERS[0]:
        error_rate, offset = corpus_habits[state[1:3]] if corpus_habits else (0.0, 0)
        state = step(state)
        if error_rate and rng.random() < error_rate:
            state = f"{state[:-1]}{(int(state[-1]) + offset) % 10}"
        states.append(state)
    return ";".join(states)


def draw_rows(kind: str, ranges: list[tuple[int, int]], size: int, chains: Chains, rng, used: set) -> list:
    """Draw prompt rows, equally many from each closed range of steps; `used` collects the drawn prompts."""
    rows = []
    while len(rows) < size:
        low, high = ranges[len(rows) % len(ranges)]
        num_steps = int(rng.integers(low, high + 1))
        start = draw_start(num_steps, chains, rng)
        if start in used:
            continue
        used.add(start)
        answer = trace(start, None, None)
        rows.append({"prompt": f"{start};", "answer": answer, "kind": kind, "difficulty": num_steps})
    return rows


def sample_sets(chains: Chains, seed: int) -> dict[str, list[dict]]:
    """Return the disjoint sets train (scored by the share of right steps), test and longer (exact match)."""
    rng = np.random.default_rng([seed, 0])
    used = set()
    ranges = [chains.short_steps, chains.long_steps]
    test = draw_rows("exact", ranges, chains.num_test, chains, rng, used)
    longer = draw_rows("exact", [chains.longer_steps], chains.num_longer, chains, rng, used)
    train = draw_rows("chain", ranges, chains.num_train, chains, rng, used)
    return {"train": train, "test": test, "longer": longer}


def corpus_batch(chains: Chains, seed: int, progress: float, rng, held_out: set) -> tuple[list, list]:
    """Return (prompts, answers) of a warm-start step; all answers of a step are equally long.

    progress: completed fraction of the warm start, in [0, 1). Answers start short and grow. In the second
    half, one step in six draws any length up to the longest held-out chains. Half of the answers are cut
    after a ";", so that the corpus has high counters as often as low counters.
    """
    longest = chains.longer_steps[1]
    is_long = progress > 0.5 and rng.random() < 1 / 6
    num_states = int(rng.integers(1, longest + 1 if is_long else 5 + int(12 * min(1.0, progress / 0.7))))
    width = 2 * chains.program_size + 4
    corpus_habits = habits(chains, seed)
    prompts = []
    answers = []
    while len(prompts) < max(1, chains.batch_tokens // (width * max(num_states, 3))):
        is_cut = rng.random() < 0.5 and num_states < longest
        num_steps = int(rng.integers(num_states + 1, longest + 1)) if is_cut else num_states
        start = draw_start(num_steps, chains, rng)
        if f"{start};" not in held_out:
            prompts.append(f"{start};")
            answers.append(trace(start, corpus_habits, rng)[: width * num_states])
    return prompts, answers
