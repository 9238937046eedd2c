"""Stages: when a stage ends, the settings and prompts of a stage, and resuming a run with stages.

`Simulated` is a second implementation of the hand-over rule. It evaluates the whole series of a stage each
time, while the code keeps a position.
"""

import json
import math
import random
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SMALL, trained
from helpers import assert_same_run, assert_same_weights, no_history, one_token, rows_of, steps_of

import lifecycle
import train_rl
from configure import stage_configs, widest
from data.prompts import DataSettings, prompt_sha
from data.stages import Offers, Window, load_stages, offers_of, refuse_holdouts, unite
from data.stream import prompts_of_step
from runtime.checkpoint import TrainState, check_fits, state_of, topology
from runtime.config import flat_settings, free_per_stage, setting_fields
from runtime.stages import HandOver, StagePosition, after_measurement, after_step, end_of_stage
from train_rl import Config, load_config

TRAIN = "data.train=[{path: a.jsonl}]"
TINY = "data/built/tiny"

PER_STAGE = free_per_stage(Config)


def load(stages: str, *settings: str) -> Config:
    return load_config([TRAIN, *settings, f"stages={stages}"])


def error_of(stages: str, *settings: str) -> str:
    with pytest.raises(ValueError) as caught:
        load(stages, *settings)
    assert type(caught.value) is ValueError and "\n" not in str(caught.value)
    return str(caught.value)


# ---- the hand-over -----------------------------------------------------------------------------------------


class Simulated:
    """A stage as its whole series: the tokens of each step, and all measurements."""

    def __init__(self, rule: dict):
        self.rule = rule
        self.tokens = []
        self.values = []

    def is_over(self) -> bool:
        record = 0  # index of the last value that exceeded all values before it
        for i, value in enumerate(self.values):
            if value > self.values[record]:
                record = i
        reached = {
            "steps": len(self.tokens),
            "tokens": sum(self.tokens),
            "accuracy": self.values[-1] if self.values else -math.inf,
            "plateau": len(self.values) - 1 - record,
        }
        return any(reached[name] >= self.rule[name] for name in reached if name in self.rule)


def random_rule(draw: random.Random) -> dict:
    choices = {
        "steps": draw.randint(1, 30), "tokens": draw.randint(1, 2000), "accuracy": draw.uniform(0.3, 1.0),
        "plateau": draw.randint(1, 6),
    }  # fmt: skip
    return {name: value for name, value in choices.items() if draw.random() < 0.5}


@pytest.mark.parametrize("metric", ["score", "eval/set/accuracy"])
def test_a_stage_ends_when_its_simulation_does(metric):
    """300 series of 60 steps. The position goes through JSON at each step, like in a checkpoint."""
    ends = []
    for seed in range(300):
        draw = random.Random(seed)
        rule = random_rule(draw)
        hand_over = HandOver(metric=metric, **rule)
        simulated = Simulated(rule)
        position = StagePosition()
        for step in range(60):
            if metric != "score" and step % 3 == 0:
                accuracy = draw.random()
                simulated.values.append(accuracy)
                position = after_measurement(position, hand_over, {metric: accuracy, "score": 1.0})
            assert (end_of_stage(position, hand_over) is not None) == simulated.is_over(), (seed, rule, step)
            if simulated.is_over():
                ends.append(step)
                break
            tokens = draw.randint(0, 99)
            score = draw.choice([draw.random(), 0.5, math.nan])
            simulated.tokens.append(tokens)
            if metric == "score" and not math.isnan(score):
                simulated.values.append(score)
            position = after_step(position, hand_over, tokens, {"score": score})
            position = StagePosition(**json.loads(json.dumps(asdict(position))))
    assert len(ends) > 150 and len(set(ends)) > 15, "many series end, at many different steps"


# ---- settings ----------------------------------------------------------------------------------------------


