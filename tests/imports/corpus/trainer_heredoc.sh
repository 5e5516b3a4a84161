export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
MODEL="meta-llama/Meta-Llama-3-8B"
ZERO=3
usage() { echo "usage: $0 [-m model]"; }
while [[ "$1" != "" ]]; do
  case $1 in
    -m | --model ) shift; MODEL=$1 ;;
    -h | --help ) usage; exit 0 ;;
    * ) echo "what is $1"; exit 1 ;;
  esac
  shift
done
cat > ds_zero.json <<EOF
{ "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": { "enabled": "auto" },
  "zero_optimization": { "stage": ${ZERO}, "offload_optimizer": { "device": "none" } } }
EOF
for seed in $(seq 1 $RUNS); do
  torchrun --nproc_per_node 8 --master_port 6001 finetune.py --model_name_or_path $MODEL --data_path data.json \
    --bf16 True --output_dir out_$seed --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --seed $seed \
    --learning_rate 1e-5 --model_max_length 4096 --gradient_checkpointing --deepspeed ds_zero.json
done
