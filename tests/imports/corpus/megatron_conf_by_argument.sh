HERE=$(dirname "$(readlink -f "$0")")
TOKENIZER=${TOKENIZER:-meta-llama/Llama-3.1-8B-Instruct}
source "$HERE/conf/${1}.sh"
if [ -z ${SAVE} ]; then
    printf "set SAVE\n"
    exit 1
fi
torchrun train.py $MODEL_ARGS --tensor-model-parallel-size ${TP:-1} --pipeline-model-parallel-size $PP --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer
