"""The YAML of Megatron-LM's --yaml-cfg."""

from __future__ import annotations

from pathlib import Path

import pytest

from debubble.imports.job import ImportedJob
from tests.support import imported_jobs

CONFIG = """
language_model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, activation_func: gelu, ffn_hidden_size: null}
model_parallel: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 2, bf16: true, sequence_parallel: true}
micro_batch_size: 1
global_batch_size: 32
seq_length: 64
max_position_embeddings: 64
vocab_size: 128
"""


def job(folder: Path, text: str, args: str | None = None) -> ImportedJob:
    return imported_jobs.job("megatron", folder, "a.yaml", text, args=args)


@pytest.mark.parametrize(
    ("activation", "family", "width"), [("gelu", "gpt2", 256), ("squaredrelu", "arcee", 256), ("swiglu", "llama", 128)]
)
def test_the_activation_function_is_read(activation: str, family: str, width: int, tmp_path: Path) -> None:
    text = CONFIG.replace("gelu", activation)
    if family == "llama":
        text += "position_embedding_type: rope\nadd_position_embedding: false\n"
        text = text.replace("ffn_hidden_size: null", "normalization: RMSNorm, add_bias_linear: false")

    model = job(tmp_path, text).model

    assert (model.family, model.ffn) == (family, width)


def test_a_misspelt_entry_of_the_yaml_is_told(tmp_path: Path) -> None:
    rest = job(tmp_path, CONFIG.replace("sequence_parallel", "sequence_paralel")).rest

    assert "--sequence-paralel (did you mean --sequence-parallel?)" in rest.warnings[0]


def test_entries_of_unused_features_cost_nothing(tmp_path: Path) -> None:
    off = job(tmp_path, CONFIG.replace("bf16", "tp_comm_overlap: false, tp_comm_split_ag: true, bf16"))

    assert off.rest.unknown == ()
    assert off.rest.free == ("model_parallel.tp_comm_split_ag",)


def test_variables_of_the_environment_are_filled_in(tmp_path: Path) -> None:
    text = CONFIG.replace("pipeline_model_parallel_size: 2", "pipeline_model_parallel_size: '${PP}'")

    assert job(tmp_path, text, "PP=4 --micro-batch-size 2").pipeline == 4


def test_an_activation_function_that_is_a_list_is_told(tmp_path: Path) -> None:
    assert "--activation-func" in job(tmp_path, CONFIG.replace("gelu", "[gelu]")).rest.unknown
