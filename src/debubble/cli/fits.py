"""`debubble fits`: memory by part for degrees and ZeRO levels, without planning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from debubble.cli import options as o
from debubble.cli.app import app
from debubble.cli.names import framework_names, name_option
from debubble.cli.output import Json, console, print_answer, with_delayed_message
from debubble.ir import InfeasibleError, InputError, RunOptions

if TYPE_CHECKING:
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
        typer.Option(help="Sequences per step (default: as many as fill every pipeline).", rich_help_panel=o.PLANNING),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            help="Micro-batches per pipeline and step (default: what the batch makes).", rich_help_panel=o.PLANNING
        ),
    ] = None,
    target: Annotated[
        str | None,
        name_option(
            framework_names,
            "--for",
            noun="framework",
            section=o.PLANNING,
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
    from debubble.planners.degrees.usual import LAYERWISE_FSDP
    from debubble.planners.fits import common_choices
    from debubble.planners.fits import fits as choices_of
    from debubble.views.memory_table import render_footprints

    o.check_counts(global_batch=global_batch, micro_batches=micro_batches, chunks=chunks)
    devices = o.with_memory_limit(run.require_cluster(), memory_limit)
    priced = named_model(model)
    choices_for = partial(
        choices_of, priced, devices, global_batch=global_batch, micro_batches=micro_batches, chunks=chunks,
        **run.degrees, **run.settings,
    )  # fmt: skip
    choices = choices_for(target=target)
    remark = as_trained(priced, RunOptions(**run.settings)).remark
    remarks = [*([] if remark is None else [remark]), *devices.remarks]
    if target is None and all(choice.fits == "no" for choice in choices):
        with suppress(InputError):  # the framework may not have the job's options
            remarks += _remarks_on_fsdp(choices_for(target=LAYERWISE_FSDP))
    if json:
        print_answer(reserve=devices.reserve, footprints=list(map(_row, choices)), remarks=remarks)
    else:
        shown = common_choices(choices, devices, fixed=[*run.degrees]) or choices
        console().print(render_footprints(shown, reserve=devices.reserve, left_out=len(choices) - len(shown)))
        for remark in remarks:
            console().print(remark)
    if all(choice.fits == "no" for choice in choices):
        raise typer.Exit(InfeasibleError.exit_code)


def _remarks_on_fsdp(choices: Sequence[Footprint]) -> Iterator[str]:
    """A sentence on choices that fit in a framework that gathers one layer at a time, if any do."""
    from debubble.planners.degrees.remedies import option_words
    from debubble.planners.degrees.usual import LAYERWISE_FSDP

    fitting = [choice for choice in choices if choice.fits != "no"]
    if fitting:
        smallest = min(fitting, key=lambda choice: choice.recomputed.total)
        yield (
            f"With --for {LAYERWISE_FSDP} {len(fitting)} of {len(choices)} choices fit{'s' * (len(fitting) == 1)}, as"
            f" {option_words(smallest.degrees)}: it gathers less at a time than debubble's runtime."
        )


def _row(footprint: Footprint) -> dict[str, Any]:
    return {
        "degrees": footprint.degrees,
        "fits": footprint.fits,
        "memory": footprint.kept,
        "memory_recomputed": footprint.recomputed,
        "memory_limit": footprint.limit,
    }
