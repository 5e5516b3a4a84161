"""The gradients of one device's parameters, and their updates: clipping, and correction of hosts' early steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from debubble.ir import InputError
from debubble.runtime.distributed.gradient_norm import PartialSums
from debubble.runtime.distributed.sharding import local_tensor
from debubble.runtime.execution.status import RankStatus
from debubble.runtime.operators import add_gradient
from debubble.runtime.parameters.device_part import DevicePart
from debubble.runtime.parameters.optimizer_states import scale_gradients
from debubble.runtime.parameters.optimizers import DeviceOptimizers, LossScale
from debubble.runtime.parameters.tentative_update import TentativeUpdate
from debubble.runtime.topology import Ranks


@dataclass(frozen=True)
class DeviceGradients:
    """The gradients of one device's parameters; all ranks call the methods that sum over ranks."""

    device_part: DevicePart
    optimizers: DeviceOptimizers
    ranks: Ranks
    status: RankStatus
    on: torch.device

    @contextmanager
    def accumulated(self) -> Iterator[None]:
        """Context of a step that starts without gradients; earlier gradients, already reduced, are added after."""
        earlier = self.clear()
        yield
        for parameter, gradient in earlier.items():
            add_gradient(parameter, gradient)

    def clear(self) -> dict[nn.Parameter, Tensor]:
        """Remove all gradients, and return them."""
        gradients = {p: p.grad for p in self.device_part.parameters() if p.grad is not None}
        for parameter in gradients:
            parameter.grad = None
        return gradients

    def finish(self) -> None:
        """Reduce the gradients over replicas, and over the copies of a tied table."""
        with self.status.phase("sums gradients", local=False):
            for stage, weights in self.device_part.weights.items():
                if stage not in self.optimizers.inside:
                    weights.finish()
            if self.ranks.shares_table:
                masters = self.device_part.masters
                table = next(masters[name] for name in self.device_part.tied or () if name in masters)
                if table.requires_grad:
                    table.grad = torch.zeros_like(table) if table.grad is None else table.grad
                    self.ranks.sum_over_tied(local_tensor(table.grad))

    def device_sums(self, loss: float) -> PartialSums:
        """The sums over this device's tensor ranks and replicas, with this rank's loss."""
        with self.status.phase("sums the norm", local=False):
            return self.ranks.partial_sums(self.optimizers.squares(), loss, on=self.on)

    def total_sums(self, *, ahead: bool) -> PartialSums:
        """The sums over all ranks; `ahead`: whether this device has stepped early."""
        with self.status.phase("sums the norm", local=False):
            local = self.ranks.partial_sums(self.optimizers.squares(), 0.0, on=self.on)
            return self.ranks.total_sums(local + PartialSums(ahead=int(ahead)), on=self.on)


UPDATE_PHASE = "updates parameters"
"""The phase of a step in which optimizers step."""


class ParameterUpdates:
    """The parameter updates of synchronous steps.

    Args:
        gradients: The gradients and optimizers.
        loss_scale: The loss scale of an fp16 run; None: the loss is not scaled.
    """

    def __init__(self, gradients: DeviceGradients, *, loss_scale: LossScale | None) -> None:
        self._gradients, self._optimizers, self._loss_scale = gradients, gradients.optimizers, loss_scale
        self._update = TentativeUpdate(self._optimizers)
        self._pending = False
        """True if hosts of any device have taken steps that are not finished."""
        self.rolled_back = 0
        """Number of devices whose hosts rolled back their steps in the last update."""

    def check_finished(self) -> None:
        """Raise InputError if hosts have taken steps that are not finished."""
        if self._pending:
            raise InputError(
                "The plan's hosts step their stages in every step: call `optimizer_step` after each `step`."
            )

    def step_stage(self, stage: int) -> None:
        """S: step a stage, with a snapshot for a rollback on the host; devices have no memory for one."""
        if stage in self._optimizers.on_host:
            self._update.step(stage)
        else:
            self._optimizers.step(stage)

    def end_program(self) -> None:
        """Note that a step's program, in which hosts may have taken steps, has ended."""
        self._pending = bool(self._optimizers.on_host)

    def total(self) -> PartialSums:
        """The sums over all ranks; all ranks call it."""
        return self._gradients.total_sums(ahead=self._update.ahead)

    def finish(self, max_norm: float | None) -> PartialSums:
        """Clip, step optimizers that have not stepped, correct early steps, and clear the gradients.

        Args:
            max_norm: Largest norm of all gradients; None: no clipping.

        Returns:
            The sums over all ranks.

        Raises:
            InputError: `max_norm` is set, and devices have stepped stages.
        """
        if max_norm is not None and self._optimizers.on_device:
            raise InputError(
                "The plan steps stages on their devices before the norm of all gradients is known: clip them with"
                " `post_validated_step`, or train without clipping."
            )
        total = self.total()
        clip = math.inf if max_norm is None else max_norm
        with self._gradients.status.phase(UPDATE_PHASE, local=True):
            self._update.finish(total, clip)
        if self._loss_scale is not None:
            self._loss_scale.update(finite=total.finite)
        unclipped = total.within(clip)
        # Clipping often lasts for many steps: after a clipped step, hosts wait for the norm.
        self._update, self._pending = TentativeUpdate(self._optimizers, optimistic=unclipped), False
        self.rolled_back = 0 if unclipped else total.ahead
        return total

    def clip(self, max_norm: float) -> PartialSums:
        """Scale all gradients so that their norm is at most `max_norm`, and return the sums before.

        Raises:
            InputError: Stages have been stepped already.
        """
        if self._optimizers.on_host or self._optimizers.on_device:
            raise InputError("The plan has stepped stages inside the step: clip with `optimizer_step(max_norm)`.")
        total = self.total()
        scale_gradients(self._gradients.device_part.parameters(), total.scale(max_norm))
        return total
