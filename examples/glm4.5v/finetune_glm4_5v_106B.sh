#!/usr/bin/env bash
# Fine-tune GLM-4.5V on the Megatron target. Run it on every node; README.md lists the variables it reads.
# Arguments go to pretrain_vlm.py. Exit status: that of the training. Relative paths are relative to the caller's folder.

# CANN's own script does not survive strict mode, so it comes first; without CANN (GPU, CPU) there is nothing to source.
CANN_ENV="${ASCEND_HOME:-/usr/local/Ascend/ascend-toolkit}/set_env.sh"
if [[ -n "${ASCEND_HOME:-}" || -f "$CANN_ENV" ]]; then
    # shellcheck disable=SC1090
    source "$CANN_ENV" || { echo "error: $CANN_ENV failed; set ASCEND_HOME to the folder of CANN's set_env.sh" >&2; exit 1; }
    export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-1200}
    export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}
    export MULTI_STREAM_MEMORY_REUSE=${MULTI_STREAM_MEMORY_REUSE:-2}
    export TASK_QUEUE_ENABLE=${TASK_QUEUE_ENABLE:-1}
    export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}
fi
set -euo pipefail
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ENTRY=$(cd "$HERE/../.." && pwd)/pretrain_vlm.py

# Nodes
NPUS_PER_NODE=${NPUS_PER_NODE:-16}
NNODES=${NNODES:-8}
MASTER_PORT=${MASTER_PORT:-6000}

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

fail() { echo "error: $*" >&2; exit 2; }

for name in NPUS_PER_NODE NNODES MASTER_PORT TP PP EP ETP MBS GRAD_ACC_STEP TRAIN_ITERS SAVE_INTERVAL TIMEOUT_MINUTES; do
    [[ "${!name}" =~ ^[1-9][0-9]*$ ]] || fail "$name is '${!name}', expected a whole number of at least 1"
done
WORLD=$((NPUS_PER_NODE * NNODES))
((WORLD % (TP * PP) == 0)) || fail "NPUS_PER_NODE x NNODES = $WORLD processes do not divide by TP x PP = $TP x $PP = $((TP * PP))"
DP=$((WORLD / (TP * PP)))
GBS=$((MBS * GRAD_ACC_STEP * DP))

if ((NNODES > 1)); then
    MASTER_ADDR=${MASTER_ADDR:?set it to the address of node 0 (NNODES is $NNODES; a single node needs NNODES=1 only)}
    NODE_RANK=${NODE_RANK:?set it to the number of this node, 0 to $((NNODES - 1))}
    [[ "$NODE_RANK" =~ ^[0-9]+$ ]] && ((NODE_RANK < NNODES)) || fail "NODE_RANK is '$NODE_RANK', expected 0 to $((NNODES - 1))"
    LAUNCH=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
else
    LAUNCH=(--standalone)
fi

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

mkdir -p logs
LOG=logs/train_$(date +%Y%m%d_%H%M%S).log
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
mkfifo "$SCRATCH/output"
tee "$LOG" <"$SCRATCH/output" &
TEE=$!
torchrun "${LAUNCH[@]}" --nproc-per-node "$NPUS_PER_NODE" "$ENTRY" "${FLAGS[@]}" >"$SCRATCH/output" 2>&1 &
TRAINING=$!
# A signal to this script stops the training, which saves at the end of its step. `wait` returns early on a signal, hence the loop.
trap 'kill -TERM "$TRAINING" 2>/dev/null || true' TERM INT
STATUS=0
wait "$TRAINING" || STATUS=$?
while kill -0 "$TRAINING" 2>/dev/null; do
    wait "$TRAINING" || STATUS=$?
done
wait "$TEE" || true
if ((STATUS != 0)); then
    echo "error: training failed with status $STATUS; see $LOG" >&2
    exit "$STATUS"
fi

# The node with the last pipeline stage has the iteration lines. The figure is the field's: the mean of lines 101 to 200; of the
# last 100 there are in a shorter run.
STEP_TIME=$(awk -F 'elapsed time per iteration [(]ms[)]:' '
    NF > 1 && n < 200 { split($2, field, "|"); time[++n] = field[1] }
    END { first = n > 100 ? n - 99 : 1; for (i = first; i <= n; i++) sum += time[i]; if (n) printf "%.1f", sum / (n - first + 1) }
' "$LOG")
if [[ -n "$STEP_TIME" ]]; then
    echo "Elapsed Time Per iteration (ms): $STEP_TIME" | tee -a "$LOG"
    echo "Average Samples per Second: $(awk "BEGIN { printf \"%.3f\", $GBS * 1000 / $STEP_TIME }")" | tee -a "$LOG"
fi
