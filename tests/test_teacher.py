"""A teacher (stage 3b of zero-variance elimination) against loops, sums over a vocabulary and transformers.

The oracle of the loss is written per token in float64: which groups are taught, the advantages of a taught
token, and the weight of every token. Groups of both kinds are in one update, because a wrong weight of one
kind against the other is the mistake to find.
"""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import reference
import torch
from conftest import assert_close, save_small_moe
from helpers import make_config, make_group, make_prompts
from transformers import AutoModelForCausalLM

import configure
import lifecycle
import memory_plan
import moe_model
import train_rl
from batch import PolicyOutputs
from data.prompts import prompt_sha
from data.score import model_digest
from data.stages import Offers
from data.tiny import build_tokenizer
from extras.base import Launch, active
from extras.teacher import EXTRA, Lesson, Teacher, taught_rows, teacher_config
from runtime.checkpoint import TrainState
from runtime.memory import standing_bytes
from runtime.metrics import Clock, batch_metrics, reduce_metrics

pytestmark = pytest.mark.usefixtures("one_rank")
RULES = ("all_wrong", "zero_variance", "every")
LOSS_AGGS = ("sequence_mean", "token_mean", "token_group_mean", "sequence_sum", "fixed_length")
GROUP_SIZE = 4


def config_of(**settings) -> train_rl.Config:
    """Make a config with a teacher; settings: of section `teacher`, or section__key."""
    return make_config(section="teacher", **({"path": "unused"} | settings))


def random_groups(rng: random.Random) -> list[train_rl.Group]:
    """Draw groups: all wrong, all right, mixed, tied at one half, with timeouts, and ragged."""
    kinds = [[False], [True], [True, False], [False, None], [None], [True, False, None], [True, None]]
    groups = []
    for slot in range(8):
        rights = [rng.choice(kinds[slot % len(kinds)]) for _ in range(GROUP_SIZE)]
        share = rng.choice([0.0, 0.0, 0.5])
        lengths = [rng.randint(1, 6) for _ in rights]
        groups.append(make_group(slot, slot, lengths, rights, [share] * GROUP_SIZE))
    return groups


def taught_batch(groups, config: train_rl.Config, rng: random.Random) -> train_rl.RolloutBatch:
    """Make a batch with random log-probabilities of policy and teacher; padding is no probability."""
    batch = train_rl.collate(groups, make_prompts(100), [[1, 2]] * 100, config.reward.binary)
    mask = batch.response_mask

    def noise(low: float, high: float, padding: float = 9.0) -> torch.Tensor:
        values = torch.tensor([[rng.uniform(low, high) for _ in row] for row in mask.tolist()])
        return values.masked_fill(~mask, padding)

    batch.old_logprobs = noise(-3, -0.1)
    batch.rollout_logprobs = batch.old_logprobs.clone()
    batch.entropy = noise(0, 2)
    batch.rewards = train_rl.compute_rewards(batch, None, [], config)
    if config.teacher.is_on:
        logprobs = noise(-6, -0.1, padding=7.0)
        confidence = torch.tensor([rng.choice([0.0, 0.25, 1.0]) for _ in groups])[batch.group_index]
        batch.extras["teacher"] = Lesson(taught_rows(batch, config), logprobs, confidence)
    batch.advantages = train_rl.token_advantages(batch, config)
    return batch


def is_taught(group: train_rl.Group, rule: str) -> bool:
    """Decide by the words of the setting whether a group is taught."""
    verdicts = [completion.verdict for completion in group.completions]
    scores = [verdict.reward for verdict in verdicts if verdict.status in ("ok", "wrong")]
    if rule == "every":
        return bool(scores)
    return len(scores) >= 2 and len(set(scores)) == 1 and (rule == "zero_variance" or scores[0] == 0)


