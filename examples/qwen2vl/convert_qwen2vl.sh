#!/usr/bin/env bash
# Convert Qwen2-VL from Hugging Face format, for the Megatron target or, with TARGET=fsdp2, the other. ../convert.sh has the rest.

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
SIZE=${SIZE:-7b} # or 2b, 72b
# shellcheck source=sizes.sh
source "$HERE/sizes.sh"
CONVERTER=Qwen2VLConverter
# shellcheck source=../convert.sh
source "$HERE/../convert.sh"
