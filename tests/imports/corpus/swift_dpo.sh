NPROC_PER_NODE=8 megatron rlhf --rlhf_type dpo --beta 0.2 --model Qwen/Qwen3-4B --tensor_model_parallel_size 4 \
    --micro_batch_size 1 --global_batch_size 8 --max_length 8192 --packing true
