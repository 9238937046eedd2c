"""Figures of a step against numbers counted by hand, over two ranks; guards that end a run."""

from types import SimpleNamespace

import pytest
import torch
from helpers import FakeRanks

from reward import Verdict
from rollout import Completion
from runtime.checks import check_routes, check_verdicts
from runtime.metrics import batch_metrics, reduce_metrics, rollout_metrics, schedule_metrics, straggler
from train_rl import Group

INVALID = 9  # in the routes of these tests


def completion(num_tokens: int, seconds=0.0, cut=False, routes=None) -> Completion:
    reason = "length" if cut else "stop"
    return Completion([1] * num_tokens, [-1.0] * num_tokens, reason, seconds, routes)


def routes_of(experts: list[int]) -> torch.Tensor:
    """Make the routes of as many tokens, in one layer with two experts each: [tokens, 1, 2]."""
    return torch.tensor([[[first, first]] for first in experts], dtype=torch.uint8)


def of_two_ranks(monkeypatch, measure) -> list[dict]:
    """Reduce what measure(rank) returns on each of two ranks."""
    fake = FakeRanks(2).install(monkeypatch)
    return fake.run(lambda rank: reduce_metrics(measure(rank)))


def test_what_was_sampled_counted_by_hand(monkeypatch):
    """Rank 0 has a group with variance, rank 1 one that is all right, one all wrong, one that timed out."""
    ok, half, wrong = Verdict(1.0, "ok"), Verdict(0.5, "wrong"), Verdict(0.0, "wrong")
    late, none = Verdict(0.0, "timeout"), Verdict(0.0, "no_answer")
    first = [
        completion(3, seconds=1.0, routes=routes_of([0, INVALID, 1, 2])),
        completion(5, seconds=2.0, cut=True, routes=routes_of([INVALID, 0, 0, 1, 1, INVALID])),
    ]
    groups = [
        [Group(0, 0, first, [ok, half])],
        [
            Group(1, 1, [completion(2), completion(2)], [ok, ok]),
            Group(2, 2, [completion(1), completion(4)], [none, late]),
            Group(3, 3, [completion(6, cut=True), completion(6, seconds=9.0, cut=True)], [late, late]),
        ],
    ]
    found, again = of_two_ranks(monkeypatch, lambda rank: rollout_metrics(groups[rank], False, INVALID))
    assert found == again
    expected = {
        "score": 3.5 / 5, "zero_variance_frac": 3 / 4,
        "zero_variance/all_right_frac": 1 / 4, "zero_variance/all_wrong_frac": 1 / 4,
        "invalid_routes_frac": 3 / 10, "tokens_total": 29, "completion_tokens": 29 / 8,
        "completion_tokens_max": 6, "completion_seconds": 12 / 8, "completion_seconds_max": 9,
        "cut_at_limit_frac": 3 / 8, "verdict/ok_frac": 3 / 8, "verdict/wrong_frac": 1 / 8,
        "verdict/no_answer_frac": 1 / 8, "verdict/timeout_frac": 3 / 8, "verdict/error_frac": 0,
    }  # fmt: skip
    assert found == pytest.approx(expected)
    groups[0][0].verdicts = [ok, wrong]
    binary, _ = of_two_ranks(monkeypatch, lambda rank: rollout_metrics(groups[rank], True, INVALID))
    assert binary["score"] == pytest.approx(3 / 5)


