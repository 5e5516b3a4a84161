"""`debubble fits`: memory by part for the degrees and ZeRO levels, without planning."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import typer

from debubble.cli import options as o
from debubble.cli.app import app
from debubble.cli.output import Json, console, print_answer
from debubble.cli.progress import told_after_a_while
from debubble.ir import RunOptions


@app.command(rich_help_panel="Plan")
@o.with_option_groups
@told_after_a_while("Adding up memory")
def fits(
    model: o.ModelName,
    *,
    run: o.ModelRun,
    global_batch: Annotated[
        int | None,
        typer.Option(help="Sequences per step (default: as many as fill every pipeline).", rich_help_panel=o.QUESTION),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            help="Micro-batches per pipeline and step (default: what the batch makes).", rich_help_panel=o.QUESTION
        ),
    ] = None,
    memory_limit: o.MemoryLimit = None,
    json: Json = False,
) -> None:
    """Say what takes the memory and whether it fits, for every choice of the degrees not given: no planning."""
    from debubble.models import named_model
    from debubble.planners.degrees import Job, footprints, footprints_with
    from debubble.views.memory_table import render_footprints

    devices = run.require_cluster()
    devices = devices if memory_limit is None else devices.with_limit(memory_limit)
    fixed = run.degrees
    priced = named_model(model)
    job = Job(
        model=priced, cluster=devices, fixed=fixed,
        global_batch=devices.count * (run.micro_batch_size or 1) if global_batch is None else global_batch,
        options=RunOptions(**run.settings),
    )  # fmt: skip
    if micro_batches is None:
        found = footprints(job)
    elif global_batch is None:
        found = footprints_with(job, micro_batches)
    else:
        found = footprints(replace(job, fixed={**fixed, "micro_batches": micro_batches}))
    remarks = [*([] if priced.remark is None else [priced.remark]), *devices.remarks]
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
        print_answer(reserve=devices.reserve, footprints=rows, remarks=remarks)
        return
    node = devices.slowest.devices_per_node

    def common(name: str, degree: int, most: int) -> bool:
        return name in fixed or degree <= most

    shown = [
        each
        for each in found
        if common("context", each.degrees.context, 1)
        and common("expert", each.degrees.expert, 1)
        and (each.degrees.expert_tensor is None or "expert_tensor" in fixed)
        and common("tensor", each.degrees.tensor, node)
    ] or found
    console().print(render_footprints(shown, reserve=devices.reserve, left_out=len(found) - len(shown)))
    for remark in remarks:
        console().print(remark)
