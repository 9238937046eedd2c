"""Share one engine between two ranks: `shared_engine_worker.py FOLDER MODE` prints one JSON line per rank.

MODE tensor: the engine splits every matrix; both ranks sample their own requests, in unequal numbers.
MODE expert: each rank's engine holds half of the experts and is fed from the policy's own half. vLLM's CPU
kernel cannot compute with half of the experts, so nothing is sampled; weights are compared by checksum.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

import moe_model
import rollout


def sample(engine: rollout.RolloutEngine, policy, rank: int) -> dict:
    """Sample this rank's requests and compare the completions with the policy."""
    requests = [
        rollout.Request([5, 6, 7, 8, 9 + i + 10 * rank], 100 * rank + i, 1.0, 10) for i in range(4 + rank)
    ]
    seen = []
    completions = engine.generate(requests, 0, lambda index, _: seen.append(index))
    packed = moe_model.pack([r.prompt_ids for r in requests], [c.token_ids for c in completions], "cpu")
    with torch.no_grad():
        logprobs, _, layer_ids = policy(packed)
    engines = torch.tensor([x for c in completions for x in c.logprobs])
    routes = torch.cat([c.routed_experts for c in completions])
    own = moe_model.route_table(layer_ids, policy.config.num_experts)
    return {
        "seen": sorted(seen),
        "tokens": [c.token_ids for c in completions],
        "largest_dlogp": (logprobs - engines).abs().max().item(),
        "same_routes": torch.equal(routes.sort().values, own.sort().values),
    }


def main(folder: str, mode: str) -> None:
    moe_model.init_deepspeed()
    rank, whole_experts = dist.get_rank(), mode == "expert"
    config = moe_model.load_config(folder)
    group = moe_model.create_expert_parallel_group(2 if whole_experts else 1, config.num_experts)
    policy = moe_model.Policy(config, group)
    moe_model.load_hf(policy, folder)
    rollout.check_hardware = lambda settings: None  # it refuses expert_parallel on a CPU
    settings = rollout.RolloutSettings(
        max_num_seqs=16, dtype="float32", kv_cache_gib=0.1, tensor_parallel=2, expert_parallel=whole_experts
    )
    engine = rollout.RolloutEngine(folder, 64, settings)
    report = engine.sync(moe_model.hf_tensors(policy, whole_experts), 0)
    engine.check_weights(moe_model.hf_tensors(policy, whole_experts))
    result = {"rank": rank, "num_bytes": report.num_bytes}
    result |= {"parameter_bytes": sum(p.numel() * p.element_size() for p in policy.parameters())}
    if whole_experts:
        with torch.no_grad():
            policy.model.layers[1].mlp.experts.down_proj[0, 0, 0] += 1
        try:
            engine.check_weights(moe_model.hf_tensors(policy, True))
        except RuntimeError as error:
            result["error"] = str(error)
    else:
        result |= sample(engine, policy, rank)
    print(f"RESULT{json.dumps(result)}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
