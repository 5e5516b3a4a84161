ENV=$1
SIZE=$2
MBS=$3
GBS=$4
SEQ=$5
TP=$6
PP=$7
AC=$8
DO=${9}
EP=${10}
if [ $ENV = dsw ]; then
    NNODES=1
elif [ $ENV = dlc ]; then
    NNODES=${WORLD_SIZE}
fi
if [ $SIZE = 7B ]; then
    LAYERS=28; HIDDEN=3584; HEADS=28; FFN=18944; KV=4; tie=" --untie-embeddings-and-output-weights"
elif [ $SIZE = 0.5B ]; then
    LAYERS=24; HIDDEN=896; HEADS=14; FFN=4864; KV=2; tie=""
fi
if [ $AC = full ]; then
    ac_options=" --recompute-method uniform --recompute-num-layers 1 --recompute-granularity full"
elif [ $AC = sel ]; then
    ac_options=" --recompute-activations"
fi
[ $DO = true ] && do_options=" --use-distributed-optimizer" || do_options=""
OVERLAP=$(( ($TP > 1) ? 1 : 0 ))
if [ $OVERLAP -eq 1 ]; then
    comm=" --sequence-parallel"
fi
torchrun pretrain_qwen.py --micro-batch-size $MBS --global-batch-size $GBS --seq-length $SEQ --max-position-embeddings $SEQ \
  --num-layers $LAYERS --hidden-size $HIDDEN --num-attention-heads $HEADS --ffn-hidden-size $FFN --group-query-attention \
  --num-query-groups $KV --swiglu --normalization RMSNorm --position-embedding-type rope --add-qkv-bias --vocab-size 151936 --bf16 \
  --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP $tie $ac_options $do_options $comm
