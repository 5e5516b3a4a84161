"""Explanation of a plan's step: throughput, memory by part, where the seconds go, what binds, and what to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from debubble.argument_types import with_checked_types
from debubble.costs import Cluster
from debubble.costs.analytical.model_units import dispatch_seconds
from debubble.costs.flops import Utilization
from debubble.costs.host_memory import host_peaks, offloaded_peaks
from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.formatting import size_words, time_words
from debubble.ir import InputError, Kind, Number
from debubble.ir.degrees import ConfigurationSummary, MemoryParts
from debubble.ir.stage_costs import limits_of
from debubble.models import Model
from debubble.planners.degrees.memory import parts_at_peak
from debubble.planners.degrees.simplest import levers_of
from debubble.planners.model_problem import framework_of_plan, tail_seconds, units_of_plan
from debubble.planners.plan_step import seconds_per_step
from debubble.plans import Plan
from debubble.simulator import Cause, Timeline, bubbles, plan_addresses

SECONDS_PER_DAY = 86400
REMARK_SHARE = 0.02
"""Share of a step from which a cause is worth naming as what binds."""
FULL_MEMORY_SHARE = 0.95
"""Share of the memory limit from which memory counts as full."""

FILLING = "filling and draining the pipeline"
ALL_TO_ALL = "all-to-all of experts"

ADVICE = {
    FILLING: "more micro-batches or fewer pipeline devices",
    "recomputation": "more memory",
    "host transfers": "more memory, or a faster link to the host,",
    "collectives": "faster links, or smaller tensor or context degrees,",
    ALL_TO_ALL: "faster links, or smaller expert degrees,",
    "messages": "faster links between pipeline devices",
    "transfer": "faster links",
    "dependency": "a better order of operations",
    "imbalance": "stages that divide more evenly",
    "optimizer on the host": "more memory, or a faster host,",
    "gradients": "faster links between replicas, or more micro-batches per step,",
    "optimizer": "ZeRO, or more micro-batches per step,",
}
"""Remedy for the cause that takes most of the step next to computing."""
GATHERS = "faster links, larger micro-batches, or a lower ZeRO level,"
"""Remedy for collectives that are gathers of divided parameters alone."""
SCATTERS = "faster links between replicas, larger micro-batches, or ZeRO-1,"
"""Remedy for gradients that ZeRO-2 divides after every micro-batch."""
OVERLAPPED_DISPATCH = (
    "faster links, smaller expert degrees, or kernels that overlap it (--framework NAME,dispatch_overlap=true),"
)
"""Remedy for all-to-all that the framework's kernels do not overlap with computing."""
FINER_RECOMPUTATION = "a finer choice of what recomputes (memory is not full), or more memory,"
"""Remedy for recomputation where memory is left: less than the next choice that recomputes less would take."""
DIVIDED_OPTIMIZER, HOST_OPTIMIZER = (
    "more micro-batches per step,",
    "more memory, a faster host, or more micro-batches per step,",
)
"""Remedies for an optimizer that ZeRO divides already or cannot divide, and for one on hosts."""
BOUNDED = ("collectives", ALL_TO_ALL, "gradients", "optimizer")
"""Causes next to computing that lower bounds of a step count too."""


def fullest_device(peaks: Sequence[Number], limits: Sequence[Number | None]) -> int:
    """The device with the least room below its limit; of devices without one, that with the highest peak."""
    free = [
        float("inf") if limit is None else float(limit) - float(peak) for peak, limit in zip(peaks, limits, strict=True)
    ]
    return min(range(len(peaks)), key=lambda device: (free[device], -float(peaks[device])))


@dataclass(frozen=True)
class CauseSeconds:
    """Seconds of a step that a cause takes, on average over the devices."""

    cause: str
    seconds: float


