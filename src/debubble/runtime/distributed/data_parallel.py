"""Data parallelism: replicas sum their gradients, and with ZeRO divide the optimizer's work.

With ZeRO every replica owns the same share of the rows of every parameter: it alone gets the sum of their gradients,
keeps their optimizer states and steps them, and then broadcasts the rows; with ZeRO-3 whenever they compute.  Only
optimizers that treat every element by itself can step rows; others are refused.
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

    divided: bool
    """True if each owns a part of the rows (ZeRO)."""
    scatters: bool = False
    """True if each keeps that part of gradients alone, and sums them after every micro-batch (ZeRO-2)."""
    gathers: bool = False
    """True if each keeps that part of parameters alone, and gathers the rest while it computes (ZeRO-3)."""

    @property
    def first(self) -> bool:
        """True if this rank is the first of them."""
        return self.transport.rank == self.ranks[0]

    def reduce(self, gradient: Tensor) -> Tensor:
        """The sum of all replicas' gradients: this one's rows of it if divided.  The argument is used up."""
        if not self.divided:
            self.transport.all_reduce(gradient, self.ranks)
            return gradient
        # A copy, so that nothing keeps the others' rows.
        return self.reduce_scatter([self._part(gradient, rank) for rank in self.ranks]).clone()

    def own(self, tensor: Tensor) -> Tensor:
        """This replica's rows of a tensor, as a view; all of them if not divided."""
        return self._part(tensor, self.transport.rank) if self.divided else tensor

    def rows(self, of: int) -> range:
        """The rows among `of` that are this replica's; all of them if they are not divided."""
        return self._rows(of, self.transport.rank) if self.divided else range(of)

    def gather(self, tensor: Tensor) -> None:
        """Fill a tensor, in which every replica has its own rows, with all."""
        if self.divided:
            for rank in self.ranks:
                self.transport.broadcast(self._part(tensor, rank), self.ranks, source=rank)

    def _part(self, tensor: Tensor, rank: int) -> Tensor:
        rows = self._rows(len(tensor), rank)
        return tensor[rows.start : rows.stop]

    def _rows(self, of: int, rank: int) -> range:
        index, count = self.ranks.index(rank), self.size
        return range(of * index // count, of * (index + 1) // count)


ELEMENTWISE = frozenset(
    ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Lion")
)
"""Classes of torch's optimizers that treat every element by itself."""

WHOLE = ("muon", "adafactor", "shampoo", "soap", "lamb", "lars", "lbfgs")
"""Parts of the names of classes that factor, orthogonalize or measure whole parameters."""


def check_divided(optimizer: Optimizer) -> None:
    """Refuse an optimizer that would compute something else of rows; warn of one that nothing is known of.

    Raises:
        InputError: It needs whole parameters.
    """
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    if any(word in name.lower() for name in names for word in WHOLE):
        raise InputError(
            f"{names[0]} needs whole parameters, but ZeRO leaves every replica some rows of each: plan with --zero 0."
        )
    if ELEMENTWISE.isdisjoint(names):
        warnings.warn(
            f"ZeRO leaves every replica some rows of each parameter: {names[0]} is right only if it treats every"
            " element by itself; if not, plan with --zero 0.",
            stacklevel=2,
        )


def check_before_steps(owner: object, rows: Iterable[nn.Parameter]) -> None:
    """Check every optimizer of these rows, also a user's own, before its first step, as long as `owner` lives."""
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
"""The checks of the owners that live."""


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for check in tuple(_CHECKS.values()):
        check(optimizer)


# Once: a hook that comes or goes while another thread's optimizer steps would end that step.
register_optimizer_step_pre_hook(_check)
