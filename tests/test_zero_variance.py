"""Multi-stage zero-variance elimination against integrals, closed forms and a second simulation of it.

`Described` is that simulation: the stages as they are described, on integers and booleans. Closed forms for a
prompt of pass rate p, G completions, probes of g0:

    plain      useful with probability w(p) = 1 - p^G - (1-p)^G, at a cost of G
    probing    useful with probability c(p) = 1 - p^g0 - (1-p)^g0, if every probe without variance is stopped,
               at a cost of g0 + c(p) (G - g0)

So probing buys by cost and pays by c < w. It gains where many prompts are certain, which it finds out at g0
instead of G completions, and loses where all prompts are alike; below are tests of both. Statistical bounds
are in standard errors: 4.5 of them happen once in 150000 by chance, and all random numbers are seeded.
"""

import itertools
import json
import math
import random
import shutil
import statistics
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
import reference
import scipy.integrate
import scipy.special
import scipy.stats
import torch
from conftest import SMALL, save_small_moe, train
from helpers import (
    FakeRanks,
    RankSuite,
    assert_same_run,
    hashed_answer,
    make_completion,
    make_config,
    make_group,
    make_prompts,
    make_run,
    no_history,
    parameter_distance,
    steps_of,
    weights_of,
)
from rank_worker import sample_steps

import train_rl
from data.history import PromptHistory, prob_all
from data.prompts import OfflineScore, prompt_sha
from data.stream import foreign_kinds, keep_by_offline_scores, prompts_of_step, seed_of
from reward import Verdict
from runtime.checkpoint import TrainState
from runtime.metrics import batch_metrics, exact_sum, prompt_account, reduce_metrics, rollout_metrics

Z_BOUND = 4.5


@pytest.fixture
def ranks(monkeypatch):
    """ranks(N): from now on, torch.distributed are N threads of this process."""
    return lambda world_size: FakeRanks(world_size).install(monkeypatch)


@pytest.fixture(autouse=True)
def one_rank(ranks):
    ranks(1)


def config_of(**settings) -> train_rl.Config:
    """Make settings of section `zero_variance`, or named section__key."""
    return make_config(section="zero_variance", **settings)


def skip_prob(history: PromptHistory, prompt: int, step: int, config: train_rl.Config) -> float:
    names = ("prior", "retest_steps", "explore_solved", "explore_unsolved")
    settings = {name: getattr(config.zero_variance, name) for name in names}
    group_size, binary = config.rollout.group_size, config.reward.binary
    return history.skip_prob(prompt, step, group_size, binary=binary, **settings)


def history_of(*records: tuple[float, float, int]) -> PromptHistory:
    """Make a record of one prompt for each (solved, tried, last step)."""
    solved, tried, last_step = zip(*records)
    doubles = [torch.tensor(values, dtype=torch.float64) for values in (solved, tried, [1.0] * len(tried))]
    return PromptHistory(*doubles, torch.tensor(last_step))


def group_of(*rights: bool | None, slot: int = 0, shares=None, length: int = 4) -> train_rl.Group:
    return make_group(slot, slot, [length] * len(rights), rights, shares)


def outcomes_of(groups, binary: bool = False) -> dict[int, train_rl.GroupOutcome]:
    return {group.slot: group.outcome(binary) for group in groups}


# ---- formulas ----------------------------------------------------------------------------------------------


def moment(hits: float, misses: float, power: int, prior: float) -> float:
    """Return E[p^power] under Beta(hits + prior, misses + prior), by quadrature.

    The weight x^(a-1) (1-x)^(b-1), infinite at the ends, is the quadrature's own.
    """
    ends = (hits + prior - 1, misses + prior - 1)
    weight = {"weight": "alg", "wvar": ends, "epsabs": 0, "epsrel": 1e-11}
    above, _ = scipy.integrate.quad(lambda p: p**power, 0, 1, **weight)
    return above / scipy.integrate.quad(lambda p: 1.0, 0, 1, **weight)[0]


RECORDS = [(0, 0), (4, 0), (0, 4), (3, 5), (0.5, 0.25), (7.75, 0), (0, 15.9), (12.3, 4.1), (1, 31)]


@pytest.mark.parametrize("prior", [0.05, 0.2, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("hits, misses", RECORDS)
def test_prob_all_is_the_integral_over_the_beta_posterior(hits, misses, prior):
    for num in (0, 1, 2, 3, 4, 7, 8, 16, 64):
        expected = scipy.stats.betabinom.pmf(num, num, hits + prior, misses + prior) if num else 1.0
        assert prob_all(hits, misses, num, prior) == pytest.approx(expected, rel=1e-9)
        if num <= 16:
            assert moment(hits, misses, num, prior) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.5, 0.9, 1.0])
def test_prob_all_of_a_long_record_is_the_power_of_its_rate(rate):
    for num, prior in itertools.product((1, 4, 16), (0.1, 1.0)):
        actual = prob_all(1e9 * rate, 1e9 * (1 - rate), num, prior)
        assert actual == pytest.approx(rate**num, rel=1e-5, abs=1e-12)


def test_probabilities_before_any_verdict():
    """A verdict is as likely right as wrong; by Jeffreys' prior of 1/2, two are alike in 3 of 4 cases."""
    for prior in (0.1, 0.5, 2.0):
        assert prob_all(0, 0, 1, prior) == pytest.approx(1 / 2)
    assert prob_all(0, 0, 2, 0.5) == pytest.approx(3 / 8)
    assert prob_all(0, 0, 2, 1e-9) == pytest.approx(1 / 2), "as bimodal as it gets: always alike"


@pytest.mark.parametrize("group_size", [2, 8, 32])
@pytest.mark.parametrize("hits, misses", RECORDS[1:])
def test_skip_prob_is_the_posterior_probability_of_zero_variance(hits, misses, group_size):
    """Of all right and of all wrong, each with an exploration of its own."""
    history = history_of((hits, hits + misses, 3))
    for prior, solved, unsolved in itertools.product((0.2, 0.5), (0.0, 0.1, 1.0), (0.0, 0.5, 1.0)):
        explore = {"explore_solved": solved, "explore_unsolved": unsolved}
        config = config_of(history=True, prior=prior, **explore, rollout__group_size=group_size)
        beta = scipy.stats.betabinom(group_size, hits + prior, misses + prior)
        expected = min(beta.pmf(group_size), 1 - solved) + min(beta.pmf(0), 1 - unsolved)
        actual = skip_prob(history, 0, 4, config)
        assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert 0 <= actual <= 1


def test_exploration_bounds_the_skipping_of_certain_prompts():
    """The longest record is skipped with 1 - explore_solved or 1 - explore_unsolved, not more."""
    history = history_of((1e6, 1e6, 0), (0, 1e6, 0))
    for explore in (0.0, 0.1, 0.5, 1.0):
        for name, prompt in (("explore_solved", 0), ("explore_unsolved", 1)):
            actual = skip_prob(history, prompt, 1, config_of(history=True, **{name: explore}))
            assert actual == pytest.approx(1 - explore, abs=1e-4) and actual <= 1 - explore + 1e-12


def test_skip_prob_is_zero_for_prompts_that_were_never_tried_or_are_due():
    history = history_of((0, 1000, 7), (0, 0, -1))
    config = config_of(history=True, retest_steps=5, explore_unsolved=0.3)
    assert [skip_prob(history, 0, step, config) for step in (7, 11)] == [pytest.approx(0.7)] * 2
    assert [skip_prob(history, 0, step, config) for step in (12, 13, 100)] == [0.0] * 3
    never_forced = config_of(history=True, retest_steps=0, explore_unsolved=0.3)
    assert skip_prob(history, 0, 10**6, never_forced) == pytest.approx(0.7)
    assert skip_prob(history, 1, 3, never_forced) == 0.0


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.5, 1.0])
def test_the_record_is_a_sum_of_visits_that_count_less_the_older_they_are(decay):
    """A visit without any verdict is none: the rates, the length and the date are those of the one before."""
    rng = random.Random(0)
    history, visits = no_history(5), {i: [] for i in range(5)}
    for step in range(40):
        for i in rng.sample(range(4), 2):  # prompt 4 is never tried
            rights = [rng.choice([True, False, None]) for _ in range(rng.choice([1, 2, 6]))]
            group = make_group(step, i, [rng.randint(0, 9) for _ in rights], rights)
            history.update([group.outcome(False)], step, decay)
            if any(right is not None for right in rights):
                visits[i].append((step, rights, [len(c.token_ids) for c in group.completions]))
    for i in range(5):
        ages = [(decay**age, *visit) for age, visit in enumerate(reversed(visits[i]))]
        tried = sum(weight * sum(right is not None for right in rights) for weight, _, rights, _ in ages)
        solved = sum(weight * sum(right is True for right in rights) for weight, _, rights, _ in ages)
        assert history.tried[i].item() == pytest.approx(tried, rel=1e-12)
        assert history.solved[i].item() == pytest.approx(solved, rel=1e-12)
        assert history.last_step[i] == (visits[i][-1][0] if visits[i] else -1)
        expected = statistics.mean(visits[i][-1][2]) if visits[i] else 0.0
        assert history.mean_tokens[i].item() == pytest.approx(expected)
    assert visits[0] and not visits[4]


def test_an_offline_pass_rate_is_a_visit_and_none_is_not():
    """From the first step on: a prompt that a smaller model never solves is skipped and its probe stopped."""
    rates = ((0.0, 3.5), None, (0.25, 4.0), (1.0, 0.5))
    scores = [rate and OfflineScore(*rate, 1 - rate[0]) for rate in rates]
    history = PromptHistory.from_offline(scores, 8)
    config = config_of(history=True, explore_solved=0.0, explore_unsolved=0.0, retest_steps=5)
    assert history.tried.tolist() == [8, 0, 8, 8] and history.solved.tolist() == [0, 0, 2, 8]
    assert history.last_step.tolist() == [0, -1, 0, 0] and history.mean_tokens.tolist() == [3.5, 0, 4, 0.5]
    assert {t.dtype for t in (history.tried, history.solved, history.mean_tokens)} == {torch.float64}
    beta = [scipy.stats.betabinom(8, 8 * rate + 0.2, 8 - 8 * rate + 0.2) for rate in (0.0, 0.25, 1.0)]
    expected = [b.pmf(0) + b.pmf(8) for b in beta]
    assert [skip_prob(history, i, 4, config) for i in (0, 2, 3)] == pytest.approx(expected)
    assert skip_prob(history, 1, 4, config) == 0.0 == skip_prob(history, 0, 5, config)
    history.update([group_of(True, True, False, slot=2).outcome(False)], 3, 0.5)
    assert history.solved[2] == 2 / 2 + 2 and history.tried[2] == 8 / 2 + 3
    probes = [group_of(False, False, slot=slot).outcome(False) for slot in (0, 1)]
    known, unknown = (history.zero_variance_after(probe, 8, 0.2, False) for probe in probes)
    assert known == pytest.approx(moment(8, 0, 8, 0.2) / moment(8, 0, 2, 0.2), rel=1e-5) and known > unknown


@pytest.mark.parametrize("prior", [0.2, 0.5])
@pytest.mark.parametrize("hits, misses", RECORDS)
@pytest.mark.parametrize("group_size, probe", [(8, 4), (8, 1), (16, 3), (5, 4)])
def test_zero_variance_after_a_probe_is_the_ratio_of_moments(hits, misses, group_size, probe, prior):
    """P(all alike | the probe is alike) = E[p^n] / E[p^k] under the record, for right and for wrong."""
    history = history_of((hits, hits + misses, 0))
    for right, (one, other) in ((True, (hits, misses)), (False, (misses, hits))):
        expected = moment(one, other, group_size, prior) / moment(one, other, probe, prior)
        actual = history.zero_variance_after(
            group_of(*[right] * probe).outcome(False), group_size, prior, False
        )
        assert actual == pytest.approx(expected, rel=1e-5)


def test_zero_variance_after_a_probe_by_monte_carlo():
    """400000 groups of 8 at p ~ Beta(record + prior): of those whose first 3 are wrong, how many end so."""
    rng, num = np.random.default_rng(0), 400_000
    hits, misses, prior = 1.5, 6.0, 0.3
    right = rng.random((num, 8)) < rng.beta(hits + prior, misses + prior, size=(num, 1))
    alike = ~right[:, :3].any(axis=1)
    share, count = (~right[alike]).all(axis=1).mean(), alike.sum()
    probe = group_of(False, False, False).outcome(False)
    expected = history_of((hits, hits + misses, 0)).zero_variance_after(probe, 8, prior, False)
    assert abs(share - expected) < Z_BOUND * math.sqrt(expected * (1 - expected) / count)


def test_zero_variance_after_a_probe_with_timeouts():
    history = history_of((2.0, 3.0, 0))
    after = lambda *rights: history.zero_variance_after(group_of(*rights).outcome(False), 8, 0.5, False)
    ratio = lambda *record, seen, all_alike: moment(*record, all_alike, 0.5) / moment(*record, seen, 0.5)
    # a timeout says nothing of p, and its place is taken: 8 - 3 completions are left
    assert after(True, None, True) == pytest.approx(ratio(2, 1, seen=2, all_alike=7), rel=1e-5)
    assert after(None, False, None) == pytest.approx(ratio(1, 2, seen=1, all_alike=6), rel=1e-5)
    assert after(None, None, None) == 0.0, "nothing is known: the group goes on"
    assert after(True, None, False) == 0.0 == after(False, True, True)


def test_variance_is_of_two_valid_verdicts_of_the_correctness_part():
    variance = lambda group, binary=False: group.outcome(binary).has_variance
    assert variance(group_of(True, False)) and variance(group_of(None, False, None, True))
    for rights in ([], [True], [None], [None, None], [True, None], [True, True], [False, False, None]):
        assert not variance(group_of(*rights))
    partial = group_of(False, False, False, shares=[0.2, 0.2, 0.7])
    assert variance(partial) and not variance(partial, binary=True)
    alike = group_of(False, False, shares=[0.5, 0.5 + 5e-7])
    assert not variance(alike), "a difference of a rounding error is none"
    assert variance(group_of(False, False, shares=[0.5, 0.5 + 2e-6]))
    failed = train_rl.Group(0, 0, [make_completion(1)] * 2, [Verdict(0.0, "error"), Verdict(1.0, "ok")])
    assert not variance(failed)


def test_an_outcome_counts_what_is_in_the_group():
    group = make_group(3, 7, (2, 0, 5, 1), (True, None, False, False), (0, 0, 0.25, 0))
    assert group.outcome(False) == train_rl.GroupOutcome(3, 7, 1, 1, 3, 1.25, 8, 4, True)
    assert group.outcome(True) == train_rl.GroupOutcome(3, 7, 1, 1, 3, 1.0, 8, 4, True)


def test_a_sum_of_kinds_is_right_as_a_whole_if_all_its_parts_are():
    """Its status is that of its first kind, which says nothing of the others."""
    verdicts = [Verdict(0.8, "ok"), Verdict(1.0, "ok"), Verdict(0.2, "wrong"), Verdict(0.0, "wrong")]
    group = train_rl.Group(0, 0, [make_completion(1)] * 4, verdicts)
    for binary in (False, True):
        assert (group.outcome(binary).solved, group.outcome(binary).unsolved) == (1, 1)
    first_right = train_rl.Group(0, 0, [make_completion(1)] * 8, [Verdict(0.8, "ok")] * 8)
    for binary, expected in ((False, 0.01), (True, 0.868)):
        config, history = config_of(history=True, reward__binary=binary), no_history(1)
        history.update([first_right.outcome(binary)], 0, 0.5)
        assert skip_prob(history, 0, 1, config) == pytest.approx(expected, abs=0.01)


def test_a_record_of_fractions_is_read_by_the_reward_of_the_stage():
    """Fractions that a stage with reward.binary took for wrong have variance in the next one."""
    group = train_rl.Group(0, 0, [make_completion(1)] * 8, [Verdict(i / 10, "wrong") for i in range(1, 9)])
    history = no_history(1)
    history.update([group.outcome(True)], 0, 0.5)
    assert skip_prob(history, 0, 1, config_of(history=True, reward__binary=True)) > 0.8
    assert skip_prob(history, 0, 1, config_of(history=True)) < 0.01
    probe = train_rl.Group(0, 0, [make_completion(1)] * 4, [Verdict(0.0, "wrong")] * 4)
    after = lambda binary: history.zero_variance_after(probe.outcome(binary), 8, 0.2, binary)
    assert after(True) > 0.9 > after(False)


# ---- the description, written a second time ----------------------------------------------------------------


class Described:
    """Does the stages 1b and 1c and the contrasts as they are described, one step at a time on one rank.

    order(n), draw(n): prompt and uniform number of offer n. answer(prompt, step, slot, sample): True, False,
    or None for a verdict that did not come. A prompt's record is the list of its visits; an offline pass rate
    is a visit of group_size verdicts at step 0.
    """

    def __init__(self, offline: list[float | None], config: train_rl.Config, order, draw, answer):
        self.num_prompts, self.config, self.settings = len(offline), config, config.zero_variance
        self.order, self.draw, self.answer = order, draw, answer
        size = config.rollout.group_size
        self.visits: dict[int, list[tuple[int, float, float]]] = {  # (step, right, wrong)
            i: [] if rate is None else [(0, rate * size, size - rate * size)]
            for i, rate in enumerate(offline)
        }
        self.next_offer, self.step_number = 0, 0

    def record(self, prompt: int) -> tuple[float, float]:
        """Return right and wrong verdicts, each visit weighing history_decay of the one after it."""
        right, wrong, weight = 0.0, 0.0, 1.0
        for _, num_right, num_wrong in reversed(self.visits[prompt]):
            right, wrong = right + weight * num_right, wrong + weight * num_wrong
            weight *= self.settings.history_decay
        return right, wrong

    def prob_alike(self, one: float, other: float, num: int) -> float:
        a, b = one + self.settings.prior, other + self.settings.prior
        return math.exp(scipy.special.betaln(a + num, b) - scipy.special.betaln(a, b))

    def is_skipped(self, prompt: int, draw: float) -> bool:
        visits, size = self.visits[prompt], self.config.rollout.group_size
        if not (self.settings.history and visits):
            return False
        if 0 < self.settings.retest_steps <= self.step_number - visits[-1][0]:
            return False
        right, wrong = self.record(prompt)
        solved = min(self.prob_alike(right, wrong, size), 1 - self.settings.explore_solved)
        unsolved = min(self.prob_alike(wrong, right, size), 1 - self.settings.explore_unsolved)
        return draw < solved + unsolved

    def take_prompt(self, offers_left: list[int], tally: Counter) -> int:
        """Return the next prompt not skipped, after an epoch of offers in a round whichever is next."""
        while True:
            prompt, draw = self.order(self.next_offer), self.draw(self.next_offer)
            self.next_offer += 1
            tally["offered"] += 1
            offers_left[0] -= 1
            if offers_left[0] < 0 or not self.is_skipped(prompt, draw):
                return prompt
            tally["skipped"] += 1

    def goes_on(self, prompt: int, probe: list[bool | None]) -> bool:
        verdicts = [v for v in probe if v is not None]
        if len(set(verdicts)) != 1:  # they differ, or there is none
            return True
        right, wrong = self.record(prompt)
        one, other = (right, wrong) if verdicts[0] else (wrong, right)
        num, rest = len(verdicts), self.config.rollout.group_size - len(probe)
        return self.prob_alike(one + num, other, rest) < self.settings.probe_stop_prob

    def step(self) -> tuple[list[tuple[int, list]], Counter]:
        """Return prompts with their verdicts in the order they were taken, and what happened."""
        settings, rollout = self.settings, self.config.rollout
        size, first = rollout.group_size, settings.probe_size or rollout.group_size
        groups: list[tuple[int, list]] = []
        tally, going_on, new = Counter(), [], rollout.prompts_per_step
        while new > 0 or going_on:
            tally["rounds"] += 1
            tally["refilled"] += new if groups else 0
            offers_left, fresh = [self.num_prompts], range(len(groups), len(groups) + new)
            groups += [(self.take_prompt(offers_left, tally), []) for _ in fresh]
            for slot, until in [(p, size) for p in going_on] + [(p, first) for p in fresh]:
                prompt, verdicts = groups[slot]
                while len(verdicts) < until:
                    verdicts.append(self.answer(prompt, self.step_number, slot, len(verdicts)))
            going_on = [p for p in fresh if first < size and self.goes_on(*groups[p])]
            new = 0
            if tally["rounds"] < settings.max_rounds and settings.refill:
                varied = [len(set(v) - {None}) == 2 for _, v in groups]
                new = rollout.prompts_per_step - sum(v or p in going_on for p, v in enumerate(varied))
            elif tally["rounds"] < settings.max_rounds:
                free = rollout.prompts_per_step * size - sum(len(v) for _, v in groups)
                new = (free - len(going_on) * (size - first)) // size
        for prompt, verdicts in groups:
            valid = [v for v in verdicts if v is not None]
            if valid:
                self.visits[prompt].append((self.step_number, sum(valid), len(valid) - sum(valid)))
        tally["stopped"] = sum(len(v) < size for _, v in groups)
        tally["sampled"], tally["completions"] = len(groups), sum(len(v) for _, v in groups)
        tally["useful"] = sum(len(v) for _, v in groups if len(set(v) - {None}) == 2)
        self.step_number += 1
        return groups, tally


