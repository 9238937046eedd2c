"""Sample from real vLLM engines, and compare the samples with the trainer's forward pass."""

from pathlib import Path

import numpy as np
import torch

import moe_model
from batch import Request
from data.tiny import build_tokenizer

VOCAB = 98  # tokens of the demo's tokenizer


def save_model(policy, folder: Path) -> Path:
    """Save a policy and the demo's tokenizer in Hugging Face format."""
    moe_model.save_hf(policy, folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def random_requests(count: int, shortest: int, longest: int, max_new_tokens: int = 12) -> list[Request]:
    """Draw requests with random prompts; seeds are 0, 1, 2 and so on."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(shortest, longest, size=count)
    prompts = [rng.integers(3, VOCAB, size=length).tolist() for length in lengths]
    return [Request(prompt, seed, 1.0, max_new_tokens) for seed, prompt in enumerate(prompts)]


def token_ids(completions) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def trained(policy, requests, completions, **options) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the trainer's forward on samples: log-probabilities [N], and routes [T, L, K] of a MoE model."""
    packed = moe_model.pack([request.prompt_ids for request in requests], token_ids(completions), "cpu")
    with torch.no_grad():
        logprobs, _, layer_ids, _ = policy(packed, temperature=requests[0].temperature, **options)
    return logprobs, moe_model.route_table(layer_ids, moe_model.num_experts_of(policy.config))


def logprob_distance(logprobs: torch.Tensor, completions) -> torch.Tensor:
    """Return |the trainer's log-probability - the engine's| of every sampled token [N]."""
    return (logprobs - torch.tensor([x for c in completions for x in c.logprobs])).abs()


def assert_samples_are_the_trainers(policy, requests, completions) -> None:
    """Compare log-probabilities with the trainer's, and routes as sets in every row.

    With 8 experts, a few thousand rows and float32, the smallest gap between the scores of a chosen and of a
    discarded expert is far above rounding, so that every row has to agree. The rounding of log-probabilities
    through two or three layers is about 1e-5.
    """
    logprobs, table = trained(policy, requests, completions)
    assert logprob_distance(logprobs, completions).max() < 1e-4
    if table is None:
        assert [completion.routed_experts for completion in completions] == [None] * len(requests)
        return
    rows = [len(r.prompt_ids) + len(c.token_ids) - 1 for r, c in zip(requests, completions)]
    for num_rows, completion, expected in zip(rows, completions, table.split(rows)):
        ids = completion.routed_experts
        assert ids.shape == (num_rows, *table.shape[1:]) and ids.dtype == torch.uint8
        assert torch.equal(ids.sort(-1).values, expected.sort(-1).values)
