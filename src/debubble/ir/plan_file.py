"""The plan file: one Plan as JSON, with a version.

Orders are written in torch's letters, one string per device, so that a person can read and edit them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from debubble.ir.costs import StageCosts
from debubble.ir.errors import InputError
from debubble.ir.files import write_whole
from debubble.ir.ops import Op
from debubble.ir.placement import Placement
from debubble.ir.plan import CandidateSummary, Plan, PlannedUnit, RunOptions
from debubble.ir.schedule import Schedule, check

VERSION = 1


class ScheduleFile(msgspec.Struct, forbid_unknown_fields=True):
    """The schedule in a plan file; orders are operation names separated by blanks."""

    name: str
    placement: list[int]
    micro_batches: int
    orders: list[str]
    fused_recompute: list[int] = []
    recompute_fraction: dict[str, float] = {}
    offload_fraction: dict[str, float] = {}
    peers: dict[str, int] = {}
    asynchronous: list[int] = []


class PlanFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A plan file, field by field."""

    debubble_plan: int
    planner: str
    schedule: ScheduleFile
    costs: dict[str, Any]
    partition: list[list[PlannedUnit]]
    lower_bound: float
    solve_seconds: float = 0.0
    candidates: list[CandidateSummary] = []
    model: dict[str, Any] | None = None
    cluster: dict[str, Any] | None = None
    profile: dict[str, Any] | None = None
    options: RunOptions = msgspec.field(default_factory=RunOptions)


def save(plan: Plan, path: Path) -> None:
    """Write the file beside its place and rename it, so that it is never half there."""
    content = msgspec.json.format(msgspec.json.encode(encode(plan)), indent=1)
    write_whole(path, content + b"\n")


def load(path: Path) -> Plan:
    """Read, validate and check a plan file; raises InputError with one sentence."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"The plan file {path} cannot be read: {error.strerror}.") from error
    try:
        version = msgspec.json.decode(content, type=dict[str, msgspec.Raw]).get("debubble_plan")
        if version is None:
            raise InputError(f"{path} is not a debubble plan: it has no entry 'debubble_plan'.")
        if msgspec.json.decode(version) != VERSION:
            raise InputError(
                f"{path} has plan version {bytes(version).decode()}; this debubble reads version {VERSION}: make the"
                " plan again with `debubble plan`."
            )
        return decode(msgspec.json.decode(content, type=PlanFile))
    except msgspec.DecodeError as error:
        raise InputError(f"{path} is not a whole plan file: {error}.") from error


def encode(plan: Plan) -> PlanFile:
    """The file's content for a plan."""
    s = plan.schedule
    return PlanFile(
        debubble_plan=VERSION,
        planner=plan.planner,
        schedule=ScheduleFile(
            name=s.name,
            placement=list(s.placement.device_of),
            micro_batches=s.micro_batches,
            orders=[" ".join(op.name for op in order) for order in s.orders],
            fused_recompute=sorted(s.fused_recompute),
            recompute_fraction={str(k): float(v) for k, v in s.recompute_fraction.items()},
            offload_fraction={str(k): float(v) for k, v in s.offload_fraction.items()},
            peers={str(k): v for k, v in s.peers.items()},
            asynchronous=sorted(s.asynchronous),
        ),
        costs=plan.costs.to_dict(),
        lower_bound=float(plan.lower_bound),
        solve_seconds=plan.solve_seconds,
        partition=[list(units) for units in plan.partition],
        candidates=list(plan.candidates),
        model=None if plan.model is None else dict(plan.model),
        cluster=None if plan.cluster is None else dict(plan.cluster),
        profile=None if plan.profile is None else dict(plan.profile),
        options=plan.options,
    )


def decode(file: PlanFile) -> Plan:
    """The plan of a file's content; raises InputError or ScheduleError if it contradicts itself."""
    s = file.schedule
    schedule = Schedule(
        name=s.name,
        placement=Placement.of(s.placement),
        micro_batches=s.micro_batches,
        orders=tuple(tuple(Op.parse(name) for name in order.split()) for order in s.orders),
        fused_recompute=frozenset(s.fused_recompute),
        recompute_fraction={int(k): v for k, v in s.recompute_fraction.items()},
        offload_fraction={int(k): v for k, v in s.offload_fraction.items()},
        peers={int(k): v for k, v in s.peers.items()},
        asynchronous=frozenset(s.asynchronous),
    )
    check(schedule)
    if len(file.partition) != schedule.stages:
        raise InputError(f"The plan has {len(file.partition)} partitions for {schedule.stages} stages.")
    return Plan(
        planner=file.planner,
        schedule=schedule,
        costs=StageCosts.from_dict(file.costs, stages=schedule.stages),
        lower_bound=file.lower_bound,
        solve_seconds=file.solve_seconds,
        partition=tuple(map(tuple, file.partition)),
        candidates=tuple(file.candidates),
        model=file.model,
        cluster=file.cluster,
        profile=file.profile,
        options=file.options,
    )
