"""Run suites of tests on the ranks of torchrun.

    torchrun --nproc-per-node=N tests/rank_worker.py FOLDER SUITE...

A suite reads the files that the tests wrote into FOLDER/SUITE. Every rank stores the suite's results there,
in results_RANK.pt; the tests compare these files (helpers.RankSuite).
"""

import math
import sys
import warnings
from dataclasses import astuple
from pathlib import Path

import torch

warnings.filterwarnings("ignore", category=FutureWarning)

import torch.distributed as dist
from helpers import batch_of_rows, hashed_answer, judge_batch, make_config, make_group, make_prompts, make_run
from model_suites import lora, model

import moe_model
import train_rl
from reward import Verdict
from rollout import Completion
from runtime.checks import refuse_nonfinite_rewards
from runtime.learning_rate import set_learning_rate
from runtime.metrics import batch_metrics, reduce_metrics
from runtime.schedule import exchange


def weights_of(policy: moe_model.Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in moe_model.hf_tensors(policy)}


def expert_groups(ep_sizes: set[int], num_experts: int) -> dict:
    return {size: moe_model.create_expert_parallel_group(size, num_experts) for size in sorted(ep_sizes)}


def start_engine(config: train_rl.Config, folder: Path, group, adam_eps: float | None = None):
    """Make DeepSpeed's engine around the policy of a folder."""
    policy = moe_model.build_policy(config.model, folder, group, torch.device("cpu"))
    engine = moe_model.deepspeed_engine(policy, config.train.model_copy(update={"learning_rate": 9.0}))
    set_learning_rate(engine, config.train.learning_rate)
    for parameter_group in engine.optimizer.param_groups if adam_eps else ():
        parameter_group["eps"] = adam_eps
    return engine


# ---- Updates: test_grpo.py, test_replay.py -----------------------------------------------------------------
def run_update(case: dict, completions: list[dict], folder: Path, group, losses: list) -> dict:
    """Run helpers.update_case() on this rank's rows.

    case["model"]: folder of the policy. case["ids"]: routes of the sampler: `given` with the completions,
    `own` (the policy's), or `none`. losses: list that updates() fills. Returns the parameters and metrics
    after update_policy(), the changed fields of the batch, and micro-batches as (rows, logprobs, ratio).
    """
    config = make_config(*case["settings"])
    engine = start_engine(config, folder / case["model"], group, case["adam_eps"])
    policy = engine.module
    rows = case["rows"][dist.get_rank()]
    batch = batch_of_rows(completions, rows, case["padding"], config.train.minibatches_per_step)
    if config.algorithm.kl_coef == 0:
        batch.ref_logprobs = None
    if case["ids"] == "own":
        live = make_config(*case["settings"], "algorithm.router_replay=off")
        batch.routed_experts = train_rl.forward_batch(policy, batch, live, keep_routes=True).routes
    elif case["ids"] == "given":
        batch.routed_experts = [completions[row]["routes"][case["model"]] for row in rows]
    if case["old"] == "computed":
        outputs = train_rl.forward_batch(policy, batch, config, keep_routes=True)
        batch.old_logprobs, batch.entropy, batch.old_routes, batch.route_mismatch, _ = outputs
    elif case["old"] == "none":
        batch.old_logprobs = None
    batch.is_off_policy = case["old"] == "given"  # by another policy than this one, read by updates()
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    copies = {name: value.clone() for name, value in tensors.items()}
    losses.clear()
    metrics = reduce_metrics(train_rl.update_policy(engine, batch, config))
    return {
        "metrics": metrics,
        "loss": reduce_metrics({"loss_total": (sum(loss for *_, loss in losses), 1)})["loss_total"],
        "old_logprobs": copies.get("old_logprobs"),
        "parameters": weights_of(policy),
        "written": [name for name, value in copies.items() if not torch.equal(value, getattr(batch, name))],
        "micro_batches": [part[:3] for part in losses],
    }


def updates(folder: Path) -> dict:
    """Run the cases of FOLDER/request.pt; return {name: run_update()}."""
    request = torch.load(folder / "request.pt")
    micro_batch_loss = train_rl.micro_batch_loss
    losses = []

    def recording(outputs, batch, rows, counts, log_vocab, config, has_moved):
        has_moved |= batch.is_off_policy
        loss, statistics = micro_batch_loss(outputs, batch, rows, counts, log_vocab, config, has_moved)
        losses.append((rows, outputs.logprobs.detach().clone(), statistics["ratio"].clone(), loss.item()))
        return loss, statistics

    groups = expert_groups({case["ep_size"] for case in request["cases"]}, num_experts=2)
    train_rl.micro_batch_loss = recording
    results = {
        case["name"]: run_update(case, request["completions"], folder, groups[case["ep_size"]], losses)
        for case in request["cases"]
    }
    train_rl.micro_batch_loss = micro_batch_loss
    return results


