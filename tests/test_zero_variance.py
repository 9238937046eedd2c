"""Zero-variance elimination against the beta posterior and a second implementation.

The second implementation is `Described`: the stages as the documentation describes them, on integers and
booleans.
"""

import itertools
import json
import math
import random
import statistics
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from conftest import SMALL, save_small_moe, trained
from helpers import (
    RankSuite,
    assert_resumes_exactly,
    hashed_answer,
    judged,
    make_completion,
    make_config,
    make_group,
    make_prompts,
    make_run,
    no_history,
    parameter_distance,
    steps_of,
)
from rank_worker import sample_steps

import train_rl
from data.history import PromptHistory
from data.prompts import OfflineScore, prompt_sha
from data.stages import Window, notes_of_scores
from data.stream import keep_by_offline_scores, prompts_of_step, seed_of
from reward import Verdict
from runtime.metrics import batch_metrics, exact_sum, prompt_account, reduce_metrics, rollout_metrics

pytestmark = pytest.mark.usefixtures("one_rank")


def config_of(**settings) -> train_rl.Config:
    """Make a config from settings of section `zero_variance`; settings of other sections are section__key."""
    return make_config(section="zero_variance", **settings)


def skip_prob(history: PromptHistory, prompt: int, step: int, config: train_rl.Config) -> float:
    return train_rl.skip_prob(prompt, history, step, config)


def zero_variance_after(history: PromptHistory, outcome, prior=0.5, step=1, group_size=8, **settings):
    """Call the trainer's function; settings: reward__binary, and retest_steps (0: no record expires)."""
    settings = {"rollout__group_size": group_size, "prior": prior, "retest_steps": 0} | settings
    return train_rl.zero_variance_after(outcome, history, step, config_of(**settings))


def history_of(*records: tuple[float, float, int]) -> PromptHistory:
    """Make a history with one prompt for each (solved, tried, last step)."""
    solved, tried, last_step = zip(*records)
    doubles = [torch.tensor(values, dtype=torch.float64) for values in (solved, tried, [1.0] * len(tried))]
    return PromptHistory(*doubles, torch.tensor(last_step))


def group_of(*rights: bool | None, slot: int = 0, shares=None, length: int = 4) -> train_rl.Group:
    return make_group(slot, slot, [length] * len(rights), rights, shares)


# ---- formulas ----------------------------------------------------------------------------------------------


RECORDS = [(0, 0), (4, 0), (0, 4), (3, 5), (0.5, 0.25), (7.75, 0), (0, 15.9), (12.3, 4.1), (1, 31)]


@pytest.mark.parametrize("prior", [0.05, 0.2, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("hits, misses", RECORDS)
def test_prob_all_is_the_integral_over_the_beta_posterior(hits, misses, prior):
    for num in (0, 1, 2, 3, 4, 7, 8, 16, 64):
        expected = scipy.stats.betabinom.pmf(num, num, hits + prior, misses + prior) if num else 1.0
        assert train_rl.prob_all(hits, misses, num, prior) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("group_size", [2, 8, 32])
@pytest.mark.parametrize("hits, misses", [*RECORDS[1:], (1e6, 0), (0, 1e6)])
def test_skip_prob_is_the_posterior_probability_of_zero_variance(hits, misses, group_size):
    """All right and all wrong have separate exploration rates, which also cap the longest records."""
    history = history_of((hits, hits + misses, 3))
    for prior, solved, unsolved in itertools.product((0.2, 0.5), (0.0, 0.1, 1.0), (0.0, 0.5, 1.0)):
        explore = {"explore_solved": solved, "explore_unsolved": unsolved}
        beta = scipy.stats.betabinom(group_size, hits + prior, misses + prior)
        expected = min(beta.pmf(group_size), 1 - solved) + min(beta.pmf(0), 1 - unsolved)
        config = config_of(rollout__group_size=group_size, prior=prior, retest_steps=0, **explore)
        probability = skip_prob(history, 0, 4, config)
        assert probability == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert 0 <= probability <= 1


def test_skip_prob_is_zero_for_prompts_that_were_never_tried_or_are_due():
    history = history_of((0, 1000, 7), (0, 0, -1))
    config = config_of(history=True, retest_steps=5, explore_unsolved=0.3)
    assert [skip_prob(history, 0, step, config) for step in (7, 11)] == [pytest.approx(0.7)] * 2
    assert [skip_prob(history, 0, step, config) for step in (12, 13, 100)] == [0.0] * 3
    without_retests = config_of(history=True, retest_steps=0, explore_unsolved=0.3)
    assert skip_prob(history, 0, 10**6, without_retests) == pytest.approx(0.7)
    assert skip_prob(history, 1, 3, without_retests) == 0.0


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.5, 1.0])
def test_a_record_is_a_sum_of_visits_with_decaying_weights(decay):
    """A visit without any verdict leaves rates, length and date of the previous visit in place."""
    rng = random.Random(0)
    history = no_history(5)
    visits = {i: [] for i in range(5)}
    for step in range(40):
        for i in rng.sample(range(4), 2):  # prompt 4 is never tried
            rights = [rng.choice([True, False, None]) for _ in range(rng.choice([1, 2, 6]))]
            group = make_group(step, i, [rng.randint(0, 9) for _ in rights], rights)
            history.update([group.outcome(False)], step, decay)
            if any(right is not None for right in rights):
                visits[i].append((step, rights, [len(c.token_ids) for c in group.completions]))
    for i in range(5):
        weighted = [(decay**age, rights) for age, (_, rights, _) in enumerate(reversed(visits[i]))]
        tried = sum(weight * sum(right is not None for right in rights) for weight, rights in weighted)
        solved = sum(weight * sum(right is True for right in rights) for weight, rights in weighted)
        assert history.tried[i].item() == pytest.approx(tried, rel=1e-12)
        assert history.solved[i].item() == pytest.approx(solved, rel=1e-12)
        assert history.last_step[i] == (visits[i][-1][0] if visits[i] else -1)
        expected = statistics.mean(visits[i][-1][2]) if visits[i] else 0.0
        assert history.mean_tokens[i].item() == pytest.approx(expected)
    assert visits[0] and not visits[4]


