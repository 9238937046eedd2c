"""OLMoE, Mixtral, GLM-4.5, Granite, Llama and Qwen2 on real vLLM engines of this CPU, around a weight sync.

test_model.py compares log-probabilities, gradients, replay and files of the MoE families with transformers,
test_upcycle.py log-probabilities and gradients of Llama and Qwen2.
"""

import pytest
import torch
from engines import VOCAB, assert_samples_are_the_trainers, random_requests, save_model
from transformers import Glm4MoeConfig, GraniteMoeConfig, LlamaConfig, MixtralConfig, OlmoeConfig, Qwen2Config

from data.score import weights_of
from fp8 import simulate_rounding
from kernels.fp8_block import fp8_round
from moe_model import Policy, file_name, hf_tensors, random_weights
from rollout import RolloutEngine
from settings import RolloutSettings

FAMILIES = ["olmoe", "mixtral", "glm", "granite"]
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 3, "max_position_embeddings": 512, "num_experts_per_tok": 2,
    "initializer_range": 0.2, "rms_norm_eps": 1e-5, "eos_token_id": 1, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip


def make_policy(family: str) -> Policy:
    """Draw a model with uneven routes; GLM has a dense layer 0 and a bias that changes routes.

    Granite has a tied head and the multipliers of Granite 3.1.
    """
    if family == "olmoe":
        config = OlmoeConfig(**SIZES, intermediate_size=128, num_experts=8)
    elif family == "mixtral":
        grouped = SIZES | {"num_key_value_heads": 1, "head_dim": 32}
        config = MixtralConfig(**grouped, intermediate_size=128, num_local_experts=8)
    elif family == "granite":
        scales = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 1 / 64}
        grouped = SIZES | scales | {"num_key_value_heads": 1, "tie_word_embeddings": True}
        config = GraniteMoeConfig(**grouped, intermediate_size=128, num_local_experts=8, logits_scaling=6.0)
    else:
        config = Glm4MoeConfig(
            **SIZES, intermediate_size=160, moe_intermediate_size=128, n_routed_experts=8, n_shared_experts=1,
            routed_scaling_factor=2.5, first_k_dense_replace=1, attention_bias=True, use_qk_norm=True,
            head_dim=32,
        )  # fmt: skip
    policy = Policy(config)
    random_weights(policy, 0)
    move(policy, ("e_score_correction_bias",), 0.3)
    return policy


