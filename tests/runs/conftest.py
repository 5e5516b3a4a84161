from typing import Any

import pytest

from tests.support.torch_tests import collect_ignore_glob as collect_ignore_glob


@pytest.fixture(scope="session")
def units() -> Any:
    """Units of the tiny Llama in fp64, with counted bytes and given times."""
    from tests.support.run_cases import LLAMA8, units_of

    return units_of(LLAMA8)


@pytest.fixture(scope="session")
def peak_of_1f1b(units: Any) -> Any:
    """Bytes of the fullest device under 1F1B without a limit."""
    from tests.support.run_cases import LLAMA8, peak_of, plan_for

    return peak_of(plan_for("dapple", LLAMA8, units=units))
