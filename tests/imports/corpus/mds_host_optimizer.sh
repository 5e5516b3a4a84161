deepspeed pretrain_gpt.py --deepspeed --zero-stage 1 --no-pipeline-parallel --cpu-optimizer \
  --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 \
  --vocab-size 32000 --micro-batch-size 1 --global-batch-size 32 --fp16
