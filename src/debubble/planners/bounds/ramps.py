"""A relaxation that every plan satisfies: memory is short in the ramps, before the first backward and at the end.

The first backward cannot begin before one micro-batch went forward through all units, at t0; after the last
forward a micro-batch goes back through all units, which takes t1.  So in the first t0 devices only do forwards, in the
last t1 only backwards, and what these windows cannot fill is idle time:

    devices x T >= work + recomputation + (idle time in the first t0) + (idle time in the last t1).

How much fits into them is a linear program, which also chooses what recomputes and whose optimizer states are the
host's.  It abandons the order of operations, who holds which unit, and all but the sums of memory and of links.
docs/notes/bounds.md has the proofs, what is stepped after the pipeline included.
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
"""Share by which a bound is lowered, so that rounding never lifts it above the time that it bounds."""


@dataclass(frozen=True)
class Piece:
    """A piece of work that devices cannot divide: a unit, or a given stage.

    Attributes:
        forward: Time of F.
        backward_input: Time of I.
        backward_weight: Time of W.
        static: Bytes of its states where they are on the device.
        hosted: Bytes of them that stay there if the host steps; as many as `static` if it cannot.
        host_step: Time of a step on the host.
        after_input: Bytes that remain between I and W.
        strategies: Bytes that F keeps, and the time to bring the rest back.
        optimizer: Time of its optimizer step on a device.
        gradient_offload: Time in which its gradients go to the host.
        host_states: Bytes on the host if it steps there.
        workspace: Bytes that its forward or backward needs while it runs.
        activation: Bytes that its backward reads, with what has been recomputed.
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
    """Pieces in model order, the devices that they are assigned to, and their micro-batches.

    Attributes:
        pieces: The pieces.
        rooms: Per device, bytes for states and activations.
        micro_batches: Micro-batches, counted by their length.
        communication: Least time of a message.
        bytes_per_second: What all links to hosts carry together in one direction.
        workspace: Least bytes that all devices together hold next to states and activations, for the units at work.
        optimizer: Time that every stage's optimizer step takes on a device next to that of its units.
        host_memory: Bytes of all hosts for optimizer states, gradients, weights and activations.
    """

    pieces: tuple[Piece, ...]
    rooms: tuple[float, ...]
    micro_batches: float
    communication: float
    bytes_per_second: float
    workspace: float = 0.0
    optimizer: float = 0.0
    host_memory: float = math.inf


def pieces_of_units(units: Units, *, rooms: Sequence[float], micro_batches: float) -> Pieces:
    """The units of a model, as they may be assigned to devices."""
    return Pieces(
        pieces=tuple(
            _piece(unit, workspace=workspace, link=float(units.offload_bandwidth or 0) if units.hostable else 0.0)
            for unit, workspace in zip(units.units, _workspaces(units), strict=True)
        ),
        rooms=tuple(rooms),
        micro_batches=micro_batches,
        communication=float(units.min_communication),
        bytes_per_second=_links(len(rooms), units.link_groups)
        * float(units.offload_bandwidth or units.module_bandwidth or 0),
        workspace=_workspace(units, len(rooms)),
        optimizer=float(units.stage_entries.get("optimizer_step", 0)),
        host_memory=math.inf if units.host_memory is None else len(rooms) * float(units.host_memory),
    )


def _workspace(units: Units, devices: int) -> float:
    """The least sum over devices of the largest workspace among their units.

    One device has the unit with the largest; of the others, the k with the least hold at least k units within it.
    """
    each = sorted(_workspaces(units))
    return sum(each[: devices - 1]) + each[-1]


def _workspaces(units: Units) -> list[float]:
    """The least workspace of every unit, of those on all types of devices."""
    return [min(float(unit.workspace) for unit in kinds) for kinds in zip(units.units, *units.on_devices, strict=True)]


def _piece(unit: Unit, *, workspace: float, link: float) -> Piece:
    """A unit whose gradients can go to the host over a link of so many bytes per second; 0: they cannot."""
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
    """Bytes of its optimizer states, as far as a units file says them."""
    return 0 if unit.states is None else unit.states.optimizer


