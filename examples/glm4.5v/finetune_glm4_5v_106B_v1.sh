#!/usr/bin/env bash
# Fine-tune GLM-4.5V on the FSDP2 target. Run it on every node; README.md lists the variables it reads.
# Arguments override the YAML (training.train_iters=100). Exit status: that of the training. Relative paths are relative to the caller's folder.

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ENTRY=$(cd "$HERE/../.." && pwd)/pretrain_fsdp2.py
# shellcheck source=launch.sh
source "$HERE/launch.sh"
CONFIG=${CONFIG:-$HERE/glm4_5v_106B_config_v1.yaml}

# The YAML, the number of processes, the data's paths and what is loaded are judged together before any process starts.
RANK=0 WORLD_SIZE=$WORLD python "$ENTRY" "$CONFIG" "$@" --check >/dev/null

train "$ENTRY" "$CONFIG" "$@"
figures
