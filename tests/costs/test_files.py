"""Costs files, units files and profiles: they round-trip, and errors are one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from debubble.costs import Cluster, apply_profile, load_costs, load_profile, load_units, model_units
from debubble.costs.files import units_from_dict, units_to_dict
from debubble.costs.step import HOST_MEMORY_BANDWIDTH
from debubble.ir import InputError, Placement, RunOptions
from debubble.models import models

DENSE = {
    "type": "dense",
    "count": 3,
    "forward": 1.5,
    "backward_input": 2,
    "backward_weight": 1,
    "static": 10,
    "strategies": {"none": {"activation": 8}, "full": {"activation": 2, "recompute": 1.5}},
}
HEAD = {
    "type": "head",
    "forward": 3,
    "backward_input": 3,
    "backward_weight": 3,
    "strategies": {"none": {"activation": 1}},
}
NO_TIME = {"forward": 0, "backward_input": 0, "backward_weight": 0}


def written(folder: Path, content: Any) -> Path:
    file = folder / "file.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return file


def test_counts_expand_and_layers_are_numbered_per_type(tmp_path: Path) -> None:
    units = load_units(written(tmp_path, {"units": [DENSE, HEAD, DENSE], "memory_limit": 50, "communication": 0.5}))

    assert [(u.type, u.layer) for u in units.units] == [
        ("dense", 0), ("dense", 1), ("dense", 2), ("head", None), ("dense", 3), ("dense", 4), ("dense", 5)
    ]  # fmt: skip
    assert (units.memory_limit, units.communication) == ((50,), 0.5)
    assert units.work == 6 * 4.5 + 9


def test_stage_costs_follow_the_strategies(tmp_path: Path) -> None:
    units = load_units(written(tmp_path, {"units": [DENSE], "offload_bandwidth": 4}))
    costs = units.stage_costs([[(0, "none"), (1, "full")], [(2, "none")]], Placement.linear(2))

    assert costs.activation == (16, 8)
    assert costs.activation_recomputed == (10, 8)
    assert costs.recompute == (1.5, 0)
    assert costs.offload == (4, 2)


def test_an_argument_replaces_the_limit_of_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, {"units": [DENSE], "memory_limit": [1, 2]})

    assert load_units(file).memory_limit == (1, 2)
    assert load_units(file, memory_limit=7).memory_limit == (7,)


def test_units_round_trip_with_the_same_stage_costs() -> None:
    units = model_units(models["llama-tiny"], Cluster.parse("2xCPU"), RunOptions(sequence_length=128))
    read = units_from_dict(json.loads(json.dumps(units_to_dict(units))))
    content = {"units": [DENSE, HEAD], "memory_limit": [9, 8], "link_groups": [[0, 1]], "optimizer_step": 2}
    partition = [[(i, "none") for i in range(9)], [(i, "full" if i < 17 else "none") for i in range(9, 18)]]

    assert read == units
    assert units_from_dict(units_to_dict(units_from_dict(content))) == units_from_dict(content)
    assert units_to_dict(units_from_dict(content))["units"][0]["count"] == 3
    assert read.stage_costs(partition, Placement.linear(2)) == units.stage_costs(partition, Placement.linear(2))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([], "it must be fields by name, not a list"),
        ({}, "it has no field `units`"),
        ({"units": []}, "at least one unit"),
        ({"units": [{**DENSE, "count": 0}]}, "The count of 'dense' must be at least 1"),
        ({"units": [{**DENSE, "strategies": {}}]}, "needs a strategy 'none'"),
        ({"units": [{**DENSE, "forward": -1}]}, "'forward' must not be negative"),
        ({"units": [{**DENSE, "forward": "1"}]}, "`units[0].forward` must be a number, not a text"),
        ({"units": [DENSE], "host_link": "simplex"}, "`host_link` cannot be 'simplex'"),
        ({"units": [DENSE], "memory_limit": []}, "memory_limit"),
        ({"units": [DENSE], "offload_bandwidth": 0}, "'offload_bandwidth' must be positive"),
        ({"units": [DENSE], "communication": 10**400}, "'communication' must not be more than 1e+18"),
        ({"units": [{**DENSE, "count": 10**12}]}, "A units file may have up to 100000 units"),
        ({"units": [DENSE], "link_groups": [[0], [0]]}, "'link_groups' names device 0 twice"),
        ({"units": [{**DENSE, **NO_TIME}]}, "a step must take some time"),
        ({"units": [DENSE], "micro_batch_scale": [0, 0]}, "a step must take some time"),
        (b"[" * 100_000, "is not JSON: it is nested too deeply"),
        ({"units": [DENSE], "slices": 3}, "'attention_scale' must have a number for each of 3 'slices'"),
    ],
)
def test_an_invalid_units_file_is_refused(tmp_path: Path, content: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        load_units(written(tmp_path, content))


def test_a_costs_file_is_read(tmp_path: Path) -> None:
    costs = load_costs(written(tmp_path, {"stages": 4, "forward": [1, 2, 3, 4], "activation": 6, "offload": 2}))

    assert costs.forward == (1, 2, 3, 4)
    assert costs.activation_after_input == (3,) * 4
    assert costs.reload == (2,) * 4


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"stages": "\xff"}', "is not JSON: it is not a text file"),
        ([], "A costs file is a JSON object"),
        ({"stages": 3}, "The costs are for 3 stages, but 4 are asked for: devices x chunks must be 3."),
        ({"stages": "4"}, "'stages' must be a whole number, 1 or more, not '4'."),
        ({"stages": 0.5}, "'stages' must be a whole number, 1 or more, not 0.5."),
        ({"forward": [1, 2]}, "'forward' has 2 numbers for 4 stages"),
        ({"forwards": 1}, "A costs file has no entry 'forwards'"),
        ({"activation": -1}, "'activation' must not be negative"),
        (NO_TIME, "a step must take some time"),
        ({"micro_batch_scale": [0, 0]}, "a step must take some time"),
    ],
)
def test_an_invalid_costs_file_is_refused(tmp_path: Path, content: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        load_costs(written(tmp_path, content), stages=4)


def test_a_profile_replaces_the_units_that_it_measured(tmp_path: Path) -> None:
    units = model_units(models["llama-tiny"], Cluster.parse("2xCPU"), RunOptions(sequence_length=128))
    profile = load_profile(
        written(
            tmp_path,
            {"units": [{**DENSE, "type": "attention", "count": 1}, {**DENSE, "type": "mlp", "count": 8}],
             "communication": 0.25},
        )
    )  # fmt: skip
    merged = apply_profile(units, profile)

    assert [u.type for u in merged.units] == [u.type for u in units.units]
    assert {u.forward for u in merged.units[1:-1]} == {1.5}
    assert [u.layer for u in merged.units] == [u.layer for u in units.units]
    assert (merged.units[0], merged.units[-1]) == (units.units[0], units.units[-1])
    assert merged.communication == 0.25
    assert merged.memory_limit == units.memory_limit
    with pytest.raises(InputError, match="The profile measures dense, none of which the model has"):
        apply_profile(units, units_from_dict({"units": [DENSE]}))


def test_a_profile_sets_the_bandwidth_of_host_steps() -> None:
    units = model_units(models["llama-tiny"], Cluster.parse("2xCPU"), RunOptions(sequence_length=128))
    profile = units_from_dict({"units": [{**DENSE, "type": "mlp"}], "host_step_bandwidth": HOST_MEMORY_BANDWIDTH / 2})
    for before, after in zip(units.units, apply_profile(units, profile).units, strict=True):
        assert before.on_host is not None
        assert after.on_host is not None
        assert after.on_host.step == 2 * before.on_host.step
        assert after.on_host.gradients == before.on_host.gradients
