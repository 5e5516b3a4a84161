"""`debubble calibrate`: corrections of predictions by a measured run."""

from __future__ import annotations

import math
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from debubble.cli.app import app
from debubble.cli.names import cluster_completion
from debubble.cli.options import PlanFile
from debubble.cli.output import Json, log, print_answer, print_wrapped, with_delayed_message
from debubble.files import check_writable

if TYPE_CHECKING:
    from debubble.costs import Cluster


@app.command(rich_help_panel="Run")
@with_delayed_message("Calibrating")
def calibrate(
    plan: PlanFile,
    measured: Annotated[
        list[Path] | None,
        typer.Argument(help="Its log, or the traces of all ranks.", metavar="LOG", show_default=False),
    ] = None,
    step: Annotated[float | None, typer.Option(help="Seconds of a measured step, in place of the log's.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory allocated on the fullest device, such as 61.3GiB.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A cluster file with runs that were measured before (default: the plan's cluster).",
            autocompletion=cluster_completion,
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the cluster file here.")] = Path("cluster.yaml"),
    json: Json = False,
) -> None:
    """Correct predictions by a measured run of a plan.

    The plan is of `plan -o` or `import --as-it-is -o`; the correction is a cluster file.

    Plans that rest on a profile are refused: their costs are measured.
    """
    from debubble.costs import Cluster, parse_size
    from debubble.imports.calibration import calibrate as calibrated
    from debubble.imports.logs import MeasuredFigures, read_figures
    from debubble.ir import InputError
    from debubble.plans import Plan

    check_writable(output)
    ran = Plan.load(plan)
    if step is not None and not 0 < step < math.inf:
        raise InputError(f"--step must be above 0, not {step:g}.")
    size = None if memory is None else parse_size(memory, "--memory")
    read = read_figures(measured or [], ran, needs_step=step is None and size is None)
    if measured and read == MeasuredFigures():
        log().print("The files have neither a step nor memory: only what the options say is taken.", soft_wrap=True)
    figures = MeasuredFigures(
        step=read.step if step is None else step,
        memory=read.memory if size is None else size,
    )
    calibration = calibrated(
        ran, figures, cluster=None if cluster is None else Cluster.parse(cluster), date=date.today().isoformat()
    )
    _refuse_lost_runs(output, calibration.cluster)
    sentences = [*calibration.sentences()]
    if (limit := calibration.cluster.to_dict().get("memory_limit")) is not None:
        sentences.append(f"The file has the memory limit of the plan that ran too: {limit}.")
    calibration.cluster.save(output, notes=["Written by `debubble calibrate`.", *sentences])
    log().print(f"The cluster is in {output}: give it with --cluster {output}.", soft_wrap=True)
    if json:
        answers = {name: {"ratio": figure.ratio, **vars(figure)} for name, figure in calibration.figures.items()}
        print_answer(output=str(output), run=calibration.run, replaced=calibration.replaced, figures=answers)
        return
    for sentence in sentences:
        print_wrapped(sentence)


def _refuse_lost_runs(output: Path, cluster: Cluster) -> None:
    """Raise InputError if a cluster file would be overwritten without its measured runs."""
    from debubble.costs import Cluster
    from debubble.imports.calibration import lost_runs
    from debubble.ir import DebubbleError, InputError

    lost = 0
    if output.is_file():
        with suppress(DebubbleError):
            lost = lost_runs(Cluster.parse(str(output)), cluster)
    if lost:
        raise InputError(
            f"{output} has measured runs: --cluster {output} adds this one to them, -o NAME writes another file."
        )
