megatron sft --model Qwen/Qwen3-14B-FP8 --fp8_format e4m3 --fp8_recipe mxfp8 --tensor_model_parallel_size 4 \
    --sequence_parallel --use_precision_aware_optimizer --exp_avg_dtype bf16 --exp_avg_sq_dtype bf16 \
    --recompute_granularity selective --recompute_modules mlp core_attn --packing true --max_length 8192
