deepspeed --num_gpus=8 run_clm.py --deepspeed=deepspeed_auto.json --model_name_or_path $MODEL --block_size 1024 --fp16 \
  --do_train --output_dir out
