"""Ranks of one machine share its cores."""

import os
from typing import Any

import pytest

from debubble.processes import own_cores


@pytest.mark.parametrize(("ranks", "cores"), [(1, 8), (3, 2), (16, 1)])
def test_ranks_share_the_cores_that_the_machine_gives_them(ranks: int, cores: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert own_cores() == cores
