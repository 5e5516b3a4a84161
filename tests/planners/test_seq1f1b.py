"""Plans of sequences in slices."""

from typing import Any

import pytest

import debubble as db
from debubble.costs import model_units
from debubble.ir import InputError, RunOptions

LONG = {"micro_batches": 1, "sequence_length": 131_072, "effort": 1.0}


def planned(**options: Any) -> db.Plan:
    return db.plan("llama3-8b", "8xH100-80GB", **{**LONG, **options})


def test_slices_fill_the_pipeline_with_one_long_sequence() -> None:
    steps = [planned(slices=slices).simulate().makespan for slices in (4, 8, 16)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > 1.7 * steps[1]


def test_auto_asks_the_planner_of_slices() -> None:
    plan = planned(slices=8)
    assert [candidate.planner for candidate in plan.candidates] == ["seq1f1b"]
    assert (plan.schedule.slices, plan.micro_batches) == (8, 1)
    assert plan.lower_bound <= plan.simulate().makespan


def test_other_planners_refuse_slices() -> None:
    with pytest.raises(InputError, match="The planner 'joint' does not cut sequences into slices; seq1f1b and auto do"):
        planned(slices=8, planner="joint")


def test_whole_sequences_have_other_planners() -> None:
    with pytest.raises(InputError, match="say how many with --slices"):
        planned(planner="seq1f1b")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"slices": 3}, "131072 tokens cannot be cut into 3 equal slices"),
        ({"slices": 2, "context": 2, "pipeline": 4}, "not planned together with context-parallel ranks"),
    ],
)
def test_what_cannot_be_cut_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        planned(**options)


def test_models_without_keys_to_hand_on_are_refused() -> None:
    with pytest.raises(InputError, match="only layers of causal attention with keys and values of their own"):
        db.plan("deepseek-v3", "8xH100-80GB", slices=2)


@pytest.mark.parametrize("slices", [2, 8, 32])
def test_slices_take_about_as_long_together_as_the_sequence(slices: int) -> None:
    """What is more are launches and products of fewer tokens."""
    cluster, run = db.Cluster.parse("8xH100-80GB"), RunOptions(sequence_length=131_072)
    whole = model_units(db.models["llama3-8b"], cluster, run).units[1]
    cut = model_units(db.models["llama3-8b"], cluster, RunOptions(sequence_length=131_072, slices=slices))
    unit, pattern = cut.units[1], cut.attention_scale or ()
    forward = sum(unit.forward + (scale - 1) * unit.attention_forward for scale in pattern)
    assert forward == pytest.approx(whole.forward, rel=0.02)
    assert len(pattern) * unit.keys_and_values == 2 * 2 * 131_072 * 1024
