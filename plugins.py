"""Hooks for a loss, advantages and a selection of your own: algorithm.gain, .advantage and .select.

    algorithm: {gain: plugins/sapo.py:sapo, gain_args: {tau_positive: 1.0}}     # relative to this YAML

    def sapo(inputs: LossInputs, tau_positive: float = 1.0, tau_negative: float = 1.05):
        ...
        return gain, {}                                                         # [b, T], statistics [b, T]

| hook | receives | returns | called |
|---|---|---|---|
| gain | batch.LossInputs | gain [b, T] with gradient, {name: statistic [b, T]} | once per micro-batch |
| advantage | batch.AdvantageInputs | advantages [B], or (advantages, statistics) | once per step |
| select | batch.SelectInputs | advantages [B, T], or with statistics | once per minibatch of a step |

A plug-in is named in YAML or on the command line only, never by data. At the start it is imported, its
arguments are checked against its signature, and it is called with a small batch. Every later result is
checked as well. The digest of its file is part of the run's record and of every checkpoint. docs/plugins.md
has a complete example.
"""

import functools
import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable
from random import Random

import torch
from torch import Tensor

from batch import AdvantageInputs, Collectives, LossInputs, RolloutBatch, SelectInputs
from data.stream import seed_of
from extras.settings import SECTIONS
from runtime.collectives import ALL_RANKS
from settings import AlgorithmSettings, Config
from verifiers.kinds import parts_of
from verifiers.own import call_own, explain, load_function


def load_plugin(algorithm: AlgorithmSettings, hook: str) -> Callable:
    """Return the function of a hook with its arguments bound; ValueError explains what is wrong with it."""
    name = getattr(algorithm, hook)
    arguments = getattr(algorithm, f"{hook}_args")
    if not name.rpartition(":")[0].endswith(".py"):
        raise ValueError(f"algorithm.{hook}: {name!r} must be path/file.py:function")
    try:
        function = load_function(name).call
    except (Exception, SystemExit) as error:  # the file may raise anything
        raise ValueError(f"algorithm.{hook}: {name} cannot be loaded: {explain(error)}") from error
    signature = inspect.signature(function)
    try:
        signature.bind(object(), **arguments)
    except TypeError as error:
        raise ValueError(
            f"algorithm.{hook}: {name}{signature} must take the inputs of the hook and the arguments of "
            f"algorithm.{hook}_args ({', '.join(arguments) or 'none'}): {error}"
        ) from error
    return functools.partial(function, **arguments)


def call_hook(algorithm: AlgorithmSettings, hook: str, inputs) -> tuple[Tensor, dict]:
    """Call the function of a hook and check its result; RuntimeError names setting, file and line.

    Returns the result and its statistics. Everything that the function raises is an error of the run, also
    SystemExit. Collective if the plug-in calls collectives.
    """
    name = getattr(algorithm, hook)
    before = dict(vars(inputs))
    copies = {key: value.detach().clone() for key, value in before.items() if isinstance(value, Tensor)}
    try:
        result = call_own(load_plugin(algorithm, hook), inputs)
    except BaseException as error:
        raise RuntimeError(f"algorithm.{hook}: {name} fails: {explain(error)}") from error
    problem = problem_of(hook, result, inputs)
    for key, value in before.items():
        if getattr(inputs, key) is not value or key in copies and not are_same(value, copies[key]):
            problem = f"must leave its inputs as they are, it changed inputs.{key}: work on a copy (clone())"
    if problem:
        raise RuntimeError(f"algorithm.{hook}: {name} {problem}")
    values, statistics = result if isinstance(result, tuple) else (result, {})
    return values if hook == "gain" else values.detach(), statistics


def are_same(values: Tensor, copy: Tensor) -> bool:
    """Tell whether all elements are equal; NaN equals NaN."""
    return bool(((values == copy) | (values.isnan() & copy.isnan())).all())


