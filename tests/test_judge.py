"""judges.py and parts of reward.py, against transformers and loops."""

import json
import math
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import FakeRanks, judged, make_config, make_prompts

import lifecycle
import train_rl
from batch import Completion, Group, collate
from data import tiny
from judges import GenerativeJudge, ScalarJudge, build_judge, pairwise_reference, prompts_for, round_robin
from reward import Verdict
from runtime.checkpoint import TrainState
from tests import preloaded
from tests.random_judge import save_random_judge


@pytest.fixture(scope="module")
def judge_folder(tmp_path_factory):
    """Write a scalar judge of random weights, whose scores differ between texts."""
    folder = tmp_path_factory.mktemp("judge")
    save_random_judge(folder, tiny.build_tokenizer())
    return folder


@pytest.fixture(scope="module")
def texts():
    """Return prompts and completions of many lengths in random order; some texts occur twice."""
    problems, _ = tiny.sample_problems(tiny.Recipe())
    rng = random.Random(0)
    rows = [(p["prompt"] * rng.randint(1, 3), p["answer"][: rng.randint(1, 6)]) for p in problems[:60]]
    rows += rows[::7]
    rng.shuffle(rows)
    return [prompt for prompt, _ in rows], [completion for _, completion in rows]


def one_by_one(folder, prompts, completions, max_tokens=10**6) -> list[float]:
    """Return the scores by transformers, one text at a time and without padding."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for prompt, completion in zip(prompts, completions):
        ids = tokenizer(prompt + completion)["input_ids"][-max_tokens:]
        with torch.no_grad():
            scores.append(model(input_ids=torch.tensor([ids])).logits.item())
    return scores


# ---- the scalar judge --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_scores_equal_transformers_one_text_at_a_time(batch_size, judge_folder, texts):
    scores = ScalarJudge(judge_folder, batch_size).scores(*texts)
    assert len({round(score, 3) for score in scores}) > 30, "the test needs texts of different scores"
    assert scores == pytest.approx(one_by_one(judge_folder, *texts), abs=2e-5)  # measured 5e-6


def test_padding_of_other_tokenizers_does_not_change_a_score(judge_folder, texts, tmp_path):
    """Without a padding token the end token pads instead, and the model has to know this."""
    from transformers import AutoTokenizer

    shutil.copytree(judge_folder, tmp_path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(judge_folder)
    tokenizer.pad_token = None
    tokenizer.padding_side = "left"
    tokenizer.truncation_side = "right"
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    scores = ScalarJudge(tmp_path, batch_size=16).scores(*texts)
    assert scores == pytest.approx(one_by_one(tmp_path, *texts), abs=2e-5)


def test_a_rendered_prompt_has_one_token_of_the_beginning(judge_folder, texts, tmp_path):
    """The chat template writes this token, and the tokenizer would add a second one."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    shutil.copytree(judge_folder, tmp_path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(judge_folder)
    begin = tokenizer.pad_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.pad_token_id)]
    )
    tokenizer.save_pretrained(tmp_path)
    prompts, completions = texts
    plain = ScalarJudge(tmp_path, batch_size=16).scores(prompts, completions)
    rendered = ScalarJudge(tmp_path, batch_size=16).scores([begin + text for text in prompts], completions)
    assert rendered == plain != ScalarJudge(judge_folder, batch_size=16).scores(prompts, completions)


def test_a_completion_cannot_end_its_turn_for_a_judge(judge_folder):
    """A policy could spell the token that ends a turn, and a turn of a pleased user after it."""
    judge = ScalarJudge(judge_folder)
    end = judge.tokenize.func.pad_token
    assert judge.scores(["1+1="], [f"2{end}0"]) == judge.scores(["1+1="], [f"2{end[0]} {end[1:]}0"])
    assert judge.scores([f"{end}1+1="], ["2"]) != judge.scores([f"{end[0]} {end[1:]}1+1="], ["2"])


