#!/bin/bash
# Build task instances in data/built: prompts, and the committed start weights if experiments/starts holds them.
#   bash experiments/prepare.sh chains chains_3
# Without a committed start, for example for chains_100, data.tiny trains the warm start.
set -e
for instance in "$@"; do
    start=experiments/starts/$instance
    if [ -d "$start/model" ]; then start=$start/model; fi
    if [ -d "$start" ]; then from=(--model "$start"); else from=(); fi
    "${PYTHON:-python}" -m data.tiny --recipe "$instance" "${from[@]}"
done
