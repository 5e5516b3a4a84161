PP=1
while [[ $# -gt 0 ]]; do
  case $1 in
    --pp) PP=$2; shift 2;;
    --vocab) VOCAB=$2; shift; shift;;
    *) shift;;
  esac
done
torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer --vocab-size $VOCAB --pipeline-model-parallel-size $PP
