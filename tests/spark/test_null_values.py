"""Rows with null in a column of their prompt (`input.on_null`), where Spark makes the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.answers_job import published
from support.fake_job import DS, document_rows, fake_spec, finish, write_table

from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.spark import ranges, reading
from batchllm_operator.spark.plan_job import plan_on_spark


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(("on_null", "num_skipped"), [("skip", 14), ("empty", 0)])
def test_null_values_mean_what_they_mean_in_a_local_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_null: str, num_skipped: int
) -> None:
    monkeypatch.setattr(ranges, "RANGE_BYTES", 12_000)
    monkeypatch.setattr(reading, "PART_BYTES", 500)
    rows = document_rows(12, 10)
    for row in [*rows[:6], *rows[40:48]]:
        row["query"] = None
    write_table(tmp_path / "documents", rows)
    answers, counts = list[list[dict[str, Any]]](), []
    for name, make in (("local", plan_job), ("spark", plan_on_spark)):
        output = {"uri": f"{tmp_path}/{name}"}
        changes = {"planner": {"num_shards": None}, "max_failed_fraction": 0.0}
        spec = fake_spec(tmp_path, input={"on_null": on_null}, output=output, **changes)
        report = finish(plan := make(spec, DS))
        made = plan.manifest.counts
        counts.append((made.num_rows, made.num_unasked_rows, made.num_requests))
        assert (report.num_rows_in, report.num_failed_rows) == (120, 0)
        names = ("row_key", "status", "generated_text", "error")
        answers.append([{name: row[name] for name in names} for row in published(spec)])
    assert counts[0] == counts[1]
    assert counts[0][1] == num_skipped
    assert answers[0] == answers[1]
    assert [row["status"] for row in answers[1]].count("skipped") == num_skipped
