"""What becomes of rows with null in a column of their prompt: `input.on_null`."""

from pathlib import Path
from typing import Any

import pytest
from support.answers_job import published
from support.fake_job import DS, document_rows, fake_spec, finish, write_table
from support.prompts_job import rows_by_key, several

from batchllm_operator.answers.fakes import fake_text
from batchllm_operator.errors import FailedRowsError, SpecError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.report import format_plan, format_summary
from batchllm_operator.report.page import render_report

TURNS = {"turns": [{"role": "user", "template": "{document}|{query}"}], "template": None}


def put_nulls(folder: Path, num_nulls: int) -> list[dict[str, Any]]:
    rows = document_rows(4, 5)
    for row in rows[:num_nulls]:
        row["query"] = None
    write_table(folder / "documents", rows)
    return rows


@pytest.mark.parametrize("prompt", [{}, TURNS], ids=["template", "turns"])
@pytest.mark.parametrize("on_null", ["skip", "empty"])
def test_a_null_value_fails_no_row_where_the_spec_says_what_it_means(
    tmp_path: Path, on_null: str, prompt: dict[str, Any]
) -> None:
    put_nulls(tmp_path, 3)
    changes: dict[str, Any] = {"prompt": prompt, "max_failed_fraction": 0.0}
    with pytest.raises(FailedRowsError, match=r"3 of 20 rows failed, .* no plan was made"):
        plan_job(fake_spec(tmp_path, **changes), DS)
    spec = fake_spec(tmp_path, input={"on_null": on_null}, **changes)
    report = finish(plan := plan_job(spec, DS))
    num_skipped = 3 if on_null == "skip" else 0
    assert (report.num_rows_in, report.num_failed_rows) == (20, 0)
    assert report.plan.num_unasked_rows == num_skipped
    assert report.num_rows_out == 20 - num_skipped
    for row in (rows := published(spec))[:3]:
        assert row["error"] is None
        assert (row["status"] == "skipped") == (row["generated_text"] is None) == bool(num_skipped)
    assert all(row["generated_text"] for row in rows[3:])
    said = format_plan(plan.manifest, "x"), format_summary(report), render_report(report)
    assert ["skipped" in text.lower() for text in said] == [bool(num_skipped)] * 3


def test_an_empty_value_is_that_of_a_row_with_an_empty_text(tmp_path: Path) -> None:
    [row, *_] = put_nulls(tmp_path, 1)
    spec = fake_spec(tmp_path, input={"on_null": "empty"})
    finish(plan_job(spec, DS))
    wanted = fake_text(list(f"Answer. {row['document']}|".encode()))
    assert published(spec)[0]["generated_text"] == wanted


def test_of_several_prompts_only_those_that_place_it_are_skipped(tmp_path: Path) -> None:
    [row, *_] = put_nulls(tmp_path, 1)
    finish(plan_job(spec := several(tmp_path, input={"on_null": "skip"}), DS))
    answers = rows_by_key(spec)[row["row_key"]]
    statuses = {name: answers[name]["status"] for name in spec.prompts}
    assert statuses == {"relevant": "skipped", "summary": "cut_off", "topic": "skipped"}


def test_a_chat_in_a_column_has_no_empty_text(tmp_path: Path) -> None:
    prompt = {"messages": "document", "template": None, "system": None}
    with pytest.raises(SpecError, match=r"input\.on_null: prompt\.messages has no empty text"):
        fake_spec(tmp_path, input={"on_null": "empty"}, prompt=prompt)
