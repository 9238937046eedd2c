"""GRESO (arXiv 2506.02177): skipping by visits in a row without variance, against lists of visits.

The expected values are those of a literal account: every prompt keeps the mean reward of each visit, and the
latest ones are counted from the end.
"""

import random

import pytest
import torch
from helpers import FakeRanks, hashed_answer, make_config, make_group, make_run, no_history

import greso
import train_rl
from data.history import PromptHistory
from data.stages import Offers
from runtime.checkpoint import TrainState
from runtime.stages import StagePosition
from settings import Config

GRESO = {
    "history": True, "skip_rule": "consecutive", "drop": True, "refill": True, "round_size": "adaptive",
    "max_rounds": 16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    FakeRanks(1).install(monkeypatch)


def greso_config(**settings) -> Config:
    return make_config(section="zero_variance", **GRESO | settings)


def in_a_row(visits: list[float], reward: float) -> int:
    """Count the latest visits at which all completions had this reward."""
    count = 0
    for mean in reversed(visits):
        if mean != reward:
            break
        count += 1
    return count


@pytest.mark.parametrize("seed", range(5))
def test_skipping_and_exploration_are_those_of_the_lists_of_visits(seed):
    rng, history, config = (
        random.Random(seed),
        no_history(6),
        greso_config(target_solved=0.3, target_unsolved=0.2),
    )
    visits, p_easy, p_hard = {prompt: [] for prompt in range(6)}, 0.5, 0.5
    found = set()
    for step in range(150):
        groups = []
        for slot, prompt in enumerate(rng.sample(range(6), 3)):
            rights = rng.choice([[True] * 4, [False] * 4, [True, False, False, True], [None] * 4])
            groups.append(make_group(slot, prompt, [3] * 4, rights))
            if rights[0] is not None:
                visits[prompt].append(sum(rights) / 4)
        outcomes = [group.outcome(False) for group in groups]
        history.update(outcomes, step, config.zero_variance.history_decay)
        greso.update_streaks(history, outcomes)
        greso.adjust_exploration(history, outcomes, 0.3, 0.2)
        rights = [[v.status == "ok" for v in group.verdicts if v.status != "timeout"] for group in groups]
        easy = sum(bool(r) and all(r) for r in rights) / 3
        hard = sum(bool(r) and not any(r) for r in rights) / 3
        p_easy = max(p_easy - 0.01, 0.05) if easy >= 0.3 else min(p_easy + 0.01, 0.95)
        p_hard = max(p_hard - 0.01, 0.05) if hard >= 0.2 else min(p_hard + 0.01, 0.95)
        for prompt in range(6):
            z_easy, z_hard = in_a_row(visits[prompt], 1.0), in_a_row(visits[prompt], 0.0)
            expected = 1 - max(p_easy**z_easy if z_easy else p_hard**z_hard, 0.01)
            assert train_rl.skip_prob_of(prompt, history, step, config) == pytest.approx(expected, abs=1e-12)
            found.add((z_easy > 1, z_hard > 1))
    assert found == {(True, False), (False, True), (False, False)}


@pytest.mark.parametrize("shares", [(0.0, 0.05), (0.9, 0.95)])
def test_exploration_stays_in_its_range(shares):
    history, low_or_high = no_history(1), shares[1]
    outcome = make_group(0, 0, [3] * 4, [True] * 4).outcome(False)
    for _ in range(60):
        greso.adjust_exploration(history, [outcome], 0.0 if low_or_high < 0.5 else 2.0, 2.0)
    assert history.explore.tolist() == pytest.approx([low_or_high, 0.95])


@pytest.mark.parametrize("varied, size", [(0, 12), (4, 12), (5, 9), (6, 5), (7, 3), (8, 0)])
def test_a_round_is_sized_by_the_share_that_had_no_variance(varied, size):
    """Eight are wanted of twelve sampled, v are useful: 1.25 (8 - v) / (v / 12), at most 12."""
    groups = [make_group(slot, slot, [3] * 4, [True, False, True, slot >= varied]) for slot in range(12)]
    for slot in range(varied, 12):
        groups[slot] = make_group(slot, slot, [3] * 4, [True] * 4)
    outcomes = {group.slot: group.outcome(False) for group in groups}
    config = greso_config(rollout__prompts_per_step=8, rollout__group_size=4)
    assert train_rl.num_new_prompts(outcomes, list(range(12)), [], config) == size


def test_a_step_trains_on_as_many_groups_as_asked_for_and_drops_what_is_too_much():
    config = greso_config(rollout__prompts_per_step=8, rollout__group_size=4)
    run = make_run(config, hashed_answer([0.5] * 40, 3), 40)
    groups, outcomes, account = train_rl.sample_step(run)
    useful = [slot for slot, outcome in sorted(outcomes.items()) if outcome.has_variance]
    assert account["rounds"] == 1 and len(outcomes) == 12 and len(useful) > 8
    groups, kept = train_rl.drop_and_deal(groups, outcomes, config)
    assert list(kept) == [group.slot for group in groups] == useful[:8]


@pytest.mark.parametrize(
    "offers, length",
    [(Offers(range(6)), 6), (Offers(range(2, 6)), 4), (Offers(range(4), ((2, 1.0), (2, 2.5))), 7)],
    ids=["all", "a stage", "weights"],
)
def test_exploration_adapts_after_one_epoch_of_the_stage(offers, length):
    """An epoch offers 2 + 5 prompts of sets of two with weights 1 and 2.5; 100 are of stages before."""
    state = TrainState(consumed_prompts=100 + length, stage=StagePosition(first_prompt=100))
    run = make_run(greso_config(), None, 6, offers=offers, state=state)
    outcome = make_group(0, 2, [3] * 4, [True, False, True, True]).outcome(False)
    train_rl.update_history(run, [outcome])
    assert run.history.explore.tolist() == [0.5, 0.5]
    state.consumed_prompts += 1
    train_rl.update_history(run, [outcome])
    assert run.history.explore.tolist() == pytest.approx([0.51, 0.51])


def zero_variance_share(config: Config, rates: list[float], num_steps: int) -> float:
    """Simulate the steps of a run; return the share of groups without variance in their second half."""
    run = make_run(config, hashed_answer(rates, 1), len(rates))
    flat = 0
    total = 0
    for step in range(num_steps):
        _, outcomes, _ = train_rl.sample_step(run)
        train_rl.update_history(run, list(outcomes.values()))
        run.state.step += 1
        if 2 * step >= num_steps:
            flat += sum(not o.has_variance for o in outcomes.values())
            total += len(outcomes)
    return flat / total


def test_the_share_without_variance_comes_down_to_the_one_aimed_at():
    """A pool of which 0.7 is always or never solved: of the groups less than 1/4 are.

    A step of 12 groups hits a target as often as it misses it, so its mean lies below.
    """
    rates, sizes = [0.0] * 28 + [1.0] * 21 + [0.5] * 21, {"rollout__prompts_per_step": 8}
    plain = make_config(section="zero_variance", **sizes)
    assert zero_variance_share(plain, rates, 30) == pytest.approx(0.7, abs=0.1)
    assert 0.1 < zero_variance_share(greso_config(**sizes), rates, 100) < 0.3


def test_a_record_without_streaks_is_read_as_one_that_starts():
    """Checkpoints hold the record as a dictionary, and may lack what only this rule reads."""
    saved = {name: value for name, value in vars(no_history(3)).items() if name not in ("streak", "explore")}
    history = PromptHistory(**saved)
    assert history.streak.tolist() == [0, 0, 0] and torch.equal(
        history.explore, torch.full((2,), 0.5).double()
    )
