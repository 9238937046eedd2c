#!/usr/bin/env bash
# From a blank box with eight GPUs to an evaluated model: install, download GSM8K, train by RL, evaluate before and after.
#
#   git clone REPOSITORY winnow && cd winnow && bash examples/gsm8k_8gpu.sh
#
# Needs: Python 3.11+ with venv and headers (python3-venv, python3-dev), pip, git, make, a C compiler, NVIDIA's
# driver 580 or later, and the Hugging Face hub for the model and the questions.
# Arguments are settings of train_rl.py, for example: bash examples/gsm8k_8gpu.sh train.learning_rate=2e-6
# Started again after an interruption, the script resumes from the newest checkpoint.
# Environment variables replace parts of the job (in brackets: default):
#   RANKS   number of GPUs [8]                   MODEL  folder or hub name of the policy [Qwen/Qwen3-0.6B]
#   METHOD  YAML of the method [ESPO]            RUN    folder of the run [runs/gsm8k]
#   TRAIN, TEST  files with the columns question and answer, in place of the hub's
#   PYTHON  python of an installed environment, in place of `make install`
#   EVAL    further options of experiments/evaluate.py, for example "--limit 100"
set -euo pipefail
cd "$(dirname "$0")/.."

RANKS=${RANKS:-8}
MODEL=${MODEL:-Qwen/Qwen3-0.6B}
METHOD=${METHOD:-experiments/methods/espo.yaml}
RUN=${RUN:-runs/gsm8k}
DATA=$RUN/data
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ -z "${PYTHON:-}" ]; then
    make install
    PYTHON=.venv/bin/python
    if [ -x .venv-gpu/bin/python ]; then PYTHON=.venv-gpu/bin/python; fi  # .venv holds the CPU stack
fi
torchrun() {  # Ctrl-C, or SIGTERM to torchrun, ends the run after its step and a checkpoint, within ten minutes
    "$PYTHON" -m runtime.torchrun --nproc-per-node="$RANKS" --shutdown-timeout=600 "$@"
}
evaluate() {  # evaluate MODEL NAME: accuracy on the test questions, greedy and sampled, and a page of completions
    # shellcheck disable=SC2086  # EVAL is a list of options
    torchrun experiments/evaluate.py --model "$1" --data "$DATA/test.jsonl" --kind gsm8k --chat always \
        --max-new-tokens 1024 --json "$RUN/$2.json" --html "$RUN/$2.html" ${EVAL:-} \
        "data.chat_template_args={enable_thinking: false}"
}

echo "== 1 of 4: questions of GSM8K"
"$PYTHON" -m data.gsm8k --output "$DATA" ${TRAIN:+--train "$TRAIN"} ${TEST:+--test "$TEST"}

echo "== 2 of 4: the model before training"
[ -f "$RUN/before.html" ] || evaluate "$MODEL" before

echo "== 3 of 4: training"
torchrun train_rl.py --config examples/gsm8k_8gpu.yaml --config "$METHOD" model.path="$MODEL" run.dir="$RUN" \
    "data.train=[{path: $DATA/train.jsonl, kind: gsm8k}]" \
    "data.eval=[{path: $DATA/validation.jsonl, kind: gsm8k, name: validation}]" "$@"

echo "== 4 of 4: the model after training"
evaluate "$RUN/model" after

"$PYTHON" - "$RUN" <<'END'
import json, sys

run = sys.argv[1]
for name in ("before", "after"):
    figures = json.load(open(f"{run}/{name}.json"))["figures"]["all"]
    rates = {key: value for key, value in figures.items() if key.startswith(("accuracy", "avg_", "pass_"))}
    columns = [f"{key} {rate['mean']:.3f} ({rate['low']:.3f}-{rate['high']:.3f})" for key, rate in rates.items()]
    print(f"{name:>6}: " + ", ".join(columns))
print(f"model: {run}/model   completions to read: {run}/before.html, {run}/after.html   curves: {run}/curves.png")
END
