"""Choose the prompts of a run: which are kept, their tokens, and their order, reproducible from a seed."""

import functools
import hashlib

import torch

from data.prompts import (
    OfflineScore,
    Prompt,
    PromptSource,
    check_disjoint,
    load_prompts,
    load_scores,
    prompt_sha,
)


def keep_by_offline_scores(
    prompts: list[Prompt], path: str, low: float, high: float
) -> tuple[list[Prompt], list[OfflineScore | None]]:
    """Keep prompts with an offline pass rate in the range or without one; return them and their scores.

    This is stage 1 of zero-variance elimination [secondary: prompts that smaller models already solve are
    dropped before training; ours: the range]
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
    """Hash the prompts and answers in their order: it names what a saved record of them belongs to."""
    return hashlib.sha256("".join(prompt_sha(prompt) for prompt in prompts).encode()).hexdigest()


def tokenize(prompts: list[Prompt], tokenizer, max_prompt_tokens: int) -> list[list[int]]:
    """Return the token ids of each prompt; ValueError naming a prompt that is empty or too long."""
    prompt_ids = tokenizer([p.text for p in prompts])["input_ids"]
    for prompt, ids in zip(prompts, prompt_ids):
        if not 1 <= len(ids) <= max_prompt_tokens:
            raise ValueError(
                f"{prompt.source}: a prompt has {len(ids)} tokens, rollout.max_prompt_tokens is "
                f"{max_prompt_tokens}: {prompt.text[:80]!r}; raise the limit or remove the prompt"
            )
    return prompt_ids


EvalSets = dict[str, tuple[list[Prompt], list[list[int]]]]  # {name: (prompts, their token ids)}


def load_sets(
    train_sources: list[PromptSource],
    eval_sources: list[PromptSource],
    tokenizer,
    max_prompt_tokens: int,
    functions: list[str],
) -> tuple[list[Prompt], EvalSets]:
    """Load the training prompts and the held-out sets; ValueError on an overlap of the two.

    functions: kinds "module:function" that rows may name. Those that a source itself names are added: they
    come from the settings, too.
    """
    sources = [*train_sources, *eval_sources]
    allowed = {*functions, *(source.kind for source in sources)}
    load = lambda source: load_prompts(**source.model_dump(), functions=allowed)
    train = [prompt for source in train_sources for prompt in load(source)]
    eval_sets = {}
    for source in eval_sources:
        prompts = load(source)
        check_disjoint(train, prompts)
        eval_sets[source.label] = (prompts, tokenize(prompts, tokenizer, max_prompt_tokens))
    return train, eval_sets


def seed_of(*parts: int | str) -> int:
    """Derive the 63-bit seed of a random decision from all it depends on, e.g. seed, step, prompt, sample."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@functools.lru_cache(maxsize=2)
def epoch_order(num_prompts: int, epoch: int, seed: int) -> list[int]:
    """Shuffle the prompts of an epoch."""
    generator = torch.Generator().manual_seed(seed_of(seed, "epoch", epoch))
    return torch.randperm(num_prompts, generator=generator).tolist()


def prompts_of_step(num_prompts: int, per_step: int, consumed: int, seed: int) -> list[int]:
    """Return the indices of the next per_step prompts after `consumed`: shuffled epochs, one after another.

    The result depends on the number consumed and the seed alone, so that resuming needs no sampler state.
    """
    indices = []
    while len(indices) < per_step:
        epoch, offset = divmod(consumed + len(indices), num_prompts)
        indices += epoch_order(num_prompts, epoch, seed)[offset : offset + per_step - len(indices)]
    return indices
