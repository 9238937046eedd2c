#!/bin/bash
# Build task instances in data/built: prompts, and the start weights that the tree or its history holds.
#   bash experiments/prepare.sh chains chains_3
# data.tiny trains the warm start of an instance that neither holds, for example of chains_100.
set -e
python=${PYTHON:-python}
for instance in "$@"; do
    start=experiments/starts/$instance
    from=()
    if [ -f "$start/start.json" ]; then
        "$python" -m experiments.starts get "$instance"  # ends here with a message if it cannot
        if [ -d "$start/model" ]; then from=(--model "$start/model"); else from=(--model "$start"); fi
    fi
    "$python" -m data.tiny --recipe "$instance" "${from[@]}"
done