class Real:
    """Does sample_step() with its record, behind the interface of Described.step()."""

    def __init__(self, offline: list[float | None], config: train_rl.Config, answer):
        self.config = config
        scores = [None if rate is None else OfflineScore(rate, 3.0, 1 - rate) for rate in offline]
        self.history = PromptHistory.from_offline(scores, config.rollout.group_size)
        self.run = make_run(config, lambda *where: (answer(*where), 3), len(offline), history=self.history)
        self.state = self.run.state

    def step(self) -> tuple[list[tuple[int, list]], Counter]:
        groups, outcomes, account = train_rl.sample_step(self.run)
        train_rl.update_history(self.run, list(outcomes.values()))
        self.state.step += 1
        tally = Counter({name: count for name, count in account.items() if name != "probed"})
        tally["sampled"] = len(outcomes)
        tally["completions"] = sum(o.completions for o in outcomes.values())
        tally["useful"] = sum(o.completions for o in outcomes.values() if o.has_variance)
        right = {"ok": True, "wrong": False, "timeout": None}
        return [(g.prompt_index, [right[v.status] for v in g.verdicts]) for g in groups], tally


def random_settings(rng: random.Random) -> tuple[int, dict]:
    """Draw a number of prompts and settings of all stages, also odd ones.

    Thresholds are off round numbers: no probability may lie on one, where rounding decides.
    """
    group_size = rng.choice([1, 2, 3, 4, 6, 8])
    drop = rng.random() < 0.5
    settings = {
        "history": rng.random() < 0.7, "history_decay": rng.choice([0.0, 0.5, 0.9, 1.0]),
        "explore_solved": rng.choice([0.01, 0.1, 0.5, 1.0]), "explore_unsolved": rng.choice([0.01, 0.3, 1.0]),
        "prior": rng.choice([0.05, 0.2, 0.5, 1.0]), "retest_steps": rng.choice([0, 1, 3, 50]),
        "probe_size": rng.choice([0, rng.randint(1, group_size - 1)]) if group_size > 1 else 0,
        "probe_stop_prob": rng.choice([0.31, 0.72, 0.88, 1.0]) - 1e-3 * rng.random(), "drop": drop,
        "refill": drop and rng.random() < 0.7, "max_rounds": rng.choice([1, 2, 3, 4, 9]),
        "rollout__group_size": group_size, "rollout__prompts_per_step": rng.choice([1, 2, 5, 12]),
        "train__seed": rng.randrange(100),
    }  # fmt: skip
    return rng.choice([1, 3, 7, 20, 60]), settings


@pytest.mark.parametrize("seed", range(120))
def test_every_choice_is_that_of_the_description(seed):
    """The same random numbers give both the same prompts, verdicts, stops and counts, step after step."""
    rng = random.Random(seed)
    num_prompts, settings = random_settings(rng)
    config = config_of(**settings)
    rates = [rng.choice([0.0, 1.0, 0.05, 0.5, rng.random()]) for _ in range(num_prompts)]
    hashed = hashed_answer(rates, seed, timeout_prob=rng.choice([0.0, 0.0, 0.2, 0.7]))
    answer = lambda *given: hashed(*given)[0]
    offer_seed = config.train.seed
    draw = lambda n: random.Random(seed_of(offer_seed, "skip", n)).random()
    order = lambda n: prompts_of_step(num_prompts, n + 1, 0, offer_seed)[n]
    offline = [rng.choice([None, rate, 0.5]) if rng.random() < 0.5 else None for rate in rates]
    described, real = Described(offline, config, order, draw, answer), Real(offline, config, answer)
    for _ in range(12):
        (expected, tally), (actual, account) = described.step(), real.step()
        assert actual == expected
        assert {k: v for k, v in account.items() if v} == {k: v for k, v in tally.items() if v}
        assert real.state.consumed_prompts == described.next_offer


# ---- statistics --------------------------------------------------------------------------------------------

MODES = {
    "plain": {},
    "probe": {"probe_size": 4, "probe_stop_prob": 0.8},
    "history": {"history": True, "retest_steps": 12},
    "history and probe": {"history": True, "probe_size": 3, "explore_solved": 0.4, "explore_unsolved": 0.1},
    "drop and refill": {"drop": True, "refill": True},
    "all": {"history": True, "probe_size": 4, "drop": True, "refill": True, "probe_stop_prob": 0.75},
}
BIMODAL = [0.0] * 24 + [1.0] * 24 + np.random.default_rng(1).beta(1, 2, size=48).tolist()


def own_random_numbers(seed: int, rates: list[float]):
    """Draw order, offers and verdicts from numpy, none of them shared with the code under test."""
    rng, epochs = np.random.default_rng(seed), {}

    def order(n: int) -> int:
        epoch, number = divmod(n, len(rates))
        if epoch not in epochs:
            epochs[epoch] = rng.permutation(len(rates))
        return int(epochs[epoch][number])

    return order, lambda n: rng.random(), lambda prompt, *where: bool(rng.random() < rates[prompt])


def assert_same_mean(one: list[float], other: list[float], what: str) -> None:
    """Compare two samples of independent replicates by their standard errors."""
    difference = statistics.mean(one) - statistics.mean(other)
    error = math.sqrt(statistics.variance(one) / len(one) + statistics.variance(other) / len(other))
    assert abs(difference) <= Z_BOUND * error, f"{what}: {difference:.4f}, standard error {error:.4f}"


@pytest.mark.slow(process="others")
@pytest.mark.parametrize("mode", MODES)
def test_a_second_simulation_gives_the_same_statistics(mode):
    """25 runs of 20 steps of 8 prompts, of the code and of the description with other random numbers."""
    counts = {Real: [], Described: []}
    for seed in range(25):
        config = config_of(**MODES[mode], rollout__prompts_per_step=8, train__seed=seed)
        order, draw, answer = own_random_numbers(1000 + seed, BIMODAL)
        no_offline = [None] * len(BIMODAL)
        described = Described(no_offline, config, order, draw, answer)
        real = Real(no_offline, config, own_random_numbers(2000 + seed, BIMODAL)[2])
        for simulation in (real, described):
            total = sum((simulation.step()[1] for _ in range(20)), Counter())
            total["share"] = total["useful"] / total["completions"]
            counts[type(simulation)].append(total)
    for name in ("share", "completions", "sampled", "offered", "skipped", "refilled", "stopped", "rounds"):
        assert_same_mean(*([c[name] for c in counts[kind]] for kind in (Real, Described)), what=name)


def prob_varied(rate: float, num: int) -> float:
    return 1 - rate**num - (1 - rate) ** num


def useful_share(rates: list[float], group_size: int, probe: int = 0) -> float:
    """Return the share of completions in groups with variance: the closed forms above, over many prompts."""
    if not probe:
        return statistics.mean(prob_varied(p, group_size) for p in rates)
    goes_on = statistics.mean(prob_varied(p, probe) for p in rates)
    return goes_on * group_size / (probe + goes_on * (group_size - probe))


ALWAYS_STOP = {"probe_stop_prob": 1e-9}  # every probe without variance is stopped, whatever the record says


def run_many(rates: list[float], num_steps: int, **settings) -> list[tuple[list, Counter]]:
    config = config_of(**{"rollout__prompts_per_step": 16} | settings)
    real = Real([None] * len(rates), config, own_random_numbers(5, rates)[2])
    return [real.step() for _ in range(num_steps)]


def assert_share(steps, expected: float) -> float:
    """Check useful completions over sampled ones; the standard error is of a ratio of sums over steps."""
    useful, sampled = ([tally[name] for _, tally in steps] for name in ("useful", "completions"))
    share = sum(useful) / sum(sampled)
    residuals = [u - expected * s for u, s in zip(useful, sampled)]
    error = statistics.stdev(residuals) * math.sqrt(len(residuals)) / sum(sampled)
    assert abs(share - expected) < Z_BOUND * error, f"{share:.4f}, not {expected:.4f} +- {error:.4f}"
    assert error < 0.01, "too few steps to tell anything"
    return share


