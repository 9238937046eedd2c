"""Shared tools: test objects, stand-ins for torch.distributed and vLLM, suites on ranks, comparisons."""

import functools
import json
import random
import shutil
import signal
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import reference
import torch
from conftest import ROOT, train, trained
from fake_ranks import FakeRanks as FakeRanks
from safetensors.torch import load_file

import train_rl
from batch import Completion, Group, LossInputs, Request, RolloutBatch, collate
from configure import load_config
from data.history import PromptHistory
from data.prompts import Prompt
from data.stages import Offers
from reward import Verdict
from runtime.checkpoint import TrainState
from runtime.metrics import Clock
from settings import AlgorithmSettings, Config
from tests import preloaded
from tests.campaign.verdicts import TIMES as TIMES
from tests.campaign.verdicts import rows_of as rows_of

# ---- Settings, prompts, completions, groups, batches -------------------------------------------------------
SMALLEST_TRAINING_SET = "data.train=[{path: unused}]"


def make_config(*settings: str, section: str = "", **values) -> Config:
    """Read settings as a command line does.

    values: more settings, as section__key=value, or as key=value of `section`.
    """
    names = {key: key.replace("__", ".") if "__" in key else f"{section}.{key}" for key in values}
    return load_config(
        [SMALLEST_TRAINING_SET, *settings, *(f"{names[key]}={value}" for key, value in values.items())]
    )


def plugin(hook: str, name: str, **arguments) -> dict:
    """Return the settings that call a function of experiments/plugins, for example sapo.py:sapo."""
    return {hook: str(ROOT / "experiments" / "plugins" / name), f"{hook}_args": arguments}


def one_token(texts, add_special_tokens=True):
    """Stand in for a tokenizer in tests that look at no token."""
    return {"input_ids": [[1] for _ in texts]}


one_token.bos_token_id = one_token.eos_token_id = None


def make_prompts(num: int) -> list[Prompt]:
    return [Prompt(f"prompt {i}", "1", "exact", "set") for i in range(num)]


@functools.cache  # statistics of sampling need half a million completions
def make_completion(length: int) -> Completion:
    return Completion([1 + i % 7 for i in range(length)], [-1.0] * length, "stop", 0.0)


@functools.cache
def make_verdict(right: bool | None, share: float = 0.0) -> Verdict:
    """Make a verdict; share: the score of a wrong completion; None: a timeout."""
    if right is None:
        return Verdict(0.0, "timeout")
    return Verdict(1.0, "ok") if right else Verdict(share, "wrong")


def make_group(slot: int, prompt: int, lengths=(), rights=(), shares=None) -> Group:
    """Make a group of completions with these lengths; rights and shares are arguments of make_verdict()."""
    shares = shares or [0.0] * len(rights)
    pairs = zip(lengths, zip(rights, shares, strict=True), strict=True)
    return Group(slot, prompt, [make_judged(length, *of_verdict) for length, of_verdict in pairs])


@functools.cache
def make_judged(length: int, right: bool | None, share: float = 0.0) -> Completion:
    return replace(make_completion(length), verdict=make_verdict(right, share))


def judged(completions: list[Completion], verdicts: list[Verdict]) -> list[Completion]:
    """Give completions their verdicts."""
    return [replace(c, verdict=verdict) for c, verdict in zip(completions, verdicts, strict=True)]


def judge_batch(batch: RolloutBatch, verdicts: list[Verdict], binary: bool = False) -> None:
    """Give the completions of a batch other verdicts, by collate()."""
    completions = judged([make_completion(1)] * len(verdicts), verdicts)
    groups = [
        Group(slot, 0, [c for c, index in zip(completions, batch.group_index.tolist()) if index == slot])
        for slot in batch.group_index.unique().tolist()
    ]
    collated = collate(groups, batch.prompts[:1], [[1]], binary)
    rows = batch.group_index.argsort(stable=True).argsort()
    batch.verdicts = verdicts
    batch.scores = collated.scores[rows]
    batch.valid = collated.valid[rows]
    batch.is_tied = collated.is_tied[rows]


def no_history(num_prompts: int) -> PromptHistory:
    return PromptHistory.from_offline([None] * num_prompts, 8)


