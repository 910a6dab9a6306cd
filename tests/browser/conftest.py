"""Headless Chromium, where there is one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from support.browser import ARGUMENTS, SCREENSHOTS


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser. Without one tests are skipped, but not where CI has to have it.

    Playwright keeps an event loop running in this thread, so no other file's tests may meet it.
    """
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("there is no chromium: .ci/run installs it")
        pytest.skip("there is no chromium (Debian's package `chromium`)")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield browser
        browser.close()