def test_the_settings_of_a_stage_replace_the_settings_of_the_run():
    one, two = stage_configs(
        load(
            "[{name: a, until: {steps: 2}, rollout: {group_size: 4}, data: {train: [{path: b}]}}, "
            "{name: b, algorithm: {clip_eps_high: 0.3}, eval: {every: 7}}]",
            "rollout.group_size=16", "algorithm.clip_eps_low=0.1", "rollout.temperature=0.7",
        )
    )  # fmt: skip
    assert (one.rollout.group_size, two.rollout.group_size) == (4, 16)
    assert [source.path for source in (*one.data.train, *two.data.train)] == ["b", "a.jsonl"]
    assert (one.algorithm.clip_eps_high, two.algorithm.clip_eps_high) == (0.2, 0.3)
    assert one.algorithm.clip_eps_low == two.algorithm.clip_eps_low == 0.1
    assert one.rollout.temperature == two.rollout.temperature == 0.7
    assert (one.eval.every, two.eval.every) == (50, 7)
    plain = load_config([TRAIN])
    assert stage_configs(plain) == [plain]


def test_engine_and_policy_are_built_for_the_largest_stage():
    configs = stage_configs(
        load(
            "[{name: a, until: {steps: 2}, rollout: {max_new_tokens: 9, max_prompt_tokens: 30}}, "
            "{name: b, rollout: {max_new_tokens: 20, max_prompt_tokens: 3}, "
            "algorithm: {kl_coef: 0.1, clip_mode: none}, centering: {enabled: true}, "
            "eval: {max_new_tokens: 40}, train: {micro_batch_tokens: 50000}}]",
            "centering.topk=4",
        )
    )
    largest = widest(configs, on_gpu=False)
    assert lifecycle.max_model_len(largest) == 70 and largest.algorithm.kl_coef == 0.1
    assert largest.centering.enabled, "its memory is counted"
    assert largest.train.micro_batch_tokens == 50000 and largest.eval.max_new_tokens == 40
    plain = load_config([TRAIN])
    assert widest([plain], on_gpu=False) == plain


def test_a_setting_that_is_fixed_for_the_run_is_refused_by_name_in_a_stage():
    sections = set(Config.model_fields)
    assert {*setting_fields(Config), *sections} >= PER_STAGE
    fixed = {"model.ep_size=2", "rollout.dtype=float32", "train.num_steps=7", "train.seed=3", "run.dir=x"}
    fixed |= {"reward.judge_path=x", "checkpoint.every=1", "data.chat=always", "train.zero_stage=2"}
    for text in fixed:
        name, value = text.split("=")
        section, key = name.split(".")
        assert name not in PER_STAGE and section not in PER_STAGE
        message = error_of(f"[{{name: a, until: {{steps: 1}}}}, {{name: b, {section}: {{{key}: {value}}}}}]")
        assert message.startswith(f"stages[1].{name}: ")


