"""A model that trains by its plan: `loss = pipeline.step(batch); optimizer.step()`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from debubble.ir import InputError, Plan, lower
from debubble.models.config import ModelConfig
from debubble.runtime.assembly import DTYPES, balance_of, build_part, check_runnable, may_pad, tied_tables
from debubble.runtime.batch import Batch, Rows, read_batch
from debubble.runtime.distributed.data_parallel import check_before_steps, check_divided
from debubble.runtime.distributed.gradient_norm import Tally
from debubble.runtime.distributed.sharding import local
from debubble.runtime.distributed.topology import Ranks, default_device, default_transport
from debubble.runtime.distributed.transport import Transport
from debubble.runtime.execution.interpreter import Interpreter, StepState
from debubble.runtime.execution.lanes import lanes_of
from debubble.runtime.execution.status import Activity
from debubble.runtime.execution.synchronization import Ran
from debubble.runtime.held import Held
from debubble.runtime.measuring import Measured
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.loss import Loss, check_loss, cross_entropy
from debubble.runtime.models.modules import sequence_of
from debubble.runtime.models.operators import add_gradient
from debubble.runtime.parameters.optimizers import MakeOptimizer, Updates, scale_gradients
from debubble.runtime.parameters.post_validation import PostValidation, Settled

MEETS, UPDATES = "meets the other ranks", "updates parameters"
"""Phases of a step; the others have one place."""


class Pipeline(Held, Measured):
    """This rank's part of a plan that runs.

    `model` is None (units are built from the plan's model, the same on any ranks for the same `seed`), or a Hugging
    Face model, whose parameters this rank's units take over.  Every rank constructs its Pipeline after
    torch.distributed is initialised, or under torchrun: then it is initialised here.  Ranks of one pipeline are
    consecutive: rank = (replica x devices + device) x tensor + part.

    For a plan that was made for units or stages of given costs, `model` is an `nn.Sequential`, or has a method
    `pipeline_units()` that returns its modules in order: as many as the plan has units, each of one tensor to one.

    `loss(output, targets)` takes the place of cross entropy, for any model: a number, *summed* over the targets of a
    micro-batch that are not -100.  The output is the last unit's: of language models the logits [rows, length,
    vocabulary].  `step` divides by the targets of the whole batch.

    `optimizer` makes the optimizer of a list of parameters, for `update`, and for the stages that the plan steps
    inside the step.  Without it, give `parameters()` to an optimizer of your own.  What a host steps inside the step
    (ChronosPipe) can be clipped by `update` all the same: it is copied before, and taken back where the norm says so.

    `offload_to`: a folder on a fast disk that takes offloaded activations, where the host's memory is short.
    """

    def __init__(
        self,
        model: nn.Module | None,
        plan: Plan,
        *,
        seed: int = 0,
        loss: Loss = cross_entropy,
        optimizer: MakeOptimizer | None = None,
        transport: Transport | None = None,
        device: torch.device | None = None,
        offload_to: Path | None = None,
    ) -> None:
        transport = transport or default_transport()
        check_runnable(plan, transport.size)
        check_loss(loss, plan)
        self.plan, self.seed = plan, seed
        self.ranks = Ranks(plan, transport)
        """Who the other ranks are."""
        self._modules = sequence_of(model, plan) if plan.model is None else None
        self._balance = balance_of(plan)
        self._hidden = 0 if plan.model is None else ModelConfig.from_hf(plan.model).hidden
        self._tables = tied_tables(plan)
        self.steps = 0
        """Steps taken.  Set it when resuming: dropout masks follow from it."""
        self.device = self.ranks.device
        """The pipeline device that this rank is."""
        self._lanes = lanes_of(device or default_device(), offload_to=offload_to)
        self._saved, self._mail = Ledger(self._lanes.device), Ledger(self._lanes.device)
        program = lower(plan.schedule, plan.costs)
        self.ranks.open(program, seed=seed, own_model=model is None)
        self._part = build_part(
            plan, self.device, model=model, modules=self._modules, loss=loss, seed=seed, on=self._lanes.device,
            ledger=self._saved, replicas=self.ranks.over_replicas, group=self.ranks.tensor,
        )  # fmt: skip
        self._updates = Updates(plan, self._part, optimizer, shares_table=self.ranks.shares_table)
        self._check_optimizers()
        self._validation: PostValidation | None = None
        self._attempt = self._updates.attempt()
        self._unfinished = False
        """Whether hosts have taken steps that no `update` has made right."""
        self.rolled_back = 0
        """Devices whose hosts took their steps back in the last `update`."""
        self._agreed = torch.Size()
        """Shape of the batches, while the ranks do not ask each other."""
        self._unchecked = 0
        """Checksum of the batches since they did."""
        self._may_pad = may_pad(plan)
        self.activity = Activity()
        """What this rank does at the moment."""
        self._interpreter = Interpreter(
            program=program,
            device=self.device,
            stages=self._part.stages,
            transport=transport,
            rank_of=self.ranks.rank_of,
            lanes=self._lanes,
            mail=self._mail,
            weights=self._part.weights,
            activity=self.activity,
        )
        self._ran: list[Ran] = []
        self._origin = 0.0
        self._static = 0

    def step(self, batch: Batch) -> Tensor:
        """Forward and backward of one batch by the plan; the gradients are then on `parameters()`.

        The batch is this replica's, the same on all its ranks (see `Batch`); it is cut into the plan's micro-batches.
        Returns the mean loss over all tokens, on every rank.  Raises InputError if the batch does not fit the plan, is
        not that of the replica's other ranks, or has an entry that cannot be honoured, or if hosts have stepped stages
        since the last `update`.
        """
        self.settle()
        self._check_updated()
        self.activity.begin_step()
        with self.activity.during(MEETS, own=False):
            rows = self._read(batch)
            counted, self._origin = self.ranks.agree(rows)
        before = self._set_aside_gradients()
        state = self._begin(rows, counted, self._step_stage)
        self._ran = self._interpreter.run(state)
        self._unfinished = bool(self._updates.on_host)
        self._finish()
        for parameter, gradient in before.items():
            add_gradient(parameter, gradient)
        self.steps += 1
        return self._mean_loss(state)

    def advance(self, batch: Batch, *, max_norm: float = math.inf) -> Settled | None:
        """A step and its update, clipped to `max_norm` and skipped on inf or NaN, without waiting for other devices.

        The parameters are right, to the bit as after `step` and `update`, once the update is settled: by the next
        `advance`, or by `settle`.  Returns what the update before came to; None at first.  Until it is settled, all
        batches have the shape of the first.  Raises what `step` does; that a replica's ranks have different batches may
        be found by `settle` alone.
        """
        self._check_updated()
        self.activity.begin_step()
        validation = self._validation = self._validation or PostValidation(
            self.ranks.open_relay(), loss_dtype=self._loss_dtype
        )
        with self.activity.during(MEETS, own=False):
            rows = self._read(batch)
            counted = self._count(rows, overlapping=validation.pending)
        attempt = self._updates.attempt(max_norm)
        state = self._begin(rows, counted, attempt.step)
        ran = self._interpreter.run_ahead(state, stands=validation.stands)
        before = validation.settle()
        if ran is None:
            state = self._begin(rows, counted, attempt.step)
            ran = self._interpreter.run(state)
        self._ran = ran
        self._finish()
        here = self._lanes.device
        with self.activity.during("sums the norm", own=False):
            own = self.ranks.tally(self._updates.squares(), float(state.loss(on=here)), on=here)
        with self.activity.during("updates parameters, if what is known of the norm lets it", own=False):
            validation.begin(self.steps, attempt, own)
        self.steps += 1
        return before

    def settle(self) -> Settled | None:
        """Wait until it is known whether the last `advance` stands, and make its update right; what it came to.

        All ranks call it, before anything reads parameters or optimizer states.  None if there is nothing to settle.
        """
        if self._validation is None or not self._validation.pending:
            return None
        with self.activity.during("settles the update", own=False):
            settled = self._validation.settle()
            self.ranks.check_batches(self._unchecked)
            return settled

    def follow(self, plan: Plan) -> None:
        """Go on with this plan: another order of the same stages.  All ranks call it between two steps.

        Parameters, optimizers and the count of steps stay; a pending update is settled.  Raises InputError if more than
        the order differs or the ranks have different plans, and what lowering raises.
        """
        self.settle()
        if not plan.reorders(self.plan):
            raise InputError("The plan is not another order of the stages that run: only such a one can follow.")
        program = lower(plan.schedule, plan.costs)
        self.ranks.check_same(plan)
        self._interpreter = replace(self._interpreter, program=program)
        self.plan = plan

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before.

        They stay as they are if one is inf or NaN: the norm says so.  Raises InputError if the plan has stepped stages.
        """
        if self._updates.on_host or self._updates.on_device:
            raise InputError("The plan has stepped stages inside the step: clip with `update(max_norm)`.")
        total = self._total()
        scale_gradients(self.parameters(), total.scale(max_norm))
        return torch.tensor(total.norm, dtype=torch.float64)

    def update(self, max_norm: float | None = None) -> Tensor | None:
        """Clip, step the optimizers that the plan has not stepped, and clear the gradients; returns the norm.

        If it is inf or NaN, no parameter changes.  Without `max_norm` there is no norm.  What hosts have stepped by
        then is taken back and stepped again where the norm says so.  Raises InputError if devices have stepped stages
        that were to be clipped: `advance` can.
        """
        if max_norm is not None and self._updates.on_device:
            raise InputError(
                "The plan steps stages on their devices before the norm of all gradients is known: clip them with"
                " `advance` (post-validation), or train without clipping."
            )
        total = Tally() if max_norm is None else self._total()
        clip = math.inf if max_norm is None else max_norm
        with self.activity.during(UPDATES, own=True):
            self._attempt.end(total, clip)
        stood = total.harmless(clip)
        # Where gradients are clipped, they often are for many steps: the next step's hosts then wait for the norm.
        self._attempt, self._unfinished = self._updates.attempt(trusting=stood), False
        self.rolled_back = 0 if stood else total.ahead
        return None if max_norm is None else torch.tensor(total.norm, dtype=torch.float64)

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those made by `optimizer`, for learning-rate schedules and checkpoints."""
        return self._updates.optimizers

    def _check_optimizers(self) -> None:
        """Refuse optimizers, made here or by the user, for which ZeRO's rows are not enough."""
        if self.ranks.over_replicas.divided:
            for optimizer in self._updates.optimizers:
                check_divided(optimizer)
            check_before_steps(self, self.parameters())

    def _read(self, batch: Batch) -> Rows:
        return read_batch(
            batch, micro_batches=self.plan.micro_batches, device=self._lanes.device, may_pad=self._may_pad
        )

    def _step_stage(self, stage: int) -> None:
        """S of a synchronous step: the host has room for the copies that take it back, the device has none."""
        if stage in self._updates.on_host:
            self._attempt.step(stage)
        else:
            self._updates.step(stage)

    def _check_updated(self) -> None:
        """Raise InputError if hosts have stepped and `update` was not called."""
        if self._unfinished:
            raise InputError("The plan's hosts step their stages in every step: call `update` after each `step`.")

    def _count(self, rows: Rows, *, overlapping: bool) -> int:
        """Targets over all replicas; while other devices may be in the step before, none is asked."""
        if not overlapping:
            counted, self._origin = self.ranks.agree(rows)
            self._agreed, self._unchecked = rows.tokens.shape, 0
            for parameter in self.parameters():
                parameter.grad = None
            return counted
        if rows.tokens.shape != self._agreed:
            raise InputError(
                f"A batch of shape {list(rows.tokens.shape)} follows one of {list(self._agreed)}: call `settle` between"
                " batches of different shapes."
            )
        self._origin = perf_counter()
        self._unchecked = zlib.crc32(rows.checksum.to_bytes(4, "big"), self._unchecked)
        return self.ranks.count(rows)

    def _begin(self, rows: Rows, counted: int, update: Callable[[int], None]) -> StepState:
        """The state of a step that starts now, with the working copies of the masters as they are."""
        with self.activity.during("readies parameters", own=False):
            for weights in self._part.weights.values():
                weights.refresh()
        seed = zlib.crc32(f"{self.seed} {self.steps} {self.ranks.replica}".encode())
        tokens, micro_batches = rows.split(self.plan.micro_batches, scale=1 / counted, seed=seed)
        self._saved.start_step()
        self._mail.start_step()
        self._lanes.start_step()
        return StepState(
            tokens=tokens,
            micro_batches=micro_batches,
            boundary=[self._boundary(t) for t in tokens],
            dtype=DTYPES[self.plan.options.dtype],
            update=update,
        )

    def _boundary(self, tokens: Tensor) -> tuple[int, ...]:
        """The shape of what stages hand on for such an input."""
        if self._modules is not None:
            return self._modules.boundary(tokens)
        if self._balance is not None:
            return self._balance.message(tokens.shape)
        return (*tokens.shape, self._hidden)

    def _set_aside_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Gradients of earlier steps: they are reduced already."""
        before = {p: p.grad for p in self.parameters() if p.grad is not None}
        for parameter in before:
            parameter.grad = None
        return before

    def _finish(self) -> None:
        """Give every parameter its whole gradient: over replicas, and over both copies of a tied table."""
        with self.activity.during("sums gradients", own=False):
            for stage, weights in self._part.weights.items():
                if stage not in self._updates.inside:
                    weights.finish()
            if self.ranks.shares_table:
                self._sum_over_tied()
        self._static = self.static_bytes

    def _sum_over_tied(self) -> None:
        table = next(self._part.masters[name] for name in self._tables or () if name in self._part.masters)
        if table.requires_grad:
            table.grad = torch.zeros_like(table) if table.grad is None else table.grad
            self.ranks.sum_over_tied(local(table.grad))

    def _mean_loss(self, state: StepState) -> Tensor:
        with self.activity.during("sums the loss", own=False):
            total = state.loss(on=self._lanes.device)
            self.ranks.sum_over_replicas(total)
            self.ranks.sum_over_pipeline(total)
            return total.to(self._loss_dtype)

    @property
    def _loss_dtype(self) -> torch.dtype:
        return torch.float64 if self.plan.options.dtype == "fp64" else torch.float32

    def _total(self) -> Tally:
        """Of the gradients of all ranks."""
        on = self._lanes.device
        with self.activity.during("sums the norm", own=False):
            own = self.ranks.tally(self._updates.squares(), 0.0, on=on)
            return self.ranks.whole(own + Tally(ahead=int(self._attempt.ahead)), on=on)