def test_zero_variance_after_a_probe_with_timeouts():
    history = history_of((2.0, 3.0, 0))

    def after(*rights: bool | None) -> float:
        return zero_variance_after(history, group_of(*rights).outcome(False))

    def ratio(hits: float, misses: float, num_verdicts: int, num_alike: int) -> float:
        all_alike, verdicts = (
            scipy.stats.betabinom.pmf(n, n, hits + 0.5, misses + 0.5) for n in (num_alike, num_verdicts)
        )
        return all_alike / verdicts

    # A timeout is no evidence about p, but occupies a completion: 8 - 3 more completions follow.
    assert after(True, None, True) == pytest.approx(ratio(2, 1, 2, 7), rel=1e-5)
    assert after(False) == pytest.approx(ratio(1, 2, 1, 8), rel=1e-5)
    assert after(None, False, None) == after(None, None, None) == 0.0, "such a group is completed"
    assert after(True, None, False) == 0.0 == after(False, True, True)


@pytest.mark.parametrize(
    "group, has_variance",
    [
        (group_of(True, False), True), (group_of(None, False, None, True), True), (group_of(), False),
        (group_of(True), False), (group_of(None, None), False), (group_of(True, None), False),
        (group_of(True, True), False), (group_of(False, False, None), False),
        (group_of(False, False, shares=[0.5, 0.5 + 5e-7]), False),  # rounding is no variance
        (group_of(False, False, shares=[0.5, 0.5 + 2e-6]), True),
    ],
)  # fmt: skip
def test_variance_needs_two_valid_verdicts_that_differ(group, has_variance):
    assert group.outcome(False).has_variance == has_variance


def test_failed_verdicts_and_binary_rewards_have_no_variance_of_fractions():
    partial = group_of(False, False, False, shares=[0.2, 0.2, 0.7])
    assert partial.outcome(False).has_variance and not partial.outcome(True).has_variance
    failed = scored_group(0.0, 1.0)
    failed.completions[0] = replace(failed.completions[0], verdict=Verdict(0.0, "error"))
    assert not failed.outcome(False).has_variance


def scored_group(*scores: float, prompt: int = 0) -> train_rl.Group:
    """Make a group of completions of one token with these scores; 1 is right."""
    verdicts = [Verdict(score, "ok" if score == 1 else "wrong") for score in scores]
    return train_rl.Group(prompt, prompt, judged([make_completion(1)] * len(scores), verdicts))


def test_an_outcome_counts_verdicts_tokens_and_completions():
    group = make_group(3, 7, (2, 0, 5, 1), (True, None, False, False), (0, 0, 0.25, 0))
    assert group.outcome(False) == train_rl.GroupOutcome(3, 7, 1, 1, 3, 1.25, 8, 4, True)
    assert group.outcome(True) == train_rl.GroupOutcome(3, 7, 1, 1, 3, 1.0, 8, 4, True)


def test_the_part_of_a_sum_that_decides_about_variance():
    """Groups that differ in format only are dropped; the score that is trained on stays the whole one."""

    def outcome(*parts: tuple[float, float], part: str | None = "math", binary: bool = False):
        verdicts = [Verdict(0.9 * m + 0.1 * f, "wrong", parts={"math": m, "exact": f}) for m, f in parts]
        group = train_rl.Group(0, 0, judged([make_completion(1)] * len(parts), verdicts))
        return group.outcome(binary, part)

    only_format = [(0, 1), (0, 0), (0, 0), (0, 0)]
    assert outcome(*only_format, part=None).has_variance and not outcome(*only_format).has_variance
    assert outcome(*only_format).score_sum == outcome(*only_format, part=None).score_sum == 0.1
    assert outcome((1, 0), (0, 0)).has_variance and not outcome((1, 0), (1, 1)).has_variance
    assert outcome((0.5, 0), (0, 0)).has_variance and not outcome((0.5, 0), (0, 0), binary=True).has_variance
    assert outcome(*only_format, part="absent").has_variance, "a row without the part has its whole score"
    assert not train_rl.is_trained(
        outcome(*only_format), make_config("zero_variance.drop=true").zero_variance
    )


