"""A model that trains by its plan: `loss = pipeline.step(batch); optimizer.step()`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from debubble.ir import InputError, Kind, Plan, lower
from debubble.ir.trace import MemorySample, Trace, TraceEvent, TraceStep
from debubble.runtime.assembly import DTYPES, build_part, check_runnable
from debubble.runtime.batch import Batch, read_batch
from debubble.runtime.families import read_shape
from debubble.runtime.hf_files import load_pretrained, save_pretrained
from debubble.runtime.hf_names import HEAD_TABLE
from debubble.runtime.interpreter import Interpreter, Ran, StepState
from debubble.runtime.lanes import lanes_of
from debubble.runtime.memory import Ledger
from debubble.runtime.models import TABLE
from debubble.runtime.operators import add_gradient
from debubble.runtime.ranks import Ranks, default_device, default_transport
from debubble.runtime.transport import Transport
from debubble.runtime.weights import Piece


class Pipeline:
    """This rank's part of a plan that runs.

    `model` is None (units are built from the plan's model, the same on any ranks for the same `seed`), or a Hugging
    Face model, whose parameters this rank's units take over.  Every rank constructs its Pipeline after
    torch.distributed is initialised, or under torchrun: then it is initialised here.  Ranks of one pipeline are
    consecutive: rank = replica x devices + device.

    `optimizer` makes the optimizer of a list of parameters, for `update`, and for the stages that the plan steps
    inside the step.  Without it, give `parameters()` to an optimizer of your own.
    """

    def __init__(
        self,
        model: nn.Module | None,
        plan: Plan,
        *,
        seed: int = 0,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        transport: Transport | None = None,
        device: torch.device | None = None,
    ) -> None:
        transport = transport or default_transport()
        check_runnable(plan, transport.size)
        self.plan, self.seed = plan, seed
        self.ranks = Ranks(plan, transport)
        """Who the other ranks are."""
        self._shape = read_shape(plan.model or {})
        self.steps = 0
        """Steps taken.  Set it when resuming: dropout masks follow from it."""
        self.device = self.ranks.device
        """The pipeline device that this rank is."""
        self._lanes = lanes_of(device or default_device())
        self._saved, self._mail = Ledger(self._lanes.device), Ledger(self._lanes.device)
        self._part = build_part(
            plan, self.device, model=model, seed=seed, on=self._lanes.device, ledger=self._saved,
            replicas=self.ranks.over_replicas,
        )  # fmt: skip
        program = lower(plan.schedule, plan.costs)
        self.ranks.open(program, seed=seed, own_model=model is None)
        self._build_optimizers(optimizer)
        self._interpreter = Interpreter(
            program=program,
            device=self.device,
            stages=self._part.stages,
            transport=transport,
            rank_of=self.ranks.rank_of,
            lanes=self._lanes,
            mail=self._mail,
            weights=self._part.weights,
            optimizers=self._inside,
        )
        self._ran: list[Ran] = []
        self._origin = 0.0

    def step(self, batch: Batch) -> Tensor:
        """Forward and backward of one batch by the plan; the gradients are then on `parameters()`.

        The batch is this replica's, the same on all its ranks (see `Batch`); it is cut into the plan's micro-batches.
        Returns the mean loss over all tokens, on every rank.  Raises InputError if the batch does not fit the plan or
        the other ranks'.
        """
        rows = read_batch(batch, micro_batches=self.plan.micro_batches, device=self._lanes.device)
        counted, self._origin = self.ranks.agree(rows)
        before = self._set_aside_gradients()
        seed = zlib.crc32(f"{self.seed} {self.steps} {self.ranks.replica}".encode())
        tokens, micro_batches = rows.split(self.plan.micro_batches, scale=1 / counted, seed=seed)
        state = StepState(
            tokens=tokens,
            micro_batches=micro_batches,
            boundary=[(*t.shape, self._shape.hidden) for t in tokens],
            dtype=DTYPES[self.plan.options.dtype],
        )
        self._saved.start_step()
        self._mail.start_step()
        self._lanes.start_step()
        self._ran = self._interpreter.run(state)
        self._finish()
        for parameter, gradient in before.items():
            add_gradient(parameter, gradient)
        self.steps += 1
        return self._mean_loss(state)

    def parameters(self) -> list[nn.Parameter]:
        """What an optimizer steps on this rank, each once: fp32 (or fp64) masters, whatever the run's dtype.

        With ZeRO they are this replica's rows.
        """
        return list(dict.fromkeys(p for p in self._part.masters.values() if p.requires_grad))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with frozen ones, by Hugging Face name; a table that is tied on this rank comes once."""
        seen: set[nn.Parameter] = set()
        for name, parameter in self._part.masters.items():
            if parameter not in seen:
                seen.add(parameter)
                yield name, parameter

    def state_dict(self) -> dict[str, Tensor]:
        """This device's parameters by Hugging Face name, whole.  With ZeRO all replicas call it."""
        return {name: held.whole(name) for held in self._part.weights.values() for name in held.masters}

    def shape_of(self, name: str) -> torch.Size:
        """Of a whole parameter."""
        return next(held.shapes[name] for held in self._part.weights.values() if name in held.shapes)

    def pieces(self) -> dict[str, Piece]:
        """What this rank has of each parameter, by Hugging Face name: what checkpoints are made of.

        Both copies of a tied table go by the embedding's name.
        """
        own = {HEAD_TABLE: TABLE[self._shape.is_gpt2]} if self._shape.tied else {}
        return {own.get(name, name): held.piece(name) for held in self._part.weights.values() for name in held.masters}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take this rank's parameters from a state by Hugging Face name, which may hold more."""
        with torch.no_grad():
            for name, parameter in self._part.masters.items():
                if name not in state:
                    raise InputError(f"The state has no parameter '{name}'.")
                parameter.copy_(self.ranks.over_replicas.own(state[name]))

    def load_pretrained(self, folder: str | Path) -> None:
        """Take this rank's parameters from a Hugging Face checkpoint (safetensors), reading these alone."""
        load_pretrained(self, folder)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a checkpoint that Hugging Face's `from_pretrained` opens.  All ranks call it."""
        save_pretrained(self, folder)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before."""
        total = torch.zeros((), dtype=torch.float64, device=self._lanes.device)
        for name, parameter in self.named_parameters():
            if parameter.grad is not None and not self._is_second_copy(name):
                total += parameter.grad.double().square().sum().to(total.device)
        if self.ranks.over_replicas.divided:
            self.ranks.sum_over_replicas(total)
        self.ranks.sum_over_pipeline(total)
        norm = total.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.device, parameter.grad.dtype))
        return norm

    def update(self, max_norm: float | None = None) -> Tensor | None:
        """Clip, step the optimizers that the plan has not stepped, and clear the gradients; returns the norm."""
        norm = None if max_norm is None else self.clip_grad_norm(max_norm)
        for optimizer in self._outside:
            optimizer.step()
            optimizer.zero_grad()
        return norm

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those made by `optimizer`, for learning-rate schedules and checkpoints."""
        return [*self._outside, *self._inside.values()]

    @property
    def peak_activation(self) -> int:
        """Most bytes of saved activations, and of what a deferred W needs, at any moment of the last step."""
        return self._saved.peak

    @property
    def peak_messages(self) -> int:
        """Most bytes received and not yet used, or computed and not yet sent, in the last step."""
        return self._mail.peak

    @property
    def peak_offloaded(self) -> int:
        """Most bytes that offload held elsewhere in the last step."""
        return self._saved.elsewhere_peak

    @property
    def static_bytes(self) -> int:
        """Bytes of parameters, working copies, gradients and the states of `optimizers` on the device.

        What the plan leaves to the host is the host's, also where both are the CPU.
        """
        working = [p for stage in self._part.stages.values() for unit in stage.units for p in unit.parameters()]
        states = {p: state.values() for o in self.optimizers for p, state in o.state.items()}
        hosted = {p for weights in self._part.weights.values() if weights.on_host for p in weights.masters.values()}
        stepped = [p for p in self.parameters() if p not in hosted]
        tensors = [*stepped, *working, *(t for p in stepped for t in (p.grad, *states.get(p, ())))]
        held = {t.untyped_storage().data_ptr(): t.nbytes for t in tensors if isinstance(t, Tensor)}
        return sum(held.values())

    def trace(self) -> Trace:
        """What this rank measured in the last step; `Trace.joined` of all ranks' is the whole."""
        marks = self._lanes.seconds([mark for ran in self._ran for mark in (ran.start, ran.end)])
        events = tuple(
            TraceEvent(
                ran.instruction.op.name, self.device, ran.instruction.lane, start - self._origin, end - self._origin
            )
            for ran, start, end in zip(self._ran, marks[::2], marks[1::2], strict=True)
        )
        static = self.static_bytes
        memory = tuple(MemorySample(self.device, at - self._origin, static + held) for at, held in self._saved.samples)
        step = TraceStep(step=self.steps - 1, events=events, memory=memory)
        return Trace(devices=self.plan.devices, steps=(step,))

    def gather_trace(self) -> Trace:
        """The whole trace of the last step, on every rank (of replica 0's ranks).  All ranks call it."""
        parts = self.ranks.transport.gather(self.trace().to_json())
        return Trace.joined([Trace.from_json(part) for part in parts[: self.plan.devices]])

    def _build_optimizers(self, make: Callable[[list[nn.Parameter]], Optimizer] | None) -> None:
        inside = sorted({op.stage for op in self.plan.schedule.operations if op.kind is Kind.S})
        if inside and make is None:
            raise InputError("The plan steps stages inside the step: give Pipeline an `optimizer`.")
        self._inside: dict[int, Optimizer] = {}
        self._outside: list[Optimizer] = []
        if make is None:
            return
        stepped: set[nn.Parameter] = set()
        for stage in inside:
            if stage in self._part.stages:
                parameters = self._part.parameters_of(stage)
                stepped.update(parameters)
                self._inside[stage] = make(parameters)
        rest = [p for p in self.parameters() if p not in stepped]
        if rest:
            self._outside.append(make(rest))

    def _set_aside_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Gradients of earlier steps: they are reduced already.  The working copies get their masters' values."""
        before = {p: p.grad for p in self.parameters() if p.grad is not None}
        for parameter in before:
            parameter.grad = None
        for weights in self._part.weights.values():
            weights.refresh()
        return before

    def _finish(self) -> None:
        """Give every parameter its whole gradient: over replicas, and over both copies of a tied table."""
        for stage, weights in self._part.weights.items():
            if stage not in self._inside:
                weights.finish()
        if self.ranks.shares_table:
            name = TABLE[self._shape.is_gpt2]
            table = self._part.masters[name if name in self._part.masters else HEAD_TABLE]
            if table.grad is None:
                table.grad = torch.zeros_like(table)
            self.ranks.sum_over_tied(table.grad)

    def _mean_loss(self, state: StepState) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._lanes.device)
        for loss in state.losses.values():
            total += loss.double()
        self.ranks.sum_over_replicas(total)
        self.ranks.sum_over_pipeline(total)
        return total.float() if self.plan.options.dtype != "fp64" else total

    def _is_second_copy(self, name: str) -> bool:
        return name == HEAD_TABLE and self.ranks.shares_table
