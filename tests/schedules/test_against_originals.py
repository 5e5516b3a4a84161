from typing import Any

import pytest

from schedules import DEVICES, ROWS, cells, measure


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            cell, marks=[] if cell[1] == 4 and cell[3] == "makespan" else pytest.mark.slow, id=" ".join(map(str, cell))
        )
        for cell in cells()
    ],
)
def test_bubble_and_peak_are_at_most_those_of_the_original(cell: Any) -> None:
    row, devices, _, objective = cell
    ours = measure(cell)
    assert round(ours[f"{objective}_bubble"], 1) <= ours["original"]
    assert ours["peak"] <= ROWS[row]["peaks"][DEVICES.index(devices)]
