EP=1
EP_ARGS="--num-experts ${EP} --moe-expert-parallel-size ${EP} --mlp-type residual --topk 1 --moe-loss-coeff 0.01"
deepspeed pretrain_gpt.py --deepspeed --zero-stage 1 --no-pipeline-parallel --num-layers 24 --hidden-size 2048 \
  --num-attention-heads 16 --seq-length 2048 --vocab-size 50304 --micro-batch-size 1 --global-batch-size 64 --fp16 $EP_ARGS
