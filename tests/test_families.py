"""OLMoE, Mixtral and GLM-4.5 on real vLLM engines of this CPU, before and after a weight sync.

test_model.py compares log-probabilities, gradients, replay and files of these families with transformers.
"""

import pytest
import torch
from transformers import Glm4MoeConfig, MixtralConfig, OlmoeConfig

from batch import Request
from data.tiny import build_tokenizer
from kernels.fp8_block import fp8_round
from moe_model import Policy, hf_tensors, num_experts_of, pack, random_weights, route_table, save_hf
from rollout import RolloutEngine, simulate_rounding
from settings import RolloutSettings

VOCAB = 98
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 3, "max_position_embeddings": 512, "num_experts_per_tok": 2,
    "initializer_range": 0.2, "rms_norm_eps": 1e-5, "eos_token_id": 1, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip


def make_policy(family: str) -> Policy:
    """Draw a model whose routes are far from even; GLM has a dense layer 0 and a bias that decides routes."""
    if family == "olmoe":
        config = OlmoeConfig(**SIZES, intermediate_size=128, num_experts=8)
    elif family == "mixtral":
        grouped = SIZES | {"num_key_value_heads": 1, "head_dim": 32}
        config = MixtralConfig(**grouped, intermediate_size=128, num_local_experts=8)
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


def move(policy: Policy, ends: tuple[str, ...], size: float) -> list[str]:
    """Add noise to the tensors whose names have these ends; return their names."""
    generator, moved = torch.Generator().manual_seed(1), []
    for name, tensor in [*policy.named_parameters(), *policy.named_buffers()]:
        if name.endswith(ends):
            tensor.data.add_(size * torch.randn(tensor.shape, generator=generator))
            moved.append(name)
    return moved


def assert_engine_is_policy(engine: RolloutEngine, policy: Policy, version: int) -> torch.Tensor:
    """Compare log-probabilities and routes of samples with the trainer's; return the routes."""
    rng = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, VOCAB, (1 + 2 * i,), generator=rng).tolist() for i in range(12)]
    requests = [Request(prompt, seed, 1.0, 12) for seed, prompt in enumerate(prompts)]
    completions = engine.generate(requests, version)
    packed = pack(prompts, [c.token_ids for c in completions], "cpu")
    with torch.no_grad():
        logprobs, _, layer_ids = policy(packed)
    sampled = torch.tensor([x for c in completions for x in c.logprobs])
    # Both compute in float32; logits reach 10 and pass sums of 96 to 160 terms in another order.
    assert (logprobs - sampled).abs().max() < 1e-4
    expected = route_table(layer_ids, num_experts_of(policy.config))
    routes = torch.cat([c.routed_experts for c in completions])
    assert torch.equal(routes.sort(-1).values, expected.sort(-1).values)
    return routes


@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmoe", "mixtral", "glm"])
def test_an_engine_follows_its_policy_through_a_sync(family, tmp_path):
    policy = make_policy(family)
    save_hf(policy, tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    engine = RolloutEngine(tmp_path, 64, RolloutSettings(dtype="float32", kv_cache_gib=0.02, max_num_seqs=8))
    engine.sync(hf_tensors(policy), 0)
    before = assert_engine_is_policy(engine, policy, 0)
    engine.check_weights(hf_tensors(policy))

    ends = (
        "layers.1.mlp.gate.weight",
        "layers.1.mlp.experts.down_proj",
        "experts.gate_up_proj",
        "lm_head.weight",
    )
    moved = move(policy, (*ends, "shared_experts.up_proj.weight", "e_score_correction_bias"), 0.1)
    with pytest.raises(RuntimeError, match="holds other values") as error:
        engine.check_weights(hf_tensors(policy))
    num_held = len(moved) + (family == "glm")  # vLLM's experts hold the bias of their router, too
    assert f"in {num_held} parameters" in str(error.value), moved
    engine.sync(hf_tensors(policy), 1)
    after = assert_engine_is_policy(engine, policy, 1)
    engine.check_weights(hf_tensors(policy))
    assert not torch.equal(before[:1], after[:1]), "other routers should route the first prompt otherwise"


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "glm"])
def test_simulated_fp8_rounds_projections_and_nothing_else(family):
    """Experts sent one by one are rounded as the fused ones are; gate and up of a shared expert as one."""
    policy = make_policy(family)
    sent, one_by_one = (dict(hf_tensors(policy, own_experts=own)) for own in (False, True))
    rounded, rounded_one_by_one = (dict(simulate_rounding(named.items())) for named in (sent, one_by_one))
    changed = {name for name, tensor in sent.items() if not torch.equal(rounded[name], tensor)}
    assert rounded.keys() == sent.keys()
    assert changed == {name for name in sent if name.removesuffix(".weight").endswith("_proj")}
    prefix = f"model.layers.1.{'block_sparse_moe' if family == 'mixtral' else 'mlp'}"
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (rounded_one_by_one[f"{prefix}.experts.5.{name}.weight"] for name in names)
    assert torch.equal(torch.cat([gate, up]), rounded[f"{prefix}.experts.gate_up_proj"][5])
    assert torch.equal(down, rounded[f"{prefix}.experts.down_proj"][5])
    if family == "glm":
        pair = [f"{prefix}.shared_experts.{name}.weight" for name in ("gate_proj", "up_proj")]
        assert torch.equal(
            torch.cat([rounded[name] for name in pair]), fp8_round(torch.cat([sent[name] for name in pair]))
        )
