"""Time limits of tests, scaled by the speed of this machine, which may be slow or busy.

A test waits for a condition, and a limit only ends a test that would otherwise hang. A limit is given in
seconds of a quiet core and grows with slowness(), so that no test fails because other processes take the
processor. tests/test_house.py refuses limits that do not pass through this module.
"""

import time
from collections.abc import Callable

QUIET_S = 0.02  # duration of work() on one quiet core (Xeon, 2.8 GHz)
INTERVAL_S = 5.0  # between measurements
slowest = 1.0
next_measurement = 0.0


def work() -> int:
    """Compute for QUIET_S seconds."""
    total = 0
    for i in range(400_000):
        total += i & 3
    return total


def slowness() -> float:
    """Return how much longer than on a quiet core work takes: the most measured so far, at least 1."""
    global slowest, next_measurement
    if time.monotonic() >= next_measurement:
        start = time.monotonic()
        work()
        work()
        end = time.monotonic()
        slowest = max(slowest, (end - start) / (2 * QUIET_S))
        next_measurement = end + INTERVAL_S
    return slowest


def limit(seconds: float) -> float:
    """Return the time that `seconds` of a quiet core may take on this machine now."""
    return seconds * slowness()


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> bool:
    """Wait until a condition holds, and return True; False if the limit has passed."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() > start + limit(seconds):  # measured anew: the load may have risen meanwhile
            return bool(condition())
        time.sleep(0.01)
    return True
