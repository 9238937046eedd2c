#!/bin/bash
# Run the panel: every row at a third of its environment's learning rate, at that rate, and at three times it.
#   bash experiments/studies/real_regime/run.sh
# Repeat the command to continue after a stop: finished runs are skipped.
set -e
study=experiments/studies/real_regime
run() {  # environment, learning rate of each folder
    environment=$1 third=$2 own=$3 triple=$4
    for folder in third own triple; do
        python experiments/run.py --rows $study/${environment}_{grpo,gspo,espo}.yaml --seeds 0 --jobs 2 \
            --out runs/real_regime/$folder train.learning_rate=${!folder}
    done
}
run habits 1e-4 3e-4 9e-4
run chains 1.7e-4 5e-4 1.5e-3
run sums 7e-6 2e-5 6e-5
run instructions 1.7e-5 5e-5 1.5e-4
for folder in third own triple; do  # set -e: only after all runs have finished
    rm -f $study/$folder.jsonl  # --export refuses an existing file
    python experiments/report.py --runs runs/real_regime/$folder --parent sums_grpo --metric train/score \
        --export $study/$folder.jsonl
done
python -m experiments.studies.real_regime.panel --json $study/panel.json --plot $study/panel.png
