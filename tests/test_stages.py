"""Stages: when one hands over, what it may set, which prompts it offers, and a run that is resumed in them.

`Simulated` is a second hand-over rule, which looks at the whole series of a stage each time instead of
keeping a position.
"""

import json
import math
import random
import re
import shutil
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SMALL, train
from helpers import FakeRanks, assert_same_run, assert_same_weights, no_history, rows_of, steps_of

import lifecycle
import train_rl
from configure import stage_configs
from data.prompts import DataSettings, prompt_sha
from data.stages import Offers, Window, load_stages, offers_of, refuse_holdouts, unite
from data.stream import prompts_of_step
from runtime.checkpoint import TrainState, check_fits, state_of, topology
from runtime.config import flat_settings, setting_fields
from runtime.stages import HandOver, StagePosition, after_measurement, after_step, end_of_stage
from settings import STAGE_SETTINGS
from train_rl import Config, load_config

TRAIN = "data.train=[{path: a.jsonl}]"
TINY = "data/built/tiny"


def load(stages: str, *settings: str) -> Config:
    return load_config([TRAIN, *settings, f"stages={stages}"])


def error_of(stages: str, *settings: str) -> str:
    with pytest.raises(ValueError) as caught:
        load(stages, *settings)
    assert type(caught.value) is ValueError and "\n" not in str(caught.value)
    return str(caught.value)


# ---- the hand-over -----------------------------------------------------------------------------------------


class Simulated:
    """A stage as its whole series: tokens of each step, and all measurements."""

    def __init__(self, rule: dict):
        self.rule, self.tokens, self.measured = rule, [], []

    def is_over(self) -> bool:
        values = self.measured
        record = 0  # the last value that rose above the record before it
        for i, value in enumerate(values):
            if value > values[record]:
                record = i
        reached = {
            "steps": len(self.tokens),
            "tokens": sum(self.tokens),
            "accuracy": values[-1] if values else -math.inf,
            "plateau": len(values) - 1 - record,
        }
        return any(reached[name] >= self.rule[name] for name in reached if name in self.rule)


def random_rule(draw: random.Random) -> dict:
    choices = {
        "steps": draw.randint(1, 30), "tokens": draw.randint(1, 2000), "accuracy": draw.uniform(0.3, 1.0),
        "plateau": draw.randint(1, 6),
    }  # fmt: skip
    return {name: value for name, value in choices.items() if draw.random() < 0.5}


@pytest.mark.parametrize("metric", ["score", "eval/set/accuracy"])
def test_a_rule_hands_over_when_a_simulation_of_it_does(metric):
    """Over 300 series of 60 steps; the position goes through JSON at each step, as through a checkpoint."""
    ends = []
    for seed in range(300):
        draw = random.Random(seed)
        rule = random_rule(draw)
        hand_over, simulated, position = HandOver(metric=metric, **rule), Simulated(rule), StagePosition()
        for step in range(60):
            if metric != "score" and step % 3 == 0:
                accuracy = draw.random()
                simulated.measured.append(accuracy)
                position = after_measurement(position, hand_over, {metric: accuracy, "score": 1.0})
            assert (end_of_stage(position, hand_over) is not None) == simulated.is_over(), (seed, rule, step)
            if simulated.is_over():
                ends.append(step)
                break
            tokens, score = draw.randint(0, 99), draw.choice([draw.random(), 0.5, math.nan])
            simulated.tokens.append(tokens)
            if metric == "score" and not math.isnan(score):
                simulated.measured.append(score)
            position = after_step(position, hand_over, tokens, {"score": score})
            position = StagePosition(**json.loads(json.dumps(asdict(position))))
    assert len(ends) > 150 and len(set(ends)) > 15, "series that end, at many different steps"


@pytest.mark.parametrize(
    "rule, scores, step, words",
    [
        ({"steps": 3}, [0.1] * 5, 3, "3 steps"),
        ({"tokens": 25}, [0.1] * 5, 3, "30 tokens"),
        ({"accuracy": 0.5}, [0.4, 0.5, 0.4], 2, "score 0.500, at least 0.5"),
        ({"plateau": 2}, [0.1, 0.3, 0.2, 0.4, 0.4, 0.4], 6, "score did not rise above 0.400 in 2 values"),
        ({}, [1.0] * 9, None, ""),
    ],
)
def test_hand_overs_that_one_can_count(rule, scores, step, words):
    rule, position, reasons = HandOver(**rule), StagePosition(), []
    for score in scores:
        position = after_step(position, rule, 10, {"score": score})
        reasons.append(end_of_stage(position, rule))
    first = next((number for number, reason in enumerate(reasons, start=1) if reason), None)
    assert first == step and words in (reasons[step - 1] if step else "")