A = "{name: a, until: {steps: 3}}"
B = "{name: b}"
HELD_OUT = "data.eval=[{path: held_out.jsonl}]"
ON_HELD_OUT = "metric: eval/held_out/accuracy"
REFUSED = {  # case: (stages, settings, keywords of the message)
    "unknown setting": (
        f"[{A}, {{name: b, rollout: {{group_sze: 1}}}}]", [],
        "stages[1].rollout.group_sze rollout.group_size",
    ),
    "wrong type": (f"[{A}, {{name: b, rollout: {{group_size: x}}}}]", [], "stages[1].rollout.group_size"),
    "unknown rule": ("[{name: a, until: {stpes: 3}}]", [], "stages[0].until.stpes"),
    "no name": ("[{until: {steps: 3}}]", [], "stages[0].name"),
    "nested": (f"[{A}, {{name: b, stages: []}}]", [], "stages[1]"),
    "contradiction in a stage": (
        f"[{A}, {{name: b, zero_variance: {{refill: true}}}}]", [], "stages[1] zero_variance.drop",
    ),
    "a lag": (f"[{A}, {B}]", ["rollout.lag=2"], "rollout.lag 2"),
    "two of a name": (f"[{A}, {A}, {B}]", [], "stages[1] name"),
    "the last stage ends": (f"[{A}]", [], "stages[0] until"),
    "no rule": (f"[{{name: a}}, {B}]", [], "stages[0] until.steps"),
    "longer than the run": (f"[{A}, {B}]", ["train.num_steps=3"], "stages[0] 3"),
    "together longer": (
        f"[{A}, {{name: c, until: {{steps: 4}}}}, {B}]", ["train.num_steps=7"], "stages[1] 7",
    ),
    "a plateau that is too long": (
        f"[{{name: a, until: {{plateau: 6}}}}, {B}]", ["train.num_steps=7"], "stages[0] 7",
    ),
    "an evaluation after the end": (  # the one at step 60 counts for the first stage
        f"[{{name: a, until: {{steps: 60}}}}, {{name: c, until: {{{ON_HELD_OUT}, accuracy: 0.5}}}}, {B}]",
        ["train.num_steps=90", "eval.every=30", HELD_OUT], "stages[1] 90",
    ),
    "more tokens together": (
        f"[{{name: a, until: {{tokens: 6}}}}, {{name: c, until: {{tokens: 6}}}}, {B}]",
        ["train.max_generated_tokens=9"], "stages[1] until.tokens",
    ),
    "more tokens than the run": (
        f"[{{name: a, until: {{tokens: 9}}}}, {B}]", ["train.max_generated_tokens=9"],
        "stages[0] until.tokens train.max_generated_tokens",
    ),
    "no evaluations": (
        f"[{{name: a, until: {{{ON_HELD_OUT}, accuracy: 0.5}}}}, {B}]", ["eval.every=0", HELD_OUT],
        "stages[0] until.metric",
    ),
    "evaluations too far apart": (
        f"[{{name: a, until: {{{ON_HELD_OUT}, plateau: 2}}}}, {B}]",
        ["eval.every=10", "train.num_steps=20", HELD_OUT], "stages[0] 20",
    ),
    "no such set": (
        f"[{{name: a, until: {{metric: eval/held_in/accuracy, accuracy: 0.5}}}}, {B}]", [HELD_OUT],
        "until.metric eval/held_out/accuracy eval/held_out/avg_at_8 eval/held_out/pass_at_8 score",
    ),
    "no samples": (
        f"[{{name: a, until: {{metric: eval/held_out/pass_at_8, accuracy: 0.5}}, eval: {{num_samples: 0}}}}, "
        f"{B}]", [HELD_OUT], "eval/held_out/accuracy, score",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_list_of_stages_is_refused(case):
    stages, settings, keywords = REFUSED[case]
    message = error_of(stages, *settings)
    assert all(keyword in message for keyword in keywords.split(" ")), message


def test_a_scale_may_belong_to_the_function_of_one_stage():
    stages = f"[{{name: a, until: {{steps: 3}}, data: {{train: [{{path: x, kind: 'm:f'}}]}}}}, {B}]"
    load(stages, "reward.scale={'m:f': [-1, 1]}")
    with pytest.raises(ValueError, match="reward.scale"):
        load(stages, "reward.scale={'m:g': [-1, 1]}")


def test_settings_of_stages_have_names_and_a_written_config_loads_as_the_same(tmp_path):
    config = load(f"[{A}, {{name: b, rollout: {{group_size: 4}}}}]")
    dump = config.model_dump(mode="json")
    flat = flat_settings(dump)
    assert flat["stages[0].until.steps"] == 3 and flat["stages[1].rollout.group_size"] == 4
    assert flat["train.seed"] == 0 and flat["stages[1].name"] == "b"
    (tmp_path / "run.yaml").write_text(json.dumps(dump))
    assert load_config(["--config", str(tmp_path / "run.yaml")]) == config


@pytest.mark.parametrize(
    "stages, difference",
    [
        (f"[{{name: a, until: {{steps: 4}}}}, {B}]", "stages[0].until.steps 3 -> 4"),
        (f"[{A}, {{name: b, rollout: {{group_size: 4}}}}]", "stages[1].rollout.group_size None -> 4"),
        (f"[{A}, {{name: c, until: {{steps: 4}}}}, {B}]", "stages[1].name 'b' -> 'c'"),
        ("[]", "stages[0].name 'a' -> None"),
        (f"[{A}, {B}]", None),
    ],
)
def test_a_changed_list_of_stages_is_refused_on_resume(stages, difference, one_rank, tmp_path):
    config = load(f"[{A}, {B}]")
    state = TrainState(stage=StagePosition(1))
    record = {"topology": topology(config), "config": config.model_dump(mode="json"), "state": asdict(state)}
    record = json.loads(json.dumps(record))
    if difference is None:
        return check_fits(load(stages), tmp_path, record)
    with pytest.raises(ValueError, match=re.escape(difference)):
        check_fits(load(stages), tmp_path, record)


def test_weights_of_a_stage_that_no_longer_exists_are_refused(one_rank, tmp_path):
    record = {"state": asdict(TrainState(stage=StagePosition(1))), "config": {}}
    check_fits(load(f"[{A}, {B}]", "checkpoint.resume=weights"), tmp_path, record)
    with pytest.raises(ValueError, match=re.escape("stages[1]")):
        check_fits(load("[]", "checkpoint.resume=weights"), tmp_path, record)


def test_weights_resume_in_a_changed_stage_with_new_counters():
    """Otherwise the counters of the old stage could end the changed stage at once."""
    earlier = load(f"[{A}, {B}]")
    position = StagePosition(1, steps=100, latest=0.9, first_prompt=7)
    record = {"state": asdict(TrainState(step=140, stage=position))}
    record = json.loads(json.dumps(record | {"config": earlier.model_dump(mode="json")}))
    assert state_of(record, earlier).stage == position
    state = state_of(record, load(f"[{A}, {{name: b, train: {{learning_rate: 1.0e-3}}}}]"))
    assert (state.step, state.stage) == (140, StagePosition(1, first_prompt=7))


# ---- prompts -----------------------------------------------------------------------------------------------


@pytest.fixture
def sums(tmp_path):
    """Write ten sums of difficulty 0 to 9, the last one twice; sums(range or None) returns a stage's data."""
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "kind": "exact", "difficulty": i} for i in range(10)]
    path, held_out = tmp_path / "sums.jsonl", tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[-1]]))
    held_out.write_text(json.dumps({"prompt": "other", "answer": "1", "kind": "exact"}))

    def data(difficulty=None, weight=1.0, name=None, **settings) -> DataSettings:
        source = {"path": str(path), "difficulty": difficulty, "weight": weight, "name": name}
        return DataSettings(**{"train": [source], "eval": [{"path": str(held_out)}]} | settings)

    data.scores = tmp_path / "scores.jsonl"
    return data


