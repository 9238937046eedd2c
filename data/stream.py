"""Select the prompts of a run, tokenize the prompts, and define their order, reproducibly from a seed."""

import functools
import hashlib
import itertools
import json
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from data.chat import ChatTemplate, reads_clock
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
    containment_warning,
    date_of_scores,
    drop_or_stop,
    load_scores,
    load_set,
    prompt_sha,
)

ROUNDING = 1e-9  # tolerance for the rounding error of 1 - rate


def keep_by_offline_scores(
    prompts: list[Prompt], path: str, low: float, high: float, binary: bool
) -> tuple[list[int], list[OfflineScore | None]]:
    """Return the indices and scores of the prompts in the range [low, high] of offline pass rates.

    Prompts that have no score stay. The lower bound applies to the share of completions with any credit
    (1 - wrong_rate), the upper bound to the share of fully right completions (pass_rate), because partly
    right completions also give a group variance. With binary, partly right completions count as wrong. Stage
    1 of zero-variance elimination [secondary: prompts that smaller models already solve are dropped before
    training; ours: the range].
    """
    score_of = load_scores(path)
    scores = [score_of.get(prompt_sha(prompt)) for prompt in prompts]
    if binary:
        scores = [score and score._replace(wrong_rate=1 - score.pass_rate) for score in scores]
    if all(score is None for score in scores):
        raise ValueError(
            f"zero_variance.offline_scores: {path} holds no pass rate of any training prompt: score the "
            "training prompts with data/score.py, using the template of the training run"
            f"{date_of_scores(path)}"
        )
    indices = [
        i for i, score in enumerate(scores)
        if score is None or low <= 1 - score.wrong_rate + ROUNDING and score.pass_rate <= high
    ]  # fmt: skip
    if not indices:
        raise ValueError(f"zero_variance.offline_pass_rate: no pass rate lies in {low:g} to {high:g}")
    return indices, [scores[i] for i in indices]


def digest_of(prompts: list[Prompt]) -> str:
    """Hash prompts, answers, verifiers and other columns in order.

    A resumed run uses the saved record if the digest is equal.
    """
    digest = hashlib.sha256()
    for prompt in prompts:
        columns = json.dumps(prompt.columns, sort_keys=True)
        digest.update(f"{prompt_sha(prompt)}{prompt.kind}\0{columns}\0".encode())
    return digest.hexdigest()


def digest_of_rows(rows: Iterable[tuple[Prompt, list[int]]]) -> str:
    """Return the digest and the number of prompts with their token ids, for a comparison across ranks."""
    digest = hashlib.sha256()
    num_rows = 0
    for prompt, ids in rows:
        num_rows += 1
        columns = json.dumps([prompt.kind, prompt.difficulty, prompt.columns], sort_keys=True)
        digest.update(f"{prompt_sha(prompt)}{columns}".encode() + array("q", ids).tobytes())
    return f"{digest.hexdigest()[:16]}, {num_rows:,} rows"


def tokenize(prompts: list[Prompt], tokenizer) -> list[list[int]]:
    """Return the token ids of each prompt; special tokens (BOS) are added to plain text only."""
    prompt_ids: list = [None] * len(prompts)
    for is_chat in (False, True):
        indices = [i for i, prompt in enumerate(prompts) if prompt.is_chat == is_chat]
        texts = [prompts[i].text for i in indices]
        rows = tokenizer(texts, add_special_tokens=not is_chat)["input_ids"] if texts else []
        for i, row in zip(indices, rows):
            prompt_ids[i] = row if is_chat else open_ended(row, prompts[i].text, tokenizer)
    return prompt_ids


def open_ended(ids: list[int], text: str, tokenizer) -> list[int]:
    """Drop the BOS that a tokenizer adds to a text with BOS, and an EOS that it adds to the end."""
    if ids[:2] == [tokenizer.bos_token_id] * 2:
        ids = ids[1:]
    ends = ids[-1:] == [tokenizer.eos_token_id] and not text.rstrip().endswith(tokenizer.eos_token)
    return ids[:-1] if ends else ids


EvalSets = dict[str, tuple[list[Prompt], list[list[int]]]]  # {name: (prompts, token ids)}


