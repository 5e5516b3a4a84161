torchrun --nproc_per_node 8 pretrain_gpt.py --yaml-cfg examples/gpt3/megatron_config.yaml --micro-batch-size 16
