"""Judges that train_rl.py trains: pairs, starts, verdicts, and how their quality is measured."""

import json
import math
import random
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, train
from helpers import make_prompts

import lifecycle
import train_rl
from batch import AdvantageInputs, LossInputs
from data import judge_pairs, judge_start
from data.tiny import build_tokenizer
from experiments import judge_quality, report
from judges import (
    GenerativeJudge,
    ScalarJudge,
    has_places,
    refuse_mute_judge,
)
from plugins import ONE_RANK, load_plugin
from reward import verify
from settings import AlgorithmSettings, RewardSettings
from tests import preloaded

QUESTION = "{prompt}|{first}|{second}|"
RATIONALE = "{answer};{first_score};{second_score};"
PLUGINS = ROOT / "experiments" / "plugins"


# ---- the verifier of verdicts ------------------------------------------------------------------------------
@pytest.mark.parametrize("completion, label, reward, status", [
    ("046;1;0;Better", "Better", 1.0, "ok"),
    ("046;1;0;Better", "Worse", 0.0, "wrong"),
    ("Better. No, a carry is missing: Worse", "Worse", 1.0, "ok"),
    ("046;1;0;", "Tie", 0.0, "no_answer"),
    ("Better|Tie|Worse", "Worse", 0.0, "no_answer"),
    ("Tie", "better", 0.0, "error"),
])  # fmt: skip
def test_the_reward_of_a_judge_says_whether_its_last_verdict_is_the_label(completion, label, reward, status):
    verdict = verify("verdict", completion, label)
    assert (verdict.reward, verdict.status) == (reward, status)


# ---- pairs -------------------------------------------------------------------------------------------------
def sampled_answers(num_prompts: int, seed: int = 0) -> tuple[list, list]:
    """Return prompts, and for each of them eight random answers with scores."""
    rng = random.Random(seed)
    prompts = make_prompts(num_prompts)
    answers = []
    for _ in prompts:
        texts = [str(rng.randint(0, 5)) for _ in range(8)]
        answers.append([(text, float(text == "3")) for text in texts])
    return prompts, answers


def test_pairs_have_the_labels_of_their_scores_and_equally_many_of_each():
    prompts, answers = sampled_answers(60)
    rows = judge_pairs.balanced_rows(prompts, answers, QUESTION, RATIONALE, 120, random.Random(1))
    answers_of = {prompt.text: dict(row) for prompt, row in zip(prompts, answers)}
    gold_of = {prompt.text: prompt.answer for prompt in prompts}
    for row in rows:
        first_score = answers_of[row["task"]][row["first"]]
        second_score = answers_of[row["task"]][row["second"]]
        label = "Tie" if first_score == second_score else "Better" if first_score else "Worse"
        assert (row["answer"], row["kind"]) == (label, "verdict")
        assert row["prompt"] == f"{row['task']}|{row['first']}|{row['second']}|"
        gold = gold_of[row["task"]]
        assert row["rationale"] == f"{gold};{first_score:g};{second_score:g};{label}"
        assert verify("verdict", row["rationale"], label).reward == 1
    labels = [row["answer"] for row in rows]
    assert len(rows) == 120 and {labels.count(label) for label in judge_pairs.LABELS} == {40}
    ties = [row["first"] != row["second"] for row in rows if row["answer"] == "Tie"]
    assert sum(ties) == 20, "half of the ties differ in their texts"
    texts = [row["prompt"] for row in rows]
    assert len(set(texts)) == len(texts)