def pieces_of_stages(costs: StageCosts, *, rooms: Sequence[float], micro_batches: float) -> Pieces:
    """Stages that are given, as they may be assigned to devices; their states are in the devices' rooms."""
    transfers = costs.transfers
    pace = 0.0
    if transfers is not None:
        each = zip(costs.activation, transfers.offload, transfers.reload, strict=True)
        pace = max((float(a) / float(t) if t else math.inf for a, *times in each for t in times if a), default=0.0)
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
                    *((float(kept[s]), float(again[s])) for kept, again in levels),
                ),
            )
            for s in range(costs.stages)
        ),
        rooms=tuple(rooms),
        micro_batches=micro_batches,
        communication=float(min(costs.communication, default=0)),
        bytes_per_second=_links(len(rooms), costs.link_groups) * pace if pace else 0.0,
    )


def _links(devices: int, groups: Sequence[Sequence[int]]) -> int:
    """Links to the host: one per group, and one per device that is in none."""
    return devices - sum(map(len, groups)) + len(groups)


def first_arrivals(a: Pieces) -> Floats:
    """Earliest times of the devices' first forwards, in order: one micro-batch comes to them one after the other.

    Device k in this order holds none of the first k pieces alone, and k messages were sent before.
    """
    number = np.arange(len(a.rooms))
    before = np.cumsum([0.0, *(piece.forward for piece in a.pieces)])
    arrivals: Floats = before[number] + a.communication * number
    return arrivals


@dataclass(frozen=True)
class FinishedUnits:
    """Units of which every device has one whose gradients are complete some time before the step ends.

    Attributes:
        time: The time from then to the end, at least.
        places: All units that they may be, by place in the model, in order.
    """

    time: float
    places: tuple[int, ...]


def earliest_host_step(a: Pieces) -> float:
    """Earliest start of a CPU optimizer step: after all forwards, the last unit's backwards, and a drain."""
    m, last = a.micro_batches, a.pieces[-1]
    through = sum(piece.forward for piece in a.pieces) + (len(a.rooms) - 1) * a.communication
    forwards = m * sum(piece.forward for piece in a.pieces) / len(a.rooms)
    drained = min(piece.gradient_offload for piece in a.pieces)
    return max(forwards, through + (m - 1) * last.forward + m * last.backward_input) + drained


def ramps_bound(
    a: Pieces,
    *,
    least: float = 0.0,
    after: float = 0.0,
    host_steps: float = 0.0,
    finished: FinishedUnits | None = None,
) -> float:
    """The least time that work, memory and links leave, counting the idle time of both ramps; 0 without a limit.

    Args:
        a: The pieces.
        least: A makespan that no plan beats for other reasons.
        after: Time of the optimizer after the pipeline if no stage is stepped inside, which is bounded with the
            makespan; 0 bounds the makespan alone.
        host_steps: Time of the CPU optimizer steps on some device, at least.
        finished: The last window is that of these units, and not that of the CPU steps of an average device.
    """
    capacity = sum(a.rooms) - a.workspace
    if math.isinf(capacity) or math.isinf(a.bytes_per_second):
        return 0.0
    if capacity < sum(piece.hosted for piece in a.pieces) or math.isinf(host_steps):
        return math.inf
    # With hosts, the last unit's backwards for inputs are over, and some gradients have left, before their first step.
    drained = min(p.gradient_offload for p in a.pieces) if host_steps else 0.0
    shortest = host_steps + drained if finished is None else finished.time
    if finished is not None and shortest < _backward_ramp(a):
        return least
    program = _RampsProgram(a, capacity=capacity, least=least, shortest=shortest, finished=finished)
    for piece, count in Counter(a.pieces).items():
        program.add(piece, count)
    return program.solve(after=after, drained=drained)


def _crossings(a: Pieces) -> float:
    """Time of the messages that one micro-batch sends through all devices."""
    return (len(a.rooms) - 1) * a.communication


def _backward_ramp(a: Pieces) -> float:
    """Time in which one micro-batch goes back through all pieces."""
    return sum(p.backward_input for p in a.pieces) + a.pieces[0].backward_weight + _crossings(a)


