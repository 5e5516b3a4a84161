TP=${TP:-1}
PP=${PP:-4}
EXPERTS=( --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall )
PARALLEL=( --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --expert-model-parallel-size 8 )
LOGGING=( --log-interval 1 )
if [ -n "${WANDB_API_KEY}" ]; then
    LOGGING+=( --wandb-project mine --wandb-exp-name run )
fi
torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer "${EXPERTS[@]}" "${PARALLEL[@]}" "${LOGGING[@]}"
