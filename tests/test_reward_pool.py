"""The reward pool: functions of your own, workers that misbehave, order, backlog, decoding."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

import reward
from data.tiny import build_tokenizer
from reward import ASYNC_CALLS, RewardPool, Verdict, check_functions, decoder_json, verify
from settings import RewardSettings
from verifiers.kinds import KINDS, functions_of, is_kind, parts_of

OWN = """
import asyncio, os, signal, subprocess, sys, time
import sibling_of_own_rewards

def given(completion, answer): return eval(answer)
def without_answer(completion): return len(completion) == 3
def with_default(completion, level=0.25): return level
def with_prompt(completion, prompt, messages): return prompt == messages[0]["content"] == completion
def with_all(answer, **given): return sorted(given) == ["completion", "level", "messages", "prompt"]
def with_missing(completion, level, hint): return 1.0
def others(completions, **kwargs): return 1.0
def prints(completion, answer): print("printed", completion); print("aside", file=sys.stderr); return 1.0
def environment(completion, answer): return os.environ.get(completion) == answer
def colours(completion, answer): raise ValueError("\\x1b[31mred\\nline two")
def of_sibling(completion, answer): return sibling_of_own_rewards.SHARE
def coroutine(completion, answer): return waits("0", answer)
async def waits(completion, answer): await asyncio.sleep(float(completion)); return 1.0
async def waits_for(level): await asyncio.sleep(0.01); return level
async def raises_async(completion): raise KeyError("late")
async def blocks(completion, answer):
    if completion == "bad": time.sleep(100)
    await asyncio.sleep(0.05); return 1.0
async def stubborn(completion, answer):
    while True:
        try: await asyncio.sleep(100)
        except asyncio.CancelledError: pass
def writes(completion, answer):
    for fd in range(3, 64):
        try: os.write(fd, completion.encode())
        except OSError: pass
    return 0.0
def forks(completion, answer):
    if os.fork() == 0:
        time.sleep(100); os._exit(0)
    if completion == "dies": os.abort()
    return 1.0
def flees(completion, answer):
    started, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            subprocess.Popen(["sleep", answer], start_new_session=True)
            os.write(tell, b"1"); time.sleep(100)
        os._exit(0)
    os.read(started, 1)
    if completion == "dies": os.abort()
    return 1.0
def equal(completion, answer): return completion == answer
def raises(completion, answer): raise KeyError("no such test")
def text(completion, answer): return "half"
def hangs(completion, answer):
    while True: pass
def deaf(completion, answer):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True: time.sleep(1)
def aborts(completion, answer): os.abort()
def leaves(completion, answer): sys.exit(0)
def eats(completion, answer):
    kept = []
    while True: kept.append(bytearray(1 << 24))
def floods(completion, answer):
    for _ in range(100):
        os.write(1, b"x" * (1 << 20)); sys.stdout.write("y" * 1000); os.write(2, b"z" * (1 << 20))
    return 1.0
def sleeps(completion, answer):
    time.sleep(float(completion)); return 1.0
"""
OK, WRONG = Verdict(1.0, "ok"), Verdict(0.0, "wrong")
FIELDS = {"prompt": "p", "messages": [{"role": "user", "content": "p"}], "level": 0.5}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The module `own_rewards` where the workers find it; its path."""
    (tmp_path / "own_rewards.py").write_text(OWN)
    (tmp_path / "sibling_of_own_rewards.py").write_text("SHARE = 0.75")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "own_rewards.py"


def scored(*items: tuple, **options) -> list[Verdict]:
    with RewardPool(**{"num_workers": 2, "timeout_s": 5.0} | options) as pool:
        for key, item in enumerate(items):
            pool.submit(key, *item)
        return list(pool.collect().values())


def test_a_function_of_your_own_gives_a_share_and_one_is_right(own):
    shares = [0, 0.25, 0.999, False, 1, True]
    verdicts = scored(*(("own_rewards:given", "x", repr(share)) for share in shares))
    assert verdicts == [Verdict(share, "wrong") for share in shares[:4]] + [OK, OK]


def test_a_score_that_rounding_has_moved_is_right_or_nothing(own):
    """Sums of shares, and a cosine in float32, end beside 1 on either side."""
    texts = [
        "0.7 + 0.2 + 0.1",
        "sum([0.1] * 10)",
        "sum([0.05] * 20)",
        "1.0000001",
        "-1e-9",
        "0.3 - 0.1 - 0.2",
        "0.1 + 0.2 - 0.3",
    ]
    verdicts = scored(*(("own_rewards:given", "x", text) for text in texts))
    assert verdicts == [OK] * 4 + [WRONG] * 3


