"""Plans, searches and steps for tests of online scheduling, where the simulator replaces the machine."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch.optim import AdamW

import debubble as db
from debubble.ir import StageCosts
from debubble.ir.trace import TraceEvent, TraceStep
from debubble.plans import Plan
from debubble.training.online.controller import Controller, OnlineScheduler, Policy
from debubble.training.online.journal import Journal
from debubble.training.online.scheduler import BetterOrder, better_orders
from tests.support.runtime_cases import plan_of, run_threads, tokens_of
from tests.support.tiny_models import LLAMA

QUICK = Policy(settling=1, window=3)
STEPS = 7
"""Steps of a run on ranks, which has two windows of two steps."""
UNIT = StageCosts.of(stages=2, communication=0, activation=2, memory_limit=20)


def gpipe_plan(costs: Any = UNIT, *, micro_batches: int = 4, config: Any = LLAMA) -> Plan:
    schedule = db.schedules["gpipe"](devices=costs.stages, micro_batches=micro_batches)
    return plan_of(schedule, config, costs=costs, dtype="fp32")


def ordered(plan: Plan, schedule: str, **options: Any) -> Plan:
    """The same stages under a published schedule."""
    made = db.schedules[schedule](devices=plan.devices, micro_batches=plan.micro_batches, costs=plan.costs, **options)
    return replace(plan, schedule=made)


def traced(plan: Plan, costs: StageCosts) -> TraceStep:
    """A step of the plan's order on a machine with these costs."""
    operations = db.simulate(plan.schedule, costs).operations
    return TraceStep(
        step=0, events=tuple(TraceEvent(o.name, o.device, o.lane, float(o.start), float(o.end)) for o in operations)
    )


@dataclass
class Finished:
    """A search that is finished from the start."""

    plan: Plan
    orders: list[BetterOrder] = field(default_factory=list)
    failed: str | None = None
    closed: bool = False

    def newest(self) -> BetterOrder | None:
        return self.orders.pop() if self.orders else None

    def failure(self) -> str | None:
        return self.failed

    def close(self) -> None:
        self.closed = True


def solved(plan: Plan, steps_left: int = 0) -> Finished:
    """Result of the search for a plan."""
    return Finished(plan, list(better_orders(plan, effort=0.1, steps_left=steps_left))[-1:])


@dataclass
class Machine:
    """Takes steps of the controller's plans in their true time."""

    controller: Controller
    costs: StageCosts
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds per step by schedule name; other schedules take their simulated time."""
    step: int = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            running = self.controller.plan
            trace = traced(running, self.costs)
            self.controller.after_step(self.step, self.seconds.get(running.schedule.name, trace.makespan), trace)


def controlled(plan: Any, folder: Any, *, search: Any = solved, policy: Any = QUICK, **more: Any) -> Controller:
    journal = Journal(log=folder / "plan.online.jsonl", plan=folder / "plan.online.json")
    return Controller(plan, search=search, journal=journal, policy=policy, **more)


def trained(
    plan: Plan, *, controller: Controller | None = None, seconds: Any = lambda plan: 1.0, costs: Any = None
) -> Any:
    """Losses, plans by step, and parameters of a run on all ranks, online if there is a controller.

    `seconds` and `costs` (by default the plan's) of a step are functions of the running plan.
    """

    def one(pipeline: Any) -> Any:
        leads = pipeline.ranks.transport.rank == 0
        online = OnlineScheduler(pipeline, controller if leads else None) if controller else None
        losses, plans = [], []
        for step in range(STEPS):
            losses.append(pipeline.step(tokens_of(plan.model, rows=4, seed=step)).item())
            pipeline.optimizer_step(1.0)
            plans.append(running := pipeline.plan)
            if online is not None:
                taken = plan.costs if costs is None else costs(running)
                online.after_step(step + 1, seconds(running), traced(running, taken))
        return losses, plans, pipeline.state_dict()

    answers = run_threads(plan, one, optimizer=partial(AdamW, lr=0.01))
    assert all([p.schedule for p in plans] == [p.schedule for p in answers[0][1]] for _, plans, _ in answers)
    return answers[0][0], answers[0][1], {name: p for *_, state in answers for name, p in state.items()}


def events_of(controller: Any) -> Any:
    return [(entry.step, entry.event) for entry in controller.journal.entries]
