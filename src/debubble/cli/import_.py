"""`debubble import`: another framework's configuration, simulated as it is and planned again."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from debubble.cli import options as o
from debubble.cli.app import app
from debubble.cli.names import import_names, name_argument, name_option, planner_names
from debubble.cli.output import Json, console, log, print_answer
from debubble.cli.progress import SearchProgress, told_after_a_while
from debubble.files import check_writable
from debubble.ir import InputError


@app.command("import", rich_help_panel="Take along")
@o.with_option_groups
@told_after_a_while("Reading the job and planning it again")
def import_(
    target: Annotated[
        str, name_argument(import_names, what="framework", help="The framework, such as megatron; see docs/imports.md.")
    ],
    file: Annotated[Path, typer.Argument(help="Its configuration.", metavar="FILE")],
    *,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            help="Devices, as NxNAME (8xA100-80GB), nodes of them (2x4xL40S-48GB) or a YAML file; see `hardware`.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model, as for `plan`, where the configuration does not describe it.")
    ] = None,
    pipeline: Annotated[int | None, typer.Option(help="Pipeline devices, where it does not say.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per sequence, where it does not say.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches per step, where it does not say.")] = None,
    degrees: Annotated[
        bool, typer.Option("--degrees", help="Search the degrees of parallelism too, for the same global batch.")
    ] = False,
    planner: Annotated[
        str, name_option(planner_names, what="planner", help="A planner's name; see `planners`.")
    ] = "auto",
    search: o.SearchLimits,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the faster plan here.")] = None,
    as_it_is: Annotated[
        bool, typer.Option("--as-it-is", help="Do not plan again; -o writes the job's own plan.")
    ] = False,
    json: Json = False,
) -> None:
    """Read another framework's job, predict it as it is, and say what would make it faster."""
    from debubble.costs import Cluster
    from debubble.imports import imports
    from debubble.imports.comparison import Figures, JobComparison, compare
    from debubble.imports.registry import Given
    from debubble.models import named_model
    from debubble.planners.plan_model import plan_again

    check_writable(output)
    importer = imports[target]
    if cluster is None:
        raise InputError("Give the devices with --cluster, such as --cluster 8xA100-80GB (see `debubble hardware`).")
    given = Given(
        cluster=Cluster.parse(cluster),
        model=None if model is None else named_model(model),
        pipeline=pipeline,
        sequence_length=sequence_length,
        micro_batches=micro_batches,
    )
    settings = importer.settings(file)
    job = importer.job(settings, file, given)
    yours = job.plan(given.cluster)
    if as_it_is:
        comparison, best = JobComparison(yours=Figures.of(yours), planned=None), yours
    else:
        with log().status("Planning again ...") as status:
            again = partial(
                plan_again, yours, degrees=degrees, planner=planner, progress=SearchProgress(status), **asdict(search)
            )
            comparison, best = compare(importer, settings, yours, again)
    if output is not None:
        best.save(output)
        log().print(f"The plan is in {output}.")
    if json:
        print_answer(target=target, degrees=yours.degrees.to_dict(), **asdict(comparison), unread=list(job.unread))
        return
    console().print(f"{yours.degrees}; {yours.schedule.name}; recomputing {', '.join(dict.fromkeys(yours.recompute))}")
    if as_it_is:
        console().print(f"Yours: {comparison.yours}.")
    else:
        for sentence in comparison.sentences():
            console().print(sentence, soft_wrap=True)
    if job.unread:
        console().print("\nWhat was not read, or is not in the prediction:")
        for sentence in job.unread:
            console().print(f"  - {sentence}", soft_wrap=True)
