#!/bin/bash
# Experts in every second layer, next to an expert for all tokens, and dense layers of another width between them.
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 \
    --num-attention-heads 16 --group-query-attention --num-query-groups 8 --kv-channels 128 --swiglu \
    --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights \
    --disable-bias-linear --max-position-embeddings 4096 --vocab-size 202048 --num-experts 8 --moe-router-topk 1 \
    --moe-layer-freq 2 --moe-ffn-hidden-size 4096 --moe-shared-expert-intermediate-size 4096 \
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --expert-model-parallel-size 4 --bf16 \
    --use-distributed-optimizer
