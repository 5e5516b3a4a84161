"""Exponential moving averages of a device's parameters, for evaluation and export.

They are updated by `torch.optim.swa_utils.get_ema_multi_avg_fn`.  Its `AveragedModel` would copy whole modules and
average what they compute with, where runs in 16 bits and ZeRO average masters and their rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from debubble.ir import InputError
from debubble.runtime.distributed.sharding import local_tensor


class WeightAverages:
    """Averages of the parameters that an optimizer steps, in their dtype and where they are; with ZeRO of their rows.

    The first step's parameters begin them; after every later step that was taken, average += (1 - decay) (parameter -
    average).

    Args:
        parameters: Each once.
        decay: Share of the average that stays.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        if not 0 < decay < 1:
            raise InputError(f"The decay of the weights' average must lie between 0 and 1, not be {decay}.")
        self._parameters, self._update = parameters, get_ema_multi_avg_fn(decay)
        self._averages: dict[Tensor, Tensor] = {}

    def begin(self) -> None:
        """Let the averages be the parameters as they are, if none have begun."""
        if not self._averages:
            self._averages = {parameter: local_tensor(parameter).clone() for parameter in self._parameters}

    def restart(self) -> None:
        """Let the next step's parameters begin the averages."""
        self._averages = {}

    def continue_with(self, averages: Mapping[Tensor, Tensor]) -> None:
        """Continue from these, by parameter; with none, the next step's parameters begin them."""
        self._averages = {parameter: averages[parameter] for parameter in self._parameters} if averages else {}

    def update(self) -> None:
        """Take the parameters of one more step in."""
        if self._averages:
            # The number of averaged steps has no part in an exponential average.
            self._update([*self._averages.values()], [*map(local_tensor, self._averages)], 0)
        else:
            self.begin()

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """The average of a parameter, or of the part of it that this rank has; None if it is frozen, or none began."""
        return self._averages.get(parameter)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the parameters have the averages' values; they have their own again afterwards."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for parameter, average in self._averages.items():
            here = local_tensor(parameter)
            own = here.clone()
            here.copy_(average)
            average.copy_(own)