@pytest.mark.slow(process="others")
@pytest.mark.parametrize("rates", [BIMODAL, [0.1] * 50, [0.5] * 50], ids=["bimodal", "0.1", "0.5"])
@pytest.mark.parametrize("probe", [0, 1, 4])
def test_useful_share_is_the_closed_form(rates, probe):
    """400 steps of 16 groups of 8. A probe of one never differs: all are stopped, nothing is useful."""
    settings = {"probe_size": probe} | (ALWAYS_STOP if probe else {})
    steps = run_many(rates, 20 if probe == 1 else 400, **settings)
    if probe == 1:
        assert all(tally["useful"] == 0 and tally["stopped"] == tally["sampled"] for _, tally in steps)
    else:
        assert_share(steps, useful_share(rates, 8, probe))


def test_probing_loses_where_all_prompts_are_alike():
    """At one pass rate for all, a group that the probe stops might still have got variance."""
    for group_size, rate in itertools.product((4, 8, 16, 32), np.linspace(0.01, 0.99, 99)):
        for probe in range(2, group_size):
            assert useful_share([rate], group_size, probe) < useful_share([rate], group_size)
    with_probes = assert_share(run_many([0.5] * 64, 300, probe_size=4, **ALWAYS_STOP), 7 / 7.5)
    assert with_probes < assert_share(run_many([0.5] * 64, 300), 1 - 2**-7)


def test_probing_gains_where_many_prompts_are_certain():
    """Half of the prompts in {0, 1}, half at 0.5: 0.61 of the completions are useful instead of 0.50.

    The gain begins at about an eighth of certain prompts.
    """
    mixture = lambda certain: [0.0] * certain + [0.5] * (1000 - certain)
    assert useful_share(mixture(110), 8, 4) < useful_share(mixture(110), 8)
    assert useful_share(mixture(140), 8, 4) > useful_share(mixture(140), 8)
    rates = [0.0, 1.0, 0.5, 0.5] * 20
    plain, probing = run_many(rates, 300), run_many(rates, 300, probe_size=4, **ALWAYS_STOP)
    assert assert_share(probing, useful_share(rates, 8, 4)) > 1.2 * assert_share(plain, 0.5 * (1 - 2**-7))
    assert useful_share(rates, 8, 4) == pytest.approx(0.609, abs=1e-3)


LEVELS = [0.0, 0.03, 0.1, 0.25, 0.5, 0.8, 0.95, 1.0]


@pytest.mark.slow(process="others")
@pytest.mark.parametrize("probe, power", [(0, 8), (4, 4), (2, 2)])
def test_what_is_trained_on_is_biased_to_middling_prompts_as_the_closed_form_says(probe, power):
    """Of the prompts sampled at p, a share w(p), with probing c(p), is trained on: binomial at each of 8 pass
    rates, of 600 prompts or more. So the distribution of their pass rates is the prompts' times w or c."""
    settings = {"probe_size": probe, "drop": True} | (ALWAYS_STOP if probe else {})
    sampled, trained = Counter(), Counter()
    for groups, _ in run_many(LEVELS * 10, 300, **settings):
        for prompt, verdicts in groups:
            level = LEVELS[prompt % len(LEVELS)]
            sampled[level] += 1
            trained[level] += len(set(verdicts)) == 2
            assert len(verdicts) == (8 if len(set(verdicts)) == 2 or not probe else probe)
    for level in LEVELS:
        expected, num = prob_varied(level, power), sampled[level]
        assert num >= 600
        error = math.sqrt(expected * (1 - expected) / num)
        assert abs(trained[level] / num - expected) <= Z_BOUND * error, f"pass rate {level}"
    weights = [prob_varied(level, power) for level in LEVELS]
    for level, weight in zip(LEVELS, weights):
        expected, num = weight / sum(weights), trained.total()
        error = math.sqrt(expected * (1 - expected) / num)  # of a multinomial: more than of whole epochs
        assert abs(trained[level] / num - expected) <= Z_BOUND * error, f"pass rate {level}"


@pytest.mark.parametrize(
    "stop_prob, prior, power", [(0.71, 0.5, 4), (0.73, 0.5, None), (0.86, 0.2, 4), (0.87, 0.2, None)]
)
def test_a_probe_without_record_is_stopped_below_its_probability_only(stop_prob, prior, power):
    """Four alike make four more alike by 0.718 with a prior of 1/2, by 0.866 with 0.2. A threshold below that
    lets a prompt go on with c(p), one above it always."""
    rates = [0.1] * 2000
    assert prob_all(4, 0, 4, prior) == pytest.approx({0.5: 0.718, 0.2: 0.866}[prior], abs=1e-3)
    settings = {"probe_size": 4, "probe_stop_prob": stop_prob, "prior": prior}
    settings["rollout__prompts_per_step"] = 1000
    ((groups, tally),) = run_many(rates, 1, **settings)  # less than an epoch: no prompt is seen twice
    assert len({prompt for prompt, _ in groups}) == len(groups)
    goes_on = prob_varied(0.1, power) if power else 1.0
    error = math.sqrt(goes_on * (1 - goes_on) / len(groups))
    assert abs(1 - tally["stopped"] / len(groups) - goes_on) <= Z_BOUND * error


# ---- forgetting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solved, tried, explore", [(0, 16, 0.3), (16, 16, 0.2), (0, 4, 0.01)])
def test_a_prompt_that_looks_certain_is_sampled_again_after_a_geometric_number_of_offers(
    solved, tried, explore
):
    """1500 prompts that the record calls hopeless or solved: each offer is taken with probability
    1 - skip_prob, at least `explore`, whatever came before. Chi-square test of the first offer taken."""
    num_prompts, step = 1500, 1
    settings = {"explore_solved" if solved else "explore_unsolved": explore, "prior": 0.5}
    config = config_of(history=True, retest_steps=0, **settings)
    history = history_of(*[(float(solved), float(tried), 0)] * num_prompts)
    alike = scipy.stats.betabinom(8, solved + 0.5, tried - solved + 0.5).pmf(8 if solved else 0)
    taken_prob = max(1 - alike, explore)
    consumed, found, tries = 0, {}, Counter()
    while len(found) < num_prompts:
        (prompt,), offered = train_rl.choose_prompts(1, consumed, history, step, config)
        tries.update(prompts_of_step(num_prompts, offered, consumed, config.train.seed))
        consumed += offered
        found.setdefault(prompt, tries[prompt])
    bins = 8
    observed = Counter(min(n, bins + 1) for n in found.values())
    expected = [taken_prob * (1 - taken_prob) ** (n - 1) for n in range(1, bins + 1)]
    expected = np.array([*expected, 1 - sum(expected)]) * num_prompts
    test = scipy.stats.chisquare([observed[n] for n in range(1, bins + 2)], expected)
    assert test.pvalue > 1e-5, f"{observed} {expected}"


@pytest.mark.parametrize("settings", [{}, {"probe_size": 4}, {"drop": True, "refill": True}])
@pytest.mark.parametrize("retest_steps, explore", [(6, 0.0), (6, 0.1), (15, 0.1)])
def test_a_prompt_that_comes_into_reach_is_found_and_none_is_lost(retest_steps, explore, settings):
    """From step 40 on, the prompts never solved before are solved half of the time.

    A prompt is due retest_steps after its last visit and taken the next time it is offered: two offers are
    less than two epochs apart, and a step makes at least prompts_per_step offers. After two visits in reach
    the record says so.
    """
    num_prompts, per_step, change, num_steps = 48, 8, 40, 100
    rates = [0.0] * 16 + [1.0] * 16 + [0.5] * 16
    config = config_of(
        **settings, history=True, explore_solved=explore, explore_unsolved=explore, retest_steps=retest_steps,
        rollout__prompts_per_step=per_step,
    )  # fmt: skip
    real = Real([None] * num_prompts, config, own_random_numbers(3, rates)[2])
    history, visits, skipped = real.history, {i: [] for i in range(num_prompts)}, Counter()
    chance = lambda i: skip_prob(history, i, int(history.last_step[i]) + 1, config)
    for step in range(num_steps):
        if step == change:
            looks_hopeless = statistics.mean(map(chance, range(16)))
            rates[:16] = [0.5] * 16
        groups, tally = real.step()
        skipped[step >= change] += tally["skipped"]
        for prompt in {prompt for prompt, _ in groups}:
            visits[prompt].append(step)
    assert looks_hopeless > 0.6 and skipped[False] > 0, "before the change they were skipped"
    longest_wait = retest_steps + 2 * num_prompts // per_step
    for prompt, steps in visits.items():
        waits = [after - before for before, after in zip([-1, *steps], [*steps, num_steps])]
        assert max(waits) <= longest_wait, f"prompt {prompt}"
        if prompt < 16:
            assert sum(step >= change for step in steps) >= 2, f"prompt {prompt}"
            assert chance(prompt) < 0.35, f"prompt {prompt} is found and still looks hopeless"


# ---- refill, budget ----------------------------------------------------------------------------------------

REFILL = {"drop": True, "refill": True, "rollout__prompts_per_step": 12}


@pytest.mark.parametrize("probe_size", [0, 4])
@pytest.mark.parametrize("max_rounds", [1, 2, 4, 50])
def test_refill_reaches_its_number_or_ends_short_after_max_rounds(max_rounds, probe_size):
    settings = {"max_rounds": max_rounds, "probe_size": probe_size, **REFILL}
    short = 0
    for groups, tally in run_many([0.0, 1.0, 0.3, 0.6, 0.02] * 8, 60, **settings):
        useful = sum(len(set(verdicts)) == 2 for _, verdicts in groups)
        assert tally["useful"] == 8 * useful, "what is trained on is whole groups"
        assert useful <= 12 and tally["rounds"] <= max_rounds + (probe_size > 0)
        assert useful == 12 or tally["rounds"] >= max_rounds
        assert tally["sampled"] == tally["offered"] == 12 + tally["refilled"]
        short += useful < 12
    assert (short == 0) == (max_rounds == 50)


