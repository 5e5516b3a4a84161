"""Rows of the plan's screen on the accuracy of predictions and on assumed bandwidths."""

from __future__ import annotations

from collections.abc import Iterator

from debubble.costs import Cluster
from debubble.costs.accuracy import MEASURED_HERE, accuracy_of
from debubble.costs.calibration import missing_calibration, other_frameworks
from debubble.costs.devices.known_hardware import PCIE_LATENCY
from debubble.costs.frameworks import TARGET
from debubble.formatting import days_words, size_words, time_words
from debubble.planners.analysis.likely_fit import is_of_cpus, safe_limit
from debubble.planners.analysis.what_if import MIN_SHOWN_GAIN, gains
from debubble.plans import Plan
from debubble.targets.target import targets
from debubble.views.plan_levers import Detail
from debubble.views.scene import Scene


def accuracy_row(plan: Plan, scene: Scene, tokens: float | None) -> Iterator[str]:
    """Phrases on the likely intervals of step, memory and days, for plans with computed costs."""
    if plan.profile is not None:
        yield "from measured units"
        return
    if plan.model_on_cluster is None:
        return
    if is_of_cpus(plan):
        yield "how far the step is off is not known"
        yield "no run on CPUs was compared"
        yield "`profile` measures yours"
        return
    step = accuracy_of("step", *plan.model_on_cluster, plan.options)
    memory = accuracy_of("memory", *plan.model_on_cluster, plan.options)
    seconds, peak = step.scaled_to(float(scene.step_time)), memory.scaled_to(max(map(float, scene.peak_memory)))
    low, high = (time_words(value, seconds=True) for value in (seconds.low, seconds.high))
    yield f"{low} to {high} a step, up to {size_words(peak.high)} on a device"
    if tokens is not None and scene.why is not None:
        days_per_second = scene.why.days(tokens) / float(scene.step_time)
        low, high = (days_words(days_per_second * value) for value in (seconds.low, seconds.high))
        yield f"{low} to {high} for these tokens"
    yield f"by {step.runs} published runs ({step.group}){_kernels(plan)}"
    if not step.of_hardware:
        yield "few or none on such GPUs"
    if plan.options.lora:
        yield "few or none with adapters"
    yield from _assumed_links(plan.cluster)
    needed = missing_calibration(*plan.model_on_cluster, plan.options)
    if needed is None:
        yield Detail("`profile` narrows it" if MEASURED_HERE in step.group else "`calibrate` or `profile` narrows it")
        return
    yield "no measured run of the cluster is like this job"
    if frameworks := other_frameworks(*plan.model_on_cluster, plan.options):
        yield f"its runs count with --framework {' or '.join(frameworks)}"
    else:
        yield f"`calibrate` with a run of {needed}"


def safer_row(plan: Plan, scene: Scene) -> Iterator[str]:
    """Phrases on a safer memory limit, if published runs took more memory than a device has."""
    limit = safe_limit(plan, scene.peak_memory)
    if limit is None or scene.misfit:
        return
    option = f"--memory-limit {limit}"
    told = (gain for gain in gains(plan, float(scene.step_time), plan.what_ifs) if gain.what_if.change == option)
    gain = next(told, None)
    if gain is not None and gain.share is None:
        yield f"{'no quick plan' if gain.what_if.quick else 'nothing'} leaves room for that ({option})"
        return
    if gain is None:
        yield f"{option} leaves room for that (--why tells its step)"
        return
    price = gain.effect.removesuffix(" per sequence").replace("at most ", "≤")
    if abs(gain.share or 0.0) < MIN_SHOWN_GAIN:
        price = "as fast"
    yield f"{option} leaves room ({price}{' by quick plans' * gain.what_if.quick})"


def _assumed_links(cluster: Cluster | None) -> Iterator[str]:
    """Phrases on bandwidths of networks and PCIe links that are assumed, as no cluster file gives them."""
    if cluster is None or cluster.count == 1:
        return
    slowest = cluster.slowest
    if cluster.count > slowest.devices_per_node and not cluster.gives("network_bandwidth"):
        yield f"network {slowest.network_bandwidth / 1e9:.4g} GB/s assumed"
    if slowest.link_latency >= PCIE_LATENCY and not cluster.gives("link_bandwidth"):
        yield f"{slowest.link_bandwidth / 1e9:.4g} GB/s between {cluster.device_word}s assumed"


def _kernels(plan: Plan) -> str:
    """A phrase on the framework whose kernels are priced."""
    named, _, traits = (plan.options.framework or TARGET).partition(",")
    priced = targets["megatron"].framework if named == TARGET else named
    # Primus has the kernels of Megatron-LM, which is listed first.
    title = next((target.title for target in targets.values() if target.framework == priced), priced)
    return f", {title}'s kernels{f' with {traits}' if traits else ''}"
