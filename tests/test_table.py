"""experiments/report.py against loops over the logs; experiments/run.py with stubs and with real training."""

import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from conftest import ROOT, alive, commit_all, edit, git
from scipy.stats import ttest_rel

from experiments import declaration, report, run
from runtime.checkpoint import prepare_run_dir
from runtime.config import flat_settings
from runtime.old_settings import settings_of_record
from tests import preloaded
from tests.patience import limit, wait_until
from train_rl import load_config

T_975 = {1: 12.7062047364, 2: 4.3026527297, 4: 2.7764451052}  # 97.5 % quantiles of Student's t, from tables


def write_run(root, row, seed, curve, tokens=100, set_names=("additions",), drop=0, **step_keys) -> Path:
    """Write a run folder: two steps between evaluations, without the metrics of the last `drop` steps.

    curve: avg_at_8 at each evaluation. step_keys: numbers, or functions of the step, for example score=0.5.
    """
    folder = root / row / f"seed_{seed}"
    folder.mkdir(parents=True)
    num_steps = 2 * (len(curve) - 1)
    step_keys = {
        "tokens_total": tokens, "gradient_tokens_total": 50.0, "zero_variance_frac": 0.25,
        "seconds_per_step": 0.5, "score": 0.5, "grad_norm": 1.0, "inversion_frac": 0.125,
    } | step_keys  # fmt: skip
    log = []
    total = 0
    for step in range(num_steps + 1 - drop):
        if step > 0:
            metrics = {name: value(step) if callable(value) else value for name, value in step_keys.items()}
            total += metrics["tokens_total"]
            log.append({"step": step, "generated_tokens": total} | metrics)
        if step % 2 == 0:
            figures = {"avg_at_8": curve[step // 2], "accuracy": 0.5}
            evaluation = {f"eval/{name}/{leaf}": figures[leaf] for name in set_names for leaf in figures}
            log.append({"step": step, "generated_tokens": total} | evaluation)
    write_log(folder, log)
    (folder / "config.yaml").write_text(yaml.safe_dump({"train": {"num_steps": num_steps}}))
    (folder / "versions.json").write_text('{"python": "3"}')
    if not drop:
        (folder / "summary.json").write_text("{}")
    return folder


def read_log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write_log(folder: Path, log: list[dict]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))


def is_evaluation(entry: dict) -> bool:
    return any(name.startswith("eval/") for name in entry)


def write_record(file: Path, *folders: Path) -> Path:
    """Write the record file of run folders, in the format of report.py's docstring."""
    lines = []
    for folder in folders:
        tables = {"steps": [], "evaluations": []}
        for entry in read_log(folder):
            tables["evaluations" if is_evaluation(entry) else "steps"].append(entry)
        record = {"row": folder.parent.name, "seed": int(folder.name.removeprefix("seed_"))}
        record |= {"commit": "c0ffee", "versions": {"python": "3"}, "settings": {"train.num_steps": 4}}
        for kind, entries in tables.items():
            names = {name: None for entry in entries for name in entry}
            record[kind] = {name: [entry.get(name) for entry in entries] for name in names}
        lines.append(json.dumps(record) + "\n")
    file.write_text("".join(lines))
    return file


def make(root: Path, *options: object, capsys) -> tuple[list[dict], str]:
    """Return the table as JSON and as text."""
    file = root.parent / "table.json"
    code = report.main(["--runs", str(root), *map(str, options), "--json", str(file)])
    output = capsys.readouterr()
    assert code == 0, output.err
    return json.loads(file.read_text()), output.out


def marked(printed: str) -> str:
    """Return a table of run folders as record files show it: folders may belong to a declared study."""
    return printed.replace("> Note: ", "> Note: Undeclared. ")


def cells(printed: str) -> dict[str, list[str]]:
    """Return {row: cells} of the Markdown table."""
    lines = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    return {line[0]: line for line in lines}


def error_of(*options: object, capsys) -> str:
    assert report.main([*map(str, options)]) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith("error: ")
    return last_line


# ---- the table against loops -------------------------------------------------------------------------------


@pytest.fixture
def random_table(tmp_path) -> tuple[Path, dict[str, list[list[dict]]]]:
    """Write three rows of 5, 5 and 3 runs with uneven tokens; return the folder and the logs."""
    generator = random.Random(1)
    root = tmp_path / "runs"
    logs = {}
    for row, num_runs, level in (("grpo", 5, 0.5), ("espo", 5, 0.65), ("gspo", 3, 0.5)):
        for seed in range(num_runs):
            curve = [0.2 + level * (i / 8) + generator.uniform(-0.05, 0.05) for i in range(9)]
            folder = write_run(
                root, row, seed, curve,
                tokens=lambda step: generator.randint(80, 120),
                gradient_tokens_total=lambda step: float(generator.randint(20, 60)),
                seconds_per_step=lambda step: generator.uniform(0.1, 0.3),
                inversion_frac=lambda step: generator.uniform(0.0, 0.3),
            )  # fmt: skip
            logs.setdefault(row, []).append(read_log(folder))
    return root, logs


@pytest.mark.parametrize("seed, number", [(0, ""), (1, ""), (2, "_1"), (7, "_3")])
def test_a_seed_reads_its_declared_task_instance(seed, number, tmp_path):
    sets = {"train": [{"path": "data/built/sums/a.jsonl", "template": "data/built/sums {prompt}"}]}
    stages = [{"name": "first", "until": {"steps": 1}}, {"name": "second", "data": sets}]
    row = {"data": sets, "model": {"path": "data/built/other/model"}, "stages": stages}
    (tmp_path / "row.yaml").write_text(yaml.safe_dump(row))
    declared = dict.fromkeys(declaration.KEYS, "?") | {"rows": ["row"], "seeds": [seed], "contrasts": []}
    declared["instances"] = {"recipe": "sums", "seeds_each": 2}
    (tmp_path / "declared.json").write_text(json.dumps(declared))
    settings = run.instance_settings(tmp_path / "row.yaml", Path("train_rl.py"), seed)
    config = load_config(["--config", str(tmp_path / "row.yaml"), *settings])
    dump = config.model_dump(mode="json")
    for source in dump["data"]["train"][0], dump["stages"][1]["data"]["train"][0]:
        assert source["path"] == f"data/built/sums{number}/a.jsonl"
        assert source["template"] == "data/built/sums {prompt}"
    assert config.model.path == "data/built/other/model"


def test_every_figure_agrees_with_loops_over_the_logs(random_table, capsys):
    root, logs = random_table
    table, printed = make(root, "--parent", "grpo", capsys=capsys)
    assert [row["row"] for row in table] == ["grpo", "espo", "gspo"], "the parent, then by name"
    finals = {
        row: [[r["eval/additions/avg_at_8"] for r in log if is_evaluation(r)][-1] for log in runs]
        for row, runs in logs.items()
    }
    for entry in table:
        row = entry["row"]
        final = finals[row]
        half = T_975[len(final) - 1] * statistics.stdev(final) / math.sqrt(len(final))
        steps = [[r for r in log if not is_evaluation(r)] for log in logs[row]]
        expected = {
            "n": len(final), "mean": statistics.fmean(final),
            "gradient_token_share": statistics.fmean(
                sum(r["gradient_tokens_total"] for r in log) / sum(r["tokens_total"] for r in log)
                for log in steps),
            "seconds": statistics.fmean(sum(r["seconds_per_step"] for r in log) for log in steps),
        }  # fmt: skip
        for name, value in expected.items():
            assert entry[name] == pytest.approx(value, rel=1e-9), name
        assert entry["interval"] == pytest.approx([entry["mean"] - half, entry["mean"] + half], rel=1e-9)
        assert entry["parent"] == "grpo"
        line = cells(printed)[row]  # as text; --check compares the form of every cell with the docs
        assert (line[1], line[2], line[9]) == (
            str(len(final)), f"{entry['mean']:.4f}", f"{entry['seconds']:.1f}"
        )  # fmt: skip


def test_a_saving_and_a_difference_at_equal_sums_by_hand(tmp_path, capsys):
    """Two steps between evaluations: grpo ends at 800 tokens, long at 1,600, drafts at 400 + 320 verified."""
    root = tmp_path / "runs"
    metrics = {"grpo": {}, "long": {"tokens": 200}, "drafts": {"tokens": 50, "draft_tokens_total": 40}}
    for seed, level in ((0, 0.1), (1, 0.12)):
        for row, values in metrics.items():
            write_run(root, row, seed, [level * i for i in range(5)], **values)
    price = "tokens_total+0.25*draft_tokens_total"
    columns = ("saving:tokens_total", f"saving:{price}", f"equal:{price}")
    _, printed = make(root, "--parent", "grpo", "--columns", "row", *columns, capsys=capsys)
    rows = cells(printed)
    assert rows["grpo"][1:] == ["n/a"] * 3 and rows["long"][1] == "0.50 (0.50 to 0.50)"
    assert rows["drafts"][1:3] == ["2.00 (2.00 to 2.00)", "1.67 (1.67 to 1.67)"], "800 / 400, 800 / 480"
    # at 480 grpo has 2.4 levels, at 800 long has two; t = 11 with one degree of freedom, p = 0.0577 twice
    assert re.fullmatch(r"\+0\.1760 \(.*\), p 0\.115", rows["drafts"][3]), "1.6 levels of 0.11"
    assert rows["long"][3].startswith("-0.2200 ("), "2 levels"
    options = ("--runs", root, "--parent", "grpo", "--columns", "row")
    messages = {"equal:tokens_total+2*tokens": "no run has tokens;", "saving:0*tokens_total": "sums to 0"}
    for column, word in {**messages, "equal:x*tokens_total": "WEIGHT*"}.items():
        assert word in error_of(*options, column, capsys=capsys)
    write_run(root, "drafts", 2, [0.1] * 5)
    assert "lacks draft_tokens_total" in error_of(*options, columns[1], capsys=capsys)


def test_holm_and_the_interval_by_hand():
    assert report.holm([0.01, None, 0.04, 0.03, 0.005]) == pytest.approx([0.03, None, 0.06, 0.06, 0.02])
    assert report.holm([0.6, 0.5]) == [1.0, 1.0]
    assert report.t_interval(np.array([1.0])) is None


def test_order_and_parents_of_rows(tmp_path, capsys):
    for row, final in (("a", 0.4), ("b", 0.6), ("c", 0.9)):
        write_run(tmp_path / "runs", row, 0, [0.2, final])
    options = ("--parent", "a", "--parents", "c=b", "--rows", "c", "b", "a")
    table, printed = make(tmp_path / "runs", *options, capsys=capsys)
    assert [(entry["row"], entry["parent"]) for entry in table] == [("c", "b"), ("b", "a"), ("a", "a")]
    assert cells(printed)["c"][4] == "+0.3000" and cells(printed)["b"][4] == "+0.2000"
    assert all((e["interval"], e["paired_p"], e["paired_p_holm"]) == (None, None, None) for e in table)


def test_sets_are_averaged_and_a_metric_can_name_its_set(tmp_path, capsys):
    folder = write_run(tmp_path / "runs", "grpo", 0, [0.2, 0.5], set_names=("x", "y"))
    edit(folder / "metrics.jsonl", '"eval/y/avg_at_8": 0.5', '"eval/y/avg_at_8": 0.7')
    for metric, value in (("avg_at_8", 0.6), ("accuracy", 0.5), ("x/avg_at_8", 0.5), ("y/avg_at_8", 0.7)):
        ((entry,), printed) = make(tmp_path / "runs", "--parent", "grpo", "--metric", metric, capsys=capsys)
        assert entry["mean"] == pytest.approx(value) and f"| {metric} |" in printed


def test_unfinished_runs_are_skipped_and_named(tmp_path, capsys):
    """A finished run has a summary: all steps are logged before the last evaluation."""
    root = tmp_path / "runs"
    write_run(root, "grpo", 0, [0.2, 0.5, 0.6])
    for seed in (1, 2):
        folder = write_run(root, "grpo", seed, [0.2, 0.5, 0.6], drop=seed - 1)
        (folder / "summary.json").unlink(missing_ok=True)
    log = root / "grpo/seed_1/metrics.jsonl"
    log.write_text(log.read_text()[:-9])  # the last line is cut
    (root / "grpo/seed_3").mkdir()
    assert report.main(["--runs", str(root), "--parent", "grpo"]) == 0
    output = capsys.readouterr()
    assert cells(output.out)["grpo"][1] == "1"
    lines = output.err.splitlines()
    assert len(lines) == 3 and all(f"seed_{seed}" in lines[seed - 1] for seed in (1, 2, 3))


# ---- export and plots --------------------------------------------------------------------------------------


def test_the_export_gives_the_same_table_and_is_small(random_table, tmp_path, capsys):
    root, logs = random_table
    file = tmp_path / "runs.jsonl"
    again = tmp_path / "again.jsonl"
    first = make(root, "--parent", "grpo", "--export", file, capsys=capsys)
    _, printed = make(file, "--parent", "grpo", "--export", again, capsys=capsys)
    assert printed == marked(first[1])
    assert file.read_bytes() == again.read_bytes()
    for options in (("--metric", "accuracy"), ("--columns", "row", "mean:score", "max:tokens_total")):
        options = ("--parent", "grpo", *options)
        assert make(file, *options, capsys=capsys)[1] == marked(make(root, *options, capsys=capsys)[1])
    record = json.loads(file.read_text().splitlines()[0])
    assert (record["row"], record["seed"]) == ("grpo", 0)
    for kind in ("steps", "evaluations"):
        rows = [row for row in logs["grpo"][0] if is_evaluation(row) == (kind == "evaluations")]
        for name, values in record[kind].items():  # half a unit of the seventh digit is 5e-7 at most
            assert values == pytest.approx([row[name] for row in rows], rel=5e-7, abs=0)
            assert max(len(Decimal(repr(value)).normalize().as_tuple().digits) for value in values) <= 7
    assert "--export" in error_of("--runs", root, "--parent", "grpo", "--export", file, capsys=capsys)


def test_an_exported_run_records_its_settings(tmp_path, capsys):
    """Defaults, the seed and the folder are omitted; settings of another version are kept."""
    folder = write_run(tmp_path / "runs", "grpo", 3, [0.2, 0.5])
    unknown = {"clip_mode": "unknown", "other": 3, "clip_eps_low": 0.2}
    config = {
        "train": {"num_steps": 2, "max_generated_tokens": None, "learning_rate": 0.5, "seed": 3},
        "data": {"train": [{"path": "a.jsonl", "limit": 7, "split": "train"}]},
        "run": {"dir": "runs/grpo/seed_3", "log_every": 1},
    }
    (folder / "versions.json").write_text('{"python": "3", "commit": "c0ffee", "dirty": false}')
    expected = {"train.num_steps": 2, "train.learning_rate": 0.5, "run.log_every": 1}
    for extra, settings in (
        ({}, {"data.train": [{"path": "a.jsonl", "limit": 7}]}),
        ({"algorithm": unknown}, {
            "algorithm.clip_mode": "unknown", "algorithm.other": 3, "data.train": config["data"]["train"],
        }),
    ):  # fmt: skip
        (folder / "config.yaml").write_text(yaml.safe_dump(config | extra))
        file = tmp_path / f"record_{len(extra)}.jsonl"
        make(tmp_path / "runs", "--parent", "grpo", "--export", file, capsys=capsys)
        record = json.loads(file.read_text())
        assert record["settings"] == expected | settings
        assert (record["commit"], record["versions"]) == ("c0ffee", {"python": "3", "dirty": False})


def test_folders_and_records_give_the_same_table_also_together(random_table, tmp_path, capsys):
    root, _ = random_table
    folders = sorted(root.glob("*/seed_*/"))
    table, printed = make(root, "--parent", "grpo", capsys=capsys)
    expected = (table, marked(printed))
    assert make(write_record(tmp_path / "a.jsonl", *folders), "--parent", "grpo", capsys=capsys) == expected
    grpo = write_record(tmp_path / "grpo.jsonl", *sorted(root.glob("grpo/seed_*/")))
    shutil.rmtree(root / "grpo")
    assert make(root, grpo, "--parent", "grpo", capsys=capsys) == expected
    error = error_of("--runs", grpo, grpo, "--parent", "grpo", capsys=capsys)
    assert "row grpo, seed 0" in error and "grpo.jsonl, line 1" in error


INVALID_LINES = [  # kind of file, text, replacement, part of the message
    ("record", '{"row"', '{row', "line 2"),
    ("record", '"row": "grpo"', '"row": null', "line 2"),
    ("record", '"steps"', '"step"', "line 2: steps"),
    ("record", '"step": [1, 2], ', "", "steps.step is missing"),
    ("record", '"tokens_total": [100, 100]', '"tokens_total": [100]', "steps.tokens_total"),
    ("record", '"tokens_total": [100, 100]', '"tokens_total": [100, null]', "steps.tokens_total"),
    ("record", '"score": [0.5, 0.5]', '"score": [0.5, "a"]', "line 2: steps.score"),
    ("record", '"step": [1, 2]', '"step": [1, 3]', "step 3"),
    ("record", '"step": [0, 2]', '"step": [1, 2]', "avg_at_8"),
    ("log", 'avg_at_8": 0.5', 'avg_at_8": NaN', "evaluations.eval/additions/avg_at_8 at step 2"),
    ("log", '"seconds_per_step": 0.5', '"seconds_per_step": null', "steps.seconds_per_step at step 1"),
    ("log", '"zero_variance_frac"', '"renamed"', "steps.zero_variance_frac at step 1"),
    ("log", '{"step": 1,', '{"step": 1', "line 2"),
    ("log", '{"step": 2,', '{"step": 1,', "step 1"),
    ("log", '"generated_tokens": 200', '"generated_tokens": 20', "step 2"),
    ("log", '"eval/additions/avg_at_8": 0.2, ', "", "avg_at_8"),
    ("log", '"eval/additions/avg_at_8": 0.5', '"eval/other/avg_at_8": 0.5', "eval/other/avg_at_8"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "old", "new", "message"), INVALID_LINES)
def test_an_invalid_line_is_named_with_its_file(kind, old, new, message, tmp_path, capsys):
    folders = [write_run(tmp_path / "runs", "grpo", seed, [0.2, 0.5]) for seed in (0, 1)]
    source = folders[1] / "metrics.jsonl"
    if kind == "log":
        edit(source, old, new)
    else:
        source = write_record(tmp_path / "runs.jsonl", *folders)
        first, second = source.read_text().splitlines()
        assert old in second
        source.write_text(f"{first}\n{second.replace(old, new, 1)}\n")
    runs = source if kind == "record" else tmp_path / "runs"
    error = error_of("--runs", runs, "--parent", "grpo", capsys=capsys)
    assert message in error and str(runs) in error


def test_columns_by_name(tmp_path, capsys):
    root = tmp_path / "runs"
    for seed in range(2):
        keys = {"abs_dlogp": lambda step, seed=seed: 0.01 * step + 0.1 * seed, "score": lambda step: 1500.0}
        write_run(root, "grpo", seed, [0.2, 0.5, 0.6 + 0.1 * seed], **keys)
        write_run(root, "espo", seed, [0.2, 0.5, 0.4])
    columns = ("row", "runs", "parent", "mean:abs_dlogp", "max:abs_dlogp", "mean:score")
    table, printed = make(root, "--parent", "grpo", "--columns", *columns, capsys=capsys)
    header = ["row", "each run", "parent", "mean abs_dlogp", "largest abs_dlogp"]
    assert cells(printed) == {
        "row": [*header, "mean score"],
        "grpo": ["grpo", "0.60, 0.70", "grpo", "0.075", "0.14", "1,500"],
        "espo": ["espo", "0.40, 0.40", "grpo", "n/a", "n/a", "0.5"],
    }
    assert table[0]["max:abs_dlogp"] == pytest.approx(0.14) and table[1]["max:abs_dlogp"] is None


def test_a_figure_of_some_runs_says_of_how_many(tmp_path, capsys):
    """Of three runs of 4 steps, the last lacks both metrics, and the second ends at step 2."""
    for seed, num_evaluations in ((0, 3), (1, 2), (2, 3)):
        keys = {"abs_dlogp": 0.25 + 0.5 * seed, "inversion_frac": 0.125}
        folder = write_run(tmp_path / "runs", "grpo", seed, [0.2] * num_evaluations, **keys)
    log = [{name: v for name, v in row.items() if name not in keys} for row in read_log(folder)]
    write_log(folder, log)
    columns = ("mean:abs_dlogp", "max:abs_dlogp", "mean:score", "mean:inversion_frac")
    (row,), printed = make(tmp_path / "runs", "--parent", "grpo", "--columns", "row", *columns, capsys=capsys)
    assert cells(printed)["grpo"][1:] == ["0.5 (2 of 3)", "0.75 (2 of 3)", "0.5", "0.125 (2 of 3)"]
    assert row["mean:abs_dlogp"] == 0.5 and row["runs_with"]["mean:abs_dlogp"] == 2


def test_a_training_metric_in_place_of_evaluations(tmp_path, monkeypatch, capsys):
    """Rows have 8 steps of 100 tokens and half a second; `late` has no evaluations and the metric in every
    second step only."""
    monkeypatch.setattr(report, "SMOOTHING_STEPS", 3)
    root = tmp_path / "runs"
    for seed in (0, 1):
        write_run(root, "early", seed, [0.2] * 5, score=lambda step, seed=seed: step / 10 + seed / 5)
    folder = write_run(root, "late", 0, [0.2] * 5, score=lambda step: step / 20)
    log = [row for row in read_log(folder) if not is_evaluation(row)]
    for row in log[::2]:
        del row["score"]
    write_log(folder, log)
    options = ("--metric", "train/score", "--parent", "early")
    table, printed = make(root, *options, "--export", tmp_path / "record", capsys=capsys)
    early, late = table
    assert early["finals"] == pytest.approx([0.7, 0.9]) and late["finals"] == pytest.approx([0.3])
    assert make(tmp_path / "record", *options, capsys=capsys)[1] == marked(printed)
    options = ("--parent", "early", "--metric", "train/scores")
    assert "scores" in error_of("--runs", root, *options, capsys=capsys)


# ---- errors of the report ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--parent gpro", "gpro"),
        ("--parent grpo --parents espo=nothing", "nothing"),
        ("--parent grpo --parents nothing=grpo", "--parents nothing=grpo"),
        ("--parent grpo --rows grpo nothing", "nothing"),
        ("--parent grpo --metric avg_at_4", "avg_at_8"),
        ("--parent grpo --json no/such/folder/table.json", "no/such/folder"),
        ("", "--parent"),
        ("--parent grpo --columns row meter", "--columns meter"),
        ("--parent grpo --columns mean:scores", "--columns mean:scores"),
        ("--parent grpo --block 0", "--block 0"),
        ("--parent grpo --check", "--check"),
        ("--parent grpo --colour", "--colour"),
    ],
)
def test_invalid_options_are_named(options, message, tmp_path, capsys):
    for row in ("grpo", "espo"):
        write_run(tmp_path / "runs", row, 0, [0.2, 0.5])
    assert message in error_of("--runs", tmp_path / "runs", *options.split(), capsys=capsys)