# ---- NaN and infinity: test_nonfinite.py -------------------------------------------------------------------
def finite_batch(completions: list[dict]) -> train_rl.RolloutBatch:
    """Make the batch of this rank's completions; prompts are named after the row."""
    rows = [i for i in range(len(completions)) if i % 2 == dist.get_rank()]
    prompts = make_prompts(len(completions))
    batch = batch_of_rows(completions, rows)
    batch.prompts = [prompts[i] for i in rows]
    judge_batch(batch, [Verdict(1.0, "ok")] * len(rows))
    batch.rewards = torch.ones(len(rows))
    batch.ref_logprobs = None
    return batch


def run_nonfinite(case: str, on_nonfinite: str, completions: list[dict], engine, folder: Path) -> dict:
    """Put NaN or infinity into a loss, a gradient or a reward of one rank, and update; then update normally.

    Returns the error, rewards, valid flags, the metrics, and the weights before, after, and after
    the next update.
    """
    config = make_config(
        "train.learning_rate=0.1", f"run.dir={folder / on_nonfinite}", f"run.on_nonfinite={on_nonfinite}"
    )
    policy = engine.module
    batch = finite_batch(completions)
    before = weights_of(policy)
    metrics = raised = None
    handles = []
    if case == "loss" and dist.get_rank() == 1:  # one token of one completion of one rank
        batch.advantages[2, 0] = math.nan
    if case == "gradient":
        handles = [p.register_hook(lambda grad: grad * math.inf) for p in list(policy.parameters())[:1]]
    if case == "reward" and dist.get_rank() == 1:
        batch.rewards[2] = math.inf
    try:
        if case == "reward":
            batch.rewards, batch.valid = refuse_nonfinite_rewards(
                batch.rewards, batch.valid, batch, config, step=4
            )
        else:
            metrics = reduce_metrics(train_rl.update_policy(engine, batch, config, step=4))
    except RuntimeError as error:
        raised = str(error)
    after = weights_of(policy)
    for handle in handles:
        handle.remove()
    train_rl.update_policy(engine, finite_batch(completions), config, step=5)
    return {
        "raised": raised, "valid": batch.valid.tolist(), "rewards": batch.rewards.tolist(),
        "metrics": metrics, "before": before, "after": after, "next": weights_of(policy),
    }  # fmt: skip


def averaged_gradients(folder: Path, group) -> dict:
    """Average two gradients that bfloat16 holds exactly over the ranks, with each precision and ZeRO stage.

    The loss is a product of the parameters with numbers of this rank. AdamW with a first decay rate of 0
    keeps the average as its first moment. Returns both gradients, and the moment of each case.
    """
    moments = {}
    for reduced, stage, offload in ((r, *z) for r in ("model", "float32") for z in ((1, 0), (2, 0), (2, 1))):
        config = make_config(
            "model.dtype=bfloat16", f"train.zero_stage={stage}", f"train.grad_reduce_dtype={reduced}",
            f"train.offload_optimizer={bool(offload)}", "train.betas=[0.0,0.9]", "train.max_grad_norm=1.0e+9",
        )  # fmt: skip
        engine = start_engine(config, folder / "model", group)
        drawn = torch.Generator().manual_seed(0)
        gradients = [
            [torch.randn(p.shape, generator=drawn).bfloat16() for p in engine.parameters()] for _ in range(2)
        ]
        products = [(p * g).sum() for p, g in zip(engine.parameters(), gradients[dist.get_rank()])]
        engine.backward(torch.stack(products).sum(), scale_wrt_gas=False)
        engine.step()
        states = moe_model.optimizer_shard(engine)["adamw"]["state"].values()
        moments[reduced, stage, bool(offload)] = torch.cat([s["exp_avg"].flatten() for s in states])
    return {"gradients": [torch.cat([g.flatten() for g in of_rank]) for of_rank in gradients]} | moments


