"""A plan on the real processes, program and messages, with sleeping compute: what it costs to find out what waits.

Tensors of the real size travel between the ranks; every operation that computes or moves memory sleeps for as long as
the plan says.  What then differs from the simulation is the processes' and the links' doing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from debubble.ir import Instruction, Kind, Number, Op, Program, StageCosts, Trace, lower
from debubble.ir.trace import TraceStep
from debubble.plans import Plan
from debubble.runtime.assembly import DTYPES
from debubble.runtime.distributed.transport import DistributedTransport, Transport
from debubble.runtime.execution.interpreter import Interpreter
from debubble.runtime.execution.lanes import CpuLanes
from debubble.runtime.execution.operations import Execute, Operations, StepState
from debubble.runtime.execution.peer_offload import message_channels
from debubble.runtime.execution.synchronization import trace_events
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.stage import UnitDone

_TIMES = (
    "forward", "backward_input", "backward_weight", "recompute", "communication", "offload", "reload",
    "optimizer_step", "host_step", "gradient_offload", "parameter_load", "gradient_reduce", "parameter_gather",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RehearsalOptions:
    """Options of a rehearsal, the same on every rank."""

    plan: Path
    steps: int = 5
    scale: float = 1.0
    """Seconds that one unit of the plan's time takes."""
    trace: Path | None = None
    html: Path | None = None
    json: bool = False


def scaled(plan: Plan, scale: float) -> Plan:
    """The plan with all times multiplied."""
    planned = {name: getattr(plan.costs, name) for name in _TIMES}
    times = {name: [scale * t for t in values] for name, values in planned.items() if values is not None}
    changed: StageCosts = plan.costs.replace(**times)
    return replace(plan, costs=changed)


def rehearse(plan: Plan, *, steps: int, transport: Transport) -> Trace:
    """Run the plan's program that often, as this rank.  Every rank gets the whole trace."""
    program = lower(plan.schedule, plan.costs)
    transport.open(message_channels(program), [])
    operations = SleepingOperations.of(program, transport)
    interpreter = Interpreter(operations)
    parts: list[Trace] = []
    for step in range(steps):
        origin = max(transport.gather(time.perf_counter()))
        executed = interpreter.run(messages(plan))
        events = trace_events(executed, operations.lanes, device=transport.rank, origin=origin)
        mine = Trace(devices=plan.devices, steps=(TraceStep(step=step, events=events),))
        parts.append(Trace.join([Trace.from_json(part) for part in transport.gather(mine.to_json())]))
    return Trace(devices=plan.devices, steps=tuple(step for part in parts for step in part.steps))


def messages(plan: Plan) -> StepState:
    """Messages of the real size; a number each where the plan has no model."""
    o = plan.options
    shapes: list[tuple[int, ...]] = [(1,)] * plan.schedule.slices
    if plan.model is not None:
        shapes = [(o.micro_batch_size, tokens, plan.model.hidden) for tokens in plan.slice_tokens(o.sequence_length)]
    return StepState(
        tokens=[],
        micro_batches=[],
        boundary=shapes * plan.micro_batches,
        dtype=DTYPES[o.dtype],
        step_stage=lambda stage: None,
    )


@dataclass
class SleepingOperations(Operations):
    """Messages alone: everything else sleeps for as long as the plan says."""

    @classmethod
    def of(cls, program: Program, transport: Transport) -> SleepingOperations:
        """The operations of one rank, in a pipeline whose devices are the ranks."""
        return cls(
            program=program,
            device=transport.rank,
            transport=transport,
            rank_of={device: device for device in range(program.devices)},
            lanes=CpuLanes(),
            messages=Ledger(torch.device("cpu")),
        )

    def prepare_local(self, instruction: Instruction) -> Execute:
        """The function that sleeps in place of the instruction."""
        return partial(self._sleep, instruction)

    def _sleep(self, instruction: Instruction, state: StepState, unit_done: UnitDone | None) -> None:
        """Sleep, take the input of a forward or backward, and hand on its output; move what goes to a peer."""
        op, stages = instruction.op, self.program.schedule.stages
        to_peer = self.peer_offload.host is not None
        if op.kind is Kind.O and to_peer:
            schedule, costs, j = self.program.schedule, self.program.costs, op.micro_batch
            size = round(schedule.moved_bytes(costs, op.stage, j) * costs.scale_of(j))
            self.peer_offload.send(op, self.peer_offload.buffer(size))
            return
        if op.kind is Kind.L and to_peer:
            self.peer_offload.fetch(op)
            return
        alongside = 0 if unit_done is None else self._lead_with(op)
        time.sleep(max(0.0, float(instruction.duration - alongside)))
        if unit_done is not None:
            unit_done()
            time.sleep(float(alongside))
        if op.kind not in (Kind.F, Kind.B, Kind.I):
            return
        first, last = (0, stages - 1) if op.kind is Kind.F else (stages - 1, 0)
        if op.stage != first:
            self.take_input(op, state)
        if op.stage != last:
            self.pass_on(self.recipient(op), torch.empty(state.boundary[op.micro_batch], dtype=state.dtype), state)

    def _lead_with(self, op: Op) -> Number:
        """The time before its end from which on a forward's offload, or what reads a reload, may run next to it."""
        _, stage, j = op
        alongside = op._replace(kind=Kind.O if op.kind is Kind.F else Kind.R)
        if alongside not in self.program.index:
            alongside = self.program.schedule.backward_of(stage, j)
        return self.program.instructions[self.program.index[alongside]].lead

    def allocate_reload(self, reload: Op) -> None:
        """Do nothing: reloads bring nothing."""

    def stash_gradients(self, op: Op) -> None:
        """Do nothing: there are no gradients."""


def main(argument: str) -> None:
    """Rehearse as one rank, on Gloo; rank 0 prints the comparison."""
    from debubble.runtime.launch.launcher import decode_options, open_process_group
    from debubble.training.monitoring.report import compare_timelines, print_comparison

    options = decode_options(argument, RehearsalOptions)
    plan = scaled(Plan.load(options.plan), options.scale)
    open_process_group("gloo")
    trace = rehearse(plan, steps=options.steps, transport=DistributedTransport())
    if dist.get_rank() == 0:
        if options.trace is not None:
            trace.save(options.trace)
        print_comparison(compare_timelines(plan, trace, html=options.html), json=options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    from debubble.runtime.launch.launcher import run_rank

    run_rank(main)