def test_where_the_time_of_a_rollout_went_counted_by_hand(monkeypatch):
    """Engines work 3 and 5 of 8 s. Of 20 completions the last tenth takes 1 s; one length is known."""
    known = Group(0, 0, [completion(6, seconds=s) for s in range(1, 11)], expected_tokens=9.0)
    guessed = Group(
        1, 1, [completion(6, seconds=s) for s in range(11, 21)], expected_tokens=7.0, guessed=True
    )
    groups = [[known, guessed], [Group(2, 2, [completion(4, seconds=4.0), completion(4, seconds=6.0)])]]
    pools = [SimpleNamespace(latencies=[0.1, 0.5]), SimpleNamespace(latencies=[])]

    def measure(rank):
        return schedule_metrics(groups[rank], pools[rank], busy=3.0 + 2 * rank, seconds=8.0)

    found = of_two_ranks(monkeypatch, measure)[0]
    assert found["rollout_bubble"] == (5 + 3) / 16
    assert found["rollout_tail_frac"] == pytest.approx((20 - 19) / (20 + 6))
    assert (found["length_error"], found["length_known_frac"]) == (0.5, pytest.approx(1 / 3))
    assert found["reward_latency"] == pytest.approx(0.3)
    assert found["reward_latency_p99"] == pytest.approx(0.5, rel=0.024)  # a bin is 2.4 % wide
    assert sum(found["reward_latency_hist"].values()) == 2 and pools[0].latencies == []
    assert (
        straggler(found) == {"straggler_seconds": 5.0, "straggler_rank": 1} and "straggler_max" not in found
    )


def test_what_is_trained_on_counted_by_hand():
    """Advantages against the verdict are inverted; a row without a verdict counts nowhere."""
    statuses = ["ok", "ok", "wrong", "wrong", "timeout"]
    batch = SimpleNamespace(
        verdicts=[Verdict(0.0, status) for status in statuses],
        advantages=torch.tensor([[0.5, 0.5], [-1.0, 0.0], [0.25, 0.25], [0.0, 0.0], [0.0, 0.0]]),
        response_mask=torch.tensor([[True, True], [True, False], [True, True], [True, True], [True, True]]),
        rewards=torch.tensor([1.0, 0.5, 0.25, 0.25, 7.0]),
        valid=torch.tensor([True, True, True, True, False]),
        group_index=torch.tensor([0, 0, 0, 1, 0]),
    )
    groups = [Group(0, 0, [completion(2)] * 4), Group(1, 1, [completion(2)])]
    found = {name: total / count for name, (total, count) in batch_metrics(batch, groups, 4).items()}
    assert found == {
        "reward": 0.5, "inversion_frac": 0.5, "gradient_tokens_total": 5,
        "account/wasted_stopped_tokens_total": 2, "account/wasted_kept_tokens_total": 2,
    }  # fmt: skip


def test_verdicts_that_fail_too_often_end_the_run(capsys, monkeypatch):
    FakeRanks(1).install(monkeypatch)
    failed, right = Verdict(0.0, "timeout"), Verdict(1.0, "ok")
    with pytest.raises(RuntimeError, match=r"step 3: 2 of 3 verdicts failed.*reward.max_failed_frac 0.5"):
        check_verdicts([failed, Verdict(0.0, "error", "KeyError"), right], 0.5, "step 3")
    check_verdicts([right, Verdict(0.0, "wrong")], 0.0, "step 3")
    assert capsys.readouterr() == ("", "")
    check_verdicts([failed, right], 0.5, "step 3")
    assert "warning: step 3: 1 of 2 verdicts failed" in "".join(capsys.readouterr())


def test_verdicts_and_routes_are_judged_over_all_ranks(capsys, monkeypatch):
    """One of one fails on a rank, none of nineteen on another: that is a twentieth, not all."""
    ranks, failed, right = (
        FakeRanks(2).install(monkeypatch),
        Verdict(0.0, "timeout", "late"),
        Verdict(1.0, "ok"),
    )
    verdicts = [[failed], [right] * 19]
    ranks.run(lambda rank: check_verdicts(verdicts[rank], 0.05, "step 3"))
    assert (
        "".join(capsys.readouterr()).count("warning: step 3: 1 of 20 verdicts failed; first: timeout: late")
        == 1
    )
    ranks.run(lambda rank: check_routes(rank, 10, 0.05))
    for check in (
        lambda rank: check_verdicts(verdicts[rank], 0.04, "step 3"),
        lambda rank: check_routes(rank, 10, 0.04),
    ):
        said = ranks.run(lambda rank, check=check: error_of(check, rank))
        assert said[0] == said[1] and said[0].startswith(("step 3: 1 of 20", "1 of 20 rows")), "on both ranks"


def error_of(check, rank: int) -> str:
    with pytest.raises(RuntimeError) as error:
        check(rank)
    return str(error.value)
