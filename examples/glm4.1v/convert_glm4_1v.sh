#!/usr/bin/env bash
# Convert GLM-4.1V from Hugging Face format, for the Megatron target or, with TARGET=fsdp2, the other. ../convert.sh has the rest.

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=sizes.sh
source "$HERE/sizes.sh"
CONVERTER=GlmConverter
# shellcheck source=../convert.sh
source "$HERE/../convert.sh"
