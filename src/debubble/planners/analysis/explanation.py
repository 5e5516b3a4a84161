"""Explanation of a plan's step: throughput, memory by part, time by cause, the limiting cause and its remedy."""

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
"""Smallest fraction of a step for which a cause is reported as limiting."""
FULL_MEMORY_SHARE = 0.95
"""Smallest fraction of the memory limit at which memory counts as full."""

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
"""Remedies by cause, for the largest cause after compute."""
GATHER_REMEDY = "faster links, larger micro-batches, or a lower ZeRO level,"
"""Remedy for collectives that consist only of ZeRO-3 parameter gathers."""
SCATTER_REMEDY = "faster links between replicas, larger micro-batches, or ZeRO-1,"
"""Remedy for gradients that ZeRO-2 reduce-scatters after every micro-batch."""
DISPATCH_REMEDY = (
    "faster links, smaller expert degrees, or kernels that overlap it (--framework NAME,dispatch_overlap=true),"
)
"""Remedy for all-to-all that the framework's kernels do not overlap with compute."""
RECOMPUTATION_REMEDY = "a finer choice of what recomputes (memory is not full), or more memory,"
"""Remedy for recomputation if memory is not full but too small for the next choice with less recomputation."""
OPTIMIZER_REMEDY, HOST_OPTIMIZER_REMEDY = (
    "more micro-batches per step,",
    "more memory, a faster host, or more micro-batches per step,",
)
"""Remedies for an optimizer that ZeRO already shards or cannot shard, and for one on hosts."""
BOUNDED_CAUSES = ("collectives", ALL_TO_ALL, "gradients", "optimizer")
"""Causes after compute that lower bounds of a step include."""


