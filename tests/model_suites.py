"""Compute the results that test_model.py needs from several ranks; make the models and batches of both sides.

rank_worker.py runs model(). FOLDER/start, dense, glm and granite are checkpoints that the test saved.
"""

import copy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import make_config
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

import extras.lora
import moe_model  # before deepspeed, which then picks the CPU without a warning
from settings import ModelSettings

import deepspeed  # isort: skip

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}  # experts one by one in a loop


# ---- Models and batches ------------------------------------------------------------------------------------
def tiny_config(kind: str):
    """Make a configuration of pairwise different sizes, so that a swapped dimension is noticed."""
    sizes = dict(
        vocab_size=53, hidden_size=32, intermediate_size=40, num_hidden_layers=3, max_position_embeddings=64,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, tie_word_embeddings=False,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    default_head = {name: size for name, size in sizes.items() if name != "head_dim"}  # 32 / 4
    experts = dict(num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True)
    all_sparse = dict(intermediate_size=24, num_experts_per_tok=3, num_hidden_layers=2)
    glm = experts | dict(n_routed_experts=8, first_k_dense_replace=1, attention_bias=True)
    tied = dict(tie_word_embeddings=True, attention_bias=True)
    match kind:
        case "moe":  # layer 1 is dense
            return Qwen3MoeConfig(**sizes | experts, num_experts=8, mlp_only_layers=[1])
        case "moe_other":  # layer 0 is dense
            other = dict(num_experts=8, norm_topk_prob=False, decoder_sparse_step=2, num_hidden_layers=2)
            return Qwen3MoeConfig(**default_head | experts | other | tied)
        case "mixtral":
            return MixtralConfig(**sizes | all_sparse, num_local_experts=8)
        case "olmoe":
            return OlmoeConfig(**default_head | all_sparse, num_experts=8)
        case "glm":  # GLM-4.5 normalises queries and keys, GLM-4.5-Air does not
            shared = dict(n_shared_experts=2, routed_scaling_factor=2.5, use_qk_norm=True)
            return Glm4MoeConfig(**sizes | glm | shared)
        case "glm_plain":
            shared = dict(n_shared_experts=1, routed_scaling_factor=1.0, use_qk_norm=False)
            return Glm4MoeConfig(**sizes | glm | shared | dict(norm_topk_prob=False))
        case "granite":
            scales = dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4)
            fixed = dict(num_local_experts=8, logits_scaling=0.6, tie_word_embeddings=True)
            return GraniteMoeConfig(**default_head | all_sparse | scales | fixed)
        case "llama":  # the wavelengths of its 4 frequencies lie on both sides of 16 and 4 tokens
            llama3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
            context = dict(rope_theta=500.0, original_max_position_embeddings=16)
            return LlamaConfig(**default_head | dict(rope_parameters=llama3 | context))
        case "dense":
            return Qwen3Config(**sizes)
        case "dense_tied":
            return Qwen3Config(**sizes | tied)
    raise ValueError(kind)


def tiny_model(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32):
    """Make transformers' model with large weights, so that attention, routing and logits are uneven."""
    config = tiny_config(kind)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, **EAGER)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else 0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model.to(dtype).eval()


def own_names(named) -> dict[str, torch.Tensor]:
    """Rename the parameters of transformers' Granite as in the policy; for other families the names agree."""
    renamed = ((name.replace("block_sparse_moe.router.", "mlp.gate."), value) for name, value in named)
    return {name.replace("block_sparse_moe.", "mlp."): value for name, value in renamed}


def tiny_batch(vocab_size: int = 53) -> SimpleNamespace:
    """Make six sequences: prompts of 1 to 12 tokens, completions of 0 to 9 tokens, and a weight per target.

    The weights stand for advantages. Two sets of weights serve two optimizer steps.
    """
    generator = torch.Generator().manual_seed(7)
    lengths = [(5, 4), (1, 6), (7, 1), (2, 9), (3, 3), (12, 0)]

    def draw(count: int) -> list[int]:
        return torch.randint(vocab_size, (count,), generator=generator).tolist()

    tokens = [(draw(num_prompt), draw(num_completion)) for num_prompt, num_completion in lengths]
    return SimpleNamespace(
        prompt_ids=[p for p, _ in tokens],
        completion_ids=[c for _, c in tokens],
        weights=[[torch.randn(len(c), generator=generator) for _, c in tokens] for _ in range(2)],
        num_targets=sum(len(c) for _, c in tokens),
    )


