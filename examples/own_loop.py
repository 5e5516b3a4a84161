"""A plan in a custom training loop.

    torchrun --nproc-per-node 2 examples/own_loop.py

Rank 0 plans a small Llama for two CPU processes; every rank then trains its part on random tokens.
"""

import os

import torch

import debubble as db

path = "runs/own_loop/plan.json"
if os.environ["RANK"] == "0":
    model, cluster = db.models["llama-tiny"], db.Cluster.parse("2xCPU")
    db.plan(model, cluster, planner="adapipe", micro_batches=4, sequence_length=64, dtype="fp32").save(path)

torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
pipeline = db.Pipeline(None, db.Plan.load(path))
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
for step in range(10):
    batch = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(step))  # the same on all ranks
    loss = pipeline.step(batch)
    pipeline.clip_grad_norm(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if torch.distributed.get_rank() == 0:
        print(f"step {step}: loss {loss:.3f}")
torch.distributed.destroy_process_group()
