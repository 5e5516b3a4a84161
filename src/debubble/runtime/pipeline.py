"""A model that trains by its plan: `loss = pipeline.step(batch); optimizer.step()`."""

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
from debubble.runtime.assembly import build_part, check_follows, check_runnable
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
    """This rank's part of a model that trains by its plan.

    Every rank constructs its Pipeline after torch.distributed is initialised, or under torchrun: then it is initialised
    here.  Ranks of one pipeline are consecutive: rank = (pipeline x devices + device) x tensor + part, with pipeline =
    replica x context + slice.

    Args:
        model: None, and the units are built from the plan's model, the same on any ranks for the same `seed`; or a
            Hugging Face model, whose parameters this rank's units take over.  For a plan that was made for units or
            stages of given costs: an `nn.Sequential`, or a module with a method `pipeline_units()` that returns its
            modules in order, as many as the plan has units, each of one tensor to one.
        plan: What runs.
        seed: Initial weights, dropout masks and noise of routers follow from it.
        loss: Takes the place of cross entropy: `loss(output, targets)` is a number, *summed* over the targets of a
            micro-batch that are not -100.  The output is the last unit's: of language models the logits [rows, length,
            vocabulary].  `step` divides by the number of targets of the whole batch.  Its keyword-only parameters
            without a default are given the batch's entries of these names.
        optimizer: Makes the optimizer of a list of parameters, for `optimizer_step`, `post_validated_step`, and the
            stages that the plan steps inside the step.  Without it, give `parameters()` to an optimizer of your own.
        transport: Carries messages between ranks; torch.distributed unless given.
        device: Where the stages are; a GPU where the ranks talk NCCL, else the CPU, unless given.
        offload_to: Folder on a fast disk that takes offloaded activations, where the host's memory is short.
        compile: Whether `torch.compile` compiles the units; or the name of its backend.
        fp8: Whether the linear layers of half-layers multiply in 8 bits, through torchao; `emulated`: with the same
            rounding on a device that cannot.
        arena: Whether steps are held to the address plan of this device (`debubble.simulator.plan_addresses`): what the
            backward needs has to fit into its planned tensors, else `step` raises ArenaError, and an operation waits
            until its addresses are free.
        ema_decay: Of an exponential moving average of the parameters, which `averaged` puts in their place; None: there
            is none.  Needs an `optimizer`.

    Raises:
        InputError: These ranks cannot run the plan, or the model, the loss or the optimizer does not suit it.

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
        """All ranks of the run, as this one sees them."""
        self.device = self.ranks.device
        """The pipeline device that this rank is."""
        self.status = RankStatus()
        """This rank's status, which a watchdog can read."""
        self.loss_scale = LossScale() if plan.options.dtype == "fp16" else None
        """The scale of the loss in an fp16 run."""
        self._lanes = lanes_of(device or default_device(), offload_to=offload_to)
        self.measured = Measurements(self.ranks, self._lanes, self.status, devices=plan.devices)
        """Memory and times of the last step."""
        self.moves_units = plan.model is not None and model is None and optimizer is not None
        """True if `switch_plan` takes plans with other units in their stages."""

        source = sequence_of(model, plan) if plan.model is None else plan.model
        program, on = lower(plan.schedule, plan.costs), self._lanes.device
        self.ranks.open(program, seed=seed, own_model=model is None)
        self._build = partial(
            build_part, device=self.device, source=source, loss=loss, seed=seed, on=on,
            ledger=self.measured.activations, groups=self.ranks.groups, compiler=compiler,
            float8=float8_of(fp8, plan, on),
        )  # fmt: skip
        self._optimize = partial(
            DeviceOptimizers, make=optimizer, shares_table=self.ranks.shares_table, ema_decay=ema_decay
        )
        self.part = self._build(plan, model=model)
        """This device's stages and their parameters."""
        self._optimizers = self._optimize(plan, self.part)
        self._check_optimizers(made=optimizer is not None)
        self.measured.optimizers = self._optimizers
        self.measured.activations.arena = Arena.of(plan, self.device, on=on) if arena else None
        gradients = DeviceGradients(self.part, self._optimizers, self.ranks, self.status, on)
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
                stages=self.part.stages,
                weights=self.part.weights,
                observe=self.measured.unit_times.observe,
            ),
            gradients=gradients,
            updates=ParameterUpdates(gradients, loss_scale=self.loss_scale),
        )
        self._post_validated: PostValidatedSteps | None = None

    # Steps

    @property
    def steps_taken(self) -> int:
        """Steps so far, from which dropout masks follow: set it when resuming."""
        return self._runner.taken

    @steps_taken.setter
    def steps_taken(self, steps: int) -> None:
        self._runner.taken = steps

    def step(self, batch: Batch) -> Tensor:
        """Run forward and backward of one batch by the plan; the gradients are then on `parameters()`.

        Args:
            batch: This replica's tokens and targets [rows, length], the same on all its ranks (see `Batch`); the plan's
                micro-batches are cut from it.

        Returns:
            The mean loss over all targets, a scalar, on every rank.

        Raises:
            InputError: The batch does not fit the plan, is not that of the replica's other ranks, or has an entry that
                cannot be honoured; or hosts have stepped stages since the last `optimizer_step`.
        """
        self.finish_update()
        return self._runner.run(batch)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """Run forwards of some batches alone, without dropout, and keep nothing of them.

        Modules are in evaluation mode meanwhile.  All ranks call it between two steps; a pending update is finished.
        Gradients, the count of steps and what was measured of the last step stay.

        Args:
            batches: This replica's, each as `step` takes it; as many on every replica.

        Returns:
            The mean loss over the targets of all batches, a scalar, on every rank.  The auxiliary loss of routers is
            part of it; a batch counts as much as it has targets.

        Raises:
            InputError: There is no batch, or one that `step` would refuse.
        """
        self.finish_update()
        self._runner.updates.check_finished()
        return self._forward_runs.evaluate(batches)

    @torch.no_grad()
    def generate(self, prompts: Tensor, *, new_tokens: int, temperature: float = 0.0, seed: int = 0) -> Tensor:
        """Continue some prompts, for a look at what a language model has learned.  All ranks call it.

        Every new token takes a forward of all tokens before it: there is no cache of keys and values.

        Args:
            prompts: Tokens [rows, length], the same on all ranks of a replica.
            new_tokens: How many follow.
            temperature: Of sampling; 0: always the likeliest token.
            seed: The samples follow from it.

        Returns:
            Tokens [rows, length + new_tokens], on every rank.

        Raises:
            InputError: The plan has no model; or the prompts have another shape.
        """
        self.finish_update()
        self._runner.updates.check_finished()
        return self._forward_runs.generate(prompts, new_tokens=new_tokens, temperature=temperature, seed=seed)

    def optimizer_step(self, max_norm: float | None = None) -> Tensor:
        """Clip, step the optimizers that the plan has not stepped, and clear the gradients.

        If the norm is inf or NaN, no parameter changes; in fp16 the loss scale follows.  What hosts have stepped by
        then is taken back and stepped again where the norm says so.  Stages that devices have stepped inside the step
        have changed, but for those with an inf or NaN in gradients of their own.

        Args:
            max_norm: Largest norm of all gradients over all ranks; None: they are not clipped.

        Returns:
            The norm before clipping, a scalar.

        Raises:
            InputError: Devices have stepped stages that were to be clipped: `post_validated_step` can.
        """
        total = self._runner.updates.finish(max_norm)
        self.measured.rolled_back = self._runner.updates.rolled_back
        return torch.tensor(total.norm, dtype=torch.float64)

    def post_validated_step(self, batch: Batch, *, max_norm: float = math.inf) -> StepResult | None:
        """Step and update, clipped to `max_norm` and skipped on inf or NaN, without waiting for other devices.

        The parameters are right, to the bit as after `step` and `optimizer_step`, once the update is validated: by the
        next `post_validated_step`, or by `finish_update`.  Until then, all batches have the shape of the first.

        Args:
            batch: As `step` takes it.
            max_norm: Largest norm of all gradients over all ranks.

        Returns:
            The result of the step before this one; None at first.

        Raises:
            InputError: As by `step`, and in fp16; that a replica's ranks have different batches may be found by
                `finish_update` alone.
        """
        if self._post_validated is None:
            self._post_validated = PostValidatedSteps(self._runner)
        return self._post_validated.run(batch, max_norm=max_norm)

    def finish_update(self) -> StepResult | None:
        """Wait until the last `post_validated_step` is validated, and make its update right.

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

        They stay as they are if one is inf or NaN: the norm says so.

        Returns:
            The norm before, a scalar.

        Raises:
            InputError: The plan steps stages inside the step.
        """
        return torch.tensor(self._runner.updates.clip(max_norm).norm, dtype=torch.float64)

    def switch_plan(self, plan: Plan) -> None:
        """Go on with this plan, which orders, recomputes, offloads or divides the units otherwise.

        All ranks call it between two steps.  Optimizers and the count of steps stay; a pending update is finished.
        Where stages have the same units, parameters stay, too.  Others move to the rank that has their unit now, with
        gradients, states and averages: `parameters()` are new ones then.

        Raises:
            InputError: The plan has another model, devices or steps, or other units where these cannot move; or the
                ranks have different plans; and what lowering raises.
            MoveMemoryError: A device has no room for its new units and the old ones.
        """
        self.finish_update()
        check_follows(plan, self.plan, moves_units=self.moves_units)
        program = lower(plan.schedule, plan.costs)
        self.ranks.check_same(plan)
        if plan.lengths == self.plan.lengths:
            for number, stage in self.part.stages.items():
                stage.follow(plan.partition[number])
        else:
            self._runner.updates.check_finished()
            shortage = explained_shortage(partial(MoveMemoryError, self.device))
            with shortage, self.status.phase("moves units", local=False):
                self._move_units(plan)
        self._runner.follow(plan, program, self.part)
        self.plan = plan

    # Parameters

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that an optimizer steps on this rank, each once: fp32 (or fp64), whatever the run's dtype.

        With ZeRO they are this replica's rows.  Under tensor parallelism over torch.distributed they are DTensors.
        """
        return self.part.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters by Hugging Face name, frozen ones too; a table that is tied on this rank comes once."""
        return self.part.named_parameters()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let parameters be their moving averages meanwhile, to evaluate, generate or save with.  All ranks call it.

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
            self.part.load_working()

    @property
    def averages(self) -> WeightAverages | None:
        """The moving averages of the parameters, for checkpoints; None without `ema_decay`."""
        return self._optimizers.averages

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that `optimizer` has made, for learning-rate schedules and checkpoints."""
        return self._optimizers.all

    def state_dict(self) -> dict[str, Tensor]:
        """This device's parameters by Hugging Face name, whole.  With ZeRO all replicas call it."""
        self.finish_update()
        return self.part.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take this rank's parameters from a state by Hugging Face name, which may hold more.

        Raises:
            InputError: The state lacks one.
        """
        self.finish_update()
        self.part.load_state_dict(state)

    def load_pretrained(self, folder: str | Path) -> None:
        """Take this rank's parameters from a Hugging Face checkpoint (safetensors), reading these alone.

        A folder that peft wrote has adapters alone: the others stay.
        """
        load_pretrained(self.part, self.plan.model, folder)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a checkpoint that Hugging Face's `from_pretrained` opens; of adapters, peft's.  All ranks call it."""
        self.finish_update()
        save_pretrained(self.part, self.plan, self.ranks, folder)

    @property
    def stages(self) -> Mapping[int, Stage]:
        """This device's stages by number; their units are modules."""
        return self.part.stages

    @torch.no_grad()
    def _move_units(self, plan: Plan) -> None:
        """Build the plan's stages, and let them train on where these units have been trained."""
        states = exchange_units(self.ranks, self.plan, plan, self.part, self._optimizers, on=self._lanes.device)
        part = self._build(plan)
        optimizers = self._optimize(plan, part)
        restore_states(part, optimizers, self._optimizers, states)
        for unit in (unit for stage in self.part.stages.values() for unit in stage.units):
            self.measured.activations.include((*unit.parameters(), *unit.buffers()))
        self.part, self._optimizers, self.measured.optimizers = part, optimizers, optimizers
        self._runner.gradients = DeviceGradients(part, optimizers, self.ranks, self.status, self._lanes.device)
        self._runner.updates = ParameterUpdates(self._runner.gradients, loss_scale=self.loss_scale)
        self.__dict__.pop("_forward_runs", None)  # those of the stages that were

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
        if self.ranks.over_replicas.divided:
            for optimizer in self._optimizers.all:
                check_divided(optimizer)
            check_before_steps(self, self.parameters())