def problem_of(hook: str, result, inputs) -> str | None:
    """Return what is wrong with the result of a hook, None if nothing is.

    An infinite gain is no problem here: its loss is infinite, and run.on_nonfinite decides.
    """
    symbols = {"gain": "[b, T]", "advantage": "[B]", "select": "[B, T]"}[hook]
    mask = inputs.valid if hook == "advantage" else inputs.mask
    size = f"{symbols} = {list(mask.shape)}"
    has_statistics = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
    if not has_statistics and (hook == "gain" or isinstance(result, tuple)):
        return (
            f"must return ({hook} {symbols}, {{name: statistic {symbols}}}), it returned {describe(result)}"
        )
    values, statistics = result if has_statistics else (result, {})
    dtypes = (torch.float32, torch.float64)  # others round
    if not (isinstance(values, Tensor) and values.dtype in dtypes and values.shape == mask.shape):
        return f"must return floats (float32) {size}, it returned {describe(values)}"
    if hook == "gain" and not values.requires_grad:
        return "returned a gain without gradient: compute it from inputs.logprobs, log_ratio or ratio"
    if hook != "gain" and not values[mask if hook == "select" else ...].isfinite().all():
        return (
            "must return finite advantages, also for a tie and without a verdict; it returned NaN or infinity"
        )
    for name, value in statistics.items():
        is_number = hook != "gain" and isinstance(value, (int, float))
        if not (is_number or isinstance(value, Tensor) and value.shape == mask.shape):
            return f"must return statistics {size}, {name!r} is {describe(value)}"
        if not isinstance(name, str):
            return f"must name its statistics by texts, not {name!r}"
        if is_reserved(name) or hook != "gain" and name in REPLACEABLE:
            return (
                f"must give the statistic {name!r} another name: docs/metrics.md lists our names, and "
                f"{', '.join(SUFFIXES)} at the end mark metrics that are no mean"
            )
    return None


def add_statistics(batch: RolloutBatch, statistics: dict, mask: Tensor) -> None:
    """Add the statistics of a hook to batch.hook_metrics, as (sum, count) over the elements of a mask."""
    for name, value in statistics.items():
        values = value[mask].double() if isinstance(value, Tensor) else torch.tensor([float(value)])
        total, count = batch.hook_metrics.get(name, (0.0, 0))
        batch.hook_metrics[name] = (total + values.sum().item(), count + len(values))


def plugin_advantages(batch: RolloutBatch, algorithm: AlgorithmSettings) -> Tensor:
    """Return the advantages [B] of algorithm.advantage, 0 without a verdict.

    Collective if the plug-in calls collectives.
    """
    parts = [
        {kind: (weight, verdict.parts.get(kind, verdict.reward)) for weight, kind in parts_of(prompt.kind)}
        for prompt, verdict in zip(batch.prompts, batch.verdicts)
    ]
    lengths = batch.response_mask.sum(dim=1)
    inputs = AdvantageInputs(batch.rewards, parts, batch.valid, batch.group_index, lengths, ALL_RANKS)
    advantages, statistics = call_hook(algorithm, "advantage", inputs)
    add_statistics(batch, statistics, batch.valid)
    return torch.where(batch.valid, advantages.to(batch.rewards.dtype), 0.0)


def plugin_selection(advantages: Tensor, batch: RolloutBatch, config: Config, step: int) -> Tensor:
    """Return the advantages [B, T] after algorithm.select has seen the tokens of one minibatch at a time.

    Collective if the plug-in calls collectives.
    """
    if batch.old_logprobs is None or batch.entropy is None:  # every group was dropped
        return advantages
    places: Counter[int] = Counter()  # of a row in its group: equal completions draw different numbers
    seeds = []
    for group, prompt, ids in zip(batch.group_index.tolist(), batch.prompt_ids, batch.completion_ids):
        seeds.append(seed_of(config.train.seed, "select", step, places[group], *prompt, *ids))
        places[group] += 1
    for number in range(config.train.minibatches_per_step):
        inputs = SelectInputs(
            advantages=advantages,
            old_logprobs=batch.old_logprobs,
            entropy=batch.entropy,
            mask=batch.response_mask & (batch.minibatch == number).unsqueeze(1),
            group_index=batch.group_index,
            generators=[Random(seed) for seed in seeds],
            ranks=ALL_RANKS,
        )
        selected, statistics = call_hook(config.algorithm, "select", inputs)
        add_statistics(batch, statistics, inputs.mask)
        advantages = torch.where(inputs.mask, selected.to(advantages.dtype), advantages)
    return advantages


