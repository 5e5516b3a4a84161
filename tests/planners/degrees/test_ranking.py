"""Pruning loses nothing: the ranking's best are the exhaustive ones, whatever bounds and guesses say."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from debubble.ir import InfeasibleError
from debubble.planners.degrees.ranking import Ranking, rank
from debubble.planners.degrees.search import BEST


@dataclass(frozen=True)
class Stub:
    """A choice: its bounds, from the coarsest on, and its step; None: it does not fit."""

    coarse: float
    tight: float | None
    step: float | None


@st.composite
def stubs(draw: st.DrawFn) -> list[Stub]:
    """Choices whose bounds hold; some are known not to fit by their tighter bound, others when they are planned."""
    drawn = []
    for _ in range(draw(st.integers(0, 40))):
        coarse = draw(st.integers(1, 30))
        tight = draw(st.none() | st.integers(coarse, 35))
        step = None if tight is None else draw(st.none() | st.integers(tight, 40))
        drawn.append(Stub(coarse, tight, step))
    return drawn


def ranked(of: list[Stub], *, calls: int | None = None) -> Ranking[int]:
    ranking: Ranking[int] = Ranking()
    made: list[int] = []

    def fitting(seconds: float | None) -> float:
        if seconds is None:
            raise InfeasibleError("It does not fit.")
        return seconds

    def step(choice: int) -> float:
        made.append(choice)
        return fitting(of[choice].step)

    rank(
        range(len(of)), bounds=[lambda c: of[c].coarse, lambda c: fitting(of[c].tight)], step=step, count=BEST,
        ranking=ranking, over=lambda: calls is not None and len(made) >= calls,
    )  # fmt: skip
    return ranking


@given(stubs())
def test_pruning_loses_none_of_the_best(of: list[Stub]) -> None:
    ranking = ranked(of)
    exhaustive = sorted({stub.step for stub in of if stub.step is not None})[:BEST]
    assert [ranking.steps[choice] for choice in ranking.best(BEST)] == exhaustive


@given(stubs())
def test_nothing_is_planned_that_a_bound_shows_to_be_slower(of: list[Stub]) -> None:
    ranking = ranked(of)
    best = ranking.best(BEST)
    if len(best) == BEST:
        worst = ranking.steps[best[-1]]
        assert all((of[choice].tight or 0) <= worst for choice in ranking.steps)


@given(stubs())
def test_every_choice_is_accounted_for(of: list[Stub]) -> None:
    ranking = ranked(of)
    assert len(ranking.steps) + len(ranking.refused) + ranking.slower + ranking.left == len(of)
    assert ranking.left == 0


@given(stubs(), st.integers(0, 10))
def test_a_spent_effort_leaves_choices_and_says_how_many(of: list[Stub], calls: int) -> None:
    ranking = ranked(of, calls=calls)
    assert len(ranking.steps) + len(ranking.refused) + ranking.slower + ranking.left == len(of)
    assert ranking.steps or all(stub.step is None for stub in of)


def test_choices_that_take_the_same_step_count_as_one() -> None:
    ranking: Ranking[str] = Ranking(steps={"first": 2.0, "again": 2.0, "slower": 3.0})
    assert ranking.best(2) == ["first", "slower"]
