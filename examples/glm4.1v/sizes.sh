# Sourced by the scripts of the Megatron target here, which have said HERE: the topology of model_9b.json, and the folder's name.
# shellcheck shell=bash
NPUS_PER_NODE=${NPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
TP=${TP:-1}
PP=${PP:-4}
MODEL_JSON=${MODEL_JSON:-$HERE/model_9b.json}
NAME=GLM-4.1V-9B-Thinking
