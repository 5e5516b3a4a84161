ENV=$1
MODEL_SIZE=$2
TP=${3}
PP=${4:-1}
if [ $MODEL_SIZE = 7B ]; then
  MODEL="--num-layers 32 --hidden-size 4096 --num-attention-heads 32"
elif [ $MODEL_SIZE = 13B ]; then
  MODEL="--num-layers 40 --hidden-size 5120 --num-attention-heads 40"
fi
torchrun --nproc_per_node 8 pretrain_gpt.py $MODEL --vocab-size 32000 --seq-length 4096 --micro-batch-size 1 \
  --global-batch-size 16 --bf16 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope \
  --untie-embeddings-and-output-weights --use-flash-attn \
  --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP
