"""Profiles of models: bytes are compared exactly, times only checked for plausibility."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import debubble as db
from debubble import costs
from debubble.cli.profile import noise_words
from debubble.costs import load_profile, measured_source, read_profile
from debubble.costs.analytical.model_units import model_units
from debubble.costs.units import Units
from debubble.ir import InputError, Placement, PlannedUnit, RunOptions
from debubble.models import ModelConfig
from debubble.profiler.profile import ProfileOptions, measure, profile, unplanned_bytes
from debubble.profiler.units import ModelSlice, UnitSamples, measured_layers, measured_strategies, spread_of
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.build import build_stage
from debubble.runtime.models.stage import SavePolicy, Stage
from debubble.runtime.models.units import MicroBatch

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
RUN = RunOptions(micro_batch_size=2, sequence_length=16, dtype="fp32")
TOKENS = 2 * 16


def profile_of(output: Path, *, config: Any = CONFIG, run: RunOptions = RUN, **options: Any) -> Units:
    """The units that a profile of one process measures."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    profile(ProfileOptions(config=config, run=run, output=output, **{"repetitions": 1, **options}))
    dist.destroy_process_group()
    return load_profile(output)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Units:
    output = tmp_path_factory.mktemp("profile") / "costs.json"
    return profile_of(output, repetitions=2)


@pytest.fixture(scope="module")
def units(profiled: Units) -> Any:
    return profiled.units


def test_times_of_units_and_host_steps_are_measured(profiled: Units, units: Any) -> None:
    assert profiled.host_step_bandwidth is not None
    assert profiled.host_step_bandwidth > 0
    assert all(unit.forward > 0 and unit.backward_input + unit.backward_weight > 0 for unit in units)
    assert all(unit.backward_weight > 0 and unit.strategies["full"].recompute > 0 for unit in units[1:-1])


def test_the_spread_is_the_interquartile_range_over_medians() -> None:
    steady = UnitSamples({"forward": [2.0] * 5, "backward": [4.0] * 5})
    noisy = UnitSamples({"forward": [1.0, 2.0, 3.0, 4.0, 5.0], "backward": [1.0, 1.0, 1.0, 1.0, 9.0]})
    recomputing = UnitSamples({"forward": [1.0, 9.0], "backward": [1.0, 9.0]})
    assert spread_of({(0, "none"): steady, (0, "full"): recomputing}) == 0
    assert spread_of({(0, "none"): steady, (1, "none"): noisy}) == 2 / (2 + 4 + 3 + 1)


@pytest.mark.parametrize(("spread", "expected"), [(0.1, ""), (0.25, "backwards differ by 25%: ")])
def test_noisy_measurements_are_reported(spread: float, expected: str) -> None:
    words = noise_words(spread)
    assert expected in words if expected else words == ""


def test_a_profile_has_its_spread(tmp_path: Path) -> None:
    profile_of(tmp_path / "costs.json")
    source = measured_source(read_profile(tmp_path / "costs.json"))
    assert source is not None
    assert source.spread is not None


def test_a_cpu_has_no_unplanned_bytes_to_measure() -> None:
    assert unplanned_bytes(ModelSlice(CONFIG, RUN, torch.device("cpu"))) is None


def test_static_bytes_are_sixteen_per_parameter_in_fp32(units: Any) -> None:
    attention = 32 * (32 + 16 + 16) + 32 * 32 + 32
    mlp = 3 * 32 * 48 + 32
    assert [u.static for u in units[:3]] == [16 * 256 * 32, 16 * attention, 16 * mlp]


def test_an_mlp_keeps_its_input_and_four_inner_tensors(units: Any) -> None:
    # The input, the norm's result and its scales; gate, up and their product.
    assert units[2].strategies["none"].activation == 4 * TOKENS * (2 * 32 + 1 + 3 * 48)


def test_full_recomputation_saves_only_the_units_input(units: Any) -> None:
    for unit in units[1:-1]:
        assert unit.strategies["full"].activation == 4 * TOKENS * 32


