#!/bin/bash
# Make the pairs, train the judges, measure them, and train the policies. Repeat the command to continue.
#   bash experiments/studies/judge/run.sh 0 1 2 3 4          # judge seeds; judge J serves the runs 3 J to 3 J + 2
set -euo pipefail
BUILT=data/built/judge
RUNS=runs/judge_training
ROWS=experiments/studies/judge
QUESTION="{prompt}|{first}|{second}|" # equals reward.judge_template of reasoning.yaml
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

python -m data.tiny
python -m data.judge_pairs --model data/built/tiny/model --prompts data/built/tiny/train.jsonl --skip 2000 \
    --output $BUILT/pairs --pairs 16000 --max-new-tokens 16 --dtype float32 --kv-cache-gib 0.25 \
    --question "$QUESTION" --rationale "{answer};{first_score};{second_score};"

measure() { # name, seed, kind, folder
    python experiments/judge_quality.py --pairs $BUILT/pairs --name "$1" --seed "$2" --kind "$3" --judge "$4" \
        --out $ROWS/quality.json ${5:+--question "$5"}
}

train_judge() { # seed
    for kind in reasoning direct scalar; do
        python -m data.judge_start --pairs $BUILT/pairs --kind $kind --seed "$1" --output $BUILT/$kind/seed_"$1"
    done
    for kind in reasoning direct; do
        [ -f $RUNS/$kind/seed_"$1"/summary.json ] || torchrun --standalone --nproc-per-node=1 train_rl.py \
            --config $ROWS/training/$kind.yaml model.path=$BUILT/$kind/seed_"$1" train.seed="$1" \
            run.dir=$RUNS/$kind/seed_"$1"
    done
}

num_running=0
for judge in "$@"; do # two judges at a time
    train_judge "$judge" &
    num_running=$((num_running + 1))
    if [ $num_running -eq 2 ]; then wait -n; num_running=$((num_running - 1)); fi
done
wait

for judge in "$@"; do
    measure reasoning_start "$judge" generative $BUILT/reasoning/seed_"$judge" "$QUESTION"
    measure reasoning "$judge" generative $RUNS/reasoning/seed_"$judge"/model "$QUESTION"
    measure direct "$judge" generative $RUNS/direct/seed_"$judge"/model "$QUESTION"
    measure scalar "$judge" scalar $BUILT/scalar/seed_"$judge"
done

run_rows() { # judge, folder of the judge or "", rows ...
    seeds="$((3 * $1)) $((3 * $1 + 1)) $((3 * $1 + 2))"
    python experiments/run.py --rows "${@:3}" --seeds $seeds --out runs/judge --jobs 2 ${2:+reward.judge_path=$2}
}
for judge in "$@"; do
    run_rows "$judge" "" $ROWS/verifier.yaml
    run_rows "$judge" $RUNS/reasoning/seed_"$judge"/model $ROWS/reasoning{,_guard,_mixed}.yaml
    run_rows "$judge" $BUILT/scalar/seed_"$judge" $ROWS/scalar{,_guard,_mixed}.yaml
    run_rows "$judge" $RUNS/direct/seed_"$judge"/model $ROWS/direct.yaml
done
