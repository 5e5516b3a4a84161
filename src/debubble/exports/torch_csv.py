"""torch.distributed.pipelining's schedule CSV: one row per rank, one cell per operation, read and written.

A cell is stage, letter and micro-batch (`2F5`) with the letters F, B, I and W, which are ours; an empty cell is a
bubble, and `(0F3;3B1)OVERLAP_F_B` two operations side by side.  torch adds the messages (format `compute_only`).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path

from debubble.exports.layers import stage_layers
from debubble.exports.module_names import hf_names
from debubble.exports.reduction import compute_only
from debubble.exports.registry import Export, exporter
from debubble.exports.torch_hosts import split_losses
from debubble.ir import ExportError, InputError, Op, Placement, Plan, Schedule, check


@exporter("torch")
def torch(plan: Plan) -> Export:
    """`schedule.csv` for `_PipelineScheduleRuntime._load_csv`, and the modules of each stage as JSON."""
    reduction = compute_only(plan, target="torch")
    losses = [*reduction.losses, *split_losses(plan)]
    files = {"schedule.csv": to_csv(reduction.schedule)}
    if any(recompute != "none" for recompute in plan.recompute):
        losses.append(
            "The CSV cannot say what is recomputed: checkpoint the layers in your model, per stage:"
            f" {'; '.join(f'{stage}: {how}' for stage, how in enumerate(plan.recompute))}."
        )
    try:
        names = hf_names(plan.model or {}, stage_layers(plan, target="a list of modules"))
        files["modules.json"] = json.dumps(names, indent=1) + "\n"
    except ExportError:
        losses.append("The plan names no whole layers of a model, so there is no list of each stage's modules.")
    return Export(files=files, losses=tuple(losses))


def to_csv(schedule: Schedule) -> str:
    """A schedule of F, B, I and W as torch reads it."""
    return "".join(",".join(op.name for op in order) + "\n" for order in schedule.orders)


def read(path: Path | str) -> Schedule:
    """The schedule of a torch CSV, compute_only or compute_comms (whose messages lowering adds itself).

    Two operations side by side become one after the other.  Raises InputError or ScheduleError with a sentence.
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row]
    except OSError as error:
        raise InputError(f"The schedule file {path} cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
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
    for part in overlap[1].split(";") if overlap else [cell]:
        if not part or _MESSAGES.fullmatch(part):
            continue
        if not _CELL.fullmatch(part):
            raise InputError(
                f"{path}, row {rank + 1}, cell {column + 1}: '{part}' is no operation of a torch schedule; write stage,"
                " F, B, I or W, and micro-batch, such as 2F5."
            )
        yield Op.parse(part)


def _placement(orders: tuple[tuple[Op, ...], ...], path: Path) -> Placement:
    device_of = {op.stage: rank for rank, order in enumerate(orders) for op in order}
    if not device_of:
        raise InputError(f"{path} holds no operation.")
    missing = next(stage for stage in range(len(device_of) + 1) if stage not in device_of)
    if missing < len(device_of):
        raise InputError(f"{path} has no operation of stage {missing}.")
    return Placement.of([device_of[stage] for stage in range(len(device_of))])
