"""Partial rollouts: completions that a rollout leaves unfinished go on in the next step.

Kimi k1.5 (arXiv 2501.12599, section 3.4); APRIL (arXiv 2509.18521). A rank ends its rollout as soon as a
share of its groups is complete. The other groups wait with the tokens sampled so far, go on in the next step
under the new policy, and are trained on when they are complete:

    step t     A done  B done  C done  D unfinished     trains on A, B, C
    step t+1   D goes on, three new prompts             trains on the three groups that are complete first

[ours: the share is one of groups, not of completions, because an advantage needs the whole group; each rank
ends by itself; waiting groups start first, and after max_age steps a rollout waits for them, so that no
prompt starves.] Every token keeps its log-probability under the policy that sampled it, and the version of
this policy (Completion.versions); corrections such as algorithm.rollout_correction apply to each. Routes of
earlier tokens are those of the engine that finished the completion.

With carry.late=drop the other groups are dropped, with all their tokens: the control of experiments.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

import torch.distributed as dist

from batch import UNFINISHED, Completion, Group, Job, Prefix, Request, RolloutBatch
from extras.base import Extra, Launch
from extras.settings import CarrySettings
from runtime.schedule import from_all_ranks


@dataclass
class Waiting:
    """An unfinished group."""

    group: Group  # with unfinished completions
    age: int  # rollouts that have left it unfinished


@dataclass
class Carried:
    """run.extras["carry"]."""

    waiting: list[Waiting] = field(default_factory=list)  # of this rank, oldest first
    ages: dict[int, int] = field(default_factory=dict)  # {slot: age} of the groups that a rollout continues
    num_waiting: int = 0  # over all ranks
    dropped_tokens: int = 0  # of the last rollout, of this rank


class Carry(Extra):
    """The extra of the section `carry`."""

    name = "carry.share"
    ends_rollouts = True

    def contradictions(self, config) -> Iterable[str]:
        """Refuse other ways to split a rollout, and cuts that would change how a completion ends."""
        zero = config.zero_variance
        rollout = config.rollout
        if config.carry.late == "drop" and config.carry.max_age != CarrySettings().max_age:
            yield "{carry.late} leaves no group for {carry.max_age}"
        for name, value in (("probe_size", zero.probe_size), ("refill", zero.refill)):
            if value:
                yield f"{{carry.share}} ends the only round of a step, {{zero_variance.{name}}} adds some"
        if rollout.lag:
            yield "{carry.share} and {rollout.lag} both train on tokens of earlier policies: set one"
        if rollout.tensor_parallel > 1:
            yield "{carry.share} needs an engine per rank, not {rollout.tensor_parallel}"
        if config.has_turns:
            yield "{carry.share} cannot continue an episode of {data.tools} or {data.environment}"
        if config.centering.enabled:
            yield "{carry.share} keeps no distributions of earlier policies, which {centering.enabled} needs"
        if any(isinstance(stop, str) for stop in rollout.stop):
            yield "{carry.share} may cut a text of {rollout.stop} in two: name token ids"

    def check_stages(self, configs: list) -> None:
        """Refuse settings of a later stage that do not fit completions which wait from an earlier stage."""
        rollouts = [config.rollout for config in configs]
        if any(config.carry.share is None for config in configs):
            raise ValueError(
                "carry.share: a stage without it would drop waiting groups: set it in all stages"
            )
        for name in ("temperature", "group_size"):
            if len({getattr(rollout, name) for rollout in rollouts}) > 1:
                raise ValueError(
                    f"carry.share: groups may wait for the next stage: set one rollout.{name} in all"
                )
        lengths = [rollout.max_new_tokens for rollout in rollouts]
        if lengths != sorted(lengths):
            raise ValueError(
                "carry.share: waiting completions may exceed a later, smaller rollout.max_new_tokens"
            )

    def build(self, launch: Launch, ep_group, device) -> None:
        """Start without waiting groups."""
        launch.extras["carry"] = Carried()

    def jobs(self, run) -> list[Job]:
        """Return the waiting groups of all ranks as jobs, oldest first. Collective."""
        carried = run.extras["carry"]
        local = [(w.age, w.group.prompt_index, unfinished_of(w.group)) for w in carried.waiting]
        entries = [
            (*entry, rank, i)
            for rank, of_rank in enumerate(from_all_ranks(local))
            for i, entry in enumerate(of_rank)
        ]
        entries.sort(key=lambda entry: -entry[0])  # stable: by rank and position at equal age
        jobs = []
        carried.ages = {}
        for slot, (age, prompt_index, samples, rank, position) in enumerate(entries):
            is_local = rank == dist.get_rank()
            group = carried.waiting[position].group if is_local else Group(slot, prompt_index)
            group.slot = slot
            group.rank = rank
            carried.ages[slot] = age
            jobs.append(Job(group, samples))
        carried.waiting = []
        return jobs

    def requests(self, run, jobs: list[Job], requests: list[Request]) -> list[Request]:
        """Let the requests of carried groups go on after their tokens, ahead of all others."""
        ages = run.extras["carry"].ages
        places = [(group, sample) for group, samples in jobs for sample in samples]
        continued = []
        for (group, sample), request in zip(places, requests):
            if group.slot in ages:
                ahead = ages[group.slot] * request.max_new_tokens
                request = replace(request, latency_tokens=request.latency_tokens + ahead)
                if (completion := group.completions[sample]).token_ids:
                    ids, logprobs, versions = completion.token_ids, completion.logprobs, completion.versions
                    request = replace(request, prefix=Prefix(ids, logprobs, versions))
            continued.append(request)
        return continued

    def is_over(self, run, requests: list[Request], ended: list[bool]) -> bool:
        """Tell whether a share of this rank's groups is complete, with all that have waited long enough."""
        carry = run.config.carry
        ages = run.extras["carry"].ages
        groups = {request.group for request in requests}
        unfinished = {request.group for request, has_ended in zip(requests, ended) if not has_ended}
        num_complete = len(groups) - len(unfinished)
        is_late = any(ages.get(slot, 0) >= carry.max_age for slot in unfinished)
        return num_complete >= math.ceil(carry.share * len(groups)) and not is_late

    def keep(self, run, groups: list[Group]) -> None:
        """Let the unfinished groups of this rank wait, or drop them. Collective."""
        carried = run.extras["carry"]
        groups = [group for group in groups if not group.is_finished]
        if run.config.carry.late == "drop":
            lengths = [len(completion.token_ids) for group in groups for completion in group.completions]
            carried.dropped_tokens = sum(lengths)
            return
        carried.waiting = [Waiting(group, carried.ages.get(group.slot, 0) + 1) for group in groups]
        carried.num_waiting = sum(from_all_ranks(len(groups)))

    def after_rollout(self, run, batch: RolloutBatch, groups: list[Group]) -> None:
        """Measure the ages of the trained tokens, in steps."""
        assert batch.policy_versions is not None, "the engine sets the versions of all completions"
        ages = run.state.step - batch.policy_versions[batch.response_mask]
        carried = run.extras["carry"]
        batch.extras["carry"] = (int(ages.sum()), len(ages), carried.num_waiting, carried.dropped_tokens)

    def metrics(self, batch: RolloutBatch) -> dict[str, tuple[float, float]]:
        """Return the mean age of the trained tokens, the waiting groups and all generated tokens."""
        age_sum, num_tokens, num_waiting, num_dropped = batch.extras["carry"]
        ages = {"token_age_mean": (age_sum, num_tokens), "carried_groups": (num_waiting, 1)}
        return ages | ({"tokens_total": (num_tokens + num_dropped, 1)} if num_dropped else {})

    def rank_state(self, run) -> list[dict]:
        """Return the waiting groups of this rank."""
        return [asdict(waiting) for waiting in run.extras["carry"].waiting]

    def restore_rank_state(self, run, values: list[dict]) -> None:
        """Take over the waiting groups of a checkpoint."""
        waiting = [Waiting(Group.restored(entry["group"]), entry["age"]) for entry in values]
        run.extras["carry"].waiting = waiting


def unfinished_of(group: Group) -> list[int]:
    """List the numbers of the unfinished completions of a group."""
    completions: list[Completion] = group.completions
    return [i for i, completion in enumerate(completions) if completion.finish_reason == UNFINISHED]


EXTRA = Carry()