@dataclass
class LoadedSets:
    """All prompts of a run."""

    train: list[Prompt]
    train_ids: list[list[int]]  # token ids of each training prompt
    train_weights: dict[str, float] | None  # {name of a training set: weight}; None if all weights are 1
    eval_sets: EvalSets
    notes: list[str]  # lines to print: a description of each dataset, dropped rows, warnings
    dropped: list[dict]  # {set, file, row, reason, detail} of each dropped row

    def by_name(self) -> dict[str, tuple[list[Prompt], list[list[int]]]]:
        """Return {name: (prompts, token ids)} of the held-out sets, and of the training prompts as ""."""
        return {"": (self.train, self.train_ids), **self.eval_sets}

    def digests(self) -> dict[str, str]:
        """Return {set: number and digest of its prompts, with token ids and order}."""
        rows = defaultdict(list)
        for name, (prompts, prompt_ids) in self.by_name().items():
            for prompt, ids in zip(prompts, prompt_ids):
                rows[f"data.eval {name}" if name else f"data.train {prompt.source}"].append((prompt, ids))
        return {place: digest_of_rows(pairs) for place, pairs in rows.items()}

    def everyone(self) -> list[Prompt]:
        """Return the training prompts and all held-out prompts."""
        return [prompt for prompts, _ in self.by_name().values() for prompt in prompts]


def load_sets(data: DataSettings, tokenizer, max_prompt_tokens: int, functions: list[str]) -> LoadedSets:
    """Load the training prompts and the held-out sets; ValueError if a prompt is in both.

    functions: custom verifiers that rows may name; functions in the `kind` of a source are allowed as well,
    because they also come from the settings.
    """
    check_data(data)
    sources = [*data.train, *data.eval]
    allowed = {*functions, *(source.kind for source in sources if source.kind)}
    loaded = LoadedSets([], [], None, {}, [], [])
    for number, source in enumerate(sources):
        prompt_set = load_set(source, data, tokenizer, allowed)
        pairs = drop_overlong(prompt_set, data, tokenizer, max_prompt_tokens)
        if not pairs:
            dropped = dropped_line(source.label, prompt_set.dropped)
            raise ValueError(f"{source.place}: every row was dropped; {dropped}")
        is_train = number < len(data.train)
        held_out = [True] * len(pairs)
        if is_train:
            held_out = split_holdout([row for row, _ in pairs], source)
        for (row, ids), is_held_out in zip(pairs, held_out):
            if is_held_out:
                eval_prompts, eval_ids = loaded.eval_sets.setdefault(source.label, ([], []))
                eval_prompts.append(row.prompt)
                eval_ids.append(ids)
            else:
                loaded.train.append(row.prompt)
                loaded.train_ids.append(ids)
        loaded.dropped += prompt_set.dropped
        loaded.notes += set_lines(prompt_set, len(pairs), sum(held_out) if is_train else 0)
    for prompts, _ in loaded.eval_sets.values():
        check_disjoint(loaded.train, prompts)
    held_out = [prompt for prompts, _ in loaded.eval_sets.values() for prompt in prompts]
    loaded.notes += containment_warning(loaded.train, held_out)
    if any(source.weight != 1 for source in data.train):
        loaded.train_weights = {source.label: source.weight for source in data.train}
        mixture_of(loaded.train, loaded.train_weights)
    prompt_sets = [loaded.train, *(prompts for prompts, _ in loaded.eval_sets.values())]
    loaded.notes += chat_warnings(data, tokenizer, prompt_sets)
    return loaded


def refuse_unknown_tokens(loaded: LoadedSets, vocab_size: int, model: str | Path) -> None:
    """Raise ValueError if a prompt has a token id outside of the model's vocabulary."""
    for prompts, prompt_ids in loaded.by_name().values():
        for prompt, ids in zip(prompts, prompt_ids):
            if max(ids) >= vocab_size:
                raise ValueError(
                    f"model.path: the tokenizer in {model} gives token {max(ids)} in the prompt "
                    f"{prompt.text[:80]!r}, but the vocab_size in config.json is {vocab_size}: tokenizer and "
                    "weights belong to different models; replace one of the two"
                )


