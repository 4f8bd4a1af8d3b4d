#!/usr/bin/env bash
# Convert GLM-4.5V from Hugging Face format for finetune_glm4_5v_106B.sh. The layer lists are those of model_106B.json.
# From the environment: HF_DIR, MM_DIR, MODEL_JSON, TP, PP, EP, ETP. Arguments go to mm-convert (--overwrite, --jobs 16).
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
HF_DIR=${HF_DIR:-ckpt/hf_path/GLM-4.5V}
MM_DIR=${MM_DIR:-ckpt/mm_path/GLM-4.5V}
MODEL_JSON=${MODEL_JSON:-$HERE/model_106B.json}

exec mm-convert Glm4vMoeConverter hf_to_mm \
    --cfg.hf_config.hf_dir "$HF_DIR" \
    --cfg.mm_dir "$MM_DIR" \
    --model "$MODEL_JSON" \
    --cfg.parallel_config.tp_size "${TP:-4}" \
    --pp "${PP:-8}" \
    --cfg.parallel_config.ep_size "${EP:-8}" \
    --cfg.parallel_config.etp_size "${ETP:-1}" \
    "$@"
