deepspeed pretrain_gpt.py --deepspeed --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 \
  --vocab-size 32000 --ds-sequence-parallel-size 4 --fp16
