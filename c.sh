ARGS="--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --seq-length 4096 --micro-batch-size 1 --global-batch-size 16 --bf16 --hidden-dropout 0 --attention-dropout 0"
TP=1
if (( $(nvidia-smi -L | wc -l) > 4 )); then TP=2; fi
torchrun --nproc_per_node 8 pretrain_gpt.py $ARGS --tensor-model-parallel-size $TP
