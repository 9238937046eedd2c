"""The declared studies: rows, commands, task instances, prompts, and the measurement of clip_scale."""

import json
import math
import re
import shlex
from dataclasses import replace

import pytest
from conftest import ROOT

from data.chains import sample_sets
from data.tiny import RECIPES, pair_habits, recipe_of, sample_problems
from experiments import report, run
from experiments.declaration import read_declaration
from experiments.report import Run, make_run
from experiments.studies.clip_scale import scaling
from experiments.studies.elimination_tuned import pools
from experiments.studies.order_of_prompts import parts
from train_rl import load_config

DECLARED = sorted(file.parent for file in run.STUDIES.glob("*/declared.json"))

each_declared_study = pytest.mark.parametrize("folder", DECLARED, ids=lambda folder: folder.name)


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@each_declared_study
def test_every_declared_row_is_a_yaml_that_loads(folder):
    for row in read_declaration(folder / "declared.json")["rows"]:
        assert load_config(["--config", str(folder / f"{row}.yaml")]).data.train


PAGES = sorted([*run.STUDIES.glob("*/README.md"), *run.STUDIES.glob("*/run.sh")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_a_command_for_a_table_has_its_runs_and_its_parent(page):
    """A pipeline of hours must not end at its last line, for example at an export without --parent."""
    parser = report.Parser()
    report.add_table_options(parser)
    report.add_output_options(parser)
    text = page.read_text().replace("\\\n", " ")
    for command in re.findall(r"^ *python experiments/report\.py (.*)$", text, re.M):
        args = parser.parse_args(shlex.split(command, comments=True))
        assert args.check or (args.runs and args.parent is not None), command


# ---- task instances ----------------------------------------------------------------------------------------


def test_a_recipe_with_a_seed_is_another_task_instance():
    assert recipe_of("habits") == RECIPES["habits"] and recipe_of("chains_gpu") == RECIPES["chains_gpu"]
    other = recipe_of("habits_3")
    assert other == replace(RECIPES["habits"], seed=3)
    assert (pair_habits(other)[0] != pair_habits(RECIPES["habits"])[0]).any()
    for name in ("habit", "habits_", "habits_x", "nothing_3"):
        with pytest.raises(ValueError, match=name):
            recipe_of(name)


# ---- prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", pools.SHARES)
def test_a_pool_has_its_share_of_prompts_without_variance(share, tmp_path):
    pools.write_pools("habits_2", tmp_path)
    pool = (tmp_path / f"pool_{100 * share:.0f}.jsonl").read_text()
    rows = list(map(json.loads, pool.splitlines()))
    wrong_frac, _ = pair_habits(recipe_of("habits_2"))
    num_hopeless = sum("*" in row["prompt"] for row in rows)
    num_solved = 0
    for row in rows:
        left, _, right = row["prompt"].rstrip("=").partition("+")
        num_solved += not any(wrong_frac[int(x), int(y)] for x, y in zip(left.strip(), right.strip()))
    num_solved -= num_hopeless  # products have no "+", so the loop finds no bad pair
    assert len(rows) == 1200 and (num_solved + num_hopeless) / 1200 == pytest.approx(share, abs=1e-3)
    assert num_hopeless / num_solved == pytest.approx(4 / 3, abs=0.02)
    _, test = sample_problems(recipe_of("habits_2"))
    assert not {row["prompt"] for row in test} & {row["prompt"] for row in rows}


def test_parts_are_disjoint_and_fill_whole_steps_of_the_stages():
    """Each stage of `staged` visits the prompts of its part once; `shuffled` visits all of them once."""
    rows = sample_sets(RECIPES["chains"].chains, seed=4)["train"]
    by_part = parts.parts_of(rows)
    prompts = [row["prompt"] for part in by_part.values() for row in part]
    assert len(prompts) == len(set(prompts)) == 976
    assert [max(row["difficulty"] for row in part) for part in by_part.values()] == [5, 15, 30]
    tokens = [8 * 12 * sum(row["difficulty"] for row in part) for part in by_part.values()]
    assert tokens == pytest.approx([1e5, 2e5, 3e5], rel=0.08)
    assert sum(tokens) == pytest.approx(6.1e5, rel=0.03)
    folder = run.STUDIES / "order_of_prompts"
    for name in ("staged", "reversed"):
        config = load_config(["--config", str(folder / f"{name}.yaml")])
        for stage in config.stages:
            part = by_part[stage.name]
            (source,) = stage.model_extra["data"]["train"]
            assert source["path"].endswith(f"part_{stage.name}.jsonl")
            if stage is not config.stages[-1]:
                assert stage.until.steps * config.rollout.prompts_per_step == len(part)
        assert config.train.num_steps * config.rollout.prompts_per_step == 976
        assert config.train.max_generated_tokens is None


# ---- the scale of a clip -----------------------------------------------------------------------------------


def test_the_clip_of_a_share_is_interpolated_in_log_alpha():
    alphas = [0.01, 0.1, 1.0]
    assert scaling.crossing(alphas, [0.5, 0.4, 0.0]) == pytest.approx(10**-0.5)
    assert scaling.crossing(alphas, [0.5, 0.2, 0.0]) == pytest.approx(0.1)
    assert scaling.crossing(alphas, [0.1, 0.1, 0.0]) == 0.01
    assert scaling.crossing(alphas, [0.9, 0.5, 0.4]) == 1.0


def made_run(row: str, seed: int, share: float, entropy: float, mean_tokens: float) -> Run:
    """Make a run of eight steps whose steps 1, 7 and 8 clip more than the early steps 2 to 6."""
    steps = {
        "step": range(1, 9), "generated_tokens": range(100, 900, 100), "tokens_total": [1] * 8,
        "gradient_tokens_total": [1] * 8, "zero_variance_frac": [0] * 8, "seconds_per_step": [1] * 8,
        "clipped/entropy_group_0": [9, *[share] * 5, 9, 9], "entropy/entropy_group_0": [entropy] * 8,
        "completion_tokens": [mean_tokens] * 8, "clipped": [9, *[share / 2] * 5, 9, 9],
    }  # fmt: skip
    evaluations = {"step": [0, 8], "generated_tokens": [0, 800], "eval/chains/avg_at_4": [0.1, 0.2]}
    columns = {name: [float(value) for value in values] for name, values in steps.items()}
    record = {"row": row, "seed": seed, "steps": columns, "evaluations": evaluations}
    return make_run(record, "made", None, "chains/avg_at_4")


def test_the_slope_is_the_power_with_which_the_spread_falls():
    """The share is a function of eps / spread, so eps* falls with the tokens as the spread does."""
    powers = [-0.5, -0.3]  # of two seeds; -0.5 if tokens are independent
    data = scaling.measure(scaled_rows(powers))
    assert len(data) == 6
    for figures in data:
        spread = 0.004 * figures["tokens"] ** powers[figures["seed"]]
        assert figures["eps"] == pytest.approx(math.e * spread), "the share is 0.2 there"
    assert list(scaling.slopes_of(data).values()) == pytest.approx(powers)
    table = scaling.slope_lines(data)
    for line in table[2:5]:  # one power at all lengths, so each pair of neighbours has it as well
        assert " | 2 | 0 | -0.40 | " in line
    assert table[5].startswith("| change of the power | 2 | 0 | ") and "0.00" in table[5]
    cells = [line.strip("| ").split(" | ") for line in scaling.table_lines(data)]
    assert cells[0][-2:] == ["eps*", "at an end"]
    assert [(row[0], row[1], row[-1]) for row in cells[2:]] == [
        ("short", "8.0", "0"), ("mixed", "26.0", "0"), ("long", "60.0", "0"),
    ]  # fmt: skip


def scaled_rows(powers: list[float]) -> dict[str, list[Run]]:
    """Make runs of all lengths and alphas, a seed per power with which the spread falls with the tokens."""
    entropy = 0.15
    rows = {}
    for length, mean_tokens in (("short", 40), ("mixed", 130), ("long", 300)):
        for name, alpha in scaling.ALPHAS.items():
            eps = alpha * entropy / math.log(98)
            spreads = [0.004 * (0.2 * mean_tokens) ** power for power in powers]
            row = f"{length}_{name}"
            rows[row] = [
                made_run(row, seed, 0.5 - 0.3 * math.log(eps / spread), entropy, mean_tokens)
                for seed, spread in enumerate(spreads)
            ]
    return rows
