DENSE=1
SPARSE=15
ARGS=(
  --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear --seq-length 4096 --max-position-embeddings 4096 --vocab-size 129280 --qk-layernorm --add-qkv-bias --group-query-attention --num-query-groups 8 --kv-channels 128
  --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 1024
  --moe-layer-freq [0]*$DENSE+[1]*$SPARSE --moe-token-dispatcher-type alltoall
)
torchrun pretrain_gpt.py ${ARGS[@]} --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer --expert-model-parallel-size 4 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
