"""Options that mean the same on every command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from debubble.ir import InputError

if TYPE_CHECKING:
    from debubble.costs import Cluster

ClusterOption = Annotated[
    str | None, typer.Option("--cluster", help="Devices, as NxNAME (8xA100-80GB) or a YAML file; see `hardware`.")
]
Pipeline = Annotated[int | None, typer.Option(help="Pipeline devices (default: all that the other degrees leave).")]
Tensor = Annotated[int | None, typer.Option(help="Tensor-parallel degree (default: 1).")]
Data = Annotated[int | None, typer.Option(help="Data-parallel degree (default: 1).")]
Context = Annotated[int | None, typer.Option(help="Context-parallel degree (default: 1).")]
Expert = Annotated[
    int | None, typer.Option(help="Expert-parallel degree, within the data-parallel ranks (default: 1).")
]
MicroBatchSize = Annotated[int | None, typer.Option(help="Sequences per micro-batch (default: 1).")]
MicroBatches = Annotated[int, typer.Option(help="Micro-batches per step.")]
GlobalBatch = Annotated[
    int | None,
    typer.Option(help="Sequences per step: searches the degrees, ZeRO and micro-batches that are not given."),
]
SequenceLength = Annotated[int, typer.Option(help="Tokens per sequence.")]
Optimizer = Annotated[str, typer.Option(help="Optimizer whose states count as memory.")]
Zero = Annotated[
    int | None, typer.Option(min=0, max=3, help="ZeRO level over the data- and context-parallel ranks (default: 0).")
]
Lora = Annotated[int, typer.Option(help="Train LoRA adapters of that rank on every linear layer (0: the whole model).")]
PostValidation = Annotated[
    bool,
    typer.Option(
        "--post-validation",
        help="Update before the gradients' norm is known: the span counts, and copies that take updates back.",
    ),
]
Dtype = Annotated[str, typer.Option(help="bf16 or fp32.")]
Chunks = Annotated[int | None, typer.Option(help="Stages per device.")]
MemoryLimit = Annotated[
    str | None, typer.Option(help="Per device: bytes, or with a unit such as 20GiB; abstract with --costs.")
]
Devices = Annotated[int | None, typer.Option(help="Pipeline devices, with --costs or --units.")]
Costs = Annotated[Path | None, typer.Option("--costs", help="Stage costs, as a costs file.")]
UnitsFile = Annotated[Path | None, typer.Option("--units", help="Model units, as a units file.")]
Effort = Annotated[
    float, typer.Option(help="Work that a planner may do, in seconds of two idle cores: the same plan on any machine.")
]
Deadline = Annotated[
    float | None,
    typer.Option(help="Seconds on the clock after which a planner stops all the same (default: 10 x effort + 60)."),
]
Cache = Annotated[
    bool,
    typer.Option("--cache", help="Start from schedules that this machine has found before, and keep new ones."),
]
Seed = Annotated[int, typer.Option(help="Seed of the search.")]


def given_options(**options: Any) -> dict[str, Any]:
    """The options that were given: those that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def cluster_of(text: str | None) -> Cluster:
    """The --cluster option; raises InputError if it is missing or unknown."""
    from debubble.costs import Cluster

    if text is None:
        raise InputError("Give the devices with --cluster, such as --cluster 8xA100-80GB (see `debubble hardware`).")
    return Cluster.parse(text)


def abstract_limit(text: str | None) -> float | int | None:
    """A memory limit in the costs' own unit; whole numbers stay whole."""
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        raise InputError(f"--memory-limit is '{text}'; with abstract costs it must be a number.") from None
    return int(number) if number.is_integer() else number
