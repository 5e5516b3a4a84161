"""Models by name: built-in names, names on the Hugging Face hub, and files."""

from __future__ import annotations

import re
from pathlib import Path

from debubble.ir import InputError
from debubble.models.config import ModelConfig
from debubble.models.known_configs import CONFIGS
from debubble.registry import Registry, full_name

models: Registry[ModelConfig] = Registry("debubble.models", kind="model")


def named_model(text: str) -> ModelConfig:
    """The model of a built-in name or a unique prefix, a hub's name for it, a `config.json`, or a folder with one.

    Raises InputError if the text is nothing of these.
    """
    if text and text not in models and (Path(text).exists() or Path(text).suffix == ".json"):
        return ModelConfig.from_hf(text)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        if (known := hub_model(text)) is not None:
            return known
        raise InputError(
            f"There is no model or file '{text}'; for a model of the Hugging Face hub, fetch its config, `hf download"
            f" {text} config.json --local-dir {text.rpartition('/')[2]}`, and give that folder."
        )
    return models[full_name(text, models, kind="model or file")]


_TRAINING_WORDS = re.compile(
    r"-(instruct|hf|base|it|chat|thinking|preview|exp|bf16|fp8|v[01]\.\d|\d{4}|v01|4k|8k|128k|1m)(?=-|$)|^(hf|meta|c4ai)-"
)
"""Words in hubs' names on a model's training, which do not affect its layers."""
_SAME_LAYERS = {
    r"deepseek-(r1|r1-zero|v3\.1)": "deepseek-v3",
    r"deepseek-r1-distill-llama-8b": "llama3.1-8b",
    r"deepseek-r1-distill-llama-70b": "llama3.3-70b",
    r"deepseek-r1-distill-qwen-([\d.]+b)": r"qwen2.5-\1",
    r"llama-3\.1-nemotron-70b": "llama3.1-70b",
    r"llama-4-(scout|maverick)-17b-\d+e": r"llama4-\1",
    r"qwen2-(0\.5b|1\.5b)": r"qwen2.5-\1",
    r"qwen2\.5-(?:coder|math)-(.*)": r"qwen2.5-\1",
    r"qwen3-coder-30b-a3b": "qwen3-30b-a3b",
    r"yi-1\.5-(.*)": r"yi-\1",
}
"""Pattern of a model's name -> the model with the same layers."""


def hub_model(name: str) -> ModelConfig | None:
    """The known model of a hub's name such as `meta-llama/Meta-Llama-3-8B`, or None."""
    last = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    short = _TRAINING_WORDS.sub("", last)
    like = [match.expand(to) for pattern, to in _SAME_LAYERS.items() if (match := re.fullmatch(pattern, short))]
    names = (last, *like, short, short.replace("llama-", "llama"), re.sub(r"-(?=\d)", "", short, count=1))
    return next((models[known] for known in names if known in models), None)


def as_model(model: ModelConfig | str | Path) -> ModelConfig:
    """The model itself, or the one of a name or a path.  Raises InputError if it is neither."""
    if isinstance(model, str | Path):
        return named_model(str(model))
    if not isinstance(model, ModelConfig):
        kind = type(model).__name__
        units = " `debubble plan --units FILE --devices P` plans what db.profile measured." if kind == "Units" else ""
        raise InputError(f"A model is db.models[NAME], db.Model.from_hf(FILE), a name or a file, not {kind}.{units}")
    return model


for _name, _config in CONFIGS.items():
    models.add(_name, ModelConfig.from_hf(_config))
