"""Settings: their sources (defaults, YAML files, command line), and the refusal of wrong ones."""

import ast
import contextlib
import inspect
import itertools
import re
import shlex
import textwrap
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin

import huggingface_hub
import pytest
import torch
import transformers
import yaml
from conftest import ROOT

import configure
import lifecycle
import moe_model
import plugins
import train_rl
from configure import config_warnings
from data.prompts import PromptSource
from extras import base as extras
from runtime import tracking
from runtime.config import (
    complete,
    differences,
    free_on_resume,
    free_per_stage,
    read_yaml,
    setting_fields,
    with_paths_from,
    with_paths_to,
)
from runtime.learning_rate import learning_rate
from train_rl import Config, load_config
from verifiers.kinds import parts_of

TRAIN = "data.train=[{path: a.jsonl}]"  # the only setting without a usable default
SETTINGS = setting_fields(Config)
CHOICES = {  # {setting: values} for each setting that is a Literal
    name: get_args(info.annotation)
    for name, info in SETTINGS.items()
    if get_origin(info.annotation) is Literal
}
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.yaml"))


def load(*overrides: str, file=None):
    return load_config([*(["--config", str(file)] if file else []), TRAIN, *overrides])


def error_of(*overrides: str, file=None) -> str:
    """Return the message of the ValueError, which must be one line, as a user sees it."""
    with pytest.raises(ValueError) as caught:
        load(*overrides, file=file)
    assert type(caught.value) is ValueError, caught.value
    message = str(caught.value)
    assert "\n" not in message and message.strip() == message
    return message


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "run.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


# ---- sources -----------------------------------------------------------------------------------------------


def test_command_line_over_file_over_defaults(write):
    file = write("train: {seed: 5, num_steps: 7}\nrun: {dir: from_file}\n")
    for config in (
        load("train.num_steps=9", file=file),
        load_config(["train.num_steps=9", TRAIN, "--config", str(file)]),
    ):
        assert (config.train.num_steps, config.train.seed, config.run.dir) == (9, 5, "from_file")
        assert config.train.learning_rate == Config().train.learning_rate
        assert config.data.train[0].path == "a.jsonl"
    assert load("train.seed=1", "train.seed=2").train.seed == 2


def test_an_override_may_be_a_section_and_replaces_lists_only(write):
    file = write("train: {seed: 5}\ndata: {train: [{path: x}, {path: y}]}\n")
    config = load("train={num_steps: 3}", "data.train=[{path: z, limit: 2}]", file=file)
    assert (config.train.num_steps, config.train.seed) == (3, 5)
    assert [(source.path, source.limit) for source in config.data.train] == [("z", 2)]


def test_texts_that_yaml_cuts_are_refused(write):
    for text in ("system_prompt=Use ####.", "system_prompt=#### x", "answer_prefix=So ", "template=a\nb"):
        with pytest.raises(ValueError, match="quotes"):
            load(f"data.{text}")
    for text in (
        ": By ####.  # x",
        ":\n    By ####.",
        ": A box,\n    by ####.",
        ": By\n    ####.",
        ": [a, b #2\n  ]",
    ):
        with pytest.raises(ValueError, match="system_prompt ends at #"):
            load(file=write(f"data:\n  system_prompt{text}\n"))


def test_a_file_inherits_from_bases_and_the_later_base_wins(write):
    write("train: {seed: 1, num_steps: 1, warmup_steps: 1}\nrun: {dir: oldest}\n", "deep/oldest.yaml")
    write("base: oldest.yaml\ntrain: {num_steps: 2}\n", "deep/first.yaml")
    second = write("train: {num_steps: 3, warmup_steps: 2}\nrun: {log_every: 2}", "second.yaml")
    for bases in ("[deep/first.yaml, second.yaml]", f"[deep/first.yaml, {second}]"):
        config = load(file=write(f"base: {bases}\ntrain: {{warmup_steps: 3}}\n"))
        assert (config.train.seed, config.train.num_steps, config.train.warmup_steps) == (1, 3, 3)
        assert (config.run.dir, config.run.log_every) == ("oldest", 2)


def test_of_several_files_the_later_wins(write):
    first = write("train: {seed: 1, num_steps: 1}", "a.yaml")
    second = write("train: {seed: 2}", "b.yaml")
    config = load_config([TRAIN, "--config", str(first), "--config", str(second)])
    assert (config.train.seed, config.train.num_steps) == (2, 1)


@pytest.mark.parametrize("value", ["a.jsonl", "[a.jsonl]", "{path: a.jsonl}", "[{path: a.jsonl}]"])
def test_notations_of_prompt_sets(value, write):
    for config in (load(f"data.eval={value}"), load(file=write(f"data: {{eval: {value}}}"))):
        assert config.data.eval == [PromptSource(path="a.jsonl")]


@pytest.mark.parametrize("weight, text", [(20, "20"), (2.0, "2"), (0.25, "0.25"), (1e-7, "0.0000001")])
def test_a_weight_of_a_kind_is_written_in_full(weight, text):
    source = PromptSource(path="x", kind={"math": weight, "exact": 1})
    assert source.kind == f"{text}*math + 1*exact" and parts_of(source.kind)[0] == (weight, "math")


