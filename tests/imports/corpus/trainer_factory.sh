FORCE_TORCHRUN=1 NNODES=1 llamafactory-cli train factory_full.yaml cutoff_len=2048
