"""Drafts: a completion begins with tokens of the prompt's last visit (SPEC-RL, arXiv 2509.23232).

The completion of the last visit is a draft y, sampled by pi_old. One prefill of the engine gives its
log-probabilities under today's policy pi, and the longest accepted beginning is kept:

    accept y_i with probability min(1, l pi(y_i | y_<i) / pi_old(y_i | y_<i))           eq. 3 and 4 [paper]
    n = first rejected position; keep y_<n, sample what follows y_n from pi, and y_n from
        literal    pi(. | y_<n)                                                        algorithm 1 [paper]
        residual   max(0, pi - pi_old) / sum, as in speculative sampling (arXiv 2211.17192) [ours]

At lenience l = 1, residual samples from pi. literal does not: it gives the token v of a position

    P(v) = m(v) + pi(v) (1 - sum_w m(w)),   m(v) = min(pi_old(v), l pi(v)),

so that tokens that pi has raised are sampled too rarely. residual replaces the factor pi(v) by the residual.
For l > 1 neither form samples from pi. All of this holds for a draft that pi does not depend on. But pi was
trained on the draft: rewarded drafts return more often than pi alone would give them, in both forms [ours].

Kept tokens count as sampled by pi: their log-probability is today's, for the loss and as pi_old of the next
visit [paper]. All draws differ from step to step [ours: the released code repeats its seed].

residual needs the distributions at the rejected position. With all tokens of the vocabulary it is exact. With
the k likeliest tokens (drafts.topk) tokens outside of pi's k are not drawn there, and pi_old counts as 0
outside of its own k: the error of a token's distribution, in total variation, is at most the probability that
pi and pi_old together have outside of their k (metric draft_tail).
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batch import Group, Job, Prefix, Request, RolloutBatch, Version
from data.stream import seed_of
from extras.base import Extra, Launch
from runtime.schedule import exchange, from_all_ranks

LARGEST_VOCAB = 4096  # of which all log-probabilities are kept, 8 bytes each for every token of a draft


class Tokens(NamedTuple):
    """The c tokens of a completion with their log-probabilities, and those of the k likeliest tokens."""

    ids: Tensor  # [c] int32
    logprobs: Tensor  # [c] float32
    topk_ids: Tensor  # [c, k] int32
    topk_logprobs: Tensor  # [c, k] float32

    def first(self, num: int) -> "Tokens":
        """Return the first tokens."""
        return Tokens(*(values[:num] for values in self))

    def row(self, position: int) -> dict[int, float]:
        """Return {token: log-probability} of the k likeliest tokens at a position."""
        return dict(zip(self.topk_ids[position].tolist(), self.topk_logprobs[position].tolist()))

    @classmethod
    def of(cls, ids: list[int], logprobs: list[float], topk_ids=None, topk_logprobs=None) -> "Tokens":
        """Return tokens of lists; k is 0 without likely tokens."""
        num = len(ids)
        topk_ids = torch.zeros(num, 0, dtype=torch.int32) if topk_ids is None else topk_ids[:num]
        topk_logprobs = torch.zeros(num, 0) if topk_logprobs is None else topk_logprobs[:num]
        values = torch.tensor(logprobs, dtype=torch.float32)
        return cls(torch.tensor(ids, dtype=torch.int32), values, topk_ids, topk_logprobs)


@dataclass
class Draft:
    """The completion of a prompt's last visit, in an earlier step."""

    prompt: int  # digest of the prompt's token ids
    tokens: Tokens  # by the policy that each token counts as sampled by
    has_ended: bool  # with an end-of-sequence token
    slot: int  # of the group in its step


@dataclass
class Drafts:
    """run.extras["drafts"]."""

    vocab_size: int
    cache: dict[tuple[int, int], Draft] = field(default_factory=dict)  # by prompt and sample, of this rank
    fresh: dict[tuple[int, int], Draft] = field(default_factory=dict)  # of this step, whose policy is today's
    # accepted tokens and tokens that begin each completion of a round, by slot and sample
    begun: dict[tuple[int, int], tuple[int, Tokens | None]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)  # of the step

    def take(self, places: list[tuple[int, int, int]]) -> dict[tuple[int, int], Draft]:
        """Return the drafts of this rank's (slot, sample, prompt), by slot and sample. Collective.

        A draft stays on the rank that sampled it until a rank asks, and is used once. If several groups of a
        step had the prompt, that of the largest slot counts.
        """
        gathered = from_all_ranks(places)
        parcels: list[list] = [[] for _ in gathered]
        for place, rank in sorted((place, r) for r, of_rank in enumerate(gathered) for place in of_rank):
            slot, sample, prompt = place
            if (draft := self.cache.pop((prompt, sample), None)) is not None:
                parcels[rank].append((slot, sample, draft))
        received = sorted(exchange(parcels), key=lambda parcel: parcel[-1].slot)
        return {(slot, sample): draft for slot, sample, draft in received}