@pytest.mark.parametrize("rate", [0.0, 1.0])
@pytest.mark.parametrize("probe_size", [0, 4])
def test_prompts_that_are_all_certain_end_in_an_empty_batch_and_no_error(rate, probe_size):
    config = config_of(**REFILL, max_rounds=3, probe_size=probe_size, **ALWAYS_STOP)
    run = make_run(config, hashed_answer([rate] * 30), 30)
    groups, outcomes, account = train_rl.sample_step(run)
    assert len(groups) == len(outcomes) == 36 == run.state.consumed_prompts and account["rounds"] == 3
    assert train_rl.drop_and_deal(groups, outcomes, config) == ([], {})


@pytest.mark.parametrize("max_rounds", [1, 2, 4, 100])
@pytest.mark.parametrize("per_step, probe_size", [(1, 4), (5, 3), (16, 4), (16, 7), (16, 1)])
def test_probing_spends_its_budget_and_no_more(per_step, probe_size, max_rounds):
    settings = {"probe_size": probe_size, "max_rounds": max_rounds, "rollout__prompts_per_step": per_step}
    for groups, tally in run_many([0.0, 1.0, 0.5, 0.9] * 6, 40, **settings):
        assert tally["completions"] == sum(len(verdicts) for _, verdicts in groups)
        assert tally["completions"] <= 8 * per_step
        assert tally["completions"] > 8 * per_step - 8 or tally["rounds"] >= max_rounds
        assert all(len(verdicts) in (probe_size, 8) for _, verdicts in groups)


def test_offers_are_consumed_in_order_and_skipped_ones_too():
    """The prompts of a run are the stream of shuffled epochs without those that were skipped."""
    config = config_of(history=True, drop=True, refill=True, rollout__prompts_per_step=6, retest_steps=9)
    rates = [0.0, 1.0, 0.4] * 10
    real, taken, totals = Real([None] * 30, config, own_random_numbers(7, rates)[2]), [], Counter()
    for _ in range(60):
        groups, tally = real.step()
        taken += [prompt for prompt, _ in groups]
        totals += tally
    stream = iter(prompts_of_step(30, real.state.consumed_prompts, 0, config.train.seed))
    assert all(prompt in stream for prompt in taken), "taken is a subsequence of the stream"
    assert real.state.consumed_prompts == totals["offered"] == len(taken) + totals["skipped"]
    assert totals["skipped"] > 100


def test_without_history_the_prompts_are_those_of_plain_grpo():
    history = history_of(*[(0.0, 1000.0, 0)] * 11)
    for consumed, wanted in ((0, 5), (9, 30), (100, 1)):
        expected = prompts_of_step(11, wanted, consumed, 0), wanted
        assert train_rl.choose_prompts(wanted, consumed, history, 1, config_of()) == expected


def test_a_record_that_rules_everything_out_does_not_stall_a_step():
    """After a whole epoch of offers whatever comes is taken."""
    history = history_of(*[(0.0, 1e12, 0)] * 20)
    config = config_of(history=True, explore_unsolved=0.0, retest_steps=1000)
    chosen, offered = train_rl.choose_prompts(7, 13, history, 1, config)
    assert offered == 27 and chosen == prompts_of_step(20, 7, 33, 0)


# ---- determinism -------------------------------------------------------------------------------------------


def test_a_choice_depends_on_what_is_checkpointed_only():
    rng = random.Random(2)
    records = [(rng.uniform(0, 4), rng.uniform(4, 9), rng.randint(-1, 9)) for _ in range(40)]
    config = config_of(history=True, retest_steps=4)
    choices = set()
    for noise in range(5):
        random.seed(noise), torch.manual_seed(noise), np.random.seed(noise)
        history = history_of(*records)
        choices.add(repr(train_rl.choose_prompts(10, 123, history, 11, config)))
        assert repr(history) == repr(history_of(*records)), "choosing writes nothing"
    assert len(choices) == 1
    others = [(124, 11, config), (123, 13, config), (123, 11, config_of(history=True, train__seed=1))]
    for consumed, step, other in others:
        choices.add(repr(train_rl.choose_prompts(10, consumed, history_of(*records), step, other)))
    assert len(choices) >= 3, "and it does depend on these"


DROP, RL_ZVP, REFILL_TOO = (f"zero_variance.{name}=true" for name in ("drop", "rl_zvp", "refill"))
HISTORY = ["zero_variance.history=true", "zero_variance.retest_steps=4"]


def sampling_case(name: str, *settings: str) -> dict:
    settings = ["rollout.prompts_per_step=8", "rollout.group_size=6", *settings]
    common = {"rates": BIMODAL[::3], "num_steps": 12, "seed": 0, "timeout_prob": 0.1}
    return {"name": name, "settings": settings, **common}