# Micro-batches of every rank by world size. Ranks have different numbers of sequences; [] is a dummy that
# makes the number of collectives equal; sequence 5 has no target.
MICRO_BATCHES = {
    1: [[[0, 1], [2, 3, 5], [4]]],
    2: [[[0, 1, 5], [2, 3]], [[4], []]],
    4: [[[0, 1], [2]], [[3], []], [[4], []], [[5], []]],
}


def pack_rows(batch: SimpleNamespace, rows: list[int]) -> moe_model.PackedSequences:
    return moe_model.pack([batch.prompt_ids[i] for i in rows], [batch.completion_ids[i] for i in rows], "cpu")


def collect(named) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}


def grads(module) -> dict[str, torch.Tensor]:
    return collect((name, parameter.grad) for name, parameter in module.named_parameters())


def policy_from(folder: Path, ep_size: int) -> moe_model.Policy:
    config = moe_model.load_config(folder)
    group = moe_model.create_expert_parallel_group(ep_size, moe_model.num_experts_of(config))
    policy = moe_model.Policy(config, group)
    moe_model.load_hf(policy, folder)
    return policy


def policy_like(hf) -> moe_model.Policy:
    """Make a policy with the weights of a transformers model."""
    policy = moe_model.Policy(hf.config)
    policy.load_state_dict(own_names(hf.state_dict().items()))
    return policy


def packed_batch(batch=None) -> moe_model.PackedSequences:
    batch = batch or tiny_batch()
    return moe_model.pack(batch.prompt_ids, batch.completion_ids, "cpu")