BROKEN = [  # (function, reference answer, what its verdict says)
    ("given", "1.001", "it returned 1.001, not a number in [0, 1]"),
    ("given", "-0.1", "it returned -0.1, not a number"),
    ("given", "float('nan')", "it returned nan, not a number"),
    ("given", "1e999", "it returned inf, not a number"),
    ("given", "None", "it returned None, not a number"),
    ("given", "'0.5'", "it returned '0.5', not a number"),
    ("given", "(1.0, 'ok')", "it returned (1.0, 'ok'), not a number"),
    ("given", "[1]*10**5", "it returned [1, 1"),
    ("raises", "", "KeyError: 'no such test' (own_rewards.py, line "),
    ("raises_async", "", "KeyError: 'late' (own_rewards.py, line "),
    ("colours", "", r"ValueError: \x1b[31mred\nline two (own_rewards.py, line "),
    ("coroutine", "", "it returned a coroutine: "),
    ("wait", "", "has no 'wait', did you mean 'waits'?"),
    ("OWN.f", "", "has no 'OWN.f'"),
    (
        "with_missing",
        "",
        "its parameters hint are not columns of the row; available: prompt, messages, level, ",
    ),
    (
        "others",
        "",
        "its parameters completions are not columns of the row; available: prompt, messages, level",
    ),
]


@pytest.mark.parametrize("place", ["file", "module"])
def test_what_is_no_score_is_an_error_with_its_reason(place, own):
    prefix = str(own) if place == "file" else "own_rewards"
    with RewardPool(1) as pool:
        for key, (name, answer, _) in enumerate(BROKEN):
            pool.submit(key, f"{prefix}:{name}", "x", answer, FIELDS)
        pool.submit("own", f"{prefix}:given", "x", "1")
        verdicts = pool.collect()
        assert (verdicts.pop("own"), pool.num_restarts, pool.num_errors) == (OK, 0, len(BROKEN))
    for verdict, (_, _, reason) in zip(verdicts.values(), BROKEN):
        assert (verdict.reward, verdict.status) == (0.0, "error")
        assert reason in verdict.detail and len(verdict.detail) <= 200 and verdict.detail.isprintable()


