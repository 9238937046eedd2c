"""Partial rollouts: completions that a rollout leaves unfinished go on in the next step.

Kimi k1.5 (arXiv 2501.12599, section 3.4); APRIL (arXiv 2509.18521). A rank ends its rollout as soon as a
share of its groups is complete. The other groups wait with the tokens sampled so far, go on in the next step
under the new policy, and are trained on when they are complete:

    step t     A done  B done  C done  D unfinished     trains on A, B, C
    step t+1   D goes on, three new prompts             trains on the three groups that are complete first

[ours: the share is one of groups, not of completions, because an advantage needs the whole group; each rank
ends by itself; waiting groups start before new ones, and a rollout waits for a group that max_age rollouts
have left unfinished, so that no prompt starves; with carry.late=drop such a group is dropped.] Every token
keeps its log-probability under the policy that sampled it, and the version of this policy
(Completion.versions); corrections such as algorithm.rollout_correction apply to each. Routes of earlier
tokens are those of the engine that finished the completion.

tokens_total counts the tokens that a step samples, also those of groups that go on or are dropped.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

import torch.distributed as dist

from batch import UNFINISHED, Group, Job, Prefix, Request, RolloutBatch
from extras.base import Extra, Launch
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
    known_tokens: int = 0  # that this rank's groups had before the rollout
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)  # of the last rollout


class Carry(Extra):
    """The extra of the section `carry`."""

    name = "carry.share"
    ends_rollouts = True

    def contradictions(self, config) -> Iterable[str]:
        """Refuse other ways to split a rollout, and cuts that would change how a completion ends."""
        zero = config.zero_variance
        rollout = config.rollout
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

    def warnings(self, config) -> list[str]:
        """Say that nothing corrects for tokens of earlier policies."""
        is_bare = (config.algorithm.old_policy, config.algorithm.rollout_correction) == ("trainer", "none")
        text = "carry.share without algorithm.rollout_correction: nothing corrects for earlier policies"
        return [text] if is_bare else []

    def check_stages(self, configs: list) -> None:
        """Refuse settings of a later stage that do not fit completions which wait from an earlier stage."""
        if any(config.carry.share is None for config in configs):
            raise ValueError("carry.share: a stage without it would drop waiting groups: set it in all")
        for name in (
            "rollout.temperature", "rollout.group_size", "rollout.max_new_tokens", "algorithm.router_replay",
            "teacher.scores",
        ):  # fmt: skip
            section, _, key = name.partition(".")
            if len({getattr(getattr(config, section), key) for config in configs}) > 1:
                raise ValueError(f"carry.share: groups may wait for the next stage: set one {name} in all")

    def build(self, launch: Launch, ep_group, device) -> None:
        """Start without waiting groups."""
        launch.extras["carry"] = Carried()

    def jobs(self, run) -> list[Job]:
        """Return the waiting groups of all ranks as jobs, oldest first. Collective."""
        carried = run.extras["carry"]
        run.engine.previous_rollout = (0, 0)  # which no checkpoint holds, and which decides who starts when
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
        """Let the requests of carried groups go on after their tokens, before all others."""
        carried = run.extras["carry"]
        ages = carried.ages
        carried.known_tokens = num_tokens(job.group for job in jobs if job.group.slot in ages)
        places = [(group, sample) for group, samples in jobs for sample in samples]
        continued = []
        for (group, sample), request in zip(places, requests):
            if group.slot in ages:
                request = replace(request, waited=ages[group.slot])
                if request.guessed:  # scouts of new groups would start before it
                    request = replace(request, guessed=False, expected_tokens=request.max_new_tokens)
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
        is_late = carry.late == "finish" and any(ages.get(slot, 0) >= carry.max_age for slot in unfinished)
        return 0 < num_complete >= math.ceil(carry.share * len(groups) - 1e-9) and not is_late

    def keep(self, run, groups: list[Group]) -> None:
        """Let the unfinished groups of this rank wait, or drop them. Collective."""
        carry = run.config.carry
        carried = run.extras["carry"]
        late = [Waiting(g, carried.ages.get(g.slot, 0) + 1) for g in groups if not g.is_finished]
        carried.waiting = [w for w in late if carry.late == "finish" or w.age < carry.max_age]
        dropped = [w.group for w in late if carry.late == "drop" and w.age >= carry.max_age]
        for waiting in carried.waiting:  # the seconds of another rollout
            group = waiting.group
            group.completions = [replace(c, seconds=math.nan) for c in group.completions]
        carried.metrics = {
            "carried_groups": (sum(from_all_ranks(len(carried.waiting))), 1),
            "carry_dropped_total": (len(dropped), 1),
            "account/wasted_late_tokens_total": (num_tokens(dropped), 1),
            "tokens_total": (num_tokens(groups) - carried.known_tokens, 1),
        }

    def after_rollout(self, run, batch: RolloutBatch, groups: list[Group]) -> None:
        """Measure the age of trained tokens in steps: of all, by tenths of the rank's lengths (_tenth_K)."""
        assert batch.policy_versions is not None, "the engine sets the versions of all completions"
        mask = batch.response_mask
        ages = (run.state.step - batch.policy_versions) * mask
        by_length = mask.sum(dim=1).argsort(stable=True)
        parts = {"mean": by_length}
        parts |= {f"tenth_{number}": rows for number, rows in enumerate(by_length.tensor_split(10), 1)}
        batch.extras["carry"] = dict(run.extras["carry"].metrics)
        for name, rows in parts.items():
            batch.extras["carry"][f"token_age_{name}"] = (int(ages[rows].sum()), int(mask[rows].sum()))

    def metrics(self, batch: RolloutBatch) -> dict[str, tuple[float, float]]:
        """Return the ages of the trained tokens, the groups that wait or are dropped, all new tokens."""
        return batch.extras["carry"]

    def rank_state(self, run) -> list[dict]:
        """Return the waiting groups of this rank."""
        return [asdict(waiting) for waiting in run.extras["carry"].waiting]

    def restore_rank_state(self, run, values: list[dict]) -> None:
        """Take over the waiting groups of a checkpoint."""
        waiting = [Waiting(Group.restored(entry["group"]), entry["age"]) for entry in values]
        run.extras["carry"].waiting = waiting


def num_tokens(groups: Iterable[Group]) -> int:
    """Return the number of tokens of all completions, finished or not."""
    return sum(len(completion.token_ids) for group in groups for completion in group.completions)


def unfinished_of(group: Group) -> list[int]:
    """List the numbers of the unfinished completions of a group."""
    return [i for i, completion in enumerate(group.completions) if completion.finish_reason == UNFINISHED]


EXTRA = Carry()
