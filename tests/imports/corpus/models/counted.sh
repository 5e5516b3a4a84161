LAYERS=16
DENSE=1
list=()
for ((i=0; i<LAYERS; i++)); do
  if (( i < DENSE )); then
    list+=(0)
  else
    list+=(1)
  fi
done
printf -v FREQ "[%s]" "$(IFS=', '; echo "${list[*]}")"
MODEL_ARGS=( --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear --vocab-size 129280 --qk-layernorm --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 1024
  --moe-layer-freq $FREQ --moe-token-dispatcher-type alltoall )
