"""Drafts: the distribution of completions, the use of drafts in a run, what is dropped, a resume."""

import itertools
import math
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL, trained
from helpers import FakeEngine, assert_resumes_exactly, make_config, make_run, steps_of

import train_rl
from batch import Completion
from extras import base, drafts
from extras.drafts import Tokens, begin

slow = pytest.mark.slow(process="others")
VOCAB, LENGTH = 4, 3
COMPLETIONS = list(itertools.product(range(VOCAB), repeat=LENGTH))


# ---- distribution ------------------------------------------------------------------------------------------
def random_policy(seed: int, spread: float, base_policy=None) -> dict[tuple, list[float]]:
    """Return {beginning: probabilities of the next token}."""
    random = Random(seed)
    policy = {}
    for length in range(LENGTH):
        for ids in itertools.product(range(VOCAB), repeat=length):
            before = base_policy[ids] if base_policy else [1.0] * VOCAB
            weights = [p * math.exp(random.gauss(0, spread)) for p in before]
            policy[ids] = [weight / sum(weights) for weight in weights]
    return policy


OLD = random_policy(0, 0.5)
NEW = random_policy(1, 0.5, OLD)


def scored(ids: tuple, policy, topk: int = VOCAB) -> Tokens:
    rows = torch.tensor([policy[ids[:n]] for n in range(LENGTH)], dtype=torch.float64).log().topk(topk)
    logprobs = [math.log(policy[ids[:n]][ids[n]]) for n in range(LENGTH)]
    return Tokens.of(list(ids), logprobs, rows.indices.int(), rows.values.float())


def predicted(form: str, lenience: float) -> list[float]:
    """Return the probability of each completion by the formulas of the file, as a slow recursion."""
    result = dict.fromkeys(COMPLETIONS, 0.0)

    def go_on(ids: tuple, mass: float, accepted: bool) -> None:
        if len(ids) == LENGTH:
            result[ids] += mass
            return
        new = NEW[ids]
        kept = [min(old, lenience * p) if accepted else 0.0 for old, p in zip(OLD[ids], new)]
        excess = [max(0.0, p - old) for old, p in zip(OLD[ids], new)]
        drawn = [x / sum(excess) for x in excess] if accepted and form == "residual" else new
        for token in range(VOCAB):
            go_on((*ids, token), mass * kept[token], True)
            go_on((*ids, token), mass * (1 - sum(kept)) * drawn[token], False)

    go_on((), 1.0, True)
    return list(result.values())


def anew(policy) -> list[float]:
    return [math.prod(policy[ids[:n]][ids[n]] for n in range(LENGTH)) for ids in COMPLETIONS]


def sampled(form: str, lenience: float, num: int, topk: int = VOCAB) -> dict[tuple, int]:
    """Draw drafts from OLD and complete what is kept of them by NEW; return the count of each completion."""
    random = Random(7)
    pairs = {ids: (scored(ids, OLD, topk), scored(ids, NEW, topk)) for ids in COMPLETIONS}
    counts = dict.fromkeys(COMPLETIONS, 0)
    for draft in random.choices(COMPLETIONS, anew(OLD), k=num):
        ids = tuple(begin(*pairs[draft], form, lenience, random)[1].ids.tolist())
        while len(ids) < LENGTH:
            ids = (*ids, random.choices(range(VOCAB), NEW[ids])[0])
        counts[ids] += 1
    return counts


def p_value(counts, probabilities: list[float]) -> float:
    """Return that of a chi-square test with 63 degrees of freedom."""
    expected = [sum(counts.values()) * p for p in probabilities]
    assert min(expected) > 5
    distance = sum((count - x) ** 2 / x for count, x in zip(counts.values(), expected))
    freedom = len(expected) - 1
    return torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(distance / 2.0)).item()


@pytest.mark.parametrize("form, lenience, num", [
    pytest.param("residual", 1.0, 100_000, marks=slow), pytest.param("literal", 1.0, 100_000, marks=slow),
    ("residual", 1.6, 20_000), ("literal", 1.6, 20_000),
])  # fmt: skip
def test_completions_have_the_distribution_of_the_formula(form, lenience, num):
    """residual at lenience 1 samples from today's policy, the other three do not."""
    counts = sampled(form, lenience, num)
    expected = predicted(form, lenience)
    assert p_value(counts, expected) > 0.01
    for token in range(VOCAB):  # the first token, within 3 standard errors
        p = sum(x for ids, x in zip(COMPLETIONS, expected) if ids[0] == token)
        count = sum(count for ids, count in counts.items() if ids[0] == token)
        assert abs(count - num * p) < 3 * math.sqrt(num * p * (1 - p))
    is_exact = (form, lenience) == ("residual", 1.0)
    assert (p_value(counts, anew(NEW)) > 0.01) == is_exact
    assert (max(abs(x - y) for x, y in zip(expected, anew(NEW))) < 1e-12) == is_exact


