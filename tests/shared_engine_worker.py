"""Share one engine between two ranks: `shared_engine_worker.py FOLDER MODE` prints one JSON line per rank.

MODE tensor: the engine splits every matrix; rank 0 samples 4 requests, rank 1 samples 5.
MODE expert: the engine of each rank holds half of the experts and takes them from the policy of the same
rank, then once more from gathered tensors. vLLM's CPU kernel cannot compute with half of the experts, so
this mode compares weights by checksum and samples nothing.
"""

import dataclasses
import json
import os
import sys

import torch
import torch.distributed as dist
from engines import assert_samples_are_the_trainers, logprob_distance, token_ids, trained

import moe_model
import rollout
from batch import Turn


def sample(engine: rollout.RolloutEngine, policy, rank: int) -> dict:
    """Sample this rank's requests and compare the completions with the policy."""
    prompts = [[5, 6, 7, 8, 9 + i + 10 * rank] for i in range(4 + rank)]
    requests = [rollout.Request(prompt, 100 * rank + i, 1.0, 10) for i, prompt in enumerate(prompts)]
    reported = []
    completions = engine.generate(requests, 0, lambda index, _: reported.append(index))
    assert_samples_are_the_trainers(policy, requests, completions)
    return {"reported": sorted(reported), "tokens": token_ids(completions)}


class TwoTurns:
    """Insert two tokens after the first turn; the answer comes after rank + 1 calls of poll()."""

    def __init__(self, requests: list[rollout.Request], rank: int):
        self.requests = requests
        self.rank = rank
        self.turns = [[] for _ in requests]
        self.delays = []  # [row, calls of poll() left]

    def end_turn(self, row: int, turn, routes) -> None:
        self.turns[row].append(turn)
        self.delays.append([row, self.rank + 1])

    def poll(self, wait_s: float) -> list:
        for delay in self.delays:
            delay[1] -= 1
        rows = [row for row, left in self.delays if left == 0]
        self.delays = [delay for delay in self.delays if delay[1] > 0]
        return [(row, self.event(row)) for row in rows]

    def event(self, row: int):
        request = self.requests[row]
        first, *others = self.turns[row]
        if not others:
            ids = [*request.prompt_ids, *first.token_ids, 7, 8]
            return dataclasses.replace(request, prompt_ids=ids, seed=request.seed + 1000)
        ids = [*first.token_ids, 7, 8, *others[0].token_ids]
        logprobs = [*first.logprobs, 0.0, 0.0, *others[0].logprobs]
        turns = [Turn("assistant", len(first.token_ids)), Turn("tool", 2)]
        turns.append(Turn("assistant", len(others[0].token_ids)))
        return dataclasses.replace(others[0], token_ids=ids, logprobs=logprobs, turns=tuple(turns))

    def routes_of(self, row: int) -> None:
        return None


def converse(engine: rollout.RolloutEngine, policy, rank: int) -> dict:
    """Sample episodes of two turns on both ranks, with tools that take different times."""
    requests = [
        rollout.Request([5, 6, 7, 8, 9 + i + 10 * rank], 50 * rank + i, 1.0, 8) for i in range(3 + rank)
    ]
    episodes = TwoTurns(requests, rank)
    completions = engine.generate(requests, 0, capture_routes=False, episodes=episodes)
    logprobs, _ = trained(policy, requests, completions)
    is_sampled = torch.tensor([own for c in completions for own in c.sampled_mask])
    assert logprob_distance(logprobs, completions)[is_sampled].max() < 1e-4
    return {"turns": [len(completion.turns) for completion in completions]}


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
        engine.sync(moe_model.hf_tensors(policy), 1)  # all experts, as with another size of model.ep_size
        engine.check_weights(moe_model.hf_tensors(policy))
        with torch.no_grad():
            policy.model.layers[1].mlp.experts.down_proj[0, 0, 0] += 1
        try:
            engine.check_weights(moe_model.hf_tensors(policy, True))
        except RuntimeError as error:
            result["error"] = str(error)
    else:
        result |= sample(engine, policy, dist.get_rank())
        result |= converse(engine, policy, dist.get_rank())
    print(f"RESULT{json.dumps(result)}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
