"""judges.py, parts of reward.py, and data/tiny_judge.py, against transformers and literal loops."""

import json
import math
import random
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import ROOT
from helpers import FakeRanks, make_config, make_prompts

import train_rl
from batch import Completion, Group, collate
from data import tiny, tiny_judge
from data.chains import Chains, habits, sample_sets
from judges import GenerativeJudge, ScalarJudge, build_judge, pairwise_reference, round_robin
from reward import RewardPool, Verdict, verify
from tests import preloaded

RECIPE = tiny_judge.Recipe()


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    """model (its tokenizer alone) and train.jsonl, as data.tiny makes them."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny.build_tokenizer().save_pretrained(folder / "model")
    train, _ = tiny.sample_problems(tiny.Recipe())
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))
    return folder


def build(recipe, tiny_folder, output) -> bool:
    return tiny_judge.build(recipe, tiny_folder / "model", tiny_folder / "train.jsonl", output)


@pytest.fixture(scope="module")
def judge_folder(tiny_folder):
    """A judge that has seen few pairs: its scores differ, that is all that most tests need."""
    recipe = tiny_judge.Recipe(steps=20, num_pairs=200, num_held_out=20)
    assert build(recipe, tiny_folder, tiny_folder / "judge")
    return tiny_folder / "judge"


@pytest.fixture(scope="module")
def tiny_judge_folder(tiny_folder):
    """The judge that `python -m data.tiny_judge` makes."""
    assert build(RECIPE, tiny_folder, tiny_folder / "tiny_judge")
    return tiny_folder / "tiny_judge"


@pytest.fixture(scope="module")
def problems(tiny_folder):
    return tiny_judge.read_problems(tiny_folder / "train.jsonl", "tiny")


@pytest.fixture(scope="module")
def texts(problems):
    """(prompts, completions) of many lengths, with texts that occur twice, out of order."""
    rng = random.Random(0)
    rows = [(p["prompt"] * rng.randint(1, 3), p["answer"][: rng.randint(1, 6)]) for p in problems[:60]]
    rows += rows[::7]
    rng.shuffle(rows)
    return [prompt for prompt, _ in rows], [completion for _, completion in rows]


def one_by_one(folder, prompts, completions, max_tokens=10**6) -> list[float]:
    """Scores by transformers, each text alone and without padding."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for prompt, completion in zip(prompts, completions):
        ids = tokenizer(prompt + completion)["input_ids"][-max_tokens:]
        with torch.no_grad():
            scores.append(model(input_ids=torch.tensor([ids])).logits.item())
    return scores


# ---- verdicts of parts ----------------------------------------------------------------------------------


def test_the_share_of_characters_in_place_is_that_of_a_literal_loop():
    rng, items = random.Random(0), []
    for _ in range(500):
        found, gold = ("".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(2))
        longer, same = max(len(found), len(gold)), 0
        for i in range(longer):
            same += i < len(found) and i < len(gold) and found[i] == gold[i]
        verdict = verify("characters", f" {found}\n", gold)
        assert verdict.reward == same / longer
        assert (verdict.status == "ok") == (verdict.reward == 1.0) == (found == gold)
        assert verify("exact", found, gold).reward == (found == gold), "exact has no parts"
        items.append((found, gold, verdict))
    with RewardPool(1) as pool:
        for key, (found, gold, _) in enumerate(items):
            pool.submit(key, "characters", found, gold)
        assert list(pool.collect().values()) == [verdict for *_, verdict in items]


# ---- the scalar judge --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_scores_are_those_of_each_text_alone_without_padding(batch_size, judge_folder, texts):
    scores = ScalarJudge(judge_folder, batch_size).scores(*texts)
    assert len({round(score, 3) for score in scores}) > 30, "the test needs texts of different scores"
    assert scores == pytest.approx(one_by_one(judge_folder, *texts), abs=2e-5)  # measured 5e-6


