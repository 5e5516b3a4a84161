"""Runs of a plan's forwards alone: evaluation, and generation of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from debubble.ir import InputError, Plan, lower_forwards
from debubble.runtime.assembly import loss_dtype
from debubble.runtime.batch import Batch, StepBatch, TokenRows
from debubble.runtime.execution.interpreter import Interpreter
from debubble.runtime.execution.operations import TensorOperations
from debubble.runtime.execution.status import RankStatus
from debubble.runtime.generation import chosen_tokens, last_logits
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.parameters.device_part import DevicePart
from debubble.runtime.step_inputs import StepInputs
from debubble.runtime.topology import Ranks


class ForwardRuns:
    """Interprets the forwards of a plan's stages, of which nothing is kept.

    What was measured of the last step stays: messages count apart.

    Args:
        plan: Whose stages run; they may train by another order of them.
        part: This device's stages.
        inputs: Makes the inputs.
        ranks: All ranks of the run.
        operations: Those of the steps.
        activations: Ledger of the steps.
        status: What this rank does is written there.
    """

    def __init__(
        self,
        plan: Plan,
        part: DevicePart,
        inputs: StepInputs,
        ranks: Ranks,
        operations: TensorOperations,
        activations: Ledger,
        status: RankStatus,
    ) -> None:
        self._plan, self._part, self._inputs, self._ranks = plan, part, inputs, ranks
        self._status, self._lanes, self._activations = status, operations.lanes, activations
        program = lower_forwards(plan.schedule, plan.costs)
        messages = Ledger(self._lanes.device)
        operations = replace(operations, program=program, messages=messages, evaluating=True)
        self._interpreter = Interpreter(operations, status)

    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """The mean loss over the targets of all batches.  Raises InputError if there is none."""
        self._part.load_working()
        total, targets = torch.zeros((), dtype=torch.float64, device=self._lanes.device), 0
        self._status.enter("evaluates", local=False)
        with self._evaluation_mode():
            for batch in batches:
                checked = self._inputs.read(batch)
                counted, _ = self._ranks.agree(checked)
                state = self._inputs.state(checked, counted, seed=0)
                self._lanes.start_step()
                self._interpreter.run(state)
                total += state.loss(on=self._lanes.device) * counted
                targets += counted
        if not targets:
            raise InputError("There is no batch to evaluate.")
        self._ranks.sum_over_replicas(total)
        self._ranks.sum_over_pipeline(total)
        return (total / targets).to(loss_dtype(self._plan))

    def generate(self, prompts: Tensor, *, new_tokens: int, temperature: float, seed: int) -> Tensor:
        """Prompts [rows, length] with what follows them.  Raises InputError if they have another shape."""
        if self._plan.model is None:
            raise InputError("The plan has no language model that could generate tokens.")
        if self._ranks.context.size > 1:
            raise InputError("Context parallelism divides whole sequences alone: generate with a plan of context 1.")
        if prompts.dim() != 2 or not prompts.numel():
            raise InputError(f"Prompts have shape [rows, length], not {list(prompts.shape)}.")
        self._part.load_working()
        each, rows = self._plan.micro_batches, len(prompts)
        # The program has so many micro-batches, whatever they hold.
        tokens = prompts.to(self._lanes.device)[torch.arange(-(-rows // each) * each) % rows]
        random = torch.Generator(device=self._lanes.device).manual_seed(seed)
        self._status.enter("generates", local=False)
        kept = last_logits(self._plan, self._part.stages, self._ranks.device, self._ranks.tensor)
        with self._evaluation_mode(), kept as logits:
            for _ in range(new_tokens):
                batch = StepBatch(TokenRows(tokens, torch.zeros_like(tokens)).cut(each), checksum=0)
                self._lanes.start_step()
                self._interpreter.run(self._inputs.state(batch, 1, seed=0))
                following = torch.zeros(len(tokens), dtype=torch.int64, device=self._lanes.device)
                if logits:
                    following = chosen_tokens(torch.cat([logits.pop(j) for j in range(each)]), temperature, random)
                self._ranks.sum_over_pipeline(following)
                tokens = torch.cat((tokens, following[:, None]), dim=1)
        return tokens[:rows]

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Let all modules be in evaluation mode, and measure nothing."""
        units = [unit for stage in self._part.stages.values() for unit in stage.units]
        modes = [(module, module.training) for unit in units for module in unit.modules()]
        try:
            for module, _ in modes:
                module.training = False
            with self._activations.pause():
                yield
        finally:
            for module, training in modes:
                module.training = training
