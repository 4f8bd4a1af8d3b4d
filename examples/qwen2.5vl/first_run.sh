#!/usr/bin/env bash
# The whole way once, small, on two CPU processes: a model of the 3B's proportions, photographs, 20 steps.
# Convert, load, train, save; then export, and the proof that no byte was lost. Everything goes to WORK (build/first_run), which must not exist.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORK=${WORK:-build/first_run}
STEPS=20
[[ ! -e "$WORK" ]] || { echo "error: $WORK exists; remove it, or set WORK to another folder" >&2; exit 2; }
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

python "$HERE/../quickstart/make_checkpoint.py" --family qwen2_5_vl --dtype bf16 --out "$WORK/hf"
python "$HERE/../quickstart/make_data.py" --template qwen2vl --checkpoint "$WORK/hf" --out "$WORK/data"

# Convert, to the layout that the 7B has: two stages, the whole vision tower and the fewer decoder layers on the first.
mm-models init --hf "$WORK/hf" --pp 2 --vit-pp-layers '[4,0]' --llm-pp-layers '[1,3]' -o "$WORK/model.json"
export TP=1 PP=2 MODEL_JSON=$WORK/model.json
HF_DIR=$WORK/hf MM_DIR=$WORK/mm bash "$HERE/convert_qwen2_5_vl.sh"
mm-convert mm_to_hf --mm "$WORK/mm" --hf "$WORK/hf" --out "$WORK/hf_again"
diff -r -x mm_export.json "$WORK/hf" "$WORK/hf_again" # but for the note that says who wrote it

# Load, train, save.
NPUS_PER_NODE=2 NNODES=1 MBS=1 GRAD_ACC_STEP=2 TRAIN_ITERS=$STEPS DATA_JSON=$WORK/data/data.json LOAD=$WORK/mm SAVE=$WORK/run \
    bash "$HERE/finetune_qwen2_5_vl_3b.sh" --log-metrics "$WORK/metrics.jsonl"
python - "$WORK/metrics.jsonl" "$STEPS" <<'CHECK'
import json, math, sys

steps = [json.loads(line) for line in open(sys.argv[1])]
assert [step["iteration"] for step in steps] == list(range(1, int(sys.argv[2]) + 1)), "an iteration has no line"
assert all(math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"]) for step in steps), "a loss or norm is not finite"
assert not any(step["skipped"] or step["nans"] for step in steps), "an iteration was skipped"
CHECK

# Export.
mm-convert mm_to_hf --mm "$WORK/run" --hf "$WORK/hf" --out "$WORK/hf_trained"
mm-convert check "$WORK/run" "$WORK/hf_trained"
echo "first run: converted, loaded, trained $STEPS steps, saved and exported; every byte is where it belongs"
