"""Pickles immutable data for another process while threads of this one read it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class PickledFields:
    """A dataclass of which a pickle has the fields alone.

    What it computes once and keeps (`cached_property`) another thread may be adding at that moment.
    """

    def __getstate__(self) -> dict[str, Any]:
        """The fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
