#!/usr/bin/env bash
# Fine-tune GLM-4.5V on the Megatron target. Run it on every node; README.md lists the variables it reads.
# Arguments go to pretrain_vlm.py. Exit status: that of the training. Relative paths are relative to the caller's folder.

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
NPUS_PER_NODE=${NPUS_PER_NODE:-16}
NNODES=${NNODES:-8}
TP=${TP:-4}
PP=${PP:-8}
EP=${EP:-8}
ETP=${ETP:-1}
MODEL_JSON=${MODEL_JSON:-$HERE/model_106B.json}
LOAD=${LOAD:-ckpt/mm_path/GLM-4.5V}
# shellcheck source=../megatron.sh
source "$HERE/../megatron.sh"
