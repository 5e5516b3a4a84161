"""Post-validation: an update begins before the norm of all gradients is known, and is taken back if it was wrong.

Source: Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024), section 4; ChronosPipe, section 5.1, for steps on the
host.  A synchronous step waits at the end for the last device, so that the makespan counts.  Here every device hands
on what is known of the norm, steps if that much lets it, and continues with the next step's forwards; the whole comes
back before its first backward, which no device could begin earlier anyway.  So the span per device counts.

Unlike there, taking back is exact: parameters and states are copied before a step ahead (see `OptimizerSnapshot`), and
the forwards that the wrong parameters have gone through run again.  After a step that had to be taken back, the next is
not taken ahead: where gradients are clipped, they often are for many steps.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import torch

from debubble.runtime.distributed.gradient_norm import NormRelay, PartialSums
from debubble.runtime.parameters.optimizers import TentativeUpdate


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """A step whose update is right."""

    step: int
    """Counted from 0."""
    loss: float
    """Mean over all targets."""
    norm: float
    """Norm of all gradients, before clipping."""
    skipped: bool = False
    """True if there was an inf or NaN in a gradient, so that no parameter was changed."""
    rolled_back: int = 0
    """Devices that had stepped and took it back."""


@dataclass(frozen=True)
class _PendingUpdate:
    step: int
    update: TentativeUpdate
    total: Future[PartialSums]
    overlaps: bool
    """True if devices may have gone on before all was known."""


class PostValidation:
    """The last update of this rank, and whether it is valid.

    Args:
        relay: Passes partial sums along this rank's pipeline.
        loss_dtype: The loss of a result is rounded to it.
    """

    def __init__(self, relay: NormRelay, *, loss_dtype: torch.dtype) -> None:
        self._relay, self._loss_dtype = relay, loss_dtype
        self._pending: _PendingUpdate | None = None
        self._optimistic = True

    @property
    def pending(self) -> bool:
        """True if there is an update that is not finished."""
        return self._pending is not None

    def begin(self, step: int, update: TentativeUpdate, own: PartialSums) -> None:
        """Hand on this device's sums after the program, and step if what is known lets it."""
        overlaps = self._optimistic and not self._relay.alone
        ahead = overlaps and not self._relay.last
        known, total = self._relay.take_turn(
            own, steps_ahead=lambda known: update.ahead or (ahead and known.within(update.max_norm))
        )
        self._pending = _PendingUpdate(step, update, total, overlaps)
        if ahead:
            update.step_outside(known)
        else:
            update.finish(total.result(), update.max_norm)

    def is_valid(self) -> bool:
        """Wait until all is known: whether what was computed since may be kept.  If so, its gradients are cleared."""
        if self._pending is None or not self._pending.overlaps:
            return True
        total, update = self._pending.total.result(), self._pending.update
        if not total.within(update.max_norm):
            return False
        update.finish(total, update.max_norm)
        return True

    def finish(self) -> StepResult | None:
        """Wait until all is known, and make the update right.  None if there is none."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        total, update = pending.total.result(), pending.update
        update.finish(total, update.max_norm)
        self._optimistic = total.within(update.max_norm)
        return StepResult(
            step=pending.step,
            loss=torch.tensor(total.loss, dtype=self._loss_dtype).item(),
            norm=total.norm,
            skipped=not total.finite,
            rolled_back=0 if self._optimistic else total.ahead,
        )
