"""Cases of update_policy() on the ranks of torchrun: `grpo_worker.py FOLDER` runs those of FOLDER/request.pt.

Each case starts from the weights of FOLDER/model. Rank 0 writes FOLDER/results_N.pt for N ranks: {"cases":
{name: parameters, reduced metrics, ...}, "helpers": [what collective_helpers() gave on each rank]}.
"""

import sys
import warnings
from pathlib import Path

import torch

warnings.filterwarnings("ignore", category=FutureWarning)

import torch.distributed as dist

import moe_model
import train_rl
from experiments.metrics import reduce_metrics
from experiments.settings import load_config
from reward import Verdict


def batch_of(
    completions: list[dict], rows: list[int], padding: int, num_minibatches: int = 1
) -> train_rl.RolloutBatch:
    """The completions of `rows` as a batch with `padding` columns more than it needs.

    Whole groups make a minibatch, the first groups the first.
    """
    chosen = [completions[row] for row in rows]
    longest = max(len(c["completion_ids"]) for c in chosen) + padding

    def padded(name: str) -> torch.Tensor:
        return torch.tensor([c[name] + [0.0] * (longest - len(c[name])) for c in chosen])  # [B, T]

    lengths = torch.tensor([len(c["completion_ids"]) for c in chosen])
    groups = list(dict.fromkeys(c["group"] for c in chosen))
    per_minibatch = -(-len(groups) // num_minibatches)
    return train_rl.RolloutBatch(
        prompts=[None] * len(chosen),
        prompt_ids=[c["prompt_ids"] for c in chosen],
        completion_ids=[c["completion_ids"] for c in chosen],
        finish_reason=["stop"] * len(chosen),
        verdicts=[Verdict(0.0, "wrong")] * len(chosen),
        response_mask=torch.arange(longest) < lengths.unsqueeze(1),
        rollout_logprobs=padded("rollout_logprobs"),
        group_index=torch.tensor([groups.index(c["group"]) for c in chosen]),
        policy_lag=torch.zeros(len(chosen), longest, dtype=torch.int64),
        minibatch=torch.tensor([groups.index(c["group"]) // per_minibatch for c in chosen]),
        valid=torch.ones(len(chosen), dtype=torch.bool),
        advantages=padded("advantages"),
        old_logprobs=padded("old_logprobs"),
        ref_logprobs=padded("ref_logprobs"),
    )


def run_case(case: dict, completions: list[dict], model: Path, group) -> dict:
    """Parameters and metrics after update_policy() on this rank's rows, and what it wrote into the batch."""
    config = load_config(["data.train=[{path: unused}]", *case["settings"]])
    policy = moe_model.Policy(moe_model.load_config(model), group)
    moe_model.load_hf(policy, model)
    engine = moe_model.deepspeed_engine(policy, config.train)
    for parameter_group in engine.optimizer.param_groups:
        parameter_group["eps"] = case["adam_eps"]
    batch = batch_of(
        completions, case["rows"][dist.get_rank()], case["padding"], config.train.minibatches_per_step
    )
    if case["old"] == "computed":
        batch.old_logprobs, batch.entropy, *_ = train_rl.outputs_of_batch(policy, batch, config)
    elif case["old"] == "none":
        batch.old_logprobs = None
    if config.algorithm.kl_coef == 0:
        batch.ref_logprobs = None
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    before = {name: value.clone() for name, value in tensors.items()}
    metrics = reduce_metrics(train_rl.update_policy(engine, batch, config))
    return {
        "metrics": metrics,
        "old_logprobs": before.get("old_logprobs"),
        "parameters": {name: tensor.clone() for name, tensor in moe_model.hf_tensors(policy)},
        "written": [name for name, value in before.items() if not torch.equal(value, getattr(batch, name))],
    }


def collective_helpers(completions: list[dict]) -> dict:
    """What reduce_metrics() and micro_batches_of() return where ranks differ."""
    rank = dist.get_rank()
    pairs = {"mean": (1.0 + rank, 1 + 2 * rank), "none": (0.0, 0), "tokens_total": (5.0 + rank, 1)}
    pairs |= {"length_max": (7.0 - 3 * rank, 1), "below_max": (-2.0 - rank, 1), "max_of_total": (3.0, 2)}
    rows = list(range(1 + 2 * rank))
    micro_batches = {}
    for balance in ("true", "false"):
        alone = ["train.micro_batch_tokens=1", f"train.balance={balance}", "data.train=[{path: unused}]"]
        settings = load_config(alone).train
        batch = batch_of(completions, rows, 0)
        micro_batches[balance] = train_rl.micro_batches_of(batch, rows, settings)
    return {"reduced": reduce_metrics(pairs), "micro_batches": micro_batches}


def main(folder: Path) -> None:
    request = torch.load(folder / "request.pt")
    moe_model.init_deepspeed()
    num_experts = moe_model.num_experts_of(moe_model.load_config(folder / "model"))
    groups = {
        ep_size: moe_model.create_expert_parallel_group(ep_size, num_experts)
        for ep_size in sorted({case["ep_size"] for case in request["cases"]})
    }
    results = {
        case["name"]: run_case(case, request["completions"], folder / "model", groups[case["ep_size"]])
        for case in request["cases"]
    }
    every_rank = [None] * dist.get_world_size()
    dist.all_gather_object(every_rank, collective_helpers(request["completions"]))
    if dist.get_rank() == 0:
        torch.save({"cases": results, "helpers": every_rank}, folder / f"results_{dist.get_world_size()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
