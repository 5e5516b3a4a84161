"""Pipelines of transformers' own modules have the loss and gradients of the full model in one process."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError, PlannedUnit, StageCosts
from debubble.models import ModelConfig
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.build import build_stage
from debubble.runtime.models.hf.model import ModelParts, on_meta
from debubble.runtime.models.hf.units import LayerContext
from debubble.runtime.models.stage import Stage
from debubble.runtime.models.units import MicroBatch
from tests.support.generic_cases import GENERIC
from tests.support.runtime_cases import gradients_of, plan_of, run_threads, slow_unless, tokens_of

pytest.importorskip("transformers", minversion="5")

import transformers

from tests.support.hf_reference import assert_checkpoint_returns, assert_trains_as_alone, exactly, hf_model


def check(config: Any, schedule: Any, *, strategy: str = "none", counts: Any = None) -> None:
    model = hf_model(config)
    plan = plan_of(schedule, config, strategy=strategy, counts=counts)
    assert_trains_as_alone(model, plan, tokens_of(config, rows=schedule.micro_batches), within=exactly, rounding=1e-15)


@pytest.mark.parametrize("family", slow_unless(GENERIC, "gpt_oss", "qwen2_moe", "bloom"))
def test_split_backwards_give_transformers_gradients(family: Any) -> None:
    check(GENERIC[family], db.schedules["zb-h1"](devices=3, micro_batches=4))


@pytest.mark.parametrize(
    ("family", "name", "strategy"),
    [("cohere", "zb-v", "none"), ("falcon", "pipeoffload", "full"), ("gpt_oss", "1f1b", "full")],
)
def test_every_schedule_has_transformers_gradients(family: str, name: str, strategy: str) -> None:
    check(GENERIC[family], db.schedules[name](devices=2, micro_batches=4), strategy=strategy)


def test_stage_holds_only_its_parameters() -> None:
    config = GENERIC["granite"]
    units = [build_stage(config, [unit])[0] for unit in ModelConfig.from_hf(config).units]
    names = [{*unit.hf_parameters()} for unit in units]

    assert names[0] == {"model.embed_tokens.weight"}
    assert all(name.startswith("model.layers.2.") for name in names[3])
    assert names[-1] == {"model.norm.weight", "lm_head.weight"}
    parts = ModelParts(config)
    assert sum(map(len, names)) == len({name for unit in names for name in unit})
    assert all(p.is_meta or p.dim() < 2 for p in (*parts.model.parameters(), *parts.layers.parameters()))


def test_initial_weights_do_not_depend_on_the_partition() -> None:
    config = GENERIC["cohere"]
    units = ModelConfig.from_hf(config).units
    torch.manual_seed(0)
    undivided = started(config, [units], seed=3)
    drawn = torch.rand(1)
    alone, other = (started(config, [[unit] for unit in units], seed=seed) for seed in (3, 4))

    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))  # the global generator is unchanged
    assert torch.equal(undivided["lm_head.weight"], undivided["model.embed_tokens.weight"])
    for name, parameter in undivided.items():
        assert torch.equal(parameter, alone[name]), name
        assert parameter.dim() == 1 or not torch.equal(parameter, other[name]), name


@pytest.mark.parametrize("family", ["qwen2_moe", "apertus"])
def test_a_model_starts_as_transformers_does(family: str) -> None:
    config = {**GENERIC["olmo2"], **GENERIC.get(family, {}), "model_type": family}
    actual = started(config, [ModelConfig.from_hf(config).units], seed=0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert actual.keys() == model.state_dict().keys()
    for name, expected in model.state_dict().items():
        if expected.numel() == 1 or not expected.std():
            assert torch.equal(actual[name], expected), name
        else:
            torch.testing.assert_close(actual[name].std(), expected.std(), rtol=0.25, atol=0)


def started(config: Any, stages: Any, *, seed: Any) -> Any:
    """Parameters of a model that is built in these stages."""
    units = (unit for planned in stages for unit in build_stage(config, planned, seed=seed))
    return {name: parameter for unit in units for name, parameter in unit.hf_parameters().items()}


DROPOUT = {**GENERIC["phi"], "embd_pdrop": 0.3, "resid_pdrop": 0.2, "attention_dropout": 0.4}
JITTER = {
    **GENERIC["olmo2"], "model_type": "phimoe", "num_local_experts": 4, "router_jitter_noise": 0.3,
    "input_jitter_noise": 0.2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "still"),
    [(DROPOUT, GENERIC["phi"]), (JITTER, {**JITTER, "input_jitter_noise": 0.0})],
    ids=["phi", "phimoe"],
)
def test_random_numbers_ignore_order_and_recomputation(config: Any, still: Any) -> None:
    def step(name: Any, devices: Any, strategy: Any, config: Any = config) -> Any:
        plan = plan_of(db.schedules[name](devices=devices, micro_batches=4), config, strategy=strategy)
        return gradients_of(plan, tokens_of(config, rows=4))

    alone = step("gpipe", 1, "none")
    for name, devices, strategy in (("zb-h1", 3, "none"), ("1f1b", 2, "full")):
        loss, gradients = step(name, devices, strategy)
        assert loss == alone[0]
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, alone[1][parameter], rtol=1e-12, atol=1e-15)
    assert alone[0] != step("gpipe", 1, "none", still)[0]


@pytest.mark.parametrize("family", slow_unless(GENERIC, "smollm3", "qwen2_moe"))
def test_checkpoint_round_trip_changes_nothing(family: Any, tmp_path: Path) -> None:
    assert_checkpoint_returns(GENERIC[family], tmp_path)


def test_unit_outside_the_model_is_refused() -> None:
    for planned in (PlannedUnit("layer", 4), PlannedUnit("attention", 0)):
        with pytest.raises(InputError, match=f"no unit of type '{planned.type}' and layer {planned.layer}"):
            build_stage(GENERIC["olmo2"], [planned])


def test_offload_keeps_tensors_shared_by_micro_batches() -> None:
    planned, ledger = PlannedUnit("layer", 0), Ledger()
    (unit,) = build_stage(GENERIC["cohere2"], [planned])
    unit.attach_ledger(ledger)
    stage = Stage([unit], [planned], ledger)
    for j in range(2):
        y = stage.forward(j, torch.randn(1, 9, 32), MicroBatch())  # longer than the window, so that a mask is needed

    buffer = stage.offload(0, 1.0, lambda size: torch.empty(size, dtype=torch.uint8))
    stage.release(0)
    from_device = stage.backward(1, torch.ones_like(y), split=False)
    stage.reload(0, buffer)
    reloaded = stage.backward(0, torch.ones_like(y), split=False)
    assert from_device is not None
    assert reloaded is not None
    assert from_device.shape == reloaded.shape
    assert ledger.bytes == 0


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"model_type": "hrm_text"}, {}, "its layers need more than the hidden states"),
        ({"model_type": "nothing"}, {}, "no causal model of the type 'nothing'"),
        ({"output_router_logits": True}, {}, "no auxiliary loss for the routers of 'olmo2'"),
        ({"model_type": "opt", "layerdrop": 0.1}, {}, "layers that 'layerdrop' skips at random in training"),
        ({}, {"strategy": "norm"}, "in full or not at all, not 'norm'"),
        ({}, {"lora": 2}, "no LoRA for 'olmo2'"),
    ],
)
def test_unsupported_models_are_refused_with_a_sentence(config: Any, options: Any, message: str) -> None:
    plan = plan_of(db.schedules["gpipe"](devices=1, micro_batches=1), {**GENERIC["olmo2"], **config}, **options)
    with pytest.raises(InputError, match=message):
        run_threads(plan, lambda pipeline: None)


@pytest.mark.parametrize("entry", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_config_fetches_no_kernels(entry: str) -> None:
    model = on_meta({**GENERIC["olmo2"], entry: "some-org/some-kernel"})
    assert model.config._attn_implementation == "sdpa"


def test_model_that_is_no_sequence_of_layers_is_refused() -> None:
    with pytest.raises(InputError, match="its base model has no single list of layers"):
        ModelParts(transformers.AutoConfig.for_model("hrm_text").to_dict())


@pytest.mark.slow
def test_post_validated_zero_steps_match_synchronous_losses() -> None:
    config = GENERIC["qwen2_moe"]
    plan = plan_of(db.schedules["zb-h1"](devices=2, micro_batches=2), config, dtype="bf16", data=2, zero=2)
    tokens = tokens_of(config, rows=2)

    def synchronous(pipeline: Any) -> Any:
        return [(float(pipeline.step(tokens)), pipeline.optimizer_step(1.0))[0] for _ in range(3)]

    def ahead(pipeline: Any) -> Any:
        settled = [pipeline.post_validated_step(tokens, max_norm=1.0) for _ in range(3)] + [pipeline.finish_update()]
        return [float(before.loss) for before in settled if before is not None]

    def adamw(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=1e-3)

    losses = run_threads(plan, synchronous, optimizer=adamw)[0]
    assert losses == sorted(losses, reverse=True)
    assert run_threads(plan, ahead, optimizer=adamw)[0] == losses


BIAS = "mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize("options", [{}, {"data": 2, "zero": 3}], ids=str)
def test_constant_stays_fp32_in_a_bf16_run_and_is_not_stepped(options: dict[str, Any]) -> None:
    config = GENERIC["deepseek_v3"]
    plan = plan_of(
        db.schedules["1f1b"](devices=2, micro_batches=2), config, dtype="bf16",
        costs=StageCosts.of(stages=2, parameter_gather=1, gathered=1, static=8), **options,
    )  # fmt: skip
    bias = torch.tensor([0.1, 0.2, 0.3, 0.4])

    def trained(pipeline: Any) -> Any:
        state = pipeline.state_dict()
        constants = {name for name in state if name.endswith(BIAS)}
        pipeline.load_state_dict({**state, **dict.fromkeys(constants, bias)})
        pipeline.step(tokens_of(config, rows=4))
        pipeline.optimizer_step(1.0)
        return {name: t for name, t in pipeline.state_dict().items() if name in constants}

    def sgd(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.1)

    actual = {name: t for tensors in run_threads(plan, trained, optimizer=sgd) for name, t in tensors.items()}
    assert actual.keys() == {f"model.layers.{layer}.{BIAS}" for layer in (1, 2, 3)}
    assert all(torch.equal(t, bias) for t in actual.values())  # 0.1 is not representable in bf16


@pytest.mark.slow
def test_threads_may_be_the_first_to_import_transformers() -> None:
    script = f"""
from concurrent.futures import ThreadPoolExecutor
from debubble.runtime.models.hf.model import on_meta
with ThreadPoolExecutor(4) as ranks:
    print(*(type(model).__name__ for model in ranks.map(on_meta, [{GENERIC["olmo2"]}] * 4)))
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["Olmo2ForCausalLM"] * 4


def test_only_masks_of_recent_shapes_are_cached() -> None:
    parts = ModelParts(GENERIC["starcoder2"])
    context = LayerContext(parts.around)

    def noted(length: int) -> Any:
        _, named = context.arguments_of(0, torch.zeros(1, length, parts.model.config.hidden_size))
        return named["attention_mask"]

    masks = [weakref.ref(noted(length)) for length in (6, 7, 8)]
    gc.collect()
    assert [mask() is not None for mask in masks] == [False, True, True]
    assert noted(8) is masks[2]()
