"""Exported files are read by the frameworks' own code where it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import debubble as db
from debubble.exports import exports
from debubble.exports.layers import stage_layers
from debubble.frameworks.megatron.export import layout
from debubble.ir import Kind
from debubble.plans import Plan
from debubble.targets.offload import ModuleOffload
from tests.exports.hand_plans import MIXTRAL, full, interleaved, moving, one_f_one_b, priced
from tests.exports.test_one_device import CHUNKED, FSDP

PLANS = [priced(full(1)), priced(config=MIXTRAL, data=2, expert=2, tensor=2, zero=1, micro_batch_size=3)]


def written(plan: Plan, target: str, folder: Path) -> None:
    for name, content in exports[target](plan).files.items():
        (folder / name).write_text(content)


def applied(folder: Path, config: Any) -> Any:
    """The trainer config that the recipe in a folder makes of another one."""
    spec = importlib.util.spec_from_file_location("plan", folder / "plan.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.apply(config)


@pytest.mark.parametrize("plan", PLANS)
def test_torchtitan_accepts_the_config(plan: Plan, tmp_path: Path) -> None:
    """Its constructor checks its sections against each other."""
    trainer = pytest.importorskip("torchtitan.trainer", exc_type=ImportError)
    written(plan, "torchtitan", tmp_path)

    config = applied(tmp_path, trainer.Trainer.Config())

    parallelism = config.parallelism
    assert parallelism.pipeline_parallel_degree == plan.devices
    assert parallelism.tensor_parallel_degree == plan.options.tensor
    assert parallelism.data_parallel_shard_degree == plan.options.data
    assert parallelism.expert_parallel_degree == plan.options.expert * plan.options.tensor
    assert config.training.disable_cuda_graphs
    assert config.compile.enable


ONE_STAGE = [priced(full(1), layers=(4,), data=2, zero=3, micro_batch_size=3, sequence_length=128), FSDP]


@pytest.mark.parametrize("plan", ONE_STAGE)
def test_torchtitan_accumulates_micro_batches_without_a_pipeline(plan: Plan, tmp_path: Path) -> None:
    trainer = pytest.importorskip("torchtitan.trainer", exc_type=ImportError)
    written(plan, "torchtitan", tmp_path)

    config = applied(tmp_path, trainer.Trainer.Config())

    assert config.parallelism.pipeline_parallel_degree == 1
    assert config.parallelism.module_fqns_per_model_part is None
    assert config.parallelism.fsdp_reshard_after_forward == "always"
    size, batch = plan.options.micro_batch_size, plan.degrees.global_batch
    assert (config.training.local_batch_size, config.training.global_batch_size) == (size, batch)


@pytest.mark.parametrize(
    ("options", "overlapped"), [({}, False), ({"tensor": 2, "framework": "torchtitan,tensor_overlap=true"}, True)]
)
def test_torchtitan_compiles_what_is_priced_as_compiled(
    options: dict[str, Any], overlapped: bool, tmp_path: Path
) -> None:
    """The config refuses overlapped products that are not compiled."""
    trainer = pytest.importorskip("torchtitan.trainer", exc_type=ImportError)
    written(priced(**options), "torchtitan", tmp_path)

    compiling = applied(tmp_path, trainer.Trainer.Config()).compile

    assert (compiling.enable, compiling.enable_async_tensor_parallel) == (True, overlapped)


def test_torchtitan_does_not_compile_what_is_priced_eager(tmp_path: Path) -> None:
    trainer = pytest.importorskip("torchtitan.trainer", exc_type=ImportError)
    written(priced(framework="torchtitan@2024.06"), "torchtitan", tmp_path)

    assert not applied(tmp_path, trainer.Trainer.Config()).compile.enable


@pytest.mark.parametrize("plan", PLANS)
def test_automodel_parses_the_distributed_section(plan: Plan) -> None:
    recipes = pytest.importorskip("nemo_automodel.recipes._dist_utils", exc_type=ImportError)
    from torch.distributed.fsdp import MixedPrecisionPolicy

    section = yaml.safe_load(exports["automodel"](plan).files["plan.yaml"])["distributed"]
    section["mp_policy"]["_target_"] = MixedPrecisionPolicy  # As the recipe's loader imports it.
    parsed = recipes.parse_distributed_section(section)

    sizes = parsed["parallelism_sizes"]
    assert (sizes.pp_size, sizes.tp_size, sizes.dp_size) == (plan.devices, plan.options.tensor, plan.options.data)
    assert parsed["strategy_config"].sequence_parallel == (plan.options.tensor > 1)
    assert parsed["pipeline_config"].pp_schedule_csv == "schedule.csv"


@pytest.mark.parametrize("plan", ONE_STAGE)
def test_automodel_parses_fsdp_without_a_pipeline(plan: Plan) -> None:
    recipes = pytest.importorskip("nemo_automodel.recipes._dist_utils", exc_type=ImportError)

    section = yaml.safe_load(exports["automodel"](plan).files["plan.yaml"])["distributed"]
    del section["mp_policy"]
    parsed = recipes.parse_distributed_section(section)
    strategy = parsed["strategy_config"]

    assert not parsed["pp_enabled"]
    assert (strategy.reshard_after_forward, strategy.defer_fsdp_grad_sync) == (True, False)


@pytest.mark.parametrize("plan", [one_f_one_b([6, 9, 9, 8]), interleaved([3, 1, 2, 0])])
def test_megatron_reads_the_layout(plan: Plan) -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout", exc_type=ImportError)
    stages = stage_layers(plan, target="test")

    parsed = layouts.PipelineParallelLayerLayout.from_str(layout(stages), plan.devices)

    layers = [[kind.name for kind in parsed.layout[s % plan.devices][s // plan.devices]] for s in range(len(stages))]
    assert [names.count("decoder") for names in layers] == [len(stage.layers) for stage in stages]
    assert layers[0][0] == "embedding"
    assert layers[-1][-1] == "loss"


def offloading() -> Plan:
    """Inputs of attention's modules and of the experts' activation functions, with recomputed norms."""
    return moving(
        priced(lambda layer: ("none", "norm"), config=MIXTRAL, data=2, expert=2, zero=1),
        ModuleOffload(("core_attn", "attn_proj", "moe_act")),
    )


def overlapping() -> Plan:
    order = db.schedules["interleaved-combined"](devices=2, micro_batches=8)
    return priced(
        layers=(1, 1, 1, 1), schedule=order, config=MIXTRAL, data=2, expert=2, zero=1, expert_overlap=True
    )  # fmt: skip


MEGATRON_PLANS = [
    pytest.param(priced(full(0, 2), tensor=2, data=2, zero=1), id="block"),
    pytest.param(priced(lambda layer: ("core", "norm+mlp")), id="selective"),
    pytest.param(priced(lambda layer: ("none", "norm+mlp"), config=MIXTRAL, data=2, expert=2, zero=1), id="experts"),
    pytest.param(interleaved([3, 1, 2, 2]), id="interleaved"),
    pytest.param(priced(data=2, zero=3, host_optimizer=0.5), id="FSDP"),
    pytest.param(offloading(), id="offload"),
    pytest.param(overlapping(), id="overlap"),
    pytest.param(FSDP, id="one stage"),
    pytest.param(priced(framework="megatron-bridge", tensor=2, data=2, zero=1), id="Bridge"),
    pytest.param(priced(moment_dtype="bf16", data=2, zero=1), id="moments"),
    pytest.param(priced(flash_attention=False), id="scores"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # With its defaults.
@pytest.mark.parametrize("plan", MEGATRON_PLANS)
def test_megatron_core_takes_the_settings_of_the_model(plan: Plan) -> None:
    """They are in the Bridge recipe, whose model is a TransformerConfig."""
    transformer = pytest.importorskip("megatron.core.transformer.transformer_config", exc_type=ImportError)
    distributed = pytest.importorskip("megatron.core.distributed", exc_type=ImportError)
    optimizer = pytest.importorskip("megatron.core.optimizer", exc_type=ImportError)
    scope: dict[str, Any] = {}
    exec(exports["megatron"](plan).files["megatron_bridge.py"], scope)
    parts = scope["PARTS"]
    settings = {name: value for name, value in parts["model"].items() if name != "seq_length"} | parts["comm_overlap"]
    layers = sum(unit.type == "attention" for stage in plan.partition for unit in stage)
    experts = {"num_moe_experts": 4} if plan.options.expert > 1 else {}

    config = transformer.TransformerConfig(
        num_layers=layers, hidden_size=64, num_attention_heads=4, bf16=True, pipeline_dtype=torch.bfloat16,
        add_bias_linear=False, **experts, **settings,
    )  # fmt: skip
    distributed.DistributedDataParallelConfig(**parts["ddp"])
    # Its constructor asks for Transformer Engine's version.
    dtypes = {field.name for field in fields(optimizer.OptimizerConfig) if field.type is torch.dtype}
    assert {field.name for field in fields(optimizer.OptimizerConfig)} >= parts["optimizer"].keys()
    assert all(isinstance(value, torch.dtype) == (name in dtypes) for name, value in parts["optimizer"].items())

    config.pipeline_model_parallel_layout.validate_layer_layout(layers, 0)
    assert config.virtual_pipeline_model_parallel_size == settings["virtual_pipeline_model_parallel_size"]
    assert config.attention_backend.name == ("auto" if plan.options.flash_attention else "unfused")


@pytest.mark.parametrize(("devices", "chunks"), [(2, 2), (4, 2), (4, 3)])
def test_megatron_core_orders_chunks_as_the_library_does(devices: int, chunks: int) -> None:
    """Its table lists a device's forwards in order: (micro-batch, chunk)."""
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules", exc_type=ImportError)
    interleaved_1f1b = db.schedules["interleaved"](devices=devices, micro_batches=4 * devices, chunks=chunks)

    table = schedules.get_schedule_table(4 * devices, chunks, devices)

    forwards = [op for op in interleaved_1f1b.orders[0] if op.kind is Kind.F]
    assert [(op.micro_batch, op.stage // devices) for op in forwards] == table


TRAINING = """
import json, deepspeed, torch
from torch import nn
deepspeed.init_distributed("gloo")
from planned_pipeline import PlannedPipeline

class Layer(nn.Linear):
    forwards = 0
    def forward(self, x):
        self.forwards += 1
        return x + torch.tanh(super().forward(x))

torch.manual_seed(0)
layers = [nn.Embedding(32, 16), *(Layer(16, 16) for _ in range(4)), nn.Linear(16, 32)]
loss = lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
module = PlannedPipeline(layers, loss_fn=loss)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=module, config=json.load(open("ds_config.json")), optimizer=optimizer)
batches = iter([(torch.arange(8)[None] + j, torch.arange(8)[None] + j) for j in range(8)])
lost = float(engine.train_batch(batches))
forwards = [layer.forwards for layer in module.forward_funcs if isinstance(layer, Layer)]
open(f"rank{torch.distributed.get_rank()}.json", "w").write(json.dumps([lost, forwards]))
"""


def trained(folder: Path, script: str, *, ranks: int) -> list[Any]:
    """Output of all processes of a training script that runs next to a plan's files."""
    (folder / "train.py").write_text(script)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, "train.py"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    return [yaml.safe_load((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def test_deepspeed_recomputes_planned_layers_with_equal_losses(tmp_path: Path) -> None:
    """Layers 0 and 3 run twice per micro-batch; layer 0 follows the embedding, whose input has no gradient."""
    pytest.importorskip("deepspeed", exc_type=ImportError)
    results = []
    for name, strategy in (("plain", full()), ("recomputing", full(0, 3))):
        folder = tmp_path / name
        folder.mkdir()
        written(priced(strategy, dtype="fp32"), "deepspeed", folder)
        results.append(trained(folder, TRAINING, ranks=2))

    plain, recomputing = results
    assert [forwards for _, forwards in plain] == [[8, 8], [8, 8]]
    assert [forwards for _, forwards in recomputing] == [[16, 8], [8, 16]]
    assert [loss for loss, _ in recomputing] == [loss for loss, _ in plain]


SHARDING = """
import json, deepspeed, torch
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
layers = [torch.nn.Linear(16, 16) for _ in range(4)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, config=json.load(open("ds_config.json")), optimizer=optimizer)
for micro_batch in range(engine.gradient_accumulation_steps()):
    engine.backward(engine(torch.ones(1, 16, dtype=torch.bfloat16)).square().sum())
    engine.step()
rank = torch.distributed.get_rank()
open(f"rank{rank}.json", "w").write(json.dumps([engine.global_steps, engine.zero_optimization_stage()]))
"""


def test_deepspeed_accumulates_micro_batches_without_a_pipeline(tmp_path: Path) -> None:
    """A step of the plan is one of DeepSpeed, on the number of ranks that the configuration's batch needs."""
    pytest.importorskip("deepspeed", exc_type=ImportError)
    written(priced(layers=(2, 2), schedule=CHUNKED, data=2, zero=3), "deepspeed", tmp_path)

    assert trained(tmp_path, SHARDING, ranks=2) == [[1, 3], [1, 3]]


SUMMING = """
import json, deepspeed, torch
deepspeed.init_distributed("gloo")
model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.AdamW(model.parameters())
engine, *_ = deepspeed.initialize(model=model, config=json.load(open("ds_config.json")), optimizer=optimizer)
for x in [1] + 7 * [2**-9]:
    engine.backward(engine(torch.tensor([[x]], dtype=torch.bfloat16)).sum())
    has_gradients = model.weight.grad is not None
    engine.step()
open("rank0.json", "w").write(json.dumps([8 * float(engine.get_global_grad_norm()), has_gradients]))
"""


@pytest.mark.parametrize(
    ("framework", "zero", "wide"),
    [
        ("deepspeed", 0, False),
        ("deepspeed,gradient_bytes=4", 0, True),
        ("deepspeed,gradient_bytes=4", 2, True),
    ],
)
def test_deepspeed_sums_gradients_in_the_priced_dtype_once(
    framework: str, zero: int, wide: bool, tmp_path: Path
) -> None:
    """In bf16, 1 + 2**-9 is 1."""
    pytest.importorskip("deepspeed", exc_type=ImportError)
    written(priced(layers=(4,), zero=zero, framework=framework), "deepspeed", tmp_path)

    ((total, has_gradients),) = trained(tmp_path, SUMMING, ranks=1)

    assert (total > 1) == wide
    assert not has_gradients


STEPPED = """
import json, deepspeed, torch
deepspeed.init_distributed("gloo")
model = torch.nn.Linear(8, 8, bias=False)
optimizer = torch.optim.AdamW(model.parameters())
engine, *_ = deepspeed.initialize(model=model, config=json.load(open("ds_config.json")), optimizer=optimizer)
for _ in range(8):
    engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).sum())
    engine.step()
((master, moments),) = engine.optimizer.optimizer.state.items()
tensors = master, moments["exp_avg"], moments["exp_avg_sq"]
open("rank0.json", "w").write(json.dumps([str(tensor.dtype) for tensor in tensors]))
"""


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_deepspeed_steps_weights_in_the_planned_dtype(dtype: str, zero: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", exc_type=ImportError)
    written(priced(layers=(4,), zero=zero, master_dtype=dtype), "deepspeed", tmp_path)

    name = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[dtype]
    assert trained(tmp_path, STEPPED, ranks=1) == [[name] * 3]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_torchtitan_stores_weights_in_the_planned_dtype(dtype: str, tmp_path: Path) -> None:
    trainer = pytest.importorskip("torchtitan.trainer", exc_type=ImportError)
    written(priced(data=2, zero=3, layers=(4,), master_dtype=dtype), "torchtitan", tmp_path)

    training = applied(tmp_path, trainer.Trainer.Config()).training
    assert training.dtype == {"fp32": "float32", "bf16": "bfloat16"}[dtype]
