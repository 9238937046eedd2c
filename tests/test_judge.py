"""judges.py, parts of reward.py, and data/tiny_judge.py, against transformers and loops."""

import json
import math
import random
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import FakeRanks, make_config, make_prompts

import lifecycle
import train_rl
from batch import Completion, Group, collate
from data import tiny, tiny_judge
from data.chains import Chains, habits, sample_sets
from judges import GenerativeJudge, ScalarJudge, build_judge, pairwise_reference, prompts_for, round_robin
from reward import Verdict, verify
from runtime.checkpoint import TrainState
from tests import preloaded

RECIPE = tiny_judge.Recipe()


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    """Write train.jsonl and the tokenizer of the model as data.tiny does."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny.build_tokenizer().save_pretrained(folder / "model")
    train, _ = tiny.sample_problems(tiny.Recipe())
    write_rows(folder / "train.jsonl", train)
    return folder


def write_rows(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def build(recipe, tiny_folder, output) -> bool:
    return tiny_judge.build(recipe, tiny_folder / "model", tiny_folder / "train.jsonl", output)


@pytest.fixture(scope="module")
def judge_folder(tiny_folder):
    """Train a judge on few pairs, which is enough for different scores."""
    recipe = tiny_judge.Recipe(steps=20, num_pairs=200, num_held_out=20)
    assert build(recipe, tiny_folder, tiny_folder / "judge")
    return tiny_folder / "judge"


@pytest.fixture(scope="module")
def tiny_judge_folder(tiny_folder):
    """Train the judge of `python -m data.tiny_judge`."""
    assert build(RECIPE, tiny_folder, tiny_folder / "tiny_judge")
    return tiny_folder / "tiny_judge"


@pytest.fixture(scope="module")
def problems(tiny_folder):
    return tiny_judge.read_problems(tiny_folder / "train.jsonl", "tiny")


@pytest.fixture(scope="module")
def texts(problems):
    """Return prompts and completions of many lengths in random order; some texts occur twice."""
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


# ---- verdicts of parts ----------------------------------------------------------------------------------


def test_the_share_of_equal_characters_is_the_result_of_a_loop():
    rng = random.Random(0)
    for _ in range(500):
        completion, gold = ("".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(2))
        length = max(len(completion), len(gold))
        num_equal = 0
        for i in range(length):
            num_equal += i < len(completion) and i < len(gold) and completion[i] == gold[i]
        expected = Verdict(num_equal / length, "ok" if completion == gold else "wrong")
        assert verify("characters", f" {completion}\n", gold) == expected
        assert verify("exact", completion, gold).reward == (completion == gold), "exact gives no shares"


# ---- the scalar judge --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_scores_equal_transformers_one_text_at_a_time(batch_size, judge_folder, texts):
    scores = ScalarJudge(judge_folder, batch_size).scores(*texts)
    assert len({round(score, 3) for score in scores}) > 30, "the test needs texts of different scores"
    assert scores == pytest.approx(one_by_one(judge_folder, *texts), abs=2e-5)  # measured 5e-6


def test_a_judge_keeps_no_keys_and_values(judge_folder, texts):
    """A judge reads each text once, so a KV cache would waste gigabytes of a GPU."""
    judge = ScalarJudge(judge_folder, batch_size=7)
    outputs = []
    judge.model.register_forward_hook(lambda model, inputs, output: outputs.append(output))
    judge.scores(*texts)
    assert len(outputs) > 3 and all(output.past_key_values is None for output in outputs)


def test_equal_texts_get_equal_scores_and_tie(judge_folder, texts):
    judge = ScalarJudge(judge_folder, batch_size=3)
    scores = {}
    for text, score in zip(map("".join, zip(*texts)), judge.scores(*texts)):
        assert scores.setdefault(text, score) == score
    assert len(scores) < len(texts[0])
    assert judge.compare(*texts, texts[1]) == [0] * len(texts[0])


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
    config = make_config(
        "reward.judge=scalar", f"reward.judge_path={judge_folder}", "reward.judge_weight=0.3"
    )
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
    groups = [Group(i, i, completions[2 * i :][:2], verdicts[2 * i :][:2]) for i in (0, 1)]
    prompts = make_prompts(2)
    batch = collate(groups, prompts, [[1], [2]])
    train_rl.add_rewards(run, batch)
    assert run.judge.questions == [([prompts[row].text for row in (0, 0, 1, 1)], texts)]
    expected = [0.7 * score + 0.3 / (1 + math.exp(2 - len(text))) for score, text in zip(scores, texts)]
    assert batch.rewards.tolist() == pytest.approx(expected) and batch.valid.all()


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


def test_folders_without_a_scalar_judge_are_refused(judge_folder, tiny_folder, tmp_path):
    from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForCausalLM

    for folder, word in (
        (tmp_path / "nowhere", "nowhere"),
        ("random:shuffle", "config"),
        (tmp_path, "config"),
    ):
        with pytest.raises(ValueError, match=word):
            build_judge("scalar", str(folder))
    shutil.copytree(tiny_folder / "model", tmp_path, dirs_exist_ok=True)
    two = {"num_labels": 2, "ignore_mismatched_sizes": True}
    AutoModelForSequenceClassification.from_pretrained(judge_folder, **two).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="labels"):
        build_judge("scalar", str(tmp_path))
    config = Qwen3Config.from_pretrained(judge_folder, num_labels=1)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)  # one label, but the head of a language model
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


def test_answers_and_columns_must_have_equal_lengths():
    for num in (0, 1, 3):
        judge = GenerativeJudge(lambda prompts, num=num: ["Verdict: Tie"] * num)
        with pytest.raises(ValueError, match="answers"):
            judge.compare(["p", "p"], ["a", "a"], ["b", "b"])
    for columns in ((["p"], ["a", "a"], ["b", "b"]), (["p", "p"], ["a"], ["b", "b"]), (["p"], ["a"], [])):
        with pytest.raises(ValueError):
            judge.compare(*columns)
    with pytest.raises(ValueError):
        pairwise_reference(judge, ["p", "p"], ["a", "b"], ["c"])
    with pytest.raises(ValueError):
        round_robin(judge, ["p", "p"], ["a", "b"], [0])


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
        lifecycle.check_judge(make_config(*settings, f"reward.judge_path={file}:{name}"), TrainState())
    assert word in str(error.value)
    lifecycle.check_judge(make_config(*settings, f"reward.judge_path={file}:good"), TrainState())
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


# ---- the tiny judge ----------------------------------------------------------------------------------------


def test_sums_with_all_carries_are_right_and_mistakes_are_wrong(problems):
    import numpy as np

    rng = np.random.default_rng(0)
    num_without_carry = 0
    for problem in problems[:500]:
        a, b = (int(operand.strip("= ")[::-1]) for operand in problem["prompt"].split("+"))
        digits = len(problem["columns"])
        written, carrying = tiny_judge.add(problem["columns"], set())
        assert written == problem["answer"] == f"{a + b:0{digits + 1}d}"[::-1]
        tens = [10 ** (i + 1) for i in range(digits)]
        assert carrying == [i for i, ten in enumerate(tens) if a % ten + b % ten >= ten]
        without_carry = tiny.answer_without_carry(a, b, digits)
        assert tiny_judge.add(problem["columns"], set(range(9)))[0] == without_carry
        mistakes = {tiny_judge.mistake(problem, RECIPE, rng) for _ in range(8)}
        assert problem["answer"] not in mistakes and {len(m) for m in mistakes} == {digits + 1}
        num_without_carry += without_carry in mistakes
    assert 300 < num_without_carry < 500


@pytest.mark.slow(process="others")
def test_the_tiny_judge_errs_as_often_as_reward_models(tiny_judge_folder, problems):
    """Check the record of the judge, and repeat the measurement by a loop over new groups."""
    import numpy as np

    record = json.loads((tiny_judge_folder / "recipe.json").read_text())
    judge = ScalarJudge(tiny_judge_folder)
    assert record["num_held_out"] == RECIPE.num_held_out < len(problems) / 4
    assert len({problem["prompt"] for problem in problems}) == len(problems), "held out from training"
    held_out = problems[: record["num_held_out"]]
    assert 0.70 <= record["pairwise_agreement"] <= 0.80  # measured 0.76 to 0.77, three seeds
    assert 0.05 < record["inverted_frac"] < 0.40  # measured 0.28 to 0.29, three seeds
    assert record["pairwise_agreement"] == tiny_judge.pairwise_agreement(judge, held_out, RECIPE)
    rng = np.random.default_rng(9)
    groups = []
    for problem in held_out[:400]:
        right = [rng.random() < 0.5 for _ in range(8)]
        completions = [problem["answer"] if ok else tiny_judge.mistake(problem, RECIPE, rng) for ok in right]
        if len(set(right)) == 2:
            groups.append(([problem["prompt"]] * 8, completions, right))
    prompts, texts, rights = (sum(parts, []) for parts in zip(*groups))
    inverted = []
    near_mean = []
    scores_of_all = np.array(judge.scores(prompts, texts))
    for first in range(0, len(texts), 8):
        scores = scores_of_all[first : first + 8]
        for ok, score in zip(rights[first : first + 8], scores):
            inverted.append(score < scores.mean() if ok else score > scores.mean())
            near_mean.append(abs(score - scores.mean()) < scores.std(ddof=1) / 4)
    assert abs(np.mean(inverted) - record["inverted_frac"]) < 0.08
    assert np.mean(np.array(inverted)[near_mean]) > np.mean(inverted), "scores near the mean err most"


def test_the_build_is_deterministic_and_cached(tiny_folder, tmp_path):
    recipe = tiny_judge.Recipe(steps=5, num_pairs=100, num_held_out=20)
    weights = []
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)  # the build must not depend on the generator of the caller
        assert build(recipe, tiny_folder, tmp_path / name)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert not build(recipe, tiny_folder, tmp_path / "one")
    assert build(replace(recipe, seed=1), tiny_folder, tmp_path / "one")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() != weights[0]
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["one", "two"]


@pytest.fixture(scope="module")
def chains_folder(tmp_path_factory):
    """Write train.jsonl of short chains and the tokenizer of the model as data.tiny does."""
    folder = tmp_path_factory.mktemp("chains")
    tiny.build_tokenizer().save_pretrained(folder / "model")
    rows = sample_sets(Chains(long_steps=(5, 9), num_train=200, num_test=0, num_longer=0), seed=0)["train"]
    write_rows(folder / "train.jsonl", rows)
    return folder


def test_wrong_chains_miss_steps_by_the_habits_of_operations(chains_folder):
    """Recompute each step: a missed step is off by the habitual amount, and the chain continues."""
    import numpy as np

    rng = np.random.default_rng(0)
    recipe = tiny_judge.RECIPES["chains"]
    habit_of = habits(Chains(), 0)
    num_missed = Counter()
    num_steps = Counter()
    for problem in tiny_judge.read_problems(chains_folder / "train.jsonl", "chains"):
        state = problem["prompt"].removesuffix(";")
        next_states = tiny_judge.mistake(problem, recipe, rng).split(";")
        assert len(next_states) == problem["difficulty"] == len(problem["answer"].split(";"))
        missed = []
        for next_state, reference in zip(next_states, problem["answer"].split(";")):
            assert next_state[:-1] == reference[:-1]
            operation, digit, value = state[1], int(state[2]), int(state[-1])
            right = {"+": value + digit, "-": value - digit, "*": value * digit}[operation] % 10
            missed.append(int(next_state[-1]) != right)
            assert not missed[-1] or int(next_state[-1]) == (right + habit_of[state[1:3]][1]) % 10
            num_missed[state[1:3]] += missed[-1]
            num_steps[state[1:3]] += 1
            state = next_state
        assert any(missed)

    def missed_frac(names: list[str]) -> float:
        return sum(num_missed[name] for name in names) / sum(num_steps[name] for name in names)

    assert missed_frac([name for name, (frac, _) in habit_of.items() if frac > 0.5]) > 0.6
    without_habit = missed_frac([name for name, (frac, _) in habit_of.items() if frac == 0])
    assert 0.1 < without_habit < 0.4, "one step is missed whatever the operation"


@pytest.mark.parametrize("task", ["tiny", "chains"])
def test_the_loss_of_pairs_equals_the_scores_of_beginnings(task, tiny_folder, chains_folder, tmp_path):
    """ScalarJudge scores each beginning of a text; a pair counts at every end of a step where it differs."""
    import numpy as np

    recipe = replace(tiny_judge.RECIPES[task], steps=3, num_pairs=100, num_held_out=10, hidden_size=16)
    folder = chains_folder if task == "chains" else tiny_folder
    assert tiny_judge.build(recipe, folder / "model", folder / "train.jsonl", tmp_path / "judge")
    judge = ScalarJudge(tmp_path / "judge")
    rng = np.random.default_rng(1)
    losses = []
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


def test_a_judge_of_chains_is_trained_on_short_chains_only(chains_folder, tmp_path, monkeypatch):
    trained = []
    pair_loss = tiny_judge.pair_loss
    monkeypatch.setattr(
        tiny_judge, "pair_loss", lambda m, t, texts: trained.extend(texts) or pair_loss(m, t, texts)
    )
    recipe = replace(tiny_judge.RECIPES["chains"], steps=4, num_pairs=200, num_held_out=40, max_difficulty=4)
    train = chains_folder / "train.jsonl"
    assert tiny_judge.build(recipe, chains_folder / "model", train, tmp_path / "judge")
    problems = tiny_judge.read_problems(train, "chains")
    short = {problem["prompt"] for problem in problems[40:] if problem["difficulty"] <= 4}
    assert {text.split(";")[0] + ";" for text in trained} <= short
    assert len(trained) == 4 * 2 * recipe.batch_size


BAD_ROWS = [
    ("tiny", "1-1=", "2"), ("tiny", "12+1=", "13"), ("tiny", "1+1=", "2"), ("tiny", "What is 2?", "2"),
    ("chains", "b+3=4;", "7"),
]  # fmt: skip


@pytest.mark.parametrize("task, prompt, answer", BAD_ROWS)
def test_bad_rows_are_named(task, prompt, answer, tmp_path):
    write_rows(tmp_path / "bad.jsonl", [{"prompt": prompt, "answer": answer}])
    with pytest.raises(ValueError, match="row 1"):
        tiny_judge.read_problems(tmp_path / "bad.jsonl", task)


def test_missing_files_are_named(tiny_folder, tmp_path):
    with pytest.raises(ValueError, match="nothing.jsonl"):
        tiny_judge.read_problems(tmp_path / "nothing.jsonl", "tiny")
    with pytest.raises(ValueError, match="tokenizer"):
        tiny_judge.build(RECIPE, tmp_path / "nothing", tiny_folder / "train.jsonl", tmp_path / "other")


def test_the_command_accepts_wider_operands(tiny_folder, tmp_path, monkeypatch):
    train, _ = tiny.sample_problems(tiny.Recipe(max_digits=7, train_per_difficulty=60, test_per_difficulty=5))
    write_rows(tmp_path / "wide.jsonl", train)
    command = ["tiny_judge", "--steps", 3, "--pairs", 64, "--model", tiny_folder / "model"]
    command += ["--train", tmp_path / "wide.jsonl", "--output", tmp_path / "judge"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    tiny_judge.main()
    judge = build_judge("scalar", str(tmp_path / "judge"))
    assert len(judge.scores(["1234567+7654321="], ["88888880"])) == 1