def test_unusable_run_folders_are_named(tmp_path, capsys):
    root = tmp_path / "runs"
    options = ("--runs", root, "--parent", "grpo")
    assert "runs: no ROW/seed_S" in error_of(*options, capsys=capsys)
    folder = write_run(root, "grpo", 0, [0.2, 0.5])
    (folder / "metrics.jsonl").unlink()
    assert "metrics.jsonl" in error_of(*options, capsys=capsys)
    shutil.rmtree(folder)
    folder = write_run(root, "grpo", 0, [0.2, 0.5], drop=1)
    assert "finished" in error_of(*options, capsys=capsys)
    (folder / "summary.json").write_text("{}")
    for text in ("", "a: b: c"):
        (folder / "config.yaml").write_text(text)
        assert "config.yaml" in error_of(*options, capsys=capsys)


# ---- the tables of the docs --------------------------------------------------------------------------------
COMMENT = """<!-- report: --runs runs.jsonl --parent grpo
     --columns row n metric paired -->"""
TABLE = """\
| row | n | avg_at_8 | paired difference |
|---|---|---|---|
| grpo | 2 | 0.5000 | n/a |
| espo | 2 | 0.7500 | +0.2500 |

> Note: Undeclared."""


@pytest.fixture
def document(tmp_path, monkeypatch) -> Path:
    """Write a README of two correct tables beside its record, in a git checkout."""
    root = tmp_path / "checkout"
    folders = [
        write_run(tmp_path / "runs", row, seed, [0.2, final + 0.125 * seed])
        for row, final in (("grpo", 0.4375), ("espo", 0.6875))
        for seed in range(2)
    ]
    (root / "table").mkdir(parents=True)
    git(root, "init", "-q")
    write_record(root / "table" / "runs.jsonl", *folders)
    monkeypatch.setattr(report, "ROOT", root)
    file = root / "table" / "README.md"
    file.write_text(f"# A\n\n{COMMENT}\n{TABLE}\n\n# B\n\n{COMMENT}\n\n{TABLE}\n\nThe end.\n")
    return file


