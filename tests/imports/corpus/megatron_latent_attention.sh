torchrun pretrain_gpt.py --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear --seq-length 4096 --max-position-embeddings 4096 --vocab-size 129280 --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer --multi-latent-attention --qk-layernorm \
  --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 \
  --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816 \
  --moe-layer-freq "([0]*3+[1]*13)" --moe-token-dispatcher-type alltoall \
  --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