def begin(draft: Tokens, today: Tokens, form: str, lenience: float, random: Random) -> tuple[int, Tokens]:
    """Return the number of accepted tokens, and these tokens; `residual` adds that of the rejected position.

    draft, today: the same tokens with log-probabilities by the old and by today's policy.
    """
    num = 0
    for old, new in zip(draft.logprobs.tolist(), today.logprobs.tolist()):
        exponent = min(math.log(lenience) + new - old, 0.0)  # in this order NaN stays NaN ...
        if not random.random() < math.exp(exponent):  # ... and is rejected
            break
        num += 1
    beginning = today.first(num)
    if form == "literal" or num == len(draft.ids):
        return num, beginning
    old_row = draft.row(num) | {int(draft.ids[num]): float(draft.logprobs[num])}
    new_row = today.row(num)
    token = residual_token(old_row, new_row, random)
    if token is not None:
        ids = [*beginning.ids.tolist(), token]
        logprobs = [*beginning.logprobs.tolist(), new_row[token]]
        beginning = Tokens.of(ids, logprobs, today.topk_ids, today.topk_logprobs)
    return num, beginning


def residual_token(old: dict[int, float], new: dict[int, float], random: Random) -> int | None:
    """Draw a token from max(0, pi - pi_old) / sum; None if pi exceeds pi_old nowhere, but for rounding.

    old, new: {token: log-probability}; a token that `old` lacks counts as probability 0.
    """
    tokens = list(new)
    weights = [max(0.0, math.exp(new[v]) - math.exp(old.get(v, -math.inf))) for v in tokens]
    return random.choices(tokens, weights)[0] if sum(weights) > 0 else None


