# Experts are divided by no tensor-parallel rank unless the script says so; the last stage has fewer layers.
PARALLEL="--tensor_model_parallel_size 2 --expert_model_parallel_size 4 --pipeline_model_parallel_size 2"
NNODES=2 NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B-Instruct-2507 $PARALLEL \
    --decoder_last_pipeline_num_layers 22 --sequence_parallel true --moe_permute_fusion true \
    --recompute_granularity none --optimizer_cpu_offload true --optimizer_offload_fraction 0.5 \
    --use_precision_aware_optimizer true --global_batch_size 64 --packing true --max_length 8192
