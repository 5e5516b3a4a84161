"""Every causal family of transformers trains with the gradients of the model alone, or is refused with a sentence."""

import pytest

from debubble.ir import RunOptions
from debubble.models import ModelConfig
from debubble.models.runtime_limits import UNDIVIDED, beyond_runtime

pytest.importorskip("transformers", minversion="5")

import families
import torch
import transformers
from benchmark import DOCS, between

ROWS = {row["case"]: row for row in families.BENCHMARK.rows()}
SHOWN = ("deepseek_v3", "lfm2")
"""Families with several kinds of layers, which every test run compares."""
RECURRENT = (
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax",
    "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma",
)  # fmt: skip


@pytest.mark.parametrize("family", SHOWN)
def test_family_with_several_layer_kinds_matches_one_process(family: str) -> None:
    assert families.judge(family)["outcome"] == "agrees"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", families.FAMILIES)
def test_family_outcomes_match_the_table(family: str) -> None:
    assert families.judge(family)["outcome"] == ROWS[family]["outcome"]


def test_table_has_all_families_and_ninety_train() -> None:
    assert tuple(ROWS) == families.FAMILIES
    assert sum(row["outcome"] == "agrees" for row in ROWS.values()) >= 90
    assert {row["outcome"] for row in ROWS.values()} == {"agrees", "refused", "not built"}


def test_plans_name_families_that_cannot_be_trained() -> None:
    unpriced = "but debubble prices"
    refused = {name for name, row in ROWS.items() if row["outcome"] == "refused" and unpriced not in row["why"]}
    priced = {name for name in refused if " needs." not in ROWS[name]["why"]}
    assert priced == UNDIVIDED.keys()
    for family in priced:
        refusal = beyond_runtime(RunOptions(), ModelConfig.from_hf(families.tiny_config(family)))
        assert refusal == f"The runtime cannot run this plan, because {UNDIVIDED[family]}"


def test_the_page_shows_the_results() -> None:
    _, shown, _ = between(DOCS / "notes/families.md", "families")
    assert shown == families.page(families.BENCHMARK.rows()), "python benchmarks/families.py --docs"


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_layers_are_priced_with_all_parameters(family: str) -> None:
    config = families.tiny_config(family)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert ModelConfig.from_hf(config).parameters == sum(p.numel() for p in model.parameters())