def test_the_text_of_an_optional_setting_names_the_word_that_turns_it_off():
    optional = {name: info for name, info in SETTINGS.items() if info.default is None}
    assert "rollout.kv_cache_gib" in optional and "data.train[].limit" in optional
    for name, info in optional.items():
        word = re.search(r"\b(null): ", info.description)[1]
        source, _, leaf = name.rpartition("[].")
        text = f"{source}=[{{path: a.jsonl, {leaf}: {word}}}]" if source else f"{name}={word}"
        if source == "stages":
            key, other = leaf.removeprefix("until."), "tokens" if leaf == "until.steps" else "steps"
            text = f"stages=[{{name: a, until: {{{other}: 1, {key}: {word}}}}}, {{name: b}}]"
        config = load(text)
        for part in name.replace("[]", ".0").split("."):
            config = config[int(part)] if part.isdigit() else getattr(config, part)
        assert config is None, name


def test_the_resolved_config_loads_as_the_same_config(write):
    config = load("train.betas=[0.8, 0.9]", "data.eval=[{path: b, difficulty: [1, 2], columns: {prompt: q}}]")
    file = write(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(["--config", str(file)]) == config


# ---- the YAML files of experiments/ -----------------------------------------------------------------------


def command_of(file) -> list[str]:
    """Return the arguments of train_rl.py in the comment at the top of a YAML file."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
    text = "\n".join(line.removeprefix("#").strip() for line in lines).replace("\\\n", " ")
    (command,) = re.findall(r"train_rl\.py (.*)", text)
    return shlex.split(command)


@cache
def config_of(file: Path) -> Config:
    """Load an experiment by its command."""
    with contextlib.chdir(ROOT):
        return load_config(command_of(file))


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: str(file.relative_to(ROOT / "experiments")))
def test_every_experiment_begins_with_its_command_and_the_command_loads(file):
    assert str(file.relative_to(ROOT)) in command_of(file)
    assert config_of(file).data.train


NOT_IN_YAMLS = {  # {(setting, choice): the reason to have a choice that no YAML makes}
    ("model.logprob_kernel", "naive"): "the oracle of the other kernels; trains the model of data.tiny",
    ("model.logprob_kernel", "chunked"): "the value of auto on CPUs, and the contrast on GPUs",
    ("model.logprob_kernel", "triton"): "the value of auto on GPUs; a run that lacks it should fail at start",
    ("model.expert_kernel", "torch"): "the value of auto until a GPU has shown the kernels",
    ("model.expert_kernel", "triton"): "the kernels that no GPU has shown yet",
    ("reward.sandbox", "rlimits"): "machines that refuse namespaces",
    ("run.on_signal", "stop"): "machines that kill a job before a checkpoint could be written",
    **{
        ("train.lr_schedule", name): "a matter of taste; no result here depends on a schedule"
        for name in CHOICES["train.lr_schedule"]
        if name not in ("constant", "constant_with_warmup")
    },
    ("teacher.groups", "zero_variance"): "also teaches prompts that are always solved",
    ("rollout.capture_routes", "off"): "engines that cannot return the experts of a token",
    ("rollout.schedule", "arrival"): "the contrast of experiments/bench; results are equal to the bit",
    ("reward.decode", "engine"): "tokenizers that cannot be sent to workers",
    ("reward.judge_mode", "pairwise_reference"): "the judge of the paper, which compares with the answer",
    ("checkpoint.resume", "weights"): "a run that resumes with another number of ranks",
    ("checkpoint.on_damage", "older"): "a start after a disk has failed",
    ("checkpoint.resume", "never"): "scripts that must not add to an earlier run",
    ("train.grad_reduce_dtype", "float32"): "twice the traffic; no result here shows a gain",
    ("run.on_nonfinite", "skip"): "long runs that are worth more than one update",
    ("reward.judge", "generative"): "the study `judge` in history, and docs/judges.md",
    ("reward.judge", "scalar"): "the same",
    ("reward.judge_mode", "round_robin"): "the same",
    ("rollout.fp8", "simulate"): "tests on CPUs, and the study `score_centering` in history",
    ("rollout.simulate_format", "mxfp4"): "the same",
}


def test_each_choice_is_a_default_or_in_a_yaml_or_has_a_reason():
    """A choice that nobody makes is not worth its branch."""
    configs = [Config(), *map(config_of, EXPERIMENTS)]
    assert {file.parent.name for file in EXPERIMENTS} >= {"environments", "methods", "zero_variance"}
    used = {(name, attrgetter(name)(config)) for name in CHOICES for config in configs}
    unused = {(name, value) for name, values in CHOICES.items() for value in values} - used
    assert unused == set(NOT_IN_YAMLS)


# ---- wrong names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting, name, near",
    [
        ("trian.seed=1", "trian.seed", "train.seed"),
        ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n", "rollout.group_size"),
        ("seed=1", "seed", "train.seed"),
        ("learning_rate=1", "learning_rate", "train.learning_rate"),
        ("train.lr=1", "train.lr", "train.learning_rate"),
        ("train.learning_rte=1", "train.learning_rte", "train.learning_rate"),
        ("train.group_size=4", "train.group_size", "rollout.group_size"),
        ("rollout.kv_cache_gb=1", "rollout.kv_cache_gb", "rollout.kv_cache_gib"),
        ("data.trian=[{path: x}]", "data.trian", "data.train"),
        ("data.eval=[{path: x, lmit: 1}]", "data.eval[].lmit", "data.eval[].limit"),
        ("data.eval=[{path: x}, {path: y, lmit: 1}]", "data.eval.1.lmit", "data.eval[].limit"),
        ("trian.sede=1", "trian.sede", "train.seed"),
        ("actor_rollout_ref.model.path=x", "actor_rollout_ref.model.path", "model.path"),
        ("rollout.val_kwargs.n=1", "rollout.val_kwargs.n", "eval.num_samples"),
        ("rollout.engine_kwargs.vllm.x=1", "rollout.engine_kwargs.vllm.x", "no counterpart"),
        ("gpu_memory_utilization=0.8", "gpu_memory_utilization", "GiB"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(setting, name, near, write):
    message = error_of(setting)
    assert message.startswith(f"{name}: ") and near in message
    section, _, value = setting.partition("=")
    for part in reversed(section.split(".")):
        value = f"{{{part}: {value}}}"
    write(value, "base.yaml")
    assert error_of(file=write(value)) == error_of(file=write("base: base.yaml")) == message


@pytest.mark.parametrize(
    "name",
    "ema.coef rollout.path path adapter.path lora2.name algorithm.entropy_weight rollout.beam_width "
    "train.foo algorithm.clip_coef train.momentum rollout.max_length train.epsilon2 "
    "x run.q optim train.warm algorithm.reward_baseline".split(),
)
def test_a_name_that_resembles_a_setting_by_accident_gets_no_proposal(name):
    message = error_of(f"{name}=1")
    assert message.startswith(f"{name}: unknown setting;") and "--help" in message


def test_all_wrong_settings_are_named_at_once():
    message = error_of("train.sed=1", "train.num_steps=x", "rollout.group_size=0")
    assert all(name in message for name in ("train.sed:", "train.num_steps:", "rollout.group_size:"))


# ---- wrong values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        "train.num_steps=1.5", "train.num_steps=", "train.seed.x=1", "run.dir=5", "train.betas=[0.9]",
        "train=5", "train=", "data.eval=5", "data.eval={pth: x}", "data.eval=[{path: x, kind: maths}]",
        "rollout.stop=['']", "rollout.stop=[true]", "train.betas=[1.5, 0.9]", "run.dir=''", 'run.dir="a\\0b"',
        "rollout.stop=['\\n']",
        *(f"reward.functions=['{name}']" for name in ("exact", "verify", "my module:verify", "module:")),
        *(f"algorithm.entropy_groups={value}" for value in ("[]", "[0.5]", "[0.5, 0.6]", "[1.2, -0.2]")),
        "algorithm.entropy_groups=[1.0, 0.0]", "train.lr_schedule_args={powr: 2} train.lr_schedule=cosine",
        "train.lr_schedule_args={min_lr: 0.1} train.lr_schedule=cosine_with_min_lr",  # for min_lr_rate
        "train.lr_schedule_args={lr_end: -1} train.lr_schedule=polynomial",
        "train.lr_schedule_args={timescale: 0} train.lr_schedule=inverse_sqrt train.warmup_steps=3",
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name(setting):
    words = re.split(r" (?=train\.(?:lr_schedule|warmup_steps)=)", setting)
    assert error_of(*words).startswith(setting.split("=")[0].removesuffix(".x"))


@pytest.mark.parametrize(
    "setting",
    [
        "rollout.group_size=0", "reward.max_failed_frac=1.1", "algorithm.tie_band=-1",
        "train.learning_rate=-1e-6",
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_with_the_range(setting):
    name, _, value = setting.partition("=")
    message = error_of(setting)
    assert re.fullmatch(rf"{name}: .*(greater|less) than (or equal to )?\d.*, found .+", message)
    assert repr(yaml.safe_load(value)).strip("'") in message


SAPO = "experiments/plugins/sapo.py:sapo"
RLOO = "experiments/plugins/rloo.py:rloo"
TOP_ENTROPY = "experiments/plugins/top_entropy.py:top_entropy"
TOPK = "centering.topk=8"
REFUSED = [
    ("rollout.max_turns=3", "rollout.max_turns 3", "data.tools"),
    ("zero_variance.probe_size=8 rollout.group_size=8", "zero_variance.probe_size 8", "rollout.group_size 8"),
    ("zero_variance.probe_size=9 rollout.group_size=8", "zero_variance.probe_size 9", "rollout.group_size 8"),
    ("zero_variance.refill=true", "zero_variance.refill True", "zero_variance.drop"),
    ("zero_variance.part=math", "zero_variance.part 'math'", "zero_variance.drop"),
    ("algorithm.rollout_correction_cap=3", "rollout_correction_cap", "algorithm.rollout_correction 'none'"),
    ("algorithm.ratio_level=sequence algorithm.ratio_form=stop_gradient algorithm.clip_mode=weight",
     "ratio_form", "clip_mode"),
    ('zero_variance.part=math zero_variance.drop=true data.train=[{"path":"a","kind":"exact"}]',
     "zero_variance.part 'math'", "data.train[].kind"),
    ("zero_variance.drop=true zero_variance.round_size=adaptive",
     "zero_variance.round_size 'adaptive'", "zero_variance.refill"),
    ("zero_variance.skip_rule=consecutive",
     "zero_variance.skip_rule 'consecutive'", "zero_variance.history False"),
    ("zero_variance.rl_zvp=true zero_variance.drop=true", "zero_variance.rl_zvp", "zero_variance.drop"),
    ("teacher.path=x zero_variance.drop=true", "teacher.path 'x'", "zero_variance.drop"),
    ("teacher.path=x teacher.groups=every zero_variance.rl_zvp=true",
     "teacher.groups 'every'", "zero_variance.rl_zvp"),
    ("teacher.groups=every", "teacher.groups", "teacher.path None"),
    ("teacher.coef=0.5", "teacher.coef 0.5", "teacher.path None"),
    ("teacher.scores=x", "teacher.scores 'x'", "teacher.path None"),
    ("teacher.token_cost=1", "teacher.token_cost", "teacher.path None"),
    ("lora.targets=[mlp]", "lora.targets", "lora.rank None"),
    ("lora.rank=8 model.freeze_router=true", "model.freeze_router", "lora.rank 8"),
    ("lora.rank=8 model.expert_kernel=triton", "model.expert_kernel 'triton'", "lora.rank 8"),
    ("carry.max_age=3", "carry.max_age 3", "carry.share None"),
    *((f"carry.share=0.5 {settings}", "carry.share 0.5", second) for settings, second in (
        ("zero_variance.probe_size=2", "zero_variance.probe_size 2"),
        ("zero_variance.drop=true zero_variance.refill=true", "zero_variance.refill True"),
        ("rollout.lag=1", "rollout.lag 1"), ("rollout.tensor_parallel=2", "rollout.tensor_parallel 2"),
        ("data.tools=[verifiers.tools:python]", "data.tools"), ("rollout.stop=['x']", "rollout.stop"),
        (f"centering.enabled=true {TOPK} algorithm.clip_mode=none", "centering.enabled True"),
    )),
    ("drafts.lenience=2", "drafts.lenience 2", "drafts.form None"),
    ("drafts.form=literal drafts.topk=9", "drafts.topk 9", "drafts.form 'literal'"),
    *((f"drafts.form=residual {settings}", "drafts.form 'residual'", second) for settings, second in (
        ("rollout.temperature=0.9", "rollout.temperature 0.9"), ("rollout.lag=1", "rollout.lag 1"),
        ("rollout.tensor_parallel=2", "rollout.tensor_parallel 2"), ("rollout.stop=['x']", "rollout.stop"),
        ("data.tools=[verifiers.tools:python]", "data.tools"), ("carry.share=0.5", "carry.share 0.5"),
        (f"centering.enabled=true {TOPK} algorithm.clip_mode=none", "centering.enabled True"),
    )),
    ("zero_variance.offline_scores=x data.environment=g.py:G",
     "zero_variance.offline_scores 'x'", "data.environment"),
    ("teacher.path=x teacher.scores=y data.environment=g.py:G", "teacher.scores 'y'", "data.environment"),
    ("zero_variance.history=true zero_variance.explore_unsolved=0 zero_variance.retest_steps=0",
     "zero_variance.explore_unsolved 0", "retest_steps 0"),
    ("reward.overlong_buffer=9 rollout.max_new_tokens=8",
     "reward.overlong_buffer 9", "rollout.max_new_tokens 8"),
    ("reward.judge=scalar", "reward.judge 'scalar'", "reward.judge_path None"),
    ("reward.judge_path=x", "reward.judge 'none'", "reward.judge_path 'x'"),
    ("reward.judge_mode=round_robin", "reward.judge_mode 'round_robin'", "reward.judge 'none'"),
    ("reward.judge=scalar reward.judge_path=x reward.judge_margin=0.5",
     "reward.judge_margin 0.5", "reward.judge 'scalar' and reward.judge_mode 'score'"),
    ("reward.judge=generative reward.judge_path=x", "reward.judge 'generative'", "reward.judge_mode 'score'"),
    (f"centering.enabled=true {TOPK} algorithm.gain={SAPO}", "centering.enabled", "algorithm.gain"),
    (f"centering.enabled=true {TOPK}", "centering.enabled True", "algorithm.clip_mode 'fixed'"),
    (f"centering.enabled=true {TOPK} algorithm.clip_mode=none data.tools=[verifiers.tools:python]",
     "centering.enabled True", "turns of data.tools"),
    (f"centering.enabled=true {TOPK} algorithm.clip_mode=none data.environment=games.py:Game",
     "centering.enabled True", "or data.environment"),
    (f"centering.enabled=true {TOPK} algorithm.clip_mode=none algorithm.ratio_level=sequence",
     "centering.enabled", "algorithm.ratio_level 'sequence'"),
    *((
        f"centering.enabled=true {TOPK} algorithm.clip_mode=none algorithm.rollout_correction={mode}",
        "centering.enabled", f"algorithm.rollout_correction '{mode}'",
    ) for mode in ("sequence_tis", "sequence_mask", "geometric_mask")),
    ("centering.enabled=true algorithm.clip_mode=none", "centering.enabled", "centering.topk 0"),
    ("reward.judge=scalar reward.judge_path=x reward.judge_template='{prompt}{first}{second}'",
     "reward.judge_template", "reward.judge 'scalar'"),
    (
        "reward.judge=generative reward.judge_path=x:y reward.judge_mode=round_robin "
        "reward.judge_template='{prompt}'",
        "reward.judge_template '{prompt}'", "places of prompt, first and second",
    ),
    ('reward.judge=scalar reward.judge_path=x reward.judge_chat_template_args={"thinks":false}',
     "reward.judge_chat_template_args", "reward.judge 'scalar'"),
    ("reward.judge=generative reward.judge_path=x reward.judge_mode=round_robin rollout.tensor_parallel=2",
     "reward.judge_path 'x'", "rollout.tensor_parallel 2"),
    ("algorithm.clip_mode=before_mean", "algorithm.clip_mode 'before_mean'", "algorithm.ratio_level 'token'"),
    ('train.lr_schedule_args={"min_lr_rate":0.1}',
     "train.lr_schedule_args {'min_lr_rate': 0.1}", "train.lr_schedule 'constant_with_warmup'"),
    ("reward.code_memory_gib=3", "reward.code_memory_gib 3.0", "reward.memory_gib 2.0"),
    ("algorithm.entropy_clip_form=over_tokens", "entropy_clip_form 'over_tokens'", "clip_mode 'fixed'"),
    ("algorithm.clip_cap=3 algorithm.clip_mode=none", "algorithm.clip_cap 3.0", "algorithm.clip_mode 'none'"),
    ("algorithm.clip_cap=1.1", "algorithm.clip_cap 1.1", "1 + algorithm.clip_eps_high 0.2"),
    ("algorithm.rollout_correction_floor=0.5",
     "algorithm.rollout_correction_floor 0.5", "algorithm.rollout_correction 'none'"),
    ("algorithm.rollout_correction=token_mask algorithm.rollout_correction_floor=3",
     "algorithm.rollout_correction_floor 3.0", "algorithm.rollout_correction_cap 2.0"),
    ('algorithm.gain_args={"a":1}', "algorithm.gain_args", "algorithm.gain"),
    ('algorithm.advantage_args={"a":1}', "algorithm.advantage_args", "algorithm.advantage"),
    ('algorithm.select_args={"a":1}', "algorithm.select_args", "algorithm.select"),
    (f"algorithm.gain={SAPO} algorithm.clip_mode=none", "algorithm.gain", "algorithm.clip_mode 'none'"),
    (f"algorithm.gain={SAPO} algorithm.clip_cap=3", "algorithm.gain", "algorithm.clip_cap 3.0"),
    (f"algorithm.advantage={RLOO} algorithm.adv_norm=mean_only", "algorithm.advantage", "'mean_only'"),
    (f"algorithm.advantage={RLOO} algorithm.tie_band=0.1", "algorithm.advantage", "algorithm.tie_band 0.1"),
    ("algorithm.ratio_form=literal", "algorithm.ratio_form 'literal'", "algorithm.ratio_level 'token'"),
    ("algorithm.old_policy=rollout algorithm.rollout_correction=sequence_tis",
     "algorithm.old_policy 'rollout'", "algorithm.rollout_correction 'sequence_tis'"),
    ("algorithm.old_policy=rollout algorithm.router_replay=r2",
     "algorithm.old_policy 'rollout'", "algorithm.router_replay 'r2'"),
    ("algorithm.router_replay=r3 rollout.capture_routes=false",
     "algorithm.router_replay 'r3'", "rollout.capture_routes 'off'"),
    ("rollout.expert_parallel=true", "rollout.expert_parallel True", "more than rollout.tensor_parallel 1"),
    ("rollout.expert_parallel=true rollout.tensor_parallel=2 rollout.fp8=simulate",
     "rollout.expert_parallel True", "rollout.fp8 'simulate'"),
    ("rollout.simulate_format=mxfp4", "rollout.simulate_format 'mxfp4'", "rollout.fp8 simulate"),
    ("rollout.fp8=on rollout.dtype=float32", "rollout.fp8 'on'", "bfloat16, not rollout.dtype 'float32'"),
    ("train.minibatches_per_step=3 rollout.prompts_per_step=8",
     "train.minibatches_per_step 3", "rollout.prompts_per_step 8"),
    ("train.offload_optimizer=true", "train.offload_optimizer True", "2, not train.zero_stage 1"),
]  # fmt: skip


@pytest.mark.parametrize("settings, first, second", REFUSED)
def test_contradictory_settings_are_refused_with_both_names(settings, first, second):
    message = error_of(*settings.split())
    assert first in message and second in message


def yields_of(function) -> set[tuple[str, int]]:
    """Return (function, line) of every yield of a function."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    numbers = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Yield)]
    return {(function.__qualname__, first + number - 1) for number in numbers}


def test_every_contradiction_is_refused_by_some_case(monkeypatch):
    """The cases reach each `yield` of a message."""
    functions = {
        configure.zero_variance_contradictions, configure.reward_contradictions,
        configure.loss_contradictions, configure.rollout_contradictions, configure.without_effect,
        *(extras.load(name).contradictions for name in extras.SECTIONS),
    }  # fmt: skip
    reached = set()

    def note(config, messages):
        active = {extra.contradictions for extra in extras.active(config)}
        for function in functions:
            if not inspect.ismethod(function) or function in active:
                generator = function(config)
                reached.update((generator.__qualname__, generator.gi_frame.f_lineno) for _ in generator)

    monkeypatch.setattr(configure, "refuse_contradictions", note)
    monkeypatch.setattr(configure, "check_fp8", lambda settings: None)
    monkeypatch.setattr(plugins, "check_plugins", lambda config: None)
    for settings, _, _ in REFUSED:
        load(*settings.split())
    assert reached == set().union(*map(yields_of, functions))


def warning_of(*settings: str) -> str:
    """Return the only warning about some settings."""
    (warning,) = config_warnings(load(*settings))
    return warning


def test_unusual_settings_are_warned_about_with_both_names():
    assert config_warnings(load()) == []
    gspo = "algorithm.ratio_level=sequence"
    several = "train.minibatches_per_step=4"
    warning = warning_of(gspo, several)
    assert "algorithm.clip_eps_high 0.2" in warning and "algorithm.ratio_level 'sequence'" in warning
    narrow = ("algorithm.clip_eps_low=3e-4", "algorithm.clip_eps_high=4e-4")
    assert config_warnings(load(gspo, *narrow, several)) == []
    for method in (gspo, "algorithm.clip_mode=weight"):
        assert "train.minibatches_per_step 1" in warning_of(method, *narrow)
        for active in (several, "train.passes_per_rollout=2", "algorithm.old_policy=rollout"):
            assert config_warnings(load(method, *narrow, active)) == []
    warning = warning_of("algorithm.loss_agg=token_group_mean")
    assert "algorithm.loss_agg" in warning and "algorithm.ratio_level 'token'" in warning
    for selection in (f"select={TOP_ENTROPY}", "rollout_correction=token_mask"):
        masked = (gspo, *narrow, several, f"algorithm.{selection}")
        warning = warning_of(*masked)
        assert "algorithm.ratio_form 'geometric'" in warning and "algorithm.ratio_level" in warning
        for remedy in ("algorithm.ratio_form=stop_gradient", "algorithm.clip_mode=weight"):
            assert config_warnings(load(*masked, remedy)) == []
    for source in ("teacher.path=x", "zero_variance.rl_zvp=true"):
        per_token = (gspo, *narrow, several, source)
        assert f"{source.partition('=')[0]} has" in warning_of(*per_token)
        assert config_warnings(load(*per_token, "algorithm.ratio_form=stop_gradient")) == []
    judge = ("reward.judge=scalar", "reward.judge_path=x")
    assert config_warnings(load(*judge)) == []
    with_tools = ("data.tools=[verifiers.tools:python]", "data.chat=always", "run.timeout_s=60")
    for name, settings in (
        ("reward.timeout_s", ("run.timeout_s=60",)),
        ("rollout.tool_timeout_s", with_tools),
    ):
        assert f"{name} 60 with run.timeout_s 60" in warning_of(*settings, f"{name}=60")
        assert config_warnings(load(*settings, f"{name}=59")) == []
    assert config_warnings(load("run.timeout_s=60", "rollout.tool_timeout_s=60")) == [], "no tools, no calls"
    assert "zero_variance.history, rl_zvp:" in warning_of(
        *judge, "zero_variance.rl_zvp=true", "zero_variance.history=true"
    )
    assert "rollout.group_size 1" in warning_of("rollout.group_size=1")
    taught = ("rollout.group_size=1", "teacher.path=x")
    assert "rollout.group_size 1" in warning_of(*taught)
    assert config_warnings(load(*taught, "teacher.groups=every")) == []
    assert config_warnings(load("rollout.group_size=1", f"algorithm.advantage={RLOO}")) == []
    taught = ("teacher.path=x", "zero_variance.history=true", "zero_variance.probe_size=4")
    assert "zero_variance.history, probe_size:" in warning_of(*taught)
    mask = ("algorithm.rollout_correction=geometric_mask", several)
    assert "masks hardly anything" in warning_of(*mask)
    assert config_warnings(load(*mask, "algorithm.rollout_correction_cap=1.02")) == []


@pytest.mark.parametrize(
    "policy, engine, limit, has_warning",
    [
        ("float32", "bfloat16", 0.1, True), ("bfloat16", "float32", 0.1, True),
        ("float32", "float32", 1e-6, False), ("bfloat16", "bfloat16", 0.1, False),
        ("bfloat16", "bfloat16", 1e-3, True), ("float32", "bfloat16", 1e-3, True),
    ],
)  # fmt: skip
def test_dtypes_that_differ_or_exceed_the_parity_check_are_announced(policy, engine, limit, has_warning):
    dtypes = (f"model.dtype={policy}", f"rollout.dtype={engine}", f"rollout.parity_mean={limit}")
    warnings = config_warnings(load(*dtypes))
    assert len(warnings) == has_warning
    for warning in warnings:
        assert "abs(dlogp)" in warning and policy in warning and engine in warning
        assert ("rollout.parity_mean" in warning) == (limit < 0.04)


def test_a_config_without_training_prompts_is_refused():
    with pytest.raises(ValueError, match=r"^data\.train: "):
        load_config([])


# ---- wrong files and arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, word",
    [
        *((text, "section") for text in ("- a\n", "abc\n", "5\n", "[]\n", "false\n", "0\n", "''\n")),
        ("train:\n  seed: 1\n  num_steps: 2\n  seed: 1\n", "line 4: key 'seed'"),
        ("train: {seed: 1}\nrun: {dir: x}\ntrain: {seed: 2}\n", "line 3: key 'train'"),
        ("data:\n  eval:\n  - path: x\n    path: y\n", "line 4: key 'path'"),
        *((text, "") for text in ("train: [1", "train: {seed: 1", "a: b: c", "\tx: 1", "data: {{x}}")),
        ("? [1]\n: 2", ""),
        (b"\xff\xfe\xfa", "UTF-8"),
        ("run: {dir: r\u00e9ponse}".encode("latin-1"), "UTF-8"),
        ("a: &a {x: 1}\nb: {<<: *a, x: 2, x: 3}", "line 2: key 'x'"),
        *((f"base: {base}\n", "base") for base in ("5", "[5]", "[[a.yaml]]", "{a: b}", "true")),
        ("base: run.yaml", "base"),
        ("base: cycle.yaml", "base"),
        ("base: none.yaml", "none.yaml"),
    ],
)
def test_a_broken_file_is_refused_by_name(content, word, write, tmp_path):
    write("base: run.yaml", "cycle.yaml")
    file = tmp_path / "run.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = error_of(file=file)
    assert str(tmp_path) in message and word in message


