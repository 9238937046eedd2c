"""Zero-variance elimination with a fake engine and verifier, and updates on what it leaves.

The tests call sample_steps() in their own process; `zero_variance_worker.py FOLDER` runs FOLDER/request.pt on
the ranks of torchrun. Rank 0 writes FOLDER/results.pt: {"sampling": [{"cases": [sample_steps() of each case],
"wanted": every value of num_wanted()} of each rank], "updates": {name: run_update() of each case}}.
"""

import random
import sys
import warnings
from dataclasses import astuple
from pathlib import Path

import torch

warnings.filterwarnings("ignore", category=FutureWarning)

import torch.distributed as dist

import moe_model
import train_rl
from data.prompts import Prompt
from experiments.settings import load_config
from reward import Verdict
from rollout import Completion

SMALLEST_TRAINING_SET = "data.train=[{path: unused}]"


def verdict_of(right: bool | None, pass_frac: float | None = None) -> Verdict:
    """None: the verifier gave up."""
    if right is None:
        return Verdict(0.0, "timeout")
    share = float(right) if pass_frac is None else pass_frac
    return Verdict(1.0, "ok", pass_frac=1.0) if right else Verdict(0.0, "wrong", pass_frac=share)


def group_with(place: int, prompt: int, completions: list, verdicts: list | None = None) -> train_rl.Group:
    return train_rl.Group(place, prompt, completions=completions, verdicts=verdicts or [])


def prompts_of(num: int) -> list[Prompt]:
    return [Prompt(f"prompt {i}", "1", "exact", "set") for i in range(num)]


def completion_of(length: int) -> Completion:
    return Completion([1 + i % 7 for i in range(length)], [-1.0] * length, "stop", 0.0)


def fake_generate(state, answer):
    """A fake of engine and verifier: answer(prompt, step, place, sample) -> (right or None, length)."""

    def generate(work) -> None:
        for group, samples in work:
            for sample in samples:
                right, length = answer(group.prompt_index, state.step, group.place, sample)
                group.completions.append(completion_of(length))
                group.verdicts.append(verdict_of(right))

    return generate


def length_ahead(state, answer):
    """What fake_generate() will find, asked before."""

    def look_ahead(work) -> list[list[int]]:
        ask = lambda group, sample: answer(group.prompt_index, state.step, group.place, sample)[1]
        return [[ask(group, sample) for sample in samples] for group, samples in work]

    return look_ahead


def hashed_answer(rates: list[float], seed: int = 0, timeout_prob: float = 0.0):
    """Bernoulli verdicts at each prompt's pass rate, the same whichever rank asks, and in whatever order."""

    def answer(prompt: int, step: int, place: int, sample: int) -> tuple[bool | None, int]:
        draws = random.Random(f"{seed}/{prompt}/{step}/{place}/{sample}")
        timed_out, right, length = draws.random() < timeout_prob, draws.random(), draws.randint(1, 9)
        return None if timed_out else right < rates[prompt], length

    return answer


def no_history(num_prompts: int) -> train_rl.PromptHistory:
    return train_rl.PromptHistory.from_offline([None] * num_prompts, 8)


def contents(groups) -> list[tuple]:
    return [
        (g.place, g.prompt_index, [c.token_ids for c in g.completions], [v.status for v in g.verdicts])
        for g in groups
    ]


def sample_steps(case: dict, history=None, state=None) -> list[dict]:
    """Some steps of sampling, record, dropping and balancing on this rank; what came of each."""
    config = load_config([SMALLEST_TRAINING_SET, *case["settings"]])
    state = state or train_rl.TrainState()
    history = history or no_history(len(case["rates"]))
    answer = hashed_answer(case["rates"], case["seed"], case["timeout_prob"])
    prompts, steps = prompts_of(len(case["rates"])), []
    for _ in range(case["num_steps"]):
        generate, look_ahead = fake_generate(state, answer), length_ahead(state, answer)
        groups, outcomes, account = train_rl.sample_groups(
            generate, look_ahead, state, history, prompts, config
        )
        history.update(list(outcomes.values()), state.step, config.zero_variance.history_decay)
        balanced, left = train_rl.drop_and_balance(groups, outcomes, config)
        state.step += 1
        steps.append({
            "outcomes": [(place, astuple(o)) for place, o in outcomes.items()],
            "account": dict(account), "consumed": state.consumed_prompts,
            "left": sorted(left), "sampled": contents(groups), "trained": contents(balanced),
            "record": {name: value.tolist() for name, value in vars(history).items()},
        })  # fmt: skip
    return steps


def run_update(case: dict, model: Path, group) -> dict:
    """Parameters before and after the last of the case's updates, and that update's reduced metrics.

    case["updates"]: for each update, for each rank, [(place, verdicts, completion lengths)].
    """
    config = load_config([SMALLEST_TRAINING_SET, *case["settings"]])
    policy = moe_model.Policy(moe_model.load_config(model), group)
    moe_model.load_hf(policy, model)
    engine = moe_model.deepspeed_engine(policy, config.train)
    for parameter_group in engine.optimizer.param_groups:
        parameter_group["eps"] = 1e-2  # Adam's own would make steps out of rounding: see test_grpo.py
    prompts = prompts_of(16)
    for of_ranks in case["updates"]:
        before = {name: tensor.clone() for name, tensor in moe_model.hf_tensors(policy)}
        groups = [
            group_with(place, place, [*map(completion_of, lengths)], [*map(verdict_of, rights)])
            for place, rights, lengths in of_ranks[dist.get_rank()]
        ]
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [g.outcome(config.reward.dense) for g in groups])
        outcomes = {o.place: o for o in sum(everyone, [])}
        if case["balance"]:
            groups, outcomes = train_rl.drop_and_balance(groups, outcomes, config)
        batch = train_rl.collate(groups, prompts, [[2, 3, i] for i in range(16)])
        batch.rewards = train_rl.compute_rewards(batch, None, [], config)
        batch.old_logprobs, batch.entropy, *_ = train_rl.outputs_of_batch(policy, batch, config)
        batch.advantages = train_rl.token_advantages(batch, config)
        trained = train_rl.batch_metrics(batch, groups, config.rollout.group_size)
        metrics = train_rl.reduce_metrics(trained | train_rl.update_policy(engine, batch, config))
    num_groups = [None] * dist.get_world_size()
    dist.all_gather_object(num_groups, len(groups))
    after = {name: tensor.clone() for name, tensor in moe_model.hf_tensors(policy)}
    return {"before": before, "after": after, "metrics": metrics, "num_groups": num_groups}


def main(folder: Path) -> None:
    request = torch.load(folder / "request.pt")
    moe_model.init_deepspeed()
    num_experts = moe_model.num_experts_of(moe_model.load_config(folder / "model"))
    group = moe_model.create_expert_parallel_group(1, num_experts)
    wanted, num_wanted = [], train_rl.num_wanted
    train_rl.num_wanted = lambda *given: wanted.append(num_wanted(*given)) or wanted[-1]
    sampling = [sample_steps(case) for case in request["sampling"]]
    every_rank = [None] * dist.get_world_size()
    dist.all_gather_object(every_rank, {"cases": sampling, "wanted": wanted})
    updates = {case["name"]: run_update(case, folder / "model", group) for case in request["updates"]}
    if dist.get_rank() == 0:
        torch.save({"sampling": every_rank, "updates": updates}, folder / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