def test_a_judge_keeps_no_keys_and_values(judge_folder, texts):
    """They would take gigabytes of a GPU for nothing: each text is read once."""
    judge, outputs = ScalarJudge(judge_folder, batch_size=7), []
    judge.model.register_forward_hook(lambda model, given, output: outputs.append(output))
    judge.scores(*texts)
    assert len(outputs) > 3 and all(output.past_key_values is None for output in outputs)


def test_equal_texts_get_equal_scores_and_tie(judge_folder, texts):
    judge = ScalarJudge(judge_folder, batch_size=3)
    scores = {}
    for text, score in zip(map("".join, zip(*texts)), judge.scores(*texts)):
        assert scores.setdefault(text, score) == score
    assert len(scores) < len(texts[0])
    assert judge.compare(*texts, texts[1]) == [0] * len(texts[0])


@pytest.mark.parametrize("settings", [
    {"pad_token": None},  # of the tokenizer: the end-of-sequence token pads, which the model has to know
    {"padding_side": "left", "truncation_side": "right"},
], ids=["no padding token", "left"])  # fmt: skip
def test_padding_of_other_tokenizers_does_not_change_a_score(settings, judge_folder, texts, tmp_path):
    from transformers import AutoTokenizer

    shutil.copytree(judge_folder, tmp_path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(judge_folder)
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(tmp_path)
    if "pad_token" in settings:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    scores = ScalarJudge(tmp_path, batch_size=16).scores(*texts)
    assert scores == pytest.approx(one_by_one(tmp_path, *texts), abs=2e-5)


def test_a_long_text_loses_its_beginning(judge_folder, texts):
    short = ScalarJudge(judge_folder, batch_size=8, max_tokens=9).scores(*texts)
    assert short == pytest.approx(one_by_one(judge_folder, *texts, max_tokens=9), abs=2e-5)
    assert short != pytest.approx(one_by_one(judge_folder, *texts), abs=1e-2)


def test_a_rank_without_completions_asks_no_judge(judge_folder, monkeypatch):
    from transformers import AutoTokenizer

    FakeRanks(1).install(monkeypatch)
    run = SimpleNamespace(
        config=make_config("reward.judge=scalar", f"reward.judge_path={judge_folder}"), judge=AskedJudge(),
        tokenizer=AutoTokenizer.from_pretrained(judge_folder), state=SimpleNamespace(step=0),
    )  # fmt: skip
    batch = collate([], [], [])
    train_rl.add_rewards(run, batch)
    assert batch.rewards.shape == batch.valid.shape == (0,) and run.judge.asked == []


class AskedJudge:
    """Stands in for a ScalarJudge: it keeps what it is asked, and scores a text by its length."""

    def __init__(self):
        self.asked = []

    def scores(self, prompts: list[str], texts: list[str]) -> list[float]:
        self.asked.append((prompts, texts))
        return [len(text) - 2.0 for text in texts]


def test_a_judge_gets_prompts_and_plain_texts_and_a_share_of_the_reward(judge_folder, monkeypatch):
    """Texts without the end of the sequence; a reward of 0.7 verifier and 0.3 sigmoid of the score."""
    from transformers import AutoTokenizer

    FakeRanks(1).install(monkeypatch)
    tokenizer, texts = AutoTokenizer.from_pretrained(judge_folder), ["1", "12", "305", "4"]
    ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    assert tokenizer.decode(ids[0]) != texts[0], "the end would be read by the judge"
    completions = [Completion(row, [-1.0] * len(row), "stop", 0.0) for row in ids]
    verdicts = [Verdict(1.0, "ok"), Verdict(0.0, "wrong"), Verdict(0.5, "wrong"), Verdict(0.0, "wrong")]
    groups = [Group(i, i, completions[2 * i :][:2], verdicts[2 * i :][:2]) for i in (0, 1)]
    prompts = make_prompts(2)
    batch = collate(groups, prompts, [[1], [2]])
    config = make_config(
        "reward.judge=scalar", f"reward.judge_path={judge_folder}", "reward.judge_weight=0.3"
    )
    run = SimpleNamespace(
        config=config, judge=AskedJudge(), tokenizer=tokenizer, state=SimpleNamespace(step=0)
    )
    train_rl.add_rewards(run, batch)
    of_rows = [prompts[row].text for row in (0, 0, 1, 1)]
    assert run.judge.asked == [(of_rows, texts)]
    expected = [
        0.7 * verifier + 0.3 / (1 + math.exp(2 - len(text)))
        for verifier, text in zip([1.0, 0.0, 0.5, 0.0], texts)
    ]
    assert batch.rewards.tolist() == pytest.approx(expected) and batch.valid.all()


def test_the_margin_decides_what_ties(judge_folder, texts):
    judge = ScalarJudge(judge_folder)
    prompts, firsts = texts
    seconds = ["0" + first[1:] for first in firsts]
    a, b = judge.scores(prompts, firsts), judge.scores(prompts, seconds)
    for margin in (0.0, 0.3, 1e9):
        expected = []
        for x, y in zip(a, b):
            expected.append(0 if abs(x - y) <= margin else 1 if x > y else -1)
        with_margin = build_judge("scalar", str(judge_folder), margin=margin)
        assert with_margin.compare(prompts, firsts, seconds) == expected
        assert with_margin.compare(prompts, seconds, firsts) == [-sign for sign in expected]
        assert (set(expected) == {0}) == (margin == 1e9)
    assert judge.scores([], []) == judge.compare([], [], []) == []


def test_a_gap_of_exactly_the_margin_ties_and_not_finite_scores_are_handed_on(judge_folder):
    judge = ScalarJudge(judge_folder)
    fixed = {"a": 1.0, "b": 0.5, "c": math.inf, "d": math.nan}
    judge.scores = lambda prompts, completions: [fixed[completion] for completion in completions]
    judge.margin = 0.5
    assert judge.compare(["p"] * 4, "aaab", "bbba") == [0, 0, 0, 0]
    judge.margin = 0.25
    assert judge.compare(["p"] * 2, "ac", "ba") == [1, 1]
    assert all(map(math.isnan, judge.compare(["p"] * 2, "da", "cd"))), "a score that is none makes no tie"
    assert math.isnan(round_robin(judge, ["p"] * 3, "abd", [0, 0, 0])[0])
    del judge.scores
    judge.model.score.weight.fill_(math.inf)
    assert not any(map(math.isfinite, judge.scores(["1+1=", "1+1="], ["2", "3"])))


def test_folders_that_are_no_scalar_judge_are_refused(judge_folder, tiny_folder, tmp_path):
    from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForCausalLM

    with pytest.raises(ValueError, match="nowhere"):
        build_judge("scalar", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"config\.json"):
        build_judge("scalar", "random:shuffle")
    with pytest.raises(ValueError, match=r"config\.json"):
        build_judge("scalar", str(tmp_path))
    shutil.copytree(tiny_folder / "model", tmp_path, dirs_exist_ok=True)
    two = {"num_labels": 2, "ignore_mismatched_sizes": True}
    AutoModelForSequenceClassification.from_pretrained(judge_folder, **two).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="2 labels"):
        build_judge("scalar", str(tmp_path))
    config = Qwen3Config.from_pretrained(judge_folder, num_labels=1)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)  # one label, but a head for words
    with pytest.raises(ValueError, match="head"):
        build_judge("scalar", str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        build_judge("scalar", str(tmp_path))


# ---- the generative judge ----------------------------------------------------------------------------------


@pytest.mark.parametrize("answer, sign, num_unreadable", [
    ("The first carries, the second does not.\nVerdict: Better", 1, 0),
    ("**Verdict:** **Worse**.", -1, 0),
    ("Verdict: Tie\n", 0, 0),
    ("Better", 1, 0),
    ("Verdict: Better. No, I overlooked a carry.\nVerdict: Worse", -1, 0),
    ("Verdict: Worse\nVerdict: Tie", 0, 0),
    ("the first is better than the second, which is worse", 0, 1),
    ("I am asked for Verdict: Better|Tie|Worse", 0, 1),
    ("Betterment", 0, 1),
    ("", 0, 1),
])  # fmt: skip
def test_the_last_verdict_of_an_answer_counts(answer, sign, num_unreadable):
    judge = GenerativeJudge(lambda prompts: [answer] * len(prompts))
    assert judge.compare(["p"], ["a"], ["b"]) == [sign] and judge.num_unreadable == num_unreadable
    assert judge.compare(["p"] * 3, ["a"] * 3, ["b"] * 3) == [sign] * 3
    assert judge.num_unreadable == 4 * num_unreadable


def test_the_question_holds_prompt_and_answers_and_asks_for_reasons_first():
    asked = []
    assert GenerativeJudge(None).compare([], [], []) == [], "nothing to ask: the model is left alone"
    judge = GenerativeJudge(lambda prompts: asked.extend(prompts) or ["Verdict: Tie"] * len(prompts))
    assert judge.compare(["{p} \\boxed{}"], ["{first}"], ["100 %s"]) == [0]
    (question,) = asked
    parts = ("{p} \\boxed{}", "{first}", "100 %s", "step by step", "Verdict:")
    places = [question.index(part) for part in parts]
    assert places == sorted(places) and question.endswith("Verdict: Better|Tie|Worse")
    GenerativeJudge(judge.generate, "{second}/{first}/{prompt}/{{}}").compare(["p"], ["a"], ["b"])
    assert asked[-1] == "b/a/p/{}"


def test_answers_and_columns_have_to_match():
    for num in (0, 1, 3):
        judge = GenerativeJudge(lambda prompts, num=num: ["Verdict: Tie"] * num)
        with pytest.raises(ValueError, match=f"{num} answers"):
            judge.compare(["p", "p"], ["a", "a"], ["b", "b"])
    for columns in ((["p"], ["a", "a"], ["b", "b"]), (["p", "p"], ["a"], ["b", "b"]), (["p"], ["a"], [])):
        with pytest.raises(ValueError):
            judge.compare(*columns)
    with pytest.raises(ValueError):
        pairwise_reference(judge, ["p", "p"], ["a", "b"], ["c"])
    with pytest.raises(ValueError):
        round_robin(judge, ["p", "p"], ["a", "b"], [0])


def test_a_function_is_imported_by_name(monkeypatch):
    module = ModuleType("my_judges")
    module.ask = lambda prompts: ["Verdict: Worse"] * len(prompts)
    monkeypatch.setitem(sys.modules, "my_judges", module)
    assert build_judge("generative", "my_judges:ask").compare(["p"], ["a"], ["b"]) == [-1]
    for path, reason in (("my_judges:tell", "tell"), ("no_judges:ask", "no_judges"), ("a b:c", "a b:c")):
        with pytest.raises(ValueError, match=f"'{path}'.*{reason}"):
            build_judge("generative", path)
    for path in ("nowhere", "my_judges"):
        with pytest.raises(ValueError, match=f"'{path}'.*config.json"):
            build_judge("generative", path)


# Two ranks, each with the policy's engine and a judge of another size; the judge's load differs by rank.
SECOND_ENGINE = """
import os, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from data.tiny import Recipe, build_policy, build_tokenizer
from judges import build_judge
from moe_model import hf_tensors, init_deepspeed, save_hf
from rollout import Request, RolloutEngine, RolloutSettings
rank, folder = int(os.environ["RANK"]), sys.argv[1]
init_deepspeed()
tokenizer = build_tokenizer()
policy = build_policy(Recipe(initializer_range=0.2), len(tokenizer))
settings = RolloutSettings(max_num_seqs=64, dtype="float32", kv_cache_gib=0.25, capture_routes="off")
engine = RolloutEngine(folder + "/policy", 64, settings)
judge = build_judge("generative", folder + "/judge", batch_size=4, max_tokens=20)
def greedy(name, texts, num):
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype=torch.float32)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    options = {"max_new_tokens": num, "do_sample": False}
    return [model.generate(torch.tensor([row]), **options)[0, len(row):].tolist() for row in ids]
prompts = ["21   +43   =", "9    +9    =", "123  +456  =", "x", "99999+99999="]
expected = greedy("policy", prompts, 12)
wanted = tokenizer.batch_decode(greedy("judge", [f"<{p}>" for p in prompts], 20), skip_special_tokens=True)
requests = [Request(tokenizer(prompt)["input_ids"], 0, 0.0, 12) for prompt in prompts]
for step in range(4):
    engine.sync(hf_tensors(policy), step)
    assert [completion.token_ids for completion in engine.generate(requests, step)] == expected
    num = (step + 3 * rank) % 5
    assert judge.generate(prompts[:num]) == wanted[:num]
long = judge.generate(["0" * 5000 + "1+1"])  # more than the context
assert len(long) == 1 and len(set(wanted)) > 2
os.write(1, b"exact\\n")
"""


@pytest.mark.slow
def test_a_generative_folder_beside_the_policys_engine_gives_the_text_of_transformers(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from moe_model import save_hf

    tokenizer = tiny.build_tokenizer()
    save_hf(tiny.build_policy(tiny.Recipe(initializer_range=0.2), len(tokenizer)), tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "judge")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=1, head_dim=32, max_position_embeddings=256,
        initializer_range=0.2, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "judge")
    (tmp_path / "ranks.py").write_text(SECOND_ENGINE)
    result = preloaded.run(2, tmp_path / "ranks.py", tmp_path)
    assert result.returncode == 0 and result.stdout.count("exact") == 2, result.stderr[-3000:]


# ---- verdicts of judges to rewards -------------------------------------------------------------------------


def fixed_opinion(first: str, second: str) -> int:
    """An arbitrary judge, which favours the first of a pair now and then, and ties."""
    return random.Random(first + "|" + second).choice((1, 1, 0, -1))


class FixedJudge:
    """fixed_opinion as a judge that records what it is asked."""

    def __init__(self):
        self.asked = []

    def compare(self, prompts, firsts, seconds):
        self.asked += zip(prompts, firsts, seconds)
        return [fixed_opinion(first, second) for first, second in zip(firsts, seconds)]


@pytest.mark.parametrize("seed", range(5))
def test_round_robin_is_a_literal_double_loop(seed):
    rng = random.Random(seed)
    num = 30
    group_index = [rng.choice([3, 0, 7, 11, 40 + i]) for i in range(num)]
    prompts = [f"prompt {group}" for group in group_index]
    completions = [f"answer {rng.randint(0, 9)}" for _ in range(num)]  # some are equal
    expected = []
    for i in range(num):
        total, count = 0.0, 0
        for j in range(num):
            if j == i or group_index[j] != group_index[i]:
                continue
            first, second = min(i, j), max(i, j)
            sign = fixed_opinion(completions[first], completions[second])
            sign = sign if first == i else -sign
            total += {1: 1.0, 0: 0.5, -1: 0.0}[sign]
            count += 1
        expected.append(total / count if count else 0.5)
    assert 1 in map(group_index.count, group_index), "the test needs a group of one"
    judge = FixedJudge()
    assert round_robin(judge, prompts, completions, group_index) == pytest.approx(expected, rel=1e-12)
    pairs = [
        (prompts[i], completions[i], completions[j])
        for j in range(num)
        for i in range(j)
        if group_index[i] == group_index[j]
    ]
    assert sorted(judge.asked) == sorted(pairs), "each pair once"


def test_round_robin_of_nothing_and_of_one():
    assert round_robin(FixedJudge(), [], [], []) == []
    assert round_robin(FixedJudge(), ["p"], ["a"], [5]) == [0.5]


def test_pairwise_reference_is_the_sign_against_the_reference():
    judge, rng = FixedJudge(), random.Random(0)
    completions, references = ([str(rng.random()) for _ in range(40)] for _ in range(2))
    rewards = pairwise_reference(judge, ["p"] * 40, completions, references)
    assert rewards == [float(fixed_opinion(a, b)) for a, b in zip(completions, references)]
    assert set(rewards) == {1.0, 0.0, -1.0} and all(isinstance(reward, float) for reward in rewards)


def test_the_scalar_judge_serves_both(judge_folder, problems):
    judge = build_judge("scalar", str(judge_folder))
    group = problems[:6]
    prompts = [problem["prompt"] for problem in group for _ in range(2)]
    answers = [problem["answer"] for problem in group for _ in range(2)]
    completions = [answer if i % 2 else "9" * len(answer) for i, answer in enumerate(answers)]
    scores = one_by_one(judge_folder, prompts, completions)
    rewards = round_robin(judge, prompts, completions, [i // 2 for i in range(12)])
    assert rewards == [1.0 * (scores[i] > scores[i ^ 1]) for i in range(12)]
    expected = [0.0 if i % 2 else math.copysign(1.0, scores[i] - scores[i + 1]) for i in range(12)]
    assert pairwise_reference(judge, prompts, completions, answers) == expected


# ---- the tiny judge ----------------------------------------------------------------------------------------


def test_sums_with_all_carries_are_right_and_mistakes_are_wrong(problems):
    import numpy as np

    rng = np.random.default_rng(0)
    forgot_all = 0
    for problem in problems[:500]:
        a, b = (int(operand.strip("= ")[::-1]) for operand in problem["prompt"].split("+"))
        digits = len(problem["columns"])
        written, carrying = tiny_judge.add(problem["columns"], set())
        assert written == problem["answer"] == f"{a + b:0{digits + 1}d}"[::-1]
        tens = [10 ** (i + 1) for i in range(digits)]
        assert carrying == [i for i, ten in enumerate(tens) if a % ten + b % ten >= ten]
        assert tiny_judge.add(problem["columns"], set(range(9)))[0] == tiny.answer_without_carry(a, b, digits)
        mistakes = {tiny_judge.mistake(problem, RECIPE, rng) for _ in range(8)}
        assert problem["answer"] not in mistakes and {len(m) for m in mistakes} == {digits + 1}
        forgot_all += tiny.answer_without_carry(a, b, digits) in mistakes
    assert 300 < forgot_all < 500


@pytest.mark.slow
def test_the_tiny_judge_is_as_wrong_as_reward_models_are(tiny_judge_folder, problems):
    """By its own record, and by a literal loop over groups of its own, half of them right."""
    import numpy as np

    record = json.loads((tiny_judge_folder / "recipe.json").read_text())
    judge, held_out = ScalarJudge(tiny_judge_folder), problems[: record["num_held_out"]]
    assert 0.70 <= record["pairwise_agreement"] <= 0.80  # measured 0.76 to 0.77, three seeds
    assert 0.05 < record["inverted_frac"] < 0.40  # measured 0.28 to 0.29, three seeds
    assert record["pairwise_agreement"] == tiny_judge.pairwise_agreement(judge, held_out, RECIPE)
    rng, inverted, near, num, num_near = np.random.default_rng(9), 0, 0, 0, 0
    for problem in held_out[:400]:
        right = [rng.random() < 0.5 for _ in range(8)]
        completions = [problem["answer"] if ok else tiny_judge.mistake(problem, RECIPE, rng) for ok in right]
        if len(set(right)) == 1:
            continue
        scores = judge.scores([problem["prompt"]] * 8, completions)
        mean, std = sum(scores) / 8, np.std(scores, ddof=1)
        for ok, score in zip(right, scores):
            is_inverted = score < mean if ok else score > mean
            is_near = abs(score - mean) < std / 4
            inverted, num = inverted + is_inverted, num + 1
            near, num_near = near + (is_inverted and is_near), num_near + is_near
    assert abs(inverted / num - record["inverted_frac"]) < 0.08
    assert near / num_near > inverted / num, "its order says least near the mean of a group"


@pytest.mark.slow
def test_the_held_out_problems_were_not_trained_on(problems, tiny_judge_folder):
    record = json.loads((tiny_judge_folder / "recipe.json").read_text())
    assert record["num_held_out"] == RECIPE.num_held_out < len(problems) / 4
    assert len({problem["prompt"] for problem in problems}) == len(problems)


def test_the_build_is_deterministic_and_cached(tiny_folder, tmp_path):
    recipe = tiny_judge.Recipe(steps=5, num_pairs=100, num_held_out=20)
    weights = []
    for name in ("one", "two"):
        torch.manual_seed(len(name) + len(weights))  # whatever the caller did to the generator
        assert build(recipe, tiny_folder, tmp_path / name)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert not build(recipe, tiny_folder, tmp_path / "one")
    other = tiny_judge.Recipe(seed=1, steps=5, num_pairs=100, num_held_out=20)
    assert build(other, tiny_folder, tmp_path / "one")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() != weights[0]
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["one", "two"]


@pytest.fixture(scope="module")
def chains_folder(tmp_path_factory):
    """model (its tokenizer alone) and train.jsonl, as data.tiny makes them of short chains."""
    folder = tmp_path_factory.mktemp("chains")
    tiny.build_tokenizer().save_pretrained(folder / "model")
    rows = sample_sets(Chains(long_steps=(5, 9), num_train=200, num_test=0, num_longer=0), seed=0)["train"]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_wrong_chains_miss_steps_by_their_habits(chains_folder):
    """Step by step by hand: a step is missed by its habitual amount, and the chain goes on from it."""
    import numpy as np

    rng, recipe, wrong = np.random.default_rng(0), tiny_judge.RECIPES["chains"], habits(Chains(), 0)
    missed, taken = Counter(), Counter()
    for problem in tiny_judge.read_problems(chains_folder / "train.jsonl", "chains"):
        before, num_missed = problem["prompt"].removesuffix(";"), 0
        states = tiny_judge.mistake(problem, recipe, rng).split(";")
        assert len(states) == problem["difficulty"] == len(problem["answer"].split(";"))
        for state, reference in zip(states, problem["answer"].split(";")):
            assert state[:-1] == reference[:-1]
            operation, digit, value = before[1], int(before[2]), int(before[-1])
            right = {"+": value + digit, "-": value - digit, "*": value * digit}[operation] % 10
            is_missed = int(state[-1]) != right
            assert not is_missed or int(state[-1]) == (right + wrong[before[1:3]][1]) % 10
            num_missed += is_missed
            missed[before[1:3]] += is_missed
            taken[before[1:3]] += 1
            before = state
        assert num_missed >= 1
    strong, never = (
        sum(missed[name] for name in names) / sum(taken[name] for name in names)
        for names in (
            [name for name, (frac, _) in wrong.items() if frac > 0.5],
            [name for name, (frac, _) in wrong.items() if frac == 0],
        )
    )
    assert strong > 0.6 and 0.1 < never < 0.4, "one step is missed whatever its operation"


@pytest.mark.parametrize("task", ["tiny", "chains"])
def test_the_loss_of_pairs_is_that_of_scores_of_their_beginnings(task, tiny_folder, chains_folder, tmp_path):
    """ScalarJudge scores each beginning of a text alone; a pair counts at ends of steps once it differs."""
    import numpy as np

    recipe = replace(tiny_judge.RECIPES[task], steps=3, num_pairs=100, num_held_out=10, hidden_size=16)
    folder = chains_folder if task == "chains" else tiny_folder
    assert tiny_judge.build(recipe, folder / "model", folder / "train.jsonl", tmp_path / "judge")
    judge, rng, losses = ScalarJudge(tmp_path / "judge"), np.random.default_rng(1), []
    problems = tiny_judge.read_problems(folder / "train.jsonl", task)[:6]
    pairs = [(p["prompt"] + p["answer"], p["prompt"] + tiny_judge.mistake(p, recipe, rng)) for p in problems]
    for right, wrong in pairs:
        for end in range(1, len(right) + 1):
            if right[:end] != wrong[:end] and right[end : end + 1] in (";", ""):
                chosen, rejected = judge.scores([right[:end], wrong[:end]], ["", ""])
                losses.append(math.log1p(math.exp(rejected - chosen)))
    assert len(losses) == 6 if task == "tiny" else len(losses) > 10
    texts = [text for side in zip(*pairs) for text in side]
    loss = tiny_judge.pair_loss(judge.model, tiny.build_tokenizer(), texts)
    assert loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)  # float32


def test_a_judge_of_chains_knows_short_chains_alone(chains_folder, tmp_path, monkeypatch):
    seen = []
    pair_loss = tiny_judge.pair_loss
    monkeypatch.setattr(
        tiny_judge, "pair_loss", lambda m, t, texts: seen.extend(texts) or pair_loss(m, t, texts)
    )
    recipe = replace(tiny_judge.RECIPES["chains"], steps=4, num_pairs=200, num_held_out=40, max_difficulty=4)
    assert tiny_judge.build(
        recipe, chains_folder / "model", chains_folder / "train.jsonl", tmp_path / "judge"
    )
    problems = tiny_judge.read_problems(chains_folder / "train.jsonl", "chains")
    known = {problem["prompt"] for problem in problems[40:] if problem["difficulty"] <= 4}
    assert {text.split(";")[0] + ";" for text in seen} <= known and len(seen) == 4 * 2 * recipe.batch_size
    (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "b+3=4;", "answer": "7"}))
    with pytest.raises(ValueError, match="row 1: .*chain"):
        tiny_judge.read_problems(tmp_path / "bad.jsonl", "chains")