def test_a_weighted_sum_is_right_only_if_all_its_parts_are():
    """The status of a weighted sum is the status of the first kind, so the score decides."""
    mixed = scored_group(0.8, 1.0, 0.2, 0.0)
    mixed.completions[0] = replace(mixed.completions[0], verdict=Verdict(0.8, "ok"))
    partly_right = train_rl.Group(0, 0, judged([make_completion(1)] * 8, [Verdict(0.8, "ok")] * 8))
    for binary, expected in ((False, 0.01), (True, 0.868)):
        outcome = mixed.outcome(binary)
        assert (outcome.solved, outcome.unsolved) == (1, 1)
        config = config_of(history=True, reward__binary=binary)
        history = no_history(1)
        history.update([partly_right.outcome(binary)], 0, 0.5)
        assert skip_prob(history, 0, 1, config) == pytest.approx(expected, abs=0.01)


# ---- the second implementation -----------------------------------------------------------------------------


class Described:
    """Implements stages 1b and 1c and the contrasts as described, one step at a time on one rank.

    order(n), draw(n): the prompt and the uniform number of offer n. answer(prompt, step, slot, sample): True,
    False, or None for a timeout. The record of a prompt is a list of visits; an offline pass rate is a
    visit with group_size verdicts at step 0.
    """

    def __init__(self, offline: list[float | None], config: train_rl.Config, order, draw, answer):
        self.num_prompts = len(offline)
        self.config = config
        self.settings = config.zero_variance
        self.order = order
        self.draw = draw
        self.answer = answer
        size = config.rollout.group_size
        self.visits: dict[int, list[tuple[int, float, float]]] = {  # (step, right, wrong)
            i: [] if rate is None else [(0, rate * size, size - rate * size)]
            for i, rate in enumerate(offline)
        }
        self.next_offer = 0
        self.step_number = 0

    def record(self, prompt: int) -> tuple[float, float]:
        """Return right and wrong verdicts; a visit weighs history_decay times as much as the next visit."""
        right = wrong = 0.0
        weight = 1.0
        for _, num_right, num_wrong in reversed(self.visits[prompt]):
            right += weight * num_right
            wrong += weight * num_wrong
            weight *= self.settings.history_decay
        return right, wrong

    def prob_alike(self, hits: float, misses: float, num: int) -> float:
        a, b = hits + self.settings.prior, misses + self.settings.prior
        return math.exp(scipy.special.betaln(a + num, b) - scipy.special.betaln(a, b))

    def is_expired(self, prompt: int) -> bool:
        age = self.step_number - self.visits[prompt][-1][0]
        return 0 < self.settings.retest_steps <= age

    def is_skipped(self, prompt: int, draw: float) -> bool:
        visits = self.visits[prompt]
        size = self.config.rollout.group_size
        if not (self.settings.history and visits) or self.is_expired(prompt):
            return False
        right, wrong = self.record(prompt)
        solved = min(self.prob_alike(right, wrong, size), 1 - self.settings.explore_solved)
        unsolved = min(self.prob_alike(wrong, right, size), 1 - self.settings.explore_unsolved)
        return draw < solved + unsolved

    def take_prompt(self, offers_left: list[int], tally: Counter) -> int:
        """Return the next prompt that is not skipped; after an epoch of offers in a round, skip none."""
        while True:
            prompt = self.order(self.next_offer)
            draw = self.draw(self.next_offer)
            self.next_offer += 1
            tally["offered"] += 1
            offers_left[0] -= 1
            if offers_left[0] < 0 or not self.is_skipped(prompt, draw):
                return prompt
            tally["skipped"] += 1

    def is_completed(self, prompt: int, probe: list[bool | None]) -> bool:
        """Say whether a group gets all completions after the probe."""
        verdicts = [v for v in probe if v is not None]
        if len(set(verdicts)) != 1 or len(verdicts) < min(2, len(probe)):  # they differ, or most timed out
            return True
        is_known = self.visits[prompt] and not self.is_expired(prompt)
        right, wrong = self.record(prompt) if is_known else (0.0, 0.0)
        hits, misses = (right, wrong) if verdicts[0] else (wrong, right)
        num_missing = self.config.rollout.group_size - len(probe)
        return self.prob_alike(hits + len(verdicts), misses, num_missing) < self.settings.probe_stop_prob

    def step(self) -> tuple[list[tuple[int, list]], Counter]:
        """Return prompts with verdicts in sampling order, and counts, for example of stopped probes."""
        settings, rollout = self.settings, self.config.rollout
        size = rollout.group_size
        first = settings.probe_size or size
        groups: list[tuple[int, list]] = []
        tally = Counter()
        unfinished = []
        num_new = rollout.prompts_per_step
        while num_new > 0 or unfinished:
            tally["rounds"] += 1
            tally["refilled"] += num_new if groups else 0
            offers_left = [self.num_prompts]
            new = range(len(groups), len(groups) + num_new)
            groups += [(self.take_prompt(offers_left, tally), []) for _ in new]
            for slot, length in [(p, size) for p in unfinished] + [(p, first) for p in new]:
                prompt, verdicts = groups[slot]
                while len(verdicts) < length:
                    verdicts.append(self.answer(prompt, self.step_number, slot, len(verdicts)))
            unfinished = [p for p in new if first < size and self.is_completed(*groups[p])]
            num_new = 0
            if tally["rounds"] < settings.max_rounds and settings.refill:
                varied = [len(set(v) - {None}) == 2 for _, v in groups]
                num_new = rollout.prompts_per_step - sum(v or p in unfinished for p, v in enumerate(varied))
            elif tally["rounds"] < settings.max_rounds:
                budget = rollout.prompts_per_step * size - sum(len(v) for _, v in groups)
                num_new = (budget - len(unfinished) * (size - first)) // size
        for prompt, verdicts in groups:
            valid = [v for v in verdicts if v is not None]
            if valid:
                self.visits[prompt].append((self.step_number, sum(valid), len(valid) - sum(valid)))
        tally["stopped"] = sum(len(v) < size for _, v in groups)
        tally["sampled"] = len(groups)
        tally["completions"] = sum(len(v) for _, v in groups)
        tally["useful"] = sum(len(v) for _, v in groups if len(set(v) - {None}) == 2)
        self.step_number += 1
        return groups, tally


