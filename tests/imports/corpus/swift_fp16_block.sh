megatron sft --model Qwen/Qwen2.5-7B --torch_dtype float16 --use_distributed_optimizer false \
    --pipeline_model_parallel_size 4 --recompute_granularity full --recompute_method block --recompute_num_layers 3 \
    --max_length 4096 --packing true --global_batch_size 64
