megatron sft --model Qwen/Qwen3-4B --tensor_model_parallel_size 2 --packing true --max_length 4096
megatron export --mcore_model out/checkpoint --to_hf true --tensor_model_parallel_size 1