def make_batch(
    completion_ids: list[list[int]],
    prompt_ids: list[list[int]] | None = None,
    group_index: list[int] | None = None,
    padding: int = 0,
    **ragged: list[list[float]],
) -> RolloutBatch:
    """Make a batch of valid completions with `padding` extra columns.

    Without group_index, all rows are one group. ragged: the rows of fields [B, T]; rollout_logprobs are 0 by
    default.
    """
    num = len(completion_ids)
    lengths = [len(ids) for ids in completion_ids]
    width = max([1, *lengths]) + padding
    ragged = {"rollout_logprobs": [[]] * num} | ragged
    fields = {
        name: torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows]).reshape(num, width)
        for name, rows in ragged.items()
    }
    batch = RolloutBatch(
        prompts=make_prompts(num),
        prompt_ids=prompt_ids or [[1]] * num,
        completion_ids=completion_ids,
        finish_reason=["stop"] * num,
        verdicts=[make_verdict(False)] * num,
        scores=torch.zeros(num, dtype=torch.float64),
        is_tied=torch.zeros(num, dtype=torch.bool),
        response_mask=torch.arange(width) < torch.tensor(lengths, dtype=torch.int64).view(-1, 1),
        group_index=torch.tensor(group_index or [0] * num, dtype=torch.int64),
        minibatch=torch.zeros(num, dtype=torch.int64),
        valid=torch.ones(num, dtype=torch.bool),
        rollout_logprobs=fields.pop("rollout_logprobs"),
    )
    for name, values in fields.items():
        setattr(batch, name, values)
    return batch


# ---- Updates: twelve completions, splits over ranks, and cases ---------------------------------------------
# Adam divides each gradient by its size, so that the rounding of a gradient near 0 becomes a step of lr.
# SMOOTH_EPS in the denominator bounds the effect of rounding: lr / eps * 1e-8 = 1e-7.
SMOOTH_EPS = 1e-2
LEARNING_RATE, TEMPERATURE, CLIP_EPS = 0.1, 0.7, 0.2
GROUPS = [list(range(g * 3, g * 3 + 3)) for g in range(4)]
EVERYTHING = [row for group in GROUPS for row in group]
HALVES, SHARES = (EVERYTHING[:6], EVERYTHING[6:]), (EVERYTHING[:9], EVERYTHING[9:])
INTERLEAVED = (GROUPS[0] + GROUPS[2], GROUPS[1] + GROUPS[3])  # gives two ranks the minibatches of one rank
SHUFFLED = [GROUPS[g][i] for g in (2, 0, 3, 1) for i in (1, 2, 0)]
REWARDS = [  # (reward, valid): a right completion, a half-right one, a timeout, a group without variance
    [(1.0, True), (0.0, True), (0.0, True)],
    [(0.0, True), (0.5, True), (1.0, True)],
    [(1.0, True), (0.0, True), (0.0, False)],
    [(1.0, True), (1.0, True), (1.0, True)],
]
# metrics that depend on the split
WORK = {"padding_frac", "update_tokens", "update_tokens_max", "max_vio", "max_vio_ranks"}


def make_ragged_completions() -> list[dict]:
    """Make twelve ragged completions in four groups, with logprobs that no policy would give."""
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
    """Give all completions of a group the same routes for the prompt, except for the last prompt token."""
    first_of = {}
    for c in completions:
        first = first_of.setdefault(c["group"], c)
        num_shared = len(c["prompt_ids"]) - 1
        for model, ids in c["routes"].items():
            ids[:num_shared] = first["routes"][model][:num_shared]


