"""The interface of extras: what is imported, old names, and an extra that uses every call of a step."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import ROOT, SMALL, trained
from helpers import make_batch, make_config, make_group, make_prompts

import lifecycle
import train_rl
from batch import PolicyOutputs, Request
from configure import load_config
from extras import base
from extras.base import Extra, active
from extras.settings import SECTIONS
from runtime.old_settings import RENAMED, present_counters
from sampling import Job

SPY = """
import json, sys
def gain(inputs, file):
    with open(file, "w") as written:
        json.dump(sorted(name for name in sys.modules if name.startswith("extras")), written)
    return inputs.ratio * inputs.advantages, {}
"""


@pytest.mark.slow
@pytest.mark.parametrize("settings, names", [
    ([], []),
    (["teacher.path=experiments/starts/tiny/model"], ["extras.teacher"]),
])  # fmt: skip
def test_a_rank_imports_only_the_extras_that_are_on(settings, names, demo_model, tmp_path):
    (tmp_path / "spy.py").write_text(SPY)
    trained(
        *SMALL, "train.num_steps=1", "eval.every=0", "checkpoint.every=0", f"run.dir={tmp_path}/run",
        f"algorithm.gain={tmp_path}/spy.py:gain", f"algorithm.gain_args={{file: {tmp_path}/names.json}}",
        "model.ep_size=1", *settings, ranks=1,
    )  # fmt: skip
    imported = json.loads((tmp_path / "names.json").read_text())
    assert imported == sorted(["extras", "extras.base", "extras.settings", *names])


def test_every_section_has_its_file_its_test_and_its_defaults():
    for name in SECTIONS:
        extra = base.load(name)
        assert (ROOT / "tests" / f"test_{name}.py").is_file() and extra.name.startswith(f"{name}.")
        assert type(extra).__module__ == f"extras.{name}" and vars(extra) == {}, "an extra has no state"
    assert active(make_config()) == []


# ---- old names ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("old", [name for name in RENAMED if RENAMED[name].partition(".")[0] in SECTIONS])
def test_an_old_name_is_refused_outside_of_declared_studies(old, tmp_path):
    section, _, key = old.partition(".")
    (tmp_path / "row.yaml").write_text(yaml.safe_dump({section: {key: 1}}))
    argv = ["--config", str(tmp_path / "row.yaml"), "data.train=[{path: x}]"]
    with pytest.raises(ValueError, match=f"{old}.*{RENAMED[old]}"):
        load_config(argv)
    with pytest.raises(ValueError, match=f"{old}.*{RENAMED[old]}"):
        load_config([*argv[2:], f"{old}=1"])
    (tmp_path / "declared.json").write_text("{}")
    try:
        load_config(argv)
    except ValueError as error:  # other settings are missing, or 1 is no value of it
        assert old not in str(error)


def test_a_checkpoint_of_an_earlier_version_keeps_its_teacher():
    old = {"step": 3, "charged_for_teacher": 7.0, "teacher": "abc", "teacher_scores": None, "judge": None}
    new = {"step": 3, "charged_tokens": 7.0, "extras": {"teacher": {"weights": "abc"}}, "judge": None}
    assert present_counters(old) == new and present_counters(new) == new
    assert present_counters({"teacher": None}) == {}


# ---- an extra of a reader ----------------------------------------------------------------------------------
class Halves(Extra):
    """Halves advantages, adds terms to the gain, changes the policy and the requests."""

    replaces_advantages = True

    def adapt(self, policy, config):
        policy.register_parameter(
            f"halves_{len(list(policy.parameters()))}", torch.nn.Parameter(torch.ones(2))
        )

    def requests(self, run, jobs, requests):
        return [replace(request, seed=request.seed + jobs[0].group.prompt_index) for request in requests]

    def after_rollout(self, run, batch, groups):
        batch.extras["halves"] = len(groups)

    def advantages(self, batch, advantages, config):
        return advantages / 2

    def gain(self, micro_batch):
        return micro_batch.outputs.logprobs * 3

    def metrics(self, batch):
        return {"halves": (batch.extras["halves"], 1)}

    def charged_tokens(self, metrics, config):
        return 5.0


@pytest.fixture
def halves(monkeypatch):
    for module in (train_rl, base):
        monkeypatch.setattr(module, "active", lambda config: [Halves(), Halves()])


def test_the_optimizer_takes_the_parameters_that_extras_add(one_rank, monkeypatch):
    taken = []
    monkeypatch.setattr(lifecycle.moe_model, "build_policy", lambda *_: torch.nn.Linear(2, 2, bias=False))
    monkeypatch.setattr(lifecycle.moe_model, "set_group_timeouts", lambda seconds: None)
    monkeypatch.setattr(
        lifecycle.moe_model,
        "deepspeed_engine",
        lambda policy, _: taken.extend(dict(policy.named_parameters())),
    )
    lifecycle.build_trainer(make_config("train.num_steps=1"), [Halves(), Halves()], ROOT, None, None)
    assert taken == ["weight", "halves_1", "halves_2"]


def test_requests_of_a_round_pass_through_all_extras(halves, one_rank, monkeypatch):
    group = make_group(0, 3, [2, 3], [True, False])
    completions = group.completions
    group.completions = []
    sampled = []
    requests = [Request([1], seed, 1.0, 4) for seed in (10, 20)]
    monkeypatch.setattr(train_rl, "set_expected_costs", lambda run, jobs: None)
    monkeypatch.setattr(train_rl, "requests_of", lambda run, jobs: (requests, []))
    monkeypatch.setattr(train_rl, "generate", lambda run, asked, *_: sampled.extend(asked) or completions)
    train_rl.generate_round(SimpleNamespace(config=make_config("train.num_steps=1")), [Job(group, range(2))])
    assert [request.seed for request in sampled] == [16, 26] and group.completions == completions


def test_the_calls_of_a_step_reach_all_extras(halves, one_rank, monkeypatch):
    config = make_config("train.num_steps=1")
    groups = [make_group(0, 0, [2, 3], [True, False])]
    run = SimpleNamespace(config=config, prompts=make_prompts(1), prompt_ids=[[1, 2]])
    batch = train_rl.batch_of(run, groups)
    batch.valid = torch.ones(2, dtype=torch.bool)
    batch.rewards = train_rl.compute_rewards(batch, None, [], config)
    batch.advantages = train_rl.token_advantages(batch, config)
    plain = train_rl.compute_advantages(batch.rewards, batch.valid, batch.group_index)
    assert torch.equal(batch.advantages, plain.unsqueeze(1) / 4 * batch.response_mask)
    assert train_rl.metrics_of(config, batch) == {"halves": (1, 1)}
    assert train_rl.charged_tokens(config, {}) == 10.0 and train_rl.needs_old_pass(config)


def test_terms_of_all_extras_are_added_to_the_gain(halves, float64):
    config = make_config("train.num_steps=1")
    batch = make_batch([[5, 6], [7]], [[1], [1]], rollout_logprobs=[[-1.0, -2.0], [-0.5]],
                       advantages=[[1.0, 1.0], [-1.0]])  # fmt: skip
    logprobs = batch.rollout_logprobs.clone().requires_grad_()
    outputs = PolicyOutputs(logprobs, torch.zeros_like(logprobs))
    loss, _ = train_rl.micro_batch_loss(outputs, batch, [0, 1], torch.tensor([2, 3]), 1.0, config)
    loss.backward()
    weights = torch.tensor([[0.25, 0.25], [0.5, 0.0]])  # of sequence_mean
    assert torch.allclose(-logprobs.grad, weights * (batch.advantages + 6))
