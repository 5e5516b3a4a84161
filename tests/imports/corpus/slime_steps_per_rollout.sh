#!/bin/bash
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/counted.sh"
ROLLOUT=(
   --rollout-batch-size 64
   --n-samples-per-prompt 8
   --num-steps-per-rollout 4
)
ray job submit -- python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 --seq-length 4096 \
   --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 ${MODEL_ARGS[@]} ${ROLLOUT[@]}
