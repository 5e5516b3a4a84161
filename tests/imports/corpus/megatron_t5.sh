torchrun pretrain_t5.py --encoder-num-layers 12 --hidden-size 768 --num-attention-heads 12 --micro-batch-size 1 --global-batch-size 16 --bf16
