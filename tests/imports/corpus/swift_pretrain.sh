torchrun --nproc_per_node 8 swift/cli/_megatron/pt.py \
    --model meta-llama/Meta-Llama-3-8B --dataset our/books --streaming true \
    --packing true --max_length 2048 --packing_length 16384 \
    --context_parallel_size 2 --pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 4 \
    --global_batch_size 32 --train_iters 5000 --lr_warmup_iters 100
