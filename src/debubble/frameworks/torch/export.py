"""Writes and reads the schedule CSV of torch.distributed.pipelining: one row per rank, one cell per operation.

A cell is stage, kind and micro-batch (`2F5`) with debubble's kinds F, B, I and W; an empty cell is a bubble, and
`(0F3;3B1)OVERLAP_F_B` two operations in parallel.  torch adds the messages (format `compute_only`).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from debubble.exports.layers import hf_names, stage_layers
from debubble.exports.options import OptionTable, framework, one_setting
from debubble.exports.registry import ExportDraft, exporter
from debubble.frameworks.torch.shared_options import whole_backwards
from debubble.ir import ExportError, InputError, Op, Placement, RunOptions, Schedule, check
from debubble.plans import Plan

OPTIONS: OptionTable = {
    **{field.name: one_setting(field.name, field.name) for field in fields(RunOptions)}, "framework": framework
}  # fmt: skip
"""All options are reported to the user, because the script that loads the CSV sets up the rest of the run."""
_DEFAULT = RunOptions()
_SIZES = ("micro_batch_size", "sequence_length")
"""Options that are always reported, because scripts have no default for them."""


@exporter("torch", options=OPTIONS, layers=False)
def torch(plan: Plan, settings: Mapping[str, Any]) -> ExportDraft:
    """`schedule.csv` for `_PipelineScheduleRuntime._load_csv`, and the modules of each stage as JSON."""
    recompute = plan.recompute
    plan, split = whole_backwards(plan)
    losses = [*split]
    files = {"schedule.csv": to_csv(plan.schedule)}
    if any(how != "none" for how in recompute):
        losses.append(
            "The CSV cannot say what is recomputed: checkpoint the layers in your model, per stage:"
            f" {'; '.join(f'{stage}: {how}' for stage, how in enumerate(recompute) if how)}."
        )
    unset = {name: value for name, value in settings.items() if name in _SIZES or value != getattr(_DEFAULT, name)}
    if unset:
        words = ", ".join(f"{name} {value}" for name, value in unset.items())
        losses.append(f"The CSV says nothing of the run but for the pipeline: set up {words} in your script.")
    try:
        names = hf_names(plan.model, stage_layers(plan, target="a list of modules"))
        files["modules.json"] = json.dumps(names, indent=1) + "\n"
    except ExportError:
        losses.append("There is no list of each stage's modules, which debubble has of whole decoder layers alone.")
    return ExportDraft(files, plan, tuple(losses))


def to_csv(schedule: Schedule) -> str:
    """A schedule of F, B, I and W as torch reads it."""
    return "".join(",".join(op.name for op in order) + "\n" for order in schedule.orders)


def read(path: Path | str) -> Schedule:
    """The schedule of a torch CSV, compute_only or compute_comms (whose messages are dropped and lowered again).

    Two operations in parallel are serialized.  Raises InputError or ScheduleError.
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row]
    except OSError as error:
        raise InputError(f"The schedule file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"The schedule file {path} is not a text file: it must be CSV.") from error
    except csv.Error as error:
        raise InputError(f"The schedule file {path} is not CSV: {error}.") from error
    orders = tuple(
        tuple(op for column, cell in enumerate(row) for op in _operations(cell, path, rank, column))
        for rank, row in enumerate(rows)
    )
    schedule = Schedule(
        name=path.stem,
        placement=_placement(orders, path),
        micro_batches=1 + max(op.micro_batch for order in orders for op in order),
        orders=orders,
    )
    check(schedule)
    return schedule


_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_MESSAGES = re.compile(r"\d+(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD|WAIT_\w+?)\d*")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def _operations(cell: str, path: Path, rank: int, column: int) -> Iterator[Op]:
    cell = cell.strip()
    overlap = _OVERLAP.fullmatch(cell)
    for operation in overlap[1].split(";") if overlap else [cell]:
        if not operation or _MESSAGES.fullmatch(operation):
            continue
        if not _CELL.fullmatch(operation):
            raise InputError(
                f"{path}, row {rank + 1}, cell {column + 1}: '{operation}' is no operation of a torch schedule; write"
                " stage, F, B, I or W, and micro-batch, such as 2F5."
            )
        yield Op.parse(operation)


def _placement(orders: tuple[tuple[Op, ...], ...], path: Path) -> Placement:
    device_of = {op.stage: rank for rank, order in enumerate(orders) for op in order}
    if not device_of:
        raise InputError(f"{path} holds no operation.")
    missing = next(stage for stage in range(len(device_of) + 1) if stage not in device_of)
    if missing < len(device_of):
        raise InputError(f"{path} has no operation of stage {missing}.")
    return Placement.of([device_of[stage] for stage in range(len(device_of))])
