"""Writes what frameworks take for settings that a file leaves out, from their own files, as data of the importers.

    python tools/framework_defaults.py PRIMUS TORCHTITAN

writes `defaults.toml` in the folders of both in src/debubble/frameworks.  Both are git checkouts: AMD-AGI/Primus, and
pytorch/torchtitan at the last commit with a JobConfig (early 2026).  Only settings that an importer asks for are kept,
and nothing of the files is run.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

FRAMEWORKS = Path(__file__).parents[1] / "src/debubble/frameworks"
OFF: tuple[Any, ...] = (None, False, [], {}, "")
NO_MODELS = ("diffusion", "base", "primus_megatron")
LAYERS = re.compile(
    r"--(.*hybrid.*|mamba-.*|window-.*|lfm-.*|index-.*|spec|qk-l2-norm|softmax-type|model-type|.*attention-variant)"
)
"""Arguments that describe layers, which importers look up by patterns."""

ZERO_BUBBLE = re.compile(r"--(enable-z.*|zero-bubble-.*|enable-exactly-.*|num-seq-splits)")
"""Arguments that are on in Primus' trainers but effective only with patch_zero_bubble, which is off."""


def asked(pattern: str) -> set[str]:
    """Names of settings in the importers' source."""
    return {name for path in FRAMEWORKS.glob("*/*.py") for name in re.findall(pattern, path.read_text())}


def merged(path: Path) -> dict[str, Any]:
    """A YAML file of Primus merged with those that it extends."""
    entries = yaml.safe_load(path.read_text()) or {}
    merged_entries: dict[str, Any] = {}
    for base in entries.pop("extends", []):
        merged_entries |= merged(path.parent / base)
    return merged_entries | entries


def arguments(settings: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Settings as arguments of Megatron-LM, for those that importers read."""
    named = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    return {name: value for name, value in sorted(named.items()) if name in names or LAYERS.fullmatch(name)}


def primus(folder: Path) -> Iterator[str]:
    """Trainers, and the difference of models from the base of all language models."""
    names, configs = asked(r'"(--[a-z0-9-]+)"'), folder / "primus/configs"
    base = arguments(merged(configs / "models/megatron/language_model.yaml"), names)
    yield f"language_model = {toml({key: value for key, value in base.items() if value not in OFF})}"
    for name in ("pre_trainer", "sft_trainer"):
        trainer = arguments(merged(configs / f"modules/megatron/{name}.yaml"), names)
        yield f"[trainers.{name}]"
        plain = {key: value for key, value in trainer.items() if value not in OFF and not ZERO_BUBBLE.fullmatch(key)}
        yield from (f"{json.dumps(key)} = {toml(value)}" for key, value in plain.items())
    yield "[models]"
    for path in sorted((configs / "models/megatron").glob("*.yaml")):
        if any(word in path.stem for word in NO_MODELS) or path.stem == "language_model":
            continue
        model = arguments(merged(path), names)
        differ = {
            key: value for key, value in model.items() if value != base.get(key) and not both_off(value, base.get(key))
        }
        yield f"{json.dumps(path.stem)} = {toml(differ)}"


def both_off(first: Any, second: Any) -> bool:
    """Whether both values are off."""
    return first in OFF and second in OFF


def torchtitan(folder: Path) -> Iterator[str]:
    """Defaults of JobConfig's sections that are numbers, words or enabled switches."""
    names = asked(r'"([a-z_0-9]+\.[a-z_0-9]+)"')
    tree = ast.parse((folder / "torchtitan/config/job_config.py").read_text())
    parts = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    yield "[values]"
    for section, kind in constants_of(parts["JobConfig"], names=True).items():
        for name, value in constants_of(parts.get(kind, parts["JobConfig"]), names=False).items():
            if f"{section}.{name}" in names and value not in OFF:
                yield f"{json.dumps(f'{section}.{name}')} = {toml(value)}"
    yield from flavors(folder)


SIZES = frozenset(
    (
        "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "hidden_dim",
        "head_dim", "qk_norm", "inter_dim", "enable_weight_tying", "moe_inter_dim", "n_dense_layers", "q_lora_rank",
        "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_enabled", "num_experts",
        "num_shared_experts", "top_k",
    )
)  # fmt: skip
"""Arguments of torchtitan's models that are sizes."""


def flavors(folder: Path) -> Iterator[str]:
    """Sizes of torchtitan's flavors of models like Llama, DeepSeek and gpt-oss."""
    models = folder / "torchtitan/models"
    mixture = constants_of(class_of(models / "moe/moe.py", "MoEArgs"), names=False)
    yield "[flavors]"
    for family in ("llama3", "qwen3", "deepseek_v3", "gpt_oss"):
        common = constants_of(class_of(models / family / "model/args.py", "ModelArgs"), names=False)
        for node in ast.parse((models / family / "__init__.py").read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                for key, call in zip(node.value.keys, node.value.values, strict=True):
                    sizes = (
                        {**mixture, **common, **keywords(call)} if family != "llama3" else {**common, **keywords(call)}
                    )
                    known = {name: value for name, value in sizes.items() if name in SIZES and value is not None}
                    flavor = ast.literal_eval(key or call)
                    if "attn" not in flavor and not flavor.endswith(("_flex", "_varlen")):
                        yield f"{json.dumps(f'{family}-{flavor}')} = {toml(known)}"


def class_of(path: Path, end: str) -> ast.ClassDef:
    """Last class of a file whose name has this ending."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    return next(node for node in reversed(classes) if node.name.endswith(end))


def keywords(call: ast.expr) -> dict[str, Any]:
    """Constant arguments of a call and of nested calls."""
    values: dict[str, Any] = {}
    for keyword in call.keywords if isinstance(call, ast.Call) else ():
        if isinstance(keyword.value, ast.Call):
            values |= keywords(keyword.value)
        elif keyword.arg is not None and plain(keyword.value):
            values[keyword.arg] = ast.literal_eval(keyword.value)
    return values


def constants_of(node: ast.ClassDef, *, names: bool) -> dict[str, Any]:
    """Fields of a dataclass -> their classes' names, or their constant defaults."""
    fields = {
        node.target.id: node
        for node in node.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    if names:
        return {name: ast.unparse(field.annotation) for name, field in fields.items()}
    return {name: ast.literal_eval(value) for name, field in fields.items() if (value := field.value) and plain(value)}


def plain(node: ast.expr) -> bool:
    """Whether an expression is a number, a word or a negative number."""
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant))


def toml(value: Any) -> str:
    """A value in TOML; null is off."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(entry)}" for key, entry in value.items()) + " }"
    return "false" if value is None else json.dumps(value)


def commit(folder: Path) -> str:
    """The commit of a checkout."""
    shown = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return shown.stdout.strip()


WRITERS = {"primus": primus, "torchtitan": torchtitan}


def main() -> None:
    """Write the files."""
    for name, folder in {"primus": Path(sys.argv[1]), "torchtitan": Path(sys.argv[2])}.items():
        head = "# Written by tools/framework_defaults.py: facts of the framework's own files at this commit."
        lines = (head, f'commit = "{commit(folder)}"', *WRITERS[name](folder))
        (FRAMEWORKS / name / "defaults.toml").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
