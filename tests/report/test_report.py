"""The run report: what is stored, and what is printed."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from support.run_reports import make_full_report, make_report, make_timeline

from batchllm_operator.commit import earlier
from batchllm_operator.commit import report as run_report
from batchllm_operator.errors import PlanError
from batchllm_operator.prefixes import sharing
from batchllm_operator.report import format_summary, share, summary, timelines
from batchllm_operator.report.page import render_report
from batchllm_operator.report.pages import mean, usd
from batchllm_operator.shards import row_errors
from batchllm_operator.stored_plan.bill import Bill
from batchllm_operator.stored_plan.counts import NOTHING
from batchllm_operator.stored_plan.run_report import RunReport, SampleRow

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "reference" / "reports.md").read_text(encoding="utf-8")
BINS = [name for name, value in make_timeline() if isinstance(value, tuple)]


def summary_lines(**changes: Any) -> dict[str, str]:
    """The summary's lines by their first word."""
    lines = format_summary(make_report(**changes)).splitlines()
    return {line.split()[0]: " ".join(line.split()) for line in lines}


def test_the_summary_tells_what_the_job_did() -> None:
    lines = summary_lines()
    assert "snippets" in lines["job"]
    assert "2026-01-31" in lines["job"]
    assert "1,234 in, 1,200 out, 34 failed" in lines["rows"]
    assert "30 null_value, 4 prompt_too_long" in lines["rows"]
    assert "56 duplicates" in lines["rows"]
    assert "100,000 logical, 40,000 computed" in lines["prompt"]
    assert "60.0% of the prompt tokens achieved, 61.2% planned, 65.4% optimal" in lines["saved"]
    assert "3,241 computed prompt and 800 output tokens/s over 12.3 s" in lines["speed"]
    assert lines["table"] == "table /lake/out"
    assert lines["report"].endswith("/report.json")
    assert lines["model"] == "model /models/tiny"


def test_the_summary_shows_three_sample_rows_of_one_line_each() -> None:
    lines = format_summary(make_report()).splitlines()
    samples = lines[lines.index("  sample rows") + 1 :]
    assert samples[0] == "    id=a-1: 'A snippet.'"
    assert samples[1] == r"    id=b, lang=de: 'Zwei\nZeilen'"
    assert samples[2].startswith("    id=c: 'long long")
    assert samples[2].endswith("…'")
    assert len(samples) == 3
    assert all(len(line) <= 100 for line in samples)


def test_a_run_without_faults_and_rows_has_a_plain_summary() -> None:
    lines = summary_lines(errors_by_kind={}, sample_rows=())
    assert "0 failed, 56 duplicates" in lines["rows"]
    assert "sample" not in lines


@pytest.mark.parametrize(
    ("num_some", "num_all", "shown"),
    [
        (0, 0, "0 %"),
        (0, 7, "0 %"),
        (7, 7, "100 %"),
        (3, 1500, "0.2 %"),
        (1, 1_000_000, "under 0.1 %"),
        (999_999, 1_000_000, "over 99.9 %"),
    ],
)
def test_a_share_is_none_or_all_only_if_it_is(num_some: int, num_all: int, shown: str) -> None:
    assert share(num_some, num_all) == shown


def test_control_characters_of_a_row_do_not_reach_the_terminal() -> None:
    sample = SampleRow(key={"id": "a\x1b[2J\nb"}, generated_text="\x1b[2J\r\x07")
    shown = format_summary(make_report(sample_rows=(sample,)))
    assert "\x1b" not in shown
    assert shown.splitlines()[-2] == "  sample rows"


@pytest.mark.parametrize("report", [make_report(), make_full_report()])
def test_a_report_survives_being_stored(report: RunReport) -> None:
    assert RunReport.from_bytes(report.model_dump_json().encode(), source="x") == report


def test_figures_are_numbers_and_uris_for_other_programs() -> None:
    figures = make_full_report().figures()
    assert json.loads(json.dumps(figures)) == figures
    assert figures["gpu_s"] == 86.0
    assert figures["cost_usd"] == pytest.approx(86 / 3600 * 3)
    assert figures["rows_per_s"] == pytest.approx(1200 / 12.34, abs=1e-3)
    assert not {"sample_rows", "errors", "sharing"} & figures.keys()
    unknown = make_report().figures()
    assert unknown["gpu_s"] is unknown["cost_usd"] is unknown["predicted_gpu_s"] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": {"num_rows": 10**400}},
        {"plan": {"num_rows": -1}},
        {"done": {"engine_s": 1e308}},
        {"done": {"num_cached_tokens": 10**400}},
        {"timelines": [{"kv_used": []}]},
        {"timelines": [{"kv_held": [0.5]}]},
        {"timelines": [{"valley": [2.0] * 60}]},
        {"timelines": [{"bin_s": 0.0}]},
        {"timelines": [dict.fromkeys(BINS, [0.5] * 5000)]},
        {"sharing": {"prefix_lengths": {"edges": [4, 4], "counts": [1]}}},
    ],
)
def test_a_report_that_cant_be_drawn_cant_be_read(changes: dict[str, Any]) -> None:
    stored = json.loads(make_full_report().model_dump_json())
    for name, value in changes.items():
        if name == "timelines":
            stored[name][0].update(value[0])
        elif isinstance(value, dict):
            stored[name].update(value)
        else:
            stored[name] = value
    with pytest.raises(PlanError, match="report plan: "):
        RunReport.from_bytes(json.dumps(stored).encode(), source="plan")


