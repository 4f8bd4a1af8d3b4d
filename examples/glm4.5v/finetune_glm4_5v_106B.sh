#!/usr/bin/env bash
# Fine-tune GLM-4.5V on the Megatron target. Run it on every node; README.md lists the variables it reads.
# Arguments go to pretrain_vlm.py. Exit status: that of the training. Relative paths are relative to the caller's folder.

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ENTRY=$(cd "$HERE/../.." && pwd)/pretrain_vlm.py
# shellcheck source=launch.sh
source "$HERE/launch.sh"

# Topology and batch
TP=${TP:-4}
PP=${PP:-8}
EP=${EP:-8}
ETP=${ETP:-1}
MBS=${MBS:-1}
GRAD_ACC_STEP=${GRAD_ACC_STEP:-16}

# Files and length of the run
MODEL_JSON=${MODEL_JSON:-$HERE/model_106B.json}
DATA_JSON=${DATA_JSON:-$HERE/data.json}
LOAD=${LOAD:-ckpt/mm_path/GLM-4.5V}
SAVE=${SAVE:-save_dir}
TRAIN_ITERS=${TRAIN_ITERS:-10000}
SAVE_INTERVAL=${SAVE_INTERVAL:-1000}
TIMEOUT_MINUTES=${TIMEOUT_MINUTES:-30}

whole_numbers TP PP EP ETP MBS GRAD_ACC_STEP TRAIN_ITERS SAVE_INTERVAL TIMEOUT_MINUTES
((WORLD % (TP * PP) == 0)) || fail "NPUS_PER_NODE x NNODES = $WORLD processes do not divide by TP x PP = $TP x $PP = $((TP * PP))"
DP=$((WORLD / (TP * PP)))
GBS=$((MBS * GRAD_ACC_STEP * DP))

FLAGS=(
    --mm-model "$MODEL_JSON" --mm-data "$DATA_JSON" --load "$LOAD" --save "$SAVE"
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size "$ETP"
    --micro-batch-size "$MBS" --global-batch-size "$GBS"
    --train-iters "$TRAIN_ITERS" --save-interval "$SAVE_INTERVAL" --distributed-timeout-minutes "$TIMEOUT_MINUTES"
    --lr 1e-5 --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0 --clip-grad 1.0 --seed 1234
    --bf16 --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
((TP == 1)) || FLAGS+=(--sequence-parallel)
FLAGS+=("$@")

# Flags, model.json, data.json, the number of processes and the layout of LOAD are judged together before any process starts.
RANK=0 WORLD_SIZE=$WORLD python "$ENTRY" "${FLAGS[@]}" --check >/dev/null

train "$ENTRY" "${FLAGS[@]}"
figures
