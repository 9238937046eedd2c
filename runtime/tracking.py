"""Trackers of a run, for example TensorBoard or wandb, and where they file its metrics."""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from runtime.config import flat_settings
from settings import Config

if TYPE_CHECKING:
    from accelerate import Accelerator

# {tracker: {setting of `tracking`: argument of the tracker}}; every tracker but TensorBoard takes a project
ARGUMENTS = {
    "wandb": {"entity": "entity", "name": "name", "tags": "tags"},
    "swanlab": {"entity": "workspace", "name": "experiment_name", "tags": "tags"},
    "clearml": {"name": "task_name", "tags": "tags"},
    "mlflow": {"name": "run_name"},
    "trackio": {"name": "name"},
}
VARIABLES = {"wandb": "WANDB_PROJECT", "comet_ml": "COMET_PROJECT_NAME"}  # accelerate reads those of mlflow
MAX_SENT = 8  # texts of a step in TensorBoard
# Groups of TensorBoard, in the order in which it shows them: (name, pattern of the metrics' names)
GROUPS = [
    ("01_score", r"score|reward"),
    ("02_accuracy", r"eval/.*/(accuracy|avg_at_\d+|pass_at_\d+)"),
    ("03_verdicts", r"verdict/.*|part/.*|judge/.*|inversion_frac|reward_(latency|worker).*"),
    ("04_zero_variance", r"zero_variance.*|teacher.*"),
    ("05_update", r"((abs_log_)?ratio|clip|entropy|ref_kl|masked|lora|grad_norm|learning).*|.*_updates_max"),
    ("06_trainer_against_engine", r"abs_dlogp.*|mismatch.*|skew.*|invalid_routes.*"),
    ("07_completions", r"(completion_tokens|cut_at|distinct|draft|carried|token_age|tool|length).*|turns"),
    ("08_evaluation", r"eval/.*"),
    ("09_tokens", r".*tokens(_total|_max)?|account/.*|padding_frac|stage"),
    ("10_time", r"seconds.*|.*_seconds(_max)?|rollout_.*|straggler.*|sync.*"),
    ("11_experts", r"max_vio.*"),
]


def check_trackers(config: Config) -> None:
    """Raise ValueError for a tracker that accelerate does not know or that is not installed."""
    from accelerate.tracking import get_available_trackers

    available = [str(tracker) for tracker in get_available_trackers()]
    for name in config.run.trackers:
        if name not in available:
            raise ValueError(
                f"run.trackers: {name} is not installed, or accelerate has no such tracker; available: "
                f"{', '.join(available)}"
            )


def tracking_warnings(config: Config) -> list[str]:
    """List the settings of `tracking` that no tracker of the run takes."""
    taken = {key for name in config.run.trackers for key in ARGUMENTS.get(name, {})}
    taken |= {"project"} if set(config.run.trackers) - {"tensorboard"} else set()
    unused = [name for name, value in config.tracking if value and name not in taken]
    return [f"tracking.{name} has no effect with run.trackers {config.run.trackers}" for name in unused]


def place_of_run(tracker: str, config: Config) -> tuple[str, dict[str, object]]:
    """Return the project of a run for a tracker, and the arguments by its own names."""
    variable = os.environ.get(VARIABLES.get(tracker, ""))
    tracking = config.tracking
    project = tracking.project or variable or Path(config.run.dir).resolve().name
    values = {"entity": tracking.entity, "name": tracking.name, "tags": tracking.tags}
    names = ARGUMENTS.get(tracker, {})
    return project, {names[ours]: value for ours, value in values.items() if value and ours in names}


def start_trackers(accelerator: "Accelerator", config: Config, step: int) -> None:
    """Start the trackers of run.trackers; TensorBoard discards its records of later steps than `step`."""
    settings = {name: str(value) for name, value in flat_settings(config.model_dump(mode="json")).items()}
    started = []
    for name in config.run.trackers:  # one by one: TensorBoard uses the project's name as its folder
        accelerator.log_with = [name]
        accelerator.trackers = []  # init_trackers() appends, and starts all that are in the list
        if name == "tensorboard":
            accelerator.init_trackers(name, init_kwargs={name: {"purge_step": step + 1}})
        else:
            project, arguments = place_of_run(name, config)
            accelerator.init_trackers(project, config=settings, init_kwargs={name: arguments})
        started += accelerator.trackers
    accelerator.trackers = started


def tag_of(name: str) -> str:
    """Return the tag of a metric in TensorBoard, with its group: "01_score/score" comes first."""
    groups = (group for group, pattern in GROUPS if re.fullmatch(pattern, name))
    return f"{next(groups, '12_other')}/{name}"


def send_metrics(
    accelerator: "Accelerator", metrics: dict[str, float], step: int, warn: Callable[[str], None]
) -> None:
    """Send the metrics of a step to all trackers; warn of a tracker that fails, which costs no step."""
    for tracker in accelerator.trackers:
        is_grouped = tracker.name == "tensorboard"
        try:
            tracker.log({tag_of(n): v for n, v in metrics.items()} if is_grouped else metrics, step=step)
        except Exception as error:  # for example, a server is down; metrics.jsonl has the row anyway
            warn(f"tracker {tracker.name} refuses metrics: {type(error).__name__}")


def send_histogram(accelerator: "Accelerator", name: str, values: list[float], step: int) -> None:
    """Draw a histogram in TensorBoard, if the run has it."""
    if (writer := writer_of(accelerator)) and values:
        with contextlib.suppress(Exception):  # send_metrics() warns of a tracker that fails
            writer.add_histogram(tag_of(name), np.array(values), step)


def send_texts(accelerator: "Accelerator", rows: list[dict], tag: str, step: int) -> None:
    """Show rows of samples.jsonl or eval_samples.jsonl as texts in TensorBoard, if the run has it."""
    if (writer := writer_of(accelerator)) and rows:
        with contextlib.suppress(Exception):
            writer.add_text(tag, "\n\n---\n\n".join(map(markdown_of, rows)), step)


def markdown_of(row: dict) -> str:
    """Return a row of samples.jsonl as Markdown; indented text is code, so that nothing in it is markup."""
    advantage = "" if row.get("advantage") is None else f", advantage {row['advantage']:+.2f}"
    head = f"**{row['status']}, reward {row['reward']:.2f}{advantage}**, reference `{row['answer']!s:.200}`"
    texts = [re.sub(r"(?m)^", "    ", row[key][:4000]) for key in ("prompt", "completion")]
    return "\n\n&rarr;\n\n".join([f"{head}\n\n{texts[0]}", texts[1]])


def writer_of(accelerator: "Accelerator"):
    """Return the writer of TensorBoard; None for a run without it, and on ranks but the first."""
    names = [tracker.name for tracker in accelerator.trackers] if accelerator.is_main_process else []
    return accelerator.get_tracker("tensorboard", unwrap=True) if "tensorboard" in names else None