@pytest.mark.slow
def test_the_command_takes_wider_operands_and_names_bad_rows(tiny_folder, tmp_path):
    train, _ = tiny.sample_problems(tiny.Recipe(max_digits=7, train_per_difficulty=60, test_per_difficulty=5))
    (tmp_path / "wide.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))
    command = [sys.executable, "-m", "data.tiny_judge", "--steps", "3", "--pairs", "64"]
    command += ["--model", tiny_folder / "model", "--train", tmp_path / "wide.jsonl"]
    command += ["--output", tmp_path / "judge"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and "prefers the right completion in" in result.stderr, result.stderr
    judge = build_judge("scalar", str(tmp_path / "judge"))
    assert len(judge.scores(["1234567+7654321="], ["88888880"])) == 1
    with pytest.raises(ValueError, match="no such file"):
        tiny_judge.read_problems(tmp_path / "nothing.jsonl", "tiny")
    with pytest.raises(ValueError, match=r"nothing: holds no tokenizer\.json"):
        tiny_judge.build(RECIPE, tmp_path / "nothing", tmp_path / "wide.jsonl", tmp_path / "other")
    for prompt, answer in (("1-1=", "2"), ("12+1=", "13"), ("1+1=", "2"), ("What is 2?", "2")):
        (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": prompt, "answer": answer}))
        with pytest.raises(ValueError, match="row 1: .*addition"):
            tiny_judge.read_problems(tmp_path / "bad.jsonl", "tiny")
