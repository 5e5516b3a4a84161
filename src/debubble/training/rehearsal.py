"""Rehearsal of a plan: real processes, program and messages, with compute replaced by sleeping.

Messages have the real size; every operation that computes or moves memory sleeps for its planned time.  Differences
from the simulation are then caused by the processes and links.
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

_TIME_FIELDS = (
    "forward", "backward_input", "backward_weight", "recompute", "communication", "offload", "reload",
    "optimizer_step", "host_step", "gradient_offload", "parameter_load", "gradient_reduce", "parameter_gather",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RehearsalOptions:
    """Options of a rehearsal, the same on every rank."""

    plan: Path
    steps: int = 5
    scale: float = 1.0
    """Seconds per unit of the plan's time."""
    trace: Path | None = None
    html: Path | None = None
    json: bool = False


def scaled(plan: Plan, scale: float) -> Plan:
    """The plan with all times multiplied by a factor."""
    planned = {name: getattr(plan.costs, name) for name in _TIME_FIELDS}
    times = {name: [scale * t for t in values] for name, values in planned.items() if values is not None}
    changed: StageCosts = plan.costs.replace(**times)
    return replace(plan, costs=changed)


def rehearse(plan: Plan, *, steps: int, transport: Transport) -> Trace:
    """Run the plan's program for some steps, as this rank.  Every rank gets the trace of all ranks."""
    program = lower(plan.schedule, plan.costs)
    transport.open(message_channels(program), [])
    operations = SleepingOperations.for_rank(program, transport)
    interpreter = Interpreter(operations)
    traces: list[Trace] = []
    for step in range(steps):
        origin = max(transport.gather(time.perf_counter()))
        executed = interpreter.run(messages(plan))
        events = trace_events(executed, operations.lanes, device=transport.rank, origin=origin)
        local = Trace(devices=plan.devices, steps=(TraceStep(step=step, events=events),))
        traces.append(Trace.join([Trace.from_json(trace) for trace in transport.gather(local.to_json())]))
    return Trace(devices=plan.devices, steps=tuple(step for trace in traces for step in trace.steps))


def messages(plan: Plan) -> StepState:
    """The state of a step with messages of the real size, or of one number if the plan has no model."""
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
    """Operations that send real messages, and otherwise sleep for the planned time."""

    @classmethod
    def for_rank(cls, program: Program, transport: Transport) -> SleepingOperations:
        """The operations of one rank, in a pipeline with one rank per device."""
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
        """Sleep, receive the input of a forward or backward, and send its output; transfer offloads to peers."""
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
        """The time before its end at which a forward's offload, or the reader of a reload, may start."""
        _, stage, j = op
        alongside = op._replace(kind=Kind.O if op.kind is Kind.F else Kind.R)
        if alongside not in self.program.index:
            alongside = self.program.schedule.backward_of(stage, j)
        return self.program.instructions[self.program.index[alongside]].lead

    def allocate_reload(self, reload: Op) -> None:
        """Do nothing: reloads have no data."""

    def stash_gradients(self, op: Op) -> None:
        """Do nothing: there are no gradients."""


def main(argument: str) -> None:
    """Rehearse as one rank, with Gloo; rank 0 prints the comparison."""
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