@pytest.mark.parametrize(("strategy", "dropped"), [("norm", 32), ("multiply", 48), ("norm+multiply", 32 + 48)])
def test_recomputing_operators_drops_their_results(units: Any, strategy: str, dropped: Any) -> None:
    strategies = units[2].strategies
    saved = strategies["none"].activation - strategies[strategy].activation
    scales = 4 * TOKENS * ("norm" in strategy)
    assert saved in (4 * TOKENS * dropped, 4 * TOKENS * dropped + scales)


def test_named_strategies_list_their_operators(units: Any) -> None:
    named = {u.type: (u.strategies["cmb"].operators, u.strategies["selective"].operators) for u in units[1:3]}
    assert named == {"attention": ("norm", "norm"), "mlp": ("norm+multiply",) * 2}


def test_profiles_have_the_strategies_of_the_formulas(units: Any) -> None:
    formulas = model_units(ModelConfig.from_hf(CONFIG), db.Cluster.parse("1xCPU"), RUN)
    for measured, formula in zip(units[1:-1], formulas.units[1:-1], strict=True):
        assert set(formula.strategies) == set(measured.strategies)


@pytest.mark.parametrize("strategy", ["none", "norm"])
def test_bytes_of_units_add_up_to_those_of_a_stage(profiled: Units, strategy: str) -> None:
    model = ModelConfig.from_hf(CONFIG)
    planned = [
        PlannedUnit(u.type, u.layer, strategy if strategy in measured_strategies(u.type, model) else "none")
        for u in model.units
    ]
    ledger = Ledger(torch.device("cpu"))
    built = build_stage(CONFIG, planned)
    ledger.exclude(p for unit in built for p in unit.parameters())
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    stage = Stage(built, planned, ledger)
    stage.forward(0, tokens, MicroBatch(tokens.clone(), 1.0, 0), SavePolicy(recomputing=len(built)))
    partition = [[(index, unit.strategy) for index, unit in enumerate(planned)]]
    assert profiled.stage_costs(partition, Placement.linear(1)).activation_recomputed == (ledger.bytes,)


