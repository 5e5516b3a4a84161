import re
from dataclasses import replace

import pytest

from debubble.papers.registry import Cell, Table
from debubble.papers.scope.figures import tables as report
from debubble.papers.scope.figures.tables import Ask, Case, PlannerOutcome
from debubble.planners import ModelUnits


def answers(**seconds: float) -> Ask:
    """Planners that take these seconds, named `planner` or `planner_operators`; all others take 100 s."""

    def ask(planner: str, case: Case) -> PlannerOutcome | None:
        words = re.sub(r"[-, ]+", "_", planner), case.operators.replace(", ", "_")
        time = seconds.get("_".join(words), seconds.get(words[0], 100.0))
        return PlannerOutcome(seconds=time / case.chunks, memory=time / 200, mfu=0.3)

    return ask


def column(table: Table, name: str) -> list[Cell]:
    return [row[table.columns.index(name)] for row in table.rows]


def test_every_speed_up_of_the_poster_has_a_row() -> None:
    table = report.end_to_end(answers())
    assert [cell for cell in column(table, "poster") if cell] == [
        1.07, 1.29, 1.30, 1.31, 1.36, 1.31, 1.36, 1.41, 1.16, 1.20, 1.70,
    ]  # fmt: skip


def test_speed_ups_are_over_the_baseline_of_the_row() -> None:
    table = report.end_to_end(answers(megatron_even=120.0, scope_selective_full=80.0))
    tri = [row for row in table.rows if row[0] == "SCOPE tri"]
    assert [(row[2], row[3], row[6]) for row in tri] == [
        ("1F1B", "Megatron-Even", 1.5),
        ("interleaved", "Megatron-Even", 1.5),
        ("interleaved", "Megatron-Even on 1F1B", 3.0),
    ]


def test_speed_ups_have_a_fully_recomputing_baseline_first() -> None:
    table = report.end_to_end(answers(megatron_even_every_layer=136.0, megatron_even=118.0))
    tri = next(row for row in table.rows if row[0] == "SCOPE tri")
    assert tri[5:] == (1.36, 1.18)


def test_cases_that_do_not_fit_have_empty_cells() -> None:
    tables = [make(lambda planner, case: None) for make in (report.scalability, report.generality, report.memory)]
    assert all(row[-1] is None for table in tables for row in table.rows)


@pytest.mark.parametrize("devices", [1024, 16384])
def test_a_step_has_the_same_sequences_on_any_number_of_devices(devices: int) -> None:
    problem = report.problem_of(Case("LLaMA-175B", devices=devices, sequences=8192))
    assert problem.tail is not None
    options = problem.tail.options
    assert problem.micro_batches * options.micro_batch_size * options.data == 8192


def test_a_case_limits_the_recomputed_operators() -> None:
    case = Case("LLaMA-70B")
    some, every = (report.problem_of(replace(case, operators=o)).workload for o in ("selective, full", "all"))
    assert isinstance(some, ModelUnits)
    assert isinstance(every, ModelUnits)
    assert {name for unit in some.units.units for name in unit.strategies} == {"none", "selective", "full"}
    assert len(every.units.units[1].strategies) > 3


def test_the_table_has_the_actual_size_of_a_model() -> None:
    table = report.generality(answers())
    sizes = dict(zip(column(table, "model"), column(table, "ours, 10^9 parameters"), strict=True))
    assert sizes["Pangu-alpha-230B"] == 206.9
    assert "PanGu-alpha 200B, of 206.9 10^9 parameters" in table.note
