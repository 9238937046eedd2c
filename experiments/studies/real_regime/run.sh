#!/bin/bash
# Run the panel: every row at a third of its environment's learning rate, at that rate, and at three times it.
#   bash experiments/studies/real_regime/run.sh                  # all environments
#   bash experiments/studies/real_regime/run.sh habits chains    # some of them, for example on another day
# Repeat the command to continue after a stop: finished runs are skipped.
set -e
study=experiments/studies/real_regime
declare -A rates=(  # third own triple
    [habits]="1e-4 3e-4 9e-4" [chains]="1.7e-4 5e-4 1.5e-3" [sums]="7e-6 2e-5 6e-5" [instructions]="1.7e-5 5e-5 1.5e-4"
)
for environment in ${@:-habits chains sums instructions}; do
    read -r third own triple <<< "${rates[$environment]:?unknown environment}"
    for rate in third own triple; do
        python experiments/run.py --rows $study/${environment}_{grpo,gspo,espo}.yaml --seeds 0 --jobs 2 \
            --out runs/real_regime/$rate train.learning_rate=${!rate}
    done
done
for environment in ${@:-habits chains sums instructions}; do  # after all runs, because a record makes the checkout dirty
    for rate in third own triple; do
        rm -f $study/${environment}_$rate.jsonl  # --export refuses an existing file
        python experiments/report.py --runs runs/real_regime/$rate --parent ${environment}_grpo \
            --rows ${environment}_{grpo,gspo,espo} --metric train/score --export $study/${environment}_$rate.jsonl
    done
done
