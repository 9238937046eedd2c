"""Run train_rl.py up to the start of vLLM, which is an error here: without_engine.py SETTINGS."""

import sys
from pathlib import Path

import rollout
import train_rl
from runtime import launch


def refuse_start(*_):
    raise AssertionError("vLLM would start now")


if __name__ == "__main__":
    rollout.start_vllm = refuse_start
    launch.leave(
        launch.run(train_rl.main, train_rl.read_arguments, sys.argv[1:], lambda config: Path(config.run.dir))
    )
