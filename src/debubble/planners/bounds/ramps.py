"""The ramps bound: memory and links limit the work before the first backward and after the last forward.

The first backward cannot begin before one micro-batch has passed forward through all units, at t0; after the last
forward, one micro-batch passes backward through all units, which takes t1.  So devices do only forwards in the first
t0 and only backwards in the last t1, and time that these windows cannot fill is idle:

    devices x T >= work + recomputation + (idle time in the first t0) + (idle time in the last t1).

A linear program maximizes the work in the windows, and also chooses recomputation and CPU optimizer steps.  It relaxes
the order of operations, the assignment of units to devices, and the limits of single devices and links to their sums.
docs/notes/bounds.md has the proofs, also for optimizer steps after the pipeline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from debubble.costs import Units
from debubble.costs.unit import Unit
from debubble.ir import Number, StageCosts
from debubble.ir.arrays import Floats

ROUNDING = 1e-9
"""Fraction by which bounds are lowered, so that rounding errors never make them too large."""


@dataclass(frozen=True)
class Piece:
    """An indivisible piece of the model: a unit, or a fixed stage.

    Attributes:
        forward: Time of F.
        backward_input: Time of I.
        backward_weight: Time of W.
        static: Bytes of its states on the device.
        hosted: Bytes of them that stay there with a CPU optimizer; equal to `static` if it cannot have one.
        host_step: Time of a CPU optimizer step.
        after_input: Bytes that remain between I and W.
        strategies: Pairs of the bytes that F saves and the time to recompute the rest.
        optimizer: Time of its optimizer step on a device.
        gradient_offload: Time to copy its gradients to the host.
        host_states: Bytes on the host with a CPU optimizer.
        workspace: Bytes that its forward or backward needs while it runs.
        activation: Bytes that its backward reads, recomputed ones included.
    """

    forward: float
    backward_input: float
    backward_weight: float
    static: float
    hosted: float
    host_step: float
    after_input: float
    strategies: tuple[tuple[float, float], ...]
    optimizer: float = 0.0
    gradient_offload: float = 0.0
    host_states: float = 0.0
    workspace: float = 0.0
    activation: float = 0.0

    @property
    def work(self) -> float:
        """Time of F, I and W."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Pieces:
    """A relaxed problem: pieces in model order, the devices to assign them to, and the micro-batches.

    Attributes:
        pieces: The pieces.
        capacities: Per device, bytes for states and activations.
        micro_batches: Number of micro-batches, weighted by their lengths.
        communication: Shortest time of a message.
        bytes_per_second: Bandwidth of all host links together in one direction.
        workspace: Lower bound on the workspace bytes of all devices together.
        optimizer: Time of a stage's optimizer step on a device in addition to that of its units.
        host_memory: Bytes of all hosts for optimizer states, gradients, weights and activations.
    """

    pieces: tuple[Piece, ...]
    capacities: tuple[float, ...]
    micro_batches: float
    communication: float
    bytes_per_second: float
    workspace: float = 0.0
    optimizer: float = 0.0
    host_memory: float = math.inf


def pieces_of_units(units: Units, *, capacities: Sequence[float], micro_batches: float) -> Pieces:
    """The relaxed problem of a model's units."""
    return Pieces(
        pieces=tuple(
            _piece(unit, workspace=workspace, link=float(units.offload_bandwidth or 0) if units.hostable else 0.0)
            for unit, workspace in zip(units.units, _workspaces(units), strict=True)
        ),
        capacities=tuple(capacities),
        micro_batches=micro_batches,
        communication=float(units.min_communication),
        bytes_per_second=_links(len(capacities), units.link_groups)
        * float(units.offload_bandwidth or units.module_bandwidth or 0),
        workspace=_workspace(units, len(capacities)),
        optimizer=float(units.stage_entries.get("optimizer_step", 0)),
        host_memory=math.inf if units.host_memory is None else len(capacities) * float(units.host_memory),
    )


def _workspace(units: Units, devices: int) -> float:
    """A lower bound on the sum over devices of the largest workspace among their units.

    One device has the largest workspace of all units, and the k-th smallest of the other devices has at least the k-th
    smallest workspace.
    """
    workspaces = sorted(_workspaces(units))
    return sum(workspaces[: devices - 1]) + workspaces[-1]


