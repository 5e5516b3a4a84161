#!/bin/bash
CHECKPOINT=$1
VOCAB=$2
MERGES=$3
DATA=$4
MODEL=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # flash, fused, unfused or local
)
TRAIN=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --fp16
    --init-method-std 0.006
)
PARALLEL=(
	--tensor-model-parallel-size 8
	--pipeline-model-parallel-size 16
)
DATA_ARGS=( --data-path $DATA --vocab-file $VOCAB --merge-file $MERGES )
torchrun --nproc_per_node 8 --nnodes ${NODES:-16} pretrain_gpt.py ${MODEL[@]} ${TRAIN[@]} ${PARALLEL[@]} ${DATA_ARGS[@]}
