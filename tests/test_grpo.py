"""Advantages of groups, order of prompts and batches; the update against plain torch, however it is split."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import reference
import torch
from conftest import assert_close, save_small_moe
from helpers import (
    EVERYTHING,
    GROUPS,
    HALVES,
    INTERLEAVED,
    LEARNING_RATE,
    SHARES,
    SHUFFLED,
    SMOOTH_EPS,
    TEMPERATURE,
    WORK,
    RankSuite,
    judged,
    make_batch,
    make_config,
    make_prompts,
    make_ragged_completions,
    parameter_distance,
    share_prompt_routes,
    update_case,
)
from transformers import Qwen3MoeForCausalLM

import moe_model
import train_rl
from batch import Completion, Group, collate
from data.stream import prompts_of_step, seed_of
from reward import Verdict
from runtime.learning_rate import set_learning_rate
from settings import AlgorithmSettings

# ---- advantages --------------------------------------------------------------------------------------------


def advantages_of(rewards, valid=None, group_index=None) -> torch.Tensor:
    """Call compute_advantages() on lists, by default one group, all valid; the inputs must stay unchanged."""
    rewards = torch.as_tensor(rewards)
    inputs = (
        rewards,
        torch.tensor(valid or [True] * len(rewards)),
        torch.tensor(group_index or [0] * len(rewards)),
    )
    copies = [tensor.clone() for tensor in inputs]
    advantages = train_rl.compute_advantages(*inputs)
    for tensor, copy in zip(inputs, copies):
        assert tensor._version == 0 and torch.equal(tensor.nan_to_num(), copy.nan_to_num())
    assert advantages.shape == rewards.shape and advantages.dtype == rewards.dtype
    return advantages


def test_advantages_of_random_groups_in_any_order(float64):
    for seed in range(30):
        rng = random.Random(seed)
        groups = [
            [
                (rng.choice([0.0, 1.0, rng.uniform(-1, 1)]), rng.random() < 0.8)
                for _ in range(rng.randint(1, 9))
            ]
            for _ in range(rng.randint(1, 5))
        ]
        expected = [reference.group_advantages(*zip(*group)) for group in groups]
        rows = [(g, i) for g, group in enumerate(groups) for i in range(len(group))]
        rng.shuffle(rows)  # members of a group need not be neighbours
        rewards = [groups[g][i][0] for g, i in rows]
        valid = [groups[g][i][1] for g, i in rows]
        assert_close(advantages_of(rewards, valid, [g for g, _ in rows]), [expected[g][i] for g, i in rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.3, 1 / 3, 0.7])
def test_equal_rewards_give_exactly_zero(reward, dtype):
    """The rounding of a mean must not become an advantage: 6e-8 / eps is 0.06."""
    for size in range(2, 17):
        assert not advantages_of(torch.full((size,), reward, dtype=dtype)).any()


# ---- prompts, rows, batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prompts, per_step", [(12, 4), (10, 4), (7, 3), (5, 12), (1, 3), (6, 6), (9, 1)])
def test_consecutive_steps_tile_shuffled_epochs(num_prompts, per_step):
    stream = []
    for step in range(3 * num_prompts):
        stream += prompts_of_step(num_prompts, per_step, step * per_step, seed=3)
        assert len(stream) == (step + 1) * per_step
    epochs = [stream[i : i + num_prompts] for i in range(0, len(stream) - num_prompts + 1, num_prompts)]
    assert all(sorted(epoch) == list(range(num_prompts)) for epoch in epochs)
    assert num_prompts < 5 or len({tuple(epoch) for epoch in epochs}) > len(epochs) // 2
    assert num_prompts < 5 or epochs[0] != sorted(epochs[0])


def test_prompts_depend_on_the_number_consumed_and_the_seed_only():
    stream = prompts_of_step(11, 60, 0, seed=0)
    for consumed, per_step in itertools.product((0, 1, 10, 11, 12, 37), (1, 5, 23)):
        torch.manual_seed(consumed)
        expected = stream[consumed : consumed + per_step]
        assert prompts_of_step(11, per_step, consumed, seed=0) == expected
    assert prompts_of_step(11, 11, 0, seed=1) != stream[:11]


def test_seeds_are_63_bits_distinct_and_the_same_in_every_process():
    parts = list(itertools.product(range(4), range(25), range(50), range(8)))  # as (seed, step, prompt, n)
    parts += [(seed, "epoch", epoch) for seed in range(4) for epoch in range(500)]
    parts += [(0, "eval", name, i, n) for name in ("a", "b") for i in range(500) for n in range(9)]
    parts += [(1, 23), (12, 3), (123,), (1, 2, 3)]
    seeds = {seed_of(*p) for p in parts}
    assert len(seeds) == len(parts)
    either = 0
    every = 2**64 - 1
    for seed in seeds:
        either |= seed
        every &= seed
    assert either == 2**63 - 1 and every == 0  # each of 63 bits varies, the sign bit is never set
    assert seed_of(0, "epoch", 0) == 5326116194759978245  # another value would be another order of prompts


def test_collate_shapes_and_values():
    prompts = make_prompts(3)
    ids = [[5, 6], [5, 7], [8], [9, 9, 9], [4]]
    reasons = ["stop", "stop", "stop", "length", "stop"]
    statuses = ["ok", "wrong", "timeout", "error", "no_answer"]
    completions = [
        Completion(ids[i], [-0.5 - i - t for t in range(len(ids[i]))], reasons[i], float(i)) for i in range(5)
    ]
    verdicts = [Verdict(float(status == "ok"), status) for status in statuses]
    groups = [
        Group(4, 2, judged(completions[:2], verdicts[:2])),  # slot 4 of the step, prompt 2 of the set
        Group(9, 1, judged(completions[2:], verdicts[2:]), minibatch=1),
    ]
    batch = collate(groups, prompts, [[7], [2, 3], [1]])
    assert batch.prompts == [prompts[2]] * 2 + [prompts[1]] * 3
    assert batch.prompt_ids == [[1], [1], [2, 3], [2, 3], [2, 3]] and batch.completion_ids == ids
    assert batch.finish_reason == reasons and batch.verdicts == verdicts
    assert batch.group_index.tolist() == batch.minibatch.tolist() == [0, 0, 1, 1, 1]
    assert batch.group_index.dtype == batch.minibatch.dtype == torch.int64
    assert batch.valid.tolist() == [True, True, False, False, True] and batch.valid.dtype == torch.bool
    assert batch.scores.tolist() == [1, 0, 0, 0, 0] and not batch.is_tied.any()
    assert batch.response_mask.dtype == torch.bool
    assert batch.response_mask.tolist() == [[t < len(row) for t in range(3)] for row in ids]
    rows = [[-0.5, -1.5, 0.0], [-1.5, -2.5, 0.0], [-2.5, 0.0, 0.0], [-3.5, -4.5, -5.5], [-4.5, 0.0, 0.0]]
    assert_close(batch.rollout_logprobs, torch.tensor(rows))
    assert [batch.old_logprobs, batch.entropy, batch.ref_logprobs] == [None] * 3
    assert not hasattr(batch, "rewards") and not hasattr(batch, "advantages")
    tied = Group(0, 0, judged(completions[:3], [verdicts[0], verdicts[0], verdicts[2]]))
    assert collate([tied], prompts, [[7]]).is_tied.tolist() == [True, True, False], "a timeout is no tie"


def test_a_rank_without_groups_has_a_batch_without_rows():
    batch = collate([], [], [])
    assert batch.response_mask.shape == batch.rollout_logprobs.shape == (0, 1)
    assert batch.group_index.shape == batch.minibatch.shape == (0,)
    assert batch.valid.shape == batch.scores.shape == batch.is_tied.shape == (0,)


@pytest.mark.parametrize(
    "settings, is_needed",
    [
        ({}, False),
        ({"train__minibatches_per_step": 2, "algorithm__old_policy": "rollout"}, False),
        ({"train__minibatches_per_step": 2}, True),
        ({"train__passes_per_rollout": 2}, True),
        ({"zero_variance__rl_zvp": True}, True),
        ({"zero_variance__rl_zvp": True, "algorithm__old_policy": "rollout"}, True),
        ({"algorithm__select": "experiments/plugins/top_entropy.py:top_entropy"}, True),
    ],
    ids=str,
)
def test_an_old_logprob_pass_runs_if_the_update_needs_one(settings, is_needed):
    """The pass serves the ratio of later updates, and entropies for advantages (RL-ZVP) or a selection of
    tokens."""
    assert train_rl.needs_old_pass(make_config(**settings)) == is_needed


@pytest.mark.parametrize(
    "setting, expected",
    [
        ("train.num_steps=1", [True, False, True]),  # without effect
        ("algorithm.kl_coef=0.1", [True] * 3),
        ("train.skip_zero_gradient=false", [True] * 3),
    ],
)
def test_rows_that_an_update_computes(setting, expected):
    batch = make_batch([[1, 2], [3], [4, 5]])
    batch.advantages = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, -1.0]])
    assert train_rl.rows_with_gradient(batch, make_config(setting)).tolist() == expected


# ---- the update: its counts, without a model ---------------------------------------------------------------
class RecordingTrainer:
    """Stands in for DeepSpeed's engine around a model without experts."""

    device = torch.device("cpu")
    module = torch.nn.Linear(1, 1)
    optimizer = SimpleNamespace(overflow=False)

    def __init__(self):
        self.losses = []

    def backward(self, loss, scale_wrt_gas: bool) -> None:
        self.losses.append(float(loss))

    def step(self) -> None:
        self.losses.append("step")

    def get_global_grad_norm(self) -> float:
        return 1.0


