"""The JSON that torchtitan saves: the model and what remains unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from debubble.imports.job import ImportedJob
from tests.support import imported_jobs

LINEAR = {"in_features": 4096, "out_features": 4096}
ADAPTED = {**LINEAR, "rank": 16, "alpha": 32.0}


def job(folder: Path, model: dict[str, Any], **parts: Any) -> ImportedJob:
    saved = {
        "model_spec": {"name": "llama3", "flavor": "8B", "model": model},
        "training": {"seq_len": 4096, "local_batch_size": 1},
        **parts,
    }
    return imported_jobs.job("torchtitan", folder, "saved.json", json.dumps(saved), cluster="8xH100-80GB")


@pytest.mark.parametrize(("linear", "rank"), [(LINEAR, 0), (ADAPTED, 16)])
def test_adapter_rank_is_read_from_linear_layers(linear: dict[str, Any], rank: int, tmp_path: Path) -> None:
    layer = {"attention": {"wo": linear}, "feed_forward": {"w1": linear}}

    assert job(tmp_path, {"layers": [layer, layer]}).options.lora == rank


def test_adapters_on_some_linear_layers_are_reported(tmp_path: Path) -> None:
    read = job(tmp_path, {"layers": [{"attention": {"wo": ADAPTED}, "feed_forward": {"w1": LINEAR}}]})

    assert read.options.lora == 16
    assert "Adapters are on some linear layers, and the prediction counts on all." in read.unread


def test_a_saved_configuration_leaves_fp8_open(tmp_path: Path) -> None:
    assert (
        "A saved configuration does not say whether linear layers compute in fp8 or in 4 bits: give --dtype then."
        in job(tmp_path, {"layers": []}).unread
    )


def test_unknown_layers_and_optimizers_are_reported(tmp_path: Path) -> None:
    groups = [{"pattern": "w1", "optimizer_name": "DistMuon"}, {"pattern": ".*", "optimizer_name": "AdamW"}]
    read = job(tmp_path, {"layers": [], "mtp_layers": [{}]}, optimizer={"param_groups": groups})

    assert "model_spec.model.mtp_layers, which predict further tokens, are not in the prediction." in read.unread
    assert "optimizer.param_groups has DistMuon, and the prediction counts on AdamW." in read.unread
