"""Runs of forwards only: evaluation and generation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from debubble.ir import InputError, Kind, Schedule, lower_forwards
from debubble.runtime.assembly import loss_dtype
from debubble.runtime.distributed.cuts import Cut
from debubble.runtime.distributed.tensor_parallel import TensorGroup
from debubble.runtime.execution.interpreter import Interpreter
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.stage import Stage
from debubble.runtime.operators import widen
from debubble.runtime.steps.batch import Batch, StepBatch, TokenRows
from debubble.runtime.steps.training_step import StepRunner


class ForwardRuns:
    """Interprets the forwards of a plan's stages without saving anything.

    The measurements of the last training step do not change: messages have another ledger.
    """

    def __init__(self, runner: StepRunner) -> None:
        self._runner, self._lanes = runner, runner.operations.lanes
        self._schedule, costs = runner.plan.schedule.with_whole_sequences(), runner.plan.costs
        program = lower_forwards(
            self._schedule, costs.replace(slices=1, attention_scale=None) if costs.slices > 1 else costs
        )
        messages = Ledger(self._lanes.device)
        operations = replace(runner.operations, program=program, messages=messages, evaluating=True, arena=None)
        self._interpreter = Interpreter(operations, runner.status)

    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """The mean loss over the targets of all batches.  Raises InputError if there is no batch."""
        total, targets = torch.zeros((), dtype=torch.float64, device=self._lanes.device), 0
        self._runner.status.enter("evaluates", local=False)
        with self._evaluation_mode():
            for batch in batches:
                checked = self._runner.inputs.read(batch)
                counted, _ = self._runner.batches.agree(checked)
                state = self._runner.inputs.state(checked, counted, seed=0)
                self._lanes.start_step()
                self._interpreter.run(state)
                total += state.loss(on=self._lanes.device) * counted
                targets += counted
        if not targets:
            raise InputError("There is no batch to evaluate.")
        self._runner.ranks.sum_over_replicas(total)
        self._runner.ranks.sum_over_pipeline(total)
        self._runner.status.leave()
        return (total / targets).to(loss_dtype(self._runner.plan))

    def generate(self, prompts: Tensor, *, new_tokens: int, temperature: float, seed: int) -> Tensor:
        """Prompts [rows, length] with generated tokens.  Raises InputError if they have another shape."""
        config, ranks = self._runner.plan.model, self._runner.ranks
        if config is None:
            raise InputError("The plan has no language model that could generate tokens.")
        if ranks.context.size > 1:
            raise InputError("Context parallelism divides whole sequences alone: generate with a plan of context 1.")
        if prompts.dim() != 2 or not prompts.numel():
            raise InputError(f"Prompts have shape [rows, length], not {list(prompts.shape)}.")
        count, rows = self._runner.plan.micro_batches, len(prompts)
        # Rows are repeated to fill the program's micro-batches.
        tokens = prompts.to(self._lanes.device)[torch.arange(-(-rows // count) * count) % rows]
        random = torch.Generator(device=self._lanes.device).manual_seed(seed)
        self._runner.status.enter("generates", local=False)
        stages = self._runner.operations.stages
        capture = _last_logits(self._schedule, config.vocab, stages, ranks.device, ranks.tensor)
        with self._evaluation_mode(), capture as logits:
            for _ in range(new_tokens):
                batch = StepBatch(TokenRows(tokens, torch.zeros_like(tokens)).split(count), checksum=0, counted=1)
                self._lanes.start_step()
                self._interpreter.run(self._runner.inputs.state(batch, 1, seed=0))
                following = torch.zeros(len(tokens), dtype=torch.int64, device=self._lanes.device)
                if logits:
                    following = _choose_tokens(torch.cat([logits.pop(j) for j in range(count)]), temperature, random)
                ranks.sum_over_pipeline(following)
                tokens = torch.cat((tokens, following[:, None]), dim=1)
        self._runner.status.leave()
        return tokens[:rows]

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Context with current working parameters and modules in evaluation mode, in which nothing is measured."""
        operations = self._runner.operations
        for weights in operations.weights.values():
            weights.load_working()
        units = [unit for stage in operations.stages.values() for unit in stage.units]
        modes = [(module, module.training) for unit in units for module in unit.modules()]
        try:
            for module, _ in modes:
                module.training = False
            with self._runner.measured.activations.pause():
                yield
        finally:
            for module, training in modes:
                module.training = training


def _choose_tokens(logits: Tensor, temperature: float, random: torch.Generator) -> Tensor:
    """A token for each row of logits [rows, vocabulary]: the most likely at temperature 0, else a sample."""
    if not temperature:
        return logits.argmax(-1)
    return torch.multinomial((widen(logits) / temperature).softmax(-1), 1, generator=random)[:, 0]


@contextmanager
def _last_logits(
    schedule: Schedule, vocabulary: int, stages: Mapping[int, Stage], device: int, group: TensorGroup
) -> Iterator[dict[int, Tensor]]:
    """Context in which the last position's logits [rows, vocabulary] are collected by micro-batch, instead of losses.

    The result stays empty on devices without the last stage.
    """
    logits_of: dict[int, Tensor] = {}
    last = schedule.stages - 1
    if last not in stages:
        yield logits_of
        return
    unit = stages[last].units[-1]
    forwards = (op for op in schedule.orders[device] if op.kind is Kind.F and op.stage == last)
    order = itertools.cycle([op.micro_batch for op in forwards])
    cut = Cut(1, vocabulary)

    def keep(logits: Tensor, targets: Tensor) -> Tensor:
        last_position = logits[:, -1]
        logits_of[next(order)] = last_position if group.size == 1 else group.gather(last_position, cut)
        return logits.new_zeros(())

    loss, unit.loss = unit.loss, keep
    try:
        yield logits_of
    finally:
        unit.loss = loss
