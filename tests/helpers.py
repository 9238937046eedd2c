"""Build what tests are about, stand in for torch.distributed and vLLM, run suites on ranks, compare runs."""

import functools
import json
import pickle
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
import torch
import torch.distributed as dist
from conftest import ROOT
from safetensors.torch import load_file

import train_rl
from data.history import PromptHistory
from data.prompts import Prompt
from data.stages import Offers
from reward import Verdict
from rollout import Completion, Request
from runtime.metrics import Clock
from tests import preloaded

# ------------------------------------------------------------------------------------------------------------
# Settings, prompts, completions, groups, batches
# ------------------------------------------------------------------------------------------------------------
SMALLEST_TRAINING_SET = "data.train=[{path: unused}]"


def make_config(*settings: str, section: str = "", **values) -> train_rl.Config:
    """Read settings as a command line does.

    values: more of them, of a section as section__key, or of the section that is given as key.
    """
    names = {key: key.replace("__", ".") if "__" in key else f"{section}.{key}" for key in values}
    return train_rl.load_config(
        [SMALLEST_TRAINING_SET, *settings, *(f"{names[key]}={value}" for key, value in values.items())]
    )


def make_prompts(num: int) -> list[Prompt]:
    return [Prompt(f"prompt {i}", "1", "exact", "set") for i in range(num)]


@functools.cache  # statistics of sampling need half a million
def make_completion(length: int) -> Completion:
    return Completion([1 + i % 7 for i in range(length)], [-1.0] * length, "stop", 0.0)


@functools.cache
def make_verdict(right: bool | None, share: float = 0.0) -> Verdict:
    """Make the verdict of a right or a wrong completion, of which a share is right; None: it gave up."""
    if right is None:
        return Verdict(0.0, "timeout")
    return Verdict(1.0, "ok") if right else Verdict(share, "wrong")


def make_group(slot: int, prompt: int, lengths=(), rights=(), shares=None) -> train_rl.Group:
    """Make a group of completions of these lengths; rights and shares are what make_verdict() takes."""
    shares = shares or [0.0] * len(rights)
    return train_rl.Group(
        slot,
        prompt,
        completions=[make_completion(length) for length in lengths],
        verdicts=[make_verdict(right, share) for right, share in zip(rights, shares, strict=True)],
    )


def no_history(num_prompts: int) -> PromptHistory:
    return PromptHistory.from_offline([None] * num_prompts, 8)


def make_batch(
    completion_ids: list[list[int]],
    prompt_ids: list[list[int]] | None = None,
    group_index: list[int] | None = None,
    padding: int = 0,
    **ragged: list[list[float]],
) -> train_rl.RolloutBatch:
    """Make a batch of valid completions, `padding` columns wider than it needs.

    Without group_index all are of one group. ragged: fields [B, T] by their rows; rollout_logprobs are 0
    unless they are given.
    """
    num, lengths = len(completion_ids), [len(ids) for ids in completion_ids]
    width = max([1, *lengths]) + padding
    pad = lambda rows: torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows]).reshape(num, width)
    ragged = {"rollout_logprobs": [[]] * num} | ragged
    return train_rl.RolloutBatch(
        prompts=make_prompts(num),
        prompt_ids=prompt_ids or [[1]] * num,
        completion_ids=completion_ids,
        finish_reason=["stop"] * num,
        verdicts=[make_verdict(False)] * num,
        response_mask=torch.arange(width) < torch.tensor(lengths, dtype=torch.int64).view(-1, 1),
        group_index=torch.tensor(group_index or [0] * num, dtype=torch.int64),
        minibatch=torch.zeros(num, dtype=torch.int64),
        valid=torch.ones(num, dtype=torch.bool),
        **{name: pad(rows) for name, rows in ragged.items()},
    )


