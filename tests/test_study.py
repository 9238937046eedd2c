"""experiments/study.py on the declared studies, their YAML files and prompts, and the choice of settings."""

import json
import math
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from test_table import write_run

from data.chains import sample_sets
from data.tiny import RECIPES, pair_habits, recipe_of, sample_problems
from experiments import report, run, starts, study
from experiments.bench.common import write_json
from experiments.declaration import read_declaration
from experiments.report import Run, make_run
from experiments.studies import tables
from experiments.studies.clip_scale import scaling
from experiments.studies.elimination_tuned import pools
from experiments.studies.order_of_prompts import parts
from train_rl import load_config

DECLARED = sorted(file.parent for file in run.STUDIES.glob("*/declared.json"))
PORTIONED = [folder for folder in DECLARED if "instances" in read_declaration(folder / "declared.json")]

each_declared_study = pytest.mark.parametrize("folder", DECLARED, ids=lambda folder: folder.name)
each_study = pytest.mark.parametrize("folder", PORTIONED, ids=lambda folder: folder.name)


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@each_declared_study
def test_every_declared_row_is_a_yaml_that_loads(folder):
    for row in read_declaration(folder / "declared.json")["rows"]:
        assert load_config(["--config", str(folder / f"{row}.yaml")]).data.train


def test_the_studies_of_this_file_are_found():
    names = {folder.name for folder in PORTIONED}
    assert names >= {"elimination_tuned", "order_of_prompts", "clip_scale", "losses_tuned"}


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


@each_declared_study
def test_the_runs_of_every_declared_study_can_be_planned(folder):
    """Also without task instances, and with a sentence about tuning in place of a plan."""
    declared = read_declaration(folder / "declared.json")
    declared = declared if (folder / "tuning.json").is_file() else declared | {"tuning": "none"}
    planned = study.runs_of_test(folder, declared, declared["rows"], declared["seeds"])
    assert len(planned) == len(declared["rows"]) * len(declared["seeds"])
    assert load_config(list(planned[-1].arguments)).train.seed == declared["seeds"][-1]


# ---- task instances ----------------------------------------------------------------------------------------


@each_study
def test_a_run_reads_the_files_of_its_task_instance_alone(folder):
    """The first seed of instance 2; stages and the file of offline scores included."""
    declared = read_declaration(folder / "declared.json")
    recipe = declared["instances"]["recipe"]
    seed = 2 * declared["instances"]["seeds_each"]
    for row in declared["rows"]:
        one = study.make_run(folder, declared, row, seed, "test", "train.learning_rate=0.125")
        config = load_config(list(one.arguments))
        assert (config.train.seed, config.train.learning_rate) == (seed, 0.125)
        assert config.model.path == f"data/built/{recipe}_2/model"
        text = config.model_dump_json()
        assert f"built/{recipe}/" not in text and text.count(f"built/{recipe}_2/") >= 2
        first = study.make_run(folder, declared, row, 0, "test", "")
        assert f"built/{recipe}/" in load_config(list(first.arguments)).model_dump_json()


