"""Choose the prompts of a run: which are kept, their tokens, and their order, reproducible from a seed."""

import functools
import hashlib
import itertools
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from data.chat import ChatTemplate
from data.formats import BadRow
from data.prompts import (
    DataSettings,
    OfflineScore,
    Prompt,
    PromptSet,
    PromptSource,
    Row,
    check_data,
    check_disjoint,
    drop_or_stop,
    load_scores,
    load_set,
    prompt_sha,
)

ROUNDING = 1e-9  # 1 - a rate is off by less


def keep_by_offline_scores(
    prompts: list[Prompt], path: str, low: float, high: float, binary: bool
) -> tuple[list[int], list[OfflineScore | None]]:
    """Keep prompts with an offline pass rate in the range or without one; return their indices and scores.

    A prompt of whose completions parts are right is as far from all wrong as one that is solved: from below
    the share with any part right counts, from above that of the right ones. binary: parts count as nothing.
    This is stage 1 of zero-variance elimination [secondary: prompts that smaller models already solve are
    dropped before training; ours: the range]
    """
    score_of = load_scores(path)
    scores = [score_of.get(prompt_sha(prompt)) for prompt in prompts]
    if binary:
        scores = [score and score._replace(wrong_rate=1 - score.pass_rate) for score in scores]
    if all(score is None for score in scores):
        raise ValueError(
            f"zero_variance.offline_scores: {path} holds no pass rate of any training "
            "prompt: score these prompts, with the same template, by data/score.py"
        )
    kept = [
        i for i, score in enumerate(scores)
        if score is None or low <= 1 - score.wrong_rate + ROUNDING and score.pass_rate <= high
    ]  # fmt: skip
    if not kept:
        raise ValueError(f"zero_variance.offline_pass_rate: no pass rate lies in {low:g} to {high:g}")
    return kept, [scores[i] for i in kept]


def foreign_kinds(prompts: list[Prompt], path: str | None) -> str:
    """Name the verifiers of prompts by which the scores of a file were not measured."""
    if path is None:
        return ""
    with open(path, encoding="utf-8") as file:
        kinds = json.loads(file.readline()).get("kinds", [])
    return ", ".join(sorted({prompt.kind for prompt in prompts} - set(kinds)))


def digest_of(prompts: list[Prompt]) -> str:
    """Hash the prompts and answers in their order: it names what a saved record of them belongs to."""
    return hashlib.sha256("".join(prompt_sha(prompt) for prompt in prompts).encode()).hexdigest()


def tokenize(prompts: list[Prompt], tokenizer) -> list[list[int]]:
    """Return the token ids of each prompt; special tokens are added to plain text only."""
    prompt_ids: list = [None] * len(prompts)
    for is_chat in (False, True):
        part = [i for i, prompt in enumerate(prompts) if prompt.is_chat == is_chat]
        texts = [prompts[i].text for i in part]
        ids = tokenizer(texts, add_special_tokens=not is_chat)["input_ids"] if texts else []
        for i, row in zip(part, ids):
            prompt_ids[i] = row
    return prompt_ids


EvalSets = dict[str, tuple[list[Prompt], list[list[int]]]]  # {name: (prompts, their token ids)}


@dataclass
class LoadedSets:
    """All prompts of a run."""

    train: list[Prompt]
    train_ids: list[list[int]]  # token ids of each training prompt
    train_weights: dict[str, float] | None  # {name of a training set: weight}; None if all are 1
    eval_sets: EvalSets
    notes: list[str]  # lines to print: what each set is, what was dropped, warnings
    dropped: list[dict]  # {set, file, row, reason, detail} of each row that was left out

    def by_name(self) -> dict[str, tuple[list[Prompt], list[list[int]]]]:
        """Return all sets with their token ids, what is trained on as one of them under the name ""."""
        return {"": (self.train, self.train_ids), **self.eval_sets}

    def everyone(self) -> list[Prompt]:
        """Return the prompts of all sets."""
        return [prompt for prompts, _ in self.by_name().values() for prompt in prompts]