# ---- which groups ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_a_group_is_taught_as_a_whole_or_not_at_all(rule):
    """A length penalty gives equal scores unequal rewards, so that a half-taught group would be seen."""
    penalty = {"reward__overlong_buffer": 6, "rollout__max_new_tokens": 6}
    num_taught = []
    for seed in range(20):
        groups = random_groups(random.Random(seed))
        config = config_of(groups=rule, **penalty)
        batch = taught_batch(groups, config, random.Random(seed))
        plain = taught_batch(groups, config_of(path="null", **penalty), random.Random(seed))
        lesson = batch.extras["teacher"]
        gap = (lesson.logprobs - batch.old_logprobs) * lesson.confidence.unsqueeze(1)
        for number, group in enumerate(groups):
            rows = batch.group_index == number
            taught = is_taught(group, rule)
            num_taught.append(taught)
            assert batch.replaced[rows].tolist() == [taught and ok for ok in batch.valid[rows].tolist()]
            expected = gap if taught else plain.advantages
            mask = batch.response_mask & (rows & batch.valid).unsqueeze(1)
            assert torch.equal(batch.advantages[mask], expected[mask])
            assert not batch.advantages[rows & ~batch.valid].any(), "no verdict, no loss"
        assert not batch.advantages[~batch.response_mask].any()
    assert 0 < sum(num_taught) < len(num_taught)


def test_scores_that_are_equal_up_to_rounding_never_split_a_group():
    groups = [make_group(0, 0, [2, 2], [False, False], [0.0, 9e-7])]
    for rule in RULES:
        batch = taught_batch(groups, config_of(groups=rule), random.Random(0))
        assert len(set(batch.replaced.tolist())) == 1, rule


def test_rl_zvp_keeps_the_right_groups_if_the_teacher_has_the_wrong_ones():
    groups = [make_group(i, i, [3, 3], [right] * 2) for i, right in enumerate([True, False])]
    batch = taught_batch(groups, config_of(zero_variance__rl_zvp=True), random.Random(0))
    assert batch.replaced.tolist() == [False, False, True, True]
    assert_close(batch.advantages[:2], 0.1 * batch.entropy[:2], rtol=1e-6)


def test_a_binary_reward_makes_partly_right_groups_wrong():
    groups = [make_group(0, 0, [1, 1], [False, False], [0.5, 0.25])]
    for binary in (True, False):
        batch = taught_batch(groups, config_of(reward__binary=binary), random.Random(0))
        assert batch.replaced.tolist() == [binary] * 2


# ---- weights of the loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("loss_agg", LOSS_AGGS)
def test_loss_and_gradient_of_mixed_updates(loss_agg, rule, float64):
    """Two micro-batches whose cut goes through a group, off-policy, with a truncated correction."""
    level = "entropy_group" if loss_agg == "token_group_mean" else "token"
    for seed in range(4):
        rng = random.Random(seed)
        config = config_of(
            groups=rule, coef=0.3, algorithm__loss_agg=loss_agg, algorithm__ratio_level=level,
            rollout__max_new_tokens=8, algorithm__rollout_correction="token_tis",
        )  # fmt: skip
        groups = random_groups(rng)
        batch = taught_batch(groups, config, rng)
        mask = batch.response_mask
        lengths = mask.sum(dim=1).tolist()

        def ragged(values: torch.Tensor, lengths=lengths) -> list[list[float]]:
            return [row[:length] for row, length in zip(values.tolist(), lengths)]

        expected = oracle_advantages(batch, groups, rule, ragged)
        logprobs = (batch.old_logprobs + (torch.rand(mask.shape) - 0.5)).requires_grad_()
        counts = torch.tensor([len(mask), int(mask.sum())])
        losses = []
        for rows in (range(6), range(6, len(mask))):
            rows = list(rows)
            loss, _ = train_rl.micro_batch_loss(
                PolicyOutputs(logprobs[rows], batch.entropy[rows]), batch, rows, counts, 1.0, config
            )
            loss.backward()
            losses.append(loss.item())
        settings = config.algorithm.model_dump() | {"max_new_tokens": 8, "log_vocab": 1.0}
        lists = (ragged(logprobs), ragged(batch.old_logprobs), expected, ragged(batch.entropy), None)
        assert_close(sum(losses), -reference.policy_objective(*lists, settings))
        slopes = reference.policy_objective_slope(*lists, settings)
        assert_close(logprobs.grad[mask], [-slope for row in slopes for slope in row])