def sum_texts(*numbers: int) -> list[str]:
    return [f"{i}+1=" for i in numbers]


def load_all(data: list[DataSettings], windows: list[Window] | None = None, filter_set=lambda union: None):
    """Load the prompts of stages as the trainer's load_data() does, without ranks and rewards.

    filter_set: removes prompts from the union of all stages.
    """
    places = [f"stages[{number}]" for number in range(len(data))]
    sets = load_stages(data, [9] * len(data), one_token, [], places)
    union = unite(sets)
    filter_set(union)
    offers, scores = offers_of(union, sets, windows or [Window(None, (0.0, 1.0))] * len(data), places)
    texts = [[union.train[i].text for i in of_stage.indices] for of_stage in offers]
    return union, offers, scores, texts


def test_a_prompt_of_two_stages_has_one_place_in_the_record(sums):
    union, offers, scores, texts = load_all([sums((0, 5)), sums((4, 9), name="hard"), sums((0, 5))])
    assert [prompt.text for prompt in union.train] == sum_texts(*range(10), 9)
    easy = sum_texts(*range(6))
    assert texts == [easy, sum_texts(4, 5, 6, 7, 8, 9, 9), easy]
    assert offers[0] == offers[2] != offers[1] and scores == [None] * 11
    assert len(union.train_ids) == 11 and list(union.eval_sets) == ["held_out"]