# ---- settings ----------------------------------------------------------------------------------------------


def test_a_stage_is_the_run_with_its_own_settings_over_it():
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
    assert one.rollout.temperature == two.rollout.temperature == 0.7 and (one.eval.every, two.eval.every) == (
        50,
        7,
    )
    plain = load_config([TRAIN])
    assert stage_configs(plain) == [plain]


def test_engine_and_policy_are_built_for_the_largest_stage():
    configs = stage_configs(
        load(
            "[{name: a, until: {steps: 2}, rollout: {max_new_tokens: 9, max_prompt_tokens: 30}}, "
            "{name: b, rollout: {max_new_tokens: 20, max_prompt_tokens: 3}, algorithm: {kl_coef: 0.1}, "
            "eval: {max_new_tokens: 40}, train: {micro_batch_tokens: 50000}}]"
        )
    )
    largest = lifecycle.widest(configs)
    assert lifecycle.max_model_len(largest) == 70 and largest.algorithm.kl_coef == 0.1
    assert largest.train.micro_batch_tokens == 50000 and largest.eval.max_new_tokens == 40
    plain = load_config([TRAIN])
    assert lifecycle.widest([plain]) == plain


def test_what_a_stage_may_set_exists_and_everything_else_is_refused_by_name():
    names, sections = setting_fields(Config), set(Config.model_fields)
    assert {*names, *sections} >= STAGE_SETTINGS
    fixed = {"model.ep_size=2", "rollout.dtype=float32", "train.num_steps=7", "train.seed=3", "run.dir=x"}
    fixed |= {"reward.judge_path=x", "checkpoint.every=1", "data.chat=always", "train.zero_stage=2"}
    for text in fixed:
        name, value = text.split("=")
        section, key = name.split(".")
        assert name not in STAGE_SETTINGS and section not in STAGE_SETTINGS
        message = error_of(f"[{{name: a, until: {{steps: 1}}}}, {{name: b, {section}: {{{key}: {value}}}}}]")
        assert message.startswith(f"stages[1].{name}: cannot change from stage to stage")