def test_an_update_counts_its_own_completions_and_tokens_over_all_ranks(ranks, monkeypatch):
    """Two minibatches on two ranks. DeepSpeed takes the mean over ranks, so a loss is multiplied by two."""
    lengths = [[3, 1, 4, 2], [5, 6, 1, 1]]  # of each rank's four completions, two in each minibatch
    calls = [[], []]

    def loss_of_rows(trainer, batch, rows, counts, config, work):
        calls[train_rl.dist.get_rank()].append((rows, counts.tolist(), work.num_updates))
        return torch.tensor(0.5)

    def update(rank: int) -> list:
        batch = make_batch([[1] * length for length in lengths[rank]], group_index=[0, 0, 1, 1])
        batch.minibatch = batch.group_index.clone()
        batch.advantages = 1.0 * batch.response_mask
        trainer = RecordingTrainer()
        train_rl.update_policy(trainer, batch, make_config("train.minibatches_per_step=2"))
        return trainer.losses

    monkeypatch.setattr(train_rl, "loss_of_rows", loss_of_rows)
    assert ranks(2).run(update) == [[1.0, "step", 1.0, "step"]] * 2
    for rank in range(2):
        expected = [([0, 1], [4, 3 + 1 + 5 + 6], 0), ([2, 3], [4, 4 + 2 + 1 + 1], 1)]
        assert [(sorted(rows), *rest) for rows, *rest in calls[rank]] == expected


