"""The check that commands which run models begin with."""

from __future__ import annotations

import importlib.util

from debubble.ir import InputError


def require_torch() -> None:
    """Raise InputError unless torch is installed."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("This command needs PyTorch: install debubble's extra, `pip install 'debubble[torch]'`.")