def check_plugins(config: Config) -> None:
    """Call each plug-in with a small batch; ValueError if it fails or a result has a wrong type or shape."""
    checks = {"gain": check_gain, "advantage": check_advantage, "select": check_select}
    for hook, check in checks.items():
        if getattr(config.algorithm, hook) is not None:
            load_plugin(config.algorithm, hook)
            try:
                check(config)
            except RuntimeError as error:
                raise ValueError(f"{error} (with a small batch)") from error


# ------------------------------------------------------------------------------------------------------------
# The small batch: two completions of three and two tokens, of one prompt
# ------------------------------------------------------------------------------------------------------------
MASK = torch.tensor([[True, True, True], [True, True, False]])
ONE_RANK = Collectives(
    sum=lambda *values: [float(value) for value in values],
    kth_largest=lambda values, k: (
        values.double().topk(min(k, len(values))).values[-1].item() if len(values) else math.inf
    ),
)


SUFFIXES = ("p99", "hist", "max", "total")  # of metrics that reduce_metrics() does not average
PREFIXES = ("mismatch_", "token_age_")  # of our metrics
OUR_METRICS = """
    abs_dlogp abs_log_ratio completion_seconds completion_tokens cut_at_context_frac cut_at_limit_frac
    cut_at_turns_frac distinct_frac entropy entropy_group generated_tokens grad_norm invalid_routes_frac
    inversion_frac learning_rate length_error length_known_frac max_vio max_vio_ranks mismatch padding_frac
    ref_kl_k3 reward reward_latency rollout_bubble rollout_tail_frac score seconds_per_step skew_negative
    skew_positive stage step straggler_rank straggler_seconds sync_bytes sync_tensors tool_calls
    carried_groups carry_dropped draft_accepted_frac draft_tail draft_whole_frac tool_errors_frac tool_tokens
    topk_mass turns update_tokens zero_variance_frac
""".split()  # docs/metrics.md, except ratio, clipped, clip_eps and masked, which a plug-in may replace
REPLACEABLE = ("ratio", "clipped", "clip_eps", "masked")  # by a gain
OUR_GROUPS = "account clip_eps clipped eval judge part seconds verdict zero_variance".split()


def small_loss_inputs(algorithm: AlgorithmSettings, advantage: float) -> LossInputs:
    """Return the inputs of a loss for the small batch, with advantages +-advantage."""
    old_logprobs = torch.tensor([[-0.5, -1.0, -2.0], [-1.5, -0.25, 0.0]])
    logprobs = (old_logprobs + torch.tensor([[0.1, -0.2, 0.05], [-0.1, 0.3, 0.0]])).requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        rollout_logprobs=old_logprobs + 0.01,
        ref_logprobs=old_logprobs if algorithm.kl_coef > 0 else None,
        advantages=advantage * torch.tensor([[1.0], [-1.0]]) * MASK,
        entropy=torch.tensor([[1.0, 0.5, 2.0], [0.1, 1.5, 0.0]]),
        token_groups=torch.arange(3).expand(2, 3),
        mask=MASK,
        log_vocab=math.log(100),
        settings=algorithm,
    )
    inputs.ratio = inputs.log_ratio.exp()
    return inputs


def describe(value: object) -> str:
    """Describe a result by its type and, for a tensor, by its dtype and shape."""
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} {list(value.shape)}".replace("torch.", "")
    return f"a {type(value).__name__}"


