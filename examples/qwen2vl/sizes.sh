# Sourced by the scripts of the Megatron target here, which have said HERE and SIZE: the topology of that size's model.json, and its folder.
# shellcheck shell=bash
case "$SIZE" in
2b) devices=4 nodes=1 tp=1 pp=1 ;;
7b) devices=8 nodes=1 tp=1 pp=4 ;;
72b) devices=8 nodes=4 tp=4 pp=8 ;;
*)
    echo "error: SIZE is '$SIZE', expected 2b, 7b or 72b" >&2
    exit 2
    ;;
esac
NPUS_PER_NODE=${NPUS_PER_NODE:-$devices}
NNODES=${NNODES:-$nodes}
TP=${TP:-$tp}
PP=${PP:-$pp}
MODEL_JSON=${MODEL_JSON:-$HERE/model_$SIZE.json}
NAME=Qwen2-VL-${SIZE^^}-Instruct
