"""A value of a wrong type in an entry that matters is refused, or warned about, by the entry's name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import debubble as db
from debubble.errors import DebubbleError
from debubble.imports import imports
from debubble.imports.reader import SettingsReader
from debubble.imports.registry import Settings, UserFacts
from tests.imports.test_corpus import CORPUS, READ

WRONG: tuple[Any, ...] = ("banana", -1, 2.5, {}, [[]])
"""Values that are no degree, size, switch or word of a framework."""
ARGUMENTS: tuple[Any, ...] = ("banana", "-1", "2.5")
NO_VALUE: tuple[Any, ...] = (True, ())

ACCEPTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "torchtitan": {
        "parallelism.data_parallel_shard_degree": (-1,),
        "training.global_batch_size": (-1,),
        "training.num_tokens_per_train_step": (-1,),
        # Contents of a saved model, which have adapter ranks or none.
        "model_spec.model.layers": WRONG,
        "model_spec.model.mtp_layers": WRONG,
        "optimizer.param_groups": WRONG,
        # A missing file is refused by its name.
        "parallelism.pipeline_parallel_schedule_csv": ("banana",),
    },
    "automodel": {"distributed.pipeline.pp_schedule_csv": ("banana",)},
    "deepspeed": {
        # Its refusal names the method.
        **dict.fromkeys(("partition_method", "pipeline.partition", "pipeline.partition_method"), ("banana",)),
    },
    "mindformers": {
        # Only for Qwen3 does the name matter.
        **dict.fromkeys(
            (f"model.model_config.{name}" for name in ("type", "model_type", "architectures")), ("banana", [[]])
        ),
        "model.model_config.ffn_dim_multiplier": (2.5,),
        "moe_config.capacity_factor": (2.5, -1),
        # The unused one of two micro-batch counts.
        "runner_config.gradient_accumulation_steps": (-1,),
        "parallel_config.micro_batch_num": (-1,),
    },
}
"""Framework -> entry -> wrong values that the framework's code accepts, or that are reported elsewhere."""

VALUED = """
    tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size expert-model-parallel-size
    expert-tensor-parallel-size micro-batch-size global-batch-size seq-length num-layers hidden-size ffn-hidden-size
    num-attention-heads num-query-groups kv-channels vocab-size normalization num-experts moe-router-topk
    moe-ffn-hidden-size moe-layer-freq recompute-num-layers recompute-granularity recompute-method optimizer
    attention-backend fp8-format fp8-recipe data-parallel-sharding-strategy moe-token-dispatcher-type
    cuda-graph-impl num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
    pipeline-model-parallel-layout decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers mtp-num-layers
    exp-avg-dtype exp-avg-sq-dtype main-grads-dtype optimizer-offload-fraction position-embedding-type
    num-distributed-optimizer-instances
"""
SWITCHES = """
    bf16 fp16 sequence-parallel use-distributed-optimizer use-megatron-fsdp use-torch-fsdp2 swiglu
    group-query-attention untie-embeddings-and-output-weights qk-layernorm add-qkv-bias recompute-activations
    overlap-grad-reduce overlap-param-gather tp-comm-overlap optimizer-cpu-offload use-precision-aware-optimizer
    moe-enable-deepep overlap-moe-expert-parallel-comm fp8-hybrid multi-latent-attention no-position-embedding
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split grad-reduce-in-bf16
    disable-bias-linear accumulate-allreduce-grads-in-fp32 moe-shared-expert-gate
"""
"""Arguments of Megatron-LM that matter, with and without a value."""

EXPERTS = (
    "torchrun pretrain_gpt.py --num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096"
    " --max-position-embeddings 4096 --vocab-size 32000 --micro-batch-size 1 --global-batch-size 64 --swiglu"
    " --num-experts 8 --expert-model-parallel-size 2 --group-query-attention --num-query-groups 8"
    " --use-megatron-fsdp --optimizer-cpu-offload --pipeline-model-parallel-size 2 --disable-bias-linear\n"
)


def forms(framework: str) -> Iterator[tuple[Settings, Any, UserFacts]]:
    """Valid inputs of a framework in the corpus: settings, file, and the user's facts."""
    for form in READ:
        if form["framework"] == framework:
            facts = {**form.get("given", {})}
            if "model" in facts:
                facts["model"] = db.models[facts["model"]]
            cluster = db.Cluster.parse(f"{form.get('devices', 8)}xH100-80GB")
            path = CORPUS / form["file"]
            yield imports[framework].read(path, form.get("args")), path, UserFacts(cluster=cluster, **facts)


def is_reported(framework: str, settings: Settings, name: str, path: Any, facts: UserFacts) -> bool:
    """Whether a refusal or a warning names an entry."""
    last = name.rpartition(".")[2].lstrip("-")
    try:
        job = imports[framework].job(settings, path, facts)
    except DebubbleError as error:
        return last in str(error)
    return any(last in warning for warning in (*job.warnings, *job.rest.warnings))


@pytest.mark.parametrize("framework", list(ACCEPTED))
def test_wrong_type_is_reported_by_its_entry(framework: str) -> None:
    importer = imports[framework]
    untold: dict[tuple[str, str], str] = {}
    reported: set[tuple[str, str]] = set()
    for settings, path, facts in forms(framework):
        reader = SettingsReader(settings, path, importer.defaults, importer.harmless, importer.converts)
        importer.read_job(reader, facts)
        for name in reader.asked:
            free = ACCEPTED[framework].get(name, ()) if ":" not in name and not name.startswith("--") else WRONG
            for value in WRONG:
                key = (name, repr(value))
                if value not in free and key not in reported:
                    if is_reported(framework, {**settings, name: value}, name, path, facts):
                        reported.add(key)
                    else:
                        untold[key] = path.name

    assert {key: file for key, file in untold.items() if key not in reported} == {}
    assert len({name for name, _ in reported}) > 20


@pytest.mark.parametrize("name", [f"--{name}" for name in VALUED.split()])
def test_wrong_argument_value_is_reported(name: str, tmp_path: Any) -> None:
    path = tmp_path / "run.sh"
    path.write_text(EXPERTS)
    settings = imports["megatron"].read(path, None)
    facts = UserFacts(cluster=db.Cluster.parse("8xH100-80GB"))

    assert [
        value
        for value in (*ARGUMENTS, *NO_VALUE)
        if not is_reported("megatron", {**settings, name: value}, name, path, facts)
    ] == []


@pytest.mark.parametrize("name", [f"--{name}" for name in SWITCHES.split()])
def test_value_after_a_switch_is_reported(name: str, tmp_path: Any) -> None:
    path = tmp_path / "run.sh"
    path.write_text(EXPERTS)
    settings = imports["megatron"].read(path, None)
    facts = UserFacts(cluster=db.Cluster.parse("8xH100-80GB"))

    assert is_reported("megatron", {**settings, name: "banana"}, name, path, facts)
