# Sourced by megatron.sh and fsdp2.sh: CANN's environment, the nodes, and a training whose status and figures are the script's own.
# The launch script has said NPUS_PER_NODE and NNODES.
# shellcheck shell=bash

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

fail() { echo "error: $*" >&2; exit 2; }

whole_numbers() { # every named variable is a whole number of at least 1
    local name
    for name in "$@"; do
        [[ "${!name}" =~ ^[1-9][0-9]*$ ]] || fail "$name is '${!name}', expected a whole number of at least 1"
    done
}

MASTER_PORT=${MASTER_PORT:-6000}
whole_numbers NPUS_PER_NODE NNODES MASTER_PORT
WORLD=$((NPUS_PER_NODE * NNODES))
if ((NNODES > 1)); then
    MASTER_ADDR=${MASTER_ADDR:?set it to the address of node 0 (NNODES is $NNODES; a single node needs NNODES=1 only)}
    NODE_RANK=${NODE_RANK:?set it to the number of this node, 0 to $((NNODES - 1))}
    [[ "$NODE_RANK" =~ ^[0-9]+$ ]] && ((NODE_RANK < NNODES)) || fail "NODE_RANK is '$NODE_RANK', expected 0 to $((NNODES - 1))"
    LAUNCH=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
else
    LAUNCH=(--standalone)
fi

train() { # ENTRY ARGUMENTS...: torchrun on this node, output to the screen and to LOG; exits with the training's status unless it is 0
    mkdir -p logs
    LOG=logs/train_$(date +%Y%m%d_%H%M%S).log
    local scratch status=0
    scratch=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$scratch'" EXIT
    mkfifo "$scratch/output"
    tee "$LOG" <"$scratch/output" &
    local tee=$!
    torchrun "${LAUNCH[@]}" --nproc-per-node "$NPUS_PER_NODE" "$@" >"$scratch/output" 2>&1 &
    TRAINING=$!
    # A signal to the script stops the training, which saves at the end of its step. `wait` returns early on a signal, hence the loop.
    trap 'kill -TERM "$TRAINING" 2>/dev/null || true' TERM INT
    wait "$TRAINING" || status=$?
    while kill -0 "$TRAINING" 2>/dev/null; do
        wait "$TRAINING" || status=$?
    done
    wait "$tee" || true
    if ((status != 0)); then
        echo "error: training failed with status $status; see $LOG" >&2
        exit "$status"
    fi
}

figures() { # the field's two closing lines, on the node whose log has iterations: the mean of lines 101 to 200, of the last 100 in a shorter run
    local step_time batch
    step_time=$(awk -F 'elapsed time per iteration [(]ms[)]:' '
        NF > 1 && n < 200 { split($2, field, "|"); time[++n] = field[1] }
        END { first = n > 100 ? n - 99 : 1; for (i = first; i <= n; i++) sum += time[i]; if (n) printf "%.1f", sum / (n - first + 1) }
    ' "$LOG")
    batch=$(awk -F 'global batch size:' 'NF > 1 { split($2, field, "|"); print field[1] + 0; exit }' "$LOG")
    if [[ -n "$step_time" && -n "$batch" ]]; then
        echo "Elapsed Time Per iteration (ms): $step_time" | tee -a "$LOG"
        echo "Average Samples per Second: $(awk "BEGIN { printf \"%.3f\", $batch * 1000 / $step_time }")" | tee -a "$LOG"
    fi
}
