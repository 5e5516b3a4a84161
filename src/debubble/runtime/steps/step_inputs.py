"""The inputs of a step: its batch, checked and cut, and the state in which the interpreter begins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from debubble.ir import InputError
from debubble.models.config import ModelConfig
from debubble.plans import Plan
from debubble.runtime.assembly import DTYPES, balance_of
from debubble.runtime.distributed.context_parallel import ContextGroup
from debubble.runtime.execution.operations import StepState
from debubble.runtime.models.loss import Loss, loss_entries
from debubble.runtime.models.modules import Modules
from debubble.runtime.steps.batch import Batch, BatchFormat, Cut, StepBatch, read_batch, whole


class StepInputs:
    """Makes the inputs of a plan's steps.

    Args:
        plan: What runs.
        source: The plan's model, or the user's own modules.
        loss: What may ask for further entries of the batch.
        context: The ranks that divide this one's sequences.
        on: The torch device that computes.
    """

    def __init__(
        self, plan: Plan, source: ModelConfig | Modules, *, loss: Loss, context: ContextGroup, on: torch.device
    ) -> None:
        self._source, self._context, self._dtype = source, context, DTYPES[plan.options.dtype]
        self._balance = balance_of(plan)
        entries = loss_entries(loss)
        if plan.schedule.slices > 1 and entries:
            raise InputError(
                f"The loss asks for '{entries[0]}', which is of whole sequences, but the plan cuts them into slices:"
                " plan without --slices."
            )
        config = None if isinstance(source, Modules) else source
        own_units = config is not None and not config.whole_layers
        # An auxiliary loss of routers would count hidden tokens.
        accepted = BatchFormat(
            has_positions=own_units,
            has_masks=own_units and self._balance is None,
            loss_entries=entries,
            vocabulary=None if config is None else config.vocab,
            positions=None if config is None else config.positions or None,
        )
        self.read: Callable[[Batch], StepBatch] = partial(
            read_batch, micro_batches=plan.micro_batches, device=on, accepted=accepted
        )
        """Checks, moves and cuts a batch as `read_batch` does."""

    def state(
        self,
        batch: StepBatch,
        targets: int,
        *,
        seed: int,
        scale: float = 1.0,
        step_stage: Callable[[int], None] = lambda stage: None,
        counts_memory: bool = False,
        cut: Cut = whole,
    ) -> StepState:
        """The in-flight tensors of a step at its start.

        Args:
            batch: This replica's.
            targets: Those of all replicas, by which losses are divided.
            seed: Dropout masks follow from it.
            scale: Factor of the losses.
            step_stage: S.
            counts_memory: Whether ledgers count what forwards keep.
            cut: The tokens of each slice of a sequence, by its length.
        """
        tokens, micro_batches = batch.divided(self._context).micro_batches(
            scale=scale / targets, seed=seed, cut=cut, counted=counts_memory
        )
        return StepState(
            tokens=tokens,
            micro_batches=micro_batches,
            boundary=[self._boundary(t) for t in tokens],
            dtype=self._dtype,
            step_stage=step_stage,
            counts_memory=counts_memory,
        )

    def _boundary(self, tokens: Tensor) -> tuple[int, ...]:
        """The shape of what stages hand on for such an input."""
        if isinstance(self._source, Modules):
            return self._source.boundary(tokens)
        if self._balance is not None:
            return self._balance.message(tokens.shape)
        return (*tokens.shape, self._source.hidden)
