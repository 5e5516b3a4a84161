"""The page for a job of which nothing fits: why, what would, and the degrees that need the least memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from debubble.formatting import size_words, time_words
from debubble.ir import InputError, Origin
from debubble.planners.degrees.memory import Footprint, footprints
from debubble.planners.degrees.remedies import Misfit
from debubble.planners.degrees.space import Job
from debubble.views.html.strips import bars
from debubble.views.html.templates import render
from debubble.views.memory_table import PARTS
from debubble.views.rows import Rows, training_words
from debubble.views.scene import model_title

MAX_CHOICES = 10
"""Number of choices of degrees that the page shows."""


def misfit_page(misfit: Misfit, *, origin: Origin) -> bytes:
    """Write the page of a job of which nothing fits.

    Args:
        misfit: The job, why it does not fit, and the changes with which it does.
        origin: The command that asked for the plan.
    """
    job = misfit.job
    smallest = sorted(_footprints(job), key=lambda choice: choice.recomputed.total - choice.limit)[:MAX_CHOICES]
    return render(
        "misfit.html",
        title="Nothing fits",
        subject=model_title(job.model, job.cluster),
        answers=list(_answers(misfit)),
        facts=_facts(job, origin),
        memory=_memory(smallest) if smallest else None,
    )


def _answers(misfit: Misfit) -> list[dict[str, Any]]:
    """The questions of a report, answered for a job of which nothing fits."""
    help_: dict[str, Any] = {"answer": misfit.without_remedy, "more": []}
    if misfit.remedies:
        first, *further = misfit.remedies
        host = "" if first.on_host is None else f", with {first.on_host} on the host"
        step = f"A step then takes {time_words(first.step_time, seconds=True)}{host}."
        call = f"These were tried{misfit.elsewhere} and fit; what is given twice in a call counts as it is given last."
        help_ = {"answer": f"Add {first.change}", "more": [step, *(f"Or {other}." for other in further), call]}
    return [
        {"question": "Does it fit?", "answer": "No", "more": [misfit.states]},
        {"question": "Why not?", "answer": misfit.reason, "more": []},
        {"question": "What would help?", **help_},
    ]


def _facts(job: Job, origin: Origin) -> list[tuple[str, str]]:
    options = job.options
    return [
        ("command", origin.command),
        ("made", f"{origin.date}, by debubble {origin.version}"),
        ("batch", f"{job.global_batch} sequences of {options.sequence_length} tokens per step"),
        ("training", training_words(options)),
    ]


def _footprints(job: Job) -> list[Footprint]:
    """Memory of every choice of degrees, without the job's fixed degrees; empty if none is legal."""
    try:
        return footprints(replace(job, fixed={}))
    except InputError:
        return []


def _memory(smallest: Sequence[Footprint]) -> dict[str, Any]:
    parts = [{name: getattr(choice.recomputed, name) for name in PARTS} for choice in smallest]
    names = [str(choice.degrees) for choice in smallest]
    rows = Rows(
        title="The same as a table",
        columns=("degrees", *parts[0], "peak", "limit"),
        rows=[
            (name, *map(size_words, sizes.values()), size_words(choice.recomputed.total), size_words(choice.limit))
            for name, sizes, choice in zip(names, parts, smallest, strict=True)
        ],
        texts=frozenset({"degrees"}),
    )
    return {**bars(names, parts, [choice.limit for choice in smallest]), "rows": rows}
