"""The environment of long chains: text and verifier, against an evaluation by Python's own grammar."""

import ast
import operator
import string

import numpy as np
import pytest
import yaml
from conftest import ROOT

from data.chains import INSTRUCTIONS, Chains, corpus_batch, habits, sample_sets, trace
from data.tiny import RECIPES
from reward import Verdict, verify
from tests import preloaded
from train_rl import load_config

SMALL = Chains(num_train=60, num_test=20, num_longer=10)
SYMBOLS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def integer(text: str) -> int:
    """Evaluate an expression of whole numbers by its syntax tree, without a modulus."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant):
            return node.value
        return SYMBOLS[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(text, mode="eval").body)


def trace_by_grammar(prompt: str) -> str:
    """Write the right trace: each value is one growing expression, evaluated as a whole, modulo 10."""
    start = prompt.removesuffix(";")
    num_steps = (string.ascii_lowercase + string.ascii_uppercase).index(start[0])
    program = [start[i : i + 2] for i in range(1, len(start) - 2, 2)]
    expression = start[-1]
    states = []
    for num_remaining in reversed(range(num_steps)):
        done = num_steps - num_remaining
        expression = f"({expression}){program[(done - 1) % len(program)]}"
        turned = program[done % len(program) :] + program[: done % len(program)]
        counter = (string.ascii_lowercase + string.ascii_uppercase)[num_remaining]
        states.append(f"{counter}{''.join(turned)}={integer(expression) % 10}")
    return ";".join(states)


def share_by_grammar(prompt: str, completion: str) -> float:
    """Return the share of states that follow from the previous state, up to the first malformed state."""
    right = trace_by_grammar(prompt).split(";")
    states = completion.split(";")
    previous = prompt.removesuffix(";")
    count = 0
    for state, reference in zip(states, right):
        if len(state) != len(reference) or any(state[i] != reference[i] for i in range(len(state) - 1)):
            break
        if state[-1] not in "0123456789":
            break
        count += int(state[-1]) == integer(f"{previous[-1]}{previous[1:3]}") % 10
        previous = state
    return count / max(len(right), len(states))


def test_the_sets_are_disjoint_of_the_lengths_that_they_say_and_their_answers_right():
    sets = sample_sets(SMALL, seed=3)
    assert sets == sample_sets(SMALL, seed=3) != sample_sets(SMALL, seed=4)
    assert {name: len(rows) for name, rows in sets.items()} == {"train": 60, "test": 20, "longer": 10}
    rows = [row for of_set in sets.values() for row in of_set]
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert all(row["answer"] == trace_by_grammar(row["prompt"]) for row in rows)
    assert all(len(row["answer"].split(";")) == row["difficulty"] for row in rows)
    assert max(row["difficulty"] for row in sets["train"] + sets["test"]) <= 30
    assert {row["difficulty"] for row in sets["longer"]} <= set(range(31, 39))
    assert all(row["kind"] == ("chain" if row in sets["train"] else "exact") for row in rows)


RIGHT = "b-5*3+4=7;a*3+4-5=2"  # the trace of c+4-5*3=3


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [
        (RIGHT, Verdict(1.0, "ok")),
        (f" {RIGHT}\n", Verdict(1.0, "ok")),
        ("b-5*3+4=8;a*3+4-5=2", Verdict(0.0, "wrong")),  # 3 + 4 is not 8, and 8 - 5 is not 2
        ("b-5*3+4=8;a*3+4-5=3", Verdict(0.5, "wrong")),  # 8 - 5 is 3: one mistake counts once
        ("b-5*3+4=7;a*3+4-5=1", Verdict(0.5, "wrong")),
        ("b-5*3+4=7", Verdict(0.5, "wrong")),  # stops early
        (f"{RIGHT};a*3+4-5=2", Verdict(2 / 3, "wrong")),  # does not stop
        ("b-5*3+4=7;", Verdict(0.5, "wrong")),
        ("b-5*3+5=7;a*3+5-5=2", Verdict(0.0, "wrong")),  # another program
        ("c-5*3+4=7;a*3+4-5=2", Verdict(0.0, "wrong")),  # another counter
        ("b-5*3+4=\u0667;a*3+4-5=2", Verdict(0.0, "wrong")),  # a digit of another script
        ("b-5*3+4;a*3+4-5", Verdict(0.0, "wrong")),
        ("a*3+4-5=2", Verdict(0.0, "wrong")),
        ("  ", Verdict(0.0, "no_answer")),
    ],
)
def test_a_chain_is_worth_its_share_of_right_steps(completion, verdict):
    assert verify("chain", completion, RIGHT) == verdict


@pytest.mark.parametrize("answer", ["", "7", "b-5*3+4=7;;a*3+4-5=2", "a-5*3+4=7;a*3+4-5=2"])
def test_an_answer_that_is_no_trace_is_an_error(answer):
    verdict = verify("chain", "a-5*3+4=7;a*3+4-5=2", answer)
    assert verdict.status == "error" and verdict.reward == 0 and verdict.detail


def test_the_share_of_right_steps_agrees_with_the_grammar_on_damaged_chains():
    rng = np.random.default_rng(5)
    alphabet = list(string.digits + "+-*=;abcz ")
    shares = set()
    for row in sample_sets(SMALL, seed=5)["train"]:
        for damages in range(5):
            text = list(row["answer"])
            for _ in range(damages):
                place = int(rng.integers(len(text)))
                if rng.random() < 0.7:  # a value; else any character
                    text[place - place % 12 + 10] = str(rng.integers(10))
                else:
                    text[place] = str(rng.choice(alphabet))
            completion = "".join(text).strip()
            verdict = verify("chain", completion, row["answer"])
            assert verdict.reward == pytest.approx(share_by_grammar(row["prompt"], completion))
            assert (verdict.status == "ok") == (completion == row["answer"])
            shares.add(round(verdict.reward, 3))
    assert len(shares) > 20, "damage of all degrees"


def test_the_corpus_has_its_habits_as_often_as_they_say():
    chains = Chains(num_strong=3, strong_frac=(0.5, 0.6), num_weak=7, weak_frac=(0.1, 0.2))
    wrong = habits(chains, seed=1)
    assert set(wrong) == set(INSTRUCTIONS) and sum(frac > 0 for frac, _ in wrong.values()) == 10
    rng = np.random.default_rng(2)
    name, (frac, offset) = max(wrong.items(), key=lambda item: item[1][0])
    assert frac == pytest.approx(0.6)
    values = [int(trace(f"b{name}+2=5", wrong, rng)[-1]) for _ in range(2000)]
    right = integer(f"5{name}") % 10
    assert set(values) == {right, (right + offset) % 10} and len(set(values)) == 2
    assert np.mean(np.array(values) != right) == pytest.approx(0.6, abs=0.04)


def test_a_step_of_the_warm_start_has_chains_of_one_length_and_none_that_is_held_out():
    chains = Chains(batch_tokens=900)
    prompts, _ = corpus_batch(chains, 0, 0.9, np.random.default_rng(3), set())
    for held_out in (set(), {prompts[0]}):
        again, answers = corpus_batch(chains, 0, 0.9, np.random.default_rng(3), held_out)
        ends = {(len(answer) + (answer[-1] != ";"), answer[-1] == ";") for answer in answers}
        assert len({length for length, _ in ends}) == 1, "the end token is one more"
        assert {is_cut for _, is_cut in ends} == {False, True}
        assert (prompts[0] in again) == (not held_out)


@pytest.mark.parametrize("name", ["chains", "chains_gpu"])
def test_the_limits_of_an_environment_have_room_for_its_answers(name):
    config = load_config(["--config", str(ROOT / f"experiments/environments/{name}.yaml")])
    sets = sample_sets(RECIPES[name].chains, RECIPES[name].seed)
    longest = {kind: max(len(row["answer"]) + 1 for row in rows) for kind, rows in sets.items()}
    assert longest["train"] <= config.rollout.max_new_tokens
    assert max(longest.values()) <= (config.eval.max_new_tokens or config.rollout.max_new_tokens)
    prompts = [row["prompt"] for rows in sets.values() for row in rows]
    assert max(map(len, prompts)) <= config.rollout.max_prompt_tokens
    assert max(longest.values()) + max(map(len, prompts)) <= RECIPES[name].max_positions


@pytest.mark.slow
def test_the_recipe_makes_all_that_its_settings_name(tmp_path):
    output = tmp_path / "data/built/chains"
    done = preloaded.run(0, "-m", "data.tiny", "--recipe", "chains", "--steps", 2, "--output", output)
    assert "8000 train and 128 test problems" in done.stderr, done.stderr[-2000:]
    settings = yaml.safe_load((ROOT / "experiments/environments/chains.yaml").read_text())
    assert (tmp_path / settings["model"]["path"] / "config.json").is_file()
    for source in settings["data"]["train"] + settings["data"]["eval"]:
        assert (tmp_path / source["path"]).stat().st_size > 0
