"""GPU tests; those with a `device` also run on the CPU, to show that they work."""

from typing import Any

import pytest

from tests.support.torch_tests import collect_ignore_glob as collect_ignore_glob

if not collect_ignore_glob:
    import torch


def pytest_collection_modifyitems(items: Any) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device here"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Any:
    return torch.device(request.param)


@pytest.fixture
def gpu() -> Any:
    """For tests that are meaningless on a CPU."""
    return torch.device("cuda", torch.cuda.current_device())
