import pytest

from debubble.papers.claims import NEAR, Verdict, compared, stated, unavailable


@pytest.mark.parametrize(
    ("paper", "ours"), [("1.30", 1.304), ("1.22 to 1.27", 1.274), ("more than 30", 31.0), ("at least 3", 3.0)]
)
def test_a_figure_that_rounds_to_the_printed_one_is_the_same(paper: str, ours: float) -> None:
    assert compared("speed-up", paper=(paper,), ours=[ours]).verdict == Verdict(("same",))


@pytest.mark.parametrize(
    ("paper", "ours"),
    [("1.30", 1.366), ("1.22 to 1.27", 1.336), ("more than 30", 28.4), ("at most 3", 3.6), ("0", None)],
)
def test_any_other_figure_differs_with_a_reason(paper: str, ours: float | None) -> None:
    claim = compared("speed-up", paper=(paper,), ours=[ours], because="memory is fitted")
    assert claim.verdict == Verdict(("differs",), "memory is fitted")


def test_a_claim_that_differs_cannot_be_made_without_a_reason() -> None:
    with pytest.raises(AssertionError, match="say why"):
        compared("speed-up", paper=("1.3",), ours=[1.1])


@pytest.mark.parametrize(("paper", "ours"), [("1.30", 1.306), ("1.22 to 1.27", 1.276), ("more than 30", 29.4)])
def test_a_figure_within_5_percent_of_the_printed_is_near(paper: str, ours: float) -> None:
    assert NEAR == 0.05
    assert compared("speed-up", paper=(paper,), ours=[ours], because="of noise").verdict.words == ("near",)


def test_the_cells_of_a_claim_are_judged_one_by_one() -> None:
    claim = compared("three", paper=("1", "2", "3"), ours=[1, 4, 3], because="of noise", inputs=[2])
    assert claim.verdict == Verdict(("same", "differs", "input"), "of noise")
    assert str(claim.verdict) == "1 same, 1 differ, 1 input because of noise"


def test_a_contradiction_in_a_paper_is_mended() -> None:
    claim = compared("k", paper=("1", "1"), ours=[1, 2], because="equation (8) has 2", mended=True)
    assert claim.verdict.words == ("same", "mended")
    assert stated("range", paper="a", ours="b", because="a is empty", mended=True).verdict.words == ("mended",)


def test_figures_have_as_many_digits_as_in_the_paper() -> None:
    claim = compared("GB", paper=("17.23", "1.2 to 1.3", "30"), ours=[17.2345, 1.21, 29.6], unit=" GB")
    assert (claim.paper, claim.ours) == ("17.23, 1.2 to 1.3, 30 GB", "17.23, 1.2, 30 GB")


def test_statements_are_the_same_if_they_read_the_same() -> None:
    assert stated("stages", paper="6, 7", ours="6, 7").verdict == Verdict(("same",))
    assert stated("stages", paper="6, 7", ours="7", because="of the fit").verdict == Verdict(("differs",), "of the fit")


def test_a_claim_without_a_figure_of_ours_has_a_reason() -> None:
    claim = unavailable("the architecture", because="it is a diagram")
    assert (claim.ours, claim.verdict) == ("", Verdict(("cannot be had",), "it is a diagram"))
    assert str(claim.verdict) == "cannot be had because it is a diagram"
