deepspeed train.py --deepspeed deepspeed_auto.json --output_dir a --model_name_or_path meta-llama/Meta-Llama-3-8B
deepspeed train.py --deepspeed deepspeed_zero3.json --output_dir b --model_name_or_path meta-llama/Meta-Llama-3-8B
