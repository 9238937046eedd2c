"""The reward pool: custom functions, workers that misbehave, order, backlog, decoding."""

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
import torch
import yaml
from conftest import ROOT

import workers
from data import random_model
from data.tiny import build_tokenizer
from reward import (
    RewardPool,
    Scoring,
    Verdict,
    check_functions,
    decoder_json,
    impossible_references,
    verify,
)
from settings import DataSettings, RewardSettings
from tests.patience import limit, wait_until
from tests.test_reward import HANGS
from train_rl import compute_advantages
from verifiers.kinds import KINDS, functions_of, is_kind, parts_of
from verifiers.tools import ToolCall
from workers import ASYNC_CALLS, WorkerPool

pytestmark = pytest.mark.slow
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
calls = 0
async def meets(completion, answer):
    global calls
    calls += 1
    while calls < int(completion): await asyncio.sleep(0.001)
    return 1.0
async def waits_for(level): await asyncio.sleep(0.01); return level
async def raises_async(completion): raise KeyError("late")
async def blocks(completion, answer):
    if completion == "bad": time.sleep(3000)
    await asyncio.sleep(0.05); return 1.0
async def stubborn(completion, answer):
    while True:
        try: await asyncio.sleep(3000)
        except asyncio.CancelledError: pass
def writes(completion, answer):
    for fd in range(3, 64):
        try: os.write(fd, completion.encode())
        except OSError: pass
    return 0.0
def forks(completion, answer):
    if os.fork() == 0:
        time.sleep(3000); os._exit(0)
    if completion == "dies": os.abort()
    return 1.0
def flees(completion, answer):
    started, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            subprocess.Popen(["sleep", answer], start_new_session=True)
            os.write(tell, b"1"); time.sleep(3000)
        os._exit(0)
    os.read(started, 1)
    if completion == "dies": os.abort()
    return 1.0
async def given_later(completion, answer): return eval(answer)
def short(completion): return 1 / (1 + len(completion))
def tagged(completion, answer): return completion == f"<answer>{answer}</answer>"
def equal(completion, answer): return completion == answer
def raises(completion, answer): raise KeyError("no such test")
def hangs(completion, answer):
    while True: pass
def deaf(completion, answer):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True: time.sleep(1)
def marks(completion, answer):
    open(completion, "w").close(); hangs(completion, answer)
def aborts(completion, answer): os.abort()
def killed(completion, answer): os.kill(os.getpid(), 9)
def leaves(completion, answer): sys.exit(0)
def eats(completion, answer):
    kept = []
    while True: kept.append(bytearray(1 << 24))
def floods(completion, answer):
    for _ in range(100):
        for fd in (1, 2): os.write(fd, b'[1.0, "ok", ""]\\n' * (1 << 16))
        sys.stdout.write("y" * 1000)
    print("[0.0]"); os.system("echo [1.0]"); sys.stdin.read(); return 1.0
def sleeps(completion, answer):
    time.sleep(float(completion)); return 1.0
"""
OK, WRONG = Verdict(1.0, "ok"), Verdict(0.0, "wrong")
FIELDS = {"prompt": "p", "messages": [{"role": "user", "content": "p"}], "level": 0.5}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write the module `own_rewards`, which workers can import; return the path."""
    (tmp_path / "own_rewards.py").write_text(OWN)
    (tmp_path / "sibling_of_own_rewards.py").write_text("SHARE = 0.75")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "own_rewards.py"


def scored(*items: tuple, **options) -> list[Verdict]:
    with RewardPool(**{"num_workers": 2, "timeout_s": limit(5)} | options) as pool:
        for key, item in enumerate(items):
            pool.submit(key, *item)
        return list(pool.collect().values())


def test_scores_of_a_function_may_be_off_by_rounding(own):
    """A score is a share of 1. Sums of shares, and a cosine in float32, end beside 0 or 1 on either side."""
    texts = {
        OK: ["1", "True", "0.7 + 0.2 + 0.1", "sum([0.05] * 20)", "1.0000001"],
        WRONG: ["0", "False", "-1e-9", "0.3 - 0.1 - 0.2", "0.1 + 0.2 - 0.3"],
        Verdict(0.999, "wrong"): ["0.999"],
    }
    expected = [verdict for verdict in texts for _ in texts[verdict]]
    verdicts = scored(*(("own_rewards:given", "x", text) for texts in texts.values() for text in texts))
    assert verdicts == expected


BROKEN = [  # (function, reference answer, word of the reason)
    ("given", "float('nan')", "nan"),
    ("given", "-1e999", "inf"),
    ("raises", "", "KeyError: 'no such test' (own_rewards.py, line "),
    ("raises_async", "", "KeyError: 'late' (own_rewards.py, line "),
    ("colours", "", r"\x1b[31mred\nline two"),
    ("wait", "", "waits"),  # the nearest name
    ("OWN.f", "", "OWN.f"),
    ("with_missing", "", "hint"),
    ("others", "", "completions"),
]


@pytest.mark.parametrize("place", ["file", "module"])
def test_an_invalid_score_is_an_error_with_a_reason(place, own):
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


@pytest.mark.parametrize(
    "result, scale, words",
    [
        ("1.001", None, "1.001 [0.0, 1.001]"), ("2", None, "2 [0.0, 2.0]"), ("-1", None, "[-1.0, 1.0]"),
        ("-0.1", None, "-0.1 [-0.1, 1.0]"), ("{'score': 3}", None, "3 [0.0, 3.0]"),
        ("2.0", (-1, 1), "-1 1 [-2.0, 2.0]"), ("-1", (0, 5), "-1 [-1.0, 5.0]"),
        ("None", None, "None"), ("'0.5'", None, "'0.5'"), ("{'acc': 1}", None, "acc score"),
        ("[1]*10**5", None, "[1, 1"), ("[0.5, 0.5]", None, "0.5"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["given", "given_later"])
def test_a_result_outside_of_the_range_ends_the_run_and_names_function_row_value_and_remedy(
    result, scale, words, name, own
):
    """Also inside of a sum, with weight 0, beside right results, and in a call that waits."""
    kind = f"1*exact + 0*{own}:{name}"
    scales = {} if scale is None else {f"{own}:{name}": scale}
    with RewardPool(1, scales=scales) as pool, pytest.raises(RuntimeError) as error:
        pool.submit("right", kind, "x", "1", FIELDS)
        pool.submit("bad", kind, "x", result, FIELDS)
        pool.collect()
    wanted = [f"own_rewards.py:{name} returned", repr(result)[:80], "prompt 'p'", *words.split()]
    assert [word for word in wanted if word not in str(error.value)] == []
    assert ("reward.scale=" in str(error.value)) == ("[" in words and not result.startswith("["))


def test_a_scale_is_linear_and_further_numbers_of_a_dict_are_parts(own):
    kind = f"{own}:given"
    results = {
        "-1": 0.0, "0": 0.5, "1": 1.0, "-0.5": 0.25, "True": 1.0, "False": 0.0, "1 + 1e-9": 1.0,
        "__import__('numpy').False_": 0.0, "__import__('numpy').bool_(1)": 1.0,
        "__import__('numpy').float32(-1)": 0.0, "__import__('decimal').Decimal('0.5')": 0.75,
        "{'score': 0.5, 'acc': True, 'pred': '5', 'length': 7, 'bad': float('nan')}": 0.75,
    }  # fmt: skip
    verdicts = scored(*((kind, "x", text) for text in results), scales={kind: (-1, 1)})
    assert [verdict.reward for verdict in verdicts] == list(results.values())
    assert [verdict.parts for verdict in verdicts[:-1]] == [{}] * 11
    assert verdicts[-1].parts == {f"{kind}/acc": 1.0, f"{kind}/length": 7.0}
    text = "{'score': 0.5, 'acc': 0}"
    (verdict,) = scored((f"1*exact + 3*{kind}", text, text))
    assert verdict == Verdict(2.5 / 4, "ok", parts={"exact": 1.0, kind: 0.5, f"{kind}/acc": 0.0})


TRL = """
def accuracy(completions, answer, **kwargs):
    return [2.0 if text == gold else 0.0 for text, gold in zip(completions, answer)]
def brevity(prompts, completions, **kwargs):
    return [1 - 2 * min(1, len(text) / len(prompt)) for prompt, text in zip(prompts, completions)]
"""
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = data_source == "d" and solution_str == ground_truth
    return {"score": 1 if right else -1, "acc": right, "pred": solution_str}
"""


def test_functions_of_trl_and_verl_score_through_the_files_of_the_page(tmp_path, monkeypatch):
    """As in docs/from_trl_or_verl.md, with the settings that it prints."""
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/trl_rewards.py").write_text(TRL)
    Path("mine/reward_score.py").write_text(VERL)
    page = (ROOT / "docs/from_trl_or_verl.md").read_text()
    files = dict(re.findall(r"```\w+\n# (mine/\S+)\n(.*?)```", page, re.DOTALL))
    for name, text in files.items():
        Path(name).write_text(text)
    trl, verl = (yaml.safe_load(files[f"mine/{name}.yaml"]) for name in ("trl", "verl"))
    (trl_set,), (verl_set,) = (DataSettings(**values["data"]).train for values in (trl, verl))
    scales = trl["reward"]["scale"] | verl["reward"]["scale"]
    fields = {"prompt": "12345678", "data_source": "d", "extra_info": {"index": 1}}
    kinds = [trl_set.kind] * 3 + [verl_set.kind] * 2
    texts = ["12", "13", "12345678", "12", "13"]
    verdicts = scored(*((k, text, "12", fields) for k, text in zip(kinds, texts)), scales=scales)
    trl_rewards = [2.0 + 0.2 * 0.5, 0.0 + 0.2 * 0.5, 0.0 - 0.2]  # as TRL sums them, from -0.2 to 2.2
    assert [v.reward for v in verdicts] == pytest.approx([(r + 0.2) / 2.4 for r in trl_rewards] + [1.0, 0.0])
    assert verdicts[3].parts == {"mine/score.py:score/acc": 1.0}


def test_a_part_of_weight_0_is_logged_and_decides_nothing(own):
    """It neither changes the mean nor the status, and its failure is no failure."""
    logged, raises = f"{own}:given", f"{own}:raises"
    assert scored((f"0*{logged} + 2*exact", "0.25", "0.25"), (f"1*exact + 0*{raises}", "x", "y")) == [
        Verdict(1.0, "ok", parts={logged: 0.25, "exact": 1.0}),
        Verdict(0.0, "wrong", parts={"exact": 0.0}),
    ]
    assert scored((f"1*exact + 1*{raises}", "x", "y"))[0].failed


def test_a_function_that_cannot_be_imported_is_an_error_with_a_reason(tmp_path):
    for name, text in {"syntax": "def f(:", "raises": "1/0", "no_module": "import absent_module"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    reasons = {
        f"{tmp_path}/syntax.py:f": "SyntaxError",
        f"{tmp_path}/raises.py:f": "ZeroDivisionError",
        f"{tmp_path}/no_module.py:f": "absent_module",
        f"{tmp_path}/absent.py:f": "absent.py",
        "absent_module.rewards:f": "absent_module",
        "math:f": "math",
        "math:sin": "position",
        "math:pi": "cannot be read",
    }
    for verdict, reason in zip(scored(*((kind, "x", "") for kind in reasons)), reasons.values()):
        assert verdict.status == "error" and reason in verdict.detail


def test_a_function_gets_the_columns_that_its_parameters_name(own):
    names = ["without_answer", "with_default", "with_prompt", "with_all", "waits_for", "of_sibling"]
    expected = [False, 0.5, True, True, 0.5, 0.75]
    for prefix in (str(own), "own_rewards", os.path.relpath(own)):
        items = [(f"{prefix}:{name}", "p", "a", FIELDS) for name in names]
        items = items + items  # the pool sends the second half after it has learned the parameters
        assert [verdict.reward for verdict in scored(*items, num_workers=1)] == 2 * expected
    (verdict,) = scored((f"{own}:with_default", "p", "a", {"completion": "z", "answer": "z"}))
    assert verdict.reward == 0.25, "a row without the column gets the default"
    assert scored((f"{own}:without_answer", "abc", "a", {"completion": "z"})) == [OK]


@pytest.mark.parametrize(
    "kind, parts",
    [
        ("0.8*math + 0.2*my.py:brevity", [(0.8, "math"), (0.2, "my.py:brevity")]),
        ("2 * exact+1*a+b/c d.py:f + .5*m.n:f.g", [(2, "exact"), (1, "a+b/c d.py:f"), (0.5, "m.n:f.g")]),
        ("1*gsm8k + 0*characters", [(1, "gsm8k"), (0, "characters")]),
        ("path/my.py:f", [(1, "path/my.py:f")]), ("code", [(1, "code")]), ("0.8*math + brevity", "weight"),
        ("0.8*math + my.py:f", "weight"), ("0.8*math + 0.2*exct", "'exact'"),
        ("0.8*math + 0.2*math", "another"), ("0*math + 0*exact", "more than 0"),
        ("my.py", "module:function"), ("my-module:f", "module:function"),
        ("-1*math + 1*exact", "unknown kind"), ("", "unknown kind"),
        ("enviroment", "did you mean 'environment'"),
        ("0.5*environment + 0.5*math", "cannot be part of a sum"),
    ],
)  # fmt: skip
def test_kinds_and_sums_of_kinds(kind, parts):
    if isinstance(parts, str):
        assert not is_kind(kind)
        with pytest.raises(ValueError, match=parts):
            verify(kind, "a", "a")
    else:
        assert is_kind(kind) and list(parts_of(kind)) == parts
        assert functions_of(kind) == [part for _, part in parts if part not in KINDS]


def test_a_sum_is_a_weighted_mean_with_the_status_of_the_first_part(own):
    level = f"{own}:with_default"
    items = {
        f"3*exact + 1*{level}": Verdict(3.5 / 4, "ok", parts={"exact": 1.0, level: 0.5}),
        f"1*{level} + 3*exact": Verdict(3.5 / 4, "wrong", parts={level: 0.5, "exact": 1.0}),
        f"0*{level} + 1*exact": Verdict(1.0, "ok", parts={level: 0.5, "exact": 1.0}),
        "0.1*exact + 0.2*characters + 0.7*gsm8k": Verdict(
            0.0, "error", "gsm8k: the reference answer is not a number: 'a'",
            {"exact": 1.0, "characters": 1.0, "gsm8k": 0.0}),
    }  # fmt: skip
    assert scored(*((kind, "a", "a", FIELDS) for kind in items)) == list(items.values())


def test_calls_of_an_async_function_run_concurrently(own):
    """One worker: all 40 calls have begun before the first one ends."""
    with RewardPool(1, timeout_s=limit(60)) as pool:
        assert pool.at_once("own_rewards:meets") == 1, "the pool has not called the function yet"
        for key in range(40):
            pool.submit(key, "own_rewards:meets", "40" if key else "1", "")
        assert list(pool.collect().values()) == [OK] * 40
        assert pool.num_restarts == 0 and pool.seconds["own_rewards:meets"] > 0
        assert (pool.at_once("own_rewards:meets"), pool.at_once("exact")) == (ASYNC_CALLS, 1)


def test_a_sum_of_code_and_an_async_function_is_scored_alone(own):
    """Programs that share a call would run one after another under the time limit of one call."""
    with RewardPool(1, timeout_s=limit(60)) as pool:
        kinds = ("0.5*code + 0.5*own_rewards:waits", "0.5*exact + 0.5*own_rewards:waits")
        for kind in kinds:
            pool.submit(kind, kind, "0", "[]")
        assert pool.collect()[kinds[1]].status == "wrong"
        assert [pool.at_once(kind) for kind in kinds] == [1, ASYNC_CALLS]


def test_each_call_of_an_async_function_has_a_separate_limit(own):
    seconds = ["0", "0", "3000", "0.1", "0", "3000"]
    with RewardPool(1, timeout_s=limit(0.8)) as pool:
        for key, sleep in enumerate(seconds):
            pool.submit(key, "own_rewards:waits", sleep, "")
        statuses = [verdict.status for verdict in pool.collect().values()]
        assert pool.num_restarts == 0 and pool.num_timeouts == 2
    assert statuses == ["timeout" if sleep == "3000" else "ok" for sleep in seconds]


@pytest.mark.parametrize("name, restarts", [("blocks", 3), ("stubborn", 2)])
def test_an_async_call_that_cannot_be_stopped_is_killed(name, restarts, own, monkeypatch):
    monkeypatch.setattr(workers, "GRACE_S", limit(0.5))
    with RewardPool(1, timeout_s=limit(1)) as pool:
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
    [("hangs", "timeout", 2), ("deaf", "timeout", 2), ("aborts", "error", 2), ("killed", "error", 2),
     ("leaves", "error", 2), ("eats", "error", 2), ("floods", "ok", 0)],
)  # fmt: skip
def test_a_function_that_misbehaves_costs_only_one_item(name, status, restarts, own, monkeypatch):
    """`deaf` ignores the alarm, so the pool kills the worker after the grace period.

    The reference answer fails as well, in a second worker, so that the function is the cause.
    """
    monkeypatch.setattr(workers, "GRACE_S", limit(0.5))
    timeout_s = limit(1 if status == "timeout" else 20)  # filling 512 MiB may take more than 1 s
    with RewardPool(1, timeout_s=timeout_s, memory_bytes=1 << 29) as pool:
        pool.submit("before", "exact", "a", "a")
        pool.submit("bad", f"own_rewards:{name}", "x", "")
        for key in range(20):
            pool.submit(key, "exact", "a", "a")
        pool.submit("after", "own_rewards:given", "x", "1")
        verdicts = pool.collect()
        counts = (pool.num_restarts, pool.num_timeouts, pool.num_errors, len(pool.latencies))
        assert counts == (restarts, status == "timeout", status == "error", 23)
    bad = verdicts.pop("bad")
    assert (
        bad.status == status and bad.failed == (status != "ok") and ("-9" in bad.detail) == (name == "killed")
    )
    assert set(verdicts.values()) == {OK} and len(verdicts) == 22


def test_a_worker_that_leaks_memory_is_replaced(own):
    """Each call keeps 48 of the 512 MiB of a worker; a call that does not fit is repeated in another."""
    own.write_text("kept = []\ndef keeps(completion): kept.append(bytearray(48 << 20)); return 1.0\n")
    with RewardPool(1, timeout_s=limit(20), memory_bytes=1 << 29) as pool:
        for key in range(24):
            pool.submit(key, "own_rewards:keeps", "x", "")
        statuses = [verdict.status for verdict in pool.collect().values()]
        assert statuses == ["ok"] * 24 and pool.num_restarts >= 2


THROW = "(_ for _ in ()).throw"


@pytest.mark.parametrize(
    "answer, is_noted",
    [
        ("bytearray(1 << 50)", True),
        (f"{THROW}(ImportError('libtorch.so: failed to map segment from shared object' + 'x' * 300))", True),
        (f"{THROW}(OSError(12, 'Cannot allocate memory'))", True),
        ("{}['MemoryEror']", False),
    ],
)
def test_an_error_of_memory_names_the_setting(answer, is_noted, own):
    """The detail of a tool is the text that the policy reads: there the note is for the console only."""
    (verdict,) = scored(("own_rewards:given", "x", answer), memory_bytes=1 << 29)
    assert verdict.status == "error" and len(verdict.detail) <= 200
    assert ("0.5 GiB" in verdict.detail and "reward.memory_gib" in verdict.detail) == is_noted
    with WorkerPool("verifiers.tools", memory_bytes=1 << 29) as pool:
        pool.put(0, ToolCall("own_rewards:given", json.dumps({"completion": "x", "answer": answer}), 500))
        (result,) = pool.collect().values()
        assert "memory_gib" not in result.detail
        assert ("reward.memory_gib" in pool.memory_note(result)) == is_noted


def test_text_that_a_function_writes_into_the_pipe_is_no_verdict(own):
    texts = [
        "garbage\n", '["x", [1.0, "ok", "", {}], 0.1]\n', '["x", [[]]]\n', "half a line", "[]\n",
        "[" * 9999 + "\n", "\n",
    ]  # fmt: skip
    with RewardPool(1) as pool:
        for number, text in enumerate(texts, start=1):
            pool.submit("bad", "own_rewards:writes", text, "")
            for key in range(3):
                pool.submit(key, "exact", "a", "a")
            verdicts = pool.collect()
            assert pool.num_restarts == 2 * number and pool.num_errors == number, text
            verdict = verdicts.pop("bad")
            assert (verdict.reward, verdict.status) == (0.0, "error") and "pipe" in verdict.detail, text
            assert list(verdicts.values()) == [OK] * 3, text


def group_of(leader: int) -> list[int]:
    """Return the process ids of the living processes of a process group."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):  # the process ended meanwhile
            continue
        if int(group) == leader and state != "Z":
            pids.append(int(stat.parent.name))
    return pids


CAUSES = """
import os, signal, sys, time

def parses(completion): return float(completion) > 4
def opens(completion): raise FileNotFoundError("the model of the judge")
def hangs_on(completion): time.sleep(3000 * ("bomb" in completion)); return completion == "right"
def dies_on(completion): os.abort() if "bomb" in completion else None; return completion == "right"
def leaves_on(completion): sys.exit(0) if "bomb" in completion else None; return completion == "right"
def fills_on(completion): return bool(bytearray(1 << 40)) if "bomb" in completion else completion == "right"
def of_right_rows(completion, answer): return completion == {"right": "right"}[answer]
def once(completion):
    if not os.path.exists(__file__ + ".once"):
        open(__file__ + ".once", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return completion == "right"
"""


@pytest.fixture
def causes(tmp_path):
    (tmp_path / "causes.py").write_text(CAUSES)
    return tmp_path / "causes.py"


@pytest.mark.parametrize(
    "kind, bomb, wrong, answer, reward, status",
    [
        ("{}:parses", "five", "3", "5", 0, "error"),
        ("{}:hangs_on", "bomb", "wrong", "right", 0, "timeout"),
        ("{}:dies_on", "bomb", "wrong", "right", 0, "error"),
        ("{}:leaves_on", "bomb", "wrong", "right", 0, "error"),
        ("{}:fills_on", "bomb", "wrong", "right", 0, "error"),
        ("0.5*{}:dies_on + 0.5*characters", "rbomb", "rxxxx", "right", 0.1, "error"),
        ("0.5*exact + 0.5*{}:parses", "x", "3", "5", 0, "wrong"),
    ],
)
def test_a_completion_that_breaks_its_verifier_is_as_wrong_as_a_wrong_one(
    kind, bomb, wrong, answer, reward, status, causes
):
    """A group in which a wrong answer and a bomb stand side by side gives both the same advantage."""
    items = [(kind.format(causes), text, answer) for text in (bomb, wrong, answer, bomb)]
    verdicts = scored(*items, timeout_s=limit(1), memory_bytes=1 << 29)
    assert [verdict.failed for verdict in verdicts] == [False] * 4
    assert verdicts[0] == verdicts[3] and verdicts[0].by_text and not verdicts[1].by_text
    assert (verdicts[0].reward, verdicts[0].status) == (pytest.approx(reward), status)
    scores = torch.tensor([verdict.reward for verdict in verdicts])
    valid = torch.tensor([not verdict.failed for verdict in verdicts])
    advantages = compute_advantages(scores, valid, torch.zeros(4, dtype=torch.int64), "group_std", 0.0)
    assert advantages[0] == advantages[1] == advantages[3] < 0 < advantages[2]


@pytest.mark.parametrize(
    "kind, answer",
    [("{}:opens", "right"), ("{}:of_right_rows", "other"), ("{}:absent", "right"), ("numeric", "five"),
     ("0.5*exact + 0.5*{}:opens", "right"), ("0.5*{}:opens + 0.5*numeric", "5"), ("code", "no JSON")],
)  # fmt: skip
def test_a_failure_that_the_reference_answer_shares_is_left_out(kind, answer, causes):
    for verdict in (*scored((kind.format(causes), "x", answer)), verify(kind.format(causes), "x", answer)):
        assert verdict.failed and (verdict.reward, verdict.status) == (0, "error")


def test_a_worker_that_is_killed_from_outside_costs_no_verdict(causes):
    assert scored((f"{causes}:once", "right", "right"), (f"{causes}:once", "no", "right")) == [OK, WRONG]


def test_the_processor_time_of_rules_is_short(monkeypatch):
    """A rule that has used up its processor time is not repeated, and other items do not wait for long."""
    assert [Scoring("math", "", "", {}).cpu_s(limit_s) for limit_s in (1, 10, 60)] == [0.5, 2, 12]
    monkeypatch.setattr(Scoring, "cpu_s", lambda self, timeout_s: 0.5)
    with RewardPool(1, timeout_s=limit(60)) as pool:
        pool.submit("heavy", "math", HANGS, "5")
        pool.submit("next", "exact", "a", "a")
        verdicts = pool.collect()
        assert (pool.num_restarts, verdicts["next"]) == (1, OK)
    assert verdicts["heavy"].by_text and workers.OF_CPU_TIME in verdicts["heavy"].detail


def test_verify_tells_causes_apart_like_the_pool(causes):
    kind = f"0.25*exact + 0.75*{causes}:parses"
    assert verify(kind, "x", "5").by_text and verify(kind, "x", "x").failed
    assert verify(f"{causes}:parses", "five", "5") == scored((f"{causes}:parses", "five", "5"))[0]


@pytest.mark.parametrize("completion, restarts", [("stays", 0), ("dies", 2)])
def test_child_processes_of_a_function_end_with_the_worker(completion, restarts, own):
    """A child process holds the pipe open, and the pool notices the death of the worker nevertheless."""
    with RewardPool(1, timeout_s=limit(60)) as pool:
        leader = pool._workers[0].process.pid
        pool.submit(0, "own_rewards:forks", completion, "")
        (verdict,) = pool.collect().values()
        assert (verdict.status, pool.num_restarts) == ("error" if restarts else "ok", restarts)
        if not restarts:
            assert len(group_of(leader)) == 3, "the worker, the guard and the child"
    wait_until_none(group_of, leader)


def sleepers(seconds: str) -> list[int]:
    """Return the process ids of the living `sleep` processes of this duration."""
    processes = psutil.process_iter(["cmdline", "status"])
    return [
        p.pid for p in processes if p.info["cmdline"] == ["sleep", seconds] and p.info["status"] != "zombie"
    ]


def wait_until_none(find, *arguments) -> None:
    assert wait_until(lambda: find(*arguments) == [])


def test_child_processes_in_other_sessions_end_with_the_worker(own):
    """Each item forks twice, calls setsid() twice and starts `sleep`, with all signals blocked."""
    seconds = {completion: f"300{i}.{os.getpid()}" for i, completion in enumerate(("dies", "stays"))}
    with RewardPool(1, timeout_s=limit(60)) as pool:
        for completion, answer in seconds.items():
            pool.submit(completion, "own_rewards:flees", completion, answer)
            (verdict,) = pool.collect().values()
            assert verdict.status == ("error" if completion == "dies" else "ok")
        assert not sleepers(seconds["dies"]), "the process ended with the dead worker"
        assert len(sleepers(seconds["stays"])) == 1
    assert not sleepers(seconds["stays"]), "close() waits for the end of the process"


def test_a_stopped_or_killed_guard_does_not_delay_close(own, monkeypatch):
    monkeypatch.setattr(workers, "STOP_S", 0.1)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        with RewardPool(1, timeout_s=limit(60)) as pool:
            leader = pool._workers[0].process.pid
            pool.submit(0, "own_rewards:forks", "stays", "")
            pool.collect()
            os.kill(leader, number)
            start = time.monotonic()
        assert time.monotonic() - start < limit(5)
        wait_until_none(group_of, leader)


KILLED = """
import os, signal, sys
from reward import RewardPool
pool = RewardPool(2, timeout_s=3000.0)
pool.submit(0, "own_rewards:forks", "stays", "")
pool.submit(1, "own_rewards:flees", "stays", sys.argv[1])
pool.collect()
pool.submit(2, "own_rewards:marks", sys.argv[2], "")
while not os.path.exists(sys.argv[2]): pool.poll()
print(*(worker.process.pid for worker in pool._workers), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_all_processes_of_a_pool_end_with_a_killed_run(own, tmp_path):
    """One worker is idle, the other one computes; both have children."""
    seconds = f"3004.{os.getpid()}"
    command = [sys.executable, "-c", KILLED, seconds, tmp_path / "mark"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    for leader in map(int, done.stdout.split()):
        wait_until_none(group_of, leader)
    wait_until_none(sleepers, seconds)


def test_output_of_functions_goes_to_the_log(own, tmp_path):
    log = tmp_path / "rewards.log"
    with RewardPool(1, log_path=log) as pool:
        pool.submit(0, "own_rewards:prints", "this", "")
        pool.submit(1, "own_rewards:aborts", "", "")
        verdicts = pool.collect()
    assert log.read_text() == "printed this\naside\n"
    assert verdicts[0] == OK and str(log) in verdicts[1].detail


@pytest.mark.parametrize("num_bytes, name", [(10, "rewards.log"), (11, "rewards.log.1")])
def test_a_large_log_is_renamed_when_a_pool_starts(num_bytes, name, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "MAX_LOG_BYTES", 10)
    log = tmp_path / "rewards.log"
    log.write_text("x" * num_bytes)
    RewardPool(1, log_path=log).close()
    assert (tmp_path / name).read_text() == "x" * num_bytes and log.is_file()


def test_workers_get_the_environment_variables_of_reward_env(own, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert scored(("own_rewards:environment", "OMP_NUM_THREADS", "3")) == [OK]
    item = ("own_rewards:environment", "MY_KEY", "secret")
    assert scored(item) == [WRONG]
    assert scored(item, env=["MY_KEY"]) == [OK]
    with pytest.raises(ValueError, match="MY_OTHER_KEY"):
        RewardPool(1, env=["MY_KEY", "MY_OTHER_KEY"])


def test_an_item_of_code_has_the_time_limit_of_the_tests():
    limits = {"isolation": "bubblewrap", "timeout_s": 2.0, "memory_bytes": 1 << 30}
    timeout_s = 1.5
    longer = timeout_s + 3 * 2.0
    expected = {"math": timeout_s, "instructions": timeout_s, "code": longer, "0.5*math + 0.5*code": longer}
    with RewardPool(1, timeout_s=timeout_s, code_limits=limits) as pool:
        items = {kind: workers._Item(0, Scoring(kind, "", "", {})) for kind in expected}
        assert {kind: pool._limit_s([item]) for kind, item in items.items()} == expected


# ---- checks before a run -----------------------------------------------------------------------------------
NOT_READY = Verdict(0.0, "timeout", "the worker was not ready after 120 s")
DEAD = Verdict(0.0, "error", "the worker died with exit status -9")
FULL = Verdict(0.0, "error", "MemoryError: ")


class BusyMachine:
    """Stands in for a pool that gives the answers "b" and "c" other verdicts in the first checks."""

    def __init__(self, verdicts: list[Verdict]):
        self.verdicts = {answer: list(verdicts) for answer in "bc"}
        self.batches = []
        self.submitted = {}

    def submit(self, key, kind, completion, answer, fields, task):
        verdicts = self.verdicts.get(answer)
        self.submitted[key] = verdicts.pop(0) if verdicts else OK

    def collect(self):
        self.batches.append([answer for _, answer, _ in self.submitted])
        verdicts = self.submitted
        self.submitted = {}
        return verdicts


@pytest.mark.parametrize(
    "verdicts, impossible, is_warned",
    [
        ([NOT_READY], [], False),
        ([DEAD, WRONG], [1, 2, 3], False),
        ([FULL, NOT_READY], [], True),
        ([DEAD, FULL], [], True),
    ],
)
def test_a_machine_that_fails_does_not_make_a_reference_impossible(verdicts, impossible, is_warned):
    """Each answer is checked again alone. Rows 1 and 3 have the same answer."""
    pool = BusyMachine(verdicts)
    warnings = []
    rows = [("exact", answer, {}) for answer in "abcb"]
    assert list(impossible_references(pool, rows, warnings.append)) == impossible
    assert pool.batches == [["a", "b", "c"], ["b"], ["c"]]
    assert len(warnings) == is_warned
    words = ("3 reference answers", "'b'", verdicts[-1].detail, "reward.timeout_s", "reward.memory_gib")
    assert all(word in line for line in warnings for word in words)


def test_functions_that_work_pass_the_check(own, monkeypatch):
    """The check calls each function once, and no built-in verifier."""
    calls = []
    submit = RewardPool.submit
    monkeypatch.setattr(
        RewardPool, "submit", lambda self, key, *item: calls.append(key) or submit(self, key, *item)
    )
    rows = [
        ("math", "0.1", FIELDS),
        ("math", "1", {}),
        (f"{own}:with_default", "1", {"level": 0.5}),
        (f"0.5*math + 0.5*{own}:given", "1", {}),
    ]
    notes = check_functions([f"{own}:waits", f"1*{own}:prints + 2*{own}:waits_for"], rows, RewardSettings())
    assert check_functions(["math", "0.5*exact + 0.5*gsm8k"], [], RewardSettings()) == []
    names = sorted(f"{own}:{name}" for name in ("waits", "prints", "waits_for", "with_default", "given"))
    assert sorted(key for key in calls if "empty" not in key) == sorted(n.split()[0] for n in notes) == names
    assert f"{own}:given gives the first reference answer 1.00, and an empty completion 1.00" in notes


@pytest.mark.parametrize("name, answer", [
    ("given", "1.001"), ("raises", ""), ("wait", ""), ("with_missing", ""), ("leaves", ""), ("coroutine", ""),
])  # fmt: skip
def test_a_function_that_does_not_work_is_named_before_a_run(name, answer, own):
    rows = [("exact", "1", {}), (f"0.5*exact + 0.5*{own}:{name}", answer, FIELDS)]
    with pytest.raises((ValueError, RuntimeError), match=f"own_rewards.py:{name}") as error:
        check_functions([], rows, RewardSettings())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("answer, is_suspicious", [("1", False), ("0", True), ("0.0 * 3", True)])
def test_a_function_that_gives_its_reference_answer_0_is_suspicious(answer, is_suspicious, own):
    (line,) = check_functions([], [(f"{own}:given", answer, {})], RewardSettings())
    assert line.startswith("warning") == ("suspicious" in line) == is_suspicious
    (line,) = check_functions([], [(f"{own}:tagged", "5", {})], RewardSettings())
    assert line == f"{own}:tagged gives the first reference answer 1.00", "it wants <answer>5</answer>"
    (line,) = check_functions([], [(f"{own}:short", "5", {})], RewardSettings())
    assert line.endswith("answer 0.50, and an empty completion 1.00")


def test_a_column_that_some_rows_lack_is_named_before_a_run(own):
    kind = f"{own}:waits_for"
    rows = [(kind, "1", {"prompt": "one", "level": 0.5}), ("exact", "1", {}), (kind, "1", {"prompt": "two"})]
    with pytest.raises(ValueError, match="level .* prompt 3 of 3"):
        check_functions([], rows, RewardSettings())
    with pytest.raises(ValueError, match="no prompts"):
        check_functions([kind], [], RewardSettings())
    with pytest.raises(ValueError, match="reward.env"):
        check_functions([], rows[:2], RewardSettings(env=["ABSENT"]))


# ---- order, backlog, decoding ------------------------------------------------------------------------------


def test_rules_overtake_slow_items(own):
    """The first slow item occupies the only worker; after this item the rules go first."""
    with RewardPool(1, timeout_s=limit(10)) as pool:
        for key in range(3):
            pool.submit(("slow", key), "own_rewards:sleeps", "0.2", "")
        for key in range(40):  # more than one window
            pool.submit(("rule", key), "exact", "a", "a")
        order = []
        while pool.poll():
            order += [k for k, v in pool._replies.items() if v is not None and k not in order]
        order += [k for k in pool._replies if k not in order]
        assert set(pool.collect().values()) == {OK}
    assert order[0] == ("slow", 0) and {kind for kind, _ in order[1:41]} == {"rule"}


def byte_level_tokenizer():
    """Train a BPE tokenizer over bytes, so that a token may be a part of a character."""
    return random_model.build_tokenizer(["ab 中é😀 " * 40], 400)


@pytest.mark.parametrize("make", [build_tokenizer, byte_level_tokenizer])
def test_workers_decode_tokens_as_the_tokenizer_does(make, own):
    """Random ids, including special tokens and parts of characters, are compared with the decoded text."""
    tokenizer = make()
    rng = random.Random(1)
    ids = [[rng.randrange(len(tokenizer)) for _ in range(rng.randint(0, 12))] for _ in range(150)]
    ids += [[tokenizer.eos_token_id], [*ids[0], tokenizer.eos_token_id]]
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    if make is byte_level_tokenizer:
        assert sum("\ufffd" in text for text in texts) > 20, "the test needs parts of characters"
    items = [("own_rewards:equal", row, text) for row, text in zip(ids, texts)]
    assert scored(*items, tokenizer=decoder_json(tokenizer)) == [OK] * len(ids)


def test_token_ids_need_a_tokenizer():
    with RewardPool(1) as pool, pytest.raises(ValueError, match="tokenizer"):
        pool.submit(0, "exact", [1, 2], "a")
