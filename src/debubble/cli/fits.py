"""`debubble fits`: memory by part for the degrees and ZeRO levels, without planning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from debubble.cli import options as o
from debubble.cli.app import app
from debubble.cli.names import framework_names, name_option
from debubble.cli.output import Json, console, print_answer, with_delayed_message
from debubble.ir import InfeasibleError, InputError, RunOptions

if TYPE_CHECKING:
    from debubble.costs import Cluster
    from debubble.ir.degrees import Degrees
    from debubble.planners.degrees.memory import Footprint


@app.command(rich_help_panel="Plan")
@o.with_option_groups
@with_delayed_message("Adding up memory")
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
    target: Annotated[
        str | None,
        name_option(
            framework_names,
            "--for",
            what="framework",
            section=o.QUESTION,
            help="Only the choices that this framework has, with its memory: megatron, torchtitan, deepspeed, ...",
        ),
    ] = None,
    chunks: o.Chunks = None,
    memory_limit: o.MemoryLimit = None,
    json: Json = False,
) -> None:
    """Say what takes the memory, and whether it fits.

    Every choice of the degrees that are not given is looked at, without planning.

    The exit code is 1 if none fits, by recomputation or without.
    """
    from debubble.models import named_model
    from debubble.models.vision import as_trained
    from debubble.planners.degrees.memory import footprints, footprints_with
    from debubble.planners.degrees.space import Job
    from debubble.planners.degrees.usual import OF_UNITS
    from debubble.planners.plan_model import for_target
    from debubble.views.memory_table import render_footprints

    o.check_counts(global_batch=global_batch, micro_batches=micro_batches, chunks=chunks)
    devices = o.with_memory_limit(run.require_cluster(), memory_limit)
    fixed = run.degrees if chunks is None else {**run.degrees, "chunks": chunks}
    priced = named_model(model)
    job = Job(
        model=priced, cluster=devices, fixed=fixed,
        global_batch=devices.count * (run.micro_batch_size or 1) if global_batch is None else global_batch,
        options=for_target(RunOptions(**run.settings), target), target=target,
    )  # fmt: skip

    def looked_at(job: Job) -> list[Footprint]:
        if micro_batches is None:
            return footprints(job)
        if global_batch is None:
            return footprints_with(job, micro_batches)
        return footprints(replace(job, fixed={**fixed, "micro_batches": micro_batches}))

    choices = looked_at(job)
    remark = as_trained(priced, job.options).remark
    remarks = [*([] if remark is None else [remark]), *devices.remarks]
    if target is None and all(each.fits == "no" for each in choices):
        with suppress(InputError):  # the framework may not have the job's options
            remarks += _elsewhere(looked_at(job.for_target(OF_UNITS)))
    if json:
        print_answer(reserve=devices.reserve, footprints=list(map(_row, choices)), remarks=remarks)
    else:
        shown = [each for each in choices if _is_common(each.degrees, fixed, devices)] or choices
        console().print(render_footprints(shown, reserve=devices.reserve, left_out=len(choices) - len(shown)))
        for remark in remarks:
            console().print(remark)
    if all(each.fits == "no" for each in choices):
        raise typer.Exit(InfeasibleError.exit_code)


def _elsewhere(choices: Sequence[Footprint]) -> Iterator[str]:
    """A sentence on the choices that fit in a framework that gathers a layer at a time, if any do."""
    from debubble.planners.degrees.remedies import option_words
    from debubble.planners.degrees.usual import OF_UNITS

    fitting = [each for each in choices if each.fits != "no"]
    if fitting:
        least = min(fitting, key=lambda each: each.recomputed.total)
        yield (
            f"With --for {OF_UNITS} {len(fitting)} of {len(choices)} choices fit, as {option_words(least.degrees)}:"
            " it gathers less at a time than debubble's runtime."
        )


def _row(footprint: Footprint) -> dict[str, Any]:
    return {
        "degrees": footprint.degrees,
        "fits": footprint.fits,
        "memory": footprint.kept,
        "memory_recomputed": footprint.recomputed,
        "memory_limit": footprint.limit,
    }


def _is_common(degrees: Degrees, fixed: Mapping[str, Any], cluster: Cluster) -> bool:
    """Tell whether a choice of degrees is asked for or usual: tensor parallelism within a node, and little else."""
    most = {"context": 1, "expert": 1, "slices": 1, "tensor": cluster.slowest.devices_per_node}
    usual = all(name in fixed or getattr(degrees, name) <= limit for name, limit in most.items())
    return usual and (degrees.expert_tensor is None or "expert_tensor" in fixed)
