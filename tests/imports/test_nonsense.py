"""A nonsensical value of any setting is refused with a sentence."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.exports import exports
from debubble.imports import imports
from debubble.imports.registry import UserFacts
from debubble.ir import InputError
from tests.exports.hand_plans import full, priced

NONSENSE: tuple[Any, ...] = (
    "none", "auto", "", "x", [], [[]], ["x"], {"x": 1}, -1, 0, 3, 2.5, True, False, None, 10**30,
)  # fmt: skip
ARGUMENTS: tuple[Any, ...] = (True, "none", "", "x", ("x", "y"), "-1", "0", "3", "2.5", f"{10**30}")
"""Possible values after an argument on a command line."""

PLANS = {
    "pipeline": priced(full(1), layers=(2, 2)),
    "alone": priced(full(1), layers=(4,), data=2, zero=2),
    "chunks": priced(layers=(1, 1, 1, 1), schedule=db.schedules["interleaved"](devices=2, micro_batches=8, chunks=2)),
}
PAIRS = [
    (target, plan)
    for target in imports
    for plan, made in PLANS.items()
    # A CSV has no settings, DeepSpeed no chunks, MindFormers another order of chunks, Megatron no ZeRO-2.
    if target != "torch"
    and (plan != "chunks" or target not in ("deepspeed", "mindformers"))
    and (plan != "alone" or target not in ("megatron", "primus"))
]


@pytest.mark.parametrize(
    ("target", "plan"), [pytest.param(*pair, marks=[] if pair[1] == "pipeline" else pytest.mark.slow) for pair in PAIRS]
)
def test_a_job_is_read_or_refused_in_a_sentence(target: str, plan: str, tmp_path: Path) -> None:
    """Every setting of an export gets each of these values, one at a time."""
    exported = PLANS[plan]
    for name, content in exports[target](exported).files.items():
        (tmp_path / name).write_text(content)
    importer, file = imports[target], tmp_path / imports[target].file
    settings = importer.settings(file)
    cluster = db.Cluster.parse(f"{exported.devices * exported.options.data}xA100-80GB")
    facts = UserFacts(cluster=cluster, model=exported.model, sequence_length=4096)

    jobs = 0
    for name, usual in settings.items():
        for value in ARGUMENTS if isinstance(usual, str | tuple) or usual is True else NONSENSE:
            with suppress(InputError):
                importer.job({**settings, name: value}, file, facts)
                jobs += 1

    assert jobs > len(settings)
