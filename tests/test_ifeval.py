"""experiments/ifeval.py: reading IFEval, strict figures by hand, a real evaluation."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest

from data import random_model
from experiments import ifeval
from experiments.bench.common import read_results
from tests import preloaded

TASKS = [
    ("Say it without commas in capitals.", ["punctuation:no_comma", "change_case:english_capital"], [{}, {}]),
    ("Use 3 words.", ["length_constraints:number_words"], [{"num_words": 3, "relation": "at least"}]),
    ("Give a title.", ["detectable_format:title"], [{}]),
]


@pytest.fixture
def dataset(tmp_path):
    """Return a JSONL file in the layout of the hub, with null for the arguments of other checks."""
    rows = [
        {"key": number, "prompt": prompt, "instruction_id_list": names,
         "kwargs": [{"num_words": None, "keywords": None} | arguments for arguments in kwargs]}
        for number, (prompt, names, kwargs) in enumerate(TASKS)
    ]  # fmt: skip
    file = tmp_path / "ifeval.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_rows_of_ifeval_become_prompts_and_bad_rows_are_named(dataset):
    prompts = ifeval.load_prompts(str(dataset), limit=2)
    assert [row["prompt"] for row in prompts] == [TASKS[0][0], TASKS[1][0]]
    assert json.loads(prompts[1]["answer"]) == {"instruction_id_list": TASKS[1][1], "kwargs": TASKS[1][2]}
    (dataset.parent / "twice").mkdir()
    for name in ("a", "b"):
        shutil.copy(dataset, dataset.parent / "twice" / f"{name}.jsonl")
    assert len(ifeval.load_prompts(str(dataset.parent / "twice"), None)) == 2 * len(TASKS)
    with pytest.raises(ValueError, match="--data"):
        ifeval.load_prompts(str(dataset.parent / "absent.jsonl"), None)
    text = dataset.read_text()
    for changed, word in (
        (text.replace("kwargs", "arguments"), "kwargs"),
        (text.replace(":title", ":titel"), "row 3"),
    ):
        dataset.write_text(changed)
        with pytest.raises(ValueError, match=word):
            ifeval.load_prompts(str(dataset), None)


def wilson(successes: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval by the formula (Wilson 1927)."""
    z = 1.959964
    p = successes / total
    centre = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return centre - half, centre + half


def test_strict_figures_of_hand_made_completions(dataset):
    prompts = ifeval.load_prompts(str(dataset), None)
    texts = ["IT IS, SO.", "one two three", ""]  # one of two, all, none
    rows = [
        row | {"completion": text, "num_tokens": length, "finish_reason": reason}
        for row, text, length, reason in zip(prompts, texts, (4, 3, 8), ("stop", "stop", "length"))
    ]
    figures = ifeval.strict_figures(rows)
    assert figures["solved"] == [False, True, False]
    assert (figures["prompt"]["share"], figures["instruction"]["share"]) == (1 / 3, 2 / 4)
    assert (figures["mean_tokens"], figures["cut_at_limit_frac"]) == (5, 1 / 3)
    interval = (figures["instruction"]["low"], figures["instruction"]["high"])
    assert interval == pytest.approx(wilson(2, 4), abs=1e-6)
    change = ifeval.difference([False] * 6 + [True], [True] * 5 + [False, False])
    # of 6 prompts that differ, 5 or more on one side: 2 * (6 + 1) / 2**6
    assert change == {"gained": 5, "lost": 1, "p": pytest.approx(14 / 64)}


def test_the_estimate_is_proportional_to_the_number_of_prompts(monkeypatch):
    def complete(model, prompts, name, args):
        return {"seconds": {"engine": 10 + len(prompts), "sampling": len(prompts)}}, []

    monkeypatch.setattr(ifeval, "complete", complete)
    args = ifeval.parse_args(["--models", "a", "b"])
    # two models, each with a start of 10 s and a second per prompt
    assert ifeval.estimate_minutes([{}] * 590, args) == pytest.approx(2 * 600 / 60)


def test_a_wrong_command_ends_before_the_first_evaluation(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(ifeval, "complete", None)
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "config.json").write_text("{}")
    argv = ["--models", str(tmp_path / "start"), str(tmp_path), 'rollout.stop=["."]', "--data", str(dataset)]
    args = ifeval.parse_args(argv)
    assert (args.models, args.settings) == ([tmp_path / "start", tmp_path], ['rollout.stop=["."]'])
    with pytest.raises(ValueError, match="not a model"):
        ifeval.main(args)
    for name in ("figures", "figures.json"):
        (tmp_path / "figures.json").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=name):
            ifeval.parse_args([*argv, "--json", str(tmp_path / name)])


def test_a_model_that_drops_prompts_has_no_figures(dataset, tmp_path, monkeypatch):
    """Pairs of two models would belong to different prompts."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(ifeval, "complete", lambda model, prompts, *_: ({"model": "", "weights": ""}, [{}]))
    args = ifeval.parse_args(["--models", str(tmp_path), "--data", str(dataset), "--no-estimate"])
    with pytest.raises(ValueError, match="2 of 3 prompts were dropped"):
        ifeval.main(args)


@pytest.mark.slow
def test_two_models_are_evaluated_by_one_command(dataset, tmp_path, capfd, monkeypatch):
    started = SimpleNamespace(
        DEVNULL=None, run=lambda command, **options: preloaded.run(0, *command[1:], timeout_s=120)
    )
    monkeypatch.setattr(ifeval, "subprocess", started)
    model = tmp_path / "model"
    random_model.main(["--output", str(model), "--text", str(dataset), "--layers", "1"])
    options = ["--models", model, model, "--data", dataset, "--json", tmp_path / "ifeval.json"]
    options += ["--max-new-tokens", 8, "--dtype", "float32", "--kv-cache-gib", 0.25, "--no-estimate"]
    ifeval.main(ifeval.parse_args([str(option) for option in options]))
    result = read_results(tmp_path / "ifeval.json")
    first, last = result["models"]
    assert first == last and first["prompt"]["total"] == 3 and first["instruction"]["total"] == 4
    assert first["cut_at_limit_frac"] == 1 and first["mean_tokens"] == 8
    assert result["difference"] == {"gained": 0, "lost": 0, "p": 1.0}
    assert len(first["solved"]) == 3
    table = ifeval.table_lines(result)
    assert f"{first['prompt']['share']:.3f}" in table[-1] and table[-1].endswith("0, 0 (p = 1) |")
    assert "\n".join(table) in capfd.readouterr().out
