"""Updates and rewards that are not finite, on two ranks: `nonfinite_worker.py FOLDER`.

Every case with both values of run.on_nonfinite, one after another on one engine, and after each an update
that is finite. Rank 0 writes FOLDER/results.pt: {(case, on_nonfinite): what was raised on each rank, the
weights before, after, and after the next update, the metrics}.
"""

import math
import sys
import warnings
from pathlib import Path

import torch

warnings.filterwarnings("ignore", category=FutureWarning)

import torch.distributed as dist
from grpo_worker import batch_of

import moe_model
import train_rl
from data.prompts import Prompt
from experiments.settings import load_config
from reward import Verdict


def make_batch(completions: list[dict]) -> train_rl.RolloutBatch:
    """The completions of this rank; prompts are named after rank and row."""
    rank = dist.get_rank()
    rows = [i for i in range(len(completions)) if i % 2 == rank]
    batch = batch_of(completions, rows, padding=0)
    batch.prompts = [Prompt(f"prompt {i}", "1", "exact", "set") for i in rows]
    batch.verdicts = [Verdict(1.0, "ok")] * len(rows)
    batch.rewards = torch.ones(len(rows))
    batch.ref_logprobs = None
    return batch


def run_case(case: str, on_nonfinite: str, completions: list[dict], engine, folder: Path) -> dict:
    config = load_config([
        "data.train=[{path: unused}]", "train.learning_rate=0.1", f"run.dir={folder / on_nonfinite}",
        f"run.on_nonfinite={on_nonfinite}",
    ])  # fmt: skip
    policy, batch = engine.module, make_batch(completions)
    weights = lambda: {name: tensor.clone() for name, tensor in moe_model.hf_tensors(policy)}  # noqa: E731
    before, metrics, raised, handles = weights(), None, None, []
    if case == "loss" and dist.get_rank() == 1:  # one token of one completion of one rank
        batch.advantages[2, 0] = math.nan
    if case == "gradient":
        handles = [p.register_hook(lambda grad: grad * math.inf) for p in list(policy.parameters())[:1]]
    if case == "reward" and dist.get_rank() == 1:
        batch.rewards[2] = math.inf
    try:
        if case == "reward":
            train_rl.drop_nonfinite_rewards(batch, config, step=4)
        else:
            metrics = train_rl.reduce_metrics(train_rl.update_policy(engine, batch, config, step=4))
    except RuntimeError as error:
        raised = str(error)
    after = weights()
    for handle in handles:
        handle.remove()
    train_rl.update_policy(engine, make_batch(completions), config, step=5)
    every_rank = [None] * dist.get_world_size()
    dist.all_gather_object(every_rank, (raised, batch.valid.tolist(), batch.rewards.tolist()))
    return {"ranks": every_rank, "before": before, "after": after, "metrics": metrics, "next": weights()}


def main(folder: Path) -> None:
    request = torch.load(folder / "request.pt")
    moe_model.init_deepspeed()
    config = load_config(["data.train=[{path: unused}]", "train.learning_rate=0.1"])
    hf_config = moe_model.load_config(folder / "model")
    group = moe_model.create_expert_parallel_group(2, moe_model.num_experts_of(hf_config))
    policy = moe_model.Policy(hf_config, group)
    moe_model.load_hf(policy, folder / "model")
    engine = moe_model.deepspeed_engine(policy, config.train)
    results = {
        (case, on_nonfinite): run_case(case, on_nonfinite, request["completions"], engine, folder)
        for case in ("loss", "gradient", "reward")
        for on_nonfinite in ("stop", "skip")
    }
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