def leave_out(loaded: LoadedSets, reasons: dict[tuple[str, str | None], str]) -> None:
    """Drop the prompts in {(prompt_sha, kind, or None for any kind): reason}.

    ValueError if a dataset would lose all prompts.
    """

    def reason_of(prompt: Prompt) -> str | None:
        sha = prompt_sha(prompt)
        return reasons.get((sha, prompt.kind), reasons.get((sha, None)))

    for name, (prompts, prompt_ids) in loaded.by_name().items():
        label = name or "training"
        verdicts = [reason_of(prompt) for prompt in prompts]
        valid = [i for i, reason in enumerate(verdicts) if reason is None]
        lost = [(prompt, reason) for prompt, reason in zip(prompts, verdicts) if reason is not None]
        if not valid:
            raise ValueError(
                f"{label}: no reference answer can be right, the first is {lost[0][1]}; set "
                "data.train[].kind or data.eval[].kind"
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
        prompts[:] = [prompts[i] for i in valid]
        prompt_ids[:] = [prompt_ids[i] for i in valid]


def drop_overlong(
    prompt_set: PromptSet, data: DataSettings, tokenizer, max_tokens: int, name="rollout.max_prompt_tokens"
) -> list[tuple[Row, list[int]]]:
    """Return (row, token ids) of the prompts with 1 to max_tokens tokens.

    Other rows are bad rows: they are dropped or raise ValueError, see data.on_bad_row. name: the setting or
    option that sets the limit, for messages.
    """
    pairs = []
    prompt_ids = tokenize([row.prompt for row in prompt_set.rows], tokenizer)
    for row, ids in zip(prompt_set.rows, prompt_ids):
        if 1 <= len(ids) <= max_tokens:
            pairs.append((row, ids))
            continue
        limit = f"{name} {max_tokens}"
        reason = f"longer than {limit}" if ids else "without a token"
        detail = (
            f"the prompt has {len(ids)} tokens, {limit}: {row.prompt.text[:80]!r}; raise the limit or remove "
            "the row"
        )
        error = BadRow(f"{row.file}: row {row.number}", reason, detail)
        drop_or_stop(error, data, prompt_set.source, row.file, row.number, prompt_set.dropped)
    return pairs


def split_holdout(rows: list[Row], source: PromptSource) -> list[bool]:
    """Tell for each row of a training set whether the row is held out, by a hash of the question.

    So all runs and evaluations hold out the same rows, whatever their seed. Copies of a question stay
    together, so that slightly more rows than data.train[].holdout may be held out.
    """
    if not source.holdout:
        return [False] * len(rows)
    target = round(source.holdout * len(rows)) if source.holdout < 1 else int(source.holdout)
    questions = [" ".join(row.prompt.question.split()) for row in rows]
    copies = Counter(questions)
    held_out = set()
    num_held_out = 0
    for question in sorted(copies, key=lambda question: (seed_of(0, "holdout", question), question)):
        if num_held_out >= target:
            break
        held_out.add(question)
        num_held_out += copies[question]
    if not 0 < num_held_out < len(rows):
        raise ValueError(
            f"data.train[].holdout {source.holdout:g} of {source.place}: {num_held_out} of {len(rows)} rows "
            "would be held out; hold out at least one row, and leave at least one row for training"
        )
    return [question in held_out for question in questions]


def set_lines(prompt_set: PromptSet, num_prompts: int, num_held_out: int = 0) -> list[str]:
    """Describe a dataset in one line, and the dropped rows in a second line if there are any."""
    source = prompt_set.source
    held_out = f" ({num_held_out:,} of them held out)" if num_held_out else ""
    weight = f", weight {source.weight:g}" if source.weight != 1 else ""
    line = f"{source.place}: {num_prompts:,} prompts{held_out}{weight}, {prompt_set.description}"
    lines = [line, dropped_line(source.label, prompt_set.dropped)] if prompt_set.dropped else [line]
    first = prompt_set.rows[0].prompt
    for name in sorted({"options", "choices", "tools", "images"} & first.columns.keys()):
        values = first.columns[name]
        values = values.get("text") if isinstance(values, dict) else values  # as in ARC
        if values and isinstance(values, list) and not any(str(value) in first.text for value in values):
            lines.append(
                f"warning: {source.place}: the column {name!r} is not part of the prompt, so the policy does "
                "not see it; write it into the prompt column"
            )
    for name in re.findall(r"(?<!\w){(\w+)}", source.template):
        if name in first.columns:
            lines.append(
                f"warning: {source.place}: template fills in {{prompt}} alone, so {{{name}}} stays as it is; "
                "write the column into the prompt column"
            )
    return lines


def dropped_line(label: str, dropped: list[dict]) -> str:
    """Count the dropped rows of a dataset by reason."""
    reasons = Counter(row["reason"] for row in dropped).most_common()
    return f"{label}: {len(dropped):,} rows dropped: " + ", ".join(f"{n:,} {reason}" for reason, n in reasons)


def chat_warnings(data: DataSettings, tokenizer, sets: list[list[Prompt]]) -> list[str]:
    """Warn if a chat model gets plain text, and if settings of the chat template have no effect."""
    plain = sorted({prompt.source for prompts in sets for prompt in prompts if not prompt.is_chat})
    any_chat = any(prompt.is_chat for prompts in sets for prompt in prompts)
    warnings = []
    if data.chat == "auto" and plain and ChatTemplate(tokenizer).exists:
        warnings.append(
            f"warning: the prompts of {', '.join(plain)} are plain text, though the tokenizer has a chat "
            "template; set data.chat=always to render the text, or data.chat=never if plain text is intended"
        )
    if any_chat and data.date and reads_clock(tokenizer):
        warnings.append(f"the chat template writes the date {data.date}, also after a resume (data.date)")
    unused = [name for name in ("system_prompt", "chat_template_args") if getattr(data, name)]
    if unused and not any_chat:
        warnings.append(f"warning: data.{' and data.'.join(unused)} has no effect, no prompt is rendered")
    return warnings


# ------------------------------------------------------------------------------------------------------------
# The order of the prompts
# ------------------------------------------------------------------------------------------------------------
def seed_of(*parts: int | str) -> int:
    """Derive the 63-bit seed of a random choice from its inputs, for example seed, step, prompt, sample."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


Mixture = tuple[tuple[int, float], ...]  # (number of prompts, weight) of each training set, in order


def mixture_of(prompts: list[Prompt], weights: dict[str, float] | None) -> Mixture | None:
    """Return the mixture of weighted training sets, for prompts_of_step; None if all weights are 1.

    prompts: ordered by set. weights: {name of a set: weight}. ValueError if the weight of a set is so small
    that an epoch offers none of its prompts.
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
    """Return the number of prompts of a set that an epoch offers: weight x num_prompts, rounded."""
    return round(num_prompts * weight)


def epoch_length(num_prompts: int, mixture: Mixture | None = None) -> int:
    """Return the number of prompts in an epoch; mixture: weighted sets, see mixture_of."""
    return sum(offers_per_epoch(size, weight) for size, weight in mixture) if mixture else num_prompts


@functools.lru_cache(maxsize=2)
def epoch_order(num_prompts: int, epoch: int, seed: int, mixture: Mixture | None = None) -> list[int]:
    """Return the shuffled prompt indices of an epoch.

    A weighted set contributes the next offers_per_epoch() prompts of its own shuffled rounds: for example,
    with weight 0.5, the first half of a round in epoch 0 and the second half in epoch 1.
    """
    offered = range(num_prompts)
    if mixture is not None:
        offered = []
        first = 0  # index of the first prompt of the set
        for number, (size, weight) in enumerate(mixture):
            count = offers_per_epoch(size, weight)
            set_seed = seed_of(seed, "set", number)
            offered += [first + i for i in prompts_of_step(size, count, epoch * count, set_seed)]
            first += size
    generator = torch.Generator().manual_seed(seed_of(seed, "epoch", epoch))
    return [offered[i] for i in torch.randperm(len(offered), generator=generator).tolist()]


def prompts_of_step(
    num_prompts: int, per_step: int, consumed: int, seed: int, mixture: Mixture | None = None
) -> list[int]:
    """Return the indices of the next per_step prompts after `consumed` prompts, in shuffled epochs.

    The result depends only on the number of consumed prompts and the seed, so that resuming needs no sampler
    state. mixture: weighted sets, see mixture_of. A prompt of weight 2 appears twice per epoch, a prompt of
    weight 0.5 in every second epoch.
    """
    length = epoch_length(num_prompts, mixture)
    indices = []
    while len(indices) < per_step:
        epoch, offset = divmod(consumed + len(indices), length)
        indices += epoch_order(num_prompts, epoch, seed, mixture)[offset : offset + per_step - len(indices)]
    return indices
