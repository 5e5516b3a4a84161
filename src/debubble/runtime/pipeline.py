"""A model that trains by a plan: `loss = pipeline.step(batch); optimizer.step()`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from debubble.ir import InputError, lower
from debubble.plans import Plan
from debubble.runtime.assembly import build_device_part, check_runnable, check_switch
from debubble.runtime.distributed.data_parallel import check_before_steps, check_divided
from debubble.runtime.distributed.transport import Transport
from debubble.runtime.execution.lanes import lanes_of
from debubble.runtime.execution.operations import TensorOperations
from debubble.runtime.execution.status import RankStatus
from debubble.runtime.launch.failures import MoveMemoryError, explained_shortage
from debubble.runtime.memory.arena import Arena
from debubble.runtime.models.compilation import compiler_of
from debubble.runtime.models.float8 import float8_of
from debubble.runtime.models.loss import Loss, check_loss, cross_entropy
from debubble.runtime.models.modules import sequence_of
from debubble.runtime.models.stage import Stage
from debubble.runtime.parameters.averages import WeightAverages
from debubble.runtime.parameters.optimizers import DeviceOptimizers, LossScale, MakeOptimizer
from debubble.runtime.steps.batch import Batch
from debubble.runtime.steps.batch_agreement import BatchAgreement
from debubble.runtime.steps.forward_runs import ForwardRuns
from debubble.runtime.steps.measurements import Measurements
from debubble.runtime.steps.post_validation import PostValidatedSteps, StepResult
from debubble.runtime.steps.repartition import exchange_units, restore_states
from debubble.runtime.steps.step_inputs import StepInputs
from debubble.runtime.steps.training_step import StepRunner
from debubble.runtime.steps.updates import DeviceGradients, ParameterUpdates
from debubble.runtime.topology import Ranks, default_device, default_transport
from debubble.runtime.weights.hf_files import load_pretrained, save_pretrained


class Pipeline:
    """This rank's stages of a model that trains by a plan.

    Every rank constructs its Pipeline after torch.distributed is initialised; under torchrun the Pipeline initialises
    it.  Ranks of one pipeline are consecutive: rank = (pipeline x devices + device) x tensor + tensor_rank, with
    pipeline = replica x context + slice.

    Args:
        model: None: the units are built from the plan's model, with initial weights that depend on `seed` only.  A
            Hugging Face model: this rank's units use its parameters.  For a plan of measured units or stage costs, an
            `nn.Sequential`, or a module whose method `pipeline_units()` returns as many modules as the plan has units,
            in order, each of which maps one tensor to one.
        plan: The plan to run.
        seed: Determines initial weights, dropout masks and router noise.
        loss: Replaces cross entropy: `loss(output, targets)` is a scalar, *summed* over the targets of a micro-batch
            that are not -100.  The output is the last unit's; for language models the logits [rows, length,
            vocabulary].  `step` divides by the number of targets of the whole batch.  Keyword-only parameters without
            a default get the batch's entries of these names.
        optimizer: Makes the optimizer of a list of parameters, for `optimizer_step`, `post_validated_step`, and the
            stages that the plan steps inside the step.  Without it, give `parameters()` to an optimizer of your own.
        transport: Carries messages between ranks; default: torch.distributed.
        device: torch device of the stages; default: this rank's GPU with NCCL, else the CPU.
        offload_to: Folder on a fast disk for offloaded activations, if host memory is short.
        compile: Whether to use `torch.compile` for the units; or the name of its backend.
        fp8: Whether the linear layers of half-layers multiply in 8 bits, through torchao; `emulated`: with the same
            rounding on any device.
        arena: Whether to enforce this device's address plan (`debubble.simulator.plan_addresses`): saved activations
            must fit into the planned tensors, else `step` raises ArenaError, and an operation waits until its addresses
            are free.
        ema_decay: Decay of an exponential moving average of the parameters, see `averaged`; None: no average.  Needs
            an `optimizer`.

    Raises:
        InputError: These ranks cannot run the plan, or the model, loss or optimizer does not match it.

    Example:
        >>> pipeline = db.Pipeline(None, plan)  # doctest: +SKIP
        >>> optimizer = torch.optim.AdamW(pipeline.parameters())  # doctest: +SKIP
        >>> loss = pipeline.step(batch); optimizer.step(); optimizer.zero_grad()  # doctest: +SKIP
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
        compile: bool | str = False,
        fp8: bool | Literal["emulated"] = False,
        ema_decay: float | None = None,
        arena: bool = False,
    ) -> None:
        transport = transport or default_transport()
        check_runnable(plan, transport.size)
        check_loss(loss, plan)
        compiler = compiler_of(compile, plan)
        self.plan = plan
        self.ranks = Ranks(plan, transport)
        """The ranks of the run and their groups."""
        self.device = self.ranks.device
        """This rank's pipeline device."""
        self.status = RankStatus()
        """This rank's status, for a watchdog."""
        self.loss_scale = LossScale() if plan.options.dtype == "fp16" else None
        """The scale of the loss in an fp16 run."""
        self._lanes = lanes_of(device or default_device(), offload_to=offload_to)
        self.measured = Measurements(self.ranks, self._lanes, self.status, devices=plan.devices)
        """Memory and times of the last step."""
        self.moves_units = plan.model is not None and model is None and optimizer is not None
        """True if `switch_plan` can move units between stages."""

        source = sequence_of(model, plan) if plan.model is None else plan.model
        program, on = lower(plan.schedule, plan.costs), self._lanes.device
        self.ranks.open(program, seed=seed, own_model=model is None)
        self._build = partial(
            build_device_part, device=self.device, source=source, loss=loss, seed=seed, on=on,
            ledger=self.measured.activations, groups=self.ranks.groups, compiler=compiler,
            float8=float8_of(fp8, plan, on),
        )  # fmt: skip
        self._optimize = partial(
            DeviceOptimizers, make=optimizer, shares_table=self.ranks.shares_table, ema_decay=ema_decay
        )
        self.device_part = self._build(plan, model=model)
        """This device's stages with their parameters."""
        self._optimizers = self._optimize(plan, self.device_part)
        self._check_optimizers(made=optimizer is not None)
        self.measured.optimizers = self._optimizers
        self.measured.activations.arena = Arena.from_plan(plan, self.device, on=on) if arena else None
        gradients = DeviceGradients(self.device_part, self._optimizers, self.ranks, self.status, on)
        self._runner = StepRunner(
            plan=plan,
            seed=seed,
            ranks=self.ranks,
            inputs=StepInputs(plan, source, loss=loss, context=self.ranks.context, on=on),
            batches=BatchAgreement(self.ranks),
            status=self.status,
            measured=self.measured,
            loss_scale=self.loss_scale,
            operations=TensorOperations(
                program=program,
                device=self.device,
                transport=transport,
                rank_of=self.ranks.rank_of,
                lanes=self._lanes,
                messages=self.measured.messages,
                arena=self.measured.activations.arena,
                stages=self.device_part.stages,
                weights=self.device_part.weights,
                observe=self.measured.unit_times.observe,
            ),
            gradients=gradients,
            updates=ParameterUpdates(gradients, loss_scale=self.loss_scale),
        )
        self._post_validated: PostValidatedSteps | None = None

    # Steps

    @property
    def steps_taken(self) -> int:
        """Steps so far, which determine dropout masks: set it when resuming."""
        return self._runner.taken

    @steps_taken.setter
    def steps_taken(self, steps: int) -> None:
        self._runner.taken = steps

    def step(self, batch: Batch) -> Tensor:
        """Run forward and backward of one batch by the plan, which accumulates gradients in `parameters()`.

        Args:
            batch: This replica's tokens and targets [rows, length], the same on all its ranks (see `Batch`); it is
                split into the plan's micro-batches.

        Returns:
            The mean loss over all targets, a scalar, on every rank.

        Raises:
            InputError: The batch does not fit the plan, differs from that of the replica's other ranks, or has an
                unsupported entry; or hosts have stepped stages since the last `optimizer_step`.
        """
        self.finish_update()
        return self._runner.run(batch)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """Compute the mean loss of some batches by forwards only, without dropout.

        Modules are in evaluation mode meanwhile.  All ranks call it between two steps; it finishes a pending update.
        Gradients, the step count and the last step's measurements do not change.

        Args:
            batches: This replica's batches, each as for `step`; the same number on every replica.

        Returns:
            The mean loss over the targets of all batches, a scalar, on every rank, including the auxiliary loss of
            routers, which is weighted by each batch's number of targets.

        Raises:
            InputError: There is no batch, or one that `step` would refuse.
        """
        self.finish_update()
        self._runner.updates.check_finished()
        return self._forward_runs.evaluate(batches)

    @torch.no_grad()
    def generate(self, prompts: Tensor, *, new_tokens: int, temperature: float = 0.0, seed: int = 0) -> Tensor:
        """Generate tokens after some prompts, to inspect what a language model has learned.  All ranks call it.

        Every new token takes a forward of all tokens before it: there is no key-value cache.

        Args:
            prompts: Tokens [rows, length], the same on all ranks of a replica.
            new_tokens: Number of tokens to generate.
            temperature: Sampling temperature; 0: always the most likely token.
            seed: Seed of the samples.

        Returns:
            Tokens [rows, length + new_tokens], on every rank.

        Raises:
            InputError: The plan has no model, or the prompts have another shape.
        """
        self.finish_update()
        self._runner.updates.check_finished()
        return self._forward_runs.generate(prompts, new_tokens=new_tokens, temperature=temperature, seed=seed)

    def optimizer_step(self, max_norm: float | None = None) -> Tensor:
        """Clip gradients, step the optimizers that have not stepped inside the step, and clear the gradients.

        If the norm is inf or NaN, no parameter changes, and in fp16 the loss scale is halved.  Steps that hosts have
        taken inside the step are rolled back, and repeated with clipped gradients, where the norm requires it.  Steps
        that devices have taken are final; they skip stages whose own gradients have an inf or NaN.

        Args:
            max_norm: Largest norm of all gradients over all ranks; None: no clipping.

        Returns:
            The norm before clipping, a scalar.

        Raises:
            InputError: `max_norm` is set, and devices have stepped stages inside the step: use `post_validated_step`.
        """
        total = self._runner.updates.finish(max_norm)
        self.measured.rolled_back = self._runner.updates.rolled_back
        return torch.tensor(total.norm, dtype=torch.float64)

    def post_validated_step(self, batch: Batch, *, max_norm: float = math.inf) -> StepResult | None:
        """Run a step and its update, clipped to `max_norm`, skipped on inf or NaN, without waiting for other devices.

        The update is validated by the next `post_validated_step` or by `finish_update`; then parameters are bitwise
        those of `step` and `optimizer_step`.  Until `finish_update`, all batches must have the shapes of the first.

        Args:
            batch: As for `step`.
            max_norm: Largest norm of all gradients over all ranks.

        Returns:
            The result of the previous step; None for the first.

        Raises:
            InputError: As for `step`, and in fp16.  Different batches on a replica's ranks may be reported only by
                `finish_update`.
        """
        if self._post_validated is None:
            self._post_validated = PostValidatedSteps(self._runner)
        return self._post_validated.run(batch, max_norm=max_norm)

    def finish_update(self) -> StepResult | None:
        """Validate the update of the last `post_validated_step`, and correct it where necessary.

        All ranks call it, before anything reads parameters or optimizer states.

        Returns:
            The result of that step; None if there is no update to validate.
        """
        return None if self._post_validated is None else self._post_validated.finish()

    def gradient_norm(self) -> Tensor:
        """Return the norm of all gradients over all ranks, a scalar.  All ranks call it, before they step."""
        return torch.tensor(self._runner.updates.total().norm, dtype=torch.float64)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`.

        They do not change if one is inf or NaN, as the returned norm is then, too.

        Returns:
            The norm before clipping, a scalar.

        Raises:
            InputError: The plan steps stages inside the step.
        """
        return torch.tensor(self._runner.updates.clip(max_norm).norm, dtype=torch.float64)

    def switch_plan(self, plan: Plan) -> None:
        """Continue with another plan, which orders, recomputes, offloads or partitions differently.

        All ranks call it between two steps; it finishes a pending update.  Optimizers and the step count remain.  If
        the partition changes, units move to their new ranks with gradients, optimizer states and averages, and
        `parameters()` are new objects.

        Raises:
            InputError: The plan has another model, devices or steps; or another partition, and units cannot move; or
                ranks have different plans; or it cannot be lowered.
            MoveMemoryError: A device cannot hold its old and new units together.
        """
        self.finish_update()
        check_switch(plan, self.plan, moves_units=self.moves_units)
        program = lower(plan.schedule, plan.costs)
        self.ranks.check_same(plan)
        if plan.lengths == self.plan.lengths:
            for number, stage in self.device_part.stages.items():
                stage.set_strategies(plan.partition[number])
        else:
            self._runner.updates.check_finished()
            shortage = explained_shortage(partial(MoveMemoryError, self.device))
            with shortage, self.status.phase("moves units", local=False):
                self._move_units(plan)
        self._runner.switch_plan(plan, program, self.device_part)
        self.plan = plan

    # Parameters

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that an optimizer steps on this rank, each once: the master weights, fp32 in mixed precision.

        With ZeRO they are this replica's rows.  With tensor parallelism over torch.distributed they are DTensors.
        """
        return self.device_part.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters by Hugging Face name, including frozen ones; a table that is tied on this rank comes once."""
        return self.device_part.named_parameters()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace parameters by their moving averages within the context.  All ranks enter it.

        Raises:
            InputError: The pipeline was made without `ema_decay`.
        """
        if self.averages is None:
            raise InputError("There are no averages of the weights: give Pipeline an `ema_decay`.")
        self.finish_update()
        try:
            with self.averages.in_place():
                yield
        finally:
            self.device_part.load_working()

    @property
    def averages(self) -> WeightAverages | None:
        """The moving averages of the parameters, for checkpoints; None without `ema_decay`."""
        return self._optimizers.averages

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers made by `optimizer`, for learning-rate schedules and checkpoints."""
        return self._optimizers.all

    def state_dict(self) -> dict[str, Tensor]:
        """This device's full parameters by Hugging Face name.  With ZeRO all replicas call it."""
        self.finish_update()
        return self.device_part.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load this rank's parameters from a state by Hugging Face name, which may have more entries.

        Raises:
            InputError: The state lacks a parameter.
        """
        self.finish_update()
        self.device_part.load_state_dict(state)

    def load_pretrained(self, folder: str | Path) -> None:
        """Load this rank's parameters, and read no others, from a Hugging Face checkpoint (safetensors).

        From a folder written by peft it loads adapters only.
        """
        load_pretrained(self.device_part, self.plan.model, folder)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a checkpoint for Hugging Face's `from_pretrained`, or peft's for adapters.  All ranks call it."""
        self.finish_update()
        save_pretrained(self.device_part, self.plan, self.ranks, folder)

    @property
    def stages(self) -> Mapping[int, Stage]:
        """This device's stages by number; their units are modules."""
        return self.device_part.stages

    @torch.no_grad()
    def _move_units(self, plan: Plan) -> None:
        """Build the plan's stages, and restore the training state of their units."""
        states = exchange_units(self.ranks, self.plan, plan, self.device_part, self._optimizers, on=self._lanes.device)
        device_part = self._build(plan)
        optimizers = self._optimize(plan, device_part)
        restore_states(device_part, optimizers, self._optimizers, states)
        for unit in (unit for stage in self.device_part.stages.values() for unit in stage.units):
            self.measured.activations.include((*unit.parameters(), *unit.buffers()))
        self.device_part, self._optimizers, self.measured.optimizers = device_part, optimizers, optimizers
        self._runner.gradients = DeviceGradients(device_part, optimizers, self.ranks, self.status, self._lanes.device)
        self._runner.updates = ParameterUpdates(self._runner.gradients, loss_scale=self.loss_scale)
        self.__dict__.pop("_forward_runs", None)  # it has the old stages

    @cached_property
    def _forward_runs(self) -> ForwardRuns:
        return ForwardRuns(self._runner)

    def _check_optimizers(self, *, made: bool) -> None:
        """Refuse optimizers, made here or by the user, that cannot step rows (ZeRO) or skip steps (fp16)."""
        if self.loss_scale is not None and (not made or self._optimizers.on_device):
            raise InputError(
                "fp16 skips the steps whose gradients overflow: give Pipeline an `optimizer`, call `optimizer_step`,"
                " and let the plan step no stage on its device."
            )
        if self.ranks.replica_group.shards_states:
            for optimizer in self._optimizers.all:
                check_divided(optimizer)
            check_before_steps(self, self.parameters())
