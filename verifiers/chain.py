"""Verify a chain of thought step by step: the trace of a small machine, see data/chains.py.

    verify("b-5*3+4=7;a*3+4-5=2", "b-5*3+4=7;a*3+4-5=2")     # after c+4-5*3=3: (1.0, "ok", "")
    verify("b-5*3+4=8;a*3+4-5=3", "b-5*3+4=7;a*3+4-5=2")     # 3 + 4 is not 8, 8 - 5 is 3: (0.5, "wrong", "")

A state, for example "c+4-5*3=3", has a counter ("c" = 2; a = 0, b = 1, ..., z, A, ..., Z), a program
("+4-5*3") and a value ("3", a digit). A step decrements the counter, moves the first operation of the program
to the end, and applies the operation to the value modulo 10; the applied operation is then right before the
result ("b-5*3+4=7"). States are separated by ";". The chain ends at counter a.
"""

import re

COUNTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"  # the position is the number of steps to go
OPERATIONS = {"+": lambda x, y: (x + y) % 10, "-": lambda x, y: (x - y) % 10, "*": lambda x, y: x * y % 10}
STATE = re.compile(r"([a-zA-Z])((?:[-+*][0-9])+)=([0-9])")


def step(state: str) -> str:
    """Return the state after one step; ValueError for an invalid state or the final counter a."""
    match = STATE.fullmatch(state)
    if match is None or match[1] == COUNTERS[0]:
        raise ValueError(
            f"no step is possible from {state[:99]!r}: expected a state like c+4-5*3=3, not at a"
        )
    counter, program, value = match.groups()
    operation = program[:2]
    result = OPERATIONS[operation[0]](int(value), int(operation[1]))
    return f"{COUNTERS[COUNTERS.index(counter) - 1]}{program[2:]}{operation}={result}"


def verify(completion: str, answer: str) -> tuple[float, str, str]:
    """Return the share of right steps, the status ("ok" if all steps are right) and a detail.

    answer: the right states after the first state, separated by ";". A step is right if the state follows
    from the previous state as written, so that a mistake is counted once and not in every later state. If a
    counter or a program is wrong, the state and all later states are wrong. Surplus states lower the share.
    """
    right = answer.strip().split(";")
    if not all(STATE.fullmatch(state) for state in right):
        return 0.0, "error", f"the reference answer is not a list of states separated by ;: {answer[:99]!r}"
    if not completion.strip():
        return 0.0, "no_answer", ""
    written = completion.strip().split(";")
    expected = right[0]
    num_right = 0
    for number, (state, reference) in enumerate(zip(written, right), start=1):
        if state[:-1] != reference[:-1] or not STATE.fullmatch(state):
            break
        num_right += state == expected
        expected = step(state) if number < len(right) else ""
    share = num_right / max(len(right), len(written))
    return share, "ok" if share == 1 else "wrong", ""
