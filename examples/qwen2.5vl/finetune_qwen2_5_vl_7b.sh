#!/usr/bin/env bash
# Fine-tune Qwen2.5-VL-7B on the Megatron target. Run it on every node; README.md lists the variables it reads.
# Arguments go to pretrain_vlm.py. Exit status: that of the training. Relative paths are relative to the caller's folder.

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
SIZE=7b
# shellcheck source=sizes.sh
source "$HERE/sizes.sh"
LOAD=${LOAD:-ckpt/mm_path/$NAME}
# shellcheck source=../megatron.sh
source "$HERE/../megatron.sh"
