"""Which optimizers may step the rows that ZeRO leaves a replica: those that treat every element by itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet, finalize

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from debubble.ir import InputError

ELEMENTWISE = frozenset(
    ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Lion")
)
"""Classes of which it is known."""

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
    """As long as `owner` lives, check every optimizer of these rows before its first step: also a user's own."""
    known = frozenset(map(id, rows))
    checked: WeakSet[Optimizer] = WeakSet()

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in checked:
            return
        if any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
            check_divided(optimizer)
        checked.add(optimizer)

    finalize(owner, register_optimizer_step_pre_hook(check).remove)
