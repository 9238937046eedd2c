"""A NaN or infinite reward, loss or gradient changes no weight; prompt and batch are reported."""

import pytest
import torch
from conftest import save_small_moe, train
from helpers import FakeRanks, RankSuite, error_of, make_batch, make_config, make_ragged_completions

from batch import Turn
from extras.teacher import Lesson
from runtime.checks import MAX_SAVED_BATCHES, handle_nonfinite, refuse_nonfinite_weights

pytestmark = pytest.mark.slow


def save_request(folder) -> None:
    save_small_moe(folder / "model")
    torch.save({"completions": make_ragged_completions()}, folder / "request.pt")


SUITE = RankSuite("nonfinite", 2, save_request)


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
@pytest.mark.parametrize("case", ["loss", "gradient", "reward"])
def test_two_ranks_skip_the_update(case, on_nonfinite):
    first, second = (result[case, on_nonfinite] for result in SUITE.results())
    names = first["before"].keys()
    assert names == first["after"].keys()
    assert all(torch.equal(first["before"][name], first["after"][name]) for name in names)
    assert all(torch.isfinite(tensor).all() for tensor in first["next"].values())
    has_changed = [not torch.equal(first["before"][name], first["next"][name]) for name in names]
    assert any(has_changed), "the next update is an ordinary one"
    errors = [first["raised"], second["raised"]]
    if on_nonfinite == "stop":
        assert all(f"step 5: a {case}" in error and "run.on_nonfinite=skip" in error for error in errors)
        if case == "gradient":
            assert all("none in particular" in error for error in errors)
        else:
            assert all("prompts (1): 'prompt 5';" in error for error in errors)
    else:
        assert errors == [None, None]
        if case != "reward":
            assert first["metrics"]["nonfinite_updates_max"] == 1
    if case == "reward" and on_nonfinite == "skip":
        assert all(first["valid"]) and second["valid"] == [i != 2 for i in range(6)]
        assert first["rewards"] == [1.0] * 6 and second["rewards"] == [float(i != 2) for i in range(6)]
    file = SUITE.folder() / on_nonfinite / "nonfinite" / f"step_000005_{case}_rank_1.pt"
    saved = torch.load(file, weights_only=True)
    assert saved["prompts"][2] == "prompt 5" and len(saved["completion_ids"]) == 6
    if case != "gradient":
        assert saved["rows"] == [2]


def test_a_skipped_update_leaves_nothing_behind():
    """Weights and optimizer are bitwise those of a run without bad updates, at each precision and stage."""
    for precision, (first, *after_bad) in SUITE.results()[0]["skips"].items():
        assert first == ([0, 0], True), precision
        assert after_bad == [([1, 0, 0], True)] * 3, precision


def test_gradients_are_averaged_in_float32_if_the_setting_says_so():
    """Against the exact average of all elements, whose order is unknown; bfloat16 keeps 8 bits."""
    first, second = (result["averages"] for result in SUITE.results())
    exact = (first["gradients"][0].double() + first["gradients"][1].double()) / 2
    for case in [key for key in first if key != "gradients"]:
        averages = torch.cat([first[case], second[case]]).double()
        averages = averages[averages != 0].sort().values
        error = (averages - exact[exact != 0].sort().values).abs().max()
        assert error <= 1e-7 if case[0] == "float32" else 1e-4 < error < 2**-6, case


def test_a_run_that_skips_bad_steps_saves_the_first_batches_only(tmp_path, one_rank, capsys):
    batch = make_batch([[1, 2]])
    batch.turns = [(Turn("assistant", 1), Turn("tool", 1))]
    batch.extras["teacher"] = Lesson(torch.tensor([True]), torch.zeros(1, 2), torch.ones(1))

    def save(step: int, on_nonfinite: str) -> None:
        config = make_config(f"run.dir={tmp_path}", f"run.on_nonfinite={on_nonfinite}")
        handle_nonfinite("loss", batch, [0], config, step)

    for step in range(MAX_SAVED_BATCHES + 1):
        save(step, "skip")
    names = sorted(path.name for path in (tmp_path / "nonfinite").iterdir())
    assert names == [f"step_{step:06d}_loss_rank_0.pt" for step in range(1, MAX_SAVED_BATCHES + 1)]
    lines = capsys.readouterr().out.splitlines()
    assert ["not saved" in line for line in lines] == [False] * MAX_SAVED_BATCHES + [True]
    assert all(f"the first {MAX_SAVED_BATCHES}" in line for line in lines)
    with pytest.raises(RuntimeError, match="batch is saved"):
        save(9, "stop")
    saved = torch.load(tmp_path / "nonfinite" / "step_000010_loss_rank_0.pt", weights_only=True)
    assert saved["extras"]["teacher"]["is_taught"].tolist() == [True]
    assert saved["turns"] == [[("assistant", 1), ("tool", 1)]] and saved["prompts"] == ["prompt 0"]


def test_an_update_that_breaks_the_weights_ends_the_run_before_a_checkpoint(demo_model, tmp_path):
    """At this learning rate AdamW's first step is infinite, although the gradient is finite."""
    settings = [
        "--config", "experiments/environments/tiny.yaml", "train.num_steps=1", "model.ep_size=1",
        "data.eval=[]", "rollout.prompts_per_step=8", "rollout.group_size=4", "train.learning_rate=1.0e+308",
        f"run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    done = train(*settings, ranks=1)
    assert done.returncode != 0
    assert "train.learning_rate" in done.stderr
    assert not (tmp_path / "run" / "model").exists() and not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_all_ranks_name_a_weight_that_is_not_finite_on_one_rank(value, monkeypatch):
    ranks = FakeRanks(2).install(monkeypatch)
    policies = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]

    def check(rank: int) -> None:
        refuse_nonfinite_weights(policies[rank], "step 3", "do this")

    assert ranks.run(check) == [None, None]
    with torch.no_grad():
        policies[1].weight[1, 2] = value
        policies[0].bias.fill_(3e38)  # finite values with an infinite sum
    errors = ranks.run(lambda rank: error_of(check, rank))
    assert errors[0] == errors[1]
    assert all(words in errors[0] for words in ("step 3", "1 of 2", "weight", "do this"))