def fullest_device(peaks: Sequence[Number], limits: Sequence[Number | None]) -> int:
    """The device with the least free memory below its limit; without limits, the one with the highest peak."""
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
    """Figures that explain the predicted step of a model's plan.

    As text it has a line per cause of the step's time, one for the fullest device's memory, and one for the limiting
    cause (`causes`, `memory`, `binding`).
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
            f"{c.cause}: {time_words(c.seconds, seconds=True)} ({100 * c.seconds / self.step_time:.1f}%)"
            for c in self.causes
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
        """Tokens per second of all devices."""
        return self.tokens / self.step_time

    @property
    def tokens_per_second_per_device(self) -> float:
        """Tokens per second, per device."""
        return self.tokens_per_second / self.plan.degrees.devices

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, a fraction; None if the devices' peak is unknown."""
        run = Utilization.of_run(self.model, self.cluster, self.plan.options, devices=self.plan.ranks)
        return run.mfu(self.tokens_per_second)

    def days(self, tokens: float) -> float:
        """Days of training for a number of tokens."""
        return tokens / self.tokens_per_second / SECONDS_PER_DAY

    @cached_property
    def units(self) -> Units:
        """The model's units with computed costs, also if the plan used a profile."""
        return self._units(self.cluster)

    @cached_property
    def memory(self) -> tuple[MemoryParts, ...]:
        """The parts of each device's memory at its peak, in bytes."""
        plan = self.plan
        partition = Partition.cut(self.units, map(len, plan.partition))
        return tuple(parts_at_peak(self.units, partition, plan.schedule, plan.costs, self.timeline.peak_memory))

    @property
    def configuration(self) -> ConfigurationSummary:
        """The plan as a choice of degrees, with its step, throughput and memory."""
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
        """The device with the least free memory."""
        limits = [self.plan.costs.limit_of(device) for device in range(self.plan.devices)]
        return fullest_device(self.timeline.peak_memory, limits)

    @cached_property
    def fragmentation(self) -> float:
        """Bytes beyond the peak that an arena for the fullest device's tensors needs."""
        [addresses] = plan_addresses(self.timeline, devices=[self.fullest])
        return float(addresses.fragmentation)

    @cached_property
    def host_memory(self) -> tuple[float, ...]:
        """Peak host memory of each pipeline device, in bytes, for one tensor-parallel rank."""
        partition = Partition.cut(self.units, map(len, self.plan.partition))
        return tuple(host_peaks(self.units, partition, self.timeline))

    @cached_property
    def host_activations(self) -> tuple[float, ...]:
        """Peak bytes of activations on the host, per pipeline device."""
        return tuple(map(float, offloaded_peaks(self.timeline)))

    @property
    def reserve(self) -> int:
        """Bytes of the fullest device's memory above its limit; 0 if the limit exceeds the memory."""
        limit = self.plan.costs.limit_of(self.fullest)
        types = zip(self.cluster.types, self.cluster.memory_limits, strict=True)
        reserves = (max(0, type_.memory - type_limit) for type_, type_limit in types if type_limit == limit)
        return min(reserves, default=self.cluster.reserve)

    @cached_property
    def causes(self) -> tuple[CauseSeconds, ...]:
        """The seconds of a step by cause, averaged over the devices, largest first; they sum to the step.

        The time of collectives is the difference of the units' times to those with links that take no time.
        """
        devices, timeline = self.plan.devices, self.timeline
        optimizer = sum(float(o.duration) for lane in timeline.compute for o in lane if o.op.kind is Kind.S)
        recomputation, busy = float(sum(timeline.recompute)), float(sum(timeline.busy))
        micro_batches, zero = self.plan.schedule.micro_batches, self.plan.options.zero
        collectives = self._collectives(zero) * micro_batches
        # Collectives of weights and gradients over the replicas, which ZeRO-2 and ZeRO-3 run in every micro-batch.
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
        causes = [CauseSeconds(cause, total) for cause, total in mean.items() if abs(total) > 1e-9 * self.step_time]
        return tuple(sorted(causes, key=lambda cause: -cause.seconds))

    @property
    def binding(self) -> str:
        """A sentence on what limits the step, its remedy, and how full memory is."""
        remedy = "" if self.advice is None else f", which {self._remedy(self._largest.cause)} would shorten"
        return f"{self.shares}{remedy}; {self.memory_words}."

    @property
    def compute_share(self) -> float:
        """The fraction of the step that is compute."""
        return sum(c.seconds for c in self.causes if c.cause == "compute") / self.step_time

    @property
    def shares(self) -> str:
        """A clause on the shares of compute and of the next largest cause."""
        compute = self._percent(self.compute_share * self.step_time)
        if self.advice is None:
            return f"Computing binds: it takes {compute} of the step"
        return f"Computing takes {compute} of the step, {self._largest.cause} {self._percent(self._largest.seconds)}"

    @property
    def largest_cause(self) -> str:
        """The largest cause after compute, with its share of the step."""
        return f"{self._largest.cause} ({self._percent(self._largest.seconds)} of the step)"

    @property
    def memory_words(self) -> str:
        """A clause on how full memory is."""
        limit, peak = self._limits[self.fullest], float(self.timeline.peak_memory[self.fullest])
        full = "exceeded" if peak > limit else "full" if self._is_full else "not full"
        return f"memory is {full} ({100 * peak / limit:.0f}%)"

    @property
    def advice(self) -> str | None:
        """The remedy of the largest cause after compute; None if all of them are negligible."""
        if self._largest.seconds < REMARK_SHARE * self.step_time:
            return None
        return self._remedy(self._largest.cause).removesuffix(",")

    def _remedy(self, cause: str) -> str:
        """The remedy of a cause, without changes that the plan already has, such as degrees of 1 or ZeRO."""
        o = self.plan.options
        if cause == "recomputation" and not self._is_full:
            return RECOMPUTATION_REMEDY
        if cause == "optimizer" and o.host_optimizer:
            return HOST_OPTIMIZER_REMEDY
        if cause == "optimizer" and (o.zero or o.data == 1):
            return OPTIMIZER_REMEDY
        if cause == "collectives" and o.tensor == o.context == 1:
            return GATHER_REMEDY if o.zero == 3 else "faster links,"
        if cause == "gradients" and o.zero == 2:
            return SCATTER_REMEDY
        if cause == ALL_TO_ALL and not framework_of_plan(self.plan).dispatch_overlap:
            return DISPATCH_REMEDY
        if cause == "optimizer on the host" and o.zero == 0 and o.data * o.context > 1:
            return f"ZeRO, {ADVICE[cause]}"
        return ADVICE[cause]

    @property
    def _is_full(self) -> bool:
        """True if the fullest device has hardly any free memory."""
        return float(self.timeline.peak_memory[self.fullest]) > FULL_MEMORY_SHARE * self._limits[self.fullest]

    @property
    def at_stake(self) -> tuple[str, ...]:
        """Sentences on the share of the step that the advice would shorten, and on remedies of other large causes."""
        if self.advice is None:
            return ("All else takes too little of the step for another plan to help.",)
        first, *rest = self._noticeable
        said = [f"{self._remedy(c.cause).removesuffix(',')} ({c.cause}: {self._percent(c.seconds)})" for c in rest]
        then = (f"Then {'; '.join(said)}.",) if said else ()
        return (f"At stake is what {first.cause} takes: about {self._percent(first.seconds)} of the step.", *then)

    @property
    def losses(self) -> tuple[str, ...]:
        """The noticeable causes that no lower bound includes, with their shares of the step, largest first."""
        unbounded = (c for c in self._noticeable if c.cause not in BOUNDED_CAUSES)
        return tuple(f"{c.cause} ({self._percent(c.seconds)} of the step)" for c in unbounded)

    @property
    def _largest(self) -> CauseSeconds:
        """The largest cause after compute."""
        return self._improvable[0]

    @property
    def _noticeable(self) -> list[CauseSeconds]:
        """The causes after compute with a noticeable share of the step, largest first."""
        return [c for c in self._improvable if c.seconds >= REMARK_SHARE * self.step_time]

    @property
    def _improvable(self) -> list[CauseSeconds]:
        """The causes after compute, largest first; filling and draining the pipeline count as one."""
        seconds = {c.cause: c.seconds for c in self.causes}
        filling = seconds.pop("warm-up", 0.0) + seconds.pop("cool-down", 0.0)
        improvable = {cause: seconds[cause] for cause in seconds.keys() & ADVICE.keys()} | {FILLING: filling}
        return sorted((CauseSeconds(*entry) for entry in improvable.items()), key=lambda c: (-c.seconds, c.cause))

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
        links = dict.fromkeys(("link_bandwidth", "network_bandwidth"), FREE_BANDWIDTH)
        latencies = dict.fromkeys(("link_latency", "network_latency"), FREE_LATENCY)
        return Cluster.from_dict({**self.cluster.to_dict(), **links, **latencies})

    def _collectives(self, zero: int) -> float:
        """Seconds per micro-batch of collectives in units at a ZeRO level, summed over all pipeline devices."""
        actual, free = (self._units(cluster, zero=zero) for cluster in (self.cluster, self._free_links))
        return float(actual.work) - float(free.work)

    @property
    def _dispatch(self) -> float:
        """Seconds per micro-batch of the experts' all-to-all, summed over all pipeline devices."""
        if self.plan.options.expert == 1:
            return 0.0
        actual, free = (
            dispatch_seconds(
                self.model, cluster, self.plan.options, pipeline=self.plan.devices,
                framework=framework_of_plan(self.plan),
            )
            for cluster in (self.cluster, self._free_links)
        )  # fmt: skip
        return actual - free

    @property
    def _tail(self) -> tuple[float, float]:
        """Seconds after the pipeline of collectives over the replicas, and of the optimizer."""
        stepped = tail_seconds(self.plan, self.model, self._free_links)
        return tail_seconds(self.plan, self.model, self.cluster) - stepped, stepped


FREE_BANDWIDTH, FREE_LATENCY = 1e18, 1e-12
"""Bandwidth in bytes per second and latency in seconds of links that take no time."""

_TRANSFERS = {
    **dict.fromkeys((Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B), "messages"),
    **dict.fromkeys((Kind.O, Kind.L), "host transfers"),
    Kind.G: "gradients",
}
"""Causes of waits for transfers, by kind of transfer."""


def explanation(plan: Plan, timeline: Timeline, step_time: float) -> Explanation | None:
    """Return the explanation of a model's plan; None for abstract costs."""
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