def check(capsys, option: str = "--check") -> tuple[int, str, list[str]]:
    """Return the exit code, the last line, and the problems."""
    code = report.main([option])
    output = capsys.readouterr()
    return code, (output.out.splitlines() or [""])[-1], output.err.splitlines()


def test_a_changed_figure_is_named_and_fixed(document, capsys):
    code, _, problems = check(capsys)
    assert (code, problems) == (0, [])
    right = document.read_text()
    document.write_text(right.replace("0.7500", "0.7501", 1).replace("+0.2500", "+0.2600", 1))
    code, _, (problem,) = check(capsys)
    assert code == 1
    for word in ("README.md:3", "espo", "0.7501", "0.7500", "+0.2600", "+0.2500"):
        assert word in problem
    assert check(capsys, "--fix")[0] == 0 and document.read_text() == right
    edit(document, TABLE + "\n", "")
    assert check(capsys, "--fix")[0] == 0 and document.read_text() == right, "a missing table is written"
    edit(document.with_name("runs.jsonl"), "0.6875", "0.6885")
    code, _, problems = check(capsys)
    assert code == 1 and len(problems) == 2, "two tables"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (COMMENT + "\n", "", "comment"),
        (COMMENT, "<!-- report: none -->", "reason"),
        (TABLE, "No table.", "--fix"),
        ("| grpo | 2 | 0.5000 | n/a |\n", "", "nothing in the text"),
        ("avg_at_8", "pass@1", "pass@1"),
        ("| espo | 2 | 0.7500 | +0.2500 |", "| espo | 2 | 0.7500 |", "espo | 2 | 0.7500 in the text"),
        ("Undeclared", "Declared", "Note"),
        ("\n\n> Note: Undeclared.", "", "Note"),
        ("--columns row", "--columns rows row", "--columns rows"),
        ("--parent grpo", "--parent gpro", "gpro"),
        ("--runs runs.jsonl", "--runs none.jsonl", "none.jsonl"),
        ("--runs runs.jsonl", "--json x.json", "--json x.json"),
        (COMMENT, "<!-- report: module none.such data.json -->", "ModuleNotFoundError"),
        (COMMENT, "<!-- report: module json -->", "PACKAGE.MODULE"),
    ],
)
def test_a_wrong_table_is_named(old, new, message, document, capsys):
    edit(document, old, new)
    code, _, problems = check(capsys)
    assert code == 1 and len(problems) == 1
    assert problems[0].startswith("table/README.md:3: ") and message in problems[0]


