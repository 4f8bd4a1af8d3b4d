#!/usr/bin/env bash
# Fine-tune Qwen2.5-VL-7B on the FSDP2 target. Run it on every node; README.md lists the variables it reads.
# Arguments override the YAML (training.train_iters=100). Exit status: that of the training. Relative paths are relative to the caller's folder.

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NPUS_PER_NODE=${NPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
CONFIG=${CONFIG:-$HERE/qwen2_5vl_7b_config.yaml}
# shellcheck source=../fsdp2.sh
source "$HERE/../fsdp2.sh"
