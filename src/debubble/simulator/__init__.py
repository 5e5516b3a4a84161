"""Program + costs -> Timeline: times, memory, bubbles by cause."""

from debubble.simulator.engine import run, simulate
from debubble.simulator.repricing import Price, Repricer
from debubble.simulator.timeline import TimedOperation, Timeline

__all__ = ["Price", "Repricer", "TimedOperation", "Timeline", "run", "simulate"]