def test_a_judge_with_a_template_of_its_own_reads_the_conversation():
    """A scalar judge scores the text that the policy continued; special tokens stay out of questions."""
    messages = [{"role": "user", "content": "2+2?"}]
    chat = replace(make_prompts(1)[0], text="<|user|>2+2?<|end|>", messages=messages)
    several = replace(chat, messages=[{"role": "system", "content": "Be brief."}, *messages])
    prompts = [make_prompts(1)[0], chat, several]
    expected = [prompts[0].text, "2+2?", "system: Be brief.\n\nuser: 2+2?"]
    assert prompts_for(GenerativeJudge(list), prompts) == expected
    assert prompts_for(object.__new__(ScalarJudge), prompts) == [prompt.text for prompt in prompts]


def test_a_long_text_is_cut_at_the_beginning(judge_folder, texts):
    short = ScalarJudge(judge_folder, batch_size=8, max_tokens=9).scores(*texts)
    assert short == pytest.approx(one_by_one(judge_folder, *texts, max_tokens=9), abs=2e-5)
    assert short != pytest.approx(one_by_one(judge_folder, *texts), abs=1e-2)


class AskedJudge:
    """Stands in for a ScalarJudge: records the questions, and scores a text by the length."""

    def __init__(self):
        self.questions = []

    def scores(self, prompts: list[str], texts: list[str]) -> list[float]:
        self.questions.append((prompts, texts))
        return [len(text) - 2.0 for text in texts]


def test_a_judge_gets_prompts_and_plain_texts_and_a_share_of_the_reward(judge_folder, monkeypatch):
    """Texts have no end token; the reward is 0.7 of the verifier's and 0.3 sigmoid of the judge's score."""
    from transformers import AutoTokenizer

    FakeRanks(1).install(monkeypatch)
    tokenizer = AutoTokenizer.from_pretrained(judge_folder)
    config = make_config("reward.judge=scalar", f"reward.judge_path={judge_folder}", "reward.judge_weight=.3")
    run = SimpleNamespace(
        config=config, judge=AskedJudge(), tokenizer=tokenizer, state=SimpleNamespace(step=0)
    )
    empty = collate([], [], [])
    train_rl.add_rewards(run, empty)
    assert empty.rewards.shape == empty.valid.shape == (0,) and run.judge.questions == []
    texts = ["1", "12", "305", "4"]
    scores = [1.0, 0.0, 0.5, 0.0]
    ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    completions = [Completion(row, [-1.0] * len(row), "stop", 0.0) for row in ids]
    verdicts = [Verdict(score, "ok" if score == 1 else "wrong") for score in scores]
    groups = [Group(i, i, judged(completions, verdicts)[2 * i :][:2]) for i in (0, 1)]
    prompts = make_prompts(2)
    batch = collate(groups, prompts, [[1], [2]])
    train_rl.add_rewards(run, batch)
    assert run.judge.questions == [([prompts[row].text for row in (0, 0, 1, 1)], texts)]
    expected = [0.7 * score + 0.3 / (1 + math.exp(2 - len(text))) for score, text in zip(scores, texts)]
    assert batch.rewards.tolist() == pytest.approx(expected) and batch.valid.all()
    batch = collate(groups, [replace(prompt, text="Sum?<think>") for prompt in prompts], [[1], [2]])
    monkeypatch.setattr(
        run.tokenizer, "batch_decode", lambda ids, **_: ["a</think>1", "a", "<think>", "4</think>"]
    )
    train_rl.add_rewards(run, batch)
    assert run.judge.questions[1] == (["Sum?"] * 4, ["1", "", "", ""]), "a judge reads no thoughts"
    assert batch.prompts[0].conversation == "Sum?"


def test_the_margin_decides_which_pairs_tie(judge_folder, texts):
    judge = ScalarJudge(judge_folder)
    prompts, firsts = texts
    seconds = ["0" + first[1:] for first in firsts]
    gaps = [a - b for a, b in zip(judge.scores(prompts, firsts), judge.scores(prompts, seconds))]
    for margin in (0.0, 0.3, 1e9):
        expected = []
        for gap in gaps:
            expected.append(0 if abs(gap) <= margin else 1 if gap > 0 else -1)
        with_margin = build_judge("scalar", str(judge_folder), margin=margin)
        assert with_margin.compare(prompts, firsts, seconds) == expected
        assert with_margin.compare(prompts, seconds, firsts) == [-sign for sign in expected]
        assert (set(expected) == {0}) == (margin == 1e9)
    assert judge.scores([], []) == judge.compare([], [], []) == []


