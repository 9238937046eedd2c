"""Run scripts on ranks that are forks of a server, which experiments/bench/preloaded.py starts."""

from experiments.bench.preloaded import run, start_server

__all__ = ["run", "start_server"]
