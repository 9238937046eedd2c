#!/bin/bash
# Build task instances in data/built: prompts, and the start weights that the tree or its history holds.
#   bash experiments/prepare.sh chains chains_3 tasks_small_3
# data.tiny trains the warm start of an instance that neither holds, for example of chains_100. tasks_small and
# tasks_hard have 94 to 96 prompts of tasks of `make real`, and no start weights.
set -e
python=${PYTHON:-python}
for instance in "$@"; do
    if [[ $instance =~ ^tasks_(small|hard)(_([0-9]+))?$ ]]; then
        tasks=(number_sequence:0 number_sequence:1)
        held_out=200
        if [[ ${BASH_REMATCH[1]} == small ]]; then
            tasks=(chain_sum:0 chain_sum:1 basic_arithmetic:0 products:0 products:1 "${tasks[@]}" leg_counting:1)
            held_out=320
        fi
        "$python" -m data.reasoning_gym --rows 96 --test "$held_out" --balance 0.08 \
            --seed "${BASH_REMATCH[3]:-0}" --output "data/built/$instance" --tasks "${tasks[@]}"
        continue
    fi
    start=experiments/starts/$instance
    from=()
    if [ -f "$start/start.json" ]; then
        "$python" -m experiments.starts get "$instance"  # ends here with a message if it cannot
        if [ -d "$start/model" ]; then from=(--model "$start/model"); else from=(--model "$start"); fi
    fi
    "$python" -m data.tiny --recipe "$instance" "${from[@]}"
done
