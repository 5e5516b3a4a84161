"""Sentences that compare say what their figures say, for and against."""

from __future__ import annotations

from debubble.papers import claims as sentences

PAPER = {"Merak": 1.29, "PipeDream": 1.07, "AdaPipe": 1.30}


def test_figures_in_the_published_order_are_said_to_be() -> None:
    ours = {"PipeDream": 1.0, "Merak": 1.15, "AdaPipe": 1.15}
    assert sentences.order(PAPER, ours) == "The order is the published one: PipeDream, Merak, AdaPipe."


def test_figures_in_another_order_are_listed_beside_the_published_one() -> None:
    ours = {"PipeDream": 1.1, "Merak": 1.05, "AdaPipe": 1.2}
    assert sentences.order(PAPER, ours) == (
        "The published order is PipeDream, Merak, AdaPipe; ours is Merak, PipeDream, AdaPipe."
    )


def test_what_does_not_fit_has_no_place_in_the_order() -> None:
    ours = {"PipeDream": 1.0, "Merak": None, "AdaPipe": 1.2}
    assert sentences.order(PAPER, ours) == "The order is the published one: PipeDream, AdaPipe."


def test_a_speed_up_that_no_other_exceeds_is_the_fastest() -> None:
    assert sentences.fastest("SCOPE", 1.2, {"Merak": 1.15, "AdaPipe": 1.2}) == (
        "None of Merak, AdaPipe is faster than SCOPE (1.200)."
    )


def test_every_faster_one_is_named_with_its_speed_up() -> None:
    others = {"Merak": 1.15, "AdaPipe": 1.175, "PipeDream": None}
    assert sentences.fastest("SCOPE", 1.174, others) == "AdaPipe (1.175) is faster than SCOPE (1.174)."
    assert sentences.fastest("SCOPE", 1.1, others) == (
        "Merak (1.150) and AdaPipe (1.175) are faster than SCOPE (1.100)."
    )


def test_nothing_is_said_to_be_slower_than_what_does_not_fit() -> None:
    assert sentences.fastest("SCOPE", None, {"Merak": 1.1}) == "SCOPE does not fit."


def test_figures_are_counted_within_a_range_and_those_outside_named() -> None:
    ours = {"a": 1.2, "b": 1.31, "c": 1.1, "d": 1.4, "e": None}
    assert sentences.within(1.2, 1.31, ours) == "2 of 4 are within 1.2 to 1.31; below it: c (1.1); above it: d (1.4)."


def test_a_span_of_one_figure_is_that_figure() -> None:
    assert sentences.span([10.12, 9.33]) == "9.3 to 10.1"
    assert sentences.span([9.31, 9.33]) == "9.3"
