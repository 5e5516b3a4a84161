"""`debubble profile`: measurements of a model's units on this machine."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from debubble.cli import options as o
from debubble.cli.app import app, require_torch
from debubble.cli.names import name_option
from debubble.cli.output import Json, console, log, print_answer, with_delayed_message
from debubble.files import check_writable
from debubble.ir import Number

if TYPE_CHECKING:
    from debubble.costs.units import Units


MAX_SPREAD = 0.1
"""Relative spread of repeated measurements above which a remark is printed."""


def noise_words(spread: float | None) -> str:
    """A sentence on noisy repeated measurements; empty if they agree or there are none."""
    if spread is None or spread <= MAX_SPREAD:
        return ""
    return (
        f"The middle half of repeated forwards and backwards differ by {spread:.0%}: measure while nothing else runs,"
        " or raise --repetitions for surer medians."
    )


@app.command(rich_help_panel="Run")
@with_delayed_message("Measuring")
def profile(
    model: o.ModelName,
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the measured units here.")] = Path("costs.json"),
    micro_batch_size: Annotated[int, typer.Option(help="Sequences per micro-batch.", min=1)] = 1,
    sequence_length: o.SequenceLength = 512,
    dtype: o.Dtype = "fp32",
    lora: o.Lora = 0,
    device: Annotated[str, name_option(lambda: ("cpu", "cuda"), noun="kind of device", help="cpu or cuda.")] = "cpu",
    processes: Annotated[
        int | None,
        typer.Option(
            help="Processes that measure at the same time, as ranks will (default: one per GPU, or 2).", min=1
        ),
    ] = None,
    offload_to: Annotated[
        Path | None, typer.Option(help="Folder that a run's activations will be offloaded to (default: host memory).")
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Measurements of everything; medians count.", min=1)] = 10,
    from_trace: Annotated[
        list[Path] | None,
        typer.Option(
            "--from-trace",
            help="A torch.profiler trace (of every rank) or Megatron-LM log of a run; MODEL is the plan that ran.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure times and bytes of every unit for `plan --profile`.

    These are forward, backward, recomputation and bytes of every unit, and the links.
    """
    o.check_counts(sequence_length=sequence_length)
    check_writable(output)
    if from_trace:
        _from_trace(Path(model), from_trace, output, json=json)
        return
    from debubble.costs import measured_source, read_profile
    from debubble.costs.files import units_to_dict
    from debubble.ir import RunOptions
    from debubble.models import named_model

    config = named_model(model).config
    require_torch()
    from debubble.profiler.profile import ProfileOptions, measure

    run = RunOptions(micro_batch_size=micro_batch_size, sequence_length=sequence_length, dtype=dtype, lora=lora)
    units = measure(
        ProfileOptions(
            config=config, run=run, output=output, device=device, repetitions=repetitions, offload_to=offload_to
        ),
        processes=processes,
    )
    log().print(f"The measured units are in {output}.")
    source = measured_source(read_profile(output))
    if source is not None and (noise := noise_words(source.spread)):
        log().print(noise)
    if json:
        print_answer(**units_to_dict(units))
    else:
        console().print(_table(units))


def _from_trace(plan: Path, traces: list[Path], output: Path, *, json: bool) -> None:
    """Fit a plan's units to another framework's measurements, and write them."""
    from debubble.costs.files import units_to_dict
    from debubble.files import write_whole
    from debubble.imports.measurements import fit_units, read_measurements
    from debubble.plans import Plan

    fit = fit_units(Plan.load(plan), read_measurements(traces))
    content = units_to_dict(fit.units)
    write_whole(output, dumps(content, indent=1).encode() + b"\n")
    log().print(f"The measured units are in {output}.")
    if json:
        print_answer(**content, factors=fit.factors, predicted=fit.predicted, measured=fit.measured)
        return
    for stage, (forward, backward) in enumerate(fit.factors):
        console().print(f"Stage {stage}: forward {forward:.3f}, backward {backward:.3f} times as long as computed.")
    if fit.measured is not None and fit.error is not None:
        console().print(
            f"With them the plan is predicted to take {fit.predicted:.4g} s per step; it took {fit.measured:.4g} s, so"
            f" the fit is {100 * fit.error:+.1f}% off."
        )


def _table(units: Units) -> Table:
    """A table with a row per unit type and strategy."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("unit", "strategy", "forward", "backward", "weights", "recompute", "keeps"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("unit", "strategy") else "right")
    for unit in {unit.type: unit for unit in units.units}.values():
        for name, strategy in unit.strategies.items():
            if strategy.operators is None:
                first = name == "none"
                times = (unit.forward, unit.backward_input + unit.backward_weight, unit.backward_weight)
                table.add_row(
                    unit.type if first else "",
                    name,
                    *(_milliseconds(time) if first else "" for time in times),
                    "" if first else _milliseconds(strategy.recompute),
                    f"{float(strategy.activation) / 2**20:.2f}",
                )
    link = f"message {_milliseconds(units.communication)} ms, " if units.communication else ""
    host_link, host_step = (
        f"{float(bandwidth or 0) / 1e9:.1f} GB/s" for bandwidth in (units.offload_bandwidth, units.host_step_bandwidth)
    )
    table.caption = f"ms and MiB; {link}host link {host_link}, optimizer step on the host {host_step}"
    return table


def _milliseconds(seconds: Number) -> str:
    return f"{float(seconds) * 1e3:.2f}"
