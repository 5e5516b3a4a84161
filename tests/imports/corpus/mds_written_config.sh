STAGE=${STAGE:-2}
DS=/tmp/ds_$STAGE.json
cat <<EOT > $DS
{ "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10,
  "zero_optimization": { "stage": $STAGE, "offload_optimizer": { "device": "cpu" } }, "bf16": { "enabled": true } }
EOT
DS_ARGS="--deepspeed --deepspeed_config $DS --no-pipeline-parallel"
deepspeed pretrain_gpt.py $DS_ARGS --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 \
  --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 --bf16 --vocab-size 50304