def test_a_function_that_cannot_be_imported_is_an_error_with_its_reason(tmp_path):
    for name, text in {"syntax": "def f(:", "raises": "1/0", "no_module": "import absent_module"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    reasons = {
        f"{tmp_path}/syntax.py:f": "SyntaxError: invalid syntax (syntax.py, line 1)",
        f"{tmp_path}/raises.py:f": "ZeroDivisionError: division by zero (raises.py, line 1)",
        f"{tmp_path}/no_module.py:f": "No module named 'absent_module' (no_module.py, line 1)",
        f"{tmp_path}/absent.py:f": f"there is no file {tmp_path}/absent.py",
        "absent_module.rewards:f": "No module named 'absent_module'",
        "math:f": "math has no 'f'",
        "math:sin": "by position only",
        "math:pi": "cannot be read",
    }
    for verdict, reason in zip(scored(*((kind, "x", "") for kind in reasons)), reasons.values()):
        assert verdict.status == "error" and reason in verdict.detail


def test_a_function_gets_what_its_parameters_name(own):
    names = ["without_answer", "with_default", "with_prompt", "with_all", "waits_for", "of_sibling"]
    expected = [False, 0.5, True, True, 0.5, 0.75]
    for prefix in (str(own), "own_rewards", os.path.relpath(own)):
        items = [(f"{prefix}:{name}", "p", "a", FIELDS) for name in names]
        items = items + items  # the second ones are sent after the pool has learned what they take
        assert [verdict.reward for verdict in scored(*items, num_workers=1)] == 2 * expected
    (verdict,) = scored((f"{own}:with_default", "p", "a", {"completion": "z", "answer": "z"}))
    assert verdict.reward == 0.25, "without the column its default counts"
    assert scored((f"{own}:without_answer", "abc", "a", {"completion": "z"})) == [OK]


def test_workers_get_only_the_fields_that_a_function_takes(own):
    kinds = {
        f"{own}:with_default": ["level"],
        f"{own}:with_prompt": ["messages", "prompt"],
        f"{own}:given": [],
        f"{own}:with_all": None,
        f"0.5*exact + 0.25*{own}:with_default + 0.25*{own}:waits_for": ["level"],
    }
    with RewardPool(1) as pool:
        for kind in kinds:
            pool.submit(kind, kind, "p", "1", FIELDS)
        pool.collect()
        assert {kind: pool.signatures[kind]["fields"] for kind in kinds} == kinds
        for kind, names in {**kinds, "math": []}.items():
            line = json.loads(pool._line([reward._Item(0, kind, "p", "1", FIELDS)]))
            assert line[1][0][4] == {n: v for n, v in FIELDS.items() if names is None or n in names}


@pytest.mark.parametrize(
    "kind, parts",
    [
        ("0.8*math + 0.2*my.py:brevity", [(0.8, "math"), (0.2, "my.py:brevity")]),
        ("2 * exact+1*a+b/c d.py:f + .5*m.n:f.g", [(2, "exact"), (1, "a+b/c d.py:f"), (0.5, "m.n:f.g")]),
        ("1*gsm8k + 0*characters", [(1, "gsm8k"), (0, "characters")]),
        ("path/my.py:f", [(1, "path/my.py:f")]),
        ("code", [(1, "code")]),
        ("0.8*math + brevity", "unknown kind 'math \\+ brevity' in .* each part of a sum has a weight"),
        ("0.8*math + my.py:f", "unknown kind 'math \\+ my.py:f' in .* each part of a sum has a weight"),
        ("0.8*math + 0.2*exct", "unknown kind 'exct' in .*: did you mean 'exact'"),
        ("0.8*math + 0.2*math", "each part must be another one"),
        ("0*math + 0*exact", "some weight more than 0"),
        ("my.py", "no module:function or path/file.py:function"),
        ("my-module:f", "no module:function or path/file.py:function"),
        ("-1*math + 1*exact", "unknown kind"),
        ("", "unknown kind"),
    ],
)
def test_kinds_and_their_sums(kind, parts):
    if isinstance(parts, str):
        assert not is_kind(kind)
        with pytest.raises(ValueError, match=parts):
            verify(kind, "a", "a")
    else:
        assert is_kind(kind) and list(parts_of(kind)) == parts
        assert functions_of(kind) == [part for _, part in parts if part not in KINDS]


def test_a_sum_is_a_weighted_mean_with_each_part_and_the_status_of_its_first(own):
    quarter, half = f"{own}:with_default", f"{own}:waits_for"
    exact = {quarter: 0.25, half: 0.5}
    items = {
        f"3*exact + 1*{quarter}": Verdict(3.25 / 4, "ok", parts={"exact": 1.0, quarter: 0.25}),
        f"1*{quarter} + 3*exact": Verdict(3.25 / 4, "wrong", parts={quarter: 0.25, "exact": 1.0}),
        f"0*{half} + 1*exact": Verdict(1.0, "wrong", parts={half: 0.5, "exact": 1.0}),
        f"1*{quarter} + 1*{half}": Verdict(0.375, "wrong", parts=exact),
        "0.1*exact + 0.2*characters + 0.7*gsm8k": Verdict(
            0.0, "error", "gsm8k: the reference answer is not a number: 'a'",
            {"exact": 1.0, "characters": 1.0, "gsm8k": 0.0}),
        "0.1*exact + 0.2*characters": Verdict(1.0, "ok", parts={"exact": 1.0, "characters": 1.0}),
    }  # fmt: skip
    fields = {"level": 0.5}
    with RewardPool(1) as pool:
        for kind in items:
            kind_fields = {} if quarter in kind and half not in kind else fields
            pool.submit(kind, kind, "a", "a", kind_fields)
        verdicts = pool.collect()
    both = f"1*{quarter} + 1*{half}"
    assert verdicts.pop(both).parts == {quarter: 0.5, half: 0.5}
    items.pop(both)
    for kind, verdict in items.items():
        assert verdicts[kind] == verdict


def test_calls_of_an_async_function_wait_together(own):
    """One worker: 40 calls of 0.2 s, one after another, would take 8 s."""
    start = time.monotonic()
    with RewardPool(1, timeout_s=60.0) as pool:
        assert pool.at_once("own_rewards:waits") == 1, "it is not known yet"
        for key in range(40):
            pool.submit(key, "own_rewards:waits", "0.2", "")
        assert list(pool.collect().values()) == [OK] * 40
        assert pool.num_restarts == 0 and 0.2 <= pool.seconds["own_rewards:waits"]
        assert (pool.at_once("own_rewards:waits"), pool.at_once("exact")) == (ASYNC_CALLS, 1)
    assert time.monotonic() - start < 4


def test_programs_do_not_wait_in_line_behind_each_other_for_an_async_function(own):
    """Beside one, they would run one after another under the limit of one call."""
    with RewardPool(1, timeout_s=60.0) as pool:
        kinds = "0.5*code + 0.5*own_rewards:waits", "0.5*exact + 0.5*own_rewards:waits"
        for kind in kinds:
            pool.submit(kind, kind, "0", "[]")
        assert pool.collect()[kinds[1]].status == "wrong"
        assert [pool.at_once(kind) for kind in kinds] == [1, ASYNC_CALLS]


def test_each_call_of_an_async_function_has_its_own_limit(own):
    seconds = ["0", "0", "30", "0.1", "0", "30"]
    with RewardPool(1, timeout_s=1.5) as pool:
        for key, sleep in enumerate(seconds):
            pool.submit(key, "own_rewards:waits", sleep, "")
        verdicts = list(pool.collect().values())
        assert pool.num_restarts == 0 and pool.num_timeouts == 2
    late = Verdict(0.0, "timeout", "stopped after the limit of 1.5 s")
    assert verdicts == [late if sleep == "30" else OK for sleep in seconds]


@pytest.mark.slow
@pytest.mark.parametrize("name, restarts", [("blocks", 2), ("stubborn", 1)])
def test_an_async_call_that_cannot_be_stopped_is_killed_and_costs_its_own_item_only(
    name, restarts, own, monkeypatch
):
    monkeypatch.setattr(reward, "GRACE_S", 1.0)
    with RewardPool(1, timeout_s=2.0) as pool:
        pool.submit("first", "own_rewards:blocks", "good", "")
        pool.collect()
        for key in range(6):
            pool.submit(key, "own_rewards:blocks", "bad" if (key, name) == (3, "blocks") else "good", "")
        if name == "stubborn":
            pool.submit("stubborn", "own_rewards:stubborn", "bad", "")
        verdicts = pool.collect()
        assert (pool.num_restarts, pool.num_timeouts) == (restarts, 1)
    late = verdicts.pop(3 if name == "blocks" else "stubborn")
    assert late.status == "timeout" and set(verdicts.values()) == {OK}


# ---- functions and workers that misbehave ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, status, restarts",
    [("hangs", "timeout", 1), ("aborts", "error", 1), ("leaves", "error", 1), ("eats", "error", 1),
     ("floods", "ok", 0)],
)  # fmt: skip
def test_a_function_that_misbehaves_costs_its_own_item_only(name, status, restarts, own):
    """Within the limit of 2 s and what a fresh worker takes to start, on a machine with other work."""
    start = time.monotonic()
    with RewardPool(1, timeout_s=2.0, memory_bytes=1 << 29) as pool:
        pool.submit("before", "exact", "a", "a")
        pool.submit("bad", f"own_rewards:{name}", "x", "")
        for key in range(20):
            pool.submit(key, "exact", "a", "a")
        pool.submit("after", "own_rewards:given", "x", "1")
        verdicts = pool.collect()
        assert pool.num_restarts == restarts and len(pool.latencies) == 23
    assert verdicts.pop("bad").status == status
    assert set(verdicts.values()) == {OK} and len(verdicts) == 22
    assert time.monotonic() - start < 2 + 20