@each_study
def test_tuning_and_test_share_no_task_instance(folder):
    declared = read_declaration(folder / "declared.json")
    size = declared["instances"]["seeds_each"]
    tuned = {seed // size for seed in declared.get("tuning", {"seeds": []})["seeds"]}
    assert tuned.isdisjoint(seed // size for seed in declared["seeds"])


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
    rows = [
        json.loads(line) for line in (tmp_path / f"pool_{100 * share:.0f}.jsonl").read_text().splitlines()
    ]
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
            assert stage is config.stages[-1] or stage.until.steps * config.rollout.prompts_per_step == len(
                part
            )
        assert config.train.num_steps * config.rollout.prompts_per_step == 976
        assert config.train.max_generated_tokens is None


# ---- the choice --------------------------------------------------------------------------------------------


@pytest.fixture
def small_study(tmp_path, monkeypatch):
    """A declared study of two rows, with finished tuning runs of two rates and two seeds."""
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "STUDIES", tmp_path / "studies")
    folder = tmp_path / "studies" / "small"
    folder.mkdir(parents=True)
    declared = json.loads((ROOT / "experiments/studies/losses_tuned/declared.json").read_text())
    declared |= {"rows": ["espo", "grpo"], "contrasts": [{"row": "espo", "parent": "grpo"}], "seeds": [0, 1]}
    declared["tuning"] = {
        "seeds": [200, 201], "metric": "avg_at_8", "rates": [0.25, 0.5],
        "clips": {"grpo": ["algorithm.clip_eps_low=0.1", "algorithm.clip_eps_low=0.2"]},
    }  # fmt: skip
    (folder / "declared.json").write_text(json.dumps(declared))
    finals = {"espo": [(0.5, 0.5), (0.25, 0.75)], "grpo": [(0.1, 0.2), (0.3, 0.9), (0.9, 0.2), (0.1, 0.1)]}
    for row, candidates in finals.items():
        for number, values in enumerate(candidates):
            for seed, value in zip((200, 201), values):
                write_run(tmp_path / "runs" / "small" / f"tune_{number}", row, seed, [0.1, value])
    for row in ("espo", "grpo"):
        base = f"{ROOT}/experiments/studies/losses_tuned/{row}.yaml"
        (folder / f"{row}.yaml").write_text(f"base: {base}\n")
    (tmp_path / "train_rl.py").symlink_to(ROOT / "train_rl.py")
    monkeypatch.setattr(run, "changed_settings", lambda one: [])  # the folders have no settings
    monkeypatch.setattr(run, "missing_files", lambda one: {})  # nothing is built
    monkeypatch.setattr(starts, "ROOT", tmp_path)
    monkeypatch.setattr(starts, "STARTS", tmp_path / "experiments" / "starts")
    monkeypatch.setattr(study, "commit_of", lambda: {"commit": "c0ffee", "dirty": False})
    return folder


def fail(folder: Path, times: int) -> None:
    """Take the summary of a run, and write the error files of its failed launches."""
    (folder / "summary.json").unlink(missing_ok=True)
    for name in ("first_error_rank_0.txt", "error_rank_0.txt")[-times:]:
        (folder / name).write_text("out of memory")


def test_the_candidate_with_the_highest_mean_is_chosen_and_tested(small_study, capsys):
    """Both candidates of espo have a mean of 0.5, so the first is chosen."""
    assert study.main(["small", "choose"]) == 0
    records = json.loads((small_study / "tuning.json").read_text())
    grpo = "train.learning_rate=0.25 algorithm.clip_eps_low=0.2"
    assert [record["settings"] for record in records] == ["train.learning_rate=0.25", grpo]
    assert records[1]["candidates"]["train.learning_rate=0.5 algorithm.clip_eps_low=0.1"] == [0.9, 0.2]
    assert f"| grpo | `{grpo}` | 0.150, 0.600, 0.550, 0.100 |" in capsys.readouterr().out
    declared = read_declaration(small_study / "declared.json")
    one = study.runs_of_test(small_study, declared, ["grpo"], [0])[0]
    assert one.arguments[-2:] == tuple(grpo.split())


def test_an_unfinished_run_stops_the_choice_and_a_run_that_failed_twice_counts_as_0(small_study, capsys):
    folder = run.ROOT / "runs" / "small" / "tune_1" / "grpo" / "seed_201"
    for times in (0, 1):
        (folder / "summary.json").unlink(missing_ok=True)
        if times:
            fail(folder, times)
        assert study.main(["small", "keep"]) == 0 and study.main(["small", "choose"]) == 2
        assert str(folder.relative_to(run.ROOT)) in capsys.readouterr().err
    fail(folder, 2)
    assert study.main(["small", "choose"]) == 0
    (_, grpo) = json.loads((small_study / "tuning.json").read_text())
    assert grpo["settings"] == "train.learning_rate=0.5 algorithm.clip_eps_low=0.1"


@pytest.mark.parametrize("stage", ["tune", "test"])
def test_a_failed_run_is_repeated_once(stage, small_study, monkeypatch, capsys):
    """Each launch deletes the error file of the earlier launch and fails, as train_rl.py does."""
    write_json(small_study / "tuning.json", [{"row": row, "settings": ""} for row in ("espo", "grpo")])
    seed = {"tune": 201, "test": 1}[stage]
    folder = run.ROOT / "runs" / "small" / {"tune": "tune_1", "test": "test"}[stage] / "grpo" / f"seed_{seed}"
    if stage == "test":
        for row in ("espo", "grpo"):
            for test_seed in (0, 1):
                write_run(folder.parents[1], row, test_seed, [0.1, 0.5])
    (folder / "summary.json").unlink()
    launched = []

    def run_all(todo, jobs, ranks):
        for one in todo:
            (one.folder / "error_rank_0.txt").unlink(missing_ok=True)
            (one.folder / "error_rank_0.txt").write_text(f"failure {len(launched)}")
        launched.append(len(todo))
        return todo

    monkeypatch.setattr(run, "run_all", run_all)
    assert [study.main(["small", stage]) for _ in range(3)] == [1, 1, 0]
    assert launched == [1, 1, 0]
    assert str(folder.relative_to(run.ROOT)) in capsys.readouterr().err
    assert (folder / "first_error_rank_0.txt").read_text() == "failure 0"


def test_runs_that_the_check_would_refuse_are_not_launched(small_study, monkeypatch, capsys):
    """A dirty checkout, no checkout, and committed start weights that were changed."""
    (run.ROOT / "runs" / "small" / "tune_1" / "espo" / "seed_200" / "summary.json").unlink()
    launched = []
    monkeypatch.setattr(run, "run_all", lambda todo, jobs, ranks: launched.append(len(todo)))
    for commit, dirty in (("c0ffee", True), (None, None)):
        monkeypatch.setattr(study, "commit_of", lambda: {"commit": commit, "dirty": dirty})  # noqa: B023
        assert study.main(["small", "tune"]) == 2 and "commit" in capsys.readouterr().err
        assert study.main(["small", "tune", "--dry-run"]) == 0
    monkeypatch.setattr(study, "commit_of", lambda: {"commit": "c0ffee", "dirty": False})
    changed = run.ROOT / "experiments" / "starts" / "mine"
    changed.mkdir(parents=True)
    with (small_study / "espo.yaml").open("a") as file:
        file.write("model: {path: experiments/starts/mine/model}\n")
    assert study.main(["small", "tune"]) == 2 and str(changed) in capsys.readouterr().err
    assert launched == []


def test_files_that_are_missing_or_of_another_start_are_refused(small_study, tmp_path, monkeypatch, capsys):
    """A run without its pool would fail twice; a folder trained anew has other weights than the start."""
    launched = []
    monkeypatch.setattr(run, "run_all", lambda todo, jobs, ranks: launched.append(len(todo)))
    (run.ROOT / "runs" / "small" / "tune_1" / "espo" / "seed_200" / "summary.json").unlink()
    monkeypatch.setattr(run, "missing_files", lambda one: {"data.train": f"pool_{one.row}.jsonl"})
    assert study.main(["small", "tune"]) == 2 and "pool_espo.jsonl" in capsys.readouterr().err
    monkeypatch.setattr(run, "missing_files", lambda one: {})
    monkeypatch.setattr(starts, "ROOT", ROOT)
    monkeypatch.setattr(starts, "STARTS", ROOT / "experiments" / "starts")
    built = tmp_path / "data" / "built" / "chains_200" / "model"
    built.mkdir(parents=True)
    assert study.main(["small", "tune"]) == 0, "no start is committed for instance 200"
    monkeypatch.setattr(study, "instance_settings", lambda *args: ["model.path=data/built/habits/model"])
    built = built.parents[1] / "habits" / "model"
    shutil.copytree(ROOT / "experiments" / "starts" / "tiny" / "model", built)
    assert study.main(["small", "tune"]) == 2 and "data/built/habits" in capsys.readouterr().err
    shutil.rmtree(built)
    shutil.copytree(ROOT / "experiments" / "starts" / "habits" / "model", built)
    assert study.main(["small", "tune"]) == 0
    assert launched == [1, 1]


def test_tuning_evaluates_the_last_step_alone(small_study, monkeypatch):
    monkeypatch.chdir(run.ROOT)
    row = small_study / "grpo.yaml"
    row.write_text("base: " + str(ROOT / "experiments/studies/elimination_tuned/grpo.yaml"))
    declared = read_declaration(small_study / "declared.json")
    (tuned, *_) = study.runs_of_tuning(small_study, declared, ["grpo"], [200])
    tested = study.make_run(small_study, declared, "grpo", 0, "test", "")
    assert [load_config(list(one.arguments)).eval.every for one in (tuned, tested)] == [0, 10]


def test_a_portion_is_the_next_unfinished_runs(small_study, monkeypatch, capsys):
    """Of 12 tuning runs, the two without a summary are unfinished."""
    for seed in (200, 201):
        (run.ROOT / "runs" / "small" / "tune_1" / "espo" / f"seed_{seed}" / "summary.json").unlink()
    launched = []
    monkeypatch.setattr(run, "run_all", lambda todo, jobs, ranks: launched.append([r.folder for r in todo]))
    for _ in range(2):
        assert study.main(["small", "tune", "--runs", "1"]) == 0
    assert [len(folders) for folders in launched] == [1, 1]
    assert study.main(["small", "tune"]) == 0 and len(launched[-1]) == 2
    assert study.main(["small", "tune", "--seeds", "0"]) == 2 and "0" in capsys.readouterr().err
    assert study.main(["small", "test"]) == 2 and "tuning.json" in capsys.readouterr().err


def test_another_machine_continues_from_the_records(small_study, capsys):
    """Seed 0 of the test has both rows, seed 1 lacks espo; then the folders of the runs are gone."""
    runs = run.ROOT / "runs" / "small"
    fail(runs / "tune_0" / "grpo" / "seed_200", 2)
    for row, seed in (("espo", 0), ("grpo", 0), ("grpo", 1)):
        write_run(runs / "test", row, seed, [0.1, 0.5])
    for _ in range(2):  # repeated: nothing is recorded twice
        assert study.main(["small", "keep"]) == 0
    assert "kept: seeds [0]; incomplete, not kept: seeds [1]" in capsys.readouterr().out
    shutil.rmtree(runs)
    records = [json.loads(line) for line in (small_study / "runs.jsonl").read_text().splitlines()]
    assert sorted((record["row"], record["seed"]) for record in records) == [("espo", 0), ("grpo", 0)]
    assert study.main(["small", "tune", "--dry-run"]) == 0
    assert "train_rl.py" not in capsys.readouterr().out, "all tuning runs are recorded"
    assert study.main(["small", "choose"]) == 0
    (_, grpo) = json.loads((small_study / "tuning.json").read_text())
    assert grpo["candidates"]["train.learning_rate=0.25 algorithm.clip_eps_low=0.1"] == [0.0, 0.2]
    assert study.main(["small", "test", "--dry-run"]) == 0
    commands = capsys.readouterr().out
    assert commands.count("train.seed=1") == 2 and "train.seed=0" not in commands


def test_a_seed_of_two_machines_or_commits_is_not_kept(small_study, capsys):
    """Seed 0 has another commit in one row, seed 1 an earlier launch on another machine."""
    runs = run.ROOT / "runs" / "small" / "test"
    for row in ("espo", "grpo"):
        for seed in (0, 1):
            folder = write_run(runs, row, seed, [0.1, 0.5])
            versions = {"commit": "aa", "machine": {"cpu": "one"}}
            if (row, seed) == ("grpo", 0):
                versions["commit"] = "bb"
            if (row, seed) == ("grpo", 1):
                versions["earlier"] = [{"commit": "aa", "machine": {"cpu": "two"}}]
            (folder / "versions.json").write_text(json.dumps(versions))
    assert study.main(["small", "keep"]) == 1
    output = capsys.readouterr()
    assert "kept: seeds []" in output.out
    for text in ("aa on cpu one: espo; bb on cpu one: grpo", "aa on cpu two: grpo", "--seeds 1"):
        assert text in output.err


# ---- the share of prompts without variance -----------------------------------------------------------------


def finished_run(row: str, seed: int, value: float) -> Run:
    """Make a run whose final metric is a value."""
    record = {"row": row, "seed": seed}
    return Run(record, "made", None, {}, *[np.array([0.0, value])] * 3, offline_tokens=0)


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
        "abs_log_ratio": [9, *[1 / mean_tokens] * 5, 9, 9],
    }  # fmt: skip
    evaluations = {"step": [0, 8], "generated_tokens": [0, 800], "eval/chains/avg_at_4": [0.1, 0.2]}
    columns = {name: [float(value) for value in values] for name, values in steps.items()}
    record = {"row": row, "seed": seed, "steps": columns, "evaluations": evaluations}
    return make_run(record, "made", None, "chains/avg_at_4")


