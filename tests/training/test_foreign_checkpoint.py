"""What a checkpoint of unknown origin may set and what it may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from debubble.ir import InputError
from debubble.training.checkpoint.folder import progress_of
from debubble.training.options import TrainOptions, with_settings
from tests.training.conftest import TINY_LLAMA


def checkpoint(folder: Path, **entries: Any) -> Path:
    """A checkpoint folder with these entries in its progress."""
    place = folder / "step-000003"
    place.mkdir(parents=True)
    progress = {"step": 3, "samples": 12, "seed": 0, "model": TINY_LLAMA, **entries}
    (place / "progress.json").write_text(json.dumps(progress))
    (place / ".metadata").touch()
    return place


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"dataset": "evil:make"}, "unknown field `dataset`"),
        ({"trace": "/some/file"}, "unknown field `trace`"),
        ({"load": ["/some/folder"]}, "unknown field `load`"),
        ({"nonsense": 1}, "unknown field `nonsense`"),
        ({"steps": "many"}, "`recipe.steps` must be a whole number or null, not a text"),
        ({"steps": -1}, "must be a whole number >= 0"),
        ({"clip": [1]}, "must be a number or null, not a list"),
        ([], "`recipe` must be fields by name, not a list"),
    ],
)
def test_recipe_has_only_its_nine_typed_settings(tmp_path: Path, recipe: Any, message: str) -> None:
    place = checkpoint(tmp_path, recipe=recipe)
    with pytest.raises(InputError, match=message):
        progress_of(place)


def test_progress_that_is_nested_deeply_is_refused(tmp_path: Path) -> None:
    place = checkpoint(tmp_path)
    (place / "progress.json").write_text('{"model": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}")
    with pytest.raises(InputError, match="is not what debubble writes: it is nested too deeply"):
        progress_of(place)


def resumed(folder: Path, **settings: Any) -> TrainOptions:
    return with_settings(settings, TrainOptions(plan=Path("plan.json"), checkpoint=folder, resume=True))


def test_an_optimizer_that_only_a_checkpoint_names_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, recipe={"optimizer": "evil:Optimizer"})
    with pytest.raises(InputError, match="written with --optimizer evil:Optimizer: give it again"):
        resumed(tmp_path)
    assert resumed(tmp_path, optimizer="evil:Optimizer").optimizer == "evil:Optimizer"


def test_checkpoint_settings_are_defaults(tmp_path: Path) -> None:
    checkpoint(tmp_path, recipe={"clip": 0.5, "steps": 7, "optimizer": "sgd"})
    options = resumed(tmp_path, steps=9)
    assert (options.clip, options.steps, options.optimizer) == (0.5, 9, "sgd")
