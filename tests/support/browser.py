"""A page in headless Chromium, and what it must not do there."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "build" / "screenshots"
WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")
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