def _workspaces(units: Units) -> list[float]:
    """Per unit, its smallest workspace over all types of devices."""
    return [min(float(unit.workspace) for unit in kinds) for kinds in zip(units.units, *units.on_devices, strict=True)]


def _piece(unit: Unit, *, workspace: float, link: float) -> Piece:
    """The piece of a unit, with a host link of `link` bytes per second; 0: no CPU optimizer."""
    strategies = {
        (float(min(s.activation, s.activation if s.after_full is None else s.after_full)), float(s.recompute))
        for s in unit.strategies.values()
    }
    host = unit.on_host if link else None
    after = unit.activation / 2 if unit.activation_after_input is None else unit.activation_after_input
    return Piece(
        forward=float(unit.forward),
        backward_input=float(unit.backward_input),
        backward_weight=float(unit.backward_weight),
        static=float(unit.static),
        hosted=float(unit.static if host is None else min(host.static, unit.static)),
        host_step=0.0 if host is None else float(host.step),
        after_input=float(after),
        strategies=tuple(sorted(strategies)),
        optimizer=float(unit.optimizer_step),
        gradient_offload=0.0 if host is None else float(host.gradients) / link,
        host_states=0.0 if host is None else float(host.gradients + host.parameters + _optimizer_bytes(unit)),
        workspace=workspace,
        activation=float(unit.activation),
    )


def _optimizer_bytes(unit: Unit) -> Number:
    """Bytes of its optimizer states; 0 if a units file does not state them."""
    return 0 if unit.states is None else unit.states.optimizer


def pieces_of_stages(costs: StageCosts, *, capacities: Sequence[float], micro_batches: float) -> Pieces:
    """The relaxed problem of fixed stages; `capacities` exclude their states."""
    transfers = costs.transfers
    bandwidth = 0.0
    if transfers is not None:
        rows = zip(costs.activation, transfers.offload, transfers.reload, strict=True)
        bandwidth = max((float(a) / float(t) if t else math.inf for a, *times in rows for t in times if a), default=0.0)
    levels = [(costs.activation_recomputed, costs.recompute)]
    if costs.activation_deeper is not None and costs.recompute_deeper is not None:
        levels.append((costs.activation_deeper, costs.recompute_deeper))
    return Pieces(
        pieces=tuple(
            Piece(
                forward=float(costs.forward[s]),
                backward_input=float(costs.backward_input[s]),
                backward_weight=float(costs.backward_weight[s]),
                static=0.0,
                hosted=0.0,
                host_step=0.0,
                after_input=float(costs.activation_after_input[s]),
                strategies=(
                    (float(costs.activation[s]), 0.0),
                    *((float(saved[s]), float(recompute[s])) for saved, recompute in levels),
                ),
            )
            for s in range(costs.stages)
        ),
        capacities=tuple(capacities),
        micro_batches=micro_batches,
        communication=float(min(costs.communication, default=0)),
        bytes_per_second=_links(len(capacities), costs.link_groups) * bandwidth if bandwidth else 0.0,
    )


def _links(devices: int, groups: Sequence[Sequence[int]]) -> int:
    """Number of links to the host: one per group, and one per device without a group."""
    return devices - sum(map(len, groups)) + len(groups)


def first_arrivals(a: Pieces) -> Floats:
    """Earliest times of the devices' first forwards, in the order in which the first micro-batch reaches the devices.

    The forwards of at least the first k pieces, and k messages, precede the first forward of device k.
    """
    number = np.arange(len(a.capacities))
    before = np.cumsum([0.0, *(piece.forward for piece in a.pieces)])
    arrivals: Floats = before[number] + a.communication * number
    return arrivals


@dataclass(frozen=True)
class FinishedUnits:
    """Units of which every device has one whose gradients are complete some time before the step ends.

    Attributes:
        time: Lower bound on the time from the complete gradients to the end.
        places: Sorted model indices of all units that they may be.
    """

    time: float
    places: tuple[int, ...]


