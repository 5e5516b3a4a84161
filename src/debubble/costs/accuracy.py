"""How far off predictions were on measured runs that no cost was fitted to.

Source: `python -m measured` in benchmarks/, whose summary stands here; a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accuracy:
    """Errors of predictions, as shares of what was measured.

    Attributes:
        runs: Measured runs.
        half: The error that half of them do not exceed.
        most: The error that nine in ten do not exceed.
    """

    runs: int
    half: float
    most: float

    @property
    def words(self) -> str:
        """The two errors."""
        return f"half of {self.runs} within {100 * self.half:.0f}%, nine in ten within {100 * self.most:.0f}%"


STEP = Accuracy(runs=47, half=0.132, most=0.377)
"""Of seconds per step."""
MEMORY = Accuracy(runs=36, half=0.124, most=0.477)
"""Of the memory of the fullest device."""
