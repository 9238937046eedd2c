"""Put the prompts of all stages of a run together, so that what is known of a prompt stays with it.

A stage has a data mix of its own. The record of prompts (data/history.py) is over the prompts of all stages,
each of which stands in it once however many stages offer it.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from data.prompts import DataSettings, OfflineScore, Prompt, check_disjoint
from data.stream import (
    LoadedSets,
    Mixture,
    epoch_length,
    foreign_kinds,
    keep_by_offline_scores,
    load_sets,
    mixture_of,
    prompts_of_step,
)


@dataclass(frozen=True)
class Offers:
    """Which of a run's training prompts a stage offers."""

    indices: Sequence[int]  # in the training prompts of the run
    mixture: Mixture | None = None  # sizes and weights of the stage's sets, if they have weights

    def prompt(self, consumed: int, seed: int) -> int:
        """Return the index of the prompt that comes after `consumed` others of this stage."""
        (place,) = prompts_of_step(len(self.indices), 1, consumed, seed, self.mixture)
        return self.indices[place]

    @property
    def epoch_length(self) -> int:
        """Return how many prompts of this stage are offered until one round of them is over."""
        return epoch_length(len(self.indices), self.mixture)


@dataclass(frozen=True)
class Window:
    """What a stage keeps of its prompts by their measured pass rates."""

    offline_scores: str | None  # a file of data/score.py; None: everything is kept
    offline_pass_rate: tuple[float, float]  # closed range
    binary: bool = False  # reward.binary: a completion is right as a whole or wrong


def load_stages(
    data: list[DataSettings], max_prompt_tokens: list[int], tokenizer, functions: list[str], places: list[str]
) -> list[LoadedSets]:
    """Load the training prompts of each stage, and the held-out sets with the first of them.

    data, max_prompt_tokens: of each stage; places: what a message calls it. Stages of one and the same data
    share what is loaded. functions: see load_sets(). ValueError names the stage.
    """
    if len(data) == 1:
        return [load_sets(data[0], tokenizer, max_prompt_tokens[0], functions, seed=0)]
    refuse_holdouts(data, max_prompt_tokens, places)
    kinds = {source.kind for one in data for source in (*one.train, *one.eval) if source.kind}
    functions = sorted({*functions, *kinds})
    loaded: dict[str, LoadedSets] = {}
    keys = [f"{one.model_dump_json()} {tokens}" for one, tokens in zip(data, max_prompt_tokens)]
    for key, one, tokens, place in zip(keys, data, max_prompt_tokens, places):
        train = one.model_copy(update={"eval": []})
        if key not in loaded:
            try:
                loaded[key] = load_sets(train, tokenizer, tokens, functions, seed=0)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
    first = loaded[keys[0]]
    if data[0].eval:
        held_out = data[0].model_copy(update={"train": []})
        held_out = load_sets(held_out, tokenizer, max(max_prompt_tokens), functions, seed=0)
        first.eval_sets |= held_out.eval_sets
        first.notes += held_out.notes
        first.dropped += held_out.dropped
    return [loaded[key] for key in keys]


def refuse_holdouts(data: list[DataSettings], max_prompt_tokens: list[int], places: list[str]) -> None:
    """Raise ValueError for a holdout where stages have different prompts: what is held out must not depend
    on the stage.
    """
    drops_overlong = len(set(max_prompt_tokens)) > 1 and any(one.on_bad_row == "drop" for one in data)
    for one, place in zip(data, places):
        if drops_overlong and any(source.holdout for source in one.train):
            raise ValueError(
                f"{place}: data.train[].holdout where stages drop prompts at different "
                "rollout.max_prompt_tokens; name held-out rows as data.eval"
            )
        if any(source.holdout for source in one.train) and any(one.train != other.train for other in data):
            raise ValueError(
                f"{place}: data.train[].holdout where stages train on different sets; name held-out rows as "
                "data.eval"
            )


def unite(sets: list[LoadedSets]) -> LoadedSets:
    """Put the sets of all stages together; a prompt that several have is there once.

    ValueError on an overlap with a held-out set.
    """
    if len(sets) == 1:
        return sets[0]  # its overlap has been looked for
    distinct = list({id(one): one for one in sets}.values())
    united, known = LoadedSets([], [], None, {}, [], []), set()
    for one in distinct:
        for name, prompt, ids in zip(names_of(one.train), one.train, one.train_ids):
            if name not in known:
                known.add(name)
                united.train.append(prompt)
                united.train_ids.append(ids)
        united.eval_sets |= one.eval_sets
        united.notes += one.notes
        united.dropped += one.dropped
    for prompts, _ in united.eval_sets.values():
        check_disjoint(united.train, prompts)
    return united


def names_of(prompts: list[Prompt]) -> list[Hashable]:
    """Name each prompt so that equal ones of two sets have one name, and equal ones of one set have two.

    Text, answer, verifier and the row's columns make a prompt; the set that it is from does not.
    """
    seen, names = Counter(), []
    for prompt in prompts:
        same = replace(prompt, source="", difficulty=None)
        names.append((same, seen[same]))
        seen[same] += 1
    return names


def offers_of(
    whole: LoadedSets, sets: list[LoadedSets], windows: list[Window], places: list[str]
) -> tuple[list[Offers], list[OfflineScore | None]]:
    """Return what each stage offers of the whole, and the offline score of each prompt of the whole.

    whole: unite(sets), from which prompts may have been left out since; those that no stage offers are taken
    out of it. The first stage that has a score of a prompt decides. ValueError names a stage that would have
    no prompt.
    """
    names = names_of(whole.train)
    known, chosen, score_of = set(names), [], {}
    for one, window, place in zip(sets, windows, places):
        own = [(name, prompt) for name, prompt in zip(names_of(one.train), one.train) if name in known]
        try:
            own, scores = in_window(own, window)
            mixture = mixture_of([prompt for _, prompt in own], one.train_weights)
        except ValueError as error:
            raise ValueError(f"{place}: {error}" if len(sets) > 1 else str(error)) from error
        if foreign := foreign_kinds([prompt for _, prompt in own], window.offline_scores):
            of_stage = f"{place}: " if len(sets) > 1 else ""
            whole.notes.append(
                f"{of_stage}zero_variance.offline_scores were measured by another verifier than {foreign}"
            )
        chosen.append(([name for name, _ in own], mixture))
        for (name, _), score in zip(own, scores):
            score_of[name] = score_of.get(name) or score
    kept = [i for i, name in enumerate(names) if name in score_of]
    if len(kept) < len(names):
        num_dropped = f"{len(names) - len(kept):,} training prompts dropped by their offline pass rate"
        whole.notes.append(num_dropped)
    place_of = {names[i]: place for place, i in enumerate(kept)}
    whole.train, whole.train_ids = [whole.train[i] for i in kept], [whole.train_ids[i] for i in kept]
    offers = [Offers([place_of[name] for name in own], mixture) for own, mixture in chosen]
    return offers, [score_of[names[i]] for i in kept]


def in_window(
    own: list[tuple[Hashable, Prompt]], window: Window
) -> tuple[list[tuple[Hashable, Prompt]], list[OfflineScore | None]]:
    """Return the prompts of a stage that are in its window, and the offline score of each."""
    if not own:
        raise ValueError("no training prompt is left")
    if not window.offline_scores:
        return own, [None] * len(own)
    prompts = [prompt for _, prompt in own]
    path, (low, high) = window.offline_scores, window.offline_pass_rate
    kept, scores = keep_by_offline_scores(prompts, path, low, high, window.binary)
    return [own[i] for i in kept], scores
