"""Training runs whose step times their makers published, with the configurations that they chose.

A rate in tokens per second and device is turned into the seconds of a step.  Where a source does not say what is
recomputed, `recompute` is None, and the least that fits is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from debubble.costs import Cluster
from debubble.costs.operators import MEGATRON, Framework
from debubble.ir import RunOptions
from debubble.ir.degrees import Degrees
from debubble.models import Model, models
from debubble.models.architecture import Experts
from debubble.planners.degrees import Job


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One run: what was trained on which devices, how it was divided, and how long a step took."""

    name: str
    model: Model
    cluster: Cluster
    degrees: Degrees
    seconds: float
    """Of a step, as published."""
    source: str
    sequence_length: int
    dtype: str = "bf16"
    recompute: str | None = None
    """A strategy of all units; None: the least that fits."""
    framework: Framework = MEGATRON
    """What the run's framework fuses and keeps, where it is not what a plan assumes."""
    passes: int = 1
    """How often the pipeline is filled and drained in one step, of `micro_batches` altogether."""

    @property
    def kind(self) -> str:
        """`dense`, or `MoE` for a mixture of experts."""
        return "dense" if self.model.experts is None else "MoE"

    @property
    def job(self) -> Job:
        """The same model, devices and batch, with nothing fixed."""
        return Job(
            model=self.model, cluster=self.cluster, global_batch=self.degrees.global_batch,
            options=RunOptions(sequence_length=self.sequence_length, dtype=self.dtype),
        )  # fmt: skip


def _run(
    name: str,
    model: Model | str,
    devices: str | dict[str, Any],
    *,
    batch: int,
    length: int,
    seconds: float | None = None,
    rate: float | None = None,
    zero: int = 1,
    size: int = 1,
    **entries: Any,
) -> PublishedRun:
    """A run with a batch of so many sequences and either the seconds of its step or its rate."""
    cluster = Cluster.from_dict({"devices": devices} if isinstance(devices, str) else devices)
    names = ("pipeline", "tensor", "context", "expert", "expert_tensor", "chunks")
    degrees = {each: entries.pop(each) for each in names if each in entries}
    replica = degrees.get("pipeline", 1) * degrees.get("tensor", 1) * degrees.get("context", 1)
    data = cluster.count // replica
    if seconds is None:
        assert rate is not None
        seconds = batch * length / (rate * cluster.count)
    if zero == 3:  # all of them by FSDP
        entries["framework"] = replace(entries.get("framework", MEGATRON), gathers_units=True)
    divided = Degrees(
        **degrees, data=data, zero=zero if data * degrees.get("context", 1) > 1 else 0, micro_batch_size=size,
        micro_batches=batch // (data * size),
    )  # fmt: skip
    return PublishedRun(
        name=name, model=models[model] if isinstance(model, str) else model, cluster=cluster, degrees=divided,
        seconds=seconds, sequence_length=length, **entries,
    )  # fmt: skip


def _gpt(layers: int, hidden: int, heads: int, *, vocab: int = 51200, dropout: float = 0.1) -> Model:
    """A GPT with learned positions and a GELU of four times the width."""
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return Model.from_hf(
        {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 2048,
         "vocab_size": vocab, **dropouts}
    )  # fmt: skip


def _nemotron4(layers: int, hidden: int, heads: int) -> Model:
    """Nemotron-4: a squared ReLU without gates, 8 groups of queries, a vocabulary of 256,000."""
    return Model.from_hf(
        {"model_type": "nemotron", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
         "num_key_value_heads": 8, "intermediate_size": 4 * hidden, "vocab_size": 256000, "hidden_act": "relu2",
         "tie_word_embeddings": False}
    )  # fmt: skip


GROK = Model.from_hf(
    {"model_type": "mixtral", "num_hidden_layers": 64, "hidden_size": 6144, "intermediate_size": 32768,
     "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
     "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False}
)  # fmt: skip
LLAMA_405B = Model.from_hf({**models["llama3.1-405b"].config, "num_key_value_heads": 16})
"""As the recipe has it."""
AUTO = Framework(dispatches_once=True)
"""NeMo Automodel: DeepEP."""


def _megascale(name: str, *, devices: int, batch: int, seconds: float, framework: Framework) -> PublishedRun:
    """A run of MegaScale's strong scaling: a GPT with 175B parameters in 6 chunks on each of 8 pipeline devices."""
    return _run(
        name, _gpt(96, 12288, 128, vocab=64000, dropout=0.0), f"{devices}xA100-80GB", batch=batch, length=2048,
        seconds=seconds, tensor=8, pipeline=8, chunks=6, framework=framework, source=f"{MEGASCALE}, {name}",
    )  # fmt: skip


def _in_turn(model: Model) -> Model:
    """Experts in turn: Automodel's balanced gate gives token t the experts after those of token t - 1."""
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, reach=layer.mlp.per_token / layer.mlp.count))
        if isinstance(layer.mlp, Experts) else layer
        for layer in model.per_layer
    )  # fmt: skip
    return replace(model, per_layer=layers)