def test_tables_without_a_record(document, capsys):
    """Code blocks, tables with a reason, tables away from a record, and ignored files are skipped."""
    other = TABLE.replace("2", "3")
    with document.open("a") as file:
        file.write(f"```\n{COMMENT}\n{other}\n```\n<!-- report: none, typed by hand -->\n{other}\n")
    root = document.parents[1]
    (root / "README.md").write_text(f"{other}\n")
    (root / ".gitignore").write_text("table/ignored.md\n")
    (document.parent / "ignored.md").write_text(f"{TABLE}\n")
    code, summary, _ = check(capsys)
    assert code == 0 and summary.startswith("10 figures of 2 tables")
    (root / "judge_0.jsonl").write_text("")  # a record of any name
    code, _, (problem,) = check(capsys)
    assert code == 1 and problem.startswith("README.md:1: ") and "comment" in problem


def test_tables_of_modules(document, tmp_path, monkeypatch, capsys):
    (tmp_path / "some_bench.py").write_text(
        "def table_lines(data):\n"
        "    return ['| rows | s |', '|---|---|', *(f'| {k} | {v:.1f} |' for k, v in data.items())]\n"
        "def other(data):\n    return table_lines({'sum': sum(data.values())})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (document.parent / "some.json").write_text('{"a": 1.25, "b": 2.5}')
    file = document.parent / "some.md"
    comment = "<!-- report: module some_bench"
    table = "| rows | s |\n|---|---|\n| a | 1.2 |\n| b | 2.6 |\n"
    file.write_text(f"{comment} some.json -->\n{table}\n{comment}:other some.json -->\n")
    code, _, (wrong, missing) = check(capsys)
    assert code == 1 and "some.md:1" in wrong and "2.6" in wrong and "some.md:7" in missing
    assert check(capsys, "--fix")[0] == 0
    assert file.read_text().endswith("| rows | s |\n|---|---|\n| sum | 3.8 |\n")


def test_a_closed_table_is_that_of_its_commit(document, capsys):
    """Its program and record have left the tree."""
    root = document.parents[1]
    file = root / "table" / "old.md"
    table = "| rows | s |\n|---|---|\n| a | 1.2 |\n\n> Note: Undeclared."
    file.write_text(f"| other |\n|---|\n| 1 |\n\n<!-- report: module gone.bench gone.json -->\n{table}\n")
    commit_all(root)
    for closed, cells, message in (
        ("HEAD", "1.2", None), ("HEAD", "1.3", "1.3 in the text, a | 1.2 in the record"),
        ("0123456", "1.2", "0123456"),
    ):  # fmt: skip
        file.write_text(f"<!-- report: closed {closed} -->\n{table.replace('1.2', cells)}\n")
        code, _, problems = check(capsys)
        assert (code, len(problems)) == ((1, 1) if message else (0, 0))
        assert not message or message in problems[0]
    file.write_text(f"<!-- report: closed HEAD -->\n{table.replace('rows', 'row')}\n")
    assert "no table with these columns" in check(capsys)[2][0]


# ---- run.py with stubs in place of training ----------------------------------------------------------------
STUB = """
import json, sys, time, pathlib
folder, config, log = pathlib.Path(sys.argv[1]), *sys.argv[2:]
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.yaml").write_text(config)
(folder / "metrics.jsonl").write_text(log)
if folder.parent.name == "bad":
    sys.exit("boom, out of luck")
(folder / "summary.json").write_text(json.dumps({"accuracy_after": 0.5, "avg_at_8_after": None}))
with open(folder.parents[1] / "done", "a") as file:
    file.write(f"{folder.parent.name} {folder.name}\\n")
"""


def stub_command(run: run.Run, log: str = "") -> list[str]:
    config = load_config(list(run.arguments)).model_dump(mode="json")
    return [sys.executable, "-c", STUB, str(ROOT / run.folder), json.dumps(config), log]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Write the rows a, b and bad; return a function that runs run.py on rows with stubs."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(run, "command", lambda run, ranks: stub_command(run))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for name, rate in (("a", 1e-4), ("b", 2e-4), ("bad", 3e-4)):
        text = f"base: {ROOT}/experiments/environments/tiny.yaml\ntrain: {{learning_rate: {rate}}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)

    def start(rows: str, seeds: str, *options: object) -> int:
        paths = [str(tmp_path / f"{name}.yaml") for name in rows.split()]
        out = ["--out", str(tmp_path / "out"), *map(str, options)]
        return run.main(["--rows", *paths, "--seeds", *seeds.split(), *out])

    yield start
    for number, handler in handlers.items():
        signal.signal(number, handler)


def done(out: Path) -> list[tuple[str, str]]:
    return [tuple(line.split()) for line in (out / "done").read_text().splitlines()]


@pytest.mark.slow(process="others")
def test_all_rows_run_with_the_first_seed_first_and_finished_runs_are_skipped(table, tmp_path):
    out = tmp_path / "out"
    assert table("b a", "1 0") == 0
    assert done(out) == [("b", "seed_1"), ("a", "seed_1"), ("b", "seed_0"), ("a", "seed_0")]
    (out / "b" / "seed_0" / "summary.json").unlink()  # as if the run had been killed
    assert table("a b", "0 2") == 0
    assert done(out)[4:] == [("b", "seed_0"), ("a", "seed_2"), ("b", "seed_2")]


def test_a_changed_row_is_refused_and_repeated_on_request(table, tmp_path, capsys):
    assert table("a b", "0") == 0
    edit(tmp_path / "b.yaml", "0.0002", "0.0005")
    folder = tmp_path / "out" / "b" / "seed_0"
    config = (folder / "config.yaml").read_text()
    capsys.readouterr()
    assert table("a b", "1 0") == 2
    error = capsys.readouterr().err
    assert str(folder) in error and "train.learning_rate" in error and "--redo" in error
    assert "seed_1" not in error and "/a/" not in error
    assert table("a b", "0", "--redo", "--dry-run") == 0
    assert (folder / "config.yaml").read_text() == config, "a dry run removes nothing"
    assert table("a b", "0", "train.num_steps=7") == 2, "settings on the command line count too"
    (folder / "checkpoints").mkdir()
    assert table("a b", "0", "--redo") == 0
    assert done(tmp_path / "out")[2:] == [("b", "seed_0")], "only the changed row runs again"
    assert not (folder / "checkpoints").exists()


def test_folders_of_another_version_or_script(table, tmp_path, capsys):
    """A setting that the folder lacks counts as its default; an unknown setting or another script differs."""
    assert table("a", "0") == 0
    folder = tmp_path / "out" / "a" / "seed_0"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    del config["train"]["weight_decay"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    plugin = "experiments/plugins/vespo.py:vespo"
    assert table("a", "1", f"algorithm.gain={plugin}") == 0
    facts = {"script": "train_rl.py", "plugins": {plugin: "digest of an earlier version"}}
    (tmp_path / "out" / "a" / "seed_1" / "versions.json").write_text(json.dumps(facts))
    assert table("a", "1", f"algorithm.gain={plugin}") == 2
    assert f"{plugin} has changed" in capsys.readouterr().err
    for script, code in (("train_rl.py", 0), ("mine.py", 2)):
        (folder / "versions.json").write_text(json.dumps({"script": script}))
        assert table("a", "0") == code
    assert "--script mine.py" in capsys.readouterr().err
    config["train"]["gone"] = 1
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert table("a", "0") == 2 and "config.yaml" in capsys.readouterr().err
    assert len(done(tmp_path / "out")) == 2


def test_a_failed_run_is_reported_and_all_other_runs_continue(table, tmp_path, monkeypatch, capsys):
    assert table("bad a", "0 1") == 1
    output = capsys.readouterr()
    assert done(tmp_path / "out") == [("a", "seed_0"), ("a", "seed_1")]
    assert output.out.count("boom, out of luck") == 2
    for seed in (0, 1):
        assert str(tmp_path / "out" / "bad" / f"seed_{seed}.log") in output.err
    # A run without a summary has failed, whatever the exit code.
    monkeypatch.setattr(run, "command", lambda run, ranks: [sys.executable, "-c", "print('nothing done')"])
    assert table("a", "2") == 1 and "nothing done" in capsys.readouterr().out


def test_the_commands_of_a_dry_run(monkeypatch, capsys):
    monkeypatch.chdir(ROOT / "experiments")  # paths are relative to the user's folder
    options = ["--rows", "environments/tiny.yaml", "--seeds", "3", "--out", "../runs/none", "--dry-run"]
    assert run.main([*options, "--ranks", "2", "train.num_steps=2"]) == 0
    assert capsys.readouterr().out.split() == [
        sys.executable, "-m", "runtime.torchrun", "--nproc-per-node=2", "train_rl.py",
        "--config", "experiments/environments/tiny.yaml", "run.dir=runs/none/tiny/seed_3", "train.seed=3",
        "model.ep_size=2", "train.num_steps=2",
    ]  # fmt: skip
    assert not (ROOT / "runs" / "none").exists()


# ---- one row of a study ------------------------------------------------------------------------------------


@pytest.fixture
def study(tmp_path, monkeypatch) -> Path:
    """Write a study of one row with a record of seed 4, made with eval.every=2; its runs are stubs."""
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "studies" / "question"
    folder.mkdir(parents=True)
    base = ROOT / "experiments" / "environments" / "habits.yaml"
    (folder / "grpo.yaml").write_text(f"base: {base}\n")
    recorded = write_run(tmp_path / "recorded", "grpo", 4, [0.25, 0.75])
    config = load_config(["--config", str(folder / "grpo.yaml")])
    settings = flat_settings(config.model_dump(mode="json", exclude_defaults=True))
    settings |= {"eval.every": 2, "rollout.topk_logprobs": 4}  # of an earlier version: centering.topk
    edit(write_record(folder / "runs.jsonl", recorded), '{"train.num_steps": 4}', json.dumps(settings))
    log = (write_run(tmp_path / "new", "grpo", 4, [0.25, 0.5]) / "metrics.jsonl").read_text()

    def command(run_of_row: run.Run, ranks: int) -> list[str]:
        config = load_config(list(run_of_row.arguments))
        repeated = (config.eval.every, config.train.seed, config.centering.topk)
        assert repeated == (2, 4, 4), "recorded settings are repeated"
        return stub_command(run_of_row, log)

    monkeypatch.setattr(run, "STUDIES", tmp_path / "studies")
    monkeypatch.setattr(run, "command", command)
    return folder


def test_a_row_of_a_study_is_run_and_compared_with_its_record(study, tmp_path, monkeypatch, capsys):
    builds = []
    monkeypatch.setattr(run, "build_start", lambda one, study, dry_run: builds.append(one))
    command = ["--row", "question/grpo", "--seed", "4", "--out", str(tmp_path / "out")]
    assert run.main(command) == 0
    output = capsys.readouterr()
    rows = cells(output.out)
    assert rows["additions/avg_at_8"][1:] == ["0.2500 -> 0.5000", "0.2500 -> 0.7500"]
    assert rows["generated tokens"][1:] == ["200", "200"] and "c0ffee" in output.out
    assert run.main(command) == 0 and len(builds) == 1, "a finished run is only compared"
    for options, word in ((["--seed", "5"], "--seed 5"), (["--row", "question/gspo"], "question/gspo")):
        assert run.main([*command, *options]) == 2 and word in capsys.readouterr().err
    for options in (["--row", "grpo"], ["--row", "question/grpo", "--seeds", "1"], ["--seeds", "1"]):
        with pytest.raises(SystemExit):
            run.main(options)


def test_the_start_of_a_row_is_built_if_it_is_missing(study, tmp_path, monkeypatch, capsys):
    """In a checkout without data/built: by prepare.sh of the study, or else of experiments."""
    prepare = tmp_path / "experiments" / "prepare.sh"
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "PREPARE", prepare)
    command = ["--row", "question/grpo", "--seed", "4", "--script", str(ROOT / "train_rl.py")]
    scores = "zero_variance.offline_scores=data/built/habits/none.jsonl"
    for _ in range(2):
        assert run.main([*command, "--dry-run", scores]) == 0
        assert f"bash {prepare.relative_to(tmp_path)} habits" in capsys.readouterr().out
        prepare = study / "prepare.sh"  # also makes the scores
        prepare.touch()
    builds = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(run.subprocess, "run", lambda command, cwd, env: builds.append(command) or done)
    assert run.main([*command, "data.train=[{path: data/built/habits/pool_50.jsonl}]"]) == 2
    assert [words[-1] for words in builds] == ["habits"]
    error = capsys.readouterr().err
    assert "data/built/habits/pool_50.jsonl" in error and "README.md" in error, "named after the build"


RECORDED = {
    (file.parent.name, record["row"]): record
    for file in sorted(run.STUDIES.glob("*/*.jsonl"))
    for record in map(json.loads, file.read_text().splitlines())
    if file.with_name(f"{record['row']}.yaml").is_file()
}


def test_the_recorded_settings_of_every_row_are_repeated(monkeypatch):
    """Under their present names, and none besides."""
    monkeypatch.chdir(ROOT)
    assert len(RECORDED) > 50
    for (name, row), record in RECORDED.items():
        file = run.STUDIES / name / f"{row}.yaml"
        args = SimpleNamespace(rows=[file], script=ROOT / "train_rl.py")
        config = load_config(["--config", str(file), *run.recorded_settings(args, record)])
        repeated = flat_settings(config.model_dump(mode="json", exclude_defaults=True))
        of_each_run = {key: repeated[key] for key in ("run.dir", "train.seed") if key in repeated}
        assert repeated == settings_of_record(record) | of_each_run, (name, row)


def test_a_run_with_a_plugin_is_continued_and_recorded_from_the_root(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    plugin = "experiments/plugins/sapo.py:sapo"
    folder = write_run(tmp_path, "sapo", 0, [0.2, 0.4])
    prompts = "data.train=[{path: x.jsonl}]"
    arguments = ("--config", "experiments/methods/sapo.yaml", prompts, f"run.dir={folder}")
    config = load_config(list(arguments))
    assert config.algorithm.gain == plugin
    prepare_run_dir(folder, config, record=None)
    assert ".." in yaml.safe_load((folder / "config.yaml").read_text())["algorithm"]["gain"]
    versions = json.loads((folder / "versions.json").read_text())
    (folder / "versions.json").write_text(json.dumps(versions | {"script": "train_rl.py"}))
    one = run.Run("sapo", 0, folder, folder.with_suffix(".log"), Path("train_rl.py"), arguments)
    assert run.changed_settings(one) == []
    monkeypatch.chdir(tmp_path)
    assert report.provenance(folder)["settings"]["algorithm.gain"] == plugin


@pytest.mark.parametrize(
    ("rows", "seeds", "options", "message"),
    [
        ("a a", "0", (), "--rows: a"), ("a", "0 0", (), "--seeds: 0"), ("a none", "0", (), "none.yaml"),
        ("a", "0", ("train.num_stepz=3",), "train.num_stepz"), ("a", "0", ("train.seed=3",), "train.seed"),
        ("a", "0", ("run={dir: elsewhere}",), "run.dir"), ("a", "0", ("--script", "none.py"), "none.py"),
        ("a", "0", ("--script", "README.md"), "README.md"),
        ("a", "0", ("--script", "reward.py"), "reward.py"),  # no trainer
    ],
)  # fmt: skip
def test_invalid_plans_are_refused_before_any_launch(rows, seeds, options, message, table, tmp_path, capsys):
    assert table(rows, seeds, *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# A process tree like torchrun's: the child has its own session, and both processes ignore SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()} {child.pid}\\n")
time.sleep(600)
"""


def test_a_locked_folder_is_refused(table, tmp_path, capsys):
    """Even with --redo, the log of the running run is not truncated, and the folder is not removed."""
    from runtime.checkpoint import lock_run_dir

    folder = tmp_path / "out" / "a" / "seed_0"
    lock = lock_run_dir(folder)
    log = folder.with_name("seed_0.log")
    log.write_text("running")
    for options in ([], ["--redo"]):
        assert table("a", "0", *options) == 2
        assert f"{folder}: a run" in capsys.readouterr().err
    assert log.read_text() == "running" and (folder / "lock").is_file()
    lock.close()
    run.refuse_locked(folder)


@pytest.mark.slow(process="others")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_every_tree_and_nothing_else(number, table, tmp_path, monkeypatch):
    """The scheduler is a fork of this process, because a new one would import torch first."""
    pids = tmp_path / "pids"
    rows = [str(tmp_path / f"{name}.yaml") for name in ("a", "b", "bad")]
    argv = ["--rows", *rows, "--seeds", "0", "--out", str(tmp_path / "out"), "--jobs", "2"]
    monkeypatch.setattr(run, "GRACE_S", 1.0)
    monkeypatch.setattr(run, "command", lambda one, ranks: [sys.executable, "-c", STUBBORN, str(pids)])
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    scheduler = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(run.main(argv)))
    scheduler.start()
    try:
        assert wait_until(lambda: pids.is_file() and pids.read_text().count("\n") >= 2, 90)
        started = [int(pid) for pid in pids.read_text().split()]
        assert len(started) == 4 and all(alive(pid) for pid in started)
        os.kill(scheduler.pid, number)
        scheduler.join(limit(30))
        assert scheduler.exitcode == 130
        assert not any(alive(pid) for pid in started)
        assert bystander.poll() is None and len(pids.read_text().split()) == 4, "the third run never started"
    finally:
        scheduler.kill()
        for pid in pids.read_text().split() if pids.is_file() else ():
            if alive(int(pid)):
                os.kill(int(pid), signal.SIGKILL)
        bystander.kill()
        bystander.wait()


# ---- for real ----------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_row_from_training_to_the_table(demo_model, python_stand_in, tmp_path, capsys):
    """A changed copy of train_rl.py, in another folder, trains the row."""
    copy = tmp_path / "mine.py"
    shutil.copy(ROOT / "train_rl.py", copy)
    line = "    run = set_up(config)\n"
    edit(copy, line, f'{line}    print("a changed copy", flush=True)\n')
    text = f"base: {ROOT}/experiments/environments/tiny.yaml\nrollout: {{group_size: 4}}\n"
    (tmp_path / "small.yaml").write_text(text)
    out = tmp_path / "out"
    rows = ["--rows", tmp_path / "small.yaml", "--seeds", 0, "--out", out, "--ranks", 1]
    sets = "[{path: data/built/tiny/test.jsonl, name: additions, limit: 20}]"
    small = ["train.num_steps=2", "rollout.prompts_per_step=8", "eval.every=1", f"data.eval={sets}"]
    command = ["experiments/run.py", *rows, "--script", copy, *small]
    trained = preloaded.run(0, *command, env={"PYTHON_STAND_IN": str(python_stand_in)})
    assert trained.returncode == 0, trained.stdout + trained.stderr
    folder = out / "small" / "seed_0"
    assert "a changed copy" in folder.with_name("seed_0.log").read_text()
    assert (folder / "source" / "mine.py").read_text() == copy.read_text()
    assert json.loads((folder / "versions.json").read_text())["script"] == "mine.py"
    assert run.main([str(word) for word in (*rows, "--script", copy, *small)]) == 0
    assert "1 of 1 runs" in capsys.readouterr().out
    table = preloaded.run(0, "experiments/report.py", "--runs", out, "--parent", "small")
    assert table.returncode == 0, table.stderr
    line = cells(table.stdout)["small"]
    summary = json.loads((folder / "summary.json").read_text())
    assert float(line[2]) == pytest.approx(summary["avg_at_8_after"], abs=1e-4)
    assert float(line[8]) == pytest.approx(summary["gradient_token_share"], abs=1e-3)


def test_final_metrics_are_compared_seed_by_seed(tmp_path, capsys):
    """Seeds 0 to 2 are common; seed 3 is the parent's and seed 4 the row's alone."""
    finals = {"off": {0: 0.4, 1: 0.5, 2: 0.7, 3: 0.1}, "on": {0: 0.5, 1: 0.55, 2: 0.85, 4: 0.9}}
    for row, values in finals.items():
        for seed, value in values.items():
            write_run(tmp_path / "runs", row, seed, [0.2, value])
    columns = ("row", "paired", "paired_interval", "paired_p", "paired_p_holm")
    (off, on), printed = make(tmp_path / "runs", "--parent", "off", "--columns", *columns, capsys=capsys)
    differences = [finals["on"][seed] - finals["off"][seed] for seed in (0, 1, 2)]
    half = T_975[2] * statistics.stdev(differences) / math.sqrt(3)
    assert (on["pairs"], on["paired"]) == (3, pytest.approx(0.1))
    assert on["paired_interval"] == pytest.approx([0.1 - half, 0.1 + half])
    p = ttest_rel([0.5, 0.55, 0.85], [0.4, 0.5, 0.7]).pvalue
    assert on["paired_p"] == on["paired_p_holm"] == pytest.approx(p)
    assert (off["pairs"], off["paired"], off["detectable"]) == (0, None, None)
    assert cells(printed)["on"][1] == "+0.1000"


@pytest.mark.parametrize("noise, is_constant", [(0, True), (1e-7, True), (1e-5, False)])
def test_differences_that_rounding_alone_separates_have_no_p(noise, is_constant):
    """Records have seven digits: 5/512 between two shares becomes 0.0097656 or 0.0097657."""
    differences = np.array([5 / 512, 5 / 512, 5 / 512 + noise])
    values = (report.paired_p(differences), report.detectable_difference(differences))
    assert (values == (None, None)) == is_constant
    assert report.paired_p(np.zeros(3)) == 1.0 and report.paired_p(np.zeros(1)) is None
    assert report.holm([0.03, report.paired_p(np.zeros(3))]) == [0.06, 1.0]


BLOCKED = {"off": [0.25, 0.5, 0.75, 0.25, 0.5, 0.5], "on": [0.5, 0.5, 0.75, 0.75, 0.5, 0.75]}  # by seed


def test_intervals_of_blocks_are_over_the_means_of_blocks(tmp_path, capsys):
    for row, finals in BLOCKED.items():
        for seed, final in enumerate(finals):
            write_run(tmp_path / "runs", row, seed, [0.2, final])
    columns = ("--columns", "row", "n", "metric", "interval", "paired_interval")
    options = ("--parent", "off", "--block", 2, *columns)
    (off, on), _ = make(tmp_path / "runs", *options, capsys=capsys)
    means = {"off": [0.375, 0.5, 0.5], "on": [0.5, 0.75, 0.625]}
    for row, interval in (("off", off["interval"]), ("on", on["interval"])):
        half = T_975[2] * statistics.stdev(means[row]) / math.sqrt(3)
        mean = statistics.fmean(means[row])
        assert interval == pytest.approx([mean - half, mean + half])
    assert on["n"] == 6 and on["paired"] == pytest.approx(1 / 6)


COMPARED = "> Note: Declared: `{}`. Exploratory, not among the declared contrasts: other - off."


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ("--columns row metric interval", "> Note: Declared: `{}`."),
        *((f"--columns row {column}", COMPARED) for column in ("paired", "paired_p")),
        ("--columns row detectable --rows off on", "> Note: Declared: `{}`."),
        (
            "--columns row paired_p_holm --rows off other",
            COMPARED + " Declared contrasts that the correction lacks: on - off.",
        ),
        ("--columns row n --metric accuracy", "> Note: Declared: `{}`. Exploratory metric: `accuracy`."),
    ],
)
def test_the_note_follows_columns_and_metric(options, note, tmp_path, capsys):
    """The declaration has the contrast on - off and the endpoint avg_at_8."""
    folders = [
        write_run(tmp_path / "runs", row, seed, [0.2, 0.5, 0.5 + 0.125 * seed])
        for row in ("off", "on", "other")
        for seed in (0, 1)
    ]
    declared = dict.fromkeys(declaration.KEYS, "?") | {
        "rows": ["off", "on", "other"], "seeds": [0, 1], "contrasts": [["on", "off"]], "endpoint": "avg_at_8"
    }  # fmt: skip
    (tmp_path / "declared.json").write_text(json.dumps(declared))
    record = write_record(tmp_path / "record.jsonl", *folders)
    _, printed = make(record, "--parent", "off", *options.split(), capsys=capsys)
    assert note.format(declaration.digest_of(declared)) in printed.splitlines()


def test_a_detectable_difference_is_found_with_80_percent_power():
    """Samples with this true difference are found by the tests in 0.8 of 20,000 draws (error of 0.003)."""
    pairs = np.array([0.3, -0.1, 0.2, 0.5, 0.0, 0.1])
    deviation = pairs.std(ddof=1)
    generator = np.random.default_rng(0)
    draws = generator.normal(report.detectable_difference(pairs), deviation, (20_000, 6))
    is_found = ttest_rel(draws, np.zeros_like(draws), axis=1).pvalue < 0.05
    assert is_found.mean() == pytest.approx(0.8, abs=0.01)
    assert report.detectable_difference(np.array([0.5, 0.5])) is None


def test_rows_that_start_from_other_weights_are_named(tmp_path, capsys):
    """A record without a digest counts as another start; folders and record files agree."""
    root = tmp_path / "runs"
    for row, weights in [("grpo", "aa"), ("same", "aa"), ("old", None), ("moved", "bb")]:
        folder = write_run(root, row, 0, [0.2, 0.4])
        data = {"train": weights, "sums": "cc" if weights else "dd"}
        (folder / "versions.json").write_text(json.dumps({"python": "3", "weights": weights, "data": data}))
    _, printed = make(root, "--parent", "grpo", "--export", tmp_path / "runs.jsonl", capsys=capsys)
    assert "start weights than the parent's: moved, old, and some" in printed
    assert "held-out prompts than the parent's: old." in printed, "training prompts may differ"
    assert make(tmp_path / "runs.jsonl", "--parent", "grpo", capsys=capsys)[1] == marked(printed)
    _, printed = make(root, "--parent", "grpo", "--rows", "grpo", "same", capsys=capsys)
    assert "start weights" not in printed and "held-out prompts" not in printed
