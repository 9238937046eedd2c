"""Rows and verdicts of reasoning-gym: references, the answer in a completion, text that must not run."""

import ast
import contextlib
import importlib.util
import json
import time
from pathlib import Path

import pytest

import reward
from data import reasoning_gym as command
from data.prompts import load_prompts
from tests.patience import limit
from verifiers import reasoning_gym
from verifiers.answer import stated_answer

EVALUATORS = {"eval", "exec", "compile", "parse_expr", "sympify", "literal_eval", "__import__"}
# Modules that evaluate text of their own while they make a row: constants, programs of its data.
ONLY_WHILE_MAKING = {
    "arithmetic.basic_arithmetic", "arithmetic.gsm_symbolic.generators_00_49",
    "arithmetic.gsm_symbolic.generators_50_99", "code.bf", "code.codeio",
}  # fmt: skip
HOSTILE = "__import__('pathlib').Path({path!r}).touch()"


def verdict(row: dict, completion: str) -> reward.Verdict:
    return reward.verify("reasoning_gym", completion, row["answer"])


def rows_of(task: str) -> list[dict]:
    return command.make_part(task, None, 1, 0, set()).rows


def row_of(task: str, answer, **metadata) -> dict:
    return {"answer": json.dumps({"task": task, "answer": answer, "metadata": metadata})}


def test_a_row_of_every_task_passes_its_own_reference(tmp_path):
    """A hostile answer, or hostile text in the row, runs in no verifier."""
    registry = reasoning_gym.load().factory.DATASETS
    tasks = [task for task in sorted(registry) if not reasoning_gym.refusal(task)]
    assert len(tasks) == 98 and set(registry) - set(tasks) == set(reasoning_gym.UNUSABLE)
    mark = tmp_path / "ran"
    hostile = HOSTILE.format(path=str(mark))
    for task in tasks:
        (row,) = rows_of(task)
        completion = reward.as_completion("reasoning_gym", row["answer"])
        assert row["prompt"] and verdict(row, completion).reward == 1
        reference = reasoning_gym.reference_of(row["answer"])
        wrong = {  # right by the package
            "gsm_symbolic": f"- {reference}", "game_of_life": f"{reference[:-1]}, [0]]",
            "letter_jumble": f"{reference} a", "spell_backward": f"{reference}a",
            "word_sorting": f"{reference}, a",
        }  # fmt: skip
        text = wrong.get(task, reference)
        assert verdict(row, f"<answer>{text}</answer>").reward == (task not in wrong), task
        nans = str(["nan"] * len(str(row["answer"]).split(",")))
        for text in ("?", hostile, f"[{hostile}]", "nan", nans, nans.replace("'", '"')):
            assert verdict(row, f"<answer>{text}</answer>").status == "wrong", task
    for task in ("number_sorting", "bitwise_arithmetic", "polynomial_multiplication", "simple_integration"):
        row = row_of(task, hostile, problem=hostile, integrand=hostile, variable="x", direction="ascending")
        assert verdict(row, "[1]").reward == 0
    assert not mark.exists()


def test_every_evaluator_of_the_package_is_known():
    """A new version of the package may bring another one; a person reads its verifier then."""
    root = Path(importlib.util.find_spec("reasoning_gym").origin).parent
    found = set()
    for path in root.rglob("*.py"):
        source = path.read_text()
        is_quiet = not any(f"{name}(" in source for name in EVALUATORS)
        for node in () if is_quiet else ast.walk(ast.parse(source)):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name.rpartition(".")[2] in EVALUATORS and name != "re.compile":
                found.add(".".join(path.relative_to(root).with_suffix("").parts))
    found = {name for name in found if ".contrib." not in name}
    known = {*reasoning_gym.LITERALS, *reasoning_gym.FORMULAS, *ONLY_WHILE_MAKING}
    assert found - {"logic.propositional_logic"} == known  # a parser of its own, called parse_expr


@pytest.mark.parametrize(
    "text, answer",
    [
        ("<answer> 5 </answer>", "5"), ("<answer>4</answer> or <answer>1 2\n3 4</answer>", "1 2\n3 4"),
        ("<answer><answer> 4 </answer></answer>", "4"), ("</answer><answer>5", "</answer><answer>5"),
        (r"so \boxed{5}", "5"), ("Answer: 5\nbecause 2 + 3", "5"), ("The **Answer:** 5", "5"),
        ("Answer:\n1 2\n3 4\n", "1 2\n3 4"), ("The answer is: 5", "5"), (" 5 \n", "5"), ("2 + 3\nis 5", None),
        ("Answer: 4\nno\nFinal answer: 5", "5"), ("Answer:", ""), ("", ""),
    ],
)  # fmt: skip
def test_the_stated_answer(text, answer):
    assert stated_answer(text) == answer


