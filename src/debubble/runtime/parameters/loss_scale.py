"""The scale of an fp16 run's loss, which keeps small gradients above what fp16 can represent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """A factor of the loss that halves when a gradient overflows, and doubles after many steps in which none did.

    The rule is Micikevicius et al.'s (arXiv:1710.03740, section 3.2), the numbers are those of torch's GradScaler.
    """

    value: float = 2.0**16
    growth_interval: int = 2000
    """Steps without overflow after which it doubles."""
    steps_since: int = 0
    """Steps since it changed."""

    def update(self, *, finite: bool) -> None:
        """Change the scale after a step, in which all gradients were finite or not."""
        self.steps_since += 1
        if not finite:
            self.value, self.steps_since = self.value / 2, 0
        elif self.steps_since == self.growth_interval:
            self.value, self.steps_since = self.value * 2, 0
