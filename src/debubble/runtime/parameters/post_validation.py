"""Post-validation: an update begins before the norm of all gradients is known, and is taken back if it was wrong.

Source: Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024), section 4; ChronosPipe, section 5.1, for steps on the
host.  A synchronous step waits at the end for the last device, so that the makespan counts.  Here every device hands
on what is known of the norm, steps if that much lets it, and goes on to the next step's forwards; the whole comes back
before its first backward, which no device could begin earlier anyway.  So the span per device counts.

Unlike there, taking back is exact: parameters and states are copied before a step ahead (see `undo`), and the
forwards that the wrong parameters have gone through run again.  After a step that had to be taken back, the next is
not taken ahead: where gradients are clipped, they often are for many steps.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import torch

from debubble.runtime.distributed.gradient_norm import Relay, Tally
from debubble.runtime.parameters.optimizers import Attempt


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What a step came to."""

    step: int
    """Counted from 0."""
    loss: float
    """Mean over all tokens."""
    norm: float
    """Of all gradients, before clipping."""
    skipped: bool
    """Whether there was an inf or NaN in a gradient, so that no parameter was changed."""
    rolled_back: int
    """Devices that had stepped and took it back."""


@dataclass(frozen=True)
class _Pending:
    step: int
    attempt: Attempt
    whole: Future[Tally]
    overlaps: bool
    """Whether devices may have gone on before all was known."""


class PostValidation:
    """The last update of this rank, and whether it stands."""

    def __init__(self, relay: Relay, *, loss_dtype: torch.dtype) -> None:
        self._relay, self._loss_dtype = relay, loss_dtype
        self._pending: _Pending | None = None
        self._trusting = True

    @property
    def pending(self) -> bool:
        """Whether there is an update that nobody has settled."""
        return self._pending is not None

    def begin(self, step: int, attempt: Attempt, own: Tally) -> None:
        """After the program: hand on this device's tally, and step if what is known lets it."""
        overlaps = self._trusting and not self._relay.alone
        ahead = overlaps and not self._relay.last
        known, whole = self._relay.take_turn(
            own, steps_ahead=lambda known: attempt.ahead or (ahead and known.harmless(attempt.max_norm))
        )
        self._pending = _Pending(step, attempt, whole, overlaps)
        if ahead:
            attempt.step_outside(known)
        else:
            attempt.end(whole.result(), attempt.max_norm)

    def stands(self) -> bool:
        """Wait until all is known: whether what was computed since may be kept.  If so, its gradients are cleared."""
        if self._pending is None or not self._pending.overlaps:
            return True
        total = self._pending.whole.result()
        if not total.harmless(self._pending.attempt.max_norm):
            return False
        self._pending.attempt.end(total, self._pending.attempt.max_norm)
        return True

    def settle(self) -> Settled | None:
        """Wait until all is known, and make the update right.  None if there is none."""
        if self._pending is None:
            return None
        done, self._pending = self._pending, None
        total = done.whole.result()
        done.attempt.end(total, done.attempt.max_norm)
        self._trusting = total.harmless(done.attempt.max_norm)
        return Settled(
            step=done.step,
            loss=torch.tensor(total.loss, dtype=self._loss_dtype).item(),
            norm=total.norm,
            skipped=not total.finite,
            rolled_back=0 if self._trusting else total.ahead,
        )
