"""train.share_prompts: a prompt that passes once through the policy gives the outputs of repeated prompts.

test_replay.py compares the whole update with plain torch and transformers, on one and two ranks, with expert
parallelism and replayed routes.
"""

import pytest
import torch
from conftest import save_small_moe
from helpers import batch_of_rows, make_config, make_ragged_completions

import moe_model
from moe_model import pack
from runtime import schedule

PROMPTS = [[5, 6, 7, 8], [9], [5, 6, 7, 8], [5, 6, 7], [5, 6, 7, 8], [9], [5, 6, 7, 8]]
COMPLETIONS = [[1, 2, 3], [2, 2], [4], [7, 7, 7], [], [3], [8] * 9]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> moe_model.Policy:
    folder = tmp_path_factory.mktemp("moe")
    save_small_moe(folder)
    policy = moe_model.Policy(moe_model.load_config(folder))
    moe_model.random_weights(policy, seed=0)
    return policy


def outputs_of(policy, share: bool, checkpointing: bool) -> tuple:
    """Return log-probabilities, entropies, routes of every row, and the gradients of a weighted sum."""
    policy.activation_checkpointing = checkpointing
    packed = pack(PROMPTS, COMPLETIONS, "cpu", share)
    policy.zero_grad()
    logprobs, entropy, layer_ids, _ = policy(packed)
    (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
    routes = moe_model.route_table(layer_ids, policy.config.num_experts)
    routes = routes if packed.spread is None else routes[packed.spread]
    gradients = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    return logprobs.detach(), entropy.detach(), routes, gradients


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_shared_prompt_gives_the_same_outputs_and_gradients(checkpointing, policy):
    *expected, routes, gradients = outputs_of(policy, False, checkpointing)
    *outputs, shared_routes, shared_gradients = outputs_of(policy, True, checkpointing)
    for output, value in zip(outputs, expected):
        torch.testing.assert_close(output, value, rtol=0, atol=1e-6)
    assert torch.equal(routes, shared_routes)
    for name, gradient in gradients.items():
        bound = 1e-6 * max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(shared_gradients[name], gradient, rtol=0, atol=bound, msg=name)


def test_the_gradients_of_many_copies_are_summed_in_float32():
    """In bfloat16, a sum of ones ends at 256."""
    num_copies = 400
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    repeats = tuple((torch.tensor([0]), torch.tensor([1 + copy])) for copy in range(num_copies))
    moe_model.ToGrid.apply(x, torch.tensor([0]), repeats, 1 + num_copies).sum().backward()
    assert x.grad == torch.tensor(1.0 + num_copies).bfloat16()


def test_repeated_prompts_are_laid_out_once():
    """Each of three repetitions shares three of four prompt tokens; a prompt of one token is not shared."""
    full, shared = (pack(PROMPTS, COMPLETIONS, "cpu", share) for share in (False, True))
    assert len(full.input_ids) - len(shared.input_ids) == 3 * 3
    assert torch.equal(shared.input_ids[shared.spread], full.input_ids)
    assert torch.equal(shared.position_ids[shared.spread], full.position_ids)
    assert torch.equal(full.input_ids[shared.kept], shared.input_ids)
    places = torch.cat([shared.padded_index, *(places for _, places in shared.repeats)])
    assert sorted(places.tolist()) == sorted(full.padded_index.tolist()), "every place is filled once"
    assert len(set(shared.predictor_index.tolist())) == len(shared.predictor_index) == len(full.target_ids)


def test_a_group_stays_together_if_that_saves_tokens():
    """The first group has 3 x 4 prompt tokens, of which 6 are saved. The longest completion has 8 tokens."""
    completions = make_ragged_completions()
    lengths = [len(c["prompt_ids"]) + len(c["completion_ids"]) - 1 for c in completions]
    assert lengths[:3] == [11, 10, 8]

    def split_lengths(share: str) -> list[int]:
        batch = batch_of_rows(completions, list(range(12)))
        return schedule.split_lengths(batch, make_config(f"train.share_prompts={share}"))

    assert split_lengths("false") == lengths
    assert split_lengths("true")[:3] == [11, 11, 11], "4 places are added"
    completions[0]["completion_ids"] += [1]
    assert split_lengths("true")[:3] == [12, 12, 12], "6 places are added"
    completions[0]["completion_ids"] += [1]
    assert split_lengths("true")[:3] == [13, 10, 8], "8 places would be added"
