"""LoRA against peft, against a loop over experts, and against the merged weights.

peft adapts transformers' own models, so that neither layout nor names of extras/lora.py are assumed. The
ranks of model_suites.lora() repeat updates under expert parallelism, ZeRO, offload and activation
checkpointing.
"""

from pathlib import Path

import peft
import pytest
import torch
from helpers import make_config
from model_suites import tiny_batch, tiny_model
from test_model import PARITY, backward, packed_batch, policy_like, reference_logprobs

import moe_model
from extras import lora

KINDS = ("dense", "dense_tied", "llama", "moe", "mixtral", "olmoe", "glm", "granite")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def adapted(kind: str, hf=None, b_scale: float = 0.1, **settings) -> moe_model.Policy:
    """Make a policy with adapters whose B is random, so that they have an effect."""
    policy = policy_like(hf or tiny_model(kind))
    config = make_config(section="lora", **({"rank": 3, "alpha": 6.0} | settings))
    lora.EXTRA.check_model(config, policy.config)
    lora.EXTRA.adapt(policy, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for merged in policy.merged.values():
            merged.b.copy_(b_scale * torch.randn(merged.b.shape, generator=generator))
    return policy


def through_peft(policy: moe_model.Policy, hf, folder: Path, **settings):
    """Save the adapters of a policy, and load them with peft on transformers' model."""
    config = make_config(section="lora", **({"rank": 3, "alpha": 6.0} | settings))
    lora.EXTRA.save(policy, config, folder, lora.save_file)
    return peft.PeftModel.from_pretrained(hf, folder / "adapter", is_trainable=True)


def gradients(policy: moe_model.Policy) -> dict[str, torch.Tensor]:
    """Return the gradients of the adapters by their names in a file of PEFT and in its layout."""
    named = {}
    for name, merged in policy.merged.items():
        grads = [merged.a.grad, merged.b.grad]
        if grads[0].dim() == 3:
            grads = [grads[0].flatten(0, 1), grads[1].permute(1, 2, 0).flatten(1)]
        named |= zip(lora.file_names(policy.config, name), grads)
    return named


@pytest.mark.parametrize("kind", KINDS)
def test_peft_computes_the_exported_adapter_and_its_gradients_alike(kind, tmp_path):
    """A random B also for experts, dense MLPs of a MoE, and shared experts."""
    hf = tiny_model(kind)
    policy = adapted(kind, hf)
    logprobs, *_ = policy(packed_batch())
    base, *_ = lora.Base(policy)(packed_batch())
    expected_base, _ = reference_logprobs(hf, tiny_batch())
    assert (base - torch.cat(expected_base)).abs().max() < PARITY
    model = through_peft(policy, hf, tmp_path)
    expected, _ = reference_logprobs(model, tiny_batch())
    assert (base - logprobs).abs().max() > 0.1
    assert (torch.cat(expected) - logprobs).abs().max() < PARITY

    backward(logprobs, tiny_batch())
    backward(torch.cat(expected), tiny_batch())
    theirs = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if "lora_" in name}
    ours = gradients(policy)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() < PARITY and gradient.abs().max() > 1e-4, name
    assert all(p.grad is None for name, p in policy.named_parameters() if "lora_" not in name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_computes_like_the_adapters(kind, tmp_path):
    policy = adapted(kind, rslora=True)
    logprobs, *_ = policy(packed_batch())
    moe_model.save_hf(policy, tmp_path)
    merged = moe_model.Policy(policy.config)
    moe_model.load_hf(merged, tmp_path)
    assert (merged(packed_batch())[0] - logprobs).abs().max() < PARITY
    sent = dict(moe_model.hf_tensors(policy))
    for name, tensor in moe_model.hf_tensors(merged):
        assert torch.equal(sent[name], tensor), name
    own = dict(moe_model.hf_tensors(policy, own_experts=True))
    assert all(torch.equal(own[name], tensor) for name, tensor in moe_model.hf_tensors(merged, True))