def test_the_rows_of_a_contrast_are_evaluated_and_short_runs_are_not():
    folder = run.STUDIES / "clip_scale"
    declared = read_declaration(folder / "declared.json")
    compared = {row for pair in declared["contrasts"] for row in pair}
    for row in declared["rows"]:
        config = load_config(["--config", str(folder / f"{row}.yaml")])
        assert bool(config.data.eval) == (row in compared) == (config.train.num_steps != 6), row


def test_the_slope_is_the_power_with_which_the_spread_falls():
    """The share is a function of eps / spread, so eps* falls with the tokens as the spread does."""
    powers = [-0.5, -0.3]  # of two seeds; -0.5 if tokens are independent
    data = scaling.measure(scaled_rows(powers))
    assert len(data) == 6
    for figures in data:
        spread = 0.004 * figures["tokens"] ** powers[figures["seed"]]
        assert figures["eps"] == pytest.approx(math.e * spread), "the share is 0.2 there"
        assert figures["abs_log_ratio"] == pytest.approx(0.2 / figures["tokens"])
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


@pytest.mark.parametrize(("share", "end"), [(0.1, 0.02), (0.9, 0.6)])
def test_a_seed_whose_clip_lies_at_an_end_of_the_grid_is_censored(share, end):
    """Less than a fifth of the tokens is clipped at every alpha, or more."""
    rows = scaled_rows([-0.5, -0.3])
    for name in scaling.ALPHAS:
        rows[f"long_{name}"][1] = made_run(f"long_{name}", 1, share, 0.15, 300)
    data = scaling.measure(rows)
    assert [(f["length"], f["seed"]) for f in data if scaling.is_at_an_end(f)] == [("long", 1)]
    assert data[-1]["alpha"] == end
    assert scaling.slope_lines(data)[2].startswith("| all lengths (declared) | 2 | 1 |")
    cells = [line.strip("| ").split(" | ") for line in scaling.table_lines(data)]
    assert [row[-1] for row in cells[2:]] == ["0", "0", "1"]


