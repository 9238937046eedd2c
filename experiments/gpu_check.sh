#!/usr/bin/env bash
# What only a GPU can show: installs the GPU stack into .venv if it is not there, then experiments/gpu_check.py.
#   bash experiments/gpu_check.sh                on a machine with an NVIDIA H200 or H100, under an hour
#   bash experiments/gpu_check.sh --dry-run      small sizes on a CPU, some minutes
set -eu
cd "$(dirname "$0")/.."
make -s install
.venv/bin/pip install -q ${PIP_ARGS:-} liger-kernel==0.8.5 ||
    echo "liger-kernel could not be installed: its rows of the benchmark are left out"
exec .venv/bin/python experiments/gpu_check.py "$@"