A = "{name: a, until: {steps: 3}}"
B = "{name: b}"
HELD_OUT = "data.eval=[{path: held_out.jsonl}]"
NEVER = "stages[0] (a) can never end: "
REFUSED = {
    "unknown setting": (f"[{A}, {{name: b, rollout: {{xyz: 1}}}}]", [], "stages[1].rollout.xyz: unknown"),
    "near name": (f"[{A}, {{name: b, rollout: {{group_sze: 1}}}}]", [], "did you mean rollout.group_size?"),
    "unknown section": (f"[{A}, {{name: b, rolout: {{group_size: 1}}}}]", [], "stages[1].rolout.group_"),
    "wrong type": (f"[{A}, {{name: b, rollout: {{group_size: x}}}}]", [], "stages[1].rollout.group_size: "),
    "section that is none": (f"[{A}, {{name: b, rollout: 3}}]", [], "stages[1].rollout: "),
    "unknown rule": ("[{name: a, until: {stpes: 3}}]", [], "stages[0].until.stpes: unknown setting"),
    "true as steps": ("[{name: a, until: {steps: true}}]", [], "stages[0].until.steps: expected a number"),
    "no name": ("[{until: {steps: 3}}]", [], "stages[0].name: field required"),
    "contradiction in a stage": (
        f"[{A}, {{name: b, zero_variance: {{refill: true}}}}]", [],
        "stages[1] (b): zero_variance.refill True needs zero_variance.drop False",
    ),
    "two of a name": (f"[{A}, {A}, {B}]", [], "stages[1] (a): another stage has this name"),
    "the last one ends": (f"[{A}]", [], "stages[0] (a).until: the last stage ends with the run"),
    "no rule": (f"[{{name: a}}, {B}]", [], NEVER + "set until.steps"),
    "longer than the run": (f"[{A}, {B}]", ["train.num_steps=3"], NEVER + "its `until` needs at least 3"),
    "together longer": (
        f"[{A}, {{name: c, until: {{steps: 4}}}}, {B}]", ["train.num_steps=7"],
        "stages[1] (c) can never end: its `until` needs at least 7 steps",
    ),
    "a plateau that is too long": (
        f"[{{name: a, until: {{plateau: 6}}}}, {B}]", ["train.num_steps=7"],
        NEVER + "its `until` needs at least 7",
    ),
    "more tokens than the run": (
        f"[{{name: a, until: {{tokens: 9}}}}, {B}]", ["train.max_generated_tokens=9"],
        NEVER + "until.tokens 9 must be below train.max_generated_tokens 9",
    ),
    "no evaluations on the way": (
        f"[{{name: a, until: {{metric: eval/held_out/accuracy, accuracy: 0.5}}}}, {B}]",
        ["eval.every=0", HELD_OUT], NEVER + "until.metric eval/held_out/accuracy is measured",
    ),
    "evaluations too far apart": (
        f"[{{name: a, until: {{metric: eval/held_out/accuracy, plateau: 2}}}}, {B}]",
        ["eval.every=10", "train.num_steps=20", HELD_OUT], NEVER + "its `until` needs at least 20 steps",
    ),
    "no such set": (
        f"[{{name: a, until: {{metric: eval/held_in/accuracy, accuracy: 0.5}}}}, {B}]", [HELD_OUT],
        "stages[0] (a).until.metric: 'eval/held_in/accuracy' is not measured in this stage; choose one of "
        "eval/held_out/accuracy, eval/held_out/avg_at_8, eval/held_out/pass_at_8, score",
    ),
    "no samples": (
        f"[{{name: a, until: {{metric: eval/held_out/pass_at_8, accuracy: 0.5}}, eval: {{num_samples: 0}}}}, "
        f"{B}]", [HELD_OUT], "eval/held_out/accuracy, score",
    ),
    "accuracy above 1": (f"[{{name: a, until: {{accuracy: 2}}}}, {B}]", [], "stages[0].until.accuracy: "),
    "nested": (f"[{A}, {{name: b, stages: []}}]", [], "cannot change from stage to stage"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_list_of_stages_is_refused_in_one_sentence(case):
    stages, settings, message = REFUSED[case]
    assert message in error_of(stages, *settings)


def test_settings_of_stages_have_names_and_a_written_config_loads_as_the_same(tmp_path):
    config = load(f"[{A}, {{name: b, rollout: {{group_size: 4}}}}]")
    dump = config.model_dump(mode="json")
    flat = flat_settings(dump)
    assert flat["stages[0].until.steps"] == 3 and flat["stages[1].rollout.group_size"] == 4
    assert flat["train.seed"] == 0 and flat["stages[1].name"] == "b"
    (tmp_path / "run.yaml").write_text(json.dumps(dump))
    assert load_config(["--config", str(tmp_path / "run.yaml")]) == config


@pytest.mark.parametrize(
    "changed, named",
    [
        (f"[{{name: a, until: {{steps: 4}}}}, {B}]", "stages[0].until.steps 3 -> 4"),
        (f"[{A}, {{name: b, rollout: {{group_size: 4}}}}]", "stages[1].rollout.group_size None -> 4"),
        (f"[{A}, {{name: c, until: {{steps: 4}}}}, {B}]", "stages[1].name 'b' -> 'c'"),
        ("[]", "stages[0].name 'a' -> None"),
        (f"[{A}, {B}]", None),
    ],
)
def test_a_changed_list_of_stages_is_refused_on_resume(changed, named, monkeypatch, tmp_path):
    FakeRanks(1).install(monkeypatch)
    config, state = load(f"[{A}, {B}]"), TrainState(stage=StagePosition(1))
    record = {"topology": topology(config), "config": config.model_dump(mode="json"), "state": asdict(state)}
    record = json.loads(json.dumps(record))
    if named is None:
        return check_fits(load(changed), tmp_path, record)
    with pytest.raises(ValueError, match=re.escape(named)):
        check_fits(load(changed), tmp_path, record)


def test_a_checkpoint_of_a_stage_that_is_gone_gives_no_weights_to_go_on_with(monkeypatch, tmp_path):
    FakeRanks(1).install(monkeypatch)
    record = {"state": asdict(TrainState(stage=StagePosition(1)))}
    check_fits(load(f"[{A}, {B}]", "checkpoint.resume=weights"), tmp_path, record)
    with pytest.raises(ValueError, match=re.escape("written in stages[1], the settings have 0 stages")):
        check_fits(load("[]", "checkpoint.resume=weights"), tmp_path, record)


def test_counters_of_other_stages_do_not_end_the_stage_that_weights_go_on_in():
    earlier, position = load(f"[{A}, {B}]"), StagePosition(1, steps=100, latest=0.9, first_prompt=7)
    record = {"state": asdict(TrainState(step=140, stage=position))}
    record = json.loads(json.dumps(record | {"config": earlier.model_dump(mode="json")}))
    assert state_of(record, earlier).stage == position
    changed = load(f"[{A}, {{name: b, train: {{learning_rate: 1.0e-3}}}}]")
    state = state_of(record, changed)
    assert (state.step, state.stage) == (140, StagePosition(1, first_prompt=7))


# ---- prompts -----------------------------------------------------------------------------------------------


def one_token(texts, add_special_tokens=True):
    return {"input_ids": [[1] for _ in texts]}


@pytest.fixture
def sums(tmp_path):
    """Write ten sums of difficulty 0 to 9, the last of them twice; sums(range or None) is a stage's data."""
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "kind": "exact", "difficulty": i} for i in range(10)]
    path, held_out = tmp_path / "sums.jsonl", tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[-1]]))
    held_out.write_text(json.dumps({"prompt": "other", "answer": "1", "kind": "exact"}))

    def data(difficulty=None, weight=1.0, name=None, **settings) -> DataSettings:
        source = {"path": str(path), "difficulty": difficulty, "weight": weight, "name": name}
        return DataSettings(**{"train": [source], "eval": [{"path": str(held_out)}]} | settings)

    data.scores = tmp_path / "scores.jsonl"
    return data