def test_pairs_run_out_of_the_rarest_label():
    prompts, answers = sampled_answers(3)
    answers[1:] = [[("7", 0.0)] * 8] * 2  # two groups without variance
    rows = judge_pairs.balanced_rows(prompts, answers, QUESTION, "", 1000, random.Random(0))
    labels = [row["answer"] for row in rows]
    assert {labels.count(label) for label in judge_pairs.LABELS} == {len(rows) // 3} and len(rows) > 0
    assert judge_pairs.balanced_rows(prompts[1:], answers[1:], QUESTION, "", 1000, random.Random(0)) == []


@pytest.mark.parametrize("option, word", [
    (["--question", "{prompt} {first}"], "--question"),
    (["--question", "{prompt} {first} {second} {third}"], "--question"),
    (["--rationale", "{gold}"], "--rationale"),
    (["--samples", "1"], "--samples"),
    (["--model", "nowhere"], "--model"),
])  # fmt: skip
def test_wrong_options_of_pairs_are_named(option, word):
    with pytest.raises(ValueError, match=word):
        judge_pairs.parse_args(["--model", "x", "--prompts", "y", "--output", "z", *option])


def test_a_question_has_three_places():
    assert has_places(QUESTION) and has_places("{{}} {prompt}{first}{second}")
    for template in ("{prompt}", "{prompt}{first}{second}{answer}", "{prompt}{first}{second}{", "{}{}{}"):
        assert not has_places(template)


# ---- starts ------------------------------------------------------------------------------------------------
@pytest.fixture
def pairs_folder(tmp_path):
    """Write pairs as data.judge_pairs does, and the tokenizer of the policy."""
    build_tokenizer().save_pretrained(tmp_path / "model")
    folder = tmp_path / "pairs"
    folder.mkdir()
    prompts, answers = sampled_answers(30)
    rows = judge_pairs.balanced_rows(prompts, answers, QUESTION, RATIONALE, 90, random.Random(1))
    judge_pairs.write_rows(folder / "train.jsonl", rows)
    (folder / "recipe.json").write_text(json.dumps({"model": str(tmp_path / "model")}))
    return folder


def small_recipe(kind: str) -> judge_start.Recipe:
    return judge_start.Recipe(kind=kind, steps=3, batch_size=8, hidden_size=16, num_layers=1)


@pytest.mark.parametrize("kind, column", [("reasoning", "rationale"), ("direct", "answer")])
@pytest.mark.parametrize("opening, closing", [("", ""), ("+", "=")], ids=["plain", "chat"])
def test_the_start_of_a_judge_imitates_a_column(kind, column, opening, closing, pairs_folder, tmp_path):
    """The loss of a padded batch equals the mean over tokens, computed one text at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / kind
    assert judge_start.build(small_recipe(kind), pairs_folder, output)
    assert not judge_start.build(small_recipe(kind), pairs_folder, output), "up to date"
    tokenizer = AutoTokenizer.from_pretrained(output)
    verdict_ids = tokenizer("Better")["input_ids"] + tokenizer("Tie")["input_ids"]
    assert len(verdict_ids) == 2, "a verdict is one token"
    assert tokenizer.decode(tokenizer("046;1;0;Better")["input_ids"]) == "046;1;0;Better"
    refuse_mute_judge("generative", str(output))
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float64)
    rows = judge_start.read_pairs(pairs_folder)[:5]
    if opening:
        end = "{% if add_generation_prompt %}" + closing + "{% endif %}"
        tokenizer.chat_template = opening + "{{ messages[0].content }}" + end
    total = 0.0
    count = 0
    for row in rows:
        prompt = tokenizer(opening + row["prompt"] + closing)["input_ids"]
        target = [*tokenizer(row[column])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + target])).logits[0].log_softmax(dim=-1)
        total -= sum(logprobs[len(prompt) + i - 1, token].item() for i, token in enumerate(target))
        count += len(target)
    loss = judge_start.imitation_loss(model, tokenizer, rows, column).item()
    assert loss == pytest.approx(total / count, rel=1e-6)  # the logits' loss of transformers is float32


def test_a_scalar_judge_is_trained_with_the_bradley_terry_loss(pairs_folder, tmp_path):
    output = tmp_path / "scalar"
    assert judge_start.build(small_recipe("scalar"), pairs_folder, output)
    judge = ScalarJudge(output)
    rows = [row for row in judge_start.read_pairs(pairs_folder) if row["answer"] != "Tie"][:7]
    losses = []
    for row in rows:
        first, second = judge.scores([row["task"]] * 2, [row["first"], row["second"]])
        gap = first - second if row["answer"] == "Better" else second - first
        losses.append(math.log1p(math.exp(-gap)))
    from transformers import AutoTokenizer

    loss = judge_start.bradley_terry_loss(judge.model, AutoTokenizer.from_pretrained(output), rows)
    assert loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)  # float32
    assert json.loads((output / "recipe.json").read_text())["margin"] >= 0
    settings = RewardSettings(judge="scalar", judge_path=str(output), judge_margin=0.25)
    assert lifecycle.load_judge(settings).margin == 0.25


def test_a_generative_judge_asks_the_question_of_the_settings():
    settings = RewardSettings(
        judge="generative", judge_path="tests.helpers:make_prompts", judge_template=QUESTION
    )
    assert lifecycle.load_judge(settings).template == QUESTION


@pytest.mark.parametrize("seed", range(5))
def test_no_other_margin_agrees_more_often(seed):
    rng = random.Random(seed)
    gaps = [round(rng.gauss(0, 1), 1) for _ in range(40)]  # rounded, so that some are equal
    labels = [rng.choice(("Tie", "Better" if gap > 0 else "Worse")) for gap in gaps]

    def agreement(margin: float) -> int:
        signs = [0 if abs(gap) <= margin else math.copysign(1, gap) for gap in gaps]
        return sum(sign == judge_start.SIGNS[label] for sign, label in zip(signs, labels))

    margin = judge_start.best_margin(gaps, labels)
    assert agreement(margin) == max(map(agreement, [0.0, *map(abs, gaps)]))


def test_a_folder_without_pairs_is_named(tmp_path):
    with pytest.raises(ValueError, match="train.jsonl"):
        judge_start.build(small_recipe("direct"), tmp_path, tmp_path / "judge")


def test_pairs_are_made_anew_for_another_verifier(tmp_path):
    """The labels come from the verifier: its name, its settings and the file of a custom function."""
    file = tmp_path / "own.py"
    prompts = [replace(prompt, kind=f"{file}:score") for prompt in make_prompts(3)]
    keys = set()
    for changed, binary, text in ((prompts, False, "1"), (prompts, True, "1"), (prompts, False, "2"),
                                  (make_prompts(3), False, "1"), (make_prompts(2), False, "1")):  # fmt: skip
        file.write_text(text)
        args = SimpleNamespace(stop=[], dtype="float32", reward=RewardSettings(binary=binary, timeout_s=7))
        keys.add(judge_pairs.key_of({"binary": binary}, changed, args))
    assert len(keys) == 5
    args.reward = RewardSettings(timeout_s=8)
    assert judge_pairs.key_of({"binary": False}, make_prompts(2), args) not in keys


@pytest.mark.slow
def test_from_a_policy_to_a_judge_that_was_trained_by_rl(tmp_path):
    """data.judge_pairs, data.judge_start, and two steps of train_rl.py, as docs/judges.md says."""
    start = ROOT / "experiments" / "starts" / "tiny"
    pairs = tmp_path / "pairs"
    command = (
        0, "-m", "data.judge_pairs", "--model", start / "model", "--prompts", start / "train.jsonl",
        "--limit", 90, "--skip", 10, "--output", pairs, "--max-new-tokens", 16, "--dtype", "float32",
        "--kv-cache-gib", 0.25, "--question", QUESTION, "--rationale", RATIONALE,
    )  # fmt: skip
    done = preloaded.run(*command)
    assert done.returncode == 0, done.stderr[-3000:]
    sets = {
        name: [json.loads(line) for line in (pairs / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test", "groups")
    }
    prompts = [json.loads(line) for line in (start / "train.jsonl").read_text().splitlines()[:90]]
    answers = {row["prompt"]: row["answer"] for row in prompts}
    tasks = {name: {row["task"] for row in rows} for name, rows in sets.items()}
    assert tasks["groups"] == {row["prompt"] for row in prompts[-12:]}  # 0.15 of 80
    assert tasks["test"] <= tasks["groups"] and not tasks["train"] & tasks["groups"]
    assert not tasks["train"] & {row["prompt"] for row in prompts[:10]}
    for row in sets["train"] + sets["test"]:
        first, second = (row[name] == answers[row["task"]] for name in ("first", "second"))
        assert row["answer"] == ("Tie" if first == second else "Better" if first else "Worse")
    for group in sets["groups"]:
        assert group["scores"] == [text == answers[group["task"]] for text in group["completions"]]
        assert len(group["scores"]) == 8
    recipe = replace(small_recipe("reasoning"), hidden_size=128)  # vLLM's attention takes no heads of size 4
    judge_start.build(recipe, pairs, tmp_path / "judge")
    done = train(
        "--config", "experiments/studies/judge/training/reasoning.yaml", f"model.path={tmp_path}/judge",
        f"data.train=[{{path: {pairs}/train.jsonl}}]", "rollout.prompts_per_step=4", "rollout.group_size=4",
        f"data.eval=[{{path: {pairs}/test.jsonl, name: verdicts, limit: 8}}]", "train.num_steps=2",
        f"run.dir={tmp_path}/run", ranks=1,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    refuse_mute_judge("generative", str(tmp_path / "run" / "model"))


# ---- judges that cannot write a verdict --------------------------------------------------------------------
def test_a_judge_that_cannot_write_a_verdict_is_refused_before_an_engine_starts(tmp_path):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = {token: number for number, token in enumerate(["<unk>", "<eos>", *"0123456789Tie"])}
    backend = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")
    tokenizer.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"vocab_size": len(tokenizer)}))
    with pytest.raises(ValueError, match="Better, Worse"):
        refuse_mute_judge("generative", str(tmp_path))
    refuse_mute_judge("scalar", str(tmp_path))  # a scalar judge writes nothing
    refuse_mute_judge("generative", "module:function")
    tokenizer.add_tokens(["Better", "Tie", "Worse"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Better, Tie, Worse"):
        refuse_mute_judge("generative", str(tmp_path))  # the model has no row for the new tokens
    config.write_text(json.dumps({"vocab_size": len(tokenizer)}))
    refuse_mute_judge("generative", str(tmp_path))
    tokenizer.chat_template = "{% if thinks %}1{% endif %}"
    tokenizer.save_pretrained(tmp_path)
    refuse_mute_judge("generative", str(tmp_path), {"thinks": False})
    with pytest.raises(ValueError, match=r"reward.judge_chat_template_args.think is not read"):
        refuse_mute_judge("generative", str(tmp_path), {"think": False})


# ---- quality -----------------------------------------------------------------------------------------------
def longer_is_better(questions: list[str]) -> list[str]:
    """Answer the questions of QUESTION: the longer completion is better."""
    answers = []
    for question in questions:
        _, first, second, _ = question.split("|")
        answers.append(
            ("Worse", "Tie", "Better")[1 + (len(first) > len(second)) - (len(first) < len(second))]
        )
    return answers


@pytest.mark.parametrize("seed", range(3))
def test_inversion_by_distance_equals_a_loop(seed):
    rng = random.Random(seed)
    groups = []
    rewards = []
    for _ in range(30):
        scores = [rng.choice([0.0, 0.5, 1.0]) for _ in range(6)]  # fractions may equal the mean of the group
        groups.append({"completions": list("abcdef"), "scores": scores})
        rewards.append([round(rng.gauss(score, 1), 1) for score in scores])
    rewards[0] = [0.5] * 6
    groups = [group | {"number": number} for number, group in enumerate(groups)]
    groups = judge_quality.mixed_groups(groups, 100)
    rewards = [rewards[group["number"]] for group in groups]
    figures = judge_quality.inversion_figures(groups, rewards)
    num_inverted = 0
    num_near = 0
    for group, row in zip(groups, rewards):
        mean = sum(row) / 6
        std = math.sqrt(sum((value - mean) ** 2 for value in row) / 5)
        for value, score in zip(row, group["scores"]):
            is_inverted = (value - mean) * (score - sum(group["scores"]) / 6) < -1e-9
            num_inverted += is_inverted
            num_near += is_inverted and abs(value - mean) < 0.25 * std
    assert figures["inverted"] == pytest.approx(num_inverted / (6 * len(groups)))
    assert figures["curve"][0]["inverted"] == num_near
    assert sum(part["completions"] for part in figures["curve"]) == 6 * len(groups)
    assert sum(part["inverted"] for part in figures["curve"]) == num_inverted > 0
    with pytest.raises(ValueError, match="NaN"):
        judge_quality.inversion_figures(groups, [[math.nan, *rewards[0][1:]], *rewards[1:]])


def test_a_perfect_judge_inverts_nothing_and_its_opposite_everything(tmp_path):
    prompt = {"task": "<user>p", "conversation": "p"}
    groups = [prompt | {"completions": ["a", "aa", "aaa", "aaa"], "scores": [0.0, 0.0, 1.0, 1.0]}]
    pairs = [
        prompt | {"first": "aaa", "second": "a", "answer": "Better"},
        prompt | {"first": "a", "second": "aaa", "answer": "Worse"},
        prompt | {"first": "aa", "second": "bb", "answer": "Tie"},
        prompt | {"first": "a", "second": "a", "answer": "Tie"},
    ]
    questions = []
    opposite = {"Better": "Worse", "Tie": "Tie", "Worse": "Better"}
    right = GenerativeJudge(lambda asked: questions.extend(asked) or longer_is_better(asked), QUESTION)
    wrong = GenerativeJudge(lambda asked: [opposite[word] for word in longer_is_better(asked)], QUESTION)
    mute = GenerativeJudge(lambda asked: ["?"] * len(asked), QUESTION)
    (best,) = judge_quality.measure(right, "generative", pairs, groups)
    (worst,) = judge_quality.measure(wrong, "generative", pairs, groups)
    (silent,) = judge_quality.measure(mute, "generative", pairs, groups)
    assert (best["agreement"], best["Tie"], best["tie_different"], best["inverted"]) == (1, 1, 1, 0)
    assert questions and not any("<user>" in question for question in questions), "asked as in training"
    assert (worst["agreement"], worst["Better"], worst["inverted"]) == (0.5, 0, 1)
    assert (silent["agreement"], silent["unreadable"], silent["silent"]) == (0.5, 1, 1)
    for name, record in (("best", best), ("worst", worst), ("best", best)):
        judge_quality.add_records(tmp_path / "out.json", [{"name": name, "seed": 0, **record}])
    records = json.loads((tmp_path / "out.json").read_text())
    assert [record["name"] for record in records] == ["best", "worst"], "a repeated record replaces the old"
    assert any("worst" in line and "1.000" in line for line in judge_quality.table_lines(records))
    assert len(judge_quality.curve_lines(records)) == 4


def test_groups_without_right_and_wrong_completions_are_left_out():
    mixed = {"scores": [0.0, 1.0]}
    groups = [{"scores": []}, {"scores": [1.0, 1.0]}, mixed]  # the first: every verdict failed
    assert judge_quality.mixed_groups(groups, 5) == [mixed]
    with pytest.raises(ValueError, match="0 of 2 groups"):
        judge_quality.mixed_groups(groups[:2], 5)


class ScoredByLength:
    """A scalar judge whose score is the length of the completion."""

    def scores(self, tasks, completions):
        return [float(len(text)) for text in completions]

    def compare(self, tasks, firsts, seconds):
        return [(len(a) > len(b)) - (len(a) < len(b)) for a, b in zip(firsts, seconds)]


def test_a_scalar_judge_is_measured_on_the_rewards_of_training():
    """Beyond a score of 40 the sigmoid is 1: two long texts have no difference that training could see."""
    task = {"task": "p", "completions": ["a" * 41, "a" * 45], "scores": [0.0, 1.0]}
    pairs = [{"task": "p", "first": "aa", "second": "a", "answer": "Better"}]
    score, round_robin = judge_quality.measure(ScoredByLength(), "scalar", pairs, [task])
    assert (score["mapping"], score["silent"]) == ("score", 1.0)
    assert (round_robin["mapping"], round_robin["silent"], round_robin["inverted"]) == (
        "round_robin",
        0.0,
        0.0,
    )


def test_shares_near_the_mean_are_compared_by_seed():
    def record(name, mapping, seed, inverted):
        bins = [(0.0, 10, inverted, 4), (0.25, 10, inverted, 0), (0.5, 100, 50, 0)]
        keys = ("from", "completions", "inverted", "silent")
        curve = [dict(zip(keys, values)) for values in bins]
        return {"name": name, "mapping": mapping, "seed": seed, "curve": curve}

    near = judge_quality.near_shares(record("reasoning", "round_robin", 0, 2))
    assert near == {"inverted": 0.2, "silent": 0.2, "inverted of trained": 0.25}
    records = [record("reasoning", "round_robin", seed, 1) for seed in range(3)]
    records += [record("scalar", "score", seed, 3 + seed) for seed in range(3)]  # 0.3, 0.4, 0.5
    lines = judge_quality.near_lines(records)
    assert lines[2].endswith("|  |  |")
    assert "| -0.300 (-0.548 to -0.052) | 0.035 |" in lines[3]


def test_a_judge_is_measured_once(tmp_path):
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    (pairs / "test.jsonl").write_text("{}\n")
    (pairs / "groups.jsonl").write_text("{}\n")
    out = tmp_path / "out.json"
    argv = [
        "--pairs",
        str(pairs),
        "--name",
        "a",
        "--kind",
        "scalar",
        "--judge",
        str(tmp_path),
        "--out",
        str(out),
    ]
    args = judge_quality.parse_args(argv)
    origin = judge_quality.origin_of(args, 0.0)
    assert not judge_quality.is_measured(out, args, origin)
    judge_quality.add_records(out, [{"name": "a", "seed": 0, "mapping": "score", "origin": origin}])
    assert judge_quality.is_measured(out, args, origin)
    assert not judge_quality.is_measured(out, args, judge_quality.origin_of(args, 0.5))
    (pairs / "test.jsonl").write_text("{'other': 1}\n")
    assert not judge_quality.is_measured(out, args, judge_quality.origin_of(args, 0.0))
    origins = []
    for name, text in (("a", "1"), ("b", "1"), ("c", "2")):  # functions of two texts, in three files
        (tmp_path / f"{name}.py").write_text(text)
        args = judge_quality.parse_args([*argv[:7], f"{tmp_path}/{name}.py:ask", *argv[8:]])
        origins.append(judge_quality.origin_of(args, 0.0))
    assert origins[0]["judge_weights"] is None and origins[0] != origins[1] != origins[2]


# ---- plug-ins ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [0.3, 0.7, 0.9, 1.0])
def test_the_filter_keeps_the_shortest_list_of_groups_that_holds_the_share(share):
    rng = random.Random(int(10 * share))
    group_index = torch.arange(12).repeat_interleave(4)
    rewards = torch.tensor([rng.choice([0.0, 0.25, 1.0]) * (group % 4 > 0) for group in group_index.tolist()])
    valid = torch.ones(48, dtype=torch.bool)
    valid[5] = False
    inputs = AdvantageInputs(rewards, [{}] * 48, valid, group_index, ONE_RANK)
    deviations = {
        group: statistics.stdev(rewards[i].item() for i in range(4 * group, 4 * group + 4) if i != 5)
        for group in range(12)
    }
    kept = []
    for group in sorted(deviations, key=lambda group: -deviations[group]):
        is_tied = kept and deviations[group] == pytest.approx(deviations[kept[-1]])
        if sum(deviations[g] for g in kept) >= share * sum(deviations.values()) - 1e-6 and not is_tied:
            break
        kept += [group] if deviations[group] > 0 else []
    algorithm = AlgorithmSettings(
        advantage=f"{PLUGINS}/variance_filter.py:variance_filter", advantage_args={"share": share}
    )
    advantages = load_plugin(algorithm, "advantage")(inputs)
    unfiltered = train_rl.compute_advantages(rewards, valid, group_index)
    expected = [a if g in kept else 0.0 for a, g in zip(unfiltered.tolist(), group_index.tolist())]
    assert advantages.tolist() == pytest.approx(expected)
    assert 0 < len(kept) < 12
    assert share == 1.0 or len(kept) < sum(deviation > 0 for deviation in deviations.values())


def test_the_ipo_mask_drops_both_signs(float64):
    logprobs = torch.tensor([[0.9, 0.5, 0.2, 0.5]]).log().requires_grad_()
    rollout_logprobs = torch.tensor([[0.6, 0.6, 0.5, 0.71]]).log()
    mask = torch.ones(1, 4, dtype=torch.bool)
    for advantage in (2.0, -2.0):
        inputs = LossInputs(
            logprobs=logprobs, old_logprobs=rollout_logprobs, rollout_logprobs=rollout_logprobs,
            ref_logprobs=None, advantages=torch.full((1, 4), advantage), entropy=torch.ones(1, 4),
            token_groups=torch.arange(4).expand(1, 4), mask=mask, log_vocab=1.0,
            settings=AlgorithmSettings(gain=f"{PLUGINS}/ipo_mask.py:ipo_mask"),
        )  # fmt: skip
        gain, statistics = train_rl.token_gain(inputs)
        expected = [0.0, advantage * 0.5 / 0.6, 0.0, 0.0]  # |p - q| = 0.3, 0.1, 0.3, 0.21
        assert gain[0].tolist() == pytest.approx(expected)
        assert statistics["masked"][0].tolist() == [1, 0, 1, 1]
        (gradient,) = torch.autograd.grad(gain.sum(), logprobs)
        assert gradient[0].tolist() == pytest.approx(expected), "d r / d log p = r"


# ---- runs that share a judge -------------------------------------------------------------------------------
def test_a_block_of_seeds_is_one_pair():
    def runs(values: dict[int, float]) -> list:
        return [SimpleNamespace(record={"seed": seed}, values=[value]) for seed, value in values.items()]

    row = runs({0: 1.0, 1: 3.0, 3: 2.0, 4: 6.0, 9: 9.0})
    parent = runs({0: 0.0, 1: 1.0, 2: 5.0, 3: 1.0, 4: 1.0})
    assert report.paired_differences(row, parent).tolist() == [1, 2, 1, 5]
    assert report.paired_differences(row, parent, block=3).tolist() == [1.5, 3]