DEEPSEEK_V3_ALONE = Model.from_hf({**models["deepseek-v3"].config, "num_nextn_predict_layers": 0})
"""Without the module for a further token."""
EAGER_GPT = Framework(flash=False)
NEMO = Framework(tensor_overlap=True, dispatches_once=True)
"""NeMo's and Megatron-Bridge's recipes: tensor-parallel collectives beside products, DeepEP."""

DGXC = "NVIDIA/dgxc-benchmarking at 35a9aec (24.09 to 24.11)"
BRIDGE = "Megatron-Bridge, docs/performance-summary-archive.md"
AUTOMODEL = "NeMo Automodel, docs/performance-summary.md of October 2025"
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
MOSAIC = "llm-foundry, scripts/train/benchmarking/README.md"
MEGASCALE = "Jiang et al., MegaScale (arXiv 2402.15627), table 2, quoted from memory"
"""Its steps agree with its tokens per second, and the last with the 55.2% MFU of the abstract."""
GRAND_TETON = {"memory_bandwidth": 2.4e12, "memory_limit": "90GiB", "flops": 912e12}
"""H100s with 96 GB of HBM2e and 500 W, as torchtitan's table has them; their peak, it says, is between 835 and 989."""

RUNS: tuple[PublishedRun, ...] = (
    _run("Llama 3.1 8B", "llama3.1-8b", "8xH100-80GB", batch=128, length=8192, seconds=12.91, context=2,
         recompute="none", source=f"{DGXC}, llama3.1/README_8b.md"),
    _run("Llama 3.1 70B", "llama3.1-70b", "64xH100-80GB", batch=128, length=8192, seconds=14.61, tensor=4, pipeline=4,
         context=2, chunks=5, recompute="none", framework=NEMO, source=f"{DGXC}, llama3.1/README_70b.md"),
    _run("Llama 3.1 405B", LLAMA_405B, "576xH100-80GB", batch=252, length=8192, seconds=17.20, tensor=8, pipeline=9,
         context=2, chunks=7, recompute="none", framework=NEMO, source=f"{DGXC}, llama3.1/README_405b.md"),
    _run("Nemotron-4 15B", _nemotron4(32, 6144, 48), "16xH100-80GB", batch=64, length=4096, seconds=2.83, tensor=4,
         size=4, recompute="none", framework=NEMO, source=f"{DGXC}, nemotron/README_15b.md"),
    _run("Nemotron-4 340B", _nemotron4(96, 18432, 96), "256xH100-80GB", batch=64, length=4096, seconds=4.67, tensor=8,
         pipeline=8, chunks=12, recompute="core", source=f"{DGXC}, nemotron/README_340b.md"),
    _run("GPT-3 175B", _gpt(96, 12288, 96, dropout=0.0), "128xH100-80GB", batch=256, length=2048, seconds=8.91,
         tensor=4, pipeline=8, chunks=12, source=f"{DGXC}, nemo_megatron/README_175b.md"),
    _run("Llama 3 8B", "llama3-8b", "8xH100-80GB", batch=128, length=8192, rate=14451, zero=3, dtype="fp8",
         source=f"{BRIDGE}, 25.11, DGX-H100"),
    _run("Llama 3 70B", "llama3-70b", "64xH100-80GB", batch=128, length=8192, rate=1602, tensor=4, pipeline=8,
         chunks=5, dtype="fp8", framework=NEMO, source=f"{BRIDGE}, 25.11, DGX-H100"),
    _run("Llama 3.1 405B", "llama3.1-405b", "1024xH100-80GB", batch=512, length=8192, rate=292, tensor=8, pipeline=8,
         context=2, chunks=8, dtype="fp8", framework=NEMO, source=f"{BRIDGE}, 25.11, DGX-H100"),
    _run("Llama 3.1 8B", "llama3.1-8b", {"devices": "8xH100-80GB", **GRAND_TETON}, batch=16, length=8192, rate=6667,
         zero=3, size=2, source=f"{TITAN}, table 1 (FSDP, torch.compile)"),
    _run("Llama 3.1 8B", "llama3.1-8b", {"devices": "128xH100-80GB", **GRAND_TETON}, batch=256, length=8192, rate=6514,
         zero=3, size=2, source=f"{TITAN}, table 3 (FSDP, torch.compile)"),
    _run("MPT 7B", _gpt(32, 4096, 32, vocab=50368, dropout=0.0), "8xH100-80GB", batch=48, length=2048,
         seconds=48 * 2048 / 85144, zero=3, size=6, recompute="none", source=f"{MOSAIC}, H100 80GB BF16"),
    _run("MPT 30B", _gpt(48, 7168, 56, vocab=50368, dropout=0.0), "32xH100-80GB", batch=1344, length=2048,
         seconds=1344 * 2048 / 73860, zero=3, size=14, recompute="full", source=f"{MOSAIC}, H100 80GB BF16"),
    _run("MPT 70B", _gpt(80, 8192, 64, vocab=50368, dropout=0.0), "64xA100-80GB", batch=2048, length=2048,
         seconds=2048 * 2048 / 26274, zero=3, size=8, recompute="full", source=f"{MOSAIC}, A100 80GB"),
    _run("GPT 145.6B", _gpt(80, 12288, 96), "1536xA100-80GB", batch=2304, length=2048,
         seconds=96 * 2304 * 2048 * 80 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 80 * 12288))
         / (1536 * 148e12), tensor=8, pipeline=8, zero=0, recompute="full",
         framework=Framework(flash=False, sequence_parallel=False), source="Narayanan et al., SC'21, table 1"),
    _run("GPT 530B", _gpt(105, 20480, 128), "280xA100-80GB", batch=280, length=2048, seconds=37.83, tensor=8,
         pipeline=35, chunks=3, zero=0, recompute="core", framework=EAGER_GPT,
         source="Korthikanti et al. 2022, table 5"),
    _run("Qwen3 30B-A3B", _in_turn(models["qwen3-30b-a3b"]), "8xH100-80GB", batch=512, length=4096, seconds=21.773,
         expert=8, zero=3, size=4, recompute="full", framework=AUTO, source=AUTOMODEL),
    _run("gpt-oss 20B", _in_turn(models["gpt-oss-20b"]), "8xH100-80GB", batch=256, length=4096, seconds=10.04,
         expert=8, zero=3, size=2, recompute="full", framework=AUTO, source=AUTOMODEL),
    _run("gpt-oss 120B", _in_turn(models["gpt-oss-120b"]), "64xH100-80GB", batch=512, length=4096, seconds=4.30,
         expert=64, zero=3, size=2, recompute="none", framework=AUTO, source=AUTOMODEL),
    _run("DeepSeek-V3", _in_turn(DEEPSEEK_V3_ALONE), "256xH100-80GB", batch=512, length=4096, seconds=8.18, pipeline=4,
         expert=64, chunks=8, recompute="full", framework=AUTO, source=AUTOMODEL),
    _run("Kimi K2", _in_turn(models["kimi-k2"]), "256xH100-80GB", batch=512, length=4096, seconds=8.86, pipeline=8,
         expert=32, chunks=4, passes=2, recompute="full", framework=AUTO, source=AUTOMODEL),
    _run("gpt-oss 120B", "gpt-oss-120b", "64xH100-80GB", batch=1280, length=4096, rate=5993, pipeline=4, expert=8,
         framework=NEMO, source=f"{BRIDGE}, 26.02"),
    _run("Qwen3 235B-A22B", "qwen3-235b-a22b", "256xH100-80GB", batch=8192, length=4096, rate=1633, tensor=2,
         pipeline=8, expert=32, expert_tensor=1, chunks=4, dtype="fp8", framework=NEMO, source=f"{BRIDGE}, 26.02"),
    _run("DeepSeek-V3", "deepseek-v3", "1024xH100-80GB", batch=8192, length=4096, rate=1297, tensor=2, pipeline=8,
         expert=64, expert_tensor=1, chunks=4, dtype="fp8", recompute="none", framework=NEMO,
         source=f"{BRIDGE}, 25.09"),
    _run("DeepSeek-V3", "deepseek-v3", "2048xH800-80GB", batch=15360, length=4096, rate=1e12 / (180e3 * 3600),
         pipeline=16, expert=64, chunks=2, dtype="fp8", recompute="none",
         framework=replace(AUTO, dispatch_overlap=True),
         source="DeepSeek-V3's report (arXiv 2412.19437): 180,000 H800 hours per trillion tokens"),
    _run("DeepSeek-V3", DEEPSEEK_V3_ALONE, "256xGB200-192GB", batch=4096, length=4096, rate=3139, pipeline=4,
         expert=64, chunks=4, recompute="none", framework=NEMO, source=f"{BRIDGE}, 25.11"),
    _run("Qwen3 235B-A22B", "qwen3-235b-a22b", "256xGB200-192GB", batch=8192, length=4096, rate=4916, pipeline=8,
         expert=32, chunks=3, framework=NEMO, source=f"{BRIDGE}, 25.11"),
    _run("Grok-1 314B", GROK, "512xH100-80GB", batch=1024, length=8192, seconds=20.83, tensor=4, pipeline=8, context=2,
         expert=8, chunks=8, recompute="none", source=f"{DGXC}, grok1/README_314b.md"),
    *(
        _megascale(f"GPT 175B by {system}", devices=devices, batch=batch, seconds=seconds, framework=framework)
        for devices, batch, *steps in (
            (256, 768, 40.0, 32.0), (1024, 768, 11.9, 8.9), (3072, 6144, 29.02, 23.66), (12288, 6144, 8.57, 6.34)
        )
        for system, framework, seconds in zip(
            ("Megatron-LM", "MegaScale"), (MEGATRON, Framework(tensor_overlap=True)), steps, strict=True
        )
    ),
)  # fmt: skip
