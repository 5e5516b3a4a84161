"""A model that trains by its plan: `loss = pipeline.step(batch); optimizer.step()`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from debubble.ir import InputError, Plan, lower
from debubble.ir.trace import MemorySample, Trace, TracePhase, TraceStep
from debubble.runtime.assembly import build_part, check_follows, check_runnable, loss_dtype
from debubble.runtime.batch import Batch, StepBatch
from debubble.runtime.batch_agreement import BatchAgreement
from debubble.runtime.distributed.data_parallel import check_before_steps, check_divided
from debubble.runtime.distributed.sharding import TensorShard
from debubble.runtime.distributed.transport import Transport
from debubble.runtime.execution.interpreter import Interpreter
from debubble.runtime.execution.lanes import lanes_of
from debubble.runtime.execution.operations import StepState, TensorOperations
from debubble.runtime.execution.speculation import SpeculativeInterpreter
from debubble.runtime.execution.status import RankStatus
from debubble.runtime.execution.synchronization import ExecutedInstruction, trace_events
from debubble.runtime.failures import MoveMemoryError, explained_shortage
from debubble.runtime.forward_runs import ForwardRuns
from debubble.runtime.hf_files import load_pretrained, save_pretrained
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.compilation import compiler_of
from debubble.runtime.models.float8 import float8_of
from debubble.runtime.models.loss import Loss, check_loss, cross_entropy
from debubble.runtime.models.modules import sequence_of
from debubble.runtime.models.stage import Stage
from debubble.runtime.parameters.averages import WeightAverages
from debubble.runtime.parameters.device_part import DevicePart
from debubble.runtime.parameters.optimizers import DeviceOptimizers, LossScale, MakeOptimizer
from debubble.runtime.parameters.post_validation import PostValidation, StepResult
from debubble.runtime.repartition import exchange_units, restore_states
from debubble.runtime.step_inputs import StepInputs
from debubble.runtime.topology import Ranks, default_device, default_transport
from debubble.runtime.updates import DeviceGradients, ParameterUpdates

MEETS = "meets the other ranks"
"""The phase of a step in which they agree on its batch."""


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
    ) -> None:
        transport = transport or default_transport()
        check_runnable(plan, transport.size)
        check_loss(loss, plan)
        compiler = compiler_of(compile, plan)
        self.plan, self.seed = plan, seed
        self.ranks = Ranks(plan, transport)
        """All ranks of the run, as this one sees them."""
        self.device = self.ranks.device
        """The pipeline device that this rank is."""
        self.status = RankStatus()
        """This rank's status, which a watchdog can read."""
        self.steps_taken = 0
        """Set it when resuming: dropout masks follow from it."""
        self.measure_memory = False
        """Whether every step counts the bytes that it keeps.

        The first step of other shapes than those before counts them in any case, as do all of a device that recomputes
        or offloads; peaks are those of the last step that did.  Counting takes time where tensors are small.
        """
        self.loss_scale = LossScale() if plan.options.dtype == "fp16" else None
        """The scale of the loss in an fp16 run."""

        modules = sequence_of(model, plan) if plan.model is None else None
        self._lanes = lanes_of(device or default_device(), offload_to=offload_to)
        self._activations, self._messages = Ledger(self._lanes.device), Ledger(self._lanes.device)

        program = lower(plan.schedule, plan.costs)
        self.ranks.open(program, seed=seed, own_model=model is None)
        self._build = partial(
            build_part, device=self.device, loss=loss, seed=seed, on=self._lanes.device, ledger=self._activations,
            groups=self.ranks.groups, compiler=compiler, float8=float8_of(fp8, plan, self._lanes.device),
        )  # fmt: skip
        self._optimize = partial(
            DeviceOptimizers, make=optimizer, shares_table=self.ranks.shares_table, ema_decay=ema_decay
        )
        part = self._build(plan, model=model, modules=modules)
        self._adopt(part, self._optimize(plan, part))
        self._check_optimizers(made=optimizer is not None)
        self._operations = TensorOperations(
            program=program,
            device=self.device,
            transport=transport,
            rank_of=self.ranks.rank_of,
            lanes=self._lanes,
            messages=self._messages,
            stages=self._part.stages,
            weights=self._part.weights,
        )
        self._interpreter = Interpreter(self._operations, self.status)
        self._inputs = StepInputs(plan, modules, loss=loss, context=self.ranks.context, on=self._lanes.device)
        self._batches = BatchAgreement(self.ranks)

        self.moves_units = plan.model is not None and model is None and optimizer is not None
        """Whether `switch_plan` takes plans with other units in their stages."""
        self._validation: PostValidation | None = None

        self._executed: Sequence[ExecutedInstruction] = []
        """Instructions of the last step."""
        self._origin = 0.0
        """When the last step began, in seconds on the host's clock."""
        self._counted_shapes: tuple[tuple[int, ...], ...] = ()
        """Shapes of the micro-batches of the last step that counted memory."""
        self._counts_memory = False
        """Whether the last step did."""
        self._gradient_bytes = 0
        """Most bytes of gradients when the program of the last step that counted had run: they may be gone since."""

    # Steps

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
        self._updates.check_finished()
        self.status.begin_step()
        with self.status.phase(MEETS, local=False):
            checked = self._inputs.read(batch)
            targets, self._origin = self._batches.agree(checked)
        with self._gradients.of_one_step():
            state = self._begin(checked, targets, self._updates.step_stage)
            self._executed = self._interpreter.run(state)
            self._updates.end_program()
            self._finish_gradients()
        self.steps_taken += 1
        return self._mean_loss(state)

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
        self._updates.check_finished()
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
        self._updates.check_finished()
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
        return torch.tensor(self._updates.finish(max_norm).norm, dtype=torch.float64)

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
        if self.loss_scale is not None:
            raise InputError("fp16 skips steps: it cannot update before the norm is known, so call `step`.")
        self._updates.check_finished()
        self.status.begin_step()
        validation = self._validation = self._validation or PostValidation(
            self.ranks.open_relay(), loss_dtype=loss_dtype(self.plan)
        )
        with self.status.phase(MEETS, local=False):
            checked = self._inputs.read(batch)
            if validation.pending:
                targets, self._origin = self._batches.count(checked)
            else:
                targets, self._origin = self._batches.agree(checked)
                self._gradients.clear()
        update = self._optimizers.tentative_update(max_norm)
        state = self._begin(checked, targets, update.step)
        executed = self._speculative_interpreter.run_ahead(state, is_valid=validation.is_valid)
        result = validation.finish()
        if executed is None:
            state = self._begin(checked, targets, update.step)
            executed = self._interpreter.run(state)
        self._executed = executed
        self._finish_gradients()
        own = self._gradients.own_sums(float(state.loss(on=self._lanes.device)))
        with self.status.phase("updates parameters, if what is known of the norm lets it", local=False):
            validation.begin(self.steps_taken, update, own)
        self.steps_taken += 1
        return result

    def finish_update(self) -> StepResult | None:
        """Wait until the last `post_validated_step` is validated, and make its update right.

        All ranks call it, before anything reads parameters or optimizer states.

        Returns:
            The result of that step; None if there is no update to validate.
        """
        if self._validation is None or not self._validation.pending:
            return None
        with self.status.phase("settles the update", local=False):
            result = self._validation.finish()
            self._batches.check_counted()
            return result

    def gradient_norm(self) -> Tensor:
        """Return the norm of all gradients over all ranks, a scalar.  All ranks call it, before they step."""
        return torch.tensor(self._updates.total().norm, dtype=torch.float64)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`.

        They stay as they are if one is inf or NaN: the norm says so.

        Returns:
            The norm before, a scalar.

        Raises:
            InputError: The plan steps stages inside the step.
        """
        return torch.tensor(self._updates.clip(max_norm).norm, dtype=torch.float64)

    def switch_plan(self, plan: Plan) -> None:
        """Go on with this plan, which orders, recomputes, offloads or divides the units otherwise.

        All ranks call it between two steps.  Optimizers and the count of steps stay; a pending update is finished.
        Where stages have the same units, parameters stay, too.  Others move to the rank that has their unit now, with
        gradients, states and averages: `parameters()` are new ones then.

        Raises:
            InputError: The plan has another model, devices or steps, or other units where these cannot move; or the
                ranks have different plans; and what lowering raises.
            MoveMemoryError: A device has no room for its new units beside the old ones.
        """
        self.finish_update()
        check_follows(plan, self.plan, moves_units=self.moves_units)
        program = lower(plan.schedule, plan.costs)
        self.ranks.check_same(plan)
        if plan.lengths == self.plan.lengths:
            for number, stage in self._part.stages.items():
                stage.follow(plan.partition[number])
        else:
            self._updates.check_finished()
            shortage = explained_shortage(partial(MoveMemoryError, self.device))
            with shortage, self.status.phase("moves units", local=False):
                self._move_units(plan)
        self._operations = replace(
            self._operations, program=program, stages=self._part.stages, weights=self._part.weights
        )
        self._interpreter = Interpreter(self._operations, self.status)
        self.__dict__.pop("_speculative_interpreter", None)
        self._counted_shapes = ()
        self.plan = plan

    # Parameters

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that an optimizer steps on this rank, each once: fp32 (or fp64), whatever the run's dtype.

        With ZeRO they are this replica's rows.  Under tensor parallelism over torch.distributed they are DTensors.
        """
        return self._part.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters by Hugging Face name, frozen ones too; a table that is tied on this rank comes once."""
        return self._part.named_parameters()

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
            self._part.load_working()

    @property
    def rolled_back(self) -> int:
        """Devices whose hosts took their steps back in the last `optimizer_step`."""
        return self._updates.rolled_back

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
        return self._part.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take this rank's parameters from a state by Hugging Face name, which may hold more.

        Raises:
            InputError: The state lacks one.
        """
        self.finish_update()
        self._part.load_state_dict(state)

    def shards(self) -> Iterator[tuple[str, nn.Parameter, TensorShard]]:
        """This rank's part of each parameter and where it lies in the whole one: what checkpoints are made of.

        By Hugging Face name; both copies of a tied table go by the embedding's.
        """
        self.finish_update()
        return self._part.shards()

    def load_pretrained(self, folder: str | Path) -> None:
        """Take this rank's parameters from a Hugging Face checkpoint (safetensors), reading these alone.

        A folder that peft wrote has adapters alone: the others stay.
        """
        load_pretrained(self._part, self.plan.model, folder)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a checkpoint that Hugging Face's `from_pretrained` opens; of adapters, peft's.  All ranks call it."""
        self.finish_update()
        save_pretrained(self._part, self.plan, self.ranks, folder)

    @property
    def stages(self) -> Mapping[int, Stage]:
        """This device's stages by number; their units are modules."""
        return self._part.stages

    # Measurements of the last step

    @property
    def peak_activation(self) -> int:
        """Most bytes of saved activations, and of what a deferred W needs, at a time of the last step that counted."""
        return self._activations.peak

    @property
    def peak_messages(self) -> int:
        """Most bytes received and not yet used, or computed and not yet sent, in the last step."""
        return self._messages.peak

    @property
    def peak_offloaded(self) -> int:
        """Most bytes that offload held elsewhere in the last step that counted."""
        return self._activations.elsewhere_peak

    @property
    def peak_memory(self) -> int:
        """Most bytes on the device at any moment of a step: static, saved activations, gathered parameters."""
        return self._static + self._activations.peak_with_gathered

    @property
    def peak_gathered(self) -> int:
        """Most bytes of parameters that were gathered at any moment of the last step that counted (ZeRO-3)."""
        return self._activations.gathered_peak

    @property
    def current_memory(self) -> int:
        """Bytes of parameters, states and saved activations that are on the device now."""
        return self.static_bytes + self._activations.bytes

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of activations, here and offloaded, and of messages that are held now; 0 between steps."""
        return self._activations.bytes + self._activations.elsewhere + self._messages.bytes

    @property
    def static_bytes(self) -> int:
        """Bytes of parameters, working copies, gradients and the states of `optimizers` on the device.

        What the plan leaves to the host is the host's, also where both are the CPU.
        """
        return self._optimizers.static_bytes

    def trace(self) -> Trace:
        """This rank's events, memory and phases of the last step; `Trace.join` joins those of all ranks.

        The memory is that of a step that counted it (see `measure_memory`).
        """
        device, origin, static = self.device, self._origin, self._static
        samples = self._activations.samples if self._counts_memory else ()
        step = TraceStep(
            step=self.steps_taken - 1,
            events=trace_events(self._executed, self._lanes, device=device, origin=origin),
            memory=tuple(MemorySample(device, at - origin, static + b) for at, b in samples),
            phases=tuple(TracePhase(p.what, device, p.start - origin, p.end - origin) for p in self.status.phases),
        )
        return Trace(devices=self.plan.devices, steps=(step,))

    def gather_trace(self) -> Trace:
        """The whole trace of the last step, on every rank (of replica 0's ranks).  All ranks call it."""
        self._origin = self.ranks.earliest(self._origin)
        parts = self.ranks.first_per_device(self.ranks.transport.gather(self.trace().to_json()))
        return Trace.join([Trace.from_json(part) for part in parts])

    @torch.no_grad()
    def _move_units(self, plan: Plan) -> None:
        """Build the plan's stages, and let them train on where these units have been trained."""
        states = exchange_units(self.ranks, self.plan, plan, self._part, self._optimizers, on=self._lanes.device)
        part = self._build(plan)
        optimizers = self._optimize(plan, part)
        restore_states(part, optimizers, self._optimizers, states)
        for unit in (unit for stage in self._part.stages.values() for unit in stage.units):
            self._activations.include((*unit.parameters(), *unit.buffers()))
        self._adopt(part, optimizers)
        self.__dict__.pop("_forward_runs", None)  # those of the stages that were

    def _adopt(self, part: DevicePart, optimizers: DeviceOptimizers) -> None:
        """Train these stages with these optimizers from now on."""
        self._part, self._optimizers = part, optimizers
        self._gradients = DeviceGradients(part, optimizers, self.ranks, self.status, self._lanes.device)
        self._updates = ParameterUpdates(self._gradients, loss_scale=self.loss_scale)

    # Parts of a step

    @cached_property
    def _speculative_interpreter(self) -> SpeculativeInterpreter:
        return SpeculativeInterpreter(self._operations, self.status)

    @cached_property
    def _forward_runs(self) -> ForwardRuns:
        return ForwardRuns(
            self.plan, self._inputs, self._batches, self.ranks, self._operations, self._activations, self.status
        )

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

    def _begin(self, batch: StepBatch, targets: int, step_stage: Callable[[int], None]) -> StepState:
        """The state of a step that starts now, with the working copies of the masters as they are."""
        with self.status.phase("readies parameters", local=False):
            for weights in self._part.weights.values():
                weights.loss_scale = self._scale
                weights.refresh()
        seed = zlib.crc32(f"{self.seed} {self.steps_taken} {self.ranks.replica}".encode())
        self._counts_memory = (
            self.measure_memory or self._operations.needs_ledger or batch.shapes != self._counted_shapes
        )
        if self._counts_memory:
            self._counted_shapes = batch.shapes
            self._activations.start_step()
        self._messages.start_step()
        self._lanes.start_step()
        return self._inputs.state(
            batch,
            targets,
            seed=seed,
            scale=self._scale,
            step_stage=step_stage,
            counts_memory=self._counts_memory,
        )

    def _finish_gradients(self) -> None:
        if not self._counts_memory:
            self._gradients.finish()
            return
        # Where replicas divide what an optimizer steps, whole gradients take more than what is left of them.
        whole = self._optimizers.gradient_bytes if self.ranks.over_replicas.divided else 0
        self._gradients.finish()
        self._gradient_bytes = max(whole, self._optimizers.gradient_bytes)

    def _mean_loss(self, state: StepState) -> Tensor:
        with self.status.phase("sums the loss", local=False):
            total = state.loss(on=self._lanes.device) / self._scale
            self.ranks.sum_over_replicas(total)
            self.ranks.sum_over_pipeline(total)
            return total.to(loss_dtype(self.plan))

    @property
    def _static(self) -> int:
        """Bytes of parameters and all else that is there throughout a step, with the last step's gradients."""
        return self._optimizers.lasting_bytes + self._gradient_bytes

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value
