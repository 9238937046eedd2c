"""The interface of the extras: mechanisms that neither paper names and that are more than one function.

A loss, an advantage or a selection of tokens is a plug-in (plugins.py). A mechanism with a model, with other
requests to the engine or with a forward pass of its own is an extra: one file, extras/NAME.py, that is
imported only if its settings switch it on (active()); a run without it is bitwise the run without the file.
CONTRIBUTING.md lists all places of a new one. The file has a class derived from Extra, which overrides the
calls that it needs (they stand below in the order of a run), and `EXTRA = THE_CLASS()` at its end.

Keep state where its life ends: of a step in batch.extras[NAME], of a launch in run.extras[NAME], and of a
run, for a resume, in run.state.extras[NAME] as values of JSON. EXTRA has no state of its own, because
settings change from stage to stage.
"""

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from batch import Group, Job, LossInputs, PolicyOutputs, Request, RolloutBatch
from extras.settings import SECTIONS


@dataclass
class Launch:
    """The parts of a run in set-up that check() and build() of an extra read."""

    config: Any  # with the largest sizes of all stages
    configs: list  # settings of each stage
    hf_config: Any  # of the policy
    tokenizer: Any
    loaded: Any  # data.stream.LoadedSets
    offers: list  # data.stages.Offers of each stage
    state: Any  # runtime.checkpoint.TrainState, of the checkpoint or new
    context: int  # longest prompt + completion, in tokens
    extras: dict[str, Any] = field(default_factory=dict)  # becomes run.extras

    def models(self) -> dict[str, str]:
        """Return {name in versions.json: folder} of the extras' models."""
        return {name: folder for e in active(self.config) for name, folder in e.models(self.config).items()}


@dataclass(frozen=True)
class MicroBatch:
    """The rows of a micro-batch, and two functions of train_rl.py, for gain()."""

    inputs: LossInputs
    outputs: PolicyOutputs  # of the update's forward pass, with gradient
    batch: RolloutBatch
    rows: list[int]
    has_moved: bool  # the policy is no longer the one that the old-logprob pass has seen
    old_logprobs_of: Callable[..., Tensor]  # of train_rl.py
    correction_weights: Callable[..., Tensor]  # of train_rl.py


