# Sourced by the conversion scripts of models without experts, which have said CONVERTER, NAME, MODEL_JSON, TP and PP. TARGET chooses:
#   megatron (default)  the layout TP and PP, with the layer lists of MODEL_JSON
#   fsdp2               DCP
# HF_DIR and MM_DIR name other folders; one MM_DIR holds one kind. Arguments go to mm-convert (--overwrite, --jobs 16).
# shellcheck shell=bash
set -euo pipefail

HF_DIR=${HF_DIR:-ckpt/hf_path/$NAME}
MM_DIR=${MM_DIR:-ckpt/mm_path/$NAME}
case "${TARGET:-megatron}" in
megatron)
    exec mm-convert "$CONVERTER" hf_to_mm \
        --cfg.hf_config.hf_dir "$HF_DIR" \
        --cfg.mm_dir "$MM_DIR" \
        --model "$MODEL_JSON" \
        --cfg.parallel_config.tp_size "$TP" \
        --pp "$PP" \
        "$@"
    ;;
fsdp2)
    exec mm-convert hf_to_dcp --hf "$HF_DIR" --out "$MM_DIR" "$@"
    ;;
*)
    echo "error: TARGET is '$TARGET', expected megatron or fsdp2" >&2
    exit 2
    ;;
esac