def load_all(data: list[DataSettings], windows: list[Window] | None = None, left_out=lambda whole: None):
    """Do what load_data() of the trainer does, without ranks and rewards."""
    places = [f"stages[{number}]" for number in range(len(data))]
    sets = load_stages(data, [9] * len(data), one_token, [], places)
    whole = unite(sets)
    left_out(whole)
    offers, scores = offers_of(whole, sets, windows or [Window(None, (0.0, 1.0))] * len(data), places)
    texts = [[whole.train[i].text for i in own.indices] for own in offers]
    return whole, offers, scores, texts


def test_a_prompt_of_two_stages_has_one_place_in_the_record(sums):
    whole, offers, scores, texts = load_all([sums((0, 5)), sums((4, 9), name="hard"), sums((0, 5))])
    assert [prompt.text for prompt in whole.train] == [f"{i}+1=" for i in (*range(10), 9)]
    assert texts == [[f"{i}+1=" for i in part] for part in (range(6), (4, 5, 6, 7, 8, 9, 9), range(6))]
    assert offers[0] == offers[2] != offers[1] and scores == [None] * 11
    assert len(whole.train_ids) == 11 and list(whole.eval_sets) == ["held_out"]
    assert [len(own.indices) for own in offers] == [6, 7, 6]


def test_one_stage_is_the_set_as_it_is(sums):
    whole, (offers,), _, _ = load_all([sums()])
    assert len(whole.train) == 11 and offers == Offers(list(range(11)), None)
    history = no_history(11)
    config = load_config([TRAIN, "train.seed=5"])
    for consumed in (0, 7, 40):
        assert train_rl.choose_prompts(15, consumed, history, 0, config, offers) == (
            prompts_of_step(11, 15, consumed, 5),
            15,
        )


def test_the_stream_of_a_stage_is_that_of_its_prompts_alone(sums):
    """Weights hold within the stage; prompts that other stages offer are never drawn."""
    whole, offers, _, _ = load_all([sums((0, 5)), sums((4, 9), weight=2.0)])
    history, config = no_history(len(whole.train)), load_config([TRAIN, "train.seed=5"])
    chosen, offered = train_rl.choose_prompts(14, 100 + 3, history, 0, config, offers[1], first=100)
    places = prompts_of_step(7, 14, 3, 5, ((7, 2.0),))
    assert chosen == [offers[1].indices[place] for place in places] and offered == 14
    epoch, _ = train_rl.choose_prompts(14, 100, history, 0, config, offers[1], first=100)
    assert sorted(epoch) == sorted([*offers[1].indices] * 2)