def score_drafts(engine, drafts: list[tuple[list[int], Tokens]], topk: int) -> list[Tokens]:
    """Return the tokens of each (prompt ids, draft) with the engine's log-probabilities of today.

    Equal drafts share one prefill, and the prefix cache holds the prompt of a group. vLLM returns no
    log-probabilities of cached tokens. So a draft that begins with cached tokens of another draft is read a
    second time, without the cache.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    pairs = [(tuple(prompt_ids), tuple(draft.ids.tolist())) for prompt_ids, draft in drafts]
    scored: dict[tuple, Tokens] = {}
    for skip_cache in (False, True):
        params = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=topk, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY, skip_reading_prefix_cache=skip_cache,
        )  # fmt: skip
        pending = {str(i): pair for i, pair in enumerate(dict.fromkeys(pairs)) if pair not in scored}
        for request_id, (prompt_ids, ids) in pending.items():
            engine.engine.add_request(request_id, {"prompt_token_ids": [*prompt_ids, *ids]}, params)
        while pending:
            for output in engine.step():
                prompt_ids, ids = pair = pending.pop(output.request_id)
                if output.num_cached_tokens >= len(prompt_ids):
                    continue  # the second time
                flat = output.prompt_logprobs  # of each token but the first: the token, then the likeliest
                size = (1 + topk) * len(ids)
                table = torch.tensor(flat.logprobs[-size:], dtype=torch.float32).view(-1, 1 + topk)
                tokens = torch.tensor(flat.token_ids[-size:], dtype=torch.int32).view(-1, 1 + topk)
                columns = (tokens[:, 0], table[:, 0], tokens[:, 1:], table[:, 1:])
                scored[pair] = Tokens(*(column.clone() for column in columns))
    return [scored[pair] for pair in pairs]


class DraftsExtra(Extra):
    """The calls of a run with drafts."""

    name = "drafts.form"

    def contradictions(self, config) -> Iterable[str]:
        """Refuse distributions and completions that a draft does not fit."""
        rollout = config.rollout
        if rollout.temperature != 1:
            yield "{drafts.form} verifies tokens at temperature 1 only, not {rollout.temperature}"
        if rollout.lag:
            yield "{drafts.form} and {rollout.lag} both use completions of earlier policies: set one"
        if rollout.tensor_parallel > 1:
            yield "{drafts.form} needs an engine per rank, not {rollout.tensor_parallel}"
        if any(isinstance(stop, str) for stop in rollout.stop):
            yield "{drafts.form} may cut a text of {rollout.stop} in two: name token ids"
        if config.has_turns:
            yield "{drafts.form} cannot verify an episode of {data.tools} or {data.environment}"
        if config.carry.is_on:
            yield "{drafts.form} needs whole completions, {carry.share} leaves some unfinished: set one"
        if config.centering.enabled:
            yield "{drafts.form} and {centering.enabled} both ask the engine for likely tokens: set one"
        if config.drafts.form == "literal" and config.drafts.topk:
            yield "{drafts.topk} has no effect with {drafts.form}, which needs no residual"

    def warnings(self, config) -> list[str]:
        """Records of prompts count the verdict of a kept completion again."""
        zero = config.zero_variance
        by_record = [name for name in ("history", "probe_size") if getattr(zero, name)]
        text = "a completion that is kept as a whole repeats its verdict, which is no new evidence"
        return [f"drafts.form with zero_variance.{', '.join(by_record)}: {text}"] if by_record else []

    def check_model(self, config, hf_config) -> None:
        """Refuse more likely tokens than there are, and a vocabulary that is too large to keep."""
        topk = config.drafts.topk
        vocab_size = hf_config.vocab_size
        if topk > vocab_size:
            raise ValueError(f"drafts.topk {topk} exceeds the model's vocabulary of {vocab_size:,} tokens")
        if config.drafts.form == "residual" and topk == 0 and vocab_size > LARGEST_VOCAB:
            raise ValueError(
                f"drafts.form residual would keep {vocab_size:,} log-probabilities per token of a draft: "
                "set drafts.topk, for example to 128"
            )

    def engine_options(self, config) -> dict[str, Any]:
        """Allow requests for any number of log-probabilities per token."""
        return {"max_logprobs": -1} if config.drafts.form == "residual" else {}

    def build(self, launch: Launch, ep_group, device) -> None:
        """Start without drafts."""
        launch.extras["drafts"] = Drafts(launch.hf_config.vocab_size)

    def jobs(self, run) -> list[Job]:
        """Begin to count the tokens of a step."""
        run.extras["drafts"].counts = Counter()
        return []

    def requests(self, run, jobs: list[Job], requests: list[Request]) -> list[Request]:
        """Verify the drafts of a round, and let completions begin with the accepted tokens. Collective."""
        state = run.extras["drafts"]
        topk = 0 if run.config.drafts.form == "literal" else run.config.drafts.topk or state.vocab_size
        places = [(group.slot, sample, group.prompt_index) for group, samples in jobs for sample in samples]
        by_place = {place[:2]: request for place, request in zip(places, requests)}
        drafts = {
            place: draft
            for place, stored in state.take(places).items()
            if (draft := usable(stored, by_place[place], state)) is not None
        }
        with run.clock("rollout"):
            sequences = [(by_place[place].prompt_ids, draft.tokens) for place, draft in drafts.items()]
            today = dict(zip(drafts, score_drafts(run.engine, sequences, topk)))
        state.begun = {place: (0, None) for place in by_place}
        for place, draft in drafts.items():
            by_place[place] = self.with_draft(run, place, by_place[place], draft, today[place])
        return [replace(request, topk=topk) for request in by_place.values()]

    def with_draft(self, run, place, request: Request, draft: Draft, today: Tokens) -> Request:
        """Return a request that begins with the accepted tokens of a draft, and count them."""
        settings = run.config.drafts
        random = Random(seed_of(run.config.train.seed, "draft", run.state.step, *place))
        num, beginning = begin(draft.tokens, today, settings.form, settings.lenience, random)
        ids = beginning.ids.tolist()
        is_whole = num == len(draft.tokens.ids)
        has_ended = draft.has_ended if is_whole else len(ids) > num and ids[-1] in run.engine.stop_ids
        state = run.extras["drafts"]
        state.begun[place] = (num, beginning)
        state.counts.update(drafts=1, whole=is_whole, verified=len(draft.tokens.ids), accepted=num)
        if len(ids) > num:
            rows = (draft.tokens.topk_logprobs[num], today.topk_logprobs[num])
            tails = [max(0.0, 1 - row.double().exp().sum().item()) for row in rows]
            state.counts.update({"drawn": 1, "tail": sum(tails)})
        if not ids:
            return request
        versions = (Version(run.state.step, len(ids)),)
        prefix = Prefix(ids, beginning.logprobs.tolist(), versions, "stop" if has_ended else None)
        return replace(request, prefix=prefix)

    def keep(self, run, groups: list[Group]) -> None:
        """Take the completions of a round as the drafts of the next visit."""
        state = run.extras["drafts"]
        for group in groups:
            prompt = seed_of(*run.prompt_ids[group.prompt_index])
            for sample, completion in enumerate(group.completions):
                if (group.slot, sample) not in state.begun:
                    continue  # of an earlier round
                num_accepted, beginning = state.begun.pop((group.slot, sample))
                state.counts["generated"] += len(completion.token_ids) - num_accepted
                num = 0 if beginning is None else len(beginning.ids)
                topk = (completion.topk_ids, completion.topk_logprobs)
                tokens = Tokens.of(completion.token_ids[num:], completion.logprobs[num:], *topk)
                if beginning is not None:
                    tokens = Tokens(*map(torch.cat, zip(beginning, tokens)))
                draft = Draft(prompt, tokens, completion.finish_reason == "stop", group.slot)
                other = state.fresh.get((group.prompt_index, sample), draft)
                state.fresh[group.prompt_index, sample] = max(draft, other, key=attrgetter("slot"))
                group.add(sample, replace(completion, topk_ids=None, topk_logprobs=None))

    def after_rollout(self, run, batch: RolloutBatch, groups: list[Group]) -> None:
        """Hand the counts of the step to metrics(), and its completions to later steps."""
        state = run.extras["drafts"]
        state.cache |= state.fresh
        state.fresh = {}
        batch.extras["drafts"] = dict(state.counts)

    def metrics(self, batch: RolloutBatch) -> dict[str, tuple[float, float]]:
        """Measure drafts as (sum, count); tokens_total loses the accepted tokens, which nobody generates."""
        counts: Counter[str] = Counter(batch.extras["drafts"])
        fractions = {
            "draft_accepted_frac": (counts["accepted"], counts["verified"]),
            "draft_whole_frac": (counts["whole"], counts["drafts"]),
            "draft_tail": (counts["tail"], counts["drawn"]),
        }
        return {
            "tokens_total": (counts["generated"], 1),
            "draft_tokens_total": (counts["verified"], 1),
            "draft_dropped_total": (counts["dropped"], 1),
            **{name: pair for name, pair in fractions.items() if pair[1]},
        }

    def charged_tokens(self, metrics: dict[str, float], config) -> float:
        """Charge the verified tokens at their price."""
        return config.drafts.token_cost * metrics["draft_tokens_total"]

    def rank_state(self, run) -> dict[str, Any] | None:
        """Return the drafts of this rank, with one tensor per field, because drafts are many and small."""
        cache = run.extras["drafts"].cache
        if not cache:
            return None
        return {
            "keys": [(*key, d.prompt, d.has_ended, d.slot, len(d.tokens.ids)) for key, d in cache.items()],
            "tokens": [torch.cat(values) for values in zip(*(draft.tokens for draft in cache.values()))],
        }

    def restore_rank_state(self, run, values: dict[str, Any]) -> None:
        """Take over the drafts of a checkpoint."""
        lengths = [num for *_, num in values["keys"]]
        columns = [column.split(lengths) for column in values["tokens"]]
        for (prompt_index, sample, prompt, has_ended, slot, _), *parts in zip(values["keys"], *columns):
            tokens = Tokens(*(part.clone() for part in parts))  # a view is pickled with all of its storage
            run.extras["drafts"].cache[prompt_index, sample] = Draft(prompt, tokens, has_ended, slot)


def usable(draft: Draft, request: Request, state: Drafts) -> Draft | None:
    """Return the draft, cut so that the engine has a token to sample; None, and counted, if it does not fit.

    A draft does not fit if the prompt has other tokens, for example by another template, or if a token is
    outside of the vocabulary.
    """
    ids = draft.tokens.ids
    if draft.prompt != seed_of(*request.prompt_ids) or int(ids.max()) >= state.vocab_size:
        state.counts["dropped"] += 1
        return None
    if len(ids) < request.max_new_tokens:
        return draft
    tokens = draft.tokens.first(request.max_new_tokens - 1)
    return replace(draft, tokens=tokens, has_ended=False) if len(tokens.ids) else None


EXTRA = DraftsExtra()