def test_a_function_that_keeps_what_it_takes_costs_one_item_now_and_then(own):
    """Each call keeps 48 MiB of a worker's 512; a worker that is full is replaced."""
    own.write_text("kept = []\ndef keeps(completion): kept.append(bytearray(48 << 20)); return 1.0\n")
    with RewardPool(1, timeout_s=20.0, memory_bytes=1 << 29) as pool:
        for key in range(24):
            pool.submit(key, "own_rewards:keeps", "x", "")
        statuses = [verdict.status for verdict in pool.collect().values()]
        assert statuses.count("error") == pool.num_restarts >= 1
    first = statuses.index("error")
    assert statuses[first + 1 : 2 * first + 1] == ["ok"] * min(first, 23 - first), (
        "the next one is as good as new"
    )


def test_a_function_that_ignores_the_alarm_is_killed_after_the_grace(own, monkeypatch):
    monkeypatch.setattr(reward, "GRACE_S", 1.0)
    start = time.monotonic()
    with RewardPool(1, timeout_s=0.5) as pool:
        pool.submit("deaf", "own_rewards:deaf", "x", "")
        pool.submit("after", "exact", "a", "a")
        verdicts = pool.collect()
        assert pool.num_restarts == 1
    assert verdicts["deaf"].status == "timeout" and verdicts["after"] == OK
    assert time.monotonic() - start < 60, "it had said that it was ready, so it got no time to start"


