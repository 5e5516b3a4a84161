"""One short input per form in which users write jobs, and what is read from it or the sentence that refuses it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.exports import exports
from debubble.imports.job import ImportedJob
from debubble.ir import InputError
from tests.support import imported_jobs

SIZES = (
    "--num-layers 8 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --swiglu --normalization RMSNorm"
    " --position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 32000 --seq-length 1024"
    " --max-position-embeddings 1024"
)
RUN = "--hidden-dropout 0 --micro-batch-size 1 --global-batch-size 16 --bf16 --pipeline-model-parallel-size 4"
GPT = f"torchrun pretrain_gpt.py {SIZES} {RUN}"
BRIDGE = """
model: {hf_model_id: meta-llama/Meta-Llama-3-8B, seq_length: 1024, pipeline_model_parallel_size: 4}
train: {micro_batch_size: 1, global_batch_size: 16}
"""
PRIMUS = """
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: llama3_8B.yaml
    overrides: {seq_length: 1024, pipeline_model_parallel_size: 2, tensor_model_parallel_size: 2, MORE}
"""
TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n'
AUTOMODEL = "model: {MODEL}\ndistributed: {pp_size: 4, pipeline: {PIPELINE}}\ndataset: {seq_len: 1024}\n"
NAMED = "pretrained_model_name_or_path: meta-llama/Meta-Llama-3-8B"
MIND = """
model:
  model_config: {hidden_size: 512, num_layers: 8, num_heads: 8, vocab_size: 32000, seq_length: 1024, MODEL}
