"""GRESO (arXiv 2506.02177): skipping by consecutive visits without variance, against lists of visits.

The expected values come from a literal account: every prompt has the list of the mean rewards of all visits,
and the latest visits are counted from the end.
"""

import random

import pytest
import torch
from helpers import hashed_answer, make_config, make_group, make_run, no_history

import greso
import train_rl
from data.history import PromptHistory
from data.stages import Offers
from runtime.checkpoint import TrainState
from runtime.stages import StagePosition
from settings import Config

pytestmark = pytest.mark.usefixtures("one_rank")
GRESO = {
    "history": True, "skip_rule": "consecutive", "drop": True, "refill": True, "round_size": "adaptive",
    "max_rounds": 16,
}  # fmt: skip


def greso_config(**settings) -> Config:
    return make_config(section="zero_variance", **GRESO | settings)


def num_latest(visits: list[float], reward: float) -> int:
    """Count the latest consecutive visits at which all completions had this reward."""
    count = 0
    for mean in reversed(visits):
        if mean != reward:
            break
        count += 1
    return count


@pytest.mark.parametrize("seed", range(5))
def test_skipping_and_exploration_agree_with_the_lists_of_visits(seed):
    rng = random.Random(seed)
    history = no_history(6)
    config = greso_config(target_solved=0.3, target_unsolved=0.2)
    visits = {prompt: [] for prompt in range(6)}
    p_easy = p_hard = 0.5
    covered = set()
    for step in range(150):
        groups = []
        for slot, prompt in enumerate(rng.sample(range(6), 3)):
            failed = [[None] * 4, [True, None, None, None]]  # a single verdict has no baseline
            rights = rng.choice([[True] * 4, [False] * 4, [True, False, False, True], *failed])
            groups.append(make_group(slot, prompt, [3] * 4, rights))
            if rights not in failed:
                visits[prompt].append(sum(rights) / 4)
        outcomes = [group.outcome(False) for group in groups]
        history.update(outcomes, step, config.zero_variance.history_decay)
        greso.update_streaks(history, outcomes)
        greso.adjust_exploration(history, outcomes, 0.3, 0.2)
        verdicts = [[c.verdict for c in group.completions] for group in groups]
        rights = [[v.status == "ok" for v in of_group if v.status != "timeout"] for of_group in verdicts]
        easy = sum(len(r) > 1 and all(r) for r in rights) / 3
        hard = sum(len(r) > 1 and not any(r) for r in rights) / 3
        p_easy = max(p_easy - 0.01, 0.05) if easy >= 0.3 else min(p_easy + 0.01, 0.95)
        p_hard = max(p_hard - 0.01, 0.05) if hard >= 0.2 else min(p_hard + 0.01, 0.95)
        for prompt in range(6):
            z_easy, z_hard = num_latest(visits[prompt], 1.0), num_latest(visits[prompt], 0.0)
            expected = 1 - max(p_easy**z_easy if z_easy else p_hard**z_hard, 0.01)
            assert train_rl.skip_prob(prompt, history, step, config) == pytest.approx(expected, abs=1e-12)
            covered.add((z_easy > 1, z_hard > 1))
    assert covered == {(True, False), (False, True), (False, False)}


@pytest.mark.parametrize("target, bound", [(0.0, 0.05), (2.0, 0.95)])
def test_exploration_stays_in_its_range(target, bound):
    history = no_history(1)
    outcome = make_group(0, 0, [3] * 4, [True] * 4).outcome(False)
    for _ in range(60):
        greso.adjust_exploration(history, [outcome], target, 2.0)
    assert history.explore.tolist() == pytest.approx([bound, 0.95])


@pytest.mark.parametrize("varied, size", [(0, 12), (4, 12), (5, 9), (6, 5), (7, 3), (8, 0)])
def test_a_round_is_sized_by_the_share_of_groups_with_variance(varied, size):
    """v of 12 sampled groups have variance, and the step needs 8: 1.25 (8 - v) / (v / 12), at most 12."""
    groups = [
        make_group(slot, slot, [3] * 4, [True, False, True, False] if slot < varied else [True] * 4)
        for slot in range(12)
    ]
    outcomes = {group.slot: group.outcome(False) for group in groups}
    config = greso_config(rollout__prompts_per_step=8, rollout__group_size=4)
    assert train_rl.num_new_prompts(outcomes, list(range(12)), [], config) == size


def test_a_step_trains_on_prompts_per_step_groups_and_drops_the_surplus():
    config = greso_config(rollout__prompts_per_step=8, rollout__group_size=4)
    run = make_run(config, hashed_answer([0.5] * 40, 3), 40)
    groups, outcomes, account = train_rl.sample_step(run)
    useful = [slot for slot, outcome in sorted(outcomes.items()) if outcome.has_variance]
    assert account["rounds"] == 1 and len(outcomes) == 12 and len(useful) > 8
    groups, trained = train_rl.drop_and_deal(groups, outcomes, config)
    assert list(trained) == [group.slot for group in groups] == useful[:8]


@pytest.mark.parametrize(
    "offers, length",
    [(Offers(range(6)), 6), (Offers(range(2, 6)), 4), (Offers(range(4), ((2, 1.0), (2, 2.5))), 7)],
    ids=["all", "a stage", "weights"],
)
def test_exploration_adapts_after_one_epoch_of_the_stage(offers, length):
    """Sets of two prompts with weights 1 and 2.5 offer 2 + 5 prompts in an epoch. Earlier stages took 100."""
    state = TrainState(consumed_prompts=100 + length, stage=StagePosition(first_prompt=100))
    run = make_run(greso_config(), None, 6, offers=offers, state=state)
    outcome = make_group(0, 2, [3] * 4, [True, False, True, True]).outcome(False)
    train_rl.update_history(run, [outcome])
    assert run.history.explore.tolist() == [0.5, 0.5]
    state.consumed_prompts += 1
    train_rl.update_history(run, [outcome])
    assert run.history.explore.tolist() == pytest.approx([0.51, 0.51])
    run.config = make_config()
    train_rl.update_history(run, [outcome])
    assert run.history.explore.tolist() == pytest.approx([0.51, 0.51]), "a stage without GRESO adapts nothing"


def test_a_saved_record_without_streaks_loads_with_initial_streaks():
    """Checkpoints store the record as a dictionary. Fields of the GRESO rule may be absent."""
    saved = {name: value for name, value in vars(no_history(3)).items() if name not in ("streak", "explore")}
    history = PromptHistory(**saved)
    assert history.streak.tolist() == [0, 0, 0] and history.explore.tolist() == [0.5, 0.5]
    assert history.explore.dtype == torch.float64