def test_the_clipped_share_of_the_sequence_rows_is_over_the_early_steps():
    """One row has both seeds and one row a single seed; made_run() halves the share over all tokens."""
    rows = scaled_rows([-0.5, -0.3])
    for row, shares in (("short_sequence_002", [0.5, 0.7]), ("long_sequence_020", [0.25])):
        rows[row] = [made_run(row, seed, share, 0.15, 40) for seed, share in enumerate(shares)]
    lines = scaling.sequence_lines(scaling.measure(rows))
    assert lines[2].startswith("| short_sequence_002 | 2 | 0.300 |")
    assert lines[3].startswith("| long_sequence_020 | 1 | 0.125 |") and len(lines) == 4
    assert scaling.sequence_lines(scaling.measure(scaled_rows([-0.5])))[2:] == []


def test_the_clip_follows_the_entropy_over_a_run():
    """The entropy halves in the last steps. Slope 1: alpha* stays, so eps* halves. Slope 2: alpha* halves.

    alpha* is 0.1 early: the share falls from 0.3 at 0.02 to 0.2 - 0.1 x log(2) / log(5) at 0.2.
    """
    for late, slope in ((0.1, "1.00"), (0.05, "2.00"), (0.01, "n/a")):
        rows = scaled_rows([-0.5])
        for name in scaling.TRAINED_ON:
            run = rows[f"long_{name}"][0]
            logs = [math.log(scaling.ALPHAS[name] / alpha) / math.log(5) for alpha in (0.1, late)]
            run.steps["clipped/entropy_group_0"] = np.array(
                [9] + [0.2 - 0.1 * logs[0]] * 5 + [0.2 - 0.1 * logs[1]] * 5
            )
            run.steps["entropy/entropy_group_0"] = np.array([9] + [0.2] * 5 + [0.1] * 5)
        line = scaling.entropy_lines(scaling.measure(rows))[-1]
        num_at_an_end = int(slope == "n/a")
        assert line.startswith("| long | 1 | 0.200 | 0.100 | 0.100 |") and line.endswith(
            f"| {num_at_an_end} | {slope} |"
        )


def test_a_measurement_without_common_seeds_is_refused():
    with pytest.raises(ValueError, match="no seed"):
        scaling.measure({"short_002": [made_run("short_002", 0, 0.5, 0.15, 40)]})


def test_the_command_of_a_module_prints_its_tables(monkeypatch, capsys):
    """As `python -m experiments.studies.clip_scale.scaling FILE`, with invented records."""
    monkeypatch.setattr(report, "read_rows", lambda files, names, metric: scaled_rows([-0.5, -0.3]))
    monkeypatch.setattr(sys, "argv", ["scaling", "runs.jsonl"])
    makers = [scaling.table_lines, scaling.slope_lines, scaling.sequence_lines]
    tables.print_tables("text", scaling.measure, scaling.METRIC, makers)
    data = scaling.measure(scaled_rows([-0.5, -0.3]))
    assert capsys.readouterr().out == "\n\n".join("\n".join(make(data)) for make in makers) + "\n"
    monkeypatch.setattr(report, "read_rows", lambda files, names, metric: {})
    with pytest.raises(SystemExit):
        tables.print_tables("text", scaling.measure, scaling.METRIC, makers)
    assert "no seed" in capsys.readouterr().err
