"""Writes the names of all past and present entries of frameworks' configurations, for the importers' remarks.

    python tools/framework_entries.py torchtitan=DIR deepspeed=DIR automodel=DIR mindformers=DIR
    python tools/framework_entries.py accelerate=DIR trainer=TRL,LLAMA_FACTORY

Each DIR is a git directory of the project's repository with its history.  Names are from the classes of the
configuration, and from the YAML files that come with the framework; nothing of the files is run.  The Trainer's own
arguments are those of the installed transformers.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

FRAMEWORKS = Path(__file__).parents[1] / "src/debubble/frameworks"
ARGUMENT = re.compile(r"""['"]--(\w+\.[\w.]+)['"]""")
WORD = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
DATA = re.compile(r"dataset|dataloader|tokenizer|callbacks|processor|auto_register|monitor|metric|hub|generation")
"""Sections of files that no importer reads."""


def git(folder: str, *words: str) -> str:
    """Output of git."""
    return subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True).stdout.decode(
        errors="replace"
    )


def versions(folder: str, *paths: str) -> Iterator[str]:
    """Texts of files at every commit that changed one of them."""
    for commit in git(folder, "log", "--format=%H", "HEAD", "--", *paths).split():
        for path in paths:
            shown = subprocess.run(["git", "-C", folder, "show", f"{commit}:{path}"], capture_output=True)
            if shown.returncode == 0:
                yield shown.stdout.decode(errors="replace")


