"""Test scheduling and overlapped rewards in whole runs: they change the time, not what comes out."""

import pytest
from conftest import SMALL, train
from helpers import assert_same_weights, rows_of

ALL_OFF = ["rollout.schedule=arrival", "reward.overlap=false", "reward.decode=engine"]


def without_expectations(rows: list[dict]) -> list[dict]:
    """Leave out how well lengths were foreseen, which a run without a schedule does not try."""
    return [{k: v for k, v in row.items() if not k.startswith("length_")} for row in rows]


@pytest.mark.slow
def test_no_scheduling_and_no_overlap_give_the_same_run_bit_for_bit(undisturbed, tmp_path):
    done = train(*SMALL, *ALL_OFF, f"run.dir={tmp_path}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert without_expectations(rows_of(tmp_path)) == without_expectations(rows_of(undisturbed))
    assert_same_weights(tmp_path / "model", undisturbed / "model")