def oracle_advantages(batch, groups, rule: str, ragged) -> list[list[float]]:
    """Return the advantages of all tokens, group by group, from lists."""
    old = ragged(batch.old_logprobs)
    teacher = ragged(batch.extras["teacher"].logprobs)
    rewards = batch.rewards.tolist()
    confidence = batch.extras["teacher"].confidence.tolist()
    expected = []
    for group in groups:
        start = len(expected)
        valid = [c.verdict.status in ("ok", "wrong") for c in group.completions]
        of_rewards = reference.group_advantages(rewards[start : start + len(valid)], valid)
        for i, ok in enumerate(valid):
            row = start + i
            if is_taught(group, rule) and ok:
                factor = 0.3 * confidence[row]
                expected.append([factor * (t - o) for t, o in zip(teacher[row], old[row])])
            else:
                expected.append([of_rewards[i]] * len(old[row]))
    return expected


# ---- the teacher's forward pass ----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    save_small_moe(tmp_path / "teacher")
    return tmp_path / "teacher"


def lesson_of(
    config: train_rl.Config, batch: train_rl.RolloutBatch, teacher: Teacher | None
) -> Lesson | None:
    """Let the teacher compute a batch as main() does."""
    run = SimpleNamespace(config=config, clock=Clock({}), extras={"teacher": teacher})
    for extra in active(config):
        extra.after_rewards(run, batch, train_rl.forward_batch)
    return batch.extras.get("teacher")


@pytest.mark.parametrize("rule", RULES)
def test_the_teacher_computes_its_groups_only_and_with_its_own_router(rule, folder):
    """Against transformers. The engine's routes are of a student with other layers and experts."""
    config = config_of(
        groups=rule, rollout__temperature=0.7, algorithm__router_replay="r3", model__dtype="float32",
        train__micro_batch_tokens=16,
    )  # fmt: skip
    groups = random_groups(random.Random(1))
    batch = train_rl.collate(groups, make_prompts(100), [[3, 1, 2]] * 100)
    batch.routed_experts = [
        torch.randint(0, 2, (2 + len(ids), 5, 1), dtype=torch.uint8) for ids in batch.completion_ids
    ]
    batch.old_logprobs = torch.zeros(batch.response_mask.shape)
    teacher = moe_model.build_policy(config.model, folder, None, torch.device("cpu"))
    lesson = lesson_of(config, batch, Teacher({}, teacher))
    assert torch.equal(lesson.is_taught, taught_rows(batch, config)) and lesson.confidence.eq(1).all()
    assert lesson.is_taught.any() and not lesson.is_taught.all()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    for row, ids in enumerate(batch.completion_ids):
        expected = torch.zeros(len(ids))
        if lesson.is_taught[row]:
            with torch.no_grad():
                logits = model(torch.tensor([[3, 1, 2, *ids]])).logits[0, 2:-1]
            expected = (logits / 0.7).log_softmax(1)[torch.arange(len(ids)), ids]
        actual = lesson.logprobs[row, : len(ids)]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)  # float32, two implementations


# ---- metrics, budget ---------------------------------------------------------------------------------------


def test_metrics_by_hand():
    """Two of three groups are all wrong; a taught completion has no sign that could be inverted."""
    groups = [
        make_group(0, 0, [2, 1], [False, False]), make_group(1, 1, [1, 1], [True, False]),
        make_group(2, 2, [3, 1], [False, False]),
    ]  # fmt: skip
    config = config_of()
    batch = taught_batch(groups, config, random.Random(0))
    taught = batch.response_mask & torch.tensor([[True], [True], [False], [False], [True], [True]])
    batch.advantages[taught] = 1.0  # wrong completions, pushed up
    batch.advantages[2:4, 0] = torch.tensor([-1.0, -1.0])  # a right completion, pushed down
    metrics = reduce_metrics(batch_metrics(batch, groups, config) | train_rl.metrics_of(config, batch))
    assert metrics["teacher_frac"] == pytest.approx(2 / 3)
    assert metrics["account/teacher_tokens_total"] == 7
    gap = (batch.old_logprobs - batch.extras["teacher"].logprobs)[taught]
    assert metrics["teacher_kl_k1"] == pytest.approx(gap.mean().item(), rel=1e-5)
    assert metrics["inversion_frac"] == 1 / 2
    plain = taught_batch(groups, config_of(path="null"), random.Random(0))
    assert not [name for name in batch_metrics(plain, groups, config) if "teacher" in name]


