"""A plan in a training loop of Hugging Face's accelerate, which prepares the optimizer and its learning rate schedule.

    pip install accelerate
    accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py

Neither the model nor the data is prepared: ranks have parts of one model already, and all see the same batch.
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import debubble as db

accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
path = "runs/accelerate_loop/plan.json"
if accelerator.is_main_process:
    model, cluster = db.models["llama-tiny"], db.Cluster.parse("2xCPU")
    db.plan(model, cluster, planner="portfolio", micro_batches=4, sequence_length=128, dtype="fp32").save(path)
accelerator.wait_for_everyone()

pipeline = db.Pipeline(None, db.Plan.load(path))
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=10)
optimizer, schedule = accelerator.prepare(optimizer, schedule)

texts = TensorDataset(torch.randint(256, (40, 129), generator=torch.Generator().manual_seed(0)))
same_order = torch.Generator().manual_seed(1)
for step, (batch,) in enumerate(DataLoader(texts, batch_size=4, shuffle=True, generator=same_order)):
    loss = pipeline.step(batch)
    pipeline.clip_grad_norm(1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step}: loss {loss:.3f}")
accelerator.end_training()
