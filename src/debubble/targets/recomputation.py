"""The ways in which a framework recomputes a layer, and how freely it chooses among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """One way to recompute a layer: the operators of its attention half and of its MLP half."""

    attention: str
    mlp: str


NOTHING = Way("none", "none")
EVERYTHING = Way("full", "full")


@dataclass(frozen=True)
class Choice:
    """One setting of a framework, which may do different things to a dense layer and to one with experts."""

    dense: Way
    sparse: Way


def same(way: Way) -> Choice:
    """The setting that does the same to every layer."""
    return Choice(way, way)


WHOLE: Mapping[str, Choice] = {"none": same(NOTHING), "full": same(EVERYTHING)}
"""A layer recomputes wholly or not at all."""


@dataclass(frozen=True)
class EachLayer:
    """Every layer recomputes in a way of its own."""

    choices: Mapping[str, Choice]
    from_start: bool = False
    """True if the framework counts them from the start of a stage: those that recompute most come first."""


@dataclass(frozen=True)
class AllLayers:
    """All layers recompute in the same way."""

    choices: Mapping[str, Choice]
    block: bool = False
    """True if, in place of that, the first N layers of every stage may recompute wholly, N being the same for all."""
    whole: bool = True
    """True if all layers may recompute wholly."""


Recomputation = EachLayer | AllLayers
