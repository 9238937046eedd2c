"""The learning rate of each update, by transformers' schedules."""

import functools
from collections.abc import Callable

import torch
from transformers import get_scheduler

from settings import TrainSettings


@functools.cache
def lr_function(
    schedule: str, highest: float, warmup: int, num_steps: int, options: tuple[tuple[str, float], ...]
) -> Callable[[int], float]:
    """Return transformers' function from a step to the factor of the highest learning rate.

    ValueError if the schedule does not accept the options (train.lr_schedule_args).
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=highest)
    try:
        scheduler = get_scheduler(
            schedule, optimizer, num_warmup_steps=warmup, num_training_steps=num_steps,
            scheduler_specific_kwargs=dict(options),
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise ValueError(f"train.lr_schedule_args: {dict(options)} for {schedule}: {error}") from error
    return scheduler.lr_lambdas[0]


def learning_rate(train: TrainSettings, step: int) -> float:
    """Return the learning rate of update `step`, counted from 0, by train.lr_schedule.

    transformers' schedules begin and end at 0. They are shifted by one step, so that neither the first nor
    the last update has a rate of 0 [ours].
    """
    options = train.lr_schedule_args
    if train.lr_schedule == "inverse_sqrt" and train.warmup_steps == 0:
        # The shift would count as a warm-up of one step, from which transformers derives the timescale.
        options = {"timescale": 10_000} | options  # transformers' default without a warm-up
    factor = lr_function(
        train.lr_schedule, train.learning_rate, train.warmup_steps + 1, train.num_steps + 1,
        tuple(sorted(options.items())),
    )  # fmt: skip
    return train.learning_rate * factor(step + 1)


def set_learning_rate(trainer, value: float) -> None:
    """Set the learning rate of the next update."""
    for parameter_group in trainer.optimizer.param_groups:
        parameter_group["lr"] = value