def test_a_merged_mapping_may_be_overridden(write):
    """The anchor's own mapping is read first, then merged twice."""
    stages = "stages: [&b {name: x, rollout: {<<: *a, lag: 2}}, {<<: *b, name: y}]"
    write(f"rollout: &a {{group_size: 4, lag: 1}}\n{stages}")
    values = read_yaml(write("base: run.yaml", "more.yaml"), Config)
    assert values["stages"] == [{"name": n, "rollout": {"group_size": 4, "lag": 2}} for n in "xy"]


def test_the_folder_of_a_run_may_begin_with_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert load("run.dir=~/runs/x").run.dir == "/home/me/runs/x"


def test_a_missing_file_is_named(tmp_path):
    for missing in (tmp_path / "none.yaml", tmp_path):
        assert str(missing) in error_of(file=missing)


# ---- resuming ----------------------------------------------------------------------------------------------


def test_settings_that_are_free_on_resume_have_the_names_of_the_comparison():
    """differences() compares section.key, so a mark on a deeper name would have no effect."""
    compared = {f"{section}.{key}" for section, values in Config().model_dump().items() for key in values}
    free = free_on_resume(Config)
    assert free < compared
    sections = ("algorithm", "zero_variance", "model", "data", "train")
    assert {name for name in free if name.partition(".")[0] in sections} == {
        "algorithm.mismatch_gate", "algorithm.mismatch_patience", "data.eval",
        "algorithm.skew_gate", "model.activation_checkpointing", "model.expert_kernel",
        "model.logprob_kernel", "train.balance",
        "train.learning_rate",
        "train.lr_schedule", "train.lr_schedule_args", "train.max_generated_tokens",
        "train.micro_batch_tokens", "train.num_steps", "train.offload_optimizer", "train.share_prompts",
        "train.skip_zero_gradient", "train.warmup_steps", "train.weight_decay",
    }  # fmt: skip
    of_samples = {"dtype", "fp8", "group_size", "max_new_tokens", "prompts_per_step", "stop", "temperature"}
    assert not {f"rollout.{key}" for key in of_samples} & free


