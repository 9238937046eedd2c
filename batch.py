"""The types that flow through a step, in the order in which they are made.

    Request -> Completion -> Group -> GroupOutcome -> RolloutBatch -> PolicyOutputs -> LossInputs

rollout.py makes completions of requests. train_rl.py collects them in groups, one per prompt, makes the
batch of a rank, and takes the inputs of the loss from it, one micro-batch at a time.

Shapes: B completions on a rank, b in a micro-batch, T tokens of the longest (padded right), p and c of a
prompt and its completion, L layers, K experts per token, k top tokens. Log-probabilities and entropies are
in nats.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.prompts import Prompt
from reward import Verdict, score_of
from settings import AlgorithmSettings

UNFINISHED = "unfinished"  # finish_reason of a completion that a rollout has left (extras/carry.py)
# Scores of a group that differ by no more than this are equal, so that rounding does not become an advantage.
# [ours] Only the verifier's scores decide: penalties would hide that a group teaches nothing.
ZERO_VARIANCE = 1e-6


# ------------------------------------------------------------------------------------------------------------
# Sampling
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Version:
    """The policy that sampled consecutive tokens of a completion."""

    policy_version: int  # finished steps
    num_tokens: int  # inserted tokens of an episode included


@dataclass(frozen=True)
class Prefix:
    """Sampled tokens with which a completion begins, for example of a rollout that was cut off.

    The completion counts them as its own: they are trained on, scored, and part of max_new_tokens.
    """

    token_ids: list[int]
    logprobs: list[float]  # of each token by the policy that it counts as sampled by
    versions: tuple[Version, ...]  # of these tokens
    finish_reason: str | None = None  # of a prefix that is a whole completion: no token is sampled


@dataclass(frozen=True)
class Request:
    """One completion to sample. Six fields decide the order (runtime.schedule.WaitingLine): group, waited,
    expected_tokens, guessed, latency_tokens and work_tokens."""

    prompt_ids: list[int]
    seed: int  # of this request's own random numbers, so that other requests do not change the sample
    temperature: float  # 0: take the most likely token
    max_new_tokens: int
    min_new_tokens: int = 0  # suppress the end of sequence before this length
    group: int = 0  # number shared by the completions of one prompt
    group_seed: int = 0  # shared by the completions of one prompt, for an environment's random games
    expected_tokens: float = 0.0  # expected length of the completion
    waited: int = 0  # rollouts that have left its group unfinished (carry.share)
    guessed: bool = False  # expected_tokens is a guess, because this prompt was never sampled
    latency_tokens: float = 0.0  # time of the verdict, in tokens of one completion (verdict_tokens())
    work_tokens: float = 0.0  # time of the verdict, in tokens of the whole engine
    topk: int = 0  # k: most likely tokens whose log-probabilities the engine returns at each position
    prefix: Prefix | None = None  # tokens with which the completion begins; not with episodes

    def after_prefix(self) -> "Request":
        """Return the engine's request: the prefix is part of the prompt.

        Of a prefix that is a whole completion, the engine computes routes only and samples one token, which
        Completion.after() drops.
        """
        if self.prefix is None:
            return self
        num_tokens = len(self.prefix.token_ids)
        rest = 1 if self.prefix.finish_reason else self.max_new_tokens - num_tokens
        return replace(
            self, prompt_ids=[*self.prompt_ids, *self.prefix.token_ids], max_new_tokens=rest,
            min_new_tokens=max(0, self.min_new_tokens - num_tokens),
            expected_tokens=max(1.0, self.expected_tokens - num_tokens) if self.expected_tokens else 0.0,
        )  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """Consecutive tokens of a completion with one author, for example a call by the policy, or its result."""

    role: str  # "assistant": sampled by the policy; "tool" or "user": inserted (episodes.py)
    num_tokens: int

    @property
    def sampled(self) -> bool:
        """Tell whether the policy has sampled the turn, so that the turn is trained on."""
        return self.role == "assistant"


@dataclass(frozen=True)
class Completion:
    """One sampled completion, including the end-of-sequence token or stop text that ended it.

    With tools or an environment a completion is an episode: the turns of the policy, and the tokens that were
    inserted between them, in one list. Example: turns assistant 20, tool 9, assistant 5 have 34 token_ids, of
    which the loss sees 25.
    """

    token_ids: list[int]
    logprobs: list[float]  # of each token by the engine, at the request's temperature; 0 at inserted tokens
    # "stop": ended by the policy or the environment; "length": cut at max_new_tokens; "turns": max_turns are
    # used up; "context": the text to insert exceeds max_new_tokens
    finish_reason: str
    seconds: float  # from the start of generate() to the last token
    routed_experts: Tensor | None = None  # [p + c - 1, L, K] on the CPU, see validate_routes()
    topk_ids: Tensor | None = None  # [c, k] int32, the engine's most likely tokens, the likeliest first
    topk_logprobs: Tensor | None = None  # [c, k] float32, of these tokens, at the request's temperature
    turns: tuple[Turn, ...] = ()  # in their order; (): all tokens are sampled
    texts: tuple[str, ...] = ()  # of each turn, for verifiers
    num_calls: int = 0  # calls of tools
    num_call_errors: int = 0  # calls that were malformed, raised an error or exceeded the time limit
    has_open_call: bool = False  # the last turn calls a tool and has no result: no turn or budget is left
    verdict: Verdict | None = None  # by the environment, or else by a verifier as soon as it has scored
    versions: tuple[Version, ...] = ()  # of the tokens in their order

    def after(self, prefix: Prefix) -> "Completion":
        """Return the completion that begins with a prefix and goes on with these tokens.

        `versions` has those of the prefix; with_version() adds the version of the other tokens.
        """
        is_whole = prefix.finish_reason is not None
        return replace(
            self,
            token_ids=[*prefix.token_ids, *([] if is_whole else self.token_ids)],
            logprobs=[*prefix.logprobs, *([] if is_whole else self.logprobs)],
            finish_reason=prefix.finish_reason or self.finish_reason,
            versions=prefix.versions,
        )

    def with_version(self, policy_version: int) -> "Completion":
        """Return the completion with the version of the policy that sampled its last tokens."""
        num_tokens = len(self.token_ids) - sum(version.num_tokens for version in self.versions)
        versions = (*self.versions, Version(policy_version, num_tokens))
        return replace(self, versions=versions) if num_tokens else self

    @classmethod
    def restored(cls, values: dict[str, Any]) -> "Completion":
        """Return the completion of dataclasses.asdict()."""
        parts = {
            "turns": tuple(Turn(**turn) for turn in values["turns"]),
            "versions": tuple(Version(**version) for version in values["versions"]),
            "verdict": None if values["verdict"] is None else Verdict(**values["verdict"]),
        }
        return cls(**values | parts)

    @property
    def fields(self) -> dict:
        """Return {"turns": [{role, content}, ...]} of an episode, for verifiers of the user."""
        roles = [turn.role for turn in self.turns]
        texts = [{"role": role, "content": text} for role, text in zip(roles, self.texts)]
        return {"turns": texts} if texts else {}

    @property
    def sampled_mask(self) -> list[bool]:
        """Mark the sampled tokens."""
        if not self.turns:
            return [True] * len(self.token_ids)
        return [turn.sampled for turn in self.turns for _ in range(turn.num_tokens)]

    @property
    def num_sampled(self) -> int:
        """Return the number of sampled tokens."""
        if not self.turns:
            return len(self.token_ids)
        return sum(turn.num_tokens for turn in self.turns if turn.sampled)

    @property
    def answer_ids(self) -> list[int]:
        """Return the tokens to score: the last turn of the policy, or no tokens if its call has no result."""
        if not self.turns:
            return self.token_ids
        if self.has_open_call:
            return []
        return self.token_ids[len(self.token_ids) - self.turns[-1].num_tokens :]


def verdicts_of(completions: list[Completion]) -> list[Verdict]:
    """Return the verdicts of completions that have been scored; ValueError if one has not."""
    verdicts = [c.verdict for c in completions if c.verdict is not None]
    if len(verdicts) < len(completions):
        raise ValueError("a completion has no verdict")
    return verdicts


@dataclass
class Group:
    """One prompt of a step with its completions so far."""

    slot: int  # number of the group in this step, counted over all ranks
    prompt_index: int  # of the prompt in the training set
    completions: list[Completion] = field(default_factory=list)  # with their verdicts
    minibatch: int = 0  # the update of the step that trains on the group
    expected_tokens: float = 0.0  # expected length of each completion; 0: not used (rollout.schedule arrival)
    guessed: bool = False  # expected_tokens is a guess, because this prompt was never sampled
    latency_tokens: float = 0.0  # expected waits for verdict and tools, as in Request
    work_tokens: float = 0.0  # cost of each verdict, as in Request
    rank: int | None = None  # that samples the group; None: not dealt yet

    @classmethod
    def restored(cls, values: dict[str, Any]) -> "Group":
        """Return the group of dataclasses.asdict()."""
        return cls(**values | {"completions": [Completion.restored(c) for c in values["completions"]]})

    @property
    def is_finished(self) -> bool:
        """Tell whether no completion waits for a later step."""
        return all(completion.finish_reason != UNFINISHED for completion in self.completions)

    def add(self, sample: int, completion: Completion) -> None:
        """Add a completion, or replace its unfinished beginning."""
        self.completions[sample : sample + 1] = [completion]

    def outcome(self, binary: bool, part: str | None = None) -> "GroupOutcome":
        """Summarise the group for the other ranks; binary: rewards below 1 count as 0.

        part: of a weighted sum, whose scores decide about variance (zero_variance.part); None: the whole.
        """
        valid = [verdict for verdict in verdicts_of(self.completions) if not verdict.failed]
        scores = [score_of(verdict, binary) for verdict in valid]
        deciding = scores
        if part is not None:
            parts = [verdict.parts.get(part, verdict.reward) for verdict in valid]
            deciding = [float(score == 1) if binary else score for score in parts]
        return GroupOutcome(
            slot=self.slot,
            prompt_index=self.prompt_index,
            solved=sum(verdict.reward == 1 for verdict in valid),
            unsolved=sum(verdict.reward == 0 for verdict in valid),
            valid=len(valid),
            score_sum=sum(scores),
            tokens=sum(len(completion.token_ids) for completion in self.completions),
            inserted_tokens=sum(len(c.token_ids) - c.num_sampled for c in self.completions),
            turns=sum(turn.sampled for c in self.completions for turn in c.turns),
            completions=len(self.completions),
            has_variance=len(scores) >= 2 and max(deciding) - min(deciding) > ZERO_VARIANCE,
        )


class Job(NamedTuple):
    """Completions of one group to sample in a round."""

    group: Group
    samples: Sequence[int]  # their numbers within the group


@dataclass(frozen=True)
class GroupOutcome:
    """The part of a group that all ranks know."""

    slot: int
    prompt_index: int
    solved: int  # completions with reward 1
    unsolved: int  # completions with reward 0, which is all wrong ones if the verifier gives no fractions
    valid: int  # verdicts that are neither timeouts nor errors
    score_sum: float  # over the valid verdicts
    tokens: int  # of all completions together
    completions: int
    has_variance: bool
    inserted_tokens: int = 0  # part of `tokens`: inserted by tools and environments
    turns: int = 0  # of the policy, in all completions together; 0: completions have a single turn

    @property
    def is_tied(self) -> bool:
        """Tell whether the group has two or more valid scores, all equal."""
        return self.valid >= 2 and not self.has_variance


@dataclass
class Rollout:
    """The sampled completions of a step: those of this rank, and the part that all ranks know."""

    policy_version: int  # finished steps of the policy that sampled
    groups: list[Group]  # of this rank
    outcomes: dict[int, GroupOutcome]  # of all ranks, by slot
    account: Counter[str]  # prompts by fate, over all ranks

    def saved(self) -> dict[str, Any]:
        """Return the rollout as plain values and tensors, for a checkpoint."""
        return asdict(self) | {"account": dict(self.account)}

    @classmethod
    def restored(cls, values: dict[str, Any]) -> "Rollout":
        """Return the rollout of saved()."""
        groups = [Group.restored(group) for group in values["groups"]]
        outcomes = {slot: GroupOutcome(**outcome) for slot, outcome in values["outcomes"].items()}
        return cls(values["policy_version"], groups, outcomes, Counter(values["account"]))


# ------------------------------------------------------------------------------------------------------------
# Training
# ------------------------------------------------------------------------------------------------------------
@dataclass
class RolloutBatch:
    """The completions of one rank, group after group. Later phases add their results."""

    prompts: list[Prompt]  # [B]
    prompt_ids: list[list[int]]  # [B] ragged
    completion_ids: list[list[int]]  # [B] ragged
    finish_reason: list[str]  # [B] as in Completion
    verdicts: list[Verdict]  # [B]
    scores: Tensor  # [B] float64, score_of() each verdict
    valid: Tensor  # [B] bool, False without a verdict or, later, with a reward that is not finite
    # [B] bool, a valid completion of a group of two or more valid scores, all equal. The verdicts decide: a
    # reward that is not finite (run.on_nonfinite skip) makes a completion invalid, and changes no tie
    is_tied: Tensor
    response_mask: Tensor  # [B, T] bool, sampled tokens of completions, on which the loss is computed
    rollout_logprobs: Tensor  # [B, T] by the engine
    group_index: Tensor  # [B] int64, number of the group on this rank
    minibatch: Tensor  # [B] int64, update of the step
    routed_experts: list[Tensor] | None = None  # [B] of [p + c - 1, L, K] expert ids by the engine
    topk_ids: list[Tensor] | None = None  # [B] of [c, k] the engine's most likely tokens (Request.topk)
    topk_logprobs: list[Tensor] | None = None  # [B] of [c, k] by the engine, of these tokens
    old_logprobs: Tensor | None = None  # [B, T] by the trainer before the updates
    entropy: Tensor | None = None  # [B, T] full vocabulary, of the trainer's policy before the updates
    old_routes: list[Tensor] | None = None  # [B] of [p + c - 1, L, K] by the trainer before the updates
    route_mismatch: Tensor | None = None  # [B, T] 1 if old_routes differ from the engine's, else 0
    ref_logprobs: Tensor | None = None  # [B, T] by the initial policy; None without a KL penalty
    rewards: Tensor = field(init=False)  # [B]; this and advantages do not exist before their phase
    advantages: Tensor = field(init=False)  # [B, T]
    replaced: Tensor | None = None  # [B] bool, completions whose advantages an extra has replaced
    extras: dict[str, Any] = field(default_factory=dict)  # {name of an extra: its values of the step}
    # {statistic of an advantage or select plug-in: (sum, count)}
    hook_metrics: dict[str, tuple[float, int]] = field(default_factory=dict)
    turns: list[tuple[Turn, ...]] | None = None  # [B]; None: no completion has inserted tokens
    policy_versions: Tensor | None = None  # [B, T] int64, finished steps of the policy that sampled
    answer_ids: list[list[int]] = field(default_factory=list)  # [B] ragged, the scored tokens of completions

    def sampled_targets(self, rows: list[int]) -> Tensor | None:
        """Mark the sampled tokens among all completion tokens of some rows, [N] bool; None: all tokens."""
        if self.turns is None:
            return None
        return torch.cat([self.response_mask[i, : len(self.completion_ids[i])] for i in rows])

    def share_prompt_routes(self, routes: list[Tensor]) -> None:
        """Give the rows of a prompt the prompt routes of one row, for a replay with shared prompts.

        routes: [B] of [p + c - 1, L, K], replaced in place. The row is the first of those with valid prompt
        routes and the newest policy. The engine, or an old-logprob pass in several micro-batches, may route
        the end of a prompt differently for each completion, and a micro-batch takes the prompt routes of its
        first row. An update skips rows without gradient, so its first row may differ from that of the
        old-logprob pass; equal prompt routes in all rows remove this difference.
        """
        chosen: dict[tuple[int, ...], tuple[tuple[bool, int], Tensor]] = {}
        prompts = list(map(tuple, self.prompt_ids))
        for row, (prompt, ids) in enumerate(zip(prompts, routes)):
            of_prompt = ids[: len(prompt) - 1]
            version = 0 if self.policy_versions is None else int(self.policy_versions[row].max())
            key = (not (of_prompt == torch.iinfo(ids.dtype).max).any(), version)
            if prompt not in chosen or key > chosen[prompt][0]:
                chosen[prompt] = key, of_prompt
        for row, (prompt, ids) in enumerate(zip(prompts, routes)):
            _, of_prompt = chosen[prompt]
            if not torch.equal(of_prompt, ids[: len(of_prompt)]):
                routes[row] = torch.cat([of_prompt, ids[len(of_prompt) :]])

    def verifier_signs(self) -> Tensor:
        """Return [B], the sign that the verifier gives the advantage of each completion: +1, -1 or 0.

        This is the sign of the score minus the mean score of the group's valid completions. In a group of
        equal scores, completions with score 1 have +1 and completions with score 0 have -1. 0: the score is
        the mean of the group, or there is no verdict. Example: scores 0.75, 0.5, 0.5, 0.25 give 1, 0, 0, -1.
        """
        signs = torch.zeros_like(self.scores)
        for group in self.group_index.unique():
            members = (self.group_index == group) & self.valid
            scores = self.scores[members]
            excess = scores - scores.mean()
            if (excess.abs() <= ZERO_VARIANCE).all():  # a fraction gets 0
                excess = (scores >= 1).to(scores) - (scores <= 0).to(scores)
            signs[members] = torch.where(excess.abs() <= ZERO_VARIANCE, 0.0, excess.sign())
        return signs


def collate(
    groups: list[Group], prompts: list[Prompt], prompt_ids: list[list[int]], binary: bool = False
) -> RolloutBatch:
    """Make the batch of one rank's groups, log-probabilities padded right with 0.

    prompts, prompt_ids: the training set, which Group.prompt_index points into. binary: as in score_of().
    """
    rows = [(index, group, i) for index, group in enumerate(groups) for i in range(len(group.completions))]
    completions = [group.completions[i] for _, group, i in rows]
    lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int64)
    longest = max([1, *lengths.tolist()])
    response_mask = torch.arange(longest) < lengths.unsqueeze(1)  # [B, T]
    rollout_logprobs = torch.zeros(response_mask.shape)
    rollout_logprobs[response_mask] = torch.tensor([x for c in completions for x in c.logprobs])
    versions = [v.policy_version for c in completions for v in c.versions for _ in range(v.num_tokens)]
    policy_versions = None
    if len(versions) == lengths.sum():
        policy_versions = torch.zeros(response_mask.shape, dtype=torch.int64)
        policy_versions[response_mask] = torch.tensor(versions, dtype=torch.int64)
    has_turns = any(c.turns for c in completions)
    if has_turns:
        sampled = torch.tensor([x for c in completions for x in c.sampled_mask])
        response_mask = response_mask.masked_scatter(response_mask, sampled)
    routes: list = [c.routed_experts for c in completions]
    verdicts = verdicts_of(completions)
    valid = torch.tensor([not verdict.failed for verdict in verdicts], dtype=torch.bool)
    tied_groups = torch.tensor([group.outcome(binary).is_tied for group in groups], dtype=torch.bool)
    group_index = torch.tensor([index for index, _, _ in rows], dtype=torch.int64)
    topk_ids: list = [c.topk_ids for c in completions]
    topk_logprobs: list = [c.topk_logprobs for c in completions]
    has_topk = all(ids is not None for ids in topk_ids) and len(completions) > 0
    return RolloutBatch(
        prompts=[prompts[group.prompt_index] for _, group, _ in rows],
        prompt_ids=[prompt_ids[group.prompt_index] for _, group, _ in rows],
        completion_ids=[c.token_ids for c in completions],
        finish_reason=[c.finish_reason for c in completions],
        verdicts=verdicts,
        scores=torch.tensor([score_of(verdict, binary) for verdict in verdicts], dtype=torch.float64),
        valid=valid,
        is_tied=tied_groups[group_index] & valid,
        response_mask=response_mask,
        rollout_logprobs=rollout_logprobs,
        group_index=group_index,
        minibatch=torch.tensor([group.minibatch for _, group, _ in rows], dtype=torch.int64),
        routed_experts=None if not routes or any(ids is None for ids in routes) else routes,
        topk_ids=topk_ids if has_topk else None,
        topk_logprobs=topk_logprobs if has_topk else None,
        turns=[c.turns for c in completions] if has_turns else None,
        policy_versions=policy_versions,
        answer_ids=[c.answer_ids for c in completions],
    )


class PolicyOutputs(NamedTuple):
    """Outputs of a forward pass for the completions of b rows; 0 outside of response_mask."""

    logprobs: Tensor  # [b, T]
    entropy: Tensor  # [b, T] detached
    routes: list[Tensor] | None = (
        None  # [b] of [p + c - 1, L, K] ids of the experts used; None: a dense model
    )
    route_mismatch: Tensor | None = (
        None  # [b, T] 1 if routes differ from the engine's; None: no engine routes
    )
    topk_logprobs: list[Tensor] | None = None  # [b] of [c, k] of the engine's most likely tokens


@dataclass
class LossInputs:
    """Inputs of the loss of one micro-batch, which `algorithm.gain` plug-ins receive as well.

    All tensors are [b, T]. Corrections and masks (algorithm.rollout_correction) are factors of the
    advantages already; the weights of loss_agg are applied to the gain afterwards.
    """

    logprobs: Tensor  # of the current policy, with gradient
    old_logprobs: Tensor  # denominator of the ratio (algorithm.old_policy), without gradient
    rollout_logprobs: Tensor  # of the engine
    ref_logprobs: Tensor | None  # of the initial policy; None without a KL penalty
    advantages: Tensor
    entropy: Tensor  # of the old policy, over the full vocabulary
    token_groups: Tensor  # int64, tokens of a row with equal numbers share a ratio (algorithm.ratio_level)
    mask: Tensor  # bool, sampled tokens of completions
    log_vocab: float  # log of the vocabulary's size
    settings: AlgorithmSettings
    added_gain: Tensor | None = None  # by extras, added to the gain; None: no extra does
    log_ratio: Tensor = field(init=False)  # log pi - log pi_old of each token, with gradient
    ratio: Tensor = field(init=False)  # of the token's group, with gradient; set by token_gain()

    def __post_init__(self):
        """Compute the log-ratio once, so that all users share one node of the autograd graph."""
        self.log_ratio = self.logprobs - self.old_logprobs


def pessimistic(ratio: Tensor, advantages: Tensor, low, high, cap: float | None) -> tuple[Tensor, Tensor]:
    """Return PPO's gain min( min(s, cap) A, clip(s, low, high) A ), and the tokens without gradient, [B, T].

    A > 0: no gradient above `high`. A < 0: no gradient below `low`, and none above `cap`. On an edge of the
    interval the gradient is the unclipped one. cap bounds the cost of a token with A < 0:
    dual clip (arXiv 1912.09729) with c = cap, which equals the two-sided clip of INTELLECT-2 (arXiv
    2505.07291, delta = cap) for cap > high.
    """
    capped = torch.where(advantages < 0, ratio.clamp(max=cap or math.inf), ratio)
    clipped = capped.clamp(low, high)
    gain = torch.minimum(capped * advantages, clipped * advantages)
    return gain, (clipped * advantages < capped * advantages) | (capped < ratio)


# ------------------------------------------------------------------------------------------------------------
# Inputs of the other two hooks
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Collectives:
    """Sums and order statistics over all ranks, for plug-ins. Every rank has to make the same calls."""

    sum: Callable[..., list[float]]  # sum(*values): the sum of each value over all ranks, in float64
    kth_largest: Callable[[Tensor, int], float]  # kth_largest(values [n], k): of the values of all ranks


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an `algorithm.advantage` plug-in: the rewards of this rank's completions."""

    rewards: Tensor  # [B] verifier, judge and penalties together
    parts: list[dict[str, tuple[float, float]]]  # [B] {kind: (weight, score)} of a weighted sum of kinds
    valid: Tensor  # [B] bool, False without a verdict
    group_index: Tensor  # [B] int64, completions of a prompt have the same number; groups are never split
    lengths: Tensor  # [B] int64, sampled tokens
    ranks: Collectives


@dataclass(frozen=True)
class SelectInputs:
    """Inputs of an `algorithm.select` plug-in: all completions of this rank, masked to one minibatch."""

    advantages: Tensor  # [B, T]
    old_logprobs: Tensor  # [B, T]
    entropy: Tensor  # [B, T] of the old policy
    mask: Tensor  # [B, T] bool, tokens of this minibatch
    group_index: Tensor  # [B] int64
    generators: list[Random]  # [B] seeded by the row's tokens and the step, not by the rank
    ranks: Collectives