def test_likely_tokens_bound_the_error_of_a_residual_token():
    """With 3 of 4 tokens, the first token's distribution is as near to today's as the file promises."""
    counts = sampled("residual", 1.0, num=20_000, topk=3)
    shares = [sum(n for ids, n in counts.items() if ids[0] == token) / 20_000 for token in range(VOCAB)]
    bound = min(OLD[()]) + min(NEW[()])
    assert sum(abs(x - p) for x, p in zip(shares, NEW[()])) / 2 < bound + 0.01


# ---- a run -------------------------------------------------------------------------------------------------
GROUP_SIZE, NUM_PROMPTS, LONGEST = 4, 3, 8
END = 0


def policy_of(version: int) -> list[float]:
    """Return the probabilities of all tokens in every context."""
    weights = [0.3 + Random(f"{version} {token}").random() for token in range(VOCAB)]
    return [weight / sum(weights) for weight in weights]


def tokens_by(version: int, ids: list[int], topk: int = 0) -> Tokens:
    logprobs = torch.tensor(policy_of(version)).log()
    rows = (torch.arange(topk).repeat(len(ids), 1).int(), logprobs[:topk].repeat(len(ids), 1))
    return Tokens.of(ids, logprobs[ids].tolist(), *rows)


class FakePolicyEngine(FakeEngine):
    """Samples from policy_of(version), and adds a token to a prefix that is a whole completion."""

    stop_ids = [END]

    def generate(self, requests, version, on_finished, on_step, capture_routes, episodes=None):
        completions = []
        for row, request in enumerate(requests):
            random = Random(request.seed)
            ids: list[int] = []
            while END not in ids and len(ids) < request.after_prefix().max_new_tokens:
                ids += random.choices(range(VOCAB), policy_of(version))
            tokens = tokens_by(version, ids, request.topk)
            reason = "stop" if END in ids else "length"
            completion = Completion(ids, tokens.logprobs.tolist(), reason, 0.0)
            if request.topk:
                topk = {"topk_ids": tokens.topk_ids, "topk_logprobs": tokens.topk_logprobs}
                completion = replace(completion, **topk)
            completion = completion.after(request.prefix) if request.prefix else completion
            completions.append(completion.with_version(version))
            self.rights[row] = len(ids) % 2 == 0
            on_finished(row, completions[-1])
        return completions


@pytest.fixture
def drafting_run(one_rank, monkeypatch):
    """Return a run with two batches of prompts, and the settings' form."""

    def make(form: str, *settings):
        config = make_config(
            f"drafts.form={form}", f"rollout.group_size={GROUP_SIZE}", f"rollout.max_new_tokens={LONGEST}",
            f"rollout.prompts_per_step={NUM_PROMPTS}", *settings,
        )  # fmt: skip
        run = make_run(config, None, 2 * NUM_PROMPTS, extras={})
        run.engine = run.pool = FakePolicyEngine(None)
        run.engine.run = run
        run.extras["drafts"] = drafts.Drafts(VOCAB)

        def score(engine, pairs, topk):
            return [tokens_by(engine.run.state.step, draft.ids.tolist(), topk) for _, draft in pairs]

        monkeypatch.setattr(drafts, "score_drafts", score)
        return run

    return make


def step_of(run) -> tuple[dict, dict]:
    """Take a step; return the completions by (prompt, sample) and the metrics as sums."""
    groups, outcomes, _ = train_rl.sample_step(run)
    train_rl.update_history(run, list(outcomes.values()))
    metrics = train_rl.metrics_of(run.config, train_rl.batch_of(run, groups))
    run.state.step += 1
    return {(g.prompt_index, i): c for g in groups for i, c in enumerate(g.completions)}, metrics