def batch_of_rows(
    completions: list[dict], rows: list[int], padding: int = 0, num_minibatches: int = 1
) -> RolloutBatch:
    """Make the batch of some of make_ragged_completions(). Minibatches consist of whole groups, in order."""
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

    old: source of old_logprobs: `given`, `computed` or `none`. settings: of section `train`, or section__key.
    adam_eps, model and ids are arguments of rank_worker.run_update(), not settings.
    """
    defaults = {"adam_eps": SMOOTH_EPS, "model": "model", "ids": "none"}
    arguments = {key: settings.pop(key, default) for key, default in defaults.items()}
    settings = {
        "learning_rate": LEARNING_RATE, "max_grad_norm": 1e3, "rollout__temperature": TEMPERATURE,
        "model__ep_size": ep_size, "model__dtype": "float32",
    } | settings  # fmt: skip
    names = {key: key.replace("__", ".") if "__" in key else f"train.{key}" for key in settings}
    return {
        "name": name, "rows": list(rows), "old": old, "ep_size": ep_size, "padding": padding,
        "settings": [f"{names[key]}={value}" for key, value in settings.items()], **arguments,
    }  # fmt: skip


# ---- Stand-ins for engine and verifier ---------------------------------------------------------------------
# (prompt, step, slot, sample) -> (right, length)
Answer = Callable[[int, int, int, int], tuple[bool | None, int]]


def hashed_answer(rates: list[float], seed: int = 0, timeout_prob: float = 0.0) -> Answer:
    """Draw verdicts at each prompt's pass rate, independently of the order of calls and of the rank."""

    def answer(prompt: int, step: int, slot: int, sample: int) -> tuple[bool | None, int]:
        draws = random.Random(f"{seed}/{prompt}/{step}/{slot}/{sample}")
        timed_out = draws.random() < timeout_prob
        right = draws.random() < rates[prompt]
        return None if timed_out else right, draws.randint(1, 9)

    return answer


