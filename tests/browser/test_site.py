"""The documentation's site as a folder, without a network: `make site` has made it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import LOOKS, Look, Tab

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = (
    *("index", "start/first-job", "howto/ranking", "reference/job-spec", "reference/operators"),
    *("understand/plan", "operate/troubleshooting", "adr/index", "repo/ARCHITECTURE"),
)


@pytest.fixture(params=LOOKS, ids=str)
def look(request: pytest.FixtureRequest) -> Look:
    chosen: Look = request.param
    return chosen


@pytest.fixture
def tab(look: Look, chromium: Any) -> Iterator[Tab]:
    if not (SITE / "index.html").exists():
        if "CI" in os.environ:
            pytest.fail("there is no site: .ci/run makes it before the tests")
        pytest.skip("there is no site: run `make site`")
    width, scheme = look
    context = chromium.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    yield Tab(context.new_page())
    context.close()


def test_pages_are_whole_without_a_network(tab: Tab) -> None:
    asked_for: list[str] = []
    tab.page.on("request", lambda request: asked_for.append(request.url))
    for page in PAGES:
        tab.page.goto((SITE / f"{page}.html").as_uri())
        assert tab.sideways_px() <= 0, page
        if not page.startswith("reference/"):  # they are long
            tab.screenshot(f"site-{page.replace('/', '-')}")
    assert [url for url in asked_for if not url.startswith(("file:", "data:", "blob:"))] == []
    tab.check()


def test_pages_can_be_read_by_all(tab: Tab) -> None:
    for page in ("index", "start/first-job", "operate/troubleshooting"):
        tab.page.goto((SITE / f"{page}.html").as_uri())
        assert tab.serious_findings() == [], page


def test_the_search_finds_a_field_of_the_spec(tab: Tab) -> None:
    tab.page.goto((SITE / "index.html").as_uri())
    tab.page.keyboard.press("f")
    tab.page.keyboard.type("max_model_len")
    result = tab.page.locator(".md-search-result__link[href*='engine.max_model_len']")
    result.first.wait_for(state="attached")
    tab.check()