# ------------------------------------------------------------------------------------------------------------
# Updates: twelve completions, how they are split over ranks, and cases
# ------------------------------------------------------------------------------------------------------------
# Adam divides each gradient by its own size, so that the rounding of a gradient near 0 becomes a step of lr.
# SMOOTH_EPS in the denominator bounds what rounding does: lr / eps * 1e-8 = 1e-7.
SMOOTH_EPS = 1e-2
LEARNING_RATE, TEMPERATURE, CLIP_EPS = 0.1, 0.7, 0.2
GROUPS = [list(range(g * 3, g * 3 + 3)) for g in range(4)]
EVERYTHING = [row for group in GROUPS for row in group]
HALVES, SHARES = (EVERYTHING[:6], EVERYTHING[6:]), (EVERYTHING[:9], EVERYTHING[9:])
INTERLEAVED = (GROUPS[0] + GROUPS[2], GROUPS[1] + GROUPS[3])  # so that minibatches are those of one rank
SHUFFLED = [GROUPS[g][i] for g in (2, 0, 3, 1) for i in (1, 2, 0)]
REWARDS = [  # (reward, valid) of each completion: one right, one half right, one timed out, no variance
    [(1.0, True), (0.0, True), (0.0, True)],
    [(0.0, True), (0.5, True), (1.0, True)],
    [(1.0, True), (0.0, True), (0.0, False)],
    [(1.0, True), (1.0, True), (1.0, True)],
]
WORK = {"padding_frac", "update_tokens", "update_tokens_max"}  # metrics of a split, not of an update


def make_ragged_completions() -> list[dict]:
    """Make twelve ragged completions in four groups; old_logprobs, ref_logprobs are far from a policy's."""
    rng = random.Random(0)
    completions = []
    for group, rewards in enumerate(REWARDS):
        prompt_ids = [rng.randrange(24) for _ in range(rng.randint(1, 6))]
        advantages = reference.group_advantages(*map(list, zip(*rewards)))
        for advantage in advantages:
            completion_ids = [rng.randrange(24) for _ in range(rng.randint(1, 9))]
            values = {
                name: [rng.uniform(-5.0, -1.0) for _ in completion_ids]
                for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs")
            }
            completions.append({
                "group": group, "prompt_ids": prompt_ids, "completion_ids": completion_ids,
                "advantages": [advantage] * len(completion_ids), **values,
            })  # fmt: skip
    return completions


def share_prompt_routes(completions: list[dict]) -> None:
    """Give the prompt of a group, but for its last token, the routes that it has in the first completion."""
    first_of = {}
    for c in completions:
        first, num_shared = first_of.setdefault(c["group"], c), len(c["prompt_ids"]) - 1
        for model, ids in c["routes"].items():
            ids[:num_shared] = first["routes"][model][:num_shared]


def batch_of_rows(
    completions: list[dict], rows: list[int], padding: int = 0, num_minibatches: int = 1
) -> train_rl.RolloutBatch:
    """Make the batch of some of make_ragged_completions().

    Whole groups make a minibatch, the first groups the first.
    """
    chosen = [completions[row] for row in rows]
    groups = list(dict.fromkeys(c["group"] for c in chosen))
    group_index = [groups.index(c["group"]) for c in chosen]
    fields = ("rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs")
    batch = make_batch(
        [c["completion_ids"] for c in chosen],
        [c["prompt_ids"] for c in chosen],
        group_index,
        padding,
        **{name: [c[name] for c in chosen] for name in fields},
    )
    batch.minibatch = batch.group_index // -(-len(groups) // num_minibatches)
    return batch


