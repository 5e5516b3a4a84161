"""The workbench's forms: arguments of `debubble plan`, and simulations of a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from debubble.costs import Cluster
from debubble.files import convert, decode_json
from debubble.ir import DEFAULT_EFFORT, InputError, RunOptions
from debubble.models import named_model
from debubble.planners import planners
from debubble.planners.fixed_plan import fixed_plan
from debubble.views.scene import Scene

MAX_TRIAL_SIZE = 20_000
"""Largest devices x micro-batches of a trial simulation; larger ones could not follow a slider."""


class SearchForm(msgspec.Struct, forbid_unknown_fields=True):
    """The form that starts a search; empty texts are unset fields."""

    model: str = ""
    cluster: str = ""
    planner: str = "auto"
    global_batch: int | None = None
    micro_batches: int | None = None
    sequence_length: int = RunOptions.sequence_length
    pipeline: int | None = None
    tensor: int | None = None
    data: int | None = None
    memory_limit: str = ""
    effort: float = DEFAULT_EFFORT

    @property
    def arguments(self) -> list[str]:
        """The arguments of `debubble plan`; values are joined to their options, so that none is parsed as an option."""
        _check_chosen(self)
        planners[self.planner]  # raises InputError for a file, too
        values = {name.replace("_", "-"): getattr(self, name) for name in self.__struct_fields__ if name != "model"}
        options = [f"--{name}={value}" for name, value in values.items() if value is not None and value != ""]
        return ["plan", *options, "--", self.model]


class TrialForm(msgspec.Struct, forbid_unknown_fields=True):
    """The form that simulates a schedule."""

    model: str = ""
    cluster: str = ""
    schedule: str = "1f1b"
    micro_batches: int = 8
    sequence_length: int = RunOptions.sequence_length
    tensor: int = 1
    data: int = 1
    recompute: str = ""
    memory_limit: str = ""

    def scene(self) -> Scene:
        """Simulate the schedule.  Raises a DebubbleError if it does not fit or a field is wrong."""
        _check_chosen(self)
        cluster = Cluster.parse(self.cluster)
        if cluster.count * self.micro_batches > MAX_TRIAL_SIZE:
            raise InputError(f"{cluster.count} devices and {self.micro_batches} micro-batches are too many to follow.")
        plan = fixed_plan(
            named_model(self.model), cluster, schedule=self.schedule, micro_batches=self.micro_batches,
            recompute=self.recompute or None, memory_limit=self.memory_limit or None,
            sequence_length=self.sequence_length, tensor=self.tensor, data=self.data,
        )  # fmt: skip
        return replace(Scene.predicted(plan), title=self.schedule)


def _check_chosen(form: SearchForm | TrialForm) -> None:
    if not (form.model and form.cluster):
        raise InputError("Choose a model and a cluster.")


def read_form(content: bytes, form: type[Any]) -> Any:
    """Parse a form's JSON; numbers may be texts, and empty texts are unset fields.

    Raises:
        InputError: If a field is wrong.
    """
    try:
        fields = decode_json(content, Any)
        if not isinstance(fields, Mapping):
            raise InputError("A form is one JSON object.")
        return convert({k: v for k, v in fields.items() if v != ""}, form, strict=False)
    except msgspec.DecodeError as error:
        raise InputError(f"The form is wrong: {error}.") from error
