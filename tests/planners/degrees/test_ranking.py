"""Pruning loses nothing: the ranking's best are the exhaustive ones, whatever bounds and guesses say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from debubble.ir import InfeasibleError
from debubble.planners.degrees.search import BEST, Ranking, rank


@st.composite
def choices(draw: st.DrawFn) -> dict[int, tuple[float, float, float | None]]:
    """Choices with a guess, a lower bound and a step above it; None: it does not fit."""
    drawn = {}
    for choice in range(draw(st.integers(0, 40))):
        bound = draw(st.integers(1, 30))
        step = draw(st.none() | st.integers(bound, 40))
        drawn[choice] = (float(draw(st.integers(1, 40))), float(bound), None if step is None else float(step))
    return drawn


def ranked(of: dict[int, tuple[float, float, float | None]], *, calls: int | None = None) -> Ranking[int]:
    ranking: Ranking[int] = Ranking()
    made: list[int] = []

    def step(choice: int) -> float:
        made.append(choice)
        seconds = of[choice][2]
        if seconds is None:
            raise InfeasibleError("It does not fit.")
        return seconds

    rank(
        list(of), bound=lambda c: of[c][1], guess=lambda c: of[c][0], step=step, count=BEST, ranking=ranking,
        over=lambda: calls is not None and len(made) >= calls,
    )  # fmt: skip
    return ranking


@given(choices())
def test_pruning_loses_none_of_the_best(of: dict[int, tuple[float, float, float | None]]) -> None:
    ranking = ranked(of)
    exhaustive = sorted(step for _, _, step in of.values() if step is not None)[:BEST]
    assert [ranking.steps[choice] for choice in ranking.best(BEST)] == exhaustive


@given(choices())
def test_every_choice_is_accounted_for(of: dict[int, tuple[float, float, float | None]]) -> None:
    ranking = ranked(of)
    assert len(ranking.steps) + len(ranking.refused) + ranking.slower + ranking.left == len(of)
    assert ranking.left == 0


@given(choices(), st.integers(0, 10))
def test_a_spent_effort_leaves_choices_and_says_how_many(
    of: dict[int, tuple[float, float, float | None]], calls: int
) -> None:
    ranking = ranked(of, calls=calls)
    assert len(ranking.steps) + len(ranking.refused) + ranking.slower + ranking.left == len(of)
    assert ranking.steps or all(step is None for _, _, step in of.values())