@pytest.mark.parametrize(
    "written",
    ["garbage\n", '["x", 1.0, "ok", "", {}, 0.1]\n', '["x", {"fields": []}]\n', "half a line", "[]\n", "7\n",
     "[" * 9999 + "\n", "\n"],
)  # fmt: skip
def test_what_a_function_writes_into_the_pipe_of_verdicts_is_none(written, own):
    with RewardPool(1) as pool:
        pool.submit("bad", "own_rewards:writes", written, "")
        for key in range(3):
            pool.submit(key, "exact", "a", "a")
        verdicts = pool.collect()
        assert pool.num_restarts == 1
    verdict = verdicts.pop("bad")
    assert (verdict.reward, verdict.status) == (0.0, "error") and "pipe" in verdict.detail
    assert list(verdicts.values()) == [OK] * 3


def group_of(leader: int) -> list[int]:
    """Process ids of the living processes of a group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if int(group) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("completion, restarts", [("stays", 0), ("dies", 1)])
def test_processes_that_a_function_leaves_behind_end_with_the_worker(completion, restarts, own):
    """The one that is left holds the pipe open; the end of the worker shows all the same."""
    start = time.monotonic()
    with RewardPool(1, timeout_s=60.0) as pool:
        leader = pool._workers[0].process.pid
        pool.submit(0, "own_rewards:forks", completion, "")
        (verdict,) = pool.collect().values()
        assert (verdict.status, pool.num_restarts) == ("error" if restarts else "ok", restarts)
        if not restarts:
            assert len(group_of(leader)) == 3, "the worker, its guard, and what was left"
    assert time.monotonic() - start < 30
    wait_until_none(group_of, leader)


def sleepers(seconds: str) -> list[int]:
    """Process ids of the living `sleep` of so many seconds."""
    found = psutil.process_iter(["cmdline", "status"])
    return [p.pid for p in found if p.info["cmdline"] == ["sleep", seconds] and p.info["status"] != "zombie"]


def wait_until_none(find, *arguments) -> None:
    end = time.monotonic() + 10
    while find(*arguments) and time.monotonic() < end:
        time.sleep(0.02)
    assert find(*arguments) == []


def test_processes_that_have_left_the_group_end_with_the_worker(own):
    """Each item forks twice, calls setsid() twice and starts `sleep`, deaf to all signals that can be."""
    seconds = {completion: f"100{i}.{os.getpid()}" for i, completion in enumerate(("dies", "stays"))}
    with RewardPool(1, timeout_s=60.0) as pool:
        for completion, answer in seconds.items():
            pool.submit(completion, "own_rewards:flees", completion, answer)
        assert [verdict.status for verdict in pool.collect().values()] == ["error", "ok"]
        assert not sleepers(seconds["dies"]), "it ended with the worker that was replaced"
        assert len(sleepers(seconds["stays"])) == 1
    assert not sleepers(seconds["stays"]), "close() returns when it has ended"


def test_a_guard_that_a_function_has_stopped_or_killed_holds_nobody_up(own, monkeypatch):
    monkeypatch.setattr(reward, "STOP_S", 0.1)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        with RewardPool(1, timeout_s=60.0) as pool:
            leader = pool._workers[0].process.pid
            pool.submit(0, "own_rewards:forks", "stays", "")
            pool.collect()
            os.kill(leader, number)
            start = time.monotonic()
        assert time.monotonic() - start < 5
        wait_until_none(group_of, leader)


KILLED = """
import os, signal, sys
from reward import RewardPool
pool = RewardPool(1, timeout_s=60.0)
pool.submit(0, "own_rewards:forks", "stays", "")
pool.submit(1, "own_rewards:flees", "stays", sys.argv[1])
pool.collect()
print(pool._workers[0].process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_that_a_function_leaves_behind_end_with_a_run_that_is_killed(own):
    seconds = f"1004.{os.getpid()}"
    command = [sys.executable, "-c", KILLED, seconds]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until_none(group_of, int(done.stdout))
    wait_until_none(sleepers, seconds)


def test_what_functions_print_goes_to_the_log(own, tmp_path):
    log = tmp_path / "rewards.log"
    with RewardPool(1, log_path=log) as pool:
        pool.submit(0, "own_rewards:prints", "this", "")
        pool.submit(1, "own_rewards:aborts", "", "")
        verdicts = pool.collect()
    assert log.read_text() == "printed this\naside\n"
    assert verdicts == {0: OK, 1: Verdict(0.0, "error", f"the worker died with exit status -6; see {log}")}


def test_workers_get_the_variables_that_are_named(own, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    item = ("own_rewards:environment", "MY_KEY", "secret")
    assert scored(item) == [WRONG]
    assert scored(item, env=["MY_KEY"]) == [OK]
    with pytest.raises(ValueError, match="reward.env: MY_OTHER_KEY is not set"):
        RewardPool(1, env=["MY_KEY", "MY_OTHER_KEY"])


def test_an_item_of_code_may_take_as_long_as_its_tests():
    limits = {"isolation": "bubblewrap", "timeout_s": 2.0, "memory_bytes": 1 << 30}
    with RewardPool(1, timeout_s=1.5, code_limits=limits) as pool:
        item = lambda kind: reward._Item(0, kind, "", "", {})
        assert pool._limit_s([item("math")]) == pool._limit_s([item("instructions")]) == 1.5
        assert pool._limit_s([item("code")]) == pool._limit_s([item("0.5*math + 0.5*code")]) == 1.5 + 3 * 2.0


def test_columns_of_a_row_do_not_change_how_its_program_is_run():
    """A row may have columns that are called like the limits."""
    limits = {"isolation": "rlimits", "timeout_s": 5.0, "memory_bytes": 1 << 30}
    with RewardPool(1, code_limits=limits) as pool:
        fields = {"isolation": "none", "timeout_s": 1e-9, "memory_bytes": 1, "prompt": "?"}
        pool.submit(0, "code", "```python\nprint(1)\n```", '{"inputs": [""], "outputs": ["1"]}', fields)
        assert pool.collect() == {0: OK}


# ---- checks before a run -----------------------------------------------------------------------------------


def test_functions_that_work_pass_the_check(own, monkeypatch):
    tried, submit = [], RewardPool.submit
    monkeypatch.setattr(
        RewardPool, "submit", lambda self, key, *item: tried.append(key) or submit(self, key, *item)
    )
    rows = [
        ("math", "1", {}),
        (f"{own}:with_default", "1", {"level": 0.5}),
        (f"0.5*math + 0.5*{own}:given", "1", {}),
    ]
    check_functions(
        [f"{own}:waits", f"1*{own}:prints + 2*{own}:waits_for"],
        [("math", "0.1", FIELDS), *rows],
        RewardSettings(),
    )
    check_functions(["math", "0.5*exact + 0.5*gsm8k"], [], RewardSettings())
    names = ("waits", "prints", "waits_for", "with_default", "given")
    assert sorted(tried) == sorted(f"{own}:{name}" for name in names), "each once, and no built-in verifier"


@pytest.mark.parametrize(
    "name, answer, reason",
    [(*row[:2], re.escape(row[2])) for row in BROKEN if row[0] not in ("coroutine", "OWN.f", "colours")]
    + [("hangs", "", "killed after the limit of 0.5 s"), ("leaves", "", "died with exit status 0")],
)
def test_a_function_that_does_not_work_is_named_before_a_run(name, answer, reason, own):
    kind, settings = f"0.5*exact + 0.5*{own}:{name}", RewardSettings(timeout_s=0.5 if name == "hangs" else 60)
    with pytest.raises(ValueError, match=reason) as error:
        check_functions([], [("exact", "1", {}), (kind, answer, FIELDS)], settings)
    text = str(error.value)
    assert (
        text.startswith(f"reward function {own}:{name}: ")
        and "\n" not in text
        and repr(answer[:9])[1:9] in text
    )


def test_a_column_that_some_rows_lack_is_named_before_a_run(own):
    kind = f"{own}:waits_for"
    rows = [(kind, "1", {"prompt": "one", "level": 0.5}), ("exact", "1", {}), (kind, "1", {"prompt": "two"})]
    with pytest.raises(
        ValueError, match="own_rewards.py:waits_for: its parameter level .* prompt 3 of 3, 'two'"
    ):
        check_functions([], rows, RewardSettings())
    with pytest.raises(ValueError, match="no prompts"):
        check_functions([kind], [], RewardSettings())
    with pytest.raises(ValueError, match="reward.env: ABSENT"):
        check_functions([], rows[:2], RewardSettings(env=["ABSENT"]))


# ---- order, backlog, decoding ------------------------------------------------------------------------------


def test_rules_do_not_wait_for_slow_items_that_came_before(own):
    """One worker is busy with the first slow item; then the rules are due, and the other slow items last."""
    with RewardPool(1, timeout_s=10.0) as pool:
        for key in range(3):
            pool.submit(("slow", key), "own_rewards:sleeps", "0.2", "")
        for key in range(40):  # more than one window
            pool.submit(("rule", key), "exact", "a", "a")
        order = []
        while pool.poll():
            order += [k for k, v in pool._verdicts.items() if v is not None and k not in order]
        order += [k for k in pool._verdicts if k not in order]
        assert set(pool.collect().values()) == {OK}
    first_slow, second_slow = order.index(("slow", 0)), order.index(("slow", 1))
    rules = [order.index(("rule", key)) for key in range(40)]
    assert first_slow < min(rules) < max(rules) < second_slow < order.index(("slow", 2))


def test_a_full_backlog_makes_submit_wait_and_is_never_exceeded(own):
    with RewardPool(1, timeout_s=10.0, max_backlog=3) as pool:
        pool.submit("warm", "own_rewards:sleeps", "0", "")
        pool.collect()
        start, outstanding = time.monotonic(), []
        for key in range(9):
            pool.submit(key, "own_rewards:sleeps", "0.05", "")
            outstanding.append(sum(verdict is None for verdict in pool._verdicts.values()))
        waited = time.monotonic() - start
        assert len(pool.collect()) == 9
    assert max(outstanding) == 3, "it is used, and never exceeded"
    assert waited >= 6 * 0.05, "six had to be finished before the ninth was taken"


def test_latencies_are_of_every_item_from_submit_to_verdict(own):
    """In order of the verdicts; an item behind another waits for it too."""
    start = time.monotonic()
    with RewardPool(1, timeout_s=10.0) as pool:
        for key in range(3):
            pool.submit(key, "own_rewards:sleeps", "0.1", "")
        pool.submit("rule", "exact", "a", "a")
        pool.collect()
        wall, latencies = time.monotonic() - start, pool.latencies
    assert len(latencies) == 4
    first, rule, second, third = latencies
    assert 0.1 <= first and second >= 0.2 and third >= 0.3
    assert first <= second <= third <= wall and 0 < rule <= wall


def byte_level_tokenizer():
    """A BPE over bytes, so that a token may be part of a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    texts = [
        "".join(chr(rng.choice([97, 98, 32, 0xE9, 0x4E2D, 0x1F600])) for _ in range(40)) for _ in range(50)
    ]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


@pytest.mark.parametrize("make", [build_tokenizer, byte_level_tokenizer])
def test_workers_decode_tokens_as_the_tokenizer_does(make, own):
    """Random ids, special ones and parts of characters among them, are scored by equality with the text."""
    tokenizer, rng = make(), random.Random(1)
    ids = [[rng.randrange(len(tokenizer)) for _ in range(rng.randint(0, 12))] for _ in range(150)]
    ids += [[tokenizer.eos_token_id], [*ids[0], tokenizer.eos_token_id]]
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    if make is byte_level_tokenizer:
        assert sum("\ufffd" in text for text in texts) > 20, "parts of characters"
    items = [("own_rewards:equal", row, text) for row, text in zip(ids, texts)]
    of_ids = [("exact", row, "abc") for row in ids]
    of_texts = [("exact", text, "abc") for text in texts]
    verdicts = scored(*items, *of_ids, *of_texts, tokenizer=decoder_json(tokenizer))
    assert verdicts[: len(ids)] == [OK] * len(ids)
    assert verdicts[len(ids) : 2 * len(ids)] == verdicts[2 * len(ids) :]


def test_token_ids_need_a_tokenizer():
    with RewardPool(1) as pool, pytest.raises(ValueError, match="tokenizer"):
        pool.submit(0, "exact", [1, 2], "a")
