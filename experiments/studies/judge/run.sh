#!/bin/bash
# Tune the judges, or make judges and everything that needs them. Repeat a command to continue.
#   bash experiments/studies/judge/run.sh tune     # three learning rates per kind of judge, judge seed 100
#   bash experiments/studies/judge/run.sh 0 1      # judges 0 and 1: training, all rows, quality.json
# Judge J serves the runs with seeds 3 J to 3 J + 2. Run a judge on one machine, from the first command to the export.
set -euo pipefail
ROWS=experiments/studies/judge
BUILT=data/built/judge
JUDGES=runs/judge_training
START=experiments/starts/tiny
SCALAR_RATE=1e-3 # learning rate of the scalar judges, chosen by tune
QUESTION="{prompt}|{first}|{second}|" # equals reward.judge_template of reasoning.yaml
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

python -m data.judge_pairs --model $START/model --prompts $START/train.jsonl --skip 2000 \
    --output $BUILT/pairs --pairs 16000 --max-new-tokens 16 --dtype float32 --kv-cache-gib 0.25 \
    --question "$QUESTION" --rationale "{answer};{first_score};{second_score};"

start() { # kind, seed, options of data.judge_start
    python -m data.judge_start --pairs $BUILT/pairs --kind "$1" --seed "$2" --output $BUILT/"$1"/seed_"$2" "${@:3}"
}

by_rl() { # kind, seed, folder of runs, settings: trains the judge that start() made
    start "$1" "$2"
    python experiments/run.py --rows $ROWS/training/"$1".yaml --seeds "$2" --out "$3" \
        model.path=$BUILT/"$1"/seed_"$2" "${@:4}"
}

wait_for() { # process ids: fails if one of them has failed
    for pid in "$@"; do wait "$pid"; done
}

tune() {
    for rate in 2e-5 5e-5 1e-4; do
        by_rl reasoning 100 $JUDGES/tuning/$rate train.learning_rate=$rate & reasoning=$!
        by_rl direct 100 $JUDGES/tuning/$rate train.learning_rate=$rate & direct=$!
        wait_for $reasoning $direct
        echo "$rate: choose by the mean training score of the last ten steps"
        python experiments/report.py --runs $JUDGES/tuning/$rate --parent reasoning \
            --metric train/score --columns row n metric
    done
    for rate in 1e-3 3e-3 1e-2; do
        python -m data.judge_start --pairs $BUILT/pairs --kind scalar --seed 100 --learning-rate $rate \
            --output $BUILT/scalar/tuning_$rate
        echo "scalar, $rate: choose by the loss above"
    done
}

run_judge() { # judge
    by_rl reasoning "$1" $JUDGES & reasoning=$!
    by_rl direct "$1" $JUDGES & direct=$!
    start scalar "$1" --learning-rate $SCALAR_RATE
    wait_for $reasoning $direct
    mkdir -p $BUILT/current # the rows name these three paths
    ln -sfn "$PWD"/$JUDGES/reasoning/seed_"$1"/model $BUILT/current/reasoning
    ln -sfn "$PWD"/$JUDGES/direct/seed_"$1"/model $BUILT/current/direct
    ln -sfn "$PWD"/$BUILT/scalar/seed_"$1" $BUILT/current/scalar
    margin=$(python -c "import json; print(json.load(open('$BUILT/current/scalar/recipe.json'))['margin'])")
    seeds="$((3 * $1)) $((3 * $1 + 1)) $((3 * $1 + 2))"
    python experiments/run.py --rows $ROWS/{verifier,direct,{reasoning,scalar}{,_mixed,_guard}}.yaml \
        --seeds $seeds --out runs/judge/"$1" --jobs 2
    python experiments/run.py --rows $ROWS/scalar_pairs.yaml --seeds $seeds --out runs/judge/"$1" --jobs 2 \
        reward.judge_margin="$margin"
}

measure() { # name, judge, kind, folder
    python experiments/judge_quality.py --pairs $BUILT/pairs --name "$1" --seed "$2" --kind "$3" --judge "$4" \
        --out $ROWS/quality.json ${5:+--question "$5"}
}

if [ "${1:-}" = tune ]; then
    tune
    exit
fi
for judge in "$@"; do
    run_judge "$judge"
done
for judge in "$@"; do # after all runs, because a changed quality.json marks the checkout of a run as dirty
    for kind in reasoning direct; do
        measure ${kind}_start "$judge" generative $BUILT/$kind/seed_"$judge" "$QUESTION"
        measure $kind "$judge" generative $JUDGES/$kind/seed_"$judge"/model "$QUESTION"
    done
    measure scalar "$judge" scalar $BUILT/scalar/seed_"$judge"
done
