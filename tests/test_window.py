"""experiments/studies/long_chains/window.py: figures and tables against the logs of the runs."""

import json
import sys

import pytest
import yaml

from experiments.studies.long_chains import window

NUM_STEPS = 12


def write_run(folder, rate: float, final: float, longer: float, clipped: list[float | None]) -> None:
    """Write a run of 12 steps; a step whose `clipped` is None has trained on nothing."""
    folder.mkdir(parents=True)
    train = {"learning_rate": rate, "num_steps": NUM_STEPS, "max_generated_tokens": None}
    (folder / "config.yaml").write_text(yaml.safe_dump({"train": train}))
    (folder / "versions.json").write_text('{"commit": "c0ffee"}')
    (folder / "summary.json").write_text("{}")
    log = [{"step": 0, "eval/chains/avg_at_4": 0.25, "eval/longer/avg_at_4": 0.0}]
    for step, share in enumerate(clipped, start=1):
        log.append({
            "step": step, "tokens_total": 100, "gradient_tokens_total": 50, "zero_variance_frac": 0.5,
            "seconds_per_step": 0.1,
        })  # fmt: skip
        if share is not None:
            log[-1] |= {"entropy": step / 8, "clipped": share}
    log.append({"step": NUM_STEPS, "eval/chains/avg_at_4": final, "eval/longer/avg_at_4": longer})
    lines = [json.dumps(row | {"generated_tokens": 100 * row["step"]}) + "\n" for row in log]
    (folder / "metrics.jsonl").write_text("".join(lines))


@pytest.fixture
def runs(tmp_path):
    clipped = [9.0, 9.0, *(step / 16 for step in range(9)), None]
    for rate, row, seed, final in (
        (1e-3, "grpo", 100, 0.5), (1e-3, "grpo", 101, 0.75), (5e-4, "grpo", 100, 0.625),
        (1e-3, "espo", 100, 0.875),
    ):  # fmt: skip
        write_run(tmp_path / "runs" / f"{rate:g}" / row / f"seed_{seed}", rate, final, final / 2, clipped)
    return tmp_path / "runs"


def test_a_window_is_read_and_shown_run_by_run(runs, tmp_path, monkeypatch, capsys):
    """The last ten of 12 steps are 3 to 12, and step 12 lacks entropy and clipped."""
    file = tmp_path / "window.json"
    picture = tmp_path / "window.png"
    monkeypatch.setattr(sys, "argv", ["window", str(runs), "--json", str(file), "--plot", str(picture)])
    window.main()
    data = json.loads(file.read_text())
    assert len(data) == 4 and picture.read_bytes().startswith(b"\x89PNG")
    (run,) = (run for run in data if (run["row"], run["seed"], run["learning_rate"]) == ("grpo", 101, 1e-3))
    assert run == {
        "row": "grpo", "seed": 101, "commit": "c0ffee", "learning_rate": 1e-3, "seconds": 1.2,
        "start": 0.25, "chains": 0.75, "longer": 0.375,
        "entropy": pytest.approx(sum(range(3, 12)) / 9 / 8), "clipped": pytest.approx(0.25),
    }  # fmt: skip
    lines = [
        "| row | 0.0005 | 0.001 | best mean |",
        "|---|---|---|---|",
        "| espo | - | 0.875 | 0.875 |",
        "| grpo | 0.625 | 0.500, 0.750 | 0.625 |",
    ]
    assert window.table_lines(data) == lines
    assert window.longer_lines(data)[2:] == [
        "| espo | - | 0.438 | 0.438 |",
        "| grpo | 0.312 | 0.250, 0.375 | 0.312 |",
    ]
    assert "\n".join(lines) in capsys.readouterr().out
    assert window.clipped_lines(data)[1:] == [
        "|---|---|---|", "| espo | - | 0.2500 |", "| grpo | 0.2500 | 0.2500 |",
    ]  # fmt: skip


def test_runs_are_added_to_a_file(runs, tmp_path, monkeypatch, capsys):
    file = tmp_path / "window.json"
    more = tmp_path / "more"
    monkeypatch.setattr(sys, "argv", ["window", str(runs), "--json", str(file)])
    window.main()
    old = json.loads(file.read_text())
    write_run(more / "a" / "espo" / "seed_101", 1e-3, 0.5, 0.25, [0.5] * NUM_STEPS)
    monkeypatch.setattr(sys, "argv", ["window", str(file), str(more), "--json", str(file)])
    window.main()
    new = json.loads(file.read_text())
    assert [run for run in new if run in old] == old
    (added,) = (run for run in new if run not in old)
    assert (added["row"], added["seed"], added["chains"]) == ("espo", 101, 0.5)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        window.main()
    assert f"{more}: espo at 0.001, seed 101" in capsys.readouterr().err
    assert json.loads(file.read_text()) == new


def test_a_run_without_the_longer_chains_is_named(runs, monkeypatch, capsys):
    log = runs / "0.001" / "espo" / "seed_100" / "metrics.jsonl"
    log.write_text(log.read_text().replace("eval/longer/", "eval/other/"))
    monkeypatch.setattr(sys, "argv", ["window", str(runs)])
    with pytest.raises(SystemExit):
        window.main()
    error = capsys.readouterr().err
    assert str(log.parent) in error and "`longer`" in error