@pytest.mark.parametrize("cost, is_last", [(0, False), (0.5, False), (1, True)])
def test_the_budget_of_tokens_charges_the_teacher(cost, is_last):
    config = config_of(token_cost=cost, train__max_generated_tokens=100)
    state = TrainState()
    step = {"tokens_total": 40, "gradient_tokens_total": 0, "account/wasted_dropped_tokens": 0, "score": 0.0}
    for _ in range(2):
        metrics = step | {"account/teacher_tokens_total": 10}
        state.add_step(metrics, lifecycle.HandOver(), 0, train_rl.charged_tokens(config, metrics))
    assert state.generated_tokens == 80 and state.account["teacher_tokens"] == 20
    assert state.is_last(config) == is_last
    without_teacher = make_config("train.max_generated_tokens=100")  # as in a later stage
    assert state.is_last(without_teacher) == is_last


def test_the_memory_of_the_teacher_is_that_of_its_weights(folder):
    hf_config = moe_model.load_config(folder)
    plain, taught = (
        standing_bytes(memory_plan.trainer_memory(config, hf_config, 1, on_gpu=False))
        for config in (config_of(path=path, model__dtype="float32") for path in ("null", folder))
    )
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    assert taught - plain == 4 * sum(parameter.numel() for parameter in model.parameters())


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.fixture
def student(tmp_path):
    """Return the settings of a policy's model, and its tokenizer; the teacher's folder gets the same one."""
    save_small_moe(tmp_path / "teacher")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "teacher")
    return moe_model.load_config(tmp_path / "teacher"), tokenizer


def teacher_in(tmp_path, **settings) -> train_rl.Config:
    teacher_config.cache_clear()  # the tests change config.json
    values = {"rollout__max_prompt_tokens": 8, "rollout__max_new_tokens": 8}
    return config_of(path=tmp_path / "teacher", **values | settings)


def check(config: train_rl.Config, hf_config, tokenizer, state: TrainState, prompts=(), offers=()) -> Teacher:
    """Check a teacher as set_up() does."""
    loaded = SimpleNamespace(train=prompts)
    context = memory_plan.max_model_len(config)
    launch = Launch(config, [config], hf_config, tokenizer, loaded, offers, state, context)
    EXTRA.check(launch)
    return launch.extras["teacher"]


