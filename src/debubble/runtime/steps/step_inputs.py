"""The inputs of a step: the checked batch, and the interpreter's initial state."""

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
from debubble.runtime.steps.batch import Batch, BatchFormat, SliceLengths, StepBatch, one_slice, read_batch


class StepInputs:
    """Makes the inputs of a plan's steps.

    Args:
        plan: The plan that runs.
        source: The plan's model, or the user's modules.
        loss: The loss, which may require further entries of the batch.
        context: The context-parallel ranks.
        on: torch device of the inputs.
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
        # The routers' load-balancing loss would count hidden tokens.
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
        """Reads a batch by `read_batch`."""

    def state(
        self,
        batch: StepBatch,
        targets: int,
        *,
        seed: int,
        scale: float = 1.0,
        step_stage: Callable[[int], None] = lambda stage: None,
        counts_memory: bool = False,
        slices: SliceLengths = one_slice,
    ) -> StepState:
        """The initial state of a step.

        Args:
            batch: This replica's batch.
            targets: Number of targets of all replicas, by which losses are divided.
            seed: Seed of dropout masks.
            scale: Factor of the losses.
            step_stage: Called by S with the stage.
            counts_memory: Whether ledgers count what forwards save.
            slices: Slices of a sequence, by its length.
        """
        tokens, micro_batches = batch.shard(self._context).micro_batches(
            scale=scale / targets, seed=seed, slices=slices, counted=counts_memory
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
        """The shape of activations between stages for such an input."""
        if isinstance(self._source, Modules):
            return self._source.boundary(tokens)
        if self._balance is not None:
            return self._balance.message(tokens.shape)
        return (*tokens.shape, self._source.hidden)
