"""How a run takes its steps: one at a time, or each going on before it is known whether the one before it stands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from debubble.runtime import Batch
from debubble.runtime.parameters.post_validation import Settled
from debubble.runtime.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a step came to."""

    loss: float
    norm: float
    """Of all gradients, before clipping."""
    rolled_back: int = 0
    """Devices that took their update back."""
    skipped: bool = False
    """Whether a gradient had an inf or NaN, so that nothing was updated."""

    def news(self, step: int) -> tuple[str, ...]:
        """What a user should hear of, in sentences."""
        sentences = []
        if self.rolled_back:
            devices = "1 device" if self.rolled_back == 1 else f"{self.rolled_back} devices"
            reason = "a gradient was inf or NaN" if self.skipped else f"the gradients' norm was {self.norm:.3g}"
            sentences.append(f"{reason}: {devices} took the update back")
        if self.skipped:
            sentences.append("a gradient was inf or NaN: no parameter was updated")
        return tuple(f"step {step}: {sentence}" for sentence in sentences)


class Synchronous:
    """Every step is over on all ranks before the next begins; what hosts step inside it is validated at its end."""

    def __init__(self, pipeline: Pipeline, *, clip: float) -> None:
        self._pipeline, self._clip = pipeline, clip

    def take(self, batch: Batch, observe: Callable[[], None], *, settle: bool) -> Sequence[Result]:
        """Take a step and `observe` it; the results of all steps that are known then, those asked to settle too."""
        loss = float(self._pipeline.step(batch))
        norm = self._pipeline.update(self._clip)
        assert norm is not None
        observe()
        back = self._pipeline.rolled_back
        return [Result(loss=loss, norm=float(norm), rolled_back=back, skipped=not math.isfinite(norm))]


class PostValidated:
    """A step's update is validated during the next one's forwards: its result comes a step late, unless settled."""

    def __init__(self, pipeline: Pipeline, *, clip: float) -> None:
        self._pipeline, self._clip = pipeline, clip

    def take(self, batch: Batch, observe: Callable[[], None], *, settle: bool) -> Sequence[Result]:
        """The same."""
        known = [self._pipeline.advance(batch, max_norm=self._clip)]
        if settle:
            known.append(self._pipeline.settle())
        observe()
        return [_result(settled) for settled in known if settled is not None]


def _result(settled: Settled) -> Result:
    return Result(loss=settled.loss, norm=settled.norm, rolled_back=settled.rolled_back, skipped=settled.skipped)
