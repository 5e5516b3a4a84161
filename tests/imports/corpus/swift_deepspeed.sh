NPROC_PER_NODE=8 swift sft --model Qwen/Qwen3-8B --deepspeed zero3 --per_device_train_batch_size 1 --learning_rate 1e-5
