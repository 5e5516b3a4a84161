#!/bin/bash
# A Megatron-LM job as people write it: `debubble import megatron` reads it, and never runs it.
PP=8
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --vocab-size 128256 --position-embedding-type rope --max-position-embeddings 8192
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size $PP
    --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
torchrun --nproc_per_node 8 pretrain_gpt.py "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" \
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 32 --bf16 \
    --lr 3.0e-4 --train-iters ${ITERATIONS:-100000} --data-path "$DATA"
