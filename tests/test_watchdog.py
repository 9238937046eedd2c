"""The watchdog reports each kind of hang and ends the run."""

import json
import math
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from conftest import ROOT, SMALL, train, two_agents

from runtime.agreement import tell_ranks, wait_for_ranks
from runtime.watchdog import Watchdog, describe, silent_ranks, state_of, where_of
from tests import preloaded
from tests.patience import limit

HEARTBEATS = {  # kind of rank: fields that differ from BEAT
    "waits": {"phase": "after reward", "waiting": "all_gather_object", "where": "train_rl.py:9 in main"},
    "works": {"phase": "rollout", "work": "3 of 16 completions to generate", "where": "rollout.py:7 in step"},
    "dead": {"phase": "update", "alive": False, "host": "b"},
}
BEAT = {  # a heartbeat
    "beat": 3, "host": "a", "pid": 1, "step": 5, "phase_s": 31.0, "idle_s": 30.0, "waiting": "", "work": "",
    "collectives": 12, "where": "", "alive": True,
}  # fmt: skip


def beats(*kinds: str) -> list[dict]:
    return [BEAT | HEARTBEATS[kind] for kind in kinds]


@pytest.mark.parametrize(
    "kinds, silent, details",
    [
        (
            ("waits", "works", "waits"),
            [1],
            ["rank 0 has waited 30 s for rank 1 in all_gather_object, after reward", "rank 1 on a",
             "rollout for 31 s", "3 of 16 completions to generate", "rollout.py:7 in step"],
        ),
        (
            ("waits", "dead", "dead"),
            [1, 2],
            ["for ranks 1, 2 in all_gather_object", "rank 1 on b has no heartbeat", "rank 2 on b has no"],
        ),
        (
            ("waits", "waits"),
            [0, 1],
            ["all ranks have waited 30 s", "different collectives", "rank 0 on a", "rank 1 on a",
             "train_rl.py:9 in main"],
        ),
        (("works",), [0], ["no rank has made progress for 30 s", "rank 0 on a", "rollout.py:7 in step"]),
    ],
)  # fmt: skip
def test_silent_ranks_are_named_with_their_phase_and_place(kinds, silent, details):
    line = describe(beats(*kinds), 0, 30.0)
    assert silent_ranks(beats(*kinds)) == silent
    assert line.startswith("step 5: ") and all(detail in line for detail in details)


def test_many_silent_ranks_are_counted():
    line = describe(beats("waits", *["works"] * 20), 0, 30.0)
    assert "1, 2, 3, 4, 5, 6, 7, 8 and 12 more" in line and line.count("has been in") == 4


def test_a_place_names_our_own_line_and_the_library_call_inside_it():
    frames = []

    def inner(match):
        frame = sys._getframe()
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return ""

    def outer():
        re.sub("a", inner, "a")

    outer()
    assert re.fullmatch(r"test_watchdog.py:\d+ in inner", where_of(frames))
    library = r"\S*re/__init__.py:\d+ in sub"
    assert re.fullmatch(rf"test_watchdog.py:\d+ in outer -> {library}", where_of(frames[1:]))


def test_a_process_that_has_ended_is_reported_as_ended():
    assert "ended" in state_of(2**22 + 1)


@pytest.mark.parametrize(
    ("phase", "idle_s", "ends"), [("rollout", 50, True), ("setup", 50, False), ("setup", 200, True)]
)
def test_a_rank_may_wait_longer_while_another_rank_compiles_kernels(phase, idle_s, ends):
    """run.timeout_s is 40 s here, and the set-up may take 160 s."""
    clock = SimpleNamespace(now=(phase, str))
    ended = []
    watchdog = object.__new__(Watchdog)
    vars(watchdog).update(rank=0, num_ranks=2, warn_s=1e3, next_warning=1e3, interval=0.0, clock=clock)
    watchdog.timeout_s = 40.0
    watchdog.setup_timeout_s = 160.0
    watchdog._end = lambda line, beats: ended.append(line)
    both = [beat | {"phase": phase, "idle_s": idle_s} for beat in beats("waits", "works")]
    watchdog.read_beats = lambda: both
    watchdog._judge(both[0])
    assert bool(ended) == ends


