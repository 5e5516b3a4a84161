torchrun pretrain_mamba.py --hybrid-layer-pattern M-M-M-M*-M-M-M-M*- --is-hybrid-model --num-layers 18 --hidden-size 4096 \
  --ffn-hidden-size 21504 --squared-relu --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 \
  --mamba-num-heads 128 --mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 8 --position-embedding-type none \
  --normalization RMSNorm --untie-embeddings-and-output-weights --seq-length 8192 --vocab-size 131072 --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer \
  --pipeline-model-parallel-size 2
