torchrun --nproc_per_node 8 pretrain_gpt.py \
  --num-layers 32 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 \
  --vocab-size 51200 --micro-batch-size 1 --global-batch-size 24 --fp16 --pipeline-model-parallel-size 8 \
  --untie-embeddings-and-output-weights --use-flash-attn --enable-zb-runtime \
  --enable-zero-bubble --zero-bubble-v-schedule --zero-bubble-max-pending-backward auto
