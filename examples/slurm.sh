#!/usr/bin/env bash
# Trains a plan on SLURM: sbatch examples/slurm.sh plan.json
# One launcher per node; torchrun starts a rank for each GPU, and restarts them from the newest checkpoint.
#SBATCH --job-name=debubble
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --requeue
set -euo pipefail

plan=${1:?give the plan file}
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --max-restarts 3 \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head_node:29500" \
    -m debubble train "$plan" --data my-text/ --checkpoint checkpoints --auto-resume
