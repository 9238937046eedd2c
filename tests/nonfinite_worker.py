"""Updates and rewards that are not finite, on two ranks: `nonfinite_worker.py FOLDER CASE ON_NONFINITE`.

Rank 0 writes FOLDER/result.pt: what was raised on each rank, the weights before and after, the metrics, and
the weights after one more update that is finite.
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


def main(folder: Path, case: str, on_nonfinite: str) -> None:
    request = torch.load(folder / "request.pt")
    moe_model.init_deepspeed()
    config = train_rl.load_config([
        "data.train=[{path: unused}]", "train.learning_rate=0.1", f"run.dir={folder / 'run'}",
        f"run.on_nonfinite={on_nonfinite}",
    ])  # fmt: skip
    hf_config = moe_model.load_config(folder / "model")
    group = moe_model.create_expert_parallel_group(2, moe_model.num_experts_of(hf_config))
    policy = moe_model.Policy(hf_config, group)
    moe_model.load_hf(policy, folder / "model")
    engine = moe_model.deepspeed_engine(policy, config.train)
    batch = make_batch(request["completions"])
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
    train_rl.update_policy(engine, make_batch(request["completions"]), config, step=5)
    every_rank = [None] * dist.get_world_size()
    dist.all_gather_object(every_rank, (raised, batch.valid.tolist(), batch.rewards.tolist()))
    finished = weights()
    if dist.get_rank() == 0:
        result = {"ranks": every_rank, "before": before, "after": after, "metrics": metrics, "next": finished}
        torch.save(result, folder / "result.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
