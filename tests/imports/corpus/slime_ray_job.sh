pkill -9 sglang
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/counted.sh"
PERF=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 2
   --expert-model-parallel-size 4
   --expert-tensor-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 8192
)
for HOST in $(cat /root/hostfile); do
  ssh root@$HOST "ray start --address=$MASTER:6379 --num-gpus 8" &
done
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="{}" -- python3 train.py \
   --actor-num-nodes 1 --rollout-batch-size 32 --global-batch-size 256 ${MODEL_ARGS[@]} ${PERF[@]}
