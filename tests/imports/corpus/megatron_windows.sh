torchrun pretrain_gpt.py --num-layers 24 --hidden-size 2880 --num-attention-heads 64 --group-query-attention --num-query-groups 8 \
  --kv-channels 64 --quick-geglu --normalization RMSNorm --position-embedding-type yarn --untie-embeddings-and-output-weights \
  --seq-length 4096 --max-position-embeddings 4096 --vocab-size 201088 --softmax-type learnable --window-size 128,0 \
  --window-attn-skip-freq 2 --num-experts 32 --moe-router-topk 4 --ffn-hidden-size 2880 --moe-token-dispatcher-type alltoall \
  --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2 --expert-model-parallel-size 4
