"""The parameters that a rank holds: to step, read, save and load them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from debubble.ir import InputError, Plan
from debubble.runtime.assembly import DevicePart
from debubble.runtime.distributed.sharding import Piece
from debubble.runtime.distributed.topology import Ranks
from debubble.runtime.models.hf_files import load_pretrained, save_pretrained
from debubble.runtime.models.lora import Adapters


class Held(ABC):
    """What `Pipeline` does with its parameters outside a step."""

    plan: Plan
    ranks: Ranks
    device: int
    _part: DevicePart
    _tables: tuple[str, str] | None

    @abstractmethod
    def settle(self) -> object:
        """Make the parameters right, before anything reads them."""

    def parameters(self) -> list[nn.Parameter]:
        """What an optimizer steps on this rank, each once: fp32 (or fp64) masters, whatever the run's dtype.

        With ZeRO they are this replica's rows.  Under tensor parallelism over torch.distributed they are DTensors.
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
        self.settle()
        return {name: held.whole(name) for held in self._part.weights.values() for name in held.masters}

    def shape_of(self, name: str) -> torch.Size:
        """Of a whole parameter."""
        return next(held.shapes[name] for held in self._part.weights.values() if name in held.shapes)

    def pieces(self) -> Iterator[tuple[str, nn.Parameter, Piece]]:
        """What this rank has of each parameter and where it lies in the whole one: what checkpoints are made of.

        By Hugging Face name; both copies of a tied table go by the embedding's.
        """
        self.settle()
        own = {} if self._tables is None else {self._tables[1]: self._tables[0]}
        for held in self._part.weights.values():
            for name, parameter in held.masters.items():
                yield own.get(name, name), parameter, held.piece(name)

    @property
    def adapters(self) -> Adapters | None:
        """What this rank trains instead of its model's own parameters, if it does (LoRA)."""
        return self._part.adapters

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take this rank's parameters from a state by Hugging Face name, which may hold more."""
        self.settle()
        for name in self._part.masters:
            if name not in state:
                raise InputError(f"The state has no parameter '{name}'.")
            self.take(name, state[name])

    def take(self, name: str, whole: Tensor) -> None:
        """Give one of this rank's parameters, by its Hugging Face name, the values of a whole one."""
        next(held for held in self._part.weights.values() if name in held.masters).take(name, whole)

    def load_pretrained(self, folder: str | Path) -> None:
        """Take this rank's parameters from a Hugging Face checkpoint (safetensors), reading these alone.

        A folder that peft wrote has adapters alone: the others stay.
        """
        load_pretrained(self, folder)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a checkpoint that Hugging Face's `from_pretrained` opens; of adapters, peft's.  All ranks call it."""
        save_pretrained(self, folder)