parallel_config: {data_parallel: 1, pipeline_stage: 4, micro_batch_num: 8, PARALLEL}
"""
SCHEDULE = 'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "1F1B"\n'


@dataclass(frozen=True)
class Form:
    """A framework's file, the user's options, and the expected attributes of the job or its options."""

    framework: str
    file: str
    text: str
    read: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    args: str | None = None
    refused: str | None = None
    devices: int = 4

    def job(self, folder: Path) -> ImportedJob:
        """The job of the file."""
        cluster = f"{self.devices}xH100-80GB"
        return imported_jobs.job(
            self.framework, folder, self.file, self.text, cluster=cluster, args=self.args, **self.facts
        )


def megatron(more: str, **rest: Any) -> Form:
    return Form("megatron", "job.sh", f"{GPT} {more}\n", **rest)


def script(text: str, **rest: Any) -> Form:
    return Form("megatron", "job.sh", text, **rest)


FULL = ("full", "full")
UNGATED_EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 704 --moe-layer-freq [0]+[1]*7"
FORMS: dict[str, Form] = {
    # Settings that the file leaves out.
    "primus' base configuration": Form(
        "primus", "run.yaml", PRIMUS.replace(", MORE", ""),
        {"dtype": "bf16", "zero": 1, "sequence_parallel": True, "micro_batch_size": 2}, devices=8,
    ),
    "primus' layers in a string": Form(
        "primus", "run.yaml", PRIMUS.replace("MORE", "recompute_granularity: full, recompute_layer_ids: '0,3'"),
        {"strategies": {0: FULL, 3: FULL}}, devices=8,
    ),
    "primus without biases": Form(
        "primus", "run.yaml", PRIMUS.replace("MORE", "swiglu: false"), {"gated": False, "mlp_bias": False}, devices=8
    ),
    "primus with biases": Form(
        "primus", "run.yaml", PRIMUS.replace("MORE", "swiglu: false, add_bias_linear: true"),
        {"gated": False, "mlp_bias": True}, devices=8,
    ),
    "primus of another framework": Form(
        "primus", "run.yaml", PRIMUS.replace("megatron", "torchtitan").replace(", MORE", ""),
        refused="framework 'torchtitan', and only megatron's are read: `debubble import torchtitan` reads it",
        devices=8,
    ),
    "bridge's recipe": Form("megatron", "run.yaml", BRIDGE, {"dtype": "bf16", "zero": 1}),
    "torchtitan's checkpointing": Form(
        "torchtitan", "run.toml", TITAN, {"micro_batch_size": 8, "sequence_length": 2048, "checkpointed": 16}
    ),
    "megatron's dtype": script(GPT.replace("--bf16 ", ""), read={"dtype": "fp32", "zero": 0}),
    "deepspeed without a dtype": Form(
        "deepspeed", "ds.json", "{}", {"dtype": "fp32"}, {"model": db.models["llama3-8b"], "sequence_length": 1024}
    ),
    "deepspeed with what it does not say": Form(
        "deepspeed", "ds.json", "{}", {"dtype": "bf16", "lora": 32, "quantize": "nf4"},
        {
            "model": db.models["llama3-8b"], "sequence_length": 1024, "dtype": "bf16", "lora": 32, "quantize": "nf4",
        },
    ),
    "primus says otherwise": Form(
        "primus", "run.yaml", PRIMUS.replace("MORE", "bf16: false, fp16: true, use_distributed_optimizer: false"),
        {"dtype": "fp16", "zero": 0}, devices=8,
    ),
    # Settings that are read.
    "bridge's adapters": Form("megatron", "run.yaml", f"{BRIDGE}peft: {{dim: 8}}\n", {"lora": 8}),
    "gradients in bf16": megatron(
        "--grad-reduce-in-bf16 --main-grads-dtype bf16", read={"gradient_dtype": "bf16", "not_predicted": 0}
    ),
    "gradients next to fp16": script(GPT.replace("--bf16", "--fp16"), read={"gradient_dtype": "fp16"}),
    "gradients in fp32 next to fp16": script(
        f"{GPT.replace('--bf16', '--fp16')} --accumulate-allreduce-grads-in-fp32", read={"gradient_dtype": "fp32"}
    ),
    "bridge's adapters without a rank": Form("megatron", "run.yaml", f"{BRIDGE}peft: {{alpha: 4}}\n", {"lora": 32}),
    "moments in bf16": megatron(
        "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        read={"moment_dtype": "bf16", "gradient_dtype": "fp32", "not_predicted": 0},
    ),
    "attention with scores": megatron("--attention-backend unfused", read={"flash_attention": False}),
    "attention of 2021": megatron("--checkpoint-activations", read={"flash_attention": False, "checkpointed": 8}),
    "no sequence parallelism": megatron(
        "--tensor-model-parallel-size 2", read={"sequence_parallel": False, "not_predicted": 0}, devices=8
    ),
    "fp8 as logs have it": megatron("--fp8 hybrid", read={"dtype": "fp8", "not_predicted": 0}),
    "virtual stages with the ends": megatron(
        "--num-layers 6 --num-layers-per-virtual-pipeline-stage 1 --account-for-embedding-in-pipeline-split"
        " --account-for-loss-in-pipeline-split", read={"layers": (0, 1, 1, 1, 1, 1, 1, 0)},
    ),
    "multi-token prediction": megatron(
        "--mtp-num-layers 1 --pipeline-model-parallel-layout 'Ett|tt|tt|ttmL'",
        read={"layers": (2, 2, 2, 2), "mtp_stage": 3, "mtp_layers": 1},
    ),
    "bloom's partition": megatron(
        "--num-layers 10 --pp-partition-method 'type:transformer|embedding'", read={"layers": (2, 3, 3, 2)}
    ),
    "torchtitan of 2024": Form(
        "torchtitan", "run.toml",
        f"{TITAN}[training]\nbatch_size = 8\nseq_len = 1024\ntensor_parallel_degree = 2\n"
        "[experimental]\npipeline_parallel_degree = 2\npipeline_parallel_microbatches = 4\n"
        'pipeline_parallel_split_points = ["layers.12"]\n',
        {"pipeline": 2, "tensor": 2, "micro_batches": 4, "micro_batch_size": 2, "layers": (12, 20)},
    ),
    "torchtitan's accumulation": Form(
        "torchtitan", "run.toml",
        f"{TITAN}[training]\nlocal_batch_size = 8\nglobal_batch_size = 16\n[parallelism]\n{SCHEDULE}",
        {"micro_batches": 16, "passes": 2},
    ),
    "automodel's layers per stage": Form(
        "automodel", "run.yaml",
        AUTOMODEL.replace("MODEL", NAMED).replace("PIPELINE", "pp_schedule: interleaved1f1b, layers_per_stage: 2"),
        {"layers": (2,) * 16, "order": "interleaved"},
    ),
    "automodel's from_config": Form(
        "automodel", "run.yaml",
        AUTOMODEL.replace("MODEL", f"config: {{{NAMED}}}, torch_dtype: bf16").replace("PIPELINE", "pp_schedule: 1f1b"),
        {"dtype": "bf16", "layers": (8, 8, 8, 8)},
    ),
    "mindformers' experts": Form(
        "mindformers", "run.yaml",
        MIND.replace("MODEL", "intermediate_size: 1408").replace("PARALLEL", "")
        + "moe_config: {expert_num: 4, num_experts_chosen: 2}\n",
        {"experts": 4},
    ),
    "mindformers' embedding of another width": Form(
        "mindformers", "run.yaml", MIND.replace("MODEL", "embedding_size: 256").replace(", PARALLEL", ""),
        refused="model.model_config.embedding_size describes layers that are not read here",
    ),
    "mindformers by other names": Form(
        "mindformers", "run.yaml",
        MIND.replace("num_heads", "num_attention_heads").replace("num_layers", "num_hidden_layers")
        .replace("MODEL", "num_key_value_heads: 4, multiple_of: 128").replace("PARALLEL", ""),
        {"kv_heads": 4, "ffn": 1408},
    ),
    "deepspeed's partition": Form(
        "deepspeed", "ds.json", '{"pipeline": {"partition_method": "uniform"}}', {"layers": (8, 9, 9, 6)},
        {"model": db.models["llama3-8b"], "sequence_length": 1024, "pipeline": 4},
    ),
    # Shell.
    "positional parameters": script(f"{GPT} --global-batch-size $1", read={"micro_batches": 32}, args="32"),
    "an environment variable": script(f"{GPT} --global-batch-size $B", read={"micro_batches": 8}, args="B=8"),
    "arguments as a mapping": Form(
        "megatron", "run.yaml",
        "MODEL_ARGS:\n" + "\n".join(
            f"  --{name.partition(' ')[0]}: {name.partition(' ')[2] or 'true'}"
            for name in (option.strip() for option in f"{SIZES} {RUN}".split("--") if option.strip())
        ),
        {"pipeline": 4, "dtype": "bf16", "zero": 0},
    ),
    "a log with ranks": Form(
        "megatron", "log.txt",
        "\n".join(
            f"[default0]:  {name.replace('-', '_')} {'.' * 20} {value or 'True'}"
            for name, _, value in (
                option.strip().partition(" ") for option in f"{SIZES} {RUN}".split("--") if option.strip()
            )
        ),
        {"pipeline": 4, "dtype": "bf16"},
    ),
    "deepspeed's batch that the trainer fills in": Form(
        "deepspeed", "ds.json",
        '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}',
        {"micro_batches": 8, "pipeline": 1, "micro_batch_size": 2, "data": 4},
        facts={"model": db.models["llama3-8b"], "sequence_length": 1024, "pipeline": 1},
    ),
    "experts without a gate": script(
        f"{GPT.replace('--swiglu ', '')} {UNGATED_EXPERTS} --disable-bias-linear",
        # Two matrices each, in the last seven layers.
        read={"gated": False, "experts": 4, "expert_weights": 7 * 4 * 2 * 512 * 704, "not_predicted": 0},
    ),
    "biases of experts without a gate": script(
        f"{GPT.replace('--swiglu ', '')} {UNGATED_EXPERTS}",
        read={"not_predicted": 0, "expert_weights": 7 * 4 * (2 * 512 * 704 + 704 + 512)},
    ),
    "what verl's files are to be given as": script(
        "pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 256 --bf16",
        read={"tensor": 2, "micro_batches": 128}, facts={"model": db.models["llama-tiny"], "sequence_length": 512},
    ),
    # Other work of a step.
    "micro-batches of so many tokens": megatron(
        "--use-dynamic-batch-size --max-tokens-per-gpu 4096",
        read={
            "warnings": (
                "--use-dynamic-batch-size fills micro-batches up to --max-tokens-per-gpu 4096, and predicted are those"
                " of 1 x 1,024 tokens: give --sequence-length 4096 --args '--micro-batch-size 1', and with"
                " --micro-batches how many a replica then has in a step.",
            )
        },
    ),
    "micro-batches of just as many tokens": megatron(
        "--use-dynamic-batch-size --max-tokens-per-gpu 4096", read={"warnings": ()},
        facts={"sequence_length": 4096, "micro_batches": 8},
    ),
    "reinforcement learning": megatron(
        "--perform-rl-step",
        read={
            "not_predicted": 0,
            "warnings": (
                "--perform-rl-step: training alone is predicted, and the rollouts and their log probabilities are not.",
            ),
        },
    ),
    "distillation": megatron(
        "--export-kd-teacher-load teacher",
        read={
            "not_predicted": 0,
            "warnings": (
                "--export-kd-teacher-load: the student alone is predicted, and the time and memory of its teacher are"
                " not.",
            ),
        },
    ),
    "bridge's distillation": Form(
        "megatron", "run.yaml",
        BRIDGE.replace("model: {", "model: {teacher: {num_layers: 2}, kd_config: {skip_lm_loss: true}, "),
        {
            "not_predicted": 0,
            "warnings": (
                "--teacher.num-layers: the student alone is predicted, and the time and memory of its teacher are not.",
            ),
        },
    ),
    # Refusals.
    "a hybrid pattern": megatron("--hybrid-override-pattern M-M*", refused="MLPs of the pattern M-M[*] with the"),
    "a mistyped mode of checkpointing": Form(
        "torchtitan", "job.toml", TITAN + '[activation_checkpoint]\nmode = "selektive"\n',
        refused="activation_checkpoint.mode is 'selektive', which is none of none, full, selective, memory_budget",
    ),
    "a vocabulary of WordPiece": megatron("--vocab-file bert-vocab.txt", refused="--vocab-file without --merge-file"),
    "a script of another model": script(GPT.replace("gpt", "bert"), refused="runs pretrain_bert.py, which trains no"),
    "a layout of too many stages": megatron(
        "--pipeline-model-parallel-layout 'Et|tt|tt|tt|tL'", refused="has 5 stages, which must be a multiple of the 4"
    ),
    "a last stage without a pipeline": script(
        f"{GPT} --pipeline-model-parallel-size 1 --decoder-last-pipeline-num-layers 1", refused="leave it out"
    ),
    "a batch that replicas do not divide": megatron(
        "--global-batch-size 13", devices=16,
        refused="13 cannot be divided over 4 replicas of 1 sequences: use a multiple of 4, such as 12 or 16, a --clus",
    ),
    "expert ranks without experts": megatron(
        "--expert-model-parallel-size 2", devices=8, refused="expert-model-parallel-size is 2, and the model has no"
    ),
    "expert ranks that do not divide the experts": megatron(
        "--num-experts 8 --expert-model-parallel-size 3 --global-batch-size 12", devices=12,
        refused="sh: --expert-model-parallel-size is 3, which does not divide the model's 8 experts",
    ),
    "more expert ranks than a stage has": megatron(
        "--num-experts 8 --expert-model-parallel-size 8", devices=16,
        refused="sh: --expert-model-parallel-size is 8, which does not divide the 4 ranks .* choose a divisor of 4, or",
    ),
    "latent attention without gates": script(
        f"{GPT.replace('--swiglu ', '')} --multi-latent-attention --position-embedding-type learned_absolute"
        " --normalization LayerNorm",
        refused="latent attention next to MLPs with the activation gelu, which is not modelled: .* --args '--swiglu",
    ),
    "verl's script": script(
        "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer"
        " actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$PP",
        refused="is verl's, .* the degrees in actor_rollout_ref.actor.megatron as Megatron-LM's arguments into a",
    ),
    "verl's configuration": Form(
        "megatron", "run.yaml", "actor_rollout_ref: {actor: {strategy: megatron}}", refused="is verl's, whose steps"
    ),
    "deepspeed's auto": Form(
        "deepspeed", "ds.json", '{"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}',
        facts={"model": db.models["llama3-8b"], "sequence_length": 1024},
        refused="to your trainer .'auto'.: add --dtype bf16, with",
    ),
    "mindformers' expert ranks": Form(
        "mindformers", "run.yaml",
        MIND.replace("MODEL", "intermediate_size: 1408").replace("PARALLEL", "expert_parallel: 2"),
        refused="expert_parallel is 2, and the model has no experts: say them in moe_config",
    ),
    "mindformers' experts in every second layer": Form(
        "mindformers", "run.yaml",
        MIND.replace("MODEL", "").replace("PARALLEL", "") + "moe_config: {expert_num: 4, moe_layer_freq: 2}\n",
        refused="moe_config.moe_layer_freq describes layers that are not read",
    ),
    "torch's interleaved zero bubble": Form(
        "torchtitan", "run.toml", f"{TITAN}[parallelism]\n{SCHEDULE.replace('1F1B', 'InterleavedZeroBubble')}",
        {"order": "interleaved-zero-bubble", "micro_batches": 8, "layers": (4, 5, 4, 4, 4, 4, 4, 3)},
    ),
    "a family that nobody knows": Form(
        "deepspeed", "ds.json", '{"bf16": {"enabled": true}}',
        facts={
            "model": db.Model.from_hf(
                {
                    "model_type": "mine", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
                    "num_hidden_layers": 4, "vocab_size": 320,
                }
            ),
            "sequence_length": 64,
        },
        refused="does not know the family 'mine'",
    ),
}  # fmt: skip


def value_of(job: ImportedJob, name: str) -> Any:
    """Value of a job by name: an attribute of itself, its options or its model, or a count."""
    counted = {
        "checkpointed": list(job.strategies.values()).count(FULL),
        "recomputed": sorted(job.strategies),
        "not_predicted": job.rest.not_predicted,
        "expert_weights": sum(map(job.model.expert_parameters, range(job.model.layers))),
        "experts": 0 if job.model.experts is None else job.model.experts.count,
    }
    if name in counted:
        return counted[name]
    holder = next(holder for holder in (job, job.options, job.model) if hasattr(holder, name))
    return getattr(holder, name)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.refused is None])
def test_a_form_is_read(name: str, tmp_path: Path) -> None:
    job = FORMS[name].job(tmp_path)

    assert {entry: value_of(job, entry) for entry in FORMS[name].read} == FORMS[name].read


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.refused is not None])
def test_a_form_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=FORMS[name].refused):
        FORMS[name].job(tmp_path)


def test_summary_names_the_source_of_defaults(tmp_path: Path) -> None:
    assert FORMS["primus' base configuration"].job(tmp_path).summary == (
        "computes in bf16 (default of Primus), gradients in fp32 (default of Primus), sequence parallelism on (default"
        " of Primus), ZeRO-1 (default of Primus), micro-batches of 2 (default of Primus), a global batch of 16 (default"
        " of Primus)"
    )


def test_accumulating_pipeline_drains_after_every_pass(tmp_path: Path) -> None:
    form = FORMS["torchtitan's accumulation"]
    once = Form("torchtitan", "once.toml", form.text.replace("global_batch_size = 16\n", ""))
    cluster = db.Cluster.parse("4xH200")

    one, two = (float(job_form.job(tmp_path).plan(cluster).simulate().makespan) for job_form in (once, form))

    assert two == pytest.approx(2 * one)


def test_job_that_does_not_fit_is_still_exported(tmp_path: Path) -> None:
    plan = Form("megatron", "run.yaml", BRIDGE).job(tmp_path).plan(db.Cluster.parse("4xRTX3060-12GB"))

    made = exports["megatron"](plan)

    assert made.losses[0].startswith("The imported job is predicted not to fit: its fullest device needs ")
    assert "--pipeline-model-parallel-layout" in made.files["megatron-arguments.sh"]


def test_adapters_of_some_modules_are_reported(tmp_path: Path) -> None:
    text = f"{BRIDGE}peft: {{_target_: megatron.bridge.peft.dora.DoRA, dim: 8, target_modules: [linear_fc1]}}\n"
    job = Form("megatron", "run.yaml", text).job(tmp_path)
    assert job.warnings == ("peft._target_ is DoRA, and the prediction counts on LoRA.",)
    assert job.unread == ("Adapters are on linear_fc1, and the prediction counts on all linear layers.",)
