"""Models inferred from the names of training scripts and tokenizers, and names of Adam in forks."""

from __future__ import annotations

from pathlib import Path

import pytest

from debubble.imports.job import ImportedJob
from debubble.ir import InputError
from tests.support import imported_jobs

PLAIN = (
    "torchrun --nproc_per_node 4 {} --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 256"
    " --micro-batch-size 1 --global-batch-size 8 --bf16 --max-position-embeddings 256 {}\n"
)
SIZES = "--num-layers: 2, --hidden-size: 64, --num-attention-heads: 4"
TOKENIZER = "--tokenizer-type Llama2Tokenizer --tokenizer-model"


def job(folder: Path, script: str, words: str) -> ImportedJob:
    return imported_jobs.job("megatron", folder, "a.sh", PLAIN.format(script, words))


@pytest.mark.parametrize("script", ["pretrain_llama.py", "forks/finetune_qwen2.py", "tools/hf_weight_converter.py"])
def test_script_without_a_model_size_is_refused(script: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"runs \S+\.py, which trains no GPT that is read .* with --model"):
        job(tmp_path, script, "--vocab-size 32000")


def test_a_script_of_a_family_may_describe_its_layers(tmp_path: Path) -> None:
    assert job(tmp_path, "pretrain_llama.py", "--vocab-size 32000 --swiglu").model.gated


@pytest.mark.parametrize("tokenizer", ["'your tokenizer'", "/data/llama-2-7b/tokenizer.model", "x --vocab-size 64000"])
def test_guessed_vocabulary_is_reported(tokenizer: str, tmp_path: Path) -> None:
    read = job(tmp_path, "pretrain_gpt.py", f"{TOKENIZER} {tokenizer}")

    assert any("32,000 words" in line for line in read.unread) == (tokenizer == "'your tokenizer'")


def test_hub_name_of_a_tokenizer_sets_the_vocabulary(tmp_path: Path) -> None:
    assert job(tmp_path, "pretrain_gpt.py", f"{TOKENIZER} mistralai/Mistral-Nemo-Base-2407").model.vocab == 131072


def test_habana_adam_is_read_as_adam(tmp_path: Path) -> None:
    read = job(tmp_path, "pretrain_gpt.py", "--vocab-size 32000 --deepspeed --zero-stage 1 --optimizer fusedadamw")

    assert (read.options.optimizer, read.warnings) == ("adamw", ())


def test_vocabularies_of_models_of_equal_size_are_suggested(tmp_path: Path) -> None:
    sizes = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336"

    with pytest.raises(
        InputError, match=r"--vocab-size N' \(such as the 128256 of llama3\.1-8b or the 32768 of mistra"
    ):
        job(tmp_path, "pretrain_gpt.py", f"{sizes} --tokenizer-type HuggingFaceTokenizer --tokenizer-model x")


def test_a_number_that_is_a_template_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is '<WORDS>', which is no .*: give it with --args '--vocab-size"):
        imported_jobs.job("megatron", tmp_path, "a.yaml", f"MODEL_ARGS: {{{SIZES}, --vocab-size: <WORDS>}}\n")


def test_a_named_model_needs_no_vocabulary(tmp_path: Path) -> None:
    text = "model: {hf_model_id: gpt2-tiny, seq_length: 64, vocab_size: <WORDS>}\ntrain: {global_batch_size: 4}\n"

    assert imported_jobs.job("megatron", tmp_path, "a.yaml", text).model.layers > 0


def test_bridge_dtype_is_that_of_its_model(tmp_path: Path) -> None:
    text = "model: {hf_model_id: gpt2-tiny, seq_length: 64, bf16: true}\ntrain: {global_batch_size: 4}\n"
    read = imported_jobs.job("megatron", tmp_path, "a.yaml", f"{text}optimizer: {{bf16: false}}\n")

    assert read.options.dtype == "bf16"


def test_signs_of_a_layout_may_be_quoted_for_a_shell(tmp_path: Path) -> None:
    words = r"--vocab-size 512 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et\|\(t\)*3L'"

    assert job(tmp_path, "pretrain_gpt.py", words).layers == (1, 3)


@pytest.mark.parametrize("word", ["--kd", "--mos"])
def test_a_teacher_of_megatron_deepspeed_is_warned_of(word: str, tmp_path: Path) -> None:
    words = "--vocab-size 512 --deepspeed --num-layers-teacher 8 --load-teacher t"

    assert not any("teacher" in line for line in job(tmp_path, "pretrain_gpt.py", words).warnings)
    assert any("student alone" in line for line in job(tmp_path, "pretrain_gpt.py", f"{words} {word}").warnings)


def test_arguments_after_a_missing_backslash_are_warned_about(tmp_path: Path) -> None:
    read = job(tmp_path, "pretrain_gpt.py", "--vocab-size 512\n    --checkpoint-activations --lr 1")

    assert read.strategies == {}
    assert "--checkpoint-activations begins a command of its own" in " ".join(read.warnings)


def test_arguments_of_rollouts_are_warned_of(tmp_path: Path) -> None:
    read = job(tmp_path, "pretrain_gpt.py", "--vocab-size 512 --grpo-group-size 16 --grpo-iterations 1")

    assert "--grpo-group-size: training alone is predicted" in " ".join(read.warnings)
