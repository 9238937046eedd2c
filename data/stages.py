"""Combine the prompts of all stages of a run, so that the record of a prompt carries over between stages.

Each stage has its own data mix. The record of prompts (data/history.py) covers the union of all stages. A
prompt that several stages offer has a single entry: for example, a pass rate from stage 0 is used in stage 1.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from data.prompts import DataSettings, OfflineScore, Prompt, check_disjoint, containment_warning
from data.stream import (
    LoadedSets,
    Mixture,
    epoch_length,
    keep_by_offline_scores,
    load_sets,
    mixture_of,
    prompts_of_step,
)


@dataclass(frozen=True)
class Offers:
    """The training prompts that a stage offers, as indices into the prompts of the run."""

    indices: Sequence[int]  # into the training prompts of the run
    mixture: Mixture | None = None  # sizes and weights of the stage's datasets; None if all weights are 1

    def prompt(self, consumed: int, seed: int) -> int:
        """Return the index of the next prompt after `consumed` prompts of this stage."""
        (place,) = prompts_of_step(len(self.indices), 1, consumed, seed, self.mixture)
        return self.indices[place]

    @property
    def epoch_length(self) -> int:
        """Return the number of prompts in an epoch of this stage."""
        return epoch_length(len(self.indices), self.mixture)


def digest_of_offers(offers: list[Offers]) -> str:
    """Hash which prompts each stage offers, with order and weights."""
    text = json.dumps([(list(stage.indices), stage.mixture) for stage in offers])
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Window:
    """The filter of a stage by offline pass rate."""

    offline_scores: str | None  # output file of data/score.py; None: no filter
    offline_pass_rate: tuple[float, float]  # closed range of pass rates
    binary: bool = False  # reward.binary: a partly right completion counts as wrong
    rollout: object = None  # settings of sampling, to compare with those of the scores


def load_stages(
    data: list[DataSettings], max_prompt_tokens: list[int], tokenizer, functions: list[str], places: list[str]
) -> list[LoadedSets]:
    """Load the training prompts of every stage; the held-out sets are attached to the first stage.

    data, max_prompt_tokens, places: one entry per stage; places are names for messages, such as "stages[1]".
    Stages with equal data share one LoadedSets object. functions: see load_sets(). ValueError names the
    stage.
    """
    if len(data) == 1:
        return [load_sets(data[0], tokenizer, max_prompt_tokens[0], functions)]
    refuse_holdouts(data, max_prompt_tokens, places)
    kinds = {source.kind for stage in data for source in (*stage.train, *stage.eval) if source.kind}
    functions = sorted({*functions, *kinds})
    loaded: dict[str, LoadedSets] = {}
    keys = [f"{stage.model_dump_json()} {tokens}" for stage, tokens in zip(data, max_prompt_tokens)]
    for key, stage, tokens, place in zip(keys, data, max_prompt_tokens, places):
        train = stage.model_copy(update={"eval": []})
        if key not in loaded:
            try:
                loaded[key] = load_sets(train, tokenizer, tokens, functions)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
    first = loaded[keys[0]]
    if data[0].eval:
        held_out = data[0].model_copy(update={"train": []})
        held_out = load_sets(held_out, tokenizer, max(max_prompt_tokens), functions)
        first.eval_sets |= held_out.eval_sets
        first.notes += held_out.notes
        first.dropped += held_out.dropped
    return [loaded[key] for key in keys]


def refuse_holdouts(data: list[DataSettings], max_prompt_tokens: list[int], places: list[str]) -> None:
    """Raise ValueError for a holdout if stages have different prompts.

    A prompt could otherwise be held out in one stage and trained on in another.
    """
    drops_overlong = len(set(max_prompt_tokens)) > 1 and any(stage.on_bad_row == "drop" for stage in data)
    for stage, place in zip(data, places):
        if not any(source.holdout for source in stage.train):
            continue
        if drops_overlong:
            raise ValueError(
                f"{place}: data.train[].holdout cannot be used if stages drop prompts at different "
                "rollout.max_prompt_tokens; put held-out rows into a file and name the file in data.eval"
            )
        if any(stage.train != other.train for other in data):
            raise ValueError(
                f"{place}: data.train[].holdout cannot be used if stages train on different sets; put "
                "held-out rows into a file and name the file in data.eval"
            )


def unite(sets: list[LoadedSets]) -> LoadedSets:
    """Return the union of the sets of all stages; prompts shared by several stages appear once.

    ValueError if a training prompt of any stage is in a held-out set.
    """
    if len(sets) == 1:
        return sets[0]  # load_sets() has checked the overlap
    distinct = list({id(loaded): loaded for loaded in sets}.values())
    united = LoadedSets([], [], None, {}, [], [])
    names = set()
    for loaded in distinct:
        for name, prompt, ids in zip(names_of(loaded.train), loaded.train, loaded.train_ids):
            if name not in names:
                names.add(name)
                united.train.append(prompt)
                united.train_ids.append(ids)
        united.eval_sets |= loaded.eval_sets
        united.notes += loaded.notes
        united.dropped += loaded.dropped
    held_out = [prompt for prompts, _ in united.eval_sets.values() for prompt in prompts]
    check_disjoint(united.train, held_out)
    warnings = containment_warning(united.train, held_out)
    united.notes += [warning for warning in warnings if warning not in united.notes]
    return united


def names_of(prompts: list[Prompt]) -> list[Hashable]:
    """Return an identity for each prompt: equal prompts of two stages share a name, copies within one do not.

    Prompts are equal if text, answer, verifier and columns are equal; source and difficulty are ignored. The
    n-th copy of a prompt in a stage is named (prompt, n), which keeps the copies apart.
    """
    copies = Counter()
    names = []
    for prompt in prompts:
        identity = replace(prompt, source="", difficulty=None)
        names.append((identity, copies[identity]))
        copies[identity] += 1
    return names


def offers_of(
    union: LoadedSets, sets: list[LoadedSets], windows: list[Window], places: list[str]
) -> tuple[list[Offers], list[OfflineScore | None]]:
    """Return the offers of each stage, and the offline score of each remaining prompt of the union.

    union: unite(sets), possibly after leave_out(). Changed in place: prompts that no stage offers are
    removed. If several stages have a score for a prompt, the score of the first stage is returned. ValueError
    names a stage that would have no prompts.
    """
    names = names_of(union.train)
    name_set = set(names)
    stage_names = []  # per stage: (names of the offered prompts, mixture)
    score_of = {}  # {name: offline score}
    for loaded, window, place in zip(sets, windows, places):
        pairs = zip(names_of(loaded.train), loaded.train)
        candidates = [(name, prompt) for name, prompt in pairs if name in name_set]
        try:
            offered, scores = in_window(candidates, window)
            prompts = [prompt for _, prompt in offered]
            mixture = mixture_of(prompts, loaded.train_weights)
        except ValueError as error:
            raise ValueError(f"{place}: {error}" if len(sets) > 1 else str(error)) from error
        prefix = f"{place}: " if len(sets) > 1 else ""
        union.notes += [prefix + note for note in notes_of_scores(prompts, scores, window)]
        stage_names.append(([name for name, _ in offered], mixture))
        for (name, _), score in zip(offered, scores):
            score_of[name] = score_of.get(name) or score
    remaining = [i for i, name in enumerate(names) if name in score_of]
    if len(remaining) < len(names):
        num_dropped = len(names) - len(remaining)
        union.notes.append(f"{num_dropped:,} training prompts dropped by their offline pass rate")
    index_of = {names[i]: index for index, i in enumerate(remaining)}
    union.train = [union.train[i] for i in remaining]
    union.train_ids = [union.train_ids[i] for i in remaining]
    offers = [Offers([index_of[name] for name in offered], mixture) for offered, mixture in stage_names]
    return offers, [score_of[names[i]] for i in remaining]


def notes_of_scores(prompts: list[Prompt], scores: list[OfflineScore | None], window: Window) -> list[str]:
    """List what an offline score file lacks or measured otherwise: prompts, verifiers and sampling."""
    if window.offline_scores is None:
        return []
    with open(window.offline_scores, encoding="utf-8") as file:
        header = json.loads(file.readline())
    foreign = ", ".join(sorted({prompt.kind for prompt in prompts} - set(header.get("kinds", []))))
    notes = [f"are of another verifier than {foreign}"] if foreign else []
    if missing := scores.count(None):
        notes.append(f"lack {missing:,} training prompts, which stay")
    for name in ("max_new_tokens", "temperature", "stop") if window.rollout else ():
        if header.get(name, value := getattr(window.rollout, name)) != value:
            notes.append(f"have {name} {header[name]}, the run has {value}")
    return [f"zero_variance.offline_scores {note}" for note in notes]


def in_window(
    candidates: list[tuple[Hashable, Prompt]], window: Window
) -> tuple[list[tuple[Hashable, Prompt]], list[OfflineScore | None]]:
    """Return the candidates whose offline pass rate is in the window, and their offline scores."""
    if not candidates:
        raise ValueError("the stage has no training prompts")
    if not window.offline_scores:
        return candidates, [None] * len(candidates)
    prompts = [prompt for _, prompt in candidates]
    low, high = window.offline_pass_rate
    indices, scores = keep_by_offline_scores(prompts, window.offline_scores, low, high, window.binary)
    return [candidates[i] for i in indices], scores