# ---- help --------------------------------------------------------------------------------------------------


def test_help_prints_every_setting_with_its_default_and_meaning(capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"], train_rl.__doc__)
    printed, error = capsys.readouterr()
    assert caught.value.code == 0 and error == ""
    text = " ".join(printed.split())
    assert printed.startswith("usage: ") and " ".join(train_rl.__doc__.split()) in text
    assert len(SETTINGS) > 40
    free = free_on_resume(Config)
    per_stage = free_per_stage(Config)
    for name, info in SETTINGS.items():
        assert len(info.description.split()) >= 2, name
        default = "required" if info.is_required() else f"default {info.default!r}"
        marks = "; may change on resume" if name in free else ""
        marks += "; per stage" if {name, name.split(".")[0]} & per_stage else ""
        assert f" {name} ({default}{marks}) {' '.join(info.description.split())} " in text + " ", name

    sections = printed.partition("sections (")[2].partition("settings (")[0]
    assert [line.split()[0] for line in sections.splitlines()[1:] if line] == list(Config.model_fields)


@pytest.mark.parametrize("section", Config.model_fields)
def test_help_of_a_section_prints_the_settings_of_this_section_only(section, capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["train.seed=1", "--help", section])
    printed = capsys.readouterr().out
    names = [name for name in SETTINGS if re.match(rf"{section}(\.|\[|$)", name)]
    assert caught.value.code == 0 and re.findall(r"^  ([a-z_0-9.\[\]]+)  \(", printed, re.MULTILINE) == names
    assert all(SETTINGS[name].description in printed for name in names)


@pytest.mark.parametrize(
    "arguments, word",
    [(["--help", "algoritm"], "did you mean algorithm?"), (["--confgi", "x.yaml"], "--confgi")],
)
def test_an_unknown_section_or_option_is_refused_in_few_lines(arguments, word, capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(arguments)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and word in error and len(error.splitlines()) < 10


SECTIONS = {name: info.annotation.__name__ for name, info in Config.model_fields.items() if name != "stages"}


def settings_read_by(source: str) -> set[str]:
    """List the settings, as section.field, that code reads: config.train.seed, or train.seed of an alias.

    An alias is a name to which a section is assigned, or that is annotated with the class of a section.
    """
    nodes = list(ast.walk(ast.parse(source)))
    sections_of = {section: {section} for section in SECTIONS}
    for node in nodes:
        if isinstance(node, ast.Assign) and getattr(node.value, "attr", None) in SECTIONS:
            for target in node.targets:
                sections_of.setdefault(ast.unparse(target), set()).add(node.value.attr)
        if isinstance(node, ast.arg) and node.annotation is not None:
            of_class = {name for name, kind in SECTIONS.items() if kind in ast.unparse(node.annotation)}
            sections_of[node.arg] = sections_of.get(node.arg, set()) | of_class
    read = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = ast.unparse(node.value)
            sections = sections_of.get(owner, set()) | sections_of.get(owner.rpartition(".")[2], set())
            read |= {f"{section}.{node.attr}" for section in sections}
    return read


def test_every_setting_is_read_by_some_code():
    """Apart from settings.py and configure.py."""
    assert settings_read_by("def f(x: TrainSettings): g = c.rollout; g.fp8; x.seed; c.run.dir = 1") == {
        "train.seed", "rollout.fp8"
    }  # fmt: skip
    by_name = {  # sequences_at_once, Extra.name, plugins.py's names of hooks, and arguments of gains
        "rollout.max_num_seqs", "centering.enabled", "algorithm.advantage_args", "algorithm.gain_args",
        "algorithm.select_args", "algorithm.clip_cap", "algorithm.ratio_form",
    }  # fmt: skip
    folders = (ROOT, *(ROOT / name for name in ("data", "extras", "runtime", "verifiers")))
    files = [file for folder in folders for file in folder.glob("*.py")]
    files = [file for file in files if file.stem not in ("settings", "configure", "old_settings")]
    read = set().union(*(settings_read_by(file.read_text()) for file in files)) | by_name
    names = {name for name in SETTINGS if "[]" not in name and not name.startswith("stages")}
    assert len(names) > 80 and names - read == set()


# ---- resuming from a checkpoint of an earlier version ------------------------------------------------------


def test_a_setting_that_a_checkpoint_lacks_counts_as_its_default():
    settings = ("data.eval=[{path: b}]", "train.num_steps=7")
    present = load(*settings).model_dump(mode="json")
    saved = load(*settings).model_dump(mode="json")
    names = (("train", "lr_schedule"), ("train", "betas"), ("reward", "env"), ("rollout", "stop"))
    for section, key in names:
        del saved[section][key]
    del saved["data"]["train"][0]["weight"]
    del saved["data"]["eval"][0]["columns"]
    del saved["run"]
    assert differences(complete(Config, saved), present) == []
    changed = load(*settings, "train.betas=[0.5, 0.9]", "data.train=[{path: a, weight: 2}]")
    lines = differences(complete(Config, saved), changed.model_dump(mode="json"))
    assert [line.split(" ", 1)[0] for line in lines] == ["data.train", "train.betas"]
    assert lines[1] == "train.betas [0.9, 0.95] -> [0.5, 0.9]"


# ---- learning rates, trackers, models of the hub -----------------------------------------------------------


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("schedule", CHOICES["train.lr_schedule"])
def test_the_learning_rate_equals_the_next_one_of_transformers(schedule, warmup):
    """The scheduler of transformers has the same factor one step later, so that no update has rate 0."""
    options = {"cosine_with_min_lr": {"min_lr_rate": 0.1}, "polynomial": {"power": 2.0}}.get(schedule, {})
    unshifted = schedule == "inverse_sqrt" and warmup == 0  # the shift would count as a warm-up of one step
    config = load(
        "train.num_steps=10", f"train.warmup_steps={warmup}", "train.learning_rate=0.5",
        f"train.lr_schedule={schedule}", f"train.lr_schedule_args={options}",
    )  # fmt: skip
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = transformers.get_scheduler(
        schedule,
        optimizer,
        num_warmup_steps=warmup + 1,
        num_training_steps=11,
        scheduler_specific_kwargs=options or ({"timescale": 10_000} if unshifted else {}),
    )
    for step in range(10):
        optimizer.step()
        scheduler.step()
        rate = learning_rate(config.train, step)
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12) and rate > 0
    assert learning_rate(config.train, warmup) == 0.5


PLACED = [
    ("wandb", [], {}, ("run", {})),
    ("wandb", [], {"WANDB_PROJECT": "of_env"}, ("of_env", {})),
    ("wandb", ["tracking.project=p"], {"WANDB_PROJECT": "of_env"}, ("p", {})),
    ("mlflow", ["tracking.name=n"], {"WANDB_PROJECT": "of_env"}, ("run", {"run_name": "n"})),
    (
        "swanlab", ["tracking.entity=team", "tracking.name=n", "tracking.tags=[a, b]"], {},
        ("run", {"workspace": "team", "experiment_name": "n", "tags": ["a", "b"]}),
    ),
]  # fmt: skip


@pytest.mark.parametrize("tracker, settings, environment, expected", PLACED)
def test_a_tracker_files_the_run_where_settings_or_its_variable_say(
    tracker, settings, environment, expected, monkeypatch
):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = load(f"run.trackers=[tensorboard, {tracker}]", "run.dir=runs/run", *settings)
    assert tracking.place_of_run(tracker, config) == expected
    started = {}
    accelerator = SimpleNamespace(
        init_trackers=lambda project, config=None, init_kwargs=None: started.update({project: init_kwargs})
    )
    tracking.start_trackers(accelerator, config, 3)
    assert started == {"tensorboard": {"tensorboard": {"purge_step": 4}}, expected[0]: {tracker: expected[1]}}
    assert tracking.tracking_warnings(config) == []


def test_a_setting_of_tracking_that_no_tracker_takes_is_named():
    for trackers, settings, unused in (
        ("[tensorboard]", "{project: p, tags: [a]}", ["project", "tags"]),
        ("[]", "{name: n}", ["name"]),
        ("[comet_ml]", "{project: p, entity: e}", ["entity"]),
        ("[wandb]", "{project: p, entity: e, name: n, tags: [a]}", []),
    ):
        config = load(f"run.trackers={trackers}", f"tracking={settings}")
        warnings = tracking.tracking_warnings(config)
        assert [warning.split()[0] for warning in warnings] == [f"tracking.{name}" for name in unused]
        assert set(warnings) <= set(config_warnings(config))


def test_a_tracker_that_is_not_installed_is_refused_with_the_installed_ones():
    lifecycle.check_trackers(load("run.trackers=[tensorboard]"))
    for name in ("wandbb", "swanlab"):
        with pytest.raises(ValueError, match=f"run.trackers: {name}.*tensorboard"):
            lifecycle.check_trackers(load(f"run.trackers=[tensorboard, {name}]"))


def test_a_record_behind_a_link_names_the_same_files(tmp_path):
    folder = tmp_path / "disk" / "deep" / "run"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    values = {"algorithm": {"gain": f"{tmp_path}/mine.py:gain"}}
    written = with_paths_to(tmp_path / "link", values, Config)
    assert with_paths_from(tmp_path / "link", written, Config) == values != written


def test_a_model_is_a_folder_or_a_name_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    assert moe_model.model_folder(tmp_path) == tmp_path
    downloads = []

    def download(name, allow_patterns):
        downloads.append(name)
        if name == "owner/lost":
            raise OSError("cannot be\nreached")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert moe_model.model_folder("owner/model") == tmp_path and downloads == ["owner/model"]
    with pytest.raises(ValueError, match="model.path: owner/lost.*cannot be reached"):
        moe_model.model_folder("owner/lost")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty.*config.json"):
        moe_model.model_folder(tmp_path / "empty")