def test_a_window_of_measured_pass_rates_is_the_stages_own(sums):
    whole, *_ = load_all([sums()])
    rows = [{"model": "m"}]
    for i, prompt in enumerate(whole.train[:10]):
        score = {"pass_rate": i / 10, "wrong_rate": 1 - i / 10, "num_samples": 8, "mean_tokens": 4.0}
        rows.append({"prompt_sha": prompt_sha(prompt)} | score)
    sums.scores.write_text("".join(json.dumps(row) + "\n" for row in rows))
    window = lambda low, high: Window(str(sums.scores), (low, high))
    whole, offers, scores, texts = load_all([sums()] * 2, [window(0.5, 1.0), window(0.1, 0.5)])
    assert texts == [[f"{i}+1=" for i in part] for part in ((5, 6, 7, 8, 9, 9), range(1, 6))]
    assert "0+1=" not in [prompt.text for prompt in whole.train], "no stage offers it"
    assert {p.text: s.pass_rate for p, s in zip(whole.train, scores)} == {
        f"{i}+1=": i / 10 for i in range(1, 10)
    }
    everything = Window(None, (0.0, 1.0))
    _, offers, of_all, _ = load_all([sums()] * 3, [everything, window(0.5, 1.0), everything])
    found = [score and score.pass_rate for score in of_all]
    assert found == [None] * 5 + [0.5, 0.6, 0.7, 0.8, 0.9, 0.9] and offers[0] == offers[2]
    with pytest.raises(ValueError, match=re.escape("stages[1]: zero_variance.offline_pass_rate: no pass")):
        load_all([sums()] * 2, [window(0.5, 1.0), window(0.95, 1.0)])


def test_what_is_left_out_of_the_whole_is_left_out_of_every_stage(sums):
    def left_out(whole):
        kept = [i for i, prompt in enumerate(whole.train) if prompt.text != "4+1="]
        whole.train[:], whole.train_ids[:] = (
            [part[i] for i in kept] for part in (whole.train, whole.train_ids)
        )

    _, _, _, texts = load_all([sums((0, 5)), sums((4, 9))], left_out=left_out)
    assert texts == [[f"{i}+1=" for i in part] for part in ((0, 1, 2, 3, 5), (5, 6, 7, 8, 9, 9))]


def test_an_empty_window_and_a_leak_are_refused_before_an_engine_starts(sums):
    with pytest.raises(ValueError, match=re.escape("stages[1]: ") + ".*no prompt has difficulty 20 to 30"):
        load_all([sums((0, 5)), sums((20, 30))])
    with pytest.raises(ValueError, match=re.escape("stages[1]: ") + ".*no prompt has difficulty 5 to 2"):
        load_all([sums((0, 5)), sums((5, 2))])
    leak = {"eval": [{"path": sums().train[0].path, "limit": 2}]}
    for others in ((1, 4), (0, 9)):
        with pytest.raises(ValueError, match="[01][+]1="):
            load_all([sums(others, **leak), sums(others, **leak)])
    with pytest.raises(ValueError, match="1[+]1="):
        load_all([sums((5, 9), **leak), sums((1, 4))])
    with pytest.raises(ValueError, match=re.escape("stages[0]: data.train[].holdout")):
        train_set = sums((0, 5)).train[0].model_copy(update={"holdout": 0.5})
        load_all([sums((0, 5)).model_copy(update={"train": [train_set]}), sums((4, 9))])
    same = [sums((0, 5)).model_copy(update={"train": [train_set], "on_bad_row": "drop"})] * 2
    with pytest.raises(ValueError, match="rollout.max_prompt_tokens"):
        refuse_holdouts(same, [8, 16], ["stages[0]", "stages[1]"])
    refuse_holdouts(same, [8, 8], ["stages[0]", "stages[1]"])


