"""Exponential moving averages of a device's parameters, for evaluation and export.

They are updated by `torch.optim.swa_utils.get_ema_multi_avg_fn`.  Its `AveragedModel` is not used, as it copies modules
and averages their working parameters, while these are averages of master weights, with ZeRO of their rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from debubble.ir import InputError
from debubble.runtime.distributed.sharding import local_tensor


class WeightAverages:
    """Averages of the parameters that an optimizer steps, in their dtype and on their device; with ZeRO of their rows.

    They start as the parameters after the first step; after every later step that is not skipped,
    average += (1 - decay) (parameter - average).

    Args:
        parameters: The parameters, without duplicates.
        decay: Factor of the old average.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        if not 0 < decay < 1:
            raise InputError(f"The decay of the weights' average must lie between 0 and 1, not be {decay}.")
        self._parameters, self._update = parameters, get_ema_multi_avg_fn(decay)
        self._averages: dict[Tensor, Tensor] = {}

    def begin(self) -> None:
        """Start the averages from the current parameters, unless they have started."""
        if not self._averages:
            self._averages = {parameter: local_tensor(parameter).clone() for parameter in self._parameters}

    def restart(self) -> None:
        """Restart the averages at the next step."""
        self._averages = {}

    def continue_with(self, averages: Mapping[Tensor, Tensor]) -> None:
        """Continue from these averages, by parameter; if there are none, start at the next step."""
        self._averages = {parameter: averages[parameter] for parameter in self._parameters} if averages else {}

    def update(self) -> None:
        """Update the averages after a step."""
        if self._averages:
            # The number of averaged steps, 0 here, does not matter for an exponential average.
            self._update([*self._averages.values()], [*map(local_tensor, self._averages)], 0)
        else:
            self.begin()

    def get(self, parameter: nn.Parameter) -> Tensor | None:
        """The average of a parameter's local tensor; None if it is frozen, or averages have not started."""
        return self._averages.get(parameter)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the parameters have the values of the averages."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for parameter, average in self._averages.items():
            local = local_tensor(parameter)
            values = local.clone()
            local.copy_(average)
            average.copy_(values)
