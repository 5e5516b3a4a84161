deepspeed pretrain_gpt.py --deepspeed --zero-stage 1 --no-pipeline-parallel --tensor-model-parallel-size 2 --num-layers 32 \
  --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 \
  --num-experts 8 --topk 2 --moe-expert-parallel-size 4 --expert-interval 1 --mlp-type $MLP --moe-loss-coeff 0.01