class _RampsProgram:
    """The linear program of `ramps_bound`, to which pieces are added kind by kind.

    The first window is `first` long and the last one `last`; bytes are counted in a device's memory, so that the
    program's numbers are of one magnitude.
    """

    def __init__(
        self, a: Pieces, *, capacity: float, least: float, shortest: float, finished: FinishedUnits | None
    ) -> None:
        from ortools.linear_solver import pywraplp

        self.a, self.least, self.finished = a, least, finished
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        self.optimal = pywraplp.Solver.OPTIMAL
        self.size = max([*a.rooms, 1.0])
        self.first = sum(p.forward for p in a.pieces) + _crossings(a)
        back = _backward_ramp(a)
        self.makespan = self._number(math.inf, least)
        self.last = self._number(shortest if finished else math.inf, max(back, shortest))
        self.ends_before = shortest > back
        devices = len(a.rooms)
        # Units whose backwards for inputs may be in the last window, and those of which a device has a finished one.
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
        self.kept_first: list[Any] = []
        self.kept_last: list[Any] = []
        self.unfinished: list[Any] = []

    def _number(self, most: float, least: float = 0.0) -> Any:
        return self.solver.NumVar(least, most, "")

    def add(self, piece: Piece, count: int) -> None:
        """Add so many equal pieces: how many the hosts step, how they recompute, and what of them is in the windows."""
        solver, size, all_runs = self.solver, self.size, count * self.a.micro_batches
        on_hosts, waiting = self._number(count if piece.hosted < piece.static else 0), self._number(all_runs)
        self.free += on_hosts * ((piece.static - piece.hosted) / size)
        self.steps.append(on_hosts * piece.host_step)
        self.hosted_bytes.append(on_hosts * (piece.host_states / size))
        self.stepped.append(on_hosts * _optimizer([piece], self.a))
        self.kept_last.append(waiting * (piece.after_input / size))
        self.backwards.append(waiting * piece.backward_weight)
        whole, late_inputs = [], []
        for kept, again in piece.strategies:
            chosen, early, late = (self._number(all_runs) for _ in range(3))
            solver.Add(early <= chosen)
            solver.Add(late <= chosen)
            whole.append(chosen)
            late_inputs.append(late)
            self.recomputed.append(chosen * again)
            self.kept_first.append(early * (kept / size))
            self.forwards.append(early * piece.forward)
            self.kept_last.append(late * (kept / size))
            self.backwards.append(late * (piece.backward_input + piece.backward_weight + again))
        solver.Add(solver.Sum(whole) == all_runs)
        solver.Add(solver.Sum([waiting, *late_inputs]) <= all_runs)
        if self.ends_before:
            solver.Add(solver.Sum(late_inputs) <= self.shallower[piece] * self.a.micro_batches)
        if piece in self.equal_pieces:
            self.unfinished += [waiting, *late_inputs]

    def solve(self, *, after: float, drained: float) -> float:
        """Bound memory, links and idle time in the windows, and minimize makespan and optimizer."""
        a, solver, devices = self.a, self.solver, len(self.a.rooms)
        makespan, last, pace = self.makespan, self.last, a.bytes_per_second / self.size
        if self.ends_before:
            solver.Add(makespan - last >= earliest_host_step(a) - min(p.gradient_offload for p in a.pieces))
        if self.finished is None:
            solver.Add(devices * last >= solver.Sum(self.steps) + devices * drained)
        else:
            solver.Add(solver.Sum(self.unfinished) <= (len(self.finished.places) - devices) * a.micro_batches)
        solver.Add(solver.Sum(self.kept_first) <= self.free + pace * self.first)
        solver.Add(solver.Sum(self.kept_last) <= self.free + self.on_host)
        solver.Add(self.on_host <= pace * last)
        solver.Add(self.on_host <= pace * (makespan - last))
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
            most = _optimizer(a.pieces, a) - a.optimizer * (len(a.pieces) - devices)
            solver.Add(most * unstepped >= most - solver.Sum(self.stepped))
        solver.Minimize(makespan + after * unstepped)
        if solver.Solve() != self.optimal:
            return self.least
        return float(solver.Objective().Value()) * (1 - ROUNDING)


def _optimizer(pieces: Sequence[Piece], a: Pieces) -> float:
    """Time of the optimizer steps of some pieces on devices, each of which is a stage."""
    return sum(piece.optimizer + a.optimizer for piece in pieces)
