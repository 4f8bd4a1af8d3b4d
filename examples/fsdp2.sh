# Sourced by the launch scripts of the FSDP2 target: the YAML is judged before any process starts; then the training.
# The launch script has said NPUS_PER_NODE, NNODES and CONFIG. Its arguments override the YAML (training.train_iters=100).
# Relative paths are relative to the caller's folder.
# shellcheck shell=bash

EXAMPLES=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ENTRY=$(cd "$EXAMPLES/.." && pwd)/pretrain_fsdp2.py
# shellcheck source=launch.sh
source "$EXAMPLES/launch.sh"

# The YAML, the number of processes, the data's paths and what is loaded.
RANK=0 WORLD_SIZE=$WORLD python "$ENTRY" "$CONFIG" "$@" --check >/dev/null

train "$ENTRY" "$CONFIG" "$@"
figures