# ---- hangs, on ranks ---------------------------------------------------------------------------------------
TIMEOUT_S = math.ceil(limit(3))  # run.timeout_s of these ranks
WAITED = r"step 5: rank 0 has waited \d+ s for rank 1 in all_gather_object, after reward; "
BUSY = r"rank 1 on \S+ has been in {} for \d+ s{}, at watched_ranks.py:\d+ in {}"
HANGS = {  # kind: (pattern of the report, end of the silent rank's stack)
    "before a collective": (WAITED + BUSY.format("update", "", "hangs_here"), "in hangs_here"),
    "generate": (
        WAITED + BUSY.format("rollout", ", 3 of 16 completions to generate", "hangs_here"), "in hangs_here",
    ),
    "disk": (
        WAITED + BUSY.format("checkpoint", "", "hang") + r" -> \S*pathlib.py:\d+ in open", "nobody reads",
    ),
    "other collective": (
        r"step 5: all ranks have waited \d+ s .*different.*all_gather.*barrier", "dist.barrier(group=pair)",
    ),
    "interpreter": (WAITED + r"rank 1 on \S+ has no heartbeat: .*interpreter", "in hang\n"),
    "stopped": (WAITED + r"rank 1 on \S+ has no heartbeat: .*stopped", "no stack trace"),
    "everybody": (
        r"step 5: no rank has made progress for \d+ s; rank 0 .*" + BUSY.format("rollout", "", "hangs_here"),
        "in hangs_here",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict:
    """Run every kind of hang at once, on two ranks each, because the ranks sleep most of the time."""
    folders = {kind: tmp_path_factory.mktemp("hang") for kind in [*HANGS, "slow", "fails"]}
    preloaded.start_server()

    def start(kind: str):
        launch = two_agents if kind == "before a collective" else preloaded.run  # one hang on two nodes
        return launch(2, "tests/watched_ranks.py", kind, folders[kind], TIMEOUT_S, timeout_s=90)

    with ThreadPoolExecutor(len(folders)) as pool:
        return {kind: (folders[kind], done) for kind, done in zip(folders, pool.map(start, folders))}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HANGS)
def test_a_hang_is_reported_and_ends_the_run_with_the_stack_of_the_silent_rank(kind, ended):
    folder, done = ended[kind]
    report, stack = HANGS[kind]
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    error = next(line for line in lines if line.startswith("error on rank"))
    assert any(re.match(report + rf".*aborted after {TIMEOUT_S} s", line) for line in lines)
    assert re.search(report + r".*run.timeout_s", error)
    file = folder / f"error_rank_{error.split()[3].rstrip(':')}.txt"
    for text in (done.stderr, file.read_text()):
        assert stack in text and "idle s  collectives" in text and error in text


@pytest.mark.slow
def test_a_slow_rank_that_makes_progress_is_not_aborted(ended):
    """The rank takes twice run.timeout_s in all, with a collective after every sixth of run.timeout_s."""
    folder, done = ended["slow"]
    assert done.returncode == 0 and list(folder.iterdir()) == [], done.stderr


@pytest.mark.slow
def test_a_failure_of_one_rank_ends_the_others_before_they_time_out(ended):
    """On another node, torchrun does not end them; their report is the error of the rank that failed."""
    folder, done = ended["fails"]
    assert done.returncode != 0 and "aborted" not in done.stderr
    assert "error on rank 1: no memory" in (folder / "report_0").read_text()


HANGING_REWARD = """
import os, time

def score(completion, answer):
    if os.environ["RANK"] == "1" and completion not in ("", answer):
        time.sleep(3000)
    return completion == answer
"""


@pytest.mark.slow
@pytest.mark.usefixtures("demo_model")
def test_a_reward_that_hangs_ends_a_run_and_is_named(tmp_path):
    """The reward hangs on rank 1; rank 1 reports the worker and rank 0 aborts the run."""
    (tmp_path / "mine.py").write_text(HANGING_REWARD)
    kind = f"{tmp_path / 'mine.py'}:score"
    lines = (ROOT / "data" / "built" / "tiny" / "train.jsonl").read_text().splitlines()[:400]
    rows = [json.dumps(json.loads(line) | {"kind": kind}) + "\n" for line in lines]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    settings = [
        f"data.train=[{{path: {tmp_path / 'train.jsonl'}}}]", f"reward.functions=['{kind}']", "eval.every=0",
        "reward.timeout_s=3000", "reward.env=[RANK]", "run.warn_s=1", f"run.timeout_s={TIMEOUT_S + 1}",
    ]  # fmt: skip
    done = train(*SMALL, *settings, f"run.dir={tmp_path / 'run'}")
    assert done.returncode != 0
    assert re.search(r"rank 1 .*in reward for .*mine.py:score, at workers.py", done.stderr)
    assert "pool.collect()" in done.stderr
    assert (tmp_path / "run" / "lock").exists() and not (tmp_path / "run" / "summary.json").exists()


# ---- ranks that do not start, or do not agree --------------------------------------------------------------
@pytest.fixture
def store(monkeypatch) -> dist.Store:
    """Make the store of node 0's agent, as rank 0 of two ranks sees it."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in (address | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # unlike in earlier tests
    return dist.PrefixStore("start_0", agent)


def test_ranks_that_do_not_start_are_named(store, capsys):
    with pytest.raises(RuntimeError, match=r"1 of 2 ranks to start: \[1\]; .*run.timeout_s"):
        wait_for_ranks(0.1, 0.5)
    assert "for 1 of 2 ranks to start: [1]" in capsys.readouterr().err


def test_a_rank_that_cannot_start_ends_the_waiting_ranks(store):
    tell_ranks("error on rank 1: train.learning_rat: no such setting")
    with pytest.raises(RuntimeError, match="train.learning_rat"):
        wait_for_ranks(limit(10), limit(10))
