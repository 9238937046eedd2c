"""The prompts of a run: which are kept, their tokens, and their order, reproducible from a seed."""

import functools
import hashlib

import torch

from data.prompts import OfflineScore, Prompt, check_disjoint, load_prompts, load_scores, prompt_sha
from experiments.settings import eval_name
from reward import DENSE_KINDS, KINDS, is_kind


def keep_by_offline_scores(
    prompts: list[Prompt], path: str, low: float, high: float
) -> tuple[list[Prompt], list[OfflineScore | None]]:
    """Stage 1: prompts whose offline pass rate is in the range, those without one, and the scores of both.

    [secondary: prompts that smaller models already solve are dropped before training; ours: the range]
    """
    scores = load_scores(path)
    scored = [(prompt, scores.get(prompt_sha(prompt))) for prompt in prompts]
    if all(score is None for _, score in scored):
        raise ValueError(
            f"zero_variance.offline_scores: {path} holds no pass rate of any training "
            "prompt: score these prompts, with the same template, by data/score.py"
        )
    kept = [(prompt, score) for prompt, score in scored if score is None or low <= score.pass_rate <= high]
    if not kept:
        raise ValueError(f"zero_variance.offline_pass_rate: no pass rate lies in {low:g} to {high:g}")
    return [prompt for prompt, _ in kept], [score for _, score in kept]


def digest_of(prompts: list[Prompt]) -> str:
    """Hash of the prompts and answers in their order: what a saved record of them belongs to."""
    return hashlib.sha256("".join(prompt_sha(prompt) for prompt in prompts).encode()).hexdigest()


def tokenize(prompts: list[Prompt], tokenizer, max_prompt_tokens: int) -> list[list[int]]:
    """Token ids of each prompt; ValueError naming a prompt that is empty or too long."""
    prompt_ids = tokenizer([p.text for p in prompts])["input_ids"]
    for prompt, ids in zip(prompts, prompt_ids):
        if not 1 <= len(ids) <= max_prompt_tokens:
            raise ValueError(
                f"{prompt.source}: a prompt has {len(ids)} tokens, rollout.max_prompt_tokens is "
                f"{max_prompt_tokens}: {prompt.text[:80]!r}; raise the limit or remove the prompt"
            )
    return prompt_ids


def decoder_json(tokenizer) -> str:
    """The tokenizer for reward workers, which decode by the library inside it; ValueError if that differs."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    cleans = tokenizer.clean_up_tokenization_spaces and type(getattr(inner, "model", None)).__name__ != "BPE"
    if inner is None or cleans:
        raise ValueError("reward.decode workers: this tokenizer does more than its library: set it to engine")
    return inner.to_str()


def load_sets(config, tokenizer) -> tuple[list[Prompt], list[OfflineScore | None], dict, int]:
    """Training prompts, their offline scores, {name: (prompts, token ids)} of held-out sets, number of
    training prompts that stage 1 dropped; ValueError on overlap and on what the settings cannot do with them.
    """
    limit = config.rollout.max_prompt_tokens
    train = [prompt for source in config.data.train for prompt in load_prompts(**source.model_dump())]
    eval_sets = {}
    for source in config.data.eval:
        prompts = load_prompts(**source.model_dump())
        check_disjoint(train, prompts)
        eval_sets[eval_name(source)] = (prompts, tokenize(prompts, tokenizer, limit))
    for prompt in [*train, *(p for prompts, _ in eval_sets.values() for p in prompts)]:
        if not is_kind(prompt.kind):
            known = ", ".join(KINDS)
            raise ValueError(
                f"{prompt.source}: kind {prompt.kind!r} of {prompt.text[:80]!r}: none of {known}"
            )
    kinds = {prompt.kind for prompt in train}
    whole = kinds.intersection(KINDS) - set(DENSE_KINDS)
    if config.reward.dense and whole:
        raise ValueError(
            f"reward.dense: data.train[].kind {', '.join(sorted(whole))} is right or "
            f"wrong as a whole; only {', '.join(DENSE_KINDS)} has parts"
        )
    kept, scores, settings = train, [None] * len(train), config.zero_variance
    if settings.offline_scores:
        kept, scores = keep_by_offline_scores(train, settings.offline_scores, *settings.offline_pass_rate)
    return kept, scores, eval_sets, len(train) - len(kept)


def seed_of(*parts: int | str) -> int:
    """63-bit seed of a random decision, from what it depends on (seed, step, prompt, completion) alone."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@functools.lru_cache(maxsize=2)
def epoch_order(num_prompts: int, epoch: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed_of(seed, "epoch", epoch))
    return torch.randperm(num_prompts, generator=generator).tolist()


def prompts_of_step(num_prompts: int, per_step: int, consumed: int, seed: int) -> list[int]:
    """Indices of the next per_step prompts after `consumed`: whole shuffled epochs, one after another.

    A function of the number consumed, so that resuming needs no sampler state.
    """
    indices = []
    while len(indices) < per_step:
        epoch, offset = divmod(consumed + len(indices), num_prompts)
        indices += epoch_order(num_prompts, epoch, seed)[offset : offset + per_step - len(indices)]
    return indices