def earliest_host_step(a: Pieces) -> float:
    """Earliest start of a CPU optimizer step: after all forwards, the last unit's backwards and a gradient offload."""
    m, last = a.micro_batches, a.pieces[-1]
    through = sum(piece.forward for piece in a.pieces) + (len(a.capacities) - 1) * a.communication
    forwards = m * sum(piece.forward for piece in a.pieces) / len(a.capacities)
    drain = min(piece.gradient_offload for piece in a.pieces)
    return max(forwards, through + (m - 1) * last.forward + m * last.backward_input) + drain


def ramps_bound(
    a: Pieces,
    *,
    known_bound: float = 0.0,
    after: float = 0.0,
    host_steps: float = 0.0,
    finished: FinishedUnits | None = None,
) -> float:
    """A lower bound from work, memory and links with the idle time of both ramps; 0 if memory or links are unlimited.

    Args:
        a: The relaxed problem.
        known_bound: A known lower bound on the makespan.
        after: Time of the optimizer after the pipeline if no stage steps inside it; makespan and optimizer are then
            bounded together.  0 bounds the makespan only.
        host_steps: Lower bound on the time of the CPU optimizer steps on some device.
        finished: Units that define the last window, instead of the CPU steps of an average device.
    """
    capacity = sum(a.capacities) - a.workspace
    if math.isinf(capacity) or math.isinf(a.bytes_per_second):
        return 0.0
    if capacity < sum(piece.hosted for piece in a.pieces) or math.isinf(host_steps):
        return math.inf
    # CPU steps begin after the last unit's input backwards and the offload of some gradients.
    drain = min(p.gradient_offload for p in a.pieces) if host_steps else 0.0
    shortest = host_steps + drain if finished is None else finished.time
    if finished is not None and shortest < _backward_ramp(a):
        return known_bound
    program = _RampsProgram(a, capacity=capacity, known_bound=known_bound, shortest=shortest, finished=finished)
    for piece, count in Counter(a.pieces).items():
        program.add(piece, count)
    return program.solve(after=after, drain=drain)


def _crossings(a: Pieces) -> float:
    """Time of the messages of one micro-batch through all devices."""
    return (len(a.capacities) - 1) * a.communication


def _backward_ramp(a: Pieces) -> float:
    """Time of one micro-batch's backward pass through all pieces."""
    return sum(p.backward_input for p in a.pieces) + a.pieces[0].backward_weight + _crossings(a)


