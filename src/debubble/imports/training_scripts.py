"""Recognizes training scripts of Megatron-LM by their names, and commands of ms-swift."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

SCRIPT = "script"
"""Key for a training script whose name identifies its models beyond being GPTs."""
COMMAND = "command"
"""Key for a command of ms-swift."""
_OTHERS = re.compile(
    r"(^|_)(bert|t5|ict|retro|vision|vit|dino|mamba|hybrid|vlm|llava|multimodal|mimo|biencoder|generation|generate|server|ptq"
    r"|convert|converter|evalharness)(_|$)"
)
_FAMILIES = re.compile(r"(^|_)(llama|qwen|mistral|mixtral|baichuan|deepseek|internlm|gemma|chatglm)")
_SWIFT_COMMANDS = (
    "pt", "sft", "rlhf", "export", "infer", "merge-lora", "web-ui", "deploy", "rollout", "sample", "eval", "app",
)  # fmt: skip
"""Subcommands of ms-swift."""
_SWIFT_FILE = re.compile(r"(swift[/.]cli|_megatron)[/.](pt|sft|rlhf|export)(?:\.py)?$")


def is_other_script(name: str) -> bool:
    """Tell whether a training script's name, such as `pretrain_bert`, names another model than a GPT."""
    return _OTHERS.search(name) is not None


def is_family_script(name: str) -> bool:
    """Tell whether a training script's name, such as `pretrain_llama`, names a family whose layers are not GPT-2's."""
    return _FAMILIES.search(name) is not None and not is_other_script(name)


def swift_command(words: Sequence[str]) -> str | None:
    """The ms-swift command among a command's words, such as `megatron sft`; None: there is none.

    Source: ms-swift 4.6, swift/cli/main.py.
    """
    for first, second in pairwise([*words, ""]):
        program, does = first.rpartition("/")[2], second.replace("_", "-")
        if program in ("megatron", "swift") and does in _SWIFT_COMMANDS:
            return f"{program} {does}"
        if (file := _SWIFT_FILE.search(first)) is not None:
            return f"{'megatron' if file[1] == '_megatron' else 'swift'} {file[2]}"
    return None


def swift_file(words: Sequence[str]) -> str | None:
    """The file with the arguments of an ms-swift command, given after the subcommand or --config; None: none."""
    named = (second for first, second in pairwise(words) if first in (*_SWIFT_COMMANDS, "--config"))
    return next((name for name in named if name.endswith((".yaml", ".yml", ".json"))), None)