def test_a_single_stage_offers_the_whole_set(sums):
    union, (offers,), _, _ = load_all([sums()])
    assert len(union.train) == 11 and offers == Offers(list(range(11)), None)
    config = load_config([TRAIN, "train.seed=5"])
    for consumed in (0, 7, 40):
        expected = prompts_of_step(11, 15, consumed, 5), 15
        assert train_rl.choose_prompts(15, consumed, no_history(11), 0, config, offers) == expected


def test_the_stream_of_a_stage_holds_its_own_prompts_only(sums):
    """Weights apply within the stage, and prompts of other stages are never drawn."""
    union, offers, _, _ = load_all([sums((0, 5)), sums((4, 9), weight=2.0)])
    history = no_history(len(union.train))
    config = load_config([TRAIN, "train.seed=5"])
    chosen, offered = train_rl.choose_prompts(14, 100 + 3, history, 0, config, offers[1], first=100)
    places = prompts_of_step(7, 14, 3, 105, ((7, 2.0),))
    assert chosen == [offers[1].indices[place] for place in places] and offered == 14
    epoch, _ = train_rl.choose_prompts(14, 100, history, 0, config, offers[1], first=100)
    assert sorted(epoch) == sorted([*offers[1].indices] * 2)
    later, _ = train_rl.choose_prompts(14, 200, history, 0, config, offers[1], first=200)
    assert sorted(later) == sorted(epoch) and later != epoch, "a stage that returns has a new order"
    history.solved += 1e6
    history.tried += 1e6
    history.last_step[:] = 0
    config = load_config([TRAIN, "zero_variance.history=true", "zero_variance.explore_solved=0"])
    chosen, offered = train_rl.choose_prompts(3, 0, history, 0, config, offers[1])
    assert (len(chosen), offered) == (3, 14 + 3), "a weighted epoch has 14 offers, all skipped"


def test_each_stage_has_its_own_window_of_measured_pass_rates(sums):
    union, *_ = load_all([sums()])
    rows = [{"model": "m"}]
    for i, prompt in enumerate(union.train[:10]):
        score = {"pass_rate": i / 10, "wrong_rate": 1 - i / 10, "num_samples": 8, "mean_tokens": 4.0}
        rows.append({"prompt_sha": prompt_sha(prompt)} | score)
    sums.scores.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def window(low: float, high: float) -> Window:
        return Window(str(sums.scores), (low, high))

    union, offers, scores, texts = load_all([sums()] * 2, [window(0.5, 1.0), window(0.1, 0.5)])
    assert texts == [sum_texts(5, 6, 7, 8, 9, 9), sum_texts(*range(1, 6))]
    assert "0+1=" not in [prompt.text for prompt in union.train], "no stage offers it"
    rates = {prompt.text: score.pass_rate for prompt, score in zip(union.train, scores)}
    assert rates == {f"{i}+1=": i / 10 for i in range(1, 10)}
    open_window = Window(None, (0.0, 1.0))
    _, offers, scores, _ = load_all([sums()] * 3, [open_window, window(0.5, 1.0), open_window])
    rates = [score and score.pass_rate for score in scores]
    assert rates == [None] * 5 + [0.5, 0.6, 0.7, 0.8, 0.9, 0.9] and offers[0] == offers[2]
    with pytest.raises(ValueError, match=re.escape("stages[1]: zero_variance.offline_pass_rate")):
        load_all([sums()] * 2, [window(0.5, 1.0), window(0.95, 1.0)])


def test_a_prompt_that_is_removed_from_the_union_is_removed_from_every_stage(sums):
    def remove_one(union):
        remaining = [i for i, prompt in enumerate(union.train) if prompt.text != "4+1="]
        union.train[:] = [union.train[i] for i in remaining]
        union.train_ids[:] = [union.train_ids[i] for i in remaining]

    _, _, _, texts = load_all([sums((0, 5)), sums((4, 9))], filter_set=remove_one)
    assert texts == [sum_texts(0, 1, 2, 3, 5), sum_texts(5, 6, 7, 8, 9, 9)]