CASES = [
    sampling_case("plain"),
    sampling_case("history", *HISTORY),
    sampling_case("probe", "zero_variance.probe_size=4", RL_ZVP),
    sampling_case("refill", DROP, REFILL_TOO),
    sampling_case("all", *HISTORY, "zero_variance.probe_size=3", DROP, REFILL_TOO),
    sampling_case("one group a step", DROP, "rollout.prompts_per_step=1"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_resumed_record_goes_on_identically(case, tmp_path):
    """As the checkpoint saves it: vars() through torch.save, read with weights_only."""
    whole = sample_steps(case)
    state, history = TrainState(), no_history(len(case["rates"]))
    first = sample_steps(case | {"num_steps": 5}, history, state)
    torch.save(vars(history), tmp_path / "history.pt")
    loaded = PromptHistory(**torch.load(tmp_path / "history.pt", weights_only=True))
    state = TrainState(**json.loads(json.dumps(asdict(state))))
    assert first + sample_steps(case | {"num_steps": 7}, loaded, state) == whole


# ---- several ranks -----------------------------------------------------------------------------------------


def dealt(sizes: dict[int, int], world_size: int) -> list[list[int]]:
    """Return the slots of each rank: in falling order of size, each to the rank that has the least so far."""
    slots, loads = [[] for _ in range(world_size)], [0] * world_size
    for slot in sorted(sorted(sizes), key=lambda slot: sizes[slot], reverse=True):
        rank = loads.index(min(loads))
        slots[rank].append(slot)
        loads[rank] += sizes[slot]
    return [sorted(of_rank) for of_rank in slots]


def dealt_apart(sizes: dict[int, int], varied: set[int], world_size: int) -> list[list[int]]:
    """Return the slots of each rank where groups with and without variance are dealt by themselves."""
    kinds = [{s: n for s, n in sizes.items() if (s in varied) is has} for has in (True, False)]
    parts = [dealt(kind, world_size) for kind in kinds]
    return [sorted(one + other) for one, other in zip(*parts)]


@pytest.mark.parametrize("seed", range(40))
def test_balance_hands_every_group_to_one_rank_and_the_loads_are_close(seed, ranks):
    """Loads differ by at most the largest group, in tokens or, without balance, in completions. Who sampled a
    group has no part in it, and what is handed over is a copy of what was there."""
    rng = random.Random(seed)
    fake, config = ranks(1 + seed % 5), config_of(train__balance=seed % 2 == 0)
    groups = [
        group_of(*[rng.choice([True, None])] * rng.randint(1, 3), slot=slot, length=rng.randint(0, 50))
        for slot in rng.sample(range(100), rng.choice([0, 1, 2, 5, 20]))
    ]
    outcomes = outcomes_of(rng.sample(groups, len(groups)))
    sizes = {o.slot: o.tokens if config.train.balance else o.completions for o in outcomes.values()}
    for _ in range(2):
        at_start = [rng.randrange(fake.get_world_size()) for _ in groups]  # any rank may hold any group
        balanced = fake.run(
            lambda rank, at=at_start: train_rl.drop_and_deal(
                [group for group, owner in zip(groups, at) if owner == rank], outcomes, config
            )
        )
        assert all(kept == outcomes for _, kept in balanced)
        everything = [group for of_rank, _ in balanced for group in of_rank]
        assert sorted(everything, key=lambda g: g.slot) == sorted(groups, key=lambda g: g.slot)
        assert [[g.slot for g in of_rank] for of_rank, _ in balanced] == dealt(sizes, fake.get_world_size())
        loads = [sum(sizes[g.slot] for g in of_rank) for of_rank, _ in balanced]
        assert max(loads) - min(loads) <= max(sizes.values(), default=0)


@pytest.mark.parametrize("lengths", [[1, 1, 2], [10, 4, 4, 2], [0, 0, 5], *range(15)], ids=str)
def test_balance_is_as_close_to_the_optimum_as_longest_first_is(lengths, ranks):
    """Within 4/3 - 1/(3 ranks) of the best of all ways to hand out the groups (Graham 1969). The first cases
    tell it from the shortest first and from equal numbers of groups, the others are random."""
    rng, world_size = random.Random(repr(lengths)), 2
    if isinstance(lengths, int):
        lengths, world_size = [rng.randint(0, 40) for _ in range(rng.randint(1, 7))], rng.choice([2, 3])
    groups = [group_of(True, slot=slot, length=length) for slot, length in enumerate(lengths)]
    outcomes, config = outcomes_of(groups), config_of()
    balanced = ranks(world_size).run(
        lambda rank: train_rl.drop_and_deal([] if rank else groups, outcomes, config)[0]
    )
    largest = max(sum(outcomes[g.slot].tokens for g in of_rank) for of_rank in balanced)
    ways = itertools.product(range(world_size), repeat=len(lengths))
    loads = (
        [sum(n for n, r in zip(lengths, way) if r == rank) for rank in range(world_size)] for way in ways
    )
    assert largest <= (4 / 3 - 1 / (3 * world_size)) * min(map(max, loads))


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("num_minibatches", [1, 2, 3, 4])
def test_every_minibatch_of_what_is_kept_is_dealt_to_the_ranks_by_itself(num_minibatches, drop, ranks):
    """In the order of their slots the groups are cut into minibatches of equal numbers, the last may have
    less; of each, and of its groups with variance, loads of ranks differ by at most the longest group."""
    rng, fake = random.Random(num_minibatches), ranks(2)
    config = config_of(drop=drop, train__minibatches_per_step=num_minibatches, rollout__prompts_per_step=24)
    groups = [group_of(True, rng.random() < 0.4, slot=slot, length=rng.randint(1, 50)) for slot in range(24)]
    outcomes = outcomes_of(groups)
    dealt_out = fake.run(lambda rank: train_rl.drop_and_deal(groups[rank::2], outcomes, config))
    kept = [slot for slot in range(24) if not drop or outcomes[slot].has_variance]
    size = math.ceil(len(kept) / num_minibatches)
    assert 0 < len(kept) and (len(kept) < 24) == drop
    for number in range(num_minibatches):
        part = {slot: outcomes[slot].tokens for slot in kept[number * size : (number + 1) * size]}
        found = [[g.slot for g in of_rank if g.minibatch == number] for of_rank, _ in dealt_out]
        assert found == dealt_apart(part, {s for s, o in outcomes.items() if o.has_variance}, 2)
    assert all(list(of_rank) == kept for _, of_rank in dealt_out)
    assert sum(len(of_rank) for of_rank, _ in dealt_out) == len(kept)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "settings, is_apart",
    [
        ({}, True),
        ({"train__skip_zero_gradient": False}, False),
        ({"rl_zvp": True}, False),
        ({"algorithm__kl_coef": 0.1}, False),
        ({"reward__overlong_buffer": 3}, False),
        ({"reward__repetition_coef": 0.1}, False),
        ({"reward__judge": "scalar", "reward__judge_path": "x"}, False),
        ({"algorithm__advantage": "experiments/plugins/gdpo.py:gdpo"}, False),
    ],
    ids=str,
)
def test_groups_that_updates_skip_are_dealt_apart(settings, is_apart, world_size, ranks):
    """Loads of groups that are computed and of those that are not are balanced each by itself."""
    rng, fake = random.Random(world_size), ranks(world_size)
    groups = [group_of(True, rng.random() < 0.5, slot=slot, length=rng.randint(1, 50)) for slot in range(24)]
    outcomes, config = outcomes_of(groups), config_of(**settings)
    dealt_out = fake.run(lambda rank: train_rl.drop_and_deal(groups[rank::world_size], outcomes, config)[0])
    sizes, varied = (
        {s: o.tokens for s, o in outcomes.items()},
        {s for s, o in outcomes.items() if o.has_variance},
    )
    expected = dealt_apart(sizes, varied, world_size) if is_apart else dealt(sizes, world_size)
    assert 0 < len(varied) < 24 and [[g.slot for g in of_rank] for of_rank in dealt_out] == expected
    assert world_size == 1 or dealt_apart(sizes, varied, world_size) != dealt(sizes, world_size)


@pytest.mark.parametrize("drop", [False, True])
def test_dropping_leaves_the_groups_with_variance(drop):
    rights = [(True, False), (True, True), (None, True, False), (False, None), (None, None), (False,) * 4]
    groups = [group_of(*verdicts, slot=slot) for slot, verdicts in enumerate(rights)]
    dealt_groups, kept = train_rl.drop_and_deal(groups, outcomes_of(groups), config_of(drop=drop))
    expected = [0, 2] if drop else [0, 1, 2, 3, 4, 5]
    assert [group.slot for group in dealt_groups] == expected == sorted(kept)
    assert kept == outcomes_of(dealt_groups)


def sampled_by_all(steps_of_ranks: list[list[dict]], key: str) -> list[list]:
    """Return of each step the groups of all ranks in the order of their slots."""
    return [sorted(sum((step[key] for step in steps), [])) for steps in zip(*steps_of_ranks)]


def assert_ranks_agree(steps_of_ranks: list[list[dict]], alone: list[dict], reshaped: bool) -> None:
    """Check that all ranks know what one rank alone finds, and that no group is lost or there twice.

    reshaped: by RL-ZVP, so that all groups have a gradient and are dealt alike.
    """
    shared = ("outcomes", "account", "consumed", "kept", "record")
    for steps in steps_of_ranks:
        assert [[step[k] for k in shared] for step in steps] == [[step[k] for k in shared] for step in alone]
    for key in ("sampled", "trained"):
        assert sampled_by_all(steps_of_ranks, key) == sampled_by_all([alone], key)
    for steps in zip(*steps_of_ranks):
        tokens = dict((slot, outcome[6]) for slot, outcome in steps[0]["outcomes"])
        varied = {slot for slot, outcome in steps[0]["outcomes"] if outcome[8]}
        slots = [[group[0] for group in step["trained"]] for step in steps]
        sizes = {slot: tokens[slot] for slot in steps[0]["kept"]}
        apart = set(sizes) if reshaped else varied
        assert slots == dealt_apart(sizes, apart, len(steps))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_number_of_ranks_changes_nothing_but_who_does_what(case, world_size, ranks):
    alone = sample_steps(case)
    steps_of_ranks = ranks(world_size).run(lambda rank: sample_steps(case))
    assert_ranks_agree(steps_of_ranks, alone, RL_ZVP in case["settings"])
    assert case["name"] != "plain" or expected_work_is_dealt(steps_of_ranks)


def expected_work_is_dealt(steps_of_ranks: list[list[dict]]) -> bool:
    """Check steps of one round: prompts are dealt by the lengths of their last visits, not always in turn."""
    seen = [0.0] * len(steps_of_ranks[0][0]["record"]["mean_tokens"])
    by_turns = 0
    for steps in zip(*steps_of_ranks):
        sampled = {group[0]: group[1] for step in steps for group in step["sampled"]}
        known = [tokens for tokens in seen if tokens]
        guess = statistics.mean(known) if known else 1.0
        work = {slot: seen[prompt] or guess for slot, prompt in sampled.items()}
        assert [[group[0] for group in step["sampled"]] for step in steps] == dealt(work, len(steps))
        by_turns += dealt(work, len(steps)) == dealt(dict.fromkeys(work, 1.0), len(steps))
        seen = steps[0]["record"]["mean_tokens"]
    return by_turns < len(steps_of_ranks[0])


@pytest.mark.parametrize(
    "settings, varied, expected",
    [
        # rank 1 stops both of its probes, which saves 2 + 2: a new prompt, for rank 1
        ({"probe_size": 2, "rollout__prompts_per_step": 4, **ALWAYS_STOP}, {0, 2}, ([0, 2], [1, 3, 4])),
        # both groups of rank 0 will be dropped; the new ones are shared, an engine has no other work
        ({"refill": True, "rollout__prompts_per_step": 3, "max_rounds": 2}, {1}, ([0, 2, 3], [1, 4])),
    ],
    ids=["probe", "refill"],
)
def test_a_new_prompt_goes_to_the_rank_with_the_least_expected_work_of_the_round(
    settings, varied, expected, ranks
):
    """varied: the slots whose completions differ. Places 0, 2 start on rank 0, slots 1, 3 on rank 1."""
    config = config_of(drop=True, rollout__group_size=4, **settings)
    answer = lambda prompt, step, slot, sample: (slot not in varied or sample % 2 == 0, 1)
    fake = ranks(2)

    def sample(rank):
        return train_rl.sample_step(make_run(config, answer, 9))[0]

    assert tuple([g.slot for g in groups] for groups in fake.run(sample)) == expected


# ---- two real ranks, the update ----------------------------------------------------------------------------
# (verdicts, lengths) of groups by slot: 0, 1, 4 have variance, 2 none, 3 a single verdict.
MATERIAL = {
    0: ([True, False, False, True], [3, 5, 2, 7]), 1: ([False, False, True, None], [4, 4, 9, 1]),
    2: ([True, True, True, True], [6, 2, 3, 1]), 3: ([None, True, None, None], [2, 2, 2, 2]),
    4: ([True, False], [8, 8]),
}  # fmt: skip
UPDATE = ["train.learning_rate=0.1", "train.max_grad_norm=1e3", "rollout.group_size=4", "model.dtype=float32"]


def groups_case(name: str, *updates: tuple[list[int], list[int]], deal=False, settings=()) -> dict:
    """List the slots that each of two ranks trains on, for one update after another."""
    given = [[[(slot, *MATERIAL[slot]) for slot in slots] for slots in update] for update in updates]
    settings = [*UPDATE, "train.weight_decay=0.1", *settings]
    return {"name": name, "updates": given, "deal": deal, "settings": settings}


UPDATES = [
    groups_case("shared", ([0, 4], [1])),
    groups_case("first rank alone", ([0, 1, 4], [])),
    groups_case("second rank alone", ([], [0, 1, 4])),
    groups_case("dropped from all", ([0, 1, 2], [3, 4]), deal=True, settings=[DROP]),
    groups_case("one survivor", ([2, 3], [1]), deal=True, settings=[DROP]),
    groups_case("one survivor of the other rank", ([1], [2, 3]), deal=True, settings=[DROP]),
    groups_case("nothing left", ([0, 4], [1]), ([2], [3]), deal=True, settings=[DROP]),
    groups_case("two minibatches of one group", ([0], []), settings=["train.minibatches_per_step=2"]),
    groups_case("one minibatch of one group", ([0], [])),
    groups_case("rl_zvp", ([0, 1], [2, 3]), settings=[RL_ZVP]),
    groups_case("rl_zvp on one rank", ([], [0, 1, 2, 3]), settings=[RL_ZVP]),
    groups_case("no rl_zvp", ([0, 1], [2, 3])),
]  # fmt: skip


def save_request(folder) -> None:
    save_small_moe(folder / "model")
    torch.save({"sampling": CASES, "updates": UPDATES}, folder / "request.pt")


SUITE = RankSuite("zero_variance", 2, save_request)


@pytest.mark.slow
def test_two_gloo_ranks_agree_and_find_what_one_rank_finds():
    first, second = SUITE.results()
    assert first["wanted"] == second["wanted"] and any(first["wanted"])
    for index, case in enumerate(CASES):
        of_ranks = [first["sampling"][index], second["sampling"][index]]
        assert_ranks_agree(of_ranks, sample_steps(case), RL_ZVP in case["settings"])
    (one_group,) = (
        steps for case, steps in zip(CASES, first["sampling"]) if case["name"] == "one group a step"
    )
    assert {len(step["kept"]) for step in one_group} == {0, 1}, "one rank without a group, and both"


def num_groups(case: str) -> list[int]:
    """Return how many groups each rank had in the last update of a case."""
    return [result["updates"][case]["num_groups"] for result in SUITE.results()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "one, other",
    [
        ("shared", "first rank alone"),
        ("shared", "second rank alone"),
        ("shared", "dropped from all"),
        ("one survivor", "one survivor of the other rank"),
        ("rl_zvp", "rl_zvp on one rank"),
        ("two minibatches of one group", "one minibatch of one group"),
    ],
)
def test_an_update_does_not_depend_on_which_rank_has_the_groups(one, other):
    """Also where a rank has none. 1e-6 is a few roundings of parameters of size 1; the update is larger."""
    results = SUITE.results()[0]["updates"]
    assert parameter_distance(results[one]["after"], results[other]["after"]) < 1e-6
    assert parameter_distance(results[one]["after"], results[one]["before"]) > 1e-2


@pytest.mark.slow
def test_a_step_without_any_group_left_leaves_the_parameters_bitwise():
    """Adam has a momentum from the update before, and there is weight decay: no step is taken at all."""
    result = SUITE.results()[0]["updates"]["nothing left"]
    assert num_groups("nothing left") == [0, 0]
    assert parameter_distance(result["after"], result["before"]) == 0
    assert result["metrics"]["gradient_tokens_total"] == 0 == result["metrics"]["nonfinite_updates_max"]
    assert math.isnan(result["metrics"]["grad_norm"])


@pytest.mark.slow
def test_the_updates_above_could_fail():
    """Dropping and RL-ZVP change the update, and the survivors are where they should be."""
    results = SUITE.results()[0]["updates"]
    kinds = ["shared", "one survivor", "rl_zvp", "no rl_zvp", "one minibatch of one group"]
    for one, other in itertools.combinations(kinds, 2):
        assert parameter_distance(results[one]["after"], results[other]["after"]) > 1e-3
    assert sorted(num_groups("one survivor")) == [0, 1]
    assert sorted(num_groups("dropped from all")) == [1, 2]


# ---- RL-ZVP ------------------------------------------------------------------------------------------------


def batch_of(groups, config: train_rl.Config, seed: int = 0) -> train_rl.RolloutBatch:
    """Make the batch of a step with rewards and advantages, and made-up entropies."""
    batch = train_rl.collate(groups, make_prompts(100), [[1, 2]] * 100)
    entropy = torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(seed))
    batch.entropy = entropy * batch.response_mask
    batch.rewards = train_rl.compute_rewards(batch, None, [], config)
    batch.valid = train_rl.has_verdict(batch.verdicts)
    batch.advantages = train_rl.token_advantages(batch, config)
    return batch


