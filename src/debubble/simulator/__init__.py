"""Program + costs -> Timeline: times, memory, bubbles by cause."""

from debubble.simulator.engine import run, simulate
from debubble.simulator.timeline import TimedOperation, Timeline

__all__ = ["TimedOperation", "Timeline", "run", "simulate"]
