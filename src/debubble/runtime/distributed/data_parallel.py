"""Data parallelism: replicas sum their gradients, and with ZeRO shard optimizer states, gradients and parameters.

With ZeRO every replica owns an equal share of the rows of every parameter: it reduces their gradients, keeps their
optimizer states, steps them, and broadcasts them; with ZeRO-3 before every computation.  Only elementwise optimizers
can step rows; others are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, finalize

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from debubble.ir import InputError
from debubble.runtime.distributed.transport import RankGroup


@dataclass(frozen=True)
class Replicas(RankGroup):
    """The ranks that hold the same stages."""

    shards_states: bool
    """True if each replica has the optimizer states of its rows only (ZeRO-1, 2 and 3)."""
    shards_gradients: bool = False
    """True if each keeps the gradients of its rows only, reduced after every micro-batch (ZeRO-2 and 3)."""
    shards_parameters: bool = False
    """True if each stores its rows of parameters only, and gathers the others to compute (ZeRO-3)."""

    @property
    def first(self) -> bool:
        """True if this rank is the first replica."""
        return self.transport.rank == self.ranks[0]

    def reduce(self, gradient: Tensor) -> Tensor:
        """Sum a gradient over the replicas, and return the local rows (all, without ZeRO); overwrites its argument."""
        if not self.shards_states:
            self.transport.all_reduce(gradient, self.ranks)
            return gradient
        # A copy, so that nothing keeps the others' rows.
        return self.reduce_scatter([self._rows(gradient, rank) for rank in self.ranks]).clone()

    def local_rows(self, tensor: Tensor) -> Tensor:
        """A view of this replica's rows of a tensor; of all rows without ZeRO."""
        return self._rows(tensor, self.transport.rank) if self.shards_states else tensor

    def row_range(self, count: int) -> range:
        """This replica's rows among `count`; all without ZeRO."""
        return self._row_range(count, self.transport.rank) if self.shards_states else range(count)

    def gather(self, tensor: Tensor) -> None:
        """All-gather in place: every replica has its rows of the tensor before, all rows after."""
        if self.shards_states:
            for rank in self.ranks:
                self.transport.broadcast(self._rows(tensor, rank), self.ranks, source=rank)

    def _rows(self, tensor: Tensor, rank: int) -> Tensor:
        rows = self._row_range(len(tensor), rank)
        return tensor[rows.start : rows.stop]

    def _row_range(self, count: int, rank: int) -> range:
        index, size = self.ranks.index(rank), self.size
        return range(count * index // size, count * (index + 1) // size)


ELEMENTWISE_OPTIMIZERS = frozenset(
    ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Lion")
)
"""Class names of elementwise optimizers."""

FULL_TENSOR_OPTIMIZERS = ("muon", "adafactor", "shampoo", "soap", "lamb", "lars", "lbfgs")
"""Substrings of the class names of optimizers that factor, orthogonalize or measure full parameters."""


def check_divided(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot step rows of a parameter; warn of an unknown one.

    Raises:
        InputError: It needs full parameters.
    """
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    if any(word in name.lower() for name in names for word in FULL_TENSOR_OPTIMIZERS):
        raise InputError(
            f"{names[0]} needs whole parameters, but ZeRO leaves every replica some rows of each: plan with --zero 0."
        )
    if ELEMENTWISE_OPTIMIZERS.isdisjoint(names):
        warnings.warn(
            f"ZeRO leaves every replica some rows of each parameter: {names[0]} is right only if it treats every"
            " element by itself; if not, plan with --zero 0.",
            stacklevel=2,
        )


def check_before_steps(owner: object, rows: Iterable[nn.Parameter]) -> None:
    """Check every optimizer that steps these rows before its first step, while `owner` is alive."""
    known = frozenset(map(id, rows))
    checked: WeakSet[Optimizer] = WeakSet()

    def check(optimizer: Optimizer) -> None:
        if optimizer in checked:
            return
        if any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
            check_divided(optimizer)
        checked.add(optimizer)

    _CHECKS[id(check)] = check
    finalize(owner, _CHECKS.pop, id(check), None)


_CHECKS: dict[int, Callable[[Optimizer], None]] = {}
"""The checks of owners that are alive."""


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for check in tuple(_CHECKS.values()):
        check(optimizer)


# Registered once: adding or removing a hook while another thread's optimizer steps would break that step.
register_optimizer_step_pre_hook(_check)
