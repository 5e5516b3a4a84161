# What is left to ms-swift: the batch, the recomputation, the dtype, the optimizer's shards.
export NPROC_PER_NODE=8
DATA=(--dataset our/answers --split_dataset_ratio 0.02 --load_from_cache_file true)
megatron sft --model Qwen/Qwen3-8B "${DATA[@]}" \
    --tensor_model_parallel_size 2 \
    --sequence_parallel true \
    --max_length 4096 \
    --packing true \
    --lr 2e-5 --save_steps 50 --finetune