def random_groups(rng: random.Random, group_size: int) -> list[train_rl.Group]:
    """Draw groups of all kinds: certain, mixed, failed, partly right, stopped at a probe, and ragged."""
    groups = []
    for slot in range(rng.randint(1, 6)):
        rights = rng.choice([[True], [False], [None], [True, None], [False, None], [True, False, None]])
        num = rng.choice([group_size, group_size, rng.randint(1, group_size)])
        shares = rng.choice([[0.5], [0.0, 0.5], [0.0]])
        lengths = [rng.randint(0, 12) for _ in range(num)]
        drawn = [(rng.choice(rights), rng.choice(shares)) for _ in range(num)]
        groups.append(make_group(slot, slot, lengths, *zip(*drawn)))
    return groups


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_rl_zvp_reshapes_groups_of_equal_scores_only(seed, binary):
    """Against loops over tokens; the lengths are penalised, so that equal scores are unequal rewards."""
    groups = random_groups(random.Random(seed), 5)
    config = config_of(
        rl_zvp=True, rl_zvp_coef=0.3, reward__binary=binary, reward__overlong_buffer=6,
        rollout__max_new_tokens=12, reward__overlong_coef=0.5,
    )  # fmt: skip
    batch = batch_of(groups, config, seed)
    settings = {"adv_norm": "group_std", "tie_band": 0.0, "correctness_guard": False, "rl_zvp": True,
                "rl_zvp_coef": 0.3}  # fmt: skip
    entropies = [row[mask].tolist() for row, mask in zip(batch.entropy, batch.response_mask)]
    expected, row = [], 0
    for group in groups:
        rows = slice(row, row + len(group.verdicts))
        row = rows.stop
        scores = [float(v.status == "ok") if binary else v.reward for v in group.verdicts]
        correct, valid = ([v.status in names for v in group.verdicts] for names in (("ok",), ("ok", "wrong")))
        rewards = batch.rewards[rows].tolist()
        expected += reference.token_advantages(rewards, scores, correct, valid, entropies[rows], settings)
    assert row == len(batch.prompts)
    for values, mask, of_tokens in zip(batch.advantages, batch.response_mask, expected):
        torch.testing.assert_close(values[mask], torch.tensor(of_tokens), rtol=1e-4, atol=1e-6)
        assert not values[~mask].any()


def test_rl_zvp_worked_out_by_hand():
    """alpha 0.1: right tokens get 0.1 H, wrong ones 0.1 (H - max H), failed and single verdicts nothing."""
    groups = [
        group_of(True, True, None, slot=0, length=2), group_of(False, False, slot=1, length=2),
        group_of(True, None, slot=2, length=2), group_of(None, None, slot=3, length=2),
        group_of(True, False, slot=4, length=2),
    ]  # fmt: skip
    config = config_of(rl_zvp=True)
    batch = batch_of(groups, config)
    batch.entropy = torch.tensor([[0.5, 2.0]] * 11)
    rows = [True, True, False, True, True] + [False] * 6
    assert train_rl.zero_variance_rows(batch, False).tolist() == rows
    advantages = train_rl.token_advantages(batch, config)
    nothing, unit = [0.0, 0.0], [1 / math.sqrt(2)] * 2  # of 1 and 0: distance 1/2, std sqrt(1/2)
    expected = [[0.05, 0.2]] * 2 + [nothing] + [[-0.15, 0.0]] * 2 + [nothing] * 4 + [unit, [-x for x in unit]]
    torch.testing.assert_close(advantages, torch.tensor(expected), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("right", [True, False])
def test_a_penalty_does_not_hide_that_a_group_teaches_nothing(right):
    """Equal verdicts of unequal length: rewards differ, yet RL-ZVP applies and dropping drops."""
    penalty = {"reward__overlong_buffer": 8, "rollout__max_new_tokens": 8}
    group = group_of(right, right)
    group.completions[1] = make_completion(8)
    batch = batch_of([group], config_of(rl_zvp=True, **penalty))
    assert batch.rewards[0] > batch.rewards[1]
    sign = 1 if right else -1
    assert (sign * batch.advantages[batch.response_mask] >= 0).all() and batch.advantages.abs().max() <= 0.1
    assert batch_of([group], config_of(**penalty)).advantages.abs().max() > 0.7, "plain GRPO trains on it"
    dropping = config_of(drop=True, **penalty)
    assert train_rl.drop_and_deal([group], outcomes_of([group]), dropping) == ([], {})


# ---- the account -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"rl_zvp": True}, {"drop": True}], ids=["keep", "rl_zvp", "drop"])
def test_every_sampled_token_is_in_one_place_of_the_account(settings, world_size, ranks):
    """tokens = with gradient + of stopped probes + of dropped groups + kept without gradient; here the parts
    are counted again, token by token, and the prompts too."""
    fake, rng = ranks(world_size), random.Random(1)
    seen = Counter()
    for seed in range(12):
        config = config_of(
            **settings, probe_size=rng.choice([0, 2]), rollout__group_size=5, rollout__prompts_per_step=6,
            probe_stop_prob=0.5, reward__overlong_buffer=4, rollout__max_new_tokens=9,
        )  # fmt: skip
        answer = hashed_answer([0.0, 1.0, 0.1, 0.5], seed, timeout_prob=0.2)

        def step(rank, config=config, answer=answer):
            groups, outcomes, account = train_rl.sample_step(make_run(config, answer, 4))
            sampled = rollout_metrics(groups, binary=False, invalid_route=255)
            groups, kept = train_rl.drop_and_deal(groups, outcomes, config)
            batch = batch_of(groups, config, seed=rank)
            trained = batch_metrics(batch, groups, 5)
            metrics = reduce_metrics(sampled | trained)
            return metrics | prompt_account(account, outcomes, kept), groups, batch, outcomes

        results = fake.run(step)
        metrics, _, _, outcomes = results[0]
        assert all(repr(m) == repr(metrics) for m, _, _, _ in results), "all ranks report the same"
        parts = Counter({"dropped": metrics["account/wasted_dropped_tokens"], "gradient": 0})
        for _, groups, batch, _ in results:
            sizes = [len(g.completions) for g in groups for _ in g.completions]
            for size, values, ids in zip(sizes, batch.advantages.tolist(), batch.completion_ids):
                for advantage in values[: len(ids)]:
                    parts["gradient" if advantage else "kept" if size == 5 else "stopped"] += 1
        assert metrics["tokens_total"] == parts.total() == sum(o.tokens for o in outcomes.values())
        assert metrics["gradient_tokens_total"] == parts["gradient"]
        assert metrics["account/wasted_stopped_tokens_total"] == parts["stopped"]
        assert metrics["account/wasted_kept_tokens_total"] == parts["kept"]
        flat = [o for o in outcomes.values() if not o.has_variance]
        assert metrics["account/prompts_dropped"] == (len(flat) if config.zero_variance.drop else 0)
        assert metrics["account/prompts_sampled"] == len(outcomes) == metrics["account/prompts_offered"]
        assert metrics["account/prompts_stopped"] == sum(o.completions < 5 for o in flat)
        assert metrics["account/prompts_probed"] == (len(outcomes) if config.zero_variance.probe_size else 0)
        seen += parts
    # a timeout in a group with variance is kept without gradient, also where groups are dropped
    wasted = "dropped" if "drop" in settings else "stopped"
    assert {name for name, count in seen.items() if count} == {wasted, "kept", "gradient"}


# ---- whole runs --------------------------------------------------------------------------------------------

SHORT = [
    *SMALL, "train.num_steps=4", "rollout.group_size=8", "model.ep_size=1", "eval.num_samples=0",
    "data.train=[{path: data/built/tiny/train.jsonl, limit: 24}]", "zero_variance.retest_steps=3",
]  # fmt: skip
STAGES = [
    "zero_variance.history=true", "zero_variance.explore_unsolved=0.1", "zero_variance.probe_size=4",
    "zero_variance.probe_stop_prob=0.7",
]  # fmt: skip


def assert_account_adds_up(run_dir) -> None:
    """Check each step, and over the run the summary's share of tokens with gradient."""
    rows = steps_of(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        wasted = [row.get(f"account/wasted_{name}") for name in
                  ("stopped_tokens_total", "dropped_tokens", "kept_tokens_total")]  # fmt: skip
        assert row["tokens_total"] == row["gradient_tokens_total"] + sum(wasted)
        assert row["account/prompts_offered"] == (
            row["account/prompts_skipped"] + row["account/prompts_sampled"]
        )
    total = sum(row["tokens_total"] for row in rows)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["generated_tokens"] == total
    share = sum(row["gradient_tokens_total"] for row in rows) / total
    assert summary["gradient_token_share"] == pytest.approx(share)


def test_a_sum_of_metrics_does_not_depend_on_who_has_sampled_what():
    rng = random.Random(0)
    rewards = [rng.random() for _ in range(1000)]
    sums, plain = set(), set()
    for _ in range(20):
        rng.shuffle(rewards)
        cut = rng.randrange(1000)
        sums.add(exact_sum(rewards[:cut]) + exact_sum(rewards[cut:]))
        plain.add(sum(rewards[:cut]) + sum(rewards[cut:]))
    assert len(sums) == 1 < len(plain)
    assert float(sums.pop()) == math.fsum(rewards)


@pytest.mark.slow
def test_history_probes_and_rl_zvp_resume_exactly(demo_model, tmp_path):
    """A run that goes on from its checkpoint after step 2, record and all, as if killed after it."""
    straight, again = tmp_path / "straight", tmp_path / "again"
    command = [*SHORT, *STAGES, RL_ZVP]
    done = train(*command, f"run.dir={straight}", ranks=1, timeout_s=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_account_adds_up(straight)
    rows = steps_of(straight)
    for name in ("skipped", "stopped", "refilled"):
        assert sum(row[f"account/prompts_{name}"] for row in rows) > 0, name
    assert sum(row["account/prompts_skipped"] for row in rows[2:]) > 0, "the record is used after resuming"
    shutil.copytree(straight, again)
    (again / "summary.json").unlink()
    shutil.rmtree(again / "checkpoints" / "step_000004")
    done = train(*command, f"run.dir={again}", ranks=1, timeout_s=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed from" in done.stdout + done.stderr
    assert_same_run(straight, again)


@pytest.mark.slow
def test_a_run_that_skips_what_has_no_gradient_learns_the_same(demo_model, tmp_path):
    """The same completions are sampled, and the weights differ by rounding; fewer tokens are computed."""
    dirs = {on: tmp_path / on for on in ("true", "false")}
    for on, run_dir in dirs.items():
        settings = [*SHORT, f"train.skip_zero_gradient={on}", "run.log_every=2", f"run.dir={run_dir}"]
        done = train(*settings, ranks=1)
        assert done.returncode == 0, done.stderr[-3000:]
    samples = [
        [json.loads(line)["token_ids"] for line in (run_dir / "samples.jsonl").read_text().splitlines()]
        for run_dir in dirs.values()
    ]
    assert samples[0] == samples[1] and len(samples[0]) == 2 * 8
    skipping, whole = (steps_of(run_dir) for run_dir in dirs.values())
    for one, other in zip(skipping, whole):
        for name in ("score", "reward", "tokens_total", "gradient_tokens_total", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
        has_all = one["step"] % 2 == 0
        assert (one["entropy"] == pytest.approx(other["entropy"], rel=1e-4)) == has_all
        assert one["account/update_tokens_total"] == one["update_tokens"] < other["update_tokens"]
    one, other = (weights_of(run_dir / "model") for run_dir in dirs.values())
    for name in one:
        assert (one[name] - other[name]).norm() <= 4e-6 * other[name].norm()  # four updates


@pytest.mark.slow
def test_drop_and_refill_run_on_two_ranks(demo_model, tmp_path):
    """With all stages that go with it; every step trains on its eight groups or ends short."""
    done = train(*SHORT, *STAGES, DROP, REFILL_TOO, f"run.dir={tmp_path}", timeout_s=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_account_adds_up(tmp_path)
    for row in steps_of(tmp_path):
        trained = row["account/prompts_sampled"] - row["account/prompts_dropped"]
        assert trained == 8 or (trained < 8 and row["account/rounds"] >= 4)
        assert row["account/prompts_refilled"] == row["account/prompts_sampled"] - 8
        assert row["account/wasted_stopped_tokens_total"] == 0, "stopped probes are dropped with the others"
        assert row["abs_dlogp"] < 1e-4 and row["gradient_tokens_total"] > 0


def dense_group(shares: list[float], prompt: int) -> train_rl.GroupOutcome:
    """The outcome of a group whose completions are right by these shares."""
    verdicts = [Verdict(share, "ok" if share == 1 else "wrong") for share in shares]
    return train_rl.Group(prompt, prompt, [make_completion(3)] * len(shares), verdicts).outcome(False)


@pytest.mark.parametrize("digits, right", [(3, 0.9), (10, 0.95), (20, 0.97), (10, 0.05)])
def test_a_record_of_fractions_skips_no_more_than_has_no_variance(digits, right):
    """Completions with the share of right digits as their score, 2000 prompts, two visits each.

    A prompt whose groups nearly always differ is rarely skipped, however near 0 or 1 its mean score is. The
    rest is what the prior makes of 12 verdicts; by the mean score it would be 0.4 to 0.7 more.
    """
    rng, config = np.random.default_rng(0), config_of(history=True)
    shares = rng.binomial(digits, right, size=(2000, 3, 8)) / digits
    history = no_history(2000)
    for step in (0, 1):
        history.update([dense_group(list(shares[i, step]), i) for i in range(2000)], step, 0.5)
    skipped = np.mean([skip_prob(history, i, 2, config) for i in range(2000)])
    alike = np.mean(shares[:, 2].max(axis=1) - shares[:, 2].min(axis=1) == 0)
    assert skipped < alike + 0.15


def test_a_record_of_fractions_counts_what_is_right_and_what_is_wrong_as_a_whole():
    config, history = config_of(history=True), no_history(3)
    history.update([dense_group([0.5] * 4 + [1.0] * 3 + [0.0], 0)], step=0, decay=0.1)
    assert (history.solved[0], history.unsolved[0], history.tried[0]) == (3, 1, 8)
    beta = [scipy.stats.betabinom(8, n + 0.2, 8 - n + 0.2).pmf(8) for n in (3, 1)]
    assert skip_prob(history, 0, 1, config) == pytest.approx(sum(beta))
    prior = config.zero_variance.prior
    same_fraction = dense_group([0.5] * 4, 1)
    assert not same_fraction.has_variance and history.zero_variance_after(same_fraction, 8, prior, False) == 0
    assert history.zero_variance_after(dense_group([0.0] * 4, 1), 8, prior, False) > 0.5
    history.update([dense_group([0.9] * 8, 2)], step=0, decay=0.1)
    assert skip_prob(history, 2, 1, config) < 0.01, "neither all right nor all wrong"
    of_old = {name: value for name, value in vars(no_history(1)).items() if name != "unsolved"}
    assert (
        PromptHistory(**of_old | {"tried": torch.tensor([5.0]), "solved": torch.tensor([2.0])}).unsolved == 3
    )


def test_offline_scores_of_fractions_seed_the_record_and_bound_the_window(tmp_path):
    """Half of a prompt's completions are partly right, none wholly: that is not a prompt never solved."""
    prompts = make_prompts(3)
    rows = [{"prompt_sha": prompt_sha(prompt), "num_samples": 8, "mean_tokens": 3.0} for prompt in prompts]
    rates = [(0.0, 0.5), (0.0, 1.0), (1.0, 0.0)]
    rows = [row | {"pass_rate": rate, "wrong_rate": wrong} for row, (rate, wrong) in zip(rows, rates)]
    file = tmp_path / "scores.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [{"model": "m", "kinds": ["math"]}, *rows]))
    kept, scores = keep_by_offline_scores(prompts, str(file), 0.1, 0.9, binary=False)
    assert kept == [0]
    record = PromptHistory.from_offline(scores, 8)
    assert (record.solved[0], record.unsolved[0], record.tried[0]) == (0, 4, 8)
    with pytest.raises(ValueError, match="no pass rate lies in"):
        keep_by_offline_scores(prompts, str(file), 0.1, 0.9, binary=True)
    kinds = {prompt.kind for prompt in prompts}
    assert (
        foreign_kinds(prompts, str(file)) == ", ".join(sorted(kinds)) and foreign_kinds(prompts, None) == ""
    )
