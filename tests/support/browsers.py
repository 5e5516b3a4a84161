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
def browser_page(**settings: Any) -> Iterator[Any]:
    """Open an empty page; errors of its scripts fail the test.  Skips without Chromium or Playwright."""
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    errors: list[str] = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(**settings).new_page()
        page.set_default_timeout(120_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        browser.close()
    assert errors == []
