"""The plan file: one Plan as JSON, with a version.

Orders are written in torch's letters, one string per device, so that a person can read and edit them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from debubble.errors import InputError
from debubble.files import decode_json, read_file, write_whole
from debubble.ir.degrees import DegreeSearch
from debubble.ir.ops import Op
from debubble.ir.placement import Placement
from debubble.ir.plan import CandidateSummary, Origin, Plan, PlannedUnit, RunOptions, WhatIf
from debubble.ir.schedule import Schedule, check
from debubble.ir.stage_costs import StageCosts

VERSION = 1


class ScheduleFile(msgspec.Struct, forbid_unknown_fields=True):
    """The schedule in a plan file; orders are operation names separated by blanks."""

    name: str
    placement: list[int]
    micro_batches: int
    orders: list[str]
    fused_recompute: list[int] = []
    recompute_fraction: dict[int, float] = {}
    offload_fraction: dict[int, float] = {}
    peers: dict[int, int] = {}
    asynchronous: list[int] = []


class PlanFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A plan file, field by field."""

    debubble_plan: int
    planner: str
    schedule: ScheduleFile
    costs: dict[str, Any]
    partition: list[list[PlannedUnit]]
    lower_bound: Annotated[float, msgspec.Meta(ge=0)]
    bound_argument: str | None = None
    solve_seconds: float = 0.0
    candidates: list[CandidateSummary] = []
    model: dict[str, Any] | None = None
    cluster: dict[str, Any] | None = None
    profile: dict[str, Any] | None = None
    options: RunOptions = msgspec.field(default_factory=RunOptions)
    degree_search: DegreeSearch | None = None
    what_ifs: list[WhatIf] = []
    origin: Origin | None = None
    target: str | None = None


class _Header(msgspec.Struct):
    debubble_plan: int | None = None


def save(plan: Plan, path: Path) -> None:
    """Write the file beside its place and rename it, so that it is never half there."""
    content = msgspec.json.format(msgspec.json.encode(encode(plan)), indent=1)
    write_whole(path, content + b"\n")


def load(path: Path) -> Plan:
    """Read, validate and check a plan file; raises InputError with one sentence."""
    content = read_file(path, "plan file")
    try:
        version = decode_json(content, _Header).debubble_plan
        if version is None:
            raise InputError(f"{path} is not a debubble plan: it has no entry 'debubble_plan'.")
        if version != VERSION:
            raise InputError(
                f"{path} has plan version {version}; this debubble reads version {VERSION}: make the plan again with"
                " `debubble plan`."
            )
        return decode(decode_json(content, PlanFile))
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
            recompute_fraction={stage: float(share) for stage, share in s.recompute_fraction.items()},
            offload_fraction={stage: float(share) for stage, share in s.offload_fraction.items()},
            peers=dict(s.peers),
            asynchronous=sorted(s.asynchronous),
        ),
        costs=plan.costs.to_dict(),
        lower_bound=float(plan.lower_bound),
        bound_argument=plan.bound_argument,
        solve_seconds=plan.solve_seconds,
        partition=[list(units) for units in plan.partition],
        candidates=list(plan.candidates),
        model=None if plan.model is None else dict(plan.model),
        cluster=None if plan.cluster is None else dict(plan.cluster),
        profile=None if plan.profile is None else dict(plan.profile),
        options=plan.options,
        degree_search=plan.degree_search,
        what_ifs=list(plan.what_ifs),
        origin=plan.origin,
        target=plan.target,
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
        recompute_fraction=s.recompute_fraction,
        offload_fraction=s.offload_fraction,
        peers=s.peers,
        asynchronous=frozenset(s.asynchronous),
    )
    check(schedule)
    if len(file.partition) != schedule.stages:
        raise InputError(f"The plan has {len(file.partition)} partitions for {schedule.stages} stages.")
    costs = StageCosts.from_dict(file.costs, stages=schedule.stages)
    costs.check_for(devices=schedule.devices, micro_batches=schedule.micro_batches)
    return Plan(
        planner=file.planner,
        schedule=schedule,
        costs=costs,
        lower_bound=file.lower_bound,
        bound_argument=file.bound_argument,
        solve_seconds=file.solve_seconds,
        partition=tuple(map(tuple, file.partition)),
        candidates=tuple(file.candidates),
        model=file.model,
        cluster=file.cluster,
        profile=file.profile,
        options=file.options,
        degree_search=file.degree_search,
        what_ifs=tuple(file.what_ifs),
        origin=file.origin,
        target=file.target,
    )
