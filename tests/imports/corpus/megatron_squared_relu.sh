torchrun pretrain_gpt.py --num-layers 32 --hidden-size 3072 --ffn-hidden-size 9216 --num-attention-heads 24 --kv-channels 128 \
  --group-query-attention --num-query-groups 8 --squared-relu --normalization LayerNorm --apply-layernorm-1p --position-embedding-type rope \
  --untie-embeddings-and-output-weights --disable-bias-linear --seq-length 4096 --vocab-size 256000 --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer
