"""Cells of notebooks, and the project's notebooks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import debubble as db
from tests.views.scenes import small_plan

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


def test_repr_is_one_short_line() -> None:
    plan = small_plan(chunks=2, schedule="interleaved")

    assert repr(plan) == "Plan(interleaved by hand: 2 devices x 2 chunks, 4 micro-batches)"
    assert repr(plan.schedule) == "Schedule(interleaved: 2 devices, 4 stages, 4 micro-batches, 32 operations)"
    assert repr(plan.simulate()) == "Timeline(interleaved: 2 devices, 80 operations, makespan 33)"


@pytest.mark.parametrize("source", ["plan", "timeline", "schedule"])
def test_a_cell_shows_every_operation_of_the_compute_lanes(source: str) -> None:
    plan = small_plan()
    sources: dict[str, db.Plan | db.Timeline | db.Schedule] = {
        "plan": plan, "timeline": plan.simulate(), "schedule": plan.schedule,
    }  # fmt: skip
    cell = sources[source]._repr_html_()

    assert [name for name in ("0F0", "1F3", "0B0", "1B3") if f"<title>{name}</title>" not in cell] == []
    assert cell.count("device") == 2


def test_cell_of_a_model_plan_shows_tokens_per_second() -> None:
    plan = db.plan(db.models["llama2-7b"], db.Cluster.parse("4xA100-80GB"), planner="dapple", micro_batches=4)

    assert "tokens/s" in plan._repr_html_()


def test_truncated_picture_says_what_is_left_out() -> None:
    schedule = db.schedules["1f1b"](devices=8, micro_batches=300)

    assert "800 later operations are left out" in schedule._repr_html_()


def test_show_returns_the_full_report_as_frame_and_file(tmp_path: Path) -> None:
    report = small_plan().show()
    report.save(tmp_path / "plan.html")

    assert "Does it fit?" in (tmp_path / "plan.html").read_text()
    assert report._repr_html_().startswith('<iframe src="data:text/html;base64,')
    assert b"Side by side" in db.show(small_plan(), small_plan(forward=2)).content


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_of_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}

    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        exec(compile("".join(cell["source"]), notebook.name, "exec"), names)

    assert len(cells) >= 4
