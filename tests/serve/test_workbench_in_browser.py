"""The workbench in a real browser, end to end."""

from __future__ import annotations

import re
import threading
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest

from debubble.costs import hardware
from debubble.serve import Workbench
from tests.support.browsers import empty_page


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    with Workbench() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            with empty_page(browser, viewport={"width": 1300, "height": 900}, accept_downloads=True) as opened:
                opened.goto(server.address)
                for name, value in {"model": "llama-tiny", "cluster": "2xA100-80GB", "sequence_length": "128"}.items():
                    opened.fill(f"#search [name={name}]", value)
                opened.click("summary")
                yield opened
        finally:
            server.shutdown()
            thread.join()


def search(page: Any, **fields: str) -> Any:
    """Fill in and submit the form; returns the search's line in the list."""
    before = page.locator("#searches li").count()
    for name, value in fields.items():
        field = page.locator(f"#search [name={name}]")
        if name == "planner":
            field.select_option(value)
        else:
            field.fill(value)
    page.click("#search > button")
    page.locator("#searches li").nth(before).wait_for()
    return page.locator("#searches li").first


def drag(page: Any, slider: str, value: int) -> None:
    page.locator(f"#trial [name={slider}]").evaluate(
        "(input, value) => { input.value = value; input.dispatchEvent(new Event('input', { bubbles: true })); }", value
    )


def figures(page: Any, *, other_than: str = "") -> str:
    """The figures below the sliders once they have changed."""
    page.wait_for_function(
        "other => { const now = document.querySelector('#trial .figures').textContent; return now && now !== other; }",
        arg=other_than,
    )
    text: str = page.locator("#trial .figures").inner_text()
    return text


def test_a_search_ends_with_the_report_a_plan_and_an_export(page: Any) -> None:
    line = search(page, planner="dapple", micro_batches="4")
    line.locator("[data-do=report]").wait_for(state="visible")
    page.frame_locator("#page").locator("h1").wait_for()

    assert re.search(r"1f1b, [0-9.]+ ms per step", line.inner_text())
    assert "llama-tiny on 2 x A100-80GB" in page.frame_locator("#page").locator("h1").inner_text()
    with page.expect_download() as plan:
        line.locator("[data-do=plan]").click()
    assert plan.value.suggested_filename == "plan.json"
    with page.expect_download() as export:
        line.locator("[data-do=export]").select_option("torch")
    with zipfile.ZipFile(export.value.path()) as archive:
        assert "torch/schedule.csv" in archive.namelist()


def test_two_searches_are_compared(page: Any) -> None:
    for micro_batches in ("4", "8"):
        search(page, planner="dapple", micro_batches=micro_batches).locator("[data-do=report]").wait_for(
            state="visible"
        )
    page.locator("#searches li").nth(1).locator("[data-do=compare]").click()
    table = page.frame_locator("#page").locator(".compared")
    table.wait_for()

    assert "Their batches differ" in table.inner_text()


@pytest.mark.slow  # concurrent search, browser and simulations need idle cores
def test_sliders_are_followed_while_a_search_runs(page: Any) -> None:
    line = search(page, planner="auto", effort="300")
    drag(page, "micro_batches", 4)
    few = figures(page)
    drag(page, "micro_batches", 32)
    many = figures(page, other_than=few)
    running = line.locator("[data-do=stop]").is_visible()
    line.locator("[data-do=stop]").click()
    line.locator("[data-do=stop]").wait_for(state="hidden")

    assert running
    assert "per step" in few
    assert few != many


@pytest.mark.parametrize(("scheme", "color"), [("light", "rgb(210, 47, 39)"), ("dark", "rgb(255, 138, 128)")])
def test_errors_can_be_read_on_light_and_on_dark(page: Any, scheme: str, color: str) -> None:
    page.emulate_media(color_scheme=scheme)
    assert page.locator("#trial .error").evaluate("element => getComputedStyle(element).color") == color


def test_the_memory_slider_knows_the_devices_of_several_nodes(page: Any) -> None:
    page.fill("#search [name=cluster]", "2x4xL40S-48GB")
    drag(page, "memory", 50)

    limit = page.locator("#trial label", has_text="Memory limit").locator("output").inner_text()
    assert limit == f"{hardware['L40S-48GB'].memory / 2**30 / 2:.1f}GiB"


def test_a_schedule_that_is_shown_follows_the_devices(page: Any) -> None:
    drag(page, "micro_batches", 4)
    slow = figures(page)
    page.fill("#search [name=cluster]", "2xH100-80GB")
    page.locator("#search [name=cluster]").blur()

    assert figures(page, other_than=slow).endswith("of 72.00 GiB")


def test_insufficient_memory_is_shown_next_to_the_sliders(page: Any) -> None:
    page.fill("#search [name=model]", "llama2-7b")
    drag(page, "memory", 10)
    error = page.locator("#trial .error:not(:empty)")
    error.wait_for()

    assert "GiB" in error.inner_text()


def test_forms_are_above_the_report_on_a_phone(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    last, report = page.locator("#trial [name=recompute]").bounding_box(), page.locator("#page").bounding_box()

    assert last["y"] + last["height"] <= report["y"]
    assert report["width"] == 390


@pytest.mark.parametrize(
    ("fields", "sentence"), [({"memory_limit": "much"}, "much"), ({"cluster": "2xB9000"}, "B9000")]
)
def test_bad_input_is_a_sentence(page: Any, fields: dict[str, str], sentence: str) -> None:
    line = search(page, planner="dapple", **fields)
    line.locator("span.error").wait_for()

    assert sentence in line.locator("span.error").inner_text()
