"""`debubble fits`: memory by part for the degrees and ZeRO levels, without planning."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from debubble.cli import options as o
from debubble.cli.app import app
from debubble.cli.output import Json, console, print_json
from debubble.ir import RunOptions


@app.command()
def fits(
    model: Annotated[str, typer.Argument(help="A built-in name, a config.json, or a folder with one.")],
    cluster: o.ClusterOption = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences per step (default: as many as fill every pipeline).")
    ] = None,
    memory_limit: o.MemoryLimit = None,
    pipeline: Annotated[int | None, typer.Option(help="Pipeline devices (default: every number).")] = None,
    tensor: Annotated[int | None, typer.Option(help="Tensor-parallel degree (default: every one).")] = None,
    data: Annotated[int | None, typer.Option(help="Data-parallel degree (default: every one).")] = None,
    context: Annotated[int | None, typer.Option(help="Context-parallel degree (default: every one).")] = None,
    expert: Annotated[int | None, typer.Option(help="Expert-parallel degree (default: every one).")] = None,
    micro_batch_size: o.MicroBatchSize = None,
    sequence_length: o.SequenceLength = 4096,
    optimizer: o.Optimizer = "adamw",
    zero: Annotated[int | None, typer.Option(min=0, max=3, help="ZeRO level (default: every one).")] = None,
    dtype: o.Dtype = "bf16",
    lora: o.Lora = 0,
    json: Json = False,
) -> None:
    """Say what takes the memory and whether it fits, for every choice of degrees: no planning."""
    from debubble.models import named_model
    from debubble.planners.degrees import Job, footprints
    from debubble.views.memory_table import render_footprints

    devices = o.cluster_of(cluster)
    devices = devices if memory_limit is None else devices.with_limit(memory_limit)
    fixed = o.given_options(
        pipeline=pipeline, tensor=tensor, data=data, context=context, expert=expert, zero=zero,
        micro_batch_size=micro_batch_size,
    )  # fmt: skip
    job = Job(
        model=named_model(model), cluster=devices, fixed=fixed,
        global_batch=devices.count * (micro_batch_size or 1) if global_batch is None else global_batch,
        options=RunOptions(sequence_length=sequence_length, optimizer=optimizer, dtype=dtype, lora=lora),
    )  # fmt: skip
    found = footprints(job)
    reserve = min(t.memory - limit for t, limit in zip(devices.types, devices.memory_limits, strict=True))
    if json:
        rows = [
            {
                "degrees": each.degrees.to_dict(),
                "fits": each.fits,
                "memory": asdict(each.kept),
                "memory_recomputed": asdict(each.recomputed),
                "memory_limit": each.limit,
            }
            for each in found
        ]
        print_json({"schema": 2, "reserve": reserve, "footprints": rows})
        return
    node = devices.slowest.devices_per_node

    def common(name: str, degree: int, most: int) -> bool:
        return name in fixed or degree <= most

    shown = [
        each
        for each in found
        if common("context", each.degrees.context, 1)
        and common("expert", each.degrees.expert, 1)
        and common("tensor", each.degrees.tensor, node)
    ] or found
    console().print(render_footprints(shown, reserve=reserve, left_out=len(found) - len(shown)))