def is_reserved(name: str) -> bool:
    """Tell whether a plug-in's statistic would replace a metric of ours, or be reduced like another kind."""
    group, slash, _ = name.partition("/")
    is_ours = group in OUR_METRICS or group.startswith(PREFIXES) or bool(slash) and group in OUR_GROUPS
    is_ours |= group.partition("_")[0] in SECTIONS
    return is_ours or name.rpartition("_")[2] in SUFFIXES


def check_gain(config: Config) -> None:
    """Raise RuntimeError if a gain plug-in fails, or has a gradient that updates would skip."""
    inputs = small_loss_inputs(config.algorithm, 1.0)
    values, _ = call_hook(config.algorithm, "gain", inputs)
    if torch.autograd.grad(values.sum(), inputs.logprobs, allow_unused=True)[0] is None:
        raise RuntimeError(f"algorithm.gain: {config.algorithm.gain} returned a gain without inputs.logprobs")
    if config.train.skip_zero_gradient and config.algorithm.kl_coef == 0:
        inputs = small_loss_inputs(config.algorithm, 0.0)
        values, _ = call_hook(config.algorithm, "gain", inputs)
        gradient = None  # of a constant
        if values.requires_grad:
            (gradient,) = torch.autograd.grad(values.sum(), inputs.logprobs, allow_unused=True)
        if gradient is not None and (gradient[MASK] != 0).any():
            raise RuntimeError(
                f"algorithm.gain: {config.algorithm.gain} has a gradient for tokens with advantage 0, which "
                "updates skip: set train.skip_zero_gradient=false"
            )


def check_advantage(config: Config) -> None:
    """Raise RuntimeError if an advantage plug-in fails.

    If the settings add a judge or penalties to the verifier's score, the rewards of the small batch differ
    from the parts, and can be negative, as they can in the run.
    """
    reward = config.reward
    has_penalties = reward.overlong_buffer > 0 or reward.repetition_coef > 0
    can_be_negative = has_penalties or reward.judge_mode == "pairwise_reference"
    is_changed = can_be_negative or reward.judge != "none" or reward.binary
    right, wrong = (0.75, -0.25 if can_be_negative else 0.25) if is_changed else (1.0, 0.0)
    is_right = torch.tensor([True, False, False, False, True, False, False])
    valid = torch.tensor([True, True, True, True, True, True, False])
    group_index = torch.tensor([0, 0, 1, 1, 2, 3, 3])  # two rewards, a tie, one completion, one verdict
    kinds = dict.fromkeys([source.kind or "math" for source in config.data.train] or ["math"])
    for kind, num_completions in itertools.product(kinds, (len(valid), 0)):  # a rank may have no completion
        rows = slice(num_completions)
        inputs = AdvantageInputs(
            rewards=torch.where(is_right, right, wrong)[rows],
            parts=[{name: (w, float(score)) for w, name in parts_of(kind)} for score in is_right[rows]],
            valid=valid[rows],
            group_index=group_index[rows],
            lengths=torch.arange(1, 8)[rows],
            ranks=ONE_RANK,
        )
        call_hook(config.algorithm, "advantage", inputs)


def check_select(config: Config) -> None:
    """Raise RuntimeError if a select plug-in fails."""
    advantages = torch.tensor([[1.0], [-1.0]]) * MASK
    old_logprobs = torch.tensor([[-0.5, -1.0, -2.0], [-1.5, -0.25, 0.0]])
    entropy = torch.tensor([[1.0, 0.5, 2.0], [0.1, 1.5, 0.0]])
    for num_completions in (2, 0):  # a rank may have no completion
        rows = slice(num_completions)
        inputs = SelectInputs(
            advantages=advantages[rows],
            old_logprobs=old_logprobs[rows],
            entropy=entropy[rows],
            mask=MASK[rows],
            group_index=torch.zeros(num_completions, dtype=torch.int64),
            generators=[Random(0), Random(1)][rows],
            ranks=ONE_RANK,
        )
        call_hook(config.algorithm, "select", inputs)
