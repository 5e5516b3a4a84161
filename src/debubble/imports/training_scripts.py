"""Training scripts of Megatron-LM by their names."""

from __future__ import annotations

import re

SCRIPT = "script"
"""The entry of a training script for other models than GPT's."""
_OTHERS = re.compile(
    r"(^|_)(bert|t5|ict|retro|vision|vit|dino|mamba|hybrid|vlm|llava|multimodal|mimo|biencoder|generation|generate|server|ptq"
    r"|convert|evalharness)(_|$)"
)


def is_other_script(name: str) -> bool:
    """Tell whether a training script's name, such as `pretrain_bert`, says that it trains another model than a GPT."""
    return _OTHERS.search(name) is not None
