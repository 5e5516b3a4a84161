# The words of 2021.
OPTS=" --num-layers 32 --hidden-size 3840 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048
  --micro-batch-size 1 --global-batch-size 32 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2
  --DDP-impl local --fp16 --activations-checkpoint-method uniform --vocab-file v.json --merge-file m.txt"
python -m torch.distributed.launch pretrain_gpt.py $OPTS
