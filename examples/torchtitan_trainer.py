"""A plan in torchtitan's own trainer, which is given another `pipelining_fn`, and a model that is torchtitan's.

    pip install torchtitan==0.3.0 triton
    torchrun --standalone --nproc-per-node 2 examples/torchtitan_trainer.py

torchtitan builds the debug model, its optimizer and learning rate, loads data, clips and logs; debubble runs each
step's forwards and backwards by the plan.  Pipeline parallelism alone: torchtitan numbers ranks in another order.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.tools import utils

if not torch.cuda.is_available():
    # torchtitan asks for the GPU's name and memory; here there is no GPU.
    nothing = dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"), lambda *_: None)
    utils.device_type, utils.device_module = "cpu", SimpleNamespace(
        **nothing, device_count=lambda: 1, current_device=lambda: 0, get_device_name=lambda _: "CPU",
        get_device_properties=lambda _: SimpleNamespace(total_memory=1), memory_stats=lambda _: {},
    )  # fmt: skip

if not hasattr(torch.distributed, "set_timeout"):
    # torchtitan 0.3.0 is made for a torch newer than 2.13, and shortens all timeouts after the first step.
    torch.distributed.set_timeout = lambda timeout, group: None  # type: ignore[attr-defined]

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss, cross_entropy_loss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import debubble as db
from debubble.costs.files import units_from_dict
from debubble.ir import RunOptions
from debubble.planners import ModelUnits
from debubble.planners.plan_model import solve

DEVICES, MICRO_BATCHES, LENGTH, STEPS = int(os.environ["WORLD_SIZE"]), 4, 64, 10
LAYERS = 6


def plan() -> db.Plan:
    """Six equal layers between a table that takes no time and a head that takes half a layer's time."""
    strategies = {"strategies": {"none": {"activation": 1}}}
    layer = {"type": "layer", "count": LAYERS, "forward": 2, "backward_input": 2, "backward_weight": 2, **strategies}
    ends = {"count": 1, "forward": 1, "backward_input": 1, "backward_weight": 1, **strategies}
    table = {**ends, "forward": 0, "backward_input": 0, "backward_weight": 0}
    units = units_from_dict({"units": [{"type": "embedding", **table}, layer, {"type": "head", **ends}]})
    problem = db.Problem(workload=ModelUnits(units), devices=DEVICES, micro_batches=MICRO_BATCHES)
    return solve(problem, planner="portfolio", options=RunOptions(dtype="fp32", sequence_length=LENGTH))


class Layer(nn.Module):
    """A layer from one tensor to one tensor, which computes masks and positions itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x, None, None)
        return hidden


class PlannedSchedule:
    """Takes the place of a torch schedule."""

    def __init__(self, units: list[nn.Module], plan: db.Plan, device: torch.device) -> None:
        self._units, self._plan, self._device = units, plan, device
        self._pipeline: db.Pipeline | None = None

    def step(self, *, arg_mbs: Any, target_mbs: list[Tensor], losses: list[Tensor], **rest: Any) -> None:
        """Run a step's forwards and backwards; the gradients are then on the model's parameters."""
        if self._pipeline is None:
            # torchtitan initializes the weights only now.
            model = nn.Sequential(*self._units)
            self._pipeline = db.Pipeline(model, self._plan, loss=cross_entropy_loss, device=self._device)
        tokens = torch.cat([inputs for (inputs,) in arg_mbs])
        losses.append(self._pipeline.step({"input_ids": tokens, "targets": torch.cat(target_mbs)}))
        if self._pipeline.ranks.transport.rank == 0:
            print(f"step {self._pipeline.steps_taken - 1}: loss {float(losses[0]):.3f}", flush=True)


def pipelining(model: Any, *, device: torch.device, **rest: Any) -> tuple[Any, list[nn.Module], bool, bool]:
    """Replacement of `ModelSpec.pipelining_fn`; every rank reports both ends, so each sees batch and loss."""
    made = plan()
    parts = ["tok_embeddings", *(f"layers.{i}" for i in range(LAYERS)), "norm"]
    units: list[nn.Module] = [model.tok_embeddings, *map(Layer, model.layers.values())]
    units.append(nn.Sequential(model.norm, model.lm_head))
    sizes = [len(stage) for stage in made.partition]
    stage_of = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    rank = torch.distributed.get_rank()
    for name, stage in zip(parts, stage_of, strict=True):
        if made.schedule.placement.device_of[stage] != rank:
            forget(model, name)
    return PlannedSchedule(units, made, device), [model], True, True


def forget(model: Any, name: str) -> None:
    """Remove a part from the model that torchtitan initializes, trains and saves on this rank."""
    if name.startswith("layers."):
        del model.layers[name.removeprefix("layers.")]
        return
    setattr(model, name, None)
    if name == "norm":
        model.lm_head = None


class Texts(BaseDataLoader):
    """The same few random texts, repeated."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, local_batch_size: int, seq_len: int, **rest: Any) -> None:
        shape = (MICRO_BATCHES * local_batch_size, seq_len + 1)
        self.rows = torch.randint(256, shape, generator=torch.Generator().manual_seed(0)).split(local_batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            yield from (({"input": rows[:, :-1]}, rows[:, 1:]) for rows in self.rows)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """The texts are already tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **rest: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 256


def main() -> None:
    """Train torchtitan's debug model."""
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention takes masks as arguments
    config = Trainer.Config(
        model_spec=replace(spec, pipelining_fn=pipelining),
        loss=CrossEntropyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        dataloader=Texts.Config(),
        optimizer=default_adamw(lr=1e-3),
        metrics=MetricsProcessor.Config(log_freq=1),
        training=TrainingConfig(
            local_batch_size=MICRO_BATCHES,
            seq_len=LENGTH,
            steps=STEPS,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(pipeline_parallel_degree=DEVICES, data_parallel_shard_degree=1),
        dump_folder=str(Path("runs") / "torchtitan"),
    )
    config.lr_scheduler.warmup_steps = 1
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
