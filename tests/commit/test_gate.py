"""The gate before publishing: answers that aren't as the spec expects, and what it measures."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import Batchllm
from support.answers_job import NEXT, TYPED, asking, published
from support.fake_job import DS, document_rows, fake_spec, finish, write_table
from support.lake_tables import LAKES
from support.prompts_job import rows_by_key, several

from batchllm_operator.commit.commit_run import commit_run
from batchllm_operator.commit.report import load_report
from batchllm_operator.errors import ExitCode, ExpectationError, SpecError
from batchllm_operator.plan.plan_job import plan_job
from batchllm_operator.report import format_summary
from batchllm_operator.report.page import render_report
from batchllm_operator.run.run_shards import run_worker
from batchllm_operator.shards.reports import REFUSED_FILE
from batchllm_operator.spec import JobSpec

COPIES: dict[str, Any] = {"generated_text": {"duplicate": {"max": 0.3}}}


def put(folder: Path, ds: str = DS, num_documents: int = 4) -> None:
    """Half of the rows are copies of others."""
    rows = document_rows(num_documents, 5)
    write_table(
        folder / "documents", [*rows, *({**r, "row_key": r["row_key"] + "b"} for r in rows)], ds
    )


def test_answers_that_are_not_as_expected_are_published_once_they_are_accepted(
    tmp_path: Path, batchllm: Batchllm
) -> None:
    put(tmp_path)
    plan = plan_job(fake_spec(tmp_path, expect=COPIES), DS)
    run_worker(plan)
    done = batchllm("commit", "--plan", plan.folder.uri)
    assert done.code == ExitCode.REFUSED
    for said in (
        "1 of 1 expectation not met: generated_text: duplicate is 0.5, expected at most 0.3.",
        "Nothing was published; what was generated is kept.",
        f"`batchllm commit --plan {plan.folder.uri} --accept`",
    ):
        assert said in done.err
    assert not (tmp_path / "out" / f"ds={DS}").exists()
    assert "duplicate is 0.5" in json.loads(plan.folder.read_bytes(REFUSED_FILE))["reason"]
    assert batchllm("commit", "--plan", plan.folder.uri, "--accept").code == 0
    assert len(published(plan.manifest.spec)) == 40
    report = load_report(plan.folder.uri)
    [measured] = report.expectations
    assert (measured.value, measured.is_met) == (0.5, False)
    assert "NOT MET" in format_summary(report)
    assert "what isn&#39;t met was accepted" in render_report(report)
    assert commit_run(plan) == report  # a task that is cleared


def test_bounds_that_are_mended_publish_what_was_generated(tmp_path: Path) -> None:
    put(tmp_path)
    plan = plan_job(fake_spec(tmp_path, expect=COPIES), DS)
    run_worker(plan)
    with pytest.raises(ExpectationError) as refused:
        commit_run(plan)
    assert [each["value"] for each in refused.value.result["expectations"]] == [0.5]
    mended = {"generated_text": {"duplicate": {"max": 0.5}, "empty": {"max": 0}}}
    again = plan_job(fake_spec(tmp_path, expect=mended), DS)
    assert again.folder == plan.folder
    assert [each.is_met for each in commit_run(again).expectations] == [True, True]


def shares(texts: list[str]) -> dict[str, float]:
    return {text: number / len(texts) for text, number in Counter(texts).items()}


@pytest.mark.parametrize("name", LAKES)
def test_numbers_are_those_of_the_published_rows_and_days_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    expect = {
        "label": {"values": {"yes": {"min": 0}}, "drift": {"max": 1}},
        "probability": {"range": {"min": 0, "max": 1}},
        "status": {"values": {"ok": {"min": 1}}},
    }
    lake = LAKES[name](str(tmp_path), tmp_path, monkeypatch, "answers")
    output = {"uri": lake.address, "staging_uri": lake.staging}
    task = {"task": "classify", "labels": ["yes", "no"]}
    spec = asking(tmp_path, **task, output=output, expect=expect)
    for ds, num_documents in ((DS, 4), (NEXT, 7)):
        put(tmp_path, ds, num_documents)
        report = finish(plan := plan_job(spec, ds))
    first, second = ([row["label"] for row in published(spec, ds)] for ds in (DS, NEXT))
    found = {(each.column, each.what): each for each in report.expectations}
    yes, drift = found["label", "values.yes"], found["label", "drift"]
    assert yes.value == pytest.approx(shares(second).get("yes", 0))
    assert yes.earlier == {DS: pytest.approx(shares(first).get("yes", 0))}
    moved = abs(shares(second).get("yes", 0) - shares(first).get("yes", 0))
    assert drift.value == pytest.approx(moved)
    assert drift.earlier == {}  # nothing was published before the first day
    probabilities = [row["probability"] for row in published(spec, NEXT)]
    assert found["probability", "range.min"].value == min(probabilities)
    assert found["status", "values.ok"].value == 1
    assert f"{DS} " in render_report(report)
    # Without its notes, a commit that was stopped measures what the table holds.
    for name in ("report.json", "committed.json"):
        plan.folder.remove(name)
    assert commit_run(plan).expectations == report.expectations


def test_answers_to_several_prompts_are_measured_without_those_that_were_skipped(
    tmp_path: Path,
) -> None:
    put(tmp_path)
    prompts = {
        "topic": {
            "template": "{document}|{query}",
            "response_format": {"type": "choice", "choices": ["a", "b"]},
        },
        "more": {"template": "{query}", "when": "topic == 'a'", "sampling": {"max_tokens": 3}},
    }
    expect = {
        "topic.generated_text": {"values": {"a": {"min": 0}}},
        "more.generated_text": {"missing": {"max": 0}, "quantiles": {"p50": {"min": 1}}},
        "more.num_output_tokens": {"quantiles": {"p100": {"max": 2}}},
    }
    spec = several(tmp_path, prompts, expect=expect)
    run_worker(plan_job(spec, DS))
    run_worker(plan := plan_job(spec, DS))
    with pytest.raises(ExpectationError, match=r"more.num_output_tokens: quantiles.p100 is 3, exp"):
        commit_run(plan)
    values = {each.what: each.value for each in commit_run(plan, accept=True).expectations}
    rows = rows_by_key(spec).values()
    topics = [row["topic"]["generated_text"] for row in rows]
    texts = [row["more"]["generated_text"] for row in rows if row["more"]["status"] != "skipped"]
    assert 0 < len(texts) < len(topics)
    assert values["values.a"] == shares(topics)["a"]
    assert values["missing"] == 0
    assert values["quantiles.p50"] == sorted(map(len, texts))[(len(texts) + 1) // 2 - 1]


@pytest.mark.parametrize(
    ("column", "expected", "message"),
    [
        (
            "text",
            {"empty": {"max": 0}},
            "expect: 'text' is no column of the answers; they have gen",
        ),
        ("query", {"empty": {"max": 0}}, "expect: 'query' is no column of the answers"),
        (
            "count",
            {"empty": {"max": 0}},
            r"expect\.count\.empty: is for text; the column holds int64",
        ),
        (
            "tags",
            {"values": {"new": {"max": 1}}},
            r"is for text, whole numbers and booleans; the c",
        ),
        (
            "rating",
            {"quantiles": {"p50": {"min": 1}}},
            "is for text and whole numbers; the column h",
        ),
        ("summary", {"range": {"min": 1}}, "is for numbers; the column holds"),
        ("summary", {"matches": {"(": {"min": 1}}}, r"expect\.summary\.matches: '\(': "),
        ("error", {"missing": {"min": 1}}, r"expect\.error: rows with an error .*; bound status"),
        (
            "status",
            {"values": {"faild": {"max": 0}}},
            r"expect\.status\.values: 'faild' is none of ok, cut_off, repetition, invalid_output",
        ),
    ],
)
def test_what_the_answers_cannot_have_is_refused_by_plan(
    tmp_path: Path, column: str, expected: dict[str, Any], message: str
) -> None:
    put(tmp_path)
    fields = {"response_format": TYPED, "output": {"uri": f"{tmp_path}/out", "carry": ["query"]}}
    spec: JobSpec = asking(tmp_path, **fields, expect={column: expected})
    with pytest.raises(SpecError, match=message):
        plan_job(spec, DS)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({}, "expects nothing"),
        ({"empty": {}}, "needs min, max or both"),
        ({"empty": {"max": 5}}, "empty: a share is from 0 to 1"),
        ({"range": {"min": 2, "max": 1}}, "min is above max"),
        ({"quantiles": {"p101": {"max": 1}}}, "p101 is no quantile; write p50, p99.9 or such"),
        ({"missing": {"max": True}}, "must be a number"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(expected: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        fake_spec("/lake", expect={"generated_text": expected})


@pytest.mark.parametrize("bounds", [{"rejected": {"max": 0.05}}, {"ok": {"min": 0.95}}])
def test_a_plan_whose_answers_cannot_be_as_expected_is_not_made(
    tmp_path: Path, bounds: dict[str, Any]
) -> None:
    rows = document_rows(4, 5)
    rows[3]["query"] = rows[5]["query"] = None
    write_table(tmp_path / "documents", rows)
    limit = {"max_failed_fraction": 0.5}
    with pytest.raises(ExpectationError, match=r"even if all other rows are ok; no plan was made"):
        plan_job(fake_spec(tmp_path, expect={"status": {"values": bounds}}, **limit), DS)
    assert not (tmp_path / "out").exists()
    topic = several(tmp_path, expect={"topic.status": {"values": bounds}}, **limit)
    with pytest.raises(ExpectationError, match=r"topic\.status: values\."):
        plan_job(topic, DS)
    plan_job(several(tmp_path, expect={"summary.status": {"values": bounds}}, **limit), DS)