def nonfinite(folder: Path) -> dict:
    """Run every case with both values of run.on_nonfinite, one after another on one engine."""
    completions = torch.load(folder / "request.pt")["completions"]
    num_experts = moe_model.num_experts_of(moe_model.load_config(folder / "model"))
    whole = moe_model.create_expert_parallel_group(1, num_experts)
    group = moe_model.create_expert_parallel_group(2, num_experts)
    engine = start_engine(
        make_config("train.learning_rate=0.1", "model.dtype=float32"), folder / "model", group
    )
    skips = {precision: after_bad_updates(completions, folder, group, precision) for precision in PRECISIONS}
    return {"skips": skips, "averages": averaged_gradients(folder, whole)} | {
        (case, on_nonfinite): run_nonfinite(case, on_nonfinite, completions, engine, folder)
        for case in ("loss", "gradient", "reward")
        for on_nonfinite in ("stop", "skip")
    }


BAD_FACTORS = {"infinite": math.inf, "not a number": math.nan, "norm beyond float32": 1e30}
PRECISIONS = [(d, *zero) for d in ("float32", "bfloat16") for zero in ((1, False), (2, False), (2, True))]


def after_bad_updates(completions: list[dict], folder: Path, group, precision: tuple) -> list[tuple]:
    """Take updates on two engines; one of them also gets a bad update before each one.

    Returns for each bad update whether it was skipped, and whether both engines are bitwise equal after the
    next update, weights and optimizer.
    """
    dtype, stage, offload = precision
    config = make_config(
        "train.learning_rate=0.01", f"model.dtype={dtype}", f"train.zero_stage={stage}",
        f"train.offload_optimizer={offload}", f"run.dir={folder / 'skips'}", "run.on_nonfinite=skip",
    )  # fmt: skip
    engines = [start_engine(config, folder / "model", group) for _ in range(2)]
    results = []
    for factor in (1.0, *BAD_FACTORS.values()):
        bad = finite_batch(completions)
        if factor == 1e30:
            bad.advantages *= factor
        elif dist.get_rank() == 1:  # one completion of one rank
            bad.advantages[2] *= factor
        metrics = [] if factor == 1.0 else [train_rl.update_policy(engines[0], bad, config, step=4)]
        metrics += [train_rl.update_policy(engine, finite_batch(completions), config) for engine in engines]
        states = [[*weights_of(e.module).values(), *moe_model.optimizer_shard(e)["masters"]] for e in engines]
        moments = [moe_model.optimizer_shard(e)["adamw"]["state"].values() for e in engines]
        states = [state + [m["exp_avg_sq"] for m in of_all] for state, of_all in zip(states, moments)]
        skipped = [m["nonfinite_updates_max"][0] for m in metrics]
        results.append((skipped, all(map(torch.equal, *states))))
    return results


# ---- Exchanges between ranks: test_schedule.py -------------------------------------------------------------
DTYPES = (torch.uint8, torch.int16, torch.float32)
PARCELS = ("objects", "tensors", "one way", "nothing", "stays", "completions")


def completion_with_routes(seed: int, tokens: int) -> Completion:
    generator = torch.Generator().manual_seed(seed)
    routes = torch.randint(0, 128, (tokens + 3, 2, 4), generator=generator, dtype=torch.uint8)
    return Completion(list(range(tokens)), [-0.25 * i for i in range(tokens)], "stop", 1.5, routes)


def parcels(case: str, rank: int) -> list[list]:
    """Return the lists that a rank sends to rank 0 and to rank 1."""
    match case:
        case "objects":
            sent = [{"from": rank}, ("a", None, 1.5), "text \udcff", Verdict(1.0, "ok")]
            return [[*sent, f"to {r}"] for r in range(2)]
        case "tensors":
            values = [torch.arange(rank, 300, dtype=torch.int64).to(dtype) for dtype in DTYPES]
            empty, strided = torch.zeros(0, 3), torch.arange(12.0).view(3, 4).t()
            return [[*values, empty, strided, [values[0]]]] * 2
        case "one way":
            return [[], [b"x" * 100_000]] if rank == 0 else [[], []]
        case "nothing":
            return [[], []]
        case "stays":
            return [[f"own {rank}"] if r == rank else [] for r in range(2)]
        case "completions":
            return [[completion_with_routes(10 * rank + i, i) for i in range(r + 2)] for r in (0, 2 - rank)]


