ACCELERATE_LOG_LEVEL=info accelerate launch --config_file accelerate_zero3.yaml --num_processes=8 \
  scripts/run_sft.py factory_less.yaml --per_device_train_batch_size=4