def fields(text: str) -> Mapping[str, Mapping[str, str]]:
    """Classes of a module -> names and aliases of their fields -> types."""
    classes: dict[str, dict[str, str]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            entries = classes.setdefault(node.name, {})
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    entries[statement.target.id] = ast.unparse(statement.annotation)
                    for alias in re.findall(r"alias='(\w+)'", ast.unparse(statement)):
                        entries[alias] = ""
    return classes


def nested(classes: Mapping[str, Mapping[str, str]], name: str, prefix: str = "") -> Iterator[str]:
    """Names of a class's entries and of the entries of its fields' classes."""
    for entry, kind in classes[name].items():
        if kind in classes:
            yield from nested(classes, kind, f"{prefix}{entry}.")
        else:
            yield prefix + entry


def torchtitan(folder: str) -> Iterator[str]:
    """Arguments of the first parsers, fields of JobConfig, and fields of the current configurations."""
    for text in versions(folder, "torchtitan/config_manager.py", "torchtitan/config/job_config.py"):
        yield from ARGUMENT.findall(text)
        classes = fields(text)
        if "JobConfig" in classes:
            yield from nested(classes, "JobConfig")
    for name, entries in fields(git(folder, "show", "HEAD:torchtitan/config/configs.py")).items():
        section = re.sub("(?<=[a-z])(?=[A-Z])", "_", name.removesuffix("Config")).lower()
        yield from (f"{section}.{entry}" for entry in entries)


CONSTANT = r"""^[A-Z_0-9]+ = ['"]([a-z]\w*)['"]"""
SECTIONS = {
    "DeepSpeedZeroConfig": "zero_optimization.",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param.",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer.",
    "DeepSpeedZeroLeafModuleConfig": "zero_optimization.leaf_module.",
    "ZenFlowConfig": "zero_optimization.zenflow.",
    "DeepSpeedBF16Config": "bf16.",
    "DeepSpeedFP16Config": "fp16.",
}
"""DeepSpeed's classes -> their sections."""


def deepspeed(folder: str) -> Iterator[str]:
    """Names in the constants, in the code that reads sections, and in the documentation, and the typed fields."""
    runtime = "deepspeed/runtime"
    classes = "precision_config.py zero/config.py zero/offload_config.py zero/leaf_module_config.py"
    for path in (*classes.split(), "zenflow/zenflow_config.py"):
        for name, entries in fields(git(folder, "show", f"HEAD:{runtime}/{path}")).items():
            if name in SECTIONS:
                yield from (SECTIONS[name] + entry for entry in entries)
    for path in git(folder, "ls-tree", "-r", "--name-only", "HEAD", "deepspeed/").split():
        if path.endswith("/constants.py"):
            yield from re.findall(CONSTANT, git(folder, "show", f"HEAD:{path}"), re.MULTILINE)
        if path.endswith("config.py"):
            yield from re.findall(r"_dict\.get\(['\"](\w+)['\"]", git(folder, "show", f"HEAD:{path}"))
    page = git(folder, "show", "HEAD:docs/_pages/config-json.md")
    yield from re.findall(r"\*\*[_*]*([a-z]\w+?)[_*]*\*\*", page)
    yield from re.findall(r'^ *"([a-z]\w+)": ', page, re.MULTILINE)
    yield from ("data_types.grad_accum_dtype", "data_types.param_dtype", "pipeline.stages", "pipeline.partition")
    yield from ("tensor_parallel.autotp_size", "pipeline.partition_method", "partition_method", "optimizer.type")


def of_files(folder: str, *folders: str) -> Iterator[str]:
    """Names of the entries of all past and present YAML files in these folders."""
    changes = git(folder, "log", "--format=", "--raw", "--no-abbrev", "HEAD", "--", *folders).splitlines()
    blobs = [line.split()[3] for line in changes if line.endswith((".yaml", ".yml"))]
    for blob in dict.fromkeys(blobs):
        shown = subprocess.run(["git", "-C", folder, "cat-file", "blob", blob], capture_output=True)
        try:
            tree = yaml.load(shown.stdout.decode(errors="replace"), Loader=yaml.CSafeLoader)
        except yaml.YAMLError:
            continue
        if isinstance(tree, dict):
            yield from entries(tree)


def entries(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """Names of the entries of nested settings, including tables."""
    for name, value in tree.items():
        if DATA.search(str(name)):
            continue
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from entries(value, f"{prefix}{name}.")


def automodel(folder: str) -> Iterator[str]:
    """Entries of the recipes, and fields of the strategies and the pipeline."""
    yield from of_files(folder, "examples")
    classes = fields(git(folder, "show", "HEAD:nemo_automodel/components/distributed/config.py"))
    for name in ("FSDP2Config", "MegatronFSDPConfig", "DDPConfig"):
        yield from (f"distributed.{entry}" for entry in classes[name])
    yield from (f"distributed.moe.{entry}" for entry in classes["MoEParallelizerConfig"])
    pipeline = fields(git(folder, "show", "HEAD:nemo_automodel/components/distributed/pipelining/config.py"))
    yield from (f"distributed.pipeline.{entry}" for entry in pipeline["PipelineConfig"])


def mindformers(folder: str) -> Iterator[str]:
    """Entries of the configurations."""
    yield from of_files(folder, "configs", "research")


def accelerate(folder: str) -> Iterator[str]:
    """Fields of the configuration, and names that its questionnaire and its launcher put into the sections."""
    for text in versions(folder, "src/accelerate/commands/config/config_args.py"):
        classes = fields(text)
        yield from (*classes["BaseConfig"], *classes["ClusterConfig"])
    for text in versions(folder, "src/accelerate/commands/config/cluster.py"):
        yield from (f"{section}.{name}" for section, name in ACCELERATE_ENTRY.findall(text))
    for text in versions(folder, "src/accelerate/commands/launch.py"):
        for name in re.findall(r"""['"]--((?:fsdp|megatron_lm|fp8|dynamo|parallelism_config)_\w+)['"]""", text):
            section = name.partition("_")[0] if name[0] in "fd" else name[: name.index("_", len("megatron_"))]
            yield f"{section.removesuffix('_config')}_config.{name}"


ACCELERATE_ENTRY = re.compile(r"""\b(\w+_config)\[f?['"](\w+)['"]\]""")


FORMER = """
    adafactor dispatch_batches evaluation_strategy fp16_backend fp16_opt_level fsdp_min_num_params
    fsdp_transformer_layer_cls_to_wrap group_by_length half_precision_backend include_inputs_for_metrics
    include_tokens_per_second jit_mode_eval logging_dir mp_parameters no_cuda overwrite_output_dir past_index
    per_gpu_eval_batch_size per_gpu_train_batch_size push_to_hub_model_id push_to_hub_organization push_to_hub_token
    ray_scope save_safetensors sharded_ddp split_batches torchdynamo tpu_metrics_debug tpu_num_cores use_ipex
    use_legacy_prediction_loop use_mps_device warmup_ratio xpu_backend
"""
"""Arguments that the Trainer had in transformers 4."""


def trainer(trl: str, llama_factory: str) -> Iterator[str]:
    """Fields of the arguments of the Trainer, of TRL and of LLaMA-Factory, and entries of the latter's examples."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    yield from fields((Path(spec.origin).parent / "training_args.py").read_text())["TrainingArguments"]
    yield from FORMER.split()
    for folder, paths in (
        (trl, r"trl/.*(_config|/utils)\.py"),
        (llama_factory, r"src/llamafactory/hparams/.*_args\.py"),
    ):
        for path in git(folder, "ls-tree", "-r", "--name-only", "HEAD").split():
            if re.fullmatch(paths, path):
                for name, entries in fields(git(folder, "show", f"HEAD:{path}")).items():
                    if name.endswith(("Arguments", "Config")):
                        yield from entries
    yield from (name for name in of_files(llama_factory, "examples") if "." not in name)


WRITERS: Mapping[str, tuple[Callable[..., Iterable[str]], str]] = {
    "torchtitan": (torchtitan, "torchtitan/entries.txt"),
    "deepspeed": (deepspeed, "deepspeed/entries.txt"),
    "automodel": (automodel, "automodel/entries.txt"),
    "mindformers": (mindformers, "mindformers/entries.txt"),
    "accelerate": (accelerate, "deepspeed/accelerate.txt"),
    "trainer": (trainer, "deepspeed/arguments.txt"),
}
"""Tool -> the function that finds its names, and the file for them."""


def write(file: str, names: Iterable[str]) -> None:
    """Write a tool's file."""
    known = sorted({name for name in names if WORD.fullmatch(name)})
    text = textwrap.fill(" ".join(known), width=120, break_on_hyphens=False, break_long_words=False)
    (FRAMEWORKS / file).write_text(text + "\n")


def main() -> None:
    """Write the files of the tools that are given."""
    for given in sys.argv[1:]:
        tool, _, folders = given.partition("=")
        find, file = WRITERS[tool]
        write(file, find(*folders.split(",")))


if __name__ == "__main__":
    main()
