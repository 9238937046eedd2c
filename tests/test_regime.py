"""experiments/studies/real_regime: metrics of the plug-in against loops, and figures against a record."""

import json
import math
import os
import subprocess

import pytest
import torch
from conftest import ROOT

import train_rl
from batch import LossInputs
from experiments import records
from experiments.history import is_complete
from experiments.studies.real_regime import panel
from settings import AlgorithmSettings

PLUGIN = "experiments/studies/real_regime/recorded_gain.py:recorded_gain"
LENGTHS = (3, 8, 20)  # tokens of the completions


def make_inputs(algorithm: AlgorithmSettings) -> LossInputs:
    """Return random inputs of three completions; the second has no advantage."""
    torch.manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS))
    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS).unsqueeze(1)
    entropy = 2 * torch.rand(shape)
    old_logprobs = -torch.rand(shape)
    return LossInputs(
        logprobs=(old_logprobs + 0.01 * torch.randn(shape)).requires_grad_(),
        old_logprobs=old_logprobs,
        rollout_logprobs=old_logprobs,
        ref_logprobs=None,
        advantages=torch.tensor([[1.0], [0.0], [-0.5]]) * mask,
        entropy=entropy,
        token_groups=train_rl.token_groups_of(entropy, mask, algorithm),
        mask=mask,
        log_vocab=math.log(98),
        settings=algorithm,
    )


def expected_figures(inputs: LossInputs) -> dict[str, float]:
    """Return the sums of the plug-in's metrics over all tokens, computed group by group."""
    sums = dict.fromkeys(f"squared_{kind}_{n}" for kind in ("uncertain", "completion") for n in panel.LENGTHS)
    sums = dict.fromkeys([*sums, *(name.replace("squared", "groups") for name in sums)], 0.0)
    sums |= dict.fromkeys([f"cut_{alpha}" for alpha in panel.ALPHAS] + ["cut_tokens"], 0.0)
    for row, length in enumerate(LENGTHS):
        log_ratio = inputs.log_ratio[row, :length].tolist()
        entropy = inputs.entropy[row, :length].tolist()
        uncertain = sorted(range(length), key=lambda t: -entropy[t])[: math.ceil(0.2 * length)]
        largest = min(n for n in panel.LENGTHS if length <= n)
        for kind, tokens in (("uncertain", uncertain), ("completion", range(length))):
            mean = sum(log_ratio[t] for t in tokens) / len(tokens)
            sums[f"squared_{kind}_{largest}"] += mean**2
            sums[f"groups_{kind}_{largest}"] += 1
        advantage = inputs.advantages[row, 0].item()
        if advantage == 0:
            continue
        sums["cut_tokens"] += len(uncertain)
        excess = math.exp(sum(log_ratio[t] for t in uncertain) / len(uncertain)) - 1
        for alpha in panel.ALPHAS:
            eps = alpha * sum(entropy[t] for t in uncertain) / len(uncertain) / math.log(98)
            is_cut = excess > eps if advantage > 0 else excess < -eps
            sums[f"cut_{alpha}"] += len(uncertain) * is_cut
    return sums


def test_metrics_of_token_groups_equal_a_loop(float64):
    inputs = make_inputs(AlgorithmSettings(gain=PLUGIN))
    _, statistics = train_rl.token_gain(inputs)
    expected = expected_figures(inputs)
    sums = {name: (statistics[f"regime/{name}"] * inputs.mask).sum().item() for name in expected}
    assert sums == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert 0 < expected["cut_0.02"] and expected["cut_0.6"] < expected["cut_tokens"]


