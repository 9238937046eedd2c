"""Metrics of a step against numbers counted by hand, over two ranks; checks that end a run."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import FakeRanks, error_of, judge_batch, judged, make_batch, make_config, make_prompts

import lifecycle
import train_rl
from batch import Completion, Group
from reward import Verdict
from runtime.checkpoint import TrainState
from runtime.checks import check_routes, check_verdicts
from runtime.metrics import (
    batch_metrics,
    clipped_by_update,
    load_metrics,
    reduce_metrics,
    rollout_metrics,
    schedule_metrics,
    straggler,
    time_left,
)

INVALID = 9  # in the routes of these tests


def completion(num_tokens: int, seconds=0.0, cut=False, routes=None) -> Completion:
    reason = "length" if cut else "stop"
    return Completion([1] * num_tokens, [-1.0] * num_tokens, reason, seconds, routes)


def routes_of(experts: list[int]) -> torch.Tensor:
    """Return the routes of some tokens, in one layer with two equal experts each: [tokens, 1, 2]."""
    return torch.tensor([[[first, first]] for first in experts], dtype=torch.uint8)


def reduced(monkeypatch, measure) -> list[dict]:
    """Return the metrics of measure(rank) after their reduction, on each of two ranks."""
    return FakeRanks(2).install(monkeypatch).run(lambda rank: reduce_metrics(measure(rank)))


def test_load_of_experts_counted_by_hand(monkeypatch):
    """Over both ranks, layer 0 has loads 4, 2, 1, 1, more uneven than layer 1; a rank has two experts."""
    loads = [[[3, 1, 0, 0], [1, 1, 1, 1]], [[1, 1, 1, 1], [1, 1, 1, 2]]]
    for metrics in reduced(monkeypatch, lambda rank: load_metrics(torch.tensor(loads[rank]), ep_size=2)):
        assert metrics == {"max_vio": 1.0, "max_vio_ranks": 0.5}
    assert reduced(monkeypatch, lambda rank: load_metrics(None, ep_size=1)) == [{}, {}]
    assert reduced(monkeypatch, lambda rank: load_metrics(torch.zeros(1, 4), ep_size=1)) == [{}, {}]


def test_the_token_of_a_pass_without_rows_is_no_load():
    work = train_rl.UpdateWork()
    for loads, num_rows in (([[3, 1]], 2), ([[1, 0]], 0), ([[0, 2]], 1)):
        work.add_loads(torch.tensor(loads), num_rows)
    assert work.loads_LE.tolist() == [[3, 3]]
    work.add_loads(None, 1)  # a dense model


def test_metrics_of_a_rollout_counted_by_hand(monkeypatch):
    """Rank 0 has a group with variance; the groups of rank 1 are all right, all wrong and timed out."""
    ok = Verdict(1.0, "ok")
    half = Verdict(0.5, "wrong")
    late = Verdict(0.0, "timeout")
    silent = Verdict(0.0, "no_answer")
    first = [
        completion(3, seconds=1.0, routes=routes_of([0, INVALID, 1, 2])),
        completion(5, seconds=2.0, cut=True, routes=routes_of([INVALID, 0, 0, 1, 1, INVALID])),
    ]
    groups = [
        [Group(0, 0, judged(first, [ok, half]))],
        [
            Group(1, 1, judged([completion(2), completion(2)], [ok, ok])),
            Group(2, 2, judged([completion(1), completion(4)], [silent, late])),
            Group(3, 3, judged([completion(6, cut=True), completion(6, seconds=9.0, cut=True)], [late] * 2)),
        ],
    ]
    metrics, same_metrics = reduced(monkeypatch, lambda rank: rollout_metrics(groups[rank], False, INVALID))
    assert metrics == same_metrics
    assert metrics == pytest.approx({
        "score": 3.5 / 5, "zero_variance_frac": 3 / 4,
        "zero_variance/all_right_frac": 1 / 4, "zero_variance/all_wrong_frac": 1 / 4,
        "invalid_routes_frac": 3 / 10, "tokens_total": 29, "completion_tokens": 29 / 8,
        "completion_tokens_max": 6, "completion_seconds": 12 / 8, "completion_seconds_max": 9,
        "cut_at_limit_frac": 3 / 8, "distinct_frac": 6 / 8, "verdict/ok_frac": 3 / 8,
        "verdict/wrong_frac": 1 / 8, "verdict/no_answer_frac": 1 / 8,
        "verdict/timeout_frac": 3 / 8, "verdict/error_frac": 0,
    })  # fmt: skip
    for part, share in ((None, 3 / 4), ("math", 1), ("exact", 3 / 4)):  # a part without variance decides
        groups[0][0].completions = judged(first, [replace(v, parts={"math": 0.5}) for v in (ok, half)])
        outcome = reduced(monkeypatch, lambda r, p=part: rollout_metrics(groups[r], False, INVALID, p))[0]
        assert outcome["zero_variance_frac"] == share
    groups[0][0].completions = judged(first, [ok, Verdict(0.0, "wrong")])
    binary, _ = reduced(monkeypatch, lambda rank: rollout_metrics(groups[rank], True, INVALID))
    assert binary["score"] == pytest.approx(3 / 5)


def test_the_time_of_a_rollout_counted_by_hand(monkeypatch):
    """The engines work 3 and 5 of 8 s. The last tenth of 20 completions takes 1 s; one length is known."""
    known = Group(0, 0, [completion(6, seconds=s) for s in range(1, 11)], expected_tokens=9.0)
    guessed = Group(1, 1, [completion(6, seconds=s) for s in range(11, 21)], expected_tokens=7, guessed=True)
    groups = [[known, guessed], [Group(2, 2, [completion(4, seconds=4.0), completion(4, seconds=6.0)])]]
    pools = [SimpleNamespace(latencies=[0.1, 0.5]), SimpleNamespace(latencies=[])]

    def measure(rank):
        return schedule_metrics(groups[rank], pools[rank], busy=3.0 + 2 * rank, seconds=8.0)

    metrics, _ = reduced(monkeypatch, measure)
    assert metrics["rollout_bubble"] == (5 + 3) / 16
    assert metrics["rollout_tail_frac"] == pytest.approx((20 - 19) / (20 + 6))
    assert schedule_metrics(groups[0], pools[0], 3.0, 8.0, num_rounds=2)["rollout_tail_frac"] == (0, 0)
    assert (metrics["length_error"], metrics["length_known_frac"]) == (0.5, pytest.approx(1 / 3))
    assert metrics["reward_latency"] == pytest.approx(0.3)
    assert metrics["reward_latency_p99"] == pytest.approx(0.5, rel=0.024)  # a bin is 2.4 % wide
    assert sum(metrics["reward_latency_hist"].values()) == 2 and pools[0].latencies == []
    assert straggler(metrics) == {"straggler_seconds": 5.0, "straggler_rank": 1}
    assert "straggler_max" not in metrics


def test_metrics_of_a_batch_counted_by_hand():
    """An advantage that contradicts its score is an inversion; a row without a verdict counts nowhere."""
    batch = make_batch([[0] * length for length in (2, 1, 2, 2, 2)], group_index=[0, 0, 0, 1, 0])
    wrong = [Verdict(score, "wrong") for score in (1.0, 0.9, 0.3, 0.0)]
    judge_batch(batch, [*wrong, Verdict(0.0, "timeout")])
    batch.advantages = torch.tensor([[0.5, 0.5], [-1.0, 0.0], [0.25, 0.25], [0.0, 0.0], [0.0, 0.0]])
    batch.rewards = torch.tensor([1.0, 0.5, 0.25, 0.25, 7.0])
    groups = [Group(0, 0, [completion(2)] * 4), Group(1, 1, [completion(2)])]
    config = make_config("rollout.group_size=4")
    metrics = {name: total / count for name, (total, count) in batch_metrics(batch, groups, config).items()}
    assert metrics == {
        "reward": 0.5, "inversion_frac": 0.5, "gradient_tokens_total": 5,
        "account/wasted_stopped_tokens_total": 2, "account/wasted_kept_tokens_total": 2,
    }  # fmt: skip


def test_the_clipped_share_of_each_update_counted_by_hand(monkeypatch):
    """Rank 0 has three micro-batches in two updates; rank 1 has rows in the second update only."""
    batch = make_batch([[0] * length for length in (3, 1, 2)])
    clipped = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])  # padding counts nowhere
    micro_batches = [[([0], 0), ([1], 0), ([2], 1)], [([0, 1], 1)]]

    def measure(rank):
        parts = [(rows, {"clipped": clipped[rows]}) for rows, _ in micro_batches[rank]]
        return clipped_by_update(batch, parts, [number for _, number in micro_batches[rank]])

    metrics, _ = reduced(monkeypatch, measure)
    assert metrics == {"clipped/update_1": 3 / 4, "clipped/update_2": (1 + 2 + 1) / (2 + 3 + 1)}


def test_outcomes_of_prompts_have_the_figures_of_the_evaluation_as_means(monkeypatch):
    """Two sets of three and two prompts on two ranks: a greedy completion and two samples of each prompt."""
    config = make_config("eval.num_samples=2")
    prompts = make_prompts(5)
    eval_sets = {"long": (prompts[:3], [[1]] * 3), "short": (prompts[3:], [[1]] * 2)}
    scores = {
        "long": [[1.0, 0.5, 0.0], [0.0, 0.0, 0.25], [1.0, 1.0, 1.0]],
        "short": [[0.0, 1.0, 1.0], [0.5, 0.0, 0.0]],
    }

    def measure(rank):
        rows = [row for name in eval_sets for row in scores[name][rank::2]]
        verdicts = [Verdict(score, "ok" if score == 1 else "wrong") for row in rows for score in row]
        completions = [completion(1) for _ in verdicts]
        figures = lifecycle.evaluation_metrics(completions, verdicts, eval_sets, config)
        return figures, lifecycle.prompt_outcomes(verdicts, eval_sets, config)

    (figures, outcomes), same = FakeRanks(2).install(monkeypatch).run(measure)
    assert same == (figures, outcomes)
    for name, rows in scores.items():
        assert outcomes[f"eval/{name}/accuracy"] == [row[0] for row in rows]
        assert outcomes[f"eval/{name}/avg_at_2"] == [(row[1] + row[2]) / 2 for row in rows]
    for name, values in outcomes.items():
        assert sum(values) / len(values) == pytest.approx(figures[name])


def test_verdicts_that_fail_too_often_end_the_run(capsys, monkeypatch):
    FakeRanks(1).install(monkeypatch)
    failed = Verdict(0.0, "timeout")
    right = Verdict(1.0, "ok")
    with pytest.raises(RuntimeError, match="reward.max_failed_frac"):
        check_verdicts([failed, Verdict(0.0, "error", "KeyError"), right], 0.5, "step 3")
    check_verdicts([right, Verdict(0.0, "wrong")], 0.0, "step 3")
    assert capsys.readouterr() == ("", "")
    check_verdicts([failed, right], 0.5, "step 3")
    assert "1 of 2 verdicts" in "".join(capsys.readouterr())


def test_verdicts_and_routes_are_checked_over_all_ranks(capsys, monkeypatch):
    """One of one verdict fails on rank 0 and none of nineteen on rank 1, which is a twentieth of all."""
    ranks = FakeRanks(2).install(monkeypatch)
    verdicts = [[Verdict(0.0, "timeout", "late")], [Verdict(1.0, "ok")] * 19]
    ranks.run(lambda rank: check_verdicts(verdicts[rank], 0.05, "step 3"))
    text = "".join(capsys.readouterr())
    assert text.count("1 of 20 verdicts") == 1 and "timeout: late" in text
    ranks.run(lambda rank: check_routes(rank, 10, 0.05))
    for check in (
        lambda rank: check_verdicts(verdicts[rank], 0.04, "step 3"),
        lambda rank: check_routes(rank, 10, 0.04),
    ):
        errors = ranks.run(lambda rank, check=check: error_of(check, rank))
        assert errors[0] == errors[1] and "1 of 20" in errors[0], "both ranks raise the same error"


@pytest.mark.parametrize(
    "settings, step, seconds, text",
    [
        (["train.num_steps=100"], 50, {"update": 10.0, "setup": 1e6}, "10 s left"),
        (["train.num_steps=100"], 10, {"update": 100.0, "eval": 20.0}, "18 min left"),
        (["train.num_steps=1000"], 10, {"update": 100.0}, "2 h 45 min left"),
        (["train.num_steps=1000", "train.max_generated_tokens=200"], 10, {"update": 100.0}, "1 min left"),
        (["train.num_steps=5"], 10, {"update": 100.0}, "0 s left"),
    ],
)
def test_the_time_left_follows_the_nearer_end(settings, step, seconds, text):
    state = TrainState(step=step, seconds=seconds, generated_tokens=100, charged_tokens=20)
    assert time_left(make_config(*settings), state) == text
