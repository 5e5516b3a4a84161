NPROC_PER_NODE=8 megatron sft \
    --model /models/Qwen2.5-14B-Instruct --tuner_type lora --target_modules all-linear --lora_alpha 16 \
    --tensor_model_parallel_size 4 --sequence_parallel yes \
    --micro_batch_size 2 --global_batch_size 32 --max_length 2048 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1
