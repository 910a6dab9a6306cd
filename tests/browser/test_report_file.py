"""report.html as somebody gets it by mail: a file, without a network."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import LOOKS, Look, Tab
from support.run_reports import make_full_report, make_report

from batchllm_operator.report.comparison import compare, render_comparison
from batchllm_operator.report.page import render_report

PAGES = {
    "report-file": lambda: render_report(make_full_report()),
    "comparison-file": lambda: render_comparison(compare(make_report(), make_full_report())),
}


@pytest.fixture
def look() -> Look:
    """A phone's; `full/` has a desk's."""
    return LOOKS[1]


@pytest.fixture
def tab(look: Look, chromium: Any) -> Iterator[Tab]:
    width, scheme = look
    context = chromium.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    yield Tab(context.new_page())
    context.close()


@pytest.fixture
def report_tab(tab: Tab, tmp_path: Path) -> Tab:
    """With the report's file."""
    file = tmp_path / "report.html"
    file.write_text(PAGES["report-file"]())
    tab.page.goto(file.as_uri())
    return tab


@pytest.mark.parametrize("name", PAGES)
def test_it_can_be_read_by_everybody_everywhere(tab: Tab, name: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(PAGES[name]())
    asked_for: list[str] = []
    tab.page.on("request", lambda request: asked_for.append(request.url))
    tab.page.goto(file.as_uri())
    assert [url for url in asked_for if not url.startswith("data:")] == [file.as_uri()]
    assert tab.serious_findings() == []
    assert tab.sideways_px() <= 0
    width = tab.page.viewport_size["width"]
    scheme = (
        "dark"
        if tab.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        else "light"
    )
    tab.screenshot(f"{name}-{width}-{scheme}")
    tab.check()


def test_each_picture_can_be_seen_and_its_words_read(report_tab: Tab) -> None:
    figures = report_tab.page.locator("figure").all()
    assert len(figures) == 9
    for figure in figures:
        for picture in figure.locator("[role=img]").all():
            assert picture.is_visible() and picture.bounding_box()["height"] > 40
        sizes = figure.evaluate(
            "figure => [...figure.querySelectorAll('.bars span, .legend, .axis')].map("
            "text => parseFloat(getComputedStyle(text).fontSize))"
        )
        assert min(sizes, default=9) >= 9, "letters can be read"


def test_the_numbers_behind_a_picture_are_reached_by_the_keyboard(report_tab: Tab) -> None:
    table = report_tab.page.get_by_role("region", name="Cost by partition")
    assert not table.is_visible()
    report_tab.page.keyboard.press("Tab")
    focused = report_tab.page.evaluate("document.activeElement.textContent")
    assert focused == "Numbers: Cost by partition"
    report_tab.page.keyboard.press("Enter")
    assert table.is_visible()
    assert "Without sharing" in table.inner_text()


def test_a_box_of_the_prefix_tree_is_enlarged_without_a_script(report_tab: Tab) -> None:
    tree = report_tab.page.get_by_role("region", name="Prefix tree")
    links = tree.get_by_role("link").all()
    assert [link.is_visible() for link in links] == [True] * 5
    small, whole = links[2].bounding_box(), tree.bounding_box()
    assert small["width"] < 0.4 * whole["width"]
    links[1].focus()
    report_tab.page.keyboard.press("Enter")
    assert [link.is_visible() for link in links] == [True, True, True, True, False]
    assert links[1].bounding_box()["width"] > 0.95 * whole["width"]
    links[2].focus()
    report_tab.page.keyboard.press("Enter")
    assert [link.is_visible() for link in links] == [True, True, True, False, False]
    assert links[2].bounding_box()["width"] > 0.95 * whole["width"]
    links[0].click()
    assert links[2].bounding_box()["width"] == small["width"]
    report_tab.check()


def test_tables_scroll_in_boxes_that_show_it(report_tab: Tab) -> None:
    box = report_tab.page.get_by_role("region", name="Slowest shards")
    box.scroll_into_view_if_needed()
    more_px = box.evaluate("box => box.scrollWidth - box.clientWidth")
    assert (more_px > 0) == (report_tab.page.viewport_size["width"] < 500)
    place = box.bounding_box()
    assert place is not None
    edge = {"x": place["x"], "y": place["y"] + 1, "width": place["width"]}
    inside = {**edge, "height": place["height"] - 2}  # without pixels that it has a part of
    before = report_tab.page.screenshot(clip=inside)
    box.evaluate("box => { box.style.background = 'none'; }")
    after = report_tab.page.screenshot(clip=inside)
    assert (after != before) == (more_px > 0), "a shadow where there is more"
    box.focus()
    assert report_tab.page.evaluate("document.activeElement.getAttribute('aria-label')") == (
        "Slowest shards"
    )


def test_on_paper_pictures_are_dark_on_white(report_tab: Tab) -> None:
    report_tab.page.emulate_media(media="print")
    colours = report_tab.page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert colours == ["rgb(255, 255, 255)", "rgb(0, 0, 0)"]
    assert report_tab.page.locator("figure [role=img]:visible").count() == 10


def test_these_checks_notice_what_they_are_for(chromium: Any) -> None:
    page = chromium.new_page(viewport={"width": 390, "height": 900})
    tab = Tab(page)
    page.set_content(
        "<html lang=en><title>x</title><main><h1>x</h1><p style='color: #ccc'>pale</p>"
        "<img src='data:,'><div style='width: 500px'>wide</div>"
        "</main>"
    )
    page.evaluate("console.error('wrong')")
    findings = " ".join(tab.serious_findings())
    assert "color-contrast (serious)" in findings and "image-alt (critical)" in findings
    assert tab.sideways_px() > 100
    with pytest.raises(AssertionError, match="console: wrong"):
        tab.check()
    page.close()