def load_sets(
    data: DataSettings, tokenizer, max_prompt_tokens: int, functions: list[str], seed: int
) -> LoadedSets:
    """Load the training prompts and the held-out sets; ValueError on an overlap of the two.

    functions: kinds that run code and that rows may name. Those that a source itself names are added: they
    come from the settings, too. seed: decides which rows a holdout splits off.
    """
    check_data(data)
    sources = [*data.train, *data.eval]
    allowed = {*functions, *(source.kind for source in sources if source.kind)}
    loaded = LoadedSets([], [], None, {}, [], [])
    for number, source in enumerate(sources):
        one = load_set(source, data, tokenizer, allowed)
        kept = drop_overlong(one, data, tokenizer, max_prompt_tokens)
        if not kept:
            raise ValueError(f"{source.place}: no row is left; {dropped_line(source.label, one.dropped)}")
        is_train = number < len(data.train)
        held_out = split_holdout([row for row, _ in kept], source, seed) if is_train else [True] * len(kept)
        train = [pair for pair, is_held_out in zip(kept, held_out) if not is_held_out]
        loaded.train += [row.prompt for row, _ in train]
        loaded.train_ids += [ids for _, ids in train]
        if any(held_out):
            rest = [pair for pair, is_held_out in zip(kept, held_out) if is_held_out]
            loaded.eval_sets[source.label] = ([row.prompt for row, _ in rest], [ids for _, ids in rest])
        loaded.dropped += one.dropped
        loaded.notes += set_lines(one, len(kept), sum(held_out) if is_train else 0)
    for prompts, _ in loaded.eval_sets.values():
        check_disjoint(loaded.train, prompts)
    if any(source.weight != 1 for source in data.train):
        loaded.train_weights = {source.label: source.weight for source in data.train}
        mixture_of(loaded.train, loaded.train_weights)
    prompt_sets = [loaded.train, *(prompts for prompts, _ in loaded.eval_sets.values())]
    loaded.notes += chat_warnings(data, tokenizer, prompt_sets)
    return loaded


def refuse_unknown_tokens(loaded: LoadedSets, vocab_size: int, model: str | Path) -> None:
    """Raise ValueError if the tokenizer gives a prompt an id that the model's vocabulary does not have."""
    for prompts, prompt_ids in loaded.by_name().values():
        for prompt, ids in zip(prompts, prompt_ids):
            if max(ids) >= vocab_size:
                raise ValueError(
                    f"model.path: the tokenizer in {model} gives token {max(ids)} in the prompt "
                    f"{prompt.text[:80]!r}, the vocab_size of its config.json is {vocab_size}: tokenizer and "
                    "weights are of two models"
                )


def leave_out(loaded: LoadedSets, reasons: dict[tuple[str, str | None], str]) -> None:
    """Drop the prompts of {(prompt_sha, kind or None for any): reason}; ValueError if a set loses all."""

    def reason_of(prompt: Prompt) -> str | None:
        sha = prompt_sha(prompt)
        return reasons.get((sha, prompt.kind), reasons.get((sha, None)))

    for name, (prompts, prompt_ids) in loaded.by_name().items():
        label = name or "training"
        found = [reason_of(prompt) for prompt in prompts]
        kept = [i for i, reason in enumerate(found) if reason is None]
        lost = [(prompt, reason) for prompt, reason in zip(prompts, found) if reason is not None]
        if not kept:
            raise ValueError(
                f"{label}: no reference answer can be right, the first is {lost[0][1]}; set its kind"
            )
        if lost:
            loaded.notes.append(
                f"{label}: {len(lost):,} of {len(prompts):,} prompts left out, because their reference "
                f"answers cannot be right; the first: {lost[0][1]}"
            )
        loaded.dropped += [
            {"set": prompt.source, "reason": "impossible reference", "detail": reason}
            | {"prompt_sha": prompt_sha(prompt), "kind": prompt.kind, "prompt": prompt.text[:200]}
            for prompt, reason in lost
        ]
        prompts[:], prompt_ids[:] = [prompts[i] for i in kept], [prompt_ids[i] for i in kept]


def drop_overlong(
    one: PromptSet,
    data: DataSettings,
    tokenizer,
    max_prompt_tokens: int,
    name: str = "rollout.max_prompt_tokens",
) -> list[tuple[Row, list[int]]]:
    """Return the rows with at most so many tokens, and these; the others are dropped, or ValueError.

    name: what limits the tokens, for messages.
    """
    kept = []
    prompt_ids = tokenize([row.prompt for row in one.rows], tokenizer)
    for row, ids in zip(one.rows, prompt_ids):
        if 1 <= len(ids) <= max_prompt_tokens:
            kept.append((row, ids))
            continue
        limit = f"{name} {max_prompt_tokens}"
        reason = f"longer than {limit}" if ids else "without a token"
        found = f"the prompt has {len(ids)} tokens, {limit}: {row.prompt.text[:80]!r}"
        detail = f"{found}; raise the limit or remove the row"
        error = BadRow(row.where, reason, detail)
        drop_or_stop(error, data, one.source, row.file, row.number, one.dropped)
    return kept


def split_holdout(rows: list[Row], source: PromptSource, seed: int) -> list[bool]:
    """Tell of each row of a training set whether it is held out: decided by seed and question alone.

    Rows of equal questions stay on one side, so that a few more may be held out than asked for.
    """
    if not source.holdout:
        return [False] * len(rows)
    wanted = round(source.holdout * len(rows)) if source.holdout < 1 else int(source.holdout)
    questions = [" ".join(row.question.split()) for row in rows]
    copies, held_out, num = Counter(questions), set(), 0
    for question in sorted(copies, key=lambda question: (seed_of(seed, "holdout", question), question)):
        if num >= wanted:
            break
        held_out.add(question)
        num += copies[question]
    if not 0 < num < len(rows):
        raise ValueError(
            f"data.train[].holdout {source.holdout:g} of {source.place}: {num} of its {len(rows)} rows would "
            "be held out; at least one must be, and one must be left to train on"
        )
    return [question in held_out for question in questions]