def schedule(folder: Path) -> dict:
    """Call reduce_metrics() and, on two ranks, exchange() with different inputs."""
    rank = dist.get_rank()
    received = {}
    for case in PARCELS if dist.get_world_size() == 2 else ():
        sent = parcels(case, rank)
        received[case] = exchange(sent)
        assert all(one is other for one, other in zip(received[case], sent[rank])), "no copy"
    pairs = {"mean": (1.0 + rank, 1 + 2 * rank), "none": (0.0, 0), "tokens_total": (5.0 + rank, 1)}
    pairs |= {"length_max": (7.0 - 3 * rank, 1), "below_max": (-2.0 - rank, 1), "max_of_total": (3.0, 2)}
    return {
        "exchange": received,
        "reduced": reduce_metrics(pairs),
    }


# ---- Zero-variance elimination: test_zero_variance.py ------------------------------------------------------
def contents(groups: list[train_rl.Group]) -> list[tuple]:
    return [
        (
            g.slot,
            g.prompt_index,
            [c.token_ids for c in g.completions],
            [c.verdict.status for c in g.completions],
        )
        for g in groups
    ]


def sample_steps(case: dict, history=None, state=None) -> list[dict]:
    """Sample, record, drop and deal on this rank for some steps; return the results of each step."""
    config = make_config(*case["settings"])
    answer = hashed_answer(case["rates"], case["seed"], case["timeout_prob"])
    run = make_run(config, answer, len(case["rates"]))
    run.history = history or run.history
    run.state = state or run.state
    steps = []
    for _ in range(case["num_steps"]):
        groups, outcomes, account = train_rl.sample_step(run)
        train_rl.update_history(run, list(outcomes.values()))
        trained, trained_outcomes = train_rl.drop_and_deal(groups, outcomes, config)
        run.state.step += 1
        steps.append({
            "outcomes": [(slot, astuple(o)) for slot, o in outcomes.items()],
            "account": dict(account), "consumed": run.state.consumed_prompts,
            "trained_slots": sorted(trained_outcomes),
            "sampled": contents(groups), "trained": contents(trained),
            "record": {name: value.tolist() for name, value in vars(run.history).items()},
        })  # fmt: skip
    return steps


def run_update_of_groups(case: dict, model: Path, group) -> dict:
    """Return parameters before and after the last update of the case, and the reduced metrics.

    case["updates"]: for each update, for each rank, [(slot, verdicts, completion lengths)].
    """
    config = make_config(*case["settings"])
    engine = start_engine(config, model, group, adam_eps=1e-2)
    policy = engine.module
    for of_ranks in case["updates"]:
        before = weights_of(policy)
        groups = [make_group(s, s, lengths, rights) for s, rights, lengths in of_ranks[dist.get_rank()]]
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, [g.outcome(config.reward.binary) for g in groups])
        outcomes = {o.slot: o for o in sum(gathered, [])}
        if case["deal"]:
            groups, outcomes = train_rl.drop_and_deal(groups, outcomes, config)
        batch = train_rl.collate(groups, make_prompts(16), [[2, 3, i] for i in range(16)])
        batch.old_logprobs, batch.entropy, *_ = train_rl.forward_batch(policy, batch, config)
        batch.rewards = train_rl.compute_rewards(batch, None, [], config)
        batch.advantages = train_rl.token_advantages(batch, config)
        trained = batch_metrics(batch, groups, config)
        metrics = reduce_metrics(trained | train_rl.update_policy(engine, batch, config))
    return {"before": before, "after": weights_of(policy), "metrics": metrics, "num_groups": len(groups)}


def zero_variance(folder: Path) -> dict:
    """Update as FOLDER/request.pt says."""
    request = torch.load(folder / "request.pt")
    num_experts = moe_model.num_experts_of(moe_model.load_config(folder / "model"))
    group = moe_model.create_expert_parallel_group(1, num_experts)
    updates = {c["name"]: run_update_of_groups(c, folder / "model", group) for c in request["updates"]}
    return {"updates": updates}


SUITES = {
    "grpo": updates,
    "replay": updates,
    "nonfinite": nonfinite,
    "schedule": schedule,
    "zero_variance": zero_variance,
    "model": model,
    "lora": lora,
}


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    moe_model.init_deepspeed()
    for name in names:
        result = SUITES[name](folder / name)
        torch.save(result, folder / name / f"results_{dist.get_rank()}.pt")
    dist.barrier()  # a rank that leaves early would abort the communication of other ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
