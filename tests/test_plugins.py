"""Broken plug-ins are refused, and every call of a hook is checked."""

import json
import os
import random
import re
import signal

import pytest
import torch
from conftest import ROOT
from helpers import judge_batch, make_batch, make_config

import train_rl
from batch import AdvantageInputs, Group, SelectInputs
from configure import stage_configs
from plugins import MASK, ONE_RANK, call_hook, is_reserved, small_loss_inputs
from reward import Verdict
from runtime.checkpoint import prepare_run_dir
from runtime.metrics import batch_metrics, reduce_metrics
from settings import AlgorithmSettings
from verifiers.own import load_function

PLUGINS = ROOT / "experiments" / "plugins"
SAPO_YAML = ("--config", "experiments/methods/sapo.yaml")


BROKEN = {  # a plug-in's source and the words that its refusal contains
    "raises when imported": ("raise OSError('no GPU')", ("broken.py", "OSError")),
    "lacks the function": ("def other(inputs): ...", ("no 'plugin'",)),
    "takes no inputs": ("def plugin(): ...", ("plugin()", "gain_args")),
    "takes other arguments": ("def plugin(inputs, alpha): ...", ("alpha", "gain_args")),
    "returns no statistics": ("def plugin(inputs): return inputs.ratio", ("statistic",)),
    "returns another shape": ("def plugin(inputs): return inputs.ratio.sum(), {}", ("[2, 3]",)),
    "has no gradient": ("def plugin(inputs): return inputs.advantages, {}", ("gradient",)),
    "has another gradient": (
        "import torch\ndef plugin(inputs): return torch.ones(2, 3, requires_grad=True), {}",
        ("inputs.logprobs",),
    ),
    "changes the state when imported": ("import os; os.chdir('/')", ("working directory",)),
    "exits when imported": ("import sys; sys.exit(0)", ("SystemExit", "line 1")),
    "raises when called": ("def plugin(inputs): return inputs.logits", ("logits", "line 1")),
    "has a gain without advantage": ("def plugin(inputs): return inputs.ratio, {}", ("skip_zero_gradient",)),
    "returns statistics of another shape": (
        "def plugin(inputs): return inputs.ratio * inputs.advantages, {'n': inputs.ratio.sum()}",
        ("'n'", "[2, 3]"),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_refused_with_file_function_and_expectation(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, words = BROKEN[case]
    file = tmp_path / re.sub(r"\W", "_", case) / "broken.py"
    file.parent.mkdir()
    file.write_text(source + "\n")
    with pytest.raises(ValueError, match="algorithm.gain") as error:
        make_config(f"algorithm.gain={file}:plugin")
    for word in ("broken.py", *words):
        assert word in str(error.value)


STATISTIC = "def plugin(inputs): return inputs.ratio * inputs.advantages, {'%s': inputs.entropy}"
BROKEN |= {
    f"names a statistic {name}": (STATISTIC % name, (f"'{name}'", "another name"))
    for name in ("entropy", "score", "mismatch_mine", "account/n", "w_p99", "w_max", "w_total")
}
BASELINES = {  # group means without a guard for a tie, one completion or a missing verdict
    "divides by the spread": "advantages[members] = (rewards - rewards.mean()) / rewards.std()",
    "divides by the rest": "advantages[members] = (rewards - rewards.mean()) / (len(rewards) - 1)",
    "passes on what has no verdict": "advantages[members] = rewards; advantages[~inputs.valid] = math.nan",
    "returns a column": "advantages = inputs.rewards.unsqueeze(1)",
}


def test_a_statistic_cannot_replace_a_metric():
    """A plug-in's score would decide about the end of a stage. test_golden.py compares the page with runs."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    names = {name for cell in cells for name in re.findall(r"`([\w/]+)`", cell)}
    assert len(names) > 60
    assert {name for name in names if not is_reserved(name)} == {"ratio", "clipped", "clip_eps"}


@pytest.mark.parametrize("case", BASELINES)
def test_advantages_are_tried_with_ties_and_single_completions(case, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(
        "import math, torch\n"
        "def plugin(inputs):\n"
        "    advantages = torch.zeros_like(inputs.rewards)\n"
        "    for group in inputs.group_index.unique():\n"
        "        members = (inputs.group_index == group) & inputs.valid\n"
        "        rewards = inputs.rewards[members]\n"
        f"        {BASELINES[case]}\n"
        "    return advantages\n"
    )
    with pytest.raises(ValueError, match="algorithm.advantage.* must return"):
        make_config(f"algorithm.advantage={file}:plugin")


def test_a_selection_of_a_wrong_shape_is_refused(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import torch\ndef plugin(inputs): return torch.zeros(5)\n")
    with pytest.raises(ValueError, match="algorithm.select"):
        make_config(f"algorithm.select={file}:plugin")


def test_a_completion_without_a_verdict_gets_no_advantage_from_a_plugin(tmp_path):
    file = tmp_path / "ones.py"
    file.write_text("def ones(inputs): return 0 * inputs.rewards + 1\n")
    batch = make_batch([[1], [2], [3]])
    batch.rewards = torch.tensor([1.0, 0.0, 0.0])
    batch.valid = torch.tensor([True, False, True])
    advantages = train_rl.completion_advantages(batch, AlgorithmSettings(advantage=f"{file}:ones"))
    assert advantages.tolist() == [1.0, 0.0, 1.0]


def hook_inputs(hook: str):
    advantages = torch.tensor([[1.0], [-1.0]]) * MASK
    group_index = torch.zeros(2, dtype=torch.int64)
    if hook == "gain":
        return small_loss_inputs(AlgorithmSettings(), 1.0)
    if hook == "advantage":
        rewards, lengths = torch.tensor([1.0, 0.0]), torch.tensor([3, 2])
        return AdvantageInputs(rewards, [{}, {}], rewards >= 0, group_index, lengths, ONE_RANK)
    generators = [random.Random(0), random.Random(1)]
    return SelectInputs(advantages, advantages, advantages, MASK, group_index, generators, ONE_RANK)


GOOD = {
    "gain": "inputs.ratio * inputs.advantages, {'mine': inputs.entropy}",
    "advantage": "inputs.rewards - 0.5, {'mine': inputs.lengths.float(), 'weight': 0.25}",
    "select": "inputs.advantages * 2, {'mine': inputs.entropy, 'weight': 0.25}",
}
MISDEEDS = {  # code that runs after the start's check, between `result = ...` and `return result`
    "a column": "result = (result[0].sum(-1, keepdim=True), {})",
    "a scalar": "result = (result[0].sum(), {})",
    "one row too many": "result = (torch.cat([result[0], result[0][:1]]), {})",
    "whole numbers": "result = (result[0].long(), {})",
    "a list": "result = (result[0].tolist(), {})",
    "nothing": "result = None",
    "three values": "result = (*result, {})",
    "statistics of another shape": "result = (result[0], {'mine': torch.zeros(7)})",
    "statistics of text": "result = (result[0], {'mine': 'text'})",
    "a statistic of ours": "result = (result[0], {'score': result[0].detach()})",
    "changed inputs": "(inputs.rewards if hasattr(inputs, 'rewards') else inputs.advantages).mul_(0)",
    "changed inputs by another name": "tensor_of(inputs).data.mul_(0)",
    "changed inputs through numpy": "tensor_of(inputs).numpy()[:] = 7",
    "another input in its place": "object.__setattr__(inputs, next(iter(vars(inputs))), None)",
    "half precision": "result = (result[0].bfloat16(), {})",
    "a statistic without a name": "result = (result[0], {7: 1.0})",
    "the default dtype": "torch.set_default_dtype(torch.float64)",
    "the grad mode": "torch.set_grad_enabled(False)",
    "the number of threads": "torch._C.set_num_threads(torch.get_num_threads() + 1)",
    "the working directory": "os.chdir('/')",
    "the handler of SIGTERM": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "torchrun's variables": "os.environ['RANK'] = '7'",
    "KeyError": "{}['format']",
    "sys.exit()": "sys.exit(0)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
}
CALLS = [(hook, misdeed) for hook in GOOD for misdeed in MISDEEDS]
CALLS += [(hook, "NaN") for hook in ("advantage", "select")] + [("gain", "no gradient")]
MISDEEDS |= {"NaN": "result[0][0] = math.nan", "no gradient": "result = (result[0].detach(), {})"}


@pytest.fixture
def restored():
    handler, num_threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    yield
    signal.signal(signal.SIGTERM, handler)
    torch._C.set_num_threads(num_threads)  # an engine of this process replaces torch.set_num_threads
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("hook, misdeed", CALLS)
def test_every_call_of_a_hook_is_checked(hook, misdeed, tmp_path, monkeypatch, restored):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    file = tmp_path / "later.py"
    lines = [
        "import math, os, signal, sys, torch",
        "calls = []; tensor_of = lambda x: vars(x)['rewards' if hasattr(x, 'rewards') else 'advantages']",
        "def plugin(inputs):", f"    result = {GOOD[hook]}",
        "    calls.append(1)", f"    if len(calls) > 1: {MISDEEDS[misdeed]}", "    return result",
    ]  # fmt: skip
    file.write_text("\n".join(lines))
    algorithm = AlgorithmSettings(**{hook: f"{file}:plugin"})
    values, statistics = call_hook(algorithm, hook, hook_inputs(hook))
    assert "mine" in statistics and torch.is_tensor(values)
    with pytest.raises(RuntimeError, match=f"algorithm.{hook}: .*later.py:plugin") as error:
        call_hook(algorithm, hook, hook_inputs(hook))
    if misdeed in ("KeyError", "sys.exit()", "KeyboardInterrupt"):
        assert "(later.py, line 6)" in str(error.value)


def test_a_copy_of_the_process_ends_and_advantages_carry_no_gradient(tmp_path):
    (tmp_path / "forks.py").write_text(
        "import os, torch\nchildren = []\ndef plugin(inputs):\n    children.append(os.fork())\n"
        "    return inputs.rewards.clone().requires_grad_()\n"
    )
    algorithm = AlgorithmSettings(advantage=f"{tmp_path}/forks.py:plugin")
    values, _ = call_hook(algorithm, "advantage", hook_inputs("advantage"))
    assert not values.requires_grad
    (child,) = load_function(algorithm.advantage).call.__globals__["children"]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_statistics_of_all_hooks_become_metrics(tmp_path, one_rank):
    """Means over completions with a verdict, over the tokens of all minibatches, and of plain numbers."""
    (tmp_path / "hooks.py").write_text(
        "def advantage(inputs):\n    return inputs.rewards, {'length': inputs.lengths, 'weight': 0.25}\n"
        "def select(inputs):\n    return inputs.advantages, {'nats': inputs.entropy, 'calls': 1}\n"
    )
    hooks = [f"algorithm.{hook}={tmp_path}/hooks.py:{hook}" for hook in ("advantage", "select")]
    config = make_config(*hooks, "train.minibatches_per_step=2")
    batch = make_batch(
        [[1, 2], [3], [4, 5, 6]], None, [0, 0, 1], old_logprobs=[[-1.0] * n for n in (2, 1, 3)]
    )
    batch.entropy = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0], [4.0, 5.0, 6.0]])
    batch.minibatch = torch.tensor([0, 0, 1])
    judge_batch(batch, [Verdict(1.0, "ok"), Verdict(0.0, "timeout"), Verdict(0.0, "wrong")])
    batch.rewards = torch.tensor([1.0, 0.0, 0.0])
    advantages = train_rl.token_advantages(batch, config)
    batch.advantages = train_rl.select_tokens(advantages, batch, config, 0)
    reduced = reduce_metrics(batch_metrics(batch, [Group(0, 0), Group(1, 1)], config))
    expected = {"length": 2.5, "weight": 0.25, "nats": 3.5, "calls": 1.0}
    assert {name: reduced[name] for name in expected} == expected


SAPO = "algorithm.gain=experiments/plugins/sapo.py:sapo"


@pytest.mark.parametrize(
    "settings",
    [
        [SAPO, "algorithm.gain_args={tau: 1.0}"],
        ["algorithm.gain_args={tau: 1.0}"],
        [SAPO, "algorithm.clip_mode=none"],
        ["algorithm.gain=experiments/plugins/missing.py:sapo"],
        ["algorithm.gain=batch:LossInputs"],
    ],
)
def test_wrong_arguments_of_a_gain_are_refused(settings):
    with pytest.raises(ValueError, match="algorithm.gain"):
        make_config(*settings)


def test_a_path_in_a_yaml_is_relative_to_the_yaml(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text("def gain(x): return x.ratio * x.advantages, {}\n")
    (tmp_path / "sub" / "base.yaml").write_text("algorithm: {gain: mine.py:gain}\n")
    (tmp_path / "exp.yaml").write_text("base: sub/base.yaml\ndata: {train: [{path: x.jsonl}]}\n")
    config = train_rl.load_config(["--config", str(tmp_path / "exp.yaml")])
    assert config.algorithm.gain == f"{tmp_path}/sub/mine.py:gain"


@pytest.mark.parametrize(
    "method, setting, word",
    [
        ("gdpo", "reward.overlong_buffer=4", "GDPO"),
        ("gdpo", "reward.binary=true", "GDPO"),
        ("maxrl", "reward.repetition_coef=0.5", "MaxRL"),
        ("sapo", "algorithm.gain_args={tau_positive: 0}", "tau_positive"),
        ("top_entropy", "algorithm.select_args={fraction: 2}", "fraction"),
    ],
)
def test_a_plugin_refuses_settings_that_it_would_ignore(method, setting, word):
    method = ["--config", f"experiments/methods/{method}.yaml"]
    make_config(*method)
    with pytest.raises(ValueError, match=word):
        make_config(*method, setting)


def test_another_function_drops_the_arguments_of_the_earlier_one():
    vespo = ["--config", "experiments/methods/vespo.yaml"]
    config = make_config(*SAPO_YAML, *vespo)
    assert set(config.algorithm.gain_args) == {
        "power_positive", "power_negative", "decay_positive", "decay_negative",
    }  # fmt: skip
    config = make_config(*SAPO_YAML, "algorithm.gain=null")
    assert config.algorithm.gain is None and config.algorithm.gain_args == {}
    stages = "stages=[{name: a, until: {steps: 1}}, {name: b, algorithm: {gain: null}}]"
    _, second = stage_configs(make_config(*SAPO_YAML, stages))
    assert second.algorithm.gain is None and second.algorithm.gain_args == {}


def test_the_saved_settings_of_a_run_load_again(tmp_path):
    """config.yaml holds paths relative to run.dir, as a YAML does."""
    config = make_config(*SAPO_YAML, f"run.dir={tmp_path}")
    prepare_run_dir(tmp_path, config, None)
    assert train_rl.load_config(["--config", str(tmp_path / "config.yaml")]) == config
    assert (tmp_path / "source" / "sapo.py").is_file()
    assert list(json.loads((tmp_path / "versions.json").read_text())["plugins"]) == [config.algorithm.gain]


def test_an_absolute_and_a_relative_path_are_one_plugin():
    relative = make_config(*SAPO_YAML)
    absolute = make_config("--config", str(ROOT / SAPO_YAML[1]))
    assert relative == absolute and relative.algorithm.gain == "experiments/plugins/sapo.py:sapo"


def test_a_number_in_scientific_notation_is_a_number():
    config = make_config(*SAPO_YAML, "algorithm.gain_args={tau_positive: 1e-3}")
    assert config.algorithm.gain_args["tau_positive"] == 0.001
