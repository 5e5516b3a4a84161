"""Launch scripts of Megatron-Bridge: overrides of a recipe, and options that the user must give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from debubble.imports.job import ImportedJob
from debubble.ir import InputError
from tests.support import imported_jobs

DEGREES = "model.tensor_model_parallel_size=2 model.pipeline_model_parallel_size=2"
BATCH = "model.seq_length=4096 train.micro_batch_size=1 train.global_batch_size=32"
RUN = f"torchrun --nproc_per_node=8 scripts/training/run_recipe.py --recipe qwen3_8b_pretrain_config {DEGREES} {BATCH}"
LOOP = f"""
for config in "2,2" "1,4"; do
    IFS=',' read -r TP PP <<< "$config"
    {RUN.replace("tensor_model_parallel_size=2", "tensor_model_parallel_size=$TP")}
done
"""
PERFORMANCE = (
    "python scripts/performance/setup_experiment.py --gpu h100 -m llama -mr llama31_8b -ng 8 -c fp8_cs -tp 2"
    " --pipeline_model_parallel_size=2 -mb 1 -gb 32 -sl 8192 model.virtual_pipeline_model_parallel_size=4"
)


def job(folder: Path, script: str, args: str | None = None, **facts: Any) -> ImportedJob:
    return imported_jobs.job("megatron", folder, "run.sh", script, cluster="8xH100-80GB", args=args, **facts)


def read(job: ImportedJob) -> tuple[Any, ...]:
    """Family, layers, pipeline, tensor and chunks, batch, sequence, dtype and adapter rank."""
    o = job.options
    chunks = len(job.layers) // job.pipeline
    return (
        job.model.family, job.model.layers, job.pipeline, o.tensor, chunks, job.micro_batches, o.sequence_length,
        o.dtype, o.lora,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("script", "args", "facts"),
    [
        (RUN, None, ("qwen3", 36, 2, 2, 1, 16, 4096, "bf16", 0)),
        (RUN, "model.tensor_model_parallel_size=4", ("qwen3", 36, 2, 4, 1, 32, 4096, "bf16", 0)),
        (RUN, "--tensor-model-parallel-size 4", ("qwen3", 36, 2, 4, 1, 32, 4096, "bf16", 0)),
        (f"{RUN} mixed_precision=bf16_with_mxfp8_mixed", None, ("qwen3", 36, 2, 2, 1, 16, 4096, "mxfp8", 0)),
        (RUN.replace("pretrain_config", "peft_config"), None, ("qwen3", 36, 2, 2, 1, 16, 4096, "bf16", 32)),
        (f'CMD="{RUN}"; srun --mpi=pmix bash -c "$CMD"', None, ("qwen3", 36, 2, 2, 1, 16, 4096, "bf16", 0)),
        (LOOP, "TP=2", ("qwen3", 36, 2, 2, 1, 16, 4096, "bf16", 0)),
        (PERFORMANCE, None, ("llama", 32, 2, 2, 4, 16, 8192, "fp8", 0)),
        (f"{PERFORMANCE} --task lora", None, ("llama", 32, 2, 2, 4, 16, 8192, "fp8", 32)),
    ],
)
def test_overrides_of_a_recipe_are_read(tmp_path: Path, script: str, args: str | None, facts: tuple[Any, ...]) -> None:
    assert read(job(tmp_path, script, args)) == facts


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (RUN.replace("model.seq_length=4096 ", ""), "leaves model.seq_length to it: give these with --args"),
        (LOOP, "--tensor-model-parallel-size is '$TP', which the file does not tell: give it with --args 'TP=1'"),
        (RUN.replace("qwen3_8b", "gemma9_vl_4b"), "names the model 'gemma9_vl_4b', which is not known here"),
        (f"{RUN}\n{RUN} model.context_parallel_size=2", "starts several recipes of Megatron-Bridge: give a copy"),
    ],
)
def test_options_missing_from_a_launch_are_requested(tmp_path: Path, script: str, message: str) -> None:
    with pytest.raises(InputError) as refusal:
        job(tmp_path, script)
    assert message in str(refusal.value)


def test_use_of_recipe_defaults_is_reported(tmp_path: Path) -> None:
    assert (
        "What the launch leaves to its recipe is predicted by Megatron-Bridge's defaults"
        in job(tmp_path, RUN).unread[0]
    )


def test_megatron_lm_next_to_bridge_is_read_itself(tmp_path: Path) -> None:
    script = "torchrun /opt/Megatron-Bridge/3rdparty/Megatron-LM/pretrain_gpt.py --micro-batch-size 1"
    with pytest.raises(InputError, match="does not say --hidden-size"):
        job(tmp_path, script)


def test_performance_scripts_divide_sequences_with_tensors(tmp_path: Path) -> None:
    assert job(tmp_path, PERFORMANCE).options.sequence_parallel
    assert not job(tmp_path, f"{PERFORMANCE} model.sequence_parallel=false").options.sequence_parallel


@pytest.mark.parametrize(("words", "layers"), [("-rl 3", 3 * 8), ("--recompute_num_layers 1", 8), ("", 0)])
def test_performance_scripts_recompute_blocks(tmp_path: Path, words: str, layers: int) -> None:
    assert len(job(tmp_path, f"{PERFORMANCE} {words}").strategies) == layers


def test_performance_scripts_recompute_modules(tmp_path: Path) -> None:
    read = job(tmp_path, f"{PERFORMANCE} --recompute_modules core_attn --use_megatron_fsdp False")
    assert set(read.strategies.values()) == {("core", "none")}


def test_performance_scripts_turn_fsdp_on(tmp_path: Path) -> None:
    script = PERFORMANCE.replace("--pipeline_model_parallel_size=2", "-pp 1")
    assert job(tmp_path, f"{script} --use_megatron_fsdp True").options.zero == 3


def test_recipe_may_be_in_a_command_of_ranks(tmp_path: Path) -> None:
    text = PERFORMANCE.replace("setup_experiment", "custom_setup_experiment")
    script = (
        f'run=$(cat <<- EOM\n  cd /opt ;\n  nice \\\n  {text}\nEOM\n)\necho "$run" > run.sh\ntorchrun bash run.sh\n'
    )
    assert job(tmp_path, script).options.sequence_length == 8192


def test_ends_that_a_recipe_may_set_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="or what the recipe has, such as --args"):
        job(tmp_path, f"{RUN} model.virtual_pipeline_model_parallel_size=5")


@pytest.mark.parametrize(
    ("script", "overlaps"),
    [
        (RUN, True),
        (f"{RUN} ddp.overlap_grad_reduce=false", False),
        (RUN.replace("pretrain_config", "sft_config"), False),
        (RUN.replace("pretrain_config", "peft_config"), False),
    ],
)
def test_recipes_of_pretraining_overlap_gradients(tmp_path: Path, script: str, overlaps: bool) -> None:
    assert ("gradient_overlap=true" in str(job(tmp_path, script).options.framework)) is overlaps