def update_case(name: str, *rows: list[int], old="none", ep_size=1, padding=0, **settings) -> dict:
    """Describe a call of update_policy(): the rows of each rank, and settings.

    old: where old_logprobs come from, `given`, `computed` or `none`. settings: of section `train`, or named
    section__key; adam_eps, model and ids are not settings, but what rank_worker.run_update() says.
    """
    own = {key: settings.pop(key, default) for key, default in
           (("adam_eps", SMOOTH_EPS), ("model", "model"), ("ids", "none"))}  # fmt: skip
    settings = {
        "learning_rate": LEARNING_RATE, "max_grad_norm": 1e3, "rollout__temperature": TEMPERATURE,
        "model__ep_size": ep_size, "model__dtype": "float32",
    } | settings  # fmt: skip
    names = {key: key.replace("__", ".") if "__" in key else f"train.{key}" for key in settings}
    return {
        "name": name, "rows": list(rows), "old": old, "ep_size": ep_size, "padding": padding,
        "settings": [f"{names[key]}={value}" for key, value in settings.items()], **own,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------
# What stands in for engine and verifier
# ------------------------------------------------------------------------------------------------------------
Answer = Callable[
    [int, int, int, int], tuple[bool | None, int]
]  # (prompt, step, slot, sample) -> right, length


def hashed_answer(rates: list[float], seed: int = 0, timeout_prob: float = 0.0) -> Answer:
    """Draw verdicts at each prompt's pass rate, the same whichever rank asks, and in whatever order."""

    def answer(prompt: int, step: int, slot: int, sample: int) -> tuple[bool | None, int]:
        draws = random.Random(f"{seed}/{prompt}/{step}/{slot}/{sample}")
        timed_out, right, length = draws.random() < timeout_prob, draws.random(), draws.randint(1, 9)
        return None if timed_out else right < rates[prompt], length

    return answer


class FakeEngine:
    """Stands in for an engine and for the reward workers behind it.

    A request's only prompt token is the number of its prompt, see make_rollouts(). Completions end in the
    reverse of their order; the completion with a key is as right as the answer says.
    """

    seconds_per_step, tokens_per_second, seconds = 0.01, 1000.0, {}

    def __init__(self, answer: Answer):
        self.answer, self.num_sampled, self.rights = answer, Counter(), {}

    def describe(self) -> str:
        return ""

    def generate(
        self, requests: list[Request], version: int, on_finished, on_step, capture_routes: bool
    ) -> list[Completion]:
        completions = []
        for index, request in enumerate(requests):
            where = (request.prompt_ids[0], version, request.group)
            right, length = self.answer(*where, self.num_sampled[where])
            self.num_sampled[where] += 1
            self.rights[index] = right
            completions.append(make_completion(length))
        for index in reversed(range(len(requests))):
            on_finished(index, completions[index])
            on_step()
        return completions

    def at_once(self, kind: str) -> int:
        return 2

    def submit(self, key: int, kind: str, completion: list[int], answer: str, fields: dict) -> None:
        assert key in self.rights, "a completion is scored that was not sampled"

    def poll(self) -> int:
        return 0

    def collect(self) -> dict[int, Verdict]:
        verdicts = {key: make_verdict(right) for key, right in self.rights.items()}
        self.rights = {}
        return verdicts


def make_rollouts(config: train_rl.Config, answer: Answer, num_prompts: int) -> train_rl.Rollouts:
    """Make the Rollouts of a training set of which prompt i has the one token i, with a FakeEngine."""
    engine, prompt_ids = FakeEngine(answer), [[i] for i in range(num_prompts)]
    prompts, offers = make_prompts(num_prompts), Offers(range(num_prompts))
    return train_rl.Rollouts(config, engine, engine, None, prompts, prompt_ids, Clock({}), offers)


# ------------------------------------------------------------------------------------------------------------
# Several ranks in one process
# ------------------------------------------------------------------------------------------------------------
class FakeRanks:
    """Stands in for torch.distributed: ranks are threads of this process."""

    def __init__(self, world_size: int):
        self.barrier_of_ranks, self.parts = threading.Barrier(world_size), [None] * world_size
        self.local = threading.local()

    def install(self, monkeypatch) -> "FakeRanks":
        """Put this in the place of torch.distributed until the test ends."""
        names = ("get_rank", "get_world_size", "barrier", "all_gather_object", "all_reduce")
        for name in (*names, "all_to_all_single", "broadcast_object_list"):
            monkeypatch.setattr(dist, name, getattr(self, name))
        return self

    def get_rank(self) -> int:
        return getattr(self.local, "rank", 0)

    def get_world_size(self) -> int:
        return len(self.parts)

    def barrier(self) -> None:
        self.barrier_of_ranks.wait(20)

    def all_gather_object(self, everyone: list, item) -> None:
        self.parts[self.get_rank()] = pickle.dumps(item)  # what arrives is a copy, as between processes
        self.barrier()
        everyone[:] = [pickle.loads(part) for part in self.parts]
        self.barrier()

    def broadcast_object_list(self, items: list) -> None:
        everyone = [None] * len(self.parts)
        self.all_gather_object(everyone, items)
        items[:] = everyone[0]

    def all_reduce(self, tensor: torch.Tensor, op=dist.ReduceOp.SUM) -> None:
        everyone = [None] * len(self.parts)
        self.all_gather_object(everyone, tensor)
        combine = {dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.MAX: torch.amax}[op]
        tensor.copy_(combine(torch.stack(everyone), dim=0))

    def all_to_all_single(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes=None, sent_sizes=None
    ) -> None:
        everyone = [None] * len(self.parts)
        parts = sent.split(sent_sizes or len(sent) // len(self.parts))
        self.all_gather_object(everyone, [part.clone() for part in parts])
        arrived = [parts[self.get_rank()] for parts in everyone]
        assert received_sizes is None or received_sizes == [len(part) for part in arrived]
        received.copy_(torch.cat(arrived))

    def run(self, function: Callable[[int], object]) -> list:
        """Call function(rank) on every rank and return the list of what they return."""
        results, errors = [None] * len(self.parts), []

        def work(rank: int) -> None:
            self.local.rank = rank
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier_of_ranks.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self.parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return results


# ------------------------------------------------------------------------------------------------------------
# Suites on real ranks
# ------------------------------------------------------------------------------------------------------------
class RankSuite:
    """A suite of rank_worker.py. All suites of so many ranks share one start of torchrun.

    A test file makes its suites when it is imported. The first results() of a number of ranks runs all suites
    of this session for it, because a start takes longer than most suites.

    prepare(folder): writes what the suite reads.
    """

    of_session: list["RankSuite"] = []
    started: dict[int, tuple[tempfile.TemporaryDirectory, str]] = {}  # {ranks: (folder, standard error)}

    def __init__(self, name: str, num_ranks: int, prepare: Callable[[Path], None]):
        self.name, self.num_ranks, self.prepare, self.loaded = name, num_ranks, prepare, None
        self.of_session.append(self)

    def folder(self) -> Path:
        """Return the folder of this suite, after it has run."""
        if self.num_ranks not in self.started:
            suites = [suite for suite in self.of_session if suite.num_ranks == self.num_ranks]
            assert len({suite.name for suite in suites}) == len(suites)
            parent = tempfile.TemporaryDirectory()
            for suite in suites:
                folder = Path(parent.name) / suite.name
                folder.mkdir()
                suite.prepare(folder)
            worker, names = ROOT / "tests" / "rank_worker.py", [suite.name for suite in suites]
            done = preloaded.run(self.num_ranks, worker, parent.name, *names, timeout_s=300)
            self.started[self.num_ranks] = parent, done.stderr
        return Path(self.started[self.num_ranks][0].name) / self.name

    def results(self) -> list:
        """Return what the suite gave on each rank; the same objects at every call."""
        files = [self.folder() / f"results_{rank}.pt" for rank in range(self.num_ranks)]
        if not all(file.is_file() for file in files):
            log = self.started[self.num_ranks][1]
            pytest.fail(f"no results of {self.name!r} from {self.num_ranks} ranks:\n{log[-4000:]}")
        if self.loaded is None:
            self.loaded = [torch.load(file, weights_only=False) for file in files]
        return self.loaded


# ------------------------------------------------------------------------------------------------------------
# Comparing weights and runs
# ------------------------------------------------------------------------------------------------------------
TIMES = (  # what may differ between two runs of the same numbers
    "seconds", "completion_seconds", "peak_rss", "rollout_bubble", "rollout_tail", "straggler",
    "reward_latency",
)  # fmt: skip


def parameter_distance(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def rows_of(run_dir: Path) -> list[dict]:
    """Return the rows of metrics.jsonl without anything that measures time or memory."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


def steps_of(run_dir: Path) -> list[dict]:
    """Return those rows_of() that are of a step, and not of an evaluation."""
    return [row for row in rows_of(run_dir) if "score" in row]


def summary_of(run_dir: Path) -> dict:
    summary = json.loads((run_dir / "summary.json").read_text())
    return {k: v for k, v in summary.items() if not k.startswith(TIMES)}


def weights_of(model: Path) -> dict:
    return {n: t for shard in model.glob("*.safetensors") for n, t in load_file(shard).items()}


def assert_same_weights(one: Path, other: Path) -> None:
    of_one, of_other = weights_of(one), weights_of(other)
    assert of_one.keys() == of_other.keys() and all(torch.equal(of_one[n], of_other[n]) for n in of_one)


def assert_same_run(one: Path, other: Path) -> None:
    assert summary_of(one) == summary_of(other)
    assert rows_of(one) == rows_of(other)
    assert_same_weights(one / "model", other / "model")