def same_drafts(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(
        replace(draft, tokens=other[key].tokens) == other[key]
        and all(map(torch.equal, draft.tokens, other[key].tokens))
        for key, draft in one.items()
    )


@pytest.mark.parametrize("form, lenience", [("literal", 1), ("residual", 1), ("literal", 1.3)])
def test_completions_begin_with_tokens_of_the_last_visit(form, lenience, drafting_run):
    run = drafting_run(form, f"drafts.lenience={lenience}")
    last: dict = {}
    num_whole = num_partly = 0
    for step in range(6):
        completions, metrics = step_of(run)
        drafted = {key: last[key] for key in completions if key in last}
        assert len(drafted) == (GROUP_SIZE * NUM_PROMPTS if step >= 2 else 0)
        verified = sum(min(len(c.token_ids), LONGEST - 1) for c in drafted.values())
        num_accepted = metrics.get("draft_accepted_frac", (0, 0))[0]
        total = sum(len(c.token_ids) for c in completions.values())
        assert metrics["draft_tokens_total"] == (verified, 1) and metrics["draft_dropped_total"] == (0, 1)
        assert metrics["tokens_total"] == (total - num_accepted, 1) and num_accepted <= verified
        num_common = 0
        for key, completion in completions.items():
            ids = completion.token_ids
            assert (END in ids) == (ids[-1] == END) == (completion.finish_reason == "stop")
            assert completion.topk_ids is None and 1 <= len(ids) <= LONGEST
            assert {version.policy_version for version in completion.versions} == {step}
            assert completion.logprobs == pytest.approx(tokens_by(step, ids).logprobs.tolist(), abs=1e-6)
            if key in drafted:
                pairs = list(zip(ids, drafted[key].token_ids))
                num_common += next((i for i, (new, old) in enumerate(pairs) if new != old), len(pairs))
                num_whole += ids == drafted[key].token_ids
        assert num_accepted <= num_common, "kept tokens are those of the draft"
        num_partly += 0 < num_accepted < verified
        state = run.extras["drafts"]
        widths = {draft.tokens.topk_ids.shape[1] for draft in state.cache.values()}
        assert widths == {VOCAB if form == "residual" else 0}
        copy = drafting_run(form)
        base.load("drafts").restore_rank_state(copy, base.load("drafts").rank_state(run))
        assert same_drafts(copy.extras["drafts"].cache, state.cache)
        last |= completions
    assert num_whole and num_partly


def test_a_prompt_that_returns_in_its_step_has_no_draft_of_today(drafting_run):
    """Twelve prompts in fifteen slots, then the groups without variance once more."""
    changes = (f"rollout.prompts_per_step={2 * NUM_PROMPTS + 3}", "zero_variance.max_rounds=2")
    run = drafting_run("literal", *changes, "zero_variance.drop=true", "zero_variance.refill=true")
    groups, outcomes, account = train_rl.sample_step(run)
    metrics = train_rl.metrics_of(run.config, train_rl.batch_of(run, groups))
    assert account["rounds"] == 2 and metrics["draft_tokens_total"] == (0, 1)
    slots = {outcome.prompt_index: slot for slot, outcome in sorted(outcomes.items())}
    assert len(slots) < len(outcomes)
    assert all(draft.slot == slots[prompt] for (prompt, _), draft in run.extras["drafts"].cache.items())


def test_drafts_that_do_not_fit_are_dropped_and_counted(drafting_run):
    run = drafting_run("literal")
    step_of(run), step_of(run)
    run.prompt_ids[0] = [0, 0]  # as by another template
    run.extras["drafts"].cache[1, 2].tokens.ids[0] = VOCAB
    metrics = [step_of(run)[1] for _ in range(2)]
    assert sum(row["draft_dropped_total"][0] for row in metrics) == GROUP_SIZE + 1


def test_draws_differ_from_step_to_step(drafting_run, monkeypatch):
    run = drafting_run("literal", f"rollout.prompts_per_step={2 * NUM_PROMPTS}")
    seen = []

    def reject(draft, today, form, lenience, random):
        seen.append(random.random())
        return 0, today.first(0)

    monkeypatch.setattr(drafts, "begin", reject)
    for _ in range(4):
        step_of(run)
    assert len(seen) == len(set(seen)) == 3 * 2 * NUM_PROMPTS * GROUP_SIZE


@pytest.mark.parametrize("settings, topk", [(("drafts.topk=9",), 9), ((), 0)])
def test_a_vocabulary_that_does_not_fit_is_refused(settings, topk):
    config = make_config("drafts.form=residual", *settings)
    fits = SimpleNamespace(vocab_size=2000)
    base.load("drafts").check_model(config, fits)
    with pytest.raises(ValueError, match="drafts"):
        base.load("drafts").check_model(config, SimpleNamespace(vocab_size=8 if topk else 100_000))


@pytest.mark.parametrize("form", ["literal", "residual"])
def test_tokens_without_a_log_probability_are_rejected(form):
    draft = scored((0, 1, 2), OLD, VOCAB)
    unknown = draft.topk_logprobs * torch.nan
    today = draft._replace(logprobs=torch.full((3,), torch.nan), topk_logprobs=unknown)
    num, beginning = begin(draft, today, form, 1.0, Random(0))
    assert num == len(beginning.ids) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("demo_model")
@pytest.mark.parametrize("settings", [
    ["drafts.form=residual", "algorithm.router_replay=r3"],
    ["drafts.form=literal", "zero_variance.history=true", "zero_variance.probe_size=2",
     "zero_variance.drop=true", "zero_variance.refill=true", "zero_variance.max_rounds=2"],
])  # fmt: skip
def test_a_run_with_drafts_resumes_exactly(settings, tmp_path):
    """Trainer and engine agree on kept, drawn and sampled tokens, with the engine's routes of all of them.

    In the second run probes, dropped and refilled groups have drafts, too.
    """
    settings = [
        *SMALL, *settings, "rollout.check_every=1", "train.num_steps=6", "checkpoint.every=4",
        "train.learning_rate=1e-3", "eval.every=0",
        "data.train=[{path: data/built/tiny/train.jsonl, limit: 16}]",
    ]  # fmt: skip
    straight = tmp_path / "straight"
    trained(*settings, f"run.dir={straight}")
    steps = steps_of(straight)
    assert steps[0]["draft_tokens_total"] == 0 < min(row["draft_tokens_total"] for row in steps[2:])
    assert all(0 < row["draft_accepted_frac"] < 1 and row.get("draft_tail", 0) < 1e-4 for row in steps[2:])
    assert max(row["abs_dlogp"] for row in steps if "abs_dlogp" in row) < 1e-4
    assert_resumes_exactly(straight, 6, *settings, kill=True)
