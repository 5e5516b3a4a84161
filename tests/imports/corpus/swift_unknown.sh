megatron pt --model our/Gigantic-9T --max_length 4096 --packing true --tensor_model_parallel_size 8
