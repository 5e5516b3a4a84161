"""Program + costs -> Timeline: times, memory, bubbles by cause."""

from debubble.simulator.bubbles import Bubble, Cause, bubbles, by_cause, critical_path
from debubble.simulator.engine import run, simulate
from debubble.simulator.repricer import Price, Repricer
from debubble.simulator.timeline import TimedOperation, Timeline

__all__ = [
    "Bubble",
    "Cause",
    "Price",
    "Repricer",
    "TimedOperation",
    "Timeline",
    "bubbles",
    "by_cause",
    "critical_path",
    "run",
    "simulate",
]
