#!/bin/bash
# Build task instances of this study: prompts, start weights, offline scores and pools.
#   bash experiments/studies/elimination_tuned/prepare.sh habits habits_3
set -e
bash experiments/prepare.sh "$@"
for instance in "$@"; do
    folder=data/built/$instance
    "${PYTHON:-python}" -m data.score --model $folder/model --prompts $folder/train.jsonl \
        --output $folder/scores.jsonl --samples 8 --max-new-tokens 16 --dtype float32 --kv-cache-gib 0.25
done
"${PYTHON:-python}" -m experiments.studies.elimination_tuned.pools "$@"