def change_json(path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_teacher_with_the_same_tokenizer_is_accepted_and_remembered(student, tmp_path):
    state = TrainState()
    check(teacher_in(tmp_path), *student, state)
    assert len(bytes.fromhex(state.extras["teacher"]["weights"])) == 8
    check(teacher_in(tmp_path), *student, state)


def test_another_vocabulary_is_refused(student, tmp_path):
    vocabulary = json.loads((tmp_path / "teacher" / "tokenizer.json").read_text())
    ids = vocabulary["model"]["vocab"]
    ids["7"], ids["8"] = ids["8"], ids["7"]
    (tmp_path / "teacher" / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ValueError, match="teacher.path.*vocabulary"):
        check(teacher_in(tmp_path), *student, TrainState())


@pytest.mark.parametrize(
    "changes, settings, word",
    [
        ({"vocab_size": 23}, {}, "vocabulary"),
        ({"max_position_embeddings": 15}, {}, "context"),
        ({}, {"model__ep_size": 3}, "ep_size"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_by_name(changes, settings, word, student, tmp_path):
    change_json(tmp_path / "teacher" / "config.json", **changes)
    with pytest.raises(ValueError, match=f"teacher.path.*{word}"):
        check(teacher_in(tmp_path, **settings), *student, TrainState())


def test_a_missing_folder_is_named(folder, tmp_path):
    config = config_of(path=tmp_path / "none", model__dtype="float32")
    with pytest.raises(ValueError, match="teacher.path.*config.json") as caught:
        memory_plan.trainer_memory(config, moe_model.load_config(folder), 1, on_gpu=False)
    assert "model.path" not in str(caught.value)


def test_a_resume_with_another_teacher_is_refused(student, tmp_path):
    state = TrainState(extras={"teacher": {"weights": "0" * 16}})
    with pytest.raises(ValueError, match="teacher.path.*changed.*resume"):
        check(teacher_in(tmp_path), *student, state)
    check(teacher_in(tmp_path, checkpoint__resume="weights"), *student, state)
    assert state.extras["teacher"]["weights"] != "0" * 16


def test_stages_share_one_teacher():
    def stages(first: str, second: str) -> str:
        parts = [("a", first, ", until: {steps: 1}"), ("b", second, "")]
        return ", ".join(
            f"{{name: {name}, teacher: {{path: {teacher}}}{until}}}" for name, teacher, until in parts
        )

    with pytest.raises(ValueError, match="teacher.path.*x, y"):
        make_config(f"stages=[{stages('x', 'y')}]")
    config = make_config(f"stages=[{stages('null', 'y')}]")
    assert configure.widest(configure.stage_configs(config), on_gpu=False).teacher.path == "y"


# ---- the teacher's pass rates ------------------------------------------------------------------------------


@pytest.fixture
def scored(student, tmp_path):
    """Return (load, file): the score file of three prompts, and a function that loads its pass rates."""
    prompts = make_prompts(3)
    file = tmp_path / "scores.jsonl"
    header = {"model": f"teacher {model_digest(tmp_path / 'teacher')}", "kinds": ["exact"]}
    rates = [(0.25, 0.75), (1.0, 0.0), (None, None)]
    rows = [
        {"prompt_sha": prompt_sha(prompt), "pass_rate": rate, "wrong_rate": wrong, "mean_tokens": 1.0}
        for prompt, (rate, wrong) in zip(prompts, rates)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in [header, *rows]))

    def load(prompts=prompts, indices=(0, 1, 2), state=None, **settings):
        config = teacher_in(tmp_path, scores=file, **settings)
        return check(config, *student, state or TrainState(), prompts, [Offers(indices)]).confidences

    return load, file


def test_a_pass_rate_is_the_confidence_of_the_prompts_groups(scored, folder):
    load, file = scored
    confidences = load()
    prompts = make_prompts(3)
    assert confidences == {str(file): dict(zip(map(prompt_sha, prompts), [0.25, 1.0, 0.0]))}
    config = config_of(groups="every", scores=file, model__dtype="float32")
    groups = [make_group(i, i, [1, 2], [True, False]) for i in (1, 0)]
    batch = train_rl.collate(groups, prompts, [[1]] * 3)
    batch.old_logprobs = torch.zeros(batch.response_mask.shape)
    teacher = moe_model.build_policy(config.model, folder, None, torch.device("cpu"))
    lesson = lesson_of(config, batch, Teacher(confidences, teacher))
    assert lesson.confidence.tolist() == [1.0, 1.0, 0.25, 0.25]


def test_scores_of_another_model_or_of_other_prompts_are_refused(scored):
    load, file = scored
    assert load(make_prompts(9), (0, 2)), "a stage may offer fewer prompts"
    with pytest.raises(ValueError, match="teacher.scores.*lacks 1 of 4"):
        load([*make_prompts(3), replace(make_prompts(1)[0], text="new")], (0, 1, 2, 3))
    lines = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps({"model": "teacher 0123"}), *lines[1:]]) + "\n")
    with pytest.raises(ValueError, match="teacher.scores.*another model"):
        load()
    file.unlink()
    with pytest.raises(ValueError, match="scores.jsonl.*data.score"):
        load()


def test_a_resume_with_changed_pass_rates_is_refused(scored):
    load, file = scored
    state = TrainState()
    load(state=state)
    text = file.read_text()
    file.write_text(text.replace('"mean_tokens": 1.0', '"mean_tokens": 2.0'))
    load(state=state)
    file.write_text(text.replace('"pass_rate": 0.25', '"pass_rate": 0.125'))
    with pytest.raises(ValueError, match="teacher.scores.*changed.*resume"):
        load(state=state)
    load(state=state, checkpoint__resume="weights")
    load(state=state)
