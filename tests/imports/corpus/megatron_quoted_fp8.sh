DTYPE=${DTYPE:-fp8}
MODEL_ARGS=( --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear --seq-length 4096 --max-position-embeddings 4096 --vocab-size 128256 )
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-param-gather"
    )
fi
RUN=( --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer "--tensor-model-parallel-size 2" "--sequence-parallel" )
torchrun pretrain_gpt.py ${MODEL_ARGS[@]} ${DTYPE_ARGS[@]} ${RUN[@]}
