"""A step by any plan gives the gradients of plain autograd in one process."""

from pathlib import Path
from typing import Any

import pytest

from debubble.frameworks.torch.export import read, to_csv
from tests.support.runtime_cases import (
    GPT2,
    GPT2_UNTIED,
    LLAMA,
    LLAMA_TIED,
    assert_same_gradients,
    plan_of,
    tokens_of,
)
from tests.support.schedule_cases import explicit, fused, schedule_of

FAMILIES = {"llama": LLAMA, "llama-tied": LLAMA_TIED, "gpt2": GPT2_UNTIED, "gpt2-tied": GPT2}
STRATEGIES = ["norm+activation+multiply", "core", "mlp", "full"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_gradients_equal_one_process(name: str, family: Any) -> None:
    config = FAMILIES[family]
    schedule = schedule_of(name, devices=2)
    assert_same_gradients(plan_of(schedule, config), config, tokens_of(config, rows=8))


@pytest.mark.parametrize("form", [fused, explicit])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_recomputation_changes_no_gradient(name: str, strategy: Any, form: Any) -> None:
    for config in (LLAMA, GPT2):
        schedule = form(schedule_of(name, devices=2))
        assert_same_gradients(plan_of(schedule, config, strategy=strategy), config, tokens_of(config, rows=4))


def test_uneven_partitions_over_four_ranks() -> None:
    for config in (LLAMA_TIED, GPT2_UNTIED):
        schedule = schedule_of("1f1b", devices=4)
        plan = plan_of(schedule, config, counts=[2, 1, 4, 3])
        assert_same_gradients(plan, config, tokens_of(config, rows=4))


def read_from_csv(schedule: Any, folder: Any) -> Any:
    path = folder / "schedule.csv"
    path.write_text(to_csv(schedule))
    return read(path)


@pytest.mark.parametrize("name", ["interleaved", "v-half", "dualpipe-v"])
def test_a_schedule_read_from_a_csv_equals_one_process(name: str, tmp_path: Path) -> None:
    schedule = read_from_csv(schedule_of(name, devices=4, micro_batches=8), tmp_path)
    assert_same_gradients(plan_of(schedule, LLAMA_TIED), LLAMA_TIED, tokens_of(LLAMA_TIED, rows=8, length=6))
