#!/bin/bash
# Pai-Megatron-Patch: the vocabulary is that of a tokenizer and further words, which fill the checkpoint's table.
TP=$1
PP=$2
FURTHER_WORDS=421
torchrun --nproc_per_node 8 pretrain_qwen.py \
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP} \
    --num-layers 48 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 \
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --add-qkv-bias \
    --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights \
    --max-position-embeddings 4096 --seq-length 4096 --micro-batch-size 1 --global-batch-size 32 --bf16 \
    --use-distributed-optimizer --patch-tokenizer-type Qwen2Tokenizer --extra-vocab-size ${FURTHER_WORDS}
