from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.ir import PlannedUnit, RunOptions
from tests.support.model_cases import on_cpus
from tests.support.torch_tests import collect_ignore_glob as collect_ignore_glob

TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture
def process_group() -> Iterator[Any]:
    """This process as the only rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def train(run: Any, forked_processes: None) -> Callable[..., tuple[int, str, str]]:
    """Call `debubble train`; returns (exit code, standard output, standard error)."""
    return partial(run, "train")


@pytest.fixture
def plan_file(tmp_path: Path) -> Callable[[int], Path]:
    """Writes a 1F1B plan of a tiny Llama for that many devices."""

    def write(devices: int) -> Path:
        costs = db.StageCosts.of(stages=devices, static=1, activation=2, memory_limit=2**30)
        halves = [PlannedUnit(kind, layer) for layer in range(2) for kind in ("attention", "mlp")]
        units = [PlannedUnit("embedding", None), *halves, PlannedUnit("head", None)]
        size = len(units) // devices
        plan = db.Plan(
            planner="test",
            schedule=db.schedules["1f1b"](devices=devices, micro_batches=4),
            costs=costs,
            lower_bound=0,
            partition=tuple(tuple(units[s * size : (s + 1) * size]) for s in range(devices)),
            model_on_cluster=on_cpus(TINY_LLAMA),
            options=RunOptions(sequence_length=32, dtype="fp32"),
        )
        plan.save(tmp_path / f"plan-{devices}.json")
        return tmp_path / f"plan-{devices}.json"

    return write


@pytest.fixture
def options(tmp_path: Path, plan_file: Callable[[int], Path]) -> Any:
    """Six steps of that plan on one device, on a text."""
    from debubble.training.options import TrainOptions

    data = tmp_path / "text.txt"
    data.write_text("".join(f"{i} bottles of beer on the wall, {i} bottles of beer.\n" for i in range(200)))
    return TrainOptions(plan=plan_file(1), data=data, steps=6, warmup=2, learning_rate=0.01)
