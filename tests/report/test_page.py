"""The page of a run report: what it shows, and what it mustn't need."""

import re
from typing import Any

import pytest
from support.html_page import Page
from support.run_reports import make_full_report, make_report, make_timeline

from batchllm_operator.prefixes.sharing import Histogram, LargeGroup, PlanSharing
from batchllm_operator.report.page import render_report
from batchllm_operator.report.pages import usd
from batchllm_operator.stored_plan.bill import Bill, EarlierRun
from batchllm_operator.stored_plan.counts import NOTHING
from batchllm_operator.stored_plan.run_report import (
    AnswerSummary,
    ErrorKind,
    FailedRow,
    RunReport,
)
from batchllm_operator.stored_plan.timeline import WorkBar

EVIL = "<script>alert(1)</script>\"'&{{ 7 * 7 }}"


def test_everything_that_the_issue_of_a_run_is_about_is_there() -> None:
    text = Page(render_report(make_full_report())).text.replace("\xa0", " ")
    for shown in (
        *("snippets, 2026-01-31", "published 2026-02-01 03:04 UTC", "/models/tiny"),
        *("1,234", "1,200", "56 of duplicate prompts, 0 reused", "34"),
        *("60.0 %", "61.2 % planned, 65.4 % optimal"),
        *("3,241", "800", "1 min 26 s", "40 s predicted", "$0.07", "$0.03 predicted"),
        *("55,000", "9,876", "60 of them valleys (12.5 % of the time); 2 preemptions"),
        *("… How to prune roses", "4,000"),
        *("null_value: 30 rows, the first 2", "id=n-1", "id=n-2", "column 'body' is null"),
        *("prompt_too_long: 4 rows, the first 1", "--retry /lake/out/_batchllm/snippets"),
        "40 \N{MULTIPLICATION SIGN} 900, 64.2 %",
        *("2 workers over 44 s: 4 attempts at 4 shards, 1 of them took over", "2 silent"),
        *("id=b, lang=de", "A snippet."),
        *("/lake/out/_batchllm/snippets/2026-01-31/plan-0123456789abcdef/report.json",),
    ):
        assert shown in text, shown


def test_workers_are_named() -> None:
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
    assert "workers" not in Page(render_report(make_full_report(num_workers=0, work=()))).text


def test_what_no_gpu_ran_is_marked_as_predicted() -> None:
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


@pytest.mark.parametrize("label", [EVIL, "]]>--><!-- $x^2$ \\frac{", "\u4e2d\u6587", "a\nb\x00"])
def test_a_chart_takes_any_label(label: str) -> None:
    answers = AnswerSummary(counts={"label": {label: 3, "other": 1}})
    html = render_report(make_full_report(answers=answers))
    assert "<script" not in html
    chart = Page(html.split("<h2>Answers</h2>")[1].split("<figcaption>")[0] + "</figure>")
    shown = label if label.isprintable() else repr(label)
    name = shown if len(shown) <= 32 else f"{shown[:31]}\u2026"
    assert " ".join(name.split()) in chart.text and "75.0" in chart.text


def evil_reports() -> list[dict[str, Any]]:
    error = ErrorKind(kind=EVIL, num_rows=1, example_keys=({EVIL: EVIL},), example_error=EVIL)
    row = FailedRow({EVIL: EVIL}, EVIL, EVIL, EVIL)
    days = EarlierRun(
        ds=EVIL,
        num_rows=1,
        num_failed_rows=0,
        achieved_saving=None,
        gpu_s=1,
        cost_usd=1,
        unshared_usd=None,
    )
    bars = [
        WorkBar(worker=0, host=host, shard_idx=0, attempt=1, start_s=0, end_s=1, ending="failed")
        for host in (EVIL, "b")
    ]
    group = LargeGroup(num_requests=2, num_prefix_tokens=1, num_saved_tokens=1, first_words=EVIL)
    empty = Histogram(edges=(), counts=())
    return [
        {"job": EVIL, "ds": EVIL, "model": EVIL, "table_uri": EVIL, "plan_uri": EVIL},
        {"errors": (error,), "errors_by_kind": {EVIL: 1}, "failed_rows": ()},
        {"failed_rows": (row,), "errors_by_kind": {EVIL: 1}, "retry": EVIL},
        {"earlier": (days,)},
        {"work": tuple(bars)},
        {
            "sharing": PlanSharing(
                prefix_lengths=empty, share_degrees=empty, largest_groups=(group,)
            )
        },
        {"sample_rows": ({"key": {EVIL: EVIL}, "generated_text": EVIL},)},
    ]


@pytest.mark.parametrize("changes", evil_reports())
def test_words_of_strangers_stay_words(changes: dict[str, Any]) -> None:
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
    pictures = [
        attributes for _, attributes in Page(html).elements if attributes.get("role") == "img"
    ]
    assert len(pictures) == 6 + 2 * 2, "cost, saving, tokens, 2 histograms, work; 2 timelines"
    assert all(picture["aria-label"] for picture in pictures)
    figures = re.findall(r"<figure>.*?</figure>", html, re.DOTALL)
    assert len(figures) == 9, "the prefix tree, too"
    for figure in figures:
        assert "<figcaption>" in figure and "<details>" in figure and "<table>" in figure


