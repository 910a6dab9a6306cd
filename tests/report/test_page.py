"""The page of a run report: what it shows, and what it mustn't need."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

import pytest
from support.run_reports import make_full_report, make_report, make_timeline

from batchllm_operator.prefixes.sharing import Histogram, LargeGroup, PlanSharing
from batchllm_operator.report import drawing, page
from batchllm_operator.report.drawing import draw
from batchllm_operator.report.page import render_report
from batchllm_operator.stored_plan.counts import NOTHING
from batchllm_operator.stored_plan.run_report import (
    AnswerSummary,
    Bill,
    ErrorKind,
    RunReport,
)

EVIL = "<script>alert(1)</script>\"'&{{ 7 * 7 }}"
SVG = re.compile(r"<svg.*?</svg>", re.DOTALL)


class Page(HTMLParser):
    """Counts elements, and keeps all text that is shown."""

    VOID = frozenset({"meta", "link", "br", "path", "use", "image"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += " ".join(data.split()) + " "

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for each, attributes in self.elements if each == tag]


def test_everything_that_the_issue_of_a_run_is_about_is_there(no_pictures: None) -> None:
    text = Page(render_report(make_full_report())).text.replace("\xa0", " ")
    for shown in (
        *("snippets, 2026-01-31", "published 2026-02-01 03:04 UTC", "/models/tiny"),
        *("1,234", "1,200", "56 of duplicate prompts, 0 reused", "34"),
        *("60.0 %", "61.2 % planned, 65.4 % optimal"),
        *("3,241", "800", "1 min 26 s", "40 s predicted", "$0.07", "$0.03 predicted"),
        *("55,000", "9,876", "60 of them valleys (12.5 % of the time); 2 preemptions"),
        *("… How to prune roses", "4,000"),
        *("null_value: column 'body' is null", "id=n-1", "id=n-2", "prompt_too_long"),
        *("id=b, lang=de", "A snippet."),
        *("/lake/out/_batchllm/snippets/2026-01-31/plan-0123456789abcdef/report.json",),
    ):
        assert shown in text, shown


def test_workers_are_named(no_pictures: None) -> None:
    report = make_full_report(num_workers=3, timelines=(make_timeline(5, worker=2),))
    shards = tuple(
        shard.model_copy(update={"worker": worker})
        for shard, worker in zip(report.shards, (2, 7, None, 8), strict=True)
    )
    html = render_report(report.model_copy(update={"shards": shards}))
    text = Page(html).text
    assert "4 shards, 3 workers" in text and "Worker 2, from shard 5" in text
    slowest = html.split('aria-label="Slowest shards"')[1].split("</table>")[0]
    assert re.findall(r'<th scope="row">(\d)</th><td class="number">(\d?)</td>', slowest) == [
        ("3", "8"),
        ("2", ""),
        ("1", "7"),
        ("0", "2"),
    ]
    assert "workers" not in Page(render_report(make_full_report(num_workers=0))).text


def test_what_no_gpu_ran_is_marked_as_predicted(no_pictures: None) -> None:
    bill = Bill(gpu_s=None, usd_per_hour=3.6, gpu="H100", predicted_gpu_s=40.0)
    text = Page(render_report(make_full_report(bill=bill))).text.replace("\xa0", " ")
    assert "GPU time, predicted 40 s for H100; none was measured" in text
    assert "Cost, predicted $0.04 for H100; none was measured" in text
    unknown = Bill(gpu_s=None, usd_per_hour=None)
    assert "predicted" not in Page(render_report(make_full_report(bill=unknown, shards=()))).text


def labelled(**counts: int) -> AnswerSummary:
    return AnswerSummary(counts={"label": counts}, means={"probability": 0.75})


def test_labels_are_a_chart_with_the_mean_probability() -> None:
    errors = {"invalid_output": 300}
    answers = labelled(relevant=900, irrelevant=300)
    html = render_report(make_full_report(answers=answers, errors_by_kind=errors))
    text = Page(html).text.replace("\xa0", " ")
    for shown in (
        "Bars of rows by label: 2 values, most of the rows, 75.0 %, with relevant",
        *("Mean probability 0.75", "Invalid outputs 300 24.3 % of the answers"),
    ):
        assert shown in text, shown
    chart = html.split("<h2>Answers</h2>")[1].split("</figure>")[0]
    assert re.findall(r'<th scope="row">(\w+)</th><td class="number">(\d+)', chart) == [
        ("relevant", "900"),
        ("irrelevant", "300"),
    ]
    assert "<h2>Answers</h2>" not in render_report(make_full_report())


@pytest.mark.parametrize(
    "label",
    [
        EVIL,
        "]]>--><!-- $x^2$ \\frac{",
        "\u4e2d\u6587 \u0639\u0631\u0628\u064a",
        "a\nb\x00",
        "\U0001f642",
    ],
)
def test_a_chart_takes_any_label(label: str) -> None:
    answers = AnswerSummary(counts={"label": {label: 3, "other": 1}})
    html = render_report(make_full_report(answers=answers))
    assert "<script" not in html
    chart = html.split("<h2>Answers</h2>")[1].split("</figure>")[0]
    pictures = [ET.fromstring(each) for each in SVG.findall(chart)]
    assert len(pictures) == 2
    clipped = label if label.isprintable() else repr(label)
    name = clipped if len(clipped) <= 24 else f"{clipped[:23]}\u2026"
    for picture in pictures:
        assert name in "".join(picture.itertext())


def evil_reports() -> list[dict[str, Any]]:
    error = ErrorKind(kind=EVIL, num_rows=1, example_keys=({EVIL: EVIL},), example_error=EVIL)
    group = LargeGroup(num_requests=2, num_prefix_tokens=1, num_saved_tokens=1, first_words=EVIL)
    empty = Histogram(edges=(), counts=())
    return [
        {"job": EVIL, "ds": EVIL, "model": EVIL, "table_uri": EVIL, "plan_uri": EVIL},
        {"errors": (error,), "errors_by_kind": {EVIL: 1}},
        {
            "sharing": PlanSharing(
                prefix_lengths=empty, share_degrees=empty, largest_groups=(group,)
            )
        },
        {"sample_rows": ({"key": {EVIL: EVIL}, "generated_text": EVIL},)},
    ]


@pytest.mark.parametrize("changes", evil_reports())
def test_words_of_strangers_stay_words(no_pictures: None, changes: dict[str, Any]) -> None:
    html = render_report(make_full_report(**changes))
    assert "<script" not in html
    found = Page(html)
    assert "<script>alert(1)</script>" in found.text
    assert "{{ 7 * 7 }}" in found.text


def test_it_needs_no_script_and_nothing_from_elsewhere() -> None:
    found = Page(render_report(make_full_report()))
    assert not found.of("script") and not found.of("iframe") and not found.of("img")
    addresses = [
        value
        for _, attributes in found.elements
        for name, value in attributes.items()
        if name.endswith(("href", "src")) and value is not None
    ]
    assert all(value.startswith(("#", "data:")) for value in addresses), addresses
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)


def test_each_plot_has_words_and_a_table_behind_it() -> None:
    html = render_report(make_full_report())
    found = Page(html)
    pictures = found.of("svg")
    assert len(pictures) == 2 * 7, "each of saving, tokens, 2 timelines, 2 histograms, shards"
    assert all(each["role"] == "img" and each["aria-label"] for each in pictures)
    figures = re.findall(r"<figure>.*?</figure>", html, re.DOTALL)
    assert len(figures) == 7
    for figure in figures:
        assert figure.count("<svg") == 2 and "<figcaption>" in figure
        assert "<details>" in figure and "<table>" in figure


def test_pictures_are_whole_and_in_the_pages_colours() -> None:
    pictures = SVG.findall(render_report(make_full_report()))
    for picture in pictures:
        ET.fromstring(picture.replace("xlink:href", "href"))
        assert "var(--" in picture
        assert not re.search(r"#0a[0-9a-f]{2}b7", picture)
        assert "DejaVu" not in picture
    ids = [each for picture in pictures for each in re.findall(r'\bid="([^"]*)"', picture)]
    assert len(ids) == len(set(ids)), "a clip of one picture isn't that of another"
    used = {each for picture in pictures for each in re.findall(r"url\(#([^)]*)\)", picture)}
    assert used <= set(ids)


def test_without_matplotlib_a_page_has_words_and_tables_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (drawing, page):
        monkeypatch.setattr(module, "can_draw", lambda: False)
    page._draw.cache_clear()
    html = render_report(make_full_report())
    page._draw.cache_clear()
    assert "<svg" not in html and html.count("<figcaption>") == html.count("<details>") == 7
    assert "This page has no pictures" in html and "<code>report</code>" in html


def test_the_same_report_gives_the_same_page() -> None:
    first = render_report(make_full_report())
    page._draw.cache_clear()
    assert render_report(make_full_report()) == first


NO_WORK: dict[str, Any] = {
    "plan": {"num_requests": 0, "num_logical_tokens": 0},
    "done": dict(NOTHING),
    "shards": (),
    "timelines": (),
}


@pytest.mark.parametrize(
    "report",
    [
        make_report(),
        make_report(errors_by_kind={}),
        make_full_report(timelines=(), errors=(), errors_by_kind={}),
        make_full_report(timelines=(make_timeline(num_bins=1),)),
        make_report(**NO_WORK, sample_rows=(), errors_by_kind={}),
        make_full_report(
            done={"num_logical_tokens": 30_000, "num_prompt_tokens": 30_000, "num_cached_tokens": 0}
        ),
    ],
    ids=["least", "without-errors", "no-trace", "one-bin", "empty", "recomputed"],
)
def test_reports_with_less_in_them_are_pages_too(report: RunReport) -> None:
    found = Page(render_report(report))
    assert f"{report.job}, {report.ds}" in found.text
    assert len(found.of("h1")) == len(found.of("main")) == 1


def test_links_above_it_are_shown_where_there_are_some() -> None:
    found = Page(render_report(make_report(), trail=[("Jobs", "/batchllm/")]))
    assert found.of("a") == [{"href": "/batchllm/"}]
    assert not Page(render_report(make_report())).of("nav")


def test_of_a_run_with_nothing_to_generate_no_plots_are_drawn() -> None:
    html = render_report(make_full_report(**NO_WORK))
    found = Page(html)
    assert "There was nothing to generate." in found.text
    assert "Prompt tokens saved unknown unknown planned, unknown optimal" in found.text.replace(
        "\xa0", " "
    )
    assert found.of("svg") == []


def test_numbers_beside_an_axis_arent_rounded() -> None:
    plot = draw(
        "Title",
        "alt",
        ("A", "B"),
        [],
        lambda figure, _: figure.subplots().set_xticks([0.0, 0.005, 0.0125]),
        heights=(1.0, 1.0),
    )
    assert ">0.0050<" in plot.wide and ">0.0125<" in plot.wide
    in_tags = " ".join(re.findall(r"<[^>]*>", plot.wide))
    assert not re.search(r"[0-9][.][0-9]{3}", in_tags)