def test_a_hand_over_begins_a_stream_only_where_the_prompts_are_others():
    configs = stage_configs(load(f"[{A}, {{name: c, until: {{steps: 1}}, rollout: {{group_size: 4}}}}, {B}]"))
    offers = [Offers([0, 1]), Offers([0, 1]), Offers([1, 2])]
    state = TrainState(step=3, consumed_prompts=24, stage=StagePosition(0, steps=3, first_prompt=5))
    run = SimpleNamespace(
        run_config=configs[0], stage_configs=configs, stage_offers=offers, offers=offers[0], state=state,
        config=configs[0],
    )  # fmt: skip
    for number, rule, first_prompt in ((1, HandOver(steps=3), 5), (2, HandOver(steps=1), 32)):
        run.rule = rule
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lifecycle, "say", lambda line: None)
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
    done = train(*STAGED, f"run.dir={run_dir}")
    assert done.returncode == 0, done.stderr[-3000:]
    return run_dir, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_goes_through_its_stages_and_says_so(staged):
    run_dir, output = staged
    steps = steps_of(run_dir)
    stages = [row["stage"] for row in steps]
    assert stages == [0, 0, 0, 1, 1, 1, 2]
    assert "stages[0] (short) ends (3 steps); stages[1] (mixed) begins" in output
    assert re.search(r"step 6: stages\[1\] \(mixed\) ends \(eval/additions/accuracy did not rise", output)
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    of_stage = {number: [s for s in samples if stages[s["step"] - 1] == number] for number in range(3)}
    assert [len(of_stage[number]) / stages.count(number) for number in range(3)] == [2, 4, 4]
    assert max(sample["difficulty"] for sample in of_stage[0]) <= 3
    assert {sample["difficulty"] for sample in of_stage[1]} <= {2, 4, 5}
    assert max(row["completion_tokens_max"] for row in steps[:3]) == 4
    assert max(row["completion_tokens_max"] for row in steps[3:]) > 4
    assert [("ref_kl_k3" in row, row["learning_rate"] == 1e-3) for row in steps] == [
        (stage == 2, stage == 1) for stage in stages
    ]
    evaluations = [row for row in rows_of(run_dir) if "score" not in row]
    assert [row["step"] for row in evaluations] == [0, 2, 4, 6, 7]


@pytest.mark.slow
def test_tensorboard_marks_the_stage(staged):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(staged[0] / "tensorboard"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("stage")}
    assert found == {row["step"]: row["stage"] for row in rows_of(staged[0])}


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_for_bit_in_its_stage(staged, tmp_path):
    """From the checkpoint of the step that ends the first stage."""
    resumed = shutil.copytree(staged[0], tmp_path / "resumed")
    for folder in sorted((resumed / "checkpoints").iterdir())[3:]:
        shutil.rmtree(folder)
    done = train(*STAGED, f"run.dir={resumed}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"resumed from {resumed}/checkpoints/step_000003" in done.stdout
    assert "stages[0] (short) ends" in done.stdout
    assert "stages[1] (mixed) ends" in done.stdout
    assert_same_run(staged[0], resumed)
    for one in sorted((staged[0] / "checkpoints").iterdir()):
        other = resumed / "checkpoints" / one.name
        assert_same_weights(one / "model", other / "model")
        states = [json.loads((folder / "state.json").read_text())["state"] for folder in (one, other)]
        assert states[0]["stage"] == states[1]["stage"]
        records = [torch.load(folder / "history.pt", weights_only=True) for folder in (one, other)]
        assert all(torch.equal(records[0][name], records[1][name]) for name in ("solved", "last_step"))
    assert set(records[0]["last_step"].tolist()) >= {0, 3, 6}, "the record is of all stages"


def test_the_example_goes_through_its_stages():
    file = ROOT / "experiments" / "environments" / "stages.yaml"
    one, two = stage_configs(load_config(["--config", str(file)]))
    assert one.data.train[0].difficulty == (1, 3) and two.data.train[0].difficulty is None
    assert lifecycle.max_model_len(lifecycle.widest([one, two])) == 32


# ---- the page ----------------------------------------------------------------------------------------------
PAGE = (ROOT / "docs" / "stages.md").read_text()


def test_the_page_lists_what_a_stage_may_set():
    listed = PAGE.partition("## What a stage may set")[2].partition("All others")[0]
    named = set(re.findall(r"`([a-z_.0-9]+)`", listed)) - {"weight", "difficulty"}
    named -= {"zero_variance.offline_scores", "zero_variance.offline_pass_rate"}
    assert named == STAGE_SETTINGS - {"reward.judge_certainty"}
    until = PAGE.partition("## When a stage hands over")[2].partition("## What a stage may set")[0]
    assert all(f"`{name}`" in until for name in set(HandOver.model_fields) - {"window", "min_rise"})


def test_the_example_of_the_page_is_read(tmp_path):
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "two_phases.yaml").write_text(text)
    first, second, third = stage_configs(load_config(["--config", str(tmp_path / "two_phases.yaml")]))
    assert [own.rollout.max_new_tokens for own in (first, second, third)] == [1024, 4096, 4096]
    assert [len(own.data.train) for own in (first, second, third)] == [2, 2, 2]
    assert third.train.learning_rate == 5e-7 and second.zero_variance.history
