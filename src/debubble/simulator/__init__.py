"""Program + costs -> Timeline: times, memory, bubbles by cause."""

from debubble.simulator.addresses import AddressPlan, PlacedTensor, plan_addresses
from debubble.simulator.bubbles import Bubble, Cause, bubbles, by_cause, critical_path
from debubble.simulator.engine import run, simulate
from debubble.simulator.repricer import Price, Repricer
from debubble.simulator.timeline import TimedOperation, Timeline

__all__ = [
    "AddressPlan",
    "Bubble",
    "Cause",
    "PlacedTensor",
    "Price",
    "Repricer",
    "TimedOperation",
    "Timeline",
    "bubbles",
    "by_cause",
    "critical_path",
    "plan_addresses",
    "run",
    "simulate",
]
