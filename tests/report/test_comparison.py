"""Two runs side by side."""

from typing import Any

import pytest
from support.run_reports import PLAN_URI, make_full_report, make_report, make_timeline

from batchllm_operator.report.comparison import (
    Comparison,
    Measure,
    compare,
    format_comparison,
    render_comparison,
)
from batchllm_operator.stored_plan.bill import Bill
from batchllm_operator.stored_plan.counts import NOTHING
from batchllm_operator.stored_plan.run_report import AnswerSummary

LESS_SAVED = {"done": {"num_cached_tokens": 45_000}}


def measures(comparison: Comparison) -> dict[str, Measure]:
    return {each.name: each for section in comparison.sections.values() for each in section}


def against(**changes: Any) -> Comparison:
    """A full report against one of the next day, with changes."""
    later = {"ds": "2026-02-01", "plan_uri": f"{PLAN_URI[:-1]}0", **changes}
    return compare(make_full_report(), make_full_report(**later))


@pytest.mark.parametrize(
    ("changes", "name", "change", "verdict"),
    [
        ({"plan": {"num_rows": 2468}}, "Rows in", "+100.0\xa0%", "changed"),
        ({"plan": {"num_duplicate_rows": 56}}, "Duplicate rows", "+0.0\xa0%", "same"),
        ({"plan": {"num_reused_rows": 7}}, "Reused rows", "new", "changed"),
        (LESS_SAVED, "Prompt tokens saved", "-10.0 points", "worse"),
        ({"done": {"num_cached_tokens": 55_500}}, "Prompt tokens saved", "+0.5 points", "same"),
        ({"plan": {"num_optimal_tokens": 10_000}}, "Optimal", "+24.6 points", "changed"),
        ({"done": {"engine_s": 6.17}}, "Rows per second", "+100.0\xa0%", "better"),
        ({"errors_by_kind": {"null_value": 37}}, "Failed rows", "+0.2 points", "worse"),
        ({"errors_by_kind": {}}, "of them null_value", "-2.4 points", "better"),
        ({"bill": Bill(gpu_s=None, usd_per_hour=None)}, "Cost", "", ""),
        (
            {"timelines": (make_timeline(valley_share=0.5),)},
            "Time in valleys",
            "+37.5 points",
            "worse",
        ),
    ],
)
def test_what_has_changed(changes: dict[str, Any], name: str, change: str, verdict: str) -> None:
    found = measures(against(**changes))[name]
    assert (found.change, found.verdict) == (change, verdict)


def test_answers_are_compared_by_share() -> None:
    before = AnswerSummary(
        counts={"label": {"yes": 30, "no": 10}}, means={"probability": 0.75, "mean_logprob": -1.0}
    )
    after = AnswerSummary(
        counts={"label": {"yes": 20, "maybe": 20}}, means={"probability": 0.5, "score": 2.0}
    )
    comparison = compare(
        make_full_report(answers=before, errors_by_kind={"invalid_output": 300}),
        make_full_report(answers=after, errors_by_kind={}),
    )
    found = {each.name: (each.change, each.verdict) for each in comparison.sections["Answers"]}
    assert found == {
        "label yes": ("-25.0 points", "changed"),
        "label no": ("-25.0 points", "changed"),
        "label maybe": ("+50.0 points", "changed"),
        "Mean probability": ("-0.250", "changed"),
        "Mean mean_logprob": ("", ""),
        "Mean score": ("", ""),
        "Invalid outputs": ("-24.3 points", "better"),
    }
    assert "label maybe" in format_comparison(comparison)
    assert "label maybe" in render_comparison(comparison)
    assert "Answers" not in against().sections


def test_a_label_that_is_no_line_of_text_is_shown_as_one() -> None:
    answers = AnswerSummary(counts={"label": {"a\nb": 1, "<b>": 1}})
    comparison = compare(make_full_report(), make_full_report(answers=answers))
    assert "label 'a\\nb'" in format_comparison(comparison)
    assert "&lt;b&gt;" in render_comparison(comparison)
    [measure, _] = comparison.sections["Answers"]
    assert (measure.before, measure.change) == ("unknown", "")


def test_cost_counts_by_row() -> None:
    bill = Bill(gpu_s=172.0, usd_per_hour=3.0)
    found = measures(against(plan={"num_rows": 4936}, bill=bill))
    assert found["Cost"].verdict == "changed"
    assert (found["Cost per 1,000 rows"].change, found["Cost per 1,000 rows"].verdict) == (
        "-50.0\xa0%",
        "better",
    )


def test_runs_that_are_hardly_comparable_say_so() -> None:
    report = make_report()
    assert compare(report, report).cautions == ("both are the same run",)
    other = make_report(job="ranking", model="/models/other", plan_uri="/elsewhere")
    assert compare(report, other).cautions == (
        "the job differs: snippets and ranking",
        "the model differs: /models/tiny and /models/other",
    )
    assert against().cautions == ()


def test_the_table_for_a_terminal_has_a_line_for_each_figure() -> None:
    comparison = against(**LESS_SAVED, job="<b>other</b>")
    lines = format_comparison(comparison).splitlines()
    num_measures = len(measures(comparison))
    assert len(lines) == 1 + len(comparison.sections) + num_measures + 1
    (achieved,) = (line for line in lines if "Prompt tokens saved" in line)
    assert achieved.split() == [
        *("Prompt", "tokens", "saved", "60.0", "%", "50.0", "%", "-10.0", "points", "worse")
    ]
    assert lines[-1] == "note: the job differs: snippets and <b>other</b>"


def test_the_page_shows_both_runs_and_escapes_them() -> None:
    html = render_comparison(against(**LESS_SAVED, job="<b>other</b>"))
    assert "<b>" not in html and "&lt;b&gt;other&lt;/b&gt;" in html
    assert "prompt tokens saved worse: -10.0 points" in html
    assert "-10.0 points" in html and "2026-02-01" in html


def test_worse_comes_first() -> None:
    found = against(done={"engine_s": 1e5, "num_cached_tokens": 85_000}).notable
    assert found[0].startswith("rows per second worse")
    assert any(text.startswith("prompt tokens saved better") for text in found)


def test_figures_unknown_in_either_run_get_no_verdict() -> None:
    known = make_full_report(answers=AnswerSummary(means={"score": 0.5}, embedding_size=8))
    unknown = make_report(plan={"num_rows": 0}, done={"engine_s": 0.0}, errors_by_kind={})
    for before, after in ((unknown, unknown), (unknown, known), (known, unknown)):
        comparison = compare(before, after)
        shown = [
            each for each in measures(comparison).values() if "unknown" in (each.before, each.after)
        ]
        assert {"Cost", "GPU time", "Failed rows"} <= {each.name for each in shown}
        assert {(each.change, each.verdict) for each in shown} == {("", "")}
        assert '<td class="muted"></td>' in render_comparison(comparison)


def test_a_run_that_generated_nothing_is_no_worse() -> None:
    plan = {"num_requests": 0, "num_logical_tokens": 0}
    comparison = against(plan=plan, done=dict(NOTHING), timelines=())
    found = measures(comparison)
    assert found["Prompt tokens saved"].after == found["Rows per second"].after == "unknown"
    assert comparison.notable == []