def test_fractions_stops_thoughts_and_limits():
    (row,) = rows_of("word_sorting")
    words = reasoning_gym.reference_of(row["answer"])
    swapped = ", ".join(reversed(words.split(", ")))
    assert verdict(row, words).reward == 1 and 0 < verdict(row, swapped).reward < 1
    assert reward.score_of(verdict(row, swapped), binary=True) == 0
    apples = row_of("gsm_symbolic", "1200")
    for text in ("1200 apples", "$1200", "= 1200.0."):
        assert verdict(apples, text).reward == 1, text
    for text in ("1200 and 7", "\u22121200", "minus 1200", "-$1200"):
        assert verdict(apples, text).reward == 0, text
    gcd = row_of("gcd", "4")
    assert verdict(gcd, "Answer: 4.").reward == 1 and verdict(gcd, "4 or\n5").status == "no_answer"
    assert verdict(gcd, "<think>4</think>5").reward == 0 and verdict(gcd, "<think>4").status == "no_answer"
    boxed = r"\boxed{\text{4}}"
    for text in ("Answer: **4**", "**Answer: 4**", "Answer: `4`.", "$4$", r"Answer: \(4\)", boxed):
        assert verdict(gcd, text).reward == 1, text
    assert verdict(gcd, "**.4**").reward < 1 and verdict(gcd, "****").reward == 0
    sums = row_of("countdown", "1+2", numbers=[1, 2], target=3)
    assert verdict(sums, "1 + 2").reward == 1 and verdict(sums, "9**9**9**9").status == "wrong"
    factors = row_of("prime_factorization", "3 × 3 × 71")
    assert verdict(factors, "3 × 3 × 71.").reward == 1  # the verifier raises on the full stop
    assert verdict(factors, "3 and 71.").detail == "the verifier raises on this answer"


@pytest.mark.parametrize(
    "answer, word",
    [
        ("4", "needs a task"), ("{", "not JSON"), ('{"task": "gdc", "metadata": {}}', "gcd"),
        ('{"task": "os.system", "metadata": {}}', "no task"), ('{"task": "gcd"}', "metadata"),
        ('{"task": "coin_flip", "metadata": {}}', "accepts 0"),
        ('{"task": "gcd", "metadata": {}, "config": 3}', "config"),
        ('{"task": "gcd", "metadata": {}, "config": {"digits": 3}}', "digits"),
        ('{"task": "zebra_puzzles", "answer": "4", "metadata": {}}', "pycosat"),
    ],
)  # fmt: skip
def test_a_bad_row_is_an_error_with_a_reason(answer, word):
    reply = reward.verify("reasoning_gym", "4", answer)
    assert reply.status == "error" and word in reply.detail and not reply.by_text


def test_the_start_tries_references_in_the_pool_and_a_prefix_opens_completions():
    """A reference that the verifier refuses is left out; the others are counted by task."""
    good = rows_of("gcd")[0]["answer"]
    bad = json.dumps({"task": "word_sorting", "answer": "b", "metadata": {"sorted_words": ["a"]}})
    rows = [("reasoning_gym", answer, {}) for answer in (good, bad, "{")]
    comparisons: dict = {}
    with reward.RewardPool(1) as pool:
        assert set(reward.impossible_references(pool, rows, comparisons=comparisons)) == {1, 2}
        assert comparisons == {0: ("gcd", reasoning_gym.reference_of(good))}
        cases = {  # (prompt, prefix, completion): reward
            ("x\nAnswer:", "Answer:", " 4\nbecause"): 1, ("x\n", "", " 4\nbecause"): 0,
            ("<think>\nAnswer:", "Answer:", " 4"): 0, ("<think>a</think>", "</think>", "4"): 1,
            ("<think>\n", "<think>\n", "5</think>4"): 1, ("<think>\n", "<think>\n", "4"): 0,
        }  # fmt: skip
        answer = row_of("gcd", "4")["answer"]
        for key in cases:
            prompt, prefix, completion = key
            pool.submit(key, "reasoning_gym", completion, answer, {"prompt": prompt}, prefix=prefix)
        assert {key: verdict.reward for key, verdict in pool.collect().items()} == cases