class Extra:
    """A mechanism that is off unless its section says so. Every call does nothing by default."""

    name = ""  # in messages: the setting that switches the extra on, for example "teacher.path"
    # advantages() gives each token its own one, of old log-probabilities, also in groups of equal scores
    replaces_advantages = False
    keeps_base = False  # model.path stays as it is: load() and save() have all that a checkpoint needs
    ends_rollouts = False  # is_over() may end a rollout before all completions have ended
    num_passes = 0  # forward passes of a step beside old policy and reference, at most

    # ---- settings and plan ----
    def contradictions(self, config) -> Iterable[str]:
        """Yield messages about contradictions with other settings, for refuse_contradictions()."""
        return ()

    def check_stages(self, configs: list) -> None:
        """Raise ValueError if the settings of the stages contradict each other."""

    def warnings(self, config) -> list[str]:
        """List legitimate but unusual combinations, printed once at the start."""
        return []

    def needs_baseline(self, config) -> bool:
        """Tell whether a group of one completion would have no gradient."""
        return True

    def check_model(self, config, hf_config) -> None:
        """Raise ValueError if the settings do not fit the model."""

    def trained(self, config, hf_config):
        """Return the moe_model.ParameterCounts that have gradients; None: those of the whole policy."""
        return None

    def memory(self, config, hf_config, tokens: int) -> dict[str, int]:
        """Return {part: bytes on a rank}; tokens: of a micro-batch.

        A part is one of memory_plan.memory_by_part(), for example `reference` or `on the way back`.
        """
        return {}

    def models(self, config) -> dict[str, str]:
        """Return {name in versions.json: folder of a model that is not trained}."""
        return {}

    def inputs(self, config) -> dict[str, str | None]:
        """Return {setting: file or folder} of what every rank reads by itself, to compare the copies."""
        return {}

    # ---- set-up ----
    def check(self, launch: Launch) -> None:
        """Read small files; ValueError if they do not fit, before an engine starts. Collective."""

    def engine_options(self, config) -> dict[str, Any]:
        """Return options of vllm.LLM that differ from rollout.engine_options()."""
        return {}

    def adapt(self, policy, config) -> None:
        """Change the policy before the optimizer takes its parameters."""

    def load(self, policy, folder: Path) -> None:
        """Read the files of save() from a checkpoint, after adapt()."""

    def save(self, policy, config, folder: Path, save: Callable) -> None:
        """Write files beside those of the policy, into a checkpoint or run.dir. Collective.

        save: of tensors, as in moe_model.save_hf(). Collective calls have to end before the first write.
        """

    def reference(self, policy):
        """Return the reference of a KL penalty if it needs no model of its own; None: build one."""
        return None

    def build(self, launch: Launch, ep_group, device) -> None:
        """Build models that are not trained, after the policy. Collective."""

    # ---- a step ----
    def jobs(self, run) -> list[Job]:
        """Return groups of earlier steps, of all ranks, that this step's rollout continues. Collective.

        They take the first slots, and the place of as many new prompts.
        """
        return []

    def requests(self, run, jobs: list, requests: list[Request]) -> list[Request]:
        """Return this rank's requests of a rollout round, in their order; jobs: of the requests. Collective.

        Requests of evaluations do not pass here.
        """
        return requests

    def is_over(self, run, requests: list[Request], ended: list[bool]) -> bool:
        """Tell whether this rank's rollout ends before all requests have ended (with ends_rollouts)."""
        return False

    def keep(self, run, groups: list[Group]) -> None:
        """See this rank's groups of a rollout round, also the unfinished ones. Collective."""

    def after_rollout(self, run, batch: RolloutBatch, groups: list[Group]) -> None:
        """See the completions that this rank trains on."""

    def after_old_pass(self, batch: RolloutBatch, outputs: PolicyOutputs) -> None:
        """See the outputs of the policy before the updates of a step, if there is such a pass."""

    def after_rewards(self, run, batch: RolloutBatch, forward_batch: Callable) -> None:
        """Compute forward passes of other models. Collective.

        forward_batch: of train_rl.py; call it with replay=False, because routes belong to the policy.
        """

    def advantages(self, batch: RolloutBatch, advantages: Tensor, config) -> Tensor:
        """Return the advantages [B, T], and mark rows with other advantages in batch.replaced."""
        return advantages

    def gain(self, micro_batch: MicroBatch) -> Tensor | None:
        """Return a term to add to the gain of each token, [b, T]; None: no term."""
        return None

    def metrics(self, batch: RolloutBatch) -> dict[str, tuple[float, float]]:
        """Return metrics of a step as (sum, count); runtime/metrics.py explains endings such as _total."""
        return {}

    def charged_tokens(self, metrics: dict[str, float], config) -> float:
        """Return the tokens that a step adds to train.max_generated_tokens beside the generated ones."""
        return 0.0

    # ---- checkpoints ----
    def rank_state(self, run) -> Any:
        """Return this rank's state for a checkpoint, of plain values and tensors; None: no state."""
        return None

    def restore_rank_state(self, run, values: Any) -> None:
        """Take over the values of rank_state(), after build()."""


def active(config) -> list[Extra]:
    """List the extras that the settings of a stage switch on, in the order of SECTIONS."""
    return [load(name) for name in SECTIONS if getattr(config, name).is_on]


@functools.cache
def load(name: str) -> Extra:
    """Import extras/NAME.py."""
    return importlib.import_module(f"extras.{name}").EXTRA


def added_gain(config, micro_batch: MicroBatch) -> Tensor | None:
    """Return the sum of gain() over the active extras, [b, T]; None if none has a term."""
    terms = [term for extra in active(config) if (term := extra.gain(micro_batch)) is not None]
    return functools.reduce(Tensor.add, terms) if terms else None


def metrics_of(config, batch: RolloutBatch) -> dict[str, tuple[float, float]]:
    """Return the metrics of the active extras."""
    return {name: value for extra in active(config) for name, value in extra.metrics(batch).items()}


def charged_tokens(config, metrics: dict[str, float]) -> float:
    """Return the tokens that the active extras charge for a step."""
    return sum(extra.charged_tokens(metrics, config) for extra in active(config))
