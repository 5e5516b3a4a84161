"""A plan in a training loop of Lightning Fabric, which launches the ranks and prepares the optimizer.

    pip install lightning-fabric
    python examples/lightning_loop.py

Neither the model nor the data is set up: ranks have parts of one model already, and all see the same batch.
"""

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

import debubble as db

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
path = "runs/lightning_loop/plan.json"
if fabric.is_global_zero:
    model, cluster = db.models["llama-tiny"], db.Cluster.parse("2xCPU")
    db.plan(model, cluster, planner="portfolio", micro_batches=4, sequence_length=128, dtype="fp32").save(path)
fabric.barrier()

pipeline = db.Pipeline(None, db.Plan.load(path))
optimizer = fabric.setup_optimizers(torch.optim.AdamW(pipeline.parameters(), lr=1e-3))

texts = TensorDataset(torch.randint(256, (40, 129), generator=torch.Generator().manual_seed(0)))
same_order = torch.Generator().manual_seed(1)
for step, (batch,) in enumerate(DataLoader(texts, batch_size=4, shuffle=True, generator=same_order)):
    loss = pipeline.step(batch)
    pipeline.clip_grad_norm(1.0)
    optimizer.step()
    optimizer.zero_grad()
    fabric.print(f"step {step}: loss {loss:.3f}")
