"""Headless Chromium, where there is one: a page in it, and what it must not do there."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "build" / "screenshots"
Look = tuple[int, str]
LOOKS: tuple[Look, ...] = ((1280, "light"), (390, "dark"))
"""Widths of a desk and of a phone, each with a colour scheme."""
# The first one is for containers without user namespaces; the others keep Chromium to itself.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# Airflow 3.3 says it of its own frame around any plugin's page.
_AIRFLOWS_OWN = "An iframe which has both allow-scripts and allow-same-origin"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser. Without one tests are skipped, but not where CI has to have it.

    Playwright keeps an event loop running in this thread, so no other file's tests may meet it.
    """
    if find_spec("playwright") is None:
        pytest.skip("this environment has no browser: those of other releases of Airflow")
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


@dataclass
class Tab:
    """A page of the browser, and all that went wrong in it."""

    page: Any
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._listen)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("requestfailed", self._note_failure)
        self.page.on("response", self._note_status)

    def check(self) -> None:
        """Nothing has gone wrong since the last time."""
        faults, self.faults = self.faults, []
        assert faults == [], faults

    def screenshot(self, name: str) -> None:
        """Keep what the whole page looks like, under build/screenshots/."""
        is_dark = self.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        width = self.page.viewport_size["width"]
        path = SCREENSHOTS / f"{name}-{width}-{'dark' if is_dark else 'light'}.png"
        self.page.screenshot(path=path, full_page=True)
        assert path.stat().st_size > 5000, "a blank page is smaller"

    def serious_findings(self) -> list[str]:
        """What axe finds on the page that is serious or worse."""
        from axe_playwright_python.sync_playwright import Axe

        violations = Axe().run(self.page).response["violations"]
        return [
            f"{each['id']} ({each['impact']}): {[node['html'][:200] for node in each['nodes']]}"
            for each in violations
            if each["impact"] in ("serious", "critical")
        ]

    def sideways_px(self) -> int:
        """By how much the page is wider than the window."""
        widths = "[document.documentElement.scrollWidth, window.innerWidth]"
        page_px, window_px = self.page.evaluate(widths)
        return int(page_px) - int(window_px)

    def _listen(self, message: Any) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(_AIRFLOWS_OWN):
            self.faults.append(f"console: {message.text}")

    def _note_failure(self, request: Any) -> None:
        # A page that is left drops what it has asked for.
        if request.failure != "net::ERR_ABORTED":
            self.faults.append(f"{request.url}: {request.failure}")

    def _note_status(self, response: Any) -> None:
        if response.status >= 400:
            self.faults.append(f"{response.url}: {response.status}")