def test_an_empty_window_and_a_leak_into_held_out_data_are_refused(sums):
    for difficulty in ((20, 30), (5, 2)):
        with pytest.raises(ValueError, match=re.escape("stages[1]: ") + ".*difficulty"):
            load_all([sums((0, 5)), sums(difficulty)])
    leak = {"eval": [{"path": sums().train[0].path, "limit": 2}]}
    leaking_stages = (
        [sums((1, 4), **leak), sums((1, 4), **leak)],
        [sums((0, 9), **leak), sums((0, 9), **leak)],
        [sums((5, 9), **leak), sums((1, 4))],
    )
    for stages in leaking_stages:
        with pytest.raises(ValueError, match="[01][+]1="):
            load_all(stages)
    sets = {name: [{"path": str(sums.scores.with_name(f"{name}.jsonl"))}] for name in ("train", "eval")}
    inner = "What is the sum of the first ten odd numbers?"
    for name, text in (("train", f"Solve: {inner} Use a box."), ("eval", inner)):
        Path(sets[name][0]["path"]).write_text(json.dumps({"prompt": text, "answer": "100"}))
    assert any(inner in note for note in load_all([sums(**sets), sums()])[0].notes)


def test_a_holdout_needs_the_same_training_set_and_prompt_limit_in_all_stages(sums):
    train_set = sums((0, 5)).train[0].model_copy(update={"holdout": 0.5})
    with_holdout = sums((0, 5)).model_copy(update={"train": [train_set]})
    with pytest.raises(ValueError, match=re.escape("stages[0]: data.train[].holdout")):
        load_all([with_holdout, sums((4, 9))])
    stages = [with_holdout.model_copy(update={"on_bad_row": "drop"})] * 2
    with pytest.raises(ValueError, match="rollout.max_prompt_tokens"):
        refuse_holdouts(stages, [8, 16], ["stages[0]", "stages[1]"])
    refuse_holdouts(stages, [8, 8], ["stages[0]", "stages[1]"])


def test_a_new_stage_begins_a_new_stream_only_if_its_prompts_differ(monkeypatch):
    monkeypatch.setattr(lifecycle, "say", lambda line: None)
    configs = stage_configs(load(f"[{A}, {{name: c, until: {{steps: 1}}, rollout: {{group_size: 4}}}}, {B}]"))
    offers = [Offers([0, 1]), Offers([0, 1]), Offers([1, 2])]
    state = TrainState(step=3, consumed_prompts=24, stage=StagePosition(0, steps=3, first_prompt=5))
    run = SimpleNamespace(
        run_config=configs[0], stage_configs=configs, stage_offers=offers, offers=offers[0], state=state,
        config=configs[0],
    )  # fmt: skip
    for number, rule, first_prompt in ((1, HandOver(steps=3), 5), (2, HandOver(steps=1), 32)):
        run.rule = rule
        assert lifecycle.next_stage_if_due(run) is configs[number] is run.config
        assert state.stage == StagePosition(number, first_prompt=first_prompt)
        assert run.offers is offers[number]
        state.consumed_prompts += 8
        state.stage = after_step(state.stage, rule, 10, {})
    run.rule = HandOver()
    assert lifecycle.next_stage_if_due(run) is configs[2] and state.stage.number == 2


# ---- whole runs --------------------------------------------------------------------------------------------

STAGES = f"""stages=[
    {{name: short, until: {{steps: 3}}, rollout: {{max_new_tokens: 4, group_size: 2}},
      data: {{train: [{{path: {TINY}/train.jsonl, difficulty: [1, 3]}}]}}}},
    {{name: mixed, until: {{metric: eval/additions/accuracy, plateau: 1}}, eval: {{max_new_tokens: 1}},
      train: {{learning_rate: 1.0e-3}},
      data: {{train: [{{path: {TINY}/train.jsonl, difficulty: [2, 2]}},
                      {{path: {TINY}/train.jsonl, difficulty: [4, 5], name: hard, weight: 0.5}}]}}}},
    {{name: last, algorithm: {{kl_coef: 0.01}}, train: {{minibatches_per_step: 2}}}}]"""
