#!/usr/bin/env bash
# Convert GLM-4.5V from Hugging Face format. TARGET chooses for which launch script:
#   megatron (default)  finetune_glm4_5v_106B.sh; reads MODEL_JSON, TP, PP, EP, ETP; the layer lists are those of model_106B.json
#   fsdp2               finetune_glm4_5v_106B_v1.sh; EXPERT_LAYOUT: stacked_hf (default), or stacked as MindSpeed-MM has it
# HF_DIR and MM_DIR come from the environment too. Arguments go to mm-convert (--overwrite, --jobs 16).
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
HF_DIR=${HF_DIR:-ckpt/hf_path/GLM-4.5V}

case "${TARGET:-megatron}" in
megatron)
    exec mm-convert Glm4vMoeConverter hf_to_mm \
        --cfg.hf_config.hf_dir "$HF_DIR" \
        --cfg.mm_dir "${MM_DIR:-ckpt/mm_path/GLM-4.5V}" \
        --model "${MODEL_JSON:-$HERE/model_106B.json}" \
        --cfg.parallel_config.tp_size "${TP:-4}" \
        --pp "${PP:-8}" \
        --cfg.parallel_config.ep_size "${EP:-8}" \
        --cfg.parallel_config.etp_size "${ETP:-1}" \
        "$@"
    ;;
fsdp2)
    exec mm-convert ExpertMergeDcpConverter hf_to_dcp \
        --hf_dir "$HF_DIR" \
        --save_dir "${MM_DIR:-ckpt/mm_path/GLM-4.5V}" \
        --dcp_prefix "" \
        --expert-layout "${EXPERT_LAYOUT:-stacked_hf}" \
        "$@"
    ;;
*)
    echo "error: TARGET is '$TARGET', expected megatron or fsdp2" >&2
    exit 2
    ;;
esac
