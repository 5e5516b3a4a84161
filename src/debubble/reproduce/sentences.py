"""Sentences that compare, computed from the figures that they stand beside."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

Figures = Mapping[str, float | None]
"""Name -> figure; None where there is none."""


def order(published: Mapping[str, float], ours: Figures) -> str:
    """Say whether the names are in the published order, slowest first, and else in which they are.

    Args:
        published: Speed-ups that a paper states.
        ours: Our speed-ups; names without one are left out.
    """
    compared = {name: figure for name in published if (figure := ours.get(name)) is not None}
    names = sorted(compared, key=lambda name: published[name])
    if all(compared[before] <= compared[after] for before, after in itertools.pairwise(names)):
        return f"The order is the published one: {', '.join(names)}."
    ordered = sorted(compared, key=lambda name: compared[name])
    return f"The published order is {', '.join(names)}; ours is {', '.join(ordered)}."


def fastest(name: str, speed_up: float | None, others: Figures) -> str:
    """Say whether any of the others has a larger speed-up than `name`, and which."""
    if speed_up is None:
        return f"{name} does not fit."
    ahead = [f"{other} ({figure:.3f})" for other, figure in others.items() if figure is not None and figure > speed_up]
    if not ahead:
        return f"None of {', '.join(others)} is faster than {name} ({speed_up:.3f})."
    return f"{' and '.join(ahead)} {'is' if len(ahead) == 1 else 'are'} faster than {name} ({speed_up:.3f})."


def within(low: float, high: float, ours: Figures) -> str:
    """Say how many of our figures are within a published range, and which are below or above it."""
    figures = {name: figure for name, figure in ours.items() if figure is not None}
    below = [f"{name} ({figure:.3g})" for name, figure in figures.items() if figure < low]
    above = [f"{name} ({figure:.3g})" for name, figure in figures.items() if figure > high]
    sides = [f"{side} it: {', '.join(names)}" for side, names in (("below", below), ("above", above)) if names]
    inside = len(figures) - len(below) - len(above)
    return "; ".join([f"{inside} of {len(figures)} are within {low:g} to {high:g}", *sides]) + "."


def span(values: Sequence[float], digits: int = 1) -> str:
    """The range of some figures, such as `9.3 to 10.1`."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"