def reference_logprobs(hf, batch, temperature: float = 1.0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return log-probabilities and entropies of each completion, one sequence at a time."""
    logprobs, entropies = [], []
    for prompt, completion in zip(batch.prompt_ids, batch.completion_ids):
        logits = hf(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0] / temperature
        logp = logits - logits.logsumexp(dim=-1, keepdim=True)
        logp = logp[len(prompt) - 1 : len(prompt) - 1 + len(completion)]  # predicted by the token before
        logprobs.append(logp.gather(1, torch.tensor(completion, dtype=torch.int64).unsqueeze(1)).squeeze(1))
        entropies.append(-(logp.exp() * logp).sum(dim=-1))
    return logprobs, entropies


def backward(logprobs: torch.Tensor, batch, step: int = 0) -> None:
    (-(torch.cat(batch.weights[step]) * logprobs).sum() / batch.num_targets).backward()


# ---- Optimizer steps ---------------------------------------------------------------------------------------
ADAMW = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.1}
MAX_GRAD_NORM = 0.1  # the test asserts that the true norm is several times larger
STEP_CASES = {  # by world size: (expert-parallel size, ZeRO stage, optimizer, checkpoint to start from)
    1: [(1, 1, "sgd", "start"), (1, 2, "sgd", "start"), (1, 1, "adamw", "start")],
    2: [
        (1, 1, "sgd", "start"), (1, 2, "sgd", "start"), (1, 1, "adamw", "start"), (1, 1, "sgd", "dense"),
        (2, 1, "sgd", "start"), (2, 2, "sgd", "start"), (2, 1, "adamw", "start"), (2, 1, "sgd", "glm"),
        (2, 1, "sgd", "granite"), (1, 2, "sgd", "granite"), (2, 2, "sgd", "granite"),  # a tied head
    ],
    4: [(2, 1, "sgd", "start"), (2, 2, "sgd", "start")],
}  # fmt: skip


RESUME_CASES = [  # dtype of weights, ZeRO stage, offload of the optimizer before the resume; EP = 2
    (torch.float32, 1, False), (torch.bfloat16, 1, False),
    (torch.bfloat16, 2, False), (torch.bfloat16, 2, True),
]  # fmt: skip


def sgd_engine(model, zero_stage: int, **more):
    """Configure DeepSpeed like deepspeed_engine(), but with SGD and for any model."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_optimization": {"stage": zero_stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": MAX_GRAD_NORM,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    return deepspeed.initialize(model=model, config=config | more)[0]


def adamw_engine(policy: moe_model.Policy, zero_stage: int, offload_optimizer: bool = False):
    settings = SimpleNamespace(
        learning_rate=ADAMW["lr"], betas=ADAMW["betas"], weight_decay=ADAMW["weight_decay"],
        max_grad_norm=MAX_GRAD_NORM, zero_stage=zero_stage, fused_adamw=None,
        offload_optimizer=offload_optimizer, grad_reduce_dtype="model",
    )  # fmt: skip
    engine = moe_model.deepspeed_engine(policy, settings)
    for group in engine.optimizer.param_groups:
        group["eps"] = ADAMW["eps"]
    return engine


def take_step(engine, batch, step: int, replay: bool = False) -> float:
    """Take an optimizer step of all ranks on the batch; return the norm of the gradient before clipping.

    replay: the routes of an earlier forward pass, as with R3.
    """
    world_size = dist.get_world_size()
    for rows in MICRO_BATCHES[world_size][dist.get_rank()]:
        if rows:
            packed = pack_rows(batch, rows)
            weights = torch.cat([batch.weights[step][i] for i in rows])
        else:
            packed = moe_model.pack([[0]], [[0]], "cpu")
            weights = torch.zeros(1)
        routes = None
        if replay:
            with torch.no_grad():
                *_, layer_ids, _ = engine.module(packed)
            routes = moe_model.route_table(layer_ids, moe_model.num_experts_of(engine.module.config))
        logprobs, *_ = engine(packed, replay_ids_TLK=routes)
        # DeepSpeed averages gradients over the ranks; this makes the sum over ranks a mean over all targets.
        loss = -(weights * logprobs).sum() * world_size / batch.num_targets
        engine.backward(loss, scale_wrt_gas=False)
    engine.step()
    return float(engine.get_global_grad_norm())


def steps(folder: Path) -> dict:
    results = {}
    for case in STEP_CASES[dist.get_world_size()]:
        ep_size, zero_stage, optimizer, start = case
        policy = policy_from(folder / start, ep_size)
        policy.activation_checkpointing = zero_stage == 2
        engine = {"sgd": sgd_engine, "adamw": adamw_engine}[optimizer](policy, zero_stage)
        norms = [take_step(engine, tiny_batch(), step) for step in range(2 if optimizer == "adamw" else 1)]
        results[case] = {"norms": norms, "parameters": collect(policy.named_parameters())}
        engine.destroy()
    return results


def resume(folder: Path) -> dict:
    """Take two AdamW steps without a break, and again with a new engine that resumes after the first step."""
    results = {}
    batch = tiny_batch()
    file = folder / f"optimizer-{dist.get_rank()}.pt"
    for case in RESUME_CASES:
        dtype, zero_stage, offload_optimizer = case
        policy = policy_from(folder / "start", ep_size=2).to(dtype)
        engine = adamw_engine(policy, zero_stage, offload_optimizer)
        assert getattr(engine.optimizer, "cpu_offload", False) == offload_optimizer
        result = {"norm": take_step(engine, batch, 0)}
        saved = collect(policy.named_parameters())
        torch.save(moe_model.optimizer_shard(engine), file)
        take_step(engine, batch, 1)
        result["straight"] = collect(policy.named_parameters()), moe_model.optimizer_shard(engine)["masters"]
        if dtype == torch.bfloat16:
            result["bytes"] = (bytes_of_zero_1 if zero_stage == 1 else bytes_of_zero_2)(engine)
        engine.destroy()

        policy = policy_from(folder / "start", ep_size=2).to(dtype)
        policy.load_state_dict(saved)
        engine = adamw_engine(policy, zero_stage)
        moe_model.load_optimizer_shard(engine, torch.load(file))
        take_step(engine, batch, 1)
        result["resumed"] = collect(policy.named_parameters()), moe_model.optimizer_shard(engine)["masters"]
        engine.destroy()
        results[case] = result
    return results


def rounded(folder: Path) -> dict:
    """Take a step of GLM and of Llama in bfloat16; return the values that have to stay float32."""
    results = {}
    for kind, ep_size in (("glm", 2), ("llama", 1)):
        group = moe_model.create_expert_parallel_group(ep_size, 8 if kind == "glm" else 0)
        settings = ModelSettings(ep_size=ep_size, dtype="bfloat16")
        policy = moe_model.build_policy(settings, folder / kind, group, torch.device("cpu"))
        engine = adamw_engine(policy, zero_stage=1)
        take_step(engine, tiny_batch(), 0)
        values = collect(policy.named_buffers()) | {"inv_freq": policy.inv_freq}
        results[kind] = values, {parameter.dtype for parameter in policy.parameters()}
        engine.destroy()
    return results


def count_bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None)


def moments(optimizer) -> list[torch.Tensor]:
    return [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]


def backward_of_zeros(engine) -> None:
    logprobs, *_ = engine(pack_rows(tiny_batch(), [0]))
    engine.backward(0.0 * logprobs.sum(), scale_wrt_gas=False)


def bytes_of_zero_1(engine) -> dict:
    """Count the bytes of DeepSpeed's tensors after a backward."""
    backward_of_zeros(engine)
    outer = engine.optimizer
    return {
        "gradients of weights": count_bytes(parameter.grad for parameter in engine.module.parameters()),
        "weights": count_bytes(outer.bf16_groups_flat),
        "gradients": count_bytes(outer.fp32_groups_gradients_flat),
        "master weights": count_bytes(outer.fp32_groups_flat_partition),
        "AdamW": count_bytes(moments(outer.optimizer)),
    }


def bytes_of_zero_2(engine) -> dict:
    """Count the bytes of DeepSpeed's tensors between updates and, of gradients, after one more backward."""
    outer = engine.optimizer
    masters = outer.single_partition_of_fp32_groups

    def count_gradients() -> int:
        return count_bytes(group and group.flat_partition for group in outer.averaged_gradients.values())

    between = count_gradients()
    backward_of_zeros(engine)
    return {
        "between": between,
        "gradients in an update": count_gradients(),
        "master weights": count_bytes(masters),
        "handed gradients": count_bytes(master.grad for master in masters),
        "AdamW": count_bytes(moments(outer.optimizer)),
        "weights": count_bytes(getattr(outer, "param_buffer_of_bit16_for_cpu_offload_groups", [])),
        "buffer": count_bytes([getattr(outer, "temp_grad_buffer_for_gpu_offload", None)]),
    }


# ---- Pieces of expert parallelism, at EP = 2 ---------------------------------------------------------------
def groups(folder: Path) -> dict:
    """Make expert-parallel groups of valid and invalid sizes, and set the timeouts of all groups."""
    messages = {}
    for ep_size, num_experts in [(3, 8), (4, 8), (2, 9), (2, 0)]:
        try:
            moe_model.create_expert_parallel_group(ep_size, num_experts)
        except ValueError as error:
            messages[ep_size, num_experts] = str(error)
    group = moe_model.create_expert_parallel_group(2, 8)
    moe_model.set_group_timeouts(4321)
    backends = [g._get_backend(torch.device("cpu")) for g in (group, dist.group.WORLD)]
    return {
        "messages": messages,
        "timeouts": [backend.options._timeout.total_seconds() for backend in backends],
        "dense": moe_model.create_expert_parallel_group(1, 0),
        "ranks": dist.get_process_group_ranks(group),
    }


DISPATCH_CASES = {  # tokens on (rank 0, rank 1), experts per token, experts to choose from (None: by router)
    "live": ((5, 3), 3, None),
    "one_expert": ((5, 3), 1, [5]),
    "rank_1_receives_nothing": ((4, 6), 2, [0, 1, 2, 3]),
    "rank_0_receives_nothing": ((4, 6), 2, [6, 7]),
    "rank_1_sends_nothing": ((4, 0), 2, None),
}


def dispatch_inputs(case: str) -> SimpleNamespace:
    """Make weights of a MoE layer and, for two ranks, tokens, forced experts, weights of the outputs."""
    num_tokens, top_k, allowed = DISPATCH_CASES[case]
    generator = torch.Generator().manual_seed(11)
    config = tiny_config("moe")
    hidden = config.hidden_size
    width = config.moe_intermediate_size
    num_experts = config.num_experts

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def choice() -> list[int]:
        return [allowed[i] for i in torch.randperm(len(allowed), generator=generator)[:top_k]]

    return SimpleNamespace(
        top_k=top_k,
        weights={
            "gate.weight": 0.5 * normal(num_experts, hidden),
            "experts.gate_up_proj": 0.15 * normal(num_experts, 2 * width, hidden),
            "experts.down_proj": 0.15 * normal(num_experts, hidden, width),
        },
        x=[normal(n, hidden) for n in num_tokens],
        loss_weights=[normal(n, hidden) for n in num_tokens],
        replay_ids=[torch.tensor([choice() for _ in range(n)]) if allowed else None for n in num_tokens],
    )


def dispatch(folder: Path) -> dict:
    group = moe_model.create_expert_parallel_group(2, 8)
    rank = dist.get_rank()
    results = {}
    for case in DISPATCH_CASES:
        inputs = dispatch_inputs(case)
        config = tiny_config("moe")
        config.num_experts_per_tok = inputs.top_k
        block = moe_model.MoEBlock(config, group)
        local = slice(4 * rank, 4 * rank + 4)
        block.load_state_dict(
            {name: value[local] if "experts" in name else value for name, value in inputs.weights.items()}
        )
        x = inputs.x[rank].clone().requires_grad_()
        y, _ = block(x, inputs.replay_ids[rank])
        (y * inputs.loss_weights[rank]).sum().backward()
        results[case] = {"y": y.detach(), "x_grad": x.grad, **grads(block)}
    return results


def recomputed_and_replayed(folder: Path) -> dict:
    """Compute log-probabilities and gradients at EP = 2: plain, checkpointed, replayed, both."""
    packed = pack_rows(tiny_batch(), MICRO_BATCHES[2][dist.get_rank()][0])
    policy = policy_from(folder / "start", ep_size=2)
    results = {"num_forwards": Counter()}
    routes = None
    for name in ("plain", "checkpointed", "replayed", "both"):
        policy.activation_checkpointing = name in ("checkpointed", "both")
        count = lambda *_, name=name: results["num_forwards"].update([name])
        hook = policy.model.layers[0].register_forward_pre_hook(count)
        logprobs, _, layer_ids, _ = policy(
            packed, replay_ids_TLK=routes if name in ("replayed", "both") else None
        )
        policy.zero_grad()
        logprobs.sum().backward()
        hook.remove()
        results[name] = {"logprobs": logprobs.detach(), **grads(policy)}
        routes = moe_model.route_table(layer_ids, 8)
    return results


def gradients_after_another_choice(policy: moe_model.Policy, packed) -> dict[str, dict]:
    """Return the gradients of a forward pass after which routers would choose other experts.

    policy: GLM, whose bias decides the choice of experts and nothing else. The bias is negated between the
    forward and the backward pass, in place of the noise near a tie of scores.
    """
    biases = [buffer for name, buffer in policy.named_buffers() if name.endswith("e_score_correction_bias")]
    results = {}
    for name in ("plain", "checkpointed"):
        policy.activation_checkpointing = name == "checkpointed"
        policy.zero_grad()
        logprobs, _, layer_ids, _ = policy(packed)
        for bias in biases:
            bias.neg_()
        with torch.no_grad():
            other_ids = policy(packed)[2]
        assert not torch.equal(moe_model.route_table(layer_ids, 8), moe_model.route_table(other_ids, 8))
        logprobs.sum().backward()
        results[name] = grads(policy)
        for bias in biases:
            bias.neg_()
    return results


def another_choice(folder: Path) -> dict:
    packed = pack_rows(tiny_batch(), MICRO_BATCHES[2][dist.get_rank()][0])
    return gradients_after_another_choice(policy_from(folder / "glm", ep_size=2), packed)


def weights(folder: Path) -> dict:
    """Load, gather for the engine, save to FOLDER/saved_<W>, and draw random weights."""
    world_size = dist.get_world_size()
    policy = policy_from(folder / "start", ep_size=2)
    results = {"parameters": collect(policy.named_parameters())}
    results["hf_tensors"] = [(name, tensor.clone()) for name, tensor in moe_model.hf_tensors(policy)]
    moe_model.save_hf(policy, folder / f"saved_{world_size}")
    moe_model.save_hf(policy, folder / f"saved_bf16_{world_size}", torch.bfloat16)
    moe_model.random_weights(policy, seed=3)
    results["random"] = collect(policy.named_parameters())
    granite = policy_from(folder / "granite", ep_size=2)
    results["granite"] = {name: tensor.clone() for name, tensor in moe_model.hf_tensors(granite)}
    moe_model.save_hf(granite, folder / f"saved_granite_{world_size}")
    results["full disk"] = save_on_a_full_disk(granite, folder / f"full_{world_size}")
    return results


def save_on_a_full_disk(policy, folder: Path) -> str:
    """Save in several files while no file can be written; return the error, or "" from other ranks."""

    def full(*arguments, **options):
        raise OSError("full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_model, "SHARD_BYTES", 2**13)
        try:
            moe_model.save_hf(policy, folder, save=full)
        except OSError as error:
            return str(error)
    return ""


PIECES = (groups, dispatch, recomputed_and_replayed, another_choice)
PAIR = (steps, resume, rounded, *PIECES, weights)
SECTIONS = {1: [steps], 2: PAIR, 4: [steps, weights]}  # by number of ranks


def model(folder: Path) -> dict:
    """Run the sections for this number of ranks; return {section: result}."""
    return {section.__name__: section(folder) for section in SECTIONS[dist.get_world_size()]}


# ---- Adapters: test_lora.py --------------------------------------------------------------------------------
LORA = ("lora.rank=3", "lora.alpha=6", "rollout.dtype=bfloat16")
LORA_CASES = {  # (model, expert-parallel size, ZeRO stage, offload, recompute layers, dtype, targets)
    "dense": ("dense", 1, 1, False, False, torch.float32, ["attention", "mlp"]),
    "ep_1": ("moe", 1, 1, False, False, torch.float32, ["attention", "mlp", "experts"]),
    "ep_2": ("moe", 2, 1, False, False, torch.float32, ["attention", "mlp", "experts"]),
    "zero_2": ("moe", 2, 2, False, True, torch.float32, ["attention", "mlp", "experts"]),
    "offload": ("moe", 2, 2, True, False, torch.float32, ["attention", "mlp", "experts"]),
    "granite": ("granite", 2, 1, False, True, torch.float32, ["attention", "experts"]),
    "no_experts": ("moe", 2, 2, False, False, torch.float32, ["attention"]),
    "experts_alone": ("moe", 2, 1, False, True, torch.float32, ["experts"]),
    "bfloat16": ("moe", 2, 1, False, False, torch.bfloat16, ["experts", "attention"]),
    "bfloat16_experts": ("moe", 2, 1, False, False, torch.bfloat16, ["experts"]),
    "bfloat16_zero_2": ("moe", 2, 2, True, True, torch.bfloat16, ["experts"]),
}
LORA_REPLAYED = ("ep_1", "zero_2", "offload", "granite")


def lora(folder: Path) -> dict:
    """Take two steps with adapters; resume after the first step; return adapters, sent tensors and shards."""
    results = {}
    for name, (kind, ep_size, zero_stage, offload, recompute, dtype, targets) in LORA_CASES.items():
        config = make_config(*LORA, f"lora.targets={targets}")

        def start(adapter: Path):
            policy = policy_from(folder / kind, ep_size).to(dtype)  # noqa: B023
            policy.activation_checkpointing = recompute  # noqa: B023
            extras.lora.EXTRA.adapt(policy, config)  # noqa: B023
            extras.lora.EXTRA.save(policy, config, folder / f"{name}_new", save_file)  # noqa: B023
            extras.lora.EXTRA.load(policy, adapter)
            return adamw_engine(policy, zero_stage, offload)  # noqa: B023

        def tensors_of(engine, place: Path) -> dict:
            extras.lora.EXTRA.save(engine.module, config, place, save_file)  # noqa: B023
            dist.barrier()
            return load_file(place / "adapter" / extras.lora.TENSORS)

        replay = name in LORA_REPLAYED
        engine = start(folder / name)
        norms = [take_step(engine, tiny_batch(), 0, replay)]
        saved = folder / f"{name}_1"
        tensors_of(engine, saved)
        shard = copy.deepcopy(moe_model.optimizer_shard(engine))
        norms.append(take_step(engine, tiny_batch(), 1, replay))
        sent = collect(moe_model.hf_tensors(engine.module))
        result = {"norms": norms, "sent": sent, "survival": engine.module.lora.survival, "shard": shard}
        result["frozen"] = collect((n, p) for n, p in engine.module.named_parameters() if "lora_" not in n)
        result["adapter"] = tensors_of(engine, folder / f"{name}_2")
        moe_model.save_hf(engine.module, folder / f"{name}_merged")
        engine.destroy()
        engine = start(saved)
        moe_model.load_optimizer_shard(engine, shard)
        take_step(engine, tiny_batch(), 1, replay)
        result["resumed"] = tensors_of(engine, folder / f"{name}_resumed")
        engine.destroy()
        results[name] = result
    return results
