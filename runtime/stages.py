"""Stages of a run: a curriculum in which every stage has its settings and a rule that ends the stage.

    stages:
      - {name: short, until: {metric: eval/sums/accuracy, accuracy: 0.6}, rollout: {max_new_tokens: 64}}
      - {name: long, rollout: {max_new_tokens: 256}}

A stage overrides the settings of the run. In the example, the run first samples short completions; once 60 %
of the held-out sums are right, completions may have 256 tokens. The progress through the list is a
StagePosition, saved in every checkpoint; the functions on it are pure, so a resumed run takes the same
decisions as an uninterrupted one. docs/stages.md explains stages in detail.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from runtime.config import differences, merge
from settings import HandOver, Stage


# ------------------------------------------------------------------------------------------------------------
# The hand-over
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class StagePosition:
    """The position of a run in its list of stages."""

    number: int = 0  # index of the current stage, from 0
    steps: int = 0  # finished in this stage
    tokens: int = 0  # generated in this stage, over all ranks
    latest: float | None = None  # latest measurement of the stage's metric
    best: float | None = None  # highest measurement in this stage
    num_since_best: int = 0  # measurements since the best one
    first_prompt: int = 0  # prompts that the run had offered when the current order of prompts began


def after_measurement(position: StagePosition, rule: HandOver, metrics: dict[str, float]) -> StagePosition:
    """Return the position after a measurement of the rule's metric.

    Without a finite value of this metric in `metrics`, the position stays as it is.
    """
    value = metrics.get(rule.metric, math.nan)
    if not math.isfinite(value):
        return position
    if position.best is None or value > position.best:
        return replace(position, latest=value, best=value, num_since_best=0)
    return replace(position, latest=value, num_since_best=position.num_since_best + 1)


def after_step(
    position: StagePosition, rule: HandOver, tokens: int, metrics: dict[str, float]
) -> StagePosition:
    """Return the position after a step that generated `tokens` tokens over all ranks."""
    position = replace(position, steps=position.steps + 1, tokens=position.tokens + tokens)
    return after_measurement(position, rule, metrics)


def end_of_stage(position: StagePosition, rule: HandOver) -> str | None:
    """Return the reason why the stage ends, for example "800 steps", or None while the stage continues."""
    if rule.steps is not None and position.steps >= rule.steps:
        return f"{position.steps} steps"
    if rule.tokens is not None and position.tokens >= rule.tokens:
        return f"{position.tokens:,} tokens"
    if rule.accuracy is not None and position.latest is not None and position.latest >= rule.accuracy:
        return f"{rule.metric} {position.latest:.3f}, at least {rule.accuracy:g}"
    if rule.plateau is not None and position.num_since_best >= rule.plateau:
        return f"{rule.metric} did not rise above {position.best:.3f} in {position.num_since_best} values"
    return None


# ------------------------------------------------------------------------------------------------------------
# Settings of each stage
# ------------------------------------------------------------------------------------------------------------
Config = TypeVar("Config", bound=BaseModel)


def place_of(stages: list[Stage], number: int) -> str:
    """Name a stage for messages, for example "stages[1] (long)"."""
    return f"stages[{number}] ({stages[number].name})"


def settings_of_stages(
    config: Config, changeable: frozenset[str], explain: Callable[[ValidationError, str], str]
) -> list[Config]:
    """Return the complete settings of each stage; for a run without stages, the settings of the run alone.

    changeable: names of the settings, or of whole sections, that a stage may set. explain(error, prefix):
    turns a pydantic error into a message in which every name begins with the prefix. ValueError names a
    setting that is invalid or must not change between stages.
    """
    run = config.model_dump(mode="json")
    resolved = []
    for number, stage in enumerate(config.stages):
        try:
            resolved.append(type(config).model_validate(merge(run, stage.model_extra)))
        except ValidationError as error:
            raise ValueError(explain(error, f"stages[{number}].")) from error
        changes = differences(run, resolved[-1].model_dump(mode="json"))
        names = [change.split(" ", 1)[0] for change in changes]
        if fixed := [name for name in names if not {name, name.split(".")[0]} & changeable]:
            raise ValueError(
                f"stages[{number}].{fixed[0]}: cannot change from stage to stage, set it for the whole run. "
                f"A stage may set {', '.join(sorted(changeable))}"
            )
    return resolved or [config]


def check_hand_overs(stages: list[Stage], configs: list, metrics: list[set[str]]) -> None:
    """Raise ValueError for a stage that can never end, an unknown metric, or two stages with one name.

    configs: the settings of each stage; metrics: the metrics that each stage measures.
    """
    first_step = -1  # the earliest step at which the stage can begin; -1: before the first evaluation
    tokens = 0  # that the earlier stages need
    for number, (stage, config) in enumerate(zip(stages, configs)):
        place = place_of(stages, number)
        rule = stage.until
        if stage.name in [earlier.name for earlier in stages[:number]]:
            raise ValueError(f"{place}: another stage has this name; give every stage a different name")
        if number == len(stages) - 1:
            if rule != HandOver():
                raise ValueError(
                    f"{place}.until: the last stage ends with the run, by train.num_steps or "
                    "train.max_generated_tokens; leave it out"
                )
            continue
        if rule.measurements() and rule.metric not in metrics[number]:
            raise ValueError(
                f"{place}.until.metric: {rule.metric!r} is not measured in this stage; choose one of "
                f"{', '.join(sorted(metrics[number]))}"
            )
        needed = steps_needed(rule, config, first_step, tokens)
        if not needed:
            raise ValueError(f"{place} can never end: {why_never(rule, config)}")
        first_step = max(first_step, 0) + min(needed)
        tokens += rule.tokens if rule.tokens and rule == HandOver(tokens=rule.tokens) else 0
        if first_step >= config.train.num_steps:
            raise ValueError(
                f"{place} can never end: its `until` needs at least {first_step} steps from the start of the "
                f"run, which ends after train.num_steps {config.train.num_steps}; raise train.num_steps or "
                "lower `until`"
            )


def steps_needed(rule: HandOver, config, first_step: int = -1, tokens: int = 0) -> list[int]:
    """List the fewest steps after which each condition of a rule can hold; drop impossible conditions.

    first_step, tokens: when the stage begins, -1 before the first evaluation. Example: {steps: 800,
    plateau: 4} on the score of each step gives [800, 5].
    """
    needed = [rule.steps] if rule.steps is not None else []
    if rule.tokens is not None and tokens + rule.tokens < (config.train.max_generated_tokens or math.inf):
        needed.append(1)
    every = config.eval.every
    for measurements in rule.measurements():
        if not rule.metric.startswith("eval/"):
            needed.append(measurements)
        elif every:  # an evaluation at the step of a hand-over counts for the earlier stage
            first = every * (first_step // every + 1)
            needed.append(first + (measurements - 1) * every - max(first_step, 0))
    return needed


def why_never(rule: HandOver, config) -> str:
    """Explain why this rule can never trigger."""
    if rule.measurements():
        return f"until.metric {rule.metric} is measured during the run only if eval.every is above 0"
    if rule.tokens is not None:
        return (
            f"until.tokens {rule.tokens}, with those of earlier stages, must be below "
            f"train.max_generated_tokens {config.train.max_generated_tokens}, which ends the run"
        )
    return "set until.steps, until.tokens, until.accuracy or until.plateau"
