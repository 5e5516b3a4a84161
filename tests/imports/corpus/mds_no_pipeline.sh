config_json="ds.json"
ZERO_STAGE=3
cat <<EOT > $config_json
{ "zero_optimization": { "stage": $ZERO_STAGE }, "fp16": { "enabled": true } }
EOT
NUM_GPUS=$((8 * 2))
GLOBAL=$(( NUM_GPUS * 4 ))
deepspeed --hostfile hosts pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size $GLOBAL --fp16 --vocab-file v --merge-file m \
  --no-pipeline-parallel --pipeline-model-parallel-size 2 --deepspeed --deepspeed_config $config_json --zero-stage $ZERO_STAGE --checkpoint-activations
