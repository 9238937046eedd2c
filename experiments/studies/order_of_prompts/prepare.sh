#!/bin/bash
# Build task instances of this study: prompts, start weights, and the parts of the prompts by length.
#   bash experiments/studies/order_of_prompts/prepare.sh chains chains_3
set -e
bash experiments/prepare.sh "$@"
"${PYTHON:-python}" -m experiments.studies.order_of_prompts.parts "$@"
