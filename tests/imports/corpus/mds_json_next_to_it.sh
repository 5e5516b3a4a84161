deepspeed pretrain_gpt.py --deepspeed --deepspeed_config deepspeed_bf16.json --pipeline-model-parallel-size 4 \
  --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \
  --micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-size 50304
