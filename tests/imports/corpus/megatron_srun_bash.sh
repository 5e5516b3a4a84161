LAUNCHER="python -m torch.distributed.run --nproc_per_node 8 --nnodes $SLURM_NNODES"
CMD="pretrain_gpt.py --pp-partition-method 'type:transformer|embedding' --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --position-embedding-type alibi --micro-batch-size 2 \
  --global-batch-size 512 --bf16 --pad-vocab-size-to 250880 --checkpoint-activations --pipeline-model-parallel-size 2 --deepspeed --zero-stage 0"
srun --jobid $SLURM_JOBID bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee -a log.txt