def set_lines(one: PromptSet, num_kept: int, num_held_out: int = 0) -> list[str]:
    """Say in a line what a set is, and in another what was dropped of it, if anything was."""
    held_out = f" ({num_held_out:,} of them held out)" if num_held_out else ""
    weight = f", weight {one.source.weight:g}" if one.source.weight != 1 else ""
    line = f"{one.source.place}: {num_kept:,} prompts{held_out}{weight}, {one.description}"
    return [line, dropped_line(one.source.label, one.dropped)] if one.dropped else [line]


def dropped_line(label: str, dropped: list[dict]) -> str:
    """Count the dropped rows of a set by reason."""
    reasons = Counter(row["reason"] for row in dropped).most_common()
    return f"{label}: {len(dropped):,} rows dropped: " + ", ".join(f"{n:,} {reason}" for reason, n in reasons)


def chat_warnings(data: DataSettings, tokenizer, sets: list[list[Prompt]]) -> list[str]:
    """Warn where a chat model gets plain text, and where settings of the chat template change nothing."""
    plain = sorted({prompt.source for prompts in sets for prompt in prompts if not prompt.is_chat})
    any_chat = any(prompt.is_chat for prompts in sets for prompt in prompts)
    warnings = []
    if data.chat == "auto" and plain and ChatTemplate(tokenizer).exists:
        warnings.append(
            f"warning: the prompts of {', '.join(plain)} are plain text, though the tokenizer has a chat "
            "template; data.chat=always renders them, data.chat=never says that plain text is meant"
        )
    unused = [name for name in ("system_prompt", "chat_template_args") if getattr(data, name)]
    if unused and not any_chat:
        warnings.append(f"warning: data.{' and data.'.join(unused)} has no effect, no prompt is rendered")
    return warnings


# ------------------------------------------------------------------------------------------------------------
# Their order
# ------------------------------------------------------------------------------------------------------------
def seed_of(*parts: int | str) -> int:
    """Derive the 63-bit seed of a random decision from all it depends on, e.g. seed, step, prompt, sample."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


Mixture = tuple[tuple[int, float], ...]  # (number of prompts, weight) of each training set, in their order


def mixture_of(prompts: list[Prompt], weights: dict[str, float] | None) -> Mixture | None:
    """Return what prompts_of_step takes for sets with weights; prompts of a set stand together.

    weights: {name of a set: weight}, None for all 1. ValueError for a set that would never be offered.
    """
    if weights is None:
        return None
    mixture = []
    for name, group in itertools.groupby(prompts, key=lambda prompt: prompt.source):
        mixture.append((len(list(group)), weights[name]))
        if offers_per_epoch(*mixture[-1]) < 1:
            raise ValueError(
                f"data.train[].weight {weights[name]:g} of {name}, which has {mixture[-1][0]} prompts: less "
                "than one prompt an epoch; raise the weight"
            )
    return tuple(mixture)


def offers_per_epoch(num_prompts: int, weight: float) -> int:
    """Return how many prompts of a set an epoch offers: weight x its prompts, to the nearest whole number."""
    return round(num_prompts * weight)


def epoch_length(num_prompts: int, mixture: Mixture | None = None) -> int:
    """Return how many prompts an epoch offers; mixture: sets with weights, see mixture_of."""
    return sum(offers_per_epoch(*one) for one in mixture) if mixture else num_prompts


@functools.lru_cache(maxsize=2)
def epoch_order(num_prompts: int, epoch: int, seed: int, mixture: Mixture | None = None) -> list[int]:
    """Shuffle the prompts of an epoch; sets with weights first add the next of their own shuffled rounds."""
    offered = range(num_prompts)
    if mixture is not None:
        offered, first = [], 0
        for number, (size, weight) in enumerate(mixture):
            count, own_seed = offers_per_epoch(size, weight), seed_of(seed, "set", number)
            offered += [first + i for i in prompts_of_step(size, count, epoch * count, own_seed)]
            first += size
    generator = torch.Generator().manual_seed(seed_of(seed, "epoch", epoch))
    return [offered[i] for i in torch.randperm(len(offered), generator=generator).tolist()]


def prompts_of_step(
    num_prompts: int, per_step: int, consumed: int, seed: int, mixture: Mixture | None = None
) -> list[int]:
    """Return the indices of the next per_step prompts after `consumed`: shuffled epochs, one after another.

    The result depends on the number consumed and the seed alone, so that resuming needs no sampler state.
    mixture: sets with weights, see mixture_of; a prompt of weight 2 stands twice in an epoch, one of weight
    0.5 in every other.
    """
    length, indices = epoch_length(num_prompts, mixture), []
    while len(indices) < per_step:
        epoch, offset = divmod(consumed + len(indices), length)
        indices += epoch_order(num_prompts, epoch, seed, mixture)[offset : offset + per_step - len(indices)]
    return indices
