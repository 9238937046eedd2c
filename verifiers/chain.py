"""Check a chain of thought step by step: the trace of a small machine, as `data/chains.py` asks for it.

    verify("b-5*3+4=7;a*3+4-5=2", "b-5*3+4=7;a*3+4-5=2")     # after c+4-5*3=3: (1.0, "ok", "")
    verify("b-5*3+4=8;a*3+4-5=3", "b-5*3+4=7;a*3+4-5=2")     # 3 + 4 is not 8, 8 - 5 is 3: (0.5, "wrong", "")

A state such as "c+4-5*3=3" is a counter (a is 0, b is 1, ..., z, A, ..., Z), a program, and the value, a
digit. A step counts down, moves the program's first operation to its end, and applies it to the value, modulo
10: what was applied stands right before the result. States stand between ";", a chain ends at counter a.
"""

import re

COUNTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"  # the place is the number of steps left
OPERATIONS = {"+": lambda x, y: (x + y) % 10, "-": lambda x, y: (x - y) % 10, "*": lambda x, y: x * y % 10}
STATE = re.compile(r"([a-zA-Z])((?:[-+*][0-9])+)=([0-9])")


def step(state: str) -> str:
    """Return the state after one step; ValueError if it is no state, or if its counter is at its end."""
    match = STATE.fullmatch(state)
    if match is None or match[1] == COUNTERS[0]:
        raise ValueError(f"no step leads on from {state[:99]!r}: a state is like c+4-5*3=3, and a is the end")
    counter, program, value = match.groups()
    operation, rest = program[:2], program[2:]
    result = OPERATIONS[operation[0]](int(value), int(operation[1]))
    return f"{COUNTERS[COUNTERS.index(counter) - 1]}{rest}{operation}={result}"


def verify(completion: str, answer: str) -> tuple[float, str, str]:
    """Return the share of right steps, the status ("ok" for all of them) and a detail.

    answer: the right states behind the question's, between ";". A step is right if it follows from the state
    before it as that is written, so a mistake counts once. Where a state differs from the right one in more
    than its value, it and all behind it are wrong. More states than the answer has make the share smaller.
    """
    right = answer.strip().split(";")
    if not all(STATE.fullmatch(state) for state in right):
        return 0.0, "error", f"the reference answer holds no states between ;: {answer[:99]!r}"
    if not completion.strip():
        return 0.0, "no_answer", ""
    written, expected, num_right = completion.strip().split(";"), right[0], 0
    for number, (state, reference) in enumerate(zip(written, right), start=1):
        if state[:-1] != reference[:-1] or not STATE.fullmatch(state):
            break
        num_right += state == expected
        expected = step(state) if number < len(right) else ""
    share = num_right / max(len(right), len(written))
    return share, "ok" if share == 1 else "wrong", ""