class Real:
    """Runs sample_step() and the history behind the interface of Described.step()."""

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
        return [(g.prompt_index, [right[c.verdict.status] for c in g.completions]) for g in groups], tally


def random_settings(rng: random.Random) -> tuple[int, dict]:
    """Draw a number of prompts and settings of all stages, including unusual ones.

    Thresholds avoid round numbers, because rounding would decide if a probability equalled the threshold.
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
def test_every_choice_equals_the_choice_of_the_description(seed):
    """With the same random numbers, both give the same prompts, verdicts, stops and counts in every step."""
    rng = random.Random(seed)
    num_prompts, settings = random_settings(rng)
    config = config_of(**settings)
    rates = [rng.choice([0.0, 1.0, 0.05, 0.5, rng.random()]) for _ in range(num_prompts)]
    hashed = hashed_answer(rates, seed, timeout_prob=rng.choice([0.0, 0.0, 0.2, 0.7]))
    offline = [rng.choice([None, rate, 0.5]) if rng.random() < 0.5 else None for rate in rates]

    def answer(*where: int) -> bool | None:
        return hashed(*where)[0]

    def draw(n: int) -> float:
        return random.Random(seed_of(config.train.seed, "skip", n)).random()

    def order(n: int) -> int:
        return prompts_of_step(num_prompts, n + 1, 0, config.train.seed)[n]

    described = Described(offline, config, order, draw, answer)
    real = Real(offline, config, answer)
    for _ in range(12):
        expected_groups, tally = described.step()
        groups, account = real.step()
        assert groups == expected_groups
        assert {k: v for k, v in account.items() if v} == {k: v for k, v in tally.items() if v}
        assert real.state.consumed_prompts == described.next_offer


BIMODAL = [0.0] * 24 + [1.0] * 24 + np.random.default_rng(1).beta(1, 2, size=48).tolist()


ALWAYS_STOP = {"probe_stop_prob": 1e-9}  # every probe without variance is stopped, whatever the record says


DROP = "zero_variance.drop=true"
REFILL = "zero_variance.refill=true"
RL_ZVP = "zero_variance.rl_zvp=true"
HISTORY = ["zero_variance.history=true", "zero_variance.retest_steps=4"]


def sampling_case(name: str, *settings: str) -> dict:
    settings = ["rollout.prompts_per_step=8", "rollout.group_size=6", *settings]
    common = {"rates": BIMODAL[::3], "num_steps": 12, "seed": 0, "timeout_prob": 0.1}
    return {"name": name, "settings": settings, **common}


CASES = [
    sampling_case("plain"),
    sampling_case("history", *HISTORY),
    sampling_case("probe", "zero_variance.probe_size=4", RL_ZVP),
    sampling_case("refill", DROP, REFILL),
    sampling_case("all", *HISTORY, "zero_variance.probe_size=3", DROP, REFILL),
    sampling_case("one group a step", DROP, "rollout.prompts_per_step=1"),
]


# ---- several ranks -----------------------------------------------------------------------------------------


def dealt(sizes: dict[int, int], world_size: int) -> list[list[int]]:
    """Return the slots of each rank: the largest group first, each to the rank with the smallest load."""
    slots = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for slot in sorted(sorted(sizes), key=lambda slot: sizes[slot], reverse=True):
        rank = loads.index(min(loads))
        slots[rank].append(slot)
        loads[rank] += sizes[slot]
    return [sorted(of_rank) for of_rank in slots]


def dealt_separately(sizes: dict[int, int], varied: set[int], world_size: int) -> list[list[int]]:
    """Return the slots of each rank if groups with and without variance are dealt separately."""
    kinds = [{s: n for s, n in sizes.items() if (s in varied) is has} for has in (True, False)]
    with_variance, without = (dealt(kind, world_size) for kind in kinds)
    return [sorted(first + second) for first, second in zip(with_variance, without)]


def random_pairs(rng: random.Random) -> list[train_rl.Group]:
    """Draw 24 groups of two completions of random length, about half of them with variance."""
    return [group_of(True, rng.random() < 0.5, slot=slot, length=rng.randint(1, 50)) for slot in range(24)]


def outcomes_of(groups: list[train_rl.Group]) -> dict[int, train_rl.GroupOutcome]:
    return {group.slot: group.outcome(False) for group in groups}


@pytest.mark.parametrize("seed", range(40))
def test_balance_deals_every_group_to_one_rank_and_the_loads_are_close(seed, ranks):
    """Loads differ by at most the largest group, in tokens or, without balance, in completions.

    The rank that sampled a group does not matter, and groups arrive unchanged.
    """
    rng = random.Random(seed)
    fake = ranks(1 + seed % 5)
    config = config_of(train__balance=seed % 2 == 0)
    groups = [
        group_of(*[rng.choice([True, None])] * rng.randint(1, 3), slot=slot, length=rng.randint(0, 50))
        for slot in rng.sample(range(100), rng.choice([0, 1, 2, 5, 20]))
    ]
    outcomes = outcomes_of(rng.sample(groups, len(groups)))
    sizes = {o.slot: o.tokens if config.train.balance else o.completions for o in outcomes.values()}
    for _ in range(2):
        owners = [rng.randrange(fake.get_world_size()) for _ in groups]
        balanced = fake.run(
            lambda rank, owners=owners: train_rl.drop_and_deal(
                [group for group, owner in zip(groups, owners) if owner == rank], outcomes, config
            )
        )
        assert all(trained == outcomes for _, trained in balanced)
        gathered = [group for of_rank, _ in balanced for group in of_rank]
        assert sorted(gathered, key=lambda g: g.slot) == sorted(groups, key=lambda g: g.slot)
        assert [[g.slot for g in of_rank] for of_rank, _ in balanced] == dealt(sizes, fake.get_world_size())
        loads = [sum(sizes[g.slot] for g in of_rank) for of_rank, _ in balanced]
        assert max(loads) - min(loads) <= max(sizes.values(), default=0)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("num_minibatches", [1, 2, 3, 4])
def test_every_minibatch_is_dealt_to_the_ranks_separately(num_minibatches, drop, ranks):
    """In the order of slots, groups are cut into minibatches whose sizes differ by at most one.

    The groups of a minibatch with and without variance are balanced separately.
    """
    config = config_of(drop=drop, train__minibatches_per_step=num_minibatches, rollout__prompts_per_step=24)
    groups = random_pairs(random.Random(num_minibatches))
    outcomes = outcomes_of(groups)
    varied = {slot for slot, outcome in outcomes.items() if outcome.has_variance}
    results = ranks(2).run(lambda rank: train_rl.drop_and_deal(groups[rank::2], outcomes, config))
    trained = [slot for slot in range(24) if not drop or slot in varied]
    cuts = [math.ceil(number * len(trained) / num_minibatches) for number in range(num_minibatches + 1)]
    assert 0 < len(trained) and (len(trained) < 24) == drop
    for number in range(num_minibatches):
        sizes = {slot: outcomes[slot].tokens for slot in trained[cuts[number] : cuts[number + 1]]}
        slots = [[g.slot for g in of_rank if g.minibatch == number] for of_rank, _ in results]
        assert slots == dealt_separately(sizes, varied, 2)
    assert all(list(of_all) == trained for _, of_all in results)
    assert sum(len(of_rank) for of_rank, _ in results) == len(trained)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "settings, is_separate",
    [
        ({}, True),
        ({"train__skip_zero_gradient": False}, False),
        ({"rl_zvp": True}, False),
        ({"teacher__path": "x"}, False),
        ({"algorithm__kl_coef": 0.1}, False),
        ({"reward__overlong_buffer": 3}, False),
        ({"reward__repetition_coef": 0.1}, False),
        ({"reward__judge": "scalar", "reward__judge_path": "x"}, False),
        ({"algorithm__advantage": "experiments/plugins/gdpo.py:gdpo"}, False),
    ],
    ids=str,
)
def test_groups_that_updates_skip_are_dealt_separately(settings, is_separate, world_size, ranks):
    groups = random_pairs(random.Random(world_size))
    outcomes = outcomes_of(groups)
    config = config_of(**settings)
    results = ranks(world_size).run(
        lambda rank: train_rl.drop_and_deal(groups[rank::world_size], outcomes, config)[0]
    )
    sizes = {slot: outcome.tokens for slot, outcome in outcomes.items()}
    varied = {slot for slot, outcome in outcomes.items() if outcome.has_variance}
    separate = dealt_separately(sizes, varied, world_size)
    together = dealt(sizes, world_size)
    assert [[g.slot for g in of_rank] for of_rank in results] == (separate if is_separate else together)
    assert 0 < len(varied) < 24 and (world_size == 1 or separate != together)


def groups_by_step(steps_of_ranks: list[list[dict]], key: str) -> list[list]:
    """Return the groups of all ranks for each step, in the order of slots."""
    return [sorted(sum((step[key] for step in steps), [])) for steps in zip(*steps_of_ranks)]


def assert_ranks_agree(steps_of_ranks: list[list[dict]], alone: list[dict], rl_zvp: bool) -> None:
    """Check that all ranks agree with a single rank, and that every group is on exactly one rank.

    rl_zvp: all groups have a gradient and are dealt together.
    """
    shared = ("outcomes", "account", "consumed", "trained_slots", "record")
    for steps in steps_of_ranks:
        assert [[step[k] for k in shared] for step in steps] == [[step[k] for k in shared] for step in alone]
    for key in ("sampled", "trained"):
        assert groups_by_step(steps_of_ranks, key) == groups_by_step([alone], key)
    for steps in zip(*steps_of_ranks):
        tokens = {slot: outcome[6] for slot, outcome in steps[0]["outcomes"]}
        varied = {slot for slot, outcome in steps[0]["outcomes"] if outcome[8]}
        slots = [[group[0] for group in step["trained"]] for step in steps]
        sizes = {slot: tokens[slot] for slot in steps[0]["trained_slots"]}
        assert slots == dealt_separately(sizes, set(sizes) if rl_zvp else varied, len(steps))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_number_of_ranks_changes_only_the_distribution_of_work(case, ranks):
    alone = sample_steps(case)
    steps_of_ranks = ranks(3).run(lambda rank: sample_steps(case))
    assert_ranks_agree(steps_of_ranks, alone, RL_ZVP in case["settings"])
    if case["name"] == "plain":
        assert_prompts_are_dealt_by_expected_length(steps_of_ranks)


def assert_prompts_are_dealt_by_expected_length(steps_of_ranks: list[list[dict]]) -> None:
    """Check steps of one round: prompts are dealt by the lengths of the last visits, not in turn."""
    lengths = [0.0] * len(steps_of_ranks[0][0]["record"]["mean_tokens"])
    num_in_turn = 0
    for steps in zip(*steps_of_ranks):
        prompts = {group[0]: group[1] for step in steps for group in step["sampled"]}
        recorded = [tokens for tokens in lengths if tokens]
        guess = statistics.mean(recorded) if recorded else 1.0
        work = {slot: lengths[prompt] or guess for slot, prompt in prompts.items()}
        assert [[group[0] for group in step["sampled"]] for step in steps] == dealt(work, len(steps))
        num_in_turn += dealt(work, len(steps)) == dealt(dict.fromkeys(work, 1.0), len(steps))
        lengths = steps[0]["record"]["mean_tokens"]
    assert num_in_turn < len(steps_of_ranks[0])


@pytest.mark.parametrize(
    "settings, varied, expected",
    [
        # Rank 1 stops both of its probes, which saves 2 + 2 completions: one new prompt, for rank 1.
        ({"probe_size": 2, "rollout__prompts_per_step": 4, **ALWAYS_STOP}, {0, 2}, ([0, 2], [1, 3, 4])),
        # Both groups of rank 0 will be dropped. The ranks share the new prompts: all engines are idle.
        ({"refill": True, "rollout__prompts_per_step": 3, "max_rounds": 2}, {1}, ([0, 2, 3], [1, 4])),
    ],
    ids=["probe", "refill"],
)
def test_a_new_prompt_goes_to_the_rank_with_the_least_expected_work_of_the_round(
    settings, varied, expected, ranks
):
    """varied: the slots whose completions differ. Slots 0 and 2 start on rank 0, slots 1 and 3 on rank 1."""
    config = config_of(drop=True, rollout__group_size=4, **settings)

    def answer(prompt: int, step: int, slot: int, sample: int) -> tuple[bool, int]:
        return slot not in varied or sample % 2 == 0, 1

    results = ranks(2).run(lambda rank: train_rl.sample_step(make_run(config, answer, 9))[0])
    assert tuple([g.slot for g in groups] for groups in results) == expected


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
    groups = [[[(slot, *MATERIAL[slot]) for slot in slots] for slots in update] for update in updates]
    settings = [*UPDATE, "train.weight_decay=0.1", *settings]
    return {"name": name, "updates": groups, "deal": deal, "settings": settings}


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
    torch.save({"updates": UPDATES}, folder / "request.pt")


SUITE = RankSuite("zero_variance", 2, save_request)


def num_groups(case: str) -> list[int]:
    """Return the number of groups of each rank in the last update of a case."""
    return [result["updates"][case]["num_groups"] for result in SUITE.results()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, equivalent",
    [
        ("shared", "first rank alone"),
        ("shared", "second rank alone"),
        ("shared", "dropped from all"),
        ("one survivor", "one survivor of the other rank"),
        ("rl_zvp", "rl_zvp on one rank"),
        ("two minibatches of one group", "one minibatch of one group"),
    ],
)
def test_an_update_does_not_depend_on_the_rank_that_has_the_groups(case, equivalent):
    """A rank may have no group. 1e-6 is a few roundings of parameters of size 1; the update is larger."""
    results = SUITE.results()[0]["updates"]
    assert parameter_distance(results[case]["after"], results[equivalent]["after"]) < 1e-6
    assert parameter_distance(results[case]["after"], results[case]["before"]) > 1e-2


@pytest.mark.slow
def test_a_step_that_drops_every_group_leaves_the_parameters_bitwise():
    """No optimizer step is taken: Adam has momentum from the update before, and there is weight decay."""
    result = SUITE.results()[0]["updates"]["nothing left"]
    assert num_groups("nothing left") == [0, 0]
    assert parameter_distance(result["after"], result["before"]) == 0
    assert result["metrics"]["gradient_tokens_total"] == 0 == result["metrics"]["nonfinite_updates_max"]
    assert math.isnan(result["metrics"]["grad_norm"])


@pytest.mark.slow
def test_the_compared_updates_differ_from_each_other():
    """Dropping and RL-ZVP change the update, and the surviving groups are on the expected ranks."""
    results = SUITE.results()[0]["updates"]
    kinds = ["shared", "one survivor", "rl_zvp", "no rl_zvp", "one minibatch of one group"]
    for first, second in itertools.combinations(kinds, 2):
        assert parameter_distance(results[first]["after"], results[second]["after"]) > 1e-3
    assert sorted(num_groups("one survivor")) == [0, 1]
    assert sorted(num_groups("dropped from all")) == [1, 2]


# ---- RL-ZVP ------------------------------------------------------------------------------------------------


def batch_of(groups, config: train_rl.Config, seed: int = 0) -> train_rl.RolloutBatch:
    """Make the batch of a step with rewards, advantages and random entropies."""
    batch = train_rl.collate(groups, make_prompts(100), [[1, 2]] * 100, config.reward.binary)
    entropy = torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(seed))
    batch.entropy = entropy * batch.response_mask
    batch.rewards = train_rl.compute_rewards(batch, None, [], config)
    batch.advantages = train_rl.token_advantages(batch, config)
    return batch


@pytest.mark.parametrize("right", [True, False])
def test_a_length_penalty_does_not_count_as_variance(right):
    """Equal verdicts of unequal length have unequal rewards, yet RL-ZVP and dropping apply."""
    penalty = {"reward__overlong_buffer": 8, "rollout__max_new_tokens": 8}
    group = group_of(right, right)
    group.completions[1] = replace(make_completion(8), verdict=group.completions[1].verdict)
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
def test_the_account_counts_every_sampled_token_once(settings, world_size, ranks):
    """tokens = with gradient + stopped probes + dropped groups + trained without gradient.

    The test counts these four kinds again, token by token, and the prompts as well.
    """
    fake = ranks(world_size)
    rng = random.Random(1)
    total = Counter()
    for seed in range(12):
        config = config_of(
            **settings, probe_size=rng.choice([0, 2]), rollout__group_size=5, rollout__prompts_per_step=6,
            probe_stop_prob=0.5, reward__overlong_buffer=4, rollout__max_new_tokens=9,
        )  # fmt: skip
        answer = hashed_answer([0.0, 1.0, 0.1, 0.5], seed, timeout_prob=0.2)

        def step(rank, config=config, answer=answer):
            groups, outcomes, account = train_rl.sample_step(make_run(config, answer, 4))
            sampled = rollout_metrics(groups, binary=False, invalid_route=255)
            groups, trained_outcomes = train_rl.drop_and_deal(groups, outcomes, config)
            batch = batch_of(groups, config, seed=rank)
            metrics = reduce_metrics(sampled | batch_metrics(batch, groups, config))
            return metrics | prompt_account(account, outcomes, trained_outcomes), groups, batch, outcomes

        results = fake.run(step)
        metrics, _, _, outcomes = results[0]
        assert all(repr(m) == repr(metrics) for m, _, _, _ in results), "all ranks report the same"
        tokens = Counter({"dropped": metrics["account/wasted_dropped_tokens"], "gradient": 0})
        for _, groups, batch, _ in results:
            sizes = [len(g.completions) for g in groups for _ in g.completions]
            for size, values, ids in zip(sizes, batch.advantages.tolist(), batch.completion_ids):
                for advantage in values[: len(ids)]:
                    tokens["gradient" if advantage else "kept" if size == 5 else "stopped"] += 1
        assert metrics["tokens_total"] == tokens.total() == sum(o.tokens for o in outcomes.values())
        assert metrics["gradient_tokens_total"] == tokens["gradient"]
        assert metrics["account/wasted_stopped_tokens_total"] == tokens["stopped"]
        assert metrics["account/wasted_kept_tokens_total"] == tokens["kept"]
        flat = [o for o in outcomes.values() if not o.has_variance]
        assert metrics["account/prompts_dropped"] == (len(flat) if config.zero_variance.drop else 0)
        assert metrics["account/prompts_sampled"] == len(outcomes) == metrics["account/prompts_offered"]
        assert metrics["account/prompts_stopped"] == sum(o.completions < 5 for o in flat)
        assert metrics["account/prompts_probed"] == (len(outcomes) if config.zero_variance.probe_size else 0)
        total += tokens
    # A timeout in a group with variance has no gradient, so "kept" occurs with zero_variance.drop as well.
    wasted = "dropped" if "drop" in settings else "stopped"
    assert {name for name, count in total.items() if count} == {wasted, "kept", "gradient"}


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
    """Check the account of each step, and the summary's share of tokens with gradient."""
    rows = steps_of(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    kinds = ("stopped_tokens_total", "dropped_tokens", "kept_tokens_total")
    for row in rows:
        wasted = sum(row[f"account/wasted_{kind}"] for kind in kinds)
        assert row["tokens_total"] == row["gradient_tokens_total"] + wasted
        num_sampled = row["account/prompts_sampled"]
        assert row["account/prompts_offered"] == row["account/prompts_skipped"] + num_sampled
    total = sum(row["tokens_total"] for row in rows)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["generated_tokens"] == total
    share = sum(row["gradient_tokens_total"] for row in rows) / total
    assert summary["gradient_token_share"] == pytest.approx(share)


def test_a_sum_of_metrics_does_not_depend_on_the_distribution_over_ranks():
    rng = random.Random(0)
    rewards = [rng.random() for _ in range(1000)]
    exact_sums, float_sums = set(), set()
    for _ in range(20):
        rng.shuffle(rewards)
        cut = rng.randrange(1000)
        exact_sums.add(exact_sum(rewards[:cut]) + exact_sum(rewards[cut:]))
        float_sums.add(sum(rewards[:cut]) + sum(rewards[cut:]))
    assert len(exact_sums) == 1 < len(float_sums)
    assert float(exact_sums.pop()) == math.fsum(rewards)


@pytest.mark.slow
def test_history_probes_and_rl_zvp_resume_exactly(demo_model, tmp_path):
    """Resume from the checkpoint of step 2, including the record, as if killed after that step."""
    straight = tmp_path / "straight"
    command = [*SHORT, *STAGES, RL_ZVP, "teacher.path=data/built/tiny/model"]
    trained(*command, f"run.dir={straight}", ranks=1)
    assert_account_adds_up(straight)
    rows = steps_of(straight)
    assert any(row["teacher_frac"] > 0 and row["account/teacher_tokens_total"] > 0 for row in rows)
    for name in ("skipped", "stopped", "refilled"):
        assert sum(row[f"account/prompts_{name}"] for row in rows) > 0, name
    assert sum(row["account/prompts_skipped"] for row in rows[2:]) > 0, "the record is used after resuming"
    assert_resumes_exactly(straight, 4, *command, ranks=1)


@pytest.mark.slow
def test_drop_and_refill_run_on_two_ranks(demo_model, tmp_path):
    """All stages that combine with refill; every step trains on eight groups or ends short."""
    trained(*SHORT, *STAGES, DROP, REFILL, f"run.dir={tmp_path}")
    assert_account_adds_up(tmp_path)
    for row in steps_of(tmp_path):
        num_trained = row["account/prompts_sampled"] - row["account/prompts_dropped"]
        assert num_trained == 8 or (num_trained < 8 and row["account/rounds"] >= 4)
        assert row["account/prompts_refilled"] == row["account/prompts_sampled"] - 8
        assert row["account/wasted_stopped_tokens_total"] == 0, "dropping includes stopped probes"
        assert row["abs_dlogp"] < 1e-4 and row["gradient_tokens_total"] > 0


def test_a_record_of_fractions_counts_entirely_right_and_entirely_wrong_completions():
    config = config_of(history=True)
    history = no_history(3)

    def record(prompt: int, *scores: float, binary: bool = False) -> None:
        history.update([scored_group(*scores, prompt=prompt).outcome(binary)], step=0, decay=0.1)

    def after(*scores: float, binary: bool = False) -> float:
        outcome = scored_group(*scores, prompt=1).outcome(binary)
        return zero_variance_after(history, outcome, config.zero_variance.prior, reward__binary=binary)

    record(0, *[0.5] * 4, *[1.0] * 3, 0.0)
    assert (history.solved[0], history.unsolved[0], history.tried[0]) == (3, 1, 8)
    beta = [scipy.stats.betabinom(8, n + 0.2, 8 - n + 0.2).pmf(8) for n in (3, 1)]
    assert skip_prob(history, 0, 1, config) == pytest.approx(sum(beta))
    assert after(*[0.5] * 4) == 0 and after(*[0.0] * 4) > 0.5
    # Fractions are wrong in a stage with reward.binary, and have variance in the stage after it.
    record(1, *(i / 10 for i in range(1, 9)), binary=True)
    assert skip_prob(history, 1, 1, config_of(history=True, reward__binary=True)) > 0.8
    assert skip_prob(history, 1, 1, config) < 0.01
    assert after(*[0.0] * 4, binary=True) > 0.9 > after(*[0.0] * 4)
    record(2, *[0.9] * 8)
    assert skip_prob(history, 2, 1, config) < 0.01, "neither all right nor all wrong"


def test_a_saved_record_without_unsolved_counts_loads_with_the_difference():
    fields = {name: value for name, value in vars(no_history(1)).items() if name != "unsolved"}
    fields |= {"tried": torch.tensor([5.0]), "solved": torch.tensor([2.0])}
    assert PromptHistory(**fields).unsolved == 3


def test_offline_scores_of_fractions_seed_the_record_and_bound_the_window(tmp_path):
    """A prompt whose completions are half partly right and half wrong does not count as never solved."""
    prompts = make_prompts(3)
    rows = [{"model": "m", "kinds": ["math"], "max_new_tokens": 4, "stop": []}]
    for prompt, (pass_rate, wrong_rate) in zip(prompts, [(0.0, 0.5), (0.0, 1.0), (1.0, 0.0)]):
        rates = {"pass_rate": pass_rate, "wrong_rate": wrong_rate}
        rows.append({"prompt_sha": prompt_sha(prompt), "num_samples": 8, "mean_tokens": 3.0} | rates)
    file = tmp_path / "scores.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    selected, scores = keep_by_offline_scores(prompts, str(file), 0.1, 0.9, binary=False)
    assert selected == [0]
    record = PromptHistory.from_offline(scores, 8)
    assert (record.solved[0], record.unsolved[0], record.tried[0]) == (0, 4, 8)
    with pytest.raises(ValueError, match="pass rate"):
        keep_by_offline_scores(prompts, str(file), 0.1, 0.9, binary=True)
    window = Window(str(file), (0.1, 0.9), rollout=make_config("rollout.max_new_tokens=9").rollout)
    assert [note.split(maxsplit=1)[1] for note in notes_of_scores(prompts, [None, *scores], window)] == [
        f"are of another verifier than {', '.join(sorted({prompt.kind for prompt in prompts}))}",
        "lack 1 training prompts, which stay", "have max_new_tokens 4, the run has 9",
    ]  # fmt: skip
    assert notes_of_scores(prompts, scores, Window(None, (0.0, 1.0))) == []