@pytest.fixture
def small_policy(tmp_path, one_rank):
    """Build the MoE of 24 tokens; return the policy, its settings and a batch of two completions."""
    save_small_moe(tmp_path)
    config = make_config(
        "model.dtype=float32", "algorithm.clip_mode=entropy_adaptive", "algorithm.entropy_clip_coef=0.3"
    )
    batch = make_batch([[3, 4, 5], [6]])
    batch.advantages = 1.0 * batch.response_mask
    return moe_model.build_policy(config.model, tmp_path, None, torch.device("cpu")), config, batch


def statistics_of(policy, config, batch, num_updates: int = 0) -> dict[str, torch.Tensor]:
    """Return the statistics [tokens] of an update on both rows, after some updates of the same step."""
    work = train_rl.UpdateWork(num_updates=num_updates)
    train_rl.loss_of_rows(policy, batch, [0, 1], torch.tensor([2, 4]), config, work)
    ((_, statistics),) = work.statistics
    return {name: values[batch.response_mask] for name, values in statistics.items()}


def test_the_width_of_a_clip_is_over_the_logarithm_of_the_vocabulary(small_policy):
    """ESPO, eq. 8, with a group per token: eps = alpha e / log|V|. The vocabulary has 24 tokens."""
    statistics = statistics_of(*small_policy)
    assert_close(statistics["clip_eps"], 0.3 * statistics["entropy"] / math.log(24), rtol=1e-5)


def test_the_ratio_of_a_step_is_one_until_its_first_update(small_policy):
    """Whatever an old-logprob pass has recorded; here, log-probabilities of -9."""
    policy, config, batch = small_policy
    batch.old_logprobs = torch.full(batch.response_mask.shape, -9.0)
    batch.entropy = torch.ones(batch.response_mask.shape)
    assert (statistics_of(policy, config, batch)["ratio"] == 1).all()
    assert (statistics_of(policy, config, batch, num_updates=1)["ratio"] > 10).all()