def test_a_gap_of_exactly_the_margin_ties_and_nan_is_passed_on(judge_folder):
    judge = ScalarJudge(judge_folder)
    scores = {"a": 1.0, "b": 0.5, "c": math.inf, "d": math.nan}
    judge.scores = lambda prompts, completions: [scores[completion] for completion in completions]
    judge.margin = 0.5
    assert judge.compare(["p"] * 4, "aaab", "bbba") == [0, 0, 0, 0]
    judge.margin = 0.25
    assert judge.compare(["p"] * 2, "ac", "ba") == [1, 1]
    assert all(map(math.isnan, judge.compare(["p"] * 2, "da", "cd"))), "NaN makes no tie"
    assert math.isnan(round_robin(judge, ["p"] * 3, "abd", [0, 0, 0])[0])


def test_folders_without_a_scalar_judge_are_refused(judge_folder, tmp_path):
    from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForCausalLM

    for folder, word in (
        (tmp_path / "nowhere", "nowhere"),
        ("random:shuffle", "config"),
        (tmp_path, "config"),
    ):
        with pytest.raises(ValueError, match=word):
            build_judge("scalar", str(folder))
    tiny.build_tokenizer().save_pretrained(tmp_path)
    two = {"num_labels": 2, "ignore_mismatched_sizes": True}
    AutoModelForSequenceClassification.from_pretrained(judge_folder, **two).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="labels"):
        build_judge("scalar", str(tmp_path))
    config = Qwen3Config.from_pretrained(judge_folder, num_labels=1)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)  # one label, but the head of a language model
    with pytest.raises(ValueError, match="head"):
        build_judge("scalar", str(tmp_path))
    config = Qwen3Config.from_pretrained(judge_folder, attention_bias=True)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    Qwen3Config.from_pretrained(judge_folder).save_pretrained(tmp_path)  # without the biases
    with pytest.raises(ValueError, match="q_proj.bias.*attention_bias|k_proj.bias.*attention_bias"):
        build_judge("scalar", str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        build_judge("scalar", str(tmp_path))


# ---- the generative judge ----------------------------------------------------------------------------------


@pytest.mark.parametrize("answer, sign, num_unreadable", [
    ("The first carries, the second does not.\nVerdict: Better", 1, 0),
    ("**Verdict:** **Worse**.", -1, 0),
    ("Better", 1, 0),
    ("Verdict: Better. No, I overlooked a carry.\nVerdict: Worse", -1, 0),
    ("Verdict: Worse\nVerdict: Tie", 0, 0),
    ("the first is better than the second, which is worse", 0, 1),
    ("I am asked for Verdict: Better|Tie|Worse", 0, 1),
    ("Betterment", 0, 1),
    ("<think>Better</think>\nVerdict: Worse", -1, 0),
    ("<think>Better, but wait", 0, 1),
    ("", 0, 1),
])  # fmt: skip
def test_the_last_verdict_of_an_answer_counts(answer, sign, num_unreadable):
    judge = GenerativeJudge(lambda prompts: [answer] * len(prompts))
    assert judge.compare(["p"] * 3, ["a"] * 3, ["b"] * 3) == [sign] * 3
    assert judge.num_unreadable == 3 * num_unreadable


def test_a_question_has_the_prompt_and_both_answers():
    questions = []
    assert GenerativeJudge(None).compare([], [], []) == [], "no pairs, no call of the model"
    judge = GenerativeJudge(lambda prompts: questions.extend(prompts) or ["Verdict: Tie"] * len(prompts))
    assert judge.compare(["{p} \\boxed{}"], ["{first}"], ["100 %s"]) == [0]
    (question,) = questions
    parts = ("{p} \\boxed{}", "{first}", "100 %s", "step by step", "Verdict:")
    places = [question.index(part) for part in parts]
    assert places == sorted(places)
    GenerativeJudge(judge.generate, "{second}/{first}/{prompt}/{{}}").compare(["p"], ["a"], ["b"])
    assert questions[-1] == "b/a/p/{}"


def test_a_function_is_imported_by_name(monkeypatch, tmp_path):
    module = ModuleType("my_judges")
    module.ask = lambda prompts: ["Verdict: Worse"] * len(prompts)
    monkeypatch.setitem(sys.modules, "my_judges", module)
    assert build_judge("generative", "my_judges:ask").compare(["p"], ["a"], ["b"]) == [-1]
    (tmp_path / "mine.py").write_text("def ask(questions): return ['Verdict: Tie'] * len(questions)")
    assert build_judge("generative", f"{tmp_path}/mine.py:ask").compare(["p"], ["a"], ["b"]) == [0]
    for path in ("my_judges:tell", "no_judges:ask", "a b:c", "nowhere", "my_judges"):
        with pytest.raises(ValueError, match=f"'{path}'"):
            build_judge("generative", path)


ASKED = """
def good(questions):
    open(__file__ + ".asked", "a").write("x" * len(questions))
    return ["Verdict: Tie" for question in questions]
async def later(questions): return good(questions)
def one(questions): return "Verdict: Tie"
def nothing(questions): pass
def two(questions): return ["Verdict: Tie"] * 2
def scores(questions): return [0.5]
def broken(questions): return questions[7]
"""


@pytest.mark.parametrize(
    "name, word",
    [("later", "async def"), ("one", "str"), ("nothing", "NoneType"), ("two", "2 answers"),
     ("scores", "float"), ("broken", "IndexError")],
)  # fmt: skip
def test_a_function_that_is_no_judge_is_refused_at_the_start(name, word, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(ASKED)
    settings = ("reward.judge=generative", "reward.judge_mode=round_robin")
    with pytest.raises(ValueError, match="reward.judge_path") as error:
        lifecycle.check_fixed_models(make_config(*settings, f"reward.judge_path={file}:{name}"), TrainState())
    assert word in str(error.value)
    lifecycle.check_fixed_models(make_config(*settings, f"reward.judge_path={file}:good"), TrainState())
    assert Path(f"{file}.asked").read_text() == "x", "one question, because a question may cost money"


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
args = {"left": "<"}
judge = build_judge("generative", folder + "/judge", batch_size=4, max_tokens=20, template_args=args)
plain_judge = build_judge("generative", folder + "/plain", batch_size=4, max_tokens=20)
def greedy(name, texts, num):
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/{name}")
    ids = [tokenizer(text)["input_ids"] for text in texts]
    options = {"max_new_tokens": num, "do_sample": False}
    return [model.generate(torch.tensor([row]), **options)[0, len(row):].tolist() for row in ids]
prompts = ["21   +43   =", "9    +9    =", "123  +456  =", "x<eos>1", "99999+99999="]
expected = greedy("policy", prompts, 12)
questions = [f"<{prompt.replace('<eos>', '< eos>')}>" for prompt in prompts]  # no question ends itself
wanted = tokenizer.batch_decode(greedy("judge", questions, 20), skip_special_tokens=True)
requests = [Request(tokenizer(prompt)["input_ids"], 0, 0.0, 12) for prompt in prompts]
for step in range(4):
    engine.sync(hf_tensors(policy), step)
    assert [completion.token_ids for completion in engine.generate(requests, step)] == expected
    num = (step + 3 * rank) % 5
    assert judge.generate(prompts[:num]) == wanted[:num]
plain = tokenizer.batch_decode(greedy("plain", prompts[:2], 20), skip_special_tokens=True)
assert plain_judge.generate(prompts[:2]) == plain
long = judge.generate(["0" * 5000 + "1+1"])  # more than the context
assert len(long) == 1 and len(set(wanted)) > 2
os.write(1, b"exact\\n")
"""


@pytest.mark.slow
def test_a_generative_folder_beside_the_policys_engine_gives_the_text_of_transformers(tmp_path):
    from tokenizers.processors import TemplateProcessing
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from moe_model import save_hf

    tokenizer = tiny.build_tokenizer()
    save_hf(tiny.build_policy(tiny.Recipe(initializer_range=0.2), len(tokenizer)), tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    tokenizer.chat_template = "{% for m in messages %}{{ left }}{{ m.content }}>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "judge")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=1, head_dim=32, max_position_embeddings=256,
        initializer_range=0.2, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "judge")
    plain = tiny.build_tokenizer()  # without a chat template, a text begins with a special token (BOS)
    begins = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", plain.unk_token_id)])
    plain.backend_tokenizer.post_processor = begins
    plain.save_pretrained(tmp_path / "plain")
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "plain")
    (tmp_path / "ranks.py").write_text(SECOND_ENGINE)
    result = preloaded.run(2, tmp_path / "ranks.py", tmp_path)
    assert result.returncode == 0 and result.stdout.count("exact") == 2, result.stderr[-3000:]
    assert result.stdout.count("reaches 128 tokens, half of the judge's") == 2  # once on each rank


# ---- verdicts of judges to rewards -------------------------------------------------------------------------


def fixed_opinion(first: str, second: str) -> int:
    """Return the sign of an arbitrary judge, which depends on the order of a pair and sometimes ties."""
    return random.Random(first + "|" + second).choice((1, 1, 0, -1))


class FixedJudge:
    """fixed_opinion() as a judge that records the pairs."""

    def __init__(self):
        self.pairs = []

    def compare(self, prompts, firsts, seconds):
        self.pairs += zip(prompts, firsts, seconds)
        return [fixed_opinion(first, second) for first, second in zip(firsts, seconds)]


@pytest.mark.parametrize("seed", range(5))
def test_round_robin_equals_a_double_loop(seed):
    rng = random.Random(seed)
    num = 30
    group_index = [rng.choice([3, 0, 7, 11, 40 + i]) for i in range(num)]
    assert 1 in map(group_index.count, group_index), "the test needs a group of one"
    prompts = [f"prompt {group}" for group in group_index]
    completions = [f"answer {rng.randint(0, 9)}" for _ in range(num)]  # some are equal
    expected = []
    pairs = []
    for i in range(num):
        total = 0.0
        count = 0
        for j in range(num):
            if j == i or group_index[j] != group_index[i]:
                continue
            places = [group_index[:row].count(group_index[i]) for row in (i, j)]
            first, second = sorted((i, j), reverse=sum(places) % 2 == 0)
            is_tie = completions[first] == completions[second]
            sign = 0 if is_tie else fixed_opinion(completions[first], completions[second])
            total += {1: 1.0, 0: 0.5, -1: 0.0}[sign if first == i else -sign]
            count += 1
            if i < j and not is_tie:
                pairs.append((prompts[i], completions[first], completions[second]))
        expected.append(total / count if count else 0.5)
    judge = FixedJudge()
    assert round_robin(judge, prompts, completions, group_index) == pytest.approx(expected, rel=1e-12)
    assert sorted(judge.pairs) == sorted(pairs), "each pair of different texts once"
    assert round_robin(judge, [], [], []) == []


def test_a_judge_that_prefers_the_first_place_hardly_ranks_a_group():
    always = GenerativeJudge(lambda questions: ["Verdict: Better"] * len(questions))
    odd, even = (round_robin(always, ["p"] * n, list("abcdefg"[:n]), [0] * n) for n in (5, 4))
    assert odd == [0.5] * 5
    assert sorted(even) == pytest.approx([1 / 3, 1 / 3, 2 / 3, 2 / 3])


def test_pairwise_reference_is_the_sign_against_the_reference():
    rng = random.Random(0)
    completions, references = ([str(rng.random()) for _ in range(40)] for _ in range(2))
    rewards = pairwise_reference(FixedJudge(), ["p"] * 40, completions, references)
    assert rewards == [float(fixed_opinion(a, b)) for a, b in zip(completions, references)]
    assert set(rewards) == {1.0, 0.0, -1.0}
