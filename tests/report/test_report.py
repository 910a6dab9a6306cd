"""The run report: what is stored, and what is printed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchllm_operator.errors import ExitCode, PlanError
from batchllm_operator.report import RunReport, SampleRow, format_summary


def make_report(**changes: Any) -> RunReport:
    fields: dict[str, Any] = {
        "job": "snippets",
        "ds": "2026-01-31",
        "run_id": "snippets/2026-01-31/0123456789abcdef",
        "plan_uri": "/lake/out/_batchllm/snippets/2026-01-31/plan-0123456789abcdef",
        "table_uri": "/lake/out",
        "report_uri": "/lake/out/_batchllm/snippets/2026-01-31/plan-0123456789abcdef/report.json",
        "model": "/models/tiny",
        "num_rows_in": 1234,
        "num_rows_out": 1200,
        "num_rows_failed": 34,
        "num_rows_duplicate": 56,
        "errors_by_kind": {"prompt_too_long": 4, "null_value": 30},
        "num_requests": 1144,
        "num_groups": 300,
        "num_shared_groups": 250,
        "num_shards": 4,
        "num_logical_tokens": 100_000,
        "num_computed_tokens": 40_000,
        "num_output_tokens": 9_876,
        "optimal_saving_ratio": 0.654,
        "planned_saving_ratio": 0.612,
        "achieved_saving_ratio": 0.6,
        "engine_s": 12.34,
        "tokens_per_s": 4041.0,
        "sample_rows": (
            SampleRow(key={"id": "a-1"}, generated_text="A snippet."),
            SampleRow(key={"id": "b", "lang": "de"}, generated_text="Zwei\nZeilen"),
            SampleRow(key={"id": "c"}, generated_text="long " * 100),
        ),
        **changes,
    }
    return RunReport(**fields)


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
    assert "60.0% achieved, 61.2% planned, 65.4% optimal" in lines["saving"]
    assert "4,041 tokens/s" in lines["speed"]
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
    lines = summary_lines(num_rows_failed=0, errors_by_kind={}, sample_rows=())
    assert "0 failed, 56 duplicates" in lines["rows"]
    assert "sample" not in lines


def test_the_summary_ends_without_a_line_break() -> None:
    assert format_summary(make_report())[-1] != "\n"


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    sample = SampleRow(key={"id": "a"}, generated_text="\x1b[2J\r\x07")
    assert "\x1b" not in format_summary(make_report(sample_rows=(sample,)))


def test_control_characters_of_a_key_do_not_reach_the_terminal() -> None:
    sample = SampleRow(key={"id": "a\x1b[2J\nb"}, generated_text="x")
    shown = format_summary(make_report(sample_rows=(sample,)))
    assert "\x1b" not in shown
    assert shown.splitlines()[-2] == "  sample rows"


def test_a_report_survives_being_stored() -> None:
    report = make_report()
    assert RunReport.from_bytes(report.model_dump_json().encode(), source="x") == report


@pytest.mark.parametrize(
    "change", [{"report_version": 3}, {"report_version": None}, {"new_field": 1}, {"engine_s": "x"}]
)
def test_another_version_is_refused(change: dict[str, Any]) -> None:
    body = {**json.loads(make_report().model_dump_json()), **change}
    with pytest.raises(PlanError, match="/lake/plan-1") as caught:
        RunReport.from_bytes(json.dumps(body).encode(), source="/lake/plan-1")
    assert caught.value.exit_code == ExitCode.INVALID


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"{}"])
def test_what_is_no_report_is_refused(data: bytes) -> None:
    with pytest.raises(PlanError, match="can't be read"):
        RunReport.from_bytes(data, source="x")
