"""The report in a browser: mouse, keyboard, touch, phone and dark theme."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.views import Scene, views
from tests.support.browsers import PHONE, empty_page
from tests.views.scenes import small_plan, trace_of

CANVAS = "canvas[data-scene]"
WIDE = {"viewport": {"width": 1280, "height": 900}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of a plan, of a plan with its measurement, and of two plans."""
    made = tmp_path_factory.mktemp("pages")
    plan = small_plan()
    predicted = Scene.predicted(plan)
    pages = {"one": [predicted], "measured": Scene.pair(plan, trace_of(plan, slower=2)), "two": [predicted, predicted]}
    for name, scenes in pages.items():
        (made / f"{name}.html").write_bytes(views["html"](scenes))
    return made


@pytest.fixture
def page(folder: Path, browser: Any) -> Iterator[Any]:
    with empty_page(browser, **WIDE) as opened:
        opened.goto(f"file://{folder}/one.html")
        yield opened


def status_of(page: Any) -> str:
    text: str = page.locator("#status").inner_text()
    return text


def hovered(page: Any, x: float, y: float) -> str:
    """Text that the page shows for a point of the first timeline."""
    canvas = page.locator(CANVAS).first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + x, box["y"] + y)
    text: str = page.locator("#tip").inner_text()
    return text


def test_search_finds_operations_micro_batches_and_devices(page: Any) -> None:
    def searched(text: str) -> str:
        page.fill("#search", text)
        page.press("#search", "Enter")
        return status_of(page)

    operation = small_plan().simulate().by_name["1F2"]
    place = "stage 1 (chunk 0), micro-batch 2, device 1, compute lane"
    assert f"1F2: forward, {place}, {operation.start} to {operation.end}: 1" in searched("1F2")
    assert page.locator("[aria-expanded=true]").count() == 2
    assert searched("3").startswith("0F3: forward")
    assert searched("stage 1").startswith("1F0: forward")
    assert searched("device 1").startswith("Device 1: peak")
    assert searched("9Z9").startswith('Nothing is named "9Z9"')


def test_keys_step_through_operations_and_escape_unpins(page: Any) -> None:
    page.locator(CANVAS).focus()
    page.keyboard.press("n")
    page.keyboard.press("n")

    assert status_of(page).startswith("0F1: forward")
    page.keyboard.press("p")
    assert status_of(page).startswith("0F0: forward")
    page.keyboard.press("Escape")
    assert status_of(page) == ""


@pytest.mark.parametrize("how", ["key", "wheel", "button", "map"])
def test_timeline_zooms_in_and_resets(page: Any, how: str) -> None:
    before = hovered(page, 300, 32)
    hovered(page, 1000, 32)
    if how == "key":
        page.keyboard.press("+")
    elif how == "button":
        page.click("#in")
    else:
        if how == "map":
            page.locator("#minimap").hover()
        page.keyboard.down("Control")
        page.mouse.wheel(0, -400)
        page.keyboard.up("Control")
    near = hovered(page, 301, 32)
    page.keyboard.press("0")

    assert near != before
    assert hovered(page, 300, 32) == before


def test_click_pins_a_micro_batch_and_a_second_unpins_it(page: Any) -> None:
    pinned = hovered(page, 120, 32).splitlines()[0]
    page.mouse.down()
    page.mouse.up()
    first = status_of(page)
    page.mouse.down()
    page.mouse.up()

    assert first.startswith(f"{pinned}: ")
    assert status_of(page) == ""


def test_a_device_is_folded_by_its_name(page: Any) -> None:
    height = page.locator(CANVAS).bounding_box()["height"]
    device = page.locator(".stack button").nth(1)
    device.click()

    assert page.locator(".stack button").nth(1).get_attribute("aria-expanded") == "false"
    assert page.locator(CANVAS).bounding_box()["height"] < height


def test_memory_and_idle_time_are_shown_under_the_pointer(page: Any) -> None:
    words = [hovered(page, 600, y) for y in range(24, 200, 6)]

    assert any(text.startswith("memory of device 0") and "limit" in text for text in words)
    assert any(text.startswith("idle: ") for text in words + [hovered(page, x, 32) for x in range(100, 1200, 40)])


def test_the_theme_follows_the_system_and_the_button(folder: Path, browser: Any) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    with empty_page(browser, color_scheme="dark") as page:
        page.goto(f"file://{folder}/one.html")
        dark = page.evaluate(paper)
        page.click("#theme")
        light = page.evaluate(paper)

    assert sum(map(int, re.findall(r"\d+", dark))) < 200 < 600 < sum(map(int, re.findall(r"\d+", light)))


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_phone_shows_the_page_in_its_width_and_a_tap_pins(folder: Path, browser: Any, name: str) -> None:
    with empty_page(browser, **PHONE) as page:
        page.goto(f"file://{folder}/{name}.html")
        wide = page.evaluate("document.documentElement.scrollWidth")
        canvas = page.locator(CANVAS).first
        canvas.scroll_into_view_if_needed()
        canvas.evaluate("canvas => { canvas.scrollIntoView(); window.scrollBy(0, -300); }")
        box = canvas.bounding_box()
        page.touchscreen.tap(box["x"] + 70, box["y"] + 32)
        pinned = status_of(page)

    assert wide <= 390
    assert re.match(r"0F\d: forward", pinned)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_sweep_fits_a_phone(browser: Any, tmp_path: Path, theme: str) -> None:
    limits = ["24GiB", "28GiB", "32GiB", "40GiB", "56GiB", "72GiB"]
    sweep = db.sweep("llama2-7b", "4xA100-80GB", memory_limit=limits, micro_batches=8, planner="dapple")
    sweep.show().save(tmp_path / "sweep.html")
    beyond = """[...document.querySelectorAll("article :is(circle, text, rect, span, td, input)")]
        .filter(shape => shape.getClientRects().length)
        .filter(shape => shape.getBoundingClientRect().right > shape.closest(".card").getBoundingClientRect().right)
        .length"""
    with empty_page(browser, **PHONE, color_scheme=theme) as page:
        page.goto(f"file://{tmp_path}/sweep.html")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate(beyond) == 0
        assert page.locator("circle").count() > 1


def test_measured_operations_show_their_prediction(folder: Path, browser: Any) -> None:
    with empty_page(browser) as page:
        page.goto(f"file://{folder}/measured.html#1F2")
        assert "measured: " in status_of(page)
        assert page.locator("#differences").is_checked()
        page.goto(f"file://{folder}/two.html")
        top = page.locator(".compared").bounding_box()["y"]
        assert top < page.locator(".answers").first.bounding_box()["y"]
        assert page.locator(".reports.two article").count() == 2


def test_every_control_has_a_name_for_screen_readers(page: Any) -> None:
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, input, canvas[tabindex], [role=img]")]
           .filter(e => !(e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.length))
           .map(e => e.outerHTML)"""
    )

    assert json.dumps(unnamed) == "[]"


@pytest.mark.parametrize(
    ("name", "settings", "theme"),
    [("one", WIDE, "light"), ("measured", PHONE, "dark"), ("two", WIDE, "dark"), ("two", PHONE, "light")],
)
def test_axe_finds_no_violation(folder: Path, browser: Any, name: str, settings: dict[str, Any], theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    with empty_page(browser, color_scheme=theme, **settings) as opened:
        opened.goto(f"file://{folder}/{name}.html")
        opened.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")

        report = axe.Axe().run(opened)

        assert [violation["id"] for violation in report.response["violations"]] == []