STAGED = [
    *SMALL, STAGES, "train.num_steps=7", "checkpoint.every=1", "checkpoint.keep=99",
    "zero_variance.history=true", "eval.max_new_tokens=8",
]  # fmt: skip


@pytest.fixture(scope="module")
def staged(demo_model, tmp_path_factory):
    """Make a run of three stages: by steps, by a plateau of the evaluations, to the end.

    In the second stage no answer fits into one token, so the accuracy stays at 0, which is a plateau.
    """
    run_dir = tmp_path_factory.mktemp("stages") / "undisturbed"
    done = trained(*STAGED, f"run.dir={run_dir}")
    return run_dir, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_goes_through_its_stages_and_reports_them(staged):
    run_dir, output = staged
    steps = steps_of(run_dir)
    stages = [row["stage"] for row in steps]
    assert stages == [0, 0, 0, 1, 1, 1, 2]
    assert re.search(r"stages\[0\] \(short\) ends \(3 steps\)", output)
    assert re.search(r"step 6: stages\[1\] \(mixed\) ends \(eval/additions/accuracy", output)
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    of_stage = {number: [s for s in samples if stages[s["step"] - 1] == number] for number in range(3)}
    counts = [len(of_stage[number]) / stages.count(number) for number in range(3)]
    assert counts == [4, 8, 8], "a group of each rank"
    assert max(sample["difficulty"] for sample in of_stage[0]) <= 3
    assert {sample["difficulty"] for sample in of_stage[1]} <= {2, 4, 5}
    assert max(row["completion_tokens_max"] for row in steps[:3]) == 4
    assert max(row["completion_tokens_max"] for row in steps[3:]) > 4
    for row in steps:
        assert ("ref_kl_k3" in row) == (row["stage"] == 2)
        assert (row["learning_rate"] == 1e-3) == (row["stage"] == 1)
    evaluations = [row for row in rows_of(run_dir) if "score" not in row]
    assert [row["step"] for row in evaluations] == [0, 2, 4, 6, 7]


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_for_bit_in_its_stage(staged, tmp_path):
    """Resume from the checkpoint of the step that ends the first stage."""
    straight, _ = staged
    resumed = shutil.copytree(straight, tmp_path / "resumed")
    for folder in sorted((resumed / "checkpoints").iterdir())[3:]:
        shutil.rmtree(folder)
    done = trained(*STAGED, f"run.dir={resumed}")
    assert f"resumed from {resumed}/checkpoints/step_000003" in done.stdout
    assert all(f"{stage} ends" in done.stdout for stage in ("stages[0] (short)", "stages[1] (mixed)"))
    assert_same_run(straight, resumed)
    for original in sorted((straight / "checkpoints").iterdir()):
        copy = resumed / "checkpoints" / original.name
        assert_same_weights(original / "model", copy / "model")
        states = [json.loads((folder / "state.json").read_text())["state"] for folder in (original, copy)]
        assert states[0]["stage"] == states[1]["stage"]
        records = [torch.load(folder / "history.pt", weights_only=True) for folder in (original, copy)]
        assert all(torch.equal(records[0][name], records[1][name]) for name in ("solved", "last_step"))
    assert set(records[0]["last_step"].tolist()) >= {0, 3, 6}, "the record covers all stages"


# ---- the page ----------------------------------------------------------------------------------------------
PAGE = (ROOT / "docs" / "stages.md").read_text()


def test_the_example_of_the_page_is_valid(tmp_path):
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "two_phases.yaml").write_text(text)
    stages = stage_configs(load_config(["--config", str(tmp_path / "two_phases.yaml")]))
    assert [stage.rollout.max_new_tokens for stage in stages] == [1024, 4096, 4096]
    assert [len(stage.data.train) for stage in stages] == [2, 2, 2]
    assert stages[2].train.learning_rate == 5e-7 and stages[1].zero_variance.history