@dataclass(frozen=True, repr=False)
class Explanation:
    """Figures that explain a model's plan, by what it was predicted to do and the seconds of its whole step.

    Its text has a line for each cause of the step's seconds, one for the memory of the fullest device, and one for what
    binds (`causes`, `memory`, `binding`).
    """

    plan: Plan
    timeline: Timeline
    step_time: float
    model: Model
    """The plan's model."""
    cluster: Cluster
    """The plan's cluster."""

    def __repr__(self) -> str:
        parts = self.memory[self.fullest]
        names = ("weights", "gradients", "optimizer", "activations", "workspace")
        sizes = ", ".join(f"{name} {size_words(getattr(parts, name))}" for name in names)
        causes = [
            f"{each.cause}: {time_words(each.seconds, seconds=True)} ({100 * each.seconds / self.step_time:.1f}%)"
            for each in self.causes
        ]
        return "\n".join([*causes, f"memory of device {self.fullest}: {sizes}", self.binding])

    @property
    def tokens(self) -> int:
        """Tokens per step, without padding where micro-batches differ in length."""
        tokens = self.plan.tokens
        assert tokens is not None
        return tokens

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices together."""
        return self.tokens / self.step_time

    @property
    def tokens_per_second_per_device(self) -> float:
        """Tokens per second of all devices, divided by their number."""
        return self.tokens_per_second / self.plan.degrees.devices

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, a fraction; None: the devices' peak is not known."""
        run = Utilization.of_run(self.model, self.cluster, self.plan.options, devices=self.plan.ranks)
        return run.mfu(self.tokens_per_second)

    def days(self, tokens: float) -> float:
        """Days that training on so many tokens takes."""
        return tokens / self.tokens_per_second / SECONDS_PER_DAY

    @cached_property
    def units(self) -> Units:
        """The model's units as they were planned, without what a profile measured."""
        return self._units(self.cluster)

    @cached_property
    def memory(self) -> tuple[MemoryParts, ...]:
        """The parts of each device's memory at its peak, in bytes."""
        plan = self.plan
        partition = Partition.cut(self.units, map(len, plan.partition))
        return tuple(parts_at_peak(self.units, partition, plan.schedule, plan.costs, self.timeline.peak_memory))

    @property
    def configuration(self) -> ConfigurationSummary:
        """The plan as one choice of degrees, with its step, pace and memory."""
        plan, fullest = self.plan, self.memory[self.fullest]
        strategies = [[unit.strategy for unit in stage] for stage in plan.partition]
        return ConfigurationSummary(
            degrees=plan.degrees,
            step_time=self.step_time,
            tokens_per_second_per_device=self.tokens_per_second_per_device,
            mfu=self.mfu,
            peak_memory=fullest.total,
            memory=fullest,
            planner=plan.planner,
            schedule=plan.schedule.name,
            levers=tuple(levers_of(plan.degrees, plan.schedule, strategies, gathers=bool(plan.costs.gathers))),
        )

    @property
    def fullest(self) -> int:
        """The device with the least room left."""
        limits = [self.plan.costs.limit_of(device) for device in range(self.plan.devices)]
        return fullest_device(self.timeline.peak_memory, limits)

    @cached_property
    def fragmentation(self) -> float:
        """Bytes that an arena for the tensors of the fullest device needs beyond their peak."""
        [addresses] = plan_addresses(self.timeline, devices=[self.fullest])
        return float(addresses.fragmentation)

    @cached_property
    def host_memory(self) -> tuple[float, ...]:
        """The most that each pipeline device has on its host at a time, in bytes; its tensor-parallel rank alone."""
        partition = Partition.cut(self.units, map(len, self.plan.partition))
        return tuple(host_peaks(self.units, partition, self.timeline))

    @cached_property
    def host_activations(self) -> tuple[float, ...]:
        """The most bytes of activations among them, per pipeline device."""
        return tuple(map(float, offloaded_peaks(self.timeline)))

    @property
    def reserve(self) -> int:
        """Bytes that no plan may use of the fullest device, or of one with its limit."""
        limit = self.plan.costs.limit_of(self.fullest)
        own = zip(self.cluster.types, self.cluster.memory_limits, strict=True)
        return min((each.memory - most for each, most in own if most == limit), default=self.cluster.reserve)

    @cached_property
    def causes(self) -> tuple[CauseSeconds, ...]:
        """The seconds of a step by cause, on average over the devices, largest first; they sum to the step.

        Collectives are what units take more than with links of no latency and endless bandwidth.
        """
        devices, timeline = self.plan.devices, self.timeline
        optimizer = sum(float(o.duration) for lane in timeline.compute for o in lane if o.op.kind is Kind.S)
        recomputation, busy = float(sum(timeline.recompute)), float(sum(timeline.busy))
        micro_batches, zero = self.plan.schedule.micro_batches, self.plan.options.zero
        collectives = self._collectives(zero) * micro_batches
        # Of weights and gradients over the replicas, which ZeRO-2 and ZeRO-3 move with every micro-batch.
        divided = collectives - self._collectives(1) * micro_batches if zero > 1 else 0.0
        dispatch = min(self._dispatch * micro_batches, collectives - divided)
        gradients = divided if zero == 2 else 0.0
        seconds = {
            "compute": busy - recomputation - optimizer - collectives,
            "collectives": collectives - dispatch - gradients,
            ALL_TO_ALL: dispatch,
            "recomputation": recomputation,
            "gradients": gradients,
        }
        for idle in bubbles(timeline):
            for bubble in idle:
                cause = bubble.cause.value
                if bubble.cause is Cause.TRANSFER and bubble.awaited is not None:
                    cause = _TRANSFERS.get(bubble.awaited.op.kind, cause)
                seconds[cause] = seconds.get(cause, 0.0) + float(bubble.duration)
        mean = {cause: total / devices for cause, total in seconds.items()}
        reduced, stepped = self._tail
        mean["gradients"] += reduced
        mean["optimizer"] = optimizer / devices + stepped
        overlap = self.step_time - sum(mean.values())
        if overlap < -1e-9 * self.step_time:
            mean["overlap with the next step"] = overlap
        named = [CauseSeconds(cause, total) for cause, total in mean.items() if abs(total) > 1e-9 * self.step_time]
        return tuple(sorted(named, key=lambda each: -each.seconds))

    @property
    def binding(self) -> str:
        """A sentence that says what binds, and what would shorten it."""
        remedy = "" if self.advice is None else f", which {self._remedy(self._most.cause)} would shorten"
        return f"{self.shares}{remedy}; {self.memory_words}."

    @property
    def compute_share(self) -> float:
        """The share of the step that computing takes, a fraction."""
        return sum(each.seconds for each in self.causes if each.cause == "compute") / self.step_time

    @property
    def shares(self) -> str:
        """The clause that says what binds: the share of computing, and of what takes most next to it."""
        compute = self._percent(self.compute_share * self.step_time)
        if self.advice is None:
            return f"Computing binds: it takes {compute} of the step"
        return f"Computing takes {compute} of the step, {self._most.cause} {self._percent(self._most.seconds)}"

    @property
    def most(self) -> str:
        """The cause next to computing that takes most of the step, with its share."""
        return f"{self._most.cause} ({self._percent(self._most.seconds)} of the step)"

    @property
    def memory_words(self) -> str:
        """The clause that says how full memory is."""
        limit, peak = self._limits[self.fullest], float(self.timeline.peak_memory[self.fullest])
        full = "exceeded" if peak > limit else "full" if self._is_full else "not full"
        return f"memory is {full} ({100 * peak / limit:.0f}%)"

    @property
    def advice(self) -> str | None:
        """The remedy of the cause that takes most next to computing; None where all take hardly any time."""
        if self._most.seconds < REMARK_SHARE * self.step_time:
            return None
        return self._remedy(self._most.cause).removesuffix(",")

    def _remedy(self, cause: str) -> str:
        """The remedy of a cause that the plan does not have already, such as degrees of 1 or ZeRO."""
        o = self.plan.options
        if cause == "recomputation" and not self._is_full:
            return FINER_RECOMPUTATION
        if cause == "optimizer" and o.host_optimizer:
            return HOST_OPTIMIZER
        if cause == "optimizer" and (o.zero or o.data == 1):
            return DIVIDED_OPTIMIZER
        if cause == "collectives" and o.tensor == o.context == 1:
            return GATHERS if o.zero == 3 else "faster links,"
        if cause == "gradients" and o.zero == 2:
            return SCATTERS
        if cause == ALL_TO_ALL and not framework_of_plan(self.plan).dispatch_overlap:
            return OVERLAPPED_DISPATCH
        if cause == "optimizer on the host" and o.zero == 0 and o.data * o.context > 1:
            return f"ZeRO, {ADVICE[cause]}"
        return ADVICE[cause]

    @property
    def _is_full(self) -> bool:
        """True if the fullest device has hardly any memory left."""
        return float(self.timeline.peak_memory[self.fullest]) > FULL_MEMORY_SHARE * self._limits[self.fullest]

    @property
    def at_stake(self) -> tuple[str, ...]:
        """Sentences that say how much of the step the advice is about, and what else takes a noticeable share."""
        if self.advice is None:
            return ("All else takes too little of the step for another plan to help.",)
        first, *others = (each for each in self._improvable if each.seconds >= REMARK_SHARE * self.step_time)
        said = [f"{self._remedy(c.cause).removesuffix(',')} ({c.cause}: {self._percent(c.seconds)})" for c in others]
        then = (f"Then {'; '.join(said)}.",) if said else ()
        return (f"At stake is what {first.cause} takes: about {self._percent(first.seconds)} of the step.", *then)

    @property
    def losses(self) -> tuple[str, ...]:
        """The causes with a noticeable share of the step that no lower bound counts, largest first."""
        noticeable = (
            each
            for each in self._improvable
            if each.seconds >= REMARK_SHARE * self.step_time and each.cause not in BOUNDED
        )
        return tuple(f"{each.cause} ({self._percent(each.seconds)} of the step)" for each in noticeable)

    @property
    def _most(self) -> CauseSeconds:
        """The cause that takes most next to computing."""
        return self._improvable[0]

    @property
    def _improvable(self) -> list[CauseSeconds]:
        """The causes next to computing, largest first; filling and draining the pipeline count as one."""
        seconds = {each.cause: each.seconds for each in self.causes}
        filling = seconds.pop("warm-up", 0.0) + seconds.pop("cool-down", 0.0)
        others = {cause: seconds[cause] for cause in seconds.keys() & ADVICE.keys()} | {FILLING: filling}
        return sorted((CauseSeconds(*each) for each in others.items()), key=lambda each: (-each.seconds, each.cause))

    def _percent(self, seconds: float) -> str:
        return f"{100 * seconds / self.step_time:.1f}%"

    @property
    def _limits(self) -> list[float]:
        return limits_of(self.plan.costs.memory_limit, self.plan.devices)

    def _units(self, cluster: Cluster, *, zero: int | None = None) -> Units:
        units = units_of_plan(self.plan, self.model, cluster, zero=zero)
        if len(units.units) != sum(map(len, self.plan.partition)):
            raise InputError("The plan's partition does not list the units of its model: make the plan again.")
        return units

    @property
    def _free_links(self) -> Cluster:
        """The cluster with links that take no time."""
        links = dict.fromkeys(("link_bandwidth", "network_bandwidth"), ENDLESS)
        latencies = dict.fromkeys(("link_latency", "network_latency"), NO_LATENCY)
        return Cluster.from_dict({**self.cluster.to_dict(), **links, **latencies})

    def _collectives(self, zero: int) -> float:
        """Seconds per micro-batch that collectives within units take at a ZeRO level, over all pipeline devices."""
        there, free = (self._units(cluster, zero=zero) for cluster in (self.cluster, self._free_links))
        return float(there.work) - float(free.work)

    @property
    def _dispatch(self) -> float:
        """Seconds per micro-batch in which tokens travel to experts and back, over all pipeline devices."""
        if self.plan.options.expert == 1:
            return 0.0
        there, free = (
            dispatch_seconds(
                self.model, cluster, self.plan.options, pipeline=self.plan.devices,
                framework=framework_of_plan(self.plan),
            )
            for cluster in (self.cluster, self._free_links)
        )  # fmt: skip
        return there - free

    @property
    def _tail(self) -> tuple[float, float]:
        """Seconds after the pipeline: of gradients and weights over the replicas, and of the optimizer."""
        stepped = tail_seconds(self.plan, self.model, self._free_links)
        return tail_seconds(self.plan, self.model, self.cluster) - stepped, stepped


ENDLESS, NO_LATENCY = 1e18, 1e-12
"""Bytes per second and seconds of a link that takes no time."""

_TRANSFERS = {
    **dict.fromkeys((Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B), "messages"),
    **dict.fromkeys((Kind.O, Kind.L), "host transfers"),
    Kind.G: "gradients",
}
"""Words for a wait for a transfer, by its kind."""


def explanation(plan: Plan, timeline: Timeline, step_time: float) -> Explanation | None:
    """The explanation of a model's plan; None for a plan of abstract costs."""
    described = plan.model_on_cluster
    return None if described is None else Explanation(plan, timeline, step_time, *described)


@with_checked_types()
def explain(plan: Plan) -> Explanation | None:
    """Explain the parts of a plan's step and memory, and what binds it; None for a plan of abstract costs.

    Args:
        plan: The plan.

    Example:
        >>> plan = db.plan("llama-tiny", "2xA100-80GB", micro_batches=8, planner="dapple")
        >>> [cause.cause for cause in db.explain(plan).causes][:3]
        ['compute', 'cool-down', 'warm-up']
    """
    timeline = plan.simulate()
    return explanation(plan, timeline, seconds_per_step(plan, timeline))