@pytest.mark.parametrize("level, clip_mode", [("token", "fixed"), ("entropy_group", "entropy_adaptive")])
def test_the_loss_is_the_built_in_loss(level, clip_mode, float64):
    built_in = make_inputs(AlgorithmSettings(ratio_level=level, clip_mode=clip_mode))
    recorded = make_inputs(
        AlgorithmSettings(ratio_level=level, gain=PLUGIN, gain_args={"clip_mode": clip_mode})
    )
    results = []
    for inputs in (built_in, recorded):
        gain, statistics = train_rl.token_gain(inputs)
        gain.sum().backward()
        results.append((gain.tolist(), inputs.logprobs.grad.tolist(), statistics["clipped"].tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("row", sorted(panel.FOLDER.glob("*_*.yaml")), ids=lambda row: row.stem)
def test_the_learning_rate_of_a_row_is_constant(row):
    config = train_rl.load_config(["--config", str(row)])
    train = config.train
    longest = config.rollout.prompts_per_step * config.rollout.group_size * config.rollout.max_new_tokens
    assert (train.max_generated_tokens or math.inf) > 10 * longest / 2, "ten steps end no run early"
    assert (train.num_steps, train.warmup_steps, train.lr_schedule) == (10, 0, "constant_with_warmup")


def test_the_script_can_be_repeated_after_its_export(tmp_path):
    """With a `python` that makes the exported file, and refuses an existing one like report.py."""
    python = tmp_path / "python"
    lines = [
        "#!/bin/bash",
        'file="${@: -1}"',
        "[ $1 = experiments/run.py ] && exit $FAILED",
        "[ $1 = experiments/report.py ] || exit 0",
        'mkdir -p "$(dirname "$file")" && [ ! -e "$file" ] && touch "$file"',
    ]
    python.write_text("\n".join(lines) + "\n")
    python.chmod(0o755)
    script = ["bash", str(panel.FOLDER / "run.sh")]
    study = tmp_path / panel.FOLDER.relative_to(ROOT)
    records = {f"chains_{rate}" for rate in panel.RATES}
    for is_failed in (False, False, True):
        settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FAILED": str(int(is_failed))}
        done = subprocess.run([*script, "chains"], cwd=tmp_path, env=os.environ | settings)
        assert done.returncode == int(is_failed)
        assert {file.stem for file in study.glob("*.jsonl")} == records, "a failed run removes no record"
    settings["FAILED"] = "0"
    assert subprocess.run([*script, "sum"], cwd=tmp_path, env=os.environ | settings).returncode != 0
    assert subprocess.run(script, cwd=tmp_path, env=os.environ | settings).returncode == 0
    assert {file.stem for file in study.glob("*.jsonl")} == {
        f"{environment}_{rate}" for environment in panel.ENVIRONMENTS for rate in panel.RATES
    }


def test_the_power_of_the_spread_is_the_slope_over_the_bins():
    spread = {str(length): 0.3 * length**-0.4 for length in (8, 16, 64)}
    run = {"environment": "chains", "method": "grpo", "rate": "own"}
    data = [run | {"spread": {"uncertain": spread, "completion": {"32": 0.1}}}]
    uncertain, completion = panel.spread_lines(data)[2:]
    assert uncertain == f"| chains | uncertain | 8 to 64 | {spread['8']:.1e} | {spread['64']:.1e} | -0.40 |"
    assert completion == "| chains | completion | 32 | n/a | n/a | n/a |"


def test_figures_are_read_from_a_record(tmp_path, monkeypatch, capsys):
    """The spread is the root of 4e-4, the mean of d^2."""
    steps = {
        "step": [1, 2, 3], "generated_tokens": [100, 400, 500], "tokens_total": [100, 300, 100],
        "gradient_tokens_total": [50, 50, 50], "zero_variance_frac": [0.5, 0.25, 0.75],
        "seconds_per_step": [1, 1, 1], "score": [0.0, 0.5, 1.0], "completion_tokens": [20, 20, 20],
        "entropy": [0.2, 0.2, 0.2], "entropy/entropy_group_0": [1.0, 1.0, 1.0], "clipped": [0.1, 0.1, 0.1],
        "clipped/update_1": [0, 0, 0], "clipped/update_3": [0.2, 0.2, 0.2], "regime/rl_zvp_wrong": [1, 1, 1],
        "regime/cut_tokens": [0.2, 0.2, 0.2],
    }  # fmt: skip
    steps |= {f"regime/cut_{alpha}": [0.02 / alpha / 5] * 3 for alpha in panel.ALPHAS}
    for kind in ("uncertain", "completion"):
        for length in panel.LENGTHS:
            groups = [0.2, 0.2, 0.2] if length == 32 else [0.0, 0.0, 0.0]
            steps[f"regime/groups_{kind}_{length}"] = groups
            steps[f"regime/squared_{kind}_{length}"] = [share * 4e-4 for share in groups]
    for row in ("sums_grpo", "sums_espo"):
        record = {"row": row, "seed": 0, "commit": "c0ffee", "settings": {"train.learning_rate": 2e-5}}
        record |= {"steps": steps, "evaluations": {"step": [], "generated_tokens": []}, "offline_tokens": 0}
        with (tmp_path / "sums_own.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    argv = ["panel", "--runs", str(tmp_path), "--json", str(tmp_path / "panel.json")]
    monkeypatch.setattr("sys.argv", argv)
    panel.main()
    printed = capsys.readouterr().out
    assert "| sums | 20.0 | 0.200 | 1.000 | 0.093 | 1.9e-03 | 0.50 | 0.020 | 0.100 |" in printed
    row = "| sums | espo | 2.0e-05 | 0.000 to 0.500 | 0.1000 | 0.0000 | n/a | 0.2000 | n/a |"
    assert row in printed, "no row of updates 2 and 4 had a gradient"
    assert "| sums | 1.000 | 0.333 | 0.100 | 0.033 | 0.2 |" in printed
    data = json.loads((tmp_path / "panel.json").read_text())
    assert data[0]["clipped_by_update"] == {"1": 0, "3": pytest.approx(0.2)}
    assert data[0]["spread"] == {kind: {"32": pytest.approx(0.02)} for kind in ("uncertain", "completion")}


@pytest.mark.skipif(not is_complete(panel.FOLDER), reason="a shallow clone lacks the whole records")
def test_the_committed_figures_make_the_tables_of_the_records(tmp_path):
    recorded = json.loads((panel.FOLDER / "panel.json").read_text())
    data = panel.read_panel(records.get("real_regime", panel.FOLDER.parent, tmp_path))
    assert len(data) == len(recorded) > 0
    for lines in (panel.regime_lines, panel.clip_lines, panel.spread_lines, panel.alpha_lines):
        assert lines(data) == lines(recorded)
