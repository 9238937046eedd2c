"""Updates with router replay on the ranks of torchrun: `replay_worker.py FOLDER` runs those of
FOLDER/request.pt. Rank 0 writes FOLDER/results_N.pt for N ranks: {case name: what run_case() gave}."""

import sys
import warnings
from pathlib import Path

import torch

warnings.filterwarnings("ignore", category=FutureWarning)

import torch.distributed as dist
from grpo_worker import batch_of

import moe_model
import train_rl
from experiments.metrics import reduce_metrics
from experiments.settings import load_config


def record_losses() -> list[tuple]:
    """(rows, logprobs, ratio, loss) of every micro-batch from now on; the function itself is unchanged."""
    original, seen = train_rl.micro_batch_loss, []

    def recording(logprobs, entropy, batch, rows, *others):
        loss, statistics = original(logprobs, entropy, batch, rows, *others)
        seen.append((rows, logprobs.detach().clone(), statistics["ratio"].clone(), loss.item()))
        return loss, statistics

    train_rl.micro_batch_loss = recording
    return seen


def run_case(case: dict, completions: list[dict], folder: Path, group, seen: list) -> dict:
    """Parameters, metrics and micro-batches of update_policy(), and what the old-logprob pass gave before."""
    settings = ["data.train=[{path: unused}]", "model.dtype=float32", *case["settings"]]
    config = load_config(settings)
    policy = train_rl.build_policy(config, folder / case["model"], group, torch.device("cpu"))
    engine = moe_model.deepspeed_engine(policy, config.train)
    for parameter_group in engine.optimizer.param_groups:
        parameter_group["eps"] = case["adam_eps"]
    rows = case["rows"][dist.get_rank()]
    batch = batch_of(completions, rows, case["padding"], config.train.minibatches_per_step)
    batch.ref_logprobs = None
    if case["ids"] == "own":
        live = load_config([*settings, "algorithm.router_replay=off"])
        batch.routed_experts = train_rl.outputs_of_batch(policy, batch, live).routes
    elif case["ids"] == "given":
        batch.routed_experts = [completions[row]["routes"][case["model"]] for row in rows]
    if case["old"] == "computed":
        outputs = train_rl.outputs_of_batch(policy, batch, config)
        batch.old_logprobs, batch.entropy, batch.old_routes, batch.route_mismatch = outputs
    seen.clear()
    metrics = reduce_metrics(train_rl.update_policy(engine, batch, config))
    losses = reduce_metrics({"loss_total": (sum(loss for *_, loss in seen), 1)})
    return {
        "parameters": {name: tensor.clone() for name, tensor in moe_model.hf_tensors(policy)},
        "metrics": metrics | losses,
        "old_logprobs": batch.old_logprobs,
        "micro_batches": [part[:3] for part in seen],
    }


def main(folder: Path) -> None:
    request = torch.load(folder / "request.pt")
    moe_model.init_deepspeed()
    ep_sizes = sorted({case["ep_size"] for case in request["cases"]})
    groups = {ep_size: moe_model.create_expert_parallel_group(ep_size, 2) for ep_size in ep_sizes}
    seen = record_losses()
    results = {
        case["name"]: run_case(case, request["completions"], folder, groups[case["ep_size"]], seen)
        for case in request["cases"]
    }
    if dist.get_rank() == 0:
        torch.save(results, folder / f"results_{dist.get_world_size()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
