"""A real browser for tests: the system's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE = {"viewport": {"width": 390, "height": 800}, "has_touch": True, "is_mobile": True}


@contextmanager
def started_browser() -> Iterator[Any]:
    """Start a browser.  Skips without Chromium or Playwright."""
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def empty_page(browser: Any, **settings: Any) -> Iterator[Any]:
    """Open a page with no shared state; errors of its scripts fail the test."""
    errors: list[str] = []
    context = browser.new_context(**settings)
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert errors == []
