# Sourced by the launch scripts of the Megatron target: batch, files and flags, judged together before any process starts; then the training.
# The launch script has said HERE (its folder), NPUS_PER_NODE, NNODES, TP, PP, MODEL_JSON, LOAD and, for a model with experts, EP and ETP.
# Its arguments go to pretrain_vlm.py. Relative paths are relative to the caller's folder.
# shellcheck shell=bash

EXAMPLES=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ENTRY=$(cd "$EXAMPLES/.." && pwd)/pretrain_vlm.py
# shellcheck source=launch.sh
source "$EXAMPLES/launch.sh"

# Batch
MBS=${MBS:-1}
GRAD_ACC_STEP=${GRAD_ACC_STEP:-16}

# Files and length of the run
DATA_JSON=${DATA_JSON:-$HERE/data.json}
SAVE=${SAVE:-save_dir}
TRAIN_ITERS=${TRAIN_ITERS:-10000}
SAVE_INTERVAL=${SAVE_INTERVAL:-1000}
TIMEOUT_MINUTES=${TIMEOUT_MINUTES:-30}

[[ "${CP:-1}" == 1 ]] || fail "CP is '$CP': context parallelism is not there yet; leave it at 1"
whole_numbers TP PP MBS GRAD_ACC_STEP TRAIN_ITERS SAVE_INTERVAL TIMEOUT_MINUTES
((WORLD % (TP * PP) == 0)) || fail "NPUS_PER_NODE x NNODES = $WORLD processes do not divide by TP x PP = $TP x $PP = $((TP * PP))"
DP=$((WORLD / (TP * PP)))
GBS=$((MBS * GRAD_ACC_STEP * DP))

FLAGS=(
    --mm-model "$MODEL_JSON" --mm-data "$DATA_JSON" --load "$LOAD" --save "$SAVE"
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --micro-batch-size "$MBS" --global-batch-size "$GBS"
    --train-iters "$TRAIN_ITERS" --save-interval "$SAVE_INTERVAL" --distributed-timeout-minutes "$TIMEOUT_MINUTES"
    --lr 1e-5 --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0 --clip-grad 1.0 --seed 1234
    --bf16 --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
if [[ -n "${EP:-}" ]]; then
    whole_numbers EP ETP
    FLAGS+=(--expert-model-parallel-size "$EP" --expert-tensor-parallel-size "$ETP")
fi
((TP == 1)) || FLAGS+=(--sequence-parallel)
FLAGS+=("$@")

# Flags, model.json, data.json, the number of processes and the layout of LOAD.
RANK=0 WORLD_SIZE=$WORLD python "$ENTRY" "${FLAGS[@]}" --check >/dev/null

train "$ENTRY" "${FLAGS[@]}"
figures