def move(policy: Policy, endings: tuple[str, ...], size: float) -> int:
    """Add noise to the tensors whose names have one of these endings; return the number of tensors."""
    generator = torch.Generator().manual_seed(1)
    named = [*policy.named_parameters(), *policy.named_buffers()]
    moved = [tensor for name, tensor in named if name.endswith(endings)]
    for tensor in moved:
        tensor.data.add_(size * torch.randn(tensor.shape, generator=generator))
    return len(moved)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_follows_its_policy_through_a_sync(family, tmp_path):
    policy = make_policy(family)
    settings = RolloutSettings(dtype="float32", kv_cache_gib=0.02, max_num_seqs=8)
    engine = RolloutEngine(save_model(policy, tmp_path), 64, settings)
    requests = random_requests(12, 1, 24)
    prompt_routes = []
    for version in (0, 1):
        engine.sync(hf_tensors(policy, own_experts=version == 1), version)  # fused, then matrix by matrix
        engine.check_weights(hf_tensors(policy))
        completions = engine.generate(requests, version)
        assert_samples_are_the_trainers(policy, requests, completions)
        prompt_routes.append(completions[0].routed_experts[: len(requests[0].prompt_ids)])
        if version == 0:
            layer = ("layers.1.mlp.gate.weight", "layers.1.mlp.experts.down_proj", "experts.gate_up_proj")
            shared = ("shared_experts.up_proj.weight", "e_score_correction_bias")
            head = ("lm_head.weight", "embed_tokens.weight")
            num_moved = move(policy, (*layer, *shared, *head), 0.1)
            # vLLM has a second copy of GLM's bias in the experts, and of a tied embedding in the head.
            num_moved += family in ("glm", "granite")
            with pytest.raises(RuntimeError, match=f"in {num_moved} parameters"):
                engine.check_weights(hf_tensors(policy))
    assert not torch.equal(*prompt_routes), "other routers should route the first prompt to other experts"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_engine_follows_a_dense_policy_through_a_sync(family, tmp_path):
    """Run after the tests of MoEs: vLLM creates the group of experts only if the first engine of a process
    has experts."""
    grouped = SIZES | {"num_key_value_heads": 1}
    del grouped["num_experts_per_tok"]
    grouped |= {"intermediate_size": 128}
    if family == "llama":
        rope = {"rope_type": "llama3", "rope_theta": 500.0, "original_max_position_embeddings": 16}
        rope |= {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        config = LlamaConfig(**grouped, architectures=["LlamaForCausalLM"], rope_parameters=rope)
    else:
        config = Qwen2Config(**grouped, architectures=["Qwen2ForCausalLM"])
    policy = Policy(config)
    random_weights(policy, 0)
    move(policy, (".bias",), 0.3)
    settings = RolloutSettings(dtype="float32", kv_cache_gib=0.02, max_num_seqs=8)
    engine = RolloutEngine(save_model(policy, tmp_path), 64, settings)
    requests = random_requests(12, 1, 24)
    for version in (0, 1):
        engine.sync(hf_tensors(policy), version)
        engine.check_weights(hf_tensors(policy))
        assert_samples_are_the_trainers(policy, requests, engine.generate(requests, version))
        move(policy, ("proj.weight", "lm_head.weight"), 0.1)
        with pytest.raises(RuntimeError, match="parameters"):
            engine.check_weights(hf_tensors(policy))


@pytest.mark.parametrize("family", FAMILIES)
def test_simulated_fp8_rounds_the_tensors_of_a_file_as_those_of_the_policy(family, tmp_path):
    """Files are sorted by name: keys before queries. Blocks of 128 rows would hold other rows."""
    policy = make_policy(family)
    save_model(policy, tmp_path)
    sent = dict(simulate_rounding(hf_tensors(policy, own_experts=family != "granite")))
    read = dict(simulate_rounding(weights_of(tmp_path)))
    assert read.keys() == {file_name(policy.config, name) for name in sent}
    for name, tensor in sent.items():
        assert torch.equal(read[file_name(policy.config, name)], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_simulated_fp8_rounds_projections_alone(family):
    """Separate experts are rounded like fused experts, and gate and up of a shared expert as one matrix."""
    policy = make_policy(family)
    fused, separate = (dict(hf_tensors(policy, own_experts=own)) for own in (False, True))
    rounded, rounded_separate = (dict(simulate_rounding(named.items())) for named in (fused, separate))
    changed = {name for name, tensor in fused.items() if not torch.equal(rounded[name], tensor)}
    assert rounded.keys() == fused.keys()
    assert changed == {name for name in fused if name.removesuffix(".weight").endswith("_proj")}
    prefix = f"model.layers.1.{'block_sparse_moe' if family in ('mixtral', 'granite') else 'mlp'}"
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (rounded_separate[f"{prefix}.experts.5.{name}.weight"] for name in names)
    assert torch.equal(torch.cat([gate, up]), rounded[f"{prefix}.experts.gate_up_proj"][5])
    assert torch.equal(down, rounded[f"{prefix}.experts.down_proj"][5])
    if family == "glm":
        pair = [f"{prefix}.shared_experts.{name}.weight" for name in ("gate_proj", "up_proj")]
        expected = fp8_round(torch.cat([fused[name] for name in pair]))
        assert torch.equal(torch.cat([rounded[name] for name in pair]), expected)