def test_bars_are_as_long_as_their_numbers() -> None:
    html = render_report(make_full_report())
    shares = {
        title: re.findall(r"--share: ([0-9.]+); background: var\(--(\w+)\)", chart)
        for title, chart in zip(
            ("costs", "saving", "tokens", "lengths", "degrees"),
            re.findall(r'<div class="bars".*?</div>', html, re.DOTALL),
            strict=True,
        )
    }
    assert shares["costs"] == [
        *(("0.8337", "muted"), ("0.0", "muted"), ("1.0", "muted"), ("0.8958", "decode"))
    ]
    assert shares["saving"] == [("0.654", "muted"), ("0.612", "decode"), ("0.6", "prefix")]
    assert [share for share, _ in shares["lengths"]] == ["0.1", "1.0", "0.15"]
    recomputed = {"num_logical_tokens": 30_000, "num_prompt_tokens": 40_000, "num_cached_tokens": 0}
    assert "--share: 0.0;" in render_report(make_full_report(done=recomputed)), "never below 0"


def test_areas_of_a_timeline_are_stacked_under_the_chunk_size() -> None:
    line = make_timeline(num_bins=2, chunk_size=1000, kv_used=(0.25, 1.0), kv_held=(0.0, 0.0))
    html = render_report(make_full_report(timelines=(line,)))
    tokens, kv = re.findall(r'<svg class="panel".*?</svg>', html, re.DOTALL)
    prefix, distinct, decode = re.findall(r'd="([^"]*)" style="fill: var\(--\w+\)', tokens)
    heights = [[float(y) for y in re.findall(r"V([0-9.]+)H", path)] for path in (decode, distinct)]
    percent = 1.08 * (101 + 890 + 700) / 100  # of the panel, in tokens
    for found, tops in zip(heights, ((100, 101), (1000, 991)), strict=True):
        assert found == pytest.approx([100 - top / percent for top in tops], abs=0.1)
    assert prefix.startswith("M0 100V") and prefix.endswith("H2V100Z")
    assert f'y1="{100 - 1000 / percent:.1f}"' in tokens, "the chunk size"
    assert "M0 100V75.0H1V0.0H2V100Z" in kv and kv.count("<path") == 1, "nothing is held"


NO_WORK: dict[str, Any] = {
    "plan": {"num_requests": 0, "num_logical_tokens": 0},
    "done": dict(NOTHING),
    "shards": (),
    "timelines": (),
    "work": (),
    "earlier": (),
    "sharing": make_report().sharing,
}


@pytest.mark.parametrize(
    "report",
    [
        make_report(),
        make_report(errors_by_kind={}),
        make_full_report(timelines=(), errors=(), errors_by_kind={}, failed_rows=()),
        make_full_report(failed_rows=(), work=(), earlier=(), retry=None),
        make_full_report(timelines=(make_timeline(num_bins=1),)),
        make_report(**NO_WORK, sample_rows=(), errors_by_kind={}),
        make_full_report(
            done={"num_logical_tokens": 30_000, "num_prompt_tokens": 30_000, "num_cached_tokens": 0}
        ),
    ],
    ids=["least", "without-errors", "no-trace", "older", "one-bin", "empty", "recomputed"],
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
    assert not [each for _, each in found.elements if each.get("role") == "img"]


def test_money_comes_first_with_what_it_would_have_been() -> None:
    html = render_report(make_full_report())
    facts = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html)
    text = [(name, value.replace("\xa0", " ")) for name, value in facts[:5]]
    assert text == [
        ("Cost", "$0.07<small>$0.03 predicted</small>"),
        ("Without sharing, estimated", "$0.14<small>$0.07 saved, 47.9 %</small>"),
        ("Cost per 1,000 rows", "$0.06<small>$0.07 in partition 2026-01-30</small>"),
        ("GPU time", "1 min 26 s<small>40 s predicted</small>"),
        ("Failed", "34<small>2.8 %</small>"),
    ]
    sections = re.findall(r"<h2>(.*?)</h2>", html)
    assert sections[:3] == ["Cost by partition", "GPU time and cost", "Failed rows"]


def test_without_a_price_gpu_time_comes_first() -> None:
    report = make_full_report(
        bill=Bill(gpu_s=86.0, start_gpu_s=20.0, usd_per_hour=None), earlier=()
    )
    facts = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", render_report(report))
    assert facts[0] == (
        "GPU time",
        "1 min 26 s<small>no price: planner.target_gpu names none</small>",
    )
    assert report.unshared_gpu_s is None


def test_partitions_are_compared_by_gpu_time_without_a_price_and_not_at_all_without_either() -> (
    None
):
    free = Bill(gpu_s=86.0, usd_per_hour=None)
    before = make_full_report().earlier
    unpriced = [run.model_copy(update={"cost_usd": None}) for run in before]
    html = render_report(make_full_report(bill=free, earlier=tuple(unpriced)))
    bars = re.findall(r'<div class="bars".*?</div>', html, re.DOTALL)[0]
    shown = re.findall(r"</i>(.*?)</span>", bars)
    assert shown == ["1 min 20 s", "unknown", "1 min 36 s", "1 min 26 s"]
    unknown = Bill(gpu_s=None, usd_per_hour=None)
    for earlier in ((), before[1:2]):
        assert "Cost by partition" not in render_report(
            make_full_report(bill=unknown, earlier=earlier)
        )


def test_a_page_of_ten_thousand_shards_stays_small() -> None:
    shards = make_full_report().shards
    many = tuple(shards[idx % 4].model_copy(update={"shard_idx": idx}) for idx in range(10_000))
    assert len(render_report(make_full_report(shards=many))) < 100_000


def test_a_run_that_cost_more_than_without_sharing_says_so() -> None:
    assert (usd(-5.0), usd(-0.001), usd(0.0), usd(1234.5)) == (
        "-$5.00",
        "under $0.01",
        "$0.00",
        "$1,234.50",
    )