def test_where_nothing_was_generated_ratios_and_speeds_are_unknown() -> None:
    plan = {"num_requests": 0, "num_logical_tokens": 0, "num_reused_rows": 1200}
    nothing = make_report(plan=plan, done=dict(NOTHING))
    names = ("achieved_saving_ratio", "planned_saving_ratio", "optimal_saving_ratio")
    figures = nothing.figures()
    speeds = ("computed_tokens_per_s", "output_tokens_per_s", "rows_per_s")
    assert [figures[name] for name in (*names, *speeds)] == [None] * 6
    text = format_summary(nothing)
    assert "unknown of the prompt tokens achieved, unknown planned, unknown optimal" in text
    assert "speed          unknown over" in text


def test_saved_tokens_time_and_money_are_three_numbers() -> None:
    lines = format_summary(make_full_report()).splitlines()
    saved = [line.strip() for line in lines if line.startswith("  saved")]
    assert saved == [
        "saved tokens   60.0% of the prompt tokens achieved, 61.2% planned, 65.4% optimal",
        "saved time     50 s of 1 min 30 s of GPU time (55.6%), predicted for H100 against each row"
        " alone",
        "saved money    $0.04 of $0.08, predicted, at $3.00 an hour",
    ]
    figures = make_full_report().figures()
    assert (figures["num_saved_tokens"], figures["predicted_saved_gpu_s"]) == (60_000, 50.0)
    assert figures["predicted_saved_cost_usd"] == pytest.approx(50 / 3600 * 3)


def test_means_and_bounds_are_shown_without_exponents() -> None:
    assert [mean(value) for value in (0.12345, 999.96, 9999.4, 12_345.6, 1e7 + 1)] == [
        *("0.1235", "1,000", "9,999", "12,346", "10,000,001")
    ]


def test_what_a_run_would_have_cost_is_measured_time_by_the_prediction_for_what_was_computed() -> (
    None
):
    bill = make_full_report().bill

    def alone_s(saved: float = 0.5, **changes: Any) -> float | None:
        """Of a plan that is to save half, of which a share was reached."""
        return make_full_report(
            bill=bill.model_copy(update=changes),
            plan={"num_planned_tokens": 50_000},
            done={"num_prompt_tokens": 100_000, "num_cached_tokens": round(100_000 * saved)},
        ).unshared_gpu_s

    # 20 s of starts, 66 s of generating; 40 s are predicted for the plan, 90 s for rows alone.
    assert alone_s() == pytest.approx(20 + 66 * 90 / 40)
    assert alone_s(saved=0.25) == pytest.approx(20 + 66 * 90 / 65)
    assert alone_s(saved=0.0) == pytest.approx(86), "nothing was saved"
    # Where decoding dominates, sharing half of the prompts' tokens saves little.
    assert alone_s(predicted_gpu_s=85.0) == pytest.approx(20 + 66 * 90 / 85)
    assert alone_s(predicted_gpu_s=0.0) is None
    for name in ("gpu_s", "start_gpu_s", "predicted_gpu_s", "unshared_gpu_s"):
        assert alone_s(**{name: None}) is None, name
    figures = make_full_report().figures()
    assert figures["unshared_cost_usd"] == pytest.approx(figures["unshared_gpu_s"] / 1200)


def test_the_summary_leads_with_money_and_says_how_to_retry() -> None:
    lines = format_summary(make_full_report()).splitlines()
    assert lines[1] == (
        "  cost           $0.07; without sharing $0.14, estimated; $0.08 for partition 2026-01-30"
    )
    assert f"  retry          {make_full_report().retry}" in lines
    unpriced = Bill(gpu_s=86.0, usd_per_hour=None)
    assert format_summary(make_full_report(bill=unpriced)).splitlines()[1] == (
        "  GPU time       1 min 26 s; planner.target_gpu gives it a price"
    )


def test_a_saving_that_nothing_predicted_is_not_claimed() -> None:
    assert "saved time" not in format_summary(make_report())
    report = make_full_report(bill=Bill(gpu_s=7.0, usd_per_hour=None))
    assert report.figures()["predicted_saved_gpu_s"] is None
    assert "saved, predicted" not in render_report(report)


@pytest.mark.parametrize(
    ("amount", "printed"), [(0.0, "$0.00"), (0.004, "under $0.01"), (1234.5, "$1,234.50")]
)
def test_prices(amount: float, printed: str) -> None:
    assert usd(amount) == printed


@pytest.mark.parametrize(
    ("seconds", "printed"),
    [(0.0, "0 s"), (0.0123, "0.0123 s"), (72.6, "72.6 s"), (141.6, "2.36 min"), (9000.0, "2.5 h")],
)
def test_predicted_times_have_a_unit_that_reads_well(seconds: float, printed: str) -> None:
    assert summary._duration(seconds) == printed


# docs/reference/reports.md


def test_numbers_in_it_are_those_of_the_code() -> None:
    words = {3: "three", 10: "ten", 20: "twenty", 100: "a hundred"}
    text = " ".join(f"{TEXT} {inspect.getsource(RunReport)}".lower().split())
    for number, phrase in (
        (timelines.NUM_BINS, "in at most {} bins"),
        (run_report._NUM_TIMELINES, "the {} shards that took longest"),
        (row_errors._NUM_KINDS, "the {} most frequent kinds"),
        (row_errors.NUM_SHOWN, "{} failed rows"),
        (earlier._NUM_EARLIER, "up to {} partitions before"),
        (sharing._NUM_NODES, "the {} nodes at and below which most"),
        (sharing._NUM_GROUPS, "the {} groups that save most"),
    ):
        assert phrase.format(words.get(number, number)) in text, phrase