class FakeEngine:
    """Stands in for an engine and the reward workers.

    The prompt of a request is a single token, the number of the prompt (see make_run()). Completions end in
    reverse order. answer() decides the verdict and the length of each completion.
    """

    seconds_per_step, tokens_per_second, seconds = 0.01, 1000.0, {}

    def __init__(self, answer: Answer):
        self.answer = answer
        self.num_sampled = Counter()
        self.rights = {}

    def describe(self) -> str:
        return ""

    def generate(
        self, requests: list[Request], version: int, on_finished, on_step, capture_routes: bool, episodes=None
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

    def submit(
        self, key: int, kind: str, completion: list[int], answer: str, fields: dict, prefix: str = ""
    ) -> None:
        assert key in self.rights, "the completion to score was never sampled"

    def poll(self) -> int:
        return 0

    def collect(self) -> dict[int, Verdict]:
        verdicts = {key: make_verdict(right) for key, right in self.rights.items()}
        self.rights = {}
        return verdicts


def make_run(config: Config, answer: Answer | None, num_prompts: int, **fields) -> SimpleNamespace:
    """Return the fields of lifecycle.Run that sampling reads; prompt i of the training set is the token i.

    A FakeEngine stands in for the engine and the reward workers. fields: overrides, for example state.
    """
    engine = FakeEngine(answer)
    return SimpleNamespace(**{
        "config": config, "engine": engine, "pool": engine, "tokenizer": None, "clock": Clock({}),
        "prompts": make_prompts(num_prompts), "prompt_ids": [[i] for i in range(num_prompts)],
        "interaction": None, "offers": Offers(range(num_prompts)), "history": no_history(num_prompts),
        "state": TrainState(), "queue": deque(),
    } | fields)  # fmt: skip


def loss_inputs(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, settings: AlgorithmSettings, **fields
) -> LossInputs:
    """Return the inputs of a loss for which engine, reference and old policy are equal.

    fields: overrides [b, T]. By default entropies and advantages are 0, and all tokens count.
    """
    mask = fields.get("mask", torch.ones(logprobs.shape, dtype=torch.bool))
    entropy = fields.get("entropy", torch.zeros_like(old_logprobs))
    return LossInputs(**{
        "logprobs": logprobs, "old_logprobs": old_logprobs, "rollout_logprobs": old_logprobs,
        "ref_logprobs": old_logprobs, "advantages": torch.zeros_like(old_logprobs), "entropy": entropy,
        "token_groups": train_rl.token_groups_of(entropy, mask, settings), "mask": mask, "log_vocab": 1.0,
        "settings": settings,
    } | fields)  # fmt: skip


# ---- Suites on real ranks ----------------------------------------------------------------------------------
class RankSuite:
    """A suite of rank_worker.py. All suites of one number of ranks share one start of the ranks.

    Test files make suites on import. The first call of results() for a number of ranks, for example 2, runs
    all suites of this session with that number, because a start takes longer than most suites.

    prepare(folder): writes the input of the suite.
    """

    of_session: list["RankSuite"] = []
    started: dict[int, tuple[tempfile.TemporaryDirectory, str]] = {}  # {ranks: (folder, standard error)}

    def __init__(self, name: str, num_ranks: int, prepare: Callable[[Path], None]):
        self.name = name
        self.num_ranks = num_ranks
        self.prepare = prepare
        self.loaded = None
        self.of_session.append(self)

    def folder(self) -> Path:
        """Return the folder of this suite; the suite has run."""
        if self.num_ranks not in self.started:
            suites = [suite for suite in self.of_session if suite.num_ranks == self.num_ranks]
            assert len({suite.name for suite in suites}) == len(suites)
            parent = tempfile.TemporaryDirectory()
            for suite in suites:
                folder = Path(parent.name) / suite.name
                folder.mkdir()
                suite.prepare(folder)
            worker = ROOT / "tests" / "rank_worker.py"
            names = [suite.name for suite in suites]
            done = preloaded.run(self.num_ranks, worker, parent.name, *names, timeout_s=300)
            self.started[self.num_ranks] = parent, done.stderr
        return Path(self.started[self.num_ranks][0].name) / self.name

    def results(self) -> list:
        """Return the results of the suite on each rank; every call returns the same objects."""
        files = [self.folder() / f"results_{rank}.pt" for rank in range(self.num_ranks)]
        if not all(file.is_file() for file in files):
            log = self.started[self.num_ranks][1]
            pytest.fail(f"no results of {self.name!r} from {self.num_ranks} ranks:\n{log[-4000:]}")
        if self.loaded is None:
            self.loaded = [torch.load(file, weights_only=False) for file in files]
        return self.loaded


# ---- Files and errors --------------------------------------------------------------------------------------
def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def error_of(check: Callable[[int], None], rank: int) -> str:
    with pytest.raises(RuntimeError) as error:
        check(rank)
    return str(error.value)


# ---- Comparing weights and runs ----------------------------------------------------------------------------
EMPTY_ACCOUNT = {
    **{f"prompts_{fate}": 0 for fate in "offered skipped sampled probed stopped dropped refilled".split()},
    **{f"wasted_{kind}_tokens": 0 for kind in ("stopped", "dropped", "kept")},
}


def parameter_distance(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def steps_of(run_dir: Path) -> list[dict]:
    """Return the rows of training steps, without the rows of evaluations."""
    return [row for row in rows_of(run_dir) if "score" in row]


def summary_of(run_dir: Path) -> dict:
    summary = json.loads((run_dir / "summary.json").read_text())
    return {k: v for k, v in summary.items() if not k.startswith(TIMES)}


def weights_of(model: Path) -> dict:
    return {n: t for shard in model.glob("*.safetensors") for n, t in load_file(shard).items()}


def assert_same_weights(one: Path, other: Path) -> None:
    weights, expected = weights_of(one), weights_of(other)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def assert_same_run(one: Path, other: Path) -> None:
    assert summary_of(one) == summary_of(other)
    assert rows_of(one) == rows_of(other)
    assert_same_weights(one / "model", other / "model")


def assert_resumes_exactly(straight: Path, last_step: int, *settings: str, kill=False, **options) -> None:
    """Resume a copy of a finished run without its last checkpoint. options: of train().

    kill: kill the resumed run (SIGKILL) during its last step, and resume it again.
    """
    resumed = shutil.copytree(straight, straight.with_name("resumed"))
    shutil.rmtree(resumed / "checkpoints" / f"step_{last_step:06d}")
    if kill:
        last_line = lambda: (resumed / "metrics.jsonl").read_text().rpartition('"step": ')[2]
        is_near = lambda: last_line().startswith(f"{last_step - 1},")
        done = train(*settings, f"run.dir={resumed}", kill_when=is_near, **options)
        assert done.returncode == -signal.SIGKILL
    done = trained(*settings, f"run.dir={resumed}", **options)
    assert "resumed from" in done.stdout + done.stderr
    assert_same_run(resumed, straight)
