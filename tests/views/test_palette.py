"""Colours can be told apart by every eye.

Matrices: Machado, Oliveira and Fernandes, IEEE TVCG 15(6), 2009, severity 1.0, on linear RGB.  Distances are CIE 1976
Delta E; about 2 is just noticeable.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from debubble.ir import Kind
from debubble.views.palette import DARK, KIND_COLORS, LIGHT, PART_COLORS, RECOMPUTE_COLORS, recompute_colors

EYES = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])
CLEAR = 12


def lab(color: str, eye: str) -> np.ndarray:
    """CIE Lab of a color as seen with this type of color vision."""
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    t = XYZ @ np.clip(EYES[eye] @ linear, 0, 1) / WHITE
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize(
    "colors",
    [
        pytest.param({cause.value: color for cause, color in theme.causes.items()}, id=name)
        for name, theme in (("light causes", LIGHT), ("dark causes", DARK))
    ]
    + [
        pytest.param({kind.value: KIND_COLORS[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)}, id="work"),
        pytest.param(dict(enumerate([KIND_COLORS[Kind.F], *RECOMPUTE_COLORS])), id="recomputation"),
        pytest.param({p: c for p, c in PART_COLORS.items() if p not in ("model states", "memory")}, id="memory"),
    ],
)
def test_adjacent_colors_differ_for_color_blind_eyes(colors: dict[str, str], eye: str) -> None:
    distances = {
        (a, b): float(np.linalg.norm(lab(colors[a], eye) - lab(colors[b], eye))) for a, b in combinations(colors, 2)
    }

    assert {pair: distance for pair, distance in distances.items() if distance < CLEAR} == {}


def test_recomputation_choices_have_different_colors() -> None:
    for number in range(1, len(RECOMPUTE_COLORS) + 1):
        assert len({*recompute_colors([f"way {i}" for i in range(number)]).values()}) == number
