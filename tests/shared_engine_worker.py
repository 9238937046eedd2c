"""Share one engine between two ranks: `shared_engine_worker.py FOLDER MODE` prints one JSON line per rank.

MODE tensor: the engine splits every matrix; rank 0 samples 4 requests, rank 1 samples 5.
MODE expert: the engine of each rank holds half of the experts and takes them from the policy of the same
rank. vLLM's CPU kernel cannot compute with half of the experts, so this mode compares weights by checksum and
samples nothing.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from engines import assert_samples_are_the_trainers, token_ids

import moe_model
import rollout


def sample(engine: rollout.RolloutEngine, policy, rank: int) -> dict:
    """Sample this rank's requests and compare the completions with the policy."""
    prompts = [[5, 6, 7, 8, 9 + i + 10 * rank] for i in range(4 + rank)]
    requests = [rollout.Request(prompt, 100 * rank + i, 1.0, 10) for i, prompt in enumerate(prompts)]
    reported = []
    completions = engine.generate(requests, 0, lambda index, _: reported.append(index))
    assert_samples_are_the_trainers(policy, requests, completions)
    return {"reported": sorted(reported), "tokens": token_ids(completions)}


def main(folder: str, mode: str) -> None:
    moe_model.init_deepspeed()
    whole_experts = mode == "expert"
    group = moe_model.create_expert_parallel_group(2 if whole_experts else 1, 8)
    policy = moe_model.Policy(moe_model.load_config(folder), group)
    moe_model.load_hf(policy, folder)
    rollout.check_hardware = lambda settings: None  # because expert_parallel is refused on a CPU
    settings = rollout.RolloutSettings(
        max_num_seqs=16, dtype="float32", kv_cache_gib=0.1, tensor_parallel=2, expert_parallel=whole_experts
    )
    engine = rollout.RolloutEngine(folder, 64, settings)
    report = engine.sync(moe_model.hf_tensors(policy, whole_experts), 0)
    engine.check_weights(moe_model.hf_tensors(policy, whole_experts))
    result = {"rank": dist.get_rank(), "num_bytes": report.num_bytes}
    result["parameter_bytes"] = sum(p.numel() * p.element_size() for p in policy.parameters())
    if whole_experts:
        with torch.no_grad():
            policy.model.layers[1].mlp.experts.down_proj[0, 0, 0] += 1
        try:
            engine.check_weights(moe_model.hf_tensors(policy, True))
        except RuntimeError as error:
            result["error"] = str(error)
    else:
        result |= sample(engine, policy, dist.get_rank())
    print(f"RESULT{json.dumps(result)}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