def test_the_command_writes_disjoint_sets(tmp_path, capsys):
    """Item i is drawn with seed + i by the package: sets of neighbouring seeds must differ nevertheless."""
    prompts = {}
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        options = f"--tasks gcd:0 gcd:1 lcm chain_sum --difficulty 0 1 --rows 60 --test 30 --seed {seed}"
        command.main([*options.split(), "--output", str(folder)])
        train = load_prompts(folder / "train.jsonl")
        test = load_prompts(folder / "test.jsonl")
        assert (len(train), len(test)) == (60, 30) and {prompt.kind for prompt in train} == {"reasoning_gym"}
        texts = [prompt.text for prompt in (*train, *test)]
        assert len(set(texts)) == 90
        assert {(p.columns["task"], p.difficulty) for p in test} == {
            (task, level) for task in ("gcd", "lcm", "chain_sum") for level in (0, 1)
        }
        prompts[seed] = {text for text in texts if "gcd" in text.lower() or "greatest" in text.lower()}
    assert len(prompts[1] & prompts[2]) < 10
    assert "constant answer" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["--tasks", "gcd", "--output", str(folder / "train.jsonl")])
    assert "train.jsonl is a file" in capsys.readouterr().err


def test_constants_repeats_and_failures_are_reported(monkeypatch, capsys, tmp_path):
    part = command.make_part("syllogism", 0, 40, 0, set())
    assert any(line.startswith("warning") and "one constant" in line for line in command.describe(part, 40))
    times = command.describe(command.make_part("time_intervals", None, 20, 0, set()), 20)
    assert any("right in 0%" in line or "right in 5%" in line for line in times), times
    few = command.make_part("chain_sum", 0, 250, 0, set())  # 2 terms of one digit: 155 prompts
    assert few.num_repeated > 100 and len(few.rows) <= 155
    sums = [tuple(sorted(row["prompt"].split())) for row in few.rows if "+" in row["prompt"]]
    assert len(sums) == len({*sums}) > 40, "3 + 5 and 5 + 3 are one"
    assert command.content_of("Calculate 5 + 3.", "8") == command.content_of("The sum 3 + 5 =", "8")
    assert "different prompts" in " ".join(command.describe(few, 250))
    even = command.make_part("products", 0, 40, 0, set(), most=0.1)  # one digit: a fifth of the answers are 0
    assert sum(reasoning_gym.reference_of(row["answer"]) == "0" for row in even.rows) == 4
    assert even.num_frequent and "by --balance" in command.describe(even, 40)[0]
    exhausted = command.make_part("products", 0, 160, 0, set(), most=0.08)  # has 100 prompts
    constant, share, _ = command.best_constant(exhausted.rows)
    assert 40 < len(exhausted.rows) < 100 and share <= 0.08
    monkeypatch.setattr(command, "MAX_ITEM_S", limit(0.2))
    make = reasoning_gym.load().factory.DATASETS["gcd"][0]
    item = make.__getitem__

    def fails_sometimes(self, number):
        while number == 1:
            with contextlib.suppress(Exception):  # as in the package
                time.sleep(3000)
        if number == 2:
            raise RuntimeError("no solution")
        return item(self, number)

    monkeypatch.setattr(make, "__getitem__", fails_sometimes)
    part = command.make_part("gcd", None, 5, 0, set())
    assert len(part.rows) == 5 and sum(part.failures.values()) == 2
    assert any("no solution" in reason for reason in part.failures)
    assert any("has not ended" in reason for reason in part.failures)
    monkeypatch.setattr(make, "__getitem__", lambda self, number: time.sleep(3000))
    with pytest.raises(ValueError, match="gcd: the generator has not ended after .* s; take another diff"):
        command.make_part("gcd", None, 5, 0, set())


@pytest.mark.parametrize(
    "options, words",
    [
        ("gdc", "gcd"), ("gcd --difficulty 99", "0 to 3"), ("acre --difficulty 0", "none"),
        ("knight_swap --difficulty 0", "min_nodes"), ("zebra_puzzles", "pycosat"), ("coin_flip", "accepts 0"),
        ("gcd --rows 0", "--rows 0"), ("gcd --balance 8", "--balance 8"), ("gcd:x", "lcm:2"),
        ("gcd:²", "lcm:2"), ("gcd lcm --difficulty 0 1 --rows 3", "4 tasks"),
    ],
)  # fmt: skip
def test_bad_options_are_one_sentence(options, words, capsys, tmp_path):
    with pytest.raises(SystemExit):
        command.main(["--tasks", *options.split(), "--output", str(tmp_path / "rows")])
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error and not (tmp_path / "rows").exists()


def test_the_list_has_the_levels_that_work():
    lines = command.list_tasks()
    assert {
        "knight_swap: no levels",
        "caesar_cipher: levels 0, 1",
        "power_function: levels 0, 1, 2, 3, 4",
    } <= {*lines}
    assert command.make_part("power_function", 0, 1, 0, set()).rows, "whose configuration has no validate()"