def test_a_rank_without_rows_takes_part_with_a_gradient_of_zero(small_policy):
    policy, config, batch = small_policy
    outputs = train_rl.forward_rows(policy, batch, [], config)
    outputs.logprobs.sum().backward()
    assert outputs.logprobs.tolist() == [[0.0] * 3]
    assert not any(parameter.grad.any() for parameter in policy.parameters())


def test_rewards_stay_float32_beside_a_bfloat16_policy(tmp_path):
    """In bfloat16 0.998 is 1, and the second completion would have no advantage."""
    save_small_moe(tmp_path)
    config = make_config("model.dtype=bfloat16")
    try:
        moe_model.build_policy(config.model, tmp_path, None, torch.device("cpu"))
        batch = make_batch([[1], [2], [3]])
        batch.scores = torch.tensor([1.0, 0.998, 1.0], dtype=torch.float64)
        rewards = train_rl.compute_rewards(batch, None, [], config)
    finally:
        torch.set_default_dtype(torch.float32)
    assert rewards.dtype == torch.float32
    assert_close(rewards.double(), batch.scores, rtol=1e-7)


def test_every_group_of_parameters_learns_at_the_rate_of_the_step():
    """DeepSpeed holds experts in parameter groups of their own."""
    groups = [{"params": [torch.zeros(1)], "lr": 1.0} for _ in range(3)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_learning_rate(SimpleNamespace(optimizer=optimizer), 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25] * 3


# ---- the update: cases -------------------------------------------------------------------------------------
TOLERANCE = 1e-6  # a few roundings of parameters of size 1 in float32
ALL_ROWS = {"skip_zero_gradient": "false"}  # so that metrics are over all tokens
OFF_POLICY = ALL_ROWS | {
    "old": "given", "algorithm__kl_coef": 0.1, "weight_decay": 0.1, "max_grad_norm": 0.05,
}  # fmt: skip
ESPO = {  # the clip is wide enough for some tokens of this policy
    "ratio_level": "entropy_group", "ratio_form": "stop_gradient", "clip_mode": "entropy_adaptive",
    "entropy_clip_coef": 1.0, "loss_agg": "token_group_mean", "rollout_correction": "token_tis",
}  # fmt: skip
DAPO = {
    "clip_eps_low": 0.1, "clip_eps_high": 0.9, "loss_agg": "token_mean", "rollout_correction": "sequence_tis",
    "rollout_correction_cap": 30.0,
}  # fmt: skip
ESPO_UPDATE = OFF_POLICY | {f"algorithm__{name}": value for name, value in ESPO.items()}
DAPO_UPDATE = OFF_POLICY | {f"algorithm__{name}": value for name, value in DAPO.items()}
TWO_UPDATES = ALL_ROWS | {"old": "computed", "minibatches_per_step": 2, "betas": "[0.8, 0.9]"}
BYPASS = ALL_ROWS | {"algorithm__old_policy": "rollout", "minibatches_per_step": 2}
ONE_RANK = [
    update_case("whole", EVERYTHING, **ALL_ROWS),
    update_case("small micro-batches", EVERYTHING, micro_batch_tokens=20, **ALL_ROWS),
    update_case("single rows", EVERYTHING, micro_batch_tokens=1, **ALL_ROWS),
    update_case("padded", EVERYTHING, padding=5, **ALL_ROWS),
    update_case("shuffled", SHUFFLED, micro_batch_tokens=40, **ALL_ROWS),
    update_case("computed old", EVERYTHING, old="computed", **ALL_ROWS),
    update_case("off-policy", EVERYTHING, **OFF_POLICY),
    update_case("off-policy small", EVERYTHING, micro_batch_tokens=20, padding=2, **OFF_POLICY),
    update_case("two updates", EVERYTHING, **TWO_UPDATES),
    update_case("two passes of two", EVERYTHING, passes_per_rollout=2, **TWO_UPDATES),
    update_case("bypass", EVERYTHING, **BYPASS),
    update_case("espo", EVERYTHING, padding=3, **ESPO_UPDATE),
    update_case("dapo small", SHUFFLED, micro_batch_tokens=20, **DAPO_UPDATE),
]
TWO_RANKS = [
    update_case("halves", *HALVES, **ALL_ROWS),
    update_case("shares", *SHARES, micro_batch_tokens=20, **ALL_ROWS),
    update_case("halves ep", *HALVES, ep_size=2, **ALL_ROWS),
    update_case("shares ep", *SHARES, ep_size=2, micro_batch_tokens=20, **ALL_ROWS),
    update_case("off-policy halves", *HALVES, **OFF_POLICY),
    update_case("off-policy shares ep", *SHARES, ep_size=2, micro_batch_tokens=20, **OFF_POLICY),
    update_case("off-policy ep zero 2", *HALVES, ep_size=2, zero_stage=2, **OFF_POLICY),
    update_case("two updates halves", *INTERLEAVED, **TWO_UPDATES),
    update_case("two updates shares ep", *SHARES, ep_size=2, **TWO_UPDATES),
    update_case("espo shares ep", *SHARES, ep_size=2, micro_batch_tokens=20, **ESPO_UPDATE),
    update_case("dapo shares", *SHARES, micro_batch_tokens=40, **DAPO_UPDATE),
]

# updates that skip rows without gradient, and the same updates with all rows
LAST_TWO = EVERYTHING[6:]  # with two updates the second has no row with gradient
SKIPPING = {
    "grpo": {},
    "espo": {"old": "given"} | {f"algorithm__{name}": value for name, value in ESPO.items()},
    "r3": {"old": "given", "ids": "given", "algorithm__router_replay": "r3"},
    "two updates": {key: value for key, value in TWO_UPDATES.items() if key not in ALL_ROWS},
    "two passes": {"old": "computed", "passes_per_rollout": 2, "betas": "[0.8, 0.9]"},
    "kl": {"old": "given", "algorithm__kl_coef": 0.1},
}  # fmt: skip
PLACES = {  # rows of each rank; the second of SHARES has none with gradient
    "one rank": ([EVERYTHING], {"micro_batch_tokens": 40}),
    "last two": ([LAST_TWO], {}),
    "halves": (HALVES, {"micro_batch_tokens": 20}),
    "shares ep": (SHARES, {"ep_size": 2, "micro_batch_tokens": 20}),
}
PAIRS = [
    (kind, place)
    for kind, place in itertools.product(SKIPPING, PLACES)
    if kind in ("grpo", "two updates", "two passes") or place in ("one rank", "shares ep")
]
for kind, place in PAIRS:
    rows, split = PLACES[place]
    cases = ONE_RANK if len(rows) == 1 else TWO_RANKS
    for name, options in (("skipping", {}), ("all of", ALL_ROWS)):
        cases.append(update_case(f"{name} {kind}, {place}", *rows, **SKIPPING[kind] | split | options))


def save_request(folder, cases: list[dict]) -> None:
    save_small_moe(folder / "model")
    rng = random.Random(3)
    completions = make_ragged_completions()
    for c in completions:
        drawn = [[rng.sample(range(4), 2) for _ in range(2)] for _ in range(num_computed(c))]
        c["routes"] = {"model": torch.tensor(drawn, dtype=torch.uint8)}  # [rows, layers, experts per token]
    share_prompt_routes(completions)
    torch.save({"completions": completions, "cases": cases}, folder / "request.pt")


def num_computed(completion: dict) -> int:
    """Return the number of tokens that a forward pass computes: all but the last."""
    return len(completion["prompt_ids"]) + len(completion["completion_ids"]) - 1


SUITES = {
    1: RankSuite("grpo", 1, lambda folder: save_request(folder, ONE_RANK)),
    2: RankSuite("grpo", 2, lambda folder: save_request(folder, TWO_RANKS)),
}


@pytest.fixture(scope="module")
def updates():
    """Return the folder of the model, its completions, and {case name: result} of one and two ranks."""
    results = SUITES[1].results()[0] | SUITES[2].results()[0]
    return SUITES[1].folder() / "model", make_ragged_completions(), results


# ---- the update: plain torch -------------------------------------------------------------------------------


def plain_logprobs(model, completion: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability and entropy of each completion token, from one sequence without padding."""
    prompt = completion["prompt_ids"]
    tokens = completion["completion_ids"]
    logits = model(torch.tensor([prompt + tokens])).logits[0] / TEMPERATURE
    rows = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    return torch.stack([row[token] for row, token in zip(rows, tokens)]), -(rows.exp() * rows).sum(dim=-1)


def plain_update(folder, completions, minibatches, old="current", max_grad_norm=1e3, method=None, **adam):
    """Update on minibatches (lists of rows) with transformers' model and torch's AdamW.

    The gradient of the loss by the log-probabilities is taken from reference.py. method: settings of the
    algorithm that differ from GRPO.
    """
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": LEARNING_RATE, "eps": SMOOTH_EPS} | adam)
    with torch.no_grad():
        pairs = [plain_logprobs(model, c) for c in completions]
    current = [logprobs.tolist() for logprobs, _ in pairs]
    entropies = [entropy.tolist() for _, entropy in pairs]
    settings = AlgorithmSettings(**method or {}).model_dump() | {"log_vocab": math.log(24)}
    grad_norms = []
    tokens = []
    for update, rows in enumerate(minibatches, start=1):
        chosen = [completions[row] for row in rows]
        logprobs = [plain_logprobs(model, c)[0] for c in chosen]
        old_rows = [c["old_logprobs"] if old == "given" else current[row] for row, c in zip(rows, chosen)]
        values = {
            "logprobs": [x.tolist() for x in logprobs],
            "old_logprobs": old_rows,
            "advantages": [corrected_advantages(c, old, settings) for c, old in zip(chosen, old_rows)],
            "entropies": [entropies[row] for row in rows],
        }
        slopes = reference.policy_objective_slope(
            **values, ref_logprobs=[c["ref_logprobs"] for c in chosen], settings=settings
        )
        optimizer.zero_grad()
        torch.cat(logprobs).backward(-torch.tensor([x for row in slopes for x in row]))
        grad_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item())
        optimizer.step()
        tokens += [token | {"update": update} for token in plain_statistics(chosen, values, settings)]
    metrics = {"grad_norm": sum(grad_norms) / len(grad_norms), "nonfinite_updates_max": 0}
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"parameters": parameters, "metrics": metrics | plain_metrics(tokens), "old": current}


def corrected_advantages(completion: dict, old_logprobs: list[float], settings: dict) -> list[float]:
    """Return the advantages of a completion times the weights of the rollout correction."""
    mode = settings["rollout_correction"]
    cap = settings["rollout_correction_cap"]
    logprobs = old_logprobs, completion["rollout_logprobs"]
    return [
        a * reference.correction_weight(*logprobs, t, mode, cap)
        for t, a in enumerate(completion["advantages"])
    ]


def plain_statistics(completions: list[dict], values: dict, settings: dict) -> list[dict]:
    """Return {metric: value} of each token, with its entropy group."""
    tokens = []
    for i, t, _, term in reference.policy_terms(**values, settings=settings):
        entropies = values["entropies"][i]
        groups = reference.entropy_groups(entropies, settings["entropy_groups"])
        distance = values["old_logprobs"][i][t] - completions[i]["rollout_logprobs"][t]  # trainer over engine
        token = {
            "entropy_group": next(k for k, group in enumerate(groups) if t in group),
            "ratio": term.ratio,
            "clipped": float(term.clipped),
            "entropy": entropies[t],
            "abs_log_ratio": abs(math.log(term.ratio)),
            "abs_dlogp": abs(distance),
            "mismatch_k3": reference.kl_k3(0.0, distance),
            "mismatch_extreme": float(abs(distance) > math.log(2)),
            "mismatch_weight": math.exp(distance),
            "mismatch_weight_sq": math.exp(2 * distance),
            "advantage": completions[i]["advantages"][t],
        }
        if settings["kl_coef"]:
            token["ref_kl_k3"] = reference.kl_k3(values["logprobs"][i][t], completions[i]["ref_logprobs"][t])
        if term.clip_eps is not None:
            token["clip_eps"] = term.clip_eps
        tokens.append(token)
    return tokens


def mean_of(rows: list[dict], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def plain_metrics(tokens: list[dict]) -> dict[str, float]:
    """Return the means of plain_statistics(), some by entropy group, and the maxima."""
    metrics = {}
    for update in range(1, 1 + max(token["update"] for token in tokens)):
        metrics[f"clipped/update_{update}"] = mean_of([t for t in tokens if t["update"] == update], "clipped")
    for name in tokens[0].keys() - {"entropy_group", "advantage", "update"}:
        metrics[name] = mean_of(tokens, name)
        if name in ("entropy", "clipped", "clip_eps", "abs_dlogp") or name.startswith("mismatch"):
            for k in (0, 1):
                members = [token for token in tokens if token["entropy_group"] == k]
                metrics[f"{name}/entropy_group_{k}"] = mean_of(members, name)
        if name in ("abs_dlogp", "abs_log_ratio", "clip_eps"):
            metrics[f"{name}_max"] = max(token[name] for token in tokens)
    for name, sign in (("skew_positive", 1), ("skew_negative", -1)):
        excess = [-(t["mismatch_weight"] - 1) * t["advantage"] for t in tokens if sign * t["advantage"] > 0]
        metrics[name] = sum(excess) / len(excess)
    ascending = sorted(token["abs_dlogp"] for token in tokens)
    p99 = ascending[math.ceil(0.99 * len(ascending)) - 1]
    return metrics | {"abs_dlogp_p99": p99, "measured_tokens_total": len(tokens)}


@pytest.fixture(scope="module")
def plain(updates):
    """Return {name: plain_update()} of the update that several cases compute in different ways."""
    folder, completions, _ = updates
    off_policy = {"old": "given", "weight_decay": 0.1, "max_grad_norm": 0.05}
    two_updates = {"betas": (0.8, 0.9), "weight_decay": 0.0}
    kl = {"kl_coef": 0.1}
    everything = [EVERYTHING]
    halves = [EVERYTHING[:6], EVERYTHING[6:]]
    uneven = [
        GROUPS[0] + GROUPS[1] + GROUPS[3],
        GROUPS[2],
    ]  # rank 1 has one group, which is in its first update
    calls = {
        "whole": (everything, {"weight_decay": 0.0}),
        "off-policy": (everything, off_policy | {"method": kl}),
        "two updates": (halves, two_updates),
        "two updates shares": (uneven, two_updates),
        "two passes of two": (halves * 2, two_updates),
        "espo": (everything, off_policy | {"method": kl | ESPO}),
        "dapo": (everything, off_policy | {"method": kl | DAPO}),
    }
    return {
        name: plain_update(folder, completions, minibatches, **options)
        for name, (minibatches, options) in calls.items()
    }


@pytest.fixture(scope="module")
def start(updates) -> dict[str, torch.Tensor]:
    """Return the parameters before all updates."""
    return dict(Qwen3MoeForCausalLM.from_pretrained(updates[0]).named_parameters())


SAME_UPDATE = {
    "whole": [
        "whole", "small micro-batches", "single rows", "padded", "shuffled", "computed old",
        "halves", "shares", "halves ep", "shares ep",
    ],
    "off-policy": [
        "off-policy", "off-policy small",
        "off-policy halves", "off-policy shares ep", "off-policy ep zero 2",
    ],
    "two updates": ["two updates", "two updates halves"],
    "two updates shares": ["two updates shares ep"],
    "two passes of two": ["two passes of two"],
    "espo": ["espo", "espo shares ep"],
    "dapo": ["dapo small", "dapo shares"],
}  # fmt: skip


def assert_same_metric(metrics: dict, name: str, expected: float) -> None:
    rel = 0.024 if name.endswith("_p99") else 1e-5  # a quantile is the edge of a bin 2.4 % wide
    assert metrics[name] == pytest.approx(expected, rel=rel, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", [(kind, name) for kind in SAME_UPDATE for name in SAME_UPDATE[kind]])
def test_an_update_equals_plain_torch_however_it_is_split(kind, name, updates, plain):
    result = updates[2][name]
    # n (n + 1) / 2 for n updates: each rounds, and has its gradient at the rounded parameters of earlier ones
    roundings = 10 if kind == "two passes of two" else 3 if kind.startswith("two updates") else 1
    assert parameter_distance(result["parameters"], plain[kind]["parameters"]) < roundings * TOLERANCE
    of_ep = {"max_vio_ranks"}  # with expert parallelism only
    assert result["metrics"].keys() | of_ep == plain[kind]["metrics"].keys() | WORK
    for metric, value in plain[kind]["metrics"].items():
        assert_same_metric(result["metrics"], metric, value)
    assert result["written"] == []


@pytest.mark.slow
def test_the_work_of_an_update_is_counted_by_rank_and_its_padding_by_grid(updates):
    """A sequence costs its tokens less the last one; a grid is as long as the longest of its rows."""
    _, completions, results = updates
    lengths = [num_computed(c) for c in completions]
    for case in (case for case in ONE_RANK + TWO_RANKS if case["name"] in sum(SAME_UPDATE.values(), [])):
        passes = 1 + ("passes" in case["name"])
        metrics = results[case["name"]]["metrics"]
        loads = [passes * sum(lengths[row] for row in rows) for rows in case["rows"]]
        assert metrics["update_tokens"] == pytest.approx(sum(loads) / len(loads))
        assert metrics["update_tokens_max"] == max(loads)
        assert 0 <= metrics["padding_frac"] < 1
    assert results["single rows"]["metrics"]["padding_frac"] == 0
    expected = 1 - sum(lengths) / (len(lengths) * max(lengths))
    assert results["whole"]["metrics"]["padding_frac"] == pytest.approx(expected)
    assert results["small micro-batches"]["metrics"]["padding_frac"] < expected


@pytest.mark.slow
@pytest.mark.parametrize("kind, place", PAIRS)
def test_skipping_rows_without_gradient_changes_only_the_work(kind, place, updates):
    """Parameters and metrics over all tokens agree to a few roundings; fewer tokens are computed."""
    _, completions, results = updates
    skipping = results[f"skipping {kind}, {place}"]
    whole = results[f"all of {kind}, {place}"]
    rounding = 10 if kind.startswith("two") else 1  # a second update enlarges the rounding of the first
    assert parameter_distance(skipping["parameters"], whole["parameters"]) < rounding * TOLERANCE
    assert skipping["loss"] == pytest.approx(whole["loss"], rel=1e-5, abs=1e-6)
    work = {"account/update_tokens_total", "empty_updates_max"}
    is_empty = kind == "two updates" and place == "last two"
    of_empty = {"clipped/update_2"} if is_empty else set()  # an update without rows clips nothing
    assert skipping["metrics"].keys() == (whole["metrics"].keys() | work) - of_empty
    assert skipping["metrics"]["grad_norm"] == pytest.approx(whole["metrics"]["grad_norm"], rel=1e-5)
    num_ranks = len(PLACES[place][0])
    rows = [row for rows_of_rank in PLACES[place][0] for row in rows_of_rank]
    rows = [row for row in rows if kind == "kl" or any(completions[row]["advantages"])]
    computed = (1 + (kind == "two passes")) * sum(num_computed(completions[row]) for row in rows)
    assert skipping["metrics"]["account/update_tokens_total"] == computed
    assert (whole["metrics"]["update_tokens"] * num_ranks > computed) == (kind != "kl")
    assert skipping["metrics"]["empty_updates_max"] == int(is_empty)
    for metric, value in whole["metrics"].items():
        is_of_old_pass = SKIPPING[kind].get("old") == "computed" and metric.startswith(
            ("entropy", "mismatch", "abs_dlogp")
        )
        if metric not in WORK and is_of_old_pass:
            assert_same_metric(skipping["metrics"], metric, value)


@pytest.mark.slow
def test_the_updates_above_could_fail(plain, start):
    """The updates are large, every setting under test is active, and the kinds of updates differ."""
    for kind, update in plain.items():
        assert parameter_distance(update["parameters"], start) > 1e4 * TOLERANCE
        for second in plain.keys() - {kind}:
            assert parameter_distance(update["parameters"], plain[second]["parameters"]) > 1e3 * TOLERANCE
    assert plain["off-policy"]["metrics"]["grad_norm"] > 2 * 0.05
    for kind in ("off-policy", "espo", "dapo"):
        assert 0.1 < plain[kind]["metrics"]["clipped"] < 0.9
    assert {"clipped/entropy_group_1", "clip_eps_max", "abs_log_ratio_max"} < plain["espo"]["metrics"].keys()
    assert plain["two updates"]["metrics"]["clipped"] > 0.02


@pytest.mark.slow
def test_the_ratio_is_exactly_one_if_the_old_policy_is_the_current_one(updates):
    results = updates[2]
    for name in SAME_UPDATE["whole"]:
        assert results[name]["metrics"]["ratio"] == 1.0 and results[name]["metrics"]["clipped"] == 0
    assert results["two updates"]["metrics"]["ratio"] != pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_an_old_logprob_pass_changes_no_bit_of_the_first_update_and_equals_transformers(updates, plain):
    computed = updates[2]["computed old"]
    whole = updates[2]["whole"]
    assert whole["old_logprobs"] is None and computed["metrics"] == whole["metrics"]
    assert parameter_distance(computed["parameters"], whole["parameters"]) == 0
    for actual, expected in zip(computed["old_logprobs"], plain["whole"]["old"]):
        assert_close(actual[: len(expected)], torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert (actual[len(expected) :] == 0).all()