MIXED = {**CONFIG, "model_type": "qwen3_moe", "num_hidden_layers": 5, "mlp_only_layers": [0, 2], "head_dim": 16,
         "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}  # fmt: skip
WINDOWED = {**CONFIG, "model_type": "gemma3_text", "num_hidden_layers": 8, "sliding_window": 4, "head_dim": 16}


@pytest.mark.parametrize(
    ("config", "layers"), [(CONFIG, [0, 1]), (MIXED, [0, 1, 2, 3]), (WINDOWED, [0, 1, 5])], ids=["one", "moe", "window"]
)
def test_two_layers_of_every_kind_are_measured(config: Any, layers: Any) -> None:
    assert measured_layers(config) == layers


def test_layers_with_experts_are_measured_separately(tmp_path: Path) -> None:
    config = {**MIXED, "num_hidden_layers": 3, "mlp_only_layers": [0]}
    dense, router, experts = 3 * 32 * 48 + 32, 4 * 32, 4 * 3 * 32 * 24
    by_layer = [16 * dense, 16 * (32 + router + experts)]
    mlps = [u.static for u in profile_of(tmp_path / "costs.json", config=config).units if u.type == "mlp"]
    assert mlps == [by_layer[layer > 0] for layer in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["smollm3", "granite", "starcoder2"])
def test_undivided_layers_save_the_predicted_bytes(family: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 1, "num_attention_heads": 8}
    more = {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 512, "pad_token_id": 0, "eos_token_id": 1}
    config = type(transformers.AutoConfig.for_model(family))(**sizes, **more).to_dict()
    run = RunOptions(sequence_length=256, dtype="bf16")
    measured = ModelSlice(config, run, torch.device("cpu")).measure(repetitions=1, warm_up=0)
    priced = costs.model_units(db.Model.from_hf(config), db.Cluster.parse("2xA100-80GB"), run, pipeline=1).units[1]
    assert measured[1, "none"].saved_bytes == pytest.approx(priced.activation, rel=0.02)
    assert measured[1, "full"].saved_bytes == priced.strategies["full"].activation


def test_undivided_layers_of_other_families_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    config = {**CONFIG, "model_type": "phi3", "num_hidden_layers": 2, "pad_token_id": None, "sliding_window": None}
    units = profile_of(tmp_path / "costs.json", config=config).units
    assert [(u.type, u.layer) for u in units[:3]] == [("embedding", None), ("layer", 0), ("layer", 1)]
    assert units[1].static == 16 * (32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 48 + 2 * 32)
    assert units[1].strategies["full"].activation == 4 * TOKENS * 32


@pytest.mark.slow
def test_adapters_are_measured_with_frozen_layers(tmp_path: Path) -> None:
    units = profile_of(tmp_path / "costs.json", run=replace(RUN, lora=4)).units
    mlp, adapters = 3 * 32 * 48 + 32, 4 * 3 * (32 + 48)
    assert units[2].static == 4 * mlp + 16 * adapters
    assert units[0].static == 4 * 256 * 32


@pytest.mark.slow
def test_a_slice_has_the_requested_number_of_samples() -> None:
    measured = ModelSlice(CONFIG, RUN, torch.device("cpu")).measure(repetitions=1)
    times = measured[1, "full"].times
    assert {kind: len(samples) for kind, samples in times.items()} == {"forward": 2, "recompute": 2, "backward": 2}


@pytest.mark.parametrize(
    ("entries", "processes", "message"),
    [
        ({"device": "tpu"}, 1, "--device must be cpu or cuda"),
        ({"repetitions": 0}, 1, "--repetitions must be at least 1"),
        ({}, 0, "--processes must be at least 1"),
        ({"run": RunOptions(dtype="int8")}, 1, "--dtype must be one of"),
    ],
)
def test_invalid_profile_options_are_refused(tmp_path: Path, entries: Any, processes: int, message: str) -> None:
    options = {"config": CONFIG, "run": RUN, "output": tmp_path / "costs.json", **entries}
    with pytest.raises(InputError, match=message):
        measure(ProfileOptions(**options), processes=processes)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_processes")
def test_two_processes_measure_together_and_time_a_message(tmp_path: Path) -> None:
    options = ProfileOptions(config=CONFIG, run=RUN, output=tmp_path / "costs.json", repetitions=1)
    units = measure(options, processes=2)
    assert units == load_profile(tmp_path / "costs.json")
    assert units.communication is not None
    assert units.communication > 0
    assert units.offload_bandwidth is not None
    assert units.offload_bandwidth > 0


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("measured")
    profile_of(folder / "p.json", offload_to=folder)
    return folder / "p.json"


def planned(profile_file: Any, config: Any = CONFIG, **options: Any) -> Any:
    run = {"sequence_length": 16, "micro_batch_size": 2, "dtype": "fp32", **options}
    cluster = db.Cluster.parse("2xCPU")
    return db.plan(
        db.Model.from_hf(config), cluster, micro_batches=2, planner="merak", profile=profile_file, **run
    )  # fmt: skip


def test_a_plan_of_the_profiled_run_has_the_measured_times(profile_file: Any) -> None:
    stages = planned(profile_file).costs
    assert sum(stages.forward) == pytest.approx(sum(u.forward for u in load_profile(profile_file).units))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"config": {**CONFIG, "hidden_size": 64}}, "measures another model"),
        ({"dtype": "bf16"}, "was measured with --dtype fp32, not bf16"),
        ({"sequence_length": 32}, "was measured with --sequence-length 16, not 32: give --sequence-length 16"),
        ({"micro_batch_size": 1}, "was measured with --micro-batch-size 2, not 1"),
    ],
)
def test_a_profile_of_another_run_is_refused(profile_file: Any, entries: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        planned(profile_file, **entries)


def test_a_missing_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"p\.json cannot be read: No such file"):
        planned(tmp_path / "p.json")