class _RampsProgram:
    """The linear program of `ramps_bound`, to which pieces are added kind by kind.

    `first` and `last` are the lengths of the windows; bytes are scaled by a device's memory to similar magnitudes.
    """

    def __init__(
        self, a: Pieces, *, capacity: float, known_bound: float, shortest: float, finished: FinishedUnits | None
    ) -> None:
        from ortools.linear_solver import pywraplp

        self.a, self.known_bound, self.finished = a, known_bound, finished
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        self.optimal = pywraplp.Solver.OPTIMAL
        self.size = max([*a.capacities, 1.0])
        self.first = sum(p.forward for p in a.pieces) + _crossings(a)
        back = _backward_ramp(a)
        self.makespan = self._number(math.inf, known_bound)
        self.last = self._number(shortest if finished else math.inf, max(back, shortest))
        self.ends_before = shortest > back
        devices = len(a.capacities)
        # Units whose input backwards may be in the last window, and kinds of which a device has a finished one.
        self.shallower = Counter(a.pieces[: finished.places[-devices] if finished else len(a.pieces) - 1])
        self.equal_pieces = {a.pieces[place] for place in finished.places} if finished else set()
        self.on_host = self._number(a.host_memory / self.size)
        self.free: Any = (capacity - sum(piece.static for piece in a.pieces)) / self.size
        self.stepped_inside = self._number(_optimizer(a.pieces, a))
        self.hosted_bytes: list[Any] = [self.on_host]
        self.stepped: list[Any] = [self.stepped_inside]
        self.backwards: list[Any] = [self.stepped_inside]
        self.steps: list[Any] = []
        self.recomputed: list[Any] = []
        self.forwards: list[Any] = []
        self.saved_first: list[Any] = []
        self.saved_last: list[Any] = []
        self.unfinished: list[Any] = []

    def _number(self, maximum: float, minimum: float = 0.0) -> Any:
        return self.solver.NumVar(minimum, maximum, "")

    def add(self, piece: Piece, count: int) -> None:
        """Add equal pieces: variables for their CPU steps, their recomputation and their work in the windows."""
        solver, size, all_runs = self.solver, self.size, count * self.a.micro_batches
        on_cpu, waiting = self._number(count if piece.hosted < piece.static else 0), self._number(all_runs)
        self.free += on_cpu * ((piece.static - piece.hosted) / size)
        self.steps.append(on_cpu * piece.host_step)
        self.hosted_bytes.append(on_cpu * (piece.host_states / size))
        self.stepped.append(on_cpu * _optimizer([piece], self.a))
        self.saved_last.append(waiting * (piece.after_input / size))
        self.backwards.append(waiting * piece.backward_weight)
        all_chosen, late_inputs = [], []
        for saved, recompute in piece.strategies:
            chosen, early, late = (self._number(all_runs) for _ in range(3))
            solver.Add(early <= chosen)
            solver.Add(late <= chosen)
            all_chosen.append(chosen)
            late_inputs.append(late)
            self.recomputed.append(chosen * recompute)
            self.saved_first.append(early * (saved / size))
            self.forwards.append(early * piece.forward)
            self.saved_last.append(late * (saved / size))
            self.backwards.append(late * (piece.backward_input + piece.backward_weight + recompute))
        solver.Add(solver.Sum(all_chosen) == all_runs)
        solver.Add(solver.Sum([waiting, *late_inputs]) <= all_runs)
        if self.ends_before:
            solver.Add(solver.Sum(late_inputs) <= self.shallower[piece] * self.a.micro_batches)
        if piece in self.equal_pieces:
            self.unfinished += [waiting, *late_inputs]

    def solve(self, *, after: float, drain: float) -> float:
        """Add the limits of memory, links and idle time, and minimize makespan plus optimizer."""
        a, solver, devices = self.a, self.solver, len(self.a.capacities)
        makespan, last, bandwidth = self.makespan, self.last, a.bytes_per_second / self.size
        if self.ends_before:
            solver.Add(makespan - last >= earliest_host_step(a) - min(p.gradient_offload for p in a.pieces))
        if self.finished is None:
            solver.Add(devices * last >= solver.Sum(self.steps) + devices * drain)
        else:
            solver.Add(solver.Sum(self.unfinished) <= (len(self.finished.places) - devices) * a.micro_batches)
        solver.Add(solver.Sum(self.saved_first) <= self.free + bandwidth * self.first)
        solver.Add(solver.Sum(self.saved_last) <= self.free + self.on_host)
        solver.Add(self.on_host <= bandwidth * last)
        solver.Add(self.on_host <= bandwidth * (makespan - last))
        if math.isfinite(a.host_memory):
            solver.Add(solver.Sum(self.hosted_bytes) <= a.host_memory / self.size)
        idle_first = devices * self.first - solver.Sum(self.forwards)
        idle_last = devices * last - solver.Sum(self.backwards)
        solver.Add(idle_first >= float(first_arrivals(a).sum()))
        solver.Add(idle_last >= 0)
        work = a.micro_batches * sum(p.work for p in a.pieces) + solver.Sum(self.recomputed) + self.stepped_inside
        solver.Add(devices * makespan >= work + idle_first + idle_last)
        unstepped = self._number(1)
        if after:
            total = _optimizer(a.pieces, a) - a.optimizer * (len(a.pieces) - devices)
            solver.Add(total * unstepped >= total - solver.Sum(self.stepped))
        solver.Minimize(makespan + after * unstepped)
        if solver.Solve() != self.optimal:
            return self.known_bound
        return float(solver.Objective().Value()) * (1 - ROUNDING)


def _optimizer(pieces: Sequence[Piece], a: Pieces) -> float:
    """Time of the optimizer steps of these pieces on devices, one stage per piece."""
    return sum(piece.optimizer + a.optimizer for piece in pieces)
